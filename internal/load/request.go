// SPDX-License-Identifier: Apache-2.0

package load

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/trace"
)

// Sample is what was measured of one request. Times are in seconds of the trace,
// which are real seconds multiplied by Options.Speed.
type Sample struct {
	// DueSeconds is when the request was to be sent, since the start.
	DueSeconds float64 `json:"due_seconds"`
	// LagSeconds is how much later it was sent, for want of CPU or because
	// Options.MaxInFlight was met.
	LagSeconds float64 `json:"lag_seconds"`
	// TTFTSeconds is the time from due to the first chunk with content, or to
	// the whole body of an answer that is no stream; 0 when there was none.
	TTFTSeconds float64 `json:"ttft_seconds"`
	// EndToEndSeconds is the time from due to the end of the answer.
	EndToEndSeconds float64 `json:"end_to_end_seconds"`
	// Session is the trace's session, if any.
	Session string `json:"session,omitempty"`
	// Status is the HTTP status, 0 when no answer came.
	Status int `json:"status"`
	// Failure is empty for a request that was answered to its end, else the kind:
	// connect, timeout, canceled, cut_stream, error_event, no_content, bad_request
	// or status_ and the HTTP status.
	Failure string `json:"failure,omitempty"`
	// Error is the failure's text.
	Error string `json:"error,omitempty"`
	// PromptTokens, CachedTokens and CompletionTokens are from the answer's usage.
	PromptTokens     int `json:"prompt_tokens"`
	CachedTokens     int `json:"cached_tokens"`
	CompletionTokens int `json:"completion_tokens"`
	// Replica and Reason are from the headers that Options name.
	Replica string `json:"replica,omitempty"`
	Reason  string `json:"reason,omitempty"`

	// statesCached tells cached tokens of 0 from none reported.
	statesCached bool
}

// failure is an error with its kind.
type failure struct {
	kind string
	error
}

// send sends one request, reads the answer to its end and books the sample. The
// answer's text goes to heard unless it is nil.
func (p *player) send(r *trace.Request, due time.Time, heard *[]byte) {
	sent := time.Now()
	s := Sample{
		DueSeconds: p.virtual(due.Sub(p.start)),
		LagSeconds: p.virtual(sent.Sub(due)),
		Session:    r.Session,
	}
	a := answer{heard: heard}
	if err := p.exchange(r, &s, &a); err != nil {
		s.Failure, s.Error = kindOf(err), err.Error()
		if heard != nil {
			*heard = (*heard)[:0]
		}
	}
	s.EndToEndSeconds = p.virtual(time.Since(due))
	if !a.firstAt.IsZero() {
		s.TTFTSeconds = p.virtual(a.firstAt.Sub(due))
	}
	s.PromptTokens, s.CachedTokens, s.CompletionTokens = a.usage.tokens()
	s.statesCached = a.usage.statesCached()
	p.note(s)
}

// exchange makes the HTTP exchange. The body is made here, so that it exists
// only while its request is under way.
func (p *player) exchange(r *trace.Request, s *Sample, a *answer) error {
	body, err := r.AppendBody(nil, p.Model)
	if err != nil {
		return failure{"bad_request", err}
	}
	ctx, cancel := context.WithTimeout(p.ctx, p.Timeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, p.BaseURL+r.Path, bytes.NewReader(body))
	if err != nil {
		return failure{"bad_request", err}
	}
	req.Header.Set("Content-Type", "application/json")
	if p.SessionHeader != "" && r.Session != "" {
		req.Header.Set(p.SessionHeader, r.Session)
	}
	response, err := p.transport.RoundTrip(req)
	if err != nil {
		return failure{"connect", err}
	}
	defer response.Body.Close()

	s.Status = response.StatusCode
	if p.ReplicaHeader != "" {
		s.Replica = response.Header.Get(p.ReplicaHeader)
	}
	if p.ReasonHeader != "" {
		s.Reason = response.Header.Get(p.ReasonHeader)
	}
	if response.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(response.Body, 512))
		return failure{fmt.Sprintf("status_%d", response.StatusCode), fmt.Errorf("%s: %s", response.Status, bytes.TrimSpace(text))}
	}
	if strings.HasPrefix(response.Header.Get("Content-Type"), "text/event-stream") {
		return a.readStream(response.Body)
	}
	return a.readWhole(response.Body)
}

// kindOf names a failure. A context's end and a timeout count as such wherever
// they struck.
func kindOf(err error) string {
	var timeout net.Error
	switch {
	case errors.Is(err, context.Canceled):
		return "canceled"
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded),
		errors.As(err, &timeout) && timeout.Timeout():
		return "timeout"
	}
	var f failure
	if errors.As(err, &f) {
		return f.kind
	}
	return "cut_stream"
}

func (f failure) Unwrap() error { return f.error }
