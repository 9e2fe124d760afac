// SPDX-License-Identifier: Apache-2.0

package admin_test

import (
	"encoding/json"
	"errors"
	"io"
	"math"
	"net/http"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/admin"
)

const secret = "the quick brown fox knows a secret "

// TestFleets looks at two fleets over the same engines, before and after
// requests and over a reload.
func TestFleets(t *testing.T) {
	addrs := engines(t, 2)
	s := start(t, proxy(aware, addrs...), proxy(hash, addrs...))
	list := ask[[]admin.Fleet](t, s, "GET", "fleets", nil, "")
	if len(list) != 2 || list[0].Name != "chat" || list[1].Name != "embed" {
		t.Fatalf("fleets are %+v", list)
	}
	if list[0].Policy != "kv_cache_aware" || list[1].Policy != "prefix_hash" {
		t.Errorf("policies are %s and %s", list[0].Policy, list[1].Policy)
	}
	for range 3 {
		s.complete(t, 0, strings.Repeat(secret, 100))
	}
	await(t, "the engines' own figures", func() bool {
		sum := 0.0
		for _, r := range ask[[]admin.Replica](t, s, "GET", "replicas", nil, "") {
			if r.Engine != nil {
				sum += r.Engine.Facts["prefix_hit_tokens_total"]
			}
		}
		return sum > 0
	})
	replicas := ask[[]admin.Replica](t, s, "GET", "replicas", params("fleet", "chat"), "")
	held := 0.0
	for _, r := range replicas {
		held += r.Cache.Held
		if r.State != "eligible" || !r.Available || r.Engine.Kind != "vllm" || r.Scrape.Age == nil || *r.Scrape.Age != r.Engine.Age {
			t.Errorf("replica %+v with engine %+v", r, r.Engine)
		}
		if len(r.Engine.Facts) < 15 {
			t.Errorf("only the facts %v are known of %s", r.Engine.Facts, r.Address)
		}
	}
	if len(replicas) != 2 || held == 0 {
		t.Errorf("%d replicas hold %v blocks", len(replicas), held)
	}

	s.reload(t)
	again := ask[[]admin.Fleet](t, s, "GET", "fleets", params("fleet", "chat"), "")
	if len(again) != 1 || again[0].Replicas[0].Cache.Held+again[0].Replicas[1].Cache.Held != held {
		t.Errorf("after a reload the fleet is %+v", again)
	}
}

// TestFailedReload checks that policies of a config that failed to load are
// never seen, and those of the running one still are.
func TestFailedReload(t *testing.T) {
	addrs := engines(t, 1)
	s := start(t, proxy(aware, addrs...))
	broken := *s
	broken.proxies = []string{proxy(`{"policy": "kv_cache_aware", "name": "broken"}`, "127.0.0.1:9"), `{"handler": "no_such_handler"}`}
	if err := broken.load(); err == nil {
		t.Fatal("the broken config was loaded")
	}
	list := ask[[]admin.Fleet](t, s, "GET", "fleets", nil, "")
	if len(list) != 1 || list[0].Name != "chat" {
		t.Errorf("fleets are %+v", list)
	}
	ask[admin.Explanation](t, s, "POST", "explain", nil, completion("x"))
}

// TestExplain compares what explain says with where the request then goes, and
// the cost with the sum of its parts.
func TestExplain(t *testing.T) {
	addrs := engines(t, 3)
	s := start(t, proxy(aware, addrs...), proxy(hash, addrs...))
	for i, fleet := range []string{"chat", "embed"} {
		at := params("fleet", fleet, "path", "/v1/completions")
		for n := range 12 {
			text := strings.Repeat(secret, 20*(n%4+1))
			x := ask[admin.Explanation](t, s, "POST", "explain", at, completion(text))
			before := ask[[]admin.Decision](t, s, "GET", "decisions", params("fleet", fleet), "")
			s.complete(t, i, text)
			after := ask[[]admin.Decision](t, s, "GET", "decisions", params("fleet", fleet), "")
			if len(after) != len(before)+1 {
				t.Fatalf("%d decisions became %d by one request and an explanation", len(before), len(after))
			}
			made := after[0]
			if x.Replica != made.Replica || x.Reason != made.Reason || x.Key != made.Key || x.PromptTokens != made.PromptTokens {
				t.Errorf("%s: explained %+v, decided %+v", fleet, x, made)
			}
			if x.API != "completions" || x.Blocks == 0 || len(x.Candidates) != 3 {
				t.Errorf("%s: explained %+v", fleet, x)
			}
			checkCandidates(t, &x)
		}
	}
}

