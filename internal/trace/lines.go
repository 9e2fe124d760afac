// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// maxLine bounds one line, and with it the memory a reader needs.
const maxLine = 64 << 20

// lineReader walks a file line by line in bounded memory, however long the
// file is, and knows where each line stands.
type lineReader struct {
	r     *bufio.Reader
	spill []byte // holds lines longer than r's buffer

	number int   // of the current line, from 1
	offset int64 // of the current line's first byte
	size   int   // bytes of the current line with its line feed
	cut    bool  // the current line ends with the file, not with a line feed
}

func newLineReader(r io.Reader) *lineReader {
	return &lineReader{r: bufio.NewReaderSize(r, 256<<10)}
}

// next returns the next line without surrounding white space; it is valid until
// the call after. The error is io.EOF at the end.
func (l *lineReader) next() ([]byte, error) {
	l.offset += int64(l.size)
	l.number++
	l.cut = false
	line, err := l.r.ReadSlice('\n')
	if errors.Is(err, bufio.ErrBufferFull) {
		line, err = l.long(line)
	}
	l.size = len(line)
	switch {
	case err == nil:
	case errors.Is(err, io.EOF) && len(line) > 0:
		l.cut = true
	default:
		return nil, err
	}
	return trimLine(line), nil
}

// trimLine takes off white space and a byte order mark.
func trimLine(line []byte) []byte {
	return bytes.TrimSpace(bytes.TrimPrefix(line, []byte("\xef\xbb\xbf")))
}

// isCut tells whether a line stops inside a JSON value.
func isCut(line []byte) bool {
	var value json.RawMessage
	return errors.Is(json.NewDecoder(bytes.NewReader(line)).Decode(&value), io.ErrUnexpectedEOF)
}

// long gathers a line that is longer than the reader's buffer.
func (l *lineReader) long(head []byte) ([]byte, error) {
	l.spill = append(l.spill[:0], head...)
	for {
		part, err := l.r.ReadSlice('\n')
		if len(l.spill)+len(part) > maxLine {
			return nil, fmt.Errorf("line is longer than %d bytes", maxLine)
		}
		l.spill = append(l.spill, part...)
		if !errors.Is(err, bufio.ErrBufferFull) {
			return l.spill, err
		}
	}
}
