package tieredlimit

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/redis/rueidis"
)

// redisCounters is one open handle of a stack. All that a configuration says is in here.
type redisCounters struct {
	keys     redisKeys
	link     *redisLink
	stack    *redisStack
	tiers    []redisTier
	letters  string // of all tiers
	timeout  time.Duration
	onError  string
	local    *redisLocalCounters // set if onError is local
	refusals *redisRefusals      // nil if none are remembered
	clock    func() time.Duration
}

// redisTier is a tier as the script needs to know it.
type redisTier struct {
	limits  []redisLimit
	letters string
	args    []string // count and window of each limit
	checked bool
	dry     bool
	single  bool
	only    atomic.Pointer[[]string] // the keys of a tier with a single bucket, when they are known
}

type redisLimit struct {
	infix  string // of its keys
	window time.Duration
}

// redisResetLife is how long a reset generation is kept. An instance asks again after 5 s at the latest.
const redisResetLife = time.Minute

// openRedisCounters opens a handle.
func openRedisCounters(r *Redis, spec StackSpec) (*redisCounters, error) {
	c := &redisCounters{keys: r.keys, timeout: r.setup.timeout, onError: r.OnError, clock: redisClock}
	for i := range spec.Tiers {
		c.letters += redisLetters(spec.Tiers[i])
		c.tiers = append(c.tiers, redisTier{})
		c.tiers[i].set(r.keys, spec.Tiers[i])
	}
	if !r.forgetful {
		c.refusals = newRedisRefusals(len(spec.Tiers))
	}
	if r.OnError == redisLocal {
		var err error
		if c.local, err = openRedisLocal(r, spec); err != nil {
			return nil, fmt.Errorf("on_error local: %w", err)
		}
	}
	link, err := takeRedisLink(r.setup, r.logger)
	if err != nil {
		return nil, errors.Join(err, c.local.close())
	}
	c.link = link
	c.stack = link.stack(r.keys.stack(spec.Name))
	return c, nil
}

// set fills in what is known at load.
func (t *redisTier) set(keys redisKeys, spec TierSpec) {
	t.letters, t.dry, t.single = redisLetters(spec), spec.DryRun, spec.Single
	t.checked = spec.Charge == ChargeChecked
	for _, limit := range spec.Limits {
		t.limits = append(t.limits, redisLimit{infix: keys.limit(spec.Name, limit), window: limit.Window})
		t.args = append(t.args, strconv.FormatInt(limit.Count, 10), strconv.FormatInt(limit.Window.Milliseconds(), 10))
	}
}

// Take implements [Counters]. The server's clock counts, not now.
func (c *redisCounters) Take(ctx context.Context, now time.Time, claims []Claim, into []State) (Decision, error) {
	if err := c.check(claims, into); err != nil {
		return Decision{RefusedBy: -1}, err
	}
	clock := c.clock()
	if d, ok := c.refuse(clock, claims, into); ok {
		return d, nil
	}
	breaker := c.stack.breaker
	if !breaker.allows() {
		return c.without(ctx, now, claims, into, errRedisAway)
	}
	if err := ctx.Err(); err != nil {
		return Decision{RefusedBy: -1}, err
	}
	epoch := c.stack.epoch.Load()
	d, err := c.decide(ctx, redisModeTake, claims, into)
	if err != nil {
		breaker.failed(err)
		return c.without(ctx, now, claims, into, err)
	}
	breaker.succeeded()
	if c.refusals != nil && d.RefusedBy >= 0 {
		c.remember(clock, epoch, d, claims, into)
	}
	if c.local != nil {
		c.local.follow(ctx, d, claims)
	}
	return d, nil
}

// Peek implements [Counters]. It always asks the server.
func (c *redisCounters) Peek(ctx context.Context, _ time.Time, claims []Claim, into []State) (Decision, error) {
	if err := c.check(claims, into); err != nil {
		return Decision{RefusedBy: -1}, err
	}
	d, err := c.decide(ctx, redisModePeek, claims, into)
	if err != nil {
		return Decision{RefusedBy: -1}, c.unavailable(err)
	}
	return d, nil
}

// Reset implements [Counters]. What this instance remembers is forgotten at once, what others do within 5 s.
func (c *redisCounters) Reset(ctx context.Context, now time.Time, claims []Claim) error {
	limits, err := c.count(claims)
	if err != nil || limits == 0 {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, c.timeout)
	defer cancel()
	keys, _ := c.name(claims)
	life := strconv.FormatInt(redisResetLife.Milliseconds(), 10)
	result, err := c.link.run(ctx, redisReset, keys, []string{life})
	if err != nil {
		return c.unavailable(err)
	}
	generation, err := result.AsInt64()
	if err != nil {
		return c.unavailable(err)
	}
	c.stack.heard(generation)
	if c.local != nil {
		return c.local.reset(ctx, c.serverTime(now), claims)
	}
	return nil
}

