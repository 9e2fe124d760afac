// SPDX-License-Identifier: Apache-2.0

package selection

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/fleet"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/loopback"
)

// held is how many requests and blocks the replica of an upstream has.
func held(p *core, u *reverseproxy.Upstream) (inFlight, blocks float64) {
	replica := p.fleet.Replica(u.String(), time.Now())
	return replica.Load(time.Now()).InFlight, float64(fleet.Process.Index.Len(replica.Slot))
}

// In shadow mode the other policy decides, and what really happened is booked.
func TestShadow(t *testing.T) {
	ctx := newContext(t)
	p := load[*KVCacheAware](t, ctx, "kv_cache_aware", `{"name": "shadow", "metrics": {"off": true}, "other": {"policy": "round_robin"}}`)
	pool := poolOf(2)
	text := words("shadow", 8000)
	var requests []*client
	took := make(map[*reverseproxy.Upstream]int)
	for range 4 { // ours would keep sending it to the first, as long as that is not much busier
		r := complete(text)
		u := p.Select(pool, r.Request, nil)
		took[u]++
		requests = append(requests, r)
		if a := r.decisionIn(&p.core).latest(); a.reason != ReasonOther || a.Prompt < 1500 {
			t.Errorf("attempt is %+v", a)
		}
	}
	if took[pool[0]] != 2 || took[pool[1]] != 2 {
		t.Fatalf("round robin chose %v", took)
	}
	for i, u := range pool {
		if n, blocks := held(&p.core, u); n != 2 || blocks < 30 {
			t.Errorf("replica %d has %v requests and %v blocks booked, want 2 and over 30", i, n, blocks)
		}
	}
	if hit := requests[3].decisionIn(&p.core).latest().Hit; hit < 1500 {
		t.Errorf("the last request is believed to hit %v tokens, want nearly all", hit)
	}
	for _, r := range requests {
		r.answered(t, &p.core, http.StatusOK)
	}
	await(t, "all to be booked", func() bool { return p.fleet.Members()[0].Load(time.Now()).InFlight == 0 })
	idle(t, p.fleet)

	m := ctx.GetMetricsRegistry()
	yes := metric(t, m, "caddy_kv_cache_shadow_decisions_total", "fleet", "shadow", "agrees", "true")
	no := metric(t, m, "caddy_kv_cache_shadow_decisions_total", "fleet", "shadow", "agrees", "false")
	if yes+no != 4 || no < 1 {
		t.Errorf("%v decisions agree and %v differ", yes, no)
	}
	other := metric(t, m, "caddy_kv_cache_shadow_predicted_hit_tokens_total", "fleet", "shadow", "choice", "other")
	ours := metric(t, m, "caddy_kv_cache_shadow_predicted_hit_tokens_total", "fleet", "shadow", "choice", "ours")
	if !(ours > other && other > 0) {
		t.Errorf("%v tokens hit, %v would have with ours", other, ours)
	}
	if n := metric(t, m, "caddy_kv_cache_group_requests_total", "fleet", "shadow", "group", "round_robin"); n != 4 {
		t.Errorf("%v requests in the other's group, want 4", n)
	}
	if n := metric(t, m, "caddy_kv_cache_group_requests_total", "fleet", "shadow", "group", "kv_cache_aware"); n != 0 {
		t.Errorf("%v requests in our group, want none", n)
	}
	if n := metric(t, m, "caddy_kv_cache_shadow_estimated_ttft_seconds", "fleet", "shadow"); n != 8 {
		t.Errorf("%v estimates, want 8", n)
	}
}

// Requests without a prompt are the other policy's in shadow mode, too.
func TestShadowWithoutPrompt(t *testing.T) {
	p := loadAware(t, `{"metrics": {"off": true}, "other": {"policy": "first"}, "fallback": {"policy": "header", "field": "X"}}`)
	pool := poolOf(3)
	for range 5 {
		if u := p.Select(pool, post("/v1/paint", "{}").Request, nil); u != pool[0] {
			t.Fatalf("went to %v", u)
		}
	}
}

