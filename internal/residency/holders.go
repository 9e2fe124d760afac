// SPDX-License-Identifier: Apache-2.0

package residency

import (
	"math/bits"
	"sync"
	"unsafe"
)

const (
	stripeBits  = 6
	segmentBits = 6
	stripeCount = 1 << stripeBits
)

// holders maps a block's hash to the lanes that hold it: the one structure that
// all replicas share and that Match reads.
//
// It is cut twice by the leading bits of the hash. The first cut gives 64
// stripes with a lock each, few enough that a batch of a few hundred changes
// takes each lock once for several of them (a lock costs as much as a change),
// many enough that a reader seldom meets a writer. The second cut gives each
// stripe 64 segments, small open-addressing tables that grow alone: with 30
// million pairs the largest has some 5,000 entries, so a writer that must grow one
// holds its stripe for tens of microseconds and the whole is never rebuilt.
type holders struct {
	stripes [stripeCount]stripe
}

type stripe struct {
	mu       sync.RWMutex
	segments [1 << segmentBits]segment
	blocks   int      // entries in all segments
	bytes    int      // of all segments' slices
	_        [64]byte // keep the next stripe's lock off this cache line
}

// rlock takes the read lock, trying for a fraction of a microsecond before it
// parks: writers hold a stripe about that long, and waking up takes longer.
func (st *stripe) rlock() {
	for range 32 {
		if st.mu.TryRLock() {
			return
		}
	}
	st.mu.RLock()
}

func stripeOf(hash uint64) uint64 { return hash >> (64 - stripeBits) }

func (h *holders) stripe(hash uint64) *stripe { return &h.stripes[stripeOf(hash)] }

func (st *stripe) segment(hash uint64) *segment {
	return &st.segments[hash>>(64-stripeBits-segmentBits)%(1<<segmentBits)]
}

// count returns how many lanes hold the block.
func (h *holders) count(hash uint64) int {
	st := h.stripe(hash)
	st.rlock()
	seg := st.segment(hash)
	n := seg.lanes.count(seg.get(hash))
	st.mu.RUnlock()
	return n
}

// has reports whether lane holds the block.
func (h *holders) has(hash uint64, lane uint32) bool {
	st := h.stripe(hash)
	st.rlock()
	seg := st.segment(hash)
	held := seg.lanes.has(seg.get(hash), lane)
	st.mu.RUnlock()
	return held
}

// appendLanes appends the lanes that hold the block to dst.
func (h *holders) appendLanes(dst []uint16, hash uint64) []uint16 {
	st := h.stripe(hash)
	st.rlock()
	seg := st.segment(hash)
	dst = seg.lanes.appendLanes(dst, seg.get(hash))
	st.mu.RUnlock()
	return dst
}

// publish books what b collected for lane: what it dropped, then what it added.
func (h *holders) publish(b *batch, lane uint32) {
	for st, hashes := range b.byStripe(b.drops) {
		h.stripes[st].drop(hashes, lane)
	}
	for st, hashes := range b.byStripe(b.adds) {
		h.stripes[st].add(hashes, lane)
	}
	b.reset()
}

func (st *stripe) add(hashes []uint64, lane uint32) {
	st.mu.Lock()
	for _, hash := range hashes {
		seg := st.segment(hash)
		if seg.full() {
			// Segments start at different sizes so that they do not all grow,
			// and are not all half empty, at the same time.
			first := minEntries + int(hash>>(64-stripeBits-segmentBits)%4)
			st.resize(seg, max(first, len(seg.entries)*3/2))
		}
		if seg.add(hash, lane) {
			st.blocks++
		}
		st.bytes += seg.slabGrowth()
	}
	st.mu.Unlock()
}

func (st *stripe) drop(hashes []uint64, lane uint32) {
	st.mu.Lock()
	for _, hash := range hashes {
		seg := st.segment(hash)
		if seg.drop(hash, lane) {
			st.blocks--
		}
		st.bytes += seg.slabGrowth()
		if seg.sparse() {
			st.resize(seg, max(minEntries, 2*seg.used))
		} else if seg.lanes.idle() {
			st.resize(seg, len(seg.entries))
		}
	}
	st.mu.Unlock()
}

func (st *stripe) resize(seg *segment, size int) {
	st.bytes -= seg.bytes()
	seg.resize(size)
	st.bytes += seg.bytes()
}

// size returns the number of distinct blocks held by any lane and the memory
// in use, in bytes.
func (h *holders) size() (blocks, bytes int) {
	bytes = int(unsafe.Sizeof(*h))
	for i := range h.stripes {
		st := &h.stripes[i]
		st.rlock()
		blocks += st.blocks
		bytes += st.bytes
		st.mu.RUnlock()
	}
	return blocks, bytes
}

