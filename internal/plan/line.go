// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"cmp"
	"container/heap"
	"maps"
	"math"
	"slices"
	"time"
)

// line is the requests that wait, and in which order they are planned for: by
// priority; then those whose promise is due, in the order in which they came;
// then by rank.
//
// Rank is what a request costs at least, that is its uncached tokens where most
// of its prompt is held, less what it has waited, so that short work goes first
// and long work does not starve. Waiting counts the same for all, so the order
// of two requests never changes, and the time of arrival stands for it.
type line struct {
	terms *Terms

	ranked  []*Request
	overdue []*Request
	due     deadlines // all of them

	backlog float64 // what they would compute at least, in tokens

	// longest is how long first come, first served would have made a request
	// wait, the longest of late, and clock what waiting since the beginning is
	// worth, in tokens; both are right as of at.
	longest time.Duration
	clock   float64
	at      time.Time

	// Start-time fair queueing (Goyal, Vin and Cheng, 1996), in tokens of cost:
	// a request's start is where its sharer's requests before it end, or what
	// is served now, whichever is later, and rank begins there.
	shares  map[uint64]*share
	sharing int // those that have requests waiting
	served  float64
}

// share is one sharer that has requests waiting, or had some more than its share.
type share struct {
	end     float64 // of its requests so far
	waiting int
	backlog float64
}

const (
	// memory is the time in which the longest wait is half forgotten.
	memory = 2 * time.Minute
	// shortestLongest is what the longest wait is at least, as far as the worth
	// of waiting goes.
	shortestLongest = 2 * time.Second
	// idleShares is how many sharers without requests are remembered at least.
	idleShares = 1024
)

func (q *line) len() int { return len(q.due) }

// join puts a request in line. queued is what its replicas have queued already,
// and rate what they work off in a second; weight is what a token of its own
// counts.
func (q *line) join(r *Request, weight, queued, rate float64, now time.Time) {
	q.tick(now)
	ahead, cost := q.backlog, weight*r.least
	r.start = q.served
	if r.Sharer != 0 {
		s := q.enter(r.Sharer)
		// Whoever has much in line waits for it, not for first come, first served.
		ahead = max(ahead, s.backlog*float64(q.sharing))
		r.start = max(r.start, s.end)
		s.end = r.start + cost
		s.backlog += r.least
	}
	fcfs := seconds((ahead + queued) / max(rate, 1))
	q.longest = max(q.longest, fcfs)
	r.promised = now.Add(min(seconds(q.terms.Slip*fcfs.Seconds())+q.terms.Grace, q.terms.Longest))
	r.deadline = q.deadline(r)
	r.overdue = false
	r.rank = r.start + cost + q.clock
	q.backlog += r.least
	insert(&q.ranked, r, byRank)
	heap.Push(&q.due, r)
}

// leave takes a request out of line; served if it got its turn.
func (q *line) leave(r *Request, served bool) {
	heap.Remove(&q.due, r.index)
	if r.overdue {
		remove(&q.overdue, r, byArrival)
	} else {
		remove(&q.ranked, r, byRank)
	}
	if q.backlog -= r.least; len(q.due) == 0 {
		q.backlog = 0 // no drift from float sums
	}
	if served {
		q.served = max(q.served, r.start)
	}
	if r.Sharer != 0 {
		q.exit(r)
	}
}

// promote moves those whose deadline has passed to the overdue, and returns one
// that has waited for as long as anything may, nil if there is none.
func (q *line) promote(now time.Time) (expired *Request) {
	q.tick(now)
	for len(q.due) > 0 && !now.Before(q.due[0].deadline) {
		r := q.due[0]
		if r.overdue {
			return r
		}
		if r.deadline = q.deadline(r); now.Before(r.deadline) { // waits are longer than they were
			heap.Fix(&q.due, 0)
			continue
		}
		remove(&q.ranked, r, byRank)
		r.overdue = true
		r.deadline = r.arrived.Add(q.terms.Longest)
		heap.Fix(&q.due, 0)
		insert(&q.overdue, r, byArrival)
	}
	return nil
}

