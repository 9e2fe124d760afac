// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"errors"
	"fmt"
	"slices"
	"time"
)

// Errors returned by [Engine.Submit].
var (
	// ErrQueueFull means that MaxQueued requests are waiting.
	ErrQueueFull = errors.New("too many requests are waiting")
	// ErrTooLong means that the request can never fit.
	ErrTooLong = errors.New("request is longer than the model's context")
)

// Request is one prompt with a known number of output tokens. The caller fills in
// the first group of fields, the engine the others. A Request belongs to its
// engine from Submit until it is finished or aborted.
type Request struct {
	// Blocks holds the chained content hash of each full block of the prompt.
	// Blocks that are missing at the end are taken to be like no other.
	Blocks []uint64
	// PromptTokens is the length of the prompt, at least 1.
	PromptTokens int
	// OutputTokens is the number of tokens to generate. 0 is a pooling request,
	// which is finished with its prefill.
	OutputTokens int
	// Output returns the chained hash of the i-th block completed after the full
	// blocks of the prompt, the one with the prompt's last tokens included. Nil
	// means blocks like no other.
	Output func(i int) uint64

	// OnFirstToken is called at the end of the step that completes the prefill.
	OnFirstToken func(now time.Duration, r *Request)
	// OnToken is called at the end of every step that produced a token of this
	// request, the first included.
	OnToken func(now time.Duration, r *Request)
	// OnFinish is called once, after the last token, or when a restart loses the
	// request (Aborted is set then). It is not called for Abort.
	OnFinish func(now time.Duration, r *Request)

	// Cached is the number of prompt tokens found in the cache at admission.
	Cached int
	// Generated is the number of output tokens so far.
	Generated int
	// Preemptions counts how often the request lost its blocks.
	Preemptions int
	// Submitted, Admitted, FirstToken and Finished are times since the engine's
	// start. Admitted is the start of the first step that ran the request.
	Submitted, Admitted, FirstToken, Finished time.Duration
	// Aborted is set when the request was aborted or lost in a restart.
	Aborted bool

	source *prompt // has the tokens, for KV events; nil if there are none
	sequence
}

// sequence is the scheduler's part of a request.
type sequence struct {
	blocks    []blockID
	computed  int // tokens whose KV is in blocks
	scheduled int // tokens being computed in the current step
	stored    int // leading blocks already offered to the prefix cache
	serial    uint64
	state     sequenceState
}

type sequenceState uint8

const (
	stateNew sequenceState = iota
	stateWaiting
	stateRunning
	stateDone
)

// tokens returns the number of tokens known so far: the prompt and what has been
// generated.
func (r *Request) tokens() int { return r.PromptTokens + r.Generated }

// Engine is one simulated inference engine. It is not safe for concurrent use.
//
// Time is a duration since the engine's start and never goes back. Callbacks run
// inside Advance (or Submit, Abort and Reset, which advance first) and may call
// Submit and Abort.
type Engine struct {
	// OnStep is called at the end of every step, before the requests' callbacks.
	OnStep func(Step)

	onStored func(r *Request, i int) // the prefix cache took in a sequence's i-th block; may be nil
	onReset  func()                  // it was cleared; may be nil

	config  Config
	pool    *blockPool
	inbox   []*Request // arrived since the current step began
	waiting requestQueue
	running []*Request

	step      Step
	stepping  bool // a step is being computed
	advancing bool // inside Advance
	produced  []*Request

	serial    uint64
	counters  Counters
	published Stats
	spare     [][]blockID // block lists of finished sequences, for reuse
}

// New returns an idle engine with an empty cache.
func New(config Config) *Engine {
	config = config.withDefaults()
	return &Engine{config: config, pool: newBlockPool(config.Blocks)}
}

// Config returns the configuration with all defaults filled in.
func (e *Engine) Config() Config { return e.config }

// Stats returns the figures published at the end of the last step.
func (e *Engine) Stats() Stats { return e.published }

