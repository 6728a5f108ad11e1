package tieredlimit

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
// A reading far ahead of the latest that lies within the last second before a step back was taken before that step,
// by a caller that was slow to use it; it counts as the latest too.
type clock struct {
	line atomic.Pointer[timeline]
	mu   sync.Mutex // held to replace line
}

// timeline is a stretch of time without a step back. All but latest is fixed: a change makes a new timeline, so that
// nobody combines a reading from one side of a step with a shift from the other.
type timeline struct {
	latest atomic.Int64

	settle    int64 // the wall clock's time at which the first bridge ends
	abandoned int64 // the latest of the timeline before the last step back
	lanes     []lane
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
	line := &timeline{settle: never, abandoned: distant}
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
	case now-latest > slack && now <= line.abandoned && now > line.abandoned-slack:
		return latest, line
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
	next.abandoned = latest
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

// settled is the timeline in which the bridges that are crossed at now have ended.
func (l *timeline) settled(now int64) *timeline {
	next := l.copy(now)
	next.settle = never
	for i := range next.lanes {
		n := &next.lanes[i]
		switch {
		case n.until == never:
		case now+n.shift >= n.until:
			n.shift = 0
			if missing := n.until - now; missing > 0 {
				n.shift = (missing + n.length - 1) / n.length * n.length
			}
			n.until = never
		default:
			next.settle = min(next.settle, n.until-n.shift)
		}
	}
	return next
}

func (l *timeline) copy(latest int64) *timeline {
	next := &timeline{settle: l.settle, abandoned: l.abandoned, lanes: append([]lane(nil), l.lanes...)}
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
