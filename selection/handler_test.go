// SPDX-License-Identifier: Apache-2.0

package selection

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	_ "github.com/caddyserver/caddy/v2/modules/caddyhttp"
	_ "github.com/caddyserver/caddy/v2/modules/filestorage"
	_ "github.com/caddyserver/caddy/v2/modules/metrics"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"go.uber.org/goleak"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/fleet"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/loopback"
)

// proxy is a Caddy that runs in this process: there can be one at a time. Each
// route is a reverse_proxy handler, chosen by the request's X-Route field.
type proxy struct {
	addr   string
	routes map[string]string
	extra  string // a path that tells this config from another
	dir    string
}

func (p *proxy) config() []byte {
	var routes []string
	for name, handler := range p.routes {
		routes = append(routes, fmt.Sprintf(`{"match": [{"header": {"X-Route": [%q]}}], "handle": [%s]}`, name, handler))
	}
	routes = append(routes, `{"match": [{"path": ["/caddy-metrics"]}], "handle": [{"handler": "metrics"}]}`)
	if p.extra != "" {
		routes = append(routes, fmt.Sprintf(`{"match": [{"path": [%q]}], "handle": [{"handler": "static_response", "body": "ok"}]}`, p.extra))
	}
	return fmt.Appendf(nil, `{
		"admin": {"disabled": true, "config": {"persist": false}},
		"logging": {"logs": {"default": {"writer": {"output": "discard"}}}},
		"storage": {"module": "file_system", "root": %q},
		"apps": {"http": {"grace_period": "5s", "servers": {"test": {
			"listen": [%q], "protocols": ["h1", "h2c"], "automatic_https": {"disable": true},
			"routes": [%s]
		}}}}
	}`, p.dir, p.addr, strings.Join(routes, ","))
}

// handler is a reverse_proxy with a policy; options are further fields of the
// handler and of its load_balancing.
func handler(policy string, upstreams []string, options, balancing string) string {
	var pool []string
	for _, u := range upstreams {
		pool = append(pool, fmt.Sprintf(`{"dial": %q}`, u))
	}
	return fmt.Sprintf(`{"handler": "reverse_proxy", "upstreams": [%s], "load_balancing": {"selection_policy": %s %s} %s}`,
		strings.Join(pool, ","), policy, balancing, options)
}

const (
	awareNoPolling = `{"policy": "kv_cache_aware", "metrics": {"off": true}}`
	hashPolicy     = `{"policy": "prefix_hash"}`
)

// run starts Caddy with the routes, until the test ends.
func run(t *testing.T, routes map[string]string) *proxy {
	t.Helper()
	p := &proxy{addr: loopback.FreeAddr(t), routes: routes, dir: t.TempDir()}
	t.Cleanup(func() {
		if err := caddy.Stop(); err != nil {
			t.Error(err)
		}
	})
	p.load(t)
	return p
}

func (p *proxy) load(t *testing.T) {
	t.Helper()
	if err := caddy.Load(p.config(), true); err != nil {
		t.Fatal(err)
	}
	loopback.AwaitOne(t, p.addr)
}

func (p *proxy) request(t *testing.T, method, route, path string, body io.Reader) *http.Request {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), method, "http://"+p.addr+path, body)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("X-Route", route)
	r.Header.Set("Content-Type", "application/json")
	return r
}

// fleets are those of the running config, in the order of their provisioning.
func fleets(t *testing.T) []*fleet.Fleet {
	t.Helper()
	v, err := caddy.ActiveContext().App("kv_cache")
	if err != nil {
		t.Fatal(err)
	}
	return v.(*App).fleets
}

func inFlight(t *testing.T) float64 {
	t.Helper()
	sum := 0.0
	for _, f := range fleets(t) {
		for _, p := range f.Members() {
			sum += p.Load(time.Now()).InFlight
		}
	}
	return sum
}

// decided reads a decision counter from Caddy's own metrics page.
func (p *proxy) decided(t *testing.T, labels ...string) float64 {
	t.Helper()
	return p.metric(t, "caddy_kv_cache_decisions_total", labels...)
}

