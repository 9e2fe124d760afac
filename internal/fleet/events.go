// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"encoding/json"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/kvevents"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/prompt"
	"github.com/seed-2fa47a1e/caddy-kv-cache/metrics"
)

const (
	// maxRanks is how many publishers of one replica are followed, one for each
	// data-parallel rank.
	maxRanks = 64
	// maxLearned is the longest body whose tokens are asked for, in bytes; a
	// copy of it is kept until the engine has answered.
	maxLearned = 1 << 20
	// restartSeen is how long after a publisher started anew the engine's
	// metrics may tell of the same restart.
	restartSeen = time.Minute
)

// Events says how the KV-cache events of a fleet's replicas are followed.
type Events struct {
	// Stream gives the settings for following one data-parallel rank of the
	// replica at a dial address, or false if it has no publisher.
	Stream func(addr string, rank int) (kvevents.StreamConfig, bool)
	// Pinned says that requests are sent to the data-parallel rank that
	// Prefix.Rank names. Otherwise an engine of several chooses one without regard
	// to prefixes, and what is counted on is the mean of what they hold.
	Pinned bool
}

// API is the way to what an engine's front end tells apart from its metrics:
// the tokens of a prompt, and the models it serves.
type API struct {
	// Base gives the URL of the API of the replica at a dial address, without a
	// path, or false if it can't be asked.
	Base func(addr string) (url string, ok bool)
	// Header is sent along, such as Authorization.
	Header http.Header
	// Client carries the calls.
	Client *http.Client
}

// truth is what the events of one replica say that it holds. Like the replica,
// it is pooled: a new configuration takes hold of it before the old one lets
// go, so its streams stay open over a reload and miss nothing.
type truth struct {
	replica  *Replica
	endpoint string
	index    *kvevents.Index

	ctx     context.Context
	cancel  context.CancelFunc
	streams sync.WaitGroup
	users   int // guarded by Registry.truthsMu

	mu    sync.Mutex // guards changes of ranks
	ranks atomic.Pointer[[]*rank]
	bound int                       // blocks told to the index
	block atomic.Int64              // tokens in an engine's block, 0 before the first event
	heard atomic.Pointer[time.Time] // when the last events came, nil before
}

// rank follows the publisher of one data-parallel rank.
type rank struct {
	truth     *truth
	stream    *kvevents.Stream
	replays   bool // missed batches can be asked for
	connected atomic.Bool
	held      atomic.Int64                         // blocks on the device
	origin    atomic.Pointer[kvevents.StreamStats] // when the view was last emptied, nil before
	reborn    atomic.Pointer[time.Time]            // when the publisher last started anew, nil before
}

// listen follows a replica's first rank, or takes hold of the streams that do.
// It returns nil if the replica has no publisher.
func (g *Registry) listen(p *Replica, e *Events, log *zap.Logger) *truth {
	cfg, ok := e.Stream(p.Addr, 0)
	if !ok {
		return nil
	}
	key := p.Addr + " " + cfg.Endpoint + " " + cfg.Replay
	g.truthsMu.Lock()
	defer g.truthsMu.Unlock()
	t := g.truths[key]
	if t == nil {
		t = &truth{replica: p, endpoint: key, index: kvevents.NewIndex(kvevents.ViewConfig{})}
		t.ctx, t.cancel = context.WithCancel(context.Background())
		t.ranks.Store(new([]*rank))
		g.truths[key] = t
	}
	t.users++
	t.widen(1, e, log)
	p.truth.Store(t)
	return t
}

// leave lets go of a truth, whose streams end when nobody holds it any more.
func (g *Registry) leave(t *truth) {
	if t == nil {
		return
	}
	g.truthsMu.Lock()
	t.users--
	last := t.users == 0
	if last {
		delete(g.truths, t.endpoint)
		t.replica.truth.CompareAndSwap(t, nil)
	}
	g.truthsMu.Unlock()
	if last {
		t.cancel()
		t.streams.Wait()
	}
}

