package tieredlimit

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tieredlimit/caddy-tieredlimit/internal/redistest"
)

// redisSite is a site whose stack is on a server. Its windows are long, and its patience suits a busy machine.
func redisSite(server *redistest.Server, host, stack, tiers string) string {
	return fmt.Sprintf("http://%s:8080 {\n tiered_limit %s {\n trusted_hops 0\n %s\n store redis {\n address %s\n "+
		"timeout 10s\n }\n }\n respond ok\n}\n", host, stack, strings.ReplaceAll(tiers, ";", "\n"), server.Addr())
}

// connections is how many connections a server has, but for the one that asks.
func connections(server *redistest.Server) int {
	return strings.Count(server.Do("CLIENT", "LIST").(string), "\n") - 1
}

// sendTo sends a request to a server, from an address, and returns the response.
func sendTo(server *caddyhttp.Server, peer string) *httptest.ResponseRecorder {
	r := httptest.NewRequest(http.MethodGet, "http://localhost/", nil)
	r.RemoteAddr = peer + ":50000"
	w := httptest.NewRecorder()
	server.ServeHTTP(w, r)
	return w
}

// On Redis: what is used up stays used up over reloads, whatever sites come and go, and so does the connection.
func TestRedisReloadsKeepCounters(t *testing.T) {
	server := redistest.Start(t)
	api := redisSite(server, "localhost", "r1", "tier ip 2/7d;tier global 3/7d")
	e := newEdge(t, api)
	require.Equal(t, 2, e.served(3, request{}))
	opened := connections(server)
	require.Positive(t, opened)
	for i := range 20 {
		var others string
		for n := range 3 {
			if i>>n&1 == 1 {
				others += redisSite(server, fmt.Sprintf("other%d.test", n), fmt.Sprintf("r1-%d", n), "tier ip 2/7d")
			}
		}
		e.reload(others + api)
		wantRefused(t, e.send(request{}), "ip")
		assert.Equal(t, opened, connections(server), "one connection for all, which stays")
	}
	assert.Equal(t, []int64{2}, e.used("r1", "global", request{}))
	e.reload(":8080 {\n respond ok\n}")
	assert.True(t, redistest.Await(func() bool { return connections(server) == 0 }), "the connection outlives its last user")
	e.reload(api)
	wantRefused(t, e.send(request{}), "ip")
}

// On Redis: new counts apply at once to what is used already, also to those who are remembered as refused.
func TestRedisNewCountsApplyAtOnce(t *testing.T) {
	server := redistest.Start(t)
	site := func(count int) string {
		return redisSite(server, "localhost", "r2", fmt.Sprintf("tier ip %d/7d", count))
	}
	e := newEdge(t, site(2))
	require.Equal(t, 2, e.served(5, request{}))
	e.reload(site(5))
	assert.Equal(t, 3, e.served(10, request{}), "2 to 5 with 2 used: 3 more")

	b := request{peer: "203.0.113.2:50000"}
	require.Equal(t, 3, e.served(3, b))
	e.reload(site(2))
	for range 2 { // asked and remembered
		w := e.send(b)
		wantRefused(t, w, "ip")
		assert.Equal(t, "0", w.Header().Get("X-RateLimit-Remaining"), "never negative")
		assert.Equal(t, "2", w.Header().Get("X-RateLimit-Limit"))
	}
	assert.Equal(t, []int64{3}, e.used("r2", "ip", b))
	e.reload(site(1 << 30))
	assert.Equal(t, 1, e.served(1, b))
	assert.Equal(t, []int64{4}, e.used("r2", "ip", b))
}

