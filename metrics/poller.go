// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"bufio"
	"cmp"
	"compress/gzip"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"
)

const (
	// DefaultInterval is the time between the starts of two scrapes. Shorter
	// ones than about 250 ms buy little: engines update their gauges once per
	// step, and writing a page costs them a few milliseconds.
	DefaultInterval = time.Second
	// DefaultTimeout bounds one scrape, from dialing to the last byte.
	DefaultTimeout = 2 * time.Second

	maxBackoff   = 10               // times the interval, while scrapes fail
	longestPause = 15 * time.Second // unless the interval itself is longer
	maxRedirects = 3
	maxHeader    = 64 << 10
	maxErrorBody = 64 << 10 // of a failed scrape, read to keep the connection
)

// PollConfig tells a Poller what to scrape and how. Only URL must be set.
type PollConfig struct {
	// URL is the whole address of the page, such as http://10.0.0.7:8000/metrics
	// (TensorRT-LLM: /prometheus/metrics). Credentials in it are sent.
	URL string
	// Interval is the time between the starts of two scrapes, give or take a
	// tenth; 0 means DefaultInterval. While scrapes fail it doubles from the
	// second failure on, up to tenfold and to 15 seconds.
	Interval time.Duration
	// Timeout bounds one scrape as a whole, so that a page that trickles in
	// ends too; 0 means DefaultTimeout. It may exceed Interval: scrapes of one
	// poller never overlap.
	Timeout time.Duration
	// Header is added to each request, Host included. It may replace the
	// defaults of Accept, Accept-Encoding and User-Agent.
	Header http.Header
	// Transport carries the requests, TLS included; nil means one of its own
	// made by NewTransport. Its idle connections are then closed when Run
	// returns; those of a given one are the caller's.
	Transport http.RoundTripper
	// MaxBytes bounds the page, before and after decompression; 0 means
	// DefaultMaxBytes.
	MaxBytes int64
}

// Scrape is the outcome of one attempt to read a page.
type Scrape struct {
	// Snapshot is nil when Err is not, except with ErrNoEngine: then it may
	// know the StartTime and nothing else.
	Snapshot *Snapshot
	// Err tells why there is no Snapshot: ErrNoEngine, ErrTooLarge,
	// ErrTooManyRanks, context.DeadlineExceeded, a *StatusError, or an error of
	// the network or the encoding.
	Err error
	// Duration is how long the attempt took.
	Duration time.Duration
	// Bytes is how much of the page was read, after decompression.
	Bytes int64
}

// StatusError is the error of a scrape that was answered with another status
// than 200.
type StatusError struct {
	// Code is the HTTP status.
	Code int
}

func (e *StatusError) Error() string {
	return fmt.Sprintf("status %d %s instead of 200; check the metrics path and its authentication",
		e.Code, strings.ToLower(http.StatusText(e.Code)))
}

// Poller scrapes the page of one replica again and again. Pollers share
// nothing that one could hold up another with.
type Poller struct {
	client   http.Client
	request  *http.Request
	interval time.Duration
	timeout  time.Duration
	maxBytes int64
	owned    bool // the transport
	observe  func(Scrape)

	unzip *gzip.Reader
	wire  *bufio.Reader // what unzip reads from
}

// NewPoller returns a poller that calls observe after each scrape, from the
// goroutine of Run. The next scrape waits until observe has returned.
func NewPoller(config PollConfig, observe func(Scrape)) (*Poller, error) {
	request, err := newRequest(config.URL, config.Header)
	if err != nil {
		return nil, err
	}
	if observe == nil {
		return nil, errors.New("poller without an observer")
	}
	if config.Interval < 0 {
		return nil, fmt.Errorf("negative scrape interval %v", config.Interval)
	}
	if config.Timeout < 0 {
		return nil, fmt.Errorf("negative scrape timeout %v", config.Timeout)
	}
	if config.MaxBytes < 0 {
		return nil, fmt.Errorf("negative page limit %d", config.MaxBytes)
	}
	p := &Poller{
		request:  request,
		interval: cmp.Or(config.Interval, DefaultInterval),
		timeout:  cmp.Or(config.Timeout, DefaultTimeout),
		maxBytes: cmp.Or(config.MaxBytes, DefaultMaxBytes),
		observe:  observe,
	}
	p.client = http.Client{Transport: config.Transport, CheckRedirect: sameHost}
	if config.Transport == nil {
		p.client.Transport = NewTransport(nil)
		p.owned = true
	}
	return p, nil
}

func newRequest(address string, header http.Header) (*http.Request, error) {
	u, err := url.Parse(address)
	if err != nil {
		// Leave out the URL, which url.Parse repeats with its password.
		if parsing := new(url.Error); errors.As(err, &parsing) {
			err = parsing.Err
		}
		return nil, fmt.Errorf("metrics URL: %w", err)
	}
	if u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		return nil, fmt.Errorf("metrics URL %q: want http://host:port/path or https://…", u.Redacted())
	}
	request, err := http.NewRequest(http.MethodGet, address, nil)
	if err != nil {
		return nil, fmt.Errorf("metrics URL: %w", err)
	}
	request.Header.Set("Accept", "text/plain;version=0.0.4, application/openmetrics-text;version=1.0.0;q=0.5, */*;q=0.1")
	// Within one network compression costs the engine, which writes the page
	// between two steps, more than it saves.
	request.Header.Set("Accept-Encoding", "identity")
	request.Header.Set("User-Agent", "caddy-kv-cache")
	for name, values := range header {
		if name = http.CanonicalHeaderKey(name); name == "Host" && len(values) > 0 {
			request.Host = values[0]
			continue
		}
		request.Header[name] = slices.Clone(values)
	}
	return request, nil
}

