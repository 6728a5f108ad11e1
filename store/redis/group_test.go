package redis

import (
	"context"
	"crypto/tls"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tieredlimit/caddy-tieredlimit/internal/redistest"

	"github.com/tieredlimit/caddy-tieredlimit/store"
)

// named is a stack with another name, and so with another slot in a cluster.
func named(spec store.StackSpec, name string) store.StackSpec {
	spec.Name = name
	return spec
}

func TestClusterDecidesInOneSlot(t *testing.T) {
	nodes := redistest.Cluster(t, 3)
	settings := map[string]any{"address": redistest.Addrs(nodes)[:1], "mode": "cluster", "timeout": "5s"}
	three := stackOf(plainTier("ip", 5, day), plainTier("user", 5, day), plainTier("global", 3, day))
	for i := range 20 {
		spec := named(three, fmt.Sprint("stack", i))
		a, b := replica(t, spec, settings), replica(t, spec, settings)
		served := 0
		for n := range 12 {
			if by, _ := take(t, []store.Counters{a, b}[n%2], "a", "u", "all"); by < 0 {
				served++
			} else {
				assert.Equal(t, 2, by)
			}
		}
		assert.Equal(t, 3, served, "no CROSSSLOT, and one limit")
		require.NoError(t, a.Reset(context.Background(), time.Time{}, claimsOf("a", "u", "all")))
		by, _ := take(t, a, "a", "u", "all")
		assert.Equal(t, -1, by)
	}
	for i, node := range nodes {
		assert.NotEmpty(t, node.Keys("*"), "node %d holds some of the stacks", i)
	}
}

func TestClusterNodeLost(t *testing.T) {
	nodes := redistest.Cluster(t, 3)
	settings := map[string]any{"address": redistest.Addrs(nodes), "mode": "cluster", "timeout": "300ms"}
	// A stack on each node.
	stacks := make([]*counters, 3)
	for i := 0; stacks[0] == nil || stacks[1] == nil || stacks[2] == nil; i++ {
		name := fmt.Sprint("stack", i)
		slot, ok := nodes[0].Do("CLUSTER", "KEYSLOT", name).(int64)
		require.True(t, ok)
		if at := int(slot) * 3 / 16384; stacks[at] == nil {
			stacks[at] = replica(t, named(stormSpec(), name), settings)
		}
	}
	for _, c := range stacks {
		connect(t, c)
	}
	lost := newStorm(t, stacks[1])
	lost.awaitServed(50)
	nodes[1].Kill()
	require.True(t, redistest.Await(func() bool { return !stacks[1].stack.breaker.allows() }))
	quick(t, stacks[1])
	for _, c := range []*counters{stacks[0], stacks[2]} {
		others := newStorm(t, c)
		others.awaitServed(100)
		others.stop()
		others.check(1)
		assert.Zero(t, others.unavailable.Load(), "stacks on other nodes go on")
	}
	nodes[1].Run()
	back := time.Now()
	lost.awaitServed(1)
	t.Logf("served again after %v", time.Since(back).Round(time.Millisecond))
	lost.awaitServed(100)
	lost.stop()
	lost.check(2)
	assert.Less(t, lost.slowest.Load(), int64(10*time.Second), "a request waited without end")
}

func TestSentinelFailover(t *testing.T) {
	group := redistest.StartSentinel(t, redistest.Conn{})
	settings := map[string]any{
		"address": redistest.Addrs(group.Sentinels), "mode": "sentinel", "master_name": redistest.MasterName,
		"timeout": "300ms",
	}
	a, _ := observed(t, stormSpec(), settings)
	b, _ := observed(t, stormSpec(), settings)
	connect(t, a)
	connect(t, b)
	s := newStorm(t, a, b)
	s.awaitServed(200)
	for range 2 * stormLimit {
		take(t, a, "spent", "all")
	}
	keys := a.name(claimsOf("spent", "all"))
	group.Replica.Await(func() bool {
		value, _ := group.Replica.Do("GET", keys[1]).(string)
		return strings.HasSuffix(value, fmt.Sprint("000", stormLimit))
	})
	group.Master.Kill()
	killed := time.Now()
	require.True(t, redistest.Await(func() bool { return !a.stack.breaker.allows() && !b.stack.breaker.allows() }))
	quick(t, a)
	s.awaitServed(1)
	t.Logf("served again %v after the master was killed", time.Since(killed).Round(time.Millisecond))
	s.awaitServed(100)
	s.stop()
	s.check(2)
	assert.Less(t, s.slowest.Load(), int64(10*time.Second), "a request waited without end")
	by, states := take(t, replica(t, stormSpec(), settings), "spent", "all")
	t.Logf("of a client that had spent %d, the new master knows %d", stormLimit, states[0].Used)
	assert.Equal(t, 0, by)
}