// widen follows the publishers of as many ranks as the engine has.
func (t *truth) widen(ranks int, e *Events, log *zap.Logger) {
	t.mu.Lock()
	defer t.mu.Unlock()
	followed := slices.Clone(*t.ranks.Load())
	for n := len(followed); n < min(ranks, maxRanks); n++ {
		cfg, ok := e.Stream(t.replica.Addr, n)
		if !ok {
			break
		}
		r := &rank{truth: t, replays: cfg.Replay != ""}
		log := log.With(zap.String("replica", t.replica.Addr), zap.Int("rank", n))
		cfg.Notify = func(notice kvevents.Notice) { r.notice(notice, log) }
		stream, err := kvevents.NewStream(cfg, r)
		if err != nil {
			log.Error("KV events can't be followed", zap.Error(err))
			break
		}
		r.stream = stream
		followed = append(followed, r)
		t.streams.Go(func() { _ = stream.Run(t.ctx) }) // ends with the context's error
	}
	if len(followed) > len(*t.ranks.Load()) {
		t.ranks.Store(&followed)
	}
}

// Apply implements kvevents.Sink.
func (r *rank) Apply(b *kvevents.Batch) {
	r.truth.index.Apply(b)
	now := time.Now()
	r.truth.heard.Store(&now)
	if v := r.truth.index.View(b.Rank); v != nil {
		s := v.Stats()
		r.held.Store(int64(s.DeviceHeld))
		if n := int64(s.BlockSize); n > 0 && n != r.truth.block.Load() {
			r.truth.block.Store(n)
		}
	}
	for i := range b.Events {
		if b.Events[i].Kind == kvevents.AllBlocksCleared {
			r.truth.replica.cleared()
		}
	}
}

// Clear implements kvevents.Sink.
func (r *rank) Clear(rank int) {
	r.truth.index.Clear(rank)
	r.held.Store(0)
	s := r.stream.Stats()
	r.origin.Store(&s)
}

// notice takes in a change of the stream's state.
func (r *rank) notice(n kvevents.Notice, log *zap.Logger) {
	switch n.Transition {
	case kvevents.Connected:
		r.connected.Store(true)
	case kvevents.Disconnected:
		r.connected.Store(false)
	case kvevents.Restarted:
		now := time.Now()
		r.reborn.Store(&now)
		r.truth.replica.cleared()
	case kvevents.Silent:
		return // so is every idle engine
	}
	log.Info("KV events", zap.String("transition", string(n.Transition)),
		zap.Uint64("missing", n.Missing), zap.Error(n.Err))
}

// restarted drops what is known, because the engine's metrics tell that its
// process is new, unless the stream was quicker to notice.
func (t *truth) restarted(now time.Time) {
	for _, r := range *t.ranks.Load() {
		if reborn := r.reborn.Load(); reborn != nil && now.Sub(*reborn) < restartSeen {
			return
		}
	}
	t.index.ClearAll()
	for _, r := range *t.ranks.Load() {
		r.held.Store(0)
	}
}

// resize bounds the views by what the engine can hold; memory below it may
// hold a few times that.
func (t *truth) resize(tokens, blockTokens float64) {
	const tiers = 4
	if blocks := int(tiers * tokens / max(1, blockTokens)); blocks > 0 && blocks != t.bound {
		t.bound = blocks
		t.index.SetConfig(kvevents.ViewConfig{Blocks: blocks})
	}
}

// state tells how far the truth reaches. Current: every stream is up, so that
// what is said to be held is held. Whole: everything since the engine's start
// was heard, so that what is not said to be held is not. Block is the size of
// its blocks in tokens, 0 while it never stored one.
func (t *truth) state() (current, whole bool, block int) {
	ranks := *t.ranks.Load()
	current, whole = len(ranks) > 0, true
	for _, r := range ranks {
		if !r.connected.Load() {
			return false, false, 0
		}
		whole = whole && r.whole()
	}
	return current, whole, int(t.block.Load())
}

// whole tells whether everything since the engine's start was heard and
// understood.
func (r *rank) whole() bool {
	s := r.stream.Stats()
	heard, left, blocks := s.Messages, s.Skipped, s.Blocks
	if origin := r.origin.Load(); origin != nil {
		heard -= origin.Messages
		left.Malformed -= origin.Skipped.Malformed
		left.TooBig -= origin.Skipped.TooBig
		left.Unknown -= origin.Skipped.Unknown
		blocks -= origin.Blocks
	}
	// An engine numbers its batches from 0.
	if s.Next != heard || heard == 0 && !(r.replays && s.Replays > s.ReplayErrors) {
		return false
	}
	// A later engine may tell more than is known here. One that is not
	// understood at all speaks another language.
	return left.Malformed+left.TooBig == 0 && (left.Unknown == 0 || blocks > 0)
}

