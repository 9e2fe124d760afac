// SPDX-License-Identifier: Apache-2.0

package selection

import (
	"fmt"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/fleet"
)

// chainOf returns a chain that no other name's shares a block with.
func chainOf(name uint64, blocks int) []uint64 {
	chain := make([]uint64, blocks)
	for i := range chain {
		chain[i] = name<<32 + uint64(i) + 1
	}
	return chain
}

// Few blocks, or those of one too many, are in the index when land returns; all
// others by and by, and no goroutine stays.
func TestLander(t *testing.T) {
	known := goleak.IgnoreCurrent()
	p := loadAware(t, `{}`)
	replica := p.fleet.Replica(poolOf(1)[0].Dial, time.Now())
	held := func(chain []uint64) int { return replica.Matched(p.fleet.Registry.Index.Match(chain, nil)) }
	l := make(lander, 2)
	land := func(chain []uint64, matched int) *fleet.Reservation {
		r := new(fleet.Reservation)
		replica.Reserve(r, time.Now())
		l.land(r, chain, matched)
		return r
	}

	few := chainOf(1, fewBlocks-1)
	if land(few, 0); held(few) != len(few) {
		t.Errorf("%d of %d blocks are held when land returns", held(few), len(few))
	}
	most := chainOf(2, 2*fewBlocks)
	if land(most, len(most)-1); held(most) != len(most) {
		t.Errorf("%d of %d blocks, most held before, are held when land returns", held(most), len(most))
	}
	many := chainOf(3, 2000)
	land(many, 0)
	await(t, "many blocks to land", func() bool { return held(many) == len(many) })

	await(t, "nobody to land", func() bool { return len(l) == 0 })
	for range cap(l) { // as if they were landing
		l <- struct{}{}
	}
	tooMany := chainOf(4, 2000)
	if land(tooMany, 0); held(tooMany) != len(tooMany) {
		t.Errorf("%d of %d blocks are held when land returns, with nobody free", held(tooMany), len(tooMany))
	}
	goleak.VerifyNone(t, known)
}

// A long prompt that comes again at once finds its blocks, wherever they are.
func TestLongPromptAgainAtOnce(t *testing.T) {
	p := loadAware(t, `{}`)
	pool := poolOf(8)
	for i := range 50 {
		text := words(fmt.Sprint("long", i), 200_000)
		first, again := complete(text), complete(text+" and more")
		home := p.Select(pool, first.Request, nil)
		if got := p.Select(pool, again.Request, nil); got != home {
			t.Errorf("prompt %d went to %v, and a moment later to %v", i, home, got)
		}
		if a := again.decisionIn(&p.core).latest(); a.Hit < 0.9*a.Prompt {
			t.Errorf("prompt %d: %v of %v tokens hit a moment later", i, a.Hit, a.Prompt)
		}
		first.left(t, &p.core)
		again.left(t, &p.core)
	}
	idle(t, p.fleet)
}
