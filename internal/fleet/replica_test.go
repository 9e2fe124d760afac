// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/prompt"
	"github.com/seed-2fa47a1e/caddy-kv-cache/metrics"
)

// bench is one replica, alone in its fleet, in virtual time.
type bench struct {
	*testing.T
	fleet   *Fleet
	replica *Replica
	now     time.Time
}

func newBench(t *testing.T, cfg Config) *bench {
	f := NewRegistry().New(cfg, []string{"a"})
	now := time.Unix(1_700_000_000, 0)
	return &bench{t, f, f.Replica("a", now), now}
}

// measured has the replica's rate be known a little, at what is assumed anyway.
func (b *bench) measured() *bench {
	b.replica.rate.tokens, b.replica.rate.seconds = 1000, 1000/float64(DefaultPrefillRate)
	return b
}

func (b *bench) pass(d time.Duration) { b.now = b.now.Add(d) }

// scrape takes in a page; what it does not set is unknown.
func (b *bench) scrape(s metrics.Snapshot) {
	b.Helper()
	s.At = b.now
	if s.Engine == metrics.Unknown {
		s.Engine = metrics.VLLM
	}
	b.fleet.Observe(b.replica, metrics.Scrape{Snapshot: &s}, b.now)
}

func (b *bench) fail(err error) { b.fleet.Observe(b.replica, metrics.Scrape{Err: err}, b.now) }

func (b *bench) send(prompt, uncached float64) *Reservation {
	r := &Reservation{Prompt: prompt, Uncached: uncached, Hit: prompt - uncached}
	b.replica.Reserve(r, b.now)
	return r
}

func (b *bench) load() Load { return b.replica.Load(b.now) }

func (b *bench) wantAvoid(want Avoid, when string) {
	b.Helper()
	if got := b.load().Avoid; got != want || b.replica.Avoided(b.now) != want {
		b.Errorf("%s: %s, want %s", when, got, want)
	}
}

func TestFirstTokenClamp(t *testing.T) {
	b := newBench(t, Config{})
	b.scrape(metrics.Snapshot{FirstTokens: known(40)}) // before any of ours
	for _, n := range []float64{1000, 2000, 4000} {
		b.send(n, n)
	}
	for _, tt := range []struct {
		count     float64
		low, high float64
	}{{40, 6000, 7000}, {41, 4000, 6000}, {42, 0, 4000}, {43, 0, 0}} {
		b.scrape(metrics.Snapshot{FirstTokens: known(tt.count)})
		if q := b.load().Queue; q < tt.low || q > tt.high {
			t.Errorf("with the count at %v the queue is %v, want %v … %v", tt.count, q, tt.low, tt.high)
		}
		if !b.load().QueueKnown {
			t.Errorf("with the count at %v the queue is not known", tt.count)
		}
	}
}

// What a scrape takes, the engine works on: the clamp's lower end allows for it.
func TestClampAllowsForTheScrapesDuration(t *testing.T) {
	b := newBench(t, Config{})
	b.scrape(metrics.Snapshot{FirstTokens: known(0)})
	b.send(1000, 1000)
	b.send(50_000, 50_000)
	b.pass(4 * time.Second) // 40,000 tokens at the assumed rate
	s := &metrics.Snapshot{At: b.now, Engine: metrics.VLLM, FirstTokens: known(0)}
	b.fleet.Observe(b.replica, metrics.Scrape{Snapshot: s, Duration: time.Second}, b.now)
	if q := b.load().Queue; q != 40_000 {
		t.Errorf("the queue is %v, want the last request less a second's work", q)
	}
}

// What has no first token is late as far as the last scrape tells, and a second
// longer: later it may have got one.
func TestLateAsFarAsIsKnown(t *testing.T) {
	b := newBench(t, Config{Interval: 10 * time.Second}).measured()
	b.scrape(metrics.Snapshot{FirstTokens: known(0)})
	b.send(1000, 1000) // expected within 0.1 s
	b.pass(5 * time.Second)
	if late := b.load().Late; late != 0 {
		t.Errorf("%v late since a scrape that could not know of it", late)
	}
	b.scrape(metrics.Snapshot{FirstTokens: known(0)})
	late := b.load().Late
	if late < 3*time.Second || late > 5*time.Second {
		t.Errorf("%v late after 5 s without a first token", late)
	}
	b.pass(8 * time.Second)
	if more := b.load().Late - late; more != knownFor {
		t.Errorf("%v later within the 8 s since the last scrape, want %v", more, knownFor)
	}
	b.scrape(metrics.Snapshot{FirstTokens: known(1)})
	if late := b.load().Late; late != 0 {
		t.Errorf("%v late with nothing in line", late)
	}
}

// Whatever finished, and all sent before it, is past its first token.
func TestFinishPassesThoseBefore(t *testing.T) {
	b := newBench(t, Config{})
	b.send(5000, 5000)
	second := b.send(3000, 3000)
	b.send(2000, 2000)
	if q := b.load().Queue; q != 10_000 {
		t.Fatalf("queue is %v", q)
	}
	second.Finish(b.now)
	if q := b.load().Queue; q != 2000 {
		t.Errorf("queue is %v after the second finished, want that of the third", q)
	}
	second.Finish(b.now)
	second.Abort(b.now)
	if n := b.load().InFlight; n != 2 {
		t.Errorf("%v in flight after one of three ended thrice", n)
	}
}

