// SPDX-License-Identifier: Apache-2.0

package selection

import (
	"github.com/cespare/xxhash/v2"
	lru "github.com/hashicorp/golang-lru/v2"
)

// maxPins bounds how many sessions are remembered. One that is forgotten is
// placed anew, by cost, which finds its cache.
const maxPins = 100_000

// pins remembers which replica a session was placed at.
type pins struct{ homes *lru.Cache[uint64, string] }

func newPins() *pins {
	homes, err := lru.New[uint64, string](maxPins)
	if err != nil { // only for a size below one
		panic(err)
	}
	return &pins{homes}
}

// get returns the home of a tenant's session. seed is the tenant's.
func (p *pins) get(session string, seed uint64) (replica string, ok bool) {
	return p.homes.Get(xxhash.Sum64String(session) ^ seed)
}

func (p *pins) put(session string, seed uint64, replica string) {
	p.homes.Add(xxhash.Sum64String(session)^seed, replica)
}
