// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"math"
	"slices"
)

// match looks up which replicas hold how much of the prompt.
func (s *Scheduler) match(r *Request) {
	s.landing.forget()
	r.blocks = s.index.Match(r.Chain, r.blocks[:0])
	s.landing.addTo(r.blocks, r.Chain)
	r.matched = s.lanes.now
	r.offers = slices.Grow(r.offers[:0], len(r.Replicas))[:len(r.Replicas)]
	shared := false
	for i, p := range r.Replicas {
		l := s.lanes.of(p)
		r.offers[i].take(r, p, l, p.Matched(r.blocks))
		r.offers[i].each = s.Rule.perRequest(r.offers[i].uncached)
		shared = shared || l.load.Shared
	}
	if shared && r.Holder == nil {
		r.meetAtHome()
	}
	s.expect(r)
}

// expect looks up how many others asked of late for what is held of the prompt.
func (s *Scheduler) expect(r *Request) {
	r.held = r.prefix()
	others := s.reuses.before(r.held, s.lanes.now)
	if r.held == r.asked { // as it did itself
		others = max(0, others-1)
	}
	r.reuse = others / float64(max(1, len(r.Replicas)))
	r.toOthers = toOthers(r.reuse, busyFrom)
}

// awayMost is the most that is lost by a replica which is not the prompt's home,
// in tokens: a home that has so much more to do than another is passed over.
const awayMost = 4000

// meetAtHome is for replicas that others send requests to as well. What they do
// with this prompt is not known, but those that know no better look for it where
// we do: at its home, the first in its order of the replicas that serve it and that
// nothing speaks against. So whatever of it is known nowhere may be there.
func (r *Request) meetAtHome() {
	home, first, known := -1, uint64(0), 0.0
	for i, p := range r.Replicas {
		o := &r.offers[i]
		known = max(known, o.held)
		if !o.lane.best || r.Serves != nil && !r.Serves[i] {
			continue
		}
		if order := Rendezvous(r.Key, p.ID); order >= first {
			home, first = i, order
		}
	}
	for i := range r.offers {
		if i != home {
			r.offers[i].away = min(awayMost, max(0, r.Tokens-known))
		}
	}
}

// leastUncached is what the replica that holds most of the prompt would compute.
func (s *Scheduler) leastUncached(r *Request) float64 {
	least := r.Tokens
	for i := range r.offers {
		least = min(least, r.Tokens-r.offers[i].held)
	}
	return max(0, least) + r.Extra
}

// cheapest finds the place of the replica where a waiting request costs least,
// and whether that has room for it now; -1 if none is open. It comes to what
// choose comes to, but at each event all that wait are asked, and it does not
// ask their callers about each replica.
func (s *Scheduler) cheapest(r *Request) (at int, fits bool) {
	at = -1
	least, second := math.Inf(1), math.Inf(1)
	common := s.lanes.common(&s.Rule, r)
	costs := slices.Grow(s.costs[:0], len(r.offers))[:len(r.offers)]
	for i := range costs {
		costs[i] = math.Inf(1)
		o := &r.offers[i]
		l := o.lane
		if l.epoch != s.lanes.epoch {
			s.lanes.read(l, r.Replicas[i])
		}
		if !l.best || r.Serves != nil && !r.Serves[i] {
			continue
		}
		cost := l.cost(r, o, common)
		costs[i] = cost
		if cost < least {
			at, least, second = i, cost, least
		} else if cost < second {
			second = cost
		}
	}
	s.choices, s.costs = s.choices[:0], costs[:0]
	open := at >= 0 && s.mayGoTo(r, at)
	if tied := tiedWith(least); open && second <= tied {
		for i, cost := range costs {
			if cost <= tied {
				s.choices, s.costs = append(s.choices, i), append(s.costs, cost)
				open = open && s.mayGoTo(r, i)
			}
		}
		at = s.choices[s.settle(r, tied)]
	}
	if !open {
		c, fits := s.choose(r) // among those that are
		return c.Index, fits
	}
	return at, r.offers[at].lane.hasRoom()
}

func (s *Scheduler) mayGoTo(r *Request, i int) bool { return r.Caller.Open(i) && !r.Caller.Tried(i) }

// choose finds the replica where the request costs least, and whether that has
// room for it now.
func (s *Scheduler) choose(r *Request) (c Choice, fits bool) { return s.chooseCounting(r, 0) }

// chooseBehind is choose for a request behind those that wait: what they will have
// computed where they wait for counts as queued.
func (s *Scheduler) chooseBehind(r *Request) (c Choice, fits bool) {
	if s.line.isFirst(r) {
		return s.choose(r)
	}
	return s.chooseCounting(r, 1)
}

func (s *Scheduler) chooseCounting(r *Request, awaited float64) (c Choice, fits bool) {
	least := math.Inf(1)
	for t := strictest; t >= anyOpen; t-- {
		if least = s.gather(r, r.Caller, t, awaited); len(s.choices) > 0 {
			break
		}
	}
	c = Choice{Index: -1, Open: len(s.choices), Next: math.Inf(1)}
	best := s.settle(r, tiedWith(least))
	if best < 0 {
		return c, true
	}
	for k, at := range s.choices {
		c.Longest = max(c.Longest, int(r.offers[at].blocks))
		if k != best {
			c.Next = min(c.Next, s.costs[k])
		}
	}
	c.Index, c.Cost = s.choices[best], s.costs[best]
	o := &r.offers[c.Index]
	c.Matched, c.Hit, c.Uncached = int(o.blocks), o.hit(r), o.uncached
	return c, o.lane.hasRoom()
}

// gather lists the replicas that are good enough and what the request costs there,
// with so much of what is awaited there, and returns the least of it.
func (s *Scheduler) gather(r *Request, caller Caller, t strictness, awaited float64) (least float64) {
	s.choices, s.costs = s.choices[:0], s.costs[:0]
	least = math.Inf(1)
	common := s.lanes.common(&s.Rule, r)
	for i := range r.offers {
		if !caller.Open(i) {
			continue
		}
		l := s.lanes.at(r, i)
		if !t.allows(l, caller.Tried(i), r.Serves == nil || r.Serves[i]) {
			continue
		}
		cost := l.cost(r, &r.offers[i], common) + awaited*l.perUnit*l.awaited
		s.choices, s.costs = append(s.choices, i), append(s.costs, cost)
		least = min(least, cost)
	}
	return least
}

// settle finds the best of the choices that cost no more than tied, and returns
// its place among them all; -1 if there is none.
func (s *Scheduler) settle(r *Request, tied float64) int {
	s.ties = s.ties[:0]
	for k, cost := range s.costs {
		if cost <= tied {
			s.ties = append(s.ties, merits{at: k})
		}
	}
	if len(s.ties) > 1 {
		for i := range s.ties {
			t := &s.ties[i]
			at := s.choices[t.at]
			p, l := r.Replicas[at], r.offers[at].lane
			t.kvFree, t.spare, t.rendezvous = l.load.KVFree(), p.Spare(&l.load.Load), Rendezvous(r.Key, p.ID)
		}
	}
	return foremost(s.ties)
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
