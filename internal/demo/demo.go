// SPDX-License-Identifier: Apache-2.0

// Package demo plays a workload through a real Caddy, in this process, under
// one load-balancing policy after the other, against simulated replicas or real
// servers. It is the demo for a newcomer and the benchmark for everyone else.
package demo

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"syscall"
	"time"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/enginesim"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/load"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/trace"
)

// Defaults of [Config]. The built-in workload is made for them: it asks for
// somewhat more prefill than a fleet that finds nothing in its caches has, and
// for more KV cache than one replica has.
const (
	DefaultReplicas    = 4
	DefaultBlocks      = 4096
	DefaultBlockTokens = enginesim.DefaultBlockTokens
	DefaultPrefillRate = enginesim.DefaultPrefillRate
	DefaultSpeed       = 10
	DefaultScrape      = time.Second
	DefaultListen      = "127.0.0.1:8080"
)

// Config describes a demo. The zero value of a field stands for its default.
type Config struct {
	// Policies are to be played. Default: [DefaultPolicies].
	Policies []Policy

	// Replicas is the number of simulated replicas. Default 4.
	Replicas int
	// Blocks is the size of each replica's KV cache in blocks. Default 4096.
	Blocks int
	// BlockTokens is the number of tokens in a block. Default 16.
	BlockTokens int
	// PrefillRate is the number of prompt tokens that a replica computes in a
	// second, at speed 1. Default 10000.
	PrefillRate float64
	// Speed is how much faster everything is than it is reported: replicas
	// compute, and requests arrive, so many times as fast, and measured times are
	// multiplied by it. Time constants of the policies, and what the machine
	// takes to pass a request on, weigh as much more, so results to rely on are
	// those at 1. Default 10; with real servers always 1.
	Speed float64

	// Upstreams are real servers, host:port, in place of simulated replicas.
	Upstreams []string
	// Model is the name of the model. Default "sim"; of real servers the first
	// model that they list.
	Model string

	// Trace is a recorded trace to play, a file or a directory that
	// [trace.Open] reads. Empty is a made-up workload.
	Trace string
	// Workload is which one: chats, or the name of a [trace.Kind]. Default:
	// chats.
	Workload string
	// Chats is what the workload chats is like, but for its seed. Default of each
	// field: that of [DefaultChats].
	Chats trace.Workload
	// Rate multiplies the rate at which requests, or sessions, arrive. The time
	// from an answer to the session's next request stays. Default 1.
	Rate float64
	// Sessions keeps so many sessions going instead of starting them at their
	// time. 0 starts them at their time.
	Sessions int
	// Limit is the number of requests to play, in whole sessions where there are
	// sessions. 0 is all.
	Limit int
	// Seed chooses everything that is random in the built-in workload.
	Seed uint64

	// Scrape is the time between two polls of a replica, at speed 1. Default 1s. No replica is polled more often than each 50 ms of
	// real time.
	Scrape time.Duration
	// Listen is the address that takes requests. Default 127.0.0.1:8080, or any
	// free port if that one is taken.
	Listen string
}

func (c Config) withDefaults() Config {
	if len(c.Policies) == 0 {
		for _, name := range DefaultPolicies() {
			c.Policies = append(c.Policies, Policy{Name: name})
		}
	}
	if c.Replicas == 0 {
		c.Replicas = DefaultReplicas
	}
	if c.Blocks == 0 {
		c.Blocks = DefaultBlocks
	}
	if c.BlockTokens == 0 {
		c.BlockTokens = DefaultBlockTokens
	}
	if c.PrefillRate == 0 {
		c.PrefillRate = DefaultPrefillRate
	}
	if c.Speed == 0 {
		c.Speed = DefaultSpeed
	}
	if c.Workload == "" {
		c.Workload = DefaultWorkload
	}
	if c.Rate == 0 {
		c.Rate = 1
	}
	if c.Scrape == 0 {
		c.Scrape = DefaultScrape
	}
	if len(c.Upstreams) > 0 {
		c.Speed = 1
	} else if c.Model == "" {
		c.Model = enginesim.DefaultModel
	}
	return c
}