// taken is how many tokens the engine's cache holds by its own account, false
// if not all of it is known.
func (t *truth) taken() (tokens float64, ok bool) {
	current, whole, block := t.state()
	if !current || !whole {
		return 0, false
	}
	for _, r := range *t.ranks.Load() {
		tokens += float64(r.held.Load()) * float64(block)
	}
	return tokens, true
}

// Prefix is the beginning of one prompt, to be looked up among what the
// replicas hold by their own account. It is made by Fleet.Prefix, and not safe
// for concurrent use.
type Prefix struct {
	fleet    *Fleet
	chain    []uint64
	perBlock float64
	aligned  []aligned // what was looked up already, by token block
	missing  []missing
	ranks    []home // of replicas with several
}

// home is the rank of a replica that holds most of a prompt, -1 if none does.
type home struct {
	replica *Replica
	rank    int
}

type aligned struct {
	block int
	kvevents.Aligned
	ok bool
}

// Prefix makes x the beginning of the prompt with a chain of text blocks, each
// of perBlock tokens. It returns nil if no events are followed.
func (f *Fleet) Prefix(x *Prefix, chain []uint64, perBlock float64) *Prefix {
	if f.Events == nil {
		return nil
	}
	chain = chain[:min(len(chain), maxLearned/prompt.BlockSize)] // nothing beyond was learned
	*x = Prefix{fleet: f, chain: chain, perBlock: perBlock, aligned: x.aligned[:0], missing: x.missing[:0], ranks: x.ranks[:0]}
	return x
}

// Drop lets go of the prompt, so that x can be kept for another.
func (x *Prefix) Drop() {
	clear(x.aligned)
	clear(x.missing)
	clear(x.ranks)
	*x = Prefix{aligned: x.aligned[:0], missing: x.missing[:0], ranks: x.ranks[:0]}
}

// Held corrects how many of the prompt's tokens a replica is believed to hold
// by what its engine has told. Where the engine told nothing of this prompt,
// or the tokens of the prompt are not known, the belief stands. It also stands
// for the prompts of requests at work there: an engine's events come a step
// behind, and blocks in use are not evicted.
func (x *Prefix) Held(p *Replica, believed float64) float64 {
	t := p.truth.Load()
	if t == nil {
		return believed
	}
	current, whole, block := t.state()
	if !current {
		return believed
	}
	var m kvevents.Match
	odds, share := 1.0, 1.0 // of meeting one rank, and of meeting what the best one holds
	if block > 0 {
		a, ok := x.align(block)
		if !ok || a.Tokens == 0 {
			return believed
		}
		var rank int
		m, rank = t.index.LongestKeys(a.Keys, block)
		if ranks := len(*t.ranks.Load()); ranks > 1 {
			x.found(p, rank)
			if !x.fleet.Events.Pinned {
				odds = 1 / float64(ranks)
			}
			if credit := m.Credit(); !x.fleet.Events.Pinned && credit > 0 {
				share = odds * t.index.CreditKeys(a.Keys, block) / credit
			}
		}
		if m.Tokens >= a.Tokens { // what follows is not known by its tokens
			return share * (m.Credit() + max(0, believed-float64(a.Tokens)))
		}
	}
	sure := share * m.Credit()
	if believed <= sure {
		return sure
	}
	if !whole {
		return believed
	}
	used := p.uses(x.chain, t)
	if float64(used+1)*x.perBlock > believed {
		return max(sure, odds*believed)
	}
	if used > 0 {
		sure = max(sure, odds*float64(used)*x.perBlock)
	}
	// One block more than told, because where tokens end in the text is estimated.
	if told := int(float64(m.Tokens)/x.perBlock) + 2; float64(told)*x.perBlock < believed {
		x.miss(p, t, max(told, used))
	}
	return sure
}

