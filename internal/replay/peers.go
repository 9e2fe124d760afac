// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"cmp"
	"slices"
	"sort"
	"time"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/plan"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/residency"
)

// The rules of other routers, written anew from their descriptions. Where a rule
// leaves something open, it is given the better of it: their metrics are never
// stale, and none of them costs time.

// onArrival is a policy that binds every request when it comes.
type onArrival struct {
	quiet
	// choose returns one of the replicas that are up, and why.
	choose func(p *onArrival, r *Request, up []int) (int, string)
	// start may prepare what choose needs.
	start func(p *onArrival)
	// sent and past follow a request, if not nil.
	sent func(p *onArrival, r *Request, replica int)

	fleet    *Fleet
	inFlight []int
	prefill  [][]*Request // by replica: sent and without a first token
	up       []int
}

// Start implements Policy.
func (p *onArrival) Start(f *Fleet) {
	p.fleet, p.inFlight = f, make([]int, len(f.Engines))
	p.prefill = make([][]*Request, len(f.Engines))
	if p.start != nil {
		p.start(p)
	}
}

// Arrive implements Policy.
func (p *onArrival) Arrive(now time.Duration, r *Request) {
	p.up = p.up[:0]
	for i := range p.inFlight {
		if p.fleet.Up(i) {
			p.up = append(p.up, i)
		}
	}
	if len(p.up) == 0 {
		p.fleet.Refuse(now, r)
		return
	}
	i, reason := p.choose(p, r, p.up)
	if p.sent != nil {
		p.sent(p, r, i)
	}
	p.inFlight[i]++
	p.prefill[i] = append(p.prefill[i], r)
	p.fleet.Send(now, r, i, reason)
}

// FirstToken implements Policy.
func (p *onArrival) FirstToken(_ time.Duration, r *Request) {
	p.prefill[r.Replica] = slices.DeleteFunc(p.prefill[r.Replica], func(o *Request) bool { return o == r })
}

// Finished implements Policy.
func (p *onArrival) Finished(_ time.Duration, r *Request) { p.inFlight[r.Replica]-- }

// Lost implements Policy.
func (p *onArrival) Lost(now time.Duration, r *Request) {
	p.FirstToken(now, r)
	p.inFlight[r.Replica]--
}

// least returns the one of some replicas for which cost is lowest, and of equal
// ones a random one.
func (p *onArrival) least(of []int, cost func(replica int) float64) int {
	best, lowest, ties := of[0], cost(of[0]), 1
	for _, i := range of[1:] {
		switch c := cost(i); {
		case c < lowest:
			best, lowest, ties = i, c, 1
		case c == lowest:
			if ties++; p.fleet.Rand.IntN(ties) == 0 {
				best = i
			}
		}
	}
	return best
}

func (p *onArrival) requests(replica int) float64 { return float64(p.inFlight[replica]) }

func roundRobin() Policy {
	next := 0
	return &onArrival{choose: func(p *onArrival, _ *Request, up []int) (int, string) {
		next++
		return up[next%len(up)], "turn"
	}}
}

func leastConn() Policy {
	return &onArrival{choose: func(p *onArrival, _ *Request, up []int) (int, string) {
		return p.least(up, p.requests), "load"
	}}
}

func randomChoose() Policy {
	return &onArrival{choose: func(p *onArrival, _ *Request, up []int) (int, string) {
		a, b := up[p.fleet.Rand.IntN(len(up))], up[p.fleet.Rand.IntN(len(up))]
		return p.least([]int{a, b}, p.requests), "load"
	}}
}

// conversation is what an address or a header tells of a request: its session,
// or, where the trace has none, its text up to 1,024 tokens.
func (r *Request) conversation() uint64 {
	if r.Session != "" {
		h := uint64(14695981039346656037) // FNV-1a
		for i := range len(r.Session) {
			h = (h ^ uint64(r.Session[i])) * 1099511628211
		}
		return h
	}
	if n := 1024 / TextBlockTokens; len(r.Text) >= n {
		return r.Text[n-1]
	}
	return r.TurnKey
}

// affinity is Caddy's hashing of an address or a header: highest random weight.
func affinity() Policy {
	return &onArrival{choose: func(p *onArrival, r *Request, up []int) (int, string) {
		key := r.conversation()
		return slices.MaxFunc(up, func(a, b int) int {
			return cmp.Compare(plan.Rendezvous(key, p.name(a)), plan.Rendezvous(key, p.name(b)))
		}), "home"
	}}
}

