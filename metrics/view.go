// SPDX-License-Identifier: Apache-2.0

package metrics

import "github.com/prometheus/client_golang/prometheus"

// View is all that is known of one replica of one fleet at one moment. The
// exported metrics and the admin API are both made from it.
type View struct {
	Fleet, Replica string

	// Good and Bad count scrapes, BadBy the bad ones by reason; Age is the seconds since the last good one,
	// negative if there was none. Took is how many seconds the last one took,
	// and Err why it failed, if it did.
	Good, Bad uint64
	BadBy     FailureCounts
	Age, Took float64
	Err       error
	// Snapshot is the last good scrape, nil if there was none.
	Snapshot *Snapshot

	// InFlight and Queue are the ledger: requests sent and not finished, and
	// uncached prompt tokens believed to wait. Outstanding is all prompt tokens
	// of those in flight. Others is how many requests of other senders the
	// engine seems to have.
	InFlight, Queue, Outstanding, Others float64
	// QueueKnown tells whether the engine's own figures keep Queue right.
	QueueKnown bool

	// Rate is the prefill rate in tokens a second, RateKnown whether it was
	// learned from this replica and not assumed.
	Rate      float64
	RateKnown bool
	// BytesPerToken is what the replica's own counts say of its prompts, 0 if
	// they have said nothing yet.
	BytesPerToken float64

	// Trust is the share of believed hits that the engine confirms.
	Trust float64
	// Predicted and Confirmed are the hit tokens we believed in and those that
	// the engine counted over the same scrapes.
	Predicted, Confirmed float64

	// Blocks is how many prefix blocks the replica is believed to hold, and
	// Capacity how many it can.
	Blocks, Capacity float64
	// Evictions counts blocks dropped from that belief for lack of room.
	Evictions uint64

	// Events is what became of the replica's KV events, nil if none are followed.
	Events *EventsView

	// State is "eligible", or why the replica is avoided.
	State string
	// Eligible is whether the replica may be chosen.
	Eligible bool
	// Warming tells whether the replica takes on work gradually.
	Warming bool
	// Failures counts attempts that failed in a row.
	Failures int
}

// EventsView is what is known of the KV events of one replica, all its ranks
// together.
type EventsView struct {
	// Connected is whether every rank's publisher is, and Reliable whether
	// nothing is missing of what they told since the engine's start.
	Connected, Reliable bool
	// Batches counts batches of events taken in, Replayed those of them that a
	// replay brought. Gaps counts holes in their sequence, Lost those that no
	// replay filled, for which the rank was cleared.
	Batches, Replayed, Gaps, Lost uint64
	// Errors counts broken or failed connections, and unreadable messages and
	// events, by reason.
	Errors map[string]uint64
	// Blocks is how many engine blocks the events say it holds.
	Blocks int
	// Lag is the seconds from a batch's own time to when it was taken in, of the
	// slowest rank. The clocks' difference is part of it.
	Lag float64
}

// FleetView is what is exported of one fleet.
type FleetView struct {
	Name string
	// Waiting is how many requests are held back.
	Waiting int
	// BytesPerToken is how many bytes of prompt text make a token.
	BytesPerToken float64
	// Learner is what became of the prompts whose tokens were asked for, nil if
	// no KV events are followed.
	Learner  *LearnerView
	Replicas []View
}

// LearnerView counts the prompts that were to be learned by their tokens, by
// what became of them, since the config was loaded.
type LearnerView struct {
	// Rendered and Tokenized were learned, by /render and by /tokenize. Known
	// were known already, or nearly.
	Rendered, Tokenized, Known uint64
	// Full and Stale were dropped because too many waited, or for too long.
	Full, Stale uint64
	// Unsupported can't be learned, such as those with images. Of Mismatched the
	// engine gave other tokens than its events do, of Failed none that can be
	// read.
	Unsupported, Mismatched, Failed uint64
	// RenderRefused counts engines' answers that they offer no /render.
	RenderRefused uint64
	// Waiting is how many are waiting.
	Waiting int
}

// outcomes lists what became of prompts, by the label that they are exported with.
func (v *LearnerView) outcomes() map[string]uint64 {
	return map[string]uint64{
		"rendered": v.Rendered, "tokenized": v.Tokenized, "known": v.Known, "full": v.Full, "stale": v.Stale,
		"unsupported": v.Unsupported, "mismatched": v.Mismatched, "failed": v.Failed,
	}
}

