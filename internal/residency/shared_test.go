// SPDX-License-Identifier: Apache-2.0

package residency

import (
	"cmp"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
)

// chainOf is a chain that shares a head with others of the same head.
func chainOf(head []uint64, tail int, r *rand.Rand) []uint64 {
	chain := slices.Clone(head)
	for range tail {
		chain = append(chain, r.Uint64()|1)
	}
	return chain
}

func TestHeaviest(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	x := New()
	a, b, c := x.Join(1000), x.Join(1000), x.Join(1000)
	long, short := chainOf(nil, 40, r), chainOf(nil, 8, r)
	for range 5 {
		x.Insert(a, chainOf(long, 6, r))
	}
	x.Insert(b, chainOf(long, 6, r)) // a sixth, elsewhere
	for range 3 {
		x.Insert(b, chainOf(short, 6, r))
	}
	x.Insert(b, chainOf(nil, 100, r)) // shared by nobody
	x.Insert(c, chainOf(short, 6, r)) // is not asked for, but holds
	got := x.Heaviest([]Slot{a, b, NoSlot, 99}, 1<<20, 10)
	want := []Shared{
		{Hash: long[39], Blocks: 40, Prompts: 6, Holders: []Slot{a, b}},
		{Hash: short[7], Blocks: 8, Prompts: 3, Holders: []Slot{b, c}},
	}
	if !slices.EqualFunc(got, want, equalShared) {
		t.Errorf("got %+v, want %+v", got, want)
	}
	if got := x.Heaviest([]Slot{a, b}, 1<<20, 1); !slices.EqualFunc(got, want[:1], equalShared) {
		t.Errorf("of a limit of 1, got %+v", got)
	}
	x.Clear(a)
	if got := x.Heaviest([]Slot{a}, 1<<20, 10); len(got) != 0 {
		t.Errorf("of a cleared replica, got %+v", got)
	}
	if got := x.Heaviest(nil, 1<<20, 10); len(got) != 0 {
		t.Errorf("of no replica, got %+v", got)
	}
}

func equalShared(a, b Shared) bool {
	return a.Hash == b.Hash && a.Blocks == b.Blocks && a.Prompts == b.Prompts && slices.Equal(a.Holders, b.Holders)
}

// TestHeaviestLooksAtRecentBlocks checks the bound, and that what is in use is
// found within it however much else is held.
func TestHeaviestLooksAtRecentBlocks(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	x := New()
	s := x.Join(50_000)
	old, head := chainOf(nil, 10, r), chainOf(nil, 10, r)
	for range 10 {
		x.Insert(s, chainOf(old, 10, r))
	}
	for range 40 {
		x.Insert(s, chainOf(nil, 1000, r))
	}
	for range 10 {
		x.Insert(s, chainOf(head, 10, r))
	}
	got := x.Heaviest([]Slot{s}, 1000, 10)
	if len(got) != 1 || got[0].Hash != head[9] || got[0].Prompts != 10 {
		t.Errorf("got %+v", got)
	}
	if got := x.Heaviest([]Slot{s}, 1<<20, 10); len(got) != 2 {
		t.Errorf("with a look at all, got %+v", got)
	}
}

// TestHeaviestProperty compares with counting by the definition: every prompt's
// every head.
func TestHeaviestProperty(t *testing.T) {
	for seed := range uint64(40) {
		r := rand.New(rand.NewPCG(seed, 5))
		x := New()
		slots := []Slot{x.Join(10_000), x.Join(10_000), x.Join(10_000)}
		var prompts [][]uint64
		for range 60 {
			var head []uint64
			if len(prompts) > 0 && r.IntN(4) > 0 {
				from := prompts[r.IntN(len(prompts))]
				head = from[:r.IntN(len(from)+1)]
			}
			chain := chainOf(head, 1+r.IntN(20), r)
			prompts = append(prompts, chain)
			x.Insert(slots[r.IntN(3)], chain)
		}
		got, want := x.Heaviest(slots, 1<<20, 1000), forksOf(prompts)
		for i := range got {
			if len(got[i].Holders) == 0 {
				t.Fatalf("seed %d: nobody holds %+v", seed, got[i])
			}
			got[i].Holders = nil
		}
		if !slices.EqualFunc(got, want, equalShared) {
			t.Fatalf("seed %d:\ngot  %+v\nwant %+v", seed, got, want)
		}
	}
}

func forksOf(prompts [][]uint64) []Shared {
	// Of prompts that continue each other only the longest counts.
	inner := make(map[uint64]bool)
	for _, p := range prompts {
		for _, h := range p[:len(p)-1] {
			inner[h] = true
		}
	}
	through, by := make(map[uint64]*Shared), make(map[[2]uint64]int)
	for _, p := range prompts {
		if inner[p[len(p)-1]] {
			continue
		}
		for i, h := range p {
			if through[h] == nil {
				through[h] = &Shared{Hash: h, Blocks: i + 1}
			}
			through[h].Prompts++
			if i > 0 {
				by[[2]uint64{p[i-1], h}]++
			}
		}
	}
	most := make(map[uint64]int)
	for step, n := range by {
		most[step[0]] = max(most[step[0]], n)
	}
	var out []Shared
	for h, s := range through {
		if s.Prompts > 1 && most[h]*10 <= s.Prompts*9 {
			out = append(out, *s)
		}
	}
	slices.SortFunc(out, func(a, b Shared) int {
		return cmp.Or(b.saved()-a.saved(), cmp.Compare(a.Hash, b.Hash))
	})
	return out
}

// TestHeaviestConcurrent looks while replicas are written to, cleared and left.
func TestHeaviestConcurrent(t *testing.T) {
	x := New()
	slots := []Slot{x.Join(2000), x.Join(2000)}
	done := make(chan struct{})
	var writers sync.WaitGroup
	for i, s := range slots {
		writers.Go(func() {
			r := rand.New(rand.NewPCG(uint64(i), 6))
			head := chainOf(nil, 50, rand.New(rand.NewPCG(7, 7)))
			for n := 0; ; n++ {
				select {
				case <-done:
					return
				default:
				}
				x.Insert(s, chainOf(head, 100, r))
				if n%100 == 99 {
					x.Clear(s)
				}
			}
		})
	}
	for range 200 {
		for _, s := range x.Heaviest(slots, 8000, 5) {
			if s.Blocks < 1 || s.Prompts < 2 {
				t.Errorf("got %+v", s)
			}
		}
	}
	close(done)
	writers.Wait()
}
