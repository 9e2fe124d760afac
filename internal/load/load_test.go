// SPDX-License-Identifier: Apache-2.0

package load

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"math"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/trace"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// step is a part of an answer and the time it takes to come.
type step struct {
	after time.Duration
	text  string
}

const (
	roleChunk    = `data: {"choices":[{"delta":{"role":"assistant","content":""}}]}` + "\n\n"
	contentChunk = `data: {"choices":[{"delta":{"content":"say \"hi\""}}],"usage":null}` + "\n\n"
	usageChunk   = `data: {"choices":[],"usage":{"prompt_tokens":100,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":60}}}` + "\n\n"
	doneChunk    = "data: [DONE]\n\n"
)

var usualAnswer = []step{{time.Second, roleChunk}, {2 * time.Second, contentChunk}, {4 * time.Second, contentChunk + usageChunk + doneChunk}}

// fakeServer answers in fake time, without a network.
type fakeServer struct {
	answer func(n int, body string) []step

	mu       sync.Mutex
	start    time.Time
	arrivals []time.Duration
	bodies   []string
	open     int
	mostOpen int
}

func newFakeServer(answer []step) *fakeServer {
	return &fakeServer{start: time.Now(), answer: func(int, string) []step { return answer }}
}

func (f *fakeServer) RoundTrip(r *http.Request) (*http.Response, error) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.arrivals = append(f.arrivals, time.Since(f.start))
	f.bodies = append(f.bodies, string(body))
	f.open++
	f.mostOpen = max(f.mostOpen, f.open)
	return &http.Response{
		StatusCode: http.StatusOK,
		Header:     http.Header{"Content-Type": {"text/event-stream"}},
		Body:       &fakeBody{ctx: r.Context(), steps: f.answer(len(f.bodies), string(body)), server: f},
	}, nil
}

type fakeBody struct {
	ctx    context.Context
	steps  []step
	server *fakeServer
}

func (b *fakeBody) Read(p []byte) (int, error) {
	if len(b.steps) == 0 {
		return 0, io.EOF
	}
	select {
	case <-time.After(b.steps[0].after):
	case <-b.ctx.Done():
		return 0, b.ctx.Err()
	}
	n := copy(p, b.steps[0].text)
	b.steps[0] = step{text: b.steps[0].text[n:]}
	if b.steps[0].text == "" {
		b.steps = b.steps[1:]
	}
	return n, nil
}

func (b *fakeBody) Close() error {
	b.server.mu.Lock()
	defer b.server.mu.Unlock()
	b.server.open--
	return nil
}

// usual returns a copy that fakeBody may use up.
func usual(int, string) []step { return slices.Clone(usualAnswer) }

func requestsAt(times ...time.Duration) iter.Seq2[trace.Request, error] {
	return func(yield func(trace.Request, error) bool) {
		for _, at := range times {
			if !yield(trace.Request{At: at, Path: "/v1/chat/completions", Text: "x", InputTokens: 1, OutputTokens: 1}, nil) {
				return
			}
		}
	}
}

func near(a, b float64) bool { return math.Abs(a-b) < 1e-6 }

func TestOpenLoopTiming(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := newFakeServer(nil)
		server.answer = usual
		var samples []Sample
		got, err := OpenLoop(t.Context(), requestsAt(0, 10*time.Second, 10*time.Second, 40*time.Second), Options{
			BaseURL: "http://fake", Model: "m", Speed: 10, Transport: server,
			Record: func(s Sample) { samples = append(samples, s) },
		})
		if err != nil {
			t.Fatal(err)
		}
		// The second request does not wait for the first, which takes 7 s.
		if want := []time.Duration{0, time.Second, time.Second, 4 * time.Second}; !slices.Equal(server.arrivals, want) {
			t.Errorf("requests arrived at %v, want %v", server.arrivals, want)
		}
		for _, s := range samples {
			if !near(s.TTFTSeconds, 30) || !near(s.EndToEndSeconds, 70) || !near(s.LagSeconds, 0) {
				t.Errorf("sample %+v, want a first token after 3 s and the end after 7 s, times 10", s)
			}
		}
		if got.Succeeded != 4 || !near(got.DurationSeconds, 110) || !near(got.HitRate, 0.6) || got.CachedReported != 4 {
			t.Errorf("result %+v", got)
		}
	})
}

