// SPDX-License-Identifier: Apache-2.0

package kvevents

import (
	"slices"
	"sync"
)

// Match is how much of a prompt a rank holds. The engine recomputes at least the last token of a prompt, so a prompt that is held
// whole still costs its last block.
type Match struct {
	// Blocks is the number of leading blocks held in any tier, in blocks of the size that matched furthest.
	Blocks int
	// Tokens is the number of tokens in them.
	Tokens int
	// ByTier splits Tokens by the fastest tier each block is in.
	ByTier [Tiers]int
}

// Credit is the number of tokens whose prefill the match saves: each tier's tokens times its [Tier.Credit].
func (m Match) Credit() float64 {
	sum := 0.0
	for t, tokens := range m.ByTier {
		sum += float64(tokens) * Tier(t).Credit()
	}
	return sum
}

// BlockSize is the number of tokens in a block of this view, 0 before the first event; the size to compute keys for [View.LongestKeys].
func (v *View) BlockSize() int {
	v.mu.RLock()
	defer v.mu.RUnlock()
	return v.blockSize()
}

// Longest returns how much of the leading part of a prompt is held. extra has the Extra of each block and may be shorter than the
// prompt; it applies to blocks of the view's [View.BlockSize], and only a first block's Extra to other sizes.
//
// The cost grows with the length of the match, not of the prompt. Where a tier keeps blocks of another size (LMCache's chunks) its
// match is added from where the shorter one ends.
func (v *View) Longest(tokens []uint32, lora string, extra []Extra) Match {
	v.mu.RLock()
	defer v.mu.RUnlock()
	var best Match
	main := v.blockSize()
	var c chain
	for _, s := range v.sizes {
		e := extra
		if int(s.size) != main {
			e = extra[:min(1, len(extra))]
		}
		best = best.with(v.walk(&c, tokens, int(s.size), lora, e))
	}
	return best
}

// with joins the matches of two chains of the same prompt in blocks of different size: what the shorter saves counts as it is, and
// the tokens beyond its end at the longer's slowest tier.
func (m Match) with(o Match) Match {
	if m.Tokens > o.Tokens {
		m, o = o, m
	}
	if m.Tokens == 0 || (m.Tokens == o.Tokens && o.Credit() >= m.Credit()) {
		return o
	}
	slowest := Device
	for t := range Tiers {
		if o.ByTier[t] > 0 {
			slowest = t
		}
	}
	joint := Match{Blocks: o.Blocks, Tokens: o.Tokens, ByTier: m.ByTier}
	joint.ByTier[slowest] += o.Tokens - m.Tokens
	if o.Credit() > joint.Credit() {
		return o
	}
	return joint
}

func (v *View) walk(c *chain, tokens []uint32, size int, lora string, extra []Extra) Match {
	var m Match
	key := rootKey(lora)
	for i := 0; (i+1)*size <= len(tokens); i++ {
		key = c.next(key, tokens[i*size:(i+1)*size], extraAt(extra, i))
		tier, held := v.fastest(key)
		if !held {
			break
		}
		m.Blocks++
		m.Tokens += size
		m.ByTier[tier] += size
	}
	return m
}

// LongestKeys is [View.Longest] for keys computed before with [AppendKeys], for blocks of blockSize tokens.
//
// Usually whoever holds a block holds all before it, and the view knows whether that is so: then the end of the match is found by
// galloping, in some twenty look-ups for thousands of blocks. Otherwise every block is looked at.
func (v *View) LongestKeys(keys []Key, blockSize int) Match {
	v.mu.RLock()
	defer v.mu.RUnlock()
	var m Match
	if v.deviceHoles == 0 {
		m.Blocks = gallop(keys, v.onDevice)
		m.ByTier[Device] = m.Blocks * blockSize
	}
	if v.lower > 0 || v.deviceHoles > 0 {
		for _, key := range keys[m.Blocks:] {
			tier, held := v.fastest(key)
			if !held {
				break
			}
			m.Blocks++
			m.ByTier[tier] += blockSize
		}
	}
	m.Tokens = m.Blocks * blockSize
	return m
}

