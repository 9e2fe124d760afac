// SPDX-License-Identifier: Apache-2.0

package command

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/caddyserver/caddy/v2"
	caddycmd "github.com/caddyserver/caddy/v2/cmd"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/demo"
)

const demoLong = `
Starts simulated vLLM replicas and a real Caddy in front of them, all in this
process, and plays the same workload under one load-balancing policy after the
other: chats that share long system prompts and grow turn by turn, and single
long prompts in between. Then it prints how they compare:

  hit rate   the share of prompt tokens that replicas had in their KV cache
  TTFT       time to first token, in seconds
  spread     what the busiest replica had to compute, over a fair share

and serves until interrupted, so that you can send requests of your own.

The simulated replicas compute nothing, but have vLLM's scheduler, prefix cache
and metrics. To save your time, requests arrive and replicas work --speed times
as fast as they would, and all measured times are multiplied by that. Time
constants of the policies and your machine's own delays are not sped up: figures
to rely on come from --speed 1.

What the chats are like is said by --chats, --turns, --think and so on; with
--workload other traffic is made up. To measure with recorded traffic, give
a --trace: a file of JSON lines or a directory of them, in the format of the
Mooncake traces (timestamp, input_length, output_length, hash_ids), of chat
sessions (timestamp, input, output, session_id) or of a request log (timestamp,
path, body). Sessions send their next request when the last was answered;
without sessions, requests are sent at their time, whatever became of those
before.

To measure real servers, name them with --upstream. They cannot be restarted
between policies; instead all prompts of a run begin with the same few random
characters, so that no run finds what another left in the caches.
`

const demoExample = `  $ caddy kv-cache demo
  $ caddy kv-cache demo --json --policies least_conn,kv_cache_aware
  $ caddy kv-cache demo --option 'prefix_hash=load_factor 1.5' --no-serve
  $ caddy kv-cache demo --upstream gpu-0:8000 --upstream gpu-1:8000
  $ caddy kv-cache demo --chats 300 --ramp 1s --replicas 6 --speed 1
  $ caddy kv-cache demo --trace conversation.jsonl --replicas 6 --blocks 30000`

// demoFlags are what the command line says.
type demoFlags struct {
	demo.Config
	policies, options []string
	json, noServe     bool
}

func newDemo() *cobra.Command {
	f := new(demoFlags)
	cmd := &cobra.Command{
		Use:     "demo",
		Short:   "Compares load-balancing policies on simulated replicas, or real ones",
		Long:    demoLong,
		Example: demoExample,
		Args:    cobra.NoArgs,
	}
	flags := cmd.Flags()
	flags.IntVar(&f.Replicas, "replicas", demo.DefaultReplicas, "number of simulated replicas")
	flags.IntVar(&f.Blocks, "blocks", demo.DefaultBlocks, "KV cache of a replica, in blocks")
	flags.IntVar(&f.BlockTokens, "block-tokens", demo.DefaultBlockTokens, "tokens in a block")
	flags.Float64Var(&f.PrefillRate, "prefill-rate", demo.DefaultPrefillRate, "prompt tokens that a replica computes per second")
	flags.Float64Var(&f.Speed, "speed", demo.DefaultSpeed, "how many times as fast as reported everything happens")
	flags.StringArrayVar(&f.Upstreams, "upstream", nil, "real server, host:port, in place of simulated ones (repeatable)")
	flags.StringVar(&f.Model, "model", "", "name of the model (default: what the servers list)")
	flags.StringVar(&f.Trace, "trace", "", "recorded trace to play, file or directory (default: a made-up workload)")
	flags.StringVar(&f.Workload, "workload", demo.DefaultWorkload, "made-up workload to play without a trace: "+strings.Join(demo.Workloads(), ", "))
	addChatFlags(flags, &f.Chats, demo.DefaultChats())
	flags.Var((*pause)(&f.Chats.Ramp), "ramp", "time within which all of the workload chats begin")
	flags.Float64Var(&f.Rate, "rate", 1, "multiplies the rate of arrivals")
	flags.IntVar(&f.Sessions, "sessions", 0, "keep so many sessions going (default: start each at its time)")
	flags.IntVar(&f.Limit, "limit", 0, "requests to play, in whole sessions (default: all)")
	flags.Uint64Var(&f.Seed, "seed", 1, "seed of the made-up workload")
	flags.DurationVar(&f.Scrape, "scrape", demo.DefaultScrape, "time between polls of a replica's metrics, at speed 1")
	flags.StringVar(&f.Listen, "listen", "", "address that takes requests (default "+demo.DefaultListen+", or any free port)")
	flags.StringSliceVar(&f.policies, "policies", demo.DefaultPolicies(), "policies to play, in this order")
	flags.StringArrayVar(&f.options, "option", nil, "policy=text, a line of the policy's Caddyfile block (repeatable)")
	flags.BoolVar(&f.json, "json", false, "print a JSON object per policy and exit")
	flags.BoolVar(&f.noServe, "no-serve", false, "exit after the table")
	for _, simulated := range []string{"replicas", "blocks", "block-tokens", "prefill-rate", "speed"} {
		cmd.MarkFlagsMutuallyExclusive("upstream", simulated)
	}
	cmd.MarkFlagsMutuallyExclusive("trace", "workload")
	f.complete(cmd)
	cmd.RunE = caddycmd.WrapCommandFuncForCobra(func(caddycmd.Flags) (int, error) {
		return f.run(cmd)
	})
	return cmd
}

