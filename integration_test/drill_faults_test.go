// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cespare/xxhash/v2"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/enginesim"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/loopback"
)

// forever is more requests than a drill sends.
const forever = 1 << 30

// exampleOptions are those of Caddyfile.example.
const exampleOptions = "lb_retries 2\nlb_try_interval 100ms\nfail_duration 10s\ntransport http {\nkeepalive 4s\n}"

// retryStatus retries answers of an engine that can't, too.
const retryStatus = "\nlb_retry_match {\nmethod POST\nexpression `{rp.status_code} in [429, 500, 503]`\n}"

var drills = slices.Concat(faults, networks, http3Drill, processes, eventFaults, lies)

// faults are drills whose fault lies in engines, in their metrics or in what clients do.
var faults = []drill{
	{
		number: "01", name: "killed with streams open", spread: true, excused: []string{cut}, compare: true,
		disturb: func(x *exercise) { x.busiest().Stop() },
		mend:    func(x *exercise) { x.startAgain(x.victim); x.awaitUse(x.victim) },
	},
	{
		number: "02", name: "refuses connections", compare: true, options: exampleOptions,
		others: func(x *exercise) []string { return []string{loopback.FreeAddr(x)} },
	},
	{
		number: "03", name: "accepts and never answers", hangs: true, compare: true, seldom: true, spread: true,
		disturb: func(x *exercise) { x.busiest().Pause(); x.awaitAvoided(x.victim.Addr()) },
		mend:    func(x *exercise) { x.victim.Resume(); x.awaitUse(x.victim) },
		check:   leftAlone,
	},
	{
		number: "04a", name: "answers 500, 503, 429, no retries of answers", compare: true, spread: true,
		excused: []string{"status 429", "status 500", "status 503"},
		disturb: failAll, mend: takeBack, check: fewErrors,
	},
	{
		number: "04b", name: "answers 500, 503, 429, retries of answers", options: drillOptions + retryStatus, spread: true,
		disturb: failAll, mend: takeBack,
	},
	{
		number: "04c", name: "answers 500, 503, 429, before prefix_hash", hash: true,
		excused: []string{"status 429", "status 500", "status 503"},
		disturb: failAll, mend: takeBack, check: fewErrors,
	},
	{
		number: "04d", name: "answers 503 with Retry-After", excused: []string{"status 503"}, compare: true, spread: true,
		disturb: func(x *exercise) {
			x.busiest().SetRetryAfter("3")
			x.victim.FailNext(503, forever)
			if !x.ours() {
				x.dwell()
				return
			}
			await(x, "the victim's Retry-After to be heard", func() bool {
				return x.proxy.metric("caddy_kv_cache_replica_eligible", "replica", x.victim.Addr()) == 0
			})
			x.known = time.Now()
			await(x, "it to pass", func() bool { return time.Since(x.known) > 3*time.Second })
		},
		mend: takeBack,
		check: func(x *exercise) {
			refused := x.of(func(r record) bool { return r.kind == "status 503" })
			if len(refused) == 0 {
				x.Fatal("nobody met the 503")
			}
			until := refused[0].began.Add(3 * time.Second)
			for _, r := range refused {
				if r.began.After(x.known) && r.began.Before(until) {
					x.Errorf("a request was sent %v before the time that the replica had named", until.Sub(r.began))
				}
			}
			fewErrors(x)
		},
	},
	{
		number: "05a", name: "breaks off in the middle of answers", excused: []string{cut}, compare: true,
		front:   func(x *exercise, s *enginesim.Server) string { return x.brokenFront(s, 100, false) },
		disturb: func(x *exercise) { x.faulty.Store(true) },
		mend:    func(x *exercise) { x.faulty.Store(false) },
	},
	{
		number: "06", name: "stops in mid-stream behind a healthy front", hangs: true, compare: true, seldom: true, spread: true,
		disturb: func(x *exercise) { x.busiest().Stall(); x.awaitAvoided(x.victim.Addr()) },
		mend:    func(x *exercise) { x.victim.StallEnd(); x.awaitUse(x.victim) },
		check:   leftAlone,
	},
	{
		number: "08", name: "restarted in place", compare: true, seldom: true, excused: []string{cut},
		disturb: func(x *exercise) {
			x.startAgain(x.busiest())
			x.awaitScrapes(x.victim.Addr())
			x.known = time.Now()
		},
		check: func(x *exercise) {
			matched, cached, prompt := 0, 0, 0
			for _, r := range x.of(func(r record) bool { return r.began.After(x.known) && r.replica == x.victim.Addr() }) {
				matched, cached, prompt = matched+r.matched, cached+r.cached, prompt+r.prompt
			}
			if matched-cached > prompt/5 {
				x.Errorf("after the restart %d of %d tokens were believed to be cached, %d were", matched, prompt, cached)
			}
		},
	},
	{
		number: "09", name: "ten times as slow", compare: true, seldom: true,
		disturb: func(x *exercise) { x.slowDown(x.busiest()) },
		mend:    func(x *exercise) { x.faulty.Store(false) },
		check: func(x *exercise) {
			all := x.of(func(r record) bool { return r.phase == during && r.began.After(x.known) })
			slow := x.of(func(r record) bool {
				return r.phase == during && r.began.After(x.known) && r.replica == x.victim.Addr()
			})
			if x.Logf("the slow replica got %d of %d requests", len(slow), len(all)); len(slow) > len(all)/2 { // a third is fair
				x.Errorf("the slow replica got %d of %d requests", len(slow), len(all))
			}
		},
	},
	{
		number: "10", name: "half of the fleet gone, back later", compare: true, seldom: true, spread: true, replicas: 4, excused: []string{cut},
		disturb: func(x *exercise) { x.fleet[0].Stop(); x.fleet[1].Stop() },
		mend: func(x *exercise) {
			x.startAgain(x.fleet[0])
			x.startAgain(x.fleet[1])
			x.awaitUse(x.fleet[0])
			x.awaitUse(x.fleet[1])
		},
		check: func(x *exercise) {
			all := x.of(func(r record) bool { return r.phase >= after })
			back := x.of(func(r record) bool {
				return r.phase >= after && (r.replica == x.addrs[0] || r.replica == x.addrs[1])
			})
			if len(back) > len(all)*4/5 {
				x.Errorf("the two that came back got %d of %d requests", len(back), len(all))
			}
		},
	},
	metricsDrill("11", "metrics answer 404", enginesim.MetricsNotFound, true),
	metricsDrill("12a", "metrics of one are all zero", enginesim.MetricsZero, false),
	metricsDrill("12b", "metrics of one are frozen", enginesim.MetricsFrozen, false),
	metricsDrill("12c", "metrics of one are ten times too high", enginesim.MetricsTenfold, false),
	metricsDrill("13", "metrics drip", enginesim.MetricsDrip, true),
	metricsDrill("14", "metrics never end", enginesim.MetricsEndless, true),
	metricsDrill("15", "metrics are renamed", enginesim.MetricsRenamed, true),
	{
		number: "16", name: "prefix caching off on one", compare: true, seldom: true,
		engine: func(i int, c *enginesim.ServerConfig) { c.NoPrefixCaching = i == 0 },
	},
	{
		number: "17", name: "KV pool ten times smaller on one", compare: true, seldom: true,
		engine: func(i int, c *enginesim.ServerConfig) {
			if c.Blocks = 4000; i == 0 {
				c.Blocks = 400
			}
		},
	},
	{
		number: "19", name: "reload every 500 ms", compare: true, seldom: true, resend: true,
		disturb: func(x *exercise) {
			for range sized(6, 120) {
				x.load(x.addrs)
				time.Sleep(500 * time.Millisecond)
			}
		},
	},
	{
		number: "20", name: "reloads that fail",
		disturb: func(x *exercise) {
			good := x.directives(x.addrs)
			for _, config := range []string{
				aware(x.addrs, "no_such_option", ""),
				good + "reverse_proxy /x localhost:1 {\ntransport http {\ntls_trust_pool file /no/such/file\n}\n}\n",
			} {
				if status, answer := x.proxy.load(x.proxy.caddyfile(config)); status == http.StatusOK {
					x.Errorf("the configuration was taken: %s", answer)
				}
				x.dwell()
			}
		},
	},
	{
		number: "21", name: "upstream added, removed, added again", compare: true, seldom: true, spread: true, resend: true, replicas: 4,
		disturb: func(x *exercise) {
			for range 2 {
				x.load(x.addrs[:3])
				x.dwell()
				x.load(x.addrs)
				x.dwell()
			}
		},
	},
	{
		number: "23", name: fmt.Sprintf("clients abort %d streams", sized(150, 10_000)), compare: true, seldom: true,
		memory: memoryOf(2*sized(150, 500), 0, systemBytes), // the last ones' connections may close while the next open
		disturb: func(x *exercise) {
			for range sized(1, 20) - 1 {
				x.openMany(500, true)()
			}
			leave := x.openMany(sized(150, 500), true)
			x.dwell()
			leave()
		},
	},
	{
		number: "24", name: "40 clients that don't read", compare: true, seldom: true,
		disturb: func(x *exercise) {
			leave := x.openMany(40, false)
			x.dwell()
			leave()
		},
	},
	{
		number: "25", name: fmt.Sprintf("%d clients that send 1 kB/s", sized(40, 500)), compare: true, seldom: true,
		disturb: func(x *exercise) { inParallel(sized(40, 500), 500, x.sendSlowly) },
	},
	{
		number: "26", name: fmt.Sprintf("four bodies of %d MiB at once", sized(256, 1024)), compare: true, seldom: true, policy: "max_body 4MiB", memory: memoryOf(4, 0, 4<<20),
		engine: func(_ int, c *enginesim.ServerConfig) { c.KeepBody = 8 << 20 },
		disturb: func(x *exercise) {
			inParallel(4, 4, func(int) {
				size := int64(sized(256, 1024)) << 20
				r := x.proxy.request(http.MethodPost, "/v1/completions", io.NopCloser(&tape{left: size, digest: xxhash.New()}))
				r.ContentLength = size
				if a := exchange(x.proxy.client, r); a.err != nil || a.status != http.StatusBadRequest {
					x.fine(fmt.Errorf("a body too long for the engine: %d %v, want its 400", a.status, a.err))
				}
			})
		},
	},
	{
		number: "27", name: fmt.Sprintf("%d distinct prompts", sized(5000, 100_000)), memory: memoryOf(48, 0, 300),
		disturb: func(x *exercise) {
			inParallel(sized(5000, 100_000), 48, func(i int) { x.expect(ask(text(fmt.Sprint("prompt ", i), 300))) })
		},
	},
	{
		number: "28", name: "200 distinct prompts of 200 kB at once", compare: true, seldom: true, memory: memoryOf(200, 0, 200_000),
		engine: func(_ int, c *enginesim.ServerConfig) { c.PrefillRate = 1e6 },
		disturb: func(x *exercise) {
			inParallel(200, 200, func(i int) { x.expect(ask(text(fmt.Sprint("flood ", i), 200_000))) })
		},
	},
	{
		number: "29", name: "one prompt is 95 % of the load", compare: true, seldom: true,
		disturb: func(x *exercise) { x.hot.Store(true); x.dwell() },
		mend:    func(x *exercise) { x.hot.Store(false) },
	},
	{
		number: "30", name: "500 identical new prompts at once", compare: true, seldom: true,
		disturb: func(x *exercise) {
			prompt := ask(text("burst", 8000))
			inParallel(500, 500, func(int) { x.expect(prompt) })
		},
		check: func(x *exercise) {
			var computed, most int64
			for _, s := range x.fleet {
				st := s.Stats()
				computed += st.PromptTokens - st.CachedTokens
				most = max(most, st.Finished)
			}
			x.Logf("%d tokens were computed, the busiest replica finished %d requests", computed, most)
			if computed > 500*2000/2 {
				x.Errorf("%d tokens were computed for 500 times the same 2000", computed)
			}
		},
	},
	{
		number: "31a", name: fmt.Sprintf("all saturated: %d wait, abort at once, recover", sized(300, 10_000)), memory: memoryOf(24, sized(300, 10_000), sized(20_000, 2000)), compare: true, seldom: true,
		engine:  func(_ int, c *enginesim.ServerConfig) { c.MaxSeqs = 8 },
		disturb: saturate,
	},
	{
		number: "31b", name: "all saturated: the queue is full, the next are refused", excused: []string{"status 503"},
		policy:  "queue_max 50\nqueue_full refuse",
		engine:  func(_ int, c *enginesim.ServerConfig) { c.MaxSeqs = 8 },
		disturb: overfill,
	},
	{
		number: "32", name: "rolling update with drain", spread: true,
		disturb: func(x *exercise) {
			for i, s := range x.fleet {
				addr := x.addrs[i]
				x.admin("/kv_cache/drain?replica=" + addr)
				await(x, addr+" to be empty", func() bool {
					st := s.Stats()
					return st.Running+st.Waiting == 0 && x.proxy.metric("caddy_kv_cache_replica_in_flight_requests", "replica", addr) == 0
				})
				x.startAgain(s)
				x.admin("/kv_cache/undrain?replica=" + addr)
				x.awaitUse(s)
			}
		},
	},
	{
		number: "36a", name: "engines close idle connections after 1 s, Caddy after 0.5 s", compare: true, seldom: true, disturb: atTheLastMoment,
		engine:  func(_ int, c *enginesim.ServerConfig) { c.IdleTimeout = time.Second },
		options: strings.Replace(drillOptions, "keepalive 2s", "keepalive 500ms", 1),
	},
	{
		number: "36b", name: "engines close idle connections after 1 s, Caddy after 4 s", disturb: atTheLastMoment, compare: true,
		engine:  func(_ int, c *enginesim.ServerConfig) { c.IdleTimeout = time.Second },
		excused: []string{"status 502", "status 503"},
	},
	{
		number: "39", name: "two Caddys, one dies", compare: true, seldom: true, resend: true, excused: []string{cut},
		disturb: func(x *exercise) {
			doomed := x.startSecond()
			x.second.Store(doomed)
			x.dwell()
			_ = doomed.cmd.Process.Kill()
			_ = doomed.cmd.Wait() // it was killed
		},
	},
}

