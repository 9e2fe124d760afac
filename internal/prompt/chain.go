// SPDX-License-Identifier: Apache-2.0

package prompt

import (
	"encoding/binary"
	"unicode/utf16"
	"unicode/utf8"
)

// BlockSize is the number of bytes of prompt text in a block: 64 token ids of four bytes, or about 64
// tokens of English text.
const BlockSize = 256

// mediaSize is how much text an image, audio or video stands for, in bytes: a common image is some
// hundred tokens, and its real size is known only to the model.
const mediaSize = 4 * BlockSize

// Tags frame the text. They are bytes that never occur in UTF-8, which the text otherwise is (a body
// that is not, the engine refuses), so no text can imitate one and nothing needs to be counted before
// it is written. What has a fixed size (a number, a digest) follows its tag as it is.
const (
	tagField   = 0xFF // a field of the head follows, its number first
	tagMessage = 0xFE // a message follows, its role first
	tagText    = 0xFD // text
	tagJSON    = 0xFC // JSON as received, without white space
	tagMember  = 0xFB // a member of a message other than its content, its number first
	tagMedia   = 0xFA // mediaSize bytes of digest
	tagTool    = 0xF9 // the definition of a tool
)

// text takes the text of a prompt piece by piece and hashes it block by block. A whole block is hashed
// where it lies in the body; only what falls between two pieces is copied, to stage.
type text struct {
	key   key
	hash  uint64    // of the full blocks so far, and of what the text started from
	chain *[]uint64 // where the hash of each block goes; nil to drop them
	full  int       // full blocks so far
	done  bool      // the body was cut here: whatever follows is ignored
	count bool      // count bytes only
	n     int       // bytes in stage
	size  int       // bytes counted
	stage [BlockSize]byte
}

func (t *text) block(b *[BlockSize]byte) {
	t.hash = t.key.block(t.hash, b)
	t.full++
	if t.chain != nil {
		*t.chain = append(*t.chain, t.hash)
	}
}

// sum is the hash of everything so far, to the byte. It changes nothing.
func (t *text) sum() uint64 {
	var b [BlockSize]byte
	copy(b[:], t.stage[:t.n])
	return mix(t.key.block(t.hash, &b) + uint64(t.n))
}

// bytes is how long the text is so far.
func (t *text) bytes() int { return t.full*BlockSize + t.n + t.size }

// raw adds bytes that need no rewriting.
func (t *text) raw(b []byte) {
	if t.done {
		return
	}
	if t.count {
		t.size += len(b)
		return
	}
	if t.n > 0 {
		c := copy(t.stage[t.n:], b)
		t.n, b = t.n+c, b[c:]
		if t.n < BlockSize {
			return
		}
		t.block(&t.stage)
	}
	for len(b) >= BlockSize {
		t.block((*[BlockSize]byte)(b))
		b = b[BlockSize:]
	}
	t.n = copy(t.stage[:], b)
}

// tag adds one byte of framing.
func (t *text) tag(tag byte) {
	if t.n+1 < BlockSize && !t.count && !t.done {
		t.stage[t.n] = tag
		t.n++
		return
	}
	t.raw([]byte{tag})
}

// numbered adds a tag with a number.
func (t *text) numbered(tag, number byte) {
	t.tag(tag)
	t.tag(number)
}

// escaped adds the content of strings as it stands in the body.
func (t *text) escaped(s []byte, cut bool) {
	if t.done {
		return
	}
	if cut && len(s) > 0 && s[len(s)-1] == '\\' && startsEscape(s, len(s)-1) {
		s = s[:len(s)-1]
	}
	// In steps that stay in the nearest cache from the search to the hash.
	const step = 8 << 10
	for i := 0; i < len(s); {
		end := min(i+step, len(s))
		clean := rewritable(s, i, end)
		t.raw(s[i:clean])
		i = clean
		if clean < end {
			i += t.rewrite(s[i:], cut)
		}
	}
}

