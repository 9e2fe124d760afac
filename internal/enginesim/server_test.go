// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cespare/xxhash/v2"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience bounds every wait of these tests; none takes this long.
const patience = 20 * time.Second

// quick is an engine whose steps take next to no time.
var quick = Config{PrefillRate: 1e7, StepOverhead: 100 * time.Microsecond, DecodeCost: time.Microsecond}

func startServer(t *testing.T, config ServerConfig) *Server {
	t.Helper()
	s, err := StartServer(config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

func newClient(t *testing.T) *http.Client {
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport, Timeout: patience}
}

// post sends a body and returns the answer, read to its end.
func post(t *testing.T, url string, body any) (*http.Response, []byte) {
	t.Helper()
	raw, ok := body.([]byte)
	if !ok {
		var err error
		if raw, err = json.Marshal(body); err != nil {
			t.Fatal(err)
		}
	}
	resp, err := newClient(t).Post(url, "application/json", bytes.NewReader(raw))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp, answer
}

// object is JSON as tests write it.
type object = map[string]any

// lookup walks down an answer: strings are keys, ints are indices.
func lookup(t *testing.T, answer []byte, path ...any) any {
	t.Helper()
	var v any
	if err := json.Unmarshal(answer, &v); err != nil {
		t.Fatalf("%v in %s", err, answer)
	}
	for _, step := range path {
		switch step := step.(type) {
		case string:
			m, _ := v.(object)
			v = m[step]
		case int:
			list, _ := v.([]any)
			if step >= len(list) {
				t.Fatalf("no index %d in %s", step, answer)
			}
			v = list[step]
		}
	}
	return v
}

func wantNumber(t *testing.T, answer []byte, want float64, path ...any) {
	t.Helper()
	if got := lookup(t, answer, path...); got != want {
		t.Errorf("%v = %v, want %v in %s", path, got, want, answer)
	}
}

func chat(content string, more ...object) object {
	body := object{"messages": []object{{"role": "user", "content": content}}}
	for _, m := range more {
		for k, v := range m {
			body[k] = v
		}
	}
	return body
}

// eventually waits for a condition on the server's state.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatalf("%s did not come about", what)
		}
		time.Sleep(time.Millisecond)
	}
}

func TestChatRepeated(t *testing.T) {
	s := startServer(t, ServerConfig{Config: quick})
	body := chat(strings.Repeat("abcd", 100), object{"max_tokens": 5})
	// <start> user\n(2) 100 <end> \n <start> assistant\n(3) = 109 tokens, 6 blocks.
	for i, cached := range []float64{0, 96, 96} {
		resp, answer := post(t, s.URL()+"/v1/chat/completions", body)
		if resp.StatusCode != http.StatusOK {
			t.Fatalf("status %d: %s", resp.StatusCode, answer)
		}
		if got := resp.Header.Get(HeaderAddr); got != s.Addr() {
			t.Errorf("%s = %q, want %q", HeaderAddr, got, s.Addr())
		}
		wantNumber(t, answer, 109, "usage", "prompt_tokens")
		wantNumber(t, answer, 5, "usage", "completion_tokens")
		wantNumber(t, answer, cached, "usage", "prompt_tokens_details", "cached_tokens")
		text, _ := lookup(t, answer, "choices", 0, "message", "content").(string)
		if len(text) != 5*DefaultBytesPerToken {
			t.Errorf("answer %d is %q, want 5 tokens of %d bytes", i, text, DefaultBytesPerToken)
		}
	}
}

// TestNextTurnHitsAnswer sends an answer back as the next turn's history: what was
// generated must be found in the cache like what was sent.
func TestNextTurnHitsAnswer(t *testing.T) {
	for _, bytesPerToken := range []int{1, 3, 4} {
		s := startServer(t, ServerConfig{Config: quick, BytesPerToken: bytesPerToken})
		question := strings.Repeat("why ", 50)
		const answered = 100
		_, answer := post(t, s.URL()+"/v1/chat/completions", chat(question, object{"max_tokens": answered}))
		prompt, _ := lookup(t, answer, "usage", "prompt_tokens").(float64)

		_, next := post(t, s.URL()+"/v1/chat/completions", object{"messages": []any{
			object{"role": "user", "content": question},
			lookup(t, answer, "choices", 0, "message"),
			object{"role": "user", "content": "go on"},
		}})
		want := (int(prompt) + answered - 1) / DefaultBlockTokens * DefaultBlockTokens
		wantNumber(t, next, float64(want), "usage", "prompt_tokens_details", "cached_tokens")
	}
}

