// SPDX-License-Identifier: Apache-2.0

package selection

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

func TestEventAddresses(t *testing.T) {
	tests := []struct {
		endpoint, addr string
		rank           int
		want           string // "": there is none
	}{
		{"tcp://{host}:5557", "10.0.0.7:8000", 0, "tcp://10.0.0.7:5557"},
		{"tcp://{host}:5557", "10.0.0.7:8000", 3, "tcp://10.0.0.7:5560"},
		{"tcp://{host}:5557", "tcp/vllm-0:8000", 0, "tcp://vllm-0:5557"},
		{"tcp://{host}:{port+100}", "vllm-0:8000", 0, "tcp://vllm-0:8100"},
		{"tcp://{host}:{port-100}", "vllm-0:8000", 1, "tcp://vllm-0:7901"},
		{"tcp://{host}:{port}", "vllm-0:8000", 0, "tcp://vllm-0:8000"},
		{"tcp://{host}:5557", "[::1]:8000", 0, "tcp://[::1]:5557"},
		{"tcp://events.example:5557", "vllm-0:8000", 2, "tcp://events.example:5559"},
		{"tcp://{host}:{port+100}", "vllm-0:65500", 0, ""},
		{"tcp://{host}:65535", "vllm-0:8000", 1, ""},
		{"tcp://{host}:{port-9000}", "vllm-0:8000", 0, ""},
		{"tcp://{host}:{port+x}", "vllm-0:8000", 0, ""},
		{"tcp://{host}", "vllm-0:8000", 0, ""},
		{"tcp://*:5557", "vllm-0:8000", 0, ""},
		{"udp://{host}:5557", "vllm-0:8000", 0, ""},
		{"tcp://{host}:5557", "unix//run/vllm.sock", 0, ""},
		{"tcp://{host}:5557", "{http.request.header.X-Host}:8000", 0, ""},
		{"tcp://{host}:{port}", "vllm-0", 0, ""},
	}
	for _, c := range tests {
		cfg, ok := (&Events{Endpoint: c.endpoint}).stream(c.addr, c.rank)
		if !ok {
			cfg.Endpoint = ""
		}
		if cfg.Endpoint != c.want {
			t.Errorf("%s for rank %d of %s: %q, want %q", c.endpoint, c.rank, c.addr, cfg.Endpoint, c.want)
		}
		replay, ok := (&Events{Endpoint: "tcp://a:1", Replay: c.endpoint}).stream(c.addr, c.rank)
		if !ok {
			replay.Replay = ""
		}
		if replay.Replay != c.want {
			t.Errorf("replay %s for rank %d of %s: %q, want %q", c.endpoint, c.rank, c.addr, replay.Replay, c.want)
		}
	}
}

func TestEventsValidate(t *testing.T) {
	for _, c := range []struct {
		events *Events
		want   string
	}{
		{nil, ""},
		{&Events{Endpoint: "tcp://{host}:5557"}, ""},
		{&Events{Endpoint: "tcp://{host}:5557", Replay: "tcp://{host}:5558"}, ""},
		{&Events{Endpoint: "tcp://{host}:{port-10000}"}, ""}, // below 8000, of ports above 10000
		{&Events{Endpoint: "tcp://{host}:{port+60000}"}, ""},
		{&Events{Endpoint: "tcp://{host}:{port+70000}"}, "must be like"},
		{&Events{Replay: "tcp://{host}:5558"}, "without kv_events"},
		{&Events{Endpoint: "{host}:5557"}, "must be like tcp://{host}:5557"},
		{&Events{Endpoint: "tcp://{host}:5557", Replay: "5558"}, "must be like tcp://{host}:5557"},
		{&Events{Endpoint: "tcp://{http.request.uri}:5557"}, "no other placeholders"},
	} {
		err := c.events.validate()
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: error is %v, want %q", c.events, err, c.want)
		}
	}
}

func TestAPIKey(t *testing.T) {
	t.Setenv("ENGINE_KEY", "s3cret\n")
	a, err := api(nil, "{env.ENGINE_KEY}")
	if err != nil {
		t.Fatal(err)
	}
	if got := a.Header.Get("Authorization"); got != "Bearer s3cret" {
		t.Errorf("the key is sent as %q", got)
	}
	if _, err := api(nil, "{env.NO_SUCH_KEY}"); err == nil {
		t.Error("a key that is missing is taken for an empty one")
	}
	if a, err = api(nil, ""); err != nil || len(a.Header) != 0 {
		t.Errorf("without a key: %v, error %v", a.Header, err)
	}
	for addr, want := range map[string]string{
		"vllm-0:8000": "http://vllm-0:8000", "[::1]:8000": "http://[::1]:8000", "vllm-0": "http://vllm-0:80",
		"unix//run/vllm.sock": "", "{http.request.host}:80": "",
	} {
		if base, ok := a.Base(addr); base != want && ok {
			t.Errorf("base of %s: %q, want %q", addr, base, want)
		}
	}
}

func TestPinsRank(t *testing.T) {
	for field, want := range map[string]bool{
		"": false, "X-Rank {http.reverse_proxy.kv_cache.replica}": false, "X-data-parallel-rank {http.reverse_proxy.kv_cache.rank}": true,
		"X-data-parallel-rank {rp.kv_cache.rank}": true, "+X-data-parallel-rank {http.reverse_proxy.kv_cache.rank}": true,
	} {
		if field != "" {
			field = "header_up " + field
		}
		adapted, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(":1 {\nreverse_proxy a:1 {\n"+field+"\n}\n}"), nil)
		if err != nil {
			t.Fatal(err)
		}
		_, text, _ := strings.Cut(string(adapted), `"handle":[`)
		var h reverseproxy.Handler
		if err := json.NewDecoder(strings.NewReader(text)).Decode(&h); err != nil {
			t.Fatal(err)
		}
		if got := pinsRank(&h); got != want {
			t.Errorf("%q: %t, want %t", field, got, want)
		}
	}
	if pinsRank(nil) {
		t.Error("no proxy pins")
	}
}

// The Caddyfile's own options for events load, and a key that is missing is reported when the config is.
func TestEventsProvision(t *testing.T) {
	ctx := newContext(t)
	for config, want := range map[string]string{
		`{"kv_events": {"endpoint": "tcp://{host}:5557"}}`: "",
		`{"kv_events": {"endpoint": "tcp://nobody"}}`:      "kv_events is",
		`{"api_key": "{env.NO_SUCH_KEY}"}`:                 "api_key",
	} {
		_, err := ctx.LoadModuleByID(policyNamespace+"kv_cache_aware", []byte(config))
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error is %v, want %q", config, err, want)
		}
	}
}
