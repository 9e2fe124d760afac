// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/fleet"
	"github.com/seed-2fa47a1e/caddy-kv-cache/metrics"
)

var start = time.Unix(1_700_000_000, 0)

// world is a fleet of engines in virtual time that prefill first come, first
// served, and answer with one token.
type world struct {
	now     time.Time
	fleet   *fleet.Fleet
	engines []*engine
	s       *Scheduler
}

type engine struct {
	replica *fleet.Replica
	rate    float64
	queue   []*fleet.Reservation
	left    float64 // of the first in the queue
	tokens  float64 // first tokens so far
}

func newWorld(replicas int) *world {
	w := &world{now: start}
	var addrs []string
	for i := range replicas {
		addrs = append(addrs, fmt.Sprint("replica", i))
	}
	w.fleet = fleet.NewRegistry().New(fleet.Config{Interval: time.Second}, addrs)
	for _, p := range w.fleet.Members() {
		w.engines = append(w.engines, &engine{replica: p, rate: fleet.DefaultPrefillRate})
	}
	w.s = NewScheduler(w.fleet.Registry.Index)
	w.scrape()
	w.scrape()
	return w
}

// scrape lets the replicas know their engines' first tokens.
func (w *world) scrape() {
	for _, e := range w.engines {
		w.fleet.Observe(e.replica, metrics.Scrape{Snapshot: &metrics.Snapshot{
			At: w.now, Engine: metrics.VLLM, FirstTokens: metrics.Fact{Value: e.tokens, Known: true},
		}}, w.now)
	}
}

func (w *world) pass(d time.Duration) {
	w.now = w.now.Add(d)
	for _, e := range w.engines {
		work := e.rate * d.Seconds()
		for len(e.queue) > 0 && work >= e.left {
			work -= e.left
			e.queue[0].Finish(w.now)
			e.tokens++
			e.queue = e.queue[1:]
			if len(e.queue) > 0 {
				e.left = e.queue[0].Uncached
			}
		}
		if len(e.queue) > 0 {
			e.left -= work
		}
	}
}

// caller is one request and what became of it.
type caller struct {
	Request
	world  *world
	closed map[int]bool
	tried  map[int]bool
	sent   int
	choice Choice

	late        bool // its blocks are not in the index before it lands
	reservation *fleet.Reservation
}

// land puts a late one's blocks into the index.
func (c *caller) land() { c.reservation.Land(c.Chain) }

func (w *world) caller(tokens float64, chain ...uint64) *caller {
	c := &caller{world: w}
	c.Tokens, c.PerBlock, c.Chain, c.Key = tokens, 64, chain, uint64(tokens)
	c.Caller = c
	for _, e := range w.engines {
		c.Replicas = append(c.Replicas, e.replica)
	}
	return c
}

func (c *caller) Open(i int) bool  { return !c.closed[i] }
func (c *caller) Tried(i int) bool { return c.tried[i] }

func (c *caller) Send(choice Choice) (late *fleet.Reservation) {
	c.sent++
	c.choice = choice
	if choice.Index < 0 {
		return nil
	}
	r := &fleet.Reservation{Prompt: c.Tokens, Uncached: choice.Uncached, Hit: choice.Hit, Chain: c.Chain}
	c.Replicas[choice.Index].Reserve(r, c.world.now)
	if choice.Index < len(c.world.engines) {
		e := c.world.engines[choice.Index]
		if e.queue = append(e.queue, r); len(e.queue) == 1 {
			e.left = r.Uncached
		}
	}
	if c.late {
		c.reservation = r
		return r
	}
	c.Replicas[choice.Index].Holds(c.Chain)
	return nil
}

func TestIdleFleetSendsAtOnce(t *testing.T) {
	w := newWorld(4)
	for range 4 {
		c := w.caller(20_000)
		if !w.s.Submit(&c.Request, w.now) || c.sent != 1 || c.choice.Waited != 0 {
			t.Errorf("sent %d times, waited %v", c.sent, c.choice.Waited)
		}
		if c.Ready() != nil {
			t.Error("the schedule keeps a request that it sent at once")
		}
	}
	for _, e := range w.engines {
		if len(e.queue) != 1 {
			t.Errorf("%s has %d of 4 requests", e.replica.Addr, len(e.queue))
		}
	}
	if _, ok := w.s.Next(w.now); ok {
		t.Error("an event is due although nobody waits")
	}
}

