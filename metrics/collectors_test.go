// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"math"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// gather reads all series of a fleet from a registry as each config has one,
// which checks that descriptions, names and labels are consistent. Histograms
// count their observations.
func gather(t *testing.T, fleet string) map[string]float64 {
	t.Helper()
	r := prometheus.NewPedanticRegistry()
	for range 2 { // a second time is no error
		if err := Register(r); err != nil {
			t.Fatal(err)
		}
	}
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	series := make(map[string]float64)
	for _, f := range families {
		if !strings.HasPrefix(f.GetName(), "caddy_kv_cache_") {
			t.Errorf("%s is outside the namespace", f.GetName())
		}
		for _, m := range f.GetMetric() {
			key, mine := f.GetName(), false
			for _, l := range m.GetLabel() {
				mine = mine || l.GetName() == "fleet" && l.GetValue() == fleet
				if l.GetName() != "fleet" {
					key += " " + l.GetValue()
				}
			}
			if mine {
				series[key] = m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
			}
		}
	}
	return series
}

func TestRegisterNil(t *testing.T) {
	if err := Register(nil); err != nil {
		t.Error(err)
	}
}

func TestDecisionsAreCounted(t *testing.T) {
	d := NewDecisions("counted", "p", []string{"match", "none"}, []string{"failing"})
	defer d.Close()
	d.Count(&Choice{Reason: "match", Prompt: 100, Hit: 60, Cost: 5, Next: math.Inf(1), Took: time.Millisecond})
	d.Count(&Choice{Reason: "match", Prompt: 100, Hit: -1, Cost: math.NaN(), Retry: true, Trace: "4bf92f3577b34da6a3ce929d0e0e4736"})
	d.Count(&Choice{Reason: "nonsense"})
	d.Avoided("failing")
	d.Avoided("nonsense")
	d.Waited(WaitSent, time.Second)
	d.Waited("nonsense", time.Second)
	got := gather(t, "counted")
	for series, want := range map[string]float64{
		"caddy_kv_cache_decisions_total p match":      2,
		"caddy_kv_cache_decisions_total p none":       0,
		"caddy_kv_cache_prompt_tokens_total p":        200,
		"caddy_kv_cache_predicted_hit_tokens_total p": 60,
		"caddy_kv_cache_decision_duration_seconds p":  3,
	} {
		if v, ok := got[series]; !ok || v != want {
			t.Errorf("%s is %v (%v), want %v", series, v, ok, want)
		}
	}
	for series := range got {
		if strings.Contains(series, "nonsense") {
			t.Errorf("%s is of no closed list", series)
		}
	}
}

// During a reload the new config opens its label sets before the old one closes
// them: the counters go on, and end with the last.
func TestLabelSetsEndWithTheirLastUser(t *testing.T) {
	const series = "caddy_kv_cache_decisions_total p match"
	reasons := []string{"match"}
	old := NewDecisions("reloaded", "p", reasons, nil)
	old.Count(&Choice{Reason: "match"})
	next := NewDecisions("reloaded", "p", reasons, nil)
	other := NewDecisions("reloaded", "other", reasons, nil)
	old.Close()
	next.Count(&Choice{Reason: "match"})
	old.Count(&Choice{Reason: "match"}) // a straggler
	if got := gather(t, "reloaded")[series]; got != 3 {
		t.Errorf("the counter is at %v after a reload, want 3", got)
	}
	next.Close()
	left := gather(t, "reloaded")
	for name := range left {
		if !strings.Contains(name, " other") {
			t.Errorf("%s outlives its policy", name)
		}
	}
	if len(left) == 0 {
		t.Error("another policy's series are gone as well")
	}
	old.Count(&Choice{Reason: "match"}) // must not fail, nor bring it back
	other.Close()
	if left := gather(t, "reloaded"); len(left) != 0 {
		t.Errorf("%v is left", left)
	}
}

