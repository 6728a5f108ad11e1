package replay

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestCensusCountsWhatEachClientUsesInEachWindow(t *testing.T) {
	limits := []LimitInfo{{Count: 5, Window: time.Minute}, {Count: 50, Window: time.Hour}}
	c := newCensus(limits)
	rnd := rand.New(rand.NewPCG(1, 1))
	type place struct {
		client, limit int
		window        int64
	}
	used := make(map[place]int64)
	refused := make(map[int]bool)
	at := testEpoch * 1e9
	for range 50000 {
		at += rnd.Int64N(1e9)
		client := rnd.IntN(1 + rnd.IntN(300))
		hit := client == 7 && rnd.IntN(2) == 0
		refused[client] = refused[client] || hit
		c.add([]byte{byte(client), byte(client >> 8)}, at, hit)
		for j, l := range limits {
			used[place{client, j, at / int64(l.Window)}]++
		}
	}
	c.finish()
	for j := range limits {
		want, peaks := new(spread), make(map[int]int64)
		for p, n := range used {
			if p.limit == j {
				want.add(n, 1)
				peaks[p.client] = max(peaks[p.client], n)
			}
		}
		require.Equal(t, want.sorted(), c.use[j].sorted(), "limit %d", j)
		most := new(spread)
		for _, n := range peaks {
			most.add(n, 1)
		}
		require.Equal(t, most.sorted(), c.peaks(j).sorted(), "limit %d", j)
	}
	clients, hit := c.seen()
	require.Equal(t, []int64{int64(len(refused)), 1}, []int64{clients, hit})
	require.True(t, c.exact())
}

func TestCensusIsBoundedAndRightOnAverageBeyond(t *testing.T) {
	c := newCensus([]LimitInfo{{Count: 5, Window: time.Minute}})
	const n = 3 * maxClients
	for i := range n {
		identity := fmt.Appendf(nil, "%d", i)
		for range 1 + i%3 { // 1, 2 or 3 requests of each
			c.add(identity, testEpoch*1e9, i%3 == 2)
		}
	}
	c.finish()
	require.LessOrEqual(t, len(c.clients), maxClients)
	for i := range c.clients {
		if c.find(c.clients[i].hash) != i {
			t.Fatalf("client %d is not found", i)
		}
	}
	require.False(t, c.exact())
	clients, refused := c.seen()
	require.InEpsilon(t, n, clients, 0.02)
	require.InEpsilon(t, n/3, refused, 0.02)
	for _, v := range c.peaks(0).sorted() {
		require.InEpsilon(t, n/3, v.times, 0.02, "clients that sent %d", v.value)
	}
}

func TestSpread(t *testing.T) {
	s := new(spread)
	for v := int64(1); v <= 1000; v++ {
		s.add(v, 1)
	}
	list := s.sorted()
	require.Len(t, list, 1000)
	require.Equal(t, []int64{500, 990, 999, 1000, 1}, []int64{
		quantile(list, 0.5), quantile(list, 0.99), quantile(list, 0.999), quantile(list, 1), quantile(list, 0),
	})
	values, excess := above(list, 990)
	require.Equal(t, []int64{10, 55, 500500}, []int64{values, excess, total(list)})
	require.Zero(t, quantile(nil, 0.5))
}

func TestWorstFindsThoseRefusedMost(t *testing.T) {
	w := newWorst(100)
	rnd := rand.New(rand.NewPCG(1, 1))
	true5 := make(map[uint64]int64)
	for range 100000 {
		who := uint64(rnd.IntN(5)) // five are refused half of the time, ten thousand others the rest
		if rnd.IntN(2) == 0 {
			who = 100 + uint64(rnd.IntN(10000))
		} else {
			true5[who]++
		}
		w.add(who, func() string { return fmt.Sprint(who) })
	}
	require.Len(t, w.heap, 100)
	require.Len(t, w.index, 100)
	for _, o := range w.top(5) {
		require.Less(t, o.hash, uint64(5))
		require.LessOrEqual(t, o.count-o.over, true5[o.hash])
		require.GreaterOrEqual(t, o.count, true5[o.hash])
		require.Equal(t, fmt.Sprint(o.hash), o.name)
	}
}

