package storetest

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/tieredlimit/caddy-tieredlimit/store"
)

// Model is a store that is slow and obviously right: plain maps behind one mutex, and a history that is kept for ever.
// Others are compared with it. The zero value is ready to use, and has no bound.
//
// All times are cut to whole milliseconds.
type Model struct {
	// MaxKeys is how many counters a stack may have, shared out over the limits of its tiers that are not single.
	// Further identities are counted by their group. Default: no bound.
	MaxKeys int64

	mu     sync.Mutex
	stacks map[string]*modelStack
}

// modelStack is what all handles of a stack share.
type modelStack struct {
	handles   int
	started   bool
	latest    int64 // the latest time that was read off the wall clock, since it was last set back
	lanes     map[int64]*modelLane
	tables    map[modelTable]*modelWindow
	overflows int64

	// Of the last step back: where from, where to, and the lanes before it.
	setBack bool
	left    int64
	entered int64
	before  map[int64]modelLane
}

// modelLane is the time that windows of one length go by: the wall clock's plus shift.
type modelLane struct {
	shift    int64
	bridging bool
	until    int64
}

type modelTable struct {
	tier   string
	window int64
	single bool
}

// modelWindow is the current window of a table.
type modelWindow struct {
	end    int64
	counts map[string]int64
	groups map[uint32]int64 // hits of identities that have no counter of their own
	shares map[uint32]int64 // counters
}

// Open implements [store.Store].
func (m *Model) Open(spec store.StackSpec) (store.Counters, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.stacks == nil {
		m.stacks = make(map[string]*modelStack)
	}
	s := m.stacks[spec.Name]
	if s == nil {
		s = &modelStack{lanes: make(map[int64]*modelLane), tables: make(map[modelTable]*modelWindow)}
		m.stacks[spec.Name] = s
	}
	s.handles++
	c := &modelCounters{model: m, stack: s, spec: spec, most: make(map[modelTable]int64)}
	keyed := int64(0)
	for _, tier := range spec.Tiers {
		for _, limit := range tier.Limits {
			key := tableOf(tier, limit)
			if s.lanes[key.window] == nil {
				s.lanes[key.window] = &modelLane{}
			}
			if s.tables[key] == nil {
				s.tables[key] = &modelWindow{end: math.MinInt64}
			}
			if !tier.Single {
				keyed++
			}
		}
	}
	c.share(keyed)
	return c, nil
}

// modelCounters is a handle of a [Model].
type modelCounters struct {
	model *Model
	stack *modelStack
	spec  store.StackSpec
	most  map[modelTable]int64
}

// share shares MaxKeys out over so many limits. What does not divide goes to the first ones.
func (c *modelCounters) share(keyed int64) {
	rest := int64(0)
	if keyed > 0 {
		rest = c.model.MaxKeys % keyed
	}
	for _, tier := range c.spec.Tiers {
		for _, limit := range tier.Limits {
			c.most[tableOf(tier, limit)] = math.MaxInt64
			if tier.Single || c.model.MaxKeys == 0 {
				continue
			}
			c.most[tableOf(tier, limit)] = c.model.MaxKeys / keyed
			if rest > 0 {
				c.most[tableOf(tier, limit)]++
				rest--
			}
		}
	}
}

// Take implements [store.Counters].
func (c *modelCounters) Take(_ context.Context, now time.Time, claims []store.Claim, into []store.State) (
	store.Decision, error,
) {
	return c.decide(now, claims, into, true)
}

// Peek implements [store.Counters].
func (c *modelCounters) Peek(_ context.Context, now time.Time, claims []store.Claim, into []store.State) (
	store.Decision, error,
) {
	return c.decide(now, claims, into, false)
}

func (c *modelCounters) decide(now time.Time, claims []store.Claim, into []store.State, charge bool) (
	store.Decision, error,
) {
	c.model.mu.Lock()
	defer c.model.mu.Unlock()
	wall := c.stack.read(now.UnixMilli())
	states := make([][]store.State, len(claims))
	allowed := make([]bool, len(claims))
	refusedBy := -1
	for i, claim := range claims {
		tier := c.spec.Tiers[claim.Tier]
		allowed[i] = true
		for _, limit := range tier.Limits {
			window, now := c.window(tier, limit, wall)
			left := time.Duration(window.end-now) * time.Millisecond
			state := store.State{Used: c.used(tier, limit, claim), Left: left}
			if refusedBy < 0 && state.Used >= limit.Count {
				state.Exceeded = true
				allowed[i] = false
			}
			states[i] = append(states[i], state)
		}
		if refusedBy < 0 && !allowed[i] && !tier.DryRun {
			refusedBy = i
		}
	}
	for i, claim := range claims {
		tier := c.spec.Tiers[claim.Tier]
		early := i < refusedBy && tier.Charge == store.ChargeChecked
		if !charge || !allowed[i] || refusedBy >= 0 && !early {
			continue
		}
		for j, limit := range tier.Limits {
			states[i][j].Used = c.hit(tier, limit, claim)
		}
	}
	all := slices.Concat(states...)
	if len(all) > len(into) {
		return store.Decision{}, fmt.Errorf("%d states do not fit into %d", len(all), len(into))
	}
	copy(into, all)
	return store.Decision{RefusedBy: refusedBy, Now: time.UnixMilli(wall)}, nil
}

