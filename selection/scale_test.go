// SPDX-License-Identifier: Apache-2.0

package selection

import (
	"fmt"
	"math"
	"testing"
)

// BenchmarkScale tells how a decision's cost, body included, grows with the
// replicas and with the prompt. benchmarks/plot draws it.
func BenchmarkScale(b *testing.B) {
	for _, replicas := range []int{1, 8, 64, 256, 512, 1000} {
		b.Run(fmt.Sprintf("replicas=%d", replicas), func(b *testing.B) {
			scaled(b, `{}`, replicas, 32<<10)
		})
	}
	for _, tokens := range []int{1000, 10_000, 100_000, 1_000_000} {
		b.Run(fmt.Sprintf("tokens=%d", tokens), func(b *testing.B) {
			if testing.Short() && tokens > 100_000 {
				b.Skip("takes megabytes")
			}
			scaled(b, `{"max_body": 16777216}`, 64, 4*tokens)
		})
	}
}

func scaled(b *testing.B, config string, replicas, size int) {
	p, pool := loadAware(b, config), poolOf(replicas)
	f := &traffic{body: []byte(completionOf(words("scale", size)))}
	batch := max(1, (1<<20)/(size+replicas*1000))
	least := math.Inf(1)
	f.perServe(p, pool, batch)
	for b.Loop() {
		least = min(least, f.perServe(p, pool, batch))
	}
	b.ReportMetric(least/1000, "µs/decision")
	b.ReportMetric(0, "ns/op")
}