func TestCompletionPrompts(t *testing.T) {
	s := startServer(t, ServerConfig{Config: quick})
	ids := make([]int, 40)
	for i := range ids {
		ids[i] = i + 1000
	}
	for _, test := range []struct {
		name    string
		prompt  any
		tokens  float64
		choices int
	}{
		{"text", strings.Repeat("word", 30), 30, 1},
		{"texts", []string{"12345", "1234"}, 3, 2},
		{"ids", ids, 40, 1},
		{"lists of ids", [][]int{ids, ids[:10]}, 50, 2},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, answer := post(t, s.URL()+"/v1/completions", object{"prompt": test.prompt})
			wantNumber(t, answer, test.tokens, "usage", "prompt_tokens")
			wantNumber(t, answer, float64(defaultOutputTokens*test.choices), "usage", "completion_tokens")
			if list, _ := lookup(t, answer, "choices").([]any); len(list) != test.choices {
				t.Errorf("%d choices, want %d", len(list), test.choices)
			}
		})
	}
}

// TestIdentity checks what makes two prompts share blocks and what keeps them apart.
func TestIdentity(t *testing.T) {
	long := strings.Repeat("abcd", 100)
	image := func(url string) object {
		return object{"messages": []object{{"role": "user", "content": []object{
			{"type": "image_url", "image_url": object{"url": url}}, {"type": "text", "text": long},
		}}}}
	}
	tool := []object{{"type": "function", "function": object{"name": "look"}}}
	otherTool := []object{{"type": "function", "function": object{"name": "hear"}}}
	for _, test := range []struct {
		name          string
		first, second object
		shared        bool
	}{
		{"same", chat(long), chat(long), true},
		{"sampling", chat(long), chat(long, object{"temperature": 0.5, "user": "x", "seed": 3, "stop": nil}), true},
		{"parts", chat(long), object{"messages": []object{{"role": "user", "content": []object{{"type": "text", "text": long}}}}}, true},
		{"adapter", chat(long), chat(long, object{"model": "sql"}), false},
		{"model named", chat(long), chat(long, object{"model": DefaultModel}), true},
		{"salt", chat(long), chat(long, object{"cache_salt": "tenant"}), false},
		{"tools", chat(long, object{"tools": tool}), chat(long, object{"tools": tool}), true},
		{"tools or none", chat(long), chat(long, object{"tools": tool}), false},
		{"tools differ", chat(long, object{"tools": tool}), chat(long, object{"tools": otherTool}), false},
		{"image", image("http://x/1"), image("http://x/1"), true},
		{"image differs", image("http://x/1"), image("http://x/2"), false},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := startServer(t, ServerConfig{Config: quick, Adapters: []string{"sql"}})
			post(t, s.URL()+"/v1/chat/completions", test.first)
			_, answer := post(t, s.URL()+"/v1/chat/completions", test.second)
			cached, _ := lookup(t, answer, "usage", "prompt_tokens_details", "cached_tokens").(float64)
			if (cached > 0) != test.shared {
				t.Errorf("%v tokens cached, want shared %t", cached, test.shared)
			}
		})
	}
}

func TestAnthropicMessages(t *testing.T) {
	s := startServer(t, ServerConfig{Config: quick})
	body := func(billing string) object {
		return object{
			"max_tokens": 4,
			"system": []object{
				{"type": "text", "text": "x-anthropic-billing-header: " + billing},
				{"type": "text", "text": strings.Repeat("rule", 80)},
			},
			"messages": []object{{"role": "user", "content": "hi"}},
		}
	}
	_, first := post(t, s.URL()+"/v1/messages", body("1"))
	_, second := post(t, s.URL()+"/v1/messages", body("2"))
	wantNumber(t, first, 0, "usage", "cache_read_input_tokens")
	wantNumber(t, first, 80, "usage", "cache_creation_input_tokens")
	wantNumber(t, second, 80, "usage", "cache_read_input_tokens")
	wantNumber(t, second, 0, "usage", "cache_creation_input_tokens")
	if lookup(t, first, "usage", "input_tokens") != lookup(t, second, "usage", "input_tokens") {
		t.Errorf("input_tokens differ: %s, %s", first, second)
	}
	_, count := post(t, s.URL()+"/v1/messages/count_tokens", body("1"))
	left, _ := lookup(t, first, "usage", "input_tokens").(float64)
	wantNumber(t, count, left+80, "input_tokens")
}

// TestResponsesAreSticky: a conversation lives on the server that began it.
func TestResponsesAreSticky(t *testing.T) {
	fleet, err := StartFleet(2, ServerConfig{Config: quick})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(fleet.Close)
	home, other := fleet[0].URL(), fleet[1].URL()

	_, first := post(t, home+"/v1/responses", object{
		"instructions": "Be brief.", "input": strings.Repeat("tell", 60), "max_output_tokens": 40,
	})
	id, _ := lookup(t, first, "id").(string)
	next := object{"instructions": "Be brief.", "previous_response_id": id, "input": []object{{"role": "user", "content": "more"}}}
	_, second := post(t, home+"/v1/responses", next)
	if cached, _ := lookup(t, second, "usage", "input_tokens_details", "cached_tokens").(float64); cached < 64 {
		t.Errorf("%v tokens of the conversation cached, want most: %s", cached, second)
	}
	if resp, answer := post(t, other+"/v1/responses", next); resp.StatusCode != http.StatusNotFound {
		t.Errorf("other server: status %d, want 404: %s", resp.StatusCode, answer)
	}
	for url, want := range map[string]int{home: http.StatusOK, other: http.StatusNotFound} {
		resp, err := newClient(t).Get(url + "/v1/responses/" + id)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != want {
			t.Errorf("GET on %s: status %d, want %d", url, resp.StatusCode, want)
		}
	}
}