func TestReplicasAppearWhileWatched(t *testing.T) {
	view := func(rate float64, replicas ...string) Source {
		return Source{
			Fleet: func() FleetView {
				f := FleetView{Name: "watched"}
				for _, r := range replicas {
					f.Replicas = append(f.Replicas, View{Fleet: "watched", Replica: r, Age: -1, Rate: rate, Eligible: true, State: "eligible"})
				}
				return f
			},
			Index: func() IndexView { return IndexView{Blocks: 1, Pairs: 2, Bytes: 3} },
		}
	}
	const rate = "caddy_kv_cache_replica_prefill_tokens_per_second "
	stopOld := Watch(view(1, "a", "b"))
	stopNew := Watch(view(2, "a", "c"))
	got := gather(t, "watched")
	if got[rate+"a"] != 2 || got[rate+"c"] != 2 {
		t.Errorf("the newer config does not speak for the fleet: %v", got)
	}
	if _, ok := got[rate+"b"]; ok {
		t.Error("a replica that the newer config lacks is still told of")
	}
	if _, ok := got["caddy_kv_cache_scrape_age_seconds a"]; ok {
		t.Error("a replica that was never scraped has an age")
	}
	stopOld()
	stopOld()
	if got := gather(t, "watched"); got[rate+"a"] != 2 {
		t.Errorf("after the old config ended: %v", got)
	}
	stopNew()
	if got := gather(t, "watched"); len(got) != 0 {
		t.Errorf("%v outlives its config", got)
	}
}

func TestLearnerIsExported(t *testing.T) {
	v := &LearnerView{Rendered: 1, Tokenized: 2, Known: 3, Full: 4, Stale: 5, Unsupported: 6, Mismatched: 7, Failed: 8, RenderRefused: 9, Waiting: 10}
	defer Watch(Source{Fleet: func() FleetView { return FleetView{Name: "learns", Learner: v} }})()
	defer Watch(Source{Fleet: func() FleetView { return FleetView{Name: "learns not"} }})()
	got := gather(t, "learns")
	for i, outcome := range []string{"rendered", "tokenized", "known", "full", "stale", "unsupported", "mismatched", "failed"} {
		if series := "caddy_kv_cache_learner_prompts_total " + outcome; got[series] != float64(i+1) {
			t.Errorf("%s is %v, want %d", series, got[series], i+1)
		}
	}
	if got["caddy_kv_cache_learner_render_refusals_total"] != 9 || got["caddy_kv_cache_learner_waiting_prompts"] != 10 {
		t.Errorf("refusals and waiting in %v", got)
	}
	for series := range gather(t, "learns not") {
		if strings.Contains(series, "learner") {
			t.Errorf("%s of a fleet that follows no events", series)
		}
	}
}

// What an engine does not say is not exported, least of all as 0.
func TestUnknownFactsAreNotExported(t *testing.T) {
	snapshot := &Snapshot{Engine: VLLM, Running: Fact{Value: 3, Known: true}}
	defer Watch(Source{Fleet: func() FleetView {
		return FleetView{Name: "facts", Replicas: []View{{Fleet: "facts", Replica: "a", Snapshot: snapshot}, {Fleet: "facts", Replica: "bad \xff", Age: -1}}}
	}})()
	got := gather(t, "facts")
	if got["caddy_kv_cache_engine_running_requests a"] != 3 {
		t.Errorf("running requests are %v", got["caddy_kv_cache_engine_running_requests a"])
	}
	if _, ok := got["caddy_kv_cache_engine_waiting_requests a"]; ok {
		t.Error("unknown waiting requests are exported")
	}
	if got["caddy_kv_cache_engine_info vllm a"] != 1 {
		t.Errorf("no engine_info in %v", got)
	}
	for series := range got {
		if strings.HasPrefix(series, "caddy_kv_cache_engine_") && strings.Contains(series, "bad") {
			t.Errorf("%s, but the replica was never scraped", series)
		}
	}
}

// Configs come and go while the metrics are read. Run with -race.
func TestCollectorsConcurrently(t *testing.T) {
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 50 {
				d := NewDecisions("busy", "p", []string{"match"}, nil)
				stop := Watch(Source{Fleet: func() FleetView {
					return FleetView{Name: "busy", Replicas: []View{{Fleet: "busy", Replica: "a"}}}
				}})
				d.Count(&Choice{Reason: "match", Prompt: 1})
				stop()
				d.Close()
			}
		})
	}
	for range 20 {
		gather(t, "busy")
	}
	wg.Wait()
	if left := gather(t, "busy"); len(left) != 0 {
		t.Errorf("%v is left", left)
	}
}
