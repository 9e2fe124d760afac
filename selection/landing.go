// SPDX-License-Identifier: Apache-2.0

package selection

import (
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/fleet"
)

const (
	// maxLandings is how many requests' blocks are put into the residency index
	// beside the requests at a time, by a goroutine each. Every choice looks at
	// all of them, see plan.Scheduler.
	maxLandings = 16
	// fewBlocks are put there about as soon as somebody else is told to: new ones
	// take a tenth of a microsecond each, to start a goroutine and wake a processor
	// for it four to eight.
	fewBlocks = 64
	// heldBlocks that the replica holds already take as long as a new one.
	heldBlocks = 8
)

// landings are those of this process. They end by themselves and take some
// tenths of a millisecond, so nothing has to stop them.
var landings = make(lander, maxLandings)

// lander puts blocks into the residency index, mostly while the request that
// they belong to is on its way to its replica already. It has an element for
// each that is under way.
type lander chan struct{}

// land lets a reservation land whose replica holds so many of the chain's
// blocks. Where there are few others, or too many land already, this is done
// when land returns.
func (l lander) land(r *fleet.Reservation, chain []uint64, held int) {
	if len(chain)-held+held/heldBlocks < fewBlocks {
		r.Land(chain)
		return
	}
	select {
	case l <- struct{}{}:
		go func() {
			defer func() { <-l }()
			r.Land(chain)
		}()
	default:
		r.Land(chain)
	}
}
