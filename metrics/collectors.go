// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"errors"
	"slices"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
)

const namespace, subsystem = "caddy", "kv_cache"

// Register adds this package's collectors to a config's registry. A nil
// registry, as hand-made contexts have, is left alone.
func Register(r *prometheus.Registry) error {
	if r == nil {
		return nil
	}
	for _, c := range collectors() {
		var already prometheus.AlreadyRegisteredError
		if err := r.Register(c); err != nil && !errors.As(err, &already) {
			return err
		}
	}
	return nil
}

// collectors are all of this package.
func collectors() []prometheus.Collector {
	all := []prometheus.Collector{fleets, captures}
	for _, l := range []*leased{&ofDecisions, &ofGroups, &ofShadows} {
		for _, v := range l.vectors {
			all = append(all, v)
		}
	}
	return all
}

// Source is where the figures of one fleet come from. Its functions are called
// when somebody asks for the metrics.
type Source struct {
	Fleet func() FleetView
	// Index tells of the residency index, which all fleets share.
	Index func() IndexView
}

// fleets reads the fleets' state when it is asked for, so that no series
// outlives its replica.
var fleets = new(fleetCollector)

type fleetCollector struct {
	mu      sync.Mutex
	sources []*Source // newest last
}

// Watch makes a fleet and its replicas appear among the metrics until the
// returned function is called.
func Watch(s Source) (stop func()) {
	source := &s
	fleets.mu.Lock()
	defer fleets.mu.Unlock()
	fleets.sources = append(fleets.sources, source)
	return func() {
		fleets.mu.Lock()
		defer fleets.mu.Unlock()
		fleets.sources = slices.DeleteFunc(fleets.sources, func(o *Source) bool { return o == source })
	}
}

// newestFirst lists the sources. During a reload two generations of a fleet
// exist, and the newer one speaks for it.
func (c *fleetCollector) newestFirst() []*Source {
	c.mu.Lock()
	defer c.mu.Unlock()
	list := slices.Clone(c.sources)
	slices.Reverse(list)
	return list
}

// Describe implements prometheus.Collector.
func (c *fleetCollector) Describe(out chan<- *prometheus.Desc) {
	for _, e := range replicaExports {
		out <- e.desc
	}
	for _, e := range engineExports {
		out <- e.desc
	}
	for _, e := range eventsExports {
		out <- e.desc
	}
	for _, e := range fleetExports {
		out <- e.desc
	}
	for _, e := range indexExports {
		out <- e.desc
	}
	for _, e := range learnerExports {
		out <- e.desc
	}
	out <- learnedPrompts
	out <- failedScrapes
	out <- failedEvents
	out <- engineInfo
}

// Collect implements prometheus.Collector.
func (c *fleetCollector) Collect(out chan<- prometheus.Metric) {
	sources := c.newestFirst()
	told := make(map[string]bool)
	for i, s := range sources {
		if i == 0 && s.Index != nil {
			index := s.Index()
			for _, e := range indexExports {
				e.send(out, &index)
			}
		}
		f := s.Fleet()
		if told[f.Name] {
			continue
		}
		told[f.Name] = true
		for _, e := range fleetExports {
			e.send(out, &f, label(f.Name))
		}
		if f.Learner != nil {
			collectLearner(out, label(f.Name), f.Learner)
		}
		for i := range f.Replicas {
			collectReplica(out, label(f.Name), &f.Replicas[i])
		}
	}
}

func collectLearner(out chan<- prometheus.Metric, fleet string, v *LearnerView) {
	for _, e := range learnerExports {
		e.send(out, v, fleet)
	}
	for outcome, n := range v.outcomes() {
		out <- prometheus.MustNewConstMetric(learnedPrompts, asCounter, float64(n), fleet, outcome)
	}
}

func collectReplica(out chan<- prometheus.Metric, fleet string, v *View) {
	replica := label(v.Replica)
	for _, e := range replicaExports {
		e.send(out, v, fleet, replica)
	}
	for reason := NoFailure + 1; reason < failures; reason++ {
		out <- prometheus.MustNewConstMetric(failedScrapes, asCounter, float64(v.BadBy[reason]), fleet, replica, reason.String())
	}
	if v.Events != nil {
		for _, e := range eventsExports {
			e.send(out, v.Events, fleet, replica)
		}
		for reason, n := range v.Events.Errors {
			out <- prometheus.MustNewConstMetric(failedEvents, asCounter, float64(n), fleet, replica, reason)
		}
	}
	if v.Snapshot == nil {
		return
	}
	for _, e := range engineExports {
		e.send(out, v.Snapshot, fleet, replica)
	}
	out <- prometheus.MustNewConstMetric(engineInfo, prometheus.GaugeValue, 1, fleet, replica, v.Snapshot.Engine.String())
}

// export is one metric family read from a view of type T.
type export[T any] struct {
	desc  *prometheus.Desc
	kind  prometheus.ValueType
	value func(*T) (v float64, known bool)
}

func (e *export[T]) send(out chan<- prometheus.Metric, view *T, labels ...string) {
	if v, known := e.value(view); known {
		out <- prometheus.MustNewConstMetric(e.desc, e.kind, v, labels...)
	}
}

func describe(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc(prometheus.BuildFQName(namespace, subsystem, name), help, labels, nil)
}
