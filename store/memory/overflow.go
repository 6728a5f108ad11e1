package memory

import (
	"sync"

	"github.com/tieredlimit/caddy-tieredlimit/store"
)

// overflow counts, by their group, the hits of identities that a full table has no room for. It is of a fixed size,
// and like the table it belongs to a window.
type overflow [stripes]stripe

// stripe is the part of the overflow counters behind one mutex.
type stripe struct {
	mu     sync.Mutex
	end    int64
	counts [store.Groups / stripes]uint32
}

const stripes = 64

// lock returns the stripe of a group, locked, in the window that ends at end or in a later one.
func (o *overflow) lock(group uint32, end int64) *stripe {
	s := &o[group%stripes]
	s.mu.Lock()
	if s.end < end {
		s.end = end
		clear(s.counts[:])
	}
	return s
}

// count is the counter of a group. The stripe must be the group's, and locked.
func (s *stripe) count(group uint32) *uint32 {
	return &s.counts[group/stripes]
}
