// SPDX-License-Identifier: Apache-2.0

package kvevents

import (
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/cespare/xxhash/v2"
)

// benchPayload is one prefill chunk of 2,048 tokens as vLLM 0.32 publishes it: blocks of 16 tokens of a 150,000-word vocabulary, chained
// on parent unless that is 0.
func benchPayload(r *rand.Rand, parent uint64) (payload []byte, tokens []uint32, last uint64, blocks int) {
	const size = 16
	blocks = 2048 / size
	tokens = make([]uint32, blocks*size)
	for i := range tokens {
		tokens[i] = uint32(r.IntN(150_000))
	}
	w := wire{}.mapping(11).str("type").str("BlockStored").str("block_hashes").array(uint32(blocks))
	for range blocks {
		last = r.Uint64() >> 1
		w = w.num(int64(last))
	}
	w = w.str("parent_block_hash")
	if parent == 0 {
		w = w.null()
	} else {
		w = w.num(int64(parent))
	}
	w = w.str("token_ids").array(uint32(len(tokens)))
	for _, t := range tokens {
		w = w.num(int64(t))
	}
	w = w.str("block_size").num(size).str("lora_id").null().str("medium").str("GPU").str("lora_name").null()
	w = w.str("extra_keys").array(uint32(blocks))
	for range blocks {
		w = w.null()
	}
	w = w.str("group_idx").num(0).str("kv_cache_spec_kind").str("full_attention")
	return batchOf(w), tokens, last, blocks
}

// BenchmarkDecodeApply reports how many blocks a second one core decodes and applies to a view that is full, so that every block also
// makes another leave; and how many times longer that takes than one xxhash pass over the same payloads.
func BenchmarkDecodeApply(b *testing.B) {
	r := rand.New(rand.NewPCG(1, 1))
	payloads := make([][]byte, 512)
	blocks, size := 0, 0
	var parent uint64
	for i := range payloads {
		if i%8 == 0 {
			parent = 0
		}
		payloads[i], _, parent, blocks = benchPayload(r, parent)
		size += len(payloads[i])
	}
	d, v := NewDecoder(Limits{}), NewView(ViewConfig{Blocks: 25_000})
	b.ReportAllocs()
	i := 0
	var applied []time.Duration
	hashed := time.Hour
	for b.Loop() {
		payload := payloads[i%len(payloads)]
		start := time.Now()
		batch, err := d.Decode(payload)
		if err != nil {
			b.Fatal(err)
		}
		v.Apply(batch)
		applied = append(applied, time.Since(start))
		hashed = min(hashed, hashTime(payload))
		i++
	}
	slices.Sort(applied)
	fast := applied[len(applied)/10] // a neighbour on the machine interrupts many
	b.ReportMetric(float64(blocks)/fast.Seconds(), "blocks/s")
	b.ReportMetric(float64(fast)/float64(hashed), "x-of-xxhash")
}

// hashTime is how long xxhash takes for a payload.
func hashTime(payload []byte) time.Duration {
	const rounds = 8
	var sum uint64
	start := time.Now()
	for range rounds {
		sum += xxhash.Sum64(payload)
	}
	took := time.Since(start) / rounds
	runtime.KeepAlive(sum)
	return took
}

// BenchmarkLongest looks a fully held prompt of 128k tokens up: by keys, galloping and, once a block in the middle is missing behind
// which blocks are still held, one by one; and by tokens.
func BenchmarkLongest(b *testing.B) {
	r := rand.New(rand.NewPCG(1, 1))
	v, d := NewView(ViewConfig{}), NewDecoder(Limits{})
	var prompt []uint32
	var parent uint64
	for range 64 {
		payload, tokens, last, _ := benchPayload(r, parent)
		batch, err := d.Decode(payload)
		if err != nil {
			b.Fatal(err)
		}
		v.Apply(batch)
		prompt, parent = append(prompt, tokens...), last
	}
	keys := AppendKeys(nil, prompt, 16, "", nil)
	check := func(b *testing.B, m Match) {
		if m.Blocks != len(keys) {
			b.Fatalf("%d of %d blocks", m.Blocks, len(keys))
		}
	}
	b.Run("keys", func(b *testing.B) {
		for b.Loop() {
			check(b, v.LongestKeys(keys, 16))
		}
	})
	b.Run("tokens", func(b *testing.B) {
		for b.Loop() {
			check(b, v.Longest(prompt, "", nil))
		}
	})
	v.Apply(&Batch{Events: []Event{stored(0, 5, 1), stored(5, 6, 2), removed(5)}})
	b.Run("keys-with-holes", func(b *testing.B) {
		for b.Loop() {
			check(b, v.LongestKeys(keys, 16))
		}
	})
}