func checkCandidates(t *testing.T, x *admin.Explanation) {
	t.Helper()
	chosen := 0
	for _, c := range x.Candidates {
		if c.Chosen {
			chosen++
			if c.Replica != x.Replica || !c.Allowed || !c.Available {
				t.Errorf("chosen is %+v for %s", c, x.Replica)
			}
		}
		switch x.Policy {
		case "kv_cache_aware":
			if c.Cost == nil {
				t.Fatalf("no cost of %s", c.Replica)
			}
			k := c.Cost
			if sum := k.Queue + k.Compute + k.Requests + k.Pressure; math.Abs(sum-k.Total) > 1e-6*sum {
				t.Errorf("%s costs %v, but its parts %v", c.Replica, k.Total, sum)
			}
			const block = 128 // tokens within the block after the last matched one may hit
			if *c.Hit > *c.Matched+block || *c.Uncached < x.PromptTokens-*c.Matched-block {
				t.Errorf("%s: hit %v of matched %v, uncached %v of %v", c.Replica, *c.Hit, *c.Matched, *c.Uncached, x.PromptTokens)
			}
		case "prefix_hash":
			if c.Place == nil || *c.Place < 1 || *c.Place > len(x.Candidates) || c.Chosen && *c.Place != 1 {
				t.Errorf("%s has place %v", c.Replica, c.Place)
			}
		}
	}
	if chosen != 1 {
		t.Errorf("%d replicas are chosen", chosen)
	}
}

// TestExplainBooksNothing checks that an explanation leaves no trace.
func TestExplainBooksNothing(t *testing.T) {
	addrs := engines(t, 2)
	s := start(t, proxy(`{"policy": "kv_cache_aware", "name": "chat", "metrics": {"off": true}}`, addrs...))
	state := func() []admin.Fleet { return ask[[]admin.Fleet](t, s, "GET", "fleets", nil, "") }
	before, err := json.Marshal(state())
	if err != nil {
		t.Fatal(err)
	}
	for range 50 {
		ask[admin.Explanation](t, s, "POST", "explain", nil, completion(strings.Repeat(secret, 50)))
	}
	after, err := json.Marshal(state())
	if err != nil {
		t.Fatal(err)
	}
	if string(before) != string(after) {
		t.Errorf("explanations changed\n%s\nto\n%s", before, after)
	}
}

// TestBodiesWithoutPrompt checks what explain says of requests that the
// fallback policy gets.
func TestBodiesWithoutPrompt(t *testing.T) {
	s := start(t, proxy(aware, engines(t, 1)...))
	for _, c := range []struct{ path, body, reason string }{
		{"/v1/completions", "", "no_body"},
		{"/v1/completions", "prompt=x", "not_json"},
		{"/v1/completions", `{"prompt": "x`, "cut_json"},
		{"/v1/completions", `{"model": "m"}`, "no_text"},
		{"/v1/completions", `{"prompt": ` + strings.Repeat("[", 5000) + strings.Repeat("]", 5000) + `}`, "too_deep"},
		{"/health", `{"prompt": "x"}`, "no_prompt"},
		{"/v1/models", `{"prompt": "x"}`, "no_prompt"},
	} {
		x := ask[admin.Explanation](t, s, "POST", "explain", params("path", c.path), c.body)
		if x.Reason != c.reason || x.Replica != "" || len(x.Candidates) != 1 {
			t.Errorf("%s with %.20q: %+v; want %s", c.path, c.body, x, c.reason)
		}
	}
}

// zeros is a body of blanks within a prompt, and how much of it was read.
type zeros struct {
	left int64
	read atomic.Int64
}

func (z *zeros) Read(p []byte) (int, error) {
	if z.left == 0 {
		return 0, io.EOF
	}
	n := int(min(int64(len(p)), z.left))
	for i := range p[:n] {
		p[i] = ' '
	}
	z.left -= int64(n)
	z.read.Add(int64(n))
	return n, nil
}

// TestExplainGigabyte sends a body of which only the beginning may be read.
func TestExplainGigabyte(t *testing.T) {
	s := start(t, proxy(`{"policy": "kv_cache_aware", "name": "chat", "max_body": 65536, "metrics": {"off": true}}`, engines(t, 1)...))
	rest := &zeros{left: 1 << 30}
	r, err := http.NewRequest(http.MethodPost, "http://"+s.admin+"/kv_cache/explain?path=/v1/completions",
		io.MultiReader(strings.NewReader(`{"model": "m", "prompt": "`+strings.Repeat(secret, 100)), rest))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := new(http.Transport).RoundTrip(r)
	if errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) {
		t.Log("the server hung up before its answer was read:", err)
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var x admin.Explanation
	if err := json.NewDecoder(resp.Body).Decode(&x); err != nil {
		t.Fatal(err)
	}
	if !x.Truncated || x.Reason != "only" || x.Blocks*256 > 65536 {
		t.Errorf("explained %+v", x)
	}
	if n := rest.read.Load(); n > 256<<20 {
		t.Errorf("%d MiB were read", n>>20)
	}
}

