package tieredlimit

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/iotest"
	"testing/synctest"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// preflight is a CORS preflight as browsers send it.
func preflight() request {
	return request{method: "OPTIONS"}.with("Origin", appOrigin).with("Access-Control-Request-Method", "POST").
		with("Access-Control-Request-Headers", "content-type")
}

// Preflights are served and cost nothing; a bare OPTIONS counts.
func TestPreflightsAreNotCounted(t *testing.T) {
	t.Parallel()
	e := newEdge(t, `
:8080 {
	tiered_limit a5 {
		trusted_hops 0
		tier ip 2/m
	}
	respond ok
}`)
	for range 5 {
		w := e.send(preflight())
		assert.Equal(t, http.StatusOK, w.Code)
		assert.Empty(t, w.Header().Values("X-RateLimit-Limit"), "it was not judged")
	}
	post := request{method: "POST", body: "{}"}.with("Origin", appOrigin)
	assert.Equal(t, 2, e.served(2, post))
	wantRefused(t, e.send(post), "ip")
	assert.Equal(t, 3, e.served(3, preflight()), "also while the client is refused")
	assert.Equal(t, 8.0, e.metric(`requests_total{outcome="preflight",stack="a5"}`))

	bare := request{method: "OPTIONS"}.from(clientB)
	assert.Equal(t, 2, e.served(2, bare))
	wantRefused(t, e.send(bare), "ip")
}

// What is not exactly a browser's preflight counts.
func TestWhatIsNoPreflightCounts(t *testing.T) {
	t.Parallel()
	for i, c := range []struct {
		name string
		q    request
	}{
		{"a body", request{method: "OPTIONS", body: "{}"}.with("Origin", appOrigin).with("Access-Control-Request-Method", "POST")},
		{"a body of unknown length", chunked(preflight())},
		{"a body of HTTP/2", unknownLength(preflight())},
		{"Cookie", preflight().with("Cookie", "a=b")},
		{"an empty Cookie", preflight().with("Cookie", "")},
		{"Authorization", preflight().with("Authorization", "Bearer x")},
		{"X-HTTP-Method-Override", preflight().with("X-HTTP-Method-Override", "POST")},
		{"X-HTTP-Method", preflight().with("X-HTTP-Method", "POST")},
		{"X-Method-Override", preflight().with("X-Method-Override", "POST")},
		{"X-HTTP-Verb", preflight().with("X-HTTP-Verb", "POST")},
		{"X-Api-Key", preflight().with("X-Api-Key", "k")},
		{"X-Auth-Token", preflight().with("X-Auth-Token", "k")},
		{"Cf-Access-Client-Secret", preflight().with("Cf-Access-Client-Secret", "k")},
		{"Proxy-Authorization", preflight().with("Proxy-Authorization", "Basic eA==")},
		{"Content-Type", preflight().with("Content-Type", "application/json")},
		{"Range", preflight().with("Range", "bytes=0-1")},
		{"Expect", preflight().with("Expect", "100-continue")},
		{"Upgrade", preflight().with("Upgrade", "h2c")},
		{"X-Original-URL", preflight().with("X-Original-URL", "/login")},
		{"X-Rewrite-URL", preflight().with("X-Rewrite-URL", "/login")},
		{"X-Forwarded-Method", preflight().with("X-Forwarded-Method", "POST")},
		{"a field that nobody knows", preflight().with("X-Whatever", "")},
		{"_method", preflightOf("/?_method=GET")},
		{"_method beside others", preflightOf("/?a=b&_method=GET")},
		{"_method in another spelling", preflightOf("/?%5fMETHOD=GET")},
		{"_method behind a semicolon", preflightOf("/?a=b;_method=GET")},
		{"_method as a list", preflightOf("/?_method[]=GET")},
		{"a body of known length over HTTP/3", over3(preflight(), 2)},
		{"no Origin", request{method: "OPTIONS"}.with("Access-Control-Request-Method", "POST")},
		{"an empty Origin", preflight().with("Origin", "")},
		{"a blank Origin", preflight().with("Origin", " ")},
		{"two lines of Origin", twice(preflight(), "Origin")},
		{"two lines of the requested method", twice(preflight(), "Access-Control-Request-Method")},
		{"no requested method", request{method: "OPTIONS"}.with("Origin", appOrigin)},
		{"an empty requested method", preflight().with("Access-Control-Request-Method", "")},
		{"GET", request{method: "GET", header: preflight().header}},
		{"POST", request{method: "POST", header: preflight().header}},
		{"lower case", request{method: "options", header: preflight().header}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			e := newEdge(t, fmt.Sprintf(":8080 {\n tiered_limit a12-%d {\n trusted_hops 0\n tier ip 1/m\n }\n respond ok\n}", i))
			assert.Equal(t, 1, e.served(3, c.q))
			assert.Equal(t, 3, e.served(3, preflight()), "a real one from the same client")
		})
	}
}

