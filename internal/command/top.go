// SPDX-License-Identifier: Apache-2.0

package command

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	caddycmd "github.com/caddyserver/caddy/v2/cmd"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/admin"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/figures"
)

func init() { subcommands = append(subcommands, newTop) }

const topLong = `
Shows what status shows, again and again, until q is typed. HIT is the hit rate
since the last time, and each fleet's first line has its rates: requests that got
their first token, and prompt tokens computed, a second.
`

// shortestLook keeps top from loading what it looks at.
const shortestLook = 100 * time.Millisecond

// topFlags are what the command line says.
type topFlags struct {
	endpoint
	fleet    string
	interval time.Duration
}

func newTop() *cobra.Command {
	f := new(topFlags)
	cmd := &cobra.Command{
		Use:     "top",
		Short:   "Shows the replicas of a running Caddy live",
		Long:    topLong,
		Example: "  $ caddy kv-cache top --interval 5s",
		Args:    cobra.NoArgs,
	}
	f.endpoint.flags(cmd)
	cmd.Flags().StringVar(&f.fleet, "fleet", "", "name of the fleet to show (default: all)")
	cmd.Flags().DurationVar(&f.interval, "interval", 2*time.Second, "time between two looks")
	register(cmd, "fleet", f.completeFleet)
	register(cmd, "interval", cobra.FixedCompletions(nil, cobra.ShellCompDirectiveNoFileComp))
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		return caddycmd.WrapCommandFuncForCobra(func(caddycmd.Flags) (int, error) {
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			return exit(f.run(ctx, cmd.OutOrStdout()))
		})(cmd, args)
	}
	return cmd
}

// run looks until it is interrupted, which is how it is meant to end. The first
// look must succeed; later failures are shown, and Caddy may come back.
func (f *topFlags) run(ctx context.Context, out io.Writer) error {
	if f.interval < shortestLook {
		return fmt.Errorf("interval is %v, but must be at least %v", f.interval, shortestLook)
	}
	w := &watch{topFlags: f}
	first, err := w.look()
	if err != nil {
		return err
	}
	if isTerminal(out) {
		return showLive(ctx, out, first, f.interval, w.page)
	}
	for tick := time.NewTicker(f.interval); ; first = w.page() {
		fmt.Fprintln(out, first)
		select {
		case <-ctx.Done():
			tick.Stop()
			return nil
		case <-tick.C:
		}
	}
}

// watch looks again and again, and remembers the look before.
type watch struct {
	*topFlags
	last []admin.Fleet
	at   time.Time
}

func (w *watch) look() (string, error) {
	fleets, err := w.fleets(w.fleet)
	if err != nil {
		w.last = nil
		return "", err
	}
	now := time.Now()
	text := page(fleets, w.last, now.Sub(w.at))
	w.last, w.at = fleets, now
	return text, nil
}

// page is a look, or why there is none.
func (w *watch) page() string {
	text, err := w.look()
	if err != nil {
		return time.Now().Format(time.TimeOnly) + "  " + clean(err.Error()) + "\n"
	}
	return text
}

// page is what one look shows; before is the look that was so long ago.
func page(fleets, before []admin.Fleet, ago time.Duration) string {
	var out strings.Builder
	if len(fleets) == 0 {
		out.WriteString("no policy of Caddy's config is kv_cache_aware or prefix_hash\n")
	}
	for i := range fleets {
		if i > 0 {
			out.WriteByte('\n')
		}
		f := &fleets[i]
		if was := findFleet(before, f.Name); was != nil && ago > 0 {
			requests, computed := sinceLast(f, was)
			fmt.Fprintf(&out, "%s requests/s  %s prompt tokens/s computed\n", figures.Compact(requests/ago.Seconds()), figures.Compact(computed/ago.Seconds()))
		}
		printFleet(&out, f)
	}
	return out.String()
}

func findFleet(fleets []admin.Fleet, name string) *admin.Fleet {
	for i := range fleets {
		if fleets[i].Name == name {
			return &fleets[i]
		}
	}
	return nil
}

// sinceLast sums what the engines did since the fleet was looked at before, and
// makes each replica's hit ratio that of this time where it had requests.
func sinceLast(f, was *admin.Fleet) (requests, computed float64) {
	for i := range f.Replicas {
		r := &f.Replicas[i]
		old := findReplica(was, r.Address)
		if r.Engine == nil || old == nil || old.Engine == nil {
			continue
		}
		grown := func(name string) float64 {
			return max(0, r.Engine.Facts[name]-old.Engine.Facts[name])
		}
		requests += grown("first_tokens_total")
		queries, hits := grown("prefix_query_tokens_total"), grown("prefix_hit_tokens_total")
		computed += queries - hits
		if queries > 0 {
			r.Engine.Facts["prefix_hit_ratio"] = hits / queries
		}
	}
	return requests, max(0, computed)
}

func findReplica(f *admin.Fleet, addr string) *admin.Replica {
	for i := range f.Replicas {
		if f.Replicas[i].Address == addr {
			return &f.Replicas[i]
		}
	}
	return nil
}
