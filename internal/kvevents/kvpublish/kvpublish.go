// SPDX-License-Identifier: Apache-2.0

// Package kvpublish is the engine's side of a KV-event stream, as vLLM's ZmqEventPublisher is: a PUB socket with a sequence number
// in each message, and a ROUTER socket that replays the latest batches. Simulated engines and tests publish with it; it also has
// the faults tests need (lost messages, restarts, cut connections).
package kvpublish

import (
	"context"
	"encoding/binary"
	"errors"
	"math"
	"net"
	"sync"
	"time"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/kvevents/zmtp"
)

// Config says how a publisher behaves. A zero field means its default.
type Config struct {
	// Topic is the first frame of each message; empty by default, as in vLLM.
	Topic string
	// BufferSteps is how many of the latest batches can be replayed (default 10,000, as in vLLM).
	BufferSteps int
	// ReplayFrames is the form of a replayed message: 4 (vLLM 0.25 and later; default), 3 (before), or 2 (without the empty frame).
	ReplayFrames int
	// Queue is how many messages may wait for one subscriber before further ones are dropped silently (default 1,000).
	Queue int
}

// Publisher serves one stream. Its methods are safe for concurrent use.
type Publisher struct {
	config Config
	pub    net.Listener
	replay net.Listener
	ctx    context.Context
	cancel context.CancelFunc
	tasks  sync.WaitGroup

	mu          sync.Mutex
	next        uint64
	buffer      []step // oldest first
	subscribers map[*subscriber]struct{}
	conns       map[*zmtp.Conn]struct{}
	replays     int
}

type step struct {
	seq     uint64
	payload []byte
}

type subscriber struct {
	topics map[string]int
	queue  chan step
}

// New starts a publisher on two listeners, which it owns. replay may be nil: then nothing can be replayed.
func New(pub, replay net.Listener, config Config) *Publisher {
	if config.BufferSteps <= 0 {
		config.BufferSteps = 10_000
	}
	if config.ReplayFrames == 0 {
		config.ReplayFrames = 4
	}
	if config.Queue <= 0 {
		config.Queue = 1000
	}
	ctx, cancel := context.WithCancel(context.Background())
	p := &Publisher{
		config: config, pub: pub, replay: replay, ctx: ctx, cancel: cancel,
		subscribers: map[*subscriber]struct{}{}, conns: map[*zmtp.Conn]struct{}{},
	}
	p.tasks.Go(func() { p.accept(pub, zmtp.Pub, p.serveSubscriber) })
	if replay != nil {
		p.tasks.Go(func() { p.accept(replay, zmtp.Router, p.serveReplay) })
	}
	return p
}

// Endpoint returns the address to subscribe to.
func (p *Publisher) Endpoint() string { return "tcp://" + p.pub.Addr().String() }

// ReplayEndpoint returns the address to ask for replays, empty when there is none.
func (p *Publisher) ReplayEndpoint() string {
	if p.replay == nil {
		return ""
	}
	return "tcp://" + p.replay.Addr().String()
}

// Publish sends a batch to all subscribers and returns its sequence number.
func (p *Publisher) Publish(b *Batch) uint64 { return p.PublishPayload(b.Append(nil)) }

// PublishPayload sends an encoded batch, or anything else, and returns its sequence number. The payload must not change afterwards.
func (p *Publisher) PublishPayload(payload []byte) uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.keep(payload)
	for sub := range p.subscribers {
		if !sub.wants(p.config.Topic) {
			continue
		}
		select {
		case sub.queue <- s:
		default: // as a PUB socket at its high-water mark
		}
	}
	return s.seq
}

// Lose keeps a batch for replay but sends it to nobody, as when every subscriber was too slow.
func (p *Publisher) Lose(b *Batch) uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.keep(b.Append(nil)).seq
}

func (p *Publisher) keep(payload []byte) step {
	s := step{seq: p.next, payload: payload}
	p.next++
	if len(p.buffer) >= p.config.BufferSteps {
		p.buffer = p.buffer[len(p.buffer)-p.config.BufferSteps+1:]
	}
	p.buffer = append(p.buffer, s)
	return s
}

// Forget drops the n oldest batches from the replay buffer.
func (p *Publisher) Forget(n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.buffer = p.buffer[min(n, len(p.buffer)):]
}

// Restart starts again at sequence number 0 with nothing to replay, as a new process does, and cuts all connections.
func (p *Publisher) Restart() {
	p.mu.Lock()
	p.next, p.buffer = 0, nil
	p.mu.Unlock()
	p.Disconnect()
}

// Disconnect cuts all connections. Subscribers may come back.
func (p *Publisher) Disconnect() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.conns {
		_ = c.Close() // the reader notices
	}
	clear(p.subscribers)
}

