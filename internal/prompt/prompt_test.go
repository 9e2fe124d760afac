// SPDX-License-Identifier: Apache-2.0

package prompt

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

// long stands for LONG in the tables: text of several blocks.
var long = strings.Repeat("All happy families are alike. ", 40)

func read(t *testing.T, api API, body string) Prompt {
	t.Helper()
	var p Prompt
	body = strings.ReplaceAll(body, "LONG", long)
	if fault := p.Read(api, []byte(body), true, 1); fault != None {
		t.Fatalf("%v: fault %v\n%.300s", api, fault, body)
	}
	return p
}

func samePrompt(a, b Prompt) bool {
	return slices.Equal(a.Chain, b.Chain) && a.TurnKey == b.TurnKey && a.Bytes == b.Bytes
}

func TestSamePrompt(t *testing.T) {
	const chat = `{"model":"m","messages":[{"role":"user","content":"LONG"}]}`
	for _, test := range []struct {
		name string
		api  API
		a, b string
	}{
		{"order of fields", Chat, chat, `{"messages":[{"content":"LONG","role":"user"}],"model":"m"}`},
		{"white space", Chat, chat, "\n{ \"model\" :\t\"m\" , \"messages\" : [ { \"role\":\"user\" ,\r\n\"content\" : \"LONG\" } ] } "},
		{"byte order mark", Chat, chat, "\xEF\xBB\xBF" + chat},
		{"escaped keys", Chat, chat, `{"mod\u0065l":"m","m\u0065ssages":[{"rol\u0065":"us\u0065r","\u0063ontent":"LONG"}]}`},
		{"escaped letters", Completions, `{"prompt":"é/\n\"\\LONG"}`, `{"prompt":"\u00E9\/\u000a\u0022\u005cLONG"}`},
		{"surrogate pairs", Completions, `{"prompt":"🙂LONG"}`, `{"prompt":"\ud83d\uDE42LONG"}`},
		{"unpaired surrogates", Completions, `{"prompt":"\uD83Dx\udc00LONG"}`, `{"prompt":"\ud83dx\uDC00LONG"}`},
		{"control characters", Completions, `{"prompt":"\u001F\u0008LONG"}`, `{"prompt":"\u001f\bLONG"}`},
		{"escapes over blocks", Completions, `{"prompt":"LONG` + strings.Repeat(`/é`, 300) + `LONG"}`,
			`{"prompt":"LONG` + strings.Repeat(`\/\u00e9`, 300) + `LONG"}`},
		{"the last of equal keys", Chat, chat, `{"model":"x","messages":[],"model":"m","messages":[{"role":"system","content":"x","role":"user","content":"LONG"}]}`},
		{"text part", Chat, chat, `{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"LONG"}]}]}`},
		{"text part without type", Chat, chat, `{"model":"m","messages":[{"role":"user","content":[{"text":"LONG"}]}]}`},
		{"cache markers", Messages, `{"system":"LONG","messages":[{"role":"user","content":"LONG"}],"tools":[{"name":"f"}]}`,
			`{"system":[{"type":"text","text":"LONG","cache_control":{"type":"ephemeral"}}],
			"messages":[{"role":"user","content":[{"cache_control":{},"type":"text","text":"LONG"}]}],
			"tools":[{"name":"f","cache_control":{"type":"ephemeral"}}]}`},
		{"billing header", Messages, `{"system":[{"type":"text","text":"LONG"}],"messages":[{"role":"user","content":"x"}]}`,
			`{"system":[{"type":"text","text":"x-anthropic-billing-header: cch=1"},{"type":"text","text":"LONG"}],"messages":[{"role":"user","content":"x"}]}`},
		{"no content", Chat, `{"messages":[{"role":"assistant","content":null,"tool_calls":[{"id":"1"}]},{"role":"user","content":"LONG"}]}`,
			`{"messages":[{"role":"assistant","content":"","tool_calls":[ { "id" : "1" } ],"name":null},{"role":"user","content":"LONG"}]}`},
		{"tools before or after messages", Chat, `{"tools":[{"type":"function"}],"messages":[{"role":"system","content":"LONG"},{"role":"user","content":"x"}]}`,
			`{"messages":[{"role":"system","content":"LONG"},{"role":"user","content":"x"}],"tools":[{"type":"function"}]}`},
		{"no tools", Chat, chat, `{"model":"m","tools":[],"documents":[],"messages":[{"role":"user","content":"LONG"}]}`},
		{"white space in tools", Chat, `{"tools":[{"a":{"b":[1,"x y"]}}],"messages":[{"role":"user","content":"LONG"}]}`,
			`{"tools": [ {"a": {"b": [1, "x y"]} } ], "messages":[{"role":"user","content":"LONG"}]}`},
		{"what is not in the prompt", Chat, chat, `{"model":"m","messages":[{"role":"user","content":"LONG"}],"temperature":0.5,"n":2,"stop":["x"],
			"user":"u","seed":1,"stream":true,"priority":3,"max_tokens":5,"metadata":{"a":1},"prompt_cache_key":"k","request_id":"r",
			"session_id":"s","vllm_xargs":{},"kv_transfer_params":{},"logprobs":true,"tool_choice":"auto","add_generation_prompt":false,
			"continue_final_message":true,"service_tier":"flex","stream_options":{},"parallel_tool_calls":true,"unknown":{"model":"x"}}`},
		{"null", Chat, chat, `{"model":"m","cache_salt":null,"tools":null,"documents":null,"messages":[{"role":"user","content":"LONG"}]}`},
		{"image wrappers", Chat, `{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"http://a/b.png","detail":"low"}}]}]}`,
			`{"messages":[{"role":"user","content":[{"type":"input_image","image_url":"http:\/\/a\/b.png"}]}]}`},
		{"image uuid", Chat, `{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:a"},"uuid":"1"}]}]}`,
			`{"messages":[{"role":"user","content":[{"type":"image_url","image_url":null,"uuid":"1"}]}]}`},
		{"thinking signature", Messages, `{"messages":[{"role":"assistant","content":[{"type":"thinking","thinking":"LONG","signature":"a"}]}]}`,
			`{"messages":[{"role":"assistant","content":[{"type":"thinking","thinking":"LONG"}]}]}`},
		{"reasoning names", Chat, `{"messages":[{"role":"assistant","reasoning":"LONG","content":"x"}]}`,
			`{"messages":[{"role":"assistant","content":"x","reasoning_content":"LONG"}]}`},
		{"list of one", Completions, `{"prompt":"LONG"}`, `{"prompt":["LONG"]}`},
		{"list of one list", Completions, `{"prompt":[1,2,3]}`, `{"prompt":[ [ 1 , 2 , 3 ] ]}`},
		{"ids modulo 2³²", Completions, `{"prompt":[1,4294967295]}`, `{"prompt":[4294967297,-1]}`},
		{"input as message", Responses, `{"input":"LONG"}`, `{"input":[{"type":"message","role":"user","content":[{"type":"input_text","text":"LONG"}]}]}`},
		{"ids of items", Responses, `{"input":[{"type":"function_call","id":"1","status":"done","call_id":"c","name":"f","arguments":"LONG"}]}`,
			`{"input":[{"type":"function_call","call_id":"c","name":"f","arguments":"LONG"}]}`},
		{"only the first of a batch", Chat, `{"messages":[[{"role":"user","content":"LONG"}],[{"role":"user","content":"x"}]]}`,
			`{"messages":[{"role":"user","content":"LONG"}]}`},
		{"query first", Rerank, `{"query":"LONG","documents":["a","b"]}`, `{"documents":[],"query":"LONG"}`},
	} {
		t.Run(test.name, func(t *testing.T) {
			if !samePrompt(read(t, test.api, test.a), read(t, test.api, test.b)) {
				t.Errorf("different prompts:\n%s\n%s", test.a, test.b)
			}
		})
	}
}

