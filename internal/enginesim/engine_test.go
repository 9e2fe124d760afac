// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"errors"
	"slices"
	"testing"
	"time"
)

// chain returns the hashes of n blocks that begin a prompt of the given family.
func chain(family uint64, n int) []uint64 {
	blocks := make([]uint64, n)
	hash := family
	for i := range blocks {
		hash = mix(hash)
		blocks[i] = hash
	}
	return blocks
}

// prompting returns a request of n tokens whose full blocks are the family's.
func prompting(family uint64, n, output int) *Request {
	return &Request{Blocks: chain(family, n/DefaultBlockTokens), PromptTokens: n, OutputTokens: output}
}

// drain runs the engine until it is idle and returns the time.
func drain(e *Engine) time.Duration {
	for at, busy := e.Next(); busy; at, busy = e.Next() {
		e.Advance(at)
	}
	return e.Stats().At
}

func submitAll(t *testing.T, e *Engine, now time.Duration, requests ...*Request) {
	t.Helper()
	for _, r := range requests {
		if err := e.Submit(now, r); err != nil {
			t.Fatal(err)
		}
	}
}

func TestHitLength(t *testing.T) {
	for _, test := range []struct {
		name         string
		first, again int // prompt tokens
		output       int // tokens generated for the first
		want         int
	}{
		{"one token short of a block", 15, 15, 1, 0},
		{"a whole block recomputes it", 16, 16, 1, 0},
		{"a block and a token", 17, 17, 1, 16},
		{"exact multiple", 160, 160, 1, 144},
		{"past a multiple", 165, 165, 1, 160},
		{"shorter prefix", 165, 64, 1, 48},
		{"longer prompt", 100, 1000, 1, 96},
	} {
		t.Run(test.name, func(t *testing.T) {
			e := New(Config{})
			submitAll(t, e, 0, prompting(1, test.first, test.output))
			again := prompting(1, test.again, 1)
			submitAll(t, e, drain(e), again)
			drain(e)
			if again.Cached != test.want {
				t.Errorf("%d tokens cached, want %d", again.Cached, test.want)
			}
			if s := e.Stats(); s.PrefixHits != int64(test.want) || s.PrefixQueries != int64(test.first+test.again) {
				t.Errorf("%d of %d tokens hit", s.PrefixHits, s.PrefixQueries)
			}
		})
	}
}

// TestAnswerIsCached: prompt and answer but for the last token, whose KV is never
// computed, can be hit by the next turn.
func TestAnswerIsCached(t *testing.T) {
	for _, test := range []struct{ prompt, output, want int }{
		{20, 12, 16}, // 31 tokens stored
		{20, 13, 32}, // 32 tokens stored
		{16, 1, 16},
		{16, 17, 32},
	} {
		e := New(Config{})
		all := chain(1, 10)
		r := &Request{Blocks: all[:test.prompt/16], PromptTokens: test.prompt, OutputTokens: test.output}
		r.Output = func(i int) uint64 { return all[test.prompt/16+i] }
		submitAll(t, e, 0, r)
		next := &Request{Blocks: all, PromptTokens: 160, OutputTokens: 1}
		submitAll(t, e, drain(e), next)
		drain(e)
		if next.Cached != test.want {
			t.Errorf("%d + %d tokens: %d cached, want %d", test.prompt, test.output, next.Cached, test.want)
		}
	}
}

func TestNoPrefixCaching(t *testing.T) {
	e := New(Config{NoPrefixCaching: true})
	submitAll(t, e, 0, prompting(1, 100, 1))
	again := prompting(1, 100, 1)
	submitAll(t, e, drain(e), again)
	drain(e)
	if again.Cached != 0 {
		t.Errorf("%d tokens cached", again.Cached)
	}
}

