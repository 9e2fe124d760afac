// SPDX-License-Identifier: Apache-2.0

// Package loopback gives tests addresses to listen on that nobody else uses.
package loopback

import (
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

const (
	// Ports below those that systems give to outgoing connections, which would
	// take one between the look and the use of it.
	first     = 13_000
	thousands = 18
)

// given are the ports of tests that run.
var given sync.Map

// FreeAddr returns an address of the loopback interface on which nothing
// listens. It is the test's until that ends: other tests of this process are
// given others, and other processes mostly look in another thousand of ports.
func FreeAddr(tb testing.TB) string {
	tb.Helper()
	base := first + os.Getpid()%thousands*1000
	for range 10_000 {
		port := base + rand.IntN(1000)
		if _, taken := given.LoadOrStore(port, true); taken {
			continue
		}
		addr := net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
		if l, err := net.Listen("tcp", addr); err == nil {
			_ = l.Close()
			tb.Cleanup(func() { given.Delete(port) })
			return addr
		}
		given.Delete(port)
	}
	tb.Fatalf("no free port between %d and %d", base, base+1000)
	return ""
}

// AwaitOne waits until one socket at most listens on an address. After a reload
// Caddy has two for a moment, and what the old one took in is reset when that is
// closed. Where the system does not tell (it is asked as Linux is), it doesn't wait.
func AwaitOne(tb testing.TB, addr string) {
	tb.Helper()
	for end := time.Now().Add(20 * time.Second); listeners(tb, addr) > 1; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			tb.Fatalf("several sockets listen on %s", addr)
		}
	}
}

// listeners is how many sockets listen on an address's port, 0 if that is not known.
func listeners(tb testing.TB, addr string) (n int) {
	tb.Helper()
	_, port, err := net.SplitHostPort(addr)
	if err != nil {
		tb.Fatal(err)
	}
	number, err := strconv.Atoi(port)
	if err != nil {
		tb.Fatal(err)
	}
	table, err := os.ReadFile("/proc/net/tcp")
	if err != nil {
		return 0
	}
	const listening = "0A"
	for row := range strings.Lines(string(table)) {
		if f := strings.Fields(row); len(f) > 3 && f[3] == listening && strings.HasSuffix(f[1], fmt.Sprintf(":%04X", number)) {
			n++
		}
	}
	return n
}
