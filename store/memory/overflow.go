package memory

import (
	"hash/maphash"
	"math"
	"sync"
)

// overflow counts, by their group, the hits of identities that a full table has no room for. It is of a fixed size,
// and like the table it belongs to a window.
type overflow [stripes]stripe

// stripe is the part of the overflow counters behind one mutex.
type stripe struct {
	mu     sync.Mutex
	end    int64
	counts [groupCounters / stripes]uint32
}

const (
	stripes = 64

	// groupCounters are one for each of the first groups, as many more for all others, to which they are spread.
	groupCounters = 2 * (math.MaxUint16 + 1)
)

// place is where a group is counted.
func place(group uint64) uint64 {
	if group <= math.MaxUint16 {
		return group
	}
	return groupCounters/2 + maphash.Comparable(seed, group)%(groupCounters/2)
}

// lock returns the stripe of a group, locked, in the window that ends at end or in a later one.
func (o *overflow) lock(group uint64, end int64) *stripe {
	s := &o[place(group)%stripes]
	s.mu.Lock()
	if s.end < end {
		s.end = end
		clear(s.counts[:])
	}
	return s
}

// count is the counter of a group. The stripe must be the group's, and locked.
func (s *stripe) count(group uint64) *uint32 {
	return &s.counts[place(group)/stripes]
}
