// SPDX-License-Identifier: Apache-2.0

package residency

import (
	"math/rand/v2"
	"runtime"
	"testing"
)

func heap() int {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int(m.HeapAlloc)
}

// TestMemoryPerPair holds the index to its goal: 48 bytes per (block, replica),
// everything counted, and Stats to what the runtime says.
func TestMemoryPerPair(t *testing.T) {
	before := heap()
	x, _ := fullFleet(fleetReplicas, fleetCapacity, sharedBlocks)
	used := heap() - before
	s := x.Stats()
	perPair := float64(used) / float64(s.Pairs)
	t.Logf("%d pairs, %d blocks, %d bytes: %.1f bytes a pair", s.Pairs, s.Blocks, used, perPair)
	if s.Pairs != fleetReplicas*fleetCapacity {
		t.Fatalf("%d pairs, want %d", s.Pairs, fleetReplicas*fleetCapacity)
	}
	if perPair > 48 {
		t.Errorf("%.1f bytes a pair, want at most 48", perPair)
	}
	if ratio := float64(s.Bytes) / float64(used); ratio < 0.9 || ratio > 1.1 {
		t.Errorf("Stats counts %d bytes, the runtime %d", s.Bytes, used)
	}
	for slot := range Slot(fleetReplicas - 1) {
		x.Leave(slot)
	}
	x.sweep(1 << 30)
	left := heap() - before
	t.Logf("one replica left: %d bytes, counted as %d", left, x.Stats().Bytes)
	if limit := used / 20; left > limit {
		t.Errorf("%d bytes are left with one replica of %d, want at most %d", left, fleetReplicas, limit)
	}
	x.Leave(fleetReplicas - 1)
	if s := x.Stats(); s.Blocks != 0 || s.Pairs != 0 {
		t.Errorf("an empty index has %d blocks and %d pairs", s.Blocks, s.Pairs)
	}
	runtime.KeepAlive(x)
}

// TestMemoryOfFragments: where prompts leave each other after a few blocks, records are
// partly empty. The worst there is, a prompt with one block of its own in the middle of a
// group, must stay bounded.
func TestMemoryOfFragments(t *testing.T) {
	for _, test := range []struct {
		own   int // blocks of each prompt after 63 shared ones
		limit float64
	}{{own: 1, limit: 170}, {own: 4, limit: 90}, {own: 16, limit: 48}} {
		before := heap()
		x := New()
		rng := rand.New(rand.NewPCG(1, 2))
		system := randomChain(rng, nil, 63)
		for range 8 {
			slot := x.Join(fleetCapacity)
			for x.Len(slot) < fleetCapacity {
				x.Insert(slot, randomChain(rng, system, test.own))
			}
		}
		used := heap() - before
		perPair := float64(used) / float64(x.Stats().Pairs)
		t.Logf("prompts of %d own blocks: %.1f bytes a pair", test.own, perPair)
		if perPair > test.limit {
			t.Errorf("prompts of %d own blocks: %.1f bytes a pair, want at most %v", test.own, perPair, test.limit)
		}
		runtime.KeepAlive(x)
	}
}
