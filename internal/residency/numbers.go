// SPDX-License-Identifier: Apache-2.0

package residency

import (
	"math/bits"
	"unsafe"
)

const (
	numberBits = 24
	numberMask = 1<<numberBits - 1
)

// numberTable finds by its hash a record that is stored elsewhere under a number. The
// hash itself is in the record, so an entry has only 24 bits of number and 16 of the
// hash, which spare all but one in 65,536 needless looks at a record. Twelve entries and
// a header fill one cache line, a bucket, in which eight of those bits of every entry
// stand together, so that all twelve are compared in two steps. The home bucket of a
// hash is found by multiplication, so that the size need not be a power of two.
//
// An entry whose home is full goes to the next bucket with room, and each full bucket
// counts the entries that passed it. So a search ends at the first bucket that nobody
// passed, mostly the home; and removal only lowers the counts on the way. It leaves no
// tombstones, which would force a rebuild now and then for ever in a cache that is
// always full, and moves no entries, which would need the hashes of their records: a
// cache miss each.
//
// Several tables stand side by side, told apart by the leading log bits of the hash,
// each small enough to grow at once. A hash may be in a table more than once.
type numberTable struct {
	buckets []numberBucket
	used    int
}

// numberBucket is a cache line. Its entries are the first length(), in any order; those
// behind are 0, their tags arbitrary.
type numberBucket struct {
	tags    uint64 // bits 0–7 of the hashes of entries 0–7
	moreTag uint32 // and of entries 8–11
	header  uint32 // length in the low 8 bits, number of entries that passed above
	entries [numberEntries]uint32
}

const (
	numberEntries     = 12
	numberBucketBytes = int(unsafe.Sizeof(numberBucket{}))
	lengthMask        = 0xff
	onePassed         = lengthMask + 1
)

func (bk *numberBucket) length() int  { return int(bk.header & lengthMask) }
func (bk *numberBucket) passed() bool { return bk.header >= onePassed }
func (bk *numberBucket) full() bool   { return bk.length() == numberEntries }

// numberEntry is a record's number below bits 8–15 of its hash.
func numberEntry(hash uint64, n uint32) uint32 { return uint32(hash>>8)<<numberBits | n }

const (
	everyByte = 0x0101010101010101
	highBits  = 0x8080808080808080
	gather    = 0x0002040810204081
)

// zeroBytes has bit i set if byte i of w is 0. Above a zero byte it may have the bit of
// a 1 too: whoever asks must look closer.
func zeroBytes(w uint64) uint32 {
	return uint32(((w - everyByte) &^ w & highBits) * gather >> 56)
}

// candidates has a bit for each entry that may have the hash.
func (bk *numberBucket) candidates(hash uint64) uint32 {
	tags := hash & 0xff * everyByte
	return zeroBytes(bk.tags^tags) | zeroBytes(uint64(bk.moreTag)^tags)&0xf<<8
}

func (bk *numberBucket) set(at int, tag uint8, entry uint32) {
	bk.entries[at] = entry
	if shift := at * 8; at < 8 {
		bk.tags = bk.tags&^(0xff<<shift) | uint64(tag)<<shift
	} else {
		shift -= 64
		bk.moreTag = bk.moreTag&^(0xff<<shift) | uint32(tag)<<shift
	}
}

func (bk *numberBucket) tag(at int) uint8 {
	if at < 8 {
		return uint8(bk.tags >> (at * 8))
	}
	return uint8(bk.moreTag >> (at*8 - 64))
}

// delete takes out an entry and reports whether it was there.
func (bk *numberBucket) delete(hash uint64, entry uint32) bool {
	for m := bk.candidates(hash); m != 0; m &= m - 1 {
		at := bits.TrailingZeros32(m)
		if bk.entries[at] != entry {
			continue
		}
		last := bk.length() - 1
		bk.set(at, bk.tag(last), bk.entries[last])
		bk.entries[last] = 0
		bk.header--
		return true
	}
	return false
}

