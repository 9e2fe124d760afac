// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"path/filepath"
	"slices"
	"time"
)

// Skipped counts what [Open] left out of a trace.
type Skipped struct {
	// BlankLines hold nothing but white space.
	BlankLines int `json:"blank_lines"`
	// CutLines end with the file in the middle of a record: a log that was copied
	// while it was written. In a capture they may be anywhere: its disk was full.
	CutLines int `json:"cut_lines"`
	// EmptyPrompts are session records whose input is empty.
	EmptyPrompts int `json:"empty_prompts"`
	// NoBody are logged requests without a body, such as GET /v1/models, and
	// captured ones without a prompt.
	NoBody int `json:"no_body"`
	// BadBodies are logged requests whose body is no JSON object (often cut off
	// by the logger) or holds no prompt.
	BadBodies int `json:"bad_bodies"`
	// Refused are captured requests that a replica answered with an error.
	Refused int `json:"refused"`
	// EmptyFiles of a directory hold no request.
	EmptyFiles int `json:"empty_files"`
}

// Trace is a recorded trace on disk, checked and ready to be read any number of
// times. Its memory is bounded by the longest line, and for formats that may be
// out of order by 32 bytes for each request.
type Trace struct {
	// Format is the format that was recognised.
	Format Format
	// Count is the number of requests.
	Count int
	// Span is the time from the first request to the last.
	Span time.Duration
	// Skipped counts what was left out.
	Skipped Skipped

	files    []string
	first    time.Duration // stamp of the first request
	index    []place       // in order of time; empty when Format is ordered
	sessions []sessionIndex
}

// place says where a record stands.
type place struct {
	stamp   time.Duration
	offset  int64
	size    int32
	file    int32
	session int32
}

// sessionIndex lists a session's records, as positions in the index.
type sessionIndex struct {
	id      string
	records []int32
}

// Open checks a trace from its first line to its last, so that a replay does not
// fail half-way, and recognises its [Format] by the first record. path is a file
// of JSON lines or a directory, of which all files ending in .jsonl are read as
// one trace.
//
// An error names file, line and field. It is an error when a record is no JSON,
// lacks a time, a length or (session traces) a session, has a negative length or
// a number of hash ids that does not fit its length, is of another format than
// the first, or is earlier than the one before it in a [Mooncake] trace (other
// formats are sorted). What is left out and counted instead is told by
// [Skipped].
func Open(path string) (*Trace, error) {
	files, err := filesOf(path)
	if err != nil {
		return nil, err
	}
	t := &Trace{files: files}
	c := checker{Trace: t, sessionNumber: make(map[string]int32)}
	for n := range files {
		if err := c.checkFile(int32(n)); err != nil {
			return nil, err
		}
	}
	if t.Count == 0 {
		return nil, fmt.Errorf("%s: no request in it", path)
	}
	t.first, t.Span = c.first, c.last-c.first
	t.sortIndex()
	return t, nil
}

func filesOf(path string) ([]string, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if !info.IsDir() {
		return []string{path}, nil
	}
	entries, err := os.ReadDir(path)
	if err != nil {
		return nil, err
	}
	var files []string
	for _, entry := range entries {
		if !entry.IsDir() && filepath.Ext(entry.Name()) == ".jsonl" {
			files = append(files, filepath.Join(path, entry.Name()))
		}
	}
	if len(files) == 0 {
		return nil, fmt.Errorf("%s: no .jsonl file in it", path)
	}
	return files, nil
}

// checker is the state of the pass that Open makes over a trace.
type checker struct {
	*Trace
	sessionNumber map[string]int32
	first, last   time.Duration
}

func (c *checker) checkFile(n int32) error {
	name := c.files[n]
	file, err := os.Open(name)
	if err != nil {
		return err
	}
	defer file.Close()

	before := c.Count
	lines := newLineReader(file)
	for {
		line, err := lines.next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return errAt(name, lines.number, err)
		}
		if err := c.checkLine(line, lines, n); err != nil {
			return errAt(name, lines.number, err)
		}
	}
	if c.Count == before {
		c.Skipped.EmptyFiles++
	}
	return nil
}

func (c *checker) checkLine(line []byte, at *lineReader, file int32) error {
	if len(line) == 0 {
		c.Skipped.BlankLines++
		return nil
	}
	r, err := c.decode(line)
	switch {
	case err == nil:
	case errors.Is(err, errEmptyPrompt):
		c.Skipped.EmptyPrompts++
		return nil
	case errors.Is(err, errNoBody):
		c.Skipped.NoBody++
		return nil
	case errors.Is(err, errBadBody):
		c.Skipped.BadBodies++
		return nil
	case errors.Is(err, errRefused):
		c.Skipped.Refused++
		return nil
	case errors.Is(err, errTorn), at.cut && isCut(line):
		c.Skipped.CutLines++
		return nil
	default:
		return err
	}
	return c.add(r, at, file)
}

// decode reads a line, and recognises the trace's format by the first.
func (c *checker) decode(line []byte) (record, error) {
	if c.Format == "" {
		format, err := recognise(line)
		if err != nil {
			return record{}, err
		}
		if format.ordered() && len(c.files) > 1 {
			return record{}, fmt.Errorf("a %s trace is one file; name the file instead of the directory", format)
		}
		c.Format = format
	}
	return c.Format.decode(line)
}

