// SPDX-License-Identifier: Apache-2.0

package usage

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// Responses as engines give them, shortened.
var responses = []struct {
	name, text             string
	prompt, cached, output int // -1: not told
}{
	{"chat", `{"id":"c","choices":[{"message":{"content":"I say \"usage\":{\"prompt_tokens\":1}"}}],"usage":{"prompt_tokens":100,"total_tokens":107,"completion_tokens":7,"prompt_tokens_details":{"cached_tokens":64}},"kv_transfer_params":null}`, 100, 64, 7},
	{"details off", `{"choices":[],"usage":{"prompt_tokens":100,"completion_tokens":7,"prompt_tokens_details":null}}`, 100, -1, 7},
	{"spaces", `{"choices":[], "usage": {"prompt_tokens": 100, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 0}}}`, 100, 0, 7},
	{"chat stream", "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\"}}],\"usage\":null}\n\n" +
		"data: {\"choices\":[{\"delta\":{\"content\":\"}\"}}],\"usage\":null}\n\n" +
		"data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":2,\"prompt_tokens_details\":{\"cached_tokens\":8}}}\n\ndata: [DONE]\n\n", 9, 8, 2},
	{"continuous", "data: {\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":1}}\n\ndata: {\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":2}}\n\n" +
		"data: {\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":3}}\n\n", 9, -1, 3},
	{"responses", "event: response.created\ndata: {\"response\":{\"output\":[],\"usage\":null}}\n\n" +
		"event: response.completed\ndata: {\"response\":{\"output\":[],\"usage\":{\"input_tokens\":50,\"input_tokens_details\":{\"cached_tokens\":48},\"output_tokens\":3}}}\n\n", 50, 48, 3},
	{"messages", `{"content":[{"type":"tool_use","input":{"usage":{"input_tokens":1}}}],"usage":{"input_tokens":10,"output_tokens":4,"cache_read_input_tokens":90,"cache_creation_input_tokens":0}}`, 100, 90, 4},
	{"messages stream", "event: message_start\ndata: {\"message\":{\"usage\":{\"input_tokens\":10,\"output_tokens\":0,\"cache_read_input_tokens\":90,\"cache_creation_input_tokens\":5}}}\n\n" +
		"event: message_delta\ndata: {\"usage\":{\"output_tokens\":4}}\n\n", 105, 90, 4},
	{"no usage", `{"error":{"message":"no"}}`, -1, -1, -1},
	{"cut off", `{"usage":{"prompt_tokens":1`, -1, -1, -1},
	{"brace in a string", `{"usage":{"service_tier":"}\"","prompt_tokens":3}}`, 3, -1, -1},
	{"impossible", `{"usage":{"prompt_tokens":-3,"completion_tokens":1e99,"prompt_tokens_details":{"cached_tokens":5}}}`, -1, 5, -1},
	{"more cached than there is", `{"usage":{"prompt_tokens":3,"prompt_tokens_details":{"cached_tokens":5}}}`, 3, -1, -1},
	{"too long", `{"usage":{"x":"` + strings.Repeat("x", longest) + `","prompt_tokens":3}}`, -1, -1, -1},
	{"mark after mark", `"usage":"usage":{"prompt_tokens":3}`, 3, -1, -1},
	{"not numbers", `{"usage":{"prompt_tokens":"3"}}`, -1, -1, -1},
}

func value(n *int) int {
	if n == nil {
		return -1
	}
	return *n
}

func check(t *testing.T, got Tokens, prompt, cached, output int) {
	t.Helper()
	if value(got.Prompt) != prompt || value(got.Cached) != cached || value(got.Output) != output {
		t.Errorf("read %d prompt, %d cached and %d output tokens, want %d, %d and %d",
			value(got.Prompt), value(got.Cached), value(got.Output), prompt, cached, output)
	}
}

// What is read does not depend on where the response is cut into pieces.
func TestScan(t *testing.T) {
	for _, c := range responses {
		t.Run(c.name, func(t *testing.T) {
			for size := 1; size <= len(c.text); size++ {
				var s scanner
				for p := []byte(c.text); len(p) > 0; p = p[min(size, len(p)):] {
					s.write(p[:min(size, len(p))])
				}
				if check(t, s.tokens(), c.prompt, c.cached, c.output); t.Failed() {
					t.Fatalf("in pieces of %d bytes", size)
				}
				if size > 300 {
					size += 97
				}
			}
		})
	}
}

func FuzzScan(f *testing.F) {
	for _, c := range responses {
		f.Add([]byte(c.text), 5)
	}
	f.Fuzz(func(t *testing.T, text []byte, at int) {
		var whole, pieces scanner
		whole.write(text)
		at = min(max(at, 0), len(text))
		pieces.write(text[:at])
		pieces.write(text[at:])
		if a, b := fmt.Sprint(whole.first, whole.last), fmt.Sprint(pieces.first, pieces.last); a != b {
			t.Fatalf("cut at %d: %q and %q, else %q and %q", at, pieces.first, pieces.last, whole.first, whole.last)
		}
		if cap(whole.account) > 2*longest {
			t.Fatalf("%d bytes kept", cap(whole.account))
		}
		whole.tokens()
	})
}

// serve passes one response through the handler and returns what came out.
func serve(t *testing.T, path string, next caddyhttp.HandlerFunc) (*httptest.ResponseRecorder, *Meter, *caddy.Replacer) {
	t.Helper()
	rec, repl := httptest.NewRecorder(), caddy.NewReplacer()
	r := httptest.NewRequest(http.MethodPost, path, nil)
	r = caddyhttp.PrepareRequest(r, repl, rec, new(caddyhttp.Server))
	if err := (Handler{}).ServeHTTP(rec, r, next); err != nil {
		t.Fatal(err)
	}
	return rec, Of(r.Context()), repl
}

