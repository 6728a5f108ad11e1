package redis

import (
	"context"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/tieredlimit/caddy-tieredlimit/internal/redistest"

	"github.com/tieredlimit/caddy-tieredlimit/store"
	"github.com/tieredlimit/caddy-tieredlimit/store/memory"
)

// bareScript is the least that a limiter on Redis does.
var bareScript = newScript(`
	local n = redis.call('INCR', KEYS[1])
	redis.call('PEXPIRE', KEYS[1], ARGV[1])
	return n`)

const (
	benchCallers = 64
	benchRounds  = 7
	benchOps     = 20_000
	benchClients = 10_000
)

// testRate calls f from many goroutines, and returns how often it was called in a second.
func testRate(callers, ops int, f func(n int)) float64 {
	var wait sync.WaitGroup
	begin := time.Now()
	for caller := range callers {
		wait.Go(func() {
			for n := caller; n < ops; n += callers {
				f(n)
			}
		})
	}
	wait.Wait()
	return float64(ops) / time.Since(begin).Seconds()
}

func median(values []float64) float64 {
	slices.Sort(values)
	return values[len(values)/2]
}

// clientCPU is the seconds of processor time that this process has used.
func clientCPU() float64 {
	var usage syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &usage)
	return float64(usage.Utime.Nano()+usage.Stime.Nano()) / 1e9
}

// serverCPU is the seconds of processor time that a server has used.
func serverCPU(s *redistest.Server) float64 {
	var sum float64
	for _, line := range strings.Split(s.Do("INFO", "cpu").(string), "\r\n") {
		name, value, _ := strings.Cut(line, ":")
		if name == "used_cpu_sys" || name == "used_cpu_user" {
			seconds, _ := strconv.ParseFloat(value, 64)
			sum += seconds
		}
	}
	return sum
}

// identities are made before the clock runs.
func identities(count int) [][]byte {
	all := make([][]byte, count)
	for i := range all {
		all[i] = strconv.AppendInt([]byte("198.51.100."), int64(i), 10)
	}
	return all
}

// BenchmarkAgainstBare compares decisions with a bare script of INCR and PEXPIRE, in turns in one run, through the
// same client.
func BenchmarkAgainstBare(b *testing.B) {
	server := redistest.Start(b)
	hour := time.Hour
	one := replica(b, named(stackOf(plainTier("ip", 1<<30, hour)), "one"), on(server))
	three := one.sibling(b, named(stackOf(plainTier("ip", 1<<30, hour), plainTier("user", 1<<30, hour),
		store.TierSpec{Name: "global", Limits: []store.Limit{{Count: 1 << 30, Window: hour}}, Single: true}), "three"))
	connect(b, one)
	who := identities(benchClients)
	client := *one.link.client.Load()
	decide := func(c *counters, tiers int) func(int) {
		return func(n int) {
			claims := threeClaims(who[n%benchClients])
			if _, err := c.Take(context.Background(), time.Time{}, claims[:tiers]); err != nil {
				b.Error(err)
			}
		}
	}
	contenders := []struct {
		name string
		call func(int)
	}{
		{"bare", func(n int) {
			keys := []string{"bare:" + strconv.Itoa(n%benchClients)}
			if err := bareScript.run(context.Background(), client, keys, "60000").Error(); err != nil {
				b.Error(err)
			}
		}},
		{"one tier", decide(one, 1)},
		{"three tiers", decide(three, 3)},
	}
	for b.Loop() {
		for _, callers := range []int{benchCallers, 1} {
			ops := benchOps*callers/benchCallers + 2000
			var rates, ratios, clients, servers [3][]float64
			for range benchRounds {
				for i, c := range contenders {
					client, remote := clientCPU(), serverCPU(server)
					rates[i] = append(rates[i], testRate(callers, ops, c.call))
					clients[i] = append(clients[i], 1e6*(clientCPU()-client)/float64(ops))
					servers[i] = append(servers[i], 1e6*(serverCPU(server)-remote)/float64(ops))
					last := len(rates[i]) - 1
					ratios[i] = append(ratios[i], rates[i][last]/rates[0][last])
				}
			}
			for i, c := range contenders {
				b.Logf("%2d callers, %-11s %8.0f/s, %.2f of bare; CPU us: client %.1f, server %.1f", callers, c.name,
					median(rates[i]), median(ratios[i]), median(clients[i]), median(servers[i]))
			}
		}
	}
}

// sibling is another stack on the same connection.
func (c *counters) sibling(b *testing.B, spec store.StackSpec) *counters {
	s := newCounters(c.keys, spec)
	s.onError, s.link = c.onError, c.link
	s.stack = c.link.stack(c.keys.stack(spec.Name))
	b.Cleanup(s.stack.leave)
	return s
}