func TestDifferentPrompt(t *testing.T) {
	const user = `"messages":[{"role":"user","content":"LONG"}]}`
	for _, test := range []struct {
		name string
		api  API
		a, b string
	}{
		{"model", Chat, `{"model":"a",` + user, `{"model":"b",` + user},
		{"cache_salt", Chat, `{"cache_salt":"a",` + user, `{"cache_salt":"b",` + user},
		{"salt is no model", Chat, `{"cache_salt":"a",` + user, `{"model":"a",` + user},
		{"chat_template", Chat, `{"chat_template":"a",` + user, `{` + user},
		{"chat_template_kwargs", Chat, `{"chat_template_kwargs":{"enable_thinking":true},` + user, `{"chat_template_kwargs":{"enable_thinking":false},` + user},
		{"reasoning_effort", Chat, `{"reasoning_effort":"low",` + user, `{"reasoning_effort":"high",` + user},
		{"reasoning", Responses, `{"reasoning":{"effort":"low"},"input":"LONG"}`, `{"reasoning":{"effort":"high"},"input":"LONG"}`},
		{"response_format", Chat, `{"response_format":{"type":"text"},` + user, `{` + user},
		{"truncate_prompt_tokens", Chat, `{"truncate_prompt_tokens":5,` + user, `{"truncate_prompt_tokens":6,` + user},
		{"truncation_side", Chat, `{"truncation_side":"left",` + user, `{"truncation_side":"right",` + user},
		{"mm_processor_kwargs", Chat, `{"mm_processor_kwargs":{"fps":1},` + user, `{"mm_processor_kwargs":{"fps":2},` + user},
		{"add_special_tokens", Completions, `{"add_special_tokens":true,"prompt":"LONG"}`, `{"add_special_tokens":false,"prompt":"LONG"}`},
		{"tool_choice none", Chat, `{"tool_choice":"none",` + user, `{"tool_choice":"auto",` + user},
		{"tools", Chat, `{"tools":[{"name":"f"}],` + user, `{"tools":[{"name":"g"}],` + user},
		{"order in tools", Chat, `{"tools":[{"a":{"x":1,"y":2}}],` + user, `{"tools":[{"a":{"y":2,"x":1}}],` + user},
		{"documents", Chat, `{"documents":[{"text":"a"}],` + user, `{` + user},
		{"system", Messages, `{"system":"a",` + user, `{"system":"b",` + user},
		{"instructions", Responses, `{"instructions":"a","input":"LONG"}`, `{"input":"LONG"}`},
		{"previous response", Responses, `{"previous_response_id":"a","input":"LONG"}`, `{"previous_response_id":"b","input":"LONG"}`},
		{"role", Chat, `{"messages":[{"role":"user","content":"LONG"}]}`, `{"messages":[{"role":"assistant","content":"LONG"}]}`},
		{"name", Chat, `{"messages":[{"role":"user","name":"a","content":"LONG"}]}`, `{"messages":[{"role":"user","name":"b","content":"LONG"}]}`},
		{"one message or two", Chat, `{"messages":[{"role":"user","content":"ab"}]}`, `{"messages":[{"role":"user","content":"a"},{"role":"user","content":"b"}]}`},
		{"where parts end", Chat, `{"messages":[{"role":"user","content":[{"text":"ab"},{"text":"c"}]}]}`, `{"messages":[{"role":"user","content":[{"text":"a"},{"text":"bc"}]}]}`},
		{"where role ends", Chat, `{"messages":[{"role":"usera","content":"b"}]}`, `{"messages":[{"role":"user","content":"ab"}]}`},
		{"tool_calls", Chat, `{"messages":[{"role":"assistant","tool_calls":[{"id":"1"}]}]}`, `{"messages":[{"role":"assistant","tool_calls":[{"id":"2"}]}]}`},
		{"tool_call_id", Chat, `{"messages":[{"role":"tool","tool_call_id":"1"}]}`, `{"messages":[{"role":"tool","tool_call_id":"2"}]}`},
		{"reasoning or content", Chat, `{"messages":[{"role":"assistant","reasoning":"x"}]}`, `{"messages":[{"role":"assistant","content":"x"}]}`},
		{"tool_use input", Messages, `{"messages":[{"role":"assistant","content":[{"type":"tool_use","id":"1","name":"f","input":{"a":1}}]}]}`,
			`{"messages":[{"role":"assistant","content":[{"type":"tool_use","id":"1","name":"f","input":{"a":2}}]}]}`},
		{"tool_result", Messages, `{"messages":[{"role":"user","content":[{"type":"tool_result","tool_use_id":"1","content":"a"}]}]}`,
			`{"messages":[{"role":"user","content":[{"type":"tool_result","tool_use_id":"1","content":[{"type":"text","text":"b"}]}]}]}`},
		{"items we do not know", Responses, `{"input":[{"type":"web_search_call","action":{"query":"a"},"x":1}]}`, `{"input":[{"type":"web_search_call","action":{"query":"a"},"x":2}]}`},
		{"function output", Responses, `{"input":[{"type":"function_call_output","call_id":"1","output":"a"}]}`, `{"input":[{"type":"function_call_output","call_id":"1","output":"b"}]}`},
		{"image", Chat, `{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,AAAA"}}]}]}`,
			`{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,AAAB"}}]}]}`},
		{"image source", Messages, `{"messages":[{"role":"user","content":[{"type":"image","source":{"type":"base64","media_type":"image/png","data":"AA"}}]}]}`,
			`{"messages":[{"role":"user","content":[{"type":"image","source":{"type":"base64","media_type":"image/png","data":"AB"}}]}]}`},
		{"audio", Chat, `{"messages":[{"role":"user","content":[{"type":"input_audio","input_audio":{"data":"AA","format":"wav"}}]}]}`,
			`{"messages":[{"role":"user","content":[{"type":"input_audio","input_audio":{"data":"AB","format":"wav"}}]}]}`},
		{"text or ids", Completions, `{"prompt":"\u0001\u0000\u0000\u0000"}`, `{"prompt":[1]}`},
		{"text or ids again", Completions, `{"prompt":"` + strings.Repeat("a", 512) + `"}`, `{"prompt":[` + strings.Repeat("1633771873,", 127) + `1633771873]}`},
		{"ids", Completions, `{"prompt":[1,2,3]}`, `{"prompt":[1,23]}`},
		{"embeds", Completions, `{"prompt_embeds":"AA"}`, `{"prompt_embeds":"AB"}`},
		{"backslash or escape", Completions, `{"prompt":"\\u00e9"}`, `{"prompt":"\u00e9"}`},
		{"backslash or slash", Completions, `{"prompt":"\\/"}`, `{"prompt":"\/"}`},
		{"three backslashes", Completions, `{"prompt":"\\\u0061"}`, `{"prompt":"\\\\u0061"}`},
		{"a field within a string", Chat, `{"messages":[{"role":"user","content":"\",\"model\":\"x"}]}`, `{"model":"x","messages":[{"role":"user","content":""}]}`},
		{"string or object", Chat, `{"chat_template_kwargs":"{}",` + user, `{"chat_template_kwargs":{},` + user},
		{"query", Score, `{"queries":["a"],"documents":["b"]}`, `{"queries":["b"],"documents":["b"]}`},
	} {
		t.Run(test.name, func(t *testing.T) {
			a, b := read(t, test.api, test.a), read(t, test.api, test.b)
			if a.TurnKey == b.TurnKey {
				t.Errorf("same TurnKey:\n%s\n%s", test.a, test.b)
			}
			if len(a.Chain) > 0 && len(b.Chain) > 0 && a.Chain[len(a.Chain)-1] == b.Chain[len(b.Chain)-1] {
				t.Errorf("same chain:\n%s\n%s", test.a, test.b)
			}
		})
	}
}

