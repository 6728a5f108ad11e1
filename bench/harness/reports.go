package harness

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/tieredlimit/caddy-tieredlimit/bench/internal/figures"
)

// report is one table.
type report struct {
	name string // by which the command line picks it
	make func(*bench) (*figures.Table, error)
}

// bench is one run of the reports.
type bench struct {
	settings
	members []member
}

// reports are all tables, in the order in which they are printed.
func reports() []report {
	var list []report
	for _, c := range []struct{ name, title string }{
		{"served-1", "Served, one hot client"},
		{"served", "Served, many clients, uniform"},
		{"served-zipf", "Served, many clients, Zipf"},
		{"refused-1", "Refused, one hot client"},
		{"refused", "Refused, many clients, uniform"},
	} {
		list = append(list, report{"serve-" + c.name, costReport(GroupServe, c.name, c.title+": ServeHTTP", nameThree)})
	}
	list = append(list, report{"serve-new", newReport(GroupServe, "New clients: ServeHTTP", nameThree)})
	for _, c := range []struct{ name, title string }{
		{"served-1", "Served, one hot client"},
		{"served", "Served, many clients, uniform"},
		{"refused", "Refused, many clients, uniform"},
	} {
		list = append(list, report{"decide-" + c.name, costReport(GroupDecide, c.name, c.title+": deciding alone", nameMemory)})
	}
	return append(list,
		report{"decide-new", newReport(GroupDecide, "New clients: deciding alone", nameMemory)},
		report{"scale-serve", scaleReport(GroupServe, "Two cores against one: ServeHTTP")},
		report{"scale-decide", scaleReport(GroupDecide, "Two cores against one: deciding alone")},
		report{"heap", heapReport},
		report{"growth", growthReport},
		report{"flood", floodReport},
		report{"pause", pauseReport},
	)
}

// caseOf is the case of a name.
func (b *bench) caseOf(name string) Case {
	c := Case{Name: name, Keys: b.keys, Spread: Uniform, Refused: strings.HasPrefix(name, "refused")}
	switch {
	case strings.HasSuffix(name, "-1"):
		c.Keys = 1
	case strings.HasSuffix(name, "-zipf"):
		c.Spread = Zipf
	}
	return c
}

// group is the members of a group.
func (b *bench) group(g Group) []member {
	return slices.DeleteFunc(slices.Clone(b.members), func(m member) bool { return m.Group != g })
}

// named is the members of these names.
func (b *bench) named(g Group, names ...string) []member {
	return slices.DeleteFunc(b.group(g), func(m member) bool { return !slices.Contains(names, m.Name) })
}

// together starts the members' workers for a case, and stops them after f.
func (b *bench) together(list []member, c Case, f func([]*remote) error) error {
	workers, err := b.startAll(list, c)
	if err != nil {
		return err
	}
	err = f(workers)
	if stopped := stopAll(workers); err == nil {
		err = stopped
	}
	return err
}

// costReport compares the processor time of a request.
func costReport(g Group, name, title, base string) func(*bench) (*figures.Table, error) {
	return func(b *bench) (*figures.Table, error) {
		c := b.caseOf(name)
		var all series
		list := b.group(g)
		err := b.together(list, c, func(workers []*remote) error {
			ops, err := b.warm(workers, c, 1)
			if err != nil {
				return err
			}
			all, err = b.interleave(workers, func(i int, r *remote) (result, error) {
				return r.do(task{Do: "run", Ops: ops[i], Procs: 1})
			})
			return err
		})
		if err != nil {
			return nil, err
		}
		return costTable(title, base, c, list, all), nil
	}
}

// newReport compares the processor time of a request of a client that nobody has seen.
func newReport(g Group, title, base string) func(*bench) (*figures.Table, error) {
	return func(b *bench) (*figures.Table, error) {
		c := Case{Name: "new", Keys: 1, Spread: Uniform}
		each := 20_000
		if g == GroupDecide {
			each = 200_000
		}
		if b.short {
			each /= 100
		}
		var all series
		list := b.group(g)
		err := b.together(list, c, func(workers []*remote) (err error) {
			all, err = b.interleave(workers, func(_ int, r *remote) (result, error) {
				return r.do(task{Do: "fresh", Ops: each})
			})
			return err
		})
		if err != nil {
			return nil, err
		}
		return costTable(title, base, c, list, all), nil
	}
}