// The first scrape of an engine at work counts what was before.
func TestOtherSenders(t *testing.T) {
	b := newBench(t, Config{Interval: 10 * time.Second})
	b.scrape(metrics.Snapshot{FirstTokens: known(1000)})
	r := b.send(1000, 1000)
	b.scrape(metrics.Snapshot{FirstTokens: known(1003)}) // ours and two more
	if !b.load().QueueKnown {
		t.Error("two strays are taken for another sender")
	}
	b.send(1000, 1000)
	b.scrape(metrics.Snapshot{FirstTokens: known(1010)})
	if b.load().QueueKnown {
		t.Error("another sender goes unnoticed")
	}
	b.send(7000, 7000)
	b.scrape(metrics.Snapshot{FirstTokens: known(1011)})
	if q := b.load().Queue; q < 7000 {
		t.Errorf("another sender's first token counts as ours: queue is %v", q)
	}
	b.pass(foreignFor + time.Second)
	b.scrape(metrics.Snapshot{FirstTokens: known(1011)})
	if !b.load().QueueKnown {
		t.Error("another sender is reckoned with forever")
	}
	r.Finish(b.now)
}

// Where first tokens are not counted, other senders show by what runs and waits.
func TestOtherSendersByGauges(t *testing.T) {
	b := newBench(t, Config{Interval: 10 * time.Second})
	r := b.send(1000, 1000)
	b.scrape(metrics.Snapshot{Running: known(3), Waiting: known(0)}) // gauges are a step old
	if !b.load().QueueKnown {
		t.Error("two strays are taken for another sender")
	}
	b.scrape(metrics.Snapshot{Running: known(9), Waiting: known(2)})
	if b.load().QueueKnown {
		t.Error("another sender goes unnoticed")
	}
	b.pass(foreignFor + time.Second)
	b.scrape(metrics.Snapshot{Running: known(1), Waiting: known(0)})
	if !b.load().QueueKnown {
		t.Error("another sender is reckoned with forever")
	}
	r.Finish(b.now)
}

// Each rank behind a port has a line of its own, and computes the first in it.
func TestGaugesOfRanks(t *testing.T) {
	for _, c := range []struct {
		rows  int
		queue float64
	}{{0, 3000}, {1, 3000}, {4, 12_000}} {
		b := newBench(t, Config{})
		for range 8 {
			b.send(3000, 3000)
		}
		b.scrape(metrics.Snapshot{Rows: c.rows, Running: known(4), Waiting: known(4)})
		if q, want := b.load().Queue, min(12_000+c.queue, 24_000); q != want {
			t.Errorf("%d ranks where four wait: queue of %v, want %v", c.rows, q, want)
		}
		b.scrape(metrics.Snapshot{Rows: c.rows, Running: known(8), Waiting: known(0)})
		if q := b.load().Queue; q != c.queue {
			t.Errorf("%d ranks that run eight requests: queue of %v, want %v", c.rows, q, c.queue)
		}
	}
}

// Of an engine that tells only what runs and waits, somebody who surely waits is
// late at some time; the last that runs, and may decode for long, is not.
func TestLateByGauges(t *testing.T) {
	b := newBench(t, Config{Interval: 10 * time.Second}).measured()
	b.send(1000, 1000)
	b.send(1000, 1000)
	b.pass(5 * time.Second)
	b.scrape(metrics.Snapshot{Running: known(2), Waiting: known(0)})
	if l := b.load(); l.Late != 0 {
		t.Errorf("late by %v, and nobody waits", l.Late)
	}
	b.scrape(metrics.Snapshot{Running: known(1), Waiting: known(1)})
	if l := b.load(); l.Late < 3*time.Second || l.Late > 4*time.Second {
		t.Errorf("late by %v after five seconds", l.Late)
	}
}

func TestOthersCountInFlight(t *testing.T) {
	b := newBench(t, Config{})
	r := b.send(1000, 1000)
	b.scrape(metrics.Snapshot{Running: known(20), Waiting: known(5)})
	if l := b.load(); l.InFlight != 25 {
		t.Errorf("%v in flight, the engine says 25", l.InFlight)
	}
	if l := b.load(); l.Queue <= 1000 {
		t.Errorf("others' waiting requests add nothing to the queue of %v", l.Queue)
	}
	r.Finish(b.now)
	b.scrape(metrics.Snapshot{Running: known(0), Waiting: known(0)})
	if l := b.load(); l.InFlight != 0 || l.Queue != 0 {
		t.Errorf("idle with %v in flight and %v queued", l.InFlight, l.Queue)
	}
}

// A restarted engine holds nothing, and gets work gradually.
func TestRestart(t *testing.T) {
	b := newBench(t, Config{})
	chain := []uint64{1, 2, 3}
	matched := func() int { return b.replica.Matched(b.fleet.Registry.Index.Match(chain, nil)) }
	b.scrape(metrics.Snapshot{StartTime: known(1_600_000_000), PromptTokens: known(50)})
	b.replica.Holds(chain)
	b.scrape(metrics.Snapshot{StartTime: known(1_600_000_000), PromptTokens: known(60)})
	if n := matched(); n != 3 || b.load().Room < 1000 {
		t.Errorf("%d blocks and room for %d before the restart", n, b.load().Room)
	}
	b.scrape(metrics.Snapshot{StartTime: known(1_600_009_000), PromptTokens: known(1)})
	if n := matched(); n != 0 || b.load().Room != warmStep {
		t.Errorf("%d blocks and room for %d after the restart", n, b.load().Room)
	}
	b.replica.Holds(chain)
	b.scrape(metrics.Snapshot{PromptTokens: known(0)}) // a counter fell
	if n := matched(); n != 0 {
		t.Errorf("%d blocks after a counter fell", n)
	}
}

