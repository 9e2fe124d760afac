// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

func write(t testing.TB, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "trace.jsonl")
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func open(t testing.TB, path string) *Trace {
	t.Helper()
	tr, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	return tr
}

func collect(t testing.TB, requests iter.Seq2[Request, error]) []Request {
	t.Helper()
	var all []Request
	for r, err := range requests {
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, r)
	}
	return all
}

const (
	mooncakeLine = `{"timestamp": 27482, "input_length": 600, "output_length": 52, "hash_ids": [46, 47]}`
	chatLine     = `{"timestamp": 1760428436442742, "input": "hello", "output": "hi there", "session_id": "s1"}`
	logLine      = `{"timestamp": 1760428436.5, "body": {"model": "m", "messages": [{"role": "user", "content": "x"}]}}`
)

func TestOpenErrors(t *testing.T) {
	for name, tc := range map[string]struct{ content, want string }{
		"nothing":              {"", "no request in it"},
		"blank lines only":     {"\n \n", "no request in it"},
		"a cut line only":      {`{"timestamp": 1, "inp`, "no request in it"},
		"no JSON":              {"hello\n", ":1: record is no JSON"},
		"no object":            {"[1]\n", ":1: record is a JSON array, want an object"},
		"unknown":              {`{"b":1,"a":2}` + "\n", ":1: no known trace format has the fields [a b]"},
		"no JSON further down": {mooncakeLine + "\n{oops\n" + mooncakeLine, ":2: record is no JSON"},
		"cut in the middle":    {mooncakeLine + "\n{\"timestamp\": 2\n" + mooncakeLine, ":2: record is no JSON"},
		"other format":         {chatLine + "\n" + logLine, ":2: session_id: missing"},

		"mooncake time missing":     {`{"input_length":5,"output_length":1,"hash_ids":[1]}`, ":1: timestamp: missing"},
		"mooncake time text":        {`{"timestamp":"x","input_length":5,"output_length":1,"hash_ids":[1]}`, ":1: timestamp: string cannot be read as float64"},
		"mooncake time huge":        {`{"timestamp":1e300,"input_length":5,"output_length":1,"hash_ids":[1]}`, ":1: timestamp: 1e+300 is out of range"},
		"mooncake unsorted":         {mooncakeLine + "\n" + strings.Replace(mooncakeLine, "27482", "27480", 1), ":2: timestamp: earlier than the record before by 2ms"},
		"mooncake ids alone":        {`{"timestamp":1,"hash_ids":[1]}`, ":1: input_length: missing"},
		"mooncake no output":        {`{"timestamp":1,"input_length":5,"hash_ids":[1]}`, ":1: output_length: missing"},
		"mooncake negative input":   {`{"timestamp":1,"input_length":-5,"output_length":1,"hash_ids":[1]}`, ":1: input_length: -5 is out of range"},
		"mooncake empty input":      {`{"timestamp":1,"input_length":0,"output_length":1,"hash_ids":[]}`, ":1: input_length: 0 is out of range"},
		"mooncake negative output":  {`{"timestamp":1,"input_length":5,"output_length":-1,"hash_ids":[1]}`, ":1: output_length: -1 is out of range"},
		"mooncake no ids":           {`{"timestamp":1,"input_length":5,"output_length":1}`, ":1: hash_ids: 0 ids do not fit an input_length of 5, want 1"},
		"mooncake too few ids":      {`{"timestamp":1,"input_length":513,"output_length":1,"hash_ids":[1]}`, ":1: hash_ids: 1 ids do not fit an input_length of 513, want 2"},
		"mooncake too many ids":     {`{"timestamp":1,"input_length":512,"output_length":1,"hash_ids":[1,2]}`, ":1: hash_ids: 2 ids do not fit"},
		"mooncake negative id":      {`{"timestamp":1,"input_length":5,"output_length":1,"hash_ids":[-1]}`, ":1: hash_ids: number -1 cannot be read as uint64"},
		"mooncake length no number": {`{"timestamp":1,"input_length":"5","output_length":1,"hash_ids":[1]}`, ":1: input_length: string cannot be read as int"},

		"session time missing":   {`{"input":"a","output":"b","session_id":"s"}`, ":1: timestamp: missing"},
		"session input missing":  {chatLine + "\n" + `{"timestamp":1,"output":"b","session_id":"s"}`, ":2: input: missing"},
		"session output missing": {`{"timestamp":1,"input":"a","session_id":"s"}`, ":1: output: missing"},
		"session id missing":     {chatLine + "\n" + `{"timestamp":1,"input":"a","output":"b"}`, ":2: session_id: missing"},
		"session id no text":     {`{"timestamp":1,"input":"a","output":"b","session_id":7}`, ":1: session_id: number cannot be read as string"},
		"session without prompt": {`{"timestamp":1,"input":"","output":"b","session_id":"s"}`, "no request in it"},

		"log time missing":  {`{"body":{"prompt":"x"}}`, ":1: timestamp: missing"},
		"log time null":     {`{"timestamp":null,"body":{"prompt":"x"}}`, ":1: timestamp: missing"},
		"log time no date":  {`{"timestamp":"noon","body":{"prompt":"x"}}`, `:1: timestamp: "noon" is no RFC 3339 time`},
		"log time no time":  {`{"timestamp":[1],"body":{"prompt":"x"}}`, ":1: timestamp: [1] is neither a number nor a text"},
		"log time far away": {`{"timestamp":"9999-01-01T00:00:00Z","body":{"prompt":"x"}}`, "is out of range"},
		"log path":          {`{"timestamp":1,"path":"v1/x","body":{"prompt":"x"}}`, `:1: path: "v1/x" does not start with a slash`},
	} {
		t.Run(name, func(t *testing.T) {
			tr, err := Open(write(t, tc.content))
			if err == nil {
				t.Fatalf("no error, %d requests", tr.Count)
			}
			if !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error %q does not contain %q", err, tc.want)
			}
		})
	}
}