func TestMaxInFlight(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := newFakeServer(nil)
		server.answer = usual
		got, err := OpenLoop(t.Context(), requestsAt(0, 0, 0), Options{BaseURL: "http://fake", MaxInFlight: 2, Transport: server})
		if err != nil {
			t.Fatal(err)
		}
		if server.mostOpen != 2 || got.HeldRequests != 1 {
			t.Errorf("%d at once, %d held; want 2 and 1", server.mostOpen, got.HeldRequests)
		}
		// Waiting at the guard is not hidden: the third was due at 0.
		if !near(got.TTFT.Max, 10) || !near(got.Lag.Max, 7) {
			t.Errorf("TTFT at most %v, lag %v; want 10 and 7", got.TTFT.Max, got.Lag.Max)
		}
	})
}

// sessionsOf reads sessions back from a trace of lines "second session".
func sessionsOf(t *testing.T, lines ...string) iter.Seq[*trace.Session] {
	t.Helper()
	var file strings.Builder
	for i, line := range lines {
		var second int
		var session string
		if _, err := fmt.Sscan(line, &second, &session); err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&file, `{"timestamp":%d,"input":"line %d","output":"","session_id":%q}`+"\n", second*1_000_000, i, session)
	}
	tr, err := trace.Open(writeFile(t, file.String()))
	if err != nil {
		t.Fatal(err)
	}
	return tr.Sessions()
}

func TestClosedLoopTiming(t *testing.T) {
	sessions := sessionsOf(t, "0 a", "20 a", "40 a", "10 b", "12 b")
	synctest.Test(t, func(t *testing.T) {
		server := newFakeServer(nil)
		server.answer = usual
		done := 0
		got, err := ClosedLoop(t.Context(), sessions, Options{
			BaseURL: "http://fake/", Speed: 2, Transport: server, Total: 5,
			Progress: func(n, total int) {
				if done++; n != done || total != 5 {
					t.Errorf("progress %d of %d, want %d of 5", n, total, done)
				}
			},
		})
		if err != nil {
			t.Fatal(err)
		}
		// a: 0, +7 s answer +10 s think, again; b: 5, +7 s answer +1 s think.
		want := []time.Duration{0, 5 * time.Second, 13 * time.Second, 17 * time.Second, 34 * time.Second}
		if !slices.Equal(server.arrivals, want) {
			t.Errorf("requests arrived at %v, want %v", server.arrivals, want)
		}
		if got.Requests != 5 || done != 5 || !near(got.TTFT.Mean, 6) {
			t.Errorf("result %+v", got)
		}
	})
}

func TestActiveSessions(t *testing.T) {
	sessions := sessionsOf(t, "0 a", "1000 b", "1001 b", "2000 c")
	synctest.Test(t, func(t *testing.T) {
		server := newFakeServer(nil)
		server.answer = usual
		if _, err := ClosedLoop(t.Context(), sessions, Options{BaseURL: "http://fake", ActiveSessions: 2, Transport: server}); err != nil {
			t.Fatal(err)
		}
		want := []time.Duration{0, 0, 7 * time.Second, 8 * time.Second}
		if !slices.Equal(server.arrivals, want) {
			t.Errorf("requests arrived at %v, want %v", server.arrivals, want)
		}
	})
}

func TestAnswersAreHeard(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := newFakeServer(nil)
		server.answer = func(n int, _ string) []step {
			if n == 2 {
				return []step{{0, contentChunk}} // cut: nothing of it is repeated
			}
			return usual(0, "")
		}
		w := trace.Workload{Seed: 3, Chats: 1, Turns: 4, OneOffs: -1, SystemTokens: 10, UserTokens: 5, AnswerTokens: 5}
		if _, err := ClosedLoop(t.Context(), w.Sessions(), Options{BaseURL: "http://fake", Transport: server}); err != nil {
			t.Fatal(err)
		}
		if len(server.bodies) < 3 {
			t.Fatalf("%d turns, want at least 3 to see an answer repeated", len(server.bodies))
		}
		var chat struct {
			Messages []struct{ Role, Content string }
		}
		if err := json.Unmarshal([]byte(server.bodies[2]), &chat); err != nil {
			t.Fatal(err)
		}
		if got := chat.Messages[2].Content; got != `say "hi"say "hi"` {
			t.Errorf("first answer is repeated as %q", got)
		}
		if got := chat.Messages[4].Content; strings.Contains(got, "say \"hi\"") || got == "" {
			t.Errorf("second answer, which was cut, is repeated as %q", got)
		}
	})
}

