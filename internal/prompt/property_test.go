// SPDX-License-Identifier: Apache-2.0

package prompt

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"unicode/utf16"
)

// checkReference compares Read with the reference.
func checkReference(t *testing.T, api API, body []byte) {
	t.Helper()
	const seed = 7
	want, wantFault, err := referenceRead(api, body, seed)
	if err != nil {
		t.Fatalf("reference: %v", err)
	}
	var got Prompt
	if fault := got.Read(api, body, true, seed); fault != wantFault {
		t.Fatalf("%v: fault %v, reference says %v\n%s", api, fault, wantFault, body)
	}
	if diff := difference(got, want); diff != "" {
		t.Fatalf("%v: %s (got, reference)\n%.3000s", api, diff, body)
	}
}

func difference(a, b Prompt) string {
	if !slices.Equal(a.Chain, b.Chain) {
		same := 0
		for same < min(len(a.Chain), len(b.Chain)) && a.Chain[same] == b.Chain[same] {
			same++
		}
		return fmt.Sprintf("chains of %d and %d blocks part after %d", len(a.Chain), len(b.Chain), same)
	}
	a.Chain, b.Chain, a.long, b.long = nil, nil, nil, nil
	if x, y := fmt.Sprintf("%+v", a), fmt.Sprintf("%+v", b); x != y {
		return x + "\n" + y
	}
	return ""
}

// style writes a tree as JSON in one of the many ways there are.
type style struct {
	*rand.Rand
	spaced, escaped bool
}

func (s style) space() string {
	if !s.spaced {
		return ""
	}
	return []string{"", "", " ", "\n\t", "\r\n  "}[s.IntN(5)]
}

func (s style) quote(text string) string {
	var b strings.Builder
	b.WriteByte('"')
	for _, r := range text {
		switch {
		case s.escaped && s.IntN(3) == 0:
			for _, unit := range utf16.Encode([]rune{r}) {
				fmt.Fprintf(&b, []string{`\u%04x`, `\u%04X`}[s.IntN(2)], unit)
			}
		case s.escaped && r == '/':
			b.WriteString(`\/`)
		default:
			b.WriteString(canonicalString(string(r)))
		}
	}
	b.WriteByte('"')
	return b.String()
}

func (s style) write(n node) string {
	var parts []string
	for i, e := range n.list {
		part := s.space() + s.write(e) + s.space()
		if n.kind == 'o' {
			part = s.space() + s.quote(n.keys[i]) + s.space() + ":" + part
		}
		parts = append(parts, part)
	}
	switch n.kind {
	case 's':
		return s.quote(n.str)
	case 'o':
		return "{" + s.space() + strings.Join(parts, ",") + "}"
	case 'a':
		return "[" + s.space() + strings.Join(parts, ",") + "]"
	}
	return n.json()
}

// shuffled returns an object with its members in another order; of equal names, the last.
func (s style) shuffled(n node) node {
	out := node{kind: 'o'}
	for _, i := range s.Perm(len(n.keys)) {
		if !slices.Contains(out.keys, n.keys[i]) {
			out.keys = append(out.keys, n.keys[i])
			out.list = append(out.list, n.get(n.keys[i]))
		}
	}
	return out
}

// checkStyles rewrites a body in other styles and orders, and expects the same prompt.
func checkStyles(t *testing.T, api API, body []byte, random *rand.Rand) {
	t.Helper()
	root, err := decode(body)
	if err != nil || root.kind != 'o' {
		return
	}
	var want Prompt
	fault := want.Read(api, body, true, 7)
	for i := range 4 {
		s := style{Rand: random, spaced: i&1 != 0, escaped: i&2 != 0}
		other := []byte(s.write(s.shuffled(root)))
		var got Prompt
		if f := got.Read(api, other, true, 7); f != fault {
			t.Fatalf("%v: faults %v and %v\n%s\n%s", api, fault, f, body, other)
		}
		if diff := difference(got, want); diff != "" {
			t.Fatalf("%v: %s\n%s\n%s", api, diff, other, body)
		}
	}
}

// generator makes bodies at random: mostly of the right shape, sometimes not.
type generator struct{ *rand.Rand }

func (g generator) pick(list ...string) string { return list[g.IntN(len(list))] }

