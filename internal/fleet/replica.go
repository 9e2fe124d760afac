// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"errors"
	"math"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/prompt"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/residency"
	"github.com/seed-2fa47a1e/caddy-kv-cache/metrics"
)

const (
	// DefaultCapacity is the KV cache size assumed of a replica that does not
	// tell its own, in tokens.
	DefaultCapacity = 500_000
	// defaultBlockTokens is the engine block assumed until told, in tokens.
	defaultBlockTokens = 16
	// hangAfter is how long a replica with requests in flight may leave every
	// counter where it was, on top of the time its queue explains.
	hangAfter = 10 * time.Second
	// strandedLeast is how many requests at least, and half of those in flight,
	// the engine must know nothing of for as long to show that what is before it
	// hangs. A few may be clients that read slowly.
	strandedLeast = 4
	// lostAfter is how old a request must be for an engine that counts it neither
	// as running nor as waiting not to know it: engines take requests in between
	// two steps, and a step may take most of a second.
	lostAfter = time.Second
	// lostWeight is how many prompts one such request counts for in a choice, and
	// lostMost how many of them count. Two are to outweigh a prompt that is cached
	// there; more than lostMost tell nothing new, and may be slow readers.
	lostWeight = 3
	lostMost   = 4
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
	assumed      assumed // what the fleet reckons with while nothing better is known
	meanUncached float64 // of the requests sent here, moving average

	moved     time.Time // when a counter last moved
	delivered time.Time // when one finished, or the engine last had most of them
	idleSince time.Time // when the ledger last became empty, or the first request came
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

// Free is how many tokens of KV cache are believed free, +Inf if the engine
// does not tell its capacity.
func (l Load) Free() float64 {
	if l.Capacity <= 0 {
		return math.Inf(1)
	}
	return l.Capacity - l.Used
}

// lostTokens is what requests count for in a choice that the engine knows
// nothing of.
func (p *Replica) lostTokens() float64 {
	n := min(p.lost, p.inFlight, lostMost)
	if n == 0 {
		return 0
	}
	return lostWeight * float64(n) * p.outstanding / float64(p.inFlight)
}

// Wait is the queue with what the engine is late by, in tokens at its rate.
func (l Load) Wait() float64 { return l.Queue + l.Rate*l.Late.Seconds() }

// Reservation is one request sent to one replica: it counts in the ledger from
// the choice until Release.
type Reservation struct {
	// Prompt, Uncached and Hit are the prompt's tokens, those believed to be
	// computed, and those believed cached.
	Prompt, Uncached, Hit float64
	// Bytes is the length of the prompt text that Prompt was estimated from,
	// zero if the tokens were given.
	Bytes float64
	// Chain is the prompt's text blocks, nil if it has none. It must not be changed.
	Chain []uint64

	replica  *Replica
	seq      uint64
	sentAt   time.Time
	expected time.Duration // from then to its first token
	past     bool
	place    int // in inUse, from 1
	once     sync.Once

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
	if p.inFlight == 0 {
		p.idleSince = now
	}
	p.breaker.sent(r)
	p.add(r, now, p.perSecond())
	p.connections.used(p.inFlight, now)
	p.inUse.take(r)
	p.meanUncached += (r.Uncached - p.meanUncached) / 16
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
		p.remove(r, how, now, p.perSecond())
		p.inUse.leave(r, how, now)
		p.breaker.ended(r, how)
		switch how {
		case aborted:
			p.connections.closed()
		case finished:
			p.moved, p.delivered = now, now
			p.warm.finished()
			p.rate.own.finished(r.Uncached, now)
		}
	})
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
// replica's own is not known.
func (p *Replica) perSecond() float64 { return p.rate.perSecond(p.assumed.rate, p.latest != nil) }

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
	// fresh scrape with a count of first tokens, and no other senders.
	QueueKnown bool
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
	// Room is how many more requests a replica that warms up may get now;
	// negative means it may get none. It is large for a warm one. Where this
	// process has no descriptor left, it is at most the number of connections to
	// the replica that are believed idle.
	Room int
	// Starved tells that for want of a descriptor a request has to wait until
	// one of those in flight leaves it its connection.
	Starved bool

	blocks int // that the residency index lets the replica hold
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
	l.Room = p.warm.room(p.inFlight, now)
	if p.registry.short(now) {
		idle := p.connections.idle(p.inFlight, now)
		l.Room, l.Starved = min(l.Room, idle), idle <= 0 && p.inFlight > 0
	}
	if p.fresh(now) == nil {
		l.KVUsage, l.QueueKnown = metrics.Fact{}, false
	}
	l.Lost = p.lostTokens()
	l.Scraped = p.scrapes.Last
	if l.QueueKnown {
		l.Late = p.late(now)
	}
	l.blocks = p.capacity
	l.Used = p.footing
	if l.KVUsage.Known && l.Capacity > 0 {
		l.Returned = max(0, p.gauged-p.outstanding) / l.Capacity
		l.Used = max(l.Used, l.KVUsage.Value*l.Capacity)
	}
	return l
}

