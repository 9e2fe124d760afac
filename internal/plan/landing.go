// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"slices"
	"sort"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/fleet"
)

// landing are requests that were sent a moment ago, whose blocks are still on
// their way into the index. To put a long prompt's there takes a tenth of a
// millisecond and more, for which nobody should wait, neither for the
// scheduler's lock nor on the way to a replica; but the next choice must see
// them. The callers see to it that there are few.
type landing []*fleet.Reservation

// forget drops those that have landed. What is left afterwards is what an index
// that is asked later may not know of.
func (l *landing) forget() { *l = slices.DeleteFunc(*l, (*fleet.Reservation).Landed) }

// addTo adds to what the index knows of a chain, by slot, what lands.
func (l landing) addTo(blocks []int32, chain []uint64) {
	for _, r := range l {
		if slot := int(r.Replica().Slot); slot >= 0 && slot < len(blocks) {
			blocks[slot] = max(blocks[slot], int32(inCommon(r.Chain, chain)))
		}
	}
}

// inCommon is how many leading blocks two chains have in common. Equal hashes
// mean equal blocks before them.
func inCommon(a, b []uint64) int {
	if len(a) == 0 || len(b) == 0 || a[0] != b[0] { // as most have
		return 0
	}
	return sort.Search(min(len(a), len(b)), func(i int) bool { return a[i] != b[i] })
}
