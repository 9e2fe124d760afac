// SPDX-License-Identifier: Apache-2.0

package residency

import (
	"slices"
	"unsafe"
)

const (
	// MaxCapacity is the most blocks one replica is believed to hold; larger capacities
	// are cut to it. At 64 bytes of prompt a block it is a gigabyte of text.
	MaxCapacity = numberMask - 1

	pageBits = 7
	pageSize = 1 << pageBits
)

// node is some consecutive blocks of one group in one replica's cache. Links are node
// numbers, not pointers: half the size, and the garbage collector never looks at them.
// It is a cache line.
type node struct {
	hashes     [groupBlocks]uint64 // the node's blocks are hashes[first:end]; those before come before them in the group
	prev, next uint32              // towards the more and the less recently used; of a free node, next is the next free one
	parent     uint32              // the node whose last block comes before this one's first; 0 for the start of a prompt
	children   uint32              // how many nodes have this one as parent
	first, end uint8
}

// lost marks, in node.parent, a node that remove is about to take out.
const lost = 1 << 31

func (nd *node) blocks() int { return int(nd.end - nd.first) }

// key is what the node is found by.
func (nd *node) key() uint64 { return nd.hashes[nd.first] }

// begins reports whether the last block of the path is the node's first.
func (nd *node) begins(path []uint64) bool {
	return int(nd.first) == len(path)-1 && slices.Equal(nd.hashes[:len(path)], path)
}

// cache models one replica's prefix cache: which blocks it holds and in which order they
// will be evicted. It is not safe for concurrent use.
//
// The order is that of the blocks, one by one, but they are listed by nodes of up to
// five: a node's blocks follow each other in the prompt and in the order of use. When a
// prompt uses only the first blocks of a node, or goes on otherwise after them, the node
// is split.
//
// Nodes live in pages that are never moved, so that growth costs one page and not a
// copy, and are linked into one list by recency of use; node 0 is the list's head and
// tail. The first block of a node is found through numberTables.
//
// Every node in the list stands after its parent, i.e. parents are more recently used
// than their children. By induction over the operations:
//
//   - insert places the first n blocks of a chain, from the head on, at the front of the
//     list. Any of these stands behind its parent, which is the one placed
//     before it. Any other node keeps its place relative to the other nodes
//     that did not move, and what moved only moved towards the front:
//     if its parent moved, it still stands behind it; it cannot have moved
//     itself without its parent, because a chain has all ancestors of its blocks.
//   - evict takes the last blocks of the list, which by the rule have no children.
//   - remove takes blocks with all their descendants.
//
// So what is held is always closed under "the block before": a chain is held up to some
// point and not at all after it, which is what Match relies on, and tails leave before
// heads, which is what vLLM does.
type cache struct {
	pages    []*[pageSize]node
	next     uint32 // first node never used
	free     uint32 // first free node, 0 = none
	nodes    int    // in the list
	len      int    // blocks held
	capacity int

	numbers   []numberTable // by leading bits of the hash
	numberLog uint          // log2 of len(numbers)
	buckets   int           // in all of numbers
}

const nodeBytes = int(unsafe.Sizeof(node{}))

// tableNodes is how many nodes of a full cache one numberTable has, if they are full
// too: it bounds the work of growing one.
const tableNodes = 2048

func newCache(capacity int) cache {
	c := cache{
		pages:     []*[pageSize]node{new([pageSize]node)},
		next:      1,
		capacity:  capacity,
		numberLog: classFor(capacity/(groupBlocks*tableNodes) + 1),
	}
	c.numbers = make([]numberTable, 1<<c.numberLog)
	return c
}

func (c *cache) at(n uint32) *node { return &c.pages[n>>pageBits][n%pageSize] }

func (c *cache) table(hash uint64) *numberTable {
	return &c.numbers[hash>>1>>(63-c.numberLog)]
}

// find returns the node that begins with the last block of the path, or 0.
func (c *cache) find(path []uint64) uint32 {
	hash := path[len(path)-1]
	s := c.table(hash).search(hash, c.numberLog)
	for n := s.next(); n != 0; n = s.next() {
		if c.at(n).begins(path) {
			return n
		}
	}
	return 0
}

