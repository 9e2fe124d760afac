// SPDX-License-Identifier: Apache-2.0

package selection

import (
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	"github.com/cespare/xxhash/v2"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/fleet"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/plan"
)

func init() {
	caddy.RegisterModule(new(PrefixHash))
}

// defaultSeed starts the chains of every prefix_hash that has no seed of its
// own, so that all Caddys agree.
const defaultSeed = "caddy-kv-cache prefix_hash 1"

// PrefixHash is a policy that sends prompts with the same leading part to the
// same replica, by rendezvous hashing. It decides from the request alone: it
// polls nothing, and several Caddys with the same configuration agree without
// talking to each other. When replicas come or go, only the prompts whose home
// that is move.
//
// A home that has more to do than the others is passed over for the next in the
// prompt's own order, and a prompt whose key was sent there a moment ago stays
// there, unless that has far more to do than the others. What a replica has to do
// is reckoned from the requests sent there: the tokens believed to wait for
// prefill, and a tenth of those in flight.
type PrefixHash struct {
	// The name of this group of upstreams in metrics, logs and the admin API.
	// Default: "default", and a number after it where several policies have no name.
	Name string `json:"name,omitempty"`

	// How much of the prompt's text makes the key, in bytes. Default: it adapts.
	// The key begins at the first kilobyte, and is taken deeper where so many
	// requests share it that they would overload one replica: past a common
	// system prompt, up to the end of the first user message.
	Prefix int64 `json:"prefix,omitempty"`

	// A request header whose value is the key where it is present.
	Header string `json:"header,omitempty"`

	// How many times the mean load of all a replica may have before the prompts
	// that stay there leave it. Default: 1.25.
	LoadFactor float64 `json:"load_factor,omitempty"`

	// How many prompt tokens above the mean it may have in any case: five seconds
	// of prefill at 10,000 tokens a second. Default: 50000.
	Slack int `json:"slack,omitempty"`

	// Text that goes into every key. Caddys that shall agree need the same;
	// with a secret one nobody outside can tell which prompts meet.
	// Default: a constant.
	Seed string `json:"seed,omitempty"`

	// What tells tenants apart, as text with placeholders such as
	// {http.request.header.Authorization} or {http.auth.user.id}. It goes into
	// the hashes of the prompt, so that tenants share no belief about a cache
	// and none can tell from where its requests go what another has asked.
	// Requests for which it is empty are a tenant of their own. Default: none;
	// all requests are alike.
	Tenant string `json:"tenant,omitempty"`

	// How many bytes of a request's body are looked at, at most.
	// Default: 4MiB.
	MaxBody int64 `json:"max_body,omitempty"`

	// The policy that decides on requests without a prompt. Default: `least_conn`.
	FallbackRaw json.RawMessage `json:"fallback,omitempty" caddy:"namespace=http.reverse_proxy.selection_policies inline_key=policy"`
	fallback    reverseproxy.Selector

	// A file to write a line to for each request. Default: none.
	Capture *Capture `json:"capture,omitempty"`

	core
	depths  *plan.Depths
	stays   *plan.Stays
	scratch sync.Pool // *homes
}

// CaddyModule returns the Caddy module information.
func (*PrefixHash) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "http.reverse_proxy.selection_policies.prefix_hash",
		New: func() caddy.Module { return new(PrefixHash) },
	}
}

// Provision sets up the policy.
func (p *PrefixHash) Provision(ctx caddy.Context) error {
	if p.LoadFactor == 0 {
		p.LoadFactor = plan.DefaultHashRule.LoadFactor
	}
	if p.Slack == 0 {
		p.Slack = int(plan.DefaultHashRule.Slack)
	}
	seed := caddy.NewReplacer().ReplaceKnown(p.Seed, "")
	if seed == "" {
		seed = defaultSeed
	}
	p.depths, p.stays = plan.NewDepths(p.Prefix), plan.NewStays()
	var err error
	if p.fallback, err = loadFallback(ctx, p, &p.FallbackRaw); err != nil {
		return err
	}
	return p.core.provision(ctx, coreConfig{
		policy:  "prefix_hash",
		name:    p.Name,
		maxBody: p.MaxBody,
		seed:    xxhash.Sum64String(seed),
		tenant:  p.Tenant,
		explain: p.explain,
		waiting: func() int { return 0 },
		capture: p.Capture,
	})
}

// Validate checks the options.
func (p *PrefixHash) Validate() error {
	switch {
	case p.LoadFactor < 1:
		return fmt.Errorf("load_factor is %v, but must be at least 1", p.LoadFactor)
	case p.Slack < 0:
		return fmt.Errorf("slack is %d tokens, but can't be negative", p.Slack)
	case p.Prefix < 0:
		return fmt.Errorf("prefix is %d bytes, but can't be negative", p.Prefix)
	case p.MaxBody < 0:
		return fmt.Errorf("max_body is %d bytes, but can't be negative", p.MaxBody)
	}
	return nil
}

