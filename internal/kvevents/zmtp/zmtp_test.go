// SPDX-License-Identifier: Apache-2.0

package zmtp

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// libzmqPub is what a PUB socket of libzmq 4.3.5 was recorded to send: its greeting, READY, one message of two frames and the answer to
// a heartbeat.
func libzmqPub() []byte {
	return []byte("\xff\x00\x00\x00\x00\x00\x00\x00\x00\x7f\x03\x01NULL" + strings.Repeat("\x00", 48) +
		"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB" +
		"\x01\x02kv\x00\x03abc" +
		"\x04\x05\x04PONG")
}

// script is a connection whose peer has said everything beforehand.
type script struct {
	net.Conn
	in  io.Reader
	out bytes.Buffer
}

func (s *script) Read(p []byte) (int, error)       { return s.in.Read(p) }
func (s *script) Write(p []byte) (int, error)      { return s.out.Write(p) }
func (s *script) Close() error                     { return nil }
func (s *script) SetDeadline(time.Time) error      { return nil }
func (s *script) SetReadDeadline(time.Time) error  { return nil }
func (s *script) SetWriteDeadline(time.Time) error { return nil }

func TestReadsLibzmq(t *testing.T) {
	s := &script{in: bytes.NewReader(libzmqPub())}
	c, err := NewConn(context.Background(), s, Sub, 1<<10)
	if err != nil {
		t.Fatal(err)
	}
	frames, err := c.ReadMessage()
	if err != nil || len(frames) != 2 || string(frames[0]) != "kv" || string(frames[1]) != "abc" {
		t.Fatalf("%q, %v", frames, err)
	}
	if frames, err := c.ReadMessage(); err != nil || frames != nil || c.Pongs() != 1 {
		t.Fatalf("%q, %v, %d pongs", frames, err, c.Pongs())
	}
	if _, err := c.ReadMessage(); !errors.Is(err, io.EOF) {
		t.Errorf("at the end %v", err)
	}
	sent := s.out.Bytes()
	if len(sent) < 64 || sent[0] != 0xff || sent[9] != 0x7f || sent[10] != 3 || !bytes.Equal(sent[12:17], []byte("NULL\x00")) {
		t.Errorf("greeting % x", sent)
	}
	if want := "\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB"; string(sent[64:]) != want {
		t.Errorf("sent %q after the greeting, want %q", sent[64:], want)
	}
}

func TestHandshakeRefuses(t *testing.T) {
	good := libzmqPub()
	change := func(at int, b ...byte) []byte {
		c := slices.Clone(good)
		copy(c[at:], b)
		return c
	}
	for name, in := range map[string][]byte{
		"nothing":          nil,
		"half a greeting":  good[:30],
		"http":             []byte("HTTP/1.1 400 Bad Request\r\n\r\n"),
		"ZMTP 2":           change(10, 1),
		"CURVE":            change(12, []byte("CURVE")...),
		"a message first":  change(64, 0),
		"not READY":        change(67, 'X'),
		"a REP socket":     change(len("\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03")+64, []byte("REP")...),
		"property too big": change(84, 0xff),
		"no socket type":   slices.Concat(good[:64], []byte("\x04\x06\x05READY")),
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := NewConn(context.Background(), &script{in: bytes.NewReader(in)}, Sub, 1<<10); err == nil {
				t.Error("accepted")
			}
		})
	}
}

// pair connects two sockets over loopback.
func pair(t *testing.T, a, b Socket, limit int) (*Conn, *Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	type result struct {
		c   *Conn
		err error
	}
	accepted := make(chan result, 1)
	go func() {
		raw, err := l.Accept()
		if err != nil {
			accepted <- result{nil, err}
			return
		}
		c, err := NewConn(context.Background(), raw, b, limit)
		accepted <- result{c, err}
	}()
	x, err := Dial(context.Background(), nil, "tcp://"+l.Addr().String(), a, limit)
	if err != nil {
		t.Fatal(err)
	}
	y := <-accepted
	if y.err != nil {
		t.Fatal(y.err)
	}
	t.Cleanup(func() { x.Close(); y.c.Close() })
	return x, y.c
}

func TestMessages(t *testing.T) {
	for _, frames := range [][][]byte{
		{{}}, {{}, {}}, {[]byte("a"), nil, []byte("b")},
		{bytes.Repeat([]byte("x"), 255)}, {bytes.Repeat([]byte("x"), 256)}, {bytes.Repeat([]byte("x"), 900_000), []byte("y")},
	} {
		x, y := pair(t, Dealer, Router, 1<<20)
		wrote := make(chan error, 1)
		go func() { wrote <- x.WriteMessage(frames...) }()
		got, err := y.ReadMessage()
		if err != nil || !slices.EqualFunc(got, frames, bytes.Equal) {
			t.Errorf("%d frames came as %d, error %v", len(frames), len(got), err)
		}
		if err := <-wrote; err != nil {
			t.Error(err)
		}
	}
}