func TestOpenSkips(t *testing.T) {
	log := func(body string) string { return `{"timestamp":1,"path":"/v1/models","body":` + body + `}` + "\n" }
	for name, tc := range map[string]struct {
		content string
		count   int
		want    Skipped
	}{
		"blank lines":    {"\n" + mooncakeLine + "\r\n \t\n" + mooncakeLine, 2, Skipped{BlankLines: 2}},
		"byte mark":      {"\xef\xbb\xbf" + chatLine, 1, Skipped{}},
		"cut mooncake":   {mooncakeLine + "\n" + mooncakeLine[:60], 1, Skipped{CutLines: 1}},
		"cut session":    {chatLine + "\n" + chatLine[:50], 1, Skipped{CutLines: 1}},
		"no last return": {mooncakeLine + "\n" + mooncakeLine, 2, Skipped{}},
		"empty prompt":   {chatLine + "\n" + strings.Replace(chatLine, "hello", "", 1), 1, Skipped{EmptyPrompts: 1}},
		"no bodies":      {logLine + "\n" + log("null") + log(`""`) + log(`" "`) + `{"timestamp":1}`, 1, Skipped{NoBody: 4}},
		"bad bodies":     {logLine + "\n" + log("[]") + log("7") + log(`"{\"mess"`) + log("{}") + log(`{"messages":null}`) + log(`{"prompt":"x","max_tokens":"y"}`), 1, Skipped{BadBodies: 6}},
	} {
		t.Run(name, func(t *testing.T) {
			tr := open(t, write(t, tc.content))
			if tr.Count != tc.count || tr.Skipped != tc.want {
				t.Errorf("%d requests, skipped %+v; want %d, %+v", tr.Count, tr.Skipped, tc.count, tc.want)
			}
			if got := len(collect(t, tr.Requests())); got != tc.count {
				t.Errorf("read %d requests, want %d", got, tc.count)
			}
		})
	}
}

func TestLongLines(t *testing.T) {
	input := strings.Repeat("0123456789abcdef", 40_000)
	long := strings.Replace(chatLine, "hello", input, 1)
	tr := open(t, write(t, chatLine+"\n"+long+"\n"+chatLine+"\n"))
	var texts []string
	for _, r := range collect(t, tr.Requests()) {
		texts = append(texts, r.Text)
	}
	if !slices.Equal(texts, []string{"hello", input, "hello"}) {
		t.Errorf("lines of %d bytes come back as %d texts", len(long), len(texts))
	}

	_, err := Open(write(t, chatLine+"\n"+strings.Repeat("x", maxLine+1)))
	if err == nil || !strings.Contains(err.Error(), ":2: line is longer than") {
		t.Errorf("a line over the bound gives %v", err)
	}
}

