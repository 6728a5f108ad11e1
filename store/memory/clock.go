package memory

import (
	"math"
	"sync"
	"sync/atomic"
)

// clock turns the times that callers read off the wall clock into a time that never runs backwards, in milliseconds
// since the Unix epoch.
//
// A reading that is behind the latest by less than a second counts as the latest. A larger step back is bridged: for
// each window length, time goes on from the latest until the current window has run its length, and is then moved by
// the least number of whole windows that keeps it from going back. So a window is never reopened or cut short by a
// step back, never lasts longer than its length, and the windows after it are again those of the wall clock.
//
// Readings can come out of order, since a caller may be slow to use the one it took. So a reading that leads back to
// within a second of where the clock was set back does not jump there. If less time has gone by there than here, it
// was taken before the step, and counts as the latest. Else the step was none, but one reading that came late, and it
// is undone.
type clock struct {
	line atomic.Pointer[timeline]
	mu   sync.Mutex // held to replace line
}

// timeline is a stretch of time without a step back. All but latest is fixed: a change makes a new timeline, so that
// nobody combines a reading from one side of a step with a shift from the other.
type timeline struct {
	latest atomic.Int64

	settle int64 // the wall clock's time at which the first bridge ends
	lanes  []lane

	// Of the last step back: where from, where to, and the lanes before it.
	left    int64
	entered int64
	before  []lane
}

// lane is the time that windows of one length go by: the wall clock's plus shift. A lane with an until is bridging a
// step back, up to that time of its own.
type lane struct {
	length int64
	shift  int64
	until  int64
}

const (
	// slack is how far, in milliseconds, a reading may be behind the latest before the clock has been set back.
	slack = 1000

	never   = math.MaxInt64
	distant = math.MinInt64 / 4 // before any reading, and far enough from the edge to calculate with
)

func newClock() *clock {
	c := &clock{}
	line := &timeline{settle: never, left: distant}
	line.latest.Store(distant)
	c.line.Store(line)
	return c
}

// read says which wall time a reading counts as, and in which timeline.
func (c *clock) read(now int64) (int64, *timeline) {
	line := c.line.Load()
	latest := line.latest.Load()
	switch ahead := now - latest; {
	case ahead == 0:
		return now, line
	case ahead < 0 && ahead > -slack:
		return latest, line
	case ahead > 0 && ahead <= slack && now < line.settle:
		line.advance(now)
		return now, line
	}
	return c.jump(now)
}

// jump is read for all but the small steps forward.
func (c *clock) jump(now int64) (int64, *timeline) {
	c.mu.Lock()
	defer c.mu.Unlock()
	line := c.line.Load()
	latest := line.latest.Load()
	switch {
	case now <= latest && now > latest-slack:
		return latest, line
	case now <= latest:
		line = line.back(latest, now)
		c.line.Store(line)
		return now, line
	case now-latest > slack && now > line.left-slack && now <= line.left+slack:
		if now-line.left < latest-line.entered {
			return latest, line
		}
		line = line.undone(latest, now)
		c.line.Store(line)
		return now, line
	case now >= line.settle:
		line = line.settled(now)
		c.line.Store(line)
		return now, line
	}
	line.advance(now)
	return now, line
}

// lane returns the number of the lane for windows of the given length.
func (c *clock) lane(length int64) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	line := c.line.Load()
	for i := range line.lanes {
		if line.lanes[i].length == length {
			return i
		}
	}
	grown := line.copy(line.latest.Load())
	grown.lanes = append(grown.lanes, lane{length: length, until: never})
	c.line.Store(grown)
	return len(grown.lanes) - 1
}

// latest is the latest time in a lane.
func (c *clock) latest(number int) int64 {
	line := c.line.Load()
	return line.latest.Load() + line.lanes[number].shift
}

// advance moves the latest reading forward to now, unless another caller has moved it further.
func (l *timeline) advance(now int64) {
	for {
		latest := l.latest.Load()
		if now <= latest || l.latest.CompareAndSwap(latest, now) {
			return
		}
	}
}

// back is the timeline that follows when the wall clock is set back from latest to now.
func (l *timeline) back(latest, now int64) *timeline {
	next := l.copy(now)
	next.left, next.entered, next.before = latest, now, l.lanes
	next.settle = never
	for i := range next.lanes {
		n := &next.lanes[i]
		reached := latest + n.shift
		if n.until == never {
			n.until = windowEnd(reached, n.length)
		}
		n.shift = reached - now
		next.settle = min(next.settle, n.until-n.shift)
	}
	return next
}

// undone is the timeline as if the clock had not been set back, in all lanes where that does not take time back. The
// latest is that of l.
func (l *timeline) undone(latest, now int64) *timeline {
	next := l.copy(now)
	for i, before := range l.before {
		if before = before.settled(now); now+before.shift >= latest+l.lanes[i].shift {
			next.lanes[i] = before
		}
	}
	next.left, next.before = distant, nil
	return next.settled(now)
}

// settled is the timeline in which the bridges that are crossed at now have ended.
func (l *timeline) settled(now int64) *timeline {
	next := l.copy(now)
	next.settle = never
	for i, n := range next.lanes {
		next.lanes[i] = n.settled(now)
		if until := next.lanes[i].until; until != never {
			next.settle = min(next.settle, until-n.shift)
		}
	}
	return next
}

// settled is the lane at the wall clock's now: if a bridge is crossed, time moves on by the least number of windows
// that takes it past.
func (n lane) settled(now int64) lane {
	if n.until == never || now+n.shift < n.until {
		return n
	}
	missing := max(0, n.until-now)
	return lane{length: n.length, shift: (missing + n.length - 1) / n.length * n.length, until: never}
}

func (l *timeline) copy(latest int64) *timeline {
	next := &timeline{settle: l.settle, left: l.left, entered: l.entered, before: l.before}
	next.lanes = append(next.lanes, l.lanes...)
	next.latest.Store(latest)
	return next
}

// windowEnd is the end of the window that holds t. Windows are aligned to the Unix epoch, also before it.
func windowEnd(t, length int64) int64 {
	past := t % length
	if past < 0 {
		past += length
	}
	return t - past + length
}
