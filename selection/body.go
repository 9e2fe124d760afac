// SPDX-License-Identifier: Apache-2.0

package selection

import (
	"errors"
	"io"
	"math/bits"
	"net/http"
	"sync"
)

// body keeps the beginning of a request's body, which was peeked at, so that
// each attempt can send exactly the bytes the client sent. Attempts read it
// through a reader of their own.
//
// The transport may still read when an attempt or the whole request is over
// (an engine that answers before it has the whole body). So a reader that is
// not the latest gives no more bytes of the rest, and the buffer goes back to
// its pool only when the request is over and every reader is closed.
type body struct {
	mu     sync.Mutex
	buf    *[]byte   // pooled; nil once it was given back
	head   []byte    // what was peeked, in *buf
	rest   io.Reader // what follows head, nil if head is the whole body
	err    error     // without a rest: how the body ended, io.EOF or the client's read error
	eaten  bool      // some of rest was read: another attempt can't have it
	latest *reader
	open   int  // readers not closed
	over   bool // no further attempt will come
}

// reader is one attempt's view of a body. Its Close does not close the
// client's body, which the server does itself.
type reader struct {
	body   *body
	off    int // in head
	closed bool
}

var (
	errBodySpent = errors.New("request body is larger than max_body and was partly sent already, so it can't be sent again")
	errBodyGone  = errors.New("request body read after its attempt ended")
)

// peek reads up to limit bytes of the request's body and puts a body back that
// gives all of it. whole tells whether the limit covered it.
func peek(r *http.Request, limit int) (b *body, whole bool) {
	size := limit
	if r.ContentLength < 0 {
		size = min(limit, firstGuess)
	} else if r.ContentLength < int64(limit) {
		size = int(r.ContentLength) + 1 // one more, to see the end at once
	}
	buf := borrow(size)
	n, err := readUpTo(r.Body, &buf, limit)
	if err == nil && r.ContentLength == int64(n) {
		err = io.EOF
	}
	b = &body{buf: buf, head: (*buf)[:n], err: err}
	if err == nil {
		b.rest = r.Body
	}
	r.Body = b.attempt()
	return b, err == io.EOF
}

// attempt returns a reader that starts at the body's first byte.
func (b *body) attempt() io.ReadCloser {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.latest = &reader{body: b}
	b.open++
	return b.latest
}

// Read implements io.Reader.
func (r *reader) Read(p []byte) (int, error) {
	b := r.body
	b.mu.Lock()
	switch {
	case r.closed || b.buf == nil:
		b.mu.Unlock()
		return 0, errBodyGone
	case r.off == 0 && b.eaten:
		b.mu.Unlock()
		return 0, errBodySpent
	case r.off < len(b.head):
		n := copy(p, b.head[r.off:])
		r.off += n
		b.mu.Unlock()
		return n, nil
	case b.rest == nil:
		b.mu.Unlock()
		return 0, b.err
	case r != b.latest:
		b.mu.Unlock()
		return 0, errBodyGone
	}
	b.eaten = true
	rest := b.rest
	b.mu.Unlock()
	return rest.Read(p) // no lock across the client's network
}

// Close implements io.Closer.
func (r *reader) Close() error {
	b := r.body
	b.mu.Lock()
	defer b.mu.Unlock()
	if !r.closed {
		r.closed = true
		b.open--
		b.free()
	}
	return nil
}

// finish notes that no further attempt will come.
func (b *body) finish() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.over = true
	b.free()
}

func (b *body) free() {
	if b.over && b.open == 0 && b.buf != nil {
		giveBack(b.buf)
		b.buf, b.head, b.rest = nil, nil, nil
	}
}

// firstGuess is the buffer for a body of unknown length.
const firstGuess = 64 << 10

// readUpTo fills *buf with up to limit bytes, growing it as needed. It returns
// a nil error if limit bytes were read and the end was not seen.
func readUpTo(r io.Reader, buf **[]byte, limit int) (n int, err error) {
	for n < limit {
		if n == len(**buf) {
			*buf = grow(*buf, min(4*n, limit+1))
		}
		var k int
		k, err = r.Read((**buf)[n:min(len(**buf), limit)])
		n += k
		if err != nil {
			return n, err
		}
	}
	return n, nil
}

func grow(old *[]byte, size int) *[]byte {
	bigger := borrow(size)
	copy(*bigger, *old)
	giveBack(old)
	return bigger
}

// Buffers come in powers of two from 4 KiB to 16 MiB.
const (
	smallestBuffer = 12
	largestBuffer  = 24
)

var buffers [largestBuffer - smallestBuffer + 1]sync.Pool

func borrow(size int) *[]byte {
	class := max(bits.Len(uint(max(size, 1)-1)), smallestBuffer)
	if class > largestBuffer {
		b := make([]byte, size)
		return &b
	}
	if b, ok := buffers[class-smallestBuffer].Get().(*[]byte); ok {
		return b
	}
	b := make([]byte, 1<<class)
	return &b
}

func giveBack(b *[]byte) {
	class := bits.Len(uint(len(*b) - 1))
	if class < smallestBuffer || class > largestBuffer || len(*b) != 1<<class {
		return
	}
	buffers[class-smallestBuffer].Put(b)
}
