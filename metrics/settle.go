// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"math"
	"slices"
	"strings"
)

// settle turns what the ranks of one dialect said into the facts of the replica.
func (s *Scanner) settle(d int, into *Snapshot) {
	p := page{ranks: s.ranks, dialect: d}
	into.Engine = dialects[d].engine
	into.Rows = p.rows()

	into.Running = p.sum(running)
	into.Waiting = p.sum(waiting)
	into.BlockTokens = p.most(blockTokens)
	into.CapacityTokens = p.capacity()
	into.KVUsage = p.usage(into.CapacityTokens)
	into.PrefixCaching = p.least(prefixCaching)
	into.Asleep = p.asleep()

	into.PromptTokens = p.sum(promptTokens)
	into.CachedPromptTokens = p.sum(cachedPromptTokens)
	into.ComputedPromptTokens = p.sum(computedPromptTokens)
	if !into.PromptTokens.Known && into.CachedPromptTokens.Known && into.ComputedPromptTokens.Known {
		into.PromptTokens = finite(into.CachedPromptTokens.Value + into.ComputedPromptTokens.Value)
	}
	into.PrefixQueries, into.PrefixHits = p.prefixCache(into)
	into.GenerationTokens = p.sum(generationTokens)
	into.FirstTokens = p.sum(firstTokens)
	into.FirstTokenSeconds = p.sum(firstTokenSeconds)
	into.QueueSeconds = p.sum(queueSeconds)
	into.PrefillSeconds = p.sum(prefillSeconds)
	into.PrefillTokens = p.sum(prefillTokens)
	if !into.ComputedPromptTokens.Known { // late, since it counts at a request's end
		into.ComputedPromptTokens = into.PrefillTokens
	}
	into.Finished = p.sum(finished)
	into.Preemptions = p.sum(preemptions)
	into.EvictedBlocks = p.sum(evictedBlocks)
	into.EvictedLifetimeSeconds = p.sum(evictedLifetime)
	into.EvictedIdleSeconds = p.sum(evictedIdle)
	into.BlockReuses = p.sum(blockReuses)
	into.BlockReuseSeconds = p.sum(blockReuseGaps)

	into.Models = s.modelNames(d)
	if s.lora.seen {
		into.Adapters = s.lora.names()
	}
}

// page is the ranks of one dialect.
type page struct {
	ranks   []rank
	dialect int
}

// rows is how many ranks wrote the gauge that most of them wrote. Rows without a
// rank's label, such as SGLang's front-end counters, are no rank of their own.
func (p page) rows() int {
	most := 0
	for _, f := range []field{running, waiting, kvUsage, capacityTokens, capacityBlocks} {
		n := 0
		for i := range p.ranks {
			if r := &p.ranks[i]; r.dialect == p.dialect && r.has(f) {
				n++
			}
		}
		most = max(most, n)
	}
	return most
}

func (r *rank) has(f field) bool {
	return slices.ContainsFunc(r.cells[f][:], func(c cell) bool { return c.state != absent })
}

// fold combines a field over the ranks, in the best spelling that any uses, and
// counts those that have it. One unreadable rank makes the whole unknown.
func (p page) fold(f field, combine func(a, b float64) float64) (Fact, int) {
	for sp := range spellings {
		total, n := 0.0, 0
		for i := range p.ranks {
			c := &p.ranks[i].cells[f][sp]
			if p.ranks[i].dialect != p.dialect || c.state == absent {
				continue
			}
			if c.state == spoiled {
				return Fact{}, 0
			}
			if n++; n == 1 {
				total = c.value
			} else {
				total = combine(total, c.value)
			}
		}
		if n > 0 {
			return finite(total), n
		}
	}
	return Fact{}, 0
}

func (p page) sum(f field) Fact {
	fact, _ := p.fold(f, func(a, b float64) float64 { return a + b })
	return fact
}

func (p page) most(f field) Fact {
	fact, _ := p.fold(f, func(a, b float64) float64 { return max(a, b) })
	return fact
}

func (p page) least(f field) Fact {
	fact, _ := p.fold(f, func(a, b float64) float64 { return min(a, b) })
	return fact
}

func (p page) usage(capacity Fact) Fact {
	total, n := p.fold(kvUsage, func(a, b float64) float64 { return a + b })
	if n > 0 {
		return finite(total.Value / float64(n))
	}
	reserved := p.sum(reservedTokens)
	if !reserved.Known || !capacity.Known || capacity.Value == 0 {
		return Fact{}
	}
	return finite(min(1, reserved.Value/capacity.Value))
}

// capacity prefers a size in tokens, which knows of hybrid models, to blocks
// times block size.
func (p page) capacity() Fact {
	if tokens := p.sum(capacityTokens); tokens.Known {
		return tokens
	}
	blocks := p.sum(capacityBlocks)
	if dialects[p.dialect].totalBlocks {
		blocks = p.most(capacityBlocks)
	}
	return product(blocks, p.most(blockTokens))
}

// prefixCache returns the tokens looked up and found.
func (p page) prefixCache(s *Snapshot) (queries, hits Fact) {
	queries, hits = p.sum(prefixQueries), p.sum(prefixHits)
	if queries.Known || hits.Known {
		return queries, hits
	}
	if dialects[p.dialect].hitsFromPrompts && s.PromptTokens.Known && s.CachedPromptTokens.Known {
		return s.PromptTokens, s.CachedPromptTokens
	}
	reused, missed := p.sum(reusedBlocks), p.sum(missedBlocks)
	if !reused.Known || !missed.Known {
		return Fact{}, Fact{}
	}
	return product(finite(reused.Value+missed.Value), s.BlockTokens), product(reused, s.BlockTokens)
}

func (p page) asleep() Fact {
	up, down := p.least(awake), p.most(asleep)
	if !up.Known && !down.Known {
		return Fact{}
	}
	if up.Known && up.Value == 0 || down.Value > 0 {
		return Fact{Value: 1, Known: true}
	}
	return Fact{Known: true}
}

func (c cell) fact() Fact {
	if c.state != known {
		return Fact{}
	}
	return Fact{Value: c.value, Known: true}
}

// finite is a known fact unless adding up left the range of numbers.
func finite(v float64) Fact {
	if math.IsInf(v, 0) || math.IsNaN(v) {
		return Fact{}
	}
	return Fact{Value: v, Known: true}
}

func product(a, b Fact) Fact {
	if !a.Known || !b.Known {
		return Fact{}
	}
	return finite(a.Value * b.Value)
}

func (s *Scanner) modelNames(d int) []string {
	var names []string
	for _, m := range s.models {
		if m.dialect == d {
			names = append(names, unescape(m.name))
		}
	}
	return names
}

// names are the adapters of the row, running ones first, each once.
func (l *loraRow) names() []string {
	names := []string{}
	for _, list := range [][]byte{l.running, l.waiting} {
		for part := range strings.SplitSeq(string(list), ",") {
			name := unescape(strings.TrimSpace(part))
			if name != "" && len(names) < maxNames && !slices.Contains(names, name) {
				names = append(names, name)
			}
		}
	}
	return names
}
