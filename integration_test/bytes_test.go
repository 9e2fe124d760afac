// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"bytes"
	"compress/gzip"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cespare/xxhash/v2"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/enginesim"
)

// completion returns a completion request of exactly so many bytes, or a part of one where it is too
// small to be whole.
func completion(size int) []byte {
	const head, tail = `{"model":"sim","prompt":"`, `"}`
	if size < len(head)+len(tail) {
		return []byte((head + tail)[:size])
	}
	body := make([]byte, 0, size)
	body = append(body, head...)
	random := rand.New(rand.NewPCG(1, uint64(size)))
	for len(body) < size-len(tail) {
		body = append(body, 'a'+byte(random.IntN(26)))
	}
	return append(body, tail...)
}

// checkSum compares what the engine received with what was sent.
func checkSum(t *testing.T, a answer, size int64, sum uint64) {
	t.Helper()
	if err := a.bad(); err != nil {
		t.Fatal(err)
	}
	if got := a.header.Get(enginesim.HeaderBytes); got != strconv.FormatInt(size, 10) {
		t.Errorf("the engine got %s bytes of %d", got, size)
	}
	if got := a.header.Get(enginesim.HeaderSum); got != fmt.Sprintf("%016x", sum) {
		t.Errorf("the engine got other bytes: sum %s, sent %016x", got, sum)
	}
}

// Bodies reach the engine as they were sent, below and beyond what the policies look at.
func TestBodiesAreIdentical(t *testing.T) {
	instant := fast
	instant.Instant = true
	fleet := engines(t, 2, instant)
	sizes := []int{0, 1, 20, 511, 4095, 4096, 4097, 64 << 10, 1<<20 + 1, 4<<20 - 1, 4 << 20, 4<<20 + 1, 16 << 20}
	if !testing.Short() {
		sizes = append(sizes, 64<<20)
	}
	p := start(t, "handle_path /hash/* {\n"+reverseProxy(fleet.Addrs(), "prefix_hash", "")+"}\n"+
		"handle_path /small/* {\n"+reverseProxy(fleet.Addrs(), "kv_cache_aware {\nmax_body 1KiB\n}", "")+"}\n"+
		"handle_path /aware/* {\n"+aware(fleet.Addrs(), "", "")+"}\n")
	h2c := newClient(t)
	h2c.Transport.(*http.Transport).Protocols = new(http.Protocols)
	h2c.Transport.(*http.Transport).Protocols.SetUnencryptedHTTP2(true)
	for name, c := range map[string]*http.Client{"HTTP 1": p.client, "HTTP 2": h2c} {
		for _, size := range sizes {
			body := completion(size)
			sum := xxhash.Sum64(body)
			for _, route := range []string{"aware", "hash", "small"} {
				for _, chunked := range []bool{false, true} {
					t.Run(fmt.Sprintf("%s/%d B/%s/chunked %v", name, size, route, chunked), func(t *testing.T) {
						r := p.request(http.MethodPost, "/"+route+"/v1/completions", bytes.NewReader(body))
						if chunked {
							r.Body, r.ContentLength = io.NopCloser(io.MultiReader(bytes.NewReader(body))), -1
						}
						checkSum(t, exchange(c, r), int64(size), sum)
					})
				}
			}
		}
	}
}

// tape is a completion request of any length that takes no memory.
type tape struct {
	left   int64
	digest *xxhash.Digest
	began  bool
}

func (b *tape) Read(p []byte) (int, error) {
	if b.left == 0 {
		return 0, io.EOF
	}
	p = p[:min(int64(len(p)), b.left)]
	if b.began {
		for i := range p {
			p[i] = 'x'
		}
	} else {
		b.began = true
		p = p[:copy(p, `{"model":"sim","prompt":"`)]
	}
	_, _ = b.digest.Write(p)
	b.left -= int64(len(p))
	return len(p), nil
}

// A body of 1 GiB streams through, and Caddy holds only the part that the policy looks at.
func TestGigabyte(t *testing.T) {
	if testing.Short() {
		t.Skip("takes a while")
	}
	instant := fast
	instant.Instant = true
	fleet := engines(t, 2, instant)
	p := start(t, aware(fleet.Addrs(), "", ""))
	p.must("/v1/completions", string(completion(10_000)))
	before, told := p.memory()
	const size = 1 << 30
	body := &tape{left: size, digest: xxhash.New()}
	r := p.request(http.MethodPost, "/v1/completions", io.NopCloser(body))
	r.ContentLength = size
	checkSum(t, exchange(p.client, r), size, body.digest.Sum64())
	if !told {
		t.Log("this system does not tell the memory of a process")
		return
	}
	after, _ := p.memory()
	if grown := after - before; grown > 64<<20 {
		t.Errorf("a body of 1 GiB took %d MiB of memory", grown>>20)
	}
}

