// SPDX-License-Identifier: Apache-2.0

package kvevents

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"net"
	"sync"
	"time"

	"github.com/cespare/xxhash/v2"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/kvevents/zmtp"
)

// Sink takes what a stream learns. Calls come from one goroutine per stream; while one is under way the stream reads nothing, so a
// slow sink makes the publisher drop messages, which are then replayed, and never makes memory grow.
type Sink interface {
	// Apply takes the changes of one engine step. The batch is valid only during the call.
	Apply(*Batch)
	// Clear says that nothing is known any more about what the rank holds.
	Clear(rank int)
}

// StreamConfig says what to follow. A zero field means its default.
type StreamConfig struct {
	// Endpoint is the publisher's PUB socket, such as tcp://10.0.0.7:5557. With data parallelism each rank has its own, on the port
	// plus its rank, and needs a Stream of its own.
	Endpoint string
	// Replay is the publisher's ROUTER socket; empty when it has none. Without it every gap clears the rank, and a stream that starts
	// after its engine knows only what changes from then on.
	Replay string
	// Topic is the prefix of the topics to follow; empty for all.
	Topic string
	// Limits bound each message.
	Limits Limits
	// MinBackoff and MaxBackoff bound the pause before connecting again, which doubles from one to the other and is shortened by up
	// to half at random (default 250 ms and 10 s).
	MinBackoff, MaxBackoff time.Duration
	// Heartbeat is how often a quiet connection is probed (default 10 s). A peer that has answered probes and then misses three is
	// taken for dead. libzmq answers since 4.2.
	Heartbeat time.Duration
	// SilentAfter is how long no event may come before Notify is told (default 1 min). An idle engine publishes nothing, so silence
	// is suspicious only while the engine's metrics show work.
	SilentAfter time.Duration
	// ReplayTimeout bounds one replay (default 30 s).
	ReplayTimeout time.Duration
	// Notify is told of transitions, if set. It must not block.
	Notify func(Notice)
	// Dial replaces [net.Dialer.DialContext], if set.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
	// Now replaces [time.Now], if set.
	Now func() time.Time
}

func (c StreamConfig) withDefaults() StreamConfig {
	c.Limits = c.Limits.withDefaults()
	c.MinBackoff = positiveOr(c.MinBackoff, 250*time.Millisecond)
	c.MaxBackoff = max(positiveOr(c.MaxBackoff, 10*time.Second), c.MinBackoff)
	c.Heartbeat = positiveOr(c.Heartbeat, 10*time.Second)
	c.SilentAfter = positiveOr(c.SilentAfter, time.Minute)
	c.ReplayTimeout = positiveOr(c.ReplayTimeout, 30*time.Second)
	if c.Notify == nil {
		c.Notify = func(Notice) {}
	}
	if c.Now == nil {
		c.Now = time.Now
	}
	return c
}

// Transition is what a [Notice] reports.
type Transition string

// The transitions of a stream.
const (
	// Connected: subscribed; Err is nil.
	Connected Transition = "connected"
	// Disconnected: the connection ended or could not be made; Err says why. Repeated failures are reported once.
	Disconnected Transition = "disconnected"
	// Silent: connected, but no event for SilentAfter.
	Silent Transition = "silent"
	// Replayed: Missing batches were lost on the way and replayed.
	Replayed Transition = "replayed"
	// Lost: batches were lost for good and the rank was cleared; Err says why.
	Lost Transition = "lost"
	// Restarted: the publisher started anew and the rank was cleared.
	Restarted Transition = "restarted"
	// Garbled: what comes can't be read, or not all of it; Err says why. Perhaps it is another engine's format.
	Garbled Transition = "garbled"
	// Readable: all that has come for a minute could be read again.
	Readable Transition = "readable"
)

// Notice is one transition of a stream.
type Notice struct {
	Transition Transition
	// Missing is the number of batches that did not come live.
	Missing uint64
	// Err is the cause, where there is one.
	Err error
}

