// SPDX-License-Identifier: Apache-2.0

package kvevents

import (
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
)

// checkView checks what must always hold in a view.
func checkView(t testing.TB, v *View) {
	t.Helper()
	v.mu.RLock()
	defer v.mu.RUnlock()
	kids, deviceKids := map[uint32]uint32{}, map[uint32]uint32{}
	inView, listed := 0, 0
	holes, lower := 0, 0
	for h, at := range v.byHash {
		inView++
		b := &v.blocks[at]
		if b.hash != h {
			t.Fatalf("hash %x is at a block of hash %x", uint64(h), uint64(b.hash))
		}
		if b.parent != 0 {
			p := &v.blocks[b.parent]
			if v.byHash[p.hash] != b.parent {
				t.Fatalf("the parent of %x has left the view", uint64(h))
			}
			if b.rooted && !p.rooted {
				t.Fatalf("%x is rooted on an orphan", uint64(h))
			}
			kids[b.parent]++
			if b.device() {
				deviceKids[b.parent]++
			}
		}
		if want := v.place(at); b.list != want {
			t.Fatalf("block %x is on list %d, want %d", uint64(h), b.list, want)
		}
		if !b.held() && !b.rooted && b.kids == 0 {
			t.Fatalf("orphan %x has left but is kept", uint64(h))
		}
		found := false
		for i := v.byKey[b.key]; i != 0; i = v.blocks[i].twin {
			found = found || i == at
		}
		if found != b.rooted {
			t.Fatalf("block %x: findable %t, rooted %t", uint64(h), found, b.rooted)
		}
	}
	for _, at := range v.byHash {
		b := &v.blocks[at]
		if b.kids != kids[at] || b.deviceKids != deviceKids[at] {
			t.Fatalf("block %x counts %d kids, %d on the device; want %d, %d", uint64(b.hash), b.kids, b.deviceKids, kids[at], deviceKids[at])
		}
		holes += b.deviceHole()
		lower += b.lower()
	}
	for name, l := range v.lists {
		n, prev := 0, uint32(0)
		for at := l.oldest; at != 0; at = v.blocks[at].next {
			if v.blocks[at].prev != prev || v.blocks[at].list != listName(name) {
				t.Fatalf("list %d is broken at %d", name, at)
			}
			prev = at
			n++
		}
		if n != l.len || l.newest != prev {
			t.Fatalf("list %d has %d blocks, counts %d", name, n, l.len)
		}
		listed += n
	}
	if inView != v.len() || listed > inView {
		t.Fatalf("%d hashes, %d blocks, %d listed", inView, v.len(), listed)
	}
	if holes != v.deviceHoles || lower != v.lower {
		t.Fatalf("counted %d holes, %d lower; want %d, %d", v.deviceHoles, v.lower, holes, lower)
	}
}

func TestViewGolden(t *testing.T) {
	g := golden(t)
	d := NewDecoder(Limits{})
	for _, s := range g.Samples {
		t.Run(s.Generation, func(t *testing.T) {
			b, err := d.Decode(fromHex(t, s.PayloadHex))
			if err != nil {
				t.Fatal(err)
			}
			v := NewView(ViewConfig{})
			v.Apply(&Batch{Events: b.Events[:1]})
			lora, extra := b.Events[0].LoRA, b.Events[0].Extra
			want := Match{Blocks: 1, Tokens: 16, ByTier: [Tiers]int{16}}
			if m := v.Longest(g.Tokens, lora, extra); m != want {
				t.Errorf("after the first event %+v, want %+v", m, want)
			}
			if m := v.Longest(g.Tokens, "other", extra); m != (Match{}) {
				t.Errorf("another adapter matches %+v", m)
			}
			if len(extra) > 0 {
				if m := v.Longest(g.Tokens, lora, nil); m != (Match{}) {
					t.Errorf("a prompt without the salt matches %+v", m)
				}
			}
			v.Apply(b) // ends with AllBlocksCleared
			if m := v.Longest(g.Tokens, lora, extra); m != (Match{}) {
				t.Errorf("after clearing %+v matches", m)
			}
			checkView(t, v)
		})
	}
}

