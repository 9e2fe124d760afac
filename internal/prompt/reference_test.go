// SPDX-License-Identifier: Apache-2.0

package prompt

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/big"
	"slices"
	"strings"
	"unicode/utf8"
)

// The reference: encoding/json decodes the body into a tree, the tree is written out as one long text,
// the text is cut into blocks. It shares with the code under test the numbers of tags, fields and
// members, and the hash of a single block.

// node is a decoded value. Objects keep their members in order.
type node struct {
	kind byte // 's'tring, 'n'umber or other literal, 'o'bject, 'a'rray; 0 when absent or null
	str  string
	keys []string
	list []node
}

func decode(body []byte) (node, error) {
	dec := json.NewDecoder(bytes.NewReader(body))
	dec.UseNumber()
	n, err := decodeNode(dec)
	if err != nil {
		return node{}, err
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return node{}, errors.New("more than one value")
	}
	return n, nil
}

func decodeNode(dec *json.Decoder) (node, error) {
	token, err := dec.Token()
	if err != nil {
		return node{}, err
	}
	switch v := token.(type) {
	case string:
		return node{kind: 's', str: v}, nil
	case nil:
		return node{}, nil
	case json.Delim:
		n := node{kind: 'a'}
		if v == '{' {
			n.kind = 'o'
		}
		for dec.More() {
			if n.kind == 'o' {
				key, err := dec.Token()
				if err != nil {
					return node{}, err
				}
				n.keys = append(n.keys, key.(string))
			}
			e, err := decodeNode(dec)
			if err != nil {
				return node{}, err
			}
			n.list = append(n.list, e)
		}
		_, err := dec.Token()
		return n, err
	default:
		return node{kind: 'n', str: fmt.Sprint(v)}, nil
	}
}

// get returns the last member with one of the keys.
func (n node) get(keys ...string) node {
	if n.kind != 'o' {
		return node{}
	}
	for i, k := range slices.Backward(n.keys) {
		if slices.Contains(keys, k) {
			return n.list[i]
		}
	}
	return node{}
}

func (n node) is(s string) bool { return n.kind == 's' && n.str == s }

func (n node) blank() bool {
	return n.kind == 0 || n.kind == 's' && n.str == "" || n.kind == 'a' && len(n.list) == 0
}

func (n node) first() node {
	if n.kind != 'a' || len(n.list) == 0 {
		return node{}
	}
	return n.list[0]
}

func (n node) number() bool {
	return n.kind == 'n' && n.str != "true" && n.str != "false"
}

func canonicalString(s string) string {
	var b strings.Builder
	for _, r := range s {
		switch {
		case r == '"' || r == '\\':
			b.WriteString("\\" + string(r))
		case strings.ContainsRune("\b\f\n\r\t", r):
			b.WriteString("\\" + string("btn.fr"[r-'\b']))
		case r < ' ':
			fmt.Fprintf(&b, `\u%04x`, r)
		default:
			b.WriteRune(r)
		}
	}
	return b.String()
}

func (n node) json() string {
	var parts []string
	switch n.kind {
	case 0:
		return "null"
	case 's':
		return `"` + canonicalString(n.str) + `"`
	case 'n':
		return n.str
	case 'a':
		for _, e := range n.list {
			parts = append(parts, e.json())
		}
		return "[" + strings.Join(parts, ",") + "]"
	}
	for i, e := range n.list {
		parts = append(parts, `"`+canonicalString(n.keys[i])+`":`+e.json())
	}
	return "{" + strings.Join(parts, ",") + "}"
}

type referenceReader struct {
	key     key
	body    node
	api     API
	text    []byte
	extra   int
	tokens  int
	turnEnd int
	open    bool // the message before belongs to the first user turn
}

