package tieredlimit

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// exampleChecks says, for each directory of examples, what it does.
var exampleChecks = map[string]func(t *testing.T, text string){
	"quickstart":        checkQuickstart,
	"direct":            checkDirect,
	"one-load-balancer": checkOneLoadBalancer,
	"google-alb":        checkGoogleALB,
	"cloudflare":        checkCloudflare,
	"nginx":             checkAppendingProxy,
	"haproxy":           checkAppendingProxy,
	"per-route":         checkPerRoute,
	"graphql":           checkGraphQL,
	"per-user":          checkPerUser,
	"forward-auth":      checkForwardAuth,
	"plans":             checkPlans,
	"checkout":          checkCheckout,
	"shared":            checkShared,
	"dry-run":           checkDryRun,
	"replicas":          checkReplicas,
	"json":              checkJSON,
}

// Each example loads as it is and does what its comments say. The tests of examples are not parallel: they share listen
// addresses and names, and so counters, with each other.
func TestExamples(t *testing.T) {
	files, err := filepath.Glob("examples/*/Caddyfile")
	require.NoError(t, err)
	require.GreaterOrEqual(t, len(files), len(exampleChecks))
	for _, file := range files {
		name := filepath.Base(filepath.Dir(file))
		t.Run(name, func(t *testing.T) {
			text := readText(t, file)
			assert.True(t, strings.HasPrefix(text, "# "), "an example begins with when to use it")
			assert.Equal(t, string(caddyfile.Format([]byte(text))), text, "caddy fmt")
			if name != "quickstart" {
				assert.Contains(t, text, "\n# Change: ")
			}
			check := exampleChecks[name]
			require.NotNil(t, check, "no test says what this example does")
			check(t, text)
		})
	}
}

func readText(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	return string(text)
}

// newExample provisions an example, which must be accepted without a warning.
func newExample(t *testing.T, text string) *edge {
	t.Helper()
	e := newWiredEdge(t, adapt(t, text))
	assert.Empty(t, e.logs.lines("warn", ""), "warnings at load")
	return e
}

var dialPattern = regexp.MustCompile(`"dial":"([^"]+)"`)

// newWiredEdge provisions a config whose upstreams are other sites of its own. They listen nowhere, so each gets a
// socket on a free port, and what dials it is led there.
func newWiredEdge(t *testing.T, config []byte) *edge {
	t.Helper()
	var e *edge
	wired := dialPattern.ReplaceAllFunc(config, func(match []byte) []byte {
		listen := string(dialPattern.FindSubmatch(match)[1])
		upstream := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			e.server(listen).ServeHTTP(w, r)
		}))
		t.Cleanup(upstream.Close)
		return fmt.Appendf(nil, `"dial":%q`, upstream.Listener.Addr())
	})
	e = newEdgeJSON(t, wired)
	return e
}

// forwarded is a header with one field.
func forwarded(name, value string) http.Header { return http.Header{name: {value}} }

// refusedBy sends a request that must be refused and returns the tier that did.
func refusedBy(t *testing.T, e *edge, q request) string {
	t.Helper()
	w := e.send(q)
	require.Equal(t, http.StatusTooManyRequests, w.Code)
	return w.Header().Get("X-RateLimit-Resource")
}

func checkQuickstart(t *testing.T, text string) {
	e := newExample(t, text)
	q := request{listen: ":8080", url: "http://localhost:8080/"}
	w := e.send(q)
	assert.Equal(t, "hello from the API", w.Body.String())
	assert.Equal(t, "4", w.Header().Get("X-RateLimit-Remaining"))
	assert.Equal(t, 4, e.served(10, q))
	assert.Equal(t, "ip", refusedBy(t, e, q))
	e.clock.advance(time.Minute)
	assert.Equal(t, 5, e.served(10, q))
}