func TestMooncake(t *testing.T) {
	tr := open(t, "testdata/mooncake.jsonl")
	if tr.Format != Mooncake || tr.Count != 150 || tr.HasSessions() {
		t.Fatalf("format %q, %d requests, sessions %v", tr.Format, tr.Count, tr.HasSessions())
	}
	all := collect(t, tr.Requests())
	if len(all) != tr.Count {
		t.Fatalf("read %d requests, want %d", len(all), tr.Count)
	}
	if r := all[0]; r.At != 0 || r.InputTokens != 6758 || r.OutputTokens != 500 || len(r.HashIDs) != 14 || r.Path != chatPath {
		t.Errorf("first request is %+v", r)
	}
	if got := all[len(all)-1].At; got != tr.Span {
		t.Errorf("last request at %v, span %v", got, tr.Span)
	}
	if n := len(slices.Collect(tr.Sessions())); n != 0 {
		t.Errorf("%d sessions, want none", n)
	}
	for range tr.Requests() {
		break // leaving early must be safe
	}
}

func TestChatSessions(t *testing.T) {
	tr := open(t, "testdata/agents")
	if tr.Format != ChatSessions || tr.Count != 6+19 || tr.Skipped != (Skipped{EmptyFiles: 1}) {
		t.Fatalf("format %q, %d requests, skipped %+v", tr.Format, tr.Count, tr.Skipped)
	}
	all := collect(t, tr.Requests())
	if !slices.IsSortedFunc(all, func(a, b Request) int { return int(a.At - b.At) }) {
		t.Error("requests are not in order of time")
	}

	sessions := slices.Collect(tr.Sessions())
	if len(sessions) != 2 {
		t.Fatalf("%d sessions, want 2", len(sessions))
	}
	seen := 0
	for _, s := range sessions {
		at := s.Start
		for n := range s.Len {
			r, err := s.Next(nil)
			if err != nil {
				t.Fatal(err)
			}
			if (n == 0) != (r.Think == 0) || r.At != at+r.Think || r.Session != s.ID {
				t.Errorf("%s, request %d: at %v after %v of thinking, the one before at %v", s.ID, n, r.At, r.Think, at)
			}
			at = r.At
			seen++
		}
		if _, err := s.Next(nil); !errors.Is(err, io.EOF) {
			t.Errorf("%s goes on after its end: %v", s.ID, err)
		}
	}
	if seen != tr.Count {
		t.Errorf("sessions hold %d requests, want %d", seen, tr.Count)
	}
	// The recording is out of order; the third record of the coding session is
	// the third by time, too.
	if r := all[2]; r.InputTokens != (5266+3)/4 || !strings.HasPrefix(r.Text, "<pr_description>") {
		t.Errorf("third request has %d tokens", r.InputTokens)
	}
}

func TestSessionsShareOneFile(t *testing.T) {
	line := func(at int, session, input string) string {
		return fmt.Sprintf(`{"timestamp":%d,"input":%q,"output":"","session_id":%q}`, at, input, session) + "\n"
	}
	tr := open(t, write(t, line(50, "b", "b2")+line(20, "a", "a1")+line(10, "b", "b1")+line(20, "a", "a2")))
	var got []string
	for s := range tr.Sessions() {
		for r, err := s.Next(nil); err == nil; r, err = s.Next(nil) {
			got = append(got, fmt.Sprintf("%s %s %s %d", s.ID, r.Text, r.Think, r.OutputTokens))
		}
	}
	want := []string{"b b1 0s 1", "b b2 40µs 1", "a a1 0s 1", "a a2 0s 1"}
	if !slices.Equal(got, want) {
		t.Errorf("sessions read %q, want %q", got, want)
	}
}

