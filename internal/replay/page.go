// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/enginesim"
	"github.com/seed-2fa47a1e/caddy-kv-cache/metrics"
)

// Part is a part of a replica's metrics page that other engines' pages lack.
type Part struct {
	// Name is how commands call it, and About what it is in a few words.
	Name, About string

	drop func(page *metrics.Snapshot)
}

// Parts are all there are.
var Parts = []Part{
	{"first_tokens", "how many requests had their first token", func(p *metrics.Snapshot) {
		p.FirstTokens = metrics.Fact{}
	}},
	{"prefill_times", "how long prefills took", func(p *metrics.Snapshot) {
		p.PrefillSeconds, p.PrefillTokens = metrics.Fact{}, metrics.Fact{}
	}},
	{"prompt_tokens", "how many prompt tokens there were, and how many were cached", func(p *metrics.Snapshot) {
		p.PromptTokens, p.CachedPromptTokens = metrics.Fact{}, metrics.Fact{}
	}},
	{"hits", "what the prefix cache was asked and had", func(p *metrics.Snapshot) {
		p.PrefixQueries, p.PrefixHits = metrics.Fact{}, metrics.Fact{}
	}},
	{"gauges", "how many requests run and wait", func(p *metrics.Snapshot) {
		p.Running, p.Waiting = metrics.Fact{}, metrics.Fact{}
	}},
	{"usage", "how full the KV cache is", func(p *metrics.Snapshot) {
		p.KVUsage = metrics.Fact{}
	}},
	{"capacity", "how large the KV cache and a block are", func(p *metrics.Snapshot) {
		p.CapacityTokens, p.BlockTokens = metrics.Fact{}, metrics.Fact{}
	}},
}

// PartNames are their names.
func PartNames() []string {
	names := make([]string, len(Parts))
	for i, p := range Parts {
		names[i] = p.Name
	}
	return names
}

// PartNamed returns the part of that name.
func PartNamed(name string) (Part, error) {
	i := slices.Index(PartNames(), name)
	if i < 0 {
		return Part{}, fmt.Errorf("metrics pages have no part %q, only %s", name, strings.Join(PartNames(), ", "))
	}
	return Parts[i], nil
}

// snapshot is what a scrape of a simulated engine would tell.
func (f *Fleet) snapshot(now time.Duration, replica int, s enginesim.Stats) *metrics.Snapshot {
	fact := func(v float64) metrics.Fact { return metrics.Fact{Value: v, Known: true} }
	c := f.Engines[replica].Config()
	started := epoch.Add(f.started[replica])
	if f.started[replica] == 0 { // the fleet has been up for long when the traffic begins
		started = epoch.Add(-24 * time.Hour)
	}
	page := &metrics.Snapshot{
		At: epoch.Add(now), Engine: metrics.VLLM, Rows: 1,
		Running: fact(float64(s.Running)), Waiting: fact(float64(s.Waiting)), KVUsage: fact(s.KVUsage),
		CapacityTokens: fact(float64(c.CapacityTokens())), BlockTokens: fact(float64(c.BlockTokens)), PrefixCaching: fact(1),
		PrefixQueries: fact(float64(s.PrefixQueries)), PrefixHits: fact(float64(s.PrefixHits)),
		PromptTokens: fact(float64(s.PromptTokens)), CachedPromptTokens: fact(float64(s.CachedTokens)),
		GenerationTokens: fact(float64(s.GenerationTokens)), FirstTokens: fact(float64(s.FirstTokens)),
		Finished: fact(float64(s.Finished)), PrefillSeconds: fact(s.PrefillTime.Seconds()), PrefillTokens: fact(float64(s.PromptTokens - s.CachedTokens)),
		StartTime: fact(float64(started.Unix())),
	}
	for _, part := range f.Setup.Untold {
		part.drop(page)
	}
	return page
}
