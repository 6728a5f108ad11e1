package tieredlimit

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/dunglas/httpsfv"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const appOrigin = "https://app.example.com"

// Handle_errors may replace body, headers and status of a refusal; placeholders and Retry-After are there.
func TestHandleErrorsMayReplaceTheAnswer(t *testing.T) {
	t.Parallel()
	e := newEdge(t, `
:8080 {
	tiered_limit a1 {
		trusted_hops 0
		headers x-ratelimit draft-11
		cors https://app.example.com
		tier ip 2/1500ms
	}
	respond "served tier=<{http.tiered_limit.tier}> client=<{http.tiered_limit.client_ip}>"
	handle_errors 429 {
		header X-Tier {http.tiered_limit.tier}
		header X-RateLimit-Resource replaced
		header Cache-Control private
		respond "{http.tiered_limit.tier} {http.tiered_limit.limit} {http.tiered_limit.window} {http.tiered_limit.remaining} {http.tiered_limit.retry_after} {http.tiered_limit.client_ip} {err.status_code}" 503
	}
}`)
	w := e.send(request{})
	assert.Equal(t, "served tier=<ip> client=<203.0.113.1>", w.Body.String())
	e.send(request{})
	w = e.send(request{}.with("Origin", appOrigin))
	assert.Equal(t, 503, w.Code)
	assert.Equal(t, "ip 2 1.5 0 2 203.0.113.1 429", w.Body.String())
	for field, want := range map[string]string{
		"X-Tier": "ip", "Retry-After": "2", "X-RateLimit-Limit": "2", "X-RateLimit-Remaining": "0",
		"X-RateLimit-Resource": "replaced", "Cache-Control": "private", "Access-Control-Allow-Origin": appOrigin,
		"RateLimit": `"ip";r=0;t=2`, "RateLimit-Policy": `"ip";q=2`,
	} {
		assert.Equal(t, []string{want}, w.Header().Values(field), field)
	}
	assert.Contains(t, w.Header().Get("Access-Control-Expose-Headers"), "Retry-After")
	assert.Equal(t, 1.0, e.metric(`requests_total{outcome="refused",stack="a1"}`))
}

// Handle_errors is asked only if it would do something about this request's 429, and only if no body is stated.
func TestWhoWritesTheAnswer(t *testing.T) {
	t.Parallel()
	const theirs, ours = "theirs", ""
	for i, c := range []struct{ name, options, site, want string }{
		{"all errors", "", "handle_errors {\n respond theirs\n }", theirs},
		{"this status", "", "handle_errors 429 {\n respond theirs\n }", theirs},
		{"its class", "", "handle_errors 4xx {\n respond theirs\n }", theirs},
		{"among others", "", "handle_errors 404 429 {\n respond theirs\n }", theirs},
		{"another status", "", "handle_errors 404 {\n respond theirs\n }", ours},
		{"another class", "", "handle_errors 5xx {\n respond theirs\n }", ours},
		{"two blocks", "", "handle_errors 404 {\n respond nope\n }\n handle_errors 429 {\n respond theirs\n }", theirs},
		{"expression", "", "handle_errors {\n @x expression `{err.status_code} == 429`\n respond @x theirs\n }", theirs},
		{"another expression", "", "handle_errors {\n @x expression `{err.status_code} == 404`\n respond @x theirs\n }", ours},
		{"placeholder", "", "handle_errors {\n @x vars {http.tiered_limit.tier} ip\n respond @x theirs\n }", theirs},
		{"another tier", "", "handle_errors {\n @x vars {http.tiered_limit.tier} user\n respond @x theirs\n }", ours},
		{"handle path", "", "handle_errors {\n handle /v1/* {\n respond theirs\n }\n }", theirs},
		{"another path", "", "handle_errors {\n handle /v2/* {\n respond theirs\n }\n }", ours},
		{"handles in turn", "", "handle_errors {\n handle /v2/* {\n respond nope\n }\n handle {\n respond theirs\n }\n }", theirs},
		{"deep", "", "handle_errors {\n route {\n handle /v1/* {\n route /v1/a {\n respond theirs\n }\n }\n }\n }", theirs},
		{"deep elsewhere", "", "handle_errors {\n route {\n handle /v1/* {\n route /v1/b {\n respond theirs\n }\n }\n }\n }", ours},
		{"path before rewrite", "", "uri strip_prefix /v1\n handle_errors {\n @x path /v1/*\n respond @x theirs\n }", theirs},
		{"path after rewrite", "", "uri strip_prefix /v1\n handle_errors {\n @x path /a\n respond @x theirs\n }", ours},
		{"method before rewrite", "", "method POST\n handle_errors {\n @x method GET\n respond @x theirs\n }", theirs},
		{"body stated", "body problem", "handle_errors {\n respond theirs\n }", ours},
		{"other body stated", "body text", "handle_errors 429 {\n respond theirs\n }", ours},
		{"no error routes", "", "", ours},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			e := newEdge(t, fmt.Sprintf(`
:8080 {
	tiered_limit a1-who-%d {
		trusted_hops 0
		%s
		tier ip 1/m
	}
	%s
	respond ok
}`, i, c.options, c.site))
			q := request{url: "http://localhost/v1/a"}
			require.Equal(t, http.StatusOK, e.send(q).Code)
			w := e.send(q)
			wantRefused(t, w, "ip")
			assert.Equal(t, "60", w.Header().Get("Retry-After"))
			if c.want == theirs {
				assert.Equal(t, theirs, w.Body.String())
				return
			}
			assert.NotContains(t, w.Body.String(), "theirs")
			assert.NotContains(t, w.Body.String(), "nope")
			assert.Contains(t, w.Body.String(), "ip")
		})
	}
}