// TestTwins reads one conversation through several APIs.
func TestTwins(t *testing.T) {
	chat := read(t, Chat, `{"model":"m","messages":[{"role":"system","content":"be brief"},{"role":"user","content":"LONG"}]}`)
	for _, twin := range []struct {
		api  API
		body string
	}{
		{Tokenize, `{"model":"m","messages":[{"role":"system","content":"be brief"},{"role":"user","content":"LONG"}]}`},
		{Invocations, `{"model":"m","messages":[{"role":"system","content":"be brief"},{"role":"user","content":"LONG"}]}`},
		{Messages, `{"model":"m","system":"be brief","messages":[{"role":"user","content":"LONG"}]}`},
		{Tokenize, `{"model":"m","system":"be brief","messages":[{"role":"user","content":"LONG"}]}`},
		{Responses, `{"model":"m","instructions":"be brief","input":"LONG"}`},
		{Tokenize, `{"model":"m","instructions":"be brief","input":"LONG"}`},
		{Embeddings, `{"model":"m","messages":[{"role":"system","content":"be brief"},{"role":"user","content":"LONG"}]}`},
	} {
		if p := read(t, twin.api, twin.body); !samePrompt(p, chat) {
			t.Errorf("%v differs from chat: %s", twin.api, twin.body)
		}
	}
	if !samePrompt(read(t, Completions, `{"prompt":"LONG"}`), read(t, Tokenize, `{"prompt":"LONG"}`)) {
		t.Error("the render twin of completions differs")
	}
	if p := read(t, Invocations, `{"prompt":"LONG"}`); p.API != Completions {
		t.Errorf("invocations with a prompt is read as %v", p.API)
	}
}

