// SPDX-License-Identifier: Apache-2.0

package prompt

import "bytes"

// field is a top-level field of a request body that we know.
type field uint8

// The fields. Those up to headEnd are the head: what changes the prompt, or the cached KV, as a whole.
// It goes into the hash the chain starts from and takes no room in the text. Adding a field
// at the end of the head keeps the hashes of requests without it.
const (
	fieldModel field = iota
	fieldCacheSalt
	fieldChatTemplate
	fieldChatTemplateKwargs
	fieldReasoningEffort
	fieldReasoning
	fieldThinking
	fieldOutputConfig
	fieldResponseFormat
	fieldTextFormat
	fieldMediaIO
	fieldMmProcessor
	fieldAddSpecialTokens
	fieldTruncateTokens
	fieldTruncationSide
	fieldInputType
	// Here the head ends.
	fieldSystem
	fieldInstructions
	fieldTools
	fieldToolChoice
	fieldDocuments
	fieldMessages
	fieldInput
	fieldPrompt
	fieldPromptEmbeds
	fieldTexts
	fieldQuery
	fieldQueries
	fieldText1
	fieldText2
	fieldItems
	fieldData
	fieldTokenIDs
	fieldFeatures
	// What is read but not hashed.
	fieldPreviousResponse
	fieldServiceTier
	fieldPriority
	fieldMaxTokens
	fieldMaxCompletionTokens
	fieldMaxOutputTokens
	fieldStream

	fieldCount

	headEnd = fieldSystem
)

// fieldOf names a key. Fields that no engine puts in the prompt are not known: sampling, n, stop, user,
// metadata, prompt_cache_key, kv_transfer_params … and add_generation_prompt and continue_final_message,
// which change only the prompt's last bytes.
func fieldOf(key []byte) (field, bool) {
	switch string(key) {
	case "model":
		return fieldModel, true
	case "cache_salt":
		return fieldCacheSalt, true
	case "chat_template":
		return fieldChatTemplate, true
	case "chat_template_kwargs":
		return fieldChatTemplateKwargs, true
	case "reasoning_effort":
		return fieldReasoningEffort, true
	case "reasoning":
		return fieldReasoning, true
	case "thinking":
		return fieldThinking, true
	case "output_config":
		return fieldOutputConfig, true
	case "response_format":
		return fieldResponseFormat, true
	case "text":
		return fieldTextFormat, true
	case "media_io_kwargs":
		return fieldMediaIO, true
	case "mm_processor_kwargs":
		return fieldMmProcessor, true
	case "add_special_tokens":
		return fieldAddSpecialTokens, true
	case "truncate_prompt_tokens":
		return fieldTruncateTokens, true
	case "truncation_side":
		return fieldTruncationSide, true
	case "input_type":
		return fieldInputType, true
	case "system":
		return fieldSystem, true
	case "instructions":
		return fieldInstructions, true
	case "tools":
		return fieldTools, true
	case "tool_choice":
		return fieldToolChoice, true
	case "documents":
		return fieldDocuments, true
	case "messages":
		return fieldMessages, true
	case "input":
		return fieldInput, true
	case "prompt":
		return fieldPrompt, true
	case "prompt_embeds":
		return fieldPromptEmbeds, true
	case "texts":
		return fieldTexts, true
	case "query":
		return fieldQuery, true
	case "queries":
		return fieldQueries, true
	case "text_1":
		return fieldText1, true
	case "text_2":
		return fieldText2, true
	case "items":
		return fieldItems, true
	case "data":
		return fieldData, true
	case "token_ids":
		return fieldTokenIDs, true
	case "features":
		return fieldFeatures, true
	case "previous_response_id":
		return fieldPreviousResponse, true
	case "service_tier":
		return fieldServiceTier, true
	case "priority":
		return fieldPriority, true
	case "max_tokens":
		return fieldMaxTokens, true
	case "max_completion_tokens":
		return fieldMaxCompletionTokens, true
	case "max_output_tokens":
		return fieldMaxOutputTokens, true
	case "stream":
		return fieldStream, true
	}
	return 0, false
}

// plain returns a key without escapes. Clients hardly ever escape keys, and the keys we know are short.
func plain(key []byte, room *[48]byte) []byte {
	if bytes.IndexByte(key, '\\') < 0 {
		return key
	}
	return appendDecoded(room[:0], key, len(room)-4)
}

// is reports whether a value is the given string.
func is(v []byte, s string) bool {
	if !isString(v) || len(v) <= len(s) {
		return false
	}
	if len(v) == len(s)+1 {
		return string(v[1:]) == s // an escape would make it longer
	}
	var room [48]byte
	return string(plain(v[1:], &room)) == s
}

// startsWith reports whether a value is a string that starts with s, of at most 40 bytes.
func startsWith(v []byte, s string) bool {
	if !isString(v) {
		return false
	}
	var room [48]byte
	return bytes.HasPrefix(appendDecoded(room[:0], v[1:], len(s)), []byte(s))
}

// scan finds the fields of the body, the last of each name as Python's json does, before anything is
// hashed: they come in any order, and are hashed in ours.
func (r *reader) scan(body []byte) Fault {
	body = bytes.TrimPrefix(body, []byte("\xEF\xBB\xBF"))
	body = body[:len(body):len(body)]
	start := space(body, 0)
	switch {
	case start == len(body):
		return Empty
	case body[start] == '[', body[start] == '"':
		return Shape
	case body[start] != '{':
		return NotJSON // or a number or the like, which is no better
	}
	var room [48]byte
	members := walkObject(body, start)
	for {
		key, value, ok := members.next(&r.scanner)
		if !ok {
			break
		}
		f, ok := fieldOf(key)
		if !ok {
			f, ok = fieldOf(plain(key, &room))
		}
		if ok {
			r.fields[f] = value
		}
	}
	if members.fault == None && space(body, members.i) < len(body) {
		return NotJSON // something follows the object
	}
	return members.fault
}

// head hashes the fields of the head.
func (r *reader) head(k key) uint64 {
	t := text{key: k}
	t.numbered(tagField, byte(r.family()))
	for f := range headEnd {
		if v := r.fields[f]; !isNull(v) {
			t.numbered(tagField, byte(f))
			t.value(v)
		}
	}
	if is(r.fields[fieldToolChoice], "none") {
		t.numbered(tagField, byte(fieldToolChoice))
	}
	return t.sum()
}
