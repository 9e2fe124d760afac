// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const smallPage = "vllm:num_requests_running{engine=\"0\"} 3\n"

// server is a test server that counts its connections.
type server struct {
	*httptest.Server
	connections atomic.Int64
}

func serve(t *testing.T, handler http.HandlerFunc) *server {
	t.Helper()
	s := &server{Server: httptest.NewUnstartedServer(handler)}
	s.Config.ConnState = func(_ net.Conn, state http.ConnState) {
		if state == http.StateNew {
			s.connections.Add(1)
		}
	}
	s.Start()
	t.Cleanup(s.Close)
	return s
}

func (s *server) poller(t *testing.T, config PollConfig) *Poller {
	t.Helper()
	if config.URL == "" {
		config.URL = s.URL + "/metrics"
	}
	config.Timeout = cmp.Or(config.Timeout, time.Minute) // the machine may be busy
	p, err := NewPoller(config, func(Scrape) {})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.client.CloseIdleConnections)
	return p
}

func write(text string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, text) }
}

func zipped(text string) []byte {
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	io.WriteString(z, text)
	z.Close()
	return b.Bytes()
}

func encoded(encoding string, body []byte) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Encoding", encoding)
		w.Write(body)
	}
}

func TestScrape(t *testing.T) {
	text := samplePage(t, "vllm_0.32.txt")
	s := serve(t, write(text))
	before := time.Now()
	got := s.poller(t, PollConfig{}).scrape(t.Context())
	if got.Err != nil {
		t.Fatal(got.Err)
	}
	if got.Bytes != int64(len(text)) || got.Duration < 0 {
		t.Errorf("%d bytes in %v", got.Bytes, got.Duration)
	}
	if got.Snapshot.FirstTokens != fact(18) || got.Snapshot.At.Before(before) || got.Snapshot.At.After(time.Now()) {
		t.Errorf("snapshot %+v", got.Snapshot)
	}
}

// Snapshots are handed out for good: a later scrape must not write to them.
func TestSnapshotsAreImmutable(t *testing.T) {
	var calls atomic.Int64
	s := serve(t, func(w http.ResponseWriter, _ *http.Request) {
		n := calls.Add(1)
		fmt.Fprintf(w, "vllm:num_requests_running{model_name=\"m%d\"} %d\n", n, n)
		fmt.Fprintf(w, "vllm:lora_requests_info{running_lora_adapters=\"a%d\"} 1\n", n)
	})
	p := s.poller(t, PollConfig{})
	first := p.scrape(t.Context()).Snapshot
	p.scrape(t.Context())
	if first.Running != fact(1) || first.Models[0] != "m1" || first.Adapters[0] != "a1" {
		t.Errorf("the first snapshot changed: %+v", first)
	}
}

func TestRequestHeader(t *testing.T) {
	var got *http.Request
	s := serve(t, func(w http.ResponseWriter, r *http.Request) { got = r.Clone(context.Background()) })
	s.poller(t, PollConfig{}).scrape(t.Context())
	if got.Header.Get("Accept-Encoding") != "identity" || !strings.HasPrefix(got.Header.Get("Accept"), "text/plain") {
		t.Errorf("header %v", got.Header)
	}
	header := http.Header{"authorization": {"Bearer secret"}, "Host": {"engine.example"}, "accept-encoding": {"gzip"}}
	s.poller(t, PollConfig{Header: header}).scrape(t.Context())
	if got.Header.Get("Authorization") != "Bearer secret" || got.Host != "engine.example" || got.Header.Get("Accept-Encoding") != "gzip" {
		t.Errorf("host %q, header %v", got.Host, got.Header)
	}
}

