// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"time"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/enginesim"
)

// caddys are several Caddys in front of one fleet. Each has a policy of its own,
// which knows nothing of what the others send, and each request comes to one of
// them by chance.
type caddys []Policy

// behind is a contender's policy as the setup wants it.
func (s Setup) behind(c Contender) Policy {
	if s.Caddys < 2 {
		return c.New()
	}
	all := make(caddys, s.Caddys)
	for i := range all {
		all[i] = c.New()
	}
	return all
}

// of is the Caddy that a request comes to. A retry comes to the same.
func (all caddys) of(r *Request) Policy {
	const golden = 0x9e3779b97f4a7c15 // spreads numbers in a row
	return all[uint64(r.Number+1)*golden>>33%uint64(len(all))]
}

// Start implements Policy.
func (all caddys) Start(f *Fleet) {
	for _, p := range all {
		p.Start(f)
	}
}

// Arrive implements Policy.
func (all caddys) Arrive(now time.Duration, r *Request) { all.of(r).Arrive(now, r) }

// FirstToken implements Policy.
func (all caddys) FirstToken(now time.Duration, r *Request) { all.of(r).FirstToken(now, r) }

// Finished implements Policy.
func (all caddys) Finished(now time.Duration, r *Request) { all.of(r).Finished(now, r) }

// Lost implements Policy.
func (all caddys) Lost(now time.Duration, r *Request) { all.of(r).Lost(now, r) }

// Changed implements Policy.
func (all caddys) Changed(now time.Duration, replica int) {
	for _, p := range all {
		p.Changed(now, replica)
	}
}

// Scraped implements Policy.
func (all caddys) Scraped(now time.Duration, replica int, s enginesim.Stats) {
	for _, p := range all {
		p.Scraped(now, replica, s)
	}
}

// Next implements Policy.
func (all caddys) Next(now time.Duration) (next time.Duration, any bool) {
	for _, p := range all {
		if t, ok := p.Next(now); ok && (!any || t < next) {
			next, any = t, true
		}
	}
	return next, any
}

// Act implements Policy.
func (all caddys) Act(now time.Duration) {
	for _, p := range all {
		p.Act(now)
	}
}
