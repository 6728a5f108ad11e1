// Package storetest tells whether a store counts as the contract of store.Store demands.
//
// Anyone who writes a store can run it:
//
//	func TestStore(t *testing.T) {
//		storetest.Run(t, func(t *testing.T) store.Store { return newStore(t) })
//	}
//
// The suite checks single rules with the right values written out, and then compares the store with a [Model] on random
// sequences. It never waits: a store that takes its callers' time is given made-up times, and one that has a clock of
// its own is tested within windows of several years, unless [SetClock] lets the suite move that clock.
package storetest

import (
	"crypto/rand"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tieredlimit/caddy-tieredlimit/store"
)

// Option says something about the store under test.
type Option func(*suite)

// OwnClock says that the store goes by a clock of its own and ignores the times that it is given.
func OwnClock() Option {
	return func(s *suite) { s.own = true }
}

// SetClock says how to set the clock of a store that has one of its own. The function is called before every call of
// the store, and not concurrently.
func SetClock(set func(now time.Time)) Option {
	return func(s *suite) { s.own, s.set = true, set }
}

// ForwardOnly says that the store's clock is never to be set back.
func ForwardOnly() Option {
	return func(s *suite) { s.forwardOnly = true }
}

// Bound says that the store holds so many counters in a stack and shares them out as a [Model] with this bound does.
// The store must implement store.Tracker then. Only the random sequences are run, since the single rules need
// room.
func Bound(maxKeys int64) Option {
	return func(s *suite) { s.maxKeys = maxKeys }
}

// Steps sets how many steps the random sequences have together. Default: 20000, a tenth with -short.
func Steps(count int) Option {
	return func(s *suite) { s.steps = count }
}

// Seed makes the random sequences those of an earlier run. Default: another seed in every run, which is logged.
func Seed(seed uint64) Option {
	return func(s *suite) { s.seed = seed }
}

// Run runs the suite. The function open returns the store; it may return the same one each time.
func Run(t *testing.T, open func(t *testing.T) store.Store, options ...Option) {
	s := &suite{open: open, steps: 20_000, seed: newSeed()}
	if testing.Short() {
		s.steps = 2000
	}
	for _, option := range options {
		option(s)
	}
	for _, rule := range slices.Concat(rules, claimRules) {
		if s.maxKeys > 0 {
			break
		}
		t.Run(rule.name, func(t *testing.T) {
			if rule.moves && !s.movable() {
				t.Skip("the store's clock cannot be moved")
			}
			if rule.back && s.forwardOnly {
				t.Skip("the store's clock is never set back")
			}
			rule.check(t, s.rig(t))
		})
	}
	t.Run("agrees with the model", s.compare)
}

// suite is one run.
type suite struct {
	open        func(t *testing.T) store.Store
	own         bool
	set         func(time.Time)
	forwardOnly bool
	maxKeys     int64
	steps       int
	seed        uint64
}

// movable tells whether the suite can move the store's clock.
func (s *suite) movable() bool { return !s.own || s.set != nil }

// windows are lengths of windows, the shortest first. None ends while the suite runs, unless it moves the clock.
func (s *suite) windows() []time.Duration {
	const day = 24 * time.Hour
	if s.movable() {
		return []time.Duration{time.Minute, time.Hour, day}
	}
	var lengths []time.Duration
	for length := 1000 * day; len(lengths) < 3; length += 77 * day {
		if past := time.Duration(time.Now().UnixMilli()%length.Milliseconds()) * time.Millisecond; length-past > day {
			lengths = append(lengths, length)
		}
	}
	return lengths
}

// start is a time on the first instant of a window of each of the usual lengths.
var start = time.Date(2026, time.January, 5, 0, 0, 0, 0, time.UTC)

// rig is a store with a time, as the rules use it.
type rig struct {
	*suite
	t       *testing.T
	store   store.Store
	now     time.Time
	windows []time.Duration
}

func (s *suite) rig(t *testing.T) *rig {
	return &rig{suite: s, t: t, store: s.open(t), now: start, windows: s.windows()}
}

// stack returns a handle of a new stack.
func (r *rig) stack(tiers ...store.TierSpec) *handle {
	return r.again(newName(), tiers...)
}