// TestSentinelsWithAPassword has sentinels that want a log-in of their own, and a master that wants none.
func TestSentinelsWithAPassword(t *testing.T) {
	const password = "sent1nel-pass"
	group := redistest.StartSentinel(t, redistest.Conn{Password: password}, "requirepass "+password,
		"sentinel sentinel-pass "+password, "user watcher on >w4tcher-pass allchannels +@all")
	t.Setenv("TIEREDLIMIT_SENTINEL", password)
	settings := map[string]any{
		"address": redistest.Addrs(group.Sentinels), "mode": "sentinel", "master_name": redistest.MasterName, "timeout": "5s",
	}
	for name, test := range map[string]struct{ user, password, want string }{
		"password":        {"", "{env.TIEREDLIMIT_SENTINEL}", ""},
		"default user":    {"default", password, ""},
		"user":            {"watcher", "w4tcher-pass", ""},
		"none":            {"", "", "NOAUTH"},
		"wrong password":  {"", "wr0ng-pass", "WRONGPASS"},
		"unknown user":    {"nobody", password, "WRONGPASS"},
		"another's":       {"watcher", password, "WRONGPASS"},
		"user's, no user": {"", "w4tcher-pass", "WRONGPASS"},
	} {
		t.Run(name, func(t *testing.T) {
			login := and(and(settings, "sentinel_username", test.user), "sentinel_password", test.password)
			c, log := observed(t, stackOf(plainTier("ip", 1<<20, day)), login)
			_, err := c.Take(context.Background(), time.Now(), claimsOf("a"))
			if test.want == "" {
				assert.NoError(t, err)
				return
			}
			var away *store.UnavailableError
			require.ErrorAs(t, err, &away)
			require.Equal(t, 1, log.Len())
			line := fmt.Sprint(log.All()[0].ContextMap())
			assert.Contains(t, line, test.want)
			assert.NotRegexp(t, "sent1nel|w4tcher|wr0ng", line+err.Error(), "a password is shown")
		})
	}
	assert.Len(t, group.Master.Keys("*"), 1, "the master counts, without a log-in")
}

func TestPlannedFailoverOfASingleAddress(t *testing.T) {
	// One name that leads to another server after a failover, while the old one lives on as a replica.
	old, fresh := redistest.Start(t), redistest.Start(t)
	proxy := redistest.StartProxy(t, old.Addr())
	c := replica(t, stormSpec(), faulty(proxy.Addr()))
	take(t, c, "a", "all")
	proxy.Target(fresh.Addr())
	old.Do("REPLICAOF", "127.0.0.1", strconv.Itoa(fresh.Port))
	require.True(t, redistest.Await(func() bool {
		_, err := c.Take(context.Background(), time.Now(), claimsOf("a", "all"))
		return err == nil
	}), "it must connect anew when the server has become read only")
	assert.NotEmpty(t, fresh.Keys("*"))
}

func TestPasswordAndDatabase(t *testing.T) {
	server := redistest.New(t, "--requirepass", "s3cret pass").With(redistest.Conn{Password: "s3cret pass"})
	server.Run()
	t.Setenv("TIEREDLIMIT_REDIS", "s3cret pass")
	for name, settings := range map[string]map[string]any{
		"placeholder": and(and(on(server), "password", "{env.TIEREDLIMIT_REDIS}"), "db", 2),
		"url":         {"address": []string{"redis://:s3cret%20pass@" + server.Addr() + "/2"}, "timeout": "5s"},
		"user":        and(and(and(on(server), "password", "s3cret pass"), "username", "default"), "db", 2),
	} {
		t.Run(name, func(t *testing.T) {
			c := replica(t, named(stackOf(plainTier("ip", 1, day)), name), settings)
			by, _ := take(t, c, "a")
			assert.Equal(t, -1, by)
			by, _ = take(t, c, "a")
			assert.Equal(t, 0, by)
		})
	}
	assert.Empty(t, server.Keys("*"), "database 0")
	assert.Contains(t, server.Do("INFO", "keyspace"), "db2:keys=3")
}

func TestLimitedUser(t *testing.T) {
	server := redistest.Start(t)
	server.Do("ACL", "SETUSER", "limiter", "on", ">pass", "~tieredlimit:*", "resetchannels", "-@all",
		"+eval", "+evalsha", "+time", "+exists", "+incr", "+decr", "+mget", "+set", "+pttl", "+pexpire", "+del")
	c := replica(t, stackOf(plainTier("ip", 1, day)), and(and(on(server), "password", "pass"), "username", "limiter"))
	by, _ := take(t, c, "a")
	assert.Equal(t, -1, by, "these rights are enough")
	require.NoError(t, c.Reset(context.Background(), time.Time{}, claimsOf("a")))
	by, _ = take(t, c, "a")
	assert.Equal(t, -1, by)
}

