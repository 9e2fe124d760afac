// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"encoding/json"
	"net"
	"net/http"
	"os"
	"reflect"
	"strings"
	"testing"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/enginesim"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/loopback"
)

const (
	exampleCaddyfile = "../Caddyfile.example"
	exampleJSON      = "../caddy.json.example"
)

func readFile(tb testing.TB, path string) string {
	tb.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		tb.Fatal(err)
	}
	return strings.ReplaceAll(string(b), "\r\n", "\n")
}

func TestExamplesAreTwins(t *testing.T) {
	adapted, complaints, err := command(t, "", "adapt", "--config", exampleCaddyfile, "--adapter", "caddyfile")
	if err != nil {
		t.Fatal(err, complaints)
	}
	if strings.Contains(complaints, `"warn"`) {
		t.Errorf("adapting the example warns: %s", complaints)
	}
	var fromCaddyfile, fromJSON any
	if err := json.Unmarshal([]byte(adapted), &fromCaddyfile); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal([]byte(readFile(t, exampleJSON)), &fromJSON); err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(fromCaddyfile, fromJSON) {
		t.Errorf("%s is not what %s adapts to, which is\n%s", exampleJSON, exampleCaddyfile, adapted)
	}
}

func TestExampleIsFormatted(t *testing.T) {
	formatted, complaints, err := command(t, "", "fmt", exampleCaddyfile)
	if err != nil {
		t.Fatal(err, complaints)
	}
	if formatted != readFile(t, exampleCaddyfile) {
		t.Errorf("%s is not as `caddy fmt` wants it:\n%s", exampleCaddyfile, formatted)
	}
}

func TestExamplesAreValid(t *testing.T) {
	for _, args := range [][]string{
		{"validate", "--config", exampleCaddyfile, "--adapter", "caddyfile"},
		{"validate", "--config", exampleJSON},
	} {
		if _, complaints, err := command(t, "", args...); err != nil {
			t.Errorf("caddy %s: %v\n%s", strings.Join(args, " "), err, complaints)
		}
	}
}

// startExample starts Caddy as the example says, in front of these replicas instead of its own.
func startExample(tb testing.TB, addrs []string) *proxy {
	tb.Helper()
	p := newProxy(tb)
	metrics := loopback.FreeAddr(tb)
	p.page = "http://" + metrics + "/metrics"
	text := readFile(tb, exampleCaddyfile)
	for _, r := range [][2]string{
		{"{\n\t# How long", p.options()[:len(p.options())-1] + "\n\t# How long"},
		{"grace_period 2m", ""}, // it is among the options already
		{":8080 {", "http://" + p.addr + " {"},
		{":9180 {", "http://" + metrics + " {"},
		{"vllm-0:8000 vllm-1:8000 vllm-2:8000", strings.Join(addrs, " ")},
	} {
		if strings.Count(text, r[0]) != 1 {
			tb.Fatalf("%s has %q %d times, want it once", exampleCaddyfile, r[0], strings.Count(text, r[0]))
		}
		text = strings.Replace(text, r[0], r[1], 1)
	}
	p.run(text)
	return p
}

func TestExampleServes(t *testing.T) {
	fleet := engines(t, 3, fast)
	p := startExample(t, fleet.Addrs())
	content := text("the example", 3000)
	first, again := p.say(content), p.say(content)
	if first.replica() != again.replica() || again.cached(t) == 0 {
		t.Errorf("the prompt went to %s and then to %s, where %d tokens were cached", first.replica(), again.replica(), again.cached(t))
	}
	for _, path := range []string{"/metrics", "/health", "/reset_prefix_cache", "/caddy-metrics", "/"} {
		if a := p.post(path, "{}"); a.status != http.StatusNotFound || a.header.Get(enginesim.HeaderAddr) != "" {
			t.Errorf("%s is open to everyone: %d", path, a.status)
		}
	}
	at(t, fleet, first.replica()).Stop()
	p.awaitRefused(first.replica())
	for range 10 {
		if a := p.say(content); a.replica() == first.replica() {
			t.Errorf("an answer came from a replica that is down")
		}
	}
	if p.decided("match") == 0 {
		t.Error("no matches on the page of metrics")
	}
	await(t, "the access log", func() bool { return strings.Count(p.log.String(), `"matched_tokens":`) >= 12 })
	if log := p.log.String(); !strings.Contains(log, `"replica":"`+first.replica()+`"`) || !strings.Contains(log, `"reason":"match"`) {
		t.Error("the access log lacks where requests went, or why")
	}
}

