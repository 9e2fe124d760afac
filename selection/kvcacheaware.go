// SPDX-License-Identifier: Apache-2.0

package selection

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/fleet"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/plan"
	"github.com/seed-2fa47a1e/caddy-kv-cache/metrics"
)

func init() {
	caddy.RegisterModule(new(KVCacheAware))
}

// KVCacheAware is a policy that sends an LLM request to the replica where it
// costs least: where the longest part of its prompt is in the KV cache already,
// unless waiting there costs more than computing it elsewhere. Where no replica
// holds any of it, the one with the most room for the next hit is taken.
//
// It works without any option. Each replica's Prometheus page is polled; what
// an engine does not tell is reckoned from the requests that went through this
// Caddy.
type KVCacheAware struct {
	// The name of this group of upstreams in metrics, logs and the admin API.
	// Default: "default", and a number after it where several policies have no name.
	Name string `json:"name,omitempty"`

	// What recomputing one prompt token counts against one token of queue.
	// Higher follows the cache more, lower spreads load more. Default: 5.
	MatchWeight float64 `json:"match_weight,omitempty"`

	// What one request in flight at a replica counts at most, in tokens of
	// queue. It counts as much as the prompt to be placed has to compute there,
	// which holds up the sequences that decode, but no less than a quarter of
	// this. Default: 400.
	RequestCost float64 `json:"request_cost,omitempty"`

	// How many bytes of a request's body are looked at, at most. What is beyond
	// is forwarded unseen. Each request keeps up to this much in memory until
	// it is sent; with lb_retry_match, which may ask for it again, until it is
	// answered. Default: 4MiB.
	MaxBody int64 `json:"max_body,omitempty"`

	// The size of a replica's KV cache, in tokens, where its engine does not
	// tell. Default: 500000.
	KVCapacity int `json:"kv_capacity,omitempty"`

	// How the replicas' metrics are polled.
	Metrics *Polling `json:"metrics,omitempty"`

	// Where the replicas publish what they store in their KV caches and drop
	// from them. The choice then follows what they hold by their own account.
	// To tell which tokens a prompt consists of, the replica that has answered
	// a request is asked for them afterwards, at most five times a second
	// (vLLM's /render, else /tokenize). Default: none; nothing is opened.
	KVEvents *Events `json:"kv_events,omitempty"`

	// The key of the replicas' API (vLLM's --api-key), for asking them about
	// tokens and models. It may have placeholders that are known when the
	// config is loaded, such as {env.*} and {file.*}. Default: none.
	APIKey string `json:"api_key,omitempty"`

	// How requests wait that can't start at once.
	Queue *Queue `json:"queue,omitempty"`

	// A request header, such as X-Session-ID, whose value keeps all requests
	// that carry it at one replica as long as that is available. The first of
	// them is placed by cost. Default: none.
	PinHeader string `json:"pin_header,omitempty"`

	// What tells tenants apart, as text with placeholders such as
	// {http.request.header.Authorization} or {http.auth.user.id}. It goes into
	// the hashes of the prompt, so that tenants share no belief about a cache
	// and none can tell from where its requests go what another has asked.
	// Requests for which it is empty are a tenant of their own. Default: none;
	// all requests are alike.
	Tenant string `json:"tenant,omitempty"`

	// The policy that decides on requests without a prompt: other paths, other
	// methods, bodies in which no prompt is found. Default: `least_conn`.
	FallbackRaw json.RawMessage `json:"fallback,omitempty" caddy:"namespace=http.reverse_proxy.selection_policies inline_key=policy"`
	fallback    reverseproxy.Selector

	// A file to write a line to for each request. Default: none.
	Capture *Capture `json:"capture,omitempty"`

	Rollout

	core
	schedule *plan.Scheduler
	pump     *pump
	pins     *pins
	scratch  sync.Pool // *asking
}

// CaddyModule returns the Caddy module information.
func (*KVCacheAware) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "http.reverse_proxy.selection_policies.kv_cache_aware",
		New: func() caddy.Module { return new(KVCacheAware) },
	}
}