// BenchmarkRefusedAgain compares a refusal from memory with one by the memory store, in turns in one run.
func BenchmarkRefusedAgain(b *testing.B) {
	server := redistest.Start(b)
	for _, clients := range []int{1, 10_000} {
		spec := stackOf(plainTier("ip", 1<<30, day), plainTier("user", 1, day),
			store.TierSpec{Name: "global", Limits: []store.Limit{{Count: 1 << 30, Window: day}}, Single: true})
		spec = named(spec, "refused"+strconv.Itoa(clients))
		c := replica(b, spec, on(server))
		frozen := monotonic()
		c.clock = func() time.Duration { monotonic(); return frozen } // nothing is asked again while this runs
		inMemory, err := new(memory.Memory).Open(spec)
		require.NoError(b, err)
		who := identities(clients)
		now := time.Now()
		refused := func(counters store.Counters) func(int) {
			return func(n int) {
				claims := threeClaims(who[n%clients])
				if _, err := counters.Take(context.Background(), now, claims[:]); err != nil {
					b.Error(err)
				}
			}
		}
		for range 2 {
			testRate(8, clients, refused(c))
			testRate(8, clients, refused(inMemory))
		}
		// Rounds are short, and the best ones count, so that what else the machine does matters little.
		ours, theirs := math.Inf(1), math.Inf(1)
		for range 20 * benchRounds {
			ours = min(ours, 1e9/testRate(1, 20_000, refused(c)))
			theirs = min(theirs, 1e9/testRate(1, 20_000, refused(inMemory)))
		}
		b.Logf("%5d clients: remembered %.0f ns, memory store %.0f ns, ratio %.2f", clients, ours, theirs, ours/theirs)
		b.ReportMetric(ours/theirs, "of-memory-"+strconv.Itoa(clients))
		b.ReportMetric(testing.AllocsPerRun(1000, func() { refused(c)(0) }), "allocs-"+strconv.Itoa(clients))
		require.NoError(b, inMemory.Close())
	}
	for b.Loop() {
	}
}

// BenchmarkTake is one decision of three tiers, for profiles and allocations.
func BenchmarkTake(b *testing.B) {
	server := redistest.Start(b)
	c := replica(b, stackOf(plainTier("ip", 1<<30, day), plainTier("user", 1<<30, day),
		store.TierSpec{Name: "global", Limits: []store.Limit{{Count: 1 << 30, Window: day}}, Single: true}), on(server))
	who := identities(benchClients)
	b.ReportAllocs()
	b.SetParallelism(benchCallers / 2)
	b.RunParallel(func(pb *testing.PB) {
		for n := 0; pb.Next(); n++ {
			claims := threeClaims(who[n%benchClients])
			if _, err := c.Take(context.Background(), time.Time{}, claims[:]); err != nil {
				b.Error(err)
			}
		}
	})
}

// BenchmarkGuard compares decisions over a guarded connection with those over a bare one, by 64 callers, in rounds that take
// turns: how many there are in a second, and what processor time they cost this process.
func BenchmarkGuard(b *testing.B) {
	server := redistest.Start(b)
	spec := stackOf(plainTier("ip", 1<<30, day), plainTier("user", 1<<30, day),
		store.TierSpec{Name: "global", Limits: []store.Limit{{Count: 1 << 30, Window: day}}, Single: true})
	guarded, bare := replica(b, spec, on(server)), replica(b, spec, on(server))
	connect(b, guarded)
	plain, err := rueidis.NewClient(bare.link.setup.option)
	require.NoError(b, err)
	bare.link.client.Store(&plain)
	who := identities(benchClients)
	decide := func(c *counters) func(int) {
		return func(n int) {
			claims := threeClaims(who[n%benchClients])
			if _, err := c.Take(context.Background(), time.Now(), claims[:]); err != nil {
				b.Error(err)
			}
		}
	}
	const ops = 40_000
	var ratios, times []float64
	for range 21 {
		began := clientCPU()
		with := testRate(64, ops, decide(guarded))
		between := clientCPU()
		without := testRate(64, ops, decide(bare))
		ratios = append(ratios, with/without)
		times = append(times, (between-began)/(clientCPU()-between))
	}
	slices.Sort(ratios)
	for b.Loop() {
	}
	b.ReportMetric(ratios[len(ratios)/2], "of-bare")
	b.ReportMetric(ratios[len(ratios)/4], "of-bare-lower-quartile")
	b.ReportMetric(median(times), "cpu-of-bare")
}

// threeClaims are a client's of three tiers with one limit each, the last of which has one bucket for everybody.
func threeClaims(who []byte) [3]store.Claim {
	states := make([]store.State, 3)
	return [3]store.Claim{
		{Tier: 0, Identity: who, Hits: 1, States: states[0:1:1]},
		{Tier: 1, Identity: who, Hits: 1, States: states[1:2:2]},
		{Tier: 2, Identity: []byte("all"), Hits: 1, States: states[2:3:3]},
	}
}
