// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"bytes"
	"context"
	"errors"
	"maps"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// visit is what http_requests_total tells requests apart by.
type visit struct {
	handler, method string
	class           int // status, rounded down to a hundred
}

// visits counts requests to the inference endpoints.
type visits struct {
	mu        sync.Mutex
	counts    map[visit]int64
	durations *histogram
}

func newVisits() *visits {
	return &visits{counts: map[visit]int64{}, durations: newHistogram(boundsHTTP)}
}

func (v *visits) observe(what visit, took time.Duration) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.counts[what]++
	v.durations.observe(took.Seconds())
}

// metrics serves the page, or what the drill in force makes of it.
func (p *instance) metrics(w http.ResponseWriter, r *http.Request) {
	mode, frozen := p.faults.metricsMode()
	w.Header().Set("Content-Type", "text/plain; version=1.0.0; charset=utf-8")
	switch mode {
	case MetricsNotFound:
		writeJSON(w, http.StatusNotFound, map[string]string{"detail": "Not Found"})
	case MetricsFailing:
		writeError(w, http.StatusInternalServerError, errors.New("a drill asked /metrics to fail"))
	case MetricsFrozen:
		_, _ = w.Write(frozen)
	case MetricsGarbage:
		_, _ = w.Write([]byte("<html>\x00\xff vllm:num_requests_running{ 1 2 3\nvllm:kv_cache_usage_perc NaN e+\n"))
	case MetricsDrip:
		drip(r.Context(), w, p.page(mode))
	case MetricsEndless:
		endless(r.Context(), w)
	case MetricsHanging:
		<-r.Context().Done()
		panic(http.ErrAbortHandler)
	default:
		// Errors of these writes mean that the client is gone.
		_, _ = w.Write(p.page(mode))
	}
}

// filteredMetrics serves GET /metrics/, which unlike /metrics heeds name[]: only the
// samples of exactly these names are shown.
func (p *instance) filteredMetrics(w http.ResponseWriter, r *http.Request) {
	names := r.URL.Query()["name[]"]
	if mode, _ := p.faults.metricsMode(); len(names) == 0 || mode != MetricsOK {
		p.metrics(w, r)
		return
	}
	var out []byte
	for line := range bytes.Lines(p.page(MetricsOK)) {
		end := bytes.IndexAny(line, "{ ")
		if slices.Contains(names, string(line[:max(end, 0)])) {
			out = append(out, line...)
		}
	}
	w.Header().Set("Content-Type", "text/plain; version=1.0.0; charset=utf-8")
	_, _ = w.Write(out)
}

// drip writes a page byte by byte.
func drip(ctx context.Context, w http.ResponseWriter, page []byte) {
	flush := http.NewResponseController(w).Flush
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for i := range page {
		if _, err := w.Write(page[i : i+1]); err != nil || flush() != nil {
			return
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			panic(http.ErrAbortHandler)
		}
	}
}

// endless writes samples until the client has had enough.
func endless(ctx context.Context, w http.ResponseWriter) {
	lines := bytes.Repeat([]byte("vllm:endless_total{engine=\"0\"} 1.0\n"), 1000)
	for ctx.Err() == nil {
		if _, err := w.Write(lines); err != nil {
			return
		}
	}
}

// page renders the metrics page in the given mode.
func (p *instance) page(mode MetricsMode) []byte {
	page := &page{
		model:   p.config.Model,
		created: float64(p.started.UnixNano()) / 1e9,
		factor:  1,
	}
	switch mode {
	case MetricsZero:
		page.factor = 0
	case MetricsTenfold:
		page.factor = 10
	case MetricsJumping:
		page.factor = 0.5
		page.created -= 60
	}
	page.process(time.Since(p.started))

	p.driver.mu.Lock()
	p.driver.engine.Advance(p.driver.clock.now())
	p.driver.flush()
	stats := p.driver.engine.Stats()
	if mode == MetricsAllHits {
		stats.PrefixHits, stats.CachedTokens = stats.PrefixQueries, stats.PromptTokens
	}
	page.engine(stats, p.driver.meters)
	p.driver.mu.Unlock()

	page.cacheConfig(p.config.Config)
	if len(p.config.Adapters) > 0 {
		page.adapters(p.config.Adapters)
	}
	p.visits.mu.Lock()
	page.visits(p.visits)
	p.visits.mu.Unlock()
	if mode == MetricsRenamed {
		return bytes.ReplaceAll(page.out, []byte("vllm:"), []byte("engine:"))
	}
	return page.out
}

// page builds text in the form of Python's Prometheus client: labels sorted by
// name, whole numbers with ".0", and a _created family behind every counter and
// histogram.
type page struct {
	out     []byte
	model   string
	created float64
	factor  float64 // multiplies the engine's figures
}

