// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"slices"
	"strings"
	"testing"
	"time"
)

var smallWorkload = Workload{Seed: 7, Chats: 12, SystemPrompts: 2, SystemTokens: 300, UserTokens: 20, AnswerTokens: 30, OneOffs: 3, OneOffTokens: 500}

// play walks all sessions to their end and returns their requests.
func play(t *testing.T, w Workload, answer string) map[string][]Request {
	t.Helper()
	all := make(map[string][]Request)
	var before time.Duration
	for s := range w.Sessions() {
		if s.Start < before {
			t.Errorf("%s starts at %v, the one before at %v", s.ID, s.Start, before)
		}
		before = s.Start
		for {
			r, err := s.Next([]byte(answer))
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			all[s.ID] = append(all[s.ID], r)
		}
		if len(all[s.ID]) != s.Len {
			t.Errorf("%s has %d requests, says %d", s.ID, len(all[s.ID]), s.Len)
		}
	}
	return all
}

func TestWorkload(t *testing.T) {
	sessions := play(t, smallWorkload, `as \"received\"`)
	if len(sessions) != 15 {
		t.Fatalf("%d sessions, want 15", len(sessions))
	}
	systems := make(map[string]int)
	turns := 0
	for id, requests := range sessions {
		for n, r := range requests {
			checkForms(t, &r)
			var messages []struct{ Role, Content string }
			if err := json.Unmarshal(r.Messages, &messages); err != nil {
				t.Fatal(err)
			}
			if strings.HasPrefix(id, "one-off") {
				if len(messages) != 1 || len(messages[0].Content) < 250*BytesPerToken {
					t.Errorf("%s: %d messages, want one long one", id, len(messages))
				}
				continue
			}
			turns++
			if len(messages) != 2+2*n || messages[0].Role != "system" || messages[len(messages)-1].Role != "user" {
				t.Fatalf("%s, turn %d: %d messages", id, n, len(messages))
			}
			systems[messages[0].Content]++
			if n == 0 {
				continue
			}
			if r.Think <= 0 || r.Think > 16*time.Second || r.At != requests[n-1].At+r.Think {
				t.Errorf("%s, turn %d: at %v after %v", id, n, r.At, r.Think)
			}
			if got := messages[len(messages)-2]; got.Role != "assistant" || got.Content != `as "received"` {
				t.Errorf("%s, turn %d: repeats the answer as %+v", id, n, got)
			}
			if prefix := bytes.TrimSuffix(requests[n-1].Messages, []byte("]")); !bytes.HasPrefix(r.Messages, prefix) {
				t.Errorf("%s, turn %d does not continue the turn before", id, n)
			}
		}
	}
	if len(systems) != 2 {
		t.Errorf("%d system prompts, want 2", len(systems))
	}
	if turns < 30 {
		t.Errorf("%d turns in 12 chats", turns)
	}
}

func TestWorkloadIsSeeded(t *testing.T) {
	body := func(w Workload) string {
		var all bytes.Buffer
		for _, r := range collect(t, w.Requests()) {
			all.WriteString(r.Session)
			all.WriteString(r.At.String())
			all.Write(r.Messages)
		}
		return all.String()
	}
	other := smallWorkload
	other.Seed++
	if first, second := body(smallWorkload), body(smallWorkload); first != second {
		t.Error("equal seeds make different traffic")
	}
	if body(smallWorkload) == body(other) {
		t.Error("different seeds make equal traffic")
	}
}

func TestWorkloadDefaults(t *testing.T) {
	n := 0
	for s := range (Workload{Turns: -1, Think: -1}).Sessions() {
		if s.Len < 1 || s.Len > 11 {
			t.Errorf("%s has %d turns", s.ID, s.Len)
		}
		n++
	}
	if n != 50 {
		t.Errorf("%d sessions by default, want 40 chats and 10 single prompts", n)
	}
	for s := range (Workload{Chats: 4, OneOffs: -1}).Sessions() {
		if !strings.HasPrefix(s.ID, "chat-") {
			t.Errorf("%s in a workload without single prompts", s.ID)
		}
	}
}

func TestMerge(t *testing.T) {
	tr := open(t, "testdata/agents")
	key := func(r Request) string { return r.At.String() + r.Session + r.Text }
	var merged, direct []string
	for _, r := range collect(t, Merge(tr.Sessions())) {
		merged = append(merged, key(r))
	}
	for _, r := range collect(t, tr.Requests()) {
		direct = append(direct, key(r))
	}
	if !slices.Equal(merged, direct) {
		t.Errorf("merged sessions are not the trace: %d and %d requests", len(merged), len(direct))
	}

	sorted := collect(t, smallWorkload.Requests())
	if !slices.IsSortedFunc(sorted, func(a, b Request) int { return int(a.At - b.At) }) {
		t.Error("generated requests are not in order of time")
	}
	for range smallWorkload.Requests() {
		break
	}
}
