// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"math"
	"slices"
	"sync/atomic"
	"time"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/residency"
)

const (
	// lookAhead is how many waiting requests one event plans for, at most. The
	// plan ends earlier when no replica has room left, which is the rule.
	lookAhead = 256
	// A waiting request's match is looked up again when it is older than
	// rematchAfter: before the request is sent in any case, and for up to
	// rematches others that an event plans for.
	rematchAfter = 100 * time.Millisecond
	rematches    = 16

	shortestPause = time.Millisecond
	longestPause  = time.Second
)

// Scheduler decides for the requests of one fleet where each goes and when. It
// holds requests back while the replica where they would cost least has work
// queued: bound on arrival they would wait there all the same, behind long
// prompts, while their prefix may be evicted and a better place come free.
//
// At each event (a request comes or leaves, one finishes, a scrape arrives, a
// queue is believed to have drained) a small list schedule is made anew: in
// the order of the line each request takes the replica where it costs least,
// counting those before it into the queues, and those whose replica has room
// are sent.
//
// All methods take the time, so that a replay runs them in virtual time.
type Scheduler struct {
	Rule  Rule
	Terms Terms

	index *residency.Index
	held  atomic.Int64 // how many wait; read without the lock

	mu        brief
	line      line
	lanes     lanes
	reuses    reuses
	evictions evictions
	landing   landing

	// room for what one event needs
	order   []*Request
	choices []int     // places among a request's replicas
	costs   []float64 // of each choice
	ties    []merits  // of those of the choices that cost least
	sent    []uint64  // keys of what this event has sent

	complete bool // the last plan was for all that wait
}

// NewScheduler returns a scheduler for the replicas of an index.
func NewScheduler(index *residency.Index) *Scheduler {
	s := &Scheduler{Rule: Default, Terms: DefaultTerms, index: index}
	s.line.terms = &s.Terms
	s.lanes.terms, s.lanes.line, s.lanes.evicts = &s.Terms, &s.line, &s.evictions
	return s
}

// Submit decides at once, if it can: the choice has then been sent. Otherwise
// the request waits, until Ready is closed or Leave is called.
func (s *Scheduler) Submit(r *Request, now time.Time) (sent bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lanes.next(now)
	r.arrived, r.bound, r.ready, r.asked = now, false, nil, nothing // it may be used again
	s.match(r)
	r.asked = r.held
	s.reuses.ask(r.asked, now)
	c, fits := s.chooseBehind(r)
	if c.Index < 0 || fits && s.unclaimed(r, c) {
		s.send(r, c)
		return true
	}
	if s.line.len() >= s.Terms.Waiting {
		s.giveUp(r, c)
		return true
	}
	r.ready = make(chan struct{})
	r.least = s.leastUncached(r)
	queued, rate := s.behind(r)
	s.line.join(r, s.Rule.MatchWeight, queued, rate, now)
	o := &r.offers[c.Index]
	o.lane.await(o)
	if fits {
		s.plan()
	}
	s.held.Store(int64(s.line.len()))
	return r.bound
}

// Leave takes a waiting request out: its client left. It reports whether the
// request still waited; if not, it has been sent.
func (s *Scheduler) Leave(r *Request, now time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if r.bound {
		return false
	}
	r.bound = true
	s.line.leave(r, false)
	s.held.Store(int64(s.line.len()))
	return true
}

// Event makes the plan anew: something has changed.
func (s *Scheduler) Event(now time.Time) {
	if s.held.Load() == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lanes.next(now)
	s.plan()
	s.held.Store(int64(s.line.len()))
}

// Waiting is the number of requests held back.
func (s *Scheduler) Waiting() int { return int(s.held.Load()) }

