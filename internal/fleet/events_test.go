// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/kvevents"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/kvevents/kvpublish"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/prompt"
	"github.com/seed-2fa47a1e/caddy-kv-cache/metrics"
)

// engineBlock is the token block of the engines in these tests, where a byte is a token.
const engineBlock = 64

// teller is an engine that publishes events, tokenizes and lists its models.
type teller struct {
	t         *testing.T
	publisher *kvpublish.Publisher
	front     *httptest.Server
	models    atomic.Value // the list of them
	asked     atomic.Int64 // for models
	rendered  atomic.Int64
	key       atomic.Value // the last Authorization
	ended     bool
}

func newTeller(t *testing.T, replays bool) *teller {
	t.Helper()
	e := &teller{t: t}
	e.list(`{"data":[{"id":"base"},{"id":"tuned","parent":"base"}]}`)
	listeners := make([]net.Listener, 2)
	for i := range listeners {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		listeners[i] = l
	}
	if !replays {
		_ = listeners[1].Close()
		e.publisher = kvpublish.New(listeners[0], nil, kvpublish.Config{})
	} else {
		e.publisher = kvpublish.New(listeners[0], listeners[1], kvpublish.Config{})
	}
	e.front = httptest.NewServer(http.HandlerFunc(e.answer))
	t.Cleanup(func() {
		e.front.Close()
		e.end()
	})
	return e
}

// end closes the publisher for good.
func (e *teller) end() {
	if e.ended {
		return
	}
	e.ended = true
	if err := e.publisher.Close(); err != nil {
		e.t.Error(err)
	}
}

// list has the engine serve these models from now on.
func (e *teller) list(models string) { e.models.Store(models) }

func (e *teller) answer(w http.ResponseWriter, r *http.Request) {
	e.key.Store(r.Header.Get("Authorization"))
	if r.URL.Path == "/v1/models" {
		e.asked.Add(1)
		models, _ := e.models.Load().(string)
		_, _ = io.WriteString(w, models)
		return
	}
	e.rendered.Add(1)
	var body struct{ Prompt string }
	if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	_ = json.NewEncoder(w).Encode([]map[string]any{{"token_ids": tokensOf(body.Prompt)}})
}

func tokensOf(text string) []uint32 {
	tokens := make([]uint32, len(text))
	for i := range text {
		tokens[i] = uint32(text[i])
	}
	return tokens
}

// config makes a fleet follow the engine at any address.
func (e *teller) config() Config {
	return Config{
		Events: &Events{Stream: func(_ string, rank int) (kvevents.StreamConfig, bool) {
			return kvevents.StreamConfig{
				Endpoint: e.publisher.Endpoint(), Replay: e.publisher.ReplayEndpoint(),
				MinBackoff: time.Millisecond, MaxBackoff: 5 * time.Millisecond,
			}, rank == 0
		}},
		API: &API{
			Base:   func(string) (string, bool) { return e.front.URL, true },
			Header: http.Header{"Authorization": {"Bearer k"}},
			Client: e.front.Client(),
		},
	}
}

// passage is a prompt for these tests.
type passage struct {
	text   string
	prompt prompt.Prompt
}

func newPassage(t *testing.T, name string, size int) *passage {
	t.Helper()
	p := &passage{text: strings.Repeat(name+" and so on; ", size/(len(name)+12)+1)[:size]}
	if fault := p.prompt.Read(prompt.Completions, []byte(p.body("")), true, 1); fault != prompt.None {
		t.Fatal(fault)
	}
	return p
}

func (p *passage) body(model string) string {
	b, _ := json.Marshal(map[string]string{"model": model, "prompt": p.text}) // strings can be marshalled
	return string(b)
}

// hashes are the engine's names of the passage's blocks.
func (p *passage) hashes() []uint64 {
	h := make([]uint64, len(p.text)/engineBlock)
	for i := range h {
		h[i] = p.prompt.Chain[0] + uint64(i)
	}
	return h
}

func (e *teller) store(p *passage, lora string) {
	n := len(p.text) / engineBlock
	var b kvpublish.Batch
	b.Stored(kvpublish.Stored{Hashes: p.hashes(), Tokens: tokensOf(p.text)[:n*engineBlock], BlockSize: engineBlock, LoRA: lora})
	e.publisher.Publish(&b)
}

