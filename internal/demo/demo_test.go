// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	_ "github.com/caddyserver/caddy/v2/modules/standard"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/enginesim"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m,
		// Caddy's certificate cache has one for the life of the process.
		goleak.IgnoreAnyFunction("github.com/caddyserver/certmagic.(*Cache).maintainAssets"),
		goleak.IgnoreAnyFunction("github.com/caddyserver/certmagic.(*RingBufferRateLimiter).loop"),
	)
}

// small is a demo of a few seconds: the first requests of the built-in workload
// on two replicas with a fast clock.
func small(names ...string) Config {
	c := Config{Replicas: 2, Blocks: 3000, Speed: 40, Sessions: 16, Limit: 70, Seed: 1, Listen: "127.0.0.1:0"}
	for _, name := range names {
		c.Policies = append(c.Policies, Policy{Name: name})
	}
	return c
}

func start(t *testing.T, config Config) *Demo {
	t.Helper()
	d, err := Start(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

func play(t *testing.T, d *Demo, p Policy) Outcome {
	t.Helper()
	o, err := d.Play(t.Context(), p, nil)
	if err != nil {
		t.Fatal(err)
	}
	if o.Requests != d.Requests() || o.Succeeded != d.Requests() {
		t.Errorf("%s: %d of %d requests were answered: %v", p.Name, o.Succeeded, d.Requests(), o.Failures)
	}
	return o
}

func TestPoliciesOfOursFindMoreInCaches(t *testing.T) {
	d := start(t, small("round_robin", "prefix_hash", "kv_cache_aware"))
	base := play(t, d, d.Policies()[0])
	if len(base.Reasons) != 0 {
		t.Errorf("round_robin gave reasons: %v", base.Reasons)
	}
	for _, p := range d.Policies()[1:] {
		o := play(t, d, p)
		if o.HitRate < 1.15*base.HitRate {
			t.Errorf("%s has a hit rate of %.3f, round_robin %.3f; want 1.15 times as much", p.Name, o.HitRate, base.HitRate)
		}
		if len(o.Replicas) != 2 || len(o.Reasons) == 0 {
			t.Errorf("%s: replicas %v, reasons %v", p.Name, o.Replicas, o.Reasons)
		}
	}
	if base.OneCacheHitRate <= base.HitRate {
		t.Errorf("one cache would have a hit rate of %.3f, round_robin has %.3f", base.OneCacheHitRate, base.HitRate)
	}
}

// Other traffic than the demo's own can be made up.
func TestWorkloads(t *testing.T) {
	for _, name := range []string{"labels", "documents"} {
		config := small("kv_cache_aware")
		config.Workload, config.Limit, config.Rate, config.Blocks = name, 12, 20, 8192
		d := start(t, config)
		if d.Requests() != 12 {
			t.Errorf("%s: %d requests, want 12", name, d.Requests())
		}
		play(t, d, d.Policies()[0])
	}
	config := small("kv_cache_aware")
	config.Chats.Chats, config.Limit = 3, 0
	few := start(t, config).Requests()
	config.Chats.OneOffs = -1
	if none := start(t, config).Requests(); none != few {
		t.Errorf("3 chats have %d requests, and %d without one-offs, of which there are none", few, none)
	}
	config.Chats.OneOffs = 2
	if more := start(t, config).Requests(); more != few+2 {
		t.Errorf("3 chats have %d requests, with 2 one-offs %d", few, more)
	}
	config.Chats.OneOffs, config.Chats.Chats = 0, 30
	if many := start(t, config).Requests(); few < 3 || many < 5*few {
		t.Errorf("3 chats have %d requests, 30 have %d", few, many)
	}
}

// A policy finds neither what one before it left, nor does a repeated run of
// kv_cache_aware believe in it.
func TestEachPolicyStartsCold(t *testing.T) {
	simulated := start(t, small("kv_cache_aware"))
	equal(t, simulated)
	simulated.Close()

	config := small("round_robin")
	config.Upstreams = servers(t).Addrs()
	config.Model = ""
	real := start(t, config)
	if real.Model() != "some-model" || real.Simulated() || real.Speed() != 1 {
		t.Errorf("model %q, simulated %v, speed %v", real.Model(), real.Simulated(), real.Speed())
	}
	// The servers are fast, and think times are not what is tested.
	real.config.Speed = 40
	equal(t, real)
}

func equal(t *testing.T, d *Demo) {
	t.Helper()
	first := play(t, d, d.Policies()[0])
	second := play(t, d, d.Policies()[0])
	if second.HitRate > 1.1*first.HitRate {
		t.Errorf("hit rate rose from %.3f to %.3f", first.HitRate, second.HitRate)
	}
	if first.HitRate == 0 {
		t.Error("nothing was hit, so nothing is shown")
	}
}

// servers are to the demo what real servers are. Their caches hold everything.
func servers(t *testing.T) enginesim.Fleet {
	t.Helper()
	fleet, err := enginesim.StartFleet(2, enginesim.ServerConfig{Model: "some-model", Speed: 40})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(fleet.Close)
	return fleet
}

func TestServesAfterPlay(t *testing.T) {
	config := small("kv_cache_aware")
	config.Limit = 3
	d := start(t, config)
	play(t, d, d.Policies()[0])

	body := `{"model":"sim","max_tokens":2,"messages":[{"role":"user","content":"` + strings.Repeat("word ", 200) + `"}]}`
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	for _, reason := range []string{"no_match", "match"} {
		response, err := client.Post(d.URL()+"/v1/chat/completions", "application/json", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		io.Copy(io.Discard, response.Body)
		response.Body.Close()
		if response.StatusCode != http.StatusOK || response.Header.Get("X-Reason") != reason || response.Header.Get("X-Replica") == "" {
			t.Errorf("got %s, %v; want the reason %s", response.Status, response.Header, reason)
		}
	}
	response, err := client.Get(d.AdminURL() + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	page, _ := io.ReadAll(response.Body)
	if !strings.Contains(string(page), "caddy_kv_cache_") {
		t.Error("the admin API has no metrics of ours")
	}
}

// Ports that are taken are not in the way.
func TestReplicasFollowCaddysPort(t *testing.T) {
	d := start(t, small("round_robin"))
	_, port, _ := net.SplitHostPort(d.listen)
	first, _ := strconv.Atoi(port)
	want := net.JoinHostPort("127.0.0.1", strconv.Itoa(first+1))
	if l, err := net.Listen("tcp", want); err == nil {
		l.Close()
		if d.Replicas()[0] != want {
			t.Errorf("replicas are at %v, though %s was free", d.Replicas(), want)
		}
	}
	s, err := d.startReplica(0)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	_, taken, _ := net.SplitHostPort(s.Addr())
	n, _ := strconv.Atoi(taken)
	if _, err := d.startReplica(n); !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("a second replica at %s: %v", s.Addr(), err)
	}
}

func TestInterrupted(t *testing.T) {
	d := start(t, small("least_conn"))
	ctx, cancel := context.WithCancel(t.Context())
	o, err := d.Play(ctx, d.Policies()[0], func(done, total int) {
		if total != d.Requests() {
			t.Errorf("total is %d, want %d", total, d.Requests())
		}
		if done == 5 {
			cancel()
		}
	})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("error is %v", err)
	}
	if o.Requests < 5 || o.Requests >= d.Requests() {
		t.Errorf("%d of %d requests were played", o.Requests, d.Requests())
	}
}

func TestOutcomeIsOneFlatObject(t *testing.T) {
	text, err := json.Marshal(Outcome{Policy: "p"})
	if err != nil {
		t.Fatal(err)
	}
	var fields map[string]any
	if err := json.Unmarshal(text, &fields); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"policy", "wall_seconds", "speed", "requests", "hit_rate", "ttft_seconds", "uncached_spread", "replicas", "reasons"} {
		if _, has := fields[name]; !has {
			t.Errorf("no field %s in %s", name, text)
		}
	}
}

func TestStartRefuses(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(*Config)
		want   string
	}{
		{"replicas", func(c *Config) { c.Replicas = -1 }, "replicas is -1"},
		{"blocks", func(c *Config) { c.Blocks = 1 }, "blocks is 1"},
		{"block tokens", func(c *Config) { c.BlockTokens = -1 }, "block tokens is -1"},
		{"prefill rate", func(c *Config) { c.PrefillRate = -1 }, "prefill rate is -1"},
		{"speed", func(c *Config) { c.Speed = -2 }, "speed is -2"},
		{"rate", func(c *Config) { c.Rate = -1 }, "rate is -1"},
		{"sessions", func(c *Config) { c.Sessions = -1 }, "sessions is -1"},
		{"limit", func(c *Config) { c.Limit = -1 }, "limit is -1"},
		{"scrape", func(c *Config) { c.Scrape = -time.Second }, "scrape is -1s"},
		{"workload", func(c *Config) { c.Workload = "games" }, `no workload "games", only chats, tools, documents`},
		{"trace", func(c *Config) { c.Trace = "no-such-file.jsonl" }, "no-such-file.jsonl"},
		{"listen", func(c *Config) { c.Listen = "nowhere" }, "cannot listen on nowhere"},
		{"upstream", func(c *Config) { c.Upstreams = []string{"127.0.0.1:1"} }, "upstream 127.0.0.1:1"},
		{"option", func(c *Config) { c.Policies = []Policy{{"prefix_hash", "load_factor none"}} }, "load_factor is 'none'"},
		{"value", func(c *Config) { c.Policies = []Policy{{"prefix_hash", "load_factor 0.5"}} }, "load_factor is 0.5"},
	} {
		t.Run(c.name, func(t *testing.T) {
			config := small("round_robin")
			c.change(&config)
			d, err := Start(t.Context(), config)
			if err == nil {
				d.Close()
				t.Fatal("started")
			}
			if !strings.Contains(err.Error(), c.want) {
				t.Errorf("error is %q, want %q in it", err, c.want)
			}
		})
	}
}

func TestAddressInUse(t *testing.T) {
	fleet := servers(t)
	config := small("round_robin")
	config.Listen = fleet.Addrs()[0]
	if _, err := Start(t.Context(), config); err == nil || !strings.Contains(err.Error(), "is in use") {
		t.Errorf("error is %v", err)
	}
}
