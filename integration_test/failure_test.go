// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/enginesim"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/loopback"
)

// One replica refuses connections: no request fails, and it is tried hardly ever.
func TestDeadUpstream(t *testing.T) {
	for name, policy := range map[string]string{
		"polled":      "kv_cache_aware {\nmetrics_interval 100ms\n}",
		"not polled":  "kv_cache_aware {\nmetrics_off\n}",
		"prefix_hash": "prefix_hash",
	} {
		t.Run(name, func(t *testing.T) {
			fleet := engines(t, 2, fast)
			dead := loopback.FreeAddr(t)
			p := start(t, reverseProxy(append(fleet.Addrs(), dead), policy, "lb_retries 1"))
			for i := range 200 {
				a := p.post(chatPath, ask(text(fmt.Sprint("prompt ", i), 500)))
				if err := a.bad(); err != nil {
					t.Fatalf("request %d: %v", i, err)
				}
				if a.replica() == dead {
					t.Errorf("request %d was answered by the dead replica", i)
				}
			}
			if tries := strings.Count(p.log.String(), `"upstream roundtrip","upstream":"`+dead+`"`); tries > 20 {
				t.Errorf("the dead replica was tried by %d of 200 requests", tries)
			}
			p.awaitIdle()
		})
	}
}

// A replica that dies loses no request where retries of POST are allowed, and comes back into use.
func TestUpstreamDiesAndComesBack(t *testing.T) {
	fleet := engines(t, 3, fast)
	p := start(t, aware(fleet.Addrs(), "", "lb_retries 2\nlb_try_interval 10ms\nlb_retry_match {\nmethod POST\n}"))
	content := text("home", 3000)
	home := p.say(content).replica()
	engine := at(t, fleet, home)
	engine.Stop()
	away := p.say(content)
	if away.replica() == home {
		t.Error("a dead replica has answered")
	}
	if again := p.say(content); again.replica() != away.replica() || again.cached(t) == 0 {
		t.Errorf("the prompt's new home %s was left for %s", away.replica(), again.replica())
	}
	if err := engine.Start(); err != nil {
		t.Fatal(err)
	}
	await(t, "the replica to get requests again", func() bool {
		for i := range 20 {
			if p.say(text(fmt.Sprintf("new %d", i), 300)).replica() == home {
				return true
			}
		}
		return false
	})
}

// An engine whose queue is full answers 503; with lb_retry_match another one answers.
func TestFullEngine(t *testing.T) {
	full := fast
	full.Speed, full.MaxSeqs, full.MaxQueued = 1, 1, 1
	busy := engines(t, 1, full)[0]
	free := engines(t, 1, fast)[0]
	// Its place and its queue are taken by others, of whom Caddy knows nothing.
	for i := range 2 {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, busy.URL()+chatPath, strings.NewReader(streamed("other", endless)))
		if err != nil {
			t.Fatal(err)
		}
		go exchange(&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}, r)
		await(t, "the engine to take a request", func() bool {
			st := busy.Stats()
			return st.Running+st.Waiting > i
		})
	}
	p := start(t, blind([]string{busy.Addr(), free.Addr()}, "lb_retries 1\nlb_retry_match {\nmethod POST\nexpression `{rp.status_code} == 503`\n}"))
	for i := range 40 {
		a := p.say(text(fmt.Sprint("prompt ", i), 500))
		if a.replica() != free.Addr() {
			t.Errorf("request %d was answered by the full engine", i)
		}
	}
	if busy.Stats().Rejected == 0 {
		t.Error("no request was sent to the full engine first, so nothing was tested")
	}
	p.awaitIdle()
}

// An error of the engine's reaches the client as it is, and the prompt is not believed to be cached there.
func TestEngineErrors(t *testing.T) {
	fleet := engines(t, 1, fast)
	p := start(t, aware(fleet.Addrs(), "", ""))
	content := text("unlucky", 3000)
	for _, status := range []int{400, 404, 429, 500, 503} {
		fleet[0].FailNext(status, 1)
		a := p.post(chatPath, ask(content))
		if a.status != status || !strings.Contains(string(a.body), "was asked for by a drill") {
			t.Errorf("status %d became %d %s", status, a.status, a.body)
		}
		if n := a.matched(t); n != 0 {
			t.Errorf("%d tokens of a prompt that was never computed are believed to be cached", n)
		}
		p.awaitIdle() // the end of a request is booked a moment after its answer
	}
	if a := p.say(content); a.matched(t) != 0 || a.cached(t) != 0 {
		t.Errorf("matched %d, cached %d", a.matched(t), a.cached(t))
	}
	if a := p.say(content); a.matched(t) == 0 || a.cached(t) == 0 {
		t.Errorf("matched %d, cached %d after the prompt was computed", a.matched(t), a.cached(t))
	}
}

