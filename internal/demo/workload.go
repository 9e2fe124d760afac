// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"context"
	"iter"
	"time"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/load"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/trace"
)

// workload is what is played, the same for each policy. One of sessions and
// single is set.
type workload struct {
	requests int
	sessions func() iter.Seq[*trace.Session]
	single   func() iter.Seq2[trace.Request, error]
}

// builtIn is the workload of a demo: chats that share twelve long system prompts,
// which do not all fit in one replica beside the chats, and now and then a long
// prompt that shares nothing.
func builtIn(seed uint64) trace.Workload {
	return trace.Workload{
		Seed:          seed,
		Chats:         64,
		SystemPrompts: 12,
		SystemTokens:  6000,
		Turns:         5,
		UserTokens:    300,
		AnswerTokens:  100,
		Think:         4 * time.Second,
		Ramp:          45 * time.Second,
		OneOffs:       16,
		OneOffTokens:  8000,
	}
}

func openWorkload(c Config) (workload, error) {
	if c.Trace == "" {
		return ofSessions(builtIn(c.Seed).Sessions(), c), nil
	}
	t, err := trace.Open(c.Trace)
	if err != nil {
		return workload{}, err
	}
	if t.HasSessions() {
		return ofSessions(t.Sessions(), c), nil
	}
	w := workload{requests: t.Count}
	if c.Limit > 0 {
		w.requests = min(w.requests, c.Limit)
	}
	w.single = func() iter.Seq2[trace.Request, error] { return hurried(t.Requests(), c.Rate, w.requests) }
	return w, nil
}

// hurried returns the first so many requests, arriving at a multiple of their
// rate.
func hurried(requests iter.Seq2[trace.Request, error], rate float64, limit int) iter.Seq2[trace.Request, error] {
	return func(yield func(trace.Request, error) bool) {
		n := 0
		for r, err := range requests {
			if n == limit {
				return
			}
			n++
			r.At = time.Duration(float64(r.At) / rate)
			if !yield(r, err) {
				return
			}
		}
	}
}

// ofSessions makes a workload of sessions, which can be gone through any number
// of times.
func ofSessions(sessions iter.Seq[*trace.Session], c Config) workload {
	w := workload{}
	count := 0
	for s := range sessions {
		if c.Limit > 0 && w.requests >= c.Limit {
			break
		}
		w.requests += s.Len
		count++
	}
	w.sessions = func() iter.Seq[*trace.Session] {
		return func(yield func(*trace.Session) bool) {
			n := 0
			for s := range sessions {
				if n == count {
					return
				}
				n++
				s.Start = time.Duration(float64(s.Start) / c.Rate)
				if !yield(s) {
					return
				}
			}
		}
	}
	return w
}

// all returns the requests in order of arrival.
func (w workload) all() iter.Seq2[trace.Request, error] {
	if w.sessions != nil {
		return trace.Merge(w.sessions())
	}
	return w.single()
}

func (w workload) play(ctx context.Context, o load.Options) (load.Result, error) {
	if w.sessions != nil {
		return load.ClosedLoop(ctx, w.sessions(), o)
	}
	return load.OpenLoop(ctx, w.single(), o)
}
