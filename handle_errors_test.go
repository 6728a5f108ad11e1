package tieredlimit

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Sites on one port share one set of error routes. What a site has not asked for does not take its body away, and
// what it has asked for is used.
func TestErrorRoutesOfNeighbours(t *testing.T) {
	t.Parallel()
	const mine = "mine {http.error.status_code} {http.tiered_limit.tier} {http.tiered_limit.limit} {http.tiered_limit.window} " +
		"{http.tiered_limit.remaining} {http.tiered_limit.retry_after} {http.tiered_limit.client_ip}"
	const said = "mine 429 ip 2 60 0 60 203.0.113.1"
	for name, c := range map[string]struct {
		limited, neighbour string // what the sites have besides
		status             int
		body               string // how it begins
	}{
		"none anywhere":            {"", "", 429, "{"},
		"the neighbour's 404":      {"", "handle_errors 404 {\nrespond no\n}", 429, "{"},
		"the neighbour's 429":      {"", "handle_errors 429 {\nrespond no\n}", 429, "{"},
		"the neighbour's any":      {"", "handle_errors {\nrespond no\n}", 429, "{"},
		"own 404":                  {"handle_errors 404 {\nrespond no\n}", "", 429, "{"},
		"own 5xx":                  {"handle_errors 5xx {\nrespond no\n}", "", 429, "{"},
		"own any":                  {"handle_errors {\nrespond \"" + mine + "\"\n}", "", 429, said},
		"own 429":                  {"handle_errors 429 {\nrespond \"" + mine + "\"\n}", "", 429, said},
		"own 4xx":                  {"handle_errors 4xx {\nrespond \"" + mine + "\"\n}", "", 429, said},
		"own 404 429":              {"handle_errors 404 429 {\nrespond \"" + mine + "\"\n}", "", 429, said},
		"own of several":           {"handle_errors 404 {\nrespond no\n}\nhandle_errors 429 {\nrespond \"" + mine + "\"\n}", "", 429, said},
		"own by expression":        {"handle_errors {\n@e expression `{http.error.status_code} == 429`\nrespond @e \"" + mine + "\"\n}", "", 429, said},
		"own by other expression":  {"handle_errors {\n@e expression `{http.error.status_code} == 404`\nrespond @e no\n}", "", 429, "{"},
		"own by path":              {"handle_errors {\nhandle /other/* {\nrespond no\n}\n}", "", 429, "{"},
		"own with another status":  {"handle_errors 429 {\nrespond \"" + mine + "\" 503\n}", "", 503, said},
		"both":                     {"handle_errors 429 {\nrespond \"" + mine + "\"\n}", "handle_errors {\nrespond no\n}", 429, said},
		"own 429, body stated":     {"handle_errors 429 {\nrespond no\n}", "", 429, "rate limit \"ip\" reached, retry in 60 s\n"},
		"own any, matched by host": {"handle_errors {\n@h host b.test\nrespond @h no\n}", "", 429, "{"},
	} {
		listen := freshListen()
		stack := limit2
		if strings.HasSuffix(name, "body stated") {
			stack = strings.Replace(limit2, "tier ip", "body text\ntier ip", 1)
		}
		for _, order := range []string{"first", "last"} {
			sites := []string{hostSite("a.test", listen, stack+c.limited), hostSite("b.test", listen, c.neighbour)}
			if order == "last" {
				sites[0], sites[1] = sites[1], sites[0]
			}
			e := newEdge(t, strings.Join(sites, ""))
			e.served(2, to("a.test"))
			got := e.send(to("a.test"))
			assert.Equal(t, c.status, got.Code, "%s, %s", name, order)
			assert.True(t, strings.HasPrefix(got.Body.String(), c.body) && got.Body.Len() > 0, "%s, %s: got %q, want %q...", name, order,
				got.Body.String(), c.body)
			assert.Equal(t, "60", got.Header().Get("Retry-After"), "%s, %s", name, order)
			assert.Equal(t, "no-store", got.Header().Get("Cache-Control"), "%s, %s", name, order)
			assert.Equal(t, []string{"ip"}, got.Header().Values("X-RateLimit-Resource"), "%s, %s", name, order)
			if c.body == "{" {
				assert.Equal(t, "application/problem+json", got.Header().Get("Content-Type"), "%s, %s", name, order)
			}
			require.Equal(t, 200, e.send(to("b.test")).Code, "%s, %s", name, order)
			e.close()
			e.app.handlers = nil
		}
	}
}

// Asking the error routes leaves no trace of an error on a request that the module answers itself.
func TestNoTraceOfTheQuestion(t *testing.T) {
	t.Parallel()
	e := newEdge(t, freshListen()+" {\nheader X-Status \"[{http.error.status_code}]\"\nheader >X-Late \"[{http.error.status_code}]\"\n"+
		limit2+"respond ok\nhandle_errors 404 {\nrespond no\n}\n}")
	e.served(2, request{})
	got := e.send(request{})
	assert.Equal(t, 429, got.Code)
	assert.Equal(t, "[{http.error.status_code}]", got.Header().Get("X-Status"), "the placeholder is not known")
	assert.Equal(t, "[{http.error.status_code}]", got.Header().Get("X-Late"), "the placeholder is not known")
}

// Error routes match the path that the request came with, also where it was rewritten on the way to the stack.
func TestRewrittenRequests(t *testing.T) {
	t.Parallel()
	e := newEdge(t, freshListen()+" {\nroute {\nuri strip_prefix /v1\n"+limit2+"respond ok\n}\nhandle_errors {\nhandle /v1/* {\n"+
		"respond \"mine {http.error.status_code}\"\n}\n}\n}")
	q := request{url: "http://localhost/v1/x"}
	e.served(2, q)
	got := e.send(q)
	assert.Equal(t, 429, got.Code)
	assert.Equal(t, "mine 429", got.Body.String())
}