// label is an extra label of a sample and its value.
type label struct{ name, value string }

// head writes a family's HELP and TYPE lines.
func (p *page) head(name, help, kind string) {
	for _, s := range []string{"# HELP ", name, " ", help, "\n# TYPE ", name, " ", kind, "\n"} {
		p.out = append(p.out, s...)
	}
}

// raw writes one sample with exactly these labels.
func (p *page) raw(name string, v float64, labels ...label) {
	p.out = append(p.out, name...)
	for i, l := range labels {
		p.out = append(p.out, "{,"[min(i, 1)])
		p.out = append(append(p.out, l.name...), '=')
		p.out = appendLabelValue(p.out, l.value)
	}
	if len(labels) > 0 {
		p.out = append(p.out, '}')
	}
	p.out = append(p.out, ' ')
	p.out = append(appendFloat(p.out, v), '\n')
}

// sample writes one sample with the engine's labels and one extra one, if any.
func (p *page) sample(name string, v float64, extra ...label) {
	labels := append([]label{{"engine", "0"}, {"model_name", p.model}}, extra...)
	slices.SortFunc(labels, func(a, b label) int { return strings.Compare(a.name, b.name) })
	p.raw(name, v, labels...)
}

func (p *page) gauge(name, help string, v float64) {
	p.head(name, help, "gauge")
	p.sample(name, v*p.factor)
}

// counter writes a counter and its creation time.
func (p *page) counter(base, help string, v int64) {
	p.counters(base, help, "", []string{""}, float64(v))
}

// counters writes a family of counters told apart by one label; values that are
// not given are 0.
func (p *page) counters(base, help, name string, values []string, v ...float64) {
	extra := func(i int) []label {
		if name == "" {
			return nil
		}
		return []label{{name, values[i]}}
	}
	p.head(base+"_total", help, "counter")
	for i := range values {
		n := 0.0
		if i < len(v) {
			n = v[i]
		}
		p.sample(base+"_total", n*p.factor, extra(i)...)
	}
	p.head(base+"_created", help, "gauge")
	for i := range values {
		p.sample(base+"_created", p.created, extra(i)...)
	}
}

// histogram writes one histogram and its creation time.
func (p *page) histogram(name, help string, h *histogram) {
	p.head(name, help, "histogram")
	total := 0.0
	for i, n := range h.counts {
		le := "+Inf"
		if i < len(h.bounds) {
			le = string(appendFloat(nil, h.bounds[i]))
		}
		total += float64(n) * p.factor
		p.sample(name+"_bucket", total, label{"le", le})
	}
	p.sample(name+"_count", total)
	p.sample(name+"_sum", h.sum*p.factor)
	p.head(name+"_created", help, "gauge")
	p.sample(name+"_created", p.created)
}

// process writes the families of the Python process.
func (p *page) process(uptime time.Duration) {
	generations := []string{"0", "1", "2"}
	for _, f := range [][2]string{
		{"python_gc_objects_collected_total", "Objects collected during gc"},
		{"python_gc_objects_uncollectable_total", "Uncollectable objects found during GC"},
		{"python_gc_collections_total", "Number of times this generation was collected"},
	} {
		p.head(f[0], f[1], "counter")
		for _, g := range generations {
			p.raw(f[0], 0, label{"generation", g})
		}
	}
	p.head("python_info", "Python platform information", "gauge")
	p.raw("python_info", 1, label{"implementation", "CPython"}, label{"major", "3"}, label{"minor", "12"},
		label{"patchlevel", "0"}, label{"version", "3.12.0"})
	for _, f := range []struct {
		name, help, kind string
		value            float64
	}{
		{"process_virtual_memory_bytes", "Virtual memory size in bytes.", "gauge", 4.4e9},
		{"process_resident_memory_bytes", "Resident memory size in bytes.", "gauge", 1.1e9},
		{"process_start_time_seconds", "Start time of the process since unix epoch in seconds.", "gauge", p.created},
		{"process_cpu_seconds_total", "Total user and system CPU time spent in seconds.", "counter", uptime.Seconds()},
		{"process_open_fds", "Number of open file descriptors.", "gauge", 34},
		{"process_max_fds", "Maximum number of open file descriptors.", "gauge", 20000},
	} {
		p.head(f.name, f.help, f.kind)
		p.raw(f.name, f.value)
	}
}