func TestConnectionIsReused(t *testing.T) {
	answers := map[string]http.HandlerFunc{
		"page":      write(samplePage(t, "vllm_0.32.txt")),
		"no engine": write("up 1\n"),
		"gzip":      encoded("gzip", zipped(smallPage)),
		"status":    func(w http.ResponseWriter, _ *http.Request) { http.Error(w, strings.Repeat("x", 9000), 503) },
		"redirect": func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/metrics" {
				http.Redirect(w, r, "/metrics/", http.StatusTemporaryRedirect)
				return
			}
			io.WriteString(w, smallPage)
		},
	}
	for name, handler := range answers {
		t.Run(name, func(t *testing.T) {
			s := serve(t, handler)
			p := s.poller(t, PollConfig{})
			for range 5 {
				p.scrape(t.Context())
			}
			if n := s.connections.Load(); n != 1 {
				t.Errorf("%d connections for 5 scrapes", n)
			}
		})
	}
}

func TestStatus(t *testing.T) {
	for _, code := range []int{204, 401, 404, 500, 503} {
		s := serve(t, func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(code)
			if code != http.StatusNoContent {
				io.WriteString(w, smallPage)
			}
		})
		got := s.poller(t, PollConfig{}).scrape(t.Context())
		var status *StatusError
		if !errors.As(got.Err, &status) || status.Code != code || got.Snapshot != nil {
			t.Errorf("status %d: %+v", code, got)
		}
	}
}

func TestNoEngineScrape(t *testing.T) {
	s := serve(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		io.WriteString(w, "[]")
	})
	got := s.poller(t, PollConfig{}).scrape(t.Context())
	if !errors.Is(got.Err, ErrNoEngine) || !strings.Contains(got.Err.Error(), "application/json") {
		t.Errorf("JSON: %v", got.Err)
	}
	s = serve(t, write(samplePage(t, "vllm_no_stats.txt")))
	got = s.poller(t, PollConfig{}).scrape(t.Context())
	if !errors.Is(got.Err, ErrNoEngine) || got.Snapshot == nil || !got.Snapshot.StartTime.Known {
		t.Errorf("without stats: %+v", got)
	}
}

func TestRedirects(t *testing.T) {
	var strayed atomic.Int64
	other := serve(t, func(w http.ResponseWriter, _ *http.Request) {
		strayed.Add(1)
		io.WriteString(w, smallPage)
	})
	tests := []struct {
		name, to string
		want     string
	}{
		{"same host", "/metrics/", ""},
		{"loop", "/metrics", "redirects"},
		{"other host", other.URL + "/metrics", "another host"},
		{"other scheme", "https://$HOST/metrics/", "another host"},
		{"other protocol", "file:///etc/passwd", "another host"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			s := serve(t, func(w http.ResponseWriter, r *http.Request) {
				if r.URL.Path == "/metrics/" {
					io.WriteString(w, smallPage)
					return
				}
				w.Header().Set("Location", strings.ReplaceAll(test.to, "$HOST", r.Host))
				w.WriteHeader(http.StatusTemporaryRedirect)
			})
			got := s.poller(t, PollConfig{}).scrape(t.Context())
			if test.want == "" {
				if got.Err != nil || got.Snapshot.Running != fact(3) {
					t.Errorf("%+v", got)
				}
				return
			}
			if got.Err == nil || !strings.Contains(got.Err.Error(), test.want) || got.Snapshot != nil {
				t.Errorf("error %v", got.Err)
			}
		})
	}
	if strayed.Load() > 0 {
		t.Error("the other host was asked")
	}
}

func TestEncodings(t *testing.T) {
	good := zipped(smallPage)
	bomb := zipped(smallPage + strings.Repeat("vllm:prompt_tokens_total 1\n", 1<<16))
	tests := []struct {
		name, encoding string
		body           []byte
		want           string
	}{
		{"gzip", "gzip", good, ""},
		{"two members", "GZIP", append(bytes.Clone(good), zipped("vllm:num_requests_waiting 1\n")...), ""},
		{"bomb", "gzip", bomb, "too large"},
		{"cut short", "gzip", good[:len(good)-10], "EOF"},
		{"not gzip", "gzip", []byte(smallPage), "gzip"},
		{"empty", "gzip", nil, "gzip"},
		{"large on the wire", "gzip", bytes.Repeat(zipped(""), 1<<13), "too large"},
		{"unknown", "br", good, `"br"`},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			s := serve(t, encoded(test.encoding, test.body))
			p := s.poller(t, PollConfig{MaxBytes: 64 << 10})
			for range 2 { // the second reuses the decompressor
				got := p.scrape(t.Context())
				if test.want == "" {
					if got.Err != nil || got.Snapshot.Running != fact(3) {
						t.Fatalf("%+v", got)
					}
					continue
				}
				if got.Err == nil || !strings.Contains(got.Err.Error(), test.want) || got.Snapshot != nil {
					t.Fatalf("error %v", got.Err)
				}
			}
		})
	}
}

