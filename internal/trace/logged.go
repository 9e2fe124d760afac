// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"strings"
	"time"
)

const (
	chatPath       = "/v1/chat/completions"
	completionPath = "/v1/completions"
	responsesPath  = "/v1/responses"
)

type loggedRecord struct {
	Timestamp json.RawMessage `json:"timestamp"`
	TS        json.RawMessage `json:"ts"`
	Path      string          `json:"path"`
	Body      json.RawMessage `json:"body"`
}

// loggedBody holds the parts of a request body that matter here.
type loggedBody struct {
	promptParts
	MaxTokens           *int `json:"max_tokens"`
	MaxCompletionTokens *int `json:"max_completion_tokens"`
	MaxOutputTokens     *int `json:"max_output_tokens"`
}

// promptParts are the members of a body that make up the prompt.
type promptParts struct {
	Tools        json.RawMessage `json:"tools"`
	System       json.RawMessage `json:"system"`
	Instructions json.RawMessage `json:"instructions"`
	Messages     json.RawMessage `json:"messages"`
	Prompt       json.RawMessage `json:"prompt"`
	Input        json.RawMessage `json:"input"`
}

// inOrder returns the parts as most chat templates print them.
func (p *promptParts) inOrder() [6][]byte {
	return [...][]byte{p.Tools, p.System, p.Instructions, p.Messages, p.Prompt, p.Input}
}

func decodeLogged(line []byte) (record, error) {
	var l loggedRecord
	if err := decodeJSON(line, &l); err != nil {
		return record{}, err
	}
	if l.Timestamp == nil {
		l.Timestamp = l.TS
	}
	stamp, err := loggedTime(l.Timestamp)
	if err != nil {
		return record{}, err
	}
	if l.Path != "" && !strings.HasPrefix(l.Path, "/") {
		return record{}, fmt.Errorf("path: %q does not start with a slash", l.Path)
	}
	raw, err := loggedBodyOf(l.Body)
	if err != nil {
		return record{}, err
	}
	var body loggedBody
	if err := json.Unmarshal(raw, &body); err != nil {
		return record{}, errBadBody
	}
	path := body.path()
	if path == "" {
		return record{}, errBadBody
	}
	if l.Path != "" {
		path = l.Path
	}
	size := 0
	for _, part := range body.inOrder() {
		size += len(part)
	}
	return record{stamp: stamp, Request: Request{
		Path:         path,
		InputTokens:  tokensOf(size),
		OutputTokens: body.outputTokens(),
		RawBody:      raw,
	}}, nil
}

// loggedBodyOf returns the body's JSON object, which the log may hold as such or
// as a string.
func loggedBodyOf(body json.RawMessage) ([]byte, error) {
	if !isGiven(body) {
		return nil, errNoBody
	}
	if body[0] == '"' {
		var text string
		if err := json.Unmarshal(body, &text); err != nil {
			return nil, errBadBody
		}
		body = bytes.TrimSpace([]byte(text))
		if len(body) == 0 {
			return nil, errNoBody
		}
	}
	if body[0] != '{' {
		return nil, errBadBody
	}
	return body, nil
}

// path is the API that takes such a body; empty when it holds no prompt.
func (b *loggedBody) path() string {
	switch {
	case isGiven(b.Messages):
		return chatPath
	case isGiven(b.Prompt):
		return completionPath
	case isGiven(b.Input):
		return responsesPath
	}
	return ""
}

func isGiven(value json.RawMessage) bool {
	return len(value) > 0 && string(value) != "null"
}

func (b *loggedBody) outputTokens() int {
	for _, limit := range []*int{b.MaxCompletionTokens, b.MaxTokens, b.MaxOutputTokens} {
		if limit != nil && *limit > 0 {
			return min(*limit, math.MaxInt32)
		}
	}
	return DefaultOutputTokens
}

// loggedTime reads a time since 1970. The size of a number gives its unit: up
// to the year 5138 seconds stay below 1e11, and milliseconds, microseconds and
// nanoseconds reach the bounds that follow in March 1973.
func loggedTime(raw json.RawMessage) (time.Duration, error) {
	if !isGiven(raw) {
		return 0, fmt.Errorf("timestamp: missing")
	}
	var number float64
	if json.Unmarshal(raw, &number) == nil {
		switch size := math.Abs(number); {
		case size < 1e11:
			return stampOf(number, time.Second)
		case size < 1e14:
			return stampOf(number, time.Millisecond)
		case size < 1e17:
			return stampOf(number, time.Microsecond)
		}
		return stampOf(number, time.Nanosecond)
	}
	var text string
	if err := json.Unmarshal(raw, &text); err != nil {
		return 0, fmt.Errorf("timestamp: %.40s is neither a number nor a text", raw)
	}
	at, err := time.Parse(time.RFC3339, text)
	if err != nil {
		return 0, fmt.Errorf("timestamp: %.40q is no RFC 3339 time", text)
	}
	if at.Year() < 1830 || at.Year() > 2110 {
		return 0, fmt.Errorf("timestamp: %q is out of range", text)
	}
	return time.Duration(at.UnixNano()), nil
}
