// SPDX-License-Identifier: Apache-2.0

package command

import (
	"fmt"
	"io"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/admin"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/figures"
)

// nameWidth is what the other columns of a table leave for a replica's address.
const nameWidth = 21

// printFleet writes what fits on 80 columns of a fleet.
func printFleet(out io.Writer, f *admin.Fleet) {
	eligible := 0
	for i := range f.Replicas {
		if f.Replicas[i].Standing() == "eligible" {
			eligible++
		}
	}
	fmt.Fprintf(out, "%s  %s  %d of %d replicas eligible, %s held back\n", clean(f.Name), f.Policy, eligible, len(f.Replicas), figures.Plural(f.Waiting, "request"))
	fmt.Fprintf(out, "hit rate %s as the engines count, %s of the predicted hits confirmed\n\n", figures.Percent(fleetHits(f)), figures.Percent(confirmed(f)))
	fmt.Fprintf(out, "%-*s %-8s %4s %4s %4s %4s %5s %6s %6s %5s %3s\n", nameWidth, "REPLICA", "STATE", "RUN", "WAIT", "KV", "HIT", "SENT", "QUEUE", "RATE", "TRUST", "AGE")
	for i := range f.Replicas {
		printReplica(out, &f.Replicas[i])
	}
	oddities := f.Oddities()
	for _, o := range oddities {
		fmt.Fprintf(out, "\n! %s", clean(o.Replica+" "+o.What))
	}
	if len(oddities) > 0 {
		fmt.Fprintln(out)
	}
}

func printReplica(out io.Writer, r *admin.Replica) {
	rate := figures.Compact(r.Learned.PrefillRate)
	if !r.Learned.PrefillRateKnown {
		rate = "(" + rate + ")"
	}
	age := "-"
	if r.Scrape.Age != nil {
		age = figures.Age(*r.Scrape.Age)
	}
	fmt.Fprintf(out, "%-*s %-8s %4s %4s %4s %4s %5s %6s %6s %5s %3s\n", nameWidth, fit(clean(r.Address), nameWidth), r.Standing(),
		fact(r, "running_requests", figures.Compact), fact(r, "waiting_requests", figures.Compact), fact(r, "kv_usage_ratio", figures.Percent), fact(r, "prefix_hit_ratio", figures.Percent),
		figures.Compact(r.Ledger.InFlight), figures.Compact(r.Ledger.Queued), rate, figures.Percent(r.Learned.Trust), age)
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
