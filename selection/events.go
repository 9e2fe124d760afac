// SPDX-License-Identifier: Apache-2.0

package selection

import (
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/fleet"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/kvevents"
	"github.com/seed-2fa47a1e/caddy-kv-cache/metrics"
)

// Events says where the replicas publish their KV-cache events. Addresses may
// have the placeholders {host} and {port} of the upstream's dial address, and
// {port+N} or {port-N} for a port at a fixed distance from it.
//
// An engine with data parallelism has a publisher for each rank, each on the
// port after the one before it. How many there are is learned from its metrics.
type Events struct {
	// The address of a replica's publisher (vLLM's `endpoint`), such as
	// tcp://{host}:5557.
	Endpoint string `json:"endpoint,omitempty"`

	// The address where events that were missed can be asked for (vLLM's
	// `replay_endpoint`), such as tcp://{host}:5558. Without it, what a replica
	// stored before this Caddy started stays unknown, so that the absence of a
	// block is not believed. Default: none.
	Replay string `json:"replay,omitempty"`
}

func (e *Events) validate() error {
	if e == nil {
		return nil
	}
	if e.Endpoint == "" {
		return errors.New("kv_events_replay without kv_events: give the address of the events too")
	}
	// Some distances fit only high ports, and some only low ones.
	fits := func(addr string) bool { _, ok := e.stream(addr, 0); return ok }
	if !slices.ContainsFunc([]string{"replica:8000", "replica:65535", "replica:1"}, fits) {
		return fmt.Errorf("kv_events is %q and kv_events_replay %q, but must be like tcp://{host}:5557, with a port and no other placeholders than {host}, {port} and {port+N}", e.Endpoint, e.Replay)
	}
	return nil
}

// stream is the configuration for following one rank of the replica at a dial
// address, or false if that has no address for events.
func (e *Events) stream(addr string, rank int) (kvevents.StreamConfig, bool) {
	var cfg kvevents.StreamConfig
	network, host, port, ok := dialed(addr)
	if !ok {
		return cfg, false
	}
	if caddy.IsUnixNetwork(network) {
		host, port = "{host}", "" // it has neither
	}
	if cfg.Endpoint, ok = expand(e.Endpoint, host, port, rank); !ok {
		return cfg, false
	}
	if e.Replay != "" {
		if cfg.Replay, ok = expand(e.Replay, host, port, rank); !ok {
			return cfg, false
		}
	}
	_, err := kvevents.NewStream(cfg, nil)
	return cfg, err == nil
}

// dialed splits a dial address that is the same for all requests.
func dialed(addr string) (network, host, port string, ok bool) {
	addr = caddy.NewReplacer().ReplaceKnown(addr, "")
	if strings.Contains(addr, "{") {
		return "", "", "", false
	}
	network, host, port, err := caddy.SplitNetworkAddress(addr)
	return network, host, port, err == nil
}

var portPlaceholder = regexp.MustCompile(`\{port([+-]\d{1,5})?\}`)

// expand fills in the placeholders of an address and moves its port on by the
// rank. It is false if something is missing.
func expand(template, host, port string, rank int) (string, bool) {
	if strings.Contains(host, ":") {
		host = "[" + host + "]"
	}
	addr := strings.ReplaceAll(template, "{host}", host)
	number, err := strconv.Atoi(port)
	if portPlaceholder.MatchString(addr) && err != nil {
		return "", false
	}
	addr = portPlaceholder.ReplaceAllStringFunc(addr, func(placeholder string) string {
		distance, _ := strconv.Atoi(strings.Trim(placeholder, "{port}")) // nothing is 0
		return strconv.Itoa(number + distance)
	})
	base, own, found := cutPort(addr)
	if !found || strings.Contains(addr, "{") || own < 1 || own+rank > 65535 {
		return "", false
	}
	return base + strconv.Itoa(own+rank), true
}

// cutPort splits tcp://host:port behind the colon.
func cutPort(addr string) (before string, port int, ok bool) {
	at := strings.LastIndexByte(addr, ':')
	port, err := strconv.Atoi(addr[at+1:])
	return addr[:at+1], port, err == nil
}

// unshorten takes back what the Caddyfile adapter makes of {host} and {port},
// which it knows as short for placeholders of the request.
var unshorten = strings.NewReplacer("{http.request.host}", "{host}", "{http.request.port}", "{port}")

// api is how the engines' front ends are asked for what is not in their
// metrics: at the upstream's own address and as the proxy's transport does.
func api(h *reverseproxy.Handler, key string) (*fleet.API, error) {
	scheme, config := proxied(h)
	header := make(http.Header)
	if key != "" {
		value, err := caddy.NewReplacer().ReplaceOrErr(key, true, true)
		if err != nil {
			return nil, fmt.Errorf("api_key: %v", err)
		}
		header.Set("Authorization", "Bearer "+strings.TrimSpace(value))
	}
	return &fleet.API{
		Base: func(addr string) (string, bool) {
			network, host, port, ok := dialed(addr)
			if !ok || caddy.IsUnixNetwork(network) {
				return "", false
			}
			if port == "" {
				port = map[string]string{"http": "80", "https": "443"}[scheme]
			}
			return scheme + "://" + net.JoinHostPort(host, port), true
		},
		Header: header,
		Client: &http.Client{
			Transport: metrics.NewTransport(config),
			// Where a redirect leads, the key must not go.
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		},
	}, nil
}

const rankPlaceholder = "{http.reverse_proxy.kv_cache.rank}"

// pinsRank tells whether a proxy sends requests on with the rank that holds
// their prompt, for vLLM's X-data-parallel-rank.
func pinsRank(h *reverseproxy.Handler) bool {
	if h == nil || h.Headers == nil || h.Headers.Request == nil {
		return false
	}
	for _, fields := range []http.Header{h.Headers.Request.Set, h.Headers.Request.Add} {
		for _, values := range fields {
			if slices.ContainsFunc(values, func(v string) bool { return strings.Contains(v, rankPlaceholder) }) {
				return true
			}
		}
	}
	return false
}

// proxied returns the scheme and the TLS settings that a proxy speaks to its
// upstreams with.
func proxied(h *reverseproxy.Handler) (scheme string, config *tls.Config) {
	if h == nil {
		return "http", nil
	}
	t, ok := h.Transport.(*reverseproxy.HTTPTransport)
	if !ok || t.TLS == nil || t.Transport == nil {
		return "http", nil
	}
	return "https", t.Transport.TLSClientConfig.Clone()
}

// teach has the tokens of the request's prompt asked for, now that a replica
// has answered it, if it is one to learn from.
func (d *decision) teach() {
	a := d.answered
	if a == nil || d.pupil == nil || d.body == nil || !d.teaches() {
		return
	}
	if body := d.body.whole(); body != nil {
		d.pupil.Learn(fleet.Sent{
			Replica: a.replica, Path: d.path, Model: d.prompt.Model,
			Chain: d.prompt.Chain, Bytes: d.prompt.Bytes,
		}, body)
	}
}

// teaches tells whether there is something to learn from the request's body.
func (d *decision) teaches() bool {
	return !d.prompt.Truncated && d.pupil.Learns(&fleet.Sent{Chain: d.prompt.Chain}, d.body.size)
}

// whole returns a copy of the body, nil if not all of it is at hand.
func (b *body) whole() []byte {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.buf == nil || b.rest != nil {
		return nil
	}
	return append([]byte(nil), b.head...)
}
