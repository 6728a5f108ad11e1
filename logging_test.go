package tieredlimit

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A flood of refusals writes a line a second and tier at most, with how many it stands for, and no address.
func TestRefusalsAreLoggedSparsely(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"", "dry_run"} {
		t.Run("mode "+mode, func(t *testing.T) {
			t.Parallel()
			e := newEdge(t, fmt.Sprintf(`
:8080 {
	tiered_limit a9%s {
		trusted_hops 0
		%[1]s
		tier ip 1/h
		tier user 1/h {
			key {header.X-User}
		}
	}
	respond ok
}`, mode))
			secret := user("hunter2").from("198.51.100.77")
			e.send(secret)
			for range 10_000 {
				e.send(secret)
			}
			lines := e.logs.lines("info", "rate limit reached")
			require.Len(t, lines, 1)
			assert.Equal(t, "a9"+mode, lines[0].str("stack"))
			assert.Equal(t, "ip", lines[0].str("tier"))
			assert.Equal(t, 1.0, lines[0]["refusals"])
			assert.Equal(t, mode == "dry_run", lines[0]["dry_run"])

			e.clock.advance(time.Second)
			e.send(secret)
			e.send(secret)
			e.send(secret.from("198.51.100.78")) // refused by the tier user, which has a line of its own
			lines = e.logs.lines("info", "rate limit reached")
			require.Len(t, lines, 3)
			assert.Equal(t, 10_000.0, lines[1]["refusals"], "those since the last line and this one")
			assert.Equal(t, "user", lines[2].str("tier"))
			assert.Equal(t, 1.0, lines[2]["refusals"])
			for _, l := range e.logs.lines("", "") {
				assert.NotContains(t, fmt.Sprint(l), "198.51.100")
				assert.NotContains(t, fmt.Sprint(l), "hunter2")
			}
		})
	}
}

// With log_keys, and only then, the lines name whom they are about, cut to a bounded length.
func TestLogKeys(t *testing.T) {
	t.Parallel()
	e := newEdge(t, `
:8080 {
	tiered_limit log-keys {
		trusted_hops 0
		log_keys
		ipv4_prefix 24
		tier ip 9/h
		tier user 1/h {
			key {header.X-User} of {header.X-Tenant}
		}
	}
	respond ok
}`)
	q := user(strings.Repeat("u", 5000)).with("X-Tenant", "t").from("198.51.100.77")
	require.Equal(t, 1, e.served(2, q))
	lines := e.logs.lines("info", "rate limit reached")
	require.Len(t, lines, 1)
	assert.Equal(t, []any{strings.Repeat("u", 256), "of", "t"}, lines[0]["key"])
	assert.NotContains(t, lines[0], "client_ip", "the tier does not go by it")

	e.clock.advance(time.Second)
	for range 9 {
		e.send(request{}.from("198.51.100.79"))
	}
	lines = e.logs.lines("info", "rate limit reached")
	last := lines[len(lines)-1]
	assert.Equal(t, "ip", last.str("tier"))
	assert.Equal(t, "198.51.100.0", last.str("client_ip"))
}

// The number of metric series depends on the configuration alone.
func TestMetricsDoNotGrowWithClients(t *testing.T) {
	t.Parallel()
	e := newEdge(t, `
:8080 {
	tiered_limit a11 {
		trusted_hops 1
		exempt /health
		tier ip 1/m
		tier user 5/m {
			key {header.X-User}
		}
	}
	respond ok
}`)
	series := func() (n int) {
		families, err := e.ctx.GetMetricsRegistry().Gather()
		require.NoError(t, err)
		for _, family := range families {
			for _, m := range family.GetMetric() {
				for _, l := range m.GetLabel() {
					if l.GetName() == "stack" && l.GetValue() == "a11" {
						n++
					}
				}
			}
		}
		return n
	}
	before := series()
	require.Positive(t, before)
	for i := range 5000 {
		q := user(fmt.Sprint("user-", i)).with("X-Forwarded-For", fmt.Sprintf("10.%d.%d.1", i/256, i%256))
		q.url = fmt.Sprintf("http://host-%d/path-%d", i, i)
		e.send(q)
	}
	assert.Equal(t, before, series())
	assert.Equal(t, 5000.0, e.metric(`requests_total{outcome="served",stack="a11"}`))
}

