package tieredlimit

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

// Whoever has one valid value of a key cannot have a new budget for each value that is put beside it, in front of it
// or behind it, or for each way to write it that means the same.
func TestAKeyCannotBeVariedBesideAValidValue(t *testing.T) {
	t.Parallel()
	for i, c := range []struct {
		key  string
		vary func(n int) request
		want int // of 20 requests: one for the valid value, one for all that give several
	}{
		{"{header.X-Api-Key}", func(n int) request { return request{}.with("X-Api-Key", "valid", fmt.Sprint(n)) }, 1},
		{"{header.X-Api-Key}", func(n int) request { return request{}.with("X-Api-Key", fmt.Sprint(n), "valid") }, 1},
		{"{header.X-Api-Key}", func(n int) request { return request{}.with("x-api-key", "valid", "", fmt.Sprint(n)) }, 1},
		{"{header.X-Api-Key}", func(n int) request { return request{}.with("X-Api-Key", make([]string, n+1)...) }, 20},
		{"{header.X-Api-Key}", func(n int) request {
			values := make([]string, n+1)
			for i := range values {
				values[i] = "valid"
			}
			return request{}.with("X-Api-Key", values...)
		}, 1},
		{"k-{header.Authorization}", func(n int) request {
			return request{}.with("Authorization", "Bearer valid", fmt.Sprintf("Bearer %d", n))
		}, 1},
		{"{query.key}", func(n int) request { return request{url: fmt.Sprintf("http://h/?key=valid&key=%d", n)} }, 1},
		{"{query.key}", func(n int) request { return request{url: fmt.Sprintf("http://h/?key=%d&key=valid", n)} }, 1},
		{"{query.key}", func(n int) request { return request{url: fmt.Sprintf("http://h/?n=%d&key=valid&k%%65y=valid", n)} }, 1},
		{"{cookie.sid}", func(n int) request { return request{}.with("Cookie", fmt.Sprintf("SID=%d; sid=valid", n)) }, 1},
		{"{cookie.sid}", func(n int) request { return request{}.with("Cookie", fmt.Sprintf("Sid=%d", n), "sid=valid") }, 1},
		{"{cookie.sid}", func(n int) request { return request{}.with("Cookie", fmt.Sprintf("sid=valid; sid=%d", n)) }, 1},
		{"{host}", func(n int) request { return request{url: "http://" + inCase("shop.example", n) + "/"} }, 1},
		{"{host}", func(n int) request { return request{url: fmt.Sprintf("http://shop.example:%d/", 80+n)} }, 1},
	} {
		e := newEdge(t, keyedSite(fmt.Sprintf("vary-%d", i), "key "+c.key))
		got := 0
		for n := range 20 {
			got += e.served(1, c.vary(n))
		}
		assert.Equal(t, c.want, got, "%s, row %d: served of 20", c.key, i)
	}
}

// inCase writes a text with the letters whose bit in n is set in upper case.
func inCase(s string, n int) string {
	b := []byte(s)
	for i := range b {
		if n>>(i%8)&1 == 1 && 'a' <= b[i] && b[i] <= 'z' {
			b[i] -= 'a' - 'A'
		}
	}
	return string(b)
}

// Requests that give several values share one budget, which is nobody's who gives one.
func TestSeveralValuesAreNobodysValue(t *testing.T) {
	t.Parallel()
	e := newEdge(t, keyedSite("several", "key {header.X-A} {header.X-B}"))
	assert.Equal(t, 1, e.served(2, request{}.with("X-A", "a", "b").with("X-B", "x")), "several of the first part")
	assert.Equal(t, 0, e.served(1, request{}.with("X-A", "c", "d").with("X-B", "x")), "others")
	assert.Equal(t, 0, e.served(2, request{}.with("X-A", "a", "b").with("X-B", "y")), "the other part mints nothing")
	assert.Equal(t, 0, e.served(2, request{}.with("X-A", "x").with("X-B", "a", "b")), "nor does it matter which part it is")
	for _, one := range []string{"a", "b", "a,b", "a, b"} {
		assert.Equal(t, 1, e.served(2, request{}.with("X-A", one).with("X-B", "x")), "%q alone", one)
	}
}

