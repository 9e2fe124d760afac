// SPDX-License-Identifier: Apache-2.0

package command

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	caddycmd "github.com/caddyserver/caddy/v2/cmd"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/enginesim"
)

func init() { subcommands = append(subcommands, newSimulate) }

const simulateLong = `
Serves one simulated vLLM replica until interrupted, to try a configuration,
dashboards and alerts without a GPU. It computes nothing, but has vLLM's HTTP
API, scheduler, prefix cache and metrics.
`

func newSimulate() *cobra.Command {
	var c enginesim.ServerConfig
	cmd := &cobra.Command{
		Use:     "simulate",
		Short:   "Serves one simulated vLLM replica",
		Long:    simulateLong,
		Example: "  $ caddy kv-cache simulate --listen 127.0.0.1:8000",
		Args:    cobra.NoArgs,
	}
	flags := cmd.Flags()
	flags.StringVar(&c.Addr, "listen", "127.0.0.1:8000", "address to listen on")
	flags.StringVar(&c.Model, "model", enginesim.DefaultModel, "name of the model")
	flags.IntVar(&c.Blocks, "blocks", enginesim.DefaultBlocks, "KV cache, in blocks of 16 tokens")
	flags.Float64Var(&c.PrefillRate, "prefill-rate", enginesim.DefaultPrefillRate, "prompt tokens computed per second")
	none := cobra.FixedCompletions(nil, cobra.ShellCompDirectiveNoFileComp)
	for _, name := range []string{"listen", "model", "blocks", "prefill-rate"} {
		register(cmd, name, none)
	}
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		return caddycmd.WrapCommandFuncForCobra(func(caddycmd.Flags) (int, error) {
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			return exit(simulate(ctx, c, cmd.OutOrStdout()))
		})(cmd, args)
	}
	return cmd
}

// simulate serves until the context is done.
func simulate(ctx context.Context, c enginesim.ServerConfig, out io.Writer) error {
	s, err := enginesim.StartServer(c)
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "a simulated vLLM replica serves at %s\n", s.URL())
	<-ctx.Done()
	s.Close()
	return nil
}