// TestViewLive applies what a running vLLM sent and checks what it must then hold.
func TestViewLive(t *testing.T) {
	var live struct {
		Live []struct {
			What   string
			Frames []string
		}
	}
	readJSON(t, "live_0.32.json", &live)
	d, v := NewDecoder(Limits{}), NewView(ViewConfig{})
	var first []uint32
	for i, m := range live.Live {
		b, err := d.Decode(fromHex(t, m.Frames[2]))
		if err != nil {
			t.Fatal(err)
		}
		v.Apply(b)
		checkView(t, v)
		ev := b.Events[len(b.Events)-1]
		switch {
		case i == 0:
			first = slices.Clone(ev.Tokens)
		case i == 1: // chained on the first
			whole := slices.Concat(first, ev.Tokens)
			if m := v.Longest(whole, "", nil); m.Tokens != len(whole) {
				t.Errorf("%+v of a prompt of %d tokens in two messages", m, len(whole))
			}
		case m.What == "cache_salt":
			if m := v.Longest(ev.Tokens, "", []Extra{SaltExtra("tenant-a")}); m.Tokens != len(ev.Tokens) {
				t.Errorf("%+v of %d salted tokens", m, len(ev.Tokens))
			}
			if m := v.Longest(ev.Tokens, "", nil); m.Tokens != 0 {
				t.Errorf("%+v without the salt", m)
			}
		case b.Events[0].Kind == AllBlocksCleared:
			if m := v.Longest(first, "", nil); m.Tokens != 0 {
				t.Errorf("%+v after the cache was reset", m)
			}
			if m := v.Longest(ev.Tokens, "", nil); m.Tokens != len(ev.Tokens) {
				t.Errorf("%+v of %d tokens stored after the reset", m, len(ev.Tokens))
			}
		}
	}
}

// liveBatches decodes what a running vLLM sent, each message on its own.
func liveBatches(t *testing.T, name string) (batches []*Batch) {
	t.Helper()
	var live struct{ Live []struct{ Frames []string } }
	readJSON(t, name, &live)
	for i, m := range live.Live {
		b, err := NewDecoder(Limits{}).Decode(fromHex(t, m.Frames[2]))
		if err != nil || b.Skipped != (Skipped{}) {
			t.Fatalf("message %d: %+v, error %v", i, b, err)
		}
		batches = append(batches, b)
	}
	return batches
}

// TestAdaptersLive: the same tokens for a base model and for its adapter are different blocks, and go one without the
// other.
func TestAdaptersLive(t *testing.T) {
	batches := liveBatches(t, "live_0.32_lora.json")
	base, adapter := batches[0].Events[0], batches[1].Events[0]
	tokens, salt := base.Tokens, []Extra{SaltExtra("tenant-a")}
	if base.LoRA != "" || adapter.LoRA != "sql" || !slices.Equal(adapter.Tokens, tokens) || adapter.Extra != nil {
		t.Fatalf("the base model's event %+v, the adapter's %+v", base, adapter)
	}
	v := NewView(ViewConfig{})
	holds := func(when string, base, adapter, salted int) {
		t.Helper()
		checkView(t, v)
		for _, c := range []struct {
			of, lora string
			extra    []Extra
			want     int
		}{
			{"the base model's", "", nil, base},
			{"the adapter's", "sql", nil, adapter},
			{"the adapter's salted", "sql", salt, salted},
			{"another adapter's", "chat", nil, 0},
			{"the base model's salted", "", salt, 0},
		} {
			if m := v.Longest(tokens, c.lora, c.extra); m.Tokens != c.want {
				t.Errorf("%s: %d of %s tokens are held, want %d", when, m.Tokens, c.of, c.want)
			}
		}
	}
	for i, when := range []string{"base model", "adapter as well", "adapter with a salt as well"} {
		v.Apply(batches[i])
		holds(when, 96, 96*min(i, 1), 96*(i/2))
	}
	v.Apply(&Batch{Events: []Event{{Kind: BlockRemoved, Hashes: base.Hashes, Group: NoGroup}}})
	holds("the base model's evicted", 0, 96, 96)
}

