// SPDX-License-Identifier: Apache-2.0

package kvevents_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/kvevents"
)

// engine answers with a status and a body for each path, and notes the paths asked for.
type engine struct {
	*httptest.Server
	mu    sync.Mutex
	asked []string
}

func startEngine(t *testing.T, answers map[string]string) *engine {
	e := &engine{}
	e.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		e.mu.Lock()
		e.asked = append(e.asked, r.URL.Path)
		e.mu.Unlock()
		if string(body) != `{"model":"m"}` || r.Header.Get("Authorization") != "Bearer k" {
			w.WriteHeader(http.StatusBadRequest)
			return
		}
		answer, ok := answers[r.URL.Path]
		switch {
		case !ok:
			w.WriteHeader(http.StatusNotFound)
		case answer == "hang":
			<-r.Context().Done()
		case strings.HasPrefix(answer, "status "):
			var status int
			_, _ = fmt.Sscanf(answer, "status %d", &status)
			w.WriteHeader(status)
		default:
			_, _ = io.WriteString(w, answer)
		}
	}))
	t.Cleanup(e.Close)
	return e
}

func (e *engine) paths() string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return strings.Join(e.asked, " ")
}

// startLearner returns a learner that runs until the test ends.
func startLearner(t *testing.T, config kvevents.LearnerConfig) (*kvevents.Learner, *kvevents.Alignment) {
	transport := &http.Transport{}
	config.Client = &http.Client{Transport: transport}
	config.PerSecond = 1000
	a := kvevents.NewAlignment(kvevents.AlignmentConfig{})
	l := kvevents.NewLearner(a, config)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- l.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("run ended with %v", err)
		}
		transport.CloseIdleConnections()
	})
	return l, a
}

func (e *engine) request(path string, chain ...uint64) kvevents.Request {
	return kvevents.Request{
		Base: e.URL, Path: path, Header: http.Header{"Authorization": {"Bearer k"}}, Body: []byte(`{"model":"m"}`),
		Prompt: kvevents.Prompt{Chain: chain, BlockSizes: []int{2}},
	}
}

func TestLearner(t *testing.T) {
	const chat, completions = "/v1/chat/completions", "/v1/completions"
	render := `{"request_id":"x","token_ids":[1,2,3,4],"features":null,"sampling_params":{}}`
	for _, tc := range []struct {
		name    string
		path    string
		answers map[string]string
		want    kvevents.LearnerStats
		asked   string
		learned bool
	}{
		{"render", chat, map[string]string{chat + "/render": render}, kvevents.LearnerStats{Rendered: 1}, chat + "/render", true},
		{"render of completions", completions, map[string]string{completions + "/render": "[" + render + "]"}, kvevents.LearnerStats{Rendered: 1}, completions + "/render", true},
		{"render refused", chat, map[string]string{chat + "/render": "status 403", "/tokenize": `{"count":4,"tokens":[1,2,3,4]}`},
			kvevents.LearnerStats{Tokenized: 1, RenderRefused: 1}, chat + "/render /tokenize", true},
		{"no render, under a prefix", "/a/v1/completions", map[string]string{"/a/tokenize": `{"tokens":[1,2,3,4]}`},
			kvevents.LearnerStats{Tokenized: 1, RenderRefused: 1}, "/a/v1/completions/render /a/tokenize", true},
		{"nothing offered", chat, nil, kvevents.LearnerStats{Unsupported: 1, RenderRefused: 1}, chat + "/render /tokenize", false},
		{"no tokenizer for the API", "/v1/responses", nil, kvevents.LearnerStats{Unsupported: 1, RenderRefused: 1}, "/v1/responses/render", false},
		{"an image", chat, map[string]string{chat + "/render": `{"token_ids":[1,2],"features":{"mm_hashes":{"image":["a"]}}}`},
			kvevents.LearnerStats{Unsupported: 1}, chat + "/render", false},
		{"overloaded", chat, map[string]string{chat + "/render": "status 503"}, kvevents.LearnerStats{Failed: 1}, chat + "/render", false},
		{"no JSON", chat, map[string]string{chat + "/render": "<html>"}, kvevents.LearnerStats{Failed: 1}, chat + "/render", false},
		{"no tokens", chat, map[string]string{chat + "/render": "[]"}, kvevents.LearnerStats{Failed: 1}, chat + "/render", false},
		{"negative tokens", chat, map[string]string{chat + "/render": `{"token_ids":[-1]}`}, kvevents.LearnerStats{Failed: 1}, chat + "/render", false},
		{"answer too long", chat, map[string]string{chat + "/render": `{"token_ids":[1` + strings.Repeat(",1", 4000) + `]}`},
			kvevents.LearnerStats{Failed: 1}, chat + "/render", false},
		{"hangs", chat, map[string]string{chat + "/render": "hang"}, kvevents.LearnerStats{Failed: 1}, chat + "/render", false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			e := startEngine(t, tc.answers)
			config := kvevents.LearnerConfig{AnswerBytes: 4096}
			if tc.name == "hangs" {
				config.Timeout = 20 * time.Millisecond
			}
			l, a := startLearner(t, config)
			if !l.Offer(e.request(tc.path, 11, 12)) {
				t.Fatal("not queued")
			}
			tc.want.Offered = 1
			await(t, "the outcome", func() bool { return l.Stats() == tc.want })
			if got := e.paths(); got != tc.asked {
				t.Errorf("asked for %q, want %q", got, tc.asked)
			}
			await(t, "the prompt", func() bool { return (a.Known([]uint64{11, 12}) == 2) == tc.learned })
		})
	}
}