func checkDirect(t *testing.T, text string) {
	e := newExample(t, text)
	served := 0
	for second := range 40 {
		for i := range 25 {
			spoof := forwarded("X-Forwarded-For", fmt.Sprintf("198.51.100.%d", second+i))
			served += e.served(1, request{header: spoof})
		}
		if second == 0 {
			assert.Equal(t, 20, served, "in the first second")
		}
		e.clock.advance(time.Second)
	}
	assert.Equal(t, 600, served, "in the first minute")
	assert.Len(t, e.logs.lines("warn", "trusted_hops is 0"), 1)

	e.clock.advance(time.Minute)
	all := 0
	for client := range 101 {
		all += e.served(20, request{peer: fmt.Sprintf("198.51.100.%d:1", client)})
	}
	assert.Equal(t, 2000, all, "of everybody together in one second")
	assert.Equal(t, "global", refusedBy(t, e, request{peer: "203.0.113.77:1"}))
}

// checkBehindProxy checks what all examples with a proxy have in common: 60/m for the client that the proxy names, no
// fresh budget for whatever the client writes itself, the connection's address for whoever comes around the proxy.
func checkBehindProxy(t *testing.T, e *edge, proxy string, chain func(spoof, client string) http.Header) {
	t.Helper()
	via := func(spoof, client string) request { return request{peer: proxy, header: chain(spoof, client)} }
	served := 0
	for i := range 70 {
		served += e.served(1, via(fmt.Sprintf("192.0.2.%d", i), "203.0.113.7"))
	}
	assert.Equal(t, 60, served, "one client that forges")
	assert.Equal(t, 60, e.served(70, via("203.0.113.7", "203.0.113.8")), "another client")
	served = 0
	for i := range 70 {
		q := via("192.0.2.1", fmt.Sprintf("203.0.113.%d", 100+i))
		q.peer = "198.51.100.66:40000"
		served += e.served(1, q)
	}
	assert.Equal(t, 60, served, "around the proxy")
}

func checkOneLoadBalancer(t *testing.T, text string) {
	e := newExample(t, text)
	checkBehindProxy(t, e, "10.1.2.3:5000", func(spoof, client string) http.Header {
		return forwarded("X-Forwarded-For", spoof+", "+client)
	})
	onLaptop := request{peer: "127.0.0.1:5000", header: forwarded("X-Forwarded-For", "203.0.113.9")}
	assert.Equal(t, 60, e.served(61, onLaptop))
}

func checkGoogleALB(t *testing.T, text string) {
	e := newExample(t, text)
	chain := func(spoof, client string) http.Header {
		return forwarded("X-Forwarded-For", spoof+", "+client+",198.51.100.1")
	}
	checkBehindProxy(t, e, "35.191.10.1:5000", chain)
	checkProbe := request{peer: "35.191.10.2:5000", url: "http://localhost/healthcheck"}
	assert.Equal(t, 100, e.served(100, checkProbe), "health checks")
	onLaptop := request{peer: "127.0.0.1:5000", header: forwarded("X-Forwarded-For", "203.0.113.9, 198.51.100.1")}
	assert.Equal(t, 60, e.served(61, onLaptop))
}

func checkCloudflare(t *testing.T, text string) {
	e := newExample(t, text)
	checkBehindProxy(t, e, "173.245.48.9:5000", func(_, client string) http.Header {
		return forwarded("Cf-Connecting-Ip", client)
	})
	onLaptop := request{peer: "127.0.0.1:5000", header: forwarded("Cf-Connecting-Ip", "203.0.113.9")}
	assert.Equal(t, 60, e.served(61, onLaptop))
}

// checkAppendingProxy checks the form that nginx sends, all in one line, and the one that HAProxy sends, which adds a
// line of its own.
func checkAppendingProxy(t *testing.T, text string) {
	for _, separate := range []bool{false, true} {
		e := newExample(t, text)
		checkBehindProxy(t, e, "127.0.0.1:5000", func(spoof, client string) http.Header {
			if separate {
				return http.Header{"X-Forwarded-For": {spoof, client}}
			}
			return forwarded("X-Forwarded-For", spoof+", "+client)
		})
		e.close()
	}
}