// Blocks may land late: then not after their request came to nothing, nor at a
// replica that was emptied or has left meanwhile.
func TestLandingLate(t *testing.T) {
	chain := []uint64{1, 2, 3}
	for name, tt := range map[string]struct {
		meanwhile func(*bench, *Reservation)
		want      int
	}{
		"in flight":     {func(*bench, *Reservation) {}, 3},
		"answered":      {func(b *bench, r *Reservation) { r.Finish(b.now) }, 3},
		"client left":   {func(b *bench, r *Reservation) { r.Abort(b.now) }, 0},
		"not answered":  {func(b *bench, r *Reservation) { r.Fail(b.now) }, 0},
		"refused":       {func(b *bench, r *Reservation) { r.Refuse(503, 0, b.now) }, 0},
		"restarted":     {func(b *bench, _ *Reservation) { b.replica.cleared() }, 0},
		"replica left":  {func(b *bench, _ *Reservation) { b.fleet.Stop() }, 0},
		"landed before": {func(b *bench, r *Reservation) { r.Land(chain); b.replica.Lacks(chain, 1) }, 1},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, Config{})
			other := b.fleet.Registry.Index.Join(10) // the index is never empty
			defer b.fleet.Registry.Index.Leave(other)
			r := b.send(10, 10)
			if r.Landed() {
				t.Fatal("landed before Land")
			}
			tt.meanwhile(b, r)
			r.Land(chain)
			if n := b.fleet.Registry.Index.MatchOne(b.replica.Slot, chain); n != tt.want || !r.Landed() {
				t.Errorf("%d blocks are held, landed: %t; want %d", n, r.Landed(), tt.want)
			}
		})
	}
}

// Whatever comes first, a request that came to nothing leaves no blocks behind.
func TestLandingRacesWithFailure(t *testing.T) {
	b := newBench(t, Config{})
	chain := make([]uint64, 500)
	for i := range chain {
		chain[i] = uint64(i) + 1
	}
	for range 200 {
		r := b.send(10, 10)
		var landing sync.WaitGroup
		landing.Go(func() { r.Land(chain) })
		r.Abort(b.now)
		b.replica.Lacks(chain, 0)
		landing.Wait()
		if n := b.fleet.Registry.Index.MatchOne(b.replica.Slot, chain); n != 0 {
			t.Fatalf("%d blocks are held after the failure", n)
		}
	}
}

func TestHangGuard(t *testing.T) {
	page := func(tokens float64) metrics.Snapshot {
		return metrics.Snapshot{GenerationTokens: known(tokens), FirstTokens: known(0), PromptTokens: known(0)}
	}
	b := newBench(t, Config{})
	b.scrape(page(7))
	for range 100 { // idle
		b.pass(time.Second)
		b.scrape(page(7))
	}
	b.wantAvoid(Eligible, "idle with still counters")
	r := b.send(10_000, 10_000) // explains a second, of which double is allowed
	for range 9 {
		b.pass(time.Second)
		b.scrape(page(7))
	}
	b.wantAvoid(Eligible, "after 9 s")
	for range 5 {
		b.pass(time.Second)
		b.scrape(page(7))
	}
	b.wantAvoid(Hung, "after 14 s")
	b.pass(time.Second)
	b.scrape(page(8))
	b.wantAvoid(Eligible, "when a counter moved")
	if room := b.load().Room; room > warmStep {
		t.Errorf("room for %d more after a hang", room)
	}
	for range 30 {
		b.pass(time.Second)
		b.fail(errors.New("404 Not Found"))
	}
	b.wantAvoid(Eligible, "when its page is gone")
	for range 30 {
		b.pass(time.Second)
		b.fail(context.DeadlineExceeded)
	}
	b.wantAvoid(Hung, "when its page hangs as well")
	r.Abort(b.now)
	b.scrape(page(8))
	b.wantAvoid(Eligible, "when nothing is in flight")
}

// What is before an engine can hang while the engine goes on: it has answered,
// and none of the answers arrives.
func TestStrandedRequests(t *testing.T) {
	tokens := 0.0
	seconds := func(b *bench, n int, running float64) {
		for range n {
			b.pass(time.Second)
			tokens++
			b.scrape(metrics.Snapshot{GenerationTokens: known(tokens), PromptTokens: known(0), FirstTokens: known(0),
				Running: known(running), Waiting: known(0)})
		}
	}
	for _, tt := range []struct {
		name     string
		inFlight int
		running  float64 // by the engine's word
		want     Avoid
	}{
		{"all are lost", 4, 0, Hung},
		{"most are lost", 12, 5, Hung},
		{"the engine has most", 12, 7, Eligible},
		{"slow readers", 3, 0, Eligible},
		{"other senders", 4, 10, Eligible},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := newBench(t, Config{})
			seconds(b, 1, 0)
			var open []*Reservation
			for range tt.inFlight {
				open = append(open, b.send(100, 100))
			}
			seconds(b, 10, tt.running)
			b.wantAvoid(Eligible, "for ten seconds")
			seconds(b, 2, tt.running)
			b.wantAvoid(tt.want, "after them")
			open[0].Finish(b.now)
			seconds(b, 1, tt.running)
			b.wantAvoid(Eligible, "when one was answered")
			for _, r := range open[1:] {
				r.Abort(b.now)
			}
			seconds(b, 20, 0)
			b.wantAvoid(Eligible, "when all have left")
		})
	}
}