func TestBusyFleetHoldsBack(t *testing.T) {
	w := newWorld(2)
	for range 2 {
		w.s.Submit(&w.caller(20_000).Request, w.now)
	}
	c := w.caller(1000)
	if w.s.Submit(&c.Request, w.now) || w.s.Waiting() != 1 {
		t.Fatalf("sent although both have two seconds of work queued; %d wait", w.s.Waiting())
	}
	select {
	case <-c.Ready():
		t.Fatal("ready before it was sent")
	default:
	}
	for w.s.Waiting() > 0 {
		next, ok := w.s.Next(w.now)
		if !ok || !next.After(w.now) {
			t.Fatalf("next event at %v, %v", next.Sub(w.now), ok)
		}
		w.pass(next.Sub(w.now))
		w.s.Event(w.now)
	}
	<-c.Ready()
	if c.choice.Waited < time.Second || c.choice.Waited > 3*time.Second {
		t.Errorf("waited %v for two seconds of work", c.choice.Waited)
	}
}

// Without descriptors a request goes where a connection is idle, and otherwise
// waits for one, whatever is known of the queues.
func TestWithoutDescriptors(t *testing.T) {
	w := newWorld(2)
	out := false
	w.fleet.Registry.Exhausted = func() bool { return out }
	w.pass(time.Minute) // the scrapes are stale
	for range 4 {       // two connections to each
		w.s.Submit(&w.caller(100).Request, w.now)
	}
	w.engines[1].queue[0].Finish(w.now)
	w.engines[1].queue = w.engines[1].queue[1:]
	out = true
	w.now = w.now.Add(50 * time.Millisecond)
	home := make([]uint64, 100) // held by the one that has no connection to spare
	for i := range home {
		home[i] = uint64(i + 1)
	}
	w.engines[0].replica.Holds(home)
	c := w.caller(6400, home...)
	if !w.s.Submit(&c.Request, w.now) || c.choice.Index != 1 {
		t.Fatalf("sent %d times, to %d; want the replica with an idle connection", c.sent, c.choice.Index)
	}
	c = w.caller(6400, home...)
	if w.s.Submit(&c.Request, w.now) {
		t.Fatalf("sent to %d without a connection", c.choice.Index)
	}
	w.s.Event(w.now)
	if c.sent > 0 {
		t.Fatal("sent by an event that left no connection")
	}
	w.engines[0].queue[0].Finish(w.now)
	w.s.Event(w.now)
	if c.sent != 1 || c.choice.Index != 0 {
		t.Errorf("sent %d times, to %d; want the replica whose connection came free", c.sent, c.choice.Index)
	}
}

// Where answers to two requests are kept from us, a prompt that is cached there
// is computed elsewhere, and nothing waits; it comes back when they are gone.
func TestReplicaWithLostRequests(t *testing.T) {
	w := newWorld(2)
	home := make([]uint64, 100)
	for i := range home {
		home[i] = uint64(i + 1)
	}
	at := w.engines[0].replica
	at.Holds(home)
	gauges := func(running float64) {
		w.fleet.Observe(at, metrics.Scrape{Snapshot: &metrics.Snapshot{
			At: w.now, Engine: metrics.VLLM, FirstTokens: metrics.Fact{Value: 2, Known: true},
			Running: metrics.Fact{Value: running, Known: true}, Waiting: metrics.Fact{Known: true},
		}}, w.now)
	}
	want := func(index int, when string) {
		t.Helper()
		c := w.caller(6400, home...)
		if e := w.s.Explain(&c.Request, w.now); e.Waits || e.Index != index {
			t.Errorf("%s: sent to %d, waits %v; want %d at once", when, e.Index, e.Waits, index)
		}
	}
	want(0, "when nothing is lost")
	var lost []*fleet.Reservation
	for range 2 {
		r := &fleet.Reservation{Prompt: 6400, Chain: home}
		at.Reserve(r, w.now)
		lost = append(lost, r)
	}
	w.pass(time.Second)
	gauges(2)
	want(0, "when the engine works on two")
	gauges(0)
	want(1, "when it knows nothing of them")
	for _, r := range lost {
		r.Abort(w.now)
	}
	want(0, "when they have left")
}

