// SPDX-License-Identifier: Apache-2.0

// Package load plays request traces against an OpenAI-compatible server and
// measures what its clients see: time to first token, end-to-end time, prefix
// cache hits, and how the requests were spread over the replicas.
package load

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/trace"
)

// Defaults of [Options].
const (
	DefaultMaxInFlight = 1024
	DefaultTimeout     = 10 * time.Minute
)

// idleTimeout stays below the 5 s after which uvicorn, and so vLLM, closes an idle
// connection: a request must not meet one that is being closed.
const idleTimeout = 4 * time.Second

// Options say how a trace is played and what is measured. Only BaseURL is
// needed.
type Options struct {
	// BaseURL is what request paths are appended to, such as http://127.0.0.1:8080.
	BaseURL string
	// Model goes into every request; empty keeps the model of logged requests.
	Model string
	// Speed divides arrival and think times, and multiplies all times reported:
	// with a server that is Speed times as fast as the one meant, results read
	// as if played at speed 1. Default 1.
	Speed float64
	// MaxInFlight bounds how many requests are under way at once; default
	// DefaultMaxInFlight. It is a guard for this machine and not a part of the
	// load: Result.HeldRequests tells when it was met.
	MaxInFlight int
	// ActiveSessions, for ClosedLoop, ignores when sessions started in the trace
	// and keeps this many going: the next begins when one ends. 0 starts each at
	// its time.
	ActiveSessions int
	// Timeout bounds one request, in real time; default DefaultTimeout.
	Timeout time.Duration
	// ReplicaHeader names the response header that tells the replica, and
	// ReasonHeader the one that tells why it was chosen; empty is none.
	ReplicaHeader, ReasonHeader string
	// SessionHeader is the request header that carries the session, for routers
	// that pin by one; empty is none.
	SessionHeader string
	// Replicas is the number of replicas there are, for the fair share; 0 counts
	// those that answered.
	Replicas int
	// WarmUp and CoolDown are the shares of the requests, the first and the last
	// by time, that statistics leave out. Together they stay below 1; default 0.
	WarmUp, CoolDown float64
	// Total is the number of requests that Progress is told; 0 is unknown.
	Total int
	// Progress is called after each request, never twice at once.
	Progress func(done, total int)
	// Record is called with each request's measurements, never twice at once.
	Record func(Sample)
	// Transport sends the requests; nil is one of this package's own, which is
	// closed at the end.
	Transport http.RoundTripper
}

func (o Options) withDefaults() (Options, error) {
	base, err := url.Parse(o.BaseURL)
	if err != nil {
		return o, fmt.Errorf("base URL: %w", err)
	}
	if base.Scheme != "http" && base.Scheme != "https" || base.Host == "" {
		return o, fmt.Errorf("base URL %q is not of the form http://host:port", o.BaseURL)
	}
	o.BaseURL = strings.TrimSuffix(o.BaseURL, "/")
	if o.Speed == 0 {
		o.Speed = 1
	}
	if o.MaxInFlight == 0 {
		o.MaxInFlight = DefaultMaxInFlight
	}
	if o.Timeout == 0 {
		o.Timeout = DefaultTimeout
	}
	switch {
	case !(o.Speed > 0):
		return o, fmt.Errorf("speed %v is not positive", o.Speed)
	case o.MaxInFlight < 0:
		return o, fmt.Errorf("max in flight %d is negative", o.MaxInFlight)
	case o.ActiveSessions < 0:
		return o, fmt.Errorf("active sessions %d is negative", o.ActiveSessions)
	case o.Timeout < 0:
		return o, fmt.Errorf("timeout %v is negative", o.Timeout)
	case !(o.WarmUp >= 0 && o.CoolDown >= 0 && o.WarmUp+o.CoolDown < 1):
		return o, fmt.Errorf("warm-up %v and cool-down %v do not leave anything to measure", o.WarmUp, o.CoolDown)
	}
	return o, nil
}

// OpenLoop sends each request at its arrival time, whatever became of those
// before it.
//
// Requests that fail are counted in the result; the error tells of options or a
// trace that cannot be used, or that ctx ended. The result then covers what was
// done until that time. A sample of some 200 bytes is kept of each request.
func OpenLoop(ctx context.Context, requests iter.Seq2[trace.Request, error], options Options) (Result, error) {
	p, err := newPlayer(ctx, options)
	if err != nil {
		return Result{}, err
	}
	for r, err := range requests {
		if err != nil {
			p.stop(err)
			break
		}
		due := p.dueAt(r.At)
		if !p.acquire(due) {
			break
		}
		p.running.Go(func() {
			defer p.release()
			p.send(&r, due, nil)
		})
	}
	return p.finish()
}