func TestPooling(t *testing.T) {
	s := startServer(t, ServerConfig{Config: quick})
	long := strings.Repeat("text", 40)
	for _, test := range []struct {
		path  string
		body  object
		field string
		items int
	}{
		{"/v1/embeddings", object{"input": []string{long, long}}, "data", 2},
		{"/v1/embeddings", chat(long), "data", 1},
		{"/pooling", object{"input": long}, "data", 1},
		{"/classify", object{"input": long}, "data", 1},
		{"/score", object{"text_1": long, "text_2": []string{"a", "b", "c"}}, "data", 3},
		{"/v1/score", object{"queries": long, "documents": "a"}, "data", 1},
		{"/rerank", object{"query": long, "documents": []string{"a", "b"}}, "results", 2},
		{"/v2/rerank", object{"query": long, "documents": []string{"a"}}, "results", 1},
	} {
		resp, answer := post(t, s.URL()+test.path, test.body)
		list, _ := lookup(t, answer, test.field).([]any)
		if resp.StatusCode != http.StatusOK || len(list) != test.items {
			t.Errorf("%s: status %d, %d items, want %d: %s", test.path, resp.StatusCode, len(list), test.items, answer)
		}
		wantNumber(t, answer, 0, "usage", "completion_tokens")
	}
}

// events reads a stream to its end and returns its data lines.
func events(t *testing.T, url string, body object) (*http.Response, []string) {
	t.Helper()
	body["stream"] = true
	resp, answer := post(t, url, body)
	var data []string
	for line := range strings.Lines(string(answer)) {
		if rest, ok := strings.CutPrefix(line, "data: "); ok {
			data = append(data, strings.TrimSpace(rest))
		}
	}
	return resp, data
}

// TestStreamsEqualUnary compares the text of streams with that of whole answers.
func TestStreamsEqualUnary(t *testing.T) {
	s := startServer(t, ServerConfig{Config: quick})
	long := strings.Repeat("abcd", 50)
	for _, test := range []struct {
		path         string
		body         object
		delta, whole []any
		usage        []any
	}{
		{"/v1/chat/completions", chat(long), []any{"choices", 0, "delta", "content"}, []any{"choices", 0, "message", "content"}, []any{"usage", "prompt_tokens_details", "cached_tokens"}},
		{"/v1/completions", object{"prompt": long}, []any{"choices", 0, "text"}, []any{"choices", 0, "text"}, []any{"usage", "prompt_tokens_details", "cached_tokens"}},
		{"/v1/responses", object{"input": long}, []any{"delta"}, []any{"output", 0, "content", 0, "text"}, []any{"response", "usage", "input_tokens_details", "cached_tokens"}},
		{"/v1/messages", chat(long), []any{"delta", "text"}, []any{"content", 0, "text"}, nil},
	} {
		t.Run(test.path, func(t *testing.T) {
			_, whole := post(t, s.URL()+test.path, test.body)
			test.body["stream_options"] = object{"include_usage": true}
			resp, data := events(t, s.URL()+test.path, test.body)
			if got := resp.Header.Get("Content-Type"); !strings.HasPrefix(got, "text/event-stream") {
				t.Errorf("Content-Type %q", got)
			}
			if strings.HasSuffix(test.path, "completions") {
				if data[len(data)-1] != "[DONE]" {
					t.Fatalf("last event %q, want [DONE]", data[len(data)-1])
				}
				data = data[:len(data)-1]
			}
			text := ""
			cached := false
			for _, event := range data {
				if choices, ok := lookup(t, []byte(event), "choices").([]any); !ok || len(choices) > 0 {
					piece, _ := lookup(t, []byte(event), test.delta...).(string)
					text += piece
				}
				if n, _ := lookup(t, []byte(event), test.usage...).(float64); test.usage != nil && n > 0 {
					cached = true
				}
			}
			if want := lookup(t, whole, test.whole...); text != want || text == "" {
				t.Errorf("stream says %q, unary %q", text, want)
			}
			if test.usage != nil && !cached {
				t.Errorf("no cached tokens reported in %q", data)
			}
		})
	}
}

