// SPDX-License-Identifier: Apache-2.0

package selection

import (
	"context"
	"io"
	"mime"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	"go.uber.org/zap"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/fleet"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/prompt"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/usage"
)

// decision is what one policy knows of one request. It is made at the first
// Select and reused by every retry, so that a retry neither reads the body
// again nor goes where an attempt has failed already.
type decision struct {
	prompt prompt.Prompt
	reason Reason // why there is no prompt; empty if there is one
	body   *body  // nil if the body was left alone
	seed   uint64 // that the prompt's chain starts from, its tenant's

	changed func(time.Time) // to be told of the request's end; may be nil
	arrived time.Time
	refused bool         // for want of room, at an earlier attempt
	muted   bool         // whom the policy decides for books the outcome
	teller  *core        // tells operators of the request's end; nil for nobody
	meter   *usage.Meter // of the response; nil if nobody reads along
	pupil   *fleet.Fleet // to learn the prompt's tokens; nil for nobody
	path    string       // of the request at the replica, for the pupil

	mu       sync.Mutex // the request's end comes on another goroutine
	over     bool
	attempts []*attempt
	answered *attempt // the one that was answered, once the request is over
	seen     any      // mark of the answer to an attempt that was retried

	// Room for what most requests have one of, in the decision's own memory.
	room       body
	firstTry   attempt
	firstTries [1]*attempt
}

// attempt is one choice made for a request.
type attempt struct {
	fleet.Reservation

	replica *fleet.Replica
	rank    string // of the replica, that holds the prompt; empty if not known
	matched int    // blocks believed held there
	failed  bool
	stuck   bool // it failed for want of a descriptor, and did not get there
	reason  Reason
	key     uint64        // hash of the prompt's leading part, 0 without one
	cost    float64       // of the choice, NaN where there are no costs
	next    float64       // of the next best, +Inf if there was none
	waited  time.Duration // that the request was held back
	// expected is the estimated time from the request's arrival to its first
	// token.
	expected time.Duration
}

// outlook says how a decision reads a request.
type outlook struct {
	limit  int    // bytes of body to look at
	seed   uint64 // of the block chain
	tenant string // with placeholders; empty if tenants are not told apart
	retry  retries
}

// retries says which requests the proxy may send again after an attempt that
// has sent some of the body.
type retries int

const (
	retriesAny  retries = iota // or not known
	retriesGET                 // others only if no connection could be made
	retriesNone                // none
)

// retriesOf reads the proxy's options. At this time its matchers are not
// loaded, and a nil transport stands for Caddy's own. What other transports do
// with a body before they have a connection isn't known.
func retriesOf(h *reverseproxy.Handler) retries {
	if h == nil || h.LoadBalancing == nil {
		return retriesAny
	}
	if _, own := h.Transport.(*reverseproxy.HTTPTransport); h.Transport != nil && !own {
		return retriesAny
	}
	switch lb := h.LoadBalancing; {
	case lb.Retries == 0 && lb.TryDuration == 0:
		return retriesNone
	case len(lb.RetryMatchRaw) == 0:
		return retriesGET
	}
	return retriesAny
}

// once tells whether no attempt comes after one that has sent some of the body.
func (t retries) once(method string) bool {
	return t == retriesNone || t == retriesGET && method != http.MethodGet
}

// scratch prompts are read into, so that finding the chain's length costs no
// allocation; a decision keeps a copy of the exact size.
var scratch = sync.Pool{New: func() any { return new(prompt.Prompt) }}

// decisionOf returns the request's decision, which it makes from the request's
// body if this is the first attempt. key tells policies of one request apart.
func decisionOf(r *http.Request, key string, o *outlook, changed func(time.Time)) (d *decision, first bool) {
	ctx := r.Context()
	if known, ok := caddyhttp.GetVar(ctx, key).(*decision); ok {
		if known.body != nil {
			r.Body = known.body.attempt()
		}
		return known, false
	}
	made := &decision{changed: changed}
	made.reason = made.read(r, o)
	if vars, ok := ctx.Value(caddyhttp.VarsCtxKey).(map[string]any); ok {
		vars[key] = made
	}
	context.AfterFunc(ctx, func() { made.end(ctx) })
	return made, true
}

