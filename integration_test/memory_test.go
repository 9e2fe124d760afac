// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"testing"
)

// An engine that has begun to answer needs the request no more, and neither does the proxy: while many
// answers stream, it holds hardly more than with a policy that never looked at the bodies.
func TestMemoryOfOpenStreams(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("reads /proc")
	}
	ours, theirs := openStreams(t, "kv_cache_aware", 150), openStreams(t, "round_robin", 150)
	t.Logf("bytes of heap and stacks a stream: %d, by round robin %d; the process with all: %d MiB, %d MiB",
		ours.perStream, theirs.perStream, ours.process>>20, theirs.process>>20)
	if limit := theirs.perStream + bodySize/4; ours.perStream > limit {
		t.Errorf("an open stream takes %d bytes, and %d by round robin: its body of %d bytes seems to be kept", ours.perStream, theirs.perStream, bodySize)
	}
}

// BenchmarkOpenStreams compares the memory of the whole process with 1,000 open streams.
func BenchmarkOpenStreams(b *testing.B) {
	if runtime.GOOS != "linux" {
		b.Skip("reads /proc")
	}
	for b.Loop() {
		theirs := openStreams(b, "round_robin", 1000)
		for _, policy := range []string{"kv_cache_aware", "prefix_hash"} {
			ours := openStreams(b, policy, 1000)
			b.ReportMetric(float64(ours.process)/float64(theirs.process), policy+"-x-of-round-robin")
			b.ReportMetric(float64(ours.perStream)/float64(theirs.perStream), policy+"-heap-x-of-round-robin")
		}
		b.ReportMetric(float64(theirs.process)/(1<<20), "round-robin-MiB")
	}
	b.ReportMetric(0, "ns/op")
}

const bodySize = 256 << 10

// holding is what a proxy holds while streams are open.
type holding struct {
	process   int // its resident memory
	perStream int // its heap and stacks beyond what it has when idle
}

// openStreams sends requests of 256 KiB, 16 at a time, to an engine that streams the beginning of each
// answer and then nothing, and measures the proxy when all are at that point.
func openStreams(tb testing.TB, policy string, streams int) holding {
	tb.Helper()
	end := make(chan struct{})
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if _, err := io.Copy(io.Discard, r.Body); err != nil || r.Method != http.MethodPost {
			return // a scrape
		}
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, "data: {}\n\n")
		_ = http.NewResponseController(w).Flush()
		select {
		case <-end:
		case <-r.Context().Done():
		}
	}))
	defer engine.Close()
	p := newProxy(tb)
	p.level = "ERROR"
	p.run(p.caddyfile(fmt.Sprintf("reverse_proxy %s {\nlb_policy %s\nlb_retries 2\n}\n", engine.Listener.Addr(), policy)))
	base := p.inUse()

	answers := make([]io.Closer, streams)
	body := text("a long conversation", bodySize)
	inParallel(streams, 16, func(i int) {
		resp, err := p.client.Do(p.request(http.MethodPost, chatPath, strings.NewReader(ask(strconv.Itoa(i)+" "+body))))
		if err != nil {
			tb.Error(err)
			return
		}
		answers[i] = resp.Body
		if _, err := io.ReadFull(resp.Body, make([]byte, 10)); err != nil || resp.StatusCode != http.StatusOK {
			tb.Errorf("status %d, %v", resp.StatusCode, err)
		}
	})
	h := holding{perStream: (p.inUse() - base) / streams, process: p.resident()}
	close(end)
	for _, a := range answers {
		if a != nil {
			_ = a.Close()
		}
	}
	return h
}

// inUse is the memory in the process's heap and stacks once garbage is collected.
func (p *proxy) inUse() int {
	p.tb.Helper()
	for range 3 { // what was in pools goes at the second
		if status, _ := p.ask(http.MethodGet, "/debug/pprof/heap?gc=1", "", nil); status != http.StatusOK {
			p.tb.Fatalf("collecting the proxy's garbage: status %d", status)
		}
	}
	return int(p.metric("go_memstats_heap_inuse_bytes") + p.metric("go_memstats_stack_inuse_bytes"))
}

var residentLine = regexp.MustCompile(`VmRSS:\s+(\d+) kB`)

// resident is the memory that the process has of the system.
func (p *proxy) resident() int {
	p.tb.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
	if err != nil {
		p.tb.Fatal(err)
	}
	m := residentLine.FindSubmatch(status)
	if m == nil {
		p.tb.Fatalf("no resident memory in:\n%s", status)
	}
	kb, _ := strconv.Atoi(string(m[1])) // digits
	return kb << 10
}
