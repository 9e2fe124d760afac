// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"math"
	"slices"
	"time"
)

// Summary is what is told of a run; times are in seconds.
type Summary struct {
	Requests int `json:"requests"`
	Failed   int `json:"failed"`
	Retries  int `json:"retries"`
	// HitRate is the share of prompt tokens that were not computed.
	HitRate float64 `json:"hit_rate"`
	// TTFT is the time to the first token, the wait at the router included.
	Mean float64 `json:"ttft_mean"`
	P50  float64 `json:"ttft_p50"`
	P90  float64 `json:"ttft_p90"`
	P99  float64 `json:"ttft_p99"`
	// Total is the mean time to the last token.
	Total float64 `json:"e2e_mean"`
	// Held is the mean time that the router held requests back.
	Held float64 `json:"held_mean"`
	// Busiest is what the busiest replica computed over a fair share.
	Busiest float64 `json:"busiest"`
}

// figures lists a summary's figures that have a spread.
func (s *Summary) figures() [8]*float64 {
	return [...]*float64{&s.HitRate, &s.Mean, &s.P50, &s.P90, &s.P99, &s.Total, &s.Held, &s.Busiest}
}

// Summarize sums a run over so many replicas up.
func Summarize(out []Outcome, replicas int) Summary {
	s := Summary{Requests: len(out)}
	ttft := make([]float64, 0, len(out))
	work := make([]float64, replicas)
	var prompt, cached float64
	for _, o := range out {
		s.Retries += o.Retries
		if o.Failed {
			s.Failed++
			continue
		}
		ttft = append(ttft, o.TTFT.Seconds())
		s.Mean += o.TTFT.Seconds()
		s.Total += o.Total.Seconds()
		s.Held += o.Held.Seconds()
		prompt += float64(o.Prompt)
		cached += float64(o.Cached)
		work[o.Replica] += float64(o.Prompt - o.Cached)
	}
	if len(ttft) == 0 {
		return s
	}
	n := float64(len(ttft))
	s.Mean, s.Total, s.Held = s.Mean/n, s.Total/n, s.Held/n
	slices.Sort(ttft)
	s.P50, s.P90, s.P99 = quantile(ttft, 0.5), quantile(ttft, 0.9), quantile(ttft, 0.99)
	s.HitRate = cached / prompt
	if computed := prompt - cached; computed > 0 {
		s.Busiest = slices.Max(work) / (computed / float64(replicas))
	}
	return s
}

// quantile reads one off sorted values: the smallest that q of them do not exceed.
func quantile(sorted []float64, q float64) float64 {
	return sorted[max(0, int(math.Ceil(q*float64(len(sorted))))-1)]
}

// Detail is what plots are made of.
type Detail struct {
	// TTFT has the times to the first token at the quantiles 0, 1/200, 2/200 … 1,
	// in seconds.
	TTFT []float64 `json:"ttft_quantiles"`
	// Over time, by when requests arrived: Bin is a bin's length in seconds.
	Bin      float64   `json:"bin_seconds"`
	HitRates []float64 `json:"hit_rate_over_time"`
	TTFTs    []float64 `json:"ttft_mean_over_time"`
	// Counts are the requests in each bin; where it is 0 the others say nothing.
	Counts []int `json:"requests_over_time"`
	// Computed is how many prompt tokens each replica computed.
	Computed []float64 `json:"computed_tokens"`
	// Reasons counts why requests went where they went.
	Reasons map[string]int `json:"reasons"`
}

const (
	quantiles = 200
	bins      = 60
)

func detail(out []Outcome, replicas int) Detail {
	d := Detail{
		HitRates: make([]float64, bins), TTFTs: make([]float64, bins), Counts: make([]int, bins),
		Computed: make([]float64, replicas), Reasons: make(map[string]int),
	}
	var last time.Duration
	for _, o := range out {
		last = max(last, o.Arrived)
	}
	width := last/bins + 1
	d.Bin = width.Seconds()
	prompts := make([]float64, bins)
	var ttft []float64
	for _, o := range out {
		if o.Failed {
			d.Reasons["failed"]++
			continue
		}
		bin := int(o.Arrived / width)
		d.Counts[bin]++
		d.TTFTs[bin] += o.TTFT.Seconds()
		d.HitRates[bin] += float64(o.Cached)
		prompts[bin] += float64(o.Prompt)
		d.Computed[o.Replica] += float64(o.Prompt - o.Cached)
		d.Reasons[o.Reason]++
		ttft = append(ttft, o.TTFT.Seconds())
	}
	for i := range bins {
		d.TTFTs[i] /= max(1, float64(d.Counts[i]))
		d.HitRates[i] /= max(1, prompts[i])
	}
	if slices.Sort(ttft); len(ttft) > 0 {
		for i := range quantiles + 1 {
			d.TTFT = append(d.TTFT, quantile(ttft, float64(i)/quantiles))
		}
	}
	return d
}
