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

// Ports, brackets and zones are no part of a client, in a header and in the peer's address. The prefix is the
// longest, so that it does not hide a difference.
func TestClientSpellings(t *testing.T) {
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

// An IPv4 address in IPv6 clothes is that IPv4 address, and not one of a /64 that all of them would share.
func TestClientMapped(t *testing.T) {
	spellings := []string{"203.0.113.7", "::ffff:203.0.113.7", "::ffff:cb00:7107", "::FFFF:CB00:7107",
		"0:0:0:0:0:ffff:cb00:7107", "[::ffff:203.0.113.7]:443", "[::ffff:cb00:7107]"}
	others := []string{"::ffff:203.0.113.8", "::ffff:cb00:7109", "203.0.113.10"}

	e := newEdge(t, clientSite("", "mapped-header", "trusted_hops 1\ntier ip 1/m"))
	e.oneBucket("203.0.113.7", throughProxy(spellings...), throughProxy(others...)...)

	e = newEdge(t, clientSite("", "mapped-peer", "trusted_hops 0\ntier ip 1/m"))
	e.oneBucket("203.0.113.7", directly("203.0.113.7:1", "[::ffff:203.0.113.7]:2", "[::ffff:cb00:7107]:3"),
		directly("[::ffff:203.0.113.8]:1", "[::ffff:cb00:7109]:1", "203.0.113.10:1")...)
}

// IPv4 addresses in IPv6 ones are those IPv4 addresses, in a header, as the peer, as a trusted proxy and as an exempt client:
// by the prefixes that are the same everywhere, and by those of the operator's own translators.
func TestClientTranslated(t *testing.T) {
	const own = "nat64_prefix 2001:db8:64::/96 2001:db8:122::/48\n"
	for name, c := range map[string]struct{ stated, client, other string }{
		"well-known":          {"", "64:ff9b::203.0.113.7", "64:ff9b::203.0.113.8"},
		"stateless":           {"", "::ffff:0:203.0.113.7", "::ffff:0:cb00:7108"},
		"compatible":          {"", "::203.0.113.7", "::cb00:7108"},
		"one's own":           {own, "2001:db8:64::203.0.113.7", "2001:db8:64::203.0.113.8"},
		"one's own, 48 bits":  {own, "2001:db8:122:cb00:71:700::", "2001:db8:122:cb00:71:800::"},
		"well-known and own":  {own, "64:ff9b::cb00:7107", "64:ff9b::cb00:7108"},
		"the address is IPv4": {own, "203.0.113.7", "203.0.113.8"},
	} {
		t.Run(name, func(t *testing.T) {
			same := []string{c.client, "203.0.113.7", "::ffff:203.0.113.7"}
			if strings.Contains(c.client, ":") {
				same = append(same, "["+c.client+"]:4711")
			}
			e := newEdge(t, clientSite("", "translated", "trusted_hops 1\n"+c.stated+"tier ip 1/m"))
			e.oneBucket("203.0.113.7", throughProxy(same...), throughProxy(c.other)...)

			e = newEdge(t, clientSite("", "translated-peer", "trusted_hops 0\n"+c.stated+"tier ip 1/m"))
			peer := func(addr string) string { return strings.Replace("["+addr+"]:1", "[203.0.113.7]", "203.0.113.7", 1) }
			e.oneBucket("203.0.113.7", directly(peer(c.client), "203.0.113.7:2"), directly("203.0.113.9:1")...)

			e = newEdge(t, clientSite("servers {\ntrusted_proxies static 203.0.113.7/32\n}", "translated-trusted", c.stated+"tier ip 1/m"))
			for _, q := range []request{
				{peer: peer(c.client), header: xff("6.6.6.6, 198.51.100.1")}, {peer: "203.0.113.7:1", header: xff("198.51.100.2, " + c.client)},
			} {
				assert.Contains(t, e.send(q).Body.String(), "198.51.100.")
			}

			e = newEdge(t, clientSite("", "translated-exempt", "trusted_hops 1\n"+c.stated+"exempt_clients 203.0.113.7\ntier ip 1/m"))
			assert.Equal(t, 5, e.served(5, throughProxy(c.client)[0]))
			assert.Equal(t, 1, e.served(5, throughProxy(c.other)[0]))
			e = newEdge(t, clientSite("", "translated-exempt", "trusted_hops 1\n"+c.stated+"exempt_clients "+c.client+"\ntier ip 1/m"))
			assert.Equal(t, 5, e.served(5, throughProxy("203.0.113.7")[0]), "the list says it in the other way")

			e = newEdge(t, clientSite("", "translated-inspect", "trusted_hops 1\n"+c.stated+"tier ip 1/m"))
			e.send(throughProxy(c.client)[0])
			read := answerTo[counterAnswer](e, "/tiered_limit/inspect", `{"stack":"translated-inspect","tier":"ip","key":["`+c.client+`"]}`)
			assert.Equal(t, []string{"203.0.113.7"}, read.Key)
			assert.Equal(t, int64(1), read.Limits[0].Used)
		})
	}
	e := newEdge(t, clientSite("", "translated-not", "trusted_hops 1\ntier ip 1/m"))
	e.oneBucket("2001:db8:64::", throughProxy("2001:db8:64::203.0.113.7", "2001:db8:64::203.0.113.8"), throughProxy("::1")...)
}

// What is about the topology may change and does not start counters anew: a translator is stated, and its clients go on as
// the IPv4 clients that they are.
func TestClientTranslatorStatedLater(t *testing.T) {
	e := newEdge(t, clientSite("", "translator-later", "trusted_hops 1\ntier ip 2/m"))
	assert.Equal(t, 1, e.served(1, throughProxy("203.0.113.7")[0]))
	e.reload(clientSite("", "translator-later", "trusted_hops 1\nnat64_prefix 2001:db8:64::/96\ntier ip 2/m"))
	assert.Equal(t, 1, e.served(3, throughProxy("2001:db8:64::203.0.113.7")[0]))
}

// An IPv6 address with a port and without brackets is one client, whichever port it has, where that can be told.
func TestClientPortWithoutBrackets(t *testing.T) {
	e := newEdge(t, clientSite("", "bare-ports", "trusted_hops 1 CloudFront-Viewer-Address\nipv6_prefix 128\ntier ip 1/m"))
	from := func(values ...string) (list []request) {
		for _, v := range values {
			list = append(list, request{peer: "10.0.0.1:1", header: http.Header{"Cloudfront-Viewer-Address": {v}}})
		}
		return list
	}
	e.oneBucket("2001:db8:10:1::1", from("2001:db8:10:1:0:0:0:1:46532", "2001:db8:10:1:0:0:0:1:443", "2001:db8:10:1::1:46533",
		"[2001:db8:10:1::1]:46534", "2001:db8:10:1::1"), from("2001:db8:10:1:0:0:0:2:46532", "2001:db8:10:1::1:443")...)
	e.oneBucket("203.0.113.7", from("203.0.113.7:46532", "::ffff:203.0.113.7:46533"))
}

// By default an IPv6 client is its /64 and an IPv4 client its address.
func TestClientPrefixes(t *testing.T) {
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

// A trusted proxy is known in IPv6 clothes too, as an entry and as the peer.
func TestClientTrustedMapped(t *testing.T) {
	const trusted = "servers {\ntrusted_proxies static 10.0.0.0/8\n}"
	e := newEdge(t, clientSite(trusted, "trusted-mapped", "tier ip 1/m"))
	same := throughProxy("203.0.113.7, ::ffff:10.0.0.5", "203.0.113.7, ::ffff:a00:5", "203.0.113.7, [::ffff:10.0.0.5]:443",
		"203.0.113.7, 10.0.0.5, ::ffff:10.0.0.6", "6.6.6.6, 203.0.113.7, ::ffff:10.0.0.5", "203.0.113.7")
	mappedPeer := request{peer: "[::ffff:10.0.0.1]:4711", header: xff("203.0.113.7, ::ffff:10.0.0.5")}
	e.oneBucket("203.0.113.7", append(same, mappedPeer),
		throughProxy("203.0.113.8, ::ffff:10.0.0.5", "203.0.113.7, ::ffff:11.0.0.5")...)
}

// What a caller leaves open in a Forwarded line does not swallow what the proxy appended, and never makes the
// caller the client that it claims to be.
func TestClientForwarded(t *testing.T) {
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

// Behind a CDN and then nginx, whoever goes straight to nginx chooses its client where two hops are stated, although nginx is
// the only trusted proxy; and does not where the CDN's ranges are trusted too and no hops are stated, or where nginx sends on
// nothing but its own peer and one hop is stated.
func TestTheWayPastTheFirstOfTwoProxies(t *testing.T) {
	const cdn, nginx, attacker = "198.51.100.1", "10.0.0.1:4711", "192.0.2.66"
	strict := func(ranges string) string {
		return "servers {\ntrusted_proxies static " + ranges + "\ntrusted_proxies_strict\n}"
	}
	for name, c := range map[string]struct {
		trusted, hops string
		replaces      bool // nginx sends on its own peer alone
		forged        int  // requests served of those that forge
	}{
		"two hops":        {"10.0.0.0/8", "trusted_hops 2", false, 12},
		"both trusted":    {"10.0.0.0/8 198.51.100.0/24", "", false, 3},
		"nginx knows it":  {"10.0.0.0/8", "trusted_hops 1", true, 3},
		"only nginx is":   {"10.0.0.0/8", "", true, 3},
		"nothing trusted": {"192.168.0.0/16", "trusted_hops 2", false, 3},
	} {
		e := newEdge(t, clientSite(strict(c.trusted), "two-proxies-"+strings.ReplaceAll(name, " ", "-"), c.hops+"\ntier ip 3/m"))
		through := func(entries ...string) request {
			if c.replaces {
				entries = entries[len(entries)-1:]
			}
			return request{peer: nginx, header: xff(strings.Join(entries, ", "))}
		}
		served := 0
		for i := range 12 {
			served += e.served(1, through(fmt.Sprintf("6.6.6.%d", i), attacker))
		}
		assert.Equal(t, c.forged, served, "%s: straight to nginx", name)
		if c.replaces || name == "nothing trusted" {
			continue
		}
		assert.Equal(t, "203.0.113.7", e.send(through("6.6.6.6", "203.0.113.7", cdn)).Body.String(), "%s: by way of the CDN", name)
	}
}

// Callers inside the trusted ranges are any number of clients, unless only the proxies' own addresses are trusted.
func TestCallersInsideTheTrustedRanges(t *testing.T) {
	for ranges, want := range map[string]int{"10.0.0.0/8": 12, "10.0.0.1 10.0.0.2": 3} {
		e := newEdge(t, clientSite("servers {\ntrusted_proxies static "+ranges+"\ntrusted_proxies_strict\n}", "inside", "tier ip 3/m"))
		served := 0
		for i := range 12 {
			served += e.served(1, request{peer: "10.0.0.66:1", header: xff(fmt.Sprintf("6.6.6.%d", i))})
		}
		assert.Equal(t, want, served, ranges)
	}
}
