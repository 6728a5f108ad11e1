package redis

import (
	"hash/maphash"
	"slices"
	"sync/atomic"
	"time"

	"github.com/tieredlimit/caddy-tieredlimit/store"
)

// refusals remembers refusals until the window ends, so that a client that was refused is refused again without
// asking the server. It holds a fixed number and forgets the one that ends first for a new one; whoever is forgotten
// is merely asked about again.
//
// A refusal may be remembered only if no tier in front of it is charged when checked, since that would have to be
// charged each time, and if no dry tier in front of it would have refused, since that is counted each time. It names
// the tier that it was about, even if one in front of it has filled up meanwhile.
type refusals struct {
	seed  maphash.Seed
	until []atomic.Int64 // by tier: when the last refusal has ended
	table atomic.Pointer[refusalTable]

	// By the same sets, when hits were last given back to one of a set. It is made when that first happens.
	settled atomic.Pointer[[len(refusalTable{})]atomic.Int64]
}

// refusalTable is made at the first refusal. A refusal is in one of the places of the set that its hash names.
type refusalTable [mostRefusals / refusalWays]refusalSet

// refusalSet holds a few refusals. Their hashes, in one line of the processor's cache, save looking at those that
// are somebody else's.
type refusalSet struct {
	hashes   [refusalWays]atomic.Uint64
	refusals [refusalWays]atomic.Pointer[refusal]
}

// refusal is one refusal, in one line of the cache for a tier with one limit. It is never changed. Times are on
// the monotonic clock of this process.
type refusal struct {
	hash   uint64
	epoch  int64
	at     time.Duration // before the server was asked, so that it never lasts beyond the window
	until  time.Duration // the server is asked again then
	now    int64         // milliseconds, on the server's clock
	used   int64
	left   time.Duration
	window int64
	all    *[]store.State // of each limit, if there are several
}

// state is what was known of one limit.
func (r *refusal) state(limit int) store.State {
	if r.all != nil {
		return (*r.all)[limit]
	}
	return store.State{Used: r.used, ResetAfter: r.left, Window: r.window}
}

const (
	mostRefusals = 1 << 16
	refusalWays  = 8

	// askAgain is how long a refusal may be remembered at most, and so how long a reset of the counter by another
	// instance may go unnoticed.
	askAgain = 5 * time.Second
)

func newRefusals(tiers int) *refusals {
	return &refusals{seed: maphash.MakeSeed(), until: make([]atomic.Int64, tiers)}
}

// hash hashes an identity for one tier.
func (m *refusals) hash(tier int, identity []byte) uint64 {
	return maphash.Bytes(m.seed, identity) + uint64(tier)*0x9e3779b97f4a7c15
}

// set is where a refusal with a hash may be.
func (t *refusalTable) set(hash uint64) *refusalSet { return &t[hash%uint64(len(t))] }

// drop forgets what is remembered under a hash.
func (s *refusalSet) drop(hash uint64) {
	for place := range s.refusals {
		if r := s.refusals[place].Load(); r != nil && r.hash == hash {
			s.refusals[place].CompareAndSwap(r, nil)
		}
	}
}

// find returns the refusal of an identity that holds at a time, or nil.
func (m *refusals) find(clock time.Duration, epoch int64, tier int, identity []byte) *refusal {
	if clock >= time.Duration(m.until[tier].Load()) {
		return nil
	}
	table := m.table.Load()
	if table == nil {
		return nil
	}
	hash := m.hash(tier, identity)
	set := table.set(hash)
	for i := range set.hashes {
		if set.hashes[i].Load() != hash {
			continue
		}
		if r := set.refusals[i].Load(); r != nil && r.hash == hash && r.epoch == epoch && clock < r.until {
			return r
		}
	}
	return nil
}

// add remembers a refusal, in its old place, in an empty one, or in that of the one that ends first.
func (m *refusals) add(tier int, r *refusal) {
	table := m.table.Load()
	if table == nil {
		m.table.CompareAndSwap(nil, new(refusalTable))
		table = m.table.Load()
	}
	set, place := table.set(r.hash), 0
	for i := range set.refusals {
		old, other := set.refusals[i].Load(), set.refusals[place].Load()
		if old == nil || old.hash == r.hash {
			place = i
			break
		}
		if other == nil || old.until < other.until {
			place = i
		}
	}
	set.refusals[place].Store(r)
	set.hashes[place].Store(r.hash)
	for until := int64(r.until); ; {
		known := m.until[tier].Load()
		if known >= until || m.until[tier].CompareAndSwap(known, until) {
			return
		}
	}
}

