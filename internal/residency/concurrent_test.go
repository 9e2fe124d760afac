// SPDX-License-Identifier: Apache-2.0

package residency

import (
	"math/rand/v2"
	"sync"
	"testing"
)

// TestConcurrent lets everything happen at once and then compares the structures with
// each other. Run it with -race.
func TestConcurrent(t *testing.T) {
	const replicas, capacity = 12, 3000
	x := New()
	rng := rand.New(rand.NewPCG(1, 1))
	system := randomChain(rng, nil, 300)
	pinned := x.Join(capacity) // nobody touches it: its matches are exact throughout
	x.Insert(pinned, system)
	for range replicas - 1 {
		x.Join(capacity)
	}
	var writers, readers sync.WaitGroup
	stop := make(chan struct{})
	for g := range 4 {
		writers.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(g), 2))
			for range 120 {
				slot := pinned + 1 + Slot(rng.IntN(replicas))
				chain := randomChain(rng, system, rng.IntN(1500))
				switch rng.IntN(12) {
				case 0:
					x.Leave(slot)
					x.Join(capacity)
				case 1:
					x.Clear(slot)
				case 2:
					x.SetCapacity(slot, 1+rng.IntN(capacity))
				case 3:
					x.Remove(slot, system, 200)
				default:
					x.Insert(slot, chain)
				}
			}
		})
	}
	for range 3 {
		readers.Go(func() {
			var out []int32
			for {
				select {
				case <-stop:
					return
				default:
				}
				out = x.Match(system, out)
				if int(out[pinned]) != len(system) {
					t.Errorf("the pinned replica matches %d blocks, want %d", out[pinned], len(system))
					return
				}
				for slot, held := range out {
					if held < 0 || int(held) > len(system) {
						t.Errorf("slot %d matches %d of %d blocks", slot, held, len(system))
						return
					}
				}
				x.MatchOne(1, system)
				x.Stats()
			}
		})
	}
	writers.Wait()
	close(stop)
	readers.Wait()
	checkInvariants(t, x)
}

// TestClearIsImmediate: a Match that starts after Clear or Leave returned sees nothing
// of what the replica held, even while an Insert to it was under way.
func TestClearIsImmediate(t *testing.T) {
	x := New()
	other := x.Join(10)
	slot := x.Join(50_000)
	rng := rand.New(rand.NewPCG(3, 3))
	for range 20 {
		chain := randomChain(rng, nil, 20_000)
		started := make(chan struct{})
		var done sync.WaitGroup
		done.Go(func() {
			close(started)
			x.Insert(slot, chain)
		})
		<-started
		x.Clear(slot)
		// An Insert that had not looked the replica up yet counts as after the Clear.
		before := x.MatchOne(slot, chain)
		done.Wait()
		x.Clear(slot)
		if n := x.MatchOne(slot, chain); n != 0 {
			t.Fatalf("%d blocks are held after Clear (%d during it)", n, before)
		}
		if out := x.Match(chain, nil); out[slot] != 0 || out[other] != 0 {
			t.Fatalf("Match = %v after Clear", out)
		}
	}
	checkInvariants(t, x)
}