func TestLearnerRemembersRefusal(t *testing.T) {
	e := startEngine(t, map[string]string{"/tokenize": `{"tokens":[1,2,3,4]}`})
	l, _ := startLearner(t, kvevents.LearnerConfig{})
	for i := range uint64(5) {
		l.Offer(e.request("/v1/chat/completions", 100*i+1, 100*i+2))
		await(t, "the outcome", func() bool { return l.Stats().Tokenized == i+1 })
	}
	if got := strings.Count(e.paths(), "/render"); got != 1 {
		t.Errorf("render asked for %d times, want once", got)
	}
}

// A client that would follow redirects does not: the body is a prompt.
func TestLearnerFollowsNoRedirect(t *testing.T) {
	elsewhere := startEngine(t, nil)
	e := &engine{Server: httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		http.Redirect(w, r, elsewhere.URL+r.URL.Path, http.StatusTemporaryRedirect)
	}))}
	t.Cleanup(e.Close)
	l, _ := startLearner(t, kvevents.LearnerConfig{})
	l.Offer(e.request("/v1/completions", 1, 2, 3))
	for end := time.Now().Add(20 * time.Second); l.Stats().Failed == 0; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%+v", l.Stats())
		}
	}
	if got := elsewhere.paths(); got != "" {
		t.Errorf("the prompt was sent to %s", got)
	}
}

