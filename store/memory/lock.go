package memory

import (
	"github.com/tieredlimit/caddy-tieredlimit/store"
)

// patience is how often a decision looks again for the time. There is an end to it only for the case that a caller got
// ahead of the clock while that was set back.
const patience = 100

// hold locks the counters of all claims, and returns the time. If somebody else has begun a later window meanwhile, it is
// later than that. To settle it looks for what was charged, instead of what is to be.
func (m *counters) hold(p []probe, claims []store.Claim, now int64, settle bool) (int64, *timeline) {
	for attempt := 0; ; attempt++ {
		wall, line := m.stack.clock.read(now)
		if m.lock(p, claims, line, wall, attempt < patience, settle) {
			return wall, line
		}
		m.unlock(p)
	}
}

// lock finds the counters of all claims and locks them, in the order that all handles keep to: by the ranks of their
// tables, and within those by place, each once. If it is to be punctual, it stops at a counter whose window has yet to
// begin, and returns false.
//
// First come all locks of counters that are apart, then all looks at them, so that the processor waits for their memory
// once and not one by one. Last come the buckets that every request waits for.
func (m *counters) lock(p []probe, claims []store.Claim, line *timeline, wall int64, punctual, settle bool) bool {
	for _, k := range m.keyed {
		q, l := &p[k], &m.limits[k]
		if !q.claimed {
			continue
		}
		if q.chained {
			if !m.lockChain(p, k, wall+line.lanes[l.lane].shift, punctual) {
				return false
			}
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
		switch {
		case !q.claimed:
		case settle:
			m.findCharged(p, claims, k)
		case q.chained:
			m.findChain(p, claims, k)
		default:
			if q.cell = q.shard.find(q.hash); q.cell != nil {
				q.used, q.over, q.adds = q.cell.count, false, false
				continue
			}
			q.used, q.over = 0, l.table.full(m.groupOf(q, k, claims), q.end, l.most, 0, 0)
			q.adds = !q.over && q.hits > 0
			if q.over {
				q.stripe = l.table.groups().lock(q.group, q.end)
				q.used = *q.stripe.count(q.group)
			}
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

// lockChain locks the shards of a limit with several claims.
func (m *counters) lockChain(p []probe, k int, now int64, punctual bool) bool {
	l := &m.limits[k]
	for done := -1; ; {
		place := -1
		for i := k; i >= 0; i = after(p, i) {
			q := &p[i]
			if n := int(q.hash & l.table.mask); n > done && (place < 0 || n < place) {
				place = n
			}
		}
		if place < 0 {
			return true
		}
		done = place
		s := &l.table.shards[place]
		s.mu.Lock()
		current := s.current(now, l.length, punctual)
		lent := false
		for i := k; i >= 0; i = after(p, i) {
			q := &p[i]
			if int(q.hash&l.table.mask) == place {
				q.shard, q.lent, q.end = s, lent, s.end
				lent = true
			}
		}
		if !current {
			return false
		}
	}
}

// findChain finds the counters of a limit with several claims. A claim finds the room taken, and the hits of its group
// used, that claims in front ask for.
func (m *counters) findChain(p []probe, claims []store.Claim, k int) {
	for i := k; i >= 0; i = after(p, i) {
		q := &p[i]
		q.used, q.before, q.over, q.adds = 0, 0, false, false
		if q.cell = q.shard.find(q.hash); q.cell != nil {
			q.used = q.cell.count
		} else {
			q.over = m.crowded(p, claims, k, q)
			q.adds = !q.over && q.hits > 0
		}
	}
	m.lockStripes(p, k)
	for i := k; i >= 0; i = after(p, i) {
		q := &p[i]
		if q.over {
			q.used = *q.stripe.count(q.group)
			for j := k; j != i; j = after(p, j) {
				if r := &p[j]; r.over && place(r.group) == place(q.group) {
					q.before += int64(r.hits)
				}
			}
		}
	}
}

// crowded reports whether there is no room for a counter of a probe, given what the probes in front of it in its chain
// will add.
func (m *counters) crowded(p []probe, claims []store.Claim, k int, q *probe) bool {
	group := m.groupOf(q, k, claims)
	var fresh, mine int64
	for i := k; &p[i] != q; i = after(p, i) {
		if r := &p[i]; r.adds {
			fresh++
			if r.group == group {
				mine++
			}
		}
	}
	return m.limits[k].table.full(group, q.end, m.limits[k].most, fresh, mine)
}

// lockStripes locks the stripes of the probes of a limit that are counted by their group.
func (m *counters) lockStripes(p []probe, k int) {
	for done := -1; ; {
		next := -1
		for i := k; i >= 0; i = after(p, i) {
			q := &p[i]
			if n := int(place(q.group) % stripes); q.over && n > done && (next < 0 || n < next) {
				next = n
			}
		}
		if next < 0 {
			return
		}
		done = next
		var s *stripe
		for i := k; i >= 0; i = after(p, i) {
			q := &p[i]
			if q.over && int(place(q.group)%stripes) == next {
				q.shared = s != nil
				if s == nil {
					s = m.limits[k].table.groups().lock(q.group, q.end)
				}
				q.stripe = s
			}
		}
	}
}

// unlock lets go of all that lock holds.
func (m *counters) unlock(p []probe) {
	m.unlockBuckets(p)
	for n := len(m.keyed) - 1; n >= 0; n-- {
		for i := m.keyed[n]; i >= 0; i = after(p, i) {
			q := &p[i]
			if q.over && q.stripe != nil {
				if !q.shared {
					q.stripe.mu.Unlock()
				}
				q.stripe = nil
			}
			if q.shard != nil {
				if !q.lent {
					q.shard.mu.Unlock()
				}
				q.shard = nil
			}
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