func TestRequestLog(t *testing.T) {
	base := time.Date(2026, 1, 31, 12, 0, 0, 0, time.UTC)
	for name, tc := range map[string]struct {
		line string
		want Request
	}{
		"seconds":      {`{"timestamp":1769860801,"body":{"messages":[1234]}}`, Request{At: time.Second, Path: chatPath, InputTokens: 2, OutputTokens: DefaultOutputTokens}},
		"fraction":     {`{"ts":1769860801.25,"body":{"prompt":"ab","max_tokens":7}}`, Request{At: 1250 * time.Millisecond, Path: completionPath, InputTokens: 1, OutputTokens: 7}},
		"milliseconds": {`{"timestamp":1769860801250,"body":{"input":"abcd","max_output_tokens":9}}`, Request{At: 1250 * time.Millisecond, Path: responsesPath, InputTokens: 2, OutputTokens: 9}},
		"microseconds": {`{"timestamp":1769860801250000,"body":"{\"prompt\":[1,2]}"}`, Request{At: 1250 * time.Millisecond, Path: completionPath, InputTokens: 2, OutputTokens: DefaultOutputTokens}},
		"nanoseconds":  {`{"timestamp":1769860801250000000,"path":"/x/v1/messages","body":{"system":"be brief","messages":[1],"max_tokens":3}}`, Request{At: 1250 * time.Millisecond, Path: "/x/v1/messages", InputTokens: 4, OutputTokens: 3}},
		"RFC 3339":     {`{"timestamp":"2026-01-31T13:00:01.25+01:00","body":{"messages":[],"max_tokens":5,"max_completion_tokens":6}}`, Request{At: 1250 * time.Millisecond, Path: chatPath, InputTokens: 1, OutputTokens: 6}},
	} {
		t.Run(name, func(t *testing.T) {
			first := fmt.Sprintf(`{"timestamp":%q,"body":{"prompt":"x"}}`, base.Format(time.RFC3339))
			// The log is out of order: the line that comes first in time is last.
			all := collect(t, open(t, write(t, tc.line+"\n"+first+"\n")).Requests())
			got := all[1]
			if (got.At - tc.want.At).Abs() > time.Microsecond {
				t.Errorf("at %v, want %v", got.At, tc.want.At)
			}
			if got.Path != tc.want.Path || got.InputTokens != tc.want.InputTokens || got.OutputTokens != tc.want.OutputTokens {
				t.Errorf("path %s, %d in, %d out; want %s, %d, %d", got.Path, got.InputTokens, got.OutputTokens,
					tc.want.Path, tc.want.InputTokens, tc.want.OutputTokens)
			}
		})
	}
}

func TestOpenDirectory(t *testing.T) {
	dir := t.TempDir()
	if _, err := Open(dir); err == nil || !strings.Contains(err.Error(), "no .jsonl file in it") {
		t.Errorf("an empty directory gives %v", err)
	}
	for _, name := range []string{"a.jsonl", "b.jsonl"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(mooncakeLine), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := Open(dir); err == nil || !strings.Contains(err.Error(), "name the file instead") {
		t.Errorf("two Mooncake files give %v", err)
	}
	if _, err := Open(filepath.Join(dir, "missing")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a missing file gives %v", err)
	}
}

func TestFileChangedSinceOpen(t *testing.T) {
	for name, line := range map[string]string{"straight": mooncakeLine, "indexed": chatLine} {
		t.Run(name, func(t *testing.T) {
			path := write(t, line+"\n"+line+"\n")
			tr := open(t, path)
			if err := os.WriteFile(path, []byte(line+"\n"+line[:20]), 0o600); err != nil {
				t.Fatal(err)
			}
			read := 0
			var last error
			for _, err := range tr.Requests() {
				read++
				last = err
			}
			if read != 2 || last == nil {
				t.Errorf("%d steps, the last with error %v; want 2 and an error", read, last)
			}
		})
	}
}

func FuzzOpen(f *testing.F) {
	f.Add([]byte(mooncakeLine + "\n" + mooncakeLine[:40]))
	f.Add([]byte(chatLine + "\n\n" + chatLine + "\n"))
	f.Add([]byte(logLine + "\n" + `{"timestamp":"2026-01-31T12:00:00Z","body":"{\"prompt\":[1]}"}`))
	f.Add([]byte(`{"ts":1e11,"body":{"input":[],"stream":false,"":1}}`))
	path := filepath.Join(f.TempDir(), "trace.jsonl")
	f.Fuzz(func(t *testing.T, content []byte) {
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
		tr, err := Open(path)
		if err != nil {
			return
		}
		all := collect(t, tr.Requests())
		if len(all) != tr.Count {
			t.Fatalf("read %d requests, counted %d", len(all), tr.Count)
		}
		var before time.Duration
		for _, r := range all {
			if r.At < before || r.At > tr.Span || r.InputTokens < 1 || r.OutputTokens < 0 {
				t.Fatalf("bad request %+v after %v", r, before)
			}
			before = r.At
			if r.InputTokens < 1<<20 {
				checkForms(t, &r)
			}
		}
		inSessions := 0
		for s := range tr.Sessions() {
			inSessions += s.Len
		}
		if tr.HasSessions() && inSessions != tr.Count {
			t.Fatalf("sessions hold %d of %d requests", inSessions, tr.Count)
		}
	})
}
