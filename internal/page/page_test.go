// SPDX-License-Identifier: Apache-2.0

package page

import (
	"encoding/json"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/enginesim"
	"github.com/seed-2fa47a1e/caddy-kv-cache/metrics"
)

// proxied is a site with the page beside a fleet.
func proxied(name string, addrs ...string) string {
	return "\tkv_cache_page /kv\n\treverse_proxy " + strings.Join(addrs, " ") + " {\n\t\tlb_policy kv_cache_aware {\n\t\t\tname " + name + "\n\t\t\tmetrics_interval 50ms\n\t\t}\n\t}"
}

// TestPage checks that the page is whole, and what browsers are told of it.
func TestPage(t *testing.T) {
	s := serve(t, proxied("chat", engines(t, 1, enginesim.ServerConfig{Speed: 50})...))
	resp, body := s.fetch(t, http.MethodGet, "/kv")
	if resp.StatusCode != http.StatusOK || resp.Header.Get("Content-Type") != "text/html; charset=utf-8" {
		t.Errorf("status %d, type %s", resp.StatusCode, resp.Header.Get("Content-Type"))
	}
	policy := resp.Header.Get("Content-Security-Policy")
	for _, part := range []string{"default-src 'none'", "script-src 'sha256-", "style-src 'sha256-", "connect-src 'self'", "frame-ancestors 'none'", "base-uri 'none'", "form-action 'none'"} {
		if !strings.Contains(policy, part) {
			t.Errorf("the security policy lacks %s: %s", part, policy)
		}
	}
	if strings.Contains(policy, "unsafe") || strings.Contains(policy, "*") {
		t.Errorf("the security policy allows too much: %s", policy)
	}
	for name, want := range map[string]string{"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store", "Referrer-Policy": "no-referrer"} {
		if got := resp.Header.Get(name); got != want {
			t.Errorf("%s is %q, want %q", name, got, want)
		}
	}
	for _, outside := range []string{"src=\"http", "href=\"http", "url(", "@import", " style=", " onclick", "innerHTML"} {
		if strings.Contains(body, outside) {
			t.Errorf("the page has %q", outside)
		}
	}
	if !strings.Contains(body, script) || !strings.Contains(body, style) {
		t.Error("the page is not in one piece")
	}
}

// TestMethods checks that the page can only be read.
func TestMethods(t *testing.T) {
	s := serve(t, proxied("chat", engines(t, 1, enginesim.ServerConfig{Speed: 50})...))
	for _, uri := range []string{"/kv", "/kv?data"} {
		got, body := s.fetch(t, http.MethodGet, uri)
		head, nothing := s.fetch(t, http.MethodHead, uri)
		if head.StatusCode != http.StatusOK || nothing != "" || head.Header.Get("Content-Type") != got.Header.Get("Content-Type") {
			t.Errorf("HEAD %s: status %d, %q", uri, head.StatusCode, nothing)
		}
		if got.ContentLength != int64(len(body)) {
			t.Errorf("GET %s: length %d, %d told", uri, len(body), got.ContentLength)
		}
		for _, method := range []string{"POST", "PUT", "DELETE", "PATCH", "OPTIONS"} {
			resp, _ := s.fetch(t, method, uri)
			if resp.StatusCode != http.StatusMethodNotAllowed || resp.Header.Get("Allow") != "GET, HEAD" {
				t.Errorf("%s %s: status %d, allowed is %q", method, uri, resp.StatusCode, resp.Header.Get("Allow"))
			}
		}
	}
}

// TestOffByDefault checks that without the directive there is no page.
func TestOffByDefault(t *testing.T) {
	addrs := engines(t, 1, enginesim.ServerConfig{Speed: 50})
	s := serve(t, "\treverse_proxy "+addrs[0]+" {\n\t\tlb_policy kv_cache_aware\n\t}")
	if _, body := s.fetch(t, http.MethodGet, "/kv"); strings.Contains(body, "<html") {
		t.Error("there is a page")
	}
}

