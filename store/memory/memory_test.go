package memory

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tieredlimit/caddy-tieredlimit/store"
)

// monday is the first instant of a day.
var monday = time.Date(2026, time.January, 5, 0, 0, 0, 0, time.UTC)

// openMemory opens a stack; most 0 is the default bound, and name "" one that is new.
func openMemory(t testing.TB, most int64, name string, tiers ...store.TierSpec) *counters {
	t.Helper()
	m := &Memory{}
	if most > 0 {
		m.MaxKeys = &most
	}
	if name == "" {
		name = fmt.Sprint("test-", rand.Uint64())
	}
	opened, err := m.Open(store.StackSpec{Name: name, Tiers: tiers})
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, opened.Close()) })
	return opened.(*counters)
}

func perMinute(name string, count int64) store.TierSpec {
	return store.TierSpec{Name: name, Limits: []store.Limit{{Count: count, Window: time.Minute}}, Group: groupOf}
}

// groups are the groups of identities that have one other than 0.
var groups sync.Map

func groupOf(identity []byte) uint64 {
	group, _ := groups.Load(string(identity))
	known, _ := group.(uint64)
	return known
}

func forAll(name string, count int64) store.TierSpec {
	tier := perMinute(name, count)
	tier.Single = true
	return tier
}

// hit takes for one identity on the first tier, in a group.
func hit(t testing.TB, m *counters, now time.Time, identity string, group uint64) (bool, store.State) {
	t.Helper()
	if groups.Delete(identity); group != 0 {
		groups.Store(identity, group)
	}
	claims := []store.Claim{claimOf(m, 0, identity)}
	decision, err := m.Take(t.Context(), now, claims)
	require.NoError(t, err)
	return decision.RefusedBy < 0, seen(claims[0].States[0])
}

// claimOf asks for a hit.
func claimOf(m *counters, tier int, identity string) store.Claim {
	return store.Claim{Tier: tier, Identity: []byte(identity), Hits: 1, States: make([]store.State, m.tiers[tier].limits())}
}

// seen is a state without its window, which is the store's own.
func seen(state store.State) store.State {
	state.Window = 0
	return state
}

// usedOf are the hits used of all limits.
func usedOf(claims ...store.Claim) []int64 {
	var used []int64
	for _, claim := range claims {
		for _, state := range claim.States {
			used = append(used, state.Used)
		}
	}
	return used
}

func TestMemoryCaddyfile(t *testing.T) {
	for _, row := range []struct {
		text string
		want string // the store as JSON, or the error
		bad  bool
	}{
		{text: "memory", want: `{}`},
		{text: "memory {\n}", want: `{}`},
		{text: "memory {\nmax_keys 1\n}", want: `{"max_keys":1}`},
		{text: "memory {\nmax_keys 2147483647\n}", want: `{"max_keys":2147483647}`},
		{text: "memory fast", want: `unexpected argument "fast": store memory takes a block only`, bad: true},
		{text: "memory {\nmax_key 1\n}", want: `unknown option "max_key" of store memory: expected max_keys`, bad: true},
		{text: "memory {\nmax_keys\n}", want: `expected one count after max_keys`, bad: true},
		{text: "memory {\nmax_keys 1 2\n}", want: `expected one count after max_keys`, bad: true},
		{text: "memory {\nmax_keys 1 {\n}\n}", want: `unknown option "{" of store memory`, bad: true},
		{text: "memory {\nmax_keys 1\nmax_keys 2\n}", want: `max_keys is given twice`, bad: true},
		{text: "memory {\nmax_keys 0\n}", want: `max_keys 0 is not a whole number from 1 to 2147483647`, bad: true},
		{text: "memory {\nmax_keys -1\n}", want: `max_keys -1 is not`, bad: true},
		{text: "memory {\nmax_keys 2147483648\n}", want: `max_keys 2147483648 is not`, bad: true},
		{text: "memory {\nmax_keys 99999999999999999999\n}", want: `max_keys "99999999999999999999" is not`, bad: true},
		{text: "memory {\nmax_keys 1e3\n}", want: `max_keys "1e3" is not`, bad: true},
		{text: "memory {\nmax_keys 1.5\n}", want: `max_keys "1.5" is not`, bad: true},
		{text: "memory {\nmax_keys \"\"\n}", want: `max_keys "" is not`, bad: true},
	} {
		t.Run(row.text, func(t *testing.T) {
			d := caddyfile.NewTestDispenser(row.text)
			require.True(t, d.Next())
			store, err := caddyfile.UnmarshalModule(d, "http.tiered_limit.stores.memory")
			if row.bad {
				require.ErrorContains(t, err, row.want)
				assert.ErrorContains(t, err, "Testfile:", "the place")
				return
			}
			require.NoError(t, err)
			got, err := json.Marshal(store)
			require.NoError(t, err)
			assert.JSONEq(t, row.want, string(got))
		})
	}
}

