// SPDX-License-Identifier: Apache-2.0

package metrics

import "bytes"

// field is one number that is collected for each rank while a page is read.
// Most become a Fact of the same name; the rest only help to compute one.
type field uint8

const (
	running field = iota
	waiting
	kvUsage
	capacityTokens
	capacityBlocks
	reservedTokens
	blockTokens
	prefixCaching
	awake
	asleep
	prefixQueries
	prefixHits
	reusedBlocks
	missedBlocks
	promptTokens
	cachedPromptTokens
	computedPromptTokens
	generationTokens
	firstTokens
	firstTokenSeconds
	queueSeconds
	prefillSeconds
	prefillTokens
	finished
	preemptions
	evictedBlocks
	evictedLifetime
	evictedIdle
	blockReuses
	blockReuseGaps
	fields // how many there are

	// Rows that carry their numbers in labels.
	cacheConfig
	loraInfo
	ignored
)

// isMost tells the fields of which one rank says the same thing in each of its
// rows: the largest counts, not the sum.
var isMost = [fields]bool{
	kvUsage:        true,
	capacityTokens: true,
	capacityBlocks: true,
	blockTokens:    true,
	asleep:         true,
}

// spelling ranks the names that mean the same field. Engines keep a deprecated
// name beside its successor, and Ray writes counters with and without _total;
// only the best spelling on a page counts, so that nothing counts twice.
type spelling uint8

const (
	current spelling = iota
	currentBare
	deprecated
	deprecatedBare
	spellings
)

// series says what the samples of one name mean.
type series struct {
	field    field
	spelling spelling
	// label, when not empty, picks the field by its value; field then stands
	// for all other values.
	label  string
	values map[string]field
}

// dialect is one engine's way of naming things.
type dialect struct {
	engine Engine
	names  map[string]series // without the engine's prefix
	// ranks are the labels that tell one KV cache from another behind the port.
	ranks []string
	model string
	// totalBlocks: each rank's row repeats the blocks of all ranks.
	totalBlocks bool
	// hitsFromPrompts: the prefix cache is looked up once for each prompt
	// token, so the prompt counters are the cache's too.
	hitsFromPrompts bool
}

// The dialects, best first: a page that speaks several is read in the first.
const (
	vllmDialect = iota
	sglangDialect
	trtllmDialect
	tritonDialect
	llamaDialect
	tgiDialect
	rayDialect
	dynamoDialect
	oldTRTLLMDialect
	dialectCount
)

var dialects = [dialectCount]dialect{
	vllmDialect: {
		engine: VLLM, names: vllmNames, ranks: []string{"engine"}, model: "model_name",
		totalBlocks: true,
	},
	sglangDialect: {
		engine: SGLang, names: sglangNames, ranks: []string{"dp_rank"}, model: "model_name",
		hitsFromPrompts: true,
	},
	trtllmDialect: {
		engine: TensorRTLLM, names: trtllmNames, model: "model_name", hitsFromPrompts: true,
	},
	tritonDialect: {
		engine: TritonTRTLLM, names: tritonNames, ranks: []string{"model", "version"}, model: "model",
	},
	llamaDialect: {engine: LlamaCPP, names: llamaNames, model: "model", hitsFromPrompts: true},
	tgiDialect:   {engine: TGI, names: tgiNames, model: "model_name", hitsFromPrompts: true},
	rayDialect: {
		engine: Ray, names: vllmNames, ranks: []string{"engine", "ReplicaId", "WorkerId"},
		model: "model_name", totalBlocks: true,
	},
	dynamoDialect: {engine: Dynamo, names: dynamoNames, ranks: []string{"dp_rank"}, model: "model"},
	oldTRTLLMDialect: {
		engine: TensorRTLLM, names: oldTRTLLMNames, model: "model_name",
	},
}