// Where the queue is not known, a request is bound on arrival.
func TestUnknownQueueBindsOnArrival(t *testing.T) {
	w := newWorld(2)
	w.pass(time.Minute) // the scrapes are stale
	for range 50 {
		c := w.caller(20_000)
		if !w.s.Submit(&c.Request, w.now) {
			t.Fatal("held back")
		}
	}
	w = newWorld(2)
	w.s.Terms = BindOnArrival
	for range 50 {
		c := w.caller(20_000)
		if !w.s.Submit(&c.Request, w.now) {
			t.Fatal("held back against the terms")
		}
	}
}

func TestWaitingIsBounded(t *testing.T) {
	w := newWorld(1)
	w.s.Terms.Waiting = 5
	held := 0
	for range 20 {
		c := w.caller(50_000)
		if !w.s.Submit(&c.Request, w.now) {
			held++
		}
	}
	if held != 5 || w.s.Waiting() != 5 {
		t.Errorf("%d are held back, want 5", held)
	}
}

func TestNobodyWaitsForever(t *testing.T) {
	w := newWorld(1)
	w.s.Submit(&w.caller(1e9).Request, w.now)
	c := w.caller(100)
	w.s.Submit(&c.Request, w.now)
	for range int(w.s.Terms.Longest / time.Second) {
		if c.sent > 0 {
			t.Fatalf("sent after %v, before the replica has room", c.choice.Waited)
		}
		w.pass(time.Second)
		w.scrape()
		w.s.Event(w.now)
	}
	if c.sent != 1 {
		t.Errorf("not sent after %v", w.s.Terms.Longest)
	}
}

func TestLeave(t *testing.T) {
	w := newWorld(1)
	w.s.Submit(&w.caller(1e6).Request, w.now)
	var cs []*caller
	for range 10 {
		c := w.caller(1000) // all of the same rank
		w.s.Submit(&c.Request, w.now)
		cs = append(cs, c)
	}
	for i := range cs {
		if at := (i * 7) % 10; !w.s.Leave(&cs[at].Request, w.now) {
			t.Errorf("request %d was not waiting", at)
		}
	}
	if w.s.Leave(&cs[3].Request, w.now) {
		t.Error("a request left twice")
	}
	w.pass(time.Hour)
	w.scrape()
	w.s.Event(w.now)
	for i, c := range cs {
		if c.sent != 0 {
			t.Errorf("request %d was sent after it left", i)
		}
	}
	if w.s.Waiting() != 0 || w.s.line.backlog != 0 {
		t.Errorf("%d wait, backlog %v", w.s.Waiting(), w.s.line.backlog)
	}
}

// The best set of replicas that is not empty is taken.
func TestStrictness(t *testing.T) {
	all := func() (*world, *caller) {
		w := newWorld(3)
		c := w.caller(1000)
		c.closed, c.tried = make(map[int]bool), make(map[int]bool)
		return w, c
	}
	submit := func(w *world, c *caller) int {
		if !w.s.Submit(&c.Request, w.now) {
			t.Error("held back")
		}
		return c.choice.Index
	}
	w, c := all()
	c.tried[0], c.closed[1] = true, true
	if got := submit(w, c); got != 2 || c.choice.Open != 1 {
		t.Errorf("one tried and one closed: chose %d of %d", got, c.choice.Open)
	}
	w, c = all()
	c.tried[0], c.tried[1], c.closed[2] = true, true, true
	if got := submit(w, c); got != 0 && got != 1 {
		t.Errorf("all open ones tried: chose %d", got)
	}
	w, c = all()
	c.tried[0] = true
	w.engines[1].replica.Failed(w.now)
	w.engines[2].replica.Failed(w.now)
	if got := submit(w, c); got != 1 && got != 2 {
		t.Errorf("all untried ones fail: chose %d", got)
	}
	w, c = all()
	w.engines[0].replica.Drain(true)
	w.engines[1].replica.Failed(w.now)
	if got := submit(w, c); got != 2 {
		t.Errorf("one drained and one failing: chose %d", got)
	}
	w, c = all()
	c.closed[0], c.closed[1], c.closed[2] = true, true, true
	if got := submit(w, c); got != -1 {
		t.Errorf("all closed: chose %d", got)
	}
	w, c = all()
	c.Replicas = nil
	if got := submit(w, c); got != -1 {
		t.Errorf("no replicas: chose %d", got)
	}
}

// A replica that has no place in the index, because its config was replaced or
// the index is full, can be chosen.
func TestReplicaWithoutSlot(t *testing.T) {
	w := newWorld(1)
	f := w.fleet.Registry.New(fleet.Config{}, nil)
	f.Stop()
	c := w.caller(1000, 1, 2, 3)
	c.Replicas = []*fleet.Replica{f.Replica("stray", w.now)}
	if !w.s.Submit(&c.Request, w.now) || c.choice.Index != 0 {
		t.Errorf("chose %d", c.choice.Index)
	}
}

