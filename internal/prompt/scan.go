// SPDX-License-Identifier: Apache-2.0

package prompt

import (
	"bytes"
	"encoding/binary"
	"math/bits"
)

// The scanner finds where JSON values start and end, and nothing more: it never decodes, allocates or
// recurses. It is as lenient as that allows (it does not tell a matching bracket from another), because
// an engine will refuse what is not JSON anyway and until then any answer is as good as another.
//
// A value is a slice of the body. Strings are kept with their opening quote and without the closing
// one, so that a string whose end is missing looks like any other. The slices keep the body's capacity:
// see [cut].

// maxDepth bounds the nesting of a body. Python's json, which the engines use, gives up at about 1,000.
const maxDepth = 1024

// cut reports whether a value reaches to the end of the body. Inside whole JSON something always
// follows a value, be it only the closing bracket, so such a value was cut off, or may have been.
func cut(value []byte) bool { return len(value) > 0 && len(value) == cap(value) }

// space skips white space.
func space(b []byte, i int) int {
	for i < len(b) && (b[i] == ' ' || b[i] == '\n' || b[i] == '\r' || b[i] == '\t') {
		i++
	}
	return i
}

// scanner remembers where long strings end, so that a body's text is searched for quotes only once,
// however often the values around it are walked over.
type scanner struct {
	long     []stringEnd // in the order of the body
	at       int         // the one likely to be asked for next
	complete bool        // the whole body has been scanned
}

// stringEnd says where a string starts and ends, counted from the body's end: the same for all slices of
// the body.
type stringEnd struct{ from, to int }

// nearby is how far the end of a string is looked for before it counts as long.
const nearby = 64

// endOfString returns where the closing quote of a string is whose content starts at i, or len(b).
func (s *scanner) endOfString(b []byte, i int) int {
	if at, ok := shortString(b, i); ok {
		return at
	}
	if i >= len(b) {
		return len(b)
	}
	if at := bytes.IndexByte(b[i:min(i+nearby, len(b))], '"'); at >= 0 && !isEscaped(b[i:], at) {
		return i + at
	}
	if !s.complete {
		end := closingQuote(b, i)
		s.long = append(s.long, stringEnd{cap(b) - i, cap(b) - end})
		return end
	}
	if to, ok := s.recall(cap(b) - i); ok {
		return min(cap(b)-to, len(b))
	}
	return closingQuote(b, i)
}

// shortString is endOfString for strings shorter than eight bytes, as are most keys, roles and types: a
// call to search them would take longer.
func shortString(b []byte, i int) (end int, ok bool) {
	if i+8 > len(b) {
		return 0, false
	}
	word := binary.LittleEndian.Uint64(b[i:])
	quotes, slashes := hasZero(word^('"'*ones)), hasZero(word^('\\'*ones))
	return i + bits.TrailingZeros64(quotes)/8, quotes != 0 && slashes == 0
}

// recall finds the end of a long string seen before.
func (s *scanner) recall(from int) (to int, ok bool) {
	if s.at >= len(s.long) || s.long[s.at].from != from {
		low, high := 0, len(s.long)
		for low < high {
			if middle := (low + high) / 2; s.long[middle].from > from {
				low = middle + 1
			} else {
				high = middle
			}
		}
		if low == len(s.long) || s.long[low].from != from {
			return 0, false
		}
		s.at = low
	}
	to = s.long[s.at].to
	s.at++
	return to, true
}

// closingQuote is endOfString without a memory.
func closingQuote(b []byte, i int) int {
	if at, ok := shortString(b, i); ok {
		return at
	}
	for at := min(i, len(b)); ; {
		next := bytes.IndexByte(b[at:], '"')
		if next < 0 {
			return len(b)
		}
		at += next
		if !isEscaped(b[i:], at-i) {
			return at
		}
		at++
		// Where one quote is escaped, more are near: JSON in JSON, or code.
		for quiet := 0; quiet < 8 && at+8 <= len(b); at += 8 {
			quotes := hasZero(binary.LittleEndian.Uint64(b[at:]) ^ ('"' * ones))
			quiet++
			for ; quotes != 0; quotes &= quotes - 1 {
				quiet = 0
				if quote := at + bits.TrailingZeros64(quotes)/8; b[quote] == '"' && !isEscaped(b[i:], quote-i) {
					return quote
				}
			}
		}
	}
}

// isEscaped reports whether an odd number of backslashes stands before s[i].
func isEscaped(s []byte, i int) bool {
	if i == 0 || s[i-1] != '\\' {
		return false
	}
	return startsEscape(s, i-1)
}

// next returns the value that starts at i and the index behind it.
func (s *scanner) next(b []byte, i int) (value []byte, after int, fault Fault) {
	if i >= len(b) {
		return nil, i, Cut
	}
	switch b[i] {
	case '"':
		end := s.endOfString(b, i+1)
		if end == len(b) {
			return b[i:], end, Cut
		}
		return b[i:end], end + 1, None
	case '{', '[':
		end, fault := s.endOfNest(b, i)
		return b[i:end], end, fault
	}
	end := i
	for end < len(b) && kinds[b[end]] == literal {
		end++
	}
	switch end {
	case i:
		return nil, i, NotJSON
	case len(b):
		return b[i:], end, Cut
	}
	return b[i:end], end, None
}

