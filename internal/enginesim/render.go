// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"encoding/binary"
	"slices"

	"github.com/cespare/xxhash/v2"
)

// Ids of the tokens that are not text. Ids of text begin at firstTextToken.
const (
	tokenTurnStart = 1
	tokenTurnEnd   = 2
	tokenImage     = 3
	firstTextToken = 1 << 8
)

// imageTokens is the number of tokens an image, audio or video part stands for.
const imageTokens = 256

// tokenizer cuts text into tokens of a fixed number of bytes. A cut also falls
// wherever the template puts a special token, so that text sent back as the
// content of a message is cut as it was when it was generated.
type tokenizer struct {
	bytesPerToken int
}

// append cuts a text that begins on a token boundary. Its last token may be short.
func (t tokenizer) append(ids []uint32, text string) []uint32 {
	for len(text) > 0 {
		n := min(t.bytesPerToken, len(text))
		ids = append(ids, textToken(text[:n]))
		text = text[n:]
	}
	return ids
}

// textToken returns the id of a token from its bytes: 31 bits, as ids are signed
// in clients, and none of the special ones.
func textToken(text string) uint32 {
	return max(uint32(xxhash.Sum64String(text))>>1, firstTextToken)
}

// turn is one message of a conversation, its content already flattened to parts.
type turn struct {
	role  string
	parts []part
}

// part is a piece of a message: a text, or an image known by its URL or content.
type part struct {
	text  string
	image bool
}

// renderChat renders a conversation with a template like ChatML, which puts the
// tools behind the system text.
func (t tokenizer) renderChat(turns []turn, tools string, generationPrompt bool) []uint32 {
	var ids []uint32
	if tools != "" {
		tools = "\n\n# Tools\n\n" + tools
		if len(turns) == 0 || turns[0].role != "system" {
			turns = append([]turn{{role: "system"}}, turns...)
		}
	}
	for i, turn := range turns {
		ids = append(ids, tokenTurnStart)
		ids = t.append(ids, turn.role+"\n")
		for _, p := range turn.parts {
			ids = t.appendPart(ids, p)
		}
		if i == 0 {
			ids = t.append(ids, tools)
		}
		ids = append(ids, tokenTurnEnd)
		ids = t.append(ids, "\n")
	}
	if generationPrompt {
		ids = append(ids, tokenTurnStart)
		ids = t.append(ids, "assistant\n")
	}
	return ids
}

func (t tokenizer) appendPart(ids []uint32, p part) []uint32 {
	if !p.image {
		return t.append(ids, p.text)
	}
	ids = append(ids, tokenImage)
	content := xxhash.Sum64String(p.text)
	for i := range uint64(imageTokens) {
		ids = append(ids, max(uint32(mix(content+i)>>33), firstTextToken))
	}
	return ids
}

// prompt is a rendered prompt and the text that the engine will answer it with.
type prompt struct {
	ids         []uint32
	tokens      int
	blockTokens int
	blocks      []uint64 // chained hashes of the full blocks

	tokenizer tokenizer
	space     space
	seed      uint64   // of the chain
	answer    uint64   // seed of the answer's text
	output    []uint64 // hashes of the blocks completed by the answer so far
	tail      []uint32 // tokens after the last block in output
	answered  int      // answer tokens in output and tail
}

// space keeps prompts of different adapters and cache salts apart.
type space struct{ adapter, salt string }

func (s space) seed() uint64 { return xxhash.Sum64String(s.adapter + "\x00" + s.salt) }

func newPrompt(t tokenizer, blockTokens int, in space, ids []uint32) *prompt {
	p := &prompt{ids: ids, tokens: len(ids), blockTokens: blockTokens, tokenizer: t, space: in, seed: in.seed()}
	p.blocks = make([]uint64, len(ids)/blockTokens)
	parent := p.seed
	for i := range p.blocks {
		parent = blockHash(parent, ids[i*blockTokens:][:blockTokens])
		p.blocks[i] = parent
	}
	p.tail = append(p.tail, ids[len(p.blocks)*blockTokens:]...)
	p.answer = blockHash(parent, p.tail)
	return p
}

// blockHash chains the tokens of a block onto the hash of the block before it.
func blockHash(parent uint64, ids []uint32) uint64 {
	var digest xxhash.Digest
	digest.ResetWithSeed(parent)
	var buf [256]byte
	for chunk := range slices.Chunk(ids, len(buf)/4) {
		for i, id := range chunk {
			binary.LittleEndian.PutUint32(buf[4*i:], id)
		}
		_, _ = digest.Write(buf[:4*len(chunk)])
	}
	return digest.Sum64()
}

// answerToken appends the text of the i-th token of the answer.
func (p *prompt) answerToken(text []byte, i int) []byte {
	var letters [8]byte
	for n := range p.tokenizer.bytesPerToken {
		if n%8 == 0 {
			binary.LittleEndian.PutUint64(letters[:], mix(p.answer+uint64(i)<<8+uint64(n)))
		}
		if n == 0 && p.tokenizer.bytesPerToken > 1 {
			text = append(text, ' ')
			continue
		}
		text = append(text, 'a'+letters[n%8]%26)
	}
	return text
}

// answerText returns the first n tokens of the answer.
func (p *prompt) answerText(n int) string {
	text := make([]byte, 0, n*p.tokenizer.bytesPerToken)
	for i := range n {
		text = p.answerToken(text, i)
	}
	return string(text)
}

// appendBlock appends the tokens of the i-th block of prompt and answer.
func (p *prompt) appendBlock(ids []uint32, i int) []uint32 {
	var text []byte
	for at := i * p.blockTokens; at < (i+1)*p.blockTokens; at++ {
		if at < p.tokens {
			ids = append(ids, p.ids[at])
			continue
		}
		text = p.answerToken(text[:0], at-p.tokens)
		ids = append(ids, textToken(string(text)))
	}
	return ids
}

// outputBlock returns the hash of the i-th block completed by the answer. The
// engine asks under the driver's mutex.
func (p *prompt) outputBlock(i int) uint64 {
	var text []byte
	for len(p.output) <= i {
		for len(p.tail) < p.blockTokens {
			text = p.answerToken(text[:0], p.answered)
			p.tail = append(p.tail, textToken(string(text)))
			p.answered++
		}
		p.output = append(p.output, blockHash(p.parent(), p.tail))
		p.tail = p.tail[:0]
	}
	return p.output[i]
}

// parent returns the hash of the last block completed so far.
func (p *prompt) parent() uint64 {
	switch {
	case len(p.output) > 0:
		return p.output[len(p.output)-1]
	case len(p.blocks) > 0:
		return p.blocks[len(p.blocks)-1]
	default:
		return p.seed
	}
}
