// SPDX-License-Identifier: Apache-2.0

package selection

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/iotest"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/fleet"
	"github.com/seed-2fa47a1e/caddy-kv-cache/metrics"
)

func TestPromptReturnsToItsReplica(t *testing.T) {
	p := loadAware(t, `{}`)
	pool := poolOf(8)
	homes := make(map[string]*reverseproxy.Upstream)
	for round := range 3 {
		for i := range 20 {
			text := words(fmt.Sprint("chat", i), 8000)
			c := complete(text + strings.Repeat("more ", 100*round))
			got := p.Select(pool, c.Request, nil)
			if round > 0 && got != homes[text] {
				t.Errorf("round %d: prompt %d went to %v, not back to %v", round, i, got, homes[text])
			}
			homes[text] = got
			want := ReasonMatch
			if round == 0 {
				want = ReasonNoMatch
			}
			if reason := c.decisionIn(&p.core).latest().reason; reason != want {
				t.Errorf("round %d: reason is %s, want %s", round, reason, want)
			}
			c.answered(t, &p.core, http.StatusOK)
		}
	}
	idle(t, p.fleet)
}

func TestLoadSpreads(t *testing.T) {
	p := loadAware(t, `{}`)
	pool := poolOf(4)
	counts := make(map[string]int)
	for i := range 32 {
		c := complete(words(fmt.Sprint(i), 4000))
		counts[p.Select(pool, c.Request, nil).Dial]++
		defer c.left(t, &p.core)
	}
	for _, u := range pool {
		if n := counts[u.Dial]; n < 6 || n > 10 {
			t.Errorf("%s has %d of 32 equal requests in flight", u.Dial, n)
		}
	}
}

// A replica with the prefix is passed over when waiting there costs more than
// computing elsewhere.
func TestHotPrefixSpills(t *testing.T) {
	p := loadAware(t, `{}`)
	pool := poolOf(2)
	counts := make(map[string]int)
	var reasons []Reason
	for i := range 20 {
		c := complete(words("shared", 2000) + words(fmt.Sprint(i), 20_000))
		counts[p.Select(pool, c.Request, nil).Dial]++
		reasons = append(reasons, c.decisionIn(&p.core).latest().reason)
		defer c.left(t, &p.core)
	}
	if len(counts) != 2 {
		t.Errorf("all went to one replica: %v", counts)
	}
	if !slices.Contains(reasons, ReasonBalance) {
		t.Errorf("no request was moved for balance: %v", reasons)
	}
}

func TestRetryGoesElsewhere(t *testing.T) {
	for name, policy := range map[string]func(testing.TB, string) (reverseproxy.Selector, *core){
		"kv_cache_aware": func(tb testing.TB, cfg string) (reverseproxy.Selector, *core) {
			p := loadAware(tb, cfg)
			return p, &p.core
		},
		"prefix_hash": func(tb testing.TB, cfg string) (reverseproxy.Selector, *core) {
			p := loadHash(tb, cfg)
			return p, &p.core
		},
	} {
		for what, ask := range map[string]func() *client{
			"prompt":   func() *client { return complete(words("retry", 3000)) },
			"fallback": func() *client { return newClient(httptest.NewRequest(http.MethodGet, "/v1/models", nil)) },
		} {
			t.Run(name+"/"+what, func(t *testing.T) {
				p, c := policy(t, `{}`)
				pool := poolOf(5)
				client := ask()
				seen := make(map[*reverseproxy.Upstream]bool)
				for i := range pool {
					u := p.Select(pool, client.Request, nil)
					if u == nil || seen[u] {
						t.Fatalf("attempt %d went to %v again", i+1, u)
					}
					seen[u] = true
				}
				for i := range 3 {
					if p.Select(pool, client.Request, nil) == nil {
						t.Errorf("attempt %d: refused although replicas are available", len(pool)+i+1)
					}
				}
				client.left(t, c)
				idle(t, c.fleet)
			})
		}
	}
}

// After a failed attempt nothing is believed to be held there, and the replica
// is avoided for a while.
func TestFailedAttemptIsTakenBack(t *testing.T) {
	p := loadAware(t, `{}`)
	pool := poolOf(2)
	text := words("failing", 8000)
	c := complete(text)
	failed := p.Select(pool, c.Request, nil)
	good := p.Select(pool, c.Request, nil)
	c.answered(t, &p.core, http.StatusOK)
	replica := p.fleet.Replica(failed.Dial, time.Now())
	if replica.Avoided(time.Now()) != fleet.Failing {
		t.Error("the replica is not avoided after a failed attempt")
	}
	blocks := p.fleet.Registry.Index.Match(c.decisionIn(&p.core).prompt.Chain, nil)
	if n := replica.Matched(blocks); n != 0 {
		t.Errorf("%d blocks are believed to be held where the attempt failed", n)
	}
	if n := p.fleet.Replica(good.Dial, time.Now()).Matched(blocks); n == 0 {
		t.Error("no blocks are believed to be held where the attempt succeeded")
	}
}

