// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/seed-2fa47a1e/caddy-kv-cache/metrics"
)

func TestServing(t *testing.T) {
	now := time.Now()
	page := func(f *Fleet, addr string, models, adapters []string) {
		f.Observe(f.Replica(addr, now), metrics.Scrape{Snapshot: &metrics.Snapshot{
			At: now, Engine: metrics.VLLM, Models: models, Adapters: adapters}}, now)
	}
	list := func(f *Fleet, addr string, models ...string) {
		adapters := make(map[string]bool)
		for _, m := range models {
			adapters[m] = false
		}
		f.Replica(addr, now).roster.list(adapters)
	}
	tests := []struct {
		name  string
		setup func(*Fleet)
		model string
		want  []bool
	}{
		{"no model", func(f *Fleet) { page(f, "a", []string{"m"}, nil) }, "", nil},
		{"nothing known", func(*Fleet) {}, "m", nil},
		{"all serve it", func(f *Fleet) {
			for _, a := range []string{"a", "b", "c"} {
				page(f, a, []string{"m"}, nil)
			}
		}, "m", nil},
		{"one serves it, one another, one is unknown", func(f *Fleet) {
			page(f, "a", []string{"m"}, nil)
			page(f, "b", []string{"n"}, nil)
		}, "m", []bool{true, false, true}},
		{"nobody is known to serve it", func(f *Fleet) {
			page(f, "a", []string{"n"}, nil)
			page(f, "b", []string{"n"}, nil)
		}, "m", nil},
		{"an alias by the list", func(f *Fleet) {
			page(f, "a", []string{"m"}, nil)
			page(f, "b", []string{"n"}, nil)
			list(f, "b", "n", "m")
			list(f, "c", "n")
		}, "m", []bool{true, true, false}},
		{"a busy adapter", func(f *Fleet) {
			page(f, "a", []string{"n"}, []string{"m"})
			page(f, "b", []string{"n"}, nil)
			page(f, "c", []string{"n"}, nil)
			list(f, "c", "n", "m")
		}, "m", []bool{true, false, true}},
	}
	for _, c := range tests {
		t.Run(c.name, func(t *testing.T) {
			f := NewRegistry().New(Config{}, []string{"a", "b", "c"})
			c.setup(f)
			if got := f.Serving(c.model, f.Members(), new([]bool), now); !slices.Equal(got, c.want) {
				t.Errorf("%v, want %v", got, c.want)
			}
		})
	}
}

// A list of models is asked for when a request names one that a replica does not, and not again at once.
func TestModelsAreAskedForOnDemand(t *testing.T) {
	e := newTeller(t, true)
	f, p := observed(t, e)
	now := time.Now()
	f.Serving("base", f.Members(), new([]bool), now)
	if n := e.asked.Load(); n != 0 {
		t.Errorf("asked %d times about a model that is on the page", n)
	}
	f.Serving("tuned", f.Members(), new([]bool), now)
	await(t, "the list", func() bool { serves, _ := p.Serves("tuned"); return serves })
	for range 10 {
		f.Serving("nobody", f.Members(), new([]bool), now)
	}
	if serves, known := p.Serves("nobody"); serves || !known {
		t.Errorf("nobody is served: %v, known: %v", serves, known)
	}
	if n := e.asked.Load(); n != 1 {
		t.Errorf("asked %d times", n)
	}
	f.Serving("nobody", f.Members(), new([]bool), now.Add(modelsEvery))
	await(t, "the list again", func() bool { return e.asked.Load() == 2 })
}

// An adapter that was unloaded is still on the list that was read, and one that was loaded is not: a 404 tells.
func TestModelsAreAskedForAfterNotFound(t *testing.T) {
	e := newTeller(t, true)
	f, p := observed(t, e)
	now := time.Now()
	serves := func(model string) bool { serves, _ := p.Serves(model); return serves }
	f.Serving("tuned", f.Members(), new([]bool), now)
	await(t, "the list", func() bool { return serves("tuned") })

	e.list(`{"data":[{"id":"base"},{"id":"newer","parent":"base"}]}`)
	f.Serving("tuned", f.Members(), new([]bool), now.Add(time.Hour))
	f.NotFound("", now.Add(time.Hour))
	f.NotFound("base", now.Add(time.Hour))
	if n := e.asked.Load(); n != 1 {
		t.Errorf("asked %d times while nothing spoke against the list", n)
	}
	now = now.Add(modelsSoonest)
	for range 10 {
		f.NotFound("tuned", now)
	}
	await(t, "the list again", func() bool { return serves("newer") })
	if serves("tuned") {
		t.Error("an adapter that is gone is served")
	}
	if n := e.asked.Load(); n != 2 {
		t.Errorf("asked %d times", n)
	}
}

// An engine can't make a list of models that takes more room than is meant for it.
func TestListOfModelsIsBounded(t *testing.T) {
	var sent atomic.Int64
	var endless atomic.Bool
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, `{"data":[{"id":"m"}`)
		for i := 0; endless.Load() || i < 2*maxModels; i++ {
			n, err := fmt.Fprintf(w, `,{"id":"model-%d","parent":"m"}`, i)
			if sent.Add(int64(n)); err != nil {
				return
			}
		}
		_, _ = io.WriteString(w, `]}`)
	}))
	defer engine.Close()
	f := NewRegistry().New(Config{API: &API{
		Client: engine.Client(), Base: func(string) (string, bool) { return engine.URL, true },
	}}, []string{"a"})
	models, err := f.modelsOf(t.Context(), "a")
	if err != nil || len(models) != maxModels {
		t.Errorf("%d of %d models are kept: %v", len(models), 2*maxModels, err)
	}
	endless.Store(true)
	sent.Store(0)
	if models, err = f.modelsOf(t.Context(), "a"); err == nil {
		t.Errorf("an endless list is taken for %d models", len(models))
	}
	if n := sent.Load(); n < maxModelsPage || n > 3*maxModelsPage { // what the system buffers was sent, too
		t.Errorf("%d bytes of an endless list were sent, want about %d", n, maxModelsPage)
	}
}

func FuzzModels(f *testing.F) {
	for _, s := range []string{`{"data":[{"id":"m","parent":null},{"id":"a","parent":"m"}]}`, `{"data":[]}`, `[]`, `{"data":[{"id":1}]}`, ``} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, page string) {
		models, err := parseModels(strings.NewReader(page))
		if (err == nil) == (len(models) == 0) {
			t.Errorf("%d models, error %v", len(models), err)
		}
	})
}

// What all members of a large fleet have in common is known as well, though it
// is not worked out after each scrape.
func TestLargeFleet(t *testing.T) {
	addrs := make([]string, 10*largeFleet)
	for i := range addrs {
		addrs[i] = fmt.Sprint("r", i)
	}
	f := NewRegistry().New(Config{}, addrs)
	now := time.Now()
	for round := range 3 {
		for _, p := range f.Members() {
			f.Observe(p, metrics.Scrape{Snapshot: &metrics.Snapshot{
				At: now, Engine: metrics.VLLM, Models: []string{"m"},
				FirstTokens: known(float64(round)), PrefillSeconds: known(float64(round)), PrefillTokens: known(3e6 * float64(round)),
				PromptTokens: known(3e6 * float64(round)), CachedPromptTokens: known(0),
			}}, now)
		}
		now = now.Add(time.Second)
	}
	if !f.everywhere("m") {
		t.Error("a model that all pages name is not known to be everywhere")
	}
	if got := f.Rate(); got < 1e6 {
		t.Errorf("the mean rate is %.0f tokens a second, but all compute three million", got)
	}
}