func TestShadowRetryGoesElsewhere(t *testing.T) {
	for _, other := range []string{"first", "prefix_hash", "kv_cache_aware"} {
		p := loadAware(t, fmt.Sprintf(`{"metrics": {"off": true}, "other": {"policy": %q}}`, other))
		pool := poolOf(3)
		r := complete(words("shadow retry "+other, 4000))
		body := completionOf(words("shadow retry "+other, 4000))
		seen := make(map[*reverseproxy.Upstream]bool)
		for range 3 {
			u := p.Select(pool, r.Request, nil)
			if u == nil || seen[u] {
				t.Fatalf("%s: %v was tried already", other, u)
			}
			seen[u] = true
			if got := r.rest(t); got != body {
				t.Fatalf("%s: the body is %d bytes, want %d", other, len(got), len(body))
			}
		}
		r.answered(t, &p.core, http.StatusOK)
		await(t, "the booking", func() bool {
			n := 0.0
			for _, m := range p.fleet.Members() {
				n += m.Load(time.Now()).InFlight
			}
			return n == 0
		})
		idle(t, p.fleet)
	}
}

// Another policy of ours leaves the booking to the one it decides for.
func TestShadowBooksOnce(t *testing.T) {
	for _, other := range []string{"prefix_hash", "kv_cache_aware"} {
		p := loadAware(t, fmt.Sprintf(`{"metrics": {"off": true}, "other": {"policy": %q}}`, other))
		pool := poolOf(1)
		r := complete(words("once "+other, 4000))
		if p.Select(pool, r.Request, nil) != pool[0] {
			t.Fatal("no upstream")
		}
		if n, blocks := held(&p.core, pool[0]); n != 1 || blocks < 15 {
			t.Errorf("%s: %v requests and %v blocks are booked", other, n, blocks)
		}
		r.answered(t, &p.core, http.StatusOK)
		idle(t, p.fleet)
	}
}

func TestShareIsKept(t *testing.T) {
	for _, percent := range []float64{0.5, 10, 50, 99, 100} {
		n := 0
		const of = 40_000
		for i := range of {
			if inShare(uint64(i)*0x9e3779b97f4a7c15, percent) {
				n++
			}
		}
		want := of * percent / 100
		if off := math.Abs(float64(n) - want); off > 6*math.Sqrt(want*(1-percent/100)) {
			t.Errorf("%v %%: %d of %d are in it", percent, n, of)
		}
	}
}

// A chat stays in its group as it grows, and both groups are counted.
func TestShare(t *testing.T) {
	ctx := newContext(t)
	p := load[*KVCacheAware](t, ctx, "kv_cache_aware", `{"name": "share", "metrics": {"off": true}, "share": 50, "other": {"policy": "first"}}`)
	pool := poolOf(3)
	groups := make(map[Reason]int)
	for chat := range 40 {
		messages := fmt.Sprintf(`{"role": "user", "content": %q}`, words(fmt.Sprint("chat ", chat), 600))
		var first bool
		for turn := range 3 {
			r := post("/v1/chat/completions", `{"messages": [`+messages+`]}`)
			u := p.Select(pool, r.Request, nil)
			other := r.decisionIn(&p.core).latest().reason == ReasonOther
			if turn == 0 {
				first = other
			} else if other != first {
				t.Fatalf("chat %d changed its group in turn %d", chat, turn)
			}
			if other && u != pool[0] {
				t.Errorf("the other policy did not decide")
			}
			groups[map[bool]Reason{true: ReasonOther}[other]]++
			r.answered(t, &p.core, http.StatusOK)
			messages += `, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "and?"}`
		}
	}
	if groups[ReasonOther] < 30 || groups[""] < 30 {
		t.Errorf("groups are %v", groups)
	}
	m := ctx.GetMetricsRegistry()
	for group, reason := range map[string]Reason{"first": ReasonOther, "kv_cache_aware": ""} {
		await(t, "the group to be counted", func() bool {
			return metric(t, m, "caddy_kv_cache_group_requests_total", "fleet", "share", "group", group) == float64(groups[reason])
		})
	}
	// Requests without a prompt are in no group.
	r := post("/v1/paint", "{}")
	p.Select(pool, r.Request, nil)
	if a := r.decisionIn(&p.core).latest(); a.reason != ReasonNoPrompt {
		t.Errorf("reason is %s", a.reason)
	}
}

func TestRolloutConfigs(t *testing.T) {
	for config, want := range map[string]string{
		`{"share": 10}`: "share needs another policy",
		`{"share": 101, "other": {"policy": "first"}}`: "must be a percentage",
		`{"share": -1, "other": {"policy": "first"}}`:  "must be a percentage",
		`{"other": {"policy": "nowhere"}}`:             "nowhere",
		`{"other": 7}`:                                 "other selection policy",
	} {
		_, err := newContext(t).LoadModuleByID(policyNamespace+"kv_cache_aware", []byte(config))
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error is %v, want %q", config, err, want)
		}
	}
}

