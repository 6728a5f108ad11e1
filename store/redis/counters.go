package redis

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/tieredlimit/caddy-tieredlimit/store"
)

// counters is one open handle of a stack. All that a configuration says is in here.
type counters struct {
	of       store.StackSpec
	keys     keyspace
	link     *link
	stack    *sharedStack
	tiers    []counterTier
	reset    string // the key of the reset generation
	spec     string // for taking from all tiers
	onError  string
	local    *localCounters // set if onError is local
	refusals *refusals      // nil if none are remembered
	clock    func() time.Duration
}

// counterTier is a tier as the script needs to know it.
type counterTier struct {
	limits  []counterLimit
	spec    string // for the script, where one hit is claimed
	letter  byte   // for the script
	size    int    // of its keys together
	checked bool
	dry     bool
	single  bool
	only    atomic.Pointer[[]string] // the keys of a tier with a single bucket, when they are known
}

type counterLimit struct {
	prefix string // of its keys
	window time.Duration
	count  int64
}

// resetLife is how long a reset generation is kept. An instance asks again after 5 s at the latest.
const resetLife = time.Minute

// openCounters opens a handle.
func openCounters(r *Redis, spec store.StackSpec) (*counters, error) {
	c := newCounters(r.keys, spec)
	c.onError = r.OnError
	if !r.forgetful {
		c.refusals = newRefusals(len(spec.Tiers))
	}
	if r.OnError == onErrorLocal {
		var err error
		if c.local, err = openLocal(r, spec); err != nil {
			return nil, fmt.Errorf("on_error local: %w", err)
		}
	}
	link, err := takeLink(r.setup, r.logger)
	if err != nil {
		return nil, errors.Join(err, c.local.close())
	}
	c.link = link
	c.stack = link.stack(r.keys.stack(spec.Name))
	return c, nil
}

// newCounters fills in what is known at load, but for where to ask.
func newCounters(keys keyspace, spec store.StackSpec) *counters {
	prefix := keys.stack(spec.Name)
	c := &counters{of: spec, keys: keys, clock: monotonic, reset: prefix + "reset", spec: modeTake}
	c.tiers = make([]counterTier, len(spec.Tiers))
	for i := range spec.Tiers {
		c.tiers[i].set(prefix, spec.Tiers[i])
		c.spec += c.tiers[i].spec
	}
	return c
}

// set fills in what is known of a tier at load.
func (t *counterTier) set(prefix string, spec store.TierSpec) {
	t.letter, t.dry, t.single = letterOf(spec), spec.DryRun, spec.Single
	t.checked = spec.Charge == store.ChargeChecked
	for _, limit := range spec.Limits {
		l := counterLimit{prefix: prefix + infix(spec.Name, limit), window: limit.Window, count: limit.Count}
		t.size += len(l.prefix) + 2*fingerprint
		t.limits = append(t.limits, l)
	}
	t.spec = string(t.appendSpec(nil, &store.Claim{Hits: 1}, placeTier))
}

// Take implements [store.Counters]. The server's clock counts, not now.
func (c *counters) Take(ctx context.Context, now time.Time, claims []store.Claim) (store.Decision, error) {
	if err := c.of.Check(claims); err != nil {
		return store.Decision{RefusedBy: -1}, err
	}
	clock := c.clock()
	if d, ok := c.refuse(clock, claims); ok {
		return d, nil
	}
	breaker := c.stack.breaker
	if !breaker.allows() {
		return c.without(ctx, now, claims, errRedisAway)
	}
	if err := ctx.Err(); err != nil {
		return store.Decision{RefusedBy: -1}, err
	}
	epoch := c.stack.epoch.Load()
	d, err := c.decide(modeTake, claims)
	if err != nil {
		breaker.failed(err)
		return c.without(ctx, now, claims, err)
	}
	breaker.succeeded()
	if c.refusals != nil && d.RefusedBy >= 0 {
		c.remember(clock, epoch, d, claims)
	}
	if c.local != nil {
		c.local.follow(ctx, d.Now, c.charged(d, claims))
	}
	return d, nil
}

// Peek implements [store.Counters]. It asks whoever would decide: the server, and not what is remembered of it, or what
// stands in for the server while that is away.
func (c *counters) Peek(ctx context.Context, now time.Time, claims []store.Claim) (store.Decision, error) {
	if err := c.of.Check(claims); err != nil {
		return store.Decision{RefusedBy: -1}, err
	}
	if !c.stack.breaker.allows() {
		return c.instead(ctx, now, claims, errRedisAway, (*localCounters).peek)
	}
	d, err := c.decide(modePeek, claims)
	if err != nil {
		return c.instead(ctx, now, claims, err, (*localCounters).peek)
	}
	return d, nil
}

