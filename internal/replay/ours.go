// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"fmt"
	"time"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/enginesim"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/fleet"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/plan"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/prompt"
	"github.com/seed-2fa47a1e/caddy-kv-cache/metrics"
)

// epoch is virtual time zero.
var epoch = time.Unix(1_000_000_000, 0)

// ledgers is what both policies of this module have: a fleet of replicas, and a
// reservation for each request in flight.
type ledgers struct {
	sim      *Fleet
	registry *fleet.Registry
	fleet    *fleet.Fleet
	replicas []*fleet.Replica
	booked   map[*Request]*fleet.Reservation
}

func (l *ledgers) start(f *Fleet) {
	l.sim, l.registry = f, fleet.NewRegistry()
	var addrs []string
	for i := range f.Engines {
		addrs = append(addrs, fmt.Sprintf("replica-%d.%d:8000", i, f.Setup.Seed))
	}
	l.fleet = l.registry.New(fleet.Config{Interval: f.Setup.Scrape}, addrs)
	for _, addr := range addrs {
		l.replicas = append(l.replicas, l.fleet.Replica(addr, epoch))
	}
	l.booked = make(map[*Request]*fleet.Reservation)
}

// send books a request and sends it.
func (l *ledgers) send(now time.Duration, r *Request, replica int, hit, uncached float64, reason string) {
	tokens := float64(r.PromptTokens)
	booked := &fleet.Reservation{Prompt: tokens, Uncached: uncached, Hit: hit, Bytes: tokens * fleet.DefaultBytesPerToken, Chain: r.Text}
	l.replicas[replica].Reserve(booked, epoch.Add(now))
	l.booked[r] = booked
	l.sim.Send(now, r, replica, reason)
}

func (l *ledgers) finished(now time.Duration, r *Request) {
	l.booked[r].Finish(epoch.Add(now))
	delete(l.booked, r)
}

// Lost implements Policy.
func (l *ledgers) Lost(now time.Duration, r *Request) {
	l.booked[r].Abort(epoch.Add(now))
	l.replicas[r.Replica].Failed(epoch.Add(now))
	delete(l.booked, r)
}

// Aware is kv_cache_aware: the scheduler, ledger and index that Select uses.
type Aware struct {
	quiet
	ledgers
	Rule  plan.Rule
	Terms plan.Terms

	schedule *plan.Scheduler
}

// NewAware returns the policy with its defaults.
func NewAware() *Aware { return &Aware{Rule: plan.Default, Terms: plan.DefaultTerms} }

func (a *Aware) settings() map[string]setting {
	return map[string]setting{
		"match_weight": number(&a.Rule.MatchWeight),
		"request_cost": number(&a.Rule.PerRequest),
		"room":         duration(&a.Terms.Room),
		"age":          number(&a.Terms.Age),
		"slip":         number(&a.Terms.Slip),
		"grace":        duration(&a.Terms.Grace),
		"patience":     duration(&a.Terms.Patience),
		"longest":      duration(&a.Terms.Longest),
	}
}

// Start implements Policy.
func (a *Aware) Start(f *Fleet) {
	a.start(f)
	a.schedule = plan.NewScheduler(a.registry.Index)
	a.schedule.Rule, a.schedule.Terms = a.Rule, a.Terms
}

// Arrive implements Policy.
func (a *Aware) Arrive(now time.Duration, r *Request) {
	k := &asking{policy: a, request: r, now: now}
	k.Request = plan.Request{
		Chain: r.Text, Tokens: float64(r.PromptTokens), PerBlock: TextBlockTokens, Beyond: r.beyond(),
		Key: r.TurnKey, Replicas: a.replicas, Caller: k,
	}
	a.schedule.Submit(&k.Request, epoch.Add(now))
}

// Finished implements Policy.
func (a *Aware) Finished(now time.Duration, r *Request) {
	a.finished(now, r)
	a.schedule.Event(epoch.Add(now))
}

// Lost implements Policy.
func (a *Aware) Lost(now time.Duration, r *Request) { a.ledgers.Lost(now, r) }

// Scraped implements Policy.
func (a *Aware) Scraped(now time.Duration, i int, s enginesim.Stats) {
	a.fleet.Observe(a.replicas[i], metrics.Scrape{Snapshot: a.sim.snapshot(now, i, s)}, epoch.Add(now))
	a.schedule.Event(epoch.Add(now))
}

// Next implements Policy.
func (a *Aware) Next(now time.Duration) (time.Duration, bool) {
	t, ok := a.schedule.Next(epoch.Add(now))
	return t.Sub(epoch), ok
}

// Act implements Policy.
func (a *Aware) Act(now time.Duration) { a.schedule.Event(epoch.Add(now)) }

// asking is one request that wants a replica.
type asking struct {
	plan.Request
	policy  *Aware
	request *Request
	now     time.Duration
}