// name hashes a replica's name, which differs from seed to seed.
func (p *onArrival) name(replica int) uint64 {
	return mix(p.fleet.Setup.Seed<<16 + uint64(replica))
}

// belief is a router's own index of what it sent where.
type belief struct {
	index *residency.Index
	slots []residency.Slot
	match []int32
}

// newBelief returns an index with room for so many tokens of each replica; 0 is
// as many as it really holds.
func newBelief(f *Fleet, tokens int) *belief {
	b := &belief{index: residency.New()}
	for _, e := range f.Engines {
		room := tokens
		if room == 0 {
			room = e.Config().CapacityTokens()
		}
		b.slots = append(b.slots, b.index.Join(room/TextBlockTokens))
	}
	return b
}

// look finds how many blocks of a request's text each replica holds.
func (b *belief) look(r *Request) { b.match = b.index.Match(r.Text, b.match[:0]) }

// at is what look found for a replica.
func (b *belief) at(replica int) float64 {
	if slot := int(b.slots[replica]); slot < len(b.match) {
		return float64(b.match[slot])
	}
	return 0
}

func (b *belief) sent(_ *onArrival, r *Request, replica int) {
	b.index.Insert(b.slots[replica], r.Text)
}

// matchOrBalance is the cache_aware rule of sglang's router.
func matchOrBalance() Policy {
	const (
		threshold     = 0.3
		apart, factor = 64, 1.5
		tokens        = 1 << 26 / 4 // 2^26 characters
	)
	var b *belief
	p := &onArrival{}
	p.start = func(p *onArrival) { b = newBelief(p.fleet, tokens) }
	p.sent = func(p *onArrival, r *Request, i int) { b.sent(p, r, i) }
	p.choose = func(p *onArrival, r *Request, up []int) (int, string) {
		most, fewest := p.requests(up[0]), p.requests(up[0])
		for _, i := range up {
			most, fewest = max(most, p.requests(i)), min(fewest, p.requests(i))
		}
		if most-fewest > apart && most > factor*fewest {
			return p.least(up, p.requests), "balance"
		}
		b.look(r)
		best := p.least(up, func(i int) float64 { return -b.at(i) })
		if b.at(best) > threshold*float64(len(r.Text)) {
			return best, "match"
		}
		return p.least(up, p.requests), "no_match"
	}
	return p
}

// boundedHash is KubeAI's rule: a ring of points, and the next one with less than
// its share of requests from the key's place on. The key is the beginning of the
// first user message.
func boundedHash() Policy {
	const (
		factor = 1.25
		points = 256
	)
	type point struct {
		at      uint64
		replica int
	}
	var ring []point
	return &onArrival{
		start: func(p *onArrival) {
			for i := range p.fleet.Engines {
				for n := range uint64(points) {
					ring = append(ring, point{mix(p.name(i) ^ mix(n)), i})
				}
			}
			slices.SortFunc(ring, func(a, b point) int { return cmp.Compare(a.at, b.at) })
		},
		choose: func(p *onArrival, r *Request, up []int) (int, string) {
			key := r.TurnKey
			if r.Shared < len(r.Text) {
				key = r.Text[r.Shared]
			}
			all := 0
			for _, i := range up {
				all += p.inFlight[i]
			}
			bound := factor * float64(all+1) / float64(len(up))
			from := sort.Search(len(ring), func(i int) bool { return ring[i].at >= key })
			reason := "home"
			for i := range ring {
				at := ring[(from+i)%len(ring)].replica
				if !p.fleet.Up(at) {
					continue
				}
				if float64(p.inFlight[at]+1) <= bound {
					return at, reason
				}
				reason = "overflow"
			}
			return p.least(up, p.requests), "overflow"
		},
	}
}

// weightedScores is llm-d's rule: scores from 0 to 1 of the waiting requests, the
// KV use and the match, weighed 2, 2 and 3.
func weightedScores() Policy {
	const (
		queueWeight, useWeight, prefixWeight = 2, 2, 3
		tokens                               = 31_250 * TextBlockTokens
		most                                 = 131_072 / TextBlockTokens
	)
	var b *belief
	p := &onArrival{}
	p.start = func(p *onArrival) { b = newBelief(p.fleet, tokens) }
	p.sent = func(p *onArrival, r *Request, i int) { b.sent(p, r, i) }
	p.choose = func(p *onArrival, r *Request, up []int) (int, string) {
		b.look(r)
		waiting := func(i int) float64 { return float64(p.fleet.Engines[i].Stats().Waiting) }
		high, low := waiting(up[0]), waiting(up[0])
		for _, i := range up {
			high, low = max(high, waiting(i)), min(low, waiting(i))
		}
		best := p.least(up, func(i int) float64 {
			queue := 1.0
			if high > low {
				queue = (high - waiting(i)) / (high - low)
			}
			prefix := min(b.at(i), most) / float64(max(1, min(len(r.Text), most)))
			return -queueWeight*queue - useWeight*(1-p.fleet.Engines[i].Stats().KVUsage) - prefixWeight*prefix
		})
		if b.at(best) > 0 {
			return best, "match"
		}
		return best, "no_match"
	}
	return p
}

