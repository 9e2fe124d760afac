// SPDX-License-Identifier: Apache-2.0

// Package vllm runs real vLLM servers on the CPU for integration tests: paged
// prefix cache, /metrics and KV events of the engine itself, with a random model
// and no GPU. It needs an installation made by "run.sh install", and Linux on
// x86-64; elsewhere [Start] answers [ErrUnavailable] and the tests skip.
package vllm

import (
	"bufio"
	"context"
	"embed"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// ErrUnavailable says that no vLLM can be had on this machine: another platform,
// or no finished installation. The error that wraps it says which, and the remedy.
var ErrUnavailable = errors.New("vllm unavailable")

// unavailableStatus is the exit status with which run.sh says the same.
const unavailableStatus = 77

// Ports of one replica, counted from its API port; run.sh and vLLM's data
// parallelism (rank r listens on port + r) fix the distances.
const (
	eventPortOffset  = 100
	replayPortOffset = 200
)

const (
	// defaultStartTimeout bounds the start of a fleet: a replica needs some 20 s of
	// one core to import Python modules before it listens.
	defaultStartTimeout = 5 * time.Minute
	stopTimeout         = 15 * time.Second
	healthInterval      = 200 * time.Millisecond
	logTailLines        = 25
)

//go:embed run.sh mk_tiny_model.py requirements.lock cuda.lock
var scripts embed.FS

// Options says what fleet to start. The zero value is one replica of the tiny model.
type Options struct {
	// Replicas is the number of servers, 1 when 0. Each takes about one core and
	// 20 s to start, and 1.4 GB of memory.
	Replicas int

	// Model is the size of the random model, and the name it is served under:
	// "tiny" (the default), "small" or "mid". Prefill of 2,000 tokens takes one
	// core about 0.03 s, 0.24 s and 1.2 s. "vision", about as quick as tiny, takes
	// an image with a prompt. One byte of text is one token, an image is 64.
	Model string

	// Blocks is the capacity of each replica's KV cache in blocks of 32 tokens, 400
	// when 0.
	Blocks int

	// MaxLen is the context length in tokens, 4096 when 0.
	MaxLen int

	// FirstPort is the first replica's API port; the others follow. KV events are
	// 100 ports above, replay 200. When 0, a free range is looked for.
	FirstPort int

	// Extra holds more flags for the server. They must not contain blanks.
	Extra []string

	// StartTimeout bounds the start of each replica, 5 minutes when 0.
	StartTimeout time.Duration
}

// Fleet is a set of running vLLM servers. Its lists have one entry per replica.
type Fleet struct {
	URLs    []string // base URLs of the API, as in http://127.0.0.1:8100
	Events  []string // ZMQ PUB endpoints of the KV events, as in tcp://127.0.0.1:8200
	Replays []string // ZMQ ROUTER endpoints that replay KV events
	Model   string   // the served model's name
	Python  string   // interpreter of the installation, with pyzmq and msgspec

	options Options
	dir     string // scripts, logs and the engine's own caches

	mu       sync.Mutex // serializes Restart and Close, and guards replicas
	replicas []*process
}

// Start starts a fleet and returns when all its replicas answer /health. The error
// wraps [ErrUnavailable] when there is no vLLM to start; it never installs one.
// Canceling ctx stops only the start; stop the fleet with [Fleet.Close].
func Start(ctx context.Context, options Options) (*Fleet, error) {
	options = withDefaults(options)
	for _, flag := range options.Extra {
		if strings.ContainsAny(flag, " \t\n") {
			return nil, fmt.Errorf("server flag %q contains a blank; write --flag=value", flag)
		}
	}
	dir, err := os.MkdirTemp("", "vllm-fleet-")
	if err != nil {
		return nil, err
	}
	fleet := &Fleet{Model: options.Model, options: options, dir: dir, replicas: make([]*process, options.Replicas)}
	if err := fleet.start(ctx); err != nil {
		return nil, errors.Join(err, fleet.Close())
	}
	return fleet, nil
}

func withDefaults(o Options) Options {
	o.Replicas = orDefault(o.Replicas, 1)
	o.Blocks = orDefault(o.Blocks, 400)
	o.MaxLen = orDefault(o.MaxLen, 4096)
	o.StartTimeout = orDefault(o.StartTimeout, defaultStartTimeout)
	if o.Model == "" {
		o.Model = "tiny"
	}
	return o
}

func orDefault[T int | time.Duration](v, fallback T) T {
	if v == 0 {
		return fallback
	}
	return v
}

func (f *Fleet) start(ctx context.Context) error {
	if err := os.CopyFS(f.dir, scripts); err != nil {
		return err
	}
	python, err := f.installedPython(ctx)
	if err != nil {
		return err
	}
	f.Python = python
	if f.options.FirstPort == 0 {
		if f.options.FirstPort, err = freePorts(f.options.Replicas); err != nil {
			return err
		}
	}
	for i := range f.options.Replicas {
		port := f.options.FirstPort + i
		f.URLs = append(f.URLs, "http://"+hostPort(port))
		f.Events = append(f.Events, "tcp://"+hostPort(port+eventPortOffset))
		f.Replays = append(f.Replays, "tcp://"+hostPort(port+replayPortOffset))
		if err := f.launch(i); err != nil {
			return err
		}
	}
	for i := range f.replicas {
		if err := f.awaitHealthy(ctx, i); err != nil {
			return err
		}
	}
	return nil
}

// installedPython returns the interpreter of the finished installation.
func (f *Fleet) installedPython(ctx context.Context) (string, error) {
	if !supported {
		return "", fmt.Errorf("%w: needs Linux on x86-64", ErrUnavailable)
	}
	cmd := exec.CommandContext(ctx, "bash", filepath.Join(f.dir, "run.sh"), "status")
	var complaint strings.Builder
	cmd.Stderr = &complaint
	out, err := cmd.Output()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok && exit.ExitCode() == unavailableStatus {
		return "", fmt.Errorf("%w: run integration_test/vllm/run.sh install first (%s)",
			ErrUnavailable, strings.TrimSpace(complaint.String()))
	}
	if err != nil {
		return "", fmt.Errorf("run.sh status: %w: %s", err, strings.TrimSpace(complaint.String()))
	}
	return strings.TrimSpace(string(out)), nil
}

// launch starts replica i without waiting for it.
func (f *Fleet) launch(i int) error {
	dir := filepath.Join(f.dir, "replica-"+strconv.Itoa(i))
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	cmd := exec.Command("bash", filepath.Join(f.dir, "run.sh"), "serve", dir, strconv.Itoa(f.options.FirstPort+i))
	cmd.Env = append(os.Environ(),
		"MODEL="+f.options.Model,
		"BLOCKS="+strconv.Itoa(f.options.Blocks),
		"MAX_LEN="+strconv.Itoa(f.options.MaxLen),
		"VLLM_EXTRA="+strings.Join(f.options.Extra, " "),
		"WATCH_STDIN=1",
	)
	p, err := startProcess(cmd, f.logFile(i))
	if err != nil {
		return fmt.Errorf("start replica %d: %w", i, err)
	}
	f.replicas[i] = p
	return nil
}

// awaitHealthy waits until replica i answers /health with 200.
func (f *Fleet) awaitHealthy(ctx context.Context, i int) error {
	ctx, cancel := context.WithTimeout(ctx, f.options.StartTimeout)
	defer cancel()
	tick := time.NewTicker(healthInterval)
	defer tick.Stop()
	for {
		if healthy(ctx, f.URLs[i]) {
			return nil
		}
		select {
		case <-tick.C:
		case <-f.replicas[i].done:
			return fmt.Errorf("replica %d ended before it was healthy; its log ends with\n%s", i, f.logTail(i))
		case <-ctx.Done():
			return fmt.Errorf("replica %d is not healthy: %w; its log ends with\n%s", i, ctx.Err(), f.logTail(i))
		}
	}
}

func healthy(ctx context.Context, url string) bool {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url+"/health", nil)
	if err != nil {
		return false
	}
	req.Close = true // no idle connection, and no goroutine of one, stays behind
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return false
	}
	defer resp.Body.Close()
	return resp.StatusCode == http.StatusOK
}

