package tieredlimit

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// adminAPI serves the admin routes for an edge, as Caddy's admin endpoint would.
func adminAPI(e *edge) http.Handler {
	mux := http.NewServeMux()
	for _, route := range (&Admin{running: func() *App { return e.app }}).Routes() {
		mux.HandleFunc(route.Pattern, func(w http.ResponseWriter, r *http.Request) {
			err := route.Handler.ServeHTTP(w, r)
			if err == nil {
				return
			}
			var known caddy.APIError
			if !errors.As(err, &known) {
				known = caddy.APIError{HTTPStatus: http.StatusInternalServerError, Err: err}
			}
			known.Message = known.Err.Error()
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(known.HTTPStatus)
			_ = json.NewEncoder(w).Encode(known)
		})
	}
	return mux
}

// ask sends a request to the admin API and returns the status and the body.
func (e *edge) ask(method, path, body string) (int, string) {
	e.t.Helper()
	w := httptest.NewRecorder()
	adminAPI(e).ServeHTTP(w, httptest.NewRequest(method, path, strings.NewReader(body)))
	assert.Equal(e.t, "application/json", w.Header().Get("Content-Type"), path)
	return w.Code, w.Body.String()
}

// answerTo asks and decodes an answer, which must be there.
func answerTo[A any](e *edge, path, body string) *A {
	e.t.Helper()
	method := http.MethodPost
	if body == "" {
		method = http.MethodGet
	}
	status, text := e.ask(method, path, body)
	require.Equal(e.t, http.StatusOK, status, text)
	a := new(A)
	decoder := json.NewDecoder(strings.NewReader(text))
	decoder.DisallowUnknownFields()
	require.NoError(e.t, decoder.Decode(a), text)
	return a
}

const adminSite = `
:8080 {
	tiered_limit %s {
		trusted_hops 1
		tier ip 3/s 5/m
		tier caller 40/m {
			key {http.request.header.X-Key} {http.tiered_limit.client_ip}
			key {http.request.header.X-Token}
			key {http.request.header.X-Other}
			charge checked
		}
		tier posts 2/m {
			key user-{http.request.header.X-User}
			match method POST
			dry_run
		}
		tier off off {
			key a
		}
		tier global 100/m
	}
	respond ok
}`

func adminEdge(t *testing.T, stack string) *edge { return newEdge(t, fmt.Sprintf(adminSite, stack)) }

// from is a request of a client through the one proxy.
func from(client string, header ...string) request {
	q := request{header: http.Header{"X-Forwarded-For": {client}}}
	for i := 0; i < len(header); i += 2 {
		q.header[header[i]] = []string{header[i+1]}
	}
	return q
}

func TestAdminStatus(t *testing.T) {
	e := adminEdge(t, "admin-status")
	e.clock.advance(500 * time.Millisecond)
	assert.Equal(t, 3, e.served(10, from("203.0.113.7")))
	assert.Equal(t, 3, e.served(5, from("203.0.113.8")))
	report := answerTo[statusReport](e, "/tiered_limit/", "")
	require.Len(t, report.Stacks, 1)
	s := report.Stacks[0]
	assert.Equal(t, "admin-status", s.Stack)
	assert.True(t, s.Named)
	assert.Equal(t, "memory", s.Store)
	assert.Equal(t, int64(2*2+2+1), *s.Counters, "two clients on three limits, and one bucket for all")
	assert.Equal(t, int64(0), *s.Overflow)
	assert.Equal(t, int64(6), s.Requests["served"])
	assert.Equal(t, int64(9), s.Requests["refused"])
	require.Len(t, s.Handlers, 1)
	h := s.Handlers[0]
	assert.Equal(t, "limit", h.Mode)
	assert.Equal(t, []string{"ip", "caller", "posts", "global"}, h.Tiers)
	hops := 1
	assert.Equal(t, topologyStatus{
		Source: "trusted_hops", TrustedHops: &hops, Headers: []string{"X-Forwarded-For"}, IPv4Prefix: 32, IPv6Prefix: 64,
	}, h.Topology)
	require.Len(t, s.Tiers, 4)
	ip := s.Tiers[0]
	assert.Equal(t, []limitStatus{{3, "1s"}, {5, "1m"}}, ip.Limits)
	assert.Equal(t, [][]string{{"{http.tiered_limit.client_ip}"}}, ip.Keys)
	assert.Equal(t, "served", ip.Charge)
	assert.Equal(t, "checked", s.Tiers[1].Charge)
	assert.True(t, s.Tiers[2].DryRun)
	assert.Equal(t, "1m", ip.Window)
	assert.Equal(t, int64(9), ip.Refusals)
	require.Len(t, ip.MostRefused, 2)
	assert.Equal(t, int64(7), ip.MostRefused[0].AtLeast)
	assert.Equal(t, int64(7), ip.MostRefused[0].AtMost)
	assert.Equal(t, int64(2), ip.MostRefused[1].AtLeast)
	assert.Empty(t, ip.MostRefused[0].Key, "without log_keys nobody is named")
	_, text := e.ask(http.MethodGet, "/tiered_limit/", "")
	assert.NotContains(t, text, "203.0.113")
	counter := answerTo[counterAnswer](e, "/tiered_limit/inspect", `{"stack":"admin-status","tier":"ip","key":["203.0.113.7"]}`)
	assert.Equal(t, counter.Fingerprint, ip.MostRefused[0].Fingerprint, "who is suspected can be looked up")

	e.clock.advance(time.Minute)
	ip = answerTo[statusReport](e, "/tiered_limit/", "").Stacks[0].Tiers[0]
	assert.Equal(t, int64(0), ip.Refusals, "in a new window")
	assert.Empty(t, ip.MostRefused)
}

