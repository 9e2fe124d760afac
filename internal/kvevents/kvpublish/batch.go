// SPDX-License-Identifier: Apache-2.0

package kvpublish

import (
	"time"

	"github.com/tinylib/msgp/msgp"
)

// Stored describes blocks added to a cache.
type Stored struct {
	// Hashes name the blocks in prefix order.
	Hashes []uint64
	// Parent is the block before the first, nil at the head of a prompt.
	Parent *uint64
	// Tokens are the ids of all blocks; empty in a hash-only event.
	Tokens []uint32
	// BlockSize is the number of tokens in a block.
	BlockSize int
	// Medium is "GPU" when empty.
	Medium string
	// LoRA names the adapter; empty for the base model.
	LoRA string
	// Salt is the request's cache_salt; it is published with the first block of a prompt.
	Salt string
}

// Batch collects the events of one engine step in the encoding of vLLM 0.24 and later. The zero value is an empty batch.
type Batch struct {
	// Time is when the step ended.
	Time time.Time
	// Rank is the data-parallel rank.
	Rank int

	events []byte
	count  uint32
}

// Len returns the number of events.
func (b *Batch) Len() int { return int(b.count) }

// Reset empties the batch and keeps its memory.
func (b *Batch) Reset() { b.events, b.count = b.events[:0], 0 }

// Stored adds a BlockStored event.
func (b *Batch) Stored(s Stored) {
	w := b.begin("BlockStored", 11)
	w = appendHashes(w, s.Hashes)
	w = msgp.AppendString(w, "parent_block_hash")
	if s.Parent == nil {
		w = msgp.AppendNil(w)
	} else {
		w = msgp.AppendUint64(w, *s.Parent)
	}
	w = msgp.AppendString(w, "token_ids")
	w = msgp.AppendArrayHeader(w, uint32(len(s.Tokens)))
	for _, t := range s.Tokens {
		w = msgp.AppendUint32(w, t)
	}
	w = msgp.AppendInt(msgp.AppendString(w, "block_size"), s.BlockSize)
	w = msgp.AppendNil(msgp.AppendString(w, "lora_id"))
	w = appendMedium(w, s.Medium)
	w = msgp.AppendString(w, "lora_name")
	if s.LoRA == "" {
		w = msgp.AppendNil(w)
	} else {
		w = msgp.AppendString(w, s.LoRA)
	}
	w = s.appendExtra(msgp.AppendString(w, "extra_keys"))
	w = msgp.AppendInt(msgp.AppendString(w, "group_idx"), 0)
	b.events = msgp.AppendString(msgp.AppendString(w, "kv_cache_spec_kind"), "full_attention")
}

// appendExtra writes one list of extra keys for each block: the adapter's name, and the salt on the first block of a prompt.
func (s *Stored) appendExtra(w []byte) []byte {
	w = msgp.AppendArrayHeader(w, uint32(len(s.Hashes)))
	for i := range s.Hashes {
		var keys []string
		if s.LoRA != "" {
			keys = append(keys, s.LoRA)
		}
		if s.Salt != "" && i == 0 && s.Parent == nil {
			keys = append(keys, s.Salt)
		}
		if len(keys) == 0 {
			w = msgp.AppendNil(w)
			continue
		}
		w = msgp.AppendArrayHeader(w, uint32(len(keys)))
		for _, k := range keys {
			w = msgp.AppendString(w, k)
		}
	}
	return w
}

// Removed adds a BlockRemoved event. vLLM sends one for each block.
func (b *Batch) Removed(medium string, hashes ...uint64) {
	w := b.begin("BlockRemoved", 4)
	w = appendMedium(appendHashes(w, hashes), medium)
	b.events = msgp.AppendInt(msgp.AppendString(w, "group_idx"), 0)
}

// Cleared adds an AllBlocksCleared event.
func (b *Batch) Cleared() { b.events = b.begin("AllBlocksCleared", 1) }

// begin writes the head of an event that is a map of n fields, its type included.
func (b *Batch) begin(tag string, n uint32) []byte {
	b.count++
	w := msgp.AppendMapHeader(b.events, n)
	return msgp.AppendString(msgp.AppendString(w, "type"), tag)
}

func appendHashes(w []byte, hashes []uint64) []byte {
	w = msgp.AppendString(w, "block_hashes")
	w = msgp.AppendArrayHeader(w, uint32(len(hashes)))
	for _, h := range hashes {
		w = msgp.AppendUint64(w, h)
	}
	return w
}

func appendMedium(w []byte, medium string) []byte {
	if medium == "" {
		medium = "GPU"
	}
	return msgp.AppendString(msgp.AppendString(w, "medium"), medium)
}

// Append appends the encoded batch to dst.
func (b *Batch) Append(dst []byte) []byte {
	dst = msgp.AppendArrayHeader(dst, 3)
	dst = msgp.AppendFloat64(dst, float64(b.Time.UnixNano())/1e9)
	dst = msgp.AppendArrayHeader(dst, b.count)
	dst = append(dst, b.events...)
	return msgp.AppendInt(dst, b.Rank)
}
