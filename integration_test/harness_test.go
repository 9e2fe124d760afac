// SPDX-License-Identifier: Apache-2.0

// Package integration starts the Caddy binary with the plugin in front of
// simulated and real engines and checks over HTTP what its users see.
package integration

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"go.uber.org/goleak"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/loopback"
)

// patience bounds every wait for something that must happen; nothing is measured by it.
const patience = 60 * time.Second

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.Cleanup(func(status int) {
		if built.dir != "" {
			_ = os.RemoveAll(built.dir)
		}
		os.Exit(status)
	}))
}

// built is the binary made by this test run.
var built struct {
	sync.Once
	dir, path string
	err       error
}

// binary returns the path of the Caddy to test: $CADDY_KV_CACHE_BIN, or else cmd/caddy as it is now.
func binary(tb testing.TB) string {
	tb.Helper()
	if path := os.Getenv("CADDY_KV_CACHE_BIN"); path != "" {
		return path
	}
	built.Do(func() {
		if built.dir, built.err = os.MkdirTemp("", "caddy-kv-cache-"); built.err != nil {
			return
		}
		built.path = filepath.Join(built.dir, "caddy")
		if runtime.GOOS == "windows" {
			built.path += ".exe"
		}
		cmd := exec.Command("go", "build", "-tags", "nobadger,nomysql,nopgx", "-o", built.path, "../cmd/caddy")
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			built.err = fmt.Errorf("go build ../cmd/caddy: %w\n%s", err, out)
		}
	})
	if built.err != nil {
		tb.Fatal(built.err)
	}
	return built.path
}

// command runs a Caddy command to its end and returns what it wrote.
func command(tb testing.TB, stdin string, args ...string) (stdout, stderr string, err error) {
	tb.Helper()
	ctx, cancel := context.WithTimeout(tb.Context(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, binary(tb), args...)
	dir := tb.TempDir()
	cmd.Env = environment(dir)
	cmd.Stdin = strings.NewReader(stdin)
	var out, complaints bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &complaints
	err = cmd.Run()
	return out.String(), complaints.String(), err
}

// environment keeps a Caddy from reading and writing the files of the user.
func environment(dir string) []string {
	return append(os.Environ(), "HOME="+dir, "XDG_DATA_HOME="+dir, "XDG_CONFIG_HOME="+dir)
}

// proxy is a running Caddy.
type proxy struct {
	tb     testing.TB
	addr   string // of the site under test
	admin  string
	dir    string
	log    journal
	cmd    *exec.Cmd
	exited chan struct{}
	client *http.Client
	config int      // number of the latest configuration, which its answers have in X-Config
	level  string   // of the log
	page   string   // URL of its metrics
	extra  string   // another site
	env    []string // further variables of the process
	files  int      // that it may have open; 0 for as many as the system allows
	ended  sync.Once
}

// start runs Caddy with one site of the given directives until the test ends. Its page of metrics is
// at /caddy-metrics.
func start(tb testing.TB, directives string) *proxy {
	tb.Helper()
	p := newProxy(tb)
	p.run(p.caddyfile(directives))
	return p
}

func newProxy(tb testing.TB) *proxy {
	tb.Helper()
	p := &proxy{
		tb: tb, addr: loopback.FreeAddr(tb), admin: loopback.FreeAddr(tb), dir: tb.TempDir(),
		exited: make(chan struct{}), client: newClient(tb), level: "DEBUG",
	}
	p.page = "http://" + p.addr + "/caddy-metrics"
	return p
}

// caddyfile is the configuration of a site.
func (p *proxy) caddyfile(directives string) string {
	_, port, _ := net.SplitHostPort(p.addr) // of an address of the loopback interface
	p.config++
	return fmt.Sprintf(`%s
:%s {
	bind 127.0.0.1
	header X-Config %d
	respond /caddy-ready 200
	metrics /caddy-metrics
	%s
}
%s`, p.options(), port, p.config, directives, p.extra)
}

// options are the global options of a Caddy that leaves others alone.
func (p *proxy) options() string {
	return fmt.Sprintf(`{
	admin %s
	persist_config off
	auto_https off
	grace_period 5s
	storage file_system %q
	log {
		level %s
	}
	servers {
		protocols h1 h2 h2c h3
	}
}`, p.admin, filepath.ToSlash(p.dir), p.level)
}

// run starts the process with a configuration and waits until it serves it.
func (p *proxy) run(config string) {
	p.tb.Helper()
	file := filepath.Join(p.dir, "Caddyfile")
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		p.tb.Fatal(err)
	}
	p.cmd = exec.Command(binary(p.tb), "run", "--config", file, "--adapter", "caddyfile")
	if p.files > 0 {
		p.cmd = exec.Command("sh", append([]string{"-c", fmt.Sprintf(`ulimit -n %d && exec "$0" "$@"`, p.files)}, p.cmd.Args...)...)
	}
	p.cmd.Env = append(environment(p.dir), p.env...)
	p.cmd.Stdout, p.cmd.Stderr = &p.log, &p.log
	if err := p.cmd.Start(); err != nil {
		p.tb.Fatal(err)
	}
	go func() {
		_ = p.cmd.Wait() // stop looks at the state
		close(p.exited)
	}()
	p.tb.Cleanup(p.stop)
	await(p.tb, "Caddy to serve", func() bool {
		select {
		case <-p.exited:
			p.tb.Fatalf("Caddy ended at once:\n%s", p.log.String())
		default:
		}
		status, config := p.ask(http.MethodGet, "/config/", "", nil)
		return status == http.StatusOK && strings.HasPrefix(config, "{")
	})
}

