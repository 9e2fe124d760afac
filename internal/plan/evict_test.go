// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/cespare/xxhash/v2"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/prompt"
	"github.com/seed-2fa47a1e/caddy-kv-cache/metrics"
)

// cached is a world of replicas whose caches hold so many prompts of 2,048 tokens.
func cached(replicas, prompts int) *world {
	w := newWorld(replicas)
	w.s.Terms = BindOnArrival
	w.scrapeCached(prompts)
	return w
}

// scrapeCached is scrape with the size of the caches.
func (w *world) scrapeCached(prompts int) {
	for _, e := range w.engines {
		w.fleet.Observe(e.replica, metrics.Scrape{Snapshot: &metrics.Snapshot{
			At: w.now, Engine: metrics.VLLM, FirstTokens: metrics.Fact{Value: e.tokens, Known: true},
			CapacityTokens: metrics.Fact{Value: float64(prompts) * 2048, Known: true},
		}}, w.now)
	}
}

// prompt is the n-th, that of a session; it may go to these replicas only, if any
// are given.
func (w *world) prompt(n int, to ...int) *caller {
	chain := make([]uint64, 32)
	for i := range chain {
		chain[i] = Rendezvous(uint64(n+1)<<16, uint64(i+1))
	}
	c := w.caller(2048, chain...)
	c.Key = uint64(n)
	c.closed = make(map[int]bool)
	for i := range w.engines {
		c.closed[i] = len(to) > 0 && !slices.Contains(to, i)
	}
	return c
}

// serve sends a prompt and lets it be computed.
func (w *world) serve(n int, to ...int) {
	w.s.Submit(&w.prompt(n, to...).Request, w.now)
	w.pass(time.Second)
}

func TestEvictionsCount(t *testing.T) {
	for _, c := range []struct {
		name           string
		sessions, turn int  // that take turns, and how many prompts in all
		want           bool // whether evicting is held to cost something
	}{
		{"all are new", 1000, 1000, false},
		{"caches hold all", 14, 1000, false},
		{"caches hold a third", 48, 1000, true},
		{"caches hold a third, at first", 48, 48, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := cached(2, 8)
			for i := range c.turn {
				w.serve(i % c.sessions)
			}
			if got := w.s.evictions.weight(); got > 0 != c.want {
				t.Errorf("a token evicts what weighs %.1f, with %.2f computed again", got, w.s.evictions.again)
			}
			if c.want && w.s.evictions.again < 0.9 {
				t.Errorf("%.2f is held to be computed again, which is all", w.s.evictions.again)
			}
		})
	}
}

// Where caches are too small, a replica that has hits is left to them: what it would
// lose is worth a wait. Where others compute what is new, it is not.
func TestEvictionsAreSpared(t *testing.T) {
	for _, c := range []struct {
		name     string
		sessions int // that the other replica serves in turn; it holds eight
		waiting  bool
		want     int
	}{
		{"what the other computes was computed before", 40, true, 1},
		{"what the other computes is new", 1_000_000, true, 0},
		{"nobody waits", 40, false, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := cached(2, 8)
			for i := range 400 {
				w.serve(2_000_000+i%4, 0)
				w.serve(i%c.sessions, 1)
			}
			// The other has more to do, and perhaps one that waits for it.
			w.s.Terms = DefaultTerms
			w.scrapeCached(8)
			for n := range 3 {
				if n < 2 || c.waiting {
					w.s.Submit(&w.prompt(3_000_000+n, 1).Request, w.now)
				}
			}
			if got := w.s.Waiting() > 0; got != c.waiting {
				t.Fatalf("somebody waits: %v", got)
			}
			told := w.s.Explain(&w.prompt(c.sessions/2, 0, 1).Request, w.now)
			if told.Index != c.want || told.Matched != 0 {
				t.Errorf("a prompt of which %d blocks are held goes to replica %d, want none and %d", told.Matched, told.Index, c.want)
			}
		})
	}
}

// What is new goes where least was replaced of late, even where another replica holds
// a little of it: or that one would take everything, while the others' caches idle.
func TestCachesAreFilledEvenly(t *testing.T) {
	w := cached(4, 8)
	hits := 0.0
	for i := range 400 {
		c := w.prompt(i % 24) // three caches of them
		copy(c.Chain[:2], w.prompt(1_000_000).Chain)
		w.s.Submit(&c.Request, w.now)
		if i >= 200 {
			hits += c.choice.Hit / 2048 / 200
		}
		w.pass(time.Second)
	}
	if hits < 0.8 {
		t.Errorf("%.2f of what is asked is found cached; caches hold all of it, and a third more", hits)
	}
}

// A replica that takes another's place in the index has none of its past.
func TestEvictionsOfAnother(t *testing.T) {
	w := cached(2, 8)
	for i := range 100 {
		w.serve(i%4, 0)
	}
	old := w.s.lanes.of(w.engines[0].replica)
	if old.deep == 0 || old.sent == 0 {
		t.Fatal("nothing was found deep in the cache")
	}
	other := w.engines[1].replica
	w.s.lanes.next(w.now)
	w.s.lanes.read(old, other)
	if old.deep != 0 || old.sent != 0 {
		t.Errorf("another replica is held to have been sent %.0f tokens", old.sent)
	}
}

// What is learned at each request, beside one pass of xxhash over its text.
func BenchmarkEvictions(b *testing.B) {
	for _, replicas := range []int{4, 64} {
		for _, blocks := range []int{64, 512} {
			b.Run(fmt.Sprintf("replicas=%d/blocks=%d", replicas, blocks), func(b *testing.B) {
				w := cached(replicas, 100)
				text := make([]byte, blocks*prompt.BlockSize)
				chains := make([][]uint64, 64)
				for i := range chains {
					for j := range blocks {
						chains[i] = append(chains[i], Rendezvous(uint64(i+1)<<16, uint64(j+1)))
					}
				}
				c := w.caller(float64(64 * blocks))
				w.s.lanes.next(w.now)
				w.s.match(&c.Request)
				var learning, hashing time.Duration
				var sum uint64
				n := 0
				b.ReportAllocs()
				for b.Loop() {
					c.Chain = chains[n%len(chains)]
					n++
					began := time.Now()
					w.s.evictions.learn(&c.Request, 0)
					learned := time.Now()
					sum += xxhash.Sum64(text)
					learning, hashing = learning+learned.Sub(began), hashing+time.Since(learned)
				}
				b.ReportMetric(float64(learning)/float64(n), "ns/learn")
				b.ReportMetric(float64(learning)/float64(hashing), "x-of-xxhash")
				_ = sum
			})
		}
	}
}
