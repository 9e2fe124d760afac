// SPDX-License-Identifier: Apache-2.0

package prompt

import (
	"encoding/binary"
	"math/bits"
)

// A block is hashed by multiplying its words to 128 bits and folding the halves, the construction of
// wyhash, which Go's own maps use where the processor has no AES. xxhash, made for long inputs, takes
// nearly twice as long for 256 bytes: a third of its time goes into the finish. The hash of a block
// starts from the hash of the block before, so each stands for all of the text up to there.

// key is what the hashes of one seed have in common. It covers the words of the text before they are
// multiplied: who does not know it cannot bring about the product 0, which forgets what came before.
type key [8]uint64

func newKey(seed uint64) (k key) {
	for i := range k {
		seed += 0x9E3779B97F4A7C15
		k[i] = mix(seed)
	}
	return k
}

// block continues the hash of the text before with one block.
func (k *key) block(before uint64, b *[BlockSize]byte) uint64 {
	k0, k1, k2, k3 := k[0], k[1], k[2], k[3]
	v0, v1, v2, v3 := before^k[4], before^k[5], before^k[6], before^k[7]
	for i := 0; i < BlockSize; i += 64 {
		w := (*[64]byte)(b[i : i+64])
		v0 = product(binary.LittleEndian.Uint64(w[0:8])^k0, binary.LittleEndian.Uint64(w[8:16])^v0)
		v1 = product(binary.LittleEndian.Uint64(w[16:24])^k1, binary.LittleEndian.Uint64(w[24:32])^v1)
		v2 = product(binary.LittleEndian.Uint64(w[32:40])^k2, binary.LittleEndian.Uint64(w[40:48])^v2)
		v3 = product(binary.LittleEndian.Uint64(w[48:56])^k3, binary.LittleEndian.Uint64(w[56:64])^v3)
	}
	return product(v0^k0, v1^k1) ^ product(v2^k2, v3^k3)
}

func product(a, b uint64) uint64 {
	high, low := bits.Mul64(a, b)
	return high ^ low
}

// mix makes every bit of its result depend on every bit of h, and maps no two to one: the finish of
// splitmix64.
func mix(h uint64) uint64 {
	h = (h ^ h>>30) * 0xBF58476D1CE4E5B9
	h = (h ^ h>>27) * 0x94D049BB133111EB
	return h ^ h>>31
}
