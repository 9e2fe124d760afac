// SPDX-License-Identifier: Apache-2.0

package selection

import (
	"bytes"
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	_ "github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
)

var update = flag.Bool("update", false, "write the JSON that the Caddyfiles in testdata/adapt adapt to")

const separator = "----------\n"

// Each file in testdata/adapt is a Caddyfile, a line of dashes, and the JSON
// that it adapts to or a part of the error that it gives, as in Caddy's own
// tests.
func TestAdapt(t *testing.T) {
	files, err := filepath.Glob("testdata/adapt/*.caddyfiletest")
	if err != nil || len(files) == 0 {
		t.Fatalf("no files: %v", err)
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			source, expected, ok := strings.Cut(strings.ReplaceAll(string(text), "\r\n", "\n"), separator)
			if !ok {
				t.Fatal("there is no line of dashes")
			}
			if formatted := string(caddyfile.Format([]byte(source))); formatted != source {
				t.Errorf("`caddy fmt` would change it to\n%s", formatted)
			}
			result, warnings, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(source), nil)
			if expected = strings.TrimSpace(expected); expected != "" && expected[0] != '{' {
				if err == nil || !strings.Contains(err.Error(), expected) {
					t.Errorf("error is %v, want %s", err, expected)
				}
				return
			}
			if err != nil || len(warnings) > 0 {
				t.Fatalf("%v, warnings %v", err, warnings)
			}
			var pretty bytes.Buffer
			if err := json.Indent(&pretty, result, "", "\t"); err != nil {
				t.Fatal(err)
			}
			if *update {
				if err := os.WriteFile(file, []byte(source+separator+pretty.String()+"\n"), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			if pretty.String() != expected {
				t.Errorf("adapted to\n%s\nwant\n%s", pretty.String(), expected)
			}
		})
	}
}

// What adapts must also load: names of fields and of options are two lists.
func TestAdaptedConfigLoads(t *testing.T) {
	t.Setenv("SEED", "s3cret")
	ctx := newContext(t)
	for _, policy := range []struct {
		name   string
		config caddyfile.Unmarshaler
		text   string
	}{
		{"kv_cache_aware", new(KVCacheAware), `kv_cache_aware {
			name n
			match_weight 2
			request_cost 1
			kv_capacity 10
			max_body 10
			kv_events tcp://{host}:5557
			kv_events_replay tcp://{host}:{port+200}
			api_key {env.SEED}
			pin_header X
			tenant {http.auth.user.id}
			fallback first
			metrics_uri /m
			metrics_port 80
			metrics_scheme http
			metrics_interval 1s
			metrics_timeout 1s
			metrics_headers {
				A b
			}
		}`},
		{"prefix_hash", new(PrefixHash), `prefix_hash {
			name n
			prefix 1KiB
			header X
			load_factor 1
			slack 1
			seed {env.SEED}
			tenant {http.request.header.Authorization}
			max_body 10
			fallback first
		}`},
	} {
		if err := policy.config.UnmarshalCaddyfile(caddyfile.NewTestDispenser(policy.text)); err != nil {
			t.Fatal(err)
		}
		config, err := json.Marshal(policy.config)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := ctx.LoadModuleByID(policyNamespace+policy.name, config); err != nil {
			t.Errorf("%s: %v", config, err)
		}
	}
}

// What the parser refuses, and what it says about it.
func TestCaddyfileErrors(t *testing.T) {
	for _, tt := range []struct{ options, want string }{
		{"name", "wrong argument count"},
		{"name a b", "wrong argument count"},
		{"name a\nname b", "name already specified"},
		{`name ""`, "name is '', but must be given"},
		{"match_weight", "wrong argument count"},
		{"match_weight x", "match_weight is 'x', but must be a positive number"},
		{"match_weight 0", "match_weight is '0', but must be a positive number"},
		{"match_weight -1", "match_weight is '-1', but must be a positive number"},
		{"match_weight NaN", "match_weight is 'NaN', but must be a positive number"},
		{"match_weight Inf", "match_weight is 'Inf', but must be a positive number"},
		{"match_weight 1e300", "match_weight is '1e300', but must be a positive number"},
		{"match_weight 1 2", "wrong argument count"},
		{"request_cost nothing", "request_cost is 'nothing', but must be a positive number"},
		{"kv_capacity 1.5", "kv_capacity is '1.5', but must be a positive whole number"},
		{"kv_capacity 0", "kv_capacity is '0', but must be a positive whole number"},
		{"kv_capacity 99999999999999999999", "must be a positive whole number"},
		{"max_body 0", "max_body is '0', but must be a positive size, such as 4MiB"},
		{"max_body -1", "max_body is '-1', but must be a positive size"},
		{"max_body 4 MiB", "wrong argument count"},
		{"max_body 2PB", "max_body is '2PB', but must be a positive size"},
		{"pin_header", "wrong argument count"},
		{"fallback", "wrong argument count"},
		{"fallback nowhere", "module not registered"},
		{"fallback first\nfallback random", "fallback already specified"},
		{"fallback first x", "wrong argument count"},
		{"metrics_off now", "wrong argument count"},
		{"metrics_off\nmetrics_off", "metrics_off already specified"},
		{"metrics_uri", "wrong argument count"},
		{"metrics_port 0", "metrics_port is '0', but must be a positive whole number"},
		{"metrics_port http", "metrics_port is 'http', but must be a positive whole number"},
		{"metrics_scheme", "wrong argument count"},
		{"metrics_interval 1", "metrics_interval is '1', but must be a positive duration, such as 1s"},
		{"metrics_interval -1s", "metrics_interval is '-1s', but must be a positive duration"},
		{"metrics_timeout forever", "metrics_timeout is 'forever', but must be a positive duration"},
		{"metrics_headers a", "wrong argument count"},
		{"metrics", "unrecognized option 'metrics'"},
		{"prefix 1KiB", "unrecognized option 'prefix'"},
	} {
		checkError(t, "kv_cache_aware", new(KVCacheAware), tt.options, tt.want)
	}
	for _, tt := range []struct{ options, want string }{
		{"name", "wrong argument count"},
		{"prefix", "wrong argument count"},
		{"prefix 0", "prefix is '0', but must be a positive size, such as 4MiB"},
		{"prefix 1KiB\nprefix 2KiB", "prefix already specified"},
		{"header", "wrong argument count"},
		{"load_factor x", "load_factor is 'x', but must be a positive number"},
		{"slack 1.5", "slack is '1.5', but must be a positive whole number"},
		{"seed", "wrong argument count"},
		{"seed a b", "wrong argument count"},
		{"max_body none", "max_body is 'none', but must be a positive size"},
		{"fallback", "wrong argument count"},
		{"fallback first\nfallback first", "fallback already specified"},
		{"match_weight 3", "unrecognized option 'match_weight'"},
		{"metrics_off", "unrecognized option 'metrics_off'"},
	} {
		checkError(t, "prefix_hash", new(PrefixHash), tt.options, tt.want)
	}
	checkError(t, "kv_cache_aware strict", new(KVCacheAware), "", "wrong argument count")
	checkError(t, "prefix_hash 4KiB", new(PrefixHash), "", "wrong argument count")
}

