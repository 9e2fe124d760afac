// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/fleet"
	"github.com/seed-2fa47a1e/caddy-kv-cache/metrics"
)

// BenchmarkBacklog measures what one event costs with very many requests
// waiting for many replicas: one comes, one finishes, one is sent.
func BenchmarkBacklog(b *testing.B) {
	for _, waiting := range []int{100, 1000, 10_000} {
		b.Run(fmt.Sprintf("waiting=%d", waiting), func(b *testing.B) { benchmarkBacklog(b, 64, waiting) })
	}
}

func benchmarkBacklog(b *testing.B, replicas, waiting int) {
	w := newWorld(replicas)
	rng := rand.New(rand.NewPCG(1, 2))
	var booked []*booking
	events := 0
	ask := func() {
		events++
		c := &booking{now: &w.now, booked: &booked}
		c.Request = Request{
			Tokens: 1000 + float64(rng.IntN(30_000)), PerBlock: 64, Key: rng.Uint64(), Caller: c,
		}
		for i := range 100 {
			c.Chain = append(c.Chain, Rendezvous(uint64(rng.IntN(500)), uint64(i+1)))
		}
		for _, e := range w.engines {
			c.Replicas = append(c.Replicas, e.replica)
		}
		w.s.Submit(&c.Request, w.now)
	}
	for w.s.Waiting() < waiting {
		ask()
	}
	first := make([]float64, replicas)
	events = 0
	for b.Loop() {
		// The time that it takes the fleet to work off one request.
		w.now = w.now.Add(25 * time.Millisecond)
		oldest := booked[0]
		booked = booked[1:]
		oldest.reservation.Finish(w.now)
		first[oldest.at]++
		if int(first[oldest.at])%8 == 0 {
			w.fleet.Observe(oldest.Replicas[oldest.at], metrics.Scrape{Snapshot: &metrics.Snapshot{
				At: w.now, Engine: metrics.VLLM, FirstTokens: metrics.Fact{Value: first[oldest.at], Known: true},
			}}, w.now)
		}
		w.s.Event(w.now)
		events++
		for w.s.Waiting() < waiting {
			ask()
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(events), "ns/event")
	b.ReportMetric(float64(events)/float64(b.N), "events/op")
}

// booking is a request whose choice is only booked.
type booking struct {
	Request
	now         *time.Time
	booked      *[]*booking
	reservation *fleet.Reservation
	at          int
}

func (c *booking) Open(int) bool  { return true }
func (c *booking) Tried(int) bool { return false }

func (c *booking) Send(choice Choice) (late *fleet.Reservation) {
	c.at = choice.Index
	c.reservation = &fleet.Reservation{Prompt: c.Tokens, Uncached: choice.Uncached, Hit: choice.Hit}
	c.Replicas[c.at].Reserve(c.reservation, *c.now)
	c.Replicas[c.at].Holds(c.Chain)
	*c.booked = append(*c.booked, c)
	return nil
}
