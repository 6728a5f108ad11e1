package tieredlimit

import (
	"errors"
	"fmt"
	"net/http"
	"testing"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// limitFields are all fields by which a response tells of a limit.
var limitFields = []string{
	"X-Ratelimit-Limit", "X-Ratelimit-Remaining", "X-Ratelimit-Reset", "X-Ratelimit-Resource", "Ratelimit", "Ratelimit-Policy", "Ratelimit-Limit",
	"X-Rate-Limit-Limit", "Retry-After",
}

// told are the limit fields of a head.
func told(header http.Header) http.Header {
	got := make(http.Header)
	for _, name := range limitFields {
		if values, there := header[name]; there {
			got[name] = values
		}
	}
	return got
}

// An upstream's own 429 and 503 keep the fields by which it tells of its limit, and get none of the stack's beside them:
// those would speak of another limit. Without such fields, and with other statuses, the stack's are there as ever.
func TestAnUpstreamsRefusalIsItsOwn(t *testing.T) {
	t.Parallel()
	ours := []string{"X-Ratelimit-Limit", "X-Ratelimit-Remaining", "X-Ratelimit-Reset", "X-Ratelimit-Resource", "Ratelimit-Policy", "Ratelimit"}
	appended := func(w http.ResponseWriter, fields http.Header) { // as the reverse proxy does
		for name, values := range fields {
			for _, v := range values {
				w.Header().Add(name, v)
			}
		}
	}
	replaced := func(w http.ResponseWriter, fields http.Header) {
		for name, values := range fields {
			w.Header()[name] = values
		}
	}
	for _, c := range []struct {
		status int
		theirs http.Header
		keeps  bool
	}{
		{429, http.Header{"X-Ratelimit-Limit": {"7"}, "X-Ratelimit-Remaining": {"0"}}, true},
		{429, http.Header{"Ratelimit": {`"theirs";r=0`}}, true},
		{429, http.Header{"Ratelimit-Limit": {"7"}}, true},
		{429, http.Header{"X-Rate-Limit-Limit": {"7"}}, true},
		{429, http.Header{"Retry-After": {"9"}}, true},
		{503, http.Header{"X-Ratelimit-Limit": {"100"}}, true}, // the very value of ours
		{503, http.Header{"Retry-After": {"9"}}, true},
		{429, http.Header{"X-Other": {"7"}}, false},
		{503, nil, false},
		{200, http.Header{"X-Ratelimit-Limit": {"7"}}, false},
		{403, http.Header{"X-Ratelimit-Limit": {"7"}}, false},
		{502, http.Header{"X-Ratelimit-Limit": {"7"}}, false},
	} {
		for way, put := range map[string]func(http.ResponseWriter, http.Header){"appended": appended, "replaced": replaced} {
			for _, body := range []string{"", "x"} {
				name := upstream(t, func(w http.ResponseWriter, _ *http.Request) {
					put(w, c.theirs)
					w.Header().Add("Access-Control-Expose-Headers", "X-Theirs")
					w.WriteHeader(c.status)
					fmt.Fprint(w, body)
				})
				e := newEdge(t, ":8080 {\ntiered_limit own-refusal {\nheaders x-ratelimit draft-11\ntier global 100/m\n}\nscripted "+name+"\n}")
				got := e.exchange(request{}.with("Origin", "https://app.example")).final()
				at := fmt.Sprintf("%d %v %s", c.status, c.theirs, way)
				require.Equal(t, c.status, got.status, at)
				if c.keeps {
					assert.Equal(t, told(c.theirs), told(got.header), at)
					assert.Equal(t, []string{"X-Theirs"}, got.header["Access-Control-Expose-Headers"], at)
					continue
				}
				for _, field := range ours {
					assert.Len(t, got.header[field], 1, "%s: %s", at, field)
				}
				assert.Equal(t, []string{"100"}, got.header["X-Ratelimit-Limit"], at)
				assert.Contains(t, got.header.Get("Access-Control-Expose-Headers"), "X-RateLimit-Limit", at)
				e.close()
			}
		}
	}
}

// The same holds for another handler's error, for the outer of two stacks, and beside a dry run's field.
func TestAnotherHandlersRefusalIsItsOwn(t *testing.T) {
	t.Parallel()
	other := script(t, func(w http.ResponseWriter, _ *http.Request, _ caddyhttp.Handler) error {
		w.Header().Set("Retry-After", "9")
		return caddyhttp.Error(http.StatusTooManyRequests, errors.New("another limit"))
	})
	for name, stacks := range map[string]string{
		"one":   "tiered_limit another-one {\ntier global 100/m\n}",
		"inner": "tiered_limit another-outer {\ntier global 100/m\n}\ntiered_limit another-inner {\ntier global 50/m\n}",
		"outer": "tiered_limit another-outer2 {\ntier global 50/m\n}\ntiered_limit another-inner2 {\ntier global 100/m\n}",
		"dry":   "tiered_limit another-dry {\ndry_run header\ntier global 1/h\n}\ntiered_limit another-live {\ntier global 50/m\n}",
	} {
		e := newEdge(t, ":8080 {\nroute {\n"+stacks+"\nscripted "+other+"\n}\n}")
		e.exchange(request{})
		got := e.exchange(request{}).final()
		assert.Equal(t, 429, got.status, name)
		assert.Equal(t, http.Header{"Retry-After": {"9"}}, told(got.header), name)
		assert.Equal(t, name == "dry", got.header.Get("X-RateLimit-Dry-Run") == "refused", name)
	}
}

// Interim responses have the upstream's fields and none of the stack's; the final one has the stack's once.
func TestInterimResponsesHaveNoneOfOurFields(t *testing.T) {
	t.Parallel()
	for _, status := range []int{http.StatusProcessing, http.StatusEarlyHints, 110} {
		name := upstream(t, func(w http.ResponseWriter, _ *http.Request) { // as the reverse proxy passes one on
			w.Header().Add("X-RateLimit-Limit", "7")
			w.Header().Set("Link", "</a.css>; rel=preload")
			w.WriteHeader(status)
			w.Header().Del("X-RateLimit-Limit")
			w.Header().Del("Link")
			w.WriteHeader(http.StatusOK)
		})
		e := newEdge(t, ":8080 {\ntiered_limit interim {\nheaders x-ratelimit draft-11\ntier global 100/m\n}\nscripted "+name+"\n}")
		heads := e.exchange(request{}.with("Origin", "https://app.example")).heads
		require.Len(t, heads, 2)
		assert.Equal(t, http.Header{"X-Ratelimit-Limit": {"7"}}, told(heads[0].header))
		assert.Equal(t, "</a.css>; rel=preload", heads[0].header.Get("Link"))
		assert.Empty(t, heads[0].header.Get("Access-Control-Expose-Headers"))
		assert.Len(t, told(heads[1].header), 6)
		assert.Equal(t, []string{"100"}, heads[1].header["X-Ratelimit-Limit"])
		e.close()
	}
}

// A GraphQL client that asks for its own media type gets it, since it reads errors in no other; others get JSON.
func TestGraphQLErrorsComeAsAsked(t *testing.T) {
	t.Parallel()
	const own, plain = "application/graphql-response+json", "application/json"
	for accept, want := range map[string]string{
		"": plain, "*/*": plain, "application/json": plain, own: own, "application/graphql-response+json, application/json;q=0.9": own,
		"application/json, Application/GraphQL-Response+JSON;q=0.1": own, "application/graphql-response+json; charset=utf-8": own,
		"application/graphql-response+json;q=0, application/json": plain, "application/graphql-response+jsonx": plain,
		"application/graphql-response+json;q=x": plain, "application/*": plain, ";;": plain,
	} {
		for status, block := range map[int]string{429: "tier ip 1/d", 503: "tier ip 1/d\nstore away"} {
			e := newEdge(t, ":8080 {\ntiered_limit graphql-accept {\ntrusted_hops 0\nbody graphql\n"+block+"\n}\nrespond ok\n}")
			q := request{}
			e.send(q)
			if accept != "" {
				q = q.with("Accept", accept)
			}
			w := e.send(q)
			require.Equal(t, status, w.Code)
			assert.Equal(t, want, w.Header().Get("Content-Type"), accept)
			assert.Contains(t, w.Body.String(), `{"errors":[{"message"`)
			e.close()
		}
	}
	e := newEdge(t, ":8080 {\ntiered_limit graphql-lines {\ntrusted_hops 0\nbody graphql\ntier ip 1/d\n}\nrespond ok\n}")
	e.send(request{})
	assert.Equal(t, own, e.send(request{}.with("Accept", "application/json", own)).Header().Get("Content-Type"), "in another line")
}

// A store that cannot decide is answered as a refusal is: by the site's own error routes where they take a 503 and no body
// is stated, and by the module otherwise.
func TestErrorRoutesAnswerForAStoreThatIsAway(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ routes, body, want string }{
		{"handle_errors {\nrespond \"mine {err.status_code} {err.message}\"\n}", "", "mine 503 rate limits cannot be checked at present"},
		{"handle_errors 503 {\nrespond mine\n}", "", "mine"},
		{"handle_errors 5xx {\nrespond mine 500\n}", "", "mine"},
		{"handle_errors 429 404 {\nrespond mine\n}", "", ""},
		{"handle_errors {\nrespond mine\n}", "body problem", ""},
		{"handle_errors {\nrespond mine\n}", "body text", "service unavailable, retry in 3 s\n"},
		{"", "", ""},
	} {
		e := newEdge(t, ":8080 {\ntiered_limit away-errors {\ntrusted_hops 0\ntier ip 1/d\nstore away\n"+c.body+"\n}\nrespond ok\n"+c.routes+"\n}")
		w := e.send(request{})
		if c.want == "" {
			assert.Contains(t, w.Body.String(), "Rate limits cannot be checked at present", c.routes)
			assert.Equal(t, 503, w.Code)
		} else {
			assert.Equal(t, c.want, w.Body.String(), c.routes)
		}
		assert.Equal(t, "3", w.Header().Get("Retry-After"), c.routes)
		assert.Equal(t, "no-store", w.Header().Get("Cache-Control"), c.routes)
		assert.Equal(t, 1.0, e.metric(`requests_total{outcome="store_error",stack="away-errors"}`))
		e.close()
	}
}