// Refusals that are not noted in the order in which they came write one line a second all the same.
func TestRefusalsOutOfOrderAreOneLineASecond(t *testing.T) {
	t.Parallel()
	start := time.Unix(1_700_000_000, 0)
	for _, c := range []struct {
		name  string
		times []time.Duration
		want  []int64 // what each line stands for
	}{
		{"around the turn of a second", []time.Duration{0, 1, 0, 1, 0, 1, 0, 1}, []int64{1, 1}},
		{"late by some seconds", []time.Duration{5, 3, 6, 1, 5, 0, 7}, []int64{1, 2, 4}},
		{"in order", []time.Duration{0, 0, 1, 1, 2}, []int64{1, 2, 2}},
		{"the clock set back", []time.Duration{3600, 0, 0, 1, 0, 1}, []int64{1, 1, 2}},
	} {
		var l refusalLog
		var got []int64
		for _, at := range c.times {
			if count, write := l.next(start.Add(at * time.Second)); write {
				got = append(got, count)
			}
		}
		assert.Equal(t, c.want, got, c.name)
	}
}

// What would be accepted and never limit is refused at load, and the error names it.
func TestWhatCouldNeverLimitIsRefused(t *testing.T) {
	t.Setenv("TIERED_LIMIT_EMPTY", "")
	for _, c := range []struct{ lines, want string }{
		{"tier x 1/m {\n key {header.Host}\n }", "write {http.request.host}"},
		{"tier x 1/m {\n key {header.transfer-encoding}\n }", "is empty on every request"},
		{"tier x 1/m {\n key {header.Trailer} {header.X-A}\n }", "is empty on every request"},
		{"tier x 1/m {\n key {http.request.header.}\n }", "is empty on every request"},
		{"tier x 1/m {\n key {http.request.cookie.}\n }", "is empty on every request"},
		{"tier x 1/m {\n key {http.request.uri.query.}\n }", "is empty on every request"},
		{"tier x 1/m {\n key {http.tiered_limit.tier}\n }", "is empty on every request"},
		{"tier x 1/m {\n key {http.tiered_limit.clientip}\n }", "is empty on every request"},
		{"tier x 1/m {\n key {http.request.remote.host/33}\n }", "has a number of bits"},
		{"tier x 1/m {\n key {http.request.remote.host/x}\n }", "has a number of bits"},
		{"tier x 1/m {\n key {time.now.http}\n }", "can never limit"},
		{"tier x 1/m {\n key {time.now.rfc3339}\n }", "can never limit"},
		{"tier x 1/m {\n key {time.now.common_log}\n }", "can never limit"},
		{"tier x 1/m {\n key {time.now.unix}\n }", "can never limit"},
		{"tier ip 1/m\n trusted_hops 1 host", `client_ip_header "host" never reaches a handler`},
		{"tier ip 1/m\n trusted_hops 1 Transfer-Encoding", "never reaches a handler"},
		{"tier global 1/m\n exempt {env.TIERED_LIMIT_EMPTY}", `exempt "{env.TIERED_LIMIT_EMPTY}"`},
		{"tier global 1/m\n exempt /{env.TIERED_LIMIT_UNSET}", `exempt "/{env.TIERED_LIMIT_UNSET}"`},
		{"tier global 1/m\n exempt {http.request.uri.path}", `exempt "{http.request.uri.path}"`},
		{"tier global 1/m\n exempt /a {header.X-Exempt}*", `exempt "{http.request.header.X-Exempt}*"`},
		{"tier global 1/m\n cors https://a.example:443", "default port"},
		{"tier global 1/m\n cors http://a.example:80", "default port"},
		{"tier global 1/m\n cors https://a.example:", "default port"},
		{"tier global 1/m\n cors https://a.example:0", "no port from 1 to 65535"},
		{"tier global 1/m\n cors https://a.example:99999", "no port from 1 to 65535"},
		{"tier global 1/m\n cors https://*.example.com", "has a wildcard"},
		{"tier global 1/m\n cors https://m\u00fcller.example", "not ASCII"},
	} {
		_, err := tryLoad(t, ":8080 {\n tiered_limit never {\n "+c.lines+"\n }\n respond ok\n}")
		if assert.Error(t, err, c.lines) {
			assert.Contains(t, err.Error(), c.want, c.lines)
		}
	}
}

