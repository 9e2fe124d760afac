// SPDX-License-Identifier: Apache-2.0

package loopback

import (
	"net"
	"testing"
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