// Sites on one port share one set of error routes; a neighbour's must not empty our answer.
func TestANeighboursErrorRoutesDoNotCount(t *testing.T) {
	t.Parallel()
	for i, theirs := range []string{"handle_errors 404 {\n respond nope\n }", "handle_errors {\n respond nope\n }", "handle_errors 429 {\n respond nope\n }"} {
		e := newEdge(t, fmt.Sprintf(`
http://a.test:8080 {
	respond a
	%[1]s
}
http://b.test:8080 {
	tiered_limit neighbour-%[2]d {
		trusted_hops 0
		tier ip 1/m
	}
	respond b
}
http://c.test:8080 {
	%[1]s
}`, theirs, i))
		q := request{url: "http://b.test/"}
		require.Equal(t, "b", e.send(q).Body.String())
		w := e.send(q)
		wantRefused(t, w, "ip")
		assert.Equal(t, "application/problem+json", w.Header().Get("Content-Type"), theirs)
		assert.Contains(t, w.Body.String(), `"violated-policies":["ip"]`, theirs)
	}
}

// An error meets the error routes of the innermost subroute that has some, and no others.
func TestErrorRoutesOfSubroutes(t *testing.T) {
	t.Parallel()
	const any, only404, rewritten = ``, `"match":[{"vars":{"{http.error.status_code}":["404"]}}],`, `"match":[{"path":["/after"]}],`
	errorRoutes := func(match, body string) string {
		return fmt.Sprintf(`,"errors":{"routes":[{%s"handle":[{"handler":"static_response","body":%q}]}]}`, match, body)
	}
	for i, c := range []struct{ name, inner, outer, server, want string }{
		{"innermost", errorRoutes(any, "inner"), errorRoutes(any, "outer"), errorRoutes(any, "server"), "inner"},
		{"the next one out", "", errorRoutes(any, "outer"), errorRoutes(any, "server"), "outer"},
		{"the server's", "", "", errorRoutes(any, "server"), "server"},
		{"the innermost does not match", errorRoutes(only404, "inner"), errorRoutes(any, "outer"), errorRoutes(any, "server"), ""},
		{"the next one out does not match", "", errorRoutes(only404, "outer"), errorRoutes(any, "server"), ""},
		{"the server's does not match", "", "", errorRoutes(only404, "server"), ""},
		{"a subroute's sees the rewritten path", errorRoutes(rewritten, "inner"), "", "", "inner"},
		{"the server's sees the path as received", "", "", errorRoutes(rewritten, "server"), ""},
		{"none", "", "", "", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			e := newEdgeJSON(t, fmt.Appendf(nil, `{"apps":{"http":{"servers":{"s":{"listen":[":8080"],"routes":[{"handle":[
				{"handler":"subroute","routes":[{"handle":[
					{"handler":"rewrite","uri":"/after"},
					{"handler":"subroute","routes":[{"handle":[
						{"handler":"tiered_limit","name":"sub-%d","trusted_hops":0,"tiers":[{"name":"ip","limits":[{"count":1,"window":"1m"}]}]},
						{"handler":"static_response","body":"ok"}
					]}]%s}
				]}]%s}
			]}]%s}}}}}`, i, c.inner, c.outer, c.server))
			require.Equal(t, "ok", e.send(request{url: "http://localhost/before"}).Body.String())
			w := e.send(request{url: "http://localhost/before"})
			wantRefused(t, w, "ip")
			if c.want != "" {
				assert.Equal(t, c.want, w.Body.String())
			} else {
				assert.Contains(t, w.Body.String(), `"status":429`)
			}
		})
	}
}

// A stack in an error route writes its refusals itself: no further error route would be asked.
func TestAStackInAnErrorRoute(t *testing.T) {
	t.Parallel()
	e := newEdge(t, `
:8080 {
	error 404
	handle_errors {
		tiered_limit in-errors {
			trusted_hops 0
			tier ip 2/m
		}
		respond "not here"
	}
}`)
	assert.Equal(t, []int{404, 404, 429}, e.statuses(3, request{}))
	assert.Contains(t, e.send(request{}).Body.String(), `"status":429`)
}

