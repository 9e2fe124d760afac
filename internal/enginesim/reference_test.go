// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// reference is the same scheduler written for reading: slices and maps, every
// search linear, one token and one block at a time.
type reference struct {
	c       Config
	free    []*refBlock
	cached  map[uint64][]*refBlock
	inbox   []*refSeq
	waiting []*refSeq
	running []*refSeq
	busy    bool
	end     time.Duration
	stats   Stats
	now     Counters
}

type refBlock struct {
	refs   int
	hash   uint64
	cached bool
}

type refSeq struct {
	in, out                       int
	hash                          func(i int) uint64
	blocks                        []*refBlock
	computed, chunk, generated    int
	hits, preempted               int
	arrive, start, first, finish  time.Duration
	done, startedBefore, firstSet bool
}

func newReference(c Config) *reference {
	c = c.withDefaults()
	m := &reference{c: c, cached: map[uint64][]*refBlock{}}
	for range c.Blocks - 1 {
		m.free = append(m.free, &refBlock{})
	}
	return m
}

func (m *reference) submit(now time.Duration, s *refSeq) bool {
	m.advance(now)
	if m.c.MaxQueued > 0 && len(m.inbox)+len(m.waiting) >= m.c.MaxQueued {
		m.now.Rejected++
		return false
	}
	s.arrive = now
	m.inbox = append(m.inbox, s)
	if !m.busy {
		m.begin(now)
	}
	return true
}

func (m *reference) abort(now time.Duration, s *refSeq) {
	m.advance(now)
	if s.done {
		return
	}
	drop := func(list []*refSeq) []*refSeq {
		return slices.DeleteFunc(slices.Clone(list), func(q *refSeq) bool { return q == s })
	}
	m.inbox, m.waiting, m.running = drop(m.inbox), drop(m.waiting), drop(m.running)
	m.release(s)
	s.done, s.finish = true, now
	m.now.Aborted++
}

func (m *reference) advance(now time.Duration) {
	for m.busy && m.end <= now {
		m.complete()
		m.begin(m.end)
	}
}

func (m *reference) release(s *refSeq) {
	for _, b := range slices.Backward(s.blocks) {
		b.refs--
		if b.refs > 0 {
			continue
		}
		if b.cached {
			m.free = append(m.free, b)
		} else {
			m.free = slices.Insert(m.free, 0, b)
		}
	}
	s.blocks = nil
}

func (m *reference) take() *refBlock {
	b := m.free[0]
	m.free = slices.Delete(m.free, 0, 1)
	if b.cached {
		same := slices.DeleteFunc(m.cached[b.hash], func(q *refBlock) bool { return q == b })
		if len(same) == 0 {
			delete(m.cached, b.hash)
		} else {
			m.cached[b.hash] = same
		}
		b.cached = false
	}
	b.refs = 1
	return b
}

// compute stores n more tokens of a sequence, one by one.
func (m *reference) compute(s *refSeq, n int) {
	for i := range n {
		pos := s.computed + i
		if pos/m.c.BlockTokens == len(s.blocks) {
			s.blocks = append(s.blocks, m.take())
		}
		if (pos+1)%m.c.BlockTokens == 0 && !m.c.NoPrefixCaching {
			k := pos / m.c.BlockTokens
			b := s.blocks[k]
			b.hash, b.cached = s.hash(k), true
			m.cached[b.hash] = append(m.cached[b.hash], b)
		}
	}
	s.chunk = n
}

func (m *reference) ceil(tokens int) int {
	n := tokens / m.c.BlockTokens
	if tokens%m.c.BlockTokens > 0 {
		n++
	}
	return n
}

func (m *reference) begin(now time.Duration) {
	m.waiting = append(m.waiting, m.inbox...)
	m.inbox = nil
	budget := m.c.MaxBatchedTokens
	prefill, decode := 0, 0
	count := func(s *refSeq, n int) {
		if n == 1 && s.generated > 0 && s.computed+1 == s.in+s.generated {
			decode++
		} else {
			prefill += n
		}
	}
	for _, s := range m.running {
		s.chunk = 0
	}
	preempted := false
	for i := 0; i < len(m.running) && budget > 0; i++ {
		s := m.running[i]
		n := min(s.in+s.generated-s.computed, budget)
		for len(m.running) > i && m.ceil(s.computed+n)-len(s.blocks) > len(m.free) {
			last := m.running[len(m.running)-1]
			m.running = m.running[:len(m.running)-1]
			m.release(last)
			last.computed, last.chunk = 0, 0
			last.preempted++
			m.now.Preemptions++
			m.waiting = slices.Insert(m.waiting, 0, last)
			preempted = true
		}
		if len(m.running) == i {
			break
		}
		m.compute(s, n)
		count(s, n)
		budget -= n
	}
	for !preempted && budget > 0 && len(m.running) < m.c.MaxSeqs && len(m.waiting) > 0 {
		s := m.waiting[0]
		total := s.in + s.generated
		var hit []*refBlock
		idle := 0
		for k := 0; (k+1)*m.c.BlockTokens < total && !m.c.NoPrefixCaching; k++ {
			same := m.cached[s.hash(k)]
			if len(same) == 0 {
				break
			}
			hit = append(hit, same[0])
			if same[0].refs == 0 {
				idle++
			}
		}
		base := len(hit) * m.c.BlockTokens
		n := min(total-base, budget)
		need := total
		if m.c.AdmitByChunk {
			need = base + n
		}
		if m.ceil(need)-len(hit)+idle > len(m.free) {
			break
		}
		for _, b := range hit {
			if b.refs == 0 {
				m.free = slices.DeleteFunc(m.free, func(q *refBlock) bool { return q == b })
			}
			b.refs++
		}
		s.blocks, s.computed = hit, base
		if !s.startedBefore {
			s.startedBefore, s.hits, s.start = true, base, now
			m.now.PrefixQueries += int64(s.in)
			m.now.PrefixHits += int64(base)
		}
		m.compute(s, n)
		count(s, n)
		m.waiting = m.waiting[1:]
		m.running = append(m.running, s)
		budget -= n
	}
	m.busy = len(m.running) > 0
	m.end = now + m.c.StepOverhead + time.Duration(float64(prefill)/m.c.PrefillRate*1e9) + time.Duration(decode)*m.c.DecodeCost
}