func TestMemoryJSON(t *testing.T) {
	ctx, cancel := caddy.NewContext(caddy.Context{Context: t.Context()})
	defer cancel()
	for text, want := range map[string]string{
		`{}`:                            "",
		`{"max_keys": 1}`:               "",
		`{"max_keys": 2147483647}`:      "",
		`{"max_keys": null}`:            "",
		`{"max_keys": 0}`:               "max_keys 0 is not a whole number from 1 to 2147483647",
		`{"max_keys": -5}`:              "max_keys -5 is not",
		`{"max_keys": 2147483648}`:      "max_keys 2147483648 is not",
		`{"max_keys": 1.5}`:             "1.5",
		`{"max_keys": "1"}`:             "string",
		`{"max_keys": 1, "max_key": 1}`: "max_key",
	} {
		store, err := ctx.LoadModuleByID("http.tiered_limit.stores.memory", json.RawMessage(text))
		if want == "" {
			require.NoError(t, err, text)
			assert.IsType(t, &Memory{}, store)
			continue
		}
		assert.ErrorContains(t, err, want, text)
	}
}

func TestMemoryRefusesSpecs(t *testing.T) {
	limits := func(limits ...store.Limit) []store.TierSpec { return []store.TierSpec{{Name: "ip", Limits: limits}} }
	minute := store.Limit{Count: 1, Window: time.Minute}
	three := []store.TierSpec{perMinute("a", 1), perMinute("b", 1), perMinute("c", 1)}
	for want, tiers := range map[string][]store.TierSpec{
		`tier "ip" has no limit`:                                         limits(),
		`tier "ip" occurs twice`:                                         {perMinute("ip", 1), perMinute("ip", 2)},
		`tier "ip": count 0 is not from 1 to 2147483647`:                 limits(store.Limit{Count: 0, Window: time.Minute}),
		`tier "ip": count 2147483648 is not from 1 to 2147483647`:        limits(store.Limit{Count: 1 << 31, Window: time.Minute}),
		`tier "ip": window 1.0000001s is not a number of whole millisec`: limits(store.Limit{Count: 1, Window: time.Second + 100}),
		`tier "ip": window 0s is not a number of whole milliseconds`:     limits(store.Limit{Count: 1, Window: 0}),
		`tier "ip": window 1m0s occurs twice`:                            limits(minute, minute),
		`max_keys 2 cannot be shared out over 3 limits`:                  three,
	} {
		most, name := int64(2), fmt.Sprint("refused-", rand.Uint64())
		_, err := (&Memory{MaxKeys: &most}).Open(store.StackSpec{Name: name, Tiers: tiers})
		require.ErrorContains(t, err, want)
		require.ErrorContains(t, err, name)
		_, used := stacks.References(name)
		require.False(t, used, "a refused stack leaves something behind")
	}
}

