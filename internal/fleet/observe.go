// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"errors"
	"math"
	"syscall"
	"time"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/prompt"
	"github.com/seed-2fa47a1e/caddy-kv-cache/metrics"
)

const (
	// hangAfter is how long a replica with requests in flight may leave every
	// counter where it was, on top of the time its queue explains.
	hangAfter = 10 * time.Second
	// strandedLeast is how many requests at least, and half of those in flight,
	// the engine must know nothing of for as long to show that what is before it
	// hangs. A few may be clients that read slowly.
	strandedLeast = 4
	// lostAfter is how old a request must be at least, and lostAfterTokens how many
	// tokens the engine must have had time to compute since it was sent, for an
	// engine that counts it neither as running nor as waiting not to know it:
	// engines take requests in between two steps, and tell of them after the next.
	// A step is up to 2,048 tokens by vLLM's default, or a second's worth.
	lostAfter       = time.Second
	lostAfterTokens = 2 * 2048
	// lostUnlearned is lostAfter while nothing is known of how fast the fleet is.
	lostUnlearned = 5 * time.Second
)

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
	perSecond, past := p.perSecond(), p.past
	p.drain(now, perSecond)
	p.guardAgainstHang(now, prev == nil || counted(prev, next), p.stranded(next))
	worked := perSecond * lag.Seconds()

	p.firstTokens(next, worked, now)
	p.lost = p.missing(next, now.Add(-lag))
	p.countOthers(next, now)
	p.gauges(next, worked, now)
	p.warm.answered(p.past - past)
	p.atMost = p.slowest(now.Add(-lag))
	if prev != nil {
		p.learnRate(prev, next, now)
		p.learnText(prev, next, now)
	}
	p.scraped()
}

// learnRate learns from two scrapes how fast the replica is. Where the engine does
// not count what it computed, we go by what was believed to be uncached, and by
// what it had to compute of those that it began with.
func (p *Replica) learnRate(prev, next *metrics.Snapshot, now time.Time) {
	others := p.foreign.now(now)
	computed, told := computedBetween(prev, next)
	begun := computed
	if !told {
		computed = p.passedUncached
		if begun, told = lookedUpBetween(prev, next); !told {
			begun = computed
		}
	}
	switch {
	case others || !p.queueKnown(next, now):
		p.rate.shown = shown{} // it was others' as well, and who knows since when
	case !told && p.rate.known():
		p.rate.shown = shown{} // what is only believed is worth less than prefill times
	default:
		p.rate.shown.observe(stretch{p.unpassed, computed, begun}, now)
	}
	if others && !told {
		return // the times are theirs as well
	}
	p.rate.observe(work{
		tokens:    begun,
		requests:  p.firstTokensBetween(prev, next),
		prefill:   prefillBetween(prev, next),
		prefilled: delta(prev.PrefillTokens, next.PrefillTokens),
		pairs:     prev.PrefillTokens.Known && next.PrefillTokens.Known && next.PrefillSeconds.Known,
		seconds:   next.At.Sub(prev.At).Seconds(),
	})
}

// learnText learns what the text of our requests is in tokens, and how much of
// the hits that were believed there were.
func (p *Replica) learnText(prev, next *metrics.Snapshot, now time.Time) {
	if p.foreign.now(now) {
		p.text.skip()
		return
	}
	x := p.passed
	x.counted, x.firsts = next.FirstTokens.Known, delta(prev.FirstTokens, next.FirstTokens)
	x.tokens = delta(prev.PromptTokens, next.PromptTokens)
	p.text.observe(x)
	if hits, told := hitsBetween(prev, next); told {
		p.calibrated.observe(p.passedHits, hits, next.CapacityTokens.Or(p.assumed.capacity))
	}
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
	// Of the first of them something may have been computed.
	m := int(math.Round(float64(p.sent) - ours))
	p.bound(m-1, m, worked)
}

// gauges reads how many requests the engine runs and how many wait. Of those that
// wait nothing was computed. Where it does not count first tokens, the gauges
// stand in: what neither waits nor runs has not arrived there yet. All others
// run, and an engine runs what came first; so of those that run only one can
// have no first token yet, beside what is computed in the same step. (Each rank
// has a line of its own.)
func (p *Replica) gauges(s *metrics.Snapshot, worked float64, now time.Time) {
	p.surely = 0
	if !s.Waiting.Known {
		return
	}
	// The engine's queue is shared by all senders; ours are at most so many.
	least := int(min(s.Waiting.Value, float64(p.unstarted())))
	most := p.unstarted()
	if !s.FirstTokens.Known && p.queueKnown(s, now) {
		most = max(least, p.computing()-int(s.Running.Value)) + max(1, s.Rows)
		if p.surely = p.seq + 1; least > 0 {
			p.surely = p.waiting[len(p.waiting)-least].seq
		}
	}
	p.bound(least, most, worked)
}

