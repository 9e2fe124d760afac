// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"math"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/residency"
)

const (
	// noteEvery is at how many blocks of a prompt one is noted: about a thousand
	// tokens apart.
	noteEvery = 16
	// noteSlots bounds how many blocks are noted, in a megabyte. That is for some
	// 60 million tokens; of fleets that hold more, less is known, and less is made
	// of what evicting costs.
	noteSlots = 1 << 16

	// A hit is deep in a replica's cache when the replica was sent so many tokens
	// since it last used the block, in caches. It would be among the first that
	// are lost if more were computed there.
	deepAfter = 0.25
	// evictMemory is in how many tokens of the whole fleet's prompts, or of those
	// that were computed, what was seen is forgotten to a third, in sums of all caches.
	evictMemory = 0.5
	// Evictions count where more than so much of what is computed was computed
	// before. Below it caches are large enough for most of what is asked again, and
	// new prompts do best wherever there is time for them.
	againFrom = 0.3
	// spreading is what a token weighs that is computed at a replica in whose cache
	// as much was replaced of late as in the fleet's on average, if all that is
	// computed was computed before: with the default match weight, as much as the
	// token that it takes the place of takes to compute.
	spreading = 0.25
	// displacing is what a token weighs that is computed at an average replica, all
	// of whose prompts are found deep in its cache, if all that is computed was
	// computed before: as so many that others compute in its place.
	displacing = 10
)

// evictions learn what it costs to compute a token, beside the time it takes: one
// that is cached must go.
//
// The one that goes is the one that its replica used longest ago. It is the less
// likely to be asked for again, the longer ago that was: so what is new does best
// where least was replaced of late. Otherwise the few replicas that hold a little of
// it, such as an instruction that all send, take all of it, each in the place of
// what it was sent a moment ago, while others keep what nobody asks for any more.
//
// Where contexts are several times what the caches hold, all replicas lose what they
// hold just before it is asked for again, and none has a hit; it then is better that
// some keep what they have and the others take the rest. That sets in by itself
// where new prompts go to those that have least to lose. It counts while requests
// wait: otherwise there is time to compute what is lost.
type evictions struct {
	notes *[noteSlots]note
	// again is how much of what is computed anywhere was computed before and is
	// cached nowhere, 0 to 1.
	again float64
	// turnover is the mean of the replicas', see depth.
	turnover float64
}

// note is the last use of a block: by which replica, as its slot, and how many
// tokens that had been sent by then.
type note struct {
	block uint64
	slot  residency.Slot
	sent  uint32
}

// depth is what is known of how a replica uses its cache.
type depth struct {
	sent float64 // tokens of prompts, ever
	// deep is how many tokens were found deep in its cache of late, over what an
	// average replica was sent.
	deep float64
	// turnover is how much was computed there of late, in caches.
	turnover float64
}

func (e *evictions) at(block uint64) *note { return &e.notes[block%noteSlots] }

// of is what others lose by a token that is computed at a replica, see [Candidate].
func (e *evictions) of(d *depth, waiting bool) float64 {
	lost := 0.0
	if e.turnover > 0 {
		lost = spreading * e.again * d.turnover / e.turnover
	}
	if waiting {
		lost += e.weight() * d.deep
	}
	return lost
}

// weight is what hits deep in a cache weigh: nothing where most of what is computed
// is new.
func (e *evictions) weight() float64 {
	return displacing * max(0, e.again-againFrom) / (1 - againFrom)
}

// learn takes in a request that is sent to its i-th replica.
func (e *evictions) learn(r *Request, i int) {
	o := &r.offers[i]
	to := o.lane
	capacity := float64(to.load.Blocks) * r.PerBlock
	if capacity <= 0 || r.Tokens <= 0 || len(r.Chain) < noteEvery {
		return
	}
	if e.notes == nil {
		e.notes = new([noteSlots]note)
	}
	slot, members := r.Replicas[i].Slot, float64(len(r.offers))
	all := evictMemory * capacity * members

	keep, keepTurnover := math.Exp(-r.Tokens/all), math.Exp(-o.uncached/all)
	to.turnover += o.uncached / capacity
	e.turnover = 0
	for i := range r.offers {
		l := r.offers[i].lane
		l.deep *= keep
		l.turnover *= keepTurnover
		e.turnover += l.turnover / members
	}
	if at := int(o.blocks) / noteEvery * noteEvery; at > 0 {
		n := e.at(r.Chain[at-1])
		since := float64(uint32(uint64(to.sent)) - n.sent)
		if n.block == r.Chain[at-1] && n.slot == slot && since > deepAfter*capacity {
			to.deep += (1 - keep) * members * max(0, r.Tokens-o.uncached) / r.Tokens
		}
	}
	to.sent += r.Tokens

	if o.uncached > 0 {
		again := min(1, e.evicted(r)/o.uncached)
		e.again += (1 - math.Exp(-o.uncached/all)) * (again - e.again)
	}
	for at := noteEvery; at <= len(r.Chain); at += noteEvery {
		*e.at(r.Chain[at-1]) = note{r.Chain[at-1], slot, uint32(uint64(to.sent))}
	}
}

// evicted is how many tokens of a prompt were computed before, and no replica holds.
func (e *evictions) evicted(r *Request) float64 {
	held := 0
	for i := range r.offers {
		held = max(held, int(r.offers[i].blocks))
	}
	known := held / noteEvery * noteEvery
	for next := known + noteEvery; next <= len(r.Chain) && e.at(r.Chain[next-1]).block == r.Chain[next-1]; next += noteEvery {
		known = next
	}
	return float64(max(0, known-held)) * r.PerBlock
}