// Submit hands a request to the engine at the given time. An idle engine starts a
// step at once; otherwise the request is considered when the current step ends.
// The error is ErrQueueFull or wraps ErrTooLong.
func (e *Engine) Submit(now time.Duration, r *Request) error {
	e.Advance(now)
	if r.PromptTokens < 1 || r.OutputTokens < 0 || r.PromptTokens+r.OutputTokens > e.config.MaxModelTokens {
		return fmt.Errorf("%w: %d prompt and %d output tokens, at least 1 and at most %d in all",
			ErrTooLong, r.PromptTokens, r.OutputTokens, e.config.MaxModelTokens)
	}
	if e.config.MaxQueued > 0 && e.Queued() >= e.config.MaxQueued {
		e.counters.Rejected++
		return ErrQueueFull
	}

	e.serial++
	r.sequence = sequence{serial: e.serial, state: stateWaiting}
	r.Submitted = now
	e.inbox = append(e.inbox, r)
	if !e.advancing && !e.stepping {
		e.startStep(now)
	}
	return nil
}

// Queued returns the number of requests that wait, those included that arrived
// during the current step. Unlike Stats it is current.
func (e *Engine) Queued() int { return len(e.inbox) + e.waiting.len() }

// Abort ends a request at the given time, whatever its state, and frees its
// blocks. The step in progress takes as long as it would have.
func (e *Engine) Abort(now time.Duration, r *Request) {
	e.Advance(now)
	switch r.state {
	case stateWaiting:
		if !e.waiting.remove(r) {
			e.inbox = slices.DeleteFunc(e.inbox, func(q *Request) bool { return q == r })
		}
	case stateRunning:
		e.running = slices.DeleteFunc(e.running, func(q *Request) bool { return q == r })
	default:
		return
	}
	e.freeBlocks(r)
	r.state, r.Aborted, r.Finished = stateDone, true, now
	e.counters.Aborted++
}

// Next returns the time at which the current step ends; false means that the
// engine is idle.
func (e *Engine) Next() (time.Duration, bool) { return e.step.End, e.stepping }

// Advance completes all steps that end at or before the given time.
func (e *Engine) Advance(now time.Duration) {
	if e.advancing {
		return // called from a callback: the steps are being run already
	}
	e.advancing = true
	for e.stepping && e.step.End <= now {
		e.finishStep()
		e.startStep(e.step.End)
	}
	e.advancing = false
}

// Reset clears the prefix cache. Like vLLM it refuses, and returns false, while
// any block is in use.
func (e *Engine) Reset(now time.Duration) bool {
	e.Advance(now)
	if e.pool.used() > 0 {
		return false
	}
	e.pool.reset()
	if e.onReset != nil {
		e.onReset()
	}
	return true
}

// Restart models a crash: all requests are lost, the cache and the counters start
// from nothing. The lost requests' OnFinish is called with Aborted set. It must
// not be called from a callback.
func (e *Engine) Restart(now time.Duration) {
	e.Advance(now)
	lost := slices.Concat(e.running, e.waiting.all(), e.inbox)
	e.running, e.inbox, e.waiting = nil, nil, requestQueue{}
	e.stepping = false
	e.pool.reset()
	e.counters, e.published = Counters{}, Stats{At: now}
	for _, r := range lost {
		r.sequence = sequence{state: stateDone}
		r.Aborted, r.Finished = true, now
		if r.OnFinish != nil {
			r.OnFinish(now, r)
		}
	}
}

// startStep schedules the next step, if there is anything to compute.
func (e *Engine) startStep(now time.Duration) {
	e.waiting.push(e.inbox...)
	clear(e.inbox)
	e.inbox = e.inbox[:0]

	e.step = Step{Start: now}
	e.schedule(now)
	e.stepping = len(e.running) > 0
	if !e.stepping {
		return
	}
	seconds := float64(e.step.PrefillTokens) / e.config.PrefillRate
	e.step.End = now + e.config.StepOverhead +
		time.Duration(seconds*float64(time.Second)) +
		time.Duration(e.step.Decoding)*e.config.DecodeCost
}

// schedule fills the step's token budget: running sequences in order of
// admission, then waiting ones.
func (e *Engine) schedule(now time.Duration) {
	budget := e.config.MaxBatchedTokens
	preempted := false
	for i := 0; i < len(e.running); i++ {
		r := e.running[i]
		r.scheduled = 0
		n := min(r.tokens()-r.computed, budget)
		if n == 0 {
			continue
		}
		for !e.hasRoom(r, n) {
			preempted = true
			e.preemptLast()
			if r.state == stateWaiting {
				break // it was the last itself
			}
		}
		if r.state == stateWaiting {
			break
		}
		e.extend(r, n)
		budget -= n
	}
	if preempted {
		return
	}
	for budget > 0 && len(e.running) < e.config.MaxSeqs && e.waiting.len() > 0 {
		n, ok := e.admit(now, e.waiting.front(), budget)
		if !ok {
			break
		}
		e.waiting.pop()
		budget -= n
	}
}

