// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"testing"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/fleet"
)

// A replica that warms up gets two requests, and what it holds is computed at
// others. Where most do, as after the start of a whole fleet, the prefix counts.
func TestWarmUp(t *testing.T) {
	chain := []uint64{1, 2, 3, 4, 5, 6, 7, 8}
	for _, c := range []struct {
		name  string
		young []int // replicas that warm up; the first of four holds the prompt
		want  int   // of four requests at once, how many go there
	}{
		{"all are warm", nil, 4},
		{"it warms up", []int{0}, 2},
		{"it is one of two that do", []int{0, 1}, 2},
		{"three do", []int{0, 1, 2}, 4},
		{"all do", []int{0, 1, 2, 3}, 4},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(4)
			w.s.Terms = BindOnArrival
			w.engines[0].replica.Holds(chain)
			for _, i := range c.young {
				w.engines[i].replica.Unavailable(w.now)
			}
			got := 0
			for range 4 {
				r := w.caller(600, chain...)
				r.PerBlock = 64
				if !w.s.Submit(&r.Request, w.now) {
					t.Fatal("a request waits")
				}
				if r.choice.Index == 0 {
					got++
				}
			}
			if got != c.want {
				t.Errorf("%d of 4 requests went to the replica that holds their prompt, want %d", got, c.want)
			}
		})
	}
}

// What holds a replica back changes with the others, not only with itself.
func TestYoungFleetGrowsUp(t *testing.T) {
	chain := []uint64{1, 2, 3, 4, 5, 6, 7, 8}
	w := newWorld(3)
	w.s.Terms = BindOnArrival
	w.engines[0].replica.Holds(chain)
	for _, e := range w.engines {
		e.replica.Unavailable(w.now)
	}
	goesHome := func() bool {
		r := w.caller(600, chain...)
		r.PerBlock = 64
		if !w.s.Submit(&r.Request, w.now) {
			t.Fatal("a request waits")
		}
		return r.choice.Index == 0
	}
	for range 3 {
		if !goesHome() {
			t.Fatal("a fleet that is new sends a request where nothing of it is held")
		}
	}
	// Two of three have proven themselves.
	for _, e := range w.engines[1:] {
		for range 16 {
			answered := &fleet.Reservation{Prompt: 10, Uncached: 10}
			e.replica.Reserve(answered, w.now)
			answered.Finish(w.now)
		}
	}
	if goesHome() {
		t.Error("the only one that warms up got more than its share")
	}
	for _, e := range w.engines[1:] {
		e.replica.Unavailable(w.now)
	}
	if !goesHome() {
		t.Error("when most warm up again, one is still held back")
	}
}
