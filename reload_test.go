package tieredlimit

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// What is used up stays used up over forced reloads, whatever sites come and go, named or not.
func TestReloadsKeepCounters(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"", "r1"} {
		t.Run("name "+name, func(t *testing.T) {
			t.Parallel()
			block := fmt.Sprintf("tiered_limit %s {\n trusted_hops 0\n tier ip 2/d\n tier user 3/d {\n key {header.X-User}\n }\n }", name)
			api := fmt.Sprintf("http://api-r1%s.test:8080 {\n %s\n respond ok\n}\n", name, block)
			others := []string{
				"http://a-r1NAME.test:8080 {\n BLOCK\n respond a\n}\n",
				"http://z-r1NAME.test:8080, http://zz-r1NAME.test:8080 {\n BLOCK\n respond z\n}\n",
				"http://api-r1NAME.test:8081 {\n BLOCK\n respond elsewhere\n}\n",
				"http://*.r1NAME.test:8080 {\n respond wild\n}\n",
				":8082 {\n BLOCK\n respond last\n}\n",
			}
			q := request{listen: ":8080", url: fmt.Sprintf("http://api-r1%s.test/", name)}
			e := newEdge(t, api)
			require.Equal(t, 2, e.served(3, q))
			for i := range 100 {
				var site strings.Builder
				for n, other := range others {
					if i>>n&1 == 0 {
						continue
					}
					own := block // an equal stack elsewhere is another stack
					if name != "" {
						own = fmt.Sprintf("tiered_limit other-r1-%d {\n trusted_hops 0\n tier ip 2/d\n }", n)
					}
					site.WriteString(strings.NewReplacer("NAME", name, "BLOCK", own).Replace(other))
				}
				if i%2 == 0 {
					e.reload(api + site.String())
				} else {
					e.reload(site.String() + api)
				}
				wantRefused(t, e.send(q), "ip")
			}
		})
	}
}

// New counts apply at once to what is used already.
func TestNewCountsApplyAtOnce(t *testing.T) {
	t.Parallel()
	site := func(limits string) string {
		return fmt.Sprintf(":8080 {\n tiered_limit r2 {\n trusted_hops 0\n tier ip %s\n }\n respond ok\n}", limits)
	}
	e := newEdge(t, site("2/m"))
	require.Equal(t, 2, e.served(3, request{}))
	e.reload(site("5/m"))
	assert.Equal(t, 3, e.served(10, request{}), "2 to 5 with 2 used: 3 more")

	b := request{}.from(clientB)
	require.Equal(t, 3, e.served(3, b))
	e.reload(site("2/m"))
	w := e.send(b)
	wantRefused(t, w, "ip")
	assert.Equal(t, "0", w.Header().Get("X-RateLimit-Remaining"), "never negative")
	assert.Equal(t, "2", w.Header().Get("X-RateLimit-Limit"))
	assert.Equal(t, []int64{3}, e.used("r2", "ip", b))
	e.clock.advance(time.Minute)
	assert.Equal(t, 2, e.served(3, b))
}

// A changed window starts that limit anew, and no other.
func TestAChangedWindowStartsThatLimitAnew(t *testing.T) {
	t.Parallel()
	site := func(limits string) string {
		return fmt.Sprintf(":8080 {\n tiered_limit r-window {\n trusted_hops 0\n tier ip %s\n }\n respond ok\n}", limits)
	}
	e := newEdge(t, site("2/m 100/h"))
	require.Equal(t, 2, e.served(3, request{}))
	e.reload(site("2/2m 100/h"))
	assert.Equal(t, []int64{0, 2}, e.used("r-window", "ip", request{}))
	e.reload(site("100/h 3/2m"))
	assert.Equal(t, []int64{2, 0}, e.used("r-window", "ip", request{}), "the order does not matter")
	assert.Equal(t, 3, e.served(9, request{}))
	assert.Equal(t, []int64{5, 3}, e.used("r-window", "ip", request{}))
}

