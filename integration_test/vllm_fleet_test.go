// SPDX-License-Identifier: Apache-2.0

//go:build unix

package integration

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/seed-2fa47a1e/caddy-kv-cache/integration_test/vllm"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/enginesim"
)

// Real engines under test: their block, the capacity of each in blocks, and how many requests each takes in, of which
// eight run. (vLLM's option for that speaks of queued ones, but counts those that run as well.)
const (
	poolBlock    = 32
	poolBlocks   = 400
	mostInFlight = 12
)

// vllmFleet is a fleet of vLLM servers, ours or, where VLLM_URLS names them as `run.sh fleet` does,
// somebody else's, which can't be restarted or stopped.
type vllmFleet struct {
	addrs  []string
	model  string
	python string
	ours   *vllm.Fleet
}

// TestVLLM puts the built Caddy in front of two real vLLM servers, which are started once for all.
func TestVLLM(t *testing.T) {
	e := startVLLM(t)
	t.Run("Example", e.testExample)
	t.Run("Answers", e.testAnswers)
	t.Run("Clients", e.testClients)
	t.Run("SecondTurn", e.testSecondTurn)
	t.Run("TokensLearned", e.testTokensLearned)
	t.Run("GrowingChats", e.testGrowingChats)
	t.Run("OtherPrompts", e.testOtherPrompts)
	if e.ours != nil {
		t.Run("Adapter", e.testAdapter)
		t.Run("Images", e.testImages)
		t.Run("Ranks", e.testRanks)
	}
	t.Run("Prediction", e.testPrediction)
	t.Run("Eviction", func(t *testing.T) { e.compareEviction(t, followed) })
	t.Run("OtherSenders", e.testOtherSenders)
	t.Run("TwoCaddys", func(t *testing.T) { e.compareTwoCaddys(t, followed) })
	t.Run("Burst", e.testBurst)
	t.Run("ClientsLeave", e.testClientsLeave)
	t.Run("QueueFull", e.testQueueFull)
	t.Run("Reset", e.testReset)
	t.Run("ReloadKeepsEvents", e.testReloadKeepsEvents)
	if e.ours != nil {
		t.Run("Hang", e.testHang)
		t.Run("Restart", e.testRestart)
	}
}

