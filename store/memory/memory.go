package memory

import (
	"context"
	"fmt"
	"hash/maphash"
	"math"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/tieredlimit/caddy-tieredlimit/store"
)

func init() {
	caddy.RegisterModule(Memory{})
}

// Memory keeps counters in the memory of this process.
//
// It is the default store. Its counters outlive configuration reloads, end with the process, and are not shared with
// other instances. A counter takes 32 bytes at most, whatever its limit, and expired ones are forgotten a whole
// window at a time.
//
// Identities are kept as 64-bit hashes under a seed that is drawn anew in each process and never shown, so nobody can
// search for two that collide. By chance, an identity meets one of a million others with a probability below 1 in
// 10^13, and then shares its counter until the window ends.
type Memory struct {
	// How many counters a stack may hold, 1 to 2147483647. Default: 1000000.
	//
	// They are shared out evenly over the limits of the stack's tiers, but for tiers that have one bucket for
	// everybody. When the counters of a limit are used up, further clients are counted together with others of their
	// network, against the same limit, until the window ends; clients that have a counter keep it. So are the further
	// clients of a network that has a quarter of a limit's counters. At worst somebody with addresses in four large
	// networks uses all counters up, and new clients share the limit of their network until the window ends.
	MaxKeys *int64 `json:"max_keys,omitempty"`
}

// DefaultMaxKeys is how many counters a stack may hold where nothing is stated.
const DefaultMaxKeys = 1_000_000

// CaddyModule returns the Caddy module information.
func (Memory) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "http.tiered_limit.stores.memory",
		New: func() caddy.Module { return new(Memory) },
	}
}

// UnmarshalCaddyfile sets up the store from Caddyfile tokens. Syntax:
//
//	store memory {
//		max_keys <count>
//	}
func (m *Memory) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // the name of the store
	if d.NextArg() {
		return d.Errf("unexpected argument %q: store memory takes a block only", d.Val())
	}
	for d.NextBlock(0) {
		if d.Val() != "max_keys" {
			return d.Errf("unknown option %q of store memory: expected max_keys", d.Val())
		}
		if m.MaxKeys != nil {
			return d.Err("max_keys is given twice")
		}
		var value string
		if !d.AllArgs(&value) {
			return d.Err("expected one count after max_keys")
		}
		count, err := strconv.ParseInt(value, 10, 64)
		if err != nil {
			return d.Errf("max_keys %q is not a whole number from 1 to %d", value, math.MaxInt32)
		}
		m.MaxKeys = &count
		if err := m.Validate(); err != nil {
			return d.WrapErr(err)
		}
	}
	return nil
}

// Validate checks that the bound is within range.
func (m *Memory) Validate() error {
	if m.MaxKeys != nil && (*m.MaxKeys < 1 || *m.MaxKeys > math.MaxInt32) {
		return fmt.Errorf("max_keys %d is not a whole number from 1 to %d", *m.MaxKeys, math.MaxInt32)
	}
	return nil
}

// Open returns the counters of a stack.
func (m *Memory) Open(spec store.StackSpec) (store.Counters, error) {
	maxKeys := int64(DefaultMaxKeys)
	if m.MaxKeys != nil {
		maxKeys = *m.MaxKeys
	}
	if err := checkSpec(spec, maxKeys); err != nil {
		return nil, fmt.Errorf("stack %q: %w", spec.Name, err)
	}
	value, _, err := stacks.LoadOrNew(spec.Name, func() (caddy.Destructor, error) { return newStack(), nil })
	if err != nil {
		return nil, fmt.Errorf("stack %q: %w", spec.Name, err)
	}
	return newMemoryCounters(value.(*stack), spec, maxKeys), nil
}

// checkSpec refuses what cannot be counted. A configuration was judged before, so this is for other callers.
func checkSpec(spec store.StackSpec, maxKeys int64) error {
	var keyed int64
	for i, tier := range spec.Tiers {
		if len(tier.Limits) == 0 {
			return fmt.Errorf("tier %q has no limit", tier.Name)
		}
		if slices.ContainsFunc(spec.Tiers[:i], func(t store.TierSpec) bool { return t.Name == tier.Name }) {
			return fmt.Errorf("tier %q occurs twice", tier.Name)
		}
		for j, limit := range tier.Limits {
			if limit.Count < 1 || limit.Count > math.MaxInt32 {
				return fmt.Errorf("tier %q: count %d is not from 1 to %d", tier.Name, limit.Count, math.MaxInt32)
			}
			if limit.Window < time.Millisecond || limit.Window%time.Millisecond != 0 {
				return fmt.Errorf("tier %q: window %s is not a number of whole milliseconds", tier.Name, limit.Window)
			}
			if slices.ContainsFunc(tier.Limits[:j], func(l store.Limit) bool { return l.Window == limit.Window }) {
				return fmt.Errorf("tier %q: window %s occurs twice", tier.Name, limit.Window)
			}
		}
		if !tier.Single {
			keyed += int64(len(tier.Limits))
		}
	}
	if maxKeys < keyed {
		return fmt.Errorf("max_keys %d cannot be shared out over %d limits", maxKeys, keyed)
	}
	return nil
}

