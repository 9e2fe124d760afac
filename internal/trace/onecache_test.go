// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"errors"
	"iter"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

func sequence(requests []Request) iter.Seq2[Request, error] {
	return func(yield func(Request, error) bool) {
		for _, r := range requests {
			if !yield(r, nil) {
				return
			}
		}
	}
}

func TestOneCacheHitRate(t *testing.T) {
	prompt := func(tokens int, ids ...uint64) Request { return Request{InputTokens: tokens, HashIDs: ids} }
	for name, tc := range map[string]struct {
		requests []Request
		capacity int
		want     float64
	}{
		"nothing":                   {nil, 0, 0},
		"all new":                   {[]Request{prompt(512, 1), prompt(512, 2)}, 0, 0},
		"last token is never a hit": {[]Request{prompt(512, 1), prompt(512, 1)}, 0, 496. / 1024},
		"tail is no block":          {[]Request{prompt(520, 1, 2), prompt(520, 1, 2)}, 0, 512. / 1040},
		"prefix only":               {[]Request{prompt(1024, 1, 2), prompt(1024, 3, 2)}, 0, 0},
		"evicted":                   {[]Request{prompt(520, 1, 2), prompt(520, 3, 4), prompt(520, 1, 2)}, 512, 0},
		"kept":                      {[]Request{prompt(520, 1, 2), prompt(520, 3, 4), prompt(520, 1, 2)}, 1024, 512. / 1560},
		"tail leaves before head":   {[]Request{prompt(512, 1), prompt(256, 2), prompt(512, 1)}, 512, 256. / 1280},
		"prompt longer than cache":  {[]Request{prompt(1030, 1, 2, 3), prompt(1030, 1, 2, 3)}, 512, 512. / 2060},
		"smaller than a block":      {[]Request{prompt(520, 1, 2), prompt(520, 1, 2)}, 8, 0},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := OneCacheHitRate(sequence(tc.requests), tc.capacity, 16)
			if err != nil || math.Abs(got-tc.want) > 1e-12 {
				t.Errorf("hit rate %v, %v; want %v", got, err, tc.want)
			}
		})
	}

	fails := func(yield func(Request, error) bool) { yield(Request{}, errors.New("broken")) }
	if _, err := OneCacheHitRate(fails, 0, 16); err == nil {
		t.Error("an error of the trace is lost")
	}
	if _, err := OneCacheHitRate(sequence(nil), 0, 0); err == nil {
		t.Error("a block size of 0 is taken")
	}
}

// plainLRU is the reference: a slice, most recent first.
type plainLRU struct {
	capacity int
	blocks   []uint64
}

func (p *plainLRU) insert(blocks []uint64) {
	blocks = blocks[:min(len(blocks), p.capacity)]
	for _, hash := range slices.Backward(blocks) {
		if i := slices.Index(p.blocks, hash); i >= 0 {
			p.blocks = slices.Delete(p.blocks, i, i+1)
		}
		p.blocks = slices.Insert(p.blocks, 0, hash)
	}
	p.blocks = p.blocks[:min(len(p.blocks), p.capacity)]
}

func TestLRUAgainstReference(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for capacity := range 12 {
		fast, plain := newLRU(capacity), plainLRU{capacity: capacity}
		for step := range 400 {
			chain := make([]uint64, 1+rng.IntN(6))
			for i := range chain {
				chain[i] = uint64(rng.IntN(5)*10 + i)
			}
			match := slices.IndexFunc(chain, func(h uint64) bool { return !slices.Contains(plain.blocks, h) })
			if match < 0 {
				match = len(chain)
			}
			if got := fast.match(chain); got != match {
				t.Fatalf("capacity %d, step %d: match %d, want %d", capacity, step, got, match)
			}
			fast.insert(chain)
			plain.insert(chain)
			if len(fast.where) > capacity {
				t.Fatalf("capacity %d holds %d", capacity, len(fast.where))
			}
		}
	}
}
