// SPDX-License-Identifier: Apache-2.0

package command

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/admin"
)

func some[T any](v T) *T { return &v }

// chat is a fleet with one replica for each thing that can stand out.
var chat = admin.Fleet{
	Name: "chat", Policy: "kv_cache_aware", Waiting: 1, BytesPerToken: 4.1,
	Replicas: []admin.Replica{
		replica("vllm-0.inference.svc.cluster.local:8000", nil),
		replica("vllm-1:8000", func(r *admin.Replica) { r.State = "hung"; r.Ledger.InFlight = 7 }),
		replica("vllm-2:8000", func(r *admin.Replica) {
			r.Engine, r.Scrape.Age, r.Scrape.Error = nil, nil, "dial tcp: \x1b[31mconnection refused"
		}),
		replica("vllm-3:8000", func(r *admin.Replica) { r.Learned.Trust = 0.31; r.Engine.Facts["prefix_hit_ratio"] = 0.12 }),
		replica("vllm-4:8000", func(r *admin.Replica) { r.Ledger.Queued = 1_234_567 }),
		replica("vllm-5:8000", func(r *admin.Replica) { r.Learned.PrefillRate = 1200; r.Available = false }),
	},
}

func replica(addr string, change func(*admin.Replica)) admin.Replica {
	r := admin.Replica{
		Address: addr, State: "eligible", Available: true,
		Scrape:  admin.Scrape{Good: 100, Age: some(0.7)},
		Ledger:  admin.Ledger{InFlight: 12, Outstanding: 41_000, Queued: 3100, QueueKnown: true},
		Learned: admin.Learned{PrefillRate: 10_200, PrefillRateKnown: true, Trust: 0.97, Predicted: 2e6, Confirmed: 1.9e6},
		Cache:   admin.Cache{Held: 9000, Capacity: 10_000},
		Engine: &admin.Engine{Kind: "vllm", Age: 0.7, Facts: map[string]float64{
			"running_requests": 12, "waiting_requests": 0, "kv_usage_ratio": 0.43, "prefix_hit_ratio": 0.71,
			"prefix_hit_tokens_total": 710_000, "prefix_query_tokens_total": 1_000_000,
		}},
	}
	if change != nil {
		change(&r)
	}
	return r
}

var explanation = admin.Explanation{
	Fleet: "chat", Policy: "kv_cache_aware", Replica: "vllm-1:8000", Reason: "balance", Waits: true, Ahead: 2,
	API: "chat", Key: "00c0ffee00c0ffee", Blocks: 190, PromptTokens: 12_300, Truncated: true,
	Candidates: []admin.Candidate{
		{Replica: "vllm-0:8000", State: "drained", Available: true, Matched: some(12_000.0), Cost: &admin.Cost{Total: 92_000, Queue: 90_000, Compute: 900, Requests: 1100, Pace: 1}},
		{Replica: "vllm-1:8000", State: "eligible", Available: true, Allowed: true, Chosen: true, Matched: some(0.0), Cost: &admin.Cost{Total: 36_900, Compute: 36_900, Pace: 1}},
		{Replica: "vllm-2:8000", State: "eligible"},
	},
}

// asked is a request that the stand-in for Caddy's admin endpoint got.
type asked struct{ method, uri, header, body string }

// standIn answers as Caddy's admin endpoint does, with one value for each path.
func standIn(t *testing.T, answers map[string]any) (address string, got *asked) {
	t.Helper()
	got = new(asked)
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		*got = asked{r.Method, r.URL.RequestURI(), r.Header.Get("X-Session-Id"), string(body)}
		answer, ok := answers[r.URL.Path]
		if err, refused := answer.(error); refused {
			w.WriteHeader(http.StatusConflict)
			answer = map[string]string{"error": err.Error()}
		} else if !ok {
			w.WriteHeader(http.StatusNotFound)
			return
		}
		if err := json.NewEncoder(w).Encode(answer); err != nil {
			t.Error(err)
		}
	}))
	t.Cleanup(s.Close)
	return s.Listener.Addr().String(), got
}

// execute runs one of the commands, as `caddy kv-cache` does.
func execute(t *testing.T, in string, args ...string) (string, error) {
	t.Helper()
	root := &cobra.Command{Use: "kv-cache", SilenceUsage: true, SilenceErrors: true}
	for _, c := range subcommands {
		root.AddCommand(c())
	}
	var out strings.Builder
	root.SetOut(&out)
	root.SetErr(io.Discard)
	root.SetIn(strings.NewReader(in))
	root.SetArgs(args)
	err := root.ExecuteContext(t.Context())
	return out.String(), err
}

