package storetest

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tieredlimit/caddy-tieredlimit/store"
)

// rule is one thing that a store must do.
type rule struct {
	name  string
	moves bool // moves the clock
	back  bool // sets it back
	check func(t *testing.T, r *rig)
}

var rules = []rule{
	{name: "a refused client costs the others nothing", check: refusedCostsNothing},
	{name: "two limits in one tier", moves: true, check: twoLimits},
	{name: "charged when served", check: chargedWhenServed},
	{name: "charged when checked", check: chargedWhenChecked},
	{name: "the first tier that refuses is named", check: firstIsNamed},
	{name: "a tier behind a refusal and in front of it is not charged", check: othersAreNotCharged},
	{name: "refusals at the last tier charge nobody", check: lastTierRefuses},
	{name: "exact under concurrency", check: exactConcurrently},
	{name: "one window ends where the next begins", moves: true, check: windowEdge},
	{name: "a full window and the next one", moves: true, check: twoWindows},
	{name: "the time left", moves: true, check: timeLeft},
	{name: "tiers share no counter", check: tiersShareNothing},
	{name: "a dry tier never refuses", check: dryTier},
	{name: "a dry tier is charged by its own mode", check: dryTierCharge},
	{name: "the clock set back an hour", moves: true, back: true, check: setBack},
	{name: "the clock a little behind", moves: true, back: true, check: littleBehind},
	{name: "a time read before the clock was set back", moves: true, back: true, check: readBefore},
	{name: "a time read long ago", moves: true, back: true, check: readLongAgo},
	{name: "the clock far ahead", moves: true, check: farAhead},
	{name: "identities that look alike", check: alike},
	{name: "peeking charges nothing", check: peeking},
	{name: "a reset forgets one counter", check: resetting},
	{name: "a limit raised and lowered", check: otherCounts},
	{name: "reopened within the life of another handle", check: reopened},
	{name: "two handles at once", check: twoHandles},
	{name: "a changed window starts anew", check: otherWindow},
	{name: "stacks share no counter", check: stacksShareNothing},
	{name: "a claim of nothing", check: nothing},
	{name: "the greatest count", check: greatestCount},
	{name: "a window of a millisecond", moves: true, check: shortWindow},
}

func refusedCostsNothing(t *testing.T, r *rig) {
	h := r.stack(r.tier("ip", 2), single(r.tier("global", 10)))
	refusals := map[string]int{}
	for range 20 {
		refusals[h.take("a", "").refusedBy]++
	}
	assert.Equal(t, map[string]int{"": 2, "ip": 18}, refusals)
	b := h.take("b", "")
	assert.Empty(t, b.refusedBy)
	assert.Equal(t, []int64{1, 3}, b.used())
}

func twoLimits(t *testing.T, r *rig) {
	h := r.stack(store.TierSpec{Name: "ip", Limits: []store.Limit{
		{Count: 1, Window: time.Second}, {Count: 10, Window: time.Minute},
	}})
	served := 0
	for range 12 {
		served += h.served(5, "a")
		r.now = r.now.Add(time.Second)
	}
	assert.Equal(t, 10, served)
}

func chargedWhenServed(t *testing.T, r *rig) {
	h := r.stack(r.tier("ip", 5), r.tier("user", 3), single(r.tier("global", 12)))
	assert.Equal(t, 3, h.served(3, "a", "u", ""))
	assert.Equal(t, "user", h.take("a", "u", "").refusedBy)
	v := h.take("a", "v", "")
	assert.Empty(t, v.refusedBy)
	assert.Equal(t, []int64{4, 1, 4}, v.used())
}

