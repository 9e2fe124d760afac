// SPDX-License-Identifier: Apache-2.0

package kvevents_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/kvevents"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/kvevents/kvpublish"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/kvevents/zmtp"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func listen(t testing.TB) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// publish starts a publisher that ends with the test.
func publish(t testing.TB, replay bool, config kvpublish.Config) *kvpublish.Publisher {
	t.Helper()
	var second net.Listener
	if replay {
		second = listen(t)
	}
	p := kvpublish.New(listen(t), second, config)
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
	return p
}

// follower is a running stream, the index it feeds, and the notices it gave.
type follower struct {
	*kvevents.Stream
	index *kvevents.Index
	stop  func()

	mu      sync.Mutex
	notices []kvevents.Notice
}

func (f *follower) seen(tr kvevents.Transition) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := 0
	for _, notice := range f.notices {
		if notice.Transition == tr {
			n++
		}
	}
	return n
}

// follow starts a stream that ends with the test. change may adapt its configuration.
func follow(t testing.TB, endpoint, replay string, change func(*kvevents.StreamConfig, *follower) kvevents.Sink) *follower {
	t.Helper()
	f := &follower{index: kvevents.NewIndex(kvevents.ViewConfig{Blocks: 10_000})}
	config := kvevents.StreamConfig{
		Endpoint: endpoint, Replay: replay, MinBackoff: time.Millisecond, MaxBackoff: 20 * time.Millisecond,
		Heartbeat: time.Second, ReplayTimeout: 5 * time.Second,
		Notify: func(n kvevents.Notice) {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.notices = append(f.notices, n)
		},
	}
	var sink kvevents.Sink = f.index
	if change != nil {
		if s := change(&config, f); s != nil {
			sink = s
		}
	}
	s, err := kvevents.NewStream(config, sink)
	if err != nil {
		t.Fatal(err)
	}
	f.Stream = s
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	f.stop = sync.OnceFunc(func() {
		cancel()
		select {
		case err := <-done:
			if !errors.Is(err, context.Canceled) {
				t.Errorf("run ended with %v", err)
			}
		case <-time.After(10 * time.Second):
			t.Error("run did not end after its context was cancelled")
		}
	})
	t.Cleanup(f.stop)
	return f
}

// await polls until a condition holds.
func await(t testing.TB, what string, holds func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !holds(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: not within a minute", what)
		}
	}
}

// block is a batch of one block at the head of a prompt, named and filled with n.
func block(n int) *kvpublish.Batch {
	b := &kvpublish.Batch{Time: time.Now()}
	b.Stored(kvpublish.Stored{Hashes: []uint64{uint64(n) + 1}, Tokens: []uint32{uint32(n), 7}, BlockSize: 2})
	return b
}

func (f *follower) holds(n int) bool {
	m, _ := f.index.Longest([]uint32{uint32(n), 7}, "", nil)
	return m.Blocks == 1
}

func (f *follower) holdsAll(from, to int) bool {
	for n := from; n < to; n++ {
		if !f.holds(n) {
			return false
		}
	}
	return true
}

func (f *follower) holdsNone(from, to int) bool {
	for n := from; n < to; n++ {
		if f.holds(n) {
			return false
		}
	}
	return true
}

// subscribed waits until live messages reach the follower.
func (f *follower) subscribed(t testing.TB, p *kvpublish.Publisher) {
	t.Helper()
	await(t, "subscription", func() bool { return f.Stats().Connected && p.Subscribers() == 1 })
}

func TestStreamLive(t *testing.T) {
	p := publish(t, false, kvpublish.Config{Topic: "kv@10.0.0.1:8000@m"})
	f := follow(t, p.Endpoint(), "", func(c *kvevents.StreamConfig, _ *follower) kvevents.Sink { c.Topic = "kv@"; return nil })
	f.subscribed(t, p)
	for n := range 50 {
		p.Publish(block(n))
	}
	await(t, "blocks", func() bool { return f.holdsAll(0, 50) })
	st := f.Stats()
	if st.Messages != 50 || st.Blocks != 50 || st.Gaps != 0 || st.Next != 50 || st.LastMessage.IsZero() || st.Lag <= 0 || st.Lag > time.Minute {
		t.Errorf("stats %+v", st)
	}
}

