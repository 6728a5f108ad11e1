package replay

import (
	"fmt"
	"math"
	"slices"
)

// limitAdvice is the limit that a log speaks for.
type limitAdvice struct {
	count  int64 // 0 if none can be told
	reason string
}

// Least numbers that a limit is concluded from, and what sets a few clients apart from all others.
const (
	leastPeaks       = 20 // clients
	leastUses        = 100
	leastUsesSingle  = 10 // windows of a bucket for everybody
	outlierFactor    = 3  // so many times as much as the next one
	outlierLeast     = 10 // and no less than this
	outlierMostShare = 20 // and no more clients than one in so many
)

// adviseLimit concludes a limit that hits nobody who is like others: half as much again as the most that a client sent
// in a window, rounded up. A few clients that sent far more than all others are left out of that.
func adviseLimit(uses, peaks []spreadValue, single bool) limitAdvice {
	windows, clients := occurrences(uses), occurrences(peaks)
	switch {
	case single && windows < leastUsesSingle:
		return limitAdvice{reason: "too few windows to tell"}
	case single:
		return limitAdvice{count: roundUp(quantile(uses, 1) * 3 / 2), reason: "1.5 times the busiest window"}
	case clients < leastPeaks || windows < leastUses:
		return limitAdvice{reason: "too few clients and windows to tell"}
	}
	most, outliers := usual(peaks, clients)
	reason := "1.5 times the most that a client sent"
	if outliers > 0 {
		reason = fmt.Sprintf("1.5 times the most that clients sent, but for %s that sent at least %d times as much",
			plural(outliers, "client"), outlierFactor)
	}
	return limitAdvice{count: roundUp(most * 3 / 2), reason: reason}
}

// usual is the most that clients sent which are like others, and how many are not: those above a gap.
func usual(peaks []spreadValue, clients int64) (most, outliers int64) {
	most = peaks[len(peaks)-1].value
	var above int64
	for i := len(peaks) - 1; i > 0; i-- {
		if above += peaks[i].times; above > max(1, clients/outlierMostShare) || peaks[i].value < outlierLeast {
			break
		}
		if peaks[i].value >= outlierFactor*peaks[i-1].value {
			most, outliers = peaks[i-1].value, above
		}
	}
	return most, outliers
}

// occurrences is how often all values together occurred.
func occurrences(list []spreadValue) (n int64) {
	for _, v := range list {
		n += v.times
	}
	return n
}

// roundUp is the next number with at most two digits before its zeros, of which the second is 0 or 5 from 100 on.
func roundUp(n int64) int64 {
	step := int64(1)
	for n/step >= 100 {
		step *= 10
	}
	if step > 1 {
		step *= 5
	} else if n > 20 {
		step = 5
	}
	return max((n+step-1)/step*step, 1)
}

// candidates are the limits that a report weighs: those that were asked for, or some around what the log and the config
// suggest; always the configured one and the suggested one.
func candidates(uses []spreadValue, current, suggested int64, asked []int64) []int64 {
	list := slices.Clone(asked)
	if len(asked) == 0 {
		list = append(list, roundUp(quantile(uses, 0.5)), roundUp(quantile(uses, 0.99)), roundUp(quantile(uses, 0.999)),
			roundUp(quantile(uses, 1)), current/2, current*2)
	}
	list = append(list, current, suggested)
	list = slices.DeleteFunc(list, func(n int64) bool { return n < 1 || n > math.MaxInt32 })
	slices.Sort(list)
	return slices.Compact(list)
}
