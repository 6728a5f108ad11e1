package storetest_test

import (
	"context"
	"strconv"
	"testing"
	"time"

	"github.com/tieredlimit/caddy-tieredlimit"
	"github.com/tieredlimit/caddy-tieredlimit/storetest"
)

func TestModel(t *testing.T) {
	storetest.Run(t, func(*testing.T) tieredlimit.Store { return &storetest.Model{} })
}

func TestMemory(t *testing.T) {
	storetest.Run(t, func(*testing.T) tieredlimit.Store { return new(tieredlimit.Memory) },
		storetest.Steps(steps(1_000_000)))
}

func TestMemoryBound(t *testing.T) {
	for _, maxKeys := range []int64{15, 31} {
		store := &tieredlimit.Memory{MaxKeys: &maxKeys}
		t.Run(strconv.FormatInt(maxKeys, 10), func(t *testing.T) {
			storetest.Run(t, func(*testing.T) tieredlimit.Store { return store },
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
	tieredlimit.Memory
	now time.Time
}

type ownCounters struct {
	tieredlimit.Counters
	clock *ownClock
}

func (s *ownClock) Open(spec tieredlimit.StackSpec) (tieredlimit.Counters, error) {
	counters, err := s.Memory.Open(spec)
	return ownCounters{counters, s}, err
}

func (c ownCounters) Take(ctx context.Context, _ time.Time, claims []tieredlimit.Claim, into []tieredlimit.State) (
	tieredlimit.Decision, error,
) {
	return c.Counters.Take(ctx, c.clock.now, claims, into)
}

func (c ownCounters) Peek(ctx context.Context, _ time.Time, claims []tieredlimit.Claim, into []tieredlimit.State) (
	tieredlimit.Decision, error,
) {
	return c.Counters.Peek(ctx, c.clock.now, claims, into)
}

func (c ownCounters) Reset(ctx context.Context, _ time.Time, claims []tieredlimit.Claim) error {
	return c.Counters.Reset(ctx, c.clock.now, claims)
}

func TestOwnClock(t *testing.T) {
	t.Run("set by the suite", func(t *testing.T) {
		store := &ownClock{}
		storetest.Run(t, func(*testing.T) tieredlimit.Store { return store },
			storetest.SetClock(func(now time.Time) { store.now = now }), storetest.Steps(steps(50_000)))
	})
	t.Run("standing still", func(t *testing.T) {
		store := &ownClock{now: time.Now()}
		storetest.Run(t, func(*testing.T) tieredlimit.Store { return store },
			storetest.OwnClock(), storetest.ForwardOnly(), storetest.Steps(steps(50_000)))
	})
}