func (g generator) text() node {
	words := []string{"der ", "Ärger ", "a/b ", "\"quoted\" ", "line\n", "C:\\dir\\u00e9 ", "\\/", "漢字", "🙂", "\x01", "\t"}
	var b strings.Builder
	for range g.IntN(1 + g.IntN(120)) {
		b.WriteString(words[g.IntN(len(words))])
	}
	return node{kind: 's', str: b.String()}
}

func (g generator) ids() node {
	n := node{kind: 'a'}
	for range g.IntN(200) {
		n.list = append(n.list, node{kind: 'n', str: fmt.Sprint(g.IntN(150_000))})
	}
	if g.IntN(10) == 0 {
		n.list = append(n.list, node{kind: 'n', str: g.pick("-1", "4294967297", "1.5", "1e3", "99999999999999999999999", "true")})
	}
	return n
}

func (g generator) any(depth int) node {
	switch k := g.IntN(9); {
	case k < 3:
		return g.text()
	case k == 3:
		return node{kind: 'n', str: g.pick("0", "1.0", "-3e5", "true", "false", "12345678901234567890")}
	case k == 4:
		return node{}
	case k == 5:
		return g.ids()
	case depth == 0:
		return node{kind: 's', str: g.pick("user", "system", "text", "", "none")}
	case k == 6:
		return g.list(func() node { return g.any(depth - 1) })
	}
	return g.object(depth-1, "a", "content", "text", "type", "url", "cache_control", "data", "name")
}

func (g generator) list(element func() node) node {
	n := node{kind: 'a'}
	for range g.IntN(5) {
		n.list = append(n.list, element())
	}
	return n
}

func (g generator) object(depth int, keys ...string) node {
	n := node{kind: 'o'}
	for range g.IntN(5) {
		n.keys = append(n.keys, g.pick(keys...))
		n.list = append(n.list, g.any(depth))
	}
	return n
}

func (g generator) part() node {
	switch g.IntN(6) {
	case 0:
		return g.any(2)
	case 1, 2:
		return node{kind: 'o', keys: []string{"type", "text"}, list: []node{{kind: 's', str: g.pick("text", "input_text", "thinking")}, g.text()}}
	case 3:
		return node{kind: 'o', keys: []string{"type", "content", "tool_use_id"}, list: []node{{kind: 's', str: "tool_result"}, g.list(g.part), g.text()}}
	}
	return g.object(2, "type", "text", "image_url", "input_audio", "source", "uuid", "id", "name", "input", "content", "thinking")
}

func (g generator) content() node {
	if g.IntN(3) == 0 {
		return g.list(g.part)
	}
	return g.text()
}

func (g generator) message() node {
	if g.IntN(20) == 0 {
		return g.any(2)
	}
	n := g.object(2, "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content", "refusal", "type",
		"call_id", "arguments", "output", "summary", "audio", "unknown", "content")
	n.keys = append(n.keys, "content")
	n.list = append(n.list, g.content())
	if g.IntN(10) > 0 {
		n.keys = append(n.keys, "role")
		n.list = append(n.list, node{kind: 's', str: g.pick("system", "user", "user", "assistant", "tool", "developer")})
	}
	return n
}

func (g generator) body() node {
	n := g.object(2, "model", "cache_salt", "chat_template", "chat_template_kwargs", "reasoning_effort", "reasoning",
		"response_format", "tools", "tool_choice", "documents", "system", "instructions", "stream", "priority", "max_tokens",
		"max_output_tokens", "service_tier", "previous_response_id", "prompt_embeds", "features", "temperature", "metadata",
		"prompt", "input", "messages", "text_2", "query", "queries", "token_ids", "items", "data", "texts")
	add := func(key string, value node) {
		n.keys, n.list = append(n.keys, key), append(n.list, value)
	}
	switch g.IntN(6) {
	case 0, 1:
		add("messages", g.list(g.message))
	case 2:
		add("input", g.list(g.message))
	case 3:
		add(g.pick("prompt", "input", "token_ids", "query"), g.ids())
	case 4:
		add(g.pick("prompt", "input", "query", "documents", "text_1", "queries", "texts"), g.list(func() node {
			if g.IntN(2) == 0 {
				return g.ids()
			}
			return g.text()
		}))
	case 5:
		add("messages", g.list(func() node { return g.list(g.message) }))
	}
	if g.IntN(2) == 0 {
		add("tools", g.list(func() node { return g.object(3, "type", "function", "cache_control", "name") }))
	}
	return n
}