func TestAdminStatusNamesKeysOnlyIfAllHandlersAllowIt(t *testing.T) {
	site := func(port, name, more string) string {
		return fmt.Sprintf(":%s {\ntiered_limit %s {\ntrusted_hops 0\ntier ip 1/m\n%s\n}\nrespond ok\n}\n", port, name, more)
	}
	e := newEdge(t, site("8081", "admin-keys", "log_keys")+site("8082", "admin-keys2", "log_keys")+site("8083", "admin-keys2", ""))
	for _, listen := range []string{":8081", ":8082"} {
		e.served(3, request{listen: listen})
	}
	stacks := answerTo[statusReport](e, "/tiered_limit/", "").Stacks
	require.Len(t, stacks, 2)
	assert.Equal(t, []string{"203.0.113.1"}, stacks[0].Tiers[0].MostRefused[0].Key)
	require.Len(t, stacks[1].Handlers, 2)
	assert.Empty(t, stacks[1].Tiers[0].MostRefused[0].Key)
	assert.Equal(t, int64(2), stacks[1].Tiers[0].MostRefused[0].AtLeast)

	e.reload(site("8081", "admin-keys", ""))
	stacks = answerTo[statusReport](e, "/tiered_limit/", "").Stacks
	require.Len(t, stacks, 1)
	assert.Equal(t, int64(2), stacks[0].Tiers[0].Refusals, "kept by a reload")
	assert.Empty(t, stacks[0].Tiers[0].MostRefused[0].Key, "no longer allowed")
}

func TestAdminStatusOfOtherModes(t *testing.T) {
	e := newEdge(t, `
{
	servers :8082 {
		trusted_proxies static 10.0.0.0/8
		trusted_proxies_strict
		client_ip_headers X-Real-Ip X-Forwarded-For
	}
}
:8081 {
	tiered_limit inert-one {
		tier ip 1/m
	}
}
:8082 {
	tiered_limit {
		tier ip off
	}
	tiered_limit {
		trusted_hops 2 Forwarded
		ipv6_prefix 56
		dry_run
		tier ip 1/m
	}
	tiered_limit {
		tier ip 2/m
	}
}`)
	stacks := answerTo[statusReport](e, "/tiered_limit/", "").Stacks
	require.Len(t, stacks, 4)
	byMode := make(map[string]handlerStatus)
	for _, s := range stacks {
		require.Len(t, s.Handlers, 1)
		h := s.Handlers[0]
		byMode[h.Mode+" "+h.Topology.Source] = h
		if h.Mode != "limit" {
			assert.Empty(t, s.Tiers)
			assert.Nil(t, s.Counters)
		}
	}
	require.Len(t, byMode, 4, "%v", byMode)
	assert.Equal(t, []string{"ip"}, byMode["inert not_stated"].Tiers)
	assert.Contains(t, byMode, "off trusted_proxies")
	both := byMode["limit both"]
	assert.True(t, both.DryRun)
	assert.True(t, both.Topology.TrustedProxies)
	assert.Equal(t, 2, *both.Topology.TrustedHops)
	assert.Equal(t, []string{"Forwarded"}, both.Topology.Headers)
	assert.Equal(t, 56, both.Topology.IPv6Prefix)
	assert.Equal(t, []string{"X-Real-Ip", "X-Forwarded-For"}, byMode["limit trusted_proxies"].Topology.Headers)
}

