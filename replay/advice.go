package replay

import (
	"math"
	"slices"
)

// limitAdvice is the limit that a log speaks for.
type limitAdvice struct {
	count  int64 // 0 if none can be told
	reason string
}

// Least numbers of uses (by a client in a window) that a limit is concluded from.
const (
	leastUses       = 100
	leastUsesSingle = 10 // of a bucket for everybody
)

// adviseLimit concludes a limit from how often each use occurred: half as much again as nearly all clients need, rounded
// up. Nearly all are 99.9 % of the uses; if the last of them lie far above the rest, and so are not like others, 99 %.
func adviseLimit(uses []spreadValue, single bool) limitAdvice {
	var n int64
	for _, u := range uses {
		n += u.times
	}
	if single {
		if n < leastUsesSingle {
			return limitAdvice{reason: "too few windows to tell"}
		}
		return limitAdvice{count: roundUp(quantile(uses, 1) * 3 / 2), reason: "1.5 times the busiest window"}
	}
	if n < leastUses {
		return limitAdvice{reason: "too few clients and windows to tell"}
	}
	p99, p999 := quantile(uses, 0.99), quantile(uses, 0.999)
	if p999 > 4*p99 {
		return limitAdvice{count: roundUp(p99 * 3 / 2), reason: "1.5 times the 99th percentile; the last percent lies far above the rest"}
	}
	return limitAdvice{count: roundUp(p999 * 3 / 2), reason: "1.5 times the 99.9th percentile"}
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
