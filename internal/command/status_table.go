// SPDX-License-Identifier: Apache-2.0

package command

import (
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/admin"
)

// nameWidth is what the other columns of a table leave for a replica's address.
const nameWidth = 21

// printFleet writes what fits on 80 columns of a fleet.
func printFleet(out io.Writer, f *admin.Fleet) {
	eligible := 0
	for i := range f.Replicas {
		if stateOf(&f.Replicas[i]) == "eligible" {
			eligible++
		}
	}
	fmt.Fprintf(out, "%s  %s  %d of %d replicas eligible, %s held back\n", clean(f.Name), f.Policy, eligible, len(f.Replicas), plural(f.Waiting, "request"))
	fmt.Fprintf(out, "hit rate %s as the engines count, %s of the predicted hits confirmed\n\n", percent(fleetHits(f)), percent(confirmed(f)))
	fmt.Fprintf(out, "%-*s %-8s %4s %4s %4s %4s %5s %6s %6s %5s %3s\n", nameWidth, "REPLICA", "STATE", "RUN", "WAIT", "KV", "HIT", "SENT", "QUEUE", "RATE", "TRUST", "AGE")
	for i := range f.Replicas {
		printReplica(out, &f.Replicas[i])
	}
	for _, o := range oddities(f) {
		fmt.Fprintf(out, "\n! %s", o)
	}
	if len(oddities(f)) > 0 {
		fmt.Fprintln(out)
	}
}

func printReplica(out io.Writer, r *admin.Replica) {
	rate := compact(r.Learned.PrefillRate)
	if !r.Learned.PrefillRateKnown {
		rate = "(" + rate + ")"
	}
	age := "-"
	if r.Scrape.Age != nil {
		age = shortAge(*r.Scrape.Age)
	}
	fmt.Fprintf(out, "%-*s %-8s %4s %4s %4s %4s %5s %6s %6s %5s %3s\n", nameWidth, fit(clean(r.Address), nameWidth), stateOf(r),
		fact(r, "running_requests", compact), fact(r, "waiting_requests", compact), fact(r, "kv_usage_ratio", percent), fact(r, "prefix_hit_ratio", percent),
		compact(r.Ledger.InFlight), compact(r.Ledger.Queued), rate, percent(r.Learned.Trust), age)
}

// stateOf is the replica's state in a word.
func stateOf(r *admin.Replica) string {
	if r.State == "eligible" && !r.Available {
		return "full"
	}
	return r.State
}

func fact(r *admin.Replica, name string, show func(float64) string) string {
	if r.Engine == nil {
		return "-"
	}
	v, known := r.Engine.Facts[name]
	if !known {
		return "-"
	}
	return show(v)
}

// fleetHits is the share of prompt tokens that all engines together had cached.
func fleetHits(f *admin.Fleet) float64 {
	var hits, queries float64
	for _, r := range f.Replicas {
		if r.Engine != nil {
			hits += r.Engine.Facts["prefix_hit_tokens_total"]
			queries += r.Engine.Facts["prefix_query_tokens_total"]
		}
	}
	return hits / queries
}

func confirmed(f *admin.Fleet) float64 {
	var predicted, confirmed float64
	for _, r := range f.Replicas {
		predicted += r.Learned.Predicted
		confirmed += r.Learned.Confirmed
	}
	return min(1, confirmed/predicted)
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

// oddities says which replicas stand out, and how.
func oddities(f *admin.Fleet) []string {
	var out []string
	queue := median(f, func(r *admin.Replica) float64 { return r.Ledger.Queued })
	rate := median(f, func(r *admin.Replica) float64 { return r.Learned.PrefillRate })
	hits := median(f, hitRatio)
	for i := range f.Replicas {
		r := &f.Replicas[i]
		say := func(format string, args ...any) {
			out = append(out, clean(r.Address)+" "+fmt.Sprintf(format, args...))
		}
		switch {
		case stateOf(r) == "full":
			say("is unhealthy or full in Caddy's eyes")
		case r.State != "eligible":
			say("is avoided: %s, with %s in flight", r.State, plural(int(r.Ledger.InFlight), "request"))
		}
		if r.Scrape.Error != "" {
			say("can't be scraped: %s", clean(r.Scrape.Error))
		}
		if r.Learned.Trust < lowTrust {
			say("has only %s of the hits that are predicted", percent(r.Learned.Trust))
		}
		if r.Ledger.Queued > longQueue && r.Ledger.Queued > farApart*queue {
			say("has piled up %s uncached tokens; the median is %s", compact(r.Ledger.Queued), compact(queue))
		}
		if r.Learned.PrefillRateKnown && r.Learned.PrefillRate < slowPace*rate {
			say("is slow: %s tokens a second; the median is %s", compact(r.Learned.PrefillRate), compact(rate))
		}
		if h := hitRatio(r); hits >= someHits && h < lowHits*hits {
			say("has a hit rate of %s; the median is %s", percent(h), percent(hits))
		}
		if r.Ledger.Others > 0 {
			say("also serves %s of other senders", plural(int(r.Ledger.Others), "request"))
		}
	}
	return out
}

// hitRatio is what the engine has found in its cache since it started, NaN if
// that is not known.
func hitRatio(r *admin.Replica) float64 {
	if r.Engine != nil {
		if v, known := r.Engine.Facts["prefix_hit_ratio"]; known {
			return v
		}
	}
	return math.NaN()
}

// median is that of the replicas for which something is known.
func median(f *admin.Fleet, of func(*admin.Replica) float64) float64 {
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

// compact is a count in at most four characters, and five above ten billion.
func compact(v float64) string {
	for _, unit := range []string{"", "k", "M"} {
		switch {
		case math.IsNaN(v) || math.IsInf(v, 0):
			return "-"
		case v < 9.95 && unit != "":
			return fmt.Sprintf("%.1f%s", v, unit)
		case v < 999.5:
			return fmt.Sprintf("%.0f%s", v, unit)
		}
		v /= 1000
	}
	return fmt.Sprintf("%.0fG", v)
}

func percent(share float64) string {
	if math.IsNaN(share) || math.IsInf(share, 0) {
		return "-"
	}
	return fmt.Sprintf("%.0f%%", 100*share)
}

// shortAge is an age in at most three characters.
func shortAge(s float64) string {
	switch {
	case s < 99.5:
		return fmt.Sprintf("%.0fs", s)
	case s < 99.5*60:
		return fmt.Sprintf("%.0fm", s/60)
	case s < 99.5*3600:
		return fmt.Sprintf("%.0fh", s/3600)
	}
	return fmt.Sprintf("%.0fd", min(99, (time.Duration(s)*time.Second).Hours()/24))
}

func plural(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// fit leaves the end of what is too long, where addresses differ.
func fit(s string, width int) string {
	if n := utf8.RuneCountInString(s); n > width {
		runes := []rune(s)
		return "…" + string(runes[n-width+1:])
	}
	return s
}

// clean keeps what others wrote from steering the terminal.
func clean(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return utf8.RuneError
	}, s)
}