// TestEvictionTakesTails: with room for three prompts of ten blocks and one of them
// used last, a new one takes the tail of the least recently freed.
func TestEvictionTakesTails(t *testing.T) {
	e := New(Config{Blocks: 31})
	for family := range uint64(3) {
		submitAll(t, e, e.Stats().At, prompting(family, 160, 1))
		drain(e)
	}
	submitAll(t, e, e.Stats().At, prompting(0, 160, 1)) // family 1 is now the oldest
	drain(e)
	submitAll(t, e, e.Stats().At, prompting(9, 64, 1)) // takes 4 blocks
	drain(e)

	cached := func(family uint64) int {
		n := 0
		for _, hash := range chain(family, 10) {
			if e.pool.lookup(hash) != nullBlock {
				n++
			}
		}
		return n
	}
	// Family 0 recomputed its last block in the block that had cached it, which was
	// at the head of the free queue.
	if got := []int{cached(0), cached(1), cached(2)}; !slices.Equal(got, []int{10, 6, 10}) {
		t.Errorf("blocks left %v, want [10 6 10]", got)
	}
	head := chain(1, 6)
	for i, hash := range head {
		if e.pool.lookup(hash) == nullBlock {
			t.Errorf("block %d of family 1 went before its tail", i)
		}
	}
}

// TestDuplicates: two equal prompts in one step. The second finds what the first
// stores while it is scheduled, but for the block of the last token.
func TestDuplicates(t *testing.T) {
	e := New(Config{})
	blocker := prompting(7, 16, 1)
	a, b := prompting(1, 160, 1), prompting(1, 160, 1)
	submitAll(t, e, 0, blocker, a, b)
	drain(e)
	if a.Cached != 0 || b.Cached != 144 || a.Admitted != b.Admitted {
		t.Errorf("cached %d and %d tokens, admitted %v and %v", a.Cached, b.Cached, a.Admitted, b.Admitted)
	}
	// Both hold the last block; forgetting one copy leaves the other.
	last := a.Blocks[9]
	first := e.pool.lookup(last)
	twin := e.pool.blocks[first].twin
	if twin == nullBlock {
		t.Fatal("no duplicate of the last block")
	}
	e.pool.forget(first)
	if got := e.pool.lookup(last); got != twin {
		t.Errorf("block %d found, want its twin %d", got, twin)
	}
	e.pool.forget(twin)
	if got := e.pool.lookup(last); got != nullBlock {
		t.Errorf("block %d found after both were forgotten", got)
	}
}

func TestStepCost(t *testing.T) {
	e := New(Config{StepOverhead: time.Millisecond, PrefillRate: 1000, DecodeCost: 10 * time.Microsecond, MaxBatchedTokens: 100})
	r := prompting(1, 250, 3)
	var tokens []time.Duration
	r.OnToken = func(now time.Duration, _ *Request) { tokens = append(tokens, now) }
	submitAll(t, e, time.Second, r)
	drain(e)
	first := time.Second + 250*time.Millisecond + 3*time.Millisecond // three chunks
	decode := time.Millisecond + 10*time.Microsecond
	if want := []time.Duration{first, first + decode, first + 2*decode}; !slices.Equal(tokens, want) {
		t.Errorf("tokens at %v, want %v", tokens, want)
	}
	if r.FirstToken != first || r.Finished != first+2*decode || r.Admitted != time.Second {
		t.Errorf("admitted %v, first %v, finished %v", r.Admitted, r.FirstToken, r.Finished)
	}
}

// TestChunksLeaveRoomForDecodes: while a long prompt is computed in chunks, a
// sequence admitted before gets a token with every step.
func TestChunksLeaveRoomForDecodes(t *testing.T) {
	e := New(Config{MaxBatchedTokens: 64})
	short, long := prompting(1, 10, 50), prompting(2, 630, 1)
	var steps []Step
	e.OnStep = func(s Step) { steps = append(steps, s) }
	submitAll(t, e, 0, short, long)
	for long.FirstToken == 0 {
		at, _ := e.Next()
		e.Advance(at)
	}
	// 63 tokens a step beside one decode.
	if len(steps) != 11 || short.Generated != 11 {
		t.Errorf("%d steps, %d tokens beside, want 11 and 11", len(steps), short.Generated)
	}
	for _, s := range steps[1:] {
		if s.PrefillTokens != 63 || s.Decoding != 1 {
			t.Errorf("step of %d prefill and %d decoding, want 63 and 1", s.PrefillTokens, s.Decoding)
		}
	}
}

func TestFirstComeFirstServed(t *testing.T) {
	e := New(Config{MaxSeqs: 1})
	var order []int
	for i := range 5 {
		r := prompting(uint64(i), 100*(5-i), 2)
		r.OnFinish = func(time.Duration, *Request) { order = append(order, i) }
		submitAll(t, e, 0, r)
	}
	drain(e)
	if !slices.Equal(order, []int{0, 1, 2, 3, 4}) {
		t.Errorf("finished in order %v", order)
	}
}

