// SPDX-License-Identifier: Apache-2.0

// Package zmtp speaks the part of ZMTP 3 (ZeroMQ's wire protocol, https://rfc.zeromq.org/spec/23/ and /spec/37/) that KV-event
// streams need: the NULL mechanism, multi-part messages, subscriptions and heartbeats over TCP or a Unix socket.
//
// The package exists because a router must survive whatever is at the other end. The pure Go alternative, go-zeromq/zmq4 v0.17.0,
// was measured and allocates what a frame header claims (nine bytes make it panic in a goroutine of its own, which ends the process, or
// take gigabytes), cannot be cancelled while a peer that accepted stays mute, and leaves a goroutine behind when it is closed with
// unread messages. Here a message has a largest size, memory follows the bytes that came and not those announced, every step has a
// deadline, and there are no goroutines.
package zmtp

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"time"
)

// Socket is the type of a ZeroMQ socket as announced in the handshake.
type Socket string

// The socket types of KV-event streams.
const (
	Pub    Socket = "PUB"
	Sub    Socket = "SUB"
	Dealer Socket = "DEALER"
	Router Socket = "ROUTER"
)

// accepts says whether a socket of type s may talk to a peer of the given type.
func (s Socket) accepts(peer string) bool {
	switch s {
	case Pub:
		return peer == "SUB" || peer == "XSUB"
	case Sub:
		return peer == "PUB" || peer == "XPUB"
	case Dealer:
		return peer == "ROUTER" || peer == "DEALER" || peer == "REP"
	case Router:
		return peer == "DEALER" || peer == "ROUTER" || peer == "REQ"
	}
	return false
}

var (
	// ErrTooBig means that the peer sent or announced a message over the connection's limit. The connection cannot be used further.
	ErrTooBig = errors.New("message over the limit")
	// ErrProtocol means that the peer does not speak ZMTP 3 with the NULL mechanism. The connection cannot be used further.
	ErrProtocol = errors.New("not ZMTP 3 with the NULL mechanism")
)

const (
	// maxFrames is the largest number of frames in a message; KV events have at most four.
	maxFrames = 16
	// maxCommand is the largest size of a command, which are small by nature.
	maxCommand = 4096
	// ioTimeout bounds the handshake, each message once its first byte is there, and each write.
	ioTimeout = 10 * time.Second
	// retainedBytes is how much message memory a connection keeps after an unusually large message.
	retainedBytes = 1 << 20

	flagMore    = 1
	flagLong    = 2
	flagCommand = 4
)

// Conn is one ZMTP connection after its handshake. One goroutine may read while others write.
type Conn struct {
	raw  net.Conn
	r    *bufio.Reader
	max  int
	stop func() bool

	buf    []byte
	ends   []int
	frames [][]byte
	pongs  int

	writing sync.Mutex
	out     []byte
}

// Endpoint splits an endpoint such as tcp://host:5557 or ipc:///path into a network and an address for [net.Dialer].
func Endpoint(endpoint string) (network, address string, err error) {
	scheme, address, found := strings.Cut(endpoint, "://")
	switch {
	case !found || address == "":
	case scheme == "tcp":
		host, port, err := net.SplitHostPort(address)
		if err != nil {
			return "", "", fmt.Errorf("endpoint %q: %w", endpoint, err)
		}
		if host == "" || host == "*" || port == "" || port == "*" {
			return "", "", fmt.Errorf("endpoint %q: name the engine's host and port instead of a wildcard", endpoint)
		}
		return "tcp", address, nil
	case scheme == "ipc":
		return "unix", address, nil
	}
	return "", "", fmt.Errorf("endpoint %q: want tcp://host:port or ipc:///path", endpoint)
}

// Dial connects to an endpoint and shakes hands, within ten seconds. Messages larger than maxMessage bytes are refused.
// The connection closes when ctx ends. dial may be nil.
func Dial(ctx context.Context, dial func(ctx context.Context, network, address string) (net.Conn, error), endpoint string, socket Socket, maxMessage int) (*Conn, error) {
	network, address, err := Endpoint(endpoint)
	if err != nil {
		return nil, err
	}
	if dial == nil {
		dial = (&net.Dialer{}).DialContext
	}
	dialing, cancel := context.WithTimeout(ctx, ioTimeout)
	defer cancel()
	raw, err := dial(dialing, network, address)
	if err != nil {
		return nil, fmt.Errorf("dial %s: %w", endpoint, err)
	}
	c, err := NewConn(ctx, raw, socket, maxMessage)
	if err != nil {
		return nil, fmt.Errorf("dial %s: %w", endpoint, err)
	}
	return c, nil
}

// NewConn shakes hands on a connection that was dialed or accepted. It owns raw, which is closed on error and when ctx ends.
func NewConn(ctx context.Context, raw net.Conn, socket Socket, maxMessage int) (*Conn, error) {
	c := &Conn{raw: raw, r: bufio.NewReaderSize(raw, 64<<10), max: maxMessage}
	c.stop = context.AfterFunc(ctx, func() { _ = raw.Close() })
	if err := c.handshake(socket); err != nil {
		_ = c.Close()
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		return nil, fmt.Errorf("handshake: %w", err)
	}
	return c, nil
}

