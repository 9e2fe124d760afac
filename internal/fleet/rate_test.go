// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"testing"
	"time"

	"github.com/seed-2fa47a1e/caddy-kv-cache/metrics"
)

// Machines of one kind are not told apart by how busy they are; those of two
// kinds are.
func TestPace(t *testing.T) {
	const idle, busy = 10_000.0, 6_000.0 // tokens a second of prefill time
	learn := func(p *Replica, unloaded float64) {
		for i := range 200 {
			rate := unloaded
			if i%20 != 0 { // nearly always busy
				rate *= busy / idle
			}
			p.rate.observe(work{tokens: 50_000, requests: 4, prefilled: 50_000, pairs: true, prefill: 50_000 / rate, seconds: 10})
		}
	}
	for _, c := range []struct {
		name         string
		speeds, want []float64
	}{
		{"equal", []float64{idle, idle, idle}, []float64{1, 1, 1}},
		{"nearly equal", []float64{idle, 1.1 * idle}, []float64{1, 1}},
		{"two kinds", []float64{idle, 2 * idle}, []float64{2. / 3, 4. / 3}},
	} {
		t.Run(c.name, func(t *testing.T) {
			mean := 0.0
			for _, s := range c.speeds {
				mean += s / float64(len(c.speeds))
			}
			for i, s := range c.speeds {
				p := NewRegistry().stray("a:1")
				learn(p, s)
				p.assumed.speed = mean
				if got := p.pace(); got < c.want[i]*0.9 || got > c.want[i]*1.1 {
					t.Errorf("replica of %v tokens a second has pace %v, want %v", s, got, c.want[i])
				}
			}
			// The rate that a queue drains at is that of its load.
			p := NewRegistry().stray("a:1")
			learn(p, idle)
			if r := p.perSecond(); r > 0.8*idle {
				t.Errorf("rate %v of a machine that is nearly always busy", r)
			}
		})
	}
}

// The time in prefill is read from the engine, or worked out from what it says
// of queue and first token.
func TestPrefillBetween(t *testing.T) {
	fact := func(v float64) metrics.Fact { return metrics.Fact{Value: v, Known: true} }
	for _, c := range []struct {
		name       string
		prev, next metrics.Snapshot
		want       float64
	}{
		{"told", metrics.Snapshot{PrefillSeconds: fact(1)}, metrics.Snapshot{PrefillSeconds: fact(4), FirstTokenSeconds: fact(9), QueueSeconds: fact(0)}, 3},
		{"worked out", metrics.Snapshot{FirstTokenSeconds: fact(10), QueueSeconds: fact(4)}, metrics.Snapshot{FirstTokenSeconds: fact(18), QueueSeconds: fact(7)}, 5},
		{"queue told earlier", metrics.Snapshot{FirstTokenSeconds: fact(10), QueueSeconds: fact(4)}, metrics.Snapshot{FirstTokenSeconds: fact(11), QueueSeconds: fact(9)}, 0},
		{"unknown", metrics.Snapshot{FirstTokenSeconds: fact(10)}, metrics.Snapshot{FirstTokenSeconds: fact(18)}, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := prefillBetween(&c.prev, &c.next); got != c.want {
				t.Errorf("%v seconds, want %v", got, c.want)
			}
		})
	}
}

// An engine counts a prompt's tokens when its prefill is done, and the time it
// took, with the tokens again, when the request ends.
func TestRateOfTokensAndTimesApart(t *testing.T) {
	var r rate
	for range 20 {
		r.observe(work{tokens: 20_000, requests: 2, pairs: true, seconds: 1})
		r.observe(work{pairs: true, seconds: 5})
		r.observe(work{prefilled: 20_000, prefill: 2, pairs: true, seconds: 1})
	}
	if got, want := r.perSecond(0, true), 10_000*rateLean; got < want*0.99 || got > want*1.01 {
		t.Errorf("rate %v, want %v", got, want)
	}
}

// A replica can do what it was seen to do from when the first of some requests in
// a row was sent; what was in its cache after all shows nothing.
func TestShown(t *testing.T) {
	start := time.Unix(1_700_000_000, 0)
	at := func(seconds float64) time.Time { return start.Add(time.Duration(seconds * float64(time.Second))) }
	type look struct {
		now, since    float64
		tokens, begun float64
	}
	for _, c := range []struct {
		name  string
		looks []look
		want  float64
	}{
		{"one prompt", []look{{1, 0.5, 8000, 8000}}, 16_000},
		{"too little", []look{{1, 0.9, 7000, 7000}}, 0},
		{"the fastest stretch", []look{{1, 0, 9000, 9000}, {2, 1, 20_000, 20_000}, {3, 2, 1000, 1000}}, 20_000},
		{"several looks", []look{{1, 0, 0, 6000}, {2, 0, 6000, 24_000}, {3, 1, 24_000, 0}}, 10_000},
		{"nothing in between", []look{{1, 0, 5000, 5000}, {2, 2, 0, 0}, {3, 2.5, 5000, 5000}}, 10_000. / 3},
		{"cached after all", []look{{1, 0.5, 80_000, 8000}}, 16_000},
		{"begun before", []look{{1, 0, 0, 12_000}, {2, 0, 12_000, 0}}, 6000},
	} {
		t.Run(c.name, func(t *testing.T) {
			var s shown
			for _, l := range c.looks {
				s.observe(stretch{at(l.since), l.tokens, l.begun}, at(l.now))
			}
			if s.most < 0.99*c.want || s.most > c.want {
				t.Errorf("shown %v tokens a second, want %v", s.most, c.want)
			}
		})
	}
}

