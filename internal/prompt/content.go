// SPDX-License-Identifier: Apache-2.0

package prompt

// content adds a message's content: a string, or parts. A string and one part with the same text are
// the same, as they are for templates.
func (r *reader) content(v []byte) {
	if !isArray(v) {
		r.value(v)
		return
	}
	parts := walkArray(v)
	var p part
	for parts.more() && p.read(&r.scanner, &parts) {
		r.part(&p)
	}
	r.text.stopAt(v)
}

// value adds content that is no list.
func (r *reader) value(v []byte) {
	if !isBlank(v) {
		r.text.value(v)
	}
}

// system adds Anthropic's system field without the blocks in which a client reports its billing: they
// change with every request, and the engine drops them, too.
func (r *reader) system(v []byte) {
	if !isArray(v) {
		r.content(v)
		return
	}
	blocks := walkArray(v)
	var p part
	for blocks.more() && p.read(&r.scanner, &blocks) {
		if !startsWith(p.text, "x-anthropic-billing-header") {
			r.part(&p)
		}
	}
	r.text.stopAt(v)
}

// part is a content part, by its members.
type part struct {
	value []byte // all of it

	kind, text, media, uuid, id, name, input, content []byte
}

// read reads the list's next element, which need not be an object.
func (p *part) read(s *scanner, list *array) (ok bool) {
	*p = part{}
	members, ok := list.object()
	if !ok {
		p.value, ok = list.next(s)
		return ok
	}
	p.members(s, &members)
	p.value, list.i = members.value(), members.i
	return members.fault == None || members.fault == Cut
}

func (p *part) members(s *scanner, members *object) {
	var room [48]byte
	for {
		key, value, ok := members.next(s)
		if !ok {
			return
		}
		member := p.member(key)
		if member == nil {
			member = p.member(plain(key, &room))
		}
		if member != nil {
			*member = value
		}
	}
}

func (p *part) member(key []byte) *[]byte {
	switch string(key) {
	case "type":
		return &p.kind
	case "text", "thinking", "refusal":
		return &p.text
	case "image_url", "input_audio", "audio_url", "video_url", "image_pil", "image_embeds",
		"audio_embeds", "source", "file", "file_id", "file_data":
		return &p.media
	case "uuid":
		return &p.uuid
	case "id", "tool_use_id":
		return &p.id
	case "name":
		return &p.name
	case "input":
		return &p.input
	case "content":
		return &p.content
	}
	return nil
}

// part adds one content part. A tool's result has parts of its own, and those have none.
func (r *reader) part(p *part) {
	if !is(p.kind, "tool_result") {
		r.leaf(p)
		return
	}
	r.text.numbered(tagMember, memberToolResult)
	r.member(memberCallID, p.id)
	if !isArray(p.content) {
		r.value(p.content)
		r.text.stopAt(p.value)
		return
	}
	parts := walkArray(p.content)
	var inner part
	for parts.more() && inner.read(&r.scanner, &parts) {
		r.leaf(&inner)
	}
	r.text.stopAt(p.value)
}

// leaf adds a content part without parts. Its cache marker, citations and signature are not prompt.
func (r *reader) leaf(p *part) {
	t, v := &r.text, p.value
	switch {
	case !isObject(v):
		r.value(v)
	case is(p.kind, "tool_use"), is(p.kind, "server_tool_use"):
		t.numbered(tagMember, memberToolUse)
		r.member(memberCallID, p.id)
		r.member(memberName, p.name)
		r.member(memberArguments, p.input)
	case is(p.kind, "thinking"), is(p.kind, "reasoning_text"):
		r.member(memberReasoning, p.text)
	case is(p.kind, "refusal"):
		r.member(memberRefusal, p.text)
	case isString(p.text):
		r.value(p.text)
	case !isNull(p.uuid) && !cut(v):
		t.media(p.uuid) // the engine, too, takes it for the content
	case !isNull(p.media):
		r.media(p.media)
	case cut(v):
	default:
		t.value(v)
	}
	t.stopAt(v)
}

// media adds an image, audio or video by the string that identifies it: its URL, which may hold it, or
// its data. OpenAI's wrapper object around the URL makes no difference.
func (r *reader) media(v []byte) {
	if !isObject(v) || cut(v) {
		r.text.media(v)
		return
	}
	members := walkObject(v, 0)
	var room [48]byte
	content := v
	for {
		key, value, ok := members.next(&r.scanner)
		if !ok {
			break
		}
		switch string(plain(key, &room)) {
		case "url", "data", "file_id", "file_data":
			content = value
		}
	}
	r.text.media(content)
}