func TestFaults(t *testing.T) {
	for _, test := range []struct {
		api  API
		body string
		want Fault
	}{
		{Chat, "", Empty},
		{Chat, " \n", Empty},
		{Chat, "\xEF\xBB\xBF", Empty},
		{Chat, "model=m&prompt=x", NotJSON},
		{Chat, "5", NotJSON},
		{Chat, "--boundary\r\nContent-Disposition: form-data", NotJSON},
		{Chat, `{"messages" [] }`, NotJSON},
		{Chat, `{messages:[]}`, NotJSON},
		{Chat, `{"messages":}`, NotJSON},
		{Chat, `{"messages":[{"role":"user","content":"x"}]} {}`, NotJSON},
		{Chat, `{"messages":[{"role":"user","content":"x"}]`, Cut},
		{Chat, `{"messages":[{"role":"user","content":"x`, Cut},
		{Chat, `{"mess`, Cut},
		{Chat, `{`, Cut},
		{Chat, `[]`, Shape},
		{Chat, `"messages"`, Shape},
		{Chat, `{}`, Shape},
		{Chat, `{"messages":[]}`, Shape},
		{Chat, `{"messages":"x"}`, Shape},
		{Chat, `{"messages":null}`, Shape},
		{Chat, `{"prompt":"x"}`, Shape},
		{Completions, `{"prompt":[]}`, Shape},
		{Completions, `{"prompt":[[]]}`, Shape},
		{Completions, `{"prompt":3}`, Shape},
		{Completions, `{"prompt":[1,2.5]}`, Shape},
		{Completions, `{"prompt":[1e3]}`, Shape},
		{Completions, `{"prompt":[1,"x"]}`, Shape},
		{Completions, `{"prompt":[1,-]}`, Shape},
		{Completions, `{"prompt":[true]}`, Shape},
		{Responses, `{"input":[]}`, Shape},
		{Responses, `{"input":{}}`, Shape},
		{Generate, `{"token_ids":"x"}`, Shape},
		{Rerank, `{"documents":["x"]}`, Shape},
		{Score, `{"queries":[],"documents":["x"]}`, Shape},
		{Tokenize, `{"model":"m"}`, Shape},
		{Unknown, `{"messages":[{"role":"user","content":"x"}]}`, Shape},
		{Chat, `{"metadata":` + strings.Repeat("[", 10_000) + strings.Repeat("]", 10_000) + `}`, TooDeep},
		{Chat, strings.Repeat(`{"a":`, 10_000), TooDeep},
		{Chat, `{"messages":` + strings.Repeat("[", 10_000), TooDeep},
		{Chat, strings.Repeat("[", 10_000), Shape},
		{Embeddings, `{"input":"x"}`, None},
		{Embeddings, `{"texts":["x"]}`, None},
		{Pooling, `{"data":{"a":1}}`, None},
		{Classify, `{"input":["x"]}`, None},
		{Generate, `{"token_ids":[1,2],"features":{"mm_hashes":{}}}`, None},
		{Score, `{"text_1":"x","text_2":["y"]}`, None},
		{Chat, `{"messages":[{"role":5,"content":7,"tool_calls":"x"},3,null,"x"],"tools":7,"model":[]}`, None},
	} {
		p := Prompt{Chain: []uint64{1, 2, 3}, Tokens: 5, TurnKey: 6}
		if got := p.Read(test.api, []byte(test.body), true, 1); got != test.want {
			t.Errorf("%v: fault %v, want %v: %.80s", test.api, got, test.want, test.body)
		}
		if test.want != None && (len(p.Chain) > 0 || p.Tokens > 0 || p.TurnKey != 0) {
			t.Errorf("fault %v leaves a prompt: %+v", test.want, p)
		}
	}
}