// refuse answers from memory, if it can.
func (c *counters) refuse(clock time.Duration, claims []store.Claim) (store.Decision, bool) {
	if c.refusals == nil {
		return store.Decision{}, false
	}
	epoch := c.stack.epoch.Load()
	for i := range claims {
		tier := &c.tiers[claims[i].Tier]
		if !tier.dry {
			if r := c.refusals.find(clock, epoch, claims[i].Tier, claims[i].Identity); r != nil {
				c.stack.refusals.Add(1)
				return c.recall(r, clock, i, claims), true
			}
		}
		if tier.checked || claims[i].Refused && !tier.dry {
			return store.Decision{}, false
		}
	}
	return store.Decision{}, false
}

// recall fills in the states. Those of other claims are not known: they are given as unused.
func (c *counters) recall(r *refusal, clock time.Duration, refusedBy int, claims []store.Claim) store.Decision {
	passed := clock - r.at
	now := r.now + passed.Milliseconds()
	for i := range claims {
		for j, l := range c.tiers[claims[i].Tier].limits {
			s := store.State{}
			if i == refusedBy {
				s = r.state(j)
				s.ResetAfter -= passed
			}
			if s.ResetAfter <= 0 {
				s = store.State{ResetAfter: left(now, l.window), Window: numberOf(now, l.window)}
			}
			s.RetryAfter = claims[i].Wait(j, l.count, s.Used, s.ResetAfter)
			s.Exceeded = i == refusedBy && s.RetryAfter != 0
			claims[i].States[j] = s
		}
	}
	return store.Decision{RefusedBy: refusedBy, Now: time.UnixMilli(r.now).Add(passed)}
}

// remember remembers a refusal, if it may: it must be one of whatever number of hits.
func (c *counters) remember(clock time.Duration, epoch int64, d store.Decision, claims []store.Claim) {
	// An answer that was on its way when a counter was reset may be of before.
	if c.stack.epoch.Load() != epoch {
		return
	}
	for i := range d.RefusedBy {
		if c.tiers[claims[i].Tier].checked || anyExceeded(claims[i].States) {
			return
		}
	}
	claim := &claims[d.RefusedBy]
	r := &refusal{
		hash:  c.refusals.hash(claim.Tier, claim.Identity),
		epoch: epoch, at: clock, now: d.Now.UnixMilli(),
	}
	limits := c.tiers[claim.Tier].limits
	for j, s := range claim.States {
		if s.Used >= limits[j].count && s.ResetAfter > r.left {
			r.used, r.left, r.window = s.Used, s.ResetAfter, s.Window
		}
	}
	if r.left == 0 {
		return
	}
	if len(limits) > 1 {
		all := slices.Clone(claim.States)
		r.all = &all
	}
	// The server's time is cut to milliseconds, so up to one less is left.
	r.until = clock + min(r.left-time.Millisecond, askAgain)
	if c.refusals.settledSince(r) {
		return
	}
	c.refusals.add(claim.Tier, r)
	if c.refusals.settledSince(r) {
		c.refusals.table.Load().set(r.hash).drop(r.hash)
	}
}

// forget forgets the refusals of claims that were given something back by now, also those that are on their way.
func (m *refusals) forget(clock time.Duration, claims []store.Claim) {
	if m.settled.Load() == nil {
		m.settled.CompareAndSwap(nil, new([len(refusalTable{})]atomic.Int64))
	}
	for i := range claims {
		hash := m.hash(claims[i].Tier, claims[i].Identity)
		m.settled.Load()[hash%uint64(len(refusalTable{}))].Store(int64(clock))
		table := m.table.Load()
		if table == nil {
			continue
		}
		table.set(hash).drop(hash)
	}
}

// settledSince reports whether hits were given back, to whoever a refusal may be about, after the server was asked.
func (m *refusals) settledSince(r *refusal) bool {
	settled := m.settled.Load()
	return settled != nil && settled[r.hash%uint64(len(settled))].Load() >= int64(r.at)
}

// Remembered implements [store.Rememberer].
func (c *counters) Remembered() int64 { return c.stack.refusals.Load() }

// Interface guard
var _ store.Rememberer = (*counters)(nil)