// Uploads that wait for 100 Continue get it, and only from the replica's side of Caddy on.
func TestExpectContinue(t *testing.T) {
	instant := fast
	instant.Instant = true
	fleet := engines(t, 2, instant)
	p := start(t, aware(fleet.Addrs(), "", ""))
	p.client.Transport.(*http.Transport).ExpectContinueTimeout = patience
	body := completion(200_000)
	continued := false
	r := p.request(http.MethodPost, "/v1/completions", bytes.NewReader(body))
	r = r.WithContext(httptrace.WithClientTrace(r.Context(), &httptrace.ClientTrace{Got100Continue: func() { continued = true }}))
	r.Header.Set("Expect", "100-continue")
	checkSum(t, exchange(p.client, r), int64(len(body)), xxhash.Sum64(body))
	if !continued {
		t.Error("no 100 Continue came")
	}
}

// receiver is an upstream that echoes the request line, and sums the body up as the simulated engines do.
func receiver(t *testing.T) string {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		digest := xxhash.New()
		n, err := io.Copy(digest, r.Body)
		if err != nil {
			panic(http.ErrAbortHandler)
		}
		w.Header().Set(enginesim.HeaderBytes, strconv.FormatInt(n, 10))
		w.Header().Set(enginesim.HeaderSum, fmt.Sprintf("%016x", digest.Sum64()))
		w.Header().Set("X-Line", r.Method+" "+r.RequestURI+" "+r.Header.Get("Content-Type"))
	}))
	t.Cleanup(s.Close)
	return s.Listener.Addr().String()
}

// Whatever is no prompt goes through as it is, to whichever replica, and is counted by what it was.
func TestUnknownAndMalformed(t *testing.T) {
	var zipped bytes.Buffer
	z := gzip.NewWriter(&zipped)
	_, _ = z.Write([]byte(ask("zipped")))
	_ = z.Close()
	deep := `{"messages":` + strings.Repeat("[", 10_000) + strings.Repeat("]", 10_000) + `}`
	tests := []struct {
		name, method, path, body string
		field, value             string // of a header
		reason                   string // empty: any
	}{
		{name: "models", method: "GET", path: "/v1/models", reason: "no_body"},
		{name: "query", method: "GET", path: "/v1/models?a=%20b&c#", reason: "no_body"},
		{name: "escaped path", method: "POST", path: "/v1%2Fchat/completions", body: ask("x")},
		{name: "double slash", method: "POST", path: "//v1//chat/completions", body: ask("x")},
		{name: "unknown path", method: "POST", path: "/v2/dream", body: ask("x"), reason: "no_prompt"},
		{name: "tokenize", method: "POST", path: "/tokenize", body: ask("x"), reason: "no_prompt"},
		{name: "no body", method: "POST", path: chatPath, reason: "no_body"},
		{name: "put", method: "PUT", path: chatPath, body: ask("x")},
		{name: "delete", method: "DELETE", path: "/v1/responses/resp-1", reason: "no_body"},
		{name: "options", method: "OPTIONS", path: chatPath, reason: "no_body"},
		{name: "own method", method: "DREAM", path: chatPath, body: ask("x")},
		{name: "text", method: "POST", path: chatPath, body: "hello", reason: "not_json"},
		{name: "binary", method: "POST", path: chatPath, body: "\x00\xff\xfe{", reason: "not_json"},
		{name: "blank", method: "POST", path: chatPath, body: " \n\t ", reason: "no_body"},
		{name: "cut", method: "POST", path: chatPath, body: `{"model": "sim"`, reason: "cut_json"},
		{name: "cut in a string", method: "POST", path: chatPath, body: `{"model": "si`, reason: "cut_json"},
		{name: "no prompt", method: "POST", path: chatPath, body: `{"model": "sim"}`, reason: "no_text"},
		{name: "null", method: "POST", path: chatPath, body: `null`},
		{name: "list", method: "POST", path: chatPath, body: `[1, 2]`},
		{name: "10,000 deep", method: "POST", path: chatPath, body: deep, reason: "too_deep"},
		{name: "a million deep", method: "POST", path: chatPath, body: strings.Repeat("[", 1_000_000)},
		{name: "a million objects", method: "POST", path: chatPath, body: `{"messages":[` + strings.Repeat(`{},`, 1_000_000)},
		{name: "two values", method: "POST", path: chatPath, body: ask("x") + ask("y")},
		{name: "duplicate keys", method: "POST", path: chatPath, body: `{"messages":[{"role":"user","content":"a"}],"messages":7}`},
		{name: "invalid UTF-8", method: "POST", path: chatPath, body: ask("x\xff\xfe")},
		{name: "byte order mark", method: "POST", path: chatPath, body: "\xef\xbb\xbf" + ask("x")},
		{name: "lone surrogate", method: "POST", path: chatPath, body: `{"messages":[{"role":"user","content":"\ud800"}]}`},
		{name: "wrong types", method: "POST", path: chatPath, body: `{"messages":{"role":[]},"model":{}}`},
		{name: "huge numbers", method: "POST", path: "/v1/completions", body: `{"prompt":[99999999999999999999,-1,1e400]}`},
		{name: "zipped", method: "POST", path: chatPath, body: zipped.String(), field: "Content-Encoding", value: "gzip", reason: "encoded"},
		{name: "incremental", method: "POST", path: chatPath, body: ask("x"), field: "Incremental", value: "?1", reason: "incremental"},
		{name: "octets", method: "POST", path: chatPath, body: ask("x"), field: "Content-Type", value: "application/octet-stream", reason: "not_json"},
		{name: "form", method: "POST", path: "/v1/audio/transcriptions", body: "--x\r\n\r\n--x--", field: "Content-Type", value: "multipart/form-data; boundary=x", reason: "not_json"},
		{name: "odd type", method: "POST", path: chatPath, body: ask("x"), field: "Content-Type", value: `;;"`},
	}
	addrs := []string{receiver(t), receiver(t)}
	p := start(t, blind(addrs, ""))
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			before, all := 0.0, p.metric("caddy_kv_cache_decisions_total")
			if test.reason != "" {
				before = p.decided(test.reason)
			}
			r := p.request(test.method, test.path, nil)
			if test.body != "" {
				setBody(r, test.body)
			}
			if test.field != "" {
				r.Header.Set(test.field, test.value)
			}
			a := exchange(p.client, r)
			checkSum(t, a, int64(len(test.body)), xxhash.Sum64String(test.body))
			want := strings.TrimSpace(test.method + " " + r.URL.RequestURI() + " " + r.Header.Get("Content-Type"))
			if line := a.header.Get("X-Line"); line != want {
				t.Errorf("the replica saw %q, want %q", line, want)
			}
			if n := p.metric("caddy_kv_cache_decisions_total") - all; n != 1 {
				t.Errorf("%v decisions were counted", n)
			}
			if test.reason != "" && (p.decided(test.reason) != before+1 || a.reason() != test.reason) {
				t.Errorf("it was taken for %q, want %q", a.reason(), test.reason)
			}
		})
	}
}