// Close closes the connection; a read that is under way ends with an error.
func (c *Conn) Close() error {
	c.stop()
	return c.raw.Close()
}

func (c *Conn) handshake(socket Socket) error {
	if err := c.raw.SetDeadline(time.Now().Add(ioTimeout)); err != nil {
		return err
	}
	if _, err := c.raw.Write(greeting()); err != nil {
		return err
	}
	var peer [64]byte
	// The first eleven bytes tell whether this is ZMTP 3 at all; older peers send no more until they are answered.
	if _, err := io.ReadFull(c.r, peer[:11]); err != nil {
		return err
	}
	if peer[0] != 0xff || peer[9]&1 != 1 || peer[10] < 3 {
		return fmt.Errorf("%w: greeting starts with % x", ErrProtocol, peer[:11])
	}
	if _, err := io.ReadFull(c.r, peer[11:]); err != nil {
		return err
	}
	if mechanism := string(bytes.TrimRight(peer[12:32], "\x00")); mechanism != "NULL" {
		return fmt.Errorf("%w: peer wants mechanism %q", ErrProtocol, mechanism)
	}
	if err := c.writeFrame(flagCommand, ready(socket)); err != nil {
		return err
	}
	return c.awaitReady(socket)
}

func greeting() []byte {
	g := make([]byte, 64)
	g[0], g[8], g[9] = 0xff, 1, 0x7f
	g[10], g[11] = 3, 0
	copy(g[12:], "NULL")
	return g
}

func ready(socket Socket) []byte {
	b := append([]byte{5}, "READY"...)
	b = appendProperty(b, "Socket-Type", string(socket))
	if socket == Dealer || socket == Router {
		b = appendProperty(b, "Identity", "")
	}
	return b
}

func appendProperty(b []byte, name, value string) []byte {
	b = append(b, byte(len(name)))
	b = append(b, name...)
	b = binary.BigEndian.AppendUint32(b, uint32(len(value)))
	return append(b, value...)
}

func (c *Conn) awaitReady(socket Socket) error {
	flags, size, err := c.readHeader()
	if err != nil {
		return err
	}
	if flags&flagCommand == 0 || size > maxCommand {
		return fmt.Errorf("%w: want READY, got a frame with flags %#x of %d bytes", ErrProtocol, flags, size)
	}
	body := make([]byte, size)
	if _, err := io.ReadFull(c.r, body); err != nil {
		return err
	}
	name, rest := command(body)
	if name != "READY" {
		return fmt.Errorf("%w: want READY, got %q", ErrProtocol, name)
	}
	peer, err := property(rest, "Socket-Type")
	if err != nil {
		return err
	}
	if !socket.accepts(peer) {
		return fmt.Errorf("%w: a %s socket cannot talk to the peer's %q", ErrProtocol, socket, peer)
	}
	return nil
}

// command splits a command's body into its name and the rest.
func command(body []byte) (name string, rest []byte) {
	if len(body) == 0 || len(body) < 1+int(body[0]) {
		return "", nil
	}
	n := 1 + int(body[0])
	return string(body[1:n]), body[n:]
}

// property finds a property of a READY command; names are compared without regard to case.
func property(b []byte, want string) (string, error) {
	for len(b) > 0 {
		n := int(b[0])
		if len(b) < 1+n+4 {
			return "", fmt.Errorf("%w: truncated property", ErrProtocol)
		}
		name := string(b[1 : 1+n])
		size := binary.BigEndian.Uint32(b[1+n:])
		b = b[1+n+4:]
		if uint64(size) > uint64(len(b)) {
			return "", fmt.Errorf("%w: property %q of %d bytes", ErrProtocol, name, size)
		}
		if strings.EqualFold(name, want) {
			return string(b[:size]), nil
		}
		b = b[size:]
	}
	return "", fmt.Errorf("%w: no property %q", ErrProtocol, want)
}

// Await waits until the peer has sent something and says so; false after the given time.
func (c *Conn) Await(wait time.Duration) (bool, error) {
	if c.r.Buffered() > 0 {
		return true, nil
	}
	if err := c.raw.SetReadDeadline(time.Now().Add(wait)); err != nil {
		return false, err
	}
	_, err := c.r.Peek(1)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return false, nil
	}
	return err == nil, err
}

