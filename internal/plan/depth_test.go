// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/prompt"
)

// branch returns a prompt of so many blocks whose first shared blocks are the
// same for all, and whose further ones differ by id.
func branch(id uint64, blocks, shared int) *prompt.Prompt {
	p := &prompt.Prompt{Chain: make([]uint64, blocks), Turn: blocks, TurnKey: id<<20 | 0xfffff, Bytes: blocks * prompt.BlockSize}
	for i := range p.Chain {
		if p.Chain[i] = uint64(i); i >= shared {
			p.Chain[i] |= id << 20
		}
	}
	return p
}

// play gives each of the prompts in turn, a second apart, and returns the last
// key of each.
func play(d *Depths, now *time.Time, rounds, replicas int, prompts ...*prompt.Prompt) []uint64 {
	keys := make([]uint64, len(prompts))
	for range rounds {
		for i, p := range prompts {
			*now = now.Add(time.Second)
			keys[i] = d.Key(p, 1000, replicas, *now)
		}
	}
	return keys
}

// A system prompt that all share is passed by: chats are told apart.
func TestSharedPrefixIsSplit(t *testing.T) {
	now := time.Unix(1e9, 0)
	var chats []*prompt.Prompt
	for id := range uint64(40) {
		chats = append(chats, branch(id+1, 64, 16))
	}
	d := NewDepths(0)
	first := d.Key(chats[0], 1000, 4, now)
	if first != chats[0].Chain[shallowest-1] {
		t.Errorf("the first key is not of the shallowest depth")
	}
	keys := play(d, &now, 5, 4, chats...)
	seen := make(map[uint64]bool)
	for i, k := range keys {
		if k != chats[i].Chain[31] {
			t.Errorf("chat %d has another key than the first rung below the shared prompt", i)
		}
		seen[k] = true
	}
	if len(seen) != len(chats) {
		t.Errorf("%d keys for %d chats", len(seen), len(chats))
	}
}

// Prefixes of which none is too hot keep their shallow key: a chat that grows
// or a document with many questions stays together.
func TestColdPrefixesStayWhole(t *testing.T) {
	now := time.Unix(1e9, 0)
	var prompts []*prompt.Prompt
	for id := range uint64(40) {
		p := branch(id+1, 64, 0)
		prompts = append(prompts, p)
	}
	for i, k := range play(NewDepths(0), &now, 5, 4, prompts...) {
		if k != prompts[i].Chain[shallowest-1] {
			t.Errorf("prompt %d was split", i)
		}
	}
}

// A key is split above one share of the load, made whole below a lower one, and
// stays as it is between them.
func TestSplitHasHysteresis(t *testing.T) {
	now := time.Unix(1e9, 0)
	d := NewDepths(0)
	hot := branch(1, 64, 0)
	var others []*prompt.Prompt
	for id := range uint64(1000) {
		others = append(others, branch(id+2, 64, 0))
	}
	rng := rand.New(rand.NewPCG(1, 1))
	// mixed plays traffic of which a share is the hot prompt's.
	mixed := func(share float64) bool {
		var key uint64
		for range 4000 {
			now = now.Add(250 * time.Millisecond)
			if rng.Float64() < share {
				key = d.Key(hot, 1000, 4, now)
			} else {
				d.Key(others[rng.IntN(len(others))], 1000, 4, now)
			}
		}
		return key != hot.Chain[shallowest-1]
	}
	// With 4 replicas a key of 12.5 % of all load is half of one's fair share,
	// and one of 5 % a fifth.
	for i, step := range []struct {
		share float64
		split bool
	}{{0.08, false}, {0.20, true}, {0.08, true}, {0.02, false}, {0.08, false}} {
		if got := mixed(step.share); got != step.split {
			t.Errorf("step %d: at %.0f %% of the load split is %v, want %v", i, 100*step.share, got, step.split)
		}
	}
}

// The end of the first user turn is the last rung: chats of which even the
// first block past the system prompt is the same stay apart, and all turns of
// one chat meet.
func TestLastRungIsTheFirstTurn(t *testing.T) {
	now := time.Unix(1e9, 0)
	d := NewDepths(0)
	var chats []*prompt.Prompt
	for id := range uint64(20) {
		chats = append(chats, branch(id+1, 16, 16)) // they differ within the last block
	}
	for i, k := range play(d, &now, 10, 4, chats...) {
		if k != chats[i].TurnKey {
			t.Errorf("chat %d is not keyed by its turn", i)
		}
		grown := branch(uint64(i+1), 64, 16)
		grown.Turn, grown.TurnKey = chats[i].Turn, chats[i].TurnKey
		if d.Key(grown, 1000, 4, now) != k {
			t.Errorf("chat %d moved when it grew", i)
		}
	}
}

func TestFixedPrefix(t *testing.T) {
	now := time.Unix(1e9, 0)
	d := NewDepths(2 * prompt.BlockSize)
	a, b := branch(1, 10, 2), branch(2, 10, 2)
	for range 100 {
		if d.Key(a, 1e6, 4, now) != a.Chain[1] || d.Key(b, 1, 4, now) != a.Chain[1] {
			t.Fatal("the key is not the first two blocks")
		}
	}
	if short := branch(3, 1, 0); d.Key(short, 1, 4, now) != short.TurnKey {
		t.Error("a short prompt's key is not its whole text")
	}
	if tiny := NewDepths(1); tiny.fixed != 1 {
		t.Errorf("a prefix of one byte is %d blocks", tiny.fixed)
	}
}

// Sums that fade neither overflow nor lose what they count, however long the
// process runs.
func TestLoadDecaysForever(t *testing.T) {
	now := time.Unix(1e9, 0)
	d := NewDepths(0)
	hot, cold := branch(1, 64, 0), branch(2, 64, 0)
	for day := range 400 {
		now = now.Add(24 * time.Hour)
		for range 200 {
			now = now.Add(time.Second)
			d.Key(hot, 1000, 4, now)
			if sum := d.tokens.sum; !(sum > 0 && sum < 1e6) {
				t.Fatalf("day %d: %v tokens", day, sum)
			}
		}
		if k := d.Key(hot, 1000, 4, now); k == hot.Chain[shallowest-1] {
			t.Fatalf("day %d: all the load is one key, and it is whole", day)
		}
	}
	if d.Key(cold, 1, 4, now) != cold.Chain[shallowest-1] {
		t.Error("a new key is split")
	}
}

// The number of keys followed is bounded.
func TestKeysAreBounded(t *testing.T) {
	now := time.Unix(1e9, 0)
	d := NewDepths(0)
	for id := range uint64(3 * maxKeys) {
		d.Key(branch(id+1, 8, 0), 10, 4, now)
	}
	if n := d.keys.Len(); n != maxKeys {
		t.Errorf("%d keys are followed, want %d", n, maxKeys)
	}
}
