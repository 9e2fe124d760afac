// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"net"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/enginesim"
)

// lies are drills of replicas that seem better than they are.
var lies = []drill{
	{
		number: "41", name: "answers 200 at once, and nothing of use", compare: true, seldom: true, spread: true,
		excused: []string{hollow}, // nobody but the client can tell
		disturb: func(x *exercise) { x.busiest().FailNext(http.StatusOK, forever); x.dwell(); x.dwell() },
		mend:    func(x *exercise) { x.victim.FailNext(0, 0); x.awaitUse(x.victim) },
		check: func(x *exercise) {
			all := x.of(func(r record) bool { return r.phase == during })
			lost := x.of(func(r record) bool { return r.phase == during && r.kind == hollow })
			if x.Logf("%d of %d requests got nothing", len(lost), len(all)); len(lost) > len(all)/2 { // a third is fair
				x.Errorf("%d of %d requests were drawn to a replica that does not work", len(lost), len(all))
			}
		},
	},
	{
		number: "42", name: "crashes again and again", compare: true, seldom: true, spread: true, excused: []string{cut},
		disturb: func(x *exercise) {
			x.busiest()
			for range 5 {
				x.victim.Stop()
				time.Sleep(500 * time.Millisecond)
				x.startAgain(x.victim)
				time.Sleep(700 * time.Millisecond)
			}
		},
		mend: func(x *exercise) { x.awaitUse(x.victim) },
	},
	metricsDrill("43", "metrics of one jump back at every second page", enginesim.MetricsJumping, false),
	metricsDrill("44", "metrics of one say that all was cached", enginesim.MetricsAllHits, false),
	{
		number: "45", name: "every second request to one hangs before its first token", compare: true, seldom: true, spread: true,
		front: func(x *exercise, s *enginesim.Server) string { return x.stuckFront(s) },
		disturb: func(x *exercise) {
			x.faulty.Store(true)
			time.Sleep(4 * time.Second)
			x.countHanging()
		},
		mend:  func(x *exercise) { x.faulty.Store(false) },
		check: fewHang,
	},
	{
		number: "46", name: "header of one drips", hangs: true, compare: true, seldom: true, spread: true,
		front: func(x *exercise, s *enginesim.Server) string { return x.drippingFront(s) },
		disturb: func(x *exercise) {
			x.victim = x.fleet[0]
			x.faulty.Store(true)
			time.Sleep(4 * time.Second)
			x.countHanging()
		},
		mend:  func(x *exercise) { x.faulty.Store(false); x.awaitUse(x.victim) },
		check: fewHang,
	},
	{
		number: "47", name: "answers 401 at once", compare: true, seldom: true, spread: true, excused: []string{"status 401"},
		disturb: func(x *exercise) { x.busiest().FailNext(http.StatusUnauthorized, forever); x.dwell(); x.dwell() },
		mend:    func(x *exercise) { x.victim.FailNext(0, 0); x.awaitUse(x.victim) },
	},
}

// fewHang checks that most clients went on to be served.
func fewHang(x *exercise) {
	if x.hanging > (streamClients+shortClients)/2 {
		x.Errorf("%d clients hang", x.hanging)
	}
}

// stuckFront stands before an engine. While the fault is on, and the engine is the first, every second
// answer is held up after its header.
func (x *exercise) stuckFront(s *enginesim.Server) string {
	first := s == x.fleet[0]
	var n atomic.Int64
	return x.frontOf(s, false, func(w http.ResponseWriter, _ net.Conn) http.ResponseWriter {
		if first && x.faulty.Load() && n.Add(1)%2 == 0 {
			return &stuck{w, x}
		}
		return w
	})
}

// stuck holds up the body of an answer until the fault is over.
type stuck struct {
	http.ResponseWriter
	x *exercise
}

func (s *stuck) Write(p []byte) (int, error) {
	for s.x.faulty.Load() {
		time.Sleep(10 * time.Millisecond)
	}
	return s.ResponseWriter.Write(p)
}

// drippingFront stands before an engine. While the fault is on, and the engine is the first, the header of
// an answer comes a byte at a time, and with the end of the fault the connection ends.
func (x *exercise) drippingFront(s *enginesim.Server) string {
	first := s == x.fleet[0]
	return x.frontOf(s, false, func(w http.ResponseWriter, c net.Conn) http.ResponseWriter {
		if first && x.faulty.Load() {
			return &dripping{w, c, x}
		}
		return w
	})
}

type dripping struct {
	http.ResponseWriter
	conn net.Conn
	x    *exercise
}

// WriteHeader does not return.
func (d *dripping) WriteHeader(int) {
	for i := 0; d.x.faulty.Load(); i++ {
		const header = "HTTP/1.1 200 OK\r\nX-Drip: x"
		if _, err := d.conn.Write([]byte{header[min(i, len(header)-1)]}); err != nil {
			break
		}
		time.Sleep(50 * time.Millisecond)
	}
	panic(http.ErrAbortHandler)
}

func (s *stuck) Unwrap() http.ResponseWriter { return s.ResponseWriter }