func checkPerRoute(t *testing.T, text string) {
	e := newExample(t, text)
	a := func(method, path string) request {
		return request{method: method, url: "http://localhost" + path, peer: "198.51.100.1:1"}
	}
	create := a("POST", "/posts")
	assert.Equal(t, 10, e.served(12, create))
	assert.Equal(t, "create", refusedBy(t, e, create))
	assert.Equal(t, 300, e.served(310, a("GET", "/feed")))
	assert.Equal(t, "feed", refusedBy(t, e, a("GET", "/feed")))
	assert.Equal(t, 50, e.served(70, a("GET", "/posts")), "the rest, less the ten posts")
	assert.Equal(t, "ip", refusedBy(t, e, a("GET", "/")))
	e.clock.advance(time.Minute)
	assert.Equal(t, 60, e.served(70, a("GET", "/")))
	assert.Equal(t, 1, e.served(1, a("GET", "/feed")), "the feed does not count as the rest")
	assert.Equal(t, "ip", refusedBy(t, e, create), "a post does")
}

const graphqlOrigin = "http://localhost:3000"

var graphqlOperation = request{
	listen: ":8080", method: "POST", url: "http://localhost:8080/graphql", body: `{"query":"{ hello }"}`,
	header: http.Header{"Origin": {graphqlOrigin}, "Content-Type": {"application/json"}},
}

func checkGraphQL(t *testing.T, text string) {
	for _, name := range []string{"RATE_LIMIT_MAX", "RATE_LIMIT_WINDOW_MS", "TRUST_PROXY", "APP_ORIGIN"} {
		t.Setenv(name, "") // to have it restored
		require.NoError(t, os.Unsetenv(name))
	}
	t.Run("nothing set", func(t *testing.T) {
		e := newWiredEdge(t, adapt(t, text))
		assert.Len(t, e.logs.lines("error", "tiered_limit is DISABLED"), 1)
		assert.Equal(t, 700, e.served(700, graphqlOperation))
	})
	t.Run("defaults", func(t *testing.T) {
		t.Setenv("TRUST_PROXY", "0")
		checkGraphQLDefaults(t, newExample(t, text))
	})
	t.Run("limits", func(t *testing.T) {
		t.Setenv("TRUST_PROXY", "0")
		t.Setenv("RATE_LIMIT_MAX", "5")
		t.Setenv("RATE_LIMIT_WINDOW_MS", "2500")
		e := newExample(t, text)
		assert.Equal(t, 5, e.served(7, graphqlOperation))
		e.clock.advance(2500 * time.Millisecond)
		assert.Equal(t, 5, e.served(7, graphqlOperation))
	})
	t.Run("off", func(t *testing.T) {
		t.Setenv("TRUST_PROXY", "0")
		t.Setenv("RATE_LIMIT_MAX", "0")
		e := newExample(t, text)
		assert.Equal(t, 700, e.served(700, graphqlOperation))
	})
	t.Run("two hops", func(t *testing.T) {
		t.Setenv("TRUST_PROXY", "2")
		t.Setenv("RATE_LIMIT_MAX", "5")
		e := newExample(t, text)
		for client, want := range map[string]int{"203.0.113.1": 5, "203.0.113.2": 5} {
			q := graphqlOperation
			q.header = forwarded("X-Forwarded-For", "192.0.2.1, "+client+", 198.51.100.1")
			assert.Equal(t, want, e.served(7, q))
		}
	})
	t.Run("malformed", func(t *testing.T) {
		t.Setenv("TRUST_PROXY", "yes")
		_, err := tryLoad(t, text)
		assert.ErrorContains(t, err, `trusted_hops "yes"`)
	})
	t.Run("empty", func(t *testing.T) {
		t.Setenv("TRUST_PROXY", "0")
		t.Setenv("RATE_LIMIT_MAX", "")
		_, err := tryLoad(t, text)
		assert.ErrorContains(t, err, "empty or not set")
	})
}