// endless writes chunk until the client goes away.
func endless(chunk string, pause time.Duration) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		for {
			if _, err := io.WriteString(w, chunk); err != nil {
				return
			}
			w.(http.Flusher).Flush()
			select {
			case <-r.Context().Done():
				return
			case <-time.After(pause):
			}
		}
	}
}

func TestHostilePages(t *testing.T) {
	silent := func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }
	tests := []struct {
		name    string
		handler http.HandlerFunc
		timeout time.Duration
		want    error
	}{
		{"silent", silent, 50 * time.Millisecond, context.DeadlineExceeded},
		{"drip", endless("v", 5*time.Millisecond), 100 * time.Millisecond, context.DeadlineExceeded},
		{"drip of lines", endless(smallPage, 5*time.Millisecond), 100 * time.Millisecond, context.DeadlineExceeded},
		{"endless lines", endless(strings.Repeat(smallPage, 1000), 0), time.Minute, ErrTooLarge},
		{"endless line", endless(strings.Repeat("x", 64<<10), 0), time.Minute, ErrTooLarge},
		{"cut short", func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "1000")
			io.WriteString(w, smallPage)
		}, time.Minute, io.ErrUnexpectedEOF},
		{"too many ranks", func(w http.ResponseWriter, _ *http.Request) {
			for i := range 10_000 {
				fmt.Fprintf(w, "vllm:num_requests_running{engine=\"%d\"} 1\n", i)
			}
		}, time.Minute, ErrTooManyRanks},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			s := serve(t, test.handler)
			p := s.poller(t, PollConfig{Timeout: test.timeout, MaxBytes: 1 << 20})
			got := p.scrape(t.Context())
			if !errors.Is(got.Err, test.want) {
				t.Errorf("error %v, want %v", got.Err, test.want)
			}
			if got.Snapshot != nil {
				t.Errorf("facts of a page that was not read whole: %+v", got.Snapshot)
			}
			if got.Bytes > 1<<20 || test.want == ErrTooLarge && got.Bytes != 1<<20 {
				t.Errorf("%d bytes read", got.Bytes)
			}
		})
	}
}

func TestRefusedConnection(t *testing.T) {
	s := serve(t, write(smallPage))
	p := s.poller(t, PollConfig{})
	s.Close()
	if got := p.scrape(t.Context()); got.Err == nil || got.Snapshot != nil || errors.Is(got.Err, context.DeadlineExceeded) {
		t.Errorf("%+v", got)
	}
}

func TestPollConfigErrors(t *testing.T) {
	observe := func(Scrape) {}
	tests := []struct {
		config  PollConfig
		observe func(Scrape)
		want    string
	}{
		{PollConfig{}, observe, "http://host:port/path"},
		{PollConfig{URL: "vllm-0:8000/metrics"}, observe, "http://host:port/path"},
		{PollConfig{URL: "ftp://vllm-0/metrics"}, observe, "http://host:port/path"},
		{PollConfig{URL: "http:///metrics"}, observe, "http://host:port/path"},
		{PollConfig{URL: "http://a b/"}, observe, "metrics URL"},
		{PollConfig{URL: "http://a", Interval: -1}, observe, "interval -1ns"},
		{PollConfig{URL: "http://a", Timeout: -1}, observe, "timeout -1ns"},
		{PollConfig{URL: "http://a", MaxBytes: -1}, observe, "limit -1"},
		{PollConfig{URL: "http://a"}, nil, "observer"},
	}
	for _, test := range tests {
		_, err := NewPoller(test.config, test.observe)
		if err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%+v: %v, want %q", test.config, err, test.want)
		}
	}
	for _, address := range []string{"ftp://user:secret@a", "http://user:secret@a b/"} {
		if _, err := NewPoller(PollConfig{URL: address}, observe); strings.Contains(err.Error(), "secret") {
			t.Errorf("password in %v", err)
		}
	}
}

