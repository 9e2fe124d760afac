// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"fmt"
	"math"
	"slices"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/figures"
)

// Full is the standing of a replica that Caddy's own health checks or limits
// keep out.
const Full = "full"

// Standing is the replica's state in a word, with Caddy's own view in it.
func (r *Replica) Standing() string {
	if r.State == "eligible" && !r.Available {
		return Full
	}
	return r.State
}

// A replica stands out
const (
	lowTrust  = 0.7    // when fewer of its predicted hits are real
	farApart  = 3      // when its queue is so many times the median of all
	longQueue = 20_000 // and so many tokens long
	slowPace  = 0.5    // when its rate is below this share of the median
	lowHits   = 0.5    // when its hit rate is below this share of the median
	someHits  = 0.2    // and that is no less than this
)

// Oddity is what makes a replica stand out from the others of its fleet.
type Oddity struct {
	Replica string `json:"replica"`
	// What goes on from the replica's address as a sentence does.
	What string `json:"what"`
}

// Oddities says which replicas of the fleet stand out, and how.
func (f *Fleet) Oddities() []Oddity {
	var out []Oddity
	queue := median(f, func(r *Replica) float64 { return r.Ledger.Queued })
	rate := median(f, func(r *Replica) float64 { return r.Learned.PrefillRate })
	hits := median(f, hitRatio)
	for i := range f.Replicas {
		r := &f.Replicas[i]
		say := func(format string, args ...any) {
			out = append(out, Oddity{r.Address, fmt.Sprintf(format, args...)})
		}
		switch {
		case r.Standing() == Full:
			say("is unhealthy or full in Caddy's eyes")
		case r.State != "eligible":
			say("is avoided: %s, with %s in flight", r.State, figures.Plural(int(r.Ledger.InFlight), "request"))
		}
		if r.Scrape.Error != "" {
			say("can't be scraped: %s", r.Scrape.Error)
		}
		if r.Learned.Trust < lowTrust {
			say("has only %s of the hits that are predicted", figures.Percent(r.Learned.Trust))
		}
		if r.Ledger.Queued > longQueue && r.Ledger.Queued > farApart*queue {
			say("has piled up %s uncached tokens; the median is %s", figures.Compact(r.Ledger.Queued), figures.Compact(queue))
		}
		if r.Learned.PrefillRateKnown && r.Learned.PrefillRate < slowPace*rate {
			say("is slow: %s tokens a second; the median is %s", figures.Compact(r.Learned.PrefillRate), figures.Compact(rate))
		}
		if h := hitRatio(r); hits >= someHits && h < lowHits*hits {
			say("has a hit rate of %s; the median is %s", figures.Percent(h), figures.Percent(hits))
		}
		if r.Ledger.Others > 0 {
			say("also serves %s of other senders", figures.Plural(int(r.Ledger.Others), "request"))
		}
	}
	return out
}

// hitRatio is what the engine has found in its cache since it started, NaN if
// that is not known.
func hitRatio(r *Replica) float64 {
	if r.Engine != nil {
		if v, known := r.Engine.Facts["prefix_hit_ratio"]; known {
			return v
		}
	}
	return math.NaN()
}

// median is that of the replicas for which something is known.
func median(f *Fleet, of func(*Replica) float64) float64 {
	values := make([]float64, 0, len(f.Replicas))
	for i := range f.Replicas {
		if v := of(&f.Replicas[i]); !math.IsNaN(v) {
			values = append(values, v)
		}
	}
	if len(values) == 0 {
		return 0
	}
	slices.Sort(values)
	return values[(len(values)-1)/2]
}
