// SPDX-License-Identifier: Apache-2.0

package selection

import (
	"bytes"
	"encoding/json"
	"testing"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
)

// FuzzCaddyfile reads blocks of options. What is accepted says the same as JSON,
// and is valid or refused with an error, but never with a panic.
func FuzzCaddyfile(f *testing.F) {
	for _, block := range []string{
		"", "name a", "match_weight 2.5\nrequest_cost 400", "match_weight NaN", "kv_capacity 9999999999999999999",
		"max_body 8MiB\npin_header X\ntenant {header.Authorization}", "fallback random_choose 3",
		"fallback prefix_hash {\nprefix 1KiB\nfallback first\n}", "kv_events tcp://{host}:{port+1}\nkv_events_replay tcp://{host}:1",
		"metrics_headers {\nA b c\nD\n}", "metrics_interval 1s\nmetrics_timeout 1d\nmetrics_scheme https", "metrics_off\nmetrics_off",
		"shadow least_conn", "share 10% least_conn\nshadow first", "capture /tmp/x {\nroll_size 1MiB\nroll_keep 2\n}",
		"prefix 4KiB\nheader X\nload_factor 1.25\nslack 5\nseed {env.S}", "name a {\nb\n}", "{", "}", "\"", "`", "name \x00", "import x",
		"queue_max 5\nqueue_wait 1m\nqueue_full refuse\nqueue_priority body\nqueue_fair {header.X-Tenant}", "queue_off", "queue_off\nqueue_max 0",
		"fallback cookie {\nmax_age 1h\n}", "fallback header X {\nfallback cookie {\nfallback first\n}\n}",
	} {
		f.Add(block, true)
		f.Add(block, false)
	}
	f.Fuzz(func(t *testing.T, block string, hash bool) {
		tokens, err := caddyfile.Tokenize([]byte("policy {\n"+block+"\n}"), "Caddyfile")
		if err != nil {
			return
		}
		read := func(p interface {
			caddyfile.Unmarshaler
			Validate() error
		}, empty interface{ Validate() error }) {
			if p.UnmarshalCaddyfile(caddyfile.NewDispenser(tokens)) != nil {
				return
			}
			text, err := json.Marshal(p)
			if err != nil {
				t.Fatal(err)
			}
			if err := json.Unmarshal(text, empty); err != nil {
				t.Fatalf("%s: %v", text, err)
			}
			if again, err := json.Marshal(empty); err != nil || !bytes.Equal(again, text) {
				t.Fatalf("%s is read as %s, %v", text, again, err)
			}
			_ = empty.Validate() // may refuse it
		}
		if hash {
			read(new(PrefixHash), new(PrefixHash))
		} else {
			read(new(KVCacheAware), new(KVCacheAware))
		}
	})
}
