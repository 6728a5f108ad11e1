package redis

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
)

// testBreaker counts what a breaker does.
type testBreaker struct {
	*breaker
	away   atomic.Bool
	mu     sync.Mutex
	at     []time.Time // of probes
	opened int
	healed int
	told   int64 // decisions made without the server
}

func newTestBreaker() *testBreaker {
	b := new(testBreaker)
	b.breaker = newBreaker(context.Background(), func(context.Context) error {
		b.mu.Lock()
		b.at = append(b.at, time.Now())
		b.mu.Unlock()
		if b.away.Load() {
			return errors.New("away")
		}
		return nil
	})
	b.breaker.opened = func(error) { b.opened++ }
	b.breaker.healed = func(without int64, _ time.Duration) { b.healed++; b.told = without }
	return b
}

// probes are the times of the probes so far.
func (b *testBreaker) probes() []time.Time {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.at)
}

var errTest = errors.New("test")

func TestBreakerOpensAfterARowOfFailures(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newTestBreaker()
		b.away.Store(true)
		defer b.stop()
		for range 10 {
			b.failed(errTest)
			b.failed(errTest)
			b.succeeded()
		}
		assert.True(t, b.allows(), "never three in a row")
		for i := range 3 {
			assert.True(t, b.allows(), "after %d failures", i)
			b.failed(errTest)
		}
		assert.False(t, b.allows(), "after three")
		b.succeeded() // of a request that was under way
		assert.False(t, b.allows(), "only a probe closes it")
		for range 10 {
			b.failed(errTest)
		}
		assert.Equal(t, 1, b.opened, "told once")
	})
}

func TestBreakerOpensAtOnceIfItCannotConnect(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newTestBreaker()
		defer b.stop()
		b.failed(&dialError{err: errTest})
		assert.False(t, b.allows())
	})
}

func TestBreakerProbesWithGrowingPauses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newTestBreaker()
		b.away.Store(true)
		start := time.Now()
		b.failed(&dialError{err: errTest})
		b.without.Add(7)
		time.Sleep(time.Minute) // of the bubble's clock
		synctest.Wait()
		before := start
		want := firstPause
		for i, at := range b.probes() {
			pause := at.Sub(before)
			assert.LessOrEqual(t, pause, want, "probe %d", i)
			assert.GreaterOrEqual(t, pause, want*3/4, "probe %d", i)
			before, want = at, min(2*want, longestPause)
		}
		assert.InDelta(t, 35, len(b.probes()), 8, "probes in a minute")
		assert.GreaterOrEqual(t, b.retryAfter(), time.Second)
		assert.LessOrEqual(t, b.retryAfter(), longestPause)
		assert.Zero(t, b.healed)

		b.away.Store(false)
		time.Sleep(longestPause)
		synctest.Wait()
		assert.True(t, b.allows())
		assert.Equal(t, 1, b.healed)
		assert.Equal(t, int64(7), b.told, "decisions made without the server")
		probes := len(b.probes())
		time.Sleep(time.Minute)
		assert.Len(t, b.probes(), probes, "a healed breaker does not probe")
		b.failed(errTest)
		assert.True(t, b.allows(), "it starts anew")
	})
}

func TestBreakerStops(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newTestBreaker()
		b.away.Store(true)
		b.failed(&dialError{err: errTest})
		time.Sleep(time.Second)
		b.stop()
		synctest.Wait()
		probes := len(b.probes())
		time.Sleep(time.Minute)
		assert.Len(t, b.probes(), probes)
	})
}