// uses is how many leading blocks of a chain are those of requests at work at
// the replica.
func (p *Replica) uses(chain []uint64, t *truth) int {
	var heard time.Time
	if at := t.heard.Load(); at != nil {
		heard = *at
	}
	p.mu.RLock()
	defer p.mu.RUnlock()
	return p.inUse.blocks(chain, heard, time.Now())
}

// missing are blocks of a prompt, from one on, that a replica was wrongly
// believed to hold.
type missing struct {
	replica *Replica
	truth   *truth
	from    int
}

// maxMissing is how many of them one prompt notes.
const maxMissing = 16

func (x *Prefix) miss(p *Replica, t *truth, from int) {
	for i := range x.missing {
		if x.missing[i].replica == p {
			x.missing[i].from = from
			return
		}
	}
	if len(x.missing) < maxMissing {
		x.missing = append(x.missing, missing{p, t, from})
	}
}

func (x *Prefix) found(p *Replica, rank int) {
	for i := range x.ranks {
		if x.ranks[i].replica == p {
			x.ranks[i].rank = rank
			return
		}
	}
	x.ranks = append(x.ranks, home{p, rank})
}

// Rank is the data-parallel rank of a replica that holds most of the prompt by
// its events when Held last looked; false if none does, or it has only one.
func (x *Prefix) Rank(p *Replica) (rank int, ok bool) {
	for _, h := range x.ranks {
		if h.replica == p {
			return h.rank, h.rank >= 0
		}
	}
	return 0, false
}

// Prune takes out of the belief what Held found to be gone, so that it takes
// no room there and counts in no figure. It is for after the choice, because
// it may take a while; what was sent meanwhile stays.
func (x *Prefix) Prune() {
	for _, m := range x.missing {
		if m.replica.uses(x.chain, m.truth) <= m.from {
			m.replica.Lacks(x.chain, m.from)
		}
	}
	clear(x.missing)
	x.missing = x.missing[:0]
}

func (x *Prefix) align(block int) (kvevents.Aligned, bool) {
	for i := range x.aligned {
		if x.aligned[i].block == block {
			return x.aligned[i].Aligned, x.aligned[i].ok
		}
	}
	a, ok := x.fleet.Registry.alignment.Lookup(x.chain, block)
	x.aligned = append(x.aligned, aligned{block, a, ok})
	return a, ok
}

// Sent is a prompt that a replica has answered, for Learn.
type Sent struct {
	// Replica is where it was sent, and Path the request's path there.
	Replica *Replica
	Path    string
	// Model is the model's or adapter's name in the request.
	Model string
	// Chain and Bytes are the prompt's text blocks and the length of its text.
	Chain []uint64
	Bytes int
}

// Learns tells whether the tokens of a prompt are wanted: events are followed
// and most of the prompt is new. A body of size bytes would have to be copied.
func (f *Fleet) Learns(s *Sent, size int) bool {
	if f.learner == nil || size == 0 || size > maxLearned || len(s.Chain) == 0 {
		return false
	}
	return f.Registry.alignment.Known(s.Chain)*4 < len(s.Chain)*3
}

// Learner tells how many prompts' tokens were asked for and what came of it,
// false if no events are followed.
func (f *Fleet) Learner() (kvevents.LearnerStats, bool) {
	if f.learner == nil {
		return kvevents.LearnerStats{}, false
	}
	return f.learner.Stats(), true
}

// confirms tells whether an engine holds a prompt that it has answered just
// now under the tokens that it gave for it. If so, the prompt also tells how
// long a token is, whoever else sends.
func (f *Fleet) confirms(r kvevents.Request, tokens []uint32) bool {
	for _, p := range f.Members() {
		if base, ok := f.API.Base(p.Addr); !ok || base != r.Base {
			continue
		}
		if !p.holdsAs(r.Prompt, tokens) {
			return false
		}
		p.mu.Lock()
		p.text.measure(float64(r.Prompt.TextBytes), float64(len(tokens)))
		p.mu.Unlock()
		return true
	}
	return true
}

// holdsAs tells whether the replica's events have a prompt under these tokens:
// at least half of it, as some may be evicted already. What tells of too little
// can't deny it.
func (p *Replica) holdsAs(prompt kvevents.Prompt, tokens []uint32) bool {
	t := p.truth.Load()
	if t == nil {
		return true
	}
	current, whole, block := t.state()
	if !current || !whole || block == 0 {
		return true
	}
	keys := kvevents.AppendKeys(nil, tokens, block, prompt.LoRA, prompt.Extra)
	m, _ := t.index.LongestKeys(keys, block)
	return 2*m.Blocks >= len(keys)
}

