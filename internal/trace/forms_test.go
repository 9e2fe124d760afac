// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"bytes"
	"encoding/json"
	"math"
	"slices"
	"strings"
	"testing"
)

// checkForms checks what holds for both forms of every request.
func checkForms(t testing.TB, r *Request) {
	t.Helper()
	const blockTokens = 16
	full := r.InputTokens / blockTokens
	if got := len(r.AppendBlocks(nil, blockTokens)); got != full && got != max(0, r.InputTokens-1)/blockTokens {
		t.Fatalf("%d blocks for %d tokens", got, r.InputTokens)
	}
	body, err := r.AppendBody([]byte("kept"), "a model")
	if err != nil {
		t.Fatal(err)
	}
	body, kept := bytes.CutPrefix(body, []byte("kept"))
	if !kept {
		t.Fatal("what was in the buffer is lost")
	}
	var members map[string]any
	if err := json.Unmarshal(body, &members); err != nil {
		t.Fatalf("body is no JSON object: %v: %.200q", err, body)
	}
	if members["model"] != "a model" {
		t.Fatalf("body is for model %v", members["model"])
	}
}

func common[E comparable](a, b []E) int {
	n := 0
	for n < len(a) && n < len(b) && a[n] == b[n] {
		n++
	}
	return n
}

func TestFormsOfTraces(t *testing.T) {
	for _, path := range []string{"testdata/mooncake.jsonl", "testdata/agents"} {
		for _, r := range collect(t, open(t, path).Requests()) {
			checkForms(t, &r)
		}
	}
}

// contentOf returns the text of a body with a single user message.
func contentOf(t *testing.T, r *Request) string {
	t.Helper()
	body, err := r.AppendBody(nil, "m")
	if err != nil {
		t.Fatal(err)
	}
	var chat struct {
		Messages []struct{ Role, Content string }
	}
	if err := json.Unmarshal(body, &chat); err != nil {
		t.Fatal(err)
	}
	if len(chat.Messages) != 1 || chat.Messages[0].Role != "user" {
		t.Fatalf("messages are %.200v", chat.Messages)
	}
	return chat.Messages[0].Content
}

func TestBothFormsShareTheSamePrefix(t *testing.T) {
	requests := collect(t, open(t, "testdata/mooncake.jsonl").Requests())
	texts := make([]string, len(requests))
	for i, r := range requests {
		text := contentOf(t, &r)
		texts[i] = text
		if len(text) != r.InputTokens*BytesPerToken {
			t.Fatalf("request %d: %d bytes for %d tokens", i, len(text), r.InputTokens)
		}
		for _, blockTokens := range []int{1, 16, 24, 512, 800} {
			blocks := r.AppendBlocks(nil, blockTokens)
			if len(blocks) != r.InputTokens/blockTokens {
				t.Fatalf("request %d: %d blocks of %d for %d tokens", i, len(blocks), blockTokens, r.InputTokens)
			}
			for j := max(0, i-3); j < i; j++ {
				other := requests[j]
				ids := common(r.HashIDs, other.HashIDs)
				shared := min(ids*idTokens, r.InputTokens, other.InputTokens)
				if got := common(blocks, other.AppendBlocks(nil, blockTokens)); got != shared/blockTokens {
					t.Errorf("request %d shares %d blocks of %d, want %d", i, got, blockTokens, shared/blockTokens)
				}
				bytes := common([]byte(text), []byte(texts[j]))
				if least := shared * BytesPerToken; bytes < least || bytes >= least+idWords*BytesPerToken {
					t.Errorf("request %d shares %d bytes, want %d and at most %d more", i, bytes, least, idWords*BytesPerToken)
				}
			}
		}
	}
}

func TestBlocksAreChained(t *testing.T) {
	a := Request{InputTokens: 1100, HashIDs: []uint64{1, 2, 3}}
	b := Request{InputTokens: 1100, HashIDs: []uint64{9, 2, 3}}
	if n := common(slices.Sorted(slices.Values(a.AppendBlocks(nil, 16))), slices.Sorted(slices.Values(b.AppendBlocks(nil, 16)))); n != 0 {
		t.Errorf("prompts that differ at the start share %d blocks", n)
	}
	repeated := Request{Text: strings.Repeat("0123456789abcdef", 8), InputTokens: 32}
	blocks := repeated.AppendBlocks(nil, 4)
	if distinct := slices.Compact(slices.Sorted(slices.Values(blocks))); len(distinct) != 8 {
		t.Errorf("%d distinct blocks in a repeated text, want 8", len(distinct))
	}
	if got := repeated.AppendBlocks(nil, 0); got != nil {
		t.Errorf("blocks of no tokens: %v", got)
	}
}

