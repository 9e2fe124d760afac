// SPDX-License-Identifier: Apache-2.0

package selection

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"testing"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/plan"
)

// choice is where prefix_hash sends a prompt on an idle fleet, and why.
func choiceOf(t *testing.T, p *PrefixHash, pool reverseproxy.UpstreamPool, c *client) (string, Reason) {
	t.Helper()
	u := p.Select(pool, c.Request, nil)
	if u == nil {
		t.Fatal("refused")
	}
	reason := c.decisionIn(&p.core).latest().reason
	c.answered(t, &p.core, http.StatusOK)
	return u.Dial, reason
}

// When a replica leaves, only the prompts whose home it was move; when it comes
// back, they return.
func TestFewPromptsMove(t *testing.T) {
	p := loadHash(t, `{"prefix": 1024}`)
	rng := rand.New(rand.NewPCG(3, 4))
	pool := poolOf(9)
	homes := make(map[int]string)
	counts := make(map[string]int)
	const prompts = 300
	for i := range prompts {
		homes[i], _ = choiceOf(t, p, pool, complete(words(fmt.Sprint(i), 2000)))
		counts[homes[i]]++
	}
	for _, u := range pool {
		if n := counts[u.Dial]; n < prompts/9/2 || n > prompts/9*2 {
			t.Errorf("%s is the home of %d of %d prompts", u.Dial, n, prompts)
		}
	}
	for range 5 {
		smaller := slices.Clone(pool)
		gone := make(map[string]bool)
		for range 1 + rng.IntN(3) {
			at := rng.IntN(len(smaller))
			gone[smaller[at].Dial] = true
			smaller = slices.Delete(smaller, at, at+1)
		}
		rng.Shuffle(len(smaller), func(i, j int) { smaller[i], smaller[j] = smaller[j], smaller[i] })
		for i := range prompts {
			now, _ := choiceOf(t, p, smaller, complete(words(fmt.Sprint(i), 2000)))
			if moved := now != homes[i]; moved != gone[homes[i]] {
				t.Fatalf("prompt %d went from %s to %s, without %v", i, homes[i], now, gone)
			}
		}
	}
}

// Two Caddys with the same configuration agree, in whatever order they list
// the replicas; with another seed they don't.
func TestCaddysAgree(t *testing.T) {
	for _, config := range []string{`{}`, `{"prefix": 4096}`, `{"seed": "shared"}`, `{"header": "X-Tenant"}`} {
		a, b := loadHash(t, config), loadHash(t, config)
		other := loadHash(t, `{"seed": "another"}`)
		pool := poolOf(7)
		reversed := slices.Clone(pool)
		slices.Reverse(reversed)
		differ := 0
		for i := range 100 {
			text := words("system", 3000) + words(fmt.Sprint(i), 3000)
			ask := func() *client {
				c := complete(text)
				if i%2 == 0 {
					c.Header.Set("X-Tenant", fmt.Sprint(i/10))
				}
				return c
			}
			atA, _ := choiceOf(t, a, pool, ask())
			atB, _ := choiceOf(t, b, reversed, ask())
			if atA != atB {
				t.Errorf("%s: prompt %d goes to %s and %s", config, i, atA, atB)
			}
			if atOther, _ := choiceOf(t, other, pool, ask()); atOther != atA {
				differ++
			}
		}
		if differ < 50 {
			t.Errorf("%s: with another seed only %d of 100 prompts have another home", config, differ)
		}
	}
}

// A home that is over its bound is passed over for the same second home each
// time, and taken again once it has less.
func TestOverflowIsStable(t *testing.T) {
	p := loadHash(t, `{"prefix": 1024, "slack": 3000}`)
	pool := poolOf(5)
	text := words("popular", 8000) // about 2,000 tokens
	home, reason := choiceOf(t, p, pool, complete(text))
	if reason != ReasonHome {
		t.Errorf("on an idle fleet the reason is %s", reason)
	}
	var open []*client
	var order []string
	for range 30 {
		c := complete(text)
		u := p.Select(pool, c.Request, nil)
		open = append(open, c)
		if want := ReasonOverflow; u.Dial != home && c.decisionIn(&p.core).latest().reason != want {
			t.Errorf("away from home the reason is %s", c.decisionIn(&p.core).latest().reason)
		}
		if !slices.Contains(order, u.Dial) {
			order = append(order, u.Dial)
		}
		most, sum := 0.0, 0.0
		for _, m := range p.fleet.Members() {
			most, sum = max(most, m.Outstanding()), sum+m.Outstanding()
		}
		// The last request may lift a replica over its bound by its own length.
		if mean := sum / 5; most > max(1.25*mean, mean+3000)+2100 {
			t.Errorf("%v tokens outstanding at one replica, %v in the mean", most, mean)
		}
	}
	if len(order) < 3 || order[0] != home {
		t.Fatalf("the load went to %v from home %s", order, home)
	}
	for _, c := range open {
		c.left(t, &p.core)
	}
	last := open[len(open)-1].decisionIn(&p.core).latest().replica.Addr
	if again, _ := choiceOf(t, p, pool, complete(text)); again != last {
		t.Errorf("a moment later at %s, but the last one was at %s", again, last)
	}
	p.stays = plan.NewStays() // some minutes later
	if again, reason := choiceOf(t, p, pool, complete(text)); again != home || reason != ReasonHome {
		t.Errorf("afterwards at %s (%s), home is %s", again, reason, home)
	}
	p.stays = plan.NewStays()
	// The order is the prompt's own: without the home, the second home leads.
	without := slices.DeleteFunc(slices.Clone(pool), func(u *reverseproxy.Upstream) bool { return u.Dial == home })
	if second, _ := choiceOf(t, p, without, complete(text)); second != order[1] {
		t.Errorf("the second home is %s, but the overflow went to %s", second, order[1])
	}
	idle(t, p.fleet)
}

// The header makes the key, whatever the body is.
func TestHeaderKey(t *testing.T) {
	p := loadHash(t, `{"header": "X-Tenant"}`)
	pool := poolOf(8)
	seen := make(map[string]bool)
	for tenant := range 20 {
		home := ""
		for i, c := range []*client{
			complete(words("one", 4000)), complete(words("two", 4000)), post("/v1/completions", "no prompt"), post("/v1/models", ""),
		} {
			c.Header.Set("X-Tenant", fmt.Sprint("tenant", tenant))
			at, reason := choiceOf(t, p, pool, c)
			if reason != ReasonHome {
				t.Errorf("request %d: reason is %s", i, reason)
			}
			if i > 0 && at != home {
				t.Errorf("request %d of tenant %d went to %s, not to %s", i, tenant, at, home)
			}
			home = at
		}
		seen[home] = true
	}
	if len(seen) < 5 {
		t.Errorf("20 tenants live at %d of 8 replicas", len(seen))
	}
	if _, reason := choiceOf(t, p, pool, post("/v1/models", "")); reason == ReasonHome {
		t.Error("a request without header or prompt is not the fallback's")
	}
}