// TestImageLive: blocks with an image in them are those of that image alone, and text behind it hangs on it.
func TestImageLive(t *testing.T) {
	batch := liveBatches(t, "live_0.32_image.json")[0]
	ev, v := batch.Events[0], NewView(ViewConfig{})
	if len(ev.Extra) != 4 || ev.Extra[0] == 0 || ev.Extra[1] == 0 || ev.Extra[0] == ev.Extra[1] || ev.Extra[2] != 0 {
		t.Fatalf("two blocks of an image and two of text have the extra keys %x", ev.Extra)
	}
	v.Apply(batch)
	if m := v.Longest(ev.Tokens, "", ev.Extra); m.Tokens != len(ev.Tokens) {
		t.Errorf("%d tokens of %d are held", m.Tokens, len(ev.Tokens))
	}
	other := slices.Clone(ev.Extra)
	other[0]++
	for _, extra := range [][]Extra{nil, other} {
		if m := v.Longest(ev.Tokens, "", extra); m.Tokens != 0 {
			t.Errorf("%d tokens are held of another image", m.Tokens)
		}
	}
}

// TestReplayLive splits the messages of a replay by a running vLLM.
func TestReplayLive(t *testing.T) {
	var live struct {
		Replay [][]string `json:"replay_from_last_minus_1"`
	}
	readJSON(t, "live_0.32.json", &live)
	if len(live.Replay) < 2 {
		t.Fatalf("%d messages", len(live.Replay))
	}
	var next uint64
	for i, message := range live.Replay {
		var frames [][]byte
		for _, f := range message {
			frames = append(frames, fromHex(t, f))
		}
		if end := i == len(live.Replay)-1; isEnd(frames) != end {
			t.Fatalf("message %d: end %t, want %t", i, !end, end)
		} else if end {
			break
		}
		seq, payload, ok := numbered(frames)
		if !ok || (i > 0 && seq != next) {
			t.Errorf("message %d: number %d, %t", i, seq, ok)
		}
		next = seq + 1
		if _, err := NewDecoder(Limits{}).Decode(payload); err != nil {
			t.Error(err)
		}
	}
}

// TestViewAgreesAcrossHashes checks that replicas whose engine hashes differ give one prompt one key.
func TestViewAgreesAcrossHashes(t *testing.T) {
	tokens := []uint32{1, 2, 3, 4, 5, 6, 7, 8, 9}
	keys := AppendKeys(nil, tokens, 4, "", nil)
	for seed := range BlockHash(3) {
		v := NewView(ViewConfig{})
		v.Apply(&Batch{Events: []Event{
			{Kind: BlockStored, Hashes: []BlockHash{100 + seed}, Tokens: tokens[:4], BlockSize: 4, Group: NoGroup},
			{Kind: BlockStored, Hashes: []BlockHash{200 * (seed + 1)}, Parent: 100 + seed, HasParent: true, Tokens: tokens[4:8], BlockSize: 4, Group: NoGroup},
		}})
		if m := v.LongestKeys(keys, 4); m.Blocks != 2 || m.Tokens != 8 {
			t.Errorf("seed %d: %+v, want two blocks", seed, m)
		}
	}
}

func stored(parent, hash BlockHash, tokens ...uint32) Event {
	return Event{Kind: BlockStored, Hashes: []BlockHash{hash}, Parent: parent, HasParent: parent != 0, Tokens: tokens, BlockSize: len(tokens), Group: NoGroup}
}

func removed(hashes ...BlockHash) Event {
	return Event{Kind: BlockRemoved, Hashes: hashes, Group: NoGroup}
}

func (ev Event) in(t Tier) Event                    { ev.Tier = t; return ev }
func (ev Event) of(group int, kind Attention) Event { ev.Group, ev.Attention = group, kind; return ev }
func hashOnly(tier Tier, hashes ...BlockHash) Event {
	return Event{Kind: BlockStored, Hashes: hashes, Group: NoGroup, Tier: tier}
}

