// SPDX-License-Identifier: Apache-2.0

package kvevents

import (
	"bytes"
	"encoding/json"
	"slices"
	"testing"
)

// FuzzAnswer reads what engines answer about tokens. Whatever it is, the tokens read are those that are
// there, and never none without an error.
func FuzzAnswer(f *testing.F) {
	for _, seed := range []string{
		`{"request_id":"x","token_ids":[1,2,3,4],"features":null,"sampling_params":{}}`,
		`[{"token_ids":[1,2,3,4]},{"token_ids":[5]}]`,
		`{"count":4,"max_model_len":4096,"tokens":[1,2,3,4],"token_strs":null}`,
		`{"token_ids":[1,2],"features":{"mm_hashes":{"image":["a"]}}}`,
		`{"token_ids":[1,2],"features":{"mm_hashes":{}}}`,
		`{"token_ids":[4294967295,4294967296]}`,
		`{"token_ids":[-1]}`, `{"token_ids":[1.0]}`, `{"token_ids":[1e3]}`, `{"token_ids":null,"tokens":[7]}`,
		`{"TOKEN_IDS":[1],"tokens":[2]}`, `[]`, ` [{}]`, `{}`, `null`, `[null]`, `"x"`, ``, "\xef\xbb\xbf{}", `{"tokens":[1,2`,
		`{"tokens":[[1]]}`, `<html>502 Bad Gateway</html>`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		tokens, err := readTokens(bytes.NewReader(body))
		if (err == nil) != (len(tokens) > 0) {
			t.Fatalf("%d tokens, error %v", len(tokens), err)
		}
		if err != nil {
			return
		}
		again, err := json.Marshal(map[string]any{"token_ids": tokens})
		if err != nil {
			t.Fatal(err)
		}
		if same, err := readTokens(bytes.NewReader(again)); err != nil || !slices.Equal(same, tokens) {
			t.Fatalf("%v was read, and then %v, %v", tokens, same, err)
		}
	})
}