// metric sums a counter or gauge of Caddy's own metrics page over all series
// that have the labels.
func (p *proxy) metric(t *testing.T, name string, labels ...string) float64 {
	t.Helper()
	var resp *http.Response
	// A reload resets connections that the old listener had not accepted yet.
	await(t, "the metrics page", func() (ok bool) {
		var err error
		resp, err = http.Get("http://" + p.addr + "/caddy-metrics")
		return err == nil
	})
	defer resp.Body.Close()
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	sum := 0.0
next:
	for _, m := range families[name].GetMetric() {
		has := make(map[string]string)
		for _, l := range m.GetLabel() {
			has[l.GetName()] = l.GetValue()
		}
		for i := 0; i < len(labels); i += 2 {
			if has[labels[i]] != labels[i+1] {
				continue next
			}
		}
		sum += m.GetCounter().GetValue() + m.GetGauge().GetValue()
	}
	return sum
}

// receipt is what an upstream tells of the request that reached it.
type receipt struct {
	Method, URI, Type string
	Length            int64
	Encoding          []string
	Bytes             int
	Sum               [sha256.Size]byte
}

// receiver is an upstream that answers with the receipt of each request.
func receiver(t *testing.T) string {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		sum := sha256.New()
		n, err := io.Copy(sum, r.Body)
		if err != nil {
			panic(http.ErrAbortHandler)
		}
		_ = json.NewEncoder(w).Encode(receipt{
			r.Method, r.RequestURI, r.Header.Get("Content-Type"), r.ContentLength, r.TransferEncoding,
			int(n), [sha256.Size]byte(sum.Sum(nil)),
		})
	}))
	t.Cleanup(s.Close)
	return s.Listener.Addr().String()
}

// send sends the request and reads the receipt.
func send(t *testing.T, c *http.Client, r *http.Request) (int, receipt) {
	t.Helper()
	resp, err := c.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var got receipt
	if resp.StatusCode == http.StatusOK {
		if err := json.NewDecoder(resp.Body).Decode(&got); err != nil {
			t.Fatal(err)
		}
	}
	_, _ = io.Copy(io.Discard, resp.Body)
	return resp.StatusCode, got
}

func newHTTPClient(t *testing.T, h2c bool) *http.Client {
	t.Helper()
	transport := new(http.Transport)
	if h2c {
		transport.Protocols = new(http.Protocols)
		transport.Protocols.SetUnencryptedHTTP2(true)
	}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport, Timeout: 2 * time.Minute}
}

// The upstream gets what it would get without the policy, to the byte, and by
// the same framing.
func TestUpstreamGetsTheSameRequest(t *testing.T) {
	replicas := []string{receiver(t), receiver(t)}
	routes := make(map[string]string)
	buffers := map[string]string{"none": "", "small": `, "request_buffers": 1000`, "large": `, "request_buffers": 10000000`}
	for name, option := range buffers {
		routes["plain-"+name] = handler(`{"policy": "random"}`, replicas, option, "")
		routes["aware-"+name] = handler(`{"policy": "kv_cache_aware", "metrics": {"off": true}, "max_body": 100000}`, replicas, option, "")
		routes["hash-"+name] = handler(`{"policy": "prefix_hash", "max_body": 100000}`, replicas, option, "")
	}
	p := run(t, routes)
	bodies := map[string]string{
		"empty":     "",
		"small":     completionOf("hello"),
		"at limit":  completionOf(strings.Repeat("x", 100_000-len(completionOf("")))),
		"too large": completionOf(words("large", 3_000_000)),
		"no JSON":   string(textOf(50_000)),
	}
	for _, h2c := range []bool{false, true} {
		c := newHTTPClient(t, h2c)
		for _, chunked := range []bool{false, true} {
			for name, body := range bodies {
				for buffer := range buffers {
					t.Run(fmt.Sprintf("h2c %v/chunked %v/%s/buffer %s", h2c, chunked, name, buffer), func(t *testing.T) {
						ask := func(policy string) (int, receipt) {
							var reader io.Reader = strings.NewReader(body)
							if chunked {
								reader = io.MultiReader(reader) // of unknown length
							}
							return send(t, c, p.request(t, http.MethodPost, policy+"-"+buffer, "/v1/completions?a=b", reader))
						}
						wantStatus, want := ask("plain")
						if wantStatus != http.StatusOK || want.Sum != sha256.Sum256([]byte(body)) {
							t.Fatalf("without a policy of ours: %d, %+v", wantStatus, want)
						}
						for _, policy := range []string{"aware", "hash"} {
							status, got := ask(policy)
							if status != wantStatus || fmt.Sprint(got) != fmt.Sprint(want) {
								t.Errorf("%s: status %d and %+v, want %+v", policy, status, got, want)
							}
						}
					})
				}
			}
		}
	}
}