// noDescriptors lets this process's policies believe that no file descriptor is left.
// Those of other tests, which end requests a little later, ask at the same time.
var noDescriptors atomic.Bool

func init() {
	looks := fleet.Process.Exhausted
	fleet.Process.Exhausted = func() bool { return noDescriptors.Load() || looks() }
}

// An attempt that failed because Caddy is out of file descriptors did not get
// there: the replica is neither avoided nor passed over at the next attempt.
func TestFailedForWantOfADescriptor(t *testing.T) {
	aware, hash := loadAware(t, `{}`), loadHash(t, `{}`)
	own := func() bool {
		var r fleet.Reservation
		aware.fleet.Replica("descriptors.test:1", time.Now()).Reserve(&r, time.Now())
		_, own := r.Fail(time.Now())
		return own
	}
	noDescriptors.Store(true)
	await(t, "failures to be our own", own) // it was looked a moment ago
	t.Cleanup(func() {
		noDescriptors.Store(false)
		await(t, "failures to be the replicas' again", func() bool { return !own() })
	})
	for _, p := range []struct {
		reverseproxy.Selector
		*core
	}{{aware, &aware.core}, {hash, &hash.core}} {
		pool := poolOf(2)
		c := complete(words("no descriptor", 3000))
		for i := range 5 {
			u := p.Select(pool, c.Request, nil)
			if u == nil {
				t.Fatalf("%s: attempt %d finds no replica", p.policy, i+1)
			}
		}
		for _, u := range pool {
			if why := p.fleet.Replica(u.Dial, time.Now()).Avoided(time.Now()); why != fleet.Eligible {
				t.Errorf("%s: %s is %s", p.policy, u.Dial, why)
			}
		}
		c.left(t, p.core)
		idle(t, p.fleet)
	}
}

// While a request is tried again and finds nobody available, its one failure
// counts once.
func TestFailureCountsOnce(t *testing.T) {
	aware, hash := loadAware(t, `{}`), loadHash(t, `{}`)
	for _, p := range []struct {
		reverseproxy.Selector
		*core
	}{{aware, &aware.core}, {hash, &hash.core}} {
		pool := poolOf(1)
		c := complete("hello")
		p.Select(pool, c.Request, nil)
		for range 20 {
			p.Select(nil, c.Request, nil)
		}
		replica := p.fleet.Replica(pool[0].Dial, time.Now())
		if replica.Avoided(time.Now().Add(3*time.Second)) == fleet.Failing {
			t.Errorf("%s: one failure is held against the replica many times", p.policy)
		}
		c.left(t, p.core)
	}
}

// An engine that refuses a request has not computed it.
func TestRefusedPromptIsNotHeld(t *testing.T) {
	p := loadAware(t, `{}`)
	pool := poolOf(1)
	c := complete(words("refused", 8000))
	p.Select(pool, c.Request, nil)
	c.answered(t, &p.core, http.StatusBadRequest)
	blocks := p.fleet.Registry.Index.Match(c.decisionIn(&p.core).prompt.Chain, nil)
	if n := p.fleet.Replica(pool[0].Dial, time.Now()).Matched(blocks); n != 0 {
		t.Errorf("%d blocks are believed to be held after a 400", n)
	}
	idle(t, p.fleet)
}

func TestEmptyPool(t *testing.T) {
	aware, hash := loadAware(t, `{}`), loadHash(t, `{}`)
	for _, pool := range []reverseproxy.UpstreamPool{nil, {}} {
		for _, c := range []*client{complete("hello"), post("/v1/models", "")} {
			if u := aware.Select(pool, c.Request, nil); u != nil {
				t.Errorf("kv_cache_aware chose %v from nothing", u)
			}
			if u := hash.Select(pool, c.Request, nil); u != nil {
				t.Errorf("prefix_hash chose %v from nothing", u)
			}
			c.leave()
		}
	}
}