// Which origins may read a refusal, and what an earlier handler has set stays alone.
func TestA13WhoMayReadARefusal(t *testing.T) {
	t.Parallel()
	const list = "cors https://app.example.com https://explorer.example.com"
	for i, c := range []struct {
		name, cors, header string
		origins            []string
		want, cred         string
		vary               bool
	}{
		{"listed", list, "", []string{appOrigin}, appOrigin, "", true},
		{"the other one", list, "", []string{"https://explorer.example.com"}, "https://explorer.example.com", "", true},
		{"a suffix", list, "", []string{"https://explorer.example.com.evil.test"}, "", "", true},
		{"a prefix", list, "", []string{"https://evil-explorer.example.com"}, "", "", true},
		{"another scheme", list, "", []string{"http://app.example.com"}, "", "", true},
		{"a port", list, "", []string{"https://app.example.com:444"}, "", "", true},
		{"null", list, "", []string{"null"}, "", "", true},
		{"empty", list, "", []string{""}, "", "", true},
		{"two at once", list, "", []string{appOrigin, "https://evil.test"}, "", "", true},
		{"none", list, "", nil, "", "", true},
		{"any", "cors *", "", []string{"https://whoever.test"}, "*", "", false},
		{"any, no origin", "cors *", "", nil, "", "", false},
		{"credentials", "cors https://app.example.com {\n credentials\n }", "", []string{appOrigin}, appOrigin, "true", true},
		{"credentials, not listed", "cors https://app.example.com {\n credentials\n }", "", []string{"https://evil.test"}, "", "", true},
		{"an earlier field", list, "header Access-Control-Allow-Origin https://early.example", []string{appOrigin}, "https://early.example", "", true},
		{"an earlier field, any", "cors *", "header Access-Control-Allow-Origin https://early.example", []string{appOrigin}, "https://early.example", "", false},
		{"a deferred field", list, "header >Access-Control-Allow-Origin https://late.example", []string{appOrigin}, "https://late.example", "", true},
		{"vary is there", list, "header Vary \"Accept, origin\"", []string{appOrigin}, appOrigin, "", true},
		{"no cors", "", "", []string{appOrigin}, "", "", false},
		{"no cors, an earlier field", "", "header Access-Control-Allow-Origin *", []string{appOrigin}, "*", "", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			e := newEdge(t, fmt.Sprintf(`
:8080 {
	%s
	tiered_limit cors-%d {
		%s
		tier global 1/m
	}
	respond ok
}`, c.header, i, c.cors))
			q := request{}
			if c.origins != nil {
				q = q.with("Origin", c.origins...)
			}
			served := e.send(q)
			require.Equal(t, http.StatusOK, served.Code)
			if c.header == "" {
				assert.Empty(t, served.Header().Values("Access-Control-Allow-Origin"), "CORS of served responses is the upstream's")
			}
			w := e.send(q)
			wantRefused(t, w, "global")
			assert.Equal(t, wantValues(c.want), w.Header().Values("Access-Control-Allow-Origin"))
			assert.Equal(t, wantValues(c.cred), w.Header().Values("Access-Control-Allow-Credentials"))
			varies := strings.Count(strings.ToLower(strings.Join(w.Header().Values("Vary"), ",")), "origin")
			assert.Equal(t, map[bool]int{true: 1, false: 0}[c.vary], varies, "Origin in Vary")
		})
	}
}

// wantValues is a field's one value, or no field for the empty one.
func wantValues(value string) []string {
	if value == "" {
		return nil
	}
	return []string{value}
}

// What was set is exposed to the pages of other origins, in one field, merged with what is there.
func TestFieldsAreExposed(t *testing.T) {
	t.Parallel()
	const x, draft = "X-RateLimit-Limit, X-RateLimit-Remaining, X-RateLimit-Reset, X-RateLimit-Resource", "RateLimit-Policy, RateLimit"
	for i, c := range []struct{ name, headers, earlier, upstream, served, refused string }{
		{"default", "", "", "", x, x + ", Retry-After"},
		{"draft", "headers draft-11", "", "", draft, draft + ", Retry-After"},
		{"both", "headers draft-11 x-ratelimit", "", "", x + ", " + draft, x + ", " + draft + ", Retry-After"},
		{"none", "headers none", "", "", "", "Retry-After"},
		{"an earlier field", "headers draft-11", "X-Request-Id", "", "X-Request-Id, " + draft, "X-Request-Id, " + draft + ", Retry-After"},
		{"of the same names", "headers draft-11", "ratelimit, retry-after", "", "ratelimit, retry-after, RateLimit-Policy", "ratelimit, retry-after, RateLimit-Policy"},
		{"the upstream's", "headers draft-11", "", "ETag, X-Total", draft + ", ETag, X-Total", draft + ", Retry-After"},
		{"an earlier and the upstream's", "headers draft-11", "ETag", "ETag, Link", "ETag, " + draft + ", Link", "ETag, " + draft + ", Retry-After"},
		{"none, the upstream's", "headers none", "", "ETag", "ETag", "Retry-After"},
		{"any", "headers draft-11", "*", "", "*, " + draft, "*, " + draft + ", Retry-After"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			up := upstream(t, func(w http.ResponseWriter, _ *http.Request) {
				if c.upstream != "" {
					w.Header().Add("Access-Control-Expose-Headers", c.upstream)
				}
				_, _ = w.Write([]byte("ok"))
			})
			header := ""
			if c.earlier != "" {
				header = fmt.Sprintf("header Access-Control-Expose-Headers %q", c.earlier)
			}
			e := newEdge(t, fmt.Sprintf(":8080 {\n %s\n tiered_limit expose-%d {\n %s\n tier global 1/m\n }\n scripted %s\n}", header, i, c.headers, up))
			q := request{}.with("Origin", appOrigin)
			assert.Equal(t, wantValues(c.served), e.exchange(q).final().header.Values("Access-Control-Expose-Headers"), "served")
			assert.Equal(t, wantValues(c.refused), e.exchange(q).final().header.Values("Access-Control-Expose-Headers"), "refused")
			w := e.exchange(request{})
			assert.Equal(t, wantValues(c.earlier), w.final().header.Values("Access-Control-Expose-Headers"), "same origin")
		})
	}
}

