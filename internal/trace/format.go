// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"
)

// Format says how a trace is written down.
type Format string

const (
	// Mooncake is the format of the traces published with Mooncake (FAST '25):
	//
	//	{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, …]}
	//
	// timestamp is in milliseconds; each id names 512 tokens of the prompt, the
	// last one what is left. Lines are in order of time.
	Mooncake Format = "mooncake"

	// ChatSessions records agents and chats:
	//
	//	{"timestamp": 1760428436442742, "input": "…", "output": "…", "session_id": "0639…"}
	//
	// timestamp is in microseconds; input is the whole history so far. Lines may
	// be in any order, and several agents may take turns in one session.
	ChatSessions Format = "sessions"

	// RequestLog is a log of OpenAI requests:
	//
	//	{"timestamp": "2026-01-31T12:00:00.25Z", "path": "/v1/completions", "body": {…}}
	//
	// timestamp (or ts) is RFC 3339 or a number of seconds, milliseconds,
	// microseconds or nanoseconds since 1970, told apart by its size; body is the
	// JSON object, or a string that holds it; path is optional. Lines may be in
	// any order.
	RequestLog Format = "request log"
)

// ordered tells whether lines have to be in order of time. Such traces are read
// straight through; of others an index is kept.
func (f Format) ordered() bool { return f == Mooncake }

// Reasons to leave out a record and count it; every other fault is an error.
var (
	errEmptyPrompt = errors.New("prompt is empty")
	errNoBody      = errors.New("no request body")
	errBadBody     = errors.New("request body is no JSON object with a prompt")
)

// record is a decoded line.
type record struct {
	Request
	stamp time.Duration // as recorded, since whatever the format counts from
}

// recognise tells the format from a record's field names.
func recognise(line []byte) (Format, error) {
	var fields map[string]json.RawMessage
	if err := decodeJSON(line, &fields); err != nil {
		return "", err
	}
	has := func(name string) bool { _, ok := fields[name]; return ok }
	switch {
	case has("hash_ids"), has("input_length"):
		return Mooncake, nil
	case has("session_id") && has("input"):
		return ChatSessions, nil
	case has("blocks") && has("salt"):
		return Capture, nil
	case has("body"):
		return RequestLog, nil
	}
	return "", fmt.Errorf("no known trace format has the fields [%s]; want hash_ids and input_length (Mooncake), session_id and input (sessions), salt and blocks (capture), or body (request log)",
		strings.Join(slices.Sorted(maps.Keys(fields)), " "))
}

// decode reads one line.
func (f Format) decode(line []byte) (record, error) {
	switch f {
	case Mooncake:
		return decodeMooncake(line)
	case ChatSessions:
		return decodeChat(line)
	case RequestLog:
		return decodeLogged(line)
	case Capture:
		return decodeCaptured(line)
	}
	return record{}, fmt.Errorf("unknown trace format %q", f)
}

// decodeJSON is json.Unmarshal with errors that name the field in the words of
// the file's author.
func decodeJSON(line []byte, into any) error {
	err := json.Unmarshal(line, into)
	var mistyped *json.UnmarshalTypeError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &mistyped) && mistyped.Field != "":
		return fmt.Errorf("%s: %s cannot be read as %s", mistyped.Field, mistyped.Value, mistyped.Type)
	case errors.As(err, &mistyped):
		return fmt.Errorf("record is a JSON %s, want an object", mistyped.Value)
	}
	return fmt.Errorf("record is no JSON: %w", err)
}

// stampOf turns a recorded number of units into a duration. Half the range of a
// duration (146 years) is allowed, so that differences fit too.
func stampOf(number float64, unit time.Duration) (time.Duration, error) {
	nanos := number * float64(unit)
	if math.Abs(nanos) >= math.MaxInt64/2 {
		return 0, fmt.Errorf("timestamp: %g is out of range", number)
	}
	return time.Duration(nanos), nil
}

// tokensOf is the number of tokens that so many bytes of text count for.
func tokensOf(bytes int) int {
	return (bytes + BytesPerToken - 1) / BytesPerToken
}