func (c Config) check() error {
	switch {
	case c.Replicas < 1:
		return fmt.Errorf("replicas is %d, but must be at least 1", c.Replicas)
	case c.Blocks < 2:
		return fmt.Errorf("blocks is %d, but must be at least 2", c.Blocks)
	case c.BlockTokens < 1:
		return fmt.Errorf("block tokens is %d, but must be at least 1", c.BlockTokens)
	case !(c.PrefillRate > 0):
		return fmt.Errorf("prefill rate is %v, but must be positive", c.PrefillRate)
	case !(c.Speed > 0):
		return fmt.Errorf("speed is %v, but must be positive", c.Speed)
	case !(c.Rate > 0):
		return fmt.Errorf("rate is %v, but must be positive", c.Rate)
	case c.Sessions < 0:
		return fmt.Errorf("sessions is %d, but can't be negative", c.Sessions)
	case c.Limit < 0:
		return fmt.Errorf("limit is %d, but can't be negative", c.Limit)
	case c.Scrape < 0:
		return fmt.Errorf("scrape is %v, but must be positive", c.Scrape)
	}
	return nil
}

// Demo is a fleet with a Caddy in front. Caddy's configuration is one per
// process, so there can be one Demo at a time.
type Demo struct {
	config   Config
	workload workload
	listen   string
	admin    string
	fleet    enginesim.Fleet // nil with real servers
	addrs    []string
	oneCache float64
	fresh    bool // no policy has used the replicas yet
}

// Outcome is what came of a policy.
type Outcome struct {
	// Policy is the policy's name, with its arguments.
	Policy string `json:"policy"`
	// Options is the text of the policy's block in the Caddyfile.
	Options string `json:"options,omitempty"`
	// OneCacheHitRate is the hit rate of the same requests in a single cache as
	// large as those of all simulated replicas together; see
	// [trace.OneCacheHitRate]. 0 with real servers.
	OneCacheHitRate float64 `json:"one_cache_hit_rate,omitempty"`
	// WallSeconds is how long the run took.
	WallSeconds float64 `json:"wall_seconds"`
	// Speed is how many of the result's seconds passed in a real one; see
	// [Config].
	Speed float64 `json:"speed"`
	load.Result
}

// Start checks a configuration and its policies, reads the trace, and starts the replicas or asks
// the real servers for their model. The caller closes the demo.
func Start(ctx context.Context, config Config) (*Demo, error) {
	config = config.withDefaults()
	if err := config.check(); err != nil {
		return nil, err
	}
	d := &Demo{config: config, fresh: true}
	var err error
	if d.workload, err = openWorkload(config); err != nil {
		return nil, err
	}
	if d.listen, err = freeAddress(config.Listen); err != nil {
		return nil, err
	}
	if d.admin, err = freeAddress("127.0.0.1:0"); err != nil {
		return nil, err
	}
	if len(config.Upstreams) > 0 {
		err = d.useServers(ctx)
	} else {
		err = d.startFleet()
	}
	if err == nil {
		err = d.checkPolicies()
	}
	if err != nil {
		d.fleet.Close()
		return nil, err
	}
	return d, nil
}

// checkPolicies finds faults in the last policy before the first has been played.
func (d *Demo) checkPolicies() error {
	for _, p := range d.config.Policies {
		if err := validate(d.caddyfile(p)); err != nil {
			return fmt.Errorf("policy %s: %w", p.Name, err)
		}
	}
	return nil
}

// startFleet starts replicas that are faster by Speed. Their clocks are not: a
// policy that reads durations in their metrics, to learn how fast they are, and
// compares them with its own clock would be led astray.
//
// Their ports are those after Caddy's as far as they are free: prefix_hash
// hashes addresses, so that runs are alike only if these are.
func (d *Demo) startFleet() error {
	_, port, _ := net.SplitHostPort(d.listen)
	first, _ := strconv.Atoi(port)
	for i := range d.config.Replicas {
		s, err := d.startReplica(first + 1 + i)
		if errors.Is(err, syscall.EADDRINUSE) || errors.Is(err, syscall.EACCES) {
			s, err = d.startReplica(0)
		}
		if err != nil {
			return fmt.Errorf("starting a simulated replica: %w", err)
		}
		d.fleet = append(d.fleet, s)
	}
	d.addrs = d.fleet.Addrs()
	var err error
	d.oneCache, err = trace.OneCacheHitRate(d.workload.all(), len(d.fleet)*d.CacheTokens(), d.config.BlockTokens)
	return err
}

