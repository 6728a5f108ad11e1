package storetest

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tieredlimit/caddy-tieredlimit/store"
)

type takeFunc = func(context.Context, time.Time, []store.Claim, []store.State) (store.Decision, error)

func newSeed() uint64 { return rand.Uint64() }

// compare runs random sequences on the store and on a model.
func (s *suite) compare(t *testing.T) {
	t.Logf("seed %d", s.seed)
	random := rand.New(rand.NewPCG(s.seed, 0))
	model := &Model{MaxKeys: s.maxKeys}
	store := s.open(t)
	for done := 0; done < s.steps; {
		e := &episode{suite: s, t: t, random: random, store: store, model: model, name: newName(), now: start}
		done += e.run(min(50+random.IntN(500), s.steps-done))
	}
}

// episode is the life of one stack.
type episode struct {
	*suite
	t            *testing.T
	random       *rand.Rand
	store, model store.Store
	name         string
	now          time.Time
	back         time.Time // where the clock was once set back
	lengths      []time.Duration
	pairs        []*pair
	trail        []step
}

// pair is a handle of the store and one of the model.
type pair struct {
	number       int
	spec         store.StackSpec
	store, model store.Counters
}

// step is something that was done, for the trail.
type step struct {
	what   string
	at     time.Time
	handle int
	spec   store.StackSpec
	claims []store.Claim
}

func (e *episode) run(steps int) int {
	e.lengths = e.windows()
	if e.movable() {
		for _, ms := range []time.Duration{1, 10, 250, 1000, 1500, 7000, 60_000, 3_600_000, 86_400_000} {
			e.lengths = append(e.lengths, ms*time.Millisecond)
		}
		e.lengths = e.lengths[3:]
		e.now = start.Add(time.Duration(e.random.IntN(100_000_000)) * time.Millisecond)
	}
	e.openPair(e.randomSpec())
	for range steps {
		switch p := e.pairs[e.random.IntN(len(e.pairs))]; e.random.IntN(40) {
		case 0:
			e.openPair(e.variant(p.spec))
		case 1:
			e.closePair()
		case 2, 3, 4:
			e.decide("peek", p, p.store.Peek, p.model.Peek)
		case 5:
			e.reset(p)
		case 6, 7, 8, 9, 10:
			e.move()
		default:
			e.decide("take", p, p.store.Take, p.model.Take)
		}
		e.tracked()
	}
	for len(e.pairs) > 0 {
		e.drop(0)
	}
	return steps
}

func (e *episode) openPair(spec store.StackSpec) {
	if len(e.pairs) == 3 {
		e.closePair()
	}
	p := &pair{number: len(e.trail), spec: spec}
	e.note(step{what: "open", handle: p.number, spec: spec})
	var err error
	p.store, err = e.store.Open(spec)
	require.NoError(e.t, err)
	p.model, err = e.model.Open(spec)
	require.NoError(e.t, err)
	e.pairs = append(e.pairs, p)
}

// closePair closes one of several handles.
func (e *episode) closePair() {
	if len(e.pairs) > 1 {
		i := e.random.IntN(len(e.pairs))
		e.note(step{what: "close", handle: e.pairs[i].number})
		e.drop(i)
	}
}

func (e *episode) drop(i int) {
	require.NoError(e.t, e.pairs[i].store.Close())
	require.NoError(e.t, e.pairs[i].model.Close())
	e.pairs = append(e.pairs[:i], e.pairs[i+1:]...)
}

// decide asks both, and compares all they say. A store whose clock cannot be set tells the model what time it is.
func (e *episode) decide(what string, p *pair, taken, model takeFunc) {
	claims := e.claims(p.spec)
	e.note(step{what: what, at: e.now, handle: p.number, claims: claims})
	e.setClock()
	got := make([]store.State, statesOf(p.spec, claims))
	want := make([]store.State, len(got))
	decided, err := taken(e.t.Context(), e.now, claims, got)
	require.NoError(e.t, err)
	if !e.movable() {
		e.now = decided.Now
	}
	expected, err := model(e.t.Context(), e.now, claims, want)
	require.NoError(e.t, err)
	if decided.RefusedBy != expected.RefusedBy {
		e.fail("refused by claim %d, want %d", decided.RefusedBy, expected.RefusedBy)
	}
	if e.movable() && !decided.Now.Equal(expected.Now) {
		e.fail("decided at %s, want %s", decided.Now, expected.Now)
	}
	for i := range got {
		if off := got[i].Left - want[i].Left; e.own && off > -time.Millisecond && off < time.Millisecond {
			got[i].Left = want[i].Left
		}
		if got[i] != want[i] {
			e.fail("state %d is %+v, want %+v", i, got[i], want[i])
		}
	}
}

func (e *episode) reset(p *pair) {
	claims := e.claims(p.spec)
	e.note(step{what: "reset", at: e.now, handle: p.number, claims: claims})
	e.setClock()
	require.NoError(e.t, p.store.Reset(e.t.Context(), e.now, claims))
	require.NoError(e.t, p.model.Reset(e.t.Context(), e.now, claims))
}

func (e *episode) setClock() {
	if e.set != nil {
		e.set(e.now)
	}
}

// tracked compares the number of counters, where the store has a bound.
func (e *episode) tracked() {
	if e.maxKeys == 0 {
		return
	}
	got, want := e.pairs[0].store.(store.Tracker), e.pairs[0].model.(store.Tracker)
	if got.Tracked() != want.Tracked() {
		e.fail("%d counters, want %d", got.Tracked(), want.Tracked())
	}
	if got.Overflowed() != want.Overflowed() {
		e.fail("%d overflowed, want %d", got.Overflowed(), want.Overflowed())
	}
}