func TestAdminWithoutAnyHandler(t *testing.T) {
	admin := &Admin{running: runningApp}
	w := httptest.NewRecorder()
	require.NoError(t, admin.Routes()[0].Handler.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/tiered_limit/", nil)))
	assert.JSONEq(t, `{"stacks":[]}`, w.Body.String())
	err := admin.Routes()[1].Handler.ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/tiered_limit/inspect",
		strings.NewReader(`{"stack":"x","tier":"ip"}`)))
	var known caddy.APIError
	require.ErrorAs(t, err, &known)
	assert.Equal(t, http.StatusNotFound, known.HTTPStatus)
	assert.ErrorContains(t, err, "the running configuration has none")
}

func TestAdminInspectAndReset(t *testing.T) {
	e := adminEdge(t, "admin-inspect")
	e.clock.advance(2500 * time.Millisecond)
	const question = `{"stack":"admin-inspect","tier":"ip","key":["203.0.113.7"]}`
	assert.Equal(t, 3, e.served(5, from("203.0.113.7")))
	a := answerTo[counterAnswer](e, "/tiered_limit/inspect", question)
	want := []limitReading{
		{limitStatus{3, "1s"}, 3, 0, 1, testStart.Add(3 * time.Second), false},
		{limitStatus{5, "1m"}, 3, 2, 58, testStart.Add(time.Minute), false},
	}
	assert.Equal(t, want, a.Limits)
	assert.Equal(t, want, answerTo[counterAnswer](e, "/tiered_limit/inspect", question).Limits, "asking charges nothing")
	assert.Equal(t, want, answerTo[counterAnswer](e, "/tiered_limit/inspect",
		`{"stack":"admin-inspect","tier":"ip","key":["[::ffff:203.0.113.7]:4711"]}`).Limits, "in any notation")

	for i := range want {
		want[i].Used, want[i].Remaining = 0, want[i].Count
	}
	a = answerTo[counterAnswer](e, "/tiered_limit/reset", question)
	assert.Equal(t, want, a.Limits)
	assert.Equal(t, []string{"203.0.113.7"}, a.Key)
	assert.Equal(t, 3, e.served(5, from("203.0.113.7")), "the whole limit again")
	assert.Equal(t, []int64{6}, e.used("admin-inspect", "global", from("203.0.113.7")), "the others are as they were")

	global := answerTo[counterAnswer](e, "/tiered_limit/reset", `{"stack":"admin-inspect","tier":"global"}`)
	assert.Equal(t, int64(0), global.Limits[0].Used)
	assert.Empty(t, global.Key)
	assert.Equal(t, []int64{0}, e.used("admin-inspect", "global", from("203.0.113.7")))
}