// A restarted engine has lost its cache; what was believed of it is gone with the next scrape.
func TestEngineRestart(t *testing.T) {
	fleet := engines(t, 2, fast)
	p := start(t, aware(fleet.Addrs(), "", "lb_retries 1"))
	p.awaitScrapes(fleet.Addrs()...)
	content := text("forgotten", 4000)
	home := p.say(content).replica()
	if again := p.say(content); again.matched(t) == 0 || again.cached(t) == 0 {
		t.Fatalf("the prompt is not cached before the restart: matched %d, cached %d", again.matched(t), again.cached(t))
	}
	p.awaitScrapes(home) // so that the counters are seen to fall: this engine is too young to tell by its start time
	if err := at(t, fleet, home).Restart(); err != nil {
		t.Fatal(err)
	}
	p.awaitScrapes(home)
	a := p.say(content)
	if n := a.matched(t); n != 0 {
		t.Errorf("%d tokens are believed to have survived the restart", n)
	}
	if a.cached(t) != 0 {
		t.Error("the engine has not lost its cache, so nothing was tested")
	}
	if again := p.say(content); again.replica() != a.replica() || again.matched(t) == 0 || again.cached(t) == 0 {
		t.Errorf("after the restart the prompt's home is %s, but then %s: matched %d, cached %d",
			a.replica(), again.replica(), again.matched(t), again.cached(t))
	}
}

// Whatever the metrics pages do, requests go on, and are spread by what was sent.
func TestFaultyMetrics(t *testing.T) {
	modes := map[string]enginesim.MetricsMode{
		"not found": enginesim.MetricsNotFound, "failing": enginesim.MetricsFailing, "frozen": enginesim.MetricsFrozen,
		"zero": enginesim.MetricsZero, "tenfold": enginesim.MetricsTenfold, "renamed": enginesim.MetricsRenamed,
		"garbage": enginesim.MetricsGarbage, "drip": enginesim.MetricsDrip, "endless": enginesim.MetricsEndless,
		"hanging": enginesim.MetricsHanging,
	}
	for name, mode := range modes {
		t.Run(name, func(t *testing.T) {
			fleet := engines(t, 3, fast)
			for _, s := range fleet {
				s.SetMetrics(mode)
			}
			p := start(t, aware(fleet.Addrs(), "metrics_timeout 500ms", ""))
			const requests = 270 // over several scrapes: who is caught busy by one that lies is avoided until the next
			homes := make([]string, requests)
			inParallel(requests, 9, func(i int) {
				a := p.post(chatPath, ask(text(fmt.Sprint("prompt ", i), 2000)))
				if err := a.bad(); err != nil {
					t.Errorf("request %d: %v", i, err)
				}
				homes[i] = a.replica()
			})
			share := make(map[string]int)
			for _, home := range homes {
				share[home]++
			}
			for _, addr := range fleet.Addrs() {
				if share[addr] < requests/9 {
					t.Errorf("%s got %d of %d requests", addr, share[addr], requests)
				}
			}
			p.awaitIdle()
			if mode == enginesim.MetricsTenfold {
				p.awaitScrapes(fleet.Addrs()...) // ten times nothing: what was seen of the work before is past
			}
			again := p.say(text("prompt 0", 2000))
			if again.replica() != homes[0] || again.cached(t) == 0 {
				t.Errorf("prompt 0 went to %s and then to %s (%s)", homes[0], again.replica(), again.reason())
			}
			p.awaitIdle()
		})
	}
}

// Pages that break and heal while requests come.
func TestMetricsComeAndGo(t *testing.T) {
	fleet := engines(t, 2, fast)
	p := start(t, aware(fleet.Addrs(), "metrics_timeout 300ms", ""))
	p.awaitScrapes(fleet.Addrs()...)
	for _, mode := range []enginesim.MetricsMode{enginesim.MetricsNotFound, enginesim.MetricsFailing, enginesim.MetricsEndless, enginesim.MetricsHanging} {
		for _, s := range fleet {
			s.SetMetrics(mode)
		}
		before := p.metric("caddy_kv_cache_scrape_errors_total")
		await(t, "a failed scrape", func() bool { return p.metric("caddy_kv_cache_scrape_errors_total") > before })
		p.say(text(fmt.Sprint("mode ", mode), 1000))
		for _, s := range fleet {
			s.SetMetrics(enginesim.MetricsOK)
		}
		p.awaitScrapes(fleet.Addrs()...)
	}
	if a := p.say(text(fmt.Sprint("mode ", enginesim.MetricsNotFound), 1000)); a.cached(t) == 0 || a.matched(t) == 0 {
		t.Errorf("faults of the metrics page cost the beliefs: matched %d, cached %d", a.matched(t), a.cached(t))
	}
}