func TestOneUpstream(t *testing.T) {
	aware, hash := loadAware(t, `{}`), loadHash(t, `{}`)
	pool := poolOf(1)
	for range 2 {
		c := complete(words("one", 5000))
		aware.Select(pool, c.Request, nil)
		hash.Select(pool, c.Request, nil)
		for _, p := range []*core{&aware.core, &hash.core} {
			if reason := c.decisionIn(p).latest().reason; reason != ReasonOnly {
				t.Errorf("%s: reason is %s, want %s", p.policy, reason, ReasonOnly)
			}
		}
		c.left(t, &aware.core)
	}
}

func TestPinHeader(t *testing.T) {
	p := loadAware(t, `{"pin_header": "X-Session-ID"}`)
	pool := poolOf(6)
	ask := func(session, text string) (*reverseproxy.Upstream, Reason) {
		c := complete(text)
		if session != "" {
			c.Header.Set("X-Session-ID", session)
		}
		u := p.Select(pool, c.Request, nil)
		reason := c.decisionIn(&p.core).latest().reason
		c.answered(t, &p.core, http.StatusOK)
		return u, reason
	}
	home, reason := ask("a", words("first", 4000))
	if reason != ReasonNoMatch {
		t.Errorf("the first request's reason is %s, want %s", reason, ReasonNoMatch)
	}
	for i := range 10 {
		u, reason := ask("a", words(fmt.Sprint("other", i), 4000))
		if u != home || reason != ReasonPinned {
			t.Errorf("request %d went to %v (%s), not to %v", i, u, reason, home)
		}
	}
	if _, reason := ask("", words("stranger", 4000)); reason == ReasonPinned {
		t.Error("a request without the header is pinned")
	}
	// A pinned session whose replica fails moves on.
	c := complete(words("x", 4000))
	c.Header.Set("X-Session-ID", "a")
	if u := p.Select(pool, c.Request, nil); u != home {
		t.Fatalf("went to %v, not to %v", u, home)
	}
	moved := p.Select(pool, c.Request, nil)
	if moved == nil || moved == home {
		t.Fatalf("the retry went to %v", moved)
	}
	c.answered(t, &p.core, http.StatusOK)
	if u, _ := ask("a", words("later", 4000)); u != moved {
		t.Errorf("the session is at %v, want %v where it moved", u, moved)
	}
}

// odd are requests in which no prompt is found, and why.
var odd = []struct {
	name   string
	reason Reason
	client func() *client
}{
	{"empty body", ReasonNoBody, func() *client { return post("/v1/chat/completions", "") }},
	{"no body", ReasonNoBody, func() *client {
		c := post("/v1/chat/completions", "")
		c.Body = nil
		return c
	}},
	{"white space", ReasonNoBody, func() *client { return post("/v1/chat/completions", " \r\n\t ") }},
	{"GET", ReasonNoBody, func() *client {
		return newClient(httptest.NewRequest(http.MethodGet, "/v1/chat/completions", nil))
	}},
	{"unknown path", ReasonNoPrompt, func() *client { return post("/v2/whatever", `{"prompt": "hello"}`) }},
	{"tokenize", ReasonNoPrompt, func() *client { return post("/tokenize", `{"prompt": "hello"}`) }},
	{"not JSON", ReasonNotJSON, func() *client { return post("/v1/completions", "prompt=hello") }},
	{"an array", ReasonNoText, func() *client { return post("/v1/completions", `[1,2,3]`) }},
	{"cut JSON", ReasonCutJSON, func() *client { return post("/v1/completions", `{"prompt": "hello`) }},
	{"no prompt", ReasonNoText, func() *client { return post("/v1/completions", `{"model": "m"}`) }},
	{"prompt null", ReasonNoText, func() *client { return post("/v1/completions", `{"prompt": null}`) }},
	{"too deep", ReasonTooDeep, func() *client {
		return post("/v1/completions", `{"x": `+strings.Repeat("[", 10_000)+strings.Repeat("]", 10_000)+`, "prompt": "hello"}`)
	}},
	{"compressed", ReasonEncoded, func() *client {
		c := post("/v1/completions", "\x1f\x8b\x08")
		c.Header.Set("Content-Encoding", "gzip")
		return c
	}},
	{"incremental", ReasonIncremental, func() *client {
		c := post("/v1/completions", `{"prompt": "hello"}`)
		c.Header.Set("Incremental", "?1")
		return c
	}},
	{"multipart", ReasonNotJSON, func() *client {
		c := post("/v1/audio/transcriptions", "--x\r\n\r\n--x--")
		c.Header.Set("Content-Type", "multipart/form-data; boundary=x")
		return c
	}},
	{"media", ReasonNotJSON, func() *client {
		c := post("/v1/completions", "RIFF")
		c.Header.Set("Content-Type", "audio/wav")
		return c
	}},
	{"bytes", ReasonNotJSON, func() *client {
		c := post("/v1/completions", "\x00\x01")
		c.Header.Set("Content-Type", "application/octet-stream")
		return c
	}},
	{"cut body", ReasonBodyError, func() *client {
		r := httptest.NewRequest(http.MethodPost, "/v1/completions",
			io.MultiReader(strings.NewReader(`{"prompt": "he`), iotest.ErrReader(errCut)))
		return newClient(r)
	}},
}

