// SPDX-License-Identifier: Apache-2.0

package load

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"
)

const (
	// streamBuffer is the length of a line up to which it is read in place.
	streamBuffer = 16 << 10
	// maxAnswer bounds what is read of an answer that is no stream.
	maxAnswer = 64 << 20
)

var streamReaders = sync.Pool{New: func() any { return bufio.NewReaderSize(nil, streamBuffer) }}

// answer gathers what one response tells.
type answer struct {
	heard   *[]byte   // gets the text, as the inside of a JSON string; may be nil
	firstAt time.Time // of the first chunk with content
	usage   usage
	done    bool
}

// usage is the usage object of the chat, completions and responses APIs.
type usage struct {
	PromptTokens        int          `json:"prompt_tokens"`
	CompletionTokens    int          `json:"completion_tokens"`
	PromptTokensDetails *tokenDetail `json:"prompt_tokens_details"`
	InputTokens         int          `json:"input_tokens"`
	OutputTokens        int          `json:"output_tokens"`
	InputTokensDetails  *tokenDetail `json:"input_tokens_details"`
	// CacheReadInputTokens is Anthropic's, whose input_tokens leave it out.
	CacheReadInputTokens *int `json:"cache_read_input_tokens"`
}

type tokenDetail struct {
	CachedTokens *int `json:"cached_tokens"`
}

func (u *usage) cached() *int {
	switch {
	case u.PromptTokensDetails != nil:
		return u.PromptTokensDetails.CachedTokens
	case u.InputTokensDetails != nil:
		return u.InputTokensDetails.CachedTokens
	}
	return u.CacheReadInputTokens
}

func (u *usage) statesCached() bool { return u.cached() != nil }

func (u *usage) tokens() (prompt, cached, completion int) {
	if n := u.cached(); n != nil {
		cached = *n
	}
	prompt = u.PromptTokens + u.InputTokens
	if u.CacheReadInputTokens != nil {
		prompt += *u.CacheReadInputTokens
	}
	return prompt, cached, u.CompletionTokens + u.OutputTokens
}

// usageEvent finds the usage at the places where the APIs put it: at the top, in
// the event's response (responses API) or in its message (messages API).
type usageEvent struct {
	Usage    *usage `json:"usage"`
	Response struct {
		Usage *usage `json:"usage"`
	} `json:"response"`
	Message struct {
		Usage *usage `json:"usage"`
	} `json:"message"`
}

func (u *usage) read(event []byte) {
	var e usageEvent
	if json.Unmarshal(event, &e) != nil {
		return
	}
	for _, found := range []*usage{e.Usage, e.Response.Usage, e.Message.Usage} {
		if found != nil {
			// Into what is there: later events of the messages API leave out what
			// the first told.
			u.merge(found)
		}
	}
}

func (u *usage) merge(v *usage) {
	u.PromptTokens = max(u.PromptTokens, v.PromptTokens)
	u.CompletionTokens = max(u.CompletionTokens, v.CompletionTokens)
	u.InputTokens = max(u.InputTokens, v.InputTokens)
	u.OutputTokens = max(u.OutputTokens, v.OutputTokens)
	if v.PromptTokensDetails != nil {
		u.PromptTokensDetails = v.PromptTokensDetails
	}
	if v.InputTokensDetails != nil {
		u.InputTokensDetails = v.InputTokensDetails
	}
	if v.CacheReadInputTokens != nil {
		u.CacheReadInputTokens = v.CacheReadInputTokens
	}
}

// readWhole reads an answer that is one JSON object.
func (a *answer) readWhole(body io.Reader) error {
	text, err := io.ReadAll(io.LimitReader(body, maxAnswer))
	if err != nil {
		return err
	}
	a.firstAt = time.Now()
	if !json.Valid(text) {
		return failure{"no_content", fmt.Errorf("answer is neither a stream nor JSON: %.80q", text)}
	}
	a.usage.read(text)
	a.hear(text)
	return nil
}

// readStream reads server-sent events to their end.
func (a *answer) readStream(body io.Reader) error {
	r := streamReaders.Get().(*bufio.Reader)
	r.Reset(body)
	defer func() {
		r.Reset(nil)
		streamReaders.Put(r)
	}()
	var spill []byte
	for {
		line, err := r.ReadSlice('\n')
		if errors.Is(err, bufio.ErrBufferFull) {
			spill, err = readLong(r, append(spill[:0], line...))
			line = spill
		}
		if failed := a.event(line); failed != nil {
			return failed
		}
		if errors.Is(err, io.EOF) {
			return a.end()
		}
		if err != nil {
			return err
		}
	}
}