// TestDrain takes replicas out and back in.
func TestDrain(t *testing.T) {
	addrs := engines(t, 2)
	s := start(t, proxy(aware, addrs...), proxy(hash, addrs...))
	done := ask[admin.Outcome](t, s, "POST", "drain", params("replica", addrs[0]), "")
	if done.State != "drained" || strings.Join(done.Fleets, " ") != "chat embed" {
		t.Errorf("drained: %+v", done)
	}
	for i := range 20 {
		s.complete(t, i%2, strings.Repeat(string(rune('a'+i)), 3000))
	}
	for _, d := range ask[[]admin.Decision](t, s, "GET", "decisions", nil, "") {
		if d.Replica == addrs[0] {
			t.Errorf("the drained replica was chosen: %+v", d)
		}
	}
	s.refused(t, "POST", "drain", params("replica", addrs[1]), "", http.StatusConflict, "last eligible replica of fleet \\\"chat\\\"")
	ask[admin.Outcome](t, s, "POST", "drain", params("replica", addrs[0]), "") // once more is no error
	s.reload(t)
	forced := ask[admin.Outcome](t, s, "POST", "drain", params("replica", addrs[1], "force", "true"), "")
	if forced.State != "drained" || !strings.Contains(forced.Message, "last eligible") {
		t.Errorf("forced: %+v", forced)
	}
	s.complete(t, 0, "still served") // better a drained replica than none
	for _, a := range addrs {
		if back := ask[admin.Outcome](t, s, "POST", "undrain", params("replica", a), ""); back.State == "drained" {
			t.Errorf("undrained: %+v", back)
		}
	}
	if again := ask[admin.Outcome](t, s, "POST", "undrain", params("replica", addrs[0]), ""); !strings.Contains(again.Message, "was not drained") {
		t.Errorf("undrained twice: %+v", again)
	}
}

// TestDryRun asks what a drain would do, which does nothing.
func TestDryRun(t *testing.T) {
	addrs := engines(t, 2)
	s := start(t, proxy(aware, addrs...))
	head := strings.Repeat(secret, 100)
	for _, tail := range []string{"a", "b", "c"} {
		s.complete(t, 0, head+strings.Repeat(tail, 2000))
	}
	home := ask[[]admin.Decision](t, s, "GET", "decisions", nil, "")[0].Replica
	for _, addr := range addrs {
		out := ask[admin.Outcome](t, s, "POST", "drain", params("replica", addr, "dry_run", "true"), "")
		if out.State != "eligible" || !strings.Contains(out.Message, "would take no new requests") || len(out.Effects) != 1 {
			t.Fatalf("%+v", out)
		}
		e, want := out.Effects[0], admin.Effect{Fleet: "chat", Remaining: 1, Decisions: 3, Prefixes: 1}
		if addr == home {
			want.Chosen, want.Alone, want.Tokens = 3, 1, e.Tokens
		}
		if e != want || addr == home && e.Tokens < 500 {
			t.Errorf("%s would have the effect %+v, want %+v", addr, e, want)
		}
	}
	ask[admin.Outcome](t, s, "POST", "drain", params("replica", addrs[0]), "")
	s.refused(t, "POST", "drain", params("replica", addrs[1], "dry_run", "true"), "", http.StatusConflict, "last eligible")
	out := ask[admin.Outcome](t, s, "POST", "drain", params("replica", addrs[1], "dry_run", "true", "force", "true"), "")
	if out.State != "eligible" || !strings.Contains(out.Message, "would still serve") {
		t.Errorf("%+v", out)
	}
}

// TestForget drops what a replica is believed to hold.
func TestForget(t *testing.T) {
	addrs := engines(t, 1)
	s := start(t, proxy(aware, addrs...))
	s.complete(t, 0, strings.Repeat(secret, 100))
	held := func() float64 { return ask[[]admin.Replica](t, s, "GET", "replicas", nil, "")[0].Cache.Held }
	if held() == 0 {
		t.Fatal("nothing is held after a request")
	}
	ask[admin.Outcome](t, s, "POST", "forget", params("replica", addrs[0]), "")
	if n := held(); n != 0 {
		t.Errorf("%v blocks are held after all was forgotten", n)
	}
}

