// SPDX-License-Identifier: Apache-2.0

// Package command is the command line of this plugin: `caddy kv-cache` and what
// is below it. Each subcommand is in a file of its own and adds itself to
// subcommands.
package command

import (
	"github.com/spf13/cobra"

	caddycmd "github.com/caddyserver/caddy/v2/cmd"
)

func init() {
	caddycmd.RegisterCommand(caddycmd.Command{
		Name:  "kv-cache",
		Usage: "<command>",
		Short: "Tries out and looks into routing by KV cache",
		Long: `
Commands for the load-balancing policies prefix_hash and kv_cache_aware, which
send an LLM request to the replica that holds its prefix in its KV cache.

To see what they do, without any server or GPU:

	$ caddy kv-cache demo
`,
		CobraFunc: func(cmd *cobra.Command) {
			// Without these a mistyped subcommand would be help and success.
			cmd.Args = cobra.NoArgs
			cmd.RunE = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
			for _, subcommand := range subcommands {
				cmd.AddCommand(subcommand())
			}
		},
	})
}

// subcommands make what stands after `caddy kv-cache`.
var subcommands = []func() *cobra.Command{
	newDemo,
	newReplay,
}
