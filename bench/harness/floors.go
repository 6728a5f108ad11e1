package harness

import (
	"hash/maphash"
	"sync"
	"sync/atomic"
)

// The floors do the least that any limiter must: hash, look up and count, once per tier. They know no windows and free
// nothing, and are there for the ratio.

// floor counts a hash and returns what it has counted.
type floor interface{ hit(hash uint64) int64 }

// floorShards is what both floors are cut into.
const floorShards = 64

// atomicFloor is a map of pointers to atomic counters behind each of some mutexes.
type atomicFloor [floorShards]struct {
	mu     sync.RWMutex
	counts map[uint64]*atomic.Int64
	_      [32]byte
}

func newAtomicFloor() floor {
	f := new(atomicFloor)
	for i := range f {
		f[i].counts = make(map[uint64]*atomic.Int64)
	}
	return f
}

func (f *atomicFloor) hit(hash uint64) int64 {
	s := &f[hash%floorShards]
	s.mu.RLock()
	count := s.counts[hash]
	s.mu.RUnlock()
	if count == nil {
		s.mu.Lock()
		if count = s.counts[hash]; count == nil {
			count = new(atomic.Int64)
			s.counts[hash] = count
		}
		s.mu.Unlock()
	}
	return count.Add(1)
}

// mutexFloor is a map of plain counters behind each of some mutexes.
type mutexFloor [floorShards]struct {
	mu     sync.Mutex
	counts map[uint64]int64
	_      [48]byte
}

func newMutexFloor() floor {
	f := new(mutexFloor)
	for i := range f {
		f[i].counts = make(map[uint64]int64)
	}
	return f
}

func (f *mutexFloor) hit(hash uint64) int64 {
	s := &f[hash%floorShards]
	s.mu.Lock()
	count := s.counts[hash] + 1
	s.counts[hash] = count
	s.mu.Unlock()
	return count
}

// threeFloors counts a request for its address, its user, and all.
type threeFloors struct {
	ip, user, global floor
	limit            int64
}

// floorSubjects are the floors, with HTTP around them and without.
func floorSubjects() []Subject {
	kinds := []struct {
		name string
		make func() floor
	}{{nameAtomic, newAtomicFloor}, {nameMutex, newMutexFloor}}
	var list []Subject
	for _, kind := range kinds {
		open := func(c Case) *threeFloors {
			count, _ := c.limit()
			return &threeFloors{kind.make(), kind.make(), kind.make(), int64(count)}
		}
		list = append(list,
			Subject{Name: kind.name, Group: GroupServe, Tiers: 3, Open: anchor(func(c Case) decider {
				f := open(c)
				return func(ip, user string) bool {
					return f.take(maphash.String(hashSeed, ip), maphash.String(hashSeed, user))
				}
			})},
			Subject{Name: kind.name, Group: GroupDecide, Tiers: 3, Open: func(c Case) (Running, error) { return open(c), nil }},
		)
	}
	return list
}

const (
	nameAtomic = "floor: lookup and atomic add, 3 tiers"
	nameMutex  = "floor: mutex and plain map, 3 tiers"
)

func (f *threeFloors) take(ip, user uint64) bool {
	served := f.ip.hit(ip) <= f.limit
	f.user.hit(user)
	f.global.hit(1)
	return served
}

// Close implements [Running].
func (*threeFloors) Close() error { return nil }

// Caller implements [Running].
func (f *threeFloors) Caller(v *visits) func(i int) bool {
	identities := identitiesOf(v)
	return func(i int) bool {
		pair := &identities[i]
		return f.take(maphash.Bytes(hashSeed, pair.ip[:]), maphash.Bytes(hashSeed, pair.user[:]))
	}
}
