// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"math"
	"time"

	"github.com/seed-2fa47a1e/caddy-kv-cache/metrics"
)

// Avoid says why a replica should not be chosen while another can be.
type Avoid uint8

const (
	Eligible Avoid = iota
	Failing        // attempts failed or were answered with errors a moment ago
	Refused        // its port refuses connections
	Hung           // requests in flight and no counter moves
	Asleep         // the engine says so
	Drained        // an operator took it out
)

var avoidNames = [...]string{"eligible", "failing", "refused", "hung", "asleep", "drained"}

func (a Avoid) String() string { return avoidNames[a] }

// Load is what a choice needs to know of a replica at one moment.
type Load struct {
	Avoid Avoid
	// Queue is the number of uncached prompt tokens believed to wait for prefill.
	Queue float64
	// QueueKnown tells whether the engine's own figures keep Queue right: a
	// fresh scrape with a count of first tokens, or else of the requests that run
	// and of those that wait, and no other senders.
	QueueKnown bool
	// Shared tells that others send requests there as well, such as another Caddy.
	Shared bool
	// Scraped is when the last good scrape ended, which was the last time that
	// they did; zero before the first.
	Scraped time.Time
	// Late is how much longer than its queue explains the first in line has
	// waited for its first token, as far as that is known: the engine is full, or
	// slow. 0 unless QueueKnown.
	Late time.Duration
	// Lost is what requests in flight count for, in tokens, that the engine knows
	// nothing of: something between it and us keeps their answers, or has kept
	// them from it, and may do so with the next. The engine does not work on it.
	Lost float64
	// Rate is how many of them the replica prefills a second; RateKnown tells
	// whether that was learned from this replica itself.
	Rate      float64
	RateKnown bool
	// Pace is the machine's speed relative to the fleet's mean, 1 unless it is
	// surely of another kind.
	Pace float64
	// InFlight counts requests sent and not finished, others' included where
	// the engine tells.
	InFlight float64
	// KVUsage is the engine's own figure (0..1), unknown when stale or absent.
	KVUsage metrics.Fact
	// Returned is the share of the KV cache that our requests have given back
	// since KVUsage was read. What they have taken since is in Queue and InFlight.
	Returned float64
	// Capacity is the KV cache in tokens, 0 when unknown; Used is how many of
	// them requests in flight are believed to hold.
	Capacity, Used float64
	// BlockTokens is the engine's block.
	BlockTokens float64
	// Trust (0..1) is the share of believed hits that the engine confirms.
	Trust float64
	// Warming tells that the replica was not there a moment ago, and Room how many
	// more requests it may get now where others can serve them; negative means it
	// may get none. It is large for a warm one.
	Warming bool
	Room    int
	// Connections is how many more requests can be given a connection now: large,
	// but where this process has no descriptor left, those believed idle.
	Connections int
	// Starved tells that for want of a descriptor a request has to wait until
	// one of those in flight leaves it its connection.
	Starved bool

	// Blocks is how many blocks of text the residency index lets the replica hold.
	Blocks int
}

// Free is how many tokens of KV cache are believed free, +Inf if the engine
// does not tell its capacity.
func (l Load) Free() float64 {
	if l.Capacity <= 0 {
		return math.Inf(1)
	}
	return l.Capacity - l.Used
}

// Wait is the queue with what the engine is late by, in tokens at its rate.
func (l Load) Wait() float64 { return l.Queue + l.Rate*l.Late.Seconds() }

// KVFree is the share of the KV cache that no request in flight uses, as far as
// that is known: 1 where it is not. A replica whose only request ended just
// after a scrape is as free as one that had none.
func (l *Load) KVFree() float64 {
	if !l.KVUsage.Known {
		return 1
	}
	return 1 - max(0, l.KVUsage.Value-l.Returned)
}

// Outstanding is the number of prompt tokens of our requests in flight.
func (p *Replica) Outstanding() float64 {
	p.mu.RLock()
	defer p.mu.RUnlock()
	return p.outstanding
}

// Backlog is the number of prompt tokens of our requests that are believed to
// wait for prefill, and of all that are in flight.
func (p *Replica) Backlog(now time.Time) (queue, outstanding float64) {
	p.mu.RLock()
	defer p.mu.RUnlock()
	return p.queue(now, p.perSecond()), p.outstanding
}

// Avoided says why the replica should not be chosen while another can be.
func (p *Replica) Avoided(now time.Time) Avoid {
	p.mu.RLock()
	defer p.mu.RUnlock()
	return p.avoid(now)
}

// Load reads the replica's state at now.
func (p *Replica) Load(now time.Time) Load {
	p.mu.RLock()
	defer p.mu.RUnlock()
	return p.load(now)
}

