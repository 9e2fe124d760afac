// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// A group is the requests of one fleet that one policy decides on, so that two
// policies can be compared on the same traffic at the same time. Figures that
// the engine told are counted beside what was predicted for exactly the same
// requests, so that they can be divided.
var (
	groupRequests = groupCounter("group_requests_total",
		"Requests with a prompt that have ended, by the policy that decided.")
	groupPrompt = groupCounter("group_prompt_tokens_total",
		"Their prompt tokens, estimated from their text where they are not given as ids.")
	groupHit = groupCounter("group_predicted_hit_tokens_total",
		"Of these, the tokens believed to be in the chosen replica's KV cache.")
	reportedRequests = groupCounter("group_reported_requests_total",
		"Of the requests, those whose usage told the tokens that came from a cache (needs kv_cache_usage).")
	reportedPrompt = groupCounter("group_reported_prompt_tokens_total",
		"Prompt tokens of the reported requests, as the engine told.")
	reportedPredicted = groupCounter("group_reported_predicted_hit_tokens_total",
		"Tokens of the reported requests that were believed to be cached.")
	reportedHit = groupCounter("group_real_hit_tokens_total",
		"Tokens of the reported requests that came from a cache, as the engine told.")
	groupTTFT = groupHistogram("group_ttft_seconds",
		"Time from a request's arrival to its first token, for streams (needs kv_cache_usage).", "group")
	groupEstimate = groupHistogram("group_estimated_ttft_seconds",
		"The same as estimated when the replica was chosen, for all requests.", "group")

	shadowDecisions = prometheus.NewCounterVec(prometheus.CounterOpts{
		Namespace: namespace, Subsystem: subsystem, Name: "shadow_decisions_total",
		Help: "Decisions of the other policy, by whether kv_cache_aware would have chosen the same replica.",
	}, []string{"fleet", "agrees"})
	shadowPrompt = prometheus.NewCounterVec(prometheus.CounterOpts{
		Namespace: namespace, Subsystem: subsystem, Name: "shadow_prompt_tokens_total",
		Help: "Prompt tokens of the requests that the other policy decided on.",
	}, []string{"fleet"})
	shadowHit = prometheus.NewCounterVec(prometheus.CounterOpts{
		Namespace: namespace, Subsystem: subsystem, Name: "shadow_predicted_hit_tokens_total",
		Help: "Tokens of these requests believed to be cached at the replica that was taken (choice: other), and at the one that kv_cache_aware would have taken (choice: ours).",
	}, []string{"fleet", "choice"})
	shadowEstimate = groupHistogram("shadow_estimated_ttft_seconds",
		"Estimated time to first token at the replica that was taken (choice: other), and at the one that kv_cache_aware would have taken (choice: ours).", "choice")
)

var (
	ofGroups = leased{
		by: []string{"fleet", "group"},
		vectors: []vector{
			groupRequests, groupPrompt, groupHit, reportedRequests, reportedPrompt,
			reportedPredicted, reportedHit, groupTTFT, groupEstimate,
		},
	}
	ofShadows = leased{
		by:      []string{"fleet"},
		vectors: []vector{shadowDecisions, shadowPrompt, shadowHit, shadowEstimate},
	}
)

func groupCounter(name, help string) *prometheus.CounterVec {
	return prometheus.NewCounterVec(prometheus.CounterOpts{
		Namespace: namespace, Subsystem: subsystem, Name: name, Help: help,
	}, []string{"fleet", "group"})
}

func groupHistogram(name, help, by string) *prometheus.HistogramVec {
	return prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Namespace: namespace, Subsystem: subsystem, Name: name, Help: help,
		Buckets: []float64{0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120},
	}, []string{"fleet", by})
}

// Group counts the requests of one fleet that one policy decides on. Its label
// sets exist from NewGroup to Close. No method allocates.
type Group struct {
	fleet, group string

	requests, prompt, hit                prometheus.Counter
	reported, told, predicted, confirmed prometheus.Counter
	ttft, estimate                       prometheus.Observer
}

// NewGroup makes the counters of a policy's requests.
func NewGroup(fleet, group string) *Group {
	fleet = label(fleet)
	ofGroups.take(fleet, group)
	return &Group{
		fleet: fleet, group: group,
		requests:  groupRequests.WithLabelValues(fleet, group),
		prompt:    groupPrompt.WithLabelValues(fleet, group),
		hit:       groupHit.WithLabelValues(fleet, group),
		reported:  reportedRequests.WithLabelValues(fleet, group),
		told:      reportedPrompt.WithLabelValues(fleet, group),
		predicted: reportedPredicted.WithLabelValues(fleet, group),
		confirmed: reportedHit.WithLabelValues(fleet, group),
		ttft:      groupTTFT.WithLabelValues(fleet, group),
		estimate:  groupEstimate.WithLabelValues(fleet, group),
	}
}

