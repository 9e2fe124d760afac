// SPDX-License-Identifier: Apache-2.0

package page

import (
	"math"

	"github.com/seed-2fa47a1e/caddy-kv-cache/metrics"
)

const (
	// points is how many points a curve has: ten minutes.
	points = 120
	// smoothed is how many samples a point is the mean of: half a minute.
	smoothed = 6
	// unknown stands for a point at which nothing was looked up.
	unknown = -1
)

// past is what a replica's engine looked up in its cache and found there, as
// sums that only grow: what an engine counted before it restarted stays in them.
type past struct {
	sums [points + smoothed + 1]lookups // the latest last
	last *lookups                       // the engine's own counters, nil before it told any
}

// lookups are prompt tokens looked up in a prefix cache, and those found.
type lookups struct{ asked, found float64 }

func (l lookups) minus(o lookups) lookups { return lookups{l.asked - o.asked, l.found - o.found} }
func (l lookups) plus(o lookups) lookups  { return lookups{l.asked + o.asked, l.found + o.found} }

// rate is the share that was found, false if nothing was looked up.
func (l lookups) rate() (float64, bool) {
	if l.asked <= 0 {
		return 0, false
	}
	return min(1, max(0, l.found/l.asked)), true
}

// add takes in a scrape. Without one, or where the engine does not tell, time
// passes and nothing happens.
func (p *past) add(s *metrics.Snapshot) {
	sum := p.sums[len(p.sums)-1]
	if s != nil && s.PrefixQueries.Known && s.PrefixHits.Known {
		now := lookups{s.PrefixQueries.Value, s.PrefixHits.Value}
		if p.last != nil && now.asked >= p.last.asked {
			sum = sum.plus(now.minus(*p.last))
		}
		p.last = &now
	}
	copy(p.sums[:], p.sums[1:])
	p.sums[len(p.sums)-1] = sum
}

// whole is all that the curve is about.
func (p *past) whole() lookups {
	return p.sums[len(p.sums)-1].minus(p.sums[smoothed])
}

// curve is the hit rate in per cent over time, the latest last.
func curve(of ...*past) []int8 {
	out := make([]int8, points)
	for i := range out {
		var sum lookups
		for _, p := range of {
			sum = sum.plus(p.sums[i+smoothed+1].minus(p.sums[i+1]))
		}
		out[i] = unknown
		if rate, known := sum.rate(); known {
			out[i] = int8(math.Round(100 * rate))
		}
	}
	return out
}
