// SPDX-License-Identifier: Apache-2.0

package trace

// words are 64 common words of three letters. With the space after it each is
// one token for most tokenizers, and BytesPerToken bytes for everyone.
const words = "the and for are but not you all any can had her was one our out " +
	"day get has him his how man new now old see two way who boy did " +
	"its let put say she too use car dog cat sun run eat big red top " +
	"win box law air sea sky job key lot may far few ago arm art ask "

// wordBits is the number of bits that choose one word.
const wordBits = 6

// idWords is the number of words that spell a 64-bit id.
const idWords = (64 + wordBits - 1) / wordBits

func appendWord(dst []byte, bits uint64) []byte {
	at := bits % (1 << wordBits) * BytesPerToken
	return append(dst, words[at:at+BytesPerToken]...)
}

// appendIDText writes the text that stands for a hash id, one word a token. The
// first words spell the id, lowest bits first: different ids differ within the
// first idWords words, and neighbouring ids in the first.
func appendIDText(dst []byte, id uint64, tokens int) []byte {
	bits := id
	for range min(tokens, idWords) {
		dst = appendWord(dst, bits)
		bits >>= wordBits
	}
	rng := splitMix(id)
	return appendText(dst, &rng, tokens-idWords)
}

// appendText writes random words, one a token.
func appendText(dst []byte, rng *splitMix, tokens int) []byte {
	const perDraw = 64 / wordBits
	for tokens > 0 {
		bits := rng.Uint64()
		for range min(tokens, perDraw) {
			dst = appendWord(dst, bits)
			bits >>= wordBits
		}
		tokens -= perDraw
	}
	return dst
}

// splitMix is the SplitMix64 generator (Steele, Lea, Flood: Fast splittable
// pseudorandom number generators, OOPSLA 2014), a source for math/rand/v2 whose
// state is one word.
type splitMix uint64

func (s *splitMix) Uint64() uint64 {
	*s += 0x9e3779b97f4a7c15
	return mix(uint64(*s))
}

// mix is SplitMix64's finaliser, a bijection that spreads every bit.
func mix(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
