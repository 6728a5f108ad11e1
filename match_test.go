package tieredlimit

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// matched is a site whose only tier admits one request an hour, of those that match.
func matched(t *testing.T, match string) *edge {
	t.Helper()
	name := "matched-" + strings.ToLower(freshListen()[1:])
	return newEdge(t, fmt.Sprintf(":8080 {\n tiered_limit %s {\n tier global 1/h {\n match %s\n }\n }\n respond ok\n}", name, match))
}

// concerned checks which targets a tier with a matcher is asked about.
func concerned(t *testing.T, match string, yes, no []string) {
	t.Helper()
	e := matched(t, match)
	require.Equal(t, 1, e.served(1, request{url: "http://localhost" + yes[0]}))
	for _, target := range yes {
		assert.Equal(t, 0, e.served(1, request{url: "http://localhost" + target}), "%s is to concern %s", match, target)
	}
	for _, target := range no {
		assert.Equal(t, 1, e.served(1, request{url: "http://localhost" + target}), "%s is not to concern %s", match, target)
	}
}

// A path that may mean something else to the upstream concerns every tier whose matcher looks at the path.
func TestAmbiguousPathsConcernTiersThatLookAtThePath(t *testing.T) {
	t.Parallel()
	ambiguous := []string{
		"/static/..;/login", "/static/..%5clogin", "/static/%252e%252e/login", "/static/../login", "/static/%2e%2e/login", "/static/..%2flogin",
		"/login/../static/x", "/login;/../static/a", "/static/a%2f..%2f..%2flogin", "/static/%c0%ae%c0%ae/login", "/static/%ef%bc%8e%ef%bc%8e/login",
		"/static/..%00/login", "/static/%20../login", "/x/..;/login", "/login;x", "/login%3bx", "/login%20", "/login%00", "/login.", "/login%23", "/login%3fx",
	}
	for _, match := range []string{
		"path /login", "not path /static/*", "path_regexp ^/login$", "not path_regexp ^/static/", "expression path('/login')",
		"expression `!path('/static/*')`", "expression `{path} == '/login'`", "vars {path} /login", "not {\n not path /login\n }",
		"not {\n method POST\n path /static/*\n }",
	} {
		concerned(t, match, append([]string{"/login"}, ambiguous...), nil)
	}
	concerned(t, "path /login", []string{"/login", "/LOGIN", "/%6cogin", "//login", "/login/", "/login//", "/Login/?x=1"},
		[]string{"/", "/loginx", "/login/x", "/static/a", "/static/a%20b", "/caf%c3%a9", "/.well-known/x", "/a.b/c.css"})
	concerned(t, "not path /static/*", []string{"/login", "/", "/x"}, []string{"/static/a", "/static/a.css", "/STATIC/x/y", "/static//a"})
}

// Paths that upstreams commonly take for one another concern the tiers of each.
func TestOtherSpellingsOfAPathConcernItsTiers(t *testing.T) {
	t.Parallel()
	plain := []string{"/login", "/login/", "/login//", "/LOGIN", "/Login/", "//localhost/login", "//x/login/", "///x/login",
		"/%ef%bd%8cogin", "/logi%e2%80%8bn", "/log%c4%b1n", "/login%c2%a0", "/login%e3%80%80/", "//l%6fgin%c2%85", "//login", "/login%c2%9f", "/login+", "/+login+/"}
	none := []string{"/", "/x", "/login2", "//x", "//x/y", "/login/x", "/caf%c3%a9", "/%e4%b8%ad%e6%96%87", "//api/x/", "/c++"}
	for _, match := range []string{
		"path /login", "path_regexp ^/login$", "expression path('/login')", "expression `{path} == '/login'`", "vars {path} /login",
	} {
		concerned(t, match, plain, none)
	}
	concerned(t, "path /login/*", append([]string{"/login/", "/login/x", "/login/x/"}, plain...), []string{"/", "/x", "/login2"})
	concerned(t, "path /api/login/", []string{"/api/login/", "/api/login", "/API/login", "//api/api/login"}, []string{"/login", "/api/loginx"})
	concerned(t, "not path /static/*", []string{"/login", "//static/login", "///static/login", "//static/x/login", "//static", "/static"},
		[]string{"/static/", "/static/a", "/STATIC/A", "/static//a", "//static/static/a"})
	concerned(t, "not path_regexp ^/static/", []string{"/login", "//static/login", "/STATIC/x"}, []string{"/static/a"})
}

