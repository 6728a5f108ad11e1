package redis

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/redis/rueidis"
	"go.uber.org/zap"

	"github.com/tieredlimit/caddy-tieredlimit/store"
	"github.com/tieredlimit/caddy-tieredlimit/store/memory"
)

// without answers a request that the server could not decide.
func (c *counters) without(ctx context.Context, now time.Time, claims []store.Claim, cause error) (store.Decision, error) {
	c.stack.breaker.without.Add(1)
	return c.instead(ctx, now, claims, cause, (*localCounters).take)
}

// instead decides by the counters in this process if there are any, by take or peek, or says what becomes of the request.
func (c *counters) instead(ctx context.Context, now time.Time, claims []store.Claim, cause error,
	ask func(*localCounters, context.Context, time.Time, []store.Claim) (store.Decision, error),
) (store.Decision, error) {
	if c.local != nil {
		d, err := ask(c.local, ctx, c.serverTime(now), claims)
		d.Degraded = failureKind(cause)
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
}

// openLocal opens the counters.
func openLocal(r *Redis, spec store.StackSpec) (*localCounters, error) {
	l := &localCounters{tiers: spec.Tiers}
	// These are not the counters of a stack of that name in memory.
	spec.Name = fmt.Sprintf("redis %s %s", r.setup.digest, r.keys.stack(spec.Name))
	var err error
	l.counters, err = new(memory.Memory).Open(spec)
	return l, err
}

// take decides. Windows of these counters are told from the server's by their sign.
func (l *localCounters) take(ctx context.Context, now time.Time, claims []store.Claim) (store.Decision, error) {
	d, err := l.counters.Take(ctx, now, claims)
	for i := range claims {
		for j := range claims[i].States {
			claims[i].States[j].Window *= -1
		}
	}
	return d, err
}

// peek says what take would.
func (l *localCounters) peek(ctx context.Context, now time.Time, claims []store.Claim) (store.Decision, error) {
	return l.counters.Peek(ctx, now, claims)
}

// follow counts what the server has charged.
func (l *localCounters) follow(ctx context.Context, now time.Time, charged []store.Claim) {
	states := make([]store.State, l.limitsOf(charged))
	for i := range charged {
		n := len(l.tiers[charged[i].Tier].Limits)
		charged[i].States, states = states[:n:n], states[n:]
		charged[i].Counts = nil
	}
	if len(charged) > 0 {
		// These counters may refuse what the server has allowed, and then do not count it: they are full.
		_, _ = l.counters.Take(ctx, now, charged)
	}
}

// settle corrects what these counters have charged, or have counted along. In the latter case the windows are the
// server's.
func (l *localCounters) settle(ctx context.Context, now time.Time, claims []store.Claim) error {
	states := make([]store.State, l.limitsOf(claims))
	own := slices.Clone(claims)
	for i := range own {
		limits := l.tiers[own[i].Tier].Limits
		for j, s := range own[i].States {
			states[j].Window = -s.Window
			if s.Window >= 0 {
				states[j].Window = memory.WindowEnding((s.Window + 1) * limits[j].Window.Milliseconds())
			}
		}
		own[i].States, states = states[:len(limits):len(limits)], states[len(limits):]
	}
	return l.counters.Settle(ctx, now, own)
}

// limitsOf is the number of claimed limits.
func (l *localCounters) limitsOf(claims []store.Claim) int {
	n := 0
	for i := range claims {
		n += len(l.tiers[claims[i].Tier].Limits)
	}
	return n
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
