package redis

import (
	"context"
	"fmt"
	"regexp"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tieredlimit/caddy-tieredlimit/internal/redistest"

	"github.com/tieredlimit/caddy-tieredlimit/store"
)

// asked is how often the server was asked to run a script.
func asked(t testing.TB, server *redistest.Server) int {
	t.Helper()
	calls := 0
	for _, match := range regexp.MustCompile(`cmdstat_eval(?:sha)?:calls=(\d+)`).
		FindAllStringSubmatch(server.Do("INFO", "commandstats").(string), -1) {
		n, err := strconv.Atoi(match[1])
		require.NoError(t, err)
		calls += n
	}
	return calls
}

// later makes time pass for a handle, but not for the server.
func later(c *counters, by time.Duration) {
	was := c.clock
	c.clock = func() time.Duration { return was() + by }
}

// still stops the clock of a handle, so that nothing is forgotten however slow the machine is.
func still(c *counters) {
	now := c.clock()
	c.clock = func() time.Duration { return now }
}

// contents are all keys with their values.
func contents(server *redistest.Server) map[string]string {
	all := make(map[string]string)
	for _, key := range server.Keys("*") {
		all[key], _ = server.Do("GET", key).(string)
	}
	return all
}

// primed is a server that has the scripts, so that each request is one call.
func primed(t testing.TB) *redistest.Server {
	server := redistest.Start(t)
	server.Do("SCRIPT", "LOAD", takeScript.text)
	return server
}

func TestRefusesAgainFromMemory(t *testing.T) {
	server := primed(t)
	c := replica(t, stackOf(plainTier("ip", 9, 7*day), plainTier("user", 2, 7*day)), on(server))
	still(c)
	for range 3 {
		take(t, c, "a", "u")
	}
	require.Equal(t, 3, asked(t, server), "two served and one refused")
	before := contents(server)
	for range 1000 {
		by, states := take(t, c, "a", "u")
		require.Equal(t, 1, by)
		require.Equal(t, int64(2), states[1].Used)
		require.True(t, states[1].Exceeded)
		require.Positive(t, states[1].ResetAfter)
		require.LessOrEqual(t, states[1].ResetAfter, 7*day)
	}
	assert.Equal(t, 3, asked(t, server), "round trips of 1000 further refusals")
	assert.Equal(t, before, contents(server), "a refusal changed a counter")
	assert.Equal(t, int64(1000), c.Remembered())

	by, _ := take(t, c, "a", "v")
	assert.Equal(t, -1, by, "another user behind the same address")
	by, _ = take(t, c, "b", "u")
	assert.Equal(t, 1, by, "the same user behind another address")
	assert.Equal(t, 4, asked(t, server), "the user is remembered whatever its address is")

	later(c, askAgain-1)
	take(t, c, "a", "u")
	assert.Equal(t, 4, asked(t, server), "asked again within 5 s")
	later(c, 1)
	for range 100 {
		by, _ = take(t, c, "a", "u")
		assert.Equal(t, 1, by)
	}
	assert.Equal(t, 5, asked(t, server), "asked after 5 s, once")
}

func TestRemembersOnlyWhatCostsNothing(t *testing.T) {
	server := primed(t)
	checked := plainTier("ip", 9, day)
	checked.Charge = store.ChargeChecked
	dry := plainTier("ip", 1, day)
	dry.DryRun = true
	calmDry := dry
	calmDry.Limits = []store.Limit{{Count: 9, Window: day}}
	checkedDry := calmDry
	checkedDry.Charge = store.ChargeChecked
	user := plainTier("user", 2, day)
	checkedUser := user
	checkedUser.Charge = store.ChargeChecked
	for name, test := range map[string]struct {
		tiers []store.TierSpec
		trips int   // of five requests
		front int64 // used by the tier in front, after them
	}{
		"a checked tier in front is charged each time":     {[]store.TierSpec{checked, user}, 5, 5},
		"a dry checked tier in front is charged each time": {[]store.TierSpec{checkedDry, user}, 5, 5},
		"a dry tier that would refuse is counted":          {[]store.TierSpec{dry, user}, 5, 1},
		"a dry tier that would not refuse":                 {[]store.TierSpec{calmDry, user}, 3, 2},
		"a served tier in front":                           {[]store.TierSpec{plainTier("ip", 9, day), user}, 3, 2},
		"the refusing tier itself is checked":              {[]store.TierSpec{plainTier("ip", 9, day), checkedUser}, 3, 2},
	} {
		t.Run(name, func(t *testing.T) {
			server.Do("FLUSHALL")
			before := asked(t, server)
			c := replica(t, stackOf(test.tiers...), on(server))
			still(c)
			for i := range 5 {
				by, _ := take(t, c, "a", "u")
				assert.Equal(t, i >= 2, by == 1, "request %d", i)
			}
			assert.Equal(t, test.trips, asked(t, server)-before, "round trips")
			_, states := peek(t, c, "a", "u")
			assert.Equal(t, test.front, states[0].Used)
		})
	}
}

