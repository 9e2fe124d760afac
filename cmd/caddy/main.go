// Command caddy is Caddy with the caddy-kv-cache plugin, for development, the
// integration tests and the demo. Users build theirs with xcaddy.
package main

import (
	caddycmd "github.com/caddyserver/caddy/v2/cmd"

	_ "github.com/caddyserver/caddy/v2/modules/standard"
)

func main() {
	caddycmd.Main()
}
