// SPDX-License-Identifier: Apache-2.0

// Package plan decides which replica serves a request, and when: the cost rule
// and, above it, the schedule of requests that cannot start at once. It is
// pure: facts and a clock go in, decisions come out, so that a replay runs it
// in virtual time.
package plan

import "math"

// Rule weighs what a choice costs. All costs are in prompt tokens, the unit in
// which an engine's time is spent.
type Rule struct {
	// MatchWeight is what recomputing one token counts against one token of
	// queue: more than 1, because recomputing delays everyone behind as well
	// and displaces what others would hit. The others get that back where a
	// prefix is asked for so often that they will hit it: of what is above 1,
	// half is left when each replica may expect five requests for it, or as many
	// fewer as the replica has less to do than six requests. And it counts more the
	// more requests wait that it delays: five times where twelve wait for each
	// replica, or more.
	MatchWeight float64
	// PerRequest is the most that one request in flight counts, in tokens. Those
	// that decode slow every step, and every token computed there holds them up:
	// so each counts as much as this prompt has to compute, but no less than a
	// quarter of PerRequest.
	PerRequest float64
}

// Default is the rule used when nothing is configured; docs/choice.md tells
// where its figures come from.
var Default = Rule{MatchWeight: 5, PerRequest: 400}

// Candidate is one replica that could serve a request.
type Candidate struct {
	// Queue is the number of uncached prompt tokens that wait there, with what
	// requests count for that are lost on the way.
	Queue float64
	// Uncached is how many tokens of this prompt would be computed there.
	Uncached float64
	// Free is how many tokens of KV cache are free there, +Inf if unknown. The
	// request takes Uncached of them: what is cached is there already.
	Free float64
	// InFlight counts the requests there.
	InFlight float64
	// Crowd is how many of them are beyond the mean of the fleet, with some to
	// spare.
	Crowd float64
	// Rate is how many tokens it prefills in a second, and [fleet.DefaultPrefillRate]
	// at least where its queue can't be known.
	Rate float64
	// Away is how much of the prompt other senders may have left at another
	// replica, its home, that is not known of here; in tokens. 0 where there are
	// no others.
	Away float64
	// Pace is the replica's prefill rate relative to the fleet's mean; 1 if
	// unknown.
	Pace float64
	// Reuse is how many requests of the last minutes asked for what replicas
	// hold of the prompt, for each replica: those that the next minutes bring.
	Reuse float64
	// Shared tells that others send requests there, too: it may have more to do
	// than is known.
	Shared bool
	// Waiting is how many requests wait at the router, for each replica.
	Waiting float64
	// Evicts is what is lost by a token that is computed there and takes the
	// place of one that is cached, as how many tokens that others compute in its
	// place; see evictions.
	Evicts float64
	// KVFree is the share of KV cache that no request in flight uses, and 1 where
	// it is unknown; see [fleet.Load.KVFree].
	KVFree float64
	// Spare is the share of its cache that is believed to hold nothing yet.
	Spare float64
	// Rendezvous orders replicas that cost the same: the highest wins. It is
	// made from the prompt's leading part, so that equal prompts meet.
	Rendezvous uint64

	cost float64 // set by Choose
}

// Cost is what serving the request at c costs. The time until its first token
// goes by the replica's pace. What recomputing takes from others does not:
// weighed by the pace, each match weight above 1 would pile that much more work
// on the faster machines than they can do sooner.
func (r Rule) Cost(c *Candidate) float64 {
	busy := c.Queue + c.Uncached + r.perRequest(c.Uncached)*c.InFlight + c.pressure()
	inFlight := c.InFlight
	if c.Shared {
		inFlight = max(inFlight, busyFrom)
	}
	return busy/c.Pace + r.others(c.Waiting)*(toOthers(c.Reuse, inFlight)+c.Evicts)*c.Uncached + c.crowding() + c.Away
}

// A replica may have crowdFactor times the mean of the requests in flight, and
// crowdSlack more than it, whatever its pace. Each beyond both costs as many tokens
// as the replica computes in crowdSeconds. That hardly matters for time. But a replica that no longer answers may
// be known only seconds later, and would by then have drawn all whose prompts it
// holds.
const (
	crowdFactor  = 1.5
	crowdSlack   = 3
	crowdSeconds = 1
)