// hostile are requests that no client should send. Whatever the engine makes
// of them, it gets them as they are.
var hostile = []struct {
	name, path, body string
	reason           Reason // empty: a prompt is found, or some reason is given
}{
	{"empty body", "/v1/completions", "", ReasonNoBody},
	{"not JSON", "/v1/chat/completions", "messages=hello", ReasonNotJSON},
	{"cut JSON", "/v1/chat/completions", `{"model": "m", "messages": [{"role": "user", "con`, ReasonCutJSON},
	{"10,000 deep", "/v1/chat/completions", `{"messages": ` + strings.Repeat("[", 10_000) + strings.Repeat("]", 10_000) + `}`, ReasonTooDeep},
	{"deep and cut", "/v1/chat/completions", `{"messages": ` + strings.Repeat(`{"a":`, 10_000), ReasonTooDeep},
	{"unknown path", "/v1/paint", `{"prompt": "hello"}`, ReasonNoPrompt},
	{"messages a number", "/v1/chat/completions", `{"messages": 1}`, ReasonNoText},
	{"messages a string", "/v1/chat/completions", `{"messages": "hello"}`, ""},
	{"messages an object", "/v1/chat/completions", `{"messages": {"role": "user"}}`, ""},
	{"messages of numbers", "/v1/chat/completions", `{"messages": [1, null, true, [], {}]}`, ""},
	{"role an array", "/v1/chat/completions", `{"messages": [{"role": ["user"], "content": {"a": 1}}]}`, ""},
	{"content of numbers", "/v1/chat/completions", `{"messages": [{"role": "user", "content": [1, 2, {"type": 3}]}]}`, ""},
	{"model an object", "/v1/chat/completions", `{"model": {}, "messages": [{"role": "user", "content": "hello"}]}`, ""},
	{"all wrong", "/v1/chat/completions", `{"model": 1, "stream": "yes", "max_tokens": "many", "priority": {}, "tools": 7, "cache_salt": [], "service_tier": 1, "messages": [{"role": "user", "content": "hello"}]}`, ""},
	{"prompt an object", "/v1/completions", `{"prompt": {"a": "b"}}`, ""},
	{"prompt mixed", "/v1/completions", `{"prompt": [1, "two", [3], null]}`, ""},
	{"input false", "/v1/responses", `{"input": false, "instructions": 7}`, ""},
	{"system a number", "/v1/messages", `{"system": 1, "messages": [{"role": "user", "content": null}]}`, ""},
	{"NUL", "/v1/completions", "{\"prompt\": \"a\x00b\\u0000c\"}", ""},
	{"NUL bytes only", "/v1/completions", strings.Repeat("\x00", 1000), ReasonNotJSON},
	{"invalid UTF-8", "/v1/completions", "{\"prompt\": \"\xff\xfe\xc0\x80\xed\xa0\x80\"}", ""},
	{"unpaired surrogates", "/v1/completions", `{"prompt": "\ud800 \udc00 \ud83d\ud83d \ud83d"}`, ""},
	{"broken escapes", "/v1/completions", `{"prompt": "\u12 \x \uZZZZ"}`, ""},
	{"enormous numbers", "/v1/completions", `{"prompt": [1e999, -1e999, ` + strings.Repeat("9", 5000) + `], "max_tokens": ` + strings.Repeat("9", 5000) + `, "priority": -1e400}`, ""},
	{"enormous key", "/v1/completions", `{"` + strings.Repeat("k", 100_000) + `": 1, "prompt": "hello"}`, ""},
	{"many keys", "/v1/completions", `{` + strings.Repeat(`"prompt": "x", `, 10_000) + `"prompt": "hello"}`, ""},
	{"two objects", "/v1/completions", `{"prompt": "hello"}{"prompt": "hello"}`, ReasonNotJSON},
}

