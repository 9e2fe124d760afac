// SPDX-License-Identifier: Apache-2.0

package selection

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/fleet"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/plan"
	"github.com/seed-2fa47a1e/caddy-kv-cache/metrics"
)

// Rollout lets another policy decide on all requests or on most of them, while
// this one records what it would have done. docs/shadow.md tells how to go from
// the one to the other.
type Rollout struct {
	// The policy that decides instead of this one. This one follows what happens
	// all the same, so that it knows the caches, and counts what it would have
	// chosen. Default: none.
	OtherRaw json.RawMessage `json:"other,omitempty" caddy:"namespace=http.reverse_proxy.selection_policies inline_key=policy"`

	// How many percent of the requests this policy decides on all the same. All
	// requests of a chat fall to the same policy. Default: 0.
	Share float64 `json:"share,omitempty"`

	other  reverseproxy.Selector
	shadow *metrics.Shadow
}

// provision loads the other policy, if there is one.
func (o *Rollout) provision(ctx caddy.Context, c *core) error {
	if o.Share < 0 || o.Share > 100 || math.IsNaN(o.Share) {
		return fmt.Errorf("share is %v, but must be a percentage", o.Share)
	}
	if o.OtherRaw == nil {
		if o.Share != 0 {
			return errors.New("share needs another policy for the rest: set other")
		}
		return nil
	}
	var named struct {
		Policy string `json:"policy"`
	}
	if err := json.Unmarshal(o.OtherRaw, &named); err != nil {
		return fmt.Errorf("other selection policy: %v", err)
	}
	v, err := ctx.LoadModule(o, "OtherRaw")
	if err != nil {
		return fmt.Errorf("loading the other selection policy: %v", err)
	}
	if own, ok := v.(interface{ mute() }); ok {
		own.mute()
	}
	o.other = v.(reverseproxy.Selector)
	if c.otherName = named.Policy; c.otherName == c.policy {
		c.otherName += " (other)"
	}
	c.otherGroup = metrics.NewGroup(c.fleet.Name, c.otherName)
	o.shadow = metrics.NewShadow(c.fleet.Name)
	return nil
}

func (o *Rollout) cleanup() {
	if o.shadow != nil {
		o.shadow.Close()
	}
}

// unmarshalShadow parses `shadow <policy>`, whose policy may have a block.
func (o *Rollout) unmarshalShadow(d *caddyfile.Dispenser) error {
	if o.OtherRaw != nil {
		return d.Err("the other policy is already specified: shadow and share exclude each other")
	}
	return unmarshalPolicy(d, &o.OtherRaw)
}

// unmarshalShare parses `share <percent> <policy>`.
func (o *Rollout) unmarshalShare(d *caddyfile.Dispenser) error {
	if !d.NextArg() {
		return d.ArgErr()
	}
	share, err := strconv.ParseFloat(strings.TrimSuffix(d.Val(), "%"), 64)
	if err != nil || !(share > 0 && share <= 100) {
		return d.Errf("share is '%s', but must be a percentage above 0", d.Val())
	}
	o.Share = share
	return o.unmarshalShadow(d)
}

// mute makes the policy decide only: whom it decides for books the outcome.
// It is called before the first request.
func (c *core) mute() {
	c.muted = true
	c.group.Close()
	c.group = nil
}

// otherDecides tells whether the other policy decides on the request.
func (p *KVCacheAware) otherDecides(d *decision) bool {
	switch {
	case p.other == nil:
		return false
	case p.Share == 0:
		return true
	case d.reason != "":
		return false // in no group, like every request without a prompt
	}
	return !inShare(d.prompt.TurnKey, p.Share)
}

// inShare tells whether a chat belongs to so many percent of all.
func inShare(key uint64, percent float64) bool {
	const salt = 0x6f75725f73686172 // not the order in which replicas are taken
	return float64(plan.Rendezvous(key, salt)>>11)/(1<<53)*100 < percent
}