// read peeks at the body and finds the prompt in it, or the reason why not.
func (d *decision) read(r *http.Request, o *outlook) Reason {
	api := prompt.APIOf(r.URL.Path)
	switch {
	case r.Body == nil || r.Body == http.NoBody:
		return ReasonNoBody
	case !api.Prefills():
		return ReasonNoPrompt
	case caddyhttp.IsIncremental(r.Header):
		return ReasonIncremental
	case encoded(r.Header):
		return ReasonEncoded
	case !mayBeJSON(r.Header.Get("Content-Type")):
		return ReasonNotJSON
	}
	b := &d.room
	whole := b.peek(r, o.limit)
	d.body = b
	b.once = o.retry.once(r.Method)
	if b.err != nil && b.err != io.EOF {
		return ReasonBodyError
	}
	p := scratch.Get().(*prompt.Prompt)
	defer scratch.Put(p)
	d.seed = o.tenantSeed(r)
	if fault := p.Read(api, b.head, whole, d.seed); fault != prompt.None {
		return ofFault(fault)
	}
	d.prompt = *p
	d.prompt.Chain = slices.Clone(p.Chain)
	return ""
}

// encoded tells whether the body is compressed. Engines answer such a request
// with an error, so there is nothing to gain from decoding it here.
func encoded(h http.Header) bool {
	e := h.Get("Content-Encoding")
	return e != "" && !strings.EqualFold(e, "identity")
}

// mayBeJSON leaves out what surely is something else: uploads and media.
func mayBeJSON(contentType string) bool {
	if contentType == "" || contentType == "application/json" {
		return true
	}
	kind, _, err := mime.ParseMediaType(contentType)
	if err != nil {
		return true
	}
	family, _, _ := strings.Cut(kind, "/")
	switch family {
	case "multipart", "audio", "video", "image", "font":
		return false
	}
	return kind != "application/octet-stream"
}

// tried tells whether an attempt of this request went to the replica.
func (d *decision) tried(p *fleet.Replica) bool {
	for _, a := range d.attempts {
		if a.replica == p && !a.stuck {
			return true
		}
	}
	return false
}

// latest is the current attempt, nil before the first.
func (d *decision) latest() *attempt {
	if len(d.attempts) == 0 {
		return nil
	}
	return d.attempts[len(d.attempts)-1]
}

// retract books that the latest attempt failed: its replica does not hold the
// prompt, and may be avoided for a while.
func (d *decision) retract(ctx context.Context, now time.Time) {
	a := d.latest()
	if a == nil || a.failed { // after it, no replica was available
		return
	}
	a.failed = true
	if d.muted {
		return
	}
	o := d.outcome(ctx)
	d.seen = o.mark
	d.fail(a, o, now)
}

// fail books an attempt that was answered with an error, or not at all.
func (d *decision) fail(a *attempt, o outcome, now time.Time) {
	var avoided time.Duration
	if o.status == 0 {
		avoided, a.stuck = a.Fail(now)
	} else {
		avoided = a.Refuse(o.status, o.retryAfter, now)
	}
	a.replica.Lacks(d.prompt.Chain, a.matched)
	if o.status == http.StatusNotFound && d.teller != nil {
		d.teller.fleet.NotFound(d.prompt.Model, now)
	}
	if avoided > 0 && d.teller != nil {
		d.teller.logger.Warn("replica is avoided while another can be chosen", zap.String("fleet", d.teller.fleet.Name),
			zap.String("replica", a.replica.Addr), zap.Int("status", o.status), zap.Duration("for", avoided))
	}
}

// attempt returns an empty attempt, in the decision's own memory if it is the first.
func (d *decision) attempt() *attempt {
	if d.attempts == nil {
		return &d.firstTry
	}
	return new(attempt)
}