func TestTimelineKeepsCountsAsItGrowsCoarser(t *testing.T) {
	tl := newTimeline()
	const n = 3 * maxSlots
	for i := range int64(n) {
		tl.add((testEpoch+i)*1e9, i%10 == 0)
	}
	require.LessOrEqual(t, len(tl.slots), maxSlots)
	bars, width, outside := tl.bars(48)
	require.Zero(t, outside)
	require.LessOrEqual(t, len(bars), 48)
	require.Equal(t, 10*time.Minute, width)
	var requests, refused int64
	for i, b := range bars {
		requests += b.Requests
		refused += b.Refused
		require.Equal(t, time.Unix(testEpoch+600*int64(i), 0).UTC(), b.Time)
	}
	require.Equal(t, []int64{n, (n + 9) / 10}, []int64{requests, refused})
}

func TestTimelineLeavesOutTimesFarOff(t *testing.T) {
	for _, far := range [][]int64{{9e9}, {1000}, {1000, 9e9}} {
		tl := newTimeline()
		for i := range int64(10000) {
			tl.add((testEpoch+i)*1e9, false)
		}
		for _, at := range far {
			tl.add(at*1e9, true)
		}
		bars, width, outside := tl.bars(96)
		require.Equal(t, int64(len(far)), outside, "%v", far)
		require.Equal(t, 2*time.Minute, width)
		require.Len(t, bars, 84)
	}
	bars, _, _ := newTimeline().bars(96)
	require.Empty(t, bars)
}

func TestTimelineOfALogOverYears(t *testing.T) {
	tl := newTimeline()
	for i := range int64(5000) {
		tl.add((testEpoch+i*86400)*1e9, false)
	}
	bars, _, _ := tl.bars(96)
	require.LessOrEqual(t, len(bars), 96)
	require.NotEmpty(t, bars)
}

// peaksOf makes the spread of clients that each sent so many requests in a window.
func peaksOf(values ...int64) []spreadValue {
	s := new(spread)
	for _, v := range values {
		s.add(v, 1)
	}
	return s.sorted()
}

func TestSuggestedLimit(t *testing.T) {
	var usual []int64
	for i := range int64(200) {
		usual = append(usual, 1+i%20)
	}
	uses := peaksOf(usual...)
	for _, c := range []struct {
		name   string
		peaks  []spreadValue
		single bool
		want   int64
		reason string
	}{
		{"clients that are alike", peaksOf(usual...), false, 30, "1.5 times the most that a client sent"},
		{"two that sent far more", peaksOf(append(usual, 900, 70)...), false, 30, "but for 2 clients that sent at least 3 times as much"},
		{"one that sent twice as much", peaksOf(append(usual, 40)...), false, 60, "1.5 times the most that a client sent"},
		{"a quarter that sent far more", peaksOf(append(usual, usualTimes(1000, 60)...)...), false, 1500, "1.5 times the most"},
		{"few clients", peaksOf(1, 2, 3), false, 0, "too few clients"},
		{"everybody in one bucket", nil, true, 30, "1.5 times the busiest window"},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := adviseLimit(uses, c.peaks, c.single)
			require.Equal(t, c.want, got.count, got.reason)
			require.Contains(t, got.reason, c.reason)
		})
	}
	require.Zero(t, adviseLimit(peaksOf(1, 2), nil, true).count)
}

func usualTimes(value int64, n int) (list []int64) {
	for range n {
		list = append(list, value)
	}
	return list
}

func TestRoundUp(t *testing.T) {
	for n, want := range map[int64]int64{
		0: 1, 1: 1, 17: 17, 20: 20, 21: 25, 99: 100, 100: 100, 101: 150, 999: 1000, 1001: 1500, 123456: 150000,
	} {
		require.Equal(t, want, roundUp(n), n)
	}
}

func TestCandidates(t *testing.T) {
	uses := peaksOf(1, 1, 1, 2, 3, 50)
	require.Equal(t, []int64{1, 30, 50, 60, 75, 120}, candidates(uses, 60, 75, nil))
	require.Equal(t, []int64{10, 60, 75, 300}, candidates(uses, 60, 75, []int64{300, 10}))
	require.Equal(t, []int64{60}, candidates(uses, 60, 0, []int64{60}))
}
