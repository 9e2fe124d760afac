// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tinylib/msgp/msgp"
	"go.uber.org/goleak"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/seed-2fa47a1e/caddy-kv-cache/metrics"
)

const goodPage = "vllm:num_requests_running{engine=\"0\"} 3\nvllm:num_requests_waiting{engine=\"0\"} 1\nvllm:kv_cache_usage_perc{engine=\"0\"} 0.5\n"

// hostilePages are what no engine should answer, and the reason under which each is counted.
var hostilePages = map[string]struct {
	reason metrics.Failure
	page   http.HandlerFunc
}{
	"a gzip bomb": {metrics.TooLarge, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Encoding", "gzip")
		_, _ = w.Write(gzipBomb())
	}},
	"ten million series": {metrics.TooLarge, func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, goodPage)
		line := []byte("vllm:request_success_total{engine=\"0\",finished_reason=\"stop\",model_name=\"00000000\"} 1\n")
		chunk := bytes.Repeat(line, 1000)
		for range 10_000 { // until the reader has had enough
			if _, err := w.Write(chunk); err != nil {
				return
			}
		}
	}},
	"an endless line":    {metrics.TooLarge, repeated(strings.Repeat("x", 64<<10), 0)},
	"ten thousand ranks": {metrics.TooLarge, ranks(10_000)},
	"a byte a second":    {metrics.TimedOut, repeated("v", time.Second)},
	"silence":            {metrics.TimedOut, func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }},
	"half a page": {metrics.Unreadable, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", "1000000")
		_, _ = io.WriteString(w, goodPage)
	}},
	"an encoding that nobody asked for": {metrics.Unreadable, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Encoding", "br")
	}},
	"a login page": {metrics.NoEngine, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "<html>") }},
	"an error":     {metrics.WrongStatus, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusForbidden) }},
	"another host": {metrics.Unreachable, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Location", "http://192.0.2.1/metrics")
		w.WriteHeader(http.StatusFound)
	}},
}

// gzipBomb is a gigabyte of a good page, made of members of a megabyte.
var gzipBomb = sync.OnceValue(func() []byte {
	var member bytes.Buffer
	z := gzip.NewWriter(&member)
	_, _ = io.WriteString(z, strings.Repeat(goodPage, 1<<20/len(goodPage))) // a buffer takes everything
	_ = z.Close()
	return bytes.Repeat(member.Bytes(), 1000)
})

func repeated(chunk string, pause time.Duration) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		for r.Context().Err() == nil {
			if _, err := io.WriteString(w, chunk); err != nil {
				return
			}
			_ = http.NewResponseController(w).Flush()
			select {
			case <-r.Context().Done():
			case <-time.After(pause):
			}
		}
	}
}

func ranks(n int) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		for i := range n {
			_, _ = fmt.Fprintf(w, "vllm:num_requests_running{engine=\"%d\"} 1\n", i)
		}
	}
}

// A page that turns hostile: what it told grows stale and unknown, each failure is counted under its reason, the log has
// one line when it begins and one when it ends, and none of them takes memory.
func TestHostilePages(t *testing.T) {
	for name, c := range hostilePages {
		t.Run(name, func(t *testing.T) {
			defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
			var hostile atomic.Bool
			s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if hostile.Load() {
					c.page(w, r)
					return
				}
				_, _ = io.WriteString(w, goodPage)
			}))
			defer s.Close()
			log, lines := observer.New(zapcore.InfoLevel)
			f := NewRegistry().New(Config{
				Name: "f", Interval: 20 * time.Millisecond, Logger: zap.New(log),
				Poll: func(addr string) (metrics.PollConfig, bool) {
					return metrics.PollConfig{URL: "http://" + addr + "/metrics", Interval: 20 * time.Millisecond, Timeout: 2 * time.Second}, true
				},
			}, []string{s.Listener.Addr().String()})
			f.Start()
			defer f.Stop()
			p := f.Members()[0]
			view := func() metrics.View { return f.Views(time.Now())[0] }
			await(t, "a good page", func() bool { return view().Good > 0 })
			said := func(from, to bool) int {
				n := 0
				for _, line := range lines.FilterMessage("replica changed").FilterField(zap.String("fact", "scrape")).All() {
					fields := line.ContextMap()
					if (fields["from"] != "") == from && (fields["to"] != "") == to {
						n++
					}
				}
				return n
			}
			before := heap()
			hostile.Store(true)
			await(t, "failures", func() bool { return view().BadBy[c.reason] >= 2 })
			if grown := heap() - before; grown > 32<<20 {
				t.Errorf("%d MiB more are in use", grown>>20)
			}
			v := view()
			if v.BadBy[c.reason] != v.Bad {
				t.Errorf("%d failures, by reason %v, all of them should be %v", v.Bad, v.BadBy, c.reason)
			}
			if l := p.Load(time.Now().Add(time.Minute)); l.KVUsage.Known || l.QueueKnown {
				t.Errorf("what a page told a minute ago is still known: %+v", l)
			}
			if n := said(false, true); n != 1 {
				t.Errorf("%d lines tell of the failure: %v", n, lines.All())
			}
			good := view().Good
			hostile.Store(false)
			await(t, "a good page again", func() bool { return view().Good > good && said(true, false) > 0 }) // it is told afterwards
			if began, changed, ended := said(false, true), said(true, true), said(true, false); began != 1 || changed != 0 || ended != 1 {
				t.Errorf("%d lines tell of the failure, %d of another, %d of its end", began, changed, ended)
			}
		})
	}
}

