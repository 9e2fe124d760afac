// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"net/http"
	"slices"
	"sync"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/fleet"
)

// Policy is a policy of a running config, as operators look at it.
type Policy interface {
	// Name is the policy's name, such as kv_cache_aware.
	Name() string
	// Fleet is what it chooses from.
	Fleet() *fleet.Fleet
	// Available tells whether Caddy itself lets the replica at an address be
	// chosen: its health checks pass and it is not full.
	Available(addr string) bool
	// Waiting is how many requests it holds back.
	Waiting() int
	// Recent lists up to limit decisions, the latest first.
	Recent(limit int) []Decision
	// Explain tells where a request would go and why, and books nothing. It
	// reads at most as much of the body as the policy looks at.
	Explain(r *http.Request) *Explanation
}

// shown are the policies of the running config, and during a reload those of
// two: the newest last.
var shown struct {
	sync.Mutex
	policies []Policy
}

// Show makes a policy known to the admin API until the returned function is
// called.
func Show(p Policy) (hide func()) {
	shown.Lock()
	defer shown.Unlock()
	shown.policies = append(shown.policies, p)
	return func() {
		shown.Lock()
		defer shown.Unlock()
		shown.policies = slices.DeleteFunc(shown.policies, func(o Policy) bool { return o == p })
	}
}

// Policies lists what is shown, each fleet once, in the order of their names.
// While a config is replaced, the newer policy of a name answers.
func Policies() []Policy {
	shown.Lock()
	all := slices.Clone(shown.policies)
	shown.Unlock()
	slices.Reverse(all)
	slices.SortStableFunc(all, func(a, b Policy) int { return compareNames(a.Fleet().Name, b.Fleet().Name) })
	return slices.CompactFunc(all, func(a, b Policy) bool { return a.Fleet().Name == b.Fleet().Name })
}

// compareNames orders by length first, so that default-10 follows default-9.
func compareNames(a, b string) int {
	switch {
	case len(a) != len(b):
		return len(a) - len(b)
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}
