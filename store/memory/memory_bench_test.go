package memory

import (
	"encoding/binary"
	"fmt"
	"hash/maphash"
	"math"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tieredlimit/caddy-tieredlimit/store"
)

// The floors do the least that any limiter must: hash, look up and count, once per tier. They decide nothing, know no
// windows and free nothing, and are there for the ratio.

// floorShards is what both floors are cut into.
const floorShards = 64

// atomicFloor is a sharded map of pointers to atomic counters.
type atomicFloor [floorShards]struct {
	mu     sync.RWMutex
	counts map[uint64]*atomic.Int64
	_      [32]byte
}

func newAtomicFloor() *atomicFloor {
	f := &atomicFloor{}
	for i := range f {
		f[i].counts = make(map[uint64]*atomic.Int64)
	}
	return f
}

func (f *atomicFloor) hit(identity []byte) int64 {
	hash := maphash.Bytes(seed, identity)
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

// syncFloor is sync.Map with atomic counters.
type syncFloor struct{ counts sync.Map }

func (f *syncFloor) hit(identity []byte) int64 {
	hash := maphash.Bytes(seed, identity)
	count, ok := f.counts.Load(hash)
	if !ok {
		count, _ = f.counts.LoadOrStore(hash, new(atomic.Int64))
	}
	return count.(*atomic.Int64).Add(1)
}

// mutexFloor is a map of plain counters behind each of some mutexes.
type mutexFloor [floorShards]struct {
	mu     sync.Mutex
	counts map[uint64]int64
	_      [48]byte
}

func newMutexFloor() *mutexFloor {
	f := &mutexFloor{}
	for i := range f {
		f[i].counts = make(map[uint64]int64)
	}
	return f
}

func (f *mutexFloor) hit(identity []byte) int64 {
	hash := maphash.Bytes(seed, identity)
	s := &f[hash%floorShards]
	s.mu.Lock()
	s.counts[hash]++
	count := s.counts[hash]
	s.mu.Unlock()
	return count
}

type floor interface{ hit(identity []byte) int64 }

// benchStack opens ip, user and global with one limit of a minute each; count is that of the first two.
func benchStack(tb testing.TB, count, maxKeys int64) *counters {
	spec := store.StackSpec{Name: fmt.Sprint("bench-", rand.Uint64())}
	for _, name := range []string{"ip", "user", "global"} {
		tier := store.TierSpec{Name: name, Limits: []store.Limit{{Count: count, Window: time.Minute}}, Single: name == "global"}
		if tier.Single {
			tier.Limits[0].Count = math.MaxInt32
		}
		spec.Tiers = append(spec.Tiers, tier)
	}
	opened, err := (&Memory{MaxKeys: &maxKeys}).Open(spec)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { opened.Close() })
	return opened.(*counters)
}

// client writes the n-th identities.
func benchClient(n uint64, ip, user []byte) {
	binary.BigEndian.PutUint64(ip, n*0x9E3779B97F4A7C15)
	binary.BigEndian.PutUint64(user, n*0xD1B54A32D192ED03)
}

const benchClients = 100_000

// perCore makes the function that one goroutine calls for each request.
type perCore func() func(n uint64)

func takeThree(b *testing.B, m *counters) perCore {
	now := time.UnixMilli(1_800_000_000_000)
	return func() func(uint64) {
		ip, user := make([]byte, 16), make([]byte, 16)
		states := make([]store.State, 3)
		claims := []store.Claim{
			{Tier: 0, Identity: ip, Hits: 1, States: states[0:1:1]},
			{Tier: 1, Identity: user, Hits: 1, States: states[1:2:2]},
			{Tier: 2, Hits: 1, States: states[2:3:3]},
		}
		return func(n uint64) {
			benchClient(n, ip, user)
			if _, err := m.Take(b.Context(), now, claims); err != nil {
				b.Error(err)
			}
		}
	}
}

func floorThree(floors [3]floor) perCore {
	return func() func(uint64) {
		ip, user := make([]byte, 16), make([]byte, 16)
		return func(n uint64) {
			benchClient(n, ip, user)
			floors[0].hit(ip)
			floors[1].hit(user)
			floors[2].hit(nil)
		}
	}
}