// Reset implements [store.Counters]. What this instance remembers is forgotten at once, what others do within 5 s. While the
// server is away, what stands in for it is reset; the server's counters stay.
func (c *counters) Reset(ctx context.Context, now time.Time, claims []store.Claim) error {
	if err := c.of.CheckTiers(claims); err != nil || len(claims) == 0 {
		return err
	}
	if c.local != nil && !c.stack.breaker.allows() {
		return c.local.reset(ctx, c.serverTime(now), claims)
	}
	keys := c.name(claims)
	life := strconv.FormatInt(resetLife.Milliseconds(), 10)
	result, err := c.link.run(c.link.deadline(), resetScript, keys, life)
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

// Connect implements [store.Connector]. A server that cannot be reached is logged now, and not at the first request.
func (c *counters) Connect() {
	if c.link.client.Load() != nil || !c.stack.breaker.allows() {
		return
	}
	go func() {
		ctx, cancel := context.WithTimeout(c.link.ctx, 2*dialTimeout)
		defer cancel()
		if _, err := c.link.ready(ctx); err != nil && !errors.Is(err, errRedisClosed) && c.link.ctx.Err() == nil {
			c.stack.breaker.failed(err)
		}
	}()
}

// Away implements [store.Connector].
func (c *counters) Away() *store.Absence {
	a := c.stack.breaker.away.Load()
	if a == nil {
		return nil
	}
	return &store.Absence{Since: a.since, Kind: failureKind(a.cause), Instead: store.Instead(c.onError)}
}

// Close implements [store.Counters].
func (c *counters) Close() error {
	c.stack.leave()
	return errors.Join(c.local.close(), c.link.leave())
}

// decide asks the server.
func (c *counters) decide(mode string, claims []store.Claim) (store.Decision, error) {
	keys := c.name(claims)
	result, err := c.link.run(c.link.deadline(), takeScript, keys, c.specOf(mode, claims))
	if err != nil {
		return store.Decision{RefusedBy: -1}, err
	}
	reply, err := parseReply(result, len(keys)-1)
	if err != nil {
		return store.Decision{RefusedBy: -1}, err
	}
	if err := reply.check(c.tiers, claims); err != nil {
		return store.Decision{RefusedBy: -1}, err
	}
	now := reply.now()
	c.stack.heard(reply.generation())
	c.stack.ahead.Store(now - c.clock().Milliseconds())
	n := 0
	for i := range claims {
		for j, l := range c.tiers[claims[i].Tier].limits {
			claims[i].States[j] = reply.state(n, l.window)
			n++
		}
	}
	d := store.Decision{RefusedBy: reply.refusedBy(), Now: time.UnixMilli(now)}
	for i := range claims {
		if mode == modeTake && c.charges(d, claims, i) {
			continue // all of it has passed
		}
		for j, l := range c.tiers[claims[i].Tier].limits {
			s := &claims[i].States[j]
			s.RetryAfter = claims[i].Wait(j, l.count, s.Used, s.ResetAfter)
		}
	}
	return d, nil
}

// charges reports whether a decision to take has charged the ith claim.
func (c *counters) charges(d store.Decision, claims []store.Claim, i int) bool {
	tier := claims[i].Tier
	if d.RefusedBy >= 0 && (i >= d.RefusedBy || !c.tiers[tier].checked) {
		return false
	}
	for first := i; first > 0 && claims[first-1].Tier == tier; {
		first--
		i = first
	}
	for ; i < len(claims) && claims[i].Tier == tier; i++ {
		if claims[i].Refused || anyExceeded(claims[i].States) {
			return false
		}
	}
	return true
}

// charged are the claims that a decision to take has charged.
func (c *counters) charged(d store.Decision, claims []store.Claim) []store.Claim {
	var charged []store.Claim
	for i := range claims {
		if c.charges(d, claims, i) {
			charged = append(charged, claims[i])
		}
	}
	return charged
}

func anyExceeded(states []store.State) bool {
	return slices.ContainsFunc(states, func(s store.State) bool { return s.Exceeded })
}

// name lists the keys that claims are about.
func (c *counters) name(claims []store.Claim) []string {
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
func (c *counters) appendKeys(text []byte, t *counterTier, identity []byte) []byte {
	var room [2 * fingerprint]byte
	fingerprint := c.keys.appendFingerprint(room[:0], identity)
	for i := range t.limits {
		text = append(append(text, t.limits[i].prefix...), fingerprint...)
	}
	return text
}

// cut cuts the text into the keys that are still empty.
func (c *counters) cut(keys []string, text string, claims []store.Claim) {
	for i := range claims {
		t := &c.tiers[claims[i].Tier]
		for j := range t.limits {
			if !t.single {
				size := len(t.limits[j].prefix) + 2*fingerprint
				keys[j], text = text[:size], text[size:]
			}
		}
		keys = keys[len(t.limits):]
	}
}

// singleKeys are the keys of a tier with one bucket for everybody.
func (t *counterTier) singleKeys(c *counters, identity []byte) []string {
	if known := t.only.Load(); known != nil {
		return *known
	}
	text := string(c.appendKeys(nil, t, identity))
	var only []string
	for i := range t.limits {
		size := len(t.limits[i].prefix) + 2*fingerprint
		only = append(only, text[:size])
		text = text[size:]
	}
	t.only.Store(&only)
	return only
}

// specOf describes what is claimed to the script.
func (c *counters) specOf(mode string, claims []store.Claim) string {
	usual := mode == modeTake && len(claims) == len(c.tiers)
	for i := range claims {
		if mode == modeTake && claims[i].Refused {
			mode = modeRefused
		}
		usual = usual && claims[i].Tier == i && plain(&claims[i])
	}
	if usual {
		return c.spec
	}
	spec := []byte(mode)
	for i := range claims {
		t, place := &c.tiers[claims[i].Tier], placeTier
		if i > 0 && claims[i-1].Tier == claims[i].Tier {
			place = placeClaim
		}
		if place == placeTier && plain(&claims[i]) {
			spec = append(spec, t.spec...)
		} else {
			spec = t.appendSpec(spec, &claims[i], place)
		}
	}
	return string(spec)
}

// plain reports whether a claim asks for one hit and no more.
func plain(claim *store.Claim) bool {
	return claim.Hits == 1 && claim.Counts == nil && !claim.Refused
}

// Interface guards
var (
	_ store.Counters  = (*counters)(nil)
	_ store.Connector = (*counters)(nil)
	_ store.Fallible  = (*counters)(nil)
)
