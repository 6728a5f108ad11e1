package tieredlimit

import (
	"encoding/json"
	"fmt"
	"net/http"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A tier concerns the clients that it names, by their whole address, whatever the notation of either.
func TestATierConcernsItsClients(t *testing.T) {
	t.Parallel()
	for i, c := range []struct {
		clients string
		yes, no []string
	}{
		{"clients 192.0.2.0/28 2001:db8:1::/48", []string{"192.0.2.0", "192.0.2.15", "::ffff:192.0.2.3", "64:ff9b::c000:203", "192.0.2.1:4711", "2001:db8:1:2::3", "[2001:db8:1::1]:80"},
			[]string{"192.0.2.16", "198.51.100.7", "2001:db8:2::1", "127.0.0.1", "10.0.0.1"}},
		{"clients 198.51.100.7", []string{"198.51.100.7"}, []string{"198.51.100.8", "198.51.100.6"}},
		{"clients ::ffff:198.51.100.0/120", []string{"198.51.100.7"}, []string{"198.51.101.1"}},
		{"clients private_ranges", []string{"10.1.2.3", "192.168.0.1", "172.16.0.1", "127.0.0.1", "::1", "fd00::1"}, []string{"192.0.2.1", "172.32.0.1", "2001:db8::1"}},
		{"clients not private_ranges 192.0.2.0/24", []string{"198.51.100.7", "2001:db8::1"}, []string{"10.1.2.3", "fd00::1", "192.0.2.9"}},
		{"clients 192.0.2.0/24\nclients not 192.0.2.128/25", []string{"192.0.2.127"}, []string{"192.0.2.128", "198.51.100.1"}},
		{"clients not 192.0.2.128/25\nclients 0.0.0.0/0", []string{"192.0.2.127", "198.51.100.1"}, []string{"192.0.2.128", "2001:db8::1"}},
	} {
		t.Run(c.clients, func(t *testing.T) {
			t.Parallel()
			e := newEdge(t, fmt.Sprintf(":8080 {\ntiered_limit tier-clients-%d {\ntrusted_hops 1\nipv4_prefix 16\nipv6_prefix 32\ntier some 1/m {\nkey all\n%s\n}\n}\nrespond ok\n}", i, c.clients))
			from := func(addr string) request { return request{}.with("X-Forwarded-For", "192.0.2.1, 10.0.0.1, "+addr) }
			require.Equal(t, 1, e.served(1, from(c.yes[0])))
			for _, addr := range c.yes {
				assert.Equal(t, 0, e.served(1, from(addr)), addr)
			}
			for _, addr := range c.no {
				w := e.send(from(addr))
				assert.Equal(t, http.StatusOK, w.Code, addr)
				assert.Empty(t, w.Header().Get("X-RateLimit-Limit"), addr)
			}
		})
	}
}

// Where the peer stands in for a client that could not be found, it is in no range, so that it is neither favoured nor spared.
func TestAnUnknownClientIsInNoRange(t *testing.T) {
	t.Parallel()
	for i, chain := range []string{"unknown", "192.0.2.1, _x", "x", "192.0.2.1"} {
		e := newEdge(t, fmt.Sprintf(":8080 {\ntiered_limit unknown-clients-%d {\ntrusted_hops %d\ntier in 1/m {\nkey a\nclients 203.0.113.0/24 192.0.2.0/24\n}\ntier out 1/m {\nkey b\n"+
			"clients not 203.0.113.0/24 192.0.2.0/24\n}\n}\nrespond ok\n}", i, 1+i/3))
		q := request{}.with("X-Forwarded-For", chain)
		assert.Equal(t, 1, e.served(2, q), chain)
		assert.Equal(t, "out", e.send(q).Header().Get("X-RateLimit-Resource"), "the tier for everybody else concerns it: %q", chain)
	}
	e := newEdge(t, ":8080 {\ntiered_limit clients-without-a-chain {\ntrusted_hops 1\ntier in 1/m {\nkey a\nclients 203.0.113.0/24\n}\n}\nrespond ok\n}")
	assert.Equal(t, 1, e.served(3, request{}), "without any chain the peer is the client")
	e = newEdge(t, ":8080 {\ntiered_limit unknown-clients-unix {\ntrusted_hops 0\ntier in 1/m {\nkey a\nclients 0.0.0.0/0 ::/0\n}\n}\nrespond ok\n}")
	unix := request{edit: func(r *http.Request) { r.RemoteAddr = "@" }}
	assert.Equal(t, 3, e.served(3, unix), "a peer without an address")
	assert.Equal(t, 1, e.served(3, request{}))
}

// By trusted_proxies the client is the one that the proxies saw, and neither their own addresses nor what callers write count.
func TestATiersClientsBehindTrustedProxies(t *testing.T) {
	t.Parallel()
	e := newEdge(t, "{\nservers {\ntrusted_proxies static 203.0.113.0/24\ntrusted_proxies_strict\n}\n}\n"+
		":8080 {\ntiered_limit proxied-clients {\ntier partner 1/m {\nclients 198.51.100.0/24\nkey {http.tiered_limit.client_ip}\n}\n}\nrespond ok\n}")
	partner := request{}.with("X-Forwarded-For", "192.0.2.9, 198.51.100.7")
	assert.Equal(t, 1, e.served(3, partner))
	assert.Equal(t, 3, e.served(3, request{}.with("X-Forwarded-For", "198.51.100.7, 192.0.2.9")), "forged")
	assert.Equal(t, 3, e.served(3, request{}.with("X-Forwarded-For", "198.51.100.8").from("192.0.2.9:1")), "past the proxy")
}

// A tier that goes by the client needs a stated topology, and a source that is proven.
func TestATiersClientsNeedAClient(t *testing.T) {
	t.Parallel()
	block := "tier x 1/m {\nkey {header.X-User}\nclients %s\n%s\n}\ntier global 9/m"
	site := func(name, hops, clients, more string) string {
		return fmt.Sprintf(":8080 {\ntiered_limit %s {\n%s\n"+block+"\n}\nrespond ok\n}", name, hops, clients, more)
	}
	user := request{}.with("X-User", "u")
	e := newEdge(t, site("clients-unstated", "", "192.0.2.0/24", ""))
	assert.Equal(t, 20, e.served(20, user), "inert")
	assert.Len(t, e.logs.lines("error", "tiered_limit is DISABLED"), 1)
	user.edit = early
	for more, want := range map[string]int{"": 425, "dry_run": 200, "match path /other": 200} {
		e := newEdge(t, site("clients-early", "trusted_hops 0", "not 192.0.2.0/24", more))
		assert.Equal(t, want, e.send(user).Code, more)
		e.close()
	}
}

// Bad clients are refused at load, whichever way they come in.
func TestBadClientsAreRefused(t *testing.T) {
	t.Parallel()
	for lines, want := range map[string]string{
		"clients":                                      `tier "x": clients needs at least one address or range, at Caddyfile:4`,
		"clients not":                                  `tier "x": clients not needs at least one address or range, at Caddyfile:4`,
		"clients 10.0.0.0/33":                          `tier "x": clients: "10.0.0.0/33" is neither an IP address nor a CIDR range nor private_ranges, at Caddyfile:4`,
		"clients not example.com":                      `tier "x": clients not: "example.com" is neither`,
		"clients 10.0.0.1 10.0.0.1":                    `tier "x": clients names "10.0.0.1" twice`,
		"clients 10.0.0.1 {\n}":                        `clients takes no block`,
		"clients 10.0.0.1\nclients 10.0.0.2":           `tier "x": clients is given twice, at Caddyfile:5`,
		"clients not 10.0.0.1\nclients not 10.0.0.2":   `tier "x": clients not is given twice, at Caddyfile:5`,
		"clients 10.0.0.1 not 10.0.0.2":                `tier "x": clients: "not" is neither`,
		"clients not 10.0.0.1 private_ranges not":      `tier "x": clients not: "not" is neither`,
		"clients {http.request.header.X-Client-Range}": `tier "x": clients: "{http.request.header.X-Client-Range}": only placeholders that have a value at load can be used`,
	} {
		_, err := tryLoad(t, ":8080 {\ntiered_limit bad-clients {\ntier x 1/m {\n"+lines+"\nkey a\n}\n}\n}")
		assert.ErrorContains(t, err, want, lines)
	}
	for field, want := range map[string]string{
		`"clients": ["x"]`:                     `tier "x": clients: "x" is neither an IP address nor a CIDR range nor private_ranges`,
		`"not_clients": ["10.0.0.0/8", "y"]`:   `tier "x": not_clients: "y" is neither`,
		`"not_clients": ["::1", "::1"]`:        `tier "x": not_clients names "::1" twice`,
		`"clients": "10.0.0.0/8"`:              `clients`,
		`"clients": ["10.0.0.0/8", "::0/129"]`: `tier "x": clients: "::0/129" is neither`,
	} {
		h := new(Handler)
		err := json.Unmarshal([]byte(`{"tiers": [{"name": "x", "limits": [], "keys": [["a"]], `+field+`}]}`), h)
		if err == nil {
			err = h.check()
		}
		assert.ErrorContains(t, err, want, field)
	}
}

// Whether a tier concerns a client is a question of the current configuration: a reload that changes it keeps the counters.
func TestReloadChangesATiersClients(t *testing.T) {
	t.Parallel()
	site := func(clients string) string {
		return ":8080 {\ntiered_limit reload-clients {\ntrusted_hops 0\ntier ip 2/d {\n" + clients + "\n}\n}\nrespond ok\n}"
	}
	e := newEdge(t, site("clients 203.0.113.0/24"))
	assert.Equal(t, 1, e.served(1, request{}))
	e.reload(site("clients not 203.0.113.0/24"))
	assert.Equal(t, 5, e.served(5, request{}))
	e.reload(site(""))
	assert.Equal(t, 1, e.served(5, request{}))
}

// Explain says that a tier does not concern the client, and a replay goes by it as serving does.
func TestClientsAreExplained(t *testing.T) {
	t.Parallel()
	e := newEdge(t, ":8080 {\ntiered_limit explain-clients {\ntrusted_hops 0\ntier partner 1/m {\nclients 198.51.100.0/24\nkey a\n}\n}\nrespond ok\n}")
	status, body := e.ask(http.MethodPost, "/tiered_limit/explain", `{"peer": "203.0.113.9"}`)
	require.Equal(t, http.StatusOK, status)
	assert.Contains(t, body, "it does not concern this client")
	status, body = e.ask(http.MethodPost, "/tiered_limit/explain", `{"peer": "198.51.100.9"}`)
	require.Equal(t, http.StatusOK, status)
	assert.NotContains(t, body, "does not concern")
}