// file makes a node known under its first block.
func (c *cache) file(n uint32) {
	hash := c.at(n).key()
	t := c.table(hash)
	if t.full() {
		size := t.larger()
		if most := numberBuckets(c.capacity >> c.numberLog); len(t.buckets) < most {
			size = min(size, most)
		}
		c.buckets += size - len(t.buckets)
		t.resize(size, c.numberLog, func(n uint32) uint64 { return c.at(n).key() })
	}
	t.put(hash, n, c.numberLog)
}

func (c *cache) unfile(n uint32) {
	hash := c.at(n).key()
	c.table(hash).delete(hash, n, c.numberLog)
}

// touch makes what is held of the chain the most recently used. It returns how many
// blocks these are and the last one's node, and false if the chain cannot be extended: a
// block known under another parent means that the hashes of two prefixes collided, and
// the one known stays.
func (c *cache) touch(chain []uint64) (held int, last uint32, ok bool) {
	for held < len(chain) {
		n := c.find(groupPath(chain, held))
		if n == 0 {
			return held, last, true
		}
		nd := c.at(n)
		if nd.parent != last {
			return held, last, false
		}
		slot := nd.common(chain[held:])
		held += slot - int(nd.first)
		if slot < int(nd.end) {
			n = c.split(n, slot)
		}
		if c.at(last).next != n {
			c.unlink(n)
			c.link(n, last)
		}
		last = n
	}
	return held, last, true
}

// common returns the slot of the node's first block that is not in the chain, which
// begins with the node's first.
func (nd *node) common(chain []uint64) int {
	slot := int(nd.first) + 1
	for slot < int(nd.end) && slot-int(nd.first) < len(chain) && nd.hashes[slot] == chain[slot-int(nd.first)] {
		slot++
	}
	return slot
}

// split cuts a node in two before slot. The front part is a new node, because the
// children know the rear part's number. It stands before the rear in the list.
func (c *cache) split(n uint32, slot int) (front uint32) {
	front = c.take()
	nd := c.at(n)
	c.unfile(n)
	*c.at(front) = node{hashes: nd.hashes, parent: nd.parent, children: 1, first: nd.first, end: uint8(slot)}
	nd.first, nd.parent = uint8(slot), front
	c.file(front)
	c.file(n)
	c.link(front, nd.prev)
	c.nodes++
	return front
}

// extend adds the blocks chain[from:to], at most chunk, of which none is held, behind
// the node of the block before. It makes room for them first. It returns the last node
// and false if it had to stop, as touch does.
//
// Victims and newcomers are done as a batch: nearly every step is a cache miss, and
// misses cost a fraction when the processor sees many of them in a row, so warm touches
// the memory first.
func (c *cache) extend(chain []uint64, from, to int, after uint32, b *batch) (last uint32, ok bool) {
	// A cache above its capacity, about to be trimmed, does not grow but is not trimmed
	// here.
	c.evict(min(to-from, c.len+to-from-c.capacity), b)
	for at := from + (groupBlocks-from%groupBlocks)%groupBlocks; at < to; at += groupBlocks {
		b.warmed += c.table(chain[at]).warm(chain[at], c.numberLog)
	}
	for from < to {
		slot := from % groupBlocks
		end := min(from-slot+groupBlocks, to)
		if nd := c.at(after); slot > 0 && nd.children == 0 {
			copy(nd.hashes[slot:], chain[from:end])
			nd.end += uint8(end - from)
		} else {
			if c.find(groupPath(chain, from)) != 0 {
				return after, false
			}
			nd.children++
			after = c.append(node{parent: after, first: uint8(slot)}, chain[from-slot:end], after)
		}
		c.len += end - from
		b.adds = append(b.adds, c.at(after).part(slot))
		from = end
	}
	return after, true
}

// append puts a new node with the group's blocks into the list.
func (c *cache) append(nd node, blocks []uint64, after uint32) uint32 {
	n := c.take()
	nd.end = uint8(copy(nd.hashes[:], blocks))
	*c.at(n) = nd
	c.file(n)
	c.link(n, after)
	c.nodes++
	return n
}

// part returns the node's blocks from slot on.
func (nd *node) part(slot int) group {
	return group{nd.hashes, uint8(slot), nd.end}
}

// evict takes out the n least recently used blocks, if any.
func (c *cache) evict(n int, b *batch) {
	whole := 0 // nodes to go
	for victim := c.at(0).prev; n > 0; {
		nd := c.at(victim)
		cut := min(n, nd.blocks())
		b.drops = append(b.drops, nd.part(int(nd.end)-cut))
		if cut == nd.blocks() {
			hash := nd.key()
			b.warmed += c.table(hash).warm(hash, c.numberLog)
			whole++
		} else {
			nd.end -= uint8(cut)
			c.len -= cut
		}
		n -= cut
		victim = nd.prev
	}
	for range whole {
		c.delete(c.at(0).prev)
	}
}