func referenceRead(api API, body []byte, seed uint64) (Prompt, Fault, error) {
	p := Prompt{API: api}
	root, err := decode(body)
	if err != nil {
		return p, NotJSON, err
	}
	switch root.kind {
	case 'o':
	case 'a', 's':
		return p, Shape, nil
	default:
		return p, NotJSON, nil
	}
	referenceName := func(n node) string {
		if n.kind == 's' && len(n.str) <= 256 {
			return n.str
		}
		return ""
	}
	referenceInt := func(n node) int {
		if v, ok := new(big.Int).SetString(n.str, 10); ok && n.kind == 'n' {
			limit := big.NewInt(1<<31 - 1)
			if v.CmpAbs(limit) > 0 {
				return int(limit.Int64()) * v.Sign()
			}
			return int(v.Int64())
		}
		return 0
	}
	p.Model = referenceName(root.get("model"))
	p.ServiceTier = referenceName(root.get("service_tier"))
	p.PreviousResponse = referenceName(root.get("previous_response_id"))
	p.Priority = referenceInt(root.get("priority"))
	for _, k := range []string{"max_completion_tokens", "max_tokens", "max_output_tokens"} {
		if p.MaxTokens == 0 {
			p.MaxTokens = max(0, referenceInt(root.get(k)))
		}
	}
	stream := root.get("stream")
	p.Stream = stream.kind == 'n' && stream.str == "true"

	r := &referenceReader{key: newKey(seed), body: root, api: api, turnEnd: -1}
	r.resolve()
	if api == Invocations {
		p.API = r.api
	}
	if f := r.read(); f != None {
		return p, f, nil
	}
	start := r.head()
	at := func(n int) (hash uint64, chain []uint64) {
		return referenceHash(r.key, start, r.text[:n])
	}
	p.TurnKey, p.Chain = at(len(r.text))
	if r.turnEnd >= 0 {
		p.TurnKey, _ = at(r.turnEnd)
		p.Turn = r.turnEnd / BlockSize
	}
	p.Bytes, p.Extra, p.Tokens = len(r.text), r.extra, r.tokens
	return p, None, nil
}

func (r *referenceReader) resolve() {
	has := func(k string) bool { return r.body.get(k).kind != 0 }
	if r.api != Tokenize && r.api != Invocations {
		return
	}
	switch tokenize := r.api == Tokenize; {
	case has("messages") && tokenize:
		r.api = Messages
	case has("messages"):
		r.api = Chat
	case has("prompt"), has("prompt_embeds"):
		r.api = Completions
	case has("input") && tokenize:
		r.api = Responses
	case has("input"), has("texts"):
		r.api = Embeddings
	case has("token_ids"):
		r.api = Generate
	case has("query") && has("documents"):
		r.api = Rerank
	case has("text_1"), has("queries"), has("query"):
		r.api = Score
	case has("data"):
		r.api = Pooling
	default:
		r.api = Unknown
	}
}

func (r *referenceReader) pooled() node { return r.either("input", "texts", "data") }

func (r *referenceReader) either(keys ...string) node {
	for _, k := range keys {
		if n := r.body.get(k); n.kind != 0 {
			return n
		}
	}
	return node{}
}

func (r *referenceReader) head() uint64 {
	ofList := func(n node) family {
		if e := n.first(); e.number() || e.kind == 'a' {
			return tokens
		}
		return plainText
	}
	kind := plainText
	switch r.api {
	case Chat, Messages, Responses:
		kind = conversation
	case Generate:
		kind = tokens
	case Completions:
		kind = ofList(r.body.get("prompt"))
	case Score, Rerank:
		kind = pair
	case Embeddings, Classify, Pooling:
		kind = ofList(r.pooled())
		if r.body.get("messages").kind != 0 {
			kind = conversation
		}
	}
	sub := referenceReader{text: []byte{tagField, byte(kind)}}
	for i, k := range []string{
		"model", "cache_salt", "chat_template", "chat_template_kwargs", "reasoning_effort", "reasoning",
		"thinking", "output_config", "response_format", "text", "media_io_kwargs", "mm_processor_kwargs",
		"add_special_tokens", "truncate_prompt_tokens", "truncation_side", "input_type",
	} {
		if n := r.body.get(k); n.kind != 0 {
			sub.text = append(sub.text, tagField, byte(i))
			sub.value(n)
		}
	}
	if r.body.get("tool_choice").is("none") {
		sub.text = append(sub.text, tagField, byte(fieldToolChoice))
	}
	sum, _ := referenceHash(r.key, 0, sub.text)
	return sum
}

// referenceHash hashes a text, and returns the hash of each full block.
func referenceHash(k key, hash uint64, text []byte) (sum uint64, chain []uint64) {
	for len(text) >= BlockSize {
		hash = k.block(hash, (*[BlockSize]byte)(text))
		chain = append(chain, hash)
		text = text[BlockSize:]
	}
	rest := [BlockSize]byte{}
	copy(rest[:], text)
	return mix(k.block(hash, &rest) + uint64(len(text))), chain
}

func (r *referenceReader) read() Fault {
	switch r.api {
	case Chat, Messages:
		return r.chat()
	case Responses:
		return r.response()
	case Completions:
		if e := r.body.get("prompt_embeds"); r.body.get("prompt").kind == 0 && e.kind == 's' {
			r.media(e)
			return None
		}
		return r.prompts(r.body.get("prompt"))
	case Generate:
		ids := r.body.get("token_ids")
		if ids.kind != 'a' {
			return Shape
		}
		if f := r.body.get("features"); f.kind == 'o' {
			r.media(f)
		}
		return r.ids(ids)
	case Score, Rerank:
		return r.pair()
	case Embeddings, Classify, Pooling:
		if r.body.get("messages").kind != 0 {
			return r.chat()
		}
		return r.prompts(r.pooled())
	}
	return Shape
}