func TestStreamOtherTopic(t *testing.T) {
	p := publish(t, true, kvpublish.Config{Topic: "other"})
	f := follow(t, p.Endpoint(), "", func(c *kvevents.StreamConfig, _ *follower) kvevents.Sink { c.Topic = "kv@"; return nil })
	f.subscribed(t, p)
	p.Publish(block(1))
	g := follow(t, p.Endpoint(), p.ReplayEndpoint(), nil)
	await(t, "the other follower", func() bool { return g.holds(1) })
	if f.holds(1) {
		t.Error("a message of another topic was applied")
	}
}

// TestStreamCatchesUp checks that a stream which starts after its engine knows what can be replayed, in each form of the replay.
func TestStreamCatchesUp(t *testing.T) {
	for _, frames := range []int{2, 3, 4} {
		t.Run(fmt.Sprintf("%d frames", frames), func(t *testing.T) {
			p := publish(t, true, kvpublish.Config{ReplayFrames: frames, Topic: "kv"})
			for n := range 30 {
				p.Publish(block(n))
			}
			p.Forget(10)
			f := follow(t, p.Endpoint(), p.ReplayEndpoint(), nil)
			await(t, "replayed blocks", func() bool { return f.holdsAll(10, 30) })
			if !f.holdsNone(0, 10) {
				t.Error("blocks from before the buffer are matched")
			}
			f.subscribed(t, p)
			p.Publish(block(30))
			await(t, "a live block", func() bool { return f.holds(30) })
			if st := f.Stats(); st.Lost != 0 || st.Gaps != 0 || st.Replays != 1 {
				t.Errorf("stats %+v, want one replay and no loss", st)
			}
		})
	}
}

func TestStreamClosesGaps(t *testing.T) {
	for _, frames := range []int{2, 3, 4} {
		t.Run(fmt.Sprintf("%d frames", frames), func(t *testing.T) {
			p := publish(t, true, kvpublish.Config{ReplayFrames: frames})
			f := follow(t, p.Endpoint(), p.ReplayEndpoint(), nil)
			f.subscribed(t, p)
			p.Publish(block(0))
			await(t, "the first block", func() bool { return f.holds(0) && p.Replays() >= 1 })
			for n := 1; n < 20; n++ {
				if n%3 == 0 {
					p.Publish(block(n))
				} else {
					p.Lose(block(n))
				}
			}
			p.Publish(block(20))
			await(t, "all blocks", func() bool { return f.holdsAll(0, 21) })
			await(t, "a notice for each gap", func() bool { return f.seen(kvevents.Replayed) == int(f.Stats().Gaps) })
			if st := f.Stats(); st.Gaps == 0 || st.Missing == 0 || st.Lost != 0 || st.Restarts != 0 {
				t.Errorf("stats %+v", st)
			}
		})
	}
}

func TestStreamGapWithoutReplay(t *testing.T) {
	p := publish(t, false, kvpublish.Config{})
	f := follow(t, p.Endpoint(), "", nil)
	f.subscribed(t, p)
	p.Publish(block(0))
	await(t, "the first block", func() bool { return f.holds(0) })
	p.Lose(block(1))
	p.Publish(block(2))
	await(t, "the block after the gap", func() bool { return f.holds(2) })
	if !f.holdsNone(0, 2) {
		t.Error("blocks from before the gap are still matched")
	}
	if st := f.Stats(); st.Gaps != 1 || st.Missing != 1 || st.Lost != 1 || f.seen(kvevents.Lost) != 1 {
		t.Errorf("stats %+v", st)
	}
}

// TestStreamGapOlderThanBuffer checks that what can still be replayed is taken, but nothing from before is believed any more.
func TestStreamGapOlderThanBuffer(t *testing.T) {
	p := publish(t, true, kvpublish.Config{})
	f := follow(t, p.Endpoint(), p.ReplayEndpoint(), nil)
	f.subscribed(t, p)
	p.Publish(block(0))
	await(t, "the first block", func() bool { return f.holds(0) })
	for n := 1; n < 10; n++ {
		p.Lose(block(n))
	}
	p.Forget(5) // 0 to 4
	p.Publish(block(10))
	await(t, "what is left", func() bool { return f.holdsAll(5, 11) })
	if !f.holdsNone(0, 5) {
		t.Error("blocks from before the gap are still matched")
	}
	if st := f.Stats(); st.Lost != 1 {
		t.Errorf("stats %+v, want one loss", st)
	}
}

