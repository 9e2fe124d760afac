// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// sums adds up the values of each family that belongs to a fleet.
func sums(t *testing.T, r *prometheus.Registry, label, value string) map[string]float64 {
	t.Helper()
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	sums := make(map[string]float64)
	for _, f := range families {
		for _, m := range f.GetMetric() {
			mine, name := false, strings.TrimPrefix(f.GetName(), "caddy_kv_cache_")
			for _, l := range m.GetLabel() {
				if l.GetName() == label {
					mine = l.GetValue() == value
				} else if l.GetName() != "fleet" {
					name += " " + l.GetValue()
				}
			}
			if mine {
				sums[name] += m.GetCounter().GetValue() + m.GetHistogram().GetSampleSum()
			}
		}
	}
	return sums
}

func TestGroups(t *testing.T) {
	r := prometheus.NewPedanticRegistry()
	if err := Register(r); err != nil {
		t.Fatal(err)
	}
	const fleet = "groups"
	a, b := NewGroup(fleet, "a"), NewGroup(fleet, "b")
	s := NewShadow(fleet)
	a.Ended(100, 64, 2*time.Second)
	a.Reported(110, 60, 64)
	a.FirstToken(time.Second)
	b.Ended(-1, 0, -1)
	s.Decided(true, 100, Prospect{Hit: 5, FirstToken: time.Second}, Prospect{Hit: 50})
	s.Decided(false, 100, Prospect{Hit: 5}, Prospect{Hit: 50, FirstToken: 2 * time.Second})

	again := NewGroup(fleet, "a") // the config is replaced
	a.Close()
	got := sums(t, r, "fleet", fleet)
	for name, want := range map[string]float64{
		"group_requests_total a": 1, "group_requests_total b": 1,
		"group_prompt_tokens_total a": 100, "group_prompt_tokens_total b": 0,
		"group_predicted_hit_tokens_total a":          64,
		"group_reported_requests_total a":             1,
		"group_reported_prompt_tokens_total a":        110,
		"group_reported_predicted_hit_tokens_total a": 64,
		"group_real_hit_tokens_total a":               60,
		"group_ttft_seconds a":                        1,
		"group_estimated_ttft_seconds a":              2,
		"shadow_decisions_total true":                 1,
		"shadow_decisions_total false":                1,
		"shadow_prompt_tokens_total":                  200,
		"shadow_predicted_hit_tokens_total other":     10,
		"shadow_predicted_hit_tokens_total ours":      100,
		"shadow_estimated_ttft_seconds other":         1,
		"shadow_estimated_ttft_seconds ours":          2,
	} {
		if v, ok := got[name]; !ok || v != want {
			t.Errorf("%s is %v (%v), want %v", name, v, ok, want)
		}
	}
	again.Close()
	b.Close()
	s.Close()
	if left := sums(t, r, "fleet", fleet); len(left) > 0 {
		t.Errorf("left after Close: %v", left)
	}
}

func TestCaptureView(t *testing.T) {
	r := prometheus.NewPedanticRegistry()
	if err := Register(r); err != nil {
		t.Fatal(err)
	}
	stop := WatchCapture("/x.jsonl", func() CaptureView { return CaptureView{Written: 1, Full: 2, Failed: 3} })
	got := sums(t, r, "file", "/x.jsonl")
	if len(got) != 3 || got["capture_lines_total"] != 1 || got["capture_dropped_total queue"] != 2 || got["capture_dropped_total write"] != 3 {
		t.Errorf("got %v", got)
	}
	if stop(); len(sums(t, r, "file", "/x.jsonl")) > 0 {
		t.Error("the file is still told of")
	}
}

func TestGroupsAllocateNothing(t *testing.T) {
	g, s := NewGroup("alloc", "a"), NewShadow("alloc")
	defer g.Close()
	defer s.Close()
	if n := testing.AllocsPerRun(100, func() {
		g.Ended(1, 1, 1)
		g.Reported(1, 1, 1)
		g.FirstToken(1)
		s.Decided(true, 1, Prospect{}, Prospect{})
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