// Open implements plan.Caller.
func (k *asking) Open(i int) bool {
	if k.policy.sim.Up(i) {
		return true
	}
	k.policy.replicas[i].Unavailable(epoch.Add(k.now))
	return false
}

// Tried implements plan.Caller.
func (k *asking) Tried(i int) bool { return k.request.Retries > 0 && i == k.request.Replica }

// Send implements plan.Caller.
func (k *asking) Send(c plan.Choice) (late *fleet.Reservation) {
	now := k.now + c.Waited
	if c.Index < 0 {
		k.policy.sim.Refuse(now, k.request)
		return nil
	}
	k.policy.send(now, k.request, c.Index, c.Hit, c.Uncached, reasonOf(c))
	k.policy.replicas[c.Index].Holds(k.Chain)
	return nil
}

// The reasons of kv_cache_aware and prefix_hash, as in their metrics.
const (
	reasonOnly     = "only"
	reasonNoMatch  = "no_match"
	reasonMatch    = "match"
	reasonBalance  = "balance"
	reasonHome     = "home"
	reasonOverflow = "overflow"
)

func reasonOf(c plan.Choice) string {
	switch {
	case c.Open == 1:
		return reasonOnly
	case c.Longest == 0:
		return reasonNoMatch
	case c.Matched == c.Longest:
		return reasonMatch
	}
	return reasonBalance
}

// PrefixHash is prefix_hash: the depths, order and bound that Select uses.
type PrefixHash struct {
	quiet
	ledgers
	Rule   plan.HashRule
	Prefix float64 // bytes; 0 adapts

	depths *plan.Depths
	stays  *plan.Stays
	home   uint64 // the first of homes in the prompt's order
	homes  []plan.Home
	at     []int
}

// NewPrefixHash returns the policy with its defaults.
func NewPrefixHash() *PrefixHash { return &PrefixHash{Rule: plan.DefaultHashRule} }

func (p *PrefixHash) settings() map[string]setting {
	return map[string]setting{
		"load_factor": number(&p.Rule.LoadFactor),
		"slack":       number(&p.Rule.Slack),
		"lead":        number(&p.Rule.Lead),
		"prefix":      number(&p.Prefix),
	}
}

// Start implements Policy.
func (p *PrefixHash) Start(f *Fleet) {
	p.start(f)
	p.depths, p.stays = plan.NewDepths(int64(p.Prefix)), plan.NewStays()
}

// Arrive implements Policy.
func (p *PrefixHash) Arrive(now time.Duration, r *Request) {
	tokens := float64(r.PromptTokens)
	read := prompt.Prompt{Chain: r.Text, Turn: r.Turn, TurnKey: r.TurnKey}
	key := p.depths.Key(&read, tokens, len(p.replicas), epoch.Add(now))
	for _, again := range []bool{false, true} {
		p.gather(now, r, key, again)
		if len(p.homes) > 0 {
			break
		}
	}
	best, first := p.Rule.Choose(p.homes)
	if best < 0 {
		p.sim.Refuse(now, r)
		return
	}
	p.stays.Put(key, p.home, p.replicas[p.at[best]].ID, epoch.Add(now))
	switch {
	case len(p.homes) == 1:
		p.send(now, r, p.at[best], 0, tokens, reasonOnly)
	case best == first:
		p.send(now, r, p.at[best], 0, tokens, reasonHome)
	default:
		p.send(now, r, p.at[best], 0, tokens, reasonOverflow)
	}
}

// gather lists the replicas that may serve the request; again also those that
// were tried or failed.
func (p *PrefixHash) gather(now time.Duration, r *Request, key uint64, again bool) {
	p.homes, p.at = p.homes[:0], p.at[:0]
	first := uint64(0)
	for i, replica := range p.replicas {
		tried := r.Retries > 0 && i == r.Replica || replica.Avoided(epoch.Add(now)) != fleet.Eligible
		if !p.sim.Up(i) || tried && !again {
			continue
		}
		order := plan.Rendezvous(key, replica.ID)
		if order >= first {
			first, p.home = order, replica.ID
		}
		p.homes = append(p.homes, plan.Home{Order: order, Load: plan.HomeLoad(replica.Backlog(epoch.Add(now)))})
		p.at = append(p.at, i)
	}
	if stay, ok := p.stays.Get(key, p.home, epoch.Add(now)); ok {
		for i, at := range p.at {
			p.homes[i].Stays = p.replicas[at].ID == stay
		}
	}
}

// Finished implements Policy.
func (p *PrefixHash) Finished(now time.Duration, r *Request) { p.finished(now, r) }

// Lost implements Policy.
func (p *PrefixHash) Lost(now time.Duration, r *Request) { p.ledgers.Lost(now, r) }