func TestHostileBodies(t *testing.T) {
	replicas := []string{receiver(t), receiver(t), receiver(t)}
	p := run(t, map[string]string{
		"kv_cache_aware": handler(awareNoPolling, replicas, "", ""),
		"prefix_hash":    handler(hashPolicy, replicas, "", ""),
	})
	c := newHTTPClient(t, false)
	for _, policy := range []string{"kv_cache_aware", "prefix_hash"} {
		for _, h := range hostile {
			t.Run(policy+"/"+h.name, func(t *testing.T) {
				labels := []string{"policy", policy}
				if h.reason != "" {
					labels = append(labels, "reason", string(h.reason))
				}
				before := p.decided(t, labels...)
				status, got := send(t, c, p.request(t, http.MethodPost, policy, h.path, strings.NewReader(h.body)))
				if status != http.StatusOK || got.Bytes != len(h.body) || got.Sum != sha256.Sum256([]byte(h.body)) {
					t.Errorf("status %d, %d of %d bytes arrived", status, got.Bytes, len(h.body))
				}
				if n := p.decided(t, labels...) - before; n != 1 {
					t.Errorf("%v decisions were counted for %v, want 1", n, labels)
				}
			})
		}
		t.Run(policy+"/GET", func(t *testing.T) {
			before := p.decided(t, "policy", policy, "reason", string(ReasonNoBody))
			if status, got := send(t, c, p.request(t, http.MethodGet, policy, "/v1/chat/completions", nil)); status != http.StatusOK || got.Method != http.MethodGet {
				t.Errorf("status %d, %+v", status, got)
			}
			if n := p.decided(t, "policy", policy, "reason", string(ReasonNoBody)) - before; n != 1 {
				t.Errorf("%v decisions were counted", n)
			}
		})
		t.Run(policy+"/multipart", func(t *testing.T) {
			body := "--x\r\nContent-Disposition: form-data; name=\"file\"\r\n\r\n" + string(textOf(200_000)) + "\r\n--x--\r\n"
			r := p.request(t, http.MethodPost, policy, "/v1/audio/transcriptions", strings.NewReader(body))
			r.Header.Set("Content-Type", "multipart/form-data; boundary=x")
			if status, got := send(t, c, r); status != http.StatusOK || got.Sum != sha256.Sum256([]byte(body)) {
				t.Errorf("status %d, %+v", status, got)
			}
		})
	}
	await(t, "all requests to be booked", func() bool { return inFlight(t) == 0 })
	for _, f := range fleets(t) {
		idle(t, f)
	}
}

// tape is a body of any length: its byte at each place is known.
type tape struct{ at, size int64 }

var tapeText = textOf(1 << 20)

func (b *tape) Read(p []byte) (int, error) {
	if b.at >= b.size {
		return 0, io.EOF
	}
	from := int(b.at % int64(len(tapeText)))
	n := copy(p[:min(int64(len(p)), b.size-b.at)], tapeText[from:])
	b.at += int64(n)
	return n, nil
}

// Write compares what arrives with the tape.
func (b *tape) Write(p []byte) (int, error) {
	for rest := p; len(rest) > 0; {
		from := int(b.at % int64(len(tapeText)))
		n := min(len(rest), len(tapeText)-from)
		if !bytes.Equal(rest[:n], tapeText[from:from+n]) {
			return 0, fmt.Errorf("other bytes than sent within %d of %d", n, b.at)
		}
		b.at += int64(n)
		rest = rest[n:]
	}
	return len(p), nil
}

