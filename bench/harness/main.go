package harness

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"runtime/pprof"
	"strings"
	"time"
	"unicode"

	"github.com/tieredlimit/caddy-tieredlimit/bench/internal/figures"
)

// Main runs the benchmark with the subjects of this package and some more, and returns the exit status. A program that
// wants its own subjects measured in the same run calls it with them, is built, and is named with -with.
func Main(args []string, out, log io.Writer, extra ...Subject) int {
	if err := run(args, out, log, extra); err != nil {
		fmt.Fprintln(log, "bench:", err)
		return 1
	}
	return 0
}

// options are the command line.
type options struct {
	settings
	worker, group, inCase string
	list, reports         bool
	pick                  string
	with                  string
}

func parse(args []string, log io.Writer) (options, error) {
	o := options{settings: settings{log: log}}
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	flags.SetOutput(log)
	flags.IntVar(&o.rounds, "rounds", 7, "how many rounds, at least 5 for figures that are quoted")
	flags.DurationVar(&o.round, "round", 200*time.Millisecond, "how long each subject's turn takes, about")
	flags.IntVar(&o.keys, "keys", 100_000, "how many clients there are where there are many")
	flags.IntVar(&o.ready, "prepared", 1, "how many requests are prepared, to be used over and over")
	flags.StringVar(&o.pick, "run", "", "print only tables whose name matches this regular expression")
	flags.StringVar(&o.with, "with", "", "further programs built with this package, their subjects to be measured too, between commas")
	flags.BoolVar(&o.short, "short", false, "make few counters, to see whether all works")
	flags.BoolVar(&o.reports, "tables", false, "print the names of the tables and exit")
	flags.BoolVar(&o.list, "subjects", false, "print the subjects as JSON and exit")
	flags.StringVar(&o.profiles, "profiles", "", "an existing folder for a CPU profile of each subject in each case")
	flags.StringVar(&o.worker, "worker", "", "be the worker of this subject; for the benchmark itself")
	flags.StringVar(&o.group, "group", "", "the worker's group")
	flags.StringVar(&o.inCase, "case", "", "the worker's case as JSON")
	if err := flags.Parse(args); err != nil {
		return o, err
	}
	switch {
	case flags.NArg() > 0:
		return o, fmt.Errorf("unexpected argument %q", flags.Arg(0))
	case o.rounds < 1:
		return o, fmt.Errorf("-rounds %d: at least 1 is needed", o.rounds)
	case o.round <= 0:
		return o, fmt.Errorf("-round %s: must be more than 0", o.round)
	case o.ready < 1:
		return o, fmt.Errorf("-prepared %d: at least 1 is needed", o.ready)
	case o.keys < 10:
		return o, fmt.Errorf("-keys %d: at least 10 are needed", o.keys)
	}
	return o, nil
}

// subjects are those of this package, then those of others.
func subjects(extra []Subject) []Subject {
	list := append(ours(), anchors()...)
	list = append(list, floorSubjects()...)
	return append(list, extra...)
}

func run(args []string, out, log io.Writer, extra []Subject) error {
	o, err := parse(args, log)
	if err != nil {
		return err
	}
	own := subjects(extra)
	switch {
	case o.worker != "":
		return work(o, own)
	case o.list:
		return listSubjects(out, own, len(own)-len(extra))
	case o.reports:
		for _, r := range reports() {
			fmt.Fprintln(out, r.name)
		}
		return nil
	}
	pick, err := regexp.Compile(o.pick)
	if err != nil {
		return fmt.Errorf("-run: %w", err)
	}
	var with []string
	if o.with != "" {
		with = strings.Split(o.with, ",")
	}
	all, err := members(own, with)
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "%s, %d rounds, median (least..most)\n", figures.Machine(), o.rounds)
	b := &bench{settings: o.settings, members: all}
	return b.write(out, pick.MatchString)
}

// work is what the process of a worker does.
func work(o options, own []Subject) error {
	var c Case
	if err := json.Unmarshal([]byte(o.inCase), &c); err != nil {
		return fmt.Errorf("-case: %w", err)
	}
	var inGroup []Subject
	for _, s := range own {
		if s.Group == Group(o.group) {
			inGroup = append(inGroup, s)
		}
	}
	s, err := find(inGroup, o.worker)
	if err != nil {
		return err
	}
	w, err := newWorker(s, c)
	if err != nil {
		return err
	}
	if o.profiles != "" {
		stop, err := profile(o.profiles, c.Name+" "+s.Name)
		if err != nil {
			return err
		}
		defer stop()
	}
	return w.serve(os.Stdin, os.Stdout)
}

// profile begins a CPU profile in a folder.
func profile(dir, name string) (stop func(), err error) {
	safe := strings.Map(func(r rune) rune {
		if unicode.IsLetter(r) || unicode.IsDigit(r) {
			return r
		}
		return '-'
	}, name)
	file, err := os.Create(filepath.Join(dir, safe+".prof"))
	if err != nil {
		return nil, err
	}
	if err := pprof.StartCPUProfile(file); err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return func() {
		pprof.StopCPUProfile()
		file.Close()
	}, nil
}

// listSubjects prints the subjects and which of them are not of this package.
func listSubjects(out io.Writer, own []Subject, ours int) error {
	type entry struct {
		Name  string
		Group Group
		Tiers int
		Extra bool
	}
	var list []entry
	for i, s := range own {
		list = append(list, entry{s.Name, s.Group, s.Tiers, i >= ours})
	}
	return json.NewEncoder(out).Encode(list)
}
