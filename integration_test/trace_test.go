// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"encoding/json"
	"net/http"
	"regexp"
	"strings"
	"testing"
)

// TestTrace follows one request that belongs to a trace through all that tells of
// it: Caddy's span, the metrics' exemplars, the recent decisions and the debug log.
func TestTrace(t *testing.T) {
	t.Setenv("OTEL_TRACES_EXPORTER", "console")
	t.Setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
	t.Setenv("OTEL_METRICS_EXPORTER", "none")
	t.Setenv("OTEL_LOGS_EXPORTER", "none")
	const id = "4bf92f3577b34da6a3ce929d0e0e4736"
	fleet := engines(t, 2, fast)
	p := start(t, "tracing\n"+aware(fleet.Addrs(), "name chat", ""))
	p.awaitScrapes(fleet.Addrs()...)
	p.say(text("a traced prompt", 3000)) // of another trace
	r := p.request(http.MethodPost, chatPath, strings.NewReader(ask(text("a traced prompt", 3000))))
	r.Header.Set("traceparent", "00-"+id+"-00f067aa0ba902b7-01")
	a := exchange(p.client, r)
	if err := a.bad(); err != nil {
		t.Fatal(err)
	}

	await(t, "the span", func() bool {
		log := p.log.String()
		return strings.Contains(log, `"kv_cache.reason"`) && strings.Contains(log, `"TraceID":"`+id+`"`)
	})
	span := ""
	for line := range strings.Lines(p.log.String()) {
		if strings.Contains(line, `"TraceID":"`+id+`"`) && strings.Contains(line, "kv_cache.") {
			span = line
		}
	}
	for _, attribute := range []string{
		`{"Key":"kv_cache.fleet","Value":{"Type":"STRING","Value":"chat"}}`,
		`{"Key":"kv_cache.policy","Value":{"Type":"STRING","Value":"kv_cache_aware"}}`,
		`{"Key":"kv_cache.replica","Value":{"Type":"STRING","Value":"` + a.replica() + `"}}`,
		`{"Key":"kv_cache.reason","Value":{"Type":"STRING","Value":"match"}}`,
		`{"Key":"kv_cache.attempt","Value":{"Type":"INT64","Value":1}}`,
		`"kv_cache.prompt_tokens"`, `"kv_cache.matched_tokens"`, `"kv_cache.cost"`, `"kv_cache.next_cost"`, `"kv_cache.waited_seconds"`,
	} {
		if !strings.Contains(span, attribute) {
			t.Errorf("the span lacks %s:\n%s", attribute, span)
		}
	}

	r = p.request(http.MethodGet, "/caddy-metrics", nil)
	r.Header.Set("Accept", "application/openmetrics-text;version=1.0.0")
	page := exchange(p.client, r)
	for _, family := range []string{"decisions_total", "decision_duration_seconds_bucket", "match_tokens_bucket", "decision_cost_tokens_bucket", "decision_margin_tokens_bucket"} {
		exemplar := regexp.MustCompile(`(?m)^caddy_kv_cache_` + family + `\{.*\} \S+ # \{trace_id="` + id + `"\}`)
		if !exemplar.Match(page.body) {
			t.Errorf("no exemplar of the trace at %s", family)
		}
	}

	var decisions []struct {
		Trace   string `json:"trace_id"`
		Replica string `json:"replica"`
	}
	if _, answer := p.ask(http.MethodGet, "/kv_cache/decisions?limit=1", "", nil); json.Unmarshal([]byte(answer), &decisions) != nil || decisions[0].Trace != id || decisions[0].Replica != a.replica() {
		t.Errorf("the last decision is %s", answer)
	}

	var chosen []string
	for line := range strings.Lines(p.log.String()) {
		if strings.Contains(line, `"chose a replica"`) {
			chosen = append(chosen, line)
		}
	}
	if len(chosen) != 2 {
		t.Fatalf("%d lines tell of two decisions: %q", len(chosen), chosen)
	}
	for _, part := range []string{`"level":"debug"`, `"fleet":"chat"`, `"replica":"` + a.replica() + `"`, `"reason":"match"`, `"prompt_tokens":`, `"matched_tokens":`, `"cost":"`, `"next_cost":"`, `"waited":`} {
		if !strings.Contains(chosen[1], part) {
			t.Errorf("the line lacks %s: %s", part, chosen[1])
		}
	}
}
