// SPDX-License-Identifier: Apache-2.0

package residency

import (
	"slices"
	"sync"
	"unsafe"
)

const (
	stripeBits  = 4
	segmentBits = 5
	stripeCount = 1 << stripeBits

	// segmentLog is how many leading bits of a group's first hash say where it is.
	segmentLog = stripeBits + segmentBits
)

// holders maps a block to the lanes that hold it: the one structure that all replicas
// share and that Match reads.
//
// It is cut twice by the leading bits of the hash that a block's group begins with. The
// first cut gives 16 stripes with a lock each, few enough that a batch has several changes
// for each of them, whose cache misses overlap, and many enough that a reader seldom
// meets a writer. The second cut gives each stripe 32 segments, small tables that grow
// alone: with 30 million pairs one has some 10,000 lines, so a writer that must grow it
// holds its stripe for a fraction of a millisecond at worst, and the whole is never
// rebuilt.
type holders struct {
	stripes [stripeCount]stripe
}

// stripe is padded so that its lock shares no cache line with its segments.
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
	return &st.segments[hash>>(64-segmentLog)%(1<<segmentBits)]
}

// count returns how many lanes hold the last block of the path.
func (h *holders) count(path []uint64) int {
	st := h.stripe(path[0])
	st.rlock()
	seg := st.segment(path[0])
	n := seg.lanes.count(seg.get(path))
	st.mu.RUnlock()
	return n
}

// has reports whether lane holds the last block of the path.
func (h *holders) has(path []uint64, lane uint32) bool {
	st := h.stripe(path[0])
	st.rlock()
	seg := st.segment(path[0])
	held := seg.lanes.has(seg.get(path), lane)
	st.mu.RUnlock()
	return held
}

// appendLanes appends the lanes that hold the last block of the path to dst.
func (h *holders) appendLanes(dst []uint16, path []uint64) []uint16 {
	st := h.stripe(path[0])
	st.rlock()
	seg := st.segment(path[0])
	dst = seg.lanes.appendLanes(dst, seg.get(path))
	st.mu.RUnlock()
	return dst
}

// publish books what b collected for lane: what it dropped and what it added.
func (h *holders) publish(b *batch, lane uint32) {
	for st, changes := range b.byStripe() {
		b.warmed += h.stripes[st].apply(changes, lane)
	}
	b.reset()
}

func (st *stripe) apply(ch changes, lane uint32) (warmed uint32) {
	st.mu.Lock()
	warmed = st.warm(ch)
	for _, g := range ch.drops {
		st.segment(g.hashes[0]).drop(g, lane)
	}
	for _, g := range ch.adds {
		st.segment(g.hashes[0]).add(g, lane)
	}
	st.mu.Unlock()
	return warmed
}

// warm brings what the changes will touch into the processor's cache: misses cost a
// fraction when it sees many of them in a row. First the tables, then the lines.
func (st *stripe) warm(ch changes) uint32 {
	sum := uint32(0)
	for _, groups := range [2][]*group{ch.drops, ch.adds} {
		for _, g := range groups {
			sum += st.segment(g.hashes[0]).numbers.warm(g.hashes[0], segmentLog)
		}
	}
	for _, g := range ch.drops {
		seg := st.segment(g.hashes[0])
		if n := int(seg.numbers.guess(g.hashes[0], segmentLog)); n < len(seg.lines) {
			sum += seg.lines[n].first
		}
	}
	for _, g := range ch.adds {
		seg := st.segment(g.hashes[0])
		if n := seg.free; n != 0 {
			sum += seg.line(n).first
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
			blocks += int(seg.blocks)
			bytes += seg.bytes()
		}
		st.mu.RUnlock()
	}
	return blocks, bytes
}

// segment stores lines, and finds them by their first block.
type segment struct {
	numbers numberTable // of lines: index+1
	lines   []line
	free    uint32 // number of the first free line, 0 = none
	live    int32  // lines in use
	blocks  int32  // held by any lane
	lanes   laneSlab
}

// line is some consecutive blocks of one group, a cache line. They are those from slot
// first on, up to the first one that nobody holds; the hashes before first are those of
// the blocks before. A lane that holds a block holds those before it too, so the sets
// only get smaller along the line. Of a free line, hashes[0] is the next free one.
type line struct {
	hashes [groupBlocks]uint64
	lanes  [groupBlocks]laneSet // 0 = nobody: vacant
	first  uint32
}

const lineBytes = int(unsafe.Sizeof(line{}))

func (ln *line) key() uint64 { return ln.hashes[ln.first] }

// begins reports whether the last block of the path is the line's first.
func (ln *line) begins(path []uint64) bool {
	return int(ln.first) == len(path)-1 && slices.Equal(ln.hashes[:len(path)], path)
}

// holds reports whether the block is in the line at slot.
func (ln *line) holds(slot int, hash uint64) bool {
	return ln.lanes[slot] != 0 && ln.hashes[slot] == hash
}

// find returns the number of the line that begins with the last block of the path, or 0.
func (seg *segment) find(path []uint64) uint32 {
	hash := path[len(path)-1]
	s := seg.numbers.search(hash, segmentLog)
	for n := s.next(); n != 0; n = s.next() {
		if seg.line(n).begins(path) {
			return n
		}
	}
	return 0
}