// The access log says what became of each request, and of a refused one by which tier.
func TestAccessLogFields(t *testing.T) {
	t.Parallel()
	e := newEdge(t, `
:8080 {
	log
	route /inert {
		tiered_limit access-inert {
			tier ip 1/m
		}
	}
	route /dry {
		tiered_limit access-dry {
			trusted_hops 0
			dry_run
			tier ip 1/m
		}
	}
	route /both {
		tiered_limit access-both-dry {
			trusted_hops 0
			dry_run
			tier ip 1/m
		}
		tiered_limit access-both-live {
			trusted_hops 0
			tier ip 3/m
		}
	}
	route /main {
		tiered_limit access-log {
			trusted_hops 0
			exempt_clients 192.0.2.9
			tier soft 1/m {
				key {header.X-User}
				dry_run
			}
			tier ip 3/m
		}
	}
	respond ok
}`)
	last := func() string {
		var line logLine
		for _, l := range e.logs.all() {
			if strings.HasPrefix(l.str("logger"), "http.log.access") {
				line = l
			}
		}
		require.NotNil(t, line)
		return fmt.Sprint(line["tiered_limit_outcome"], " ", line["tiered_limit_tier"])
	}
	for i, c := range []struct {
		path string
		q    request
		want string
	}{
		{"/elsewhere", request{}, "<nil> <nil>"},
		{"/inert", request{}, "inert <nil>"},
		{"/main", request{}, "served <nil>"},
		{"/main", user("u"), "served <nil>"},
		{"/main", user("u"), "dry_refused soft"},
		{"/main", user("u"), "refused ip"},
		{"/main", preflight(), "preflight <nil>"},
		{"/main", request{}.from("192.0.2.9"), "exempt <nil>"},
		{"/main", request{edit: early}, "too_early <nil>"},
		{"/dry", request{}, "served <nil>"},
		{"/dry", request{}, "dry_refused ip"},
		{"/both", request{}, "served <nil>"},
		{"/both", request{}, "dry_refused ip"},
		{"/both", request{}, "dry_refused ip"},
		{"/both", request{}, "refused ip"},
	} {
		c.q.url = "http://localhost" + c.path
		e.send(c.q)
		assert.Equal(t, c.want, last(), "request %d to %s", i+1, c.path)
	}
}

// warning checks that there is exactly one warning with a text, and returns it.
func (e *edge) warning(containing string) logLine {
	e.t.Helper()
	lines := e.logs.lines("warn", containing)
	require.Len(e.t, lines, 1, "warnings that contain %q", containing)
	return lines[0]
}

// Without hops, rotating headers buy nothing, and one warning tells that one came.
func TestForgedHeadersBuyNothing(t *testing.T) {
	t.Parallel()
	for i, header := range []string{"X-Forwarded-For", "Forwarded"} {
		e := newEdge(t, fmt.Sprintf(":8080 {\n tiered_limit c1-%d {\n trusted_hops 0\n tier ip 2/m\n }\n respond {http.tiered_limit.client_ip}\n}", i))
		served := 0
		for n := range 50 {
			value := fmt.Sprintf("6.6.6.%d, 7.7.7.7", n)
			if header == "Forwarded" {
				value = fmt.Sprintf("for=6.6.6.%d, for=7.7.7.7", n)
			}
			w := e.send(request{}.from(clientA).with(header, value))
			if w.Code == http.StatusOK {
				served++
				assert.Equal(t, clientA, w.Body.String())
			}
		}
		assert.Equal(t, 2, served)
		warning := e.warning("trusted_hops is 0")
		assert.Equal(t, 2.0, warning["chain_length"])
		assert.NotContains(t, fmt.Sprint(warning), "6.6.6")
		assert.NotContains(t, fmt.Sprint(warning), clientA)
		assert.Len(t, e.logs.lines("warn", ""), 1)
	}
}

// A chain that is too short is never used; it is counted each time, and told once.
func TestAShortChainFallsBackToThePeer(t *testing.T) {
	t.Parallel()
	e := newEdge(t, `
:8080 {
	tiered_limit c4 {
		trusted_hops 2
		tier ip 3/m
	}
	respond {http.tiered_limit.client_ip}
}`)
	short := request{}.from(clientA).with("X-Forwarded-For", "6.6.6.6")
	assert.Equal(t, clientA, e.send(short).Body.String())
	assert.Equal(t, clientA, e.send(request{}.from(clientA)).Body.String())
	assert.Equal(t, 2, e.served(5, short))
	wantRefused(t, e.send(short), "ip")
	assert.Equal(t, 2, e.served(5, request{}.from(clientA)), "requests without any chain are counted apart")
	assert.Equal(t, 13.0, e.metric(`client_fallback_total{reason="short_chain",stack="c4"}`))
	warning := e.warning("forwarding chain cannot be used")
	assert.Equal(t, "short_chain", warning.str("reason"))
	assert.Equal(t, 1.0, warning["chain_length"])
	assert.Equal(t, 2.0, warning["trusted_hops"])
	assert.NotContains(t, fmt.Sprint(warning), "6.6.6.6")
	assert.NotContains(t, fmt.Sprint(warning), clientA)
}

