package replay

import (
	"cmp"
	"slices"
	"time"
)

// timeline counts requests and refusals over time. It begins with seconds and doubles them as often as it must, so that
// it never has more than maxSlots.
type timeline struct {
	width int64  // of a slot, in seconds
	slots []slot // by number
	last  int    // index of the slot that was counted in last
}

// slot is what happened in a stretch of time.
type slot struct {
	number            int64 // the time, in widths since the Unix epoch
	requests, refused int64
}

const maxSlots = 8192

func newTimeline() *timeline { return &timeline{width: 1} }

// add counts a request at a time, in nanoseconds since the Unix epoch.
func (t *timeline) add(at int64, refused bool) {
	number := at / 1e9 / t.width
	if t.last >= len(t.slots) || t.slots[t.last].number != number {
		t.last = t.find(at / 1e9)
	}
	s := &t.slots[t.last]
	s.requests++
	if refused {
		s.refused++
	}
}

// find is the index of the slot of a second, which is made if there is none. Mostly it is a new one at the end.
func (t *timeline) find(second int64) int {
	if len(t.slots) == maxSlots {
		t.double()
	}
	number := second / t.width
	if n := len(t.slots); n == 0 || t.slots[n-1].number < number {
		t.slots = append(t.slots, slot{number: number})
		return n
	}
	i, found := slices.BinarySearchFunc(t.slots, number, func(s slot, n int64) int { return cmp.Compare(s.number, n) })
	if !found {
		t.slots = slices.Insert(t.slots, i, slot{number: number})
	}
	return i
}

// double makes one slot of two, until some are free.
func (t *timeline) double() {
	for len(t.slots) > maxSlots*3/4 {
		t.width *= 2
		n := -1
		for _, s := range t.slots {
			s.number /= 2
			if n >= 0 && t.slots[n].number == s.number {
				t.slots[n].requests += s.requests
				t.slots[n].refused += s.refused
				continue
			}
			n++
			t.slots[n] = s
		}
		t.slots = t.slots[:n+1]
	}
}

// barWidths are the lengths of time, in seconds, that a bar of a chart may stand for.
var barWidths = []int64{
	1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 2 * 3600, 3 * 3600, 6 * 3600, 12 * 3600, 86400, 2 * 86400,
	7 * 86400, 14 * 86400, 28 * 86400,
}

// Bar is what happened in one of equally long stretches of time.
type Bar struct {
	Time     time.Time `json:"time"`
	Requests int64     `json:"requests"`
	Refused  int64     `json:"refused"`
}

// bars sums the slots up to at most n bars, without gaps. A few requests far off, as a clock that was set wrong leaves
// them, are left out and counted.
func (t *timeline) bars(n int) (bars []Bar, width time.Duration, outside int64) {
	if len(t.slots) == 0 {
		return nil, 0, 0
	}
	first, last := t.edges()
	wide := barWidths[len(barWidths)-1]
	for _, w := range barWidths {
		if w >= t.width && (last+1)*t.width/w-first*t.width/w < int64(n) {
			wide = w
			break
		}
	}
	from := first * t.width / wide
	bars = make([]Bar, min(last*t.width/wide-from+1, int64(n)))
	for i := range bars {
		bars[i].Time = time.Unix((from+int64(i))*wide, 0).UTC()
	}
	for _, s := range t.slots {
		i := s.number*t.width/wide - from
		if i < 0 || i >= int64(len(bars)) {
			outside += s.requests
			continue
		}
		bars[i].Requests += s.requests
		bars[i].Refused += s.refused
	}
	return bars, time.Duration(wide) * time.Second, outside
}

// edges are the numbers of the first and the last slot, but for a few requests far off. They are far off if the gap to
// the others is longer than the time in which these all came, and a day; and few if they are no more than a thousandth.
func (t *timeline) edges() (first, last int64) {
	var all, few int64
	for _, s := range t.slots {
		all += s.requests
	}
	from, to := 0, len(t.slots)-1
	for i := to; i > 0; i-- {
		if few += t.slots[i].requests; few*1000 > all {
			break
		}
		if t.far(t.slots[i].number-t.slots[i-1].number, t.slots[i-1].number-t.slots[from].number) {
			to = i - 1
		}
	}
	few = 0
	for i := from; i < to; i++ {
		if few += t.slots[i].requests; few*1000 > all {
			break
		}
		if t.far(t.slots[i+1].number-t.slots[i].number, t.slots[to].number-t.slots[i+1].number) {
			from = i + 1
		}
	}
	return t.slots[from].number, t.slots[to].number
}

// far tells whether a gap is long, against the time on its other side.
func (t *timeline) far(gap, rest int64) bool { return gap > rest && gap*t.width > 86400 }
