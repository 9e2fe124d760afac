// SPDX-License-Identifier: Apache-2.0

package selection

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/fleet"
)

const policyNamespace = "http.reverse_proxy.selection_policies."

// newContext returns a context as modules are provisioned in, with nothing in
// its config. What is loaded in it is cleaned up when the test ends.
func newContext(tb testing.TB) caddy.Context {
	tb.Helper()
	parent, err := caddy.ProvisionContext(&caddy.Config{
		Logging: &caddy.Logging{Logs: map[string]*caddy.CustomLog{
			"default": {BaseLog: caddy.BaseLog{WriterRaw: json.RawMessage(`{"output": "discard"}`)}},
		}},
	})
	if err != nil {
		tb.Fatal(err)
	}
	ctx, cancel := caddy.NewContext(parent)
	tb.Cleanup(cancel)
	return ctx
}

// load provisions a policy as Caddy does.
func load[P caddy.Module](tb testing.TB, ctx caddy.Context, policy, config string) P {
	tb.Helper()
	m, err := ctx.LoadModuleByID(policyNamespace+policy, json.RawMessage(config))
	if err != nil {
		tb.Fatal(err)
	}
	return m.(P)
}

func loadAware(tb testing.TB, config string) *KVCacheAware {
	tb.Helper()
	return load[*KVCacheAware](tb, newContext(tb), "kv_cache_aware", config)
}

func loadHash(tb testing.TB, config string) *PrefixHash {
	tb.Helper()
	return load[*PrefixHash](tb, newContext(tb), "prefix_hash", config)
}

var pools atomic.Int64

// poolOf makes upstreams at addresses that no other test uses.
func poolOf(n int) reverseproxy.UpstreamPool {
	id := pools.Add(1)
	pool := make(reverseproxy.UpstreamPool, n)
	for i := range pool {
		pool[i] = &reverseproxy.Upstream{
			Host: new(reverseproxy.Host),
			Dial: fmt.Sprintf("replica-%d.pool-%d.test:8000", i, id),
		}
	}
	return pool
}

// client is the sender of one request.
type client struct {
	*http.Request
	repl    *caddy.Replacer
	leave   context.CancelFunc
	answers int // that replicas have begun
}

func newClient(r *http.Request) *client {
	ctx, leave := context.WithCancel(r.Context())
	repl := caddy.NewReplacer()
	r = caddyhttp.PrepareRequest(r.WithContext(ctx), repl, httptest.NewRecorder(), new(caddyhttp.Server))
	return &client{Request: r, repl: repl, leave: leave}
}

func post(path, body string) *client {
	r := httptest.NewRequest(http.MethodPost, path, strings.NewReader(body))
	r.Header.Set("Content-Type", "application/json")
	return newClient(r)
}

// complete asks for the completion of a prompt.
func complete(text string) *client { return post("/v1/completions", completionOf(text)) }

func completionOf(text string) string {
	b, err := json.Marshal(map[string]any{"model": "m", "prompt": text})
	if err != nil {
		panic(err)
	}
	return string(b)
}

// words returns text of about so many bytes that no other name's text shares a
// prefix with.
func words(name string, size int) string {
	var b strings.Builder
	for i := 0; b.Len() < size; i++ {
		fmt.Fprintf(&b, "%s %d. ", name, i)
	}
	return b.String()
}

// decisionIn returns what the policy decided on the request.
func (c *client) decisionIn(p *core) *decision {
	d, _ := caddyhttp.GetVar(c.Context(), p.key).(*decision)
	return d
}

// answered ends the request as the proxy does after the replica's answer.
func (c *client) answered(tb testing.TB, p *core, status int) {
	tb.Helper()
	c.header(status, "")
	c.repl.Set("http.reverse_proxy.upstream.duration", time.Millisecond)
	c.left(tb, p)
}

// header lets the replica begin its answer.
func (c *client) header(status int, retryAfter string) {
	c.answers++
	c.repl.Set("http.reverse_proxy.upstream.latency", time.Duration(c.answers))
	c.repl.Set("http.reverse_proxy.status_code", status)
	c.repl.DeleteByPrefix("http.reverse_proxy.header.")
	if retryAfter != "" {
		c.repl.Set("http.reverse_proxy.header.Retry-After", retryAfter)
	}
}

// left ends the request as it stands, and waits until that is booked.
func (c *client) left(tb testing.TB, p *core) {
	tb.Helper()
	c.leave()
	if d := c.decisionIn(p); d != nil {
		await(tb, "the request's end", func() bool {
			d.mu.Lock()
			defer d.mu.Unlock()
			return d.over
		})
	}
}

func (c *client) rest(tb testing.TB) string {
	tb.Helper()
	b, err := io.ReadAll(c.Body)
	if err != nil {
		tb.Fatal(err)
	}
	return string(b)
}

// await waits for a condition that other goroutines bring about.
func await(tb testing.TB, what string, is func() bool) {
	tb.Helper()
	for end := time.Now().Add(20 * time.Second); !is(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			tb.Fatalf("waited in vain for %s", what)
		}
	}
}

// metric sums the values of a family whose labels include those given.
func metric(tb testing.TB, r *prometheus.Registry, name string, labels ...string) float64 {
	tb.Helper()
	families, err := r.Gather()
	if err != nil {
		tb.Fatal(err)
	}
	sum := 0.0
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
	next:
		for _, m := range f.GetMetric() {
			has := make(map[string]string)
			for _, l := range m.GetLabel() {
				has[l.GetName()] = l.GetValue()
			}
			for i := 0; i < len(labels); i += 2 {
				if has[labels[i]] != labels[i+1] {
					continue next
				}
			}
			sum += m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
		}
	}
	return sum
}

// idle reports the first replica whose ledger is not exactly empty.
func idle(tb testing.TB, f *fleet.Fleet) {
	tb.Helper()
	now := time.Now()
	for _, p := range f.Members() {
		if l := p.Load(now); l.InFlight != 0 || l.Queue != 0 || p.Outstanding() != 0 {
			tb.Errorf("%s is left with %v requests, %v queued and %v outstanding tokens", p.Addr, l.InFlight, l.Queue, p.Outstanding())
		}
	}
}
