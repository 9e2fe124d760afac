// SPDX-License-Identifier: Apache-2.0

package residency

import (
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"
)

// The fleet the goals are set for: 64 replicas of 31,250 blocks of which 30 % are held
// by all.
const (
	fleetReplicas = 64
	fleetCapacity = 31_250
	sharedBlocks  = fleetCapacity * 3 / 10
	chainBlocks   = 2_048
)

// randomChain appends n random blocks to a copy of head.
func randomChain(rng *rand.Rand, head []uint64, n int) []uint64 {
	chain := make([]uint64, 0, len(head)+n)
	chain = append(chain, head...)
	for range n {
		chain = append(chain, rng.Uint64())
	}
	return chain
}

// fullFleet returns an index in which every replica is full: a shared part, in prompts
// that start with the same 64 blocks, and prompts of its own.
func fullFleet(replicas, capacity, shared int) (*Index, []uint64) {
	rng := rand.New(rand.NewPCG(1, 2))
	x := New()
	system := randomChain(rng, nil, min(64, shared))
	var common [][]uint64
	for left := shared - len(system); left > 0; {
		n := min(left, 512)
		common = append(common, randomChain(rng, system, n))
		left -= n
	}
	for range replicas {
		slot := x.Join(capacity)
		x.Insert(slot, system)
		for _, c := range common {
			x.Insert(slot, c)
		}
		for x.Len(slot) < capacity {
			x.Insert(slot, randomChain(rng, system, min(1024, capacity-x.Len(slot))))
		}
	}
	return x, system
}

// perCall runs f n times and returns the time of one.
func perCall(n int, f func(i int)) float64 {
	start := time.Now()
	for i := range n {
		f(i)
	}
	return float64(time.Since(start)) / float64(n)
}

// goMapLookup returns a function that measures the time of one lookup in a Go map of a
// million blocks, as a router without this package would do for each block of a chain.
func goMapLookup() func() float64 {
	rng := rand.New(rand.NewPCG(3, 4))
	m := make(map[uint64]uint64, 1_000_000)
	keys := make([]uint64, 0, 1_000_000)
	for range cap(keys) {
		k := rng.Uint64()
		m[k] = k
		keys = append(keys, k)
	}
	rng.Shuffle(len(keys), func(i, j int) { keys[i], keys[j] = keys[j], keys[i] })
	at := 0
	return func() float64 {
		sum := uint64(0)
		ns := perCall(4096, func(int) {
			sum += m[keys[at]]
			at = (at + 1) % len(keys)
		})
		runtime.KeepAlive(sum)
		return ns
	}
}

func BenchmarkMatch(b *testing.B) {
	x, system := fullFleet(fleetReplicas, fleetCapacity, sharedBlocks)
	rng := rand.New(rand.NewPCG(5, 6))
	lookups := goMapLookup()
	long := make([][]uint64, 500) // a quarter of all blocks: most lookups miss the processor's caches
	for i := range long {
		long[i] = randomChain(rng, nil, chainBlocks)
		x.Insert(Slot(i%fleetReplicas), long[i])
	}
	partly := make([][]uint64, len(long))
	for i := range partly {
		partly[i] = randomChain(rng, long[i][:300+rng.IntN(1500)], 0)
		partly[i] = randomChain(rng, partly[i], chainBlocks-len(partly[i]))
	}
	shared := make([][]uint64, 200)
	for i := range shared {
		shared[i] = randomChain(rng, system, chainBlocks-len(system))
		for _, blocks := range []int{1000, 600, 200} {
			x.Insert(Slot(rng.IntN(fleetReplicas)), shared[i][:blocks])
		}
	}
	missed := make([][]uint64, 4096)
	for i := range missed {
		missed[i] = randomChain(rng, nil, 1)
	}
	for _, bench := range []struct {
		name   string
		chains [][]uint64
	}{
		{"miss", missed},
		{"hit", long},
		{"part", partly},
		{"system prompt and three replicas", shared},
	} {
		b.Run(bench.name, func(b *testing.B) {
			var out []int32
			i := 0
			const batch = 32
			ns, lookup := math.Inf(1), math.Inf(1) // of batches in turn the best
			for b.Loop() {
				ns = min(ns, perCall(batch, func(int) {
					out = x.Match(bench.chains[i%len(bench.chains)], out)
					i++
				}))
				lookup = min(lookup, lookups())
			}
			b.ReportMetric(ns, "ns/match")
			b.ReportMetric(0, "ns/op")
			b.ReportMetric(ns/lookup, "x-of-one-go-map-lookup")
			b.ReportMetric(ns/(lookup*chainBlocks), "x-of-go-map-walk")
		})
	}
}