// A body of a gigabyte streams through, and no more of it than max_body is kept.
func TestGigabyteBody(t *testing.T) {
	size := int64(1 << 30)
	if testing.Short() {
		size = 64 << 20
	}
	const maxBody = 8 << 20
	var most, arrived atomic.Int64
	heap := func() int64 {
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		head := make([]byte, len(`{"prompt": "`))
		if _, err := io.ReadFull(r.Body, head); err != nil {
			t.Error(err)
		}
		got := new(tape)
		for {
			n, err := io.CopyN(got, r.Body, 32<<20)
			runtime.GC()
			most.Store(max(most.Load(), heap()))
			if err != nil || n == 0 {
				if err != io.EOF {
					t.Error(err)
				}
				break
			}
		}
		arrived.Store(got.at)
	}))
	defer s.Close()
	p := run(t, map[string]string{"big": handler(
		fmt.Sprintf(`{"policy": "kv_cache_aware", "metrics": {"off": true}, "max_body": %d}`, maxBody),
		[]string{s.Listener.Addr().String()}, "", "")})
	c := newHTTPClient(t, false)
	runtime.GC()
	base := heap()
	r := p.request(t, http.MethodPost, "big", "/v1/completions", io.MultiReader(strings.NewReader(`{"prompt": "`), &tape{size: size}))
	resp, err := c.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	if resp.StatusCode != http.StatusOK || arrived.Load() != size {
		t.Errorf("status %d, %d of %d bytes arrived", resp.StatusCode, arrived.Load(), size)
	}
	// The buffer is a power of two and doubles by fours while it grows.
	if grown := most.Load() - base; grown > 3*maxBody {
		t.Errorf("the heap grew by %d bytes, with max_body at %d", grown, maxBody)
	}
}

// A connection is upgraded and carries bytes both ways.
func TestUpgrade(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		conn, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		_, _ = io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
		_, _ = io.CopyN(conn, rw, 5)
	}))
	defer s.Close()
	for name, policy := range map[string]string{"aware": awareNoPolling, "hash": hashPolicy} {
		t.Run(name, func(t *testing.T) {
			p := run(t, map[string]string{"ws": handler(policy, []string{s.Listener.Addr().String()}, "", "")})
			conn, err := net.Dial("tcp", p.addr)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			_ = conn.SetDeadline(time.Now().Add(20 * time.Second))
			_, _ = io.WriteString(conn, "GET /v1/realtime HTTP/1.1\r\nHost: x\r\nX-Route: ws\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n")
			head := make([]byte, 4096)
			n, err := conn.Read(head)
			if err != nil || !bytes.HasPrefix(head[:n], []byte("HTTP/1.1 101 ")) {
				t.Fatalf("answer is %q, %v", head[:n], err)
			}
			if got := inFlight(t); got != 1 {
				t.Errorf("%v requests in flight, want 1", got)
			}
			_, _ = io.WriteString(conn, "hello")
			echo := make([]byte, 5)
			if _, err := io.ReadFull(conn, echo); err != nil || string(echo) != "hello" {
				t.Errorf("echo is %q, %v", echo, err)
			}
			_ = conn.Close()
			await(t, "the reservation to end", func() bool { return inFlight(t) == 0 })
		})
	}
}

// With a dead replica in the pool every request is served, at whatever replica
// it begins.
func TestDeadReplica(t *testing.T) {
	dead := loopback.FreeAddr(t)
	live := []string{receiver(t), receiver(t)}
	for name, policy := range map[string]string{"aware": awareNoPolling, "hash": hashPolicy} {
		t.Run(name, func(t *testing.T) {
			pool := []string{live[0], dead, live[1]}
			p := run(t, map[string]string{"x": handler(policy, pool, "", `, "retries": 2`)})
			c := newHTTPClient(t, false)
			failed := false
			for i := range 60 {
				body := completionOf(words(fmt.Sprint("dead", i), 3000))
				status, got := send(t, c, p.request(t, http.MethodPost, "x", "/v1/completions", strings.NewReader(body)))
				if status != http.StatusOK || got.Sum != sha256.Sum256([]byte(body)) {
					t.Fatalf("request %d: status %d, %d of %d bytes", i, status, got.Bytes, len(body))
				}
				failed = failed || fleets(t)[0].Replica(dead, time.Now()).Avoided(time.Now()) == fleet.Failing
			}
			if !failed {
				t.Error("no attempt went to the dead replica: the test shows nothing")
			}
			await(t, "all requests to be booked", func() bool { return inFlight(t) == 0 })
			idle(t, fleets(t)[0])
		})
	}
}