// A path that a header field names to the upstream concerns its tiers, and a method that a field or a parameter names.
func TestFieldsThatNameAnotherRequestConcernItsTiers(t *testing.T) {
	t.Parallel()
	for _, match := range []string{"path /login", "path_regexp ^/login", "{\n path /login\n method GET\n }", "not path /static/*"} {
		e := matched(t, match)
		require.Equal(t, 1, e.served(1, request{url: "http://localhost/login"}))
		for _, field := range []string{"X-Original-URL", "X-Rewrite-URL"} {
			q := request{url: "http://localhost/static/x"}
			assert.Equal(t, 1, e.served(1, q))
			assert.Equal(t, 0, e.served(1, q.with(field, "/login")), "%s by %s", match, field)
			assert.Equal(t, 0, e.served(1, q.with(field, "http://h/Login/?x=1")), "%s by %s", match, field)
			assert.Equal(t, 1, e.served(1, q.with(field, "/static/x")), "%s by %s", match, field)
		}
	}
	for _, match := range []string{"method DELETE", "not method POST", "expression method('DELETE')", "{\n path /\n method DELETE\n }"} {
		e := matched(t, match)
		require.Equal(t, 1, e.served(1, request{method: "DELETE"}))
		q := request{method: "POST"}
		assert.Equal(t, 1, e.served(1, q))
		for _, field := range []string{"X-HTTP-Method-Override", "X-HTTP-Method", "X-Method-Override", "X-HTTP-Verb"} {
			assert.Equal(t, 0, e.served(1, q.with(field, "DELETE")), "%s by %s", match, field)
		}
		for _, query := range []string{"?_method=DELETE", "?a=b&%5Fmethod=delete", "?a;_method=DELETE"} {
			assert.Equal(t, 0, e.served(1, request{method: "POST", url: "http://localhost/" + query}), "%s by %s", match, query)
		}
		assert.Equal(t, 1, e.served(1, request{method: "POST", url: "http://localhost/?method=DELETE&paymethod=x"}), match)
	}
}

// With match_mode literal, Caddy's matchers decide as they are.
func TestMatchModeLiteral(t *testing.T) {
	t.Parallel()
	for mode, want := range map[string]int{"literal": 3, "careful": 0} {
		e := matched(t, "path /login\n match_mode "+mode)
		require.Equal(t, 1, e.served(2, request{url: "http://localhost/login"}))
		assert.Equal(t, want, e.served(3, request{url: "http://localhost/@scope%2fname"}), mode)
		assert.Equal(t, want, e.served(3, request{url: "http://localhost/login/"}), mode)
		e = matched(t, "not method GET\n match_mode "+mode)
		require.Equal(t, 1, e.served(1, request{method: "POST"}))
		assert.Equal(t, want, e.served(3, request{}.with("X-HTTP-Method-Override", "POST")), mode)
	}
}

// What a matcher has read of a request leaves the request as it was, for the tiers behind and the upstream.
func TestReadingsLeaveTheRequestAsItWas(t *testing.T) {
	t.Parallel()
	e := newEdge(t, `
:8080 {
	tiered_limit readings-leave {
		tier login 100/h {
			key all
			match path /nothing
		}
		tier exact 100/h {
			key {http.request.uri.path}
			match path_regexp ^//X/
		}
	}
	respond "{http.request.method} {http.request.uri} {http.request.uri.path}"
}`)
	for _, target := range []string{"//X/Y/", "/X%2fy?Z=1", "/L%c3%89/"} {
		assert.True(t, strings.HasPrefix(e.send(request{method: "pOST", url: "http://localhost" + target}).Body.String(), "pOST "+target+" "), target)
	}
}

// A tier that counts by what a path expression has found in a path counts a path that may mean another together with all
// such: neither by what it has found there, nor not at all.
func TestKeysOutOfAmbiguousPathsAreUncertain(t *testing.T) {
	t.Parallel()
	e := newEdge(t, `
:8080 {
	tiered_limit captured-keys {
		tier user 1/h {
			key {http.regexp.user.1}
			match path_regexp user ^/users/([0-9]+)
		}
	}
	respond ok
}`)
	at := func(path string) request { return request{url: "http://localhost" + path} }
	assert.Equal(t, 1, e.served(2, at("/users/7")))
	assert.Equal(t, 1, e.served(1, at("/users/8/")))
	assert.Equal(t, 0, e.served(1, at("/USERS/8")))
	served := e.served(1, at("/users/1/..;/7"))
	for n := range 5 {
		served += e.served(1, at(fmt.Sprintf("/users/%d/..;/7", n+10)))
		served += e.served(1, at(fmt.Sprintf("/x/%d/..%%2f..%%2fusers/7", n)))
	}
	assert.Equal(t, 1, served)
	assert.Equal(t, 11.0, e.metric(`uncertain_total{stack="captured-keys",tier="user"}`))
}

