// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/seed-2fa47a1e/caddy-kv-cache/metrics"
)

// A config reload makes the new fleet before it stops the old one: what both
// name keeps its state, what only the old one named is let go.
func TestOverlappingFleets(t *testing.T) {
	g := NewRegistry()
	now := time.Now()
	old := g.New(Config{Name: "old"}, []string{"a", "b", "b"})
	a, b := old.Replica("a", now), old.Replica("b", now)
	chain := []uint64{1, 2}
	a.Holds(chain)
	b.Holds(chain)
	r := &Reservation{Prompt: 10, Uncached: 10}
	a.Reserve(r, now)
	next := g.New(Config{Name: "new"}, []string{"a", "c"})
	old.Stop()
	old.Stop()
	if next.Replica("a", now) != a {
		t.Error("a replica of both configs lost its state")
	}
	if n := a.Matched(g.Index.Match(chain, nil)); n != 2 {
		t.Errorf("%d blocks are held at a replica of both configs", n)
	}
	if n := b.Matched(g.Index.Match(chain, nil)); n != 0 {
		t.Errorf("%d blocks are held at a replica that was let go", n)
	}
	if got := g.Index.Stats().Replicas; got != 2 {
		t.Errorf("%d replicas are in the index, want a and c", got)
	}
	// Stragglers of the old config: known replicas, and new ones.
	if old.Replica("a", now) != a {
		t.Error("a straggler finds another replica at the same address")
	}
	stray := old.Replica("d", now)
	stray.Holds(chain)
	stray.Lacks(chain, 0)
	stray.Forget()
	s := &Reservation{Prompt: 5, Uncached: 5}
	stray.Reserve(s, now)
	s.Finish(now)
	b.Holds(chain)
	if got := g.Index.Stats().Replicas; got != 2 {
		t.Errorf("%d replicas are in the index after a straggler came", got)
	}
	if l := stray.Load(now); l.InFlight != 0 || l.Queue != 0 || stray.Matched(nil) != 0 {
		t.Errorf("a stray replica is left with %+v", l)
	}
	r.Finish(now)
	if n := a.Load(now).InFlight; n != 0 {
		t.Errorf("%v in flight", n)
	}
	next.Stop()
	if got := g.Index.Stats().Replicas; got != 0 {
		t.Errorf("%d replicas are held when every fleet has stopped", got)
	}
	again := g.New(Config{}, []string{"a"})
	if again.Replica("a", now) == a {
		t.Error("a replica that was let go came back with its state")
	}
	again.Stop()
}

// Two fleets with the same replica share its ledger.
func TestFleetsShareReplicas(t *testing.T) {
	g := NewRegistry()
	now := time.Now()
	x, y := g.New(Config{Name: "x"}, []string{"a"}), g.New(Config{Name: "y"}, nil)
	r := &Reservation{Prompt: 100, Uncached: 100}
	x.Replica("a", now).Reserve(r, now)
	if n := y.Replica("a", now).Load(now).InFlight; n != 1 {
		t.Errorf("%v in flight in the other fleet's eyes", n)
	}
	r.Abort(now)
	x.Stop()
	if got := g.Index.Stats().Replicas; got != 1 {
		t.Errorf("%d replicas are held while one fleet still uses one", got)
	}
	y.Stop()
}

// A replica that a dynamic source stops naming is let go after a while; one
// that is configured stays.
func TestUnseenReplicasLeave(t *testing.T) {
	g := NewRegistry()
	f := g.New(Config{}, []string{"static"})
	now := time.Unix(1_700_000_000, 0)
	f.Replica("dynamic", now)
	f.Replica("steady", now)
	names := func() (out []string) {
		for _, p := range f.Members() {
			out = append(out, p.Addr)
		}
		return out
	}
	f.Replica("steady", now.Add(unseenFor-time.Second))
	f.dropUnseen(now.Add(unseenFor - time.Second))
	if got := names(); len(got) != 3 {
		t.Errorf("members are %v before the time", got)
	}
	f.dropUnseen(now.Add(unseenFor))
	if got := names(); !slices.Equal(got, []string{"static", "steady"}) {
		t.Errorf("members are %v after the time", got)
	}
	if got := g.Index.Stats().Replicas; got != 2 {
		t.Errorf("%d replicas are held", got)
	}
	f.Stop()
}

