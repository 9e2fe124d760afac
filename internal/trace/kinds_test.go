// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"reflect"
	"testing"
	"time"
)

func madeUp(t *testing.T, k Kind, seed uint64) []Request {
	t.Helper()
	var all []Request
	for r, err := range k.Requests(seed) {
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, r)
	}
	return all
}

func TestKinds(t *testing.T) {
	for _, k := range Kinds {
		t.Run(k.Name, func(t *testing.T) {
			all := madeUp(t, k, 1)
			if len(all) < 1000 {
				t.Fatalf("%d requests are no traffic", len(all))
			}
			before := time.Duration(0)
			for i, r := range all {
				if r.At < before {
					t.Fatalf("request %d comes at %v, the one before it at %v", i, r.At, before)
				}
				before = r.At
				if want := (r.InputTokens + idTokens - 1) / idTokens; len(r.HashIDs) != want || r.InputTokens < 1 || r.InputTokens > longest {
					t.Fatalf("request %d has %d tokens and %d ids", i, r.InputTokens, len(r.HashIDs))
				}
				if r.OutputTokens < 1 {
					t.Fatalf("request %d has an answer of %d tokens", i, r.OutputTokens)
				}
			}
			if !reflect.DeepEqual(all, madeUp(t, k, 1)) {
				t.Error("the same seed makes other traffic")
			}
			if reflect.DeepEqual(all, madeUp(t, k, 2)) {
				t.Error("another seed makes the same traffic")
			}
		})
	}
}

// What a cache without limit would serve is what the kinds are about.
func TestWhatKindsShare(t *testing.T) {
	want := map[string][2]float64{
		"tools": {0.6, 0.85}, "documents": {0.6, 0.9}, "labels": {0.6, 0.9},
		"reasoning": {0.5, 0.8}, "bursts": {0.6, 0.85}, "distinct": {0, 0},
	}
	for _, k := range Kinds {
		rate, err := OneCacheHitRate(k.Requests(1), 0, 16)
		if err != nil {
			t.Fatal(err)
		}
		if bounds := want[k.Name]; rate < bounds[0] || rate > bounds[1] {
			t.Errorf("%s: one cache would serve %.3f of all tokens, want %v", k.Name, rate, bounds)
		}
	}
}

// An interrupted iteration ends, and names find their kinds.
func TestKindNamed(t *testing.T) {
	k, found := KindNamed("documents")
	if !found || k.Name != "documents" {
		t.Fatalf("found %v %q", found, k.Name)
	}
	n := 0
	for range k.Requests(1) {
		if n++; n == 3 {
			break
		}
	}
	if _, found := KindNamed("nonsense"); found {
		t.Error("found a kind that is not there")
	}
}
