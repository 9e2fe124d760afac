// SPDX-License-Identifier: Apache-2.0

package command

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"go.uber.org/goleak"

	_ "github.com/caddyserver/caddy/v2/modules/standard"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/demo"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/load"
)

var update = flag.Bool("update", false, "write the golden files anew")

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m,
		// Caddy's certificate cache has one for the life of the process.
		goleak.IgnoreAnyFunction("github.com/caddyserver/certmagic.(*Cache).maintainAssets"),
	)
}

// golden compares with a file in testdata.
func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s differs (-update writes it anew); got:\n%s", path, got)
	}
	for line := range strings.Lines(got) {
		if n := len([]rune(strings.TrimSuffix(line, "\n"))); n > width {
			t.Errorf("%d characters in a line: %s", n, line)
		}
	}
}

func outcome(policy string, hit, mean, spread float64) demo.Outcome {
	return demo.Outcome{Policy: policy, OneCacheHitRate: 0.95, Result: load.Result{
		Requests: 100, Measured: 100, Succeeded: 100, CachedReported: 100,
		HitRate: hit, UncachedSpread: spread,
		TTFT: load.Distribution{Mean: mean, P50: mean / 2, P90: 3 * mean, P99: 40 * mean},
	}}
}

func TestTable(t *testing.T) {
	late := outcome("least_conn", 0.1234, 4, 1.5)
	late.Lag.P90 = 1.25
	failed := outcome("header X-Session-ID and more", 0, 11, 4)
	failed.OneCacheHitRate, late.OneCacheHitRate = 0, 0 // as with real servers
	failed.CachedReported, failed.Succeeded, failed.HeldRequests = 0, 96, 7
	failed.Failures = map[string]int{"timeout": 1, "status_503": 2, "connect": 1}
	for _, c := range []struct {
		name     string
		outcomes []demo.Outcome
	}{
		{"table.txt", []demo.Outcome{outcome("round_robin", 0.5, 0.4, 1.06), outcome("prefix_hash", 0.85, 0.21, 1.2), outcome("kv_cache_aware", 0.9, 0.1, 1.15)}},
		{"table_doubtful.txt", []demo.Outcome{late, failed}},
		{"table_single.txt", []demo.Outcome{outcome("kv_cache_aware", 0.9, 0, 1)}},
	} {
		var out bytes.Buffer
		newPrinter(&out).table(c.outcomes)
		golden(t, c.name, out.String())
	}
}

// run is the command as typed.
func run(ctx context.Context, args ...string) (out, status string, err error) {
	var o, s bytes.Buffer
	cmd := newDemo()
	cmd.SetOut(&o)
	cmd.SetErr(&s)
	cmd.SetArgs(args)
	cmd.SilenceUsage = true
	err = cmd.ExecuteContext(ctx)
	return o.String(), s.String(), err
}

var quick = []string{"--replicas", "2", "--speed", "40", "--limit", "8", "--sessions", "8", "--listen", "127.0.0.1:0"}

func TestObjects(t *testing.T) {
	out, status, err := run(t.Context(), append(quick, "--json", "--policies", "round_robin,prefix_hash", "--option", "prefix_hash=slack 5000")...)
	if err != nil || status != "" {
		t.Fatal(err, status)
	}
	var got []demo.Outcome
	for line := range strings.Lines(out) {
		var o demo.Outcome
		d := json.NewDecoder(strings.NewReader(line))
		d.DisallowUnknownFields()
		if err := d.Decode(&o); err != nil {
			t.Fatalf("%v: %s", err, line)
		}
		got = append(got, o)
	}
	if len(got) != 2 || got[0].Policy != "round_robin" || got[1].Policy != "prefix_hash" || got[1].Options != "slack 5000" {
		t.Fatalf("got %+v", got)
	}
	for _, o := range got {
		if o.Requests < 8 || o.TTFT.Mean <= 0 || o.Speed != 40 {
			t.Errorf("%s: %d requests, mean TTFT %v, speed %v", o.Policy, o.Requests, o.TTFT.Mean, o.Speed)
		}
	}
}

func TestTableThenEnd(t *testing.T) {
	out, status, err := run(t.Context(), append(quick, "--no-serve", "--policies", "least_conn")...)
	if err != nil || status != "" {
		t.Fatal(err, status)
	}
	for _, want := range []string{"2 simulated replicas", "Caddy takes requests at http://127.0.0.1:", "least_conn", "hit rate"} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in:\n%s", want, out)
		}
	}
	if strings.ContainsAny(out+status, "\x1b\r") {
		t.Error("control characters where there is no terminal")
	}
}

