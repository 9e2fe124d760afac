// SPDX-License-Identifier: Apache-2.0

package residency

// Blocks are kept by groups: five that follow each other in a prompt, the first group
// being blocks 0–4. A prompt's blocks come and go together, so what would be five cold
// cache lines, were each block on its own in a hash table, is one; and one entry of a
// table finds all five. Five hashes with their holders, or with their place in a
// replica's list, fill a cache line.
//
// Prompts branch anywhere, so a group may be in several records: one from its first
// block on, and one for each way in which a prompt left another within the group. A
// record is filed under the first of its own blocks, and stores the hashes before it
// too. The record of a given block is found by a walk: from the group's first block
// follow the record until it differs, then look for the record that begins there.
const groupBlocks = 5

// group is the part of a prompt's group that a replica gained or lost: the blocks from
// first to end, with those before them.
type group struct {
	hashes     [groupBlocks]uint64
	first, end uint8
}

// groupPath returns the blocks of chain[at]'s group up to and with chain[at].
func groupPath(chain []uint64, at int) []uint64 { return chain[at-at%groupBlocks : at+1] }
