// Package replay runs recorded requests through the tiered_limit handlers of a config and reports what these would have
// done. It reads Caddy's access logs in JSON, at constant memory, and provisions nothing of the config but those
// handlers and the routes that lead to them.
package replay

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync/atomic"
	"time"
)

// Options say what to replay.
type Options struct {
	// Config is a Caddy config in JSON. Without one only the topology is reported.
	Config     []byte
	ConfigName string

	// Wrap tells which handlers are stacks.
	Wrap Wrap

	// Logs are the names of the log files; - is Stdin.
	Logs  []string
	Stdin io.Reader

	// Reorder is for how long lines are held back to be put into the order in which requests came. Default: 1 minute.
	Reorder time.Duration

	// TimeKey is the name of the time in a line. Default: ts, else time, timestamp or @timestamp.
	TimeKey string

	// TimeLayout is the layout of the times, as package time has it. Default: any of Caddy's own.
	TimeLayout string

	// DurationUnit is s, ms or ns where durations are whole numbers. Default: concluded from the log.
	DurationUnit string

	// TopologyOnly tells that no config was asked for.
	TopologyOnly bool

	// ShowKeys puts keys other than client addresses and user names into the report as they are.
	ShowKeys bool

	// Quiet keeps the warnings of the stacks from standard error.
	Quiet bool

	Shape    Shape
	Progress func(Progress)
	Trace    func(Judged)
}

// Progress is how far a run has come.
type Progress struct {
	Requests    int64
	Read, Bytes int64 // on disk; 0 bytes where the whole is not known
}

// run is a replay under way.
type run struct {
	options Options
	plan    *plan
	want    *wanted
	sources []*source
	read    atomic.Int64

	seen        bool
	first, last int64
	requests    int64
	recorded    int64 // that were answered 429 when they were recorded
	times       *timeline
}

// Run replays logs and returns the report. It fails if the config cannot be used or a log cannot be opened; what is
// wrong inside a log is in the report.
func Run(ctx context.Context, o Options) (*Report, error) {
	o.settle()
	r := &run{options: o, times: newTimeline()}
	unit, err := parseUnit(o.DurationUnit)
	if err != nil {
		return nil, err
	}
	for _, name := range o.Logs {
		s, err := newSource(name, o.Stdin, &r.read)
		if err != nil {
			return nil, err
		}
		r.sources = append(r.sources, s)
	}
	if r.plan, err = o.plan(); err != nil {
		return nil, err
	}
	r.plan.studies = newFieldStudies(r.plan)
	r.want = newWanted(r.plan.needs.headers, r.plan.needs.everything)
	r.want.telling = r.plan.needs.telling
	err = r.all(ctx, unit)
	rep := r.report()
	return rep, errors.Join(err, r.plan.close())
}

// settle sets the defaults.
func (o *Options) settle() {
	if o.Reorder <= 0 {
		o.Reorder = time.Minute
	}
	if o.Shape.Top <= 0 {
		o.Shape.Top = 10
	}
	if o.Shape.Bars <= 0 {
		o.Shape.Bars = 96
	}
}

func parseUnit(name string) (durationUnit, error) {
	switch name {
	case "", "auto":
		return unitUnknown, nil
	case "s":
		return unitSeconds, nil
	case "ms":
		return unitMillis, nil
	case "ns":
		return unitNanos, nil
	}
	return 0, fmt.Errorf("duration format %q is not one of auto, s, ms, ns", name)
}

// plan compiles the config. Without one there is a single server that has no stack.
func (o *Options) plan() (*plan, error) {
	if o.Config == nil {
		p := &plan{sites: []*site{{name: "all", chains: newChainStudy(), server: noServer}}}
		p.needs.settle()
		return p, nil
	}
	p, err := compile(o.Config, o.Wrap, o.Quiet)
	if err != nil {
		return nil, err
	}
	for _, s := range p.stacks {
		for _, t := range s.tally.tiers {
			t.showKeys = t.showKeys || o.ShowKeys
		}
	}
	return p, nil
}

// all takes every request of every log through the plan.
func (r *run) all(ctx context.Context, unit durationUnit) error {
	readers := newReaders(func() *lineReader {
		l := &lineReader{want: r.want, timeKey: r.options.TimeKey}
		if l.stamps.layout = r.options.TimeLayout; l.stamps.layout != "" {
			l.stamps.custom = true
		}
		return l
	})
	defer readers.close()
	m, err := newMerge(readers, r.sources, unit, int64(r.options.Reorder))
	if err != nil {
		return err
	}
	defer m.close()
	var size int64
	for _, s := range r.sources {
		size += s.size
	}
	w := newWalk(r.plan, r.want)
	w.trace = r.options.Trace
	for {
		t, log, more, err := m.next()
		if err != nil || !more {
			return err
		}
		r.count(&t)
		w.take(t, log)
		if r.requests&(1<<14-1) == 0 {
			if err := ctx.Err(); err != nil {
				return err
			}
			if r.options.Progress != nil {
				r.options.Progress(Progress{Requests: r.requests, Read: r.read.Load(), Bytes: size})
			}
		}
	}
}

func (r *run) count(t *trip) {
	r.requests++
	if !r.seen || t.entry.start < r.first {
		r.first = t.entry.start
	}
	if !r.seen || t.entry.start > r.last {
		r.last = t.entry.start
	}
	r.seen = true
	refused := t.entry.status == 429
	if refused {
		r.recorded++
	}
	r.times.add(t.at, refused)
}
