// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/enginesim"
)

// proxyTo is a proxy to an engine.
func proxyTo(t *testing.T, engine *enginesim.Server) *httputil.ReverseProxy {
	t.Helper()
	target, err := url.Parse(engine.URL())
	if err != nil {
		t.Fatal(err)
	}
	p := httputil.NewSingleHostReverseProxy(target)
	transport := new(http.Transport)
	p.Transport = transport
	p.ErrorLog = log.New(io.Discard, "", 0)
	t.Cleanup(transport.CloseIdleConnections)
	return p
}

// behindTLS puts an engine behind a certificate that nobody has signed.
func behindTLS(t *testing.T, engine *enginesim.Server) string {
	t.Helper()
	inner := proxyTo(t, engine)
	s := httptest.NewUnstartedServer(inner)
	s.Config.ErrorLog = inner.ErrorLog
	s.StartTLS()
	t.Cleanup(s.Close)
	return s.Listener.Addr().String()
}

// telling puts an engine behind a proxy that leaves nothing on its metrics page but
// these metrics.
func telling(t *testing.T, engine *enginesim.Server, names ...string) string {
	t.Helper()
	inner := proxyTo(t, engine)
	inner.ModifyResponse = func(r *http.Response) error {
		if r.Request.URL.Path != "/metrics" {
			return nil
		}
		defer r.Body.Close()
		page, err := io.ReadAll(r.Body)
		if err != nil {
			return err
		}
		var left strings.Builder
		for line := range strings.Lines(string(page)) {
			if slices.ContainsFunc(names, func(name string) bool { return strings.Contains(line, name) }) {
				left.WriteString(line)
			}
		}
		r.Header.Del("Content-Length")
		r.ContentLength = int64(left.Len())
		r.Body = io.NopCloser(strings.NewReader(left.String()))
		return nil
	}
	s := httptest.NewServer(inner)
	t.Cleanup(s.Close)
	return s.Listener.Addr().String()
}

// A page of a few metrics is enough to know the queues, so requests wait for their
// best place, and chats stay where they were, whatever the page says of hits.
func TestPageOfFewMetrics(t *testing.T) {
	gauges := []string{"vllm:num_requests_running", "vllm:num_requests_waiting"}
	for _, c := range []struct {
		name  string
		names []string
	}{
		{"gauges", gauges},
		{"gauges and hits", append(gauges, "vllm:prefix_cache_queries", "vllm:prefix_cache_hits", "vllm:kv_cache_usage_perc")},
	} {
		t.Run(c.name, func(t *testing.T) {
			fleet := engines(t, 2, enginesim.ServerConfig{Speed: 2})
			addrs := []string{telling(t, fleet[0], c.names...), telling(t, fleet[1], c.names...)}
			p := start(t, aware(addrs, "", ""))
			p.awaitScrapes(addrs...)
			_, status := p.ask(http.MethodGet, "/kv_cache/fleets", "", nil)
			if n := strings.Count(status, `"queue_known":true`); n != len(addrs) {
				t.Errorf("the queues of %d replicas are known: %s", n, status)
			}

			// Chats of 30,000 tokens in all: more than it takes to lose trust in a
			// replica that does not confirm hits.
			const chats, turns = 6, 5
			var all sync.WaitGroup
			var stayed atomic.Int32
			for i := range chats {
				all.Go(func() {
					messages := []message{{"user", text(fmt.Sprint("chat ", i), 12_000)}}
					home := ""
					for turn := range turns {
						a := p.post(chatPath, chat(messages...))
						if err := a.bad(); err != nil {
							t.Error(err)
							return
						}
						if turn == 0 {
							home = a.replica()
						} else if a.replica() == home && a.cached(t) > 0 {
							stayed.Add(1)
						}
						messages = append(messages, message{"assistant", a.read(t).Choices[0].Message.Content}, message{"user", text("next", 400)})
					}
				})
			}
			all.Wait()
			if n := stayed.Load(); n < chats*(turns-1)*4/5 { // a machine that is late may move one
				t.Errorf("%d of %d turns stayed where the chat was", n, chats*(turns-1))
			}

			for i := range 10 {
				all.Go(func() {
					if err := p.post(chatPath, ask(text(fmt.Sprint("long ", i), 40_000))).bad(); err != nil {
						t.Error(err)
					}
				})
			}
			all.Wait()
			if n := p.metric("caddy_kv_cache_wait_seconds", "outcome", "sent"); n == 0 {
				t.Error("of ten long prompts at once none was held back")
			}
			p.awaitIdle()
		})
	}
}

