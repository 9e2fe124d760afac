// SPDX-License-Identifier: Apache-2.0

package residency

import (
	"math/bits"
	"sync"
	"unsafe"
)

const (
	stripeBits  = 6
	segmentBits = 5
	stripeCount = 1 << stripeBits
)

// holders maps a block's hash to the lanes that hold it: the one structure that all
// replicas share and that Match reads.
//
// It is cut twice by the leading bits of the hash. The first cut gives 64 stripes with a
// lock each, few enough that a batch of a few hundred changes takes each lock once for
// several of them (a lock costs as much as a change), many enough that a reader seldom
// meets a writer. The second cut gives each stripe 32 segments, small open-addressing
// tables that grow alone: with 30 million pairs one has some 10,000 entries, so a writer
// that must grow it holds its stripe for a fraction of a millisecond at worst, and the
// whole is never rebuilt.
type holders struct {
	stripes [stripeCount]stripe
}

// stripe is padded so that its lock shares no cache line with its segments and the first
// half of a segment, all that most changes need of it, is on one line.
type stripe struct {
	mu       sync.RWMutex
	_        [64 - unsafe.Sizeof(sync.RWMutex{})]byte
	segments [1 << segmentBits]segment
}

// rlock takes the read lock, trying for a fraction of a microsecond before it parks:
// writers hold a stripe about that long, and waking up takes longer.
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

// publish books what b collected for lane: what it dropped and what it added.
func (h *holders) publish(b *batch, lane uint32) {
	for st, changes := range b.byStripe() {
		h.stripes[st].apply(changes, lane)
	}
	b.reset()
}

func (st *stripe) apply(ch changes, lane uint32) {
	st.mu.Lock()
	*ch.warmed += st.warm(ch.drops) + st.warm(ch.adds)
	for _, hash := range ch.drops {
		st.segment(hash).drop(hash, lane)
	}
	for _, hash := range ch.adds {
		st.segment(hash).add(hash, lane)
	}
	st.mu.Unlock()
}

// warm brings the buckets of the hashes into the processor's cache: misses cost a
// fraction when it sees many of them in a row. It returns something to keep, so that the
// reads are not optimised away.
func (st *stripe) warm(hashes []uint64) uint64 {
	sum := uint64(0)
	for _, hash := range hashes {
		if seg := st.segment(hash); seg.used > 0 {
			sum += uint64(seg.buckets[seg.home(hash)].header)
		}
	}
	return sum
}

// size returns the number of distinct blocks held by any lane and the memory in use, in
// bytes.
func (h *holders) size() (blocks, bytes int) {
	bytes = int(unsafe.Sizeof(*h))
	for i := range h.stripes {
		st := &h.stripes[i]
		st.rlock()
		for j := range st.segments {
			seg := &st.segments[j]
			blocks += int(seg.used)
			bytes += cap(seg.buckets)*bucketBytes + cap(seg.lanes.words)*8
		}
		st.mu.RUnlock()
	}
	return blocks, bytes
}

// segment is an open-addressing table. Hash and holders sit side by side, five blocks
// and a header to a cache line, a bucket, so that a lookup touches one line, seldom two.
// Homes, overflow and removal are those of [numberTable]; growth by half keeps the load
// between 57 % and 85 %.
type segment struct {
	buckets []bucket
	used    int32
	lanes   laneSlab
}

// bucket is a cache line. Its entries are the first length(), in any order.
type bucket struct {
	header  uint32 // as of numberBucket
	entries [5]entry
}

// entry is one block. The hash is in two halves because a uint64 would align the entry
// to 16 bytes instead of 12.
type entry struct {
	lo, hi uint32
	lanes  laneSet
}

const (
	bucketBytes   = int(unsafe.Sizeof(bucket{}))
	bucketEntries = len(bucket{}.entries)
)

func (e *entry) hash() uint64 { return uint64(e.hi)<<32 | uint64(e.lo) }