// trim evicts down to capacity, at most chunk blocks. It reports whether there is more
// to do.
func (c *cache) trim(b *batch) (more bool) {
	c.evict(min(c.len-c.capacity, chunk), b)
	return c.len > c.capacity
}

// delete takes out a node without children.
func (c *cache) delete(n uint32) {
	c.unfile(n)
	nd := c.at(n)
	c.at(nd.parent&^lost).children--
	c.unlink(n)
	c.len -= nd.blocks()
	c.nodes--
	nd.next = c.free
	c.free = n
}

// remove takes out the last block of the path and all its descendants, wherever they
// branched off, calling flush whenever b is full. Descendants are less recently used
// than the block, so it looks for them from there on, until as many children were found
// as the nodes found have; they mostly follow at once.
func (c *cache) remove(path []uint64, b *batch, flush func()) {
	first := c.locate(path)
	if first == 0 {
		return
	}
	if slot := len(path) - 1; slot > int(c.at(first).first) {
		c.split(first, slot) // leaves the rear
	}
	c.at(first).parent |= lost
	last := first
	for missing := c.at(first).children; missing > 0; {
		last = c.at(last).next
		nd := c.at(last)
		if nd.parent != 0 && c.at(nd.parent).parent&lost != 0 {
			nd.parent |= lost
			missing += nd.children - 1
		}
	}
	for n := last; ; {
		nd := c.at(n)
		prev := nd.prev
		if nd.parent&lost != 0 {
			if len(b.drops) == chunkGroups {
				flush()
			}
			b.drops = append(b.drops, nd.part(int(nd.first)))
			c.delete(n)
		}
		if n == first {
			return
		}
		n = prev
	}
}

// locate returns the node that has the last block of the path, or 0.
func (c *cache) locate(path []uint64) uint32 {
	for slot := 0; ; {
		n := c.find(path[:slot+1])
		if n == 0 {
			return 0
		}
		if slot = c.at(n).common(path[slot:]); slot == len(path) {
			return n
		}
	}
}

// forget drops up to limit blocks, or a few more, without care for the cache itself,
// which is not used any more. It reports whether there are more.
func (c *cache) forget(limit int, b *batch) (dropped int, more bool) {
	n := c.at(0).prev
	for dropped < min(limit, chunk) && n != 0 {
		nd := c.at(n)
		b.drops = append(b.drops, nd.part(int(nd.first)))
		dropped += nd.blocks()
		n = nd.prev
	}
	c.len -= dropped
	c.at(0).prev = n
	return dropped, c.len > 0
}

// compacted returns a copy in as little memory as it needs.
func (c *cache) compacted() cache {
	small := newCache(c.capacity)
	moved := make([]uint32, c.next)
	for n := c.at(0).next; n != 0; n = c.at(n).next {
		nd := *c.at(n)
		// The parent stands before its children: it has moved already.
		nd.parent = moved[nd.parent]
		moved[n] = small.append(nd, nd.hashes[:nd.end], small.at(0).prev)
	}
	small.len = c.len
	small.at(0).children = c.at(0).children
	return small
}

// oversized reports whether compaction would free at least half the nodes.
func (c *cache) oversized() bool {
	return len(c.pages) > 1 && int(c.next) > 2*c.nodes+1
}

func (c *cache) take() uint32 {
	if n := c.free; n != 0 {
		c.free = c.at(n).next
		return n
	}
	n := c.next
	c.next++
	if int(n>>pageBits) == len(c.pages) {
		c.pages = append(c.pages, new([pageSize]node))
	}
	return n
}

func (c *cache) link(n, after uint32) {
	nd, a := c.at(n), c.at(after)
	nd.prev, nd.next = after, a.next
	c.at(a.next).prev = n
	a.next = n
}

func (c *cache) unlink(n uint32) {
	nd := c.at(n)
	c.at(nd.prev).next = nd.next
	c.at(nd.next).prev = nd.prev
}

func (c *cache) bytes() int {
	return len(c.pages)*pageSize*nodeBytes + cap(c.pages)*8 +
		len(c.numbers)*int(unsafe.Sizeof(numberTable{})) + c.buckets*numberBucketBytes
}