// admit moves a waiting request into the batch if its blocks are to be had, and
// returns the number of tokens it takes from the budget.
func (e *Engine) admit(now time.Duration, r *Request, budget int) (int, bool) {
	hits, idle := e.match(r)
	cached := hits * e.config.BlockTokens
	n := min(r.tokens()-cached, budget)

	reserve := r.tokens()
	if e.config.AdmitByChunk {
		reserve = cached + n
	}
	// A hit on a free block takes it out of the free queue as an allocation would.
	if e.blocksFor(reserve)-hits+idle > e.pool.free {
		return 0, false
	}

	r.blocks = e.blockList(e.blocksFor(r.PromptTokens + r.OutputTokens))
	for i := range hits {
		id := e.pool.lookup(e.hashOf(r, i))
		e.pool.acquire(id)
		r.blocks = append(r.blocks, id)
	}
	r.computed, r.stored = cached, hits
	r.state = stateRunning
	if r.Preemptions == 0 {
		r.Cached, r.Admitted = cached, now
		e.counters.PrefixQueries += int64(r.PromptTokens)
		e.counters.PrefixHits += int64(cached)
	}
	e.extend(r, n)
	e.running = append(e.running, r)
	return n, true
}

// match returns how many leading blocks of a request are cached, and how many of
// these have no user. The last token is never taken from the cache: its logits
// have to be computed.
func (e *Engine) match(r *Request) (hits, idle int) {
	if e.config.NoPrefixCaching {
		return 0, 0
	}
	limit := (r.tokens() - 1) / e.config.BlockTokens
	for hits < limit {
		id := e.pool.lookup(e.hashOf(r, hits))
		if id == nullBlock {
			break
		}
		if e.pool.blocks[id].refs == 0 {
			idle++
		}
		hits++
	}
	return hits, idle
}

// hasRoom tells whether n more tokens of a running sequence can be stored.
func (e *Engine) hasRoom(r *Request, n int) bool {
	return e.blocksFor(r.computed+n)-len(r.blocks) <= e.pool.free
}

// extend allocates blocks for n more tokens, offers the blocks they fill to the
// prefix cache, and enters the tokens into the step.
func (e *Engine) extend(r *Request, n int) {
	end := r.computed + n
	for len(r.blocks)*e.config.BlockTokens < end {
		r.blocks = append(r.blocks, e.pool.allocate())
	}
	if !e.config.NoPrefixCaching {
		for (r.stored+1)*e.config.BlockTokens <= end {
			e.pool.store(r.blocks[r.stored], e.hashOf(r, r.stored))
			if e.onStored != nil {
				e.onStored(r, r.stored)
			}
			r.stored++
		}
	}
	r.scheduled = n
	if n == 1 && r.Generated > 0 && end == r.tokens() {
		e.step.Decoding++
	} else {
		e.step.PrefillTokens += n
	}
}

// hashOf returns the content hash of a sequence's i-th block.
func (e *Engine) hashOf(r *Request, i int) uint64 {
	if i < len(r.Blocks) {
		return r.Blocks[i]
	}
	if first := r.PromptTokens / e.config.BlockTokens; i >= first && r.Output != nil {
		return r.Output(i - first)
	}
	return mix(mix(r.serial) + uint64(i))
}

// mix spreads a counter over 64 bits (the finaliser of SplitMix64).
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// preemptLast takes the blocks of the sequence admitted last and puts it back at
// the head of the waiting queue, to be recomputed.
func (e *Engine) preemptLast() {
	last := len(e.running) - 1
	r := e.running[last]
	e.running[last] = nil
	e.running = e.running[:last]

	e.freeBlocks(r)
	r.computed, r.scheduled, r.stored = 0, 0, 0
	r.state = stateWaiting
	r.Preemptions++
	e.counters.Preemptions++
	e.waiting.pushFront(r)
}