func (e *teller) drop(hashes ...uint64) {
	var b kvpublish.Batch
	b.Removed("", hashes...)
	e.publisher.Publish(&b)
}

// observed is a fleet of one replica that follows its engine, and knows a model by its page.
func observed(t *testing.T, e *teller) (*Fleet, *Replica) {
	t.Helper()
	f := NewRegistry().New(e.config(), []string{"a"})
	f.Start()
	t.Cleanup(f.Stop)
	p := f.Replica("a", time.Now())
	f.Observe(p, metrics.Scrape{Snapshot: &metrics.Snapshot{
		At: time.Now(), Engine: metrics.VLLM, Rows: 1, Models: []string{"base"},
		BlockTokens: metrics.Fact{Value: engineBlock, Known: true},
	}}, time.Now())
	awaitCurrent(t, p)
	return f, p
}

func awaitCurrent(t *testing.T, p *Replica) {
	t.Helper()
	await(t, "the events to be followed", func() bool { s, _ := p.Events(); return s.Current })
}

func (f *Fleet) held(p *Replica, x *passage, believed float64) float64 {
	return f.Prefix(new(Prefix), x.prompt.Chain, prompt.BlockSize).Held(p, believed)
}

func learn(t *testing.T, f *Fleet, p *Replica, x *passage, model string) {
	t.Helper()
	sent := Sent{Replica: p, Path: "/v1/completions", Model: model, Chain: x.prompt.Chain, Bytes: x.prompt.Bytes}
	if !f.Learns(&sent, len(x.text)) {
		t.Fatal("a new prompt is not wanted")
	}
	await(t, "the tokens to be learned", func() bool {
		f.Learn(sent, []byte(x.body(model)))
		return f.Registry.alignment.Known(x.prompt.Chain) == len(x.prompt.Chain)
	})
	if f.Learns(&sent, len(x.text)) {
		t.Error("a prompt that is known is still wanted")
	}
}

func awaitHeld(t *testing.T, f *Fleet, p *Replica, x *passage, believed, want float64) {
	t.Helper()
	await(t, fmt.Sprintf("%v of %v believed tokens to be held (now %v)", want, believed, f.held(p, x, believed)), func() bool {
		return math.Abs(f.held(p, x, believed)-want) <= 2*engineBlock
	})
}

// What the engine says it holds counts, less or more than what is believed.
func TestHeldByEvents(t *testing.T) {
	e := newTeller(t, true)
	f, p := observed(t, e)
	x := newPassage(t, "one", 2048)
	awaitHeld(t, f, p, x, 1000, 0) // it never stored any
	e.store(x, "")
	learn(t, f, p, x, "base")
	awaitHeld(t, f, p, x, 0, 2048)
	if got := e.key.Load(); got != "Bearer k" {
		t.Errorf("the key sent is %q", got)
	}
	h := x.hashes()
	slices.Reverse(h) // an engine evicts from the tail
	e.drop(h[:len(h)/2]...)
	awaitHeld(t, f, p, x, 2048, 1024)

	// A request on its way there will leave its blocks behind.
	now := time.Now()
	r := &Reservation{Prompt: 2048, Uncached: 1024, Chain: x.prompt.Chain}
	p.Reserve(r, now)
	awaitHeld(t, f, p, x, 2048, 2048)
	half := &Reservation{Prompt: 1500, Uncached: 500, Chain: x.prompt.Chain[:6]}
	p.Reserve(half, now)
	r.Finish(now)
	half.Abort(now)
	awaitHeld(t, f, p, x, 2048, 1024)

	// Nothing of this prompt is known by its tokens.
	if got := f.held(p, newPassage(t, "two", 2048), 700); got != 700 {
		t.Errorf("%v tokens held of an unknown prompt of which 700 are believed", got)
	}
}

