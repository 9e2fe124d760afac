// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/fleet"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/prompt"
)

// TestCostsAddUp compares the parts of a cost with the cost, also where there
// is no pressure and where capacity is unknown, and what computing costs with a
// replica that has nothing else.
func TestCostsAddUp(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 1000 {
		rule := Rule{MatchWeight: 1 + 3*r.Float64(), PerRequest: 1000 * r.Float64()}
		c := Candidate{
			Queue: 1e5 * r.Float64(), Uncached: 1e4 * r.Float64(),
			Free: 1e5 * r.Float64(), InFlight: float64(r.IntN(50)), Pace: 0.1 + 2*r.Float64(), Reuse: 10 * r.Float64(),
			Shared: r.IntN(4) == 0, Evicts: 10 * r.Float64(), Away: 4000 * r.Float64(),
		}
		if r.IntN(3) == 0 {
			c.Free = math.Inf(1)
		}
		if got, want := rule.Costs(&c).Total(), rule.Cost(&c); math.Abs(got-want) > 1e-9*want {
			t.Fatalf("%+v costs %v, its parts %v", c, want, got)
		}
		// How busy the replica is says what is lost by computing.
		alone := Candidate{Uncached: c.Uncached, Free: math.Inf(1), Pace: c.Pace, Reuse: c.Reuse, Evicts: c.Evicts, InFlight: c.InFlight, Shared: c.Shared}
		if got, want := rule.Costs(&c).Compute, (Rule{MatchWeight: rule.MatchWeight}).Cost(&alone); math.Abs(got-want) > 1e-6*(1+want) {
			t.Fatalf("computing %v costs %v among other things, alone %v", c.Uncached, got, want)
		}
	}
}

// passerBy is a caller whose requests are sent and end nowhere.
type passerBy struct {
	replicas []*fleet.Replica
	closed   int // place of a replica that is not open
	chain    []uint64
	got      Choice
}

func (p *passerBy) Open(i int) bool { return i != p.closed }
func (p *passerBy) Tried(int) bool  { return false }
func (p *passerBy) Send(c Choice) (late *fleet.Reservation) {
	p.got = c
	if c.Index >= 0 {
		p.replicas[c.Index].Reserve(&fleet.Reservation{Prompt: 1000, Uncached: c.Uncached, Hit: c.Hit}, time.Unix(1000, 0))
		p.replicas[c.Index].Holds(p.chain)
	}
	return nil
}

// TestExplainIsWhatSubmitDoes asks before each of many requests, and compares.
func TestExplainIsWhatSubmitDoes(t *testing.T) {
	registry := fleet.NewRegistry()
	var addrs []string
	for i := range 5 {
		addrs = append(addrs, fmt.Sprintf("r%d:1", i))
	}
	f := registry.New(fleet.Config{}, addrs)
	defer f.Stop()
	s := NewScheduler(registry.Index)
	s.Terms = BindOnArrival
	now := time.Unix(1000, 0)
	r := rand.New(rand.NewPCG(3, 4))
	for n := range 300 {
		caller := &passerBy{replicas: f.Members(), closed: r.IntN(7) - 1}
		session := uint64(r.IntN(8)) << 32
		for b := range 2 + r.IntN(30) {
			caller.chain = append(caller.chain, session+uint64(b)+1)
		}
		ask := func() *Request {
			return &Request{
				Chain: caller.chain, Tokens: 64 * float64(len(caller.chain)), PerBlock: 64,
				Key: session, Replicas: caller.replicas, Caller: caller,
			}
		}
		if n%50 == 7 {
			caller.replicas[n%5].Drain(n%100 == 7)
		}
		request := ask()
		told := s.Explain(request, now)
		if request.Ready() != nil || caller.got != (Choice{}) {
			t.Fatal("explaining sent the request")
		}
		if again := s.Explain(ask(), now); fmt.Sprint(again) != fmt.Sprint(told) {
			t.Fatalf("explained %+v, then %+v", told, again)
		}
		if !s.Submit(ask(), now) {
			t.Fatal("a request waits though all are bound on arrival")
		}
		if told.Choice != caller.got {
			t.Fatalf("request %d: explained %+v, sent %+v", n, told.Choice, caller.got)
		}
		for i, o := range told.Options {
			if o.Allowed && i == caller.closed {
				t.Fatalf("replica %d is allowed but not open", i)
			}
			if i == told.Index && (!o.Allowed || math.Abs(o.Costs.Total()-told.Cost) > 1e-6) {
				t.Fatalf("the choice costs %v, its option %+v", told.Cost, o)
			}
		}
	}
}

