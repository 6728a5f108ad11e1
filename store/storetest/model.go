package storetest

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"math"
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
	groups map[uint64]int64 // hits of identities that have no counter of their own
	shares map[uint64]int64 // counters
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
	c := &modelCounters{model: m, stack: s, spec: spec, room: make(map[modelTable]int64)}
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
	room  map[modelTable]int64
}

// share shares MaxKeys out over so many limits. What does not divide goes to the first ones.
func (c *modelCounters) share(keyed int64) {
	rest := int64(0)
	if keyed > 0 {
		rest = c.model.MaxKeys % keyed
	}
	for _, tier := range c.spec.Tiers {
		for _, limit := range tier.Limits {
			c.room[tableOf(tier, limit)] = math.MaxInt64
			if tier.Single || c.model.MaxKeys == 0 {
				continue
			}
			c.room[tableOf(tier, limit)] = c.model.MaxKeys / keyed
			if rest > 0 {
				c.room[tableOf(tier, limit)]++
				rest--
			}
		}
	}
}

// Take implements [store.Counters].
func (c *modelCounters) Take(_ context.Context, now time.Time, claims []store.Claim) (store.Decision, error) {
	return c.decide(now, claims, true)
}

// Peek implements [store.Counters].
func (c *modelCounters) Peek(_ context.Context, now time.Time, claims []store.Claim) (store.Decision, error) {
	return c.decide(now, claims, false)
}

// modelSlot is where a claim is counted by one limit.
type modelSlot struct {
	window   *modelWindow
	left     int64
	identity string
	group    uint64
	over     bool  // it is counted by its group
	adds     bool  // charging adds a counter
	before   int64 // hits that claims in front ask of the same counter
}

func (c *modelCounters) decide(now time.Time, claims []store.Claim, charge bool) (store.Decision, error) {
	c.model.mu.Lock()
	defer c.model.mu.Unlock()
	if err := c.check(claims, (*store.Claim).Check); err != nil {
		return store.Decision{RefusedBy: -1}, err
	}
	wall := c.stack.read(now.UnixMilli())
	slots := c.slots(claims, wall)
	refusedBy, allowed := c.judge(claims, slots)
	due := make([]bool, len(claims))
	for i, claim := range claims {
		tier := c.spec.Tiers[claim.Tier]
		early := i < refusedBy && tier.Charge == store.ChargeChecked
		due[i] = charge && allowed[claim.Tier] && (refusedBy < 0 || early)
		for j := range slots[i] {
			if due[i] && claim.Hits > 0 {
				c.add(slots[i][j], claim.Hits)
			}
		}
	}
	for i, claim := range claims {
		asked := refusedBy < 0 || i <= refusedBy || claim.Tier == claims[refusedBy].Tier
		for j, slot := range slots[i] {
			state := store.State{Used: slot.used(), ResetAfter: time.Duration(slot.left) * time.Millisecond, Window: slot.window.end << 1}
			state.ByGroup = slot.over
			if slot.over {
				state.Window++
			}
			if !due[i] && !c.admits(claim, j, slot) {
				state.RetryAfter, state.Exceeded = state.ResetAfter, asked
				if max(claim.Hits, 1) > c.most(claim, j) {
					state.RetryAfter = store.Never
				}
			}
			claim.States[j] = state
		}
	}
	return store.Decision{RefusedBy: refusedBy, Now: time.UnixMilli(wall)}, nil
}

// check refuses claims that no decision can have.
func (c *modelCounters) check(claims []store.Claim, check func(*store.Claim, int) error) error {
	for i := range claims {
		tier := claims[i].Tier
		if tier < 0 || tier >= len(c.spec.Tiers) {
			return fmt.Errorf("there is no tier %d", tier)
		}
		for j := range i {
			if claims[j].Tier != tier {
				continue
			}
			if claims[i-1].Tier != tier {
				return fmt.Errorf("the claims of tier %d are apart", tier)
			}
			if identity(c.spec.Tiers[tier], claims[j]) == identity(c.spec.Tiers[tier], claims[i]) {
				return fmt.Errorf("two claims of tier %d are of one identity", tier)
			}
		}
		if check == nil {
			continue
		}
		if err := check(&claims[i], len(c.spec.Tiers[tier].Limits)); err != nil {
			return err
		}
	}
	return nil
}

// slots finds out where the claims are counted, one by one: each finds the room taken that those in front would take.
func (c *modelCounters) slots(claims []store.Claim, wall int64) [][]modelSlot {
	slots := make([][]modelSlot, len(claims))
	for i, claim := range claims {
		tier := c.spec.Tiers[claim.Tier]
		for j, limit := range tier.Limits {
			window, now := c.window(tier, limit, wall)
			slot := modelSlot{window: window, left: window.end - now, identity: identity(tier, claim), group: groupOf(tier, claim)}
			if _, ok := window.counts[slot.identity]; !ok {
				var fresh, mine int64
				for k := range i {
					if claims[k].Tier == claim.Tier && slots[k][j].adds {
						fresh++
						if slots[k][j].group == slot.group {
							mine++
						}
					}
				}
				slot.over = c.full(window, tableOf(tier, limit), slot.group, fresh, mine)
				slot.adds = !slot.over && claim.Hits > 0
			}
			for k := range i {
				if claims[k].Tier == claim.Tier && slot.over && slots[k][j].over && slots[k][j].group == slot.group {
					slot.before += claims[k].Hits
				}
			}
			slots[i] = append(slots[i], slot)
		}
	}
	return slots
}

