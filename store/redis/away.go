package redis

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/redis/rueidis"
	"go.uber.org/zap"

	"github.com/tieredlimit/caddy-tieredlimit/store"
	"github.com/tieredlimit/caddy-tieredlimit/store/memory"
)

// without answers a request that the server could not decide.
func (c *counters) without(ctx context.Context, now time.Time, claims []store.Claim, into []store.State, cause error) (
	store.Decision, error,
) {
	c.stack.breaker.without.Add(1)
	if c.local != nil {
		d, err := c.local.counters.Take(ctx, c.serverTime(now), claims, into)
		d.Without = failureKind(cause)
		return d, err
	}
	failure := c.unavailable(cause)
	failure.Serve = c.onError == onErrorAllow
	return store.Decision{RefusedBy: -1}, failure
}

// unavailable describes a failure to the caller.
func (c *counters) unavailable(cause error) *store.UnavailableError {
	return &store.UnavailableError{RetryAfter: c.stack.breaker.retryAfter(), Kind: failureKind(cause), Err: cause}
}

// serverTime is the time on the server's clock as far as it is known, so that windows go on as they were.
func (c *counters) serverTime(now time.Time) time.Time {
	if ahead := c.stack.ahead.Load(); ahead != 0 {
		return time.UnixMilli(c.clock().Milliseconds() + ahead)
	}
	return now
}

// failureKind sorts failures for metrics.
func failureKind(err error) string {
	var dial *dialError
	switch _, answered := rueidis.IsRedisErr(err); {
	case errors.Is(err, errRedisAway):
		return "away"
	case errors.Is(err, errRedisOverload):
		return "overload"
	case errors.Is(err, context.DeadlineExceeded):
		return "timeout"
	case errors.As(err, &dial):
		return "connect"
	case answered:
		return "server"
	}
	return "network"
}

// FailureKinds implements [store.Fallible].
func (*counters) FailureKinds() []string {
	return []string{"away", "connect", "network", "overload", "server", "timeout"}
}

// logOpened tells that the server is away, and why.
func (l *link) logOpened(err error) {
	l.logger.Load().Warn("redis cannot decide; until it can, on_error says what becomes of requests",
		zap.Strings("address", l.setup.option.InitAddress), zap.String("mode", l.setup.mode),
		zap.String("kind", failureKind(err)), zap.String("error", l.setup.redact(err)))
}

// logHealed tells that the server is back.
func (l *link) logHealed(without int64, away time.Duration) {
	l.logger.Load().Info("redis decides again",
		zap.Strings("address", l.setup.option.InitAddress), zap.Int64("decisions_without", without),
		zap.Duration("away", away))
}

// localCounters limit by counters in this process while the server is away. They count along while it is there, so
// that they know how much is used when they are needed.
type localCounters struct {
	counters store.Counters
	tiers    []store.TierSpec
	limits   int
}

// openLocal opens the counters.
func openLocal(r *Redis, spec store.StackSpec) (*localCounters, error) {
	l := &localCounters{tiers: spec.Tiers}
	for _, tier := range spec.Tiers {
		l.limits += len(tier.Limits)
	}
	// These are not the counters of a stack of that name in memory.
	spec.Name = fmt.Sprintf("redis %s %s", r.setup.digest, r.keys.stack(spec.Name))
	var err error
	l.counters, err = new(memory.Memory).Open(spec)
	return l, err
}

// follow counts what the server has counted for a request.
func (l *localCounters) follow(ctx context.Context, d store.Decision, claims []store.Claim) {
	if d.RefusedBy >= 0 {
		var charged []store.Claim
		for _, claim := range claims[:d.RefusedBy] {
			if l.tiers[claim.Tier].Charge == store.ChargeChecked {
				charged = append(charged, claim)
			}
		}
		claims = charged
	}
	if len(claims) == 0 {
		return
	}
	// These counters may refuse what the server has allowed, and then do not count it: they are full.
	_, _ = l.counters.Take(ctx, d.Now, claims, make([]store.State, l.limits))
}

// reset forgets what the claims' counters have counted.
func (l *localCounters) reset(ctx context.Context, now time.Time, claims []store.Claim) error {
	return l.counters.Reset(ctx, now, claims)
}

// close returns the counters. A nil receiver has none.
func (l *localCounters) close() error {
	if l == nil || l.counters == nil {
		return nil
	}
	return l.counters.Close()
}