type kind uint8

const (
	other   kind = iota // separators, and what has no place outside strings
	literal             // part of a number, true, false, null, NaN or Infinity
	quote
	opening
	closing
)

var kinds = func() (k [256]kind) {
	for c := range 128 {
		switch {
		case c >= '0' && c <= '9', c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c == '-', c == '+', c == '.':
			k[c] = literal
		}
	}
	k['"'] = quote
	k['{'], k['['] = opening, opening
	k['}'], k[']'] = closing, closing
	return k
}()

// endOfNest returns the index behind the object or array that starts at i.
func (s *scanner) endOfNest(b []byte, i int) (int, Fault) {
	depth := 0
	for i < len(b) {
		switch kinds[b[i]] {
		case quote:
			i = s.endOfString(b, i+1) + 1
			continue
		case opening:
			if depth++; depth > maxDepth {
				return i, TooDeep
			}
		case closing:
			if depth--; depth == 0 {
				return i + 1, None
			}
		case literal:
			// Long lists of token ids: eight bytes at once while they are all digits and separators.
			for i+8 <= len(b) && flat(binary.LittleEndian.Uint64(b[i:])) {
				i += 8
			}
			if i < len(b) && kinds[b[i]] > literal {
				continue
			}
		}
		i++
	}
	return len(b), Cut
}

// flat reports whether eight bytes are below '@' and no quote: digits, separators and white space are,
// brackets and letters are not.
func flat(word uint64) bool {
	return word&(0xC0*ones) == 0 && hasZero(word^('"'*ones)) == 0
}

// object walks over the members of an object.
type object struct {
	b     []byte
	start int
	i     int
	fault Fault // why the walk ended before the closing brace
}

// walkObject walks over the object that starts at i, in the slice that value returns.
func walkObject(b []byte, i int) object { return object{b: b, start: i, i: i + 1} }

// value is the object, as far as it has been walked over.
func (o *object) value() []byte { return o.b[o.start:min(o.i, len(o.b))] }

// next returns the next member; the key as it stands in the body, between its quotes.
func (o *object) next(s *scanner) (key, value []byte, ok bool) {
	b, i := o.b, space(o.b, o.i)
	if i < len(b) && b[i] == ',' {
		i = space(b, i+1)
	}
	if i >= len(b) {
		return nil, nil, o.stop(i, Cut)
	}
	if b[i] == '}' {
		return nil, nil, o.stop(i+1, None)
	}
	if b[i] != '"' {
		return nil, nil, o.stop(i, NotJSON)
	}
	end := s.endOfString(b, i+1)
	key = b[i+1 : end]
	i = space(b, end+1)
	if i >= len(b) {
		return nil, nil, o.stop(i, Cut)
	}
	if b[i] != ':' {
		return nil, nil, o.stop(i, NotJSON)
	}
	value, o.i, o.fault = s.next(b, space(b, i+1))
	return key, value, len(value) > 0 && (o.fault == None || o.fault == Cut)
}

func (o *object) stop(i int, fault Fault) bool {
	o.i, o.fault = i, fault
	return false
}

// array walks over the elements of an array.
type array struct {
	b []byte
	i int
}

func walkArray(b []byte) array { return array{b: b, i: 1} }

func (a *array) next(s *scanner) (value []byte, ok bool) {
	if !a.more() {
		return nil, false
	}
	value, a.i, _ = s.next(a.b, a.i)
	return value, len(value) > 0
}

// more moves to the next element and reports whether there is one. Who reads it there moves on.
func (a *array) more() bool {
	a.i = space(a.b, a.i)
	if a.i < len(a.b) && a.b[a.i] == ',' {
		a.i = space(a.b, a.i+1)
	}
	return a.i < len(a.b) && a.b[a.i] != ']'
}

// object walks over the element that [array.more] moved to, if it is an object.
func (a *array) object() (members object, ok bool) {
	return walkObject(a.b, a.i), a.b[a.i] == '{'
}

// The forms a value can have. An absent value and null are the same to every engine.

func isString(v []byte) bool { return len(v) > 0 && v[0] == '"' }
func isArray(v []byte) bool  { return len(v) > 0 && v[0] == '[' }
func isObject(v []byte) bool { return len(v) > 0 && v[0] == '{' }
func isNumber(v []byte) bool { return len(v) > 0 && (v[0] == '-' || v[0] >= '0' && v[0] <= '9') }
func isNull(v []byte) bool   { return len(v) == 0 || string(v) == "null" }

// first returns an array from its first element on, or nil when it has none.
func first(v []byte) []byte {
	if !isArray(v) {
		return nil
	}
	i := space(v, 1)
	if i == len(v) || v[i] == ']' {
		return nil
	}
	return v[i:]
}

// integer reads a plain integer, up to 2³¹-1 of either sign, which an int holds
// everywhere; anything else is 0.
func integer(v []byte) int {
	const limit = 1<<31 - 1
	if cut(v) {
		return 0
	}
	negative := len(v) > 0 && v[0] == '-'
	if negative {
		v = v[1:]
	}
	n := int64(0)
	for _, c := range v {
		if c < '0' || c > '9' {
			return 0
		}
		n = min(n*10+int64(c-'0'), limit)
	}
	if negative {
		return int(-n)
	}
	return int(n)
}