func TestViewEvents(t *testing.T) {
	prompt := []uint32{1, 2, 3, 4, 5, 6}
	a, b, c := stored(0, 10, 1, 2), stored(10, 20, 3, 4), stored(20, 30, 5, 6)
	for _, tc := range []struct {
		name   string
		events []Event
		want   Match
	}{
		{"nothing", nil, Match{}},
		{"a chain", []Event{a, b, c}, Match{3, 6, [Tiers]int{6}}},
		{"the head left", []Event{a, b, c, removed(10)}, Match{}},
		{"the middle left", []Event{a, b, c, removed(20)}, Match{1, 2, [Tiers]int{2}}},
		{"the middle came back", []Event{a, b, c, removed(20), b}, Match{3, 6, [Tiers]int{6}}},
		{"the tail left", []Event{a, b, c, removed(30)}, Match{2, 4, [Tiers]int{4}}},
		{"two copies, one left", []Event{a, a, removed(10)}, Match{1, 2, [Tiers]int{2}}},
		{"two copies, both left", []Event{a, a, removed(10), removed(10)}, Match{}},
		{"parent unknown", []Event{b, c}, Match{}},
		{"parent comes later", []Event{b, c, a}, Match{1, 2, [Tiers]int{2}}},
		{"all announced again", []Event{b, c, a, b, c}, Match{3, 6, [Tiers]int{6}}},
		{"parent left, child came", []Event{a, removed(10), b, a}, Match{2, 4, [Tiers]int{4}}},
		{"offloaded by hash", []Event{a, b, hashOnly(Host, 10, 20), removed(20)}, Match{2, 4, [Tiers]int{2, 2}}},
		{"offloaded after it left", []Event{a, b, removed(20), hashOnly(Disk, 20)}, Match{2, 4, [Tiers]int{Device: 2, Disk: 2}}},
		{"offloaded, tokens later", []Event{hashOnly(Host, 10), a, removed(10)}, Match{1, 2, [Tiers]int{Host: 2}}},
		{"offloaded, never told", []Event{hashOnly(Host, 10, 20)}, Match{}},
		{"other tier removed", []Event{a, removed(10).in(Host)}, Match{1, 2, [Tiers]int{2}}},
		{"cleared", []Event{a, {Kind: AllBlocksCleared}}, Match{}},
		{"sliding window", []Event{a.of(0, OtherAttention)}, Match{}},
		{"full attention second", []Event{a.of(0, OtherAttention), a.of(1, FullAttention)}, Match{1, 2, [Tiers]int{2}}},
		{"removed from another group", []Event{a.of(1, FullAttention), removed(10).of(0, UnknownAttention)}, Match{1, 2, [Tiers]int{2}}},
		{"removed from the group", []Event{a.of(1, FullAttention), removed(10).of(1, UnknownAttention)}, Match{}},
		{"unnamed kind, group 0", []Event{a.of(0, UnknownAttention)}, Match{1, 2, [Tiers]int{2}}},
		{"unnamed kind, group 1", []Event{a.of(1, UnknownAttention)}, Match{}},
		{"a hash of two prefixes", []Event{a, b, stored(0, 10, 9, 9)}, Match{2, 4, [Tiers]int{4}}},
		{"own parent", []Event{stored(10, 10, 1, 2), a, stored(10, 10, 1, 2)}, Match{1, 2, [Tiers]int{2}}},
		{"larger chunks behind", []Event{a, {Kind: BlockStored, Hashes: []BlockHash{77}, Tokens: prompt, BlockSize: 6, Group: NoGroup, Tier: Host}},
			Match{1, 6, [Tiers]int{Device: 2, Host: 4}}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			v := NewView(ViewConfig{})
			v.Apply(&Batch{Events: tc.events})
			checkView(t, v)
			if m := v.Longest(prompt, "", nil); m != tc.want {
				t.Errorf("%+v, want %+v", m, tc.want)
			}
		})
	}
}

func TestViewUnaligned(t *testing.T) {
	v := NewView(ViewConfig{})
	short := stored(0, 10, 1, 2)
	short.BlockSize = 4
	v.Apply(&Batch{Events: []Event{short}})
	if st := v.Stats(); st.Unaligned != 1 || st.Held != 0 || st.Orphans != 1 {
		t.Errorf("stats %+v, want one unaligned orphan", st)
	}
}

