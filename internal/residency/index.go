// SPDX-License-Identifier: Apache-2.0

// Package residency keeps which replica is believed to hold which prefix block in its KV
// cache, and finds for a prompt how much of it each replica holds.
//
// A prompt is a chain of 64-bit hashes, one a block, each chained on the one before:
// equal hashes mean equal prompts up to and including that block. The hashes must be
// well mixed in all bits and, where outsiders choose the prompts, seeded.
//
// Per replica there is a [cache], a model of the replica's own prefix cache: same
// capacity, same order of eviction. All replicas share one [holders] table from hash to
// the set of replicas, which is what Match searches. Writers work on one replica's cache
// under that replica's lock and publish the outcome to the shared table in batches;
// Match takes only the table's read locks.
package residency

import (
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"
)

// Slot is a replica's place in the index. Slots are small numbers from 0 on; that of a
// replica that left is given to a later one.
type Slot int32

// NoSlot is what Join returns when the index is full. Every method takes it, like any
// slot that is not in use, for a replica that holds nothing.
const NoSlot Slot = -1

// MaxReplicas is the most replicas that can be in an index at a time: half the lanes,
// the other half being for remains of replicas that left or were cleared.
const MaxReplicas = maxLanes / 2

// Index is the belief about a fleet of replicas. It is safe for concurrent use.
//
// A replica's blocks are booked under a lane, not under its slot. Leave and Clear only
// take the lane out of the view that Match reads, so the replica holds nothing at once,
// however much it held; the lane's remains are swept out of the shared table by and by
// and the lane is reused when it is clean.
type Index struct {
	view      atomic.Pointer[view]
	evictions atomic.Uint64

	mu     sync.Mutex   // guards what follows and the replacement of view
	free   []uint16     // clean lanes below len(view.lanes), the lowest last
	dying  []*replica   // to be swept, in order
	queued atomic.Int32 // len(dying)

	sweeping sync.Mutex // held by whoever sweeps
}

// view is what a reader needs to know about slots and lanes. It never changes; Join,
// Leave and Clear replace it.
type view struct {
	holders *holders
	slots   []*replica // by slot, nil = not in use; the last is in use
	lanes   []Slot     // by lane, NoSlot = clean or being swept
}

func (v *view) clone() *view {
	return &view{v.holders, slices.Clone(v.slots), slices.Clone(v.lanes)}
}

func (v *view) replica(slot Slot) *replica {
	if slot < 0 || int(slot) >= len(v.slots) {
		return nil
	}
	return v.slots[slot]
}

// slotOf returns the slot of a lane. A lane may be younger than the view.
func (v *view) slotOf(lane uint16) Slot {
	if int(lane) >= len(v.lanes) {
		return NoSlot
	}
	return v.lanes[lane]
}

// New returns an empty index.
func New() *Index {
	x := new(Index)
	x.view.Store(&view{holders: new(holders)})
	return x
}

// Join adds a replica that can hold capacity blocks (cut to 1 … [MaxCapacity]) and holds
// none yet. It returns NoSlot when there are MaxReplicas already.
func (x *Index) Join(capacity int) Slot {
	x.sweep(sweepPerCall)
	x.mu.Lock()
	defer x.mu.Unlock()
	v := x.view.Load().clone()
	slot := slices.Index(v.slots, nil)
	if slot < 0 {
		if len(v.slots) == MaxReplicas {
			return NoSlot
		}
		slot = len(v.slots)
		v.slots = append(v.slots, nil)
	}
	r := x.newReplica(v, Slot(slot), boundedCapacity(capacity), new(atomic.Uint64))
	if r == nil {
		return NoSlot
	}
	x.view.Store(v)
	return Slot(slot)
}

func boundedCapacity(blocks int) int { return min(max(blocks, 1), MaxCapacity) }

