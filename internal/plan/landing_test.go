// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"math/rand/v2"
	"testing"
	"time"
)

// Where blocks land late, the same is chosen as where they are in the index at
// once.
func TestWhatLandsIsSeen(t *testing.T) {
	for seed := range uint64(50) {
		atOnce, late := newWorld(5), newWorld(5)
		rng := rand.New(rand.NewPCG(seed, 9))
		var flying []*caller
		for n := range 200 {
			chain := make([]uint64, 1+rng.IntN(40))
			prompt, branch := uint64(rng.IntN(6)), uint64(rng.IntN(2))
			for i := range chain {
				if chain[i] = prompt<<32 + uint64(i) + 1; i >= 20 { // where they part ways
					chain[i] += branch << 48
				}
			}
			want := atOnce.caller(64*float64(len(chain)), chain...)
			got := late.caller(64*float64(len(chain)), chain...)
			got.late = true
			want.Key, got.Key = prompt, prompt
			sent := atOnce.s.Submit(&want.Request, atOnce.now)
			if late.s.Submit(&got.Request, late.now) != sent || sent && got.choice != want.choice {
				t.Fatalf("seed %d, request %d: chose %+v, want %+v", seed, n, got.choice, want.choice)
			}
			if !sent {
				atOnce.s.Leave(&want.Request, atOnce.now)
				late.s.Leave(&got.Request, late.now)
			} else {
				flying = append(flying, got)
			}
			for len(flying) > 0 && rng.IntN(3) == 0 {
				i := rng.IntN(len(flying))
				flying[i].land()
				flying = append(flying[:i], flying[i+1:]...)
			}
			pause := time.Duration(rng.IntN(300)) * time.Millisecond
			atOnce.pass(pause)
			late.pass(pause)
		}
		for _, c := range flying {
			c.land()
		}
		late.s.match(&late.caller(1).Request)
		if n := len(late.s.landing); n != 0 {
			t.Errorf("seed %d: %d still land when all have", seed, n)
		}
	}
}
