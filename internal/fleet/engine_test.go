// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/seed-2fa47a1e/caddy-kv-cache/metrics"
)

// engine is the simplest one there can be: it prefills first come, first
// served, one prompt at a time at a constant rate, and then decodes each for a
// given time, all at once. Time is virtual.
type engine struct {
	now      time.Time
	rate     float64
	queue    []*job // no first token yet; the first is in prefill
	decoding []*job

	firstTokens, prompt, computed, hits, seconds, finished float64
}

type job struct {
	Reservation
	left   float64 // to prefill
	decode time.Duration
	end    time.Time // of decoding
}

// advance runs the engine until a time, and books what finishes.
func (e *engine) advance(to time.Time) {
	for {
		next, event := to, func() {}
		if len(e.queue) > 0 {
			j := e.queue[0]
			if at := e.now.Add(seconds(j.left / e.rate)); at.Before(next) {
				next, event = at, func() { e.firstToken(j) }
			}
		}
		for _, j := range e.decoding {
			if j.end.Before(next) {
				next, event = j.end, func() { e.finish(j) }
			}
		}
		if len(e.queue) > 0 {
			e.queue[0].left = max(0, e.queue[0].left-e.rate*next.Sub(e.now).Seconds())
		}
		e.now = next
		if next.Equal(to) {
			return
		}
		event()
	}
}

func (e *engine) firstToken(j *job) {
	e.queue = e.queue[1:]
	j.end = e.now.Add(j.decode)
	e.decoding = append(e.decoding, j)
	e.firstTokens++
	e.prompt += j.Prompt
	e.computed += j.Uncached
	e.hits += j.Prompt - j.Uncached
	e.seconds += j.Uncached / e.rate
}

func (e *engine) finish(j *job) {
	e.decoding = slices.DeleteFunc(e.decoding, func(o *job) bool { return o == j })
	e.finished++
	j.Finish(e.now)
}

// abort is the client leaving. It tells whether a first token had come.
func (e *engine) abort(j *job) (decoding bool) {
	decoding = slices.Contains(e.decoding, j)
	e.queue = slices.DeleteFunc(e.queue, func(o *job) bool { return o == j })
	e.decoding = slices.DeleteFunc(e.decoding, func(o *job) bool { return o == j })
	j.Abort(e.now)
	return decoding
}

// page is what an engine tells beside what all tell in these tests.
type page struct{ gauges, firstTokens, prefill bool }

func (e *engine) snapshot(tells page) *metrics.Snapshot {
	s := &metrics.Snapshot{
		At: e.now, Engine: metrics.VLLM,
		PromptTokens:     known(e.prompt),
		PrefixQueries:    known(e.prompt),
		PrefixHits:       known(e.hits),
		GenerationTokens: known(e.firstTokens + 100*e.finished),
		Finished:         known(e.finished),
	}
	if tells.firstTokens {
		s.FirstTokens = known(e.firstTokens)
	}
	if tells.prefill {
		s.PrefillSeconds = known(e.seconds)
	}
	if tells.gauges {
		prefilling := min(1, len(e.queue))
		s.Waiting = known(float64(len(e.queue) - prefilling))
		s.Running = known(float64(len(e.decoding) + prefilling))
	}
	return s
}

func (e *engine) uncachedOfLast(m int) float64 {
	sum := 0.0
	for _, j := range e.queue[max(0, len(e.queue)-max(0, m)):] {
		sum += j.Uncached
	}
	return sum
}

func known(v float64) metrics.Fact { return metrics.Fact{Value: v, Known: true} }

func seconds(s float64) time.Duration { return time.Duration(math.Ceil(s * float64(time.Second))) }

