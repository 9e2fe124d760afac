// SPDX-License-Identifier: Apache-2.0

// Package page is a handler that shows operators what the policies know and do,
// as a page that keeps itself up to date. It changes nothing, and looks at
// nothing more often because more people look at it.
package page

import (
	"net/http"
	"strconv"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

func init() {
	caddy.RegisterModule(Handler{})
	httpcaddyfile.RegisterHandlerDirective("kv_cache_page", parse)
	// A site may have `metrics` for all other paths.
	httpcaddyfile.RegisterDirectiveOrder("kv_cache_page", httpcaddyfile.Before, "metrics")
}

// Handler answers with a live page about the fleets of the running config: the
// load, cache and hit rate of each replica, where the last requests went and
// why, and what the prompts have in common. It tells addresses, names of models,
// numbers and hashes, and no text of a prompt; whoever should not know these must
// be kept out, for instance by `basic_auth`.
//
// The page needs nothing from elsewhere and asks for its figures, once a second,
// under its own address with the query `?data`. With `?fleet=<name>` it shows one
// fleet of several.
type Handler struct {
	board *board
}

// CaddyModule returns the Caddy module information.
func (Handler) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "http.handlers.kv_cache_page",
		New: func() caddy.Module { return new(Handler) },
	}
}

// parse sets up the handler from Caddyfile tokens. Syntax:
//
//	kv_cache_page [<matcher>]
func parse(h httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
	handler := new(Handler)
	return handler, handler.UnmarshalCaddyfile(h.Dispenser)
}

// UnmarshalCaddyfile implements caddyfile.Unmarshaler.
func (*Handler) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // consume directive name
	if d.NextArg() {
		return d.ArgErr()
	}
	if d.NextBlock(0) {
		return d.Err("blocks are not supported")
	}
	return nil
}

// Provision sets up the handler.
func (h *Handler) Provision(caddy.Context) error {
	h.board = hold()
	return nil
}

// Cleanup lets go of what the handlers share.
func (h *Handler) Cleanup() error {
	if h.board == nil {
		return nil
	}
	return release()
}

// ServeHTTP implements caddyhttp.MiddlewareHandler.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request, _ caddyhttp.Handler) error {
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		w.Header().Set("Allow", "GET, HEAD")
		w.WriteHeader(http.StatusMethodNotAllowed)
		return nil
	}
	for name, value := range protection {
		w.Header().Set(name, value)
	}
	status, kind, body := http.StatusOK, "text/html; charset=utf-8", document
	if query := r.URL.Query(); query.Has("data") {
		status, body = h.board.answer(query.Get("fleet"))
		kind = "application/json"
	}
	w.Header().Set("Content-Type", kind)
	w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(status)
	if r.Method == http.MethodHead {
		return nil
	}
	_, err := w.Write(body)
	return err
}

// Interface guards
var (
	_ caddy.Provisioner           = (*Handler)(nil)
	_ caddy.CleanerUpper          = (*Handler)(nil)
	_ caddyhttp.MiddlewareHandler = (*Handler)(nil)
	_ caddyfile.Unmarshaler       = (*Handler)(nil)
)