// move moves the clock: mostly a little forward, at times to the edge of a window, far, or back.
func (e *episode) move() {
	if !e.movable() {
		return
	}
	length := e.lengths[e.random.IntN(len(e.lengths))]
	kind := e.random.IntN(20)
	switch {
	case kind < 6:
		e.now = e.now.Add(time.Duration(e.random.IntN(2000)) * time.Millisecond)
	case kind < 9:
		e.now = e.now.Truncate(length).Add(length - time.Duration(e.random.IntN(2))*time.Millisecond)
	case kind < 12:
		e.now = e.now.Add(length * time.Duration(1+e.random.IntN(3)))
	case kind < 13:
		e.now = e.now.Add(time.Duration(e.random.Int64N(int64(400 * 24 * time.Hour))))
	case kind < 14:
		e.now = e.now.Add(time.Duration(e.random.IntN(int(time.Second))))
	case e.forwardOnly:
	case kind < 17:
		e.now = e.now.Add(-time.Duration(e.random.IntN(1002)) * time.Millisecond)
	case kind < 18:
		e.back = e.now
		e.now = e.now.Add(-time.Duration(e.random.IntN(5000)) * time.Millisecond)
	case kind < 19 && !e.back.IsZero():
		e.now = e.back.Add(time.Duration(e.random.IntN(2010)-1005) * time.Millisecond)
	default:
		e.back = e.now
		e.now = e.now.Add(-time.Duration(e.random.Int64N(int64(2*length) + int64(time.Second))))
	}
}

// randomSpec is a stack of one to five tiers with one to three limits each.
func (e *episode) randomSpec() store.StackSpec {
	spec := store.StackSpec{Name: e.name, Named: true}
	for i := range 1 + e.random.IntN(5) {
		tier := store.TierSpec{Name: fmt.Sprint("tier-", i), Single: e.random.IntN(4) == 0}
		spec.Tiers = append(spec.Tiers, e.modes(tier))
	}
	return spec
}

// modes gives a tier other limits and modes.
func (e *episode) modes(tier store.TierSpec) store.TierSpec {
	tier.Limits = nil
	for _, i := range e.random.Perm(len(e.lengths))[:1+e.random.IntN(3)] {
		limit := store.Limit{Count: 1 + e.random.Int64N(8), Window: e.lengths[i]}
		if e.random.IntN(10) == 0 {
			limit.Count = math.MaxInt32
		}
		tier.Limits = append(tier.Limits, limit)
	}
	tier.Charge = store.ChargeMode(e.random.IntN(2))
	tier.DryRun = e.random.IntN(4) == 0
	return tier
}

// variant is the same stack in another config: other counts at least, and at times other limits, tiers or order.
func (e *episode) variant(spec store.StackSpec) store.StackSpec {
	next := store.StackSpec{Name: spec.Name, Named: true}
	for _, tier := range spec.Tiers {
		if e.random.IntN(4) == 0 {
			tier = e.modes(tier)
		}
		tier.Limits = append([]store.Limit(nil), tier.Limits...)
		for i := range tier.Limits {
			if e.random.IntN(2) == 0 {
				tier.Limits[i].Count = 1 + e.random.Int64N(8)
			}
		}
		next.Tiers = append(next.Tiers, tier)
	}
	if e.random.IntN(3) == 0 {
		e.random.Shuffle(len(next.Tiers), func(i, j int) { next.Tiers[i], next.Tiers[j] = next.Tiers[j], next.Tiers[i] })
	}
	if len(next.Tiers) > 1 && e.random.IntN(4) == 0 {
		next.Tiers = next.Tiers[1:]
	}
	return next
}

// claims asks for most of the tiers, mostly in the order written, of few identities.
func (e *episode) claims(spec store.StackSpec) []store.Claim {
	var claims []store.Claim
	for i, tier := range spec.Tiers {
		if e.random.IntN(8) == 0 {
			continue
		}
		claim := store.Claim{Tier: i}
		if !tier.Single {
			who := e.random.IntN(6)
			claim.Identity, claim.Group = fmt.Append(nil, "client-", who), uint32(who%3)*(store.Groups/2-1)
		}
		claims = append(claims, claim)
	}
	if e.random.IntN(8) == 0 {
		e.random.Shuffle(len(claims), func(i, j int) { claims[i], claims[j] = claims[j], claims[i] })
	}
	return claims
}

func (e *episode) note(s step) { e.trail = append(e.trail, s) }

// fail reports a difference, with the seed and the last steps.
func (e *episode) fail(format string, args ...any) {
	e.t.Helper()
	var trail strings.Builder
	for i, s := range e.trail {
		if s.what != "open" && i < len(e.trail)-30 {
			continue
		}
		fmt.Fprintf(&trail, "\n%s handle %d", s.what, s.handle)
		if s.what == "open" {
			fmt.Fprintf(&trail, " %+v", s.spec.Tiers)
		}
		if !s.at.IsZero() {
			fmt.Fprintf(&trail, " at %s:", s.at.UTC().Format("02 15:04:05.000"))
		}
		for _, claim := range s.claims {
			fmt.Fprintf(&trail, " %d=%s", claim.Tier, claim.Identity)
		}
	}
	e.t.Fatalf("seed %d: %s after%s", e.seed, fmt.Sprintf(format, args...), trail.String())
}
