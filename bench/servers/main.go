package servers

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"time"

	"github.com/tieredlimit/caddy-tieredlimit/bench/internal/figures"
)

// Main measures what the command line says and returns the exit status.
func Main(args []string, out, log io.Writer) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, args, out, log); err != nil {
		fmt.Fprintln(log, "wire:", err)
		return 1
	}
	return 0
}

func run(ctx context.Context, args []string, out, log io.Writer) error {
	o, err := parse(args, out, log)
	if err != nil {
		return err
	}
	if runtime.NumCPU() < 2 {
		return fmt.Errorf("two cores are needed, one for the server and one for wrk")
	}
	if o.Caddy == "" {
		dir, err := os.MkdirTemp("", "bench")
		if err != nil {
			return err
		}
		defer os.RemoveAll(dir)
		if o.Caddy, err = Build(ctx, dir); err != nil {
			return err
		}
	}
	if _, err := exec.LookPath(o.Nginx); err != nil {
		fmt.Fprintf(log, "without nginx: %v\n", err)
		o.Nginx = ""
	}
	fmt.Fprintf(out, "%s, %d rounds of %s, servers started %d times, median (least..most)\n",
		figures.Machine(), o.Rounds, o.Time, o.Fresh)
	return o.Run(ctx)
}

func parse(args []string, out, log io.Writer) (*Options, error) {
	o := &Options{Out: out, Log: log}
	flags := flag.NewFlagSet("wire", flag.ContinueOnError)
	flags.SetOutput(log)
	flags.StringVar(&o.Caddy, "caddy", "", "the Caddy to run where none is named; default: this project's, built now")
	flags.IntVar(&o.Rounds, "rounds", 20, "how many rounds")
	flags.IntVar(&o.Fresh, "fresh", 2, "how often all servers are started anew")
	flags.DurationVar(&o.Time, "time", 2*time.Second, "how long a server is loaded in each round, whole seconds")
	flags.IntVar(&o.Clients, "clients", 100_000, "how many clients there are where there are many")
	flags.IntVar(&o.Connections, "connections", 16, "how many connections wrk keeps open")
	flags.StringVar(&o.ServerCore, "server-core", "0", "the core that servers run on")
	flags.StringVar(&o.LoadCore, "load-core", "1", "the core that wrk runs on")
	flags.StringVar(&o.Wrk, "wrk", "wrk", "the wrk to run")
	flags.StringVar(&o.Nginx, "nginx", "nginx", "the nginx to run")
	pick := flags.String("run", "", "measure only cases whose name matches this regular expression")
	if err := flags.Parse(args); err != nil {
		return nil, err
	}
	switch {
	case o.Rounds < 1:
		return nil, fmt.Errorf("-rounds %d: at least 1 is needed", o.Rounds)
	case o.Fresh < 1 || o.Fresh > o.Rounds:
		return nil, fmt.Errorf("-fresh %d: must be from 1 to the number of rounds, %d", o.Fresh, o.Rounds)
	case o.Time < time.Second || o.Time%time.Second != 0:
		return nil, fmt.Errorf("-time %s: must be whole seconds", o.Time)
	case o.Clients < 1 || o.Clients > 1<<24:
		return nil, fmt.Errorf("-clients %d: must be from 1 to %d", o.Clients, 1<<24)
	case o.Connections < 1:
		return nil, fmt.Errorf("-connections %d: at least 1 is needed", o.Connections)
	}
	re, err := regexp.Compile(*pick)
	if err != nil {
		return nil, fmt.Errorf("-run: %w", err)
	}
	o.Pick = re.MatchString
	for _, arg := range flags.Args() {
		t, err := parseTarget(arg)
		if err != nil {
			return nil, err
		}
		o.Extra = append(o.Extra, t)
	}
	return o, nil
}

// parseTarget reads NAME=[BINARY:]CADDYFILE.
func parseTarget(arg string) (Target, error) {
	name, rest, ok := strings.Cut(arg, "=")
	if !ok || name == "" || rest == "" {
		return Target{}, fmt.Errorf("%q is not of the form NAME=[BINARY:]CADDYFILE", arg)
	}
	t := Target{Name: name, Config: rest}
	if i := strings.LastIndexByte(rest, ':'); i >= 0 {
		t.Binary, t.Config = rest[:i], rest[i+1:]
	}
	for _, file := range []*string{&t.Binary, &t.Config} {
		if *file == "" {
			continue
		}
		path, err := filepath.Abs(*file)
		if err != nil {
			return Target{}, err
		}
		if _, err := os.Stat(path); err != nil {
			return Target{}, fmt.Errorf("%q: %w", arg, err)
		}
		*file = path
	}
	if t.Config == "" {
		return Target{}, fmt.Errorf("%q names no Caddyfile", arg)
	}
	return t, nil
}
