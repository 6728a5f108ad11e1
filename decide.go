package tieredlimit

import (
	"context"
	"fmt"
	"hash/maphash"
	"time"
)

// probe is what one decision knows about one limit: the counter that it goes by, and the lock that it holds.
type probe struct {
	shard   *shard
	cell    *cell   // nil if the identity has no counter
	stripe  *stripe // not nil if it has none, and there is no room for one
	hash    uint64
	group   uint32
	used    uint32
	claimed bool
	allowed bool // by the tier; kept in the probe of its first limit
	paid    bool // room for a counter was reserved
}

// fewLimits and manyLimits are how many limits a stack may have to be decided without allocating.
const (
	fewLimits  = 4
	manyLimits = 16
)

// decide is Take, or without charge Peek.
func (m *memoryCounters) decide(now time.Time, claims []Claim, into []State, charge bool) (Decision, error) {
	if n := len(m.limits); n <= fewLimits {
		var probes [fewLimits]probe
		return m.decideWith(probes[:n], now, claims, into, charge)
	} else if n <= manyLimits {
		var probes [manyLimits]probe
		return m.decideWith(probes[:n], now, claims, into, charge)
	}
	return m.decideWith(make([]probe, len(m.limits)), now, claims, into, charge)
}

func (m *memoryCounters) decideWith(p []probe, now time.Time, claims []Claim, into []State, charge bool) (Decision,
	error,
) {
	if n, err := m.claim(p, claims); err != nil {
		return Decision{RefusedBy: -1}, err
	} else if len(into) < n {
		return Decision{RefusedBy: -1}, fmt.Errorf("%d limits are claimed, with room for the states of %d", n, len(into))
	}
	wall, line := m.stack.clock.read(now.UnixMilli())
	refusedBy := -1
	for {
		m.lock(p, line, wall)
		refusedBy = m.judge(p, claims)
		if !charge || m.charge(p, claims, refusedBy) {
			break
		}
		m.unlock(p)
	}
	m.report(p, claims, into, refusedBy, line, wall)
	m.unlock(p)
	return Decision{RefusedBy: refusedBy, Now: time.UnixMilli(wall)}, nil
}

// Reset implements [Counters].
func (m *memoryCounters) Reset(_ context.Context, now time.Time, claims []Claim) error {
	p := make([]probe, len(m.limits))
	if _, err := m.claim(p, claims); err != nil {
		return err
	}
	wall, line := m.stack.clock.read(now.UnixMilli())
	m.lock(p, line, wall)
	for i := range p {
		if p[i].cell != nil {
			p[i].cell.count = 0
		}
	}
	m.unlock(p)
	return nil
}

// claim notes what is asked for, and of whom. It returns the number of limits.
func (m *memoryCounters) claim(p []probe, claims []Claim) (int, error) {
	limits := 0
	for i := range claims {
		c := &claims[i]
		if uint(c.Tier) >= uint(len(m.tiers)) {
			return 0, fmt.Errorf("claim of tier %d in a stack of %d", c.Tier, len(m.tiers))
		}
		if c.Group >= Groups {
			return 0, fmt.Errorf("claim in group %d of %d", c.Group, Groups)
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

// lock finds the counters of all claimed limits and holds them, in the order that all handles keep to.
func (m *memoryCounters) lock(p []probe, line *timeline, wall int64) {
	for _, k := range m.order {
		q := &p[k]
		if !q.claimed {
			continue
		}
		l := &m.limits[k]
		s := &l.table.shards[q.hash&l.table.mask]
		s.mu.Lock()
		if now := wall + line.lanes[l.lane].shift; now >= s.end {
			s.turn(now, l.table.length)
		}
		q.shard = s
		if q.cell = s.find(q.hash); q.cell != nil {
			q.used = q.cell.count
		} else if q.used = 0; l.table.full(s.end, l.most) {
			q.stripe = l.table.groups().lock(q.group, s.end)
			q.used = *q.stripe.count(q.group)
		}
	}
}

// unlock lets go of all that lock holds.
func (m *memoryCounters) unlock(p []probe) {
	for k := range p {
		if p[k].stripe != nil {
			p[k].stripe.mu.Unlock()
			p[k].stripe = nil
		}
		if p[k].shard != nil {
			p[k].shard.mu.Unlock()
			p[k].shard = nil
		}
	}
}

// judge asks the tiers one by one, and returns the claim that is refused, or -1.
func (m *memoryCounters) judge(p []probe, claims []Claim) int {
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
func (m *memoryCounters) charges(p []probe, claims []Claim, i, refusedBy int) bool {
	t := &m.tiers[claims[i].Tier]
	return p[t.first].allowed && (refusedBy < 0 || i < refusedBy && t.charge == ChargeChecked)
}

// charge counts the hit wherever it is to be counted. It returns false, and has counted nothing, if the last room for
// a counter went to somebody else meanwhile.
func (m *memoryCounters) charge(p []probe, claims []Claim, refusedBy int) bool {
	if !m.reserve(p, claims, refusedBy) {
		return false
	}
	for i := range claims {
		if !m.charges(p, claims, i, refusedBy) {
			continue
		}
		t := &m.tiers[claims[i].Tier]
		for k := t.first; k < t.last; k++ {
			q := &p[k]
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
	}
	return true
}

// reserve makes room for the counters that a charge will add, or for none.
func (m *memoryCounters) reserve(p []probe, claims []Claim, refusedBy int) bool {
	for i := range claims {
		t := &m.tiers[claims[i].Tier]
		for k := t.first; k < t.last; k++ {
			q := &p[k]
			if q.cell != nil || q.stripe != nil || !m.charges(p, claims, i, refusedBy) {
				continue
			}
			if q.paid = m.limits[k].table.reserve(q.shard.end, m.limits[k].most); !q.paid {
				m.cancel(p)
				return false
			}
		}
	}
	return true
}

// cancel gives back the room that was reserved.
func (m *memoryCounters) cancel(p []probe) {
	for k := range p {
		if p[k].paid {
			m.limits[k].table.cancel(p[k].shard.end)
			p[k].paid = false
		}
	}
}

// report says what the counters hold after the decision.
func (m *memoryCounters) report(p []probe, claims []Claim, into []State, refusedBy int, line *timeline, wall int64) {
	n := 0
	for i := range claims {
		t := &m.tiers[claims[i].Tier]
		asked := (refusedBy < 0 || i <= refusedBy) && !p[t.first].allowed
		for k := t.first; k < t.last; k++ {
			l := &m.limits[k]
			left := p[k].shard.end - wall - line.lanes[l.lane].shift
			into[n] = State{
				Used:     int64(p[k].used),
				Left:     time.Duration(min(left, l.table.length)) * time.Millisecond,
				Exceeded: asked && int64(p[k].used) >= l.count,
			}
			n++
		}
	}
}