// run starts a poller and returns its scrapes; it ends with the test.
func (s *server) run(t *testing.T, config PollConfig) <-chan Scrape {
	t.Helper()
	config.URL = s.URL
	config.Timeout = cmp.Or(config.Timeout, time.Minute)
	scrapes := make(chan Scrape)
	ctx, cancel := context.WithCancel(t.Context())
	p, err := NewPoller(config, func(s Scrape) {
		select {
		case scrapes <- s:
		case <-ctx.Done():
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	var done sync.WaitGroup
	done.Go(func() { p.Run(ctx) })
	t.Cleanup(func() { cancel(); done.Wait() })
	return scrapes
}

func TestRunSeesARestart(t *testing.T) {
	var tokens atomic.Int64
	s := serve(t, func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintf(w, "vllm:prompt_tokens_total %d\n", tokens.Load())
	})
	tokens.Store(100)
	scrapes := s.run(t, PollConfig{Interval: time.Millisecond})
	before := <-scrapes
	tokens.Store(10)
	for {
		// One more scrape may have been under way.
		if after := <-scrapes; Restarted(before.Snapshot, after.Snapshot) {
			break
		}
	}
}

func TestOneSlowReplicaDelaysNoOther(t *testing.T) {
	asked := make(chan struct{}, 1)
	slow := serve(t, func(_ http.ResponseWriter, r *http.Request) {
		asked <- struct{}{}
		<-r.Context().Done()
	})
	fast := serve(t, write(smallPage))
	transport := NewTransport(nil)
	defer transport.CloseIdleConnections()
	stuck := slow.run(t, PollConfig{Interval: time.Millisecond, Timeout: time.Hour, Transport: transport})
	<-asked
	scrapes := fast.run(t, PollConfig{Interval: time.Millisecond, Transport: transport})
	for range 20 {
		select {
		case s := <-scrapes:
			if s.Err != nil {
				t.Fatal(s.Err)
			}
		case s := <-stuck:
			t.Fatalf("the stuck scrape ended: %+v", s)
		}
	}
}

// Many pollers share their scanners; run with -race.
func TestPollersInParallel(t *testing.T) {
	var all sync.WaitGroup
	for i := range 8 {
		s := serve(t, func(w http.ResponseWriter, _ *http.Request) {
			fmt.Fprintf(w, "vllm:num_requests_running{model_name=\"m%d\"} %d\n", i, i)
		})
		scrapes := s.run(t, PollConfig{Interval: time.Millisecond})
		all.Go(func() {
			for range 20 {
				got := <-scrapes
				if got.Err != nil || got.Snapshot.Running != fact(float64(i)) || got.Snapshot.Models[0] != fmt.Sprint("m", i) {
					t.Errorf("replica %d: %+v %v", i, got.Snapshot, got.Err)
				}
			}
		})
	}
	all.Wait()
}

func TestRunClosesItsConnection(t *testing.T) {
	closed := make(chan struct{}, 1)
	s := &server{Server: httptest.NewUnstartedServer(write(smallPage))}
	s.Config.ConnState = func(_ net.Conn, state http.ConnState) {
		if state == http.StateClosed {
			closed <- struct{}{}
		}
	}
	s.Start()
	defer s.Close()
	ctx, cancel := context.WithCancel(t.Context())
	p, err := NewPoller(PollConfig{URL: s.URL}, func(Scrape) { cancel() })
	if err != nil {
		t.Fatal(err)
	}
	p.Run(ctx)
	<-closed
}

// transportFunc answers without a network, so that time can be simulated.
type transportFunc func(*http.Request) (*http.Response, error)

func (f transportFunc) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func answer(text string) *http.Response {
	return &http.Response{StatusCode: http.StatusOK, Header: http.Header{}, Body: io.NopCloser(strings.NewReader(text))}
}

// schedule runs a poller in simulated time and returns when its scrapes began
// and what they brought. Each attempt takes what took says.
func schedule(t *testing.T, config PollConfig, n int, attempt func(i int) (took time.Duration, ok bool)) (starts []time.Duration) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		ctx, cancel := context.WithCancel(t.Context())
		var busy atomic.Bool
		config.URL = "http://replica/metrics"
		config.Transport = transportFunc(func(r *http.Request) (*http.Response, error) {
			if busy.Swap(true) {
				t.Error("two scrapes at once")
			}
			defer busy.Store(false)
			took, ok := attempt(len(starts))
			starts = append(starts, time.Since(began))
			select {
			case <-time.After(took):
			case <-r.Context().Done():
				return nil, r.Context().Err()
			}
			if !ok {
				return nil, errors.New("refused")
			}
			return answer(smallPage), nil
		})
		p, err := NewPoller(config, func(Scrape) {
			if len(starts) == n {
				cancel()
			}
		})
		if err != nil {
			t.Fatal(err)
		}
		p.Run(ctx)
	})
	return starts
}

