// SPDX-License-Identifier: Apache-2.0

package selection

import (
	"encoding/json"
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/fleet"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/plan"
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
	// Higher follows the cache more, lower spreads load more. Default: 3.
	MatchWeight float64 `json:"match_weight,omitempty"`

	// What one request in flight at a replica counts, in tokens of queue:
	// sequences that decode slow every step of the engine. Default: 500.
	RequestCost float64 `json:"request_cost,omitempty"`

	// How many bytes of a request's body are looked at, at most. What is beyond
	// is forwarded unseen. Each request in flight keeps up to this much in
	// memory. Default: 4MiB.
	MaxBody int64 `json:"max_body,omitempty"`

	// The size of a replica's KV cache, in tokens, where its engine does not
	// tell. Default: 500000.
	KVCapacity int `json:"kv_capacity,omitempty"`

	// How the replicas' metrics are polled.
	Metrics *Polling `json:"metrics,omitempty"`

	// A request header, such as X-Session-ID, whose value keeps all requests
	// that carry it at one replica as long as that is available. The first of
	// them is placed by cost. Default: none.
	PinHeader string `json:"pin_header,omitempty"`

	// The policy that decides on requests without a prompt: other paths, other
	// methods, bodies in which no prompt is found. Default: `least_conn`.
	FallbackRaw json.RawMessage `json:"fallback,omitempty" caddy:"namespace=http.reverse_proxy.selection_policies inline_key=policy"`
	fallback    reverseproxy.Selector

	core
	rule    plan.Rule
	pins    *pins
	scratch sync.Pool // *gathering
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
	p.rule = plan.Rule{MatchWeight: p.MatchWeight, PerRequest: p.RequestCost}
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
	return p.core.provision(ctx, coreConfig{
		policy:     "kv_cache_aware",
		name:       p.Name,
		maxBody:    p.MaxBody,
		kvCapacity: p.KVCapacity,
		polling:    p.Metrics,
		seed:       fleet.Process.Seed,
	})
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
	return p.Metrics.validate()
}

// Cleanup lets go of the replicas.
func (p *KVCacheAware) Cleanup() error { return p.core.cleanup() }

// gathering is the room that one Select works in.
type gathering struct {
	blocks     []int32
	candidates []plan.Candidate
	loads      []fleet.Load
	choices    []choice
}

// choice is what a candidate stands for.
type choice struct {
	upstream *reverseproxy.Upstream
	replica  *fleet.Replica
	matched  int // blocks
	hit      float64
}

// Select returns the upstream for the request, or nil if none is available.
func (p *KVCacheAware) Select(pool reverseproxy.UpstreamPool, r *http.Request, w http.ResponseWriter) *reverseproxy.Upstream {
	start := time.Now()
	d, first := p.decide(r)
	if !first {
		d.retract(start)
	}
	if d.reason != "" {
		return p.fallBack(p.fallback, d, pool, r, w, start)
	}
	g := p.room()
	defer p.scratch.Put(g)
	p.gather(g, d, pool, start)
	pick, reason := p.choose(g, d, r)
	if pick < 0 {
		p.none(start)
		return nil
	}
	c := &g.choices[pick]
	tokens := p.tokens(&d.prompt)
	p.send(d, &attempt{
		replica: c.replica,
		matched: c.matched,
		reason:  reason,
		Reservation: fleet.Reservation{
			Prompt:   tokens + p.extraTokens(&d.prompt),
			Uncached: g.candidates[pick].Uncached,
			Hit:      c.hit,
			Bytes:    textBytes(&d.prompt),
		},
	}, start)
	if e := p.logger.Check(zapcore.DebugLevel, "chose a replica"); e != nil {
		e.Write(zap.String("replica", c.replica.Addr), zap.String("reason", string(reason)),
			zap.Int("prompt_tokens", int(tokens)), zap.Int("matched_tokens", int(c.hit)),
			zap.Int("queued_tokens", int(g.candidates[pick].Queue)), zap.Int("candidates", len(g.candidates)))
	}
	return c.upstream
}

func (p *KVCacheAware) room() *gathering {
	if g, ok := p.scratch.Get().(*gathering); ok {
		return g
	}
	return new(gathering)
}

