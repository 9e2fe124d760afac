// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"strings"
	"testing"
	"time"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

var benchPages = []string{"vllm_python.txt", "vllm_0.32.txt", "vllm_python_dp2_multiproc.txt"}

// BenchmarkScan reads real pages and reports, beside the time, what part of the
// time of a full parse by expfmt that is.
func BenchmarkScan(b *testing.B) {
	for _, name := range benchPages {
		b.Run(name, func(b *testing.B) {
			text := samplePage(b, name)
			full := timeOf(200, func() {
				parser := expfmt.NewTextParser(model.UTF8Validation)
				if _, err := parser.TextToMetricFamilies(strings.NewReader(text)); err != nil {
					b.Fatal(err)
				}
			})
			var (
				s    Scanner
				into Snapshot
				r    strings.Reader
			)
			b.SetBytes(int64(len(text)))
			b.ReportAllocs()
			for b.Loop() {
				r.Reset(text)
				if err := s.Scan(&r, &into); err != nil {
					b.Fatal(err)
				}
			}
			each := b.Elapsed() / time.Duration(b.N)
			b.ReportMetric(float64(full)/float64(each), "x-faster-than-expfmt")
		})
	}
}

// timeOf is the time of one call of f, over that many.
func timeOf(calls int, f func()) time.Duration {
	began := time.Now()
	for range calls {
		f()
	}
	return time.Since(began) / time.Duration(calls)
}
