package replay

import (
	"fmt"
	"math"
	"strings"
	"time"
)

// mark is a place on an axis.
type mark struct {
	At      float64 // in units of the drawing
	Percent float64 // of its width or height
	Text    string
	Class   string
	Side    string // where the text goes
}

// rect is a bar, or a place to point at.
type rect struct {
	X, W, Y, H float64
	Class      string
	Text       string
}

// timeChart is requests over time: bars of those served, and on top of them those refused.
type timeChart struct {
	Bars    int
	Width   string
	Rects   []rect
	Hovers  []rect
	Grid    []mark
	Ticks   []mark
	Outside int64
}

// chartHeight is the height, in its own units, of every drawing.
const chartHeight = 1000

func newTimeChart(times Times) *timeChart {
	if len(times.Bars) == 0 {
		return nil
	}
	width := time.Duration(times.Seconds * float64(time.Second))
	c := &timeChart{Bars: len(times.Bars), Width: windowText(width), Outside: times.Outside}
	var most int64
	for _, b := range times.Bars {
		most = max(most, b.Requests)
	}
	top := roundUp(most)
	for i, b := range times.Bars {
		x, served := float64(i)+0.06, b.Requests-b.Refused
		h, r := chartHeight*ratio(served, top), chartHeight*ratio(b.Refused, top)
		if r > 0 {
			r = max(r, 12) // to be seen at all
		}
		c.Rects = append(c.Rects, rect{X: x, W: 0.88, Y: chartHeight - h, H: h, Class: "served"})
		if r > 0 {
			c.Rects = append(c.Rects, rect{X: x, W: 0.88, Y: chartHeight - h - r, H: r, Class: "refused"})
		}
		c.Hovers = append(c.Hovers, rect{X: float64(i), W: 1, Text: fmt.Sprintf("%s: %s requests, %s refused",
			b.Time.Format(timeLayout), thousands(b.Requests), thousands(b.Refused))})
	}
	for i := range 3 {
		value := top * int64(2-i) / 2
		at := float64(i) / 2
		c.Grid = append(c.Grid, mark{At: chartHeight * at, Percent: 100 * at, Text: short(value)})
	}
	c.Ticks = timeTicks(times.Bars, width)
	return c
}

// timeTicks names the first, the middle and the last bar.
func timeTicks(bars []Bar, width time.Duration) []mark {
	layout := "Jan 2 15:04"
	switch whole := width * time.Duration(len(bars)); {
	case whole > 20*24*time.Hour:
		layout = "Jan 2"
	case whole < 10*time.Minute:
		layout = "15:04:05"
	}
	end := bars[len(bars)-1].Time.Add(width)
	middle := bars[0].Time.Add(end.Sub(bars[0].Time) / 2)
	return []mark{
		{Text: bars[0].Time.Format(layout), Side: "first"},
		{Percent: 50, Text: middle.Format(layout)},
		{Percent: 100, Text: end.Format(layout), Side: "last"},
	}
}

// limitChart is the share of requests and of clients that limits would hit, both axes logarithmic.
type limitChart struct {
	Per      string
	Requests string // path
	Clients  string // path; empty for a bucket for everybody
	Grid     []mark
	Ticks    []mark
	Marks    []mark
	Hovers   []rect
}

// Least share that is drawn, and the number of limits that are.
const (
	leastShare = 1e-4
	chartSteps = 100
)

func newLimitChart(tier TierReport, r LimitReport) *limitChart {
	if len(r.uses) == 0 {
		return nil
	}
	least, most := float64(1), float64(max(r.Max, r.Count, r.Suggested))*1.15
	if tier.Single {
		least = math.Max(1, float64(min(r.uses[0].value, r.Count))/3)
	}
	most = max(most, least*10)
	x := func(limit float64) float64 { return 1000 * math.Log(limit/least) / math.Log(most/least) }
	c := &limitChart{Per: windowText(r.window)}
	all := total(r.uses)
	var requests, clients strings.Builder
	for i := range chartSteps + 1 {
		limit := int64(math.Round(least * math.Pow(most/least, float64(i)/chartSteps)))
		_, over := above(r.uses, limit)
		hit, _ := above(r.peaks, limit)
		at := max(0, x(float64(limit)))
		point(&requests, i, at, ratio(over, all))
		point(&clients, i, at, ratio(hit, tier.Clients))
		text := fmt.Sprintf("%s/%s would hit %s of the requests", thousands(limit), windowName(r.window), share(over, all))
		if !tier.Single {
			text += ", " + share(hit, tier.Clients) + " of the clients"
		}
		c.Hovers = append(c.Hovers, rect{X: max(0, at-500.0/chartSteps), W: 1000.0 / chartSteps, Text: text})
	}
	c.Requests = requests.String()
	if !tier.Single {
		c.Clients = clients.String()
	}
	for i, text := range [...]string{"100 %", "10 %", "1 %", "0.1 %", "0.01 %"} {
		c.Grid = append(c.Grid, mark{At: 250 * float64(i), Percent: 25 * float64(i), Text: text})
	}
	c.Ticks = logTicks(least, most, x)
	c.mark("config", r.Count, x, r)
	c.mark("suggested", r.Suggested, x, r)
	return c
}

// point continues a path to where a limit has a share.
func point(path *strings.Builder, i int, x, share float64) {
	y := 1000 * math.Log(max(share, leastShare)) / math.Log(leastShare)
	letter := byte('L')
	if i == 0 {
		letter = 'M'
	}
	fmt.Fprintf(path, "%c%.1f %.1f", letter, x, y)
}

// logTicks are the powers of ten between two numbers, and steps of two and five where there are few of them.
func logTicks(least, most float64, x func(float64) float64) (ticks []mark) {
	steps := []int64{1, 2, 5}
	if most/least > 1e3 {
		steps = steps[:1]
	}
	for decade := int64(1); float64(decade) <= most; decade *= 10 {
		for _, step := range steps {
			if n := decade * step; float64(n) >= least && float64(n) <= most {
				ticks = append(ticks, mark{At: x(float64(n)), Percent: x(float64(n)) / 10, Text: short(n)})
			}
		}
	}
	return ticks
}

// mark draws a limit as an upright line.
func (c *limitChart) mark(class string, limit int64, x func(float64) float64, r LimitReport) {
	if limit < 1 {
		return
	}
	at := max(0, x(float64(limit)))
	m := mark{At: at, Percent: at / 10, Text: fmt.Sprintf("%s %d/%s", class, limit, windowName(r.window)), Class: class}
	switch {
	case at > 850:
		m.Side = "left"
	case at < 150:
		m.Side = "right"
	}
	c.Marks = append(c.Marks, m)
}

// short writes a number with few characters: 1500, 15k, 1.5M.
func short(n int64) string {
	switch {
	case n >= 1e6:
		return trimZero(fmt.Sprintf("%.1f", float64(n)/1e6)) + "M"
	case n >= 1e4:
		return trimZero(fmt.Sprintf("%.1f", float64(n)/1e3)) + "k"
	}
	return fmt.Sprint(n)
}

func trimZero(s string) string { return strings.TrimSuffix(s, ".0") }