func TestStreamRestart(t *testing.T) {
	for _, replay := range []bool{false, true} {
		for _, behind := range []int{0, 3, 10, 14} { // the new process is behind, level with, or ahead of the old one
			t.Run(fmt.Sprintf("replay %t, %d batches", replay, behind), func(t *testing.T) {
				p := publish(t, replay, kvpublish.Config{})
				f := follow(t, p.Endpoint(), p.ReplayEndpoint(), nil)
				f.subscribed(t, p)
				for n := range 10 {
					p.Publish(block(n))
				}
				await(t, "blocks", func() bool { return f.holdsAll(0, 10) })
				if !replay && behind >= 10 {
					t.Skip("without a replay a restarted engine shows only when it is behind")
				}
				p.Restart()
				for n := range behind {
					p.Publish(block(100 + n))
				}
				f.subscribed(t, p)
				if replay {
					await(t, "the restart", func() bool { return f.Stats().Restarts >= 1 && f.holdsAll(100, 100+behind) })
				}
				p.Publish(block(500))
				await(t, "a new block", func() bool { return f.holds(500) })
				if !f.holdsNone(0, 10) {
					t.Error("blocks of the old process are still matched")
				}
				if f.seen(kvevents.Restarted) == 0 && f.Stats().Lost == 0 {
					t.Error("no notice of the restart")
				}
			})
		}
	}
}

// TestStreamRestartBehindForwarder checks that a restart shows on a connection that outlives it, as through a proxy of messages.
func TestStreamRestartBehindForwarder(t *testing.T) {
	more := make(chan struct{})
	f := follow(t, serve(t, func(c net.Conn) {
		z, err := zmtp.NewConn(context.Background(), c, zmtp.Pub, 1<<10)
		if err != nil {
			return
		}
		for i, seq := range []uint64{4, 5, 6, 6, 7} {
			if i == 3 {
				<-more
			}
			if z.WriteMessage(nil, binary.BigEndian.AppendUint64(nil, seq), block(i).Append(nil)) != nil {
				return
			}
		}
		_, _ = io.Copy(io.Discard, c)
	}), "", nil)
	await(t, "the first three", func() bool { return f.holdsAll(0, 3) })
	close(more)
	await(t, "the last two", func() bool { return f.holdsAll(3, 5) })
	if st := f.Stats(); !f.holdsNone(0, 3) || st.Restarts != 1 || st.Connects != 1 {
		t.Errorf("stats %+v, blocks of the old process held: %t", st, !f.holdsNone(0, 3))
	}
}

// TestStreamOverlap checks that batches which come both live and replayed, in whatever order, are applied once: the live ones were on
// their way during the first replay, and replays start earlier than asked for.
func TestStreamOverlap(t *testing.T) {
	message := func(seq int) [][]byte {
		return [][]byte{nil, binary.BigEndian.AppendUint64(nil, uint64(seq)), block(seq).Append(nil)}
	}
	live := serve(t, func(c net.Conn) {
		z, err := zmtp.NewConn(context.Background(), c, zmtp.Pub, 1<<10)
		if err != nil {
			return
		}
		for _, seq := range []int{3, 4, 5, 6, 8} {
			if z.WriteMessage(message(seq)...) != nil {
				return
			}
		}
		_, _ = io.Copy(io.Discard, c)
	})
	var replays atomic.Int32
	replay := serve(t, func(c net.Conn) {
		z, err := zmtp.NewConn(context.Background(), c, zmtp.Router, 1<<10)
		if err != nil {
			return
		}
		if _, err := z.ReadMessage(); err != nil {
			return
		}
		to := 5
		if replays.Add(1) > 1 {
			to = 8
		}
		for seq := range to + 1 {
			if z.WriteMessage(message(seq)...) != nil {
				return
			}
		}
		_ = z.WriteMessage(nil, []byte("\xff\xff\xff\xff\xff\xff\xff\xff"), nil)
		_, _ = io.Copy(io.Discard, c)
	})
	f := follow(t, live, replay, nil)
	await(t, "all blocks", func() bool { return f.Stats().Duplicates == 4 })
	st := f.Stats()
	if !f.holdsAll(0, 9) || st.Messages != 9 || st.ReplayedMessages != 8 || st.Restarts != 0 || st.Lost != 0 || st.Gaps != 1 {
		t.Errorf("stats %+v, all held: %t", st, f.holdsAll(0, 9))
	}
}

