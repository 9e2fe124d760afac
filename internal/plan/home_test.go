// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"math/rand/v2"
	"testing"
)

// Some home is always within its bound, whatever the loads are, and none that
// is comes before the chosen one in the prompt's order.
func TestSomeHomeIsFree(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	for range 20_000 {
		rule := HashRule{LoadFactor: 1 + rng.Float64(), Slack: float64(rng.IntN(3))}
		if rng.IntN(3) == 0 {
			rule = HashRule{LoadFactor: 1}
		}
		homes := make([]Home, 1+rng.IntN(9))
		equal, sum := rng.IntN(5) == 0, 0.0
		for i := range homes {
			homes[i] = Home{Order: rng.Uint64(), Load: float64(rng.IntN(4)) * rng.ExpFloat64()}
			if equal || rng.IntN(4) == 0 {
				homes[i].Load = 0.1 // equal loads, whose mean may round below them
			}
			sum += homes[i].Load
		}
		best, first := rule.Choose(homes)
		if best < 0 || first < 0 {
			t.Fatalf("no choice among %+v", homes)
		}
		mean := sum / float64(len(homes))
		within := func(h Home) bool { return h.Load <= max(rule.LoadFactor*mean, mean+rule.Slack)-1e-9 }
		for i, h := range homes {
			if h.Order > homes[first].Order {
				t.Fatalf("%d is not the first of %+v", first, homes)
			}
			if h.Order > homes[best].Order && within(h) {
				t.Fatalf("chose %d although %d comes before and is within the bound of %+v: %+v", best, i, rule, homes)
			}
		}
	}
}

func TestNoHome(t *testing.T) {
	if best, first := DefaultHashRule.Choose(nil); best != -1 || first != -1 {
		t.Errorf("chose %d (%d) of none", best, first)
	}
}
