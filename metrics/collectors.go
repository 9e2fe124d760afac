// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"errors"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

const namespace, subsystem = "caddy", "kv_cache"

// The counters live as long as the process, so that they go on over config
// reloads; each config's registry gets them anew.
var (
	decisions = prometheus.NewCounterVec(prometheus.CounterOpts{
		Namespace: namespace, Subsystem: subsystem, Name: "decisions_total",
		Help: "Choices of a replica, by what decided them.",
	}, []string{"fleet", "policy", "reason"})
	ownPromptTokens = prometheus.NewCounterVec(prometheus.CounterOpts{
		Namespace: namespace, Subsystem: subsystem, Name: "prompt_tokens_total",
		Help: "Prompt tokens of the requests decided on, estimated from their text where they are not given as ids.",
	}, []string{"fleet", "policy"})
	ownHitTokens = prometheus.NewCounterVec(prometheus.CounterOpts{
		Namespace: namespace, Subsystem: subsystem, Name: "predicted_hit_tokens_total",
		Help: "Of the prompt tokens, those believed to be in the chosen replica's KV cache.",
	}, []string{"fleet", "policy"})
	decisionSeconds = prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Namespace: namespace, Subsystem: subsystem, Name: "decision_duration_seconds",
		Help:    "Time from the request's arrival at the policy to its choice, reading the body included.",
		Buckets: []float64{5e-6, 1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 5e-3, 2.5e-2, 0.1, 1, 10},
	}, []string{"fleet", "policy"})
)

// Register adds this package's collectors to a config's registry. A nil
// registry, as hand-made contexts have, is left alone.
func Register(r *prometheus.Registry) error {
	if r == nil {
		return nil
	}
	for _, c := range []prometheus.Collector{decisions, ownPromptTokens, ownHitTokens, decisionSeconds, replicas} {
		var already prometheus.AlreadyRegisteredError
		if err := r.Register(c); err != nil && !errors.As(err, &already) {
			return err
		}
	}
	return nil
}

// Decisions counts the decisions of one policy. Its label sets exist from
// NewDecisions to Close.
type Decisions struct {
	fleet, policy string
	byReason      map[string]prometheus.Counter
	prompt, hit   prometheus.Counter
	seconds       prometheus.Observer
}

// held counts the users of each fleet's label sets: when a config is replaced,
// the new one opens them before the old one closes them.
var held = struct {
	sync.Mutex
	users map[[2]string]int
}{users: make(map[[2]string]int)}

// NewDecisions makes the counters of a policy, for the closed list of reasons
// that it can give.
func NewDecisions(fleet, policy string, reasons []string) *Decisions {
	held.Lock()
	defer held.Unlock()
	held.users[[2]string{fleet, policy}]++
	d := &Decisions{
		fleet: fleet, policy: policy,
		byReason: make(map[string]prometheus.Counter, len(reasons)),
		prompt:   ownPromptTokens.WithLabelValues(fleet, policy),
		hit:      ownHitTokens.WithLabelValues(fleet, policy),
		seconds:  decisionSeconds.WithLabelValues(fleet, policy),
	}
	for _, r := range reasons {
		d.byReason[r] = decisions.WithLabelValues(fleet, policy, r)
	}
	return d
}

// Close removes the label sets, unless another policy of the same name uses them.
func (d *Decisions) Close() {
	held.Lock()
	defer held.Unlock()
	key := [2]string{d.fleet, d.policy}
	if held.users[key]--; held.users[key] > 0 {
		return
	}
	delete(held.users, key)
	labels := prometheus.Labels{"fleet": d.fleet, "policy": d.policy}
	decisions.DeletePartialMatch(labels)
	ownPromptTokens.DeletePartialMatch(labels)
	ownHitTokens.DeletePartialMatch(labels)
	decisionSeconds.DeletePartialMatch(labels)
}

// Count books one decision: its reason, the tokens of its prompt, those
// believed to be hits, and how long it took. It allocates nothing.
func (d *Decisions) Count(reason string, prompt, hit float64, took time.Duration) {
	if c := d.byReason[reason]; c != nil {
		c.Inc()
	}
	d.prompt.Add(max(0, prompt))
	d.hit.Add(max(0, hit))
	d.seconds.Observe(took.Seconds())
}

// View is what is exported of one replica of one fleet at one moment.
type View struct {
	Fleet, Replica string
	// Good and Bad count scrapes; Age is the seconds since the last good one,
	// negative if there was none.
	Good, Bad uint64
	Age       float64
	// Snapshot is the last good scrape, nil if there was none.
	Snapshot *Snapshot
	// InFlight and Queue are the ledger: requests sent and not finished, and
	// uncached prompt tokens believed to wait.
	InFlight, Queue float64
	// Rate is the learned prefill rate in tokens a second.
	Rate float64
	// Trust is the share of believed hits that the engine confirms.
	Trust float64
	// Blocks is how many prefix blocks the replica is believed to hold.
	Blocks float64
	// Evictions counts blocks dropped from that belief for lack of room.
	Evictions uint64
	// Eligible is whether the replica may be chosen.
	Eligible bool
}

// replicas reads the fleets' state when it is asked for, so that no series
// outlives its replica.
var replicas = newReplicaCollector()