func checkError(t *testing.T, head string, policy caddyfile.Unmarshaler, options, want string) {
	t.Helper()
	err := policy.UnmarshalCaddyfile(caddyfile.NewTestDispenser(head + " {\n" + options + "\n}"))
	if err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("%s { %s }: error is %v, want %s", head, options, err, want)
	}
}

// What the parser lets pass, or JSON brings, and Provision or Validate refuse.
func TestConfigErrors(t *testing.T) {
	ctx := newContext(t)
	for _, tt := range []struct{ policy, config, want string }{
		{"kv_cache_aware", `{"match_weight": -1}`, "match_weight is -1, but can't be negative"},
		{"kv_cache_aware", `{"request_cost": -0.5}`, "request_cost is -0.5, but can't be negative"},
		{"kv_cache_aware", `{"queue": {"max_requests": -1}}`, "queue: max_requests is -1, but can't be negative"},
		{"kv_cache_aware", `{"queue": {"max_wait": -1000000000}}`, "queue: max_wait is -1s, but can't be negative"},
		{"kv_cache_aware", `{"queue": {"full": "drop"}}`, "queue: full is 'drop', but must be send or refuse"},
		{"kv_cache_aware", `{"queue": {"off": true, "fair": "x"}}`, "queue: off leaves nothing to set, but there are other settings"},
		{"kv_cache_aware", `{"kv_capacity": -1}`, "kv_capacity is -1 tokens, but can't be negative"},
		{"kv_cache_aware", `{"max_body": -1}`, "max_body is -1 bytes, but can't be negative"},
		{"kv_cache_aware", `{"metrics": {"uri": "metrics"}}`, `metrics uri is "metrics", but must begin with a slash`},
		{"kv_cache_aware", `{"metrics": {"port": 65536}}`, "metrics port is 65536, but must be between 1 and 65535"},
		{"kv_cache_aware", `{"metrics": {"port": -1}}`, "metrics port is -1"},
		{"kv_cache_aware", `{"metrics": {"scheme": "ftp"}}`, `metrics scheme is "ftp", but must be http or https`},
		{"kv_cache_aware", `{"metrics": {"interval": "1ms"}}`, "metrics interval is 1ms, but must be at least 50ms"},
		{"kv_cache_aware", `{"metrics": {"interval": -1}}`, "metrics interval is -1ns"},
		{"kv_cache_aware", `{"metrics": {"timeout": -1}}`, "metrics timeout is -1ns, but can't be negative"},
		{"kv_cache_aware", `{"metrics": {"tls": {"ca": {"provider": "nowhere"}}}}`, "metrics tls"},
		{"kv_cache_aware", `{"fallback": {"policy": "nowhere"}}`, "loading fallback selection policy"},
		{"kv_cache_aware", `{"nonsense": 1}`, "unknown field"},
		{"prefix_hash", `{"load_factor": 0.9}`, "load_factor is 0.9, but must be at least 1"},
		{"prefix_hash", `{"slack": -1}`, "slack is -1 tokens, but can't be negative"},
		{"prefix_hash", `{"prefix": -1}`, "prefix is -1 bytes, but can't be negative"},
		{"prefix_hash", `{"max_body": -1}`, "max_body is -1 bytes, but can't be negative"},
		{"prefix_hash", `{"fallback": {"policy": "nowhere"}}`, "loading fallback selection policy"},
	} {
		_, err := ctx.LoadModuleByID(policyNamespace+tt.policy, json.RawMessage(tt.config))
		if err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s %s: error is %v, want %s", tt.policy, tt.config, err, tt.want)
		}
	}
	if _, err := ctx.LoadModuleByID(policyNamespace+"kv_cache_aware", json.RawMessage(`{"metrics": {"off": true, "scheme": "none"}}`)); err != nil {
		t.Errorf("with polling off its options don't matter, but: %v", err)
	}
}
