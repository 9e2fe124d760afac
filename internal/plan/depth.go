// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"math"
	"sync"
	"time"

	lru "github.com/hashicorp/golang-lru/v2/simplelru"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/prompt"
)

const (
	// shallowest is the first depth of a key, in blocks: one kilobyte of text.
	shallowest = 4
	// A key is split, so that deeper ones take its place, when it alone draws
	// more than splitShare of one replica's fair share of the load, and made
	// whole again below joinShare.
	splitShare = 0.5
	joinShare  = 0.2
	// depthHalfLife is the time after which load counts half.
	depthHalfLife = time.Minute
	// depthSample is how many requests it takes before shares mean anything.
	depthSample = 32
	// maxKeys bounds how many keys' loads are followed: those of the busiest
	// prefixes are touched all the time, and stay.
	maxKeys = 8192
)

// Depths finds how deep into a prompt its key must reach. The rungs of the
// ladder are 1 KiB, 2 KiB, 4 KiB … of text, and at last the end of the first
// user turn, which is the same for all turns of a chat and differs between
// chats. It is safe for concurrent use.
type Depths struct {
	fixed int // blocks, 0: adaptive

	mu       sync.Mutex
	keys     *lru.LRU[uint64, *keyLoad]
	tokens   float64 // of all requests, decayed
	requests float64
	decayed  time.Time
	scale    float64 // what a token now weighs; grows instead of decaying every key
}

type keyLoad struct {
	tokens float64 // in units of scale
	split  bool
}

// NewDepths returns the depth of a fixed prefix of so many bytes, or an
// adaptive one if that is 0.
func NewDepths(prefix int64) *Depths {
	keys, err := lru.NewLRU[uint64, *keyLoad](maxKeys, nil)
	if err != nil { // only for a size below one
		panic(err)
	}
	fixed := 0
	if prefix > 0 {
		fixed = int(max(1, prefix/prompt.BlockSize))
	}
	return &Depths{fixed: fixed, keys: keys, scale: 1}
}

// Key returns the key of a prompt of so many tokens on a fleet of so many replicas.
func (d *Depths) Key(p *prompt.Prompt, tokens float64, replicas int, now time.Time) uint64 {
	if d.fixed > 0 {
		if len(p.Chain) >= d.fixed {
			return p.Chain[d.fixed-1]
		}
		return p.TurnKey
	}
	end := len(p.Chain)
	if p.Turn > 0 {
		end = p.Turn
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.count(tokens, now)
	for depth := shallowest; depth <= end; depth *= 2 {
		if key := p.Chain[depth-1]; !d.draws(key, tokens, replicas) {
			return key
		}
	}
	return p.TurnKey
}

// count books a request in the total.
func (d *Depths) count(tokens float64, now time.Time) {
	if dt := now.Sub(d.decayed); dt > 0 {
		// Scaling new load up is the same as scaling all old load down.
		grow := math.Exp2(min(dt.Seconds()/depthHalfLife.Seconds(), 64))
		d.scale *= grow
		d.tokens /= grow
		d.requests /= grow
		d.decayed = now
		if d.scale > 1e100 {
			d.rescale()
		}
	}
	d.tokens += tokens
	d.requests++
}

func (d *Depths) rescale() {
	for _, k := range d.keys.Values() {
		k.tokens /= d.scale
	}
	d.scale = 1
}

// draws books a request at a key and tells whether the key is split.
func (d *Depths) draws(key uint64, tokens float64, replicas int) bool {
	k, ok := d.keys.Get(key)
	if !ok {
		k = new(keyLoad)
		d.keys.Add(key, k)
	}
	k.tokens += tokens * d.scale
	if d.requests < depthSample {
		return k.split
	}
	share := k.tokens / d.scale / d.tokens * float64(max(1, replicas))
	k.split = share > splitShare || k.split && share > joinShare
	return k.split
}
