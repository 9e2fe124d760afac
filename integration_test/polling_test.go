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

// A marker in prompts is found nowhere but at the engine.
func TestPromptsStayPrivate(t *testing.T) {
	const marker = "Xq7ZmarkerQ9w"
	var seen atomic.Int64
	config := fast
	config.OnRequest = func(_ *http.Request, body []byte) {
		if strings.Contains(string(body), marker) {
			seen.Add(1)
		}
	}
	fleet := engines(t, 2, config)
	dead := freeAddr(t)
	p := start(t, `log
		log_append replica {http.reverse_proxy.kv_cache.replica}
		log_append reason {http.reverse_proxy.kv_cache.reason}
		log_append prompt_tokens {http.reverse_proxy.kv_cache.prompt_tokens}
		log_append matched_tokens {http.reverse_proxy.kv_cache.matched_tokens}
		`+aware(append(fleet.Addrs(), dead), "pin_header X-Session-ID\nmax_body 1MiB", "lb_retries 2\nverbose_logs"))
	secret := strings.Repeat(marker+" ", 100)
	for i := range 12 {
		p.say(fmt.Sprint(secret, i))
	}
	long := strings.Repeat(marker+" ", 100_000)
	p.say(long)
	for _, body := range []string{
		marker, `{"` + marker + `": 1}`, `{"messages": "` + marker, ask(secret)[:300], asJSON(map[string]string{"prompt": secret, "model": marker}),
		`{"messages":[{"role":"` + marker + `","content":[{"type":"` + marker + `"}]}]}`, `{"prompt":["` + marker + `"],"cache_salt":"` + marker + `"}`,
	} {
		for _, path := range []string{chatPath, "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/nowhere"} {
			p.post(path, body)
		}
	}
	fleet[0].FailNext(500, 1)
	fleet[1].FailNext(0, 1)
	for range 3 {
		p.post(chatPath, ask(secret))
	}
	s := p.open(secret, endless)
	if more, err := s.next(); !more {
		t.Fatal(err)
	}
	s.abort()
	p.awaitIdle()
	p.awaitScrapes(fleet.Addrs()...)
	if seen.Load() < 20 {
		t.Fatalf("only %d requests with the marker reached an engine", seen.Load())
	}
	told := map[string]string{"the page of metrics": string(p.metricsPage().body)}
	for _, path := range []string{"/config/", "/reverse_proxy/upstreams", "/metrics", "/kv_cache/replicas", "/debug/vars"} {
		_, told["admin API at "+path] = p.ask(http.MethodGet, path, "", nil)
	}
	told["the log"] = p.log.String()
	for where, text := range told {
		if i := strings.Index(text, marker); i >= 0 {
			t.Errorf("%s has the marker: %.400s", where, text[max(0, i-200):])
		}
	}
	log := p.log.String()
	for _, want := range []string{`"replica":"` + fleet[0].Addr() + `"`, `"reason":"match"`, `"prompt_tokens":`, `"matched_tokens":`, `"msg":"handled request"`} {
		if !strings.Contains(log, want) {
			t.Errorf("the access log lacks %s", want)
		}
	}
}
