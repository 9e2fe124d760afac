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

func (p *pins) get(session string) (replica string, ok bool) {
	return p.homes.Get(xxhash.Sum64String(session))
}

func (p *pins) put(session, replica string) {
	p.homes.Add(xxhash.Sum64String(session), replica)
}