// finishStep books what the current step computed, publishes the figures and runs
// the callbacks.
func (e *Engine) finishStep() {
	now := e.step.End
	e.produced = e.produced[:0]
	live := e.running[:0]
	for _, r := range e.running {
		r.computed += r.scheduled
		if r.scheduled == 0 || r.computed < r.tokens() {
			live = append(live, r)
			continue
		}
		e.produce(now, r)
		e.produced = append(e.produced, r)
		if r.state == stateRunning {
			live = append(live, r)
		}
	}
	clear(e.running[len(live):])
	e.running = live
	e.counters.Steps++
	e.publish(now)

	if e.OnStep != nil {
		e.OnStep(e.step)
	}
	for _, r := range e.produced {
		r.notify(now)
	}
	clear(e.produced)
}

// produce adds the token that a completed prefill or decode yields.
func (e *Engine) produce(now time.Duration, r *Request) {
	if r.Generated == 0 {
		r.FirstToken = now
		e.counters.FirstTokens++
		e.counters.FirstTokenTime += now - r.Submitted
		e.counters.PrefillTime += now - r.Admitted
		e.counters.PromptTokens += int64(r.PromptTokens)
		e.counters.CachedTokens += int64(r.Cached)
	}
	if r.OutputTokens > 0 {
		r.Generated++
		e.counters.GenerationTokens++
	}
	if r.Generated == r.OutputTokens {
		e.freeBlocks(r)
		r.state, r.Finished = stateDone, now
		e.counters.Finished++
	}
}

// notify runs the callbacks due after a step that produced a token.
func (r *Request) notify(now time.Duration) {
	if r.Aborted {
		return // by the callback of another request
	}
	if r.FirstToken == now && r.Generated <= 1 && r.OnFirstToken != nil {
		r.OnFirstToken(now, r)
	}
	if r.OutputTokens > 0 && r.OnToken != nil && !r.Aborted {
		r.OnToken(now, r)
	}
	if r.state == stateDone && r.OnFinish != nil && !r.Aborted {
		r.OnFinish(now, r)
	}
}

// publish writes the figures a scrape sees until the next step ends.
func (e *Engine) publish(now time.Duration) {
	e.published = Stats{
		Counters: e.counters,
		Gauges: Gauges{
			Running: len(e.running),
			Waiting: e.waiting.len(),
			KVUsage: float64(e.pool.used()) / float64(e.pool.usable()),
		},
		At: now,
	}
}

// blocksFor returns the number of blocks that hold the tokens.
func (e *Engine) blocksFor(tokens int) int {
	return (tokens + e.config.BlockTokens - 1) / e.config.BlockTokens
}

// blockList returns an empty list, if possible one that has been used before.
func (e *Engine) blockList(capacity int) []blockID {
	if n := len(e.spare); n > 0 {
		list := e.spare[n-1]
		e.spare = e.spare[:n-1]
		return slices.Grow(list, capacity)
	}
	return make([]blockID, 0, capacity)
}

// freeBlocks returns a sequence's blocks to the pool.
func (e *Engine) freeBlocks(r *Request) {
	e.pool.release(r.blocks)
	if cap(r.blocks) > 0 {
		e.spare = append(e.spare, r.blocks[:0])
	}
	r.blocks = nil
}

// requestQueue is the waiting queue: first in, first out, but preempted sequences
// return to its head.
type requestQueue struct {
	items []*Request
	head  int
}

func (q *requestQueue) len() int { return len(q.items) - q.head }

func (q *requestQueue) all() []*Request { return q.items[q.head:] }

func (q *requestQueue) front() *Request { return q.items[q.head] }

func (q *requestQueue) push(r ...*Request) {
	// Moving up only when half the slice is unused keeps a push cheap on average.
	if q.head > len(q.items)/2 {
		n := copy(q.items, q.items[q.head:])
		clear(q.items[n:])
		q.items, q.head = q.items[:n], 0
	}
	q.items = append(q.items, r...)
}

func (q *requestQueue) pushFront(r *Request) {
	if q.head == 0 {
		q.items = slices.Insert(q.items, 0, r)
		return
	}
	q.head--
	q.items[q.head] = r
}

func (q *requestQueue) pop() *Request {
	r := q.items[q.head]
	q.items[q.head] = nil
	q.head++
	return r
}

func (q *requestQueue) remove(r *Request) bool {
	i := slices.Index(q.all(), r)
	if i < 0 {
		return false
	}
	q.items = slices.Delete(q.items, q.head+i, q.head+i+1)
	return true
}
