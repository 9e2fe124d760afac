// SPDX-License-Identifier: Apache-2.0

package residency

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
)

// reference is the plain model: per replica a list of blocks, most recently used first.
type reference struct {
	held     [][]uint64 // by slot, nil = not in use
	capacity []int
	parent   map[uint64]uint64
}

func newReference() *reference { return &reference{parent: map[uint64]uint64{}} }

func (m *reference) join(slot Slot, capacity int) {
	for int(slot) >= len(m.held) {
		m.held = append(m.held, nil)
		m.capacity = append(m.capacity, 0)
	}
	m.held[slot] = []uint64{}
	m.capacity[slot] = min(max(capacity, 1), MaxCapacity)
}

func (m *reference) leave(slot Slot) { m.held[slot] = nil }

func (m *reference) insert(slot Slot, chain []uint64) {
	m.learn(chain)
	chain = chain[:min(len(chain), m.capacity[slot])]
	list := slices.Clone(chain)
	for _, h := range m.held[slot] {
		if !slices.Contains(chain, h) {
			list = append(list, h)
		}
	}
	m.held[slot] = list[:min(len(list), m.capacity[slot])]
}

func (m *reference) learn(chain []uint64) {
	for i := 1; i < len(chain); i++ {
		m.parent[chain[i]] = chain[i-1]
	}
}

func (m *reference) setCapacity(slot Slot, blocks int) {
	m.capacity[slot] = min(max(blocks, 1), MaxCapacity)
	m.held[slot] = m.held[slot][:min(len(m.held[slot]), m.capacity[slot])]
}

func (m *reference) remove(slot Slot, chain []uint64, from int) {
	if from < 0 || from >= len(chain) {
		return
	}
	m.held[slot] = slices.DeleteFunc(m.held[slot], func(h uint64) bool {
		for ok := true; ok; h, ok = m.parent[h] {
			if h == chain[from] {
				return true
			}
		}
		return false
	})
}

func (m *reference) match(slot Slot, chain []uint64) int {
	for i, h := range chain {
		if !slices.Contains(m.held[slot], h) {
			return i
		}
	}
	return len(chain)
}

// chained turns symbols into a chain of hashes as the prompt package would.
func chained(symbols []byte) []uint64 {
	chain := make([]uint64, len(symbols))
	h := uint64(1)
	for i, s := range symbols {
		h = mix(h + uint64(s) + 1)
		chain[i] = h
	}
	return chain
}

// mix is the finaliser of splitmix64.
func mix(h uint64) uint64 {
	h += 0x9e3779b97f4a7c15
	h = (h ^ h>>30) * 0xbf58476d1ce4e5b9
	h = (h ^ h>>27) * 0x94d049bb133111eb
	return h ^ h>>31
}

// pair drives an index and the reference with the same operations.
type pair struct {
	tb testing.TB
	x  *Index
	m  *reference
}

func newPair(tb testing.TB) *pair { return &pair{tb, New(), newReference()} }

func (p *pair) inUse(slot Slot) bool { return int(slot) < len(p.m.held) && p.m.held[slot] != nil }

func (p *pair) join(capacity int) Slot {
	slot := p.x.Join(capacity)
	if slot == NoSlot || p.inUse(slot) {
		p.tb.Fatalf("Join(%d) = %d, which is in use or none", capacity, slot)
	}
	p.m.join(slot, capacity)
	return slot
}

func (p *pair) leave(slot Slot) {
	p.x.Leave(slot)
	if p.inUse(slot) {
		p.m.leave(slot)
	}
}

func (p *pair) clear(slot Slot) {
	p.x.Clear(slot)
	if p.inUse(slot) {
		p.m.held[slot] = []uint64{}
	}
}

func (p *pair) setCapacity(slot Slot, blocks int) {
	p.x.SetCapacity(slot, blocks)
	if p.inUse(slot) {
		p.m.setCapacity(slot, blocks)
	}
}

func (p *pair) insert(slot Slot, chain []uint64) {
	p.x.Insert(slot, chain)
	if p.inUse(slot) {
		p.m.insert(slot, chain)
	}
}

func (p *pair) remove(slot Slot, chain []uint64, from int) {
	p.m.learn(chain)
	p.x.Remove(slot, chain, from)
	if p.inUse(slot) {
		p.m.remove(slot, chain, from)
	}
}

func (p *pair) compare(chain []uint64) {
	p.tb.Helper()
	out := p.x.Match(chain, nil)
	for slot := range max(len(out), len(p.m.held)) {
		want := 0
		if p.inUse(Slot(slot)) {
			want = p.m.match(Slot(slot), chain)
			if slot >= len(out) {
				p.tb.Fatalf("Match returned %d slots, but slot %d is in use", len(out), slot)
			}
		}
		if slot < len(out) && int(out[slot]) != want {
			p.tb.Fatalf("Match of %d blocks: slot %d holds %d, want %d", len(chain), slot, out[slot], want)
		}
		if got := p.x.MatchOne(Slot(slot), chain); got != want {
			p.tb.Fatalf("MatchOne of %d blocks: slot %d holds %d, want %d", len(chain), slot, got, want)
		}
	}
}

