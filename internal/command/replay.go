// SPDX-License-Identifier: Apache-2.0

package command

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/caddyserver/caddy/v2"
	caddycmd "github.com/caddyserver/caddy/v2/cmd"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/demo"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/enginesim"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/replay"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/trace"
)

const replayLong = `
Plays a trace through the policies' own code against simulated vLLM replicas, in
virtual time: half an hour of traffic takes a second or two. Other routers' rules
play the same requests, and a table compares them:

  hit %    the share of prompt tokens that replicas had in their KV cache
  TTFT     time to first token, in seconds, the wait at the router included
  held     how long the router kept requests back, on average
  busiest  what the busiest replica had to compute, over a fair share

With --seeds, each policy is played several times with arrivals shifted by chance,
and a difference that could be chance is called noise.

A trace is a file of JSON lines or a directory of them, in the format of the
Mooncake traces (timestamp, input_length, output_length, hash_ids), of chat
sessions (timestamp, input, output, session_id) or of a request log (timestamp,
path, body). Sessions are played as a closed loop: a request comes when the one
before it was answered and the recorded time to think has passed. Without a trace
a made-up workload is played: chats and long single prompts, as a closed loop,
whose shape --chats, --turns, --think and so on say, or what --workload names.

Policies of this module take settings, such as kv_cache_aware:match_weight=2.
`

const replayExample = `  $ caddy kv-cache replay conversation.jsonl --replicas 6 --blocks 30000
  $ caddy kv-cache replay conversation.jsonl --rate 1.6 --seeds 5 --report out.html
  $ caddy kv-cache replay --workload documents --rate 2
  $ caddy kv-cache replay --policy kv_cache_aware --policy kv_cache_aware:room=1h --policy oracle
  $ caddy kv-cache replay sessions/ --copies 300 --ramp 5m --change restart:2@90s
  $ caddy kv-cache replay conversation.jsonl --prefill-rate 10000,10000,20000,20000`

// replayFlags are what the command line says.
type replayFlags struct {
	policies, changes, untold    []string
	replicas, caddys             int
	blocks, blockTokens          []int
	prefillRates                 []string
	decodeCosts                  []time.Duration
	stepOverhead, scrape, jitter time.Duration
	ramp                         time.Duration
	rate                         float64
	seeds, copies, limit         int
	chats                        trace.Workload
	seed                         uint64
	workload, report, plot       string
	json                         bool
}

