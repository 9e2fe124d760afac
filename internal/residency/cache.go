// SPDX-License-Identifier: Apache-2.0

package residency

import (
	"math/bits"
	"slices"
	"unsafe"
)

const (
	nodeBits = 24
	nodeMask = 1<<nodeBits - 1

	// MaxCapacity is the most blocks one replica is believed to hold; larger capacities
	// are cut to it. At 64 bytes of prompt a block it is a gigabyte of text.
	MaxCapacity = nodeMask - 1

	pageBits = 9
	pageSize = 1 << pageBits
)

// node is one block in one replica's cache. Links are node numbers, not pointers: half
// the size, and the garbage collector never looks at them.
type node struct {
	hash       uint64
	prev, next uint32 // towards the more and the less recently used; of a free node, next is the next free one
	parent     uint32 // the block before this one in its prompt; 0 for a first block
	children   uint32 // how many nodes have this one as parent
}

// lost marks, in node.parent, a node that remove is about to take out.
const lost = 1 << 31

// cache models one replica's prefix cache: which blocks it holds and in which order they
// will be evicted. It is not safe for concurrent use.
//
// Nodes live in pages of 512 that are never moved, so that growth costs one page and not
// a copy, and are linked into one list by recency of use; node 0 is the list's head and
// tail. Hashes find their node through numberTables.
//
// Every block in the list stands after its parent, i.e. parents are more recently used
// than their children. By induction over the operations:
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
// point and not at all after it, which is what Match relies on, and tails leave before
// heads, which is what vLLM does.
type cache struct {
	pages    []*[pageSize]node
	next     uint32 // first node never used
	free     uint32 // first free node, 0 = none
	len      int    // blocks held
	capacity int

	numbers   []numberTable // by leading bits of the hash
	numberLog uint          // log2 of len(numbers)
	buckets   int           // in all of numbers
}

const nodeBytes = int(unsafe.Sizeof(node{}))

// tableBlocks is how many blocks of a full cache one numberTable has at most: it bounds
// the work of growing one.
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

// insert makes the chain most recently used, placing it behind the node `after` (0: at
// the front), whose block comes before chain[0]. It returns the last node placed, and
// false if it had to stop: a hash known under another parent means that the hashes of
// two prefixes collided, and the one known stays. The chain is at most chunk blocks and,
// with all before it, at most capacity.
//
// What is held of it is a head; the rest is new. Both halves, and the victims of the
// rest, are done as a batch: nearly every step is a cache miss, and misses cost a tenth
// when the processor sees many of them in a row, so warm touches the memory first.
func (c *cache) insert(after uint32, chain []uint64, b *batch) (last uint32, ok bool) {
	c.warm(chain, b)
	for i, hash := range chain {
		n := c.find(hash)
		if n == 0 {
			return c.extend(after, chain[i:], b)
		}
		if c.at(n).parent != after {
			return after, false
		}
		if c.at(after).next != n {
			c.unlink(n)
			c.link(n, after)
		}
		after = n
	}
	return after, true
}

// extend adds a chain of which the first block is not held, after making room for it.
func (c *cache) extend(after uint32, chain []uint64, b *batch) (last uint32, ok bool) {
	// A cache above its capacity, about to be trimmed, does not grow but is not trimmed
	// here.
	c.evict(min(len(chain), c.len+len(chain)-c.capacity), b)
	for _, hash := range chain {
		if c.find(hash) != 0 {
			return after, false
		}
		n := c.take()
		*c.at(n) = node{hash: hash, parent: after}
		c.at(after).children++
		c.link(n, after)
		c.table(hash).put(c, hash, n)
		c.len++
		b.adds = append(b.adds, hash)
		after = n
	}
	return after, true
}

// warm brings the buckets of the hashes into the processor's cache.
func (c *cache) warm(hashes []uint64, b *batch) {
	sum := uint32(0)
	for _, hash := range hashes {
		if t := c.table(hash); t.used > 0 {
			sum += t.buckets[t.home(hash, c.numberLog)].header
		}
	}
	b.warmed += uint64(sum)
}