func TestMemoryRefusesClaims(t *testing.T) {
	m := openMemory(t, 0, "", perMinute("ip", 5), perMinute("user", 5), forAll("global", 5))
	of := func(tier int, identity string) store.Claim { return claimOf(m, tier, identity) }
	hits := func(n int64) store.Claim { c := of(0, "a"); c.Hits = n; return c }
	counts := of(0, "a")
	counts.Counts = []int64{1, 2}
	for want, claims := range map[string][]store.Claim{
		"claim of tier 3 in a stack of 3":                {{Tier: 3}},
		"claim of tier -1 in a stack of 3":               {{Tier: -1}},
		"tier 1 is claimed twice, with another one betw": {of(1, "a"), of(0, "a"), of(1, "b")},
		"tier 1 is claimed twice for one identity":       {of(0, "a"), of(1, "a"), of(1, "b"), of(1, "a")},
		"tier 2 is claimed twice for one identity":       {of(2, "a"), of(2, "b")},
		"room for 0 states of the 1 limits of tier 0":    {{Tier: 0, Identity: []byte("a"), Hits: 1}},
		"-1 hits are claimed of tier 0":                  {hits(-1)},
		"2147483648 hits are claimed of tier 0":          {hits(1 << 31)},
		"2 counts for the 1 limits of tier 0":            {counts},
	} {
		_, err := m.Take(t.Context(), monday, claims)
		assert.ErrorContains(t, err, want)
		_, err = m.Peek(t.Context(), monday, claims)
		assert.ErrorContains(t, err, want)
	}
	assert.ErrorContains(t, m.Reset(t.Context(), monday, []store.Claim{{Tier: 7}}), "claim of tier 7")
	assert.ErrorContains(t, m.Settle(t.Context(), monday, []store.Claim{{Tier: 7}}), "claim of tier 7")
	assert.ErrorContains(t, m.Settle(t.Context(), monday, []store.Claim{hits(-1 << 31)}), "-2147483648 hits are claimed")
	assert.ErrorContains(t, m.Settle(t.Context(), monday, []store.Claim{{}}), "room for 0 states")
	assert.Zero(t, m.Tracked(), "a bad claim charged something")
	served, state := hit(t, m, monday, "a", math.MaxUint64)
	assert.True(t, served, "a bad claim left a lock behind")
	assert.Equal(t, int64(1), state.Used)
}

func TestMemoryForgetsAfterLastClose(t *testing.T) {
	name := fmt.Sprint("test-", rand.Uint64())
	for range 3 {
		opened, err := new(Memory).Open(store.StackSpec{Name: name, Tiers: []store.TierSpec{perMinute("ip", 1)}})
		require.NoError(t, err)
		m := opened.(*counters)
		served, _ := hit(t, m, monday, "a", 0)
		assert.True(t, served)
		served, _ = hit(t, m, monday, "a", 0)
		assert.False(t, served)
		require.NoError(t, m.Close())
		require.NoError(t, m.Close(), "returned once")
		_, used := stacks.References(name)
		assert.False(t, used)
	}
}

// A config that opens a stack and is then refused leaves nothing behind, neither limits nor tables.
func TestRefusedConfig(t *testing.T) {
	m := openMemory(t, 0, "", perMinute("ip", 3))
	for range 2 {
		hit(t, m, monday, "a", 0)
	}
	for i := range 20 {
		other := perMinute(fmt.Sprint("other-", i), 1)
		refused, err := new(Memory).Open(store.StackSpec{Name: m.name, Tiers: []store.TierSpec{perMinute("ip", 1), other}})
		require.NoError(t, err)
		require.NoError(t, refused.Close())
	}
	assert.Len(t, m.stack.tables, 1)
	served, state := hit(t, m, monday, "a", 0)
	assert.True(t, served)
	assert.Equal(t, int64(3), state.Used)
}

// Counters that no open handle uses are kept as long as their window lasts, then their table goes.
func TestMemoryKeepsUnusedTables(t *testing.T) {
	m := openMemory(t, 0, "", perMinute("ip", 9))
	reopen := func() *counters { return openMemory(t, 0, m.name, perMinute("user", 1)) }
	with := reopen()
	hit(t, with, monday, "u", 0)
	require.NoError(t, with.Close())
	with = reopen()
	served, _ := hit(t, with, monday, "u", 0)
	assert.False(t, served)
	hit(t, m, monday.Add(time.Hour), "a", 0)
	require.NoError(t, with.Close())
	assert.Len(t, m.stack.tables, 1)
}

