// SPDX-License-Identifier: Apache-2.0

package residency

import (
	"cmp"
	"slices"
)

// Shared is a leading part that several prompts have in common.
type Shared struct {
	// Hash is that of its last block, which stands for all before it too.
	Hash uint64
	// Blocks is its length.
	Blocks int
	// Prompts is how many different prompts were seen to go on from it.
	Prompts int
	// Holders are the replicas, of all in the index, that hold the whole of it.
	Holders []Slot
}

// saved is how many blocks need not be held, and computed, because the prompts
// have them in common.
func (s *Shared) saved() int { return s.Blocks * (s.Prompts - 1) }

// Heaviest lists up to limit leading parts that prompts at the given replicas
// have in common, those first that save the most. A part is listed where prompts
// part ways: not where nearly all of them go on together.
//
// It looks at no more than look blocks in all, the most recently used of each
// replica, and holds a replica's lock for a chunk of them at a time, some tens of
// microseconds. What is inserted meanwhile may be missed.
func (x *Index) Heaviest(slots []Slot, look, limit int) []Shared {
	v := x.view.Load()
	w := &wood{places: make(map[uint64]int32)}
	for _, slot := range slots {
		if r := v.replica(slot); r != nil {
			w.survey(r, max(chunk, look/len(slots)))
		}
	}
	out := w.forks()
	slices.SortFunc(out, func(a, b Shared) int {
		return cmp.Or(b.saved()-a.saved(), cmp.Compare(a.Hash, b.Hash))
	})
	out = out[:min(len(out), limit)]
	for i := range out {
		out[i].Holders = v.holding(w.path(out[i].Hash))
	}
	return out
}

// holding lists who holds the last block of the path.
func (v *view) holding(path []uint64) []Slot {
	var out []Slot
	for _, lane := range v.holders.appendLanes(nil, path) {
		if slot := v.slotOf(lane); slot != NoSlot {
			out = append(out, slot)
		}
	}
	slices.Sort(out)
	return out
}

// wood is the trees that the blocks of several replicas form. A block stands
// behind the one before it in its prompt.
type wood struct {
	places map[uint64]int32 // by hash
	blocks []tree
}

// tree is a block with all that continue it.
type tree struct {
	hash    uint64
	parent  int32 // place of the block before it, -1 for a first block
	depth   int32 // blocks up to and including this one
	prompts int32 // that end in or behind it
	most    int32 // of them, those behind one and the same next block
}

// link is a node's blocks, and the block before them, 0 for none.
type link struct {
	group
	parent uint64
}

// survey adds a replica's blocks, the most recently used first. There, blocks
// stand behind those that they continue, so that their depth is known. One whose
// parent was moved to the front meanwhile is left out.
func (w *wood) survey(r *replica, look int) {
	var links [chunkGroups]link
	var last []uint64
	for look > 0 {
		n := r.glance(last, links[:])
		for i := range links[:n] {
			l := &links[i]
			look -= int(l.end - l.first)
			w.add(l)
		}
		if n < len(links) {
			return
		}
		last = slices.Clone(links[n-1].hashes[:links[n-1].end])
	}
}

// add adds the blocks of a node.
func (w *wood) add(l *link) {
	before := l.parent
	for _, hash := range l.hashes[l.first:l.end] {
		if !w.place(hash, before) {
			return
		}
		before = hash
	}
}

// place adds a block behind the one before it. It is false if that is not known.
func (w *wood) place(hash, before uint64) bool {
	if _, known := w.places[hash]; known {
		return true
	}
	t := tree{hash: hash, parent: -1, depth: 1}
	if before != 0 {
		at, known := w.places[before]
		if !known {
			return false
		}
		t.parent, t.depth = at, w.blocks[at].depth+1
	}
	w.places[hash] = int32(len(w.blocks))
	w.blocks = append(w.blocks, t)
	return true
}

// path is that of a known block in its group.
func (w *wood) path(hash uint64) []uint64 {
	at := w.places[hash]
	path := make([]uint64, (w.blocks[at].depth-1)%groupBlocks+1)
	for i := len(path) - 1; i >= 0; i-- {
		path[i] = w.blocks[at].hash
		at = w.blocks[at].parent
	}
	return path
}

// forks lists the blocks behind which prompts part ways: of those that go on
// from it, no more than nine in ten do so by the same block.
func (w *wood) forks() []Shared {
	var out []Shared
	for i := len(w.blocks) - 1; i >= 0; i-- { // what continues a block comes after it
		t := &w.blocks[i]
		t.prompts = max(t.prompts, 1)
		if t.prompts > 1 && t.most*10 <= t.prompts*9 {
			out = append(out, Shared{Hash: t.hash, Blocks: int(t.depth), Prompts: int(t.prompts)})
		}
		if t.parent >= 0 {
			before := &w.blocks[t.parent]
			before.prompts += t.prompts
			before.most = max(before.most, t.prompts)
		}
	}
	return out
}

// glance copies the nodes that were used just before the last block of the path,
// or the last ones used if that is empty. It returns how many there were.
func (r *replica) glance(path []uint64, into []link) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.dead.Load() {
		return 0
	}
	return r.cache.copyLinks(path, into)
}

func (c *cache) copyLinks(path []uint64, into []link) int {
	n := uint32(0)
	if len(path) > 0 {
		if n = c.locate(path); n == 0 {
			return 0 // it was evicted, and so were those behind it
		}
	}
	for i := range into {
		if n = c.at(n).next; n == 0 {
			return i
		}
		nd := c.at(n)
		into[i] = link{group: nd.part(int(nd.first))}
		if nd.parent != 0 {
			before := c.at(nd.parent)
			into[i].parent = before.hashes[before.end-1]
		}
	}
	return len(into)
}