// BenchmarkMatchUnderInsert is a hit while other goroutines insert without pause.
func BenchmarkMatchUnderInsert(b *testing.B) {
	x, system := fullFleet(fleetReplicas, fleetCapacity, sharedBlocks)
	rng := rand.New(rand.NewPCG(7, 8))
	chains := make([][]uint64, 64)
	for i := range chains {
		chains[i] = randomChain(rng, system, chainBlocks-len(system))
		x.Insert(0, chains[i][:1000])
	}
	match := func(b *testing.B) float64 {
		var out []int32
		i := 0
		for b.Loop() {
			out = x.Match(chains[i%len(chains)], out)
			i++
		}
		return float64(b.Elapsed()) / float64(b.N)
	}
	var alone float64
	b.Run("alone", func(b *testing.B) { alone = match(b) })
	b.Run("one inserter", func(b *testing.B) {
		stop := make(chan struct{})
		var done sync.WaitGroup
		done.Go(func() {
			rng := rand.New(rand.NewPCG(9, 10))
			chain := randomChain(rng, system, chainBlocks)
			for {
				select {
				case <-stop:
					return
				default:
				}
				for i := len(system); i < len(chain); i++ {
					chain[i] = mix(chain[i])
				}
				x.Insert(Slot(1+rng.IntN(fleetReplicas-1)), chain)
			}
		})
		ns := match(b)
		close(stop)
		done.Wait()
		b.ReportMetric(ns/alone, "x-of-alone")
	})
}

// BenchmarkInsert reports the time per block, also as a ratio to a Go map of the same
// number of blocks that does the same: inserting, and deleting another where the cache
// is full. Both are medians of chains, because a noisy machine stops some for long.
func BenchmarkInsert(b *testing.B) {
	b.Run("full", func(b *testing.B) { // every block is new and evicts another
		x, _ := fullFleet(fleetReplicas, fleetCapacity, sharedBlocks)
		chain := randomChain(rand.New(rand.NewPCG(11, 12)), nil, chainBlocks)
		benchmarkInsert(b, goMapReplace(x.Stats().Blocks), func(i int, timed func(func())) {
			renew(chain)
			timed(func() { x.Insert(Slot(i%fleetReplicas), chain) })
		})
	})
	b.Run("growing", func(b *testing.B) { // every block is new and there is room
		var x *Index
		chain := randomChain(rand.New(rand.NewPCG(13, 14)), nil, chainBlocks)
		benchmarkInsert(b, goMapGrow(fleetReplicas*15*chainBlocks), func(i int, timed func(func())) {
			if i%(fleetReplicas*15) == 0 {
				x = New()
				for range fleetReplicas {
					x.Join(fleetCapacity)
				}
			}
			renew(chain)
			timed(func() { x.Insert(Slot(i%fleetReplicas), chain) })
		})
	})
	b.Run("held", func(b *testing.B) { // every block is only touched
		x, _ := fullFleet(fleetReplicas, fleetCapacity, sharedBlocks)
		chain := randomChain(rand.New(rand.NewPCG(15, 16)), nil, chainBlocks)
		for slot := range Slot(fleetReplicas) {
			x.Insert(slot, chain)
		}
		benchmarkInsert(b, goMapReplace(x.Stats().Blocks), func(i int, timed func(func())) {
			timed(func() { x.Insert(Slot(i%fleetReplicas), chain) })
		})
	})
}