// What is like it and can limit, or match, is accepted.
func TestWhatCanLimitIsAccepted(t *testing.T) {
	t.Setenv("TIERED_LIMIT_PATH", "/health")
	for i, lines := range []string{
		"tier x 1/m {\n key {header.X-Host}\n }", "tier x 1/m {\n key {host}\n }", "tier x 1/m {\n key {time.now.year}\n }",
		"tier x 1/m {\n key {http.request.remote.host/24,48}\n }", "tier x 1/m {\n key {http.request.remote.host/32}\n }",
		"tier ip 1/m\n trusted_hops 1 X-Host", "tier global 1/m\n exempt {env.TIERED_LIMIT_PATH}",
		"tier global 1/m\n cors https://a.example:8443 http://a.example:443 https://a.example:80 http://[::1]:3000 http://localhost:3000",
	} {
		_, err := tryLoad(t, fmt.Sprintf(":8080 {\n tiered_limit can-%d {\n %s\n }\n respond ok\n}", i, lines))
		assert.NoError(t, err, lines)
	}
}

// A pattern that ends in a slash exempts what it says, and not everything that begins like it.
func TestAPatternWithATrailingSlashIsNoPrefix(t *testing.T) {
	t.Parallel()
	for i, c := range []struct {
		pattern string
		exempt  []string
		counted []string
	}{
		{"*/", []string{"/a/", "/"}, []string{"/a", "/a/b"}},
		{"/v1/*/", []string{"/v1/a/"}, []string{"/v1/a", "/v1/a/b", "/v2/"}},
		{"/static/*", []string{"/static/", "/static/a", "/static/a/b"}, []string{"/statics", "/a"}},
	} {
		for j, path := range append(c.exempt, c.counted...) {
			e := newEdge(t, fmt.Sprintf(":8080 {\n tiered_limit slash-%d-%d {\n tier global 1/m\n exempt %s\n }\n respond ok\n}", i, j, c.pattern))
			want := 1
			if j < len(c.exempt) {
				want = 3
			}
			assert.Equal(t, want, e.served(3, request{url: "http://localhost" + path}), "exempt %s: %s", c.pattern, path)
		}
	}
}

// What exempts every request is told at load.
func TestExemptingEverythingIsTold(t *testing.T) {
	t.Parallel()
	for i, c := range []struct {
		lines string
		want  int
	}{
		{"exempt *", 1}, {"exempt /a /*", 1}, {"exempt_clients 0.0.0.0/0", 1}, {"exempt_clients ::/0", 1},
		{"exempt /a*", 0}, {"exempt /", 0}, {"exempt_clients 10.0.0.0/8", 0},
	} {
		e := newEdge(t, fmt.Sprintf(":8080 {\n tiered_limit all-%d {\n trusted_hops 0\n tier ip 1/m\n %s\n }\n respond ok\n}", i, c.lines))
		assert.Len(t, e.logs.lines("warn", "exempts every request"), c.want, c.lines)
	}
}

// A path that an upstream may take for another one is counted, whatever Caddy makes of it.
func TestAPathThatDecodersDisagreeOnIsCounted(t *testing.T) {
	t.Parallel()
	for i, c := range []struct {
		path string
		want int
	}{
		{"/health/..%3b/api", 1}, {"/health/..%00/api", 1}, {"/health/..%20/api", 1}, {"/health/..%09/api", 1}, {"/health/..%23/api", 1},
		{"/health/.%00./api", 1}, {"/health/%252e%252e/api", 1}, {"/health/%252E%252e%252Fapi", 1}, {"/health/%c0%ae%c0%ae/api", 1},
		{"/health/%C1%9C../api", 1}, {"/health%00/x", 1}, {"/health/.%3b/x", 1},
		{"/health/a%20b", 3}, {"/health/%c3%bc", 3}, {"/health/.well-known%20x", 3}, {"/health/...", 1}, {"/health/a%3bb", 1},
	} {
		e := newEdge(t, fmt.Sprintf(":8080 {\n tiered_limit decoders-%d {\n tier global 1/m\n exempt /health/*\n }\n respond ok\n}", i))
		assert.Equal(t, c.want, e.served(3, request{url: "http://localhost" + c.path}), c.path)
	}
}

