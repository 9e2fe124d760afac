// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"math"
	"time"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/fleet"
)

// oneBatch is the least a replica may have queued and still be sent more, in
// tokens: what an engine computes in one step anyway (vLLM's default
// max_num_batched_tokens for online serving).
const oneBatch = 2048

// lane is what an event knows of one replica, with what the event's own plan
// has added so far. What an event reads for each request that waits and each
// lane comes first, and fits a cache line.
type lane struct {
	epoch    uint64
	perUnit  float64 // cost of a token that takes the replica's time
	queue    float64 // tokens
	lost     float64 // tokens that count in the cost, but take no room
	inFlight float64
	free     float64 // tokens of KV cache
	evicts   float64 // what others lose by a token that is computed there, see Candidate
	best     bool    // nothing speaks against it, see judge

	planned bool    // more was added since it was read
	awaited float64 // tokens of those that wait for it, by the last plan
	roomy   float64 // queue at or below this: more may be sent
	load    fleet.Reading
	replica *fleet.Replica
	depth
}

// judge notes whether anything speaks against the replica: that it is to be
// avoided, that no connection can be made, or that it warms up among replicas that
// are warm, and has had its share.
func (l *lane) judge(young bool) {
	known := &l.load
	l.best = known.Avoid == fleet.Eligible && known.Connections > 0 && (young || known.Room > 0)
}

// hasRoom tells whether the replica can be sent more.
func (l *lane) hasRoom() bool { return l.queue <= l.roomy }

// cost is Rule.Cost of a request at the lane's replica, by what that offers, at an
// event.
func (l *lane) cost(r *Request, o *offer, at common) float64 {
	uncached := o.uncached
	cost := l.queue + l.lost + uncached + o.each*l.inFlight
	if pressure := uncached - l.free; pressure > 0 {
		cost += pressure
	}
	cost = l.perUnit*cost + at.others*(l.toOthers(r)+l.evicts)*uncached + o.away
	if crowd := l.inFlight - at.uncrowded; crowd > 0 {
		cost += crowdSeconds * l.crowdRate() * crowd
	}
	return cost
}

// crowdRate is the rate by which a crowd costs. Where the queue can't be known, what is
// in flight is all that tells it, and the rate is a bound from below: no less is assumed
// there than of a replica that tells nothing.
func (l *lane) crowdRate() float64 {
	if l.load.QueueKnown {
		return l.load.Rate
	}
	return max(l.load.Rate, fleet.DefaultPrefillRate)
}

// toOthers is what others lose by a token that the lane's replica computes of the request.
func (l *lane) toOthers(r *Request) float64 {
	if r.reuse == 0 || l.inFlight >= busyFrom || l.load.Shared {
		return r.toOthers
	}
	return toOthers(r.reuse, l.inFlight)
}

// common is what costs at an event have in common at all replicas.
type common struct {
	uncrowded float64 // so many requests in flight are no crowd
	others    float64 // see Rule.others
}

// await notes that a request waits for the lane's replica.
func (l *lane) await(o *offer) { l.awaited += o.uncached }

// lanes are the replicas' states at one event.
type lanes struct {
	terms  *Terms
	evicts *evictions
	line   *line
	epoch  uint64
	now    time.Time
	bySlot []*lane // in the residency index

	// young: most of the replicas that nothing else speaks against warm up.
	young bool
	// of the event surveyed, in sum: those that nothing speaks against, and the
	// requests in flight there
	surveyed          uint64
	members, inFlight float64
}

// next begins an event: what was known is out of date.
func (s *lanes) next(now time.Time) {
	s.epoch++
	s.now = now
}

// of returns the state of a replica at this event.
func (s *lanes) of(p *fleet.Replica) *lane {
	slot := int(p.Slot)
	if slot < 0 { // in no index: that is full, or the replica's config was replaced
		l := new(lane)
		s.read(l, p)
		return l
	}
	for slot >= len(s.bySlot) {
		s.bySlot = append(s.bySlot, new(lane))
	}
	l := s.bySlot[slot]
	if l.epoch != s.epoch {
		s.read(l, p)
	}
	return l
}

// at returns the state of a request's i-th replica at this event. The request's
// match may be of an earlier one.
func (s *lanes) at(r *Request, i int) *lane {
	l := r.offers[i].lane
	if l.epoch != s.epoch {
		s.read(l, r.Replicas[i])
	}
	return l
}

