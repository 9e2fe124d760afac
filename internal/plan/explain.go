// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"time"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/fleet"
)

// Costs is what [Rule.Cost] is made of, in tokens of queue at the fleet's pace.
type Costs struct {
	// Queue is what waits there or for it, or is lost on the way, Requests what decodes there,
	// Pressure the KV cache that must be freed: each over the replica's pace.
	// Requests has what a crowd costs, too, whatever the pace.
	Queue, Requests, Pressure float64
	// Compute is the rest: the prompt's uncached tokens, and what computing
	// them takes from others.
	Compute float64
	// Away is what others may have left of the prompt at another replica.
	Away float64
	// Pace is the replica's prefill rate relative to the fleet's.
	Pace float64
}

// Total is the candidate's cost.
func (c Costs) Total() float64 { return c.Queue + c.Compute + c.Requests + c.Pressure + c.Away }

// Costs takes the cost of a candidate apart.
func (r Rule) Costs(c *Candidate) Costs {
	costs := Costs{
		Queue:    c.Queue / c.Pace,
		Requests: r.perRequest(c.Uncached)*c.InFlight/c.Pace + c.crowding(),
		Pressure: c.pressure() / c.Pace,
		Away:     c.Away,
		Pace:     c.Pace,
	}
	costs.Compute = r.Cost(c) - costs.Total()
	return costs
}

// Forecast is what would be decided on a request.
type Forecast struct {
	Choice
	// Waits tells whether the request would be held back at first, behind Ahead
	// others.
	Waits bool
	Ahead int
	// Options are all of the request's replicas, in its order.
	Options []Option
}

// Option is one replica as the choice sees it.
type Option struct {
	// Allowed tells whether the choice is made among such replicas as this: it
	// is open and, as long as there are better ones, neither avoided nor in its
	// warm-up's limits.
	Allowed bool
	// Matched, Hit and Uncached are as in [Choice].
	Matched       int
	Hit, Uncached float64
	Load          fleet.Load
	Costs         Costs
}

// Explain decides on a request as Submit does, and books nothing.
func (s *Scheduler) Explain(r *Request, now time.Time) Forecast {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lanes.next(now)
	s.match(r)
	c, fits := s.chooseBehind(r)
	f := Forecast{
		Choice:  c,
		Waits:   c.Index >= 0 && !(fits && s.unclaimed(r, c)),
		Ahead:   s.line.len(),
		Options: make([]Option, len(r.Replicas)),
	}
	for _, at := range s.choices {
		f.Options[at].Allowed = true
	}
	common := s.lanes.common(&s.Rule, r)
	for at := range r.offers {
		o, offer := &f.Options[at], &r.offers[at]
		l := s.lanes.at(r, at)
		o.Matched, o.Hit, o.Uncached = int(offer.blocks), offer.hit(r), offer.uncached
		queue := l.queue + l.lost
		if !s.line.isFirst(r) {
			queue += l.awaited
		}
		o.Load, o.Costs = l.load.Load, s.Rule.Costs(&Candidate{
			Queue: queue, Uncached: offer.uncached, Free: l.free, InFlight: l.inFlight,
			Crowd: max(0, l.inFlight-common.uncrowded), Rate: l.crowdRate(), Pace: l.load.Pace, Reuse: r.reuse, Shared: l.load.Shared, Evicts: l.evicts, Waiting: s.lanes.waiting(max(s.lanes.members, 1)), Away: offer.away,
		})
	}
	return f
}
