// SPDX-License-Identifier: Apache-2.0

package load

import (
	"encoding/json"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func writeFile(t *testing.T, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "trace.jsonl")
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestPercentile compares with the definition: the smallest value that at least
// so many percent of all values do not exceed.
func TestPercentile(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	for n := 1; n <= 250; n++ {
		values := make([]float64, n)
		for i := range values {
			values[i] = float64(rng.IntN(50))
		}
		sorted := slices.Sorted(slices.Values(values))
		d := distributionOf(slices.Clone(values))
		for percent, got := range map[int]float64{50: d.P50, 90: d.P90, 99: d.P99} {
			want := sorted[slices.IndexFunc(sorted, func(v float64) bool {
				within := 0
				for _, other := range values {
					if other <= v {
						within++
					}
				}
				return within*100 >= percent*n
			})]
			if got != want {
				t.Errorf("p%d of %d values is %v, want %v", percent, n, got, want)
			}
		}
		if d.Max != sorted[n-1] {
			t.Errorf("largest of %d values is %v, want %v", n, d.Max, sorted[n-1])
		}
	}
	if d := distributionOf(nil); d != (Distribution{}) {
		t.Errorf("distribution of nothing is %+v", d)
	}
}

func summarize(options Options, samples ...Sample) Result {
	return (&player{Options: options, samples: samples}).summarize()
}

func TestSummarize(t *testing.T) {
	got := summarize(Options{Replicas: 4},
		Sample{DueSeconds: 2, EndToEndSeconds: 3, TTFTSeconds: 1, PromptTokens: 100, CachedTokens: 100, Replica: "a", Reason: "match", statesCached: true},
		Sample{DueSeconds: 1, EndToEndSeconds: 9, TTFTSeconds: 3, PromptTokens: 300, CachedTokens: 0, Replica: "a", Reason: "load"},
		Sample{DueSeconds: 3, EndToEndSeconds: 1, TTFTSeconds: 0, PromptTokens: 100, CachedTokens: 0, Replica: "b", Reason: "load"},
		Sample{DueSeconds: 4, EndToEndSeconds: 99, Failure: "status_503", Status: 503},
	)
	if got.Requests != 4 || got.Measured != 4 || got.Succeeded != 3 || got.Failures["status_503"] != 1 {
		t.Errorf("counts: %+v", got)
	}
	if got.HitRate != 0.2 || got.CachedReported != 1 || got.PromptTokens != 500 {
		t.Errorf("hit rate %v of %d tokens, %d reported", got.HitRate, got.PromptTokens, got.CachedReported)
	}
	if got.TTFT.Mean != 4./3 || got.TTFT.P50 != 1 || got.EndToEnd.Max != 9 || got.DurationSeconds != 102 {
		t.Errorf("times: %+v, %+v, %v", got.TTFT, got.EndToEnd, got.DurationSeconds)
	}
	if want := (Share{Requests: 2, RequestShare: 2. / 3, UncachedPromptTokens: 300, UncachedShare: 0.75}); got.Replicas["a"] != want {
		t.Errorf("replica a got %+v, want %+v", got.Replicas["a"], want)
	}
	if !near(got.RequestSpread, 8./3) || got.UncachedSpread != 3 {
		t.Errorf("spreads %v and %v, want 8/3 and 3 of 4", got.RequestSpread, got.UncachedSpread)
	}
	if got.Reasons["load"] != 2 || got.Reasons["match"] != 1 {
		t.Errorf("reasons %v", got.Reasons)
	}
}

func TestWarmUpAndCoolDown(t *testing.T) {
	var samples []Sample
	for i := range 10 {
		samples = append(samples, Sample{DueSeconds: float64(i), TTFTSeconds: float64(i)})
	}
	slices.Reverse(samples) // they finish in any order
	got := summarize(Options{WarmUp: 0.2, CoolDown: 0.1}, samples...)
	if got.Requests != 10 || got.Measured != 7 || got.TTFT.Max != 8 || got.TTFT.P50 != 5 {
		t.Errorf("%d of %d measured, TTFT %+v; want the third to the ninth", got.Measured, got.Requests, got.TTFT)
	}
	if got := summarize(Options{WarmUp: 0.9}); got.Measured != 0 || got.HitRate != 0 {
		t.Errorf("result of nothing: %+v", got)
	}
}

func TestResultJSON(t *testing.T) {
	text, err := json.Marshal(summarize(Options{}, Sample{Replica: "a"}))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		`"ttft_seconds":{"mean":0,"p50":0,"p90":0,"p99":0,"max":0}`, `"end_to_end_seconds":`, `"hit_rate":0`,
		`"failures":{}`, `"replicas":{"a":{"requests":1,"request_share":1,"uncached_prompt_tokens":0,"uncached_share":0}}`,
	} {
		if !strings.Contains(string(text), want) {
			t.Errorf("%s lacks %s", text, want)
		}
	}
}

func FuzzEvent(f *testing.F) {
	for _, line := range []string{roleChunk, contentChunk, usageChunk, doneChunk, `data: {"error":{}}`, "data:", `data: {"content":"\`, `data:{"usage":{"prompt_tokens":1e9}}`} {
		f.Add([]byte(line))
	}
	f.Fuzz(func(t *testing.T, line []byte) {
		var heard []byte
		a := answer{heard: &heard}
		_ = a.event(line)
		// Whatever is heard of a JSON event has to fit into a JSON string again.
		data, _ := strings.CutPrefix(string(line), "data:")
		var quoted string
		if json.Valid([]byte(data)) && json.Unmarshal([]byte(`"`+string(heard)+`"`), &quoted) != nil {
			t.Errorf("heard %q of %q", heard, line)
		}
	})
}
