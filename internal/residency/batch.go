// SPDX-License-Identifier: Apache-2.0

package residency

import (
	"iter"
	"sync"
)

// chunk bounds a batch: how many blocks a replica's cache may gain or lose before
// the change is published to holders. It also bounds how far Match can be
// off while an Insert runs, and how long a stripe is locked.
const chunk = 512

// batch collects changes to one replica's cache and sorts them by stripe, so
// that each stripe is locked once for all its changes and the memory
// accesses of one lock overlap.
type batch struct {
	adds, drops []uint64
	sorted      [chunk]uint64
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

// byStripe yields each stripe with changes and the hashes that belong to it
// (counting sort). At most chunk hashes.
func (b *batch) byStripe(hashes []uint64) iter.Seq2[uint64, []uint64] {
	return func(yield func(uint64, []uint64) bool) {
		if len(hashes) == 0 {
			return
		}
		var end [stripeCount]int
		for _, h := range hashes {
			end[stripeOf(h)]++
		}
		sum := 0
		for st, n := range end {
			end[st] = sum
			sum += n
		}
		for _, h := range hashes {
			st := stripeOf(h)
			b.sorted[end[st]] = h
			end[st]++
		}
		start := 0
		for st, e := range end {
			if e > start && !yield(uint64(st), b.sorted[start:e]) {
				return
			}
			start = e
		}
	}
}