// TestBesideMetrics has the page on a site that serves metrics everywhere else.
func TestBesideMetrics(t *testing.T) {
	s := serve(t, "\tmetrics\n\tkv_cache_page /kv")
	if _, body := s.fetch(t, http.MethodGet, "/kv"); !strings.Contains(body, "<html") {
		t.Errorf("the page is %.100s", body)
	}
	if _, body := s.fetch(t, http.MethodGet, "/"); strings.Contains(body, "<html") || !strings.Contains(body, "# HELP") {
		t.Errorf("the metrics are %.100s", body)
	}
	if d := s.data(t, ""); len(d.Fleets) != 0 || d.Names == nil {
		t.Errorf("without a policy there is %+v", d)
	}
}

// TestData follows what the page shows from before the first request to after a
// drain.
func TestData(t *testing.T) {
	addrs := engines(t, 2, enginesim.ServerConfig{Speed: 50})
	slices.Sort(addrs)
	s := serve(t, proxied("chat", addrs...))
	b := hold()
	t.Cleanup(func() { _ = release() })
	f := s.data(t, "").Fleets[0]
	if f.Name != "chat" || f.Policy != "kv_cache_aware" || len(f.Replicas) != 2 || len(f.Latest) != 0 || f.Hits != nil {
		t.Errorf("at first %+v", f)
	}
	await(t, "the engines' first figures", func() bool {
		age(b)
		f := s.data(t, "").Fleets[0]
		return f.Replicas[0].KV != nil && f.Replicas[1].KV != nil
	})
	b.sample()
	head := strings.Repeat(secret, 100)
	for _, tail := range []string{"a", "b", "c", "d", "e"} {
		s.complete(t, "sim", head+strings.Repeat(tail, 1000))
	}
	await(t, "what the engines counted", func() bool {
		b.sample()
		age(b)
		f = s.data(t, "").Fleets[0]
		return f.Hits != nil && *f.Hits > 0.3
	})
	if len(f.Latest) != 5 || f.Latest[0].Reason != "match" || f.Latest[0].Key == "" {
		t.Errorf("decisions %+v", f.Latest)
	}
	if n := f.Replicas[0].Chosen + f.Replicas[1].Chosen; n != 5 {
		t.Errorf("%d decisions are counted", n)
	}
	if len(f.Curve) != points || f.Curve[0] != unknown || f.Curve[points-1] < 30 {
		t.Errorf("curve %v", f.Curve)
	}
	if len(f.Prefixes) != 1 || f.Prefixes[0].Prompts != 5 || len(f.Prefixes[0].Holders) != 1 || f.Prefixes[0].Tokens < 500 || f.Prefixes[0].Tokens > 1500 {
		t.Errorf("prefixes %+v", f.Prefixes)
	}
	for _, r := range f.Replicas {
		if r.State != "eligible" || r.Age == nil || r.Engine != "vllm" || r.Running == nil || !slices.Equal(r.Models, []string{"sim"}) {
			t.Errorf("replica %+v", r)
		}
	}

	s.load(t, proxied("chat", addrs...))
	age(b)
	if again := s.data(t, "").Fleets[0]; again.Hits == nil || len(again.Prefixes) != 1 {
		t.Errorf("after a reload %+v", again)
	}
}

// age makes the board's answers old.
func age(b *board) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.made, b.surveyed = time.Time{}, time.Time{}
}

// TestOneOfSeveralFleets asks for one fleet, and for one that does not exist.
func TestOneOfSeveralFleets(t *testing.T) {
	addrs := engines(t, 1, enginesim.ServerConfig{Speed: 50})
	s := serve(t, "\tkv_cache_page /kv\n\treverse_proxy /a/* "+addrs[0]+" {\n\t\tlb_policy kv_cache_aware {\n\t\t\tname chat\n\t\t}\n\t}\n"+
		"\treverse_proxy "+addrs[0]+" {\n\t\tlb_policy prefix_hash {\n\t\t\tname embed\n\t\t}\n\t}")
	if d := s.data(t, ""); len(d.Fleets) != 2 || !slices.Equal(d.Names, []string{"chat", "embed"}) {
		t.Errorf("all are %+v", d)
	}
	if d := s.data(t, "&fleet=embed"); len(d.Fleets) != 1 || d.Fleets[0].Policy != "prefix_hash" || len(d.Names) != 2 {
		t.Errorf("one is %+v", d)
	}
	resp, body := s.fetch(t, http.MethodGet, "/kv?data&fleet=%3Cb%3E%00nope")
	var refusal struct{ Error string }
	if err := json.Unmarshal([]byte(body), &refusal); err != nil {
		t.Fatal(err)
	}
	if resp.StatusCode != http.StatusNotFound || refusal.Error != `fleet "<b>\x00nope" is unknown` || strings.Contains(body, "<") {
		t.Errorf("status %d: %s", resp.StatusCode, body)
	}
}

