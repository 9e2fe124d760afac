// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"encoding/base64"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/capture"
)

// captured is a line with n blocks of hashes from..from+n-1 and a tail.
func captured(micros int64, more string, hashes ...byte) string {
	var raw []byte
	for _, h := range hashes {
		raw = append(raw, h, h, h)
	}
	return fmt.Sprintf(`{"v":1,"salt":"abc","t":%d,"bytes":%d,"blocks":%q%s}`+"\n",
		micros, len(hashes)*capture.BlockBytes+100, base64.StdEncoding.EncodeToString(raw), more)
}

func openText(t *testing.T, text string) (*Trace, error) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "capture.jsonl")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return Open(path)
}

func TestCapturedRequests(t *testing.T) {
	const start = 1760428436442742
	tr, err := openText(t, captured(start+2e6, `,"output_tokens":7,"status":200`, 1, 2, 9)+
		captured(start, `,"max_tokens":55,"unknown":{}`, 1, 2, 3)+
		captured(start+1e6, `,"status":400`, 1)+
		`{"v":1,"salt":"abc","t":1760428436442742,"bytes":0,"blocks":""}`+"\n"+
		`{"v":1,"salt":"abc","t":17604`+"\n"+ // the disk was full
		captured(start+3e6, "", 1, 2, 3)[:50])
	if err != nil {
		t.Fatal(err)
	}
	want := Skipped{Refused: 1, NoBody: 1, CutLines: 2}
	if tr.Format != Capture || tr.Count != 2 || tr.Span != 2*time.Second || tr.Skipped != want || tr.HasSessions() {
		t.Fatalf("%+v", tr)
	}
	var all []Request
	for r, err := range tr.Requests() {
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, r)
	}
	a, b := all[0], all[1]
	if a.At != 0 || b.At != 2*time.Second || a.OutputTokens != 55 || b.OutputTokens != 7 || a.InputTokens != 217 {
		t.Errorf("%+v\n%+v", a, b)
	}
	for _, c := range []struct{ block, blocks, shared int }{
		{64, 3, 2}, {16, 12, 8}, {32, 6, 4}, {128, 1, 1}, {48, 4, 2}, {1, 192, 128}, {200, 0, 0},
	} {
		x, y := a.AppendBlocks(nil, c.block), b.AppendBlocks(nil, c.block)
		shared := 0
		for shared < len(x) && x[shared] == y[shared] {
			shared++
		}
		if len(x) != c.blocks || len(y) != c.blocks || shared != c.shared {
			t.Errorf("blocks of %d tokens: %d and %d, %d shared, want %d, %d shared", c.block, len(x), len(y), shared, c.blocks, c.shared)
		}
	}
	body, err := a.AppendBody(nil, "m")
	if err != nil || strings.Count(string(body), " ") < 200 {
		t.Errorf("body is %s, %v", body, err)
	}
}

// Hashes under different secrets tell nothing of each other.
func TestCapturedSalts(t *testing.T) {
	line := captured(1760428436442742, "", 1, 2, 3)
	tr, err := openText(t, line+strings.Replace(line, "abc", "abd", 1))
	if err != nil {
		t.Fatal(err)
	}
	var blocks [][]uint64
	for r := range tr.Requests() {
		blocks = append(blocks, r.AppendBlocks(nil, 16))
	}
	if len(blocks[0]) != 12 || len(blocks[1]) != 12 || slices.ContainsFunc(blocks[0], func(h uint64) bool { return slices.Contains(blocks[1], h) }) {
		t.Errorf("%v and %v", blocks[0], blocks[1])
	}
}

func TestBadCaptures(t *testing.T) {
	good := captured(1760428436442742, "", 1)
	for _, c := range []struct{ name, line, want string }{
		{"version", strings.Replace(good, `"v":1`, `"v":2`, 1), "version 2"},
		{"salt", strings.Replace(good, `abc`, ``, 1), "salt"},
		{"time", strings.Replace(good, `1760428436442742`, `-1`, 1), "t: -1"},
		{"no time", strings.Replace(good, `"t":1760428436442742,`, ``, 1), "t: 0"},
		{"not base64", strings.Replace(good, `AQEB`, `AQE!`, 1), "blocks: not base64"},
		{"too many blocks", strings.Replace(good, `AQEB`, strings.Repeat("AQEB", 3), 1), "do not fit"},
		{"negative length", strings.Replace(good, `"bytes":`, `"bytes":-`, 1), "out of range"},
		{"output", strings.Replace(good, `}`, `,"output_tokens":-1}`, 1), "output_tokens"},
		{"type", strings.Replace(good, `"t":1760428436442742`, `"t":"x"`, 1), "t: string"},
		{"no JSON", "{]\n", "no JSON"},
	} {
		_, err := openText(t, good+c.line)
		if err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), ":2:") {
			t.Errorf("%s: error is %v, want line 2 and %q", c.name, err, c.want)
		}
	}
}

func FuzzDecodeCaptured(f *testing.F) {
	f.Add([]byte(captured(1760428436442742, `,"output_tokens":7,"max_tokens":1`, 1, 2)))
	f.Add([]byte(`{"v":1,"salt":"abc","t":9223372036854775807,"bytes":2147483647,"blocks":"AAAA"}`))
	f.Add([]byte(`{"v":1,"salt":"abc","t":1,"bytes":1,"blocks":"AA=="}`))
	f.Fuzz(func(t *testing.T, line []byte) {
		r, err := decodeCaptured(line)
		if err != nil {
			return
		}
		if r.InputTokens <= 0 || r.OutputTokens < 0 || len(r.HashIDs)*blockTokens > r.InputTokens || r.stamp <= 0 {
			t.Fatalf("%+v", r)
		}
		if n := len(r.AppendBlocks(nil, 16)); n != 4*len(r.HashIDs) {
			t.Fatalf("%d blocks of 16 tokens for %d ids", n, len(r.HashIDs))
		}
	})
}
