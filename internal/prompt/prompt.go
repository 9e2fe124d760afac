// SPDX-License-Identifier: Apache-2.0

// Package prompt reads the body of an inference request: which API and model it is for, and what its
// prompt begins with, as a chain of block hashes. It never decodes a body into values; it finds the
// fields it knows and hashes them where they lie, in the order in which most chat templates print them.
//
// Two requests whose prompts begin alike have chains that begin alike, whatever the order of their
// fields, their white space or their way of escaping. The opposite holds up to hash collisions.
//
// Nothing of the prompt's text is kept.
package prompt

import "bytes"

// Fault is why a body yielded no prompt. It is a closed list, fit for a metrics label.
type Fault uint8

// The faults.
const (
	// None: there is a prompt.
	None Fault = iota
	// Empty: no body, or only white space.
	Empty
	// NotJSON: the body is something else, such as a form, or malformed.
	NotJSON
	// Cut: the JSON ends early, or our own limit came before anything of the prompt.
	Cut
	// Shape: JSON, but nothing in it that the API takes for a prompt, or of the wrong type.
	Shape
	// TooDeep: nested deeper than engines read.
	TooDeep

	faultCount
)

var faultNames = [faultCount]string{"none", "empty", "not_json", "cut", "shape", "too_deep"}

// String returns the fault's name in snake_case.
func (f Fault) String() string {
	if f >= faultCount {
		f = NotJSON
	}
	return faultNames[f]
}

// Prompt is what a router needs to know of a request. The zero value is ready to [Prompt.Read]; reading
// again reuses its memory. It must not be read and used at once by several goroutines.
type Prompt struct {
	// API is what Read was told, or for Invocations what the body turned out to be.
	API API
	// Model is the model's or LoRA adapter's name, "" when the body names none.
	Model string
	// Chain identifies the prompt's prefixes: Chain[i] stands for its first i+1 full blocks of
	// BlockSize bytes, under this model, salt and template. The next Read overwrites it.
	Chain []uint64
	// Bytes is the length of the prompt's text, framing and the rest that fills no block included. An
	// image counts as 1,024. Of several prompts in one request this is the first.
	Bytes int
	// Extra is the length of the further prompts of the same request (a list of strings, the documents
	// of a rerank), in bytes. They are work for the engine, but no prefix that is followed.
	Extra int
	// Tokens is the exact length of the prompt where it was sent as token ids, else 0.
	Tokens int
	// Turn is the number of full blocks that end within the first user turn or before: the first run
	// of user messages. 0 where there is no such turn.
	Turn int
	// TurnKey is the hash of everything up to the end of the first user turn, to the byte, so that it
	// stays while a chat grows and differs between short prompts, too. Without such a turn it is the
	// hash of the whole text.
	TurnKey uint64
	// PreviousResponse is the id of the stored response this one continues, or "".
	PreviousResponse string
	// ServiceTier is the request's service_tier, or "".
	ServiceTier string
	// Priority is vLLM's priority: lower runs first; 0 when not given.
	Priority int
	// MaxTokens is how many tokens may be generated, 0 when not given.
	MaxTokens int
	// Stream says that the answer is wanted as server-sent events.
	Stream bool
	// Truncated says that the body ended early for our own limit, and the chain covers what was seen.
	Truncated bool

	long []stringEnd // memory of the scanner, kept from one Read to the next
}

// Read reads a request's body. whole tells that body is all of it; otherwise it is the beginning, and
// the prompt is followed as far as it goes. The seed goes into every hash: where it is secret, nobody
// outside can choose a prompt for its hash; where it is shared, routers agree. On a fault everything
// that could be learned without the prompt (such as the model) is set, and Chain is empty.
//
// Once its chain has grown, Read allocates nothing, except for a model's, tier's or response's name
// that differs from the one it held before.
func (p *Prompt) Read(api API, body []byte, whole bool, seed uint64) Fault {
	old := *p
	*p = Prompt{API: api, Chain: old.Chain[:0]}
	r := reader{scanner: scanner{long: old.long[:0]}}
	fault := r.scan(body)
	p.long, r.complete = r.long, true
	p.settings(&r, &old)
	if fault == Cut && !whole {
		p.Truncated = true
		fault = None
	}
	if fault != None {
		return fault
	}
	r.api = r.shape(api)
	if api == Invocations {
		p.API = r.api
	}
	r.p = p
	key := newKey(seed)
	r.text = text{key: key, hash: r.head(key), chain: &p.Chain}
	if fault = r.read(); fault != None {
		p.Chain, p.Extra, p.Tokens, p.Turn, p.TurnKey = p.Chain[:0], 0, 0, 0, 0
		if p.Truncated {
			return Cut
		}
		return fault
	}
	p.Bytes = r.text.bytes()
	if !r.turnEnded {
		p.TurnKey = r.text.sum()
	}
	return None
}

// settings takes over what is no part of the text.
func (p *Prompt) settings(r *reader, old *Prompt) {
	p.Model = name(r.fields[fieldModel], old.Model)
	p.PreviousResponse = name(r.fields[fieldPreviousResponse], old.PreviousResponse)
	p.ServiceTier = name(r.fields[fieldServiceTier], old.ServiceTier)
	p.Priority = integer(r.fields[fieldPriority])
	p.Stream = string(r.fields[fieldStream]) == "true"
	for _, f := range [...]field{fieldMaxCompletionTokens, fieldMaxTokens, fieldMaxOutputTokens} {
		if p.MaxTokens == 0 {
			p.MaxTokens = max(0, integer(r.fields[f]))
		}
	}
}

// name returns a string value; the one before it, when they are equal, so that nothing is allocated.
// Longer than any name is, it counts as none.
func name(v []byte, before string) string {
	const limit = 256
	if !isString(v) || cut(v) {
		return ""
	}
	if string(v[1:]) == before && bytes.IndexByte(v, '\\') < 0 {
		return before
	}
	var room [limit + 4]byte
	s := appendDecoded(room[:0], v[1:], limit+1)
	switch {
	case len(s) > limit:
		return ""
	case string(s) == before:
		return before
	}
	return string(s)
}