// ourFields are the fields of both header sets.
var ourFields = []string{
	"X-RateLimit-Limit", "X-RateLimit-Remaining", "X-RateLimit-Reset", "X-RateLimit-Resource", "RateLimit-Policy", "RateLimit",
}

// However an upstream sends fields of its own, and however it writes, there is one of each, ours.
func TestAnUpstreamsFieldsAreReplaced(t *testing.T) {
	t.Parallel()
	theirs := func(w http.ResponseWriter) {
		for _, name := range ourFields {
			w.Header().Add(name, "theirs")
			w.Header().Add(name, "theirs too")
		}
	}
	for name, serve := range map[string]http.HandlerFunc{
		"status":  func(w http.ResponseWriter, _ *http.Request) { theirs(w); w.WriteHeader(204) },
		"body":    func(w http.ResponseWriter, _ *http.Request) { theirs(w); _, _ = io.WriteString(w, "ok") },
		"nothing": func(w http.ResponseWriter, _ *http.Request) { theirs(w) },
		"copy":    func(w http.ResponseWriter, _ *http.Request) { theirs(w); _, _ = io.Copy(w, strings.NewReader("ok")) },
		"read from": func(w http.ResponseWriter, _ *http.Request) {
			theirs(w)
			_, _ = w.(io.ReaderFrom).ReadFrom(strings.NewReader("ok"))
		},
		"flush": func(w http.ResponseWriter, _ *http.Request) { theirs(w); _ = http.NewResponseController(w).Flush() },
		"flush and more": func(w http.ResponseWriter, _ *http.Request) {
			theirs(w)
			_ = http.NewResponseController(w).Flush()
			theirs(w)
			_, _ = io.WriteString(w, "ok")
		},
		"set": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("X-RateLimit-Limit", "theirs")
			w.WriteHeader(201)
		},
		"raw": func(w http.ResponseWriter, _ *http.Request) {
			w.Header()["X-Ratelimit-Limit"] = []string{"theirs"}
			w.WriteHeader(201)
		},
		"taken": func(w http.ResponseWriter, _ *http.Request) { clear(w.Header()); theirs(w); w.WriteHeader(500) },
		"early hints": func(w http.ResponseWriter, _ *http.Request) {
			theirs(w)
			w.WriteHeader(103)
			theirs(w)
			w.WriteHeader(102)
			theirs(w)
			w.WriteHeader(200)
		},
		"early hints, then a body": func(w http.ResponseWriter, _ *http.Request) {
			theirs(w)
			w.WriteHeader(103)
			theirs(w)
			_, _ = io.WriteString(w, "ok")
		},
		"switching protocols": func(w http.ResponseWriter, _ *http.Request) { theirs(w); w.WriteHeader(101); theirs(w) },
		"served content": func(w http.ResponseWriter, r *http.Request) {
			theirs(w)
			http.ServeContent(w, r, "a.txt", testStart, strings.NewReader("ok"))
		},
		"redirect": func(w http.ResponseWriter, r *http.Request) { theirs(w); http.Redirect(w, r, "/", http.StatusFound) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			stack := "a4-" + strings.NewReplacer(" ", "-", ",", "").Replace(name)
			e := newEdge(t, fmt.Sprintf(":8080 {\n tiered_limit %s {\n headers x-ratelimit draft-11\n tier global 9/m\n }\n scripted %s\n}", stack, upstream(t, serve)))
			final := e.exchange(request{}).final()
			require.NotZero(t, final.status)
			for i, want := range []string{"9", "8", strconv.FormatInt(testStart.Unix()+60, 10), "global", `"global";q=9;w=60`, `"global";r=8;t=60`} {
				assert.Equal(t, []string{want}, final.header.Values(ourFields[i]), ourFields[i])
			}
		})
	}
}

