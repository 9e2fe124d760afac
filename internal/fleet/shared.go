// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"slices"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/prompt"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/residency"
)

// SharedPrefix is a leading part that several prompts have in common.
type SharedPrefix struct {
	// Hash stands for the text, of which nothing is kept.
	Hash uint64
	// Tokens is its length, estimated from the text's.
	Tokens float64
	// Prompts is how many different prompts go on from it.
	Prompts int
	// Holders are the addresses of the members believed to hold the whole of it.
	Holders []string
}

// surveyed is how many blocks [Fleet.SharedPrefixes] looks at: some milliseconds.
const surveyed = 1 << 16

// SharedPrefixes lists up to limit leading parts that prompts lately sent to the
// members have in common, those first that save the most prefill.
func (f *Fleet) SharedPrefixes(limit int) []SharedPrefix {
	addrs := make(map[residency.Slot]string)
	var slots []residency.Slot
	for _, p := range f.Members() {
		if !p.gone.Load() && p.Slot >= 0 {
			addrs[p.Slot] = p.Addr
			slots = append(slots, p.Slot)
		}
	}
	perBlock := prompt.BlockSize / f.BytesPerToken()
	var out []SharedPrefix
	for _, s := range f.Registry.Index.Heaviest(slots, surveyed, limit) {
		shared := SharedPrefix{Hash: s.Hash, Tokens: float64(s.Blocks) * perBlock, Prompts: s.Prompts}
		for _, slot := range s.Holders {
			if addr := addrs[slot]; addr != "" {
				shared.Holders = append(shared.Holders, addr)
			}
		}
		slices.Sort(shared.Holders)
		out = append(out, shared)
	}
	return out
}