// After each scrape the believed queue lies where the truth can: with m
// requests without a first token between the uncached tokens of the last m-1
// and of the last m. It is never negative, and exactly zero when all is done.
// An engine that does not count first tokens tells nearly as much by how many
// requests run and how many wait: whether the last to run has begun to decode
// stays open.
func TestLedgerAgainstEngine(t *testing.T) {
	start := time.Unix(1_700_000_000, 0)
	for seed := range uint64(600) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 11))
			aborts := seed%2 == 1
			tells := []page{{gauges: true, firstTokens: true}, {firstTokens: true}, {gauges: true}}[seed%3]
			tells.prefill = seed%5 != 0
			e := &engine{now: start, rate: 1000 * math.Exp(rng.Float64()*4)}
			f := NewRegistry().New(Config{Name: "test"}, []string{"engine"})
			p := f.Replica("engine", start)
			interval := seconds(0.1 + 5*rng.Float64())
			load := 0.3 + rng.Float64() // of what the engine can do
			scrapeAt, arriveAt := start, start
			var all []*job
			unclear := false // an abort left open whether a first token came
			check := func(when string) {
				if l := p.Load(e.now); l.Queue < 0 || math.IsNaN(l.Queue) || l.InFlight != float64(len(e.queue)+len(e.decoding)) {
					t.Fatalf("%s at %v: queue %v, in flight %v of %d", when, e.now.Sub(start), l.Queue, l.InFlight, len(e.queue)+len(e.decoding))
				}
			}
			for step := 0; step < 300; step++ {
				if scrapeAt.Before(arriveAt) {
					e.advance(scrapeAt)
					f.Observe(p, metrics.Scrape{Snapshot: e.snapshot(tells)}, e.now)
					check("scrape")
					m := len(e.queue)
					low, high := e.uncachedOfLast(m-1), e.uncachedOfLast(m)
					if !tells.firstTokens && len(all) > 0 && m == 0 {
						high = all[len(all)-1].Uncached
					}
					if l := p.Load(e.now); !l.QueueKnown {
						t.Fatalf("at %v the queue is not known", e.now.Sub(start))
					} else if !tells.firstTokens && m < 2 && l.Late != 0 {
						t.Fatalf("at %v nobody waits, and the first is late by %v", e.now.Sub(start), l.Late)
					}
					if q := p.Load(e.now).Queue; !unclear && (q < low-1e-6 || q > high+1e-6) {
						t.Fatalf("at %v, %d without a first token: queue %v is not in %v … %v", e.now.Sub(start), m, q, low, high)
					}
					scrapeAt = e.now.Add(interval)
					continue
				}
				e.advance(arriveAt)
				prompt := 100 + 8000*rng.ExpFloat64()
				j := &job{decode: seconds(rng.ExpFloat64() * 5)}
				j.Prompt, j.Uncached = prompt, prompt*rng.Float64()+0.1
				j.Hit = j.Prompt - j.Uncached
				j.left = j.Uncached
				p.Reserve(&j.Reservation, e.now)
				e.queue = append(e.queue, j)
				all = append(all, j)
				check("arrival")
				if aborts && rng.IntN(4) == 0 {
					victim := all[rng.IntN(len(all))]
					past := victim.past
					if e.abort(victim) && !past && tells.firstTokens {
						unclear = true
					}
					check("abort")
				}
				arriveAt = e.now.Add(seconds(rng.ExpFloat64() * 4000 / e.rate / load))
			}
			if aborts { // everyone leaves at once
				rng.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
				for _, j := range all {
					e.abort(j)
					check("leaving")
				}
			} else {
				e.advance(e.now.Add(24 * time.Hour))
			}
			l := p.Load(e.now)
			if l.Queue != 0 || l.InFlight != 0 || p.Outstanding() != 0 {
				t.Errorf("idle with queue %v, %v in flight, %v outstanding", l.Queue, l.InFlight, p.Outstanding())
			}
			if n := p.unstarted(); n != 0 || len(p.waiting) != 0 {
				t.Errorf("idle with %d requests waiting", n)
			}
			if p.sent-p.past != 0 {
				t.Errorf("idle with %d sent and %d past", p.sent, p.past)
			}
		})
	}
}

// A learned rate comes near the true one, and never stays below it. Where the
// engine does not tell how long its prefills took, what it was seen to do stands
// in for fast ones; of slow ones nothing is known then.
func TestRateIsLearned(t *testing.T) {
	start := time.Unix(1_700_000_000, 0)
	all := page{gauges: true, firstTokens: true, prefill: true}
	for _, c := range []struct {
		name        string
		tells       page
		rate        float64
		known       bool
		least, most float64 // of the rate
	}{
		{"slow", all, 1500, true, 1, 1.4},
		{"as assumed", all, 10_000, true, 1, 1.4},
		{"fast", all, 80_000, true, 1, 1.4},
		{"no prefill times, slow", page{gauges: true, firstTokens: true}, 1500, false, 1, DefaultPrefillRate / 1500.},
		{"no prefill times", page{gauges: true, firstTokens: true}, 30_000, false, 0.9, 1.2},
		{"no prefill times, fast", page{gauges: true, firstTokens: true}, 80_000, false, 0.8, 1.2},
		{"gauges alone", page{gauges: true}, 30_000, false, 0.9, 1.2},
		{"gauges alone, fast", page{gauges: true}, 80_000, false, 0.8, 1.2},
		{"gauges alone, slow", page{gauges: true}, 1500, false, 1, DefaultPrefillRate / 1500.},
	} {
		t.Run(c.name, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(1, uint64(c.rate)))
			e := &engine{now: start, rate: c.rate}
			f := NewRegistry().New(Config{Name: "test"}, []string{"engine", "other"})
			p := f.Replica("engine", start)
			arriveAt := start
			for range 120 {
				for to := e.now.Add(time.Second); arriveAt.Before(to); {
					e.advance(arriveAt)
					j := &job{decode: seconds(rng.ExpFloat64())}
					j.Prompt = 2000 + rng.ExpFloat64()*4000
					j.Uncached, j.left = j.Prompt, j.Prompt
					p.Reserve(&j.Reservation, e.now)
					e.queue = append(e.queue, j)
					arriveAt = e.now.Add(seconds(rng.ExpFloat64() * 6000 / c.rate / 0.8))
				}
				e.advance(e.now.Add(time.Second))
				arriveAt = e.now
				f.Observe(p, metrics.Scrape{Snapshot: e.snapshot(c.tells)}, e.now)
			}
			l := p.Load(e.now)
			if l.RateKnown != c.known || l.Rate < c.least*c.rate || l.Rate > c.most*c.rate {
				t.Errorf("learned %.0f tokens a second (known: %v), the truth is %.0f", l.Rate, l.RateKnown, c.rate)
			}
			if !c.known {
				return
			}
			if got := f.Rate(); math.Abs(got-l.Rate) > 0.2*l.Rate {
				t.Errorf("the fleet's mean is %.0f, its only known member's rate %.0f", got, l.Rate)
			}
			if other := f.Replica("other", e.now).Load(e.now); other.RateKnown || math.Abs(other.Rate-l.Rate) > 0.2*l.Rate {
				t.Errorf("a replica that knows no better is lent %.0f, not the mean %.0f", other.Rate, l.Rate)
			}
		})
	}
}
