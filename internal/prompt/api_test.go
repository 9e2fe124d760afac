// SPDX-License-Identifier: Apache-2.0

package prompt

import "testing"

func TestAPIOf(t *testing.T) {
	for path, want := range map[string]API{
		"/v1/chat/completions":                   Chat,
		"/v1/chat/completions/":                  Chat,
		"/llm/v1/chat/completions":               Chat,
		"/v1/chat/completions/batch":             Chat,
		"/chat/completions":                      Chat,
		"/openai/deployments/m/chat/completions": Chat,
		"/cohere/v2/chat":                        Chat,
		"/v1/completions":                        Completions,
		"/a/b/v1/completions//":                  Completions,
		"/completions":                           Completions,
		"/v1/responses":                          Responses,
		"/v1/responses/resp_1":                   StoredResponse,
		"/x/v1/responses/resp_1/cancel":          StoredResponse,
		"/v1/responses/resp_1/input_items":       StoredResponse,
		"/v1/messages":                           Messages,
		"/v1/messages/count_tokens":              Tokenize,
		"/v1/embeddings":                         Embeddings,
		"/v2/embed":                              Embeddings,
		"/score":                                 Score,
		"/v1/score":                              Score,
		"/generative_scoring":                    Score,
		"/rerank":                                Rerank,
		"/v1/rerank":                             Rerank,
		"/v2/rerank":                             Rerank,
		"/classify":                              Classify,
		"/pooling":                               Pooling,
		"/inference/v1/generate":                 Generate,
		"/invocations":                           Invocations,
		"/v1/audio/transcriptions":               Audio,
		"/v1/audio/translations":                 Audio,
		"/tokenize":                              Tokenize,
		"/detokenize":                            Tokenize,
		"/v1/chat/completions/render":            Tokenize,
		"/v1/completions/render":                 Tokenize,
		"/v1/responses/render":                   Tokenize,
		"":                                       Unknown,
		"/":                                      Unknown,
		"///":                                    Unknown,
		"/foo/xchat/completions":                 Unknown,
		"/v1/chat/completionsx":                  Unknown,
		"/v1/chatcompletions":                    Unknown,
		"/v1/xcompletions":                       Unknown,
		"/v1/models":                             Unknown,
		"/health":                                Unknown,
		"/render":                                Unknown,
		"/v1/models/render":                      Unknown,
		"/v1/responses/a/b/c":                    Unknown,
		"/inbox/messages":                        Unknown,
		"/v1/realtime":                           Unknown,
		"/generate":                              Unknown,
		"/v1/batch":                              Unknown,
	} {
		if got := APIOf(path); got != want {
			t.Errorf("APIOf(%q) = %v, want %v", path, got, want)
		}
		if n := testing.AllocsPerRun(10, func() { APIOf(path) }); n != 0 {
			t.Errorf("APIOf(%q) allocates %v times", path, n)
		}
	}
}

func TestPrefills(t *testing.T) {
	for api := range apiCount {
		want := api != Unknown && api != Tokenize && api != StoredResponse
		if got := api.Prefills(); got != want {
			t.Errorf("%v.Prefills() = %t, want %t", api, got, want)
		}
	}
	if (apiCount + 1).Prefills() {
		t.Error("an API that does not exist prefills")
	}
}

func TestResponseID(t *testing.T) {
	for path, want := range map[string]string{
		"/v1/responses/resp_1":        "resp_1",
		"/v1/responses/resp_1/":       "resp_1",
		"/a/v1/responses/r/cancel":    "r",
		"/responses/r":                "r",
		"/v1/responses":               "",
		"/v1/responses/":              "",
		"/v1/responses/render":        "",
		"/survey/responses/r":         "",
		"/v1/responses/r/cancel/more": "",
	} {
		if got := ResponseID(path); got != want {
			t.Errorf("ResponseID(%q) = %q, want %q", path, got, want)
		}
	}
}

func TestNames(t *testing.T) {
	seen := map[string]bool{}
	for api := range apiCount {
		seen[api.String()] = true
	}
	if len(seen) != int(apiCount) || seen[""] {
		t.Errorf("API names are not unique: %v", seen)
	}
	if got := API(200).String(); got != "unknown" {
		t.Errorf("API(200) is %q", got)
	}
	seen = map[string]bool{}
	for fault := range faultCount {
		seen[fault.String()] = true
	}
	if len(seen) != int(faultCount) || seen[""] {
		t.Errorf("fault names are not unique: %v", seen)
	}
	if got := Fault(200).String(); got != "not_json" {
		t.Errorf("Fault(200) is %q", got)
	}
}
