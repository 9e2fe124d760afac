// SPDX-License-Identifier: Apache-2.0

// Package loopback gives tests addresses to listen on that nobody else uses.
package loopback

import (
	"math/rand/v2"
	"net"
	"os"
	"strconv"
	"sync"
	"testing"
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