// again returns another handle of a stack.
func (r *rig) again(name string, tiers ...store.TierSpec) *handle {
	r.t.Helper()
	spec := store.StackSpec{Name: name, Named: true, Tiers: tiers}
	counters, err := r.store.Open(spec)
	require.NoError(r.t, err)
	h := &handle{rig: r, spec: spec, counters: counters}
	r.t.Cleanup(h.close)
	return h
}

// tier is the spec of a tier; its n-th limit has the n-th window.
func (r *rig) tier(name string, counts ...int64) store.TierSpec {
	tier := store.TierSpec{Name: name}
	for i, count := range counts {
		tier.Limits = append(tier.Limits, store.Limit{Count: count, Window: r.windows[i]})
	}
	return tier
}

// handle is an open stack.
type handle struct {
	*rig
	spec     store.StackSpec
	counters store.Counters
	closed   bool
}

func (h *handle) close() {
	if !h.closed {
		h.closed = true
		require.NoError(h.t, h.counters.Close())
	}
}

// claims asks for one hit on each tier, by identity. An empty identity leaves the tier out, unless it is single.
func (h *handle) claims(identities ...string) []store.Claim {
	var claims []store.Claim
	for i, identity := range identities {
		if identity != "" || h.spec.Tiers[i].Single {
			claims = append(claims, h.claim(i, identity, 1))
		}
	}
	return claims
}

// claim asks for hits on one tier.
func (h *handle) claim(tier int, identity string, hits int64) store.Claim {
	return store.Claim{
		Tier: tier, Identity: []byte(identity), Hits: hits, States: make([]store.State, len(h.spec.Tiers[tier].Limits)),
	}
}

// answer is what a store said, with the name of the tier that refused, and all states one behind the other.
type answer struct {
	claims    []store.Claim
	by        int
	refusedBy string
	states    []store.State
	now       time.Time
}

func (a answer) used() []int64 {
	used := make([]int64, len(a.states))
	for i := range a.states {
		used[i] = a.states[i].Used
	}
	return used
}

func (h *handle) take(identities ...string) answer {
	h.t.Helper()
	return h.ask(h.counters.Take, identities)
}

func (h *handle) peek(identities ...string) answer {
	h.t.Helper()
	return h.ask(h.counters.Peek, identities)
}

func (h *handle) ask(call takeFunc, identities []string) answer {
	h.t.Helper()
	return h.put(call, h.claims(identities...)...)
}

// put puts claims to the store.
func (h *handle) put(call takeFunc, claims ...store.Claim) answer {
	h.t.Helper()
	h.setClock()
	decision, err := call(h.t.Context(), h.now, claims)
	require.NoError(h.t, err)
	a := answer{claims: claims, by: decision.RefusedBy, now: decision.Now}
	for i := range claims {
		a.states = append(a.states, claims[i].States...)
	}
	if decision.RefusedBy >= 0 {
		a.refusedBy = h.spec.Tiers[claims[decision.RefusedBy].Tier].Name
	}
	return a
}

// settle corrects what an answer has charged, by so many hits for each claim.
func (h *handle) settle(a answer, hits ...int64) {
	h.t.Helper()
	h.setClock()
	claims := slices.Clone(a.claims)
	for i := range claims {
		claims[i].Hits = hits[i]
	}
	require.NoError(h.t, h.counters.Settle(h.t.Context(), h.now, claims))
}

func (h *handle) setClock() {
	if h.set != nil {
		h.set(h.now)
	}
}

func (h *handle) reset(identities ...string) {
	h.t.Helper()
	h.setClock()
	require.NoError(h.t, h.counters.Reset(h.t.Context(), h.now, h.claims(identities...)))
}

// served takes so many times, and returns how often nobody refused.
func (h *handle) served(times int, identities ...string) int {
	h.t.Helper()
	served := 0
	for range times {
		if h.take(identities...).refusedBy == "" {
			served++
		}
	}
	return served
}

// newName is the name of a stack that nobody has used before, in whatever store.
func newName() string {
	return "test-" + strings.ToLower(rand.Text())
}