func startVLLM(t *testing.T) *vllmFleet {
	if testing.Short() {
		t.Skip("SKIPPED, real engines untested: vLLM takes minutes, and -short was given")
	}
	if urls := os.Getenv("VLLM_URLS"); urls != "" {
		e := &vllmFleet{model: os.Getenv("VLLM_MODEL"), python: os.Getenv("VLLM_PYTHON")}
		for _, url := range strings.Fields(urls) {
			e.addrs = append(e.addrs, strings.TrimPrefix(url, "http://"))
		}
		return e
	}
	e, err := startEngines(t, vllm.Options{
		Replicas: 2, Model: "tiny", Blocks: poolBlocks, StartTimeout: 10 * time.Minute,
		Extra: []string{
			fmt.Sprint("--max-num-queued-reqs=", mostInFlight),
			"--enable-lora", "--max-loras=2", "--max-lora-rank=8", "--enable-auto-tool-choice", "--tool-call-parser=hermes",
		},
	})
	if errors.Is(err, vllm.ErrUnavailable) {
		t.Skipf("SKIPPED, real engines untested: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// startEngines starts engines that stop with the test.
func startEngines(t *testing.T, o vllm.Options) (*vllmFleet, error) {
	fleet, err := vllm.Start(t.Context(), o)
	if err != nil {
		return nil, err
	}
	t.Cleanup(func() {
		if err := fleet.Close(); err != nil {
			t.Error(err)
		}
		http.DefaultClient.CloseIdleConnections()
	})
	e := &vllmFleet{model: fleet.Model, python: fleet.Python, ours: fleet}
	for _, url := range fleet.URLs {
		e.addrs = append(e.addrs, strings.TrimPrefix(url, "http://"))
	}
	return e, nil
}

// followed is the policy's options for following the engines' events.
const followed = `
	kv_events        tcp://{host}:{port+100}
	kv_events_replay tcp://{host}:{port+200}
`

// proxy starts a Caddy in front of the engines, whose caches are emptied before.
func (e *vllmFleet) proxy(t *testing.T, policy, options string) *proxy {
	t.Helper()
	e.reset(t)
	p := start(t, aware(e.addrs, policy, options))
	p.awaitScrapes(e.addrs...)
	return p
}

// familiar is a proxy that has learned from the engines how long a token is. Of these models it is a byte, where four
// are assumed at first.
func (e *vllmFleet) familiar(t *testing.T, policy, options string) *proxy {
	t.Helper()
	p := e.proxy(t, policy, options)
	if e.model == enginesim.DefaultModel { // whose tokens are as long as assumed
		return p
	}
	await(t, "the length of a token", func() bool {
		p.must(chatPath, e.chat(1, message{"user", unique("familiar", 300)}))
		return p.metric("caddy_kv_cache_bytes_per_token") < 1.5
	})
	return p
}

// reset empties the engines' prefix caches. An engine says so by its events only with its next step.
func (e *vllmFleet) reset(t *testing.T) {
	t.Helper()
	client := newClient(t)
	for _, addr := range e.addrs {
		await(t, "an idle "+addr, func() bool {
			resp, err := client.Post("http://"+addr+"/reset_prefix_cache", "", nil)
			if err != nil {
				return false
			}
			defer resp.Body.Close()
			body, _ := io.ReadAll(resp.Body)
			return resp.StatusCode == http.StatusOK && !strings.Contains(string(body), "false")
		})
		e.direct(t, client, addr, e.chat(4, message{"user", "step"}))
	}
}

// direct sends a chat to an engine past Caddy.
func (e *vllmFleet) direct(t *testing.T, client *http.Client, addr, body string) answer {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+addr+chatPath, nil)
	if err != nil {
		t.Fatal(err)
	}
	setBody(r, body)
	a := exchange(client, r)
	if err := a.bad(); err != nil {
		t.Fatalf("%s: %v", addr, err)
	}
	return a
}

// chat is a request for so many tokens, the likeliest ones.
func (e *vllmFleet) chat(tokens int, messages ...message) string {
	return e.chatWith(nil, tokens, messages...)
}

// chatWith is chat with further fields.
func (e *vllmFleet) chatWith(fields map[string]any, tokens int, messages ...message) string {
	body := map[string]any{"model": e.model, "messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": true}
	for name, value := range fields {
		body[name] = value
	}
	return asJSON(body)
}

// unique returns a text that no other run of these tests has made.
func unique(name string, size int) string {
	return text(fmt.Sprintf("%08x %s", rand.Uint32(), name), size)
}

func (e *vllmFleet) testAnswers(t *testing.T) {
	p := e.proxy(t, followed, "")
	// Ids as the model's tokenizer makes them of a text: three special tokens, and one for each byte. What a random model
	// adds to them depends on the last few alone, so it is the same text in each run.
	var ids []int
	for _, b := range []byte(unique("e", 300)) {
		ids = append(ids, 3+int(b))
	}
	for _, c := range []struct{ name, path, body string }{
		{"chat", chatPath, e.chat(8, message{"system", unique("a", 300)}, message{"user", "Hello"})},
		{"streamed chat", chatPath, e.chatWith(map[string]any{"stream": true}, 8, message{"user", unique("b", 300)})},
		{"completion", "/v1/completions", asJSON(map[string]any{"model": e.model, "prompt": unique("c", 300), "max_tokens": 8, "temperature": 0})},
		{"streamed completion", "/v1/completions", asJSON(map[string]any{"model": e.model, "prompt": unique("d", 300), "max_tokens": 8, "temperature": 0, "stream": true})},
		{"token ids", "/v1/completions", asJSON(map[string]any{"model": e.model, "prompt": ids, "max_tokens": 8, "temperature": 0, "ignore_eos": true})},
	} {
		t.Run(c.name, func(t *testing.T) {
			through := p.must(c.path, c.body)
			r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+through.replica()+c.path, nil)
			if err != nil {
				t.Fatal(err)
			}
			setBody(r, c.body)
			directly := exchange(p.client, r)
			if err := directly.bad(); err != nil {
				t.Fatal(err)
			}
			if a, b := generated(t, through.body), generated(t, directly.body); a != b || a == "" {
				t.Errorf("through Caddy %q, directly %q", a, b)
			}
		})
	}
}

// generated returns the text in an answer, whole or streamed.
func generated(t *testing.T, body []byte) string {
	t.Helper()
	var all strings.Builder
	for line := range strings.Lines(string(body)) {
		data := strings.TrimPrefix(strings.TrimSpace(line), "data: ")
		if data == "" || data == "[DONE]" {
			continue
		}
		var a struct {
			Choices []struct {
				Text           string
				Message, Delta struct{ Content string }
			}
		}
		if err := json.Unmarshal([]byte(data), &a); err != nil {
			t.Fatalf("answer %.200s: %v", data, err)
		}
		for _, c := range a.Choices {
			all.WriteString(c.Text + c.Message.Content + c.Delta.Content)
		}
	}
	return all.String()
}

// Python clients see through Caddy what they see directly; the scenarios are in the script.
func (e *vllmFleet) testClients(t *testing.T) {
	p := e.proxy(t, followed, "")
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, e.python, filepath.Join("testdata", "clients.py"), e.model, "http://"+e.addrs[0], "http://"+p.addr)
	cmd.Env = append(os.Environ(), "PYTHONDONTWRITEBYTECODE=") // the clients are large
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("clients.py: %v", err)
	}
	t.Logf("%s", out)
	p.awaitIdle()
}

