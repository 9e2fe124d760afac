// SPDX-License-Identifier: Apache-2.0

package kvevents

import (
	"encoding/binary"

	"github.com/cespare/xxhash/v2"
	"github.com/tinylib/msgp/msgp"
)

// Key names a block by its whole prefix: equal keys mean equal tokens from the start of the prompt on, under the same adapter and
// extra keys, in blocks of the same size. Replicas of any engine version, hash algorithm or seed agree about it.
type Key uint64

// Extra is a digest of what besides tokens and adapter tells a block apart: images by content, and the cache salt on the first
// block. 0 means nothing does.
//
// Engines before vLLM 0.17 do not publish extra keys, so that there prompts with different images or salts look equal. That costs
// a wrong guess of where to go, never a wrong answer: the engine itself still tells them apart.
type Extra uint64

// SaltExtra returns the Extra of a prompt's first block when its request has the given cache_salt and no image in that block.
func SaltExtra(salt string) Extra {
	if salt == "" {
		return 0
	}
	d := newExtraDigest()
	d.write('s', []byte(salt))
	return d.sum()
}

// AppendKeys appends the keys of the full blocks of tokens to dst. extra holds the Extra of each block and may be shorter.
// A blockSize below 1 gives no keys.
func AppendKeys(dst []Key, tokens []uint32, blockSize int, lora string, extra []Extra) []Key {
	if blockSize < 1 {
		return dst
	}
	var c chain
	key := rootKey(lora)
	for i := 0; (i+1)*blockSize <= len(tokens); i++ {
		key = c.next(key, tokens[i*blockSize:(i+1)*blockSize], extraAt(extra, i))
		dst = append(dst, key)
	}
	return dst
}

func extraAt(extra []Extra, i int) Extra {
	if i < len(extra) {
		return extra[i]
	}
	return 0
}

// rootKey is where the chain of an adapter's prompts starts.
func rootKey(lora string) Key {
	if lora == "" {
		return 0x9ae16a3b2f90404f
	}
	return Key(xxhash.Sum64String("lora\x00" + lora))
}

// orphanKey is where a chain starts whose head was never seen. No prompt's chain starts there.
func orphanKey(parent BlockHash) Key {
	var b [14]byte
	copy(b[:], "orphan")
	binary.LittleEndian.PutUint64(b[6:], uint64(parent))
	return Key(xxhash.Sum64(b[:]))
}

// chain computes keys; it only holds scratch memory.
type chain struct{ buf []byte }

// next is xxhash64 over the parent's key, the extra digest and the tokens, all little-endian.
func (c *chain) next(parent Key, tokens []uint32, extra Extra) Key {
	b := c.buf[:0]
	b = binary.LittleEndian.AppendUint64(b, uint64(parent))
	b = binary.LittleEndian.AppendUint64(b, uint64(extra))
	for _, t := range tokens {
		b = binary.LittleEndian.AppendUint32(b, t)
	}
	c.buf = b
	return Key(xxhash.Sum64(b))
}

// readExtra reads one digest per block. The list is nil, or has for each block nil or a list of keys.
func (d *Decoder) readExtra(b []byte, lora string, blocks int) ([]Extra, error) {
	if !given(b) {
		return nil, nil
	}
	n, rest, err := msgp.ReadArrayHeaderBytes(b)
	if err != nil {
		return nil, errMalformed
	}
	if int64(n) > int64(d.limits.Blocks) {
		return nil, errTooBig
	}
	start, some := len(d.extra), false
	for range min(int(n), blocks) {
		var one []byte
		if one, rest, err = cut(rest); err != nil {
			return nil, errMalformed
		}
		e, err := extraOf(one, lora)
		if err != nil {
			return nil, err
		}
		some = some || e != 0
		d.extra = append(d.extra, e)
	}
	if !some {
		d.extra = d.extra[:start]
		return nil, nil
	}
	return d.extra[start:len(d.extra):len(d.extra)], nil
}

// extraOf digests the extra keys of one block. vLLM lists the adapter's name first; it is left out here, because the chain starts
// from it already and engines that publish no extra keys must compare equal.
func extraOf(b []byte, lora string) (Extra, error) {
	if !given(b) {
		return 0, nil
	}
	n, rest, err := msgp.ReadArrayHeaderBytes(b)
	if err != nil {
		return 0, errMalformed
	}
	d := newExtraDigest()
	for i := range n {
		var one []byte
		if one, rest, err = cut(rest); err != nil {
			return 0, errMalformed
		}
		if i == 0 && lora != "" && msgp.NextType(one) == msgp.StrType {
			if s, _, err := msgp.ReadStringZC(one); err == nil && string(s) == lora {
				continue
			}
		}
		if err := d.value(one, 0); err != nil {
			return 0, err
		}
	}
	return d.sum(), nil
}

// extraDigest hashes values by type, length and content, so that differing encoders of one value agree.
type extraDigest struct {
	h     xxhash.Digest
	wrote bool
}

func newExtraDigest() *extraDigest {
	d := &extraDigest{}
	d.h.Reset()
	return d
}

func (d *extraDigest) write(kind byte, content []byte) {
	var head [9]byte
	head[0] = kind
	binary.LittleEndian.PutUint64(head[1:], uint64(len(content)))
	_, _ = d.h.Write(head[:]) // a hash never fails
	_, _ = d.h.Write(content)
	d.wrote = true
}

// extraDepth is how deep lists within extra keys may nest; vLLM's nest once: (identifier, offset).
const extraDepth = 4

func (d *extraDigest) value(b []byte, depth int) error {
	switch msgp.NextType(b) {
	case msgp.StrType:
		s, _, err := msgp.ReadStringZC(b)
		if err != nil {
			return errMalformed
		}
		d.write('s', s)
	case msgp.BinType:
		s, _, err := msgp.ReadBytesZC(b)
		if err != nil {
			return errMalformed
		}
		d.write('b', s)
	case msgp.ArrayType:
		n, rest, err := msgp.ReadArrayHeaderBytes(b)
		if err != nil || depth == extraDepth {
			return errMalformed
		}
		d.write('l', binary.LittleEndian.AppendUint32(nil, n))
		for range n {
			var one []byte
			if one, rest, err = cut(rest); err != nil {
				return errMalformed
			}
			if err := d.value(one, depth+1); err != nil {
				return err
			}
		}
	case msgp.IntType, msgp.UintType:
		h, _, err := readHash(b)
		if err != nil {
			return errMalformed
		}
		d.write('i', binary.LittleEndian.AppendUint64(nil, uint64(h)))
	default:
		d.write('o', b)
	}
	return nil
}

// sum returns the digest, never 0 once a value was written.
func (d *extraDigest) sum() Extra {
	if !d.wrote {
		return 0
	}
	return Extra(max(d.h.Sum64(), 1))
}