// NewTransport returns a transport for pollers, with the given TLS settings or
// the default ones. It keeps one connection for each host, uses no proxy, and
// never decompresses on its own. Pollers of different hosts may share it.
func NewTransport(config *tls.Config) *http.Transport {
	dialer := net.Dialer{Timeout: DefaultTimeout, KeepAlive: 30 * time.Second}
	return &http.Transport{
		DialContext:            dialer.DialContext,
		TLSClientConfig:        config,
		TLSHandshakeTimeout:    DefaultTimeout,
		DisableCompression:     true,
		MaxConnsPerHost:        1,
		MaxIdleConnsPerHost:    1,
		IdleConnTimeout:        90 * time.Second,
		MaxResponseHeaderBytes: maxHeader,
		ReadBufferSize:         16 << 10,
		WriteBufferSize:        1 << 10,
	}
}

// sameHost follows redirects only to where the request went anyway: SGLang
// sends /metrics to /metrics/. Elsewhere may be a login page, or somebody who
// should not get our headers.
func sameHost(next *http.Request, via []*http.Request) error {
	first := via[0].URL
	if next.URL.Scheme != first.Scheme || !strings.EqualFold(next.URL.Host, first.Host) {
		return fmt.Errorf("redirect to another host %q; scrape it directly if it is meant",
			next.URL.Scheme+"://"+next.URL.Host)
	}
	if len(via) > maxRedirects {
		return fmt.Errorf("more than %d redirects", maxRedirects)
	}
	return nil
}

// Run scrapes until ctx ends: at once, then every interval. It must be called
// once. A scrape that the end of ctx cuts short is not observed.
func (p *Poller) Run(ctx context.Context) {
	if p.owned {
		defer p.client.CloseIdleConnections()
	}
	// Pollers that start together spread their work a little.
	timer := time.NewTimer(rand.N(p.interval/20 + 1))
	defer timer.Stop()
	failures := 0
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		scrape := p.scrape(ctx)
		if ctx.Err() != nil {
			return
		}
		if failures++; scrape.Err == nil {
			failures = 0
		}
		p.observe(scrape)
		timer.Reset(p.pause(failures, scrape.Duration))
	}
}

// pause is how long to wait after a scrape that took so long, the latest of
// that many failures in a row. A failure alone is noise and changes nothing.
func (p *Poller) pause(failures int, took time.Duration) time.Duration {
	factor := 1
	for range failures - 1 {
		if factor *= 2; factor >= maxBackoff {
			factor = maxBackoff
			break
		}
	}
	period := min(p.interval*time.Duration(factor), max(p.interval, longestPause))
	period += rand.N(period/5+1) - period/10
	return max(period-took, period/10)
}

// scrape reads the page once.
func (p *Poller) scrape(ctx context.Context) Scrape {
	began := time.Now()
	bounded, cancel := context.WithTimeout(ctx, p.timeout)
	defer cancel()
	snapshot := &Snapshot{At: began}
	n, err := p.fetch(bounded, snapshot)
	if err != nil && !errors.Is(err, ErrNoEngine) {
		snapshot = nil
	}
	if err != nil && bounded.Err() != nil && ctx.Err() == nil {
		err = fmt.Errorf("no whole page within %v: %w", p.timeout, context.DeadlineExceeded)
	}
	return Scrape{Snapshot: snapshot, Err: err, Duration: time.Since(began), Bytes: n}
}

// scanners are shared: there are as many as scrapes at the same moment.
var scanners = sync.Pool{New: func() any { return new(Scanner) }}

func (p *Poller) fetch(ctx context.Context, into *Snapshot) (int64, error) {
	response, err := p.client.Do(p.request.WithContext(ctx))
	if err != nil {
		return 0, err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		n, _ := io.CopyN(io.Discard, response.Body, maxErrorBody)
		return n, &StatusError{Code: response.StatusCode}
	}
	body, err := p.decoded(response)
	if err != nil {
		return 0, err
	}
	scanner := scanners.Get().(*Scanner)
	defer scanners.Put(scanner)
	scanner.MaxBytes = p.maxBytes
	err = scanner.Scan(body, into)
	if errors.Is(err, ErrNoEngine) {
		err = fmt.Errorf("%w (content type %q)", err, response.Header.Get("Content-Type"))
	}
	return scanner.page.count(), err
}

// decoded returns the page's text. The scanner bounds it, so that a small body
// cannot unfold without end.
func (p *Poller) decoded(response *http.Response) (io.Reader, error) {
	switch encoding := strings.ToLower(response.Header.Get("Content-Encoding")); encoding {
	case "", "identity":
		return response.Body, nil
	case "gzip", "x-gzip":
		return p.unzipped(&boundedReader{from: response.Body, left: p.maxBytes, limit: p.maxBytes})
	default:
		return nil, fmt.Errorf("page encoded as %q; ask for gzip or identity", encoding)
	}
}

func (p *Poller) unzipped(body io.Reader) (io.Reader, error) {
	if p.unzip == nil {
		p.unzip, p.wire = new(gzip.Reader), bufio.NewReader(body)
	}
	p.wire.Reset(body)
	if err := p.unzip.Reset(p.wire); err != nil {
		return nil, fmt.Errorf("page encoded as gzip: %w", err)
	}
	return p.unzip, nil
}