func TestStatus(t *testing.T) {
	addr, got := standIn(t, map[string]any{"/kv_cache/fleets": []admin.Fleet{chat}})
	out, err := execute(t, "", "status", "--address", addr)
	if err != nil {
		t.Fatal(err)
	}
	if got.method != "GET" || got.uri != "/kv_cache/fleets" {
		t.Errorf("asked %+v", got)
	}
	for _, part := range []string{
		"chat  kv_cache_aware  4 of 6 replicas eligible, 1 request held back",
		"hit rate 71% as the engines count, 95% of the predicted hits confirmed",
		"…c.cluster.local:8000 eligible",
		"! vllm-1:8000 is avoided: hung, with 7 requests in flight",
		"! vllm-2:8000 can't be scraped: dial tcp: \uFFFD[31mconnection refused",
		"! vllm-3:8000 has only 31% of the hits that are predicted",
		"! vllm-3:8000 has a hit rate of 12%; the median is 71%",
		"! vllm-4:8000 has piled up 1.2M uncached tokens; the median is 3.1k",
		"! vllm-5:8000 is unhealthy or full in Caddy's eyes",
		"! vllm-5:8000 is slow: 1.2k tokens a second; the median is 10k",
	} {
		if !strings.Contains(out, part) {
			t.Errorf("status lacks %q:\n%s", part, out)
		}
	}
	if strings.Contains(out, "\x1b") {
		t.Errorf("status lets others steer the terminal: %q", out)
	}
	fits(t, out)
	t.Logf("\n%s", out)
}

// fits checks that text can be read on 80 columns.
func fits(t *testing.T, out string) {
	t.Helper()
	for line := range strings.Lines(out) {
		if n := utf8.RuneCountInString(strings.TrimSuffix(line, "\n")); n > 80 {
			t.Errorf("%d columns: %s", n, line)
		}
	}
}

func TestStatusOfNothing(t *testing.T) {
	addr, _ := standIn(t, map[string]any{"/kv_cache/fleets": []admin.Fleet{}})
	out, err := execute(t, "", "status", "--address", addr)
	if err != nil || !strings.Contains(out, "no policy of its config") {
		t.Errorf("%q, %v", out, err)
	}
	empty := admin.Fleet{Name: "empty", Policy: "prefix_hash"}
	addr, _ = standIn(t, map[string]any{"/kv_cache/fleets": []admin.Fleet{empty}})
	out, err = execute(t, "", "status", "--address", addr)
	if err != nil || !strings.Contains(out, "0 of 0 replicas") || !strings.Contains(out, "hit rate - as") {
		t.Errorf("%q, %v", out, err)
	}
}

func TestJSON(t *testing.T) {
	addr, got := standIn(t, map[string]any{
		"/kv_cache/fleets":  []admin.Fleet{chat},
		"/kv_cache/explain": explanation,
		"/kv_cache/drain":   admin.Outcome{Replica: "vllm-1:8000", State: "drained"},
	})
	for _, c := range []struct {
		args []string
		uri  string
	}{
		{[]string{"status", "--fleet", "chat"}, "/kv_cache/fleets?fleet=chat"},
		{[]string{"explain"}, "/kv_cache/explain?path=%2Fv1%2Fchat%2Fcompletions"},
		{[]string{"drain", "vllm-1:8000", "--force"}, "/kv_cache/drain?force=true&replica=vllm-1%3A8000"},
	} {
		out, err := execute(t, "{}", append(c.args, "--json", "--address", addr)...)
		if err != nil {
			t.Fatal(err)
		}
		if !json.Valid([]byte(out)) || got.uri != c.uri {
			t.Errorf("%v asked %s and printed %s", c.args, got.uri, out)
		}
	}
}