func TestMemorySharesBoundOut(t *testing.T) {
	m := openMemory(t, 8, "", store.TierSpec{Name: "ip", Limits: []store.Limit{{Count: 1, Window: time.Minute}, {Count: 1, Window: time.Hour}}},
		forAll("global", 5), perMinute("user", 1))
	var most []int64
	for _, limit := range m.limits {
		most = append(most, limit.most)
	}
	assert.Equal(t, []int64{3, 3, math.MaxInt64, 2}, most)
}

func TestMemoryOverflow(t *testing.T) {
	m := openMemory(t, 2, "", perMinute("ip", 2))
	serve := func(now time.Time, identity string, group uint64) bool {
		served, _ := hit(t, m, now, identity, group)
		return served
	}
	for range 2 {
		require.True(t, serve(monday, "a", 1))
	}
	require.True(t, serve(monday, "b", 9))
	require.Equal(t, []int64{2, 0}, []int64{m.Tracked(), m.Overflowed()})

	assert.True(t, serve(monday, "c", 1))
	assert.True(t, serve(monday, "d", 1), "counted with c, up to the limit")
	assert.False(t, serve(monday, "c", 1), "nobody is unlimited")
	assert.False(t, serve(monday, "e", 1))
	assert.True(t, serve(monday, "f", 2), "a network that the flood does not use")
	assert.True(t, serve(monday, "g", math.MaxUint64))
	assert.False(t, serve(monday, "a", 1), "refused before, refused still")
	assert.True(t, serve(monday, "b", 9), "who has a counter keeps it")
	assert.False(t, serve(monday, "b", 9))
	assert.Equal(t, []int64{2, 4}, []int64{m.Tracked(), m.Overflowed()})

	require.NoError(t, m.Reset(t.Context(), monday, []store.Claim{{Identity: []byte("a")}}))
	assert.True(t, serve(monday, "a", 1), "reset")
	assert.False(t, serve(monday, "c", 1), "the group is not touched")

	next := monday.Add(time.Minute)
	assert.True(t, serve(next, "c", 3))
	assert.True(t, serve(next, "e", 4))
	assert.Equal(t, int64(2), m.Tracked())
	assert.True(t, serve(next, "a", 1), "the groups belong to a window too")
	assert.True(t, serve(next, "a", 1))
	assert.False(t, serve(next, "a", 1))
}

func TestMemoryOtherBound(t *testing.T) {
	small := openMemory(t, 2, "", perMinute("ip", 1))
	large := openMemory(t, 4, small.name, perMinute("ip", 1))
	for i := range 4 {
		served, _ := hit(t, large, monday, fmt.Sprint("client-", i), uint64(i))
		assert.True(t, served)
	}
	served, _ := hit(t, small, monday, "client-9", 7)
	assert.True(t, served, "there is no room for the small one, and its group is unused")
	assert.Equal(t, []int64{4, 1}, []int64{small.Tracked(), small.Overflowed()})
	served, _ = hit(t, small, monday, "client-3", 7)
	assert.False(t, served, "the counter is there under either bound")
}

// A tier that gets or loses its single bucket has another key, and starts anew.
func TestMemorySingleChanges(t *testing.T) {
	m := openMemory(t, 0, "", forAll("ip", 1))
	hit(t, m, monday, "", 0)
	served, _ := hit(t, openMemory(t, 0, m.name, perMinute("ip", 1)), monday, "", 0)
	assert.True(t, served)
}