// Close removes the label sets, unless another policy of the same name uses them.
func (g *Group) Close() { ofGroups.release(g.fleet, g.group) }

// Ended counts a request with its prompt's tokens and those believed cached,
// and the time to first token that was estimated.
func (g *Group) Ended(prompt, hit float64, estimate time.Duration) {
	g.requests.Inc()
	g.prompt.Add(max(0, prompt))
	g.hit.Add(max(0, hit))
	g.estimate.Observe(max(0, estimate.Seconds()))
}

// Reported counts what the engine told of a request: its prompt's tokens and
// how many of them came from a cache. predicted is how many were believed to.
func (g *Group) Reported(prompt, cached int, predicted float64) {
	g.reported.Inc()
	g.told.Add(float64(max(0, prompt)))
	g.confirmed.Add(float64(max(0, cached)))
	g.predicted.Add(max(0, predicted))
}

// FirstToken counts a request's time to first token.
func (g *Group) FirstToken(took time.Duration) { g.ttft.Observe(max(0, took.Seconds())) }

// Shadow counts the decisions of another policy and what ours would have been.
// Its label sets exist from NewShadow to Close. No method allocates.
type Shadow struct {
	fleet      string
	agrees     [2]prometheus.Counter // no, yes
	prompt     prometheus.Counter
	hits       [2]prometheus.Counter // other, ours
	firstToken [2]prometheus.Observer
}

// NewShadow makes the counters.
func NewShadow(fleet string) *Shadow {
	s := &Shadow{fleet: label(fleet)}
	ofShadows.take(s.fleet)
	s.prompt = shadowPrompt.WithLabelValues(s.fleet)
	for i, choice := range []string{"other", "ours"} {
		s.agrees[i] = shadowDecisions.WithLabelValues(s.fleet, strconv.FormatBool(i == 1))
		s.hits[i] = shadowHit.WithLabelValues(s.fleet, choice)
		s.firstToken[i] = shadowEstimate.WithLabelValues(s.fleet, choice)
	}
	return s
}

// Close removes the label sets, unless another policy of the same name uses them.
func (s *Shadow) Close() { ofShadows.release(s.fleet) }

// Prospect is what is expected of a request at one replica: the tokens believed
// cached there, and its time to first token.
type Prospect struct {
	Hit        float64
	FirstToken time.Duration
}

// Decided counts one decision on a prompt of so many tokens: what is expected
// of it, and what would be expected of ours.
func (s *Shadow) Decided(agrees bool, prompt float64, other, ours Prospect) {
	n := 0
	if agrees {
		n = 1
	}
	s.agrees[n].Inc()
	s.prompt.Add(max(0, prompt))
	for i, p := range []Prospect{other, ours} {
		s.hits[i].Add(max(0, p.Hit))
		s.firstToken[i].Observe(max(0, p.FirstToken.Seconds()))
	}
}

// CaptureView is what is exported of a capture file: lines written, those
// dropped because too many waited, and those that could not be written.
type CaptureView struct{ Written, Full, Failed uint64 }

// captures reads the counts of the capture files when it is asked for.
var captures = &captureCollector{files: make(map[string]func() CaptureView)}

type captureCollector struct {
	mu    sync.Mutex
	files map[string]func() CaptureView
}

var (
	captureLines = prometheus.NewDesc(prometheus.BuildFQName(namespace, subsystem, "capture_lines_total"),
		"Lines written to the capture file.", []string{"file"}, nil)
	captureDropped = prometheus.NewDesc(prometheus.BuildFQName(namespace, subsystem, "capture_dropped_total"),
		"Requests that have no line in the capture file, because too many were waiting to be written (queue) or writing failed (write).",
		[]string{"file", "reason"}, nil)
)

// WatchCapture makes a capture file appear among the metrics until the returned
// function is called.
func WatchCapture(file string, view func() CaptureView) (stop func()) {
	file = label(file)
	captures.mu.Lock()
	defer captures.mu.Unlock()
	captures.files[file] = view
	return func() {
		captures.mu.Lock()
		defer captures.mu.Unlock()
		delete(captures.files, file)
	}
}

// Describe implements prometheus.Collector.
func (c *captureCollector) Describe(out chan<- *prometheus.Desc) {
	out <- captureLines
	out <- captureDropped
}

// Collect implements prometheus.Collector.
func (c *captureCollector) Collect(out chan<- prometheus.Metric) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for file, view := range c.files {
		v := view()
		out <- prometheus.MustNewConstMetric(captureLines, prometheus.CounterValue, float64(v.Written), file)
		out <- prometheus.MustNewConstMetric(captureDropped, prometheus.CounterValue, float64(v.Full), file, "queue")
		out <- prometheus.MustNewConstMetric(captureDropped, prometheus.CounterValue, float64(v.Failed), file, "write")
	}
}