// deadline is when a request is overdue, as things are.
func (q *line) deadline(r *Request) time.Time {
	patience := r.arrived.Add(max(q.terms.Patience, q.longest+q.terms.Grace))
	if patience.Before(r.promised) {
		return patience
	}
	return r.promised
}

// first appends the first n in line.
func (q *line) first(n int, to []*Request) []*Request {
	i, j := 0, 0
	for range min(n, len(q.due)) {
		if i < len(q.overdue) && (j == len(q.ranked) || q.overdue[i].Priority <= q.ranked[j].Priority) {
			to = append(to, q.overdue[i])
			i++
		} else {
			to = append(to, q.ranked[j])
			j++
		}
	}
	return to
}

// isFirst tells whether a new request goes before all that wait, for its priority.
func (q *line) isFirst(r *Request) bool {
	for _, in := range [...][]*Request{q.overdue, q.ranked} {
		if len(in) > 0 && in[0].Priority <= r.Priority {
			return false
		}
	}
	return true
}

// drained is how long it takes to serve all that wait, at so many tokens a second.
func (q *line) drained(queued, rate float64) time.Duration {
	return seconds((q.backlog + queued) / max(rate, 1))
}

// tick lets time pass.
func (q *line) tick(now time.Time) {
	if passed := now.Sub(q.at); !q.at.IsZero() && passed > 0 {
		q.clock += q.terms.Age * passed.Seconds() / max(q.longest, shortestLongest).Seconds()
		q.longest = time.Duration(float64(q.longest) * math.Exp2(-passed.Seconds()/memory.Seconds()))
	}
	q.at = now
}

// enter counts a request to its sharer's.
func (q *line) enter(sharer uint64) *share {
	s := q.shares[sharer]
	if s == nil {
		if q.shares == nil {
			q.shares = make(map[uint64]*share)
		}
		s = new(share)
		q.shares[sharer] = s
	}
	if s.waiting++; s.waiting == 1 {
		q.sharing++
	}
	return s
}

// exit takes one out. A sharer without any is remembered as long as it has had
// more than its share, unless there are too many of those.
func (q *line) exit(r *Request) {
	s := q.shares[r.Sharer]
	s.backlog -= r.least
	if s.waiting--; s.waiting > 0 {
		return
	}
	s.backlog = 0
	q.sharing--
	if s.end <= q.served {
		delete(q.shares, r.Sharer)
	}
	if q.sharing == 0 || len(q.shares) > 2*q.sharing+idleShares {
		maps.DeleteFunc(q.shares, func(_ uint64, s *share) bool { return s.waiting == 0 })
	}
}

// byRank and byArrival are orders of requests; no two are equal in both.
func byRank(a, b *Request) int {
	return cmp.Or(cmp.Compare(a.Priority, b.Priority), cmp.Compare(a.rank, b.rank))
}

func byArrival(a, b *Request) int {
	return cmp.Or(cmp.Compare(a.Priority, b.Priority), a.arrived.Compare(b.arrived))
}

// insert puts a request behind its equals.
func insert(in *[]*Request, r *Request, order func(a, b *Request) int) {
	at, _ := slices.BinarySearchFunc(*in, r, func(x, r *Request) int {
		if order(x, r) <= 0 {
			return -1
		}
		return 1
	})
	*in = slices.Insert(*in, at, r)
}

func remove(from *[]*Request, r *Request, order func(a, b *Request) int) {
	at, _ := slices.BinarySearchFunc(*from, r, order)
	for (*from)[at] != r {
		at++
	}
	*from = slices.Delete(*from, at, at+1)
}

// deadlines is a heap of requests.
type deadlines []*Request

func (h deadlines) Len() int           { return len(h) }
func (h deadlines) Less(i, j int) bool { return h[i].deadline.Before(h[j].deadline) }

func (h deadlines) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].index, h[j].index = i, j
}

func (h *deadlines) Push(x any) {
	r := x.(*Request)
	r.index = len(*h)
	*h = append(*h, r)
}

func (h *deadlines) Pop() any {
	last := len(*h) - 1
	r := (*h)[last]
	(*h)[last] = nil
	*h = (*h)[:last]
	return r
}

func seconds(s float64) time.Duration {
	return time.Duration(min(s*float64(time.Second), math.MaxInt64/4))
}
