// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"fmt"
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
		u.ask(h, now)
		counts[h]++
	}
	later := now.Add(time.Hour)
	old := u.before(hot[0], later)
	if u.ask(hot[0]+reuseSlots, later); old > 1e-6 || u.before(hot[0]+reuseSlots, later) != 1 {
		t.Error("what was popular an hour ago does not give way")
	}
	if u.ask(nothing, now); u.before(nothing, now) != 0 {
		t.Error("prompts of which nothing is held are counted")
	}
}

// A prefix that many ask for is computed where there is nothing to do, sooner than
// where there is; one of a single session is not.
func TestCopies(t *testing.T) {
	queueAt := func(reuse, inFlight float64) (queue float64) {
		for holder := (Candidate{Uncached: 100, Pace: 1, InFlight: 3}); ; holder.Queue += 100 {
			other := Candidate{Uncached: 6000, Pace: 1, InFlight: inFlight, Reuse: reuse}
			holder.Reuse = reuse
			if best, _ := Default.Choose([]Candidate{holder, other}); best == 1 {
				return holder.Queue
			}
		}
	}
	session, some, many := queueAt(0, 0), queueAt(1, 0), queueAt(10, 0)
	if some > session/2 || many > some {
		t.Errorf("a prefix of 6,000 tokens is copied to an idle replica from a queue of %.0f on if one has asked for it at each, %.0f if ten have, %.0f if none", some, many, session)
	}
	if busy := queueAt(1, 6); busy < 2*some {
		t.Errorf("to a busy one from %.0f on, to an idle one from %.0f", busy, some)
	}
}

// Of many requests at once for what is held nowhere, not all wait for the replica that
// computes it while others have nothing to do: those behind count those before.
func TestManyAtOnce(t *testing.T) {
	for _, c := range []struct{ requests, least int }{{1, 1}, {5, 1}, {40, 3}} {
		t.Run(fmt.Sprint(c.requests), func(t *testing.T) {
			w := newWorld(4)
			at := make(map[int]bool)
			for i := range c.requests {
				chain := make([]uint64, 125)
				for j := range chain {
					if chain[j] = uint64(j + 1); j >= 110 {
						chain[j] += uint64(1000 * (i + 1))
					}
				}
				r := w.caller(8000, chain...)
				if w.s.Submit(&r.Request, w.now); r.sent > 0 {
					at[r.choice.Index] = true
				}
				w.now = w.now.Add(time.Millisecond)
			}
			if len(at) < c.least {
				t.Errorf("%d of %d requests were sent, to %d replicas, want %d", c.requests-w.s.Waiting(), c.requests, len(at), c.least)
			}
		})
	}
}
