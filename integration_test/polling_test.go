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
	"strings"
	"sync/atomic"
	"testing"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/enginesim"
)

// behindTLS puts an engine behind a certificate that nobody has signed.
func behindTLS(t *testing.T, engine *enginesim.Server) string {
	t.Helper()
	target, err := url.Parse(engine.URL())
	if err != nil {
		t.Fatal(err)
	}
	inner := httputil.NewSingleHostReverseProxy(target)
	inner.Transport = new(http.Transport)
	inner.ErrorLog = log.New(io.Discard, "", 0)
	s := httptest.NewUnstartedServer(inner)
	s.Config.ErrorLog = inner.ErrorLog
	s.StartTLS()
	t.Cleanup(func() {
		s.Close()
		inner.Transport.(*http.Transport).CloseIdleConnections()
	})
	return s.Listener.Addr().String()
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