func (e *vllmFleet) testSecondTurn(t *testing.T) {
	p := e.familiar(t, followed, "")
	chat := []message{{"system", unique("rules", 600)}, {"user", unique("first", 500)}}
	first := p.must(chatPath, e.chat(8, chat...))
	chat = append(chat, message{"assistant", first.read(t).Choices[0].Message.Content}, message{"user", "And then?"})
	second := p.must(chatPath, e.chat(8, chat...))
	if second.replica() != first.replica() {
		t.Errorf("the second turn went to %s, the first to %s", second.replica(), first.replica())
	}
	if cached, before := second.cached(t), first.read(t).Usage.Prompt; cached < before-2*poolBlock {
		t.Errorf("%d tokens of the second turn were cached, the first had %d", cached, before)
	}
}

// The tokenizer of the test's models makes one token of a byte, where four bytes are assumed at first: the engine's own
// counts must correct that with the first scrape.
func (e *vllmFleet) testTokensLearned(t *testing.T) {
	p := e.proxy(t, "", "")
	p.must(chatPath, e.chat(4, message{"user", unique("a", 1500)}))
	p.awaitScrapes(e.addrs...)
	content := unique("b", 1500)
	p.must(chatPath, e.chat(4, message{"user", content}))
	again := p.must(chatPath, e.chat(4, message{"user", content}))
	if predicted, counted := again.matched(t), again.cached(t); math.Abs(float64(predicted-counted)) > 0.1*float64(counted)+2*poolBlock {
		t.Errorf("predicted %d tokens, the engine counted %d", predicted, counted)
	}
}

// mixture sums what was predicted and what the engine counted.
type mixture struct {
	mu                                 sync.Mutex
	prompt, predicted, counted, missed float64
	requests                           int
}

func (m *mixture) add(t *testing.T, a answer) {
	u, predicted := a.read(t).Usage, float64(a.matched(t))
	m.mu.Lock()
	defer m.mu.Unlock()
	m.requests++
	m.prompt += float64(u.Prompt)
	m.predicted += predicted
	m.counted += float64(u.Details.Cached)
	m.missed += math.Abs(predicted - float64(u.Details.Cached))
}

// error is the difference of the sums as a share of what was counted, and the mean difference of single requests as one
// of the prompts.
func (m *mixture) error() (sums, singles float64) {
	return (m.predicted - m.counted) / m.counted, m.missed / m.prompt
}

func (m *mixture) String() string {
	sums, singles := m.error()
	return fmt.Sprintf("%d requests, %.0f prompt tokens: %.3f cached, %.3f predicted; error of the sums %+.4f of the cached, of single requests %.4f of the prompts",
		m.requests, m.prompt, m.counted/m.prompt, m.predicted/m.prompt, sums, singles)
}