// survey looks over the replicas of a request. An event has one survey: that of
// the first request that asks.
func (s *lanes) survey(r *Request) {
	if s.surveyed == s.epoch {
		return
	}
	s.surveyed = s.epoch
	warm, warming := s.count(r)
	if young := warm < warming; young != s.young {
		s.setYoung(young, r)
		s.count(r)
	}
}

// count sums up a request's replicas that nothing speaks against, and tells how
// many of those that are eligible are warm, and how many warm up.
func (s *lanes) count(r *Request) (warm, warming int) {
	s.members, s.inFlight = 0, 0
	for i := range r.offers {
		l := s.at(r, i)
		if l.best {
			s.members++
			s.inFlight += l.inFlight
		}
		switch {
		case l.load.Avoid != fleet.Eligible:
		case l.load.Warming:
			warming++
		default:
			warm++
		}
	}
	return warm, warming
}

// setYoung notes whether most replicas warm up, as after the start of a whole
// fleet. Then none is held back for it: there is nobody to take its share, and
// what a new one holds would be computed elsewhere once more.
func (s *lanes) setYoung(young bool, r *Request) {
	s.young = young
	for _, l := range s.bySlot {
		l.judge(young)
	}
	for i := range r.offers {
		r.offers[i].lane.judge(young) // it may be in no index
	}
}

// common is what costs have in common for a request, by how many requests those
// replicas have in flight, and how many wait, that nothing speaks against.
func (s *lanes) common(rule *Rule, r *Request) common {
	s.survey(r)
	members := max(s.members, 1)
	return common{uncrowded(s.inFlight / members), rule.others(s.waiting(members))}
}

// waiting is how many requests wait for each of so many replicas.
func (s *lanes) waiting(members float64) float64 { return float64(s.line.len()) / members }

// follow keeps the mean right when a lane had so many in flight before.
func (s *lanes) follow(l *lane, before float64) {
	if s.surveyed == s.epoch && l.best {
		s.inFlight += l.inFlight - before
	}
}

// read brings a lane to what is known of its replica now. On most events that
// is what was known at the one before.
func (s *lanes) read(l *lane, p *fleet.Replica) {
	if l.replica != p { // its slot in the index was another's
		*l = lane{replica: p}
	}
	l.epoch = s.epoch
	l.evicts = s.evicts.of(&l.depth, s.line.len() > 0)
	if changed := p.Read(&l.load, s.now); !changed && !l.planned {
		return
	}
	l.planned = false
	l.queue, l.lost, l.inFlight, l.free = l.load.Wait(), l.load.Lost, l.load.InFlight, l.load.Free()
	l.roomy = math.Inf(1)
	if l.load.QueueKnown {
		l.roomy = max(s.terms.Room.Seconds()*l.load.Rate, oneBatch) + s.unseen(&l.load.Load)
	}
	if l.load.Starved {
		l.roomy = -1
	}
	l.judge(s.young)
	l.perUnit = 1 / l.load.Pace
}

// unseen is how many tokens a replica may have worked off since its last scrape
// that its queue still holds: what it does in that time, but for a second, in
// which a queue is known well enough.
func (s *lanes) unseen(l *fleet.Load) float64 {
	return l.Rate * max(0, s.now.Sub(l.Scraped).Seconds()-1)
}

// reread takes in what has been sent to a replica, and keeps what is planned
// for it.
func (s *lanes) reread(p *fleet.Replica) {
	l := s.of(p)
	planned, before := l.queue-l.load.Wait(), l.inFlight
	s.read(l, p)
	s.follow(l, before)
	if planned != 0 {
		l.planned = true
		l.queue += planned
	}
}

// add plans a request for a replica.
func (s *lanes) add(l *lane, uncached float64) {
	l.planned = true
	l.queue += uncached
	l.inFlight++
	l.free -= uncached
	s.follow(l, l.inFlight-1)
}

// nothingAwaited is for a plan that is made anew.
func (s *lanes) nothingAwaited() {
	for _, l := range s.bySlot {
		l.awaited = 0
	}
}

// strictness says which replicas are good enough. The strictest set that is
// not empty is taken, so that a request is never refused which the replicas
// could serve.
type strictness int

const (
	anyOpen   strictness = iota // even one tried already
	untried                     // by this request
	serving                     // and known to serve the model, if any is
	eligible                    // and not to be avoided
	strictest                   // and nothing else speaks against it, see judge
)

func (t strictness) allows(l *lane, tried, serves bool) bool {
	return !(t >= untried && tried ||
		t >= serving && !serves ||
		t >= eligible && l.load.Avoid != fleet.Eligible ||
		t >= strictest && !l.best)
}
