// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"time"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/enginesim"
)

// onArrival is a policy that binds every request when it comes.
type onArrival struct {
	choose   func(r *Request) int
	started  func(f *Fleet)
	finished func(r *Request)

	fleet    *Fleet
	inFlight []int
}

func (p *onArrival) Start(f *Fleet) {
	p.fleet, p.inFlight = f, make([]int, len(f.Engines))
	if p.started != nil {
		p.started(f)
	}
}

func (p *onArrival) Arrive(now time.Duration, r *Request) {
	i := p.choose(r)
	p.inFlight[i]++
	p.fleet.Send(now, r, i)
}

func (p *onArrival) Finished(_ time.Duration, r *Request) {
	p.inFlight[r.Replica]--
	if p.finished != nil {
		p.finished(r)
	}
}
func (p *onArrival) Scraped(time.Duration, int, enginesim.Stats) {}
func (p *onArrival) Next(time.Duration) (time.Duration, bool)    { return 0, false }
func (p *onArrival) Act(time.Duration)                           {}

// RoundRobin is Caddy's round_robin.
func RoundRobin() Policy {
	p, n := new(onArrival), -1
	p.choose = func(*Request) int { n++; return n % len(p.inFlight) }
	return p
}

// LeastConn is Caddy's least_conn.
func LeastConn() Policy {
	p, n := new(onArrival), 0
	p.choose = func(*Request) int {
		best := -1
		n++
		for i := range p.inFlight {
			j := (i + n) % len(p.inFlight)
			if best < 0 || p.inFlight[j] < p.inFlight[best] {
				best = j
			}
		}
		return best
	}
	return p
}