// TestStreamRandomFaults lets an engine store and remove blocks while messages are lost, connections are cut and the engine restarts.
// Whatever happens, the follower must end up with exactly what the engine holds, since all of it can be replayed.
func TestStreamRandomFaults(t *testing.T) {
	for seed := range uint64(6) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, 9))
			p := publish(t, true, kvpublish.Config{ReplayFrames: 2 + int(seed)%3, Queue: 3})
			f := follow(t, p.Endpoint(), p.ReplayEndpoint(), nil)
			held := map[int]bool{}
			for range 150 {
				n := r.IntN(40)
				b := block(n)
				if held[n] {
					b = &kvpublish.Batch{}
					b.Removed("", uint64(n)+1)
				}
				switch k := r.IntN(40); {
				case k == 0:
					p.Restart()
					clear(held)
				case k < 4:
					p.Disconnect()
				case k < 6:
					f.subscribed(t, p)
				case k < 16:
					p.Lose(b)
					held[n] = !held[n]
				default:
					p.Publish(b)
					held[n] = !held[n]
				}
			}
			f.subscribed(t, p)
			wrong := func() (blocks []int) {
				for n := range 40 {
					if f.holds(n) != held[n] {
						blocks = append(blocks, n)
					}
				}
				return blocks
			}
			for end := time.Now().Add(15 * time.Second); ; time.Sleep(time.Millisecond) {
				p.Publish(block(1000))
				if f.holds(1000) && len(wrong()) == 0 {
					break
				}
				if time.Now().After(end) {
					t.Fatalf("the view is wrong about %v; stats %+v", wrong(), f.Stats())
				}
			}
		})
	}
}

// TestStreamReconnects checks that cut connections lose nothing when there is a replay, however often they are cut.
func TestStreamReconnects(t *testing.T) {
	p := publish(t, true, kvpublish.Config{})
	f := follow(t, p.Endpoint(), p.ReplayEndpoint(), nil)
	f.subscribed(t, p)
	for n := range 100 {
		p.Publish(block(n))
		if n%5 == 0 {
			p.Disconnect()
		}
		if n%10 == 0 {
			f.subscribed(t, p) // else all may come with the last connection
		}
	}
	await(t, "all blocks", func() bool { return f.holdsAll(0, 100) })
	st := f.Stats()
	if st.Restarts != 0 || st.Lost != 0 || st.Connects < 2 {
		t.Errorf("stats %+v, want several connects and no loss", st)
	}
	if got, want := f.seen(kvevents.Disconnected), f.seen(kvevents.Connected); got == 0 || got < want-1 {
		t.Errorf("%d notices of lost connections for %d of new ones", got, want)
	}
}

func TestStreamRanks(t *testing.T) {
	p, q := publish(t, true, kvpublish.Config{}), publish(t, true, kvpublish.Config{})
	for rank, pub := range []*kvpublish.Publisher{p, q} {
		b := block(rank)
		b.Rank = rank
		pub.Publish(b)
	}
	f := follow(t, p.Endpoint(), p.ReplayEndpoint(), nil)
	follow(t, q.Endpoint(), q.ReplayEndpoint(), func(_ *kvevents.StreamConfig, _ *follower) kvevents.Sink { return f.index })
	await(t, "both ranks", func() bool { return f.holdsAll(0, 2) })
	if _, rank := f.index.Longest([]uint32{1, 7}, "", nil); rank != 1 {
		t.Errorf("block of rank 1 found on rank %d", rank)
	}
	q.Restart() // clears rank 1 and leaves rank 0
	await(t, "rank 1 cleared", func() bool { return !f.holds(1) })
	if !f.holds(0) {
		t.Error("the restart of rank 1 cleared rank 0")
	}
}

func TestStreamTooManyRanks(t *testing.T) {
	p := publish(t, false, kvpublish.Config{})
	f := follow(t, p.Endpoint(), "", nil)
	f.subscribed(t, p)
	for rank := range 100 {
		b := block(rank)
		b.Rank = rank
		p.Publish(b)
	}
	await(t, "all messages", func() bool { return f.Stats().Next == 100 })
	if ranks, st := f.index.Ranks(), f.Stats(); len(ranks) != 8 || st.DecodeErrors != 92 || st.Lost != 0 {
		t.Errorf("ranks %v, stats %+v", ranks, st)
	}
}

