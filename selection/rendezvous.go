// SPDX-License-Identifier: Apache-2.0

package selection

// rendezvous orders replicas for a prompt: every replica has a pseudo-random
// place in it that does not depend on which others there are.
func rendezvous(key uint64, replica uint64) uint64 {
	return mix(key ^ replica)
}

// mix spreads every bit of x over the whole word (the finaliser of
// MurmurHash3, by Austin Appleby, public domain).
func mix(x uint64) uint64 {
	x ^= x >> 33
	x *= 0xff51afd7ed558ccd
	x ^= x >> 33
	x *= 0xc4ceb9fe1a85ec53
	return x ^ x>>33
}
