// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

func TestAddSalt(t *testing.T) {
	for _, c := range []struct{ name, body, want string }{
		{"chat", `{"messages":[{"role":"system","content":"a"},{"role":"user","content":"b"}]}`,
			`{"messages":[{"content":"~a","role":"system"},{"content":"b","role":"user"}]}`},
		{"parts", `{"messages":[{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}]}`,
			`{"messages":[{"content":[{"text":"~a","type":"text"},{"text":"b","type":"text"}],"role":"user"}]}`},
		{"completion", `{"prompt":"a","seed":12345678901234567890}`, `{"prompt":"~a","seed":12345678901234567890}`},
		{"completions", `{"prompt":["a","b"]}`, `{"prompt":["~a","~b"]}`},
		{"token ids", `{"prompt":[1,2]}`, `{"prompt":[126,1,2]}`},
		{"lists of token ids", `{"prompt":[[1],[2]]}`, `{"prompt":[[126,1],[126,2]]}`},
		{"response", `{"input":"a","model":"m"}`, `{"input":"~a","model":"m"}`},
		{"empty", `{"messages":[]}`, `{"messages":[]}`},
		{"no content", `{"messages":[{"role":"user","content":null}]}`, `{"messages":[{"content":null,"role":"user"}]}`},
		{"no prompt", `{"model":"m"}`, `{"model":"m"}`},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := addSalt([]byte(c.body), "~")
			if err != nil || string(got) != c.want {
				t.Errorf("got %s, %v; want %s", got, err, c.want)
			}
		})
	}
	if _, err := addSalt([]byte(`[`), "~"); err == nil {
		t.Error("no error for what is no JSON")
	}
}

func TestModelOf(t *testing.T) {
	for _, c := range []struct {
		name, page string
		status     int
		want, err  string
	}{
		{"first", `{"data":[{"id":"a"},{"id":"b"}]}`, 200, "a", ""},
		{"none", `{"data":[]}`, 200, "", "lists no model"},
		{"no JSON", `<html>`, 200, "", "/v1/models: invalid character"},
		{"refused", ``, 401, "", "401 Unauthorized"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				w.WriteHeader(c.status)
				w.Write([]byte(c.page))
			}))
			defer s.Close()
			defer http.DefaultClient.CloseIdleConnections()
			got, err := modelOf(t.Context(), s.Listener.Addr().String())
			if got != c.want || (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
				t.Errorf("got %q, %v; want %q, %q", got, err, c.want, c.err)
			}
		})
	}
}