func TestCancel(t *testing.T) {
	endless := func(yield func(trace.Request, error) bool) {
		for r := range requestsAt(0, 0, time.Hour) {
			if !yield(r, nil) {
				return
			}
		}
	}
	synctest.Test(t, func(t *testing.T) {
		server := newFakeServer(nil)
		server.answer = usual
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		got, err := OpenLoop(ctx, endless, Options{BaseURL: "http://fake", Transport: server})
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("error %v", err)
		}
		if got.Requests != 2 || got.Succeeded != 0 || got.Failures["timeout"] != 2 {
			t.Errorf("result %+v, want 2 requests that the end of the run cut off", got)
		}
	})
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancelCause(t.Context())
		cancel(errors.New("enough"))
		_, err := ClosedLoop(ctx, trace.Workload{}.Sessions(), Options{BaseURL: "http://fake", Transport: newFakeServer(nil)})
		if err == nil || err.Error() != "enough" {
			t.Errorf("error %v, want the cause", err)
		}
	})
}

func TestTraceError(t *testing.T) {
	broken := func(yield func(trace.Request, error) bool) {
		_ = yield(trace.Request{Path: "/", Text: "x"}, nil) && yield(trace.Request{}, errors.New("line 2 is broken"))
	}
	synctest.Test(t, func(t *testing.T) {
		server := newFakeServer(nil)
		server.answer = usual
		got, err := OpenLoop(t.Context(), broken, Options{BaseURL: "http://fake", Transport: server})
		if err == nil || err.Error() != "line 2 is broken" || got.Requests != 1 {
			t.Errorf("%d requests, error %v", got.Requests, err)
		}
	})
}

func TestOptionErrors(t *testing.T) {
	for want, o := range map[string]Options{
		"is not of the form":             {},
		"base URL:":                      {BaseURL: "http://a b"},
		"\"ftp://x\" is not of the form": {BaseURL: "ftp://x"},
		"speed -1 is not positive":       {BaseURL: "http://x", Speed: -1},
		"speed NaN is not positive":      {BaseURL: "http://x", Speed: math.NaN()},
		"max in flight -1":               {BaseURL: "http://x", MaxInFlight: -1},
		"active sessions -1":             {BaseURL: "http://x", ActiveSessions: -1},
		"timeout -1s":                    {BaseURL: "http://x", Timeout: -time.Second},
		"warm-up 0.5 and cool-down 0.5":  {BaseURL: "http://x", WarmUp: 0.5, CoolDown: 0.5},
	} {
		if _, err := OpenLoop(t.Context(), requestsAt(), o); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
	}
}

