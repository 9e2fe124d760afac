// SPDX-License-Identifier: Apache-2.0

package selection

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"sync"
	"testing"
	"testing/iotest"
)

var errCut = errors.New("connection cut")

func peek(r *http.Request, limit int) (b *body, whole bool) {
	b = new(body)
	whole = b.peek(r, limit)
	return b, whole
}

// textOf returns n bytes that differ from place to place.
func textOf(n int) []byte {
	text := make([]byte, n)
	rng := rand.NewChaCha8([32]byte{1})
	_, _ = rng.Read(text)
	return text
}

// arrivals are the ways in which a client's bytes may come in.
var arrivals = map[string]func(io.Reader) io.Reader{
	"at once":       func(r io.Reader) io.Reader { return r },
	"byte by byte":  iotest.OneByteReader,
	"by halves":     iotest.HalfReader,
	"end with data": iotest.DataErrReader,
	"empty reads":   func(r io.Reader) io.Reader { return &hesitant{r: r} },
}

// hesitant returns nothing at every other read, which io.Reader allows.
type hesitant struct {
	r     io.Reader
	pause bool
}

func (h *hesitant) Read(p []byte) (int, error) {
	if h.pause = !h.pause; h.pause {
		return 0, nil
	}
	return h.r.Read(p)
}

func requestWith(body io.Reader, length int64) *http.Request {
	r, err := http.NewRequest(http.MethodPost, "/v1/completions", io.NopCloser(body))
	if err != nil {
		panic(err)
	}
	r.ContentLength = length
	return r
}

// An attempt gives the client's bytes, however they come and wherever the limit
// lies, and so does the next attempt as long as the first stayed within it.
func TestPeekGivesBytesBack(t *testing.T) {
	const most = 3 * firstGuess
	text := textOf(most)
	for _, size := range []int{0, 1, 4095, 4096, 4097, firstGuess - 1, firstGuess, firstGuess + 1, most} {
		for _, limit := range []int{1, size - 1, size, size + 1, 2*size + 5, 4096, firstGuess, firstGuess + 1} {
			if limit < 1 {
				continue
			}
			for name, arrive := range arrivals {
				if name == "byte by byte" && size > 5000 {
					continue
				}
				for _, length := range []int64{int64(size), -1} {
					t.Run(fmt.Sprintf("%d bytes/limit %d/%s/length %d", size, limit, name, length), func(t *testing.T) {
						r := requestWith(arrive(bytes.NewReader(text[:size])), length)
						b, whole := peek(r, limit)
						if want := size < limit || size == limit && (length >= 0 || whole); whole != want {
							t.Errorf("whole is %v", whole)
						}
						if want := text[:min(size, limit)]; !bytes.Equal(b.head, want) {
							t.Errorf("peeked at %d bytes, want %d", len(b.head), len(want))
						}
						if !whole {
							// An attempt that stays in the peeked part leaves the next one everything.
							if _, err := io.CopyN(io.Discard, r.Body, int64(limit)); err != nil {
								t.Fatalf("reading the peeked part: %v", err)
							}
							_ = r.Body.Close()
							r.Body = b.attempt()
						}
						for range 2 {
							got, err := io.ReadAll(r.Body)
							if err != nil || !bytes.Equal(got, text[:size]) {
								t.Fatalf("got %d bytes and %v, want %d", len(got), err, size)
							}
							_ = r.Body.Close()
							if !whole {
								break
							}
							r.Body = b.attempt()
						}
						b.finish()
					})
				}
			}
		}
	}
}