// One network takes at most a quarter of the counters, so that others still get one each when it is full of clients.
func TestMemoryANetworkTakesAQuarter(t *testing.T) {
	const most = 4000
	m := openMemory(t, most, "", perMinute("ip", 3))
	served := 0
	for i := range 10 * most {
		if ok, _ := hit(t, m, monday, fmt.Sprint("flood-", i), 1); ok {
			served++
		}
	}
	assert.Equal(t, most/4+3, served, "a counter each for a quarter, and the group's")
	assert.Equal(t, int64(most/4), m.Tracked())
	for i := range 200 {
		for range 3 {
			ok, _ := hit(t, m, monday, fmt.Sprint("honest-", i), 2)
			assert.True(t, ok, "client %d of a network that the flood does not use", i)
		}
		ok, _ := hit(t, m, monday, fmt.Sprint("honest-", i), 2)
		assert.False(t, ok, "client %d has a limit of its own", i)
	}
	ok, _ := hit(t, m, monday, "flood-0", 1)
	assert.True(t, ok, "who has a counter keeps it")

	next := monday.Add(time.Minute)
	for i := range most / 4 {
		ok, _ = hit(t, m, next, fmt.Sprint("flood-", i+most), 1)
		require.True(t, ok, "shares belong to a window")
	}
	assert.Equal(t, int64(most/4), m.Tracked())
}

// Where so few counters are left that a quarter is none, a network gets one.
func TestMemoryShareIsAtLeastOne(t *testing.T) {
	for most, want := range map[int64]int64{1: 1, 3: 1, 4: 1, 7: 1, 8: 2, 1000: 250, math.MaxInt32: math.MaxInt32 / 4} {
		assert.Equal(t, want, mostShare(most))
	}
}

// The bound holds exactly, whoever comes first, and clients beyond it are held to their group's counter.
func TestMemoryBoundConcurrently(t *testing.T) {
	const most, each = 1000, 500
	m := openMemory(t, most, "", perMinute("ip", 1))
	var served atomic.Int64
	var group sync.WaitGroup
	for g := range 8 {
		group.Go(func() {
			for i := range each {
				if ok, _ := hit(t, m, monday, fmt.Sprint(g, "-", i), uint64(i%5)); ok {
					served.Add(1)
				}
			}
		})
	}
	group.Wait()
	assert.Equal(t, int64(most), m.Tracked())
	assert.Equal(t, int64(5), m.Overflowed())
	assert.Equal(t, int64(most+5), served.Load())
}

// If the last room goes to somebody else between the decision and the charge, nothing is charged, and it is decided
// again.
func TestMemoryRoomIsLost(t *testing.T) {
	m := openMemory(t, 2, "", perMinute("ip", 1), perMinute("user", 1))
	claims := []store.Claim{claimOf(m, 0, "a"), claimOf(m, 1, "u")}
	p := make([]probe, len(m.limits))
	for i := range claims {
		require.NoError(t, m.claim(p, claims, i))
	}
	m.hold(p, claims, monday.UnixMilli(), false)
	require.Equal(t, -1, m.judge(p, claims))
	users := m.limits[1].table
	require.True(t, users.reserve(0, p[1].end, 1))
	assert.False(t, m.charge(p, claims, -1))
	m.unlock(p)
	assert.Zero(t, m.limits[0].table.live.Load(), "the room for the first tier was not given back")
	decision, err := m.Take(t.Context(), monday, claims)
	require.NoError(t, err)
	assert.Equal(t, -1, decision.RefusedBy)
	assert.Equal(t, []int64{1, 1}, usedOf(claims...))
	assert.Equal(t, []int64{2, 1}, []int64{m.Tracked(), m.Overflowed()})
}

// A caller whose clock is behind a window that has begun counts in that one, and is told of no time longer than it.
func TestMemoryIsLate(t *testing.T) {
	for name, ahead := range map[string]func(*table){
		"one for all": func(t *table) { t.bucket.end += time.Hour.Milliseconds() },
		"one for each": func(t *table) {
			for i := range t.shards {
				t.shards[i].end += time.Hour.Milliseconds()
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			m := openMemory(t, 0, "", map[string]store.TierSpec{
				"one for all": forAll("global", 5), "one for each": perMinute("ip", 5),
			}[name])
			hit(t, m, monday, "", 0)
			ahead(m.limits[0].table)
			_, state := hit(t, m, monday, "", 0)
			assert.Equal(t, store.State{Used: 2, ResetAfter: time.Minute}, state)
		})
	}
}