// overlapAndLoad is Dynamo's rule: the blocks that would be left to prefill
// there, plus the blocks in use by what it was sent.
func overlapAndLoad() Policy {
	var b *belief
	var left map[*Request]float64 // tokens to prefill of those without a first token
	p := &onArrival{}
	var active []float64 // tokens held by requests in flight
	p.start = func(p *onArrival) {
		b, left = newBelief(p.fleet, 0), make(map[*Request]float64)
		active = make([]float64, len(p.fleet.Engines))
	}
	p.sent = func(p *onArrival, r *Request, i int) {
		left[r] = float64(r.PromptTokens) - b.at(i)*TextBlockTokens
		active[i] += float64(r.PromptTokens)
		b.sent(p, r, i)
	}
	p.choose = func(p *onArrival, r *Request, up []int) (int, string) {
		b.look(r)
		best := p.least(up, func(i int) float64 {
			prefill := float64(r.PromptTokens) - b.at(i)*TextBlockTokens
			for _, o := range p.prefill[i] {
				prefill += left[o]
			}
			return prefill + active[i]
		})
		if b.at(best) > 0 {
			return best, "match"
		}
		return best, "no_match"
	}
	return &freeing{onArrival: p, free: func(r *Request) {
		active[r.Replica] -= float64(r.PromptTokens)
		delete(left, r)
	}}
}

// freeing is a policy that is told when a request's blocks are free.
type freeing struct {
	*onArrival
	free func(r *Request)
}

// Finished implements Policy.
func (p *freeing) Finished(now time.Duration, r *Request) {
	p.onArrival.Finished(now, r)
	p.free(r)
}

// Lost implements Policy.
func (p *freeing) Lost(now time.Duration, r *Request) {
	p.onArrival.Lost(now, r)
	p.free(r)
}

// oracle is the cost rule of kv_cache_aware with the truth for its beliefs: what
// each cache holds, what is left to prefill, and how fast each engine is.
func oracle() Policy {
	var expect map[*Request]float64 // tokens that are found cached, as of when it was sent
	p := &onArrival{}
	p.start = func(*onArrival) { expect = make(map[*Request]float64) }
	left := func(r *Request) float64 {
		return float64(r.PromptTokens) - max(float64(r.engine.Computed()), expect[r])
	}
	var candidates []plan.Candidate
	p.choose = func(p *onArrival, r *Request, up []int) (int, string) {
		candidates = candidates[:0]
		mean := 0.0
		for _, i := range up {
			mean += p.fleet.Engines[i].Config().PrefillRate / float64(len(up))
		}
		longest := 0.0
		for _, i := range up {
			cached := float64(p.fleet.Cached(r, i))
			longest = max(longest, cached)
			c := plan.Candidate{
				Uncached: float64(r.PromptTokens) - cached,
				InFlight: p.requests(i), KVFree: 1 - p.fleet.Engines[i].Stats().KVUsage,
				Pace:       p.fleet.Engines[i].Config().PrefillRate / mean,
				Rendezvous: plan.Rendezvous(r.TurnKey, p.name(i)),
			}
			c.Free = c.KVFree * float64(p.fleet.Engines[i].Config().CapacityTokens())
			for _, o := range p.prefill[i] {
				c.Queue += left(o)
			}
			candidates = append(candidates, c)
		}
		best, _ := plan.Default.Choose(candidates)
		cached := float64(r.PromptTokens) - candidates[best].Uncached
		expect[r] = cached
		switch {
		case longest == 0:
			return up[best], reasonNoMatch
		case cached == longest:
			return up[best], reasonMatch
		}
		return up[best], reasonBalance
	}
	return &freeing{onArrival: p, free: func(r *Request) { delete(expect, r) }}
}

// Interface guards
var (
	_ Policy = (*Aware)(nil)
	_ Policy = (*PrefixHash)(nil)
	_ Policy = (*onArrival)(nil)
	_ Policy = (*freeing)(nil)
)