// IndexView is what is exported of the residency index.
type IndexView struct {
	// Blocks counts distinct prefix blocks, Pairs each once for every replica
	// that is believed to hold it. Bytes is the memory they take.
	Blocks, Pairs, Bytes int
	Evictions            uint64
}

const asGauge, asCounter = prometheus.GaugeValue, prometheus.CounterValue

var engineInfo = describe("engine_info", "The kind of engine, as its metrics page shows it.", "fleet", "replica", "engine")

var failedScrapes = describe("scrape_errors_total", "Failed polls of the replica's metrics page, by reason.", "fleet", "replica", "reason")

var failedEvents = describe("events_errors_total", "Connections that failed or broke, and messages and events that could not be read.", "fleet", "replica", "reason")

var learnedPrompts = describe("learner_prompts_total", "Prompts to be learned by their tokens, by what became of them.", "fleet", "outcome")

var learnerExports = []export[LearnerView]{
	{describe("learner_waiting_prompts", "Prompts whose tokens are yet to be asked for.", "fleet"), asGauge, always(func(v *LearnerView) float64 { return float64(v.Waiting) })},
	{describe("learner_render_refusals_total", "Answers of engines that they offer no /render.", "fleet"), asCounter, always(func(v *LearnerView) float64 { return float64(v.RenderRefused) })},
}

var indexExports = []export[IndexView]{
	{describe("index_blocks", "Distinct prefix blocks in the residency index."), asGauge, always(func(v *IndexView) float64 { return float64(v.Blocks) })},
	{describe("index_held_blocks", "Prefix blocks in the residency index, counted for each replica believed to hold them."), asGauge, always(func(v *IndexView) float64 { return float64(v.Pairs) })},
	{describe("index_bytes", "Memory that the residency index takes."), asGauge, always(func(v *IndexView) float64 { return float64(v.Bytes) })},
	{describe("index_evicted_blocks_total", "Prefix blocks dropped from the residency index because a replica's capacity was reached."), asCounter, always(func(v *IndexView) float64 { return float64(v.Evictions) })},
}

var fleetExports = []export[FleetView]{
	{describe("waiting_requests", "Requests held back until a replica has room.", "fleet"), asGauge, always(func(v *FleetView) float64 { return float64(v.Waiting) })},
	{describe("bytes_per_token", "Learned length of a prompt token, in bytes of text.", "fleet"), asGauge, always(func(v *FleetView) float64 { return v.BytesPerToken })},
}

var replicaExports = []export[View]{
	ofReplica("scrapes_total", "Good polls of the replica's metrics page.", asCounter, func(v *View) float64 { return float64(v.Good) }),
	ofReplica("scrape_duration_seconds", "How long the last poll took.", asGauge, func(v *View) float64 { return v.Took }),
	{describe("scrape_age_seconds", "Seconds since the last good poll.", "fleet", "replica"), asGauge, func(v *View) (float64, bool) { return v.Age, v.Age >= 0 }},
	ofReplica("replica_eligible", "Whether the replica may be chosen: 0 while it fails, hangs, sleeps or is drained.", asGauge, func(v *View) float64 { return oneIf(v.Eligible) }),
	ofReplica("replica_hung", "Whether the replica has requests and none of its counters moves.", asGauge, func(v *View) float64 { return oneIf(v.State == "hung") }),
	ofReplica("replica_drained", "Whether an operator took the replica out.", asGauge, func(v *View) float64 { return oneIf(v.State == "drained") }),
	ofReplica("replica_in_flight_requests", "Requests sent to the replica through this Caddy and not finished.", asGauge, func(v *View) float64 { return v.InFlight }),
	ofReplica("replica_outstanding_tokens", "Prompt tokens of those requests.", asGauge, func(v *View) float64 { return v.Outstanding }),
	ofReplica("replica_queued_tokens", "Uncached prompt tokens believed to wait for prefill.", asGauge, func(v *View) float64 { return v.Queue }),
	ofReplica("replica_other_requests", "Requests that other senders seem to have at the replica.", asGauge, func(v *View) float64 { return v.Others }),
	ofReplica("replica_prefill_tokens_per_second", "Learned prefill rate, in uncached prompt tokens a second.", asGauge, func(v *View) float64 { return v.Rate }),
	ofReplica("replica_trust_ratio", "Share of the predicted hits that the engine's own counters confirm.", asGauge, func(v *View) float64 { return v.Trust }),
	ofReplica("replica_predicted_hit_tokens_total", "Predicted hits, for comparison with the confirmed ones of the same polls.", asCounter, func(v *View) float64 { return v.Predicted }),
	ofReplica("replica_confirmed_hit_tokens_total", "Hits that the engine counted over the same polls as the predicted ones.", asCounter, func(v *View) float64 { return v.Confirmed }),
	ofReplica("replica_held_blocks", "Prefix blocks the replica is believed to hold.", asGauge, func(v *View) float64 { return v.Blocks }),
	ofReplica("replica_capacity_blocks", "Prefix blocks the replica is believed to have room for.", asGauge, func(v *View) float64 { return v.Capacity }),
	ofReplica("replica_evicted_blocks_total", "Prefix blocks dropped from that belief for lack of room.", asCounter, func(v *View) float64 { return float64(v.Evictions) }),
}

