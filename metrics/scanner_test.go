// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"testing/iotest"
)

func fact(v float64) Fact { return Fact{Value: v, Known: true} }

func samplePage(t testing.TB, name string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// dialectTests are whole snapshots: what a page does not say must be unknown.
var dialectTests = []struct {
	file string
	want Snapshot
}{
	{"vllm_python.txt", Snapshot{
		Engine: VLLM, Rows: 1,
		Running: fact(7), Waiting: fact(2), KVUsage: fact(0.3127011233),
		CapacityTokens: fact(232192), BlockTokens: fact(16), PrefixCaching: fact(1), Asleep: fact(0),
		PrefixQueries: fact(1177279), PrefixHits: fact(641200),
		PromptTokens: fact(1177279), CachedPromptTokens: fact(641200), ComputedPromptTokens: fact(536079),
		GenerationTokens: fact(62939), FirstTokens: fact(400), FirstTokenSeconds: fact(64.17353744714684),
		QueueSeconds: fact(13.957270868834964), PrefillSeconds: fact(50.21626657831185), PrefillTokens: fact(536079), Finished: fact(400), Preemptions: fact(2),
		EvictedBlocks: fact(60), EvictedLifetimeSeconds: fact(7004.112004742658), EvictedIdleSeconds: fact(2831.5118493140794),
		BlockReuses: fact(60), BlockReuseSeconds: fact(3346.3617468554685),
		StartTime: fact(1.79596607071e+09),
		Adapters:  []string{"sql-adapter", "chat-adapter", "tweet-adapter"},
		Models:    []string{"Qwen/Qwen3-8B"},
	}},
	{"vllm_python_dp2_multiproc.txt", Snapshot{
		Engine: VLLM, Rows: 2,
		Running: fact(14), Waiting: fact(4), KVUsage: fact(0.3127011233),
		CapacityTokens: fact(2 * 232192), BlockTokens: fact(16), PrefixCaching: fact(1), Asleep: fact(0),
		PrefixQueries: fact(437154 + 430050), PrefixHits: fact(238288 + 185600),
		PromptTokens: fact(437154 + 430050), CachedPromptTokens: fact(238288 + 185600),
		ComputedPromptTokens: fact(198866 + 244450),
		GenerationTokens:     fact(20965 + 18770), FirstTokens: fact(270),
		FirstTokenSeconds: fact(24.176139612386166 + 24.088544476507785),
		QueueSeconds:      fact(5.606778813873138 + 3.935043837080839), PrefillSeconds: fact(18.569360798513028 + 20.15350063942693), PrefillTokens: fact(198866 + 244450),
		Finished: fact(146 + 4 + 117 + 3), Preemptions: fact(4),
		EvictedBlocks: fact(120), EvictedLifetimeSeconds: fact(10626.187403157666), EvictedIdleSeconds: fact(5000.558708391918),
		BlockReuses: fact(120), BlockReuseSeconds: fact(4949.188875906637),
		Adapters: []string{"sql-adapter", "chat-adapter", "tweet-adapter"},
		Models:   []string{"Qwen/Qwen3-8B"},
	}},
	{"vllm_rust_openmetrics.txt", Snapshot{
		Engine: VLLM, Rows: 1,
		Running: fact(7), Waiting: fact(2), KVUsage: fact(0.4312961201847771),
		PrefixQueries: fact(1177279), PrefixHits: fact(641200),
		PromptTokens: fact(1177279), CachedPromptTokens: fact(641200), ComputedPromptTokens: fact(536079),
		GenerationTokens: fact(98122), FirstTokens: fact(411), FirstTokenSeconds: fact(71.8),
		Finished: fact(414), Preemptions: fact(1),
		Adapters: []string{"sql-lora"},
		Models:   []string{"Qwen/Qwen3-8B"},
	}},
	{"vllm_0.32.txt", Snapshot{
		Engine: VLLM, Rows: 1,
		Running: fact(0), Waiting: fact(0), KVUsage: fact(0),
		CapacityTokens: fact(12800), BlockTokens: fact(32), PrefixCaching: fact(1), Asleep: fact(0),
		PrefixQueries: fact(22021), PrefixHits: fact(4224),
		PromptTokens: fact(22021), CachedPromptTokens: fact(4224), ComputedPromptTokens: fact(17797),
		GenerationTokens: fact(138), FirstTokens: fact(18), FirstTokenSeconds: fact(0.6020376682281494),
		QueueSeconds: fact(0.0008013659996777278), PrefillSeconds: fact(0.5006602550002981), PrefillTokens: fact(17797), Finished: fact(18), Preemptions: fact(0),
		EvictedBlocks: fact(168), EvictedLifetimeSeconds: fact(3759.5906870620024), EvictedIdleSeconds: fact(3750.3429365819998),
		BlockReuses: fact(66), BlockReuseSeconds: fact(3.6073995730000004),
		StartTime: fact(1.79596969088e+09), Models: []string{"tiny"},
	}},
	{"vllm_0.32_dp2.txt", Snapshot{
		Engine: VLLM, Rows: 2,
		Running: fact(0), Waiting: fact(0), KVUsage: fact(0),
		CapacityTokens: fact(25600), BlockTokens: fact(32), PrefixCaching: fact(1), Asleep: fact(0),
		PrefixQueries: fact(2200), PrefixHits: fact(960),
		PromptTokens: fact(2200), CachedPromptTokens: fact(960), ComputedPromptTokens: fact(1240),
		GenerationTokens: fact(22), FirstTokens: fact(11),
		FirstTokenSeconds: fact(0.07128071784973145 + 0.07763957977294922),
		QueueSeconds:      fact(0.00039083000001483015 + 0.00046475900023779104), PrefillSeconds: fact(0.048780194999949344 + 0.04744919299992034), PrefillTokens: fact(1240),
		Finished: fact(11), Preemptions: fact(0),
		StartTime: fact(1.79597008902e+09), Models: []string{"tiny"},
	}},
	{"vllm_0.32_dp2_lora.txt", Snapshot{
		Engine: VLLM, Rows: 2,
		Running: fact(0), Waiting: fact(0), KVUsage: fact(0),
		CapacityTokens: fact(25600), BlockTokens: fact(32), PrefixCaching: fact(1), Asleep: fact(0),
		PrefixQueries: fact(4095), PrefixHits: fact(1600),
		PromptTokens: fact(4095), CachedPromptTokens: fact(1600), ComputedPromptTokens: fact(2495),
		GenerationTokens: fact(20), FirstTokens: fact(5),
		FirstTokenSeconds: fact(0.05117177963256836 + 2.475153684616089),
		QueueSeconds:      fact(0.00011945699952775612 + 0.0004246419994160533), PrefillSeconds: fact(0.04465052199884667 + 2.2234637790024863), PrefillTokens: fact(2495),
		Finished: fact(5), Preemptions: fact(0),
		EvictedBlocks: fact(3), EvictedLifetimeSeconds: fact(14.349844524999998), EvictedIdleSeconds: fact(14.349856419),
		BlockReuses: fact(0), BlockReuseSeconds: fact(0),
		StartTime: fact(1.79599703911e+09), Models: []string{"tiny"}, Adapters: []string{},
	}},
	{"vllm_v0.txt", Snapshot{
		Engine: VLLM, Rows: 1,
		Running: fact(3), Waiting: fact(1), KVUsage: fact(0.5),
		CapacityTokens: fact(16000), BlockTokens: fact(16), PrefixCaching: fact(0),
		PromptTokens: fact(5000), GenerationTokens: fact(700), Finished: fact(10), Preemptions: fact(4),
		FirstTokens: fact(11), FirstTokenSeconds: fact(5.5), PrefillSeconds: fact(4.5), StartTime: fact(1.7e9),
		Models: []string{"m"},
	}},
	{"vllm_deprecated.txt", Snapshot{
		Engine: VLLM, Rows: 1, Running: fact(1), KVUsage: fact(0.25),
		PrefixQueries: fact(100), PrefixHits: fact(40), Models: []string{"m"},
	}},
	{"vllm_pid.txt", Snapshot{
		Engine: VLLM, Rows: 1, Running: fact(5), Waiting: fact(3), KVUsage: fact(0.75),
		Models: []string{"m"},
	}},
	{"sglang.txt", Snapshot{
		Engine: SGLang, Rows: 1, Running: fact(4), Waiting: fact(5), KVUsage: fact(0.28),
		CapacityTokens: fact(412640), BlockTokens: fact(64),
		PrefixQueries: fact(8128902), PrefixHits: fact(3200000),
		PromptTokens: fact(8128902), CachedPromptTokens: fact(3200000),
		GenerationTokens: fact(7557572), FirstTokens: fact(11008), FirstTokenSeconds: fact(2407.5),
		QueueSeconds: fact(311.25), Finished: fact(11008), Preemptions: fact(6),
		Models: []string{"m"},
	}},
	{"sglang_dp2.txt", Snapshot{
		Engine: SGLang, Rows: 2, Running: fact(10), Waiting: fact(2), KVUsage: fact(0.625),
		CapacityTokens: fact(2000), PromptTokens: fact(50), Models: []string{"m"},
	}},
	{"sglang_old.txt", Snapshot{
		Engine: SGLang, Rows: 1, Running: fact(1), CapacityTokens: fact(6400), BlockTokens: fact(64),
		Models: []string{"m"},
	}},
	{"trtllm.txt", Snapshot{
		Engine: TensorRTLLM, Rows: 1, Running: fact(3), Waiting: fact(2), KVUsage: fact(0.125),
		CapacityTokens: fact(64000), BlockTokens: fact(32),
		PrefixQueries: fact(3150), PrefixHits: fact(960),
		PromptTokens: fact(3150), CachedPromptTokens: fact(960), GenerationTokens: fact(64),
		FirstTokens: fact(7), FirstTokenSeconds: fact(1.5), PrefillSeconds: fact(1.25), Finished: fact(7), Models: []string{"m"},
	}},
	{"trtllm_blocks.txt", Snapshot{
		Engine: TensorRTLLM, Rows: 1, Running: fact(3), Waiting: fact(2), KVUsage: fact(0.125),
		CapacityTokens: fact(64000), BlockTokens: fact(32),
		PrefixQueries: fact(3200), PrefixHits: fact(960),
		PromptTokens: fact(3150), GenerationTokens: fact(64),
		FirstTokens: fact(7), FirstTokenSeconds: fact(1.5), PrefillSeconds: fact(1.25), Finished: fact(7), Models: []string{"m"},
	}},
	{"trtllm_old.txt", Snapshot{
		Engine: TensorRTLLM, FirstTokens: fact(6), FirstTokenSeconds: fact(0.5),
		QueueSeconds: fact(0.25), Finished: fact(6), Models: []string{"m"},
	}},
	{"triton.txt", Snapshot{
		Engine: TritonTRTLLM, Rows: 1, Running: fact(4), Waiting: fact(1), KVUsage: fact(0.25),
		CapacityTokens: fact(6240 * 64), BlockTokens: fact(64), Models: []string{"tensorrt_llm"},
	}},
	{"llamacpp.txt", Snapshot{
		Engine: LlamaCPP, Rows: 1, Running: fact(4), Waiting: fact(46), KVUsage: fact(0.25),
		ComputedPromptTokens: fact(4321), GenerationTokens: fact(987),
	}},
	{"llamacpp_b11549.txt", Snapshot{
		Engine: LlamaCPP, Rows: 1, Running: fact(0), Waiting: fact(0),
		PromptTokens: fact(1638), CachedPromptTokens: fact(818), ComputedPromptTokens: fact(820),
		PrefixQueries: fact(1638), PrefixHits: fact(818), PrefillSeconds: fact(0.128019), GenerationTokens: fact(16),
	}},
	{"tgi.txt", Snapshot{
		Engine: TGI, Rows: 1, Running: fact(6), Waiting: fact(2), KVUsage: fact(0.25),
		CapacityTokens: fact(16000), PrefixQueries: fact(900), PrefixHits: fact(300),
		PromptTokens: fact(900), CachedPromptTokens: fact(300), GenerationTokens: fact(450),
		QueueSeconds: fact(0.75), Finished: fact(9),
	}},
	{"ray.txt", Snapshot{
		Engine: Ray, Rows: 2, Running: fact(5), Waiting: fact(4), KVUsage: fact(0.5),
		CapacityTokens: fact(32000), BlockTokens: fact(16), PrefixCaching: fact(1), Asleep: fact(0),
		PrefixQueries: fact(150), PrefixHits: fact(80), PromptTokens: fact(150), CachedPromptTokens: fact(80),
		FirstTokens: fact(6), FirstTokenSeconds: fact(2), PrefillSeconds: fact(1.5), Finished: fact(5), Preemptions: fact(1),
		Models: []string{"m"}, Adapters: []string{"sql"},
	}},
	{"dynamo.txt", Snapshot{
		Engine: Dynamo, Rows: 1, Running: fact(5), KVUsage: fact(0.5), Models: []string{"m"},
	}},
	{"dynamo_frontend.txt", Snapshot{
		Engine: Dynamo, Rows: 1, Running: fact(7), BlockTokens: fact(16), PromptTokens: fact(88000), GenerationTokens: fact(5000),
		FirstTokens: fact(44), FirstTokenSeconds: fact(22.5), Models: []string{"m"},
	}},
	{"hostile.txt", Snapshot{
		Engine: VLLM, Rows: 1, Running: fact(7), FirstTokens: fact(3),
		PrefixQueries: fact(2000), PrefixHits: fact(1000), Finished: fact(2),
		Models: []string{`a "quoted" } name\`},
	}},
}

func TestDialects(t *testing.T) {
	var s Scanner
	for _, test := range dialectTests {
		t.Run(test.file, func(t *testing.T) {
			page := samplePage(t, test.file)
			for _, r := range []io.Reader{
				strings.NewReader(page),
				iotest.OneByteReader(strings.NewReader(page)),
				iotest.DataErrReader(strings.NewReader(page)),
			} {
				var got Snapshot
				if err := s.Scan(r, &got); err != nil {
					t.Fatal(err)
				}
				if !reflect.DeepEqual(got, test.want) {
					t.Errorf("got  %+v\nwant %+v", got, test.want)
				}
			}
		})
	}
}

func scan(t testing.TB, page string) Snapshot {
	t.Helper()
	var s Scanner
	var got Snapshot
	if err := s.Scan(strings.NewReader(page), &got); err != nil {
		t.Fatal(err)
	}
	return got
}

func TestNoEngine(t *testing.T) {
	for _, page := range []string{
		"", "\n", "<html>vllm:num_requests_running</html>", `[{"iter": 1}]`,
		"request_success_total 3\nrequest_queue_time_seconds_sum 1\n",
		"vllmx 1\nsglan", "# vllm:num_requests_running 1\n",
	} {
		got := Snapshot{Running: fact(1), Models: []string{"old"}}
		if err := new(Scanner).Scan(strings.NewReader(page), &got); !errors.Is(err, ErrNoEngine) {
			t.Errorf("%q: %v, want ErrNoEngine", page, err)
		}
		if !reflect.DeepEqual(got, Snapshot{}) {
			t.Errorf("%q: facts %+v", page, got)
		}
	}

	var got Snapshot
	err := new(Scanner).Scan(strings.NewReader(samplePage(t, "vllm_no_stats.txt")), &got)
	if !errors.Is(err, ErrNoEngine) {
		t.Errorf("without stats: %v, want ErrNoEngine", err)
	}
	if want := (Snapshot{StartTime: fact(1.79596607071e+09)}); !reflect.DeepEqual(got, want) {
		t.Errorf("without stats: %+v", got)
	}
}

// An engine that says nothing of use is still recognised, and nothing is known.
func TestEngineWithoutFacts(t *testing.T) {
	var s Scanner
	for range 2 { // nothing carries over that would change the second answer
		var got Snapshot
		err := s.Scan(strings.NewReader("vllm:something_new{engine=\"0\"} 3\n"), &got)
		if want := (Snapshot{Engine: VLLM}); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("got %+v, %v", got, err)
		}
	}
}

func TestRows(t *testing.T) {
	tests := []struct {
		name, page string
		get        func(*Snapshot) any
		want       any
	}{
		{"several models of one engine are one row",
			"vllm:num_requests_running{engine=\"0\",model_name=\"a\"} 1\nvllm:num_requests_running{engine=\"0\",model_name=\"b\"} 2\n",
			func(s *Snapshot) any { return [3]any{s.Rows, s.Running, len(s.Models)} },
			[3]any{1, fact(3), 2}},
		{"usage of several models of one engine is its largest",
			"vllm:kv_cache_usage_perc{engine=\"0\",model_name=\"a\"} 0.5\nvllm:kv_cache_usage_perc{engine=\"0\",model_name=\"b\"} 0.25\n",
			func(s *Snapshot) any { return s.KVUsage }, fact(0.5)},
		{"external load balancing numbers its one engine",
			"vllm:num_requests_running{engine=\"7\"} 4\n",
			func(s *Snapshot) any { return [2]any{s.Rows, s.Running} }, [2]any{1, fact(4)}},
		{"a row that is there twice is unknown",
			"vllm:num_requests_running{engine=\"0\"} 4\nvllm:num_requests_waiting{engine=\"0\"} 1\nvllm:num_requests_running{engine=\"0\"} 4\n",
			func(s *Snapshot) any { return [2]any{s.Running, s.Waiting} }, [2]any{Fact{}, fact(1)}},
		{"a family that is there twice, with rows of their own",
			"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine=\"0\"} 4\n# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine=\"1\"} 5\n",
			func(s *Snapshot) any { return s.Running }, fact(9)},
		{"infinite", "vllm:num_requests_running +Inf\nvllm:num_requests_waiting 1\n",
			func(s *Snapshot) any { return [2]any{s.Running, s.Waiting} }, [2]any{Fact{}, fact(1)}},
		{"negative", "vllm:num_requests_running -1\nvllm:num_requests_waiting 1\n",
			func(s *Snapshot) any { return [2]any{s.Running, s.Waiting} }, [2]any{Fact{}, fact(1)}},
		{"one unreadable rank spoils the sum",
			"vllm:num_requests_running{engine=\"0\"} 4\nvllm:num_requests_running{engine=\"1\"} nan\nvllm:num_requests_waiting{engine=\"0\"} 1\n",
			func(s *Snapshot) any { return [2]any{s.Running, s.Waiting} }, [2]any{Fact{}, fact(1)}},
		{"a value missing",
			"vllm:num_requests_running{engine=\"0\"}\n",
			func(s *Snapshot) any { return s.Running }, Fact{}},
		{"sum out of range",
			"vllm:prompt_tokens_total{engine=\"0\"} 1.7e308\nvllm:prompt_tokens_total{engine=\"1\"} 1.7e308\n",
			func(s *Snapshot) any { return s.PromptTokens }, Fact{}},
		{"bare counter",
			"vllm:prompt_tokens{engine=\"0\"} 5\n",
			func(s *Snapshot) any { return s.PromptTokens }, fact(5)},
		{"counter in both forms counts once, in any order",
			"vllm:prompt_tokens{engine=\"0\"} 5\nvllm:prompt_tokens_total{engine=\"0\"} 6\n",
			func(s *Snapshot) any { return s.PromptTokens }, fact(6)},
		{"old names alone",
			"vllm:gpu_prefix_cache_hits_total 5\nvllm:gpu_prefix_cache_queries_total 8\n",
			func(s *Snapshot) any { return [2]any{s.PrefixHits, s.PrefixQueries} }, [2]any{fact(5), fact(8)}},
		{"computed tokens from the histogram",
			"vllm:request_prefill_kv_computed_tokens_sum 9\n",
			func(s *Snapshot) any { return s.ComputedPromptTokens }, fact(9)},
		{"capacity from blocks that each row repeats",
			"vllm:cache_config_info{block_size=\"16\",engine=\"0\",num_gpu_blocks=\"200\"} 1\nvllm:cache_config_info{block_size=\"16\",engine=\"1\",num_gpu_blocks=\"200\"} 1\n",
			func(s *Snapshot) any { return s.CapacityTokens }, fact(3200)},
		{"capacity of None falls back to blocks",
			"vllm:cache_config_info{block_size=\"16\",kv_cache_size_tokens=\"None\",num_gpu_blocks=\"200\"} 1\n",
			func(s *Snapshot) any { return s.CapacityTokens }, fact(3200)},
		{"all None",
			"vllm:cache_config_info{block_size=\"None\",enable_prefix_caching=\"None\",kv_cache_size_tokens=\"None\",num_gpu_blocks=\"None\"} 1\n",
			func(s *Snapshot) any { return [3]any{s.CapacityTokens, s.BlockTokens, s.PrefixCaching} },
			[3]any{Fact{}, Fact{}, Fact{}}},
		{"capacity 0 is no capacity",
			"vllm:cache_config_info{block_size=\"16\",kv_cache_size_tokens=\"0\",num_gpu_blocks=\"0\"} 1\n",
			func(s *Snapshot) any { return s.CapacityTokens }, Fact{}},
		{"one rank asleep",
			"vllm:engine_sleep_state{engine=\"0\",sleep_state=\"awake\"} 1\nvllm:engine_sleep_state{engine=\"1\",sleep_state=\"awake\"} 0\n",
			func(s *Snapshot) any { return s.Asleep }, fact(1)},
		{"weights offloaded",
			"vllm:engine_sleep_state{sleep_state=\"weights_offloaded\"} 1\n",
			func(s *Snapshot) any { return s.Asleep }, fact(1)},
		{"Ray without its prefix",
			"vllm_num_requests_running{engine=\"0\"} 2\n",
			func(s *Snapshot) any { return [2]any{s.Engine, s.Running} }, [2]any{Ray, fact(2)}},
		{"Ray with the colon",
			"ray_vllm:num_requests_running{engine=\"0\"} 2\n",
			func(s *Snapshot) any { return [2]any{s.Engine, s.Running} }, [2]any{Ray, fact(2)}},
		{"SGLang behind Ray",
			"ray_sglang_num_running_reqs 2\n",
			func(s *Snapshot) any { return [2]any{s.Engine, s.Running} }, [2]any{SGLang, fact(2)}},
		{"SGLang priorities without a total",
			"sglang:num_queue_reqs{priority=\"1\"} 2\nsglang:num_queue_reqs{priority=\"2\"} 3\n",
			func(s *Snapshot) any { return s.Waiting }, fact(5)},
		{"an engine behind Dynamo speaks for itself",
			"dynamo_component_gpu_cache_usage_percent 0.9\nvllm:kv_cache_usage_perc 0.5\n",
			func(s *Snapshot) any { return [2]any{s.Engine, s.KVUsage} }, [2]any{VLLM, fact(0.5)}},
		{"Dynamo's front end",
			"dynamo_frontend_inflight_requests{model=\"m\"} 3\n",
			func(s *Snapshot) any { return [3]any{s.Engine, s.Running, s.Waiting} }, [3]any{Dynamo, fact(3), Fact{}}},
		{"TensorRT-LLM prefers cached tokens to blocks",
			"trtllm_prompt_tokens_total 100\ntrtllm_prompt_cached_tokens_total 40\ntrtllm_kv_cache_reused_blocks_total 1\ntrtllm_kv_cache_missed_blocks_total 1\n",
			func(s *Snapshot) any { return [2]any{s.PrefixQueries, s.PrefixHits} }, [2]any{fact(100), fact(40)}},
		{"two models on Triton are two caches",
			"nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=\"max\",model=\"a\",version=\"1\"} 10\n" +
				"nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=\"max\",model=\"b\",version=\"1\"} 20\n" +
				"nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=\"tokens_per\",model=\"a\",version=\"1\"} 64\n",
			func(s *Snapshot) any { return [2]any{s.Rows, s.CapacityTokens} }, [2]any{2, fact(1920)}},
		{"llama.cpp of old",
			"llamacpp:kv_cache_usage_ratio 0.4\n",
			func(s *Snapshot) any { return s.KVUsage }, fact(0.4)},
		{"the newest adapters win, in any order",
			"vllm:lora_requests_info{running_lora_adapters=\"new\",waiting_lora_adapters=\"new, other\"} 20\nvllm:lora_requests_info{running_lora_adapters=\"old\",waiting_lora_adapters=\"\"} 10\n",
			func(s *Snapshot) any { return strings.Join(s.Adapters, "|") }, "new|other"},
		{"idle adapters are known",
			"vllm:lora_requests_info{running_lora_adapters=\"\",waiting_lora_adapters=\"\"} 20\n",
			func(s *Snapshot) any { return s.Adapters != nil && len(s.Adapters) == 0 }, true},
		{"rounding above a full cache",
			"vllm:kv_cache_usage_perc 1.0000000001\n",
			func(s *Snapshot) any { return s.KVUsage }, fact(1)},
		{"the lowest shard speaks for its rank",
			"sglang:num_running_reqs{pp_rank=\"1\",tp_rank=\"0\"} 1\nsglang:num_running_reqs{pp_rank=\"0\",tp_rank=\"1\"} 2\nsglang:num_running_reqs{pp_rank=\"0\",tp_rank=\"x\"} 3\n",
			func(s *Snapshot) any { return s.Running }, fact(2)},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			got := scan(t, test.page)
			if v := test.get(&got); !reflect.DeepEqual(v, test.want) {
				t.Errorf("got %+v, want %+v", v, test.want)
			}
		})
	}
}

func TestBounds(t *testing.T) {
	row := func(i int) string { return fmt.Sprintf("vllm:num_requests_running{engine=\"%d\"} 1\n", i) }
	var many strings.Builder
	for i := range maxRanks {
		many.WriteString(row(i))
	}
	if got := scan(t, many.String()); got.Rows != maxRanks || got.Running != fact(maxRanks) {
		t.Errorf("rows %d, running %v", got.Rows, got.Running)
	}
	many.WriteString(row(maxRanks))
	var got Snapshot
	if err := new(Scanner).Scan(strings.NewReader(many.String()), &got); !errors.Is(err, ErrTooManyRanks) {
		t.Errorf("%d ranks: %v", maxRanks+1, err)
	}
	if !reflect.DeepEqual(got, Snapshot{}) {
		t.Errorf("facts left over: %+v", got)
	}

	// A page of exactly the limit is read, one byte more is not.
	page := row(0)
	exact := Scanner{MaxBytes: int64(len(page))}
	if err := exact.Scan(strings.NewReader(page), &got); err != nil || got.Running != fact(1) {
		t.Errorf("exact limit: %v, %v", err, got.Running)
	}
	if err := exact.Scan(strings.NewReader(page+"\n"), &got); !errors.Is(err, ErrTooLarge) {
		t.Errorf("beyond the limit: %v", err)
	}
	if got.Running.Known {
		t.Error("facts left over from a page too large")
	}

	// Lines too long are skipped whole, even when their tail looks like a row.
	for _, n := range []int{maxLine - 1, maxLine, maxLine + 1, 5*maxLine + 3} {
		long := strings.Repeat("x", n)
		if got := scan(t, "vllm:num_requests_running{a=\""+long+"\"} 9\n"+row(0)); got.Running != fact(1) {
			t.Errorf("line of %d bytes: running %v", n, got.Running)
		}
		if got := scan(t, long+row(9)+row(0)); got.Running != fact(1) {
			t.Errorf("tail after %d bytes: running %v", n, got.Running)
		}
	}

	var models strings.Builder
	for i := range 100 {
		fmt.Fprintf(&models, "vllm:num_requests_running{engine=\"0\",model_name=\"m%d\"} 1\n", i)
	}
	if got := scan(t, models.String()); len(got.Models) != maxModels || got.Running != fact(100) {
		t.Errorf("%d models, running %v", len(got.Models), got.Running)
	}
	names := "a,a"
	for i := range 1000 {
		names += fmt.Sprintf(",n%d", i)
	}
	if got := scan(t, `vllm:lora_requests_info{running_lora_adapters="`+names+`"} 1`); len(got.Adapters) != maxNames {
		t.Errorf("%d adapters", len(got.Adapters))
	}
}

func TestScanReadError(t *testing.T) {
	broken := errors.New("broken")
	r := io.MultiReader(strings.NewReader("vllm:num_requests_running 1\n"), iotest.ErrReader(broken))
	var got Snapshot
	if err := new(Scanner).Scan(r, &got); !errors.Is(err, broken) {
		t.Errorf("error %v", err)
	}
	if got.Running.Known || got.Engine != Unknown {
		t.Errorf("facts of half a page: %+v", got)
	}
}

func TestNumber(t *testing.T) {
	for text, want := range map[string]float64{
		"0": 0, "-0": 0, "7": 7, "+7": 7, "1.177279e+06": 1177279, "1E3": 1000, ".5": .5,
		"0.31270112330000000000000000000000000000000000000": 0.3127011233,
	} {
		if v, ok := number([]byte(text)); !ok || v != want {
			t.Errorf("%q: %v, %v", text, v, ok)
		}
	}
	for _, text := range []string{"", "NaN", "+Inf", "-Inf", "inf", "-1", "1e999", "0x10", "1_000", "None", "1 ", "e", "--1"} {
		if v, ok := number([]byte(text)); ok {
			t.Errorf("%q: read as %v", text, v)
		}
	}
}

func TestRestarted(t *testing.T) {
	base := Snapshot{Engine: VLLM, StartTime: fact(100), PromptTokens: fact(50), FirstTokens: fact(5), FirstTokenSeconds: fact(2)}
	with := func(change func(*Snapshot)) *Snapshot {
		s := base
		change(&s)
		return &s
	}
	tests := []struct {
		name string
		next *Snapshot
		want bool
	}{
		{"nothing yet", nil, false},
		{"same", with(func(*Snapshot) {}), false},
		{"counters rise", with(func(s *Snapshot) { s.PromptTokens = fact(60) }), false},
		{"a counter falls", with(func(s *Snapshot) { s.PromptTokens = fact(49) }), true},
		{"later start", with(func(s *Snapshot) { s.StartTime = fact(160) }), true},
		{"earlier start", with(func(s *Snapshot) { s.StartTime = fact(40) }), true},
		{"start jitters", with(func(s *Snapshot) { s.StartTime = fact(101) }), false},
		{"facts missing", &Snapshot{Engine: VLLM}, false},
		{"no engine", &Snapshot{}, false},
		{"other engine", &Snapshot{Engine: SGLang}, true},
		{"a sum of seconds rounds down", with(func(s *Snapshot) { s.FirstTokenSeconds = fact(1.9999999999) }), false},
	}
	for _, test := range tests {
		if got := Restarted(&base, test.next); got != test.want {
			t.Errorf("%s: %v", test.name, got)
		}
	}
	if Restarted(nil, &base) {
		t.Error("restarted from nothing")
	}
}

func TestFactOr(t *testing.T) {
	if v := fact(3).Or(9); v != 3 {
		t.Error(v)
	}
	if v := (Fact{}).Or(9); v != 9 {
		t.Error(v)
	}
	if finite(math.NaN()).Known {
		t.Error("NaN known")
	}
}

func TestEngineString(t *testing.T) {
	seen := map[string]bool{}
	for e := Unknown; e <= Dynamo; e++ {
		if name := e.String(); name == "" || seen[name] {
			t.Errorf("engine %d: name %q", e, name)
		} else {
			seen[name] = true
		}
	}
	if Engine(200).String() != "unknown" {
		t.Error(Engine(200).String())
	}
}