// stop ends the process as `caddy stop` does, and checks that it went well until the last moment.
func (p *proxy) stop() { p.ended.Do(p.end) }

func (p *proxy) end() {
	select {
	case <-p.exited:
		p.tb.Errorf("Caddy ended by itself: %v", p.cmd.ProcessState)
	default:
		if status, answer := p.ask(http.MethodPost, "/stop", "", nil); status != http.StatusOK {
			p.tb.Errorf("stopping Caddy: %d %s", status, answer)
		}
	}
	select {
	case <-p.exited:
	case <-time.After(patience):
		p.tb.Error("Caddy does not end when told to")
		_ = p.cmd.Process.Kill()
		<-p.exited
	}
	text := p.log.String()
	if status := p.cmd.ProcessState.ExitCode(); status != 0 {
		p.tb.Errorf("Caddy exited with status %d", status)
	}
	if at := misfortune.FindStringIndex(text); at != nil {
		p.tb.Errorf("Caddy's log has %q:\n%s", text[at[0]:at[1]], text[max(0, at[0]-2000):min(len(text), at[1]+4000)])
	}
	if p.tb.Failed() {
		p.tb.Logf("the end of Caddy's log:\n%s", text[max(0, len(text)-6000):])
	}
}

// misfortune is what no log may have.
var misfortune = regexp.MustCompile(`(?i)\bpanic|DATA RACE|fatal error:|nil pointer`)

// ask sends a request to the admin API.
func (p *proxy) ask(method, path, body string, header http.Header) (status int, answer string) {
	p.tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience) // it is used after the test's own has ended
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, method, "http://"+p.admin+path, strings.NewReader(body))
	if err != nil {
		p.tb.Fatal(err)
	}
	for field, values := range header {
		r.Header[field] = values
	}
	r.Close = true
	resp, err := p.client.Do(r)
	if err != nil {
		return 0, err.Error()
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return resp.StatusCode, err.Error()
	}
	return resp.StatusCode, string(text)
}

// load replaces the configuration, even by the same, and returns the status and the complaint.
func (p *proxy) load(config string) (int, string) {
	p.tb.Helper()
	return p.ask(http.MethodPost, "/load", config, http.Header{
		"Content-Type":  {"text/caddyfile"},
		"Cache-Control": {"must-revalidate"},
	})
}

