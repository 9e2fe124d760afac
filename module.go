// Package kvcache registers the caddy-kv-cache modules with Caddy. It is the
// one import that xcaddy needs; what the modules do is told where they live.
package kvcache