func TestFallbackReasons(t *testing.T) {
	ctx := newContext(t)
	aware := load[*KVCacheAware](t, ctx, "kv_cache_aware", fmt.Sprintf(`{"name": %q, "fallback": {"policy": "first"}}`, t.Name()))
	hash := load[*PrefixHash](t, ctx, "prefix_hash", fmt.Sprintf(`{"name": %q, "fallback": {"policy": "first"}}`, t.Name()))
	for _, p := range []struct {
		reverseproxy.Selector
		*core
	}{{aware, &aware.core}, {hash, &hash.core}} {
		for _, o := range odd {
			t.Run(p.policy+"/"+o.name, func(t *testing.T) {
				pool := poolOf(3)
				c, twin := o.client(), o.client()
				counted := func() float64 {
					return metric(t, ctx.GetMetricsRegistry(), "caddy_kv_cache_decisions_total", "policy", p.policy, "reason", string(o.reason))
				}
				before := counted()
				if u := p.Select(pool, c.Request, httptest.NewRecorder()); u != pool[0] {
					t.Errorf("chose %v, want the fallback's choice", u)
				}
				if reason := c.decisionIn(p.core).latest().reason; reason != o.reason {
					t.Errorf("reason is %s, want %s", reason, o.reason)
				}
				if want := o.reason == ReasonNoBody || o.reason == ReasonNoPrompt; c.decisionIn(p.core).latest().Aside != want {
					t.Errorf("reckoned with as one that has no first token: %v", !want)
				}
				if n := counted() - before; n != 1 {
					t.Errorf("the reason was counted %v times", n)
				}
				if twin.Body != nil {
					want, wantErr := io.ReadAll(twin.Body)
					got, err := io.ReadAll(c.Body)
					if !bytes.Equal(got, want) || !errors.Is(err, wantErr) {
						t.Errorf("forwarded %q and %v, want %q and %v", got, err, want, wantErr)
					}
				}
				c.left(t, p.core)
				idle(t, p.fleet)
			})
		}
	}
}

func TestPlaceholders(t *testing.T) {
	p := loadAware(t, `{}`)
	pool := poolOf(2)
	first := complete(words("placeholder", 6400))
	home := p.Select(pool, first.Request, nil)
	first.answered(t, &p.core, http.StatusOK)
	c := complete(words("placeholder", 6400))
	const all = "{http.reverse_proxy.kv_cache.replica} {http.reverse_proxy.kv_cache.reason} {http.reverse_proxy.kv_cache.nothing}"
	if got := c.repl.ReplaceKnown(all, ""); got != all {
		t.Errorf("before the choice: %q", got)
	}
	p.Select(pool, c.Request, nil)
	if got, want := c.repl.ReplaceAll(all, "-"), home.Dial+" match -"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	get := func(name string) int {
		v, ok := c.repl.Get("http.reverse_proxy.kv_cache." + name)
		n, isInt := v.(int)
		if !ok || !isInt {
			t.Fatalf("%s is %v", name, v)
		}
		return n
	}
	// 6400 bytes are 1600 tokens until a replica tells better.
	prompt, matched := get("prompt_tokens"), get("matched_tokens")
	if prompt < 1500 || prompt > 1700 || matched < prompt*9/10 || matched > prompt {
		t.Errorf("%d tokens, %d of them matched", prompt, matched)
	}
	c.left(t, &p.core)
}