var eventsExports = []export[EventsView]{
	ofEvents("connected", "Whether the replica's KV events are received.", asGauge, func(v *EventsView) float64 { return oneIf(v.Connected) }),
	ofEvents("reliable", "Whether nothing is missing of the KV events since the engine's start.", asGauge, func(v *EventsView) float64 { return oneIf(v.Reliable) }),
	ofEvents("batches_total", "Batches of KV events taken in.", asCounter, func(v *EventsView) float64 { return float64(v.Batches) }),
	ofEvents("replayed_batches_total", "Batches of KV events that a replay brought.", asCounter, func(v *EventsView) float64 { return float64(v.Replayed) }),
	ofEvents("gaps_total", "Holes in the sequence of KV events.", asCounter, func(v *EventsView) float64 { return float64(v.Gaps) }),
	ofEvents("lost_total", "Holes that no replay filled, so that all that was known of a rank was dropped.", asCounter, func(v *EventsView) float64 { return float64(v.Lost) }),
	ofEvents("blocks", "Engine blocks that the KV events say the replica holds.", asGauge, func(v *EventsView) float64 { return float64(v.Blocks) }),
	ofEvents("lag_seconds", "Seconds from the making of the last KV events to their being taken in, the clocks' difference included.", asGauge, func(v *EventsView) float64 { return v.Lag }),
}

func ofEvents(name, help string, kind prometheus.ValueType, value func(*EventsView) float64) export[EventsView] {
	return export[EventsView]{describe("events_"+name, help, "fleet", "replica"), kind, always(value)}
}

