package redis

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/tieredlimit/caddy-tieredlimit/internal/redistest"

	"github.com/tieredlimit/caddy-tieredlimit/store"
)

// faulty are settings for tests in which the server fails: little patience, but enough for a busy machine.
func faulty(addr string) map[string]any {
	return map[string]any{"address": []string{addr}, "timeout": "300ms"}
}

// observed is a replica whose log is kept.
func observed(t testing.TB, spec store.StackSpec, settings map[string]any) (*counters, *observer.ObservedLogs) {
	t.Helper()
	c := replica(t, spec, settings)
	core, logs := observer.New(zapcore.DebugLevel)
	c.link.logger.Store(zap.New(core))
	return c, logs
}

// connect connects a replica before its deadline counts.
func connect(t testing.TB, c *counters) {
	t.Helper()
	c.Connect()
	require.True(t, redistest.Await(func() bool { return c.link.client.Load() != nil }))
}

// storm sends decisions from several goroutines until it is stopped. Identities change as it goes on, so that there is
// always one with something left; each may be served stormLimit times.
type storm struct {
	t        testing.TB
	stopped  atomic.Bool
	wait     sync.WaitGroup
	sequence atomic.Int64

	served, refused, unavailable, wrong, slowest atomic.Int64

	each []stormIdentity
}

type stormIdentity struct{ served, tried atomic.Int64 }

const (
	stormLimit      = 3
	stormIdentities = 1 << 16
	stormWorkers    = 8
)

// stormSpec is what a storm is limited by.
func stormSpec() store.StackSpec {
	return stackOf(plainTier("user", stormLimit, 7*day), plainTier("global", 1<<30, 7*day))
}

func newStorm(t testing.TB, counters ...store.Counters) *storm {
	s := &storm{t: t, each: make([]stormIdentity, stormIdentities)}
	for worker := range stormWorkers {
		s.wait.Go(func() {
			for !s.stopped.Load() {
				s.one(counters[worker%len(counters)])
			}
		})
	}
	t.Cleanup(s.stop)
	return s
}

func (s *storm) stop() {
	s.stopped.Store(true)
	s.wait.Wait()
}

func (s *storm) one(c store.Counters) {
	n := s.sequence.Add(1)
	who := int((n/(2*stormLimit) + n%7) % stormIdentities)
	s.each[who].tried.Add(1)
	begin := time.Now()
	claims := claimsOf(strconv.Itoa(who), "all")
	d, err := c.Take(context.Background(), begin, claims)
	took := int64(time.Since(begin))
	for known := s.slowest.Load(); took > known && !s.slowest.CompareAndSwap(known, took); known = s.slowest.Load() {
	}
	var away *store.UnavailableError
	switch {
	case errors.As(err, &away) && !away.Serve && away.RetryAfter >= time.Second:
		s.unavailable.Add(1)
		// A dead store answers at once, and this loop should not take the machine from the others.
		<-time.After(time.Millisecond)
	case err != nil:
		s.wrong.Add(1)
		s.t.Errorf("storm: %v", err)
	case d.RefusedBy < 0:
		s.served.Add(1)
		s.each[who].served.Add(1)
	default:
		s.refused.Add(1)
	}
}

// awaitServed waits until so many more are served.
func (s *storm) awaitServed(more int64) {
	s.t.Helper()
	from := s.served.Load()
	if !redistest.Await(func() bool { return s.served.Load() >= from+more }) {
		s.t.Fatalf("nothing is served; %s", s)
	}
}

func (s *storm) String() string {
	return fmt.Sprintf("%d served, %d refused, %d unavailable, slowest %v", s.served.Load(), s.refused.Load(),
		s.unavailable.Load(), time.Duration(s.slowest.Load()).Round(time.Millisecond))
}

// check tells whether anybody was served more often than the limit says, times the lives of the server's memory.
func (s *storm) check(lives int64) {
	s.t.Helper()
	var most, over int64
	for i := range s.each {
		served := s.each[i].served.Load()
		most = max(most, served)
		over += max(0, served-stormLimit)
	}
	assert.LessOrEqual(s.t, most, lives*stormLimit, "served one identity beyond the limit")
	assert.Zero(s.t, s.wrong.Load())
	s.t.Logf("%s; beyond the limit: %d", s, over)
}

// fault is a way in which a server can fail.
type fault struct {
	name  string
	args  []string
	lives int64 // of the server's memory
	fail  func(*redistest.Server, *redistest.Proxy)
	heal  func(*redistest.Server, *redistest.Proxy)
}

