package tieredlimit

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/redis/rueidis"
	"go.uber.org/zap"
)

// without answers a request that the server could not decide.
func (c *redisCounters) without(ctx context.Context, now time.Time, claims []Claim, into []State, cause error) (
	Decision, error,
) {
	c.stack.breaker.without.Add(1)
	if c.local != nil {
		d, err := c.local.counters.Take(ctx, c.serverTime(now), claims, into)
		d.Without = redisKind(cause)
		return d, err
	}
	failure := c.unavailable(cause)
	failure.Serve = c.onError == redisAllow
	return Decision{RefusedBy: -1}, failure
}

// unavailable describes a failure to the caller.
func (c *redisCounters) unavailable(cause error) *UnavailableError {
	return &UnavailableError{RetryAfter: c.stack.breaker.retryAfter(), Kind: redisKind(cause), Err: cause}
}

// serverTime is the time on the server's clock as far as it is known, so that windows go on as they were.
func (c *redisCounters) serverTime(now time.Time) time.Time {
	if ahead := c.stack.ahead.Load(); ahead != 0 {
		return time.UnixMilli(c.clock().Milliseconds() + ahead)
	}
	return now
}

// redisKind sorts failures for metrics.
func redisKind(err error) string {
	var dial *redisDialError
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

// FailureKinds implements [Fallible].
func (*redisCounters) FailureKinds() []string {
	return []string{"away", "connect", "network", "overload", "server", "timeout"}
}

// logOpened tells that the server is away, and why.
func (l *redisLink) logOpened(err error) {
	l.logger.Load().Warn("redis cannot decide; until it can, on_error says what becomes of requests",
		zap.Strings("address", l.setup.option.InitAddress), zap.String("mode", l.setup.mode),
		zap.String("kind", redisKind(err)), zap.String("error", l.setup.redact(err)))
}

// logHealed tells that the server is back.
func (l *redisLink) logHealed(without int64, away time.Duration) {
	l.logger.Load().Info("redis decides again",
		zap.Strings("address", l.setup.option.InitAddress), zap.Int64("decisions_without", without),
		zap.Duration("away", away))
}

// redisLocalCounters limit by counters in this process while the server is away. They count along while it is there, so
// that they know how much is used when they are needed.
type redisLocalCounters struct {
	counters Counters
	tiers    []TierSpec
	limits   int
}

// openRedisLocal opens the counters.
func openRedisLocal(r *Redis, spec StackSpec) (*redisLocalCounters, error) {
	l := &redisLocalCounters{tiers: spec.Tiers}
	for _, tier := range spec.Tiers {
		l.limits += len(tier.Limits)
	}
	// These are not the counters of a stack of that name in memory.
	spec.Name = fmt.Sprintf("redis %s %s", r.setup.digest, r.keys.stack(spec.Name))
	var err error
	l.counters, err = new(Memory).Open(spec)
	return l, err
}

// follow counts what the server has counted for a request.
func (l *redisLocalCounters) follow(ctx context.Context, d Decision, claims []Claim) {
	if d.RefusedBy >= 0 {
		var charged []Claim
		for _, claim := range claims[:d.RefusedBy] {
			if l.tiers[claim.Tier].Charge == ChargeChecked {
				charged = append(charged, claim)
			}
		}
		claims = charged
	}
	if len(claims) == 0 {
		return
	}
	// These counters may refuse what the server has allowed, and then do not count it: they are full.
	_, _ = l.counters.Take(ctx, d.Now, claims, make([]State, l.limits))
}

// reset forgets what the claims' counters have counted.
func (l *redisLocalCounters) reset(ctx context.Context, now time.Time, claims []Claim) error {
	return l.counters.Reset(ctx, now, claims)
}

// close returns the counters. A nil receiver has none.
func (l *redisLocalCounters) close() error {
	if l == nil || l.counters == nil {
		return nil
	}
	return l.counters.Close()
}