// KVFree is the share of the KV cache that no request in flight uses, as far as
// that is known: 1 where it is not. A replica whose only request ended just
// after a scrape is as free as one that had none.
func (l *Load) KVFree() float64 {
	if !l.KVUsage.Known {
		return 1
	}
	return 1 - max(0, l.KVUsage.Value-l.Returned)
}

// late is how late the first in line is, as far as that is known: what has got
// its first token since the last scrape looks as if it still waited for it.
func (p *Replica) late(now time.Time) time.Duration {
	if known := p.scrapes.Last.Add(knownFor); known.Before(now) {
		now = known
	}
	return p.lateBy(now)
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
	if p.gone.Load() || l.blocks == 0 {
		return 0
	}
	return 1 - float64(p.registry.Index.Len(p.Slot))/float64(l.blocks)
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
		l.QueueKnown = p.trustFirstTokens(s, now)
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

// Transition is a change worth one log line.
type Transition struct {
	Fact     string
	Old, New string
}

// Observe takes in one scrape and returns what changed by it.
func (p *Replica) Observe(s metrics.Scrape, now time.Time) []Transition {
	p.mu.Lock()
	defer p.mu.Unlock()
	var changes []Transition
	note := func(fact, old, new string) {
		if old != new {
			changes = append(changes, Transition{fact, old, new})
		}
	}
	wasErr, wasAvoid := errText(p.scrapes.Err), p.avoid(now)
	p.scrapes.Err, p.scrapes.Took = s.Err, s.Duration
	if s.Err != nil {
		p.scrapes.Bad++
		p.scrapes.BadBy[metrics.FailureOf(s.Err)]++
		p.refused = errors.Is(s.Err, syscall.ECONNREFUSED) && !p.assumed.elsewhere
		if p.refused {
			p.warm.start(now)
		}
		// A page that used to answer and hangs may be an engine that does. Any
		// other failure tells nothing of the engine.
		hangs := p.latest != nil && errors.Is(s.Err, context.DeadlineExceeded)
		p.guardAgainstHang(now, !hangs, false)
		note("scrape", wasErr, errText(s.Err))
		note("choice", wasAvoid.String(), p.avoid(now).String())
		return changes
	}
	p.refused = false
	p.scrapes.Good++
	p.scrapes.Last = now
	prev, next := p.latest, s.Snapshot
	p.latest = next
	p.gauged = p.since(now.Add(-s.Duration))
	p.roster.page.Store(next)
	note("scrape", wasErr, "")
	if prev == nil {
		note("engine", "", next.Engine.String())
	} else {
		note("engine", prev.Engine.String(), next.Engine.String())
		if metrics.Restarted(prev, next) {
			p.restart(now)
			note("restart", "no", "yes")
			prev = nil
		}
	}
	if prev == nil && next.StartTime.Known && now.Sub(unix(next.StartTime.Value)) < recentStart {
		p.warm.start(now)
	}
	p.learn(prev, next, s.Duration, now)
	p.resize()
	p.settle(now)
	note("choice", wasAvoid.String(), p.avoid(now).String())
	return changes
}

// restart forgets what a new process on the same address cannot know.
func (p *Replica) restart(now time.Time) {
	p.Forget()
	p.inUse.cleared()
	if t := p.truth.Load(); t != nil {
		t.restarted(now)
	}
	p.roster.list(nil)
	p.text.skip()
	p.baseKnown = false
	p.calibrated = calibration{}
	p.hung = false
	p.breaker = breaker{}
	p.moved, p.delivered = now, now
	p.warm.start(now)
}

// learn corrects ledger, rate, text ratio and trust by what the engine counted
// between two scrapes of one process. prev is nil for the first.
func (p *Replica) learn(prev, next *metrics.Snapshot, lag time.Duration, now time.Time) {
	perSecond := p.perSecond()
	p.drain(now, perSecond)
	p.guardAgainstHang(now, prev == nil || counted(prev, next), p.stranded(next))
	worked := perSecond * lag.Seconds()

	p.firstTokens(next, worked, now)
	p.lost = p.missing(next, now.Add(-lag))
	if next.Waiting.Known {
		// The engine's queue is shared by all senders; ours are at most so many.
		p.raiseTo(int(min(next.Waiting.Value, float64(p.unstarted()))), worked)
	}
	p.countOthers(next)
	if prev != nil {
		if computed, told := uncachedBetween(prev, next); told {
			p.rate.observe(work{
				tokens:    computed,
				requests:  delta(prev.FirstTokens, next.FirstTokens),
				prefill:   prefillBetween(prev, next),
				prefilled: delta(prev.PrefillTokens, next.PrefillTokens),
				pairs:     prev.PrefillTokens.Known && next.PrefillTokens.Known && next.PrefillSeconds.Known,
				seconds:   next.At.Sub(prev.At).Seconds(),
			})
		}
		if p.foreign.now(now) {
			p.text.skip()
		} else {
			x := p.passed
			x.counted, x.firsts = next.FirstTokens.Known, delta(prev.FirstTokens, next.FirstTokens)
			x.tokens = delta(prev.PromptTokens, next.PromptTokens)
			p.text.observe(x)
			p.calibrated.observe(p.passedHits, delta(prev.PrefixHits, next.PrefixHits), next.CapacityTokens.Or(p.assumed.capacity))
		}
	}
	p.passed, p.passedHits = texts{}, 0
}

// firstTokens reads the engine's count of first tokens: with what we sent it
// says how many of our requests have none yet. The engine counts other
// senders' too; base is the count it had before any of ours, as far as that is
// consistent: what we sent can have at most as many first tokens as requests,
// and at least as many as we know of.
func (p *Replica) firstTokens(s *metrics.Snapshot, worked float64, now time.Time) {
	if !s.FirstTokens.Known {
		return
	}
	count := s.FirstTokens.Value
	if !p.baseKnown {
		p.base, p.baseKnown = count-float64(p.past), true
		return
	}
	ours := count - p.base
	if extra := min(ours-float64(p.sent), float64(p.unsure)); extra > 0 {
		// They had one after all.
		p.sent += uint64(extra)
		p.past += uint64(extra)
		p.unsure -= uint64(extra)
	}
	if p.unstarted() == 0 {
		p.unsure = 0
	}
	switch {
	case ours > float64(p.sent):
		p.foreign.add(ours-float64(p.sent), now)
		p.base = count - float64(p.sent)
		ours = float64(p.sent)
	case ours < float64(p.past):
		p.base = count - float64(p.past)
		ours = float64(p.past)
	}
	if p.foreign.now(now) {
		return
	}
	p.clampTo(int(math.Round(float64(p.sent)-ours)), worked)
}

// trustFirstTokens tells whether the first-token counter speaks of our
// requests alone.
func (p *Replica) trustFirstTokens(s *metrics.Snapshot, now time.Time) bool {
	return s.FirstTokens.Known && p.baseKnown && !p.foreign.now(now)
}

// countOthers estimates what the engine does for other senders.
func (p *Replica) countOthers(s *metrics.Snapshot) {
	p.others, p.otherTokens = 0, 0
	if !s.Running.Known || !s.Waiting.Known {
		return
	}
	// Gauges lag a step behind, so a request more or less is no other sender.
	extra := s.Running.Value + s.Waiting.Value - float64(p.inFlight)
	if extra <= 2 {
		return
	}
	p.others = extra
	if waiting := s.Waiting.Value - float64(p.unstarted()); waiting > 0 {
		p.otherTokens = waiting * p.meanUncached
	}
}

// stranded tells whether the engine knows nothing of most of our requests: it
// has answered, and a front between it and us holds the answers.
func (p *Replica) stranded(s *metrics.Snapshot) bool {
	if !s.Running.Known || !s.Waiting.Known {
		return false
	}
	lost := float64(p.inFlight) - s.Running.Value - s.Waiting.Value
	return lost >= max(strandedLeast, float64(p.inFlight)/2)
}

// missing is how many requests in flight the engine knew nothing of at a time,
// beyond the few whose answers are on their way.
func (p *Replica) missing(s *metrics.Snapshot, at time.Time) int {
	if !s.Running.Known || !s.Waiting.Known {
		return 0
	}
	return max(0, p.inUse.takenIn(at.Add(-lostAfter))-int(s.Running.Value+s.Waiting.Value)-p.inFlight/16)
}

// guardAgainstHang notes a replica whose counters stand still although it has
// work: its health endpoint and its metrics page may well answer. So it does one
// whose requests are stranded while none is answered.
func (p *Replica) guardAgainstHang(now time.Time, counters, stranded bool) {
	if counters {
		p.moved = now
	}
	if !stranded {
		p.delivered = now
	}
	if p.inFlight == 0 {
		p.hung = false
		return
	}
	since := p.moved
	if p.delivered.Before(since) {
		since = p.delivered
	}
	if p.idleSince.After(since) {
		since = p.idleSince
	}
	patience := hangAfter + time.Duration(2*p.backlog/p.perSecond()*float64(time.Second))
	hung := now.Sub(since) > patience
	if p.hung && !hung {
		p.warm.start(now)
	}
	p.hung = hung
}

// resize tells the residency index how many text blocks the replica's KV cache
// can hold.
func (p *Replica) resize() {
	tokens := p.assumed.capacity
	if p.latest != nil && p.latest.CapacityTokens.Known {
		tokens = p.latest.CapacityTokens.Value
	}
	if t := p.truth.Load(); t != nil && p.latest != nil && p.latest.CapacityTokens.Known {
		t.resize(tokens, p.latest.BlockTokens.Or(defaultBlockTokens))
	}
	tokens *= p.calibrated.capacity()
	blocks := max(1, int(tokens*p.assumed.bytesPerToken/prompt.BlockSize))
	if d := blocks - p.capacity; d > p.capacity/50 || -d > p.capacity/50 {
		p.capacity = blocks
		if !p.gone.Load() {
			p.registry.Index.SetCapacity(p.Slot, blocks)
		}
	}
}

// counted tells whether any counter that only work moves has moved.
func counted(prev, next *metrics.Snapshot) bool {
	for _, pair := range [...][2]metrics.Fact{
		{prev.GenerationTokens, next.GenerationTokens},
		{prev.PromptTokens, next.PromptTokens},
		{prev.FirstTokens, next.FirstTokens},
		{prev.Finished, next.Finished},
		{prev.PrefixQueries, next.PrefixQueries},
	} {
		if pair[0].Known != pair[1].Known || pair[0].Value != pair[1].Value {
			return true
		}
	}
	// An engine without any of them can't be caught standing still.
	return !next.GenerationTokens.Known && !next.PromptTokens.Known && !next.FirstTokens.Known
}

// uncachedBetween is how many prompt tokens the engine computed between two scrapes.
func uncachedBetween(prev, next *metrics.Snapshot) (float64, bool) {
	if next.ComputedPromptTokens.Known {
		return delta(prev.ComputedPromptTokens, next.ComputedPromptTokens), true
	}
	if next.PromptTokens.Known && next.CachedPromptTokens.Known {
		return delta(prev.PromptTokens, next.PromptTokens) - delta(prev.CachedPromptTokens, next.CachedPromptTokens), true
	}
	if next.PrefixQueries.Known && next.PrefixHits.Known {
		return delta(prev.PrefixQueries, next.PrefixQueries) - delta(prev.PrefixHits, next.PrefixHits), true
	}
	return 0, false
}

// prefillBetween is how long requests were in prefill between two scrapes: as
// the engine says, or else until their first token less the time in its queue;
// 0 if it tells neither.
func prefillBetween(prev, next *metrics.Snapshot) float64 {
	if next.PrefillSeconds.Known {
		return delta(prev.PrefillSeconds, next.PrefillSeconds)
	}
	if next.FirstTokenSeconds.Known && next.QueueSeconds.Known {
		return max(0, delta(prev.FirstTokenSeconds, next.FirstTokenSeconds)-delta(prev.QueueSeconds, next.QueueSeconds))
	}
	return 0
}

func delta(prev, next metrics.Fact) float64 {
	if !prev.Known || !next.Known {
		return 0
	}
	return max(0, next.Value-prev.Value)
}

func errText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

func unix(seconds float64) time.Time {
	return time.Unix(0, int64(seconds*float64(time.Second)))
}
