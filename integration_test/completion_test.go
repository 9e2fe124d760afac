// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// subcommands are what stands after `caddy kv-cache`.
func subcommands(t *testing.T) []string {
	t.Helper()
	out, complaints, err := command(t, "", "__complete", "kv-cache", "")
	if err != nil {
		t.Fatal(err, complaints)
	}
	var names []string
	for line := range strings.Lines(out) {
		if name, _, found := strings.Cut(line, "\t"); found {
			names = append(names, name)
		}
	}
	if len(names) < 10 {
		t.Fatalf("kv-cache completes to %q", out)
	}
	return names
}

// flags are those of a subcommand, as its help lists them.
func flags(t *testing.T, subcommand string) []string {
	t.Helper()
	out, complaints, err := command(t, "", "__complete", "kv-cache", subcommand, "--")
	if err != nil {
		t.Fatal(err, complaints)
	}
	var names []string
	for line := range strings.Lines(out) {
		if name, _, found := strings.Cut(line, "\t"); found && strings.HasPrefix(name, "--") {
			names = append(names, name)
		}
	}
	if len(names) < 2 {
		t.Fatalf("kv-cache %s -- completes to %q", subcommand, out)
	}
	return names
}

// TestCompletionScripts has each shell that is there read its script, and bash
// complete a command line by it.
func TestCompletionScripts(t *testing.T) {
	for shell, check := range map[string][]string{"bash": {"-n"}, "zsh": {"-n"}, "fish": {"--no-execute"}, "powershell": nil} {
		script, complaints, err := command(t, "", "completion", shell)
		if err != nil || !strings.Contains(script, "__complete") {
			t.Errorf("completion %s: %v %s", shell, err, complaints)
			continue
		}
		file := filepath.Join(t.TempDir(), "caddy."+shell)
		if err := os.WriteFile(file, []byte(script), 0o600); err != nil {
			t.Fatal(err)
		}
		path, err := exec.LookPath(shell)
		if check == nil || err != nil {
			t.Logf("no %s: its script was made and not read", shell)
			continue
		}
		if out, err := exec.CommandContext(t.Context(), path, append(check, file)...).CombinedOutput(); err != nil {
			t.Errorf("%s does not understand its script: %v\n%s", shell, err, out)
		}
		if shell == "bash" {
			completeInBash(t, path, file)
		}
	}
}

// completeInBash completes `caddy kv-cache dr` as bash does when the key is
// pressed.
func completeInBash(t *testing.T, bash, script string) {
	t.Helper()
	const press = `
source "$1"
PATH="$2:$PATH"
_get_comp_words_by_ref() { words=("${COMP_WORDS[@]}"); cword=$COMP_CWORD; cur=${words[cword]}; prev=${words[cword-1]}; }
unset -f _init_completion
COMP_WORDS=(caddy kv-cache dr) COMP_CWORD=2 COMP_LINE='caddy kv-cache dr' COMP_POINT=17 COMP_TYPE=9 COMP_KEY=9
__start_caddy
printf '%s\n' "${COMPREPLY[@]}"
`
	dir := t.TempDir()
	if err := os.Symlink(binary(t), filepath.Join(dir, "caddy")); err != nil {
		t.Skip("no link to the binary:", err)
	}
	cmd := exec.CommandContext(t.Context(), bash, "--norc", "-c", press, "bash", script, dir)
	cmd.Env = environment(dir)
	out, err := cmd.CombinedOutput()
	if err != nil || strings.TrimSpace(string(out)) != "drain" {
		t.Errorf("bash completes to %q, %v", out, err)
	}
}

// TestManPages checks that every command has a page with every flag.
func TestManPages(t *testing.T) {
	dir := t.TempDir()
	if _, complaints, err := command(t, "", "manpage", "--directory", dir); err != nil {
		t.Fatal(err, complaints)
	}
	over := readFile(t, filepath.Join(dir, "caddy-kv-cache.8"))
	for _, name := range subcommands(t) {
		page := strings.ReplaceAll(readFile(t, filepath.Join(dir, "caddy-kv-cache-"+name+".8")), `\-`, "-")
		for _, flag := range flags(t, name) {
			if !strings.Contains(page, flag) {
				t.Errorf("the page of %s lacks %s", name, flag)
			}
		}
		if !strings.Contains(strings.ReplaceAll(over, `\-`, "-"), "caddy-kv-cache-"+name) {
			t.Errorf("the page of kv-cache does not name %s", name)
		}
	}
}
