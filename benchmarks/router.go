// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// router is a program that stands before the engines.
type router struct {
	name    string
	version func(ctx context.Context) (string, error)
	// command serves the engines at listen; spare is another free address, for its metrics or admin API.
	command func(dir, listen, spare string, engines []string) (*exec.Cmd, error)
}

// routers are Caddy's policies and those of the others that are installed.
func routers(c *config) []router {
	var list []router
	for _, policy := range []string{"round_robin", "least_conn", "prefix_hash", "kv_cache_aware"} {
		list = append(list, caddyWith(c.caddy, policy))
	}
	for _, p := range []struct{ name, program, subcommand string }{
		{"sglang-router", "sglang-router", "launch"},
		{"smg", "smg", "launch"},
		{"vllm-router", "vllm-router", ""},
	} {
		bin := filepath.Join(c.venvs, p.name, "bin")
		if _, err := os.Stat(filepath.Join(bin, p.program)); c.venvs == "" || err != nil {
			continue
		}
		list = append(list, router{
			name: p.name,
			version: func(ctx context.Context) (string, error) {
				return output(exec.CommandContext(ctx, filepath.Join(bin, "python"), "-c",
					"import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))", p.name))
			},
			command: func(dir, listen, spare string, engines []string) (*exec.Cmd, error) {
				host, port, _ := net.SplitHostPort(listen)
				_, metrics, _ := net.SplitHostPort(spare)
				args := []string{
					"--host", host, "--port", port, "--prometheus-host", host, "--prometheus-port", metrics,
					"--policy", "cache_aware", "--worker-urls",
				}
				for _, e := range engines {
					args = append(args, "http://"+e)
				}
				if p.subcommand != "" {
					args = append([]string{p.subcommand}, args...)
				}
				return exec.Command(filepath.Join(bin, p.program), args...), nil
			},
		})
	}
	return list
}

func caddyWith(binary, policy string) router {
	return router{
		name: policy,
		version: func(ctx context.Context) (string, error) {
			v, err := output(exec.CommandContext(ctx, binary, "version"))
			first, _, _ := strings.Cut(v, " ")
			return "Caddy " + first, err
		},
		command: func(dir, listen, spare string, engines []string) (*exec.Cmd, error) {
			host, port, _ := net.SplitHostPort(listen)
			file := filepath.Join(dir, "Caddyfile")
			text := fmt.Sprintf(`{
	admin %s
	persist_config off
	auto_https off
	grace_period 1s
	log {
		level ERROR
	}
}
http://:%s {
	bind %s
	reverse_proxy %s {
		lb_policy %s
		transport http {
			keepalive 4s
			keepalive_idle_conns_per_host 1024
		}
	}
}
`, spare, port, host, strings.Join(engines, " "), policy)
			if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
				return nil, err
			}
			return exec.Command(binary, "run", "--config", file, "--adapter", "caddyfile"), nil
		},
	}
}

func output(cmd *exec.Cmd) (string, error) {
	out, err := cmd.Output()
	return strings.TrimSpace(string(out)), err
}

// running is a router that was started.
type running struct {
	cmd    *exec.Cmd
	url    string
	dir    string
	log    bytes.Buffer
	exited chan struct{}
}

func (r router) start(ctx context.Context, engines []string) (*running, error) {
	listen, err := freeAddr()
	if err != nil {
		return nil, err
	}
	spare, err := freeAddr()
	if err != nil {
		return nil, err
	}
	p := &running{url: "http://" + listen, exited: make(chan struct{})}
	if p.dir, err = os.MkdirTemp("", "router-"); err != nil {
		return nil, err
	}
	if p.cmd, err = r.command(p.dir, listen, spare, engines); err != nil {
		_ = os.RemoveAll(p.dir)
		return nil, err
	}
	p.cmd.Env = append(os.Environ(), "HOME="+p.dir, "XDG_DATA_HOME="+p.dir, "XDG_CONFIG_HOME="+p.dir)
	p.cmd.Stdout, p.cmd.Stderr = &p.log, &p.log
	inOwnGroup(p.cmd)
	if err := p.cmd.Start(); err != nil {
		_ = os.RemoveAll(p.dir)
		return nil, err
	}
	go func() {
		_ = p.cmd.Wait() // stop ends it, and then it has no status of interest
		close(p.exited)
	}()
	return p, p.await(ctx)
}

// await waits until the router answers, which some do only once they have seen their engines well.
func (p *running) await(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	for {
		if _, err := ask(ctx, p.url, chat("hello", 100)); err == nil {
			return nil
		}
		select {
		case <-p.exited:
			return fmt.Errorf("it ended: %s", last(p.log.String(), 400))
		case <-ctx.Done():
			return fmt.Errorf("it does not answer: %w", ctx.Err())
		case <-time.After(100 * time.Millisecond):
		}
	}
}

func last(text string, n int) string { return text[max(0, len(text)-n):] }

func (p *running) stop() {
	endGroup(p.cmd)
	<-p.exited
	_ = os.RemoveAll(p.dir)
}

func freeAddr() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer l.Close()
	return l.Addr().String(), nil
}