// costTable says how the base compares with each subject.
func costTable(title, base string, c Case, list []member, all series) *figures.Table {
	t := &figures.Table{Title: title, Head: []string{"subject", "time, " + base + " / it", "B", "allocations"}}
	at := slices.IndexFunc(list, func(m member) bool { return m.Name == base })
	own := perOp(all[at], cpuOf)
	for i, m := range list {
		name := m.Name
		if served := share(all[i]); c.Refused && served > 0.01 || !c.Refused && served < 0.99 {
			name += fmt.Sprintf(" (%.1f %% served)", 100*served)
		}
		t.Add(name, figures.Ratios(own, perOp(all[i], cpuOf)).String(),
			fmt.Sprintf("%.0f", figures.Of(perOp(all[i], func(r result) float64 { return float64(r.Bytes) })).Median),
			fmt.Sprintf("%.1f", figures.Of(perOp(all[i], func(r result) float64 { return float64(r.Allocs) })).Median))
	}
	return t
}

// perOp is what each round says of a request.
func perOp(rounds []result, value func(result) float64) []float64 {
	list := make([]float64, len(rounds))
	for i, r := range rounds {
		list[i] = value(r) / float64(max(1, r.Ops))
	}
	return list
}

func cpuOf(r result) float64 { return float64(r.CPU) }

// share is how much of the requests was served.
func share(rounds []result) float64 {
	served, ops := 0, 0
	for _, r := range rounds {
		served, ops = served+r.Served, ops+r.Ops
	}
	return float64(served) / float64(max(1, ops))
}