// rewrite adds the escapes at the start of s in canonical form, and returns how many bytes they took.
func (t *text) rewrite(s []byte, cut bool) int {
	var room [64]byte
	to, i := room[:0], 0
	for i+1 < len(s) && s[i] == '\\' && s[i+1]&1 != 0 {
		if c, ok := codeUnit(s[i:]); ok && c >= 0x80 && !utf16.IsSurrogate(c) {
			to = utf8.AppendRune(to, c)
			if i += 6; len(to) > len(room)-8 {
				t.raw(to)
				to = room[:0]
			}
			continue
		}
		r, size := unescape(s[i:])
		halfPair := cut && r >= 0xD800 && r < 0xDC00 && size == 6 && len(s)-i < 12
		if size == 0 || halfPair {
			i = len(s)
			break
		}
		if s[i+1] == '/' {
			to = append(to, '/')
		} else {
			to = appendCanonical(to, r)
		}
		if i += size; len(to) > len(room)-8 {
			t.raw(to)
			to = room[:0]
		}
	}
	t.raw(to)
	return i
}

// string adds the content of a string value.
func (t *text) string(v []byte) {
	t.escaped(v[1:], cut(v))
	t.stopAt(v)
}

// json adds a value as JSON in the order received (templates print it so), without white space.
func (t *text) json(v []byte) {
	settled := rewritable(v, 0, len(v)) == len(v) && !cut(v)
	from := 0 // start of the run that can be added as one
	for i := 0; i < len(v); {
		switch v[i] {
		case '"':
			i = min(closingQuote(v, i+1)+1, len(v))
		case ' ', '\n', '\r', '\t':
			t.piece(v[from:i], settled, false)
			i = space(v, i)
			from = i
		default:
			i++
		}
	}
	t.piece(v[from:], settled, cut(v))
	if isString(v) && !cut(v) {
		t.raw([]byte{'"'})
	}
	t.stopAt(v)
}

// piece adds a part of a JSON value; settled says that nothing in it must be rewritten.
func (t *text) piece(s []byte, settled, cut bool) {
	if settled {
		t.raw(s)
		return
	}
	t.escaped(s, cut)
}

// value adds a string as text and anything else as JSON.
func (t *text) value(v []byte) {
	if isString(v) {
		t.tag(tagText)
		t.string(v)
		return
	}
	t.tag(tagJSON)
	t.json(v)
}

// media adds the stand-in for an image, audio or video: its digest, over and over.
func (t *text) media(v []byte) {
	if cut(v) {
		t.done = true
		return
	}
	digest := text{key: t.key}
	digest.value(v)
	t.tag(tagMedia)
	var eight [8]byte
	binary.LittleEndian.PutUint64(eight[:], digest.sum())
	for range mediaSize / len(eight) {
		t.raw(eight[:])
	}
}

// ids adds a list of token ids, four bytes each, and returns how many there were. Ids are taken modulo
// 2³²; ok is false when something in the list is no integer, and what came before it has been added.
func (t *text) ids(list []byte) (n int, ok bool) {
	var room [BlockSize]byte
	to := room[:0]
	s := list[1:]
	i := space(s, 0)
	for i < len(s) && s[i] != ']' {
		negative := s[i] == '-'
		if negative {
			i++
		}
		id, from := uint32(0), i
		for i < len(s) && s[i]-'0' < 10 {
			id = id*10 + uint32(s[i]-'0')
			i++
		}
		if i == len(s) {
			break // perhaps only a part of the number
		}
		if i == from || kinds[s[i]] == literal {
			t.raw(to)
			return n, false
		}
		if negative {
			id = -id
		}
		n++
		if to = binary.LittleEndian.AppendUint32(to, id); len(to) == len(room) {
			t.raw(to)
			to = room[:0]
		}
		if s[i] <= ' ' {
			i = space(s, i)
		}
		if i < len(s) && s[i] == ',' {
			if i++; i < len(s) && s[i] <= ' ' {
				i = space(s, i)
			}
		}
	}
	t.raw(to)
	t.stopAt(list)
	return n, true
}

// stopAt ignores what follows when v was cut: the text would go on differently.
func (t *text) stopAt(v []byte) { t.done = t.done || cut(v) }
