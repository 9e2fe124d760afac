// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
)

var errUnknownResponse = errors.New("no such response on this server")

// answer is one HTTP request to an inference endpoint, on its way to an answer.
type answer struct {
	instance   *instance
	endpoint   endpoint
	body       requestBody
	generation *generation
	id         string
	model      string
	created    int64
	turns      []turn // of a conversation to remember
	opened     bool   // the stream has begun
	prefix     []byte // of every chunk of a stream
}

// text returns the whole text of one sequence.
func (a *answer) text(i int) string {
	g := a.generation
	return g.prompts[i].answerText(int(g.progress[i].Load()))
}

// remember keeps a finished /v1/responses conversation.
func (a *answer) remember() {
	if a.turns == nil {
		return
	}
	turns := append(slices.Clone(a.turns), turn{role: "assistant", parts: []part{{text: a.text(0)}}})
	a.instance.memory.store(a.id, turns)
}

// endpoint is what distinguishes the inference endpoints.
type endpoint struct {
	prompts   func(p *instance, a *answer) ([][]uint32, error)
	dialect   *dialect
	generates bool // tokens; otherwise it only pools
}

// dialect is the form of an API's answers. Streams have an open, a delta for every
// token and a close; each appends events to out.
type dialect struct {
	idPrefix string
	unary    func(a *answer) any
	open     func(out []byte, a *answer) []byte
	delta    func(out []byte, a *answer, i int, text []byte, last bool) []byte
	close    func(out []byte, a *answer) []byte
}

var endpoints = map[string]endpoint{
	"/v1/chat/completions": {chatPrompts, &chatDialect, true},
	"/v1/completions":      {completionPrompts, &completionDialect, true},
	"/v1/responses":        {responsesPrompts, &responsesDialect, true},
	"/v1/messages":         {chatPrompts, &messagesDialect, true},
	"/v1/embeddings":       {inputPrompts, &embeddingDialect, false},
	"/classify":            {inputPrompts, &classifyDialect, false},
	"/pooling":             {inputPrompts, &poolingDialect, false},
	"/score":               {scorePrompts, &scoreDialect, false},
	"/v1/score":            {scorePrompts, &scoreDialect, false},
	"/rerank":              {rerankPrompts, &rerankDialect, false},
	"/v1/rerank":           {rerankPrompts, &rerankDialect, false},
	"/v2/rerank":           {rerankPrompts, &rerankDialect, false},
}

// renderEndpoint shows the tokens that an inference endpoint would run.
type renderEndpoint struct {
	endpoint
	scaleOut bool // offered only with --enable-scale-out
	show     func(a *answer) any
}

var renderEndpoints = map[string]renderEndpoint{
	"/v1/chat/completions/render": {endpoints["/v1/chat/completions"], true, showRendered},
	"/v1/responses/render":        {endpoints["/v1/responses"], true, showRendered},
	"/v1/messages/render":         {endpoints["/v1/messages"], true, showRendered},
	"/v1/completions/render":      {endpoints["/v1/completions"], true, showRenderedList},
	"/v1/messages/count_tokens":   {endpoints["/v1/messages"], false, showCount},
	"/tokenize":                   {endpoint{tokenizePrompts, &completionDialect, false}, false, showTokens},
}

// Prompts.

func chatPrompts(p *instance, a *answer) ([][]uint32, error) {
	turns, err := a.body.chatTurns()
	if err != nil {
		return nil, err
	}
	generationPrompt := a.body.AddGenerationPrompt == nil || *a.body.AddGenerationPrompt
	return [][]uint32{p.tokenizer.renderChat(turns, a.body.toolText(), generationPrompt)}, nil
}

func completionPrompts(p *instance, a *answer) ([][]uint32, error) {
	return p.tokenizer.inputPrompts("prompt", a.body.Prompt)
}

func responsesPrompts(p *instance, a *answer) ([][]uint32, error) {
	input, err := a.body.inputTurns()
	if err != nil {
		return nil, err
	}
	if id := a.body.PreviousResponseID; id != "" {
		before, ok := p.memory.load(id)
		if !ok {
			return nil, fmt.Errorf("%w: %s", errUnknownResponse, id)
		}
		input = append(slices.Clone(before), input...)
	}
	a.turns = input
	turns := input
	if a.body.Instructions != "" {
		// Instructions are not inherited by the next response.
		system := turn{role: "system", parts: []part{{text: a.body.Instructions}}}
		turns = append([]turn{system}, input...)
	}
	return [][]uint32{p.tokenizer.renderChat(turns, a.body.toolText(), true)}, nil
}

