package memory

import (
	"context"
	"fmt"
	"hash/maphash"
	"time"

	"github.com/tieredlimit/caddy-tieredlimit/store"
)

// probe is what one decision knows about one limit: the counter that it goes by, and the lock that it holds.
type probe struct {
	shard   *shard  // nil if it is not locked
	cell    *cell   // nil if the identity has no counter
	stripe  *stripe // not nil if it has none, and there is no room for one
	bucket  *bucket // nil if it is not locked, or if each identity has a counter of its own
	end     int64   // of the window that is counted
	hash    uint64
	group   uint32
	used    uint32
	claimed bool
	allowed bool // by the tier; kept in the probe of its first limit
	due     bool // to be charged
	paid    bool // room for a counter was reserved
}

// fewLimits and manyLimits are how many limits a stack may have to be decided without allocating.
const (
	fewLimits  = 4
	manyLimits = 16
)

// decide is Take, or without charge Peek.
func (m *counters) decide(now time.Time, claims []store.Claim, into []store.State, charge bool) (store.Decision, error) {
	if n := len(m.limits); n <= fewLimits {
		var probes [fewLimits]probe
		return m.decideWith(probes[:n], now, claims, into, charge)
	} else if n <= manyLimits {
		var probes [manyLimits]probe
		return m.decideWith(probes[:n], now, claims, into, charge)
	}
	return m.decideWith(make([]probe, len(m.limits)), now, claims, into, charge)
}

func (m *counters) decideWith(p []probe, now time.Time, claims []store.Claim, into []store.State, charge bool) (store.Decision,
	error,
) {
	if n, err := m.claim(p, claims); err != nil {
		return store.Decision{RefusedBy: -1}, err
	} else if len(into) < n {
		return store.Decision{RefusedBy: -1}, fmt.Errorf("%d limits are claimed, with room for the states of %d", n, len(into))
	}
	for {
		wall, line := m.hold(p, now.UnixMilli())
		refusedBy := m.judge(p, claims)
		done := !charge || m.charge(p, claims, refusedBy)
		m.unlock(p)
		if done {
			m.report(p, claims, into, refusedBy, line, wall)
			return store.Decision{RefusedBy: refusedBy, Now: time.UnixMilli(wall)}, nil
		}
	}
}

// Reset implements [store.Counters].
func (m *counters) Reset(_ context.Context, now time.Time, claims []store.Claim) error {
	p := make([]probe, len(m.limits))
	if _, err := m.claim(p, claims); err != nil {
		return err
	}
	m.hold(p, now.UnixMilli())
	m.zero(p)
	m.unlock(p)
	return nil
}

// zero empties the counters that lock has found.
func (*counters) zero(p []probe) {
	for i := range p {
		if p[i].cell != nil {
			p[i].cell.count = 0
		}
		if p[i].bucket != nil {
			p[i].bucket.count = 0
		}
	}
}

// claim notes what is asked for, and of whom. It returns the number of limits.
func (m *counters) claim(p []probe, claims []store.Claim) (int, error) {
	limits := 0
	for i := range claims {
		c := &claims[i]
		if uint(c.Tier) >= uint(len(m.tiers)) {
			return 0, fmt.Errorf("claim of tier %d in a stack of %d", c.Tier, len(m.tiers))
		}
		if c.Group >= store.Groups {
			return 0, fmt.Errorf("claim in group %d of %d", c.Group, store.Groups)
		}
		t := &m.tiers[c.Tier]
		if p[t.first].claimed {
			return 0, fmt.Errorf("tier %d is claimed twice", c.Tier)
		}
		var hash uint64
		if !t.single {
			hash = maphash.Bytes(seed, c.Identity)
		}
		for k := t.first; k < t.last; k++ {
			p[k].hash, p[k].group, p[k].claimed = hash, c.Group, true
		}
		limits += t.last - t.first
	}
	return limits, nil
}

// patience is how often a decision looks again for the time. There is an end to it only for the case that a caller got
// ahead of the clock while that was set back.
const patience = 100

// hold locks the counters of all claimed limits, and returns the time. If somebody else has begun a later window
// meanwhile, it is later than that.
func (m *counters) hold(p []probe, now int64) (int64, *timeline) {
	for attempt := 0; ; attempt++ {
		wall, line := m.stack.clock.read(now)
		if m.lock(p, line, wall, attempt < patience) {
			return wall, line
		}
		m.unlock(p)
	}
}

