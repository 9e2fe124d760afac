// SPDX-License-Identifier: Apache-2.0

package kvevents

import (
	"slices"
	"sync"
)

// ViewConfig bounds a [View]. A zero field means its default.
type ViewConfig struct {
	// Blocks is how many blocks the rank can hold in all tiers together (default 200,000).
	Blocks int
	// Slack is the factor over Blocks at which blocks are dropped (default 1.25). It leaves room for blocks remembered after they
	// left, which hash-only events of offloading tiers refer to.
	Slack float64
}

func (c ViewConfig) bound() int {
	slack := c.Slack
	if !(slack >= 1) {
		slack = 1.25
	}
	return max(16, int(float64(positiveOr(c.Blocks, 200_000))*slack))
}

// View is what one rank of one replica holds: an index from prefix keys to blocks. It is safe for concurrent use. A block takes about
// 110 bytes.
//
// What is exact: a block whose chain was seen from the head of its prompt is matched while the engine holds it in some tier.
// Concurrent identical prompts make an engine announce one hash several times; a block leaves with the last of its removals.
//
// What is missed, always on the side of knowing less: blocks whose parent was never announced to this view (its stream started
// later), blocks of groups other than the first full-attention group, and blocks dropped by the bound.
type View struct {
	mu     sync.RWMutex
	bound  int
	blocks []block // index 0 stays unused, so that 0 means none
	free   []uint32
	byHash map[BlockHash]uint32
	byKey  map[Key]uint32 // rooted blocks only; more of one key hang on block.twin
	lists  [listCount]blockList
	sizes  []sizeCount
	group  int
	chain  chain

	deviceHoles int // rooted blocks not on the device while a block chained on them is
	lower       int // rooted blocks held, but not on the device

	stats ViewStats
}

// ViewStats are a view's counters since it was made, and its size.
type ViewStats struct {
	// Held counts blocks that can be matched, DeviceHeld those of them that lie on the device.
	Held, DeviceHeld int
	// Orphans counts blocks that are held but cannot be matched, because the head of their prompt was never seen.
	Orphans int
	// Remembered counts blocks that have left and are remembered for later events.
	Remembered int
	// BlockSize is the number of tokens in a block, 0 before the first. If there are several sizes it is the commonest.
	BlockSize int
	// OrphanEvents counts stored events whose parent was not known.
	OrphanEvents uint64
	// UnknownRemovals counts removed hashes that were not known to be held in that tier.
	UnknownRemovals uint64
	// Ignored counts blocks of groups that do not decide about hits.
	Ignored uint64
	// Unaligned counts blocks whose event had too few or too many tokens for them.
	Unaligned uint64
	// Dropped counts held blocks dropped by the bound.
	Dropped uint64
	// Clears counts how often everything was dropped.
	Clears uint64
}

// block is one engine hash. Its parent stays in the view as long as it does.
type block struct {
	key        Key
	hash       BlockHash
	parent     uint32
	twin       uint32 // next block of the same key
	prev, next uint32
	size       uint32 // tokens; 0 when they are not known
	kids       uint32 // blocks in the view chained on this one
	deviceKids uint32 // of them, those on the device
	refs       [Tiers]uint16
	list       listName
	rooted     bool // chained from the head of a prompt
}

func (b *block) held() bool   { return b.refs != [Tiers]uint16{} }
func (b *block) device() bool { return b.refs[Device] > 0 }

func (b *block) deviceHole() int { return count(b.rooted && !b.device() && b.deviceKids > 0) }
func (b *block) lower() int      { return count(b.rooted && b.held() && !b.device()) }

func count(is bool) int {
	if is {
		return 1
	}
	return 0
}

type listName uint8

const (
	noList     listName = iota // not held, but blocks in the view are chained on it
	heldList                   // held and rooted
	orphanList                 // held and not rooted
	ghostList                  // rooted, not held, nothing chained on it
	listCount
)

// blockList is a doubly linked list of blocks, oldest first.
type blockList struct {
	oldest, newest uint32
	len            int
}

type sizeCount struct {
	size   uint32
	blocks int
}

// maxSizes is how many block sizes a view matches: an engine has one, an offloading tier may add one, partial tails some more.
const maxSizes = 8

const noGroupYet = -2

// NewView returns an empty view.
func NewView(config ViewConfig) *View {
	v := &View{bound: config.bound()}
	v.reset()
	return v
}

