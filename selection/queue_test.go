// SPDX-License-Identifier: Apache-2.0

package selection

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/plan"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/prompt"
)

// stuckEngine counts first tokens, and gives none before it is let go. Then it
// answers at once, but says that it computed nothing: so it never seems to be
// faster than is assumed.
type stuckEngine struct {
	*httptest.Server
	letGo func()

	asked  sync.WaitGroup // for the answers
	tokens atomic.Int64
	mu     sync.Mutex
	came   []string // the requests' X-Name, in the order in which they came
}

func newStuckEngine(t *testing.T) *stuckEngine {
	gate := make(chan struct{})
	e := &stuckEngine{letGo: sync.OnceFunc(func() { close(gate) })}
	e.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/metrics" {
			fmt.Fprintf(w, "vllm:num_requests_running 1\nvllm:time_to_first_token_seconds_count %d\n"+
				"vllm:prefix_cache_queries_total 0\nvllm:prefix_cache_hits_total 0\n", e.tokens.Load())
			return
		}
		if r.Method != http.MethodPost { // asked for its models
			http.NotFound(w, r)
			return
		}
		_, _ = io.Copy(io.Discard, r.Body)
		e.mu.Lock()
		e.came = append(e.came, r.Header.Get("X-Name"))
		e.mu.Unlock()
		<-gate
		e.tokens.Add(1)
		_, _ = io.WriteString(w, "{}")
	}))
	t.Cleanup(func() {
		e.letGo()
		e.Close()
	})
	return e
}

func (e *stuckEngine) order() string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return strings.Join(e.came, " ")
}

// queued is a Caddy before a stuck engine that has ten seconds of work.
func queued(t *testing.T, queue string) (*stuckEngine, *proxy, func(name, field, value string, tokens int) <-chan *http.Response) {
	e := newStuckEngine(t)
	p := run(t, map[string]string{"x": handler(
		`{"policy": "kv_cache_aware", "metrics": {"interval": "50ms"}, "queue": `+queue+`}`, []string{e.Listener.Addr().String()}, "", "")})
	f := fleets(t)[0]
	await(t, "the queue to be known", func() bool { return f.Members()[0].Load(time.Now()).QueueKnown })
	number := 0
	ask := func(name, field, value string, tokens int) <-chan *http.Response {
		number++ // no two begin alike: what is cached would be sent together with another
		body := fmt.Sprintf(`{"model": "m", "prompt": "%d %s"}`, number, strings.Repeat("abc ", tokens))
		if field == "priority" {
			body = `{"priority": ` + value + "," + body[1:]
		}
		r := p.request(t, http.MethodPost, "x", "/v1/completions", strings.NewReader(body))
		r.Header.Set("X-Name", name)
		if field != "" {
			r.Header.Set(field, value)
		}
		answer := make(chan *http.Response, 1)
		e.asked.Go(func() {
			defer close(answer)
			resp, err := http.DefaultClient.Do(r)
			if err != nil {
				t.Error(err)
				return
			}
			resp.Body.Close()
			answer <- resp
		})
		return answer
	}
	ask("first", "", "", 100_000)
	await(t, "the first request", func() bool { return e.order() == "first" })
	return e, p, ask
}

func TestQueueRefuses(t *testing.T) {
	e, p, ask := queued(t, `{"max_requests": 1, "full": "refuse"}`)
	second := ask("second", "", "", 10)
	await(t, "the second request to wait", func() bool { return p.metric(t, "caddy_kv_cache_waiting_requests") == 1 })
	third := <-ask("third", "", "", 10)
	if third == nil {
		return
	}
	after, err := strconv.Atoi(third.Header.Get("Retry-After"))
	if third.StatusCode != http.StatusServiceUnavailable || err != nil || after < 2 || after > 20 {
		t.Errorf("status %d, Retry-After %q, want 503 and about the ten seconds that the engine needs", third.StatusCode, third.Header.Get("Retry-After"))
	}
	e.letGo()
	if resp := <-second; resp != nil && resp.StatusCode != http.StatusOK {
		t.Errorf("the one that waited got status %d", resp.StatusCode)
	}
	e.asked.Wait()
}

func TestQueueSendsWhenFull(t *testing.T) {
	e, p, ask := queued(t, `{"max_requests": 1}`)
	ask("second", "", "", 10)
	await(t, "the second request to wait", func() bool { return p.metric(t, "caddy_kv_cache_waiting_requests") == 1 })
	ask("third", "", "", 10)
	await(t, "the third request, which may not wait", func() bool { return e.order() == "first third" })
	e.letGo()
	await(t, "the second request", func() bool { return e.order() == "first third second" })
	e.asked.Wait()
}

// Requests that wait go by their priority, or tenants take turns.
func TestQueueOrder(t *testing.T) {
	for _, c := range []struct{ name, queue, field, want string }{
		{"header", `{"priority": "{http.request.header.X-Priority}"}`, "X-Priority", "first -1 many 5"},
		{"body", `{"priority": "body"}`, "priority", "first -1 0 5"},
		{"fair", `{"fair": "{http.request.header.X-Tenant}"}`, "X-Tenant", "first much few much much"},
		{"none", `{}`, "X-Tenant", "first much much much few"},
	} {
		t.Run(c.name, func(t *testing.T) {
			e, p, ask := queued(t, c.queue)
			values := map[string][]string{
				"X-Priority": {"5", "many", "-1"}, "priority": {"5", "0", "-1"}, "X-Tenant": {"much", "much", "much", "few"},
			}[c.field]
			for i, value := range values {
				ask(value, c.field, value, 40_000) // no room for another until it is answered
				await(t, value+" to wait", func() bool { return p.metric(t, "caddy_kv_cache_waiting_requests") == float64(i+1) })
			}
			e.letGo()
			await(t, "all requests", func() bool { return strings.Count(e.order(), " ") == len(values) })
			if got := e.order(); got != c.want {
				t.Errorf("they came as %s, want %s", got, c.want)
			}
			e.asked.Wait()
		})
	}
}

func TestOwnPriority(t *testing.T) {
	for _, c := range []struct {
		p    prompt.Prompt
		want int
	}{
		{prompt.Prompt{}, 0},
		{prompt.Prompt{Priority: 7}, 7},
		{prompt.Prompt{Priority: -7, ServiceTier: "flex"}, -7},
		{prompt.Prompt{ServiceTier: "priority"}, -1},
		{prompt.Prompt{ServiceTier: "flex"}, 1},
		{prompt.Prompt{ServiceTier: "default"}, 0},
	} {
		if got := ownPriority(&c.p); got != c.want {
			t.Errorf("%d of %d and %q, want %d", got, c.p.Priority, c.p.ServiceTier, c.want)
		}
	}
}

func TestQueueTerms(t *testing.T) {
	var none *Queue
	if none.terms() != plan.DefaultTerms || (&Queue{Off: true}).terms() != plan.BindOnArrival {
		t.Error("no settings are not the defaults, or off does not bind on arrival")
	}
	got := (&Queue{MaxRequests: 3, MaxWait: 5e9, Full: "refuse"}).terms()
	if got.Waiting != 3 || got.Longest != 5*time.Second || !got.Refuse || got.Room != plan.DefaultTerms.Room {
		t.Errorf("terms %+v", got)
	}
}