// An entry that is no address is not passed over.
func TestABadEntryFallsBackToThePeer(t *testing.T) {
	t.Parallel()
	e := newEdge(t, `
:8080 {
	tiered_limit c6 {
		trusted_hops 1
		tier ip 100/m
	}
	respond {http.tiered_limit.client_ip}
}`)
	for _, chain := range []string{"1.2.3.4, unknown", "1.2.3.4, ", "1.2.3.4,", "1.2.3.4, _hidden", "1.2.3.4, 1.2.3", "1.2.3.4, 1.2.3.4.5", ""} {
		assert.Equal(t, clientA, e.send(request{}.from(clientA).with("X-Forwarded-For", chain)).Body.String(), chain)
	}
	assert.Equal(t, 7.0, e.metric(`client_fallback_total{reason="bad_entry",stack="c6"}`))
	assert.Equal(t, "bad_entry", e.warning("forwarding chain cannot be used").str("reason"))
}

// Without trusted_proxies_strict the client is still read from the right, and a warning tells that Caddy's own
// client address may differ.
func TestTrustedProxiesWithoutStrict(t *testing.T) {
	t.Parallel()
	site := func(strict, name string) string {
		return fmt.Sprintf(`
{
	servers {
		trusted_proxies static 10.0.0.0/8
		%s
	}
}
http://a.test:8080 {
	tiered_limit %[2]s {
		tier ip 2/m
	}
	respond {http.tiered_limit.client_ip}
}
http://b.test:8080 {
	tiered_limit %[2]s-b {
		tier ip 2/m
	}
	respond b
}
http://c.test:8081 {
	tiered_limit %[2]s-c {
		tier ip 2/m
	}
	respond c
}`, strict, name)
	}
	e := newEdge(t, site("", "c10"))
	q := request{url: "http://a.test/", listen: ":8080"}.from("10.0.0.1")
	for i := range 2 {
		w := e.send(q.with("X-Forwarded-For", fmt.Sprintf("6.6.6.%d, %s", i, clientC)))
		assert.Equal(t, clientC, w.Body.String())
	}
	wantRefused(t, e.send(q.with("X-Forwarded-For", "6.6.6.9, "+clientC)), "ip")
	assert.Len(t, e.logs.lines("warn", "trusted_proxies_strict"), 2, "one for each server")
	assert.Len(t, e.logs.lines("warn", ""), 2)

	e = newEdge(t, site("trusted_proxies_strict", "c10-strict"))
	assert.Equal(t, clientC, e.send(q.with("X-Forwarded-For", "6.6.6.6, "+clientC)).Body.String())
	assert.Empty(t, e.logs.lines("warn", ""))
}

// A peer that is no trusted proxy is the client, whatever it sends.
func TestAnUntrustedPeerIsTheClient(t *testing.T) {
	t.Parallel()
	e := newEdge(t, `
{
	servers {
		trusted_proxies static 10.0.0.0/8
		trusted_proxies_strict
	}
}
:8080 {
	tiered_limit c12 {
		tier ip 3/m
	}
	respond {http.tiered_limit.client_ip}
}
:8081 {
	tiered_limit c12-both {
		trusted_hops 1
		tier ip 3/m
	}
	respond {http.tiered_limit.client_ip}
}`)
	for _, listen := range []string{":8080", ":8081"} {
		q := request{listen: listen}.from(clientA)
		for _, chain := range []string{"6.6.6.6", "6.6.6.6, 10.0.0.2", ""} {
			assert.Equal(t, clientA, e.send(q.with("X-Forwarded-For", chain)).Body.String(), "%s %s", listen, chain)
		}
		wantRefused(t, e.send(q.with("X-Forwarded-For", "7.7.7.7")), "ip")
		assert.Equal(t, clientC, e.send(request{listen: listen}.from("10.0.0.1").with("X-Forwarded-For", "6.6.6.6, "+clientC)).Body.String())
	}
	assert.Empty(t, e.logs.lines("warn", ""))
}

