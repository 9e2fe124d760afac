// SPDX-License-Identifier: Apache-2.0

package selection

import (
	"net/http"
	"slices"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/admin"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/fleet"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/plan"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/prompt"
	"github.com/seed-2fa47a1e/caddy-kv-cache/metrics"
)

// show lets operators see the policy, through the admin API and the metrics,
// until it is hidden.
func (c *core) show(cfg coreConfig) {
	o := &operated{c, cfg.explain, cfg.waiting}
	unwatch := metrics.Watch(metrics.Source{Fleet: o.view, Index: fleet.Process.View})
	hide := admin.Show(o)
	c.hide = func() { unwatch(); hide() }
}

// operated is a policy as operators see it.
type operated struct {
	*core
	explain func(*http.Request) *admin.Explanation
	waiting func() int
}

// Name implements admin.Policy.
func (o *operated) Name() string { return o.policy }

// Fleet implements admin.Policy.
func (o *operated) Fleet() *fleet.Fleet { return o.fleet }

// Waiting implements admin.Policy.
func (o *operated) Waiting() int { return o.waiting() }

// Recent implements admin.Policy.
func (o *operated) Recent(limit int) []admin.Decision { return o.recent.list(o.fleet.Name, limit) }

// Explain implements admin.Policy.
func (o *operated) Explain(r *http.Request) *admin.Explanation { return o.explain(r) }

// Available implements admin.Policy.
func (o *operated) Available(addr string) bool {
	for _, u := range o.pool() {
		if u.String() == addr {
			return u.Available()
		}
	}
	return false
}

// view is what is exported of the policy's fleet.
func (o *operated) view() metrics.FleetView {
	return metrics.FleetView{
		Name:          o.fleet.Name,
		Waiting:       o.waiting(),
		BytesPerToken: o.fleet.BytesPerToken(),
		Learner:       o.fleet.LearnerView(),
		Replicas:      o.fleet.Views(time.Now()),
	}
}

// pool is what a request would be given to choose from. Dynamic upstreams exist
// only within a request; for them it is the replicas seen of late, whose health
// in Caddy's eyes is not known.
func (c *core) pool() reverseproxy.UpstreamPool {
	if k := c.known.Load(); k != nil {
		return k.upstreams
	}
	if c.handler != nil && !c.dynamic {
		return c.handler.Upstreams
	}
	members := c.fleet.Members()
	pool := make(reverseproxy.UpstreamPool, len(members))
	for i, m := range members {
		pool[i] = &reverseproxy.Upstream{Host: new(reverseproxy.Host), Dial: m.Addr}
	}
	return pool
}

// consider reads a request as Select does, and begins its explanation. Nothing
// of it is kept, and the rest of its body is left unread.
func (c *core) consider(r *http.Request) (*decision, *admin.Explanation) {
	caddyhttp.NewTestReplacer(r) // knows what does not come from other handlers
	d := new(decision)
	d.reason = d.read(r, &c.outlook)
	if d.body != nil {
		d.body.finish()
		_ = r.Body.Close() // the reader that peek left; it returns nil
	}
	x := &admin.Explanation{
		Fleet:     c.fleet.Name,
		Policy:    c.policy,
		Reason:    string(d.reason),
		API:       prompt.APIOf(r.URL.Path).String(),
		Blocks:    len(d.prompt.Chain),
		Truncated: d.prompt.Truncated,
	}
	if d.reason == "" {
		x.PromptTokens = c.tokens(&d.prompt) + c.extraTokens(&d.prompt)
	}
	return d, x
}

// candidates lists a pool as far as every policy sees it alike.
func (c *core) candidates(pool reverseproxy.UpstreamPool, now time.Time) []admin.Candidate {
	out := make([]admin.Candidate, len(pool))
	for i, u := range pool {
		p := c.replica(pool, i, now)
		out[i] = admin.Candidate{Replica: p.Addr, State: p.Avoided(now).String(), Available: u.Available()}
	}
	return out
}

// explain tells where a request would go and why.
func (p *KVCacheAware) explain(r *http.Request) *admin.Explanation {
	now, pool := time.Now(), p.pool()
	d, x := p.consider(r)
	x.Candidates = p.candidates(pool, now)
	if d.reason != "" {
		return x
	}
	a := p.ask(d, pool, r, now)
	a.Caller = onlooker{a}
	f := p.schedule.Explain(&a.Request, now)
	x.Key, x.Waits, x.Ahead = keyText(a.Key), f.Waits, f.Ahead
	for i, o := range f.Options {
		matched := float64(o.Matched) * a.PerBlock
		c := &x.Candidates[i]
		c.Allowed = o.Allowed
		c.Matched, c.Hit, c.Uncached = &matched, &o.Hit, &o.Uncached
		c.Cost = costOf(o.Costs)
	}
	x.Reason = string(ReasonNone)
	if f.Index >= 0 {
		x.Replica, x.Reason = a.Replicas[f.Index].Addr, string(a.reasonOf(f.Choice))
		x.Candidates[f.Index].Chosen = true
	}
	p.done(a)
	return x
}

func costOf(c plan.Costs) *admin.Cost {
	return &admin.Cost{
		Total:    c.Total(),
		Queue:    c.Queue,
		Compute:  c.Compute,
		Requests: c.Requests,
		Pressure: c.Pressure,
		Away:     c.Away,
		Pace:     c.Pace,
	}
}

// onlooker asks for a request that is not sent.
type onlooker struct{ *asking }

// Open implements plan.Caller. Unlike that of a request it changes nothing.
func (o onlooker) Open(i int) bool {
	return (o.pinned < 0 || i == o.pinned) && o.asking.pool[i].Available()
}

// Send implements plan.Caller.
func (onlooker) Send(plan.Choice) (late *fleet.Reservation) { return nil }

// explain tells where a request would go and why.
func (p *PrefixHash) explain(r *http.Request) *admin.Explanation {
	now, pool := time.Now(), p.pool()
	d, x := p.consider(r)
	x.Candidates = p.candidates(pool, now)
	value := p.headerValue(r)
	if d.reason != "" && value == "" {
		return x
	}
	key := p.headerKey(value, r)
	if value == "" {
		key = p.depths.Peek(&d.prompt)
	}
	x.Key, x.Reason = keyText(key), string(ReasonNone)
	p.place(x.Candidates, key, pool, now)
	allowed := new(homes)
	p.gather(allowed, d, key, pool, now)
	if len(allowed.at) == 0 {
		return x
	}
	chosen, reason := p.choose(allowed)
	x.Replica, x.Reason = chosen.replica.Addr, string(reason)
	for i, u := range pool {
		x.Candidates[i].Chosen = u == chosen.upstream
		x.Candidates[i].Allowed = slices.ContainsFunc(allowed.at, func(h place) bool { return h.upstream == u })
	}
	return x
}

// place fills in each candidate's place in the order of a key, and its load.
func (p *PrefixHash) place(candidates []admin.Candidate, key uint64, pool reverseproxy.UpstreamPool, now time.Time) {
	orders := make([]uint64, len(pool))
	for i := range pool {
		replica := p.replica(pool, i, now)
		orders[i] = plan.Rendezvous(key, replica.ID)
		outstanding := replica.Outstanding()
		candidates[i].Outstanding = &outstanding
	}
	for i := range orders {
		at := 1
		for _, other := range orders {
			if other > orders[i] {
				at++
			}
		}
		candidates[i].Place = &at
	}
}

// Interface guards
var (
	_ admin.Policy = (*operated)(nil)
	_ plan.Caller  = onlooker{}
)