// An engine that ceases to tell tokens, or tells others than it computed with, is told of once, and once when it is well.
func TestLearnerNotifies(t *testing.T) {
	const path = "/v1/completions"
	var mu sync.Mutex
	answers := map[string]string{}
	answer := func(body string) {
		mu.Lock()
		defer mu.Unlock()
		answers[path+"/render"] = body
	}
	e := &engine{Server: httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		if answers[r.URL.Path] == "" {
			w.WriteHeader(http.StatusInternalServerError)
		}
		_, _ = io.WriteString(w, answers[r.URL.Path])
	}))}
	t.Cleanup(e.Close)
	var notes []string
	l, a := startLearner(t, kvevents.LearnerConfig{
		Confirm: func(_ kvevents.Request, tokens []uint32) bool { return tokens[0] == 1 },
		Notify: func(base string, err error) {
			if base != e.URL {
				t.Errorf("told of %s", base)
			}
			mu.Lock()
			defer mu.Unlock()
			notes = append(notes, fmt.Sprint(err))
		},
	})
	next := uint64(0)
	for _, tc := range []struct {
		answer string
		want   kvevents.LearnerStats
	}{
		{`[{"token_ids":[1,2,3,4]}]`, kvevents.LearnerStats{Rendered: 2}},
		{"", kvevents.LearnerStats{Rendered: 2, Failed: 2}},
		{`[{"token_ids":[1,2,3,4]}]`, kvevents.LearnerStats{Rendered: 4, Failed: 2}},
		{`[{"token_ids":[9,2,3,4]}]`, kvevents.LearnerStats{Rendered: 4, Failed: 2, Mismatched: 2}},
		{`[{"token_ids":[7],"features":{"mm_hashes":{"image":["a"]}}}]`, kvevents.LearnerStats{Rendered: 4, Failed: 2, Mismatched: 2, Unsupported: 2}},
	} {
		answer(tc.answer)
		for range 2 {
			next++
			l.Offer(e.request(path, 100*next, 100*next+1))
		}
		tc.want.Offered = next
		await(t, "the outcome", func() bool { return l.Stats() == tc.want })
	}
	if known := a.Known([]uint64{700, 701}); known != 0 {
		t.Errorf("%d blocks are learned of a prompt with other tokens", known)
	}
	mu.Lock()
	defer mu.Unlock()
	if want := []string{"/v1/completions/render answered 500 Internal Server Error", "<nil>", "tokens are not those of the engine's events"}; !slices.Equal(notes, want) {
		t.Errorf("told of %q, want %q", notes, want)
	}
}

func TestLearnerQueue(t *testing.T) {
	a := kvevents.NewAlignment(kvevents.AlignmentConfig{})
	a.Learn(kvevents.Prompt{Chain: []uint64{1, 2, 3}, Tokens: []uint32{1, 2, 3}, BlockSizes: []int{2}})
	l := kvevents.NewLearner(a, kvevents.LearnerConfig{Queue: 3, QueueBytes: 100}) // not running
	e := startEngine(t, nil)
	for _, tc := range []struct {
		name  string
		chain []uint64
		body  int
		want  bool
	}{
		{"no full block", nil, 1, false},
		{"known", []uint64{1, 2, 3}, 1, false},
		{"nearly known", []uint64{1, 2, 3, 4}, 1, false},
		{"half known", []uint64{1, 2, 3, 4, 5, 6}, 1, true},
		{"waiting already", []uint64{1, 2, 3, 4, 5, 6}, 1, false},
		{"too many bytes", []uint64{7}, 100, false},
		{"second", []uint64{8}, 1, true},
		{"third", []uint64{9}, 1, true},
		{"fourth", []uint64{10}, 1, false},
	} {
		r := e.request("/v1/completions", tc.chain...)
		r.Body = make([]byte, tc.body)
		if got := l.Offer(r); got != tc.want {
			t.Errorf("%s: queued %t, want %t", tc.name, got, tc.want)
		}
	}
	if got, want := l.Stats(), (kvevents.LearnerStats{Offered: 9, Known: 4, Full: 2, Waiting: 3}); got != want {
		t.Errorf("stats %+v, want %+v", got, want)
	}
}

func TestLearnerDropsStale(t *testing.T) {
	e := startEngine(t, map[string]string{"/v1/completions/render": "hang"})
	l, _ := startLearner(t, kvevents.LearnerConfig{MaxAge: time.Nanosecond})
	l.Offer(e.request("/v1/completions", 1))
	await(t, "the drop", func() bool { return l.Stats().Stale == 1 && l.Stats().Waiting == 0 })
	if !l.Offer(e.request("/v1/completions", 1)) {
		t.Error("a dropped prompt cannot be offered again")
	}
}
