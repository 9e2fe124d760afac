// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

// reference reads vLLM's page the plain way: a full parse by expfmt, then maps.
type reference struct {
	names map[string][]row
}

type row struct {
	labels map[string]string
	value  float64
}

func parseReference(t testing.TB, text string) reference {
	t.Helper()
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(text))
	if err != nil {
		t.Fatalf("expfmt: %v", err)
	}
	ref := reference{names: map[string][]row{}}
	for name, family := range families {
		for _, m := range family.Metric {
			ref.add(name, m)
		}
	}
	return ref
}

func (ref reference) add(name string, m *dto.Metric) {
	labels := map[string]string{}
	for _, l := range m.Label {
		labels[l.GetName()] = l.GetValue()
	}
	put := func(name string, v float64) { ref.names[name] = append(ref.names[name], row{labels, v}) }
	switch {
	case m.Histogram != nil:
		put(name+"_sum", m.Histogram.GetSampleSum())
		put(name+"_count", float64(m.Histogram.GetSampleCount()))
	case m.Gauge != nil:
		put(name, m.Gauge.GetValue())
	case m.Counter != nil:
		put(name, m.Counter.GetValue())
	case m.Untyped != nil:
		put(name, m.Untyped.GetValue())
	}
}

// fact combines the rows of the first of the names that the page has.
func (ref reference) fact(combine func([]float64) float64, names ...string) Fact {
	for _, name := range names {
		rows := ref.names["vllm:"+name]
		if len(rows) == 0 {
			continue
		}
		var values []float64
		for _, r := range rows {
			if math.IsNaN(r.value) || math.IsInf(r.value, 0) || r.value < 0 {
				return Fact{}
			}
			values = append(values, r.value)
		}
		return fact(combine(values))
	}
	return Fact{}
}

func sumOf(values []float64) float64 {
	total := 0.0
	for _, v := range values {
		total += v
	}
	return total
}

func meanOf(values []float64) float64 { return sumOf(values) / float64(len(values)) }

func (ref reference) rows() int {
	engines := map[string]bool{}
	for _, name := range []string{"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "gpu_cache_usage_perc", "cache_config_info"} {
		for _, r := range ref.names["vllm:"+name] {
			engines[r.labels["engine"]] = true
		}
	}
	return len(engines)
}

func (ref reference) capacity() Fact {
	rows := ref.names["vllm:cache_config_info"]
	tokens, blocks, size, whole := 0.0, 0.0, 0.0, len(rows) > 0
	for _, r := range rows {
		t, err := strconv.ParseFloat(r.labels["kv_cache_size_tokens"], 64)
		whole = whole && err == nil
		tokens += t
		b, _ := strconv.ParseFloat(r.labels["num_gpu_blocks"], 64)
		blocks = max(blocks, b)
		s, _ := strconv.ParseFloat(r.labels["block_size"], 64)
		size = max(size, s)
	}
	if whole {
		return fact(tokens)
	}
	if blocks > 0 && size > 0 {
		return fact(blocks * size)
	}
	return Fact{}
}

func compare(t testing.TB, ref reference, got Snapshot) {
	t.Helper()
	check := func(name string, got, want Fact) {
		t.Helper()
		// Rows may be added up in another order.
		if got.Known != want.Known || math.Abs(got.Value-want.Value) > 1e-9*(1+math.Abs(want.Value)) {
			t.Errorf("%s: %+v, want %+v", name, got, want)
		}
	}
	check("Running", got.Running, ref.fact(sumOf, "num_requests_running"))
	check("Waiting", got.Waiting, ref.fact(sumOf, "num_requests_waiting"))
	check("KVUsage", got.KVUsage, ref.fact(meanOf, "kv_cache_usage_perc", "gpu_cache_usage_perc"))
	check("CapacityTokens", got.CapacityTokens, ref.capacity())
	check("PrefixQueries", got.PrefixQueries, ref.fact(sumOf, "prefix_cache_queries_total", "prefix_cache_queries",
		"gpu_prefix_cache_queries_total", "gpu_prefix_cache_queries"))
	check("PrefixHits", got.PrefixHits, ref.fact(sumOf, "prefix_cache_hits_total", "prefix_cache_hits",
		"gpu_prefix_cache_hits_total", "gpu_prefix_cache_hits"))
	check("PromptTokens", got.PromptTokens, ref.fact(sumOf, "prompt_tokens_total", "prompt_tokens"))
	check("CachedPromptTokens", got.CachedPromptTokens, ref.fact(sumOf, "prompt_tokens_cached_total", "prompt_tokens_cached"))
	check("GenerationTokens", got.GenerationTokens, ref.fact(sumOf, "generation_tokens_total", "generation_tokens"))
	check("FirstTokens", got.FirstTokens, ref.fact(sumOf, "time_to_first_token_seconds_count"))
	check("FirstTokenSeconds", got.FirstTokenSeconds, ref.fact(sumOf, "time_to_first_token_seconds_sum"))
	check("Finished", got.Finished, ref.fact(sumOf, "request_success_total", "request_success"))
	check("Preemptions", got.Preemptions, ref.fact(sumOf, "num_preemptions_total", "num_preemptions"))
	check("EvictedBlocks", got.EvictedBlocks, ref.fact(sumOf, "kv_block_lifetime_seconds_count"))
	check("EvictedLifetimeSeconds", got.EvictedLifetimeSeconds, ref.fact(sumOf, "kv_block_lifetime_seconds_sum"))
	check("EvictedIdleSeconds", got.EvictedIdleSeconds, ref.fact(sumOf, "kv_block_idle_before_evict_seconds_sum"))
	check("BlockReuses", got.BlockReuses, ref.fact(sumOf, "kv_block_reuse_gap_seconds_count"))
	check("BlockReuseSeconds", got.BlockReuseSeconds, ref.fact(sumOf, "kv_block_reuse_gap_seconds_sum"))
	if want := ref.rows(); got.Rows != want {
		t.Errorf("Rows: %d, want %d", got.Rows, want)
	}
}