func (e *vllmFleet) testGrowingChats(t *testing.T) {
	const sessions, turns = 6, 8
	p := e.familiar(t, followed, "")
	chats := make([][]message, sessions)
	before := make([]int, sessions) // tokens of the turn before, in whole blocks
	possible, cached := 0, 0
	var all mixture
	for turn := range turns {
		for i := range chats {
			chats[i] = append(chats[i], message{"user", unique(fmt.Sprintf("session %d turn %d", i, turn), 200)})
			a := p.must(chatPath, e.chat(16, chats[i]...))
			r := a.read(t)
			all.add(t, a)
			possible += before[i]
			cached += min(r.Usage.Details.Cached, before[i])
			before[i] = r.Usage.Prompt / poolBlock * poolBlock
			chats[i] = append(chats[i], message{"assistant", r.Choices[0].Message.Content})
		}
	}
	share := float64(cached) / float64(possible)
	t.Logf("%.3f of the %d tokens that could be cached were; %v", share, possible, &all)
	if share < 0.95 {
		t.Errorf("%.3f of the tokens that could be cached were, want 0.95", share)
	}
}

// Prompts that look alike to a reader of the messages, but not to the engine.
func (e *vllmFleet) testOtherPrompts(t *testing.T) {
	p := e.familiar(t, followed, "")
	tool := map[string]any{"type": "function", "function": map[string]any{"name": "f", "parameters": map[string]any{"type": "object"}}}
	for name, fields := range map[string]map[string]any{
		"cache_salt":           {"cache_salt": "another tenant"},
		"tools":                {"tools": []any{tool}, "tool_choice": "none"},
		"chat_template_kwargs": {"chat_template_kwargs": map[string]any{"enable_thinking": false}},
	} {
		t.Run(name, func(t *testing.T) {
			messages := []message{{"system", unique(name, 900)}, {"user", "Hello"}}
			for range 2 {
				p.must(chatPath, e.chat(4, messages...))
			}
			a := p.must(chatPath, e.chatWith(fields, 4, messages...))
			if predicted, counted := a.matched(t), a.cached(t); counted == 0 && predicted > 0 {
				t.Errorf("predicted %d tokens where the engine has none", predicted)
			}
			again := p.must(chatPath, e.chatWith(fields, 4, messages...))
			if again.cached(t) < 800 || again.replica() != a.replica() {
				t.Errorf("again: %d tokens cached at %s after %s", again.cached(t), again.replica(), a.replica())
			}
		})
	}
}

// workload is a mix of requests: chats that grow over shared system prompts, questions about documents, and prompts
// that never come again.
type workload struct {
	e         *vllmFleet
	systems   []string
	documents []string
	chats     [][]message
	rng       *rand.Rand
}

func (e *vllmFleet) workload(documents, size int) *workload {
	w := &workload{e: e, rng: rand.New(rand.NewPCG(1, 2))}
	for i := range 3 {
		w.systems = append(w.systems, unique(fmt.Sprintf("system %d", i), 400))
	}
	for i := range documents {
		// Their ends are spread over a block of text, for what is predicted is right on average, not for each end.
		w.documents = append(w.documents, unique(fmt.Sprintf("document %d", i), size+256*i/documents-128))
	}
	w.chats = make([][]message, 6)
	return w
}

// next returns the next request, and what to do with its answer.
func (w *workload) next() (body string, then func(reply)) {
	question := message{"user", unique("question", 60)}
	switch pick := w.rng.IntN(10); {
	case pick < 4:
		i := w.rng.IntN(len(w.chats))
		if len(w.chats[i]) == 0 || len(w.chats[i]) > 12 {
			w.chats[i] = []message{{"system", w.systems[i%len(w.systems)]}}
		}
		w.chats[i] = append(w.chats[i], message{"user", unique("turn", 120)})
		return w.e.chat(8, w.chats[i]...), func(r reply) {
			w.chats[i] = append(w.chats[i], message{"assistant", r.Choices[0].Message.Content})
		}
	case pick < 9:
		return w.e.chat(4, message{"system", w.documents[w.rng.IntN(len(w.documents))]}, question), func(reply) {}
	}
	return w.e.chat(4, message{"user", unique("once", 600)}), func(reply) {}
}

