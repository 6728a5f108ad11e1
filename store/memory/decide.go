package memory

import (
	"bytes"
	"context"
	"fmt"
	"hash/maphash"
	"math"
	"time"

	"github.com/tieredlimit/caddy-tieredlimit/store"
)

// probe is what one decision knows about one counter: where it is, which lock it holds, and what is asked of it.
//
// A decision has a probe for each limit of the stack, and behind those more for tiers that have several claims. All
// probes of one limit are a chain, in the order of the claims.
type probe struct {
	// What every decision looks at is one cache line.

	shard  *shard  // nil if it is not locked
	cell   *cell   // nil if the identity has no counter
	bucket *bucket // nil if it is not locked, or if each identity has a counter of its own
	end    int64   // of the window that is counted
	hash   uint64
	hits   int32
	used   uint32
	next   int32 // the next probe of the chain, or 0
	claim  int32

	claimed bool
	allowed bool // by the tier; kept in the probe of its first limit
	due     bool // to be charged
	adds    bool // charging adds a counter
	paid    bool // room for it was reserved
	over    bool // it is counted by its group
	lent    bool // the lock of the shard is that of a probe in front
	chained bool // the limit has several claims

	stripe  *stripe // not nil if it has none, and there is no room for one
	group   uint64
	before  int64 // hits that claims in front ask of the same counter; 0 unless chained
	window  int64 // that is to be corrected, as in the state
	shared  bool  // the lock of the stripe is that of a probe in front
	grouped bool  // the group is known
}

// after is the next probe of a chain, or -1.
func after(p []probe, i int) int {
	if next := p[i].next; next != 0 {
		return int(next)
	}
	return -1
}

// fewLimits and manyLimits are how many limits a stack may have to be decided without allocating.
const (
	fewLimits  = 4
	manyLimits = 16
)

// probes is how many probes a decision about claims has.
func (m *counters) probes(claims []store.Claim) int {
	n := len(m.limits)
	for i := 1; i < len(claims); i++ {
		if tier := claims[i].Tier; tier == claims[i-1].Tier && uint(tier) < uint(len(m.tiers)) {
			n += m.tiers[tier].limits()
		}
	}
	return n
}

// walk goes through the claims and their probes.
type walk struct{ extra int }

// next returns the tier of the ith claim, and where its probes begin.
func (w *walk) next(m *counters, claims []store.Claim, i int) (*counterTier, int) {
	t := &m.tiers[claims[i].Tier]
	if i == 0 || claims[i-1].Tier != claims[i].Tier {
		return t, t.first
	}
	at := len(m.limits) + w.extra
	w.extra += t.limits()
	return t, at
}

// decide is Take, or without charge Peek.
func (m *counters) decide(now time.Time, claims []store.Claim, charge bool) (store.Decision, error) {
	if n := m.probes(claims); n <= fewLimits {
		var probes [fewLimits]probe
		return m.decideWith(probes[:n], now, claims, charge)
	} else if n <= manyLimits {
		var probes [manyLimits]probe
		return m.decideWith(probes[:n], now, claims, charge)
	} else {
		return m.decideWith(make([]probe, n), now, claims, charge)
	}
}

func (m *counters) decideWith(p []probe, now time.Time, claims []store.Claim, charge bool) (store.Decision, error) {
	for i := range claims {
		if err := m.claim(p, claims, i); err != nil {
			return store.Decision{RefusedBy: -1}, err
		}
		c, limits := &claims[i], m.tiers[claims[i].Tier].limits()
		if uint64(c.Hits) <= store.MostHits && c.Counts == nil && len(c.States) == limits {
			continue
		}
		if err := c.Check(limits); err != nil {
			return store.Decision{RefusedBy: -1}, err
		}
	}
	for {
		wall, line := m.hold(p, claims, now.UnixMilli(), false)
		refusedBy := m.judge(p, claims)
		done := !charge || m.charge(p, claims, refusedBy)
		m.unlock(p)
		if done {
			m.report(p, claims, refusedBy, line, wall)
			return store.Decision{RefusedBy: refusedBy, Now: time.UnixMilli(wall)}, nil
		}
	}
}

