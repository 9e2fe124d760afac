// SPDX-License-Identifier: Apache-2.0

package admin_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	_ "github.com/caddyserver/caddy/v2/modules/caddyhttp"
	_ "github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	_ "github.com/caddyserver/caddy/v2/modules/filestorage"
	_ "github.com/caddyserver/caddy/v2/modules/metrics"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/enginesim"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/loopback"
	_ "github.com/seed-2fa47a1e/caddy-kv-cache/selection"
)

// site is a Caddy in this process with one reverse_proxy for each policy, told
// apart by the X-Proxy field, and its admin endpoint on.
type site struct {
	admin, addr string
	dir         string
	proxies     []string // JSON of the handlers, by order
}

func proxy(policy string, upstreams ...string) string {
	dials := make([]string, len(upstreams))
	for i, u := range upstreams {
		dials[i] = fmt.Sprintf(`{"dial": %q}`, u)
	}
	return fmt.Sprintf(`{"handler": "reverse_proxy", "upstreams": [%s], "load_balancing": {"selection_policy": %s}}`,
		strings.Join(dials, ","), policy)
}

const (
	aware = `{"policy": "kv_cache_aware", "name": "chat", "metrics": {"interval": "50ms"}}`
	hash  = `{"policy": "prefix_hash", "name": "embed"}`
)

func start(t *testing.T, proxies ...string) *site {
	t.Helper()
	s := &site{admin: loopback.FreeAddr(t), addr: loopback.FreeAddr(t), dir: t.TempDir(), proxies: proxies}
	t.Cleanup(func() {
		if err := caddy.Stop(); err != nil {
			t.Error(err)
		}
	})
	if err := s.load(); err != nil {
		t.Fatal(err)
	}
	return s
}

func (s *site) reload(t *testing.T) {
	t.Helper()
	if err := s.load(); err != nil {
		t.Fatal(err)
	}
	loopback.AwaitOne(t, s.addr)
	loopback.AwaitOne(t, s.admin)
}

func (s *site) load() error {
	var routes []string
	for i, p := range s.proxies {
		routes = append(routes, fmt.Sprintf(`{"match": [{"header": {"X-Proxy": ["%d"]}}], "handle": [%s]}`, i, p))
	}
	return caddy.Load(fmt.Appendf(nil, `{
		"admin": {"listen": %q, "config": {"persist": false}},
		"logging": {"logs": {"default": {"writer": {"output": "discard"}}}},
		"storage": {"module": "file_system", "root": %q},
		"apps": {"http": {"servers": {"test": {"listen": [%q], "automatic_https": {"disable": true}, "routes": [%s]}}}}
	}`, s.admin, s.dir, s.addr, strings.Join(routes, ",")), true)
}

// engines starts simulated engines until the test ends.
func engines(t *testing.T, n int) []string {
	t.Helper()
	addrs := make([]string, n)
	for i := range addrs {
		e, err := enginesim.StartServer(enginesim.ServerConfig{Speed: 50})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { e.Close() })
		addrs[i] = strings.TrimPrefix(e.URL(), "http://")
	}
	return addrs
}

// do sends a request to the admin API and returns its status and body.
func (s *site) do(t *testing.T, method, what string, query url.Values, body io.Reader) (int, []byte) {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), method, "http://"+s.admin+"/kv_cache/"+what+"?"+query.Encode(), body)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, answer
}

// ask expects an answer of a type.
func ask[T any](t *testing.T, s *site, method, what string, query url.Values, body string) T {
	t.Helper()
	status, answer := s.do(t, method, what, query, strings.NewReader(body))
	var v T
	if status != http.StatusOK {
		t.Fatalf("%s %s?%s: status %d: %s", method, what, query.Encode(), status, answer)
	}
	d := json.NewDecoder(bytes.NewReader(answer))
	d.DisallowUnknownFields()
	if err := d.Decode(&v); err != nil {
		t.Fatalf("%s %s: %v in %s", method, what, err, answer)
	}
	return v
}

// refused expects an error of a status whose text has a part.
func (s *site) refused(t *testing.T, method, what string, query url.Values, body string, status int, part string) {
	t.Helper()
	got, answer := s.do(t, method, what, query, strings.NewReader(body))
	if got != status || !strings.Contains(string(answer), part) {
		t.Errorf("%s %s?%s: status %d: %s; want %d with %q", method, what, query.Encode(), got, answer, status, part)
	}
}

// complete sends a prompt through a proxy.
func (s *site) complete(t *testing.T, proxy int, text string) {
	t.Helper()
	resp, err := http.DefaultClient.Do(s.completion(t, proxy, text))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if _, err := io.Copy(io.Discard, resp.Body); err != nil {
		t.Fatal(err)
	}
	if resp.StatusCode != http.StatusOK {
		t.Fatalf("completion: status %d", resp.StatusCode)
	}
}

// completion is a request for a prompt's completion.
func (s *site) completion(t *testing.T, proxy int, text string) *http.Request {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+s.addr+"/v1/completions", strings.NewReader(completion(text)))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set("X-Proxy", strconv.Itoa(proxy))
	return r
}

func completion(text string) string {
	b, err := json.Marshal(map[string]any{"model": "sim", "prompt": text, "max_tokens": 2})
	if err != nil {
		panic(err)
	}
	return string(b)
}

func await(t *testing.T, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !is(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("waited in vain for %s", what)
		}
	}
}

func params(pairs ...string) url.Values {
	q := make(url.Values)
	for i := 0; i < len(pairs); i += 2 {
		q.Set(pairs[i], pairs[i+1])
	}
	return q
}