// dialectOf recognises a line by its first bytes and returns what follows the
// engine's prefix. Nearly all lines of a page end here or in the names.
func dialectOf(line []byte) (d int, rest []byte, ok bool) {
	switch line[0] {
	case 'v':
		if rest, ok = bytes.CutPrefix(line, []byte("vllm:")); ok {
			return vllmDialect, rest, true
		}
		rest, ok = bytes.CutPrefix(line, []byte("vllm_"))
		return rayDialect, rest, ok
	case 's':
		if rest, ok = bytes.CutPrefix(line, []byte("sglang:")); ok {
			return sglangDialect, rest, true
		}
		rest, ok = bytes.CutPrefix(line, []byte("sglang_"))
		return sglangDialect, rest, ok
	case 't':
		if rest, ok = bytes.CutPrefix(line, []byte("trtllm_")); ok {
			return trtllmDialect, rest, true
		}
		if rest, ok = bytes.CutPrefix(line, []byte("tgi_")); ok {
			return tgiDialect, rest, true
		}
		return oldTRTLLMDialect, line, bytes.HasPrefix(line, []byte("time_to_first_token_seconds"))
	case 'n':
		rest, ok = bytes.CutPrefix(line, []byte("nv_trt_llm_"))
		return tritonDialect, rest, ok
	case 'l':
		rest, ok = bytes.CutPrefix(line, []byte("llamacpp:"))
		return llamaDialect, rest, ok
	case 'd':
		rest, ok = bytes.CutPrefix(line, []byte("dynamo_"))
		return dynamoDialect, rest, ok
	case 'r':
		if rest, ok = bytes.CutPrefix(line, []byte("ray_")); ok {
			return rayDialectOf(rest)
		}
		return oldTRTLLMDialect, line, bytes.HasPrefix(line, []byte("request_"))
	}
	return 0, nil, false
}

// rayDialectOf recognises a line whose prefix ray_ was cut. Ray renames any
// engine's metrics, and keeps the colon in some versions.
func rayDialectOf(line []byte) (d int, rest []byte, ok bool) {
	d, rest, ok = 0, nil, false
	if len(line) > 0 && (line[0] == 'v' || line[0] == 's') {
		d, rest, ok = dialectOf(line)
	}
	if d == vllmDialect {
		d = rayDialect
	}
	return d, rest, ok
}

// vllmNames: vLLM, vllm/v1/metrics/loggers.py, and V0's names up to 0.10.
var vllmNames = join(
	gauge(running, "num_requests_running"),
	gauge(waiting, "num_requests_waiting"),
	gauge(kvUsage, "kv_cache_usage_perc", "gpu_cache_usage_perc"),
	counter(prefixQueries, "prefix_cache_queries", "gpu_prefix_cache_queries"),
	counter(prefixHits, "prefix_cache_hits", "gpu_prefix_cache_hits"),
	counter(promptTokens, "prompt_tokens"),
	counter(cachedPromptTokens, "prompt_tokens_cached"),
	choice(counter(ignored, "prompt_tokens_by_source"), "source",
		map[string]field{"local_compute": computedPromptTokens}),
	map[string]series{
		"request_prefill_kv_computed_tokens_sum": {field: prefillTokens},
	},
	counter(generationTokens, "generation_tokens"),
	counter(finished, "request_success"),
	counter(preemptions, "num_preemptions"),
	histogram(evictedBlocks, evictedLifetime, "kv_block_lifetime_seconds"),
	histogram(ignored, evictedIdle, "kv_block_idle_before_evict_seconds"),
	histogram(blockReuses, blockReuseGaps, "kv_block_reuse_gap_seconds"),
	histogram(firstTokens, firstTokenSeconds, "time_to_first_token_seconds"),
	histogram(ignored, queueSeconds, "request_queue_time_seconds"),
	histogram(ignored, prefillSeconds, "request_prefill_time_seconds"),
	choice(gauge(ignored, "engine_sleep_state"), "sleep_state", map[string]field{
		"awake": awake, "weights_offloaded": asleep, "discard_all": asleep,
	}),
	gauge(cacheConfig, "cache_config_info"),
	gauge(loraInfo, "lora_requests_info"),
)

// sglangNames: SGLang, srt/observability/metrics_collector.py. cached_tokens is
// split by cache_source, of which the sum is wanted.
var sglangNames = join(
	gauge(running, "num_running_reqs"),
	gauge(waiting, "num_queue_reqs"),
	gauge(kvUsage, "token_usage"),
	gauge(capacityTokens, "max_total_num_tokens"),
	gauge(blockTokens, "page_size"),
	gauge(cacheConfig, "cache_config_info"),
	counter(promptTokens, "prompt_tokens"),
	counter(cachedPromptTokens, "cached_tokens"),
	counter(generationTokens, "generation_tokens"),
	counter(finished, "num_requests"),
	counter(preemptions, "num_retracted_requests"),
	histogram(firstTokens, firstTokenSeconds, "time_to_first_token_seconds"),
	histogram(ignored, queueSeconds, "queue_time_seconds"),
)

// trtllmNames: TensorRT-LLM, tensorrt_llm/metrics/collector.py.
var trtllmNames = join(
	gauge(running, "num_requests_running"),
	gauge(waiting, "num_requests_waiting"),
	gauge(kvUsage, "kv_cache_utilization"),
	gauge(capacityBlocks, "kv_cache_max_blocks"),
	gauge(blockTokens, "kv_cache_tokens_per_block"),
	counter(reusedBlocks, "kv_cache_reused_blocks"),
	counter(missedBlocks, "kv_cache_missed_blocks"),
	counter(promptTokens, "prompt_tokens"),
	counter(cachedPromptTokens, "prompt_cached_tokens"),
	counter(generationTokens, "generation_tokens"),
	counter(finished, "request_success"),
	histogram(firstTokens, firstTokenSeconds, "time_to_first_token_seconds"),
	histogram(ignored, queueSeconds, "request_queue_time_seconds"),
	histogram(ignored, prefillSeconds, "request_prefill_time_seconds"),
)

