// SPDX-License-Identifier: Apache-2.0

package selection

import (
	"fmt"
	"math"
	"net/http"
	"strconv"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/fleet"
	"github.com/seed-2fa47a1e/caddy-kv-cache/metrics"
)

// whys is the closed list of why a replica is left out, as metric labels.
var whys = []string{
	fleet.Failing.String(), fleet.Refused.String(), fleet.Hung.String(),
	fleet.Asleep.String(), fleet.Drained.String(),
}

// note makes the latest attempt of a request known to operators: metrics, the
// recent decisions, the request's trace and the debug log. start is when
// deciding began.
func (c *core) note(r *http.Request, d *decision, start time.Time) {
	a, span := d.latest(), trace.SpanFromContext(r.Context())
	chosen := metrics.Choice{
		Reason: string(a.reason),
		Prompt: a.Prompt,
		Hit:    a.Hit,
		Cost:   a.cost,
		Next:   a.next,
		Retry:  len(d.attempts) > 1,
		Took:   time.Since(start),
		Trace:  sampled(span.SpanContext()),
	}
	c.counts.Count(&chosen)
	c.recent.add(&record{
		at:      start,
		replica: a.replica.Addr,
		reason:  a.reason,
		key:     a.key,
		prompt:  a.Prompt,
		hit:     a.Hit,
		cost:    a.cost,
		next:    a.next,
		waited:  a.waited,
		attempt: len(d.attempts),
		trace:   span.SpanContext().TraceID(),
	})
	if span.IsRecording() {
		span.SetAttributes(c.attributes(a, len(d.attempts))...)
	}
	if e := c.logger.Check(zapcore.DebugLevel, "chose a replica"); e != nil {
		e.Write(zap.String("fleet", c.fleet.Name), zap.String("replica", a.replica.Addr), zap.String("reason", string(a.reason)),
			zap.Int("attempt", len(d.attempts)), zap.String("key", keyText(a.key)),
			zap.Int("prompt_tokens", int(a.Prompt)), zap.Int("matched_tokens", int(a.Hit)),
			zap.String("cost", tokensText(a.cost)), zap.String("next_cost", tokensText(a.next)),
			zap.Duration("waited", a.waited), zap.Duration("took", chosen.Took))
	}
}

// none notes that no replica was available.
func (c *core) none(r *http.Request, why Reason, start time.Time) {
	c.counts.Count(&metrics.Choice{
		Reason: string(why),
		Took:   time.Since(start),
		Trace:  sampled(trace.SpanContextFromContext(r.Context())),
	})
}

// noteAvoided counts the replicas that the latest attempt passed over although
// Caddy would have tried them. It is called only where some were.
func (c *core) noteAvoided(d *decision, pool reverseproxy.UpstreamPool, now time.Time) {
	for i, u := range pool {
		if !u.Available() {
			continue
		}
		p := c.replica(pool, i, now)
		if why := p.Avoided(now); why != fleet.Eligible && !d.tried(p) {
			c.counts.Avoided(why.String())
		}
	}
}

// attributes describe an attempt on the request's span. None holds text that
// came with the request.
func (c *core) attributes(a *attempt, number int) []attribute.KeyValue {
	list := []attribute.KeyValue{
		attribute.String("kv_cache.fleet", c.fleet.Name),
		attribute.String("kv_cache.policy", c.policy),
		attribute.String("kv_cache.replica", a.replica.Addr),
		attribute.String("kv_cache.reason", string(a.reason)),
		attribute.Int("kv_cache.attempt", number),
		attribute.Int("kv_cache.prompt_tokens", int(a.Prompt)),
		attribute.Int("kv_cache.matched_tokens", int(a.Hit)),
		attribute.Float64("kv_cache.waited_seconds", a.waited.Seconds()),
	}
	if known(a.cost) {
		list = append(list, attribute.Float64("kv_cache.cost", a.cost))
	}
	if known(a.next) && known(a.cost) {
		list = append(list, attribute.Float64("kv_cache.next_cost", a.next))
	}
	return list
}

// sampled is the id of a trace that is kept, else "".
func sampled(s trace.SpanContext) string {
	if !s.HasTraceID() || !s.IsSampled() {
		return ""
	}
	return s.TraceID().String()
}

// keyText is a key as it is shown, "" if there is none.
func keyText(key uint64) string {
	if key == 0 {
		return ""
	}
	return fmt.Sprintf("%016x", key)
}

// tokensText is a cost as it is shown, "" if there is none.
func tokensText(cost float64) string {
	if !known(cost) {
		return ""
	}
	return strconv.FormatInt(int64(cost), 10)
}

func known(cost float64) bool { return !math.IsNaN(cost) && !math.IsInf(cost, 0) }
