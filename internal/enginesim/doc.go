// SPDX-License-Identifier: Apache-2.0

// Package enginesim is a vLLM-shaped inference engine without a model: paged
// prefix cache, continuous batching with chunked prefill, preemption, and the
// figures a router can see. It has two users.
//
// [Engine] is the scheduler alone. It is single-threaded, owns no clock and
// starts no goroutine: the caller moves time forward, so a replay can run hours
// of traffic over a fleet in a second or two.
//
// [Server] puts HTTP in front of an Engine: the inference endpoints, streaming,
// /metrics, the faults that drills need, and KV events for whoever publishes
// them. Its clock may run faster than the wall clock.
//
// The package knows nothing of the routing policies. It renders prompts on its
// own, so that a test which compares the router's belief with the engine's cache
// compares two independent readings of the same body.
//
// # What is modelled
//
// The scheduler follows vLLM's V1 engine: running sequences first, in order of
// admission, each taking its missing tokens from the step's token budget; then
// the waiting, first come, first served, while blocks, budget and sequence slots
// last. Only full blocks are cached; the last token of a prompt is always
// recomputed; blocks are visible to others from the step that computes them;
// blocks without a user stay cached in a free queue, least recently freed first
// and each sequence's tail before its head, and are forgotten only when they are
// handed out again. When a running sequence finds no block, the last running one
// is preempted and recomputed later.
//
// # Cost of a step
//
//	step = StepOverhead + prefill tokens / PrefillRate + decoding sequences × DecodeCost
//
// which makes prefill of others visible as slower decoding, and decoding of many
// as slower prefill. The growth of attention with context length is left out.
//
// # What is not
//
// An answer always has max_tokens tokens; stop conditions, sampling and ignore_eos
// change nothing. MaxQueued does not count the request that finds the engine idle.
// There are no data-parallel ranks and no KV connectors.
package enginesim
