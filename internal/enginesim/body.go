// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
)

// requestBody is the union of the bodies of all endpoints: the fields that choose
// the prompt, the length of the answer and its form. Everything else is ignored,
// as vLLM ignores what it does not know.
type requestBody struct {
	Model         string `json:"model"`
	Stream        bool   `json:"stream"`
	StreamOptions struct {
		IncludeUsage bool `json:"include_usage"`
	} `json:"stream_options"`
	CacheSalt string `json:"cache_salt"`
	N         *int   `json:"n"`

	MaxTokens           *int `json:"max_tokens"`
	MaxCompletionTokens *int `json:"max_completion_tokens"`
	MaxOutputTokens     *int `json:"max_output_tokens"`

	Messages            []message       `json:"messages"`
	System              json.RawMessage `json:"system"`
	Tools               json.RawMessage `json:"tools"`
	AddGenerationPrompt *bool           `json:"add_generation_prompt"`

	Prompt             json.RawMessage `json:"prompt"`
	Input              json.RawMessage `json:"input"`
	Instructions       string          `json:"instructions"`
	PreviousResponseID string          `json:"previous_response_id"`

	Text1     json.RawMessage `json:"text_1"`
	Text2     json.RawMessage `json:"text_2"`
	Queries   json.RawMessage `json:"queries"`
	Query     json.RawMessage `json:"query"`
	Documents json.RawMessage `json:"documents"`
}

type message struct {
	Type      string          `json:"type"` // of a /v1/responses item; "" means message
	Role      string          `json:"role"`
	Content   json.RawMessage `json:"content"`
	ToolCalls json.RawMessage `json:"tool_calls"`
}

// defaultOutputTokens is the length of an answer whose request names none.
const defaultOutputTokens = 16

// maxChoices bounds n; vLLM's own limit is 16384.
const maxChoices = 128

// outputTokens returns the length of the answer asked for.
func (b *requestBody) outputTokens() (int, error) {
	n := defaultOutputTokens
	for _, p := range []*int{b.MaxTokens, b.MaxCompletionTokens, b.MaxOutputTokens} {
		if p != nil {
			n = *p
		}
	}
	if n < 1 {
		return 0, fmt.Errorf("max_tokens must be at least 1, got %d", n)
	}
	return n, nil
}

// choices returns the number of answers asked for.
func (b *requestBody) choices() (int, error) {
	if b.N == nil {
		return 1, nil
	}
	if *b.N < 1 || *b.N > maxChoices {
		return 0, fmt.Errorf("n must be between 1 and %d, got %d", maxChoices, *b.N)
	}
	return *b.N, nil
}

// chatTurns flattens the messages of a chat or Anthropic body.
func (b *requestBody) chatTurns() ([]turn, error) {
	if len(b.Messages) == 0 {
		return nil, errors.New("messages must not be empty")
	}
	var turns []turn
	if isSet(b.System) {
		parts, err := contentParts(b.System)
		if err != nil {
			return nil, fmt.Errorf("system: %w", err)
		}
		turns = append(turns, turn{role: "system", parts: withoutBilling(parts)})
	}
	for i, m := range b.Messages {
		t, err := m.turn()
		if err != nil {
			return nil, fmt.Errorf("messages[%d]: %w", i, err)
		}
		turns = append(turns, t)
	}
	return turns, nil
}

// inputTurns flattens the input of a /v1/responses body.
func (b *requestBody) inputTurns() ([]turn, error) {
	if !isSet(b.Input) {
		return nil, errors.New("input must not be empty")
	}
	var text string
	if json.Unmarshal(b.Input, &text) == nil {
		return []turn{{role: "user", parts: []part{{text: text}}}}, nil
	}
	var items []json.RawMessage
	if err := json.Unmarshal(b.Input, &items); err != nil {
		return nil, errors.New("input must be a string or a list of items")
	}
	var turns []turn
	for i, item := range items {
		var m message
		if err := json.Unmarshal(item, &m); err != nil {
			return nil, fmt.Errorf("input[%d]: %w", i, err)
		}
		if m.Type != "" && m.Type != "message" {
			turns = append(turns, turn{role: m.Type, parts: []part{{text: string(item)}}})
			continue
		}
		t, err := m.turn()
		if err != nil {
			return nil, fmt.Errorf("input[%d]: %w", i, err)
		}
		turns = append(turns, t)
	}
	return turns, nil
}