// A request that the engine knows nothing of counts in a choice, long before the
// replica is taken for hung. One that merely takes long does not, however many
// others have been answered since.
func TestLostRequests(t *testing.T) {
	const prompt = 1000
	for _, tt := range []struct {
		name     string
		inFlight int
		age      time.Duration
		running  float64 // by the engine's word
		answered int     // of those in flight, after the scrape
		want     float64
	}{
		{"idle", 0, 2 * time.Second, 0, 0, 0},
		{"long answers beside short ones", 8, time.Minute, 8, 0, 0},
		{"on its way to the engine", 2, lostAfter / 2, 0, 0, 0},
		{"one is lost", 1, 2 * time.Second, 0, 0, lostWeight * prompt},
		{"two of five are lost", 5, 2 * time.Second, 3, 0, 2 * lostWeight * prompt},
		{"no more than a few count", 40, 2 * time.Second, 0, 0, lostMost * lostWeight * prompt},
		{"a few of many are on their way back", 64, 2 * time.Second, 61, 0, 0},
		{"the lost are answered", 3, 2 * time.Second, 0, 3, 0},
		{"other senders", 2, 2 * time.Second, 10, 0, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := newBench(t, Config{}).measured()
			var open []*Reservation
			for range tt.inFlight {
				r := &Reservation{Prompt: prompt, Chain: []uint64{1}}
				b.replica.Reserve(r, b.now)
				open = append(open, r)
			}
			b.pass(tt.age)
			b.scrape(metrics.Snapshot{Running: known(tt.running), Waiting: known(0)})
			for _, r := range open[:tt.answered] {
				r.Finish(b.now)
			}
			l := b.load()
			if l.Lost != tt.want {
				t.Errorf("lost requests count for %v tokens, want %v", l.Lost, tt.want)
			}
			if l.Wait() != 0 {
				t.Errorf("they are taken for a queue of %v tokens", l.Wait())
			}
			b.pass(time.Hour)
			if got := b.load().Lost; got != 0 {
				t.Errorf("they count for %v tokens by a page of an hour ago", got)
			}
			b.scrape(metrics.Snapshot{})
			if got := b.load().Lost; got != 0 {
				t.Errorf("they count for %v tokens where the engine does not tell", got)
			}
		})
	}
}

// While nothing is known of a fleet's rate, those that wait for their first tokens tell
// that it is slow, and nobody is late. That ends where none can be so slow, and does not
// hide a replica that hangs.
func TestSlowFromTheFirstPrompt(t *testing.T) {
	b := newBench(t, Config{})
	still := metrics.Snapshot{FirstTokens: known(0), GenerationTokens: known(0)}
	b.scrape(still)
	b.send(4000, 4000)
	if rate := b.load().Rate; rate != DefaultPrefillRate {
		t.Errorf("rate %v of which nothing is known", rate)
	}
	b.pass(4 * time.Second)
	b.scrape(still)
	if l := b.load(); l.Rate != 1000 || l.Late != 0 || l.RateKnown {
		t.Errorf("rate %v (known: %v) after four seconds without a first token of 4,000, and %v late; want 1,000 and none", l.Rate, l.RateKnown, l.Late)
	}
	for range 9 {
		b.pass(2 * time.Second)
		b.scrape(still)
	}
	l := b.load()
	if l.Rate != slowestAssumed || l.Late < 2*time.Second {
		t.Errorf("rate %v and %v late after 22 seconds", l.Rate, l.Late)
	}
	b.wantAvoid(Hung, "after 22 seconds")
	b.measured().scrape(still)
	if rate := b.load().Rate; rate < 0.99*DefaultPrefillRate {
		t.Errorf("rate %v where something is known", rate)
	}
}

// An engine tells of a request after the step that follows the one in which it came.
// Where steps take long it is not lost until then.
func TestNotLostInALongStep(t *testing.T) {
	for _, tt := range []struct {
		rate float64 // tokens a second, 0 while nothing is known of it
		age  time.Duration
		lost bool
	}{
		{50_000, 1100 * time.Millisecond, true},
		{1000, 3 * time.Second, false},
		{1000, 5 * time.Second, true},
		{0, 4 * time.Second, false},
		{0, 6 * time.Second, true},
	} {
		b := newBench(t, Config{})
		if tt.rate > 0 {
			b.replica.rate.tokens, b.replica.rate.seconds = 2*rateEnough, 2*rateEnough/tt.rate
		}
		b.replica.Reserve(&Reservation{Prompt: 500, Uncached: 500, Chain: []uint64{1}}, b.now)
		b.pass(tt.age)
		b.scrape(metrics.Snapshot{Running: known(0), Waiting: known(0)})
		if got := b.load().Lost; got > 0 != tt.lost {
			t.Errorf("%v after it was sent to an engine of %v tokens a second it counts for %v", tt.age, tt.rate, got)
		}
	}
}