// What was shown long ago counts less and less.
func TestShownFades(t *testing.T) {
	var s shown
	now := time.Unix(1_700_000_000, 0)
	s.observe(stretch{now.Add(-time.Second), 50_000, 50_000}, now)
	for range 400 {
		now = now.Add(time.Second)
		s.observe(stretch{now.Add(-time.Second), 10, 10}, now)
	}
	if s.most > 30_000 || s.most < 10_000 {
		t.Errorf("of 50,000 tokens a second %v are left after 400 scrapes with news", s.most)
	}
}

// What a replica did for others as well shows nothing, before or after they were
// noticed.
func TestShownWithOthers(t *testing.T) {
	b := newBench(t, Config{})
	page := func(firsts, computed float64) {
		b.pass(time.Second)
		b.scrape(metrics.Snapshot{FirstTokens: known(firsts), PromptTokens: known(computed), CachedPromptTokens: known(0)})
	}
	page(0, 0)
	b.send(20_000, 20_000)
	b.send(20_000, 20_000)
	page(2, 40_000)
	if rate := b.load().Rate; rate < 40_000 {
		t.Errorf("rate %v, and 40,000 tokens were computed in a second", rate)
	}
	for i := range 3 {
		page(10+float64(i), 90_000*float64(1+i)) // of those we did not ask for
	}
	if rate := b.load().Rate; rate != DefaultPrefillRate {
		t.Errorf("rate %v by what was computed for others", rate)
	}
}

// What was only believed to be uncached shows nothing to an engine that tells how
// long its prefills took: some of it was cached.
func TestPrefillTimesBeforeBelief(t *testing.T) {
	b := newBench(t, Config{})
	for i := range 20 {
		n := float64(i + 1)
		b.send(20_000, 20_000).Finish(b.now)
		b.pass(time.Second)
		b.scrape(metrics.Snapshot{FirstTokens: known(n), PrefillSeconds: known(2 * n)})
	}
	if rate, want := b.load().Rate, 10_000*rateLean; rate < 0.99*want || rate > 1.01*want {
		t.Errorf("rate %v of 20,000 tokens in two seconds of prefill, want %v", rate, want)
	}
}

// Of a fleet of which no replica has told enough the prefill times of all tell, and
// what was seen to be computed, where they do.
func TestPooledRate(t *testing.T) {
	for _, tt := range []struct {
		name                  string
		tokens, seconds, seen float64 // of each of three replicas
		least, most           float64
	}{
		{"nothing", 0, 0, 0, 10_000, 10_000},
		{"slow, one after another", 3000, 3, 900, 1100, 1300},
		{"fast, sharing steps", 3000, 3, 9000, 9900, 9900},
		{"no prefill times, which may be a fleet of two kinds", 0, 0, 20_000, 10_000, 10_000},
	} {
		all := prior()
		for range 3 {
			all.pool(&rate{tokens: tt.tokens, seconds: tt.seconds, shown: shown{glimpsed: tt.seen}})
		}
		if got := all.pooled(); got < tt.least || got > tt.most+1e-6 {
			t.Errorf("%s: %.0f tokens a second, want %v to %v", tt.name, got, tt.least, tt.most)
		}
	}
}

// A fleet of slow machines is known for it after its first prompts, long before one
// of them has computed enough to be known by itself. Short prompts tell less.
func TestSlowFleetIsKnownSoon(t *testing.T) {
	for _, tt := range []struct {
		name            string
		tokens, seconds float64 // of each of the first prompts
		least, most     float64
	}{
		{"slow", 3000, 3, 1000, 1600},
		{"as assumed", 3000, 0.3, 9_900, 10_100},
		{"short ones, mostly overhead", 50, 0.02, 7000, 10_000},
	} {
		start := time.Unix(1_700_000_000, 0)
		f := NewRegistry().New(Config{}, []string{"a", "b", "c"})
		page := func(addr string, n float64, now time.Time) {
			f.Observe(f.Replica(addr, now), metrics.Scrape{Snapshot: &metrics.Snapshot{
				At: now, Engine: metrics.VLLM, FirstTokens: known(n),
				PromptTokens: known(n * tt.tokens), CachedPromptTokens: known(0), PrefillSeconds: known(n * tt.seconds),
			}}, now)
		}
		if got := f.Rate(); got != DefaultPrefillRate {
			t.Errorf("%s: %v tokens a second while nothing is known", tt.name, got)
		}
		for n := range 2 {
			page("a", float64(n), start.Add(time.Duration(n)*time.Second))
			page("b", float64(n), start.Add(time.Duration(n)*time.Second))
		}
		if got := f.Rate(); got < tt.least || got > tt.most {
			t.Errorf("%s: %.0f tokens a second after two prompts, want %v to %v", tt.name, got, tt.least, tt.most)
		}
		c := f.Replica("c", start).Load(start)
		if c.RateKnown || c.Rate != f.Rate() {
			t.Errorf("%s: %v tokens a second of one that has computed nothing (known: %v)", tt.name, c.Rate, c.RateKnown)
		}
	}
}