// Next is when the next event is due by itself, because a queue is believed to
// have drained by then; false if nobody waits.
func (s *Scheduler) Next(now time.Time) (time.Time, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.order = s.line.first(1, s.order[:0])
	if len(s.order) == 0 {
		return time.Time{}, false
	}
	s.lanes.next(now)
	soonest := math.Inf(1)
	for _, p := range s.order[0].Replicas {
		// A replica with room that was passed over is no event to wait for, nor is
		// one to which no connection is free.
		if l := s.lanes.of(p); !l.hasRoom() && !l.load.Starved {
			soonest = min(soonest, (l.queue-l.roomy)/l.load.Rate)
		}
	}
	soonest = min(max(soonest, shortestPause.Seconds()), longestPause.Seconds())
	return now.Add(time.Duration(soonest * float64(time.Second))), true
}

// plan is the list schedule.
func (s *Scheduler) plan() {
	now := s.lanes.now
	for r := s.line.promote(now); r != nil; r = s.line.promote(now) {
		s.match(r) // mostly it was planned for long ago, or never
		c, _ := s.choose(r)
		s.line.leave(r, !s.Terms.Refuse)
		s.giveUp(r, c)
	}
	s.order = s.line.first(lookAhead, s.order[:0])
	s.sent = s.sent[:0]
	s.complete = len(s.order) == 0
	looked := 0
	for i, r := range s.order {
		if i == 0 {
			if !s.anyRoom(r) {
				return
			}
			s.lanes.nothingAwaited()
		}
		if s.outdated(r) && looked < rematches {
			s.match(r)
			looked++
		}
		at, fits := s.cheapest(r)
		if fits && s.outdated(r) {
			s.match(r)
			at, fits = s.cheapest(r)
		}
		if at >= 0 && !fits {
			o := &r.offers[at]
			s.lanes.add(o.lane, o.uncached)
			o.lane.await(o)
			continue
		}
		c, _ := s.choose(r)
		s.line.leave(r, true)
		s.send(r, c)
		s.sent = append(s.sent, r.Key)
		if !s.anyRoom(r) {
			return
		}
	}
	s.complete = len(s.order) < lookAhead
}

// unclaimed tells whether a new request may go at once where it was chosen to: nobody
// waits for that replica. The last plan has found all those who do.
func (s *Scheduler) unclaimed(r *Request, c Choice) bool {
	return s.line.len() == 0 || s.complete && r.offers[c.Index].lane.awaited == 0
}

// outdated tells whether a request's match may not be what it was.
func (s *Scheduler) outdated(r *Request) bool {
	return s.lanes.now.Sub(r.matched) > rematchAfter || slices.Contains(s.sent, r.Key)
}

// anyRoom tells whether some replica can still be sent work by this event.
func (s *Scheduler) anyRoom(r *Request) bool {
	for _, p := range r.Replicas {
		if s.lanes.of(p).hasRoom() {
			return true
		}
	}
	return false
}

// behind is the work that the request's replicas have, in tokens, and how much
// of it they do in a second.
func (s *Scheduler) behind(r *Request) (queued, rate float64) {
	for i, p := range r.Replicas {
		if r.Caller.Open(i) {
			l := s.lanes.of(p)
			queued += l.load.Queue
			rate += l.load.Rate
		}
	}
	return queued, rate
}

// giveUp is for requests that cannot wait: it sends them where they cost least,
// or refuses them.
func (s *Scheduler) giveUp(r *Request, c Choice) {
	if c.Index >= 0 && s.Terms.Refuse {
		c = Choice{Index: -1, Refused: true, Open: c.Open, RetryAfter: s.line.drained(s.behind(r))}
	}
	s.send(r, c)
}

// send binds a request to a choice and lets the next one see it.
func (s *Scheduler) send(r *Request, c Choice) {
	c.Waited = s.lanes.now.Sub(r.arrived)
	r.bound = true
	if late := r.Caller.Send(c); late != nil {
		s.landing = append(s.landing, late)
	}
	if c.Index >= 0 {
		s.evictions.learn(r, c.Index)
		s.lanes.reread(r.Replicas[c.Index])
	}
	if r.ready != nil {
		close(r.ready)
	}
}
