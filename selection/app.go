// SPDX-License-Identifier: Apache-2.0

package selection

import (
	"fmt"

	"github.com/caddyserver/caddy/v2"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/fleet"
)

func init() {
	caddy.RegisterModule(new(App))
}

// App starts and stops the polling of replicas with the config that names
// them. It needs no configuration: the policies load it. Since an app starts
// only when its config runs, `caddy validate` polls nothing.
type App struct {
	fleets []*fleet.Fleet
	show   []func() // lets operators see the policies
	names  map[string]bool
}

// CaddyModule returns the Caddy module information.
func (*App) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "kv_cache", New: func() caddy.Module { return new(App) }}
}

// theApp returns the app of the config that is being provisioned.
func theApp(ctx caddy.Context) (*App, error) {
	v, err := ctx.App("kv_cache")
	if err != nil {
		return nil, fmt.Errorf("loading the kv_cache app: %v", err)
	}
	return v.(*App), nil
}

// Start begins polling, and shows the policies to operators: those of a config
// that fails to load are never seen.
func (a *App) Start() error {
	for _, f := range a.fleets {
		f.Start()
	}
	for _, show := range a.show {
		show()
	}
	return nil
}

// Stop ends polling. Requests that are still streaming are not concerned.
func (a *App) Stop() error {
	for _, f := range a.fleets {
		f.Stop()
	}
	return nil
}

// add has a fleet started, and its policy shown to operators, with the config.
func (a *App) add(f *fleet.Fleet, show func()) {
	a.fleets = append(a.fleets, f)
	a.show = append(a.show, show)
}

// uniqueName gives every policy of a config a name of its own, the same each
// time the config is loaded.
func (a *App) uniqueName(wanted string) string {
	if wanted == "" {
		wanted = "default"
	}
	if a.names == nil {
		a.names = make(map[string]bool)
	}
	name := wanted
	for n := 2; a.names[name]; n++ {
		name = fmt.Sprintf("%s-%d", wanted, n)
	}
	a.names[name] = true
	return name
}

// Interface guards
var _ caddy.App = (*App)(nil)