func TestManyClients(t *testing.T) {
	m := openMemory(t, 0, "", perMinute("ip", 1_000_000))
	before := heap()
	for i := range 10_000 {
		hit(t, m, monday, fmt.Sprint("client-", i), 0)
	}
	grown := int64(heap()) - int64(before)
	assert.Less(t, grown, int64(1<<20))
	assert.Equal(t, int64(10_000), m.Tracked())
}

func TestFlood(t *testing.T) {
	most, flood := int64(100_000), 2_000_000
	if testing.Short() {
		most, flood = 10_000, 200_000
	}
	tier := perMinute("ip", 5)
	tier.Group = func(identity []byte) uint64 {
		if len(identity) == 16 {
			return 2 + binary.BigEndian.Uint64(identity)%1000
		}
		return groupOf(identity)
	}
	m := openMemory(t, most, "", tier)
	for range 6 {
		hit(t, m, monday, "greedy", 1)
	}
	var settled uint64
	claims := []store.Claim{claimOf(m, 0, string(make([]byte, 16)))}
	for n := range flood {
		identity := claims[0].Identity
		benchClient(uint64(n), identity[:8], identity[8:])
		_, err := m.Take(t.Context(), monday, claims)
		require.NoError(t, err)
		if n == flood/10 {
			settled = heap()
		}
	}
	assert.InEpsilon(t, settled, heap(), 0.1, "memory is flat")
	assert.Equal(t, most, m.Tracked())
	served, _ := hit(t, m, monday, "greedy", 1)
	assert.False(t, served, "over its limit before the flood")
	served, _ = hit(t, m, monday, "honest", 70_000)
	assert.True(t, served, "new, from a network that the flood does not use")
	served, _ = hit(t, m, monday, "flooder", 2)
	assert.False(t, served)
}

// The arrays of a flood are given back once later windows do not need them.
func TestMemoryShrinks(t *testing.T) {
	m := openMemory(t, 0, "", perMinute("ip", 5))
	cells := func() (sum int) {
		for i := range m.limits[0].table.shards {
			sum += len(m.limits[0].table.shards[i].cells)
		}
		return sum
	}
	visit := func(clients int, now time.Time) {
		for i := range clients {
			hit(t, m, now, fmt.Sprint("client-", i), 0)
		}
	}
	visit(100_000, monday)
	full := cells()
	visit(1000, monday.Add(time.Minute))
	assert.Equal(t, full, cells(), "kept for another window like the last")
	visit(1000, monday.Add(2*time.Minute))
	assert.Less(t, cells(), full/20)
	visit(1000, monday.Add(3*time.Minute))
	assert.Equal(t, int64(1000), m.Tracked())
}

// A shard tells its windows apart by a number that comes round some day.
func TestShardGenerationComesRound(t *testing.T) {
	s := &shard{gen: math.MaxUint32, end: 10}
	s.insert(7).count = 3
	s.cells[1] = cell{fingerprint: 9, count: 4, gen: 1}
	s.turn(10, 10)
	assert.Nil(t, s.find(7))
	assert.Nil(t, s.find(9), "left by the first generation")
	assert.Equal(t, uint32(1), s.gen)
	assert.Equal(t, int64(20), s.end)
}

// Fingerprints at the edges of the range find their place, and every one is found again.
func TestShardFinds(t *testing.T) {
	s := &shard{gen: 1}
	want := map[uint64]uint32{}
	fingerprints := []uint64{0, 1, math.MaxUint64, math.MaxUint64 - 1, 1 << 63, 1<<63 - 1}
	for i := range uint64(2000) {
		fingerprints = append(fingerprints, rand.Uint64(), math.MaxUint64-2-i)
	}
	for i, fingerprint := range fingerprints {
		require.Nil(t, s.find(fingerprint))
		s.insert(fingerprint).count = uint32(i)
		want[fingerprint] = uint32(i)
	}
	for fingerprint, count := range want {
		require.NotNil(t, s.find(fingerprint))
		require.Equal(t, count, s.find(fingerprint).count)
	}
	assert.Equal(t, len(want), int(s.live))
}

