// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"testing"
	"time"

	"github.com/seed-2fa47a1e/caddy-kv-cache/metrics"
)

// aside books a request that the engine computes nothing for.
func (b *bench) aside() *Reservation {
	r := &Reservation{Aside: true}
	b.replica.Reserve(r, b.now)
	return r
}

func still(running, waiting float64) metrics.Snapshot {
	return metrics.Snapshot{
		FirstTokens: known(5), GenerationTokens: known(7), PromptTokens: known(100),
		Running: known(running), Waiting: known(waiting),
	}
}

// A list of models that is answered while prompts wait says nothing of them.
func TestAsideHasNoFirstToken(t *testing.T) {
	b := newBench(t, Config{})
	b.scrape(still(0, 0))
	for range 4 {
		defer b.send(20_000, 20_000).Abort(b.now)
	}
	before := b.load().Queue
	b.aside().Finish(b.now)
	b.aside().Abort(b.now)
	if l := b.load(); l.Queue != before || l.InFlight != 4 {
		t.Errorf("%v tokens are queued by %v requests; %v by 4 before the list was answered", l.Queue, l.InFlight, before)
	}
	b.scrape(still(1, 3))
	if l := b.load(); l.Queue != before || !l.QueueKnown || l.Lost != 0 {
		t.Errorf("by a page that counts the four: %v tokens queued (known: %v), %v lost; want %v", l.Queue, l.QueueKnown, l.Lost, before)
	}
}

// Nor do websockets that are idle: no counter moves for them, and no engine has
// them running.
func TestIdleWebsocketsAreNoHang(t *testing.T) {
	b := newBench(t, Config{})
	b.scrape(still(0, 0))
	var open []*Reservation
	for range 2 * strandedLeast {
		open = append(open, b.aside())
	}
	for range 60 {
		b.pass(time.Second)
		b.scrape(still(0, 0))
	}
	b.wantAvoid(Eligible, "with idle websockets")
	r := b.send(1000, 1000)
	b.pass(time.Second / 10)
	b.scrape(still(0, 1))
	b.wantAvoid(Eligible, "when a request has come a moment ago")
	r.Finish(b.now)

	b.replica.Unavailable(b.now) // and back
	if room := b.load().Room; room != warmStep {
		t.Errorf("beside idle websockets a replica that warms up has room for %d, want %d", room, warmStep)
	}
	for _, r := range open {
		r.Finish(b.now)
	}
	if room := b.load().Room; room != warmStep {
		t.Errorf("when websockets have ended it has room for %d, want %d", room, warmStep)
	}
}

// A front end that still answers what it can does not show that the engine works.
func TestAsideIsNoSignOfLife(t *testing.T) {
	b := newBench(t, Config{})
	b.scrape(still(0, 0))
	r := b.send(100, 100)
	for range 14 {
		b.pass(time.Second)
		b.aside().Finish(b.now)
		b.scrape(still(1, 0))
	}
	b.wantAvoid(Hung, "with a list of models answered each second")
	r.Abort(b.now)
}