// engineFacts are the facts of a [Snapshot] by name. They are exported as
// metrics and told by the admin API.
var engineFacts = []struct {
	name, help string
	kind       prometheus.ValueType
	of         func(*Snapshot) Fact
}{
	{"running_requests", "Requests in the engine's batch.", asGauge, func(s *Snapshot) Fact { return s.Running }},
	{"waiting_requests", "Requests in the engine's queue.", asGauge, func(s *Snapshot) Fact { return s.Waiting }},
	{"kv_usage_ratio", "Share of the engine's KV cache in use.", asGauge, func(s *Snapshot) Fact { return s.KVUsage }},
	{"kv_capacity_tokens", "Size of the engine's KV cache in tokens.", asGauge, func(s *Snapshot) Fact { return s.CapacityTokens }},
	{"block_tokens", "Tokens of one block of the engine's KV cache.", asGauge, func(s *Snapshot) Fact { return s.BlockTokens }},
	{"prefix_caching", "Whether the engine caches prefixes.", asGauge, func(s *Snapshot) Fact { return s.PrefixCaching }},
	{"asleep", "Whether any rank of the engine sleeps.", asGauge, func(s *Snapshot) Fact { return s.Asleep }},
	{"prefix_query_tokens_total", "Prompt tokens looked up in the engine's prefix cache.", asCounter, func(s *Snapshot) Fact { return s.PrefixQueries }},
	{"prefix_hit_tokens_total", "Prompt tokens found in the engine's prefix cache.", asCounter, func(s *Snapshot) Fact { return s.PrefixHits }},
	{"prefix_hit_ratio", "Prompt tokens found over those looked up, since the engine started.", asGauge, hitRatio},
	{"prompt_tokens_total", "Prompt tokens the engine took in, cached ones included.", asCounter, func(s *Snapshot) Fact { return s.PromptTokens }},
	{"cached_prompt_tokens_total", "Prompt tokens the engine did not have to compute.", asCounter, func(s *Snapshot) Fact { return s.CachedPromptTokens }},
	{"computed_prompt_tokens_total", "Prompt tokens the engine computed.", asCounter, func(s *Snapshot) Fact { return s.ComputedPromptTokens }},
	{"generated_tokens_total", "Tokens the engine generated.", asCounter, func(s *Snapshot) Fact { return s.GenerationTokens }},
	{"first_tokens_total", "Requests that got their first token.", asCounter, func(s *Snapshot) Fact { return s.FirstTokens }},
	{"first_token_seconds_total", "Sum of their times to first token.", asCounter, func(s *Snapshot) Fact { return s.FirstTokenSeconds }},
	{"queue_seconds_total", "Sum of the times requests waited in the engine's queue.", asCounter, func(s *Snapshot) Fact { return s.QueueSeconds }},
	{"prefill_seconds_total", "Sum of the times from being scheduled to the first token.", asCounter, func(s *Snapshot) Fact { return s.PrefillSeconds }},
	{"finished_requests_total", "Requests that ended, for whatever reason.", asCounter, func(s *Snapshot) Fact { return s.Finished }},
	{"preemptions_total", "Running requests that lost their KV blocks.", asCounter, func(s *Snapshot) Fact { return s.Preemptions }},
	{"evicted_blocks_total", "KV blocks evicted, of those that the engine samples.", asCounter, func(s *Snapshot) Fact { return s.EvictedBlocks }},
	{"evicted_block_lifetime_seconds_total", "Sum of the times from their allocation to their eviction.", asCounter, func(s *Snapshot) Fact { return s.EvictedLifetimeSeconds }},
	{"evicted_block_idle_seconds_total", "Sum of the times from their last use to their eviction.", asCounter, func(s *Snapshot) Fact { return s.EvictedIdleSeconds }},
	{"block_reuses_total", "Times at which a sampled KV block was used again.", asCounter, func(s *Snapshot) Fact { return s.BlockReuses }},
	{"block_reuse_gap_seconds_total", "Sum of the times since the use before.", asCounter, func(s *Snapshot) Fact { return s.BlockReuseSeconds }},
	{"start_time_seconds", "When the engine's process started, in Unix time.", asGauge, func(s *Snapshot) Fact { return s.StartTime }},
}

func ofReplica(name, help string, kind prometheus.ValueType, value func(*View) float64) export[View] {
	return export[View]{describe(name, help, "fleet", "replica"), kind, always(value)}
}

var engineExports = ofEngine()

// ofEngine exports each fact as the engine told it, and nothing while it is unknown.
func ofEngine() []export[Snapshot] {
	var out []export[Snapshot]
	for _, f := range engineFacts {
		out = append(out, export[Snapshot]{
			describe("engine_"+f.name, f.help+" As the engine says.", "fleet", "replica"), f.kind,
			func(s *Snapshot) (float64, bool) { fact := f.of(s); return fact.Value, fact.Known },
		})
	}
	return out
}

// Facts are the known facts by the names under which they are exported,
// without what all these have in front.
func (s *Snapshot) Facts() map[string]float64 {
	known := make(map[string]float64)
	for _, f := range engineFacts {
		if fact := f.of(s); fact.Known {
			known[f.name] = fact.Value
		}
	}
	return known
}

// hitRatio is unknown before the first look-up.
func hitRatio(s *Snapshot) Fact {
	if !s.PrefixQueries.Known || !s.PrefixHits.Known || s.PrefixQueries.Value <= 0 {
		return Fact{}
	}
	return Fact{Value: s.PrefixHits.Value / s.PrefixQueries.Value, Known: true}
}

func always[T any](value func(*T) float64) func(*T) (float64, bool) {
	return func(v *T) (float64, bool) { return value(v), true }
}

func oneIf(is bool) float64 {
	if is {
		return 1
	}
	return 0
}