func chargedWhenChecked(t *testing.T, r *rig) {
	ip := r.tier("ip", 4)
	ip.Charge = store.ChargeChecked
	h := r.stack(ip, r.tier("user", 2))
	assert.Equal(t, 2, h.served(2, "a", "u"))
	refused := h.take("a", "u")
	assert.Equal(t, "user", refused.refusedBy)
	assert.Equal(t, []int64{3, 2}, refused.used())
	assert.Equal(t, []bool{false, true}, exceeded(refused))
	assert.Equal(t, "user", h.take("a", "u").refusedBy)
	assert.Equal(t, "ip", h.take("a", "v").refusedBy)
	assert.Equal(t, []int64{4, 0}, h.peek("a", "v").used())
}

func firstIsNamed(t *testing.T, r *rig) {
	h := r.stack(r.tier("ip", 1), r.tier("user", 1))
	require.Equal(t, 1, h.served(1, "a", "u"))
	for range 100 {
		a := h.take("a", "u")
		require.Equal(t, "ip", a.refusedBy)
		require.Equal(t, []int64{1, 1}, a.used())
		require.Equal(t, []bool{true, false}, exceeded(a), "a tier behind the refusal is not asked")
	}
}

func othersAreNotCharged(t *testing.T, r *rig) {
	h := r.stack(r.tier("ip", 5), single(r.tier("global", 3)), r.tier("user", 5))
	for _, client := range []string{"a", "b", "c"} {
		require.Empty(t, h.take(client, "", client).refusedBy)
	}
	d := h.take("d", "", "d")
	assert.Equal(t, "global", d.refusedBy)
	assert.Equal(t, []int64{0, 3, 0}, d.used())
}

func lastTierRefuses(t *testing.T, r *rig) {
	h := r.stack(r.tier("ip", 100), r.tier("user", 3), single(r.tier("global", 100)))
	assert.Equal(t, 3, h.served(10, "a", "u", ""))
	assert.Equal(t, []int64{3, 3, 3}, h.peek("a", "u", "").used())
}

func exactConcurrently(t *testing.T, r *rig) {
	h := r.stack(r.tier("ip", 1000), single(r.tier("global", 100, 1000)))
	if h.set != nil {
		h.set(r.now)
	}
	var served atomic.Int64
	var group sync.WaitGroup
	for i := range 1000 {
		group.Go(func() {
			decision, err := h.counters.Take(t.Context(), r.now, h.claims(fmt.Sprint("client-", i%7), ""))
			if assert.NoError(t, err) && decision.RefusedBy < 0 {
				served.Add(1)
			}
		})
	}
	group.Wait()
	assert.Equal(t, int64(100), served.Load())
	sum := int64(0)
	for i := range 7 {
		sum += h.peek(fmt.Sprint("client-", i), "").used()[0]
	}
	assert.Equal(t, int64(100), sum, "refused requests were charged")
	assert.Equal(t, []int64{100, 100}, h.peek("", "").used())
}

func windowEdge(t *testing.T, r *rig) {
	for _, ms := range []time.Duration{1, 250, 1000, 60_000, 86_400_000} {
		window := ms * time.Millisecond
		h := r.stack(store.TierSpec{Name: "ip", Limits: []store.Limit{{Count: 1, Window: window}}})
		r.now = r.now.Truncate(window).Add(2*window - time.Millisecond)
		last := h.take("a")
		assert.Empty(t, last.refusedBy)
		assert.Equal(t, time.Millisecond, last.states[0].ResetAfter)
		assert.Equal(t, 0, h.served(3, "a"))
		r.now = r.now.Add(time.Millisecond)
		first := h.take("a")
		assert.Empty(t, first.refusedBy)
		assert.Equal(t, window, first.states[0].ResetAfter)
		assert.Equal(t, 0, h.served(3, "a"))
		r.now = r.now.Add(window)
	}
}

func twoWindows(t *testing.T, r *rig) {
	h := r.stack(r.tier("ip", 5))
	r.now = start.Add(59_999 * time.Millisecond)
	assert.Equal(t, 5, h.served(5, "a"))
	r.now = start.Add(time.Minute)
	assert.Equal(t, 5, h.served(5, "a"))
	assert.Equal(t, "ip", h.take("a").refusedBy)
}

