// SPDX-License-Identifier: Apache-2.0

package prompt

// A conversation is hashed in the order most chat templates print it: system messages that lead, tools,
// documents, the other messages. A template with another order loses some sharing, nothing else.

// Members of a message, as numbered in the text.
const (
	memberName = iota
	memberCallID
	memberReasoning
	memberRefusal
	memberCalls
	memberAudio
	memberArguments
	memberOutput
	memberSummary
	memberEncrypted
	memberTools
	memberPrevious
	memberToolUse
	memberToolResult
	memberDocuments
)

// chat adds the body of a chat completion or of an Anthropic message. A batch is a list of
// conversations, of which the first is followed.
func (r *reader) chat() Fault {
	v := r.fields[fieldMessages]
	if isArray(first(v)) {
		batch := walkArray(v)
		v, _ = batch.next(&r.scanner)
		r.rest(batch)
	}
	if !isArray(v) {
		return Shape
	}
	list := walkArray(v)
	if !list.more() {
		return Shape
	}
	if s := r.fields[fieldSystem]; r.api == Messages && !isNull(s) {
		r.role("system")
		r.system(s)
	}
	r.conversation(list)
	return None
}

// response adds the body of a response: instructions are its system message, and the input may be one
// user message given as a string.
func (r *reader) response() Fault {
	v := r.fields[fieldInput]
	if !isString(v) && (!isArray(v) || first(v) == nil) {
		return Shape
	}
	if s := r.fields[fieldInstructions]; !isNull(s) {
		r.role("system")
		r.content(s)
	}
	// What the stored response brings is not in the body. Its id stands for it: continuing one
	// response twice shares a prefix.
	if s := r.fields[fieldPreviousResponse]; isString(s) {
		r.member(memberPrevious, s)
	}
	if isString(v) {
		r.definitions()
		r.role("user")
		r.content(v)
		r.endTurn()
		return None
	}
	r.conversation(walkArray(v))
	return None
}

// conversation adds the messages, and the definitions behind the system messages that lead.
func (r *reader) conversation(list array) {
	leading := true
	var m message
	for list.more() && m.read(&r.scanner, &list) {
		if leading && !is(m.role, "system") && !is(m.role, "developer") {
			leading = false
			r.definitions()
		}
		user := is(m.role, "user")
		if r.inTurn && !user {
			r.endTurn()
		}
		r.inTurn = user && !r.turnEnded
		r.message(&m)
	}
	if leading {
		r.definitions()
	}
	if r.inTurn {
		r.endTurn()
	}
}

func (r *reader) endTurn() {
	r.inTurn, r.turnEnded = false, true
	r.p.Turn, r.p.TurnKey = r.text.full, r.text.sum()
}

// definitions adds tools and documents.
func (r *reader) definitions() {
	switch v := r.fields[fieldTools]; {
	case isArray(v):
		list := walkArray(v)
		for list.more() && r.tool(&list) {
		}
	case !isNull(v):
		r.member(memberTools, v)
	}
	if v := r.fields[fieldDocuments]; !isNull(v) && string(v) != "[]" {
		r.member(memberDocuments, v)
	}
}

// tool adds the list's next definition as received, but for its cache marker.
func (r *reader) tool(list *array) (ok bool) {
	t := &r.text
	t.tag(tagTool)
	members, ok := list.object()
	if !ok {
		v, ok := list.next(&r.scanner)
		if ok {
			t.json(v)
		}
		return ok
	}
	var room [48]byte
	for {
		key, value, ok := members.next(&r.scanner)
		if !ok {
			break
		}
		if string(plain(key, &room)) == "cache_control" {
			continue
		}
		t.tag(tagText)
		t.escaped(key, false)
		t.value(value)
	}
	t.stopAt(members.value())
	list.i = members.i
	return members.fault == None || members.fault == Cut
}

// message is a chat message or an item of a response, by its members.
type message struct {
	value []byte // all of it

	role, kind, name, content, reasoning, refusal, calls, callID, audio, tools []byte
	arguments, output, summary, encrypted                                      []byte
}

// read reads the list's next element, which need not be an object.
func (m *message) read(s *scanner, list *array) (ok bool) {
	*m = message{}
	members, ok := list.object()
	if !ok {
		m.value, ok = list.next(s)
		return ok
	}
	m.members(s, &members)
	m.value, list.i = members.value(), members.i
	return members.fault == None || members.fault == Cut
}

func (m *message) members(s *scanner, members *object) {
	var room [48]byte
	for {
		key, value, ok := members.next(s)
		if !ok {
			return
		}
		member := m.member(key)
		if member == nil {
			member = m.member(plain(key, &room))
		}
		if member != nil {
			*member = value
		}
	}
}

func (m *message) member(key []byte) *[]byte {
	switch string(key) {
	case "role":
		return &m.role
	case "type":
		return &m.kind
	case "name":
		return &m.name
	case "content":
		return &m.content
	case "reasoning", "reasoning_content":
		return &m.reasoning
	case "refusal":
		return &m.refusal
	case "tool_calls":
		return &m.calls
	case "tool_call_id", "call_id":
		return &m.callID
	case "audio":
		return &m.audio
	case "tools":
		return &m.tools
	case "arguments", "input", "action":
		return &m.arguments
	case "output":
		return &m.output
	case "summary":
		return &m.summary
	case "encrypted_content":
		return &m.encrypted
	}
	return nil
}

// message adds one message or item.
func (r *reader) message(m *message) {
	t, v := &r.text, m.value
	label := m.role
	if !isString(label) {
		label = m.kind
	}
	switch {
	case !isObject(v), m.role == nil && isString(m.kind) && !isItem(m.kind):
		t.tag(tagMessage)
		t.value(v)
		return
	case label == nil && cut(v):
		t.done = true // its role is yet to come
		return
	}
	t.tag(tagMessage)
	if isString(label) {
		t.string(label)
	}
	r.member(memberName, m.name)
	r.member(memberCallID, m.callID)
	r.member(memberEncrypted, m.encrypted)
	r.parts(memberSummary, m.summary)
	r.parts(memberReasoning, m.reasoning)
	r.content(m.content)
	r.member(memberRefusal, m.refusal)
	r.member(memberCalls, m.calls)
	r.member(memberArguments, m.arguments)
	r.parts(memberOutput, m.output)
	r.member(memberAudio, m.audio)
	r.member(memberTools, m.tools)
	t.stopAt(v)
}

// isItem reports whether an item of a response is of a kind whose members we know.
func isItem(kind []byte) bool {
	for _, known := range [...]string{
		"function_call", "function_call_output", "reasoning", "custom_tool_call", "custom_tool_call_output", "message",
	} {
		if is(kind, known) {
			return true
		}
	}
	return false
}

func (r *reader) role(role string) {
	r.text.tag(tagMessage)
	r.text.raw([]byte(role))
}

// member adds a member of a message unless it is null, an empty string or an empty list.
func (r *reader) member(number byte, v []byte) {
	if v != nil && !isBlank(v) {
		r.text.numbered(tagMember, number)
		r.text.value(v)
	}
}

// parts adds a member that may be a list of content parts.
func (r *reader) parts(number byte, v []byte) {
	if v != nil && !isBlank(v) {
		r.text.numbered(tagMember, number)
		r.content(v)
	}
}

func isBlank(v []byte) bool {
	return isNull(v) || string(v) == `"` && !cut(v) || isArray(v) && !cut(v) && first(v) == nil
}