func TestDecisionsAreCounted(t *testing.T) {
	ctx := newContext(t)
	p := load[*KVCacheAware](t, ctx, "kv_cache_aware", fmt.Sprintf(`{"name": %q}`, t.Name()))
	pool := poolOf(2)
	for range 3 {
		c := complete(words("counted", 8000))
		p.Select(pool, c.Request, nil)
		c.answered(t, &p.core, http.StatusOK)
	}
	c := complete("nobody there")
	p.Select(nil, c.Request, nil)
	c.left(t, &p.core)
	r := ctx.GetMetricsRegistry()
	for reason, want := range map[Reason]float64{ReasonNoMatch: 1, ReasonMatch: 2, ReasonNone: 1, ReasonBalance: 0} {
		if got := metric(t, r, "caddy_kv_cache_decisions_total", "fleet", t.Name(), "reason", string(reason)); got != want {
			t.Errorf("%s was counted %v times, want %v", reason, got, want)
		}
	}
	prompt := metric(t, r, "caddy_kv_cache_prompt_tokens_total", "fleet", t.Name())
	hit := metric(t, r, "caddy_kv_cache_predicted_hit_tokens_total", "fleet", t.Name())
	if prompt < 5500 || hit < prompt/2 || hit > prompt*2/3 {
		t.Errorf("%v prompt tokens and %v hits, want 2/3 of them nearly", prompt, hit)
	}
	if n := metric(t, r, "caddy_kv_cache_decision_duration_seconds", "fleet", t.Name()); n != 4 {
		t.Errorf("%v durations, want 4", n)
	}
}

// Dynamic sources make new upstreams for every request: what is known goes by
// their address.
func TestDynamicUpstreams(t *testing.T) {
	for _, dynamic := range []bool{false, true} {
		t.Run(fmt.Sprint(dynamic), func(t *testing.T) {
			p := loadAware(t, `{}`)
			p.dynamic = dynamic
			addrs := poolOf(5)
			rng := rand.New(rand.NewPCG(1, 2))
			home := ""
			for i := range 10 {
				pool := make(reverseproxy.UpstreamPool, 0, len(addrs))
				for _, at := range rng.Perm(len(addrs)) {
					pool = append(pool, &reverseproxy.Upstream{Host: new(reverseproxy.Host), Dial: addrs[at].Dial})
				}
				c := complete(words("dynamic", 8000))
				u := p.Select(pool, c.Request, nil)
				if !slices.Contains(pool, u) {
					t.Fatal("chose an upstream that is not of this request's pool")
				}
				if i > 0 && u.Dial != home {
					t.Errorf("request %d went to %s, not to %s", i, u.Dial, home)
				}
				home = u.Dial
				c.answered(t, &p.core, http.StatusOK)
			}
			idle(t, p.fleet)
		})
	}
}

// A request of a config that was replaced still finds replicas, new ones too.
func TestSelectAfterCleanup(t *testing.T) {
	aware, hash := loadAware(t, `{}`), loadHash(t, `{}`)
	old := poolOf(2)
	during := complete("hello")
	aware.Select(old, during.Request, nil)
	for _, p := range []interface{ Cleanup() error }{aware, hash} {
		if err := p.Cleanup(); err != nil {
			t.Fatal(err)
		}
	}
	for _, pool := range []reverseproxy.UpstreamPool{old, poolOf(3)} {
		for _, p := range []reverseproxy.Selector{aware, hash} {
			c := complete(words("straggler", 3000))
			if p.Select(pool, c.Request, nil) == nil {
				t.Errorf("%T refused a straggler", p)
			}
			c.left(t, &aware.core)
			c.left(t, &hash.core)
		}
	}
	during.left(t, &aware.core)
	idle(t, aware.fleet)
}

// Two policies in one request, such as one in the fallback of the other, keep
// apart.
func TestNestedPolicies(t *testing.T) {
	p := loadAware(t, `{"fallback": {"policy": "prefix_hash", "header": "X-Tenant"}}`)
	inner := p.fallback.(*PrefixHash)
	pool := poolOf(4)
	home := ""
	for i := range 6 {
		c := post("/v1/models", "hello")
		c.Header.Set("X-Tenant", "a")
		u := p.Select(pool, c.Request, nil)
		if i > 0 && u.Dial != home {
			t.Errorf("the fallback's key went to %s, not to %s", u.Dial, home)
		}
		home = u.Dial
		if got := c.rest(t); got != "hello" {
			t.Errorf("forwarded %q", got)
		}
		c.left(t, &p.core)
		c.left(t, &inner.core)
	}
	idle(t, p.fleet)
}

