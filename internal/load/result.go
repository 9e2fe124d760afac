// SPDX-License-Identifier: Apache-2.0

package load

import (
	"cmp"
	"math"
	"slices"
)

// Result sums up a run. Times are in seconds of the trace, which are real seconds
// multiplied by Options.Speed. All but Requests and HeldRequests leave out
// warm-up and cool-down; times and tokens are of requests that did not fail.
type Result struct {
	// Requests is the number of requests sent.
	Requests int `json:"requests"`
	// Measured is the number of those that statistics are of.
	Measured int `json:"measured"`
	// Succeeded is the number of measured requests that were answered to the end.
	Succeeded int `json:"succeeded"`
	// Failures counts the others by kind; see [Sample.Failure].
	Failures map[string]int `json:"failures"`
	// DurationSeconds is from the first measured request to the end of the last.
	DurationSeconds float64 `json:"duration_seconds"`

	// HitRate is the share of prompt tokens that came from prefix caches:
	// CachedTokens ÷ PromptTokens, as the servers report them.
	HitRate          float64 `json:"hit_rate"`
	PromptTokens     int     `json:"prompt_tokens"`
	CachedTokens     int     `json:"cached_tokens"`
	CompletionTokens int     `json:"completion_tokens"`
	// CachedReported is the number of answers that stated cached tokens. vLLM
	// does only with --enable-prompt-tokens-details, and only when there are
	// any; at 0 nothing is known about HitRate.
	CachedReported int `json:"cached_reported"`

	// TTFT is the time to first token, counted from when a request was due.
	TTFT Distribution `json:"ttft_seconds"`
	// EndToEnd is the time to the end of the answer, counted likewise.
	EndToEnd Distribution `json:"end_to_end_seconds"`

	// Lag is how much later than due requests were sent. If it is not small
	// against TTFT, this machine was too slow and the run is not to be trusted.
	Lag Distribution `json:"lag_seconds"`
	// HeldRequests had to wait for Options.MaxInFlight.
	HeldRequests int `json:"held_requests"`

	// Replicas tells for each replica what it got.
	Replicas map[string]Share `json:"replicas"`
	// RequestSpread and UncachedSpread are the busiest replica's share of the
	// requests and of the uncached prompt tokens, divided by the fair share: 1 is
	// even, the number of replicas is all on one; 0 where replicas are unknown.
	RequestSpread  float64 `json:"request_spread"`
	UncachedSpread float64 `json:"uncached_spread"`
	// Reasons counts the router's reasons.
	Reasons map[string]int `json:"reasons"`
}

// Distribution describes a sample of times in seconds. Percentiles are nearest
// rank: the smallest value that so many percent of all do not exceed.
type Distribution struct {
	Mean float64 `json:"mean"`
	P50  float64 `json:"p50"`
	P90  float64 `json:"p90"`
	P99  float64 `json:"p99"`
	Max  float64 `json:"max"`
}

// Share is what one replica got.
type Share struct {
	Requests             int     `json:"requests"`
	RequestShare         float64 `json:"request_share"`
	UncachedPromptTokens int     `json:"uncached_prompt_tokens"`
	UncachedShare        float64 `json:"uncached_share"`
}

func (p *player) summarize() Result {
	p.mu.Lock()
	defer p.mu.Unlock()
	measured := cut(p.samples, p.WarmUp, p.CoolDown)
	r := Result{
		Requests:     len(p.samples),
		Measured:     len(measured),
		HeldRequests: p.held,
		Failures:     make(map[string]int),
		Replicas:     make(map[string]Share),
		Reasons:      make(map[string]int),
	}
	var ttft, endToEnd, lag []float64
	for _, s := range measured {
		r.count(s)
		lag = append(lag, s.LagSeconds)
		if s.Failure == "" {
			ttft = append(ttft, s.TTFTSeconds)
			endToEnd = append(endToEnd, s.EndToEndSeconds)
		}
	}
	r.TTFT, r.EndToEnd, r.Lag = distributionOf(ttft), distributionOf(endToEnd), distributionOf(lag)
	if r.PromptTokens > 0 {
		r.HitRate = float64(r.CachedTokens) / float64(r.PromptTokens)
	}
	r.DurationSeconds = duration(measured)
	r.share(p.Replicas)
	return r
}

// cut sorts samples by the time they were due and leaves out the given shares at
// both ends.
func cut(samples []Sample, first, last float64) []Sample {
	slices.SortStableFunc(samples, func(a, b Sample) int { return cmp.Compare(a.DueSeconds, b.DueSeconds) })
	from := int(first * float64(len(samples)))
	to := len(samples) - int(last*float64(len(samples)))
	return samples[from:max(from, to)]
}

func (r *Result) count(s Sample) {
	if s.Reason != "" {
		r.Reasons[s.Reason]++
	}
	if s.Replica != "" {
		share := r.Replicas[s.Replica]
		share.Requests++
		share.UncachedPromptTokens += s.PromptTokens - s.CachedTokens
		r.Replicas[s.Replica] = share
	}
	if s.Failure != "" {
		r.Failures[s.Failure]++
		return
	}
	r.Succeeded++
	r.PromptTokens += s.PromptTokens
	r.CachedTokens += s.CachedTokens
	r.CompletionTokens += s.CompletionTokens
	if s.statesCached {
		r.CachedReported++
	}
}

func duration(samples []Sample) float64 {
	if len(samples) == 0 {
		return 0
	}
	end := 0.0
	for _, s := range samples {
		end = max(end, s.DueSeconds+s.EndToEndSeconds)
	}
	return end - samples[0].DueSeconds
}

// share works out the shares and spreads, with a fair share for each of so many
// replicas, or of those seen if more.
func (r *Result) share(replicas int) {
	var requests, uncached float64
	for _, s := range r.Replicas {
		requests += float64(s.Requests)
		uncached += float64(s.UncachedPromptTokens)
	}
	n := float64(max(replicas, len(r.Replicas)))
	for name, s := range r.Replicas {
		s.RequestShare = ratio(float64(s.Requests), requests)
		s.UncachedShare = ratio(float64(s.UncachedPromptTokens), uncached)
		r.Replicas[name] = s
		r.RequestSpread = max(r.RequestSpread, s.RequestShare*n)
		r.UncachedSpread = max(r.UncachedSpread, s.UncachedShare*n)
	}
}

func ratio(part, whole float64) float64 {
	if whole == 0 {
		return 0
	}
	return part / whole
}

// distributionOf sorts values in place; of none it is all zero.
func distributionOf(values []float64) Distribution {
	if len(values) == 0 {
		return Distribution{}
	}
	slices.Sort(values)
	sum := 0.0
	for _, v := range values {
		sum += v
	}
	return Distribution{
		Mean: sum / float64(len(values)),
		P50:  percentile(values, 50),
		P90:  percentile(values, 90),
		P99:  percentile(values, 99),
		Max:  values[len(values)-1],
	}
}

// percentile is the nearest-rank percentile of sorted values.
func percentile(sorted []float64, percent int) float64 {
	rank := int(math.Ceil(float64(percent*len(sorted)) / 100))
	return sorted[max(rank, 1)-1]
}
