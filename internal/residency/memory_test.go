// SPDX-License-Identifier: Apache-2.0

package residency

import (
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