// TestStreamGarbage checks that payloads which are no batches clear the rank, are counted, and end nothing.
func TestStreamGarbage(t *testing.T) {
	p := publish(t, true, kvpublish.Config{Queue: 10_000})
	f := follow(t, p.Endpoint(), p.ReplayEndpoint(), nil)
	f.subscribed(t, p)
	p.Publish(block(0))
	await(t, "the first block", func() bool { return f.holds(0) })
	r := rand.New(rand.NewPCG(1, 2))
	good := block(3).Append(nil)
	for range 500 {
		junk := slices.Clone(good)[:r.IntN(len(good))]
		for range min(len(junk), 3) {
			junk[r.IntN(len(junk))] = byte(r.Uint32())
		}
		p.PublishPayload(junk)
	}
	p.Publish(block(1))
	await(t, "the block after", func() bool { return f.holds(1) })
	if st := f.Stats(); st.DecodeErrors < 400 || f.holds(0) || st.Connects != 1 {
		t.Errorf("stats %+v, first block held: %t", st, f.holds(0))
	}
	if n := f.seen(kvevents.Garbled); n != 1 {
		t.Errorf("told %d times of one spell of garbage", n)
	}
}

// TestStreamReadableAgain checks that garbage is told of once more only after a minute without.
func TestStreamReadableAgain(t *testing.T) {
	p := publish(t, true, kvpublish.Config{})
	var later atomic.Int64
	f := follow(t, p.Endpoint(), p.ReplayEndpoint(), func(c *kvevents.StreamConfig, _ *follower) kvevents.Sink {
		c.Now = func() time.Time { return time.Now().Add(time.Duration(later.Load())) }
		return nil
	})
	f.subscribed(t, p)
	n := 0
	for _, step := range []struct {
		after             time.Duration
		garbage           bool
		garbled, readable int
	}{
		{0, false, 0, 0}, {0, true, 1, 0}, {0, true, 1, 0}, {0, false, 1, 0}, {0, true, 1, 0},
		{2 * time.Minute, false, 1, 1}, {0, false, 1, 1}, {0, true, 2, 1},
	} {
		later.Add(int64(step.after))
		if n++; step.garbage {
			p.PublishPayload([]byte("garbage"))
		} else {
			p.Publish(block(n))
		}
		await(t, "the message", func() bool { return f.Stats().Next == uint64(n) })
		await(t, "what is told", func() bool {
			return f.seen(kvevents.Garbled) == step.garbled && f.seen(kvevents.Readable) == step.readable
		})
	}
}

// serve accepts connections and gives each to handle, until the test ends.
func serve(t *testing.T, handle func(net.Conn)) (endpoint string) {
	l := listen(t)
	var tasks sync.WaitGroup
	ctx, cancel := context.WithCancel(context.Background())
	tasks.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			tasks.Go(func() {
				defer c.Close()
				defer context.AfterFunc(ctx, func() { c.Close() })()
				handle(c)
			})
		}
	})
	t.Cleanup(func() {
		cancel()
		l.Close()
		tasks.Wait()
	})
	return "tcp://" + l.Addr().String()
}

// TestStreamHostilePeers checks that a stream outlives whatever answers, without spending memory on it.
func TestStreamHostilePeers(t *testing.T) {
	shake := func(c net.Conn) *zmtp.Conn {
		z, err := zmtp.NewConn(context.Background(), c, zmtp.Pub, 1<<10)
		if err != nil {
			return nil
		}
		return z
	}
	header := func(flags byte, size uint64) []byte { return binary.BigEndian.AppendUint64([]byte{flags}, size) }
	for name, handle := range map[string]func(net.Conn){
		"closes at once": func(net.Conn) {},
		"random bytes": func(c net.Conn) {
			b := make([]byte, 4096)
			for i := range b {
				b[i] = byte(rand.Uint32())
			}
			_, _ = c.Write(b)
		},
		"http":                func(c net.Conn) { _, _ = io.WriteString(c, "HTTP/1.1 400 Bad Request\r\n\r\n") },
		"frame of 2^62 bytes": func(c net.Conn) { shake(c); _, _ = c.Write(header(2, 1<<62)) },
		"frame of 4 GiB":      func(c net.Conn) { shake(c); _, _ = c.Write(header(2, 4<<30)) },
		"endless frames": func(c net.Conn) {
			shake(c)
			for i := 0; i < 1000; i++ {
				if _, err := c.Write([]byte{1, 0}); err != nil {
					return
				}
			}
		},
		"long command":  func(c net.Conn) { shake(c); _, _ = c.Write(header(6, 1<<20)) },
		"unknown flags": func(c net.Conn) { shake(c); _, _ = c.Write([]byte{0x80, 1, 1}) },
		"no number": func(c net.Conn) {
			if z := shake(c); z != nil {
				_ = z.WriteMessage([]byte("kv"), []byte("seven"), []byte("payload"))
				_ = z.WriteMessage([]byte("alone"))
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := follow(t, serve(t, handle), "", nil)
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			await(t, "several tries", func() bool {
				st := f.Stats()
				return st.DialErrors+st.ReadErrors >= 3
			})
			runtime.ReadMemStats(&after)
			if grown := int64(after.HeapAlloc) - int64(before.HeapAlloc); grown > 32<<20 {
				t.Errorf("the heap grew by %d MiB", grown>>20)
			}
		})
	}
}

