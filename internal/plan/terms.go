// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"math"
	"time"
)

// Terms bounds how requests wait.
type Terms struct {
	// Room is how much prefill work a replica may have queued and still be
	// sent more, as the time that it takes. A request whose replica has more is
	// held back, free to change its mind. Where the last scrape is older than a
	// second there is so much more room, as the replica may have done that much
	// unseen. An infinite Room binds every request on arrival.
	Room time.Duration
	// Age is how much more urgent waiting makes a request, in tokens of cost
	// over the longest time that first come, first served would make anyone
	// wait of late. Relative to that, it weighs the same in a burst of seconds
	// and on a fleet that is behind by minutes.
	Age float64
	// Slip bounds what others may cost a request: it goes first when it has
	// waited Slip times as long as first come, first served would have made it
	// wait, plus Grace.
	Slip  float64
	Grace time.Duration
	// Patience bounds the same in absolute terms: a request goes first when it
	// has waited so long, unless first come, first served, too, would have made
	// some wait longer of late.
	Patience time.Duration
	// Longest is how long a request may wait at all; then it is sent wherever
	// it costs least, or refused.
	Longest time.Duration
	// Waiting is how many requests may wait; the next are bound on arrival, or
	// refused.
	Waiting int
	// Refuse says that requests beyond Longest and Waiting are refused.
	Refuse bool
}

// DefaultTerms are used when nothing is configured; docs/choice.md tells where
// the figures come from.
var DefaultTerms = Terms{
	Room:     300 * time.Millisecond,
	Age:      50_000,
	Slip:     2,
	Grace:    2 * time.Second,
	Patience: 200 * time.Second,
	Longest:  10 * time.Minute,
	Waiting:  16384,
}

// BindOnArrival never lets a request wait.
var BindOnArrival = Terms{Room: math.MaxInt64}