// config is a setting of the server's that makes it fail, and the one that heals it.
func config(name, bad, good string) (fail, heal func(*redistest.Server, *redistest.Proxy)) {
	return func(s *redistest.Server, _ *redistest.Proxy) { s.Do("CONFIG", "SET", name, bad) },
		func(s *redistest.Server, _ *redistest.Proxy) { s.Do("CONFIG", "SET", name, good) }
}

func faults() []fault {
	kill := func(s *redistest.Server, _ *redistest.Proxy) { s.Kill() }
	run := func(s *redistest.Server, _ *redistest.Proxy) { s.Run() }
	all := []fault{
		{name: "killed without persistence", lives: 2, fail: kill, heal: run},
		{
			name: "killed with appendfsync always", args: []string{"--appendonly", "yes", "--appendfsync", "always"},
			lives: 1, fail: kill, heal: run,
		},
		{
			name: "paused", lives: 1,
			fail: func(s *redistest.Server, _ *redistest.Proxy) { s.Pause() },
			heal: func(s *redistest.Server, _ *redistest.Proxy) { s.Continue() },
		},
		{
			name: "read only", lives: 1,
			fail: func(s *redistest.Server, _ *redistest.Proxy) { s.Do("REPLICAOF", "127.0.0.1", "1") },
			heal: func(s *redistest.Server, _ *redistest.Proxy) { s.Do("REPLICAOF", "NO", "ONE") },
		},
		{
			name: "replies lost after the commit", lives: 1,
			fail: func(_ *redistest.Server, p *redistest.Proxy) { p.Mute(true) },
			heal: func(_ *redistest.Server, p *redistest.Proxy) { p.Mute(false); p.Reset() },
		},
		{
			name: "connections reset", lives: 1,
			fail: func(_ *redistest.Server, p *redistest.Proxy) { p.Refuse(true); p.Reset() },
			heal: func(_ *redistest.Server, p *redistest.Proxy) { p.Refuse(false) },
		},
		{
			name: "password changed", lives: 1,
			fail: func(s *redistest.Server, p *redistest.Proxy) {
				s.Do("CONFIG", "SET", "requirepass", "other")
				s.With(redistest.Conn{Password: "other"})
				p.Reset()
			},
			heal: func(s *redistest.Server, _ *redistest.Proxy) {
				s.Do("CONFIG", "SET", "requirepass", "")
				s.With(redistest.Conn{})
			},
		},
	}
	for _, c := range []struct{ name, setting, bad, good string }{
		{"out of memory", "maxmemory", "1", "0"},
		{"too few replicas", "min-replicas-to-write", "1", "0"},
	} {
		f := fault{name: c.name, lives: 1}
		f.fail, f.heal = config(c.setting, c.bad, c.good)
		all = append(all, f)
	}
	return all
}

// TestFaults fails a server in every way under load, with on_error deny, and tells what came of it.
func TestFaults(t *testing.T) {
	for _, f := range faults() {
		t.Run(f.name, func(t *testing.T) {
			server := redistest.Start(t, f.args...)
			proxy := redistest.StartProxy(t, server.Addr())
			a, logA := observed(t, stormSpec(), faulty(proxy.Addr()))
			b, logB := observed(t, stormSpec(), faulty(proxy.Addr()))
			connect(t, a)
			connect(t, b)
			s := newStorm(t, a, b)
			s.awaitServed(200)
			for range 2 * stormLimit {
				take(t, a, "spent", "all")
			}
			f.fail(server, proxy)
			for _, c := range []*counters{a, b} {
				require.True(t, redistest.Await(func() bool { return !c.stack.breaker.allows() }), "the breaker stays closed")
			}
			quick(t, a)
			f.heal(server, proxy)
			back := time.Now()
			s.awaitServed(1)
			first := time.Since(back)
			require.True(t, redistest.Await(func() bool { return a.stack.breaker.allows() && b.stack.breaker.allows() }))
			recovery := time.Since(back)
			s.awaitServed(200)
			s.stop()
			s.check(f.lives)
			again := 0
			fresh := replica(t, stormSpec(), on(server))
			for range 2 * stormLimit {
				if by, _ := take(t, fresh, "spent", "all"); by < 0 {
					again++
				}
			}
			t.Logf("a client that had spent its %d was served %d more", stormLimit, again)
			assert.LessOrEqual(t, int64(again), (f.lives-1)*stormLimit)
			t.Logf("served again after %v, both instances after %v", first.Round(time.Millisecond),
				recovery.Round(time.Millisecond))
			assert.Less(t, s.slowest.Load(), int64(10*time.Second), "a request waited without end")
			for _, log := range []*observer.ObservedLogs{logA, logB} {
				told(t, log)
			}
		})
	}
}