func (m *reference) complete() {
	for _, s := range slices.Clone(m.running) {
		s.computed += s.chunk
		if s.chunk == 0 || s.computed < s.in+s.generated {
			continue
		}
		if !s.firstSet {
			s.firstSet, s.first = true, m.end
			m.now.FirstTokens++
			m.now.FirstTokenTime += m.end - s.arrive
			m.now.PrefillTime += m.end - s.start
			m.now.PromptTokens += int64(s.in)
			m.now.CachedTokens += int64(s.hits)
		}
		if s.out > 0 {
			s.generated++
			m.now.GenerationTokens++
		}
		if s.generated == s.out {
			s.done, s.finish = true, m.end
			m.release(s)
			m.running = slices.DeleteFunc(m.running, func(q *refSeq) bool { return q == s })
			m.now.Finished++
		}
	}
	m.now.Steps++
	usable := m.c.Blocks - 1
	m.stats = Stats{m.now, Gauges{len(m.running), len(m.waiting), float64(usable-len(m.free)) / float64(usable)}, m.end}
}

// TestEngineAgainstReference runs the same random load through the engine and the
// reference, on caches small enough for evictions, preemptions and long queues.
func TestEngineAgainstReference(t *testing.T) {
	var preemptions, hits, aborts, rejections int64
	for seed := range uint64(300) {
		rng := rand.New(rand.NewPCG(seed, 1))
		c := Config{
			Blocks:           20 + rng.IntN(80),
			BlockTokens:      1 + rng.IntN(5),
			MaxSeqs:          1 + rng.IntN(12),
			MaxBatchedTokens: 4 + rng.IntN(60),
			MaxQueued:        rng.IntN(2) * (3 + rng.IntN(10)),
			PrefillRate:      5000,
			StepOverhead:     time.Millisecond,
			DecodeCost:       200 * time.Microsecond,
			NoPrefixCaching:  seed%10 == 9,
			AdmitByChunk:     seed%3 == 0,
		}
		e, m := New(c), newReference(c)
		stats := runAgainstReference(t, rng, e, m)
		if t.Failed() {
			t.Fatalf("seed %d, config %+v", seed, e.config)
		}
		preemptions += stats.Preemptions
		hits += stats.PrefixHits
		aborts += stats.Aborted
		rejections += stats.Rejected
	}
	// A load that exercises nothing proves nothing.
	if preemptions == 0 || hits == 0 || aborts == 0 || rejections == 0 {
		t.Errorf("load too tame: %d preemptions, %d hits, %d aborts, %d rejections", preemptions, hits, aborts, rejections)
	}
}