// What is late is late by the rate of now, whatever was assumed when it was sent.
func TestLateByTheRateOfNow(t *testing.T) {
	b := newBench(t, Config{}).measured()
	b.scrape(metrics.Snapshot{FirstTokens: known(0)})
	b.send(8000, 8000) // 0.8 s as assumed, 8 s in truth
	b.pass(6 * time.Second)
	b.scrape(metrics.Snapshot{FirstTokens: known(0)})
	if late := b.load().Late; late < 3*time.Second {
		t.Errorf("late by %v, and it should have taken less than a second", late)
	}
	b.replica.rate.tokens, b.replica.rate.seconds = rateEnough, rateEnough/1000.
	b.scrape(metrics.Snapshot{FirstTokens: known(0)})
	if late := b.load().Late; late != 0 {
		t.Errorf("late by %v, and it takes eight seconds", late)
	}
}

// Of a request whose first token the engine has counted it must know, however
// young it is.
func TestLostAfterFirstToken(t *testing.T) {
	b := newBench(t, Config{})
	b.scrape(metrics.Snapshot{FirstTokens: known(7), Running: known(0), Waiting: known(0)})
	b.replica.Reserve(&Reservation{Prompt: 500, Chain: []uint64{1}}, b.now)
	for _, firsts := range []float64{7, 8} {
		b.pass(lostAfter / 4)
		b.scrape(metrics.Snapshot{FirstTokens: known(firsts), Running: known(0), Waiting: known(0)})
		if got, want := b.load().Lost, (firsts-7)*lostWeight*500; got != want {
			t.Errorf("after %v first tokens: %v tokens, want %v", firsts-7, got, want)
		}
	}
}

// An engine that computes one long prompt, and nothing else, moves no counter until it
// is done; but vLLM's share of used KV cache grows.
func TestLongPromptIsNoHang(t *testing.T) {
	for _, tt := range []struct {
		name  string
		usage float64 // by which its usage grows in a second
		after int     // seconds without a counter
		want  Avoid
	}{
		{"as long as it takes, and half as long again", 0, 35, Eligible},
		{"for far too long", 0, 60, Hung},
		{"three times as long, and its cache fills", 0.001, 60, Eligible},
	} {
		b := newBench(t, Config{})
		page := func(usage float64) {
			b.scrape(metrics.Snapshot{GenerationTokens: known(7), FirstTokens: known(7), KVUsage: known(usage)})
		}
		page(0)
		b.send(200_000, 200_000) // twenty seconds
		for i := range tt.after {
			b.pass(time.Second)
			page(tt.usage * float64(i))
		}
		b.wantAvoid(tt.want, tt.name)
	}
}

// An engine that has no counter which work moves can't be caught.
func TestHangGuardNeedsCounters(t *testing.T) {
	b := newBench(t, Config{})
	defer b.send(1000, 1000).Abort(b.now)
	for range 100 {
		b.pass(time.Second)
		b.scrape(metrics.Snapshot{Running: known(1)})
	}
	b.wantAvoid(Eligible, "without counters")
}

// A replica has proven itself when the engine counts first tokens, long before
// long answers end.
func TestWarmUpByFirstTokens(t *testing.T) {
	b := newBench(t, Config{})
	b.scrape(metrics.Snapshot{FirstTokens: known(40)})
	b.replica.Unavailable(b.now)
	for sent, counted := 0, 0; counted < warmAfter; {
		for b.load().Room > 0 {
			b.send(10, 10)
			sent++
		}
		if want := warmStep * (1 + counted); sent-counted > want || sent < warmStep*(1+counted) {
			t.Fatalf("after %d first tokens %d requests were sent, want %d at once", counted, sent, want)
		}
		b.pass(time.Second)
		counted += 2
		b.scrape(metrics.Snapshot{FirstTokens: known(40 + float64(counted))})
	}
	if b.load().Warming {
		t.Errorf("it warms up after %d first tokens", warmAfter)
	}
}

func TestWarmUp(t *testing.T) {
	b := newBench(t, Config{})
	if l := b.load(); l.Room < 1000 || l.Warming {
		t.Errorf("a replica that was there from the start warms up %v, with room for %d", l.Warming, l.Room)
	}
	b.replica.Unavailable(b.now)
	var open []*Reservation
	for answered := 0; answered < warmAfter; answered++ {
		for b.load().Room > 0 {
			open = append(open, b.send(10, 10))
		}
		if want := warmStep * (1 + answered); len(open) != want {
			t.Fatalf("after %d answers %d requests at once, want %d", answered, len(open), want)
		}
		open[0].Finish(b.now)
		open = open[1:]
	}
	if room := b.load().Room; room < 1000 {
		t.Errorf("after %d answers there is room for %d", warmAfter, room)
	}
	for _, r := range open {
		r.Abort(b.now)
	}
	b.replica.Unavailable(b.now)
	b.pass(warmWithin + time.Second)
	if room := b.load().Room; room < 1000 {
		t.Errorf("after a minute without traffic there is room for %d", room)
	}
}

func TestFailuresAreAvoidedLonger(t *testing.T) {
	b := newBench(t, Config{})
	for _, want := range []time.Duration{1, 2, 4, 8, 16, 30, 30} {
		b.replica.Failed(b.now)
		b.pass(want*time.Second - time.Millisecond)
		b.wantAvoid(Failing, fmt.Sprint(want, " s"))
		b.pass(time.Millisecond)
		b.wantAvoid(Eligible, fmt.Sprint(want, " s later"))
	}
	for range 1000 { // no shift may overflow
		b.replica.Failed(b.now)
		b.pass(failingMost)
	}
	b.replica.Failed(b.now)
	b.wantAvoid(Failing, "after many failures")
	b.send(1, 1).Finish(b.now)
	b.wantAvoid(Eligible, "after an answer")
	b.replica.Failed(b.now)
	b.pass(time.Second)
	b.wantAvoid(Eligible, "the count began anew")
}