// memoryOf is what Caddy may take by the formula in docs/reliability.md, in MiB: with so many requests of
// so many bytes sent at once besides the load, and so many that wait.
func memoryOf(sent, waiting, bytes int) int {
	const idle, connections, connection = 90 << 20, 100 << 10, 55 << 10
	load := (streamClients + shortClients) * (systemBytes + questionBytes + connections)
	return (idle + load + sent*(bytes+connections) + waiting*(bytes+connection)) >> 20
}

// metricsDrill has the metrics pages of one or of all replicas go wrong for a while.
func metricsDrill(number, name string, mode enginesim.MetricsMode, all bool) drill {
	set := func(x *exercise, mode enginesim.MetricsMode) {
		for i, s := range x.fleet {
			if all || i == 0 {
				s.SetMetrics(mode)
			}
		}
	}
	return drill{
		number: number, name: name, policy: "metrics_timeout 500ms",
		disturb: func(x *exercise) { set(x, mode); x.dwell() },
		mend:    func(x *exercise) { set(x, enginesim.MetricsOK) },
	}
}

// failAll has a replica refuse all its requests, in one way after the other.
func failAll(x *exercise) {
	for _, status := range []int{500, 503, 429} {
		x.busiest().FailNext(status, forever)
		x.dwell()
		x.victim.FailNext(0, 0)
	}
	x.victim.FailNext(500, forever)
}

