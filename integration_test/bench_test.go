// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/enginesim"
)

// versus starts a Caddy that serves the same engines, which answer at once, by the policy below /ours
// and by round robin below /theirs.
func versus(b *testing.B, policy string) *proxy {
	b.Helper()
	fleet := engines(b, 3, enginesim.ServerConfig{Instant: true})
	p := newProxy(b)
	p.level = "ERROR"
	site := "reverse_proxy %s {\nlb_policy %s\n}\n"
	var addrs string
	for _, addr := range fleet.Addrs() {
		addrs += addr + " "
	}
	p.run(p.caddyfile("handle_path /ours/* {\n" + fmt.Sprintf(site, addrs, policy) + "}\n" +
		"handle_path /theirs/* {\n" + fmt.Sprintf(site, addrs, "round_robin") + "}\n"))
	return p
}

// prompts returns different requests of about so many bytes, of which each three begin alike.
func prompts(n, size int) []string {
	list := make([]string, n)
	for i := range list {
		list[i] = ask(text(fmt.Sprint("conversation ", i/3), size-500) + text(fmt.Sprint("turn ", i), 400))
	}
	return list
}

// BenchmarkAddedLatency compares the time of single requests of 32 KiB with that by round robin, in turn.
func BenchmarkAddedLatency(b *testing.B) {
	for _, policy := range []string{"kv_cache_aware", "prefix_hash"} {
		b.Run(policy, func(b *testing.B) {
			p := versus(b, policy)
			bodies := prompts(300, 32<<10)
			var ours, theirs []time.Duration
			timed := func(path, body string) time.Duration {
				began := time.Now()
				if err := p.post(path, body).bad(); err != nil {
					b.Fatal(err)
				}
				return time.Since(began)
			}
			for _, body := range bodies { // connections and buffers are there, and prompts known
				timed("/ours"+chatPath, body)
				timed("/theirs"+chatPath, body)
			}
			for i := 0; b.Loop(); i++ {
				body := bodies[i%len(bodies)]
				if i%2 == 0 {
					ours = append(ours, timed("/ours"+chatPath, body))
					theirs = append(theirs, timed("/theirs"+chatPath, body))
				} else {
					theirs = append(theirs, timed("/theirs"+chatPath, body))
					ours = append(ours, timed("/ours"+chatPath, body))
				}
			}
			for _, percent := range []int{50, 99} {
				added := percentile(ours, percent) - percentile(theirs, percent)
				b.ReportMetric(float64(added)/1e3, fmt.Sprintf("added-µs-p%d", percent))
			}
			b.ReportMetric(float64(percentile(theirs, 50))/1e3, "round-robin-µs-p50")
			b.ReportMetric(0, "ns/op")
		})
	}
}

func percentile(times []time.Duration, percent int) time.Duration {
	slices.Sort(times)
	return times[(len(times)-1)*percent/100]
}

// BenchmarkThroughput compares the rate of requests of 2 KiB with that by round robin, in turn.
func BenchmarkThroughput(b *testing.B) {
	for _, policy := range []string{"kv_cache_aware", "prefix_hash"} {
		for _, clients := range []int{32, 256} {
			b.Run(fmt.Sprintf("%s/clients=%d", policy, clients), func(b *testing.B) { throughput(b, policy, clients) })
		}
	}
}

func throughput(b *testing.B, policy string, clients int) {
	p := versus(b, policy)
	bodies := prompts(300, 2<<10)
	const requests = 1024
	timed := func(path string) time.Duration {
		began := time.Now()
		inParallel(clients, clients, func(client int) {
			for i := range requests / clients {
				if err := p.post(path, bodies[(client*requests/clients+i)%len(bodies)]).bad(); err != nil {
					b.Error(err)
				}
			}
		})
		return time.Since(began)
	}
	timed("/ours" + chatPath)
	timed("/theirs" + chatPath)
	var ratios []float64
	for i := 0; b.Loop(); i++ {
		var ours, theirs time.Duration
		if i%2 == 0 {
			ours, theirs = timed("/ours"+chatPath), timed("/theirs"+chatPath)
		} else {
			theirs, ours = timed("/theirs"+chatPath), timed("/ours"+chatPath)
		}
		ratios = append(ratios, float64(theirs)/float64(ours))
	}
	slices.Sort(ratios)
	b.ReportMetric(ratios[len(ratios)/2], "x-of-round-robin")
	b.ReportMetric(0, "ns/op")
}