// What a named stack may change and keep its counters.
func TestAReloadKeepsCountersWhateverElseChanges(t *testing.T) {
	t.Parallel()
	site := func(options, tier string) string {
		return fmt.Sprintf(":8080 {\n tiered_limit r-keeps {\n %s\n tier user 90/m {\n key {header.X-User}\n %s\n }\n }\n respond ok\n}", options, tier)
	}
	e := newEdge(t, site("", ""))
	require.Equal(t, 2, e.served(2, user("u")))
	for i, c := range [][2]string{
		{"charge checked", ""}, {"", "charge checked"}, {"dry_run", ""}, {"", "dry_run"}, {"", "match path /*"}, {"trusted_hops 2", ""},
		{"store memory {\n max_keys 5000\n }", ""}, {"store memory {\n max_keys 10\n }", ""}, {"headers draft-11", ""}, {"jitter 5", ""}, {"tier global 100/m", ""}, {"", ""},
	} {
		e.reload(site(c[0], c[1]))
		assert.Equal(t, []int64{int64(i + 2)}, e.used("r-keeps", "user", user("u")), c)
		require.Equal(t, http.StatusOK, e.send(user("u")).Code, c)
	}
}

// A configuration that is refused changes neither limits nor counters, and leaks nothing.
func TestARefusedReloadChangesNothing(t *testing.T) {
	t.Parallel()
	site := func(count int, more string) string {
		return fmt.Sprintf("http://r3.test:8080 {\n tiered_limit r3 {\n trusted_hops 0\n tier ip %d/m\n tier user 9/m {\n key {header.X-User}\n }\n }\n respond ok\n}\n%s", count, more)
	}
	q := user("u")
	q.url = "http://r3.test/"
	e := newEdge(t, site(3, ""))
	require.Equal(t, 2, e.served(2, q))
	for i, broken := range []string{
		"http://z.test:8080 {\n tiered_limit r3 {\n trusted_hops 0\n tier ip 7/m\n }\n}",                         // defined twice, differently
		"http://z.test:8080 {\n tiered_limit {\n tier x 1/m {\n key {http.request.nonsense}\n }\n }\n}",          // found out while provisioning
		"http://z.test:8080 {\n tiered_limit {\n tier x 1/m {\n key k\n match expression `nonsense(`\n }\n }\n}", // in a matcher
		"http://z.test:8080 {\n nonsense\n}",                               // elsewhere, refused by the adapter
		"http://z.test:8080 {\n @x path_regexp (\n respond @x nonsense\n}", // elsewhere, while provisioning
	} {
		for range 4 {
			require.Error(t, e.tryReload(site(1, broken)), broken)
		}
		refs, _ := meters.References("r3")
		assert.Equal(t, 1, refs, "uses of the stack's meter after the refused config %d", i)
		refs, _ = meters.References(stackTier{"r3", "user"})
		assert.Equal(t, 1, refs, "uses of the tier's meter")
	}
	assert.Equal(t, []int64{2}, e.used("r3", "ip", q))
	assert.Equal(t, 1, e.served(3, q), "still 3 a minute")
	w := e.send(q)
	wantRefused(t, w, "ip")
	assert.Equal(t, "3", w.Header().Get("X-RateLimit-Limit"))
	e.reload(":8080 {\n respond ok\n}")
	e.reload(site(3, ""))
	assert.Equal(t, 3, e.served(4, q), "a refused config still holds the counters")
}

// When the last config that uses a stack is gone, so are its counters and series.
func TestAStackThatIsGoneLeavesNothing(t *testing.T) {
	t.Parallel()
	e := newEdge(t, ":8080 {\n tiered_limit r-gone {\n tier global 1/m\n }\n respond ok\n}")
	require.Equal(t, 1, e.served(2, request{}))
	e.reload(":8080 {\n respond ok\n}")
	_, known := meters.References("r-gone")
	assert.False(t, known)
	e.reload(":8080 {\n tiered_limit r-gone {\n tier global 1/m\n }\n respond ok\n}")
	assert.Equal(t, 1, e.served(2, request{}))
	assert.Equal(t, 1.0, e.metric(`requests_total{outcome="served",stack="r-gone"}`))
}

