package memory

import (
	"math/bits"
	"runtime"
	"sync"
	"sync/atomic"
)

// table holds the counters of one limit: those of one tier and one window length, for every identity.
//
// It is cut into shards, each behind a mutex of its own. A shard belongs to one window; the first caller that comes
// in a later window turns it, which forgets all its counters at once and at no cost per counter. There is no timer,
// no sweep, and no pointer per counter.
type table struct {
	length int64 // of the window, in milliseconds
	lane   int   // of the stack's clock
	rank   int   // locks of several tables are taken in the order of their ranks
	single bool
	mask   uint64
	shards []shard

	refs int // how many open handles use the table; guarded by the stack's mutex

	overflow atomic.Pointer[overflow]

	mu   sync.Mutex   // held to change live and shares
	end  atomic.Int64 // of the window that live belongs to
	live atomic.Int64 // how many counters the window has

	shares *shares // of groups in live; nil where there is one counter

	bucket bucket // instead of the shards, where all identities count as one
}

// bucket is the one counter of a limit that is the same for everybody.
type bucket struct {
	_     [64]byte // keeps those who change it out of the cache lines of those who do not
	mu    sync.Mutex
	count uint32
	held  bool  // it has counted something in the window, though that may have been reset
	end   int64 // of the window that is counted
	_     [64]byte
}

// shard is an open-addressing hash table of counters, found by multiplying the fingerprint with the number of cells.
type shard struct {
	mu    sync.Mutex
	gen   uint32 // a cell of another generation is empty
	live  uint32
	end   int64 // of the window that is counted
	cells []cell

	_ [64 - 48]byte // one cache line
}

// cell is one counter. It has no pointer in it, so that the garbage collector never looks at it.
type cell struct {
	fingerprint uint64
	count       uint32
	gen         uint32
}

// firstCells is the size of a shard that holds its first counter.
const firstCells = 8

func newTable(length int64, lane, rank int, single bool) *table {
	t := &table{length: length, lane: lane, rank: rank, single: single}
	t.bucket.end = distant
	t.end.Store(distant)
	if single {
		return t
	}
	count := min(max(64, 1<<bits.Len(uint(16*runtime.GOMAXPROCS(0)-1))), 1024)
	t.shares = new(shares)
	t.mask = uint64(count - 1)
	t.shards = make([]shard, count)
	for i := range t.shards {
		t.shards[i].gen = 1
		t.shards[i].end = distant
	}
	return t
}

// full reports whether the window which ends at end has no room for another counter of a group: there are most, or the
// group has its share of them. Beside those that are there it counts fresh ones, of which some are the group's.
func (t *table) full(group uint64, end, most, fresh, mine int64) bool {
	if t.end.Load() >= end {
		fresh += t.live.Load()
		mine += t.shares.of(group)
	}
	return fresh >= most || mine >= mostShare(most)
}

// reserve makes room for one counter of a group in the window that ends at end, if there are fewer than most and the group
// has not had its share. A caller that is late, since the table has turned to a later window, takes its room from that
// one.
func (t *table) reserve(group uint64, end, most int64) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.end.Load() < end {
		t.end.Store(end)
		t.live.Store(0)
		t.shares.clear()
	}
	if t.live.Load() >= most || t.shares.of(group) >= mostShare(most) {
		return false
	}
	t.live.Add(1)
	t.shares.add(group, 1)
	return true
}

// cancel gives back what reserve took, unless the window has gone by.
func (t *table) cancel(group uint64, end int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.end.Load() == end && t.live.Load() > 0 {
		t.live.Add(-1)
		t.shares.add(group, -1)
	}
}

// tracked is how many counters there are at a time of the table's lane.
func (t *table) tracked(now int64) int64 {
	if t.single {
		return t.bucket.tracked(now)
	}
	if t.end.Load() <= now {
		return 0
	}
	return t.live.Load()
}

// groups returns the overflow counters, which are made when they are first needed.
func (t *table) groups() *overflow {
	if o := t.overflow.Load(); o != nil {
		return o
	}
	o := &overflow{}
	for i := range o {
		o[i].end = distant
	}
	if t.overflow.CompareAndSwap(nil, o) {
		return o
	}
	return t.overflow.Load()
}

// tracked is 1 if the bucket has counted anything in the window at a time of the table's lane.
func (b *bucket) tracked(now int64) int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.end <= now || !b.held {
		return 0
	}
	return 1
}

// current makes the bucket that of the window that holds now. If it is to be punctual, it returns false where it is
// that of a later one.
func (b *bucket) current(now, length int64, punctual bool) bool {
	if now >= b.end {
		b.end, b.count, b.held = windowEnd(now, length), 0, false
	}
	return !punctual || b.end-now <= length
}

// current makes the shard that of the window that holds now. If it is to be punctual, it returns false where it is that
// of a later one.
func (s *shard) current(now, length int64, punctual bool) bool {
	if now >= s.end {
		s.turn(now, length)
	}
	return !punctual || s.end-now <= length
}

// turn empties the shard for the window that holds now. Cells that the last window hardly used are given up.
func (s *shard) turn(now, length int64) {
	s.end = windowEnd(now, length)
	if len(s.cells) > firstCells && int(s.live) < len(s.cells)/4 {
		s.cells = nil
		if s.live > 0 {
			s.cells = make([]cell, max(firstCells, 2*s.live))
		}
	}
	s.live = 0
	s.gen++
	if s.gen == 0 {
		clear(s.cells)
		s.gen = 1
	}
}

// find returns the counter of an identity, or nil.
func (s *shard) find(fingerprint uint64) *cell {
	cells := s.cells
	if len(cells) == 0 {
		return nil
	}
	home, _ := bits.Mul64(fingerprint, uint64(len(cells)))
	for i := int(home); ; {
		c := &cells[i]
		if c.gen != s.gen {
			return nil
		}
		if c.fingerprint == fingerprint {
			return c
		}
		if i++; i == len(cells) {
			i = 0
		}
	}
}

// insert adds a counter for an identity that has none.
func (s *shard) insert(fingerprint uint64) *cell {
	if 5*(int(s.live)+1) > 4*len(s.cells) {
		s.grow()
	}
	s.live++
	return put(s.cells, cell{fingerprint: fingerprint, gen: s.gen})
}

// grow makes the shard half as large again: at most four in five cells are used, and at least one in two, so that a
// counter takes no more than 32 bytes.
func (s *shard) grow() {
	cells := make([]cell, max(firstCells, len(s.cells)+len(s.cells)/2))
	for _, c := range s.cells {
		if c.gen == s.gen {
			put(cells, c)
		}
	}
	s.cells = cells
}

func put(cells []cell, c cell) *cell {
	home, _ := bits.Mul64(c.fingerprint, uint64(len(cells)))
	i := int(home)
	for cells[i].gen == c.gen {
		if i++; i == len(cells) {
			i = 0
		}
	}
	cells[i] = c
	return &cells[i]
}