// model is the plain reference: what a view must answer when nothing is dropped.
type model struct {
	prefix map[BlockHash]string         // of hashes whose chain was seen from the head
	refs   map[BlockHash]*[Tiers]uint16 // of every hash
}

func newModel() *model {
	return &model{map[BlockHash]string{}, map[BlockHash]*[Tiers]uint16{}}
}

func (m *model) apply(ev Event) {
	switch ev.Kind {
	case AllBlocksCleared:
		*m = *newModel()
	case BlockRemoved:
		for _, h := range ev.Hashes {
			if r := m.refs[h]; r != nil && r[ev.Tier] > 0 {
				r[ev.Tier]--
			}
		}
	case BlockStored:
		at, known := "", true
		if ev.HasParent {
			at, known = m.prefix[ev.Parent]
		}
		for i, h := range ev.Hashes {
			if p, ok := m.prefix[h]; ok {
				at, known = p, true
			} else if known {
				at += fmt.Sprint(ev.Tokens[i*ev.BlockSize : (i+1)*ev.BlockSize])
				m.prefix[h] = at
			}
			if m.refs[h] == nil {
				m.refs[h] = new([Tiers]uint16)
			}
			m.refs[h][ev.Tier]++
		}
	}
}

func (m *model) longest(tokens []uint32, size int) (match Match) {
	at := ""
	for i := 0; (i+1)*size <= len(tokens); i++ {
		at += fmt.Sprint(tokens[i*size : (i+1)*size])
		best := Tiers
		for h, p := range m.prefix {
			if p != at || m.refs[h] == nil {
				continue
			}
			for t := range best {
				if m.refs[h][t] > 0 {
					best = min(best, t)
				}
			}
		}
		if best == Tiers {
			break
		}
		match.Blocks++
		match.Tokens += size
		match.ByTier[best] += size
	}
	return match
}

// randomEngine announces blocks of prompts over two tokens, so that prefixes are shared; its hash of a prefix is a function of it, with
// a second variant for what the engine tells apart and the view cannot.
type randomEngine struct{ r *rand.Rand }

const modelSize = 2

func (e randomEngine) prompt() []uint32 {
	p := make([]uint32, modelSize*(1+e.r.IntN(6)))
	for i := range p {
		p[i] = uint32(e.r.IntN(2))
	}
	return p
}

func hashOf(prefix []uint32, variant int) BlockHash {
	h := fnv.New64a()
	fmt.Fprint(h, prefix, variant)
	return BlockHash(h.Sum64())
}

func (e randomEngine) event() Event {
	p, variant, tier := e.prompt(), e.r.IntN(8)/7, Tier(e.r.IntN(16)/13)
	blocks := len(p) / modelSize
	from := e.r.IntN(blocks)
	var hashes []BlockHash
	for i := from; i < blocks; i++ {
		hashes = append(hashes, hashOf(p[:(i+1)*modelSize], variant))
	}
	switch n := e.r.IntN(200); {
	case n == 0:
		return Event{Kind: AllBlocksCleared}
	case n < 110:
		return removed(hashes[:1]...).in(tier)
	}
	ev := Event{Kind: BlockStored, Hashes: hashes, Tokens: p[from*modelSize:], BlockSize: modelSize, Group: NoGroup, Tier: tier}
	if from > 0 {
		ev.HasParent, ev.Parent = true, hashOf(p[:from*modelSize], variant)
	}
	return ev
}

func TestViewAgainstModel(t *testing.T) {
	for seed := range uint64(30) {
		e := randomEngine{rand.New(rand.NewPCG(seed, 1))}
		v, m := NewView(ViewConfig{}), newModel()
		for step := range 400 {
			ev := e.event()
			v.Apply(&Batch{Events: []Event{ev}})
			m.apply(ev)
			if step%20 == 0 {
				checkView(t, v)
			}
			p := e.prompt()
			want := m.longest(p, modelSize)
			if got := v.Longest(p, "", nil); got != want {
				t.Fatalf("seed %d step %d: prompt %v matches %+v, want %+v", seed, step, p, got, want)
			}
			if got := v.LongestKeys(AppendKeys(nil, p, modelSize, "", nil), modelSize); got != want {
				t.Fatalf("seed %d step %d: keys of %v match %+v, want %+v", seed, step, p, got, want)
			}
		}
	}
}