func inputPrompts(p *instance, a *answer) ([][]uint32, error) {
	if len(a.body.Messages) == 0 {
		return p.tokenizer.inputPrompts("input", a.body.Input)
	}
	turns, err := a.body.chatTurns()
	if err != nil {
		return nil, err
	}
	return [][]uint32{p.tokenizer.renderChat(turns, "", false)}, nil
}

func scorePrompts(p *instance, a *answer) ([][]uint32, error) {
	if isSet(a.body.Text1) {
		return p.tokenizer.pairPrompts(a.body.Text1, a.body.Text2)
	}
	return p.tokenizer.pairPrompts(a.body.Queries, a.body.Documents)
}

func rerankPrompts(p *instance, a *answer) ([][]uint32, error) {
	return p.tokenizer.pairPrompts(a.body.Query, a.body.Documents)
}

func tokenizePrompts(p *instance, a *answer) ([][]uint32, error) {
	if len(a.body.Messages) > 0 {
		return chatPrompts(p, a)
	}
	return completionPrompts(p, a)
}

// toolText returns the tools as the template prints them: as received.
func (b *requestBody) toolText() string {
	if !isSet(b.Tools) || bytes.Equal(b.Tools, []byte("[]")) {
		return ""
	}
	return string(b.Tools)
}

// Rendered prompts.

func showRendered(a *answer) any {
	return map[string]any{
		"request_id": a.id,
		"token_ids":  a.generation.prompts[0].ids,
		"model":      a.model,
		"stream":     a.body.Stream,
		"cache_salt": a.body.CacheSalt,
	}
}

func showRenderedList(a *answer) any {
	var list []any
	for _, p := range a.generation.prompts {
		list = append(list, map[string]any{
			"request_id": a.id, "token_ids": p.ids, "model": a.model, "stream": a.body.Stream, "cache_salt": a.body.CacheSalt,
		})
	}
	return list
}

func showTokens(a *answer) any {
	p := a.generation.prompts[0]
	return map[string]any{"count": p.tokens, "max_model_len": a.instance.config.MaxModelTokens, "tokens": p.ids, "token_strs": nil}
}

func showCount(a *answer) any {
	return map[string]any{"input_tokens": a.generation.prompts[0].tokens}
}

// OpenAI chat completions and completions.

var chatDialect = dialect{
	idPrefix: "chatcmpl",
	unary: func(a *answer) any {
		choices := make([]any, len(a.generation.prompts))
		for i := range choices {
			choices[i] = map[string]any{
				"index": i, "finish_reason": "length", "logprobs": nil,
				"message": map[string]any{"role": "assistant", "content": a.text(i)},
			}
		}
		return a.openAI("chat.completion", choices)
	},
	open: func(out []byte, a *answer) []byte {
		a.openChunks("chat.completion.chunk")
		for i := range a.generation.prompts {
			out = append(out, a.prefix...)
			out = strconv.AppendInt(out, int64(i), 10)
			out = append(out, `,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}`+"\n\n"...)
		}
		return out
	},
	delta: func(out []byte, a *answer, i int, text []byte, last bool) []byte {
		out = append(out, a.prefix...)
		out = strconv.AppendInt(out, int64(i), 10)
		out = append(out, `,"delta":{"content":"`...)
		out = append(out, text...)
		return appendFinish(append(out, `"},"logprobs":null`...), last)
	},
	close: closeOpenAI("chat.completion.chunk"),
}

var completionDialect = dialect{
	idPrefix: "cmpl",
	unary: func(a *answer) any {
		choices := make([]any, len(a.generation.prompts))
		for i := range choices {
			choices[i] = map[string]any{"index": i, "text": a.text(i), "logprobs": nil, "finish_reason": "length"}
		}
		return a.openAI("text_completion", choices)
	},
	open: func(out []byte, a *answer) []byte {
		a.openChunks("text_completion")
		return out
	},
	delta: func(out []byte, a *answer, i int, text []byte, last bool) []byte {
		out = append(out, a.prefix...)
		out = strconv.AppendInt(out, int64(i), 10)
		out = append(out, `,"text":"`...)
		out = append(out, text...)
		return appendFinish(append(out, `","logprobs":null`...), last)
	},
	close: closeOpenAI("text_completion"),
}

// openAI wraps the choices of a unary answer.
func (a *answer) openAI(object string, choices []any) any {
	return map[string]any{
		"id": a.id, "object": object, "created": a.created, "model": a.model, "choices": choices, "usage": a.openAIUsage(),
	}
}

func (a *answer) openAIUsage() any {
	u := a.generation.usage()
	return map[string]any{
		"prompt_tokens": u.prompt, "completion_tokens": u.completion, "total_tokens": u.prompt + u.completion,
		"prompt_tokens_details": map[string]any{"cached_tokens": u.cached},
	}
}

