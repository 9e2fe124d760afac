// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/kvevents"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/prompt"
)

// What asking the truth of every replica costs beside asking the belief, for a prompt of 32,768 tokens that half of
// the replicas hold.
func BenchmarkHeld(b *testing.B) {
	const replicas, tokens, block = 16, 32_768, 16
	g := NewRegistry()
	rng := rand.New(rand.NewPCG(1, 2))
	ids, chain := make([]uint32, tokens), make([]uint64, tokens*4/prompt.BlockSize)
	for i := range ids {
		ids[i] = rng.Uint32()
	}
	for i := range chain {
		chain[i] = rng.Uint64()
	}
	g.alignment.Learn(kvevents.Prompt{Chain: chain, TextBytes: tokens * 4, Tokens: ids, BlockSizes: []int{block}})
	f := g.New(Config{Events: new(Events)}, nil)
	hashes := make([]kvevents.BlockHash, tokens/block)
	for i := range hashes {
		hashes[i] = kvevents.BlockHash(i + 1)
	}
	members := make([]*Replica, 0, replicas)
	for i := range replicas {
		p := f.Replica(string(rune('a'+i)), time.Now())
		t := &truth{replica: p, index: kvevents.NewIndex(kvevents.ViewConfig{})}
		r := &rank{truth: t, replays: true}
		r.connected.Store(true)
		r.stream, _ = kvevents.NewStream(kvevents.StreamConfig{Endpoint: "tcp://127.0.0.1:1"}, r)
		t.ranks.Store(&[]*rank{r})
		t.ctx, t.cancel = context.WithCancel(b.Context())
		p.truth.Store(t)
		if i%2 == 0 {
			p.Holds(chain)
			r.Apply(&kvevents.Batch{Events: []kvevents.Event{{
				Kind: kvevents.BlockStored, Hashes: hashes, Tokens: ids, BlockSize: block, Group: kvevents.NoGroup,
			}}})
		}
		members = append(members, p)
	}
	var room Prefix
	var matched []int32
	belief := func() { matched = g.Index.Match(chain, matched[:0]) }
	truth := func() {
		x := f.Prefix(&room, chain, prompt.BlockSize/4)
		for _, p := range members {
			if held := x.Held(p, tokens); held < 0 {
				b.Fatal(held)
			}
		}
	}
	took := func(do func()) time.Duration {
		start := time.Now()
		do()
		return time.Since(start)
	}
	var inBelief, inTruth time.Duration
	b.ReportAllocs()
	for b.Loop() {
		inBelief += took(belief)
		inTruth += took(truth)
	}
	b.ReportMetric(float64(inTruth)/float64(inBelief), "x-of-belief")
	b.ReportMetric(float64(inTruth.Nanoseconds())/float64(b.N)/replicas, "ns/replica")
}

// What it costs a choice to look for a prompt among those at work at one replica, beside one look-up of the belief:
// hundreds of requests with a common system prompt.
func BenchmarkInUse(b *testing.B) {
	rng := rand.New(rand.NewPCG(1, 2))
	chain := make([]uint64, 512)
	for i := range chain {
		chain[i] = rng.Uint64()
	}
	g := NewRegistry()
	g.New(Config{}, []string{"a"}).Replica("a", time.Now()).Holds(chain)
	var u inUse
	for range 2 * maxInUse {
		other := append([]uint64(nil), chain...)
		for i := 16 + rng.IntN(16); i < len(other); i++ {
			other[i] = rng.Uint64()
		}
		u.take(&Reservation{Chain: other})
	}
	var matched []int32
	var belief, use time.Duration
	now := time.Now()
	for b.Loop() {
		start := time.Now()
		matched = g.Index.Match(chain, matched[:0])
		between := time.Now()
		if n := u.blocks(chain, now, now); n < 16 {
			b.Fatal(n)
		}
		belief, use = belief+between.Sub(start), use+time.Since(between)
	}
	b.ReportMetric(float64(use)/float64(belief), "x-of-belief")
}