// StreamStats are a stream's counters since it was made, and its state.
type StreamStats struct {
	// Connected says whether a subscription is in force.
	Connected bool
	// Connects counts connections made.
	Connects uint64
	// Messages counts batches applied, live or replayed; ReplayedMessages those of them that were replayed.
	Messages, ReplayedMessages uint64
	// Duplicates counts live messages that a replay had brought already.
	Duplicates uint64
	// Blocks counts block hashes in applied events, stored or removed.
	Blocks uint64
	// Skipped counts events left out of applied batches.
	Skipped Skipped
	// Gaps counts holes in the sequence, Missing the batches in them.
	Gaps, Missing uint64
	// Replays counts replays asked for.
	Replays uint64
	// Lost counts how often the rank was cleared because events were lost for good; Restarts because the publisher started anew.
	Lost, Restarts uint64
	// DialErrors, ReadErrors, FrameErrors, DecodeErrors and ReplayErrors count failures by kind: no connection, a connection that
	// broke, a message without a sequence number, a payload that is no batch or of a ninth rank, a replay without its end.
	DialErrors, ReadErrors, FrameErrors, DecodeErrors, ReplayErrors uint64
	// LastMessage is when the last live message came; zero before the first. Its age is the time since the engine changed anything.
	LastMessage time.Time
	// Lag is how much later than the batch's own time the last live batch was applied. It includes the difference of the clocks.
	Lag time.Duration
	// Next is the sequence number expected next.
	Next uint64
}

// Stream follows one publisher. Make it with [NewStream] and start it with [Stream.Run].
type Stream struct {
	config  StreamConfig
	sink    Sink
	decoder *Decoder

	// What follows belongs to Run's goroutine.
	started bool             // next and digest mean something
	next    uint64           // sequence number expected next
	digest  uint64           // of the payload before next, to know the publisher again
	live    uint64           // last live sequence number of this connection
	lively  bool             // live means something
	ahead   bool             // a replay on this connection went ahead of its live messages
	silent  bool             // Silent was reported
	garbled time.Time        // when the last garbled payload came, zero once Readable was reported
	ranks   map[int]struct{} // ranks this publisher has spoken for
	behind  bool             // what was missed while there was no connection has not been replayed yet
	rebuild bool             // a replay failed, so that all has to be replayed once that works again
	failed  int              // replays that failed in a row
	pause   time.Time        // no replay before

	mu    sync.Mutex
	stats StreamStats
}

// NewStream checks the configuration. Nothing is dialed before [Stream.Run].
func NewStream(config StreamConfig, sink Sink) (*Stream, error) {
	if _, _, err := zmtp.Endpoint(config.Endpoint); err != nil {
		return nil, fmt.Errorf("kv events: %w", err)
	}
	if config.Replay != "" {
		if _, _, err := zmtp.Endpoint(config.Replay); err != nil {
			return nil, fmt.Errorf("kv events replay: %w", err)
		}
	}
	config = config.withDefaults()
	return &Stream{config: config, sink: sink, decoder: NewDecoder(config.Limits), ranks: map[int]struct{}{}}, nil
}

// Stats returns the counters. It may be called at any time.
func (s *Stream) Stats() StreamStats {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.stats
}

func (s *Stream) count(change func(*StreamStats)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change(&s.stats)
}

// Run follows the publisher until ctx ends, whose error it returns. It starts no goroutines and must be called once.
func (s *Stream) Run(ctx context.Context) error {
	failures := 0
	for {
		connected, alive, err := s.session(ctx)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if alive {
			failures = 0
		}
		if failures == 0 || connected {
			s.config.Notify(Notice{Transition: Disconnected, Err: err})
		}
		if !sleep(ctx, s.backoff(failures)) {
			return ctx.Err()
		}
		failures++
	}
}

func (s *Stream) backoff(failures int) time.Duration {
	d := s.config.MaxBackoff
	if failures < 16 {
		d = min(d, s.config.MinBackoff<<failures)
	}
	return d - rand.N(d/2+1)
}

func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}