func (m message) turn() (turn, error) {
	if m.Role == "" {
		return turn{}, errors.New("role is missing")
	}
	t := turn{role: m.Role}
	if isSet(m.Content) {
		parts, err := contentParts(m.Content)
		if err != nil {
			return turn{}, err
		}
		t.parts = parts
	}
	if isSet(m.ToolCalls) {
		t.parts = append(t.parts, part{text: string(m.ToolCalls)})
	}
	return t, nil
}

// contentParts reads a message's content: a string, or a list of typed parts.
func contentParts(raw json.RawMessage) ([]part, error) {
	var text string
	if json.Unmarshal(raw, &text) == nil {
		return []part{{text: text}}, nil
	}
	var list []json.RawMessage
	if err := json.Unmarshal(raw, &list); err != nil {
		return nil, errors.New("content must be a string or a list of parts")
	}
	parts := make([]part, len(list))
	for i, item := range list {
		var typed struct {
			Type string `json:"type"`
			Text string `json:"text"`
		}
		if err := json.Unmarshal(item, &typed); err != nil {
			return nil, fmt.Errorf("content[%d]: %w", i, err)
		}
		switch typed.Type {
		case "text", "input_text", "output_text":
			parts[i] = part{text: typed.Text}
		case "image", "image_url", "input_image", "input_audio", "video_url", "audio_url":
			parts[i] = part{text: string(item), image: true}
		default:
			parts[i] = part{text: string(item)}
		}
	}
	return parts, nil
}

// withoutBilling drops the blocks that Anthropic clients change with every request
// and vLLM leaves out of the prompt.
func withoutBilling(parts []part) []part {
	kept := parts[:0]
	for _, p := range parts {
		if !strings.HasPrefix(p.text, "x-anthropic-billing-header") {
			kept = append(kept, p)
		}
	}
	return kept
}

// inputPrompts reads a prompt or input field: a string, a list of strings, token
// ids, or a list of lists of token ids.
func (t tokenizer) inputPrompts(field string, raw json.RawMessage) ([][]uint32, error) {
	invalid := fmt.Errorf("%s must be a string, a list of strings, token ids, or a list of these", field)
	if !isSet(raw) {
		return nil, fmt.Errorf("%s must not be empty", field)
	}
	var text string
	if json.Unmarshal(raw, &text) == nil {
		return [][]uint32{t.append(nil, text)}, nil
	}
	var ids []uint32
	if json.Unmarshal(raw, &ids) == nil {
		if len(ids) == 0 {
			return nil, fmt.Errorf("%s must not be empty", field)
		}
		return [][]uint32{ids}, nil
	}
	var texts []string
	if json.Unmarshal(raw, &texts) == nil {
		prompts := make([][]uint32, len(texts))
		for i, text := range texts {
			prompts[i] = t.append(nil, text)
		}
		return prompts, nil
	}
	var lists [][]uint32
	if json.Unmarshal(raw, &lists) == nil {
		return lists, nil
	}
	return nil, invalid
}

// pairPrompts renders the pairs that score and rerank compare: the query first, so
// that all of them share it.
func (t tokenizer) pairPrompts(query, documents json.RawMessage) ([][]uint32, error) {
	queries, err := t.inputPrompts("query", query)
	if err != nil {
		return nil, err
	}
	texts, err := t.inputPrompts("documents", documents)
	if err != nil {
		return nil, err
	}
	if len(queries) != 1 && len(queries) != len(texts) {
		return nil, fmt.Errorf("got %d queries for %d documents, want 1 or as many", len(queries), len(texts))
	}
	prompts := make([][]uint32, len(texts))
	for i, text := range texts {
		ids := append([]uint32{tokenTurnStart}, queries[i%len(queries)]...)
		prompts[i] = append(append(ids, tokenTurnEnd), text...)
	}
	return prompts, nil
}

// isSet tells whether a field is there and not null.
func isSet(raw json.RawMessage) bool {
	return len(raw) > 0 && !bytes.Equal(raw, []byte("null"))
}
