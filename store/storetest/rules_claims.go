package storetest

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tieredlimit/caddy-tieredlimit/store"
)

// claimRules are what a store must do with claims that ask for more than one hit, and with corrections.
var claimRules = []rule{
	{name: "a claim of many hits takes all of them or none", check: manyHits},
	{name: "a claim of no hits asks for one and takes none", check: noHits},
	{name: "more hits than the count never pass", check: tooManyHits},
	{name: "claims of one tier pass together or not at all", check: claimsOfOneTier},
	{name: "a lowered count holds for its decision alone", check: loweredCount},
	{name: "a claim that is refused elsewhere", check: refusedElsewhere},
	{name: "hits given back can be had again", check: givenBack},
	{name: "hits added later count beyond the limit", check: addedLater},
	{name: "corrections leave other counters alone", check: correctionOfOne},
	{name: "a correction of a window that has ended changes nothing", moves: true, check: correctedLate},
	{name: "a correction of what was reset changes nothing below zero", check: correctedAfterReset},
}

func manyHits(t *testing.T, r *rig) {
	h := r.stack(r.tier("ip", 10), r.tier("user", 4))
	first := h.put(h.counters.Take, h.claim(0, "a", 7), h.claim(1, "u", 2))
	assert.Empty(t, first.refusedBy)
	assert.Equal(t, []int64{7, 2}, first.used())
	second := h.put(h.counters.Take, h.claim(0, "a", 3), h.claim(1, "u", 3))
	assert.Equal(t, "user", second.refusedBy)
	assert.Equal(t, []int64{7, 2}, second.used())
	third := h.put(h.counters.Take, h.claim(0, "a", 3), h.claim(1, "u", 2))
	assert.Empty(t, third.refusedBy)
	assert.Equal(t, []int64{10, 4}, third.used())
	assert.Equal(t, "ip", h.put(h.counters.Take, h.claim(0, "a", 1)).refusedBy)
}

func noHits(t *testing.T, r *rig) {
	h := r.stack(r.tier("ip", 2))
	for range 5 {
		asked := h.put(h.counters.Take, h.claim(0, "a", 0))
		assert.Empty(t, asked.refusedBy)
		assert.Equal(t, []int64{0}, asked.used())
	}
	require.Equal(t, 2, h.served(2, "a"))
	asked := h.put(h.counters.Take, h.claim(0, "a", 0))
	assert.Equal(t, "ip", asked.refusedBy)
	assert.Equal(t, []int64{2}, asked.used())
}

func tooManyHits(t *testing.T, r *rig) {
	h := r.stack(r.tier("ip", 5))
	for _, hits := range []int64{6, store.MostHits} {
		a := h.put(h.counters.Take, h.claim(0, "a", hits))
		assert.Equal(t, "ip", a.refusedBy)
		assert.Equal(t, []int64{0}, a.used())
		assert.Equal(t, store.Never, a.states[0].RetryAfter)
	}
	assert.Equal(t, 5, h.served(6, "a"))
}

func claimsOfOneTier(t *testing.T, r *rig) {
	h := r.stack(r.tier("tool", 3), r.tier("user", 9))
	both := func(search, fetch int64) answer {
		return h.put(h.counters.Take, h.claim(0, "search", search), h.claim(0, "fetch", fetch), h.claim(1, "u", 1))
	}
	assert.Equal(t, []int64{2, 1, 1}, both(2, 1).used())
	refused := both(1, 3)
	assert.Equal(t, 1, refused.by, "the claim that is not admitted is named")
	assert.Equal(t, []bool{false, true, false}, exceeded(refused))
	assert.Equal(t, []int64{2, 1, 1}, refused.used())
	assert.Equal(t, []int64{3, 3, 2}, both(1, 2).used())
}

