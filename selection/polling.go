// SPDX-License-Identifier: Apache-2.0

package selection

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/seed-2fa47a1e/caddy-kv-cache/metrics"
)

// Polling says how the replicas' Prometheus pages are read. Without any option
// each replica is polled on the address and by the scheme that its requests
// are sent to.
type Polling struct {
	// Whether to poll nothing: replicas are then reckoned from the requests
	// that go through this Caddy alone. Default: false.
	Off bool `json:"off,omitempty"`

	// The path (and query) of the metrics page. Default: /metrics.
	URI string `json:"uri,omitempty"`

	// The port of the metrics page, where it is not that of the requests.
	// Default: the upstream's port.
	Port int `json:"port,omitempty"`

	// The scheme, http or https. Default: that of the requests.
	Scheme string `json:"scheme,omitempty"`

	// The time between two polls of a replica, give or take a tenth.
	// Default: 1s.
	Interval caddy.Duration `json:"interval,omitempty"`

	// How long one poll may take as a whole. Default: 2s.
	Timeout caddy.Duration `json:"timeout,omitempty"`

	// Header fields to send with each poll, such as Authorization. Values may
	// have placeholders that are known when the config is loaded, such as
	// {env.*} and {file.*}.
	Headers http.Header `json:"headers,omitempty"`

	// The TLS settings for polling by https.
	// Default: those of the proxy's transport.
	TLS *reverseproxy.TLSConfig `json:"tls,omitempty"`
}

const (
	defaultMetricsURI = "/metrics"
	defaultInterval   = time.Second
	defaultTimeout    = 2 * time.Second
	shortestInterval  = 50 * time.Millisecond
)

func (p *Polling) validate() error {
	switch {
	case p == nil || p.Off:
		return nil
	case !strings.HasPrefix(p.URI, "/"):
		return fmt.Errorf("metrics uri is %q, but must begin with a slash", p.URI)
	case p.Port < 0 || p.Port > 65535:
		return fmt.Errorf("metrics port is %d, but must be between 1 and 65535", p.Port)
	case p.Scheme != "" && p.Scheme != "http" && p.Scheme != "https":
		return fmt.Errorf("metrics scheme is %q, but must be http or https", p.Scheme)
	case time.Duration(p.Interval) < shortestInterval:
		return fmt.Errorf("metrics interval is %v, but must be at least %v: polling that often slows the engines down", time.Duration(p.Interval), shortestInterval)
	case p.Timeout < 0:
		return fmt.Errorf("metrics timeout is %v, but can't be negative", time.Duration(p.Timeout))
	}
	return nil
}

// pollSettings is what polling one replica takes, apart from its address.
type pollSettings struct {
	off       bool
	scheme    string
	uri       string
	port      int
	interval  time.Duration
	timeout   time.Duration
	header    http.Header
	tls       *tls.Config
	transport *http.Transport // for all replicas; each has one connection
}

// settings fills in defaults, those that the proxy's own transport gives among
// them.
func (p *Polling) settings(ctx caddy.Context, h *reverseproxy.Handler) (*pollSettings, error) {
	if p.URI == "" {
		p.URI = defaultMetricsURI
	}
	if p.Interval == 0 {
		p.Interval = caddy.Duration(defaultInterval)
	}
	if p.Timeout == 0 {
		p.Timeout = caddy.Duration(defaultTimeout)
	}
	s := &pollSettings{
		off:      p.Off,
		scheme:   p.Scheme,
		uri:      p.URI,
		port:     p.Port,
		interval: time.Duration(p.Interval),
		timeout:  time.Duration(p.Timeout),
		header:   make(http.Header),
	}
	repl := caddy.NewReplacer()
	for field, values := range p.Headers {
		for _, v := range values {
			s.header.Add(field, repl.ReplaceKnown(v, ""))
		}
	}
	var proxied *tls.Config
	if h != nil {
		if t, ok := h.Transport.(*reverseproxy.HTTPTransport); ok && t.TLS != nil && t.Transport != nil {
			proxied = t.Transport.TLSClientConfig
			if s.scheme == "" {
				s.scheme = "https"
			}
		}
	}
	if s.scheme == "" {
		s.scheme = "http"
	}
	switch {
	case p.TLS != nil:
		cfg, err := p.TLS.MakeTLSClientConfig(ctx)
		if err != nil {
			return nil, fmt.Errorf("metrics tls: %v", err)
		}
		s.tls = cfg
		if s.tls == nil {
			s.tls = new(tls.Config)
		}
	case proxied != nil:
		s.tls = proxied.Clone()
	}
	s.transport = metrics.NewTransport(s.tls)
	return s, nil
}

// target is the poller's configuration for the replica at a dial address, or
// false if it can't be polled: polling is off, or the address is only known
// within a request.
func (s *pollSettings) target(addr string) (metrics.PollConfig, bool) {
	if s.off {
		return metrics.PollConfig{}, false
	}
	addr = caddy.NewReplacer().ReplaceKnown(addr, "")
	if strings.Contains(addr, "{") {
		return metrics.PollConfig{}, false
	}
	network, host, port, err := caddy.SplitNetworkAddress(addr)
	if err != nil {
		return metrics.PollConfig{}, false
	}
	cfg := metrics.PollConfig{
		Interval:  s.interval,
		Timeout:   s.timeout,
		Header:    s.header,
		Transport: s.transport,
	}
	if caddy.IsUnixNetwork(network) {
		cfg.URL = s.scheme + "://localhost" + s.uri
		cfg.Transport = overUnix(host, s.tls)
		return cfg, true
	}
	if s.port != 0 {
		port = strconv.Itoa(s.port)
	}
	if port == "" {
		port = map[string]string{"http": "80", "https": "443"}[s.scheme]
	}
	cfg.URL = s.scheme + "://" + net.JoinHostPort(host, port) + s.uri
	return cfg, true
}

// overUnix returns a transport that dials one Unix socket, and keeps no idle
// connection that would have to be closed.
func overUnix(path string, config *tls.Config) http.RoundTripper {
	t := metrics.NewTransport(config)
	t.DisableKeepAlives = true
	t.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", path)
	}
	return t
}

func (s *pollSettings) close() {
	if s != nil && s.transport != nil {
		s.transport.CloseIdleConnections()
	}
}
