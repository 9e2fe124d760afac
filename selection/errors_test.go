// SPDX-License-Identifier: Apache-2.0

package selection

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/fleet"
)

// bothPolicies runs a test with each policy, whose own core is told as well.
func bothPolicies(t *testing.T, test func(*testing.T, reverseproxy.Selector, *core)) {
	t.Run("kv_cache_aware", func(t *testing.T) {
		p := loadAware(t, `{"metrics": {"off": true}}`)
		test(t, p, &p.core)
	})
	t.Run("prefix_hash", func(t *testing.T) {
		p := loadHash(t, `{}`)
		test(t, p, &p.core)
	})
}

// A replica that answers errors at once looks idle; it must not draw what comes.
func TestErrorsAreNoReasonToCome(t *testing.T) {
	for _, tt := range []struct {
		status, most int // requests that it gets of 60
	}{{503, 1}, {500, 3}, {429, 3}} {
		t.Run(fmt.Sprint(tt.status), func(t *testing.T) {
			bothPolicies(t, func(t *testing.T, p reverseproxy.Selector, c *core) {
				pool := poolOf(3)
				bad, got := pool[1], 0
				for i := range 60 {
					r := complete(words(fmt.Sprint("prompt ", i), 2000))
					if p.Select(pool, r.Request, nil) != bad {
						r.answered(t, c, http.StatusOK)
						continue
					}
					got++
					r.header(tt.status, "30")
					r.left(t, c)
				}
				if got != tt.most {
					t.Errorf("the replica that answers %d got %d requests, want %d", tt.status, got, tt.most)
				}
				idle(t, c.fleet)
			})
		})
	}
}

// A bad request is its sender's fault, as often as it is repeated.
func TestBadRequestsAvoidNobody(t *testing.T) {
	bothPolicies(t, func(t *testing.T, p reverseproxy.Selector, c *core) {
		pool := poolOf(3)
		for range 20 {
			r := complete(words("bad", 2000))
			p.Select(pool, r.Request, nil)
			r.header(http.StatusBadRequest, "30")
			r.left(t, c)
		}
		for _, m := range c.fleet.Members() {
			if a := m.Avoided(time.Now()); a != fleet.Eligible {
				t.Errorf("%s is avoided: %s", m.Addr, a)
			}
		}
	})
}

// Where all replicas refuse, the request goes to one of them.
func TestAllAnswerErrors(t *testing.T) {
	bothPolicies(t, func(t *testing.T, p reverseproxy.Selector, c *core) {
		pool := poolOf(2)
		for i := range 20 {
			r := complete(words(fmt.Sprint("prompt ", i), 2000))
			if p.Select(pool, r.Request, nil) == nil {
				t.Fatalf("request %d was refused", i)
			}
			r.header(http.StatusServiceUnavailable, "60")
			r.left(t, c)
		}
	})
}

// The answer to an attempt that was retried stays among the placeholders when
// the next attempt gets none; it is not the second replica's.
func TestStatusOfAnEarlierAttempt(t *testing.T) {
	p := loadAware(t, `{"metrics": {"off": true}}`)
	pool := poolOf(3)
	c := complete(words("prompt", 2000))
	first := p.Select(pool, c.Request, nil)
	c.header(http.StatusBadRequest, "")
	second := p.Select(pool, c.Request, nil)
	if got := p.fleet.Replica(first.Dial, time.Now()).Avoided(time.Now()); got != fleet.Eligible {
		t.Errorf("the replica that judged the request is %s", got)
	}
	p.Select(pool, c.Request, nil) // the second did not answer
	if got := p.fleet.Replica(second.Dial, time.Now()).Avoided(time.Now()); got != fleet.Failing {
		t.Errorf("the replica that did not answer is %s", got)
	}
	c.left(t, &p.core)
	idle(t, p.fleet)
}

func TestRetryAfter(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for text, want := range map[string]time.Duration{
		"":                              0,
		"0":                             0,
		"17":                            17 * time.Second,
		"2147483647":                    2147483647 * time.Second,
		"99999999999999999999":          0,
		"-1":                            0,
		"1.5":                           0,
		"soon":                          0,
		"Fri, 02 Jan 2026 03:04:35 GMT": 30 * time.Second,
		"Fri, 02 Jan 2026 03:03:35 GMT": 0,
		"1, 2":                          0,
	} {
		if got := retryAfter(text, now); got != want {
			t.Errorf("%q is %v, want %v", text, got, want)
		}
	}
}

// Requests without a prompt keep to the replicas that those with one may get.
func TestFallbackLeavesOutTheAvoided(t *testing.T) {
	bothPolicies(t, func(t *testing.T, p reverseproxy.Selector, c *core) {
		pool := poolOf(3)
		models := func() *reverseproxy.Upstream {
			r := newClient(httptest.NewRequest(http.MethodGet, "/v1/models", nil))
			defer r.answered(t, c, http.StatusOK)
			return p.Select(pool, r.Request, nil)
		}
		models() // so that the replicas are known
		now := time.Now()
		c.fleet.Replica(pool[0].Dial, now).Drain(true)
		c.fleet.Replica(pool[1].Dial, now).Failed(now)
		for range 20 {
			if u := models(); u != pool[2] {
				t.Fatalf("went to %v, want %v", u, pool[2])
			}
		}
		c.fleet.Replica(pool[2].Dial, now).Drain(true)
		if u := models(); u == nil {
			t.Error("refused where all are avoided")
		}
	})
}

// In shadow mode the other policy chooses as it would alone, but not what an
// operator has drained.
func TestOtherPolicyLeavesOutTheDrained(t *testing.T) {
	p := loadAware(t, `{"metrics": {"off": true}, "other": {"policy": "first"}}`)
	pool := poolOf(3)
	ask := func() *reverseproxy.Upstream {
		c := complete(words("prompt", 2000))
		defer c.answered(t, &p.core, http.StatusOK)
		return p.Select(pool, c.Request, nil)
	}
	ask()
	now := time.Now()
	p.fleet.Replica(pool[0].Dial, now).Drain(true)
	p.fleet.Replica(pool[1].Dial, now).Failed(now)
	if u := ask(); u != pool[1] {
		t.Errorf("went to %v, want %v", u, pool[1])
	}
}

// A session leaves the replica it is pinned to when that answers errors.
func TestPinnedReplicaAnswersErrors(t *testing.T) {
	p := loadAware(t, `{"metrics": {"off": true}, "pin_header": "X-Session-ID"}`)
	pool := poolOf(3)
	ask := func(status int) *reverseproxy.Upstream {
		c := complete(words("prompt", 2000))
		c.Header.Set("X-Session-ID", "a")
		u := p.Select(pool, c.Request, nil)
		c.answered(t, &p.core, status)
		return u
	}
	home := ask(http.StatusOK)
	if u := ask(http.StatusServiceUnavailable); u != home {
		t.Fatalf("went to %v, not to %v", u, home)
	}
	if u := ask(http.StatusOK); u == home {
		t.Error("the session stays at a replica that answers errors")
	}
}