func TestListModules(t *testing.T) {
	out, complaints, err := command(t, "", "list-modules")
	if err != nil {
		t.Fatal(err, complaints)
	}
	for _, id := range []string{
		"http.reverse_proxy.selection_policies.kv_cache_aware",
		"http.reverse_proxy.selection_policies.prefix_hash",
		"kv_cache",
	} {
		if !strings.Contains("\n"+out, "\n"+id+"\n") {
			t.Errorf("list-modules lacks %s", id)
		}
	}
}

// Adapting checks the syntax, says where a mistake is, and does not provision.
func TestAdapt(t *testing.T) {
	tests := []struct{ name, policy, want, mistake string }{
		{"no option", "kv_cache_aware", `"selection_policy":{"policy":"kv_cache_aware"}`, ""},
		{"options", "kv_cache_aware {\nmatch_weight 2\nmetrics_uri /m\n}", `"selection_policy":{"match_weight":2,"metrics":{"uri":"/m"},"policy":"kv_cache_aware"}`, ""},
		{"fallback", "prefix_hash {\nfallback round_robin\n}", `"fallback":{"policy":"round_robin"}`, ""},
		{"unknown option", "kv_cache_aware {\nfoo\n}", "", "unrecognized option 'foo'"},
		{"bad value", "prefix_hash {\nprefix many\n}", "", "prefix is 'many', but must be a positive size"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			out, complaints, err := command(t, ":80 {\n"+reverseProxy([]string{"localhost:1"}, test.policy, "")+"}\n", "adapt", "--config", "-", "--adapter", "caddyfile")
			if test.mistake != "" {
				if err == nil || !strings.Contains(complaints, test.mistake) {
					t.Errorf("err %v, complaints %s", err, complaints)
				}
				return
			}
			if err != nil || !strings.Contains(out, test.want) {
				t.Errorf("err %v, adapted to %s", err, out)
			}
		})
	}
}

// Validating provisions everything and yet does not as much as connect to a replica.
func TestValidateConnectsToNothing(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	hits := make(chan struct{}, 100)
	go func() {
		defer close(hits)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_ = c.Close()
			hits <- struct{}{}
		}
	}()
	p := newProxy(t)
	for _, policy := range []string{"kv_cache_aware {\nmetrics_interval 50ms\n}", "prefix_hash"} {
		config := p.caddyfile(reverseProxy([]string{l.Addr().String()}, policy, ""))
		if _, complaints, err := command(t, config, "validate", "--config", "-", "--adapter", "caddyfile"); err != nil {
			t.Errorf("%s: %v\n%s", policy, err, complaints)
		}
	}
	wrong := p.caddyfile(reverseProxy([]string{l.Addr().String()}, "kv_cache_aware {\nmetrics_uri metrics\n}", ""))
	if _, complaints, err := command(t, wrong, "validate", "--config", "-", "--adapter", "caddyfile"); err == nil || !strings.Contains(complaints, "must begin with a slash") {
		t.Errorf("a wrong metrics_uri: %v\n%s", err, complaints)
	}
	_ = l.Close()
	n := 0
	for range hits {
		n++
	}
	if n > 0 {
		t.Errorf("validating made %d connections to the replica", n)
	}
}
