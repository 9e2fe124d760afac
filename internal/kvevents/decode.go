// SPDX-License-Identifier: Apache-2.0

package kvevents

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"strconv"
	"time"

	"github.com/cespare/xxhash/v2"
	"github.com/tinylib/msgp/msgp"
)

// Limits bound what one message may cost. A zero field means its default.
type Limits struct {
	// PayloadBytes is the largest payload decoded (default 32 MiB, about 500,000 blocks of 16 tokens).
	PayloadBytes int
	// Events is the largest number of events in a batch (default 262,144). Those beyond it are skipped.
	Events int
	// Blocks is the largest number of blocks in an event (default 65,536).
	Blocks int
	// Tokens is the largest number of tokens in an event (default 4,194,304).
	Tokens int
}

func (l Limits) withDefaults() Limits {
	l.PayloadBytes = positiveOr(l.PayloadBytes, 32<<20)
	l.Events = positiveOr(l.Events, 1<<18)
	l.Blocks = positiveOr(l.Blocks, 1<<16)
	l.Tokens = positiveOr(l.Tokens, 1<<22)
	return l
}

func positiveOr[T int | time.Duration](v, def T) T {
	if v > 0 {
		return v
	}
	return def
}

var (
	errTooBig    = errors.New("over the limit")
	errMalformed = errors.New("malformed event")
	errUnknown   = errors.New("unknown event")
)

// Decoder turns payloads into batches. It reuses its memory from call to call and is not safe for concurrent use.
type Decoder struct {
	limits Limits
	batch  Batch
	hashes []BlockHash
	tokens []uint32
	extra  []Extra
	lora   string // last adapter name seen, so that a stream of one adapter allocates it once
}

// NewDecoder returns a decoder with the given limits.
func NewDecoder(limits Limits) *Decoder {
	return &Decoder{limits: limits.withDefaults()}
}

// retainedBlocks is how much of its scratch memory a decoder keeps after an unusually large batch.
const retainedBlocks = 1 << 16

// Decode reads one payload. The batch is valid until the next call.
//
// Every generation since vLLM 0.9 is understood: events as arrays of any length, events as maps, the batch as an array or a map.
// Unknown fields and trailing positions are ignored; events that cannot be used are skipped one by one and counted in
// [Batch.Skipped]. An error means the payload as a whole is not a batch: nothing of it may be used.
func (d *Decoder) Decode(payload []byte) (*Batch, error) {
	if len(payload) > d.limits.PayloadBytes {
		return nil, fmt.Errorf("payload of %d bytes is %w of %d", len(payload), errTooBig, d.limits.PayloadBytes)
	}
	d.reset()
	ts, events, rank, err := splitBatch(payload)
	if err != nil {
		return nil, fmt.Errorf("decode batch of %d bytes: %w", len(payload), err)
	}
	d.batch.Time = batchTime(ts)
	d.batch.Rank = batchRank(rank)
	if err := d.events(events); err != nil {
		return nil, fmt.Errorf("decode batch of %d bytes: %w", len(payload), err)
	}
	return &d.batch, nil
}

func (d *Decoder) reset() {
	events := d.batch.Events
	clear(events)
	if cap(events) > retainedBlocks {
		events = nil
	}
	if cap(d.hashes) > retainedBlocks {
		d.hashes, d.extra = nil, nil
	}
	if cap(d.tokens) > retainedBlocks*16 {
		d.tokens = nil
	}
	d.batch = Batch{Events: events[:0]}
	d.hashes, d.tokens, d.extra = d.hashes[:0], d.tokens[:0], d.extra[:0]
}

// splitBatch finds the batch's three elements without looking into them. ts and rank may be empty.
func splitBatch(b []byte) (ts, events, rank []byte, err error) {
	switch msgp.NextType(b) {
	case msgp.ArrayType:
		n, rest, err := msgp.ReadArrayHeaderBytes(b)
		if err != nil {
			return nil, nil, nil, err
		}
		if n < 2 {
			return nil, nil, nil, fmt.Errorf("array of %d elements, want at least 2", n)
		}
		var parts [3][]byte
		for i := range min(int(n), len(parts)) {
			if parts[i], rest, err = cut(rest); err != nil {
				return nil, nil, nil, err
			}
		}
		return parts[0], parts[1], parts[2], nil
	case msgp.MapType:
		n, rest, err := msgp.ReadMapHeaderBytes(b)
		if err != nil {
			return nil, nil, nil, err
		}
		for range n {
			var key, value []byte
			if key, value, rest, err = cutField(rest); err != nil {
				return nil, nil, nil, err
			}
			switch string(key) {
			case "ts", "timestamp":
				ts = value
			case "events":
				events = value
			case "data_parallel_rank", "attn_dp_rank", "dp_rank":
				rank = value
			}
		}
		if events == nil {
			return nil, nil, nil, errors.New("map without events")
		}
		return ts, events, rank, nil
	}
	return nil, nil, nil, fmt.Errorf("starts with %v, want an array or a map", msgp.NextType(b))
}

