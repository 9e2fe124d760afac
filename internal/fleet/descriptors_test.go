// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"
)

// newShortBench is a bench of a process whose descriptors run out and come back.
func newShortBench(t *testing.T) (b *bench, out *bool) {
	out = new(bool)
	b = newBench(t, Config{})
	b.fleet.Registry.Exhausted = func() bool { return *out }
	return b, out
}

// A failure of this machine says nothing about the replica.
func TestAttemptWithoutDescriptor(t *testing.T) {
	b, out := newShortBench(t)
	*out = true
	if avoided, own := b.send(100, 100).Fail(b.now); avoided != 0 || !own {
		t.Errorf("an attempt that found no descriptor: avoided for %v, own %v", avoided, own)
	}
	b.wantAvoid(Eligible, "after an attempt that found no descriptor")
	*out = false
	b.pass(blameFor / 2)
	if _, own := b.send(100, 100).Fail(b.now); !own {
		t.Error("descriptors that came back a moment ago are not to blame")
	}
	b.pass(blameFor)
	if avoided, own := b.send(100, 100).Fail(b.now); avoided == 0 || own {
		t.Errorf("an attempt that failed long after: avoided for %v, own %v", avoided, own)
	}
	b.wantAvoid(Failing, "after an attempt that failed with descriptors left")
}

// Without a descriptor a request can go where a connection is idle, and
// otherwise waits for one in flight to end.
func TestIdleConnectionsWithoutDescriptor(t *testing.T) {
	b, out := newShortBench(t)
	first, second := b.send(1, 1), b.send(1, 1)
	first.Finish(b.now)
	*out = true
	b.pass(lookAtLast)
	wantIdle := func(idle int, starved bool, when string) {
		t.Helper()
		if l := b.load(); l.Connections != idle || l.Starved != starved || b.replica.Connectable(b.now) != (idle > 0) {
			t.Errorf("%s: connections %d, starved %v, connectable %v; want %d, %v", when, l.Connections, l.Starved, b.replica.Connectable(b.now), idle, starved)
		}
	}
	wantIdle(1, false, "one of two connections is idle")
	third := b.send(1, 1)
	wantIdle(0, true, "none is")
	third.Abort(b.now)
	wantIdle(0, true, "that of an aborted request is closed")
	second.Finish(b.now)
	wantIdle(1, false, "the last one is idle")
	b.pass(3 * connectionsFor)
	wantIdle(0, false, "it was idle for too long to be there for sure")
	*out = false
	b.pass(lookAgain)
	if l := b.load(); l.Connections < 1000 || l.Starved || !b.replica.Connectable(b.now) {
		t.Errorf("with descriptors left: connections %d, starved %v", l.Connections, l.Starved)
	}
}

// The estimate is the most that was in flight at any moment of the last one to
// two windows.
func TestConnectionsAreThoseOfAMomentAgo(t *testing.T) {
	type moment struct {
		at       time.Time
		inFlight int
	}
	random := rand.New(rand.NewPCG(1, 1))
	now := time.Unix(1_700_000_000, 0)
	var c connections
	var past []moment
	inFlight := 0
	for range 20_000 {
		now = now.Add(time.Duration(random.IntN(100)) * time.Millisecond)
		if inFlight > 0 && random.IntN(2) == 0 {
			inFlight--
		} else {
			inFlight++
			c.used(inFlight, now)
		}
		past = append(past, moment{now, inFlight})
		within := func(d time.Duration) (most int) {
			for i := len(past) - 1; i >= 0; i-- {
				if most = max(most, past[i].inFlight); now.Sub(past[i].at) >= d { // it was so when the time began
					break
				}
			}
			return most
		}
		open := c.idle(inFlight, now) + inFlight
		if low, high := within(connectionsFor/2), within(3*connectionsFor); open < low || open > high {
			t.Fatalf("%d connections are believed open; %d were in use lately, %d in a longer time", open, low, high)
		}
	}
}

// Requests that end look, so that those that come do not; where none ends, those
// do, and more seldom.
func TestDescriptorsAreLookedForSeldom(t *testing.T) {
	const steps, each = 1000, lookAgain / 10
	for _, test := range []struct {
		name         string
		ends         bool
		looks, onWay float64
	}{
		{"requests come and end", true, float64(steps*each) / float64(lookAgain), 1},
		{"requests come", false, float64(steps*each) / float64(lookAtLast), float64(steps*each) / float64(lookAtLast)},
	} {
		t.Run(test.name, func(t *testing.T) {
			b := newBench(t, Config{})
			looks, onWay, coming := 0.0, 0.0, false
			b.fleet.Registry.Exhausted = func() bool {
				looks++
				if coming {
					onWay++
				}
				return false
			}
			for range steps {
				b.pass(each)
				coming = true
				b.load()
				r := b.send(1, 1)
				coming = false
				if test.ends {
					r.Finish(b.now)
				}
			}
			if math.Abs(looks-test.looks) > test.looks/10+1 || math.Abs(onWay-test.onWay) > test.onWay/10+1 {
				t.Errorf("looked %v times, %v of them when a request came; want %v, %v", looks, onWay, test.looks, test.onWay)
			}
		})
	}
}