// No matter how requests end and in what order, the ledger ends at zero.
// Run with -race.
func TestConcurrentSelects(t *testing.T) {
	aware, hash := loadAware(t, `{"pin_header": "X-Session-ID"}`), loadHash(t, `{}`)
	pool := poolOf(6)
	for _, p := range []struct {
		reverseproxy.Selector
		*core
	}{{aware, &aware.core}, {hash, &hash.core}} {
		var wg sync.WaitGroup
		for worker := range 8 {
			wg.Go(func() {
				rng := rand.New(rand.NewPCG(uint64(worker), 7))
				var open []*client
				for i := range 150 {
					c := complete(words(fmt.Sprint("topic", rng.IntN(20)), 500+rng.IntN(10_000)))
					if rng.IntN(4) == 0 {
						c.Header.Set("X-Session-ID", fmt.Sprint(rng.IntN(5)))
					}
					if rng.IntN(10) == 0 {
						c = newClient(httptest.NewRequest(http.MethodGet, "/v1/models", nil))
					}
					for range 1 + rng.IntN(8)/6 + rng.IntN(8)/7 {
						if p.Select(pool, c.Request, nil) == nil {
							t.Errorf("request %d was refused", i)
						}
					}
					open = append(open, c)
					if len(open) > 5 {
						at := rng.IntN(len(open))
						switch rng.IntN(3) {
						case 0:
							open[at].left(t, p.core)
						case 1:
							open[at].answered(t, p.core, http.StatusOK)
						default:
							open[at].answered(t, p.core, http.StatusInternalServerError)
						}
						open = slices.Delete(open, at, at+1)
					}
				}
				for _, c := range open {
					c.left(t, p.core)
				}
			})
		}
		wg.Wait()
		idle(t, p.fleet)
	}
}

// busy makes a replica known to have its queue full: its engine says how many
// first tokens it has made, and what was sent has none.
func busy(f *fleet.Fleet, addr string, firstTokens float64) {
	now := time.Now()
	f.Observe(f.Replica(addr, now), metrics.Scrape{Snapshot: &metrics.Snapshot{
		At: now, Engine: metrics.VLLM, FirstTokens: metrics.Fact{Value: firstTokens, Known: true},
	}}, now)
}

// A request whose replica is known to be busy waits, and is sent when the
// engine is through, or never if its client leaves.
func TestBusyFleetHoldsBack(t *testing.T) {
	p := loadAware(t, `{}`)
	pool := poolOf(1)
	busy(p.fleet, pool[0].Dial, 0)
	big := complete(words("big", 4_000_000))
	p.Select(pool, big.Request, nil)
	busy(p.fleet, pool[0].Dial, 0)

	type answer struct{ upstream *reverseproxy.Upstream }
	ask := func(c *client) <-chan answer {
		got := make(chan answer, 1)
		go func() { got <- answer{p.Select(pool, c.Request, nil)} }()
		return got
	}
	impatient, patient := complete(words("impatient", 1000)), complete(words("patient", 1000))
	left, sent := ask(impatient), ask(patient)
	await(t, "both to wait", func() bool { return p.schedule.Waiting() == 2 })
	impatient.leave()
	if a := <-left; a.upstream != nil {
		t.Errorf("a request whose client left was sent to %v", a.upstream)
	}
	select {
	case <-sent:
		t.Fatal("sent although the engine is not through")
	default:
	}
	busy(p.fleet, pool[0].Dial, 1)
	if a := <-sent; a.upstream != pool[0] {
		t.Errorf("sent to %v", a.upstream)
	}
	for _, c := range []*client{big, patient, impatient} {
		c.left(t, &p.core)
	}
	if n := p.schedule.Waiting(); n != 0 {
		t.Errorf("%d requests still wait", n)
	}
	idle(t, p.fleet)
}

// Requests that waited, left and were sent under way, many at a time.
func TestHoldingBackConcurrently(t *testing.T) {
	p := loadAware(t, `{}`)
	pool := poolOf(3)
	for _, u := range pool {
		busy(p.fleet, u.Dial, 0)
	}
	var wg sync.WaitGroup
	for worker := range 16 {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(worker), 3))
			for i := range 20 {
				c := complete(words(fmt.Sprint(worker, i), 20_000))
				if rng.IntN(4) == 0 {
					go c.leave()
				}
				u := p.Select(pool, c.Request, nil)
				if u == nil && c.Context().Err() == nil {
					t.Error("refused although replicas are available")
				}
				c.answered(t, &p.core, http.StatusOK)
			}
		})
	}
	wg.Wait()
	if n := p.schedule.Waiting(); n != 0 {
		t.Errorf("%d requests still wait", n)
	}
	idle(t, p.fleet)
}