// Subscribers returns how many subscriptions are in force.
func (p *Publisher) Subscribers() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := 0
	for sub := range p.subscribers {
		if len(sub.topics) > 0 {
			n++
		}
	}
	return n
}

// Replays returns how many replays were asked for.
func (p *Publisher) Replays() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.replays
}

// Close stops the publisher and waits until all its goroutines have ended.
func (p *Publisher) Close() error {
	p.cancel()
	err := p.pub.Close()
	if p.replay != nil {
		err = errors.Join(err, p.replay.Close())
	}
	p.tasks.Wait()
	return err
}

func (p *Publisher) accept(l net.Listener, socket zmtp.Socket, serve func(*zmtp.Conn)) {
	for {
		raw, err := l.Accept()
		if err != nil {
			return
		}
		p.tasks.Go(func() {
			c, err := zmtp.NewConn(p.ctx, raw, socket, 1<<20)
			if err != nil {
				return
			}
			p.track(c, true)
			defer p.track(c, false)
			serve(c)
		})
	}
}

func (p *Publisher) track(c *zmtp.Conn, on bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if on {
		p.conns[c] = struct{}{}
		return
	}
	delete(p.conns, c)
	_ = c.Close() // both ends are done with it
}

func (p *Publisher) serveSubscriber(c *zmtp.Conn) {
	sub := &subscriber{topics: map[string]int{}, queue: make(chan step, p.config.Queue)}
	p.mu.Lock()
	p.subscribers[sub] = struct{}{}
	p.mu.Unlock()
	var writer sync.WaitGroup
	writer.Go(func() { p.send(c, sub) })
	p.readSubscriptions(c, sub)
	p.mu.Lock()
	delete(p.subscribers, sub)
	close(sub.queue)
	p.mu.Unlock()
	_ = c.Close() // ends a write that is under way
	writer.Wait()
}

func (p *Publisher) send(c *zmtp.Conn, sub *subscriber) {
	for s := range sub.queue {
		if c.WriteMessage([]byte(p.config.Topic), binary.BigEndian.AppendUint64(nil, s.seq), s.payload) != nil {
			_ = c.Close() // the reader notices
			return
		}
	}
}

func (p *Publisher) readSubscriptions(c *zmtp.Conn, sub *subscriber) {
	for {
		frames, err := next(c)
		if err != nil {
			return
		}
		if len(frames) != 1 || len(frames[0]) == 0 {
			continue
		}
		topic := string(frames[0][1:])
		p.mu.Lock()
		switch frames[0][0] {
		case 1:
			sub.topics[topic]++
		case 0:
			delete(sub.topics, topic)
		}
		p.mu.Unlock()
	}
}

func (s *subscriber) wants(topic string) bool {
	for prefix := range s.topics {
		if len(topic) >= len(prefix) && topic[:len(prefix)] == prefix {
			return true
		}
	}
	return false
}

// next waits for the next message for as long as the connection lives.
func next(c *zmtp.Conn) ([][]byte, error) {
	for {
		ready, err := c.Await(time.Hour)
		if err != nil {
			return nil, err
		}
		if !ready {
			continue
		}
		frames, err := c.ReadMessage()
		if err != nil || frames != nil {
			return frames, err
		}
	}
}

func (p *Publisher) serveReplay(c *zmtp.Conn) {
	for {
		frames, err := next(c)
		if err != nil {
			return
		}
		if len(frames) != 2 || len(frames[0]) != 0 || len(frames[1]) != 8 {
			continue // vLLM wants exactly an empty frame and a number
		}
		if p.answer(c, binary.BigEndian.Uint64(frames[1])) != nil {
			return
		}
	}
}

func (p *Publisher) answer(c *zmtp.Conn, from uint64) error {
	p.mu.Lock()
	p.replays++
	steps := p.buffer[:len(p.buffer):len(p.buffer)]
	steps = append([]step(nil), steps...)
	p.mu.Unlock()
	for _, s := range steps {
		if s.seq < from {
			continue
		}
		if err := c.WriteMessage(p.form(p.config.Topic, s.seq, s.payload)...); err != nil {
			return err
		}
	}
	return c.WriteMessage(p.form("", math.MaxUint64, nil)...)
}

func (p *Publisher) form(topic string, seq uint64, payload []byte) [][]byte {
	number := binary.BigEndian.AppendUint64(nil, seq)
	switch p.config.ReplayFrames {
	case 2:
		return [][]byte{number, payload}
	case 3:
		return [][]byte{nil, number, payload}
	}
	return [][]byte{nil, []byte(topic), number, payload}
}