func TestWindowBoundaries(t *testing.T) {
	const goroutines, takes, windows, limit = 1000, 200, 200, 100
	window := 10 * time.Millisecond
	m := openMemory(t, 0, "", store.TierSpec{Name: "ip", Limits: []store.Limit{{Count: limit / 4, Window: window}, {Count: 1 << 30, Window: time.Hour}}},
		store.TierSpec{Name: "global", Limits: []store.Limit{{Count: limit, Window: window}}, Single: true})
	var asked, admitted atomic.Int64
	var served [2 * windows]atomic.Int64
	var group sync.WaitGroup
	for g := range goroutines {
		group.Go(func() {
			claims := []store.Claim{claimOf(m, 0, fmt.Sprint(g%8)), claimOf(m, 1, "")}
			last := &claims[1].States[0]
			var end time.Time
			var used int64
			for range takes {
				passed := asked.Add(1) * windows / (goroutines * takes)
				now := monday.Add(time.Duration(passed) * window).Add(time.Duration(rand.IntN(9)) * time.Millisecond)
				runtime.Gosched()
				decision, err := m.Take(t.Context(), now, claims)
				if !assert.NoError(t, err) {
					return
				}
				ends := decision.Now.Add(last.ResetAfter)
				if !assert.True(t, last.ResetAfter > 0 && last.ResetAfter <= window, "%s left", last.ResetAfter) ||
					ends.Equal(end) && !assert.GreaterOrEqual(t, last.Used, used, "a count fell") {
					return
				}
				end, used = ends, last.Used
				if decision.RefusedBy < 0 {
					served[end.Sub(monday)/window].Add(1)
					admitted.Add(1)
				}
			}
		})
	}
	group.Wait()
	for i := range served {
		assert.LessOrEqual(t, served[i].Load(), int64(limit), "window %d", i)
	}
	assert.LessOrEqual(t, admitted.Load(), int64((windows+1)*limit))
	assert.Greater(t, admitted.Load(), int64(windows*limit*3/4))
}

// A clock set back, with callers that are slow to use the time that they read.
func TestConcurrentStepBack(t *testing.T) {
	const limit = 500
	for range 20 {
		m := openMemory(t, 0, "", perMinute("ip", limit))
		var now atomic.Int64
		now.Store(monday.Add(20 * time.Second).UnixMilli())
		var served, asked atomic.Int64
		var group sync.WaitGroup
		for range 8 {
			group.Go(func() {
				for range 500 {
					if asked.Add(1) == 2000 {
						now.Add(-time.Hour.Milliseconds())
					}
					read := now.Load()
					runtime.Gosched()
					if ok, _ := hit(t, m, time.UnixMilli(read), "a", 0); ok {
						served.Add(1)
					}
				}
			})
		}
		group.Wait()
		require.Equal(t, int64(limit), served.Load())
	}
}