// send books the choice of a replica.
func (d *decision) send(a *attempt, now time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.attempts == nil {
		d.attempts = d.firstTries[:0]
	}
	d.attempts = append(d.attempts, a)
	if d.muted {
		return
	}
	a.replica.Reserve(&a.Reservation, now)
	l := a.replica.Load(now)
	a.expected = a.waited + prefillTime(l.Queue, l.Rate)
	if d.over { // the client left while we chose
		a.Abort(now)
	}
}

// land books what the latest attempt's replica will hold. It is called once for
// each attempt, by whoever has made it.
func (d *decision) land() {
	if !d.muted {
		d.latest().Land(d.prompt.Chain)
	}
}

// landBeside is land for a request that is about to go its way: if it takes a
// while, then beside it.
func (d *decision) landBeside() {
	if !d.muted {
		a := d.latest()
		landings.land(&a.Reservation, d.prompt.Chain, a.matched)
	}
}

// end books the end of the request, whose context is done: the response has
// been sent, or the client has left.
func (d *decision) end(ctx context.Context) {
	now := time.Now()
	d.book(ctx, now)
	if d.changed != nil {
		d.changed(now)
	}
	d.teach()
	if d.body != nil {
		d.body.finish()
	}
}

func (d *decision) book(ctx context.Context, now time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.over = true
	var o outcome
	if a := d.latest(); a != nil && !d.muted {
		o = d.outcome(ctx)
		switch {
		case o.status >= 400: // and nothing was computed
			d.fail(a, o, now)
		case o.done:
			a.Finish(now)
			d.answered = a
		default:
			a.Abort(now)
		}
	}
	if d.teller != nil {
		d.teller.report(d, o, now)
	}
}

// outcome is how the proxy got on with a request's latest attempt.
type outcome struct {
	status     int           // that the replica answered with, 0 if it did not answer
	retryAfter time.Duration // by the answer's header, 0 without one
	done       bool          // its answer was sent on to the end
	mark       any           // tells answers apart; nil without one
}

// outcome reads the outcome from the request's placeholders. Those of an
// answer that was retried stay when the next attempt gets none.
func (d *decision) outcome(ctx context.Context) (o outcome) {
	repl, ok := ctx.Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	if !ok {
		return o
	}
	// In nanoseconds, so no two are the same.
	if o.mark, _ = repl.Get("http.reverse_proxy.upstream.latency"); o.mark == nil || o.mark == d.seen {
		return outcome{mark: d.seen}
	}
	if v, ok := repl.Get("http.reverse_proxy.status_code"); ok {
		o.status, _ = v.(int)
	}
	if o.status >= 400 { // else to look for what is not there costs a microsecond
		if v, ok := repl.Get("http.reverse_proxy.header.Retry-After"); ok {
			text, _ := v.(string)
			o.retryAfter = retryAfter(text, time.Now())
		}
	}
	if v, ok := repl.Get("http.reverse_proxy.upstream.duration"); ok && v != nil {
		o.done = true
	}
	return o
}

// retryAfter reads the header of that name: seconds, or a time.
func retryAfter(text string, now time.Time) time.Duration {
	if seconds, err := strconv.ParseUint(text, 10, 31); err == nil {
		return time.Duration(seconds) * time.Second
	}
	at, err := http.ParseTime(text)
	if err != nil {
		return 0
	}
	return max(0, at.Sub(now))
}

// placeholder serves {http.reverse_proxy.kv_cache.*}.
func (d *decision) placeholder(key string) (any, bool) {
	name, ok := strings.CutPrefix(key, "http.reverse_proxy.kv_cache.")
	if !ok {
		return nil, false
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	a := d.latest()
	if a == nil {
		return nil, false
	}
	switch name {
	case "replica":
		return a.replica.Addr, true
	case "reason":
		return string(a.reason), true
	case "prompt_tokens":
		return int(a.Prompt), true
	case "matched_tokens":
		return int(a.Hit), true
	case "key":
		return keyText(a.key), true
	case "cost":
		return tokensText(a.cost), true
	case "next_cost":
		return tokensText(a.next), true
	case "rank":
		return a.rank, true
	case "waited":
		return a.waited.String(), true
	}
	return nil, false
}
