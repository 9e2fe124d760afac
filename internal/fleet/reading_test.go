// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"math/rand/v2"
	"net/http"
	"syscall"
	"testing"
	"time"

	"github.com/seed-2fa47a1e/caddy-kv-cache/metrics"
)

// A reading that is kept is what a new one would be, whatever happens to the
// replica and however much time passes in between.
func TestReadingIsKeptUpToDate(t *testing.T) {
	for seed := range uint64(200) {
		rng := rand.New(rand.NewPCG(seed, 5))
		b := newBench(t, Config{Interval: time.Second})
		var sent []*Reservation
		var firsts float64
		var exhausted bool
		b.fleet.Registry.Exhausted = func() bool { return exhausted }
		last := func() *Reservation {
			if len(sent) == 0 {
				return b.send(100, 100)
			}
			r := sent[len(sent)-1]
			sent = sent[:len(sent)-1]
			return r
		}
		happen := []func(){
			func() { sent = append(sent, b.send(2000, float64(rng.IntN(2000)))) },
			func() { sent = append(sent, b.send(60_000, 50_000)) },
			func() { last().Finish(b.now) },
			func() { last().Abort(b.now) },
			func() { last().Fail(b.now) },
			func() { last().Refuse(http.StatusServiceUnavailable, 2*time.Second, b.now) },
			func() { firsts++ },
			func() {
				b.scrape(metrics.Snapshot{
					FirstTokens: known(firsts), GenerationTokens: known(firsts),
					KVUsage: known(rng.Float64()), CapacityTokens: known(100_000), BlockTokens: known(32),
				})
			},
			func() { b.fail(syscall.ECONNREFUSED) },
			func() { b.fail(context.DeadlineExceeded) },
			func() { b.replica.Unavailable(b.now) },
			func() { b.replica.Drain(rng.IntN(2) == 0) },
			func() { b.fleet.lend(b.now) },
			func() { exhausted = rng.IntN(3) == 0 },
		}
		pauses := []time.Duration{0, 0, time.Microsecond, 50 * time.Millisecond, 700 * time.Millisecond, 3 * time.Second, 40 * time.Second}
		var kept Reading
		anew := 0
		for step := range 400 {
			if rng.IntN(2) == 0 {
				happen[rng.IntN(len(happen))]()
			}
			b.pass(pauses[rng.IntN(len(pauses))])
			was := kept
			changed := b.replica.Read(&kept, b.now)
			if want := b.load(); kept.Load != want {
				t.Fatalf("seed %d, step %d: kept %+v, anew %+v", seed, step, kept.Load, want)
			}
			if !changed && kept.Load != was.Load {
				t.Fatalf("seed %d, step %d: a change was not told", seed, step)
			}
			if kept.until != was.until {
				anew++
			}
		}
		if anew == 400 {
			t.Errorf("seed %d: nothing was ever kept", seed)
		}
	}
}

// One reading may be used for replicas in turn.
func TestReadingOfAnotherReplica(t *testing.T) {
	f := NewRegistry().New(Config{}, []string{"a", "b"})
	now := time.Now()
	f.Replica("a", now).Reserve(&Reservation{Prompt: 500, Uncached: 500}, now)
	f.Replica("b", now).Reserve(&Reservation{Prompt: 300, Uncached: 300}, now)
	var r Reading
	for range 2 {
		for addr, want := range map[string]float64{"a": 500, "b": 300} {
			if f.Replica(addr, now).Read(&r, now); r.Queue != want {
				t.Errorf("%s has %v queued, want %v", addr, r.Queue, want)
			}
		}
	}
}
