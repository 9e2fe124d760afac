//go:build unix

// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"fmt"
	"net"
	"net/http"
	"os/exec"
	"syscall"
	"time"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/enginesim"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/loopback"
)

// processes are drills with processes, whose signals and limits are not the same on every system.
var processes = []drill{
	{
		number: "07", name: "stopped (SIGSTOP) and continued", hangs: true, compare: true, seldom: true, spread: true, replicas: 2,
		engine: func(_ int, c *enginesim.ServerConfig) { c.Speed = 1 }, // as the process has it
		others: startOutside,
		disturb: func(x *exercise) {
			begin := time.Now()
			x.signal(syscall.SIGSTOP)
			x.awaitAvoided(x.outside)
			time.Sleep(time.Until(begin.Add(time.Duration(sized(0, 20)) * time.Second)))
		},
		mend: func(x *exercise) { x.signal(syscall.SIGCONT); x.awaitUseOf(x.outside) },
		check: func(x *exercise) {
			if some := x.of(func(r record) bool {
				return r.phase == during && r.began.After(x.known) && r.replica == x.outside
			}); len(some) > 0 {
				x.Errorf("%d requests were sent to a process that was known to stand still", len(some))
			}
		},
	},
	{
		number: "34a", name: "file descriptors exhausted", files: 100, compare: true, seldom: true,
		disturb: exhaust,
	},
	{
		number: "34b", name: "file descriptors exhausted, before prefix_hash", files: 100, hash: true,
		excused: []string{"status 502", "status 503"}, // it lets nothing wait for a connection
		disturb: exhaust,
	},
	{
		number: "35", name: "GOMEMLIMIT of 40 MiB, prompts of 200 kB", compare: true, seldom: true, env: []string{"GOMEMLIMIT=40MiB"},
		engine: func(_ int, c *enginesim.ServerConfig) { c.PrefillRate = 1e6 },
		disturb: func(x *exercise) {
			inParallel(200, 100, func(i int) { x.expect(ask(text(fmt.Sprint("flood ", i), 200_000))) })
		},
	},
	{
		number: "40", name: "Caddy replaced in place by another process", compare: true, seldom: true, resend: true,
		disturb: func(x *exercise) {
			old, next := x.proxy, newProxy(x.T)
			next.addr, next.page, next.level = old.addr, old.page, old.level
			// Both listen at the address, as Caddy does where the system lets it.
			next.run(next.caddyfile(x.directives(x.addrs)))
			x.proxy = next
			x.awaitScrapes(x.fleetAddrs()...)
			x.first.Store(next)
			begin := time.Now()
			old.stop()
			x.note = fmt.Sprintf("; the old process took %.1f s to end", time.Since(begin).Seconds())
		},
	},
}

// exhaust takes all descriptors that Caddy has left, by more idle clients than it can accept.
func exhaust(x *exercise) {
	var open []net.Conn
	for range 150 {
		if c, err := net.Dial("tcp", x.proxy.addr); err == nil {
			open = append(open, c)
		}
	}
	time.Sleep(3 * time.Second)
	for _, c := range open {
		_ = c.Close()
	}
}

// startOutside starts a replica in a process of its own.
func startOutside(x *exercise) []string {
	x.outside = loopback.FreeAddr(x)
	cmd := exec.Command(binary(x), "kv-cache", "simulate", "--listen", x.outside)
	if err := cmd.Start(); err != nil {
		x.Fatal(err)
	}
	x.process = cmd.Process
	x.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // it was killed
	})
	await(x, "the process to serve", func() bool {
		resp, err := http.Get("http://" + x.outside + "/health")
		if err != nil {
			return false
		}
		_ = resp.Body.Close()
		http.DefaultClient.CloseIdleConnections()
		return resp.StatusCode == http.StatusOK
	})
	return []string{x.outside}
}

func (x *exercise) signal(s syscall.Signal) {
	x.Helper()
	if err := x.process.Signal(s); err != nil {
		x.Fatal(err)
	}
}