// reload replaces the directives of the site, and returns when the old listener is gone: with whatever
// policy, a reload cuts idle connections and those that the old listener has not accepted yet.
func (p *proxy) reload(directives string) {
	p.tb.Helper()
	if status, answer := p.load(p.caddyfile(directives)); status != http.StatusOK {
		p.tb.Fatalf("reload: %d %s", status, answer)
	}
	await(p.tb, "the new configuration alone to serve", func() bool {
		for range 20 { // the system spreads new connections over both listeners
			p.client.CloseIdleConnections()
			a := exchange(p.client, p.request(http.MethodGet, "/caddy-ready", nil))
			if a.bad() != nil || a.header.Get("X-Config") != strconv.Itoa(p.config) {
				return false
			}
		}
		return true
	})
}

func (p *proxy) metricsPage() answer {
	r, err := http.NewRequestWithContext(p.tb.Context(), http.MethodGet, p.page, nil)
	if err != nil {
		return answer{err: err}
	}
	return exchange(p.client, r)
}

// families reads Caddy's page of metrics.
func (p *proxy) families() map[string]*dto.MetricFamily {
	p.tb.Helper()
	page := p.metricsPage()
	if err := page.bad(); err != nil {
		p.tb.Fatalf("Caddy's page of metrics: %v", err)
	}
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(bytes.NewReader(page.body))
	if err != nil {
		p.tb.Fatalf("Caddy's page of metrics: %v\n%.300q", err, page.body)
	}
	return families
}

// metric sums the values of a family of Caddy's metrics over all label sets that include those given,
// as name, value, name, value. A histogram counts its observations. It is 0 if there are none.
func (p *proxy) metric(name string, labels ...string) float64 {
	p.tb.Helper()
	sum := 0.0
next:
	for _, m := range p.families()[name].GetMetric() {
		has := make(map[string]string)
		for _, l := range m.GetLabel() {
			has[l.GetName()] = l.GetValue()
		}
		for i := 0; i < len(labels); i += 2 {
			if has[labels[i]] != labels[i+1] {
				continue next
			}
		}
		sum += m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
	}
	return sum
}

// labels lists the values that a label has in any of this plugin's metrics.
func (p *proxy) labels(name string) map[string]bool {
	p.tb.Helper()
	values := make(map[string]bool)
	for family, f := range p.families() {
		if !strings.HasPrefix(family, "caddy_kv_cache_") {
			continue
		}
		for _, m := range f.GetMetric() {
			for _, l := range m.GetLabel() {
				if l.GetName() == name {
					values[l.GetValue()] = true
				}
			}
		}
	}
	return values
}

// decided counts the decisions with a reason.
func (p *proxy) decided(reason string) float64 {
	p.tb.Helper()
	return p.metric("caddy_kv_cache_decisions_total", "reason", reason)
}

// awaitScrapes waits until each of the replicas was scraped anew, twice: the first may have begun
// before the call.
func (p *proxy) awaitScrapes(replicas ...string) {
	p.tb.Helper()
	for _, addr := range replicas {
		before := p.metric("caddy_kv_cache_scrapes_total", "replica", addr)
		await(p.tb, "two scrapes of "+addr, func() bool {
			return p.metric("caddy_kv_cache_scrapes_total", "replica", addr) >= before+2
		})
	}
}

// awaitRefused waits until it is known that a replica refuses connections. Before that, a request may meet
// a connection to it that is just breaking, which no policy can help.
func (p *proxy) awaitRefused(addr string) {
	p.tb.Helper()
	await(p.tb, "the death of "+addr+" to be known", func() bool {
		return p.metric("caddy_kv_cache_replica_eligible", "replica", addr) == 0
	})
}

// awaitIdle waits until the ledger is empty to the last token, and nobody waits.
func (p *proxy) awaitIdle() {
	p.tb.Helper()
	for _, name := range []string{
		"caddy_kv_cache_replica_in_flight_requests", "caddy_kv_cache_replica_queued_tokens", "caddy_kv_cache_waiting_requests",
	} {
		if len(p.families()[name].GetMetric()) == 0 {
			p.tb.Errorf("Caddy does not tell %s", name)
		}
		await(p.tb, name+" to be 0", func() bool { return p.metric(name) == 0 })
	}
}