// A preflight stays one with all that browsers and the proxies in between put on it.
func TestPreflightsAsTheyArrive(t *testing.T) {
	t.Parallel()
	e := newEdge(t, ":8080 {\n tiered_limit as-they-arrive {\n trusted_hops 0\n tier ip 1/m\n }\n respond ok\n}")
	dressed := preflight().with("User-Agent", "Mozilla/5.0").with("Accept", "*/*").with("Accept-Language", "en").with("Accept-Encoding", "br").
		with("Referer", "https://app.example/").with("Sec-Fetch-Mode", "cors").with("Sec-Fetch-Site", "cross-site").with("Sec-Fetch-Dest", "empty").
		with("Priority", "u=1, i").with("Connection", "keep-alive").with("Cache-Control", "no-cache").with("Pragma", "no-cache").with("Dnt", "1").
		with("Access-Control-Request-Private-Network", "true").with("Content-Length", "0").
		with("X-Forwarded-For", "203.0.113.7").with("X-Forwarded-Proto", "https").with("X-Forwarded-Host", "h").with("Forwarded", "for=203.0.113.7").
		with("Via", "1.1 proxy").with("X-Real-IP", "203.0.113.7").with("X-Request-Id", "1").with("CF-Connecting-IP", "203.0.113.7").with("CF-Ray", "1").
		with("CF-IPCountry", "DE").with("CDN-Loop", "cloudflare").with("X-Amzn-Trace-Id", "1").with("X-Cloud-Trace-Context", "1/2").
		with("Traceparent", "00-1-2-00").with("True-Client-IP", "203.0.113.7")
	assert.Equal(t, 5, e.served(5, dressed))
	assert.Equal(t, 5, e.served(5, preflightOf("/posts?page=2&method=x&a_method=1")))
	assert.Equal(t, 10.0, e.metric(`requests_total{outcome="preflight",stack="as-they-arrive"}`))
}

// Over HTTP/3 the head does not tell whether a body follows. A preflight without one is free, what has one is counted and
// keeps it.
func TestPreflightsOverHTTP3(t *testing.T) {
	t.Parallel()
	reads := script(t, func(w http.ResponseWriter, r *http.Request, _ caddyhttp.Handler) error {
		body, err := io.ReadAll(r.Body)
		fmt.Fprintf(w, "%q %d", body, r.ContentLength)
		return err
	})
	e := newEdge(t, fmt.Sprintf(":8080 {\n tiered_limit over-h3 {\n trusted_hops 0\n tier ip 2/m\n }\n scripted %s\n}", reads))
	empty := preflight()
	empty.edit = func(r *http.Request) {
		r.ProtoMajor, r.ContentLength, r.Body = 3, -1, io.NopCloser(strings.NewReader(""))
	}
	for range 3 {
		assert.Equal(t, `"" 0`, e.send(over3(preflight(), -1)).Body.String())
		assert.Equal(t, `"" 0`, e.send(empty).Body.String())
	}
	full := preflight()
	full.edit = func(r *http.Request) {
		r.ProtoMajor, r.ContentLength, r.Body = 3, -1, io.NopCloser(iotest.DataErrReader(strings.NewReader("action=transfer")))
	}
	assert.Equal(t, `"action=transfer" -1`, e.send(full).Body.String())
	full.edit = func(r *http.Request) {
		r.ProtoMajor, r.ContentLength, r.Body = 3, -1, io.NopCloser(iotest.OneByteReader(strings.NewReader("x")))
	}
	assert.Equal(t, `"x" -1`, e.send(full).Body.String())
	wantRefused(t, e.send(full), "ip")
	assert.Equal(t, 6.0, e.metric(`requests_total{outcome="preflight",stack="over-h3"}`))
}