// Reset implements [store.Counters].
func (c *modelCounters) Reset(_ context.Context, now time.Time, claims []store.Claim) error {
	c.model.mu.Lock()
	defer c.model.mu.Unlock()
	wall := c.stack.read(now.UnixMilli())
	for _, claim := range claims {
		tier := c.spec.Tiers[claim.Tier]
		for _, limit := range tier.Limits {
			window, _ := c.window(tier, limit, wall)
			if _, ok := window.counts[identity(tier, claim)]; ok {
				window.counts[identity(tier, claim)] = 0
			}
		}
	}
	return nil
}

// Close implements [store.Counters].
func (c *modelCounters) Close() error {
	c.model.mu.Lock()
	defer c.model.mu.Unlock()
	if c.stack == nil {
		return errors.New("closed twice")
	}
	c.stack.handles--
	if c.stack.handles == 0 {
		delete(c.model.stacks, c.spec.Name)
	}
	c.stack = nil
	return nil
}

// Tracked implements [store.Tracker].
func (c *modelCounters) Tracked() int64 {
	c.model.mu.Lock()
	defer c.model.mu.Unlock()
	sum := 0
	for key, window := range c.stack.tables {
		if window.end > c.stack.latest+c.stack.lanes[key.window].shift {
			sum += len(window.counts)
		}
	}
	return int64(sum)
}

// Overflowed implements [store.Tracker].
func (c *modelCounters) Overflowed() int64 {
	c.model.mu.Lock()
	defer c.model.mu.Unlock()
	return c.stack.overflows
}

// window is the current window of a limit, and the time in its lane.
func (c *modelCounters) window(tier store.TierSpec, limit store.Limit, wall int64) (*modelWindow, int64) {
	key := tableOf(tier, limit)
	now := wall + c.stack.lanes[key.window].shift
	window := c.stack.tables[key]
	if now >= window.end {
		*window = modelWindow{
			end:    windowStart(now, key.window) + key.window,
			counts: make(map[string]int64),
			groups: make(map[uint32]int64),
			shares: make(map[uint32]int64),
		}
	}
	return window, now
}

// used is what is counted for a claim: by its own counter, a new one if there is room, or its group's.
func (c *modelCounters) used(tier store.TierSpec, limit store.Limit, claim store.Claim) int64 {
	window := c.stack.tables[tableOf(tier, limit)]
	count, ok := window.counts[identity(tier, claim)]
	if !ok && c.full(window, tableOf(tier, limit), claim.Group) {
		return window.groups[claim.Group]
	}
	return count
}

// hit counts one hit, and returns the count.
func (c *modelCounters) hit(tier store.TierSpec, limit store.Limit, claim store.Claim) int64 {
	window := c.stack.tables[tableOf(tier, limit)]
	_, ok := window.counts[identity(tier, claim)]
	if !ok && c.full(window, tableOf(tier, limit), claim.Group) {
		c.stack.overflows++
		window.groups[claim.Group]++
		return window.groups[claim.Group]
	}
	if !ok {
		window.shares[claim.Group]++
	}
	window.counts[identity(tier, claim)]++
	return window.counts[identity(tier, claim)]
}

// full reports whether a window has no room for another counter of a group: all are used, or a quarter of them is the
// group's.
func (c *modelCounters) full(window *modelWindow, key modelTable, group uint32) bool {
	most := c.most[key]
	return most < math.MaxInt64 && (int64(len(window.counts)) >= most || window.shares[group] >= max(1, most/4))
}

// second is how far a time may be behind the latest before the clock has been set back.
const second = 1000

// read says which time a reading of the wall clock counts as.
func (s *modelStack) read(now int64) int64 {
	switch {
	case !s.started:
		s.started, s.latest = true, now
	case now <= s.latest && s.latest-now < second:
		// A little behind: it counts as the latest.
	case now <= s.latest:
		// Set back: each window that has begun goes on until it has run its length.
		s.setBack, s.left, s.entered = true, s.latest, now
		s.before = make(map[int64]modelLane)
		for length, lane := range s.lanes {
			s.before[length] = *lane
			reached := s.latest + lane.shift
			if !lane.bridging {
				lane.bridging = true
				lane.until = windowStart(reached, length) + length
			}
			lane.shift = reached - now
		}
		s.latest = now
	case now-s.latest > second && s.setBack && now > s.left-second && now <= s.left+second:
		// Back to where the clock was set back. Either this was read before that, and counts as the latest, or the
		// clock was not set back at all.
		if now-s.left >= s.latest-s.entered {
			for length, lane := range s.before {
				lane.settle(now, length)
				if now+lane.shift >= s.latest+s.lanes[length].shift {
					*s.lanes[length] = lane
				}
			}
			s.setBack = false
			s.forward(now)
		}
	default:
		s.forward(now)
	}
	return s.latest
}

// forward moves time forward.
func (s *modelStack) forward(now int64) {
	s.latest = now
	for length, lane := range s.lanes {
		lane.settle(now, length)
	}
}

// settle ends a bridge that has been crossed: time moves on by the least number of windows that takes it past.
func (l *modelLane) settle(now, length int64) {
	if l.bridging && now+l.shift >= l.until {
		windows := (l.until - now + length - 1) / length
		l.bridging, l.shift = false, max(0, windows*length)
	}
}

func tableOf(tier store.TierSpec, limit store.Limit) modelTable {
	return modelTable{tier: tier.Name, window: limit.Window.Milliseconds(), single: tier.Single}
}

func identity(tier store.TierSpec, claim store.Claim) string {
	if tier.Single {
		return ""
	}
	return string(claim.Identity)
}

func windowStart(t, length int64) int64 {
	start := t / length * length
	if start > t {
		start -= length
	}
	return start
}

var _ store.Tracker = (*modelCounters)(nil)
