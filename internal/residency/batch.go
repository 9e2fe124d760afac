// SPDX-License-Identifier: Apache-2.0

package residency

import (
	"iter"
	"slices"
	"sync"
)

const (
	// chunk bounds a batch: how many blocks a replica's cache may gain or lose before the
	// change is published to holders. It also bounds how far Match can be off while an
	// Insert runs, and how long a stripe is locked.
	chunk = chunkGroups * groupBlocks

	chunkGroups = 128
)

// batch collects changes to one replica's cache and sorts them by stripe, so that each
// stripe is locked once for all its changes and the memory accesses of one lock overlap:
// a cold cache line may take 0.3 µs, ten of them at once hardly more.
type batch struct {
	adds, drops             []group // mostly up to chunkGroups each, more if the groups are small
	sortedAdds, sortedDrops []*group
	warmed                  uint32 // what was read ahead
}

// changes are those of a batch to one stripe, in the order they were made.
type changes struct {
	adds, drops []*group
}

var batches = sync.Pool{New: func() any { return new(batch) }}

func newBatch() *batch { return batches.Get().(*batch) }

func (b *batch) reset() { b.adds, b.drops = b.adds[:0], b.drops[:0] }

// free returns an empty batch to the pool.
func (b *batch) free() {
	b.reset()
	batches.Put(b)
}

// dropped returns how many blocks the batch drops.
func (b *batch) dropped() int {
	n := 0
	for i := range b.drops {
		n += int(b.drops[i].end - b.drops[i].first)
	}
	return n
}

// byStripe yields each stripe with changes, and its changes.
func (b *batch) byStripe() iter.Seq2[int, changes] {
	return func(yield func(int, changes) bool) {
		if len(b.adds) == 0 && len(b.drops) == 0 {
			return
		}
		var endAdds, endDrops [stripeCount]int32
		b.sortedAdds = sortByStripe(b.sortedAdds, b.adds, &endAdds)
		b.sortedDrops = sortByStripe(b.sortedDrops, b.drops, &endDrops)
		adds, drops := int32(0), int32(0)
		for st := range stripeCount {
			ch := changes{b.sortedAdds[adds:endAdds[st]], b.sortedDrops[drops:endDrops[st]]}
			adds, drops = endAdds[st], endDrops[st]
			if len(ch.adds)+len(ch.drops) > 0 && !yield(st, ch) {
				return
			}
		}
	}
}

// sortByStripe is a counting sort into the memory of sorted. It leaves in end where each
// stripe's part ends.
func sortByStripe(sorted []*group, groups []group, end *[stripeCount]int32) []*group {
	sorted = slices.Grow(sorted[:0], len(groups))[:len(groups)]
	for i := range groups {
		end[stripeOf(groups[i].hashes[0])]++
	}
	sum := int32(0)
	for st, n := range end {
		end[st] = sum
		sum += n
	}
	for i := range groups {
		st := stripeOf(groups[i].hashes[0])
		sorted[end[st]] = &groups[i]
		end[st]++
	}
	return sorted
}