func newReplay() *cobra.Command {
	f := new(replayFlags)
	cmd := &cobra.Command{
		Use:     "replay [trace]",
		Short:   "Compares policies on a trace, in virtual time",
		Long:    replayLong,
		Example: replayExample,
		Args:    cobra.MaximumNArgs(1),
	}
	flags := cmd.Flags()
	flags.StringArrayVar(&f.policies, "policy", nil, "policy to play, with settings or without (repeatable; default: all)")
	flags.IntVar(&f.replicas, "replicas", 6, "number of replicas")
	flags.IntSliceVar(&f.blocks, "blocks", []int{enginesim.DefaultBlocks}, "KV cache of a replica, in blocks; of several values each is for a replica in turn")
	flags.IntSliceVar(&f.blockTokens, "block-tokens", []int{enginesim.DefaultBlockTokens}, "tokens in a block; likewise")
	flags.StringSliceVar(&f.prefillRates, "prefill-rate", []string{strconv.Itoa(enginesim.DefaultPrefillRate)}, "prompt tokens that a replica computes per second; likewise")
	flags.DurationSliceVar(&f.decodeCosts, "decode-cost", []time.Duration{enginesim.DefaultDecodeCost}, "what each decoding sequence adds to a step; likewise")
	flags.DurationVar(&f.stepOverhead, "step-overhead", enginesim.DefaultStepOverhead, "what a step takes whatever it computes")
	flags.Float64Var(&f.rate, "rate", 1, "multiplies the rate of arrivals")
	flags.DurationVar(&f.scrape, "scrape", time.Second, "time between scrapes of a replica's metrics, 0 for none")
	flags.StringSliceVar(&f.untold, "untold", nil, "what the replicas' metrics pages do not tell: "+strings.Join(replay.PartNames(), ", "))
	flags.IntVar(&f.caddys, "caddys", 1, "number of Caddys in front of the replicas, which do not know of each other")
	flags.StringArrayVar(&f.changes, "change", nil, "leave, join or restart, a replica and a time, such as restart:2@90s (repeatable)")
	flags.IntVar(&f.seeds, "seeds", 1, "runs of each policy")
	flags.Uint64Var(&f.seed, "seed", 1, "first seed")
	flags.DurationVar(&f.jitter, "jitter", time.Second, "most that a request is late by chance, if there are several seeds")
	flags.IntVar(&f.copies, "copies", 1, "times each session is played, with its own text each time")
	flags.DurationVar(&f.ramp, "ramp", 0, "time over which sessions start (default: as recorded)")
	flags.IntVar(&f.limit, "limit", 0, "requests of a trace without sessions to play (default: all)")
	flags.StringVar(&f.workload, "workload", demo.DefaultWorkload, "made-up workload to play without a trace: "+strings.Join(demo.Workloads(), ", "))
	addChatFlags(flags, &f.chats, trace.Workload{Chats: 400}.Or(trace.DefaultWorkload()))
	flags.StringVar(&f.report, "report", "", "write a page with plots to this file")
	flags.StringVar(&f.plot, "plot", "", "write the plot of times to first token to this file (SVG)")
	flags.BoolVar(&f.json, "json", false, "print a JSON object per policy")
	f.complete(cmd)
	cmd.RunE = caddycmd.WrapCommandFuncForCobra(func(caddycmd.Flags) (int, error) {
		return f.run(cmd)
	})
	return cmd
}

func (f *replayFlags) complete(cmd *cobra.Command) {
	none := cobra.FixedCompletions(nil, cobra.ShellCompDirectiveNoFileComp)
	for _, name := range []string{
		"replicas", "blocks", "block-tokens", "prefill-rate", "decode-cost", "step-overhead", "rate", "scrape",
		"change", "caddys", "seeds", "seed", "jitter", "copies", "ramp", "limit",
	} {
		register(cmd, name, none)
	}
	for _, name := range chatFlags {
		register(cmd, name, none)
	}
	var names []cobra.Completion
	for _, c := range replay.Contenders {
		names = append(names, cobra.CompletionWithDesc(c.Name, c.About))
	}
	var parts []cobra.Completion
	for _, p := range replay.Parts {
		parts = append(parts, cobra.CompletionWithDesc(p.Name, p.About))
	}
	register(cmd, "untold", cobra.FixedCompletions(parts, cobra.ShellCompDirectiveNoFileComp))
	register(cmd, "workload", completeWorkloads())
	register(cmd, "policy", cobra.FixedCompletions(names, cobra.ShellCompDirectiveNoFileComp))
}

func (f *replayFlags) run(cmd *cobra.Command) (int, error) {
	ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // a second Ctrl-C does not wait
	args := cmd.Flags().Args()
	err := checkChatFlags(cmd.Flags(), f.workload, strings.Join(args, " "))
	if err == nil {
		err = f.play(ctx, args, typed(cmd), cmd.OutOrStdout(), cmd.ErrOrStderr())
	}
	switch {
	case err == nil:
		return caddy.ExitCodeSuccess, nil
	case errors.Is(err, context.Canceled):
		return caddy.ExitCodeForceQuit, errors.New("interrupted")
	}
	return caddy.ExitCodeFailedStartup, err
}