// A client that does not end its request is not waited for: what may still come counts, and reaches the upstream.
func TestPreflightThatDoesNotEndCounts(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		body, client := io.Pipe()
		r := httptest.NewRequest("OPTIONS", "https://localhost/", body)
		r.Header = http.Header{"Origin": {appOrigin}, "Access-Control-Request-Method": {"POST"}}
		r.ProtoMajor, r.ContentLength = 3, -1
		begin := time.Now()
		assert.False(t, isPreflight(r))
		assert.Equal(t, bodyPatience, time.Since(begin))
		go func() {
			_, _ = io.WriteString(client, "late")
			_ = client.Close()
		}()
		got, err := io.ReadAll(r.Body)
		require.NoError(t, err)
		assert.Equal(t, "late", string(got))
	})
}

// twice is a request with two lines of a field.
func twice(q request, field string) request {
	q.edit = func(r *http.Request) { r.Header[field] = append(r.Header[field], r.Header[field]...) }
	return q
}

// over3 is a request over HTTP/3 with that content length.
func over3(q request, length int64) request {
	q.edit = func(r *http.Request) { r.ProtoMajor, r.Proto, r.ContentLength = 3, "HTTP/3.0", length }
	return q
}

// preflightOf is a preflight for a path and query.
func preflightOf(target string) request {
	q := preflight()
	q.url = "http://localhost" + target
	return q
}

func chunked(q request) request {
	q.edit = func(r *http.Request) { r.ContentLength, r.TransferEncoding = -1, []string{"chunked"} }
	return q
}

func unknownLength(q request) request {
	q.edit = func(r *http.Request) { r.ContentLength, r.ProtoMajor = -1, 2 }
	return q
}

// Preflights count like anything else if that is asked for, and a tier can be made for them.
func TestPreflightsCanBeCounted(t *testing.T) {
	t.Parallel()
	e := newEdge(t, `
:8080 {
	tiered_limit preflights {
		trusted_hops 0
		preflight count
		tier preflights 3/m {
			key {http.tiered_limit.client_ip}
			match method OPTIONS
		}
		tier ip 2/m {
			match not method OPTIONS
		}
	}
	respond ok
}`)
	assert.Equal(t, 3, e.served(3, preflight()))
	wantRefused(t, e.send(preflight()), "preflights")
	assert.Equal(t, 2, e.served(3, request{method: "POST"}.with("Origin", appOrigin)))
}

