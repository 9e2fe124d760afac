// SPDX-License-Identifier: Apache-2.0

package page

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	_ "github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	_ "github.com/caddyserver/caddy/v2/modules/filestorage"
	_ "github.com/caddyserver/caddy/v2/modules/metrics"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/enginesim"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/load"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/loopback"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/trace"
	_ "github.com/seed-2fa47a1e/caddy-kv-cache/selection"
)

// secret is what must be found nowhere.
const secret = "the quick brown fox knows a secret "

// site is a Caddy in this process.
type site struct{ addr string }

// serve runs a Caddy whose only site is given, until the test ends.
func serve(t *testing.T, directives string) *site {
	t.Helper()
	s := &site{loopback.FreeAddr(t)}
	t.Cleanup(func() {
		if err := caddy.Stop(); err != nil {
			t.Error(err)
		}
	})
	s.load(t, directives)
	return s
}

func (s *site) load(t *testing.T, directives string) {
	t.Helper()
	config, err := adapt(fmt.Sprintf("{\n\tadmin off\n\tpersist_config off\n\tstorage file_system %s\n\tlog {\n\t\toutput discard\n\t}\n}\nhttp://%s {\n%s\n}\n",
		t.TempDir(), s.addr, directives))
	if err != nil {
		t.Fatal(err)
	}
	if err := caddy.Load(config, true); err != nil {
		t.Fatal(err)
	}
	loopback.AwaitOne(t, s.addr)
}

func adapt(text string) ([]byte, error) {
	config, _, err := caddyfile.Adapter{ServerType: httpcaddyfile.ServerType{}}.Adapt([]byte(text), nil)
	return config, err
}

// engines starts simulated engines until the test ends.
func engines(t *testing.T, n int, config enginesim.ServerConfig) []string {
	t.Helper()
	var fleet enginesim.Fleet
	t.Cleanup(func() { fleet.Close() })
	for range n {
		e, err := enginesim.StartServer(config)
		if err != nil {
			t.Fatal(err)
		}
		fleet = append(fleet, e)
	}
	return fleet.Addrs()
}

// fetch asks for something of the site.
func (s *site) fetch(t *testing.T, method, uri string) (*http.Response, string) {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), method, "http://"+s.addr+uri, nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp, string(body)
}

// data asks for what the page shows.
func (s *site) data(t *testing.T, query string) Data {
	t.Helper()
	resp, body := s.fetch(t, http.MethodGet, "/kv?data"+query)
	if resp.StatusCode != http.StatusOK {
		t.Fatalf("status %d: %s", resp.StatusCode, body)
	}
	var d Data
	if err := json.Unmarshal([]byte(body), &d); err != nil {
		t.Fatal(err)
	}
	return d
}

// complete sends a prompt for a model.
func (s *site) complete(t *testing.T, model, text string) {
	t.Helper()
	body, err := json.Marshal(map[string]any{"model": model, "prompt": text, "max_tokens": 2})
	if err != nil {
		t.Fatal(err)
	}
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+s.addr+"/v1/completions", strings.NewReader(string(body)))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if _, err := io.Copy(io.Discard, resp.Body); err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("status %d: %v", resp.StatusCode, err)
	}
}

// play has chats going on at the site until the test ends or the time is over.
func (s *site) play(t *testing.T, w trace.Workload, sessions int, speed float64) {
	ctx, stop := context.WithCancel(context.Background())
	var playing sync.WaitGroup
	t.Cleanup(func() { stop(); playing.Wait() })
	playing.Go(func() {
		for seed := uint64(1); ctx.Err() == nil; seed++ {
			w.Seed = seed
			_, err := load.ClosedLoop(ctx, w.Sessions(), load.Options{BaseURL: "http://" + s.addr, Model: "sim", Speed: speed, ActiveSessions: sessions})
			if err != nil && !errors.Is(err, context.Canceled) {
				t.Error(err)
				return
			}
		}
	})
}

func await(t *testing.T, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !is(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("waited in vain for %s", what)
		}
	}
}

func TestMain(m *testing.M) {
	flag.Parse()
	http.DefaultTransport.(*http.Transport).DisableKeepAlives = true
	status := m.Run()
	if status == 0 {
		if err := goleak.Find(goleak.IgnoreAnyFunction("github.com/golang/glog.(*fileSink).flushDaemon"), goleak.IgnoreCurrent()); err != nil {
			fmt.Fprintln(os.Stderr, err)
			status = 1
		}
	}
	os.Exit(status)
}
