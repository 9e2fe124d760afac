// SPDX-License-Identifier: Apache-2.0

package selection

import (
	"encoding/json"
	"fmt"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// loadFallback loads the module of a policy's FallbackRaw field, least_conn if
// none is configured.
func loadFallback(ctx caddy.Context, policy any, raw *json.RawMessage) (reverseproxy.Selector, error) {
	if *raw == nil {
		*raw = caddyconfig.JSONModuleObject(new(reverseproxy.LeastConnSelection), "policy", "least_conn", nil)
	}
	v, err := ctx.LoadModule(policy, "FallbackRaw")
	if err != nil {
		return nil, fmt.Errorf("loading fallback selection policy: %v", err)
	}
	return v.(reverseproxy.Selector), nil
}

// unmarshalPolicy parses the policy of `<option> <policy>`, which may have a block.
func unmarshalPolicy(d *caddyfile.Dispenser, raw *json.RawMessage) error {
	if !d.NextArg() {
		return d.ArgErr()
	}
	name := d.Val()
	unm, err := caddyfile.UnmarshalModule(d, "http.reverse_proxy.selection_policies."+name)
	if err != nil {
		return err
	}
	sel, ok := unm.(reverseproxy.Selector)
	if !ok {
		return d.Errf("module %s is not a reverseproxy.Selector", name)
	}
	*raw = caddyconfig.JSONModuleObject(sel, "policy", name, nil)
	return nil
}
