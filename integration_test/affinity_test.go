// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"fmt"
	"testing"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/enginesim"
)

func TestSamePromptSameReplica(t *testing.T) {
	for _, policy := range []string{"kv_cache_aware", "prefix_hash"} {
		t.Run(policy, func(t *testing.T) {
			fleet := engines(t, 3, fast)
			p := start(t, reverseProxy(fleet.Addrs(), policy, ""))
			for prompt := range 6 {
				content := text(fmt.Sprintf("prompt %d", prompt), 3000)
				first := p.say(content)
				if n := first.cached(t); n != 0 {
					t.Errorf("a new prompt has %d cached tokens", n)
				}
				for range 3 {
					again := p.say(content)
					if again.replica() != first.replica() {
						t.Fatalf("the prompt went to %s and then to %s (%s)", first.replica(), again.replica(), again.reason())
					}
					// The engine does not cache the last block it was not given in full.
					if u := again.read(t).Usage; u.Details.Cached < u.Prompt-2*enginesim.DefaultBlockTokens {
						t.Errorf("%d of %d tokens were cached", u.Details.Cached, u.Prompt)
					}
				}
			}
		})
	}
}

// Conversations that grow in turn find their cache at every turn, whoever talks in between.
func TestGrowingChats(t *testing.T) {
	const sessions, turns = 6, 8
	fleet := engines(t, 3, fast)
	p := start(t, aware(fleet.Addrs(), "", ""))
	chats := make([][]message, sessions)
	homes := make([]string, sessions)
	var possible, cached int
	for turn := range turns {
		for i := range chats {
			name := fmt.Sprintf("session %d turn %d", i, turn)
			chats[i] = append(chats[i], message{"user", text(name, 800)})
			a := p.talk(chats[i]...)
			r := a.read(t)
			if turn == 0 {
				homes[i] = a.replica()
			} else if a.replica() != homes[i] {
				t.Errorf("session %d moved at turn %d from %s to %s (%s)", i, turn, homes[i], a.replica(), a.reason())
			}
			if turn > 0 {
				possible += heldBefore(chats[i])
				cached += r.Usage.Details.Cached
				if predicted := a.matched(t); predicted < r.Usage.Details.Cached/2 || predicted > r.Usage.Prompt {
					t.Errorf("session %d turn %d: predicted %d cached tokens of %d, the engine counted %d",
						i, turn, predicted, r.Usage.Prompt, r.Usage.Details.Cached)
				}
			}
			chats[i] = append(chats[i], message{"assistant", r.Choices[0].Message.Content})
		}
	}
	if share := float64(cached) / float64(possible); share < 0.95 {
		t.Errorf("%.3f of the tokens that could be cached were, want 0.95", share)
	}
}

// New sessions are spread over an idle fleet, with no more to go by than the order of each prompt.
func TestNewSessionsSpread(t *testing.T) {
	fleet := engines(t, 3, fast)
	p := start(t, aware(fleet.Addrs(), "", ""))
	used := make(map[string]int)
	for i := range 60 {
		used[p.say(text(fmt.Sprint("session ", i), 1500)).replica()]++
	}
	for _, addr := range fleet.Addrs() {
		if used[addr] < 3 { // of 20 on average
			t.Errorf("%s got %d of 60 new sessions", addr, used[addr])
		}
	}
}

// heldBefore estimates, from below, the tokens in whole blocks that a chat had before its last message.
func heldBefore(messages []message) int {
	bytes := 0
	for _, m := range messages[:len(messages)-1] {
		bytes += len(m.Content)
	}
	tokens := bytes / enginesim.DefaultBytesPerToken
	return tokens / enginesim.DefaultBlockTokens * enginesim.DefaultBlockTokens
}

// Two Caddys with the same configuration agree, and know nothing of each other.
func TestTwoCaddysAgree(t *testing.T) {
	instant := fast
	instant.Instant = true
	fleet := engines(t, 4, instant)
	site := reverseProxy(fleet.Addrs(), "prefix_hash {\nprefix 2KiB\n}", "")
	one, two := start(t, site), start(t, site)
	used := make(map[string]int)
	for i := range 200 {
		content := text(fmt.Sprintf("prompt %d", i), 3000)
		a, b := one.say(content), two.say(content)
		if a.replica() != b.replica() {
			t.Errorf("prompt %d: one Caddy chose %s and the other %s", i, a.replica(), b.replica())
		}
		used[a.replica()]++
	}
	for _, addr := range fleet.Addrs() {
		if n := used[addr]; n < 20 || n > 80 {
			t.Errorf("%s got %d of 200 prompts", addr, n)
		}
	}
}

// A header keeps a session at its replica whatever its prompts are.
func TestPinnedSession(t *testing.T) {
	fleet := engines(t, 3, fast)
	p := start(t, aware(fleet.Addrs(), "pin_header X-Session-ID", ""))
	home := make(map[string]string)
	for i := range 30 {
		session := fmt.Sprint("s", i%3)
		r := p.request("POST", chatPath, nil)
		setBody(r, ask(text(fmt.Sprint("prompt ", i), 1000)))
		r.Header.Set("X-Session-ID", session)
		a := exchange(p.client, r)
		if err := a.bad(); err != nil {
			t.Fatal(err)
		}
		if i < 3 {
			home[session] = a.replica()
		} else if a.replica() != home[session] || a.reason() != "pinned" {
			t.Errorf("session %s went to %s (%s), its home is %s", session, a.replica(), a.reason(), home[session])
		}
	}
}
