// SPDX-License-Identifier: Apache-2.0

package command

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/replay"
)

// small is a replay that takes a moment.
var small = []string{"replay", "--chats", "30", "--replicas", "3"}

func TestReplayTable(t *testing.T) {
	out, err := execute(t, "", append(small, "--policy", "least_conn", "--policy", "kv_cache_aware", "--policy", "kv_cache_aware:room=1h,match_weight=2")...)
	if err != nil {
		t.Fatal(err)
	}
	for _, part := range []string{"3 replicas: 30000 blocks of 16 tokens", "hit %", "\nleast_conn ", "\nkv_cache_aware ", "\nkv_cache_aware:room=1h,match_weight=2 "} {
		if !strings.Contains(out, part) {
			t.Errorf("no %q in\n%s", part, out)
		}
	}
	if strings.Contains(out, "±") {
		t.Errorf("a single seed has a spread:\n%s", out)
	}
	out, err = execute(t, "", append(small, "--policy", "least_conn", "--policy", "kv_cache_aware", "--seeds", "2")...)
	if err != nil || !strings.Contains(out, "±") || !strings.Contains(out, "Means over 2 seeds") {
		t.Errorf("two seeds, no spread: %v\n%s", err, out)
	}
}

func TestReplayJSON(t *testing.T) {
	out, err := execute(t, "", append(small, "--json", "--policy", "prefix_hash", "--policy", "oracle")...)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for line := range strings.Lines(out) {
		var r replay.Result
		if err := json.Unmarshal([]byte(line), &r); err != nil {
			t.Fatalf("%v: %s", err, line)
		}
		if r.Mean.Requests < 30 || r.Mean.HitRate <= 0 || r.Mean.HitRate >= 1 || r.Mean.Mean <= 0 {
			t.Errorf("%s: %+v", r.Policy, r.Mean)
		}
		names = append(names, r.Policy)
	}
	if strings.Join(names, " ") != "prefix_hash oracle" {
		t.Errorf("objects for %v", names)
	}
}

// What pages do not tell and who else sends is said beside the table.
func TestReplayFacts(t *testing.T) {
	out, err := execute(t, "", append(small, "--policy", "kv_cache_aware", "--untold", "hits,first_tokens", "--caddys", "3")...)
	if err != nil {
		t.Fatal(err)
	}
	for _, part := range []string{"The replicas' pages do not tell: hits, first_tokens.", "3 Caddys in front of them"} {
		if !strings.Contains(strings.Join(strings.Fields(out), " "), part) {
			t.Errorf("no %q in\n%s", part, out)
		}
	}
}

// Beside chats come a fourth as many long prompts, unless another number is named.
func TestReplayOneOffs(t *testing.T) {
	requests := func(args ...string) int {
		t.Helper()
		out, err := execute(t, "", append(append(small, "--json", "--policy", "least_conn"), args...)...)
		if err != nil {
			t.Fatal(err)
		}
		var r replay.Result
		if err := json.Unmarshal([]byte(out), &r); err != nil {
			t.Fatal(err)
		}
		return r.Mean.Requests
	}
	none := requests("--one-offs", "0")
	if got := requests(); got != none+7 {
		t.Errorf("%d requests by default, %d without one-offs, want 7 more", got, none)
	}
	if got := requests("--one-offs", "12"); got != none+12 {
		t.Errorf("%d requests with 12 one-offs, %d without", got, none)
	}
}

func TestReplayPlot(t *testing.T) {
	file := filepath.Join(t.TempDir(), "plot.svg")
	if out, err := execute(t, "", append(small, "--policy", "least_conn", "--plot", file)...); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	svg, err := os.ReadFile(file)
	if err != nil || !strings.HasPrefix(string(svg), "<svg") {
		t.Errorf("%v, %.40q", err, svg)
	}
}