// openChunks prepares what all chunks of a stream begin with, up to the choice's index.
func (a *answer) openChunks(object string) {
	model, _ := json.Marshal(a.model) // a string always marshals
	a.prefix = fmt.Appendf(nil, `data: {"id":%q,"object":%q,"created":%d,"model":%s,"choices":[{"index":`,
		a.id, object, a.created, model)
}

// appendFinish ends a chunk.
func appendFinish(out []byte, last bool) []byte {
	if last {
		return append(out, `,"finish_reason":"length"}]}`+"\n\n"...)
	}
	return append(out, `,"finish_reason":null}]}`+"\n\n"...)
}

func closeOpenAI(object string) func(out []byte, a *answer) []byte {
	return func(out []byte, a *answer) []byte {
		if a.body.StreamOptions.IncludeUsage {
			out = appendEvent(out, "", map[string]any{
				"id": a.id, "object": object, "created": a.created, "model": a.model,
				"choices": []any{}, "usage": a.openAIUsage(),
			})
		}
		return append(out, "data: [DONE]\n\n"...)
	}
}

// appendEvent appends one server-sent event, with a name if it has one.
func appendEvent(out []byte, name string, v any) []byte {
	data, err := json.Marshal(v)
	if err != nil {
		return out // only values made here are marshalled, and these can be
	}
	if name != "" {
		out = append(append(append(out, "event: "...), name...), '\n')
	}
	out = append(append(out, "data: "...), data...)
	return append(out, "\n\n"...)
}

// OpenAI responses.

var responsesDialect = dialect{
	idPrefix: "resp",
	unary:    func(a *answer) any { return a.response("completed") },
	open: func(out []byte, a *answer) []byte {
		out = appendEvent(out, "response.created", map[string]any{"type": "response.created", "response": a.response("in_progress")})
		a.prefix = fmt.Appendf(nil, "event: response.output_text.delta\ndata: "+
			`{"type":"response.output_text.delta","item_id":"msg-%s","output_index":0,"content_index":0,"delta":"`, a.id)
		return out
	},
	delta: func(out []byte, a *answer, _ int, text []byte, _ bool) []byte {
		out = append(append(out, a.prefix...), text...)
		return append(out, `"}`+"\n\n"...)
	},
	close: func(out []byte, a *answer) []byte {
		return appendEvent(out, "response.completed", map[string]any{"type": "response.completed", "response": a.response("completed")})
	},
}

// response is the response object, with output and usage when it is completed.
func (a *answer) response(status string) any {
	r := map[string]any{
		"id": a.id, "object": "response", "created_at": a.created, "model": a.model, "status": status,
		"output": []any{}, "usage": nil, "previous_response_id": nil,
	}
	if id := a.body.PreviousResponseID; id != "" {
		r["previous_response_id"] = id
	}
	if status != "completed" {
		return r
	}
	u := a.generation.usage()
	r["output"] = []any{map[string]any{
		"id": "msg-" + a.id, "type": "message", "role": "assistant", "status": "completed",
		"content": []any{map[string]any{"type": "output_text", "text": a.text(0), "annotations": []any{}}},
	}}
	r["usage"] = map[string]any{
		"input_tokens": u.prompt, "output_tokens": u.completion, "total_tokens": u.prompt + u.completion,
		"input_tokens_details":  map[string]any{"cached_tokens": u.cached, "cache_write_tokens": u.stored},
		"output_tokens_details": map[string]any{"reasoning_tokens": 0},
	}
	return r
}

// Anthropic messages.

var messagesDialect = dialect{
	idPrefix: "msg",
	unary: func(a *answer) any {
		m := a.messageHead()
		m["content"] = []any{map[string]any{"type": "text", "text": a.text(0)}}
		m["stop_reason"] = "max_tokens"
		return m
	},
	open: func(out []byte, a *answer) []byte {
		out = appendEvent(out, "message_start", map[string]any{"type": "message_start", "message": a.messageHead()})
		a.prefix = []byte("event: content_block_delta\ndata: " +
			`{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"`)
		return appendEvent(out, "content_block_start", map[string]any{
			"type": "content_block_start", "index": 0, "content_block": map[string]any{"type": "text", "text": ""},
		})
	},
	delta: func(out []byte, a *answer, _ int, text []byte, _ bool) []byte {
		out = append(append(out, a.prefix...), text...)
		return append(out, `"}}`+"\n\n"...)
	},
	close: func(out []byte, a *answer) []byte {
		out = appendEvent(out, "content_block_stop", map[string]any{"type": "content_block_stop", "index": 0})
		out = appendEvent(out, "message_delta", map[string]any{
			"type": "message_delta", "delta": map[string]any{"stop_reason": "max_tokens"}, "usage": a.messageUsage(),
		})
		return appendEvent(out, "message_stop", map[string]any{"type": "message_stop"})
	},
}

