package tieredlimit

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tieredlimit/caddy-tieredlimit/internal/clientip"
)

// described is the question about a request that a test would send.
func described(t *testing.T, stack string, q request) string {
	t.Helper()
	path := strings.TrimPrefix(q.url, "http://localhost")
	body, err := json.Marshal(map[string]any{
		"stack": stack, "peer": "203.0.113.1:50000", "method": q.method, "host": "localhost", "path": path, "headers": q.header,
	})
	require.NoError(t, err)
	return string(body)
}

func TestExplain(t *testing.T) {
	e := adminEdge(t, "explain")
	e.clock.advance(2500 * time.Millisecond)
	q := from("9.9.9.9, 203.0.113.7", "X-Key", "k", "X-User", "u")
	q.method = http.MethodPost
	a := answerTo[explainAnswer](e, "/tiered_limit/explain", described(t, "explain", q))
	require.Len(t, a.Handlers, 1)
	x := a.Handlers[0]
	assert.Equal(t, "explain", x.Stack)
	assert.Equal(t, "served", x.Outcome)
	assert.Empty(t, x.RefusedBy)
	assert.Equal(t, &clientView{
		Peer: "203.0.113.1", Source: "trusted_hops", Header: "X-Forwarded-For",
		Chain:   []entryView{{"9.9.9.9", useUnread}, {"203.0.113.7", useClient}},
		Address: "203.0.113.7", Counted: "203.0.113.7",
	}, x.Client)
	require.Len(t, x.Tiers, 4)
	assert.Equal(t, []string{"203.0.113.7"}, x.Tiers[0].Key)
	assert.Equal(t, []string{"k", "203.0.113.7"}, x.Tiers[1].Key)
	assert.Equal(t, 1, x.Tiers[1].Line)
	assert.Equal(t, []string{"user-u"}, x.Tiers[2].Key)
	assert.Empty(t, x.Tiers[3].Key)
	assert.Equal(t, limitReading{limitStatus{5, "1m"}, 0, 5, 58, testStart.Add(time.Minute), false}, x.Tiers[0].Limits[1])

	assert.Equal(t, []int{200, 200, 200, 429}, e.statuses(4, q))
	x = answerTo[explainAnswer](e, "/tiered_limit/explain", described(t, "explain", q)).Handlers[0]
	assert.Equal(t, "refused", x.Outcome)
	assert.Equal(t, "ip", x.RefusedBy)
	assert.Equal(t, int64(1), x.RetryAfter)
	assert.True(t, x.Tiers[0].Refuses)
	assert.True(t, x.Tiers[0].Limits[0].Exceeded)
	assert.False(t, x.Tiers[0].Limits[1].Exceeded)
	assert.Equal(t, int64(3), x.Tiers[0].Limits[1].Used)
	assert.Equal(t, "not asked, since a tier in front refuses", x.Tiers[1].Why)

	other := from("203.0.113.8", "X-User", "u")
	x = answerTo[explainAnswer](e, "/tiered_limit/explain", described(t, "explain", other)).Handlers[0]
	assert.Equal(t, "it does not match the request", x.Tiers[2].Why)
	other.method = http.MethodPost
	x = answerTo[explainAnswer](e, "/tiered_limit/explain", described(t, "explain", other)).Handlers[0]
	assert.Equal(t, "dry_refused", x.Outcome)
	assert.Equal(t, "posts", x.RefusedBy)
	assert.True(t, x.Tiers[2].DryRun)
	assert.True(t, x.Tiers[2].Refuses)
	assert.False(t, x.Tiers[2].Limits[0].Exceeded && x.Tiers[2].Limits[0].Used < 2)
}

