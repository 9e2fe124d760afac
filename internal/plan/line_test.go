// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"cmp"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// check tells what is wrong with a line.
func (q *line) check() error {
	if len(q.ranked)+len(q.overdue) != len(q.due) {
		return fmt.Errorf("%d by rank and %d overdue, but %d in all", len(q.ranked), len(q.overdue), len(q.due))
	}
	if !slices.IsSortedFunc(q.ranked, byRank) || !slices.IsSortedFunc(q.overdue, byArrival) {
		return errors.New("out of order")
	}
	waiting := make(map[uint64]int)
	for i, r := range q.due {
		if r.index != i {
			return fmt.Errorf("the request at %d of the heap thinks it is at %d", i, r.index)
		}
		waiting[r.Sharer]++
	}
	delete(waiting, 0)
	if len(waiting) != q.sharing {
		return fmt.Errorf("%d sharers wait, counted %d", len(waiting), q.sharing)
	}
	for sharer, s := range q.shares {
		if s.waiting != waiting[sharer] {
			return fmt.Errorf("%d requests of %d wait, counted %d", waiting[sharer], sharer, s.waiting)
		}
	}
	return nil
}

// plainLine orders all that wait anew each time it is asked.
type plainLine []*Request

func (q plainLine) first(n int, now time.Time) []*Request {
	all := slices.Clone(q)
	slices.SortStableFunc(all, func(a, b *Request) int {
		late := func(r *Request) int {
			if r.overdue || !now.Before(r.deadline) {
				return 0
			}
			return 1
		}
		if c := cmp.Or(cmp.Compare(a.Priority, b.Priority), cmp.Compare(late(a), late(b))); c != 0 {
			return c
		}
		if late(a) == 0 {
			return a.arrived.Compare(b.arrived)
		}
		return cmp.Compare(a.rank, b.rank)
	})
	return all[:min(n, len(all))]
}

func TestLineAgainstPlainLine(t *testing.T) {
	for seed := range uint64(50) {
		rng := rand.New(rand.NewPCG(seed, 11))
		terms := DefaultTerms
		terms.Longest = time.Minute
		q, plain := &line{terms: &terms}, plainLine(nil)
		now := start
		for range 1000 {
			now = now.Add(time.Duration(rng.IntN(200)) * time.Millisecond)
			switch {
			case rng.IntN(3) > 0:
				r := &Request{arrived: now, least: float64(rng.IntN(20_000)), Priority: rng.IntN(3) / 2}
				if rng.IntN(2) == 0 {
					r.Sharer = 1 + rng.Uint64N(4)
				}
				q.join(r, 5, 1000, 10_000, now)
				plain = append(plain, r)
			case len(plain) > 0:
				i := rng.IntN(len(plain))
				q.leave(plain[i], rng.IntN(2) == 0)
				plain = slices.Delete(plain, i, i+1)
			}
			want := plain.first(20, now)
			for r := q.promote(now); r != nil; r = q.promote(now) {
				if now.Sub(r.arrived) < terms.Longest {
					t.Fatalf("seed %d: expired after %v", seed, now.Sub(r.arrived))
				}
				q.leave(r, false)
				plain = slices.DeleteFunc(plain, func(x *Request) bool { return x == r })
				want = plain.first(20, now)
			}
			if err := q.check(); err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
			if got := q.first(20, nil); !slices.Equal(got, want) {
				t.Fatalf("seed %d: the first in line differ", seed)
			}
		}
	}
}

// What waiting is worth goes by how long waits are.
func TestWaitingIsWorthTheSame(t *testing.T) {
	for _, longest := range []time.Duration{10 * time.Second, time.Minute} {
		q := &line{terms: &DefaultTerms}
		q.join(&Request{arrived: start}, 5, longest.Seconds()*1000, 1000, start)
		q.tick(start.Add(longest / 2))
		if want := DefaultTerms.Age / 2; q.clock < 0.9*want || q.clock > 1.2*want {
			t.Errorf("half of the longest wait, %v, is worth %v tokens, want about %v", longest, q.clock, want)
		}
	}
}

func TestSharersGetTheSame(t *testing.T) {
	const flood, few = 1, 2
	q := &line{terms: &DefaultTerms}
	now := start
	join := func(sharer uint64, least float64) {
		now = now.Add(time.Millisecond)
		q.join(&Request{arrived: now, least: least, Sharer: sharer}, 5, 0, 60_000, now)
	}
	for range 300 {
		join(flood, 1000)
	}
	for range 10 {
		join(few, 2000)
	}
	served := make(map[uint64]float64)
	for range 30 {
		r := q.first(1, nil)[0]
		served[r.Sharer] += r.least
		q.leave(r, true)
	}
	if served[few] < 18_000 || served[flood] < 8000 {
		t.Errorf("served %v", served)
	}
	// One that comes back has not saved up for it.
	for q.shares[few] != nil {
		q.leave(q.first(1, nil)[0], true)
	}
	for range 10 {
		join(few, 1000)
	}
	clear(served)
	for range 20 {
		r := q.first(1, nil)[0]
		served[r.Sharer] += r.least
		q.leave(r, true)
	}
	if served[few] < 8000 || served[flood] < 8000 {
		t.Errorf("then served %v", served)
	}
}

func TestSharersAreForgotten(t *testing.T) {
	q := &line{terms: &DefaultTerms}
	q.join(&Request{arrived: start, least: 1, Sharer: 1}, 5, 0, 1, start)
	for i := range 5 * idleShares {
		r := &Request{arrived: start, least: 1000, Sharer: uint64(2 + i)}
		q.join(r, 5, 0, 1, start)
		q.leave(r, false)
	}
	if n := len(q.shares); n > idleShares+10 {
		t.Errorf("%d sharers are remembered", n)
	}
	q.leave(q.due[0], true)
	if n := len(q.shares); n != 0 {
		t.Errorf("%d sharers are remembered of an empty line", n)
	}
}