// gather fills g with the replicas that may serve the request: those available,
// not tried before and not to be avoided, or the next best set that is not empty.
func (p *KVCacheAware) gather(g *gathering, d *decision, pool reverseproxy.UpstreamPool, now time.Time) {
	g.blocks = p.fleet.Registry.Index.Match(d.prompt.Chain, g.blocks[:0])
	tokens, extra := p.tokens(&d.prompt), p.extraTokens(&d.prompt)
	perBlock := p.tokensPerBlock(&d.prompt)
	mean := p.fleet.Rate()
	for strictness := strictest; strictness >= anyAvailable; strictness-- {
		g.candidates, g.choices, g.loads = g.candidates[:0], g.choices[:0], g.loads[:0]
		for i, u := range pool {
			replica := p.replica(pool, i, now)
			if !u.Available() {
				if strictness == strictest {
					replica.Unavailable(now)
				}
				continue
			}
			load := replica.Load(now)
			if !strictness.allows(load, d.tried(replica)) {
				continue
			}
			matched := replica.Matched(g.blocks)
			hit := believedHit(float64(matched)*perBlock, tokens, load)
			g.loads = append(g.loads, load)
			g.choices = append(g.choices, choice{upstream: u, replica: replica, matched: matched, hit: hit})
			g.candidates = append(g.candidates, plan.Candidate{
				Queue:      load.Queue,
				Uncached:   max(tokens-hit*load.Trust, load.BlockTokens) + extra,
				Need:       tokens + extra,
				Free:       load.Free(),
				InFlight:   load.InFlight,
				Pace:       load.Rate / mean,
				KVFree:     1 - load.KVUsage.Value,
				Rendezvous: rendezvous(d.prompt.TurnKey, replica.ID),
			})
		}
		if len(g.candidates) > 0 {
			return
		}
	}
}

// strictness says which replicas are good enough. Select takes the strictest
// set that is not empty, so that a request is never refused which the replicas
// available could serve.
type strictness int

const (
	anyAvailable strictness = iota // even one tried already
	untried
	eligible  // and not to be avoided
	strictest // and, if it warms up, with room for another request
)

func (s strictness) allows(l fleet.Load, tried bool) bool {
	return !(s >= untried && tried ||
		s >= eligible && l.Avoid != fleet.Eligible ||
		s >= strictest && l.Room <= 0)
}

// choose picks a candidate and says why, or returns -1 if there is none.
func (p *KVCacheAware) choose(g *gathering, d *decision, r *http.Request) (int, Reason) {
	switch len(g.candidates) {
	case 0:
		return -1, ReasonNone
	case 1:
		return 0, ReasonOnly
	}
	session := ""
	if p.pins != nil {
		session = r.Header.Get(p.PinHeader)
	}
	if session != "" {
		if home, ok := p.pins.get(session); ok {
			for i := range g.choices {
				if g.choices[i].replica.Addr == home {
					return i, ReasonPinned
				}
			}
		}
	}
	pick, _ := p.rule.Choose(g.candidates)
	if session != "" {
		p.pins.put(session, g.choices[pick].replica.Addr)
	}
	longest := 0
	for i := range g.choices {
		longest = max(longest, g.choices[i].matched)
	}
	switch {
	case longest == 0:
		return pick, ReasonNoMatch
	case g.choices[pick].matched == longest:
		return pick, ReasonMatch
	default:
		return pick, ReasonBalance
	}
}

// believedHit is how many of a prompt's tokens the replica will not compute,
// if it holds held of them: whole engine blocks only, and never the last
// token, which the engine needs for its first step.
func believedHit(held, tokens float64, l fleet.Load) float64 {
	blocks := int64(min(held, tokens-1) / l.BlockTokens)
	return max(0, float64(blocks)*l.BlockTokens)
}

// Interface guards
var (
	_ caddy.Provisioner     = (*KVCacheAware)(nil)
	_ caddy.Validator       = (*KVCacheAware)(nil)
	_ caddy.CleanerUpper    = (*KVCacheAware)(nil)
	_ reverseproxy.Selector = (*KVCacheAware)(nil)
)