func TestReadEqualsReference(t *testing.T) {
	for i := range uint64(400) {
		random := rand.New(rand.NewPCG(i, 1))
		g := generator{random}
		body := []byte(style{Rand: random, spaced: i&1 != 0, escaped: i&2 != 0}.write(g.body()))
		for api := range apiCount {
			checkReference(t, api, body)
		}
		checkStyles(t, API(random.IntN(int(apiCount))), body, random)
	}
}

// TestCutFollowsWhole reads every beginning of bodies in the order clients send: the chain is a
// beginning of the whole body's chain.
func TestCutFollowsWhole(t *testing.T) {
	for i := range uint64(20) {
		random := rand.New(rand.NewPCG(i, 2))
		g := generator{random}
		messages := node{kind: 'a'}
		for _, role := range []string{"system", "user", "assistant", "user"} {
			messages.list = append(messages.list, node{
				kind: 'o', keys: []string{"role", "content"}, list: []node{{kind: 's', str: role}, g.text()},
			})
		}
		root := node{kind: 'o', keys: []string{"model", "messages", "stream"}, list: []node{{kind: 's', str: "m"}, messages, {kind: 'n', str: "true"}}}
		body := []byte(style{Rand: random, spaced: i&1 != 0, escaped: i&2 != 0}.write(root))
		var whole, part Prompt
		if fault := whole.Read(Chat, body, true, 7); fault != None {
			t.Fatal(fault)
		}
		for n := range body {
			fault := part.Read(Chat, bytes.Clone(body[:n]), false, 7)
			if fault != None {
				continue
			}
			if !part.Truncated {
				t.Fatalf("cut at %d of %d: not marked as truncated", n, len(body))
			}
			if len(part.Chain) > len(whole.Chain) || !slices.Equal(part.Chain, whole.Chain[:len(part.Chain)]) {
				t.Fatalf("cut at %d: chain of %d blocks is no beginning\n%s", n, len(part.Chain), body[:n])
			}
			if fault := new(Prompt).Read(Chat, body[:n], true, 7); fault != Cut {
				t.Fatalf("cut at %d: fault %v, want %v", n, fault, Cut)
			}
		}
		if short := len(whole.Chain) - len(part.Chain); short > 0 {
			t.Fatalf("all but the last byte gives %d blocks less", short)
		}
	}
}

func FuzzRead(f *testing.F) {
	for _, seed := range []string{
		`{"model":"m","messages":[{"role":"user","content":"hi"}]}`,
		`{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,AA\/\/"}}]}]}`,
		`{"prompt":[1,2,3],"prompt":"\ud83d\ude00\u00e9"}`, `{"prompt":[[1,-2],[3.5]]}`, `{"input":["a","b"],"tools":[{"cache_control":1,"a":[]}]}`,
		`{"query":"q","documents":["d",{"content":"x"}]}`, `{"messages":[[{"role":"user","content":"a"}],[]]}`,
		`{"input":[{"type":"function_call","name":"f","arguments":"{}"}],"instructions":"i"}`, "\xEF\xBB\xBF{}", `{"a":"\`, `[[[[`, `{"messages":[{`,
	} {
		f.Add(uint8(Chat), []byte(seed))
		f.Add(uint8(Tokenize), []byte(seed))
		f.Add(uint8(Completions), []byte(seed))
	}
	f.Fuzz(func(t *testing.T, apiNumber uint8, body []byte) {
		api := API(apiNumber) % apiCount
		var p Prompt
		if fault := p.Read(api, body, true, 7); fault != None && len(p.Chain) > 0 {
			t.Fatalf("fault %v with a chain", fault)
		}
		p.Read(api, body[:len(body)/2], false, 7)
		if fault := p.Read(api, body, true, 7); decodesAlike(body) && fault != TooDeep {
			checkReference(t, api, body)
			checkStyles(t, api, body, rand.New(rand.NewPCG(uint64(len(body)), 3)))
		}
	})
}