// ReadMessage reads what comes next, which must be complete within ten seconds. The frames are valid until the next call.
//
// Heartbeats are answered here and give no frames. A subscription in the form of a command comes back in the form of a message: a
// frame of 1 (or 0 to cancel) and the topic. A message cut into more than sixteen frames is refused as too big.
func (c *Conn) ReadMessage() ([][]byte, error) {
	if err := c.raw.SetReadDeadline(time.Now().Add(ioTimeout)); err != nil {
		return nil, err
	}
	if cap(c.buf) > retainedBytes {
		c.buf = nil
	}
	c.buf, c.ends, c.frames = c.buf[:0], c.ends[:0], c.frames[:0]
	for {
		flags, size, err := c.readHeader()
		if err != nil {
			return nil, err
		}
		if flags&flagCommand != 0 {
			return c.readCommand(size)
		}
		if len(c.ends) == maxFrames || size > uint64(c.max-len(c.buf)) {
			return nil, fmt.Errorf("%w: frame %d of %d bytes, want at most %d", ErrTooBig, len(c.ends), size, c.max)
		}
		if err := c.readBody(int(size)); err != nil {
			return nil, err
		}
		c.ends = append(c.ends, len(c.buf))
		if flags&flagMore == 0 {
			return c.split(), nil
		}
	}
}

func (c *Conn) split() [][]byte {
	start := 0
	for _, end := range c.ends {
		c.frames = append(c.frames, c.buf[start:end:end])
		start = end
	}
	return c.frames
}

func (c *Conn) readHeader() (flags byte, size uint64, err error) {
	if flags, err = c.r.ReadByte(); err != nil {
		return 0, 0, err
	}
	if flags&^(flagMore|flagLong|flagCommand) != 0 {
		return 0, 0, fmt.Errorf("%w: frame flags %#x", ErrProtocol, flags)
	}
	if flags&flagLong == 0 {
		short, err := c.r.ReadByte()
		return flags, uint64(short), err
	}
	var long [8]byte
	if _, err := io.ReadFull(c.r, long[:]); err != nil {
		return 0, 0, err
	}
	return flags, binary.BigEndian.Uint64(long[:]), nil
}

// readBody appends the next size bytes to buf. Memory grows as bytes come in, not as they are announced.
func (c *Conn) readBody(size int) error {
	for size > 0 {
		step := min(size, max(64<<10, len(c.buf)))
		start := len(c.buf)
		c.buf = append(c.buf, make([]byte, step)...)
		if _, err := io.ReadFull(c.r, c.buf[start:]); err != nil {
			return err
		}
		size -= step
	}
	return nil
}

func (c *Conn) readCommand(size uint64) ([][]byte, error) {
	if size > maxCommand {
		return nil, fmt.Errorf("%w: command of %d bytes, want at most %d", ErrTooBig, size, maxCommand)
	}
	c.buf = c.buf[:0]
	if err := c.readBody(int(size)); err != nil {
		return nil, err
	}
	name, rest := command(c.buf)
	switch name {
	case "PING":
		return nil, c.pong(rest)
	case "PONG":
		c.pongs++
	case "SUBSCRIBE":
		return append(c.frames, append([]byte{1}, rest...)), nil
	case "CANCEL":
		return append(c.frames, append([]byte{0}, rest...)), nil
	case "ERROR":
		return nil, fmt.Errorf("%w: peer says %q", ErrProtocol, rest)
	}
	return nil, nil
}

// pong answers a PING: a time to live of two bytes, and a context that is sent back.
func (c *Conn) pong(ping []byte) error {
	b := append([]byte{4}, "PONG"...)
	if len(ping) > 2 {
		b = append(b, ping[2:min(len(ping), 2+16)]...)
	}
	return c.writeFrame(flagCommand, b)
}

// Ping sends a heartbeat. Peers that know heartbeats answer at once; see [Conn.Pongs].
func (c *Conn) Ping() error {
	return c.writeFrame(flagCommand, append([]byte{4}, "PING\x00\x00"...))
}

// Pongs returns how many heartbeats the peer has answered. Only the reading goroutine may call it.
func (c *Conn) Pongs() int { return c.pongs }

// Subscribe asks for the messages whose first frame starts with topic.
func (c *Conn) Subscribe(topic string) error {
	return c.writeFrame(0, append([]byte{1}, topic...))
}

func (c *Conn) writeFrame(flags byte, body []byte) error {
	c.writing.Lock()
	defer c.writing.Unlock()
	c.out = appendFrame(c.out[:0], flags, body)
	return c.flush()
}

// WriteMessage sends one message, within ten seconds.
func (c *Conn) WriteMessage(frames ...[]byte) error {
	c.writing.Lock()
	defer c.writing.Unlock()
	c.out = c.out[:0]
	for i, frame := range frames {
		var flags byte
		if i < len(frames)-1 {
			flags = flagMore
		}
		c.out = appendFrame(c.out, flags, frame)
	}
	return c.flush()
}

func (c *Conn) flush() error {
	if err := c.raw.SetWriteDeadline(time.Now().Add(ioTimeout)); err != nil {
		return err
	}
	_, err := c.raw.Write(c.out)
	if cap(c.out) > retainedBytes {
		c.out = nil
	}
	return err
}

func appendFrame(b []byte, flags byte, body []byte) []byte {
	if len(body) > 255 {
		b = append(b, flags|flagLong)
		b = binary.BigEndian.AppendUint64(b, uint64(len(body)))
	} else {
		b = append(b, flags, byte(len(body)))
	}
	return append(b, body...)
}
