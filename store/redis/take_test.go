package redis

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tieredlimit/caddy-tieredlimit/internal/redistest"

	"github.com/tieredlimit/caddy-tieredlimit/store"
)

// newStore provisions a store as Caddy would, from JSON settings.
func newStore(t testing.TB, settings map[string]any) *Redis {
	t.Helper()
	raw, err := json.Marshal(settings)
	require.NoError(t, err)
	ctx, cancel := caddy.NewContext(caddy.Context{Context: context.Background()})
	t.Cleanup(cancel)
	s, err := ctx.LoadModuleByID("http.tiered_limit.stores.redis", raw)
	require.NoError(t, err)
	return s.(*Redis)
}

// replica opens a stack in a store with connections of its own, as another instance would.
func replica(t testing.TB, spec store.StackSpec, settings map[string]any) *counters {
	t.Helper()
	c, err := openReplica(t, spec, settings)
	require.NoError(t, err)
	return c
}

var replicas atomic.Int64

func openReplica(t testing.TB, spec store.StackSpec, settings map[string]any) (*counters, error) {
	t.Helper()
	s := newStore(t, settings)
	s.setup.digest += " replica " + strconv.FormatInt(replicas.Add(1), 10)
	opened, err := s.Open(spec)
	if err != nil {
		return nil, err
	}
	t.Cleanup(func() { assert.NoError(t, opened.Close()) })
	return opened.(*counters), nil
}

// on are the settings for a server that need not be quick on a busy machine.
func on(s *redistest.Server) map[string]any {
	return map[string]any{"address": []string{s.Addr()}, "timeout": "5s"}
}

// and returns settings with one more.
func and(settings map[string]any, name string, value any) map[string]any {
	all := map[string]any{name: value}
	for k, v := range settings {
		if k != name {
			all[k] = v
		}
	}
	return all
}

const day = 24 * time.Hour

// plainTier is a live tier that is charged when served, with one limit.
func plainTier(name string, count int64, window time.Duration) store.TierSpec {
	return store.TierSpec{Name: name, Limits: []store.Limit{{Count: count, Window: window}}}
}

func stackOf(tiers ...store.TierSpec) store.StackSpec {
	return store.StackSpec{Name: "api", Named: true, Tiers: tiers}
}

// claimsOf claims a hit of all tiers in order, one identity each. The tiers have one limit.
func claimsOf(identities ...string) []store.Claim {
	claims := make([]store.Claim, len(identities))
	for i, identity := range identities {
		claims[i] = store.Claim{Tier: i, Identity: []byte(identity), Hits: 1, States: make([]store.State, 1)}
	}
	return claims
}

// claimsFor is claimsOf for tiers of any number of limits.
func claimsFor(c store.Counters, identities ...string) []store.Claim {
	claims := claimsOf(identities...)
	for i := range claims {
		claims[i].States = make([]store.State, len(c.(*counters).tiers[i].limits))
	}
	return claims
}

// statesOf lists the states of all claims.
func statesOf(claims []store.Claim) []store.State {
	var states []store.State
	for _, claim := range claims {
		states = append(states, claim.States...)
	}
	return states
}

// take asks for one hit and fails the test if the store cannot decide.
func take(t testing.TB, c store.Counters, identities ...string) (int, []store.State) {
	t.Helper()
	claims := claimsFor(c, identities...)
	d, err := c.Take(context.Background(), time.Time{}, claims)
	require.NoError(t, err)
	return d.RefusedBy, statesOf(claims)
}

func peek(t testing.TB, c store.Counters, identities ...string) (int, []store.State) {
	t.Helper()
	claims := claimsFor(c, identities...)
	d, err := c.Peek(context.Background(), time.Time{}, claims)
	require.NoError(t, err)
	return d.RefusedBy, statesOf(claims)
}