// takeBack ends failures, and waits until the replica is used again.
func takeBack(x *exercise) {
	x.victim.FailNext(0, 0)
	x.awaitUse(x.victim)
}

// fewErrors checks that a replica that answers errors draws no more requests than it takes to know that,
// where a fair share is a third.
func fewErrors(x *exercise) {
	all := x.of(func(r record) bool { return r.phase == during })
	failed := x.of(func(r record) bool { return r.phase == during && r.kind != "" })
	if x.Logf("%d of %d requests were answered with errors", len(failed), len(all)); len(failed) > len(all)/6 {
		x.Errorf("%d of %d requests were answered with errors", len(failed), len(all))
	}
}

// atTheLastMoment sends many requests just when connections have been idle for a second.
func atTheLastMoment(x *exercise) {
	for range sized(4, 80) {
		inParallel(sized(60, 250), 250, func(i int) { x.send(i, i%systemPrompts, false) })
		time.Sleep(time.Second - time.Duration(rand.IntN(20))*time.Millisecond)
	}
}

// saturate sends much more than the fleet can do, has all of it wait, and then all clients leave.
func saturate(x *exercise) {
	ctx, cancel := context.WithCancel(x.Context())
	defer cancel()
	var flood sync.WaitGroup
	for i := range sized(300, 10_000) {
		flood.Go(func() {
			r := x.proxy.request(http.MethodPost, chatPath, nil).WithContext(ctx)
			setBody(r, streamed(text(fmt.Sprint("flood ", i), sized(20_000, 2_000)), 50))
			exchange(x.proxy.client, r)
		})
	}
	if !x.ours() {
		time.Sleep(5 * time.Second)
		cancel()
		flood.Wait()
		return
	}
	await(x, "requests to be held back", func() bool {
		waiting := x.proxy.metric("caddy_kv_cache_waiting_requests")
		x.note = fmt.Sprintf("; %.0f waited at once", waiting)
		return waiting > float64(sized(50, 5000))
	})
	cancel()
	flood.Wait()
	await(x, "the waiting to be forgotten", func() bool {
		return x.proxy.metric("caddy_kv_cache_waiting_requests") <= streamClients+shortClients
	})
}

