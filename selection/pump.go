// SPDX-License-Identifier: Apache-2.0

package selection

import (
	"sync"
	"time"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/plan"
)

// pump gives a scheduler the events that only time brings: a queue is believed
// to have drained. It runs while requests wait, and ends by itself, so that
// nothing has to stop it.
type pump struct {
	schedule *plan.Scheduler

	mu      sync.Mutex
	running bool
}

func newPump(s *plan.Scheduler) *pump { return &pump{schedule: s} }

// run starts the pump unless it runs.
func (p *pump) run() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.running {
		p.running = true
		p.arm()
	}
}

// arm sets the time of the next event, if anyone waits for it.
func (p *pump) arm() {
	now := time.Now()
	next, ok := p.schedule.Next(now)
	if !ok {
		p.running = false
		return
	}
	time.AfterFunc(next.Sub(now), func() {
		p.schedule.Event(time.Now())
		p.mu.Lock()
		defer p.mu.Unlock()
		p.arm()
	})
}
