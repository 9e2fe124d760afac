// SPDX-License-Identifier: Apache-2.0

// Package replay plays a trace against simulated replicas in virtual time,
// thousands of times faster than the wall clock, and measures what a policy
// makes of it: hit rate and time to first token.
package replay

import (
	"container/heap"
	"errors"
	"io"
	"iter"
	"math"
	"slices"
	"time"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/enginesim"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/trace"
)

// TextBlockTokens is how many tokens a block of a router's own chain stands for.
const TextBlockTokens = 64

// Request is one request on its way.
type Request struct {
	// Number counts requests from 0.
	Number int
	// Session names the conversation, if there is one.
	Session string
	// Text is the chain of blocks of TextBlockTokens tokens, as a router sees it.
	Text []uint64
	// PromptTokens and OutputTokens are its lengths.
	PromptTokens, OutputTokens int
	// Arrived is when it came; Sent when and Replica where it was sent.
	Arrived, Sent time.Duration
	Replica       int

	engine  enginesim.Request
	session *running
	done    bool
}

// Policy decides where requests go.
type Policy interface {
	// Start is called once, with the fleet that there is.
	Start(f *Fleet)
	// Arrive decides where a request goes, by calling f.Send now or later.
	Arrive(now time.Duration, r *Request)
	// Finished tells that a request was answered.
	Finished(now time.Duration, r *Request)
	// Scraped tells what a replica published last.
	Scraped(now time.Duration, replica int, s enginesim.Stats)
	// Next is when the policy wants to act by itself, false if not.
	Next(now time.Duration) (time.Duration, bool)
	// Act is called then.
	Act(now time.Duration)
}

// Setup says what is simulated.
type Setup struct {
	// Engines has one entry for each replica.
	Engines []enginesim.Config
	// Scrape is the time between two looks at a replica's metrics, 0 for none.
	Scrape time.Duration
	// Rate multiplies the arrival rate of the trace.
	Rate float64
}

// Fleet is the simulated replicas.
type Fleet struct {
	Setup   Setup
	Engines []*enginesim.Engine

	sim *simulation
}

// Send hands a request to a replica.
func (f *Fleet) Send(now time.Duration, r *Request, replica int) { f.sim.send(now, r, replica) }

// Outcome is what became of one request, in virtual time.
type Outcome struct {
	TTFT, Total    time.Duration
	Prompt, Cached int
	Replica        int
	Arrived        time.Duration
	Waited         time.Duration
}

type simulation struct {
	fleet   *Fleet
	policy  Policy
	now     time.Duration
	pending arrivals
	next    func() (trace.Request, error, bool)
	ahead   *trace.Request
	number  int
	out     []Outcome
	err     error
}

// Run plays requests, or the sessions of a closed loop if there are any.
func Run(setup Setup, p Policy, requests iter.Seq2[trace.Request, error], sessions iter.Seq[*trace.Session]) ([]Outcome, error) {
	if setup.Rate <= 0 {
		setup.Rate = 1
	}
	s := &simulation{policy: p, fleet: &Fleet{Setup: setup}}
	s.fleet.sim = s
	for _, c := range setup.Engines {
		s.fleet.Engines = append(s.fleet.Engines, enginesim.New(c))
	}
	p.Start(s.fleet)
	if sessions != nil {
		for session := range sessions {
			r := &running{session: session}
			s.follow(r, time.Duration(float64(session.Start)/setup.Rate), true)
		}
	} else {
		next, stop := iter.Pull2(requests)
		defer stop()
		s.next = func() (trace.Request, error, bool) { r, err, ok := next(); return r, err, ok }
	}
	s.run()
	return s.out, s.err
}

const never = time.Duration(math.MaxInt64)

func (s *simulation) run() {
	scrape := s.fleet.Setup.Scrape
	if scrape == 0 {
		scrape = never
	}
	for s.err == nil {
		t := s.arrival()
		busy := t < never
		for _, e := range s.fleet.Engines {
			if at, ok := e.Next(); ok {
				t, busy = min(t, at), true
			}
		}
		if at, ok := s.policy.Next(s.now); ok {
			t, busy = min(t, max(at, s.now)), true
		}
		if !busy {
			return
		}
		t = min(t, scrape)
		s.now = t
		for _, e := range s.fleet.Engines {
			e.Advance(t)
		}
		if t >= scrape {
			for i, e := range s.fleet.Engines {
				s.policy.Scraped(t, i, e.Stats())
			}
			scrape += s.fleet.Setup.Scrape
		}
		for s.err == nil && s.arrival() <= t {
			s.policy.Arrive(t, s.take(t))
		}
		if at, ok := s.policy.Next(t); ok && at <= t {
			s.policy.Act(t)
		}
	}
}