func TestTakeDecidesByMode(t *testing.T) {
	server := redistest.Start(t)
	checked := func(spec store.TierSpec) store.TierSpec { spec.Charge = store.ChargeChecked; return spec }
	dry := func(spec store.TierSpec) store.TierSpec { spec.DryRun = true; return spec }
	for i, test := range []struct {
		name    string
		tiers   []store.TierSpec
		hits    int
		refused []int   // of each hit
		used    []int64 // of each limit, after all hits
	}{
		{
			name: "served", tiers: []store.TierSpec{plainTier("ip", 9, day), plainTier("user", 2, day)}, hits: 4,
			refused: []int{-1, -1, 1, 1}, used: []int64{2, 2},
		},
		{
			name: "checked in front", tiers: []store.TierSpec{checked(plainTier("ip", 9, day)), plainTier("user", 2, day)}, hits: 4,
			refused: []int{-1, -1, 1, 1}, used: []int64{4, 2},
		},
		{
			name: "checked behind", tiers: []store.TierSpec{plainTier("ip", 2, day), checked(plainTier("user", 9, day))}, hits: 4,
			refused: []int{-1, -1, 0, 0}, used: []int64{2, 2},
		},
		{
			name: "dry in front", tiers: []store.TierSpec{dry(plainTier("ip", 1, day)), plainTier("user", 2, day)}, hits: 4,
			refused: []int{-1, -1, 1, 1}, used: []int64{1, 2},
		},
		{
			name: "dry and checked", tiers: []store.TierSpec{dry(checked(plainTier("ip", 3, day))), plainTier("user", 2, day)},
			hits: 5, refused: []int{-1, -1, 1, 1, 1}, used: []int64{3, 2},
		},
		{
			name:  "several limits",
			tiers: []store.TierSpec{{Name: "ip", Limits: []store.Limit{{Count: 2, Window: day}, {Count: 5, Window: 2 * day}}}, plainTier("user", 9, day)}, hits: 3,
			refused: []int{-1, -1, 0}, used: []int64{2, 2, 2},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			spec := stackOf(test.tiers...)
			spec.Name = fmt.Sprintf("stack%d", i)
			c := replica(t, spec, on(server))
			c.refusals = nil
			var refused []int
			for range test.hits {
				by, _ := take(t, c, "a", "b")
				refused = append(refused, by)
			}
			assert.Equal(t, test.refused, refused)
			_, states := peek(t, c, "a", "b")
			for n, want := range test.used {
				assert.Equal(t, want, states[n].Used, "limit %d", n)
			}
		})
	}
}

func TestExactUnderConcurrency(t *testing.T) {
	server := redistest.Start(t)
	spec := stackOf(plainTier("ip", 1000, day), plainTier("global", 100, day))
	a, b := replica(t, spec, on(server)), replica(t, spec, on(server))
	var served atomic.Int64
	var wait sync.WaitGroup
	for i := range 1000 {
		wait.Go(func() {
			c := a
			if i%2 == 1 {
				c = b
			}
			if by, _ := take(t, c, fmt.Sprint(i%7), "all"); by < 0 {
				served.Add(1)
			}
		})
	}
	wait.Wait()
	assert.Equal(t, int64(100), served.Load(), "served of 1000 through two instances")
}

func TestTwoInstancesShareOneLimit(t *testing.T) {
	server := redistest.Start(t)
	spec := stackOf(plainTier("ip", 10, day))
	a, b := replica(t, spec, on(server)), replica(t, spec, on(server))
	served := 0
	for i := range 40 {
		if by, _ := take(t, []store.Counters{a, b}[i%2], "client"); by < 0 {
			served++
		}
	}
	assert.Equal(t, 10, served, "served of 40, alternating")
}

func TestIgnoresTheClocksOfInstances(t *testing.T) {
	server := redistest.Start(t)
	for name, skew := range map[string]time.Duration{"5s": 5 * time.Second, "2min": 2 * time.Minute} {
		t.Run(name, func(t *testing.T) {
			spec := stackOf(plainTier("ip", 10, day))
			spec.Name = "skew" + name
			a, b := replica(t, spec, on(server)), replica(t, spec, on(server))
			served := 0
			var left []time.Duration
			for i := range 40 {
				claims := claimsOf("client")
				now := time.Now().Add(time.Duration(i%2) * skew)
				d, err := []store.Counters{a, b}[i%2].Take(context.Background(), now, claims)
				require.NoError(t, err)
				if d.RefusedBy < 0 {
					served++
				}
				left = append(left, claims[0].States[0].ResetAfter)
			}
			assert.Equal(t, 10, served, "served of 40")
			for i := 1; i < len(left); i++ {
				assert.LessOrEqual(t, left[i], left[i-1]+time.Second, "the window's end moved at request %d", i)
			}
		})
	}
}

func TestKeysAreAsDocumented(t *testing.T) {
	server := redistest.Start(t)
	c := replica(t, stackOf(store.TierSpec{Name: "ip", Limits: []store.Limit{{Count: 5, Window: time.Minute}, {Count: 9, Window: time.Hour}}}), on(server))
	take(t, c, "203.0.113.7")
	// printf 203.0.113.7 | sha256sum | cut -c1-32
	const sum = "fec52565aa0cf18f57d7cf5b3ac72850"
	keys := server.Keys("*")
	assert.ElementsMatch(t, []string{
		"tieredlimit:{api}:ip:60000:" + sum, "tieredlimit:{api}:ip:3600000:" + sum,
	}, keys)
	for _, window := range []time.Duration{time.Minute, time.Hour} {
		value := server.Do("GET", fmt.Sprintf("tieredlimit:{api}:ip:%d:%s", window.Milliseconds(), sum))
		now := time.Now()
		assert.Contains(t, []any{testCounter(window, now, 1), testCounter(window, now.Add(-time.Second), 1)}, value)
	}
}

