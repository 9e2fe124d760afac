// SPDX-License-Identifier: Apache-2.0

package residency

import (
	"math/rand/v2"
	"slices"
	"testing"
)

func TestEvictionOrder(t *testing.T) {
	a, b := chained([]byte("aaaa")), chained([]byte("aabb")) // share two blocks
	tests := []struct {
		name     string
		capacity int
		run      func(x *Index, slot Slot)
		a, b     int
	}{
		{"tail leaves before head", 5, func(x *Index, slot Slot) {
			x.Insert(slot, a)
			x.Insert(slot, b)
		}, 3, 4},
		{"a longer chain keeps its head", 3, func(x *Index, slot Slot) {
			x.Insert(slot, a)
		}, 3, 2},
		{"a shared head is refreshed", 6, func(x *Index, slot Slot) {
			x.Insert(slot, a)
			x.Insert(slot, b)
			x.Insert(slot, chained([]byte("cd")))
		}, 2, 4},
		{"a cut capacity takes the oldest", 6, func(x *Index, slot Slot) {
			x.Insert(slot, a)
			x.Insert(slot, b)
			x.SetCapacity(slot, 4)
		}, 2, 4},
		{"a lost head takes both tails", 10, func(x *Index, slot Slot) {
			x.Insert(slot, a)
			x.Insert(slot, b)
			x.Remove(slot, a, 1)
		}, 1, 1},
		{"a lost tail leaves the other", 10, func(x *Index, slot Slot) {
			x.Insert(slot, a)
			x.Insert(slot, b)
			x.Remove(slot, a, 2)
		}, 2, 4},
		{"a block not held cannot be lost", 10, func(x *Index, slot Slot) {
			x.Insert(slot, a)
			x.Remove(slot, b, 2)
			x.Remove(slot, a, 4)
			x.Remove(slot, a, -1)
		}, 4, 2},
		{"capacity is at least one", 0, func(x *Index, slot Slot) {
			x.Insert(slot, a)
		}, 1, 1},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			x := New()
			slot := x.Join(test.capacity)
			test.run(x, slot)
			if got := x.MatchOne(slot, a); got != test.a {
				t.Errorf("%d blocks of a are held, want %d", got, test.a)
			}
			if got := x.MatchOne(slot, b); got != test.b {
				t.Errorf("%d blocks of b are held, want %d", got, test.b)
			}
			checkInvariants(t, x)
		})
	}
}

func TestSlots(t *testing.T) {
	x := New()
	chain := chained([]byte("abc"))
	first, second, third := x.Join(10), x.Join(10), x.Join(10)
	for _, slot := range []Slot{first, second, third} {
		x.Insert(slot, chain)
	}
	x.Leave(second)
	if got := x.Match(chain, nil); !slices.Equal(got, []int32{3, 0, 3}) {
		t.Errorf("Match = %v after the second left", got)
	}
	if got := x.Join(10); got != second {
		t.Errorf("Join = %d, want the slot %d that was left", got, second)
	}
	if n := x.MatchOne(second, chain); n != 0 {
		t.Errorf("the newcomer matches %d blocks, want 0", n)
	}
	x.Leave(third)
	x.Leave(third)
	if got := x.Match(chain, nil); !slices.Equal(got, []int32{3, 0}) {
		t.Errorf("Match = %v after the last slot was left", got)
	}
	for _, slot := range []Slot{NoSlot, third, 1 << 30} {
		x.Insert(slot, chain)
		x.Clear(slot)
		x.SetCapacity(slot, 5)
		x.Remove(slot, chain, 0)
		if x.MatchOne(slot, chain) != 0 || x.Len(slot) != 0 || x.Capacity(slot) != 0 || x.Evictions(slot) != 0 {
			t.Errorf("slot %d, not in use, holds something", slot)
		}
	}
}

// What is booked for a stay that is over is void, whoever has the slot by then.
func TestStay(t *testing.T) {
	chain := chained([]byte("abc"))
	for name, end := range map[string]func(*Index, Slot){
		"cleared": (*Index).Clear,
		"left":    (*Index).Leave,
		"left, and another has the slot": func(x *Index, slot Slot) {
			x.Leave(slot)
			if got := x.Join(10); got != slot {
				t.Fatalf("Join = %d, want the slot %d that was left", got, slot)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			x := New()
			x.Join(10)
			slot := x.Join(10)
			stay := x.Stay(slot)
			stay.Insert(chain)
			if n := x.MatchOne(slot, chain); n != 3 || stay.Over() {
				t.Fatalf("%d blocks are held, over: %t; want all 3 of a stay that goes on", n, stay.Over())
			}
			end(x, slot)
			stay.Insert(chain)
			if n := x.MatchOne(slot, chain); n != 0 || !stay.Over() {
				t.Errorf("%d blocks are held, over: %t; want none of a stay that is over", n, stay.Over())
			}
			checkInvariants(t, x)
		})
	}
	var none Stay
	none.Insert(chain)
	if !none.Over() {
		t.Error("the zero stay goes on")
	}
}