type replicaCollector struct {
	mu      sync.Mutex
	sources map[*source]struct{}
	all     []*prometheus.Desc
	exports []export
}

type source struct{ views func() []View }

type export struct {
	desc  *prometheus.Desc
	kind  prometheus.ValueType
	value func(*View) (float64, bool)
}

// Watch makes the replicas that views lists appear among the metrics until the
// returned function is called.
func Watch(views func() []View) (stop func()) {
	s := &source{views}
	replicas.mu.Lock()
	defer replicas.mu.Unlock()
	replicas.sources[s] = struct{}{}
	return func() {
		replicas.mu.Lock()
		defer replicas.mu.Unlock()
		delete(replicas.sources, s)
	}
}

func newReplicaCollector() *replicaCollector {
	c := &replicaCollector{sources: make(map[*source]struct{})}
	add := func(name, help string, kind prometheus.ValueType, value func(*View) (float64, bool)) {
		d := prometheus.NewDesc(prometheus.BuildFQName(namespace, subsystem, name), help, []string{"fleet", "replica"}, nil)
		c.all = append(c.all, d)
		c.exports = append(c.exports, export{d, kind, value})
	}
	always := func(f func(*View) float64) func(*View) (float64, bool) {
		return func(v *View) (float64, bool) { return f(v), true }
	}
	fact := func(f func(*Snapshot) Fact) func(*View) (float64, bool) {
		return func(v *View) (float64, bool) {
			if v.Snapshot == nil {
				return 0, false
			}
			x := f(v.Snapshot)
			return x.Value, x.Known
		}
	}
	const g, n = prometheus.GaugeValue, prometheus.CounterValue
	add("scrapes_total", "Good polls of the replica's metrics page.", n, always(func(v *View) float64 { return float64(v.Good) }))
	add("scrape_errors_total", "Failed polls of the replica's metrics page.", n, always(func(v *View) float64 { return float64(v.Bad) }))
	add("scrape_age_seconds", "Seconds since the last good poll.", g, func(v *View) (float64, bool) { return v.Age, v.Age >= 0 })
	add("replica_eligible", "Whether the replica may be chosen: 0 while it fails, hangs, sleeps or is drained.", g, always(func(v *View) float64 {
		if v.Eligible {
			return 1
		}
		return 0
	}))
	add("replica_in_flight_requests", "Requests sent to the replica through this Caddy and not finished.", g, always(func(v *View) float64 { return v.InFlight }))
	add("replica_queued_tokens", "Uncached prompt tokens believed to wait for prefill.", g, always(func(v *View) float64 { return v.Queue }))
	add("replica_prefill_tokens_per_second", "Learned prefill rate, in uncached prompt tokens a second.", g, always(func(v *View) float64 { return v.Rate }))
	add("replica_trust_ratio", "Share of the predicted hits that the engine's own counters confirm.", g, always(func(v *View) float64 { return v.Trust }))
	add("replica_held_blocks", "Prefix blocks the replica is believed to hold.", g, always(func(v *View) float64 { return v.Blocks }))
	add("replica_evicted_blocks_total", "Prefix blocks dropped from that belief for lack of room.", n, always(func(v *View) float64 { return float64(v.Evictions) }))
	add("engine_running_requests", "Requests in the engine's batch, as it says.", g, fact(func(s *Snapshot) Fact { return s.Running }))
	add("engine_waiting_requests", "Requests in the engine's queue, as it says.", g, fact(func(s *Snapshot) Fact { return s.Waiting }))
	add("engine_kv_usage_ratio", "Share of the engine's KV cache in use, as it says.", g, fact(func(s *Snapshot) Fact { return s.KVUsage }))
	add("engine_kv_capacity_tokens", "Size of the engine's KV cache in tokens, as it says.", g, fact(func(s *Snapshot) Fact { return s.CapacityTokens }))
	add("engine_prefix_query_tokens_total", "Prompt tokens looked up in the engine's prefix cache.", n, fact(func(s *Snapshot) Fact { return s.PrefixQueries }))
	add("engine_prefix_hit_tokens_total", "Prompt tokens found in the engine's prefix cache.", n, fact(func(s *Snapshot) Fact { return s.PrefixHits }))
	return c
}

// Describe implements prometheus.Collector.
func (c *replicaCollector) Describe(out chan<- *prometheus.Desc) {
	for _, d := range c.all {
		out <- d
	}
}

// Collect implements prometheus.Collector. During a reload two generations of
// a fleet exist; each replica of a fleet is told of once.
func (c *replicaCollector) Collect(out chan<- prometheus.Metric) {
	c.mu.Lock()
	sources := make([]*source, 0, len(c.sources))
	for s := range c.sources {
		sources = append(sources, s)
	}
	c.mu.Unlock()
	told := make(map[[2]string]bool)
	for _, s := range sources {
		for _, v := range s.views() {
			if key := [2]string{v.Fleet, v.Replica}; told[key] {
				continue
			} else {
				told[key] = true
			}
			for _, g := range c.exports {
				if x, ok := g.value(&v); ok {
					out <- prometheus.MustNewConstMetric(g.desc, g.kind, x, v.Fleet, v.Replica)
				}
			}
		}
	}
}