func (r *referenceReader) one(n node) Fault {
	switch n.kind {
	case 's':
		r.put(n.str)
	case 'o':
		r.single(n)
	case 'a':
		return r.ids(n)
	default:
		return Shape
	}
	return None
}

func (r *referenceReader) prompts(n node) Fault {
	if n.kind != 'a' || n.first().number() {
		return r.one(n)
	}
	if len(n.list) == 0 {
		return Shape
	}
	if f := r.one(n.list[0]); f != None {
		return f
	}
	r.rest(n.list[1:])
	return None
}

func (r *referenceReader) ids(n node) Fault {
	for _, e := range n.list {
		id, ok := new(big.Int).SetString(e.str, 10)
		if !e.number() || !ok {
			return Shape
		}
		low := new(big.Int).And(id, big.NewInt(1<<32-1))
		r.text = binary.LittleEndian.AppendUint32(r.text, uint32(low.Uint64()))
	}
	r.tokens = len(n.list)
	if r.tokens == 0 {
		return Shape
	}
	return None
}

func (r *referenceReader) pair() Fault {
	q := r.either("queries", "query", "text_1")
	texts := r.either("documents", "text_2", "items")
	if q.kind == 'a' && !q.first().number() {
		if len(q.list) == 0 {
			return Shape
		}
		r.rest(q.list[1:])
		q = q.list[0]
	}
	if f := r.one(q); f != None {
		return f
	}
	if texts.kind == 'a' && !texts.first().number() {
		r.rest(texts.list)
	} else {
		r.rest([]node{texts})
	}
	return None
}

func (r *referenceReader) rest(list []node) {
	for _, n := range list {
		sub := referenceReader{key: r.key}
		switch e := n.first(); {
		case n.kind == 0:
			continue
		case n.kind == 's':
			sub.put(n.str)
		case e.number():
			sub.ids(n)
		case e.kind == 'o':
			for _, m := range n.list {
				sub.single(m)
			}
		default:
			sub.single(n)
		}
		r.extra += len(sub.text)
	}
}

func (r *referenceReader) single(n node) {
	if n.kind == 'o' && slices.Contains(n.keys, "content") {
		r.content(n.get("content"))
		return
	}
	r.value(n)
}

func (r *referenceReader) put(s string) { r.text = append(r.text, canonicalString(s)...) }

func (r *referenceReader) value(n node) {
	if n.kind == 's' {
		r.text = append(r.text, tagText)
		r.put(n.str)
		return
	}
	r.text = append(r.text, tagJSON)
	r.text = append(r.text, n.json()...)
}

func (r *referenceReader) member(number byte, n node) {
	if !n.blank() {
		r.text = append(r.text, tagMember, number)
		r.value(n)
	}
}

func (r *referenceReader) parts(number byte, n node) {
	if !n.blank() {
		r.text = append(r.text, tagMember, number)
		r.content(n)
	}
}

func (r *referenceReader) media(n node) {
	digest := referenceReader{}
	digest.value(n)
	sum, _ := referenceHash(r.key, 0, digest.text)
	r.text = append(r.text, tagMedia)
	for range 128 {
		r.text = binary.LittleEndian.AppendUint64(r.text, sum)
	}
}

func (r *referenceReader) chat() Fault {
	n := r.body.get("messages")
	if n.first().kind == 'a' {
		r.rest(n.list[1:])
		n = n.first()
	}
	if n.kind != 'a' || len(n.list) == 0 {
		return Shape
	}
	if s := r.body.get("system"); r.api == Messages && s.kind != 0 {
		r.text = append(r.text, tagMessage)
		r.text = append(r.text, "system"...)
		if s.kind != 'a' {
			r.content(s)
		} else {
			for _, p := range s.list {
				if text := p.get("text", "thinking", "refusal"); text.kind != 's' || !strings.HasPrefix(text.str, "x-anthropic-billing-header") {
					r.part(p, false)
				}
			}
		}
	}
	r.conversation(n.list)
	return None
}

func (r *referenceReader) response() Fault {
	n := r.body.get("input")
	if n.kind != 's' && n.kind != 'a' {
		return Shape
	}
	if s := r.body.get("instructions"); s.kind != 0 {
		r.text = append(r.text, tagMessage)
		r.text = append(r.text, "system"...)
		r.content(s)
	}
	if s := r.body.get("previous_response_id"); s.kind == 's' {
		r.member(memberPrevious, s)
	}
	if n.kind == 's' {
		n = node{kind: 'a', list: []node{{
			kind: 'o', keys: []string{"role", "content"}, list: []node{{kind: 's', str: "user"}, n},
		}}}
	}
	if len(n.list) == 0 {
		return Shape
	}
	r.conversation(n.list)
	return None
}

