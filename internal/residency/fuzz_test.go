// SPDX-License-Identifier: Apache-2.0

package residency

import "testing"

// FuzzOperations reads operations from bytes and compares every outcome with the
// reference.
func FuzzOperations(f *testing.F) {
	f.Add([]byte{0, 9, 0, 4, 5, 0, 6, 1, 2, 3, 1, 1, 1, 5, 1, 4, 1, 2, 3, 3})
	f.Add([]byte{0, 3, 5, 0, 5, 1, 2, 3, 4, 5, 4, 0, 2, 2, 0, 5, 0, 3, 1, 2, 3})
	f.Add([]byte{0, 200, 0, 200, 5, 0, 3, 7, 7, 7, 5, 1, 4, 7, 7, 7, 7, 6, 0, 1, 2, 7, 7, 1, 0, 0, 50})
	f.Fuzz(func(t *testing.T, ops []byte) {
		if len(ops) > 2000 {
			return
		}
		p := newPair(t)
		next := func() byte {
			if len(ops) == 0 {
				return 0
			}
			b := ops[0]
			ops = ops[1:]
			return b
		}
		chain := func() []uint64 {
			n := min(int(next()%40), len(ops))
			c := chained(ops[:n])
			ops = ops[n:]
			return c
		}
		slot := func() Slot { return Slot(next()%8) - 1 }
		for len(ops) > 0 {
			op, s := next()%8, Slot(0)
			if op != 0 {
				s = slot()
			}
			if s < 0 { // no operation may mind
				p.x.Leave(s)
				p.x.Insert(s, chained([]byte{op}))
				continue
			}
			switch op {
			case 0:
				if len(p.m.held) < 70 {
					p.join(int(next()))
				}
			case 1:
				p.leave(s)
			case 2:
				p.clear(s)
			case 3:
				p.setCapacity(s, int(next()))
			case 4:
				from := int(next()) - 1
				p.remove(s, chain(), from)
			case 5, 6:
				c := chain()
				p.insert(s, c)
				p.compare(c)
			case 7:
				p.compare(chain())
			}
		}
		p.compareSizes()
		checkInvariants(t, p.x)
	})
}

// FuzzCollisions inserts and removes arbitrary hashes, which no chain of real prompts
// has: the same one twice, or under two parents. Beliefs may be wrong then, structures
// may not.
func FuzzCollisions(f *testing.F) {
	f.Add([]byte{5, 1, 1, 2, 3, 2, 0, 4, 3, 2, 1, 0})
	f.Add([]byte{3, 1, 2, 3, 0, 3, 2, 1, 4, 0, 3, 5, 2, 3}) // every second one goes to the other slot
	f.Add([]byte{3, 0, 0, 0, 130, 0, 3, 1, 2, 3})
	f.Fuzz(func(t *testing.T, ops []byte) {
		x := New()
		slots := []Slot{x.Join(4), x.Join(7)}
		for i := 0; len(ops) > 0; i++ {
			op := ops[0]
			n := min(int(op%16), len(ops)-1)
			chain := make([]uint64, n)
			for j, b := range ops[1 : 1+n] {
				chain[j] = uint64(b%8) << (b / 8 % 2 * 61) // 0 is a hash like others
			}
			ops = ops[1+n:]
			slot := slots[i%2]
			if op >= 128 {
				x.Remove(slot, chain, int(op/16)%3)
			} else {
				x.Insert(slot, chain)
			}
			for _, held := range x.Match(chain, nil) {
				if int(held) > len(chain) {
					t.Fatalf("%d of %d blocks are held", held, len(chain))
				}
			}
		}
		checkInvariants(t, x)
	})
}