// An explanation leaves no trace: no counter, no metric, no log line, nobody in the list of the most refused.
func TestExplainChangesNothing(t *testing.T) {
	e := newEdge(t, `
:8080 {
	tiered_limit explain-pure {
		trusted_hops 1
		events
		log_keys
		tier ip 1/m
		tier user 1/m
		tier dry 1/m {
			key {http.request.header.X-Key}
			dry_run
		}
	}
	respond ok
}`)
	q := from("203.0.113.7", "X-Key", "k")
	e.send(q)
	status := func() *statusReport { return answerTo[statusReport](e, "/tiered_limit/", "") }
	before, text := status(), e.logs.text()
	for _, client := range []string{"203.0.113.7", "203.0.113.8", "nonsense", "", "1.1.1.1, 2.2.2.2"} {
		for _, peer := range []string{"10.0.0.1", "unix", "[2001:db8::1]:443"} {
			body := fmt.Sprintf(`{"peer":%q,"headers":{"x-forwarded-for":%q,"X-Key":["k"]}}`, peer, client)
			for range 3 {
				answerTo[explainAnswer](e, "/tiered_limit/explain", body)
			}
		}
	}
	assert.Equal(t, before, status())
	assert.Equal(t, text, e.logs.text())
	assert.Equal(t, float64(1), e.metric(`skipped_total{stack="explain-pure",tier="user"}`), "by the request alone")
	assert.Equal(t, float64(0), e.metric(`client_fallback_total{reason="bad_entry",stack="explain-pure"}`))
	e.send(q)
	assert.Len(t, e.logs.lines("info", "rate limit reached"), 1, "the first refusal is still logged as the first")
}

func TestExplainOtherOutcomes(t *testing.T) {
	e := newEdge(t, `
{
	servers :8083 {
		trusted_proxies static 10.0.0.0/8
		trusted_proxies_strict
	}
}
:8081 {
	tiered_limit explain-inert {
		tier ip 1/m
	}
}
:8082 {
	tiered_limit explain-off {
		tier ip off
	}
}
:8083 {
	tiered_limit explain-exempt {
		exempt /health
		exempt_clients 192.0.2.0/24
		tier user 1/m
		tier secure 1/m {
			key {http.request.header.X-Key}
			match protocol https
		}
	}
	tiered_limit explain-dry {
		dry_run
		tier ip 1/m
	}
	respond ok
}
:8084 {
	tiered_limit explain-broken {
		trusted_hops 0
		tier ip 1/m {
			match expression "int({http.request.header.X-N}) > 0"
		}
	}
}`)
	ask := func(stack, rest string) explanation {
		a := answerTo[explainAnswer](e, "/tiered_limit/explain", fmt.Sprintf(`{"stack":%q,%s}`, stack, rest))
		require.Len(t, a.Handlers, 1)
		return a.Handlers[0]
	}
	assert.Equal(t, "inert", ask("explain-inert", `"peer":"10.0.0.1"`).Outcome)
	assert.Contains(t, ask("explain-inert", `"peer":"10.0.0.1"`).Client.Note, "not stated")
	assert.Equal(t, "off", ask("explain-off", `"peer":"10.0.0.1"`).Outcome)
	assert.Equal(t, "exempt", ask("explain-exempt", `"peer":"10.0.0.1","path":"/health?x"`).Outcome)
	assert.Equal(t, "exempt", ask("explain-exempt", `"peer":"10.0.0.1","headers":{"X-Forwarded-For":"192.0.2.9"}`).Outcome)
	assert.Equal(t, "served", ask("explain-exempt", `"peer":"198.51.100.1","headers":{"X-Forwarded-For":"192.0.2.9"}`).Outcome)
	assert.Equal(t, "preflight", ask("explain-exempt",
		`"peer":"10.0.0.1","method":"OPTIONS","headers":{"Origin":"https://a.test","Access-Control-Request-Method":"POST"}`).Outcome)

	x := ask("explain-exempt", `"peer":"198.51.100.1","placeholders":{"http.auth.user.id":"alice"}`)
	assert.Equal(t, []string{"alice"}, x.Tiers[0].Key)
	assert.Equal(t, "it does not match the request", x.Tiers[1].Why)
	x = ask("explain-exempt", `"peer":"198.51.100.1","placeholders":{"{http.auth.user.id}":"alice"},"scheme":"https"`)
	assert.Equal(t, []string{"alice"}, x.Tiers[0].Key)
	assert.Equal(t, "every key is empty", x.Tiers[1].Why)
	assert.Equal(t, "every key is empty", ask("explain-exempt", `"peer":"198.51.100.1"`).Tiers[0].Why)

	e.send(request{listen: ":8083"})
	x = ask("explain-dry", `"peer":"203.0.113.1"`)
	assert.True(t, x.DryRun)
	assert.Equal(t, "dry_refused", x.Outcome)
	assert.Equal(t, "ip", x.RefusedBy)

	x = ask("explain-broken", `"peer":"203.0.113.1","headers":{"X-N":"x"}`)
	assert.Equal(t, "error", x.Outcome)
	assert.NotEmpty(t, x.Error)

	all := answerTo[explainAnswer](e, "/tiered_limit/explain", `{"peer":"203.0.113.1"}`)
	assert.Len(t, all.Handlers, 5, "without a stack, all of them")
}

