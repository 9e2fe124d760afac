// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"os"
	"strings"
	"testing"
)

// engineSamples are the pages that stand for each column of the tables in docs/engines.md. What any of them tells, the
// column has.
var engineSamples = map[string][]string{
	"vLLM":                         {"vllm_0.32.txt", "vllm_python.txt"},
	"SGLang `--enable-metrics`":    {"sglang.txt", "sglang_dp2.txt", "sglang_old.txt"},
	"TensorRT-LLM":                 {"trtllm.txt"},
	"Triton TRT-LLM":               {"triton.txt"},
	"llama.cpp `--metrics`":        {"llamacpp.txt", "llamacpp_b11549.txt"},
	"TGI 3":                        {"tgi.txt"},
	"Dynamo, front end or worker":  {"dynamo.txt", "dynamo_frontend.txt"},
	"vLLM, Python front end":       {"vllm_0.32.txt", "vllm_python.txt"},
	"Rust front end":               {"vllm_rust_openmetrics.txt"},
	"behind Ray's metrics agent":   {"ray.txt"},
	"vLLM 0.6 to 0.10, old engine": {"vllm_v0.txt"},
}

// engineRows are the facts behind the rows; the others are not read off the page.
var engineRows = map[string]func(*Snapshot) bool{
	"requests running":                     func(s *Snapshot) bool { return s.Running.Known },
	"requests waiting":                     func(s *Snapshot) bool { return s.Waiting.Known },
	"KV usage":                             func(s *Snapshot) bool { return s.KVUsage.Known },
	"KV capacity":                          func(s *Snapshot) bool { return s.CapacityTokens.Known },
	"block size":                           func(s *Snapshot) bool { return s.BlockTokens.Known },
	"prefix cache on or off":               func(s *Snapshot) bool { return s.PrefixCaching.Known },
	"hits and queries of the prefix cache": func(s *Snapshot) bool { return s.PrefixHits.Known && s.PrefixQueries.Known },
	"prompt tokens computed": func(s *Snapshot) bool {
		return s.ComputedPromptTokens.Known || s.PromptTokens.Known && s.CachedPromptTokens.Known
	},
	"first tokens": func(s *Snapshot) bool { return s.FirstTokens.Known },
	"prefill time": func(s *Snapshot) bool {
		return s.PrefillSeconds.Known || s.FirstTokenSeconds.Known && s.QueueSeconds.Known
	},
	"finished requests": func(s *Snapshot) bool { return s.Finished.Known },
	"preemptions":       func(s *Snapshot) bool { return s.Preemptions.Known },
	"evictions of KV blocks, their age and reuse": func(s *Snapshot) bool { return s.EvictedBlocks.Known },
	"sleeping":             func(s *Snapshot) bool { return s.Asleep.Known },
	"start of the process": func(s *Snapshot) bool { return s.StartTime.Known },
	"models":               func(s *Snapshot) bool { return len(s.Models) > 0 },
	"busy adapters":        func(s *Snapshot) bool { return len(s.Adapters) > 0 },
}

// TestEngineTables holds the tables in docs/engines.md against the sample pages.
func TestEngineTables(t *testing.T) {
	page, err := os.ReadFile("../docs/engines.md")
	if err != nil {
		t.Fatal(err)
	}
	checked := 0
	var columns []string
	for line := range strings.Lines(string(page)) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), " | ")
		for i := range cells {
			cells[i] = strings.TrimSpace(cells[i])
		}
		switch tells := engineRows[cells[0]]; {
		case cells[0] == "the policy wants to know":
			columns = cells[1:]
		case !strings.HasPrefix(line, "|"):
			columns = nil
		case columns == nil || tells == nil:
		default:
			for i, cell := range cells[1:] {
				known := false
				for _, file := range engineSamples[columns[i]] {
					s := scan(t, samplePage(t, file))
					known = known || tells(&s)
				}
				if known != (cell != "–") && !strings.HasPrefix(cell, "where ") {
					t.Errorf("%s of %s: %q, by the sample pages it is known: %t", cells[0], columns[i], cell, known)
				}
				checked++
			}
		}
	}
	if want := len(engineRows)*7 + (len(engineRows)-1)*4; checked != want {
		t.Errorf("%d cells checked, want %d", checked, want)
	}
}
