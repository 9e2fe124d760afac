// SPDX-License-Identifier: Apache-2.0

package command

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	caddycmd "github.com/caddyserver/caddy/v2/cmd"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/admin"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/figures"
)

func init() { subcommands = append(subcommands, newExplain) }

const explainLong = `
Tells where a running Caddy would send a request, and why, without sending it.
The file holds the request's body; without one, or with -, standard input does.

For kv_cache_aware the cost of each replica is shown in its parts, in prompt
tokens at the replica's pace; the lowest wins:

  MATCH     tokens of the prompt the replica is believed to hold
  QUEUE     uncached tokens that wait there
  COMPUTE   the tokens it would have to compute, weighed by match_weight
  REQUESTS  what its requests in flight count
  PRESSURE  the KV cache that would have to be freed
  COST      their sum

For prefix_hash, PLACE is the replica's place in the prompt's own order, 1 being
its home, and LOAD what it has outstanding, in tokens.
`

// explainFlags are what the command line says.
type explainFlags struct {
	endpoint
	fleet, path string
	header      []string
	json        bool
}

func newExplain() *cobra.Command {
	f := new(explainFlags)
	cmd := &cobra.Command{
		Use:     "explain [file]",
		Short:   "Tells where a request would go, and why",
		Long:    explainLong,
		Example: "  $ caddy kv-cache explain request.json\n  $ caddy kv-cache explain --path /v1/completions --header 'X-Session-ID: 7' - < request.json",
		Args:    cobra.MaximumNArgs(1),
	}
	f.endpoint.flags(cmd)
	cmd.Flags().StringVar(&f.fleet, "fleet", "", "name of the fleet (needed if there are several)")
	cmd.Flags().StringVar(&f.path, "path", "/v1/chat/completions", "path of the request")
	cmd.Flags().StringArrayVarP(&f.header, "header", "H", nil, "header field of the request, 'Name: value' (repeatable)")
	cmd.Flags().BoolVar(&f.json, "json", false, "print the admin API's answer")
	register(cmd, "fleet", f.completeFleet)
	none := cobra.FixedCompletions(nil, cobra.ShellCompDirectiveNoFileComp)
	register(cmd, "path", none)
	register(cmd, "header", none)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		return caddycmd.WrapCommandFuncForCobra(func(caddycmd.Flags) (int, error) {
			return exit(f.run(cmd, args))
		})(cmd, args)
	}
	return cmd
}

func (f *explainFlags) run(cmd *cobra.Command, args []string) error {
	body := cmd.InOrStdin()
	if len(args) == 1 && args[0] != "-" {
		file, err := os.Open(args[0])
		if err != nil {
			return fmt.Errorf("opening the request's body: %w", err)
		}
		defer file.Close()
		body = file
	}
	header := make(http.Header)
	for _, field := range f.header {
		name, value, ok := strings.Cut(field, ":")
		if !ok || name == "" {
			return fmt.Errorf("header is %q, but must be 'Name: value'", field)
		}
		header.Add(name, strings.TrimSpace(value))
	}
	query := ofFleet(f.fleet)
	query.Set("path", f.path)
	var x admin.Explanation
	if err := f.ask(http.MethodPost, "explain", query, header, body, &x); err != nil {
		return err
	}
	if f.json {
		return printJSON(cmd.OutOrStdout(), x)
	}
	printExplanation(cmd.OutOrStdout(), &x)
	return nil
}

func printExplanation(out io.Writer, x *admin.Explanation) {
	fmt.Fprintf(out, "%s (%s): API %s, %s tokens in %s", clean(x.Fleet), x.Policy, x.API, figures.Compact(x.PromptTokens), figures.Plural(x.Blocks, "block"))
	if x.Truncated {
		fmt.Fprint(out, " up to max_body")
	}
	fmt.Fprintln(out)
	switch {
	case x.Replica != "":
		fmt.Fprintf(out, "goes to %s (%s):\n  %s\n", clean(x.Replica), x.Reason, admin.Because[x.Reason])
	case x.Reason == "none":
		fmt.Fprintf(out, "goes nowhere: %s\n", admin.Because[x.Reason])
	default:
		fmt.Fprintf(out, "the fallback policy decides (%s):\n  %s\n", x.Reason, admin.Because[x.Reason])
	}
	if x.Waits {
		fmt.Fprintf(out, "is held back until there is room, behind %s\n", figures.Plural(x.Ahead, "request"))
	}
	fmt.Fprintln(out)
	if x.Policy == "prefix_hash" {
		printPlaces(out, x)
		return
	}
	printCosts(out, x)
}

func printCosts(out io.Writer, x *admin.Explanation) {
	// Other senders are rare.
	away := slices.ContainsFunc(x.Candidates, func(c admin.Candidate) bool { return c.Cost != nil && c.Cost.Away != 0 })
	width := nameWidth
	if away {
		width -= len("   AWAY")
	}
	row := func(mark, replica, state, match string, costs ...string) {
		fmt.Fprintf(out, "%-1s %-*s %-8s %6s", mark, width, replica, state, match)
		for i, wide := range []int{6, 8, 8, 8, 6, 6} {
			if i != 4 || away {
				fmt.Fprintf(out, " %*s", wide, costs[i])
			}
		}
		fmt.Fprintln(out)
	}
	row("", "REPLICA", "STATE", "MATCH", "QUEUE", "COMPUTE", "REQUESTS", "PRESSURE", "AWAY", "COST")
	for i := range x.Candidates {
		c := &x.Candidates[i]
		costs := []string{"-", "-", "-", "-", "-", "-"}
		if k := c.Cost; k != nil {
			for i, cost := range []float64{k.Queue, k.Compute, k.Requests, k.Pressure, k.Away, k.Total} {
				costs[i] = figures.Compact(cost)
			}
		}
		row(mark(c), fit(clean(c.Replica), width), standing(c), tokens(c.Matched), costs...)
	}
}

func printPlaces(out io.Writer, x *admin.Explanation) {
	const row = "%-1s %-*s %-8s %6s %6s\n"
	fmt.Fprintf(out, row, "", nameWidth, "REPLICA", "STATE", "PLACE", "LOAD")
	for i := range x.Candidates {
		c := &x.Candidates[i]
		place := "-"
		if c.Place != nil {
			place = fmt.Sprint(*c.Place)
		}
		fmt.Fprintf(out, row, mark(c), nameWidth, fit(clean(c.Replica), nameWidth), standing(c), place, tokens(c.Outstanding))
	}
}

func mark(c *admin.Candidate) string {
	if c.Chosen {
		return ">"
	}
	return ""
}

// standing is the candidate's state in a word.
func standing(c *admin.Candidate) string {
	if c.State == "eligible" && !c.Available {
		return "full"
	}
	return c.State
}

func tokens(v *float64) string {
	if v == nil {
		return "-"
	}
	return figures.Compact(*v)
}
