// SPDX-License-Identifier: Apache-2.0

package residency

// Match writes to out[slot], for every slot, how many leading blocks of the chain its
// replica is believed to hold. It uses out's memory if that is large enough and returns
// a slice longer than the highest slot in use; slots not in use get 0. It allocates
// nothing up to 1,024 holders of a block.
//
// While an Insert or Remove runs on a replica, what Match says about that replica may be
// off by the blocks the other is just publishing (a few hundred).
//
// Because every replica holds a chain up to some point and not beyond, the number of
// holders only falls along the chain. So Match probes at doubling distances until nobody
// holds the block, then halves only those gaps at whose ends the numbers differ: equal
// numbers mean equal holders. A prompt of 2,048 blocks takes one probe when nobody knows
// it and some twenty when one group of replicas does; each further group that stops
// elsewhere adds at most eleven.
func (x *Index) Match(chain []uint64, out []int32) []int32 {
	for {
		v := x.view.Load()
		out = v.match(chain, out)
		// A lane that changed hands meanwhile may have been read for its old owner.
		if x.view.Load() == v {
			return out
		}
	}
}

// MatchOne is Match for one replica. It returns 0 for a slot that is not in use.
func (x *Index) MatchOne(slot Slot, chain []uint64) int {
	for {
		v := x.view.Load()
		n := v.matchOne(slot, chain)
		if x.view.Load() == v {
			return n
		}
	}
}

func (v *view) match(chain []uint64, out []int32) []int32 {
	if cap(out) < len(v.slots) {
		out = make([]int32, len(v.slots))
	}
	out = out[:len(v.slots)]
	clear(out)
	if len(chain) > 0 {
		if n := v.holders.count(groupPath(chain, 0)); n > 0 {
			v.search(chain, n, out)
		}
	}
	return out
}

// search fills out for a chain whose first block has holders.
func (v *view) search(chain []uint64, holders int, out []int32) {
	s := search{view: v, chain: chain, out: out}
	s.run(probe{0, holders})
}

// search is one Match under way.
type search struct {
	view  *view
	chain []uint64
	out   []int32
	lanes [1024]uint16 // scratch for the holders of one block
}

// probe is the number of holders of one block of the chain.
type probe struct{ at, holders int }

func (s *search) probe(at int) probe {
	return probe{at, s.view.holders.count(groupPath(s.chain, at))}
}

// run probes until nobody holds the block, then works back.
func (s *search) run(first probe) {
	var probes [65]probe // distances double: more than any chain takes
	probes[0] = first
	n, end := 1, probe{at: len(s.chain)}
	for at := 0; at < len(s.chain)-1; n++ {
		at = min(2*at+groupBlocks, len(s.chain)-1)
		probes[n] = s.probe(at)
		if probes[n].holders == 0 {
			end = probes[n]
			break
		}
	}
	// From the far end back: where a lane is first met is where it stops.
	for n--; n >= 0; n-- {
		s.resolve(probes[n], end)
		end = probes[n]
	}
}

// resolve finds the replicas that hold the block at lo and not the one at hi.
func (s *search) resolve(lo, hi probe) {
	for lo.holders > hi.holders {
		if hi.at == lo.at+1 {
			s.stop(lo.at)
			return
		}
		mid := s.probe(between(lo.at, hi.at))
		s.resolve(mid, hi)
		hi = mid
	}
}

// between returns a place in the middle, the start of a group if there is one: its block
// is found at once.
func between(lo, hi int) int {
	mid := lo + (hi-lo)/2
	if hi-lo <= groupBlocks {
		return mid
	}
	if start := mid - mid%groupBlocks; start > lo {
		return start
	}
	return lo - lo%groupBlocks + groupBlocks
}

// stop books the block at as the last one held, for all its holders that were not seen
// further on.
func (s *search) stop(at int) {
	for _, lane := range s.view.holders.appendLanes(s.lanes[:0], groupPath(s.chain, at)) {
		slot := s.view.slotOf(lane)
		if slot >= 0 && s.out[slot] == 0 {
			s.out[slot] = int32(at + 1)
		}
	}
}

func (v *view) matchOne(slot Slot, chain []uint64) int {
	r := v.replica(slot)
	if r == nil {
		return 0
	}
	held, missing := 0, len(chain) // chain[:held] is held, chain[missing:] is not
	for step := 1; held < missing; step *= 2 {
		at := min(held+step, missing) - 1
		if !v.holders.has(groupPath(chain, at), r.lane) {
			missing = at
			break
		}
		held = at + 1
	}
	for held < missing {
		mid := int(uint(held+missing) / 2)
		if v.holders.has(groupPath(chain, mid), r.lane) {
			held = mid + 1
		} else {
			missing = mid
		}
	}
	return held
}