// One that joins a fleet at work is new; those that a young fleet only hears
// of by its first requests are not.
func TestJoining(t *testing.T) {
	now := time.Unix(1_700_000_000, 0)
	f := NewRegistry().New(Config{}, nil)
	for i := range 4 {
		addr := fmt.Sprint("first", i)
		if room := f.Replica(addr, now).Load(now).Room; room < 1000 {
			t.Errorf("%s has room for %d", addr, room)
		}
	}
	later := now.Add(time.Hour)
	if room := f.Replica("new", later).Load(later).Room; room != warmStep {
		t.Errorf("a replica that joined later has room for %d", room)
	}
	f.Stop()
}

func TestConcurrentJoins(t *testing.T) {
	g := NewRegistry()
	f := g.New(Config{}, nil)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for i := range 50 {
				addr := fmt.Sprint(i)
				if p := f.Replica(addr, time.Now()); p.Addr != addr {
					t.Errorf("asked for %s, got %s", addr, p.Addr)
				}
			}
		})
	}
	wg.Go(func() { f.Start() })
	wg.Wait()
	if n := len(f.Members()); n != 50 {
		t.Errorf("%d members, want 50", n)
	}
	f.Stop()
	if got := g.Index.Stats().Replicas; got != 0 {
		t.Errorf("%d replicas are held after Stop", got)
	}
}

// Real pollers over HTTP: they start with Start, tell the replicas, and are
// gone after Stop.
func TestPollersEnd(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	var polls atomic.Int64
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		polls.Add(1)
		_, _ = io.WriteString(w, "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{model_name=\"m\",engine=\"0\"} 9\n"+
			"vllm:num_requests_waiting{model_name=\"m\",engine=\"0\"} 0\nvllm:kv_cache_usage_perc{model_name=\"m\",engine=\"0\"} 0.25\n")
	}))
	defer s.Close()
	var changed atomic.Int64
	f := NewRegistry().New(Config{
		Name:     "polled",
		Interval: 50 * time.Millisecond,
		Changed:  func(time.Time) { changed.Add(1) },
		Poll: func(addr string) (metrics.PollConfig, bool) {
			return metrics.PollConfig{URL: "http://" + addr + "/metrics", Interval: 50 * time.Millisecond, Timeout: time.Second}, addr != "unpolled"
		},
	}, []string{s.Listener.Addr().String(), "unpolled"})
	if polls.Load() != 0 {
		t.Error("polled before Start")
	}
	f.Start()
	f.Start()
	joined := f.Replica("127.0.0.1:1", time.Now()) // refuses
	p := f.Replica(s.Listener.Addr().String(), time.Now())
	await(t, "scrapes", func() bool {
		views := f.Views(time.Now())
		byAddr := make(map[string]metrics.View)
		for _, v := range views {
			byAddr[v.Replica] = v
		}
		return byAddr[p.Addr].Good >= 2 && byAddr[joined.Addr].Bad >= 1
	})
	if l := p.Load(time.Now()); l.InFlight != 9 || l.KVUsage.Value != 0.25 {
		t.Errorf("the load is %+v", l)
	}
	await(t, "the connection to be refused", func() bool { return joined.Avoided(time.Now()) == Refused })
	if changed.Load() < 2 {
		t.Errorf("%d changes were told", changed.Load())
	}
	f.Stop()
	before := polls.Load()
	f.Start() // must not begin anew
	time.Sleep(120 * time.Millisecond)
	if n := polls.Load(); n != before {
		t.Errorf("polled %d times after Stop", n-before)
	}
}

// await waits for a condition that other goroutines bring about.
func await(tb testing.TB, what string, is func() bool) {
	tb.Helper()
	for end := time.Now().Add(20 * time.Second); !is(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			tb.Fatalf("waited in vain for %s", what)
		}
	}
}