// signalling ends a context when text has been written.
type signalling struct {
	bytes.Buffer
	text string
	end  func()
}

func (s *signalling) Write(p []byte) (int, error) {
	n, err := s.Buffer.Write(p)
	if strings.Contains(s.String(), s.text) {
		s.end()
	}
	return n, err
}

func TestInterrupt(t *testing.T) {
	for _, c := range []struct {
		name, when string
		canceled   bool
	}{
		{"while it plays", "Caddy takes requests", true},
		{"while it serves", "Press Ctrl-C", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			f := &demoFlags{policies: []string{"round_robin"}}
			f.Config = demo.Config{Replicas: 2, Speed: 40, Limit: 8, Sessions: 8, Listen: "127.0.0.1:0"}
			err := f.play(ctx, &signalling{text: c.when, end: cancel}, io.Discard)
			if errors.Is(err, context.Canceled) != c.canceled || !c.canceled && err != nil {
				t.Errorf("error is %v", err)
			}
			if errors.Is(ctx.Err(), context.DeadlineExceeded) {
				t.Errorf("%q was never written", c.when)
			}
		})
	}
}

// What was played before an interruption is shown.
func TestInterruptedBetweenPolicies(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	f := &demoFlags{policies: []string{"round_robin", "least_conn"}}
	f.Config = demo.Config{Replicas: 2, Speed: 40, Limit: 8, Sessions: 8, Listen: "127.0.0.1:0"}
	var out bytes.Buffer
	err := f.play(ctx, &out, &signalling{text: "round_robin: played in", end: cancel})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("error is %v", err)
	}
	if table := out.String(); !strings.Contains(table, "TTFT mean") || !strings.Contains(table, "round_robin  ") || strings.Contains(table, "least_conn  ") {
		t.Errorf("the table is not that of the one policy played:\n%s", table)
	}
}

func TestFaultyCommandLines(t *testing.T) {
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"--policies", "round_robin,fastest"}, `unknown policy "fastest"`},
		{[]string{"--policies", "prefix_hash", "--option", "prefix_hash=load_factor 0.5"}, "load_factor is 0.5"},
		{[]string{"--option", "slack 5"}, "not of the form policy=text"},
		{[]string{"--trace", "no-such-trace"}, "no-such-trace"},
		{[]string{"--replicas", "many"}, `invalid argument "many"`},
		{[]string{"--replicas", "-1"}, "replicas is -1"},
		{[]string{"--listen", "127.0.0.1:99999"}, "cannot listen on 127.0.0.1:99999"},
		{[]string{"--upstream", "127.0.0.1:1", "--speed", "3"}, "[speed upstream]"},
		{[]string{"--upstream", "127.0.0.1:1"}, "upstream 127.0.0.1:1: "},
		{[]string{"--chats", "-1"}, `"-1" is no number from 1 on`},
		{[]string{"--ramp", "-1s"}, `"-1s" is no duration above 0`},
		{[]string{"--trace", "no-such-trace", "--turns", "3"}, "--turns says what the workload chats is like, but no-such-trace"},
		{[]string{"--workload", "tools", "--ramp", "1s"}, "--ramp says what the workload chats is like, but tools"},
		{[]string{"--workload", "tools", "--one-offs", "3"}, "--one-offs says what the workload chats is like, but tools"},
		{[]string{"--no-such-flag"}, "unknown flag"},
		{[]string{"surplus"}, "unknown command"},
	} {
		if _, _, err := run(t.Context(), c.args...); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v: error is %v, want %q in it", c.args, err, c.want)
		}
	}
}

func TestCompletePolicies(t *testing.T) {
	for _, c := range []struct {
		typed string
		want  []string
	}{
		{"round", []string{"round_robin"}},
		{"least_conn,rand", []string{"least_conn,random", "least_conn,random_choose"}},
		{"least_conn,prefix_hash,k", []string{"least_conn,prefix_hash,kv_cache_aware"}},
		{"no_such", nil},
	} {
		names, directive := completePolicies(nil, nil, c.typed)
		if !slices.Equal(names, c.want) || directive&cobra.ShellCompDirectiveNoFileComp == 0 {
			t.Errorf("%q: got %v, %v; want %v", c.typed, names, directive, c.want)
		}
	}
}
