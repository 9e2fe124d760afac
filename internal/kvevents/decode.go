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
	var err error
	switch msgp.NextType(payload) {
	case msgp.ArrayType:
		err = d.arrayBatch(payload)
	case msgp.MapType:
		err = d.mapBatch(payload)
	default:
		err = fmt.Errorf("starts with %v, want an array or a map", msgp.NextType(payload))
	}
	if err != nil {
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

// arrayBatch reads [ts, events, rank, …]; the first vLLM versions and other engines leave the rank out.
func (d *Decoder) arrayBatch(b []byte) error {
	n, rest, err := msgp.ReadArrayHeaderBytes(b)
	if err != nil {
		return err
	}
	if n < 2 {
		return fmt.Errorf("array of %d elements, want at least 2", n)
	}
	ts, rest, err := cut(rest)
	if err != nil {
		return err
	}
	d.batch.Time = batchTime(ts)
	if rest, err = d.events(rest); err != nil || n == 2 {
		return err
	}
	rank, _, err := cut(rest)
	d.batch.Rank = batchRank(rank)
	return err
}

func (d *Decoder) mapBatch(b []byte) error {
	n, rest, err := msgp.ReadMapHeaderBytes(b)
	if err != nil {
		return err
	}
	var events []byte
	for range n {
		var key, value []byte
		if key, value, rest, err = cutField(rest); err != nil {
			return err
		}
		switch string(key) {
		case "ts", "timestamp":
			d.batch.Time = batchTime(value)
		case "events":
			events = value
		case "data_parallel_rank", "attn_dp_rank", "dp_rank":
			d.batch.Rank = batchRank(value)
		}
	}
	if events == nil {
		return errors.New("map without events")
	}
	_, err = d.events(events)
	return err
}

// cut splits the first object off b.
func cut(b []byte) (object, rest []byte, err error) {
	n, err := extent(b)
	if err != nil {
		return nil, nil, err
	}
	return b[:n], b[n:], nil
}

// extent returns the number of bytes of the first object of b. Unlike msgp.Skip it does not recurse, so that nesting costs no stack,
// and it is quick about the numbers that make up nearly all of a payload.
func extent(b []byte) (int, error) {
	at := 0
	for open := 1; open > 0; open-- {
		if at >= len(b) {
			return 0, msgp.ErrShortBytes
		}
		size, children := uint64(1), uint64(0)
		switch lead := b[at]; {
		case lead < 0x80 || lead >= 0xe0: // small integers
		case lead < 0x90:
			children = 2 * uint64(lead&0x0f)
		case lead < 0xa0:
			children = uint64(lead & 0x0f)
		case lead < 0xc0:
			size = 1 + uint64(lead&0x1f)
		default:
			shape := shapes[lead-0xc0]
			size = uint64(shape.head)
			if size == 0 || size > uint64(len(b)-at) {
				return 0, msgp.ErrShortBytes
			}
			if shape.length > 0 {
				n := bigEndian(b[at+1 : at+1+int(shape.length)])
				size += n * uint64(shape.bytes)
				children = n * uint64(shape.children)
			}
		}
		if left := uint64(len(b) - at); size > left || children > left {
			return 0, msgp.ErrShortBytes // every child takes a byte at least
		}
		at += int(size)
		open += int(children)
	}
	return at, nil
}

func bigEndian(b []byte) uint64 {
	n := uint64(0)
	for _, c := range b {
		n = n<<8 | uint64(c)
	}
	return n
}

// shape says how an object that starts with a byte from 0xc0 to 0xdf goes on: the size of its head, how many bytes of that, after the
// first, are a length, and how many bytes and how many child objects follow for each unit of it.
type shape struct{ head, length, bytes, children uint8 }

var shapes = [0x20]shape{
	0x00: {head: 1}, 0x02: {head: 1}, 0x03: {head: 1}, // nil, false, true; 0xc1 is not used
	0x04: {2, 1, 1, 0}, 0x05: {3, 2, 1, 0}, 0x06: {5, 4, 1, 0}, // bin
	0x07: {3, 1, 1, 0}, 0x08: {4, 2, 1, 0}, 0x09: {6, 4, 1, 0}, // ext
	0x0a: {head: 5}, 0x0b: {head: 9}, // float
	0x0c: {head: 2}, 0x0d: {head: 3}, 0x0e: {head: 5}, 0x0f: {head: 9}, // uint
	0x10: {head: 2}, 0x11: {head: 3}, 0x12: {head: 5}, 0x13: {head: 9}, // int
	0x14: {head: 3}, 0x15: {head: 4}, 0x16: {head: 6}, 0x17: {head: 10}, 0x18: {head: 18}, // fixext
	0x19: {2, 1, 1, 0}, 0x1a: {3, 2, 1, 0}, 0x1b: {5, 4, 1, 0}, // str
	0x1c: {3, 2, 0, 1}, 0x1d: {5, 4, 0, 1}, // array
	0x1e: {3, 2, 0, 2}, 0x1f: {5, 4, 0, 2}, // map
}

// cutField splits a key and its value off b. A key that is no text comes back empty.
func cutField(b []byte) (key, value, rest []byte, err error) {
	if t := msgp.NextType(b); t == msgp.StrType {
		key, rest, err = msgp.ReadStringZC(b)
	} else {
		_, rest, err = cut(b)
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

// events reads the list of events at the start of b and returns what follows it.
func (d *Decoder) events(b []byte) ([]byte, error) {
	if msgp.IsNil(b) {
		return b[1:], nil
	}
	n, rest, err := msgp.ReadArrayHeaderBytes(b)
	if err != nil {
		return nil, fmt.Errorf("events: %w", err)
	}
	for i := range n {
		var one []byte
		if one, rest, err = cut(rest); err != nil {
			return nil, fmt.Errorf("event %d of %d: %w", i, n, err)
		}
		if len(d.batch.Events) >= d.limits.Events {
			d.batch.Skipped.TooBig++
			continue
		}
		d.event(one)
	}
	return rest, nil
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
	if int64(n) > int64(d.limits.Blocks) {
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
	if int64(n) > int64(d.limits.Tokens) {
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
