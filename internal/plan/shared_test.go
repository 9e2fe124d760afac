// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"testing"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/fleet"
)

// share has each engine answer requests that nobody here sent.
func (w *world) share() {
	for _, e := range w.engines {
		e.tokens += 10
	}
	w.scrape()
}

// homeOf is the place of a key's home.
func (w *world) homeOf(key uint64) int {
	home := 0
	for i, e := range w.engines {
		if Rendezvous(key, e.replica.ID) > Rendezvous(key, w.engines[home].replica.ID) {
			home = i
		}
	}
	return home
}

type nothingKnown struct{}

func (nothingKnown) Held(*fleet.Replica, float64) float64 { return 0 }

// Where others send requests as well, a prompt that is known nowhere goes to its
// home, where the others would have sent it, unless that has much more to do.
func TestMeetAtHome(t *testing.T) {
	chain := []uint64{1, 2, 3, 4, 5, 6, 7, 8, 9, 10}
	for _, c := range []struct {
		name   string
		shared bool
		queued float64 // at the home
		known  int     // blocks that another replica is known to hold
		holder Holder
		home   bool
	}{
		{"idle", true, 0, 0, nil, true},
		{"the home has something to do", true, 3000, 0, nil, true},
		{"the home has much to do", true, 5000, 0, nil, false},
		{"some of it is known elsewhere", true, 0, 1, nil, true}, // 500 tokens that count five times
		{"most of it is known elsewhere", true, 0, 9, nil, false},
		{"nobody else", false, 3000, 0, nil, false},
		{"events tell what others left", true, 3000, 0, nothingKnown{}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(4)
			w.s.Terms = BindOnArrival
			if c.shared {
				w.share()
			}
			// A block is a tenth of the prompt here.
			r := w.caller(5000, chain...)
			r.PerBlock, r.Holder = 500, c.holder
			home := w.homeOf(r.Key)
			other := (home + 1) % len(w.engines)
			if c.queued > 0 {
				w.engines[home].replica.Reserve(&fleet.Reservation{Prompt: c.queued, Uncached: c.queued}, w.now)
			}
			w.engines[other].replica.Holds(chain[:c.known])
			away := w.s.Explain(&r.Request, w.now).Options[other].Costs.Away
			if !w.s.Submit(&r.Request, w.now) {
				t.Fatal("the request waits")
			}
			if got := r.choice.Index == home; got != c.home {
				t.Errorf("sent to the home %v, want %v", got, c.home)
			}
			if want := min(awayMost, 5000-500*float64(c.known)); c.shared && c.holder == nil && away != want || (!c.shared || c.holder != nil) && away != 0 {
				t.Errorf("to be away costs %v, want %v where others send, too, and no events tell", away, want)
			}
		})
	}
}

// A replica that is avoided, or does not serve the model, is home to nobody: the
// next in the prompt's order is, though another has less to do.
func TestHomeIsEligible(t *testing.T) {
	for _, c := range []struct {
		name  string
		unfit func(w *world, r *caller, home int)
	}{
		{"drained", func(w *world, _ *caller, home int) { w.engines[home].replica.Drain(true) }},
		{"serves another model", func(_ *world, r *caller, home int) {
			r.Serves = []bool{true, true, true, true}
			r.Serves[home] = false
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(4)
			w.s.Terms = BindOnArrival
			w.share()
			r := w.caller(5000, 1, 2, 3)
			home := w.homeOf(r.Key)
			c.unfit(w, r, home)
			next := (home + 1) % len(w.engines)
			for i, e := range w.engines {
				if i != home && Rendezvous(r.Key, e.replica.ID) > Rendezvous(r.Key, w.engines[next].replica.ID) {
					next = i
				}
			}
			w.engines[next].replica.Reserve(&fleet.Reservation{Prompt: 2000, Uncached: 2000}, w.now)
			if !w.s.Submit(&r.Request, w.now) || r.choice.Index != next {
				t.Errorf("sent to replica %d, want %d, the next after %d", r.choice.Index, next, home)
			}
		})
	}
}