// cut splits the first object off b.
func cut(b []byte) (object, rest []byte, err error) {
	rest, err = msgp.Skip(b)
	if err != nil {
		return nil, nil, err
	}
	return b[:len(b)-len(rest)], rest, nil
}

// cutField splits a key and its value off b. A key that is no text comes back empty.
func cutField(b []byte) (key, value, rest []byte, err error) {
	if t := msgp.NextType(b); t == msgp.StrType {
		key, rest, err = msgp.ReadStringZC(b)
	} else {
		rest, err = msgp.Skip(b)
	}
	if err != nil {
		return nil, nil, nil, err
	}
	value, rest, err = cut(rest)
	return key, value, rest, err
}

func batchTime(b []byte) time.Time {
	sec, ok := number(b)
	// Later than the year 2286 is no time of day, and would overflow below.
	if !ok || !(sec > 0 && sec < 1e10) {
		return time.Time{}
	}
	whole, frac := math.Modf(sec)
	return time.Unix(int64(whole), int64(frac*1e9))
}

func number(b []byte) (float64, bool) {
	switch msgp.NextType(b) {
	case msgp.Float64Type:
		f, _, err := msgp.ReadFloat64Bytes(b)
		return f, err == nil
	case msgp.Float32Type:
		f, _, err := msgp.ReadFloat32Bytes(b)
		return float64(f), err == nil
	case msgp.IntType, msgp.UintType:
		i, _, err := msgp.ReadInt64Bytes(b)
		return float64(i), err == nil
	}
	return 0, false
}

func batchRank(b []byte) int {
	if len(b) == 0 {
		return 0
	}
	rank, _, err := msgp.ReadInt32Bytes(b)
	if err != nil || rank < 0 {
		return 0
	}
	return int(rank)
}

func (d *Decoder) events(b []byte) error {
	if msgp.IsNil(b) {
		return nil
	}
	n, rest, err := msgp.ReadArrayHeaderBytes(b)
	if err != nil {
		return fmt.Errorf("events: %w", err)
	}
	for i := range n {
		var one []byte
		if one, rest, err = cut(rest); err != nil {
			return fmt.Errorf("event %d of %d: %w", i, n, err)
		}
		if len(d.batch.Events) >= d.limits.Events {
			d.batch.Skipped.TooBig++
			continue
		}
		d.event(one)
	}
	return nil
}

// event decodes one event and appends it to the batch, or counts why not.
func (d *Decoder) event(b []byte) {
	hashes, tokens, extra := len(d.hashes), len(d.tokens), len(d.extra)
	ev, err := d.decodeEvent(b)
	switch {
	case err == nil:
		d.batch.Events = append(d.batch.Events, ev)
		return
	case errors.Is(err, errUnknown):
		d.batch.Skipped.Unknown++
	case errors.Is(err, errTooBig):
		d.batch.Skipped.TooBig++
	default:
		d.batch.Skipped.Malformed++
	}
	d.hashes, d.tokens, d.extra = d.hashes[:hashes], d.tokens[:tokens], d.extra[:extra]
}

// fields are the parts of an event that matter here, still encoded; a part that was not sent is empty.
type fields struct {
	tag, hashes, parent, tokens, blockSize []byte
	loraID, loraName, medium, locality     []byte
	extra, group, spec                     []byte
}

