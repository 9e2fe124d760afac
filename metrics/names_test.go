// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
)

var described = regexp.MustCompile(`fqName: "([^"]+)".*variableLabels: \{([^}]*)\}`)

// families are all that can be exported: names, with their labels.
func families(t *testing.T) map[string]string {
	t.Helper()
	out := make(map[string]string)
	for _, c := range collectors() {
		descs := make(chan *prometheus.Desc, 256)
		c.Describe(descs)
		close(descs)
		for d := range descs {
			m := described.FindStringSubmatch(d.String())
			if m == nil {
				t.Fatalf("can't read %s", d)
			}
			out[m[1]] = strings.ReplaceAll(m[2], ",", ", ")
		}
	}
	return out
}

var tableRow = regexp.MustCompile("(?m)^\\| `(caddy_kv_cache_[a-z0-9_]+)` \\| ([a-z]+) \\| ([a-z, ]*) \\| [^|]+ \\| (`[^`]+`) \\|$")

// TestEveryMetricIsDocumented compares the table in docs/metrics.md with what
// can be exported.
func TestEveryMetricIsDocumented(t *testing.T) {
	page, err := os.ReadFile("../docs/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	exported := families(t)
	documented := make(map[string]bool)
	for _, m := range tableRow.FindAllStringSubmatch(string(page), -1) {
		name, kind, labels := m[1], m[2], m[3]
		if documented[name] {
			t.Errorf("%s is documented twice", name)
		}
		documented[name] = true
		want, ok := exported[name]
		if !ok {
			t.Errorf("%s is documented, but there is none", name)
			continue
		}
		if labels != want {
			t.Errorf("%s is documented with labels %q, but has %q", name, labels, want)
		}
		if counts := strings.HasSuffix(name, "_total"); counts != (kind == "counter") {
			t.Errorf("%s is documented as a %s", name, kind)
		}
	}
	for name := range exported {
		if !documented[name] {
			t.Errorf("%s is not documented (or its row is malformed)", name)
		}
	}
}

// TestTypesAsDocumented compares the types with what is gathered.
func TestTypesAsDocumented(t *testing.T) {
	page, err := os.ReadFile("../docs/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	kinds := make(map[string]string)
	for _, m := range tableRow.FindAllStringSubmatch(string(page), -1) {
		kinds[m[1]] = m[2]
	}
	d := NewDecisions("typed", "p", []string{"match"}, []string{"failing"})
	defer d.Close()
	g := NewGroup("typed", "p")
	defer g.Close()
	s := NewShadow("typed")
	defer s.Close()
	known := &Snapshot{}
	defer Watch(Source{
		Fleet: func() FleetView {
			return FleetView{Name: "typed", Learner: &LearnerView{}, Replicas: []View{{Fleet: "typed", Replica: "a", BadBy: FailureCounts{TimedOut: 1}, Snapshot: known, Events: &EventsView{Errors: map[string]uint64{"read": 1}}}}}
		},
		Index: func() IndexView { return IndexView{} },
	})()
	r := prometheus.NewPedanticRegistry()
	if err := Register(r); err != nil {
		t.Fatal(err)
	}
	gathered, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range gathered {
		if kind := strings.ToLower(f.GetType().String()); kinds[f.GetName()] != kind {
			t.Errorf("%s is documented as a %s, but is a %s", f.GetName(), kinds[f.GetName()], kind)
		}
		for _, m := range f.GetMetric() {
			checkLabels(t, f.GetName(), m.GetLabel())
		}
	}
}

// checkLabels fails on label names that are not of the closed list.
func checkLabels(t *testing.T, name string, labels []*dto.LabelPair) {
	t.Helper()
	allowed := "fleet policy replica reason why outcome engine group agrees choice file"
	for _, l := range labels {
		if !strings.Contains(" "+allowed+" ", fmt.Sprintf(" %s ", l.GetName())) {
			t.Errorf("%s has a label %s", name, l.GetName())
		}
	}
}
