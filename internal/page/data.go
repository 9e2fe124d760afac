// SPDX-License-Identifier: Apache-2.0

package page

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/admin"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/fleet"
)

// The types below are what the page asks for, as JSON. None holds text of a
// prompt. What is not known is left out, and never 0.

// Data is all that the page shows.
type Data struct {
	// At is when it was so, in milliseconds of Unix time.
	At int64 `json:"at"`
	// Names are those of all fleets, Fleets what was asked for.
	Names  []string `json:"names"`
	Fleets []Fleet  `json:"fleets"`
}

// Fleet is one policy and the replicas that it chooses from.
type Fleet struct {
	Name   string `json:"name"`
	Policy string `json:"policy"`
	// Waiting is how many requests are held back.
	Waiting int `json:"waiting"`
	// Hits is the share of prompt tokens found in caches over the last minutes, as
	// the engines count, and Curve the same over time, in per cent, -1 where nothing
	// was looked up.
	Hits     *float64         `json:"hits,omitempty"`
	Curve    []int8           `json:"curve"`
	Minutes  float64          `json:"minutes"`
	Oddities []admin.Oddity   `json:"oddities"`
	Replicas []Replica        `json:"replicas"`
	Reasons  []Reason         `json:"reasons"`
	Latest   []admin.Decision `json:"decisions"`
	Prefixes []Prefix         `json:"prefixes"`
}

// Replica is what is shown of one.
type Replica struct {
	Address string `json:"address"`
	// State is as in `caddy kv-cache status`.
	State   string   `json:"state"`
	Warming bool     `json:"warming"`
	Engine  string   `json:"engine,omitempty"`
	Models  []string `json:"models,omitempty"`
	// Age is of what the engine said, in seconds.
	Age *float64 `json:"age,omitempty"`
	// InFlight and Queued are our own ledger, Running, Waiting and KV what the
	// engine said.
	InFlight float64 `json:"in_flight"`
	Queued   float64 `json:"queued"`
	// Rate is the learned prefill rate, in tokens a second.
	Rate    float64  `json:"rate"`
	Running *float64 `json:"running,omitempty"`
	Waiting *float64 `json:"waiting,omitempty"`
	KV      *float64 `json:"kv,omitempty"`
	Hits    *float64 `json:"hits,omitempty"`
	Curve   []int8   `json:"curve"`
	// Chosen is how many of the last decisions went here.
	Chosen int `json:"chosen"`
}

// Reason is how often the last decisions were made for one.
type Reason struct {
	Reason string `json:"reason"`
	Why    string `json:"why"`
	Count  int    `json:"count"`
}

// Prefix is a leading part that several prompts have in common.
type Prefix struct {
	Hash    string   `json:"hash"`
	Tokens  float64  `json:"tokens"`
	Prompts int      `json:"prompts"`
	Holders []string `json:"holders"`
}

const (
	// counted is how many of the last decisions are counted by reason and replica,
	// as many as are kept; listed is how many are shown one by one.
	counted, listed = 512, 16
	// heaviest is how many shared prefixes are shown.
	heaviest = 12
	// named is how many models of a replica are told.
	named = 4
)

func (b *board) describe(p admin.Policy, now time.Time) Fleet {
	about := admin.Describe(p, now)
	out := Fleet{
		Name: about.Name, Policy: about.Policy, Waiting: about.Waiting,
		Minutes:  (points * sampleEvery).Minutes(),
		Oddities: about.Oddities(), Replicas: []Replica{}, Reasons: []Reason{},
		Latest: []admin.Decision{}, Prefixes: b.prefixes[about.Name],
	}
	last := p.Recent(counted)
	chosen := make(map[string]int)
	for i := range last {
		chosen[last[i].Replica]++
	}
	var all []*past
	var sum lookups
	for i := range about.Replicas {
		r := replicaOf(&about.Replicas[i])
		r.Chosen = chosen[r.Address]
		if before := b.past[member{about.Name, r.Address}]; before != nil {
			all = append(all, before)
			sum = sum.plus(before.whole())
			r.Hits, r.Curve = share(before.whole()), curve(before)
		}
		out.Replicas = append(out.Replicas, r)
	}
	out.Hits, out.Curve = share(sum), curve(all...)
	out.Reasons = reasonsOf(last)
	out.Latest = append(out.Latest, last[:min(len(last), listed)]...)
	if out.Oddities == nil {
		out.Oddities = []admin.Oddity{}
	}
	if out.Prefixes == nil {
		out.Prefixes = []Prefix{}
	}
	return out
}

func replicaOf(r *admin.Replica) Replica {
	out := Replica{
		Address: r.Address, State: r.Standing(), Warming: r.Warming,
		InFlight: r.Ledger.InFlight, Queued: math.Round(r.Ledger.Queued), Rate: math.Round(r.Learned.PrefillRate),
		Age: r.Scrape.Age, Curve: []int8{},
	}
	if e := r.Engine; e != nil {
		out.Engine, out.Models = e.Kind, e.Models[:min(len(e.Models), named)]
		out.Running, out.Waiting = factOf(e, "running_requests"), factOf(e, "waiting_requests")
		out.KV = factOf(e, "kv_usage_ratio")
	}
	return out
}

// factOf is a number that the engine told, nil if it did not, or told none.
func factOf(e *admin.Engine, name string) *float64 {
	v, known := e.Facts[name]
	if !known || math.IsNaN(v) || math.IsInf(v, 0) {
		return nil
	}
	return &v
}

func share(l lookups) *float64 {
	rate, known := l.rate()
	if !known {
		return nil
	}
	return &rate
}

// reasonsOf counts decisions by their reason, the most frequent first.
func reasonsOf(list []admin.Decision) []Reason {
	counts := make(map[string]int)
	for i := range list {
		counts[list[i].Reason]++
	}
	out := make([]Reason, 0, len(counts))
	for reason, n := range counts {
		out = append(out, Reason{reason, admin.Because[reason], n})
	}
	slices.SortFunc(out, func(a, b Reason) int { return cmp.Or(b.Count-a.Count, cmp.Compare(a.Reason, b.Reason)) })
	return out
}

func sharedBy(f *fleet.Fleet) []Prefix {
	var out []Prefix
	for _, s := range f.SharedPrefixes(heaviest) {
		out = append(out, Prefix{Hash: fmt.Sprintf("%016x", s.Hash), Tokens: math.Round(s.Tokens), Prompts: s.Prompts, Holders: s.Holders})
	}
	return out
}
