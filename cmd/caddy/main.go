// SPDX-License-Identifier: Apache-2.0

// Command caddy is Caddy with the caddy-kv-cache plugin, for development, the
// integration tests and the demo. Users build theirs with xcaddy.
package main

import (
	caddycmd "github.com/caddyserver/caddy/v2/cmd"

	_ "github.com/caddyserver/caddy/v2/modules/standard"

	_ "github.com/seed-2fa47a1e/caddy-kv-cache"
)

func main() {
	caddycmd.Main()
}