// minEntries is the size of the smallest segment that holds anything.
const minEntries = 8

// entry is one block. The hash is in two halves because a uint64 would align
// the entry to 16 bytes instead of 12.
type entry struct {
	lo, hi uint32
	lanes  laneSet // 0 marks a vacant entry
}

const entryBytes = int(unsafe.Sizeof(entry{}))

func (e *entry) hash() uint64 { return uint64(e.hi)<<32 | uint64(e.lo) }

// segment is an open-addressing table with linear probing. Hash and holders
// sit side by side, so that a lookup touches one cache line, seldom two; the home
// of a hash is found by multiplication, so that the size need not be a power of
// two and growth by half keeps the load between 53 % and 80 %. A removed entry is
// filled by its successors instead of leaving a tombstone: a cache that is always full
// removes as often as it adds, and tombstones would force rebuilds for ever.
type segment struct {
	entries []entry
	used    int
	lanes   laneSlab
	slab    int // capacity of lanes.words when last counted
}

func (seg *segment) full() bool { return seg.used*5 >= len(seg.entries)*4 }
func (seg *segment) sparse() bool {
	return seg.used*4 < len(seg.entries) && len(seg.entries) > 2*minEntries
}

func (seg *segment) bytes() int {
	return cap(seg.entries)*entryBytes + seg.slab*8
}

// slabGrowth returns by how many bytes the slab grew since it was last asked.
func (seg *segment) slabGrowth() int {
	now := cap(seg.lanes.words)
	grown := now - seg.slab
	seg.slab = now
	return grown * 8
}

func (seg *segment) home(hash uint64) int {
	at, _ := bits.Mul64(hash<<(stripeBits+segmentBits), uint64(len(seg.entries)))
	return int(at)
}

func (seg *segment) next(i int) int {
	if i++; i < len(seg.entries) {
		return i
	}
	return 0
}

// distance is how many steps of probing lead from i to j.
func (seg *segment) distance(i, j int) int {
	if j < i {
		j += len(seg.entries)
	}
	return j - i
}

// find returns where hash is or, with found false, where it would go. The table
// must not be empty or full.
func (seg *segment) find(hash uint64) (at int, found bool) {
	lo, hi := uint32(hash), uint32(hash>>32)
	entries := seg.entries
	for i := seg.home(hash); ; {
		e := &entries[i]
		if e.lanes == 0 {
			return i, false
		}
		if e.lo == lo && e.hi == hi {
			return i, true
		}
		if i++; i == len(entries) {
			i = 0
		}
	}
}

func (seg *segment) get(hash uint64) laneSet {
	if seg.used == 0 {
		return 0
	}
	at, _ := seg.find(hash)
	return seg.entries[at].lanes
}

// add reports whether the block is new to the table.
func (seg *segment) add(hash uint64, lane uint32) (isNew bool) {
	at, found := seg.find(hash)
	e := &seg.entries[at]
	if !found {
		*e = entry{lo: uint32(hash), hi: uint32(hash >> 32)}
		seg.used++
	}
	e.lanes = seg.lanes.add(e.lanes, lane)
	return !found
}

// drop reports whether nobody holds the block any more.
func (seg *segment) drop(hash uint64, lane uint32) (gone bool) {
	if seg.used == 0 {
		return false
	}
	at, found := seg.find(hash)
	if !found {
		return false
	}
	e := &seg.entries[at]
	if e.lanes = seg.lanes.remove(e.lanes, lane); e.lanes != 0 {
		return false
	}
	seg.vacate(at)
	seg.used--
	return true
}

// vacate empties an entry and pulls later ones forward over the hole, as far as
// their homes allow, so that probing never stops early.
func (seg *segment) vacate(hole int) {
	for i := seg.next(hole); seg.entries[i].lanes != 0; i = seg.next(i) {
		home := seg.home(seg.entries[i].hash())
		if seg.distance(home, i) >= seg.distance(hole, i) {
			seg.entries[hole] = seg.entries[i]
			hole = i
		}
	}
	seg.entries[hole] = entry{}
}

// resize moves everything to a table of the given size and, when most of the
// slab is idle, to a fresh slab.
func (seg *segment) resize(size int) {
	old := seg.entries
	seg.entries = make([]entry, size)
	oldLanes := seg.lanes
	compact := oldLanes.live < len(oldLanes.words)/2
	if compact {
		seg.lanes = laneSlab{words: make([]uint64, 0, oldLanes.live)}
	}
	for i := range old {
		e := &old[i]
		if e.lanes == 0 {
			continue
		}
		at, _ := seg.find(e.hash())
		seg.entries[at] = *e
		if compact {
			seg.entries[at].lanes = seg.lanes.moveFrom(&oldLanes, e.lanes)
		}
	}
	seg.slab = cap(seg.lanes.words)
}
