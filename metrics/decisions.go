// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"math"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// The counters of decisions live as long as the process, so that they go on
// over config reloads; each config's registry gets them anew.
var (
	decisions = ownCounter("decisions_total",
		"Choices of a replica, by what decided them.", "reason")
	ownPromptTokens = ownCounter("prompt_tokens_total",
		"Prompt tokens of the requests decided on, estimated from their text where they are not given as ids.")
	ownHitTokens = ownCounter("predicted_hit_tokens_total",
		"Of the prompt tokens, those believed to be in the chosen replica's KV cache.")
	retries = ownCounter("retries_total",
		"Choices for a request whose attempt at another replica had failed.")
	avoided = ownCounter("avoided_attempts_total",
		"Choices that left out a replica which Caddy would have tried, by why it was left out.", "why")
	decisionSeconds = ownHistogram("decision_duration_seconds",
		"Time from the request's arrival at the policy to its choice, reading the body included and being held back not.",
		[]float64{5e-6, 1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 5e-3, 2.5e-2, 0.1, 1, 10})
	matchTokens = ownHistogram("match_tokens",
		"Prompt tokens believed to be in the chosen replica's KV cache, by request with a prompt.",
		[]float64{0, 256, 1024, 4096, 8192, 16384, 32768, 65536, 131072})
	costTokens = ownHistogram("decision_cost_tokens",
		"What the chosen replica cost, in tokens (kv_cache_aware).",
		[]float64{0, 1000, 3000, 10_000, 30_000, 100_000, 300_000, 1_000_000})
	marginTokens = ownHistogram("decision_margin_tokens",
		"What the next best replica would have cost more, in tokens (kv_cache_aware, where there was another).",
		[]float64{0, 100, 1000, 3000, 10_000, 30_000, 100_000, 300_000, 1_000_000})
	waitSeconds = ownHistogram("wait_seconds",
		"How long requests that could not start at once were held back, by how that ended.",
		[]float64{0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 60, 120}, "outcome")
)

// ofDecisions are all of them.
var ofDecisions = leased{
	by: []string{"fleet", "policy"},
	vectors: []vector{
		decisions, ownPromptTokens, ownHitTokens, retries, avoided,
		decisionSeconds, matchTokens, costTokens, marginTokens, waitSeconds,
	},
}

func ownCounter(name, help string, labels ...string) *prometheus.CounterVec {
	return prometheus.NewCounterVec(prometheus.CounterOpts{
		Namespace: namespace, Subsystem: subsystem, Name: name, Help: help,
	}, append([]string{"fleet", "policy"}, labels...))
}

func ownHistogram(name, help string, buckets []float64, labels ...string) *prometheus.HistogramVec {
	return prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Namespace: namespace, Subsystem: subsystem, Name: name, Help: help, Buckets: buckets,
	}, append([]string{"fleet", "policy"}, labels...))
}

// The ways in which holding a request back ends.
const (
	// WaitSent: it was sent.
	WaitSent = "sent"
	// WaitLeft: its client left.
	WaitLeft = "left"
	// WaitNone: no replica was available any more.
	WaitNone = "none"
	// WaitRefused: it had waited for too long, and was refused.
	WaitRefused = "refused"
)

// Decisions counts the decisions of one policy. Its label sets exist from
// NewDecisions to Close. No method allocates, unless there is a trace.
type Decisions struct {
	fleet, policy string

	byReason             map[string]prometheus.Counter
	byWhy                map[string]prometheus.Counter
	byOutcome            map[string]prometheus.Observer
	prompt, hit, again   prometheus.Counter
	seconds              prometheus.Observer
	match, cost, further prometheus.Observer
}