// overfill sends much more than may wait. What is refused is told when to come again, and the rest is served.
func overfill(x *exercise) {
	var served, refused, most atomic.Int64
	var flood sync.WaitGroup
	for i := range 300 {
		flood.Go(func() {
			a := x.proxy.post(chatPath, ask(text(fmt.Sprint("flood ", i), 20_000)))
			switch after, err := strconv.Atoi(a.header.Get("Retry-After")); {
			case a.bad() == nil:
				if served.Add(1); err == nil {
					x.Error("an answer tells its client to come again")
				}
			case a.status == http.StatusServiceUnavailable && err == nil && after > 0:
				refused.Add(1)
			default:
				x.Errorf("neither served nor told when to come again: %v, Retry-After %q", a.bad(), a.header.Get("Retry-After"))
			}
		})
	}
	over := make(chan struct{})
	go func() { flood.Wait(); close(over) }()
	for ended := false; !ended; {
		select {
		case <-over:
			ended = true
		case <-time.After(20 * time.Millisecond):
			most.Store(max(most.Load(), int64(x.proxy.metric("caddy_kv_cache_waiting_requests"))))
		}
	}
	x.note = fmt.Sprintf("; of 300 more %d were served and %d refused, %d waited at once", served.Load(), refused.Load(), most.Load())
	if served.Load() < 50 || refused.Load() == 0 || most.Load() > 50 {
		x.Errorf("of 300 %d were served and %d refused, %d waited at once", served.Load(), refused.Load(), most.Load())
	}
}

