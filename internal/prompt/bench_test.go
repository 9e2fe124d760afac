// SPDX-License-Identifier: Apache-2.0

package prompt

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/cespare/xxhash/v2"
)

// chatBody makes a chat of about size bytes in so many messages. line is repeated to fill them; the
// line breaks and quotes in it become escapes.
func chatBody(size, messages int, line string) []byte {
	type message struct {
		Role    string `json:"role"`
		Content string `json:"content"`
	}
	text := strings.Repeat(line, size/messages/len(line)+1)
	chat := struct {
		Model    string    `json:"model"`
		Messages []message `json:"messages"`
		Stream   bool      `json:"stream"`
	}{Model: "meta-llama/Llama-3.1-8B-Instruct", Stream: true}
	for i := range messages {
		role := []string{"user", "assistant"}[i%2]
		if i == 0 {
			role = "system"
		}
		chat.Messages = append(chat.Messages, message{role, text[:size/messages-40]})
	}
	body, err := json.Marshal(chat)
	if err != nil {
		panic(err)
	}
	return body
}

const (
	proseLine = "the quick brown fox jumps over the lazy dog, and then it sleeps in the sun "
	linesLine = "the quick brown fox jumps over the lazy dog, and then it sleeps in the su\n"
	quoteLine = "{\"path\": \"src/a.go\", \"line\": 12, \"text\": \"return err\"}\n"
	cjkLine   = "敏捷的棕色狐狸跳过了懒狗，然后在阳光下睡觉。"
)

func BenchmarkRead(b *testing.B) {
	escapeASCII := func(body []byte) []byte { // as Python's json.dumps does by default
		var out strings.Builder
		for _, r := range string(body) {
			if r < 0x80 {
				out.WriteRune(r)
			} else {
				fmt.Fprintf(&out, `\u%04x`, r)
			}
		}
		return []byte(out.String())
	}
	ids := make([]string, 128<<10)
	for i := range ids {
		ids[i] = fmt.Sprint(i * 7919 % 151_000)
	}
	image := base64.StdEncoding.EncodeToString(make([]byte, 3<<20))
	tool := `{"type": "function", "function": {"name": "f", "description": "does it", "parameters": ` +
		`{"type": "object", "properties": {"path": {"type": "string"}, "line": {"type": "integer"}}}}}`
	for _, bench := range []struct {
		name string
		api  API
		body []byte
	}{
		{"2KiB", Chat, chatBody(2<<10, 4, linesLine)},
		{"2KiB/8messages", Chat, chatBody(2<<10, 8, linesLine)},
		{"32KiB", Chat, chatBody(32<<10, 16, linesLine)},
		{"512KiB", Chat, chatBody(512<<10, 32, linesLine)},
		{"512KiB/plain", Chat, chatBody(512<<10, 32, proseLine)},
		{"512KiB/quotes", Chat, chatBody(512<<10, 32, quoteLine)},
		{"512KiB/chinese", Chat, chatBody(512<<10, 32, cjkLine)},
		{"512KiB/ascii", Chat, escapeASCII(chatBody(256<<10, 32, cjkLine))},
		{"tools", Chat, []byte(`{"tools": [` + strings.Repeat(tool+",", 199) + tool + `], "messages": [{"role": "user", "content": "hi"}]}`)},
		{"image", Chat, []byte(`{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,` + image + `"}}]}]}`)},
		{"ids", Completions, []byte(`{"prompt":[` + strings.Join(ids, ",") + `]}`)},
	} {
		b.Run(bench.name, func(b *testing.B) {
			var p Prompt
			if fault := p.Read(bench.api, bench.body, true, 1); fault != None {
				b.Fatal(fault)
			}
			// Both in turns, and the best of each: so a neighbour on the machine slows down neither.
			const enough = 256 << 10
			rounds := max(1, enough/len(bench.body))
			best := func(least float64, f func()) float64 {
				start := time.Now()
				for range rounds {
					f()
				}
				return min(least, float64(time.Since(start))/float64(rounds))
			}
			read, bare := math.Inf(1), math.Inf(1)
			var sum uint64
			b.SetBytes(int64(len(bench.body) * rounds))
			b.ReportAllocs()
			for b.Loop() {
				read = best(read, func() { p.Read(bench.api, bench.body, true, 1) })
				bare = best(bare, func() { sum += xxhash.Sum64(bench.body) })
			}
			b.ReportMetric(read/bare, "x-of-xxhash")
			b.ReportMetric(read-bare, "ns-beyond-xxhash")
			b.ReportMetric(0, "ns/op")
		})
	}
}