func TestRememberedTierIsNamedThoughAnEarlierOneFills(t *testing.T) {
	server := primed(t)
	spec := stackOf(plainTier("ip", 3, day), plainTier("user", 2, day))
	a, b := replica(t, spec, on(server)), replica(t, spec, on(server))
	still(a)
	still(b)
	for range 3 {
		take(t, a, "a", "u")
	}
	take(t, b, "a", "v")
	by, _ := take(t, a, "a", "u")
	assert.Equal(t, 1, by)
	by, _ = take(t, b, "a", "u")
	assert.Equal(t, 0, by, "an instance that remembers nothing names the first")
}

func TestHigherLimitTakesEffectAtOnce(t *testing.T) {
	server := primed(t)
	s := newStore(t, on(server))
	open := func(count int64) store.Counters {
		c, err := s.Open(stackOf(plainTier("ip", count, day)))
		require.NoError(t, err)
		t.Cleanup(func() { assert.NoError(t, c.Close()) })
		return c
	}
	low := open(2)
	for i := range 5 {
		by, _ := take(t, low, "a")
		assert.Equal(t, i >= 2, by == 0)
	}
	high := open(5)
	for i := range 5 {
		by, _ := take(t, high, "a")
		assert.Equal(t, i >= 3, by == 0, "request %d after the limit was raised from 2 to 5 with 2 used", i)
	}
	lower := open(1)
	by, states := take(t, lower, "a")
	assert.Equal(t, 0, by)
	assert.Equal(t, int64(5), states[0].Used, "what was used stays used")
}

func TestResetReachesEveryInstance(t *testing.T) {
	server := primed(t)
	spec := stackOf(plainTier("ip", 2, day))
	a, b, idle := replica(t, spec, on(server)), replica(t, spec, on(server)), replica(t, spec, on(server))
	for _, c := range []*counters{a, b, idle} {
		still(c)
		for range 3 {
			take(t, c, "client")
		}
		by, _ := take(t, c, "client")
		require.Equal(t, 0, by)
	}
	require.NoError(t, a.Reset(context.Background(), time.Time{}, claimsOf("client")))
	by, states := take(t, a, "client")
	assert.Equal(t, -1, by, "at once on the instance that was asked")
	assert.Equal(t, int64(1), states[0].Used)

	by, _ = take(t, b, "client")
	assert.Equal(t, 0, by, "another instance has not heard of it")
	take(t, b, "somebody else")
	by, _ = take(t, b, "client")
	assert.Equal(t, -1, by, "with the next reply about the stack")

	require.NoError(t, a.Reset(context.Background(), time.Time{}, claimsOf("client")))
	by, _ = take(t, idle, "client")
	assert.Equal(t, 0, by)
	later(idle, askAgain)
	by, _ = take(t, idle, "client")
	assert.Equal(t, -1, by, "within 5 s without other traffic")
}

func TestResetOnlyForgetsWhatIsClaimed(t *testing.T) {
	server := primed(t)
	c := replica(t, stackOf(plainTier("ip", 9, day), plainTier("user", 9, day)), on(server))
	take(t, c, "a", "u")
	take(t, c, "b", "u")
	require.NoError(t, c.Reset(context.Background(), time.Time{}, claimsOf("a")))
	_, states := peek(t, c, "a", "u")
	assert.Equal(t, []int64{0, 2}, []int64{states[0].Used, states[1].Used})
	_, states = peek(t, c, "b", "u")
	assert.Equal(t, []int64{1, 2}, []int64{states[0].Used, states[1].Used})
}

func TestGenerationsDiffer(t *testing.T) {
	server := primed(t)
	c := replica(t, stackOf(plainTier("ip", 9, day)), on(server))
	seen := make(map[int64]bool)
	for range 100 {
		require.NoError(t, c.Reset(context.Background(), time.Time{}, claimsOf("a")))
		seen[c.stack.generation.Load()] = true
	}
	assert.Len(t, seen, 100, "resets within one millisecond must differ too")
	assert.Equal(t, int64(100), c.stack.epoch.Load())
}