// On Redis: a configuration that is refused changes neither limits nor counters, dials nowhere and leaks nothing.
func TestRedisARefusedReloadChangesNothing(t *testing.T) {
	server := redistest.Start(t)
	site := func(count int, more string) string {
		return redisSite(server, "localhost", "r3", fmt.Sprintf("tier ip %d/7d", count)) + more
	}
	redis := func(lines string) string {
		return "http://z.test:8080 {\n tiered_limit r3-z {\n tier global 1/7d\n store redis {\n " + lines + "\n }\n }\n}"
	}
	e := newEdge(t, site(3, ""))
	require.Equal(t, 2, e.served(2, request{}))
	for _, broken := range []string{
		redisSite(server, "z.test", "r3", "tier ip 7/7d"), // defined twice, differently
		redis("mode ring"),                      // refused by the adapter
		redis("mode sentinel"),                  // while provisioning the store
		redis("address nowhere"),                // while reading the address
		redis("tls {\n ca /nowhere/ca.pem\n }"), // a file is missing
		redis("password {env.TIEREDLIMIT_UNSET}"),
		strings.Replace(redisSite(server, "z.test", "", "tier global 7/7d"), "trusted_hops 0", "", 1), // no name
		"http://z.test:8080 {\n @x path_regexp (\n respond @x nonsense\n}",                            // elsewhere
	} {
		for range 3 {
			require.Error(t, e.tryReload(site(1, broken)), broken)
		}
	}
	assert.Equal(t, []int64{2}, e.used("r3", "ip", request{}))
	assert.Equal(t, 1, e.served(3, request{}), "still 3")
	w := e.send(request{})
	wantRefused(t, w, "ip")
	assert.Equal(t, "3", w.Header().Get("X-RateLimit-Limit"))
	e.reload(":8080 {\n respond ok\n}")
	assert.True(t, redistest.Await(func() bool { return connections(server) == 0 }), "a refused config still holds the connection")
}

// On Redis: while configs change under load, no hit is lost and none is counted twice.
func TestRedisReloadUnderLoad(t *testing.T) {
	server := redistest.Start(t)
	site := func(count, i int) string {
		more := ""
		if i%3 == 0 { // another connection comes and goes
			more = strings.Replace(redisSite(server, "z.test", "r4-z", "tier global 1/7d"), "timeout 10s", "timeout 9s", 1)
		}
		return redisSite(server, "localhost", "r4", fmt.Sprintf("tier ip 100000/7d;tier global %d/7d", count)) + more
	}
	e := newEdge(t, site(50, 0))
	var current atomic.Pointer[caddyhttp.Server]
	current.Store(e.server(":8080"))
	var stop atomic.Bool
	var served atomic.Int64
	var wait sync.WaitGroup
	for i := range 8 {
		wait.Go(func() {
			for !stop.Load() {
				switch w := sendTo(current.Load(), fmt.Sprint("198.51.100.", i)); w.Code {
				case http.StatusOK:
					served.Add(1)
				case http.StatusTooManyRequests:
					runtime.Gosched()
				default:
					t.Errorf("status %d: %s", w.Code, w.Body)
				}
			}
		})
	}
	for i := range 30 {
		e.reload(site([]int{100, 50, 200, 150}[i%4], i))
		current.Store(e.server(":8080"))
	}
	stop.Store(true)
	wait.Wait()
	assert.LessOrEqual(t, served.Load(), int64(200))
	e.reload(site(300, 1))
	for range 400 {
		if e.send(request{}).Code == http.StatusOK {
			served.Add(1)
		}
	}
	assert.Equal(t, int64(300), served.Load(), "every hit of every config is in one counter")
	assert.Equal(t, []int64{300}, e.used("r4", "global", request{}))
	e.reload(site(299, 1))
	wantRefused(t, e.send(request{}), "global")
}

// On Redis: a stack moves to memory and back while requests run. Requests to a server that is gone may find its store
// closed; none of them is answered by an error of this module's, and none is served beyond the limit.
func TestRedisBackendChangesUnderLoad(t *testing.T) {
	const limit = 200
	server := redistest.Start(t)
	onRedis := redisSite(server, "localhost", "swap", fmt.Sprintf("tier ip 100000/7d;tier global %d/7d", limit))
	lines := strings.Split(onRedis, "\n")
	inMemory := strings.Join(append(lines[:5:5], lines[9:]...), "\n")
	e := newEdge(t, onRedis)
	var current atomic.Pointer[caddyhttp.Server]
	current.Store(e.server(":8080"))
	var stop atomic.Bool
	var wait sync.WaitGroup
	check := func(w *httptest.ResponseRecorder) {
		switch w.Code {
		case http.StatusOK, http.StatusTooManyRequests, http.StatusServiceUnavailable:
		default:
			t.Errorf("status %d: %s", w.Code, w.Body)
		}
	}
	for i := range 8 {
		wait.Go(func() {
			for !stop.Load() {
				check(sendTo(current.Load(), fmt.Sprint("198.51.100.", i)))
			}
		})
	}
	for i := range 40 {
		old := current.Load()
		e.reload([]string{inMemory, onRedis}[i%2])
		check(sendTo(old, "198.51.100.9"))
		current.Store(e.server(":8080"))
	}
	stop.Store(true)
	wait.Wait()
	for range limit + 1 {
		check(e.send(request{}))
	}
	wantRefused(t, e.send(request{}), "global")
	assert.Equal(t, []int64{limit}, e.used("swap", "global", request{}))
}