// session follows the publisher over one connection. alive says whether it brought at least one message.
func (s *Stream) session(ctx context.Context) (connected, alive bool, err error) {
	c, err := zmtp.Dial(ctx, s.config.Dial, s.config.Endpoint, zmtp.Sub, s.maxMessage())
	if err != nil {
		s.count(func(st *StreamStats) { st.DialErrors++ })
		return false, false, err
	}
	defer c.Close()
	s.lively, s.ahead, s.behind = false, false, s.config.Replay != ""
	// The probe's answer tells that the subscription has arrived. What is published from then on comes live, so a replay asked for
	// afterwards leaves no hole between the two.
	if err := errors.Join(c.Subscribe(s.config.Topic), c.Ping()); err != nil {
		s.count(func(st *StreamStats) { st.ReadErrors++ })
		return false, false, fmt.Errorf("subscribe at %s: %w", s.config.Endpoint, err)
	}
	s.count(func(st *StreamStats) { st.Connects++; st.Connected = true })
	s.config.Notify(Notice{Transition: Connected})
	before := s.Stats().Messages
	err = s.follow(ctx, c)
	s.count(func(st *StreamStats) {
		st.Connected = false
		alive = st.Messages > before
		if ctx.Err() == nil {
			st.ReadErrors++
		}
	})
	return true, alive, fmt.Errorf("follow %s: %w", s.config.Endpoint, err)
}

// maxMessage allows for the topic and the sequence number beside the payload.
func (s *Stream) maxMessage() int { return s.config.Limits.PayloadBytes + 4096 }

var errDead = errors.New("peer stopped answering heartbeats")

// follow reads until the connection breaks.
func (s *Stream) follow(ctx context.Context, c *zmtp.Conn) error {
	wait := min(time.Second, s.config.Heartbeat) // for the first answer
	heard, quietSince := s.config.Now(), s.config.Now()
	for {
		ready, err := c.Await(wait)
		if err != nil {
			return err
		}
		wait = s.config.Heartbeat
		var frames [][]byte
		if ready {
			if frames, err = c.ReadMessage(); err != nil {
				return err
			}
			heard = s.config.Now()
		}
		if s.behind {
			s.catchUp(ctx)
		}
		switch now := s.config.Now(); {
		case frames != nil:
			s.message(ctx, frames)
			// Time spent applying and replaying is ours, not the peer's silence.
			heard, quietSince, s.silent = s.config.Now(), s.config.Now(), false
		case !ready && c.Pongs() > 0 && now.Sub(heard) >= 3*s.config.Heartbeat:
			return errDead
		case !ready:
			if err := c.Ping(); err != nil {
				return err
			}
		}
		s.noteSilence(s.config.Now().Sub(quietSince))
	}
}

func (s *Stream) noteSilence(d time.Duration) {
	if s.silent || d < s.config.SilentAfter {
		return
	}
	s.silent = true
	s.config.Notify(Notice{Transition: Silent})
}

// numbered splits a message, live or replayed, into its sequence number and payload, which are its last two frames in every form.
func numbered(frames [][]byte) (seq uint64, payload []byte, ok bool) {
	n := len(frames)
	if n < 2 || n > 4 || len(frames[n-2]) != 8 {
		return 0, nil, false
	}
	return binary.BigEndian.Uint64(frames[n-2]), frames[n-1], true
}

// message takes one live message.
func (s *Stream) message(ctx context.Context, frames [][]byte) {
	seq, payload, ok := numbered(frames)
	if !ok {
		s.count(func(st *StreamStats) { st.FrameErrors++ })
		return
	}
	now := s.config.Now()
	s.count(func(st *StreamStats) { st.LastMessage = now })
	if s.wentBack(seq) {
		s.restarted()
		s.catchUp(ctx)
	}
	s.live, s.lively = seq, true
	if !s.started {
		s.started, s.next = true, seq
	}
	if seq > s.next {
		// The frames belong to the connection, which is not read during the replay.
		s.closeGap(ctx, seq)
	}
	if seq < s.next {
		s.count(func(st *StreamStats) { st.Duplicates++ })
		return
	}
	s.apply(seq, payload, false)
}

// wentBack says whether a live sequence number means that the publisher started anew. On one connection they only grow. The first
// one of a connection is never lower than what came over an earlier one, but may be lower than what was replayed over this one.
func (s *Stream) wentBack(seq uint64) bool {
	if s.lively {
		return seq <= s.live
	}
	return s.started && !s.ahead && seq < s.next
}

// readableAfter is how long everything must have been readable for the stream to count as readable again, so that a publisher
// of which some batches are not is reported once.
const readableAfter = time.Minute

