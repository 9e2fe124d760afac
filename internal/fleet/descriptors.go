// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"sync/atomic"
	"time"
)

const (
	// lookAgain is how old the knowledge may be that this process has a
	// descriptor left, or none. One that is left is looked for when a request
	// ends, so that nobody waits for that; where none has ended for long, when one
	// comes, after lookAtLast.
	lookAgain  = 5 * time.Millisecond
	lookAtLast = 4 * lookAgain
	// blameFor is how long after the last one was missing a failed attempt is
	// still put down to that: the policy hears of it at the next attempt.
	blameFor = time.Second
)

// descriptors remembers whether this process could open another file or
// connection. Where it can't, attempts that need a new connection fail, and that
// says nothing about the replica. It is safe for concurrent use.
type descriptors struct {
	looked  atomic.Int64 // when, in nanoseconds since epoch; 0 for never
	missing atomic.Int64 // when none was left the last time, likewise
}

// none tells whether no descriptor was left when it was last looked. A look that
// found one is good for goodFor, another for lookAgain.
func (g *Registry) none(now time.Time, goodFor time.Duration) bool {
	if g.Exhausted == nil {
		return false
	}
	d := &g.descriptors
	at, looked := int64(now.Sub(epoch)), d.looked.Load()
	none := looked != 0 && d.missing.Load() == looked
	if none {
		goodFor = lookAgain
	}
	if since := at - looked; looked != 0 && since >= 0 && since < int64(goodFor) {
		return none
	}
	d.looked.Store(at)
	if !g.Exhausted() { // which opens a file: some microseconds and more
		return false
	}
	d.missing.Store(at)
	return true
}

// short tells whether no descriptor is left.
func (g *Registry) short(now time.Time) bool { return g.none(now, lookAtLast) }

// lookBeside looks so that no request that comes has to.
func (g *Registry) lookBeside(now time.Time) { g.none(now, lookAgain) }

// toBlame tells whether a failure that was just heard of may be due to that.
func (g *Registry) toBlame(now time.Time) bool {
	if g.none(now, lookAgain) {
		return true
	}
	missing := g.descriptors.missing.Load()
	return missing != 0 && int64(now.Sub(epoch))-missing < int64(blameFor)
}

// connections estimates how many connections to one replica are open: as many
// as there have been requests in flight at once a moment ago. A proxy keeps an
// idle connection for longer than that. Over HTTP/2 fewer will do.
type connections struct {
	most, before int // requests in flight at once since at, and in the time before
	at           time.Time
}

// connectionsFor is the time that connections are looked back for, and up to
// twice that. A proxy keeps those that are idle for longer.
const connectionsFor = 500 * time.Millisecond

// used notes how many requests are in flight.
func (c *connections) used(inFlight int, now time.Time) {
	c.turn(inFlight, now)
	c.most = max(c.most, inFlight)
}

// closed notes that one is gone: its request was broken off, or got none.
func (c *connections) closed() {
	c.most, c.before = max(0, c.most-1), max(0, c.before-1)
}

// idle is how many more requests can be sent over them.
func (c *connections) idle(inFlight int, now time.Time) int {
	c.turn(inFlight, now)
	return max(c.most, c.before) - inFlight
}

func (c *connections) turn(inFlight int, now time.Time) {
	since := now.Sub(c.at)
	if since < connectionsFor {
		return
	}
	if c.before = c.most; since >= 2*connectionsFor {
		c.before = inFlight
	}
	c.most, c.at = inFlight, now
}
