// SPDX-License-Identifier: Apache-2.0

package selection

import (
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/kvevents/kvpublish"
)

// eventEngine is an engine whose API listens on a port and whose events are published on the next; a byte is a token.
type eventEngine struct {
	t         *testing.T
	addr      string
	api       *httptest.Server
	publisher *kvpublish.Publisher
	served    atomic.Int64
	tokenized atomic.Int64
}

const eventBlock = 64

func newEventEngine(t *testing.T) *eventEngine {
	t.Helper()
	for range 100 {
		front, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		host, port, _ := net.SplitHostPort(front.Addr().String())
		n, _ := strconv.Atoi(port)
		pub, err := net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(n+1)))
		if err != nil {
			_ = front.Close()
			continue
		}
		replay, err := net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(n+2)))
		if err != nil {
			_, _ = front.Close(), pub.Close()
			continue
		}
		e := &eventEngine{t: t, addr: front.Addr().String(), publisher: kvpublish.New(pub, replay, kvpublish.Config{})}
		e.api = &httptest.Server{Listener: front, Config: &http.Server{Handler: e}}
		e.api.Start()
		return e
	}
	t.Fatal("no two ports side by side are free")
	return nil
}

func (e *eventEngine) close() {
	e.api.Close()
	if err := e.publisher.Close(); err != nil {
		e.t.Error(err)
	}
}

func (e *eventEngine) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	switch {
	case r.URL.Path == "/metrics":
		_, _ = io.WriteString(w, `vllm:num_requests_running{model_name="m",engine="0"} 0
vllm:cache_config_info{block_size="64",num_gpu_blocks="1000",enable_prefix_caching="True",engine="0"} 1
`)
	case r.URL.Path == "/tokenize":
		e.tokenized.Add(1)
		if r.Header.Get("Authorization") != "Bearer k" {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		_ = json.NewEncoder(w).Encode(map[string]any{"tokens": bytesAsTokens(promptOf(body))})
	case strings.HasSuffix(r.URL.Path, "/render"):
		w.WriteHeader(http.StatusForbidden)
	default:
		e.served.Add(1)
		_, _ = io.WriteString(w, "{}")
	}
}

func promptOf(body []byte) string {
	var fields struct{ Prompt string }
	_ = json.Unmarshal(body, &fields) // an empty prompt fails the test later
	return fields.Prompt
}

func bytesAsTokens(s string) []uint32 {
	tokens := make([]uint32, len(s))
	for i := range s {
		tokens[i] = uint32(s[i])
	}
	return tokens
}

// store publishes that the engine holds a text; remove that it dropped it.
func (e *eventEngine) store(text string) {
	n := len(text) / eventBlock
	var b kvpublish.Batch
	b.Stored(kvpublish.Stored{Hashes: eventHashes(n), Tokens: bytesAsTokens(text[:n*eventBlock]), BlockSize: eventBlock})
	e.publisher.Publish(&b)
}

func (e *eventEngine) remove(text string) {
	var b kvpublish.Batch
	b.Removed("", eventHashes(len(text)/eventBlock)...)
	e.publisher.Publish(&b)
}

func eventHashes(n int) []uint64 {
	hashes := make([]uint64, n)
	for i := range hashes {
		hashes[i] = uint64(i + 1)
	}
	return hashes
}

// A prompt follows its blocks from the replica that dropped them to one that somebody else had store them.
func TestSelectFollowsEvents(t *testing.T) {
	t.Setenv("ENGINE_KEY", "k")
	known := goleak.IgnoreCurrent()
	t.Run("run", func(t *testing.T) {
		engines := []*eventEngine{newEventEngine(t), newEventEngine(t)}
		addrs := []string{engines[0].addr, engines[1].addr}
		p := run(t, map[string]string{"x": handler(`{"policy": "kv_cache_aware", "api_key": "{env.ENGINE_KEY}",
			"kv_events": {"endpoint": "tcp://{host}:{port+1}", "replay": "tcp://{host}:{port+2}"},
			"metrics": {"interval": "50ms"}}`, addrs,
			`, "headers": {"response": {"set": {"X-Why": ["{http.reverse_proxy.kv_cache.reason}, {http.reverse_proxy.kv_cache.matched_tokens} tokens matched"]}}}`, "")})
		t.Cleanup(func() {
			for _, e := range engines {
				e.close()
			}
		})
		f := fleets(t)[0]
		for _, r := range f.Members() {
			await(t, "the events of "+r.Addr, func() bool { s, _ := r.Events(); return s.Current && s.Whole })
		}
		for _, r := range f.Members() {
			await(t, "the metrics of "+r.Addr, func() bool { serves, _ := r.Serves("m"); return serves })
		}
		// What was learned of a text outlives the config.
		text := strings.Repeat(fmt.Sprintf("what prompt %x may say, again and again; ", rand.Uint64()), 80)
		body := fmt.Sprintf(`{"model": "m", "prompt": %q}`, text)
		ask := func() (home int, why string) {
			t.Helper()
			before := engines[0].served.Load()
			resp, err := http.DefaultClient.Do(p.request(t, http.MethodPost, "x", "/v1/completions", strings.NewReader(body)))
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			if resp.StatusCode != http.StatusOK {
				t.Fatalf("status %d", resp.StatusCode)
			}
			_, _ = io.Copy(io.Discard, resp.Body)
			// The client has its answer before the policy knows that the request is over.
			await(t, "the request to be over", func() bool { return inFlight(t) == 0 })
			if engines[0].served.Load() > before {
				return 0, resp.Header.Get("X-Why")
			}
			return 1, resp.Header.Get("X-Why")
		}
		home, _ := ask()
		engines[home].store(text)
		blocks := func(i, want int) func() bool {
			return func() bool { s, _ := f.Replica(addrs[i], time.Now()).Events(); return s.Blocks == want }
		}
		await(t, "the blocks to be heard of", blocks(home, len(text)/eventBlock))
		await(t, "the tokens to be learned", func() bool { s, _ := f.Learner(); return s.Tokenized == 1 })
		for range 5 {
			if at, why := ask(); at != home {
				t.Fatalf("the prompt went to engine %d, which does not hold it: %s", at, why)
			}
		}
		engines[home].remove(text)
		engines[1-home].store(text)
		await(t, "the blocks to be gone", blocks(home, 0))
		await(t, "the blocks to be there", blocks(1-home, len(text)/eventBlock))
		for range 5 {
			if at, why := ask(); at != 1-home {
				t.Fatalf("the prompt went to engine %d, which dropped it: %s", at, why)
			}
		}
		if n := engines[0].tokenized.Load() + engines[1].tokenized.Load(); n != 1 {
			t.Errorf("tokens were asked for %d times", n)
		}
		http.DefaultClient.CloseIdleConnections()
	})
	goleak.VerifyNone(t, known, goleak.IgnoreTopFunction("net/http.(*conn).serve"),
		goleak.IgnoreAnyFunction("github.com/caddyserver/certmagic.keepLockfileFresh")) // sleeps before it looks
}
