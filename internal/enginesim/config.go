// SPDX-License-Identifier: Apache-2.0

package enginesim

import "time"

// Defaults of [Config]. The cost figures resemble an 8-billion-parameter model on
// one mid-range accelerator: 10,000 prompt tokens a second, and 33 ms a token
// with 50 sequences decoding.
const (
	DefaultBlocks           = 30000
	DefaultBlockTokens      = 16
	DefaultMaxSeqs          = 256
	DefaultMaxBatchedTokens = 2048
	DefaultPrefillRate      = 10000
	DefaultStepOverhead     = 8 * time.Millisecond
	DefaultDecodeCost       = 500 * time.Microsecond
)

// Config describes one engine. The zero value of a field stands for its default.
type Config struct {
	// Blocks is the size of the KV cache in blocks, as cache_config_info reports
	// it in num_gpu_blocks. One of them is vLLM's null block and holds nothing.
	// Default 30000.
	Blocks int

	// BlockTokens is the number of tokens in a block. Default 16.
	BlockTokens int

	// MaxSeqs is the largest number of running sequences (--max-num-seqs).
	// Default 256.
	MaxSeqs int

	// MaxBatchedTokens is the largest number of tokens computed in one step
	// (--max-num-batched-tokens). Default 2048, vLLM's default for online serving
	// on all but the largest accelerators, where it is 8192.
	MaxBatchedTokens int

	// MaxQueued is the largest number of requests that may wait
	// (--max-num-queued-reqs). 0, the default, means no limit.
	MaxQueued int

	// MaxModelTokens is the largest prompt plus output of one request
	// (--max-model-len). The default, and the upper limit, is what the cache holds.
	MaxModelTokens int

	// PrefillRate is the number of prompt tokens computed per second.
	// Default 10000.
	PrefillRate float64

	// StepOverhead is the time every step takes whatever it computes.
	// Default 8 ms.
	StepOverhead time.Duration

	// DecodeCost is the time each decoding sequence adds to a step.
	// Default 500 µs.
	DecodeCost time.Duration

	// NoPrefixCaching turns the prefix cache off (--no-enable-prefix-caching).
	NoPrefixCaching bool

	// AdmitByChunk admits a request as soon as its first chunk fits. The default,
	// vLLM's since scheduler_reserve_full_isl, waits until the whole prompt fits.
	AdmitByChunk bool
}

// withDefaults returns the configuration with every unset field filled in.
func (c Config) withDefaults() Config {
	c.Blocks = positiveOr(c.Blocks, DefaultBlocks)
	c.BlockTokens = positiveOr(c.BlockTokens, DefaultBlockTokens)
	c.MaxSeqs = positiveOr(c.MaxSeqs, DefaultMaxSeqs)
	c.MaxBatchedTokens = positiveOr(c.MaxBatchedTokens, DefaultMaxBatchedTokens)
	c.PrefillRate = positiveOr(c.PrefillRate, DefaultPrefillRate)
	c.StepOverhead = positiveOr(c.StepOverhead, DefaultStepOverhead)
	c.DecodeCost = positiveOr(c.DecodeCost, DefaultDecodeCost)

	// The null block and at least one that holds tokens.
	c.Blocks = max(c.Blocks, 2)
	capacity := c.CapacityTokens()
	c.MaxModelTokens = min(positiveOr(c.MaxModelTokens, capacity), capacity)
	return c
}

// CapacityTokens returns the number of tokens the cache holds.
func (c Config) CapacityTokens() int { return (c.Blocks - 1) * c.BlockTokens }

// positiveOr returns v, or def when v is not positive.
func positiveOr[T int | float64 | time.Duration](v, def T) T {
	if v > 0 {
		return v
	}
	return def
}
