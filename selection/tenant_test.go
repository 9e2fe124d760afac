// SPDX-License-Identifier: Apache-2.0

package selection

import (
	"fmt"
	"net/http"
	"slices"
	"testing"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

const tenantByHeader = `{"metrics": {"off": true}, "tenant": "{http.request.header.Authorization}"}`

// from asks for the completion of a prompt as a tenant, and returns what was decided.
func from(t *testing.T, p reverseproxy.Selector, c *core, pool reverseproxy.UpstreamPool, tenant, text string) (*reverseproxy.Upstream, *decision) {
	t.Helper()
	r := complete(text)
	if tenant != "" {
		r.Header.Set("Authorization", tenant)
	}
	u := p.Select(pool, r.Request, nil)
	d := r.decisionIn(c)
	r.answered(t, c, http.StatusOK)
	return u, d
}

// What one tenant has asked is not to be seen from what becomes of another's request.
func TestTenantsShareNoBelief(t *testing.T) {
	p := loadAware(t, tenantByHeader)
	pool := poolOf(4)
	text := words("a secret that somebody guesses", 8000)
	home, d := from(t, p, &p.core, pool, "Bearer a", text)
	if d.latest().reason != ReasonNoMatch {
		t.Fatalf("the first request's reason is %s", d.latest().reason)
	}
	for _, tt := range []struct {
		tenant string
		match  bool
	}{{"Bearer b", false}, {"", false}, {"Bearer a", true}, {"Bearer b", true}, {"", true}} {
		u, d := from(t, p, &p.core, pool, tt.tenant, text)
		if a := d.latest(); (a.reason == ReasonMatch) != tt.match || (a.Hit > 0) != tt.match {
			t.Errorf("%q: %s, %v tokens matched", tt.tenant, a.reason, a.Hit)
		}
		if tt.tenant == "Bearer a" && u != home {
			t.Errorf("%q went to %v, not to its home %v", tt.tenant, u, home)
		}
	}
}

// A session's home is its tenant's own, too.
func TestTenantsShareNoPins(t *testing.T) {
	p := loadAware(t, `{"metrics": {"off": true}, "pin_header": "X-Session-ID", "tenant": "{http.request.header.Authorization}"}`)
	pool := poolOf(4)
	for _, tt := range []struct {
		tenant string
		pinned bool
	}{{"a", false}, {"b", false}, {"a", true}, {"b", true}} {
		c := complete(words("prompt", 2000))
		c.Header.Set("X-Session-ID", "1")
		c.Header.Set("Authorization", tt.tenant)
		p.Select(pool, c.Request, nil)
		if reason := c.decisionIn(&p.core).latest().reason; (reason == ReasonPinned) != tt.pinned {
			t.Errorf("a request of tenant %s: %s", tt.tenant, reason)
		}
		c.answered(t, &p.core, http.StatusOK)
	}
}

// Homes of prompts, and of a header's values, are a tenant's own.
func TestTenantsHaveOtherHomes(t *testing.T) {
	for _, config := range []string{
		`{"tenant": "{http.request.header.Authorization}"}`,
		`{"tenant": "{http.request.header.Authorization}", "header": "X-Session-ID"}`,
	} {
		p := loadHash(t, config)
		pool := poolOf(8)
		homes := make(map[*reverseproxy.Upstream]bool)
		for i := range 40 {
			ask := func() *reverseproxy.Upstream {
				r := complete(words("prompt", 4000))
				r.Header.Set("X-Session-ID", "same")
				r.Header.Set("Authorization", fmt.Sprint("tenant ", i))
				u := p.Select(pool, r.Request, nil)
				r.answered(t, &p.core, http.StatusOK)
				return u
			}
			home := ask()
			if again := ask(); again != home {
				t.Errorf("%s: tenant %d went to %v, then to %v", config, i, home, again)
			}
			homes[home] = true
		}
		if len(homes) < 4 {
			t.Errorf("%s: 40 tenants have but %d homes", config, len(homes))
		}
	}
}

// Without a value the chain is the one of a policy that knows no tenants, so
// that Caddys with and without the option agree on it.
func TestNoTenant(t *testing.T) {
	chain := func(config, tenant string) []uint64 {
		p := loadHash(t, config)
		_, d := from(t, p, &p.core, poolOf(2), tenant, words("prompt", 4000))
		return d.prompt.Chain
	}
	plain := chain(`{}`, "Bearer a")
	if len(plain) == 0 || !slices.Equal(plain, chain(`{"tenant": "{http.request.header.Authorization}"}`, "")) {
		t.Error("a request without a tenant is not hashed like one that has none by configuration")
	}
	if slices.Equal(plain, chain(`{"tenant": "{http.request.header.Authorization}"}`, "Bearer a")) {
		t.Error("a tenant's prompts are hashed like everybody's")
	}
	if slices.Equal(plain, chain(`{"tenant": "site-1"}`, "")) {
		t.Error("text without placeholders does not count")
	}
}

// Explaining goes by the tenant of the request that is explained.
func TestExplainKnowsTheTenant(t *testing.T) {
	p := loadAware(t, tenantByHeader)
	pool := poolOf(2)
	text := words("prompt", 8000)
	home, _ := from(t, p, &p.core, pool, "Bearer a", text)
	for tenant, want := range map[string]Reason{"Bearer a": ReasonMatch, "Bearer b": ReasonNoMatch} {
		r := complete(text)
		r.Header.Set("Authorization", tenant)
		x := p.explain(r.Request)
		if x.Reason != string(want) {
			t.Errorf("%s: %s at %s, want %s", tenant, x.Reason, x.Replica, want)
		}
		if want == ReasonMatch && x.Replica != home.Dial {
			t.Errorf("%s: %s, want %s", tenant, x.Replica, home.Dial)
		}
	}
}