// Events come a step behind, and blocks in use are not evicted: the prompt of a request counts until events come after
// its answer, whether or not it has its first token.
func TestHeldWhileInUse(t *testing.T) {
	e := newTeller(t, true)
	f, p := observed(t, e)
	x := newPassage(t, "one", 2048)
	learn(t, f, p, x, "base")
	awaitHeld(t, f, p, x, 2048, 0) // it has told of none
	r := &Reservation{Prompt: 2048, Uncached: 2048, Chain: x.prompt.Chain}
	p.Reserve(r, time.Now())
	want := func(when string, held float64) {
		t.Helper()
		if got := f.held(p, x, 2048); got != held {
			t.Errorf("%v tokens are held %s, want %v", got, when, held)
		}
	}
	want("before the first token", 2048)
	p.mu.Lock()
	p.passUpTo(r)
	p.mu.Unlock()
	want("after the first token", 2048)
	r.Finish(time.Now())
	want("right after the answer", 2048)
	e.drop(x.hashes()...) // any event will do
	awaitHeld(t, f, p, x, 2048, 0)

	refused := &Reservation{Prompt: 2048, Uncached: 2048, Chain: x.prompt.Chain}
	p.Reserve(refused, time.Now())
	refused.Abort(time.Now())
	want("after a request that was not answered", 0)
}

// What the engine dropped is taken out of the belief when it is found missing, but not what was sent meanwhile.
func TestBeliefIsPruned(t *testing.T) {
	e := newTeller(t, true)
	f, p := observed(t, e)
	x, other := newPassage(t, "one", 4096), newPassage(t, "other", 1024)
	e.store(x, "")
	learn(t, f, p, x, "base")
	p.Holds(x.prompt.Chain)
	p.Holds(other.prompt.Chain)
	matched := func() int { return p.Matched(f.Registry.Index.Match(x.prompt.Chain, nil)) }
	prune := func() {
		prefix := f.Prefix(new(Prefix), x.prompt.Chain, prompt.BlockSize)
		prefix.Held(p, float64(matched()*prompt.BlockSize))
		prefix.Prune()
	}
	awaitHeld(t, f, p, x, 4096, 4096)
	prune()
	if got := matched(); got != 16 {
		t.Fatalf("%d blocks are believed of 16 that are held", got)
	}
	h := x.hashes()
	e.drop(h[len(h)/2:]...)
	awaitHeld(t, f, p, x, 4096, 2048)

	r := &Reservation{Prompt: 4096, Chain: x.prompt.Chain}
	late := f.Prefix(new(Prefix), x.prompt.Chain, prompt.BlockSize)
	late.Held(p, 4096)
	p.Reserve(r, time.Now()) // while a choice was made for another request
	late.Prune()
	prune()
	if got := matched(); got != 16 {
		t.Errorf("%d blocks are believed while a request needs all 16", got)
	}
	r.Abort(time.Now())
	prune()
	if got := matched(); got < 8 || got > 10 {
		t.Errorf("%d blocks are believed of 8 that are held", got)
	}
	if got := p.Matched(f.Registry.Index.Match(other.prompt.Chain, nil)); got != 4 {
		t.Errorf("%d blocks are believed of another prompt of 4", got)
	}
}

// The room left in a cache is what its events leave, whoever took it.
func TestSpareByEvents(t *testing.T) {
	e := newTeller(t, true)
	f, p := observed(t, e)
	f.Observe(p, metrics.Scrape{Snapshot: &metrics.Snapshot{
		At: time.Now(), Engine: metrics.VLLM, Rows: 1,
		BlockTokens: metrics.Fact{Value: engineBlock, Known: true}, CapacityTokens: metrics.Fact{Value: 4096, Known: true},
	}}, time.Now())
	spare := func(want float64) {
		t.Helper()
		got := func() float64 {
			l := p.Load(time.Now())
			return p.Spare(&l)
		}
		await(t, fmt.Sprintf("%v of the cache to be free (now %v)", want, got()), func() bool { return got() == want })
	}
	x := newPassage(t, "another Caddy's", 1024)
	e.store(x, "")
	spare(0.75)
	e.drop(x.hashes()[8:]...)
	spare(0.875)
	var b kvpublish.Batch
	b.Cleared()
	e.publisher.Publish(&b)
	spare(1)
}