// engine writes the engine's families.
func (p *page) engine(s Stats, m *meters) {
	p.counter("vllm:estimated_flops_per_gpu", "Estimated number of floating point operations per GPU.", 0)
	p.counter("vllm:estimated_read_bytes_per_gpu", "Estimated number of bytes read from memory per GPU.", 0)
	p.counter("vllm:estimated_write_bytes_per_gpu", "Estimated number of bytes written to memory per GPU.", 0)

	p.gauge("vllm:num_requests_running", "Number of requests in model execution batches.", float64(s.Running))
	p.gauge("vllm:num_requests_waiting", "Number of requests waiting to be processed.", float64(s.Waiting))
	p.head("vllm:num_requests_waiting_by_reason", "Number of waiting requests by reason.", "gauge")
	p.sample("vllm:num_requests_waiting_by_reason", float64(s.Waiting)*p.factor, label{"reason", "capacity"})
	p.sample("vllm:num_requests_waiting_by_reason", 0, label{"reason", "deferred"})
	p.head("vllm:engine_sleep_state", "Engine sleep state; awake = 0 means engine is sleeping; awake = 1 means engine is awake.", "gauge")
	p.sample("vllm:engine_sleep_state", p.factor, label{"sleep_state", "awake"})
	p.sample("vllm:engine_sleep_state", 0, label{"sleep_state", "weights_offloaded"})
	p.sample("vllm:engine_sleep_state", 0, label{"sleep_state", "discard_all"})
	p.gauge("vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", s.KVUsage)

	p.counter("vllm:prefix_cache_queries", "Prefix cache queries, in terms of number of queried tokens.", s.PrefixQueries)
	p.counter("vllm:prefix_cache_hits", "Prefix cache hits, in terms of number of cached tokens.", s.PrefixHits)
	p.counter("vllm:external_prefix_cache_queries", "External prefix cache queries from KV connector cross-instance cache sharing, in terms of number of queried tokens.", 0)
	p.counter("vllm:external_prefix_cache_hits", "External prefix cache hits from KV connector cross-instance cache sharing, in terms of number of cached tokens.", 0)
	p.counter("vllm:mm_cache_queries", "Multi-modal cache queries, in terms of number of queried items.", 0)
	p.counter("vllm:mm_cache_hits", "Multi-modal cache hits, in terms of number of cached items.", 0)
	p.counter("vllm:num_preemptions", "Cumulative number of preemption from the engine.", s.Preemptions)
	p.counter("vllm:prompt_tokens", "Number of prefill tokens processed.", s.PromptTokens)
	p.counters("vllm:prompt_tokens_by_source", "Number of prompt tokens by source.", "source",
		[]string{"local_compute", "local_cache_hit", "external_kv_transfer"},
		float64(s.PromptTokens-s.CachedTokens), float64(s.CachedTokens))
	p.counter("vllm:prompt_tokens_cached", "Number of cached prompt tokens (local + external).", s.CachedTokens)
	p.counters("vllm:prompt_tokens_cached_by_source", "Prefix-cache hit tokens by the cache tier that supplied them.", "source",
		[]string{"device", "host", "p2p", "disk", "external_unspecified"}, float64(s.PrefixHits))
	p.counter("vllm:generation_tokens", "Number of generation tokens processed.", s.GenerationTokens)
	p.counters("vllm:request_success", "Count of successfully processed requests.", "finished_reason",
		[]string{"stop", "length", "abort", "error", "repetition"}, 0, float64(s.Finished), float64(s.Aborted))
	p.counters("vllm:admission_rejections", "Number of admission attempts rejected by a queue limit, by reason.", "reason",
		[]string{"max_num_queued_reqs", "max_num_queued_tokens"}, float64(s.Rejected))

	p.histogram("vllm:request_prompt_tokens", "Number of prefill tokens processed.", m.promptTokens)
	p.histogram("vllm:request_generation_tokens", "Number of generation tokens processed.", m.generationTokens)
	p.histogram("vllm:iteration_tokens_total", "Histogram of number of tokens per engine_step.", m.iterationTokens)
	p.histogram("vllm:request_max_num_generation_tokens", "Histogram of maximum number of requested generation tokens.", m.maxTokens)
	p.histogram("vllm:request_params_n", "Histogram of the n request parameter.", m.choices)
	p.histogram("vllm:request_params_max_tokens", "Histogram of the max_tokens request parameter.", m.maxTokens)
	p.histogram("vllm:time_to_first_token_seconds", "Histogram of time to first token in seconds.", m.firstToken)
	p.histogram("vllm:inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", m.interToken)
	p.histogram("vllm:request_time_per_output_token_seconds", "Histogram of time_per_output_token_seconds per request.", m.pace)
	p.histogram("vllm:e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", m.latency)
	p.histogram("vllm:request_queue_time_seconds", "Histogram of time spent in WAITING phase for request.", m.queueTime)
	p.histogram("vllm:request_inference_time_seconds", "Histogram of time spent in RUNNING phase for request.", m.inference)
	p.histogram("vllm:request_prefill_time_seconds", "Histogram of time spent in PREFILL phase for request.", m.prefill)
	p.histogram("vllm:request_decode_time_seconds", "Histogram of time spent in DECODE phase for request.", m.decode)
	p.histogram("vllm:request_num_preemptions", "Histogram of the number of times a request was preempted.", m.preemptions)
	p.histogram("vllm:request_prefill_kv_computed_tokens", "Histogram of new KV tokens computed during prefill (excluding cached tokens).", m.computedTokens)
}