// What is asked for by the values of a key is what requests with these values are counted under.
func TestAdminFindsTheCountersOfRequests(t *testing.T) {
	const site = `
:8080 {
	tiered_limit admin-find {
		trusted_hops 1
		tier ip 9/m
		tier caller 9/m {
			key {http.request.header.X-Key} {http.tiered_limit.client_ip}
		}
		tier token 9/m {
			key {http.request.header.X-Key}
			key {http.request.header.X-Token}
		}
		tier user 9/m {
			key user-{http.request.header.X-User}
		}
		tier global 9/m
	}
	respond ok
}`
	long := strings.Repeat("x", 9000)
	for name, c := range map[string]struct {
		tier, question string
		request        request
	}{
		"address":          {"ip", `"key":["198.51.100.1"]`, from("198.51.100.1")},
		"IPv6 in full":     {"ip", `"key":["2001:db8::1:2:3:4"]`, from("2001:db8::ffff")},
		"IPv6 as counted":  {"ip", `"key":["2001:db8::"]`, from("2001:db8::ffff")},
		"two parts":        {"caller", `"key":["a:b","198.51.100.2"]`, from("198.51.100.2", "X-Key", "a:b")},
		"an empty part":    {"caller", `"key":["","198.51.100.3"]`, from("198.51.100.3")},
		"an alternative":   {"token", `"key":["secret"],"line":2`, from("198.51.100.4", "X-Token", "secret")},
		"with a literal":   {"user", `"key":["user-u1"]`, from("198.51.100.5", "X-User", "u1")},
		"a value quoted":   {"user", `"key":["user-\"\u00fc\\"]`, from("198.51.100.6", "X-User", "\"ü\\")},
		"long":             {"user", `"key":["user-` + long + `"]`, from("198.51.100.7", "X-User", long)},
		"one for everyone": {"global", `"key":[]`, from("198.51.100.8")},
	} {
		t.Run(name, func(t *testing.T) {
			e := newEdge(t, site)
			c.request.method = http.MethodPost
			require.Equal(t, http.StatusOK, e.send(c.request).Code)
			question := `{"stack":"admin-find","tier":"` + c.tier + `",` + c.question + `}`
			got := answerTo[counterAnswer](e, "/tiered_limit/inspect", question)
			assert.Equal(t, int64(1), got.Limits[0].Used)
			got = answerTo[counterAnswer](e, "/tiered_limit/reset", question)
			assert.Equal(t, int64(0), got.Limits[0].Used)
		})
	}
}

