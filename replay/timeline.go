package replay

import (
	"maps"
	"slices"
	"time"
)

// timeline counts requests and refusals over time. It begins with seconds and doubles up as often as it must, so that
// it never has more than maxSlots of them.
type timeline struct {
	width int64 // of a slot, in seconds
	slots map[int64]*slot
	last  *slot
	at    int64 // number of the last slot
}

// slot is what happened in a stretch of time.
type slot struct{ requests, refused int64 }

const maxSlots = 8192

func newTimeline() *timeline {
	return &timeline{width: 1, slots: make(map[int64]*slot)}
}

// add counts a request at a time, in nanoseconds since the Unix epoch.
func (t *timeline) add(at int64, refused bool) {
	number := at / 1e9 / t.width
	if t.last == nil || number != t.at {
		t.last = t.find(number)
		t.at = at / 1e9 / t.width
	}
	t.last.requests++
	if refused {
		t.last.refused++
	}
}

func (t *timeline) find(number int64) *slot {
	if s := t.slots[number]; s != nil {
		return s
	}
	for len(t.slots) >= maxSlots {
		t.double()
		number /= 2
	}
	s := t.slots[number]
	if s == nil {
		s = new(slot)
		t.slots[number] = s
	}
	return s
}

// double makes one slot of two.
func (t *timeline) double() {
	wider := make(map[int64]*slot, len(t.slots)/2+1)
	for number, s := range t.slots {
		if w := wider[number/2]; w != nil {
			w.requests += s.requests
			w.refused += s.refused
		} else {
			wider[number/2] = s
		}
	}
	t.slots = wider
	t.width *= 2
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
	numbers := slices.Sorted(maps.Keys(t.slots))
	var all int64
	for _, s := range t.slots {
		all += s.requests
	}
	last := t.edge(reversed(numbers), all)
	for numbers[len(numbers)-1] > last {
		numbers = numbers[:len(numbers)-1]
	}
	first := t.edge(numbers, all)
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
	for number, s := range t.slots {
		i := number*t.width/wide - from
		if i < 0 || i >= int64(len(bars)) {
			outside += s.requests
			continue
		}
		bars[i].Requests += s.requests
		bars[i].Refused += s.refused
	}
	return bars, time.Duration(wide) * time.Second, outside
}

// edge is the first of the numbers, unless only a few requests come before a long gap. A gap is long if it is longer
// than everything behind it, and a thousandth of all requests is few.
func (t *timeline) edge(numbers []int64, all int64) int64 {
	var before int64
	first, end := numbers[0], numbers[len(numbers)-1]
	for i, number := range numbers[:len(numbers)-1] {
		if before += t.slots[number].requests; before*1000 > all {
			break
		}
		gap, rest := distance(numbers[i+1], number), distance(end, numbers[i+1])
		if gap > rest && gap*t.width > 86400 {
			first = numbers[i+1]
		}
	}
	return first
}

func distance(a, b int64) int64 { return max(a-b, b-a) }

func reversed(list []int64) []int64 {
	r := slices.Clone(list)
	slices.Reverse(r)
	return r
}