// noteReadable reports once that payloads can't be read, and once that they can be again.
func (s *Stream) noteReadable(err error) {
	now, garbled := s.config.Now(), !s.garbled.IsZero()
	switch {
	case err != nil:
		s.garbled = now
		if !garbled {
			s.config.Notify(Notice{Transition: Garbled, Err: err})
		}
	case garbled && now.Sub(s.garbled) >= readableAfter:
		s.garbled = time.Time{}
		s.config.Notify(Notice{Transition: Readable})
	}
}

// maxStreamRanks is how many ranks one publisher may speak for. Engines have a publisher for each rank; the bound is against nonsense.
const maxStreamRanks = 8

// apply decodes a batch and moves on, whatever comes of it.
func (s *Stream) apply(seq uint64, payload []byte, replayed bool) {
	s.next, s.digest = seq+1, xxhash.Sum64(payload)
	b, err := s.decoder.Decode(payload)
	if err != nil {
		// Nobody can say which blocks came and went in there.
		s.clear()
		s.count(func(st *StreamStats) { st.DecodeErrors++; st.Lost++; st.Next = s.next })
		s.noteReadable(err)
		return
	}
	s.noteReadable(b.Skipped.err())
	if _, known := s.ranks[b.Rank]; !known && len(s.ranks) == maxStreamRanks {
		s.count(func(st *StreamStats) { st.DecodeErrors++; st.Next = s.next })
		return
	}
	s.ranks[b.Rank] = struct{}{}
	s.sink.Apply(b)
	blocks := 0
	for i := range b.Events {
		blocks += len(b.Events[i].Hashes)
	}
	now := s.config.Now()
	s.count(func(st *StreamStats) {
		st.Messages++
		st.Blocks += uint64(blocks)
		st.Skipped.Unknown += b.Skipped.Unknown
		st.Skipped.Malformed += b.Skipped.Malformed
		st.Skipped.TooBig += b.Skipped.TooBig
		st.Next = s.next
		if replayed {
			st.ReplayedMessages++
		} else if !b.Time.IsZero() {
			st.Lag = now.Sub(b.Time)
		}
	})
}

func (s *Stream) clear() {
	for rank := range s.ranks {
		s.sink.Clear(rank)
	}
}

// lose clears what the publisher has spoken for.
func (s *Stream) lose(cause error) {
	s.clear()
	s.count(func(st *StreamStats) { st.Lost++ })
	s.config.Notify(Notice{Transition: Lost, Err: cause})
}

// restarted clears everything and forgets the position.
func (s *Stream) restarted() {
	s.clear()
	s.started, s.next, s.lively, s.ahead = false, 0, false, false
	s.count(func(st *StreamStats) { st.Restarts++; st.Next = 0 })
	s.config.Notify(Notice{Transition: Restarted})
}

var (
	errStranger  = errors.New("the publisher is not the one followed before")
	errTooLate   = errors.New("the publisher has dropped the batches asked for")
	errEndless   = errors.New("replay sent no end")
	errNoReplay  = errors.New("the publisher offers no replay")
	errShortened = errors.New("replay ended before the gap did")
	errPaused    = errors.New("an earlier replay failed a short time ago")
)

// catchUp replays what a new connection has missed: everything the publisher still has when it is new to us, else what came after
// the last batch. That last batch is asked for too, because an equal payload proves that the publisher has not restarted. When the
// replay fails, s.behind stays set and it is tried again later.
func (s *Stream) catchUp(ctx context.Context) {
	if s.config.Replay == "" || s.config.Now().Before(s.pause) {
		return
	}
	if s.started && !s.rebuild {
		met := false
		err := s.replay(ctx, s.next-1, func(seq uint64, payload []byte) error {
			if met {
				return s.advance(seq, payload)
			}
			if seq != s.next-1 || xxhash.Sum64(payload) != s.digest {
				return errStranger
			}
			met = true
			return nil
		})
		if met || (err != nil && !errors.Is(err, errStranger)) {
			s.behind = !met // the rest, if any, shows as a gap
			return
		}
		s.restarted()
	}
	if s.started {
		s.clear()
		s.started, s.next = false, 0
	}
	// Blocks from before the oldest batch that can be replayed stay unknown; that is not a loss of what was known.
	err := s.replay(ctx, 0, s.advance)
	s.behind, s.rebuild = err != nil, err != nil
}

