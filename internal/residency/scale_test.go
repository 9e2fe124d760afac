// SPDX-License-Identifier: Apache-2.0

package residency

import (
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"testing"
)

// BenchmarkScale tells how memory and cost grow with what 64 replicas hold, a third of it
// held by all. benchmarks/plot draws it.
func BenchmarkScale(b *testing.B) {
	for _, pairs := range []int{100_000, 1_000_000, 3_000_000, 10_000_000, 30_000_000} {
		b.Run(fmt.Sprintf("pairs=%d", pairs), func(b *testing.B) {
			if testing.Short() && pairs > 1_000_000 {
				b.Skip("takes seconds to fill")
			}
			capacity := pairs / fleetReplicas
			before := heap()
			x, system := fullFleet(fleetReplicas, capacity, capacity*3/10)
			used := heap() - before
			blocks := min(chainBlocks, capacity/2)
			chain := randomChain(rand.New(rand.NewPCG(21, 22)), system, blocks)
			var out []int32
			insert, match := math.Inf(1), math.Inf(1)
			i := 0
			for b.Loop() {
				renew(chain[len(system):])
				slot := Slot(i % fleetReplicas)
				insert = min(insert, perCall(1, func(int) { x.Insert(slot, chain) })/float64(len(chain)))
				match = min(match, perCall(4, func(int) { out = x.Match(chain, out) }))
				i++
			}
			b.ReportMetric(float64(used)/(1<<20), "MiB")
			b.ReportMetric(float64(used)/float64(pairs), "bytes/pair")
			b.ReportMetric(insert, "ns/inserted-block")
			b.ReportMetric(match/1000, "µs/match")
			b.ReportMetric(0, "ns/op")
			runtime.KeepAlive(x)
		})
	}
}