func TestSettings(t *testing.T) {
	var p Prompt
	fault := p.Read(Responses, []byte(`{"model":"org\/m\u00e9","previous_response_id":"resp_1","service_tier":"flex","priority":-3,
		"max_output_tokens":100,"stream":true,"input":5}`), true, 1)
	if fault != Shape || p.Model != "org/mé" || p.PreviousResponse != "resp_1" || p.ServiceTier != "flex" || p.Priority != -3 ||
		p.MaxTokens != 100 || !p.Stream {
		t.Errorf("%v: %+v", fault, p)
	}
	for body, want := range map[string]int{
		`{"max_tokens":7}`:                                7,
		`{"max_tokens":7,"max_completion_tokens":8}`:      8,
		`{"max_tokens":7,"max_completion_tokens":null}`:   7,
		`{"max_tokens":-7}`:                               0,
		`{"max_tokens":"7"}`:                              0,
		`{"max_tokens":7.5}`:                              0,
		`{"max_tokens":9,"temperature":`:                  9,
		`{"max_tokens":99999999999999999999999999999999}`: 1<<31 - 1,
	} {
		p.Read(Chat, []byte(body), true, 1)
		if p.MaxTokens != want {
			t.Errorf("%s: MaxTokens %d, want %d", body, p.MaxTokens, want)
		}
		if p.Model != "" || p.Stream || p.Priority != 0 {
			t.Errorf("%s: settings of the request before are left", body)
		}
	}
	p.Read(Chat, fmt.Appendf(nil, `{"model":"%s"}`, strings.Repeat("m", 300)), true, 1)
	if p.Model != "" {
		t.Errorf("a model's name of 300 bytes is kept")
	}
}