// SetConfig changes the bound, for instance when the engine's capacity becomes known.
func (v *View) SetConfig(config ViewConfig) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.bound = config.bound()
	v.trim()
}

func (v *View) reset() {
	v.blocks, v.free = make([]block, 1, 64), nil
	v.byHash, v.byKey = map[BlockHash]uint32{}, map[Key]uint32{}
	v.lists = [listCount]blockList{}
	v.sizes = v.sizes[:0]
	v.group = noGroupYet
	v.deviceHoles, v.lower = 0, 0
	v.stats.DeviceHeld = 0
}

// Clear drops everything.
func (v *View) Clear() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.reset()
	v.stats.Clears++
}

// Apply takes a batch. Its rank is not looked at. The lock is held for one event at a time.
func (v *View) Apply(b *Batch) {
	for i := range b.Events {
		v.apply(&b.Events[i])
	}
}

func (v *View) apply(ev *Event) {
	v.mu.Lock()
	defer v.mu.Unlock()
	switch ev.Kind {
	case AllBlocksCleared:
		v.reset()
		v.stats.Clears++
	case BlockStored:
		if !v.decides(ev) {
			v.stats.Ignored += uint64(len(ev.Hashes))
			return
		}
		v.stored(ev)
		v.trim()
	case BlockRemoved:
		if ev.Group != NoGroup && ev.Group != v.group && v.group != noGroupYet {
			v.stats.Ignored += uint64(len(ev.Hashes))
			return
		}
		v.removed(ev)
	}
}

// decides says whether a stored event's group decides about hits. Of several full-attention groups the first seen speaks for all;
// an engine caches and evicts them together. Engines that do not name a group's kind have their full attention in group 0.
func (v *View) decides(ev *Event) bool {
	if ev.Attention == OtherAttention || (ev.Attention == UnknownAttention && ev.Group > 0) {
		return false
	}
	if ev.Group == NoGroup {
		return true
	}
	if v.group == noGroupYet {
		v.group = ev.Group
	}
	return ev.Group == v.group
}

func (v *View) stored(ev *Event) {
	if len(ev.Hashes) == 0 {
		return
	}
	if len(ev.Tokens) == 0 || ev.BlockSize < 1 || len(ev.Tokens) != len(ev.Hashes)*ev.BlockSize {
		if len(ev.Tokens) > 0 {
			v.stats.Unaligned += uint64(len(ev.Hashes))
		}
		v.storedHashes(ev)
		return
	}
	parent, key, rooted := v.start(ev)
	for i, h := range ev.Hashes {
		key = v.chain.next(key, ev.Tokens[i*ev.BlockSize:(i+1)*ev.BlockSize], extraAt(ev.Extra, i))
		parent, key, rooted = v.storedBlock(h, parent, key, rooted, uint32(ev.BlockSize), ev.Tier)
	}
}

// storedBlock takes one block and returns what the next one is chained on.
func (v *View) storedBlock(h BlockHash, parent uint32, key Key, rooted bool, size uint32, tier Tier) (uint32, Key, bool) {
	at := v.byHash[h]
	switch b := &v.blocks[at]; {
	case at == 0:
		at = v.add(block{hash: h, key: key, parent: parent, rooted: rooted, size: size})
	case !rooted || (b.rooted && b.key == key):
		// Known already. If its chain was seen from the head and this event's was not, its own is used from here on.
	case !b.rooted || (b.kids == 0 && at != parent):
		v.root(at, parent, key, size)
	default:
		// The same hash for two prefixes, which no sound engine sends. What follows cannot be named.
		v.ref(at, tier)
		return at, orphanKey(h), false
	}
	v.ref(at, tier)
	return at, v.blocks[at].key, v.blocks[at].rooted
}

// start finds what an event's first block is chained on.
func (v *View) start(ev *Event) (parent uint32, key Key, rooted bool) {
	if !ev.HasParent {
		return 0, rootKey(ev.LoRA), v.tracks(uint32(ev.BlockSize))
	}
	if at := v.byHash[ev.Parent]; at != 0 {
		b := &v.blocks[at]
		return at, b.key, b.rooted && v.tracks(uint32(ev.BlockSize))
	}
	v.stats.OrphanEvents++
	return 0, orphanKey(ev.Parent), false
}