func (seg *segment) line(n uint32) *line { return &seg.lines[n-1] }

// get returns who holds the last block of the path.
func (seg *segment) get(path []uint64) laneSet {
	for slot := 0; ; {
		n := seg.find(path[:slot+1])
		if n == 0 {
			return 0
		}
		ln := seg.line(n)
		for slot++; slot < len(path) && ln.holds(slot, path[slot]); slot++ {
		}
		if slot == len(path) {
			return ln.lanes[slot-1]
		}
	}
}

// add books that lane, which holds the blocks before g.first, holds those up to g.end
// too.
func (seg *segment) add(g *group, lane uint32) {
	last := uint32(0)
	for slot, end := 0, int(g.end); slot < end; {
		n := seg.find(g.hashes[:slot+1])
		if n == 0 {
			seg.fill(last, g, slot, lane)
			return
		}
		ln := seg.line(n)
		for ; slot < end && ln.holds(slot, g.hashes[slot]); slot++ {
			if slot >= int(g.first) {
				ln.lanes[slot] = seg.lanes.add(ln.lanes[slot], lane)
			}
		}
		last = n
	}
}

// fill stores the group's blocks from slot on, of which nobody holds any: behind the
// block before, which is in the line last, if there is room, else in a new line.
func (seg *segment) fill(last uint32, g *group, slot int, lane uint32) {
	if slot == 0 || seg.line(last).lanes[slot] != 0 {
		last = seg.take(g.hashes[0])
		*seg.line(last) = line{hashes: g.hashes, first: uint32(slot)}
		seg.file(last)
	}
	ln := seg.line(last)
	alone := seg.lanes.add(0, lane)
	for ; slot < int(g.end); slot++ {
		ln.hashes[slot] = g.hashes[slot]
		ln.lanes[slot] = alone // a set of one is stored nowhere else, so it may be copied
		seg.blocks++
	}
}

// drop books that lane does not hold the group's blocks from g.first on any more.
func (seg *segment) drop(g *group, lane uint32) {
	for slot, end := 0, int(g.end); slot < end; {
		n := seg.find(g.hashes[:slot+1])
		if n == 0 {
			break
		}
		ln := seg.line(n)
		for ; slot < end && ln.holds(slot, g.hashes[slot]); slot++ {
			if slot < int(g.first) {
				continue
			}
			if ln.lanes[slot] = seg.lanes.remove(ln.lanes[slot], lane); ln.lanes[slot] == 0 {
				seg.blocks--
			}
		}
		if ln.lanes[ln.first] == 0 {
			seg.release(n)
		}
	}
	if len(seg.lines) > 4 && int(seg.live)*4 < len(seg.lines) || seg.lanes.idle() {
		seg.compact()
	}
}

func (seg *segment) file(n uint32) {
	if seg.numbers.full() {
		seg.numbers.resize(seg.numbers.larger(), segmentLog, seg.key)
	}
	seg.numbers.put(seg.key(n), n, segmentLog)
}

func (seg *segment) key(n uint32) uint64 { return seg.line(n).key() }

// take returns the number of a line to use.
func (seg *segment) take(hash uint64) uint32 {
	seg.live++
	if n := seg.free; n != 0 {
		seg.free = uint32(seg.line(n).hashes[0])
		return n
	}
	if len(seg.lines) == cap(seg.lines) {
		grown := make([]line, len(seg.lines), seg.larger(hash))
		copy(grown, seg.lines)
		seg.lines = grown
	}
	seg.lines = append(seg.lines, line{})
	return uint32(len(seg.lines))
}

// larger is how many lines to have room for next. Segments start at different sizes,
// depending on bits that all hashes of a segment share, so that they do not all grow,
// and are not all half empty, at the same time.
func (seg *segment) larger(hash uint64) int {
	first := 1 + int(hash>>(64-segmentLog)&1)
	return max(first, len(seg.lines)+1, len(seg.lines)*5/4)
}

func (seg *segment) release(n uint32) {
	seg.numbers.delete(seg.key(n), n, segmentLog)
	seg.line(n).hashes[0] = uint64(seg.free)
	seg.free = n
	seg.live--
}

// compact moves everything to as little memory as it needs.
func (seg *segment) compact() {
	old := *seg
	*seg = segment{blocks: old.blocks}
	seg.numbers.buckets = make([]numberBucket, numberBuckets(int(old.live)))
	seg.lines = make([]line, 0, old.live)
	seg.lanes.words = make([]uint64, 0, old.lanes.live)
	for i := range old.numbers.buckets {
		bk := &old.numbers.buckets[i]
		for _, e := range bk.entries[:bk.length()] {
			ln := *old.line(e & numberMask)
			for slot, set := range ln.lanes {
				ln.lanes[slot] = seg.lanes.moveFrom(&old.lanes, set)
			}
			n := seg.take(ln.hashes[0])
			*seg.line(n) = ln
			seg.file(n)
		}
	}
}

func (seg *segment) bytes() int {
	return len(seg.numbers.buckets)*numberBucketBytes + cap(seg.lines)*lineBytes + cap(seg.lanes.words)*8
}