// Requests in flight are found whatever the order in which they end.
func TestInUse(t *testing.T) {
	var u inUse
	now := time.Now()
	chains := [][]uint64{{1, 2, 3, 4}, {1, 2, 30}, {1}, {7, 8}, nil}
	requests := make([]*Reservation, maxInUse)
	rng := rand.New(rand.NewPCG(1, 2))
	flying := map[*Reservation]bool{}
	for i := range requests {
		requests[i] = &Reservation{Chain: chains[rng.IntN(len(chains))]}
	}
	for range 5000 {
		if r := requests[rng.IntN(len(requests))]; flying[r] {
			u.leave(r, aborted, now)
			delete(flying, r)
		} else {
			u.take(r)
			flying[r] = true
		}
		for _, asked := range [][]uint64{{1, 2, 3, 4, 5}, {1, 2}, {7}, {9}, {}} {
			want := 0
			for r := range flying {
				n := 0
				for n < min(len(asked), len(r.Chain)) && asked[n] == r.Chain[n] {
					n++
				}
				want = max(want, n)
			}
			if got := u.blocks(asked, now, now); got != want {
				t.Fatalf("%d blocks of %v are in use, want %d", got, asked, want)
			}
		}
	}
}

// A cache that the engine emptied takes the belief with it.
func TestClearedByEvents(t *testing.T) {
	for _, cause := range []string{"event", "restart"} {
		t.Run(cause, func(t *testing.T) {
			e := newTeller(t, true)
			f, p := observed(t, e)
			x := newPassage(t, "one", 2048)
			e.store(x, "")
			learn(t, f, p, x, "base")
			p.Holds(x.prompt.Chain)
			awaitHeld(t, f, p, x, 2048, 2048)
			if cause == "event" {
				var b kvpublish.Batch
				b.Cleared()
				e.publisher.Publish(&b)
			} else {
				e.publisher.Restart()
				e.store(newPassage(t, "other", 512), "")
			}
			await(t, "the belief to be dropped", func() bool {
				return p.Matched(f.Registry.Index.Match(x.prompt.Chain, nil)) == 0
			})
			awaitCurrent(t, p)
			awaitHeld(t, f, p, x, 2048, 0)
		})
	}
}

// Of an engine that has run for a while and offers no replay, what it stored before is not known: the absence of a
// block tells nothing.
func TestIncompleteEvents(t *testing.T) {
	e := newTeller(t, false)
	e.store(newPassage(t, "before", 1024), "")
	f, p := observed(t, e)
	await(t, "the subscription", func() bool { return e.publisher.Subscribers() > 0 })
	x := newPassage(t, "one", 2048)
	e.store(x, "")
	learn(t, f, p, x, "base")
	awaitHeld(t, f, p, x, 0, 2048) // what it says it holds, it does
	e.drop(x.hashes()...)
	awaitHeld(t, f, p, x, 0, 0)
	if got := f.held(p, x, 1500); got != 1500 {
		t.Errorf("%v tokens held where 1500 are believed", got)
	}
	if s, ok := p.Events(); !ok || s.Whole {
		t.Errorf("events %+v are taken for whole", s)
	}
}

// While its events don't come, an engine is believed as it would be without.
func TestEventsLost(t *testing.T) {
	e := newTeller(t, true)
	f, p := observed(t, e)
	awaitHeld(t, f, p, newPassage(t, "one", 512), 300, 0) // it never stored any
	e.end()
	await(t, "the connection to be missed", func() bool { s, _ := p.Events(); return !s.Current })
	if got := f.held(p, newPassage(t, "one", 512), 300); got != 300 {
		t.Errorf("%v tokens held where 300 are believed", got)
	}
}