func TestLengths(t *testing.T) {
	ids := strings.TrimSuffix(strings.Repeat("7,", 200), ",")
	for _, test := range []struct {
		name                        string
		api                         API
		body                        string
		bytes, extra, tokens, chain int
	}{
		{"ids", Completions, `{"prompt":[` + ids + `]}`, 800, 0, 200, 3},
		{"lists of ids", Completions, `{"prompt":[[` + ids + `],[1,2],[3]]}`, 800, 12, 200, 3},
		{"strings", Completions, `{"prompt":["` + strings.Repeat("a", 256) + `","bb","\u00e9"]}`, 256, 4, 0, 1},
		{"less than a block", Completions, `{"prompt":"` + strings.Repeat("a", 255) + `"}`, 255, 0, 0, 0},
		{"documents", Rerank, `{"query":"abc","documents":["12345",{"content":"67"}]}`, 3, 8, 0, 0},
		{"pairs", Score, `{"text_1":["abc","de"],"text_2":"1234"}`, 3, 6, 0, 0},
		{"embeddings", Embeddings, `{"input":["abc","de"]}`, 3, 2, 0, 0},
		{"embedded ids", Embeddings, `{"input":[1,2,3]}`, 12, 0, 3, 0},
		{"generate", Generate, `{"token_ids":[1,2,3]}`, 12, 0, 3, 0},
		{"image", Chat, `{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:` + long + `"}}]}]}`, 1 + 4 + 1 + 1024, 0, 0, 4},
		{"a head takes no room", Chat, `{"model":"m","cache_salt":"` + long + `","messages":[{"role":"user","content":"hi"}]}`, 1 + 4 + 1 + 2, 0, 0, 0},
		{"batch", Chat, `{"messages":[[{"role":"user","content":"hi"}],[{"role":"user","content":"123"},{"role":"user","content":"4"}]]}`, 1 + 4 + 1 + 2, 1 + 3 + 1 + 1, 0, 0},
	} {
		p := read(t, test.api, test.body)
		if p.Bytes != test.bytes || p.Extra != test.extra || p.Tokens != test.tokens || len(p.Chain) != test.chain {
			t.Errorf("%s: %d bytes, %d extra, %d tokens, %d blocks; want %d, %d, %d, %d", test.name,
				p.Bytes, p.Extra, p.Tokens, len(p.Chain), test.bytes, test.extra, test.tokens, test.chain)
		}
	}
}