// scaleReport says how much more gets done on two processors than on one.
func scaleReport(g Group, title string) func(*bench) (*figures.Table, error) {
	return func(b *bench) (*figures.Table, error) {
		c := b.caseOf("served")
		t := &figures.Table{
			Title: title, Head: []string{"subject", "throughput, 2 / 1", "of what the floor scales"},
			Note: "Wall time, many clients, uniform. The floor is the one with atomic adds. On a machine that has anything else to do this " +
				"says little.",
		}
		list := b.group(g)
		var gains [][]float64
		err := b.together(list, c, func(workers []*remote) error {
			ops, err := b.warm(workers, c, 2)
			if err != nil {
				return err
			}
			var one, two series
			if one, err = b.interleave(workers, func(i int, r *remote) (result, error) {
				first, err := r.do(task{Do: "run", Ops: ops[i] / 2, Procs: 1})
				if err != nil {
					return first, err
				}
				second, err := r.do(task{Do: "run", Ops: ops[i], Procs: 2})
				for len(two) <= i {
					two = append(two, nil)
				}
				two[i] = append(two[i], second)
				return first, err
			}); err != nil {
				return err
			}
			for i := range workers {
				for len(two) <= i {
					two = append(two, nil)
				}
				wall := func(r result) float64 { return float64(r.Wall) }
				gain := perOp(one[i], wall)
				for k, w := range perOp(two[i], wall) {
					gain[k] /= w
				}
				gains = append(gains, gain)
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
		floor := slices.IndexFunc(list, func(m member) bool { return m.Name == nameAtomic })
		for i, m := range list {
			t.Add(m.Name, figures.Of(gains[i]).String(), figures.Ratios(gains[i], gains[floor]).String())
		}
		return t, nil
	}
}

// heapReport says how much memory each client takes.
func heapReport(b *bench) (*figures.Table, error) {
	t := &figures.Table{
		Title: "Heap for each client, limit 600 in an hour",
		Head:  []string{"subject", "B, 1 hit", "B, 20 hits", "objects", "B for each tier with a key"},
		Note:  fmt.Sprintf("%d clients, after two garbage collections.", b.keys/2),
	}
	for _, m := range b.group(GroupServe) {
		if m.Tiers == 0 {
			continue
		}
		c := Case{Name: "heap", Keys: b.keys / 2, Count: 600, Window: time.Hour}
		var sizes []float64
		var objects float64
		for _, hits := range []int{1, 20} {
			if err := b.together([]member{m}, c, func(workers []*remote) error {
				before, after, err := heapAround(workers[0], task{Do: "fill", From: 1, To: c.Keys, Hits: hits})
				sizes = append(sizes, (float64(after.Heap)-float64(before.Heap))/float64(c.Keys-1))
				objects = (float64(after.Objects) - float64(before.Objects)) / float64(c.Keys-1)
				return err
			}); err != nil {
				return nil, err
			}
		}
		keyed := max(1, m.Tiers-1)
		t.Add(m.Name, fmt.Sprintf("%.1f", sizes[0]), fmt.Sprintf("%.1f", sizes[1]), fmt.Sprintf("%.2f", max(0, objects)),
			fmt.Sprintf("%.1f", sizes[1]/float64(keyed)))
	}
	return t, nil
}

// heapAround is what the heap holds before and after a task.
func heapAround(r *remote, t task) (before, after result, err error) {
	if _, err = r.do(task{Do: "fill", To: 1}); err != nil {
		return before, after, err
	}
	if before, err = r.do(task{Do: "heap"}); err != nil {
		return before, after, err
	}
	if _, err = r.do(t); err != nil {
		return before, after, err
	}
	after, err = r.do(task{Do: "heap"})
	return before, after, err
}

// growthReport says how much memory a counter takes while their number grows.
func growthReport(b *bench) (*figures.Table, error) {
	t := &figures.Table{Title: "Heap for each counter while their number grows, B", Head: []string{"subject"}}
	sizes := []int{10_000, 20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000}
	if b.short {
		sizes = []int{1000, 2000}
	}
	for _, n := range sizes {
		t.Head = append(t.Head, fmt.Sprint(n))
	}
	for _, m := range b.named(GroupServe, nameOne, nameGoLimiter, nameXRate, nameHTTPRate) {
		row := []string{m.Name}
		c := Case{Name: "growth", Keys: sizes[len(sizes)-1], Count: 600, Window: ages}
		if err := b.together([]member{m}, c, func(workers []*remote) error {
			from := 1
			var empty result
			for i, n := range sizes {
				before, after, err := heapAround(workers[0], task{Do: "fill", From: from, To: n})
				if err != nil {
					return err
				}
				if i == 0 {
					empty = before
				}
				row = append(row, fmt.Sprintf("%.1f", (float64(after.Heap)-float64(empty.Heap))/float64(n)))
				from = n
			}
			return nil
		}); err != nil {
			return nil, err
		}
		t.Add(row...)
	}
	return t, nil
}

// floodReport says what a flood of addresses does to the heap of a handler with a bound.
func floodReport(b *bench) (*figures.Table, error) {
	t := &figures.Table{Title: "Heap in a flood of addresses against max_keys 100 000, of what it is after 200 000", Head: []string{"subject"}}
	sizes, most := []int{200_000, 1_000_000, 3_000_000, 10_000_000}, 100_000
	if b.short {
		sizes, most = []int{2000, 20_000}, 1000
	}
	for _, n := range sizes {
		t.Head = append(t.Head, fmt.Sprint(n))
	}
	t.Head = append(t.Head, "MB at the end")
	for _, m := range b.named(GroupServe, nameThree, nameOne) {
		row := []string{m.Name}
		c := Case{Name: "flood", Keys: sizes[len(sizes)-1], Count: 600, Window: ages, MaxKeys: most}
		if err := b.together([]member{m}, c, func(workers []*remote) error {
			from := 1
			var first, last result
			for i, n := range sizes {
				_, after, err := heapAround(workers[0], task{Do: "fill", From: from, To: n})
				if err != nil {
					return err
				}
				if from, last = n, after; i == 0 {
					first = after
				}
				row = append(row, figures.Digits(float64(after.Heap)/float64(first.Heap)))
			}
			row = append(row, fmt.Sprintf("%.1f", float64(last.Heap)/1e6))
			return nil
		}); err != nil {
			return nil, err
		}
		t.Add(row...)
	}
	return t, nil
}

// pauseReport says how much longer requests take while a million counters expire.
func pauseReport(b *bench) (*figures.Table, error) {
	keys, window := 1_000_000, 20*time.Second
	if b.short {
		keys, window = 1000, 400*time.Millisecond
	}
	t := &figures.Table{
		Title: fmt.Sprintf("Requests while the counters of %d clients expire, of what they take otherwise", keys),
		Head:  []string{"subject", "99.9 % within", "longest", "requests"},
	}
	for _, m := range b.named(GroupServe, nameThree, nameOne) {
		var p99, longest []float64
		requests := 0
		c := Case{Name: "pause", Keys: keys, Count: 600, Window: window}
		for range min(b.rounds, 5) {
			if err := b.together([]member{m}, c, func(workers []*remote) error {
				res, err := workers[0].do(task{Do: "pause"})
				if err != nil {
					return err
				}
				p := res.Pause
				p99 = append(p99, float64(p.Expiry.P999)/float64(p.Idle.P999))
				longest = append(longest, float64(p.Expiry.Max)/float64(p.Idle.Max))
				requests += p.Expiry.Requests
				return nil
			}); err != nil {
				return nil, err
			}
		}
		t.Add(m.Name, figures.Of(p99).String(), figures.Of(longest).String(), fmt.Sprint(requests))
	}
	return t, nil
}

// write prints the reports that were asked for.
func (b *bench) write(out io.Writer, pick func(name string) bool) error {
	for _, r := range reports() {
		if !pick(r.name) {
			continue
		}
		fmt.Fprintf(b.log, "%s\n", r.name)
		t, err := r.make(b)
		if err != nil {
			return fmt.Errorf("%s: %w", r.name, err)
		}
		if err := t.Write(out); err != nil {
			return err
		}
	}
	return nil
}
