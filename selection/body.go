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
// its pool when the request is over and every reader is closed, or earlier: at
// the last byte of head, where nobody will want it again.
type body struct {
	mu     sync.Mutex
	buf    *[]byte   // pooled; nil once it was given back
	head   []byte    // what was peeked, in *buf
	size   int       // of head, also when that was given back
	rest   io.Reader // what follows head, nil if head is the whole body
	err    error     // without a rest: how the body ended, io.EOF or the client's read error
	eaten  bool      // some of rest was read, or head was given back: another attempt can't have it
	latest *reader
	first  reader // the first attempt's
	open   int    // readers not closed
	over   bool   // no further attempt will come

	// once tells that no attempt comes after one that has read some of the
	// body. wanted asks whether head is to be kept all the same, nil for no.
	// Both are set before the first attempt reads.
	once   bool
	wanted func() bool
	lent   bool // to another policy, which may read it before any attempt does
}

// reader is one attempt's view of a body. Its Close does not close the
// client's body, which the server does itself.
type reader struct {
	body   *body
	off    int // in head
	closed bool
}

var (
	errBodySpent = errors.New("request body was sent already and is not at hand any more (larger than max_body, or no retry was to be expected), so it can't be sent again")
	errBodyGone  = errors.New("request body read after its attempt ended")
)

// peek reads up to limit bytes of the request's body and puts one back that
// gives all of it. whole tells whether the limit covered it.
func (b *body) peek(r *http.Request, limit int) (whole bool) {
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
	b.buf, b.head, b.size, b.err = buf, (*buf)[:n], n, err
	if err == nil {
		b.rest = r.Body
	}
	r.Body = b.attempt()
	return err == io.EOF
}

// attempt returns a reader that starts at the body's first byte.
func (b *body) attempt() io.ReadCloser {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.latest == nil {
		b.latest = &b.first
		b.first.body = b
	} else {
		b.latest = &reader{body: b}
	}
	b.open++
	return b.latest
}

// Read implements io.Reader.
func (r *reader) Read(p []byte) (int, error) {
	b := r.body
	b.mu.Lock()
	switch {
	case r.closed:
		b.mu.Unlock()
		return 0, errBodyGone
	case r.off == 0 && b.eaten:
		b.mu.Unlock()
		return 0, errBodySpent
	case r.off < b.size && b.buf == nil:
		b.mu.Unlock()
		return 0, errBodyGone
	case r.off < b.size:
		n := copy(p, b.head[r.off:])
		r.off += n
		sent := r.off == b.size && b.once && !b.lent
		b.mu.Unlock()
		if sent {
			b.sent()
		}
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

// sent gives head back, of which an attempt has read all, if nobody wants it
// any more.
func (b *body) sent() {
	if b.wanted != nil && b.wanted() { // without the lock: it may take a while
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.eaten = true
	b.release()
}

// lend notes that what reads the body now is another policy and no attempt, or
// that it is so no longer.
func (b *body) lend(lent bool) {
	if b == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.lent = lent
}

// finish notes that no further attempt will come.
func (b *body) finish() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.over = true
	b.free()
}

func (b *body) free() {
	if b.over && b.open == 0 {
		b.release()
		b.rest = nil
	}
}

func (b *body) release() {
	if b.buf != nil {
		giveBack(b.buf)
		b.buf, b.head = nil, nil
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

// Buffers come in four sizes for each power of two, from 4 KiB to 16 MiB: with
// one, a body of 256 KiB, read with a byte more to see its end, would take 512.
const (
	smallestBuffer = 12 // log2
	largestBuffer  = 24
	sizesPerPower  = 4
)

var buffers [(largestBuffer-smallestBuffer)*sizesPerPower + 1]sync.Pool

// classOf returns the place among buffers of the smallest that has the size,
// and its own size.
func classOf(size int) (class, whole int) {
	size = max(size, 1<<smallestBuffer)
	power := bits.Len(uint(size)) - 1
	step := 1 << power / sizesPerPower
	steps := (size - 1<<power + step - 1) / step
	return (power-smallestBuffer)*sizesPerPower + steps, 1<<power + steps*step
}

func borrow(size int) *[]byte {
	class, whole := classOf(size)
	if class >= len(buffers) {
		b := make([]byte, size)
		return &b
	}
	if b, ok := buffers[class].Get().(*[]byte); ok {
		return b
	}
	b := make([]byte, whole)
	return &b
}

func giveBack(b *[]byte) {
	class, whole := classOf(len(*b))
	if class < len(buffers) && len(*b) == whole {
		buffers[class].Put(b)
	}
}