// What an explanation foretells is what then happens, whatever is sent.
func TestExplainForetellsWhatHappens(t *testing.T) {
	e := adminEdge(t, "foretell")
	r := rand.New(rand.NewPCG(1, 2))
	pick := func(list ...string) string { return list[r.IntN(len(list))] }
	seen := make(map[string]int)
	for range 400 {
		q := request{method: pick("GET", "POST"), header: http.Header{}}
		if client := pick("", "203.0.113.7", "203.0.113.8", "1.1.1.1, 203.0.113.9", "x", "203.0.113.7, "); client != "" {
			q.header.Set("X-Forwarded-For", client)
		}
		for _, field := range []string{"X-Key", "X-Token", "X-User"} {
			if value := pick("", "a", "b"); value != "" {
				q.header.Set(field, value)
			}
		}
		x := answerTo[explainAnswer](e, "/tiered_limit/explain", described(t, "foretell", q)).Handlers[0]
		before := e.metric(`requests_total{outcome="` + x.Outcome + `",stack="foretell"}`)
		w := e.send(q)
		after := e.metric(`requests_total{outcome="` + x.Outcome + `",stack="foretell"}`)
		require.Equal(t, before+1, after, "%v: %+v", q, x)
		if x.Outcome == "refused" {
			require.Equal(t, x.RefusedBy, w.Header().Get("X-RateLimit-Resource"))
			require.Equal(t, fmt.Sprint(x.RetryAfter), w.Header().Get("Retry-After"))
		}
		seen[x.Outcome]++
		e.clock.advance(time.Duration(r.IntN(3000)) * time.Millisecond)
	}
	for _, outcome := range []string{"served", "refused", "dry_refused"} {
		assert.Greater(t, seen[outcome], 10, "%s: %v", outcome, seen)
	}
}

// The entry that is shown as the client is the one that is used, in every topology.
func TestClientViewAgrees(t *testing.T) {
	var servers, sites strings.Builder
	port := 8100
	for _, trusted := range []string{"", "trusted_proxies static 10.0.0.0/8\ntrusted_proxies_strict\nclient_ip_headers Forwarded X-Forwarded-For"} {
		for _, hops := range []string{"", "trusted_hops 0", "trusted_hops 1", "trusted_hops 3", "trusted_hops 2 Forwarded"} {
			port++
			if trusted != "" {
				fmt.Fprintf(&servers, "servers :%d {\n%s\n}\n", port, trusted)
			}
			fmt.Fprintf(&sites, ":%d {\ntiered_limit view-%d {\n%s\ntier ip 1/m\n}\n}\n", port, port, hops)
		}
	}
	e := newEdge(t, "{\n"+servers.String()+"}\n"+sites.String())
	r := rand.New(rand.NewPCG(3, 4))
	pick := func(list ...string) string { return list[r.IntN(len(list))] }
	chainOf := func(prefix, separator string) string {
		var entries []string
		for range r.IntN(6) {
			entries = append(entries, prefix+pick("10.0.0.5", "10.9.9.9", "203.0.113.7", "198.51.100.2", "unknown", "192.0.2.1"))
		}
		return strings.Join(entries, separator)
	}
	found := 0
	for range 3000 {
		h := e.app.inOrder()[r.IntN(10)]
		q := &requestQuestion{Peer: pick("10.0.0.1", "203.0.113.1", "unix"), Headers: map[string]fieldLines{}}
		for range r.IntN(3) {
			q.Headers["X-Forwarded-For"] = append(q.Headers["X-Forwarded-For"], chainOf("", ", "))
		}
		if r.IntN(2) == 0 {
			q.Headers["Forwarded"] = fieldLines{chainOf("for=", ",") + pick("", "", "", `,for="`)}
		}
		require.NoError(t, q.check())
		req, err := q.request(t.Context(), h.server)
		require.NoError(t, err)
		v, c := h.shadow().viewClient(req), h.topology.Client(req)
		if !h.topology.Stated() {
			assert.Empty(t, v.Address)
			continue
		}
		assert.Equal(t, c.Fallback.String(), v.Fallback)
		var shown []string
		for _, entry := range v.Chain {
			if entry.Use == useClient {
				shown = append(shown, entry.Entry)
			}
		}
		if c.Fallback == clientip.None && c.Addr != h.topology.Peer(req) {
			require.Equal(t, []string{c.Addr.String()}, shown, "%s: %+v", h.Name, q)
			found++
		} else if c.Fallback != clientip.None {
			require.Empty(t, shown, "%s: %+v", h.Name, q)
		}
	}
	assert.Greater(t, found, 300)
}