// TestRefusals sends what can't be answered.
func TestRefusals(t *testing.T) {
	addrs := engines(t, 2)
	s := start(t, proxy(aware, addrs...), proxy(hash, addrs[0]))
	for _, c := range []struct {
		method, what string
		query        []string
		status       int
		part         string
	}{
		{"POST", "fleets", nil, 405, "use GET"},
		{"GET", "explain", nil, 405, "use POST"},
		{"GET", "drain", nil, 405, "use POST"},
		{"GET", "fleets", []string{"fleet", "nope"}, 404, `fleet \"nope\" is unknown; there are \"chat\", \"embed\"`},
		{"GET", "replicas", []string{"fleet", "nope"}, 404, "unknown"},
		{"GET", "decisions", []string{"limit", "0"}, 400, "limit is"},
		{"GET", "decisions", []string{"limit", "x"}, 400, "limit is"},
		{"POST", "explain", nil, 400, "say which fleet"},
		{"POST", "explain", []string{"fleet", "nope"}, 404, "unknown"},
		{"POST", "explain", []string{"fleet", "chat", "path", "v1"}, 400, "begin with a slash"},
		{"POST", "drain", nil, 400, "say which replica"},
		{"POST", "drain", []string{"replica", "127.0.0.1:1"}, 404, "replica \\\"127.0.0.1:1\\\" is unknown"},
		{"POST", "drain", []string{"replica", addrs[1], "fleet", "embed"}, 404, "unknown"},
		{"POST", "drain", []string{"replica", addrs[0], "force", "perhaps"}, 400, "force is"},
		{"POST", "drain", []string{"replica", addrs[0], "dry_run", "perhaps"}, 400, "dry_run is"},
		{"POST", "drain", []string{"replica", addrs[0]}, 409, "embed"},
		{"POST", "undrain", []string{"replica", "\x1b[31m\n"}, 404, `\\x1b[31m\\n`},
		{"POST", "forget", []string{"replica", "nope"}, 404, "unknown"},
	} {
		s.refused(t, c.method, c.what, params(c.query...), "", c.status, c.part)
	}
}

// TestNoPolicy asks a Caddy whose config has none of the policies.
func TestNoPolicy(t *testing.T) {
	s := start(t, `{"handler": "static_response"}`)
	if list := ask[[]admin.Fleet](t, s, "GET", "fleets", nil, ""); len(list) != 0 {
		t.Errorf("fleets are %+v", list)
	}
	if list := ask[[]admin.Decision](t, s, "GET", "decisions", nil, ""); len(list) != 0 {
		t.Errorf("decisions are %+v", list)
	}
	s.refused(t, "POST", "explain", nil, "{}", http.StatusNotFound, "no kv_cache_aware or prefix_hash policy")
	s.refused(t, "POST", "drain", params("replica", "a:1"), "", http.StatusNotFound, "unknown")
}

// TestForeignHost checks that Caddy's own access rules stand before the API.
func TestForeignHost(t *testing.T) {
	s := start(t, proxy(aware, engines(t, 1)...))
	r, err := http.NewRequest(http.MethodGet, "http://"+s.admin+"/kv_cache/fleets", nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Host = "evil.test"
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusForbidden {
		t.Errorf("a foreign host got status %d", resp.StatusCode)
	}
}

// TestNoPromptText looks for a prompt's text, a header's value and a model's
// name in all that the API answers.
func TestNoPromptText(t *testing.T) {
	addrs := engines(t, 1)
	s := start(t, proxy(`{"policy": "kv_cache_aware", "name": "chat", "pin_header": "X-Session-ID", "metrics": {"interval": "50ms"}}`, addrs...))
	body := completion(strings.Repeat(secret, 100))
	r := s.completion(t, 0, strings.Repeat(secret, 100))
	r.Header.Set("X-Session-ID", "hostile\tvalue<script>")
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	for _, what := range []string{"fleets", "replicas", "decisions"} {
		_, answer := s.do(t, "GET", what, nil, nil)
		checkClean(t, what, answer)
	}
	_, answer := s.do(t, "POST", "explain", params("path", "/v1/completions"), strings.NewReader(body))
	checkClean(t, "explain", answer)
}

func checkClean(t *testing.T, what string, answer []byte) {
	t.Helper()
	for _, part := range []string{"quick brown", "secret", "hostile", "script"} {
		if strings.Contains(string(answer), part) {
			t.Errorf("%s tells %q: %s", what, part, answer)
		}
	}
}

func TestMain(m *testing.M) {
	http.DefaultTransport.(*http.Transport).DisableKeepAlives = true
	os.Exit(m.Run())
}