func TestAdminRefusesBadQuestions(t *testing.T) {
	e := newEdge(t, fmt.Sprintf(adminSite, "admin-bad")+`
:8081 {
	tiered_limit admin-inert {
		tier ip 1/m
	}
}`)
	require.Equal(t, http.StatusOK, e.send(request{listen: ":8080", header: http.Header{"X-Forwarded-For": {"203.0.113.7"}}}).Code)
	before := answerTo[statusReport](e, "/tiered_limit/", "")
	long := strings.Repeat("x", maxAdminBody-200)
	counter := func(tier, rest string) string { return `{"stack":"admin-bad","tier":"` + tier + `"` + rest + `}` }
	for _, c := range []struct {
		method, path, body string
		status             int
		message            string
	}{
		{"POST", "", "", 405, "method POST is not allowed here; use GET, HEAD"},
		{"GET", "inspect", "", 405, "use POST"},
		{"DELETE", "reset", "{}", 405, "use POST"},
		{"PUT", "explain", "{}", 405, "use POST"},
		{"GET", "nonsense", "", 404, "there is no endpoint /tiered_limit/nonsense"},
		{"POST", "inspect", "", 400, "the body is empty"},
		{"POST", "inspect", "nonsense", 400, "reading the body as JSON"},
		{"POST", "inspect", `{"stack":"admin-bad"`, 400, "reading the body as JSON"},
		{"POST", "inspect", `{"stack":"admin-bad","tier":7}`, 400, "reading the body as JSON"},
		{"POST", "inspect", `{"stac":"admin-bad"}`, 400, `unknown field "stac"`},
		{"POST", "inspect", `{} {}`, 400, "more than one JSON value"},
		{"POST", "inspect", `{} x`, 400, "reading the body as JSON"},
		{"POST", "reset", `{"stack":"` + strings.Repeat("x", maxAdminBody) + `"}`, 413, "longer than 65536 bytes"},
		{"POST", "explain", `{"peer":"` + strings.Repeat("x", maxAdminBody) + `"}`, 413, "longer than 65536 bytes"},
		{"POST", "reset", `{}` + strings.Repeat(" ", maxAdminBody), 413, "longer than 65536 bytes"},
		{"POST", "inspect", `{}`, 400, "stack is missing"},
		{"POST", "inspect", `{"stack":"nobody","tier":"ip"}`, 404, `there is no stack "nobody"; there are "admin-bad", "admin-inert"`},
		{"POST", "inspect", counter("", ""), 400, "tier is missing"},
		{"POST", "inspect", counter("nobody", ""), 404, `has no tier "nobody"; it has "ip", "caller", "posts", "off", "global"`},
		{"POST", "reset", counter("off", `,"key":["a"]`), 409, "is switched off"},
		{"POST", "reset", `{"stack":"admin-inert","tier":"ip","key":["1.2.3.4"]}`, 409, "is inert"},
		{"POST", "reset", counter("ip", ""), 400, "key is missing"},
		{"POST", "reset", counter("ip", `,"key":[]`), 400, "key is missing"},
		{"POST", "reset", counter("ip", `,"key":[""]`), 400, `"" is not an IP address`},
		{"POST", "reset", counter("ip", `,"key":["203.0.113"]`), 400, `"203.0.113" is not an IP address`},
		{"POST", "reset", counter("ip", `,"key":["203.0.113.7","x"]`), 400, "the tier has no key of 2 parts; its first has 1"},
		{"POST", "reset", counter("ip", `,"key":["203.0.113.7"],"line":2`), 400, "line 2 is not between 1 and 1"},
		{"POST", "reset", counter("ip", `,"key":["203.0.113.7"],"line":-1`), 400, "line -1 is not between 1 and 1"},
		{"POST", "reset", counter("caller", `,"key":["x"]`), 400, "several keys of 1 parts"},
		{"POST", "reset", counter("caller", `,"key":["x"],"line":1`), 400, "key 1 has 2 parts, not 1"},
		{"POST", "reset", counter("posts", `,"key":["u1"]`), 400, `"u1" is not of the form "user-..."`},
		{"POST", "reset", counter("posts", `,"key":["user-"]`), 400, "the key is empty"},
		{"POST", "reset", counter("global", `,"key":["x"]`), 400, "one counter for everybody"},
		{"POST", "explain", `{}`, 400, "peer is missing"},
		{"POST", "explain", `{"stack":"nobody","peer":"10.0.0.1"}`, 404, "there is no stack"},
		{"POST", "explain", `{"peer":"nobody"}`, 400, `peer "nobody" is neither an IP address nor unix`},
		{"POST", "explain", `{"peer":"10.0.0.1","method":"G ET"}`, 400, `method "G ET"`},
		{"POST", "explain", `{"peer":"10.0.0.1","scheme":"ftp"}`, 400, `scheme "ftp" is not one of http, https`},
		{"POST", "explain", `{"peer":"10.0.0.1","path":"x"}`, 400, `path "x" does not begin with /`},
		{"POST", "explain", `{"peer":"10.0.0.1","path":"/%zz"}`, 400, `path "/%zz"`},
		{"POST", "explain", `{"peer":"10.0.0.1","host":"a b"}`, 400, `host "a b" is not a host`},
		{"POST", "explain", `{"peer":"10.0.0.1","headers":{"A B":"x"}}`, 400, `"A B" is not a field name`},
		{"POST", "explain", `{"peer":"10.0.0.1","headers":{"A":["x\n"]}}`, 400, "is not a field value"},
		{"POST", "explain", `{"peer":"10.0.0.1","headers":{"A":7}}`, 400, "reading the body as JSON"},
		{"POST", "explain", `{"peer":"10.0.0.1","headers":{"A":null}}`, 400, "a header field is null"},
		{"POST", "explain", `{"peer":"10.0.0.1","headers":{"A":["x",null]}}`, 400, "element 2 of an array is null"},
		{"POST", "explain", `{"peer":"10.0.0.1","headers":{"A":{"B":"x"}}}`, 400, "reading the body as JSON"},
		{"POST", "explain", `{"peer":"10.0.0.1","headers":["A","x"]}`, 400, "reading the body as JSON"},
		{"POST", "reset", counter("ip", `,"key":[null]`), 400, "element 1 of an array is null"},
		{"POST", "reset", counter("ip", `,"key":"203.0.113.7"`), 400, "reading the body as JSON"},
		{"POST", "reset", counter("ip", `,"key":null`), 400, "key is missing"},
		{"POST", "reset", counter("ip", `,"key":[["203.0.113.7"]]`), 400, "reading the body as JSON"},
		{"POST", "reset", counter("caller", `,"key":["x"],"line":NaN`), 400, "reading the body as JSON"},
		{"POST", "reset", counter("caller", `,"key":["x"],"line":1.5`), 400, "reading the body as JSON"},
		{"POST", "reset", counter("caller", `,"key":["x"],"line":1e300`), 400, "reading the body as JSON"},
		{"POST", "reset", "null", 400, "stack is missing"},
		{"POST", "reset", `["admin-bad"]`, 400, "reading the body as JSON"},
		{"POST", "reset", strings.Repeat("[", maxAdminBody-1), 400, "reading the body as JSON"},
		{"POST", "explain", strings.Repeat(`{"headers":`, 5900), 400, "reading the body as JSON"},
		// What is asked for is not repeated in full.
		{"POST", "reset", `{"` + long + `":1}`, 400, "unknown field"},
		{"POST", "reset", `{"stack":"` + long + `"}`, 404, "there is no stack"},
		{"POST", "reset", counter(long, ""), 404, "has no tier"},
		{"POST", "reset", counter("ip", `,"key":["`+long+`"]`), 400, "is not an IP address"},
		{"POST", "reset", counter("posts", `,"key":["`+long+`"]`), 400, "is not of the form"},
		{"POST", "reset", counter("global", `,"key":["`+long+`"]`), 400, "one counter for everybody"},
		{"POST", "explain", `{"peer":"` + long + `"}`, 400, "is neither an IP address nor unix"},
		{"POST", "explain", `{"peer":"10.0.0.1","scheme":"` + long + `"}`, 400, "is not one of http, https"},
		{"POST", "explain", `{"peer":"10.0.0.1","method":" ` + long + `"}`, 400, "is not a method"},
		{"POST", "explain", `{"peer":"10.0.0.1","path":"` + long + `"}`, 400, "does not begin with /"},
		{"POST", "explain", `{"peer":"10.0.0.1","path":"/%zz` + long + `"}`, 400, "invalid URL escape"},
		{"POST", "explain", `{"peer":"10.0.0.1","host":" ` + long + `"}`, 400, "is not a host"},
		{"POST", "explain", `{"peer":"10.0.0.1","headers":{" ` + long + `":"x"}}`, 400, "is not a field name"},
		{"POST", "explain", `{"peer":"10.0.0.1","headers":{"` + long + `":"x\n"}}`, 400, "is not a field value"},
	} {
		status, body := e.ask(c.method, "/tiered_limit/"+c.path, c.body)
		assert.Equal(t, c.status, status, "%s %s %.80s: %.200s", c.method, c.path, c.body, body)
		var got struct{ Error string }
		require.NoError(t, json.Unmarshal([]byte(body), &got), body)
		assert.Contains(t, got.Error, c.message, "%.80s", c.body)
		assert.Less(t, len(body), 900, "the error does not repeat a long question")
	}
	assert.Equal(t, before, answerTo[statusReport](e, "/tiered_limit/", ""), "nothing has changed")
}