// TestHostileNames looks for markup and prompts in what the page is given.
func TestHostileNames(t *testing.T) {
	const hostile = `</script><img src=x onerror=alert(1)>`
	addrs := engines(t, 1, enginesim.ServerConfig{Speed: 50, Model: hostile})
	s := serve(t, proxied("`"+hostile+"`", addrs...))
	s.complete(t, hostile, strings.Repeat(secret, 100))
	resp, body := s.fetch(t, http.MethodGet, "/kv?data")
	if resp.Header.Get("Content-Type") != "application/json" || strings.ContainsAny(body, "<>") {
		t.Errorf("markup in %s", body)
	}
	if strings.Contains(body, "quick brown") || strings.Contains(body, "secret") {
		t.Errorf("a prompt's text in %s", body)
	}
	if d := s.data(t, ""); d.Fleets[0].Name != hostile {
		t.Errorf("the name became %q", d.Fleets[0].Name)
	}
}

// TestManyViewers checks that the figures are made once a second, however many
// ask.
func TestManyViewers(t *testing.T) {
	s := serve(t, proxied("chat", engines(t, 1, enginesim.ServerConfig{Speed: 50})...))
	b := hold()
	t.Cleanup(func() { _ = release() })
	still := time.Now()
	b.mu.Lock()
	b.now = func() time.Time { return still }
	b.answers = nil
	b.mu.Unlock()
	first := s.data(t, "").At
	s.complete(t, "sim", strings.Repeat(secret, 10))
	var viewers sync.WaitGroup
	for range 20 {
		viewers.Go(func() {
			if d := s.data(t, ""); d.At != first || len(d.Fleets[0].Latest) != 0 {
				t.Errorf("made anew at %d after %d: %+v", d.At, first, d.Fleets[0].Latest)
			}
		})
	}
	viewers.Wait()
	b.mu.Lock()
	b.now = func() time.Time { return still.Add(freshFor) }
	b.mu.Unlock()
	if d := s.data(t, ""); len(d.Fleets[0].Latest) != 1 {
		t.Errorf("a second later %+v", d)
	}
}

func TestCaddyfile(t *testing.T) {
	for text, part := range map[string]string{
		"kv_cache_page":             "",
		"kv_cache_page what":        "wrong argument count",
		"kv_cache_page {\n\tx y\n}": "blocks are not supported",
	} {
		err := new(Handler).UnmarshalCaddyfile(caddyfile.NewTestDispenser(text))
		if (err == nil) != (part == "") || err != nil && !strings.Contains(strings.ToLower(err.Error()), part) {
			t.Errorf("%q: %v; want %q", text, err, part)
		}
	}
}

// TestPast counts over a restart of the engine, and over times at which it said
// nothing.
func TestPast(t *testing.T) {
	p := new(past)
	told := func(asked, found float64) *metrics.Snapshot {
		return &metrics.Snapshot{PrefixQueries: metrics.Fact{Value: asked, Known: true}, PrefixHits: metrics.Fact{Value: found, Known: true}}
	}
	for _, s := range []*metrics.Snapshot{nil, told(1000, 900), told(1100, 950), nil, {}, told(1200, 1050), told(50, 0), told(150, 0)} {
		p.add(s)
	}
	if got, want := p.whole(), (lookups{300, 150}); got != want {
		t.Errorf("summed up %+v, want %+v", got, want)
	}
	c := curve(p)
	if got := c[points-8:]; !slices.Equal(got, []int8{unknown, unknown, 50, 50, 50, 75, 75, 50}) {
		t.Errorf("curve ends in %v", got)
	}
	for range points + smoothed {
		p.add(nil)
	}
	if rate, known := p.whole().rate(); known {
		t.Errorf("long afterwards the rate is still %v", rate)
	}
	if got := curve(); got[0] != unknown {
		t.Errorf("of no replica the curve is %v", got)
	}
}
