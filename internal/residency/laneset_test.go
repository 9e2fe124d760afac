// SPDX-License-Identifier: Apache-2.0

package residency

import (
	"math/rand/v2"
	"slices"
	"testing"
	"unsafe"
)

func TestLaneSetAgainstMap(t *testing.T) {
	for _, lanes := range []int{3, 64, 65, 200, 1000, maxLanes} {
		rng := rand.New(rand.NewPCG(uint64(lanes), 1))
		var slab laneSlab
		sets := make([]laneSet, 8)
		want := make([]map[uint32]bool, len(sets))
		for i := range want {
			want[i] = map[uint32]bool{}
		}
		for step := range 6000 {
			i := rng.IntN(len(sets))
			lane := uint32(rng.IntN(lanes))
			// Sets fill up in the first half and drain in the second.
			if add := rng.IntN(10) < 7; add == (step < 3000) {
				sets[i] = slab.add(sets[i], lane)
				want[i][lane] = true
			} else {
				for l := range want[i] {
					if rng.IntN(2) == 0 {
						lane = l // else mostly one that is not in
					}
					break
				}
				sets[i] = slab.remove(sets[i], lane)
				delete(want[i], lane)
			}
			if got := slab.count(sets[i]); got != len(want[i]) {
				t.Fatalf("%d lanes, step %d: count %d, want %d", lanes, step, got, len(want[i]))
			}
			if slab.has(sets[i], lane) != want[i][lane] {
				t.Fatalf("%d lanes, step %d: has(%d) = %v", lanes, step, lane, !want[i][lane])
			}
		}
		live := 0
		for i, s := range sets {
			if s.wide() {
				live += 1 << s.class()
			}
			got := slab.appendLanes(nil, s)
			slices.Sort(got)
			for _, l := range got {
				if !want[i][uint32(l)] {
					t.Fatalf("%d lanes: set %d lists lane %d, which is not in it", lanes, i, l)
				}
			}
			if len(slices.Compact(got)) != len(want[i]) {
				t.Fatalf("%d lanes: set %d lists %d lanes, want %d", lanes, i, len(got), len(want[i]))
			}
		}
		if live != int(slab.live) {
			t.Errorf("%d lanes: %d words in use, counted as %d", lanes, live, slab.live)
		}
	}
}

// TestSlabReuse: a lane that comes and goes takes no new memory each time, and sets that
// became small give theirs back.
func TestSlabReuse(t *testing.T) {
	seg := segment{}
	const blocks, lanes = 100, 200
	for round := range 10 {
		for block := range uint64(blocks) {
			for lane := range uint32(lanes) {
				seg.add(lonely(block), lane)
			}
		}
		// Bitmaps of 256 lanes, and what the smaller ones before them left to be reused.
		if limit := blocks*4 + 16; len(seg.lanes.words) > limit {
			t.Fatalf("round %d: %d words for %d sets, want at most %d", round, len(seg.lanes.words), blocks, limit)
		}
		if round == 9 {
			break
		}
		for block := range uint64(blocks) {
			for lane := range uint32(lanes - 50) {
				seg.drop(lonely(block), lane)
			}
		}
	}
	for block := range uint64(blocks) {
		for lane := uint32(1); lane < lanes; lane++ {
			seg.drop(lonely(block), lane)
		}
	}
	if n := len(seg.lanes.words); n >= 64 {
		t.Errorf("%d words are left for %d sets of one lane", n, blocks)
	}
	if _, err := checkSegment(&seg); err != nil {
		t.Error(err)
	}
}

// lonely is a group of one block.
func lonely(block uint64) *group {
	return &group{hashes: [groupBlocks]uint64{mix(block)}, end: 1}
}

// TestAlignment pins that what is stored by the million is a cache line.
func TestAlignment(t *testing.T) {
	if lineBytes != 64 || numberBucketBytes != 64 || nodeBytes != 64 {
		t.Errorf("lines, buckets and nodes are %d, %d and %d bytes, want 64", lineBytes, numberBucketBytes, nodeBytes)
	}
	if offset := unsafe.Offsetof(stripe{}.segments); offset != 64 || unsafe.Sizeof(stripe{})%64 != 0 {
		t.Errorf("segments start at byte %d of %d in a stripe, want 64 of a multiple of 64", offset, unsafe.Sizeof(stripe{}))
	}
}

// TestLaneSetSize pins what a set costs, on which the memory goal rests.
func TestLaneSetSize(t *testing.T) {
	tests := []struct {
		name  string
		lanes []uint32
		words int
	}{
		{"one", []uint32{70}, 0},
		{"two", []uint32{0, maxLanes - 1}, 0},
		{"three of 64", []uint32{0, 1, 63}, 1},
		{"three of 1,000", []uint32{1, 500, 999}, 1},
		{"five of 1,000", []uint32{1, 500, 999, 3, 4}, 2},
		{"five of 128", []uint32{1, 2, 3, 4, 127}, 2},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			var slab laneSlab
			var s laneSet
			for _, l := range test.lanes {
				s = slab.add(s, l)
			}
			if int(slab.live) != test.words {
				t.Errorf("%d words, want %d", slab.live, test.words)
			}
			for _, l := range test.lanes {
				s = slab.remove(s, l)
			}
			if s != 0 || slab.live != 0 {
				t.Errorf("an emptied set is %x and takes %d words", s, slab.live)
			}
		})
	}
}
