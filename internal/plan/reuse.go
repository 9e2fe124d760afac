// SPDX-License-Identifier: Apache-2.0

package plan

import "time"

const (
	// What a token computed again takes from others is halved for a prefix of
	// which each replica may expect so many requests, see [Rule].
	reuseToHalve = 5.0
	// That is at a replica that has busyFrom in flight. At one that has fewer it
	// takes as many fewer, but leastToHalve at least: a prefix that was asked for
	// once is not worth a copy.
	busyFrom     = 6.0
	leastToHalve = 0.25
)

// reuseSlots bounds how many prefixes are followed at once.
const reuseSlots = 4096

// reuses follows how often prefixes were asked for within the last minutes. A
// prefix is named by the hash of its last block; where two meet in one slot,
// the one that is asked for more often keeps it, and the other counts as new.
type reuses [reuseSlots]reuse

type reuse struct {
	prefix uint64
	asked  fading
}

// ask counts a request for the prefix.
func (u *reuses) ask(prefix uint64, now time.Time) {
	if prefix == nothing {
		return
	}
	slot := &u[prefix%reuseSlots]
	if before := slot.asked.add(0, now); slot.prefix != prefix {
		if before >= 1 {
			return
		}
		*slot = reuse{prefix: prefix, asked: fading{at: now}}
	}
	slot.asked.sum++
}

// before returns how many requests for the prefix there were.
func (u *reuses) before(prefix uint64, now time.Time) float64 {
	slot := u[prefix%reuseSlots]
	if prefix == nothing || slot.prefix != prefix {
		return 0
	}
	return slot.asked.add(0, now)
}

// nothing is the prefix of a prompt of which no replica holds a block.
const nothing = 0

// prefix is the hash of the last block of the prompt that any replica holds.
func (r *Request) prefix() uint64 {
	var longest int32
	for i := range r.offers {
		longest = max(longest, r.offers[i].blocks)
	}
	if longest == 0 {
		return nothing
	}
	return r.Chain[longest-1]
}
