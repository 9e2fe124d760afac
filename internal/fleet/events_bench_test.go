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