// at returns the place for position i of an array event of the given kind, or nil for a position this package has no use for.
// The order is that of vllm/distributed/kv_events.py, where fields were only ever appended until events became maps in 0.24.
func (f *fields) at(kind Kind, i int) *[]byte {
	switch kind {
	case BlockStored:
		order := [...]*[]byte{
			&f.hashes, &f.parent, &f.tokens, &f.blockSize, &f.loraID, &f.medium, &f.loraName, &f.extra, &f.group, &f.spec,
		}
		if i < len(order) {
			return order[i]
		}
	case BlockRemoved:
		order := [...]*[]byte{&f.hashes, &f.medium, &f.group}
		if i < len(order) {
			return order[i]
		}
	}
	return nil
}

// named returns the place for a field of a map event, or nil.
func (f *fields) named(key []byte) *[]byte {
	switch string(key) {
	case "type":
		return &f.tag
	case "block_hashes":
		return &f.hashes
	case "parent_block_hash":
		return &f.parent
	case "token_ids":
		return &f.tokens
	case "block_size":
		return &f.blockSize
	case "lora_id":
		return &f.loraID
	case "lora_name":
		return &f.loraName
	case "medium":
		return &f.medium
	case "locality":
		return &f.locality
	case "extra_keys":
		return &f.extra
	case "group_idx":
		return &f.group
	case "kv_cache_spec_kind":
		return &f.spec
	}
	return nil
}

func (d *Decoder) decodeEvent(b []byte) (Event, error) {
	f, kind, err := splitEvent(b)
	if err != nil {
		return Event{}, err
	}
	if kind == AllBlocksCleared {
		return Event{Kind: kind, Group: NoGroup}, nil
	}
	ev := Event{Kind: kind, Group: NoGroup}
	if ev.Hashes, err = d.readHashes(f.hashes); err != nil {
		return Event{}, err
	}
	medium, err := text(f.medium)
	if err != nil {
		return Event{}, err
	}
	locality, err := text(f.locality)
	if err != nil {
		return Event{}, err
	}
	ev.Tier = tierOf(medium, locality)
	if given(f.group) {
		if ev.Group, err = smallInt(f.group); err != nil {
			return Event{}, err
		}
	}
	if kind == BlockRemoved {
		return ev, nil
	}
	return ev, d.readStored(&ev, &f)
}

// readStored fills in what only BlockStored has.
func (d *Decoder) readStored(ev *Event, f *fields) (err error) {
	if given(f.parent) {
		ev.HasParent = true
		if ev.Parent, _, err = readHash(f.parent); err != nil {
			return err
		}
	}
	if given(f.blockSize) {
		if ev.BlockSize, err = smallInt(f.blockSize); err != nil {
			return err
		}
	}
	if ev.Tokens, err = d.readTokens(f.tokens); err != nil {
		return err
	}
	if ev.LoRA, err = d.readLoRA(f.loraName, f.loraID); err != nil {
		return err
	}
	if ev.Extra, err = d.readExtra(f.extra, ev.LoRA, len(ev.Hashes)); err != nil {
		return err
	}
	spec, err := text(f.spec)
	if err != nil {
		return err
	}
	switch string(spec) {
	case "":
		ev.Attention = UnknownAttention
	case "full_attention", "mla_attention":
		ev.Attention = FullAttention
	default:
		ev.Attention = OtherAttention
	}
	return nil
}

func splitEvent(b []byte) (f fields, kind Kind, err error) {
	switch msgp.NextType(b) {
	case msgp.ArrayType:
		kind, err = f.splitArray(b)
	case msgp.MapType:
		kind, err = f.splitMap(b)
	default:
		err = errMalformed
	}
	return f, kind, err
}

func (f *fields) splitArray(b []byte) (Kind, error) {
	n, rest, err := msgp.ReadArrayHeaderBytes(b)
	if err != nil || n == 0 {
		return 0, errMalformed
	}
	if f.tag, rest, err = cut(rest); err != nil {
		return 0, errMalformed
	}
	kind, err := kindOf(f.tag)
	if err != nil {
		return 0, err
	}
	for i := range int(n) - 1 {
		var value []byte
		if value, rest, err = cut(rest); err != nil {
			return 0, errMalformed
		}
		if place := f.at(kind, i); place != nil {
			*place = value
		}
	}
	return kind, nil
}

func (f *fields) splitMap(b []byte) (Kind, error) {
	n, rest, err := msgp.ReadMapHeaderBytes(b)
	if err != nil {
		return 0, errMalformed
	}
	for range n {
		var key, value []byte
		if key, value, rest, err = cutField(rest); err != nil {
			return 0, errMalformed
		}
		if place := f.named(key); place != nil {
			*place = value
		}
	}
	return kindOf(f.tag)
}

