// SPDX-License-Identifier: Apache-2.0

// Package admin is this plugin's part of Caddy's admin API, under /kv_cache/.
// It shows what the policies know and lets operators take replicas out.
package admin

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"
)

func init() {
	caddy.RegisterModule(new(API))
}

// API serves /kv_cache/ on the admin endpoint. It has no configuration, and
// stands behind the admin endpoint's own access rules.
type API struct {
	logger *zap.Logger
}

// CaddyModule returns the Caddy module information.
func (*API) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "admin.api.kv_cache", New: func() caddy.Module { return new(API) }}
}

// Provision sets up the module.
func (a *API) Provision(ctx caddy.Context) error {
	a.logger = ctx.Logger(a)
	return nil
}

// Routes implements caddy.AdminRouter.
func (a *API) Routes() []caddy.AdminRoute {
	route := func(path, method string, serve func(*http.Request) (any, error)) caddy.AdminRoute {
		return caddy.AdminRoute{Pattern: "/kv_cache/" + path, Handler: caddy.AdminHandlerFunc(func(w http.ResponseWriter, r *http.Request) error {
			return answer(w, r, method, serve)
		})}
	}
	return []caddy.AdminRoute{
		route("fleets", http.MethodGet, a.fleets),
		route("replicas", http.MethodGet, a.replicas),
		route("decisions", http.MethodGet, a.decisions),
		route("explain", http.MethodPost, a.explain),
		route("drain", http.MethodPost, a.drain),
		route("undrain", http.MethodPost, a.undrain),
		route("forget", http.MethodPost, a.forget),
	}
}

func answer(w http.ResponseWriter, r *http.Request, method string, serve func(*http.Request) (any, error)) error {
	if r.Method != method {
		w.Header().Set("Allow", method)
		return refuse(http.StatusMethodNotAllowed, "method %s is not allowed here, use %s", r.Method, method)
	}
	v, err := serve(r)
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/json")
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	return e.Encode(v)
}

func refuse(status int, format string, args ...any) error {
	return caddy.APIError{HTTPStatus: status, Err: fmt.Errorf(format, args...)}
}

// fleets answers GET /kv_cache/fleets[?fleet=NAME].
func (a *API) fleets(r *http.Request) (any, error) {
	list, err := asked(r)
	if err != nil {
		return nil, err
	}
	out := make([]Fleet, 0, len(list))
	for _, p := range list {
		out = append(out, Describe(p, time.Now()))
	}
	return out, nil
}

// replicas answers GET /kv_cache/replicas[?fleet=NAME]: each replica once,
// whatever number of fleets it is in.
func (a *API) replicas(r *http.Request) (any, error) {
	list, err := asked(r)
	if err != nil {
		return nil, err
	}
	out, seen := []Replica{}, make(map[string]bool)
	for _, p := range list {
		for _, replica := range Describe(p, time.Now()).Replicas {
			if !seen[replica.Address] {
				seen[replica.Address] = true
				out = append(out, replica)
			}
		}
	}
	return out, nil
}

const (
	defaultDecisions = 50
	maxDecisions     = 1024
)

// decisions answers GET /kv_cache/decisions[?fleet=NAME][&limit=N].
func (a *API) decisions(r *http.Request) (any, error) {
	list, err := asked(r)
	if err != nil {
		return nil, err
	}
	limit := defaultDecisions
	if v := r.URL.Query().Get("limit"); v != "" {
		if limit, err = strconv.Atoi(v); err != nil || limit < 1 || limit > maxDecisions {
			return nil, refuse(http.StatusBadRequest, "limit is %q, but must be a number from 1 to %d", v, maxDecisions)
		}
	}
	out := []Decision{}
	for _, p := range list {
		out = append(out, p.Recent(limit)...)
	}
	return latestFirst(out, limit), nil
}

// explain answers POST /kv_cache/explain[?fleet=NAME][&path=PATH], with the
// request body in question as its own body.
func (a *API) explain(r *http.Request) (any, error) {
	p, err := one(r)
	if err != nil {
		return nil, err
	}
	path := r.URL.Query().Get("path")
	switch {
	case path == "":
		path = "/v1/chat/completions"
	case !strings.HasPrefix(path, "/"):
		return nil, refuse(http.StatusBadRequest, "path is %q, but must begin with a slash", path)
	}
	asked := r.Clone(r.Context())
	asked.URL.Path, asked.URL.RawPath, asked.URL.RawQuery = path, "", ""
	return p.Explain(asked), nil
}

var errNoPolicy = errors.New("no kv_cache_aware or prefix_hash policy is in the running config")

// asked lists the policies that a request asks for: those of one fleet, or all.
func asked(r *http.Request) ([]Policy, error) {
	list := Policies()
	name := r.URL.Query().Get("fleet")
	if name == "" {
		return list, nil
	}
	for _, p := range list {
		if p.Fleet().Name == name {
			return []Policy{p}, nil
		}
	}
	return nil, refuse(http.StatusNotFound, "fleet %q is unknown; there %s", name, known(list))
}

// one returns the policy that a request asks for, which it need not name where
// there is only one.
func one(r *http.Request) (Policy, error) {
	list, err := asked(r)
	switch {
	case err != nil:
		return nil, err
	case len(list) == 0:
		return nil, caddy.APIError{HTTPStatus: http.StatusNotFound, Err: errNoPolicy}
	case len(list) > 1:
		return nil, refuse(http.StatusBadRequest, "say which fleet, by ?fleet=NAME; there %s", known(list))
	}
	return list[0], nil
}

// known says which fleets there are.
func known(list []Policy) string {
	if len(list) == 0 {
		return "is none"
	}
	names := make([]string, len(list))
	for i, p := range list {
		names[i] = strconv.Quote(p.Fleet().Name)
	}
	return "are " + strings.Join(names, ", ")
}

// Interface guards
var (
	_ caddy.Provisioner = (*API)(nil)
	_ caddy.AdminRouter = (*API)(nil)
)
