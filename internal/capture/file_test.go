// SPDX-License-Identifier: Apache-2.0

package capture_test

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/capture"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/trace"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func newFile(t *testing.T, path string, o capture.Options) (*capture.File, *observer.ObservedLogs) {
	t.Helper()
	core, logs := observer.New(zapcore.InfoLevel)
	logger := zap.New(core)
	f := capture.New(path, o, func() *zap.Logger { return logger })
	t.Cleanup(f.Close)
	return f, logs
}

func record(i int, chain ...uint64) capture.Record {
	return capture.Record{Chain: chain, Line: capture.Line{
		Micros: 1760428436442742 + int64(i), API: "chat", Model: "m", Bytes: len(chain)*capture.BlockBytes + 1,
		Replica: "a:8000", Status: 200,
	}}
}

func await(t *testing.T, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !is(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("waited in vain for %s", what)
		}
	}
}

func TestWhatIsWrittenCanBeRead(t *testing.T) {
	path := filepath.Join(t.TempDir(), "new", "capture.jsonl")
	f, logs := newFile(t, path, capture.Options{})
	f.Write(record(0, 1, 2, 3))
	f.Write(record(1, 1, 2, 4))
	f.Close()
	f.Write(record(2, 1)) // too late
	if s := f.Stats(); s != (capture.Stats{Written: 2}) {
		t.Errorf("stats are %+v", s)
	}
	if logs.Len() > 0 {
		t.Errorf("logged %v", logs.All())
	}
	if info, err := os.Stat(path); err != nil || runtime.GOOS != "windows" && info.Mode().Perm() != 0o600 {
		t.Errorf("mode is %v, %v", info.Mode(), err)
	}
	tr, err := trace.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	var all [][]uint64
	for r, err := range tr.Requests() {
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, r.AppendBlocks(nil, 64))
	}
	if len(all) != 2 || len(all[0]) != 3 || len(all[1]) != 3 || all[0][1] != all[1][1] || all[0][2] == all[1][2] {
		t.Errorf("blocks are %x", all)
	}
}

// The same prompt has other hashes in each file, and none that the router uses.
func TestSecrets(t *testing.T) {
	dir := t.TempDir()
	var texts []string
	for i := range 2 {
		path := filepath.Join(dir, fmt.Sprint(i))
		f, _ := newFile(t, path, capture.Options{})
		f.Write(record(0, 0x0102030405060708))
		f.Close()
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		_, blocks, _ := strings.Cut(string(b), `"blocks":"`)
		texts = append(texts, blocks[:4])
	}
	if texts[0] == texts[1] || texts[0] == "CAcG" {
		t.Errorf("hashes are %q", texts)
	}
}

func TestRotationIsBounded(t *testing.T) {
	dir := t.TempDir()
	f, _ := newFile(t, filepath.Join(dir, "c.jsonl"), capture.Options{RollSize: capture.MinRollSize, RollKeep: 2})
	chain := make([]uint64, 1<<16) // 256 KiB a line
	for i := range 30 {
		f.Write(record(i, chain...))
		await(t, "the line", func() bool { s := f.Stats(); return s.Written+s.Failed+s.Full == uint64(i+1) })
	}
	f.Close()
	if s := f.Stats(); s.Written != 30 {
		t.Errorf("stats are %+v", s)
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) > 3 {
		t.Errorf("%d files, %v", len(entries), err)
	}
	for _, e := range entries {
		if info, err := e.Info(); err != nil || info.Size() > capture.MinRollSize || runtime.GOOS != "windows" && info.Mode().Perm() != 0o600 {
			t.Errorf("%s: %d bytes, mode %v, %v", e.Name(), info.Size(), info.Mode(), err)
		}
	}
	if tr, err := trace.Open(dir); err != nil || tr.Format != trace.Capture {
		t.Errorf("reading all files: %v", err)
	}
}

func TestDiskFull(t *testing.T) {
	if _, err := os.Stat("/dev/full"); err != nil {
		t.Skip("there is no /dev/full")
	}
	f, logs := newFile(t, "/dev/full", capture.Options{})
	for i := range 50 {
		f.Write(record(i, 1, 2))
	}
	f.Close()
	if s := f.Stats(); s != (capture.Stats{Failed: 50}) {
		t.Errorf("stats are %+v", s)
	}
	if logs.Len() != 1 || logs.All()[0].Level != zapcore.ErrorLevel {
		t.Errorf("logged %v", logs.All())
	}
}