// A request that was sent at once may be used again, also after it had to wait
// in a life before that.
func TestRequestIsUsedAgain(t *testing.T) {
	w := newWorld(1)
	c := w.caller(30_000)
	for i := range 10 {
		sent := w.s.Submit(&c.Request, w.now)
		for !sent && c.sent <= i {
			w.pass(100 * time.Millisecond)
			w.scrape()
			w.s.Event(w.now)
		}
		if c.sent != i+1 {
			t.Fatalf("round %d: sent %d times", i, c.sent)
		}
		if i%3 == 0 {
			w.pass(time.Minute)
			w.scrape()
			w.scrape()
		}
	}
}

// The choice tells what it saw.
func TestChoiceTells(t *testing.T) {
	w := newWorld(3)
	chain := []uint64{1, 2, 3, 4}
	w.engines[0].replica.Holds(chain)
	w.engines[1].replica.Holds(chain[:2])
	c := w.caller(256, chain...)
	w.s.Submit(&c.Request, w.now)
	ch := c.choice
	// The last token is always computed, so one engine block of the 256 tokens is.
	if ch.Index != 0 || ch.Matched != 4 || ch.Longest != 4 || ch.Hit != 240 || ch.Uncached != 16 || ch.Open != 3 || ch.Next <= ch.Cost {
		t.Errorf("%+v", ch)
	}
	only := w.caller(256, chain...)
	only.closed = map[int]bool{0: true, 1: true}
	w.s.Submit(&only.Request, w.now)
	if ch := only.choice; ch.Index != 2 || ch.Longest != 0 || ch.Hit != 0 || ch.Uncached != 256 || ch.Open != 1 || !math.IsInf(ch.Next, 1) {
		t.Errorf("with one open: %+v", ch)
	}
}

// check tells what is wrong with the schedule between two events.
func (w *world) check() error {
	s := w.s
	if err := s.line.check(); err != nil || s.Waiting() != s.line.len() {
		return fmt.Errorf("tells of %d waiting, has %d; %w", s.Waiting(), s.line.len(), err)
	}
	s.lanes.next(w.now)
	idle := true
	for _, e := range w.engines {
		idle = idle && s.lanes.of(e.replica).queue == 0
	}
	if idle && s.line.len() > 0 {
		return fmt.Errorf("%d wait although no replica has anything to do", s.line.len())
	}
	for i, r := range s.line.first(lookAhead, nil) {
		at, fits := s.cheapest(r)
		c, roomy := s.choose(r)
		if at != c.Index || fits != roomy {
			return fmt.Errorf("is to wait for replica %d (room: %v), but to be sent to %d (room: %v)", at, fits, c.Index, roomy)
		}
		if i == 0 && fits {
			return fmt.Errorf("the first in line waits although replica %d has room", at)
		}
	}
	return nil
}

// Through any traffic each request is sent once or leaves, nobody waits beyond
// the terms, and the schedule ends empty.
func TestScheduleKeepsItsTerms(t *testing.T) {
	for seed := range uint64(30) {
		rng := rand.New(rand.NewPCG(seed, 5))
		w := newWorld(1 + rng.IntN(5))
		w.s.Terms.Longest = 20 * time.Second
		var all, waiting []*caller
		left := make(map[*caller]bool)
		lastScrape := w.now
		for range 600 {
			c := w.caller(20+4000*rng.ExpFloat64(), uint64(rng.IntN(20)+1), rng.Uint64())
			if rng.IntN(10) == 0 {
				c.closed = map[int]bool{rng.IntN(len(w.engines)): true}
			}
			all = append(all, c)
			if !w.s.Submit(&c.Request, w.now) {
				waiting = append(waiting, c)
			}
			if len(waiting) > 0 && rng.IntN(8) == 0 {
				c := waiting[rng.IntN(len(waiting))]
				if w.s.Leave(&c.Request, w.now) {
					left[c] = true
				}
			}
			w.pass(time.Duration(rng.ExpFloat64() * float64(time.Second) * 0.3 / float64(len(w.engines))))
			if w.now.Sub(lastScrape) > time.Second {
				w.scrape()
				lastScrape = w.now
			}
			w.s.Event(w.now)
			if err := w.check(); err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
			waiting = slices.DeleteFunc(waiting, func(c *caller) bool { return c.sent > 0 || left[c] })
		}
		for range 1000 {
			if w.s.Waiting() == 0 {
				break
			}
			w.pass(200 * time.Millisecond)
			w.scrape()
			w.s.Event(w.now)
		}
		for i, c := range all {
			switch {
			case c.sent > 1, left[c] && c.sent > 0, !left[c] && c.sent == 0:
				t.Fatalf("seed %d: request %d was sent %d times, left %v", seed, i, c.sent, left[c])
			case c.choice.Waited > 0 && c.sent > 0 && c.choice.Waited > c.promised.Sub(c.arrived)+5*time.Second: // its replica must have room, too
				t.Errorf("seed %d: request %d waited %v, promised %v", seed, i, c.choice.Waited, c.promised.Sub(c.arrived))
			}
		}
		if w.s.Waiting() != 0 || w.s.line.backlog != 0 {
			t.Errorf("seed %d: ends with %d waiting, backlog %v", seed, w.s.Waiting(), w.s.line.backlog)
		}
	}
}

