// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
)

// AppendBody appends the request's real form to dst: the JSON body to post to
// its Path, for the given model.
//
// Prompts other than RawBody become chat completions that stream, report usage,
// and answer with OutputTokens tokens exactly (at least 1; ignore_eos is vLLM's
// and SGLang's). Hash ids and texts are one user message; an id is
// idTokens × BytesPerToken bytes of plain words that are the same wherever the
// id occurs.
//
// A RawBody is kept as it is, byte for byte and in its order, but for model
// (kept too when the given one is empty) and, for completions and chat
// completions, stream and stream_options: without a stream there is no first
// token to time. The error tells of a RawBody that is no JSON object.
func (r *Request) AppendBody(dst []byte, model string) ([]byte, error) {
	if r.RawBody != nil {
		return r.appendRawBody(dst, model)
	}
	dst = append(dst, `{"model":`...)
	dst = appendJSON(dst, model)
	dst = append(dst, `,"messages":`...)
	dst = r.appendMessages(dst)
	dst = append(dst, `,"max_tokens":`...)
	dst = strconv.AppendInt(dst, int64(max(1, r.OutputTokens)), 10)
	return append(dst, `,"temperature":0,"ignore_eos":true,"stream":true,"stream_options":{"include_usage":true}}`...), nil
}

func (r *Request) appendMessages(dst []byte) []byte {
	if r.Messages != nil {
		return append(dst, r.Messages...)
	}
	dst = append(dst, `[{"role":"user","content":`...)
	if r.HashIDs != nil {
		dst = append(dst, '"')
		dst = r.appendIDPrompt(dst)
		dst = append(dst, '"')
	} else {
		dst = appendJSON(dst, r.Text)
	}
	return append(dst, `}]`...)
}

func (r *Request) appendIDPrompt(dst []byte) []byte {
	left := r.InputTokens
	rest := uint64(r.InputTokens)
	for _, id := range r.HashIDs {
		tokens := min(left, r.idTokens())
		dst = appendIDText(dst, id, tokens)
		left -= tokens
		rest = mix(rest ^ id)
	}
	// Nothing is known of what has no id but its length.
	return appendIDText(dst, rest, left)
}

func (r *Request) appendRawBody(dst []byte, model string) ([]byte, error) {
	streams := strings.HasSuffix(r.Path, "/completions")
	dst = append(dst, '{')
	if model != "" {
		dst = append(dst, `"model":`...)
		dst = appendJSON(dst, model)
	}
	err := eachMember(r.RawBody, func(key string, value []byte) {
		switch {
		case key == "model" && model != "":
			return
		case (key == "stream" || key == "stream_options") && streams:
			return
		}
		dst = appendComma(dst)
		dst = appendJSON(dst, key)
		dst = append(dst, ':')
		dst = append(dst, value...)
	})
	if err != nil {
		return nil, fmt.Errorf("request body: %w", err)
	}
	if streams {
		dst = appendComma(dst)
		dst = append(dst, `"stream":true,"stream_options":{"include_usage":true}`...)
	}
	return append(dst, '}'), nil
}

// eachMember visits the members of a JSON object in their order.
func eachMember(object []byte, visit func(key string, value []byte)) error {
	d := json.NewDecoder(bytes.NewReader(object))
	if start, err := d.Token(); err != nil || start != json.Delim('{') {
		return fmt.Errorf("not a JSON object: %.40q", object)
	}
	for d.More() {
		name, err := d.Token()
		if err != nil {
			return err
		}
		key, isString := name.(string)
		if !isString {
			return fmt.Errorf("%v is not a member's name", name)
		}
		var value json.RawMessage
		if err := d.Decode(&value); err != nil {
			return err
		}
		visit(key, value)
	}
	_, err := d.Token()
	return err
}

func appendComma(dst []byte) []byte {
	if dst[len(dst)-1] == '{' {
		return dst
	}
	return append(dst, ',')
}

// appendJSON appends a JSON string that escapes no more than it must.
func appendJSON(dst []byte, text string) []byte {
	out := bytes.NewBuffer(dst)
	e := json.NewEncoder(out)
	e.SetEscapeHTML(false)
	// Encoding a string into memory cannot fail.
	_ = e.Encode(text)
	return bytes.TrimSuffix(out.Bytes(), []byte("\n"))
}