// evict takes out the n least recently used blocks, if any.
func (c *cache) evict(n int, b *batch) {
	first := len(b.drops)
	for victim := c.at(0).prev; n > 0; n-- {
		b.drops = append(b.drops, c.at(victim).hash)
		victim = c.at(victim).prev
	}
	victims := b.drops[first:]
	c.warm(victims, b)
	for range victims {
		c.delete(c.at(0).prev)
	}
}

// trim evicts down to capacity, at most chunk blocks. It reports whether there is more
// to do.
func (c *cache) trim(b *batch) (more bool) {
	c.evict(min(c.len-c.capacity, chunk), b)
	return c.len > c.capacity
}

// delete takes out a block without children.
func (c *cache) delete(n uint32) {
	nd := c.at(n)
	c.table(nd.hash).delete(nd.hash, n, c.numberLog)
	c.at(nd.parent&^lost).children--
	c.unlink(n)
	nd.next = c.free
	c.free = n
	c.len--
}

// remove takes out a block and all its descendants, wherever they branched off, calling
// flush whenever b is full. Descendants are less recently used than the block, so it
// looks for them from there on, until as many children were found as the nodes found
// have; they mostly follow at once.
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
			b.drops = append(b.drops, c.at(n).hash)
			c.delete(n)
		}
		if n == first {
			return
		}
		n = prev
	}
}

// forget drops up to limit blocks without care for the cache itself, which is not used
// any more. It reports whether there are more.
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
		len(c.numbers)*int(unsafe.Sizeof(numberTable{})) + c.buckets*numberBucketBytes
}

// numberTable finds a node's number by its hash. The hash itself is in the node, so an
// entry has only 24 bits of number and 16 of the hash, which spare all but one in 65,536
// needless looks at a node. Twelve entries and a header fill one cache line, a bucket,
// in which eight of those bits of every entry stand together, so that all twelve are
// compared in two steps. The home bucket of a hash is found by multiplication, so that
// the size need not be a power of two and the table fits its capacity.
//
// An entry whose home is full goes to the next bucket with room, and each full bucket
// counts the entries that passed it. So a search ends at the first bucket that nobody
// passed, mostly the home; and removal only lowers the counts on the way. It leaves no
// tombstones, which would force a rebuild now and then for ever in a cache that is
// always full, and moves no entries, which would need the hashes of their nodes: a cache
// miss each.
//
// A replica has several such tables, each small enough to grow at once.
type numberTable struct {
	buckets []numberBucket
	used    int
}

// numberBucket is a cache line. Its entries are the first length(), in any order; those
// behind are 0, their tags arbitrary.
type numberBucket struct {
	tags    uint64 // bits 0–7 of the hashes of entries 0–7
	moreTag uint32 // and of entries 8–11
	header  uint32 // length in the low 8 bits, number of entries that passed above
	entries [numberEntries]uint32
}

const (
	numberEntries     = 12
	numberBucketBytes = int(unsafe.Sizeof(numberBucket{}))
	lengthMask        = 0xff
	onePassed         = lengthMask + 1
)

func (bk *numberBucket) length() int  { return int(bk.header & lengthMask) }
func (bk *numberBucket) passed() bool { return bk.header >= onePassed }
func (bk *numberBucket) full() bool   { return bk.length() == numberEntries }

// numberEntry is a node's number below bits 8–15 of its hash.
func numberEntry(hash uint64, n uint32) uint32 { return uint32(hash>>8)<<nodeBits | n }

const (
	everyByte = 0x0101010101010101
	highBits  = 0x8080808080808080
)

// zeroBytes marks in bit 7 of each byte whether the byte is 0. Above a zero byte it may
// mark a 1 too: whoever asks must look closer.
func zeroBytes(w uint64) uint64 { return (w - everyByte) &^ w & highBits }