// quick tells whether a request costs nothing while the breaker is open.
func quick(t *testing.T, c *counters) {
	t.Helper()
	const requests = 200
	begin := time.Now()
	for i := range requests {
		_, err := c.Take(context.Background(), begin, claimsOf(fmt.Sprint("quick", i), "all"))
		var away *store.UnavailableError
		require.ErrorAs(t, err, &away)
		require.False(t, away.Serve)
		require.GreaterOrEqual(t, away.RetryAfter, time.Second)
		require.LessOrEqual(t, away.RetryAfter, longestPause)
		require.Equal(t, "away", away.Kind)
	}
	t.Logf("a request costs %v while the breaker is open", time.Since(begin)/requests)
}

// told tells whether a log holds a warning for each time that the breaker opened and a notice for each time that it
// healed, with the number of decisions made without. On a slow machine a server that is only slow may open it again.
func told(t *testing.T, log *observer.ObservedLogs) {
	t.Helper()
	// A request may be let through a moment before the notice is written.
	redistest.Await(func() bool {
		return log.FilterLevelExact(zapcore.InfoLevel).Len() >= log.FilterLevelExact(zapcore.WarnLevel).Len()
	})
	var warnings, notices int
	for _, entry := range log.All() {
		switch entry.Level {
		case zapcore.WarnLevel:
			warnings++
			assert.NotEmpty(t, entry.ContextMap()["error"])
		case zapcore.InfoLevel:
			notices++
			assert.Positive(t, entry.ContextMap()["decisions_without"])
		default:
			t.Errorf("unexpected line: %v", entry)
		}
	}
	assert.Positive(t, warnings, "warnings")
	assert.Equal(t, warnings, notices, "notices")
}

func TestAbsentAtStart(t *testing.T) {
	server := redistest.New(t)
	c, log := observed(t, stormSpec(), faulty(server.Addr()))
	for i := range 20 {
		_, err := c.Take(context.Background(), time.Now(), claimsOf("a", "all"))
		var away *store.UnavailableError
		require.ErrorAs(t, err, &away, "request %d", i)
	}
	server.Run()
	back := time.Now()
	require.True(t, redistest.Await(c.stack.breaker.allows))
	t.Logf("healed after %v", time.Since(back).Round(time.Millisecond))
	by, _ := take(t, c, "a", "all")
	assert.Equal(t, -1, by)
	told(t, log)
	assert.Equal(t, int64(20), log.FilterLevelExact(zapcore.InfoLevel).All()[0].ContextMap()["decisions_without"])
}

func TestConnectTellsThatTheServerIsAway(t *testing.T) {
	server := redistest.New(t)
	c, log := observed(t, stormSpec(), faulty(server.Addr()))
	for range 10 {
		c.Connect()
	}
	require.True(t, redistest.Await(func() bool { return log.Len() == 1 }))
	assert.Equal(t, zapcore.WarnLevel, log.All()[0].Level)
	server.Run()
	require.True(t, redistest.Await(c.stack.breaker.allows))
	by, _ := take(t, c, "a", "all")
	assert.Equal(t, -1, by)
	assert.Equal(t, 2, log.Len(), "and that it is back, without having lost a request")
}

// TestSlowServerKeepsTheBreakerOpen tells whether a server that answers, but later than a decision waits, is left
// alone until it is quick again.
func TestSlowServerKeepsTheBreakerOpen(t *testing.T) {
	server := primed(t)
	proxy := redistest.StartProxy(t, server.Addr())
	c, log := observed(t, stormSpec(), faulty(proxy.Addr()))
	connect(t, c)
	take(t, c, "a", "all")
	proxy.Delay(2 * c.link.setup.timeout)
	for i := range mostFailures {
		_, err := c.Take(context.Background(), time.Now(), claimsOf(fmt.Sprint(i), "all"))
		var away *store.UnavailableError
		require.ErrorAs(t, err, &away)
		require.Equal(t, "timeout", away.Kind)
	}
	require.False(t, c.stack.breaker.allows())
	before := asked(t, server)
	server.Await(func() bool { return asked(t, server) >= before+6 })
	assert.False(t, c.stack.breaker.allows(), "after several probes that were answered too late")
	assert.Equal(t, 1, log.Len(), "it has opened once, and not healed: %v", log.All())
	quick(t, c)
	proxy.Delay(0)
	require.True(t, redistest.Await(c.stack.breaker.allows))
	by, _ := take(t, c, "b", "all")
	assert.Equal(t, -1, by)
	told(t, log)
}

