// SPDX-License-Identifier: Apache-2.0

package capture

import (
	"encoding/base64"
	"errors"
	"fmt"
	"math"
	"time"
)

const (
	// Version is the version of the format that this package writes and reads.
	Version = 1
	// BlockBytes is how much prompt text one block hash stands for, in bytes.
	BlockBytes = 256
	// hashBytes is how much of a block's hash is written. Blocks are compared
	// only where all before them were equal, so 24 bits tell them apart well
	// enough: of a million continuations of one prefix, one in seventeen meets
	// another by chance, for the one block.
	hashBytes = 3
	// saltBytes is the length of the salt's name.
	saltBytes = 6
)

// Line is one line of a capture file: what became of one request. Its field
// names are documented in docs/capture.md. Pointers are nil where the fact did
// not become known.
//
// Every line can be read without the others, so that files can be cut, joined
// and followed while they are written, and a rotated file needs no header.
type Line struct {
	Version int `json:"v"`
	// Salt names the secret that the hashes are made with; only hashes under
	// the same salt can be compared. It does not tell the secret.
	Salt string `json:"salt"`
	// Micros is the time of arrival, in microseconds since 1970.
	Micros int64  `json:"t"`
	API    string `json:"api,omitempty"`
	Model  string `json:"model,omitempty"`
	Stream bool   `json:"stream,omitempty"`
	// Bytes is the length of the prompt's text, Extra that of further prompts
	// in the same request.
	Bytes int `json:"bytes"`
	Extra int `json:"extra,omitempty"`
	// Cut says that the body was longer than was looked at.
	Cut bool `json:"cut,omitempty"`
	// Blocks has the hashes of the prompt's full blocks, see Hashes.
	Blocks string `json:"blocks"`
	// MaxTokens is the limit that the request sets to the answer.
	MaxTokens int `json:"max_tokens,omitempty"`
	// Policy is the policy that decided, Reason what decided it, Replica the
	// dial address, and Attempts how many replicas were tried.
	Policy   string `json:"policy,omitempty"`
	Reason   string `json:"reason,omitempty"`
	Replica  string `json:"replica,omitempty"`
	Attempts int    `json:"attempts,omitempty"`
	// Prompt and Hit are estimates made at the choice, in tokens.
	Prompt int `json:"est_prompt_tokens,omitempty"`
	Hit    int `json:"est_hit_tokens,omitempty"`
	// WaitedMillis is how long the choice took.
	WaitedMillis float64 `json:"wait_ms,omitempty"`
	// Status is the replica's answer, 0 where there was none.
	Status int `json:"status,omitempty"`
	// The engine's own figures.
	PromptTokens *int `json:"prompt_tokens,omitempty"`
	CachedTokens *int `json:"cached_tokens,omitempty"`
	OutputTokens *int `json:"output_tokens,omitempty"`
	// TTFTMillis and TotalMillis count from the request's arrival.
	TTFTMillis  *float64 `json:"ttft_ms,omitempty"`
	TotalMillis *float64 `json:"total_ms,omitempty"`
}

// Time is the time of arrival.
func (l *Line) Time() time.Time { return time.UnixMicro(l.Micros) }

// Check reports what makes a line that was read unusable.
func (l *Line) Check() error {
	switch {
	case l.Version != Version:
		return fmt.Errorf("v: capture version %d cannot be read, want %d", l.Version, Version)
	case len(l.Salt) == 0 || len(l.Salt) > 64:
		return fmt.Errorf("salt: %.80q is no name of a salt", l.Salt)
	case l.Micros <= 0 || l.Micros > math.MaxInt64/2000:
		return fmt.Errorf("t: %d is out of range, want microseconds since 1970", l.Micros)
	case l.Bytes < 0 || l.Bytes > math.MaxInt32 || l.Extra < 0 || l.Extra > math.MaxInt32:
		return fmt.Errorf("bytes: %d and %d are out of range", l.Bytes, l.Extra)
	case l.MaxTokens < 0 || l.MaxTokens > math.MaxInt32:
		return fmt.Errorf("max_tokens: %d is out of range", l.MaxTokens)
	case l.OutputTokens != nil && (*l.OutputTokens < 0 || *l.OutputTokens > math.MaxInt32):
		return fmt.Errorf("output_tokens: %d is out of range", *l.OutputTokens)
	}
	return nil
}

var errBlocks = errors.New("blocks: not base64 of three bytes for each block")

// Hashes reads Blocks: three bytes for each block, in base64, so that a block
// takes four characters. Hash i stands for the prompt's first i+1 blocks.
func (l *Line) Hashes() ([]uint32, error) {
	raw, err := base64.StdEncoding.Strict().DecodeString(l.Blocks)
	if err != nil || len(raw)%hashBytes != 0 {
		return nil, errBlocks
	}
	hashes := make([]uint32, len(raw)/hashBytes)
	for i := range hashes {
		b := raw[i*hashBytes:]
		hashes[i] = uint32(b[0]) | uint32(b[1])<<8 | uint32(b[2])<<16
	}
	if len(hashes)*BlockBytes > l.Bytes {
		return nil, fmt.Errorf("blocks: %d blocks of %d bytes do not fit in %d bytes", len(hashes), BlockBytes, l.Bytes)
	}
	return hashes, nil
}