// Whatever is read, closed and begun anew in whatever order, every byte that a
// reader gives is the client's byte at that place.
func TestBodyAgainstPlainBytes(t *testing.T) {
	text := textOf(20_000)
	for seed := range uint64(300) {
		rng := rand.New(rand.NewPCG(seed, 1))
		size, limit := rng.IntN(len(text)), 1+rng.IntN(len(text))
		length := int64(-1)
		if rng.IntN(2) == 0 {
			length = int64(size)
		}
		r := requestWith(bytes.NewReader(text[:size]), length)
		b, whole := peek(r, limit)
		type view struct {
			io.ReadCloser
			at     int
			closed bool
		}
		views := []*view{{ReadCloser: r.Body}}
		spent := false // something beyond the head was read
		for range 60 {
			v := views[rng.IntN(len(views))]
			latest := v == views[len(views)-1]
			switch rng.IntN(10) {
			case 0:
				views = append(views, &view{ReadCloser: b.attempt()})
			case 1:
				_ = v.Close()
				v.closed = true
			default:
				p := make([]byte, 1+rng.IntN(3000))
				n, err := v.Read(p)
				if !bytes.Equal(p[:n], text[v.at:v.at+n]) {
					t.Fatalf("seed %d: wrong bytes at %d", seed, v.at)
				}
				beyond := v.at >= len(b.head) && !whole
				switch {
				case v.closed && !errors.Is(err, errBodyGone),
					!v.closed && v.at == 0 && spent && !errors.Is(err, errBodySpent),
					!v.closed && v.at > 0 && beyond && !latest && !errors.Is(err, errBodyGone):
					t.Fatalf("seed %d: read at %d of %d gave %d bytes and %v", seed, v.at, size, n, err)
				case v.at < size && n == 0 && err == io.EOF:
					t.Fatalf("seed %d: ended at %d of %d", seed, v.at, size)
				case n > 0 && v.at+n > len(b.head):
					spent = true
				}
				if beyond && latest && !v.closed {
					spent = true
				}
				v.at += n
			}
		}
		b.finish()
		for _, v := range views {
			_ = v.Close()
			if n, err := v.Read(make([]byte, 1)); n != 0 || !errors.Is(err, errBodyGone) {
				t.Fatalf("seed %d: read after the request gave %d bytes and %v", seed, n, err)
			}
		}
		if b.buf != nil {
			t.Fatalf("seed %d: the buffer was not given back", seed)
		}
	}
}

// A client that leaves midway is told of to every attempt, after the bytes that
// did come.
func TestReadErrorShowsAgain(t *testing.T) {
	text := textOf(10_000)
	for _, at := range []int{0, 1, 4096, 9_999} {
		for _, limit := range []int{1, 4096, 20_000} {
			t.Run(fmt.Sprintf("at %d/limit %d", at, limit), func(t *testing.T) {
				r := requestWith(io.MultiReader(bytes.NewReader(text[:at]), iotest.ErrReader(errCut)), int64(len(text)))
				b, whole := peek(r, limit)
				if whole {
					t.Error("a cut body passes for a whole one")
				}
				attempts := 1
				if at < limit { // the error was seen while peeking
					attempts = 3
				}
				for range attempts {
					got, err := io.ReadAll(r.Body)
					if !errors.Is(err, errCut) || !bytes.Equal(got, text[:at]) {
						t.Fatalf("got %d bytes and %v", len(got), err)
					}
					_ = r.Body.Close()
					r.Body = b.attempt()
				}
			})
		}
	}
}

// A body that was sent beyond what was kept can't be sent again, and must not
// arrive without its middle.
func TestSpentBodyIsRefused(t *testing.T) {
	text := textOf(10_000)
	r := requestWith(bytes.NewReader(text), -1)
	b, _ := peek(r, 1000)
	if _, err := io.CopyN(io.Discard, r.Body, 1001); err != nil {
		t.Fatal(err)
	}
	again := b.attempt()
	if got, err := io.ReadAll(again); len(got) != 0 || !errors.Is(err, errBodySpent) {
		t.Errorf("second attempt got %d bytes and %v, want %v", len(got), err, errBodySpent)
	}
}

// The transport of a failed attempt may go on reading for a while. It must not
// take bytes from the attempt that follows.
func TestStaleAttemptTakesNothing(t *testing.T) {
	text := textOf(10_000)
	r := requestWith(bytes.NewReader(text), -1)
	b, _ := peek(r, 1000)
	stale := r.Body
	if _, err := io.CopyN(io.Discard, stale, 1000); err != nil {
		t.Fatal(err)
	}
	fresh := b.attempt()
	if n, err := stale.Read(make([]byte, 100)); n != 0 || !errors.Is(err, errBodyGone) {
		t.Errorf("the stale attempt got %d bytes and %v, want %v", n, err, errBodyGone)
	}
	if got, err := io.ReadAll(fresh); err != nil || !bytes.Equal(got, text) {
		t.Errorf("the fresh attempt got %d bytes and %v", len(got), err)
	}
}

