// SPDX-License-Identifier: Apache-2.0

package usage

import (
	"bytes"
	"encoding/json"
	"math"
)

const (
	// mark begins an engine's account of a request, in every API. In text that
	// a model wrote the quotes are escaped, so there it does not occur.
	mark = `"usage":`
	// longest bounds an account, and so the memory of a scan. vLLM's are below
	// 400 bytes.
	longest = 4096
)

// scanner finds the accounts in a response that passes by in pieces. It keeps
// the first and the last: Anthropic's API tells the prompt's length at the
// beginning of a stream and the answer's at its end.
type scanner struct {
	edge  [len(mark) - 1]byte // the end of what passed by, for a mark across pieces
	edges int

	inside  bool   // an account has begun
	account []byte // as far as it passed by
	depth   int
	quoted  bool
	escaped bool

	first, last []byte
}

// write looks at the next piece.
func (s *scanner) write(p []byte) {
	for len(p) > 0 {
		if s.inside {
			p = s.collect(p)
			continue
		}
		at := s.find(p)
		if at < 0 {
			s.keep(p)
			return
		}
		p = p[at:]
		s.edges, s.inside, s.account, s.depth, s.quoted, s.escaped = 0, true, s.account[:0], 0, false, false
	}
}

// find returns where in p a mark ends, or -1.
func (s *scanner) find(p []byte) int {
	if s.edges > 0 {
		var joint [2 * len(mark)]byte
		n := copy(joint[:], s.edge[:s.edges])
		n += copy(joint[n:], p[:min(len(p), len(mark)-1)])
		if at := bytes.Index(joint[:n], []byte(mark)); at >= 0 {
			return at + len(mark) - s.edges
		}
	}
	if at := bytes.Index(p, []byte(mark)); at >= 0 {
		return at + len(mark)
	}
	return -1
}

// keep remembers the end of what passed by.
func (s *scanner) keep(p []byte) {
	if len(p) >= len(s.edge) {
		s.edges = copy(s.edge[:], p[len(p)-len(s.edge):])
		return
	}
	drop := max(0, s.edges+len(p)-len(s.edge))
	s.edges = copy(s.edge[:], s.edge[drop:s.edges])
	s.edges += copy(s.edge[s.edges:], p)
}

// collect takes an account's bytes, and returns those behind it. What is no
// object, such as the null that other chunks of a stream have, is left.
func (s *scanner) collect(p []byte) []byte {
	for i, c := range p {
		if len(s.account) == 0 && (c == ' ' || c == '\n' || c == '\r' || c == '\t') {
			continue
		}
		if len(s.account) == 0 && c != '{' || len(s.account) == longest {
			s.inside = false
			return p[i:]
		}
		s.account = append(s.account, c)
		if s.ends(c) {
			s.inside = false
			if s.first == nil {
				s.first = bytes.Clone(s.account)
			} else {
				s.last = append(s.last[:0], s.account...)
			}
			return p[i+1:]
		}
	}
	return nil
}

// ends follows the nesting, and tells whether c closes the account.
func (s *scanner) ends(c byte) bool {
	switch {
	case s.escaped:
		s.escaped = false
	case s.quoted:
		s.escaped, s.quoted = c == '\\', c != '"'
	case c == '"':
		s.quoted = true
	case c == '{':
		s.depth++
	case c == '}':
		s.depth--
	}
	return s.depth == 0
}

// Tokens is what an engine tells of one request; nil is what it did not tell.
type Tokens struct {
	// Prompt is the prompt's length and Cached how many of it were found in a
	// cache. Output is the answer's length.
	Prompt, Cached, Output *int
}

// tokens reads the accounts.
func (s *scanner) tokens() Tokens {
	first, last := read(s.first), read(s.last)
	if last.Prompt == nil {
		last.Prompt = first.Prompt
	}
	if last.Cached == nil {
		last.Cached = first.Cached
	}
	if last.Output == nil {
		last.Output = first.Output
	}
	if last.Prompt != nil && last.Cached != nil && *last.Cached > *last.Prompt {
		last.Cached = nil
	}
	return last
}

// account has the fields of all APIs: chat and completions count prompt_ and
// completion_tokens, responses and messages input_ and output_tokens.
type account struct {
	PromptTokens     *float64 `json:"prompt_tokens"`
	InputTokens      *float64 `json:"input_tokens"`
	CompletionTokens *float64 `json:"completion_tokens"`
	OutputTokens     *float64 `json:"output_tokens"`
	PromptDetails    details  `json:"prompt_tokens_details"`
	InputDetails     details  `json:"input_tokens_details"`
	// Messages only. There input_tokens are the others.
	CacheRead     *float64 `json:"cache_read_input_tokens"`
	CacheCreation *float64 `json:"cache_creation_input_tokens"`
}

type details struct {
	CachedTokens *float64 `json:"cached_tokens"`
}

func read(text []byte) Tokens {
	var a account
	if len(text) == 0 || json.Unmarshal(text, &a) != nil {
		return Tokens{}
	}
	t := Tokens{
		Prompt: count(a.PromptTokens, a.InputTokens),
		Cached: count(a.PromptDetails.CachedTokens, a.InputDetails.CachedTokens, a.CacheRead),
		Output: count(a.CompletionTokens, a.OutputTokens),
	}
	for _, part := range []*float64{a.CacheRead, a.CacheCreation} {
		if n := count(part); n != nil && t.Prompt != nil && a.PromptTokens == nil {
			sum := *t.Prompt + *n
			t.Prompt = &sum
		}
	}
	return t
}

// count returns the first number that is given and possible.
func count(of ...*float64) *int {
	for _, f := range of {
		if f != nil && *f >= 0 && *f <= math.MaxInt32 {
			n := int(*f)
			return &n
		}
	}
	return nil
}
