// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"errors"
	"time"

	"github.com/cespare/xxhash/v2"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/capture"
)

// Capture is what the policies' capture option writes:
//
//	{"v": 1, "salt": "q0XvT2aB", "t": 1760428436442742, "api": "chat", "bytes": 5120, "blocks": "ir9k…", …}
//
// t is in microseconds; blocks has three bytes of hash for each 256 bytes of
// the prompt, in base64. docs/capture.md has all fields. Lines may be in any
// order.
const Capture Format = "capture"

// blockTokens is the length in tokens of one captured block of text.
const blockTokens = capture.BlockBytes / BytesPerToken

var (
	errRefused = errors.New("the replica answered with an error")
	errTorn    = errors.New("line was not written to its end")
)

// decodeCaptured reads one line of a capture. Its length is counted from the
// text, as the router did, so that equal texts take equal room in both requests.
func decodeCaptured(line []byte) (record, error) {
	var l capture.Line
	if err := decodeJSON(line, &l); err != nil {
		if isCut(line) {
			return record{}, errTorn
		}
		return record{}, err
	}
	if err := l.Check(); err != nil {
		return record{}, err
	}
	hashes, err := l.Hashes()
	switch {
	case err != nil:
		return record{}, err
	case l.Bytes == 0:
		return record{}, errNoBody
	case l.Status >= 400:
		return record{}, errRefused
	}
	ids := make([]uint64, len(hashes))
	salt := xxhash.Sum64String(l.Salt)
	for i, h := range hashes {
		ids[i] = mix(salt ^ uint64(h))
	}
	return record{
		stamp: time.Duration(l.Micros) * time.Microsecond,
		Request: Request{
			Path:         chatPath,
			InputTokens:  tokensOf(l.Bytes),
			OutputTokens: capturedOutput(&l),
			HashIDs:      ids,
			IDTokens:     blockTokens,
		},
	}, nil
}

// capturedOutput is the answer's length: as the engine told it, or the limit
// that the request set.
func capturedOutput(l *capture.Line) int {
	switch {
	case l.OutputTokens != nil:
		return *l.OutputTokens
	case l.MaxTokens > 0:
		return l.MaxTokens
	}
	return DefaultOutputTokens
}