// NewDecisions makes the counters of a policy, for the closed lists of the
// reasons that it can give and of why it can leave a replica out.
func NewDecisions(fleet, policy string, reasons, whys []string) *Decisions {
	fleet = label(fleet)
	ofDecisions.take(fleet, policy)
	d := &Decisions{
		fleet: fleet, policy: policy,
		byReason:  make(map[string]prometheus.Counter, len(reasons)),
		byWhy:     make(map[string]prometheus.Counter, len(whys)),
		byOutcome: make(map[string]prometheus.Observer),
		prompt:    ownPromptTokens.WithLabelValues(fleet, policy),
		hit:       ownHitTokens.WithLabelValues(fleet, policy),
		again:     retries.WithLabelValues(fleet, policy),
		seconds:   decisionSeconds.WithLabelValues(fleet, policy),
		match:     matchTokens.WithLabelValues(fleet, policy),
		cost:      costTokens.WithLabelValues(fleet, policy),
		further:   marginTokens.WithLabelValues(fleet, policy),
	}
	for _, r := range reasons {
		d.byReason[r] = decisions.WithLabelValues(fleet, policy, r)
	}
	for _, w := range whys {
		d.byWhy[w] = avoided.WithLabelValues(fleet, policy, w)
	}
	for _, o := range []string{WaitSent, WaitLeft, WaitNone, WaitRefused} {
		d.byOutcome[o] = waitSeconds.WithLabelValues(fleet, policy, o)
	}
	return d
}

// Close removes the label sets, unless another policy of the same name uses them.
func (d *Decisions) Close() { ofDecisions.release(d.fleet, d.policy) }

// Choice is what is counted of one choice of a replica.
type Choice struct {
	Reason string
	// Prompt and Hit are the prompt's tokens and those believed cached. Without
	// a prompt both are 0.
	Prompt, Hit float64
	// Cost and Next are what the choice and the next best cost, in tokens; NaN
	// where the policy has no costs, +Inf where there was no next best.
	Cost, Next float64
	// Retry tells whether an attempt of the request had failed.
	Retry bool
	// Took is the time that deciding took.
	Took time.Duration
	// Trace is the trace that the request belongs to, "" if none is recorded.
	Trace string
}

// Count books one choice.
func (d *Decisions) Count(c *Choice) {
	var example prometheus.Labels
	if c.Trace != "" {
		example = prometheus.Labels{"trace_id": c.Trace}
	}
	add(d.byReason[c.Reason], 1, example)
	observe(d.seconds, c.Took.Seconds(), example)
	if c.Retry {
		d.again.Inc()
	}
	if c.Prompt <= 0 {
		return
	}
	d.prompt.Add(c.Prompt)
	d.hit.Add(max(0, c.Hit))
	observe(d.match, max(0, c.Hit), example)
	if math.IsNaN(c.Cost) {
		return
	}
	observe(d.cost, c.Cost, example)
	if !math.IsInf(c.Next, 1) {
		observe(d.further, max(0, c.Next-c.Cost), example)
	}
}

// Avoided books that a replica was left out of a choice.
func (d *Decisions) Avoided(why string) { add(d.byWhy[why], 1, nil) }

// Waited books how long a request was held back, and how that ended.
func (d *Decisions) Waited(outcome string, wait time.Duration) {
	if o := d.byOutcome[outcome]; o != nil {
		o.Observe(wait.Seconds())
	}
}

// add counts, with an example where there is one. A label value that is in no
// closed list counts nowhere.
func add(c prometheus.Counter, v float64, example prometheus.Labels) {
	switch e, ok := c.(prometheus.ExemplarAdder); {
	case c == nil:
	case ok && example != nil:
		e.AddWithExemplar(v, example)
	default:
		c.Add(v)
	}
}

func observe(o prometheus.Observer, v float64, example prometheus.Labels) {
	if e, ok := o.(prometheus.ExemplarObserver); ok && example != nil {
		e.ObserveWithExemplar(v, example)
		return
	}
	o.Observe(v)
}

// label makes a string fit for a label value.
func label(s string) string { return strings.ToValidUTF8(s, "\uFFFD") }
