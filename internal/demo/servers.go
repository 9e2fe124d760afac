// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"time"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/load"
)

// modelOf asks a server for the first model that it lists.
func modelOf(ctx context.Context, addr string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr+"/v1/models", nil)
	if err != nil {
		return "", err
	}
	response, err := http.DefaultClient.Do(req)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return "", fmt.Errorf("/v1/models answered %s", response.Status)
	}
	var models struct {
		Data []struct {
			ID string `json:"id"`
		} `json:"data"`
	}
	if err := json.NewDecoder(io.LimitReader(response.Body, 1<<20)).Decode(&models); err != nil {
		return "", fmt.Errorf("/v1/models: %w", err)
	}
	if len(models.Data) == 0 {
		return "", errors.New("/v1/models lists no model")
	}
	return models.Data[0].ID, nil
}

// salted puts the same few random characters at the head of every prompt, so
// that a run finds nothing in caches of what runs before it left there. Within
// the run prompts share what they shared.
type salted struct {
	salt string
	next *http.Transport
}

func newSalted() *salted {
	return &salted{
		salt: fmt.Sprintf("%016x%016x\n", rand.Uint64(), rand.Uint64()),
		next: &http.Transport{
			MaxIdleConns:        load.DefaultMaxInFlight,
			MaxIdleConnsPerHost: load.DefaultMaxInFlight,
			IdleConnTimeout:     4 * time.Second,
			DisableCompression:  true,
		},
	}
}

// RoundTrip implements http.RoundTripper.
func (s *salted) RoundTrip(r *http.Request) (*http.Response, error) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return nil, err
	}
	r.Body.Close()
	if body, err = addSalt(body, s.salt); err != nil {
		return nil, err
	}
	r = r.Clone(r.Context())
	r.Body, r.ContentLength, r.GetBody = io.NopCloser(bytes.NewReader(body)), int64(len(body)), nil
	return s.next.RoundTrip(r)
}

// addSalt puts text in front of the prompt of a request body, wherever that is.
func addSalt(body []byte, salt string) ([]byte, error) {
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(body, &fields); err != nil {
		return nil, fmt.Errorf("request body: %w", err)
	}
	for _, name := range []string{"messages", "prompt", "input"} {
		value, has := fields[name]
		if !has {
			continue
		}
		var prompt any
		d := json.NewDecoder(bytes.NewReader(value))
		d.UseNumber()
		if err := d.Decode(&prompt); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		salted, err := json.Marshal(saltPrompt(prompt, salt))
		if err != nil {
			return nil, err
		}
		fields[name] = salted
	}
	return json.Marshal(fields)
}

// saltPrompt salts a text, the first message of a chat (which is a system
// prompt or what the user said first), each of a list of texts, or a list of
// token ids.
func saltPrompt(prompt any, salt string) any {
	switch p := prompt.(type) {
	case string:
		return salt + p
	case map[string]any: // a message or a part of one
		for _, name := range []string{"content", "text"} {
			if inside, has := p[name]; has {
				p[name] = saltPrompt(inside, salt)
			}
		}
		return p
	case []any:
		return saltList(p, salt)
	}
	return prompt
}

func saltList(list []any, salt string) any {
	if len(list) == 0 {
		return list
	}
	switch list[0].(type) {
	case json.Number: // token ids
		ids := make([]any, 0, len(salt)+len(list))
		for _, c := range salt {
			ids = append(ids, int(c))
		}
		return append(ids, list...)
	case map[string]any: // messages or parts
		list[0] = saltPrompt(list[0], salt)
	default: // texts, or lists of ids
		for i := range list {
			list[i] = saltPrompt(list[i], salt)
		}
	}
	return list
}
