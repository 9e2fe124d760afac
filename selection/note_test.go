// SPDX-License-Identifier: Apache-2.0

package selection

import (
	"fmt"
	"math"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	"github.com/prometheus/client_golang/prometheus"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/fleet"
	"github.com/seed-2fa47a1e/caddy-kv-cache/metrics"
)

// traced is a request that belongs to a trace which is kept, as under Caddy's
// tracing directive.
func traced(t *testing.T, c *client) (*client, *tracetest.SpanRecorder, trace.Span) {
	t.Helper()
	spans := tracetest.NewSpanRecorder()
	provider := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(spans), sdktrace.WithSampler(sdktrace.AlwaysSample()))
	ctx, span := provider.Tracer("test").Start(c.Context(), "request")
	c.Request = c.WithContext(ctx)
	return c, spans, span
}

// loadPolicy provisions either policy.
func loadPolicy(t *testing.T, ctx caddy.Context, policy string) (reverseproxy.Selector, *core) {
	t.Helper()
	if policy == "prefix_hash" {
		p := load[*PrefixHash](t, ctx, policy, "{}")
		return p, &p.core
	}
	p := load[*KVCacheAware](t, ctx, policy, `{"metrics": {"off": true}}`)
	return p, &p.core
}

func TestSpanAttributes(t *testing.T) {
	const hostile = "\x1b]0;owned\a\n<script>"
	for _, policy := range []string{"kv_cache_aware", "prefix_hash"} {
		p, _ := loadPolicy(t, newContext(t), policy)
		c, spans, span := traced(t, complete(words("traced", 8000)))
		c.Header.Set("X-Session-ID", hostile)
		pool := poolOf(3)
		u := p.Select(pool, c.Request, nil)
		span.End()
		got := make(map[string]string)
		for _, a := range spans.Ended()[0].Attributes() {
			got[string(a.Key)] = a.Value.String()
		}
		if got["kv_cache.replica"] != u.Dial || got["kv_cache.policy"] != policy || got["kv_cache.attempt"] != "1" {
			t.Errorf("%s: span has %v", policy, got)
		}
		if got["kv_cache.reason"] == "" || got["kv_cache.prompt_tokens"] == "0" {
			t.Errorf("%s: span has %v", policy, got)
		}
		if _, has := got["kv_cache.cost"]; has != (policy == "kv_cache_aware") {
			t.Errorf("%s: span has %v", policy, got)
		}
		if all := fmt.Sprint(got); strings.Contains(all, "owned") || strings.Contains(all, "traced 1") {
			t.Errorf("%s: span has text of the request: %v", policy, got)
		}
		c.leave()
	}
}

// TestExemplars looks for the trace of a request at what was counted of it.
func TestExemplars(t *testing.T) {
	ctx := newContext(t)
	p := load[*KVCacheAware](t, ctx, "kv_cache_aware", `{"metrics": {"off": true}}`)
	c, _, span := traced(t, complete(words("example", 8000)))
	defer c.leave()
	if p.Select(poolOf(2), c.Request, nil) == nil {
		t.Fatal("no replica")
	}
	if !hasExemplar(t, ctx.GetMetricsRegistry(), "caddy_kv_cache_decision_duration_seconds", span.SpanContext().TraceID().String()) {
		t.Error("the decision's duration has no exemplar with its trace")
	}
	if !hasExemplar(t, ctx.GetMetricsRegistry(), "caddy_kv_cache_decisions_total", span.SpanContext().TraceID().String()) {
		t.Error("the decision has no exemplar with its trace")
	}
}

func hasExemplar(t *testing.T, r *prometheus.Registry, family, id string) bool {
	t.Helper()
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() != family {
			continue
		}
		for _, m := range f.GetMetric() {
			if strings.Contains(m.GetCounter().GetExemplar().String(), id) {
				return true
			}
			for _, b := range m.GetHistogram().GetBucket() {
				if strings.Contains(b.GetExemplar().String(), id) {
					return true
				}
			}
		}
	}
	return false
}

// TestMorePlaceholders checks those that tell why.
func TestMorePlaceholders(t *testing.T) {
	p := loadAware(t, `{"metrics": {"off": true}}`)
	c := complete(words("placeholder", 8000))
	defer c.leave()
	p.Select(poolOf(2), c.Request, nil)
	got := c.repl.ReplaceAll("{http.reverse_proxy.kv_cache.key} {http.reverse_proxy.kv_cache.cost} {http.reverse_proxy.kv_cache.next_cost} {http.reverse_proxy.kv_cache.waited} {http.reverse_proxy.kv_cache.rank}", "-")
	at := c.decisionIn(&p.core).latest()
	want := fmt.Sprintf("%016x %d %d 0s -", at.key, int(at.cost), int(at.next))
	if got != want || at.cost <= 0 {
		t.Errorf("placeholders are %q, want %q", got, want)
	}
}

// TestDebugLog checks that the debug log says where a request went, that
// nothing is logged at other levels, and no text of the request.
func TestDebugLog(t *testing.T) {
	p := loadAware(t, `{"metrics": {"off": true}, "pin_header": "X-Session-ID"}`)
	core, logs := observer.New(zapcore.DebugLevel)
	p.logger = zap.New(core)
	c := complete(words("logged", 8000))
	defer c.leave()
	c.Header.Set("X-Session-ID", "hostile\nline")
	u := p.Select(poolOf(2), c.Request, nil)
	if logs.Len() != 1 {
		t.Fatalf("%d lines were logged", logs.Len())
	}
	line := logs.All()[0]
	if line.Level != zapcore.DebugLevel || line.ContextMap()["replica"] != u.Dial {
		t.Errorf("logged %+v", line)
	}
	if all := fmt.Sprint(line.ContextMap()); strings.Contains(all, "hostile") || strings.Contains(all, "logged 1") {
		t.Errorf("logged text of the request: %s", all)
	}
}