func TestErrors(t *testing.T) {
	config := quick
	config.Blocks = 11 // 160 tokens
	s := startServer(t, ServerConfig{Config: config, KeepBody: 1 << 20})
	for _, test := range []struct {
		name, path string
		body       any
		status     int
	}{
		{"not JSON", "/v1/chat/completions", []byte("{"), http.StatusBadRequest},
		{"empty body", "/v1/chat/completions", []byte{}, http.StatusBadRequest},
		{"no messages", "/v1/chat/completions", object{}, http.StatusBadRequest},
		{"no role", "/v1/chat/completions", object{"messages": []object{{"content": "x"}}}, http.StatusBadRequest},
		{"content", "/v1/chat/completions", object{"messages": []object{{"role": "user", "content": 3}}}, http.StatusBadRequest},
		{"no prompt", "/v1/completions", object{}, http.StatusBadRequest},
		{"empty prompt", "/v1/completions", object{"prompt": []int{}}, http.StatusBadRequest},
		{"odd prompt", "/v1/completions", object{"prompt": object{}}, http.StatusBadRequest},
		{"max_tokens", "/v1/completions", object{"prompt": "x", "max_tokens": -1}, http.StatusBadRequest},
		{"n", "/v1/completions", object{"prompt": "x", "n": 0}, http.StatusBadRequest},
		{"too long", "/v1/completions", object{"prompt": strings.Repeat("abcd", 161)}, http.StatusBadRequest},
		{"too many tokens", "/v1/completions", object{"prompt": "x", "max_tokens": 161}, http.StatusBadRequest},
		{"body not kept", "/v1/completions", object{"prompt": strings.Repeat("abcd", 1<<19)}, http.StatusBadRequest},
		{"unknown model", "/v1/completions", object{"prompt": "x", "model": "gpt"}, http.StatusNotFound},
		{"render off", "/v1/chat/completions/render", chat("x"), http.StatusForbidden},
		{"no such path", "/v1/nothing", object{}, http.StatusNotFound},
	} {
		t.Run(test.name, func(t *testing.T) {
			resp, answer := post(t, s.URL()+test.path, test.body)
			if resp.StatusCode != test.status {
				t.Errorf("status %d, want %d: %s", resp.StatusCode, test.status, answer)
			}
			if test.path != "/v1/nothing" {
				wantNumber(t, answer, float64(test.status), "error", "code")
			}
		})
	}
}

func TestQueueLimit(t *testing.T) {
	config := quick
	config.MaxSeqs, config.MaxQueued = 1, 1
	s := startServer(t, ServerConfig{Config: config})
	s.Stall()
	ctx, cancel := context.WithCancel(t.Context())
	var group sync.WaitGroup
	for range 2 {
		group.Go(func() { _ = submit(ctx, s.URL(), chat("hi")) })
	}
	eventually(t, "a full queue", func() bool {
		p := s.running()
		p.driver.mu.Lock()
		defer p.driver.mu.Unlock()
		return p.driver.engine.Queued() == 1 && len(p.driver.engine.running) == 1
	})
	resp, answer := post(t, s.URL()+"/v1/chat/completions", chat("hi"))
	if resp.StatusCode != http.StatusServiceUnavailable || resp.Header.Get("Retry-After") != "" {
		t.Errorf("status %d, Retry-After %q: %s", resp.StatusCode, resp.Header.Get("Retry-After"), answer)
	}
	if got := lookup(t, answer, "error", "type"); got != "Service Unavailable" {
		t.Errorf("error type %v", got)
	}
	cancel()
	group.Wait()
}