// TestStreamMutePeer checks that a stream ends promptly while its peer has accepted and says nothing.
func TestStreamMutePeer(t *testing.T) {
	accepted := make(chan struct{}, 100)
	f := follow(t, serve(t, func(c net.Conn) {
		accepted <- struct{}{}
		_, _ = io.Copy(io.Discard, c)
	}), "", nil)
	<-accepted
	f.stop()
}

// TestStreamDeadPeer checks that a peer which answered heartbeats and then stops is left.
func TestStreamDeadPeer(t *testing.T) {
	var connections atomic.Int32
	f := follow(t, serve(t, func(c net.Conn) {
		connections.Add(1)
		z, err := zmtp.NewConn(context.Background(), c, zmtp.Pub, 1<<10)
		if err != nil {
			return
		}
		for range 2 { // the subscription and the first heartbeat
			if ok, err := z.Await(5 * time.Second); !ok || err != nil {
				return
			}
			if _, err := z.ReadMessage(); err != nil {
				return
			}
		}
		_, _ = io.Copy(io.Discard, c)
	}), "", func(c *kvevents.StreamConfig, _ *follower) kvevents.Sink {
		c.Heartbeat = 20 * time.Millisecond
		return nil
	})
	await(t, "a second connection", func() bool { return connections.Load() >= 2 })
	if f.Stats().ReadErrors == 0 {
		t.Error("the dead connection was not counted")
	}
}

// TestStreamStuckPublisher checks that silence is told once, and that the age of the last message can be read.
func TestStreamStuckPublisher(t *testing.T) {
	p := publish(t, false, kvpublish.Config{})
	f := follow(t, p.Endpoint(), "", func(c *kvevents.StreamConfig, _ *follower) kvevents.Sink {
		c.Heartbeat, c.SilentAfter = 200*time.Millisecond, 300*time.Millisecond
		return nil
	})
	f.subscribed(t, p)
	await(t, "the notice", func() bool { return f.seen(kvevents.Silent) == 1 })
	p.Publish(block(0))
	await(t, "the block", func() bool { return f.holds(0) })
	await(t, "a second notice", func() bool { return f.seen(kvevents.Silent) == 2 })
	if st := f.Stats(); time.Since(st.LastMessage) < 300*time.Millisecond || !st.Connected {
		t.Errorf("stats %+v, want a connected stream whose last message is old", st)
	}
}

// gate is a sink that blocks until it is opened.
type gate struct {
	kvevents.Sink
	open chan struct{}
}

func (g gate) Apply(b *kvevents.Batch) { <-g.open; g.Sink.Apply(b) }

