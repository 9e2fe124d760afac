// SPDX-License-Identifier: Apache-2.0

package prompt

import "strings"

// API is one of the request shapes an inference server takes. It is a closed list, fit for a metrics label.
type API uint8

// The APIs, by what their bodies look like rather than by who invented them.
const (
	// Unknown is every path that carries no prompt we can read: /health, /v1/models, /v1/realtime …
	Unknown API = iota
	// Chat is …/chat/completions, its /batch form and Cohere's v2 chat.
	Chat
	// Completions is /v1/completions.
	Completions
	// Responses is the creation of a response: POST /v1/responses.
	Responses
	// StoredResponse is /v1/responses/{id} and what is below it; [ResponseID] names the id.
	StoredResponse
	// Messages is Anthropic's /v1/messages.
	Messages
	// Embeddings is /v1/embeddings and Cohere's /v2/embed.
	Embeddings
	// Score is /score, /v1/score and /generative_scoring: a query against texts.
	Score
	// Rerank is /rerank in its three spellings: a query against documents.
	Rerank
	// Classify is /classify.
	Classify
	// Pooling is /pooling.
	Pooling
	// Generate is vLLM's /inference/v1/generate: token ids in, token ids out.
	Generate
	// Invocations is SageMaker's /invocations, which takes the body of any other API.
	Invocations
	// Audio is /v1/audio/…: a multipart form, for models without a prefix cache.
	Audio
	// Tokenize is everything that reads a prompt and computes no KV for it: /tokenize, /detokenize,
	// count_tokens and the /render twins.
	Tokenize

	apiCount
)

var apiNames = [apiCount]string{
	"unknown", "chat", "completions", "responses", "stored_response", "messages", "embeddings", "score",
	"rerank", "classify", "pooling", "generate", "invocations", "audio", "tokenize",
}

// String returns the API's name in snake_case.
func (a API) String() string {
	if a >= apiCount {
		a = Unknown
	}
	return apiNames[a]
}

// Prefills reports whether the engine computes KV for requests of this API, so that where they go
// changes what a replica holds or how busy it is.
func (a API) Prefills() bool {
	switch a {
	case Unknown, StoredResponse, Tokenize:
		return false
	}
	return a < apiCount
}

// APIOf tells the API from a request's path. It looks at whole segments from the end, so any prefix
// works (/llm/v1/chat/completions), trailing slashes do not matter, and /xchat/completions is no chat.
// Words that other services use too (completions, responses, messages, embeddings) count only behind a
// version segment (v1) or alone.
func APIOf(path string) API {
	rest, last := lastSegment(path)
	switch last {
	case "completions":
		before, name := lastSegment(rest)
		if name == "chat" {
			return Chat
		}
		return versioned(before, name, Completions)
	case "batch":
		if before, name := lastSegment(rest); name == "completions" && endsIn(before, "chat") {
			return Chat
		}
	case "chat":
		if before, version := lastSegment(rest); version == "v2" && endsIn(before, "cohere") {
			return Chat
		}
	case "render":
		if api := APIOf(rest); api.Prefills() {
			return Tokenize
		}
	case "responses":
		return versionedPath(rest, Responses)
	case "messages":
		return versionedPath(rest, Messages)
	case "count_tokens":
		if APIOf(rest) == Messages {
			return Tokenize
		}
	case "embeddings", "embed":
		return versionedPath(rest, Embeddings)
	case "generate":
		if before, version := lastSegment(rest); isVersion(version) && endsIn(before, "inference") {
			return Generate
		}
	case "transcriptions", "translations":
		if before, name := lastSegment(rest); name == "audio" {
			return versionedPath(before, Audio)
		}
	case "pooling":
		return Pooling
	case "classify":
		return Classify
	case "score", "generative_scoring":
		return Score
	case "rerank":
		return Rerank
	case "invocations":
		return Invocations
	case "tokenize", "detokenize":
		return Tokenize
	}
	if ResponseID(path) != "" {
		return StoredResponse
	}
	return Unknown
}

// ResponseID returns the id in /v1/responses/{id} and the paths below it (…/cancel, …/input_items),
// or "". Such a request can only be answered by the replica that made the response.
func ResponseID(path string) string {
	const parent = "/responses/"
	at := strings.LastIndex(path, parent)
	if at < 0 || versionedPath(path[:at], Responses) == Unknown {
		return ""
	}
	id, below, _ := strings.Cut(path[at+len(parent):], "/")
	if id == "render" || strings.Contains(strings.TrimRight(below, "/"), "/") {
		return ""
	}
	return id
}

// lastSegment cuts the last segment off a path, and the slashes around it.
func lastSegment(path string) (rest, last string) {
	for len(path) > 0 && path[len(path)-1] == '/' {
		path = path[:len(path)-1]
	}
	at := strings.LastIndexByte(path, '/')
	if at < 0 {
		return "", path
	}
	return path[:at], path[at+1:]
}

func endsIn(path, segment string) bool {
	_, last := lastSegment(path)
	return last == segment
}

func versionedPath(path string, api API) API {
	rest, last := lastSegment(path)
	return versioned(rest, last, api)
}

// versioned returns api when the segment before its name is a version, or when there is none at all.
func versioned(rest, segment string, api API) API {
	if isVersion(segment) || (segment == "" && rest == "") {
		return api
	}
	return Unknown
}

// isVersion recognises v1, v2, v1beta.
func isVersion(segment string) bool {
	return len(segment) >= 2 && segment[0] == 'v' && segment[1] >= '1' && segment[1] <= '9'
}