func TestAdminReportsAStoreThatIsAway(t *testing.T) {
	e := newEdge(t, fmt.Sprintf(":8080 {\ntiered_limit admin-away {\ntrusted_hops 0\ntier ip 1/m\nstore redis {\naddress %s\n}\n}\n}", freeAddress(t)))
	for _, path := range []string{"inspect", "reset"} {
		status, body := e.ask(http.MethodPost, "/tiered_limit/"+path, `{"stack":"admin-away","tier":"ip","key":["203.0.113.7"]}`)
		assert.Equal(t, http.StatusServiceUnavailable, status, body)
		assert.Contains(t, body, "the store cannot decide (connect)")
	}
	a := answerTo[explainAnswer](e, "/tiered_limit/explain", `{"peer":"203.0.113.7"}`)
	assert.Equal(t, "store_error", a.Handlers[0].Outcome)
	assert.Contains(t, a.Handlers[0].Error, "the store cannot decide (connect)")
}

func TestAdminMethodsAreNamed(t *testing.T) {
	w := httptest.NewRecorder()
	adminAPI(adminEdge(t, "admin-methods")).ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/tiered_limit/reset", nil))
	assert.Equal(t, "POST", w.Header().Get("Allow"))
	body, err := io.ReadAll(w.Result().Body)
	require.NoError(t, err)
	assert.Contains(t, string(body), `"error"`)
}
