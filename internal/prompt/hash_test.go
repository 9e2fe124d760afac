// SPDX-License-Identifier: Apache-2.0

package prompt

import (
	"math/bits"
	"testing"
)

// TestHashDependsOnEveryBit flips each bit of a block and of what came before, for several keys and
// texts: no hash comes twice, and about half of each hash's bits change.
func TestHashDependsOnEveryBit(t *testing.T) {
	seen := map[uint64]string{}
	note := func(hash uint64, what string) {
		if before, ok := seen[hash]; ok {
			t.Fatalf("one hash for %s and %s", before, what)
		}
		seen[hash] = what
	}
	for seed := range uint64(3) {
		k := newKey(seed)
		for _, fill := range []byte{0, 'a', 0xFF} {
			var b [BlockSize]byte
			for i := range b {
				b[i] = fill
			}
			plain := k.block(1, &b)
			note(plain, "a plain block")
			changed, least := 0, 64
			count := func(hash uint64) {
				n := bits.OnesCount64(hash ^ plain)
				changed += n
				least = min(least, n)
			}
			for bit := range BlockSize * 8 {
				b[bit/8] ^= 1 << (bit % 8)
				hash := k.block(1, &b)
				note(hash, "a bit of the block")
				count(hash)
				b[bit/8] ^= 1 << (bit % 8)
			}
			for bit := range 64 {
				hash := k.block(1^1<<bit, &b)
				note(hash, "a bit of what came before")
				count(hash)
			}
			if mean := float64(changed) / (BlockSize*8 + 64); mean < 31 || mean > 33 || least < 8 {
				t.Errorf("seed %d, fill %d: %.1f bits of 64 change, %d at least", seed, fill, mean, least)
			}
		}
	}
}

// TestHashOfWords swaps words and repeats: order counts.
func TestHashOfWords(t *testing.T) {
	k := newKey(1)
	seen := map[uint64]bool{}
	var b [BlockSize]byte
	for i := range BlockSize / 8 {
		for j := range BlockSize / 8 {
			for v := range byte(20) {
				b[8*i], b[8*j+1] = v+1, v+1
				if hash := k.block(0, &b); seen[hash] {
					t.Fatalf("words %d and %d: a hash comes twice", i, j)
				} else {
					seen[hash] = true
				}
				b[8*i], b[8*j+1] = 0, 0
			}
		}
	}
}