func (c *checker) add(r record, at *lineReader, file int32) error {
	if c.Format.ordered() {
		if c.Count > 0 && r.stamp < c.last {
			return fmt.Errorf("timestamp: earlier than the record before by %v; sort the file by time", c.last-r.stamp)
		}
	} else {
		c.index = append(c.index, place{
			stamp: r.stamp, offset: at.offset, size: int32(at.size), file: file,
			session: c.numberOf(r.Session),
		})
	}
	if c.Count == 0 {
		c.first, c.last = r.stamp, r.stamp
	}
	c.first, c.last = min(c.first, r.stamp), max(c.last, r.stamp)
	c.Count++
	return nil
}

// numberOf numbers sessions; requests without one have -1.
func (c *checker) numberOf(session string) int32 {
	if session == "" {
		return -1
	}
	n, known := c.sessionNumber[session]
	if !known {
		n = int32(len(c.sessions))
		c.sessionNumber[session] = n
		c.sessions = append(c.sessions, sessionIndex{id: session})
	}
	return n
}

// sortIndex puts records in order of time, and sessions in order of their first
// record.
func (t *Trace) sortIndex() {
	slices.SortStableFunc(t.index, func(a, b place) int { return cmp.Compare(a.stamp, b.stamp) })
	for i, at := range t.index {
		if at.session >= 0 {
			s := &t.sessions[at.session]
			s.records = append(s.records, int32(i))
		}
	}
	slices.SortFunc(t.sessions, func(a, b sessionIndex) int { return cmp.Compare(a.records[0], b.records[0]) })
}

// HasSessions tells whether the trace knows which requests follow each other.
func (t *Trace) HasSessions() bool { return len(t.sessions) > 0 }

// Requests returns all requests in order of arrival, read as they are asked for.
// After an error, which only a file that changed since Open can cause, the
// sequence ends.
func (t *Trace) Requests() iter.Seq2[Request, error] {
	if t.Format.ordered() {
		return t.straight
	}
	return t.indexed
}

// straight reads an ordered trace line by line.
func (t *Trace) straight(yield func(Request, error) bool) {
	name := t.files[0]
	file, err := os.Open(name)
	if err != nil {
		yield(Request{}, err)
		return
	}
	defer file.Close()

	lines := newLineReader(file)
	for range t.Count {
		r, err := t.nextOf(lines)
		if err != nil {
			yield(Request{}, errAt(name, lines.number, err))
			return
		}
		if !yield(r, nil) {
			return
		}
	}
}

func (t *Trace) nextOf(lines *lineReader) (Request, error) {
	for {
		line, err := lines.next()
		if err != nil {
			return Request{}, err
		}
		if len(line) == 0 {
			continue
		}
		r, err := t.Format.decode(line)
		if err != nil {
			return Request{}, err
		}
		r.At = r.stamp - t.first
		return r.Request, nil
	}
}

func (t *Trace) indexed(yield func(Request, error) bool) {
	var open openFile
	defer open.close()
	for _, at := range t.index {
		r, err := t.read(&open, at)
		if !yield(r, err) || err != nil {
			return
		}
	}
}

// Sessions returns the trace's sessions in order of their first request; each
// reads its requests as they are asked for, in order of time. Without sessions
// (see [Trace.HasSessions]) the sequence is empty.
func (t *Trace) Sessions() iter.Seq[*Session] {
	return func(yield func(*Session) bool) {
		for _, s := range t.sessions {
			if !yield(t.session(s)) {
				return
			}
		}
	}
}

func (t *Trace) session(s sessionIndex) *Session {
	next := 0
	return &Session{
		ID:    s.id,
		Start: t.index[s.records[0]].stamp - t.first,
		Len:   len(s.records),
		next: func([]byte) (Request, error) {
			if next == len(s.records) {
				return Request{}, io.EOF
			}
			var open openFile
			defer open.close()
			at := t.index[s.records[next]]
			r, err := t.read(&open, at)
			if next > 0 {
				r.Think = at.stamp - t.index[s.records[next-1]].stamp
			}
			next++
			return r, err
		},
	}
}

// openFile keeps the file open that was read last.
type openFile struct {
	*os.File
	number int32
}

func (o *openFile) close() {
	if o.File != nil {
		o.File.Close()
	}
}

// read reads the record at a place of the index.
func (t *Trace) read(open *openFile, at place) (Request, error) {
	name := t.files[at.file]
	if open.File == nil || open.number != at.file {
		open.close()
		file, err := os.Open(name)
		if err != nil {
			return Request{}, err
		}
		open.File, open.number = file, at.file
	}
	line := make([]byte, at.size)
	if _, err := open.ReadAt(line, at.offset); err != nil {
		return Request{}, fmt.Errorf("%s at byte %d: %w", name, at.offset, err)
	}
	r, err := t.Format.decode(trimLine(line))
	if err != nil {
		return Request{}, fmt.Errorf("%s at byte %d: changed since it was opened: %w", name, at.offset, err)
	}
	r.At = r.stamp - t.first
	return r.Request, nil
}
