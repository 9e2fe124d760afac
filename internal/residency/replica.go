// SPDX-License-Identifier: Apache-2.0

package residency

import (
	"sync"
	"sync/atomic"
)

// replica is one replica's cache together with where it is published. Its lock is held
// for a whole Insert; readers never take it.
type replica struct {
	lane    uint32
	holders *holders

	mu    sync.Mutex
	cache cache

	dead      atomic.Bool // retired: what a writer still has in hand is void
	capacity  atomic.Int64
	held      atomic.Int64 // cache.len, for readers
	bytes     atomic.Int64 // cache.bytes(), for readers
	evictions *atomic.Uint64

	fleetEvictions *atomic.Uint64
}

// publish makes a batch visible. r.mu is held, so the batches of one replica arrive in
// the order they were made.
func (r *replica) publish(b *batch) {
	r.holders.publish(b, r.lane)
	r.held.Store(int64(r.cache.len))
	r.bytes.Store(int64(r.cache.bytes()))
}

func (r *replica) evicted(n int) {
	r.evictions.Add(uint64(n))
	r.fleetEvictions.Add(uint64(n))
}

func (r *replica) insert(chain []uint64) {
	if len(chain) == 0 {
		return
	}
	b := newBatch()
	defer b.free()
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.dead.Load() {
		return
	}
	r.cache.capacity = int(r.capacity.Load())
	chain = chain[:min(len(chain), r.cache.capacity)]
	at, last, ok := r.cache.touch(chain)
	for ok && at < len(chain) && !r.dead.Load() {
		to := min(at-at%groupBlocks+chunk, len(chain))
		last, ok = r.cache.extend(chain, at, to, last, b)
		at = to
		r.evicted(b.dropped())
		r.publish(b)
	}
}

func (r *replica) remove(path []uint64) {
	b := newBatch()
	defer b.free()
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.dead.Load() {
		return
	}
	r.cache.remove(path, b, func() { r.publish(b) })
	r.publish(b)
}

// trim evicts what is over the capacity, and gives the memory back if it is much.
func (r *replica) trim() {
	b := newBatch()
	defer b.free()
	for more := true; more && !r.dead.Load(); {
		more = r.trimChunk(b)
	}
}

func (r *replica) trimChunk(b *batch) (more bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.dead.Load() {
		return false
	}
	r.cache.capacity = int(r.capacity.Load())
	more = r.cache.trim(b)
	r.evicted(b.dropped())
	r.publish(b)
	if !more && r.cache.oversized() {
		r.cache = r.cache.compacted()
		r.bytes.Store(int64(r.cache.bytes()))
	}
	return more
}

// empty takes everything out in place.
func (r *replica) empty() {
	b := newBatch()
	defer b.free()
	r.mu.Lock()
	defer r.mu.Unlock()
	for more := true; more; {
		_, more = r.cache.forget(chunk, b)
		r.publish(b)
	}
	r.cache = newCache(int(r.capacity.Load()))
	r.bytes.Store(int64(r.cache.bytes()))
}

// sweep takes up to budget blocks of a dead replica out of the shared table.
func (r *replica) sweep(budget int, b *batch) (swept int, more bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for more = true; more && swept < budget; {
		var dropped int
		dropped, more = r.cache.forget(budget-swept, b)
		swept += dropped
		r.publish(b)
	}
	if !more {
		r.cache = cache{}
		r.bytes.Store(0)
	}
	return swept, more
}