// Reset implements [store.Counters].
func (m *counters) Reset(_ context.Context, now time.Time, claims []store.Claim) error {
	p := make([]probe, m.probes(claims))
	for i := range claims {
		if err := m.claim(p, claims, i); err != nil {
			return err
		}
	}
	m.hold(p, claims, now.UnixMilli(), false)
	for i := range p {
		if p[i].cell != nil {
			p[i].cell.count = 0
		}
		if p[i].bucket != nil {
			p[i].bucket.count = 0
		}
	}
	m.unlock(p)
	return nil
}

// claim notes what the ith claim asks for, and of whom.
func (m *counters) claim(p []probe, claims []store.Claim, i int) error {
	c := &claims[i]
	if uint(c.Tier) >= uint(len(m.tiers)) {
		return fmt.Errorf("claim of tier %d in a stack of %d", c.Tier, len(m.tiers))
	}
	t := &m.tiers[c.Tier]
	if p[t.first].claimed {
		return m.claimAgain(p, claims, i)
	}
	var hash uint64
	if !t.single {
		hash = maphash.Bytes(seed, c.Identity)
	}
	for k := t.first; k < t.last; k++ {
		q := &p[k]
		q.hash, q.hits, q.claim, q.claimed = hash, int32(c.Hits), int32(i), true
	}
	return nil
}

// claimAgain is claim for a tier that has been claimed.
func (m *counters) claimAgain(p []probe, claims []store.Claim, i int) error {
	c, t := &claims[i], &m.tiers[claims[i].Tier]
	if claims[i-1].Tier != c.Tier {
		return fmt.Errorf("tier %d is claimed twice, with another one between", c.Tier)
	}
	for j := i - 1; j >= 0 && claims[j].Tier == c.Tier; j-- {
		if t.single || bytes.Equal(claims[j].Identity, c.Identity) {
			return fmt.Errorf("tier %d is claimed twice for one identity", c.Tier)
		}
	}
	at := len(m.limits)
	for p[at].claimed {
		at++
	}
	hash := maphash.Bytes(seed, c.Identity)
	for k := t.first; k < t.last; k++ {
		p[at] = probe{hash: hash, hits: int32(c.Hits), claim: int32(i), claimed: true, chained: true}
		p[k].chained = true
		last := k
		for p[last].next != 0 {
			last = int(p[last].next)
		}
		p[last].next = int32(at)
		at++
	}
	return nil
}

// judge asks the tiers one by one, and returns the claim that is refused, or -1.
func (m *counters) judge(p []probe, claims []store.Claim) int {
	refusedBy := -1
	var w walk
	for i := range claims {
		first := i == 0 || claims[i].Tier != claims[i-1].Tier
		if first && refusedBy >= 0 {
			break
		}
		t, at := w.next(m, claims, i)
		head := &p[t.first]
		if first {
			head.allowed = true
		}
		if m.admits(p[at:], t, &claims[i]) {
			continue
		}
		if head.allowed && !t.dry {
			refusedBy = i
		}
		head.allowed = false
	}
	return refusedBy
}

// admits reports whether all limits of a tier admit a claim, whose probes come first.
func (m *counters) admits(p []probe, t *counterTier, c *store.Claim) bool {
	admits, needs := !c.Refused, c.Needs()
	limits := m.limits[t.first:t.last]
	for n := range limits {
		count := limits[n].count
		if c.Counts != nil {
			count = c.Count(n, count)
		}
		used := int64(p[n].used)
		if p[n].chained {
			used += p[n].before
		}
		admits = admits && used+needs <= count
	}
	return admits
}