// Handlers of one stack with other settings of the store are refused, since they would not share their counters.
func TestRedisOneStackHasOneStore(t *testing.T) {
	server := redistest.New(t)
	one := redisSite(server, "one.test", "same", "tier ip 3/7d")
	other := redisSite(server, "two.test", "same", "tier ip 3/7d")
	_, err := tryLoad(t, one+other)
	require.NoError(t, err)
	for _, line := range []string{"timeout 9s", "timeout 10s\n on_error local", "timeout 10s\n key_prefix x", "timeout 10s\n db 1"} {
		_, err := tryLoad(t, one+strings.Replace(other, "timeout 10s", line, 1))
		assert.ErrorContains(t, err, "with a different store", line)
	}
}

// T7 on Redis: 64 requests at a time, from several clients, are served exactly as often as the limits say, and what is
// refused costs nobody anything.
func TestRedisExactUnderConcurrency(t *testing.T) {
	const callers, each, clients, limit = 64, 16, 8, 25
	for name, test := range map[string]struct {
		tiers string
		want  int
	}{
		"each client": {"tier ip 25/7d;tier global 100000/7d", clients * limit},
		"all clients": {"tier ip 25/7d;tier global 150/7d", 150},
		"in reverse":  {"tier global 150/7d;tier ip 25/7d", 150},
	} {
		t.Run(name, func(t *testing.T) {
			server := redistest.Start(t)
			site := redisSite(server, "localhost", "t7", test.tiers)
			// The other instance has a connection of its own.
			instances := []*edge{newEdge(t, site), newEdge(t, strings.Replace(site, "timeout 10s", "timeout 11s", 1))}
			var served [clients]atomic.Int64
			var wait sync.WaitGroup
			for i := range callers {
				to := instances[i%2].server(":8080")
				wait.Go(func() {
					for n := range each {
						who := (i/2 + n) % clients
						switch w := sendTo(to, fmt.Sprint("198.51.100.", who)); w.Code {
						case http.StatusOK:
							served[who].Add(1)
						case http.StatusTooManyRequests:
						default:
							t.Errorf("status %d: %s", w.Code, w.Body)
						}
					}
				})
			}
			wait.Wait()
			all := 0
			for who := range served {
				n := served[who].Load()
				all += int(n)
				assert.LessOrEqual(t, n, int64(limit), "client %d", who)
				used := instances[0].used("t7", "ip", request{peer: fmt.Sprintf("198.51.100.%d:1", who)})
				assert.Equal(t, []int64{n}, used, "counted of client %d", who)
			}
			assert.Equal(t, test.want, all, "served")
			assert.Equal(t, []int64{int64(test.want)}, instances[1].used("t7", "global", request{}))
		})
	}
}

// On Redis: over the ends of windows, no window is over its limit, and in each of them every count is told once.
func TestRedisWindowsTurnUnderConcurrency(t *testing.T) {
	const limit, callers, windows = 40, 16, 4
	server := redistest.Start(t)
	e := newEdge(t, redisSite(server, "localhost", "t13", fmt.Sprintf("tier ip 10000/s;tier global %d/s", limit)))
	to := e.server(":8080")
	var mu sync.Mutex
	told := make(map[string]map[int]int) // by end of window and remaining
	var wait sync.WaitGroup
	for i := range callers {
		wait.Go(func() {
			for stop := false; !stop; {
				w := sendTo(to, fmt.Sprint("198.51.100.", i%4))
				remaining, err := strconv.Atoi(w.Header().Get("X-RateLimit-Remaining"))
				mu.Lock()
				switch end := w.Header().Get("X-RateLimit-Reset"); w.Code {
				case http.StatusOK:
					assert.NoError(t, err)
					if told[end] == nil {
						told[end] = make(map[int]int)
					}
					told[end][remaining]++
				case http.StatusTooManyRequests:
					assert.Equal(t, "global", resource(w))
					assert.Zero(t, remaining)
				default:
					t.Errorf("status %d: %s", w.Code, w.Body)
				}
				stop = len(told) > windows || t.Failed()
				mu.Unlock()
				runtime.Gosched()
			}
		})
	}
	wait.Wait()
	for end, counts := range told {
		served := 0
		for remaining, times := range counts {
			served += times
			assert.Equal(t, 1, times, "window %s: remaining %d", end, remaining)
			assert.Less(t, remaining, limit, "window %s", end)
		}
		assert.LessOrEqual(t, served, limit, "window %s", end)
	}
}
