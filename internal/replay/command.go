package replay

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/spf13/cobra"
)

// flags are what a user has written behind the command.
type flags struct {
	config, adapter      string
	noConfig             bool
	json                 bool
	html                 string
	limits               string
	top                  int
	reorder              time.Duration
	timeKey, timeLayout  string
	durationUnit         string
	showKeys, noProgress bool
}

// NewCommand returns the command replay.
func NewCommand(wrap Wrap) *cobra.Command {
	f := new(flags)
	cmd := &cobra.Command{
		Use:   "replay [--config <path>] [--adapter <name>] [--json] [--html <file>] [<log>...]",
		Short: "Shows what limits would have done to recorded traffic",
		Long: `
Reads access logs that Caddy has written in JSON, runs every request through the
tiered_limit handlers of a config at the time at which it came, and reports what
they would have done: refusals and the clients hit, per stack and tier and over
time; how much clients use of each limit, and what other limits would have hit;
and which trusted_hops the forwarding headers in the log imply.

Nothing is served, and nothing but the tiered_limit handlers is provisioned: no
listeners, certificates, logs or other apps. Counters are kept in memory only,
whatever store the config names.

Logs may be compressed by gzip or zstd and given in any order; - or no name at all
reads standard input. Of several logs the requests are merged by time.

Caddy redacts the fields Authorization, Proxy-Authorization and Cookie unless the
log has log_credentials; tiers keyed by one of them cannot be replayed without.

The config is ./Caddyfile if --config is not given. Without any config only the
topology is reported.
`,
		Example: `  $ caddy tiered-limit replay --config Caddyfile /var/log/caddy/access*
  $ caddy tiered-limit replay --limits 100,300,1000 --html report.html access.log
  $ journalctl -u caddy -o cat | caddy tiered-limit replay --json`,
		SilenceUsage: true,
		RunE: func(cmd *cobra.Command, logs []string) error {
			return f.run(cmd, logs, wrap)
		},
	}
	f.register(cmd)
	return cmd
}

func (f *flags) register(cmd *cobra.Command) {
	fs := cmd.Flags()
	fs.StringVarP(&f.config, "config", "c", "", "Config file to replay with")
	fs.StringVarP(&f.adapter, "adapter", "a", "", "Name of the config adapter to apply")
	fs.BoolVar(&f.noConfig, "topology", false, "Report the topology only, without any config")
	fs.BoolVar(&f.json, "json", false, "Print the report as JSON")
	fs.StringVar(&f.html, "html", "", "Write the report to this file as a page with charts, besides")
	fs.StringVar(&f.limits, "limits", "", "Limits to weigh for every tier, such as 100,300,1000")
	fs.IntVar(&f.top, "top", 10, "How many of the worst clients and of the peers to list")
	fs.DurationVar(&f.reorder, "reorder", time.Minute, "How long lines are held back to be sorted by when requests came")
	fs.StringVar(&f.timeKey, "time-key", "", "Name of the time in a line (default: ts, time or timestamp)")
	fs.StringVar(&f.timeLayout, "time-format", "", "Layout of the times, as in Go (default: any of Caddy's)")
	fs.StringVar(&f.durationUnit, "duration-format", "auto", "What durations count: s, ms or ns")
	fs.BoolVar(&f.showKeys, "show-keys", false, "Show keys that are neither addresses nor users as they are")
	fs.BoolVar(&f.noProgress, "quiet", false, "Print neither progress nor warnings on standard error")
}

func (f *flags) run(cmd *cobra.Command, logs []string, wrap Wrap) error {
	o, err := f.options(logs, wrap)
	if err != nil {
		return err
	}
	o.Stdin = cmd.InOrStdin()
	progress := newProgressLine(cmd.ErrOrStderr())
	if !f.noProgress {
		o.Progress = progress.show
	}
	rep, err := Run(cmd.Context(), *o)
	progress.clear()
	if err != nil {
		return err
	}
	if f.html != "" {
		if err := writeFile(f.html, rep.WriteHTML); err != nil {
			return fmt.Errorf("writing the page: %w", err)
		}
	}
	if err := f.print(cmd.OutOrStdout(), rep); err != nil {
		return err
	}
	if rep.Log.Requests == 0 {
		return errors.New("no request could be read from the log; the notes of the report say why")
	}
	return nil
}

// print writes the report as JSON or as text.
func (f *flags) print(w io.Writer, rep *Report) error {
	if f.json {
		enc := json.NewEncoder(w)
		enc.SetIndent("", "  ")
		return enc.Encode(rep)
	}
	return rep.WriteText(w)
}

// options are the options that the flags stand for.
func (f *flags) options(logs []string, wrap Wrap) (*Options, error) {
	if len(logs) == 0 {
		if info, err := os.Stdin.Stat(); err == nil && info.Mode()&os.ModeCharDevice != 0 {
			return nil, errors.New("name at least one log file, or - to read standard input")
		}
		logs = []string{"-"}
	}
	o := &Options{
		Wrap: wrap, Logs: logs, Reorder: f.reorder, TimeKey: f.timeKey, TimeLayout: f.timeLayout,
		DurationUnit: f.durationUnit, ShowKeys: f.showKeys, Quiet: f.noProgress, Shape: Shape{Top: f.top},
	}
	if f.top < 1 || f.top > 1000 {
		return nil, fmt.Errorf("--top %d is not between 1 and 1000", f.top)
	}
	if f.reorder < time.Millisecond || f.reorder > 24*time.Hour {
		return nil, fmt.Errorf("--reorder %s is not between 1ms and 24h", f.reorder)
	}
	var err error
	if o.Shape.Candidates, err = parseLimits(f.limits); err != nil {
		return nil, err
	}
	if o.TopologyOnly = f.noConfig; f.noConfig {
		return o, nil
	}
	if o.Quiet { // Caddy tells which config it has read
		if _, err := caddy.ProvisionContext(loggingTo("FATAL")); err != nil {
			return nil, err
		}
	}
	o.Config, o.ConfigName, err = loadConfig(f.config, f.adapter)
	return o, err
}

func parseLimits(list string) ([]int64, error) {
	var limits []int64
	for s := range strings.FieldsFuncSeq(list, func(r rune) bool { return r == ',' || r == ' ' }) {
		n, err := strconv.ParseInt(s, 10, 32)
		if err != nil || n < 1 {
			return nil, fmt.Errorf("--limits: %q is not a whole number from 1 to 2147483647", s)
		}
		limits = append(limits, n)
	}
	return limits, nil
}

// loadConfig reads and adapts a config, by default the Caddyfile in the working directory. No such file is no error.
func loadConfig(name, adapter string) ([]byte, string, error) {
	config, used, _, err := caddycmd.LoadConfig(name, adapter)
	if err != nil {
		return nil, "", err
	}
	return config, used, nil
}

func writeFile(name string, write func(io.Writer) error) error {
	file, err := os.Create(name)
	if err != nil {
		return err
	}
	w := bufio.NewWriter(file)
	return errors.Join(write(w), w.Flush(), file.Close())
}