// submit sends a request until the context ends.
func submit(ctx context.Context, url string, body object) error {
	raw, err := json.Marshal(body)
	if err != nil {
		return err
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/chat/completions", bytes.NewReader(raw))
	if err != nil {
		return err
	}
	transport := &http.Transport{}
	defer transport.CloseIdleConnections()
	resp, err := transport.RoundTrip(r)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	_, err = io.Copy(io.Discard, resp.Body)
	return err
}

// TestClientAborts cuts connections during prefill, during a stream and while
// waiting; each must free its sequence at once.
func TestClientAborts(t *testing.T) {
	slow := Config{MaxSeqs: 1, PrefillRate: 1000, StepOverhead: time.Millisecond, Blocks: 10000}
	for _, stream := range []bool{false, true} {
		s := startServer(t, ServerConfig{Config: slow})
		ctx, cancel := context.WithCancel(t.Context())
		var group sync.WaitGroup
		for range 3 {
			group.Go(func() {
				err := submit(ctx, s.URL(), chat("hi", object{"max_tokens": 100000, "stream": stream}))
				if !errors.Is(err, context.Canceled) {
					t.Errorf("submit = %v, want cancelled", err)
				}
			})
		}
		eventually(t, "one running, two waiting", func() bool {
			stats := s.Stats()
			return stats.Running == 1 && stats.Waiting == 2 && stats.GenerationTokens > 0
		})
		cancel()
		group.Wait()
		eventually(t, "an idle engine", func() bool {
			stats := s.Stats()
			return stats.Aborted == 3 && stats.Running == 0 && stats.Waiting == 0 && stats.KVUsage == 0
		})
	}
}

// TestConcurrentClients mixes streams, whole answers and clients that leave, on a
// cache too small for all of them. In the end the counters are the sum of what the
// clients saw, and nothing is left in the engine.
func TestConcurrentClients(t *testing.T) {
	config := quick
	config.Blocks, config.MaxSeqs = 60, 8
	s := startServer(t, ServerConfig{Config: config, Speed: 10})
	var group sync.WaitGroup
	var answered, left atomic.Int64
	for worker := range 12 {
		group.Go(func() {
			for i := range 10 {
				ctx, cancel := context.WithCancel(t.Context())
				if i%4 == 3 {
					time.AfterFunc(time.Duration(worker)*time.Millisecond/2, cancel)
				}
				body := chat(strings.Repeat("abcd", 100+10*worker), object{"stream": i%2 == 0, "max_tokens": 30 + i})
				if err := submit(ctx, s.URL(), body); err != nil {
					left.Add(1)
				} else {
					answered.Add(1)
				}
				cancel()
			}
		})
	}
	group.Wait()
	eventually(t, "an idle engine", func() bool {
		s := s.Stats()
		return s.Running == 0 && s.Waiting == 0 && s.KVUsage == 0
	})
	stats := s.Stats()
	// An answer may be complete when its client leaves; a request may never arrive.
	if stats.Finished < answered.Load() || stats.Finished+stats.Aborted > answered.Load()+left.Load() {
		t.Errorf("%d finished, %d aborted; clients got %d answers and left %d times",
			stats.Finished, stats.Aborted, answered.Load(), left.Load())
	}
	if answered.Load() < 90 || stats.PrefixHits == 0 {
		t.Errorf("%d answers, %d tokens hit: too few", answered.Load(), stats.PrefixHits)
	}
	p := s.running()
	p.driver.mu.Lock()
	defer p.driver.mu.Unlock()
	checkInvariants(t, p.driver.engine)
}

// TestHeadersComeWithFirstToken: a stream shows no sign of life before.
func TestHeadersComeWithFirstToken(t *testing.T) {
	s := startServer(t, ServerConfig{Config: quick})
	s.Stall()
	answered := make(chan error, 1)
	go func() { answered <- submit(t.Context(), s.URL(), chat("hi", object{"stream": true})) }()
	eventually(t, "a running request", func() bool {
		p := s.running()
		p.driver.mu.Lock()
		defer p.driver.mu.Unlock()
		return len(p.driver.engine.running) == 1
	})
	select {
	case err := <-answered:
		t.Fatalf("answered before the first token: %v", err)
	default:
	}
	s.StallEnd()
	if err := <-answered; err != nil {
		t.Error(err)
	}
}

func TestBodiesArriveWhole(t *testing.T) {
	for _, instant := range []bool{false, true} {
		var mu sync.Mutex
		var seen []byte
		s := startServer(t, ServerConfig{Config: quick, Instant: instant, OnRequest: func(_ *http.Request, body []byte) {
			mu.Lock()
			defer mu.Unlock()
			seen = body
		}})
		for _, size := range []int{100, 700 << 10, 64<<20 + 1} {
			body := []byte(`{"prompt":["x"],"user":"` + strings.Repeat("u", size) + `"}`)
			resp, answer := post(t, s.URL()+"/v1/completions", body)
			if resp.StatusCode != http.StatusOK {
				t.Fatalf("status %d: %.200s", resp.StatusCode, answer)
			}
			if got, want := resp.Header.Get(HeaderBytes), fmt.Sprint(len(body)); got != want {
				t.Errorf("instant %t: %s = %s, want %s", instant, HeaderBytes, got, want)
			}
			if got, want := resp.Header.Get(HeaderSum), fmt.Sprintf("%016x", xxhash.Sum64(body)); got != want {
				t.Errorf("instant %t: %s = %s, want %s", instant, HeaderSum, got, want)
			}
			mu.Lock()
			if kept := !instant || size < 1<<20; kept != bytes.Equal(seen, body) {
				t.Errorf("instant %t, %d bytes: hook saw %d bytes", instant, len(body), len(seen))
			}
			mu.Unlock()
		}
	}
}

func TestInstant(t *testing.T) {
	s := startServer(t, ServerConfig{Instant: true})
	_, answer := post(t, s.URL()+"/v1/chat/completions", chat("hi"))
	if text, _ := lookup(t, answer, "choices", 0, "message", "content").(string); text == "" {
		t.Errorf("no text in %s", answer)
	}
	_, data := events(t, s.URL()+"/v1/chat/completions", chat("hi"))
	if len(data) != defaultOutputTokens+2 || data[len(data)-1] != "[DONE]" {
		t.Errorf("%d events, want %d: %q", len(data), defaultOutputTokens+2, data)
	}
	if resp, answer := post(t, s.URL()+"/v1/embeddings", object{"input": "x"}); resp.StatusCode != http.StatusOK {
		t.Errorf("embeddings: %d %s", resp.StatusCode, answer)
	}
}

func TestRestart(t *testing.T) {
	s := startServer(t, ServerConfig{Config: quick})
	body := chat(strings.Repeat("abcd", 100))
	post(t, s.URL()+"/v1/chat/completions", body)
	before, addr := families(t, s), s.Addr()

	stopped := make(chan error, 1)
	s.Stall()
	go func() { stopped <- submit(t.Context(), s.URL(), chat("lost")) }()
	eventually(t, "a request in flight", func() bool {
		p := s.running()
		p.driver.mu.Lock()
		defer p.driver.mu.Unlock()
		return len(p.driver.engine.running) == 1
	})
	s.Stop()
	if err := <-stopped; err == nil {
		t.Error("a request survived the stop")
	}
	if _, err := newClient(t).Get("http://" + addr + "/health"); err == nil {
		t.Error("a stopped server answers")
	}
	s.StallEnd()
	if err := s.Start(); err != nil {
		t.Fatal(err)
	}
	if s.Addr() != addr {
		t.Errorf("address %s after restart, was %s", s.Addr(), addr)
	}
	after := families(t, s)
	if a, b := value(t, before, "process_start_time_seconds"), value(t, after, "process_start_time_seconds"); a >= b {
		t.Errorf("start time %v, then %v", a, b)
	}
	if n := value(t, after, "vllm:prompt_tokens_total"); n != 0 {
		t.Errorf("%v prompt tokens counted after restart", n)
	}
	_, answer := post(t, s.URL()+"/v1/chat/completions", body)
	wantNumber(t, answer, 0, "usage", "prompt_tokens_details", "cached_tokens")
	if err := s.Start(); err == nil {
		t.Error("a running server was started again")
	}
}

func TestResetPrefixCache(t *testing.T) {
	s := startServer(t, ServerConfig{Config: quick})
	body := chat(strings.Repeat("abcd", 100))
	post(t, s.URL()+"/v1/chat/completions", body)
	_, answer := post(t, s.URL()+"/reset_prefix_cache", nil)
	if got := lookup(t, answer, "success"); got != true {
		t.Errorf("success = %v", got)
	}
	_, answer = post(t, s.URL()+"/v1/chat/completions", body)
	wantNumber(t, answer, 0, "usage", "prompt_tokens_details", "cached_tokens")
}

func TestPause(t *testing.T) {
	s := startServer(t, ServerConfig{Config: quick})
	s.Pause()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	r, _ := http.NewRequestWithContext(ctx, http.MethodGet, s.URL()+"/health", nil)
	if _, err := newClient(t).Do(r); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a paused server answered: %v", err)
	}
	answered := make(chan error, 1)
	go func() { answered <- submit(t.Context(), s.URL(), chat("hi")) }()
	s.Resume()
	if err := <-answered; err != nil {
		t.Error(err)
	}
	// A server that is closed while paused must let go of its requests.
	s.Pause()
	go func() { answered <- submit(t.Context(), s.URL(), chat("hi")) }()
	s.Close()
	if err := <-answered; err == nil {
		t.Error("a closed server answered")
	}
	s.Resume()
}