func TestLimits(t *testing.T) {
	x, y := pair(t, Dealer, Router, 100)
	if err := x.WriteMessage(make([]byte, 60), make([]byte, 60)); err != nil {
		t.Fatal(err)
	}
	if _, err := y.ReadMessage(); !errors.Is(err, ErrTooBig) {
		t.Errorf("two frames over the limit together: %v", err)
	}
	x, y = pair(t, Dealer, Router, 100)
	if err := x.WriteMessage(make([][]byte, maxFrames+1)...); err != nil {
		t.Fatal(err)
	}
	if _, err := y.ReadMessage(); !errors.Is(err, ErrTooBig) {
		t.Errorf("too many frames: %v", err)
	}
}

func TestHeartbeatAndSubscription(t *testing.T) {
	x, y := pair(t, Sub, Pub, 1<<10)
	if err := errors.Join(x.Subscribe("kv@"), x.Ping()); err != nil {
		t.Fatal(err)
	}
	if frames, err := y.ReadMessage(); err != nil || len(frames) != 1 || string(frames[0]) != "\x01kv@" {
		t.Errorf("subscription %q, %v", frames, err)
	}
	if frames, err := y.ReadMessage(); err != nil || frames != nil {
		t.Errorf("heartbeat %q, %v", frames, err)
	}
	if _, err := x.ReadMessage(); err != nil || x.Pongs() != 1 {
		t.Errorf("%d answers, %v", x.Pongs(), err)
	}
	if ready, err := x.Await(time.Millisecond); ready || err != nil {
		t.Errorf("ready %t, %v with nothing to read", ready, err)
	}
	for command, want := range map[string]string{"SUBSCRIBE": "\x01t", "CANCEL": "\x00t"} {
		body := append([]byte{byte(len(command))}, command+"t"...)
		if err := x.writeFrame(flagCommand, body); err != nil {
			t.Fatal(err)
		}
		if frames, err := y.ReadMessage(); err != nil || len(frames) != 1 || string(frames[0]) != want {
			t.Errorf("%s came as %q, %v", command, frames, err)
		}
	}
	if err := y.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := x.Await(5 * time.Second); err == nil {
		t.Error("no error after the peer has closed")
	}
}

func TestContextCloses(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	ctx, cancel := context.WithCancel(context.Background())
	dialed := make(chan error, 1)
	go func() {
		_, err := Dial(ctx, nil, "tcp://"+l.Addr().String(), Sub, 1<<10)
		dialed <- err
	}()
	raw, err := l.Accept() // and say nothing
	if err != nil {
		t.Fatal(err)
	}
	defer raw.Close()
	cancel()
	if err := <-dialed; !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, want %v", err, context.Canceled)
	}
}

func FuzzConn(f *testing.F) {
	good := libzmqPub()
	f.Add(good[64:])
	f.Add(append(slices.Clone(good[64:91]), binary.BigEndian.AppendUint64([]byte{2}, 1<<62)...))
	f.Add(append(slices.Clone(good[64:91]), binary.BigEndian.AppendUint64([]byte{7}, 1<<20)...))
	f.Add([]byte(string(good[64:91]) + "\x04\x0c\x04PING\x00\x00hello" + "\x04\x0c\x09SUBSCRIBEkv" + "\x04\x05\x05ERROR"))
	f.Add([]byte(strings.Repeat("\x01\x00", 40)))
	f.Fuzz(func(t *testing.T, after []byte) {
		const limit = 1 << 12
		c, err := NewConn(context.Background(), &script{in: io.MultiReader(bytes.NewReader(good[:64]), bytes.NewReader(after))}, Sub, limit)
		if err != nil {
			return
		}
		defer c.Close()
		for range len(after) {
			frames, err := c.ReadMessage()
			if err != nil {
				break
			}
			size := 0
			for _, frame := range frames {
				size += len(frame)
			}
			if size > limit+1 || len(frames) > maxFrames {
				t.Fatalf("%d frames of %d bytes", len(frames), size)
			}
		}
		if cap(c.buf) > 1<<18 {
			t.Fatalf("%d bytes kept for %d", cap(c.buf), len(after))
		}
	})
}
