package tieredlimit

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// clientSite is a site with a named stack that says in each served answer which client it counted.
func clientSite(global, stack, settings string) string {
	return fmt.Sprintf(`
		{
			%s
		}
		:8080 {
			tiered_limit %s {
				%s
			}
			respond "{http.tiered_limit.client_ip}"
		}`, global, stack, settings)
}

// oneBucket checks that all requests are counted as one client, whichever comes first, and that the other ones are not
// counted with them. The limit must be 1/m.
func (e *edge) oneBucket(client string, same []request, others ...request) {
	e.t.Helper()
	for first := range same {
		e.clock.advance(time.Minute)
		for i := range same {
			at := (first + i) % len(same)
			w := e.send(same[at])
			if i == 0 {
				require.Equal(e.t, http.StatusOK, w.Code, "request %d comes first", first)
				require.Equal(e.t, client, w.Body.String(), "client of request %d", first)
				continue
			}
			require.Equal(e.t, http.StatusTooManyRequests, w.Code, "request %d after request %d", at, first)
		}
		for i, other := range others {
			w := e.send(other)
			require.Equal(e.t, http.StatusOK, w.Code, "other request %d, after request %d", i, first)
			require.NotEqual(e.t, client, w.Body.String(), "client of the other request %d", i)
		}
	}
}

// throughProxy are requests from one proxy, each with one of these values of X-Forwarded-For.
func throughProxy(values ...string) []request {
	list := make([]request, len(values))
	for i, value := range values {
		list[i] = request{peer: "10.0.0.1:4711", header: xff(value)}
	}
	return list
}

// directly are requests from peers.
func directly(peers ...string) []request {
	list := make([]request, len(peers))
	for i, peer := range peers {
		list[i] = request{peer: peer}
	}
	return list
}

// C7: ports, brackets and zones are no part of a client, in a header and in the peer's address. The prefix is the
// longest, so that it does not hide a difference.
func TestClientRowSpellings(t *testing.T) {
	for _, test := range []struct {
		name, client string
		spellings    []string
		others       []string
	}{
		{
			name: "v4", client: "203.0.113.7",
			spellings: []string{"203.0.113.7", "203.0.113.7:51234", "203.0.113.7:51235", " 203.0.113.7:1 "},
			others:    []string{"203.0.113.8:51234"},
		},
		{
			name: "v6", client: "2001:db8::1",
			spellings: []string{"2001:db8::1", "[2001:db8::1]", "[2001:db8::1]:443", "[2001:db8::1]:444",
				"2001:DB8:0:0:0:0:0:1", "[2001:0db8::0001]:443"},
			others: []string{"[2001:db8::2]:443"},
		},
		{
			name: "zone", client: "fe80::1",
			spellings: []string{"fe80::1", "fe80::1%eth0", "fe80::1%eth1", "[fe80::1%eth0]", "[fe80::1%eth0]:443"},
			others:    []string{"fe80::2%eth0"},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			e := newEdge(t, clientSite("", "spelling-"+test.name, "trusted_hops 1\nipv6_prefix 128\ntier ip 1/m"))
			e.oneBucket(test.client, throughProxy(test.spellings...), throughProxy(test.others...)...)
		})
	}
	e := newEdge(t, clientSite("", "spelling-peer", "trusted_hops 0\nipv6_prefix 128\ntier ip 1/m"))
	e.oneBucket("203.0.113.7", directly("203.0.113.7:1", "203.0.113.7:65535"), directly("203.0.113.8:1")...)
	e.oneBucket("fe80::1", directly("[fe80::1]:1", "[fe80::1%eth0]:1", "[fe80::1%eth1]:2"), directly("[fe80::2%eth0]:1")...)
}

// C8: an IPv4 address in IPv6 clothes is that IPv4 address, and not one of a /64 that all of them would share.
func TestClientRowMapped(t *testing.T) {
	spellings := []string{"203.0.113.7", "::ffff:203.0.113.7", "::ffff:cb00:7107", "::FFFF:CB00:7107",
		"0:0:0:0:0:ffff:cb00:7107", "[::ffff:203.0.113.7]:443", "[::ffff:cb00:7107]"}
	others := []string{"::ffff:203.0.113.8", "::ffff:cb00:7109", "203.0.113.10"}

	e := newEdge(t, clientSite("", "mapped-header", "trusted_hops 1\ntier ip 1/m"))
	e.oneBucket("203.0.113.7", throughProxy(spellings...), throughProxy(others...)...)

	e = newEdge(t, clientSite("", "mapped-peer", "trusted_hops 0\ntier ip 1/m"))
	e.oneBucket("203.0.113.7", directly("203.0.113.7:1", "[::ffff:203.0.113.7]:2", "[::ffff:cb00:7107]:3"),
		directly("[::ffff:203.0.113.8]:1", "[::ffff:cb00:7109]:1", "203.0.113.10:1")...)
}