func TestResponsesPassUnchanged(t *testing.T) {
	for _, c := range responses {
		for _, copied := range []bool{false, true} {
			rec, m, repl := serve(t, "/v1/chat/completions", func(w http.ResponseWriter, _ *http.Request) error {
				w.Header().Set("X-A", "b")
				w.WriteHeader(http.StatusCreated)
				if copied {
					_, err := io.Copy(w, strings.NewReader(c.text))
					return err
				}
				_, err := io.WriteString(w, c.text)
				return err
			})
			if rec.Body.String() != c.text || rec.Code != http.StatusCreated || rec.Header().Get("X-A") != "b" {
				t.Errorf("%s: got %d %q", c.name, rec.Code, rec.Body)
			}
			check(t, m.Tokens(), c.prompt, c.cached, c.output)
			if _, ok := m.FirstToken(); ok {
				t.Errorf("%s: a first token where there is no stream", c.name)
			}
			want := ""
			if c.cached >= 0 {
				want = fmt.Sprint(c.cached)
			}
			if got := repl.ReplaceAll("{http.kv_cache_usage.cached_tokens}", ""); got != want {
				t.Errorf("%s: the placeholder is %q, want %q", c.name, got, want)
			}
		}
	}
}

func TestFlushReachesTheClient(t *testing.T) {
	rec, _, _ := serve(t, "/v1/completions", func(w http.ResponseWriter, _ *http.Request) error {
		return http.NewResponseController(w).Flush()
	})
	if !rec.Flushed {
		t.Error("not flushed")
	}
}

func TestFirstToken(t *testing.T) {
	for _, c := range []struct {
		path, kind string
		pieces     []string
		at         int // the piece that has it, -1 for none
	}{
		{"/v1/chat/completions", "text/event-stream; charset=utf-8", []string{": ping\n\n", "data: {}\n\n", "data: {}\n\n"}, 1},
		{"/v1/responses", "text/event-stream", []string{"event: response.created\n\n", "event: response.output_text.delta\n\n"}, 1},
		{"/v1/chat/completions", "application/json", []string{"{}"}, -1},
		{"/v1/messages", "Text/Event-Stream", []string{"event: message_start\n\n"}, 0},
		{"/v1/messages", "text/event-stream", nil, -1},
	} {
		_, _, _ = serve(t, c.path, func(w http.ResponseWriter, r *http.Request) error {
			w.Header().Set("Content-Type", c.kind)
			for i, p := range c.pieces {
				if _, err := io.WriteString(w, p); err != nil {
					return err
				}
				if _, ok := Of(r.Context()).FirstToken(); ok != (c.at >= 0 && i >= c.at) {
					t.Errorf("%s: after piece %d first token is %v", c.path, i, ok)
				}
			}
			return nil
		})
	}
}

func TestWhatIsLeftAlone(t *testing.T) {
	const text = `{"usage":{"prompt_tokens":3}}`
	if _, m, _ := serve(t, "/v1/models", func(w http.ResponseWriter, _ *http.Request) error { return nil }); m != nil {
		t.Error("a request without a prompt is metered")
	}
	for name, prepare := range map[string]func(w http.ResponseWriter){
		"compressed": func(w http.ResponseWriter) { w.Header().Set("Content-Encoding", "gzip") },
		"error":      func(w http.ResponseWriter) { w.WriteHeader(http.StatusBadRequest) },
	} {
		_, m, _ := serve(t, "/v1/completions", func(w http.ResponseWriter, _ *http.Request) error {
			prepare(w)
			_, err := io.WriteString(w, text)
			return err
		})
		if m.Tokens().Prompt != nil {
			t.Errorf("%s: read %d", name, *m.Tokens().Prompt)
		}
	}
	// An interim response is none.
	m := new(Meter)
	w := &writer{ResponseWriterWrapper: &caddyhttp.ResponseWriterWrapper{ResponseWriter: httptest.NewRecorder()}, meter: m}
	if w.WriteHeader(http.StatusEarlyHints); m.begun {
		t.Error("103 is taken for the response")
	}
	var none *Meter
	check(t, none.Tokens(), -1, -1, -1)
}

func TestCaddyfile(t *testing.T) {
	for text, ok := range map[string]bool{
		"kv_cache_usage": true, "kv_cache_usage x": false, "kv_cache_usage {\n x\n}": false,
	} {
		err := new(Handler).UnmarshalCaddyfile(caddyfile.NewTestDispenser(text))
		if (err == nil) != ok {
			t.Errorf("%q: %v", text, err)
		}
	}
}

func TestTheBiggestStreamKeepsLittle(t *testing.T) {
	var s scanner
	chunk, err := json.Marshal(map[string]string{"x": strings.Repeat("x", 1<<16)})
	if err != nil {
		t.Fatal(err)
	}
	if n := testing.AllocsPerRun(100, func() { s.write(chunk) }); n != 0 {
		t.Errorf("%v allocations a chunk", n)
	}
}

// A chunk of a stream against one pass of bytes.Index over the same bytes.
func BenchmarkScanChunk(b *testing.B) {
	chunk := []byte(`data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1760428436,"model":"m","choices":[{"index":0,"delta":{"content":" word"},"logprobs":null,"finish_reason":null}],"usage":null}` + "\n\n")
	b.Run("scan", func(b *testing.B) {
		var s scanner
		for b.Loop() {
			s.write(chunk)
		}
	})
	b.Run("index", func(b *testing.B) {
		for b.Loop() {
			bytes.Index(chunk, []byte(mark))
		}
	})
}
