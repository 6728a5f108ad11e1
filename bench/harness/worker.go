package harness

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"runtime"
	"sync"
	"syscall"
	"time"
)

// task is what the conductor asks of a worker.
type task struct {
	Do    string // run, fill, fresh, heap, pause
	Ops   int    // run, fresh: how many requests
	Procs int    // run: how many goroutines send them
	From  int    // fill: the first client
	To    int    // fill: the one behind the last
	Hits  int    // fill: how often each comes
}

// result is what the worker answers.
type result struct {
	Ops     int
	Served  int
	CPU     time.Duration // of the whole process, the garbage collector's included
	Wall    time.Duration
	Allocs  uint64
	Bytes   uint64
	Heap    uint64
	Objects uint64
	Pause   *pauses `json:",omitempty"`
	Err     string  `json:",omitempty"`
}

// worker holds one subject in one case.
type worker struct {
	subject Subject
	c       Case
	running Running
	lanes   []*lane
	next    int // the first client that was never seen
}

// lane is what one goroutine sends.
type lane struct {
	call func(i int) bool
	mask int // the number of requests, a power of 2, less 1
	at   int
}

func newWorker(s Subject, c Case) (*worker, error) {
	running, err := s.Open(c)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", s.Name, err)
	}
	return &worker{subject: s, c: c, running: running, next: c.Keys}, nil
}

// serve answers tasks until there are no more.
func (w *worker) serve(in io.Reader, out io.Writer) error {
	tasks, answers := json.NewDecoder(in), json.NewEncoder(out)
	for {
		var t task
		if err := tasks.Decode(&t); errors.Is(err, io.EOF) {
			return w.running.Close()
		} else if err != nil {
			return err
		}
		if err := answers.Encode(w.do(t)); err != nil {
			return err
		}
	}
}

func (w *worker) do(t task) result {
	switch t.Do {
	case "run":
		return w.run(t.Ops, max(1, t.Procs))
	case "fill":
		return w.fill(t.From, t.To, max(1, t.Hits))
	case "fresh":
		return w.fresh(t.Ops)
	case "heap":
		return heap()
	case "pause":
		p := w.pause()
		return result{Pause: &p}
	}
	return result{Err: fmt.Sprintf("unknown task %q", t.Do)}
}

// run sends requests of the case's clients.
func (w *worker) run(ops, procs int) result {
	for len(w.lanes) < procs {
		call := w.running.Caller(visitsOf(w.c, int64(len(w.lanes)+1)))
		w.lanes = append(w.lanes, &lane{call: call, mask: visitsLength - 1})
	}
	each := ops / procs
	served := make([]int, procs)
	return measure(each*procs, func() int {
		if procs == 1 {
			return w.lanes[0].send(each)
		}
		var done sync.WaitGroup
		for i := range procs {
			done.Go(func() { served[i] = w.lanes[i].send(each) })
		}
		done.Wait()
		sum := 0
		for _, n := range served {
			sum += n
		}
		return sum
	})
}

func (l *lane) send(ops int) int {
	served, at, mask, call := 0, l.at, l.mask, l.call
	for range ops {
		if call(at & mask) {
			served++
		}
		at++
	}
	l.at = at
	return served
}

// batch is how many clients are made at a time where there are too many to have them all.
const batch = 50_000

// fill lets each client come a number of times, one after the other.
func (w *worker) fill(first, to, hits int) result {
	sum := result{}
	for first < to {
		n := min(batch, to-first)
		call := w.running.Caller(from(first, n))
		for range hits {
			for i := range n {
				if call(i) {
					sum.Served++
				}
			}
		}
		sum.Ops += n * hits
		first += n
	}
	return sum
}

// fresh sends one request of each of so many clients that nobody has seen.
func (w *worker) fresh(ops int) result {
	call := w.running.Caller(from(w.next, ops))
	w.next += ops
	return measure(ops, func() int {
		served := 0
		for i := range ops {
			if call(i) {
				served++
			}
		}
		return served
	})
}

// measure runs something and says what it cost.
func measure(ops int, f func() int) result {
	runtime.GC()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	cpu, start := cpuTime(), time.Now()
	served := f()
	r := result{Ops: ops, Served: served, Wall: time.Since(start), CPU: cpuTime() - cpu}
	runtime.ReadMemStats(&after)
	r.Allocs, r.Bytes = after.Mallocs-before.Mallocs, after.TotalAlloc-before.TotalAlloc
	return r
}

// cpuTime is what the process has used of the processors so far.
func cpuTime() time.Duration {
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		panic(err) // only a wrong argument can do this
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

// heap is what the process keeps.
func heap() result {
	runtime.GC()
	runtime.GC()
	var stats runtime.MemStats
	runtime.ReadMemStats(&stats)
	return result{Heap: stats.HeapAlloc, Objects: stats.HeapObjects}
}
