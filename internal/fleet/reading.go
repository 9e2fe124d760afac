// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"sync"
	"sync/atomic"
	"time"
)

// marked is a lock that counts the changes made under it, so that who has read
// what it guards can tell without the lock whether that is still so.
type marked struct {
	mu      sync.Mutex
	changes atomic.Uint64
}

// Lock and Unlock hold it to change something.
func (m *marked) Lock() { m.mu.Lock() }
func (m *marked) Unlock() {
	m.changes.Add(1)
	m.mu.Unlock()
}

// RLock and RUnlock hold it to read. They exclude other readers too: it is held
// for too short a time for more to be worth its while.
func (m *marked) RLock()   { m.mu.Lock() }
func (m *marked) RUnlock() { m.mu.Unlock() }

// Reading is a replica's load, with what it takes to keep it up to date. A
// choice reads the loads of all replicas, few of which have changed since the
// one before, but for their queues, which drain.
type Reading struct {
	Load

	replica *Replica
	changes uint64    // of the replica, when it was read
	until   time.Time // before it nothing but the queue changes by itself

	backlog, others float64 // parts of the queue: ours, and what isn't
	asOf            time.Time
}

// Read brings a reading up to now, and tells whether that has changed it. It
// then is what Load returns.
func (p *Replica) Read(r *Reading, now time.Time) (changed bool) {
	if r.replica != p || r.changes != p.mu.changes.Load() || !now.Before(r.until) || p.registry.short(now) {
		p.readAnew(r, now)
		return true
	}
	if r.backlog == 0 {
		return false
	}
	r.Queue = drained(r.backlog, r.asOf, now, r.Rate) + r.others
	return true
}

func (p *Replica) readAnew(r *Reading, now time.Time) {
	p.mu.RLock()
	defer p.mu.RUnlock()
	*r = Reading{
		Load:    p.load(now),
		replica: p,
		changes: p.mu.changes.Load(),
		until:   p.steadyUntil(now),
		backlog: p.backlog,
		others:  p.otherTokens,
		asOf:    p.asOf,
	}
}

// steadily is for how long at most a reading is relied on.
const steadily = time.Minute

// steadyUntil is until when nothing but the queue can change by itself in what
// load tells now.
func (p *Replica) steadyUntil(now time.Time) time.Time {
	until := now.Add(steadily)
	sooner := func(at time.Time) {
		if !at.Before(now) && at.Before(until) {
			until = at
		}
	}
	if p.latest != nil {
		sooner(p.scrapes.Last.Add(p.assumed.staleAfter))
	}
	if p.warm.cold {
		sooner(p.warm.since.Add(warmWithin))
	}
	if p.standing.QueueKnown {
		switch late, ok := p.lateFrom(p.standing.Rate); {
		case !ok:
		case late.Before(now):
			return now // and gets later
		default:
			sooner(late)
		}
	}
	if p.breaker.failures > 0 || p.registry.short(now) {
		return now // what these say changes by itself
	}
	return until
}