func TestFailures(t *testing.T) {
	s := startServer(t, ServerConfig{Config: quick})
	s.FailNext(http.StatusTooManyRequests, 2)
	for _, want := range []int{429, 429, 200} {
		if resp, _ := post(t, s.URL()+"/v1/chat/completions", chat("hi")); resp.StatusCode != want {
			t.Errorf("status %d, want %d", resp.StatusCode, want)
		}
	}
	s.FailNext(0, 1)
	if err := submit(t.Context(), s.URL(), chat("hi")); err == nil {
		t.Error("no error from a cut connection")
	}
	for _, status := range []int{503, 200} {
		s.SetHealth(status)
		resp, err := newClient(t).Get(s.URL() + "/health")
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != status {
			t.Errorf("health %d, want %d", resp.StatusCode, status)
		}
	}
}

// fetchPage fetches /metrics.
func fetchPage(t *testing.T, s *Server) (int, []byte) {
	t.Helper()
	resp, err := newClient(t).Get(s.URL() + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, body
}

func families(t *testing.T, s *Server) map[string]*dto.MetricFamily {
	t.Helper()
	status, body := fetchPage(t, s)
	if status != http.StatusOK {
		t.Fatalf("/metrics: status %d", status)
	}
	return parse(t, body)
}

func parse(t *testing.T, body []byte) map[string]*dto.MetricFamily {
	t.Helper()
	parser := expfmt.NewTextParser(model.UTF8Validation)
	f, err := parser.TextToMetricFamilies(bytes.NewReader(body))
	if err != nil {
		t.Fatalf("%v in\n%s", err, body)
	}
	return f
}

// value sums a family up: a histogram by its count.
func value(t *testing.T, f map[string]*dto.MetricFamily, name string) float64 {
	t.Helper()
	family, ok := f[name]
	if !ok {
		t.Errorf("no family %s", name)
	}
	sum := 0.0
	for _, m := range family.GetMetric() {
		sum += m.GetGauge().GetValue() + m.GetCounter().GetValue() + float64(m.GetHistogram().GetSampleCount())
	}
	return sum
}

func TestMetricsPage(t *testing.T) {
	s := startServer(t, ServerConfig{Config: quick, Adapters: []string{"sql"}})
	prompt, generated, cached := 0.0, 0.0, 0.0
	for i := range 5 {
		_, answer := post(t, s.URL()+"/v1/chat/completions", chat(strings.Repeat("abcd", 50+10*i), object{"max_tokens": 3 + i}))
		for sum, path := range map[*float64][]any{
			&prompt:    {"usage", "prompt_tokens"},
			&generated: {"usage", "completion_tokens"},
			&cached:    {"usage", "prompt_tokens_details", "cached_tokens"},
		} {
			n, _ := lookup(t, answer, path...).(float64)
			*sum += n
		}
	}
	_, body := fetchPage(t, s)
	if len(body) < 40000 {
		t.Errorf("page of %d bytes, vLLM's has some 60,000", len(body))
	}
	f := parse(t, body)
	for name, want := range map[string]float64{
		"vllm:prompt_tokens_total":                prompt,
		"vllm:generation_tokens_total":            generated,
		"vllm:prefix_cache_queries_total":         prompt,
		"vllm:prefix_cache_hits_total":            cached,
		"vllm:prompt_tokens_cached_total":         cached,
		"vllm:prompt_tokens_by_source_total":      prompt,
		"vllm:request_success_total":              5,
		"vllm:time_to_first_token_seconds":        5,
		"vllm:e2e_request_latency_seconds":        5,
		"vllm:inter_token_latency_seconds":        generated - 5,
		"vllm:num_requests_running":               0,
		"vllm:num_requests_waiting":               0,
		"vllm:kv_cache_usage_perc":                0,
		"vllm:cache_config_info":                  1,
		"vllm:engine_sleep_state":                 1,
		"http_requests_total":                     5,
		"http_request_duration_highr_seconds":     5,
		"vllm:request_prefill_kv_computed_tokens": 5,
	} {
		if got := value(t, f, name); got != want {
			t.Errorf("%s = %v, want %v", name, got, want)
		}
	}
	for _, sample := range []string{
		`vllm:request_success_total{engine="0",finished_reason="length",model_name="sim"} 5.0`,
		`vllm:request_success_total{engine="0",finished_reason="abort",model_name="sim"} 0.0`,
		fmt.Sprintf(`vllm:prompt_tokens_by_source_total{engine="0",model_name="sim",source="local_cache_hit"} %.1f`, cached),
		fmt.Sprintf(`vllm:prompt_tokens_by_source_total{engine="0",model_name="sim",source="local_compute"} %.1f`, prompt-cached),
	} {
		if !bytes.Contains(body, []byte("\n"+sample+"\n")) {
			t.Errorf("no sample %s", sample)
		}
	}
	for name, family := range f {
		if !strings.HasPrefix(name, "vllm:") || strings.HasSuffix(name, "_info") || strings.HasPrefix(name, "vllm:admission") {
			continue
		}
		for _, m := range family.GetMetric() {
			labels := map[string]string{}
			for _, l := range m.GetLabel() {
				labels[l.GetName()] = l.GetValue()
			}
			if labels["engine"] != "0" || labels["model_name"] != DefaultModel {
				t.Errorf("%s has labels %v", name, labels)
			}
		}
	}
}

func TestMetricsByName(t *testing.T) {
	s := startServer(t, ServerConfig{Config: quick})
	resp, err := newClient(t).Get(s.URL() + "/metrics/?name[]=vllm:num_requests_running&name[]=vllm:prefix_cache_hits_total")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	f := parse(t, body)
	if len(f) != 2 || f["vllm:num_requests_running"] == nil || f["vllm:prefix_cache_hits_total"] == nil {
		t.Errorf("got\n%s", body)
	}
}

func TestMetricsModes(t *testing.T) {
	s := startServer(t, ServerConfig{Config: quick})
	post(t, s.URL()+"/v1/chat/completions", chat("hi"))
	sound := value(t, families(t, s), "vllm:generation_tokens_total")
	for mode, want := range map[MetricsMode]float64{MetricsZero: 0, MetricsTenfold: 10 * sound, MetricsOK: sound} {
		s.SetMetrics(mode)
		if got := value(t, families(t, s), "vllm:generation_tokens_total"); got != want {
			t.Errorf("mode %d: %v tokens, want %v", mode, got, want)
		}
	}
	s.SetMetrics(MetricsJumping)
	one, other := value(t, families(t, s), "vllm:generation_tokens_total"), value(t, families(t, s), "vllm:generation_tokens_total")
	if one+other != 1.5*sound || one == other {
		t.Errorf("pages of two processes: %v and %v tokens", one, other)
	}
	s.SetMetrics(MetricsAllHits)
	if f := families(t, s); value(t, f, "vllm:prompt_tokens_cached_total") != value(t, f, "vllm:prompt_tokens_total") {
		t.Error("not all prompt tokens were found in the cache")
	}
	for mode, want := range map[MetricsMode]int{MetricsNotFound: 404, MetricsFailing: 500, MetricsGarbage: 200} {
		s.SetMetrics(mode)
		if status, _ := fetchPage(t, s); status != want {
			t.Errorf("mode %d: status %d, want %d", mode, status, want)
		}
	}
	s.SetMetrics(MetricsFrozen)
	_, first := fetchPage(t, s)
	post(t, s.URL()+"/v1/chat/completions", chat("hi"))
	if _, second := fetchPage(t, s); !bytes.Equal(first, second) || len(first) == 0 {
		t.Error("a frozen page changed")
	}
	s.SetMetrics(MetricsRenamed)
	if _, body := fetchPage(t, s); bytes.Contains(body, []byte("vllm:")) || !bytes.Contains(body, []byte("engine:num_requests_running")) {
		t.Error("families were not renamed")
	}
	for _, mode := range []MetricsMode{MetricsDrip, MetricsEndless, MetricsHanging} {
		s.SetMetrics(mode)
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		r, _ := http.NewRequestWithContext(ctx, http.MethodGet, s.URL()+"/metrics", nil)
		resp, err := newClient(t).Do(r)
		if err == nil {
			_, err = io.Copy(io.Discard, resp.Body)
			resp.Body.Close()
		}
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("mode %d: the page ended: %v", mode, err)
		}
		cancel()
	}
}