// A new fleet takes the streams over from the old one.
func TestStreamsOutliveReload(t *testing.T) {
	e := newTeller(t, true)
	known := goleak.IgnoreCurrent()
	g := NewRegistry()
	old := g.New(e.config(), []string{"a"})
	old.Start()
	p := old.Replica("a", time.Now())
	awaitCurrent(t, p)
	x := newPassage(t, "one", 1024)
	e.store(x, "")
	await(t, "the event", func() bool { s, _ := p.Events(); return s.Blocks == 1024/engineBlock })
	next := g.New(e.config(), []string{"a"})
	next.Start()
	old.Stop()
	s, ok := p.Events()
	if !ok || !s.Current || s.Ranks[0].Connects != 1 || s.Blocks != 1024/engineBlock {
		t.Errorf("after a reload: %+v", s)
	}
	next.Stop()
	if _, ok := p.Events(); ok || len(g.truths) != 0 {
		t.Error("events are followed for nobody")
	}
	e.front.Client().CloseIdleConnections()
	goleak.VerifyNone(t, known, goleak.IgnoreTopFunction("net/http.(*conn).serve"), goleak.IgnoreAnyFunction("net/http.(*connReader).backgroundRead"),
		goleak.IgnoreAnyFunction("github.com/seed-2fa47a1e/caddy-kv-cache/internal/kvevents/kvpublish.(*Publisher).accept"),
		goleak.IgnoreAnyFunction("github.com/seed-2fa47a1e/caddy-kv-cache/internal/kvevents/kvpublish.(*Publisher).accept.func1"))
}

// Each data-parallel rank that the metrics tell of has a publisher of its own.
func TestRanks(t *testing.T) {
	e := newTeller(t, true)
	cfg := e.config()
	var highest atomic.Int64
	inner := cfg.Events.Stream
	cfg.Events.Stream = func(addr string, rank int) (kvevents.StreamConfig, bool) {
		highest.Store(max(highest.Load(), int64(rank)))
		c, _ := inner(addr, 0)
		return c, true
	}
	f := NewRegistry().New(cfg, []string{"a"})
	f.Start()
	defer f.Stop()
	p := f.Replica("a", time.Now())
	for _, rows := range []int{1, 4, 2, 1000} {
		f.Observe(p, metrics.Scrape{Snapshot: &metrics.Snapshot{At: time.Now(), Engine: metrics.VLLM, Rows: rows}}, time.Now())
		s, _ := p.Events()
		if want := min(max(rows, int(highest.Load())+1), maxRanks); len(s.Ranks) != want {
			t.Errorf("%d rows: %d ranks are followed, want %d", rows, len(s.Ranks), want)
		}
	}
}

// Where a replica has several ranks, the one that holds most of a prompt is told. Where requests are not sent to it, only
// the chance to meet it counts.
func TestRankThatHolds(t *testing.T) {
	for _, pinned := range []bool{false, true} {
		t.Run(fmt.Sprint("pinned ", pinned), func(t *testing.T) { testRankThatHolds(t, pinned) })
	}
}

func testRankThatHolds(t *testing.T, pinned bool) {
	engines := []*teller{newTeller(t, true), newTeller(t, true)}
	cfg := engines[0].config()
	cfg.Events.Pinned = pinned
	cfg.Events.Stream = func(_ string, rank int) (kvevents.StreamConfig, bool) {
		if rank >= len(engines) {
			return kvevents.StreamConfig{}, false
		}
		c, _ := engines[rank].config().Events.Stream("", 0)
		return c, true
	}
	f := NewRegistry().New(cfg, []string{"a"})
	f.Start()
	defer f.Stop()
	p := f.Replica("a", time.Now())
	f.Observe(p, metrics.Scrape{Snapshot: &metrics.Snapshot{
		At: time.Now(), Engine: metrics.VLLM, Rows: len(engines), Models: []string{"base"},
		BlockTokens: metrics.Fact{Value: engineBlock, Known: true},
	}}, time.Now())
	awaitCurrent(t, p)
	passages := []*passage{newPassage(t, "one", 2048), newPassage(t, "two", 2048), newPassage(t, "nobody's", 2048)}
	for rank, e := range engines {
		n := len(passages[rank].text) / engineBlock
		b := kvpublish.Batch{Rank: rank}
		b.Stored(kvpublish.Stored{Hashes: passages[rank].hashes(), Tokens: tokensOf(passages[rank].text)[:n*engineBlock], BlockSize: engineBlock})
		e.publisher.Publish(&b)
	}
	awaitBlocks(t, p, 2*2048/engineBlock)
	for want, x := range passages {
		prefix := f.Prefix(new(Prefix), x.prompt.Chain, prompt.BlockSize)
		if want < len(engines) {
			learn(t, f, p, x, "base")
		}
		held, likely := prefix.Held(p, 0), map[bool]float64{false: 1024, true: 2048}[pinned]
		if want == len(engines) {
			likely = 0
		}
		if math.Abs(held-likely) > engineBlock {
			t.Errorf("%v tokens of prompt %d are counted on, want %v", held, want, likely)
		}
		if rank, ok := prefix.Rank(p); ok != (want < len(engines)) || ok && rank != want {
			t.Errorf("rank %d, %t for the prompt of rank %d", rank, ok, want)
		}
	}
}