func TestAnswerFromBeforeAResetIsNotRemembered(t *testing.T) {
	c := &counters{
		stack: new(sharedStack), refusals: newRefusals(1), clock: monotonic,
		tiers: []counterTier{{limits: []counterLimit{{window: day, count: 1}}}},
	}
	full := func() []store.Claim {
		claims := claimsOf("a")
		claims[0].States[0] = store.State{Used: 1, ResetAfter: day, Exceeded: true}
		return claims
	}
	epoch := c.stack.epoch.Load()
	c.stack.heard(7)
	c.remember(0, epoch, store.Decision{RefusedBy: 0}, full())
	_, ok := c.refuse(0, claimsOf("a"))
	assert.False(t, ok, "the answer was on its way when the counter was reset")
	c.remember(0, c.stack.epoch.Load(), store.Decision{RefusedBy: 0}, full())
	_, ok = c.refuse(0, claimsOf("a"))
	assert.True(t, ok)
	c.stack.heard(0)
	_, ok = c.refuse(0, claimsOf("a"))
	assert.True(t, ok, "a generation that has been forgotten is no reset")
}

func TestRefusalEndsWithItsWindow(t *testing.T) {
	const second, ms = time.Second, time.Millisecond
	c := &counters{
		stack: new(sharedStack), refusals: newRefusals(1),
		tiers: []counterTier{{limits: []counterLimit{
			{window: second, count: 2}, {window: time.Minute, count: 2}, {window: time.Hour, count: 2},
		}}},
	}
	full := func(left time.Duration) store.State { return store.State{Used: 2, ResetAfter: left, Exceeded: true} }
	at := time.UnixMilli(1_000_000_000)
	for _, test := range []struct {
		name   string
		states []store.State
		lasts  time.Duration
	}{
		{"one limit", []store.State{full(second / 2), {Used: 1, ResetAfter: time.Minute}, {Used: 1, ResetAfter: time.Hour}}, second/2 - ms},
		{"the last of two", []store.State{full(second / 2), full(3 * second), {Used: 1, ResetAfter: time.Hour}}, 3*second - ms},
		{"no longer than 5 s", []store.State{full(second / 2), {Used: 1, ResetAfter: second}, full(time.Hour)}, 5 * second},
	} {
		claims := claimsFor(c, test.name)
		copy(claims[0].States, test.states)
		c.remember(10*second, 0, store.Decision{RefusedBy: 0, Now: at}, claims)
		_, ok := c.refuse(10*second+test.lasts-1, claims)
		assert.True(t, ok, "%s: just before its end", test.name)
		for i, state := range claims[0].States {
			assert.Positive(t, state.ResetAfter, "%s: limit %d", test.name, i)
			assert.LessOrEqual(t, state.ResetAfter, c.tiers[0].limits[i].window, "%s: limit %d", test.name, i)
			stays := test.states[i].ResetAfter > test.lasts-1
			assert.Equal(t, test.states[i].Exceeded && stays, state.Exceeded, "%s: limit %d", test.name, i)
		}
		_, ok = c.refuse(10*second+test.lasts, claims)
		assert.False(t, ok, "%s: at its end", test.name)
	}
}

func TestRefusalsAreBounded(t *testing.T) {
	m := newRefusals(2)
	for i := range 10 * mostRefusals {
		identity := fmt.Append(nil, i)
		m.add(i%2, &refusal{hash: m.hash(i%2, identity), until: time.Duration(i + 1)})
		if m.find(time.Duration(i), 0, i%2, identity) == nil {
			t.Fatalf("refusal %d, the newest, is not found", i)
		}
		if m.find(time.Duration(i), 0, 1-i%2, identity) != nil {
			t.Fatalf("refusal %d is found for another tier", i)
		}
	}
	held := 0
	table := m.table.Load()
	for i := range table {
		for j := range table[i].refusals {
			if table[i].refusals[j].Load() != nil {
				held++
			}
		}
	}
	assert.LessOrEqual(t, held, mostRefusals)
	assert.Greater(t, held, mostRefusals/2)
}

func TestManyRefusedAreAllRemembered(t *testing.T) {
	const clients = 10_000
	m := newRefusals(1)
	for i := range clients {
		m.add(0, &refusal{hash: m.hash(0, fmt.Append(nil, i)), until: time.Second})
	}
	forgotten := 0
	for i := range clients {
		if m.find(0, 0, 0, fmt.Append(nil, i)) == nil {
			forgotten++
		}
	}
	assert.LessOrEqual(t, forgotten, clients/1000, "forgotten of %d", clients)
}

func TestWindowTurnsForTheRefused(t *testing.T) {
	server := primed(t)
	c := replica(t, stackOf(plainTier("ip", 2, 200*time.Millisecond)), on(server))
	windows := make(map[int64]int)
	for len(windows) < 6 {
		claims := claimsOf("a")
		d, err := c.Take(context.Background(), time.Time{}, claims)
		require.NoError(t, err)
		if d.RefusedBy < 0 {
			windows[d.Now.Add(claims[0].States[0].ResetAfter).UnixMilli()]++
		}
	}
	for end, served := range windows {
		assert.LessOrEqual(t, served, 2, "served in the window that ends at %d", end)
		assert.Zero(t, end%200, "windows are aligned")
	}
}
