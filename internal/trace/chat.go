// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"fmt"
	"time"
)

type chatRecord struct {
	Timestamp *float64 `json:"timestamp"`
	Input     *string  `json:"input"`
	Output    *string  `json:"output"`
	SessionID string   `json:"session_id"`
}

// decodeChat reads one turn of a session. An empty output (a tool call, of which
// the recorder kept no text) counts as one token.
func decodeChat(line []byte) (record, error) {
	var c chatRecord
	if err := decodeJSON(line, &c); err != nil {
		return record{}, err
	}
	switch {
	case c.Timestamp == nil:
		return record{}, fmt.Errorf("timestamp: missing")
	case c.SessionID == "":
		return record{}, fmt.Errorf("session_id: missing")
	case c.Input == nil:
		return record{}, fmt.Errorf("input: missing")
	case c.Output == nil:
		return record{}, fmt.Errorf("output: missing")
	case *c.Input == "":
		return record{}, errEmptyPrompt
	}
	stamp, err := stampOf(*c.Timestamp, time.Microsecond)
	if err != nil {
		return record{}, err
	}
	return record{stamp: stamp, Request: Request{
		Session:      c.SessionID,
		Path:         chatPath,
		InputTokens:  tokensOf(len(*c.Input)),
		OutputTokens: max(1, tokensOf(len(*c.Output))),
		Text:         *c.Input,
	}}, nil
}