// A path that can't be written is told of at Start; it may appear later.
func TestPathAppearsLater(t *testing.T) {
	dir := t.TempDir()
	blocked := filepath.Join(dir, "sub")
	if err := os.WriteFile(blocked, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	f, logs := newFile(t, filepath.Join(blocked, "c.jsonl"), capture.Options{})
	f.Start()
	await(t, "the error", func() bool { return logs.Len() == 1 })
	f.Write(record(0))
	await(t, "the failure", func() bool { return f.Stats().Failed == 1 })
	if err := os.Remove(blocked); err != nil {
		t.Fatal(err)
	}
	f.Write(record(1))
	await(t, "the line", func() bool { return f.Stats().Written == 1 })
	f.Close()
	if logs.Len() != 2 || logs.All()[1].Level != zapcore.InfoLevel {
		t.Errorf("logged %v", logs.All())
	}
}

// A line that a crash cut short does not take the next one with it.
func TestGoesOnAfterACrash(t *testing.T) {
	path := filepath.Join(t.TempDir(), "c.jsonl")
	if err := os.WriteFile(path, []byte(`{"v":1,"salt":"x","t":1760428436442742,"bytes":1,"blocks":""}`+"\n"+`{"v":1,"sal`), 0o600); err != nil {
		t.Fatal(err)
	}
	f, _ := newFile(t, path, capture.Options{})
	f.Write(record(0, 1))
	f.Close()
	tr, err := trace.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	if tr.Count != 2 || tr.Skipped.CutLines != 1 {
		t.Errorf("%+v", tr)
	}
}

// Whoever writes never waits, and each line is counted once.
func TestManyWriters(t *testing.T) {
	path := filepath.Join(t.TempDir(), "c.jsonl")
	f, _ := newFile(t, path, capture.Options{})
	var wg sync.WaitGroup
	const writers, each = 8, 5000
	for range writers {
		wg.Go(func() {
			for i := range each {
				f.Write(record(i, 1, 2, 3))
				if i%1000 == 0 {
					f.Configure(capture.Options{RollKeep: 1 + i})
				}
			}
		})
	}
	wg.Wait()
	f.Close()
	s := f.Stats()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if lines := uint64(bytes.Count(b, []byte("\n"))); s.Written+s.Full+s.Failed != writers*each || lines != s.Written {
		t.Errorf("%d lines, stats %+v", lines, s)
	}
}

func TestTooMuchAtOnceIsDropped(t *testing.T) {
	f, _ := newFile(t, filepath.Join(t.TempDir(), "c.jsonl"), capture.Options{})
	f.Write(capture.Record{Chain: make([]uint64, 1<<21)})
	if s := f.Stats(); s.Full != 1 {
		t.Errorf("stats are %+v", s)
	}
}

// The figure in docs/capture.md: bytes for a request of 8,000 tokens.
func TestSize(t *testing.T) {
	path := filepath.Join(t.TempDir(), "c.jsonl")
	f, _ := newFile(t, path, capture.Options{})
	r := record(0, make([]uint64, 125)...)
	r.Policy, r.Reason, r.Prompt, r.Hit, r.Attempts, r.MaxTokens = "kv_cache_aware", "match", 8000, 4096, 1, 512
	n, ms := 8000, 1234.5
	r.PromptTokens, r.CachedTokens, r.OutputTokens, r.TTFTMillis, r.TotalMillis = &n, &n, &n, &ms, &ms
	f.Write(r)
	f.Close()
	info, err := os.Stat(path)
	if err != nil || info.Size() > 1000 {
		t.Errorf("%d bytes, %v; docs/capture.md says less than 1,000", info.Size(), err)
	}
}

func BenchmarkWrite(b *testing.B) {
	f := capture.New(filepath.Join(b.TempDir(), "c.jsonl"), capture.Options{}, zap.NewNop)
	defer f.Close()
	r := record(0, make([]uint64, 125)...)
	b.ReportAllocs()
	for b.Loop() {
		f.Write(r)
	}
}
