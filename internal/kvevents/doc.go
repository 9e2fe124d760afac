// SPDX-License-Identifier: Apache-2.0

// Package kvevents follows the KV-cache event streams of inference engines (vLLM's ZeroMQ publisher and its replay socket; SGLang
// speaks the same form) and keeps, per replica and data-parallel rank, the truth of which token blocks that replica holds.
//
// The parts, in the order data flows:
//
//   - [Stream] subscribes to one publisher, checks sequence numbers, replays gaps and reconnects;
//   - [Decoder] turns a payload of any wire generation into a [Batch] of [Event];
//   - [View] applies batches of one rank and answers which leading blocks of a prompt are held; [Index] keeps the views of one replica;
//   - [Alignment] joins the router's text blocks with the engine's token blocks, and [Learner] feeds it off the request path.
//
// Engine block hashes are opaque handles here. Their value depends on the engine's version, hash algorithm and seed, so blocks
// are indexed by an own chain of keys computed from the token ids in the events; replicas of any kind then compare equal.
package kvevents
