// SPDX-License-Identifier: Apache-2.0

package kvevents

import (
	"cmp"
	"container/list"
	"slices"
	"sort"
	"sync"
)

// AlignmentConfig bounds an [Alignment]. A zero field means its default.
type AlignmentConfig struct {
	// Entries is how many text blocks and token blocks are kept of all prompts together (default 500,000, some 15 MB).
	Entries int
	// TextBlock is the number of bytes in a text block (default 256).
	TextBlock int
}

// Alignment joins a router's blocks of prompt text with an engine's blocks of tokens. It learns both sides of whole prompts and answers,
// for the text chain of another prompt, which token blocks that prompt starts with. It is safe for concurrent use.
//
// What is exact: the token keys of a learned prompt, which are those the engine announces; and that two prompts whose text chains agree
// up to a block have the same text up to there.
//
// What is estimated: how many of those tokens lie within the common text. Engines do not say which token came from which byte. Three
// things narrow it down. Of two learned prompts that share text up to a block and no further, the token blocks that agree are counted;
// that is an observed point for every prompt sharing the same text, good to one text block, whatever the template did in between.
// Between observed points, the start and the end of the prompt, tokens are taken to be spread evenly over the text. And an estimate never
// exceeds what was observed at a deeper block, so that a template which prints something variable first (a date, tools) is found out by
// the second prompt. Estimates are rounded down to whole token blocks, and the text behind the last full text block is not counted.
//
// Too high an estimate makes a replica that holds the learned prompt look as if it held some blocks more of this one than it does; a
// wrong place for one request, never a wrong answer.
type Alignment struct {
	block   int
	entries int

	mu      sync.Mutex
	used    int
	at      map[uint64]place // deepest learned prompt for each text prefix; the newest when there are several
	prompts list.List        // of *learned, most recently used first
}

type place struct {
	prompt *list.Element
	depth  int // in text blocks
}

// learned is one prompt, both sides of it.
type learned struct {
	chain  []uint64
	bytes  int
	tokens int
	keys   []keySet
	points []point // observed, by depth
}

type keySet struct {
	size int
	keys []Key
}

// point says that prompts sharing this many text blocks were seen to share this many tokens.
type point struct{ depth, tokens int }

// maxPoints is how many observed points are kept for a prompt.
const maxPoints = 32

// NewAlignment returns an alignment that knows nothing.
func NewAlignment(config AlignmentConfig) *Alignment {
	return &Alignment{
		block: positiveOr(config.TextBlock, 256), entries: positiveOr(config.Entries, 500_000),
		at: map[uint64]place{},
	}
}

// Prompt is both sides of one prompt.
type Prompt struct {
	// Chain are the chained hashes of the full text blocks. Model, adapter and salt must be part of the chain's seed.
	Chain []uint64
	// TextBytes is the length of the text, the part behind the last full block included.
	TextBytes int
	// Tokens are the ids the engine makes of it, template included.
	Tokens []uint32
	// LoRA names the adapter; empty for the base model.
	LoRA string
	// Extra has the Extra of each token block and may be shorter; see [SaltExtra].
	Extra []Extra
	// BlockSizes are the token block sizes of the replicas that may serve it; at most four are kept.
	BlockSizes []int
}