// An upstream behind a handler that fails leaves no fields beside ours either.
func TestFieldsOfAFailedUpstream(t *testing.T) {
	t.Parallel()
	fails := script(t, func(w http.ResponseWriter, _ *http.Request, _ caddyhttp.Handler) error {
		w.Header().Add("X-RateLimit-Limit", "theirs")
		return caddyhttp.Error(http.StatusBadGateway, errors.New("gone"))
	})
	for i, errorRoutes := range []string{"", "handle_errors {\n respond sorry\n }"} {
		e := newEdge(t, fmt.Sprintf(":8080 {\n tiered_limit a4-failed-%d {\n tier global 9/m\n }\n scripted %s\n %s\n}", i, fails, errorRoutes))
		w := e.send(request{})
		assert.Equal(t, http.StatusBadGateway, w.Code)
		assert.Equal(t, []string{"9"}, w.Header().Values("X-RateLimit-Limit"))
	}
}

// With headers none, and for what is not judged, the upstream's fields stay.
func TestUnjudgedResponsesKeepTheUpstreamsFields(t *testing.T) {
	t.Parallel()
	up := upstream(t, func(w http.ResponseWriter, _ *http.Request) {
		for _, name := range ourFields {
			w.Header().Add(name, "theirs")
		}
		_, _ = io.WriteString(w, "ok")
	})
	for i, c := range []string{
		"headers none\n tier global 9/m",
		"exempt /\n tier global 9/m",
		"dry_run\n tier global 9/m",
		"tier global 9/m {\n dry_run\n }",
		"tier global 9/m {\n match path /other\n }",
		"tier ip 9/m", // no topology: inert
		"tier global off",
	} {
		e := newEdge(t, fmt.Sprintf(":8080 {\n tiered_limit a4-kept-%d {\n %s\n }\n scripted %s\n}", i, c, up))
		w := e.send(request{})
		assert.Equal(t, http.StatusOK, w.Code)
		for _, name := range ourFields {
			assert.Equal(t, []string{"theirs"}, w.Header().Values(name), "%s: %s", c, name)
		}
	}
}

// Through Caddy's own reverse proxy, with interim responses.
func TestThroughTheReverseProxy(t *testing.T) {
	t.Parallel()
	origin := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Link", "</style.css>; rel=preload")
		w.Header().Set("X-RateLimit-Limit", "theirs")
		w.WriteHeader(http.StatusEarlyHints)
		w.Header().Add("X-RateLimit-Limit", "theirs")
		w.Header().Set("X-RateLimit-Reset", "theirs")
		w.Header().Set("Access-Control-Expose-Headers", "ETag")
		_, _ = io.WriteString(w, "from the origin")
	}))
	defer origin.Close()
	e := newEdge(t, fmt.Sprintf(":8080 {\n tiered_limit a4-proxy {\n headers x-ratelimit draft-11\n tier global 2/m\n }\n reverse_proxy %s\n}", origin.URL))
	w := e.exchange(request{}.with("Origin", appOrigin))
	require.Len(t, w.heads, 2)
	assert.Equal(t, http.StatusEarlyHints, w.heads[0].status)
	final := w.final()
	assert.Equal(t, http.StatusOK, final.status)
	assert.Equal(t, "from the origin", w.body.String())
	assert.Equal(t, []string{"2"}, final.header.Values("X-RateLimit-Limit"))
	assert.Equal(t, []string{"1"}, final.header.Values("X-RateLimit-Remaining"))
	assert.Equal(t, []string{strconv.FormatInt(testStart.Unix()+60, 10)}, final.header.Values("X-RateLimit-Reset"))
	assert.Equal(t, []string{`"global";r=1;t=60`}, final.header.Values("RateLimit"))
	exposed := final.header.Values("Access-Control-Expose-Headers")
	require.Len(t, exposed, 1)
	assert.Contains(t, exposed[0], "ETag")
	assert.Contains(t, exposed[0], "RateLimit-Policy")
}

// Streaming goes through: each flush reaches the server.
func TestFlushesReachTheServer(t *testing.T) {
	t.Parallel()
	up := upstream(t, func(w http.ResponseWriter, _ *http.Request) {
		for range 3 {
			_, _ = io.WriteString(w, "event\n")
			_ = http.NewResponseController(w).Flush()
		}
	})
	e := newEdge(t, fmt.Sprintf(":8080 {\n tiered_limit flush {\n tier global 9/m\n }\n scripted %s\n}", up))
	w := e.exchange(request{})
	assert.Equal(t, 3, w.flushes)
	assert.Equal(t, "event\nevent\nevent\n", w.body.String())
}