func (r *referenceReader) conversation(list []node) {
	lead := 0
	for lead < len(list) && (list[lead].get("role").is("system") || list[lead].get("role").is("developer")) {
		r.message(list[lead])
		lead++
	}
	r.definitions()
	for _, m := range list[lead:] {
		r.message(m)
		r.open = m.get("role").is("user") && (r.turnEnd < 0 || r.open)
		if r.open {
			r.turnEnd = len(r.text)
		}
	}
}

func (r *referenceReader) definitions() {
	switch tools := r.body.get("tools"); tools.kind {
	case 'a':
		for _, tool := range tools.list {
			r.text = append(r.text, tagTool)
			if tool.kind != 'o' {
				r.text = append(r.text, tool.json()...)
				continue
			}
			for i, k := range tool.keys {
				if k != "cache_control" {
					r.text = append(r.text, tagText)
					r.put(k)
					r.value(tool.list[i])
				}
			}
		}
	case 0:
	default:
		r.member(memberTools, tools)
	}
	r.member(memberDocuments, r.body.get("documents"))
}

func (r *referenceReader) message(n node) {
	role, kind := n.get("role"), n.get("type")
	label := role
	if role.kind != 's' {
		label = kind
	}
	items := []string{
		"function_call", "function_call_output", "reasoning", "custom_tool_call", "custom_tool_call_output", "message",
	}
	r.text = append(r.text, tagMessage)
	if n.kind != 'o' || !slices.Contains(n.keys, "role") && kind.kind == 's' && !slices.Contains(items, kind.str) {
		r.value(n)
		return
	}
	if label.kind == 's' {
		r.put(label.str)
	}
	r.member(memberName, n.get("name"))
	r.member(memberCallID, n.get("tool_call_id", "call_id"))
	r.member(memberEncrypted, n.get("encrypted_content"))
	r.parts(memberSummary, n.get("summary"))
	r.parts(memberReasoning, n.get("reasoning", "reasoning_content"))
	r.content(n.get("content"))
	r.member(memberRefusal, n.get("refusal"))
	r.member(memberCalls, n.get("tool_calls"))
	r.member(memberArguments, n.get("arguments", "input", "action"))
	r.parts(memberOutput, n.get("output"))
	r.member(memberAudio, n.get("audio"))
	r.member(memberTools, n.get("tools"))
}

func (r *referenceReader) content(n node) {
	if n.kind != 'a' {
		r.plain(n)
		return
	}
	for _, p := range n.list {
		r.part(p, false)
	}
}

func (r *referenceReader) plain(n node) {
	if !n.blank() {
		r.value(n)
	}
}

func (r *referenceReader) part(n node, inResult bool) {
	if n.kind != 'o' {
		r.plain(n)
		return
	}
	text := n.get("text", "thinking", "refusal")
	media := n.get("image_url", "input_audio", "audio_url", "video_url", "image_pil", "image_embeds",
		"audio_embeds", "source", "file", "file_id", "file_data")
	switch kind := n.get("type"); {
	case kind.is("tool_use"), kind.is("server_tool_use"):
		r.text = append(r.text, tagMember, memberToolUse)
		r.member(memberCallID, n.get("id", "tool_use_id"))
		r.member(memberName, n.get("name"))
		r.member(memberArguments, n.get("input"))
	case kind.is("tool_result") && !inResult:
		r.text = append(r.text, tagMember, memberToolResult)
		r.member(memberCallID, n.get("id", "tool_use_id"))
		content := n.get("content")
		if content.kind != 'a' {
			r.plain(content)
		}
		for _, p := range content.list {
			if content.kind == 'a' {
				r.part(p, true)
			}
		}
	case kind.is("thinking"), kind.is("reasoning_text"):
		r.member(memberReasoning, text)
	case kind.is("refusal"):
		r.member(memberRefusal, text)
	case text.kind == 's':
		r.plain(text)
	case n.get("uuid").kind != 0:
		r.media(n.get("uuid"))
	case media.kind == 'o':
		content := media
		for i, k := range media.keys {
			if slices.Contains([]string{"url", "data", "file_id", "file_data"}, k) {
				content = media.list[i]
			}
		}
		r.media(content)
	case media.kind != 0:
		r.media(media)
	default:
		r.value(n)
	}
}

// decodesAlike reports whether encoding/json sees the same characters in a body as we do: it replaces
// unpaired surrogates and broken UTF-8.
func decodesAlike(body []byte) bool {
	if !utf8.Valid(body) {
		return false
	}
	n, err := decode(body)
	return err == nil && !strings.Contains(n.json(), "\uFFFD")
}