// Other matchers of a set are asked as ever, and tiers that do not look at the path do not look at it.
func TestAmbiguousPathsLeaveOtherMatchersAlone(t *testing.T) {
	t.Parallel()
	e := matched(t, "{\n method POST\n path /login\n }")
	odd := request{method: "POST", url: "http://localhost/static/..;/login"}
	assert.Equal(t, 1, e.served(3, odd))
	odd.method = "GET"
	assert.Equal(t, 3, e.served(3, odd))
	e = matched(t, "method POST")
	assert.Equal(t, 3, e.served(3, odd))
	e = matched(t, "host other.test")
	assert.Equal(t, 3, e.served(3, odd))
}

// What is judged is the path as the upstream receives it.
func TestRewrittenPathsAreJudgedAsTheyAre(t *testing.T) {
	t.Parallel()
	e := newEdge(t, `
:8080 {
	handle_path /api/* {
		tiered_limit rewritten-match {
			tier global 1/h {
				match path /login
			}
		}
		respond {uri}
	}
}`)
	assert.Equal(t, "/login", e.send(request{url: "http://localhost/api/login"}).Body.String())
	assert.Equal(t, 0, e.served(2, request{url: "http://localhost/api/login"}))
	assert.Equal(t, 0, e.served(2, request{url: "http://localhost/api/x;/login"}))
	assert.Equal(t, 2, e.served(2, request{url: "http://localhost/api/x"}))
}

// A query that servers read differently concerns every tier whose matcher looks at the query.
func TestAmbiguousQueriesConcernTiersThatLookAtTheQuery(t *testing.T) {
	t.Parallel()
	ambiguous := []string{
		"/?op=login&%", "/?op=login&a;b", "/?op=login" + strings.Repeat("&", 10_000), "/?a;b&op=login", "/?%zz=1&op=login", "/?op=x&op=login",
		"/?op[]=login", "/?OP=login", "/?op=login;x", "/?x=1;op=login", "/?op=login#1", "/?x=1#&op=login", "/?o%70=lo%67in&%",
	}
	for _, match := range []string{"query op=login", "not query op=other", "not {\n query op=other\n }"} {
		concerned(t, match, append([]string{"/?op=login", "/?op=lo%67in"}, ambiguous...), nil)
	}
	concerned(t, "expression `{query.op} == 'login'`", []string{"/?op=login", "/?op=login&%", "/?a;b&op=login"}, []string{"/?op=x", "/"})
	concerned(t, "query op=login", []string{"/?op=login", "/?a=b&op=login"}, []string{"/", "/?op=other", "/?x=login", "/?op=", "/a?b=c&d=%20"})
	concerned(t, "not query op=other", []string{"/?op=login"}, []string{"/?op=other", "/?op=other&x=1"})
}

// A method in another case, or a WebSocket by extended CONNECT, is what the upstream takes it for.
func TestMethodsAreMatchedAsUpstreamsTakeThem(t *testing.T) {
	t.Parallel()
	for _, match := range []string{"method POST", "not method GET", "expression method('POST')"} {
		e := matched(t, match)
		require.Equal(t, 1, e.served(1, request{method: "POST"}))
		for _, method := range []string{"post", "Post", "pOST"} {
			assert.Equal(t, 0, e.served(1, request{method: method}), "%s and %s", match, method)
		}
		assert.Equal(t, 1, e.served(1, request{method: "GET"}))
	}
	for name, edit := range map[string]func(r *http.Request){
		"HTTP/2": func(r *http.Request) {
			r.ProtoMajor, r.Proto, r.Header[":protocol"] = 2, "HTTP/2.0", []string{"websocket"}
		},
		"HTTP/3": func(r *http.Request) { r.ProtoMajor, r.Proto = 3, "websocket" },
	} {
		e := matched(t, "method GET")
		require.Equal(t, 1, e.served(1, request{}), name)
		q := request{method: "CONNECT", url: "http://localhost/ws", edit: func(r *http.Request) {
			r.URL.Path, r.RequestURI = "/ws", "/ws"
			edit(r)
		}}
		assert.Equal(t, 0, e.served(1, q), name)
		assert.Equal(t, 1, matched(t, "method CONNECT").served(2, q), "%s: also as what it is", name)
	}
}

// The operator is told why a tier concerns such a request.
func TestExplainTellsOfAmbiguousRequests(t *testing.T) {
	t.Parallel()
	e := matched(t, "path /login")
	h := e.handlers()[0]
	q := &requestQuestion{Peer: "192.0.2.1", Path: "/static/..;/login"}
	require.NoError(t, q.check())
	got, err := newForesight().explain(t.Context(), h, q)
	require.NoError(t, err)
	assert.True(t, got.Tiers[0].Applies)
	assert.Contains(t, got.Tiers[0].Why, "its path may mean something else to the upstream")
	q = &requestQuestion{Peer: "192.0.2.1", Path: "/static/x"}
	require.NoError(t, q.check())
	got, err = newForesight().explain(t.Context(), h, q)
	require.NoError(t, err)
	assert.False(t, got.Tiers[0].Applies)
}