// find returns the number of the node with the hash, or 0.
func (bk *numberBucket) find(c *cache, hash uint64) uint32 {
	tags := hash & 0xff * everyByte
	for m := zeroBytes(bk.tags ^ tags); m != 0; m &= m - 1 {
		if n := bk.check(c, hash, bits.TrailingZeros64(m)/8); n != 0 {
			return n
		}
	}
	for m := uint32(zeroBytes(uint64(bk.moreTag) ^ tags)); m != 0; m &= m - 1 {
		if n := bk.check(c, hash, 8+bits.TrailingZeros32(m)/8); n != 0 {
			return n
		}
	}
	return 0
}

func (bk *numberBucket) check(c *cache, hash uint64, at int) uint32 {
	e := bk.entries[at]
	if n := e & nodeMask; n != 0 && e == numberEntry(hash, n) && c.at(n).hash == hash {
		return n
	}
	return 0
}

func (bk *numberBucket) set(at int, tag uint8, entry uint32) {
	bk.entries[at] = entry
	if shift := at * 8; at < 8 {
		bk.tags = bk.tags&^(0xff<<shift) | uint64(tag)<<shift
	} else {
		shift -= 64
		bk.moreTag = bk.moreTag&^(0xff<<shift) | uint32(tag)<<shift
	}
}

func (bk *numberBucket) tag(at int) uint8 {
	if at < 8 {
		return uint8(bk.tags >> (at * 8))
	}
	return uint8(bk.moreTag >> (at*8 - 64))
}

// delete takes out an entry and reports whether it was there.
func (bk *numberBucket) delete(entry uint32) bool {
	at := slices.Index(bk.entries[:], entry)
	if at < 0 {
		return false
	}
	last := bk.length() - 1
	bk.set(at, bk.tag(last), bk.entries[last])
	bk.entries[last] = 0
	bk.header--
	return true
}

func (t *numberTable) home(hash uint64, log uint) int {
	at, _ := bits.Mul64(hash<<log, uint64(len(t.buckets)))
	return int(at)
}

func (t *numberTable) next(i int) int {
	if i++; i < len(t.buckets) {
		return i
	}
	return 0
}

func (t *numberTable) find(c *cache, hash uint64) uint32 {
	i := t.home(hash, c.numberLog)
	for range t.buckets { // once around at most: every bucket may have been passed
		bk := &t.buckets[i]
		if n := bk.find(c, hash); n != 0 || !bk.passed() {
			return n
		}
		i = t.next(i)
	}
	return 0
}

// put adds a hash that is not in the table. The node's hash must be set.
func (t *numberTable) put(c *cache, hash uint64, n uint32) {
	if t.used*20 >= len(t.buckets)*numberEntries*17 { // load 85 %
		t.grow(c)
	}
	t.place(hash, n, c.numberLog)
	t.used++
}

func (t *numberTable) place(hash uint64, n uint32, log uint) {
	i := t.home(hash, log)
	for t.buckets[i].full() {
		t.buckets[i].header += onePassed
		i = t.next(i)
	}
	bk := &t.buckets[i]
	bk.set(bk.length(), uint8(hash), numberEntry(hash, n))
	bk.header++
}

// grow enlarges the table by half, but not past what a full cache needs at a load of 78
// %: its share of the capacity with room for the luck of the hashes.
func (t *numberTable) grow(c *cache) {
	size := max(len(t.buckets)+1, len(t.buckets)*3/2)
	if full := (c.capacity>>c.numberLog)*100/(numberEntries*78) + 1; len(t.buckets) < full {
		size = min(size, full)
	}
	old := t.buckets
	t.buckets = make([]numberBucket, size)
	c.buckets += size - len(old)
	for i := range old {
		for _, e := range old[i].entries[:old[i].length()] {
			t.place(c.at(e&nodeMask).hash, e&nodeMask, c.numberLog)
		}
	}
}

// delete takes out a hash that is in the table.
func (t *numberTable) delete(hash uint64, n uint32, log uint) {
	entry := numberEntry(hash, n)
	for i := t.home(hash, log); !t.buckets[i].delete(entry); i = t.next(i) {
		t.buckets[i].header -= onePassed
	}
	t.used--
}