// newReplica puts an empty replica into slot of v. It returns nil if all lanes are taken
// by replicas and by remains not yet swept. x.mu is held.
func (x *Index) newReplica(v *view, slot Slot, capacity int, evictions *atomic.Uint64) *replica {
	lane := len(v.lanes)
	switch n := len(x.free); {
	case n > 0:
		lane = int(x.free[n-1])
		x.free = x.free[:n-1]
		v.lanes[lane] = slot
	case lane < maxLanes:
		v.lanes = append(v.lanes, slot)
	default:
		return nil
	}
	r := &replica{
		lane:           uint32(lane),
		holders:        v.holders,
		cache:          newCache(capacity),
		evictions:      evictions,
		fleetEvictions: &x.evictions,
	}
	r.capacity.Store(int64(capacity))
	r.bytes.Store(int64(r.cache.bytes()))
	v.slots[slot] = r
	return r
}

// Leave removes a replica. Its slot may be reused at once.
func (x *Index) Leave(slot Slot) {
	if x.leave(slot) {
		x.sweep(sweepPerCall)
	}
}

func (x *Index) leave(slot Slot) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	v := x.view.Load().clone()
	r := v.replica(slot)
	if r == nil {
		return false
	}
	v.slots[slot] = nil
	for n := len(v.slots); n > 0 && v.slots[n-1] == nil; n-- {
		v.slots = v.slots[:n-1]
	}
	if len(v.slots) == 0 {
		// Nobody is left: drop everything at once, remains included.
		r.dead.Store(true)
		x.free = nil
		x.setDying(nil)
		x.view.Store(&view{holders: new(holders)})
		return true
	}
	x.retire(v, r)
	x.view.Store(v)
	return true
}

// Clear books that a replica holds nothing any more: it restarted or its cache was
// reset.
func (x *Index) Clear(slot Slot) {
	if x.clear(slot) {
		x.sweep(sweepPerCall)
	}
}

func (x *Index) clear(slot Slot) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	v := x.view.Load().clone()
	r := v.replica(slot)
	if r == nil {
		return false
	}
	if x.newReplica(v, slot, int(r.capacity.Load()), r.evictions) == nil {
		// Every lane waits to be swept: thousands of clears in a row with hardly an
		// insert between them. Only then is the replica emptied in place.
		r.empty()
		return false
	}
	x.retire(v, r)
	x.view.Store(v)
	return true
}

// retire hides a replica's lane and leaves its remains to the sweep. x.mu is held.
func (x *Index) retire(v *view, r *replica) {
	r.dead.Store(true)
	v.lanes[r.lane] = NoSlot
	x.setDying(append(x.dying, r))
}

func (x *Index) setDying(dying []*replica) {
	x.dying = dying
	x.queued.Store(int32(len(dying)))
}

const (
	// sweepPerCall is how many remains Join, Leave and Clear sweep: some tens of
	// microseconds.
	sweepPerCall = 1024
	// sweepPerBlock is how many remains Insert sweeps for each of its blocks. Above one,
	// so that remains vanish faster than they can be made.
	sweepPerBlock = 2
)

// sweep takes up to budget remains of retired replicas out of the shared table. If
// another caller is at it, it does nothing.
func (x *Index) sweep(budget int) {
	if x.queued.Load() == 0 || !x.sweeping.TryLock() {
		return
	}
	defer x.sweeping.Unlock()
	b := newBatch()
	defer b.free()
	for budget > 0 {
		r := x.nextDying()
		if r == nil {
			return
		}
		swept, more := r.sweep(budget, b)
		budget -= max(swept, 1)
		if !more {
			x.buried(r)
		}
	}
}

func (x *Index) nextDying() *replica {
	x.mu.Lock()
	defer x.mu.Unlock()
	if len(x.dying) == 0 {
		return nil
	}
	return x.dying[0]
}

// buried frees the lane of a replica of which nothing remains.
func (x *Index) buried(r *replica) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if len(x.dying) == 0 || x.dying[0] != r {
		return // everything was dropped meanwhile
	}
	x.setDying(slices.Delete(x.dying, 0, 1))
	lane := uint16(r.lane)
	at, _ := slices.BinarySearchFunc(x.free, lane, func(a, b uint16) int { return int(b) - int(a) })
	x.free = slices.Insert(x.free, at, lane)
}

