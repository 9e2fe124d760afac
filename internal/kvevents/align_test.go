// SPDX-License-Identifier: Apache-2.0

package kvevents

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/cespare/xxhash/v2"
)

const alignBlock = 16 // bytes in a text block of these tests

// words is a prompt of words; a word is a token, and some words are long.
type words []uint32

func (x words) bytes() []byte {
	var b []byte
	for _, w := range x {
		b = append(b, make([]byte, 2+w%7)...)
		b[len(b)-1] = byte(w)
		b[len(b)-2] = byte(w >> 8)
	}
	return b
}

// chain hashes the text's full blocks.
func (x words) chain() (chain []uint64) {
	b := x.bytes()
	var d xxhash.Digest
	d.Reset()
	for i := 0; i+alignBlock <= len(b); i += alignBlock {
		_, _ = d.Write(b[i : i+alignBlock])
		chain = append(chain, d.Sum64())
	}
	return chain
}

// prompt renders the text with a template of two tokens before and one behind it.
func (x words) prompt(head uint32) Prompt {
	tokens := append([]uint32{head, head}, x...)
	return Prompt{Chain: x.chain(), TextBytes: len(x.bytes()), Tokens: append(tokens, 999), BlockSizes: []int{2}}
}

func randomText(r *rand.Rand, n int) words {
	x := make(words, n)
	for i := range x {
		x[i] = uint32(r.IntN(5000))
	}
	return x
}

func newTestAlignment() *Alignment {
	return NewAlignment(AlignmentConfig{TextBlock: alignBlock, Entries: 4000})
}

// shared returns how many leading tokens two prompts have in common, in whole blocks.
func shared(a, b Prompt, size int) int {
	n := 0
	for n < min(len(a.Tokens), len(b.Tokens)) && a.Tokens[n] == b.Tokens[n] {
		n++
	}
	return n / size * size
}

func TestAlignmentEstimates(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	for range 200 {
		a := newTestAlignment()
		x := randomText(r, 100+r.IntN(200))
		learned := x.prompt(1)
		a.Learn(learned)
		y := append(slices.Clone(x[:10+r.IntN(len(x)-10)]), randomText(r, 50)...)
		other := y.prompt(1)
		got, ok := a.Lookup(other.Chain, 2)
		if !ok {
			t.Fatalf("nothing found for a prompt that shares %d tokens", shared(learned, other, 2))
		}
		if !slices.Equal(got.Keys, AppendKeys(nil, learned.Tokens, 2, "", nil)[:len(got.Keys)]) || got.Tokens != 2*len(got.Keys) || got.Observed {
			t.Fatalf("aligned %+v: not leading keys of the learned prompt", got)
		}
		// Words differ in length, so that an even spread errs by the square root of their number.
		if want := shared(learned, other, 2); got.Tokens < want-30 || got.Tokens > want+30 {
			t.Errorf("%d tokens, the prompts share %d", got.Tokens, want)
		}
	}
}

// TestAlignmentObserves checks that a second prompt makes the count exact for a third with the same common text.
func TestAlignmentObserves(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	observed := 0
	for range 200 {
		a := newTestAlignment()
		system := randomText(r, 50+r.IntN(100))
		user := func() Prompt {
			return append(append(slices.Clone(system), uint32(r.IntN(5000))*7), randomText(r, 60)...).prompt(1)
		}
		first, second, third := user(), user(), user()
		a.Learn(first)
		a.Learn(second)
		got, ok := a.Lookup(third.Chain, 2)
		if !ok {
			t.Fatal("nothing found")
		}
		if !got.Observed {
			continue // the third differs from the first two at another block, by chance of its first word
		}
		observed++
		// One text block has at most eight words.
		if want := shared(second, third, 2); got.Tokens < want-8 || got.Tokens > want+8 {
			t.Errorf("%d tokens, the prompts share %d", got.Tokens, want)
		}
	}
	if observed < 20 {
		t.Errorf("only %d of 200 counts were observed", observed)
	}
}

// TestAlignmentVariableHead checks that a template which prints something variable first is found out.
func TestAlignmentVariableHead(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 8))
	a := newTestAlignment()
	system := randomText(r, 100)
	for head := range uint32(2) {
		a.Learn(append(slices.Clone(system), randomText(r, 20)...).prompt(head))
	}
	for cut := 20; cut <= 100; cut += 20 {
		other := append(slices.Clone(system[:cut]), randomText(r, 20)...).prompt(7)
		if got, ok := a.Lookup(other.Chain, 2); !ok || got.Tokens != 0 {
			t.Errorf("prompt sharing %d words: %+v, %t; want no tokens", cut, got, ok)
		}
	}
}