func timeLeft(t *testing.T, r *rig) {
	h := r.stack(r.tier("ip", 1))
	require.Empty(t, h.take("a").refusedBy)
	for _, row := range []struct{ at, left time.Duration }{
		{0, 60 * time.Second},
		{31 * time.Second, 29 * time.Second},
		{43200 * time.Millisecond, 16800 * time.Millisecond},
		{59950 * time.Millisecond, 50 * time.Millisecond},
	} {
		r.now = start.Add(row.at)
		a := h.take("a")
		assert.Equal(t, "ip", a.refusedBy)
		assert.Equal(t, row.left, a.states[0].ResetAfter)
		assert.True(t, r.now.Equal(a.now), "got %s, want %s", a.now, r.now)
	}
}

func tiersShareNothing(t *testing.T, r *rig) {
	h := r.stack(r.tier("ip", 2, 3), r.tier("user", 2, 3))
	require.Empty(t, h.take("x", "").refusedBy)
	require.Empty(t, h.take("x", "").refusedBy)
	assert.Equal(t, []int64{2, 2, 0, 0}, h.peek("x", "x").used())
	assert.Equal(t, 2, h.served(3, "", "x"))
}

func dryTier(t *testing.T, r *rig) {
	ip := r.tier("ip", 1)
	ip.DryRun = true
	h := r.stack(ip, r.tier("user", 3))
	dry, refusals := 0, map[string]int{}
	for range 4 {
		a := h.take("a", "u")
		refusals[a.refusedBy]++
		if a.states[0].Exceeded {
			dry++
		}
	}
	assert.Equal(t, map[string]int{"": 3, "user": 1}, refusals)
	assert.Equal(t, 3, dry, "would have been refused")
	assert.Equal(t, []int64{1, 3}, h.peek("a", "u").used())
}

func dryTierCharge(t *testing.T, r *rig) {
	served, checked := r.tier("served", 9), r.tier("checked", 9)
	served.DryRun, checked.DryRun, checked.Charge = true, true, store.ChargeChecked
	h := r.stack(served, checked, r.tier("live", 1), behind(served), behind(checked))
	require.Empty(t, h.take("a", "a", "a", "a", "a").refusedBy)
	refused := h.take("a", "a", "a", "a", "a")
	assert.Equal(t, "live", refused.refusedBy)
	assert.Equal(t, []int64{1, 2, 1, 1, 1}, refused.used())
}

func behind(tier store.TierSpec) store.TierSpec {
	tier.Name += "-behind"
	return tier
}

func setBack(t *testing.T, r *rig) {
	h := r.stack(r.tier("ip", 2, 1000, 1000))
	r.now = start.Add(2*time.Hour + 20*time.Second)
	require.Equal(t, 2, h.served(3, "a"))
	r.now = r.now.Add(-time.Hour)
	stepped := r.now
	for elapsed := time.Duration(0); elapsed < 40*time.Second; elapsed += 500 * time.Millisecond {
		r.now = stepped.Add(elapsed)
		a := h.take("a")
		require.Equal(t, "ip", a.refusedBy, "freed %s after the step", elapsed)
		require.Equal(t, 40*time.Second-elapsed, a.states[0].ResetAfter)
		require.True(t, r.now.Equal(a.now), "got %s, want %s", a.now, r.now)
	}
	r.now = stepped.Add(40 * time.Second)
	a := h.take("a")
	assert.Empty(t, a.refusedBy, "locked for longer than the window")
	assert.Equal(t, time.Minute, a.states[0].ResetAfter, "windows are again those of the clock")
	assert.Equal(t, []int64{1, 3, 3}, a.used())
}

func littleBehind(t *testing.T, r *rig) {
	h := r.stack(r.tier("ip", 1))
	r.now = start.Add(time.Minute)
	require.Empty(t, h.take("a").refusedBy)
	latest := r.now
	for _, behind := range []time.Duration{1, 2, 500, 999} {
		r.now = latest.Add(-behind * time.Millisecond)
		a := h.take("a")
		assert.Equal(t, "ip", a.refusedBy)
		assert.Equal(t, time.Minute, a.states[0].ResetAfter)
		assert.True(t, latest.Equal(a.now), "got %s, want %s", a.now, latest)
	}
}