func TestLoading(t *testing.T) {
	server := redistest.Start(t, "--key-load-delay", "300", "--loading-process-events-interval-bytes", "1024",
		"--enable-debug-command", "yes")
	c, log := observed(t, stormSpec(), faulty(server.Addr()))
	take(t, c, "a", "all")
	server.Do("DEBUG", "POPULATE", "3000", "filler", "100")
	server.Do("SAVE")
	server.Kill()
	server.Launch()
	server.Await(func() bool {
		_, err := server.Try("GET", "x")
		return err != nil && strings.HasPrefix(err.Error(), "LOADING")
	})
	seen := false
	for range 5 {
		_, err := c.Take(context.Background(), time.Now(), claimsOf("a", "all"))
		var away *store.UnavailableError
		if errors.As(err, &away) {
			seen = seen || strings.Contains(away.Error(), "LOADING")
		}
	}
	require.True(t, redistest.Await(func() bool { return log.FilterLevelExact(zapcore.InfoLevel).Len() == 1 }))
	assert.True(t, seen || strings.Contains(fmt.Sprint(log.All()), "LOADING"))
	by, states := take(t, c, "a", "all")
	assert.Equal(t, -1, by)
	assert.Equal(t, int64(2), states[0].Used, "what was saved is known again")
	told(t, log)
}

func TestScriptFlush(t *testing.T) {
	server := redistest.Start(t)
	a, logA := observed(t, stormSpec(), faulty(server.Addr()))
	b, logB := observed(t, stormSpec(), faulty(server.Addr()))
	s := newStorm(t, a, b)
	for range 20 {
		s.awaitServed(20)
		server.Do("SCRIPT", "FLUSH")
	}
	s.awaitServed(50)
	s.stop()
	s.check(1)
	assert.Zero(t, s.unavailable.Load())
	assert.Zero(t, logA.Len()+logB.Len())
}

func TestLostReplyIsChargedAtMostOnce(t *testing.T) {
	server := redistest.Start(t)
	proxy := redistest.StartProxy(t, server.Addr())
	c := replica(t, stackOf(plainTier("ip", 100, 7*day)), faulty(proxy.Addr()))
	take(t, c, "a")
	proxy.Mute(true)
	_, err := c.Take(context.Background(), time.Now(), claimsOf("a"))
	var away *store.UnavailableError
	require.ErrorAs(t, err, &away)
	assert.Equal(t, "timeout", away.Kind)
	proxy.Mute(false)
	proxy.Reset()
	var states []store.State
	require.True(t, redistest.Await(func() bool {
		claims := claimsOf("a")
		_, err := c.Peek(context.Background(), time.Now(), claims)
		states = claims[0].States
		return err == nil
	}))
	assert.Equal(t, int64(2), states[0].Used, "one before, and one whose reply was lost")
}

func TestOnErrorAllow(t *testing.T) {
	server := redistest.Start(t)
	c, log := observed(t, stackOf(plainTier("ip", 2, 7*day)), and(faulty(server.Addr()), "on_error", "allow"))
	for range 3 {
		take(t, c, "a")
	}
	server.Kill()
	for i := range 10 {
		_, err := c.Take(context.Background(), time.Now(), claimsOf(fmt.Sprint(i)))
		var away *store.UnavailableError
		require.ErrorAs(t, err, &away)
		assert.True(t, away.Serve)
	}
	by, _ := take(t, c, "a")
	assert.Equal(t, 0, by, "a refusal that is known stays one")
	server.Run()
	require.True(t, redistest.Await(c.stack.breaker.allows))
	told(t, log)
}