// play is the command without its environment.
func (f *replayFlags) play(ctx context.Context, args []string, typed string, out, status io.Writer) error {
	study, err := f.study()
	if err != nil {
		return err
	}
	report := replay.Report{Title: "Made-up " + f.workload, Seeds: f.seeds, Command: typed}
	if len(args) > 0 {
		report.Title = filepath.Base(args[0])
	}
	var skipped string
	if study.Traffic, skipped, err = f.load(args); err != nil {
		return err
	}
	all := study.Traffic.Count() * f.copies * len(study.Contenders) * f.seeds
	bar := newBar(status, "replay", all)
	study.Progress = bar.progress
	begun := time.Now()
	report.Results, err = study.Run(ctx)
	bar.finish()
	if err != nil {
		return err
	}
	report.Facts = f.facts(study, skipped)
	if err := errors.Join(writeFile(f.report, report.Write), writeFile(f.plot, report.WritePlot)); err != nil {
		return err
	}
	if f.json {
		return printResults(out, report.Results)
	}
	p := newPrinter(out)
	for _, fact := range report.Facts {
		p.say("%s", fact)
	}
	fmt.Fprintln(p)
	p.replayTable(&report)
	p.say("%d requests in %.1f s.", all, time.Since(begun).Seconds())
	if f.report != "" {
		p.stress("The plots are in %s.", f.report)
	}
	return nil
}

// study is what the flags ask for, without the traffic.
func (f *replayFlags) study() (replay.Study, error) {
	s := replay.Study{Seeds: f.seeds}
	if f.replicas < 1 || f.replicas > 4096 {
		return s, fmt.Errorf("--replicas is %d, but must be from 1 to 4096", f.replicas)
	}
	if f.rate <= 0 {
		return s, fmt.Errorf("--rate is %v, but must be above 0", f.rate)
	}
	if f.caddys < 1 || f.caddys > 64 {
		return s, fmt.Errorf("--caddys is %d, but must be from 1 to 64", f.caddys)
	}
	if f.seeds < 1 || f.copies < 1 {
		return s, fmt.Errorf("--seeds is %d and --copies %d, but both must be at least 1", f.seeds, f.copies)
	}
	if f.scrape < 0 || f.jitter < 0 || f.ramp < 0 {
		return s, errors.New("--scrape, --jitter and --ramp can't be negative")
	}
	s.Setup = replay.Setup{Scrape: f.scrape, Caddys: f.caddys, Rate: f.rate, Seed: f.seed, Copies: f.copies, Ramp: f.ramp}
	if f.seeds > 1 {
		s.Setup.Jitter = f.jitter
	}
	var err error
	if s.Setup.Engines, err = f.engines(); err != nil {
		return s, err
	}
	for _, name := range f.untold {
		p, err := replay.PartNamed(name)
		if err != nil {
			return s, fmt.Errorf("--untold: %w", err)
		}
		s.Setup.Untold = append(s.Setup.Untold, p)
	}
	for _, text := range f.changes {
		c, err := replay.ParseChange(text)
		if err != nil {
			return s, fmt.Errorf("--%w", err)
		}
		s.Setup.Changes = append(s.Setup.Changes, c)
	}
	s.Contenders = replay.Contenders
	if len(f.policies) > 0 {
		s.Contenders = nil
	}
	for _, text := range f.policies {
		c, err := replay.ParseContender(text)
		if err != nil {
			return s, fmt.Errorf("--%w", err)
		}
		s.Contenders = append(s.Contenders, c)
	}
	return s, nil
}

func (f *replayFlags) engines() ([]enginesim.Config, error) {
	if len(f.blocks) == 0 || len(f.blockTokens) == 0 || len(f.prefillRates) == 0 || len(f.decodeCosts) == 0 {
		return nil, errors.New("--blocks, --block-tokens, --prefill-rate and --decode-cost need at least one value")
	}
	engines := make([]enginesim.Config, f.replicas)
	for i := range engines {
		text := f.prefillRates[i%len(f.prefillRates)]
		rate, err := strconv.ParseFloat(text, 64)
		e := enginesim.Config{
			Blocks: f.blocks[i%len(f.blocks)], BlockTokens: f.blockTokens[i%len(f.blockTokens)],
			PrefillRate: rate, DecodeCost: f.decodeCosts[i%len(f.decodeCosts)], StepOverhead: f.stepOverhead,
		}
		switch {
		case err != nil || !(rate > 0):
			return nil, fmt.Errorf("--prefill-rate: %q is no number of tokens a second", text)
		case e.Blocks < 2:
			return nil, fmt.Errorf("--blocks: a KV cache of %d blocks holds nothing", e.Blocks)
		case e.BlockTokens < 1:
			return nil, fmt.Errorf("--block-tokens: %d tokens are no block", e.BlockTokens)
		case e.DecodeCost < 0 || e.StepOverhead < 0:
			return nil, errors.New("--decode-cost and --step-overhead can't be negative")
		}
		engines[i] = e
	}
	return engines, nil
}

