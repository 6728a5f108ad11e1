package storetest_test

import (
	"context"
	"strconv"
	"testing"
	"time"

	"github.com/tieredlimit/caddy-tieredlimit/store"
	"github.com/tieredlimit/caddy-tieredlimit/store/memory"
	"github.com/tieredlimit/caddy-tieredlimit/store/storetest"
)

func TestModel(t *testing.T) {
	storetest.Run(t, func(*testing.T) store.Store { return &storetest.Model{} })
}

func TestMemory(t *testing.T) {
	storetest.Run(t, func(*testing.T) store.Store { return new(memory.Memory) },
		storetest.Steps(steps(1_000_000)))
}

func TestMemoryBound(t *testing.T) {
	for _, maxKeys := range []int64{15, 31} {
		bounded := &memory.Memory{MaxKeys: &maxKeys}
		t.Run(strconv.FormatInt(maxKeys, 10), func(t *testing.T) {
			storetest.Run(t, func(*testing.T) store.Store { return bounded },
				storetest.Bound(maxKeys), storetest.Steps(steps(50_000)))
		})
	}
}

func steps(count int) int {
	if testing.Short() {
		return count / 50
	}
	return count
}

// ownClock is a store with a clock of its own, which is set or stands still.
type ownClock struct {
	memory.Memory
	now time.Time
}

type ownCounters struct {
	store.Counters
	clock *ownClock
}

func (s *ownClock) Open(spec store.StackSpec) (store.Counters, error) {
	counters, err := s.Memory.Open(spec)
	return ownCounters{counters, s}, err
}

func (c ownCounters) Take(ctx context.Context, _ time.Time, claims []store.Claim) (store.Decision, error) {
	return c.Counters.Take(ctx, c.clock.now, claims)
}

func (c ownCounters) Peek(ctx context.Context, _ time.Time, claims []store.Claim) (store.Decision, error) {
	return c.Counters.Peek(ctx, c.clock.now, claims)
}

func (c ownCounters) Settle(ctx context.Context, _ time.Time, claims []store.Claim) error {
	return c.Counters.Settle(ctx, c.clock.now, claims)
}

func (c ownCounters) Reset(ctx context.Context, _ time.Time, claims []store.Claim) error {
	return c.Counters.Reset(ctx, c.clock.now, claims)
}

func TestOwnClock(t *testing.T) {
	t.Run("set by the suite", func(t *testing.T) {
		clocked := &ownClock{}
		storetest.Run(t, func(*testing.T) store.Store { return clocked },
			storetest.SetClock(func(now time.Time) { clocked.now = now }), storetest.Steps(steps(50_000)))
	})
	t.Run("standing still", func(t *testing.T) {
		clocked := &ownClock{now: time.Now()}
		storetest.Run(t, func(*testing.T) store.Store { return clocked },
			storetest.OwnClock(), storetest.ForwardOnly(), storetest.Steps(steps(50_000)))
	})
}
