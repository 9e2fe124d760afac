// SPDX-License-Identifier: Apache-2.0

package prompt

import (
	"bytes"
	"encoding/binary"
	"unicode/utf16"
	"unicode/utf8"
)

// The text that is hashed is JSON's own escaped form, made unique. Of the ways to write one character
// JSON allows, this is the one kept:
//
//	\" \\ \b \f \n \r \t     as they are: the short form of what must be escaped
//	\/                       /
//	\u….                     UTF-8, or one of the short forms, where there is one
//	\u0001, \ud800           other control characters and unpaired surrogates: six bytes, lower case
//
// So text as most clients send it, with its line breaks and quotes, is hashed where it lies, without a
// copy; and only \/ and \u stop the pass. In both, the byte behind the backslash is odd, and in no other
// escape is it: "\bfnrt are all even. That makes the question "is there anything to rewrite?" a few
// instructions per eight bytes, without a branch per escape.

const (
	ones  = 0x0101010101010101
	highs = 0x80 * ones
)

// hasZero is not 0 when a byte of x is 0. Only the lowest bit that it sets is sure to mark a zero byte.
func hasZero(x uint64) uint64 { return (x - ones) &^ x & highs }

// suspect marks the backslashes among the eight bytes at k that an odd byte follows, and, because it
// saves two instructions of seven, some bytes that are not ASCII.
func suspect(b *[65]byte, k int) uint64 {
	x := binary.LittleEndian.Uint64(b[k:k+8]) ^ ('\\' * ones)
	return (x - ones) & (binary.LittleEndian.Uint64(b[k+1:k+9]) << 7)
}

// suspectExactly is suspect without the bytes that are not ASCII.
func suspectExactly(b *[65]byte, k int) uint64 {
	x := binary.LittleEndian.Uint64(b[k:k+8]) ^ ('\\' * ones)
	return (x - ones) &^ x & (binary.LittleEndian.Uint64(b[k+1:k+9]) << 7)
}

// rewritable returns the index of the first \/ or \u that starts in s[i:end], or end.
func rewritable(s []byte, i, end int) int {
	for rest := s[i:end]; len(rest) >= 65; rest = rest[64:] {
		b := (*[65]byte)(rest)
		if (suspect(b, 0)|suspect(b, 8)|suspect(b, 16)|suspect(b, 24)|
			suspect(b, 32)|suspect(b, 40)|suspect(b, 48)|suspect(b, 56))&highs != 0 {
			break
		}
		i += 64
	}
	for end-i >= 65 {
		b := (*[65]byte)(s[i:])
		if (suspectExactly(b, 0)|suspectExactly(b, 8)|suspectExactly(b, 16)|suspectExactly(b, 24)|
			suspectExactly(b, 32)|suspectExactly(b, 40)|suspectExactly(b, 48)|suspectExactly(b, 56))&highs != 0 {
			if at := nextRewritable(s, i, i+64); at < i+64 {
				return at
			}
		}
		i += 64
	}
	return nextRewritable(s, i, end)
}

// nextRewritable is rewritable for a few bytes.
func nextRewritable(s []byte, i, end int) int {
	for {
		at := bytes.IndexByte(s[i:end], '\\')
		if at < 0 {
			return end
		}
		at += i
		if at+1 < len(s) && s[at+1]&1 != 0 && startsEscape(s, at) {
			return at
		}
		i = at + 1
	}
}

// startsEscape reports whether the backslash at i is not itself escaped. It is asked for the last of a run
// of backslashes only, so however long the runs are, each is counted once.
func startsEscape(s []byte, i int) bool {
	run := 0
	for i > run && s[i-run-1] == '\\' {
		run++
	}
	return run%2 == 0
}

// unescape reads one escape at the start of s, which begins with a backslash. It returns the character
// and how many bytes it took; a size of 0 says that s ends too early to know. An unpaired surrogate
// comes back as itself; an escape that JSON does not know, as a backslash.
func unescape(s []byte) (r rune, size int) {
	if len(s) < 2 {
		return 0, 0
	}
	switch s[1] {
	case '"', '\\', '/':
		return rune(s[1]), 2
	case 'b':
		return '\b', 2
	case 'f':
		return '\f', 2
	case 'n':
		return '\n', 2
	case 'r':
		return '\r', 2
	case 't':
		return '\t', 2
	case 'u':
	default:
		return '\\', 1
	}
	r, ok := codeUnit(s)
	switch {
	case !ok && len(s) < 6:
		return 0, 0
	case !ok:
		return '\\', 1
	case !utf16.IsSurrogate(r) || r >= 0xDC00:
		return r, 6
	}
	low, ok := codeUnit(s[6:])
	if pair := utf16.DecodeRune(r, low); ok && pair != utf8.RuneError {
		return pair, 12
	}
	return r, 6
}

// codeUnit reads the four hex digits of a \u escape.
func codeUnit(s []byte) (r rune, ok bool) {
	if len(s) < 6 || s[0] != '\\' || s[1] != 'u' {
		return 0, false
	}
	r = rune(hex[s[2]])<<12 | rune(hex[s[3]])<<8 | rune(hex[s[4]])<<4 | rune(hex[s[5]])
	return r, r >= 0
}

// hex holds the values of hexadecimal digits, and -1 for other bytes, which makes any sum negative.
var hex = func() (h [256]int8) {
	for c := range h {
		h[c] = -1
	}
	for i, c := range "0123456789abcdef" {
		h[c] = int8(i)
	}
	for i, c := range "ABCDEF" {
		h[c] = int8(10 + i)
	}
	return h
}()

// appendCanonical appends a character in the form the text is hashed in.
func appendCanonical(to []byte, r rune) []byte {
	switch r {
	case '"', '\\':
		return append(to, '\\', byte(r))
	case '\b':
		return append(to, `\b`...)
	case '\f':
		return append(to, `\f`...)
	case '\n':
		return append(to, `\n`...)
	case '\r':
		return append(to, `\r`...)
	case '\t':
		return append(to, `\t`...)
	}
	if r >= ' ' && !utf16.IsSurrogate(r) {
		return utf8.AppendRune(to, r)
	}
	const digits = "0123456789abcdef"
	return append(to, '\\', 'u', digits[r>>12&15], digits[r>>8&15], digits[r>>4&15], digits[r&15])
}

// appendDecoded appends the plain text of a string's content, at most limit bytes of it.
func appendDecoded(to, s []byte, limit int) []byte {
	for len(s) > 0 && len(to) < limit {
		if s[0] != '\\' {
			to, s = append(to, s[0]), s[1:]
			continue
		}
		r, size := unescape(s)
		if size == 0 {
			return to
		}
		to, s = utf8.AppendRune(to, r), s[size:]
	}
	return to
}