// charge counts the hits wherever they are to be counted, and lets go of the buckets as soon as it can. It returns false,
// and has counted nothing, if the last room for a counter went to somebody else meanwhile.
func (m *counters) charge(p []probe, claims []store.Claim, refusedBy int) bool {
	var w walk
	adds := false
	for i := range claims {
		t, at := w.next(m, claims, i)
		due := p[t.first].allowed && (refusedBy < 0 || i < refusedBy && t.charge == store.ChargeChecked)
		for k := range t.limits() {
			q := &p[at+k]
			q.due = due
			adds = adds || due && q.adds
		}
	}
	if adds && !m.reserve(p) {
		return false
	}
	for _, k := range m.single {
		if q := &p[k]; q.due && q.hits > 0 {
			q.used += uint32(q.hits)
			q.bucket.count, q.bucket.held = q.used, true
		}
	}
	m.unlockBuckets(p)
	for _, k := range m.keyed {
		q := &p[k]
		if q.chained {
			m.chargeChain(p, k)
			continue
		}
		if !q.due || q.hits == 0 {
			continue
		}
		q.used += uint32(q.hits)
		if q.over {
			*q.stripe.count(q.group) = q.used
			m.stack.overflowed.Add(int64(q.hits))
			continue
		}
		if q.cell == nil {
			q.cell = q.shard.insert(q.hash)
		}
		q.cell.count = q.used
	}
	return true
}

// chargeChain is charge for a limit with several claims. A counter that is added may move others of its shard, and
// groups may share one.
func (m *counters) chargeChain(p []probe, k int) {
	for i := k; i >= 0; i = after(p, i) {
		q := &p[i]
		if q.due && q.hits > 0 {
			m.correct(q, int64(q.hits))
		}
	}
	for i := k; i >= 0; i = after(p, i) {
		q := &p[i]
		if q.stripe != nil {
			q.used = *q.stripe.count(q.group)
		}
	}
}

// correct adds hits to the counter of a probe, or takes them back.
func (m *counters) correct(q *probe, hits int64) {
	if q.stripe != nil {
		count := q.stripe.count(q.group)
		*count = corrected(*count, hits)
		m.stack.overflowed.Add(max(hits, 0))
		return
	}
	if q.cell = q.shard.find(q.hash); q.cell == nil {
		q.cell = q.shard.insert(q.hash)
	}
	q.cell.count = corrected(q.cell.count, hits)
	q.used = q.cell.count
}

// corrected is a count with hits added or, if they are negative, taken back.
func corrected(count uint32, hits int64) uint32 {
	return uint32(min(max(int64(count)+hits, 0), store.MostUsed))
}

// reserve makes room for the counters that a charge will add, or for none.
func (m *counters) reserve(p []probe) bool {
	for _, k := range m.keyed {
		for i := k; i >= 0; i = after(p, i) {
			q := &p[i]
			if !q.adds || !q.due {
				continue
			}
			if q.paid = m.limits[k].table.reserve(q.group, q.end, m.limits[k].most); !q.paid {
				m.cancel(p)
				return false
			}
		}
	}
	return true
}

// cancel gives back the room that was reserved.
func (m *counters) cancel(p []probe) {
	for _, k := range m.keyed {
		for i := k; i >= 0; i = after(p, i) {
			q := &p[i]
			if q.paid {
				m.limits[k].table.cancel(q.group, q.end)
				q.paid = false
			}
		}
	}
}

// report says what the counters hold after the decision.
func (m *counters) report(p []probe, claims []store.Claim, refusedBy int, line *timeline, wall int64) {
	var w walk
	for i := range claims {
		c := &claims[i]
		t, at := w.next(m, claims, i)
		for n := range c.States {
			q, l, s := &p[at+n], &m.limits[t.first+n], &c.States[n]
			left := min(q.end-wall-line.lanes[l.lane].shift, l.length)
			*s = store.State{Used: int64(q.used), ResetAfter: time.Duration(left) * time.Millisecond, Window: WindowEnding(q.end)}
			if q.over {
				s.Window, s.ByGroup = s.Window|1, true
			}
			if !q.due {
				asked := refusedBy < 0 || i <= refusedBy || c.Tier == claims[refusedBy].Tier
				s.RetryAfter = c.Wait(n, l.count, s.Used+q.before, s.ResetAfter)
				s.Exceeded = asked && s.RetryAfter != 0
			}
		}
	}
}

// groupOf is the group of an identity. Identities that are not related are a group each.
func (m *counters) groupOf(q *probe, k int, claims []store.Claim) uint64 {
	if !q.grouped {
		q.grouped = true
		if ask := m.limits[k].group; ask != nil {
			q.group = ask(claims[q.claim].Identity)
		} else {
			q.group = q.hash | math.MaxUint16 + 1
		}
	}
	return q.group
}
