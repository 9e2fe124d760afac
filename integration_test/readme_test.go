// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"
)

const readme = "../README.md"

var (
	shellBlock   = regexp.MustCompile("(?s)```sh\n(.*?)```")
	indentedLine = regexp.MustCompile(`(?m)^    ((?:caddy|go) .*)$`)
	inlineCode   = regexp.MustCompile("`((?:caddy kv-cache|go|git|xcaddy|integration_test/vllm/run\\.sh) [^`\n]+)`")
	tableRow     = regexp.MustCompile("(?m)^\\| (`[a-z].*?) \\|")
	tableCode    = regexp.MustCompile("`([^`]+)`")
)

// readmeCommands lists what a reader of the README would type, and those of its
// table of commands as `caddy kv-cache …`.
func readmeCommands(t *testing.T) []string {
	t.Helper()
	page := readFile(t, readme)
	var all []string
	for _, m := range shellBlock.FindAllStringSubmatch(page, -1) {
		all = append(all, strings.Split(strings.TrimSpace(m[1]), "\n")...)
	}
	for _, m := range indentedLine.FindAllStringSubmatch(page, -1) {
		all = append(all, m[1])
	}
	_, table, _ := strings.Cut(page, "## Commands\n")
	table, _, _ = strings.Cut(table, "\n## ")
	for _, m := range inlineCode.FindAllStringSubmatch(strings.ReplaceAll(page, table, ""), -1) {
		all = append(all, m[1])
	}
	for _, row := range tableRow.FindAllStringSubmatch(table, -1) {
		for _, m := range tableCode.FindAllStringSubmatch(row[1], -1) {
			all = append(all, "caddy kv-cache "+m[1])
		}
	}
	if len(all) < 15 {
		t.Fatalf("only %q in the README", all)
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// ranBy says which line of .ci/run runs a command: too long for a test, or a test
// itself.
var ranBy = map[string]string{
	"go test -timeout 20m ./...":                                                     `go test -timeout 20m "${packages[@]}"`,
	"xcaddy build --with github.com/seed-2fa47a1e/caddy-kv-cache":                    `go run "$xcaddy" build`,
	"integration_test/vllm/run.sh install":                                           "integration_test/vllm/run.sh install",
	"go test ./integration_test -run VLLM -v":                                        `go test -timeout 20m "${packages[@]}"`,
	"go test ./integration_test -run '^$' -bench AddedLatency":                       "-run '^$' -bench .",
	"git clone https://github.com/seed-2fa47a1e/caddy-kv-cache && cd caddy-kv-cache": "", // TestReadmeDemo
	"go run ./cmd/caddy kv-cache demo":                                               "", // TestReadmeDemo
}

// shortened are arguments that make a command of the README a matter of seconds.
var shortened = map[string][]string{
	"demo":   {"--limit", "20", "--speed", "20", "--policies", "round_robin,kv_cache_aware", "--no-serve", "--listen", "127.0.0.1:0"},
	"replay": {"--limit", "40", "--seeds", "2"},
}

// TestReadmeCommands runs every command of the README, or finds it in .ci/run.
func TestReadmeCommands(t *testing.T) {
	ci := readFile(t, "../.ci/run")
	fleet := engines(t, 2, fast)
	p := start(t, aware(fleet.Addrs(), "name chat", ""))
	p.awaitScrapes(fleet.Addrs()...)
	p.say(text("a prompt", 3000))
	request := filepath.Join(p.dir, "request.json")
	if err := os.WriteFile(request, []byte(ask("a question")), 0o600); err != nil {
		t.Fatal(err)
	}
	place := strings.NewReplacer("REPLICA", fleet.Addrs()[0], "FILE", request,
		"TRACE", "../internal/replay/testdata/conversation.jsonl", "conversation.jsonl", "../internal/replay/testdata/conversation.jsonl")
	for _, line := range readmeCommands(t) {
		if where, listed := ranBy[line]; listed {
			if !strings.Contains(ci, where) {
				t.Errorf("%s: .ci/run has no %q", line, where)
			}
			continue
		}
		words := strings.Fields(place.Replace(line))
		if len(words) < 3 || words[0] != "caddy" || words[1] != "kv-cache" {
			t.Errorf("%s: no test runs this; add it to one, or to ranBy", line)
			continue
		}
		args := append(words[1:], shortened[words[2]]...)
		switch words[2] {
		case "demo", "replay":
		case "top", "simulate":
			runsUntilInterrupted(t, p, args)
			continue
		default:
			args = append(args, "--address", p.admin)
		}
		if out, complaints, err := command(t, "", args...); err != nil || out == "" {
			t.Errorf("%s: %v\n%s%s", line, err, out, complaints)
		}
	}
}

// runsUntilInterrupted checks that a command says something and ends well when it
// is told to.
func runsUntilInterrupted(t *testing.T, p *proxy, args []string) {
	t.Helper()
	if runtime.GOOS == "windows" { // which can't be told
		return
	}
	if args[1] == "top" {
		args = append(args, "--address", p.admin)
	} else {
		args = append(args, "--listen", "127.0.0.1:0")
	}
	ctx, interrupt := context.WithTimeout(t.Context(), patience)
	defer interrupt()
	cmd := exec.CommandContext(ctx, binary(t), args...)
	cmd.Env = environment(p.dir)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = patience
	var said journal
	cmd.Stdout, cmd.Stderr = &said, &said
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	await(t, strings.Join(args, " ")+" to say something", func() bool { return said.String() != "" })
	interrupt()
	if err := cmd.Wait(); err != nil && cmd.ProcessState.ExitCode() > 1 {
		t.Errorf("%q ended with %v:\n%s", args, err, said.String())
	}
}

// TestReadmeDemo does what the README begins with, in a clone of this checkout.
func TestReadmeDemo(t *testing.T) {
	if testing.Short() {
		t.Skip("builds Caddy in a clone")
	}
	if out, err := exec.CommandContext(t.Context(), "git", "-C", "..", "rev-parse", "HEAD").CombinedOutput(); err != nil {
		t.Skipf("SKIPPED: THE FIRST COMMANDS OF THE README ARE NOT RUN: this is no git checkout: %s", out)
	}
	root, err := filepath.Abs("..")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for _, line := range []string{
		"git clone https://github.com/seed-2fa47a1e/caddy-kv-cache && cd caddy-kv-cache",
		"go run ./cmd/caddy kv-cache demo",
	} {
		if !slices.Contains(readmeCommands(t), line) {
			t.Fatalf("the README has no %q", line)
		}
	}
	run := func(in string, args ...string) string {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
		defer cancel()
		cmd := exec.CommandContext(ctx, args[0], args[1:]...)
		cmd.Dir = in
		var out, complaints bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &complaints
		if err := cmd.Run(); err != nil {
			t.Fatalf("%q: %v\n%s%s", args, err, out.String(), complaints.String())
		}
		return out.String()
	}
	run(dir, "git", "clone", "--quiet", "file://"+filepath.ToSlash(root), "caddy-kv-cache")
	out := run(filepath.Join(dir, "caddy-kv-cache"), append([]string{"go", "run", "./cmd/caddy", "kv-cache", "demo"}, shortened["demo"]...)...)
	for _, part := range []string{"policy             hit rate", "round_robin ", "kv_cache_aware "} {
		if !strings.Contains(out, part) {
			t.Errorf("the demo does not print %q:\n%s", part, out)
		}
	}
}