// load reads the trace or makes the workload, and says what was left out.
func (f *replayFlags) load(args []string) (*replay.Traffic, string, error) {
	if len(args) == 0 {
		t, err := f.makeUp()
		return t, "", err
	}
	if f.workload != demo.DefaultWorkload {
		return nil, "", fmt.Errorf("a trace, %s, and --workload %s were given, but only one of them can be played", args[0], f.workload)
	}
	recorded, err := trace.Open(args[0])
	if err != nil {
		return nil, "", err
	}
	skipped := ""
	if recorded.Skipped != (trace.Skipped{}) {
		skipped = fmt.Sprintf("Left out of the trace: %s.", leftOut(recorded.Skipped))
	}
	if recorded.HasSessions() {
		t, err := replay.Load(nil, recorded.Sessions(), f.blockTokens...)
		return t, skipped, err
	}
	t, err := replay.Load(limited(recorded.Requests(), f.limit), nil, f.blockTokens...)
	return t, skipped, err
}

func (f *replayFlags) makeUp() (*replay.Traffic, error) {
	if f.workload == demo.DefaultWorkload {
		w := f.chats
		w.Seed = f.seed
		return replay.Load(nil, w.Sessions(), f.blockTokens...)
	}
	kind, found := trace.KindNamed(f.workload)
	if !found {
		return nil, fmt.Errorf("--workload: there is no %q, only %s", f.workload, strings.Join(demo.Workloads(), ", "))
	}
	return replay.Load(limited(kind.Requests(f.seed), f.limit), nil, f.blockTokens...)
}

// leftOut lists what a trace held that can't be played.
func leftOut(s trace.Skipped) string {
	text, err := json.Marshal(s)
	if err != nil {
		return err.Error()
	}
	counts := make(map[string]int)
	if err := json.Unmarshal(text, &counts); err != nil {
		return err.Error()
	}
	var parts []string
	for name, n := range counts {
		if n > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", n, strings.ReplaceAll(name, "_", " ")))
		}
	}
	slices.Sort(parts)
	return strings.Join(parts, ", ")
}

func limited(requests iter.Seq2[trace.Request, error], limit int) iter.Seq2[trace.Request, error] {
	if limit <= 0 {
		return requests
	}
	return func(yield func(trace.Request, error) bool) {
		n := 0
		for r, err := range requests {
			if n++; n > limit || !yield(r, err) {
				return
			}
		}
	}
}

// typed is the command line that was given, for the report.
func typed(cmd *cobra.Command) string {
	words := []string{"caddy kv-cache replay"}
	for _, arg := range cmd.Flags().Args() {
		words = append(words, shellQuoted(filepath.Base(arg)))
	}
	cmd.Flags().Visit(func(flag *pflag.Flag) {
		switch values, many := flag.Value.(pflag.SliceValue); {
		case flag.Name == "report" || flag.Name == "plot":
		case flag.Value.Type() == "bool":
			words = append(words, "--"+flag.Name)
		case many && flag.Value.Type() == "stringArray":
			for _, v := range values.GetSlice() {
				words = append(words, "--"+flag.Name, shellQuoted(v))
			}
		case many:
			words = append(words, "--"+flag.Name, strings.Join(values.GetSlice(), ","))
		default:
			words = append(words, "--"+flag.Name, shellQuoted(flag.Value.String()))
		}
	})
	return strings.Join(words, " ")
}

