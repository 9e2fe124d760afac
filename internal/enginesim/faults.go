// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"context"
	"net/http"
	"sync"
)

// MetricsMode is what a server's /metrics page does.
type MetricsMode int

// The modes of a page: sound, and the ways in which pages go wrong.
const (
	MetricsOK       MetricsMode = iota
	MetricsNotFound             // 404
	MetricsFailing              // 500
	MetricsFrozen               // the page as it was when the mode was set, for ever
	MetricsZero                 // every figure of the engine reads 0
	MetricsTenfold              // every figure of the engine reads ten times too high
	MetricsJumping              // every second page is of another process, with half the counts
	MetricsAllHits              // every prompt token was found in the cache
	MetricsRenamed              // "vllm:" families are called "engine:"
	MetricsGarbage              // 200 with bytes that are not a page
	MetricsDrip                 // a byte every 100 ms
	MetricsEndless              // lines without end, as fast as they are read
	MetricsHanging              // accepts the request and never answers
)

// faults are the knobs that drills turn. They outlive restarts.
type faults struct {
	mu         sync.Mutex
	gate       chan struct{} // closed by Resume; nil while the server answers
	stall      bool
	failStatus int
	failCount  int
	retryAfter string
	health     int
	metrics    MetricsMode
	frozen     []byte
	pages      int // that were asked for
}

// Pause makes the server hang: it accepts connections and requests, and answers
// nothing, not even /health. Streams stop where they are.
func (s *Server) Pause() {
	s.faults.mu.Lock()
	if s.faults.gate == nil {
		s.faults.gate = make(chan struct{})
	}
	s.faults.mu.Unlock()
	s.syncClock()
}

// Resume ends Pause; everything goes on from where it stood.
func (s *Server) Resume() {
	s.faults.mu.Lock()
	if s.faults.gate != nil {
		close(s.faults.gate)
		s.faults.gate = nil
	}
	s.faults.mu.Unlock()
	s.syncClock()
}

// Stall makes the engine hang behind a healthy front: requests are accepted and get
// no token, /health says 200 and /metrics shows the last figures. StallEnd ends it.
func (s *Server) Stall() { s.setStall(true) }

// StallEnd ends Stall; the engine goes on from where it stood.
func (s *Server) StallEnd() { s.setStall(false) }

func (s *Server) setStall(on bool) {
	s.faults.mu.Lock()
	s.faults.stall = on
	s.faults.mu.Unlock()
	s.syncClock()
}

// FailNext answers the next n inference requests at once with an error of the given
// status, 200 to 599. Status 0 cuts the connection without an answer.
func (s *Server) FailNext(status, n int) {
	s.faults.mu.Lock()
	defer s.faults.mu.Unlock()
	s.faults.failStatus, s.faults.failCount = status, n
}

// SetRetryAfter sets the header of that name in the answers of FailNext; an empty one
// leaves it out.
func (s *Server) SetRetryAfter(value string) {
	s.faults.mu.Lock()
	defer s.faults.mu.Unlock()
	s.faults.retryAfter = value
}

// SetHealth sets the status of /health. 0 or 200 is healthy.
func (s *Server) SetHealth(status int) {
	s.faults.mu.Lock()
	defer s.faults.mu.Unlock()
	s.faults.health = status
}

// SetMetrics sets what /metrics does.
func (s *Server) SetMetrics(mode MetricsMode) {
	var page []byte
	if p := s.running(); p != nil && mode == MetricsFrozen {
		page = p.page(MetricsOK)
	}
	s.faults.mu.Lock()
	defer s.faults.mu.Unlock()
	s.faults.metrics, s.faults.frozen = mode, page
}

// syncClock stops or starts the engine's clock as the faults demand.
func (s *Server) syncClock() {
	p := s.running()
	if p == nil {
		return
	}
	if s.faults.paused() || s.faults.stalled() {
		p.driver.stop()
	} else {
		p.driver.start()
	}
}

func (f *faults) paused() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.gate != nil
}

func (f *faults) stalled() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.stall
}

// wait blocks while the server is paused; an error means that the request is gone.
func (f *faults) wait(ctx context.Context) error {
	f.mu.Lock()
	gate := f.gate
	f.mu.Unlock()
	if gate == nil {
		return nil
	}
	select {
	case <-gate:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// takeFailure returns the status to fail the current request with, and its
// Retry-After.
func (f *faults) takeFailure() (status int, retryAfter string, fail bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.failCount == 0 {
		return 0, "", false
	}
	f.failCount--
	return f.failStatus, f.retryAfter, true
}

func (f *faults) healthStatus() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return positiveOr(f.health, http.StatusOK)
}

func (f *faults) metricsMode() (MetricsMode, []byte) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.pages++; f.metrics == MetricsJumping && f.pages%2 == 0 {
		return MetricsOK, nil
	}
	return f.metrics, f.frozen
}
