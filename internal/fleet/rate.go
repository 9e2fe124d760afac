// SPDX-License-Identifier: Apache-2.0

package fleet

import "math"

// DefaultPrefillRate is the prefill speed assumed of a replica, in uncached
// prompt tokens a second, until its own counters have told better.
const DefaultPrefillRate = 10_000

const (
	// rateHalfLife is the busy time after which a measurement counts half:
	// long enough to even out prompts that straddle two scrapes, short enough
	// to follow a replica that slows down.
	rateHalfLife = 30.0 // seconds
	// ratePrior is the weight of the assumed rate, in seconds of busy time.
	ratePrior = 1.0
	// rateLean makes the estimate lean high. A queue believed to drain too
	// fast costs little, because finished requests and first-token counters
	// correct it; one believed to drain too slowly keeps work away.
	rateLean = 1.1
)

// rate learns how many uncached prompt tokens a second a replica prefills
// while it has something to prefill.
type rate struct {
	tokens, seconds float64
}

// observe books that tokens were prefilled in a stretch of busy time.
func (r *rate) observe(tokens, seconds float64) {
	if seconds <= 0 || tokens < 0 {
		return
	}
	keep := math.Exp2(-seconds / rateHalfLife)
	r.tokens = r.tokens*keep + tokens
	r.seconds = r.seconds*keep + seconds
}

// known tells whether enough busy time was seen to stand on its own.
func (r *rate) known() bool { return r.seconds >= 2*ratePrior && r.tokens > 0 }

// perSecond is the learned rate, drawn towards assumed while little was seen.
func (r *rate) perSecond(assumed float64) float64 {
	if assumed <= 0 {
		assumed = DefaultPrefillRate
	}
	seen := r.tokens / max(r.seconds, 1e-9) * rateLean
	w := r.seconds / (r.seconds + ratePrior)
	if r.seconds == 0 {
		return assumed
	}
	return max(1, seen*w+assumed*(1-w))
}