// selectOther lets the other policy choose, books its choice, and counts what
// ours would have been.
func (p *KVCacheAware) selectOther(d *decision, pool reverseproxy.UpstreamPool, r *http.Request, w http.ResponseWriter, start time.Time) *reverseproxy.Upstream {
	sent := r.Body
	defer func() { d.takeBack(r, sent) }()
	if d.reason != "" {
		return p.fallBack(p.other, drained, d, pool, r, w, start)
	}
	u := p.delegate(p.other, d, pool, r, w, drained, start)
	i := slices.Index(pool, u)
	if u == nil || i < 0 {
		p.none(r, ReasonNone, start)
		return nil
	}
	now := time.Now()
	a := p.ask(d, pool, r, now)
	a.Caller = onlooker{a}
	f := p.schedule.Explain(&a.Request, now)
	made := f.Options[i]
	at := d.attempt()
	*at = attempt{
		replica: a.Replicas[i],
		matched: made.Matched,
		reason:  ReasonOther,
		key:     a.Key,
		cost:    math.NaN(), // its reasons are not costs
		next:    math.NaN(),
		waited:  now.Sub(start),
		Reservation: fleet.Reservation{
			Prompt:   a.Tokens + a.Extra,
			Uncached: made.Uncached,
			Hit:      made.Hit,
			Bytes:    textBytes(&d.prompt),
			Chain:    a.Chain,
		},
	}
	d.send(at, now)
	d.land()
	if len(d.attempts) == 1 && f.Index >= 0 {
		p.shadow.Decided(f.Index == i, at.Prompt, prospectOf(&made), prospectOf(&f.Options[f.Index]))
	}
	p.note(r, d, now)
	p.done(a)
	return u
}

// prospectOf tells what is expected of a request at a replica.
func prospectOf(o *plan.Option) metrics.Prospect {
	return metrics.Prospect{Hit: o.Hit, FirstToken: prefillTime(o.Load.Queue+o.Uncached, o.Load.Rate)}
}

// prefillTime is how long so many tokens take, for all replicas up to an hour.
func prefillTime(tokens, rate float64) time.Duration {
	seconds := min(max(tokens, 0)/max(rate, 1), 3600)
	return time.Duration(seconds * float64(time.Second))
}

// delegate lets another policy choose among the replicas that this request has
// not tried and that are not barred, as long as there are any.
func (c *core) delegate(policy reverseproxy.Selector, d *decision, pool reverseproxy.UpstreamPool, r *http.Request, w http.ResponseWriter, bar bar, now time.Time) *reverseproxy.Upstream {
	d.body.lend(true)
	defer d.body.lend(false)
	untried := c.leaveOut(pool, func(p *fleet.Replica) bool { return d.tried(p) }, now)
	allowed := c.leaveOut(untried, func(p *fleet.Replica) bool { return bar(p.Avoided(now)) }, now)
	if u := policy.Select(allowed, r, w); u != nil {
		return u
	}
	if len(allowed) < len(untried) {
		if u := policy.Select(untried, r, w); u != nil {
			return u
		}
	}
	if len(untried) < len(pool) {
		return policy.Select(pool, r, w)
	}
	return nil
}

// bar tells whether a replica is left out of what another policy chooses from.
type bar func(fleet.Avoid) bool

// The fallback policy chooses for this one, from the same replicas. A policy
// that is compared with this one chooses as it would alone, except that what
// an operator has drained gets nothing.
func notEligible(a fleet.Avoid) bool { return a != fleet.Eligible }
func drained(a fleet.Avoid) bool     { return a == fleet.Drained }

// leaveOut returns a pool without some replicas: itself if there are none.
func (c *core) leaveOut(pool reverseproxy.UpstreamPool, out func(*fleet.Replica) bool, now time.Time) reverseproxy.UpstreamPool {
	var rest reverseproxy.UpstreamPool
	for i, u := range pool {
		switch left := out(c.replica(pool, i, now)); {
		case left && rest == nil:
			rest = append(make(reverseproxy.UpstreamPool, 0, len(pool)), pool[:i]...)
		case !left && rest != nil:
			rest = append(rest, u)
		}
	}
	if rest == nil {
		return pool
	}
	return rest
}

// takeBack makes the request's body ours again where another policy has put its
// own view of it in place of the one that was sent with the request: a retry
// could not read through both.
func (d *decision) takeBack(r *http.Request, sent interface{ Close() error }) {
	if d.body == nil || r.Body == sent || d.body.begun() {
		return
	}
	// Both are views of memory, whose Close returns nil.
	_ = r.Body.Close()
	_ = sent.Close()
	r.Body = d.body.attempt()
}

// begun tells whether something of the body beyond its head was read.
func (b *body) begun() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.eaten
}
