// SPDX-License-Identifier: Apache-2.0

package residency

import (
	"math/bits"
	"unsafe"
)

const (
	nodeBits = 24
	nodeMask = 1<<nodeBits - 1

	// MaxCapacity is the most blocks one replica is believed to hold; larger
	// capacities are cut to it. At 64 bytes of prompt a block it is a gigabyte of
	// text.
	MaxCapacity = nodeMask - 1

	pageBits = 9
	pageSize = 1 << pageBits
)

// node is one block in one replica's cache. Links are node numbers, not pointers:
// half the size, and the garbage collector never looks at them.
type node struct {
	hash       uint64
	prev, next uint32 // towards the more and the less recently used; of a free node, next is the next free one
	parent     uint32 // the block before this one in its prompt; 0 for a first block
	children   uint32 // how many nodes have this one as parent
}

// lost marks, in node.parent, a node that remove is about to take out.
const lost = 1 << 31

// cache models one replica's prefix cache: which blocks it holds and in which
// order they will be evicted. It is not safe for concurrent use.
//
// Nodes live in pages of 512 that are never moved, so that growth costs one
// page and not a copy, and are linked into one list by recency of use; node 0 is
// the list's head and tail. Hashes find their node through numberTables.
//
// Every block in the list stands after its parent, i.e. parents are more
// recently used than their children. By induction over the operations:
//
//   - insert places the first n blocks of a chain, from the head on, at the front of the
//     list. Any of these stands behind its parent, which is the block placed
//     before it. Any other block keeps its place relative to the other blocks
//     that did not move, and what moved only moved towards the front:
//     if its parent moved, it still stands behind it; it cannot have moved
//     itself without its parent, because a chain has all ancestors of its blocks.
//   - evict takes the last of the list, which by the rule has no children.
//   - remove takes a block with all its descendants.
//
// So what is held is always closed under "the block before": a chain is held up to some
// point and not at all after it, which is what Match relies on, and
// tails leave before heads, which is what vLLM does.
type cache struct {
	pages    []*[pageSize]node
	next     uint32 // first node never used
	free     uint32 // first free node, 0 = none
	len      int    // blocks held
	capacity int

	numbers   []numberTable // by leading bits of the hash
	numberLog uint          // log2 of len(numbers)
	slots     int           // in all of numbers
}

const nodeBytes = int(unsafe.Sizeof(node{}))

// tableBlocks is how many blocks of a full cache one numberTable has at most:
// it bounds the work of growing one.
const tableBlocks = 4096

func newCache(capacity int) cache {
	c := cache{
		pages:     []*[pageSize]node{new([pageSize]node)},
		next:      1,
		capacity:  capacity,
		numberLog: classFor((capacity + tableBlocks - 1) / tableBlocks),
	}
	c.numbers = make([]numberTable, 1<<c.numberLog)
	return c
}

func (c *cache) at(n uint32) *node { return &c.pages[n>>pageBits][n%pageSize] }

func (c *cache) table(hash uint64) *numberTable {
	return &c.numbers[hash>>1>>(63-c.numberLog)]
}

func (c *cache) find(hash uint64) uint32 { return c.table(hash).find(c, hash) }

// insert makes the chain most recently used, placing it behind the node `after`
// (0: at the front), whose block comes before chain[0]. It returns the last node
// placed, and false if it had to stop: a hash known under
// another parent means that the hashes of two prefixes collided, and the one known stays.
// The chain is at most chunk blocks and, with all before it, at most capacity.
func (c *cache) insert(after uint32, chain []uint64, b *batch) (last uint32, ok bool) {
	for _, hash := range chain {
		n := c.find(hash)
		if n == 0 {
			n = c.add(hash, after, b)
		} else if c.at(n).parent != after {
			return after, false
		} else if c.at(after).next == n {
			after = n
			continue
		} else {
			c.unlink(n)
		}
		c.link(n, after)
		after = n
	}
	return after, true
}

// add makes a node for a block that is not held, evicting another if the
// cache is full. The caller links it.
func (c *cache) add(hash uint64, parent uint32, b *batch) uint32 {
	if c.len >= c.capacity {
		c.evict(b)
	}
	n := c.take()
	*c.at(n) = node{hash: hash, parent: parent}
	c.at(parent).children++
	c.table(hash).put(c, hash, n)
	c.len++
	b.adds = append(b.adds, hash)
	return n
}

// evict takes out the least recently used block.
func (c *cache) evict(b *batch) { c.delete(c.at(0).prev, b) }

// trim evicts down to capacity, at most chunk blocks. It reports whether there
// is more to do.
func (c *cache) trim(b *batch) (more bool) {
	for c.len > c.capacity && len(b.drops) < chunk {
		c.evict(b)
	}
	return c.len > c.capacity
}

// delete takes out a block without children.
func (c *cache) delete(n uint32, b *batch) {
	nd := c.at(n)
	b.drops = append(b.drops, nd.hash)
	c.table(nd.hash).delete(c, nd.hash, n)
	c.at(nd.parent&^lost).children--
	c.unlink(n)
	nd.next = c.free
	c.free = n
	c.len--
}

