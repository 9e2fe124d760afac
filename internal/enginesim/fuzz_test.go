// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"net/http"
	"testing"
	"time"
)

// FuzzPrepare feeds bodies to every endpoint. Whatever the bytes, the answer is a
// prompt that the engine can be given, or an error with a 4xx status.
func FuzzPrepare(f *testing.F) {
	for _, seed := range []string{
		`{"messages":[{"role":"user","content":"hi"}],"tools":[{"x":1}],"n":2}`,
		`{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"u"}},{"type":"text","text":"t"}]}]}`,
		`{"system":[{"type":"text","text":"x-anthropic-billing-header"}],"messages":[{"role":"a","tool_calls":[]}],"max_tokens":3}`,
		`{"prompt":["a","b"]}`, `{"prompt":[[1,2],[3]]}`, `{"prompt":[1,2,3]}`, `{"prompt":null,"stream":true}`,
		`{"input":[{"type":"function_call","x":1},{"role":"user","content":"x"}],"instructions":"i"}`,
		`{"input":"x","previous_response_id":"r"}`,
		`{"text_1":"a","text_2":["b","c"]}`, `{"query":"q","documents":["d"]}`, `{"queries":["a","b"],"documents":["c"]}`,
		`{"model":"none"}`, `[]`, `null`, `{`, "\xff",
	} {
		f.Add([]byte(seed))
	}
	config := ServerConfig{Config: Config{Blocks: 100}}.withDefaults()
	p := &instance{
		Server:  &Server{config: config, tokenizer: tokenizer{bytesPerToken: config.BytesPerToken}},
		driver:  &driver{engine: New(config.Config), meters: newMeters(config.MaxModelTokens, 1)},
		started: time.Now(),
		memory:  newMemory(),
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		for path, e := range endpoints {
			a, status, err := p.prepare(raw, e)
			if err != nil {
				if status != http.StatusBadRequest && status != http.StatusNotFound {
					t.Errorf("%s: status %d with %v", path, status, err)
				}
				continue
			}
			for _, r := range a.generation.requests {
				if len(r.Blocks) != r.PromptTokens/config.BlockTokens {
					t.Errorf("%s: %d blocks for %d tokens", path, len(r.Blocks), r.PromptTokens)
				}
				r.Output(1)
			}
		}
	})
}