// arrival is when the next request comes.
func (s *simulation) arrival() time.Duration {
	if s.next != nil && s.ahead == nil {
		r, err, ok := s.next()
		switch {
		case !ok:
			s.next = nil
		case err != nil:
			s.err = err
		default:
			s.ahead = &r
		}
	}
	if s.ahead != nil {
		return time.Duration(float64(s.ahead.At) / s.fleet.Setup.Rate)
	}
	if len(s.pending) > 0 {
		return s.pending[0].due
	}
	return never
}

func (s *simulation) take(now time.Duration) *Request {
	if s.ahead != nil {
		r := s.request(s.ahead, now)
		s.ahead = nil
		return r
	}
	p := heap.Pop(&s.pending).(*running)
	r := s.request(&p.request, now)
	r.session = p
	return r
}

func (s *simulation) request(t *trace.Request, now time.Duration) *Request {
	r := &Request{
		Number: s.number, Session: t.Session, Arrived: now,
		Text:         t.AppendBlocks(nil, TextBlockTokens),
		PromptTokens: max(1, t.InputTokens), OutputTokens: t.OutputTokens,
	}
	s.number++
	block := s.fleet.Setup.Engines[0].BlockTokens
	if block == 0 {
		block = enginesim.DefaultBlockTokens
	}
	r.engine = enginesim.Request{
		Blocks:       t.AppendBlocks(nil, block),
		PromptTokens: r.PromptTokens,
		OutputTokens: r.OutputTokens,
		OnFinish:     func(at time.Duration, _ *enginesim.Request) { s.finish(at, r) },
	}
	return r
}

func (s *simulation) send(now time.Duration, r *Request, replica int) {
	r.Sent, r.Replica = now, replica
	if err := s.fleet.Engines[replica].Submit(now, &r.engine); err != nil {
		s.err = err
	}
}

func (s *simulation) finish(at time.Duration, r *Request) {
	if r.done {
		return
	}
	r.done = true
	s.out = append(s.out, Outcome{
		TTFT: r.engine.FirstToken - r.Arrived, Total: at - r.Arrived,
		Prompt: r.PromptTokens, Cached: r.engine.Cached, Replica: r.Replica,
		Arrived: r.Arrived, Waited: r.Sent - r.Arrived,
	})
	s.policy.Finished(at, r)
	if r.session != nil {
		s.follow(r.session, at, false)
	}
}

// running is a session of a closed loop.
type running struct {
	session *trace.Session
	request trace.Request
	due     time.Duration
}

// follow makes a session's next request due after its think time.
func (s *simulation) follow(r *running, now time.Duration, first bool) {
	next, err := r.session.Next(nil)
	if errors.Is(err, io.EOF) {
		return
	}
	if err != nil {
		s.err = err
		return
	}
	r.request, r.due = next, now
	if !first {
		r.due += time.Duration(float64(next.Think) / s.fleet.Setup.Rate)
	}
	heap.Push(&s.pending, r)
}

type arrivals []*running

func (a arrivals) Len() int           { return len(a) }
func (a arrivals) Less(i, j int) bool { return a[i].due < a[j].due }
func (a arrivals) Swap(i, j int)      { a[i], a[j] = a[j], a[i] }
func (a *arrivals) Push(x any)        { *a = append(*a, x.(*running)) }
func (a *arrivals) Pop() any {
	old := *a
	x := old[len(old)-1]
	*a = old[:len(old)-1]
	return x
}

// Summary is what is told of a run; times are in seconds.
type Summary struct {
	Requests                   int
	HitRate                    float64
	Mean, P50, P90, P99, Total float64
	Busiest                    float64 // share of uncached tokens of the busiest replica over a fair share
	Waited                     float64
}

// Summarize sums a run up.
func Summarize(out []Outcome, replicas int) Summary {
	s := Summary{Requests: len(out)}
	if len(out) == 0 {
		return s
	}
	ttft := make([]float64, len(out))
	work := make([]float64, replicas)
	var prompt, cached, all float64
	for i, o := range out {
		ttft[i] = o.TTFT.Seconds()
		s.Mean += ttft[i] / float64(len(out))
		s.Total += o.Total.Seconds() / float64(len(out))
		s.Waited += o.Waited.Seconds() / float64(len(out))
		prompt += float64(o.Prompt)
		cached += float64(o.Cached)
		work[o.Replica] += float64(o.Prompt - o.Cached)
		all += float64(o.Prompt - o.Cached)
	}
	slices.Sort(ttft)
	at := func(q float64) float64 { return ttft[min(len(ttft)-1, int(q*float64(len(ttft))))] }
	s.P50, s.P90, s.P99 = at(0.5), at(0.9), at(0.99)
	s.HitRate = cached / prompt
	s.Busiest = slices.Max(work) / (all / float64(replicas))
	return s
}
