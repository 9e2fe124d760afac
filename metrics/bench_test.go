// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"bufio"
	"fmt"
	"net"
	"strings"
	"sync"
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

// BenchmarkScrape is a whole scrape over a kept-alive connection on the loop
// interface, the answering side included, and how many scans that costs.
func BenchmarkScrape(b *testing.B) {
	text := samplePage(b, "vllm_python.txt")
	p, err := NewPoller(PollConfig{URL: cannedServer(b, text)}, func(Scrape) {})
	if err != nil {
		b.Fatal(err)
	}
	defer p.client.CloseIdleConnections()
	var (
		s    Scanner
		into Snapshot
	)
	scan := timeOf(200, func() {
		if err := s.Scan(strings.NewReader(text), &into); err != nil {
			b.Fatal(err)
		}
	})
	b.SetBytes(int64(len(text)))
	b.ReportAllocs()
	for b.Loop() {
		if got := p.scrape(b.Context()); got.Err != nil {
			b.Fatal(got.Err)
		}
	}
	each := b.Elapsed() / time.Duration(b.N)
	b.ReportMetric(float64(each)/float64(scan), "x-of-scan")
}

// cannedServer answers each request on a connection with the same bytes, with
// as little work as can be.
func cannedServer(b *testing.B, text string) (address string) {
	b.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	response := fmt.Appendf(nil, "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n%s", len(text), text)
	var serving sync.WaitGroup
	serving.Go(func() {
		connection, err := listener.Accept()
		if err != nil {
			return
		}
		defer connection.Close()
		requests := bufio.NewReader(connection)
		for {
			line, err := requests.ReadSlice('\n')
			if err != nil {
				return
			}
			if len(line) == 2 {
				connection.Write(response)
			}
		}
	})
	b.Cleanup(func() { listener.Close(); serving.Wait() })
	return "http://" + listener.Addr().String() + "/metrics"
}