// What is wrong with a trace is said with its file, line and field.
func TestReplayFaults(t *testing.T) {
	write := func(name, text string) string {
		file := filepath.Join(t.TempDir(), name)
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return file
	}
	good := `{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}` + "\n"
	for _, c := range []struct {
		name string
		args []string
		want []string
	}{
		{"no such file", []string{"nowhere.jsonl"}, []string{"nowhere.jsonl"}},
		{"empty", []string{write("empty.jsonl", "")}, []string{"empty.jsonl"}},
		{"negative length", []string{write("t.jsonl", good+strings.Replace(good, "600", "-600", 1))}, []string{"t.jsonl", "2", "input_length"}},
		{"out of order", []string{write("t.jsonl", strings.Replace(good, `"timestamp": 0`, `"timestamp": 9`, 1)+good)}, []string{"t.jsonl:2", "timestamp", "sort"}},
		{"no JSON", []string{write("t.jsonl", good+"what\n"+good)}, []string{"t.jsonl", "2"}},
		{"policy", []string{"--policy", "best"}, []string{`"best"`, "kv_cache_aware, prefix_hash"}},
		{"setting", []string{"--policy", "kv_cache_aware:rooms=1s"}, []string{"rooms", "room"}},
		{"value", []string{"--policy", "kv_cache_aware:room=much"}, []string{"much", "100ms"}},
		{"replicas", []string{"--replicas", "0"}, []string{"--replicas is 0"}},
		{"rate", []string{"--rate", "0"}, []string{"--rate is 0"}},
		{"prefill rate", []string{"--prefill-rate", "fast"}, []string{"--prefill-rate", "fast"}},
		{"change", []string{"--change", "explode:1@2s"}, []string{"--change", "explode"}},
		{"replica of a change", []string{"--change", "leave:7@2s"}, []string{"7", "0 to 5"}},
		{"copies without sessions", []string{"--copies", "3", write("t.jsonl", good)}, []string{"copies is 3"}},
		{"untold", []string{"--untold", "hits,looks"}, []string{"--untold", `"looks"`, "first_tokens, prefill_times"}},
		{"caddys", []string{"--caddys", "0"}, []string{"--caddys is 0"}},
		{"chats", []string{"--chats", "0"}, []string{"--chats", `"0" is no number from 1 on`}},
		{"turns", []string{"--turns", "many"}, []string{"--turns", `"many" is no number from 1 on`}},
		{"think", []string{"--think", "0s"}, []string{"--think", `"0s" is no duration above 0`}},
		{"chats beside another workload", []string{"--workload", "tools", "--turns", "3"}, []string{"--turns", "workload chats", "tools"}},
		{"chats beside a trace", []string{"--system-tokens", "300", write("t.jsonl", good)}, []string{"--system-tokens", "workload chats", "t.jsonl"}},
		{"one-offs", []string{"--one-offs", "-3"}, []string{"--one-offs", `"-3" is no number of prompts`}},
		{"workload", []string{"--workload", "games"}, []string{`"games"`, "chats, tools, documents"}},
		{"workload beside a trace", []string{"--workload", "tools", write("t.jsonl", good)}, []string{"t.jsonl", "--workload tools", "only one"}},
		{"unwritable report", []string{"--chats", "3", "--policy", "least_conn", "--report", filepath.Join(t.TempDir(), "no", "out.html")}, []string{"out.html"}},
	} {
		_, err := execute(t, "", append([]string{"replay"}, c.args...)...)
		if err == nil {
			t.Errorf("%s: no error", c.name)
			continue
		}
		for _, part := range c.want {
			if !strings.Contains(err.Error(), part) {
				t.Errorf("%s: no %q in %v", c.name, part, err)
			}
		}
	}
}

// A cut last line and blank lines are left out, and the first is told.
func TestReplayOfAnUntidyTrace(t *testing.T) {
	file := filepath.Join(t.TempDir(), "t.jsonl")
	line := `{"timestamp": 2000, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}` + "\n"
	if err := os.WriteFile(file, []byte(line+"\n"+line+line[:30]), 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := execute(t, "", "replay", "--policy", "least_conn", file)
	if err != nil || !strings.Contains(out, "2 requests with") || !strings.Contains(out, "Left out of the trace: 1 ") {
		t.Errorf("%v\n%s", err, out)
	}
}