// Provision sets up the policy. It opens no connection: polling begins when
// the config that the policy belongs to is started.
func (p *KVCacheAware) Provision(ctx caddy.Context) error {
	if p.MatchWeight == 0 {
		p.MatchWeight = plan.Default.MatchWeight
	}
	if p.RequestCost == 0 {
		p.RequestCost = plan.Default.PerRequest
	}
	if p.PinHeader != "" {
		p.pins = newPins()
	}
	var err error
	if p.fallback, err = loadFallback(ctx, p, &p.FallbackRaw); err != nil {
		return err
	}
	if p.Metrics == nil {
		p.Metrics = new(Polling)
	}
	if err := p.core.provision(ctx, coreConfig{
		policy:     "kv_cache_aware",
		name:       p.Name,
		maxBody:    p.MaxBody,
		kvCapacity: p.KVCapacity,
		polling:    p.Metrics,
		events:     p.KVEvents,
		apiKey:     p.APIKey,
		seed:       fleet.Process.Seed,
		tenant:     p.Tenant,
		changed:    func(now time.Time) { p.schedule.Event(now) },
		explain:    p.explain,
		waiting:    func() int { return p.schedule.Waiting() },
		capture:    p.Capture,
	}); err != nil {
		return err
	}
	p.schedule = plan.NewScheduler(fleet.Process.Index)
	p.schedule.Rule = plan.Rule{MatchWeight: p.MatchWeight, PerRequest: p.RequestCost}
	p.schedule.Terms = p.Queue.terms()
	p.pump = newPump(p.schedule)
	return p.Rollout.provision(ctx, &p.core)
}

// Validate checks the options.
func (p *KVCacheAware) Validate() error {
	if p.MatchWeight < 0 {
		return fmt.Errorf("match_weight is %v, but can't be negative", p.MatchWeight)
	}
	if p.RequestCost < 0 {
		return fmt.Errorf("request_cost is %v, but can't be negative", p.RequestCost)
	}
	if p.KVCapacity < 0 {
		return fmt.Errorf("kv_capacity is %d tokens, but can't be negative", p.KVCapacity)
	}
	if p.MaxBody < 0 {
		return fmt.Errorf("max_body is %d bytes, but can't be negative", p.MaxBody)
	}
	if err := p.KVEvents.validate(); err != nil {
		return err
	}
	if err := p.Queue.validate(); err != nil {
		return err
	}
	return p.Metrics.validate()
}

// Cleanup lets go of the replicas.
func (p *KVCacheAware) Cleanup() error {
	p.Rollout.cleanup()
	return p.core.cleanup()
}

// Select returns the upstream for the request, or nil if none is available. It
// may hold the request back while the replica where it costs least is busy.
func (p *KVCacheAware) Select(pool reverseproxy.UpstreamPool, r *http.Request, w http.ResponseWriter) *reverseproxy.Upstream {
	start := time.Now()
	d, first := p.decide(r)
	if !first {
		d.retract(r.Context(), start)
	}
	if first && d.reason == "" && p.KVEvents != nil {
		d.pupil, d.path = p.fleet, r.URL.Path
		d.body.wanted = d.teaches
	}
	if p.otherDecides(d) {
		return p.selectOther(d, pool, r, w, start)
	}
	if d.reason != "" {
		return p.fallBack(p.fallback, notEligible, d, pool, r, w, start)
	}
	a := p.ask(d, pool, r, start)
	sent := p.schedule.Submit(&a.Request, start)
	a.held = a.Ready() != nil
	if !sent {
		p.pump.run()
		if !a.wait(r.Context(), p.schedule) {
			p.counts.Waited(metrics.WaitLeft, time.Since(start))
			return nil // the client left
		}
	}
	upstream := a.upstream
	if upstream != nil {
		d.landBeside()
	}
	if a.Holder != nil {
		a.prefix.Prune()
	}
	p.tell(a, r)
	switch {
	case a.choice.Refused:
		d.refused = true
		refuse(w, a.choice.RetryAfter)
	case d.refused && w != nil: // Caddy has tried again, and there was room
		w.Header().Del("Retry-After")
	}
	p.done(a)
	return upstream
}

// tell lets operators know of what was decided.
func (p *KVCacheAware) tell(a *asking, r *http.Request) {
	decided, outcome := a.start.Add(a.choice.Waited), metrics.WaitSent
	switch {
	case a.choice.Refused:
		p.none(r, ReasonRefused, decided)
		outcome = metrics.WaitRefused
	case a.upstream == nil:
		p.none(r, ReasonNone, decided)
		outcome = metrics.WaitNone
	default:
		p.note(r, a.decision, decided)
		if a.choice.Open < len(a.Replicas) && a.pinned < 0 {
			p.noteAvoided(a.decision, a.pool, decided)
		}
	}
	if a.held {
		p.counts.Waited(outcome, a.choice.Waited)
	}
}

// asking is one request that wants a replica.
type asking struct {
	plan.Request
	policy   *KVCacheAware
	decision *decision
	pool     reverseproxy.UpstreamPool
	start    time.Time
	prefix   fleet.Prefix
	serves   []bool // room for Serves
	session  string // value of the pin header
	pinned   int    // place of the session's replica, -1 if there is none
	held     bool
	room     []*fleet.Replica // for Replicas of a dynamic pool

	// set by Send
	upstream *reverseproxy.Upstream
	choice   plan.Choice
}

