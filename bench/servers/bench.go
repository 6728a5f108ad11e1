package servers

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"time"

	"github.com/tieredlimit/caddy-tieredlimit/bench/internal/figures"
)

// configs are the Caddyfiles that are measured in any case.
//
//go:embed *.Caddyfile
var configs embed.FS

// Options say what is measured and how.
type Options struct {
	Caddy       string   // the binary for all that names none
	Extra       []Target // beside the ones that are measured in any case
	Rounds      int
	Fresh       int // how often all servers of a group are started anew
	Time        time.Duration
	Clients     int
	Connections int
	ServerCore  string
	LoadCore    string
	Wrk         string
	Nginx       string // empty: none
	Pick        func(name string) bool
	Out, Log    io.Writer

	dir, script string
}

// Case is one kind of traffic.
type Case struct {
	Name    string
	Title   string
	Many    bool
	Refused bool
}

// Cases are the groups, in the order in which they are measured.
var Cases = []Case{
	{Name: "served-1", Title: "Served, one hot client"},
	{Name: "served", Title: "Served, many clients", Many: true},
	{Name: "refused-1", Title: "Refused, one hot client", Refused: true},
	{Name: "refused", Title: "Refused, many clients", Many: true, Refused: true},
}

// limit is the limit of each client: one that is never reached, or that the first request has used up.
func (c Case) limit() (int, time.Duration) {
	if c.Refused {
		return 1, 24 * 365 * time.Hour
	}
	return 2_000_000_000, 24 * 365 * time.Hour
}

const (
	bareName    = "bare"
	againName   = "bare, again"
	oursName    = "tiered_limit, 3 tiers"
	nginxName   = "nginx, bare"
	limitedName = "nginx, limit_req"
)

// Run measures all cases and prints a table for each.
func (o *Options) Run(ctx context.Context) error {
	dir, err := os.MkdirTemp("", "bench")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	o.dir = dir
	if err := o.writeScript(); err != nil {
		return err
	}
	if err := o.writeConfigs(); err != nil {
		return err
	}
	if _, err := exec.LookPath("taskset"); err != nil {
		return fmt.Errorf("taskset is needed (Debian: util-linux): %w", err)
	}
	if _, err := exec.LookPath(o.Wrk); err != nil {
		return fmt.Errorf("wrk is needed (Debian: wrk): %w", err)
	}
	for _, c := range Cases {
		if !o.Pick(c.Name) {
			continue
		}
		t, err := o.group(ctx, c)
		if err != nil {
			return fmt.Errorf("%s: %w", c.Name, err)
		}
		if err := t.Write(o.Out); err != nil {
			return err
		}
	}
	return nil
}

// writeConfigs puts the Caddyfiles where Caddy finds them.
func (o *Options) writeConfigs() error {
	entries, err := fs.ReadDir(configs, ".")
	if err != nil {
		return err
	}
	for _, e := range entries {
		text, err := configs.ReadFile(e.Name())
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(o.dir, e.Name()), text, 0o600); err != nil {
			return err
		}
	}
	return nil
}

// targets are the servers of a case.
func (o *Options) targets(c Case) []Target {
	bare := filepath.Join(o.dir, "served.Caddyfile")
	if c.Refused {
		bare = filepath.Join(o.dir, "refused.Caddyfile")
	}
	list := []Target{
		{Name: bareName, Binary: o.Caddy, Config: bare, Base: bareName, Static: true},
		{Name: againName, Binary: o.Caddy, Config: bare, Base: bareName, Static: true},
		{Name: oursName, Binary: o.Caddy, Config: filepath.Join(o.dir, "tiers.Caddyfile"), Base: bareName},
	}
	for _, t := range o.Extra {
		if t.Binary == "" {
			t.Binary = o.Caddy
		}
		t.Base = bareName
		list = append(list, t)
	}
	if o.Nginx != "" {
		list = append(list, Target{Name: nginxName, Config: nginxBare, Base: nginxName, Static: true},
			Target{Name: limitedName, Config: nginxLimit, Base: nginxName})
	}
	return list
}