// A long prompt is not passed over by short ones for longer than promised.
func TestLongPromptIsNotStarved(t *testing.T) {
	w := newWorld(1)
	w.s.Submit(&w.caller(20_000).Request, w.now)
	long := w.caller(100_000)
	w.s.Submit(&long.Request, w.now)
	// First come, first served would have begun after 2 s.
	promised := time.Duration(w.s.Terms.Slip*float64(2*time.Second)) + w.s.Terms.Grace
	for i := 0; long.sent == 0; i++ {
		short := w.caller(900)
		w.s.Submit(&short.Request, w.now) // more than there is room for
		w.pass(80 * time.Millisecond)
		if i%10 == 0 {
			w.scrape()
		}
		w.s.Event(w.now)
		if w.now.Sub(start) > 2*promised {
			t.Fatalf("still waits after %v", w.now.Sub(start))
		}
	}
	if waited := long.choice.Waited; waited > promised+2*time.Second {
		t.Errorf("waited %v, promised %v", waited, promised)
	}
}

// Submissions, departures and events on many goroutines. Run with -race.
func TestScheduleConcurrently(t *testing.T) {
	w := newWorld(3)
	w.now = time.Now()
	w.scrape()
	var wg sync.WaitGroup
	for worker := range 8 {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(worker), 1))
			for range 100 {
				c := w.caller(1000 * rng.ExpFloat64())
				if w.s.Submit(&c.Request, time.Now()) {
					continue
				}
				if rng.IntN(2) == 0 && w.s.Leave(&c.Request, time.Now()) {
					if c.sent != 0 {
						t.Error("sent and left")
					}
					continue
				}
				select {
				case <-c.Ready():
				case <-time.After(20 * time.Second):
					t.Error("never sent")
				}
			}
		})
	}
	done := make(chan struct{})
	var events sync.WaitGroup
	events.Go(func() {
		for {
			select {
			case <-done:
				return
			default:
			}
			for _, e := range w.engines { // all done at once, by the engine's word
				w.fleet.Observe(e.replica, metrics.Scrape{Snapshot: &metrics.Snapshot{
					At: time.Now(), Engine: metrics.VLLM, FirstTokens: metrics.Fact{Value: 1e6, Known: true},
				}}, time.Now())
			}
			w.s.Event(time.Now())
		}
	})
	wg.Wait()
	close(done)
	events.Wait()
	if w.s.Waiting() != 0 {
		t.Errorf("%d wait at the end", w.s.Waiting())
	}
}

// BenchmarkSubmit is what one request costs on an idle fleet, by its size.
func BenchmarkSubmit(b *testing.B) {
	for _, n := range []int{1, 8, 64, 512} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			w := newWorld(n)
			c := w.caller(1000)
			c.Chain = make([]uint64, 64)
			for i := range c.Chain {
				c.Chain[i] = uint64(i) + 1
			}
			c.Caller = idleCaller{}
			b.ReportAllocs()
			for b.Loop() {
				w.s.Submit(&c.Request, w.now)
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(n), "ns/replica")
		})
	}
}

type idleCaller struct{}

func (idleCaller) Open(int) bool                         { return true }
func (idleCaller) Tried(int) bool                        { return false }
func (idleCaller) Send(Choice) (late *fleet.Reservation) { return nil }