// leftAlone checks that a replica got nothing after it was known to hang.
func leftAlone(x *exercise) {
	if some := x.of(func(r record) bool {
		return r.phase == during && r.began.After(x.known) && r.replica == x.victim.Addr()
	}); len(some) > 0 {
		x.Errorf("%d requests were sent to a replica that was known to hang", len(some))
	}
}

// busiest makes the replica that runs most the victim.
func (x *exercise) busiest() *enginesim.Server {
	if x.victim != nil {
		return x.victim
	}
	most := -1
	for _, s := range x.fleet {
		if n := s.Stats().Running; n > most {
			most, x.victim = n, s
		}
	}
	return x.victim
}

// startAgain starts an engine, which is stopped first if it runs.
func (x *exercise) startAgain(s *enginesim.Server) {
	x.Helper()
	if err := s.Restart(); err != nil {
		x.Fatal(err)
	}
}

// awaitUse waits until a request that begins from now on is answered by an engine.
func (x *exercise) awaitUse(s *enginesim.Server) {
	x.Helper()
	x.awaitUseOf(s.Addr())
}

func (x *exercise) awaitUseOf(addr string) {
	x.Helper()
	begin := time.Now()
	await(x, addr+" to get requests again", func() bool {
		return len(x.of(func(r record) bool { return r.began.After(begin) && r.replica == addr && r.kind == "" })) > 0
	})
}