// Connect implements [Connector]. A server that cannot be reached is logged now, and not at the first request.
func (c *redisCounters) Connect() {
	if c.link.client.Load() != nil || !c.stack.breaker.allows() {
		return
	}
	go func() {
		ctx, cancel := context.WithTimeout(c.link.ctx, 2*redisDialTimeout)
		defer cancel()
		if _, err := c.link.ready(ctx); err != nil && !errors.Is(err, errRedisClosed) && c.link.ctx.Err() == nil {
			c.stack.breaker.failed(err)
		}
	}()
}

// Close implements [Counters].
func (c *redisCounters) Close() error {
	c.stack.leave()
	return errors.Join(c.local.close(), c.link.leave())
}

// check refuses claims that the stack does not have, and too little room.
func (c *redisCounters) check(claims []Claim, into []State) error {
	limits, err := c.count(claims)
	if err == nil && len(into) < limits {
		err = fmt.Errorf("%d limits are claimed, with room for the states of %d", limits, len(into))
	}
	return err
}

// count is the number of claimed limits.
func (c *redisCounters) count(claims []Claim) (int, error) {
	limits := 0
	for i := range claims {
		tier := claims[i].Tier
		if uint(tier) >= uint(len(c.tiers)) {
			return 0, fmt.Errorf("claim of tier %d in a stack of %d", tier, len(c.tiers))
		}
		for j := range i {
			if claims[j].Tier == tier {
				return 0, fmt.Errorf("tier %d is claimed twice", tier)
			}
		}
		limits += len(c.tiers[tier].limits)
	}
	return limits, nil
}

// decide asks the server.
func (c *redisCounters) decide(ctx context.Context, mode string, claims []Claim, into []State) (Decision, error) {
	ctx, cancel := context.WithTimeout(ctx, c.timeout)
	defer cancel()
	keys, args := c.name(claims)
	args[0] = mode + c.lettersOf(claims)
	result, err := c.link.run(ctx, redisTake, keys, args)
	if err != nil {
		return Decision{RefusedBy: -1}, err
	}
	reply, err := parseRedisReply(result, len(keys)-1)
	if err != nil {
		return Decision{RefusedBy: -1}, err
	}
	c.stack.heard(reply.generation)
	c.stack.ahead.Store(reply.now - c.clock().Milliseconds())
	for i := range len(keys) - 1 {
		if into[i], err = redisState(reply.limits[2*i], reply.limits[2*i+1]); err != nil {
			return Decision{RefusedBy: -1}, err
		}
	}
	return Decision{RefusedBy: reply.refusedBy, Now: time.UnixMilli(reply.now)}, nil
}

// redisState reads what a reply says of one limit.
func redisState(used, left rueidis.RedisMessage) (State, error) {
	hits, err := used.AsInt64()
	if err != nil {
		return State{}, err
	}
	rest, err := left.AsInt64()
	if err != nil {
		return State{}, err
	}
	s := State{Used: hits, Left: time.Duration(rest) * time.Millisecond}
	if hits < 0 {
		s.Used, s.Exceeded = -hits, true
	}
	return s, nil
}

// name lists the keys that claims are about, and the arguments but for the first.
func (c *redisCounters) name(claims []Claim) (keys, args []string) {
	limits := 0
	for i := range claims {
		limits += len(c.tiers[claims[i].Tier].limits)
	}
	texts := make([]string, 2+3*limits)
	keys, args = texts[:1:1+limits], texts[1+limits:2+limits]
	keys[0] = c.stack.prefix + "reset"
	for i := range claims {
		t := &c.tiers[claims[i].Tier]
		keys = c.appendKeys(keys, t, claims[i].Identity)
		args = append(args, t.args...)
	}
	return keys, args
}

// appendKeys appends the keys of one claim.
func (c *redisCounters) appendKeys(keys []string, t *redisTier, identity []byte) []string {
	if known := t.only.Load(); known != nil {
		return append(keys, *known...)
	}
	var room [2 * redisFingerprint]byte
	fingerprint := c.keys.appendFingerprint(room[:0], identity)
	first := len(keys)
	for i := range t.limits {
		keys = append(keys, c.stack.prefix+t.limits[i].infix+string(fingerprint))
	}
	if t.single {
		only := slices.Clone(keys[first:])
		t.only.Store(&only)
	}
	return keys
}

// lettersOf describes the claimed tiers to the script.
func (c *redisCounters) lettersOf(claims []Claim) string {
	if len(claims) == len(c.tiers) && slices.IsSortedFunc(claims, func(a, b Claim) int { return a.Tier - b.Tier }) {
		return c.letters
	}
	var letters strings.Builder
	for i := range claims {
		letters.WriteString(c.tiers[claims[i].Tier].letters)
	}
	return letters.String()
}

// Interface guards
var (
	_ Counters  = (*redisCounters)(nil)
	_ Connector = (*redisCounters)(nil)
	_ Fallible  = (*redisCounters)(nil)
)