// wantGaps checks the times between starts, which may be a tenth off.
func wantGaps(t *testing.T, starts []time.Duration, want ...time.Duration) {
	t.Helper()
	for i, w := range want {
		if gap := starts[i+1] - starts[i]; gap < w*9/10 || gap > w*11/10 {
			t.Errorf("scrape %d began %v after the one before, want about %v", i+1, gap, w)
		}
	}
}

func TestRunKeepsItsInterval(t *testing.T) {
	starts := schedule(t, PollConfig{}, 4, func(int) (time.Duration, bool) { return 300 * time.Millisecond, true })
	if starts[0] > DefaultInterval/20 {
		t.Errorf("first scrape after %v", starts[0])
	}
	wantGaps(t, starts, time.Second, time.Second, time.Second)
}

func TestRunNeverOverlaps(t *testing.T) {
	// A scrape that takes longer than the interval is followed by a short rest.
	starts := schedule(t, PollConfig{}, 3, func(int) (time.Duration, bool) { return 1500 * time.Millisecond, true })
	wantGaps(t, starts, 1600*time.Millisecond, 1600*time.Millisecond)
}

func TestRunBacksOff(t *testing.T) {
	starts := schedule(t, PollConfig{}, 10, func(i int) (time.Duration, bool) { return 0, i > 6 })
	s := time.Second
	wantGaps(t, starts, s, 2*s, 4*s, 8*s, 10*s, 10*s, 10*s, s, s)
}

func TestRunBacksOffNoLongerThanQuarterMinute(t *testing.T) {
	fail := func(int) (time.Duration, bool) { return 0, false }
	s := time.Second
	wantGaps(t, schedule(t, PollConfig{Interval: 5 * s}, 5, fail), 5*s, 10*s, 15*s, 15*s)
	wantGaps(t, schedule(t, PollConfig{Interval: 60 * s}, 4, fail), 60*s, 60*s, 60*s)
}

func TestRunTimesOut(t *testing.T) {
	starts := schedule(t, PollConfig{}, 3, func(int) (time.Duration, bool) { return time.Hour, true })
	wantGaps(t, starts, DefaultTimeout+100*time.Millisecond, DefaultTimeout+200*time.Millisecond)
}

func TestRunEndsWithinAScrape(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		p, err := NewPoller(PollConfig{URL: "http://replica", Timeout: time.Hour, Transport: transportFunc(func(r *http.Request) (*http.Response, error) {
			<-r.Context().Done()
			return nil, r.Context().Err()
		})}, func(s Scrape) { t.Errorf("observed %+v", s) })
		if err != nil {
			t.Fatal(err)
		}
		p.Run(ctx)
	})
}
