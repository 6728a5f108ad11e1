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
	hash  uint64
	epoch int64
	at    time.Duration // before the server was asked, so that it never lasts beyond the window
	until time.Duration // the server is asked again then
	now   int64         // milliseconds, on the server's clock
	used  int64
	left  time.Duration
	all   *[]store.State // of each limit, if there are several
}

// state is what was known of one limit.
func (r *refusal) state(limit int) store.State {
	if r.all != nil {
		return (*r.all)[limit]
	}
	return store.State{Used: r.used, Left: r.left, Exceeded: true}
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
		if old.until < other.until {
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
func (c *counters) refuse(clock time.Duration, claims []store.Claim, into []store.State) (store.Decision, bool) {
	if c.refusals == nil {
		return store.Decision{}, false
	}
	epoch := c.stack.epoch.Load()
	for i := range claims {
		tier := &c.tiers[claims[i].Tier]
		if !tier.dry {
			if r := c.refusals.find(clock, epoch, claims[i].Tier, claims[i].Identity); r != nil {
				c.stack.refusals.Add(1)
				return c.recall(r, clock, i, claims, into), true
			}
		}
		if tier.checked {
			return store.Decision{}, false
		}
	}
	return store.Decision{}, false
}

// recall fills in the states. Those of other tiers are not known: they are given as unused.
func (c *counters) recall(r *refusal, clock time.Duration, refusedBy int, claims []store.Claim,
	into []store.State,
) store.Decision {
	passed := clock - r.at
	now := time.UnixMilli(r.now).Add(passed)
	n := 0
	for i := range claims {
		limits := c.tiers[claims[i].Tier].limits
		for j := range limits {
			if i == refusedBy {
				into[n] = r.state(j)
				into[n].Left -= passed
			}
			if i != refusedBy || into[n].Left <= 0 {
				into[n] = store.State{Left: left(r.now+passed.Milliseconds(), limits[j].window)}
			}
			n++
		}
	}
	return store.Decision{RefusedBy: refusedBy, Now: now}
}

// remember remembers a refusal, if it may.
func (c *counters) remember(clock time.Duration, epoch int64, d store.Decision, claims []store.Claim, into []store.State) {
	// An answer that was on its way when a counter was reset may be of before.
	if c.stack.epoch.Load() != epoch {
		return
	}
	n := 0
	for i := range d.RefusedBy {
		tier := &c.tiers[claims[i].Tier]
		for range tier.limits {
			if tier.checked || into[n].Exceeded {
				return
			}
			n++
		}
	}
	tier := claims[d.RefusedBy].Tier
	r := &refusal{
		hash:  c.refusals.hash(tier, claims[d.RefusedBy].Identity),
		epoch: epoch, at: clock, now: d.Now.UnixMilli(),
	}
	for _, s := range into[n : n+len(c.tiers[tier].limits)] {
		if s.Exceeded && s.Left > r.left {
			r.used, r.left = s.Used, s.Left
		}
	}
	if len(c.tiers[tier].limits) > 1 {
		all := slices.Clone(into[n : n+len(c.tiers[tier].limits)])
		r.all = &all
	}
	// The server's time is cut to milliseconds, so up to one less is left.
	r.until = clock + min(r.left-time.Millisecond, askAgain)
	c.refusals.add(tier, r)
}

// Remembered implements [store.Rememberer].
func (c *counters) Remembered() int64 { return c.stack.refusals.Load() }

// Interface guard
var _ store.Rememberer = (*counters)(nil)