func TestMatchReusesMemory(t *testing.T) {
	x, system := fullFleet(100, 300, 100)
	chain := append(slices.Clone(system), 1, 2, 3)
	out := x.Match(chain, make([]int32, 0, 100))
	if allocs := testing.AllocsPerRun(100, func() { out = x.Match(chain, out) }); allocs != 0 {
		t.Errorf("Match allocates %v times", allocs)
	}
	if len(out) != 100 || out[99] != int32(len(system)) {
		t.Errorf("Match = %v", out)
	}
	x.Clear(99)
	if out = x.Match(chain, out); out[99] != 0 || out[98] != int32(len(system)) {
		t.Errorf("Match = %v after a clear, in the same memory", out)
	}
}

func TestEvictionsAreCounted(t *testing.T) {
	x := New()
	slot := x.Join(4)
	x.Insert(slot, chained([]byte("abcd")))
	x.Insert(slot, chained([]byte("xy")))
	x.Clear(slot) // no eviction, and no reset of the count
	x.Insert(slot, chained([]byte("abcd")))
	x.SetCapacity(slot, 1)
	if got := x.Evictions(slot); got != 5 {
		t.Errorf("%d evictions, want 5", got)
	}
	x.Leave(slot)
	if got := x.Stats().Evictions; got != 5 {
		t.Errorf("%d evictions of the fleet, want 5", got)
	}
}

// TestRemainsAreSwept: what Clear and Leave leave behind goes away with later calls
// alone, and its lanes are used again.
func TestRemainsAreSwept(t *testing.T) {
	x := New()
	x.Join(10_000)
	slot := x.Join(10_000)
	rng := rand.New(rand.NewPCG(1, 9))
	for range 30 {
		x.Insert(slot, randomChain(rng, nil, 10_000))
		x.Clear(slot)
	}
	if lanes := len(x.view.Load().lanes); lanes > 6 {
		t.Errorf("%d lanes for two replicas", lanes)
	}
	if blocks := x.Stats().Blocks; blocks > 20_000 {
		t.Errorf("%d blocks are left of replicas that hold none", blocks)
	}
	for x.queued.Load() > 0 {
		x.Insert(0, randomChain(rng, nil, 100))
	}
	checkInvariants(t, x)
}

// TestSetCapacityGivesMemoryBack: memory is bounded by the capacity there is, not by the
// one there was.
func TestSetCapacityGivesMemoryBack(t *testing.T) {
	x := New()
	slot := x.Join(200_000)
	rng := rand.New(rand.NewPCG(1, 8))
	chain := randomChain(rng, nil, 200_000)
	x.Insert(slot, chain)
	before := x.Stats().Bytes
	x.SetCapacity(slot, 2_000)
	if after := x.Stats().Bytes; after > before/8 {
		t.Errorf("%d of %d bytes are left after cutting the capacity to a hundredth", after, before)
	}
	if n := x.MatchOne(slot, chain); n != 2_000 {
		t.Errorf("%d blocks are held, want 2,000", n)
	}
	checkInvariants(t, x)
	x.SetCapacity(slot, 300_000)
	x.Insert(slot, chain)
	if n := x.MatchOne(slot, chain); n != 200_000 {
		t.Errorf("%d blocks are held, want 200,000", n)
	}
	checkInvariants(t, x)
}

// TestClearWithoutFreeLane: when every other lane is still to be swept, Clear must work
// and Join must say no.
func TestClearWithoutFreeLane(t *testing.T) {
	x := New()
	slot := x.Join(10)
	full := x.view.Load().clone()
	for len(full.lanes) < maxLanes {
		full.lanes = append(full.lanes, NoSlot)
	}
	x.view.Store(full)
	chain := chained([]byte("ab"))
	x.Insert(slot, chain)
	x.Clear(slot)
	if n := x.MatchOne(slot, chain); n != 0 {
		t.Errorf("%d blocks are held after Clear", n)
	}
	if got := x.Join(10); got != NoSlot {
		t.Errorf("Join = %d without a free lane, want NoSlot", got)
	}
	x.Insert(slot, chain)
	if n := x.MatchOne(slot, chain); n != len(chain) {
		t.Errorf("%d blocks are held after Insert, want %d", n, len(chain))
	}
	checkInvariants(t, x)
}

func TestStaggeredLengths(t *testing.T) {
	x := New()
	chain := chained(make([]byte, 5000))
	for i := range 200 {
		x.Insert(x.Join(10_000), chain[:i*25])
	}
	for slot, held := range x.Match(chain, nil) {
		if int(held) != slot*25 {
			t.Errorf("slot %d holds %d blocks, want %d", slot, held, slot*25)
		}
	}
}
