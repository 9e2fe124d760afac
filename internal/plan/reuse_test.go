// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"
)

// A few prefixes that are asked for all the time are counted exactly, whatever
// else is asked for once.
func TestReuses(t *testing.T) {
	var u reuses
	rng := rand.New(rand.NewPCG(1, 2))
	counts := make(map[uint64]float64)
	now := time.Unix(1_000_000, 0)
	var hot []uint64
	taken := make(map[uint64]bool)
	for len(hot) < 20 {
		if h := rng.Uint64(); !taken[h%reuseSlots] {
			taken[h%reuseSlots] = true
			hot = append(hot, h)
			u.ask(h, now)
			counts[h] = 1
		}
	}
	for range 50_000 {
		step := time.Duration(rng.IntN(10)) * time.Millisecond
		now = now.Add(step)
		for h := range counts {
			counts[h] *= math.Exp2(-step.Seconds() / depthHalfLife.Seconds())
		}
		u.ask(rng.Uint64(), now)
		h := hot[rng.IntN(len(hot))]
		if got := u.before(h, now); math.Abs(got-counts[h]) > 1e-6*counts[h] {
			t.Fatalf("%x was asked for %v times, want %v", h, got, counts[h])
		}
		if got := u.ask(h, now); math.Abs(got-counts[h]) > 1e-6*counts[h] {
			t.Fatalf("%x was asked for %v times before, want %v", h, got, counts[h])
		}
		counts[h]++
	}
	if later := now.Add(time.Hour); u.before(hot[0], later) > 1e-6 || u.ask(hot[0]+reuseSlots, later) != 0 || u.before(hot[0]+reuseSlots, later) != 1 {
		t.Error("what was popular an hour ago does not give way")
	}
	for range 2 {
		if u.ask(nothing, now) != 0 || u.before(nothing, now) != 0 {
			t.Error("prompts of which nothing is held are counted")
		}
	}
}