func benchmarkInsert(b *testing.B, inMap float64, insert func(i int, timed func(func()))) {
	var chains []time.Duration
	timed := func(f func()) {
		start := time.Now()
		f()
		chains = append(chains, time.Since(start))
	}
	for i := 0; b.Loop(); i++ {
		insert(i, timed)
	}
	perBlock := median(chains) / chainBlocks
	b.ReportMetric(perBlock, "ns/block")
	b.ReportMetric(perBlock/inMap, "x-of-go-map")
}

// renew makes every block of a chain a new one.
func renew(chain []uint64) {
	for i := range chain {
		chain[i] = mix(chain[i])
	}
}

func median(times []time.Duration) float64 {
	slices.Sort(times)
	return float64(times[len(times)/2])
}

// goMapReplace is the time a Go map of size entries takes to delete one and insert
// another.
func goMapReplace(size int) float64 {
	old := randomChain(rand.New(rand.NewPCG(17, 18)), nil, size)
	m := make(map[uint64]uint64, size)
	for _, k := range old {
		m[k] = k
	}
	young := slices.Clone(old)
	renew(young)
	var times []time.Duration
	for at := 0; at+chainBlocks <= size; at += chainBlocks {
		start := time.Now()
		for i := at; i < at+chainBlocks; i++ {
			delete(m, old[i])
			m[young[i]] = old[i]
		}
		times = append(times, time.Since(start))
	}
	return median(times) / chainBlocks
}

// goMapGrow is the time a Go map that starts empty takes to insert one of size entries.
func goMapGrow(size int) float64 {
	keys := randomChain(rand.New(rand.NewPCG(19, 20)), nil, size)
	m := map[uint64]uint64{}
	return perCall(size, func(i int) { m[keys[i]] = keys[i] })
}

// BenchmarkLeave reports how long a full replica's Leave and Clear take.
func BenchmarkLeave(b *testing.B) {
	x, system := fullFleet(fleetReplicas, fleetCapacity, sharedBlocks)
	rng := rand.New(rand.NewPCG(13, 14))
	refill := func(slot Slot) {
		for x.Len(slot) < fleetCapacity {
			x.Insert(slot, randomChain(rng, system, 1024))
		}
	}
	var left, cleared, worst time.Duration
	for b.Loop() {
		start := time.Now()
		x.Clear(5)
		took := time.Since(start)
		cleared += took
		worst = max(worst, took)
		refill(5)
		start = time.Now()
		x.Leave(7)
		took = time.Since(start)
		left += took
		worst = max(worst, took)
		refill(x.Join(fleetCapacity))
	}
	b.ReportMetric(float64(left.Microseconds())/float64(b.N), "µs/leave")
	b.ReportMetric(float64(cleared.Microseconds())/float64(b.N), "µs/clear")
	b.ReportMetric(float64(worst.Microseconds()), "µs/worst")
}

// BenchmarkHeaviest looks for shared prefixes in full caches, and compares how
// long a replica's lock is held for that with how long an Insert of as many new
// blocks holds it.
func BenchmarkHeaviest(b *testing.B) {
	x, _ := fullFleet(fleetReplicas, fleetCapacity, sharedBlocks)
	slots := make([]Slot, fleetReplicas)
	for i := range slots {
		slots[i] = Slot(i)
	}
	rng := rand.New(rand.NewPCG(11, 12))
	var insert, look time.Duration
	for b.Loop() {
		x.Heaviest(slots, 1<<16, 12)
		b.StopTimer()
		r := x.view.Load().replica(Slot(rng.IntN(fleetReplicas)))
		var links [chunkGroups]link
		start := time.Now()
		r.glance(nil, links[:])
		look += time.Since(start)
		chain := randomChain(rng, nil, chunk)
		start = time.Now()
		r.insert(chain)
		insert += time.Since(start)
		b.StartTimer()
	}
	b.ReportMetric(float64(look)/float64(insert), "locked-x-of-insert")
}