// TestStreamSlowConsumer checks that nothing piles up in this process while the sink is stuck, and that the replay makes good for what
// the publisher dropped.
func TestStreamSlowConsumer(t *testing.T) {
	p := publish(t, true, kvpublish.Config{Queue: 4})
	open := make(chan struct{})
	f := follow(t, p.Endpoint(), p.ReplayEndpoint(), func(c *kvevents.StreamConfig, f *follower) kvevents.Sink {
		c.ReplayTimeout = time.Minute
		return gate{f.index, open}
	})
	f.subscribed(t, p)
	large := &kvpublish.Batch{Time: time.Now()}
	large.Stored(kvpublish.Stored{Hashes: []uint64{1 << 40}, Tokens: make([]uint32, 1<<18), BlockSize: 1 << 18})
	payload := large.Append(nil) // 256 KiB, so that the sockets' buffers fill up
	for range 80 {
		p.PublishPayload(payload)
	}
	for n := range 10 {
		p.Publish(block(n))
	}
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	if m.HeapAlloc > 64<<20 {
		t.Errorf("heap of %d MiB behind a stuck sink", m.HeapAlloc>>20)
	}
	close(open)
	// What was dropped shows when the next message comes; many of them would be dropped as well, and replayed again.
	var nudged time.Time
	await(t, "the gap", func() bool {
		if time.Since(nudged) > 300*time.Millisecond {
			p.Publish(block(99))
			nudged = time.Now()
		}
		return f.holdsAll(0, 10)
	})
	if st := f.Stats(); st.Lost != 0 || st.Gaps == 0 {
		t.Errorf("stats %+v, want gaps and no loss", st)
	}
}

// TestStreamReplayWithoutEnd checks that a replay which never ends is given up, and that what it brought counts.
func TestStreamReplayWithoutEnd(t *testing.T) {
	p := publish(t, false, kvpublish.Config{})
	replay := serve(t, func(c net.Conn) {
		z, err := zmtp.NewConn(context.Background(), c, zmtp.Router, 1<<10)
		if err != nil {
			return
		}
		frames, err := z.ReadMessage()
		if err != nil {
			return
		}
		from := binary.BigEndian.Uint64(frames[1])
		for seq := from; seq < 5; seq++ {
			_ = z.WriteMessage(nil, binary.BigEndian.AppendUint64(nil, seq), block(int(seq)).Append(nil))
		}
		_, _ = io.Copy(io.Discard, c)
	})
	f := follow(t, p.Endpoint(), replay, func(c *kvevents.StreamConfig, _ *follower) kvevents.Sink {
		c.ReplayTimeout = 100 * time.Millisecond
		return nil
	})
	await(t, "what the replay brought", func() bool { return f.holdsAll(0, 5) && f.Stats().ReplayErrors == 1 })
	for n := range 5 {
		p.Lose(block(n))
	}
	f.subscribed(t, p)
	p.Publish(block(5))
	await(t, "the live block", func() bool { return f.holds(5) })
	if st := f.Stats(); st.Lost != 0 || !f.holdsAll(0, 6) {
		t.Errorf("stats %+v, want no loss", st)
	}
	p.Lose(block(6))
	p.Publish(block(7)) // the replay has no number 6
	await(t, "the loss", func() bool { return f.Stats().Lost == 1 && f.holds(7) })
	if !f.holdsNone(0, 7) {
		t.Error("blocks from before the loss are still matched")
	}
}

// TestStreamReplayUnreachable checks that a replay socket nobody listens at holds the live stream up once and not at every gap.
func TestStreamReplayUnreachable(t *testing.T) {
	nobody := listen(t)
	nobody.Close()
	p := publish(t, false, kvpublish.Config{})
	f := follow(t, p.Endpoint(), "tcp://"+nobody.Addr().String(), func(c *kvevents.StreamConfig, _ *follower) kvevents.Sink {
		c.MaxBackoff = time.Hour
		return nil
	})
	f.subscribed(t, p)
	for n := range 20 {
		p.Publish(block(n))
		p.Lose(block(100 + n))
	}
	await(t, "the last block", func() bool { return f.holds(19) })
	if st := f.Stats(); st.Replays != 2 || st.ReplayErrors != 2 || st.Gaps != 19 || st.Lost != 19 {
		t.Errorf("stats %+v, want two replays for 19 gaps", st)
	}
}

func TestNewStreamEndpoints(t *testing.T) {
	for _, endpoint := range []string{"", "10.0.0.1:5557", "tcp://*:5557", "tcp://:5557", "tcp://host", "udp://host:1", "tcp://"} {
		if _, err := kvevents.NewStream(kvevents.StreamConfig{Endpoint: endpoint}, nil); err == nil {
			t.Errorf("endpoint %q is accepted", endpoint)
		}
	}
	for _, endpoint := range []string{"tcp://host:5557", "tcp://[::1]:5557", "ipc:///run/kv"} {
		if _, err := kvevents.NewStream(kvevents.StreamConfig{Endpoint: endpoint}, nil); err != nil {
			t.Error(err)
		}
	}
}
