// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"slices"
	"strings"
	"testing"
	"time"
)

func TestParsePolicies(t *testing.T) {
	for _, c := range []struct {
		name    string
		names   []string
		options []string
		want    []Policy
		err     string
	}{
		{"plain", []string{"round_robin", "kv_cache_aware"}, nil, []Policy{{Name: "round_robin"}, {Name: "kv_cache_aware"}}, ""},
		{"arguments", []string{" header  X-Session-ID "}, nil, []Policy{{Name: "header X-Session-ID"}}, ""},
		{"options", []string{"prefix_hash"}, []string{"prefix_hash=load_factor 2", "prefix_hash= slack 5 "},
			[]Policy{{"prefix_hash", "load_factor 2\nslack 5"}}, ""},
		{"unknown", []string{"fastest"}, nil, nil, `unknown policy "fastest"; known are`},
		{"empty", []string{""}, nil, nil, "name is empty"},
		{"none", nil, nil, nil, "no policy"},
		{"no text", []string{"prefix_hash"}, []string{"prefix_hash="}, nil, "not of the form"},
		{"no policy", []string{"prefix_hash"}, []string{"slack 5"}, nil, "not of the form"},
		{"other policy", []string{"prefix_hash"}, []string{"kv_cache_aware=name x"}, nil, `option for "kv_cache_aware"`},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := ParsePolicies(c.names, c.options)
			if c.err != "" {
				if err == nil || !strings.Contains(err.Error(), c.err) {
					t.Fatalf("error is %v, want %q in it", err, c.err)
				}
				return
			}
			if err != nil || !slices.Equal(got, c.want) {
				t.Errorf("got %v, %v; want %v", got, err, c.want)
			}
		})
	}
}

func TestKnownPolicies(t *testing.T) {
	known := KnownPolicies()
	for _, name := range DefaultPolicies() {
		if !slices.Contains(known, name) {
			t.Errorf("%s is not among %v", name, known)
		}
	}
}

func TestPollsKeepUpWithTheClock(t *testing.T) {
	for _, c := range []struct {
		policy Policy
		speed  float64
		want   string
	}{
		{Policy{Name: "round_robin"}, 10, ""},
		{Policy{Name: "kv_cache_aware"}, 1, " {\nmetrics_interval 1s\n}"},
		{Policy{Name: "kv_cache_aware", Options: "match_weight 2"}, 10, " {\nmatch_weight 2\nmetrics_interval 100ms\n}"},
		{Policy{Name: "kv_cache_aware"}, 1000, " {\nmetrics_interval 50ms\n}"},
		{Policy{Name: "kv_cache_aware", Options: "metrics_interval 3s"}, 10, " {\nmetrics_interval 3s\n}"},
		{Policy{Name: "kv_cache_aware", Options: "metrics_uri /m"}, 10, " {\nmetrics_uri /m\nmetrics_interval 100ms\n}"},
	} {
		d := &Demo{config: Config{Scrape: time.Second, Speed: c.speed}}
		if got := d.block(c.policy); got != c.want {
			t.Errorf("%v at speed %v: block is %q, want %q", c.policy, c.speed, got, c.want)
		}
	}
}