// Exempting takes both: the cleaned path matches, and the path as sent holds nothing that an upstream could read
// otherwise.
func TestExemptPaths(t *testing.T) {
	t.Parallel()
	rows := map[string]struct{ exempt, counted []string }{
		"/health": {
			[]string{"/health", "/health/", "//health", "/HEALTH", "/%68ealth", "/Health/", "///health", "/health//", "/health?x=/api", "/health?x=%2f.."},
			[]string{
				"/healthz", "/health/../api", "/api/../health", "/api%2f..%2fhealth", "/health%2f..%2fapi", "/", "/api/health", "/health/x",
				"/./health", "/health/.", "/health/..", "/%2e/health", "/health%2f", "/health%5c", "/health/%2e%2e/api", "/health%5c..%5capi",
				"/health/%2E%2E/api", "/health%2F..%2Fapi", "/health%5C", "/health/..;/api", "/health/..;x=1/api", "/.;/health", "/%2fhealth", "/x/../health",
				"/health;x", "/health%3bx", "/health%0a", "/health%23x", "/health%3fx", "/health%20", "/health.", "/health..", "/health%09", "/%20health", "/%20../health",
				"/health/%c0%ae%c0%ae/api", "/health/%e0%80%ae%e0%80%ae/api", "/health/%f0%80%80%ae/api", "/health/%ef%bc%8e%ef%bc%8e/api", "/health%ef%bc%8fapi",
				"/health%25", "/health/%252e%252e/api", "/health%ff",
			},
		},
		"/health/": {[]string{"/health", "/health/", "//health//"}, []string{"/healthz", "/health/x"}},
		"/static/*": {
			[]string{"/static/", "/static/a", "/static/a/b.css", "/STATIC/a", "/static//a"},
			[]string{"//static/a", "//static//a", "//x/static/a", "/static", "/static/../api", "/static/%2e%2e/api", "/static/..%2fapi", "/static/..;/api", "/api/static/", "/static/..", "/static/./a", "/static%2fa"},
		},
		"*.css": {[]string{"/a.css", "/b/c.CSS", "/caf%c3%a9.css", "/my%20style.css"}, []string{
			"/a.css/x", "/a.js", "/x/../a.css", "//x.css", "//x.css/", "///x.css", "/api;x.css", "/api%3bx.css", "/api%0a.css", "/api%23.css", "/api%3f.css", "/api%00.css", "/api%5c.css", "/api%7f.css",
			"/api%2f\".css", "/api%2f\\.css", "/api%ef%bc%9bx.css", "/..%09/a.css", "/%20../a.css", "/x%2f..%2fa.css",
		}},
		"*/ping*": {[]string{"/ping", "/a/ping/b"}, []string{"/pi", "//ping", "/ping/../api", "/a%2fping"}},
		"/":       {[]string{"/", "//"}, []string{"/x", "/./", "/.."}},
		"/a/b":    {[]string{"/a/b", "/a//b", "/A/B/"}, []string{"/a%2fb", "/a", "/a/b/c", "/a/x/../b"}},
	}
	n := 0
	for pattern, row := range rows {
		n++
		name := fmt.Sprint("a6-", n)
		t.Run(strings.ReplaceAll(pattern, "/", "_"), func(t *testing.T) {
			t.Parallel()
			e := newEdge(t, fmt.Sprintf(":8080 {\n tiered_limit %s {\n exempt %s\n tier global 1000/m\n }\n respond ok\n}", name, pattern))
			for _, path := range row.exempt {
				w := e.send(request{url: "http://localhost" + path})
				require.Equal(t, http.StatusOK, w.Code)
				assert.Empty(t, w.Header().Get("X-RateLimit-Limit"), "%s exempts %s", pattern, path)
			}
			assert.Equal(t, []int64{0}, e.used(name, "global", request{}))
			for _, path := range row.counted {
				w := e.send(request{url: "http://localhost" + path})
				require.Equal(t, http.StatusOK, w.Code)
				assert.Equal(t, "1000", w.Header().Get("X-RateLimit-Limit"), "%s does not exempt %s", pattern, path)
			}
			assert.Equal(t, []int64{int64(len(row.counted))}, e.used(name, "global", request{}))
			assert.Equal(t, float64(len(row.exempt)), e.metric(fmt.Sprintf(`requests_total{outcome="exempt",stack=%q}`, name)))
		})
	}
}