func TestExplain(t *testing.T) {
	addr, got := standIn(t, map[string]any{"/kv_cache/explain": explanation})
	file := filepath.Join(t.TempDir(), "request.json")
	if err := os.WriteFile(file, []byte(`{"prompt": "x"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := execute(t, "", "explain", file, "--address", addr, "--fleet", "chat", "--path", "/v1/completions", "-H", "X-Session-ID: 7")
	if err != nil {
		t.Fatal(err)
	}
	if want := (asked{"POST", "/kv_cache/explain?fleet=chat&path=%2Fv1%2Fcompletions", "7", `{"prompt": "x"}`}); *got != want {
		t.Errorf("asked %+v, want %+v", *got, want)
	}
	for _, part := range []string{
		"chat (kv_cache_aware): API chat, 12k tokens in 190 blocks up to max_body",
		"goes to vllm-1:8000 (balance):\n  another holds more of the prompt, but costs more\n",
		"is held back until there is room, behind 2 requests",
		"> vllm-1:8000", "full", "drained", "92k",
	} {
		if !strings.Contains(out, part) {
			t.Errorf("explain lacks %q:\n%s", part, out)
		}
	}
	fits(t, out)
	t.Logf("\n%s", out)
}

func TestExplainOtherwise(t *testing.T) {
	for _, c := range []struct {
		x    admin.Explanation
		part string
	}{
		{admin.Explanation{Policy: "kv_cache_aware", Reason: "none"}, "goes nowhere: no replica is available"},
		{admin.Explanation{Policy: "kv_cache_aware", Reason: "no_prompt"}, "the fallback policy decides (no_prompt):\n  the path is of no API"},
		{admin.Explanation{Policy: "kv_cache_aware", Reason: "no_match", Replica: "b", Candidates: []admin.Candidate{
			{Replica: "b", State: "eligible", Available: true, Chosen: true, Cost: &admin.Cost{Queue: 900, Total: 900}},
			{Replica: "c", State: "eligible", Available: true, Cost: &admin.Cost{Away: 4000, Total: 4000}},
		}}, " AWAY   COST\n"},
		{admin.Explanation{Policy: "prefix_hash", Reason: "overflow", Replica: "b", Candidates: []admin.Candidate{
			{Replica: "b", State: "eligible", Available: true, Chosen: true, Place: some(2), Outstanding: some(1500.0)},
			{Replica: "c", State: "eligible", Available: true},
		}}, "goes to b (overflow):\n  the prompt's home is over its bound"},
	} {
		addr, _ := standIn(t, map[string]any{"/kv_cache/explain": c.x})
		out, err := execute(t, "{}", "explain", "-", "--address", addr)
		if err != nil || !strings.Contains(out, c.part) {
			t.Errorf("%q, %v; want %q", out, err, c.part)
		}
		fits(t, out)
	}
}

func TestDecisions(t *testing.T) {
	now := time.Now()
	list := []admin.Decision{
		{At: now.Add(-3 * time.Second), Replica: "vllm-0:8000", Reason: "match", Key: "00c0ffee00c0ffee", PromptTokens: 11_580, HitTokens: 11_392, Cost: some(4710.0), NextCost: some(37_860.0), Waited: 1.25, Attempt: 1},
		{At: now.Add(-time.Hour), Replica: "vllm-1:8000", Reason: "incremental", Attempt: 1},
	}
	addr, got := standIn(t, map[string]any{"/kv_cache/decisions": list})
	out, err := execute(t, "", "decisions", "--address", addr, "--limit", "7")
	if err != nil || got.uri != "/kv_cache/decisions?limit=7" {
		t.Fatalf("%+v, %v", got, err)
	}
	for _, part := range []string{
		"  3s vllm-0:8000           match          12k   11k  4.7k   38k  1.2s 00c0ffee",
		" 60m vllm-1:8000           incremental      0     0     -     -     -",
	} {
		if !strings.Contains(out, part) {
			t.Errorf("decisions lack %q:\n%s", part, out)
		}
	}
	fits(t, out)
	out, err = execute(t, "", "decisions", "--address", addr, "--key", "00c0", "--json")
	var kept []admin.Decision
	if err != nil || json.Unmarshal([]byte(out), &kept) != nil || len(kept) != 1 {
		t.Errorf("%q, %v", out, err)
	}
}

func TestDrain(t *testing.T) {
	addr, got := standIn(t, map[string]any{
		"/kv_cache/drain":   fmt.Errorf("a:1 is the last eligible replica of fleet %q", "chat"),
		"/kv_cache/undrain": admin.Outcome{Message: "a:1 takes new requests again", InFlight: 1},
		"/kv_cache/forget":  admin.Outcome{Message: "a:1 is believed to hold nothing"},
	})
	if _, err := execute(t, "", "drain", "a:1", "--address", addr); err == nil || err.Error() != `a:1 is the last eligible replica of fleet "chat"` {
		t.Errorf("drain: %v", err)
	}
	out, err := execute(t, "", "undrain", "a:1", "--address", addr)
	if err != nil || out != "a:1 takes new requests again (1 request in flight)\n" {
		t.Errorf("undrain: %q, %v", out, err)
	}
	if _, err := execute(t, "", "forget", "a:1", "--fleet", "chat", "--address", addr); err != nil || got.uri != "/kv_cache/forget?fleet=chat&replica=a%3A1" {
		t.Errorf("forget: %+v, %v", got, err)
	}
}

// TestErrors checks what the commands say when they can't do their work.
func TestErrors(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	dead := l.Addr().String()
	l.Close()
	plain, _ := standIn(t, nil)
	wrong, _ := standIn(t, map[string]any{"/kv_cache/fleets": "no list"})
	for _, c := range []struct {
		args []string
		part string
	}{
		{[]string{"status", "--address", dead}, "is Caddy running, and its admin endpoint on?"},
		{[]string{"status", "--address", plain}, "built without caddy-kv-cache"},
		{[]string{"status", "--address", wrong}, "reading the answer"},
		{[]string{"status", "--address", "not an address:x"}, "invalid admin address"},
		{[]string{"status", "--config", "no such file.json"}, "finding the admin endpoint"},
		{[]string{"status", "surplus"}, "unknown command"},
		{[]string{"explain", "no such file.json", "--address", plain}, "opening the request's body"},
		{[]string{"explain", "-", "--address", plain, "-H", "nonsense"}, "must be 'Name: value'"},
		{[]string{"drain", "--address", plain}, "accepts 1 arg"},
	} {
		_, err := execute(t, "", c.args...)
		if err == nil || !strings.Contains(err.Error(), c.part) {
			t.Errorf("%v: %v; want %q", c.args, err, c.part)
		}
	}
}

func TestCompletion(t *testing.T) {
	addr, _ := standIn(t, map[string]any{
		"/kv_cache/fleets":   []admin.Fleet{chat},
		"/kv_cache/replicas": chat.Replicas,
	})
	for _, c := range []struct {
		args []string
		part string
	}{
		{[]string{"drain", "--address", addr, ""}, "vllm-1:8000"},
		{[]string{"status", "--address", addr, "--fleet", ""}, "chat"},
	} {
		out, err := execute(t, "", append([]string{cobra.ShellCompRequestCmd}, c.args...)...)
		if err != nil || !strings.Contains(out, c.part) {
			t.Errorf("%v completes to %q, %v", c.args, out, err)
		}
	}
}

// TestTop looks twice: what grew in between is the rate.
func TestTop(t *testing.T) {
	addr, _ := standIn(t, map[string]any{"/kv_cache/fleets": []admin.Fleet{chat}})
	ctx, stop := context.WithCancel(t.Context())
	var out pages
	out.enough = stop
	f := &topFlags{endpoint: endpoint{address: addr}, interval: shortestLook}
	if err := f.run(ctx, &out); err != nil {
		t.Fatal(err)
	}
	if len(out.shown) < 2 || !strings.Contains(out.shown[1], "0 requests/s  0 prompt tokens/s computed") {
		t.Errorf("top showed %q", out.shown)
	}
	if err := (&topFlags{interval: time.Millisecond}).run(ctx, io.Discard); err == nil || !strings.Contains(err.Error(), "at least 100ms") {
		t.Errorf("a hasty top: %v", err)
	}
}

// pages takes what top shows, and stops it after the second page.
type pages struct {
	shown  []string
	enough func()
}

func (p *pages) Write(b []byte) (int, error) {
	if p.shown = append(p.shown, string(b)); len(p.shown) == 2 {
		p.enough()
	}
	return len(b), nil
}

func TestRates(t *testing.T) {
	grown := admin.Fleet{Name: "chat", Replicas: []admin.Replica{replica("a", nil), replica("new", nil)}}
	grown.Replicas[0].Engine.Facts["first_tokens_total"] = 30
	grown.Replicas[0].Engine.Facts["prefix_query_tokens_total"] += 10_000
	grown.Replicas[0].Engine.Facts["prefix_hit_tokens_total"] += 2_000
	was := admin.Fleet{Name: "chat", Replicas: []admin.Replica{replica("a", nil)}}
	out := page([]admin.Fleet{grown}, []admin.Fleet{was}, 2*time.Second)
	for _, part := range []string{"15 requests/s  4.0k prompt tokens/s computed", " 20%", " 71%"} {
		if !strings.Contains(out, part) {
			t.Errorf("top lacks %q:\n%s", part, out)
		}
	}
	fits(t, out)
}