// gallop returns the number of leading keys that are held, given that holding one means holding all before it.
func gallop(keys []Key, held func(Key) bool) int {
	step := 1
	for step <= len(keys) && held(keys[step-1]) {
		step *= 2
	}
	// The first step/2 are held. If step is within keys, the block at step-1 is not.
	low, high := step/2, min(step-1, len(keys))
	for low < high {
		middle := int(uint(low+high+1) / 2)
		if held(keys[middle-1]) {
			low = middle
		} else {
			high = middle - 1
		}
	}
	return low
}

func (v *View) onDevice(key Key) bool {
	for at := v.byKey[key]; at != 0; at = v.blocks[at].twin {
		if v.blocks[at].device() {
			return true
		}
	}
	return false
}

// fastest returns the fastest tier that holds a block.
func (v *View) fastest(key Key) (Tier, bool) {
	best := Tiers
	for at := v.byKey[key]; at != 0; at = v.blocks[at].twin {
		for t, refs := range v.blocks[at].refs[:best] {
			if refs > 0 {
				best = Tier(t)
				break
			}
		}
	}
	return best, best < Tiers
}

// maxRanks is how many data-parallel ranks of one replica are kept.
const maxRanks = 256

// Index holds the views of one replica, one for each data-parallel rank. It is a [Sink], and safe for concurrent use by the streams of
// all ranks.
type Index struct {
	config ViewConfig
	mu     sync.RWMutex
	views  map[int]*View
}

// NewIndex returns an empty index whose views have the given configuration.
func NewIndex(config ViewConfig) *Index {
	return &Index{config: config, views: map[int]*View{}}
}

// Apply gives a batch to the view of its rank.
func (x *Index) Apply(b *Batch) {
	if v := x.View(b.Rank); v != nil {
		v.Apply(b)
		return
	}
	x.mu.Lock()
	v, ok := x.views[b.Rank]
	if !ok && len(x.views) < maxRanks {
		v = NewView(x.config)
		x.views[b.Rank] = v
	}
	x.mu.Unlock()
	if v != nil {
		v.Apply(b)
	}
}

// Clear drops what is known of a rank.
func (x *Index) Clear(rank int) {
	if v := x.View(rank); v != nil {
		v.Clear()
	}
}

// ClearAll drops what is known of all ranks, for instance when the replica's start time has changed.
func (x *Index) ClearAll() {
	for _, rank := range x.Ranks() {
		x.Clear(rank)
	}
}

// SetConfig changes the bound of all views, present and future.
func (x *Index) SetConfig(config ViewConfig) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.config = config
	for _, v := range x.views {
		v.SetConfig(config)
	}
}

// View returns the view of a rank, or nil when nothing was heard of it.
func (x *Index) View(rank int) *View {
	x.mu.RLock()
	defer x.mu.RUnlock()
	return x.views[rank]
}

// Ranks returns the ranks heard of, in order.
func (x *Index) Ranks() []int {
	x.mu.RLock()
	defer x.mu.RUnlock()
	ranks := make([]int, 0, len(x.views))
	for rank := range x.views {
		ranks = append(ranks, rank)
	}
	slices.Sort(ranks)
	return ranks
}

// Longest returns the match with the most credit of all ranks, and its rank; -1 when no rank holds anything of the prompt.
func (x *Index) Longest(tokens []uint32, lora string, extra []Extra) (Match, int) {
	return x.best(func(v *View) Match { return v.Longest(tokens, lora, extra) })
}

// LongestKeys is [Index.Longest] for keys computed before with [AppendKeys], for blocks of blockSize tokens.
func (x *Index) LongestKeys(keys []Key, blockSize int) (Match, int) {
	return x.best(func(v *View) Match { return v.LongestKeys(keys, blockSize) })
}

// CreditKeys is the sum of all ranks' credit for the keys.
func (x *Index) CreditKeys(keys []Key, blockSize int) (sum float64) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	for _, v := range x.views {
		sum += v.LongestKeys(keys, blockSize).Credit()
	}
	return sum
}

// best prefers the lowest of ranks with equal credit.
func (x *Index) best(match func(*View) Match) (best Match, rank int) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	rank = -1
	for r, v := range x.views {
		m := match(v)
		if credit := m.Credit(); credit > best.Credit() || (credit > 0 && credit == best.Credit() && r < rank) {
			best, rank = m, r
		}
	}
	return best, rank
}