// A crash fails all requests in flight at once, which is one failure; and what comes back is another process.
func TestFailuresOfOneEvent(t *testing.T) {
	b := newBench(t, Config{})
	b.scrape(metrics.Snapshot{StartTime: known(1000)})
	for range 20 {
		b.replica.Failed(b.now)
	}
	b.pass(failingFor - time.Millisecond)
	b.wantAvoid(Failing, "just before a second has passed")
	b.pass(time.Millisecond)
	b.wantAvoid(Eligible, "after a second")

	b.replica.Failed(b.now)
	b.wantAvoid(Failing, "another failure")
	b.scrape(metrics.Snapshot{StartTime: known(2000)})
	b.wantAvoid(Eligible, "a restart")
}

func TestAvoid(t *testing.T) {
	b := newBench(t, Config{})
	b.fail(fmt.Errorf("dial: %w", syscall.ECONNREFUSED))
	b.wantAvoid(Refused, "connection refused")
	b.fail(errors.New("timeout"))
	b.wantAvoid(Eligible, "another error")
	b.fail(syscall.ECONNREFUSED)
	b.scrape(metrics.Snapshot{})
	b.wantAvoid(Eligible, "a good scrape")
	b.scrape(metrics.Snapshot{Asleep: known(1)})
	b.wantAvoid(Asleep, "asleep")
	b.scrape(metrics.Snapshot{Asleep: known(0)})
	b.wantAvoid(Eligible, "awake")
	b.replica.Drain(true)
	b.wantAvoid(Drained, "drained")
	b.replica.Drain(false)
	b.wantAvoid(Eligible, "back")
	for a := Eligible; a <= Drained; a++ {
		if a.String() == "" {
			t.Errorf("%d has no name", a)
		}
	}
}

// The engine tells its KV usage once a second. What our requests have given back since counts at once: an idle replica
// must not look full because one was in flight when it was asked.
func TestKVFreeWhenRequestsEnd(t *testing.T) {
	b := newBench(t, Config{})
	page := func(usage float64) metrics.Snapshot {
		return metrics.Snapshot{KVUsage: known(usage), CapacityTokens: known(10_000), BlockTokens: known(32)}
	}
	want := func(free float64, when string) {
		t.Helper()
		if l := b.load(); math.Abs(l.KVFree()-free) > 1e-9 {
			t.Errorf("%s: %.2f free, want %.2f; %+v", when, l.KVFree(), free, l)
		}
	}
	want(1, "before the first scrape")
	first := b.send(2000, 500)
	b.scrape(page(0.2))
	want(0.8, "with one in flight")
	second := b.send(1000, 1000)
	want(0.8, "with one more, sent since")
	second.Finish(b.now)
	want(0.8, "when that has ended")
	first.Finish(b.now)
	want(1, "when both have")
	b.scrape(page(0.9))
	want(0.1, "with others' requests")
	b.pass(time.Hour)
	want(1, "long after the last scrape")
}

// A scrape takes its time, in which the request that it tells of may end.
func TestKVFreeWhenARequestEndsDuringTheScrape(t *testing.T) {
	b := newBench(t, Config{})
	r := b.send(2000, 2000)
	b.pass(time.Second)
	r.Finish(b.now)
	b.pass(time.Millisecond)
	b.fleet.Observe(b.replica, metrics.Scrape{
		Snapshot: &metrics.Snapshot{At: b.now, Engine: metrics.VLLM, KVUsage: known(0.2), CapacityTokens: known(10_000), BlockTokens: known(32)},
		Duration: 10 * time.Millisecond,
	}, b.now)
	if l := b.load(); l.KVFree() != 1 {
		t.Errorf("%.2f free of an idle replica", l.KVFree())
	}
}

// Unknown is not idle, and old is unknown.
func TestStaleFactsAreUnknown(t *testing.T) {
	b := newBench(t, Config{Interval: 3 * time.Second})
	if l := b.load(); l.KVUsage.Known || l.QueueKnown || l.Capacity != 0 || l.Free() < 1e300 {
		t.Errorf("before any scrape: %+v", l)
	}
	page := metrics.Snapshot{KVUsage: known(0.5), CapacityTokens: known(1000), BlockTokens: known(32), FirstTokens: known(0)}
	b.scrape(page)
	b.scrape(page)
	if l := b.load(); l.KVUsage.Value != 0.5 || l.Free() != 500 || l.BlockTokens != 32 || !l.QueueKnown {
		t.Errorf("after a scrape: %+v", l)
	}
	b.pass(9 * time.Second)
	if l := b.load(); !l.KVUsage.Known {
		t.Error("unknown after three intervals")
	}
	b.pass(time.Second)
	if l := b.load(); l.KVUsage.Known || l.QueueKnown {
		t.Error("known after more than three intervals")
	} else if l.Capacity != 1000 || l.BlockTokens != 32 {
		t.Error("what an engine is built with is forgotten")
	}
	b.send(700, 700)
	if free := b.load().Free(); free != 300 {
		t.Errorf("%v tokens free of 1000 with 700 in flight", free)
	}
}