func kindOf(tag []byte) (Kind, error) {
	name, err := text(tag)
	if err != nil || len(name) == 0 {
		return 0, errMalformed
	}
	switch string(name) {
	case "BlockStored":
		return BlockStored, nil
	case "BlockRemoved":
		return BlockRemoved, nil
	case "AllBlocksCleared":
		return AllBlocksCleared, nil
	}
	return 0, errUnknown
}

// given says whether a field was sent and is not nil.
func given(b []byte) bool { return len(b) > 0 && !msgp.IsNil(b) }

// text reads a string that may be missing.
func text(b []byte) ([]byte, error) {
	if !given(b) {
		return nil, nil
	}
	s, _, err := msgp.ReadStringZC(b)
	if err != nil {
		return nil, errMalformed
	}
	return s, nil
}

// smallInt reads a count or an index.
func smallInt(b []byte) (int, error) {
	n, _, err := msgp.ReadInt32Bytes(b)
	if err != nil || n < 0 {
		return 0, errMalformed
	}
	return int(n), nil
}

func (d *Decoder) readHashes(b []byte) ([]BlockHash, error) {
	n, rest, err := msgp.ReadArrayHeaderBytes(b)
	if err != nil {
		return nil, errMalformed
	}
	if int(n) > d.limits.Blocks {
		return nil, errTooBig
	}
	start := len(d.hashes)
	for range n {
		var h BlockHash
		if h, rest, err = readHash(rest); err != nil {
			return nil, err
		}
		d.hashes = append(d.hashes, h)
	}
	return d.hashes[start:len(d.hashes):len(d.hashes)], nil
}

func readHash(b []byte) (BlockHash, []byte, error) {
	switch msgp.NextType(b) {
	case msgp.UintType:
		u, rest, err := msgp.ReadUint64Bytes(b)
		return BlockHash(u), rest, err
	case msgp.IntType:
		i, rest, err := msgp.ReadInt64Bytes(b)
		return BlockHash(i), rest, err
	case msgp.BinType:
		digest, rest, err := msgp.ReadBytesZC(b)
		return foldHash(digest), rest, err
	case msgp.StrType:
		digest, rest, err := msgp.ReadStringZC(b)
		return foldHash(digest), rest, err
	}
	return 0, b, errMalformed
}

func foldHash(digest []byte) BlockHash {
	if n := len(digest); n == 16 || n == 32 {
		return BlockHash(binary.BigEndian.Uint64(digest[n-8:]))
	}
	return BlockHash(xxhash.Sum64(digest))
}

func (d *Decoder) readTokens(b []byte) ([]uint32, error) {
	if !given(b) {
		return nil, nil
	}
	n, rest, err := msgp.ReadArrayHeaderBytes(b)
	if err != nil {
		return nil, errMalformed
	}
	if int(n) > d.limits.Tokens {
		return nil, errTooBig
	}
	start := len(d.tokens)
	for range n {
		var token uint32
		if token, rest, err = readToken(rest); err != nil {
			return nil, errMalformed
		}
		d.tokens = append(d.tokens, token)
	}
	return d.tokens[start:len(d.tokens):len(d.tokens)], nil
}

// readToken is msgp.ReadUint32Bytes with the three encodings that nearly all token ids have tried first.
func readToken(b []byte) (uint32, []byte, error) {
	if len(b) >= 3 && b[0] == 0xcd {
		return uint32(b[1])<<8 | uint32(b[2]), b[3:], nil
	}
	if len(b) >= 5 && b[0] == 0xce {
		return binary.BigEndian.Uint32(b[1:]), b[5:], nil
	}
	if len(b) >= 1 && b[0] < 0x80 {
		return uint32(b[0]), b[1:], nil
	}
	return msgp.ReadUint32Bytes(b)
}

func (d *Decoder) readLoRA(name, id []byte) (string, error) {
	s, err := text(name)
	if err != nil {
		return "", err
	}
	if len(s) == 0 && given(id) {
		n, _, err := msgp.ReadInt64Bytes(id)
		if err != nil {
			return "", errMalformed
		}
		s = strconv.AppendInt([]byte("lora_id:"), n, 10)
	}
	if string(s) != d.lora {
		d.lora = string(s)
	}
	return d.lora, nil
}