func readLong(r *bufio.Reader, line []byte) ([]byte, error) {
	for {
		part, err := r.ReadSlice('\n')
		if len(line)+len(part) > maxAnswer {
			return nil, fmt.Errorf("a line of the stream is longer than %d bytes", maxAnswer)
		}
		line = append(line, part...)
		if !errors.Is(err, bufio.ErrBufferFull) {
			return line, err
		}
	}
}

// end judges a stream that is over.
func (a *answer) end() error {
	switch {
	case !a.done:
		return failure{"cut_stream", errors.New("stream ended without its last event")}
	case a.firstAt.IsZero():
		return failure{"no_content", errors.New("stream brought no content")}
	}
	return nil
}

var (
	dataField = []byte("data:")
	doneMark  = []byte("[DONE]")
	usageMark = []byte(`"usage"`)
	errorMark = []byte(`"error"`)

	// lastTypes are the types of the last events of APIs that do not send [DONE].
	lastTypes = [][]byte{[]byte(`"message_stop"`), []byte(`"response.completed"`), []byte(`"response.incomplete"`)}

	// contentKeys hold the model's words in an event of one API or another.
	contentKeys = [][]byte{
		[]byte(`"content"`), []byte(`"text"`), []byte(`"delta"`),
		[]byte(`"reasoning_content"`), []byte(`"reasoning"`),
		[]byte(`"arguments"`), []byte(`"partial_json"`), []byte(`"thinking"`),
	}
)

// event takes in one line of the stream. Only events with a usage are decoded;
// they are one or two of a stream.
func (a *answer) event(line []byte) error {
	data, isData := bytes.CutPrefix(line, dataField)
	if !isData {
		return nil
	}
	data = bytes.TrimSpace(data)
	switch {
	case bytes.Equal(data, doneMark):
		a.done = true
		return nil
	case isErrorEvent(data):
		return failure{"error_event", fmt.Errorf("server sent %.200s", data)}
	}
	if a.firstAt.IsZero() && hasContent(data) {
		a.firstAt = time.Now()
	}
	a.hear(data)
	if i := bytes.Index(data, usageMark); i >= 0 && valueAt(data[i+len(usageMark):], '{') {
		a.usage.read(data)
	}
	a.done = a.done || isLast(data)
	return nil
}

// isErrorEvent tells an event that begins with an error object, which is how
// servers report a failure after the status has been sent.
func isErrorEvent(data []byte) bool {
	rest, isObject := bytes.CutPrefix(data, []byte("{"))
	rest, isError := bytes.CutPrefix(bytes.TrimSpace(rest), errorMark)
	return isObject && isError && valueAt(rest, '{')
}

// isLast looks at the start of the event only, where the type is.
func isLast(data []byte) bool {
	head := data[:min(len(data), 80)]
	for _, mark := range lastTypes {
		if bytes.Contains(head, mark) {
			return true
		}
	}
	return false
}

// hasContent tells whether an event brings at least one character.
func hasContent(data []byte) bool {
	for _, key := range contentKeys {
		if len(valueOf(data, key)) > 0 {
			return true
		}
	}
	return false
}

// hear keeps the text of an event of the chat or completions API.
func (a *answer) hear(data []byte) {
	if a.heard == nil {
		return
	}
	for _, key := range contentKeys[:2] {
		if text := valueOf(data, key); len(text) > 0 {
			*a.heard = append(*a.heard, text...)
			return
		}
	}
}

// valueOf returns the inside of the first string that is the value of key,
// escapes as they are. Quotes inside a JSON string are escaped, so what is found
// is a key or a whole string value.
func valueOf(data, key []byte) []byte {
	for {
		i := bytes.Index(data, key)
		if i < 0 {
			return nil
		}
		data = data[i+len(key):]
		if !valueAt(data, '"') {
			continue
		}
		start := bytes.IndexByte(data, '"') + 1
		return stringAt(data[start:])
	}
}

// valueAt tells whether after a key there is a colon and a value that starts
// with that character.
func valueAt(rest []byte, first byte) bool {
	rest, isKey := bytes.CutPrefix(bytes.TrimLeft(rest, " \t"), []byte(":"))
	rest = bytes.TrimLeft(rest, " \t")
	return isKey && len(rest) > 0 && rest[0] == first
}

// stringAt returns data up to the quote that ends a string; nil when none does.
func stringAt(data []byte) []byte {
	for i := 0; i < len(data); i++ {
		switch data[i] {
		case '\\':
			i++
		case '"':
			return data[:i]
		}
	}
	return nil
}
