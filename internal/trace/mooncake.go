// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"fmt"
	"math"
	"time"
)

// idTokens is the length in tokens of the stretch of prompt that one hash id
// of a Mooncake trace names.
const idTokens = 512

type mooncakeRecord struct {
	Timestamp    *float64 `json:"timestamp"`
	InputLength  *int     `json:"input_length"`
	OutputLength *int     `json:"output_length"`
	HashIDs      []uint64 `json:"hash_ids"`
}

func decodeMooncake(line []byte) (record, error) {
	var m mooncakeRecord
	if err := decodeJSON(line, &m); err != nil {
		return record{}, err
	}
	switch {
	case m.Timestamp == nil:
		return record{}, fmt.Errorf("timestamp: missing")
	case m.InputLength == nil:
		return record{}, fmt.Errorf("input_length: missing")
	case m.OutputLength == nil:
		return record{}, fmt.Errorf("output_length: missing")
	case *m.InputLength < 1 || *m.InputLength > math.MaxInt32:
		return record{}, fmt.Errorf("input_length: %d is out of range, want 1 to %d tokens", *m.InputLength, math.MaxInt32)
	case *m.OutputLength < 0 || *m.OutputLength > math.MaxInt32:
		return record{}, fmt.Errorf("output_length: %d is out of range, want 0 to %d tokens", *m.OutputLength, math.MaxInt32)
	}
	if want := (*m.InputLength + idTokens - 1) / idTokens; len(m.HashIDs) != want {
		return record{}, fmt.Errorf("hash_ids: %d ids do not fit an input_length of %d, want %d (one for each %d tokens)",
			len(m.HashIDs), *m.InputLength, want, idTokens)
	}
	stamp, err := stampOf(*m.Timestamp, time.Millisecond)
	if err != nil {
		return record{}, err
	}
	return record{stamp: stamp, Request: Request{
		Path:         chatPath,
		InputTokens:  *m.InputLength,
		OutputTokens: *m.OutputLength,
		HashIDs:      m.HashIDs,
	}}, nil
}