func readBefore(t *testing.T, r *rig) {
	h := r.stack(r.tier("ip", 2, 1000, 1000))
	r.now = start.Add(20 * time.Second)
	read := r.now.Add(3 * time.Millisecond)
	require.Equal(t, 2, h.served(2, "a"))
	r.now = start.Add(-time.Hour)
	require.Equal(t, "ip", h.take("a").refusedBy)
	for range 5 {
		r.now = read
		require.Equal(t, "ip", h.take("a").refusedBy)
		r.now = start.Add(-time.Hour)
		require.Equal(t, "ip", h.take("a").refusedBy)
	}
	r.now = start.Add(-time.Hour + 39_997*time.Millisecond)
	assert.Empty(t, h.take("a").refusedBy)
}

func readLongAgo(t *testing.T, r *rig) {
	h := r.stack(r.tier("ip", 2, 1000, 1000))
	read := start.Add(10 * time.Second)
	r.now = start.Add(25 * time.Second)
	require.Equal(t, 2, h.served(2, "a"))
	r.now = read
	require.Equal(t, "ip", h.take("a").refusedBy)
	r.now = start.Add(25*time.Second + 5*time.Millisecond)
	a := h.take("a")
	require.Equal(t, "ip", a.refusedBy)
	assert.Equal(t, 35*time.Second-5*time.Millisecond, a.states[0].ResetAfter)
	r.now = start.Add(time.Minute - time.Millisecond)
	assert.Equal(t, "ip", h.take("a").refusedBy, "freed early")
	r.now = start.Add(time.Minute)
	assert.Empty(t, h.take("a").refusedBy)
}

func farAhead(t *testing.T, r *rig) {
	h := r.stack(r.tier("ip", 1))
	for _, ahead := range []time.Duration{time.Minute, time.Hour, 365 * 24 * time.Hour, 100 * 365 * 24 * time.Hour} {
		assert.Equal(t, 1, h.served(2, "a"))
		r.now = r.now.Add(ahead)
	}
}

func alike(t *testing.T, r *rig) {
	identities := []string{
		"a:b\x00c", "a\x00b:c", "}{", "{}", "\n", "\r\n", "\x00", "\x00\x00", " ", "a", "A", "*", "a*", "\xff", "\xfe\xff",
		strings.Repeat("a", 300), strings.Repeat("a", 299) + "b", strings.Repeat("a", 299),
	}
	h := r.stack(r.tier("ip", 1))
	for i, identity := range identities {
		a := h.take(identity)
		assert.Empty(t, a.refusedBy, "%q shares a counter with one of %q", identity, identities[:i])
	}
	for _, identity := range identities {
		assert.Equal(t, "ip", h.take(identity).refusedBy, "%q", identity)
	}
}

func peeking(t *testing.T, r *rig) {
	ip := r.tier("ip", 2)
	ip.Charge = store.ChargeChecked
	h := r.stack(ip, r.tier("user", 1))
	for range 5 {
		a := h.peek("a", "u")
		require.Empty(t, a.refusedBy)
		require.Equal(t, []int64{0, 0}, a.used())
	}
	require.Equal(t, []int64{1, 1}, h.take("a", "u").used())
	for range 5 {
		a := h.peek("a", "u")
		require.Equal(t, "user", a.refusedBy)
		require.Equal(t, []int64{1, 1}, a.used())
		require.Equal(t, []bool{false, true}, exceeded(a))
	}
}

