package tieredlimit

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"

	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/spf13/cobra"
)

// adminClient asks the admin endpoint of a running Caddy.
type adminClient struct {
	address, config, adapter string
	json                     bool
}

// register adds the flags that all commands have.
func (c *adminClient) register(cmd *cobra.Command) {
	fs := cmd.Flags()
	fs.StringVar(&c.address, "address", "", "The address of the admin endpoint, if not the default or that of a config")
	fs.StringVarP(&c.config, "config", "c", "", "Config file that names the address of the admin endpoint")
	fs.StringVarP(&c.adapter, "adapter", "a", "", "Name of the config adapter to apply")
	fs.BoolVar(&c.json, "json", false, "Print the answer as JSON")
	cmd.SilenceUsage = true
}

// ask puts a question and prints the answer, as JSON or by show. Without a question it is a GET.
func ask[A any](cmd *cobra.Command, c *adminClient, path string, question any, show func(io.Writer, *A) error) error {
	answer, err := c.fetch(path, question)
	if err != nil {
		return err
	}
	out := cmd.OutOrStdout()
	if c.json {
		var indented bytes.Buffer
		if err := json.Indent(&indented, answer, "", "  "); err != nil {
			return fmt.Errorf("reading the answer: %w", err)
		}
		_, err := indented.WriteTo(out)
		return err
	}
	a := new(A)
	if err := json.Unmarshal(answer, a); err != nil {
		return fmt.Errorf("reading the answer: %w", err)
	}
	return show(out, a)
}

// fetch puts a question to the endpoint.
func (c *adminClient) fetch(path string, question any) ([]byte, error) {
	address, err := caddycmd.DetermineAdminAPIAddress(c.address, nil, c.config, c.adapter)
	if err != nil {
		return nil, fmt.Errorf("finding the admin endpoint: %w", err)
	}
	method, body := http.MethodGet, io.Reader(nil)
	if question != nil {
		text, err := json.Marshal(question)
		if err != nil {
			return nil, fmt.Errorf("encoding the question: %w", err)
		}
		method, body = http.MethodPost, bytes.NewReader(text)
	}
	response, err := caddycmd.AdminAPIRequest(address, method, adminPath+path, nil, body)
	if err != nil {
		return nil, adminFailure(address, err)
	}
	defer response.Body.Close()
	return io.ReadAll(response.Body)
}

func newInspectCommand() *cobra.Command {
	return newCounterCommand("inspect", "Shows what one counter of a running Caddy says", `
Shows how much of each limit of a tier is used by one client, user or other
identity, and when it resets. Nothing is charged.
`)
}

func newResetCommand() *cobra.Command {
	return newCounterCommand("reset", "Lets a client of a running Caddy start anew", `
Forgets what one counter has counted in the current window, so that a client, user
or other identity has its whole limit again, and shows what the counter says then.
On a shared store this reaches every instance within 5 seconds.
`)
}

// newCounterCommand makes a command about one counter.
func newCounterCommand(name, short, long string) *cobra.Command {
	c, q := new(adminClient), new(counterQuestion)
	cmd := &cobra.Command{
		Use:   name + " --stack <name> --tier <name> [--line <n>] [--uncertain] [<part>...]",
		Short: short,
		Long: long + `
The parts are the values of the tier's key, such as an address for a tier that
counts by client; none for a tier that has one counter for everybody.
`,
		Example: "  $ caddy tiered-limit " + name + " --stack api --tier ip 203.0.113.7",
		RunE: func(cmd *cobra.Command, parts []string) error {
			if q.Stack == "" || q.Tier == "" {
				return errors.New("--stack and --tier are required")
			}
			q.Key = parts
			return ask(cmd, c, name, q, printCounter)
		},
	}
	c.register(cmd)
	fs := cmd.Flags()
	fs.StringVar(&q.Stack, "stack", "", "Name of the stack, as status shows it")
	fs.StringVar(&q.Tier, "tier", "", "Name of the tier")
	fs.IntVar(&q.Line, "line", 0, "Which of the tier's keys is meant, from 1, if several have as many parts")
	fs.BoolVar(&q.Uncertain, "uncertain", false, "The counter of all requests whose key cannot be read with certainty")
	return cmd
}

func newExplainCommand() *cobra.Command {
	c, q := new(adminClient), new(requestQuestion)
	var headers, placeholders []string
	cmd := &cobra.Command{
		Use:   "explain --peer <address> [--header <field>]... [--method <method>] [--host <host>] [--path <path>]",
		Short: "Shows what a running Caddy would decide about a request, and why",
		Long: `
Describes a request to a running Caddy and shows what its tiered_limit stacks would
decide about it: what was made of each entry of the forwarding header, who the
client is, whom each tier counts the request for, what that one has used and has
left, and the outcome. Nothing is charged.

Whether the request would meet a stack at all depends on the routes and is not
looked at: without --stack, all stacks answer.
`,
		Example: `  $ caddy tiered-limit explain --peer 10.0.0.1 -H "X-Forwarded-For: 203.0.113.7"
  $ caddy tiered-limit explain --stack api --peer 203.0.113.7 --set http.auth.user.id=alice`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := q.add(headers, placeholders); err != nil {
				return err
			}
			return ask(cmd, c, "explain", q, printExplanations)
		},
	}
	c.register(cmd)
	fs := cmd.Flags()
	fs.StringVar(&q.Stack, "stack", "", "Name of the stack, as status shows it (default: all)")
	fs.StringVar(&q.Peer, "peer", "", "Address of the other end of the connection, or unix")
	fs.StringVarP(&q.Method, "method", "X", "GET", "Method")
	fs.StringVar(&q.Scheme, "scheme", "", "http or https (default: what the server speaks)")
	fs.StringVar(&q.Host, "host", "", "Host")
	fs.StringVar(&q.Path, "path", "/", "Path and query, as sent")
	fs.StringArrayVarP(&headers, "header", "H", nil, `Header field, as "Name: value"; may be repeated`)
	fs.StringArrayVar(&placeholders, "set", nil, "Placeholder that another handler would set, as name=value; may be repeated")
	return cmd
}

// add reads fields and placeholders as they are written on the command line.
func (q *requestQuestion) add(headers, placeholders []string) error {
	if q.Peer == "" {
		return errors.New("--peer is required")
	}
	q.Headers, q.Placeholders = make(map[string]fieldLines), make(map[string]string)
	for _, field := range headers {
		name, value, found := strings.Cut(field, ":")
		if !found {
			return fmt.Errorf("--header %q is not of the form \"Name: value\"", field)
		}
		q.Headers[name] = append(q.Headers[name], strings.TrimSpace(value))
	}
	for _, setting := range placeholders {
		name, value, found := strings.Cut(setting, "=")
		if !found {
			return fmt.Errorf("--set %q is not of the form name=value", setting)
		}
		q.Placeholders[name] = value
	}
	return nil
}