// shellQuoted is a word as a shell takes it.
func shellQuoted(word string) string {
	const plain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_./:=,@%+"
	if word != "" && strings.Trim(word, plain) == "" {
		return word
	}
	return "'" + strings.ReplaceAll(word, "'", `'\''`) + "'"
}

// facts says what was played.
func (f *replayFlags) facts(s replay.Study, skipped string) []string {
	requests := s.Traffic.Count() * f.copies
	loop := "each at its recorded time"
	if s.Traffic.Closed() {
		loop = "each after the answer to the one before it in its session and the time to think"
	}
	facts := []string{
		fmt.Sprintf("%d requests with %.1f million prompt tokens, %s, at %g times the recorded rate.",
			requests, float64(s.Traffic.PromptTokens()*f.copies)/1e6, loop, f.rate),
		fmt.Sprintf("%d replicas: %s blocks of %s tokens, %s prompt tokens a second, %v and %s a decoding sequence for a step; scraped every %v.",
			f.replicas, listed(f.blocks), listed(f.blockTokens), strings.Join(f.prefillRates, ", "), f.stepOverhead, listed(f.decodeCosts), f.scrape),
	}
	if len(f.untold) > 0 {
		facts = append(facts, "The replicas' pages do not tell: "+strings.Join(f.untold, ", ")+".")
	}
	if f.caddys > 1 {
		facts = append(facts, fmt.Sprintf("%d Caddys in front of them, which do not know of each other; each request comes to one by chance.", f.caddys))
	}
	if len(f.changes) > 0 {
		facts = append(facts, "Changes: "+strings.Join(f.changes, ", ")+".")
	}
	if skipped != "" {
		facts = append(facts, skipped)
	}
	return facts
}

func listed[T any](values []T) string {
	words := make([]string, len(values))
	for i, v := range values {
		words[i] = fmt.Sprint(v)
	}
	return strings.Join(words, ", ")
}

// writeFile has a file written, unless it has no name.
func writeFile(name string, write func(io.Writer) error) error {
	if name == "" {
		return nil
	}
	file, err := os.Create(name)
	if err != nil {
		return err
	}
	return errors.Join(write(file), file.Close())
}

// replayTable compares policies.
func (p *printer) replayTable(r *replay.Report) {
	rows := r.Rows()
	name := 0
	for _, row := range rows {
		name = max(name, len(row.Policy))
	}
	wide := 7
	if r.Seeds > 1 {
		wide = 12
	}
	base := r.Base()
	line := func(policy string, cells ...string) {
		fmt.Fprintf(p, "%-*s", name, policy)
		for _, c := range cells[:6] {
			fmt.Fprintf(p, " %*s", wide, c)
		}
		fmt.Fprintf(p, " %6s %7s  %s\n", cells[6], cells[7], cells[8])
	}
	fmt.Fprint(p, p.bold)
	line("policy", "hit %", "TTFT", "p50", "p90", "p99", "e2e", "held", "busiest", "TTFT ×")
	fmt.Fprint(p, p.plain)
	for _, row := range rows {
		line(row.Policy, row.HitRate, row.Mean, row.P50, row.P90, row.P99, row.Total, row.Held, row.Busiest, row.Against)
	}
	fmt.Fprintln(p)
	if base != "" {
		p.say("TTFT × is the mean against %s, the best rule here that is not of this module.", base)
	}
	if r.Seeds > 1 {
		p.say("Means over %d seeds, ± their standard deviation; (noise) is a difference that could be chance (paired t-test, 95 %%).", r.Seeds)
	}
	for _, row := range rows {
		if row.Failed > 0 {
			p.say("%s: %d requests failed, because no replica took them or theirs went down in the middle of the answer.", row.Policy, row.Failed)
		}
	}
}

func printResults(out io.Writer, results []replay.Result) error {
	encoder := json.NewEncoder(out)
	for _, r := range results {
		if err := encoder.Encode(r); err != nil {
			return fmt.Errorf("writing results: %w", err)
		}
	}
	return nil
}