// TestTurn grows a chat: everything up to the end of the first user turn stays.
func TestTurn(t *testing.T) {
	const start = `{"messages":[{"role":"system","content":"LONG"},{"role":"user","content":"context"},{"role":"user","content":"LONG"}`
	first := read(t, Chat, start+`]}`)
	grown := read(t, Chat, start+`,{"role":"assistant","content":"LONG"},{"role":"user","content":"LONG"}]}`)
	if first.Turn != len(first.Chain) || first.Turn == 0 {
		t.Errorf("first turn ends after %d blocks of %d", first.Turn, len(first.Chain))
	}
	if grown.Turn != first.Turn || grown.TurnKey != first.TurnKey {
		t.Errorf("the turn moved from %d to %d, or its key changed", first.Turn, grown.Turn)
	}
	if !slices.Equal(first.Chain, grown.Chain[:len(first.Chain)]) {
		t.Error("the chain of a grown chat does not begin as before")
	}
	short := read(t, Chat, `{"messages":[{"role":"user","content":"a"}]}`)
	other := read(t, Chat, `{"messages":[{"role":"user","content":"b"}]}`)
	if short.TurnKey == other.TurnKey {
		t.Error("short prompts share a TurnKey")
	}
	none := read(t, Chat, `{"messages":[{"role":"system","content":"LONG"}]}`)
	if none.Turn != 0 || none.TurnKey == 0 {
		t.Errorf("without a user: turn %d, key %d", none.Turn, none.TurnKey)
	}
}

func TestSeed(t *testing.T) {
	body := []byte(`{"prompt":"` + long + `"}`)
	var a, b, c Prompt
	a.Read(Completions, body, true, 1)
	b.Read(Completions, body, true, 2)
	c.Read(Completions, body, true, 1)
	if !samePrompt(a, c) {
		t.Error("one seed, two chains")
	}
	for i := range a.Chain {
		if a.Chain[i] == b.Chain[i] {
			t.Errorf("block %d does not depend on the seed", i)
		}
	}
}

// Whoever knows the seed can make blocks that forget what came before: words that equal the key, of which
// the product is 0. Under any other seed such prompts are as different as they look.
func TestCollisionsNeedTheSeed(t *testing.T) {
	const known, secret, prompts = 17, 4711, 1000
	k := newKey(known)
	var end []uint32 // of the second block
	for i := range 4 {
		end = append(end, uint32(k[i]), uint32(k[i]>>32), 0, 0)
	}
	chains := func(seed uint64) map[uint64]bool {
		seen := make(map[uint64]bool)
		for n := range prompts {
			ids := slices.Repeat([]string{fmt.Sprint(n)}, 2*BlockSize/4-len(end))
			for _, id := range end {
				ids = append(ids, fmt.Sprint(id))
			}
			var p Prompt
			if fault := p.Read(Completions, []byte(`{"prompt":[`+strings.Join(ids, ",")+`]}`), true, seed); fault != None || len(p.Chain) != 2 {
				t.Fatalf("%v, %d blocks", fault, len(p.Chain))
			}
			seen[p.Chain[1]] = true
		}
		return seen
	}
	if n := len(chains(known)); n != 1 {
		t.Errorf("%d chains under the seed that the prompts were made for; the attack does not work, so nothing was tested", n)
	}
	if n := len(chains(secret)); n != prompts {
		t.Errorf("%d chains of %d prompts under another seed", n, prompts)
	}
}