// oldTRTLLMNames: TensorRT-LLM before it prefixed its five request metrics.
var oldTRTLLMNames = join(
	counter(finished, "request_success"),
	histogram(firstTokens, firstTokenSeconds, "time_to_first_token_seconds"),
	histogram(ignored, queueSeconds, "request_queue_time_seconds"),
)

// tritonNames: Triton's TensorRT-LLM backend writes two families whose label
// says what they count.
var tritonNames = join(
	choice(gauge(ignored, "request_metrics"), "request_type",
		map[string]field{"scheduled": running, "waiting": waiting}),
	choice(gauge(ignored, "kv_cache_block_metrics"), "kv_cache_block_type", map[string]field{
		"fraction": kvUsage, "max": capacityBlocks, "tokens_per": blockTokens,
	}),
)

// llamaNames: llama.cpp, tools/server. Its prompt_tokens_total leaves out what
// came from a slot's cache, which newer versions count as well.
var llamaNames = join(
	gauge(running, "requests_processing"),
	gauge(waiting, "requests_deferred"),
	gauge(kvUsage, "kv_cache_usage_ratio"),
	counter(computedPromptTokens, "prompt_tokens"),
	counter(cachedPromptTokens, "prompt_tokens_cached"),
	counter(prefillSeconds, "prompt_seconds"),
	counter(generationTokens, "tokens_predicted"),
)

// tgiNames: TGI 3, router and backends/v3. What a batch may grow to at most is
// reserved, so reserved over total is its KV usage.
var tgiNames = join(
	gauge(running, "batch_current_size"),
	gauge(waiting, "queue_size"),
	gauge(reservedTokens, "batch_current_max_tokens"),
	gauge(capacityTokens, "batch_max_total_tokens"),
	histogram(ignored, promptTokens, "request_input_length"),
	histogram(ignored, cachedPromptTokens, "request_skipped_tokens"),
	histogram(ignored, generationTokens, "request_generated_tokens"),
	histogram(ignored, queueSeconds, "request_queue_duration"),
	counter(finished, "request_success"),
)

// dynamoNames: Dynamo's own families. Its requests in flight are running and
// waiting ones together, hence Waiting stays unknown.
var dynamoNames = join(
	gauge(kvUsage, "component_gpu_cache_usage_percent", "component_kvstats_gpu_cache_usage_percent"),
	gauge(capacityBlocks, "component_total_blocks", "component_kvstats_total_blocks"),
	choice(gauge(ignored, "component_inflight_requests", "frontend_inflight_requests"),
		"dynamo_endpoint", map[string]field{"generate": running, "": running}),
	gauge(blockTokens, "frontend_model_kv_cache_block_size"),
	histogram(firstTokens, firstTokenSeconds, "frontend_time_to_first_token_seconds"),
	histogram(ignored, promptTokens, "frontend_input_sequence_tokens"),
	counter(generationTokens, "frontend_output_tokens"),
)

// gauge names a field by its present name and, after it, deprecated ones.
func gauge(f field, name string, old ...string) map[string]series {
	names := map[string]series{name: {field: f, spelling: current}}
	for _, o := range old {
		names[o] = series{field: f, spelling: deprecated}
	}
	return names
}

// counter is a gauge whose samples may end in _total: the Python client always
// writes it, Ray writes both forms.
func counter(f field, name string, old ...string) map[string]series {
	names := map[string]series{
		name + "_total": {field: f, spelling: current},
		name:            {field: f, spelling: currentBare},
	}
	for _, o := range old {
		names[o+"_total"] = series{field: f, spelling: deprecated}
		names[o] = series{field: f, spelling: deprecatedBare}
	}
	return names
}

// histogram names the fields of a histogram's count and sum.
func histogram(count, sum field, name string) map[string]series {
	return map[string]series{
		name + "_count": {field: count},
		name + "_sum":   {field: sum},
	}
}

// choice makes a label pick the field.
func choice(names map[string]series, label string, values map[string]field) map[string]series {
	for name, s := range names {
		s.label, s.values = label, values
		names[name] = s
	}
	return names
}

func join(parts ...map[string]series) map[string]series {
	all := make(map[string]series)
	for _, part := range parts {
		for name, s := range part {
			all[name] = s
		}
	}
	return all
}
