// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"slices"
	"time"
)

// Bucket bounds of vLLM's histograms.
var (
	boundsFirstToken = []float64{0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560}
	boundsInterToken = []float64{0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80}
	boundsLatency    = []float64{0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680}
	boundsIteration  = []float64{1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384}
	boundsChoices    = []float64{1, 2, 5, 10, 20}
	boundsPreempted  = []float64{1, 2, 3, 4, 5, 10, 20}
	boundsHTTP       = []float64{0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 7.5, 10, 30, 60}
)

// boundsTokens returns vLLM's 1-2-5 series up to the model's context.
func boundsTokens(limit int) []float64 {
	var bounds []float64
	for decade := 1; ; decade *= 10 {
		for _, m := range []int{1, 2, 5} {
			if m*decade > limit {
				return bounds
			}
			bounds = append(bounds, float64(m*decade))
		}
	}
}

// histogram counts observations by bucket.
type histogram struct {
	bounds []float64
	counts []int64 // one more than bounds, for +Inf
	sum    float64
}

func newHistogram(bounds []float64) *histogram {
	return &histogram{bounds: bounds, counts: make([]int64, len(bounds)+1)}
}

func (h *histogram) observe(v float64) { h.observeN(v, 1) }

func (h *histogram) observeN(v float64, n int) {
	i, _ := slices.BinarySearch(h.bounds, v)
	h.counts[i] += int64(n)
	h.sum += v * float64(n)
}

// meters holds the histograms of a server's page. It is guarded by the driver's mutex.
type meters struct {
	iterationTokens, interToken, firstToken              *histogram
	promptTokens, generationTokens, maxTokens            *histogram
	choices, preemptions, computedTokens                 *histogram
	latency, queueTime, inference, prefill, decode, pace *histogram

	// speed is how many engine seconds pass in a second of those who read the
	// page: its durations are theirs, like the rest of their clock.
	speed float64
}

func newMeters(maxModelTokens int, speed float64) *meters {
	tokens := boundsTokens(maxModelTokens)
	return &meters{
		speed:            speed,
		iterationTokens:  newHistogram(boundsIteration),
		interToken:       newHistogram(boundsInterToken),
		firstToken:       newHistogram(boundsFirstToken),
		promptTokens:     newHistogram(tokens),
		generationTokens: newHistogram(tokens),
		maxTokens:        newHistogram(tokens),
		choices:          newHistogram(boundsChoices),
		preemptions:      newHistogram(boundsPreempted),
		computedTokens:   newHistogram(tokens),
		latency:          newHistogram(boundsLatency),
		queueTime:        newHistogram(boundsLatency),
		inference:        newHistogram(boundsLatency),
		prefill:          newHistogram(boundsLatency),
		decode:           newHistogram(boundsLatency),
		pace:             newHistogram(boundsInterToken),
	}
}

func (m *meters) seconds(d time.Duration) float64 { return d.Seconds() / m.speed }

func (m *meters) observeStep(s Step) {
	m.iterationTokens.observe(float64(s.PrefillTokens + s.Decoding))
	if s.Decoding > 0 {
		m.interToken.observeN(m.seconds(s.End-s.Start), s.Decoding)
	}
}

func (m *meters) observeFirstToken(now time.Duration, r *Request) {
	m.firstToken.observe(m.seconds(now - r.Submitted))
}

func (m *meters) observeFinish(r *Request) {
	m.promptTokens.observe(float64(r.PromptTokens))
	m.generationTokens.observe(float64(r.Generated))
	m.maxTokens.observe(float64(r.OutputTokens))
	m.choices.observe(1)
	m.preemptions.observe(float64(r.Preemptions))
	m.computedTokens.observe(float64(r.PromptTokens - r.Cached))
	m.latency.observe(m.seconds(r.Finished - r.Submitted))
	m.queueTime.observe(m.seconds(r.Admitted - r.Submitted))
	m.inference.observe(m.seconds(r.Finished - r.Admitted))
	m.prefill.observe(m.seconds(r.FirstToken - r.Admitted))
	m.decode.observe(m.seconds(r.Finished - r.FirstToken))
	if r.Generated > 1 {
		m.pace.observe(m.seconds(r.Finished-r.FirstToken) / float64(r.Generated-1))
	}
}