// run sends so many requests, one after the other as a client's would come.
func (w *workload) run(t *testing.T, p *proxy, requests int) *mixture {
	t.Helper()
	var m mixture
	for range requests {
		body, then := w.next()
		a := p.must(chatPath, body)
		m.add(t, a)
		then(a.read(t))
	}
	return &m
}

// The predicted hits over a mixed workload of 500 requests are those by which the engines' counters grow: within a tenth
// in the beginning and a twentieth when their counts have been seen.
func (e *vllmFleet) testPrediction(t *testing.T) {
	for _, c := range []struct{ name, policy string }{{"belief alone", ""}, {"with events", followed}} {
		t.Run(c.name, func(t *testing.T) {
			p := e.proxy(t, c.policy, "")
			w := e.workload(5, 900)
			for i, limit := range []float64{0.1, 0.05} {
				before := e.hits(t, p.client)
				m := w.run(t, p, 250)
				t.Logf("%s, half %d: %v", c.name, i+1, m)
				if hits := e.hits(t, p.client) - before; hits != m.counted {
					t.Errorf("half %d: the answers tell of %v cached tokens, the engines' counters of %v", i+1, m.counted, hits)
				}
				if sums, _ := m.error(); math.Abs(sums) > limit {
					t.Errorf("half %d: the error is %.3f, want %.2f", i+1, sums, limit)
				}
			}
		})
	}
}

// hits is how many prompt tokens the engines have found in their caches.
func (e *vllmFleet) hits(t *testing.T, client *http.Client) (sum float64) {
	t.Helper()
	for _, addr := range e.addrs {
		sum += e.gauge(t, client, addr, "prefix_cache_hits_total")
	}
	return sum
}

// What others send past this Caddy evicts what it believes in, and is there to be hit without its knowing. Events tell
// both.
func (e *vllmFleet) testOtherSenders(t *testing.T) {
	errs := make(map[string]float64)
	for _, c := range []struct{ name, policy string }{{"belief alone", ""}, {"with events", followed}} {
		t.Run(c.name, func(t *testing.T) {
			p := e.proxy(t, c.policy, "")
			w := e.workload(12, 1000)
			var m mixture
			for i := range 180 {
				if i%2 == 0 {
					m.add(t, p.must(chatPath, e.chat(4, message{"system", w.documents[w.rng.IntN(len(w.documents))]}, message{"user", unique("ours", 60)})))
					continue
				}
				content := unique("theirs", 1000)
				if i%4 == 1 {
					content = w.documents[w.rng.IntN(len(w.documents))]
				}
				e.direct(t, p.client, e.addrs[w.rng.IntN(len(e.addrs))], e.chat(4, message{"system", content}, message{"user", unique("theirs", 60)}))
			}
			t.Logf("%s: %v", c.name, &m)
			_, errs[c.name] = m.error()
		})
	}
	if errs["with events"] > errs["belief alone"]+0.01 {
		t.Errorf("events make the prediction worse: %v", errs)
	}
}

// Prompts that come at once are spread, although the engines' gauges still tell of idle replicas.
func (e *vllmFleet) testBurst(t *testing.T) {
	p := e.familiar(t, followed, "")
	var mu sync.Mutex
	at := make(map[string]int)
	inParallel(12, 12, func(i int) {
		a := p.post(chatPath, e.chat(4, message{"user", unique("burst", 3000)}))
		if err := a.bad(); err != nil {
			t.Error(err)
			return
		}
		mu.Lock()
		defer mu.Unlock()
		at[a.replica()]++
	})
	t.Logf("12 prompts went to %v", at)
	for _, addr := range e.addrs {
		if at[addr] < 4 {
			t.Errorf("%s got %d of 12 prompts", addr, at[addr])
		}
	}
}