// Requests that are no proper HTTP end in an error of Caddy's, and harm nothing.
func TestBrokenHTTP(t *testing.T) {
	fleet := engines(t, 2, fast)
	p := start(t, aware(fleet.Addrs(), "", ""))
	for name, raw := range map[string]string{
		"body cut short":   "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{\"messages\":[",
		"chunk cut short":  "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n100\r\n{\"mess",
		"wrong chunk size": "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
		"no HTTP":          "\x16\x03\x01\x02\x00hello\r\n\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			c, err := net.Dial("tcp", p.addr)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			if _, err := io.WriteString(c, raw); err != nil {
				t.Fatal(err)
			}
			_ = c.(*net.TCPConn).CloseWrite()
			_ = c.SetReadDeadline(time.Now().Add(patience))
			reply, err := io.ReadAll(c)
			if ne, ok := err.(net.Error); ok && ne.Timeout() {
				t.Fatal("Caddy holds the connection")
			}
			if strings.HasPrefix(string(reply), "HTTP/1.1 200") {
				t.Errorf("it was answered %s", reply)
			}
		})
	}
	p.say("all is well")
	p.awaitIdle()
}

// A request that asks for another protocol gets its connection.
func TestUpgrade(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Upgrade") != "websocket" {
			http.Error(w, "no upgrade", http.StatusBadRequest)
			return
		}
		c, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			return
		}
		defer c.Close()
		_, _ = rw.WriteString("HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n")
		_ = rw.Flush()
		_, _ = io.Copy(c, rw)
	}))
	t.Cleanup(s.Close)
	p := start(t, blind([]string{s.Listener.Addr().String()}, ""))
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	r := p.request(http.MethodGet, "/v1/realtime?model=sim", nil).WithContext(ctx)
	r.Header.Set("Connection", "Upgrade")
	r.Header.Set("Upgrade", "websocket")
	resp, err := p.client.Transport.RoundTrip(r) // a client with a time limit hides the connection
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	conn, ok := resp.Body.(io.ReadWriter)
	if resp.StatusCode != http.StatusSwitchingProtocols || !ok {
		t.Fatalf("status %d", resp.StatusCode)
	}
	for _, word := range []string{"hello", strings.Repeat("x", 100_000), "bye"} {
		go func() { _, _ = io.WriteString(conn, word) }()
		heard := make([]byte, len(word))
		if _, err := io.ReadFull(conn, heard); err != nil || string(heard) != word {
			t.Fatalf("the echo of %.10s is %.10s, %v", word, heard, err)
		}
	}
}