// The draft's fields are structured fields (RFC 9651), the policy never changes, and nothing is ever negative.
func TestFieldsAreStructuredFields(t *testing.T) {
	t.Parallel()
	e := newEdge(t, `
:8080 {
	tiered_limit a7 {
		trusted_hops 0
		headers draft-11 x-ratelimit
		tier ip 5/s 40/m 1000/1500ms
		tier user 30/h {
			key {header.X-User}
		}
		tier dry 1/m {
			key k
			dry_run
		}
		tier global 100000/d
	}
	respond ok
}`)
	policies := make(map[string]bool)
	statuses := make(map[int]int)
	for range 100 {
		w := e.send(user("u"))
		statuses[w.Code]++
		require.Len(t, w.Header().Values("RateLimit-Policy"), 1)
		policies[w.Header().Get("RateLimit-Policy")] = true
		require.Len(t, w.Header().Values("RateLimit"), 1)
		list, err := httpsfv.UnmarshalList(w.Header().Values("RateLimit"))
		require.NoError(t, err)
		require.Len(t, list, 1)
		item := list[0].(httpsfv.Item)
		remaining, _ := item.Params.Get("r")
		left, _ := item.Params.Get("t")
		require.GreaterOrEqual(t, remaining.(int64), int64(0))
		require.GreaterOrEqual(t, left.(int64), int64(1))
		require.LessOrEqual(t, left.(int64), int64(3600))
		x, err := strconv.Atoi(w.Header().Get("X-RateLimit-Remaining"))
		require.NoError(t, err)
		require.Equal(t, remaining.(int64), int64(x))
		require.Equal(t, resource(w), strings.SplitN(item.Value.(string), ".", 2)[0])
		if w.Code == http.StatusTooManyRequests {
			require.Zero(t, x)
		}
		e.clock.advance(150 * time.Millisecond)
	}
	assert.Len(t, statuses, 2, "served and refused: %v", statuses)
	assert.Equal(t, map[string]bool{
		`"ip";q=5;w=1, "ip.2";q=40;w=60, "ip.3";q=1000, "user";q=30;w=3600, "global";q=100000;w=86400`: true,
	}, policies)
	list, err := httpsfv.UnmarshalList(e.send(user("u")).Header().Values("RateLimit-Policy"))
	require.NoError(t, err)
	require.Len(t, list, 5)
	third := list[2].(httpsfv.Item)
	assert.Equal(t, "ip.3", third.Value)
	quota, _ := third.Params.Get("q")
	assert.Equal(t, int64(1000), quota)
	_, hasWindow := third.Params.Get("w")
	assert.False(t, hasWindow, "1.5 s is not a whole number of seconds")
}

// On a served response the limit with the least left, as a share after this request, is told; ties go to the first.
func TestTheBindingLimitIsTold(t *testing.T) {
	t.Parallel()
	for i, c := range []struct {
		tiers string
		want  []string // RateLimit, request by request
	}{
		{"tier a 10/m {\n key k\n }\n tier b 5/m {\n key k\n }", []string{`"b";r=4;t=60`, `"b";r=3;t=60`}},
		{"tier a 5/m {\n key k\n }\n tier b 10/m {\n key k\n }", []string{`"a";r=4;t=60`}},
		{"tier a 5/m {\n key k\n }\n tier b 5/h {\n key k\n }", []string{`"a";r=4;t=60`}},
		{"tier a 10/m 5/h {\n key k\n }", []string{`"a.2";r=4;t=3600`}},
		{"tier a 5/m 5/h {\n key k\n }", []string{`"a";r=4;t=60`}},
		{"tier a 1/m {\n key k\n }\n tier b 1/h {\n key k\n }", []string{`"a";r=0;t=60`, `"a";r=0;t=60`}},
		{"tier a 2147483647/m {\n key k\n }\n tier b 2147483646/h {\n key k\n }", []string{`"b";r=2147483645;t=3600`}},
		{"tier a 3/1500ms {\n key k\n }", []string{`"a";r=2;t=2`}},
	} {
		e := newEdge(t, fmt.Sprintf(":8080 {\n tiered_limit binding-%d {\n headers draft-11\n %s\n }\n respond ok\n}", i, c.tiers))
		for n, want := range c.want {
			assert.Equal(t, []string{want}, e.send(request{}).Header().Values("RateLimit"), "%s, request %d", c.tiers, n+1)
		}
	}
}

// The x-ratelimit set: exact values, the reset as the Unix second at which the window has ended.
func TestXRateLimitFields(t *testing.T) {
	t.Parallel()
	e := newEdge(t, `
:8080 {
	tiered_limit x-fields {
		trusted_hops 0
		tier ip 3/1500ms
	}
	respond ok
}`)
	e.clock.set(testStart.Add(700 * time.Millisecond))
	for _, remaining := range []string{"2", "1", "0", "0"} {
		w := e.send(request{})
		for field, want := range map[string]string{
			"X-RateLimit-Limit": "3", "X-RateLimit-Remaining": remaining, "X-RateLimit-Resource": "ip",
			"X-RateLimit-Reset": strconv.FormatInt(testStart.Unix()+2, 10), // 1.5 s, rounded up
		} {
			assert.Equal(t, []string{want}, w.Header().Values(field), field)
		}
		assert.Empty(t, w.Header().Values("RateLimit"))
		assert.Empty(t, w.Header().Values("RateLimit-Policy"))
		if w.Code == http.StatusOK {
			assert.Empty(t, w.Header().Values("Retry-After"))
			assert.Empty(t, w.Header().Values("Cache-Control"))
		}
	}
}