func (bk *bucket) length() int  { return int(bk.header & lengthMask) }
func (bk *bucket) passed() bool { return bk.header >= onePassed }
func (bk *bucket) full() bool   { return bk.length() == bucketEntries }

// find returns the entry with the hash, or nil.
func (bk *bucket) find(hash uint64) *entry {
	lo, hi := uint32(hash), uint32(hash>>32)
	for i := range min(bk.length(), bucketEntries) {
		if e := &bk.entries[i]; e.lo == lo && e.hi == hi {
			return e
		}
	}
	return nil
}

func (seg *segment) home(hash uint64) int {
	at, _ := bits.Mul64(hash<<(stripeBits+segmentBits), uint64(len(seg.buckets)))
	return int(at)
}

func (seg *segment) next(i int) int {
	if i++; i < len(seg.buckets) {
		return i
	}
	return 0
}

func (seg *segment) find(hash uint64) *entry {
	i := seg.home(hash)
	for range seg.buckets { // once around at most: every bucket may have been passed
		bk := &seg.buckets[i]
		if e := bk.find(hash); e != nil || !bk.passed() {
			return e
		}
		i = seg.next(i)
	}
	return nil
}

func (seg *segment) get(hash uint64) laneSet {
	if e := seg.find(hash); e != nil {
		return e.lanes
	}
	return 0
}

func (seg *segment) add(hash uint64, lane uint32) {
	if e := seg.find(hash); e != nil {
		e.lanes = seg.lanes.add(e.lanes, lane)
		return
	}
	if int(seg.used)*20 >= len(seg.buckets)*bucketEntries*17 { // load 85 %
		seg.resize(seg.larger(hash))
	}
	seg.place(entry{uint32(hash), uint32(hash >> 32), seg.lanes.add(0, lane)})
	seg.used++
}

// larger is the size to grow to. Segments start at different sizes, depending on bits
// that all hashes of a segment share, so that they do not all grow, and are not all half
// empty, at the same time.
func (seg *segment) larger(hash uint64) int {
	first := 1 + int(hash>>(64-stripeBits-segmentBits)&1)
	return max(first, len(seg.buckets)+1, len(seg.buckets)*3/2)
}

func (seg *segment) place(e entry) {
	i := seg.home(e.hash())
	for seg.buckets[i].full() {
		seg.buckets[i].header += onePassed
		i = seg.next(i)
	}
	bk := &seg.buckets[i]
	bk.entries[bk.length()] = e
	bk.header++
}

func (seg *segment) drop(hash uint64, lane uint32) {
	e := seg.find(hash)
	if e == nil {
		return
	}
	if e.lanes = seg.lanes.remove(e.lanes, lane); e.lanes == 0 {
		seg.delete(hash)
	}
	switch {
	case int(seg.used)*4 < len(seg.buckets)*bucketEntries && len(seg.buckets) > 2:
		seg.resize(int(seg.used)/3 + 1)
	case seg.lanes.idle():
		seg.resize(len(seg.buckets))
	}
}

// delete takes out a hash that is in the table.
func (seg *segment) delete(hash uint64) {
	for i := seg.home(hash); ; i = seg.next(i) {
		bk := &seg.buckets[i]
		if e := bk.find(hash); e != nil {
			*e = bk.entries[bk.length()-1]
			bk.header--
			seg.used--
			return
		}
		bk.header -= onePassed
	}
}

// resize moves everything to a table of so many buckets and, when most of the slab is
// idle, to a fresh slab.
func (seg *segment) resize(size int) {
	old, oldLanes := seg.buckets, seg.lanes
	seg.buckets = make([]bucket, size)
	compact := int(oldLanes.live) < len(oldLanes.words)/2
	if compact {
		seg.lanes = laneSlab{words: make([]uint64, 0, oldLanes.live)}
	}
	for i := range old {
		for _, e := range old[i].entries[:old[i].length()] {
			if compact {
				e.lanes = seg.lanes.moveFrom(&oldLanes, e.lanes)
			}
			seg.place(e)
		}
	}
}
