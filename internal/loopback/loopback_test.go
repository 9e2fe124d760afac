// SPDX-License-Identifier: Apache-2.0

package loopback

import (
	"io"
	"net"
	"runtime"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
)

func TestFreeAddr(t *testing.T) {
	seen := make(map[string]bool)
	for range 100 {
		addr := FreeAddr(t)
		if seen[addr] {
			t.Fatalf("%s was given twice", addr)
		}
		seen[addr] = true
		l, err := net.Listen("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		l.Close()
	}
}

// Caddy's listeners share a port, so that a new one takes over from an old one.
func TestAwaitOne(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("needs /proc/net/tcp")
	}
	addr := FreeAddr(t)
	shared, err := caddy.ParseNetworkAddress(addr)
	if err != nil {
		t.Fatal(err)
	}
	listen := func() io.Closer {
		l, err := shared.Listen(t.Context(), 0, net.ListenConfig{})
		if err != nil {
			t.Fatal(err)
		}
		return l.(io.Closer)
	}
	AwaitOne(t, addr)
	old := listen()
	AwaitOne(t, addr)
	defer listen().Close()
	if n := listeners(t, addr); n != 2 {
		t.Fatalf("%d sockets listen, want 2", n)
	}
	closed := make(chan struct{})
	time.AfterFunc(20*time.Millisecond, func() {
		old.Close()
		close(closed)
	})
	AwaitOne(t, addr)
	select {
	case <-closed:
	case <-time.After(time.Second):
		t.Error("the wait was over before the old one was closed")
	}
}