func TestAgainstExpfmt(t *testing.T) {
	for _, name := range []string{
		"vllm_python.txt", "vllm_python_dp2_multiproc.txt", "vllm_0.32.txt", "vllm_0.32_dp2.txt",
		"vllm_v0.txt", "vllm_deprecated.txt",
	} {
		text := samplePage(t, name)
		compare(t, parseReference(t, text), scan(t, text))
	}
}

func TestRandomPagesAgainstExpfmt(t *testing.T) {
	for seed := range uint64(400) {
		text := randomPage(rand.New(rand.NewPCG(seed, 7)))
		compare(t, parseReference(t, text), scan(t, text))
		if t.Failed() {
			t.Fatalf("seed %d:\n%s", seed, text)
		}
	}
}

// randomPage writes a page as some version of vLLM might, in an order, spacing
// and escaping that none does.
func randomPage(r *rand.Rand) string {
	var lines []string
	add := func(format string, args ...any) { lines = append(lines, fmt.Sprintf(format, args...)) }
	ranks := 1 + r.IntN(4)
	name := []string{"m", `Qwen/Qwen3-8B`, `a \"b\" \\`, "}{ 1 2", "ü,=#"}[r.IntN(5)]
	labels := func(rank int, more ...string) string {
		all := append(more, fmt.Sprintf(`engine="%d"`, rank), `model_name="`+name+`"`)
		r.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
		return "{" + strings.Join(all, []string{",", ", ", " , "}[r.IntN(3)]) + []string{"", ","}[r.IntN(2)] + "}"
	}
	value := func() string {
		switch r.IntN(40) {
		case 0:
			return "NaN"
		case 1:
			return "+Inf"
		case 2:
			return "-1"
		}
		return strconv.FormatFloat(float64(r.IntN(1e6)), "efg"[r.IntN(3)], -1, 64)
	}
	tail := func() string { return []string{"", " 1700000000000"}[r.IntN(2)] }

	for _, gauge := range []string{"num_requests_running", "num_requests_waiting"} {
		for rank := range ranks {
			add("vllm:%s%s %s%s", gauge, labels(rank), value(), tail())
		}
	}
	for _, gauge := range []string{"kv_cache_usage_perc", "gpu_cache_usage_perc"} {
		if r.IntN(2) == 0 {
			continue
		}
		for rank := range ranks {
			add("vllm:%s%s\t%v%s", gauge, labels(rank), r.Float64(), tail())
		}
	}
	for _, counter := range []string{
		"prefix_cache_queries", "prefix_cache_hits", "gpu_prefix_cache_queries", "gpu_prefix_cache_hits",
		"prompt_tokens", "prompt_tokens_cached", "generation_tokens", "num_preemptions",
	} {
		for _, suffix := range []string{"_total", "", "_created"} {
			if r.IntN(2) == 0 {
				continue
			}
			for rank := range ranks {
				add("vllm:%s%s %s %s%s", counter, suffix, labels(rank), value(), tail())
			}
		}
	}
	for rank := range ranks {
		for _, reason := range []string{"stop", "length", "abort"} {
			add("vllm:request_success_total%s %s", labels(rank, `finished_reason="`+reason+`"`), value())
		}
		add("vllm:time_to_first_token_seconds_bucket%s %d", labels(rank, `le="+Inf"`), r.IntN(100))
		add("vllm:time_to_first_token_seconds_count%s %d", labels(rank), r.IntN(100))
		add("vllm:time_to_first_token_seconds_sum%s %v", labels(rank), 100*r.Float64())
		add("vllm:iteration_tokens_total_count%s %d", labels(rank), r.IntN(100))
		add("vllm:iteration_tokens_total_sum%s %d", labels(rank), r.IntN(100))
		add("vllm:new_gauge%s %s", labels(rank), value())
	}
	size := []string{"None", "23216"}[r.IntN(2)]
	for rank := range ranks {
		add(`vllm:cache_config_info{engine="%d",block_size="16",num_gpu_blocks="1451",kv_cache_size_tokens="%s"} 1`, rank, size)
	}
	add("# HELP http_requests_total vllm:num_requests_running 3")
	add("http_requests_total %s", value())
	add("")
	add("# EOF")
	// expfmt ends a histogram's name at the first of its lines; keep the rest in
	// any order.
	r.Shuffle(len(lines), func(i, j int) { lines[i], lines[j] = lines[j], lines[i] })
	return strings.Join(lines, "\n") + "\n"
}