func checkGraphQLDefaults(t *testing.T, e *edge) {
	for _, path := range []string{"/healthcheck", "/readiness", "/metrics"} {
		assert.Equal(t, 10, e.served(10, request{listen: ":8080", url: "http://localhost:8080" + path}), path)
	}
	preflight := request{listen: ":8080", method: "OPTIONS", url: graphqlOperation.url, header: http.Header{
		"Origin": {graphqlOrigin}, "Access-Control-Request-Method": {"POST"},
		"Access-Control-Request-Headers": {"content-type"},
	}}
	for range 10 {
		w := e.send(preflight)
		assert.Equal(t, http.StatusNoContent, w.Code)
		assert.Equal(t, []string{graphqlOrigin}, w.Header()["Access-Control-Allow-Origin"])
	}
	w := e.send(graphqlOperation)
	assert.Equal(t, `{"data":{"hello":"world"}}`, w.Body.String())
	assert.Equal(t, "599", w.Header().Get("X-RateLimit-Remaining"))
	assert.Equal(t, []string{graphqlOrigin}, w.Header()["Access-Control-Allow-Origin"])
	assert.Equal(t, 599, e.served(700, graphqlOperation))

	w = e.send(graphqlOperation)
	assert.Equal(t, http.StatusTooManyRequests, w.Code)
	assert.Equal(t, "application/json", w.Header().Get("Content-Type"))
	assert.Equal(t, []string{graphqlOrigin}, w.Header()["Access-Control-Allow-Origin"])
	assert.Contains(t, w.Header().Get("Access-Control-Expose-Headers"), "Retry-After")
	var body struct {
		Errors []struct {
			Extensions struct {
				Code, Tier        string
				Limit, RetryAfter int
			}
		}
	}
	require.NoError(t, json.Unmarshal(w.Body.Bytes(), &body))
	require.Len(t, body.Errors, 1)
	got := body.Errors[0].Extensions
	assert.Equal(t, "RATE_LIMITED ip 600 60", fmt.Sprint(got.Code, " ", got.Tier, " ", got.Limit, " ", got.RetryAfter))
}

func checkPerUser(t *testing.T, text string) {
	e := newExample(t, text)
	as := func(user, password, peer string) request {
		return request{peer: peer, edit: func(r *http.Request) { r.SetBasicAuth(user, password) }}
	}
	alice := as("alice", "alice-password", "198.51.100.1:1")
	assert.Equal(t, "hello alice", e.send(alice).Body.String())
	assert.Equal(t, 2, e.served(4, alice))
	assert.Equal(t, "user", refusedBy(t, e, alice))
	assert.Equal(t, "user", refusedBy(t, e, as("alice", "alice-password", "198.51.100.2:1")), "from elsewhere")
	assert.Equal(t, 3, e.served(4, as("bob", "bob-password", "198.51.100.1:1")), "behind the same address")

	guess := as("alice", "guess", "198.51.100.3:1")
	for _, status := range e.statuses(30, guess) {
		assert.Equal(t, http.StatusUnauthorized, status)
	}
	assert.Equal(t, "ip", refusedBy(t, e, guess))
	assert.Empty(t, e.logs.lines("warn", ""))
}

