// SPDX-License-Identifier: Apache-2.0

package command

import (
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	caddycmd "github.com/caddyserver/caddy/v2/cmd"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/admin"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/figures"
)

func init() { subcommands = append(subcommands, newDecisions) }

const decisionsLong = `
Lists the latest decisions of a running Caddy, latest first:

  AGE     how long ago
  REASON  why it went there, from the list in the README
  PROMPT  tokens of the prompt
  HIT     of these, tokens believed cached at the replica
  COST    what the choice cost, in tokens; NEXT what the next best would have
  WAIT    how long the request was held back
  KEY     beginning of the hash of the prompt up to the end of its first user
          turn, which all turns of a chat share

Nothing of a prompt's text is kept.
`

// decisionsFlags are what the command line says.
type decisionsFlags struct {
	endpoint
	fleet, key string
	limit      int
	json       bool
}

func newDecisions() *cobra.Command {
	f := new(decisionsFlags)
	cmd := &cobra.Command{
		Use:     "decisions",
		Short:   "Lists where the latest requests went, and why",
		Long:    decisionsLong,
		Example: "  $ caddy kv-cache decisions --limit 10\n  $ caddy kv-cache decisions --key 5cf2a1e0",
		Args:    cobra.NoArgs,
	}
	f.endpoint.flags(cmd)
	cmd.Flags().StringVar(&f.fleet, "fleet", "", "name of the fleet (default: all)")
	cmd.Flags().StringVar(&f.key, "key", "", "only those whose key begins so")
	cmd.Flags().IntVar(&f.limit, "limit", 50, "how many to look at, at most 1024")
	cmd.Flags().BoolVar(&f.json, "json", false, "print them as JSON")
	register(cmd, "fleet", f.completeFleet)
	none := cobra.FixedCompletions(nil, cobra.ShellCompDirectiveNoFileComp)
	register(cmd, "key", none)
	register(cmd, "limit", none)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		return caddycmd.WrapCommandFuncForCobra(func(caddycmd.Flags) (int, error) {
			return exit(f.run(cmd.OutOrStdout(), time.Now()))
		})(cmd, args)
	}
	return cmd
}

func (f *decisionsFlags) run(out io.Writer, now time.Time) error {
	query := ofFleet(f.fleet)
	query.Set("limit", strconv.Itoa(f.limit))
	var all []admin.Decision
	if err := f.ask(http.MethodGet, "decisions", query, nil, nil, &all); err != nil {
		return err
	}
	wanted := []admin.Decision{}
	for _, d := range all {
		if strings.HasPrefix(d.Key, f.key) {
			wanted = append(wanted, d)
		}
	}
	if f.json {
		return printJSON(out, wanted)
	}
	printDecisions(out, wanted, now)
	return nil
}

func printDecisions(out io.Writer, list []admin.Decision, now time.Time) {
	const row = "%4s %-*s %-11s %6s %5s %5s %5s %5s %-8s\n"
	fmt.Fprintf(out, row, "AGE", nameWidth, "REPLICA", "REASON", "PROMPT", "HIT", "COST", "NEXT", "WAIT", "KEY")
	for i := range list {
		d := &list[i]
		wait := "-"
		if d.Waited > 0 {
			wait = fmt.Sprintf("%.1fs", d.Waited)
		}
		fmt.Fprintf(out, row, figures.Age(max(0, now.Sub(d.At).Seconds())), nameWidth, fit(clean(d.Replica), nameWidth), d.Reason,
			figures.Compact(d.PromptTokens), figures.Compact(d.HitTokens), tokens(d.Cost), tokens(d.NextCost), wait, d.Key[:min(8, len(d.Key))])
	}
}