// Restart stops replica i if it still runs, starts it anew on the same ports with
// an empty cache, and returns when it answers /health.
func (f *Fleet) Restart(ctx context.Context, i int) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.replicas[i].stop(stopTimeout); err != nil {
		return fmt.Errorf("stop replica %d: %w", i, err)
	}
	if err := f.launch(i); err != nil {
		return err
	}
	return f.awaitHealthy(ctx, i)
}

// Signal sends sig to all processes of replica i: SIGKILL for a crash, SIGSTOP and
// SIGCONT for a hang. After a crash, [Fleet.Restart] brings the replica back.
func (f *Fleet) Signal(i int, sig syscall.Signal) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.replicas[i].signal(sig)
}

// Close stops all replicas and removes their logs. Closing again does nothing.
func (f *Fleet) Close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	errs := make([]error, len(f.replicas)+1)
	var stopping sync.WaitGroup
	for i, p := range f.replicas {
		if p != nil {
			stopping.Go(func() { errs[i] = p.stop(stopTimeout) })
		}
	}
	stopping.Wait()
	errs[len(f.replicas)] = os.RemoveAll(f.dir)
	return errors.Join(errs...)
}

func (f *Fleet) logFile(i int) string {
	return filepath.Join(f.dir, "replica-"+strconv.Itoa(i)+".log")
}

// logTail returns the last lines that replica i logged.
func (f *Fleet) logTail(i int) string {
	file, err := os.Open(f.logFile(i))
	if err != nil {
		return err.Error()
	}
	defer file.Close()
	var tail []string
	for lines := bufio.NewScanner(file); lines.Scan(); {
		tail = append(tail, lines.Text())
		if len(tail) > logTailLines {
			tail = slices.Delete(tail, 0, 1)
		}
	}
	return strings.Join(tail, "\n")
}

func hostPort(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }

// freePorts returns the first of n consecutive API ports whose event and replay
// ports are free too. It looks below the range from which systems give out ports
// themselves; another program may still take one before the replicas do.
func freePorts(n int) (int, error) {
	const first, last, span = 12000, 30000, 300
	start := first + span*(os.Getpid()%((last-first)/span))
	for port := start; port < last; port += span {
		if portsFree(port, n) {
			return port, nil
		}
	}
	return 0, fmt.Errorf("no free ports for %d replicas in %d-%d; set FirstPort", n, start, last)
}

func portsFree(first, n int) bool {
	for _, offset := range []int{0, eventPortOffset, replayPortOffset} {
		for i := range n {
			l, err := net.Listen("tcp", hostPort(first+offset+i))
			if err != nil {
				return false
			}
			_ = l.Close()
		}
	}
	return true
}
