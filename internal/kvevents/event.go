// SPDX-License-Identifier: Apache-2.0

package kvevents

import (
	"fmt"
	"strings"
	"time"
)

// BlockHash is an engine's name for a block, folded to 64 bits. It means something only within one replica.
//
// Integers, signed (vLLM up to 0.10.1) or unsigned, are taken bit by bit. Digests of 16 or 32 bytes
// (VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0) become their last eight bytes, big-endian, which is what vLLM publishes when it folds
// them itself. Any other byte string or text is hashed with xxhash64.
type BlockHash uint64

// Kind says what an [Event] reports.
type Kind uint8

// The events known today. Others are skipped and counted.
const (
	// BlockStored reports blocks that were added to the cache.
	BlockStored Kind = iota + 1
	// BlockRemoved reports blocks whose memory was given to somebody else.
	BlockRemoved
	// AllBlocksCleared reports that the whole cache was dropped.
	AllBlocksCleared
)

// String returns the tag the event has on the wire.
func (k Kind) String() string {
	switch k {
	case BlockStored:
		return "BlockStored"
	case BlockRemoved:
		return "BlockRemoved"
	case AllBlocksCleared:
		return "AllBlocksCleared"
	}
	return fmt.Sprintf("Kind(%d)", uint8(k))
}

// Tier is the kind of memory a block lies in, fastest first.
type Tier uint8

// The tiers, by what reading a block back costs.
const (
	// Device is the accelerator's memory ("GPU", or no medium given): a hit costs nothing.
	Device Tier = iota
	// Host is the engine's own main memory ("CPU", "CPU_PINNED").
	Host
	// Remote is a store that other replicas may share ("OBJ", "EXTERNAL", "REMOTE", or locality REMOTE).
	Remote
	// Disk is a local drive ("DISK", "STORAGE", "FS") and every medium whose name is not known, because it has the least credit.
	Disk

	// Tiers is the number of tiers.
	Tiers
)

// Credit is the share of a block's prefill that a hit in the tier saves: 1 for [Device], 0.8 for [Host], 0.6 for [Remote] and
// 0.3 for [Disk]. The figures are estimates of transfer against compute for models of usual size, not measured here.
func (t Tier) Credit() float64 {
	switch t {
	case Device:
		return 1
	case Host:
		return 0.8
	case Remote:
		return 0.6
	}
	return 0.3
}

// String returns the tier's name in lower case.
func (t Tier) String() string {
	switch t {
	case Device:
		return "device"
	case Host:
		return "host"
	case Remote:
		return "remote"
	}
	return "disk"
}

// tierOf maps an event's medium and locality to a tier.
func tierOf(medium, locality []byte) Tier {
	if strings.EqualFold(string(locality), "REMOTE") {
		return Remote
	}
	switch string(medium) {
	case "", "GPU", "gpu":
		return Device
	case "CPU", "cpu", "CPU_PINNED", "cpu_pinned":
		return Host
	case "OBJ", "obj", "EXTERNAL", "external", "REMOTE", "remote":
		return Remote
	}
	return Disk
}

// NoGroup is the [Event.Group] of an event that names no KV-cache group.
const NoGroup = -1

// Attention says whether blocks of a KV-cache group decide about a prefix hit.
type Attention uint8

const (
	// UnknownAttention is the state before vLLM 0.22, which did not name the group's kind.
	UnknownAttention Attention = iota
	// FullAttention are the kinds full_attention and mla_attention: every block of the prefix must be held.
	FullAttention
	// OtherAttention is any other kind (sliding window, mamba …), whose blocks say nothing about the whole prefix.
	OtherAttention
)

// Event is one change of a replica's cache. Its slices belong to the [Decoder] and are valid until its next call.
type Event struct {
	// Kind says which of the fields below are set.
	Kind Kind
	// Hashes are the engine's names of the blocks, in prefix order when stored.
	Hashes []BlockHash
	// Parent is the block before the first of Hashes; it means nothing unless HasParent.
	Parent BlockHash
	// HasParent is false for blocks at the head of a prompt.
	HasParent bool
	// Tokens are the token ids of all blocks, in order; empty in hash-only events of offloading tiers.
	Tokens []uint32
	// BlockSize is the number of tokens in a block; 0 in some hash-only events.
	BlockSize int
	// LoRA names the adapter; empty for the base model. Engines before vLLM 0.14 give only a number n, kept as "lora_id:n".
	LoRA string
	// Extra has one digest for each of Hashes, or is empty when no block has extra keys.
	Extra []Extra
	// Tier is where the blocks lie.
	Tier Tier
	// Group is the KV-cache group's index, or NoGroup.
	Group int
	// Attention is the kind of that group.
	Attention Attention
}

// Batch is the content of one message: what one engine step changed.
type Batch struct {
	// Time is when the engine made the batch, by its own clock; zero when it is missing or no sensible number.
	Time time.Time
	// Rank is the data-parallel rank, 0 when it is not given.
	Rank int
	// Events are in the order they happened.
	Events []Event
	// Skipped counts what was left out.
	Skipped Skipped
}

// Skipped counts events a batch contained but that could not be used. The others of the batch were.
type Skipped struct {
	// Unknown events have a tag this package does not know.
	Unknown int
	// Malformed events have a known tag and a field of the wrong type or size.
	Malformed int
	// TooBig events exceed a limit.
	TooBig int
}

// Sum is how many there are.
func (s Skipped) Sum() int { return s.Unknown + s.Malformed + s.TooBig }

// err tells of them, nil if there are none.
func (s Skipped) err() error {
	if s.Sum() == 0 {
		return nil
	}
	return fmt.Errorf("events of a batch are left out: %d unknown, %d malformed, %d too big", s.Unknown, s.Malformed, s.TooBig)
}