func (p *pair) compareSizes() {
	p.tb.Helper()
	pairs, distinct, replicas := 0, map[uint64]bool{}, 0
	for slot, held := range p.m.held {
		if got := p.x.Len(Slot(slot)); got != len(held) {
			p.tb.Fatalf("Len(%d) = %d, want %d", slot, got, len(held))
		}
		if held == nil {
			continue
		}
		replicas++
		pairs += len(held)
		for _, h := range held {
			distinct[h] = true
		}
		if got := p.x.Capacity(Slot(slot)); got != p.m.capacity[slot] {
			p.tb.Fatalf("Capacity(%d) = %d, want %d", slot, got, p.m.capacity[slot])
		}
	}
	s := p.x.Stats()
	if s.Pairs != pairs || s.Replicas != replicas || s.Blocks < len(distinct) {
		p.tb.Fatalf("Stats = %+v, want %d replicas, %d pairs, at least %d blocks", s, replicas, pairs, len(distinct))
	}
	p.x.sweep(1 << 30)
	if s := p.x.Stats(); s.Blocks != len(distinct) {
		p.tb.Fatalf("after the sweep %d blocks are known, want %d", s.Blocks, len(distinct))
	}
}

// TestAgainstReference runs random operations through index and reference.
func TestAgainstReference(t *testing.T) {
	worlds := []struct {
		name              string
		replicas          int
		symbols, length   int
		capacity          int
		churn             int // per mille of Join, Leave, Clear and SetCapacity each
		steps, seeds, big int
	}{
		{name: "tiny", replicas: 3, symbols: 2, length: 6, capacity: 12, churn: 30, steps: 400, seeds: 60},
		{name: "shared heads", replicas: 6, symbols: 3, length: 30, capacity: 120, churn: 15, steps: 300, seeds: 25},
		{name: "no eviction", replicas: 4, symbols: 4, length: 12, capacity: 5000, churn: 10, steps: 300, seeds: 10},
		{name: "many replicas", replicas: 150, symbols: 2, length: 10, capacity: 60, churn: 100, steps: 600, seeds: 8},
		{name: "long chains", replicas: 3, symbols: 2, length: 1500, capacity: 2500, churn: 60, steps: 40, seeds: 6},
	}
	for _, w := range worlds {
		t.Run(w.name, func(t *testing.T) {
			for seed := range w.seeds {
				rng := rand.New(rand.NewPCG(uint64(seed), 7))
				p := newPair(t)
				for range w.replicas {
					p.join(1 + rng.IntN(w.capacity))
				}
				slot := func() Slot { return Slot(rng.IntN(w.replicas + 1)) }
				chain := func() []uint64 {
					symbols := make([]byte, rng.IntN(w.length+1))
					for i := range symbols {
						// Mostly the first symbol, so that heads are shared.
						if rng.IntN(4) == 0 {
							symbols[i] = byte(rng.IntN(w.symbols))
						}
					}
					return chained(symbols)
				}
				for range w.steps {
					switch d := rng.IntN(1000); {
					case d < w.churn:
						p.leave(slot())
					case d < 2*w.churn:
						if len(p.m.held) <= 2*w.replicas {
							p.join(1 + rng.IntN(w.capacity))
						}
					case d < 3*w.churn:
						p.clear(slot())
					case d < 4*w.churn:
						p.setCapacity(slot(), rng.IntN(w.capacity))
					case d < 4*w.churn+100:
						c := chain()
						p.remove(slot(), c, rng.IntN(len(c)+1))
					default:
						p.insert(slot(), chain())
					}
					p.compare(chain())
				}
				p.compareSizes()
				checkInvariants(t, p.x)
			}
		})
	}
}

// checkInvariants looks at every structure of an index at rest: what the caches hold is
// what the shared table says, and parents stand before children.
func checkInvariants(tb testing.TB, x *Index) {
	tb.Helper()
	x.sweep(1 << 30)
	v := x.view.Load()
	pairs := 0
	for slot, r := range v.slots {
		if r == nil {
			continue
		}
		if v.lanes[r.lane] != Slot(slot) {
			tb.Fatalf("lane %d belongs to slot %d, want %d", r.lane, v.lanes[r.lane], slot)
		}
		if err := checkCache(&r.cache); err != nil {
			tb.Fatalf("slot %d: %v", slot, err)
		}
		for n := r.cache.at(0).next; n != 0; n = r.cache.at(n).next {
			nd := r.cache.at(n)
			for slot := nd.first; slot < nd.end; slot++ {
				if !v.holders.has(nd.hashes[:slot+1], r.lane) {
					tb.Fatalf("slot %d holds block %x, but the table does not say so", v.lanes[r.lane], nd.hashes[slot])
				}
			}
		}
		pairs += r.cache.len
	}
	published := 0
	for i := range v.holders.stripes {
		for j := range v.holders.stripes[i].segments {
			n, err := checkSegment(&v.holders.stripes[i].segments[j])
			if err != nil {
				tb.Fatalf("segment %d/%d: %v", i, j, err)
			}
			published += n
		}
	}
	if published != pairs {
		tb.Fatalf("the table has %d pairs, the caches %d", published, pairs)
	}
}