func loweredCount(t *testing.T, r *rig) {
	h := r.stack(r.tier("ip", 10, 20))
	lowered := func(hits int64) answer {
		claim := h.claim(0, "a", hits)
		claim.Counts = []int64{6, 12}
		return h.put(h.counters.Take, claim)
	}
	assert.Empty(t, lowered(6).refusedBy)
	refused := lowered(1)
	assert.Equal(t, "ip", refused.refusedBy)
	assert.Equal(t, []bool{true, false}, exceeded(refused))
	assert.Equal(t, 4, h.served(9, "a"), "others have the whole count")
	assert.Equal(t, []int64{10, 10}, h.peek("a").used())
}

func refusedElsewhere(t *testing.T, r *rig) {
	dry := r.tier("dry", 5)
	dry.DryRun = true
	checked := r.tier("checked", 5)
	checked.Charge = store.ChargeChecked
	h := r.stack(dry, checked, r.tier("ban", 5), r.tier("last", 5))
	claims := func(banned bool) []store.Claim {
		claims := h.claims("a", "a", "a", "a")
		claims[0].Refused, claims[2].Refused = true, banned
		return claims
	}
	refused := h.put(h.counters.Take, claims(true)...)
	assert.Equal(t, "ban", refused.refusedBy)
	assert.Equal(t, []int64{0, 1, 0, 0}, refused.used())
	served := h.put(h.counters.Take, claims(false)...)
	assert.Empty(t, served.refusedBy)
	assert.Equal(t, []int64{0, 2, 1, 1}, served.used(), "a dry tier that would refuse is not charged")
}

func givenBack(t *testing.T, r *rig) {
	h := r.stack(r.tier("ip", 3, 5), single(r.tier("global", 4)))
	first := h.put(h.counters.Take, h.claim(0, "a", 3), h.claim(1, "", 3))
	require.Empty(t, first.refusedBy)
	require.Equal(t, "ip", h.take("a", "").refusedBy)
	h.settle(first, -2, -3)
	assert.Equal(t, []int64{1, 1, 0}, h.peek("a", "").used())
	assert.Equal(t, 2, h.served(9, "a", ""))
	h.settle(first, -9, -9)
	assert.Equal(t, []int64{0, 0, 0}, h.peek("a", "").used(), "no counter falls below nothing")
}

func addedLater(t *testing.T, r *rig) {
	h := r.stack(r.tier("ip", 10))
	first := h.take("a")
	h.settle(first, 4)
	assert.Equal(t, []int64{5}, h.peek("a").used())
	h.settle(first, 20)
	a := h.take("a")
	assert.Equal(t, "ip", a.refusedBy)
	assert.Equal(t, []int64{25}, a.used())
	h.settle(first, -16)
	assert.Equal(t, 1, h.served(3, "a"))
}

func correctionOfOne(t *testing.T, r *rig) {
	h := r.stack(r.tier("ip", 10), r.tier("user", 10))
	require.Equal(t, 3, h.served(3, "b", "u"))
	first := h.take("a", "u")
	h.settle(first, -1, 0)
	assert.Equal(t, []int64{0, 4}, h.peek("a", "u").used())
	assert.Equal(t, []int64{3, 4}, h.peek("b", "u").used())
}

func correctedLate(t *testing.T, r *rig) {
	h := r.stack(r.tier("ip", 5, 50))
	first := h.take("a")
	r.now = r.now.Add(time.Minute)
	require.Equal(t, 2, h.served(2, "a"))
	h.settle(first, -1)
	assert.Equal(t, []int64{2, 2}, h.peek("a").used(), "the minute has ended, the hour has not")
	h.settle(first, 3)
	assert.Equal(t, []int64{2, 5}, h.peek("a").used())
}

func correctedAfterReset(t *testing.T, r *rig) {
	h := r.stack(r.tier("ip", 5))
	first := h.put(h.counters.Take, h.claim(0, "a", 4))
	h.reset("a")
	h.settle(first, -4)
	assert.Equal(t, []int64{0}, h.peek("a").used())
	assert.Equal(t, 5, h.served(9, "a"))
}
