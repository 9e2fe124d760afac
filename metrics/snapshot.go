// SPDX-License-Identifier: Apache-2.0

// Package metrics reads what the replicas say about themselves: it polls each
// replica's Prometheus page and turns any engine's dialect into one Snapshot.
//
// The engine is recognised by what its page says, never by a setting. What a
// page does not say stays unknown, and unknown is not idle: see Fact.
package metrics

import (
	"math"
	"time"
)

// Fact is one number of a replica, or the absence of it. The zero Fact is
// unknown. A metric family that is missing, or whose value is NaN, infinite,
// negative or unreadable, is unknown and never 0: a replica that says nothing
// about its queue must not look like one whose queue is empty.
type Fact struct {
	// Value is 0 while the fact is unknown.
	Value float64
	// Known tells whether the page said so.
	Known bool
}

// Or returns the value, or fallback while the fact is unknown.
func (f Fact) Or(fallback float64) float64 {
	if f.Known {
		return f.Value
	}
	return fallback
}

// Engine is the kind of inference server that wrote a page.
type Engine uint8

// The engines whose metric names are understood.
const (
	// Unknown is a page without any engine's metrics, as vLLM serves it with
	// --disable-log-stats.
	Unknown Engine = iota
	// VLLM is vLLM 0.6 and later, with either front end.
	VLLM
	// SGLang is SGLang with --enable-metrics.
	SGLang
	// TensorRTLLM is trtllm-serve; its page is at /prometheus/metrics.
	TensorRTLLM
	// TritonTRTLLM is Triton's TensorRT-LLM backend.
	TritonTRTLLM
	// LlamaCPP is llama.cpp's llama-server with --metrics.
	LlamaCPP
	// TGI is Hugging Face's Text Generation Inference.
	TGI
	// Ray is vLLM behind Ray's metrics agent, which renames vllm:x to
	// ray_vllm_x or vllm_x.
	Ray
	// Dynamo is an NVIDIA Dynamo front end or worker that does not pass its
	// engine's own metrics through.
	Dynamo
)

var engineNames = [...]string{
	Unknown:      "unknown",
	VLLM:         "vllm",
	SGLang:       "sglang",
	TensorRTLLM:  "tensorrt_llm",
	TritonTRTLLM: "triton_tensorrt_llm",
	LlamaCPP:     "llama_cpp",
	TGI:          "tgi",
	Ray:          "vllm_ray",
	Dynamo:       "dynamo",
}

// String returns the engine's name as used in labels and JSON.
func (e Engine) String() string {
	if int(e) < len(engineNames) {
		return engineNames[e]
	}
	return engineNames[Unknown]
}

