// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/residency"
)

// Reservation is one request sent to one replica: it counts in the ledger from
// the choice until Release.
type Reservation struct {
	// Prompt, Uncached and Hit are the prompt's tokens, those believed to be
	// computed, and those believed cached.
	Prompt, Uncached, Hit float64
	// Bytes is the length of the prompt text that Prompt was estimated from,
	// zero if the tokens were given.
	Bytes float64
	// Aside tells that the engine computes no prompt for it: a list of models, a
	// websocket, what only its front end answers. It has no first token and no
	// place among those that run or wait, and says nothing of how the engine does.
	Aside bool
	// Chain is the prompt's text blocks, nil if it has none. It must not be changed.
	Chain []uint64

	replica *Replica
	seq     uint64
	sentAt  time.Time
	ahead   float64 // tokens to be computed until its first token, as of then
	past    bool
	place   int // in inUse, from 1
	once    sync.Once

	stay    residency.Stay
	landing sync.Mutex  // held while blocks are put into the index
	landed  atomic.Bool // they are there, or never will be
}

// Replica tells where the reservation was made.
func (r *Reservation) Replica() *Replica { return r.replica }

// Reserve books a request on the replica before it is sent. The caller fills
// Prompt, Uncached, Hit and Bytes and must call exactly one of the
// reservation's Finish and Abort when it ends.
func (p *Replica) Reserve(r *Reservation, now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.seq++
	r.replica, r.seq, r.sentAt, r.stay = p, p.seq, now, p.stay()
	if p.computing() == 0 && !r.Aside {
		p.idleSince = now
	}
	p.breaker.sent(r)
	p.add(r, now, p.perSecond())
	p.connections.used(p.inFlight, now)
	p.inUse.take(r)
	if !r.Aside {
		p.meanUncached += (r.Uncached - p.meanUncached) / 16
	}
}

// Land is Holds for the replica as it was when the reservation was made. It may
// come late, and on another goroutine: it does nothing once the request has come
// to nothing, or once the replica has left or was emptied.
func (r *Reservation) Land(chain []uint64) {
	r.landing.Lock()
	defer r.landing.Unlock()
	if !r.landed.Load() {
		r.stay.Insert(chain)
		r.landed.Store(true)
	}
}

// callOff keeps what has not landed from landing, and waits for what is about to.
func (r *Reservation) callOff() {
	r.landing.Lock()
	defer r.landing.Unlock()
	r.landed.Store(true)
}

// Landed tells whether Land has nothing to do any more.
func (r *Reservation) Landed() bool { return r.landed.Load() || r.stay.Over() }

// Finish books that the engine answered. It is idempotent with Abort: the
// first call counts.
func (r *Reservation) Finish(now time.Time) { r.release(finished, now) }

// Abort books that the request ended without an answer: the client left, or
// the attempt failed.
func (r *Reservation) Abort(now time.Time) { r.release(aborted, now) }

func (r *Reservation) release(how outcome, now time.Time) {
	r.once.Do(func() {
		if how != finished {
			r.callOff()
		}
		p := r.replica
		p.mu.Lock()
		defer p.mu.Unlock()
		past := p.past
		p.remove(r, how, now, p.perSecond())
		p.warm.answered(p.past - past)
		p.inUse.leave(r, how, now)
		p.breaker.ended(r, how)
		switch {
		case how == aborted:
			p.connections.closed()
		case how == finished && !r.Aside:
			p.moved, p.delivered = now, now
			p.rate.own.finished(r.Uncached, now)
		}
	})
	r.replica.registry.lookBeside(now)
}

// Fail is Abort for an attempt that was not answered. It tells for how long
// the replica is avoided because of it, 0 where that is so already. If this
// process has no descriptor left for a connection, the attempt never got there
// (own), and nothing is held against the replica.
func (r *Reservation) Fail(now time.Time) (avoided time.Duration, own bool) {
	r.release(aborted, now)
	if r.replica.registry.toBlame(now) {
		return 0, true
	}
	r.replica.mu.Lock()
	defer r.replica.mu.Unlock()
	return r.replica.trip(r.sentAt, now), false
}

// Refuse is Abort for a request that was answered with an error of the given
// status. If that shows that the replica is unfit, and not the request, it is
// avoided: for a second, twice as long with each further time, and at least for
// retryAfter, its own word, of which a minute is believed at most. Refuse tells
// for how long, 0 where it is not avoided because of this.
func (r *Reservation) Refuse(status int, retryAfter time.Duration, now time.Time) (avoided time.Duration) {
	r.release(refused, now)
	if !unfit(status) {
		return 0
	}
	p := r.replica
	p.mu.Lock()
	defer p.mu.Unlock()
	avoided = p.breaker.erred(r, status, retryAfter, now)
	if p.breaker.open(now) {
		p.warm.start(p.breaker.until)
	}
	return avoided
}
