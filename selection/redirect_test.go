// SPDX-License-Identifier: Apache-2.0

package selection

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// An engine that sends us elsewhere has neither the prompt nor the key sent
// there, whatever we ask it.
func TestRedirectsAreNotFollowed(t *testing.T) {
	var astray atomic.Int64
	elsewhere := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { astray.Add(1) }))
	defer elsewhere.Close()
	paths := make(chan string, 1000)
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/metrics":
			_, _ = io.WriteString(w, `vllm:num_requests_running{model_name="m",engine="0"} 0`+"\n")
			return
		case "/v1/completions":
			_, _ = io.WriteString(w, "{}")
			return
		}
		paths <- r.URL.Path
		http.Redirect(w, r, elsewhere.URL+r.URL.Path, http.StatusTemporaryRedirect)
	}))
	defer engine.Close()
	t.Setenv("ENGINE_KEY", "s3cret")
	p := run(t, map[string]string{"x": handler(`{"policy": "kv_cache_aware", "api_key": "{env.ENGINE_KEY}",
		"kv_events": {"endpoint": "tcp://127.0.0.1:9"}, "metrics": {"interval": "50ms"}}`,
		[]string{engine.Listener.Addr().String()}, "", "")})
	f := fleets(t)[0]
	await(t, "a scrape", func() bool { return f.Views(time.Now())[0].Good > 0 })
	for _, model := range []string{"m", "unheard-of"} {
		body := `{"model": "` + model + `", "prompt": "` + strings.Repeat("a prompt that is learned; ", 100) + `"}`
		resp, err := http.DefaultClient.Do(p.request(t, http.MethodPost, "x", "/v1/completions", strings.NewReader(body)))
		if err != nil {
			t.Fatal(err)
		}
		_ = resp.Body.Close()
	}
	asked := make(map[string]bool)
	for !asked["/v1/completions/render"] || !asked["/v1/models"] {
		select {
		case path := <-paths:
			asked[path] = true
		case <-time.After(20 * time.Second):
			t.Fatalf("the engine was asked for %v", asked)
		}
	}
	await(t, "the learner to have failed", func() bool { s, _ := f.Learner(); return s.Failed > 0 })
	if n := astray.Load(); n > 0 {
		t.Errorf("%d requests were sent where the engine pointed", n)
	}
}