// Peers without an address share one bucket.
func TestAUnixSocketIsOneBucket(t *testing.T) {
	t.Parallel()
	e := newEdge(t, `
:8080 {
	tiered_limit c13 {
		trusted_hops 0
		tier ip 5/m
	}
	respond {http.tiered_limit.client_ip}
}`)
	for _, peer := range []string{"@", "", "/run/x.sock", "@", "not an address"} {
		w := e.send(request{edit: func(r *http.Request) { r.RemoteAddr = peer }})
		assert.Equal(t, http.StatusOK, w.Code)
		assert.Equal(t, "unknown", w.Body.String(), "%q", peer)
	}
	wantRefused(t, e.send(request{edit: func(r *http.Request) { r.RemoteAddr = "@" }}), "ip")
	assert.Equal(t, 1, e.served(1, request{}))
	assert.Equal(t, 6.0, e.metric(`client_fallback_total{reason="no_peer",stack="c13"}`))
}

// Where nothing is stated the stack is inert, and one warning names the cure.
func TestNothingStatedLimitsNobody(t *testing.T) {
	t.Parallel()
	for i, tiers := range []string{"tier ip 1/m", "tier global 1/m\n exempt_clients 192.0.2.1", "tier x 1/m {\n key {header.X-User} {http.tiered_limit.client_ip}\n }", "trusted_hops\n tier ip 1/m", "trusted_hops \"\"\n tier ip 1/m"} {
		e := newEdge(t, fmt.Sprintf(":8080 {\n tiered_limit c15-%d {\n %s\n tier all 1/m {\n key k\n }\n }\n respond \"ok{http.tiered_limit.client_ip}\"\n}", i, tiers))
		for n := range 1000 {
			w := e.send(request{}.with("X-Forwarded-For", fmt.Sprintf("6.6.6.%d", n%9)).with("X-User", "u"))
			require.Equal(t, http.StatusOK, w.Code)
			require.Equal(t, "ok", w.Body.String(), "there is no client")
			require.Empty(t, w.Header().Values("X-RateLimit-Limit"))
		}
		warning := e.warning("")
		for _, cure := range []string{"DISABLED", "trusted_hops 0", "trusted_proxies", "Google"} {
			assert.Contains(t, warning.str("msg"), cure)
		}
		assert.Equal(t, 1000.0, e.metric(fmt.Sprintf(`requests_total{outcome="inert",stack="c15-%d"}`, i)))
	}
}

// A stack that needs no address works without a topology, and says nothing.
func TestAStackWithoutAddressesNeedsNoTopology(t *testing.T) {
	t.Parallel()
	for i, tiers := range []string{"tier global 1/m", "tier x 1/m {\n key {header.X-User}\n }", "tier global 1/m\n tier ip 0/m", "tier global 1/m\n tier ip off"} {
		e := newEdge(t, fmt.Sprintf(":8080 {\n tiered_limit c15-none-%d {\n %s\n }\n respond ok\n}", i, tiers))
		assert.Equal(t, 1, e.served(3, user("u")), tiers)
		assert.Empty(t, e.logs.lines("warn", ""), tiers)
	}
}

// Where every request is counted for one address and its neighbour differs, one warning tells, without an address.
func TestHopsStatedTooLow(t *testing.T) {
	t.Parallel()
	e := newEdge(t, `
:8080 {
	tiered_limit c16 {
		trusted_hops 1
		tier ip 100000/m
	}
	respond ok
}`)
	send := func(n int) {
		chain := fmt.Sprintf("192.0.2.%d, 198.51.100.200", n%250)
		if n%3 == 0 {
			chain = "6.6.6.6, " + chain
		}
		e.send(request{}.with("X-Forwarded-For", chain))
	}
	for n := range 199 {
		send(n)
	}
	assert.Empty(t, e.logs.lines("warn", ""))
	for n := range 500 {
		send(n)
	}
	warning := e.warning("")
	assert.Contains(t, warning.str("msg"), "trusted_hops seems too low")
	assert.Equal(t, 1.0, warning["trusted_hops"])
	assert.Equal(t, []any{2.0, 3.0}, warning["chain_lengths"])
	assert.NotContains(t, fmt.Sprint(warning), "198.51.100")
	assert.NotContains(t, fmt.Sprint(warning), "192.0.2")
}

