// SPDX-License-Identifier: Apache-2.0

package selection

import (
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/trace"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/admin"
)

// keptDecisions is how many decisions of a policy are kept for the admin API.
const keptDecisions = 512

// recent is a ring of the latest decisions. Adding to it takes one lock that
// only a decision keptDecisions later, or a reader, can want at the same time.
type recent struct {
	last  atomic.Uint64
	slots [keptDecisions]slot
}

type slot struct {
	sync.Mutex
	number uint64 // of the decision, 0 while empty
	record
}

// record is what is kept of a decision: numbers and hashes, no text of the
// request.
type record struct {
	at          time.Time
	replica     string
	reason      Reason
	key         uint64
	prompt, hit float64
	cost, next  float64
	waited      time.Duration
	attempt     int
	trace       trace.TraceID
}

func (r *recent) add(rec *record) {
	n := r.last.Add(1)
	s := &r.slots[n%keptDecisions]
	s.Lock()
	defer s.Unlock()
	if s.number < n { // unless it was overtaken by a whole round
		s.number, s.record = n, *rec
	}
}

// list returns up to limit decisions, the latest first.
func (r *recent) list(fleet string, limit int) []admin.Decision {
	var out []admin.Decision
	last := r.last.Load()
	for n := last; n > 0 && last-n < keptDecisions && len(out) < limit; n-- {
		s := &r.slots[n%keptDecisions]
		s.Lock()
		number, rec := s.number, s.record
		s.Unlock()
		if number == n {
			out = append(out, rec.shown(fleet))
		}
	}
	return out
}

func (r *record) shown(fleet string) admin.Decision {
	d := admin.Decision{
		At:           r.at,
		Fleet:        fleet,
		Replica:      r.replica,
		Reason:       string(r.reason),
		Key:          keyText(r.key),
		PromptTokens: r.prompt,
		HitTokens:    r.hit,
		Waited:       r.waited.Seconds(),
		Attempt:      r.attempt,
	}
	if known(r.cost) {
		d.Cost = &r.cost
		if known(r.next) {
			d.NextCost = &r.next
		}
	}
	if r.trace.IsValid() {
		d.Trace = r.trace.String()
	}
	return d
}