func TestTrust(t *testing.T) {
	b := newBench(t, Config{})
	queries, hits := 0.0, 0.0
	rounds := func(n int, confirmed float64) {
		for range n {
			b.send(10_000, 1000).Finish(b.now)
			queries, hits = queries+10_000, hits+9000*confirmed
			b.pass(time.Second)
			b.scrape(metrics.Snapshot{PrefixQueries: known(queries), PrefixHits: known(hits), FirstTokens: known(queries / 10_000)})
		}
	}
	rounds(2, 0)
	if trust := b.load().Trust; trust != 1 {
		t.Errorf("trust is %v after next to nothing", trust)
	}
	rounds(100, 0.5)
	if trust := b.load().Trust; trust < 0.45 || trust > 0.55 {
		t.Errorf("trust is %v where the engine confirms half", trust)
	}
	rounds(100, 2)
	if trust := b.load().Trust; trust != 1 {
		t.Errorf("trust is %v where the engine hits more than believed", trust)
	}
	b.scrape(metrics.Snapshot{PrefixCaching: known(0), PrefixQueries: known(queries), PrefixHits: known(hits), FirstTokens: known(queries / 10_000)})
	if trust := b.load().Trust; trust != 0 {
		t.Errorf("trust is %v in an engine without a prefix cache", trust)
	}
}

// An engine that evicts more than believed loses trust within a few scrapes, and the capacity that it is believed to
// have shrinks; both come back.
func TestTrustIsLostQuickly(t *testing.T) {
	b := newBench(t, Config{})
	requests, hits := 0.0, 0.0
	rounds := func(n int, confirmed float64) {
		for range n {
			b.send(10_000, 1000).Finish(b.now)
			requests, hits = requests+1, hits+9000*confirmed
			b.pass(time.Second)
			b.scrape(metrics.Snapshot{PrefixQueries: known(requests * 10_000), PrefixHits: known(hits), FirstTokens: known(requests), CapacityTokens: known(100_000)})
		}
	}
	rounds(50, 1.5)
	full := b.replica.capacity
	rounds(8, 0)
	if trust := b.load().Trust; trust > 0.5 {
		t.Errorf("trust is %v after 8 scrapes without a hit", trust)
	}
	if now := b.replica.capacity; now > full*3/4 {
		t.Errorf("%d of %d blocks are still believed in", now, full)
	}
	rounds(200, 0)
	if least := b.replica.capacity; least < full/shrinkMost-1 || least > full/shrinkMost+1 {
		t.Errorf("%d of %d blocks are left", least, full)
	}
	rounds(300, 1)
	if trust := b.load().Trust; trust < 0.99 || b.replica.capacity < full*97/100 {
		t.Errorf("trust %v and %d of %d blocks after all was confirmed", trust, b.replica.capacity, full)
	}
}

// An engine that never hits, whatever its page says of prefix caching, is as one that holds nothing: no believed hit counts
// in its cost.
func TestNoHitsEver(t *testing.T) {
	b := newBench(t, Config{})
	requests := 0.0
	for range 20 {
		b.send(10_000, 1000).Finish(b.now)
		requests++
		b.pass(time.Second)
		b.scrape(metrics.Snapshot{PrefixCaching: known(1), PrefixQueries: known(requests * 10_000), PrefixHits: known(0), FirstTokens: known(requests)})
	}
	if trust := b.load().Trust; trust != 0 {
		t.Errorf("trust is %v in an engine that never hit", trust)
	}
}

// What an engine does not count is not taken for 0: without a count of hits the belief stands, also where a page loses
// it. Cached prompt tokens count as hits.
func TestTrustWithoutHits(t *testing.T) {
	for _, c := range []struct {
		name string
		page func(requests float64) metrics.Snapshot
		want float64
	}{
		{"none", func(n float64) metrics.Snapshot {
			return metrics.Snapshot{FirstTokens: known(n), PromptTokens: known(n * 10_000)}
		}, 1},
		{"first tokens neither", func(float64) metrics.Snapshot {
			return metrics.Snapshot{Running: known(0), Waiting: known(0)}
		}, 1},
		{"lost at half time", func(n float64) metrics.Snapshot {
			s := metrics.Snapshot{FirstTokens: known(n)}
			if n < 100 {
				s.PrefixHits = known(n * 9000)
			}
			return s
		}, 1},
		{"cached prompt tokens", func(n float64) metrics.Snapshot {
			return metrics.Snapshot{FirstTokens: known(n), PromptTokens: known(n * 10_000), CachedPromptTokens: known(n * 3000)}
		}, 1. / 3},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBench(t, Config{})
			for i := range 200 {
				b.send(10_000, 1000).Finish(b.now)
				b.pass(time.Second)
				b.scrape(c.page(float64(i + 1)))
			}
			if trust := b.load().Trust; math.Abs(trust-c.want) > 0.05 {
				t.Errorf("trust is %v, want %v", trust, c.want)
			}
		})
	}
}

// What was sent before a scrape and answered after it is compared with the hits that the engine counts then.
func TestTrustComparesTheSameRequests(t *testing.T) {
	b := newBench(t, Config{})
	b.scrape(metrics.Snapshot{PrefixHits: known(0), FirstTokens: known(0)})
	requests := 0.0
	for range 10 {
		r := b.send(100_000, 10_000)
		b.pass(time.Second)
		b.scrape(metrics.Snapshot{PrefixHits: known(requests * 90_000), FirstTokens: known(requests)})
		if trust := b.load().Trust; trust < 1 {
			t.Errorf("trust is %v while a request waits", trust)
		}
		r.Finish(b.now)
		requests++
	}
}