// A path is exempt by what the caller has sent, in whichever form that is, and by nothing that tells an upstream of
// another path.
func TestExemptPathsAreJudgedAsSent(t *testing.T) {
	t.Parallel()
	e := newEdge(t, `
:8080 {
	handle_path /api/* {
		tiered_limit exempt-as-sent {
			trusted_hops 0
			exempt /health /static/*
			tier global 1000/m
		}
		respond {uri}
	}
	handle {
		rewrite /old/* /health
		tiered_limit exempt-as-sent {
			trusted_hops 0
			exempt /health /static/*
			tier global 1000/m
		}
		respond ok
	}
}`)
	as := func(path, target string) request {
		return request{edit: func(r *http.Request) { r.URL.Path, r.RequestURI = path, target }}
	}
	for _, q := range []request{as("/health", "http://localhost/health"), as("/health", "HTTP://h:80/health?x=..;"), as("/old/x", "/old/x"),
		as("/api/health", "/api/health")} {
		assert.Empty(t, e.send(q).Header().Get("X-RateLimit-Limit"))
	}
	for _, q := range []request{
		as("/static/;/login", "http://localhost/static/;/login"), as("/static/../login", "http://h/static/%2e%2e/login"),
		as("/static/x", "http://h//static/x"), as("/old/x/../y", "/old/x%2f..%2fy"), as("/api/health", "/api//health/x;y"),
		as("/api/../health", "/api/..;/health"),
		request{url: "http://localhost/health"}.with("X-Original-URL", "/login"), request{url: "http://localhost/health"}.with("X-Rewrite-URL", "/login"),
	} {
		assert.Equal(t, "1000", e.send(q).Header().Get("X-RateLimit-Limit"))
	}
}

// Exempt paths stay served while their client is refused, need no topology decision, and several can be given.
func TestExemptPathsAreServedToRefusedClients(t *testing.T) {
	t.Parallel()
	e := newEdge(t, `
:8080 {
	tiered_limit exempt-several {
		trusted_hops 0
		exempt /healthcheck /readiness /metrics
		tier ip 1/m
	}
	respond ok
}`)
	assert.Equal(t, 1, e.served(3, request{}))
	for _, path := range []string{"/healthcheck", "/readiness", "/metrics"} {
		assert.Equal(t, 3, e.served(3, request{url: "http://localhost" + path}), path)
	}
}

// Exempt clients are found by the client's address, not the peer's, and whole, not masked.
func TestExemptClients(t *testing.T) {
	t.Parallel()
	e := newEdge(t, `
:8080 {
	tiered_limit exempt-clients {
		trusted_hops 1
		exempt_clients 192.0.2.0/28 198.51.100.7 2001:db8:1::/48 2001:db8:2::5 private_ranges
		ipv4_prefix 24
		tier ip 1/m
	}
	respond ok
}`)
	for addr, want := range map[string]int{
		"192.0.2.1": 3, "192.0.2.15": 3, "192.0.2.16": 1, "198.51.100.7": 3, "198.51.100.8": 1, "::ffff:192.0.2.3": 3,
		"2001:db8:1:2::3": 3, "2001:db8:3::": 1, "2001:db8:2::5": 3, "2001:db8:2::6": 1, "10.0.0.1": 3, "127.0.0.1": 3, "::1": 3, "172.32.0.1": 1,
	} {
		assert.Equal(t, want, e.served(3, request{}.with("X-Forwarded-For", "192.0.2.1, "+addr)), addr)
	}
	assert.Equal(t, 1, e.served(3, request{}.from("192.0.3.9")), "an exempt peer does not count without a chain")
	w := e.send(request{}.with("X-Forwarded-For", "192.0.2.1"))
	assert.Empty(t, w.Header().Get("X-RateLimit-Limit"))
}

// A client without an address is never exempt.
func TestExemptClientsWithoutAnAddress(t *testing.T) {
	t.Parallel()
	e := newEdge(t, `
:8080 {
	tiered_limit exempt-unknown {
		trusted_hops 0
		exempt_clients 0.0.0.0/0 ::/0
		tier ip 1/m
	}
	respond ok
}`)
	assert.Equal(t, 5, e.served(5, request{}))
	unix := request{edit: func(r *http.Request) { r.RemoteAddr = "@" }}
	assert.Equal(t, 1, e.served(3, unix))
}