// remove takes out a block and all its descendants, wherever they branched off,
// calling flush whenever b is full. Descendants are less recently used than the
// block, so it looks for them from there on, until as many children were found
// as the nodes found have; they mostly follow at once.
func (c *cache) remove(hash uint64, b *batch, flush func()) {
	first := c.find(hash)
	if first == 0 {
		return
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
		prev := c.at(n).prev
		if c.at(n).parent&lost != 0 {
			if len(b.drops) == chunk {
				flush()
			}
			c.delete(n, b)
		}
		if n == first {
			return
		}
		n = prev
	}
}

// forget drops up to limit blocks without care for the cache itself, which is
// not used any more. It reports whether there are more.
func (c *cache) forget(limit int, b *batch) (more bool) {
	n := c.at(0).prev
	for range min(limit, chunk, c.len) {
		b.drops = append(b.drops, c.at(n).hash)
		n = c.at(n).prev
		c.len--
	}
	c.at(0).prev = n
	return c.len > 0
}

// compacted returns a copy in as little memory as it needs.
func (c *cache) compacted() cache {
	small := newCache(c.capacity)
	moved := make([]uint32, c.next)
	for n := c.at(0).next; n != 0; n = c.at(n).next {
		nd := c.at(n)
		m := small.take()
		// The parent stands before its children: it has moved already.
		*small.at(m) = node{hash: nd.hash, parent: moved[nd.parent], children: nd.children}
		small.link(m, small.at(0).prev)
		small.table(nd.hash).put(&small, nd.hash, m)
		small.len++
		moved[n] = m
	}
	small.at(0).children = c.at(0).children
	return small
}

// oversized reports whether compaction would free at least half the nodes.
func (c *cache) oversized() bool {
	return len(c.pages) > 1 && int(c.next) > 2*c.capacity+1
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
		len(c.numbers)*int(unsafe.Sizeof(numberTable{})) + c.slots*4
}

// numberTable finds a node's number by its hash. The hash itself is in the node, so a
// slot is only 32 bits: 24 for the number and 8 of the hash, which spare all but
// one in 256 needless looks at a node. Linear probing over 16 slots a cache
// line makes high loads cheap; removal leaves no tombstones. A replica
// has several such tables, each small enough to grow at once.
type numberTable struct {
	slots []uint32 // hash<<24 | number; 0 is vacant, as number 0 is the list's end
	used  int
}

func (t *numberTable) home(hash uint64, log uint) int {
	at, _ := bits.Mul64(hash<<log, uint64(len(t.slots)))
	return int(at)
}

func (t *numberTable) next(i int) int {
	if i++; i < len(t.slots) {
		return i
	}
	return 0
}

func (t *numberTable) distance(i, j int) int {
	if j < i {
		j += len(t.slots)
	}
	return j - i
}

func tag(hash uint64) uint32 { return uint32(hash) << nodeBits }

func (t *numberTable) find(c *cache, hash uint64) uint32 {
	if t.used == 0 {
		return 0
	}
	want := tag(hash)
	slots := t.slots
	for i := t.home(hash, c.numberLog); ; {
		s := slots[i]
		if s == 0 {
			return 0
		}
		if s&^nodeMask == want && c.at(s&nodeMask).hash == hash {
			return s & nodeMask
		}
		if i++; i == len(slots) {
			i = 0
		}
	}
}

// put adds a hash that is not in the table. The node's hash must be set.
func (t *numberTable) put(c *cache, hash uint64, n uint32) {
	if t.used*20 >= len(t.slots)*17 { // load 85 %
		t.grow(c)
	}
	t.place(hash, n, c.numberLog)
	t.used++
}

func (t *numberTable) place(hash uint64, n uint32, log uint) {
	i := t.home(hash, log)
	for t.slots[i] != 0 {
		i = t.next(i)
	}
	t.slots[i] = tag(hash) | n
}

// grow enlarges the table by half, but not past what a full cache needs at a load
// of 78 %: its share of the capacity with room for the luck of the hashes.
func (t *numberTable) grow(c *cache) {
	size := max(minEntries, len(t.slots)*3/2)
	if full := (c.capacity>>c.numberLog)*32/25 + minEntries; len(t.slots) < full {
		size = min(size, full)
	}
	old := t.slots
	t.slots = make([]uint32, size)
	c.slots += size - len(old)
	for _, s := range old {
		if s != 0 {
			t.place(c.at(s&nodeMask).hash, s&nodeMask, c.numberLog)
		}
	}
}

// delete vacates the slot of a hash in the table and pulls later slots forward, as
// [segment.vacate] does.
func (t *numberTable) delete(c *cache, hash uint64, n uint32) {
	hole := t.home(hash, c.numberLog)
	for t.slots[hole] != tag(hash)|n {
		hole = t.next(hole)
	}
	for i := t.next(hole); t.slots[i] != 0; i = t.next(i) {
		home := t.home(c.at(t.slots[i]&nodeMask).hash, c.numberLog)
		if t.distance(home, i) >= t.distance(hole, i) {
			t.slots[hole] = t.slots[i]
			hole = i
		}
	}
	t.slots[hole] = 0
	t.used--
}
