// SPDX-License-Identifier: Apache-2.0

package command

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/demo"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/trace"
)

// completeWorkloads offers what can be made up.
func completeWorkloads() cobra.CompletionFunc {
	known := []cobra.Completion{cobra.CompletionWithDesc(demo.DefaultWorkload, "conversations under a few system prompts, and long single prompts")}
	for _, k := range trace.Kinds {
		known = append(known, cobra.CompletionWithDesc(k.Name, k.About))
	}
	return cobra.FixedCompletions(known, cobra.ShellCompDirectiveNoFileComp)
}

// chatFlags are the flags that say what the workload chats is like.
var chatFlags = []string{
	"chats", "system-prompts", "system-tokens", "turns", "user-tokens", "answer-tokens", "think", "one-offs", "one-off-tokens",
}

// addChatFlags adds them, to be read into w.
func addChatFlags(flags *pflag.FlagSet, w *trace.Workload, defaults trace.Workload) {
	*w = defaults
	flags.Var((*count)(&w.Chats), "chats", "conversations of the workload chats")
	flags.Var((*count)(&w.SystemPrompts), "system-prompts", "system prompts that they share")
	flags.Var((*count)(&w.SystemTokens), "system-tokens", "tokens of a system prompt")
	flags.Var((*count)(&w.Turns), "turns", "turns of a conversation, on average")
	flags.Var((*count)(&w.UserTokens), "user-tokens", "tokens of what a user says, on average")
	flags.Var((*count)(&w.AnswerTokens), "answer-tokens", "tokens of an answer, on average")
	flags.Var((*pause)(&w.Think), "think", "time from an answer to the next turn, on average")
	flags.Var((*oneOffs)(&w.OneOffs), "one-offs", "single prompts beside the chats (default: a fourth as many)")
	flags.Var((*count)(&w.OneOffTokens), "one-off-tokens", "tokens of one of these, on average")
}

// checkChatFlags refuses them, and more that are of chats alone, beside other
// traffic, which they say nothing of.
func checkChatFlags(flags *pflag.FlagSet, workload, trace string, more ...string) error {
	if trace == "" && workload == demo.DefaultWorkload {
		return nil
	}
	for _, name := range slices.Concat(chatFlags, more) {
		if flags.Changed(name) {
			return fmt.Errorf("--%s says what the workload %s is like, but %s is to be played", name, demo.DefaultWorkload, cmp.Or(trace, workload))
		}
	}
	return nil
}

// count is a number from 1 on.
type count int

func (n *count) Set(text string) error {
	said, err := strconv.Atoi(text)
	if err != nil || said < 1 {
		return fmt.Errorf("%q is no number from 1 on", text)
	}
	*n = count(said)
	return nil
}

func (n *count) String() string { return strconv.Itoa(int(*n)) }

func (*count) Type() string { return "int" }

// pause is a time above 0.
type pause time.Duration

func (p *pause) Set(text string) error {
	said, err := time.ParseDuration(text)
	if err != nil || said <= 0 {
		return fmt.Errorf("%q is no duration above 0", text)
	}
	*p = pause(said)
	return nil
}

func (p *pause) String() string { return time.Duration(*p).String() }

func (*pause) Type() string { return "duration" }

// oneOffs is a number as a user says it, kept as [trace.Workload] takes it: 0 is
// the default there, and none is negative.
type oneOffs int

func (n *oneOffs) Set(text string) error {
	said, err := strconv.Atoi(text)
	if err != nil || said < 0 {
		return fmt.Errorf("%q is no number of prompts", text)
	}
	if *n = oneOffs(said); said == 0 {
		*n = -1
	}
	return nil
}

func (n *oneOffs) String() string {
	switch {
	case *n == 0:
		return "" // the usage tells it
	case *n < 0:
		return "0"
	}
	return strconv.Itoa(int(*n))
}

func (*oneOffs) Type() string { return "int" }