func (p *Replica) load(now time.Time) Load {
	l := p.standing
	l.Avoid = p.avoid(now)
	l.Queue = p.queue(now, l.Rate) + p.otherTokens
	l.InFlight = float64(p.inFlight) + p.others
	l.Warming = p.warm.up(p.computing(), now)
	l.Room, l.Connections = plenty, plenty
	if l.Warming {
		l.Room = p.warm.room(p.computing())
	}
	if p.registry.short(now) {
		l.Connections = p.connections.idle(p.inFlight, now)
		l.Starved = l.Connections <= 0 && p.inFlight > 0
	}
	if p.fresh(now) == nil {
		l.KVUsage, l.QueueKnown = metrics.Fact{}, false
	} else {
		l.Lost = p.lostTokens()
	}
	l.Scraped = p.scrapes.Last
	if l.QueueKnown {
		l.Late = p.late(now)
	}
	l.Blocks = p.capacity
	l.Used = p.footing
	if l.KVUsage.Known && l.Capacity > 0 {
		l.Returned = max(0, p.gauged-p.outstanding) / l.Capacity
		l.Used = max(l.Used, l.KVUsage.Value*l.Capacity)
	}
	return l
}

// plenty is more requests than any replica is sent.
const plenty = 1 << 30

// late is how late the first in line is, as far as that is known: what has got
// its first token since the last scrape looks as if it still waited for it.
func (p *Replica) late(now time.Time) time.Duration {
	if known := p.scrapes.Last.Add(knownFor); known.Before(now) {
		now = known
	}
	return p.lateBy(now, p.standing.Rate)
}

// knownFor is how long after a scrape requests that had no first token by then
// are taken to wait for it.
const knownFor = time.Second

// Connectable tells whether a request can be sent: over an idle connection, or
// because this process has a descriptor for a new one.
func (p *Replica) Connectable(now time.Time) bool {
	if !p.registry.short(now) {
		return true
	}
	p.mu.RLock()
	defer p.mu.RUnlock()
	return p.connections.idle(p.inFlight, now) > 0
}

// Spare is the share of the replica's KV cache that is believed to hold nothing
// yet: by its events, or else by the blocks in the residency index.
func (p *Replica) Spare(l *Load) float64 {
	if t := p.truth.Load(); t != nil && l.Capacity > 0 {
		if taken, ok := t.taken(); ok {
			return max(0, 1-taken/l.Capacity)
		}
	}
	if p.gone.Load() || l.Blocks == 0 {
		return 0
	}
	return 1 - float64(p.registry.Index.Len(p.Slot))/float64(l.Blocks)
}

// settle works out what a Load says until the next scrape.
func (p *Replica) settle(now time.Time) {
	l := Load{
		Rate:        p.perSecond(),
		RateKnown:   p.rate.known(),
		Pace:        p.pace(),
		BlockTokens: defaultBlockTokens,
		Trust:       p.calibrated.trust(),
	}
	if s := p.latest; s != nil {
		l.KVUsage = s.KVUsage
		l.QueueKnown, l.Shared = p.queueKnown(s, now), p.foreign.now(now)
		if s.BlockTokens.Known && s.BlockTokens.Value >= 1 {
			l.BlockTokens = s.BlockTokens.Value
		}
		if s.CapacityTokens.Known {
			l.Capacity = s.CapacityTokens.Value
		}
		if s.PrefixCaching.Known && s.PrefixCaching.Value == 0 {
			l.Trust = 0
		}
	}
	p.standing = l
}

func (p *Replica) avoid(now time.Time) Avoid {
	switch {
	case p.drained:
		return Drained
	case p.breaker.open(now):
		return Failing
	case p.refused:
		return Refused
	case p.hung:
		return Hung
	case p.latest != nil && p.latest.Asleep.Known && p.latest.Asleep.Value > 0:
		return Asleep
	}
	return Eligible
}

// fresh is the last good scrape if it is young enough to be believed.
func (p *Replica) fresh(now time.Time) *metrics.Snapshot {
	if p.latest == nil || now.Sub(p.scrapes.Last) > p.assumed.staleAfter {
		return nil
	}
	return p.latest
}

const (
	// lostWeight is how many prompts one such request counts for in a choice, and
	// lostMost how many of them count. Two are to outweigh a prompt that is cached
	// there; more than lostMost tell nothing new, and may be slow readers.
	lostWeight = 3
	lostMost   = 4
)

// lostTokens is what requests count for in a choice that the engine knows
// nothing of.
func (p *Replica) lostTokens() float64 {
	n := min(p.lost, p.computing(), lostMost)
	if n == 0 {
		return 0
	}
	return lostWeight * float64(n) * p.outstanding / float64(p.computing())
}
