// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"errors"
	"iter"
)

// OneCacheHitRate is the share of all prompt tokens that a single prefix cache
// would serve, asked in order of arrival: what a fleet could reach if its
// replicas shared one memory of capacityTokens, and so the mark to measure a
// routing policy against. capacityTokens ≤ 0 is a cache without limit.
//
// The cache holds blocks of blockTokens tokens and evicts the least recently used
// block, of one prompt the tail before the head. As in vLLM a prompt's last token
// is never served from the cache. Answers are not cached, so an engine whose next
// prompt repeats its own answer can come out higher.
//
// The error is the first one of requests.
func OneCacheHitRate(requests iter.Seq2[Request, error], capacityTokens, blockTokens int) (float64, error) {
	if blockTokens <= 0 {
		return 0, errors.New("block size is not positive")
	}
	cache := newLRU(capacityTokens / blockTokens)
	if capacityTokens <= 0 {
		cache.capacity = -1
	}
	var blocks []uint64
	hit, all := 0, 0
	for r, err := range requests {
		if err != nil {
			return 0, err
		}
		blocks = r.AppendBlocks(blocks[:0], blockTokens)
		most := max(0, r.InputTokens-1) / blockTokens
		hit += blockTokens * cache.match(blocks[:min(most, len(blocks))])
		all += r.InputTokens
		cache.insert(blocks)
	}
	if all == 0 {
		return 0, nil
	}
	return float64(hit) / float64(all), nil
}

// lru is a set of block hashes with a bound. Its list runs through the nodes
// from the most to the least recently used; node 0 closes the ring.
type lru struct {
	capacity int // in blocks; negative is without limit
	where    map[uint64]int32
	nodes    []lruNode
}

type lruNode struct {
	hash       uint64
	prev, next int32
}

func newLRU(capacity int) *lru {
	return &lru{capacity: capacity, where: make(map[uint64]int32), nodes: make([]lruNode, 1)}
}

// match is the number of leading blocks that are held.
func (l *lru) match(blocks []uint64) int {
	for n, hash := range blocks {
		if _, held := l.where[hash]; !held {
			return n
		}
	}
	return len(blocks)
}

// insert makes blocks the most recently used, the first above all.
func (l *lru) insert(blocks []uint64) {
	if l.capacity >= 0 {
		blocks = blocks[:min(len(blocks), l.capacity)]
	}
	for i := len(blocks) - 1; i >= 0; i-- {
		l.touch(blocks[i])
	}
}

func (l *lru) touch(hash uint64) {
	n, held := l.where[hash]
	switch {
	case held:
		l.unlink(n)
	case l.capacity >= 0 && len(l.where) >= l.capacity:
		n = l.nodes[0].prev
		l.unlink(n)
		delete(l.where, l.nodes[n].hash)
	default:
		n = int32(len(l.nodes))
		l.nodes = append(l.nodes, lruNode{})
	}
	l.where[hash] = n
	first := l.nodes[0].next
	l.nodes[n] = lruNode{hash: hash, prev: 0, next: first}
	l.nodes[first].prev = n
	l.nodes[0].next = n
}

func (l *lru) unlink(n int32) {
	node := l.nodes[n]
	l.nodes[node.prev].next = node.next
	l.nodes[node.next].prev = node.prev
}
