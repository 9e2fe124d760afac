// SPDX-License-Identifier: Apache-2.0

package residency

import "math/bits"

// laneSet names the lanes that hold one block, in 32 bits.
//
// Most blocks are held by one replica or two, a shared system prompt by all of them, and
// a fleet may have 8 replicas or 1,000. A fixed bitset wastes 128 bytes on a lonely
// block of a large fleet; a list is slow and large for a block that everybody holds. So
// the common case is stored in the laneSet itself, and only blocks with three holders or
// more point into a [laneSlab]: at a list of 16-bit lanes while that is smaller, at a
// bitmap as soon as it is not. With up to 64 lanes that is one word for any set.
//
//	0                    nobody
//	bit 31 = 0           one or two lanes: lane+1 in bits 0–14 and 15–29
//	bit 31 = 1, 30 = 0   list: four lanes (lane+1, 0 = vacant) a word
//	bit 31 = 1, 30 = 1   bitmap: lane l is bit l%64 of word l/64
//
// The wide forms carry the logarithm of their size in words in bits 26–29 and their
// place in the slab in bits 0–25.
type laneSet uint32

const (
	laneBits = 15
	laneMask = 1<<laneBits - 1
	maxLanes = 1<<14 - 1

	wideFlag   laneSet = 1 << 31
	bitmapFlag laneSet = 1 << 30
	classShift         = 26
	classMask          = 1<<4 - 1
	offsetMask         = 1<<classShift - 1

	maxClass     = 8 // 256 words: a bitmap of all lanes
	lanesPerWord = 4
)

func (s laneSet) wide() bool   { return s&wideFlag != 0 }
func (s laneSet) bitmap() bool { return s&bitmapFlag != 0 }
func (s laneSet) class() uint  { return uint(s>>classShift) & classMask }

// lane1 and lane2 are the two fields of a narrow set: lane+1, or 0.
func (s laneSet) lane1() uint32 { return uint32(s) & laneMask }
func (s laneSet) lane2() uint32 { return uint32(s>>laneBits) & laneMask }

// classFor is the smallest class with at least n words.
func classFor(n int) uint { return uint(bits.Len(uint(n - 1))) }

// bitmapClass is the size of a bitmap that reaches up to lane.
func bitmapClass(lane uint32) uint { return classFor(int(lane/64) + 1) }

// laneSlab stores the wide sets of one segment: blocks of 1, 2, 4, … words carved from
// one slice, with a free list per size threaded through the blocks.
type laneSlab struct {
	words []uint64
	live  int32                // words in use by sets
	free  [maxClass + 1]uint32 // offset+1 of the first free block of a class, 0 = none
}

// view returns the words of a wide set.
func (sl *laneSlab) view(s laneSet) []uint64 {
	offset := int(s & offsetMask)
	return sl.words[offset : offset+1<<s.class()]
}

func (sl *laneSlab) alloc(class uint, kind laneSet) (laneSet, []uint64) {
	size := 1 << class
	sl.live += int32(size)
	offset := uint32(len(sl.words))
	if head := sl.free[class]; head != 0 {
		offset = head - 1
		sl.free[class] = uint32(sl.words[offset])
	} else {
		sl.words = append(sl.words, make([]uint64, size)...)
	}
	s := wideFlag | kind | laneSet(class)<<classShift | laneSet(offset)
	words := sl.view(s)
	clear(words)
	return s, words
}

func (sl *laneSlab) release(s laneSet) {
	class := s.class()
	sl.live -= 1 << class
	sl.view(s)[0] = uint64(sl.free[class])
	sl.free[class] = uint32(s&offsetMask) + 1
}

// idle reports whether most of the slab is free and worth giving back.
func (sl *laneSlab) idle() bool { return len(sl.words) >= 64 && int(sl.live) < len(sl.words)/4 }

// count returns how many lanes are in s.
func (sl *laneSlab) count(s laneSet) int {
	if !s.wide() {
		n := 0
		if s.lane1() != 0 {
			n++
		}
		if s.lane2() != 0 {
			n++
		}
		return n
	}
	n := 0
	if s.bitmap() {
		for _, w := range sl.view(s) {
			n += bits.OnesCount64(w)
		}
		return n
	}
	for _, w := range sl.view(s) {
		for ; w != 0; w >>= 16 {
			if w&0xffff != 0 {
				n++
			}
		}
	}
	return n
}

// has reports whether lane is in s.
func (sl *laneSlab) has(s laneSet, lane uint32) bool {
	if !s.wide() {
		return s.lane1() == lane+1 || s.lane2() == lane+1
	}
	words := sl.view(s)
	if s.bitmap() {
		return int(lane/64) < len(words) && words[lane/64]>>(lane%64)&1 != 0
	}
	for _, w := range words {
		for ; w != 0; w >>= 16 {
			if uint32(w&0xffff) == lane+1 {
				return true
			}
		}
	}
	return false
}