// Snapshot is what one page said about one replica. Data-parallel ranks behind
// one port are one replica: requests, capacity and counters are their sums,
// KVUsage is their mean. Counters count since the engine's start.
//
// A Snapshot handed out by a Poller is never written again.
type Snapshot struct {
	// At is when the scrape began: everything here is at least as new, apart
	// from the engine's own lag of about one step.
	At time.Time
	// Engine is the dialect the facts were read from.
	Engine Engine
	// Rows is how many ranks wrote gauges: vLLM's engine label, SGLang's
	// dp_rank. Several model names of one engine are one row.
	Rows int

	// Running is how many requests are in the running batch, prefill included.
	Running Fact
	// Waiting is how many requests the engine has accepted and not scheduled.
	Waiting Fact
	// KVUsage is the share, 0 to 1, of the KV cache in use by requests. Blocks
	// that are cached but not referenced count as free.
	KVUsage Fact
	// CapacityTokens is how many tokens the KV caches of all ranks hold.
	CapacityTokens Fact
	// BlockTokens is the tokens of one KV block, the step in which prefixes hit.
	BlockTokens Fact
	// PrefixCaching is 1 when the engine caches prefixes, 0 when it does not.
	PrefixCaching Fact
	// Asleep is 1 when any rank sleeps (vLLM's sleep mode), else 0.
	Asleep Fact

	// PrefixQueries counts the prompt tokens looked up in the prefix cache.
	// vLLM before 0.9 counted blocks under the same name, which its page does
	// not tell: there only the ratio to PrefixHits has a meaning.
	PrefixQueries Fact
	// PrefixHits counts the tokens found there, in the unit of PrefixQueries.
	PrefixHits Fact
	// PromptTokens counts prompt tokens, cached ones included.
	PromptTokens Fact
	// CachedPromptTokens counts the prompt tokens that were not computed,
	// whichever tier of the cache they came from.
	CachedPromptTokens Fact
	// ComputedPromptTokens counts the prompt tokens that were computed. It is
	// not derived from the two above when the page does not say it.
	ComputedPromptTokens Fact
	// GenerationTokens counts generated tokens.
	GenerationTokens Fact
	// FirstTokens counts requests that got their first token.
	FirstTokens Fact
	// FirstTokenSeconds is the sum of their times to first token, in seconds.
	FirstTokenSeconds Fact
	// QueueSeconds is the sum of the times requests waited before they were
	// scheduled, in seconds.
	QueueSeconds Fact
	// PrefillSeconds is the sum of the times from when finished requests were
	// scheduled to their first token, in seconds.
	PrefillSeconds Fact
	// PrefillTokens counts the prompt tokens that were computed in that time.
	PrefillTokens Fact
	// Finished counts requests that ended, for whatever reason.
	Finished Fact
	// Preemptions counts running requests that lost their KV blocks.
	Preemptions Fact

	// EvictedBlocks counts the KV blocks that were evicted, of those that the
	// engine samples (vLLM with --kv-cache-metrics, 1 % unless told otherwise).
	EvictedBlocks Fact
	// EvictedLifetimeSeconds is the sum of the times from their allocation to
	// their eviction, and EvictedIdleSeconds of those from their last use.
	EvictedLifetimeSeconds, EvictedIdleSeconds Fact
	// BlockReuses counts the times at which a sampled block was used again, and
	// BlockReuseSeconds is the sum of the times since the use before.
	BlockReuses, BlockReuseSeconds Fact

	// StartTime is when the process started, in seconds of Unix time.
	StartTime Fact

	// Adapters are the LoRA adapters that run or wait, from the newest row.
	// It is nil when the page says nothing of adapters, empty when none is busy.
	Adapters []string
	// Models are the model names on the page, at most 16.
	Models []string
}

// Restarted reports whether the replica started anew between two snapshots, so
// that its cache is empty: its start time moved by more than a second, another
// engine answers, or a counter fell. It is false while either is nil. Facts
// that only one of them knows tell nothing.
func Restarted(prev, next *Snapshot) bool {
	if prev == nil || next == nil {
		return false
	}
	if prev.Engine != next.Engine && prev.Engine != Unknown && next.Engine != Unknown {
		return true
	}
	// Some exporters compute their start time anew for each page from a boot
	// time in whole seconds, which clock adjustment moves by one.
	if moved(prev.StartTime, next.StartTime) > 1 {
		return true
	}
	// Sums of seconds are left out: added up in another order they may fall in
	// the last digit.
	return fell(prev.PromptTokens, next.PromptTokens) ||
		fell(prev.GenerationTokens, next.GenerationTokens) ||
		fell(prev.FirstTokens, next.FirstTokens) ||
		fell(prev.Finished, next.Finished) ||
		fell(prev.PrefixQueries, next.PrefixQueries) ||
		fell(prev.PrefixHits, next.PrefixHits) ||
		fell(prev.CachedPromptTokens, next.CachedPromptTokens) ||
		fell(prev.ComputedPromptTokens, next.ComputedPromptTokens) ||
		fell(prev.Preemptions, next.Preemptions)
}

func moved(prev, next Fact) float64 {
	if !prev.Known || !next.Known {
		return 0
	}
	return math.Abs(next.Value - prev.Value)
}

func fell(prev, next Fact) bool {
	return prev.Known && next.Known && next.Value < prev.Value
}