func TestTruncated(t *testing.T) {
	for _, test := range []struct {
		body      string
		want      Fault
		truncated bool
	}{
		{`{"model":"m","messages":[{"role":"user","content":"LONG`, None, true},
		{`{"model":"m","messages":[{"role":"user","content":"LONG"}]}`, None, false},
		{`{"model":"m","messages":[`, Cut, true},
		{`{"model":"m","temp`, Cut, true},
		{`{"model":"m","mess`, Cut, true},
		{``, Empty, false},
	} {
		var p Prompt
		fault := p.Read(Chat, []byte(strings.ReplaceAll(test.body, "LONG", long)), false, 1)
		if fault != test.want || p.Truncated != test.truncated {
			t.Errorf("%v, truncated %t; want %v, %t: %s", fault, p.Truncated, test.want, test.truncated, test.body)
		}
		if test.want == Cut && p.Model != "m" {
			t.Errorf("the model is lost: %s", test.body)
		}
	}
	var p Prompt
	if p.Read(Completions, []byte(`{"prompt":"x","max_tokens":10`), false, 1); p.MaxTokens != 0 {
		t.Errorf("max_tokens of 10… is read as %d", p.MaxTokens)
	}
	var whole, part Prompt
	whole.Read(Completions, []byte(`{"prompt":[`+strings.Repeat("1234,", 200)+`1]}`), true, 1)
	part.Read(Completions, []byte(`{"prompt":[`+strings.Repeat("1234,", 128)+`12`), false, 1)
	if part.Tokens != 128 || !slices.Equal(part.Chain, whole.Chain[:2]) {
		t.Errorf("cut in a token id: %d tokens, %d blocks", part.Tokens, len(part.Chain))
	}
}

// TestHostile reads bodies made to be slow or deep. It would not end if one of them took time in the
// square of its length.
func TestHostile(t *testing.T) {
	const n = 1 << 20
	for _, body := range []string{
		`{"prompt":"` + strings.Repeat(`\\`, n),
		`{"prompt":"` + strings.Repeat(`\\`, n) + `u0061"}`,
		`{"prompt":"` + strings.Repeat(`\`, n|1) + `"}`,
		`{"prompt":"` + strings.Repeat(`\"`, n),
		`{"prompt":"` + strings.Repeat(`\u`, n) + `"}`,
		`{"prompt":[` + strings.Repeat("[1],", n),
		`{"prompt":[` + strings.Repeat("1", n),
		`{"prompt":[` + strings.Repeat(" ", n) + `]}`,
		`{"prompt":` + strings.Repeat("9", n) + `}`,
		strings.Repeat(`{"`, n),
		`{` + strings.Repeat(`"prompt":"x",`, n/8),
		`{"messages":[` + strings.Repeat(`{"content":[{"text":"`, n/16),
		`{"messages":[` + strings.Repeat(`{},`, n),
		`{"messages":[` + strings.Repeat(`"`, n),
		`{"tools":[` + strings.Repeat(`{"a" : "b" } , `, n/8) + `],"messages":[{}]}`,
		"{" + strings.Repeat("\x00\xff", n),
	} {
		var p Prompt
		for _, api := range []API{Chat, Completions, Tokenize} {
			p.Read(api, []byte(body), true, 1)
			p.Read(api, []byte(body), false, 1)
		}
	}
}

func TestReadAllocatesNothing(t *testing.T) {
	for name, test := range map[string]struct {
		api  API
		body []byte
	}{
		"chat":     {Chat, chatBody(64<<10, 8, quoteLine)},
		"escapes":  {Chat, []byte(`{"model":"m\u00e9","messages":[{"role":"user","content":"` + strings.Repeat(`\u00e9\/`, 500) + `"}]}`)},
		"parts":    {Messages, []byte(`{"model":"m","system":[{"text":"x"}],"messages":[{"role":"user","content":[{"type":"tool_result","content":[{"text":"x"}]},{"source":{"data":"AA"}}]}]}`)},
		"ids":      {Completions, []byte(`{"prompt":[[1,2,3],[4]]}`)},
		"tools":    {Chat, []byte(`{"tools":[{"a": {"b": "c"}}],"messages":[{"role":"user","content":"x"}],"service_tier":"flex"}`)},
		"response": {Responses, []byte(`{"input":[{"type":"function_call_output","output":"x"}],"previous_response_id":"r"}`)},
		"rerank":   {Rerank, []byte(`{"query":"q","documents":["a",{"content":"b"}]}`)},
	} {
		var p Prompt
		if n := testing.AllocsPerRun(20, func() { p.Read(test.api, test.body, true, 1) }); n != 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
}