// counter is what a key holds.
func testCounter(window time.Duration, at time.Time, used int) string {
	number := at.UnixMilli() / window.Milliseconds() % 900_000
	return strconv.FormatInt(number*1e10+int64(used), 10)
}

// testBridge is what a key holds whose window goes on until a time, since the clock was set back. The window's number is
// that of a minute long ahead.
func testBridge(end time.Time, used int) string {
	return fmt.Sprintf("%d:%d:%d", end.UnixMilli(), used, end.UnixMilli()/60_000+1000)
}

func TestSecretKeysFingerprints(t *testing.T) {
	server := redistest.Start(t)
	open := func(secret string) *counters {
		return replica(t, stackOf(plainTier("ip", 5, day)), and(on(server), "key_secret", secret))
	}
	take(t, open("one"), "203.0.113.7")
	take(t, open("one"), "203.0.113.7")
	take(t, open("two"), "203.0.113.7")
	// printf 203.0.113.7 | openssl dgst -sha256 -hmac one | cut -d' ' -f2 | cut -c1-32
	assert.ElementsMatch(t, []string{
		"tieredlimit:{api}:ip:86400000:e339d5a5f9c4c15a58ce77d8f3e56cfd",
		"tieredlimit:{api}:ip:86400000:ece607b3acf5c02d2dac84e9759f40f7",
	}, server.Keys("*"))
}

func TestIdentitiesAreDistinctAndBounded(t *testing.T) {
	server := redistest.Start(t)
	c := replica(t, stackOf(plainTier("user", 1, day)), on(server))
	identities := []string{
		"a:b\x00c", "a\x00b:c", "}{", "{x}", "line\nfeed", "", " ", "\x00", strings.Repeat("m", 1<<20),
		strings.Repeat("m", 1<<20) + "n", "\xff\xfe",
	}
	for _, identity := range identities {
		by, _ := take(t, c, identity)
		assert.Equal(t, -1, by, "first hit of %.20q", identity)
	}
	for _, identity := range identities {
		by, _ := take(t, c, identity)
		assert.Equal(t, 0, by, "second hit of %.20q", identity)
	}
	keys := server.Keys("*")
	assert.Len(t, keys, len(identities))
	for _, key := range keys {
		assert.Regexp(t, `^tieredlimit:\{api\}:user:86400000:[0-9a-f]{32}$`, key)
	}
}

func TestEveryKeyHasALife(t *testing.T) {
	server := redistest.Start(t)
	checked := plainTier("ip", 9, time.Hour)
	checked.Charge = store.ChargeChecked
	c := replica(t, stackOf(checked, plainTier("user", 2, time.Minute)), on(server))
	lives := func() {
		t.Helper()
		keys := server.Keys("*")
		require.NotEmpty(t, keys)
		for _, key := range keys {
			assert.Positive(t, server.Do("PTTL", key), "life of %s", key)
		}
	}
	for range 4 {
		take(t, c, "a", "b")
		lives()
		for _, key := range server.Keys("*") {
			server.Do("PERSIST", key)
		}
		take(t, c, "a", "b") // served, or refused by user
		lives()
	}
	require.NoError(t, c.Reset(context.Background(), time.Time{}, claimsOf("a", "b")))
	lives()
}