func TestOnErrorLocal(t *testing.T) {
	server := redistest.Start(t)
	checked := plainTier("ip", 5, 7*day)
	checked.Charge = store.ChargeChecked
	c, log := observed(t, stackOf(checked, plainTier("user", 3, 7*day)), and(faulty(server.Addr()), "on_error", "local"))
	for range 2 {
		take(t, c, "a", "u")
	}
	server.Kill()
	by, states := take(t, c, "a", "u")
	assert.Equal(t, -1, by, "the third")
	assert.Equal(t, int64(3), states[1].Used, "counted along while the server was there")
	by, _ = take(t, c, "a", "u")
	assert.Equal(t, 1, by, "the fourth is refused by user")
	by, states = take(t, c, "a", "v")
	assert.Equal(t, -1, by, "another user: the refused one spent the budget of ip up to 4")
	assert.Equal(t, int64(5), states[0].Used)
	by, _ = take(t, c, "a", "w")
	assert.Equal(t, 0, by, "ip is full")
	server.Run()
	require.True(t, redistest.Await(c.stack.breaker.allows))
	told(t, log)
	by, states = take(t, c, "a", "u")
	assert.Equal(t, -1, by, "the server has forgotten all, and is the one to ask")
	assert.Equal(t, int64(1), states[1].Used)
}

// TestLocalFollowsRefusals tells whether the local counters charge what the server has charged for a request that
// it refused, and no more.
func TestLocalFollowsRefusals(t *testing.T) {
	server := redistest.Start(t)
	checked := plainTier("ip", 9, 7*day)
	checked.Charge = store.ChargeChecked
	spec := stackOf(checked, plainTier("net", 9, 7*day), plainTier("user", 1, 7*day))
	c := replica(t, spec, and(faulty(server.Addr()), "on_error", "local"))
	for range 4 {
		take(t, c, "a", "n", "u")
	}
	_, remote := peek(t, c, "a", "n", "u")
	claims := claimsOf("a", "n", "u")
	_, err := c.local.counters.Peek(context.Background(), c.serverTime(time.Now()), claims)
	require.NoError(t, err)
	local := statesOf(claims)
	for i := range local {
		assert.Equal(t, remote[i].Used, local[i].Used, "limit %d", i)
	}
	assert.Equal(t, int64(4), local[0].Used)
}

func TestWrongPasswordIsNamedButNotShown(t *testing.T) {
	server := redistest.New(t, "--requirepass", "right-password").With(redistest.Conn{Password: "right-password"})
	server.Run()
	for name, settings := range map[string]map[string]any{
		"wrong": and(faulty(server.Addr()), "password", "hunter2-secret"),
		"none":  faulty(server.Addr()),
		"user":  and(and(faulty(server.Addr()), "password", "hunter2-secret"), "username", "nobody"),
	} {
		t.Run(name, func(t *testing.T) {
			c, log := observed(t, stormSpec(), settings)
			_, err := c.Take(context.Background(), time.Now(), claimsOf("a", "all"))
			var away *store.UnavailableError
			require.ErrorAs(t, err, &away)
			require.Equal(t, 1, log.Len())
			line := fmt.Sprint(log.All()[0].Message, log.All()[0].ContextMap())
			assert.Regexp(t, "WRONGPASS|NOAUTH", line)
			assert.Contains(t, line, server.Addr())
			assert.NotContains(t, line, "hunter2")
			assert.NotContains(t, away.Error(), "hunter2")
		})
	}
}

func TestCallerThatIsGoneIsNoFailure(t *testing.T) {
	server := redistest.Start(t)
	c, log := observed(t, stormSpec(), faulty(server.Addr()))
	gone, cancel := context.WithCancel(context.Background())
	cancel()
	for range 20 {
		_, err := c.Take(gone, time.Now(), claimsOf("a", "all"))
		assert.ErrorIs(t, err, context.Canceled)
	}
	by, states := take(t, c, "a", "all")
	assert.Equal(t, -1, by)
	assert.Equal(t, int64(1), states[0].Used)
	assert.Zero(t, log.Len())
}

// TestConnectsOnce checks that callers who find no client while one is being made do not have another made, which would
// end the first one under their commands.
func TestConnectsOnce(t *testing.T) {
	server := redistest.Start(t)
	c := replica(t, stackOf(plainTier("ip", 1000, day)), on(server))
	connect(t, c)
	first := c.link.client.Load()
	d, err := c.link.dial() // as by a caller who has looked for a client just before it was there
	require.NoError(t, err)
	<-d.done
	require.NoError(t, d.err)
	assert.Same(t, first, c.link.client.Load())

	for range 10 {
		c := replica(t, stackOf(plainTier("ip", 1000, day)), on(server))
		var wait sync.WaitGroup
		var failed atomic.Int64
		for range 100 {
			wait.Go(func() {
				if _, err := c.Take(context.Background(), time.Time{}, claimsOf("a")); err != nil {
					failed.Add(1)
				}
			})
		}
		wait.Wait()
		assert.Zero(t, failed.Load(), "decisions that failed while the connection was made")
	}
}
