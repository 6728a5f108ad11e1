package redis

import (
	"context"
	"time"

	"github.com/tieredlimit/caddy-tieredlimit/store"
)

// Settle implements [store.Counters]. What this instance remembers of whoever is given something back is forgotten at
// once; others may refuse from memory for up to 5 s.
func (c *counters) Settle(ctx context.Context, now time.Time, claims []store.Claim) error {
	if err := c.of.CheckCorrections(claims); err != nil {
		return err
	}
	var due, back []store.Claim
	for i := range claims {
		if claims[i].Hits != 0 {
			due = append(due, claims[i])
		}
		if claims[i].Hits < 0 {
			back = append(back, claims[i])
		}
	}
	if len(due) == 0 {
		return nil
	}
	if due[0].States[0].Window < 0 { // the server did not decide
		if c.local == nil {
			return nil
		}
		return c.local.settle(ctx, c.serverTime(now), due)
	}
	err := c.correct(ctx, due)
	if c.refusals != nil && len(back) > 0 {
		c.refusals.forget(c.clock(), back)
	}
	if c.local != nil && err == nil {
		return c.local.settle(ctx, c.serverTime(now), due)
	}
	return err
}

// correct asks the server to.
func (c *counters) correct(ctx context.Context, claims []store.Claim) error {
	breaker := c.stack.breaker
	if !breaker.allows() {
		return c.unavailable(errRedisAway)
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	var spec []byte
	for i := range claims {
		for j, l := range c.tiers[claims[i].Tier].limits {
			spec = appendNumber(spec, l.window.Milliseconds())
			spec = appendNumber(spec, claims[i].States[j].Window)
			spec = appendNumber(spec, claims[i].Hits)
		}
	}
	result, err := c.link.run(c.link.deadline(), settleScript, c.name(claims)[1:], string(spec))
	if err == nil {
		_, err = result.AsInt64()
	}
	if err != nil {
		breaker.failed(err)
		return c.unavailable(err)
	}
	breaker.succeeded()
	return nil
}
