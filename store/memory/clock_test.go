package memory

import (
	"testing"

	"github.com/stretchr/testify/assert"
)

// reading is a time off the wall clock, what it counts as, and where that is in each of two lanes.
type reading struct {
	now, counts   int64
	minute, short int64
}

func TestClock(t *testing.T) {
	const (
		minute = 60_000
		short  = 700
		noon   = 1_800_000_300_000 // a multiple of both
	)
	for name, readings := range map[string][]reading{
		"forward": {
			{noon, noon, noon, noon},
			{noon + 1, noon + 1, noon + 1, noon + 1},
			{noon + 5000, noon + 5000, noon + 5000, noon + 5000},
			{noon + 9*minute, noon + 9*minute, noon + 9*minute, noon + 9*minute},
		},
		"a little behind": {
			{noon, noon, noon, noon},
			{noon - 1, noon, noon, noon},
			{noon - 999, noon, noon, noon},
			{noon + 1, noon + 1, noon + 1, noon + 1},
		},
		"set back an hour": {
			{noon + 20_000, noon + 20_000, noon + 20_000, noon + 20_000},
			{noon - 60*minute, noon - 60*minute, noon + 20_000, noon + 20_000},
			// The short window ends at noon + 20300, so 300 ms later it goes by the wall clock, in whole windows.
			{noon - 60*minute + 299, noon - 60*minute + 299, noon + 20_299, noon + 20_299},
			{noon - 60*minute + 300, noon - 60*minute + 300, noon + 20_300, noon + 20_700},
			{noon - 60*minute + 1000, noon - 60*minute + 1000, noon + 21_000, noon + 21_400},
			// The minute has 40 s to go.
			{noon - 60*minute + 39_999, noon - 60*minute + 39_999, noon + 59_999, noon + 60_399},
			{noon - 60*minute + 40_000, noon - 60*minute + 40_000, noon + minute + 40_000, noon + 60_400},
		},
		"set back by a second, within the minute": {
			{noon + 20_000, noon + 20_000, noon + 20_000, noon + 20_000},
			{noon + 19_000, noon + 19_000, noon + 20_000, noon + 20_000},
			{noon + 58_999, noon + 58_999, noon + 59_999, noon + 58_999},
			{noon + 59_000, noon + 59_000, noon + minute + 59_000, noon + 59_000},
		},
		"set back twice within one window": {
			{noon + 20_000, noon + 20_000, noon + 20_000, noon + 20_000},
			{noon - 5000, noon - 5000, noon + 20_000, noon + 20_000},
			{noon - 9000, noon - 9000, noon + 20_000, noon + 20_000},
			{noon + 30_999, noon + 30_999, noon + 59_999, noon + 30_999},
			{noon + 31_000, noon + 31_000, noon + 91_000, noon + 31_000},
		},
		"set back, and forward again": {
			{noon + 20_000, noon + 20_000, noon + 20_000, noon + 20_000},
			{noon - 60*minute, noon - 60*minute, noon + 20_000, noon + 20_000},
			{noon + 25_000, noon + 25_000, noon + 85_000, noon + 25_000},
		},
		"read before the clock was set back": {
			{noon + 20_000, noon + 20_000, noon + 20_000, noon + 20_000},
			{noon - 60*minute, noon - 60*minute, noon + 20_000, noon + 20_000},
			{noon - 60*minute + 2, noon - 60*minute + 2, noon + 20_002, noon + 20_002},
			{noon + 20_001, noon - 60*minute + 2, noon + 20_002, noon + 20_002},
			{noon + 19_001, noon - 60*minute + 2, noon + 20_002, noon + 20_002},
			{noon - 60*minute + 3, noon - 60*minute + 3, noon + 20_003, noon + 20_003},
		},
		"read long ago": {
			{noon + 20_000, noon + 20_000, noon + 20_000, noon + 20_000},
			{noon + 10_000, noon + 10_000, noon + 20_000, noon + 20_000},
			{noon + 10_007, noon + 10_007, noon + 20_007, noon + 20_007},
			{noon + 20_006, noon + 10_007, noon + 20_007, noon + 20_007},
			{noon + 20_007, noon + 20_007, noon + 20_007, noon + 20_007},
			{noon + 59_999, noon + 59_999, noon + 59_999, noon + 59_999},
		},
		"before the epoch": {
			{-90_000, -90_000, -90_000, -90_000},
			{-90_500, -90_000, -90_000, -90_000},
			{-200_000, -200_000, -90_000, -90_000},
			{-170_001, -170_001, -60_001, -89_501},
			{-170_000, -170_000, -50_000, -89_500},
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := newClock()
			minuteLane, shortLane := c.lane(minute), c.lane(short)
			for i, want := range readings {
				wall, line := c.read(want.now)
				got := reading{want.now, wall, wall + line.lanes[minuteLane].shift, wall + line.lanes[shortLane].shift}
				assert.Equal(t, want, got, "reading %d", i)
			}
		})
	}
}

func TestClockLanes(t *testing.T) {
	c := newClock()
	first, second := c.lane(1000), c.lane(2000)
	assert.NotEqual(t, first, second)
	assert.Equal(t, first, c.lane(1000))
	c.read(5000)
	assert.Equal(t, int64(5000), c.latest(second))
}

func TestWindowEnd(t *testing.T) {
	for _, row := range []struct{ at, length, want int64 }{
		{0, 10, 10}, {9, 10, 10}, {10, 10, 20}, {-1, 10, 0}, {-10, 10, 0}, {-11, 10, -10}, {7, 1, 8}, {-7, 1, -6},
	} {
		assert.Equal(t, row.want, windowEnd(row.at, row.length), "%+v", row)
	}
}
