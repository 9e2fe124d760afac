// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"cmp"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// plainChoose is the rule as docs/choice.md says it, step by step.
func plainChoose(r HashRule, homes []Home) (best, first int) {
	order := make([]int, len(homes))
	mean := 0.0
	for i, h := range homes {
		order[i] = i
		mean += h.Load / float64(len(homes))
	}
	slices.SortFunc(order, func(a, b int) int { return cmp.Compare(homes[b].Order, homes[a].Order) })
	least := slices.MinFunc(homes, func(a, b Home) int { return cmp.Compare(a.Load, b.Load) }).Load
	for i, h := range homes {
		if h.Stays && (h.Load <= r.LoadFactor*mean || h.Load <= mean+r.Slack || h.Load == least) {
			return i, order[0]
		}
	}
	for _, i := range order {
		if h := homes[i]; h.Load <= least+r.Lead {
			return i, order[0]
		}
	}
	return -1, order[0]
}

func TestHomeAgainstPlainChoose(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	for range 20_000 {
		rule := HashRule{LoadFactor: 1 + rng.Float64(), Slack: float64(rng.IntN(3)), Lead: float64(rng.IntN(2))}
		if rng.IntN(3) == 0 {
			rule = HashRule{LoadFactor: 1}
		}
		homes := make([]Home, 1+rng.IntN(9))
		equal := rng.IntN(5) == 0
		for i := range homes {
			homes[i] = Home{Order: rng.Uint64(), Load: float64(rng.IntN(4)) * rng.ExpFloat64()}
			if equal || rng.IntN(4) == 0 {
				homes[i].Load = 0.1 // equal loads, whose mean may round below them
			}
		}
		if rng.IntN(2) == 0 {
			homes[rng.IntN(len(homes))].Stays = true
		}
		best, first := rule.Choose(homes)
		if wantBest, wantFirst := plainChoose(rule, homes); best != wantBest || first != wantFirst {
			t.Fatalf("%+v chose %d (%d), want %d (%d) of %+v", rule, best, first, wantBest, wantFirst, homes)
		}
	}
}

func TestStays(t *testing.T) {
	s := NewStays()
	if _, ok := s.Get(1, 5, start); ok {
		t.Error("a key stays somewhere that nothing was sent of")
	}
	s.Put(1, 5, 7, start)
	s.Put(1, 5, 8, start.Add(time.Minute))
	if at, ok := s.Get(1, 5, start.Add(time.Minute+stayFor-1)); !ok || at != 8 {
		t.Errorf("stays at %d (%v), want 8, where the last one went", at, ok)
	}
	if _, ok := s.Get(1, 5, start.Add(time.Minute+stayFor)); ok {
		t.Error("a key that is not used stays for ever")
	}
	if _, ok := s.Get(1, 6, start); ok {
		t.Error("a key stays although its home has come back")
	}
	rng := rand.New(rand.NewPCG(7, 8))
	for range 2 * maxStays {
		s.Put(rng.Uint64(), 5, 1, start)
	}
	if n := s.keys.Len(); n != maxStays {
		t.Errorf("%d keys are remembered, want %d", n, maxStays)
	}
}

func TestNoHome(t *testing.T) {
	if best, first := DefaultHashRule.Choose(nil); best != -1 || first != -1 {
		t.Errorf("chose %d (%d) of none", best, first)
	}
}