func TestUnixSocket(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "redis.sock")
	server := redistest.Start(t, "--unixsocket", socket)
	for _, address := range []string{"unix/" + socket, "unix://" + socket} {
		c := replica(t, stackOf(plainTier("ip", 9, day)), and(on(server), "address", []string{address}))
		by, _ := take(t, c, "a")
		assert.Equal(t, -1, by)
	}
	assert.Len(t, server.Keys("*"), 1)
}

func TestTLS(t *testing.T) {
	certFile, keyFile, pool := certificate(t)
	otherCert, otherKey, _ := certificate(t)
	server := redistest.New(t, "--tls-cert-file", certFile, "--tls-key-file", keyFile, "--tls-ca-cert-file", certFile)
	server.OnlyTLS(&tls.Config{RootCAs: pool, Certificates: []tls.Certificate{pair(t, certFile, keyFile)}})
	server.Run()
	mutual := map[string]any{"ca": certFile, "certificate": certFile, "key": keyFile}
	for name, test := range map[string]struct {
		address string
		tls     map[string]any
		want    string // in the log; none if it works
	}{
		"mutual":               {server.Addr(), mutual, ""},
		"url":                  {"rediss://" + server.Addr(), mutual, ""},
		"server name":          {server.Addr(), and(mutual, "server_name", "redis.test"), ""},
		"other server name":    {server.Addr(), and(mutual, "server_name", "other.test"), "other.test"},
		"not trusted":          {server.Addr(), map[string]any{"ca": otherCert}, "certificate"},
		"system roots":         {"rediss://" + server.Addr(), nil, "certificate"},
		"anything goes":        {server.Addr(), and(and(mutual, "ca", ""), "insecure_skip_verify", true), ""},
		"no certificate":       {server.Addr(), map[string]any{"ca": certFile}, "connecting"},
		"untrusted of ours":    {server.Addr(), and(and(mutual, "certificate", otherCert), "key", otherKey), "connecting"},
		"plain to a TLS port":  {"redis://" + server.Addr(), nil, "connecting"},
		"the default name too": {"rediss://" + server.Addr() + "/0", mutual, ""},
	} {
		t.Run(name, func(t *testing.T) {
			settings := map[string]any{"address": []string{test.address}, "timeout": "5s"}
			if test.tls != nil {
				settings["tls"] = test.tls
			}
			c, log := observed(t, stackOf(plainTier("ip", 1<<20, day)), settings)
			_, err := c.Take(context.Background(), time.Now(), claimsOf("a"))
			if test.want == "" {
				assert.NoError(t, err)
				return
			}
			require.Error(t, err)
			require.Equal(t, 1, log.Len())
			assert.Contains(t, fmt.Sprint(log.All()[0].ContextMap()), test.want)
		})
	}
}

func pair(t testing.TB, certFile, keyFile string) tls.Certificate {
	t.Helper()
	p, err := tls.LoadX509KeyPair(certFile, keyFile)
	require.NoError(t, err)
	return p
}

// TestSharesAndClosesConnections counts the connections that the server sees.
func TestSharesAndClosesConnections(t *testing.T) {
	server := redistest.Start(t)
	clients := func() int64 {
		var n int64
		info := server.Do("INFO", "clients").(string)
		_, err := fmt.Sscanf(info[len("# Clients\r\n"):], "connected_clients:%d", &n)
		require.NoError(t, err)
		return n - 1 // the one that asks
	}
	require.True(t, redistest.Await(func() bool { return clients() == 0 }))
	open := func(name string, settings map[string]any) store.Counters {
		c, err := newStore(t, settings).Open(named(stackOf(plainTier("ip", 1<<20, day)), name))
		require.NoError(t, err)
		return c
	}
	var all []store.Counters
	for i, settings := range []map[string]any{
		on(server), on(server), and(on(server), "on_error", "local"), and(on(server), "key_prefix", "other"),
	} {
		c := open(fmt.Sprint("stack", i), settings)
		take(t, c, "a")
		all = append(all, c)
	}
	assert.Equal(t, int64(1), clients(), "four stacks share one connection")
	for range 100 { // reloads that change nothing: the new config opens before the old one closes
		next := open("stack0", on(server))
		require.NoError(t, all[0].Close())
		all[0] = next
		take(t, next, "a")
	}
	assert.Equal(t, int64(1), clients(), "reloads keep the connection")
	for _, c := range all {
		require.NoError(t, c.Close())
	}
	assert.True(t, redistest.Await(func() bool { return clients() == 0 }), "the last handle closes it")
}