// memory returns the peak of the process's resident memory in bytes, false where it can't be told.
func (p *proxy) memory() (peak int64, ok bool) {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
	if err != nil {
		return 0, false
	}
	for line := range strings.Lines(string(status)) {
		if rest, found := strings.CutPrefix(line, "VmHWM:"); found {
			kib, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 64)
			return kib << 10, err == nil
		}
	}
	return 0, false
}

// journal collects what a process writes.
type journal struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (j *journal) Write(p []byte) (int, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.buf.Write(p)
}

func (j *journal) String() string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.buf.String()
}

// await waits for a condition that others bring about.
func await(tb testing.TB, what string, is func() bool) {
	tb.Helper()
	pause := time.Millisecond
	for end := time.Now().Add(patience); !is(); time.Sleep(pause) {
		if time.Now().After(end) {
			tb.Fatalf("waited in vain for %s", what)
		}
		pause = min(2*pause, 20*time.Millisecond)
	}
}

// newClient returns a client whose connections end with the test.
func newClient(tb testing.TB) *http.Client {
	transport := &http.Transport{MaxIdleConnsPerHost: 256, IdleConnTimeout: patience, DisableCompression: true}
	tb.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport, Timeout: 5 * time.Minute}
}

// answer is what came back for a request, read to its end.
type answer struct {
	status int
	header http.Header
	body   []byte
	err    error // the connection's
}

// Fields that the configurations of these tests add to each answer.
const (
	replicaField = "X-Replica"
	reasonField  = "X-Reason"
	matchedField = "X-Matched-Tokens"
)

// tell makes a reverse_proxy say in its answers what was decided.
const tell = `
	header_down X-Replica {http.reverse_proxy.kv_cache.replica}
	header_down X-Reason {http.reverse_proxy.kv_cache.reason}
	header_down X-Matched-Tokens {http.reverse_proxy.kv_cache.matched_tokens}
`

func (a answer) replica() string { return a.header.Get(replicaField) }
func (a answer) reason() string  { return a.header.Get(reasonField) }

// matched is the predicted hit in tokens.
func (a answer) matched(tb testing.TB) int {
	tb.Helper()
	n, err := strconv.Atoi(a.header.Get(matchedField))
	if err != nil {
		tb.Fatalf("%s of the answer: %v", matchedField, err)
	}
	return n
}

// exchange sends a request and reads the answer.
func exchange(c *http.Client, r *http.Request) answer {
	resp, err := c.Do(r)
	if err != nil {
		return answer{err: err}
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	return answer{resp.StatusCode, resp.Header, body, err}
}

func (p *proxy) request(method, path string, body io.Reader) *http.Request {
	p.tb.Helper()
	r, err := http.NewRequestWithContext(p.tb.Context(), method, "http://"+p.addr+path, body)
	if err != nil {
		p.tb.Fatal(err)
	}
	if body != nil {
		r.Header.Set("Content-Type", "application/json")
	}
	return r
}

// post sends a request with a body and reads the answer, whatever it is. It may be called from any
// goroutine.
func (p *proxy) post(path, body string) answer {
	r, err := http.NewRequestWithContext(p.tb.Context(), http.MethodPost, "http://"+p.addr+path, strings.NewReader(body))
	if err != nil {
		return answer{err: err}
	}
	r.Header.Set("Content-Type", "application/json")
	return exchange(p.client, r)
}

// must posts and fails the test unless the answer is 200.
func (p *proxy) must(path, body string) answer {
	p.tb.Helper()
	a := p.post(path, body)
	if err := a.bad(); err != nil {
		p.tb.Fatal(err)
	}
	return a
}

// bad says why an answer is not what a client hopes for.
func (a answer) bad() error {
	switch {
	case a.err != nil:
		return a.err
	case a.status != http.StatusOK:
		return fmt.Errorf("status %d: %.300s", a.status, a.body)
	case a.header == nil:
		return errors.New("no header")
	}
	return nil
}

// setBody gives a request a body of known length.
func setBody(r *http.Request, body string) {
	r.Body = io.NopCloser(strings.NewReader(body))
	r.ContentLength = int64(len(body))
	r.Header.Set("Content-Type", "application/json")
}
