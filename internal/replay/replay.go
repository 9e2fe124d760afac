// SPDX-License-Identifier: Apache-2.0

// Package replay plays traffic against simulated replicas in virtual time,
// thousands of times faster than the wall clock, and measures what a policy
// makes of it: hit rate, time to first token, load per replica.
//
// The two policies of this module run through the very code that a request in
// Caddy takes (packages plan, fleet and residency); only what a proxy does around
// it, reading bodies and scraping pages, is left out. The rules of other routers
// are written anew from their descriptions, to compare with.
//
// [Load] takes traffic in, [Run] plays it once, and [Study] plays it for many
// policies and seeds and tells which differences are more than noise.
package replay

import (
	"container/heap"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/enginesim"
)

// Setup says what is simulated.
type Setup struct {
	// Engines has one entry for each replica.
	Engines []enginesim.Config
	// Scrape is the time between two looks at a replica's metrics, 0 for none.
	Scrape time.Duration
	// Untold are the parts of a metrics page that the replicas' pages lack.
	Untold []Part
	// Caddys is how many Caddys there are in front of the replicas, none of which
	// knows what the others send. Default: 1.
	Caddys int
	// Rate multiplies the arrival rate of the traffic. Default: 1.
	Rate float64
	// Changes are what happens to replicas on the way.
	Changes []Change
	// Seed chooses what is random: names of replicas, ties, the arrivals' Jitter.
	Seed uint64
	// Jitter is the most that a request (or the start of a session) is late by
	// chance. Where it is not 0, seeds differ in their arrivals.
	Jitter time.Duration
	// Copies is how many times each session is played; copies share with each
	// other what different recorded sessions share, which is a system prompt,
	// and no more. Sessions alone can be copied. Default: 1.
	Copies int
	// Ramp is the time over which copies start. Default: as recorded.
	Ramp time.Duration
}

func (s Setup) withDefaults() Setup {
	if s.Rate <= 0 {
		s.Rate = 1
	}
	s.Copies = max(1, s.Copies)
	return s
}

func (s Setup) validate(t *Traffic) error {
	if len(s.Engines) == 0 {
		return errors.New("no replica to replay with")
	}
	if s.Copies > 1 && !t.Closed() {
		return fmt.Errorf("copies is %d, but the trace has no sessions that could be copied; raise the rate instead", s.Copies)
	}
	for i, e := range s.Engines {
		if !slices.Contains(t.sizes, blockTokens(e)) {
			return fmt.Errorf("replica %d has blocks of %d tokens, but the traffic was loaded for %v", i, blockTokens(e), t.sizes)
		}
	}
	for _, c := range s.Changes {
		if c.Replica < 0 || c.Replica >= len(s.Engines) {
			return fmt.Errorf("%v names replica %d, but there are only 0 to %d", c, c.Replica, len(s.Engines)-1)
		}
	}
	return nil
}

// blockTokens is the block size that an engine of this configuration has.
func blockTokens(c enginesim.Config) int {
	if c.BlockTokens > 0 {
		return c.BlockTokens
	}
	return enginesim.DefaultBlockTokens
}

// Outcome is what became of one request, in virtual time.
type Outcome struct {
	// Arrived is when the request came; TTFT and Total how long after that its
	// first and its last token came, and Held how much of it the router kept it.
	Arrived, TTFT, Total, Held time.Duration
	// Prompt is its length and Cached what of it was not computed, in tokens.
	Prompt, Cached int
	// Replica is where it was answered and Reason why it went there.
	Replica int
	Reason  string
	// Retries counts the attempts that a replica's end cut short.
	Retries int
	// Failed: no replica took it. The times are zero.
	Failed bool
}

// Run plays traffic once and returns the outcomes in order of completion.
func Run(setup Setup, p Policy, t *Traffic) ([]Outcome, error) {
	return run(setup, p, t, nil)
}

// run also reports each request that is done with.
func run(setup Setup, p Policy, t *Traffic, done func()) ([]Outcome, error) {
	setup = setup.withDefaults()
	if err := setup.validate(t); err != nil {
		return nil, err
	}
	s := &simulation{policy: p, traffic: t, done: done}
	s.fleet = newFleet(setup, s)
	s.changes = changesInOrder(setup.Changes)
	s.source = t.source(setup)
	s.out = make([]Outcome, 0, t.Count()*setup.Copies)
	p.Start(s.fleet)
	s.run()
	return s.out, s.err
}

const never = time.Duration(math.MaxInt64)

type simulation struct {
	fleet   *Fleet
	policy  Policy
	traffic *Traffic
	source  source
	changes []Change
	number  int
	out     []Outcome
	err     error
	done    func()
	lost    []*Request // by a restart, to be tried again
	told    []progress // by the engines, to be told to the policy
}

// progress is a first token or the end of a request. Policies hear of it when
// all engines have come to the same time, since what they do then may concern
// any of them.
type progress struct {
	request  *Request
	at       time.Duration
	finished bool
}

func (s *simulation) run() {
	now, scrape := time.Duration(0), time.Duration(0) // pollers begin at once
	if s.fleet.Setup.Scrape <= 0 {
		scrape = never
	}
	for s.err == nil {
		wake := never // when the policy acts by itself
		if at, ok := s.policy.Next(now); ok {
			wake = max(at, now)
		}
		next := min(s.next(), wake)
		if next == never {
			return
		}
		now = min(next, scrape)
		for _, e := range s.fleet.Engines {
			e.Advance(now)
		}
		s.tell()
		s.change(now)
		if now >= scrape {
			s.scrape(now)
			scrape += s.fleet.Setup.Scrape
		}
		for s.err == nil && s.source.due() <= now {
			s.arrive(now)
		}
		if wake <= now {
			s.policy.Act(now)
		}
	}
}