// Where requests go by TLS, polling does too, by the same settings.
func TestTLSUpstreams(t *testing.T) {
	fleet := engines(t, 2, fast)
	addrs := []string{behindTLS(t, fleet[0]), behindTLS(t, fleet[1])}
	p := start(t, aware(addrs, "", "transport http {\ntls_insecure_skip_verify\n}"))
	content := text("secret", 3000)
	first := p.must(chatPath, ask(content))
	again := p.must(chatPath, ask(content))
	if again.replica() != first.replica() || again.cached(t) == 0 {
		t.Errorf("the prompt went to %s and then to %s", first.replica(), again.replica())
	}
	p.awaitScrapes(addrs...)
	if n := p.metric("caddy_kv_cache_engine_kv_capacity_tokens"); n == 0 {
		t.Error("the metrics were not read")
	}
}

// A certificate that is not trusted keeps polling from working; requests fail as they do with any policy.
func TestTLSNotTrusted(t *testing.T) {
	fleet := engines(t, 1, fast)
	p := start(t, aware([]string{behindTLS(t, fleet[0])}, "", "transport http {\ntls\n}"))
	if a := p.post(chatPath, ask("hello")); a.status != http.StatusBadGateway {
		t.Errorf("status %d, want 502", a.status)
	}
	await(t, "a failed scrape", func() bool { return p.metric("caddy_kv_cache_scrape_errors_total") > 0 })
	if !strings.Contains(p.log.String(), "certificate signed by unknown authority") {
		t.Error("the log does not say why polling fails")
	}
	p.awaitIdle()
}

// The options of polling reach the engine, and its other side is left alone.
func TestMetricsOptions(t *testing.T) {
	const token = "swordfish"
	t.Setenv("METRICS_TOKEN", token)
	var wrong atomic.Pointer[string]
	page := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		got := fmt.Sprint(r.Method, " ", r.RequestURI, " ", r.Header["Authorization"], r.Header["X-Team"], r.Host)
		want := fmt.Sprint("GET /engine/metrics?full=1 ", []string{"Bearer " + token}, []string{"a", "b"}, "engine.test")
		if got != want {
			wrong.Store(&got)
			http.Error(w, "wrong", http.StatusBadRequest)
			return
		}
		_, _ = io.WriteString(w, "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine=\"0\",model_name=\"sim\"} 7\n")
	}))
	t.Cleanup(page.Close)
	requests := engines(t, 1, fast)
	requests[0].SetMetrics(enginesim.MetricsFailing)
	p := start(t, aware(requests.Addrs(), fmt.Sprintf(`
		metrics_uri /engine/metrics?full=1
		metrics_port %s
		metrics_timeout 1s
		metrics_headers {
			Authorization "Bearer {env.METRICS_TOKEN}"
			X-Team a b
			Host engine.test
		}`, page.URL[strings.LastIndex(page.URL, ":")+1:]), ""))
	p.awaitScrapes(requests.Addrs()...)
	if got := wrong.Load(); got != nil {
		t.Errorf("a scrape was %s", *got)
	}
	if n := p.metric("caddy_kv_cache_engine_running_requests"); n != 7 {
		t.Errorf("%v running requests, the page says 7", n)
	}
	if n := p.metric("caddy_kv_cache_scrape_errors_total"); n != 0 {
		t.Errorf("%v scrapes failed: the engine's own page was polled", n)
	}
	if strings.Contains(p.log.String(), token) {
		t.Error("the log has the token")
	}
}