// There is no such warning where clients are told apart, or where everybody is the same client.
func TestHopsStatedRightly(t *testing.T) {
	t.Parallel()
	for i, chain := range []func(n int) string{
		func(n int) string { return fmt.Sprintf("6.6.6.%d, 192.0.2.%d", n%250, n%250) },
		func(int) string { return "6.6.6.6, 192.0.2.1" },
		func(int) string { return "192.0.2.1" },
	} {
		e := newEdge(t, fmt.Sprintf(":8080 {\n tiered_limit c16-right-%d {\n trusted_hops 1\n tier ip 100000/m\n }\n respond ok\n}", i))
		for n := range 500 {
			e.send(request{}.with("X-Forwarded-For", chain(n)))
		}
		assert.Empty(t, e.logs.lines("warn", ""), i)
	}
}

// A chain of trusted proxies alone falls back to the peer; a unix peer's header is read where hops say so.
func TestAllTrustedAndUnixPeers(t *testing.T) {
	t.Parallel()
	e := newEdge(t, `
{
	servers :8080 {
		trusted_proxies static 10.0.0.0/8
		trusted_proxies_strict
	}
	servers :8082 {
		trusted_proxies static 10.0.0.0/8
		trusted_proxies_strict
		trusted_proxies_unix
	}
}
:8080 {
	tiered_limit c18 {
		tier ip 9/m
	}
	respond {http.tiered_limit.client_ip}
}
:8081 {
	tiered_limit c18-hops {
		trusted_hops 1
		tier ip 9/m
	}
	respond {http.tiered_limit.client_ip}
}
:8082 {
	tiered_limit c18-unix {
		tier ip 9/m
	}
	respond {http.tiered_limit.client_ip}
}`)
	unix := func(listen, chain string) string {
		q := request{listen: listen, edit: func(r *http.Request) { r.RemoteAddr = "@" }}
		if chain != "" {
			q = q.with("X-Forwarded-For", chain)
		}
		return e.send(q).Body.String()
	}
	all := request{listen: ":8080"}.from("10.0.0.1").with("X-Forwarded-For", "10.1.1.1, 10.2.2.2")
	assert.Equal(t, "10.0.0.1", e.send(all).Body.String())
	assert.Equal(t, 1.0, e.metric(`client_fallback_total{reason="all_trusted",stack="c18"}`))
	assert.Equal(t, "all_trusted", e.warning("forwarding chain cannot be used").str("reason"))

	assert.Equal(t, clientC, unix(":8081", "6.6.6.6, "+clientC))
	assert.Equal(t, "unknown", unix(":8081", ""))
	assert.Equal(t, "unknown", unix(":8081", "6.6.6.6, garbage"))
	assert.Equal(t, "unknown", unix(":8080", clientC), "ranges alone do not trust a peer without an address")
	assert.Equal(t, clientC, unix(":8082", "6.6.6.6, "+clientC+", 10.0.0.7"))
	assert.Equal(t, "unknown", unix(":8082", ""))
}

// The placeholder for the client is made when it is asked for, also where no tier needs it, and holds what was used.
func TestTheClientPlaceholder(t *testing.T) {
	t.Parallel()
	e := newEdge(t, `
:8080 {
	tiered_limit placeholder {
		trusted_hops 1
		ipv4_prefix 24
		ipv6_prefix 48
		exempt /exempt
		tier global 100/m
	}
	respond {http.tiered_limit.client_ip}
}`)
	for chain, want := range map[string]string{
		"198.51.100.77": "198.51.100.0", "2001:db8:1:2:3::4": "2001:db8:1::", "::ffff:198.51.100.9": "198.51.100.0",
		"198.51.100.77:443": "198.51.100.0", "[2001:db8:1::5]:443": "2001:db8:1::", "fe80::1%eth0": "fe80::", "garbage": "203.0.113.0",
	} {
		assert.Equal(t, want, e.send(request{}.with("X-Forwarded-For", chain)).Body.String(), chain)
		assert.Equal(t, want, e.send(request{url: "http://localhost/exempt"}.with("X-Forwarded-For", chain)).Body.String(), "%s, exempt", chain)
	}
}

// A request that came through another server's handlers carries nothing over.
func TestRecordsStayWithTheirRequest(t *testing.T) {
	t.Parallel()
	var seen []any
	looks := script(t, func(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
		seen = append(seen, caddyhttp.GetVar(r.Context(), recordVar))
		return next.ServeHTTP(w, r)
	})
	e := newEdge(t, fmt.Sprintf(":8080 {\n route {\n scripted %s\n tiered_limit rec-a {\n tier global 9/m\n }\n tiered_limit rec-b {\n tier global 9/m\n }\n respond \"<{http.vars.%s}>\"\n }\n}", looks, recordVar))
	for range 2 {
		assert.Equal(t, "<>", e.send(request{}).Body.String())
	}
	assert.Equal(t, []any{nil, nil}, seen)
}
