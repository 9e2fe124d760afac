// SPDX-License-Identifier: Apache-2.0

package prompt

// maxParts bounds how deep content may hold content; engines know one level, a tool's result.
const maxParts = 3

// content adds a message's content: a string, or parts. A string and one part with the same text are
// the same, as they are for templates.
func (r *reader) content(v []byte, depth int) {
	switch {
	case isBlank(v):
	case isArray(v) && depth < maxParts:
		parts := r.walkArray(v)
		var p part
		for parts.more() && p.read(&parts) {
			r.part(&p, depth)
		}
		r.text.stopAt(v)
	default:
		r.text.value(v)
	}
}

// system adds Anthropic's system field without the blocks in which a client reports its billing: they
// change with every request, and the engine drops them, too.
func (r *reader) system(v []byte) {
	if !isArray(v) {
		r.content(v, 0)
		return
	}
	blocks := r.walkArray(v)
	var p part
	for blocks.more() && p.read(&blocks) {
		if !startsWith(p.text, "x-anthropic-billing-header") {
			r.part(&p, 0)
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
func (p *part) read(list *array) (ok bool) {
	*p = part{}
	members, ok := list.object()
	if !ok {
		p.value, ok = list.next()
		return ok
	}
	p.members(&members)
	p.value, list.i = members.value(), members.i
	return members.fault == None || members.fault == Cut
}

func (p *part) members(members *object) {
	var room [48]byte
	for {
		key, value, ok := members.next()
		if !ok {
			return
		}
		switch string(plain(key, &room)) {
		case "type":
			p.kind = value
		case "text", "thinking", "refusal":
			p.text = value
		case "image_url", "input_audio", "audio_url", "video_url", "image_pil", "image_embeds",
			"audio_embeds", "source", "file", "file_id", "file_data":
			p.media = value
		case "uuid":
			p.uuid = value
		case "id", "tool_use_id":
			p.id = value
		case "name":
			p.name = value
		case "input":
			p.input = value
		case "content":
			p.content = value
		}
	}
}

// part adds one content part. Its cache marker, citations and signature are no part of the prompt.
func (r *reader) part(p *part, depth int) {
	t, v := &r.text, p.value
	if !isObject(v) {
		r.content(v, maxParts)
		return
	}
	switch {
	case is(p.kind, "tool_use"), is(p.kind, "server_tool_use"):
		t.tag(tagMember, memberToolUse)
		r.member(memberCallID, p.id)
		r.member(memberName, p.name)
		r.member(memberArguments, p.input)
	case is(p.kind, "tool_result"):
		t.tag(tagMember, memberToolResult)
		r.member(memberCallID, p.id)
		r.content(p.content, depth+1)
	case is(p.kind, "thinking"), is(p.kind, "reasoning_text"):
		r.member(memberReasoning, p.text)
	case is(p.kind, "refusal"):
		r.member(memberRefusal, p.text)
	case isString(p.text):
		r.content(p.text, maxParts)
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
	members := r.walkObject(v, 0)
	var room [48]byte
	content := v
	for {
		key, value, ok := members.next()
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