func (t *numberTable) home(hash uint64, log uint) int {
	at, _ := bits.Mul64(hash<<log, uint64(len(t.buckets)))
	return int(at)
}

func (t *numberTable) next(i int) int {
	if i++; i < len(t.buckets) {
		return i
	}
	return 0
}

// warm reads the home bucket of a hash, so that the processor has it when it is needed.
// It returns something to keep, so that the read is not optimised away.
func (t *numberTable) warm(hash uint64, log uint) uint32 {
	if t.used == 0 {
		return 0
	}
	return t.buckets[t.home(hash, log)].header
}

// guess returns the number most probably below the hash, less one.
func (t *numberTable) guess(hash uint64, log uint) uint32 {
	if t.used == 0 {
		return numberMask
	}
	bk := &t.buckets[t.home(hash, log)]
	at := bits.TrailingZeros32(bk.candidates(hash) | 1<<(numberEntries-1))
	return bk.entries[at]&numberMask - 1
}

// numberSearch is a search for a hash under way.
type numberSearch struct {
	table  *numberTable
	hash   uint64
	bucket int
	left   int    // buckets to look at, the present one included
	marks  uint32 // candidates of the present one to look at
}

func (t *numberTable) search(hash uint64, log uint) numberSearch {
	if t.used == 0 {
		return numberSearch{}
	}
	home := t.home(hash, log)
	return numberSearch{t, hash, home, len(t.buckets), t.buckets[home].candidates(hash)}
}

// next returns the number of another record that most probably has the hash, or 0.
func (s *numberSearch) next() uint32 {
	for s.left > 0 { // once around at most: every bucket may have been passed
		bk := &s.table.buckets[s.bucket]
		for s.marks != 0 {
			e := bk.entries[bits.TrailingZeros32(s.marks)]
			s.marks &= s.marks - 1
			if n := e & numberMask; n != 0 && e == numberEntry(s.hash, n) {
				return n
			}
		}
		if !bk.passed() {
			s.left = 0
			break
		}
		s.left--
		s.bucket = s.table.next(s.bucket)
		s.marks = s.table.buckets[s.bucket].candidates(s.hash)
	}
	return 0
}

// full reports whether the table must be resized before another put: at a load of 85 %.
func (t *numberTable) full() bool {
	return t.used*20 >= len(t.buckets)*numberEntries*17
}

// put adds an entry to a table that is not full.
func (t *numberTable) put(hash uint64, n uint32, log uint) {
	t.place(hash, n, log)
	t.used++
}

func (t *numberTable) place(hash uint64, n uint32, log uint) {
	i := t.home(hash, log)
	for t.buckets[i].full() {
		t.buckets[i].header += onePassed
		i = t.next(i)
	}
	bk := &t.buckets[i]
	bk.set(bk.length(), uint8(hash), numberEntry(hash, n))
	bk.header++
}

// delete takes out an entry that is in the table.
func (t *numberTable) delete(hash uint64, n uint32, log uint) {
	entry := numberEntry(hash, n)
	for i := t.home(hash, log); !t.buckets[i].delete(hash, entry); i = t.next(i) {
		t.buckets[i].header -= onePassed
	}
	t.used--
}

// larger is the size in buckets to grow to.
func (t *numberTable) larger() int { return max(len(t.buckets)+1, len(t.buckets)*3/2) }

// numberBuckets is the size in buckets for so many entries, at a load of 78 %.
func numberBuckets(entries int) int { return entries*100/(numberEntries*78) + 1 }

// resize moves everything to so many buckets. hash tells what a number's hash is.
func (t *numberTable) resize(buckets int, log uint, hash func(n uint32) uint64) {
	old := t.buckets
	t.buckets = make([]numberBucket, buckets)
	for i := range old {
		for _, e := range old[i].entries[:old[i].length()] {
			n := e & numberMask
			t.place(hash(n), n, log)
		}
	}
}