func (d *Demo) startReplica(port int) (*enginesim.Server, error) {
	if port > 65535 {
		port = 0
	}
	return enginesim.StartServer(enginesim.ServerConfig{
		Addr: net.JoinHostPort("127.0.0.1", strconv.Itoa(port)),
		Config: enginesim.Config{
			Blocks:       d.config.Blocks,
			BlockTokens:  d.config.BlockTokens,
			PrefillRate:  d.config.PrefillRate * d.config.Speed,
			StepOverhead: d.faster(enginesim.DefaultStepOverhead),
			DecodeCost:   d.faster(enginesim.DefaultDecodeCost),
		},
		Model: d.config.Model,
	})
}

// faster is a time span of the replicas in real time.
func (d *Demo) faster(t time.Duration) time.Duration {
	return max(1, time.Duration(float64(t)/d.config.Speed))
}

func (d *Demo) useServers(ctx context.Context) error {
	d.addrs = d.config.Upstreams
	for _, addr := range d.addrs {
		model, err := modelOf(ctx, addr)
		if err != nil {
			return fmt.Errorf("upstream %s: %w", addr, err)
		}
		if d.config.Model == "" {
			d.config.Model = model
		}
	}
	return nil
}

// URL is where requests are taken, without a trailing slash.
func (d *Demo) URL() string {
	host, port, _ := net.SplitHostPort(d.listen)
	if ip := net.ParseIP(host); ip != nil && ip.IsUnspecified() {
		host = "localhost"
	}
	return "http://" + net.JoinHostPort(host, port)
}

// AdminURL is where Caddy's admin API is, with /metrics in it.
func (d *Demo) AdminURL() string { return "http://" + d.admin }

// Model is the model to ask for.
func (d *Demo) Model() string { return d.config.Model }

// Policies are the policies to play.
func (d *Demo) Policies() []Policy { return d.config.Policies }

// Replicas are the addresses of the replicas.
func (d *Demo) Replicas() []string { return d.addrs }

// Speed is how much faster everything is than it is reported.
func (d *Demo) Speed() float64 { return d.config.Speed }

// Simulated tells whether the replicas are simulated.
func (d *Demo) Simulated() bool { return d.fleet != nil }

// Requests is the number of requests that are played for each policy.
func (d *Demo) Requests() int { return d.workload.requests }

// CacheTokens is the number of tokens that a simulated replica's KV cache holds.
func (d *Demo) CacheTokens() int {
	return enginesim.Config{Blocks: d.config.Blocks, BlockTokens: d.config.BlockTokens}.CapacityTokens()
}

// Play puts a policy in charge and plays the workload from its start, with cold
// replicas: simulated ones are restarted, and for real servers every prompt of
// the run begins with a few characters that no run before had. progress, which
// may be nil, is told how many of how many requests are done.
//
// Caddy keeps serving with the policy after Play. When ctx ends, the outcome is
// that of the requests that were done.
func (d *Demo) Play(ctx context.Context, policy Policy, progress func(done, total int)) (Outcome, error) {
	o := Outcome{Policy: policy.Name, Options: policy.Options, OneCacheHitRate: d.oneCache, Speed: d.config.Speed}
	if err := d.chill(); err != nil {
		return o, err
	}
	if err := serve(ctx, d.caddyfile(policy), d.listen); err != nil {
		return o, fmt.Errorf("policy %s: %w", policy.Name, err)
	}
	options := d.loadOptions(progress)
	if d.fleet == nil {
		salted := newSalted()
		defer salted.next.CloseIdleConnections()
		options.Transport = salted
	}
	begin := time.Now()
	result, err := d.workload.play(ctx, options)
	o.WallSeconds, o.Result = time.Since(begin).Seconds(), result
	return o, err
}

// chill makes the simulated replicas forget what a policy before left in them.
func (d *Demo) chill() error {
	if d.fresh {
		d.fresh = false
		return nil
	}
	for _, s := range d.fleet {
		if err := s.Restart(); err != nil {
			return fmt.Errorf("restarting a simulated replica: %w", err)
		}
	}
	return nil
}

func (d *Demo) loadOptions(progress func(done, total int)) load.Options {
	return load.Options{
		BaseURL:        d.URL(),
		Model:          d.config.Model,
		Speed:          d.config.Speed,
		ActiveSessions: d.config.Sessions,
		ReplicaHeader:  headerReplica,
		ReasonHeader:   headerReason,
		SessionHeader:  headerSession,
		Replicas:       len(d.addrs),
		Total:          d.workload.requests,
		Progress:       progress,
	}
}

// Close stops Caddy and the simulated replicas.
func (d *Demo) Close() error {
	err := stopServing()
	d.fleet.Close()
	return err
}