// Groups side by side through a real proxy: bytes arrive as they are, and each
// group has its own real hits and times.
func TestShareThroughProxy(t *testing.T) {
	replica := teller(t, 1000, 400)
	policy := `{"policy": "kv_cache_aware", "name": "side", "metrics": {"off": true}, "share": 50, "other": {"policy": "prefix_hash"}}`
	p := run(t, map[string]string{"x": `{"handler": "kv_cache_usage"}, ` + handler(policy, []string{replica, teller(t, 1000, 400)}, "", "")})
	c := newHTTPClient(t, false)
	for i := range 40 {
		p.chat(t, c, "x", words(fmt.Sprint("side ", i), 2000), true)
	}
	await(t, "all to be counted", func() bool { return p.page(t, "group_requests_total", "fleet", "side") == 40 })
	for _, group := range []string{"kv_cache_aware", "prefix_hash"} {
		labels := []string{"fleet", "side", "group", group}
		n := p.page(t, "group_requests_total", labels...)
		if n < 5 || p.page(t, "group_reported_requests_total", labels...) != n || p.page(t, "group_real_hit_tokens_total", labels...) != 400*n ||
			p.page(t, "group_reported_prompt_tokens_total", labels...) != 1000*n || p.page(t, "group_ttft_seconds", labels...) != n ||
			p.page(t, "group_estimated_ttft_seconds", labels...) != n {
			t.Errorf("%s: %v requests, and figures that do not fit", group, n)
		}
	}
	if inFlight(t) != 0 {
		t.Errorf("%v requests are left in the ledger", inFlight(t))
	}
}

// A body larger than max_body reaches the second replica whole when the first
// is dead, with a policy of ours that reads it as well.
func TestShadowRetriesLargeBody(t *testing.T) {
	dead, live := loopback.FreeAddr(t), receiver(t)
	policy := `{"policy": "kv_cache_aware", "metrics": {"off": true}, "max_body": 20000, "other": {"policy": "prefix_hash", "max_body": 20000}}`
	p := run(t, map[string]string{"x": handler(policy, []string{dead, live}, "", `, "retries": 2`)})
	c := newHTTPClient(t, false)
	failed := false
	for i := range 30 {
		body := completionOf(words(fmt.Sprint("large", i), 200_000))
		status, got := send(t, c, p.request(t, http.MethodPost, "x", "/v1/completions", strings.NewReader(body)))
		if status != http.StatusOK || got.Sum != sha256.Sum256([]byte(body)) {
			t.Fatalf("request %d: status %d, %d of %d bytes", i, status, got.Bytes, len(body))
		}
		for _, f := range fleets(t) {
			failed = failed || f.Replica(dead, time.Now()).Avoided(time.Now()) == fleet.Failing
		}
	}
	if !failed {
		t.Error("no attempt went to the dead replica: the test shows nothing")
	}
	await(t, "all requests to be booked", func() bool { return inFlight(t) == 0 })
}

// What the Caddyfile makes of the options must also load.
func TestRolloutCaddyfileLoads(t *testing.T) {
	path := filepath.ToSlash(filepath.Join(t.TempDir(), "c.jsonl"))
	capture := "capture " + path + " {\n roll_size 2MiB\n roll_keep 1\n}\n"
	for text, policy := range map[string]caddyfile.Unmarshaler{
		"kv_cache_aware {\n share 10 prefix_hash {\n slack 5\n }\n" + capture + "}": new(KVCacheAware),
		"kv_cache_aware {\n shadow random_choose 2\n" + capture + "}":               new(KVCacheAware),
		"prefix_hash {\n" + capture + "}":                                           new(PrefixHash),
	} {
		if err := policy.UnmarshalCaddyfile(caddyfile.NewTestDispenser(text)); err != nil {
			t.Fatalf("%s: %v", text, err)
		}
		config, err := json.Marshal(policy)
		if err != nil {
			t.Fatal(err)
		}
		name, _, _ := strings.Cut(text, " ")
		if _, err := newContext(t).LoadModuleByID(policyNamespace+name, config); err != nil {
			t.Errorf("%s: %v", config, err)
		}
	}
}
