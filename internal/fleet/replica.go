// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"sync/atomic"
	"time"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/residency"
	"github.com/seed-2fa47a1e/caddy-kv-cache/metrics"
)

const (
	// DefaultCapacity is the KV cache size assumed of a replica that does not
	// tell its own, in tokens.
	DefaultCapacity = 500_000
	// defaultBlockTokens is the engine block assumed until told, in tokens.
	defaultBlockTokens = 16
)

// Replica is one engine endpoint: all that is known of it, shared by every
// policy and config generation that names its dial address. It is safe for
// concurrent use, and no method does I/O.
type Replica struct {
	// Addr is the dial address, as written in the upstream.
	Addr string
	// ID is a hash of Addr, the same in every process.
	ID uint64
	// Slot is the replica's place in the registry's residency index.
	Slot residency.Slot

	registry *Registry
	gone     atomic.Bool // its slot is not its own any more
	truth    atomic.Pointer[truth]

	roster roster

	mu marked
	ledger
	inUse      inUse
	rate       rate
	calibrated calibration
	text       textRatio
	latest     *metrics.Snapshot // last good scrape, nil before the first
	scrapes    ScrapeStats
	seq        uint64

	// first-token counter at which past would be zero; see firstTokens.
	base      float64
	baseKnown bool
	foreign   foreign
	// what the engine had running and waiting beyond our own at the last scrape
	others      float64
	otherTokens float64
	gauged      float64 // our prompt tokens in flight when the engine told its KV usage

	capacity     int     // blocks told to the residency index
	atMost       float64 // tokens a second, by how long the first in line has waited; 0 if it has not
	assumed      assumed // what the fleet reckons with while nothing better is known
	meanUncached float64 // of the requests sent here, moving average

	moved     time.Time // when a counter last moved
	delivered time.Time // when one finished, or the engine last had most of them
	idleSince time.Time // when the first request came that the engine computes, after it had none
	hung      bool
	refused   bool
	lost      int // requests in flight that the engine knew nothing of at the last scrape

	breaker breaker
	warm    warmUp

	drained bool // taken out by an operator

	connections connections // estimated, for when no more can be made

	standing Load // what only scrapes change; see settle
}

// assumed is what a fleet lends a replica whose own measurements are missing.
type assumed struct {
	rate          float64 // uncached prompt tokens a second
	measured      bool    // something was measured of it, at any member
	speed         float64 // the same at the best of times; 0 while unknown
	bytesPerToken float64
	capacity      float64       // KV cache in tokens
	staleAfter    time.Duration // age at which a scrape is not believed any more
	elsewhere     bool          // the metrics page has another port than the requests
}

// ScrapeStats counts what happened to a replica's scrapes.
type ScrapeStats struct {
	Good, Bad uint64
	BadBy     metrics.FailureCounts // the bad ones by reason
	Last      time.Time             // end of the last good one
	Took      time.Duration
	Err       error // of the last one, nil if it was good
}

// Failed notes that the replica does not answer. It is avoided for a while,
// longer with each failure in a row. Those that come while it is avoided are of
// the same event, such as a crash with requests in flight, and count once.
func (p *Replica) Failed(now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.trip(now, now)
}

func (p *Replica) trip(sent, now time.Time) time.Duration {
	avoided := p.breaker.trip(sent, 0, now)
	p.warm.start(p.breaker.until)
	return avoided
}

// Unavailable notes that Caddy holds the replica for unhealthy or full, so
// that it warms up gradually when it comes back.
func (p *Replica) Unavailable(now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.warm.start(now)
}

// Drain takes the replica out of the choice (true) or back in (false).
func (p *Replica) Drain(out bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.drained = out
	if !out {
		p.warm.start(time.Time{})
	}
}

// Holds notes that the replica was sent the prompt of a chain, and so will
// hold its blocks.
func (p *Replica) Holds(chain []uint64) {
	if !p.gone.Load() {
		p.registry.Index.Insert(p.Slot, chain)
	}
}

// stay is what outlives neither the replica's leaving nor its being emptied.
func (p *Replica) stay() residency.Stay {
	stay := p.registry.Index.Stay(p.Slot)
	if p.gone.Load() { // asked afterwards: before it, the slot was its own
		return residency.Stay{}
	}
	return stay
}

// Lacks takes back Holds and Land for the blocks of a chain from index from on: the
// replica did not take the request.
func (p *Replica) Lacks(chain []uint64, from int) {
	if !p.gone.Load() {
		p.registry.Index.Remove(p.Slot, chain, from)
	}
}

// Matched picks the replica's own figure out of what Index.Match returned.
func (p *Replica) Matched(blocks []int32) int {
	if p.gone.Load() || p.Slot < 0 || int(p.Slot) >= len(blocks) {
		return 0
	}
	return int(blocks[p.Slot])
}

// Forget drops everything believed about the replica's cache.
func (p *Replica) Forget() {
	if !p.gone.Load() {
		p.registry.Index.Clear(p.Slot)
	}
}

// cleared drops it because the engine has emptied its cache.
func (p *Replica) cleared() {
	p.mu.Lock()
	p.inUse.cleared()
	p.mu.Unlock()
	p.Forget()
}

// perSecond is the learned prefill rate, or the mean of the others while this
// replica's own is not known. While nobody's is, it is not taken to be faster than
// the first in line shows.
func (p *Replica) perSecond() float64 {
	rate := p.unhurried()
	if p.atMost > 0 && p.unlearned() {
		rate = min(rate, max(p.atMost, slowestAssumed))
	}
	return rate
}

// unhurried is perSecond, whoever waits.
func (p *Replica) unhurried() float64 { return p.rate.perSecond(p.assumed.rate, p.latest != nil) }

// unlearned tells whether nothing was seen of how fast this replica is, nor measured
// of the fleet.
func (p *Replica) unlearned() bool { return !p.assumed.measured && p.rate.unseen() }

// sameKind is the ratio of speeds within which machines count as equal.
const sameKind = 1.2

func (p *Replica) pace() float64 {
	if p.assumed.speed <= 0 || p.rate.speed.peak <= 0 {
		return 1
	}
	pace := p.rate.speed.peak / p.assumed.speed
	if pace < sameKind && pace > 1/sameKind {
		return 1
	}
	return pace
}