// TestTextBlocksDoNotDependOnPieces compares prompts that reach the chain in
// pieces with the same bytes in one.
func TestTextBlocksDoNotDependOnPieces(t *testing.T) {
	text := []byte(strings.Repeat("some prompt text ", 50))
	for _, size := range []int{1, 3, 16, 64, 100, len(text)} {
		var whole, pieces textChain
		whole.blockBytes, pieces.blockBytes = 64, 64
		whole.write(text)
		for piece := range slices.Chunk(text, size) {
			pieces.write(piece)
		}
		if !slices.Equal(whole.blocks, pieces.blocks) || len(whole.blocks) != len(text)/64 {
			t.Errorf("pieces of %d bytes: %d blocks, want %d equal ones", size, len(pieces.blocks), len(whole.blocks))
		}
	}
}

func TestIDText(t *testing.T) {
	seen := make(map[string]uint64)
	for _, id := range []uint64{0, 1, 2, 63, 64, 65, 1 << 20, 1 << 59, 1 << 63, math.MaxUint64, math.MaxUint64 - 1} {
		text := string(appendIDText(nil, id, idTokens))
		if len(text) != 2048 {
			t.Errorf("id %d: %d bytes, want 2048", id, len(text))
		}
		if i := strings.IndexFunc(text, func(c rune) bool { return c != ' ' && (c < 'a' || c > 'z') }); i >= 0 {
			t.Errorf("id %d: %q at %d needs care in JSON", id, text[i], i)
		}
		head := text[:idWords*BytesPerToken]
		if other, taken := seen[head]; taken {
			t.Errorf("ids %d and %d begin alike", id, other)
		}
		seen[head] = id
		for _, tokens := range []int{0, 1, 10, 11, 12, 21, 22, 511} {
			if got := string(appendIDText(nil, id, tokens)); got != text[:tokens*BytesPerToken] {
				t.Errorf("id %d: %d tokens are not the head of the whole", id, tokens)
			}
		}
	}
	list := strings.Fields(words)
	slices.Sort(list)
	if len(words) != 64*BytesPerToken || len(slices.Compact(list)) != 64 {
		t.Errorf("%d words in %d bytes, want 64 different ones", len(list), len(words))
	}
}

func TestAppendBody(t *testing.T) {
	for name, tc := range map[string]struct {
		request     Request
		model, want string
	}{
		"ids": {
			Request{InputTokens: 2, OutputTokens: 0, HashIDs: []uint64{1}}, "m",
			`{"model":"m","messages":[{"role":"user","content":"and the "}],"max_tokens":1,"temperature":0,"ignore_eos":true,"stream":true,"stream_options":{"include_usage":true}}`,
		},
		"text": {
			Request{Text: "say \"<hi>\"\n&\u2028", OutputTokens: 5}, `a"b`,
			`{"model":"a\"b","messages":[{"role":"user","content":"say \"<hi>\"\n&\u2028"}],"max_tokens":5,"temperature":0,"ignore_eos":true,"stream":true,"stream_options":{"include_usage":true}}`,
		},
		"messages": {
			Request{Messages: []byte(`[{"role":"user"}]`), OutputTokens: 5}, "m",
			`{"model":"m","messages":[{"role":"user"}],"max_tokens":5,"temperature":0,"ignore_eos":true,"stream":true,"stream_options":{"include_usage":true}}`,
		},
		"logged": {
			Request{Path: chatPath, RawBody: []byte(`{"model":"old","stream":false,"z": 1.0,"messages":[ {"a<b":1} ],"stream_options":null}`)}, "new",
			`{"model":"new","z":1.0,"messages":[ {"a<b":1} ],"stream":true,"stream_options":{"include_usage":true}}`,
		},
		"logged, model kept": {
			Request{Path: "/pre/v1/completions", RawBody: []byte(`{"prompt":"x","model":"old"}`)}, "",
			`{"prompt":"x","model":"old","stream":true,"stream_options":{"include_usage":true}}`,
		},
		"logged, other API": {
			Request{Path: "/v1/messages", RawBody: []byte(`{"stream":false,"messages":[]}`)}, "m",
			`{"model":"m","stream":false,"messages":[]}`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := tc.request.AppendBody(nil, tc.model)
			if err != nil {
				t.Fatal(err)
			}
			if string(got) != tc.want {
				t.Errorf("got  %s\nwant %s", got, tc.want)
			}
		})
	}
	for _, bad := range []string{"[]", "7", `{"a":`, `{"a":1`} {
		r := Request{Path: chatPath, RawBody: []byte(bad)}
		if got, err := r.AppendBody(nil, "m"); err == nil {
			t.Errorf("body %s is taken, giving %s", bad, got)
		}
	}
}

// TestGrowingChatSharesAllBlocks: the blocks of one turn are the first of the
// next, but for the last, which holds the end of the array.
func TestGrowingChatSharesAllBlocks(t *testing.T) {
	long := strings.Repeat("x", 1000)
	one := Request{RawBody: []byte(`{"messages":[{"role":"user","content":"` + long + `"}]}`)}
	two := Request{RawBody: []byte(`{"temperature":1,"messages":[{"role":"user","content":"` + long + `"},{"role":"assistant","content":"y"}]}`)}
	first, second := one.AppendBlocks(nil, 16), two.AppendBlocks(nil, 16)
	if got := common(first, second); got < len(first)-1 || len(first) != 16 {
		t.Errorf("the second turn shares %d of %d blocks", got, len(first))
	}
}
