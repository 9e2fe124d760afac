// SPDX-License-Identifier: Apache-2.0

package fleet

import "time"

const (
	// maxInUse is how many requests in flight are looked at for a prompt's
	// blocks, mostly the latest: a cache miss each.
	maxInUse = 128
	// eventsLag is how long after an answer the events of its steps may take to
	// arrive; answersKept is how many such answers are looked at.
	eventsLag   = time.Second
	answersKept = 16
)

// inUse are prompts whose blocks a replica holds or is about to, whatever its
// events have told so far: those of requests in flight, because an engine
// evicts no block that is in use, and those answered a moment ago, because
// events come a step behind. The methods are not safe for concurrent use;
// Replica holds the lock.
type inUse struct {
	flying   []flight // in no order; each request knows its place
	answered [answersKept]answeredPrompt
	next     int // the oldest of answered
}

type flight struct {
	chain   []uint64
	request *Reservation
}

type answeredPrompt struct {
	chain []uint64
	at    time.Time
}

// take notes a request that is about to be sent.
func (u *inUse) take(r *Reservation) {
	if len(r.Chain) == 0 {
		return
	}
	u.flying = append(u.flying, flight{r.Chain, r})
	r.place = len(u.flying)
}

// leave notes the end of a request. The blocks of one that was not answered
// may never have been computed.
func (u *inUse) leave(r *Reservation, how outcome, now time.Time) {
	if r.place == 0 {
		return
	}
	last := len(u.flying) - 1
	u.flying[r.place-1] = u.flying[last]
	u.flying[r.place-1].request.place = r.place
	u.flying[last] = flight{}
	u.flying = u.flying[:last]
	r.place = 0
	if how == finished {
		u.answered[u.next] = answeredPrompt{r.Chain, now}
		u.next = (u.next + 1) % answersKept
	}
}

// takenIn is how many requests in flight an engine must have taken in: those that
// have their first token, and all that were sent before a time.
func (u *inUse) takenIn(before time.Time) (n int) {
	for _, f := range u.flying {
		if f.request.past || f.request.sentAt.Before(before) {
			n++
		}
	}
	return n
}

// cleared notes that the engine has emptied its cache.
func (u *inUse) cleared() { u.answered = [answersKept]answeredPrompt{} }

// blocks is how many leading blocks of a chain are in use. Events that arrived
// after an answer, the last of them at heard, tell of its blocks as well.
func (u *inUse) blocks(chain []uint64, heard, now time.Time) int {
	most := 0
	for i := max(0, len(u.flying)-maxInUse); i < len(u.flying); i++ {
		most = further(most, chain, u.flying[i].chain)
	}
	for i := range u.answered {
		if a := &u.answered[i]; a.at.After(heard) && now.Sub(a.at) < eventsLag {
			most = further(most, chain, a.chain)
		}
	}
	return most
}

// further returns how many leading blocks a chain has in common with another,
// or most if they are no more than that. Equal hashes mean equal blocks before
// them, so one look tells that it is not worth counting.
func further(most int, chain, other []uint64) int {
	low, high := most, min(len(chain), len(other))
	if low >= high || chain[low] != other[low] {
		return most
	}
	for low++; low < high; {
		if mid := int(uint(low+high+1) >> 1); chain[mid-1] == other[mid-1] {
			low = mid
		} else {
			high = mid - 1
		}
	}
	return low
}