// TestGaugesLag: what arrives during a step is not published at its end, as it has
// not reached the waiting queue by then.
func TestGaugesLag(t *testing.T) {
	e := New(Config{MaxSeqs: 1})
	submitAll(t, e, 0, prompting(1, 100, 2), prompting(2, 100, 2), prompting(3, 100, 2))
	if s := e.Stats(); s.Running != 0 || s.Waiting != 0 || s.PrefixQueries != 0 {
		t.Errorf("published before the first step ended: %+v", s)
	}
	for i, want := range []Gauges{{Running: 1}, {Waiting: 2}, {Running: 1, Waiting: 1}, {Waiting: 1}, {Running: 1}, {}} {
		at, _ := e.Next()
		e.Advance(at)
		got := e.Stats().Gauges
		if got.Running != want.Running || got.Waiting != want.Waiting {
			t.Errorf("after step %d: %+v, want %+v", i+1, got, want)
		}
		if (got.KVUsage > 0) != (got.Running > 0) {
			t.Errorf("after step %d: usage %v with %d running", i+1, got.KVUsage, got.Running)
		}
	}
}

// TestAdmissionReservesPrompt: a prompt that does not fit as a whole waits, unless
// admission is by chunk.
func TestAdmissionReservesPrompt(t *testing.T) {
	for _, byChunk := range []bool{false, true} {
		e := New(Config{Blocks: 101, MaxBatchedTokens: 320, AdmitByChunk: byChunk})
		first, second := prompting(1, 800, 100), prompting(2, 1200, 1)
		submitAll(t, e, 0, first, second)
		drain(e)
		if early := second.Admitted < first.Finished; early != byChunk {
			t.Errorf("by chunk %t: admitted at %v, first finished at %v", byChunk, second.Admitted, first.Finished)
		}
	}
}

// TestPreemption: two sequences that outgrow the cache together. The one admitted
// last is recomputed, with its own blocks as far as they are left.
func TestPreemption(t *testing.T) {
	e := New(Config{Blocks: 21})
	first, second := prompting(1, 150, 100), prompting(2, 150, 100)
	submitAll(t, e, 0, first, second)
	drain(e)
	if first.Preemptions != 0 || second.Preemptions != 1 {
		t.Errorf("preemptions %d and %d, want 0 and 1", first.Preemptions, second.Preemptions)
	}
	if second.Generated != 100 || second.Finished <= first.Finished {
		t.Errorf("second: %d tokens at %v, first at %v", second.Generated, second.Finished, first.Finished)
	}
	s := e.Stats()
	if s.Preemptions != 1 || s.PrefixQueries != 300 || s.FirstTokens != 2 || s.PromptTokens != 300 {
		t.Errorf("counters %+v", s.Counters)
	}
}

func TestQueueFull(t *testing.T) {
	e := New(Config{MaxSeqs: 1, MaxQueued: 2})
	submitAll(t, e, 0, prompting(1, 100, 1), prompting(2, 100, 1), prompting(3, 100, 1))
	if err := e.Submit(0, prompting(4, 100, 1)); !errors.Is(err, ErrQueueFull) {
		t.Errorf("error %v, want ErrQueueFull", err)
	}
	drain(e)
	if s := e.Stats(); s.Rejected != 1 || s.Finished != 3 {
		t.Errorf("rejected %d, finished %d", s.Rejected, s.Finished)
	}
}

func TestTooLong(t *testing.T) {
	e := New(Config{Blocks: 11})
	for _, r := range []*Request{prompting(1, 160, 1), prompting(1, 0, 1), prompting(1, 10, -1)} {
		if err := e.Submit(0, r); !errors.Is(err, ErrTooLong) {
			t.Errorf("%d + %d tokens: error %v, want ErrTooLong", r.PromptTokens, r.OutputTokens, err)
		}
	}
	submitAll(t, e, 0, prompting(1, 159, 1))
}

