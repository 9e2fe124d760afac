// SPDX-License-Identifier: Apache-2.0

package selection

import (
	"bytes"
	"context"
	"fmt"
	"math"
	"net/http"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// traffic makes requests like those that the proxy hands to a policy, as
// cheaply as that goes, since their making is measured as well.
type traffic struct {
	body []byte
}

func (f *traffic) request() (*http.Request, context.CancelFunc) {
	vars := map[string]any{caddyhttp.ClientIPVarKey: "127.0.0.1", caddyhttp.TrustedProxyVarKey: false} // as a server's
	repl := caddy.NewReplacer()
	repl.Map(noPlaceholders) // a server's
	ctx, leave := context.WithCancel(context.WithValue(
		context.WithValue(context.Background(), caddyhttp.VarsCtxKey, vars),
		caddy.ReplacerCtxKey, repl))
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://x/v1/completions", bytes.NewReader(f.body))
	if err != nil {
		panic(err)
	}
	r.Header.Set("Content-Type", "application/json")
	return r, leave
}

func noPlaceholders(string) (any, bool) { return nil, false }

// serve chooses for one request, reads its body as a transport does, and ends it.
func (f *traffic) serve(p reverseproxy.Selector, pool reverseproxy.UpstreamPool, room []byte) {
	r, leave := f.request()
	if p.Select(pool, r, nil) == nil {
		panic("refused")
	}
	_, sent := context.WithCancelCause(r.Context())
	for {
		if _, err := r.Body.Read(room); err != nil {
			break
		}
	}
	_ = r.Body.Close()
	sent(nil)
	leave()
}

// perServe times a policy without the benchmark's own clock, so that two can
// be compared within one run.
func (f *traffic) perServe(p reverseproxy.Selector, pool reverseproxy.UpstreamPool, rounds int) float64 {
	room := make([]byte, 32<<10)
	began := time.Now()
	for range rounds {
		f.serve(p, pool, room)
	}
	return float64(time.Since(began).Nanoseconds()) / float64(rounds)
}

// BenchmarkSelect is a whole request's part in a policy, making it and reading
// its body included, and how that compares with Caddy's own least_conn: a batch
// of each in turn, and the best of each, so that a neighbour on the machine
// slows down neither.
func BenchmarkSelect(b *testing.B) {
	for _, policy := range []string{"kv_cache_aware", "prefix_hash"} {
		for _, size := range []int{2 << 10, 32 << 10, 512 << 10} {
			for _, n := range []int{1, 8, 64, 512} {
				b.Run(fmt.Sprintf("%s/%dKiB/%d", policy, size>>10, n), func(b *testing.B) {
					p := benchPolicy(b, policy)
					pool := poolOf(n)
					f := &traffic{body: []byte(completionOf(words("bench", size)))}
					f.perServe(p, pool, 100)
					const batch = 32
					plain := reverseproxy.Selector(new(reverseproxy.LeastConnSelection))
					ours, theirs := math.Inf(1), math.Inf(1)
					for b.Loop() {
						ours = min(ours, f.perServe(p, pool, batch))
						theirs = min(theirs, f.perServe(plain, pool, batch))
					}
					b.ReportMetric(ours/theirs, "x-of-least_conn")
					b.ReportMetric((ours-theirs)/1000, "extra-µs")
					room := make([]byte, 32<<10)
					allocs := func(p reverseproxy.Selector) float64 {
						return testing.AllocsPerRun(100, func() { f.serve(p, pool, room) })
					}
					b.ReportMetric(allocs(p)-allocs(plain), "extra-allocs")
					b.ReportMetric(0, "ns/op")
				})
			}
		}
	}
}

// BenchmarkSelectParallel tells how far concurrent requests are in each other's
// way.
func BenchmarkSelectParallel(b *testing.B) {
	for _, policy := range []string{"kv_cache_aware", "prefix_hash"} {
		b.Run(policy, func(b *testing.B) {
			p := benchPolicy(b, policy)
			pool := poolOf(64)
			f := &traffic{body: []byte(completionOf(words("bench", 8<<10)))}
			f.perServe(p, pool, 100)
			alone := f.perServe(p, pool, 3000)
			b.ResetTimer()
			b.RunParallel(func(pb *testing.PB) {
				room := make([]byte, 32<<10)
				for pb.Next() {
					f.serve(p, pool, room)
				}
			})
			b.ReportMetric(alone/(float64(b.Elapsed().Nanoseconds())/float64(b.N)), "x-of-one-at-a-time")
		})
	}
}

func benchPolicy(b *testing.B, policy string) reverseproxy.Selector {
	if policy == "prefix_hash" {
		return loadHash(b, `{}`)
	}
	return loadAware(b, `{}`)
}
