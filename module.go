// SPDX-License-Identifier: Apache-2.0

// Package kvcache registers the caddy-kv-cache modules with Caddy. It is the
// one import that xcaddy needs; what the modules do is told where they live:
// the load-balancing policies kv_cache_aware and prefix_hash in selection.
package kvcache

import (
	// The admin API under /kv_cache/.
	_ "github.com/seed-2fa47a1e/caddy-kv-cache/internal/admin"
	// The handler kv_cache_page.
	_ "github.com/seed-2fa47a1e/caddy-kv-cache/internal/page"
	// The command caddy kv-cache.
	_ "github.com/seed-2fa47a1e/caddy-kv-cache/internal/command"
	// The load-balancing policies.
	_ "github.com/seed-2fa47a1e/caddy-kv-cache/selection"
)