// While others send to an engine its counters say nothing of how long a token is. A prompt that was learned does.
func TestLearnedPromptTellsTokenLength(t *testing.T) {
	e := newTeller(t, true)
	f, p := observed(t, e)
	if got := f.BytesPerToken(); got != DefaultBytesPerToken {
		t.Fatalf("%v bytes per token before anything is known", got)
	}
	x := newPassage(t, "one", 2048)
	e.store(x, "")
	awaitBlocks(t, p, len(x.text)/engineBlock)
	learn(t, f, p, x, "base")
	f.Observe(p, metrics.Scrape{Snapshot: &metrics.Snapshot{At: time.Now(), Engine: metrics.VLLM}}, time.Now())
	if got := f.BytesPerToken(); got < 0.9 || got > 1.1 {
		t.Errorf("%v bytes per token where a byte is one", got)
	}
}

// Tokens that are not those of the engine's events would make every prompt look as if it was dropped.
func TestOtherTokensAreNotLearned(t *testing.T) {
	e := newTeller(t, true)
	f, p := observed(t, e)
	x := newPassage(t, "one", 2048)
	n := len(x.text) / engineBlock
	others := tokensOf(strings.ToUpper(x.text))
	var b kvpublish.Batch
	b.Stored(kvpublish.Stored{Hashes: x.hashes(), Tokens: others[:n*engineBlock], BlockSize: engineBlock})
	e.publisher.Publish(&b)
	awaitBlocks(t, p, n)
	f.Learn(Sent{Replica: p, Path: "/v1/completions", Model: "base", Chain: x.prompt.Chain, Bytes: x.prompt.Bytes}, []byte(x.body("base")))
	await(t, "the answer to be looked at", func() bool { return f.LearnerView().Mismatched == 1 })
	if got := f.held(p, x, 1500); got != 1500 {
		t.Errorf("%v tokens are held where 1500 are believed", got)
	}
	e.publisher.Restart() // into one that does as it says
	e.store(x, "")
	awaitBlocks(t, p, n)
	learn(t, f, p, x, "base")
	awaitHeld(t, f, p, x, 0, 2048)
}

func awaitBlocks(t *testing.T, p *Replica, n int) {
	t.Helper()
	await(t, fmt.Sprint(n, " blocks to be told"), func() bool { s, _ := p.Events(); return s.Blocks == n })
}

// An adapter's blocks are found under its own name, and nothing is learned under a name that may be an adapter's.
func TestAdapterIsLearnedAsSuch(t *testing.T) {
	e := newTeller(t, true)
	f, p := observed(t, e)
	x := newPassage(t, "one", 2048)
	e.store(x, "tuned")
	f.Learn(Sent{Replica: p, Path: "/v1/completions", Model: "tuned", Chain: x.prompt.Chain}, []byte(x.body("tuned")))
	if st := f.learner.Stats(); st.Offered != 0 {
		t.Errorf("a prompt of an unknown model is learned: %+v", st)
	}
	await(t, "the list of models", func() bool { _, known := p.Serves("nobody"); return known })
	learn(t, f, p, x, "tuned")
	awaitHeld(t, f, p, x, 0, 2048)
}

func TestWithoutEvents(t *testing.T) {
	f := NewRegistry().New(Config{}, []string{"a"})
	if f.Prefix(new(Prefix), []uint64{1}, 1) != nil {
		t.Error("there is a prefix to look up among no events")
	}
	if f.Learns(&Sent{Chain: []uint64{1}}, 10) {
		t.Error("tokens are wanted without events")
	}
	if _, ok := f.Replica("a", time.Now()).Events(); ok {
		t.Error("there are events")
	}
}