// measured is what the rounds say of one target.
type measured struct {
	rate     []float64 // requests in a second
	cpu      []float64 // microseconds of the server's processor time for a request
	memory   []float64 // bytes, at the end
	requests int
	statuses int
}

// group measures the servers of a case side by side.
func (o *Options) group(ctx context.Context, c Case) (*figures.Table, error) {
	targets := o.targets(c)
	seen := make([]measured, len(targets))
	for fresh := range o.Fresh {
		rounds := o.Rounds / o.Fresh
		if fresh < o.Rounds%o.Fresh {
			rounds++
		}
		if err := o.rounds(ctx, c, targets, seen, rounds); err != nil {
			return nil, err
		}
	}
	return o.table(c, targets, seen), nil
}

// rounds starts all servers, lets each see every client, and loads them in turn.
func (o *Options) rounds(ctx context.Context, c Case, targets []Target, seen []measured, rounds int) error {
	var running []*server
	defer func() {
		for _, s := range running {
			s.stop()
		}
	}()
	clients := 1
	if c.Many {
		clients = o.Clients
	}
	for _, t := range targets {
		s, err := o.start(ctx, t, c)
		if err != nil {
			return err
		}
		running = append(running, s)
		for s.sent == 0 || s.sent < clients {
			if _, err := o.send(ctx, s, clients, time.Second); err != nil {
				return err
			}
		}
	}
	for round := range rounds {
		for _, i := range rand.Perm(len(running)) {
			if err := o.round(ctx, running[i], clients, &seen[i]); err != nil {
				return err
			}
		}
		fmt.Fprintf(o.Log, "%s: round %d of %d\n", c.Name, round+1, rounds)
	}
	for i, s := range running {
		memory, err := s.memory()
		if err != nil {
			return err
		}
		seen[i].memory = append(seen[i].memory, float64(memory))
	}
	return nil
}

// round loads one server once.
func (o *Options) round(ctx context.Context, s *server, clients int, m *measured) error {
	before, err := s.cpu()
	if err != nil {
		return err
	}
	l, err := o.send(ctx, s, clients, o.Time)
	if err != nil {
		return err
	}
	after, err := s.cpu()
	if err != nil {
		return err
	}
	if l.Broken > 0 {
		return fmt.Errorf("%s: %d connections or requests failed", s.Name, l.Broken)
	}
	m.rate = append(m.rate, l.perSecond())
	m.cpu = append(m.cpu, float64(after-before)/1e3/float64(l.Requests))
	m.requests += l.Requests
	m.statuses += l.Statuses
	return nil
}

// table says how each target compares with its base.
func (o *Options) table(c Case, targets []Target, seen []measured) *figures.Table {
	t := &figures.Table{Title: c.Title, Head: []string{
		"server", "throughput, of its base", "CPU for a request, of its base", "added CPU, us", "RSS, MiB",
	}}
	if c.Many {
		t.Note = fmt.Sprintf("%d clients.", o.Clients)
	}
	for i, target := range targets {
		at := slices.IndexFunc(targets, func(b Target) bool { return b.Name == target.Base })
		base := &seen[at]
		var added []float64
		for k := range seen[i].cpu {
			added = append(added, seen[i].cpu[k]-base.cpu[k])
		}
		name := target.Name
		if refused := float64(seen[i].statuses) / float64(max(1, seen[i].requests)); !target.Static &&
			(c.Refused && refused < 0.99 || !c.Refused && refused > 0.01) {
			name += fmt.Sprintf(" (%.1f %% refused)", 100*refused)
		}
		t.Add(name, figures.Ratios(seen[i].rate, base.rate).String(), figures.Ratios(seen[i].cpu, base.cpu).String(),
			figures.Of(added).String(), figures.Digits(figures.Of(seen[i].memory).Median/(1<<20)))
	}
	return t
}

// Build builds this project's Caddy into a folder.
func Build(ctx context.Context, dir string) (string, error) {
	binary := filepath.Join(dir, "caddy")
	cmd := exec.CommandContext(ctx, "go", "build", "-o", binary, "github.com/tieredlimit/caddy-tieredlimit/cmd/caddy")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", errors.Join(fmt.Errorf("building Caddy: %w", err), errors.New(string(out)))
	}
	return binary, nil
}
