// SPDX-License-Identifier: Apache-2.0

package residency

import (
	"iter"
	"sync"
)

// chunk bounds a batch: how many blocks a replica's cache may gain or lose before the
// change is published to holders. It also bounds how far Match can be off while an
// Insert runs, and how long a stripe is locked.
const chunk = 512

// batch collects changes to one replica's cache and sorts them by stripe, so that each
// stripe is locked once for all its changes and the memory accesses of one lock overlap.
type batch struct {
	adds, drops             []uint64 // at most chunk each
	sortedAdds, sortedDrops [chunk]uint64
	warmed                  uint64 // what was read ahead
}

// changes are those of a batch to one stripe.
type changes struct {
	adds, drops []uint64
	warmed      *uint64
}

var batches = sync.Pool{New: func() any {
	return &batch{adds: make([]uint64, 0, chunk), drops: make([]uint64, 0, chunk)}
}}

func newBatch() *batch { return batches.Get().(*batch) }

func (b *batch) reset() { b.adds, b.drops = b.adds[:0], b.drops[:0] }

// free returns an empty batch to the pool.
func (b *batch) free() {
	b.reset()
	batches.Put(b)
}

// byStripe yields each stripe with changes, and its changes.
func (b *batch) byStripe() iter.Seq2[int, changes] {
	return func(yield func(int, changes) bool) {
		if len(b.adds) == 0 && len(b.drops) == 0 {
			return
		}
		var endAdds, endDrops [stripeCount]uint16
		sortByStripe(&b.sortedAdds, b.adds, &endAdds)
		sortByStripe(&b.sortedDrops, b.drops, &endDrops)
		adds, drops := uint16(0), uint16(0)
		for st := range stripeCount {
			ch := changes{b.sortedAdds[adds:endAdds[st]], b.sortedDrops[drops:endDrops[st]], &b.warmed}
			adds, drops = endAdds[st], endDrops[st]
			if len(ch.adds)+len(ch.drops) > 0 && !yield(st, ch) {
				return
			}
		}
	}
}

// sortByStripe is a counting sort. It leaves in end where each stripe's part ends.
func sortByStripe(sorted *[chunk]uint64, hashes []uint64, end *[stripeCount]uint16) {
	for _, h := range hashes {
		end[stripeOf(h)]++
	}
	sum := uint16(0)
	for st, n := range end {
		end[st] = sum
		sum += n
	}
	for _, h := range hashes {
		st := stripeOf(h)
		sorted[end[st]] = h
		end[st]++
	}
}