// A refusal must not be stored, HEAD gets no body in any format, and each format says what it should.
func TestBodiesOfARefusal(t *testing.T) {
	t.Parallel()
	const graphql = `{"errors":[{"message":"Too many requests. Please retry later.","extensions":{"code":"RATE_LIMITED","tier":"ip","limit":1,"retryAfter":17}}]}`
	for body, want := range map[string]struct{ mediaType, text string }{
		"":             {"application/problem+json", ""},
		"body problem": {"application/problem+json", ""},
		"body graphql": {"application/json", graphql},
		"body text":    {"text/plain; charset=utf-8", "rate limit \"ip\" reached, retry in 17 s\n"},
		"body none":    {"", ""},
	} {
		t.Run(body, func(t *testing.T) {
			t.Parallel()
			name := "a8-" + strings.ReplaceAll(body, " ", "-")
			e := newEdge(t, fmt.Sprintf(":8080 {\n tiered_limit %s {\n trusted_hops 0\n %s\n tier ip 1/m\n }\n respond ok\n}", name, body))
			e.clock.set(testStart.Add(43200 * time.Millisecond))
			require.Equal(t, 1, e.served(1, request{}))
			for _, method := range []string{"GET", "POST", "HEAD", "OPTIONS"} {
				w := e.send(request{method: method})
				wantRefused(t, w, "ip")
				assert.Equal(t, []string{"no-store"}, w.Header().Values("Cache-Control"))
				assert.Equal(t, []string{"17"}, w.Header().Values("Retry-After"))
				assert.Equal(t, want.mediaType, w.Header().Get("Content-Type"))
				switch {
				case method == "HEAD":
					assert.Empty(t, w.Body.String())
				case want.mediaType == "application/problem+json":
					var problem map[string]any
					require.NoError(t, json.Unmarshal(w.Body.Bytes(), &problem))
					assert.NotEmpty(t, problem["title"])
					assert.Contains(t, problem["detail"], "17 s")
					delete(problem, "title")
					delete(problem, "detail")
					assert.Equal(t, map[string]any{
						"type":   "https://iana.org/assignments/http-problem-types#quota-exceeded",
						"status": 429.0, "violated-policies": []any{"ip"}, "retry-after": 17.0,
					}, problem)
				default:
					assert.Equal(t, want.text, w.Body.String())
					assert.True(t, want.mediaType != "application/json" || json.Valid(w.Body.Bytes()))
				}
			}
		})
	}
}

// Rewrites and retries inside Caddy are one request.
func TestAnInternalRewriteCountsOnce(t *testing.T) {
	t.Parallel()
	for i, site := range []string{
		"rewrite /a /b\n tiered_limit %s {\n trusted_hops 0\n tier ip 3/m\n }\n respond ok",
		"uri strip_prefix /a\n tiered_limit %s {\n trusted_hops 0\n tier ip 3/m\n }\n try_files {path} /index.html\n respond ok",
		"route {\n tiered_limit %s {\n trusted_hops 0\n tier ip 3/m\n }\n rewrite /a /b\n rewrite /b /c\n handle /c {\n respond ok\n }\n respond ok\n }",
		"handle_path /a* {\n tiered_limit %s {\n trusted_hops 0\n tier ip 3/m\n }\n rewrite * /z{uri}\n respond ok\n }",
	} {
		name := fmt.Sprint("a8-rewrite-", i)
		e := newEdge(t, ":8080 {\n "+fmt.Sprintf(site, name)+"\n}")
		assert.Equal(t, 2, e.served(2, request{url: "http://localhost/a"}), site)
		assert.Equal(t, []int64{2}, e.used(name, "ip", request{}), site)
	}
}

// Jitter adds to Retry-After alone, from nothing up to its share of the seconds left.
func TestJitter(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ percent, left, most int }{
		{0, 10, 10}, {100, 10, 20}, {50, 10, 15}, {10, 10, 11}, {9, 10, 10}, {50, 3, 4}, {100, 1, 2}, {99, 1, 1}, {25, 60, 75},
	} {
		t.Run(fmt.Sprint(c.percent, "% of ", c.left), func(t *testing.T) {
			t.Parallel()
			e := newEdge(t, fmt.Sprintf(`
:8080 {
	tiered_limit jitter-%d-%d {
		headers x-ratelimit draft-11
		jitter %d
		tier global 1/m
	}
	respond ok
}`, c.percent, c.left, c.percent))
			e.clock.set(testStart.Add(time.Minute - time.Duration(c.left)*time.Second))
			require.Equal(t, 1, e.served(1, request{}))
			var seen []int
			for range 400 {
				w := e.send(request{})
				seconds, err := strconv.Atoi(w.Header().Get("Retry-After"))
				require.NoError(t, err)
				seen = append(seen, seconds)
				require.Equal(t, fmt.Sprintf(`"global";r=0;t=%d`, c.left), w.Header().Get("RateLimit"))
				require.Equal(t, strconv.FormatInt(testStart.Unix()+60, 10), w.Header().Get("X-RateLimit-Reset"))
				require.Contains(t, w.Body.String(), fmt.Sprintf(`"retry-after":%d}`, c.left))
			}
			assert.Equal(t, c.left, slices.Min(seen))
			assert.Equal(t, c.most, slices.Max(seen))
		})
	}
}

