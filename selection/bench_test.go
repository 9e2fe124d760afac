// SPDX-License-Identifier: Apache-2.0

package selection

import (
	"bytes"
	"context"
	"fmt"
	"math"
	"net/http"
	"runtime"
	"slices"
	"sync"
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
// way: what all processors do in a time, by what one does that also books the
// requests' ends and collects the garbage. With more callers than processors, one
// that waits for a lock leaves its processor to another.
func BenchmarkSelectParallel(b *testing.B) {
	for _, policy := range []string{"kv_cache_aware", "prefix_hash", "least_conn"} {
		for _, n := range []int{8, 64} {
			for _, callers := range []int{runtime.GOMAXPROCS(0), 16} {
				b.Run(fmt.Sprintf("%s/%d/callers=%d", policy, n, callers), func(b *testing.B) {
					p := benchPolicy(b, policy)
					pool := poolOf(n)
					f := &traffic{body: []byte(completionOf(words("bench", 8<<10)))}
					f.perServe(p, pool, 100)
					const batch = 4096 // long enough for some garbage collections
					var ratios []float64
					for b.Loop() {
						ratios = append(ratios, f.perServeAlone(p, pool, batch)/f.perServeBy(callers, p, pool, batch))
					}
					slices.Sort(ratios)
					b.ReportMetric(ratios[len(ratios)/2], "x-of-one-processor")
					b.ReportMetric(0, "ns/op")
				})
			}
		}
	}
}

// perServeAlone is perServe with one processor for everything.
func (f *traffic) perServeAlone(p reverseproxy.Selector, pool reverseproxy.UpstreamPool, rounds int) float64 {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	return f.perServe(p, pool, rounds)
}

// perServeBy is perServe for several callers at a time.
func (f *traffic) perServeBy(callers int, p reverseproxy.Selector, pool reverseproxy.UpstreamPool, rounds int) float64 {
	var all sync.WaitGroup
	began := time.Now()
	for range callers {
		all.Go(func() { f.perServe(p, pool, rounds/callers) })
	}
	all.Wait()
	return float64(time.Since(began).Nanoseconds()) / float64(rounds)
}

func benchPolicy(b *testing.B, policy string) reverseproxy.Selector {
	switch policy {
	case "prefix_hash":
		return loadHash(b, `{}`)
	case "kv_cache_aware":
		return loadAware(b, `{}`)
	}
	return new(reverseproxy.LeastConnSelection)
}