func (p *KVCacheAware) ask(d *decision, pool reverseproxy.UpstreamPool, r *http.Request, now time.Time) *asking {
	a, ok := p.scratch.Get().(*asking)
	if !ok {
		a = new(asking)
	}
	a.policy, a.decision, a.pool, a.start = p, d, pool, now
	a.upstream, a.held, a.session, a.pinned = nil, false, "", -1
	a.Replicas, a.room = p.replicas(pool, a.room, now)
	a.Chain, a.Key = d.prompt.Chain, d.prompt.TurnKey
	a.Tokens, a.Extra, a.PerBlock = p.tokens(&d.prompt), p.extraTokens(&d.prompt), p.tokensPerBlock(&d.prompt)
	a.Beyond = a.PerBlock / 2
	a.Caller, a.Holder = a, nil
	if prefix := p.fleet.Prefix(&a.prefix, a.Chain, a.PerBlock); prefix != nil {
		a.Holder = prefix
	}
	a.Serves = p.fleet.Serving(d.prompt.Model, a.Replicas, &a.serves, now)
	a.Priority, a.Sharer = p.Queue.of(r, &d.prompt)
	if p.pins != nil {
		if a.session = r.Header.Get(p.PinHeader); a.session != "" {
			if home, ok := p.pins.get(a.session, d.seed); ok {
				a.pinned = a.find(home)
			}
		}
	}
	return a
}

// done gives the room of a request back that the scheduler has no hold of.
func (p *KVCacheAware) done(a *asking) {
	if a.held {
		return
	}
	a.decision, a.pool, a.Chain, a.Replicas, a.upstream = nil, nil, nil, nil, nil
	a.prefix.Drop()
	p.scratch.Put(a)
}

// find returns the place of an available replica that was not tried and is not
// avoided, or -1.
func (a *asking) find(addr string) int {
	for i, p := range a.Replicas {
		if p.Addr == addr && a.pool[i].Available() && !a.decision.tried(p) && p.Avoided(a.start) == fleet.Eligible {
			return i
		}
	}
	return -1
}

// Open implements plan.Caller.
func (a *asking) Open(i int) bool {
	if a.pinned >= 0 && i != a.pinned && a.pool[a.pinned].Available() {
		return false
	}
	if a.pool[i].Available() {
		return true
	}
	if !a.pool[i].Healthy() { // and not just full
		a.Replicas[i].Unavailable(a.start)
	}
	return false
}

// Tried implements plan.Caller.
func (a *asking) Tried(i int) bool { return a.decision.tried(a.Replicas[i]) }

// Send implements plan.Caller.
func (a *asking) Send(c plan.Choice) (late *fleet.Reservation) {
	a.choice = c
	if c.Index < 0 {
		return nil
	}
	a.upstream = a.pool[c.Index]
	replica := a.Replicas[c.Index]
	at := a.decision.attempt()
	*at = attempt{
		replica: replica,
		rank:    a.rankAt(replica),
		matched: c.Matched,
		reason:  a.reasonOf(c),
		key:     a.Key,
		cost:    c.Cost,
		next:    c.Next,
		waited:  c.Waited,
		Reservation: fleet.Reservation{
			Prompt:   a.Tokens + a.Extra,
			Uncached: c.Uncached,
			Hit:      c.Hit,
			Bytes:    textBytes(&a.decision.prompt),
			Chain:    a.Chain,
		},
	}
	a.decision.send(at, a.start.Add(c.Waited))
	if a.session != "" {
		a.policy.pins.put(a.session, a.decision.seed, replica.Addr)
	}
	if a.decision.muted {
		return nil
	}
	return &at.Reservation
}

// rankAt is the data-parallel rank of a replica that holds the prompt, empty
// where that is not known.
func (a *asking) rankAt(p *fleet.Replica) string {
	if a.Holder == nil {
		return ""
	}
	rank, ok := a.prefix.Rank(p)
	if !ok {
		return ""
	}
	return strconv.Itoa(rank)
}

func (a *asking) reasonOf(c plan.Choice) Reason {
	switch {
	case a.pinned >= 0 && c.Index == a.pinned:
		return ReasonPinned
	case c.Open == 1:
		return ReasonOnly
	case c.Longest == 0:
		return ReasonNoMatch
	case c.Matched == c.Longest:
		return ReasonMatch
	default:
		return ReasonBalance
	}
}

// wait holds the request until it is sent. It returns false if the client left.
func (a *asking) wait(ctx context.Context, s *plan.Scheduler) bool {
	select {
	case <-a.Ready():
		return true
	case <-ctx.Done():
		return !s.Leave(&a.Request, time.Now())
	}
}

// Interface guards
var (
	_ caddy.Provisioner     = (*KVCacheAware)(nil)
	_ caddy.Validator       = (*KVCacheAware)(nil)
	_ caddy.CleanerUpper    = (*KVCacheAware)(nil)
	_ reverseproxy.Selector = (*KVCacheAware)(nil)
)
