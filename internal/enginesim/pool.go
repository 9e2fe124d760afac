// SPDX-License-Identifier: Apache-2.0

package enginesim

import "math/bits"

// blockID names a physical block. 0 is the null block, which holds nothing and is
// never handed out; it doubles as the sentinel of the free queue.
type blockID = int32

const nullBlock blockID = 0

// block is one physical block of the KV cache.
type block struct {
	hash       uint64
	prev, next blockID // neighbours in the free queue while refs is 0
	twin       blockID // next block of the same content
	refs       int32
	cached     bool // content is complete and findable under hash
}

// blockPool holds all physical blocks: the free queue and the index of cached
// content. A block without users stays cached until it is handed out again.
type blockPool struct {
	onForget func(hash uint64) // told what is dropped for want of room; may be nil
	blocks   []block
	free     int
	index    hashIndex
}

func newBlockPool(size int) *blockPool {
	p := &blockPool{blocks: make([]block, size), index: newHashIndex(size)}
	p.reset()
	return p
}

// reset forgets all content and all users.
func (p *blockPool) reset() {
	clear(p.blocks)
	p.index.reset()
	p.free = 0
	for id := 1; id < len(p.blocks); id++ {
		p.enqueueTail(blockID(id))
	}
}

// usable returns the number of blocks that can hold tokens.
func (p *blockPool) usable() int { return len(p.blocks) - 1 }

// used returns the number of blocks that have a user.
func (p *blockPool) used() int { return p.usable() - p.free }

// lookup returns the block that holds the content, or the null block.
func (p *blockPool) lookup(hash uint64) blockID {
	return p.index.slots[p.index.find(p.blocks, hash)].id
}

// acquire adds a user to a cached block, which leaves the free queue if it was in it.
func (p *blockPool) acquire(id blockID) {
	b := &p.blocks[id]
	if b.refs == 0 {
		p.unlink(id)
	}
	b.refs++
}

// allocate takes the head of the free queue, forgetting what it cached. The
// caller has made sure that a block is free.
func (p *blockPool) allocate() blockID {
	id := p.blocks[nullBlock].next
	p.unlink(id)
	b := &p.blocks[id]
	if b.cached {
		if p.onForget != nil {
			p.onForget(b.hash)
		}
		p.forget(id)
	}
	b.refs = 1
	return id
}

// store makes a block findable under its content. Several blocks may hold the
// same content; the one stored first is found.
func (p *blockPool) store(id blockID, hash uint64) {
	b := &p.blocks[id]
	b.hash, b.cached, b.twin = hash, true, nullBlock

	first := p.index.getOrPut(p.blocks, hash, id)
	if first == id {
		return
	}
	last := first
	for p.blocks[last].twin != nullBlock {
		last = p.blocks[last].twin
	}
	p.blocks[last].twin = id
}

// forget removes a block from the index.
func (p *blockPool) forget(id blockID) {
	b := &p.blocks[id]
	slot := p.index.find(p.blocks, b.hash)
	switch first := p.index.slots[slot].id; {
	case first != id:
		for p.blocks[first].twin != id {
			first = p.blocks[first].twin
		}
		p.blocks[first].twin = b.twin
	case b.twin != nullBlock:
		p.index.slots[slot].id = b.twin
	default:
		p.index.remove(slot)
	}
	b.cached, b.twin = false, nullBlock
}

// release takes one user away from each block of a sequence, tail first, so that
// the tail is handed out again before the head. Blocks that cache nothing go to
// the front of the free queue.
func (p *blockPool) release(ids []blockID) {
	for i := len(ids) - 1; i >= 0; i-- {
		b := &p.blocks[ids[i]]
		b.refs--
		switch {
		case b.refs > 0:
		case b.cached:
			p.enqueueTail(ids[i])
		default:
			p.enqueueHead(ids[i])
		}
	}
}

func (p *blockPool) enqueueTail(id blockID) { p.link(p.blocks[nullBlock].prev, id) }

func (p *blockPool) enqueueHead(id blockID) { p.link(nullBlock, id) }

// link puts a block into the free queue behind another.
func (p *blockPool) link(after, id blockID) {
	before := p.blocks[after].next
	p.blocks[id].prev, p.blocks[id].next = after, before
	p.blocks[after].next = id
	p.blocks[before].prev = id
	p.free++
}

func (p *blockPool) unlink(id blockID) {
	b := &p.blocks[id]
	p.blocks[b.prev].next = b.next
	p.blocks[b.next].prev = b.prev
	p.free--
}

// hashIndex maps content hashes to blocks: open addressing with linear probing at
// a load of at most one half. A Go map is several times slower here, and this
// index is what a replay spends most of its time in. A slot holds 32 bits of the
// hash only, which halves what has to stay in the processor's cache; the block has
// the rest.
type hashIndex struct {
	slots []indexSlot
	shift uint
}

type indexSlot struct {
	tag uint32
	id  blockID // nullBlock marks an empty slot
}

func newHashIndex(entries int) hashIndex {
	width := bits.Len(uint(2*entries - 1))
	return hashIndex{slots: make([]indexSlot, 1<<width), shift: uint(32 - width)}
}

func (x *hashIndex) reset() { clear(x.slots) }

// tagOf spreads a hash. Callers may hash badly (a trace may number its blocks),
// hence the multiplication by 2⁶⁴/φ.
func tagOf(hash uint64) uint32 { return uint32(hash * 0x9e3779b97f4a7c15 >> 32) }

// home returns the first slot to probe.
func (x *hashIndex) home(tag uint32) int { return int(tag >> x.shift) }

func (x *hashIndex) next(i int) int { return (i + 1) & (len(x.slots) - 1) }

// find returns the slot that holds the hash, or the empty one where it belongs.
func (x *hashIndex) find(blocks []block, hash uint64) int {
	tag := tagOf(hash)
	i := x.home(tag)
	for {
		slot := x.slots[i]
		if slot.id == nullBlock || slot.tag == tag && blocks[slot.id].hash == hash {
			return i
		}
		i = x.next(i)
	}
}

// getOrPut returns the block stored under the hash after storing id if there was none.
func (x *hashIndex) getOrPut(blocks []block, hash uint64, id blockID) blockID {
	slot := &x.slots[x.find(blocks, hash)]
	if slot.id == nullBlock {
		*slot = indexSlot{tagOf(hash), id}
	}
	return slot.id
}

// remove empties a slot and moves later entries of the same probe run up, so that
// no tombstones are needed.
func (x *hashIndex) remove(hole int) {
	mask := len(x.slots) - 1
	for i := x.next(hole); x.slots[i].id != nullBlock; i = x.next(i) {
		home := x.home(x.slots[i].tag)
		if (i-home)&mask >= (i-hole)&mask {
			x.slots[hole] = x.slots[i]
			hole = i
		}
	}
	x.slots[hole] = indexSlot{}
}
