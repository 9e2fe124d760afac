// SPDX-License-Identifier: Apache-2.0

package command

import (
	"testing"
	"time"

	"github.com/spf13/pflag"

	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/demo"
	"github.com/seed-2fa47a1e/caddy-kv-cache/internal/trace"
)

// The flags say all there is to say of the workload chats, so that demo and replay
// can be asked for the same.
func TestChatFlags(t *testing.T) {
	var said trace.Workload
	flags := pflag.NewFlagSet("", pflag.ContinueOnError)
	addChatFlags(flags, &said, demo.DefaultChats())
	if said != demo.DefaultChats() {
		t.Errorf("without any flag %+v, want the defaults", said)
	}
	err := flags.Parse([]string{
		"--chats=1", "--system-prompts=2", "--system-tokens=3", "--turns=4", "--user-tokens=5", "--answer-tokens=6",
		"--think=7s", "--one-offs=0", "--one-off-tokens=9",
	})
	want := trace.Workload{
		Chats: 1, SystemPrompts: 2, SystemTokens: 3, Turns: 4, UserTokens: 5, AnswerTokens: 6,
		Think: 7 * time.Second, OneOffs: -1, OneOffTokens: 9, Ramp: demo.DefaultChats().Ramp,
	}
	if err != nil || said != want {
		t.Errorf("%v, %+v, want %+v", err, said, want)
	}
	flags.VisitAll(func(f *pflag.Flag) {
		if !f.Changed {
			t.Errorf("--%s is not in this test", f.Name)
		}
	})
}
