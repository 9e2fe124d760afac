// SPDX-License-Identifier: Apache-2.0

package plan

// HashRule says when a prompt's home has too much to do and the next one in
// the prompt's own order is taken.
type HashRule struct {
	// LoadFactor is how many times the mean load of all homes one may have.
	LoadFactor float64
	// Slack is how much above the mean it may have in any case, in tokens.
	Slack float64
}

// DefaultHashRule is used when nothing is configured; docs/choice.md tells where
// its figures come from.
var DefaultHashRule = HashRule{LoadFactor: 1.25, Slack: 32_000}

// Home is one replica that a prompt could live at.
type Home struct {
	// Order is the replica's place in the order of the prompt's key, see
	// [Rendezvous]: the highest is the prompt's home.
	Order uint64
	// Load is what the replica has outstanding, in prompt tokens.
	Load float64
}

// Choose returns the first home in the prompt's order that is not over its
// bound, and the first of all; both are -1 if there is none. Some home never is
// over its bound, since not all can be above the mean.
func (r HashRule) Choose(homes []Home) (best, first int) {
	best, first = -1, -1
	bound := r.bound(homes)
	for i, h := range homes {
		if first < 0 || h.Order > homes[first].Order {
			first = i
		}
		if h.Load <= bound && (best < 0 || h.Order > homes[best].Order) {
			best = i
		}
	}
	return best, first
}

// bound is the most that a home may have outstanding.
func (r HashRule) bound(homes []Home) float64 {
	mean, least := 0.0, 0.0
	for i, h := range homes {
		mean += h.Load / float64(len(homes))
		if i == 0 || h.Load < least {
			least = h.Load
		}
	}
	// The mean of equal loads may round below them.
	return max(r.LoadFactor*mean, mean+r.Slack, least)
}