// tokensTold notes that an engine ceased to tell the tokens of prompts, or does
// so again.
func (f *Fleet) tokensTold(base string, err error) {
	if log := f.Logger.With(zap.String("fleet", f.Name), zap.String("engine", base)); err != nil {
		log.Warn("tokens of prompts can't be learned; what is believed of them stands", zap.Error(err))
	} else {
		log.Info("tokens of prompts are learned")
	}
}

// LearnerView is what the learner counts, nil if no tokens are learned.
func (f *Fleet) LearnerView() *metrics.LearnerView {
	s, learns := f.Learner()
	if !learns {
		return nil
	}
	return &metrics.LearnerView{
		Rendered: s.Rendered, Tokenized: s.Tokenized, Known: s.Known, Full: s.Full, Stale: s.Stale,
		Unsupported: s.Unsupported, Mismatched: s.Mismatched, Failed: s.Failed, RenderRefused: s.RenderRefused, Waiting: s.Waiting,
	}
}

// Learn has a prompt's tokens asked for at the replica that got it, so that
// what engines say of tokens can be told of texts. The body becomes the
// fleet's. It blocks for no I/O, but reads the body, so it is for after the
// request.
func (f *Fleet) Learn(s Sent, body []byte) {
	base, ok := f.API.Base(s.Replica.Addr)
	if !ok {
		return
	}
	adapter, known := s.Replica.adapter(s.Model)
	if !known { // its blocks can't be told from those of the base model
		f.wantModels(s.Replica, time.Now(), modelsEvery)
		return
	}
	var fields struct {
		CacheSalt string `json:"cache_salt"`
	}
	if json.Unmarshal(body, &fields) != nil {
		return
	}
	learned := kvevents.Prompt{Chain: s.Chain, TextBytes: s.Bytes, BlockSizes: f.blockSizes(s.Replica)}
	if adapter {
		learned.LoRA = s.Model
	}
	if fields.CacheSalt != "" {
		learned.Extra = []kvevents.Extra{kvevents.SaltExtra(fields.CacheSalt)}
	}
	f.learner.Offer(kvevents.Request{Base: base, Path: s.Path, Header: f.API.Header, Body: body, Prompt: learned})
}

// blockSizes lists the token blocks of the replicas, that of the given first.
func (f *Fleet) blockSizes(first *Replica) []int {
	var sizes []int
	add := func(n int) {
		if n > 0 && !slices.Contains(sizes, n) {
			sizes = append(sizes, n)
		}
	}
	for _, p := range append([]*Replica{first}, f.Members()...) {
		if t := p.truth.Load(); t != nil {
			_, _, block := t.state()
			add(block)
		}
		add(p.blockTokens())
	}
	if len(sizes) == 0 {
		return []int{defaultBlockTokens}
	}
	return sizes
}

// blockTokens is the engine's block by its metrics, 0 if they don't tell.
func (p *Replica) blockTokens() int {
	p.mu.RLock()
	defer p.mu.RUnlock()
	if p.latest == nil {
		return 0
	}
	return int(p.latest.BlockTokens.Value)
}

// EventStats is what became of the KV events of one replica.
type EventStats struct {
	// Current and Whole tell how far they can be relied on: every publisher is
	// connected, and everything since the engine's start was heard.
	Current, Whole bool
	// Ranks are the publishers' own figures.
	Ranks []kvevents.StreamStats
	// Blocks is how many blocks the engine says it holds, in any of its tiers.
	Blocks int
}

// Events tells what became of the replica's KV events, false if none are followed.
func (p *Replica) Events() (EventStats, bool) {
	t := p.truth.Load()
	if t == nil {
		return EventStats{}, false
	}
	var s EventStats
	s.Current, s.Whole, _ = t.state()
	for _, r := range *t.ranks.Load() {
		s.Ranks = append(s.Ranks, r.stream.Stats())
	}
	for _, n := range t.index.Ranks() {
		s.Blocks += t.index.View(n).Stats().Held
	}
	return s, true
}