func TestPoolingRequest(t *testing.T) {
	e := New(Config{})
	r := prompting(1, 100, 0)
	calls := ""
	r.OnFirstToken = func(time.Duration, *Request) { calls += "f" }
	r.OnToken = func(time.Duration, *Request) { calls += "t" }
	r.OnFinish = func(time.Duration, *Request) { calls += "e" }
	submitAll(t, e, 0, r)
	drain(e)
	if calls != "fe" || r.Generated != 0 || r.Finished != r.FirstToken || e.Stats().GenerationTokens != 0 {
		t.Errorf("calls %q, request %+v", calls, r)
	}
}

func TestAbort(t *testing.T) {
	e := New(Config{MaxSeqs: 1})
	running, waiting, fresh, last := prompting(1, 100, 50), prompting(2, 100, 1), prompting(3, 100, 1), prompting(4, 100, 1)
	called := false
	running.OnFinish = func(time.Duration, *Request) { called = true }
	submitAll(t, e, 0, running, waiting)
	at, _ := e.Next()
	e.Advance(at)
	submitAll(t, e, at, fresh, last) // still in the inbox
	end, _ := e.Next()
	for _, r := range []*Request{running, waiting, fresh, running} {
		e.Abort(at, r)
	}
	if e.pool.used() != 0 {
		t.Errorf("%d blocks in use after the abort", e.pool.used())
	}
	if again, busy := e.Next(); !busy || again != end {
		t.Errorf("step ends at %v, was %v", again, end)
	}
	drain(e)
	if s := e.Stats(); s.Aborted != 3 || s.Finished != 1 || called || last.Generated != 1 || last.Admitted != end {
		t.Errorf("stats %+v, callback %t, last %+v", s, called, last)
	}
}

// TestCallbacks submit and abort from within.
func TestCallbacks(t *testing.T) {
	e := New(Config{})
	victim := prompting(2, 100, 1000)
	follower := prompting(3, 100, 1)
	first := prompting(1, 100, 2)
	first.OnFirstToken = func(now time.Duration, _ *Request) { submitAll(t, e, now, follower) }
	first.OnFinish = func(now time.Duration, _ *Request) { e.Abort(now, victim) }
	submitAll(t, e, 0, first, victim)
	drain(e)
	if follower.Submitted != first.FirstToken || follower.Admitted != first.FirstToken {
		t.Errorf("follower submitted %v, admitted %v, want both %v", follower.Submitted, follower.Admitted, first.FirstToken)
	}
	if !victim.Aborted || victim.Finished != first.Finished || e.pool.used() != 0 {
		t.Errorf("victim %+v, %d blocks in use", victim, e.pool.used())
	}
}

func TestResetAndRestart(t *testing.T) {
	e := New(Config{})
	r := prompting(1, 100, 10)
	submitAll(t, e, 0, r)
	if e.Reset(0) {
		t.Error("reset while blocks are in use")
	}
	now := drain(e)
	if !e.Reset(now) || e.pool.lookup(r.Blocks[0]) != nullBlock {
		t.Error("not reset")
	}

	lost := prompting(1, 100, 10)
	calls := 0
	lost.OnFinish = func(time.Duration, *Request) { calls++ }
	queued := prompting(2, 100, 10)
	submitAll(t, e, now, lost, queued)
	e.Restart(now)
	if !lost.Aborted || !queued.Aborted || calls != 1 {
		t.Errorf("lost %t, queued %t, %d calls", lost.Aborted, queued.Aborted, calls)
	}
	if s := e.Stats(); s.Counters != (Counters{}) || e.pool.used() != 0 {
		t.Errorf("after restart: %+v, %d blocks in use", s, e.pool.used())
	}
	e.Abort(now, lost) // of no effect
	submitAll(t, e, now, prompting(1, 100, 1))
	drain(e)
	if s := e.Stats(); s.Finished != 1 || s.PrefixHits != 0 || s.Aborted != 0 {
		t.Errorf("after restart: %+v", s)
	}
}

// TestCatchUp: steps that are completed late end when they would have.
func TestCatchUp(t *testing.T) {
	prompt, late := New(Config{}), New(Config{})
	a, b := prompting(1, 5000, 100), prompting(1, 5000, 100)
	submitAll(t, prompt, 0, a)
	submitAll(t, late, 0, b)
	drain(prompt)
	late.Advance(time.Hour)
	if a.Finished != b.Finished || prompt.Stats() != late.Stats() {
		t.Errorf("finished at %v and %v", a.Finished, b.Finished)
	}
}
