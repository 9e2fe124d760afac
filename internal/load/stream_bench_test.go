// SPDX-License-Identifier: Apache-2.0

package load

import (
	"bufio"
	"bytes"
	"encoding/json"
	"strings"
	"testing"
	"time"
)

// BenchmarkReadStream reports how much of the time that decoding every event
// would take is needed to read a stream of 500.
func BenchmarkReadStream(b *testing.B) {
	chunk := `data: {"id":"chatcmpl-0","object":"chat.completion.chunk","created":1760428436,"model":"m","choices":[{"index":0,"delta":{"content":" word"},"logprobs":null,"finish_reason":null,"token_ids":null}]}` + "\n\n"
	stream := []byte(roleChunk + strings.Repeat(chunk, 500) + usageChunk + doneChunk)
	b.SetBytes(int64(len(stream)))
	b.ReportAllocs()
	for b.Loop() {
		var a answer
		if err := a.readStream(bytes.NewReader(stream)); err != nil {
			b.Fatal(err)
		}
	}
	ours := b.Elapsed() / time.Duration(b.N)

	start := time.Now()
	lines := bufio.NewScanner(bytes.NewReader(stream))
	for lines.Scan() {
		if data, isData := bytes.CutPrefix(lines.Bytes(), dataField); isData {
			var event usageEvent
			_ = json.Unmarshal(data, &event)
		}
	}
	b.ReportMetric(float64(ours)/float64(time.Since(start)), "x-of-decoding")
}
