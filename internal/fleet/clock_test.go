// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"math/rand/v2"
	"reflect"
	"testing"
	"time"
	"unsafe"

	"github.com/seed-2fa47a1e/caddy-kv-cache/metrics"
)

// stepped is a time that was read after the clock was set by d: its wall clock
// is moved, its monotonic reading is not.
func stepped(t time.Time, d time.Duration) time.Time {
	fields := (*[2]uint64)(unsafe.Pointer(&t)) // of time.Time: wall, and the monotonic reading
	fields[0] += uint64(int64(d/time.Second)) << 30
	return t
}

func TestStepped(t *testing.T) {
	now := time.Now()
	for _, d := range []time.Duration{time.Hour, -time.Hour} {
		if s := stepped(now, d); s.Sub(now) != 0 || s.Unix()-now.Unix() != int64(d/time.Second) {
			t.Fatalf("a clock set by %v makes %v of %v", d, s, now)
		}
	}
}

// A clock that is set changes nothing: what is seen through one that jumps back
// and forth is what is seen through a steady one.
func TestClockJumps(t *testing.T) {
	random := rand.New(rand.NewPCG(7, 8))
	f := NewRegistry().New(Config{}, []string{"steady", "jumping"})
	begin := time.Now()
	steady, jumping := f.Replica("steady", begin), f.Replica("jumping", begin)
	both := func(do func(p *Replica, open *[]*Reservation, now time.Time), open *[2][]*Reservation, now time.Time) {
		do(steady, &open[0], now)
		do(jumping, &open[1], stepped(now, time.Duration(random.IntN(7200)-3600)*time.Second))
	}
	var open [2][]*Reservation
	tokens := 0.0
	for i := range 2000 {
		now := begin.Add(time.Duration(i) * 50 * time.Millisecond)
		what, size := random.IntN(8), float64(random.IntN(3000))
		both(func(p *Replica, open *[]*Reservation, now time.Time) {
			last := len(*open) - 1
			switch {
			case what < 3 || last < 0:
				r := &Reservation{Prompt: size, Uncached: size}
				p.Reserve(r, now)
				*open = append(*open, r)
				return
			case what == 3:
				(*open)[last].Refuse(503, 0, now)
			case what == 4:
				(*open)[last].Abort(now)
			case what == 5:
				f.Observe(p, metrics.Scrape{Snapshot: &metrics.Snapshot{At: now, Engine: metrics.VLLM, PromptTokens: known(tokens)}}, now)
				return
			default:
				(*open)[last].Finish(now)
			}
			*open = (*open)[:last]
		}, &open, now)
		tokens += size
		var seen [2]Load
		both(func(p *Replica, _ *[]*Reservation, now time.Time) {
			l := p.Load(now)
			if p == steady {
				seen[0] = l
			} else {
				seen[1] = l
			}
		}, &open, now)
		if seen[0].Scraped.Equal(seen[1].Scraped) { // by the steady clock, whatever the other shows
			seen[1].Scraped = seen[0].Scraped
		}
		if !reflect.DeepEqual(seen[0], seen[1]) {
			t.Fatalf("step %d: %+v with a steady clock, %+v with one that jumps", i, seen[0], seen[1])
		}
	}
}

// Replicas of a dynamic source are kept as long as they are in use, whatever the
// clock says.
func TestClockJumpsOfDynamicReplicas(t *testing.T) {
	f := NewRegistry().New(Config{}, nil)
	now := time.Now()
	p := f.Replica("a", now)
	f.dropUnseen(stepped(now, 24*time.Hour))
	if again := f.Replica("a", now); again != p || again.gone.Load() {
		t.Error("a replica in use was dropped when the clock was set forward")
	}
	f.dropUnseen(stepped(now.Add(unseenFor+time.Second), -24*time.Hour))
	if len(f.Members()) != 0 {
		t.Error("a replica that nobody names is kept when the clock was set back")
	}
}
