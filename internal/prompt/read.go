// SPDX-License-Identifier: Apache-2.0

package prompt

// reader reads one body.
type reader struct {
	scanner
	p      *Prompt
	api    API
	fields [fieldCount][]byte
	text   text

	inTurn    bool // the message read last belongs to the first user turn
	turnEnded bool
}

// shape tells which API to read the body as. Where the path leaves it open, the body's fields say.
func (r *reader) shape(api API) API {
	if api != Tokenize && api != Invocations {
		return api
	}
	given := func(f field) bool { return !isNull(r.fields[f]) }
	switch {
	case given(fieldMessages) && api == Invocations:
		return Chat
	case given(fieldMessages):
		return Messages // the same text as Chat, and a count_tokens body's system with it
	case given(fieldPrompt), given(fieldPromptEmbeds):
		return Completions
	case given(fieldInput) && api == Tokenize:
		return Responses
	case given(fieldInput), given(fieldTexts):
		return Embeddings
	case given(fieldTokenIDs):
		return Generate
	case given(fieldQuery) && given(fieldDocuments):
		return Rerank
	case given(fieldText1), given(fieldQueries), given(fieldQuery):
		return Score
	case given(fieldData):
		return Pooling
	}
	return Unknown
}

// family separates texts of different kinds. Requests of one family with the same text have the same
// prompt, whichever API brought it.
func (r *reader) family() family {
	switch r.api {
	case Chat, Messages, Responses:
		return conversation
	case Generate:
		return tokens
	case Completions:
		return listFamily(r.fields[fieldPrompt])
	case Score, Rerank:
		return pair
	case Embeddings, Classify, Pooling:
		if !isNull(r.fields[fieldMessages]) {
			return conversation
		}
		return listFamily(r.pooled())
	}
	return plainText
}

type family uint8

const (
	conversation family = iota
	plainText
	tokens
	pair
)

func listFamily(v []byte) family {
	e := first(v)
	if isNumber(e) || isArray(e) {
		return tokens
	}
	return plainText
}

// read adds the prompt to the text.
func (r *reader) read() Fault {
	switch r.api {
	case Chat, Messages:
		return r.chat()
	case Responses:
		return r.response()
	case Completions:
		if v := r.fields[fieldPromptEmbeds]; isNull(r.fields[fieldPrompt]) && isString(v) {
			r.text.media(v)
			return None
		}
		return r.list(r.fields[fieldPrompt])
	case Generate:
		return r.generate()
	case Score, Rerank:
		return r.pair()
	case Embeddings, Classify, Pooling:
		if !isNull(r.fields[fieldMessages]) {
			return r.chat()
		}
		return r.list(r.pooled())
	}
	return Shape
}

// pooled is the input of the APIs that answer with a vector.
func (r *reader) pooled() []byte { return r.either(fieldInput, fieldTexts, fieldData) }

// either returns the first of the fields that is given.
func (r *reader) either(fields ...field) []byte {
	for _, f := range fields {
		if v := r.fields[f]; !isNull(v) {
			return v
		}
	}
	return nil
}

// list adds a prompt that is a string, token ids, or a list of either. The first of several is the
// prompt; the others are counted.
func (r *reader) list(v []byte) Fault {
	switch {
	case isString(v):
		r.text.string(v)
		return None
	case isNumber(first(v)):
		return r.tokens(v)
	case isObject(v):
		r.single(v)
		return None
	case !isArray(v):
		return Shape
	}
	prompts := walkArray(v)
	head, ok := prompts.next(&r.scanner)
	switch {
	case !ok:
		return Shape
	case isString(head):
		r.text.string(head)
	case isArray(head):
		if fault := r.tokens(head); fault != None {
			return fault
		}
	case isObject(head):
		r.single(head)
	default:
		return Shape
	}
	r.rest(prompts)
	return None
}

// tokens adds token ids.
func (r *reader) tokens(v []byte) Fault {
	n, ok := r.text.ids(v)
	if !ok || n == 0 {
		return Shape
	}
	r.p.Tokens = n
	return None
}

// generate adds the token ids of vLLM's own request, behind the hashes of its images, if it has any.
func (r *reader) generate() Fault {
	if !isArray(r.fields[fieldTokenIDs]) {
		return Shape
	}
	if v := r.fields[fieldFeatures]; isObject(v) {
		r.text.media(v)
	}
	return r.tokens(r.fields[fieldTokenIDs])
}

// pair adds a query and counts what it is compared with. Cross-encoders see the query first, once for
// every document, so that the query is the prefix they share.
func (r *reader) pair() Fault {
	queries := r.either(fieldQueries, fieldQuery, fieldText1)
	texts := r.either(fieldDocuments, fieldText2, fieldItems)
	if isArray(queries) && !isNumber(first(queries)) {
		list := walkArray(queries)
		head, ok := list.next(&r.scanner)
		if !ok {
			return Shape
		}
		queries = head
		r.rest(list)
	}
	switch {
	case isString(queries):
		r.text.string(queries)
	case isObject(queries):
		r.single(queries)
	case isArray(queries):
		if fault := r.tokens(queries); fault != None {
			return fault
		}
	default:
		return Shape
	}
	if isArray(texts) && !isNumber(first(texts)) {
		r.rest(walkArray(texts))
	} else {
		r.extra(texts)
	}
	return None
}

// rest counts the further prompts of a list.
func (r *reader) rest(list array) {
	for {
		v, ok := list.next(&r.scanner)
		if !ok {
			return
		}
		r.extra(v)
	}
}

// extra counts one further prompt.
func (r *reader) extra(v []byte) {
	if isNull(v) {
		return
	}
	own := r.text
	r.text = text{key: own.key, count: true}
	switch e := first(v); {
	case isString(v):
		r.text.string(v)
	case isNumber(e):
		r.text.ids(v)
	case isObject(e): // a conversation of a batch
		list := walkArray(v)
		for m, ok := list.next(&r.scanner); ok; m, ok = list.next(&r.scanner) {
			r.single(m)
		}
	default:
		r.single(v)
	}
	r.p.Extra += r.text.bytes()
	r.text = own
}

// single adds a prompt given as an object: like a message without a role, or anything else.
func (r *reader) single(v []byte) {
	var m message
	if isObject(v) {
		members := walkObject(v, 0)
		m.members(&r.scanner, &members)
	}
	if m.content == nil {
		r.text.value(v)
		return
	}
	r.content(m.content)
}
