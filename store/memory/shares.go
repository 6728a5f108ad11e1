package memory

import (
	"hash/maphash"
	"math"
	"sync/atomic"
)

// shares tells how many counters of a table's window belong to each group, so that no group takes more than its share.
// It counts in two rows of buckets, by two hashes, and takes the lower: it is never too low, and too high only for a
// group that meets large ones in both rows. So its size is fixed, and small beside the table.
type shares [2][shareBuckets]atomic.Uint32

const shareBuckets = 1 << 10

// mostShare is how many of so many counters one group may have: a quarter, and at least one.
func mostShare(most int64) int64 {
	if most == math.MaxInt64 {
		return most
	}
	return max(1, most/4)
}

// places are the group's buckets.
func (s *shares) places(group uint64) [2]*atomic.Uint32 {
	hash := maphash.Comparable(seed, group)
	return [2]*atomic.Uint32{&s[0][hash%shareBuckets], &s[1][hash>>32%shareBuckets]}
}

// of is how many counters a group has.
func (s *shares) of(group uint64) int64 {
	at := s.places(group)
	return int64(min(at[0].Load(), at[1].Load()))
}

// add counts a counter of a group, or with -1 takes it back.
func (s *shares) add(group uint64, n int32) {
	for _, place := range s.places(group) {
		place.Add(uint32(n))
	}
}

// clear forgets all.
func (s *shares) clear() {
	for i := range s {
		for j := range s[i] {
			s[i][j].Store(0)
		}
	}
}