func TestClientViewIsBounded(t *testing.T) {
	e := adminEdge(t, "view-bounded")
	a := answerTo[explainAnswer](e, "/tiered_limit/explain",
		`{"peer":"10.0.0.1","headers":{"X-Forwarded-For":"`+strings.Repeat(",", 50_000)+`203.0.113.7"}}`)
	v := a.Handlers[0].Client
	assert.Len(t, v.Chain, shownEntries)
	assert.Equal(t, 50_001-shownEntries, v.Omitted)
	assert.Equal(t, entryView{"203.0.113.7", useClient}, v.Chain[shownEntries-1])
}

func TestExplainPreparesRequestsAsTheServerDoes(t *testing.T) {
	q := &requestQuestion{Peer: "2001:db8::1", Path: "/a%2fb?c=d", Host: "api.example.com:8443"}
	require.NoError(t, q.check())
	r, err := q.request(t.Context(), nil)
	require.NoError(t, err)
	repl := r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	for name, want := range map[string]string{
		"http.request.remote.host": "2001:db8::1", "http.request.host": "api.example.com", "http.request.method": "GET",
		"http.request.uri.path": "/a/b", "http.request.orig_uri": "/a%2fb?c=d", "http.request.scheme": "http",
	} {
		got, _ := repl.GetString(name)
		assert.Equal(t, want, got, name)
	}
	assert.NotNil(t, r.Context().Value(caddyhttp.VarsCtxKey))
}

// Two handlers of one stack that a request meets are one decision: explain says of the second which tiers the first has asked.
// Where the request meets one of them at most, each is asked about all.
func TestExplainKnowsWhatAnEarlierHandlerHasAsked(t *testing.T) {
	t.Parallel()
	stack := func(user string) string {
		return "tiered_limit explain-twice" + user + " {\ntrusted_hops 0\ntier ip 4/m\ntier user 2/m {\nkey {header.X-User}\n}\n}\n"
	}
	for site, earlier := range map[string]bool{
		"route {\n" + stack("") + stack("") + "}\n":                        true,
		"route {\n" + stack("") + "route /a* {\n" + stack("") + "}\n}\n":   true,
		"route {\n" + stack("") + "route /b* {\n" + stack("") + "}\n}\n":   true, // not met, and judged as if it was
		"handle /a* {\n" + stack("") + "}\nhandle {\n" + stack("") + "}\n": false,
		"route {\n" + stack("") + "}\nroute {\n" + stack("-other") + "}\n": false,
		"route /b* {\n" + stack("") + "}\nroute {\n" + stack("") + "}\n":   false, // the first is not met
	} {
		e := newEdge(t, freshListen()+" {\n"+site+"\nrespond ok\n}\n")
		answer := answerTo[explainAnswer](e, "/tiered_limit/explain", `{"peer":"203.0.113.7","path":"/a/x","headers":{"X-User":"u"}}`)
		require.Len(t, answer.Handlers, 2, site)
		for _, tier := range answer.Handlers[0].Tiers {
			assert.True(t, tier.Applies, site)
		}
		for _, tier := range answer.Handlers[1].Tiers {
			assert.Equal(t, !earlier, tier.Applies, site)
			if earlier {
				assert.Equal(t, "an earlier handler of the stack has asked it", tier.Why, site)
			}
		}
		e.close()
	}
}