func floors(kind string) [3]floor {
	switch kind {
	case "atomic":
		return [3]floor{newAtomicFloor(), newAtomicFloor(), newAtomicFloor()}
	case "sync":
		return [3]floor{&syncFloor{}, &syncFloor{}, &syncFloor{}}
	}
	return [3]floor{newMutexFloor(), newMutexFloor(), newMutexFloor()}
}

// BenchmarkTake decides three tiers, one of which is the same for all.
func BenchmarkTake(b *testing.B) {
	for _, clients := range []uint64{1, benchClients} {
		for _, what := range []string{"memory", "refused", "atomic", "sync", "mutex"} {
			setup := func(b *testing.B) perCore {
				switch what {
				case "memory":
					return takeThree(b, benchStack(b, math.MaxInt32, 1_000_000))
				case "refused":
					return takeThree(b, benchStack(b, 1, 1_000_000))
				}
				return floorThree(floors(what))
			}
			b.Run(fmt.Sprintf("%d/%s", clients, what), func(b *testing.B) { serial(b, setup(b), clients) })
			b.Run(fmt.Sprintf("%d/%s/parallel", clients, what), func(b *testing.B) { parallel(b, setup(b), clients) })
		}
	}
}

func serial(b *testing.B, make perCore, clients uint64) {
	hit := make()
	for n := range clients {
		hit(n)
	}
	random := rand.New(rand.NewPCG(1, 1))
	b.ReportAllocs()
	for b.Loop() {
		hit(random.Uint64N(clients))
	}
}

func parallel(b *testing.B, make perCore, clients uint64) {
	warm := make()
	for n := range clients {
		warm(n)
	}
	b.ReportAllocs()
	b.ResetTimer()
	b.RunParallel(func(pb *testing.PB) {
		hit := make()
		random := rand.New(rand.NewPCG(rand.Uint64(), 1))
		for pb.Next() {
			hit(random.Uint64N(clients))
		}
	})
}

// BenchmarkNew counts a million clients that nobody has seen before, over and over.
func BenchmarkNew(b *testing.B) {
	const clients = 1_000_000
	b.Run("memory", func(b *testing.B) {
		var hit func(uint64)
		b.ReportAllocs()
		n := uint64(0)
		for b.Loop() {
			if n%clients == 0 {
				hit = takeThree(b, benchStack(b, math.MaxInt32, 4*clients))()
			}
			hit(n)
			n++
		}
	})
	for _, kind := range []string{"mutex", "atomic", "sync"} {
		b.Run(kind, func(b *testing.B) {
			var hit func(uint64)
			b.ReportAllocs()
			n := uint64(0)
			for b.Loop() {
				if n%clients == 0 {
					hit = floorThree(floors(kind))()
				}
				hit(n)
				n++
			}
		})
	}
}

// TestBytesPerCounter measures the heap that counters take, after growth.
func TestBytesPerCounter(t *testing.T) {
	if testing.Short() {
		t.Skip("makes a million counters")
	}
	const most = 1_000_000
	counters, err := new(Memory).Open(store.StackSpec{Name: fmt.Sprint("bytes-", rand.Uint64()), Tiers: []store.TierSpec{
		{Name: "ip", Limits: []store.Limit{{Count: 600, Window: time.Minute}}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	defer counters.Close()
	before := heap()
	now, identity := time.UnixMilli(1_800_000_000_000), make([]byte, 16)
	claims := []store.Claim{{Identity: identity, Hits: 1, States: make([]store.State, 1)}}
	for n, check := uint64(0), uint64(10_000); n < most; {
		benchClient(n, identity[:8], identity[8:])
		if _, err := counters.Take(t.Context(), now, claims); err != nil {
			t.Fatal(err)
		}
		if n++; n == check || n == most {
			each := float64(heap()-before) / float64(n)
			t.Logf("%d counters take %.1f bytes each", n, each)
			if each > 32 {
				t.Errorf("%d counters take %.1f bytes each, want 32 at most", n, each)
			}
			check = check * 5 / 4
		}
	}
	if tracked := counters.(store.Tracker).Tracked(); tracked != most {
		t.Errorf("%d counters, want %d", tracked, most)
	}
}

func heap() uint64 {
	runtime.GC()
	runtime.GC()
	var stats runtime.MemStats
	runtime.ReadMemStats(&stats)
	return stats.HeapAlloc
}