func TestRender(t *testing.T) {
	s := startServer(t, ServerConfig{Config: quick, ScaleOut: true})
	body := chat(strings.Repeat("abcd", 20))
	_, tokens := post(t, s.URL()+"/tokenize", body)
	_, rendered := post(t, s.URL()+"/v1/chat/completions/render", body)
	a, b := lookup(t, tokens, "tokens"), lookup(t, rendered, "token_ids")
	if fmt.Sprint(a) != fmt.Sprint(b) || a == nil {
		t.Errorf("/tokenize says %v, /render %v", a, b)
	}
	_, answer := post(t, s.URL()+"/v1/completions", object{"prompt": a})
	_, chatted := post(t, s.URL()+"/v1/chat/completions", body)
	if cached, _ := lookup(t, chatted, "usage", "prompt_tokens_details", "cached_tokens").(float64); cached == 0 {
		t.Errorf("rendered ids do not hit: %s, %s", answer, chatted)
	}
	_, list := post(t, s.URL()+"/v1/completions/render", object{"prompt": []string{"abcd", "efgh"}})
	if n, _ := lookup(t, list).([]any); len(n) != 2 {
		t.Errorf("%d rendered prompts, want 2", len(n))
	}
}

func TestModelsAndVersion(t *testing.T) {
	s := startServer(t, ServerConfig{Model: "base", Adapters: []string{"sql"}})
	resp, err := newClient(t).Get(s.URL() + "/v1/models")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var models struct {
		Data []struct {
			ID     string
			Parent *string
		}
	}
	if err := json.NewDecoder(bufio.NewReader(resp.Body)).Decode(&models); err != nil {
		t.Fatal(err)
	}
	var ids []string
	for _, m := range models.Data {
		ids = append(ids, m.ID)
	}
	if !slices.Equal(ids, []string{"base", "sql"}) || models.Data[0].Parent != nil || *models.Data[1].Parent != "base" {
		t.Errorf("models %+v", models.Data)
	}
}

