// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"fmt"
	"testing"
	"time"

	"github.com/seed-2fa47a1e/caddy-kv-cache/metrics"
)

// BenchmarkObserve is what taking in a scrape costs, the fleet's means and what
// its members have in common included, and how it grows with the members.
func BenchmarkObserve(b *testing.B) {
	alone := observing(1)
	for _, members := range []int{1, 64, 512} {
		b.Run(fmt.Sprint(members), func(b *testing.B) {
			observe := observing(members)
			const batch = 256
			var all, one time.Duration
			for b.Loop() {
				began := time.Now()
				observe(batch)
				between := time.Now()
				alone(batch)
				all, one = all+between.Sub(began), one+time.Since(between)
			}
			b.ReportMetric(float64(all.Nanoseconds())/float64(b.N*batch), "ns/scrape")
			b.ReportMetric(float64(all)/float64(one), "x-of-one-member")
			b.ReportMetric(0, "ns/op")
		})
	}
}

// observing returns a function that lets a fleet take in so many scrapes.
func observing(members int) func(scrapes int) {
	addrs := make([]string, members)
	for i := range addrs {
		addrs[i] = fmt.Sprint("replica", i)
	}
	f := NewRegistry().New(Config{Interval: time.Second}, addrs)
	replicas, now, done := f.Members(), time.Now(), 0
	observe := func(scrapes int) {
		for range scrapes {
			done++
			now = now.Add(time.Second / time.Duration(members))
			count := known(float64(done))
			f.Observe(replicas[done%members], metrics.Scrape{Snapshot: &metrics.Snapshot{
				At: now, Engine: metrics.VLLM, Models: []string{"m"},
				FirstTokens: count, PromptTokens: count, PrefixQueries: count, PrefixHits: count, PrefillSeconds: count,
			}}, now)
		}
	}
	observe(2 * members)
	return observe
}