func (a *answer) messageHead() map[string]any {
	return map[string]any{
		"id": a.id, "type": "message", "role": "assistant", "model": a.model, "content": []any{},
		"stop_reason": nil, "stop_sequence": nil, "usage": a.messageUsage(),
	}
}

// messageUsage leaves cached and newly stored tokens out of input_tokens, as vLLM does.
func (a *answer) messageUsage() any {
	u := a.generation.usage()
	return map[string]any{
		"input_tokens":                u.prompt - u.cached - u.stored,
		"cache_read_input_tokens":     u.cached,
		"cache_creation_input_tokens": u.stored,
		"output_tokens":               u.completion,
	}
}

// Pooling endpoints.

var (
	embeddingDialect = poolingList("embd", func(a *answer, i int) map[string]any {
		return map[string]any{"object": "embedding", "index": i, "embedding": a.vector(i)}
	})
	poolingDialect = poolingList("pool", func(a *answer, i int) map[string]any {
		return map[string]any{"object": "pooling", "index": i, "data": a.vector(i)}
	})
	classifyDialect = poolingList("classify", func(a *answer, i int) map[string]any {
		return map[string]any{"index": i, "label": "LABEL_0", "probs": []float64{a.score(i), 1 - a.score(i)}, "num_classes": 2}
	})
	scoreDialect = poolingList("score", func(a *answer, i int) map[string]any {
		return map[string]any{"object": "score", "index": i, "score": a.score(i)}
	})
	rerankDialect = dialect{
		idPrefix: "rerank",
		unary: func(a *answer) any {
			results := make([]map[string]any, len(a.generation.prompts))
			for i := range results {
				results[i] = map[string]any{"index": i, "relevance_score": a.score(i)}
			}
			return map[string]any{"id": a.id, "model": a.model, "results": results, "usage": a.openAIUsage()}
		},
	}
)

func poolingList(idPrefix string, item func(a *answer, i int) map[string]any) dialect {
	return dialect{
		idPrefix: idPrefix,
		unary: func(a *answer) any {
			data := make([]map[string]any, len(a.generation.prompts))
			for i := range data {
				data[i] = item(a, i)
			}
			return map[string]any{
				"id": a.id, "object": "list", "created": a.created, "model": a.model, "data": data, "usage": a.openAIUsage(),
			}
		},
	}
}

// score derives a number between 0 and 1 from a prompt.
func (a *answer) score(i int) float64 {
	return float64(a.generation.prompts[i].answer>>11) / (1 << 53)
}

// vector derives a short embedding from a prompt.
func (a *answer) vector(i int) []float64 {
	v := make([]float64, 8)
	for k := range v {
		v[k] = float64(mix(a.generation.prompts[i].answer+uint64(k))>>11)/(1<<52) - 1
	}
	return v
}

// answerInstantly answers without an engine: a fixed text in the form asked for.
func (p *instance) answerInstantly(w http.ResponseWriter, raw []byte, e endpoint) {
	a := &answer{instance: p, endpoint: e, model: p.config.Model, id: e.dialect.idPrefix + "-instant"}
	tokens := 0
	if e.generates {
		tokens = defaultOutputTokens
	}
	fixed := newPrompt(p.tokenizer, p.config.BlockTokens, space{}, []uint32{tokenTurnStart})
	a.generation = &generation{
		prompts:  []*prompt{fixed},
		requests: []*Request{{PromptTokens: 1, OutputTokens: tokens}},
	}
	a.generation.progress = newProgress(tokens)
	d := e.dialect
	if d.delta == nil || !asksForStream(raw) {
		writeJSON(w, http.StatusOK, d.unary(a))
		return
	}
	w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
	out := d.open(nil, a)
	var text []byte
	for i := range tokens {
		text = fixed.answerToken(text[:0], i)
		out = d.delta(out, a, 0, text, i+1 == tokens)
	}
	_, _ = w.Write(d.close(out, a)) // an error means that the client is gone
}

// asksForStream looks for "stream":true without parsing the body.
func asksForStream(raw []byte) bool {
	_, after, found := bytes.Cut(raw, []byte(`"stream"`))
	after = bytes.TrimLeft(after, ": \t\r\n")
	return found && bytes.HasPrefix(after, []byte("true"))
}
