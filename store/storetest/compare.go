package storetest

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tieredlimit/caddy-tieredlimit/store"
)

type takeFunc = func(context.Context, time.Time, []store.Claim) (store.Decision, error)

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
	decided      []decided // the latest ones
}

// decided is a decision that can be corrected: the claims as the store, and as the model, has left them.
type decided struct{ store, model []store.Claim }

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
		case 11, 12, 13, 14:
			e.settle(p)
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
	done := decided{store: withStates(p.spec, claims), model: withStates(p.spec, claims)}
	got, err := taken(e.t.Context(), e.now, done.store)
	require.NoError(e.t, err)
	if !e.movable() {
		e.now = got.Now
	}
	want, err := model(e.t.Context(), e.now, done.model)
	require.NoError(e.t, err)
	if got.RefusedBy != want.RefusedBy {
		e.fail("refused by claim %d, want %d", got.RefusedBy, want.RefusedBy)
	}
	if e.movable() && !got.Now.Equal(want.Now) {
		e.fail("decided at %s, want %s", got.Now, want.Now)
	}
	for i := range claims {
		for j := range done.store[i].States {
			if got, want := e.seen(done.store[i].States[j], done.model[i].States[j]), done.model[i].States[j]; got != want {
				e.fail("state %d of claim %d is %+v, want %+v", j, i, got, want)
			}
		}
	}
	if p.decided = append(p.decided, done); len(p.decided) > 8 {
		p.decided = p.decided[1:]
	}
}

// seen is a state as it is to be compared: which window it is about only its store can tell, and the time may be a
// fraction of a millisecond off if it is the store's own.
func (e *episode) seen(got, want store.State) store.State {
	got.Window = want.Window
	if off := got.ResetAfter - want.ResetAfter; e.own && off > -time.Millisecond && off < time.Millisecond {
		got.ResetAfter = want.ResetAfter
		if got.RetryAfter > 0 {
			got.RetryAfter -= off
		}
	}
	return got
}

// settle corrects one of the latest decisions, or a part of it.
func (e *episode) settle(p *pair) {
	if len(p.decided) == 0 {
		return
	}
	done := p.decided[e.random.IntN(len(p.decided))]
	var due decided
	for i := range done.store {
		if e.random.IntN(4) == 0 {
			continue
		}
		hits := e.random.Int64N(11) - 7
		if e.random.IntN(30) == 0 {
			hits = store.MostHits * (2*e.random.Int64N(2) - 1)
		}
		done.store[i].Hits, done.model[i].Hits = hits, hits
		due.store, due.model = append(due.store, done.store[i]), append(due.model, done.model[i])
	}
	e.note(step{what: "settle", at: e.now, handle: p.number, claims: due.store})
	e.setClock()
	require.NoError(e.t, p.store.Settle(e.t.Context(), e.now, due.store))
	require.NoError(e.t, p.model.Settle(e.t.Context(), e.now, due.model))
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
		tier := store.TierSpec{Name: fmt.Sprint("tier-", i), Single: e.random.IntN(4) == 0, Group: groupOfClient}
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
	order := e.random.Perm(len(spec.Tiers))
	if e.random.IntN(8) > 0 {
		slices.Sort(order)
	}
	for _, i := range order {
		switch {
		case e.random.IntN(8) == 0:
		case spec.Tiers[i].Single:
			claims = append(claims, e.claim(spec, i, -1))
		case e.random.IntN(4) == 0:
			for _, who := range e.random.Perm(clients)[:2+e.random.IntN(2)] {
				claims = append(claims, e.claim(spec, i, who))
			}
		default:
			claims = append(claims, e.claim(spec, i, e.random.IntN(clients)))
		}
	}
	return claims
}

// clients is how many identities there are.
const clients = 6

// claim mostly asks for one hit.
func (e *episode) claim(spec store.StackSpec, tier, who int) store.Claim {
	claim := store.Claim{Tier: tier, Hits: 1, Refused: e.random.IntN(20) == 0}
	if who >= 0 {
		claim.Identity = fmt.Append(nil, "client-", who)
	}
	switch e.random.IntN(12) {
	case 0, 1:
		claim.Hits = 0
	case 2, 3:
		claim.Hits = e.random.Int64N(9)
	case 4:
		if e.random.IntN(4) == 0 {
			claim.Hits = store.MostHits - e.random.Int64N(2)
		}
	}
	if e.random.IntN(10) == 0 {
		for range spec.Tiers[tier].Limits {
			claim.Counts = append(claim.Counts, e.random.Int64N(9)-1)
		}
	}
	return claim
}

// groupOfClient puts the clients into three groups.
func groupOfClient(identity []byte) uint64 {
	return []uint64{0, math.MaxUint16, 1 << 40}[identity[len(identity)-1]%3]
}

// withStates is a copy of claims with room for states.
func withStates(spec store.StackSpec, claims []store.Claim) []store.Claim {
	claims = slices.Clone(claims)
	for i := range claims {
		claims[i].States = make([]store.State, len(spec.Tiers[claims[i].Tier].Limits))
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
			if claim.Hits != 1 || claim.Counts != nil || claim.Refused {
				fmt.Fprintf(&trail, "(%d hits, counts %v, refused %t)", claim.Hits, claim.Counts, claim.Refused)
			}
		}
	}
	e.t.Fatalf("seed %d: %s after%s", e.seed, fmt.Sprintf(format, args...), trail.String())
}