// Clients that leave in the middle of an answer leave nothing behind in the ledger, and their engine stops.
func (e *vllmFleet) testClientsLeave(t *testing.T) {
	p := e.proxy(t, followed, "flush_interval -1")
	inParallel(6, 6, func(i int) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		r, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+p.addr+chatPath, nil)
		if err != nil {
			t.Error(err)
			return
		}
		setBody(r, e.chatWith(map[string]any{"stream": true}, 3000, message{"user", unique("left", 400)}))
		resp, err := p.client.Do(r)
		if err != nil {
			t.Error(err)
			return
		}
		defer resp.Body.Close()
		if _, err := io.ReadFull(resp.Body, make([]byte, 300)); err != nil {
			t.Errorf("reading the beginning of a stream: %v", err)
		}
	})
	p.awaitIdle()
	for _, addr := range e.addrs {
		await(t, "no request running at "+addr, func() bool {
			return e.gauge(t, p.client, addr, "num_requests_running") == 0
		})
	}
}

// gauge reads a figure off an engine's page of metrics.
func (e *vllmFleet) gauge(t *testing.T, client *http.Client, addr, name string) float64 {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+addr+"/metrics", nil)
	if err != nil {
		t.Fatal(err)
	}
	page := exchange(client, r)
	if err := page.bad(); err != nil {
		t.Fatalf("the page of metrics of %s: %v", addr, err)
	}
	_, rest, found := strings.Cut(string(page.body), "\nvllm:"+name+"{engine=\"0\",model_name=\""+e.model+"\"} ")
	value, _, _ := strings.Cut(rest, "\n")
	v, err := strconv.ParseFloat(value, 64)
	if !found || err != nil {
		t.Fatalf("%s of %s is %q", name, addr, value)
	}
	return v
}

// After reset_prefix_cache no hit is predicted once the engine has told of it, which it does with its next step.
func (e *vllmFleet) testReset(t *testing.T) {
	p := e.familiar(t, followed, "")
	messages := []message{{"system", unique("reset", 900)}, {"user", "Hello"}}
	for range 2 {
		p.must(chatPath, e.chat(4, messages...))
	}
	e.reset(t)
	await(t, "the reset to be known", func() bool { return p.metric("caddy_kv_cache_replica_held_blocks") < 4 })
	a := p.must(chatPath, e.chat(4, messages...))
	if predicted, counted := a.matched(t), a.cached(t); predicted > 2*poolBlock || counted > 2*poolBlock {
		t.Errorf("after a reset %d tokens were predicted and %d counted", predicted, counted)
	}
}

// A reload loses no event: what the engine dropped meanwhile is known, and what it holds is still found.
func (e *vllmFleet) testReloadKeepsEvents(t *testing.T) {
	p := e.familiar(t, followed, "")
	messages := []message{{"system", unique("reload", 900)}, {"user", "Hello"}}
	first := p.must(chatPath, e.chat(4, messages...))
	for range 3 {
		p.reload(aware(e.addrs, followed, ""))
	}
	a := p.must(chatPath, e.chat(4, messages...))
	if a.replica() != first.replica() || a.matched(t) < 800 {
		t.Errorf("after reloads %d tokens were predicted at %s, before it was at %s", a.matched(t), a.replica(), first.replica())
	}
	if connects := strings.Count(p.log.String(), `"transition":"connected"`); connects != len(e.addrs) {
		t.Errorf("%d connections for events over three reloads, want %d", connects, len(e.addrs))
	}
}

