// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/quic-go/quic-go/http3"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/loopback"
)

// http3Drill has clients that speak HTTP/3: they ask, and leave in mid-stream.
var http3Drill = []drill{{
	number: "37b", name: "HTTP/3 clients ask, and leave in mid-stream", compare: true, seldom: true,
	kept: 8, // its listener's connections end a moment after their clients
	extra: func(x *exercise) string {
		x.secure = loopback.FreeAddr(x)
		cert, key := selfSigned(x)
		_, port, _ := net.SplitHostPort(x.secure) // of an address that FreeAddr made
		return fmt.Sprintf("https://127.0.0.1:%s {\nbind 127.0.0.1\ntls %s %s\n%s}\n", port, cert, key, x.directives(x.addrs))
	},
	disturb: func(x *exercise) {
		transport := &http3.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}} // signed by nobody
		defer transport.Close()
		client := &http.Client{Transport: transport, Timeout: patience}
		send := func(ctx context.Context, body string) answer {
			r, err := http.NewRequestWithContext(ctx, http.MethodPost, "https://"+x.secure+chatPath, nil)
			if err != nil {
				return answer{err: err}
			}
			setBody(r, body)
			return exchange(client, r)
		}
		inParallel(200, 20, func(i int) {
			if err := send(x.Context(), ask(text(fmt.Sprint("http3 ", i%10), 100*(i%200)))).bad(); err != nil {
				x.Error(err)
			}
		})
		inParallel(50, 50, func(i int) {
			ctx, cancel := context.WithTimeout(x.Context(), time.Second)
			defer cancel()
			if a := send(ctx, streamed(text(fmt.Sprint("http3 stream ", i), 1000), endless)); a.err == nil {
				x.Errorf("stream %d ended by itself: %d", i, a.status)
			}
		})
	},
}}

// selfSigned writes a certificate for 127.0.0.1 and its key.
func selfSigned(x testing.TB) (cert, key string) {
	x.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		x.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	public, err := x509.CreateCertificate(rand.Reader, template, template, &private.PublicKey, private)
	if err != nil {
		x.Fatal(err)
	}
	secret, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		x.Fatal(err)
	}
	dir := x.TempDir()
	write := func(name, kind string, content []byte) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: content}), 0o600); err != nil {
			x.Fatal(err)
		}
		return filepath.ToSlash(path)
	}
	return write("cert.pem", "CERTIFICATE", public), write("key.pem", "PRIVATE KEY", secret)
}
