// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"fmt"
	"testing"
	"time"

	"github.com/seed-2fa47a1e/caddy-kv-cache/metrics"
)

// answers sends a request and has it answered: 200 or with an error.
func (b *bench) answers(status int) time.Duration {
	r := b.send(100, 100)
	if status == 200 {
		r.Finish(b.now)
		return 0
	}
	return r.Refuse(status, 0, b.now)
}

func TestErrorsThatMakeAReplicaAvoided(t *testing.T) {
	for _, tt := range []struct {
		name     string
		statuses []int
		want     Avoid
	}{
		{"a 503", []int{503}, Failing},
		{"a 503 among good answers", []int{200, 200, 503, 200, 200}, Eligible}, // one was sent after it
		{"two errors", []int{500, 500}, Eligible},
		{"three errors", []int{500, 502, 504}, Failing},
		{"three refusals for load", []int{429, 429, 429}, Failing},
		{"every second answer is an error", []int{500, 200, 500, 200, 500}, Failing},
		{"every third answer is an error", []int{500, 200, 200, 500, 200, 200, 500, 200, 200, 500}, Eligible},
		{"bad requests", []int{400, 400, 400, 400, 401, 403, 404, 413, 422, 400}, Eligible},
		{"what the engine has not", []int{501, 501, 501, 501}, Eligible},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := newBench(t, Config{})
			for _, status := range tt.statuses {
				b.answers(status)
			}
			b.wantAvoid(tt.want, fmt.Sprint("after ", tt.statuses))
			if l := b.load(); l.InFlight != 0 || l.Queue != 0 {
				t.Errorf("the ledger is left with %v requests, %v tokens", l.InFlight, l.Queue)
			}
		})
	}
}

// Errors come in another order than their requests were sent, and beside long
// streams that go on.
func TestErrorsOutOfOrder(t *testing.T) {
	b := newBench(t, Config{})
	open := make([]*Reservation, 6)
	for i := range open {
		open[i] = b.send(10, 10)
	}
	b.pass(time.Millisecond)
	for _, i := range []int{4, 0, 2} {
		open[i].Refuse(500, 0, b.now)
	}
	b.wantAvoid(Failing, "three of six failed")
	b.pass(time.Minute)
	open[1].Finish(b.now)
	if v := b.replica.view(b.now); v.Failures != 1 {
		t.Error("an answer to what was sent before the errors ended the doubling")
	}
}

func TestRetryAfterIsHonoured(t *testing.T) {
	for _, tt := range []struct{ said, want time.Duration }{
		{0, failingFor},
		{time.Millisecond, failingFor},
		{7 * time.Second, 7 * time.Second},
		{time.Hour, retryAfterMost},
	} {
		b := newBench(t, Config{})
		if got := b.send(1, 1).Refuse(503, tt.said, b.now); got != tt.want {
			t.Errorf("Retry-After %v: avoided for %v, want %v", tt.said, got, tt.want)
		}
		b.pass(tt.want - time.Millisecond)
		b.wantAvoid(Failing, fmt.Sprint("Retry-After ", tt.said))
		b.pass(time.Millisecond)
		b.wantAvoid(Eligible, fmt.Sprint("after Retry-After ", tt.said))
	}
}

// A later answer of the same bad moment prolongs it, and does not count anew.
func TestRetryAfterOfTheSameMoment(t *testing.T) {
	b := newBench(t, Config{})
	first, second := b.send(1, 1), b.send(1, 1)
	first.Refuse(503, 0, b.now)
	if got := second.Refuse(503, 5*time.Second, b.now); got != 0 {
		t.Errorf("the second is told of as another event: %v", got)
	}
	b.pass(4 * time.Second)
	b.wantAvoid(Failing, "within the second's Retry-After")
	b.pass(time.Second)
	b.wantAvoid(Eligible, "after it")
	if v := b.replica.view(b.now); v.Failures != 1 {
		t.Errorf("%d failures, want 1", v.Failures)
	}
}

// One request tries a replica that failed, and the others wait for what becomes of it.
func TestProbe(t *testing.T) {
	b := newBench(t, Config{})
	b.answers(503)
	b.pass(failingFor)
	b.wantAvoid(Eligible, "after a second")
	probe := b.send(1, 1)
	b.wantAvoid(Failing, "while it is probed")
	if got := probe.Refuse(500, 0, b.now); got != 2*failingFor {
		t.Errorf("an error that answers the probe has it avoided for %v, want %v", got, 2*failingFor)
	}
	b.pass(2 * failingFor)

	probe = b.send(1, 1)
	probe.Abort(b.now)
	b.wantAvoid(Eligible, "the probe's client left")

	probe = b.send(1, 1)
	b.pass(probeFor - time.Millisecond)
	b.wantAvoid(Failing, "while it is probed by a long answer")
	b.pass(time.Millisecond)
	b.wantAvoid(Eligible, "no error has come of the probe")
	if got := b.load().Room; got > 2*warmStep {
		t.Errorf("there is room for %d requests at once", got)
	}
	probe.Finish(b.now)
	if got := b.answers(503); got != failingFor {
		t.Errorf("after a good answer an error has it avoided for %v, want %v", got, failingFor)
	}
}

// A client whose requests are refused at once does not take a replica away from
// those whom it serves well and slowly.
func TestOneClientsErrors(t *testing.T) {
	b := newBench(t, Config{})
	var streams []*Reservation
	for i := range 100 {
		streams = append(streams, b.send(100, 100), b.send(100, 100))
		if i%2 == 0 {
			b.answers(500)
		}
		b.pass(100 * time.Millisecond)
		b.wantAvoid(Eligible, fmt.Sprint("after ", i))
	}
	for _, s := range streams {
		s.Finish(b.now)
	}
}

func TestRestartEndsErrors(t *testing.T) {
	b := newBench(t, Config{})
	b.scrape(metrics.Snapshot{StartTime: known(1000)})
	b.answers(503)
	b.wantAvoid(Failing, "a 503")
	b.scrape(metrics.Snapshot{StartTime: known(2000)})
	b.wantAvoid(Eligible, "a restart")
}