// Handles with other orders of the same tiers, some of them single, keep out of each other's way.
func TestMemoryOrdersDoNotDeadlock(t *testing.T) {
	tiers := []store.TierSpec{forAll("global", 1<<30), perMinute("ip", 1<<30), forAll("all", 1<<30), perMinute("user", 1<<30)}
	tiers[1].Limits = append(tiers[1].Limits, store.Limit{Count: 1 << 30, Window: time.Hour})
	first := openMemory(t, 0, "", tiers...)
	handles := []*counters{first}
	for range 7 {
		rand.Shuffle(len(tiers), func(i, j int) { tiers[i], tiers[j] = tiers[j], tiers[i] })
		handles = append(handles, openMemory(t, 0, first.name, tiers...))
	}
	const takes = 2000
	var group sync.WaitGroup
	for _, h := range handles {
		group.Go(func() {
			for i := range takes {
				order := rand.Perm(4)
				var claims []store.Claim
				for _, tier := range order {
					claims = append(claims, claimOf(h, tier, string([]byte{byte(i % 3)})))
					if !h.tiers[tier].single {
						claims = append(claims, claimOf(h, tier, string([]byte{byte(i%3) + 10})), claimOf(h, tier, "x"))
					}
				}
				decision, err := h.Take(t.Context(), monday, claims)
				if !assert.NoError(t, err) || !assert.Equal(t, -1, decision.RefusedBy) {
					return
				}
			}
		})
	}
	group.Wait()
	for i := range 6 {
		id := string([]byte{byte(i%3 + i/3*10)})
		claims := []store.Claim{claimOf(first, 0, ""), claimOf(first, 1, id), claimOf(first, 2, ""), claimOf(first, 3, id)}
		_, err := first.Peek(t.Context(), monday, claims)
		require.NoError(t, err)
		each := int64(len(handles)) * int64((takes+2-i%3)/3)
		assert.Equal(t, []int64{takes * 8, each, each, takes * 8, each}, usedOf(claims...))
	}
}

// A count stops at the limit, also at the greatest there is.
func TestMemoryGreatestCount(t *testing.T) {
	m := openMemory(t, 0, "", perMinute("ip", math.MaxInt32))
	hit(t, m, monday, "a", 0)
	shard := &m.limits[0].table.shards[0]
	for i := range m.limits[0].table.shards {
		if s := &m.limits[0].table.shards[i]; s.live > 0 {
			shard = s
		}
	}
	for i := range shard.cells {
		if shard.cells[i].gen == shard.gen {
			shard.cells[i].count = math.MaxInt32 - 1
		}
	}
	served, state := hit(t, m, monday, "a", 0)
	assert.True(t, served)
	assert.Equal(t, store.State{Used: math.MaxInt32, ResetAfter: time.Minute}, state)
	served, state = hit(t, m, monday, "a", 0)
	assert.False(t, served)
	assert.Equal(t, store.State{Used: math.MaxInt32, ResetAfter: time.Minute, RetryAfter: time.Minute, Exceeded: true}, state)
}

func TestMemoryDecidesWithoutAllocating(t *testing.T) {
	for tiers := 1; tiers <= manyLimits; tiers++ {
		var specs []store.TierSpec
		var claims []store.Claim
		for i := range tiers {
			tier := perMinute(fmt.Sprint("tier-", i), 50)
			tier.Single = i%4 == 3
			specs = append(specs, tier)
		}
		m := openMemory(t, 0, "", specs...)
		for i := range tiers {
			claims = append(claims, claimOf(m, i, "someone"))
		}
		now := monday
		_, err := m.Take(t.Context(), now, claims)
		require.NoError(t, err)
		allocations := testing.AllocsPerRun(200, func() {
			now = now.Add(time.Second)
			_, _ = m.Take(t.Context(), now, claims)
			_, _ = m.Peek(t.Context(), now, claims)
			_ = m.Settle(t.Context(), now, claims)
		})
		assert.Zero(t, allocations, "%d tiers", tiers)
	}
}

// More limits than fit on the stack of a goroutine are decided alike.
func TestMemoryManyLimits(t *testing.T) {
	var specs []store.TierSpec
	var claims []store.Claim
	for i := range 3 * manyLimits {
		specs = append(specs, perMinute(fmt.Sprint("tier-", i), int64(1+i)))
	}
	specs[0].DryRun = true
	m := openMemory(t, 0, "", specs...)
	for i := range specs {
		claims = append(claims, claimOf(m, i, "someone"))
	}
	for i, want := range []int{-1, -1, 1, 1} {
		decision, err := m.Take(t.Context(), monday, claims)
		require.NoError(t, err)
		assert.Equal(t, want, decision.RefusedBy, "take %d", i)
	}
	assert.Equal(t, int64(2), claims[len(claims)-1].States[0].Used)
}
