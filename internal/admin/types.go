// SPDX-License-Identifier: Apache-2.0

package admin

import "time"

// The types below are what the API answers with, as JSON. None holds text of a
// prompt. A number that may be unknown is left out then, and never 0.

// Fleet is one policy and the replicas that it chooses from.
type Fleet struct {
	Name   string `json:"name"`
	Policy string `json:"policy"`
	// Waiting is how many requests are held back until a replica has room.
	Waiting int `json:"waiting_requests"`
	// BytesPerToken is the learned length of a prompt token.
	BytesPerToken float64 `json:"bytes_per_token"`
	// Learner is left out where no KV events are followed.
	Learner  *Learner  `json:"learner,omitempty"`
	Replicas []Replica `json:"replicas"`
}

// Learner counts the prompts that were to be learned by their tokens since the
// config was loaded, by what became of them.
type Learner struct {
	Rendered  uint64 `json:"rendered"`
	Tokenized uint64 `json:"tokenized"`
	// Known were known already; Full and Stale were dropped unasked.
	Known uint64 `json:"known"`
	Full  uint64 `json:"full"`
	Stale uint64 `json:"stale"`
	// Unsupported can't be learned; of Mismatched the engine's events told other
	// tokens, of Failed no answer could be read.
	Unsupported   uint64 `json:"unsupported"`
	Mismatched    uint64 `json:"mismatched"`
	Failed        uint64 `json:"failed"`
	RenderRefused uint64 `json:"render_refusals"`
	Waiting       int    `json:"waiting"`
}

// Replica is all that is known of one replica. What the engine itself said is
// as old as the last good scrape; everything else is as of now.
type Replica struct {
	Address string `json:"address"`
	// State is eligible, or why the replica is avoided: failing, refused, hung,
	// asleep or drained.
	State string `json:"state"`
	// Available is whether Caddy's own health checks and limits allow it.
	Available bool `json:"available"`
	// Warming is whether it takes on work gradually.
	Warming bool `json:"warming"`
	// Failures counts attempts that failed in a row.
	Failures int     `json:"failures"`
	Scrape   Scrape  `json:"scrape"`
	Ledger   Ledger  `json:"ledger"`
	Learned  Learned `json:"learned"`
	Cache    Cache   `json:"cache"`
	// Events is left out where no KV events are followed.
	Events *Events `json:"events,omitempty"`
	// Engine is left out before the first good scrape.
	Engine *Engine `json:"engine,omitempty"`
}

// Events is what became of the replica's KV events.
type Events struct {
	Connected bool `json:"connected"`
	// Reliable is whether nothing is missing since the engine's start.
	Reliable bool   `json:"reliable"`
	Batches  uint64 `json:"batches"`
	Replayed uint64 `json:"replayed_batches"`
	Gaps     uint64 `json:"gaps"`
	Lost     uint64 `json:"lost"`
	// Errors are counted by reason.
	Errors map[string]uint64 `json:"errors"`
	Blocks int               `json:"engine_blocks"`
	Lag    float64           `json:"lag_seconds"`
}

// Scrape tells of the polls of the replica's metrics page.
type Scrape struct {
	Good uint64 `json:"good"`
	Bad  uint64 `json:"bad"`
	// Age is the seconds since the last good one, left out before that.
	Age  *float64 `json:"age_seconds,omitempty"`
	Took float64  `json:"duration_seconds"`
	// Error is why the last one failed, if it did.
	Error string `json:"error,omitempty"`
}

// Ledger is what was sent to the replica and has not ended.
type Ledger struct {
	InFlight float64 `json:"in_flight_requests"`
	// Outstanding is all their prompt tokens, Queued the uncached ones believed
	// to wait for prefill.
	Outstanding float64 `json:"outstanding_tokens"`
	Queued      float64 `json:"queued_tokens"`
	// QueueKnown is whether the engine's own count of first tokens, or of what runs
	// and waits, keeps Queued right.
	QueueKnown bool `json:"queue_known"`
	// Others is how many requests other senders seem to have there.
	Others float64 `json:"other_requests"`
}

// Learned is what was learned from the engine's counters.
type Learned struct {
	PrefillRate float64 `json:"prefill_tokens_per_second"`
	// PrefillRateKnown is whether it was learned here, and not assumed.
	PrefillRateKnown bool     `json:"prefill_rate_known"`
	BytesPerToken    *float64 `json:"bytes_per_token,omitempty"`
	// Trust is the share of predicted hits that counts, by what the engine
	// confirmed lately. Predicted and Confirmed are the totals.
	Trust     float64 `json:"trust_ratio"`
	Predicted float64 `json:"predicted_hit_tokens"`
	Confirmed float64 `json:"confirmed_hit_tokens"`
}

// Cache is what the replica is believed to hold, in blocks of prompt text.
type Cache struct {
	Held     float64 `json:"held_blocks"`
	Capacity float64 `json:"capacity_blocks"`
	Evicted  uint64  `json:"evicted_blocks"`
}