func FuzzScan(f *testing.F) {
	for _, test := range dialectTests {
		f.Add(telling(samplePage(f, test.file)))
	}
	f.Add(samplePage(f, "vllm_no_stats.txt"))
	f.Add(randomPage(rand.New(rand.NewPCG(1, 2))))
	f.Add("vllm:num_requests_running{engine=\"0\\\"\\\\\"} 1\nray_vllm_x{")
	var used Scanner // keeps state from page to page, which must not show
	f.Fuzz(func(t *testing.T, text string) {
		var got, again, crlf Snapshot
		err := new(Scanner).Scan(strings.NewReader(text), &got)
		checkSnapshot(t, got, err)
		if err2 := used.Scan(strings.NewReader(text), &again); fmt.Sprint(err) != fmt.Sprint(err2) || fmt.Sprintf("%#v", got) != fmt.Sprintf("%#v", again) {
			t.Errorf("a used scanner reads %+v (%v), a new one %+v (%v)", again, err2, got, err)
		}
		if len(text) > maxLine/2 {
			return // a line end more may make a line too long
		}
		new(Scanner).Scan(strings.NewReader(strings.ReplaceAll(text, "\n", "\r\n")), &crlf)
		if fmt.Sprintf("%#v", got) != fmt.Sprintf("%#v", crlf) {
			t.Errorf("with CRLF %+v, with LF %+v", crlf, got)
		}
	})
}

// telling leaves out most lines that are skipped: the fuzzer works better on
// short seeds.
func telling(page string) string {
	var kept strings.Builder
	for line := range strings.Lines(page) {
		if !strings.HasPrefix(line, "# HELP") && !strings.HasPrefix(line, "http_") &&
			!strings.Contains(line, "_bucket") && !strings.Contains(line, "_created") && kept.Len() < 4<<10 {
			kept.WriteString(line)
		}
	}
	return kept.String()
}

func checkSnapshot(t *testing.T, s Snapshot, err error) {
	t.Helper()
	facts := []Fact{s.Running, s.Waiting, s.KVUsage, s.CapacityTokens, s.BlockTokens, s.PrefixCaching, s.Asleep,
		s.PrefixQueries, s.PrefixHits, s.PromptTokens, s.CachedPromptTokens, s.ComputedPromptTokens,
		s.GenerationTokens, s.FirstTokens, s.FirstTokenSeconds, s.QueueSeconds, s.PrefillSeconds, s.Finished, s.Preemptions,
		s.EvictedBlocks, s.EvictedLifetimeSeconds, s.EvictedIdleSeconds, s.BlockReuses, s.BlockReuseSeconds}
	for i, f := range append(facts, s.StartTime) {
		if math.IsNaN(f.Value) || math.IsInf(f.Value, 0) || f.Value < 0 || !f.Known && f.Value != 0 {
			t.Errorf("fact %d: %+v", i, f)
		}
	}
	if s.KVUsage.Value > 1 || s.PrefixCaching.Value > 1 || s.Asleep.Value > 1 {
		t.Errorf("shares above 1: %+v", s)
	}
	if s.Rows > maxRanks || len(s.Models) > maxModels || len(s.Adapters) > maxNames {
		t.Errorf("beyond its bounds: %+v", s)
	}
	if err != nil && (s.Engine != Unknown || slices.ContainsFunc(facts, func(f Fact) bool { return f.Known })) {
		t.Errorf("facts beside error %v: %+v", err, s)
	}
	if err == nil && s.Engine == Unknown {
		t.Error("unknown engine without an error")
	}
}
