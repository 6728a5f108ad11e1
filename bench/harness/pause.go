package harness

import (
	"math/bits"
	"time"
)

// pauses are what requests wait at most, while nothing happens and while all counters expire.
type pauses struct {
	Idle    latencies
	Expiry  latencies
	Counted int // clients that had a counter at the end of the window
}

// latencies sums up how long requests took.
type latencies struct {
	Requests  int
	P999, Max time.Duration
}

// pause counts the case's clients in one window, and looks at how long requests take in its second half and across its
// end. It waits for the window to begin: windows are aligned to the Unix epoch.
func (w *worker) pause() pauses {
	_, window := w.c.limit()
	start := time.Now().Truncate(window).Add(window)
	time.Sleep(time.Until(start))
	w.fill(0, w.c.Keys, 1)
	p := pauses{Counted: w.c.Keys}
	const watched = 100_000
	l := &lane{call: w.running.Caller(visitsOf(Case{Keys: min(watched, w.c.Keys)}, 1)), mask: visitsLength - 1}
	end := start.Add(window)
	margin := window / 20
	p.Idle = l.watch(start.Add(window/2), end.Add(-margin))
	p.Expiry = l.watch(end.Add(-margin), end.Add(window/4))
	return p
}

// watch sends requests from one time to another and takes the time of each.
func (l *lane) watch(from, to time.Time) latencies {
	time.Sleep(time.Until(from))
	var h histogram
	for last := time.Now(); last.Before(to); {
		l.send(1)
		now := time.Now()
		h.add(now.Sub(last))
		last = now
	}
	return latencies{Requests: h.n, P999: h.quantile(0.999), Max: h.max}
}

// histogram counts durations in steps of about 3 %.
type histogram struct {
	counts [64 * steps]int
	n      int
	max    time.Duration
}

const steps = 32 // in each power of 2

func (h *histogram) add(d time.Duration) {
	v := uint64(max(d, steps))
	exp := bits.Len64(v) - bits.Len64(steps)
	h.counts[exp*steps+int(v>>exp)-steps]++
	h.n++
	h.max = max(h.max, d)
}

func (h *histogram) quantile(q float64) time.Duration {
	left := int(q * float64(h.n))
	for i, n := range h.counts {
		if left -= n; left < 0 {
			exp, step := i/steps, i%steps
			return time.Duration((steps + step) << exp)
		}
	}
	return h.max
}