// ClosedLoop plays sessions: each sends its first request at its start, and every
// other one its think time after the answer to the one before. A request that
// failed does not end its session. Errors are as for [OpenLoop].
func ClosedLoop(ctx context.Context, sessions iter.Seq[*trace.Session], options Options) (Result, error) {
	p, err := newPlayer(ctx, options)
	if err != nil {
		return Result{}, err
	}
	var active chan struct{}
	if options.ActiveSessions > 0 {
		active = make(chan struct{}, options.ActiveSessions)
	}
	for s := range sessions {
		var start time.Time
		if active == nil {
			start = p.dueAt(s.Start)
			if !p.sleepUntil(start) {
				break
			}
		} else {
			if !p.enter(active) {
				break
			}
			start = time.Now()
		}
		p.running.Go(func() {
			p.play(s, start)
			if active != nil {
				<-active
			}
		})
	}
	return p.finish()
}

// player is one run.
type player struct {
	Options
	ctx       context.Context
	cancel    context.CancelCauseFunc
	transport http.RoundTripper
	start     time.Time
	inFlight  chan struct{}
	running   sync.WaitGroup

	mu      sync.Mutex
	samples []Sample
	held    int
}

func newPlayer(ctx context.Context, options Options) (*player, error) {
	options, err := options.withDefaults()
	if err != nil {
		return nil, err
	}
	p := &player{
		Options:   options,
		transport: options.Transport,
		start:     time.Now(),
		inFlight:  make(chan struct{}, options.MaxInFlight),
	}
	p.ctx, p.cancel = context.WithCancelCause(ctx)
	if p.transport == nil {
		p.transport = &http.Transport{
			MaxIdleConns:        options.MaxInFlight,
			MaxIdleConnsPerHost: options.MaxInFlight,
			IdleConnTimeout:     idleTimeout,
			DisableCompression:  true,
			WriteBufferSize:     64 << 10,
		}
	}
	return p, nil
}

// stop ends the run with an error.
func (p *player) stop(err error) { p.cancel(err) }

// finish waits for what is under way and sums up.
func (p *player) finish() (Result, error) {
	p.running.Wait()
	err := context.Cause(p.ctx)
	p.cancel(nil)
	if own, isOwn := p.transport.(*http.Transport); isOwn && p.Transport == nil {
		own.CloseIdleConnections()
	}
	return p.summarize(), err
}

// dueAt is the real time of a time in the trace.
func (p *player) dueAt(at time.Duration) time.Time {
	return p.start.Add(p.toReal(at))
}

func (p *player) toReal(d time.Duration) time.Duration {
	return time.Duration(float64(d) / p.Speed)
}

// virtual is a real time span in seconds of the trace.
func (p *player) virtual(d time.Duration) float64 {
	return d.Seconds() * p.Speed
}

// sleepUntil is false when the run ended first.
func (p *player) sleepUntil(due time.Time) bool {
	wait := time.Until(due)
	if wait <= 0 {
		return p.ctx.Err() == nil
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C:
		return p.ctx.Err() == nil
	case <-p.ctx.Done():
		return false
	}
}

// acquire waits until a request is due and may go; false when the run ended.
func (p *player) acquire(due time.Time) bool {
	if !p.sleepUntil(due) {
		return false
	}
	select {
	case p.inFlight <- struct{}{}:
		return true
	default:
	}
	p.mu.Lock()
	p.held++
	p.mu.Unlock()
	return p.enter(p.inFlight)
}

func (p *player) release() { <-p.inFlight }

// enter takes a place in a semaphore; false when the run ended first.
func (p *player) enter(places chan struct{}) bool {
	select {
	case places <- struct{}{}:
		return true
	case <-p.ctx.Done():
		return false
	}
}

// play sends a session's requests one after the other.
func (p *player) play(s *trace.Session, due time.Time) {
	var answer []byte
	for {
		r, err := s.Next(answer)
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			p.stop(err)
			return
		}
		due = due.Add(p.toReal(r.Think))
		if !p.acquire(due) {
			return
		}
		var heard *[]byte
		if s.WantsAnswers {
			answer = answer[:0]
			heard = &answer
		}
		p.send(&r, due, heard)
		p.release()
		due = time.Now()
	}
}

// note books a finished request.
func (p *player) note(s Sample) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.samples = append(p.samples, s)
	if p.Record != nil {
		p.Record(s)
	}
	if p.Progress != nil {
		p.Progress(len(p.samples), p.Total)
	}
}
