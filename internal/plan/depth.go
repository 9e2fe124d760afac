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
	tokens   fading // of all requests
	requests fading
	keys     *lru.LRU[uint64, *keyLoad]
}

type keyLoad struct {
	tokens fading
	split  bool
}

// fading is a sum whose parts count half after depthHalfLife.
type fading struct {
	sum float64
	at  time.Time
}

func (f *fading) add(x float64, now time.Time) float64 {
	if passed := now.Sub(f.at); passed > 0 {
		f.sum *= math.Exp2(-passed.Seconds() / depthHalfLife.Seconds())
		f.at = now
	}
	f.sum += x
	return f.sum
}

// NewDepths returns the depth of a fixed prefix of so many bytes, or an
// adaptive one if that is 0.
func NewDepths(prefix int64) *Depths {
	keys, err := lru.NewLRU[uint64, *keyLoad](maxKeys, nil)
	if err != nil { // only for a size below one
		panic(err)
	}
	d := &Depths{keys: keys}
	if prefix > 0 {
		d.fixed = int(max(1, prefix/prompt.BlockSize))
	}
	return d
}

// Key returns the key of a prompt of so many tokens on a fleet of so many replicas.
func (d *Depths) Key(p *prompt.Prompt, tokens float64, replicas int, now time.Time) uint64 {
	if d.fixed > 0 {
		return d.fixedKey(p)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	all := d.tokens.add(tokens, now)
	enough := d.requests.add(1, now) >= depthSample
	return climb(p, func(key uint64) (split bool) {
		k, ok := d.keys.Get(key)
		if !ok {
			k = new(keyLoad)
			d.keys.Add(key, k)
		}
		share := k.tokens.add(tokens, now) / all * float64(max(1, replicas))
		if enough {
			k.split = share > splitShare || k.split && share > joinShare
		}
		return k.split
	})
}

// Peek returns the key that Key would return as things are, and books nothing.
func (d *Depths) Peek(p *prompt.Prompt) uint64 {
	if d.fixed > 0 {
		return d.fixedKey(p)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	return climb(p, func(key uint64) (split bool) {
		k, ok := d.keys.Peek(key)
		return ok && k.split
	})
}

// climb returns the key of the first rung that is not split.
func climb(p *prompt.Prompt, split func(key uint64) bool) uint64 {
	end := len(p.Chain)
	if p.Turn > 0 {
		end = p.Turn
	}
	for depth := shallowest; depth <= end; depth *= 2 {
		if key := p.Chain[depth-1]; !split(key) {
			return key
		}
	}
	return p.TurnKey
}

func (d *Depths) fixedKey(p *prompt.Prompt) uint64 {
	if len(p.Chain) >= d.fixed {
		return p.Chain[d.fixed-1]
	}
	return p.TurnKey
}