func resetting(t *testing.T, r *rig) {
	h := r.stack(r.tier("ip", 2, 3), r.tier("user", 2))
	require.Equal(t, 2, h.served(3, "a", "u"))
	require.Equal(t, 1, h.served(1, "b", "v"))
	h.reset("a", "")
	assert.Equal(t, []int64{0, 0, 2}, h.peek("a", "u").used())
	assert.Equal(t, []int64{1, 1, 1}, h.peek("b", "v").used())
	h.reset("nobody", "nobody")
	h.reset("a", "u")
	assert.Equal(t, 2, h.served(9, "a", "u"))
}

func otherCounts(t *testing.T, r *rig) {
	old := r.stack(r.tier("ip", 2))
	require.Equal(t, 2, old.served(3, "a"))
	raised := r.again(old.spec.Name, r.tier("ip", 5))
	old.close()
	assert.Equal(t, 3, raised.served(9, "a"))
	lowered := r.again(old.spec.Name, r.tier("ip", 3))
	raised.close()
	a := lowered.take("a")
	assert.Equal(t, "ip", a.refusedBy)
	assert.Equal(t, []int64{5}, a.used())
	assert.Equal(t, []bool{true}, exceeded(a))
}

func reopened(t *testing.T, r *rig) {
	first := r.stack(r.tier("ip", 3))
	require.Equal(t, 1, first.served(1, "a"))
	for range 20 {
		second := r.again(first.spec.Name, r.tier("user", 1), r.tier("ip", 3))
		first.close()
		first = r.again(first.spec.Name, r.tier("ip", 3))
		second.close()
	}
	assert.Equal(t, 2, first.served(9, "a"))
}

func twoHandles(t *testing.T, r *rig) {
	a := r.stack(r.tier("ip", 2), r.tier("user", 9))
	user := r.tier("user", 9)
	user.Charge = store.ChargeChecked
	b := r.again(a.spec.Name, user, r.tier("ip", 4))
	require.Equal(t, 2, a.served(3, "x", "u"))
	require.Equal(t, 2, b.served(3, "u", "x"))
	assert.Equal(t, []int64{5, 4}, b.peek("u", "x").used(), "the second handle charges user when checked")
	assert.Equal(t, "ip", a.take("x", "u").refusedBy)
	assert.Equal(t, []int64{4, 5}, a.peek("x", "u").used(), "the first does not")
}

func otherWindow(t *testing.T, r *rig) {
	old := r.stack(r.tier("ip", 5, 5))
	require.Equal(t, 3, old.served(3, "a"))
	tier := r.tier("ip", 5, 5, 5)
	tier.Limits = []store.Limit{tier.Limits[2], tier.Limits[1]}
	h := r.again(old.spec.Name, tier)
	assert.Equal(t, []int64{0, 3}, h.peek("a").used())
}

func stacksShareNothing(t *testing.T, r *rig) {
	a, b := r.stack(r.tier("ip", 1)), r.stack(r.tier("ip", 1))
	assert.Equal(t, 1, a.served(2, "x"))
	assert.Equal(t, 1, b.served(2, "x"))
}

func nothing(t *testing.T, r *rig) {
	h := r.stack(r.tier("ip", 1))
	for range 3 {
		a := h.take("")
		assert.Empty(t, a.refusedBy)
		assert.Empty(t, a.states)
	}
}

func greatestCount(t *testing.T, r *rig) {
	h := r.stack(r.tier("ip", math.MaxInt32, 2))
	assert.Equal(t, 2, h.served(3, "a"))
	assert.Equal(t, []int64{2, 2}, h.peek("a").used())
}

func shortWindow(t *testing.T, r *rig) {
	h := r.stack(store.TierSpec{Name: "ip", Limits: []store.Limit{{Count: 2, Window: time.Millisecond}}})
	for range 100 {
		require.Equal(t, 2, h.served(3, "a"))
		r.now = r.now.Add(time.Millisecond)
	}
}

func single(tier store.TierSpec) store.TierSpec {
	tier.Single = true
	return tier
}

func exceeded(a answer) []bool {
	return slices.Collect(func(yield func(bool) bool) {
		for _, state := range a.states {
			if !yield(state.Exceeded) {
				return
			}
		}
	})
}