func runAgainstReference(t *testing.T, rng *rand.Rand, e *Engine, m *reference) Counters {
	type pair struct {
		got  *Request
		want *refSeq
	}
	var pairs []pair
	var last Counters
	now := time.Duration(0)
	for range 120 {
		if rng.IntN(3) > 0 {
			now += time.Duration(rng.IntN(20)) * time.Millisecond
		}
		if rng.IntN(8) == 0 && len(pairs) > 0 {
			p := pairs[rng.IntN(len(pairs))]
			e.Abort(now, p.got)
			m.abort(now, p.want)
		} else {
			got, want := randomRequest(rng, e)
			err, ok := e.Submit(now, got), m.submit(now, want)
			if (err == nil) != ok {
				t.Errorf("at %v: Submit = %v, reference accepted = %t", now, err, ok)
			}
			if ok {
				pairs = append(pairs, pair{got, want})
			}
		}
		checkInvariants(t, e)
		if e.Stats() != m.stats {
			t.Errorf("at %v: stats\n%+v, want\n%+v", now, e.Stats(), m.stats)
		}
		if s := e.Stats().Counters; !monotone(last, s) {
			t.Errorf("at %v: counters fell from %+v to %+v", now, last, s)
		}
		last = e.Stats().Counters
		if t.Failed() {
			return last
		}
	}
	e.Advance(time.Hour)
	m.advance(time.Hour)
	checkInvariants(t, e)
	if _, busy := e.Next(); busy || e.pool.used() != 0 || e.Queued() != 0 {
		t.Errorf("not idle at the end: busy %t, %d blocks used, %d queued", busy, e.pool.used(), e.Queued())
	}
	var sum Counters
	for i, p := range pairs {
		g, w := p.got, p.want
		if g.Cached != w.hits || g.Generated != w.generated || g.Preemptions != w.preempted ||
			g.Admitted != w.start || g.FirstToken != w.first || g.Finished != w.finish {
			t.Errorf("request %d: got %+v, want %+v", i, *g, *w)
		}
		sum.GenerationTokens += int64(g.Generated)
		sum.Preemptions += int64(g.Preemptions)
		if g.FirstToken > 0 {
			sum.FirstTokens++
			sum.PromptTokens += int64(g.PromptTokens)
			sum.CachedTokens += int64(g.Cached)
		}
		if g.Admitted > 0 || g.FirstToken > 0 || g.computed > 0 {
			sum.PrefixHits += int64(g.Cached)
		}
	}
	c := e.counters
	if sum.GenerationTokens != c.GenerationTokens || sum.Preemptions != c.Preemptions || sum.FirstTokens != c.FirstTokens ||
		sum.PromptTokens != c.PromptTokens || sum.CachedTokens != c.CachedTokens || sum.PrefixHits != c.PrefixHits {
		t.Errorf("counters %+v are not the sum over requests %+v", c, sum)
	}
	return c
}

// randomRequest draws prompts from a small tree of prefixes, so that many share.
func randomRequest(rng *rand.Rand, e *Engine) (*Request, *refSeq) {
	c := e.config
	in := 1 + rng.IntN(c.CapacityTokens()*2/3)
	out := rng.IntN(min(20, c.CapacityTokens()-in+1))
	family := uint64(rng.IntN(4))
	fork := rng.IntN(in)
	hash := uint64(0)
	blocks := make([]uint64, in/c.BlockTokens)
	for i := range blocks {
		if i == fork {
			family = rng.Uint64()
		}
		hash = mix(hash ^ mix(family))
		blocks[i] = hash
	}
	r := &Request{Blocks: blocks, PromptTokens: in, OutputTokens: out}
	if rng.IntN(2) == 0 {
		r.Output = func(i int) uint64 { return mix(hash + uint64(i) + 1) }
	}
	// Read late: the hashes of unique blocks depend on a number that Submit gives.
	return r, &refSeq{in: in, out: out, hash: func(i int) uint64 { return e.hashOf(r, i) }}
}

func monotone(a, b Counters) bool {
	return a.PrefixQueries <= b.PrefixQueries && a.PrefixHits <= b.PrefixHits && a.PromptTokens <= b.PromptTokens &&
		a.CachedTokens <= b.CachedTokens && a.GenerationTokens <= b.GenerationTokens && a.FirstTokens <= b.FirstTokens &&
		a.FirstTokenTime <= b.FirstTokenTime && a.Finished <= b.Finished && a.Aborted <= b.Aborted &&
		a.Rejected <= b.Rejected && a.Preemptions <= b.Preemptions && a.Steps <= b.Steps
}

// checkInvariants compares users, free queue and index with what the sequences hold.
func checkInvariants(t *testing.T, e *Engine) {
	t.Helper()
	refs := map[blockID]int32{}
	for _, r := range e.running {
		for _, id := range r.blocks {
			refs[id]++
		}
	}
	p := e.pool
	queued := map[blockID]bool{}
	for id := p.blocks[nullBlock].next; id != nullBlock; id = p.blocks[id].next {
		if queued[id] {
			t.Errorf("block %d is in the free queue twice", id)
			return
		}
		queued[id] = true
	}
	if len(queued) != p.free || p.free+len(refs) != p.usable() {
		t.Errorf("%d blocks queued, %d counted free, %d in use, %d in all", len(queued), p.free, len(refs), p.usable())
	}
	cached := 0
	for id := 1; id < len(p.blocks); id++ {
		b := &p.blocks[id]
		if b.refs != refs[blockID(id)] || (b.refs == 0) != queued[blockID(id)] {
			t.Errorf("block %d: %d users, want %d; queued %t", id, b.refs, refs[blockID(id)], queued[blockID(id)])
		}
		if !b.cached {
			continue
		}
		cached++
		twin := p.lookup(b.hash)
		for twin != nullBlock && twin != blockID(id) {
			twin = p.blocks[twin].twin
		}
		if twin == nullBlock {
			t.Errorf("block %d is cached but not found under its hash", id)
		}
	}
	entries := 0
	for _, s := range p.index.slots {
		for id := s.id; id != nullBlock; id = p.blocks[id].twin {
			entries++
		}
	}
	if entries != cached {
		t.Errorf("index holds %d blocks, %d are cached", entries, cached)
	}
}