// C9: by default an IPv6 client is its /64 and an IPv4 client its address.
func TestClientRowPrefixes(t *testing.T) {
	e := newEdge(t, clientSite("", "prefixes", "trusted_hops 0\ntier ip 5/m"))
	host := func(network string, n int) request {
		return request{peer: fmt.Sprintf("[%s:%x:%x:%x:%x]:4000", network, n*40503&0xffff, n*9973&0xffff, n*31337&0xffff, n)}
	}
	for _, network := range []string{"2001:db8:0:1", "2001:db8:0:2", "2001:db8:1:1", "2001:db9:0:1"} {
		for n := 1; n <= 8; n++ {
			w := e.send(host(network, n))
			if n > 5 {
				assert.Equal(t, http.StatusTooManyRequests, w.Code, "host %d of %s", n, network)
				continue
			}
			assert.Equal(t, http.StatusOK, w.Code, "host %d of %s", n, network)
			assert.Equal(t, network+"::", w.Body.String(), "client of host %d", n)
		}
		assert.Equal(t, []int64{5}, e.used("prefixes", "ip", host(network, 99)), "used by %s", network)
	}
	for n := range 4 {
		peer := request{peer: fmt.Sprintf("203.0.113.%d:4000", n)}
		assert.Equal(t, 5, e.served(7, peer), "served to %s", peer.peer)
	}
}

// C11: a trusted proxy is known in IPv6 clothes too, as an entry and as the peer.
func TestClientRowTrustedMapped(t *testing.T) {
	const trusted = "servers {\ntrusted_proxies static 10.0.0.0/8\n}"
	e := newEdge(t, clientSite(trusted, "trusted-mapped", "tier ip 1/m"))
	same := throughProxy("203.0.113.7, ::ffff:10.0.0.5", "203.0.113.7, ::ffff:a00:5", "203.0.113.7, [::ffff:10.0.0.5]:443",
		"203.0.113.7, 10.0.0.5, ::ffff:10.0.0.6", "6.6.6.6, 203.0.113.7, ::ffff:10.0.0.5", "203.0.113.7")
	mappedPeer := request{peer: "[::ffff:10.0.0.1]:4711", header: xff("203.0.113.7, ::ffff:10.0.0.5")}
	e.oneBucket("203.0.113.7", append(same, mappedPeer),
		throughProxy("203.0.113.8, ::ffff:10.0.0.5", "203.0.113.7, ::ffff:11.0.0.5")...)
}

// C17: what a caller leaves open in a Forwarded line does not swallow what the proxy appended, and never makes the
// caller the client that it claims to be.
func TestClientRowForwarded(t *testing.T) {
	e := newEdge(t, clientSite("", "forwarded-rows", "trusted_hops 1 Forwarded\ntier ip 1/m"))
	forwardedBy := func(peer string, lines ...string) request {
		return request{peer: peer + ":4711", header: http.Header{"Forwarded": lines}}
	}
	const appended = `for="203.0.113.7:1"`
	var broken []request
	for _, caller := range []string{`for=9.9.9.9;x="`, `for="9.9.9.9";x="`, `for=9.9.9.9;x="\`, `for="9.9.9.9"x`, `for=9.9.9.9, "`} {
		broken = append(broken, forwardedBy("10.0.0.1", caller, appended), forwardedBy("10.0.0.1", caller+", "+appended))
	}
	e.oneBucket("10.0.0.1", broken, forwardedBy("10.0.0.2", `for=9.9.9.9;x="`, appended), forwardedBy("10.0.0.1", appended))
	assert.Equal(t, []int64{0}, e.used("forwarded-rows", "ip", forwardedBy("10.0.0.1", "for=9.9.9.9")), "used by 9.9.9.9")
	assert.Equal(t, []int64{1}, e.used("forwarded-rows", "ip", forwardedBy("10.0.0.1", appended)), "used by the client")

	sound := []request{forwardedBy("10.0.0.1", appended), forwardedBy("10.0.0.3", "for=9.9.9.9", `For=203.0.113.7;proto=https`),
		forwardedBy("10.0.0.1", `for=9.9.9.9;x="a,b;c", for=203.0.113.7`), forwardedBy("10.0.0.1", `for="[::ffff:203.0.113.7]:1"`)}
	e.oneBucket("203.0.113.7", sound, forwardedBy("10.0.0.1", `for="203.0.113.8:1"`), broken[0])

	warned := e.logs.lines("warn", "")
	for _, line := range warned {
		assert.False(t, strings.Contains(fmt.Sprint(line), "9.9.9.9"), "a warning names an address: %v", line)
	}
	assert.Positive(t, e.metric(`client_fallback_total{reason="bad_entry",stack="forwarded-rows"}`))
}
