// SPDX-License-Identifier: Apache-2.0

package selection

import (
	"encoding/json"
	"net/http"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// transport is one of somebody else.
type transport struct{ http.RoundTripper }

func TestRetriesOf(t *testing.T) {
	match := caddyhttp.RawMatcherSets{caddy.ModuleMap{"method": json.RawMessage(`["POST"]`)}}
	with := func(lb reverseproxy.LoadBalancing) *reverseproxy.Handler {
		return &reverseproxy.Handler{LoadBalancing: &lb}
	}
	for name, test := range map[string]struct {
		handler   *reverseproxy.Handler
		post, get bool // is a body sent once at most?
	}{
		"no proxy":        {},
		"no balancing":    {handler: new(reverseproxy.Handler)},
		"no retries":      {with(reverseproxy.LoadBalancing{}), true, true},
		"retries":         {with(reverseproxy.LoadBalancing{Retries: 2}), true, false},
		"duration":        {with(reverseproxy.LoadBalancing{TryDuration: caddy.Duration(time.Second)}), true, false},
		"retry match":     {with(reverseproxy.LoadBalancing{Retries: 2, RetryMatchRaw: match}), false, false},
		"match for none":  {with(reverseproxy.LoadBalancing{RetryMatchRaw: match}), true, true},
		"own transport":   {&reverseproxy.Handler{LoadBalancing: new(reverseproxy.LoadBalancing), Transport: new(reverseproxy.HTTPTransport)}, true, true},
		"other transport": {&reverseproxy.Handler{LoadBalancing: new(reverseproxy.LoadBalancing), Transport: transport{}}, false, false},
	} {
		r := retriesOf(test.handler)
		if r.once(http.MethodPost) != test.post || r.once(http.MethodGet) != test.get {
			t.Errorf("%s: POST %v, GET %v; want %v, %v", name, r.once(http.MethodPost), r.once(http.MethodGet), test.post, test.get)
		}
	}
}
