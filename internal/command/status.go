// SPDX-License-Identifier: Apache-2.0

package command

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"

	"github.com/spf13/cobra"

	"github.com/caddyserver/caddy/v2"
	caddycmd "github.com/caddyserver/caddy/v2/cmd"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/admin"
)

func init() { subcommands = append(subcommands, newStatus) }

const statusLong = `
Shows what a running Caddy knows of its replicas, a fleet at a time, and which
of them stand out. Columns:

  STATE   eligible, or why the replica is avoided: failing (attempts failed),
          refused (connections), hung (work and no progress), asleep, drained;
          "full" where Caddy's own health checks or limits keep it out
  RUN     requests in the engine's batch, as it says
  WAIT    requests in the engine's queue, as it says
  KV      share of the KV cache in use, as the engine says
  HIT     share of prompt tokens it had cached, since it started
  SENT    requests sent to it through this Caddy and not finished
  QUEUE   uncached prompt tokens believed to wait for prefill there
  RATE    learned prefill rate, in tokens a second; in brackets if assumed
  TRUST   share of predicted hits that the engine confirms
  AGE     of what the engine says

A dash stands for what is not known.
`

// statusFlags are what the command line says.
type statusFlags struct {
	endpoint
	fleet string
	json  bool
}

func newStatus() *cobra.Command {
	f := new(statusFlags)
	cmd := &cobra.Command{
		Use:     "status",
		Short:   "Shows the replicas of a running Caddy and which of them stand out",
		Long:    statusLong,
		Example: "  $ caddy kv-cache status\n  $ caddy kv-cache status --fleet chat --json",
		Args:    cobra.NoArgs,
	}
	f.endpoint.flags(cmd)
	cmd.Flags().StringVar(&f.fleet, "fleet", "", "name of the fleet to show (default: all)")
	cmd.Flags().BoolVar(&f.json, "json", false, "print the admin API's answer")
	register(cmd, "fleet", f.completeFleet)
	cmd.RunE = caddycmd.WrapCommandFuncForCobra(func(caddycmd.Flags) (int, error) {
		return exit(f.run(cmd.OutOrStdout()))
	})
	return cmd
}

// exit is how the commands that ask the admin endpoint end.
func exit(err error) (int, error) {
	if err != nil {
		return caddy.ExitCodeFailedStartup, err
	}
	return caddy.ExitCodeSuccess, nil
}

func (f *statusFlags) run(out io.Writer) error {
	fleets, err := f.endpoint.fleets(f.fleet)
	if err != nil {
		return err
	}
	if f.json {
		return printJSON(out, fleets)
	}
	if len(fleets) == 0 {
		_, err := fmt.Fprintln(out, "Caddy is running, but no policy of its config is kv_cache_aware or prefix_hash.")
		return err
	}
	for i := range fleets {
		if i > 0 {
			fmt.Fprintln(out)
		}
		printFleet(out, &fleets[i])
	}
	return nil
}

// fleets asks for one fleet, or all if no name is given.
func (e *endpoint) fleets(name string) ([]admin.Fleet, error) {
	var fleets []admin.Fleet
	err := e.ask(http.MethodGet, "fleets", ofFleet(name), nil, nil, &fleets)
	return fleets, err
}

func printJSON(out io.Writer, v any) error {
	e := json.NewEncoder(out)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

// completeFleet completes the name of a fleet.
func (e *endpoint) completeFleet(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	fleets, err := e.fleets("")
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	var names []string
	for _, f := range fleets {
		names = append(names, f.Name)
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}
