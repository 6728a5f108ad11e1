package tieredlimit

import (
	"fmt"

	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/spf13/cobra"

	"github.com/tieredlimit/caddy-tieredlimit/internal/replay"
)

func init() {
	caddycmd.RegisterCommand(caddycmd.Command{
		Name:  "tiered-limit",
		Usage: "<command>",
		Short: "Works with the rate limits of tiered_limit",
		Long: `
Commands that help to find the right limits for tiered_limit, and to see and to
steer what they do.

replay works on recorded logs. The others ask the admin endpoint of a running
Caddy, which they find as other commands do: by --address, or by the config that
--config names, or at the default address.
`,
		CobraFunc: func(cmd *cobra.Command) {
			cmd.RunE = func(cmd *cobra.Command, args []string) error {
				if len(args) > 0 {
					return fmt.Errorf("unknown command %q of tiered-limit", args[0])
				}
				return cmd.Help()
			}
			for _, make := range subcommands {
				cmd.AddCommand(make())
			}
		},
	})
}

// subcommands make the commands below tiered-limit, in the order in which help lists them.
var subcommands = []func() *cobra.Command{
	func() *cobra.Command { return replay.NewCommand(newRehearsal) },
	newStatusCommand,
	newExplainCommand,
	newInspectCommand,
	newResetCommand,
}