// lock finds the counters of all claimed limits and locks them, in the order that all handles keep to. If it is to be
// punctual, it stops at a counter whose window has yet to begin, and returns false.
//
// First come all locks of counters that are apart, then all looks at them, so that the processor waits for their memory
// once and not one by one. Last come the buckets that every request waits for.
func (m *counters) lock(p []probe, line *timeline, wall int64, punctual bool) bool {
	for _, k := range m.keyed {
		q, l := &p[k], &m.limits[k]
		if !q.claimed {
			continue
		}
		q.shard = &l.table.shards[q.hash&l.table.mask]
		q.shard.mu.Lock()
		if !q.shard.current(wall+line.lanes[l.lane].shift, l.length, punctual) {
			return false
		}
		q.end = q.shard.end
	}
	for _, k := range m.keyed {
		q, l := &p[k], &m.limits[k]
		if !q.claimed {
			continue
		}
		if q.cell = q.shard.find(q.hash); q.cell != nil {
			q.used = q.cell.count
		} else if q.used = 0; l.table.full(q.group, q.end, l.most) {
			q.stripe = l.table.groups().lock(q.group, q.end)
			q.used = *q.stripe.count(q.group)
		}
	}
	for _, k := range m.single {
		q, l := &p[k], &m.limits[k]
		if !q.claimed {
			continue
		}
		q.bucket = &l.table.bucket
		q.bucket.mu.Lock()
		if !q.bucket.current(wall+line.lanes[l.lane].shift, l.length, punctual) {
			return false
		}
		q.end, q.used = q.bucket.end, q.bucket.count
	}
	return true
}

// unlock lets go of all that lock holds.
func (m *counters) unlock(p []probe) {
	m.unlockBuckets(p)
	for i := len(m.keyed) - 1; i >= 0; i-- {
		q := &p[m.keyed[i]]
		if q.stripe != nil {
			q.stripe.mu.Unlock()
			q.stripe = nil
		}
		if q.shard != nil {
			q.shard.mu.Unlock()
			q.shard = nil
		}
	}
}

// unlockBuckets lets go of what every request waits for.
func (m *counters) unlockBuckets(p []probe) {
	for i := len(m.single) - 1; i >= 0; i-- {
		if q := &p[m.single[i]]; q.bucket != nil {
			q.bucket.mu.Unlock()
			q.bucket = nil
		}
	}
}

// judge asks the tiers one by one, and returns the claim that is refused, or -1.
func (m *counters) judge(p []probe, claims []store.Claim) int {
	for i := range claims {
		t := &m.tiers[claims[i].Tier]
		allowed := true
		for k := t.first; k < t.last; k++ {
			allowed = allowed && int64(p[k].used) < m.limits[k].count
		}
		p[t.first].allowed = allowed
		if !allowed && !t.dry {
			return i
		}
	}
	return -1
}

// charges tells whether the tier of a claim is charged, given the claim that is refused.
func (m *counters) charges(p []probe, claims []store.Claim, i, refusedBy int) bool {
	t := &m.tiers[claims[i].Tier]
	return p[t.first].allowed && (refusedBy < 0 || i < refusedBy && t.charge == store.ChargeChecked)
}

// charge counts the hit wherever it is to be counted, and lets go of the buckets as soon as it can. It returns false,
// and has counted nothing, if the last room for a counter went to somebody else meanwhile.
func (m *counters) charge(p []probe, claims []store.Claim, refusedBy int) bool {
	for i := range claims {
		t := &m.tiers[claims[i].Tier]
		due := m.charges(p, claims, i, refusedBy)
		for k := t.first; k < t.last; k++ {
			p[k].due = due
		}
	}
	if !m.reserve(p) {
		return false
	}
	for _, k := range m.single {
		if q := &p[k]; q.due {
			q.used++
			q.bucket.count, q.bucket.held = q.used, true
		}
	}
	m.unlockBuckets(p)
	for _, k := range m.keyed {
		q := &p[k]
		if !q.due {
			continue
		}
		q.used++
		if q.stripe != nil {
			*q.stripe.count(q.group) = q.used
			m.stack.overflowed.Add(1)
			continue
		}
		if q.cell == nil {
			q.cell = q.shard.insert(q.hash)
		}
		q.cell.count = q.used
	}
	return true
}

// reserve makes room for the counters that a charge will add, or for none.
func (m *counters) reserve(p []probe) bool {
	for _, k := range m.keyed {
		q := &p[k]
		if !q.due || q.cell != nil || q.stripe != nil {
			continue
		}
		if q.paid = m.limits[k].table.reserve(q.group, q.end, m.limits[k].most); !q.paid {
			m.cancel(p)
			return false
		}
	}
	return true
}

// cancel gives back the room that was reserved.
func (m *counters) cancel(p []probe) {
	for k := range p {
		if p[k].paid {
			m.limits[k].table.cancel(p[k].group, p[k].end)
			p[k].paid = false
		}
	}
}

// report says what the counters hold after the decision.
func (m *counters) report(p []probe, claims []store.Claim, into []store.State, refusedBy int, line *timeline, wall int64) {
	n := 0
	for i := range claims {
		t := &m.tiers[claims[i].Tier]
		asked := (refusedBy < 0 || i <= refusedBy) && !p[t.first].allowed
		for k := t.first; k < t.last; k++ {
			l := &m.limits[k]
			left := p[k].end - wall - line.lanes[l.lane].shift
			into[n] = store.State{
				Used:     int64(p[k].used),
				Left:     time.Duration(min(left, l.length)) * time.Millisecond,
				Exceeded: asked && int64(p[k].used) >= l.count,
			}
			n++
		}
	}
}