func TestBridgesAClockThatWasSetBack(t *testing.T) {
	server := redistest.Start(t)
	c := replica(t, stackOf(plainTier("ip", 2, time.Minute)), on(server))
	c.refusals = nil
	take(t, c, "a")
	take(t, c, "a")
	key := server.Keys("*")[0]
	for name, plant := range map[string]func() string{
		"one window": func() string { return testCounter(time.Minute, time.Now().Add(time.Minute), 2) },
		"an hour":    func() string { return testCounter(time.Minute, time.Now().Add(time.Hour), 2) },
		"a month":    func() string { return testCounter(time.Minute, time.Now().Add(30*day), 2) },
		"while it is bridged": func() string {
			return testBridge(time.Now().Add(time.Hour), 2)
		},
	} {
		t.Run(name, func(t *testing.T) {
			// As if the window had begun before the clock was set back.
			server.Do("SET", key, plant())
			by, states := peek(t, c, "a")
			assert.Equal(t, 0, by, "freed early")
			assert.Equal(t, time.Minute, states[0].ResetAfter, "peeking changes nothing")
			by, states = take(t, c, "a")
			assert.Equal(t, 0, by, "freed early")
			assert.Equal(t, time.Minute, states[0].ResetAfter)
			bridge := server.Do("GET", key).(string)
			end, used, _ := strings.Cut(bridge, ":")
			used, _, _ = strings.Cut(used, ":")
			at, err := strconv.ParseInt(end, 10, 64)
			require.NoError(t, err)
			assert.Equal(t, "2", used)
			assert.InDelta(t, time.Now().Add(time.Minute).UnixMilli(), at, 2000, "the bridge ends after one window")
			take(t, c, "a")
			assert.Equal(t, bridge, server.Do("GET", key), "the end of the bridge does not move")
			assert.Positive(t, server.Do("PTTL", key))
		})
	}
	// One is left, and the bridge has just ended.
	server.Do("SET", key, testBridge(time.Now().Add(30*time.Second), 1))
	by, states := take(t, c, "a")
	assert.Equal(t, -1, by)
	assert.Equal(t, int64(2), states[0].Used)
	assert.LessOrEqual(t, states[0].ResetAfter, 30*time.Second)
	by, _ = take(t, c, "a")
	assert.Equal(t, 0, by)
	server.Do("SET", key, testBridge(time.Now().Add(-time.Millisecond), 2))
	by, states = take(t, c, "a")
	assert.Equal(t, -1, by, "after the bridge")
	assert.Equal(t, int64(1), states[0].Used)
	assert.Equal(t, testCounter(time.Minute, time.Now(), 1), server.Do("GET", key), "aligned again")
}

func TestForeignValuesCountAsNone(t *testing.T) {
	server := redistest.Start(t)
	c := replica(t, stackOf(plainTier("ip", 2, day)), on(server))
	take(t, c, "a")
	key := server.Keys("*")[0]
	for _, plant := range [][]string{
		{"LPUSH", key, "x"}, {"HSET", key, "a", "b"}, {"SADD", key, "x"}, {"SET", key, "garbage"}, {"SET", key, ""},
		{"SET", key, ":"}, {"SET", key, "1:2:3"}, {"SET", key, "-1:-1"}, {"SET", key, "1e9:5"}, {"SET", key, "0"},
		{"SET", key, "-7"}, {"SET", key, "99999999999999:9:99999999999999999999"}, {"SET", key, "99999999999999:99999999999:9"},
		{"SET", key, "1.5"}, {"SET", key, "nan"}, {"SET", key, "inf"}, {"SET", key, "9e99"}, {"SET", key, "0x10"},
		{"SET", key, "9223372036854775807"}, {"SET", key, " " + testCounter(day, time.Now(), 0)},
		{"SET", key, testCounter(day, time.Now(), 0) + ".5"}, {"SET", key, testCounter(day, time.Now().Add(-day), 2)},
	} {
		server.Do("DEL", key)
		server.Do(plant...)
		peeked, _ := peek(t, c, "a")
		assert.Equal(t, -1, peeked, "%q", plant)
		by, states := take(t, c, "a")
		assert.Equal(t, -1, by, "%q", plant)
		assert.Equal(t, int64(1), states[0].Used, "%q", plant)
		assert.Equal(t, "string", server.Do("TYPE", key), "%q", plant)
		assert.Positive(t, server.Do("PTTL", key), "%q", plant)
	}
}

// What stands in place of a reset generation is no reason to decide nothing, and the next reset replaces it.
func TestForeignGenerationsCountAsNone(t *testing.T) {
	server := redistest.Start(t)
	c := replica(t, stackOf(plainTier("ip", 2, day)), on(server))
	take(t, c, "a")
	for _, plant := range [][]string{
		{"LPUSH", c.reset, "x"}, {"SET", c.reset, "garbage"}, {"SET", c.reset, ""}, {"SET", c.reset, "-5"}, {"SET", c.reset, "nan"},
		{"SET", c.reset, "inf"}, {"SET", c.reset, "-inf"}, {"SET", c.reset, "9e99"}, {"SET", c.reset, "9007199254740993"},
	} {
		server.Do("DEL", c.reset)
		server.Do(plant...)
		by, states := take(t, c, "a")
		assert.Equal(t, -1, by, "%q", plant)
		assert.Equal(t, int64(2), states[0].Used, "%q", plant)
		require.NoError(t, c.Reset(t.Context(), time.Now(), claimsOf("a")), "%q", plant)
		generation, err := strconv.ParseInt(server.Do("GET", c.reset).(string), 10, 64)
		require.NoError(t, err, "%q", plant)
		assert.InDelta(t, time.Now().UnixMilli(), generation, 60_000, "%q", plant)
		take(t, c, "a")
	}
}