// Engine is what the engine's metrics page said at the last good scrape.
type Engine struct {
	Kind string `json:"kind"`
	// Age is how old it is, in seconds.
	Age      float64  `json:"age_seconds"`
	Models   []string `json:"models,omitempty"`
	Adapters []string `json:"adapters,omitempty"`
	// Facts are its numbers by the name of the metric caddy_kv_cache_engine_….
	Facts map[string]float64 `json:"facts"`
}

// Explanation tells where a request would go, and why.
type Explanation struct {
	Fleet  string `json:"fleet"`
	Policy string `json:"policy"`
	// Replica is where it would go, left out where none is available or the
	// fallback policy would decide.
	Replica string `json:"replica,omitempty"`
	// Reason is the decision's reason, from the closed list.
	Reason string `json:"reason"`
	// Waits is whether it would be held back at first, behind Ahead others.
	Waits bool `json:"waits"`
	Ahead int  `json:"waiting_ahead"`
	// API is the kind of request, as told by the path.
	API string `json:"api"`
	// Key is a hash of the prompt's leading part, and Blocks how many blocks of
	// text were hashed. Truncated is whether the body went on unseen.
	Key       string `json:"key,omitempty"`
	Blocks    int    `json:"blocks"`
	Truncated bool   `json:"truncated"`
	// PromptTokens is the prompt's length, estimated where it is text.
	PromptTokens float64     `json:"prompt_tokens"`
	Candidates   []Candidate `json:"candidates"`
}

// Candidate is one replica that a request could go to.
type Candidate struct {
	Replica string `json:"replica"`
	State   string `json:"state"`
	// Available is Caddy's own view; Allowed is whether the choice was made
	// among such replicas as this.
	Available bool `json:"available"`
	Allowed   bool `json:"allowed"`
	Chosen    bool `json:"chosen"`
	// Matched is what it is believed to hold of the prompt, Hit what of it
	// saves whole engine blocks, and Uncached what remains to compute, all in
	// tokens. (kv_cache_aware)
	Matched  *float64 `json:"matched_tokens,omitempty"`
	Hit      *float64 `json:"hit_tokens,omitempty"`
	Uncached *float64 `json:"uncached_tokens,omitempty"`
	Cost     *Cost    `json:"cost,omitempty"`
	// Place is the replica's place in the prompt's own order, 1 being its home,
	// and Outstanding what is compared with the bound. (prefix_hash)
	Place       *int     `json:"place,omitempty"`
	Outstanding *float64 `json:"outstanding_tokens,omitempty"`
}

// Cost is what a request would cost at a replica, in tokens of queue: the sum
// of its parts.
type Cost struct {
	Total float64 `json:"total"`
	// Queue is what waits there, Requests what decodes there, Pressure the KV
	// cache that must be freed, Compute the prompt's uncached tokens and what
	// computing them takes from others.
	Queue    float64 `json:"queue"`
	Compute  float64 `json:"compute"`
	Requests float64 `json:"requests"`
	Pressure float64 `json:"pressure"`
	// Away is what other senders may have left of the prompt at another replica,
	// its home.
	Away float64 `json:"away,omitempty"`
	// Pace is the replica's prefill rate relative to the fleet's, by which the
	// parts were divided.
	Pace float64 `json:"pace"`
}

// Decision is one choice that was made.
type Decision struct {
	At      time.Time `json:"at"`
	Fleet   string    `json:"fleet"`
	Replica string    `json:"replica"`
	Reason  string    `json:"reason"`
	// Key is a hash of the prompt's leading part, left out without a prompt. It
	// differs from process to process where the policy is kv_cache_aware.
	Key          string  `json:"key,omitempty"`
	PromptTokens float64 `json:"prompt_tokens"`
	HitTokens    float64 `json:"hit_tokens"`
	// Cost and NextCost are left out where the policy has none.
	Cost     *float64 `json:"cost,omitempty"`
	NextCost *float64 `json:"next_cost,omitempty"`
	Waited   float64  `json:"waited_seconds"`
	// Attempt counts from 1; further ones are retries.
	Attempt int    `json:"attempt"`
	Trace   string `json:"trace_id,omitempty"`
}

// Outcome is the answer to drain, undrain and forget.
type Outcome struct {
	Replica string `json:"replica"`
	// State is the replica's state now, Fleets those that share it.
	State  string   `json:"state"`
	Fleets []string `json:"fleets"`
	// InFlight is how many requests it still works on.
	InFlight float64 `json:"in_flight_requests"`
	Message  string  `json:"message"`
	// Effects are what a drain would do to each fleet, if that was all that was
	// asked.
	Effects []Effect `json:"effects,omitempty"`
}

// Effect is what the drain of a replica would do to a fleet.
type Effect struct {
	Fleet string `json:"fleet"`
	// Remaining is how many eligible replicas would be left.
	Remaining int `json:"remaining_replicas"`
	// Chosen is how many of the last Decisions chose the replica.
	Chosen    int `json:"chosen"`
	Decisions int `json:"decisions"`
	// Alone is how many of the heaviest shared Prefixes no other replica holds,
	// and Tokens what would have to be computed once again for them.
	Alone    int     `json:"prefixes_held_alone"`
	Prefixes int     `json:"prefixes"`
	Tokens   float64 `json:"prefix_tokens_held_alone"`
}
