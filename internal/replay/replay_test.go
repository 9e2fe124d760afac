// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"bytes"
	"context"
	"encoding/xml"
	"errors"
	"io"
	"iter"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/enginesim"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/trace"
)

func conversation(t *testing.T) *Traffic {
	t.Helper()
	recorded, err := trace.Open("testdata/conversation.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	traffic, err := Load(recorded.Requests(), nil, 16)
	if err != nil {
		t.Fatal(err)
	}
	return traffic
}

func chats(t *testing.T, n int) *Traffic {
	t.Helper()
	traffic, err := Load(nil, trace.Workload{Seed: 1, Chats: n}.Sessions(), 16)
	if err != nil {
		t.Fatal(err)
	}
	return traffic
}

func replicas(n int) []enginesim.Config { return make([]enginesim.Config, n) }

func contenders(t *testing.T, names ...string) []Contender {
	t.Helper()
	var cs []Contender
	for _, name := range names {
		c, err := ParseContender(name)
		if err != nil {
			t.Fatal(err)
		}
		cs = append(cs, c)
	}
	return cs
}

// study plays traffic for some policies over three seeds.
func study(t *testing.T, traffic *Traffic, setup Setup, names ...string) map[string]*Result {
	t.Helper()
	setup.Scrape, setup.Jitter = time.Second, time.Second
	results, err := Study{Setup: setup, Traffic: traffic, Contenders: contenders(t, names...), Seeds: 3}.Run(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	by := make(map[string]*Result)
	for i := range results {
		by[results[i].Policy] = &results[i]
	}
	return by
}

func meanTTFT(s *Summary) float64 { return s.Mean }
func hitRate(s *Summary) float64  { return s.HitRate }

// In a burst that begins with the replay, when a policy has had one look at the
// replicas, the short work goes first.
func TestBurst(t *testing.T) {
	traffic, err := Load(nil, trace.Workload{Seed: 1, Chats: 100, Ramp: time.Second}.Sessions(), 16)
	if err != nil {
		t.Fatal(err)
	}
	by := study(t, traffic, Setup{Engines: replicas(2)}, "kv_cache_aware", "prefix_hash", "least_conn", "oracle")
	for _, other := range []string{"prefix_hash", "least_conn", "oracle"} {
		if ours, theirs := by["kv_cache_aware"].Mean.Mean, by[other].Mean.Mean; ours > 0.75*theirs {
			t.Errorf("mean TTFT is %.2f s with kv_cache_aware, %.2f with %s", ours, theirs, other)
		}
	}
}

// Prompts that come at once share steps, each of which counts in the prefill time of
// all. That does not make replicas seem slow of which nothing else is known: 0.43 of
// the time was taken here when it did.
func TestFirstStepsAreShared(t *testing.T) {
	traffic, err := Load(nil, trace.Workload{Seed: 1, Chats: 300, Ramp: time.Second, OneOffs: -1}.Sessions(), 16)
	if err != nil {
		t.Fatal(err)
	}
	by := study(t, traffic, Setup{Engines: replicas(6)}, "kv_cache_aware", "least_conn")
	if ours, theirs := by["kv_cache_aware"].Mean.Mean, by["least_conn"].Mean.Mean; ours > 0.38*theirs {
		t.Errorf("mean TTFT is %.2f s with kv_cache_aware, %.2f with least_conn", ours, theirs)
	}
}

// A fleet that is started as a whole serves its first burst about as well as one
// that has been up for long: there is nobody to warm up beside.
func TestNewFleet(t *testing.T) {
	traffic, err := Load(nil, later(5*time.Second, trace.Workload{
		Seed: 1, Chats: 150, SystemPrompts: 12, SystemTokens: 6000, Turns: 3, Ramp: time.Second, OneOffs: -1,
	}.Sessions()), 16)
	if err != nil {
		t.Fatal(err)
	}
	burst := func(changes ...Change) *Summary {
		t.Helper()
		return &study(t, traffic, Setup{Engines: replicas(4), Changes: changes}, "kv_cache_aware")["kv_cache_aware"].Mean
	}
	var starts []Change
	for i := range 4 {
		starts = append(starts, Change{Kind: Restart, Replica: i, At: time.Millisecond})
	}
	if fresh, old := burst(starts...), burst(); fresh.Mean > 1.15*old.Mean {
		t.Errorf("mean TTFT is %.2f s on a fleet that was started as a whole, %.2f on an old one", fresh.Mean, old.Mean)
	}
}

// Where the chats' histories are several times what the caches hold, none would have
// a hit if all were treated alike: without minding what a prompt evicts, 0.45 are found
// here.
func TestShortCaches(t *testing.T) {
	traffic, err := Load(nil, trace.Workload{
		Seed: 1, Chats: 145, SystemPrompts: 50, SystemTokens: 6000, Turns: 12, UserTokens: 50, AnswerTokens: 20,
		Think: 500 * time.Millisecond, Ramp: 10 * time.Second, OneOffs: -1,
	}.Sessions(), 16)
	if err != nil {
		t.Fatal(err)
	}
	engines := replicas(6)
	for i := range engines {
		engines[i].Blocks, engines[i].PrefillRate = 1500, 3000
	}
	by := study(t, traffic, Setup{Engines: engines},
		"kv_cache_aware", "prefix_hash", "weighted_scores", "least_conn")
	ours := &by["kv_cache_aware"].Mean
	if ours.HitRate < 0.6 {
		t.Errorf("hit rate is %.3f", ours.HitRate)
	}
	for _, other := range []string{"prefix_hash", "weighted_scores", "least_conn"} {
		if m := by[other].Mean.Mean; ours.Mean >= m {
			t.Errorf("mean TTFT is %.2f s, %.2f with %s", ours.Mean, m, other)
		}
	}
}

// On a fleet that is mostly idle, documents are not crowded into the few caches that
// hold the instruction they begin with: without minding what a prompt takes the place
// of, the longest match finds a tenth more of them.
func TestIdleFleetUsesAllCaches(t *testing.T) {
	documents, _ := trace.KindNamed("documents")
	traffic, err := Load(documents.Requests(1), nil, 16)
	if err != nil {
		t.Fatal(err)
	}
	engines := replicas(24)
	for i := range engines {
		engines[i].Blocks, engines[i].PrefillRate = 8000, 30_000
	}
	by := study(t, traffic, Setup{Engines: engines}, "kv_cache_aware", "match_or_balance")
	ours, other := by["kv_cache_aware"], by["match_or_balance"]
	if ours.Mean.HitRate < 0.7 || Compare(ours, other, meanTTFT) == Higher {
		t.Errorf("hit rate %.3f, mean TTFT %.3f s; %.3f and %.3f by the longest match", ours.Mean.HitRate, ours.Mean.Mean, other.Mean.HitRate, other.Mean.Mean)
	}
}

// later has sessions begin so much later.
func later(by time.Duration, sessions iter.Seq[*trace.Session]) iter.Seq[*trace.Session] {
	return func(yield func(*trace.Session) bool) {
		for s := range sessions {
			if s.Start += by; !yield(s) {
				return
			}
		}
	}
}

// Who beats whom, by more than chance, on a cut-out of the conversation trace.
func TestConversation(t *testing.T) {
	by := study(t, conversation(t), Setup{Engines: replicas(6)},
		"kv_cache_aware", "prefix_hash", "least_conn", "match_or_balance", "overlap_and_load", "oracle")
	ours := by["kv_cache_aware"]
	for _, other := range []string{"prefix_hash", "least_conn", "match_or_balance", "overlap_and_load"} {
		if Compare(ours, by[other], meanTTFT) != Lower {
			t.Errorf("mean TTFT is %.2f s with kv_cache_aware, %.2f with %s", ours.Mean.Mean, by[other].Mean.Mean, other)
		}
	}
	if Compare(by["prefix_hash"], by["least_conn"], hitRate) != Higher {
		t.Errorf("hit rate is %.3f with prefix_hash, %.3f with least_conn", by["prefix_hash"].Mean.HitRate, by["least_conn"].Mean.HitRate)
	}
	if m, o := ours.Mean.Mean, by["oracle"].Mean.Mean; m > 1.1*o {
		t.Errorf("mean TTFT is %.2f s, more than a tenth above that of an oracle that binds on arrival, %.2f", m, o)
	}
}

// Old scrapes are worth less than new ones, but not less than none.
func TestOldScrapes(t *testing.T) {
	traffic := chats(t, 800)
	mean := func(scrape time.Duration) float64 {
		s := Study{
			Setup:   Setup{Engines: replicas(6), Scrape: scrape, Jitter: time.Second},
			Traffic: traffic, Contenders: contenders(t, "kv_cache_aware"), Seeds: 2,
		}
		results, err := s.Run(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return results[0].Mean.Mean
	}
	fresh, none := mean(time.Second), mean(0)
	for _, age := range []time.Duration{5 * time.Second, 15 * time.Second} {
		if old := mean(age); old < fresh || old > 2*none {
			t.Errorf("mean TTFT is %.2f s with scrapes every %v, %.2f with one a second, %.2f with none", old, age, fresh, none)
		}
	}
}

// Pages that lack what other engines' pages lack are worth nearly as much, on
// machines of any speed; without any sign of the queue it is still no worse than
// without a page.
func TestUntold(t *testing.T) {
	for _, w := range []struct {
		name    string
		traffic *Traffic
		setup   Setup
		most    float64 // times the mean TTFT
	}{
		{"chats", chats(t, 800), Setup{Engines: replicas(6)}, 1.3},
		{"fast machines", conversation(t), Setup{Engines: replicas(6), Rate: 3}, 1.9}, // that they are has to be seen first
	} {
		if w.setup.Rate > 0 {
			for i := range w.setup.Engines {
				w.setup.Engines[i].PrefillRate = 30_000
			}
		}
		play := func(scrape time.Duration, untold ...string) Summary {
			s := Study{Setup: w.setup, Traffic: w.traffic, Contenders: contenders(t, "kv_cache_aware"), Seeds: 2}
			s.Setup.Scrape, s.Setup.Jitter = scrape, time.Second
			for _, name := range untold {
				p, err := PartNamed(name)
				if err != nil {
					t.Fatal(err)
				}
				s.Setup.Untold = append(s.Setup.Untold, p)
			}
			results, err := s.Run(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			return results[0].Mean
		}
		all, none := play(time.Second), play(0)
		for _, untold := range [][]string{
			{"first_tokens"},
			{"prefill_times"},
			{"hits", "prompt_tokens"},                                  // vLLM before 0.8
			{"hits", "prefill_times", "usage", "capacity"},             // its Rust front end, and no hits
			{"first_tokens", "hits", "prefill_times", "prompt_tokens"}, // Triton
			{"first_tokens", "prefill_times", "prompt_tokens", "usage", "capacity"}, // a page cut down to five metrics
		} {
			if got := play(time.Second, untold...); got.Mean > w.most*all.Mean || got.HitRate < all.HitRate-0.015 {
				t.Errorf("%s: mean TTFT is %.2f s and the hit rate %.3f where pages do not tell %v, %.2f and %.3f where they do",
					w.name, got.Mean, got.HitRate, untold, all.Mean, all.HitRate)
			}
		}
		if got := play(time.Second, "first_tokens", "gauges", "hits"); got.Mean > 1.2*none.Mean {
			t.Errorf("%s: mean TTFT is %.2f s where nothing tells the queue, %.2f without any page", w.name, got.Mean, none.Mean)
		}
	}
}

// Caddys that do not know of each other see each other's work, and find half of
// the prompts that they did not send.
func TestCaddys(t *testing.T) {
	traffic := chats(t, 400)
	one := study(t, traffic, Setup{Engines: replicas(4)}, "kv_cache_aware", "least_conn")
	two := study(t, traffic, Setup{Engines: replicas(4), Caddys: 2}, "kv_cache_aware", "least_conn")
	hits := func(by map[string]*Result, policy string) float64 { return by[policy].Mean.HitRate }
	least := hits(two, "least_conn")
	if all, some := hits(one, "kv_cache_aware")-least, hits(two, "kv_cache_aware")-least; some < 0.4*all || some > 0.95*all {
		t.Errorf("hit rate is %.3f behind one Caddy, %.3f behind two, %.3f with least_conn", all+least, some+least, least)
	}
	if n, want := two["kv_cache_aware"].Mean.Requests, one["kv_cache_aware"].Mean.Requests; n != want {
		t.Errorf("%d requests behind two Caddys, %d behind one", n, want)
	}
}

// With two kinds of machine the faster ones do more, about as if their rates
// were known.
func TestMixedFleet(t *testing.T) {
	setup := Setup{Engines: replicas(6)}
	for i := range setup.Engines {
		setup.Engines[i].PrefillRate = []float64{7000, 14000}[i%2]
	}
	by := study(t, conversation(t), setup, "kv_cache_aware", "oracle")
	ours := by["kv_cache_aware"]
	if m, o := ours.Mean.Mean, by["oracle"].Mean.Mean; m > 1.15*o {
		t.Errorf("mean TTFT is %.2f s, %.2f with an oracle", m, o)
	}
	slow, fast := 0.0, 0.0
	for i, c := range ours.Detail.Computed {
		if i%2 == 0 {
			slow += c
		} else {
			fast += c
		}
	}
	if fast < 1.3*slow {
		t.Errorf("the fast half computed %.0f tokens, the slow one %.0f", fast, slow)
	}
}

// Chats stay where their history is.
func TestChats(t *testing.T) {
	by := study(t, chats(t, 200), Setup{Engines: replicas(4)}, "kv_cache_aware", "prefix_hash", "round_robin")
	for _, ours := range []string{"kv_cache_aware", "prefix_hash"} {
		if Compare(by[ours], by["round_robin"], hitRate) != Higher {
			t.Errorf("hit rate is %.3f with %s, %.3f with round_robin", by[ours].Mean.HitRate, ours, by["round_robin"].Mean.HitRate)
		}
	}
}

// No rule that a user can install does better by much on traffic of any kind,
// and none does as well on all of it.
func TestKinds(t *testing.T) {
	others := []string{"least_conn", "match_or_balance", "weighted_scores", "overlap_and_load"}
	behind := make(map[string]bool)
	for _, kind := range trace.Kinds {
		traffic, err := Load(first(1200, kind.Requests(1)), nil, 16)
		if err != nil {
			t.Fatal(err)
		}
		by := study(t, traffic, Setup{Engines: replicas(6)}, append(others, "kv_cache_aware")...)
		ours := by["kv_cache_aware"]
		for _, other := range others {
			if m, o := ours.Mean.Mean, by[other].Mean.Mean; m > 1.1*o {
				t.Errorf("%s: mean TTFT is %.3f s with kv_cache_aware, %.3f with %s", kind.Name, m, o, other)
			}
			if Compare(ours, by[other], meanTTFT) == Lower {
				behind[other] = true
			}
		}
	}
	for _, other := range others {
		if !behind[other] {
			t.Errorf("%s is level with kv_cache_aware on everything", other)
		}
	}
}

func first(n int, requests iter.Seq2[trace.Request, error]) iter.Seq2[trace.Request, error] {
	return func(yield func(trace.Request, error) bool) {
		for r, err := range requests {
			if n--; n < 0 || !yield(r, err) {
				return
			}
		}
	}
}

// All contenders answer every request once, whatever happens to replicas, and
// those on the way to a replica that restarts are tried elsewhere.
func TestChangesLoseNothing(t *testing.T) {
	traffic := conversation(t)
	changes := []Change{
		{At: 21300 * time.Millisecond, Replica: 1, Kind: Restart},
		{At: 25500 * time.Millisecond, Replica: 1, Kind: Restart}, // some rule has nothing there at one time or another
		{At: 48 * time.Second, Replica: 1, Kind: Restart},
		{At: 50 * time.Second, Replica: 0, Kind: Restart},
		{At: 30 * time.Second, Replica: 2, Kind: Leave},
		{At: 60 * time.Second, Replica: 2, Kind: Join},
		{At: 40 * time.Second, Replica: 3, Kind: Join},
	}
	for _, c := range Contenders {
		t.Run(c.Name, func(t *testing.T) {
			out, err := Run(Setup{Engines: replicas(4), Scrape: time.Second, Changes: changes}, c.New(), traffic)
			if err != nil {
				t.Fatal(err)
			}
			if len(out) != traffic.Count() {
				t.Fatalf("%d outcomes of %d requests", len(out), traffic.Count())
			}
			retried := 0
			for _, o := range out {
				retried += o.Retries
				if o.Failed {
					continue
				}
				if o.TTFT <= 0 || o.Total < o.TTFT || o.Held < 0 || o.Held > o.TTFT {
					t.Fatalf("impossible times: %+v", o)
				}
				if o.Replica == 3 && o.Arrived+o.Held < 40*time.Second {
					t.Fatalf("sent to a replica before it joined: %+v", o)
				}
			}
			if retried == 0 {
				t.Error("no request was tried again after the restart")
			}
		})
	}
}

// A fleet without replicas refuses instead of hanging.
func TestNoReplica(t *testing.T) {
	for _, c := range Contenders {
		out, err := Run(Setup{Engines: replicas(1), Changes: []Change{{Kind: Leave}}}, c.New(), chats(t, 3))
		if err != nil {
			t.Fatal(err)
		}
		for _, o := range out {
			if !o.Failed && o.Arrived > 0 {
				t.Fatalf("%s: answered by nobody: %+v", c.Name, o)
			}
		}
	}
}

// The same seed gives the same outcome, another one does not.
func TestSeeds(t *testing.T) {
	traffic := conversation(t)
	play := func(seed uint64) Summary {
		out, err := Run(Setup{Engines: replicas(3), Scrape: time.Second, Seed: seed, Jitter: time.Second}, NewAware(), traffic)
		if err != nil {
			t.Fatal(err)
		}
		return Summarize(out, 3)
	}
	if a, b := play(1), play(1); a != b {
		t.Errorf("one seed, two outcomes: %+v and %+v", a, b)
	}
	if a, b := play(1), play(2); a == b {
		t.Error("two seeds, one outcome")
	}
}

// Nobody waits on an idle fleet, where each request has the TTFT that its own
// prompt takes.
func TestIdleFleet(t *testing.T) {
	out, err := Run(Setup{Engines: replicas(8), Scrape: time.Second, Rate: 0.02}, NewAware(), conversation(t))
	if err != nil {
		t.Fatal(err)
	}
	held := 0
	for _, o := range out {
		if o.Held > 0 {
			held++
		}
	}
	// Bursts of the trace come at one moment, however slowly it is played.
	if held > len(out)/5 {
		t.Errorf("%d of %d requests were held back", held, len(out))
	}
}

func TestCopies(t *testing.T) {
	traffic := chats(t, 10)
	setup := Setup{Engines: replicas(2), Scrape: time.Second, Copies: 5}
	out, err := Run(setup, NewAware(), traffic)
	if err != nil {
		t.Fatal(err)
	}
	if len(out) != 5*traffic.Count() {
		t.Errorf("%d requests of 5 × %d", len(out), traffic.Count())
	}
	source := traffic.source(setup.withDefaults())
	chains := make(map[uint64]int)
	first := source.take(0)
	for c := first; c != nil && c.play.records[0] == first.play.records[0]; c = source.take(0) {
		chain := c.chain(0)
		if common(chain, first.chain(0)) < first.shared[0] {
			t.Error("copies do not share the system prompt")
		}
		chains[chain[len(chain)-1]]++
		if source.due() == never {
			break
		}
	}
	for chain, n := range chains {
		if n > 1 {
			t.Errorf("%d copies share their whole prompt %x", n, chain)
		}
	}
	if _, err := Run(Setup{Engines: replicas(1), Copies: 2}, NewAware(), conversation(t)); err == nil {
		t.Error("requests without sessions were copied")
	}
}

func TestParse(t *testing.T) {
	for text, want := range map[string]string{
		"restart:2@90s": "", "leave:0@0s": "", "join:1@1m30s": "",
		"": "no time", "stop:1@3s": `"stop" is no change`, "leave:x@3s": `"x" is no number`, "leave:-1@3s": "no number", "leave:1@x": `"x" is no time`, "leave:1@-3s": "no time",
	} {
		c, err := ParseChange(text)
		switch {
		case want == "" && err != nil:
			t.Errorf("%s: %v", text, err)
		case want == "":
			if again, err := ParseChange(c.String()); err != nil || again != c {
				t.Errorf("%s is written as %s", text, c)
			}
		case err == nil || !strings.Contains(err.Error(), want):
			t.Errorf("%q: error is %v, want %s", text, err, want)
		}
	}
	for text, want := range map[string]string{
		"nobody": "unknown", "least_conn:x=1": "no settings", "kv_cache_aware:x=1": `no setting "x"`,
		"kv_cache_aware:room=1": "no duration", "kv_cache_aware:slip=a": "no number",
	} {
		if _, err := ParseContender(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: error is %v, want %s", text, err, want)
		}
	}
	c := contenders(t, "kv_cache_aware:match_weight=7,room=250ms")[0]
	if a := c.New().(*Aware); a.Rule.MatchWeight != 7 || a.Terms.Room != 250*time.Millisecond {
		t.Errorf("settings were not taken: %+v %+v", a.Rule, a.Terms)
	}
	if a := NewAware(); a.Rule.MatchWeight == 7 {
		t.Error("settings leak into the defaults")
	}
}

func TestSetupIsChecked(t *testing.T) {
	traffic := conversation(t)
	for name, setup := range map[string]Setup{
		"no replica":     {},
		"block size":     {Engines: []enginesim.Config{{BlockTokens: 32}}},
		"change outside": {Engines: replicas(2), Changes: []Change{{Replica: 2, Kind: Leave}}},
	} {
		if _, err := Run(setup, NewAware(), traffic); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	if _, err := Load(func(func(trace.Request, error) bool) {}, nil, 16); err == nil {
		t.Error("no request is no error")
	}
	broken := errors.New("broken")
	if _, err := Load(func(yield func(trace.Request, error) bool) { yield(trace.Request{}, broken) }, nil, 16); !errors.Is(err, broken) {
		t.Errorf("error is %v", err)
	}
}

func TestCompare(t *testing.T) {
	runs := func(values ...float64) *Result {
		r := new(Result)
		for _, v := range values {
			r.Runs = append(r.Runs, Summary{Mean: v})
		}
		r.sumUp()
		return r
	}
	for _, c := range []struct {
		a, b *Result
		want Verdict
	}{
		{runs(1), runs(2), Unknown},
		{runs(1, 1.1, 0.9), runs(2, 2.1, 1.9), Lower},
		{runs(2, 2.1, 1.9), runs(1, 1.1, 0.9), Higher},
		{runs(1, 2, 3), runs(2, 1, 3.5), Noise},
		{runs(1, 5, 9), runs(1.1, 5.1, 9.1), Lower}, // paired
		{runs(1, 1, 1), runs(1, 1, 1), Noise},
	} {
		if got := Compare(c.a, c.b, meanTTFT); got != c.want {
			t.Errorf("%v against %v: %v, want %v", c.a.Runs, c.b.Runs, got, c.want)
		}
	}
	if r := runs(1, 2, 3); r.Mean.Mean != 2 || math.Abs(r.Spread.Mean-1) > 1e-9 {
		t.Errorf("mean and spread are %v and %v", r.Mean.Mean, r.Spread.Mean)
	}
}

func TestReport(t *testing.T) {
	results, err := Study{
		Setup: Setup{Engines: replicas(2), Scrape: time.Second, Jitter: time.Second}, Traffic: chats(t, 20),
		Contenders: contenders(t, "kv_cache_aware", "least_conn"), Seeds: 2,
	}.Run(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var page bytes.Buffer
	report := Report{Title: "A <b>title</b>", Command: "caddy kv-cache replay", Seeds: 2, Results: results}
	if err := report.Write(&page); err != nil {
		t.Fatal(err)
	}
	text := page.String()
	for _, want := range []string{"kv_cache_aware", "A &lt;b&gt;title", "<svg", "no_match"} {
		if !strings.Contains(text, want) {
			t.Errorf("the page lacks %q", want)
		}
	}
	for _, bad := range []string{"http://", "https://", "<script", "NaN", "Inf"} {
		if strings.Contains(text, bad) {
			t.Errorf("the page has %q", bad)
		}
	}
	for svg := range strings.SplitSeq(text, "<svg") {
		if at := strings.Index(svg, "</svg>"); at > 0 {
			wellFormed(t, "<svg"+svg[:at]+"</svg>")
		}
	}
	if err := new(Report).Write(io.Discard); err == nil {
		t.Error("a report about nothing")
	}
	var plot bytes.Buffer
	if err := report.WritePlot(&plot); err != nil {
		t.Fatal(err)
	}
	wellFormed(t, plot.String())
	for _, want := range []string{">kv_cache_aware</text>", ">least_conn</text>", "prefers-color-scheme:dark", "<polyline"} {
		if !strings.Contains(plot.String(), want) {
			t.Errorf("the plot lacks %q", want)
		}
	}
	if err := new(Report).WritePlot(io.Discard); err == nil {
		t.Error("a plot of nothing")
	}
}

func wellFormed(t *testing.T, svg string) {
	t.Helper()
	d := xml.NewDecoder(strings.NewReader(svg))
	for {
		if _, err := d.Token(); errors.Is(err, io.EOF) {
			return
		} else if err != nil {
			t.Fatalf("plot is no XML: %v", err)
		}
	}
}

func TestStudyStops(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := Study{Setup: Setup{Engines: replicas(2)}, Traffic: chats(t, 5), Contenders: Contenders, Seeds: 2}.Run(ctx)
	if !errors.Is(err, context.Canceled) {
		t.Errorf("error is %v", err)
	}
}

// BenchmarkReplay is what a request costs in a replay, engines included.
func BenchmarkReplay(b *testing.B) {
	recorded, err := trace.Open("testdata/conversation.jsonl")
	if err != nil {
		b.Fatal(err)
	}
	traffic, err := Load(recorded.Requests(), nil, 16)
	if err != nil {
		b.Fatal(err)
	}
	for _, c := range Contenders {
		b.Run(c.Name, func(b *testing.B) {
			var virtual time.Duration
			for b.Loop() {
				out, err := Run(Setup{Engines: replicas(6), Scrape: time.Second}, c.New(), traffic)
				if err != nil {
					b.Fatal(err)
				}
				virtual += out[len(out)-1].Arrived
			}
			b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(b.N*traffic.Count()), "µs/request")
			b.ReportMetric(virtual.Seconds()/b.Elapsed().Seconds(), "x-of-realtime")
		})
	}
}
