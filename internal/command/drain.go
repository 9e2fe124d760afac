// SPDX-License-Identifier: Apache-2.0

package command

import (
	"fmt"
	"io"
	"net/http"
	"net/url"

	"github.com/spf13/cobra"

	caddycmd "github.com/caddyserver/caddy/v2/cmd"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/admin"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/figures"
)

func init() { subcommands = append(subcommands, newDrain, newUndrain, newForget) }

const drainLong = `
Takes a replica out of the choice of a running Caddy: it gets no new requests as
long as another replica can take them, and those in flight go on. The replica is
named by its address as written in the upstream, and drained in every fleet that
has it. It stays drained over config reloads, until undrain or a restart of Caddy.

The last eligible replica of a fleet is drained only with --force. With --dry-run
nothing is done, and what would be is told: who is left, how many requests it took
lately, and what only it holds of the beginnings that prompts share.
`

func newDrain() *cobra.Command {
	var force, dry bool
	cmd := newOperation(operation{
		name:    "drain",
		short:   "Takes a replica out of the choice",
		long:    drainLong,
		example: "  $ caddy kv-cache drain gpu-2:8000 --dry-run\n  $ caddy kv-cache drain gpu-2:8000",
		query: func(q url.Values) {
			if force {
				q.Set("force", "true")
			}
			if dry {
				q.Set("dry_run", "true")
			}
		},
	})
	cmd.Flags().BoolVar(&force, "force", false, "even if it is the last eligible one")
	cmd.Flags().BoolVar(&dry, "dry-run", false, "tell what would happen, and do nothing")
	return cmd
}

func newUndrain() *cobra.Command {
	return newOperation(operation{
		name:    "undrain",
		short:   "Takes a drained replica back into the choice",
		long:    "\nTakes a drained replica back into the choice of a running Caddy.\n",
		example: "  $ caddy kv-cache undrain gpu-2:8000",
	})
}

func newForget() *cobra.Command {
	return newOperation(operation{
		name:    "forget",
		short:   "Forgets what a replica is believed to hold",
		long:    "\nForgets what a replica is believed to hold in its KV cache, for instance after\nits cache was reset by hand. Nothing is sent to the replica.\n",
		example: "  $ caddy kv-cache forget gpu-2:8000",
	})
}

// operation is something that is done to one replica.
type operation struct {
	name, short, long, example string
	query                      func(url.Values) // adds parameters; may be nil
}

func newOperation(o operation) *cobra.Command {
	var (
		e     endpoint
		fleet string
		raw   bool
	)
	cmd := &cobra.Command{
		Use:     o.name + " <replica>",
		Short:   o.short,
		Long:    o.long,
		Example: o.example,
		Args:    cobra.ExactArgs(1),
		ValidArgsFunction: func(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			return e.completeReplica(args)
		},
	}
	e.flags(cmd)
	cmd.Flags().StringVar(&fleet, "fleet", "", "name of a fleet the replica must be in")
	cmd.Flags().BoolVar(&raw, "json", false, "print the admin API's answer")
	register(cmd, "fleet", e.completeFleet)
	run := func(args []string) error {
		query := ofFleet(fleet)
		query.Set("replica", args[0])
		if o.query != nil {
			o.query(query)
		}
		var done admin.Outcome
		if err := e.ask(http.MethodPost, o.name, query, nil, nil, &done); err != nil {
			return err
		}
		if raw {
			return printJSON(cmd.OutOrStdout(), done)
		}
		printOutcome(cmd.OutOrStdout(), &done)
		return nil
	}
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		return caddycmd.WrapCommandFuncForCobra(func(caddycmd.Flags) (int, error) {
			return exit(run(args))
		})(cmd, args)
	}
	return cmd
}

func printOutcome(out io.Writer, o *admin.Outcome) {
	fmt.Fprintf(out, "%s (%s in flight)\n", clean(o.Message), figures.Plural(int(o.InFlight), "request"))
	for _, e := range o.Effects {
		fmt.Fprintf(out, "%s: it took %d of the last %s, which would go to the %s left\n",
			clean(e.Fleet), e.Chosen, figures.Plural(e.Decisions, "request"), figures.Plural(e.Remaining, "eligible replica"))
		fmt.Fprintf(out, "%s: it alone holds %d of the %s; %s tokens would be computed again\n",
			clean(e.Fleet), e.Alone, figures.Plural(e.Prefixes, "heaviest shared prefix", "heaviest shared prefixes"), figures.Compact(e.Tokens))
	}
}

// completeReplica completes the address of a replica.
func (e *endpoint) completeReplica(args []string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	var replicas []admin.Replica
	if err := e.ask(http.MethodGet, "replicas", nil, nil, nil, &replicas); err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	var addrs []string
	for _, r := range replicas {
		addrs = append(addrs, r.Address)
	}
	return addrs, cobra.ShellCompDirectiveNoFileComp
}
