// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"strings"
	"syscall"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	// The Caddyfile adapter, the proxy and the policies.
	_ "github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	_ "github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	_ "github.com/seed-2fa47a1e/caddy-kv-cache/internal/page"
	_ "github.com/seed-2fa47a1e/caddy-kv-cache/selection"
)

// Header fields by which the demo learns of a decision, and one that policies
// which pin by a header can be told of.
const (
	headerReplica = "X-Replica"
	headerReason  = "X-Reason"
	headerSession = "X-Session-ID"
)

// PagePath is where Caddy shows its live page.
const PagePath = "/kv-cache"

// shortestPoll is what kv_cache_aware allows.
const shortestPoll = 50 * time.Millisecond

// caddyfile is the configuration in which the policy has the replicas. Requests
// that fail are not logged: the outcome counts them.
// Connections to them are closed before the 5 s after which vLLM, and the
// simulated replica, does so itself.
func (d *Demo) caddyfile(p Policy) string {
	host, port, _ := net.SplitHostPort(d.listen)
	site := []string{"kv_cache_page " + PagePath, "reverse_proxy " + strings.Join(d.addrs, " ") + " {",
		"lb_policy " + p.Name + d.block(p),
		"transport http {", "keepalive 4s", "keepalive_idle_conns_per_host 1024", "}",
		"header_down " + headerReplica + " {http.reverse_proxy.upstream.hostport}",
	}
	if p.ours() {
		site = append(site, "header_down "+headerReason+" {http.reverse_proxy.kv_cache.reason}")
	}
	site = append(site, "}")
	if host != "" {
		site = append(site, "bind "+host)
	}
	return fmt.Sprintf(`{
	admin %s
	persist_config off
	auto_https off
	storage_check off
	storage_clean_interval off
	grace_period 300ms
	log {
		level ERROR
		exclude http.log.error
	}
}
http://:%s {
%s
}
`, d.admin, port, strings.Join(site, "\n"))
}

// block is the policy's block, with the polls as often as the speed asks for.
func (d *Demo) block(p Policy) string {
	text := p.Options
	if p.polls() && !strings.Contains(text, "metrics_interval") {
		interval := max(shortestPoll, d.faster(d.config.Scrape))
		text = strings.TrimSpace(fmt.Sprintf("%s\nmetrics_interval %v", text, interval))
	}
	if text == "" {
		return ""
	}
	return " {\n" + text + "\n}"
}

// serve runs Caddy with a configuration in place of the one before. That one is
// stopped first: where both listen on an address for a moment, as in a reload, a
// connection that the old one has not accepted when it closes is reset.
func serve(ctx context.Context, caddyfile, addr string) error {
	config, err := adapt(caddyfile)
	if err != nil {
		return err
	}
	if err := caddy.Stop(); err != nil {
		return err
	}
	if err := awaitClosed(ctx, addr); err != nil {
		return err
	}
	return caddy.Load(config, true)
}

// awaitClosed waits until nobody listens on an address: Caddy closes its
// listeners some time after it said that it stopped.
func awaitClosed(ctx context.Context, addr string) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	for {
		c, err := new(net.Dialer).DialContext(ctx, "tcp", addr)
		if ctx.Err() != nil {
			return fmt.Errorf("waiting for %s to be closed: %w", addr, ctx.Err())
		}
		if err != nil {
			return nil
		}
		c.Close()
		time.Sleep(5 * time.Millisecond)
	}
}

// validate provisions a configuration without running it.
func validate(caddyfile string) error {
	text, err := adapt(caddyfile)
	if err != nil {
		return err
	}
	config := new(caddy.Config)
	if err := caddy.StrictUnmarshalJSON(text, config); err != nil {
		return err
	}
	return caddy.Validate(config)
}

func adapt(caddyfile string) ([]byte, error) {
	config, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(caddyfile), nil)
	return config, err
}

// stopServing ends Caddy, its admin API too, which caddy.Stop leaves running.
func stopServing() error {
	config, err := json.Marshal(&caddy.Config{
		Admin:   &caddy.AdminConfig{Disabled: true, Config: &caddy.ConfigSettings{Persist: new(bool)}},
		Logging: &caddy.Logging{Logs: map[string]*caddy.CustomLog{"default": {BaseLog: caddy.BaseLog{Level: "ERROR"}}}},
	})
	if err != nil {
		return err
	}
	return errors.Join(caddy.Load(config, true), caddy.Stop())
}

// freeAddress finds out that an address can be listened on, and which port a
// port of 0 becomes. An empty one is the default, or any port if that is taken.
func freeAddress(addr string) (string, error) {
	wanted := addr
	if wanted == "" {
		wanted = DefaultListen
	}
	l, err := net.Listen("tcp", wanted)
	switch {
	case errors.Is(err, syscall.EADDRINUSE) && addr == "":
		return freeAddress("127.0.0.1:0")
	case errors.Is(err, syscall.EADDRINUSE):
		return "", fmt.Errorf("%s is in use; choose another address to listen on", addr)
	case err != nil:
		return "", fmt.Errorf("cannot listen on %s: %w", wanted, err)
	}
	defer l.Close()
	return l.Addr().String(), nil
}
