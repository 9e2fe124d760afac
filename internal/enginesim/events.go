// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"time"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/kvevents/kvpublish"
)

// EventSink takes a server's KV events, a batch for each step that changed what
// the prefix cache holds. A [kvpublish.Publisher] is one.
type EventSink interface {
	// Publish takes a batch, which is valid during the call. It must not block.
	Publish(*kvpublish.Batch) (seq uint64)
	// Restart says that the process is new, and its cache empty.
	Restart()
}

// narrator tells a sink what an engine's prefix cache takes in and drops, as
// vLLM does: blocks that follow on each other in one event, the whole step in one
// batch, at the step's end. Its methods are called under the driver's mutex.
type narrator struct {
	sink   EventSink
	engine *Engine
	batch  kvpublish.Batch

	// Blocks from up to to of a sequence were stored and are not in the batch yet.
	of       *Request
	from, to int
}

// narrate has the engine's events told to the sink.
func narrate(e *Engine, sink EventSink) *narrator {
	n := &narrator{sink: sink, engine: e}
	e.onStored, e.pool.onForget, e.onReset = n.stored, n.removed, n.cleared
	return n
}

func (n *narrator) stored(r *Request, i int) {
	if n.of != r || n.to != i {
		n.settle()
		n.of, n.from = r, i
	}
	n.to = i + 1
}

// settle puts the blocks stored last into the batch. Of a sequence whose tokens
// are not known nothing is told.
func (n *narrator) settle() {
	r := n.of
	n.of = nil
	if r == nil || r.source == nil {
		return
	}
	event := kvpublish.Stored{BlockSize: n.engine.config.BlockTokens, LoRA: r.source.space.adapter, Salt: r.source.space.salt}
	if n.from > 0 {
		parent := n.engine.hashOf(r, n.from-1)
		event.Parent, event.Salt = &parent, ""
	}
	for i := n.from; i < n.to; i++ {
		event.Hashes = append(event.Hashes, n.engine.hashOf(r, i))
		event.Tokens = r.source.appendBlock(event.Tokens, i)
	}
	n.batch.Stored(event)
}

func (n *narrator) removed(hash uint64) {
	n.settle()
	n.batch.Removed("", hash)
}

func (n *narrator) cleared() {
	n.settle()
	n.batch.Cleared()
}

// publish ends the step's batch.
func (n *narrator) publish() {
	n.settle()
	if n.batch.Len() == 0 {
		return
	}
	n.batch.Time = time.Now()
	n.sink.Publish(&n.batch)
	n.batch.Reset()
}
