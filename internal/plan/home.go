// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"sync"
	"time"

	lru "github.com/hashicorp/golang-lru/v2/simplelru"
)

// HashRule says when a prompt's home has too much to do and the next one in
// the prompt's own order is taken.
type HashRule struct {
	// LoadFactor is how many times the mean load of all homes one may have and
	// still be sent a prompt that stays there.
	LoadFactor float64
	// Slack is how much above the mean it may have in any case, in tokens.
	Slack float64
	// Lead is how much above the least of all it may have and be sent a prompt
	// that stays nowhere yet, in tokens. There is nothing to lose by taking the
	// next home, but another Caddy would not do so.
	Lead float64
}

// DefaultHashRule is used when nothing is configured; docs/choice.md tells where
// its figures come from.
var DefaultHashRule = HashRule{LoadFactor: 1.25, Slack: 50_000, Lead: 4000}

// decodeShare is what a prompt token weighs in a home's load after its prefill:
// sequences that decode slow every step.
const decodeShare = 0.1

// HomeLoad is the load of a home that has so many tokens waiting for prefill,
// and so many in flight.
func HomeLoad(queue, outstanding float64) float64 { return queue + decodeShare*outstanding }

// Home is one replica that a prompt could live at.
type Home struct {
	// Order is the replica's place in the order of the prompt's key, see
	// [Rendezvous]: the highest is the prompt's home.
	Order uint64
	// Load is what the replica has to do, see [HomeLoad].
	Load float64
	// Stays tells whether the last prompt of this key was sent there.
	Stays bool
}

// Choose returns where a prompt goes, and the first home in its order; both are
// -1 if there is none. It stays where the last of its key went while that is not
// over its bound. Otherwise it goes to the first home in its order that has
// little to do; the one that has least always is such a home.
func (r HashRule) Choose(homes []Home) (best, first int) {
	best, first = -1, -1
	if len(homes) == 0 {
		return best, first
	}
	mean, least := 0.0, homes[0].Load
	for i, h := range homes {
		mean += h.Load / float64(len(homes))
		least = min(least, h.Load)
		if first < 0 || h.Order > homes[first].Order {
			first = i
		}
	}
	// The mean of equal loads may round below them.
	bound := max(r.LoadFactor*mean, mean+r.Slack, least)
	open := least + r.Lead
	for i, h := range homes {
		if h.Stays && h.Load <= bound {
			return i, first
		}
		if h.Load <= open && (best < 0 || h.Order > homes[best].Order) {
			best = i
		}
	}
	return best, first
}

const (
	// maxStays bounds how many keys are remembered; those in use stay.
	maxStays = 65_536
	// stayFor is how long a key is remembered after its last prompt. Then it has
	// its home again, on which all Caddys agree.
	stayFor = 5 * time.Minute
)

// Stays remembers at which replica the last prompt of each key was, for the
// keys in use, as long as they have the home that they had then: prompts whose
// home was away return when it does. It is safe for concurrent use.
type Stays struct {
	mu   sync.Mutex
	keys *lru.LRU[uint64, stay]
}

type stay struct {
	replica, home uint64
	until         time.Time
}

// NewStays returns an empty memory.
func NewStays() *Stays {
	keys, err := lru.NewLRU[uint64, stay](maxStays, nil)
	if err != nil { // only for a size below one
		panic(err)
	}
	return &Stays{keys: keys}
}

// Get returns the replica where a key with this home stays, false if nowhere.
func (s *Stays) Get(key, home uint64, now time.Time) (replica uint64, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	at, ok := s.keys.Peek(key) // it is used by a Put
	return at.replica, ok && at.home == home && now.Before(at.until)
}

// Put notes that a prompt was sent to a replica.
func (s *Stays) Put(key, home, replica uint64, now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.keys.Add(key, stay{replica, home, now.Add(stayFor)})
}
