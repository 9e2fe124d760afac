// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"cmp"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// reference is the rule as docs/choice.md says it, step by step.
func reference(r Rule, cs []Candidate) int {
	cost := func(c Candidate) float64 {
		preempted := 0.0
		if c.Uncached > c.Free {
			preempted = c.Uncached - c.Free
		}
		each := r.PerRequest // of those in flight
		switch {
		case c.Uncached < r.PerRequest/4:
			each = r.PerRequest / 4
		case c.Uncached < r.PerRequest:
			each = c.Uncached
		}
		halve := 5.0 // at six in flight
		switch {
		case c.Shared:
		case c.InFlight < 0.3:
			halve *= 0.05
		case c.InFlight < 6:
			halve *= c.InFlight / 6
		}
		return (c.Queue+c.Uncached+each*c.InFlight+preempted)/c.Pace + (r.MatchWeight-1)*c.Uncached*(halve/(halve+c.Reuse)+c.Evicts)
	}
	var places []int
	least := math.Inf(1)
	for i, c := range cs {
		places = append(places, i)
		least = math.Min(least, cost(c))
	}
	places = slices.DeleteFunc(places, func(i int) bool { return cost(cs[i]) > least+tieTokens+tieShare*least })
	freest := math.Inf(-1)
	for _, i := range places {
		freest = math.Max(freest, cs[i].KVFree)
	}
	places = slices.DeleteFunc(places, func(i int) bool { return cs[i].KVFree < freest-kvStep })
	sparest := math.Inf(-1)
	for _, i := range places {
		sparest = math.Max(sparest, cs[i].Spare)
	}
	places = slices.DeleteFunc(places, func(i int) bool { return cs[i].Spare < sparest-spareStep })
	if len(places) == 0 {
		return -1
	}
	return slices.MaxFunc(places, func(a, b int) int { return cmp.Compare(cs[a].Rendezvous, cs[b].Rendezvous) })
}

func anyCandidate(rng *rand.Rand) Candidate {
	pick := func(values ...float64) float64 { return values[rng.IntN(len(values))] }
	return Candidate{
		Queue:      pick(0, 0, 10, 1000, 5000*rng.Float64()),
		Uncached:   pick(16, 100, 110, 3000*rng.Float64()),
		Free:       pick(math.Inf(1), math.Inf(1), 0, 1000, -100),
		InFlight:   pick(0, 1, 2, 30),
		Pace:       pick(1, 1, 1, 0.5, 2),
		Reuse:      pick(0, 0, 0.2, 5, 100),
		Shared:     rng.IntN(4) == 0,
		Evicts:     pick(0, 0, 1, 8*rng.Float64()),
		KVFree:     pick(1, 1, 0.96, 0.5, rng.Float64()),
		Spare:      pick(1, 1, 0.995, 0.5, rng.Float64()),
		Rendezvous: rng.Uint64(),
	}
}

func TestChooseAgainstReference(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 50_000 {
		cs := make([]Candidate, rng.IntN(10))
		for i := range cs {
			cs[i] = anyCandidate(rng)
		}
		r := Rule{MatchWeight: 5 * rng.Float64(), PerRequest: 1000 * rng.Float64()}
		got, cost := r.Choose(cs)
		if want := reference(r, cs); got != want {
			t.Fatalf("chose %d, want %d of %+v", got, want, cs)
		}
		if got >= 0 && cost != r.Cost(&cs[got]) {
			t.Fatalf("cost is %v, but %v by itself", cost, r.Cost(&cs[got]))
		}
		// The order of the list says nothing.
		if got >= 0 {
			winner := cs[got].Rendezvous
			rng.Shuffle(len(cs), func(i, j int) { cs[i], cs[j] = cs[j], cs[i] })
			if again, _ := r.Choose(cs); cs[again].Rendezvous != winner {
				t.Fatalf("in another order another one wins of %+v", cs)
			}
		}
	}
}