// A buffer in use by one request must never reach another: it is given back
// when the request is over and the last reader is closed, in either order.
func TestBufferOutlivesItsReaders(t *testing.T) {
	for name, end := range map[string][]func(*body, io.Closer, io.Closer){
		"closed, then over": {
			func(_ *body, first, _ io.Closer) { _ = first.Close() },
			func(_ *body, _, second io.Closer) { _ = second.Close() },
			func(b *body, _, _ io.Closer) { b.finish() },
		},
		"over, then closed": {
			func(b *body, _, _ io.Closer) { b.finish() },
			func(_ *body, _, second io.Closer) { _ = second.Close() },
			func(_ *body, first, _ io.Closer) { _ = first.Close() },
		},
		"closed twice": {
			func(_ *body, first, _ io.Closer) { _ = first.Close(); _ = first.Close() },
			func(b *body, _, _ io.Closer) { b.finish() },
			func(_ *body, _, second io.Closer) { _ = second.Close() },
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := requestWith(bytes.NewReader(textOf(100)), 100)
			b, _ := peek(r, 1000)
			first, second := r.Body, b.attempt()
			for i, step := range end {
				if b.buf == nil {
					t.Fatalf("given back before step %d", i)
				}
				step(b, first, second)
			}
			if b.buf != nil {
				t.Error("not given back at last")
			}
		})
	}
}

// Attempts, a transport that still reads, and the request's end come on
// different goroutines. Run with -race.
func TestBodyConcurrently(t *testing.T) {
	for round := range 200 {
		text := textOf(3000)
		r := requestWith(bytes.NewReader(text), -1)
		b, _ := peek(r, 1+round*17)
		var wg sync.WaitGroup
		for range 3 {
			reader := b.attempt()
			wg.Go(func() {
				got, _ := io.ReadAll(reader)
				if !bytes.HasPrefix(text, got) {
					t.Errorf("round %d: bytes that are not the client's", round)
				}
				_ = reader.Close()
			})
		}
		wg.Go(b.finish)
		_ = r.Body.Close()
		wg.Wait()
		if b.buf != nil {
			t.Fatalf("round %d: the buffer was not given back", round)
		}
	}
}

// Where no retry is to be expected once an attempt reads, the buffer is given back at
// the last byte of what was peeked at, unless it is wanted or lent to another policy.
func TestBufferGoesWhenSent(t *testing.T) {
	text := textOf(3000)
	for _, test := range []struct {
		name  string
		limit int
		set   func(b *body)
		kept  bool
	}{
		{name: "whole", limit: 5000, set: func(b *body) { b.once = true }},
		{name: "beyond the limit", limit: 1000, set: func(b *body) { b.once = true }},
		{name: "a retry may come", limit: 5000, set: func(*body) {}, kept: true},
		{name: "wanted", limit: 5000, set: func(b *body) { b.once, b.wanted = true, func() bool { return true } }, kept: true},
		{name: "not wanted", limit: 5000, set: func(b *body) { b.once, b.wanted = true, func() bool { return false } }},
		{name: "lent", limit: 5000, set: func(b *body) { b.once = true; b.lend(true) }, kept: true},
		{name: "lent before", limit: 5000, set: func(b *body) { b.once = true; b.lend(true); b.lend(false) }},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := requestWith(bytes.NewReader(text), int64(len(text)))
			b, _ := peek(r, test.limit)
			test.set(b)
			if _, err := io.CopyN(io.Discard, r.Body, int64(min(test.limit, len(text))-1)); err != nil {
				t.Fatal(err)
			}
			if b.buf == nil {
				t.Fatal("given back before the last byte was read")
			}
			got, err := io.ReadAll(r.Body)
			if want := text[min(test.limit, len(text))-1:]; err != nil || !bytes.Equal(got, want) {
				t.Fatalf("then got %d bytes and %v, want %d", len(got), err, len(want))
			}
			if kept := b.buf != nil; kept != test.kept {
				t.Errorf("kept is %v", kept)
			}
			if test.limit < len(text) || !test.kept {
				if n, err := b.attempt().Read(make([]byte, 1)); n != 0 || !errors.Is(err, errBodySpent) {
					t.Errorf("another attempt got %d bytes and %v, want %v", n, err, errBodySpent)
				}
			}
		})
	}
}

func TestBuffersAreOfTheirClass(t *testing.T) {
	for _, size := range []int{0, 1, 4096, 4097, 5120, 5121, 1 << 18, 1<<18 + 1, 1 << 20, 1<<24 - 1, 1 << 24, 1<<24 + 1} {
		b := borrow(size)
		if len(*b) < size || len(*b) > max(4096, size*5/4) {
			t.Errorf("borrow(%d) is %d bytes", size, len(*b))
		}
		giveBack(b)
		if again := borrow(size); len(*again) < size {
			t.Errorf("borrow(%d) is %d bytes after one was given back", size, len(*again))
		}
	}
	odd := make([]byte, 5000)
	giveBack(&odd)
	if b := borrow(5000); len(*b) != 5120 {
		t.Errorf("a buffer of %d bytes came out of the pool", len(*b))
	}
}