// awaitAvoided waits until it is known that an engine hangs.
func (x *exercise) awaitAvoided(addr string) {
	x.Helper()
	if !x.ours() {
		time.Sleep(5 * time.Second)
		x.countHanging()
		return
	}
	x.proxy.awaitRefused(addr)
	x.known = time.Now()
	x.countHanging()
	x.join()
}

// awaitScrapes waits until a policy that scrapes knows how a replica is.
func (x *exercise) awaitScrapes(addrs ...string) {
	x.Helper()
	if x.ours() {
		x.proxy.awaitScrapes(addrs...)
	}
}

// slowDown lets an engine run for a tenth of the time.
func (x *exercise) slowDown(s *enginesim.Server) {
	x.faulty.Store(true)
	go func() {
		defer s.StallEnd()
		for x.faulty.Load() {
			s.Stall()
			time.Sleep(90 * time.Millisecond)
			s.StallEnd()
			time.Sleep(10 * time.Millisecond)
		}
	}()
	x.dwell()
	x.known = time.Now()
}

// load reloads the configuration with these upstreams.
func (x *exercise) load(addrs []string) {
	x.Helper()
	if status, answer := x.proxy.load(x.proxy.caddyfile(x.directives(addrs))); status != http.StatusOK {
		x.Fatalf("reload: %d %s", status, answer)
	}
}

func (x *exercise) admin(path string) {
	x.Helper()
	if status, answer := x.proxy.ask(http.MethodPost, path, "", nil); status != http.StatusOK {
		x.Fatalf("%s: %d %s", path, status, answer)
	}
}

// expect chats and wants an answer.
func (x *exercise) expect(body string) { x.fine(x.proxy.post(chatPath, body).bad()) }

// fine counts an error that one of the drill's own requests ended with, and fails the drill unless it is
// that of the policy it is compared with.
func (x *exercise) fine(err error) {
	if err == nil {
		return
	}
	if x.ours() {
		x.Error(err)
	}
	x.spoiled.Add(1)
}

// openMany opens streams at once and reads a token of each or nothing. What it returns leaves them.
func (x *exercise) openMany(n int, read bool) (leave func()) {
	all := make([]*stream, n)
	inParallel(n, n, func(i int) {
		s, err := x.proxy.tryOpen(text(fmt.Sprint("stream ", i), 1000), 1000)
		if err != nil {
			x.fine(err)
			return
		}
		all[i] = s
		if !read {
			return
		}
		if more, err := s.next(); !more {
			x.fine(fmt.Errorf("stream %d ended at once: %w", i, err))
		}
	})
	return func() {
		for _, s := range all {
			if s != nil {
				s.abort()
			}
		}
	}
}

// sendSlowly sends a request of 2 kB in two seconds.
func (x *exercise) sendSlowly(i int) {
	body := ask(text(fmt.Sprint("slow ", i), 2000))
	reader, writer := io.Pipe()
	go func() {
		for rest := body; rest != ""; {
			n := min(100, len(rest))
			if _, err := io.WriteString(writer, rest[:n]); err != nil {
				return
			}
			rest = rest[n:]
			time.Sleep(100 * time.Millisecond)
		}
		_ = writer.Close()
	}()
	r := x.proxy.request(http.MethodPost, chatPath, reader)
	r.ContentLength = int64(len(body))
	r.Header.Set("Content-Type", "application/json")
	x.fine(exchange(x.proxy.client, r).bad())
	_ = reader.Close()
}

// startSecond starts another Caddy before the same fleet, which the drill ends.
func (x *exercise) startSecond() *proxy {
	p := newProxy(x.T)
	p.level = "WARN"
	file := filepath.Join(p.dir, "Caddyfile")
	if err := os.WriteFile(file, []byte(p.caddyfile(x.directives(x.addrs))), 0o600); err != nil {
		x.Fatal(err)
	}
	p.cmd = exec.Command(binary(x.T), "run", "--config", file, "--adapter", "caddyfile")
	p.cmd.Env = environment(p.dir)
	if err := p.cmd.Start(); err != nil {
		x.Fatal(err)
	}
	x.Cleanup(func() { _ = p.cmd.Process.Kill() }) // where the drill was given up
	await(x, "the second Caddy to serve", func() bool {
		status, _ := p.ask(http.MethodGet, "/config/", "", nil)
		return status == http.StatusOK
	})
	return p
}
