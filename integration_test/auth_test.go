// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/enginesim"
)

// guarded is an engine behind a certificate of its own, which lets in who shows a certificate, and answers for /v1 and
// /tokenize only who has a key.
type guarded struct {
	addr string
	mu   sync.Mutex
	keys map[string]map[string]bool // that were shown, by path
}

func guard(t *testing.T, engine *enginesim.Server, admitted string, keys ...string) (g *guarded, ca string) {
	t.Helper()
	target, err := url.Parse(engine.URL())
	if err != nil {
		t.Fatal(err)
	}
	inner := httputil.NewSingleHostReverseProxy(target)
	transport := new(http.Transport)
	inner.Transport, inner.ErrorLog = transport, log.New(io.Discard, "", 0)
	g = &guarded{keys: make(map[string]map[string]bool)}
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		key, known := strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer "), false
		for _, k := range keys {
			known = known || key == k
		}
		g.mu.Lock()
		if g.keys[r.URL.Path] == nil {
			g.keys[r.URL.Path] = make(map[string]bool)
		}
		g.keys[r.URL.Path][key] = true
		g.mu.Unlock()
		if !known && r.URL.Path != "/metrics" {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		inner.ServeHTTP(w, r)
	}))
	s.Config.ErrorLog = inner.ErrorLog
	clients, file := x509.NewCertPool(), []byte(readFile(t, admitted))
	if !clients.AppendCertsFromPEM(file) {
		t.Fatalf("no certificate in %s", admitted)
	}
	s.TLS = &tls.Config{ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: clients}
	s.StartTLS()
	t.Cleanup(func() {
		s.Close()
		transport.CloseIdleConnections()
	})
	g.addr = s.Listener.Addr().String()
	ca = filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw}), 0o600); err != nil {
		t.Fatal(err)
	}
	return g, filepath.ToSlash(ca)
}

// shown tells which keys came to a path.
func (g *guarded) shown(path string) (keys []string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for key := range g.keys[path] {
		keys = append(keys, key)
	}
	return keys
}

// Engines that want a key and a client's certificate, and have a certificate that they made themselves, are polled, asked
// for tokens and for models by the settings of the proxy's transport and api_key. The key shows nowhere.
func TestEnginesWithKeys(t *testing.T) {
	const ours, theirs = "swordfish-of-the-router", "swordfish-of-a-client"
	cert, key := selfSigned(t)
	config := fast
	config.ScaleOut = true // tells tokens
	g, ca := guard(t, engines(t, 1, config)[0], cert, ours, theirs)
	secret := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(secret, []byte(ours+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	p := start(t, aware([]string{g.addr}, "kv_events tcp://{host}:1\napi_key {file."+filepath.ToSlash(secret)+"}",
		"transport http {\ntls_client_auth "+cert+" "+key+"\ntls_trust_pool file "+ca+"\ntls_server_name example.com\n}"))
	p.awaitScrapes(g.addr)
	ask := func(model string) answer {
		r := p.request(http.MethodPost, chatPath, nil)
		setBody(r, asJSON(map[string]any{"model": model, "messages": []message{{"user", text("of "+model, 2000)}}, "max_tokens": 4}))
		r.Header.Set("Authorization", "Bearer "+theirs)
		return exchange(p.client, r)
	}
	if err := ask("sim").bad(); err != nil {
		t.Error(err)
	}
	await(t, "the prompt's tokens to be learned", func() bool {
		return p.metric("caddy_kv_cache_learner_prompts_total", "outcome", "rendered") == 1
	})
	ask("another")
	await(t, "the list of models to be asked for", func() bool { return len(g.shown("/v1/models")) > 0 })
	for path, want := range map[string]string{chatPath: theirs, chatPath + "/render": ours, "/v1/models": ours, "/metrics": ""} {
		if keys := g.shown(path); len(keys) != 1 || keys[0] != want {
			t.Errorf("%s was asked for with keys %q, want %q alone", path, keys, want)
		}
	}
	told := map[string]string{"the log": p.log.String(), "the page of metrics": string(p.metricsPage().body)}
	for _, path := range []string{"/config/", "/kv_cache/replicas", "/kv_cache/decisions", "/reverse_proxy/upstreams"} {
		_, told[path] = p.ask(http.MethodGet, path, "", nil)
	}
	for where, text := range told {
		if strings.Contains(text, ours) {
			t.Errorf("%s tells the key", where)
		}
	}
}
