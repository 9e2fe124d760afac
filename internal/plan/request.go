// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"math"
	"time"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/fleet"
)

// Request is one that a replica is wanted for.
type Request struct {
	// Chain, Tokens and PerBlock describe the prompt: its block hashes, its
	// length, and how many tokens a block stands for. Extra is further work in
	// tokens that no cache saves.
	Chain            []uint64
	Tokens, PerBlock float64
	Extra            float64
	// Beyond is how far a match reaches beyond its last full block on average,
	// in tokens: half a block, where the blocks are cut without regard to where
	// prompts differ.
	Beyond float64
	// Key makes the rendezvous order.
	Key uint64
	// Replicas are those to choose from, and Caller knows more of them.
	Replicas []*fleet.Replica
	Caller   Caller
	// Serves tells which of them serve the request's model; nil for all.
	Serves []bool
	// Holder corrects what is believed of the replicas' caches; nil for nobody.
	Holder Holder
	// Priority orders those that wait before all else: lower goes first, as
	// vLLM's priority. Default: 0.
	Priority int
	// Sharer is who the fleet's time is shared with: of those that have
	// requests waiting, each gets the same. 0 takes no part.
	Sharer uint64

	blocks  []int32   // matched, by slot
	offers  []offer   // by place in Replicas
	matched time.Time // when both were looked up

	held     uint64  // the longest prefix that any replica holds, see reuses
	asked    uint64  // that which it was counted for
	reuse    float64 // as in [Candidate], when it was matched
	toOthers float64 // of that, at a busy replica

	arrived time.Time
	ready   chan struct{}
	bound   bool // sent, refused or gone

	// of those that wait, see line
	least    float64   // tokens to compute where most of the prompt is held
	rank     float64   // smaller goes first
	start    float64   // of its sharer's time, see share
	promised time.Time // by then it is overdue in any case
	deadline time.Time // when it is, or, once it is, when it has waited for too long
	index    int       // in the heap of deadlines
	overdue  bool
}

// Caller is who wants a replica. The scheduler calls it under its lock, so it
// must be quick and must not call back.
type Caller interface {
	// Open tells whether the request's i-th replica may be chosen at this moment.
	Open(i int) bool
	// Tried tells whether an attempt of the request failed there.
	Tried(i int) bool
	// Send books the choice on its replica, so that the next choice sees it. It
	// may leave the prompt's blocks for when the scheduler's lock is free, and
	// then returns the reservation that is to land.
	Send(Choice) (late *fleet.Reservation)
}

// Holder knows from the engines themselves what replicas hold of a request's
// prompt. The scheduler calls it under its lock.
type Holder interface {
	// Held returns how many of the prompt's tokens a replica holds that is
	// believed to hold so many.
	Held(p *fleet.Replica, believed float64) float64
}

// Choice is the replica that a request goes to.
type Choice struct {
	// Index is the replica's place in the request's Replicas, -1 if none is
	// open or the request was refused.
	Index int
	// Refused tells that there are replicas, but too many requests wait for
	// them, or this one has waited for too long. RetryAfter is when those that
	// wait will have been served.
	Refused    bool
	RetryAfter time.Duration
	// Matched is how many blocks of the chain it is believed to hold, Longest
	// how many any open replica holds, Hit the tokens this saves, and Uncached
	// those that remain.
	Matched, Longest int
	Hit, Uncached    float64
	// Open is how many replicas there were to choose from, Cost what the choice
	// costs and Next the cost of the next best, +Inf if there is none.
	Open       int
	Cost, Next float64
	// Waited is how long the request was held back.
	Waited time.Duration
}

// Ready is closed when a waiting request has been sent or refused. It is nil if
// Submit decided without making it wait at all: only then the scheduler has no
// hold of it, and it may be used again.
func (r *Request) Ready() <-chan struct{} { return r.ready }

// offer is what one of a request's replicas has for it.
type offer struct {
	lane     *lane
	blocks   int32   // of the chain that it holds
	held     float64 // tokens of the prompt that it holds
	uncached float64 // tokens that it is reckoned to compute
	each     float64 // what a request in flight there counts beside it
	away     float64 // as in [Candidate]
}

// take works out what a replica offers that is believed to hold so many blocks.
func (o *offer) take(r *Request, p *fleet.Replica, l *lane, blocks int) {
	*o = offer{lane: l, blocks: int32(blocks), held: r.believed(blocks)}
	if r.Holder != nil {
		o.held = r.Holder.Held(p, o.held)
		o.blocks = int32(min(len(r.Chain), int(o.held/r.PerBlock)))
	}
	o.uncached = max(r.Tokens-o.hit(r)*l.load.Trust, min(r.Tokens, l.load.BlockTokens)) + r.Extra
}

// hit is how many of the prompt's tokens the replica will not compute.
func (o *offer) hit(r *Request) float64 {
	return believedHit(o.held, r.Tokens, o.lane.load.BlockTokens)
}

// believed is how many tokens so many leading blocks are reckoned to be.
func (r *Request) believed(blocks int) float64 {
	if blocks == 0 {
		return 0
	}
	tokens := float64(blocks) * r.PerBlock
	return tokens + max(0, min(r.Beyond, (r.Tokens-tokens)/2))
}

// believedHit is how many of a prompt's tokens an engine that holds held of
// them will not compute: whole engine blocks only, and never the last token,
// which it needs for its first step.
func believedHit(held, tokens, blockTokens float64) float64 {
	if held == 0 {
		return 0
	}
	return max(0, math.Floor(min(held, tokens-1)/blockTokens)*blockTokens)
}