// Cleanup lets go of the replicas.
func (p *PrefixHash) Cleanup() error { return p.core.cleanup() }

// homes are the replicas that a prompt could live at.
type homes struct {
	at   []place
	rule []plan.Home // of the same, what the choice needs to know
	home uint64      // the first of them in the prompt's order
}

type place struct {
	upstream *reverseproxy.Upstream
	replica  *fleet.Replica
}

// Select returns the upstream for the request, or nil if none is available.
func (p *PrefixHash) Select(pool reverseproxy.UpstreamPool, r *http.Request, w http.ResponseWriter) *reverseproxy.Upstream {
	start := time.Now()
	d, first := p.decide(r)
	if !first {
		d.retract(r.Context(), start)
	}
	value := p.headerValue(r)
	if d.reason != "" && value == "" {
		return p.fallBack(p.fallback, notEligible, d, pool, r, w, start)
	}
	candidates, _ := p.scratch.Get().(*homes)
	if candidates == nil {
		candidates = new(homes)
	}
	defer p.scratch.Put(candidates)
	tokens := p.tokens(&d.prompt) + p.extraTokens(&d.prompt)
	key := p.headerKey(value, r)
	if value == "" {
		key = p.depths.Key(&d.prompt, tokens, len(pool), start)
	}
	p.gather(candidates, d, key, pool, start)
	if len(candidates.at) == 0 {
		p.none(r, ReasonNone, start)
		return nil
	}
	h, reason := p.choose(candidates)
	p.stays.Put(key, candidates.home, h.replica.ID, start)
	a := d.attempt()
	*a = attempt{
		replica: h.replica,
		reason:  reason,
		key:     key,
		cost:    math.NaN(),
		Reservation: fleet.Reservation{
			Prompt:   tokens,
			Uncached: tokens,
			Bytes:    textBytes(&d.prompt),
		},
	}
	d.send(a, start)
	d.landBeside()
	p.note(r, d, start)
	if len(candidates.at) < len(pool) {
		p.noteAvoided(d, pool, start)
	}
	return h.upstream
}

// headerValue is what a request is keyed by instead of its prompt, "" if there is
// nothing.
func (p *PrefixHash) headerValue(r *http.Request) string {
	if p.Header == "" {
		return ""
	}
	return r.Header.Get(p.Header)
}

// headerKey is the key of a header's value, which is the tenant's own.
func (p *PrefixHash) headerKey(value string, r *http.Request) uint64 {
	key := xxhash.Sum64String(value)
	if p.Tenant == "" {
		return key
	}
	return key ^ p.outlook.tenantSeed(r)
}

// gather lists the replicas that may serve the request, as strictly as leaves any.
func (p *PrefixHash) gather(h *homes, d *decision, key uint64, pool reverseproxy.UpstreamPool, now time.Time) {
	const connectable, eligible, untried, any = 3, 2, 1, 0
	for strict := connectable; strict >= any; strict-- {
		h.at, h.rule = h.at[:0], h.rule[:0]
		first := uint64(0)
		for i, u := range pool {
			if !u.Available() {
				continue
			}
			replica := p.replica(pool, i, now)
			if strict >= untried && d.tried(replica) || strict >= eligible && replica.Avoided(now) != fleet.Eligible ||
				strict >= connectable && !replica.Connectable(now) {
				continue
			}
			order := plan.Rendezvous(key, replica.ID)
			if order >= first {
				first, h.home = order, replica.ID
			}
			h.at = append(h.at, place{u, replica})
			h.rule = append(h.rule, plan.Home{Order: order, Load: plan.HomeLoad(replica.Backlog(now))})
		}
		if len(h.at) > 0 {
			break
		}
	}
	if stay, ok := p.stays.Get(key, h.home, now); ok {
		for i := range h.at {
			h.rule[i].Stays = h.at[i].replica.ID == stay
		}
	}
}

// choose takes the replica where prompts of this key stay, or else the first home
// in the prompt's order that has little to do.
func (p *PrefixHash) choose(h *homes) (place, Reason) {
	rule := plan.HashRule{LoadFactor: p.LoadFactor, Slack: float64(p.Slack), Lead: plan.DefaultHashRule.Lead}
	best, first := rule.Choose(h.rule)
	switch {
	case len(h.at) == 1:
		return h.at[best], ReasonOnly
	case best == first:
		return h.at[best], ReasonHome
	}
	return h.at[best], ReasonOverflow
}

// Interface guards
var (
	_ caddy.Provisioner     = (*PrefixHash)(nil)
	_ caddy.Validator       = (*PrefixHash)(nil)
	_ caddy.CleanerUpper    = (*PrefixHash)(nil)
	_ reverseproxy.Selector = (*PrefixHash)(nil)
)