// Those that wait count for a new request, and what it is told says so.
func TestExplainCountsThoseThatWait(t *testing.T) {
	w := newWorld(3)
	prompt := func(n uint64) *caller { // they begin alike, and have 960 tokens of their own
		chain := make([]uint64, 125)
		for i := range chain {
			if chain[i] = uint64(i + 1); i >= 110 {
				chain[i] += 1000 * n
			}
		}
		return w.caller(8000, chain...)
	}
	for n := range uint64(25) {
		waiting := w.s.Waiting()
		told := w.s.Explain(&prompt(n+1).Request, w.now)
		r := prompt(n + 1)
		sent := w.s.Submit(&r.Request, w.now)
		if told.Waits == sent || sent && r.choice != told.Choice {
			t.Fatalf("request %d: told %+v, sent %v %+v", n, told.Choice, sent, r.choice)
		}
		if cost := told.Options[told.Index].Costs.Total(); math.Abs(cost-told.Cost) > 1e-6 {
			t.Fatalf("request %d: the choice costs %.0f, its parts %.0f", n, told.Cost, cost)
		}
		if told.Ahead != waiting {
			t.Fatalf("request %d: %d are ahead, %d waited", n, told.Ahead, waiting)
		}
	}
	if w.s.Waiting() == 0 || w.s.Waiting() == 24 {
		t.Errorf("%d of 25 wait, want some", w.s.Waiting())
	}
}

// They do not for one that goes before them.
func TestFirstInLineCountsNobody(t *testing.T) {
	w := newWorld(2)
	held := make([]uint64, 40)
	for i := range held {
		held[i] = uint64(i + 1)
	}
	w.engines[0].replica.Holds(held)
	for i := range w.engines {
		c := w.caller(30_000, uint64(100+i))
		w.s.Submit(&c.Request, w.now)
	}
	ask := func(n uint64, priority int) *caller {
		chain := slices.Clone(held)
		for i := range uint64(15) {
			chain = append(chain, 1000*n+i)
		}
		c := w.caller(3520, chain...)
		c.Priority = priority
		return c
	}
	for n := range uint64(30) {
		c := ask(n+1, 0)
		if w.s.Submit(&c.Request, w.now) {
			t.Fatal("a request was sent though both replicas have much to do")
		}
	}
	behind := w.s.Explain(&ask(50, 0).Request, w.now)
	first := w.s.Explain(&ask(51, -1).Request, w.now)
	if first.Index != 0 || first.Cost > 40_000 || behind.Cost < 45_000 {
		t.Errorf("before all others it goes to replica %d at a cost of %.0f, behind them for %.0f", first.Index, first.Cost, behind.Cost)
	}
}

// TestPeekIsTheNextKey compares with the key that is then drawn, except for
// the very requests that split a key.
func TestPeekIsTheNextKey(t *testing.T) {
	d := NewDepths(0)
	r := rand.New(rand.NewPCG(5, 6))
	now := time.Unix(1000, 0)
	differ := 0
	const requests = 3000
	for range requests {
		p := prompt.Prompt{Turn: 64, TurnKey: r.Uint64()}
		for b := range 64 {
			key := uint64(b)
			if b >= 16 {
				key += uint64(r.IntN(20)) << 32
			}
			p.Chain = append(p.Chain, key+1)
		}
		peeked := d.Peek(&p)
		if again := d.Peek(&p); again != peeked {
			t.Fatal("peeking changed the key")
		}
		if d.Key(&p, 1000, 4, now) != peeked {
			differ++
		}
		now = now.Add(10 * time.Millisecond)
	}
	if differ > requests/20 {
		t.Errorf("%d of %d keys differ from what was peeked", differ, requests)
	}
	fixed := NewDepths(1024)
	p := prompt.Prompt{Chain: []uint64{1, 2, 3, 4, 5}, TurnKey: 9}
	if fixed.Peek(&p) != 4 || fixed.Peek(&prompt.Prompt{TurnKey: 9}) != 9 {
		t.Errorf("with a fixed prefix the key is %d, and %d for a short prompt", fixed.Peek(&p), fixed.Peek(&prompt.Prompt{TurnKey: 9}))
	}
}