// While configs change under load, old and new handlers share the counters and none is lost.
func TestReloadUnderLoad(t *testing.T) {
	t.Parallel()
	site := func(count int) string {
		return fmt.Sprintf(":8080 {\n tiered_limit r4 {\n trusted_hops 0\n headers x-ratelimit draft-11\n tier ip 100000/m\n tier global %d/m\n }\n respond ok\n}", count)
	}
	e := newEdge(t, site(50))
	var server atomic.Pointer[caddyhttp.Server]
	server.Store(e.server(":8080"))
	send := func(peer string) int {
		r := httptest.NewRequest(http.MethodGet, "http://localhost/", nil)
		r.RemoteAddr = peer
		w := httptest.NewRecorder()
		server.Load().ServeHTTP(w, r)
		return w.Code
	}
	var stop atomic.Bool
	var served atomic.Int64
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			for !stop.Load() {
				switch status := send(fmt.Sprintf("198.51.100.%d:1", i)); status {
				case http.StatusOK:
					served.Add(1)
				case http.StatusTooManyRequests:
					runtime.Gosched()
				default:
					t.Errorf("status %d", status)
				}
			}
		})
	}
	for i := range 20 {
		e.reload(site([]int{100, 50, 200, 150}[i%4]))
		server.Store(e.server(":8080"))
	}
	stop.Store(true)
	wg.Wait()
	assert.LessOrEqual(t, served.Load(), int64(200))
	e.reload(site(300))
	for range 400 {
		if e.send(request{}).Code == http.StatusOK {
			served.Add(1)
		}
	}
	assert.Equal(t, int64(300), served.Load(), "every hit of every config is in one counter")
	e.reload(site(299))
	wantRefused(t, e.send(request{}), "global")
}

// A handler that a reload has replaced may still finish its requests.
func TestARequestThatOutlastsItsConfig(t *testing.T) {
	t.Parallel()
	inside, release := make(chan bool), make(chan bool)
	waits := upstream(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/wait" {
			inside <- true
			<-release
		}
		w.WriteHeader(http.StatusOK)
	})
	site := fmt.Sprintf(":8080 {\n tiered_limit r4-outlast {\n trusted_hops 0\n tier ip 3/m\n }\n scripted %s\n}", waits)
	e := newEdge(t, site)
	old := e.server(":8080")
	done := make(chan *httptest.ResponseRecorder)
	go func() {
		r := httptest.NewRequest(http.MethodGet, "http://localhost/wait", nil)
		r.RemoteAddr = "203.0.113.1:50000"
		w := httptest.NewRecorder()
		old.ServeHTTP(w, r)
		done <- w
	}()
	<-inside
	e.reload(site)
	assert.Equal(t, []int64{1}, e.used("r4-outlast", "ip", request{}))
	release <- true
	w := <-done
	assert.Equal(t, http.StatusOK, w.Code)
	assert.Equal(t, "2", w.Header().Get("X-RateLimit-Remaining"))

	late := httptest.NewRequest(http.MethodGet, "http://localhost/", nil)
	late.RemoteAddr = "203.0.113.1:50000"
	w = httptest.NewRecorder()
	old.ServeHTTP(w, late) // a connection that the old server still serves
	assert.Equal(t, http.StatusOK, w.Code)
	assert.Equal(t, []int64{2}, e.used("r4-outlast", "ip", request{}))
}

// Metrics are there after every reload, and never fall.
func TestMetricsSurviveReloads(t *testing.T) {
	t.Parallel()
	var site strings.Builder
	for i := range 3 {
		fmt.Fprintf(&site, "http://m%d.r5.test:8080 {\n tiered_limit r5-%d {\n trusted_hops 0\n tier ip 2/m\n }\n respond ok\n}\n", i, i)
	}
	for i := range 2 {
		fmt.Fprintf(&site, "http://n%d.r5.test:8080 {\n tiered_limit r5-%d {\n trusted_hops 0\n tier ip 2/m\n }\n respond ok\n}\n", i, i)
	}
	e := newEdge(t, site.String())
	require.Len(t, e.handlers(), 5)
	for round := range 4 {
		for i := range 3 {
			e.served(3, request{url: fmt.Sprintf("http://m%d.r5.test/", i)})
			assert.Equal(t, 2.0, e.metric(fmt.Sprintf(`requests_total{outcome="served",stack="r5-%d"}`, i)), "round %d", round)
			assert.Equal(t, float64(1+3*round), e.metric(fmt.Sprintf(`requests_total{outcome="refused",stack="r5-%d"}`, i)), "round %d", round)
			assert.Equal(t, float64(1+3*round), e.metric(fmt.Sprintf(`refusals_total{dry_run="false",stack="r5-%d",tier="ip"}`, i)), "round %d", round)
		}
		e.reload(site.String())
	}
}
