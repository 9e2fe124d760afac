// SPDX-License-Identifier: Apache-2.0

//go:build unix

package integration

import (
	"bufio"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strings"
	"testing"
)

const vllmModel = "tiny" // of the fleet that the tests start

// vllmChat is a request whose answer is the same each time.
func vllmChat(stream bool, tokens int, messages ...message) string {
	body := map[string]any{"model": vllmModel, "messages": messages, "max_tokens": tokens, "temperature": 0}
	if stream {
		body["stream"] = true
		body["stream_options"] = map[string]bool{"include_usage": true}
	}
	return asJSON(body)
}

// heard puts the text of a streamed answer together.
func heard(tb testing.TB, body []byte) string {
	tb.Helper()
	var b strings.Builder
	done := false
	for lines := bufio.NewScanner(strings.NewReader(string(body))); lines.Scan(); {
		data, found := strings.CutPrefix(lines.Text(), "data: ")
		if !found {
			continue
		}
		if data == "[DONE]" {
			done = true
			continue
		}
		var chunk struct {
			Choices []struct{ Delta message }
		}
		if err := json.Unmarshal([]byte(data), &chunk); err != nil {
			tb.Fatalf("chunk %q: %v", data, err)
		}
		for _, c := range chunk.Choices {
			b.WriteString(c.Delta.Content)
		}
	}
	if !done {
		tb.Error("the stream has no end")
	}
	return b.String()
}

// testExample puts the example configuration in front of the engines as it is: polling alone, no events.
func (e *vllmFleet) testExample(t *testing.T) {
	e.reset(t)
	p := startExample(t, e.addrs)
	t.Run("Answers", func(t *testing.T) { answersAreVLLMs(t, p) })
	t.Run("GrowingChats", func(t *testing.T) { growingVLLMChats(t, p, e.addrs) })
	t.Run("Prediction", func(t *testing.T) { predictedAndCounted(t, p, e.addrs) })
	p.awaitIdle()
}

// answersAreVLLMs compares answers through Caddy with those asked for directly.
func answersAreVLLMs(t *testing.T, p *proxy) {
	question := message{"user", text("a question", 1000)}
	first := p.must(chatPath, vllmChat(false, 24, question))
	second := p.must(chatPath, vllmChat(false, 24, question))
	if second.replica() != first.replica() || second.cached(t) < 800 {
		t.Errorf("the question went to %s and then to %s, where %d tokens were cached", first.replica(), second.replica(), second.cached(t))
	}
	direct := func(stream bool) answer {
		t.Helper()
		r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+first.replica()+chatPath, strings.NewReader(vllmChat(stream, 24, question)))
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Content-Type", "application/json")
		a := exchange(p.client, r)
		if err := a.bad(); err != nil {
			t.Fatal(err)
		}
		return a
	}
	want := direct(false).read(t)
	if got := second.read(t); got.Choices[0] != want.Choices[0] || got.Usage != want.Usage {
		t.Errorf("through Caddy: %+v\ndirectly: %+v", got, want)
	}
	streamed := p.must(chatPath, vllmChat(true, 24, question))
	if got, want := heard(t, streamed.body), heard(t, direct(true).body); got != want {
		t.Errorf("streamed through Caddy: %q\ndirectly: %q", got, want)
	}
	if kind := streamed.header.Get("Content-Type"); !strings.HasPrefix(kind, "text/event-stream") {
		t.Errorf("the stream's type is %q", kind)
	}
	for _, body := range []string{"{", `{"model":"none","messages":[]}`, `{"model":"` + vllmModel + `","messages":"x"}`} {
		if a := p.post(chatPath, body); a.err != nil || a.status < 400 || a.status >= 500 {
			t.Errorf("%s was answered with %d, %v", body, a.status, a.err)
		}
	}
}

// growingVLLMChats lets 6 chats take turns 8 times. Each begins with rules of its own, longer than a block of text:
// chats that begin with less are told apart by nothing, so all may find the same home, and there outgrow its cache.
func growingVLLMChats(t *testing.T, p *proxy, addrs []string) {
	p.awaitScrapes(addrs...) // which tell the size of that cache, and the length of a token
	chats := make([][]message, 6)
	for i := range chats {
		chats[i] = []message{{"system", text(fmt.Sprintf("rules of chat %d", i), 600)}}
	}
	before := make([]int, len(chats)) // prompt tokens of the turn before
	homes := make([]string, len(chats))
	var possible, cached int
	for turn := range 8 {
		for i := range chats {
			chats[i] = append(chats[i], message{"user", text(fmt.Sprintf("chat %d turn %d", i, turn), 250)})
			a := p.must(chatPath, vllmChat(false, 12, chats[i]...))
			r := a.read(t)
			if turn == 0 {
				homes[i] = a.replica()
			} else if a.replica() != homes[i] {
				t.Errorf("chat %d moved at turn %d from %s to %s; %d tokens of it were cached", i, turn, homes[i], a.replica(), r.Usage.Details.Cached)
			}
			possible += before[i] / poolBlock * poolBlock
			cached += r.Usage.Details.Cached
			before[i] = r.Usage.Prompt
			chats[i] = append(chats[i], message{"assistant", r.Choices[0].Message.Content})
		}
	}
	share := float64(cached) / float64(possible)
	t.Logf("%d of %d tokens that could be cached were: %.4f; the chats' homes: %v", cached, possible, share, homes)
	if share < 0.95 {
		t.Errorf("%.3f of the tokens that could be cached were, want 0.95", share)
	}
}

// predictedAndCounted compares what Caddy believes to be cached with what the engines count, over requests of
// several kinds at once.
func predictedAndCounted(t *testing.T, p *proxy, addrs []string) {
	hits := func() (predicted, counted float64) {
		p.awaitScrapes(addrs...)
		return p.metric("caddy_kv_cache_predicted_hit_tokens_total"), p.metric("caddy_kv_cache_engine_prefix_hit_tokens_total")
	}
	predictedBefore, countedBefore := hits()
	system := message{"system", text("the house rules", 700)}
	const requests = 120
	paths, bodies := make([]string, requests), make([]string, requests)
	random := rand.New(rand.NewPCG(1, 2))
	for i := range requests {
		paths[i] = chatPath
		switch name := text(fmt.Sprint("visitor ", random.IntN(12)), 200+100*random.IntN(8)); i % 4 {
		case 0:
			bodies[i] = vllmChat(false, 4, system, message{"user", name})
		case 1:
			bodies[i] = vllmChat(true, 4, message{"user", name})
		case 2:
			bodies[i] = vllmChat(false, 4, message{"user", text(fmt.Sprint("stranger ", i), 600)})
		case 3:
			paths[i] = "/v1/completions"
			bodies[i] = asJSON(map[string]any{"model": vllmModel, "prompt": name, "max_tokens": 4, "temperature": 0})
		}
	}
	inParallel(requests, 4, func(i int) {
		if err := p.post(paths[i], bodies[i]).bad(); err != nil {
			t.Errorf("request %d: %v", i, err)
		}
	})
	predicted, counted := hits()
	predicted, counted = predicted-predictedBefore, counted-countedBefore
	t.Logf("predicted %.0f cached tokens, the engines counted %.0f: %.3f", predicted, counted, predicted/counted)
	if ratio := predicted / counted; !(ratio > 0.7 && ratio < 1.3) {
		t.Errorf("predicted %.0f cached tokens, the engines counted %.0f", predicted, counted)
	}
}