// advance applies a replayed batch; one that does not follow on the last clears what was known before.
func (s *Stream) advance(seq uint64, payload []byte) error {
	if s.started && seq < s.next {
		return nil
	}
	if s.started && seq > s.next {
		s.lose(fmt.Errorf("batch %d follows %d: %w", seq, s.next, errTooLate))
	}
	s.started, s.ahead = true, true
	s.apply(seq, payload, true)
	return nil
}

// closeGap replays the batches from next to before seq, once. A replay that is cut short is good as far as it went. What remains
// missing clears the rank.
func (s *Stream) closeGap(ctx context.Context, seq uint64) {
	missing := seq - s.next
	s.count(func(st *StreamStats) { st.Gaps++; st.Missing += missing })
	lost := s.Stats().Lost
	err := errNoReplay
	if s.config.Replay != "" {
		err = s.replay(ctx, s.next, s.advance)
	}
	if s.next >= seq {
		if s.Stats().Lost == lost {
			s.config.Notify(Notice{Transition: Replayed, Missing: missing})
		}
		return
	}
	if err == nil {
		err = errShortened
	} else if s.config.Replay != "" {
		s.behind, s.rebuild = true, true
	}
	s.lose(fmt.Errorf("batches %d to %d: %w", s.next, seq-1, err))
	s.next = seq
}

// maxReplayPause is the longest time without a replay after many failed ones.
const maxReplayPause = 10 * time.Minute

// replay asks for the batches from a sequence number on and hands them over until the end marker or an error of visit. As the live
// stream waits meanwhile, replays that fail one after the other are followed by a growing time without.
func (s *Stream) replay(ctx context.Context, from uint64, visit func(seq uint64, payload []byte) error) error {
	if s.config.Now().Before(s.pause) {
		return errPaused
	}
	s.count(func(st *StreamStats) { st.Replays++ })
	err := s.readReplay(ctx, from, visit)
	if err == nil || errors.Is(err, errStranger) {
		s.failed = 0
		return err
	}
	if ctx.Err() != nil {
		return err
	}
	s.count(func(st *StreamStats) { st.ReplayErrors++ })
	// The first one may have been cut off together with the live stream.
	if s.failed++; s.failed > 1 {
		s.pause = s.config.Now().Add(min(s.config.MaxBackoff<<min(s.failed-2, 16), maxReplayPause))
	}
	return err
}

func (s *Stream) readReplay(ctx context.Context, from uint64, visit func(seq uint64, payload []byte) error) error {
	ctx, cancel := context.WithTimeout(ctx, s.config.ReplayTimeout)
	defer cancel()
	c, err := zmtp.Dial(ctx, s.config.Dial, s.config.Replay, zmtp.Dealer, s.maxMessage())
	if err != nil {
		return err
	}
	defer c.Close()
	if err := c.WriteMessage(nil, binary.BigEndian.AppendUint64(nil, from)); err != nil {
		return fmt.Errorf("ask %s: %w", s.config.Replay, err)
	}
	for {
		ready, err := c.Await(s.config.ReplayTimeout)
		if err == nil && !ready {
			err = errEndless
		}
		if err != nil {
			return fmt.Errorf("replay from %s: %w", s.config.Replay, err)
		}
		frames, err := c.ReadMessage()
		if err != nil {
			return fmt.Errorf("replay from %s: %w", s.config.Replay, err)
		}
		if frames == nil {
			continue
		}
		if isEnd(frames) {
			return nil
		}
		seq, payload, ok := numbered(frames)
		if !ok {
			s.count(func(st *StreamStats) { st.FrameErrors++ })
			continue
		}
		if err := visit(seq, payload); err != nil {
			return err
		}
	}
}

// isEnd recognises the message after the last one: a sequence number of all ones.
func isEnd(frames [][]byte) bool {
	for _, f := range frames[max(0, len(frames)-2):] {
		if len(f) == 8 && binary.BigEndian.Uint64(f) == math.MaxUint64 {
			return true
		}
	}
	return false
}