// TestAvoidedAttempts checks that a replica which is left out is counted by why.
func TestAvoidedAttempts(t *testing.T) {
	for _, policy := range []string{"kv_cache_aware", "prefix_hash"} {
		ctx := newContext(t)
		p, core := loadPolicy(t, ctx, policy)
		pool := poolOf(2)
		choose := func() {
			c := complete(words("avoid", 4000))
			defer c.leave()
			if p.Select(pool, c.Request, nil) == nil {
				t.Fatal("no replica")
			}
		}
		choose()
		avoided := func() float64 {
			return metric(t, ctx.GetMetricsRegistry(), "caddy_kv_cache_avoided_attempts_total", "policy", policy, "why", "drained")
		}
		if n := avoided(); n != 0 {
			t.Errorf("%s: %v attempts avoided before the drain", policy, n)
		}
		core.fleet.Replica(pool[0].Dial, time.Now()).Drain(true)
		choose()
		if n := avoided(); n != 1 {
			t.Errorf("%s: %v attempts avoided by one choice, want 1", policy, n)
		}
	}
}

// TestDrainedPin checks that a session leaves a drained replica.
func TestDrainedPin(t *testing.T) {
	p := loadAware(t, `{"metrics": {"off": true}, "pin_header": "X-Session-ID"}`)
	pool := poolOf(2)
	choose := func() *reverseproxy.Upstream {
		c := complete("hello")
		defer c.leave()
		c.Header.Set("X-Session-ID", "7")
		return p.Select(pool, c.Request, nil)
	}
	home := choose()
	if again := choose(); again != home {
		t.Fatalf("the session moved from %s to %s", home.Dial, again.Dial)
	}
	p.fleet.Replica(home.Dial, time.Now()).Drain(true)
	if moved := choose(); moved == home {
		t.Error("the session stayed at a drained replica")
	}
}

// TestRecent compares the ring with the list of what was added.
func TestRecent(t *testing.T) {
	r := new(recent)
	if got := r.list("f", 10); len(got) != 0 {
		t.Errorf("%v before any decision", got)
	}
	for n := range 3*keptDecisions + 7 {
		r.add(&record{attempt: n, cost: math.NaN()})
		if n%191 != 0 {
			continue
		}
		got := r.list("f", 1000)
		if want := min(n+1, keptDecisions); len(got) != want {
			t.Fatalf("%d decisions are kept of %d, want %d", len(got), n+1, want)
		}
		for i, d := range got {
			if d.Attempt != n-i || d.Cost != nil || d.Fleet != "f" {
				t.Fatalf("decision %d from the last is %+v", i, d)
			}
		}
	}
	if got := r.list("f", 3); len(got) != 3 {
		t.Errorf("%d decisions for a limit of 3", len(got))
	}
}

func TestRecentConcurrently(t *testing.T) {
	r := new(recent)
	var writers sync.WaitGroup
	for range 4 {
		writers.Go(func() {
			for n := range 2000 {
				r.add(&record{attempt: n, prompt: float64(n)})
			}
		})
	}
	for range 100 {
		for _, d := range r.list("f", keptDecisions) {
			if float64(d.Attempt) != d.PromptTokens {
				t.Fatalf("torn decision %+v", d)
			}
		}
	}
	writers.Wait()
	if n := len(r.list("f", keptDecisions)); n != keptDecisions {
		t.Errorf("%d decisions are kept", n)
	}
}

// TestNotingAllocatesNothing guards the hot path.
func TestNotingAllocatesNothing(t *testing.T) {
	counts := metrics.NewDecisions("allocates", "kv_cache_aware", reasons, whys)
	defer counts.Close()
	r := new(recent)
	chosen := metrics.Choice{Reason: "match", Prompt: 100, Hit: 50, Cost: 300, Next: 400, Took: time.Microsecond}
	rec := record{replica: "a:1", reason: ReasonMatch, key: 7}
	if n := testing.AllocsPerRun(100, func() {
		counts.Count(&chosen)
		counts.Avoided(fleet.Drained.String())
		counts.Waited(metrics.WaitSent, time.Second)
		r.add(&rec)
	}); n != 0 {
		t.Errorf("%v allocations for each decision", n)
	}
}

// BenchmarkNote reports what telling operators costs, as a share of a whole
// Select.
func BenchmarkNote(b *testing.B) {
	p := loadAware(b, `{"metrics": {"off": true}}`)
	pool := poolOf(8)
	c := complete(words("bench", 8000))
	defer c.leave()
	const selects = 200
	var whole time.Duration
	for range selects {
		c := complete(words("bench", 8000))
		start := time.Now()
		p.Select(pool, c.Request, nil)
		whole += time.Since(start) / selects
		c.leave()
	}
	p.Select(pool, c.Request, nil)
	d := c.decisionIn(&p.core)
	for b.Loop() {
		p.note(c.Request, d, time.Now())
	}
	b.ReportMetric(float64(b.Elapsed())/float64(b.N)/float64(whole), "of-Select")
}
