// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"math"
)

// match looks up which replicas hold how much of the prompt.
func (s *Scheduler) match(r *Request) {
	r.blocks = s.index.Match(r.Chain, r.blocks[:0])
	r.matched = s.lanes.now
	r.held = r.held[:0]
	if r.Holder != nil {
		for _, p := range r.Replicas {
			r.held = append(r.held, r.Holder.Held(p, r.believed(p)))
		}
	}
	r.uncached, r.lanes = r.uncached[:0], r.lanes[:0]
	for i, p := range r.Replicas {
		l := s.lanes.of(p)
		r.lanes = append(r.lanes, l)
		r.uncached = append(r.uncached, r.uncachedAt(i, &l.load))
	}
}

// leastUncached is what the replica that holds most of the prompt would compute.
func (s *Scheduler) leastUncached(r *Request) float64 {
	least := r.Tokens
	for i := range r.Replicas {
		least = min(least, r.Tokens-r.heldBy(i))
	}
	return max(0, least) + r.Extra
}

// cheapest finds the place of the replica where a waiting request costs least,
// and whether that has room for it now; -1 if none is open. It comes to what
// choose comes to, but at each event all that wait are asked, and it does not
// ask their callers about each replica.
func (s *Scheduler) cheapest(r *Request) (at int, fits bool) {
	s.costs = s.costs[:0]
	at = -1
	least, second := math.Inf(1), math.Inf(1)
	for i, l := range r.lanes {
		if l.epoch != s.lanes.epoch {
			s.lanes.read(l, r.Replicas[i])
		}
		cost := math.Inf(1)
		if l.best && (r.Serves == nil || r.Serves[i]) {
			cost = l.cost(r.uncached[i], s.Rule.MatchWeight)
		}
		if s.costs = append(s.costs, cost); cost < least {
			at, least, second = i, cost, least
		} else {
			second = min(second, cost)
		}
	}
	open := at >= 0 && s.mayGoTo(r, at)
	if tied := tiedWith(least); open && second <= tied {
		s.cands, s.choices = s.cands[:0], s.choices[:0]
		for i, cost := range s.costs {
			if cost <= tied {
				open = open && s.mayGoTo(r, i)
				s.choices = append(s.choices, i)
				s.cands = append(s.cands, s.candidate(r, i))
			}
		}
		best, _ := s.Rule.Choose(s.cands)
		at = s.choices[best]
	}
	if !open {
		c, fits := s.choose(r) // among those that are
		return c.Index, fits
	}
	return at, r.lanes[at].hasRoom()
}

func (s *Scheduler) mayGoTo(r *Request, i int) bool { return r.Caller.Open(i) && !r.Caller.Tried(i) }

// choose finds the replica where the request costs least, and whether that has
// room for it now.
func (s *Scheduler) choose(r *Request) (c Choice, fits bool) {
	for t := strictest; t >= anyOpen; t-- {
		if s.gather(r, r.Caller, t); len(s.cands) > 0 {
			break
		}
	}
	c = Choice{Index: -1, Open: len(s.cands), Next: math.Inf(1)}
	best, cost := s.Rule.Choose(s.cands)
	if best < 0 {
		return c, true
	}
	c.Index, c.Cost = s.choices[best], cost
	for i, at := range s.choices {
		c.Longest = max(c.Longest, r.blocksAt(at))
		if i != best {
			c.Next = min(c.Next, s.cands[i].cost)
		}
	}
	c.Matched, c.Hit, c.Uncached = r.blocksAt(c.Index), s.hits[best], s.cands[best].Uncached
	return c, s.lanes.of(r.Replicas[c.Index]).hasRoom()
}

// gather lists the candidates that are good enough.
func (s *Scheduler) gather(r *Request, caller Caller, t strictness) {
	s.cands, s.choices, s.hits = s.cands[:0], s.choices[:0], s.hits[:0]
	for i, p := range r.Replicas {
		if !caller.Open(i) {
			continue
		}
		load := &s.lanes.of(p).load
		if !t.allows(load, caller.Tried(i), r.Serves == nil || r.Serves[i]) {
			continue
		}
		s.choices = append(s.choices, i)
		s.hits = append(s.hits, r.hitAt(i, load))
		s.cands = append(s.cands, s.candidate(r, i))
	}
}

func (s *Scheduler) candidate(r *Request, i int) Candidate {
	p := r.Replicas[i]
	l := s.lanes.of(p)
	return Candidate{
		Queue:      l.queue,
		Uncached:   r.uncached[i],
		Free:       l.free,
		InFlight:   l.inFlight,
		Pace:       l.load.Pace,
		KVFree:     1 - l.load.KVUsage.Value,
		Spare:      l.load.Spare,
		Rendezvous: Rendezvous(r.Key, p.ID),
	}
}

// Rendezvous gives each replica a pseudo-random place in the order of a key
// that does not depend on which other replicas there are: the highest is the
// key's home.
func Rendezvous(key, replica uint64) uint64 {
	// The finaliser of MurmurHash3, by Austin Appleby, in the public domain.
	x := key ^ replica
	x ^= x >> 33
	x *= 0xff51afd7ed558ccd
	x ^= x >> 33
	x *= 0xc4ceb9fe1a85ec53
	return x ^ x>>33
}