// appendLanes appends the lanes in s to dst, in no particular order.
func (sl *laneSlab) appendLanes(dst []uint16, s laneSet) []uint16 {
	if !s.wide() {
		if l := s.lane1(); l != 0 {
			dst = append(dst, uint16(l-1))
		}
		if l := s.lane2(); l != 0 {
			dst = append(dst, uint16(l-1))
		}
		return dst
	}
	if s.bitmap() {
		for i, w := range sl.view(s) {
			for ; w != 0; w &= w - 1 {
				dst = append(dst, uint16(64*i+bits.TrailingZeros64(w)))
			}
		}
		return dst
	}
	for _, w := range sl.view(s) {
		for ; w != 0; w >>= 16 {
			if l := w & 0xffff; l != 0 {
				dst = append(dst, uint16(l-1))
			}
		}
	}
	return dst
}

// add returns s with lane in it.
func (sl *laneSlab) add(s laneSet, lane uint32) laneSet {
	if !s.wide() {
		return sl.addNarrow(s, lane)
	}
	if s.bitmap() {
		return sl.addBitmap(s, lane)
	}
	return sl.addList(s, lane)
}

func (sl *laneSlab) addNarrow(s laneSet, lane uint32) laneSet {
	first, second := s.lane1(), s.lane2()
	switch {
	case first == lane+1 || second == lane+1:
		return s
	case first == 0:
		return s | laneSet(lane+1)
	case second == 0:
		return s | laneSet(lane+1)<<laneBits
	}
	return sl.build([]uint16{uint16(first - 1), uint16(second - 1), uint16(lane)}, 1)
}

func (sl *laneSlab) addBitmap(s laneSet, lane uint32) laneSet {
	if words := sl.view(s); int(lane/64) < len(words) {
		words[lane/64] |= 1 << (lane % 64)
		return s
	}
	grown, words := sl.alloc(bitmapClass(lane), bitmapFlag)
	copy(words, sl.view(s))
	words[lane/64] |= 1 << (lane % 64)
	sl.release(s)
	return grown
}

func (sl *laneSlab) addList(s laneSet, lane uint32) laneSet {
	if sl.has(s, lane) {
		return s
	}
	words := sl.view(s)
	for i, w := range words {
		for at := 0; at < 64; at += 16 {
			if w>>at&0xffff == 0 {
				words[i] |= uint64(lane+1) << at
				return s
			}
		}
	}
	lanes := sl.appendLanes(make([]uint16, 0, 64), s)
	sl.release(s)
	return sl.build(append(lanes, uint16(lane)), 2*len(words))
}

// remove returns s without lane, in a smaller form once three quarters of the larger one
// would be idle: the slack keeps a lane that comes and goes from converting the set each
// time.
func (sl *laneSlab) remove(s laneSet, lane uint32) laneSet {
	if !s.wide() {
		switch lane + 1 {
		case s.lane1():
			return s >> laneBits // the second, if any, becomes the first
		case s.lane2():
			return s & laneMask
		}
		return s
	}
	words := sl.view(s)
	if s.bitmap() {
		if int(lane/64) < len(words) {
			words[lane/64] &^= 1 << (lane % 64)
		}
	} else {
		removeFromList(words, lane)
	}
	n := sl.count(s)
	if n > 2 && listWords(2*n) >= len(words) {
		return s
	}
	lanes := sl.appendLanes(make([]uint16, 0, 64), s)
	sl.release(s)
	return sl.build(lanes, listWords(2*n))
}

func removeFromList(words []uint64, lane uint32) {
	for i, w := range words {
		for at := 0; at < 64; at += 16 {
			if uint32(w>>at&0xffff) == lane+1 {
				words[i] &^= 0xffff << at
				return
			}
		}
	}
}

// listWords is the size of a list with room for n lanes.
func listWords(n int) int {
	return 1 << classFor(max(1, (n+lanesPerWord-1)/lanesPerWord))
}

// build stores distinct lanes in the smallest form, a list of at least minWords being
// smaller than a bitmap or not used at all.
func (sl *laneSlab) build(lanes []uint16, minWords int) laneSet {
	if len(lanes) <= 2 {
		var s laneSet
		for i, l := range lanes {
			s |= (laneSet(l) + 1) << (i * laneBits)
		}
		return s
	}
	highest := uint16(0)
	for _, l := range lanes {
		highest = max(highest, l)
	}
	list := classFor(max(minWords, listWords(len(lanes))))
	bitmap := bitmapClass(uint32(highest))
	if list < bitmap {
		s, words := sl.alloc(list, 0)
		for i, l := range lanes {
			words[i/lanesPerWord] |= (uint64(l) + 1) << (i % lanesPerWord * 16)
		}
		return s
	}
	s, words := sl.alloc(bitmap, bitmapFlag)
	for _, l := range lanes {
		words[l/64] |= 1 << (l % 64)
	}
	return s
}

// moveFrom copies a set out of another slab, for compaction.
func (sl *laneSlab) moveFrom(old *laneSlab, s laneSet) laneSet {
	if !s.wide() {
		return s
	}
	moved, words := sl.alloc(s.class(), s&bitmapFlag)
	copy(words, old.view(s))
	return moved
}
