// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/enginesim"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/loopback"
)

// fast makes the simulated engines quick, so that tests don't wait for them.
var fast = enginesim.ServerConfig{Speed: 50}

// engines starts n simulated engines until the test ends.
func engines(tb testing.TB, n int, config enginesim.ServerConfig) enginesim.Fleet {
	tb.Helper()
	fleet := make(enginesim.Fleet, n)
	for i := range fleet {
		var s *enginesim.Server
		var err error
		for range 10 { // another process may take the address meanwhile
			config.Addr = loopback.FreeAddr(tb) // which stays ours while the engine is down
			if s, err = enginesim.StartServer(config); err == nil {
				break
			}
		}
		if err != nil {
			tb.Fatal(err)
		}
		tb.Cleanup(s.Close)
		fleet[i] = s
	}
	return fleet
}

// at returns the engine at an address.
func at(tb testing.TB, fleet enginesim.Fleet, addr string) *enginesim.Server {
	tb.Helper()
	for _, s := range fleet {
		if s.Addr() == addr {
			return s
		}
	}
	tb.Fatalf("no engine at %q", addr)
	return nil
}

// aware is a reverse_proxy by kv_cache_aware, polling often, with further options of the policy.
func aware(addrs []string, policy, options string) string {
	if !strings.Contains(policy, "metrics_interval") && !strings.Contains(policy, "metrics_off") {
		policy += "\nmetrics_interval 100ms"
	}
	return reverseProxy(addrs, "kv_cache_aware {\n"+policy+"\n}", options)
}

// blind is one without polling.
func blind(addrs []string, options string) string {
	return reverseProxy(addrs, "kv_cache_aware {\nmetrics_off\n}", options)
}

// reverseProxy is a reverse_proxy whose answers tell what was decided.
func reverseProxy(addrs []string, policy, options string) string {
	return fmt.Sprintf("reverse_proxy %s {\nlb_policy %s\n%s\n%s\n}\n", strings.Join(addrs, " "), policy, options, tell)
}

// textMark is in all text that these tests make, and nowhere else.
const textMark = " quoth "

// text returns about so many bytes that share no beginning with another name's text.
func text(name string, size int) string {
	var b strings.Builder
	for i := 0; b.Len() < size; i++ {
		fmt.Fprintf(&b, "%s%s%d. ", name, textMark, i)
	}
	return b.String()
}

// message is one of a chat.
type message struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

// chat is a request for a short answer.
func chat(messages ...message) string {
	return asJSON(map[string]any{"model": "sim", "messages": messages, "max_tokens": 4})
}

// ask is a chat of one message.
func ask(content string) string { return chat(message{"user", content}) }

// streamed asks for a streamed answer of so many tokens.
func streamed(content string, tokens int) string {
	return asJSON(map[string]any{
		"model": "sim", "messages": []message{{"user", content}}, "max_tokens": tokens,
		"stream": true, "stream_options": map[string]bool{"include_usage": true},
	})
}

func asJSON(v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		return err.Error() // only values made here are marshalled, and these can be
	}
	return string(b)
}

// usage is what an engine says of a request's tokens.
type usage struct {
	Prompt  int `json:"prompt_tokens"`
	Details struct {
		Cached int `json:"cached_tokens"`
	} `json:"prompt_tokens_details"`
}

// reply is a chat's answer.
type reply struct {
	Choices []struct{ Message message }
	Usage   usage
}

// read decodes a chat's answer.
func (a answer) read(tb testing.TB) reply {
	tb.Helper()
	var r reply
	if err := json.Unmarshal(a.body, &r); err != nil || len(r.Choices) == 0 {
		tb.Fatalf("answer %.300s: %v", a.body, err)
	}
	return r
}

// cached is the number of prompt tokens that the engine found in its cache.
func (a answer) cached(tb testing.TB) int {
	tb.Helper()
	return a.read(tb).Usage.Details.Cached
}

const chatPath = "/v1/chat/completions"

// talk chats and returns the answer, which must be good and of the replica that Caddy names.
func (p *proxy) talk(messages ...message) answer {
	p.tb.Helper()
	a := p.must(chatPath, chat(messages...))
	if named, answered := a.replica(), a.header.Get(enginesim.HeaderAddr); named != answered {
		p.tb.Fatalf("Caddy names replica %s, but %s answered", named, answered)
	}
	return a
}

// say is talk of one message.
func (p *proxy) say(content string) answer {
	p.tb.Helper()
	return p.talk(message{"user", content})
}

// stream is a streamed answer, read event by event.
type stream struct {
	tb     testing.TB
	resp   *http.Response
	lines  *bufio.Scanner
	cancel context.CancelFunc
	tokens int // events with a token so far
	ended  bool
}

// open asks for a stream and returns when its header is there.
func (p *proxy) open(content string, tokens int) *stream {
	p.tb.Helper()
	s, err := p.tryOpen(content, tokens)
	if err != nil {
		p.tb.Fatal(err)
	}
	return s
}

// tryOpen is open for any goroutine.
func (p *proxy) tryOpen(content string, tokens int) (*stream, error) {
	ctx, cancel := context.WithCancel(p.tb.Context())
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+p.addr+chatPath, strings.NewReader(streamed(content, tokens)))
	if err != nil {
		cancel()
		return nil, err
	}
	r.Header.Set("Content-Type", "application/json")
	resp, err := p.client.Do(r)
	if err != nil {
		cancel()
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		cancel()
		_ = resp.Body.Close()
		return nil, fmt.Errorf("status %d", resp.StatusCode)
	}
	s := &stream{tb: p.tb, resp: resp, lines: bufio.NewScanner(resp.Body), cancel: cancel}
	p.tb.Cleanup(s.abort)
	return s, nil
}

// abort leaves the stream.
func (s *stream) abort() {
	s.cancel()
	_ = s.resp.Body.Close()
}

// next reads on to the next token. It returns false at the stream's end, and its error if it was cut.
func (s *stream) next() (bool, error) {
	for s.lines.Scan() {
		data, found := strings.CutPrefix(s.lines.Text(), "data: ")
		switch {
		case !found || strings.Contains(data, `"role":"assistant"`):
		case data == "[DONE]":
			s.ended = true
		case strings.Contains(data, `"content":"`):
			s.tokens++
			return true, nil
		}
	}
	switch err := s.lines.Err(); {
	case err != nil:
		return false, err
	case !s.ended:
		return false, io.ErrUnexpectedEOF
	}
	return false, nil
}

// rest reads to the end.
func (s *stream) rest() error {
	for {
		if more, err := s.next(); !more {
			return err
		}
	}
}

func (s *stream) replica() string { return s.resp.Header.Get(replicaField) }

// inParallel calls do for 0 to n-1, so many at a time.
func inParallel(n, atOnce int, do func(i int)) {
	var group sync.WaitGroup
	places := make(chan struct{}, atOnce)
	for i := range n {
		places <- struct{}{}
		group.Go(func() {
			defer func() { <-places }()
			do(i)
		})
	}
	group.Wait()
}