// Header directives edit values in place, so no two responses may share one.
func TestResponsesShareNoValues(t *testing.T) {
	t.Parallel()
	e := newEdge(t, `
:8080 {
	header {
		defer
		Cache-Control no- no-no-
		Content-Type json jsonjson
		Access-Control-Allow-Origin app appapp
		Access-Control-Allow-Credentials true truetrue
		Access-Control-Expose-Headers Reset ResetReset
		Vary Origin OriginOrigin
		X-RateLimit-Limit 1 11
		X-RateLimit-Resource global globalglobal
		RateLimit-Policy global globalglobal
	}
	tiered_limit unshared {
		headers x-ratelimit draft-11
		cors https://app.example.com {
			credentials
		}
		tier global 1/m
	}
	respond ok
}`)
	q := request{}.with("Origin", appOrigin)
	served := e.send(q)
	assert.Equal(t, "11", served.Header().Get("X-RateLimit-Limit"))
	first := e.send(q)
	for range 3 {
		assert.Equal(t, first.Header(), e.send(q).Header())
	}
	for field, want := range map[string]string{
		"Cache-Control": "no-no-store", "X-RateLimit-Limit": "11", "X-RateLimit-Resource": "globalglobal",
		"RateLimit-Policy": `"globalglobal";q=1;w=60`, "Vary": "OriginOrigin", "Content-Type": "application/problem+jsonjson",
	} {
		assert.Equal(t, []string{want}, first.Header().Values(field), field)
	}
}

// Fields that an earlier header directive has set stay on a refusal, and so do those of the body's owner.
func TestEarlierFieldsStayOnARefusal(t *testing.T) {
	t.Parallel()
	e := newEdge(t, `
:8080 {
	header {
		Strict-Transport-Security max-age=1
		X-Frame-Options DENY
		-Server
	}
	tiered_limit earlier {
		tier global 1/m
	}
	respond ok
}`)
	e.send(request{})
	w := e.send(request{})
	wantRefused(t, w, "global")
	assert.Equal(t, "max-age=1", w.Header().Get("Strict-Transport-Security"))
	assert.Equal(t, "DENY", w.Header().Get("X-Frame-Options"))
}

// failingStore opens counters that cannot decide.
type failingStore struct{}

type failingCounters struct{ Counters }

func init() { caddy.RegisterModule(failingStore{}) }

func (failingStore) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.tiered_limit.stores.failing_test", New: func() caddy.Module { return new(failingStore) }}
}

func (failingStore) UnmarshalCaddyfile(d *caddyfile.Dispenser) error { d.Next(); return nil }
func (failingStore) Open(StackSpec) (Counters, error)                { return failingCounters{}, nil }

func (failingCounters) Take(context.Context, time.Time, []Claim) (Decision, error) {
	return Decision{RefusedBy: -1}, errors.New("no connection to 192.0.2.77")
}
func (failingCounters) Close() error { return nil }

// A request that the store cannot decide is neither served nor called refused, unless the stack is a dry one.
func TestAStoreThatCannotDecide(t *testing.T) {
	t.Parallel()
	site := `
:8080 {
	tiered_limit undecided%s {
		cors https://app.example.com
		%s
		tier global 1/m
		store failing_test
	}
	respond ok
}`
	e := newEdge(t, fmt.Sprintf(site, "", ""))
	w := e.send(request{}.with("Origin", appOrigin))
	assert.Equal(t, http.StatusServiceUnavailable, w.Code)
	for field, want := range map[string]string{
		"Retry-After": "1", "Cache-Control": "no-store", "Access-Control-Allow-Origin": appOrigin, "Access-Control-Expose-Headers": "Retry-After",
	} {
		assert.Equal(t, []string{want}, w.Header().Values(field), field)
	}
	assert.Empty(t, w.Header().Values("X-RateLimit-Limit"))
	assert.Equal(t, 1.0, e.metric(`requests_total{outcome="store_error",stack="undecided"}`))

	e = newEdge(t, fmt.Sprintf(site, "-dry", "dry_run"))
	w = e.send(request{})
	assert.Equal(t, http.StatusOK, w.Code)
	assert.Equal(t, "ok", w.Body.String())
}
