// SPDX-License-Identifier: Apache-2.0

// Package docs_test keeps the documentation true: the Caddyfiles in it load,
// its links lead somewhere, its JSON and its queries parse.
package docs_test

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	_ "github.com/caddyserver/caddy/v2/modules/standard"

	_ "github.com/seed-2fa47a1e/caddy-kv-cache"
)

// pages are the texts of the documentation by their path from here.
func pages(t *testing.T) map[string]string {
	t.Helper()
	files, err := filepath.Glob("*.md")
	if err != nil {
		t.Fatal(err)
	}
	out := make(map[string]string)
	for _, file := range append(files, "../README.md") {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		out[file] = string(text)
	}
	if len(out) < 7 {
		t.Fatalf("only %d pages", len(out))
	}
	return out
}

// fence is a block of code, and the line it begins at.
type fence struct {
	at   string
	text string
}

// fences lists the blocks of one language.
func fences(t *testing.T, language string) []fence {
	t.Helper()
	var out []fence
	for file, page := range pages(t) {
		var inside *fence
		open := ""
		for n, line := range strings.Split(page, "\n") {
			mark := strings.TrimSpace(line)
			switch {
			case open == "" && strings.HasPrefix(mark, "```"):
				open = strings.TrimPrefix(mark, "```")
				if open == "" {
					open = "text"
				}
				if open == language {
					inside = &fence{at: fmt.Sprintf("%s:%d", file, n+1)}
				}
			case open != "" && mark == "```":
				if inside != nil {
					out = append(out, *inside)
				}
				inside, open = nil, ""
			case inside != nil:
				inside.text += line + "\n"
			}
		}
		if open != "" {
			t.Errorf("%s: a block of %s is not closed", file, open)
		}
	}
	return out
}

// TestCaddyfiles adapts, checks the format of and provisions each Caddyfile. A
// fragment, which has no site, is tried in one.
func TestCaddyfiles(t *testing.T) {
	all := fences(t, "caddyfile")
	if len(all) < 6 {
		t.Errorf("only %d Caddyfiles are in the documentation", len(all))
	}
	for _, f := range all {
		if syntax.MatchString(f.text) {
			continue
		}
		for _, m := range environment.FindAllStringSubmatch(f.text, -1) {
			t.Setenv(m[1], "value")
		}
		if plain := columns.ReplaceAllString(f.text, "$1 "); string(caddyfile.Format([]byte(plain))) != plain {
			t.Errorf("%s: not formatted as `caddy fmt` does, columns aside", f.at)
		}
		config, err := adapt(f.text)
		if err != nil && strings.Contains(err.Error(), "known directive") {
			config, err = adapt(":8080 {\n" + indent(f.text) + "}\n")
		}
		if err != nil {
			t.Errorf("%s: %v", f.at, err)
			continue
		}
		var c caddy.Config
		if err := json.Unmarshal(config, &c); err != nil {
			t.Fatalf("%s: %v", f.at, err)
		}
		if err := caddy.Validate(&c); err != nil {
			t.Errorf("%s: %v", f.at, err)
		}
	}
}

var (
	environment = regexp.MustCompile(`\{env\.(\w+)\}`)
	syntax      = regexp.MustCompile(`<[a-z_]+>`) // shown instead of a Caddyfile
	columns     = regexp.MustCompile(`(\S) {2,}`)
)

func adapt(text string) ([]byte, error) {
	adapter := caddyfile.Adapter{ServerType: httpcaddyfile.ServerType{}}
	config, _, err := adapter.Adapt([]byte(text), nil)
	return config, err
}

func indent(text string) string {
	return "\t" + strings.ReplaceAll(strings.TrimSuffix(text, "\n"), "\n", "\n\t") + "\n"
}

func TestJSON(t *testing.T) {
	for _, f := range fences(t, "json") {
		var v any
		if err := json.Unmarshal([]byte(f.text), &v); err != nil {
			t.Errorf("%s: %v", f.at, err)
		}
	}
}

var (
	link     = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	noAnchor = regexp.MustCompile(`[^\p{L}\p{N} _-]`)
)

// TestLinks follows links to files and sections of this repository.
func TestLinks(t *testing.T) {
	all := pages(t)
	for file, page := range all {
		for _, m := range link.FindAllStringSubmatch(page, -1) {
			target, section, _ := strings.Cut(m[1], "#")
			if strings.Contains(target, "://") || strings.HasPrefix(target, "mailto:") {
				continue
			}
			to := filepath.Join(filepath.Dir(file), target)
			if target == "" {
				to = file
			}
			text, err := os.ReadFile(to)
			if err != nil {
				if info, statErr := os.Stat(to); statErr != nil || !info.IsDir() {
					t.Errorf("%s links to %s: %v", file, m[1], err)
				}
				continue
			}
			if section != "" && !hasSection(string(text), section) {
				t.Errorf("%s links to %s, which has no such section", file, m[1])
			}
		}
	}
}

var picture = regexp.MustCompile(`(?:src|srcset)="([^"]+)"`)

// TestPictures checks that pictures are there, and small enough to look at on the
// way.
func TestPictures(t *testing.T) {
	n := 0
	for file, page := range pages(t) {
		for _, m := range picture.FindAllStringSubmatch(page, -1) {
			n++
			info, err := os.Stat(filepath.Join(filepath.Dir(file), m[1]))
			if err != nil {
				t.Errorf("%s: %v", file, err)
			} else if info.Size() > 200_000 {
				t.Errorf("%s: %s has %d kB", file, m[1], info.Size()/1000)
			}
		}
	}
	if n < 5 {
		t.Errorf("only %d pictures", n)
	}
}

// hasSection tells whether a page has a heading of an anchor, as GitHub makes them.
func hasSection(page, anchor string) bool {
	for line := range strings.Lines(page) {
		if !strings.HasPrefix(line, "#") {
			continue
		}
		title := strings.ToLower(strings.TrimSpace(strings.TrimLeft(line, "#")))
		if strings.ReplaceAll(noAnchor.ReplaceAllString(title, ""), " ", "-") == anchor {
			return true
		}
	}
	return false
}

var query = regexp.MustCompile("`([^`\\n]*caddy_kv_cache_[a-z][^`\\n]*)`")

// TestQueries has promtool read the queries of metrics.md, as alerts.
func TestQueries(t *testing.T) {
	path, err := exec.LookPath("promtool")
	if err != nil {
		t.Skip("SKIPPED: NO QUERY OF THE DOCUMENTATION IS CHECKED BY PROMTOOL: apt-get install -y prometheus")
	}
	found := query.FindAllStringSubmatch(pages(t)["metrics.md"], -1)
	if len(found) < 50 {
		t.Errorf("only %d queries", len(found))
	}
	var rules strings.Builder
	rules.WriteString("groups:\n- name: docs\n  rules:\n")
	for i, m := range found {
		expr, err := json.Marshal(m[1])
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&rules, "  - alert: Query%d\n    expr: %s\n", i, expr)
	}
	file := filepath.Join(t.TempDir(), "docs.yaml")
	if err := os.WriteFile(file, []byte(rules.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.CommandContext(t.Context(), path, "check", "rules", file).CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}