// cacheConfig writes the row whose labels are vLLM's CacheConfig. It has no model_name.
func (p *page) cacheConfig(c Config) {
	p.head("vllm:cache_config_info", "Information of the LLMEngine CacheConfig", "gauge")
	caching := "True"
	if c.NoPrefixCaching {
		caching = "False"
	}
	size := strconv.Itoa(c.BlockTokens)
	blocks := strconv.Itoa(c.Blocks)
	p.raw("vllm:cache_config_info", 1,
		label{"_block_size_resolved", "True"},
		label{"block_size", size},
		label{"cache_dtype", "auto"},
		label{"cache_hit_alignment_tokens", "None"},
		label{"effective_attention_block_size", size},
		label{"enable_prefix_caching", caching},
		label{"engine", "0"},
		label{"gpu_memory_utilization", "0.92"},
		label{"hash_block_size", "None"},
		label{"is_attention_free", "False"},
		label{"kv_cache_dtype_skip_layers", "[]"},
		label{"kv_cache_layout", "None"},
		label{"kv_cache_max_concurrency", strconv.FormatFloat(float64(c.CapacityTokens())/float64(c.MaxModelTokens), 'g', 6, 64)},
		label{"kv_cache_memory_bytes", "None"},
		label{"kv_cache_size_tokens", strconv.Itoa(c.Blocks * c.BlockTokens)},
		label{"kv_offloading_backend", "native"},
		label{"kv_offloading_size", "None"},
		label{"mamba_block_size", "None"},
		label{"num_cpu_blocks", "None"},
		label{"num_gpu_blocks", blocks},
		label{"num_gpu_blocks_override", "None"},
		label{"prefix_cache_retention_interval", "0"},
		label{"prefix_caching_hash_algo", "sha256"},
		label{"prefix_match_unit", "None"},
		label{"sliding_window", "None"},
		label{"user_specified_block_size", "False"},
	)
}

func (p *page) adapters(names []string) {
	p.head("vllm:lora_requests_info", "Running stats on lora requests.", "gauge")
	p.raw("vllm:lora_requests_info", p.created, label{"max_lora", strconv.Itoa(len(names))},
		label{"running_lora_adapters", ""}, label{"waiting_lora_adapters", ""})
}

// visits writes the families of the HTTP front.
func (p *page) visits(v *visits) {
	p.head("http_requests_total", "Total number of requests by method, status and handler.", "counter")
	what := slices.SortedFunc(maps.Keys(v.counts), func(a, b visit) int {
		return strings.Compare(a.handler+strconv.Itoa(a.class), b.handler+strconv.Itoa(b.class))
	})
	for _, w := range what {
		p.raw("http_requests_total", float64(v.counts[w]), label{"handler", w.handler}, label{"method", w.method},
			label{"status", strconv.Itoa(w.class/100) + "xx"})
	}
	name := "http_request_duration_highr_seconds"
	p.head(name, "Latency with many buckets but no API specific labels.", "histogram")
	total := int64(0)
	for i, n := range v.durations.counts {
		le := "+Inf"
		if i < len(v.durations.bounds) {
			le = string(appendFloat(nil, v.durations.bounds[i]))
		}
		total += n
		p.raw(name+"_bucket", float64(total), label{"le", le})
	}
	p.raw(name+"_count", float64(total))
	p.raw(name+"_sum", v.durations.sum)
}

// appendFloat writes a number as Python's client does: with a point or an exponent
// always, the latter from a million on.
func appendFloat(out []byte, v float64) []byte {
	if math.IsInf(v, 1) {
		return append(out, "+Inf"...)
	}
	if math.Abs(v) >= 1e6 {
		return strconv.AppendFloat(out, v, 'e', -1, 64)
	}
	n := len(out)
	out = strconv.AppendFloat(out, v, 'g', -1, 64)
	if bytes.ContainsAny(out[n:], ".eN") {
		return out
	}
	return append(out, ".0"...)
}

// appendLabelValue writes a label's value, quoted and escaped.
func appendLabelValue(out []byte, value string) []byte {
	out = append(out, '"')
	for _, c := range []byte(value) {
		switch c {
		case '\n':
			out = append(out, `\n`...)
		case '"', '\\':
			out = append(out, '\\', c)
		default:
			out = append(out, c)
		}
	}
	return append(out, '"')
}
