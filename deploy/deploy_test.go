// SPDX-License-Identifier: Apache-2.0

package deploy_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	_ "github.com/caddyserver/caddy/v2/modules/standard"
	"go.yaml.in/yaml/v3"

	_ "github.com/seed-2fa47a1e/caddy-kv-cache"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/enginesim"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/loopback"
)

// adapted reads a Caddyfile as `caddy adapt` does.
func adapted(t *testing.T, text string) []byte {
	t.Helper()
	config, warnings, err := caddyfile.Adapter{ServerType: httpcaddyfile.ServerType{}}.Adapt([]byte(text), map[string]any{"filename": "Caddyfile"})
	if err != nil {
		t.Fatalf("%v in\n%s", err, text)
	}
	for _, w := range warnings {
		t.Errorf("%s in\n%s", w, text)
	}
	return config
}

// serving is the address of a Caddy that has both policies and has served
// requests of several kinds.
func serving(t *testing.T) string {
	t.Helper()
	var engines []string
	for range 2 {
		e, err := enginesim.StartServer(enginesim.ServerConfig{Speed: 50})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(e.Close)
		engines = append(engines, e.Addr())
	}
	web := "http://" + loopback.FreeAddr(t)
	config := adapted(t, string(caddyfile.Format([]byte(fmt.Sprintf(`{
		admin off
		persist_config off
		log {
			output discard
		}
		storage file_system %s
	}
	%s {
		reverse_proxy /v1/chat/* %s {
			lb_policy kv_cache_aware {
				metrics_interval 50ms
				kv_events tcp://{host}:1
			}
		}
		reverse_proxy /v1/completions %[3]s {
			lb_policy prefix_hash
		}
		metrics /metrics
	}`, t.TempDir(), web, strings.Join(engines, " "))))))
	if err := caddy.Load(config, true); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := caddy.Stop(); err != nil {
			t.Error(err)
		}
	})
	long := strings.Repeat("all of this is the same ", 200)
	for range 3 {
		post(t, web+"/v1/chat/completions", `{"model": "sim", "max_tokens": 2, "messages": [{"role": "user", "content": "`+long+`"}]}`)
		post(t, web+"/v1/completions", `{"model": "sim", "max_tokens": 2, "prompt": "`+long+`"}`)
	}
	return web
}

