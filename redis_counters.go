package tieredlimit

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync/atomic"
	"time"
)

// redisCounters is one open handle of a stack. All that a configuration says is in here.
type redisCounters struct {
	keys     redisKeys
	link     *redisLink
	stack    *redisStack
	tiers    []redisTier
	reset    string // the key of the reset generation
	spec     string // for taking from all tiers
	onError  string
	local    *redisLocalCounters // set if onError is local
	refusals *redisRefusals      // nil if none are remembered
	clock    func() time.Duration
}

// redisTier is a tier as the script needs to know it.
type redisTier struct {
	limits  []redisLimit
	spec    string // for the script
	size    int    // of its keys together
	checked bool
	dry     bool
	single  bool
	only    atomic.Pointer[[]string] // the keys of a tier with a single bucket, when they are known
}

type redisLimit struct {
	prefix string // of its keys
	window time.Duration
}

// redisResetLife is how long a reset generation is kept. An instance asks again after 5 s at the latest.
const redisResetLife = time.Minute

// openRedisCounters opens a handle.
func openRedisCounters(r *Redis, spec StackSpec) (*redisCounters, error) {
	c := newRedisCounters(r.keys, spec)
	c.onError = r.OnError
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

// newRedisCounters fills in what is known at load, but for where to ask.
func newRedisCounters(keys redisKeys, spec StackSpec) *redisCounters {
	prefix := keys.stack(spec.Name)
	c := &redisCounters{keys: keys, clock: redisClock, reset: prefix + "reset", spec: redisModeTake}
	c.tiers = make([]redisTier, len(spec.Tiers))
	for i := range spec.Tiers {
		c.tiers[i].set(prefix, spec.Tiers[i])
		c.spec += c.tiers[i].spec
	}
	return c
}

// set fills in what is known of a tier at load.
func (t *redisTier) set(prefix string, spec TierSpec) {
	t.spec, t.dry, t.single = redisSpec(spec), spec.DryRun, spec.Single
	t.checked = spec.Charge == ChargeChecked
	for _, limit := range spec.Limits {
		l := redisLimit{prefix: prefix + redisInfix(spec.Name, limit), window: limit.Window}
		t.size += len(l.prefix) + 2*redisFingerprint
		t.limits = append(t.limits, l)
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
	d, err := c.decide(redisModeTake, claims, into)
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
func (c *redisCounters) Peek(_ context.Context, _ time.Time, claims []Claim, into []State) (Decision, error) {
	if err := c.check(claims, into); err != nil {
		return Decision{RefusedBy: -1}, err
	}
	d, err := c.decide(redisModePeek, claims, into)
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
	keys := c.name(claims)
	life := strconv.FormatInt(redisResetLife.Milliseconds(), 10)
	result, err := c.link.run(c.link.deadline(), redisReset, keys, life)
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
func (c *redisCounters) decide(mode string, claims []Claim, into []State) (Decision, error) {
	keys := c.name(claims)
	result, err := c.link.run(c.link.deadline(), redisTake, keys, c.specOf(mode, claims))
	if err != nil {
		return Decision{RefusedBy: -1}, err
	}
	reply, err := parseRedisReply(result, len(keys)-1)
	if err != nil {
		return Decision{RefusedBy: -1}, err
	}
	if err := reply.check(c.tiers, claims); err != nil {
		return Decision{RefusedBy: -1}, err
	}
	now := reply.now()
	c.stack.heard(reply.generation())
	c.stack.ahead.Store(now - c.clock().Milliseconds())
	n := 0
	for i := range claims {
		limits := c.tiers[claims[i].Tier].limits
		for j := range limits {
			into[n] = reply.state(n, limits[j].window)
			n++
		}
	}
	return Decision{RefusedBy: reply.refusedBy(), Now: time.UnixMilli(now)}, nil
}

// name lists the keys that claims are about.
func (c *redisCounters) name(claims []Claim) []string {
	limits, size := 0, 0
	for i := range claims {
		t := &c.tiers[claims[i].Tier]
		limits += len(t.limits)
		size += t.size
	}
	keys := append(make([]string, 0, 1+limits), c.reset)
	// All keys are parts of one text.
	text := make([]byte, 0, size)
	for i := range claims {
		t := &c.tiers[claims[i].Tier]
		if t.single {
			keys = append(keys, t.singleKeys(c, claims[i].Identity)...)
		} else {
			text = c.appendKeys(text, t, claims[i].Identity)
			for range t.limits {
				keys = append(keys, "")
			}
		}
	}
	c.cut(keys[1:], string(text), claims)
	return keys
}

// appendKeys appends the keys of one claim, one after the other.
func (c *redisCounters) appendKeys(text []byte, t *redisTier, identity []byte) []byte {
	var room [2 * redisFingerprint]byte
	fingerprint := c.keys.appendFingerprint(room[:0], identity)
	for i := range t.limits {
		text = append(append(text, t.limits[i].prefix...), fingerprint...)
	}
	return text
}

// cut cuts the text into the keys that are still empty.
func (c *redisCounters) cut(keys []string, text string, claims []Claim) {
	for i := range claims {
		t := &c.tiers[claims[i].Tier]
		for j := range t.limits {
			if !t.single {
				size := len(t.limits[j].prefix) + 2*redisFingerprint
				keys[j], text = text[:size], text[size:]
			}
		}
		keys = keys[len(t.limits):]
	}
}

// singleKeys are the keys of a tier with one bucket for everybody.
func (t *redisTier) singleKeys(c *redisCounters, identity []byte) []string {
	if known := t.only.Load(); known != nil {
		return *known
	}
	text := string(c.appendKeys(nil, t, identity))
	var only []string
	for i := range t.limits {
		size := len(t.limits[i].prefix) + 2*redisFingerprint
		only = append(only, text[:size])
		text = text[size:]
	}
	t.only.Store(&only)
	return only
}

// specOf describes the claimed tiers to the script.
func (c *redisCounters) specOf(mode string, claims []Claim) string {
	if mode == redisModeTake && len(claims) == len(c.tiers) && inOrder(claims) {
		return c.spec
	}
	spec := []byte(mode)
	for i := range claims {
		spec = append(spec, c.tiers[claims[i].Tier].spec...)
	}
	return string(spec)
}

// inOrder tells whether claims are those of all tiers up to the last, in the order written.
func inOrder(claims []Claim) bool {
	for i := range claims {
		if claims[i].Tier != i {
			return false
		}
	}
	return true
}

// Interface guards
var (
	_ Counters  = (*redisCounters)(nil)
	_ Connector = (*redisCounters)(nil)
	_ Fallible  = (*redisCounters)(nil)
)
