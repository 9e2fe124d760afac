// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"time"
)

// A ledger counts what we sent to one replica and have not seen finished. It
// is updated inside Select, before the next Select can look, so it is never
// late; scrapes only correct it.
//
// The engine serves prefills first come, first served. So the number of
// requests that have no first token yet tells which ones they are: the last
// that many of those we sent. Two rules follow, and every correction below is
// one of them: whatever finished, and all sent before it, is past its first
// token; and with m requests without a first token at most the uncached tokens
// of the last m sent are still waiting, and at least those of the last m-1.
//
// The methods are not safe for concurrent use; Replica holds the lock.
type ledger struct {
	waiting []*Reservation // sent, not known to be past their first token; oldest first
	head    int            // waiting[:head] is spent

	backlog float64   // uncached prompt tokens believed not yet prefilled
	asOf    time.Time // when backlog was right

	inFlight    int     // sent and not released
	aside       int     // of those, what the engine computes no prompt for
	outstanding float64 // prompt tokens of those in flight
	// uncached prompt tokens of those in flight: what they take of the KV cache.
	// What an engine has cached it holds already, be it for ten of them.
	footing float64
	// outstanding before the last one left, and when it did
	before float64
	left   time.Time

	sent uint64 // reservations ever made, minus those aborted before their first token
	past uint64 // of those, known to be past their first token
	// aborted while it was not known whether they had a first token
	unsure uint64

	surely uint64 // those from this seq on are sure to have had none when that was last told

	// those that got past it since the last scrape, and the hits and uncached
	// tokens believed of them; until unpassed nothing of them was computed
	passed                     texts
	passedHits, passedUncached float64
	unpassed                   time.Time
}

// lateMargin is what a first token may be late by, apart from estimates that
// are off: scrapes are a second old.
const lateMargin = time.Second

// outcome tells how a request ended.
type outcome uint8

const (
	finished outcome = iota // the engine answered
	aborted                 // the client left, or the attempt failed
	refused                 // the engine answered with an error
)

// add books a request that is about to be sent.
func (l *ledger) add(r *Reservation, now time.Time, rate float64) {
	l.inFlight++
	if r.Aside {
		l.aside++
		return
	}
	l.drain(now, rate)
	l.backlog += r.Uncached
	r.ahead = l.backlog
	l.outstanding += r.Prompt
	l.footing += r.Uncached
	l.sent++
	l.waiting = append(l.waiting, r)
	if l.unpassed.IsZero() {
		l.unpassed = now
	}
}

// scraped begins to count anew what gets its first token.
func (l *ledger) scraped() {
	l.passed, l.passedHits, l.passedUncached, l.unpassed = texts{}, 0, 0, time.Time{}
	if l.unstarted() > 0 {
		l.unpassed = l.waiting[l.head].sentAt
	}
}

// drain lets the engine work off the backlog until now.
func (l *ledger) drain(now time.Time, rate float64) {
	if dt := now.Sub(l.asOf); dt > 0 {
		l.backlog = max(0, l.backlog-rate*dt.Seconds())
		l.asOf = now
	}
}

// since is the number of prompt tokens that were in flight at some time since
// then, a moment ago.
func (l *ledger) since(then time.Time) float64 {
	if l.left.After(then) {
		return max(l.before, l.outstanding)
	}
	return l.outstanding
}

// queue is the backlog at now, without changing anything.
func (l *ledger) queue(now time.Time, rate float64) float64 {
	return drained(l.backlog, l.asOf, now, rate)
}

// drained is what a replica leaves of a backlog by now.
func drained(backlog float64, asOf, now time.Time, rate float64) float64 {
	if backlog == 0 {
		return 0
	}
	return max(0, backlog-rate*max(0, now.Sub(asOf).Seconds()))
}

// remove books the end of a request. It must be called once per reservation.
func (l *ledger) remove(r *Reservation, how outcome, now time.Time, rate float64) {
	l.inFlight--
	if r.Aside {
		l.aside--
		return
	}
	l.drain(now, rate)
	l.before, l.left = l.outstanding, now
	l.outstanding -= r.Prompt
	l.footing -= r.Uncached
	if l.computing() == 0 {
		l.outstanding, l.footing = 0, 0 // no drift from float sums
	}
	if r.past {
		return
	}
	if how == finished {
		l.passUpTo(r)
		l.backlog = min(l.backlog, l.uncachedOfLast(len(l.waiting)))
		return
	}
	// What is left of an aborted prefill is not worked off any more. The
	// backlog lies in the last requests sent, so this one's part of it is what
	// those behind it do not account for.
	i := l.find(r)
	if i < 0 {
		return
	}
	behind := 0.0
	for _, w := range l.waiting[i+1:] {
		behind += w.Uncached
	}
	l.backlog -= min(r.Uncached, max(0, l.backlog-behind))
	l.sent--
	l.unsure++
	l.waiting = append(l.waiting[:i], l.waiting[i+1:]...)
	l.trim()
	if l.unstarted() == 0 {
		l.backlog = 0 // no drift from float sums
	}
}