// judge tells which claim is refused, or -1, and which tiers allow the request.
func (c *modelCounters) judge(claims []store.Claim, slots [][]modelSlot) (int, map[int]bool) {
	allowed := make(map[int]bool)
	for _, claim := range claims {
		allowed[claim.Tier] = true
	}
	refusedBy := -1
	for i, claim := range claims {
		if refusedBy >= 0 && claim.Tier != claims[refusedBy].Tier {
			return refusedBy, allowed
		}
		admitted := !claim.Refused
		for j := range slots[i] {
			admitted = admitted && c.admits(claim, j, slots[i][j])
		}
		if admitted {
			continue
		}
		allowed[claim.Tier] = false
		if refusedBy < 0 && !c.spec.Tiers[claim.Tier].DryRun {
			refusedBy = i
		}
	}
	return refusedBy, allowed
}

// most is the count of a claim's jth limit in this decision.
func (c *modelCounters) most(claim store.Claim, j int) int64 {
	count := c.spec.Tiers[claim.Tier].Limits[j].Count
	if claim.Counts != nil && claim.Counts[j] < count {
		return claim.Counts[j]
	}
	return count
}

func (c *modelCounters) admits(claim store.Claim, j int, slot modelSlot) bool {
	return slot.used()+slot.before+max(claim.Hits, 1) <= c.most(claim, j)
}

// used is what is counted there.
func (s modelSlot) used() int64 {
	if s.over {
		return s.window.groups[s.group]
	}
	return s.window.counts[s.identity]
}

// add counts hits there, or takes them back.
func (c *modelCounters) add(s modelSlot, hits int64) {
	counted := min(max(s.used()+hits, 0), math.MaxUint32)
	if s.over {
		s.window.groups[s.group] = counted
		c.stack.overflows += max(hits, 0)
		return
	}
	if _, ok := s.window.counts[s.identity]; !ok {
		s.window.shares[s.group]++
	}
	s.window.counts[s.identity] = counted
}

// Settle implements [store.Counters].
func (c *modelCounters) Settle(_ context.Context, now time.Time, claims []store.Claim) error {
	c.model.mu.Lock()
	defer c.model.mu.Unlock()
	if err := c.check(claims, (*store.Claim).CheckCorrection); err != nil {
		return err
	}
	wall := c.stack.read(now.UnixMilli())
	for _, claim := range claims {
		tier := c.spec.Tiers[claim.Tier]
		for j, limit := range tier.Limits {
			window, _ := c.window(tier, limit, wall)
			charged := claim.States[j].Window
			if claim.Hits == 0 || charged>>1 != window.end {
				continue
			}
			slot := modelSlot{window: window, identity: identity(tier, claim), group: groupOf(tier, claim), over: charged&1 == 1}
			if _, ok := window.counts[slot.identity]; !ok && !slot.over {
				if claim.Hits < 0 {
					continue
				}
				slot.over = c.full(window, tableOf(tier, limit), slot.group, 0, 0)
			}
			c.add(slot, claim.Hits)
		}
	}
	return nil
}

// Reset implements [store.Counters].
func (c *modelCounters) Reset(_ context.Context, now time.Time, claims []store.Claim) error {
	c.model.mu.Lock()
	defer c.model.mu.Unlock()
	if err := c.check(claims, nil); err != nil {
		return err
	}
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
			groups: make(map[uint64]int64),
			shares: make(map[uint64]int64),
		}
	}
	return window, now
}

// full reports whether a window has no room for another counter of a group: all are used, or a quarter of them is the
// group's. Fresh ones, of which some are the group's, are still to come.
func (c *modelCounters) full(window *modelWindow, key modelTable, group uint64, fresh, mine int64) bool {
	room := c.room[key]
	if room == math.MaxInt64 {
		return false
	}
	return int64(len(window.counts))+fresh >= room || window.shares[group]+mine >= max(1, room/4)
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

// groupOf is the group of a claim's identity, which is one of its own if the tier knows none.
func groupOf(tier store.TierSpec, claim store.Claim) uint64 {
	if tier.Single {
		return 0
	}
	if tier.Group == nil {
		h := fnv.New64a()
		h.Write(claim.Identity)
		return h.Sum64()
	}
	return tier.Group(claim.Identity)
}

func windowStart(t, length int64) int64 {
	start := t / length * length
	if start > t {
		start -= length
	}
	return start
}

var _ store.Tracker = (*modelCounters)(nil)