// A replica that answers 503 is left for another, with the whole body.
func TestRetriedAnswer(t *testing.T) {
	var refused atomic.Int64
	full := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		refused.Add(1)
		_, _ = io.Copy(io.Discard, io.LimitReader(r.Body, 10)) // and leave the rest
		w.WriteHeader(http.StatusServiceUnavailable)
	}))
	defer full.Close()
	for name, policy := range map[string]string{"aware": awareNoPolling, "hash": hashPolicy} {
		t.Run(name, func(t *testing.T) {
			refused.Store(0)
			p := run(t, map[string]string{"x": handler(policy, []string{full.Listener.Addr().String(), receiver(t)}, "",
				`, "retries": 1, "retry_match": [{"method": ["POST"], "expression": "{http.reverse_proxy.status_code} == 503"}]`)})
			c := newHTTPClient(t, false)
			for i := range 40 {
				body := completionOf(words(fmt.Sprint("full", i), 30_000))
				status, got := send(t, c, p.request(t, http.MethodPost, "x", "/v1/completions", strings.NewReader(body)))
				if status != http.StatusOK || got.Sum != sha256.Sum256([]byte(body)) {
					t.Fatalf("request %d: status %d, %d of %d bytes", i, status, got.Bytes, len(body))
				}
			}
			if refused.Load() == 0 {
				t.Error("no attempt went to the full replica: the test shows nothing")
			}
			await(t, "all requests to be booked", func() bool { return inFlight(t) == 0 })
		})
	}
}

// stream is an upstream that sends one event, and another when it is told to.
func stream(t *testing.T) (addr string, started <-chan struct{}, goOn chan<- struct{}) {
	t.Helper()
	began, more := make(chan struct{}, 16), make(chan struct{})
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, "data: one\n\n")
		_ = http.NewResponseController(w).Flush()
		began <- struct{}{}
		select {
		case <-more:
			_, _ = io.WriteString(w, "data: two\n\n")
		case <-r.Context().Done():
		}
	}))
	t.Cleanup(s.Close)
	return s.Listener.Addr().String(), began, more
}

// A request that streams while the config is replaced stays in the ledger, and
// leaves it once.
func TestReloadDuringStream(t *testing.T) {
	addr, started, goOn := stream(t)
	p := run(t, map[string]string{"x": handler(awareNoPolling, []string{addr}, "", "")})
	c := newHTTPClient(t, false)
	resp, err := c.Do(p.request(t, http.MethodPost, "x", "/v1/completions", strings.NewReader(completionOf(words("stream", 4000)))))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	<-started
	old := fleets(t)[0]
	replica := old.Replica(addr, time.Now())
	for i := range 3 {
		p.extra = fmt.Sprint("/generation-", i)
		p.load(t)
		now := fleets(t)[0]
		if now == old {
			t.Fatal("the config was not replaced")
		}
		if now.Replica(addr, time.Now()) != replica {
			t.Fatal("the replica's state did not survive the reload")
		}
		if got := inFlight(t); got != 1 {
			t.Errorf("generation %d: %v requests in flight, want 1", i, got)
		}
	}
	goOn <- struct{}{}
	rest, err := io.ReadAll(resp.Body)
	if err != nil || string(rest) != "data: one\n\ndata: two\n\n" {
		t.Errorf("streamed %q, %v", rest, err)
	}
	await(t, "the reservation to end", func() bool { return inFlight(t) == 0 })
	idle(t, fleets(t)[0])
	if n := p.decided(t, "policy", "kv_cache_aware", "reason", string(ReasonOnly)); n < 1 {
		t.Errorf("%v decisions are counted after the reloads: the counters began anew", n)
	}
}

