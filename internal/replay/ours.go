// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"fmt"
	"time"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/enginesim"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/fleet"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/plan"
	"github.com/seed-2fa47a1e/caddy-kv-cache/metrics"
)

// Aware is kv_cache_aware: the scheduler, ledger and index that Select uses.
type Aware struct {
	Rule  plan.Rule
	Terms plan.Terms

	sim      *Fleet
	fleet    *fleet.Fleet
	schedule *plan.Scheduler
	replicas []*fleet.Replica
	booked   map[*Request]*fleet.Reservation
	last     []enginesim.Stats
}

// epoch is virtual time zero.
var epoch = time.Unix(1_000_000_000, 0)

func (a *Aware) Start(f *Fleet) {
	registry := fleet.NewRegistry()
	var addrs []string
	for i := range f.Engines {
		addrs = append(addrs, fmt.Sprintf("replica-%d", i))
	}
	a.sim = f
	a.fleet = registry.New(fleet.Config{Interval: f.Setup.Scrape}, addrs)
	for _, addr := range addrs {
		a.replicas = append(a.replicas, a.fleet.Replica(addr, epoch))
	}
	a.schedule = plan.NewScheduler(registry.Index, a.fleet.Rate)
	a.schedule.Rule, a.schedule.Terms = a.Rule, a.Terms
	a.booked = make(map[*Request]*fleet.Reservation)
}

// Arrive implements Policy.
func (a *Aware) Arrive(now time.Duration, r *Request) {
	ask := &asking{a: a, r: r, now: now}
	ask.Request = plan.Request{
		Chain: r.Text, Tokens: float64(r.PromptTokens), PerBlock: TextBlockTokens,
		Replicas: a.replicas, Caller: ask,
	}
	if len(r.Text) > 0 {
		ask.Key = r.Text[len(r.Text)-1]
	}
	a.schedule.Submit(&ask.Request, epoch.Add(now))
}

type asking struct {
	plan.Request
	a   *Aware
	r   *Request
	now time.Duration
}

func (k *asking) Open(int) bool  { return true }
func (k *asking) Tried(int) bool { return false }
func (k *asking) Send(c plan.Choice) {
	p := k.a.replicas[c.Index]
	res := &fleet.Reservation{Prompt: k.Tokens, Uncached: c.Uncached, Hit: c.Hit, Bytes: k.Tokens * 4}
	at := k.now + c.Waited
	p.Reserve(res, epoch.Add(at))
	p.Holds(k.Chain)
	k.a.booked[k.r] = res
	k.a.sim.Send(at, k.r, c.Index)
}

// Finished implements Policy.
func (a *Aware) Finished(now time.Duration, r *Request) {
	a.booked[r].Finish(epoch.Add(now))
	delete(a.booked, r)
	a.schedule.Event(epoch.Add(now))
}

// Scraped implements Policy.
func (a *Aware) Scraped(now time.Duration, i int, s enginesim.Stats) {
	a.fleet.Observe(a.replicas[i], metrics.Scrape{Snapshot: snapshot(now, s, a.sim.Engines[i].Config())}, epoch.Add(now))
	a.schedule.Event(epoch.Add(now))
}

// Next implements Policy.
func (a *Aware) Next(now time.Duration) (time.Duration, bool) {
	t, ok := a.schedule.Next(epoch.Add(now))
	return t.Sub(epoch), ok
}

// Act implements Policy.
func (a *Aware) Act(now time.Duration) { a.schedule.Event(epoch.Add(now)) }

// snapshot is what a scrape of a simulated engine would tell.
func snapshot(now time.Duration, s enginesim.Stats, c enginesim.Config) *metrics.Snapshot {
	fact := func(v float64) metrics.Fact { return metrics.Fact{Value: v, Known: true} }
	return &metrics.Snapshot{
		At: epoch.Add(now), Engine: metrics.VLLM, Rows: 1,
		Running: fact(float64(s.Running)), Waiting: fact(float64(s.Waiting)), KVUsage: fact(s.KVUsage),
		CapacityTokens: fact(float64(c.CapacityTokens())), BlockTokens: fact(float64(c.BlockTokens)), PrefixCaching: fact(1),
		PrefixQueries: fact(float64(s.PrefixQueries)), PrefixHits: fact(float64(s.PrefixHits)),
		PromptTokens: fact(float64(s.PromptTokens)), CachedPromptTokens: fact(float64(s.CachedTokens)),
		GenerationTokens: fact(float64(s.GenerationTokens)), FirstTokens: fact(float64(s.FirstTokens)),
		Finished: fact(float64(s.Finished)), PrefillSeconds: fact(s.PrefillTime.Seconds()), StartTime: fact(0),
	}
}