func heap() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// otherLanguages are payloads of publishers that speak another language than vLLM's, or almost its own.
var otherLanguages = map[string]struct {
	reason  string
	payload func(i int) []byte
}{
	// TensorRT-LLM's events are JSON, which comes by HTTP.
	"JSON": {"decode", func(i int) []byte {
		return fmt.Appendf(nil, `{"event_id":%d,"data":{"type":"stored","parent_hash":null,"blocks":[{"block_hash":%d,"tokens":[{"token_id":1}]}]}}`, i, i)
	}},
	// Dynamo's router events, had they come by ZMQ: a map without a list of events.
	"a map of something else": {"decode", func(i int) []byte {
		b := msgp.AppendMapHeader(nil, 2)
		b = msgp.AppendInt(msgp.AppendString(b, "event_id"), i)
		return msgp.AppendNil(msgp.AppendString(b, "data"))
	}},
	"other events": {"event", func(i int) []byte {
		return batchOf(msgp.AppendInt(msgp.AppendString(msgp.AppendArrayHeader(nil, 2), "CacheStoreEvent"), i))
	}},
	"token ids out of range": {"event", func(i int) []byte {
		b := msgp.AppendString(msgp.AppendArrayHeader(nil, 5), "BlockStored")
		b = msgp.AppendInt(msgp.AppendArrayHeader(b, 1), i) // the hash
		b = msgp.AppendNil(b)
		b = msgp.AppendArrayHeader(b, engineBlock)
		for range engineBlock {
			b = msgp.AppendInt64(b, 1<<40)
		}
		return batchOf(msgp.AppendInt(b, engineBlock))
	}},
}

func batchOf(event []byte) []byte {
	b := msgp.AppendFloat64(msgp.AppendArrayHeader(nil, 3), 1)
	return msgp.AppendInt(append(msgp.AppendArrayHeader(b, 1), event...), 0)
}

// Of a publisher that speaks another language nothing is known: belief stands, each message is counted under its reason,
// and the log has one line.
func TestForeignEvents(t *testing.T) {
	for name, c := range otherLanguages {
		t.Run(name, func(t *testing.T) {
			e := newTeller(t, true)
			config := e.config()
			log, lines := observer.New(zapcore.InfoLevel)
			config.Logger = zap.New(log)
			f := NewRegistry().New(config, []string{"a"})
			f.Start()
			t.Cleanup(f.Stop)
			p := f.Members()[0]
			awaitCurrent(t, p)
			const messages = 300
			for i := range messages {
				e.publisher.PublishPayload(c.payload(i))
			}
			await(t, "all messages", func() bool { return p.eventsView().Errors[c.reason] >= messages })
			x := newPassage(t, "one", 2048)
			if got := f.held(p, x, 1500); got != 1500 {
				t.Errorf("%v tokens are held where 1500 are believed", got)
			}
			if v := p.eventsView(); v.Reliable || v.Blocks != 0 {
				t.Errorf("%+v of events that nobody understands", v)
			}
			if told := lines.FilterField(zap.String("transition", "garbled")).Len(); told != 1 || lines.Len() > 5 {
				t.Errorf("%d lines tell of it, of %d in all", told, lines.Len())
			}
		})
	}
}