// next is when something happens next, scrapes and the policy's own acts left
// out; never if nothing will.
func (s *simulation) next() time.Duration {
	next := s.source.due()
	for _, e := range s.fleet.Engines {
		if at, ok := e.Next(); ok {
			next = min(next, at)
		}
	}
	if next < never && len(s.changes) > 0 {
		next = min(next, s.changes[0].At)
	}
	return next
}

func (s *simulation) scrape(now time.Duration) {
	for i, e := range s.fleet.Engines {
		if s.fleet.up[i] {
			s.policy.Scraped(now, i, e.Stats())
		}
	}
}

func (s *simulation) change(now time.Duration) {
	for len(s.changes) > 0 && s.changes[0].At <= now {
		c := s.changes[0]
		s.changes = s.changes[1:]
		s.fleet.apply(now, c)
		s.policy.Changed(now, c.Replica)
		for _, r := range s.lost {
			s.policy.Lost(now, r)
		}
		for _, r := range s.lost {
			s.retry(now, r)
		}
		s.lost = s.lost[:0]
	}
}

func (s *simulation) arrive(now time.Duration) {
	c := s.source.take(now)
	r := &Request{
		call: c, Number: s.number, Arrived: now,
		Session: c.session(), Text: c.chain(0), Shared: c.shared[0],
		Turn: c.turn, TurnKey: c.turnKey(),
		PromptTokens: c.promptTokens, OutputTokens: c.outputTokens,
	}
	s.number++
	s.policy.Arrive(now, r)
}

func (s *simulation) send(now time.Duration, r *Request, replica int, reason string) {
	r.Sent, r.Replica, r.Reason = now, replica, reason
	r.engine = s.prepare(r, replica)
	if err := s.fleet.Engines[replica].Submit(now, r.engine); err != nil {
		s.err = fmt.Errorf("request %d at replica %d: %w", r.Number, replica, err)
	}
}

// prepare makes what an engine is to be given of a request.
func (s *simulation) prepare(r *Request, replica int) *enginesim.Request {
	size := 1 + slices.Index(s.traffic.sizes, s.fleet.Engines[replica].Config().BlockTokens)
	return &enginesim.Request{
		Blocks:       r.call.chain(size),
		PromptTokens: r.PromptTokens,
		OutputTokens: r.OutputTokens,
		OnFirstToken: func(at time.Duration, _ *enginesim.Request) { s.told = append(s.told, progress{r, at, false}) },
		OnFinish: func(at time.Duration, e *enginesim.Request) {
			if e.Aborted {
				s.lost = append(s.lost, r)
				return
			}
			s.told = append(s.told, progress{r, at, true})
		},
	}
}

func (s *simulation) tell() {
	for i := 0; i < len(s.told); i++ {
		if p := s.told[i]; p.finished {
			s.finish(p.at, p.request)
		} else {
			s.policy.FirstToken(p.at, p.request)
		}
	}
	clear(s.told)
	s.told = s.told[:0]
}

// retry is what Caddy does when an attempt fails before the answer began: it
// selects again. One whose answer had begun is broken.
func (s *simulation) retry(now time.Duration, r *Request) {
	begun := r.engine.FirstToken > 0
	r.engine = nil
	if begun {
		s.refuse(now, r)
		return
	}
	r.Retries++
	s.policy.Arrive(now, r)
}

func (s *simulation) refuse(now time.Duration, r *Request) {
	s.conclude(now, r, Outcome{Failed: true})
}

func (s *simulation) finish(at time.Duration, r *Request) {
	s.policy.Finished(at, r)
	s.conclude(at, r, Outcome{
		TTFT: r.engine.FirstToken - r.Arrived, Total: at - r.Arrived, Held: r.Sent - r.Arrived,
		Cached: r.engine.Cached, Replica: r.Replica, Reason: r.Reason,
	})
}

func (s *simulation) conclude(now time.Duration, r *Request, o Outcome) {
	o.Arrived, o.Prompt, o.Retries = r.Arrived, r.PromptTokens, r.Retries
	s.out = append(s.out, o)
	s.source.answered(r.call, now)
	if s.done != nil {
		s.done()
	}
}

// source gives out requests when they are due.
type source interface {
	// due is when the next one comes, never if none does for now.
	due() time.Duration
	take(now time.Duration) *call
	// answered makes the next of a session due.
	answered(c *call, now time.Duration)
}

// schedule is a heap of calls by the time they are due.
type schedule []*call

func (s schedule) Len() int { return len(s) }
func (s schedule) Less(i, j int) bool {
	return s[i].at < s[j].at || s[i].at == s[j].at && s[i].order < s[j].order
}
func (s schedule) Swap(i, j int) { s[i], s[j] = s[j], s[i] }
func (s *schedule) Push(x any)   { *s = append(*s, x.(*call)) }
func (s *schedule) Pop() any {
	old := *s
	last := old[len(old)-1]
	*s = old[:len(old)-1]
	return last
}

func (s schedule) due() time.Duration {
	if len(s) == 0 {
		return never
	}
	return s[0].at
}

func (s *schedule) take(time.Duration) *call { return heap.Pop(s).(*call) }

func (s *schedule) answered(c *call, now time.Duration) {
	if next := c.after(now); next != nil {
		heap.Push(s, next)
	}
}
