// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"encoding/json"

	"github.com/cespare/xxhash/v2"
)

// AppendBlocks appends the prompt's virtual form to dst: one hash for each full
// block of blockTokens tokens, chained, so that two requests have equal hashes
// up to the first block in which their prompts differ. A tail shorter than a
// block has no hash, as in an engine's prefix cache. It appends nothing when
// blockTokens is not positive.
func (r *Request) AppendBlocks(dst []uint64, blockTokens int) []uint64 {
	switch {
	case blockTokens <= 0:
		return dst
	case r.HashIDs != nil:
		return r.appendIDBlocks(dst, blockTokens)
	}
	c := textChain{blocks: dst, blockBytes: blockTokens * BytesPerToken}
	switch {
	case r.Messages != nil:
		c.write(r.Messages)
	case r.RawBody != nil:
		var parts promptParts
		if json.Unmarshal(r.RawBody, &parts) == nil {
			for _, part := range parts.inOrder() {
				c.write(part)
			}
		}
	default:
		c.write([]byte(r.Text))
	}
	return c.blocks
}

// appendIDBlocks hashes for each block all ids up to the one that holds the
// block's last token, and the block's place. What has no id has no block.
func (r *Request) appendIDBlocks(dst []uint64, blockTokens int) []uint64 {
	var chain uint64
	used := 0
	perID := r.idTokens()
	known := min(r.InputTokens, len(r.HashIDs)*perID)
	for block := 1; block <= known/blockTokens; block++ {
		last := (block*blockTokens - 1) / perID
		for ; used <= last && used < len(r.HashIDs); used++ {
			chain = mix(chain ^ mix(r.HashIDs[used]+1))
		}
		dst = append(dst, mix(chain+uint64(block)))
	}
	return dst
}

// idTokens is the length in tokens of the stretch that one id names.
func (r *Request) idTokens() int {
	if r.IDTokens > 0 {
		return r.IDTokens
	}
	return idTokens
}

// textChain cuts text, written piece by piece, into blocks.
type textChain struct {
	blocks     []uint64
	blockBytes int

	chain   uint64
	partial []byte
}

func (c *textChain) write(text []byte) {
	if need := c.blockBytes - len(c.partial); len(c.partial) > 0 {
		n := min(need, len(text))
		c.partial = append(c.partial, text[:n]...)
		text = text[n:]
		if n < need {
			return
		}
		c.add(c.partial)
		c.partial = c.partial[:0]
	}
	for len(text) >= c.blockBytes {
		c.add(text[:c.blockBytes])
		text = text[c.blockBytes:]
	}
	c.partial = append(c.partial, text...)
}

func (c *textChain) add(block []byte) {
	c.chain = mix(c.chain ^ xxhash.Sum64(block))
	c.blocks = append(c.blocks, c.chain)
}