// storedHashes takes blocks whose tokens are not known. Hashes known already gain a tier; others wait, unmatched, for their tokens.
func (v *View) storedHashes(ev *Event) {
	for _, h := range ev.Hashes {
		at := v.byHash[h]
		if at == 0 {
			at = v.add(block{hash: h, key: orphanKey(h)})
		}
		v.ref(at, ev.Tier)
	}
}

func (v *View) removed(ev *Event) {
	for _, h := range ev.Hashes {
		at := v.byHash[h]
		if at == 0 || v.blocks[at].refs[ev.Tier] == 0 {
			v.stats.UnknownRemovals++
			continue
		}
		v.setRefs(at, ev.Tier, v.blocks[at].refs[ev.Tier]-1)
		v.settle(at)
	}
}

// ref adds a reference and makes the block the newest.
func (v *View) ref(at uint32, tier Tier) {
	if n := v.blocks[at].refs[tier]; n < 1<<16-1 {
		v.setRefs(at, tier, n+1)
	}
	v.move(at, v.place(at))
}

// setRefs changes a block's references and keeps the counters about holes right.
func (v *View) setRefs(at uint32, tier Tier, refs uint16) {
	b := &v.blocks[at]
	device := count(b.device())
	v.tally(at, -1)
	b.refs[tier] = refs
	v.tally(at, 1)
	v.changeKids(b.parent, 0, count(b.device())-device)
}

func (v *View) changeKids(at uint32, kids, device int) {
	if at == 0 || (kids == 0 && device == 0) {
		return
	}
	b := &v.blocks[at]
	v.tally(at, -1)
	b.kids = uint32(int(b.kids) + kids)
	b.deviceKids = uint32(int(b.deviceKids) + device)
	v.tally(at, 1)
}

// adopt chains one more block on a block, which then stays even when it has left.
func (v *View) adopt(parent uint32, device int) {
	v.changeKids(parent, 1, device)
	if parent != 0 && v.blocks[parent].list == ghostList {
		v.move(parent, noList)
	}
}

// tally takes a block out of the counters (-1) before it changes, or into them (1) afterwards.
func (v *View) tally(at uint32, sign int) {
	b := &v.blocks[at]
	v.deviceHoles += sign * b.deviceHole()
	v.lower += sign * b.lower()
	v.stats.DeviceHeld += sign * count(b.rooted && b.device())
}

// place says which list a block belongs in.
func (v *View) place(at uint32) listName {
	b := &v.blocks[at]
	switch {
	case b.held() && b.rooted:
		return heldList
	case b.held():
		return orphanList
	case b.kids > 0:
		return noList
	}
	return ghostList
}

// settle puts a block where it belongs after it lost a reference or a child, and forgets what nobody will ask for again.
func (v *View) settle(at uint32) {
	for at != 0 {
		b := &v.blocks[at]
		if b.held() {
			return
		}
		if b.kids > 0 || b.rooted {
			v.move(at, v.place(at))
			break
		}
		at = v.forget(at) // an orphan that left; its parent may have stayed only for it
	}
	for v.lists[ghostList].len > v.bound/8 {
		v.forgetChain(v.lists[ghostList].oldest)
	}
}

// add puts a block without references into the view. The caller gives it one.
func (v *View) add(b block) uint32 {
	var at uint32
	if n := len(v.free); n > 0 {
		at, v.free = v.free[n-1], v.free[:n-1]
		v.blocks[at] = b
	} else {
		at = uint32(len(v.blocks))
		v.blocks = append(v.blocks, b)
	}
	v.byHash[b.hash] = at
	v.adopt(b.parent, 0)
	v.enterKey(at)
	return at
}

// root gives a block its place in a chain that is known from the head. The caller sees to it that nothing rooted is chained on it;
// as all before a rooted block is rooted, no circle can come of it.
func (v *View) root(at, parent uint32, key Key, size uint32) {
	b := &v.blocks[at]
	device := count(b.device())
	old := b.parent
	v.leaveKey(at)
	v.tally(at, -1)
	b.parent, b.key, b.size, b.rooted = parent, key, size, true
	v.tally(at, 1)
	v.enterKey(at)
	v.adopt(parent, device)
	v.changeKids(old, -1, -device)
	v.settle(old)
}

// forget removes a block nothing is chained on and returns its parent.
func (v *View) forget(at uint32) uint32 {
	b := &v.blocks[at]
	for t := range b.refs {
		v.setRefs(at, Tier(t), 0)
	}
	v.move(at, noList)
	v.leaveKey(at)
	delete(v.byHash, b.hash)
	parent := b.parent
	v.changeKids(parent, -1, 0)
	v.blocks[at] = block{}
	v.free = append(v.free, at)
	return parent
}

