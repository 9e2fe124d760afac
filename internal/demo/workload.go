// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"context"
	"fmt"
	"iter"
	"strings"
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

// DefaultChats is the workload of a demo: chats that share twelve long system
// prompts, which do not all fit in one replica beside the chats, and now and then
// a long prompt that shares nothing.
func DefaultChats() trace.Workload {
	return trace.Workload{
		Chats:         64,
		SystemPrompts: 12,
		SystemTokens:  6000,
		Turns:         5,
		UserTokens:    300,
		AnswerTokens:  100,
		Think:         4 * time.Second,
		Ramp:          45 * time.Second,
		OneOffTokens:  8000,
	}
}

// chats is the workload of that name as it is asked for.
func chats(c Config) trace.Workload {
	w := c.Chats.Or(DefaultChats())
	w.Seed = c.Seed
	return w
}

func openWorkload(c Config) (workload, error) {
	switch {
	case c.Trace != "":
		return openTrace(c)
	case c.Workload == DefaultWorkload:
		return ofSessions(chats(c).Sessions(), c), nil
	}
	kind, found := trace.KindNamed(c.Workload)
	if !found {
		return workload{}, fmt.Errorf("there is no workload %q, only %s", c.Workload, strings.Join(Workloads(), ", "))
	}
	count := 0
	for range kind.Requests(c.Seed) {
		count++
	}
	return ofRequests(kind.Requests(c.Seed), count, c), nil
}

// DefaultWorkload is that of a demo which is asked for no other.
const DefaultWorkload = "chats"

// Workloads are the names of those that can be made up.
func Workloads() []string {
	names := []string{DefaultWorkload}
	for _, k := range trace.Kinds {
		names = append(names, k.Name)
	}
	return names
}

func openTrace(c Config) (workload, error) {
	t, err := trace.Open(c.Trace)
	if err != nil {
		return workload{}, err
	}
	if t.HasSessions() {
		return ofSessions(t.Sessions(), c), nil
	}
	return ofRequests(t.Requests(), t.Count, c), nil
}

// ofRequests makes a workload of requests that come at their time.
func ofRequests(requests iter.Seq2[trace.Request, error], count int, c Config) workload {
	w := workload{requests: count}
	if c.Limit > 0 {
		w.requests = min(w.requests, c.Limit)
	}
	w.single = func() iter.Seq2[trace.Request, error] { return hurried(requests, c.Rate, w.requests) }
	return w
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
