// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"net/http"
	"time"
)

// A breaker keeps requests away from a replica that fails them. One that
// answers errors at once looks idle and cheap, and would draw all that comes.
//
// An attempt without an answer and a 503 open it at once; other errors may be
// the request's own fault, and open it when they are dense: when of the
// requests from the first to the last of errorsDense errors in a row of
// sending at least half ended in one. A bad request that a client repeats so
// harms nobody else's. It stays open for a second, twice as long with each
// further time, or as long as the replica's Retry-After says. Then one request
// at a time tries the replica, until one is answered well.
//
// The methods are not safe for concurrent use; Replica holds the lock.
type breaker struct {
	failures int       // times that it opened since the last good answer
	opened   time.Time // the last time
	until    time.Time // no request is sent before, if another replica can serve it
	probe    *Reservation
	errors   [errorsDense]uint64 // reservations that the last errors answered, by seq; 0 for none
}

const (
	// failingFor is how long a replica is avoided after a failed attempt, and
	// doubles with each further one up to failingMost.
	failingFor  = time.Second
	failingMost = 30 * time.Second
	// retryAfterMost bounds what is believed of a Retry-After.
	retryAfterMost = time.Minute
	// errorsDense is how many errors of the kind that a request may be to blame
	// for show that the replica is.
	errorsDense = 3
	// probeFor is how long others wait for what becomes of a probe. Errors come
	// sooner; a stream may take minutes to end.
	probeFor = 2 * time.Second
)

// open tells whether the replica should be avoided.
func (b *breaker) open(now time.Time) bool {
	if b.failures == 0 {
		return false
	}
	return now.Before(b.until) || b.probe != nil && now.Sub(b.probe.sentAt) < probeFor
}

// sent notes a request that is sent all the same, or to see how the replica is.
func (b *breaker) sent(r *Reservation) {
	if b.failures > 0 && b.probe == nil && !r.sentAt.Before(b.until) {
		b.probe = r
	}
}

// ended notes that a request is over.
func (b *breaker) ended(r *Reservation, how outcome) {
	if b.probe == r {
		b.probe = nil
	}
	// What was sent before it opened proves nothing of what came later.
	if how == finished && b.failures > 0 && !r.sentAt.Before(b.opened) {
		*b = breaker{}
	}
}

// trip opens the breaker for a failure of a request that was sent at sent, at
// least for so long. It tells for how long, 0 if the failure is of the same
// event as an earlier one, such as a crash with requests in flight.
func (b *breaker) trip(sent time.Time, least time.Duration, now time.Time) time.Duration {
	if now.Before(b.until) || sent.Before(b.opened) {
		if longer := now.Add(least); longer.After(b.until) {
			b.until = longer
		}
		return 0
	}
	b.failures++
	b.opened = now
	avoided := max(least, min(failingFor<<min(b.failures-1, 10), failingMost))
	b.until = now.Add(avoided)
	return avoided
}

// erred takes in an error that answered a request, and trips the breaker where
// it shows that the replica is to blame.
func (b *breaker) erred(r *Reservation, status int, retryAfter time.Duration, now time.Time) time.Duration {
	copy(b.errors[:], b.errors[1:])
	b.errors[errorsDense-1] = r.seq
	if status == http.StatusServiceUnavailable || b.failures > 0 && !r.sentAt.Before(b.opened) || b.dense() {
		return b.trip(r.sentAt, min(retryAfter, retryAfterMost), now)
	}
	return 0
}

// dense tells whether of the requests between the last errors at least half
// ended in one. Errors may come in another order than their requests were sent.
func (b *breaker) dense() bool {
	first, last := b.errors[0], b.errors[0]
	for _, seq := range b.errors {
		first, last = min(first, seq), max(last, seq)
	}
	return first > 0 && last-first < 2*errorsDense
}

// unfit tells whether an answer's status may say that the replica can't serve,
// whatever it is asked. Other statuses judge the request.
func unfit(status int) bool {
	switch status {
	case http.StatusNotImplemented, http.StatusHTTPVersionNotSupported:
		return false
	}
	return status >= 500 || status == http.StatusTooManyRequests
}
