// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"
)

// transcript is a command that a page of the documentation shows, and what it
// says that the command answers.
type transcript struct {
	command string
	answer  []string
}

// transcripts lists the commands in a page's blocks of console.
func transcripts(t *testing.T, page string) []transcript {
	t.Helper()
	var all []transcript
	inside := false
	for line := range strings.Lines(readFile(t, page)) {
		line = strings.TrimRight(line, " \n")
		switch {
		case strings.HasPrefix(line, "```"):
			inside = line == "```console"
		case !inside:
		case strings.HasPrefix(line, "$ "):
			all = append(all, transcript{command: strings.TrimPrefix(line, "$ ")})
		case line != "" && len(all) > 0:
			last := &all[len(all)-1]
			last.answer = append(last.answer, line)
		}
	}
	return all
}

// figure is a word that differs from run to run.
var figure = regexp.MustCompile(`[0-9]|^-$`)

// alike tells whether two lines have the same words but for figures and
// addresses.
func alike(a, b string) bool {
	return slices.EqualFunc(strings.Fields(a), strings.Fields(b), func(a, b string) bool {
		return a == b || figure.MatchString(a) && figure.MatchString(b)
	})
}

// TestOperationsGuide runs the commands of docs/operations.md in their order, on a
// fleet such as is told of there, and compares what they answer with what the page
// says, figures and addresses aside.
func TestOperationsGuide(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("the page shows how Linux words a refused connection")
	}
	fleet := engines(t, 4, fast)
	p := start(t, aware(fleet.Addrs(), "name chat", ""))
	say := func(contract, question string) answer {
		return p.talk(message{"system", text(contract, 20_000)}, message{"user", text(question, 2000)})
	}
	p.awaitScrapes(fleet.Addrs()...)
	for _, contract := range []string{"first", "second", "third", "fourth"} {
		say(contract, "one")
		say(contract, "two")
	}
	stopped := fleet.Addrs()[3]
	if home := say("fifth", "one").replica(); home == stopped {
		stopped = fleet.Addrs()[0]
	}
	at(t, fleet, stopped).Stop()
	p.awaitRefused(stopped)
	say("last", "one") // where fewest are, so not with the others
	say("last", "two")
	home := say("last", "three").replica()
	addrs := slices.DeleteFunc(fleet.Addrs(), func(a string) bool { return a == stopped || a == home })
	names := strings.NewReplacer("vllm-0:8000", addrs[0], "vllm-1:8000", home, "vllm-2:8000", addrs[1], "vllm-3:8000", stopped)

	request := filepath.Join(p.dir, "request.json")
	body := chat(message{"system", text("last", 20_000)}, message{"user", text("three", 2000)})
	if err := os.WriteFile(request, []byte(body), 0o600); err != nil {
		t.Fatal(err)
	}

	all := transcripts(t, "../docs/operations.md")
	if len(all) < 6 {
		t.Fatalf("only %d commands", len(all))
	}
	for _, shown := range all {
		words := strings.Fields(names.Replace(strings.ReplaceAll(shown.command, "request.json", request)))
		if words[0] != "caddy" {
			t.Errorf("%s: not a command of Caddy", shown.command)
			continue
		}
		out, complaints, err := command(t, "", append(words[1:], "--address", p.admin)...)
		if err != nil {
			t.Errorf("%s: %v\n%s", shown.command, err, complaints)
			continue
		}
		lines := strings.Split(out, "\n")
		for _, line := range shown.answer {
			if !slices.ContainsFunc(lines, func(l string) bool { return alike(l, line) }) {
				t.Errorf("%s does not answer\n%s\nbut\n%s", shown.command, line, out)
			}
		}
	}
}

func TestAlike(t *testing.T) {
	for _, c := range []struct {
		a, b string
		want bool
	}{
		{"vllm-0:8000  eligible  12 0 43%", "127.0.0.1:9 eligible 1 - 4%", true},
		{"vllm-0:8000 eligible", "vllm-0:8000 drained", false},
		{"a 1 b", "a 1", false},
		{"hit rate 7%", "hit rate unknown", false},
	} {
		if got := alike(c.a, c.b); got != c.want {
			t.Errorf("alike(%q, %q) = %v", c.a, c.b, got)
		}
	}
}