// TestViewBound checks that a view never outgrows its bound, that it drops tails before heads, and that it matches no more than the model.
func TestViewBound(t *testing.T) {
	for seed := range uint64(20) {
		e := randomEngine{rand.New(rand.NewPCG(seed, 2))}
		v, m := NewView(ViewConfig{Blocks: 24, Slack: 1}), newModel()
		for step := range 500 {
			ev := e.event()
			v.Apply(&Batch{Events: []Event{ev}})
			m.apply(ev)
			checkView(t, v)
			if v.len() > 24 {
				t.Fatalf("seed %d step %d: %d blocks, want at most 24", seed, step, v.len())
			}
			p := e.prompt()
			if got, most := v.Longest(p, "", nil), m.longest(p, modelSize); got.Blocks > most.Blocks {
				t.Fatalf("seed %d step %d: prompt %v matches %+v, the engine holds %+v", seed, step, p, got, most)
			}
		}
		if v.Stats().Dropped == 0 {
			t.Errorf("seed %d: nothing was dropped", seed)
		}
	}
}

func TestViewDropsOrphansFirst(t *testing.T) {
	v := NewView(ViewConfig{Blocks: 32, Slack: 1})
	var prompt []uint32
	parent := BlockHash(0)
	for i := range uint32(16) {
		v.Apply(&Batch{Events: []Event{stored(parent, BlockHash(1000+i), i)}})
		prompt, parent = append(prompt, i), BlockHash(1000+i)
	}
	for i := range BlockHash(500) {
		v.Apply(&Batch{Events: []Event{stored(1e6+i, 2e6+i, 1)}})
	}
	if m := v.Longest(prompt, "", nil); m.Blocks != 16 {
		t.Errorf("%d of 16 matchable blocks survive a storm of orphans", m.Blocks)
	}
	if st := v.Stats(); st.OrphanEvents != 500 || st.Held+st.Orphans+st.Remembered > 32 {
		t.Errorf("stats %+v", st)
	}
}

func TestGallop(t *testing.T) {
	keys := make([]Key, 40)
	for i := range keys {
		keys[i] = Key(i)
	}
	for n := range len(keys) + 1 {
		for held := range n + 1 {
			if got := gallop(keys[:n], func(k Key) bool { return int(k) < held }); got != held {
				t.Fatalf("of %d keys %d found, want %d", n, got, held)
			}
		}
	}
}

func TestIndex(t *testing.T) {
	x := NewIndex(ViewConfig{Blocks: 100})
	var writers sync.WaitGroup
	for rank := range 4 {
		writers.Go(func() {
			for i := range BlockHash(50) {
				x.Apply(&Batch{Rank: rank, Events: []Event{stored(0, 1+i, uint32(i), uint32(rank))}})
				x.Longest([]uint32{uint32(i), 2}, "", nil)
			}
		})
	}
	writers.Wait()
	if got := x.Ranks(); !slices.Equal(got, []int{0, 1, 2, 3}) {
		t.Fatalf("ranks %v", got)
	}
	if m, rank := x.Longest([]uint32{7, 2}, "", nil); rank != 2 || m.Blocks != 1 {
		t.Errorf("match %+v on rank %d, want one block on rank 2", m, rank)
	}
	x.Clear(2)
	if m, rank := x.Longest([]uint32{7, 2}, "", nil); rank != -1 || m != (Match{}) {
		t.Errorf("after clearing, match %+v on rank %d", m, rank)
	}
	x.ClearAll()
	if m, rank := x.LongestKeys(AppendKeys(nil, []uint32{7, 1}, 2, "", nil), 2); rank != -1 {
		t.Errorf("after clearing all, match %+v on rank %d", m, rank)
	}
}