func TestEstimate(t *testing.T) {
	for _, tc := range []struct {
		name     string
		points   []point
		depth    int
		tokens   int
		observed bool
	}{
		{"evenly spread", nil, 5, 105 * 80 / 165, false},
		{"the end is behind the last block", nil, 10, 105 * 160 / 165, false},
		{"observed here", []point{{5, 30}}, 5, 30, true},
		{"below an observed point", []point{{4, 20}}, 2, 10, false},
		{"above an observed point", []point{{4, 20}}, 8, 20 + 85*(8*16-4*16)/(165-4*16), false},
		{"between two", []point{{2, 10}, {8, 16}}, 5, 13, false},
		{"fewer further on", []point{{2, 40}, {8, 10}}, 5, 10, false},
		{"fewer further on than observed here", []point{{5, 40}, {8, 10}}, 5, 10, true},
		{"none further on", []point{{8, 0}}, 3, 0, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			l := learned{bytes: 165, tokens: 105, points: tc.points}
			tokens, observed := l.estimate(tc.depth, 16)
			if tokens != tc.tokens || observed != tc.observed {
				t.Errorf("%d tokens, observed %t; want %d, %t", tokens, observed, tc.tokens, tc.observed)
			}
		})
	}
}

// TestAlignmentObservesBoth checks that the older of two prompts learns from their comparison too.
func TestAlignmentObservesBoth(t *testing.T) {
	r := rand.New(rand.NewPCG(4, 4))
	a := newTestAlignment()
	stem := randomText(r, 60)
	for range 2 {
		a.Learn(append(slices.Clone(stem), randomText(r, 60)...).prompt(1))
	}
	newer, older := a.prompts.Front().Value.(*learned), a.prompts.Back().Value.(*learned)
	if len(older.points) != 1 || !slices.Equal(older.points, newer.points) || older.points[0].tokens < 60 {
		t.Errorf("points %v and %v", older.points, newer.points)
	}
}

func TestAlignmentSamePrompt(t *testing.T) {
	a := newTestAlignment()
	x := randomText(rand.New(rand.NewPCG(1, 1)), 100)
	p := x.prompt(1)
	a.Learn(p)
	a.Learn(p)
	got, ok := a.Lookup(p.Chain, 2)
	if want := len(p.Tokens) / 2 * 2; !ok || !got.Observed || got.Tokens != want || got.TextBlocks != len(p.Chain) {
		t.Errorf("%+v, want all %d tokens", got, want)
	}
	if a.Len() != 1 || a.Known(p.Chain) != len(p.Chain) {
		t.Errorf("%d prompts, %d of %d text blocks known", a.Len(), a.Known(p.Chain), len(p.Chain))
	}
	if _, ok := a.Lookup(p.Chain, 3); ok {
		t.Error("keys for a block size that was not learned")
	}
	if _, ok := a.Lookup(randomText(rand.New(rand.NewPCG(2, 2)), 50).chain(), 2); ok {
		t.Error("a strange prompt is aligned")
	}
}

func TestAlignmentLeavesOut(t *testing.T) {
	a := newTestAlignment()
	r := rand.New(rand.NewPCG(1, 2))
	good := randomText(r, 50).prompt(1)
	noText, noTokens, noSizes := good, good, good
	noText.Chain, noTokens.Tokens, noSizes.BlockSizes = nil, nil, []int{0, -1}
	for _, p := range []Prompt{noText, noTokens, noSizes, randomText(r, 5000).prompt(1)} {
		a.Learn(p)
	}
	if a.Len() != 0 {
		t.Errorf("%d prompts kept, want none", a.Len())
	}
}

func TestAlignmentBound(t *testing.T) {
	a := newTestAlignment()
	r := rand.New(rand.NewPCG(9, 9))
	stem := randomText(r, 40)
	var last []Prompt
	for range 300 {
		p := append(slices.Clone(stem[:r.IntN(40)]), randomText(r, 30+r.IntN(100))...).prompt(1)
		a.Learn(p)
		last = append(last, p)
		used := 0
		for e := a.prompts.Front(); e != nil; e = e.Next() {
			l := e.Value.(*learned)
			used += l.cost()
			if len(l.points) > maxPoints || !slices.IsSortedFunc(l.points, func(x, y point) int { return x.depth - y.depth }) {
				t.Fatalf("points %v", l.points)
			}
		}
		if used != a.used || a.used > a.entries || len(a.at) > a.used {
			t.Fatalf("used %d, counted %d of %d, %d places", used, a.used, a.entries, len(a.at))
		}
	}
	for _, p := range last[len(last)-5:] {
		if a.Known(p.Chain) != len(p.Chain) {
			t.Error("one of the last prompts was forgotten")
		}
	}
	for h, p := range a.at {
		if l := p.prompt.Value.(*learned); l.chain[p.depth-1] != h {
			t.Fatal("a place leads to another prompt")
		}
	}
}
