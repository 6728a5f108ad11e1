package tieredlimit

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/spf13/cobra"
)

func newStatusCommand() *cobra.Command {
	c := new(adminClient)
	var client string
	cmd := &cobra.Command{
		Use:   "status [--client <address>] [--address <interface>] [--json]",
		Short: "Shows the stacks of a running Caddy, and who is refused most",
		Long: `
Shows the tiered_limit stacks of a running Caddy: where they take the client's
address from, tiers and limits, the counters held, and the refusals in the
current window of each tier, with those who were refused most. These are shown by
a fingerprint, or by their key where log_keys is set. With --client, the
fingerprints of that client are shown with its address.
`,
		Example: "  $ caddy tiered-limit status --client 203.0.113.7",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if client != "" && c.json {
				return errors.New("--client and --json do not go together; inspect --json has the fingerprint of a key")
			}
			return ask(cmd, c, "", nil, func(w io.Writer, s *statusReport) error {
				if client != "" {
					if err := c.recognize(s, client); err != nil {
						return err
					}
				}
				return printStatus(w, s)
			})
		},
	}
	c.register(cmd)
	cmd.Flags().StringVar(&client, "client", "", "Address whose fingerprints are to be recognized")
	return cmd
}

// recognize finds the fingerprints of a client in the tiers that count by the client alone.
func (c *adminClient) recognize(s *statusReport, client string) error {
	var failure error
	asked := false
	for _, stack := range s.Stacks {
		for _, t := range stack.Tiers {
			line := slices.IndexFunc(t.Keys, func(parts []string) bool { return len(parts) == 1 && parts[0] == "{"+clientPlaceholder+"}" })
			if line < 0 {
				continue
			}
			answer, err := c.fetch("inspect", &counterQuestion{Stack: stack.Stack, Tier: t.Tier, Key: []string{client}, Line: line + 1})
			if err != nil {
				failure = err
				continue
			}
			var counter counterAnswer
			if err := json.Unmarshal(answer, &counter); err != nil {
				return fmt.Errorf("reading the answer: %w", err)
			}
			asked = true
			for i := range t.MostRefused {
				if t.MostRefused[i].Fingerprint == counter.Fingerprint {
					t.MostRefused[i].client = client
				}
			}
		}
	}
	if !asked && failure != nil {
		return failure
	}
	return nil
}
