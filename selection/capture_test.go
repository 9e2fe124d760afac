// SPDX-License-Identifier: Apache-2.0

package selection

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/capture"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/trace"
)

// marker is text that must not be found anywhere but in the request.
const marker = "xyzzyMARKERplugh"

// teller is an upstream that answers like an engine: a stream or not, with the
// prompt's tokens and how many of them were cached.
func teller(t *testing.T, prompt, cached int) string {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var body struct{ Stream bool }
		if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
			w.WriteHeader(http.StatusBadRequest)
			return
		}
		usage := fmt.Sprintf(`{"choices": [], "usage": {"prompt_tokens": %d, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": %d}}}`, prompt, cached)
		if !body.Stream {
			_, _ = io.WriteString(w, usage)
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, `data: {"choices": [{"text": "`+marker+`"}], "usage": null}`+"\n\n")
		_ = http.NewResponseController(w).Flush()
		_, _ = io.WriteString(w, "data: "+usage+"\n\ndata: [DONE]\n\n")
	}))
	t.Cleanup(s.Close)
	return s.Listener.Addr().String()
}

// page reads a family's sum from Caddy's own metrics page.
func (p *proxy) page(t *testing.T, family string, labels ...string) float64 {
	t.Helper()
	resp, err := http.Get("http://" + p.addr + "/caddy-metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	sum := 0.0
next:
	for _, m := range families["caddy_kv_cache_"+family].GetMetric() {
		has := make(map[string]string)
		for _, l := range m.GetLabel() {
			has[l.GetName()] = l.GetValue()
		}
		for i := 0; i < len(labels); i += 2 {
			if has[labels[i]] != labels[i+1] {
				continue next
			}
		}
		sum += m.GetCounter().GetValue() + float64(m.GetHistogram().GetSampleCount())
	}
	return sum
}

// chat posts a chat of text and reads the answer.
func (p *proxy) chat(t *testing.T, c *http.Client, route, text string, stream bool) string {
	t.Helper()
	body, err := json.Marshal(map[string]any{
		"model": "m", "stream": stream, "max_tokens": 77,
		"messages": []map[string]string{{"role": "user", "content": text}},
	})
	if err != nil {
		t.Fatal(err)
	}
	resp, err := c.Do(p.request(t, http.MethodPost, route, "/v1/chat/completions", bytes.NewReader(body)))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(answer)
}

// lines waits for so many lines in a capture file.
func lines(t *testing.T, path string, n int) []capture.Line {
	t.Helper()
	var text []byte
	await(t, fmt.Sprint(n, " lines in ", path), func() bool {
		var err error
		text, err = os.ReadFile(path)
		return err == nil && bytes.Count(text, []byte("\n")) >= n
	})
	var all []capture.Line
	for line := range strings.Lines(string(text)) {
		var l capture.Line
		if err := json.Unmarshal([]byte(line), &l); err != nil {
			t.Fatalf("%v in %s", err, line)
		}
		all = append(all, l)
	}
	if len(all) != n {
		t.Fatalf("%d lines, want %d", len(all), n)
	}
	return all
}

func TestCapture(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("DIR", dir)
	path := filepath.Join(dir, "capture.jsonl")
	replica := teller(t, 1000, 640)
	aware := `{"policy": "kv_cache_aware", "metrics": {"off": true}, "capture": {"file": "{env.DIR}/capture.jsonl"}}`
	hash := `{"policy": "prefix_hash", "capture": {"file": "{env.DIR}/capture.jsonl"}}`
	p := run(t, map[string]string{
		"aware": `{"handler": "kv_cache_usage"}, ` + handler(aware, []string{replica}, "", ""),
		"hash":  handler(hash, []string{replica}, "", ""),
	})
	if info, err := os.Stat(path); err == nil && info.Size() > 0 {
		t.Error("something is written before any request")
	}
	c := newHTTPClient(t, false)
	text := strings.Repeat(marker+" ", 250)
	before := p.page(t, "group_real_hit_tokens_total", "group", "kv_cache_aware")
	p.chat(t, c, "aware", text, true)
	lines(t, path, 1) // so that the lines are in order
	p.chat(t, c, "aware", text, false)
	lines(t, path, 2)
	p.chat(t, c, "hash", text, true)
	lines(t, path, 3)
	resp, err := c.Do(p.request(t, http.MethodGet, "aware", "/v1/models?key="+marker, nil))
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	all := lines(t, path, 4)
	a, b, h, none := all[0], all[1], all[2], all[3]
	if a.API != "chat" || a.Model != "m" || !a.Stream || a.MaxTokens != 77 || a.Replica != replica || a.Status != 200 ||
		a.Policy != "kv_cache_aware" || a.Reason != "only" || a.Bytes < len(text) || a.Prompt < len(text)/8 || a.Attempts != 1 {
		t.Errorf("first line is %+v", a)
	}
	if a.PromptTokens == nil || *a.PromptTokens != 1000 || *a.CachedTokens != 640 || *a.OutputTokens != 3 {
		t.Errorf("the engine's figures are missing in %+v", a)
	}
	if a.TTFTMillis == nil || a.TotalMillis == nil || *a.TTFTMillis > *a.TotalMillis || b.TTFTMillis != nil {
		t.Errorf("times are %v and %v, then %v", a.TTFTMillis, a.TotalMillis, b.TTFTMillis)
	}
	if a.Blocks == "" || a.Blocks != b.Blocks || a.Salt != h.Salt || b.Hit == 0 {
		t.Errorf("the same prompt again is %+v, then %+v", a, b)
	}
	if h.Policy != "prefix_hash" || h.PromptTokens != nil || h.TTFTMillis != nil || len(h.Blocks) != len(a.Blocks) {
		t.Errorf("prefix_hash wrote %+v", h)
	}
	if none.Reason != string(ReasonNoBody) || none.Blocks != "" || none.Replica != replica {
		t.Errorf("a request without a prompt is %+v", none)
	}
	if now := p.page(t, "group_real_hit_tokens_total", "group", "kv_cache_aware"); now-before != 1280 {
		t.Errorf("%v real hit tokens are counted, want 1280", now-before)
	}
	if n := p.page(t, "capture_lines_total", "file", path); n != 4 {
		t.Errorf("%v lines are counted, want 4", n)
	}

	// The file and its secret outlive a reload.
	p.extra = "/again"
	c.CloseIdleConnections()
	p.load(t)
	p.chat(t, c, "aware", text, false)
	if again := lines(t, path, 5)[4]; again.Salt != a.Salt || again.Blocks != a.Blocks {
		t.Errorf("after a reload: %+v", again)
	}
	raw, err := os.ReadFile(path)
	if err != nil || bytes.Contains(raw, []byte(marker)) {
		t.Errorf("the file has text of the prompt or the answer in it: %s (%v)", raw, err)
	}
	tr, err := trace.Open(path)
	if err != nil || tr.Count != 4 || tr.Skipped.NoBody != 1 {
		t.Errorf("replay reads %+v, %v", tr, err)
	}
}

// Whatever ails the file, requests go on.
func TestCaptureThatFails(t *testing.T) {
	dir := t.TempDir()
	blocked := filepath.Join(dir, "blocked")
	if err := os.WriteFile(blocked, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	paths := []string{filepath.Join(blocked, "c.jsonl")}
	if _, err := os.Stat("/dev/full"); err == nil {
		paths = append(paths, "/dev/full")
	}
	for _, path := range paths {
		t.Run(filepath.Base(path), func(t *testing.T) {
			policy := fmt.Sprintf(`{"policy": "kv_cache_aware", "metrics": {"off": true}, "capture": {"file": %q}}`, path)
			p := run(t, map[string]string{"x": handler(policy, []string{teller(t, 1, 0)}, "", "")})
			c := newHTTPClient(t, false)
			for range 20 {
				if got := p.chat(t, c, "x", marker, false); !strings.Contains(got, `"prompt_tokens": 1`) {
					t.Fatalf("answer is %q", got)
				}
			}
			await(t, "the losses to be counted", func() bool {
				return p.page(t, "capture_dropped_total", "file", path, "reason", "write") == 20
			})
		})
	}
}

func TestCaptureConfigs(t *testing.T) {
	dir := t.TempDir()
	for config, want := range map[string]string{
		`{"file": "` + filepath.ToSlash(dir) + `/not/there/yet.jsonl"}`: "",
		`{}`:                                   "capture has no file",
		`{"file": "x", "roll_size": 1000}`:     "roll_size is 1000 bytes, but must be at least 1MiB",
		`{"file": "x", "roll_keep": -1}`:       "roll_keep is -1 files",
		`{"file": "{env.NOT_SET_ANYWHERE}/x"}`: "capture file '{env.NOT_SET_ANYWHERE}/x'",
	} {
		for _, policy := range []string{"kv_cache_aware", "prefix_hash"} {
			_, err := newContext(t).LoadModuleByID(policyNamespace+policy, json.RawMessage(`{"capture": `+config+`}`))
			if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
				t.Errorf("%s: %s: error is %v, want %q", policy, config, err, want)
			}
		}
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) > 0 {
		t.Errorf("provisioning made %v, %v", entries, err)
	}
}

// A client that leaves before any answer has its line too.
func TestCaptureOfAbortedRequest(t *testing.T) {
	path := filepath.Join(t.TempDir(), "c.jsonl")
	p := loadAware(t, fmt.Sprintf(`{"metrics": {"off": true}, "capture": {"file": %q}}`, path))
	r := complete(words("aborted", 1000))
	if p.Select(poolOf(2), r.Request, nil) == nil {
		t.Fatal("no upstream")
	}
	r.left(t, &p.core)
	l := lines(t, path, 1)[0]
	if l.Status != 0 || l.TotalMillis != nil || l.Replica == "" || time.Since(l.Time()) > time.Minute {
		t.Errorf("%+v", l)
	}
}

// Interface guards
var _ caddy.Destructor = (*captureFile)(nil)