// A replica that stands still for 20 s gets nothing more meanwhile, and is used again afterwards. That the request which
// hung with it is answered takes the keep-alive limit of run.sh: a vLLM that wakes up first closes what is past it.
func (e *vllmFleet) testHang(t *testing.T) {
	p := e.proxy(t, followed, "")
	messages := []message{{"system", unique("hang", 900)}, {"user", "Hello"}}
	home := p.must(chatPath, e.chat(4, messages...)).replica()
	i := 0
	if home == e.addrs[1] {
		i = 1
	}
	if err := e.ours.Signal(i, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	stuck := make(chan answer, 1)
	go func() { stuck <- p.post(chatPath, e.chat(4, messages...)) }()
	var served int
	for time.Since(began) < 20*time.Second {
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		r, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+p.addr+chatPath, nil)
		if err != nil {
			t.Fatal(err)
		}
		setBody(r, e.chat(4, message{"user", unique("meanwhile", 200)}))
		if a := exchange(p.client, r); a.bad() == nil {
			served++
		}
		cancel()
		time.Sleep(100 * time.Millisecond)
	}
	if err := e.ours.Signal(i, syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	if err := (<-stuck).bad(); err != nil {
		t.Errorf("the request that hung with its replica: %v", err)
	}
	t.Logf("%d requests were served while one of two replicas stood still", served)
	if served < 20 {
		t.Errorf("%d requests were served while one of two replicas stood still", served)
	}
	await(t, "the replica to be used again", func() bool {
		return p.must(chatPath, e.chat(4, messages...)).replica() == home
	})
}

// A replica that starts anew on its address holds nothing, whatever was believed.
func (e *vllmFleet) testRestart(t *testing.T) {
	p := e.proxy(t, followed, "lb_retries 2")
	messages := []message{{"system", unique("restart", 900)}, {"user", "Hello"}}
	home := p.must(chatPath, e.chat(4, messages...)).replica()
	i := 0
	if home == e.addrs[1] {
		i = 1
	}
	if err := e.ours.Restart(t.Context(), i); err != nil {
		t.Fatal(err)
	}
	p.awaitScrapes(e.addrs...)
	a := p.must(chatPath, e.chat(4, messages...))
	if predicted, counted := a.matched(t), a.cached(t); predicted > counted {
		t.Errorf("after a restart %d tokens were predicted at %s and %d counted", predicted, a.replica(), counted)
	}
	await(t, "the new process to be used", func() bool {
		return p.must(chatPath, e.chat(4, message{"user", unique("new", 900)})).replica() == home
	})
}

// An engine that is full answers 503 at once. With a retry the request goes elsewhere, even one whose prompt it holds.
func (e *vllmFleet) testQueueFull(t *testing.T) {
	e.reset(t)
	// Without polling nothing tells that the engine is full but its answer.
	p := start(t, blind(e.addrs, "lb_retries 1\nlb_retry_match {\n\tmethod POST\n\texpression `{rp.status_code} == 503`\n}"))
	full := e.addrs[0]
	var held string
	await(t, "a prompt to be held by "+full, func() bool {
		held = e.chat(1, message{"user", unique("held", 600)})
		return p.must(chatPath, held).replica() == full
	})
	ctx, cancel := context.WithCancel(t.Context())
	var outside sync.WaitGroup
	defer outside.Wait()
	defer cancel()
	directly := func(ctx context.Context, tokens int) answer {
		r, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+full+chatPath, nil)
		if err != nil {
			return answer{err: err}
		}
		setBody(r, e.chat(tokens, message{"user", unique("outside", 100)}))
		return exchange(p.client, r)
	}
	for range mostInFlight { // none of them ends for thousands of steps, even if each is preempted now and then
		outside.Go(func() {
			for ctx.Err() == nil {
				directly(ctx, 3800)
			}
		})
	}
	await(t, "a full "+full, func() bool {
		return e.gauge(t, p.client, full, "num_requests_running")+e.gauge(t, p.client, full, "num_requests_waiting") == mostInFlight
	})
	refusal := directly(ctx, 1)
	if refusal.status != http.StatusServiceUnavailable {
		t.Fatalf("an engine with %d requests answers another with status %d, %v", mostInFlight, refusal.status, refusal.err)
	}
	if after := refusal.header.Get("Retry-After"); after != "" {
		t.Errorf("the refusal has Retry-After %q, which vLLM has not sent before", after)
	}
	if a := p.must(chatPath, held); a.replica() == full {
		t.Errorf("answered by %s, which is full", full)
	}
	if p.metric("caddy_kv_cache_retries_total") == 0 {
		t.Errorf("the prompt that %s holds was not tried there, so nothing was tested", full)
	}
	for range 6 {
		if a := p.must(chatPath, e.chat(1, message{"user", unique("refused", 300)})); a.replica() == full {
			t.Errorf("answered by %s, which is full", full)
		}
	}
}