// uncrowded is how many requests in flight a replica may have where so many is the mean.
func uncrowded(mean float64) float64 { return max(crowdFactor*mean, mean+crowdSlack) }

// toOthers is how much of a token that is computed again others lose, for a prefix of
// which each replica may expect so many requests, at one that has so many in flight.
// They get it back by hits. It is halved by reuseToHalve requests, or by fewer where
// there is little to do: nobody waits there, and a copy is made for nothing.
func toOthers(reuse, inFlight float64) float64 {
	if reuse == 0 {
		return 1
	}
	halve := inFlight * (reuseToHalve / busyFrom)
	if halve > reuseToHalve {
		halve = reuseToHalve
	} else if halve < leastToHalve {
		halve = leastToHalve
	}
	return halve / (halve + reuse)
}

// What others lose by a token counts waitingCounts more for each request that waits
// for a replica, up to waitingMost of them: all are served so much later. By the
// default match weight it is four that lose as long as nobody waits, so that one more
// counts about a fourth.
const (
	waitingCounts = 0.3
	waitingMost   = 12
)

// others is what a token that others compute counts against one of queue, while so
// many requests wait for each replica.
func (r Rule) others(waiting float64) float64 {
	return (r.MatchWeight - 1) * (1 + waitingCounts*min(waiting, waitingMost))
}

func (r Rule) perRequest(uncached float64) float64 {
	return min(r.PerRequest, max(r.PerRequest/4, uncached))
}

// crowding is what the requests count for, in tokens, that are too many.
func (c *Candidate) crowding() float64 { return crowdSeconds * c.Rate * c.Crowd }

// pressure is how many tokens of KV cache must be freed for the request.
func (c *Candidate) pressure() float64 { return max(0, c.Uncached-c.Free) }

const (
	// Below this difference in cost, in tokens and as a share, two replicas
	// cost the same.
	tieTokens = 16
	tieShare  = 1.0 / 256
	// kvStep is the difference in free KV cache that decides a tie; below it
	// the rendezvous order does.
	kvStep = 0.05
	// spareStep is the same for the room left. It is small, so that even small
	// prompts are spread evenly in the long run.
	spareStep = 0.01
)

// tiedWith is up to which cost a replica costs the same as the cheapest.
func tiedWith(least float64) float64 { return least + tieTokens + tieShare*least }

// Choose returns the index of the cheapest candidate and its cost, or -1 if
// there is none. Ties, normal on an idle fleet, go to the most free KV cache,
// then to the one that has the most room left before it must evict, and then to
// the rendezvous order, never to the first in the list.
func (r Rule) Choose(cs []Candidate) (best int, cost float64) {
	least := math.Inf(1)
	for i := range cs {
		cs[i].cost = r.Cost(&cs[i])
		least = min(least, cs[i].cost)
	}
	tied := tiedWith(least)
	var room [64]merits
	ties := room[:0]
	for i := range cs {
		if c := &cs[i]; c.cost <= tied {
			ties = append(ties, merits{i, c.KVFree, c.Spare, c.Rendezvous})
		}
	}
	if best = foremost(ties); best >= 0 {
		cost = cs[best].cost
	}
	return best, cost
}

// merits decide between replicas that cost the same. They are those of a
// [Candidate]; at is its place.
type merits struct {
	at         int
	kvFree     float64
	spare      float64
	rendezvous uint64
}

// foremost returns the place of the best, -1 if there are none.
func foremost(ties []merits) int {
	freest := math.Inf(-1)
	for i := range ties {
		freest = max(freest, ties[i].kvFree)
	}
	sparest := math.Inf(-1)
	for i := range ties {
		if t := &ties[i]; t.kvFree >= freest-kvStep {
			sparest = max(sparest, t.spare)
		}
	}
	best := -1
	var highest uint64
	for i := range ties {
		t := &ties[i]
		if t.kvFree < freest-kvStep || t.spare < sparest-spareStep {
			continue
		}
		if best < 0 || t.rendezvous > highest {
			best, highest = t.at, t.rendezvous
		}
	}
	return best
}