func TestClientLeavesStream(t *testing.T) {
	addr, started, _ := stream(t)
	p := run(t, map[string]string{"aware": handler(awareNoPolling, []string{addr}, "", ""), "hash": handler(hashPolicy, []string{addr}, "", "")})
	c := newHTTPClient(t, false)
	for _, route := range []string{"aware", "hash"} {
		ctx, leave := context.WithCancel(t.Context())
		r := p.request(t, http.MethodPost, route, "/v1/completions", strings.NewReader(completionOf("hello")))
		resp, err := c.Do(r.WithContext(ctx))
		if err != nil {
			t.Fatal(err)
		}
		<-started
		if got := fleets(t)[0].Replica(addr, time.Now()).Load(time.Now()).InFlight; got != 1 {
			t.Errorf("%s: %v requests in flight, want 1", route, got)
		}
		leave()
		_ = resp.Body.Close()
		await(t, "the reservation to end", func() bool { return inFlight(t) == 0 })
	}
	idle(t, fleets(t)[0])
}

// The client goes away while its body is read.
func TestClientLeavesMidBody(t *testing.T) {
	replica := receiver(t)
	p := run(t, map[string]string{
		"kv_cache_aware": handler(awareNoPolling, []string{replica}, "", ""),
		"prefix_hash":    handler(hashPolicy, []string{replica}, "", ""),
	})
	for _, policy := range []string{"kv_cache_aware", "prefix_hash"} {
		for name, framing := range map[string]string{
			"length":  "Content-Length: 1000\r\n\r\n" + `{"prompt": "hel`,
			"chunked": "Transfer-Encoding: chunked\r\n\r\nff\r\n" + `{"prompt": "hel`,
			"garbage": "Transfer-Encoding: chunked\r\n\r\nzz\r\n",
		} {
			t.Run(policy+"/"+name, func(t *testing.T) {
				before := p.decided(t, "policy", policy, "reason", string(ReasonBodyError))
				conn, err := net.Dial("tcp", p.addr)
				if err != nil {
					t.Fatal(err)
				}
				_, _ = io.WriteString(conn, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Route: "+policy+"\r\nContent-Type: application/json\r\n"+framing)
				_ = conn.Close()
				await(t, "the decision", func() bool {
					return p.decided(t, "policy", policy, "reason", string(ReasonBodyError)) == before+1
				})
				await(t, "the reservation to end", func() bool { return inFlight(t) == 0 })
			})
		}
	}
}

// Nobody is available: Caddy says so, and it is counted.
func TestNoUpstreamAvailable(t *testing.T) {
	addr, started, goOn := stream(t)
	for name, policy := range map[string]string{"kv_cache_aware": awareNoPolling, "prefix_hash": hashPolicy} {
		t.Run(name, func(t *testing.T) {
			p := run(t, map[string]string{"x": handler(policy, []string{addr}, `, "health_checks": {"passive": {"unhealthy_request_count": 1}}`, "")})
			c := newHTTPClient(t, false)
			resp, err := c.Do(p.request(t, http.MethodPost, "x", "/v1/completions", strings.NewReader(completionOf("hello"))))
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			<-started
			before := p.decided(t, "policy", name, "reason", string(ReasonNone))
			for _, body := range []string{completionOf("hello"), "no prompt"} {
				if status, _ := send(t, c, p.request(t, http.MethodPost, "x", "/v1/completions", strings.NewReader(body))); status != http.StatusServiceUnavailable {
					t.Errorf("status %d, want 503", status)
				}
			}
			if n := p.decided(t, "policy", name, "reason", string(ReasonNone)) - before; n != 2 {
				t.Errorf("%v decisions were counted, want 2", n)
			}
			goOn <- struct{}{}
			_, _ = io.Copy(io.Discard, resp.Body)
			await(t, "the reservation to end", func() bool { return inFlight(t) == 0 })
		})
	}
}

// Two policies share one registry, under names of their own.
func TestTwoHandlers(t *testing.T) {
	replica := receiver(t)
	p := run(t, map[string]string{"a": handler(awareNoPolling, []string{replica}, "", ""), "b": handler(awareNoPolling, []string{replica}, "", "")})
	c := newHTTPClient(t, false)
	before := p.decided(t, "fleet", "default") + p.decided(t, "fleet", "default-2")
	for range 3 {
		for _, route := range []string{"a", "b"} {
			send(t, c, p.request(t, http.MethodPost, route, "/v1/completions", strings.NewReader(completionOf("hello"))))
		}
	}
	if n := p.decided(t, "fleet", "default") + p.decided(t, "fleet", "default-2") - before; n != 6 {
		t.Errorf("%v decisions were counted, want 6", n)
	}
	if n := p.decided(t, "fleet", "default-2"); n < 3 {
		t.Errorf("%v decisions were counted of the second policy, want 3", n)
	}
	if a, b := fleets(t)[0], fleets(t)[1]; a.Replica(replica, time.Now()) != b.Replica(replica, time.Now()) {
		t.Error("two handlers keep two ledgers of one replica")
	}
}

// Checking a config starts nothing that stays, opens no connection, and holds
// no replica; nor does one that fails late.
func TestValidateLeavesNothing(t *testing.T) {
	var polls atomic.Int64
	s := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { polls.Add(1) }))
	defer s.Close()
	pool := []string{s.Listener.Addr().String()}
	validate := func(routes map[string]string) error {
		p := &proxy{addr: loopback.FreeAddr(t), routes: routes, dir: t.TempDir()}
		var cfg caddy.Config
		if err := json.Unmarshal(p.config(), &cfg); err != nil {
			t.Fatal(err)
		}
		return caddy.Validate(&cfg)
	}
	good := map[string]string{
		"a": handler(`{"policy": "kv_cache_aware"}`, pool, "", ""),
		"b": handler(hashPolicy, pool, "", ""),
	}
	if err := validate(good); err != nil { // what starts once per process starts now
		t.Fatal(err)
	}
	known := goleak.IgnoreCurrent()
	before := fleet.Process.Index.Stats()
	for range 3 {
		if err := validate(good); err != nil {
			t.Fatal(err)
		}
		for _, bad := range []string{
			`{"policy": "kv_cache_aware", "metrics": {"uri": "nowhere"}}`,
			`{"policy": "kv_cache_aware", "metrics": {"tls": {"ca": {"provider": "nowhere"}}}}`,
			`{"policy": "kv_cache_aware", "fallback": {"policy": "nowhere"}}`,
			`{"policy": "prefix_hash", "load_factor": 0.1}`,
		} {
			if err := validate(map[string]string{"a": good["a"], "b": handler(bad, pool, "", "")}); err == nil {
				t.Errorf("%s passes", bad)
			}
		}
	}
	goleak.VerifyNone(t, known)
	if after := fleet.Process.Index.Stats(); after.Replicas != before.Replicas {
		t.Errorf("%d replicas are held after validation, %d before", after.Replicas, before.Replicas)
	}
	if n := polls.Load(); n != 0 {
		t.Errorf("validation polled %d times", n)
	}
}