// computing is the number of our requests that the engine computes.
func (l *ledger) computing() int { return l.inFlight - l.aside }

// from returns the place in waiting of the first reservation whose seq is not
// below this one. They are in order of seq.
func (l *ledger) from(seq uint64) int {
	lo, hi := l.head, len(l.waiting)
	for lo < hi {
		mid := int(uint(lo+hi) >> 1)
		if l.waiting[mid].seq < seq {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	return lo
}

// find returns the place of r in waiting, -1 if it is not there.
func (l *ledger) find(r *Reservation) int {
	if i := l.from(r.seq); i < len(l.waiting) && l.waiting[i] == r {
		return i
	}
	return -1
}

// passUpTo notes that r and all sent before it have their first token.
func (l *ledger) passUpTo(r *Reservation) {
	for l.head < len(l.waiting) && l.waiting[l.head].seq <= r.seq {
		l.pass()
	}
	l.trim()
}

// pass notes that the oldest waiting request has its first token.
func (l *ledger) pass() {
	r := l.waiting[l.head]
	r.past = true
	l.waiting[l.head] = nil
	l.head++
	l.past++
	l.passed.add(r)
	l.passedHits += r.Hit
	l.passedUncached += r.Uncached
}

// trim gives spent room at the head back, at a cost of O(1) per reservation.
func (l *ledger) trim() {
	switch {
	case l.head == len(l.waiting):
		l.waiting, l.head = l.waiting[:0], 0
	case l.head > 32 && l.head > len(l.waiting)/2:
		n := copy(l.waiting, l.waiting[l.head:])
		clear(l.waiting[n:])
		l.waiting, l.head = l.waiting[:n], 0
	}
}

// lateBy is how much longer the first in line waits for its first token than
// the prefills ahead of it and its own explain, with a margin for estimates that
// are off. An engine that runs as many sequences as it can, or whose KV cache is
// full, takes nobody in, however little there is to prefill; as the first in line
// has waited, so will the last.
func (l *ledger) lateBy(now time.Time, rate float64) time.Duration {
	from, ok := l.lateFrom(rate)
	if !ok {
		return 0
	}
	return max(0, now.Sub(from))
}

// lateFrom is when the first in line, of those that surely wait, begins to be
// late at so many tokens a second; not ok if there is none.
func (l *ledger) lateFrom(rate float64) (from time.Time, ok bool) {
	i := l.from(l.surely)
	if i == len(l.waiting) {
		return time.Time{}, false
	}
	r := l.waiting[i]
	expected := time.Duration(r.ahead / max(rate, 1) * float64(time.Second))
	return r.sentAt.Add(2*expected + lateMargin), true
}

// slowest is the rate at which the first in line, of those that surely wait, had its
// first token right then; 0 if it has not waited for longer than a margin.
func (l *ledger) slowest(then time.Time) float64 {
	i := l.from(l.surely)
	if i == len(l.waiting) {
		return 0
	}
	waited := then.Sub(l.waiting[i].sentAt)
	if waited < lateMargin {
		return 0
	}
	return l.waiting[i].ahead / waited.Seconds()
}

// unstarted is the number of our requests not known to be past their first token.
func (l *ledger) unstarted() int { return len(l.waiting) - l.head }

// uncachedOfLast sums the uncached tokens of the last m waiting requests.
func (l *ledger) uncachedOfLast(m int) float64 {
	sum := 0.0
	for _, r := range l.waiting[max(l.head, len(l.waiting)-max(0, m)):] {
		sum += r.Uncached
	}
	return sum
}

// uncachedOfFirst is what the engine computes of the first in line, 0 if there is none.
func (l *ledger) uncachedOfFirst() float64 {
	if l.unstarted() == 0 {
		return 0
	}
	return l.waiting[l.head].Uncached
}

// bound corrects the backlog by the knowledge that at most so many of our
// requests have no first token, and that of at least so many nothing was
// computed. lag is how many tokens the engine may have worked off since that was
// true.
func (l *ledger) bound(least, most int, lag float64) {
	for l.unstarted() > most {
		l.pass()
	}
	l.trim()
	high := l.uncachedOfLast(most)
	low := max(0, l.uncachedOfLast(least)-lag)
	l.backlog = min(max(l.backlog, low), high)
}
