// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"sync/atomic"
	"time"
)

// generation is the engine's side of one HTTP request: one sequence, or several
// for a list of prompts.
type generation struct {
	prompts  []*prompt
	requests []*Request

	// ready holds a token when there is news: progress has grown, or finished is set.
	ready    chan struct{}
	progress []atomic.Int64 // tokens generated, by sequence
	finished atomic.Bool

	// Guarded by the driver's mutex.
	left  int // sequences that are not finished
	dirty bool
}

// newGeneration prepares the sequences of the prompts. With each, news comes with
// every token, otherwise only when all sequences are finished.
func newGeneration(d *driver, prompts []*prompt, outputTokens int, each bool) *generation {
	g := &generation{
		prompts:  prompts,
		ready:    make(chan struct{}, 1),
		progress: make([]atomic.Int64, len(prompts)),
		left:     len(prompts),
	}
	finish := func(_ time.Duration, r *Request) {
		d.meters.observeFinish(r)
		g.left--
		if each || g.left == 0 {
			d.mark(g)
		}
	}
	for _, p := range prompts {
		r := &Request{
			Blocks:       p.blocks,
			PromptTokens: p.tokens,
			OutputTokens: outputTokens,
			Output:       p.outputBlock,
			source:       p,
			OnFirstToken: d.meters.observeFirstToken,
			OnFinish:     finish,
		}
		if each {
			r.OnToken = func(time.Duration, *Request) { d.mark(g) }
		}
		g.requests = append(g.requests, r)
	}
	return g
}

// publish hands the sequences' state over to the handler. The driver's mutex is held.
func (g *generation) publish() {
	for i, r := range g.requests {
		g.progress[i].Store(int64(r.Generated))
	}
	g.finished.Store(g.left == 0)
	select {
	case g.ready <- struct{}{}:
	default:
	}
}

// usage sums up the tokens of a generation. Cached tokens are known from the first
// token on.
func (g *generation) usage() usage {
	var u usage
	for i, r := range g.requests {
		u.prompt += r.PromptTokens
		u.cached += r.Cached
		u.stored += max(0, len(r.Blocks)*g.prompts[i].blockTokens-r.Cached)
		u.completion += int(g.progress[i].Load())
	}
	return u
}

// usage is what the answers' usage objects are made of, in tokens.
type usage struct {
	prompt, completion int
	cached             int // found in the prefix cache
	stored             int // in full blocks that were not
}

// newProgress returns the progress of one sequence with so many tokens.
func newProgress(tokens int) []atomic.Int64 {
	progress := make([]atomic.Int64, 1)
	progress[0].Store(int64(tokens))
	return progress
}