// queueKnown tells whether a scrape says how many of our requests have no first
// token yet: no other sender's are among those it counts.
func (p *Replica) queueKnown(s *metrics.Snapshot, now time.Time) bool {
	switch {
	case p.foreign.now(now):
		return false
	case s.FirstTokens.Known:
		return p.baseKnown
	}
	return s.Running.Known && s.Waiting.Known
}

// countOthers estimates what the engine does for other senders.
func (p *Replica) countOthers(s *metrics.Snapshot, now time.Time) {
	p.others, p.otherTokens = 0, 0
	if !s.Running.Known || !s.Waiting.Known {
		return
	}
	// Gauges lag a step behind, so a request more or less is no other sender.
	extra := s.Running.Value + s.Waiting.Value - float64(p.computing())
	if extra <= 2 {
		return
	}
	p.others = extra
	if !s.FirstTokens.Known {
		p.foreign.add(extra, now) // nothing else tells of them
	}
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
	ours := float64(p.computing())
	return ours-s.Running.Value-s.Waiting.Value >= max(strandedLeast, ours/2)
}

// missing is how many requests in flight the engine knew nothing of at a time,
// beyond the few whose answers are on their way.
func (p *Replica) missing(s *metrics.Snapshot, at time.Time) int {
	if !s.Running.Known || !s.Waiting.Known {
		return 0
	}
	after := max(lostAfter, time.Duration(lostAfterTokens/p.perSecond()*float64(time.Second)))
	if p.unlearned() {
		after = max(after, lostUnlearned)
	}
	return max(0, p.inUse.takenIn(at.Add(-after))-int(s.Running.Value+s.Waiting.Value)-p.computing()/16)
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
	if p.computing() == 0 {
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
	// Until the first in line has its first token no counter may move.
	ahead := max(p.backlog, p.uncachedOfFirst())
	patience := hangAfter + time.Duration(2*ahead/p.unhurried()*float64(time.Second))
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
		{prev.KVUsage, next.KVUsage}, // which alone moves within a long prompt
	} {
		if pair[0].Known != pair[1].Known || pair[0].Value != pair[1].Value {
			return true
		}
	}
	// An engine without any of them can't be caught standing still.
	return !next.GenerationTokens.Known && !next.PromptTokens.Known && !next.FirstTokens.Known
}

// computedBetween is how many prompt tokens the engine computed for requests that
// got their first token between two scrapes.
func computedBetween(prev, next *metrics.Snapshot) (float64, bool) {
	if next.ComputedPromptTokens.Known {
		return delta(prev.ComputedPromptTokens, next.ComputedPromptTokens), true
	}
	if next.PromptTokens.Known && next.CachedPromptTokens.Known {
		return delta(prev.PromptTokens, next.PromptTokens) - delta(prev.CachedPromptTokens, next.CachedPromptTokens), true
	}
	return 0, false
}

// lookedUpBetween is the same of requests that the engine began with: it looks
// them up in its prefix cache then.
func lookedUpBetween(prev, next *metrics.Snapshot) (float64, bool) {
	if next.PrefixQueries.Known && next.PrefixHits.Known {
		return delta(prev.PrefixQueries, next.PrefixQueries) - delta(prev.PrefixHits, next.PrefixHits), true
	}
	return 0, false
}

// hitsBetween is how many prompt tokens the engine found in its cache between two
// scrapes.
func hitsBetween(prev, next *metrics.Snapshot) (float64, bool) {
	switch {
	case prev.PrefixHits.Known && next.PrefixHits.Known:
		return delta(prev.PrefixHits, next.PrefixHits), true
	case prev.CachedPromptTokens.Known && next.CachedPromptTokens.Known:
		return delta(prev.CachedPromptTokens, next.CachedPromptTokens), true
	}
	return 0, false
}

// firstTokensBetween is how many requests got their first token between two
// scrapes: of all, or of ours if the engine does not count them.
func (p *Replica) firstTokensBetween(prev, next *metrics.Snapshot) float64 {
	if next.FirstTokens.Known {
		return delta(prev.FirstTokens, next.FirstTokens)
	}
	return p.passed.requests
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
