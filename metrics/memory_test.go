// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"io"
	"runtime"
	"strconv"
	"strings"
	"testing"
)

// generated is a page made on the fly, that no memory would hold.
type generated struct {
	left int64
	next func(buf []byte) []byte // appends more text
	buf  []byte
	used int // of buf
}

func (g *generated) Read(p []byte) (int, error) {
	if g.left <= 0 {
		return 0, io.EOF
	}
	if g.used == len(g.buf) {
		g.buf, g.used = g.buf[:0], 0
		for len(g.buf) < 4096 {
			g.buf = g.next(g.buf)
		}
	}
	n := copy(p[:min(int64(len(p)), g.left)], g.buf[g.used:])
	g.used += n
	g.left -= int64(n)
	return n, nil
}

// A scan costs its buffers, whatever the page: neither its lines, nor its
// series, nor the length of a line add to them.
func TestScanMemory(t *testing.T) {
	i := 0
	pages := map[string]func(buf []byte) []byte{
		"one line": func(buf []byte) []byte { return append(buf, "vllm:num_requests_running{xxxxxxxxx"...) },
		"unknown series": func(buf []byte) []byte {
			i++
			return append(strconv.AppendInt(append(buf, "vllm:series_"...), int64(i), 10), " 1\n"...)
		},
		"series of one engine": func(buf []byte) []byte {
			i++
			buf = append(buf, "vllm:num_requests_running{engine=\"0\",model_name=\"m"...)
			return append(strconv.AppendInt(buf, int64(i), 10), "\"} 1\n"...)
		},
		"adapters": func(buf []byte) []byte {
			i++
			buf = append(buf, "vllm:lora_requests_info{running_lora_adapters=\"a,b\"} "...)
			return append(strconv.AppendInt(buf, int64(i), 10), '\n')
		},
		"duplicates": func(buf []byte) []byte { return append(buf, smallPage...) },
		"empty":      func(buf []byte) []byte { return append(buf, "\n\n\r\n\n"...) },
	}
	for name, next := range pages {
		t.Run(name, func(t *testing.T) {
			const size = 4 << 20
			s := Scanner{MaxBytes: size}
			var into Snapshot
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			s.Scan(&generated{left: size, next: next}, &into)
			runtime.ReadMemStats(&after)
			if used := after.TotalAlloc - before.TotalAlloc; used > 128<<10 {
				t.Errorf("%d bytes allocated for a page of %d", used, size)
			}
		})
	}
}

// The facts of a real page a hundred times over cost no more allocations than
// once: lines allocate nothing.
func TestScanAllocations(t *testing.T) {
	for _, name := range []string{"vllm_python.txt", "vllm_0.32_dp2.txt", "sglang.txt", "triton.txt", "ray.txt"} {
		text := samplePage(t, name)
		allocations := func(times int) float64 {
			var (
				s    Scanner
				into Snapshot
				r    strings.Reader
			)
			page := strings.Repeat(text, times)
			return testing.AllocsPerRun(3, func() {
				r.Reset(page)
				if err := s.Scan(&r, &into); err != nil {
					t.Fatal(err)
				}
			})
		}
		if once, often := allocations(1), allocations(100); often > once {
			t.Errorf("%s: %v allocations for one page, %v for a hundred", name, once, often)
		}
	}
}
