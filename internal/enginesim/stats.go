// SPDX-License-Identifier: Apache-2.0

package enginesim

import "time"

// Stats is what an engine publishes. Like vLLM's, it is written at the end of each
// step and at no other time: it lags behind by up to one step, and a request that
// arrived during a step is not in it yet.
type Stats struct {
	Counters
	Gauges
	// At is the end of the step that published these figures; 0 before the first.
	At time.Duration
}

// Gauges are the states at the end of a step.
type Gauges struct {
	Running int // sequences in the batch, those still in prefill included
	Waiting int // requests in the waiting queue
	// KVUsage is the share of blocks that have a user, 0 to 1. Blocks that are
	// only cached count as free.
	KVUsage float64
}

// Counters only grow, except over a restart.
type Counters struct {
	PrefixQueries    int64 // prompt tokens looked up, once per request at admission
	PrefixHits       int64 // those found in the cache
	PromptTokens     int64 // prompt tokens of requests whose prefill is complete
	CachedTokens     int64 // those of them that came from the cache
	GenerationTokens int64
	FirstTokens      int64         // requests whose prefill is complete
	FirstTokenTime   time.Duration // their times from submission to first token, summed
	PrefillTime      time.Duration // their times from admission to first token, summed
	Finished         int64
	Aborted          int64
	Rejected         int64
	Preemptions      int64
	Steps            int64
}

// Step describes one engine step, for [Engine.OnStep].
type Step struct {
	Start, End    time.Duration
	PrefillTokens int // tokens of prompts, and recomputed ones
	Decoding      int // sequences that produced a further token
}