// scraped are the names of all samples on the metrics page of such a Caddy.
func scraped(t *testing.T) map[string]bool {
	t.Helper()
	web := serving(t)
	end := time.Now().Add(20 * time.Second)
	for {
		names := sampleNames(t, web+"/metrics")
		if names["caddy_kv_cache_engine_prefix_hit_ratio"] {
			return names
		}
		if time.Now().After(end) {
			t.Fatalf("the engines' figures are not there: %v", names)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func post(t *testing.T, url, body string) {
	t.Helper()
	resp, err := http.Post(url, "application/json", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if _, err := io.Copy(io.Discard, resp.Body); err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("status %d, %v", resp.StatusCode, err)
	}
}

func sampleNames(t *testing.T, url string) map[string]bool {
	t.Helper()
	resp, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	names := make(map[string]bool)
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() {
		if name := metricName.FindString(lines.Text()); name != "" && strings.HasPrefix(lines.Text(), name) {
			names[name] = true
		}
	}
	if err := lines.Err(); err != nil {
		t.Fatal(err)
	}
	return names
}

var metricName = regexp.MustCompile(`caddy_kv_cache_[a-z0-9_]+`)

// TestDashboardAndAlertsUseRealMetrics looks for each metric of every panel,
// variable and alert in a live scrape.
func TestDashboardAndAlertsUseRealMetrics(t *testing.T) {
	names := scraped(t)
	for _, file := range []string{"grafana/caddy-kv-cache.json", "prometheus/alerts.yaml"} {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		used := metricName.FindAllString(string(text), -1)
		if len(used) < 10 {
			t.Errorf("%s uses only %v", file, used)
		}
		for _, name := range used {
			if !names[name] {
				t.Errorf("%s uses %s, which is not in a live scrape", file, name)
			}
		}
	}
}

// TestDashboard checks what an import relies on.
func TestDashboard(t *testing.T) {
	text, err := os.ReadFile("grafana/caddy-kv-cache.json")
	if err != nil {
		t.Fatal(err)
	}
	type source struct{ Type, UID string }
	var d struct {
		ID     *int
		UID    string
		Panels []struct {
			ID                       int
			Type, Title, Description string
			Datasource               *source
			GridPos                  struct{ X, Y, W, H int }
			Targets                  []struct {
				Expr, RefID string
				Datasource  *source
			}
		}
		Templating struct{ List []struct{ Name, Type string } }
	}
	if err := json.Unmarshal(text, &d); err != nil {
		t.Fatal(err)
	}
	if d.ID != nil || d.UID == "" {
		t.Error("an importable dashboard has a uid and no id")
	}
	if v := d.Templating.List; len(v) == 0 || v[0].Name != "datasource" || v[0].Type != "datasource" {
		t.Errorf("variables are %v; want the data source first", v)
	}
	seen := make(map[int]bool)
	taken := make(map[[2]int]string)
	for _, p := range d.Panels {
		if seen[p.ID] {
			t.Errorf("%s: panel %d is there twice", p.Title, p.ID)
		}
		seen[p.ID] = true
		for x := range p.GridPos.W {
			for y := range p.GridPos.H {
				at := [2]int{p.GridPos.X + x, p.GridPos.Y + y}
				if other, is := taken[at]; is || at[0] >= 24 {
					t.Errorf("%s lies over %q or beyond the edge", p.Title, other)
				}
				taken[at] = p.Title
			}
		}
		if p.Type == "row" {
			continue
		}
		if p.Description == "" || len(p.Targets) == 0 {
			t.Errorf("%s has no description or no query", p.Title)
		}
		for _, q := range p.Targets {
			if q.Datasource == nil || q.Datasource.UID != "${datasource}" || q.RefID == "" || !metricName.MatchString(q.Expr) {
				t.Errorf("%s: query %+v", p.Title, q)
			}
		}
	}
}

// TestDashboardQueriesParse has promtool read each query of the dashboard, as
// an alert's.
func TestDashboardQueriesParse(t *testing.T) {
	text, err := os.ReadFile("grafana/caddy-kv-cache.json")
	if err != nil {
		t.Fatal(err)
	}
	var d struct {
		Panels []struct {
			Title   string
			Targets []struct{ Expr string }
		}
	}
	if err := json.Unmarshal(text, &d); err != nil {
		t.Fatal(err)
	}
	var rules strings.Builder
	rules.WriteString("groups:\n- name: dashboard\n  rules:\n")
	for _, p := range d.Panels {
		for i, q := range p.Targets {
			expr, err := json.Marshal(strings.ReplaceAll(q.Expr, "$__rate_interval", "1m"))
			if err != nil {
				t.Fatal(err)
			}
			fmt.Fprintf(&rules, "  - alert: %q\n    expr: %s\n", fmt.Sprint(p.Title, " ", i), expr)
		}
	}
	file := filepath.Join(t.TempDir(), "dashboard.yaml")
	if err := os.WriteFile(file, []byte(rules.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	promtool(t, "check", "rules", file)
}

func promtool(t *testing.T, args ...string) {
	t.Helper()
	path, err := exec.LookPath("promtool")
	if err != nil {
		t.Skip("SKIPPED: NO ALERT AND NO DASHBOARD IS CHECKED BY PROMTOOL: apt-get install -y prometheus")
	}
	out, err := exec.CommandContext(t.Context(), path, args...).CombinedOutput()
	if err != nil {
		t.Errorf("promtool %s: %v\n%s", strings.Join(args, " "), err, out)
	}
}

func TestAlerts(t *testing.T) {
	promtool(t, "check", "rules", "prometheus/alerts.yaml")
	promtool(t, "test", "rules", "prometheus/alerts_test.yaml")
	promtool(t, "check", "config", "prometheus/prometheus.yaml")
}

// TestRunbooks checks that each alert points at a section that is there, and
// has a unit test in which it fires and one in which it does not.
func TestRunbooks(t *testing.T) {
	var file struct {
		Groups []struct {
			Rules []struct {
				Alert       string
				Annotations map[string]string
			}
		}
	}
	decode(t, "prometheus/alerts.yaml", &file)
	tests, err := os.ReadFile("prometheus/alerts_test.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range file.Groups[0].Rules {
		page, section, _ := strings.Cut(r.Annotations["runbook"], "#")
		text, err := os.ReadFile(filepath.Join("..", "docs", page))
		if err != nil {
			t.Errorf("%s: %v", r.Alert, err)
			continue
		}
		if !hasSection(string(text), section) {
			t.Errorf("%s: docs/%s has no section #%s", r.Alert, page, section)
		}
		if n := bytes.Count(tests, []byte(r.Alert)); n < 3 {
			t.Errorf("%s is named %d times in its unit tests", r.Alert, n)
		}
	}
}

var noAnchor = regexp.MustCompile(`[^a-z0-9 _-]`)

// hasSection tells whether a page has a heading of an anchor, as GitHub makes them.
func hasSection(page, anchor string) bool {
	for line := range strings.Lines(page) {
		if title, ok := strings.CutPrefix(strings.TrimLeft(line, "#"), " "); ok && strings.HasPrefix(line, "#") {
			made := noAnchor.ReplaceAllString(strings.ToLower(strings.TrimSpace(title)), "")
			if strings.ReplaceAll(made, " ", "-") == anchor {
				return true
			}
		}
	}
	return false
}

func decode(t *testing.T, file string, into any) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := yaml.Unmarshal(text, into); err != nil {
		t.Fatalf("%s: %v", file, err)
	}
}

// TestYAML reads every YAML file, and checks the files that compose mounts.
func TestYAML(t *testing.T) {
	err := filepath.WalkDir(".", func(path string, _ fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(path) != ".yaml" {
			return err
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		documents := yaml.NewDecoder(bytes.NewReader(text))
		for {
			var v any
			if err := documents.Decode(&v); errors.Is(err, io.EOF) {
				return nil
			} else if err != nil {
				return fmt.Errorf("%s: %w", path, err)
			}
		}
	})
	if err != nil {
		t.Error(err)
	}
	var compose struct {
		Services map[string]struct{ Volumes []string }
	}
	decode(t, "compose.yaml", &compose)
	for name, s := range compose.Services {
		for _, v := range s.Volumes {
			from, _, _ := strings.Cut(v, ":")
			if _, err := os.Stat(from); err != nil {
				t.Errorf("compose: %s mounts %v", name, err)
			}
		}
	}
}

// TestCaddyfiles adapts and validates the Caddyfiles of the set-ups.
func TestCaddyfiles(t *testing.T) {
	text, err := os.ReadFile("compose/Caddyfile")
	if err != nil {
		t.Fatal(err)
	}
	configs := map[string]string{"compose": string(text)}
	manifests, err := os.ReadFile("kubernetes/caddy-kv-cache.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var configMap struct{ Data map[string]string }
	if err := yaml.NewDecoder(bytes.NewReader(manifests)).Decode(&configMap); err != nil {
		t.Fatal(err)
	}
	configs["kubernetes"] = configMap.Data["Caddyfile"]
	for name, text := range configs {
		if !strings.Contains(text, "kv_cache_aware") {
			t.Errorf("%s does not use the plugin:\n%s", name, text)
		}
		var c caddy.Config
		if err := json.Unmarshal(adapted(t, text), &c); err != nil {
			t.Fatal(err)
		}
		if err := caddy.Validate(&c); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestMain(m *testing.M) {
	http.DefaultTransport.(*http.Transport).DisableKeepAlives = true
	os.Exit(m.Run())
}