// Learn takes a prompt. One without full text blocks, tokens or block sizes, or of more than a quarter of the entries, is left out.
func (a *Alignment) Learn(p Prompt) {
	l := &learned{chain: slices.Clone(p.Chain), bytes: max(p.TextBytes, len(p.Chain)*a.block), tokens: len(p.Tokens)}
	for _, size := range p.BlockSizes[:min(len(p.BlockSizes), 4)] {
		if keys := AppendKeys(nil, p.Tokens, size, p.LoRA, p.Extra); len(keys) > 0 {
			l.keys = append(l.keys, keySet{size, keys})
		}
	}
	if len(l.chain) == 0 || len(l.keys) == 0 || l.cost() > a.entries/4 {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if at, depth := a.deepest(l.chain); at != nil {
		a.compare(l, at.Value.(*learned), depth)
		if old := at.Value.(*learned); slices.Equal(old.chain, l.chain) {
			a.forget(at)
		}
	}
	element := a.prompts.PushFront(l)
	for i, h := range l.chain {
		a.at[h] = place{element, i + 1}
	}
	a.used += l.cost()
	for a.used > a.entries {
		a.forget(a.prompts.Back())
	}
}

// cost is what a prompt takes of the entries; the constant stands for its fixed parts.
func (l *learned) cost() int {
	n := 16 + len(l.chain)
	for _, s := range l.keys {
		n += len(s.keys)
	}
	return n
}

// deepest finds the learned prompt that shares the most text blocks with a chain. Prompts in between may have been forgotten, so it
// looks from the end.
func (a *Alignment) deepest(chain []uint64) (*list.Element, int) {
	for depth := len(chain); depth > 0; depth-- {
		if p, ok := a.at[chain[depth-1]]; ok && p.depth == depth {
			return p.prompt, depth
		}
	}
	return nil, 0
}

// compare notes, for both of two prompts that share depth text blocks and no more, how many tokens they share.
func (a *Alignment) compare(l, other *learned, depth int) {
	for _, p := range other.points {
		if p.depth < depth {
			l.observe(p)
		}
	}
	for _, s := range l.keys {
		if keys, ok := other.keysOf(s.size); ok {
			p := point{depth, common(s.keys, keys) * s.size}
			l.observe(p)
			other.observe(p)
			return
		}
	}
}

func (l *learned) keysOf(size int) ([]Key, bool) {
	for _, s := range l.keys {
		if s.size == size {
			return s.keys, true
		}
	}
	return nil, false
}

// common returns the number of leading keys two prompts share. Equal keys mean equal keys before them.
func common(a, b []Key) int {
	return sort.Search(min(len(a), len(b)), func(i int) bool { return a[i] != b[i] })
}

func (l *learned) observe(p point) {
	i, found := slices.BinarySearchFunc(l.points, p, func(x, y point) int { return cmp.Compare(x.depth, y.depth) })
	if found {
		l.points[i].tokens = min(l.points[i].tokens, p.tokens)
	} else if len(l.points) < maxPoints {
		l.points = slices.Insert(l.points, i, p)
	}
}

func (a *Alignment) forget(e *list.Element) {
	l := a.prompts.Remove(e).(*learned)
	for _, h := range l.chain {
		if a.at[h].prompt == e {
			delete(a.at, h)
		}
	}
	a.used -= l.cost()
}

// Aligned are the token blocks a prompt is believed to start with.
type Aligned struct {
	// Keys are their keys, for [View.LongestKeys].
	Keys []Key
	// Tokens is the number of tokens in them.
	Tokens int
	// TextBlocks is how many of the prompt's text blocks are aligned; what follows them is unknown, not absent.
	TextBlocks int
	// Observed says that Tokens was counted on two prompts rather than estimated.
	Observed bool
}

// Lookup aligns a prompt's text chain, for replicas with token blocks of the given size. It is false when no leading part of the text
// has been learned for that size. The keys must not be changed.
func (a *Alignment) Lookup(chain []uint64, blockSize int) (Aligned, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	e, depth := a.deepest(chain)
	if e == nil {
		return Aligned{}, false
	}
	l := e.Value.(*learned)
	keys, ok := l.keysOf(blockSize)
	if !ok {
		return Aligned{}, false
	}
	a.prompts.MoveToFront(e)
	tokens, observed := l.estimate(depth, a.block)
	n := min(tokens/blockSize, len(keys))
	return Aligned{Keys: keys[:n:n], Tokens: n * blockSize, TextBlocks: depth, Observed: observed}, true
}

// estimate returns how many tokens the first depth text blocks have.
func (l *learned) estimate(depth, block int) (tokens int, observed bool) {
	// Both ends in bytes, since the end of the prompt is seldom the end of a block.
	low, high := point{}, point{l.bytes, l.tokens}
	most := l.tokens
	for _, p := range slices.Backward(l.points) {
		switch {
		case p.depth > depth:
			high = point{p.depth * block, p.tokens}
			most = min(most, p.tokens)
		case p.depth == depth:
			return min(p.tokens, most), true
		default:
			low = point{p.depth * block, p.tokens}
		}
		if p.depth < depth {
			break
		}
	}
	if span := high.depth - low.depth; span > 0 {
		tokens = low.tokens + max(0, high.tokens-low.tokens)*(depth*block-low.depth)/span
	}
	return min(tokens, most), false
}

// Known returns how many leading text blocks of a chain have been learned.
func (a *Alignment) Known(chain []uint64) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	_, depth := a.deepest(chain)
	return depth
}

// Len returns the number of prompts kept.
func (a *Alignment) Len() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.prompts.Len()
}