// forgetChain removes a block nothing is chained on, and those before it that stayed in the view only for it.
func (v *View) forgetChain(at uint32) {
	for at != 0 && v.blocks[at].kids == 0 && !v.blocks[at].held() {
		at = v.forget(at)
	}
}

func (v *View) len() int { return len(v.blocks) - 1 - len(v.free) }

// trim drops blocks when there are more than the bound: those that have left first, then orphans, then the oldest. The tail of a
// chain goes before its head. A sixteenth is dropped at once, so that the search for tails is paid for by many.
func (v *View) trim() {
	if v.len() <= v.bound {
		return
	}
	goal := v.bound - v.bound/16
	for _, name := range []listName{ghostList, orphanList, heldList} {
		for v.len() > goal && v.dropTail(name, goal) {
		}
	}
}

// dropTail drops the oldest block of a list that nothing is chained on, and goes on towards its head.
func (v *View) dropTail(name listName, goal int) bool {
	l := &v.lists[name]
	for range l.len {
		at := l.oldest
		if v.blocks[at].kids > 0 {
			v.move(at, name)
			continue
		}
		for {
			v.stats.Dropped += uint64(count(v.blocks[at].held()))
			at = v.forget(at)
			if at == 0 || v.blocks[at].kids > 0 || v.len() <= goal || (name != heldList && v.blocks[at].held()) {
				break
			}
		}
		v.settle(at)
		return true
	}
	return false
}

// move puts a block at the new end of a list.
func (v *View) move(at uint32, to listName) {
	b := &v.blocks[at]
	if b.list != noList {
		l := &v.lists[b.list]
		if b.prev == 0 {
			l.oldest = b.next
		} else {
			v.blocks[b.prev].next = b.next
		}
		if b.next == 0 {
			l.newest = b.prev
		} else {
			v.blocks[b.next].prev = b.prev
		}
		l.len--
	}
	b.list, b.prev, b.next = to, 0, 0
	if to == noList {
		return
	}
	l := &v.lists[to]
	b.prev = l.newest
	if l.newest == 0 {
		l.oldest = at
	} else {
		v.blocks[l.newest].next = at
	}
	l.newest = at
	l.len++
}

// enterKey makes a rooted block findable. Blocks of one key but different hashes exist where an engine does not publish what tells
// them apart.
func (v *View) enterKey(at uint32) {
	b := &v.blocks[at]
	if !b.rooted {
		return
	}
	b.twin = v.byKey[b.key]
	v.byKey[b.key] = at
	for i := range v.sizes {
		if v.sizes[i].size == b.size {
			v.sizes[i].blocks++
			return
		}
	}
	v.sizes = append(v.sizes, sizeCount{b.size, 1})
}

func (v *View) leaveKey(at uint32) {
	b := &v.blocks[at]
	if !b.rooted {
		return
	}
	if first := v.byKey[b.key]; first != at {
		for v.blocks[first].twin != at {
			first = v.blocks[first].twin
		}
		v.blocks[first].twin = b.twin
	} else if b.twin != 0 {
		v.byKey[b.key] = b.twin
	} else {
		delete(v.byKey, b.key)
	}
	b.twin = 0
	for i := range v.sizes {
		if v.sizes[i].size == b.size {
			if v.sizes[i].blocks--; v.sizes[i].blocks == 0 {
				v.sizes = slices.Delete(v.sizes, i, i+1)
			}
			return
		}
	}
}

// tracks says whether blocks of a size are or can be matched.
func (v *View) tracks(size uint32) bool {
	return len(v.sizes) < maxSizes || slices.ContainsFunc(v.sizes, func(s sizeCount) bool { return s.size == size })
}

// Stats returns the counters.
func (v *View) Stats() ViewStats {
	v.mu.RLock()
	defer v.mu.RUnlock()
	st := v.stats
	st.Held, st.Orphans = v.lists[heldList].len, v.lists[orphanList].len
	st.Remembered = v.len() - st.Held - st.Orphans
	st.BlockSize = v.blockSize()
	return st
}

func (v *View) blockSize() int {
	var best sizeCount
	for _, s := range v.sizes {
		if s.blocks > best.blocks {
			best = s
		}
	}
	return int(best.size)
}