// TestRealServer plays over the network against a server that answers in every
// way that servers do.
func TestRealServer(t *testing.T) {
	long := strings.Repeat("long ", 10*streamBuffer)
	var turn atomic.Int32
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("X-Replica", fmt.Sprintf("replica-%d", turn.Add(1)%2))
		w.Header().Set("X-Reason", "match")
		stream := func(text string) {
			w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
			_, _ = io.WriteString(w, text)
		}
		switch r.URL.Path {
		case "/base/good":
			stream(roleChunk + contentChunk + usageChunk + doneChunk)
		case "/base/returns":
			stream(strings.ReplaceAll(": note\n"+contentChunk+usageChunk+doneChunk, "\n", "\r\n"))
		case "/base/long":
			stream(strings.Replace(contentChunk, "say", long, 1) + usageChunk + doneChunk)
		case "/base/tools":
			stream(`data: {"choices":[{"delta":{"tool_calls":[{"function":{"arguments":"{"}}]}}]}` + "\n\n" + usageChunk + doneChunk)
		case "/base/responses":
			stream(`data: {"type":"response.output_text.delta","delta":"x"}` + "\n\n" +
				`data: {"type":"response.completed","response":{"usage":{"input_tokens":100,"output_tokens":5,"input_tokens_details":{"cached_tokens":60}}}}` + "\n\n")
		case "/base/messages":
			stream(`data: {"type":"message_start","message":{"usage":{"input_tokens":40,"cache_read_input_tokens":60,"output_tokens":0}}}` + "\n\n" +
				`data: {"type":"content_block_delta","delta":{"type":"text_delta","text":"x"}}` + "\n\n" +
				`data: {"type":"message_delta","usage":{"output_tokens":5}}` + "\n\n" + `data: {"type":"message_stop"}` + "\n\n")
		case "/base/whole":
			w.Header().Set("Content-Type", "application/json")
			_, _ = io.WriteString(w, `{"choices":[{"message":{"content":"x"}}],"usage":{"prompt_tokens":100,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":60}}}`)
		case "/base/unreported":
			stream(contentChunk + `data: {"usage":{"prompt_tokens":100,"completion_tokens":5,"prompt_tokens_details":null}}` + "\n\n" + doneChunk)

		case "/base/full":
			w.Header().Set("Retry-After", "1")
			http.Error(w, "all replicas are full", http.StatusServiceUnavailable)
		case "/base/cut":
			stream(contentChunk)
		case "/base/abort":
			stream(contentChunk)
			w.(http.Flusher).Flush()
			panic(http.ErrAbortHandler)
		case "/base/no-answer":
			panic(http.ErrAbortHandler)
		case "/base/event":
			stream(contentChunk + `data: {"error": {"message":"out of memory"}}` + "\n\n" + doneChunk)
		case "/base/silent":
			stream(roleChunk + usageChunk + doneChunk)
		case "/base/html":
			_, _ = io.WriteString(w, "<html>")
		}
	}))
	defer server.Close()

	for path, wantFailure := range map[string]string{
		"/good": "", "/returns": "", "/long": "", "/tools": "", "/responses": "", "/messages": "", "/whole": "", "/unreported": "",
		"/full": "status_503", "/cut": "cut_stream", "/abort": "cut_stream", "/no-answer": "connect",
		"/event": "error_event", "/silent": "no_content", "/html": "no_content", "/unknown": "no_content",
	} {
		t.Run(path[1:], func(t *testing.T) {
			var s Sample
			requests := func(yield func(trace.Request, error) bool) {
				yield(trace.Request{Path: path, Text: "hello"}, nil)
			}
			got, err := OpenLoop(t.Context(), requests, Options{
				BaseURL: server.URL + "/base/", ReplicaHeader: "X-Replica", ReasonHeader: "X-Reason",
				Record: func(sample Sample) { s = sample },
			})
			if err != nil {
				t.Fatal(err)
			}
			if s.Failure != wantFailure || (s.Error == "") != (wantFailure == "") {
				t.Fatalf("failure %q (%s), want %q", s.Failure, s.Error, wantFailure)
			}
			if wantFailure != "" {
				if got.Failures[wantFailure] != 1 || got.Succeeded != 0 {
					t.Errorf("result %+v", got)
				}
				return
			}
			wantCached := 60
			if path == "/unreported" {
				wantCached = 0
			}
			if s.PromptTokens != 100 || s.CachedTokens != wantCached || s.CompletionTokens != 5 {
				t.Errorf("tokens %d, %d, %d; want 100, %d, 5", s.PromptTokens, s.CachedTokens, s.CompletionTokens, wantCached)
			}
			if (got.CachedReported == 1) != (wantCached > 0) {
				t.Errorf("%d answers stated cached tokens", got.CachedReported)
			}
			if s.TTFTSeconds <= 0 || s.TTFTSeconds > s.EndToEndSeconds {
				t.Errorf("first token after %v s, end after %v s", s.TTFTSeconds, s.EndToEndSeconds)
			}
			if !strings.HasPrefix(s.Replica, "replica-") || got.Reasons["match"] != 1 {
				t.Errorf("replica %q, reasons %v", s.Replica, got.Reasons)
			}
		})
	}
}

func TestTimeout(t *testing.T) {
	release := make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { <-release }))
	defer server.Close()
	defer close(release)
	got, err := OpenLoop(t.Context(), requestsAt(0), Options{BaseURL: server.URL, Timeout: 10 * time.Millisecond})
	if err != nil || got.Failures["timeout"] != 1 {
		t.Errorf("result %+v, error %v", got, err)
	}
}

func TestSessionHeader(t *testing.T) {
	var got atomic.Value
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { got.Store(r.Header.Get("X-Session-ID")) }))
	defer server.Close()
	if _, err := ClosedLoop(t.Context(), sessionsOf(t, "0 a"), Options{BaseURL: server.URL, SessionHeader: "X-Session-ID"}); err != nil {
		t.Fatal(err)
	}
	if got.Load() != "a" {
		t.Errorf("session header %q, want a", got.Load())
	}
}