// A running Caddy polls, and a stopped one does not, nor leaves goroutines.
func TestPollingEndsWithTheConfig(t *testing.T) {
	var polls atomic.Int64
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/metrics" && r.Header.Get("Authorization") == "Bearer key" {
			polls.Add(1)
			_, _ = io.WriteString(w, "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{model_name=\"m\",engine=\"0\"} 7\nvllm:num_requests_waiting{model_name=\"m\",engine=\"0\"} 0\n")
		}
	}))
	defer s.Close()
	t.Setenv("KEY", "key")
	known := goleak.IgnoreCurrent()
	addr := s.Listener.Addr().String()
	t.Run("run", func(t *testing.T) {
		run(t, map[string]string{"x": handler(`{"policy": "kv_cache_aware", "metrics": {"interval": "50ms", "headers": {"authorization": ["Bearer {env.KEY}"]}}}`, []string{addr}, "", "")})
		await(t, "polls", func() bool { return polls.Load() >= 2 })
		await(t, "the engine's load", func() bool {
			return fleets(t)[0].Replica(addr, time.Now()).Load(time.Now()).InFlight == 7
		})
	})
	s.CloseClientConnections()
	goleak.VerifyNone(t, known, goleak.IgnoreTopFunction("net/http.(*conn).serve"))
}
