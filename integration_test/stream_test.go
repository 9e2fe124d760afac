// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/enginesim"
)

// endless is more tokens than an engine makes in the time of a test.
const endless = 200_000

// Tokens reach the client while the engine makes further ones, and none is kept back on the way.
func TestStreamIsNotDelayed(t *testing.T) {
	fleet := engines(t, 2, enginesim.ServerConfig{Speed: 5})
	p := start(t, aware(fleet.Addrs(), "", ""))
	s := p.open(text("stream", 2000), endless)
	engine := at(t, fleet, s.replica())
	for range 20 {
		if more, err := s.next(); !more {
			t.Fatalf("the stream ended after %d tokens: %v", s.tokens, err)
		}
	}
	if st := engine.Stats(); st.Finished != 0 || st.Running != 1 {
		t.Errorf("after 20 tokens the engine has finished %d requests and runs %d", st.Finished, st.Running)
	}
	// The engine stands still, so everything it has made must come now.
	engine.Stall()
	for made := int(engine.Stats().GenerationTokens); s.tokens < made; {
		if more, err := s.next(); !more {
			t.Fatalf("the stream ended after %d of %d tokens: %v", s.tokens, made, err)
		}
	}
	engine.StallEnd()
	s.abort()
	await(t, "the engine to notice that the client left", func() bool {
		st := engine.Stats()
		return st.Running == 0 && st.Aborted == 1
	})
	p.awaitIdle()
}

// An engine that dies in the middle of a stream ends it at once, as an error, and gets no further request.
func TestEngineDiesMidStream(t *testing.T) {
	fleet := engines(t, 3, enginesim.ServerConfig{Speed: 5})
	p := start(t, aware(fleet.Addrs(), "", "lb_retries 2"))
	content := text("doomed", 3000)
	s := p.open(content, endless)
	if more, err := s.next(); !more {
		t.Fatal(err)
	}
	at(t, fleet, s.replica()).Stop()
	cut := make(chan error, 1)
	go func() { cut <- s.rest() }()
	select {
	case err := <-cut:
		if err == nil {
			t.Error("the stream ended as if it was complete")
		}
	case <-time.After(patience):
		t.Fatal("the client was not told that the engine died")
	}
	p.awaitRefused(s.replica())
	for i := range 10 {
		for _, c := range []string{content, text(fmt.Sprint("other ", i), 1000)} {
			if a := p.say(c); a.replica() == s.replica() {
				t.Errorf("request %d was answered by the dead replica", i)
			}
		}
	}
	p.awaitIdle()
}

// Clients that leave, before or after their first token, leave nothing behind.
func TestClientsLeave(t *testing.T) {
	const clients = 200
	fleet := engines(t, 3, enginesim.ServerConfig{Speed: 20})
	p := start(t, aware(fleet.Addrs(), "", ""))
	errs := make([]error, clients)
	inParallel(clients, 100, func(i int) {
		content := text(fmt.Sprint("client ", i%40), 500+100*(i%50))
		s, err := p.tryOpen(content, endless)
		if err != nil {
			errs[i] = err
			return
		}
		for range i % 4 {
			if more, err := s.next(); !more {
				errs[i] = fmt.Errorf("ended after %d tokens: %w", s.tokens, err)
			}
		}
		s.abort()
	})
	for i, err := range errs {
		if err != nil {
			t.Errorf("client %d: %v", i, err)
		}
	}
	p.awaitIdle()
	if n := p.metric("caddy_kv_cache_decisions_total"); n != clients {
		t.Errorf("%v decisions for %d requests", n, clients)
	}
	await(t, "the engines to be idle", func() bool {
		for _, s := range fleet {
			if st := s.Stats(); st.Running+st.Waiting > 0 {
				return false
			}
		}
		return true
	})
	p.say("all is well")
}

// Clients that leave before an answer began.
func TestClientsLeaveBeforeTheAnswer(t *testing.T) {
	fleet := engines(t, 2, fast)
	p := start(t, aware(fleet.Addrs(), "", ""))
	for _, s := range fleet {
		s.Stall()
	}
	c := *p.client
	c.Timeout = 300 * time.Millisecond
	inParallel(40, 40, func(i int) {
		r := p.request("POST", chatPath, strings.NewReader(ask(text(fmt.Sprint("client ", i), 5000))))
		if a := exchange(&c, r); a.err == nil {
			t.Errorf("client %d was answered by an engine that stands still", i)
		}
	})
	for _, s := range fleet {
		s.StallEnd()
	}
	p.awaitIdle()
	p.say("all is well")
}
