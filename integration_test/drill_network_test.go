// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cespare/xxhash/v2"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/enginesim"
)

// networks are drills of what lies between Caddy and the engines, and of other protocols.
var networks = []drill{
	{
		number: "05b", name: "resets connections (RST) in the middle of answers", excused: []string{cut}, compare: true, seldom: true,
		front:   func(x *exercise, s *enginesim.Server) string { return x.brokenFront(s, 100, true) },
		disturb: func(x *exercise) { x.faulty.Store(true) },
		mend:    func(x *exercise) { x.faulty.Store(false) },
	},
	{
		number: "05c", name: "resets connections (RST) before the first byte", compare: true,
		front:   func(x *exercise, s *enginesim.Server) string { return x.brokenFront(s, 0, true) },
		disturb: func(x *exercise) { x.faulty.Store(true) },
		mend:    func(x *exercise) { x.faulty.Store(false) },
	},
	{
		number: "22", name: "DNS flaps, is empty, names 300 addresses", compare: true, seldom: true, excused: []string{"status 503"},
		policy: "metrics_interval 2s", dynamic: []string{"127.0.0.1", "127.0.0.2", "127.0.0.3"},
		stays:  "replicas that a dynamic source stopped naming are kept for ten minutes",
		uneven: "one engine listens at all addresses",
		disturb: func(x *exercise) {
			for i := range 20 {
				x.resolver.addrs.Store(&[]string{x.dynamic[i%3], x.dynamic[(i+1)%3]})
				time.Sleep(100 * time.Millisecond)
			}
			if failed := x.of(func(r record) bool { return r.kind != "" }); x.ours() && len(failed) > 0 {
				x.Errorf("%d requests failed while the addresses changed", len(failed))
			}
			x.resolver.addrs.Store(new([]string))
			time.Sleep(time.Second)
			many := make([]string, 300)
			for i := range many {
				many[i] = fmt.Sprintf("127.0.%d.%d", 1+i/200, 1+i%200)
			}
			x.resolver.addrs.Store(&many)
			x.dwell()
			if n := len(x.proxy.labels("replica")); x.ours() && n < 100 {
				x.Errorf("%d replicas are known of 300", n)
			}
		},
		mend: func(x *exercise) { x.resolver.addrs.Store(&x.dynamic) },
	},
	{
		number: "28b", name: "prompts made to have one hash", hash: true,
		disturb: func(x *exercise) {
			before := make([]int64, len(x.fleet))
			for i, s := range x.fleet {
				before[i] = s.Stats().PromptTokens
			}
			// All at once, so that they pile up at their home on the quickest machine.
			inParallel(100, 100, func(i int) {
				if err := x.proxy.post("/v1/completions", crafted(i, 2048)).bad(); err != nil {
					x.Error(err)
				}
			})
			most, all := int64(0), int64(0)
			for i, s := range x.fleet {
				n := s.Stats().PromptTokens - before[i]
				most, all = max(most, n), all+n
			}
			if x.note = fmt.Sprintf("; %d %% of the crafted tokens at one replica", 100*most/all); most > all*2/3 {
				x.Errorf("%d of %d tokens of prompts with one hash went to one replica", most, all)
			}
		},
	},
	{
		number: "37", name: "upstreams speak HTTP/2 without TLS", compare: true, seldom: true,
		front:   func(x *exercise, s *enginesim.Server) string { return x.frontOf(s, true, nil) },
		options: strings.Replace(drillOptions, "keepalive 2s", "keepalive 2s\nversions h2c 2", 1),
	},
	{
		number: "38a", name: "websocket beside the load",
		site: func(x *exercise) string { return x.websocketSite("") },
		disturb: func(x *exercise) {
			talk := openWebsocket(x)
			defer talk.conn.Close()
			for begin := time.Now(); time.Since(begin) < 2*time.Second; {
				talk.exchange(x)
			}
		},
	},
	{
		number: "38b", name: "websocket across reloads", compare: true, seldom: true, resend: true,
		site: func(x *exercise) string { return x.websocketSite("stream_close_delay 1m") },
		disturb: func(x *exercise) {
			talk := openWebsocket(x)
			defer talk.conn.Close()
			for range 3 {
				for range 100 {
					talk.exchange(x)
				}
				x.load(x.addrs)
			}
			talk.exchange(x)
		},
	},
}

// crafted is a request of token ids that ends each block in words of which the products in prefix_hash's
// hash are 0, under the seed that it has by default: all blocks have one hash, whatever is in them.
func crafted(n, tokens int) string {
	key := publicKey()
	ids := make([]string, 0, tokens)
	for len(ids) < tokens {
		for range 64 - 16 {
			ids = append(ids, fmt.Sprint((n*64+len(ids)%64)%30_000))
		}
		for _, k := range key[:4] {
			ids = append(ids, fmt.Sprint(uint32(k)), fmt.Sprint(uint32(k>>32)), "0", "0")
		}
	}
	return `{"model":"sim","max_tokens":1,"prompt":[` + strings.Join(ids, ",") + `]}`
}

// publicKey is the key of internal/prompt's hash under prefix_hash's default seed, as an attacker derives it.
func publicKey() (k [8]uint64) {
	seed := xxhash.Sum64String("caddy-kv-cache prefix_hash 1")
	for i := range k {
		seed += 0x9E3779B97F4A7C15
		h := (seed ^ seed>>30) * 0xBF58476D1CE4E5B9
		h = (h ^ h>>27) * 0x94D049BB133111EB
		k[i] = h ^ h>>31
	}
	return k
}

