// SPDX-License-Identifier: Apache-2.0

// Package usage is a handler that reads along in the responses of engines: how
// many tokens a request had, how many of them came from a cache, and when the
// first one of the answer passed by. It changes, delays and keeps nothing.
package usage

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/prompt"
)

func init() {
	caddy.RegisterModule(Handler{})
	httpcaddyfile.RegisterHandlerDirective("kv_cache_usage", parse)
	httpcaddyfile.RegisterDirectiveOrder("kv_cache_usage", httpcaddyfile.Before, "reverse_proxy")
}

// Handler reads the token counts and the time of the first token in the
// responses to the requests that it passes on, for the metrics and the capture
// of the policy that chose the replica. Put it before `reverse_proxy`.
//
// It understands the chat completions, completions, responses and messages
// APIs, streamed or not, and leaves every other request alone, as well as
// compressed responses. Responses are passed on as they come.
//
// Placeholders, each empty as long as the figure is not known:
//
//	{http.kv_cache_usage.prompt_tokens}, {http.kv_cache_usage.cached_tokens},
//	{http.kv_cache_usage.output_tokens}
type Handler struct{}

// CaddyModule returns the Caddy module information.
func (Handler) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "http.handlers.kv_cache_usage",
		New: func() caddy.Module { return new(Handler) },
	}
}

// parse sets up the handler from Caddyfile tokens. Syntax:
//
//	kv_cache_usage [<matcher>]
func parse(h httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
	handler := new(Handler)
	return handler, handler.UnmarshalCaddyfile(h.Dispenser)
}

// UnmarshalCaddyfile implements caddyfile.Unmarshaler.
func (*Handler) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // consume directive name
	if d.NextArg() {
		return d.ArgErr()
	}
	if d.NextBlock(0) {
		return d.Err("blocks are not supported")
	}
	return nil
}

// variable is the meter's key among the request's variables.
const variable = "kv_cache.usage"

// ServeHTTP implements caddyhttp.MiddlewareHandler.
func (Handler) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	api := prompt.APIOf(r.URL.Path)
	if !api.Prefills() {
		return next.ServeHTTP(w, r)
	}
	m := &Meter{late: api == prompt.Responses}
	caddyhttp.SetVar(r.Context(), variable, m)
	if repl, ok := r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer); ok {
		repl.Map(m.placeholder)
	}
	return next.ServeHTTP(&writer{ResponseWriterWrapper: &caddyhttp.ResponseWriterWrapper{ResponseWriter: w}, meter: m}, r)
}

// Of returns the meter of a request, nil if no handler reads along.
func Of(ctx context.Context) *Meter {
	m, _ := caddyhttp.GetVar(ctx, variable).(*Meter)
	return m
}

// Meter is what was seen of one response. It may be read while the response
// passes by. A nil Meter has seen nothing.
type Meter struct {
	late bool // the first bytes come before the first token

	mu      sync.Mutex
	begun   bool
	stream  bool
	opaque  bool
	first   time.Time
	scanner scanner
}

// Tokens tells what the engine told so far.
func (m *Meter) Tokens() Tokens {
	if m == nil {
		return Tokens{}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.scanner.tokens()
}

// FirstToken is when the first token passed by, false if none did or the
// response is no stream, in which a first token can be told from the last.
func (m *Meter) FirstToken() (time.Time, bool) {
	if m == nil {
		return time.Time{}, false
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.first, !m.first.IsZero()
}

// header takes in the response's header.
func (m *Meter) header(status int, h http.Header) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.begun = true
	encoding := h.Get("Content-Encoding")
	m.opaque = status >= 400 || encoding != "" && !strings.EqualFold(encoding, "identity")
	m.stream = !m.opaque && strings.HasPrefix(strings.ToLower(h.Get("Content-Type")), "text/event-stream")
}

// body takes in the next piece of the response's body.
func (m *Meter) body(p []byte) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.opaque {
		return
	}
	if m.stream && m.first.IsZero() && m.startsAnswer(p) {
		m.first = time.Now()
	}
	m.scanner.write(p)
}

// startsAnswer tells whether a piece of a stream comes with the first token.
// Lines that begin with a colon only keep the connection alive. Of the
// responses API the first events come before it; those with text are called
// response.….delta.
func (m *Meter) startsAnswer(p []byte) bool {
	if m.late {
		return bytes.Contains(p, []byte(`.delta`))
	}
	return len(p) > 0 && p[0] != ':'
}

func (m *Meter) placeholder(key string) (any, bool) {
	name, ok := strings.CutPrefix(key, "http.kv_cache_usage.")
	if !ok {
		return nil, false
	}
	t := m.Tokens()
	of := map[string]*int{"prompt_tokens": t.Prompt, "cached_tokens": t.Cached, "output_tokens": t.Output}
	n, ok := of[name]
	if n == nil {
		return nil, ok
	}
	return *n, true
}

// writer passes a response on and lets the meter see it first.
type writer struct {
	*caddyhttp.ResponseWriterWrapper
	meter *Meter
}

// WriteHeader implements http.ResponseWriter.
func (w *writer) WriteHeader(status int) {
	if status >= 200 {
		w.meter.header(status, w.Header())
	}
	w.ResponseWriter.WriteHeader(status)
}

// Write implements http.ResponseWriter.
func (w *writer) Write(p []byte) (int, error) {
	if !w.meter.begun {
		w.meter.header(http.StatusOK, w.Header())
	}
	w.meter.body(p)
	return w.ResponseWriter.Write(p)
}

// ReadFrom implements io.ReaderFrom: nothing may go past Write.
func (w *writer) ReadFrom(r io.Reader) (int64, error) {
	return io.Copy(struct{ io.Writer }{w}, r)
}

// Interface guards
var (
	_ caddyhttp.MiddlewareHandler = (*Handler)(nil)
	_ caddyfile.Unmarshaler       = (*Handler)(nil)
	_ io.ReaderFrom               = (*writer)(nil)
)