func TestTies(t *testing.T) {
	idle := Candidate{Uncached: 1000, Free: math.Inf(1), Pace: 1, KVFree: 1}
	with := func(change func(*Candidate)) Candidate {
		c := idle
		change(&c)
		return c
	}
	for _, tt := range []struct {
		name string
		cs   []Candidate
		want int
	}{
		{"none", nil, -1},
		{"one, however dear", []Candidate{with(func(c *Candidate) { c.Queue = 1e12 })}, 0},
		{"rendezvous decides among equals", []Candidate{
			with(func(c *Candidate) { c.Rendezvous = 1 }), with(func(c *Candidate) { c.Rendezvous = 3 }), with(func(c *Candidate) { c.Rendezvous = 2 }),
		}, 1},
		{"free cache comes before rendezvous", []Candidate{
			with(func(c *Candidate) { c.KVFree, c.Rendezvous = 0.5, 9 }), with(func(c *Candidate) { c.KVFree = 0.9 }),
		}, 1},
		{"a little more free cache does not", []Candidate{
			with(func(c *Candidate) { c.KVFree, c.Rendezvous = 0.88, 9 }), with(func(c *Candidate) { c.KVFree = 0.9 }),
		}, 0},
		{"room before evictions comes before rendezvous", []Candidate{
			with(func(c *Candidate) { c.Spare, c.Rendezvous = 0.5, 9 }), with(func(c *Candidate) { c.Spare = 0.6 }),
		}, 1},
		{"and after free cache", []Candidate{
			with(func(c *Candidate) { c.KVFree, c.Spare = 0.9, 0.5 }), with(func(c *Candidate) { c.KVFree, c.Spare = 0.5, 0.9 }),
		}, 0},
		{"a dearer one's free cache does not count", []Candidate{
			with(func(c *Candidate) { c.KVFree = 0.1 }), with(func(c *Candidate) { c.Queue, c.KVFree = 5000, 1 }),
		}, 0},
		{"a few tokens are a tie", []Candidate{
			with(func(c *Candidate) { c.Queue = 10 }), with(func(c *Candidate) { c.Queue, c.Rendezvous = 20, 1 }),
		}, 1},
		{"recomputing weighs more than waiting", []Candidate{
			with(func(c *Candidate) { c.Uncached = 16; c.Queue = 2500 }), idle,
		}, 0},
		{"but not without bound", []Candidate{
			with(func(c *Candidate) { c.Uncached = 16; c.Queue = 10_000 }), idle,
		}, 1},
		{"requests in flight count", []Candidate{with(func(c *Candidate) { c.InFlight = 1; c.Rendezvous = 9 }), idle}, 1},
		{"they keep no short prompt from its cache", []Candidate{
			with(func(c *Candidate) { c.Uncached, c.InFlight = 16, 10 }), with(func(c *Candidate) { c.Uncached = 400 }),
		}, 0},
		{"but count, however little there is to compute", []Candidate{
			with(func(c *Candidate) { c.Uncached, c.InFlight = 16, 30 }), with(func(c *Candidate) { c.Uncached = 400 }),
		}, 1},
		{"what is asked for often is held by more", []Candidate{
			with(func(c *Candidate) { c.Uncached, c.Queue, c.Reuse = 16, 2500, 20 }), with(func(c *Candidate) { c.Reuse = 20 }),
		}, 1},
		{"a full cache counts", []Candidate{with(func(c *Candidate) { c.Free, c.Rendezvous = 100, 9 }), idle}, 1},
		{"a faster one may have more queued", []Candidate{
			with(func(c *Candidate) { c.Queue, c.Pace = c.Uncached/2, 2 }), with(func(c *Candidate) { c.Rendezvous = 9 }),
		}, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got, _ := Default.Choose(tt.cs); got != tt.want {
				t.Errorf("chose %d, want %d", got, tt.want)
			}
		})
	}
}

// Equal prompts meet, different ones spread, and few move when a replica comes.
func TestRendezvous(t *testing.T) {
	homeOf := func(key uint64, replicas int) (home uint64) {
		for id := range uint64(replicas) {
			if Rendezvous(key, id*0x9e3779b97f4a7c15) > Rendezvous(key, home*0x9e3779b97f4a7c15) {
				home = id
			}
		}
		return home
	}
	rng := rand.New(rand.NewPCG(2, 3))
	counts, moved := make([]int, 10), 0
	const keys = 20_000
	for range keys {
		key := rng.Uint64()
		home := homeOf(key, 10)
		counts[home]++
		switch now := homeOf(key, 11); now {
		case home:
		case 10:
			moved++
		default:
			t.Fatalf("a key moved from %d to %d when replica 10 came", home, now)
		}
	}
	for i, n := range counts {
		if n < keys/10*8/10 || n > keys/10*12/10 {
			t.Errorf("replica %d is the home of %d of %d keys", i, n, keys)
		}
	}
	if moved < keys/11*8/10 || moved > keys/11*12/10 {
		t.Errorf("%d of %d keys moved to the eleventh replica", moved, keys)
	}
}

// BenchmarkChoose compares the rule with a loop that only adds up as many
// numbers as it reads.
func BenchmarkChoose(b *testing.B) {
	rng := rand.New(rand.NewPCG(1, 2))
	cs := make([]Candidate, 64)
	for i := range cs {
		cs[i] = anyCandidate(rng)
	}
	const rounds = 20_000
	sum, began := 0.0, time.Now()
	for range rounds {
		for i := range cs {
			c := &cs[i]
			sum += c.Queue + c.Uncached + c.InFlight + c.Pace + c.KVFree
		}
	}
	plain := float64(time.Since(began).Nanoseconds()) / rounds / float64(len(cs))
	if sum == 0 {
		b.Fatal("nothing to add up")
	}
	for b.Loop() {
		Default.Choose(cs)
	}
	per := float64(b.Elapsed().Nanoseconds()) / float64(b.N) / float64(len(cs))
	b.ReportMetric(per, "ns/candidate")
	b.ReportMetric(per/plain, "x-of-plain-sum")
}
