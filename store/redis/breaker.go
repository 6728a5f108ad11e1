package redis

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"
)

// breaker stops trying after repeated failures. It then probes by itself, after pauses that grow, until a probe
// succeeds; no request ever waits for one.
type breaker struct {
	probe  func(context.Context) error
	opened func(err error)
	healed func(without int64, away time.Duration)
	ctx    context.Context
	stop   context.CancelFunc

	away     atomic.Pointer[absence] // nil: the server is tried
	failures atomic.Int64            // in a row
	without  atomic.Int64            // decisions that were made without the server
	next     atomic.Int64            // when the next probe begins, on the monotonic clock
	mu       sync.Mutex              // held to open and to close
}

// absence is why and since when the server is not tried.
type absence struct {
	since time.Time
	cause error
}

const (
	mostFailures = 3
	firstPause   = 50 * time.Millisecond
	longestPause = 2 * time.Second
)

func newBreaker(ctx context.Context, probe func(context.Context) error) *breaker {
	b := &breaker{probe: probe}
	b.ctx, b.stop = context.WithCancel(ctx)
	return b
}

// allows tells whether to try.
func (b *breaker) allows() bool { return b.away.Load() == nil }

// succeeded ends a row of failures.
func (b *breaker) succeeded() {
	if b.failures.Load() != 0 && b.away.Load() == nil {
		b.failures.Store(0)
		b.without.Store(0)
	}
}

// failed counts a failure. A failure to connect is enough to stop trying.
func (b *breaker) failed(err error) {
	var dial *dialError
	if b.failures.Add(1) < mostFailures && !errors.As(err, &dial) {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.away.Load() != nil || b.ctx.Err() != nil {
		return
	}
	now := time.Now()
	b.away.Store(&absence{since: now, cause: err})
	b.opened(err)
	go b.recover(now)
}

// recover probes until it succeeds.
func (b *breaker) recover(since time.Time) {
	for pause := firstPause; ; pause = min(2*pause, longestPause) {
		// Instances that failed together should not probe together.
		wait := pause - rand.N(pause/4)
		b.next.Store(int64(monotonic() + wait))
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-b.ctx.Done():
			timer.Stop()
			return
		}
		if b.probe(b.ctx) == nil {
			break
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.failures.Store(0)
	b.away.Store(nil)
	b.healed(b.without.Swap(0), time.Since(since))
}

// retryAfter is the time until the next probe, and at least a second.
func (b *breaker) retryAfter() time.Duration {
	return max(time.Second, time.Duration(b.next.Load())-monotonic())
}

// epoch is when the clock of this process began.
var epoch = time.Now()

// monotonic is a clock that is never set.
func monotonic() time.Duration { return time.Since(epoch) }