func TestBytesPerToken(t *testing.T) {
	b := newBench(t, Config{})
	if got := b.fleet.BytesPerToken(); got != DefaultBytesPerToken {
		t.Errorf("%v bytes per token before anything is known", got)
	}
	tokens, count := 0.0, 0.0
	round := func(bytes, counted float64) {
		r := &Reservation{Prompt: bytes / 4, Uncached: bytes / 4, Bytes: bytes}
		b.replica.Reserve(r, b.now)
		r.Finish(b.now)
		tokens, count = tokens+counted, count+1
		b.pass(time.Second)
		b.scrape(metrics.Snapshot{PromptTokens: known(tokens), FirstTokens: known(count)})
	}
	b.scrape(metrics.Snapshot{PromptTokens: known(0), FirstTokens: known(0)})
	for range 20 {
		round(30_000, 12_000)
	}
	if got := b.fleet.BytesPerToken(); got != 2.5 {
		t.Errorf("%v bytes per token, the engine counts 2.5", got)
	}
	round(30_000, 1) // no tokenizer does this
	round(1, 30_000)
	if got := b.fleet.BytesPerToken(); got != 2.5 {
		t.Errorf("%v bytes per token after absurd counts", got)
	}
	for range 500 {
		round(30_000, 6000)
	}
	if got := b.fleet.BytesPerToken(); got < 4.5 {
		t.Errorf("%v bytes per token, long after the texts changed to 5", got)
	}
}

// Scrapes that fall between requests and their tokens lose neither, and what others send, or what came as token ids, is
// not taken for text.
func TestBytesPerTokenAcrossScrapes(t *testing.T) {
	b := newBench(t, Config{})
	tokens, first := 0.0, 0.0
	scrape := func(requests float64) {
		tokens += 2000 * requests
		first += requests
		b.pass(time.Second)
		b.scrape(metrics.Snapshot{PromptTokens: known(tokens), FirstTokens: known(first)})
	}
	pass := func(bytes float64) {
		r := &Reservation{Prompt: 2000, Uncached: 2000, Bytes: bytes}
		b.replica.Reserve(r, b.now)
		r.Finish(b.now)
	}
	scrape(0)
	for range 20 {
		pass(4000)
		scrape(0) // the page was made a moment before
		scrape(1)
		pass(4000)
		pass(4000)
		scrape(1)
		pass(0)
		scrape(2)
	}
	if got := b.fleet.BytesPerToken(); got != 2 {
		t.Errorf("%v bytes per token, the engine counts 2", got)
	}
	pass(4000)
	scrape(2) // one of them another's
	scrape(0)
	pass(4000)
	scrape(1) // which is clear again
	if got, want := b.replica.text.open, (texts{}); got != want {
		t.Errorf("%+v is left open", got)
	}
	for range 3 {
		b.pass(time.Minute) // after which one stray is no sign of another sender
		scrape(1)
		pass(4000)
		scrape(1)
	}
	if got := b.fleet.BytesPerToken(); got != 2 {
		t.Errorf("%v bytes per token after three requests of others", got)
	}
}

func TestIndexHasTheEnginesSize(t *testing.T) {
	b := newBench(t, Config{Capacity: 100_000})
	size := func() int { return b.fleet.Registry.Index.Capacity(b.replica.Slot) }
	if got, want := size(), 100_000*DefaultBytesPerToken/prompt.BlockSize; got != want {
		t.Errorf("%d blocks by the configured capacity, want %d", got, want)
	}
	b.scrape(metrics.Snapshot{CapacityTokens: known(640_000)})
	if got, want := size(), 640_000*DefaultBytesPerToken/prompt.BlockSize; got != want {
		t.Errorf("%d blocks by the engine's capacity, want %d", got, want)
	}
	b.scrape(metrics.Snapshot{CapacityTokens: known(641_000)})
	if got, want := size(), 640_000*DefaultBytesPerToken/prompt.BlockSize; got != want {
		t.Errorf("a change of a sixth of a percent resizes the index from %d to %d", want, got)
	}
}

// Everything at once, from many goroutines. Run with -race.
func TestReplicaConcurrently(t *testing.T) {
	f := NewRegistry().New(Config{}, []string{"a"})
	p := f.Replica("a", time.Now())
	var wg sync.WaitGroup
	for worker := range 8 {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(worker), 1))
			for i := range 500 {
				r := &Reservation{Prompt: 1000 * rng.Float64(), Uncached: 900 * rng.Float64(), Bytes: 4000}
				p.Reserve(r, time.Now())
				p.Holds([]uint64{uint64(worker), uint64(i)})
				if l := p.Load(time.Now()); l.Queue < 0 || l.InFlight < 1 {
					t.Errorf("queue %v, in flight %v", l.Queue, l.InFlight)
				}
				switch rng.IntN(5) {
				case 0:
					f.Observe(p, metrics.Scrape{Snapshot: &metrics.Snapshot{At: time.Now(), Engine: metrics.VLLM, FirstTokens: known(float64(i))}}, time.Now())
				case 1:
					p.Failed(time.Now())
				case 2:
					_ = f.Views(time.Now())
				}
				var both sync.WaitGroup // ends race, and one counts
				both.Go(func() { r.Finish(time.Now()) })
				both.Go(func() { r.Abort(time.Now()) })
				both.Wait()
			}
		})
	}
	wg.Wait()
	if l := p.Load(time.Now()); l.InFlight != 0 || l.Queue != 0 || p.Outstanding() != 0 {
		t.Errorf("idle with %v in flight, %v queued, %v outstanding", l.InFlight, l.Queue, p.Outstanding())
	}
}
