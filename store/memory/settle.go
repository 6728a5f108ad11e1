package memory

import (
	"context"
	"time"

	"github.com/tieredlimit/caddy-tieredlimit/store"
)

// The window in a state is when it ends, doubled, and 1 more where the hits were counted by a group. So a correction goes
// to what was charged, also when the identity has got a counter of its own since.

// WindowEnding is the [store.State.Window] of counters of their own in the window that ends at a time, in milliseconds since
// the Unix epoch.
func WindowEnding(end int64) int64 { return end << 1 }

// Settle implements [store.Counters].
func (m *counters) Settle(_ context.Context, now time.Time, claims []store.Claim) error {
	if n := m.probes(claims); n <= manyLimits {
		var probes [manyLimits]probe
		return m.settleWith(probes[:n], now, claims)
	} else {
		return m.settleWith(make([]probe, n), now, claims)
	}
}

func (m *counters) settleWith(p []probe, now time.Time, claims []store.Claim) error {
	var w walk
	for i := range claims {
		if err := m.claim(p, claims, i); err != nil {
			return err
		}
		t, at := w.next(m, claims, i)
		if err := claims[i].CheckCorrection(t.limits()); err != nil {
			return err
		}
		for n := range claims[i].States {
			p[at+n].window = claims[i].States[n].Window
		}
	}
	for {
		m.hold(p, claims, now.UnixMilli(), true)
		done := m.settle(p)
		m.unlock(p)
		if done {
			return nil
		}
	}
}

// settle corrects what lock has found. It returns false, and has corrected nothing, if the last room for a counter went
// to somebody else meanwhile.
func (m *counters) settle(p []probe) bool {
	if !m.reserve(p) {
		return false
	}
	for _, k := range m.single {
		if q := &p[k]; q.claimed && q.window>>1 == q.end {
			q.bucket.count = corrected(q.bucket.count, int64(q.hits))
			q.bucket.held = q.bucket.held || q.hits > 0
		}
	}
	for _, k := range m.keyed {
		for i := k; i >= 0; i = after(p, i) {
			q := &p[i]
			if q.due && (q.stripe == nil || q.stripe.end == q.end) {
				m.correct(q, int64(q.hits))
			}
		}
	}
	return true
}

// findCharged finds the counters of a limit that are to be corrected. Hits may be given to an identity that has no
// counter yet, if it was asked about without being charged.
func (m *counters) findCharged(p []probe, claims []store.Claim, k int) {
	for i := k; i >= 0; i = after(p, i) {
		q := &p[i]
		q.cell, q.over, q.adds = nil, false, false
		q.due = q.hits != 0 && q.window>>1 == q.end
		if q.due {
			if q.window&1 != 0 {
				q.over = true
				m.groupOf(q, k, claims)
			} else if q.cell = q.shard.find(q.hash); q.cell == nil {
				q.due = q.hits > 0
				q.over = q.due && m.crowded(p, claims, k, q)
				q.adds = q.due && !q.over
			}
		}
	}
	m.lockStripes(p, k)
}
