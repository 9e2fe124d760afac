// SPDX-License-Identifier: Apache-2.0

package selection

import (
	"fmt"
	"math"
	"net/http"
	"strconv"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/cespare/xxhash/v2"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/plan"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/prompt"
)

// Queue says how requests wait that can't start at once, because the replica
// where they cost least has work queued. Where a replica's queue is not known,
// and on a fleet that has room, none waits.
type Queue struct {
	// Whether to send every request as soon as it comes. Default: false.
	Off bool `json:"off,omitempty"`

	// How many requests may wait at a time. Default: 16384.
	MaxRequests int `json:"max_requests,omitempty"`

	// How long a request may wait. Default: 10m.
	MaxWait caddy.Duration `json:"max_wait,omitempty"`

	// What becomes of a request that comes when so many wait, or has waited for
	// so long: `send` sends it to the replica where it costs least, to wait
	// there; `refuse` answers 503 with a Retry-After header. Default: send.
	Full string `json:"full,omitempty"`

	// A number that orders those that wait before all else: lower goes first,
	// and what has none counts as 0, as in vLLM. It is a placeholder such as
	// {http.request.header.X-Priority}, or `body` for what clients say
	// themselves: the request's priority, or else -1 for the service_tier
	// "priority" and 1 for "flex". Default: all are equal.
	Priority string `json:"priority,omitempty"`

	// Whom the fleet's time is shared between, as a placeholder such as
	// {http.request.header.X-Tenant}: of those that have requests waiting, each
	// gets the same, however many they are. Default: nobody; all requests are
	// equal.
	Fair string `json:"fair,omitempty"`
}

const (
	sendWhenFull   = "send"
	refuseWhenFull = "refuse"
	priorityInBody = "body"
)

func (q *Queue) validate() error {
	switch {
	case q == nil:
		return nil
	case q.MaxRequests < 0:
		return fmt.Errorf("queue: max_requests is %d, but can't be negative", q.MaxRequests)
	case q.MaxWait < 0:
		return fmt.Errorf("queue: max_wait is %v, but can't be negative", time.Duration(q.MaxWait))
	case q.Full != "" && q.Full != sendWhenFull && q.Full != refuseWhenFull:
		return fmt.Errorf("queue: full is '%s', but must be %s or %s", q.Full, sendWhenFull, refuseWhenFull)
	case q.Off && *q != (Queue{Off: true}):
		return fmt.Errorf("queue: off leaves nothing to set, but there are other settings")
	}
	return nil
}

// terms are the schedule's with these settings.
func (q *Queue) terms() plan.Terms {
	t := plan.DefaultTerms
	if q == nil {
		return t
	}
	if q.Off {
		return plan.BindOnArrival
	}
	if q.MaxRequests > 0 {
		t.Waiting = q.MaxRequests
	}
	if q.MaxWait > 0 {
		t.Longest = time.Duration(q.MaxWait)
	}
	t.Refuse = q.Full == refuseWhenFull
	return t
}

// of reads a request's place among those that wait.
func (q *Queue) of(r *http.Request, p *prompt.Prompt) (priority int, sharer uint64) {
	if q == nil || q.Priority == "" && q.Fair == "" {
		return 0, 0
	}
	repl, ok := r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	switch {
	case q.Priority == priorityInBody:
		priority = ownPriority(p)
	case q.Priority != "" && ok:
		priority, _ = strconv.Atoi(repl.ReplaceAll(q.Priority, "")) // 0 if it is none
	}
	if q.Fair != "" && ok {
		sharer = max(1, xxhash.Sum64String(repl.ReplaceAll(q.Fair, "")))
	}
	return priority, sharer
}

// ownPriority is what a request says of itself.
func ownPriority(p *prompt.Prompt) int {
	switch {
	case p.Priority != 0:
		return p.Priority
	case p.ServiceTier == "priority":
		return -1
	case p.ServiceTier == "flex":
		return 1
	}
	return 0
}

// refuse tells a client when to come again. Caddy answers 503 for want of a
// replica.
func refuse(w http.ResponseWriter, after time.Duration) {
	if w != nil {
		w.Header().Set("Retry-After", strconv.Itoa(int(max(1, math.Ceil(min(after, longestRefusal).Seconds())))))
	}
}

// longestRefusal is for how long a client is sent away at most.
const longestRefusal = 2 * time.Minute