// frontOf stands before an engine, speaks HTTP/2 too if wanted, and may change how answers are written.
func (x *exercise) frontOf(s *enginesim.Server, h2c bool, wrap func(http.ResponseWriter, net.Conn) http.ResponseWriter) string {
	target, err := url.Parse(s.URL())
	if err != nil {
		x.Fatal(err)
	}
	inner := httputil.NewSingleHostReverseProxy(target)
	transport := new(http.Transport)
	inner.Transport, inner.FlushInterval = transport, -1
	inner.ErrorLog = log.New(io.Discard, "", 0)
	type connection struct{}
	front := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if wrap != nil && r.Method == http.MethodPost {
			w = wrap(w, r.Context().Value(connection{}).(net.Conn))
		}
		inner.ServeHTTP(w, r)
	}))
	front.Config.ErrorLog = inner.ErrorLog
	front.Config.ConnContext = func(ctx context.Context, c net.Conn) context.Context {
		return context.WithValue(ctx, connection{}, c)
	}
	if h2c {
		front.Config.Protocols = new(http.Protocols)
		front.Config.Protocols.SetHTTP1(true)
		front.Config.Protocols.SetUnencryptedHTTP2(true)
	}
	front.Start()
	x.Cleanup(func() {
		front.CloseClientConnections()
		front.Close()
		transport.CloseIdleConnections()
	})
	return front.Listener.Addr().String()
}

// brokenFront stands before an engine. While the fault is on, and the engine is the first, it ends each
// connection after so many bytes of an answer's body.
func (x *exercise) brokenFront(s *enginesim.Server, after int, reset bool) string {
	first := s == x.fleet[0]
	return x.frontOf(s, false, func(w http.ResponseWriter, c net.Conn) http.ResponseWriter {
		if first && x.faulty.Load() {
			return &cutter{w, c, after, reset}
		}
		return w
	})
}

// cutter ends the connection after so many bytes of an answer's body; without any of the header where there
// shall be no body.
type cutter struct {
	http.ResponseWriter
	conn  net.Conn
	left  int
	reset bool // by RST, as a machine does that has lost the connection
}

func (c *cutter) WriteHeader(status int) {
	if c.left == 0 {
		c.end()
	}
	c.ResponseWriter.WriteHeader(status)
}

func (c *cutter) Write(p []byte) (int, error) {
	if len(p) <= c.left {
		c.left -= len(p)
		return c.ResponseWriter.Write(p)
	}
	_, _ = c.ResponseWriter.Write(p[:c.left])
	_ = http.NewResponseController(c.ResponseWriter).Flush()
	c.end()
	return 0, io.ErrShortWrite
}

// end does not return.
func (c *cutter) end() {
	if tcp, ok := c.conn.(*net.TCPConn); ok && c.reset {
		_, _ = tcp.SetLinger(0), tcp.Close()
	}
	panic(http.ErrAbortHandler)
}

func (c *cutter) Unwrap() http.ResponseWriter { return c.ResponseWriter }

// echo starts a server that upgrades connections and sends back what it gets.
func echo(t *testing.T) string {
	var open sync.WaitGroup
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		conn, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			return
		}
		open.Add(1)
		defer open.Done()
		defer conn.Close()
		_, _ = io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
		_, _ = io.Copy(conn, conn)
	}))
	t.Cleanup(func() { s.Close(); open.Wait() })
	return s.Listener.Addr().String()
}

// websocketSite is a policy before a server that echoes.
func (x *exercise) websocketSite(options string) string {
	if len(x.strangers) == 0 {
		x.strangers = []string{echo(x.T)}
	}
	return "handle /ws {\nreverse_proxy " + x.strangers[0] + " {\nlb_policy kv_cache_aware {\nname ws\nmetrics_off\n}\n" + options + "\n}\n}\n"
}

// websocket is an upgraded connection whose other end echoes.
type websocket struct {
	conn  net.Conn
	lines *bufio.Reader
	said  int
}

func openWebsocket(x *exercise) *websocket {
	conn, err := net.Dial("tcp", x.proxy.addr)
	if err != nil {
		x.Fatal(err)
	}
	_ = conn.SetDeadline(time.Now().Add(patience))
	_, _ = fmt.Fprintf(conn, "GET /ws HTTP/1.1\r\nHost: %s\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n", x.proxy.addr)
	lines := bufio.NewReader(conn)
	resp, err := http.ReadResponse(lines, nil)
	if err != nil || resp.StatusCode != http.StatusSwitchingProtocols {
		_ = conn.Close()
		x.Fatalf("the upgrade: %v %v", resp, err)
	}
	return &websocket{conn: conn, lines: lines}
}

// exchange sends a line and wants it back.
func (w *websocket) exchange(x *exercise) {
	x.Helper()
	w.said++
	want := fmt.Sprintf("line %d\n", w.said)
	if _, err := io.WriteString(w.conn, want); err != nil {
		x.Fatal(err)
	}
	if got, err := w.lines.ReadString('\n'); got != want {
		x.Fatalf("%q came back as %q: %v", want, got, err)
	}
	time.Sleep(5 * time.Millisecond)
}