// TestSpeed: engine time does not depend on the clock's speed. A second of prefill
// at speed 200 is over long before a second has passed, and is a second in /metrics.
func TestSpeed(t *testing.T) {
	s := startServer(t, ServerConfig{Config: Config{PrefillRate: 1000}, Speed: 200})
	begin := time.Now()
	post(t, s.URL()+"/v1/completions", object{"prompt": strings.Repeat("abcd", 1000), "max_tokens": 2})
	wall := time.Since(begin)
	stats := s.Stats()
	want := time.Second + DefaultStepOverhead
	if stats.FirstTokenTime != want {
		t.Errorf("engine time to first token %v, want %v", stats.FirstTokenTime, want)
	}
	if least := want / 200; wall < least {
		t.Errorf("answered after %v, want at least %v", wall, least)
	}
}

func TestFleetAddresses(t *testing.T) {
	fleet, err := StartFleet(3, ServerConfig{Config: quick})
	if err != nil {
		t.Fatal(err)
	}
	defer fleet.Close()
	addrs := fleet.Addrs()
	slices.Sort(addrs)
	if len(slices.Compact(addrs)) != 3 {
		t.Errorf("addresses %v are not three", addrs)
	}
	if _, err := StartFleet(2, ServerConfig{Addr: addrs[0]}); err == nil {
		t.Error("two servers on one port")
	}
}

// A port that somebody else still holds for a moment is waited for, and one that
// is taken for good is told.
func TestStartWaitsForItsPort(t *testing.T) {
	for _, test := range []struct {
		name  string
		held  time.Duration
		fails bool
	}{
		{"given back soon", 30 * time.Millisecond, false},
		{"kept", time.Minute, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			other, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer other.Close()
			later := time.AfterFunc(test.held, func() { other.Close() })
			defer later.Stop()
			s, err := StartServer(ServerConfig{Addr: other.Addr().String()})
			if failed := err != nil; failed != test.fails {
				t.Errorf("starting: %v", err)
			}
			if s != nil {
				s.Close()
			}
		})
	}
}