// SetCapacity changes how many blocks a replica can hold (cut to 1 … [MaxCapacity]).
// What it holds above that, the least recently used, is gone when SetCapacity returns.
// A large cut takes a while (a fraction of a microsecond a block); Match and other
// replicas go on meanwhile, and writers to this one wait for a batch at most or, after a
// cut to less than half, until what is left is copied to less memory.
func (x *Index) SetCapacity(slot Slot, blocks int) {
	x.mu.Lock()
	r := x.view.Load().replica(slot)
	if r != nil {
		r.capacity.Store(int64(boundedCapacity(blocks)))
	}
	x.mu.Unlock()
	if r != nil {
		r.trim()
	}
}

// Insert books that a replica was sent the chain: it holds all its blocks, and they are
// the most recently used, the head more recently than the tail. What no longer fits is
// evicted, least recently used first. Of a chain longer than the capacity the head is
// kept.
func (x *Index) Insert(slot Slot, chain []uint64) { x.Stay(slot).Insert(chain) }

// Stay is a replica's time in the index until it leaves or is cleared. What is booked
// for a stay that is over is void, so that it may be booked later than it happened. The
// zero Stay is over.
type Stay struct {
	index   *Index
	replica *replica
}

// Stay returns the present stay of a replica.
func (x *Index) Stay(slot Slot) Stay { return Stay{x, x.view.Load().replica(slot)} }

// Over tells whether the replica has left or was cleared.
func (s Stay) Over() bool { return s.replica == nil || s.replica.dead.Load() }

// Insert is as [Index.Insert].
func (s Stay) Insert(chain []uint64) {
	if s.replica == nil {
		return
	}
	s.replica.insert(chain)
	s.index.sweep(sweepPerBlock * len(chain))
}

// Remove books that a replica lost the chain's blocks from index from on, and so
// whatever it held that continues any of these, in other chains too.
func (x *Index) Remove(slot Slot, chain []uint64, from int) {
	if from < 0 || from >= len(chain) {
		return
	}
	if r := x.view.Load().replica(slot); r != nil {
		r.remove(groupPath(chain, from))
	}
}

// Len returns how many blocks a replica is believed to hold.
func (x *Index) Len(slot Slot) int {
	if r := x.view.Load().replica(slot); r != nil {
		return int(r.held.Load())
	}
	return 0
}

// Capacity returns how many blocks a replica can hold.
func (x *Index) Capacity(slot Slot) int {
	if r := x.view.Load().replica(slot); r != nil {
		return int(r.capacity.Load())
	}
	return 0
}

// Evictions returns how many blocks were evicted since the replica joined because its
// capacity was reached or cut.
func (x *Index) Evictions(slot Slot) uint64 {
	if r := x.view.Load().replica(slot); r != nil {
		return r.evictions.Load()
	}
	return 0
}

// Stats describes the whole index, for metrics.
type Stats struct {
	Replicas  int    // slots in use
	Pairs     int    // blocks held, counted once for each replica that holds them
	Blocks    int    // distinct blocks, including remains of replicas that left
	Bytes     int    // memory in use
	Evictions uint64 // since New, by all replicas
}

// Stats takes every lock of the index for an instant, one after another.
func (x *Index) Stats() Stats {
	v := x.view.Load()
	s := Stats{Evictions: x.evictions.Load()}
	s.Blocks, s.Bytes = v.holders.size()
	s.Bytes += len(v.slots)*8 + len(v.lanes)*4
	for _, r := range v.slots {
		if r == nil {
			continue
		}
		s.Replicas++
		s.Pairs += int(r.held.Load())
		s.Bytes += int(r.bytes.Load()) + int(unsafe.Sizeof(*r))
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, r := range x.dying {
		s.Bytes += int(r.bytes.Load()) + int(unsafe.Sizeof(*r))
	}
	return s
}
