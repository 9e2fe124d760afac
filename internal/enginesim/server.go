// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// Version is what /version reports: the vLLM release whose behaviour is modelled.
const Version = "0.32.0"

// Defaults of [ServerConfig].
const (
	DefaultModel         = "sim"
	DefaultBytesPerToken = 4
	DefaultIdleTimeout   = 5 * time.Second // uvicorn's, which vLLM keeps
	DefaultKeepBody      = 256 << 20
)

// ServerConfig describes one server. The zero value of a field stands for its default.
type ServerConfig struct {
	Config

	// Addr is the address to listen on. Default "127.0.0.1:0", any free port.
	Addr string

	// Model is the served model's name. Default "sim".
	Model string

	// Adapters are the names of LoRA adapters, which are served like models.
	Adapters []string

	// Speed is the number of engine seconds in a second of the wall clock.
	// Durations in /metrics are seconds of the wall clock, like the times of
	// whoever reads them. Default 1.
	Speed float64

	// BytesPerToken is the length of a token of text. Default 4.
	BytesPerToken int

	// IdleTimeout closes a keep-alive connection that waits for a request.
	// Default 5 s.
	IdleTimeout time.Duration

	// ScaleOut offers the /render endpoints (--enable-scale-out). Without it they
	// answer 403, as vLLM's do.
	ScaleOut bool

	// Instant answers every inference request at once, without an engine, for
	// measuring what is in front of the server. The prompt is not looked at.
	Instant bool

	// KeepBody is the length up to which a request's body is kept. A longer one is
	// read to its end, counted and summed, but not kept, and is refused with 400
	// unless Instant. Default 256 MiB.
	KeepBody int64

	// Events, if set, takes the KV events: blocks that the prefix cache took in
	// and dropped. Like vLLM's, those of a reset come with the next step.
	Events EventSink

	// OnRequest, if set, sees every request to an inference endpoint and its body,
	// nil if that was too long to be kept, before it is answered. It is called
	// from several goroutines.
	OnRequest func(r *http.Request, body []byte)
}

func (c ServerConfig) withDefaults() ServerConfig {
	c.Config = c.Config.withDefaults()
	if c.Addr == "" {
		c.Addr = "127.0.0.1:0"
	}
	if c.Model == "" {
		c.Model = DefaultModel
	}
	c.Speed = positiveOr(c.Speed, 1)
	c.BytesPerToken = positiveOr(c.BytesPerToken, DefaultBytesPerToken)
	c.IdleTimeout = positiveOr(c.IdleTimeout, DefaultIdleTimeout)
	if c.KeepBody <= 0 {
		c.KeepBody = DefaultKeepBody
	}
	return c
}

// Server is a vLLM-shaped HTTP server. Its methods may be called from any goroutine.
type Server struct {
	config    ServerConfig
	tokenizer tokenizer
	faults    faults

	mu   sync.Mutex // guards the fields below
	addr string
	live *instance // nil while the server is down
}

// instance is the part of a server that a restart replaces: the process, as it were.
type instance struct {
	*Server
	driver   *driver
	http     *http.Server
	cancel   context.CancelFunc
	started  time.Time
	handlers handlerGroup
	serving  chan struct{} // closed when http has returned
	serial   atomic.Int64
	visits   *visits
	memory   *memory
}

// StartServer returns a server that listens and serves. The caller closes it.
func StartServer(config ServerConfig) (*Server, error) {
	config = config.withDefaults()
	if config.BytesPerToken > 64 {
		return nil, fmt.Errorf("bytes per token is %d, use at most 64", config.BytesPerToken)
	}
	s := &Server{
		config:    config,
		tokenizer: tokenizer{bytesPerToken: config.BytesPerToken},
		addr:      config.Addr,
	}
	if err := s.Start(); err != nil {
		return nil, err
	}
	return s, nil
}

// Start starts a server that was stopped: on the same port, with an empty cache, new
// counters and a new start time.
func (s *Server) Start() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.live != nil {
		return fmt.Errorf("server %s is running", s.addr)
	}
	listener, err := listen(s.addr)
	if err != nil {
		return err
	}
	s.addr = listener.Addr().String()
	if s.config.Events != nil {
		s.config.Events.Restart()
	}

	ctx, cancel := context.WithCancel(context.Background())
	p := &instance{
		Server:  s,
		driver:  startDriver(s.config.Config, s.config.Speed, time.Now(), s.config.Events),
		cancel:  cancel,
		started: time.Now(),
		serving: make(chan struct{}),
		visits:  newVisits(),
		memory:  newMemory(),
	}
	if s.faults.paused() || s.faults.stalled() {
		p.driver.stop()
	}
	p.http = &http.Server{
		Handler:     p.handler(),
		IdleTimeout: s.config.IdleTimeout,
		BaseContext: func(net.Listener) context.Context { return ctx },
	}
	s.live = p
	go func() {
		defer close(p.serving)
		// Serve ends with ErrServerClosed; any other error shows as refused connections.
		_ = p.http.Serve(listener)
	}()
	return nil
}

// listen takes a port that may have been given up a moment ago: a process that
// this one starts holds all its sockets until it runs its own program.
func listen(addr string) (listener net.Listener, err error) {
	for range 20 {
		if listener, err = net.Listen("tcp", addr); !errors.Is(err, syscall.EADDRINUSE) {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	return listener, err
}

// Stop kills the server: connections are cut, requests are lost, the port refuses
// connections until Start. It returns when nothing of it is left.
func (s *Server) Stop() {
	s.mu.Lock()
	p := s.live
	s.live = nil
	s.mu.Unlock()
	if p == nil {
		return
	}
	_ = p.http.Close() // first, so that no handler's last words get out
	p.cancel()
	<-p.serving
	p.handlers.wait()
	p.driver.close()
}

// Restart stops the server and starts it again on the same port.
func (s *Server) Restart() error {
	s.Stop()
	return s.Start()
}

// Close stops the server for good.
func (s *Server) Close() { s.Stop() }

// Addr returns the host and port that the server listens on.
func (s *Server) Addr() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.addr
}

// URL returns the server's base URL, without a trailing slash.
func (s *Server) URL() string { return "http://" + s.Addr() }

// Stats returns the figures published by the engine's last step, zero while the
// server is down.
func (s *Server) Stats() Stats {
	if p := s.running(); p != nil {
		return p.driver.stats()
	}
	return Stats{}
}

// running returns the live instance or nil.
func (s *Server) running() *instance {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.live
}

// adapterOf resolves a model name: "" for the base model, else the adapter's name.
func (s *Server) adapterOf(model string) (adapter string, ok bool) {
	if model == "" || model == s.config.Model {
		return "", true
	}
	return model, slices.Contains(s.config.Adapters, model)
}

// StartFleet returns n servers with the same configuration on different ports. An
// Addr with a fixed port makes sense for one server only.
func StartFleet(n int, config ServerConfig) (Fleet, error) {
	fleet := make(Fleet, 0, n)
	for range n {
		s, err := StartServer(config)
		if err != nil {
			fleet.Close()
			return nil, err
		}
		fleet = append(fleet, s)
	}
	return fleet, nil
}

// Fleet is a number of servers.
type Fleet []*Server

// Close stops all servers.
func (f Fleet) Close() {
	for _, s := range f {
		s.Close()
	}
}

// Addrs returns the servers' addresses, in order.
func (f Fleet) Addrs() []string {
	addrs := make([]string, len(f))
	for i, s := range f {
		addrs[i] = s.Addr()
	}
	return addrs
}