// complete offers policies by name, and files where only they make sense.
func (f *demoFlags) complete(cmd *cobra.Command) {
	none := cobra.FixedCompletions(nil, cobra.ShellCompDirectiveNoFileComp)
	for _, name := range []string{
		"replicas", "blocks", "block-tokens", "prefill-rate", "speed", "upstream", "model",
		"ramp", "rate", "sessions", "limit", "seed", "scrape", "listen", "option",
	} {
		register(cmd, name, none)
	}
	for _, name := range chatFlags {
		register(cmd, name, none)
	}
	register(cmd, "workload", completeWorkloads())
	register(cmd, "policies", completePolicies)
}

func register(cmd *cobra.Command, flag string, f cobra.CompletionFunc) {
	if err := cmd.RegisterFlagCompletionFunc(flag, f); err != nil {
		panic(err) // no such flag, or completed twice
	}
}

// completePolicies completes the last of a list.
func completePolicies(_ *cobra.Command, _ []string, typed string) ([]string, cobra.ShellCompDirective) {
	before := typed[:strings.LastIndexByte(typed, ',')+1]
	var names []string
	for _, name := range demo.KnownPolicies() {
		if strings.HasPrefix(before+name, typed) {
			names = append(names, before+name)
		}
	}
	return names, cobra.ShellCompDirectiveNoFileComp | cobra.ShellCompDirectiveNoSpace
}

func (f *demoFlags) run(cmd *cobra.Command) (int, error) {
	ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // a second Ctrl-C does not wait
	err := checkChatFlags(cmd.Flags(), f.Workload, f.Trace, "ramp")
	if err == nil {
		err = f.play(ctx, cmd.OutOrStdout(), cmd.ErrOrStderr())
	}
	switch {
	case err == nil:
		return caddy.ExitCodeSuccess, nil
	case errors.Is(err, context.Canceled):
		return caddy.ExitCodeForceQuit, errors.New("interrupted")
	}
	return caddy.ExitCodeFailedStartup, err
}

// play is the command without its environment. An error that is
// context.Canceled says that it was interrupted before the results were there.
func (f *demoFlags) play(ctx context.Context, out, status io.Writer) (err error) {
	if f.Policies, err = demo.ParsePolicies(f.policies, f.options); err != nil {
		return err
	}
	d, err := demo.Start(ctx, f.Config)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	if f.json {
		return f.printObjects(ctx, d, out, status)
	}
	p := newPrinter(out)
	p.introduce(d)
	var outcomes []demo.Outcome
	for _, policy := range d.Policies() {
		begun := time.Now()
		o, err := f.playOne(ctx, d, policy, status)
		if err != nil {
			if len(outcomes) > 0 { // what was played before is not lost with this one
				p.table(outcomes)
			}
			return err
		}
		outcomes = append(outcomes, o)
		if !isTerminal(status) && len(outcomes) < len(d.Policies()) { // where no bar moves
			fmt.Fprintf(status, "%s: played in %v\n", policy.Name, time.Since(begun).Round(time.Second))
		}
	}
	p.table(outcomes)
	if f.noServe {
		return nil
	}
	p.invite(d, f.Policies[len(f.Policies)-1])
	<-ctx.Done()
	return nil
}

func (f *demoFlags) playOne(ctx context.Context, d *demo.Demo, policy demo.Policy, status io.Writer) (demo.Outcome, error) {
	bar := newBar(status, policy.Name, d.Requests())
	defer bar.finish()
	return d.Play(ctx, policy, bar.progress)
}

func (f *demoFlags) printObjects(ctx context.Context, d *demo.Demo, out, status io.Writer) error {
	encoder := json.NewEncoder(out)
	for _, policy := range d.Policies() {
		o, err := f.playOne(ctx, d, policy, status)
		if err != nil {
			return err
		}
		if err := encoder.Encode(o); err != nil {
			return fmt.Errorf("writing results: %w", err)
		}
	}
	return nil
}