// stacks are the counters in use, by the name of their stack.
var stacks = caddy.NewUsagePool()

// seed is what identities are hashed under.
var seed = maphash.MakeSeed()

// stack is the state that all open handles of one stack share.
type stack struct {
	clock      *clock
	overflowed atomic.Int64

	mu     sync.Mutex
	tables map[tableKey]*table
	ranks  int
}

// tableKey is what must stay the same for a limit to keep its counters.
type tableKey struct {
	tier   string
	window time.Duration
	single bool
}

func newStack() *stack {
	return &stack{clock: newClock(), tables: make(map[tableKey]*table)}
}

// Destruct implements [caddy.Destructor].
func (*stack) Destruct() error { return nil }

// table returns the table for a limit and counts the caller as a user of it.
func (s *stack) table(tier store.TierSpec, limit store.Limit) *table {
	s.mu.Lock()
	defer s.mu.Unlock()
	key := tableKey{tier: tier.Name, window: limit.Window, single: tier.Single}
	t := s.tables[key]
	if t == nil {
		length := limit.Window.Milliseconds()
		t = newTable(length, s.clock.lane(length), s.ranks, tier.Single)
		s.tables[key] = t
		s.ranks++
	}
	t.refs++
	return t
}

// leave takes back one use of each of the tables, and forgets those that nobody uses and that hold nothing.
func (s *stack) leave(limits []counterLimit) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range limits {
		limits[i].table.refs--
	}
	for key, t := range s.tables {
		if t.refs == 0 && t.tracked(s.clock.latest(t.lane)) == 0 {
			delete(s.tables, key)
		}
	}
}

// counters is one open handle of a stack. All that a configuration says is in here.
type counters struct {
	name   string
	stack  *stack
	tiers  []counterTier
	limits []counterLimit // of all tiers, in the order written
	keyed  []int          // the limits with a counter for each identity, in the order in which they are locked
	single []int          // those with one for everybody, which are locked after them, since every request waits for them
	closed atomic.Bool
}

type counterTier struct {
	first, last int // its limits are limits[first:last]
	charge      store.ChargeMode
	dry         bool
	single      bool
}

// limits is how many the tier has.
func (t *counterTier) limits() int { return t.last - t.first }

type counterLimit struct {
	table  *table
	group  func(identity []byte) uint64
	count  int64
	most   int64 // counters that the table may have for this handle
	length int64 // of the window, in milliseconds
	lane   int
}

func newMemoryCounters(s *stack, spec store.StackSpec, maxKeys int64) *counters {
	m := &counters{name: spec.Name, stack: s}
	for _, spec := range spec.Tiers {
		tier := counterTier{first: len(m.limits), charge: spec.Charge, dry: spec.DryRun, single: spec.Single}
		for _, l := range spec.Limits {
			t := s.table(spec, l)
			if spec.Single {
				m.single = append(m.single, len(m.limits))
			} else {
				m.keyed = append(m.keyed, len(m.limits))
			}
			m.limits = append(m.limits, counterLimit{
				table: t, group: spec.Group, count: l.Count, most: math.MaxInt64, length: t.length, lane: t.lane,
			})
		}
		tier.last = len(m.limits)
		m.tiers = append(m.tiers, tier)
	}
	keyed := int64(len(m.keyed))
	for i, k := range m.keyed {
		m.limits[k].most = maxKeys / keyed
		if int64(i) < maxKeys%keyed {
			m.limits[k].most++
		}
	}
	// All handles lock in one order.
	byRank := func(a, b int) int { return m.limits[a].table.rank - m.limits[b].table.rank }
	slices.SortFunc(m.keyed, byRank)
	slices.SortFunc(m.single, byRank)
	return m
}

// Take implements [store.Counters].
func (m *counters) Take(_ context.Context, now time.Time, claims []store.Claim) (store.Decision, error) {
	return m.decide(now, claims, true)
}

// Peek implements [store.Counters].
func (m *counters) Peek(_ context.Context, now time.Time, claims []store.Claim) (store.Decision, error) {
	return m.decide(now, claims, false)
}

// Close implements [store.Counters].
func (m *counters) Close() error {
	if m.closed.Swap(true) {
		return nil
	}
	m.stack.leave(m.limits)
	if _, err := stacks.Delete(m.name); err != nil {
		return fmt.Errorf("stack %q: %w", m.name, err)
	}
	return nil
}

// Tracked implements [store.Tracker]. It goes by the time of the latest decision.
func (m *counters) Tracked() int64 {
	m.stack.mu.Lock()
	defer m.stack.mu.Unlock()
	var sum int64
	for _, t := range m.stack.tables {
		sum += t.tracked(m.stack.clock.latest(t.lane))
	}
	return sum
}

// Overflowed implements [store.Tracker]. A hit on a tier with two limits can overflow on both, and then counts twice.
func (m *counters) Overflowed() int64 { return m.stack.overflowed.Load() }

var (
	_ store.Store           = (*Memory)(nil)
	_ caddy.Validator       = (*Memory)(nil)
	_ caddyfile.Unmarshaler = (*Memory)(nil)
	_ store.Counters        = (*counters)(nil)
	_ store.Tracker         = (*counters)(nil)
)