func checkForwardAuth(t *testing.T, text string) {
	e := newExample(t, text)
	as := func(user, peer string) request {
		return request{listen: ":8080", peer: peer}.with("Authorization", "Bearer token-of-"+user).with("Remote-User", "mallory")
	}
	alice := as("alice", "198.51.100.1:1")
	assert.Equal(t, "hello alice", e.send(alice).Body.String())
	assert.Equal(t, 19, e.served(25, alice))
	assert.Equal(t, "user", refusedBy(t, e, alice))
	assert.Equal(t, "user", refusedBy(t, e, as("alice", "198.51.100.2:1")), "from elsewhere")
	bob := as("bob", "198.51.100.1:1")
	bob.method = http.MethodPost
	assert.Equal(t, 3, e.served(4, bob), "behind the same address")
	assert.Equal(t, "write", refusedBy(t, e, bob))

	nobody := request{listen: ":8080", peer: "198.51.100.3:1"}.with("Remote-User", "alice")
	for _, status := range e.statuses(60, nobody) {
		assert.Equal(t, http.StatusUnauthorized, status)
	}
	assert.Equal(t, "ip", refusedBy(t, e, nobody), "the authentication service is not asked any more")
	assert.Empty(t, e.logs.lines("warn", ""))
}

func checkPlans(t *testing.T, text string) {
	e := newExample(t, text)
	as := func(token, peer string) request {
		return request{listen: ":8080", peer: peer}.with("Authorization", "Bearer "+token).with("X-Plan", "gold")
	}
	partner := as("free-paul", "192.0.2.7:1")
	assert.Equal(t, "hello paul (partner)", e.send(partner).Body.String())
	assert.Equal(t, 300, e.served(300, partner))

	gold := as("gold-alice", "203.0.113.1:1")
	assert.Equal(t, "hello alice (gold)", e.send(gold).Body.String())
	assert.Equal(t, 99, e.served(120, gold))
	assert.Equal(t, "gold", refusedBy(t, e, as("gold-alice", "203.0.113.2:1")), "from elsewhere")

	free := as("free-bob", "203.0.113.1:1")
	assert.Equal(t, "hello bob (free)", e.send(free).Body.String(), "whatever plan the caller writes")
	assert.Equal(t, 4, e.served(9, free))
	assert.Equal(t, "free", refusedBy(t, e, free))
	nobody := request{listen: ":8080", peer: "203.0.113.3:1"}.with("X-Plan", "gold")
	assert.Equal(t, 5, e.served(9, nobody))
	assert.Equal(t, "free", refusedBy(t, e, nobody))
	assert.Empty(t, e.logs.lines("warn", ""))
}

func checkCheckout(t *testing.T, text string) {
	e := newExample(t, text)
	from := func(i int, path string) request {
		return request{listen: ":8080", url: "http://localhost:8080" + path, peer: fmt.Sprintf("198.51.100.%d:1", i)}
	}
	served := 0
	for i := range 90 {
		served += e.served(1, from(i%50, "/"))
	}
	assert.Equal(t, 80, served, "of 90 that do not pay")
	assert.Equal(t, "global", refusedBy(t, e, from(1, "/cart")))
	w := e.send(from(2, "/checkout"))
	assert.Equal(t, http.StatusOK, w.Code)
	assert.Equal(t, []string{"100", "19"}, []string{w.Header().Get("X-RateLimit-Limit"), w.Header().Get("X-RateLimit-Remaining")})
	for i := range 30 {
		served += e.served(1, from(i, "/checkout/pay"))
	}
	assert.Equal(t, 99, served, "all 100 with the one before")
	e.clock.advance(time.Second)
	assert.Equal(t, 1, e.served(1, from(1, "/")))
}

