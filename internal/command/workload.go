// SPDX-License-Identifier: Apache-2.0

package command

import (
	"fmt"
	"strconv"

	"github.com/spf13/cobra"

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

const oneOffsUsage = "single long prompts beside the conversations of the workload chats (default: a fourth as many)"

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