// An empty list of trusted proxies, as an empty variable leaves it, states no topology: all clients behind a load
// balancer would share its bucket.
func TestAnEmptyListOfTrustedProxiesStatesNothing(t *testing.T) {
	for i, c := range []struct {
		servers, hops string
		inert         bool
	}{
		{"trusted_proxies static", "", true},
		{"trusted_proxies static {$TIERED_LIMIT_UNSET}\n trusted_proxies_strict", "", true},
		{"trusted_proxies static 10.0.0.0/8", "", false},
		{"trusted_proxies static\n trusted_proxies_unix", "", false},
		{"trusted_proxies static", "trusted_hops 1", false},
	} {
		e := newEdge(t, fmt.Sprintf("{\n servers {\n %s\n }\n}\n:8080 {\n tiered_limit empty-%d {\n %s\n tier ip 1/m\n }\n respond ok\n}",
			c.servers, i, c.hops))
		lb := request{peer: "192.0.2.9:1"}.with("X-Forwarded-For", "203.0.113.7")
		if c.inert {
			assert.Len(t, e.logs.lines("error", "DISABLED"), 1, c.servers)
			assert.Equal(t, 3, e.served(3, lb), c.servers)
			continue
		}
		assert.Empty(t, e.logs.lines("error", "DISABLED"), c.servers)
		assert.Equal(t, 1, e.served(3, lb), c.servers)
		assert.Equal(t, 0, e.served(1, lb.with("X-Forwarded-For", "203.0.113.8")), "%s: a peer that is not trusted is not believed", c.servers)
	}
}

// A host is found in the admin API whatever case it is written in there and in the request.
func TestInspectingAHostInAnyCase(t *testing.T) {
	t.Parallel()
	e := newEdge(t, keyedSite("host-case", "key at-{host}"))
	assert.Equal(t, 1, e.served(2, request{url: "http://Shop.Example:8080/"}))
	for _, host := range []string{"shop.example", "SHOP.example"} {
		a := answerTo[counterAnswer](e, "/tiered_limit/inspect", fmt.Sprintf(`{"stack":"host-case","tier":"x","key":["at-%s"]}`, host))
		assert.Equal(t, []string{"at-shop.example"}, a.Key)
		assert.Equal(t, int64(1), a.Limits[0].Used)
	}
}

// What opens a tunnel is no preflight.
func TestAnUpgradeIsNoPreflight(t *testing.T) {
	t.Parallel()
	e := newEdge(t, ":8080 {\n tiered_limit tunnel {\n tier global 1/m\n }\n respond ok\n}")
	preflight := request{method: "OPTIONS"}.with("Origin", "https://a.example").with("Access-Control-Request-Method", "POST")
	assert.Equal(t, 3, e.served(3, preflight))
	assert.Equal(t, 1, e.served(3, preflight.with("Upgrade", "h2c").with("Connection", "Upgrade")))
}

// A caller cannot get the exemption of the proxy in front by making the chain useless, so that the proxy's address is
// used in place of his own.
func TestAUselessChainDoesNotExemptAsItsProxy(t *testing.T) {
	t.Parallel()
	const trusted = "trusted_proxies static 10.0.0.0/8\n trusted_proxies_strict\n client_ip_headers Cf-Connecting-Ip X-Forwarded-For"
	for i, c := range []struct {
		name, servers, hops string
		request             request
		want                int // served of 3, with 1 allowed
	}{
		{"an open quote", "", "trusted_hops 1 Forwarded", request{}.with("Forwarded", `for=9.9.9.9;x="`, "for=203.0.113.7"), 1},
		{"garbage where the client should be", "", "trusted_hops 1", request{}.with("X-Forwarded-For", "unknown"), 1},
		{"fewer entries than stated", "", "trusted_hops 2", request{}.with("X-Forwarded-For", "203.0.113.7"), 1},
		{"garbage in the header that decides", trusted, "", request{}.with("X-Forwarded-For", "203.0.113.7").with("Cf-Connecting-Ip", "x"), 1},
		{"an empty header that decides", trusted, "", request{}.with("X-Forwarded-For", "203.0.113.7").with("Cf-Connecting-Ip", ""), 1},
		{"nothing but trusted entries", trusted, "", request{}.with("X-Forwarded-For", "10.0.0.8"), 1},
		{"an exempt client behind the proxy", "", "trusted_hops 1", request{}.with("X-Forwarded-For", "10.0.0.7"), 3},
		{"an exempt client without a proxy", "", "trusted_hops 1", request{}, 3},
		{"an exempt client without a proxy, trusted", trusted, "", request{}, 3},
	} {
		e := newEdge(t, fmt.Sprintf("{\n servers {\n %s\n }\n}\n:8080 {\n tiered_limit useless-%d {\n %s\n tier ip 1/m\n exempt_clients 10.0.0.0/8\n }\n respond ok\n}",
			c.servers, i, c.hops))
		c.request.peer = "10.0.0.1:1"
		assert.Equal(t, c.want, e.served(3, c.request), c.name)
	}
}