func checkShared(t *testing.T, text string) {
	e := newExample(t, text)
	shop := request{url: "http://shop.localhost:8080/"}
	blog := request{url: "http://blog.localhost:8080/"}
	assert.Equal(t, "shop", e.send(shop).Body.String())
	assert.Equal(t, "blog", e.send(blog).Body.String())
	assert.Equal(t, 5, e.served(5, shop))
	assert.Equal(t, 3, e.served(5, blog))
	assert.Equal(t, "ip", refusedBy(t, e, shop))
	assert.Equal(t, "ip", refusedBy(t, e, blog))

	comment := request{url: blog.url, method: "POST", peer: "198.51.100.9:1"}
	assert.Equal(t, 2, e.served(3, comment))
	assert.Equal(t, "comments", refusedBy(t, e, comment))
	elsewhere := comment
	elsewhere.url = shop.url
	assert.Equal(t, 8, e.served(10, elsewhere), "the shop has no such tier")

	first, rest, _ := strings.Cut(text, "\t\timport limits\n")
	_, err := tryLoad(t, first+"\t\ttrusted_hops 0\n\t\ttier ip 11/m\n"+rest)
	assert.ErrorContains(t, err, `"ip" is defined twice, with a different limits: `)
}

func checkDryRun(t *testing.T, text string) {
	e := newExample(t, text)
	dry := request{listen: ":8080", peer: "198.51.100.1:1"}
	assert.Equal(t, 8, e.served(8, dry))
	assert.Empty(t, e.send(dry).Header().Get("X-RateLimit-Limit"))
	assert.EqualValues(t, 4, e.metric(`refusals_total{dry_run="true",stack="* :8080",tier="ip"}`))
	assert.EqualValues(t, 0, e.metric(`refusals_total{dry_run="false",stack="* :8080",tier="ip"}`))
	line := e.logs.lines("info", "rate limit reached")
	require.Len(t, line, 1)
	assert.Equal(t, "true", line[0].str("dry_run"))
	assert.Contains(t, e.logs.text(), `"tiered_limit_outcome":"dry_refused"`)

	mixed := request{listen: ":8081", peer: "198.51.100.2:1"}
	assert.Equal(t, 10, e.served(12, mixed))
	assert.Equal(t, "ip", refusedBy(t, e, mixed))
	assert.EqualValues(t, 7, e.metric(`refusals_total{dry_run="true",stack="* :8081",tier="burst"}`))
	assert.EqualValues(t, 3, e.metric(`refusals_total{dry_run="false",stack="* :8081",tier="ip"}`))
}

func checkJSON(t *testing.T, text string) {
	config := []byte(readText(t, "examples/json/caddy.json"))
	assert.Equal(t, plainJSON(t, adapt(t, text)), plainJSON(t, config))
	for _, form := range [][]byte{config, adapt(t, text)} {
		e := newEdgeJSON(t, form)
		assert.Empty(t, e.logs.lines("warn", ""))
		assert.Equal(t, 20, e.served(25, request{}))
		assert.Equal(t, 30, e.served(30, request{url: "http://localhost/health"}))

		q := request{peer: "198.51.100.4:1", url: "http://localhost/api/x", header: forwarded("Authorization", "Bearer a")}
		w := e.send(q)
		assert.Equal(t, `"ip";q=20;w=1, "ip.2";q=600;w=60, "token";q=100;w=60, "global";q=2000;w=1`,
			w.Header().Get("RateLimit-Policy"))
		assert.Equal(t, `"ip";r=19;t=1`, w.Header().Get("RateLimit"))
		assert.Equal(t, 19, e.served(19, q))
		for range 5 {
			e.clock.advance(time.Second)
			e.served(20, q)
		}
		assert.Equal(t, "token", refusedBy(t, e, q))
		e.close()
	}
}

// plainJSON is a config with windows in nanoseconds.
func plainJSON(t *testing.T, config []byte) any {
	t.Helper()
	var value any
	require.NoError(t, json.Unmarshal(config, &value))
	var walk func(any)
	walk = func(v any) {
		switch v := v.(type) {
		case []any:
			for _, element := range v {
				walk(element)
			}
		case map[string]any:
			if text, ok := v["window"].(string); ok {
				d, err := caddy.ParseDuration(text)
				require.NoError(t, err)
				v["window"] = float64(d)
			}
			for _, element := range v {
				walk(element)
			}
		}
	}
	walk(value)
	return value
}