func checkSegment(seg *segment) (pairs int, err error) {
	lines, blocks, words := 0, 0, 0
	for i := range seg.numbers.buckets {
		bk := &seg.numbers.buckets[i]
		for _, e := range bk.entries[:bk.length()] {
			n := e & numberMask
			ln := seg.line(n)
			if seg.find(ln.hashes[:ln.first+1]) != n || ln.lanes[ln.first] == 0 {
				return 0, fmt.Errorf("line %d is vacant or not found", n)
			}
			lines++
			for slot := int(ln.first); slot < groupBlocks && ln.lanes[slot] != 0; slot++ {
				set := ln.lanes[slot]
				blocks++
				pairs += seg.lanes.count(set)
				if set.wide() {
					words += 1 << set.class()
				}
				if got := seg.get(ln.hashes[:slot+1]); got != set {
					return 0, fmt.Errorf("hash %x has holders %x, found %x", ln.hashes[slot], set, got)
				}
				if slot > int(ln.first) && seg.lanes.count(set) > seg.lanes.count(ln.lanes[slot-1]) {
					return 0, fmt.Errorf("hash %x has more holders than the block before", ln.hashes[slot])
				}
			}
		}
	}
	if lines != int(seg.live) || blocks != int(seg.blocks) || words != int(seg.lanes.live) {
		return 0, fmt.Errorf("%d lines, %d blocks and %d words, counted as %d, %d and %d", lines, blocks, words, seg.live, seg.blocks, seg.lanes.live)
	}
	for n := seg.free; n != 0; n = uint32(seg.line(n).hashes[0]) {
		lines++
	}
	if lines != len(seg.lines) {
		return 0, fmt.Errorf("%d lines in use or free, want %d", lines, len(seg.lines))
	}
	return pairs, checkNumbers(&seg.numbers, segmentLog, seg.key)
}

func checkNumbers(t *numberTable, log uint, key func(uint32) uint64) error {
	used, passed := 0, 0
	for i := range t.buckets {
		bk := &t.buckets[i]
		passed += int(bk.header >> 8)
		for _, e := range bk.entries[:bk.length()] {
			used++
			for at := t.home(key(e&numberMask), log); at != i; at = t.next(at) {
				passed--
			}
		}
	}
	if used != t.used || passed != 0 {
		return fmt.Errorf("%d numbers, counted as %d; buckets count %d too many passed", used, t.used, passed)
	}
	return nil
}

func checkCache(c *cache) error {
	seen := map[uint32]uint32{0: 0} // node: children found
	prev, nodes, blocks := uint32(0), 0, 0
	for n := c.at(0).next; n != 0; prev, n = n, c.at(n).next {
		nd := c.at(n)
		if nd.prev != prev {
			return fmt.Errorf("node %d links back to %d, want %d", n, nd.prev, prev)
		}
		if _, ok := seen[nd.parent]; !ok {
			return fmt.Errorf("node %d stands before its parent %d", n, nd.parent)
		}
		if nd.first >= nd.end || nd.end > groupBlocks {
			return fmt.Errorf("node %d has blocks %d to %d of its group", n, nd.first, nd.end)
		}
		if parent := c.at(nd.parent); nd.first > 0 && (parent.end != nd.first || !slices.Equal(parent.hashes[:nd.first], nd.hashes[:nd.first])) {
			return fmt.Errorf("node %d does not continue its parent %d", n, nd.parent)
		}
		seen[nd.parent]++
		seen[n] = 0
		if found := c.find(nd.hashes[:nd.first+1]); found != n {
			return fmt.Errorf("hash %x is found at node %d, want %d", nd.key(), found, n)
		}
		nodes++
		blocks += nd.blocks()
	}
	if c.at(0).prev != prev {
		return fmt.Errorf("the list ends at %d, want %d", c.at(0).prev, prev)
	}
	for n, children := range seen {
		if c.at(n).children != children {
			return fmt.Errorf("node %d has %d children, counted as %d", n, children, c.at(n).children)
		}
	}
	used, buckets := 0, 0
	for i := range c.numbers {
		used += c.numbers[i].used
		buckets += cap(c.numbers[i].buckets)
		if err := checkNumbers(&c.numbers[i], c.numberLog, func(n uint32) uint64 { return c.at(n).key() }); err != nil {
			return err
		}
	}
	if nodes != c.nodes || blocks != c.len || used != c.nodes || buckets != c.buckets || blocks > c.capacity {
		return fmt.Errorf("%d nodes, %d blocks, %d numbers, %d buckets; counted as %d, %d, %d, %d; capacity %d",
			nodes, blocks, used, buckets, c.nodes, c.len, c.nodes, c.buckets, c.capacity)
	}
	return nil
}
