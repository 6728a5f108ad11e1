package tieredlimit

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2/modules/logging"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tieredlimit/caddy-tieredlimit/internal/replay"
)

// apartSite has a stack in each topology that reads chains, each on a port of its own.
func apartSite(stack string) string {
	site := func(port int, settings string) string {
		return fmt.Sprintf(":%d {\n\ttiered_limit %s-%d {\n\t\t%s\n\t\ttier ip 5/m\n\t\ttier agent 5/m {\n\t\t\tkey {http.request.header.User-Agent} "+
			"{http.tiered_limit.client_ip}\n\t\t}\n\t}\n\trespond {http.tiered_limit.client_ip}\n}\n", port, stack, port, settings)
	}
	return "{\n\tservers :8082 {\n\t\ttrusted_proxies static 10.0.0.0/8 fd00::/8\n\t\ttrusted_proxies_unix\n\t\ttrusted_proxies_strict\n\t}\n" +
		"\tservers :8083 {\n\t\ttrusted_proxies static 10.0.0.0/8 fd00::/8\n\t\ttrusted_proxies_unix\n\t\ttrusted_proxies_strict\n" +
		"\t\tclient_ip_headers Forwarded\n\t}\n}\n" +
		site(8080, "trusted_hops 2") + site(8081, "trusted_hops 2 Forwarded") + site(8082, "") + site(8083, "")
}

// uselessChain is a chain that cannot be used, and why.
type uselessChain struct {
	listen, reason, header string
	lines                  []string
}

func uselessChains() []uselessChain {
	return []uselessChain{
		{":8080", "short_chain", "X-Forwarded-For", []string{"6.6.6.6"}},
		{":8080", "short_chain", "X-Forwarded-For", []string{""}},
		{":8080", "bad_entry", "X-Forwarded-For", []string{"unknown, 10.0.0.2"}},
		{":8080", "bad_entry", "X-Forwarded-For", []string{"", "10.0.0.2"}},
		{":8081", "short_chain", "Forwarded", []string{"for=6.6.6.6"}},
		{":8081", "short_chain", "Forwarded", []string{"proto=http"}},
		{":8081", "bad_entry", "Forwarded", []string{`for=9.9.9.9;x="`, `for="203.0.113.7:1"`, "for=10.0.0.2"}},
		{":8081", "bad_entry", "Forwarded", []string{`for=9.9.9.9;x=", for="203.0.113.7:1", for=10.0.0.2`}},
		{":8081", "bad_entry", "Forwarded", []string{"for=_hidden, for=10.0.0.2"}},
		{":8082", "bad_entry", "X-Forwarded-For", []string{"6.6.6.6, garbage, 10.0.0.2"}},
		{":8082", "bad_entry", "X-Forwarded-For", []string{""}},
		{":8082", "all_trusted", "X-Forwarded-For", []string{"10.0.0.3, 10.0.0.2"}},
		{":8083", "bad_entry", "Forwarded", []string{`for=9.9.9.9;x="`, `for="203.0.113.7:1"`}},
		{":8083", "all_trusted", "Forwarded", []string{"for=10.0.0.3, for=10.0.0.2"}},
	}
}

// apartPeers are proxies, what their own requests are counted as, and another way to write their address.
var apartPeers = map[string]struct{ identity, other string }{
	"10.0.0.1:4711":     {"10.0.0.1", "::ffff:10.0.0.1"},
	"[fd00::1:1]:4711":  {"fd00::", "fd00::77"},
	"[fd00:1::1]:4711":  {"fd00:1::", "[fd00:1::2]:443"},
	"@":                 {"unknown", "unknown"},
	"/run/proxy.sock:1": {"unknown", "unknown"},
}

// A chain that is of no use never costs the proxy that passed it on, whatever is wrong with it: it is counted for the
// proxy and the reason together, under a name that explain, inspect and reset know. Requests without a chain are the
// proxy's own.
func TestAUselessChainIsNotCountedForTheProxyItself(t *testing.T) {
	for i, c := range uselessChains() {
		for peer, names := range apartPeers {
			t.Run(fmt.Sprint(i, c.reason, peer), func(t *testing.T) {
				e := newEdge(t, apartSite("apart"))
				stack := "apart-" + c.listen[1:]
				poisoned := request{listen: c.listen, peer: peer, header: http.Header{c.header: c.lines}}
				health := request{listen: c.listen, peer: peer}
				identity := c.reason + "@" + names.identity

				assert.Equal(t, 5, e.served(120, poisoned), "all of them together have one budget")
				assert.Equal(t, 5, e.served(9, health), "the proxy's own requests")
				counted := e.metric(`client_fallback_total{reason="` + c.reason + `",stack="` + stack + `"}`)
				assert.Equal(t, 120+shortWithout(c, 9), int(counted))
				assert.Equal(t, []int64{5}, e.used(stack, "ip", poisoned))
				e.clock.advance(time.Minute)
				assert.Equal(t, names.identity, e.send(poisoned).Body.String(), "logs and other handlers see the address")
				assert.Equal(t, names.identity, e.send(health).Body.String())

				explained := answerTo[explainAnswer](e, "/tiered_limit/explain", describe(t, stack, poisoned)).Handlers[0]
				assert.Equal(t, identity, explained.Client.Counted)
				assert.Equal(t, c.reason, explained.Client.Fallback)
				assert.Contains(t, explained.Client.Note, "counted for the peer together with other requests whose chain is of no use")
				assert.Equal(t, []string{identity}, explained.Tiers[0].Key)
				assert.Equal(t, int64(1), explained.Tiers[0].Limits[0].Used)
				explained = answerTo[explainAnswer](e, "/tiered_limit/explain", describe(t, stack, health)).Handlers[0]
				assert.Equal(t, names.identity, explained.Client.Counted)

				for _, name := range []string{identity, c.reason + "@" + names.other} {
					read := answerTo[counterAnswer](e, "/tiered_limit/inspect", `{"stack":"`+stack+`","tier":"ip","key":["`+name+`"]}`)
					assert.Equal(t, []string{identity}, read.Key)
					assert.Equal(t, int64(1), read.Limits[0].Used, name)
				}
				reset := answerTo[counterAnswer](e, "/tiered_limit/reset", `{"stack":"`+stack+`","tier":"agent","key":["","`+identity+`"]}`)
				assert.Equal(t, int64(0), reset.Limits[0].Used)
				assert.Equal(t, []int64{0}, e.used(stack, "agent", poisoned))
				assert.Equal(t, []int64{1}, e.used(stack, "agent", health), "the proxy's own counter is another one")
				assert.Equal(t, []int64{1}, e.used(stack, "ip", poisoned))
			})
		}
	}
}

// shortWithout is how many of n requests without a chain count as too short.
func shortWithout(c uselessChain, n int) int {
	if c.reason == "short_chain" {
		return n
	}
	return 0
}

// describe asks for an explanation of a request.
func describe(t *testing.T, stack string, q request) string {
	peer := q.peer
	if !strings.Contains(peer, "[") && !strings.HasPrefix(peer, "10.") {
		peer = "unix"
	}
	return jsonText(map[string]any{"stack": stack, "peer": peer, "headers": q.header})
}

// Each reason, and each proxy, has a counter of its own.
func TestUselessChainsOfProxiesAndReasonsAreCountedApart(t *testing.T) {
	e := newEdge(t, apartSite("reasons"))
	from := func(peer, chain string) request {
		return request{listen: ":8080", peer: peer, header: xff(chain)}
	}
	for _, q := range []request{
		from("10.0.0.1:1", "6.6.6.6"), from("10.0.0.2:1", "6.6.6.6"), from("10.0.0.1:1", "unknown, 10.0.0.9"),
		from("10.0.0.2:1", "unknown, 10.0.0.9"), {listen: ":8080", peer: "10.0.0.1:1"}, {listen: ":8080", peer: "10.0.0.2:1"},
	} {
		assert.Equal(t, 5, e.served(7, q), "%s %v", q.peer, q.header)
	}
}

// Which address a useless chain is counted for depends on the prefixes as that of a client does.
func TestUselessChainsAreCountedForThePeersNetwork(t *testing.T) {
	e := newEdge(t, clientSite("", "apart-prefixes", "trusted_hops 1\nipv4_prefix 24\nipv6_prefix 48\ntier ip 1/m"))
	bad := func(peer string) request { return request{peer: peer, header: xff("unknown")} }
	e.oneBucket("10.0.0.0", []request{bad("10.0.0.1:1"), bad("10.0.0.200:1"), bad("[::ffff:10.0.0.3]:1")}, bad("10.0.1.1:1"))
	e.oneBucket("fd00::", []request{bad("[fd00::1]:1"), bad("[fd00:0:0:1::1]:1")}, bad("[fd00:0:1::1]:1"))
}

// A proxy that is exempt does not make those exempt who send it useless chains; its own requests are.
func TestUselessChainsAreNotExemptAsTheProxyIs(t *testing.T) {
	site := strings.ReplaceAll(apartSite("apart-exempt"), "tier ip", "exempt_clients 10.0.0.0/8 fd00::/8\n\t\ttier ip")
	e := newEdge(t, site)
	for i, c := range uselessChains() {
		e.clock.advance(time.Minute)
		for _, peer := range []string{"10.0.0.1:1", "[fd00::1]:1"} {
			assert.Equal(t, 5, e.served(9, request{listen: c.listen, peer: peer, header: http.Header{c.header: c.lines}}), "%d from %s", i, peer)
			assert.Equal(t, 9, e.served(9, request{listen: c.listen, peer: peer}), "own requests of %s", peer)
		}
	}
}

// When the memory is full, useless chains are not counted together with the network of the proxy that passed them on.
func TestUselessChainsDoNotFillTheProxysNetwork(t *testing.T) {
	for _, peer := range []string{"10.0.0.1", "fd00::1"} {
		e := newEdge(t, clientSite("", "apart-overflow", "trusted_hops 1\ntier ip 3/m\nstore memory {\nmax_keys 1\n}"))
		from := func(lines ...string) request {
			q := request{peer: "[" + peer + "]:1"}
			if peer[2] == '.' {
				q.peer = peer + ":1"
			}
			if lines != nil {
				q.header = xff(lines...)
			}
			return q
		}
		require.Equal(t, 1, e.served(1, from("203.0.113.7")), "the only counter that there is room for")
		e.served(120, from("unknown"))
		assert.Equal(t, 3, e.served(9, from()), "the proxy's own requests from %s", peer)
	}
}

// What is logged of a refused request names the counter as inspect does, and the client by its address.
func TestLogsNameUselessChainsAsTheyAreCounted(t *testing.T) {
	e := newEdge(t, clientSite("", "apart-logs", "trusted_hops 1\nlog_keys\ntier ip 1/m"))
	e.statuses(2, request{peer: "10.0.0.1:1", header: xff("unknown")})
	line := e.logs.lines("info", "rate limit reached")[0]
	assert.Equal(t, []any{"bad_entry@10.0.0.1"}, line["key"])
	assert.Equal(t, "10.0.0.1", line["client_ip"])
}

// An operator who mistypes a client is told what can be written.
func TestInspectRefusesOtherReasons(t *testing.T) {
	e := adminEdge(t, "apart-words")
	for _, key := range []string{"no_peer@10.0.0.1", "@10.0.0.1", "bad_entry@", "bad_entry@x", "10.0.0.1@bad_entry", "BAD_ENTRY@10.0.0.1",
		"bad_entry@short_chain@10.0.0.1", "untrusted_peer@10.0.0.1"} {
		status, text := e.ask(http.MethodPost, "/tiered_limit/inspect", `{"stack":"apart-words","tier":"ip","key":["`+key+`"]}`)
		assert.Equal(t, http.StatusBadRequest, status, key)
		assert.Contains(t, text, "also not behind one of short_chain@, bad_entry@ and all_trusted@", key)
	}
}

// A replay counts useless chains as the live server does.
func TestAReplayCountsUselessChainsApart(t *testing.T) {
	config := clientSite("", "apart-replay", "trusted_hops 1\ntier ip 5/m")
	var requests []recorded
	at := testStart
	for i := range 300 {
		q := request{peer: "10.0.0.1:4711"}
		switch i % 3 {
		case 0:
			q.header = xff("6.6.6.6, unknown")
		case 1:
			q.header = xff(fmt.Sprintf("203.0.113.%d", i%4))
		}
		at = at.Add(700 * time.Millisecond)
		requests = append(requests, recorded{request: q, at: at})
	}
	var refused int64
	for _, r := range live(t, config, requests) {
		if r {
			refused++
		}
	}
	log, _ := newRecording(logging.LogEncoderConfig{}, false).log(t, requests)
	report := replayLog(t, config, log, replay.Options{})
	require.Len(t, report.Stacks, 1)
	assert.Equal(t, refused, report.Stacks[0].Outcomes["refused"])
	assert.Equal(t, map[string]int64{"bad_entry": 100, "short_chain": 100}, report.Stacks[0].Fallbacks)
	assert.Equal(t, 6, int(report.Stacks[0].Tiers[0].Clients), "distinct clients")
}

// A load balancer that is missing from trusted_proxies shows itself: in the metric from its first request, in one warning
// from the twentieth client that it names, and in an explanation.
func TestAProxyThatIsNotTrustedShowsItself(t *testing.T) {
	const missing = "a peer that is not in trusted_proxies sends a forwarding header that names one client after another"
	for name, c := range map[string]struct{ options, block, peer, header, element, warning string }{
		"no hops":      {"trusted_proxies static 192.168.0.0/16", "", "10.0.0.1:4711", "X-Forwarded-For", "", missing},
		"hops":         {"trusted_proxies static 192.168.0.0/16", "trusted_hops 1", "10.0.0.1:4711", "X-Forwarded-For", "", missing},
		"IPv6":         {"trusted_proxies static 10.0.0.0/8", "", "[fd00::1]:4711", "X-Forwarded-For", "", missing},
		"Forwarded":    {"trusted_proxies static 192.168.0.0/16", "trusted_hops 1 Forwarded", "10.0.0.1:4711", "Forwarded", "for=", missing},
		"unix socket":  {"trusted_proxies static 10.0.0.0/8", "", "@", "X-Forwarded-For", "", "a peer without an address, as on a unix socket, sends"},
		"only unix is": {"trusted_proxies_unix", "trusted_hops 1", "10.0.0.1:4711", "X-Forwarded-For", "", missing},
	} {
		t.Run(name, func(t *testing.T) {
			e := newEdge(t, clientSite("servers {\n"+c.options+"\ntrusted_proxies_strict\n}", "untrusted", c.block+"\ntier ip 20/m"))
			from := func(i int) request {
				return request{peer: c.peer, header: http.Header{c.header: {c.element + fmt.Sprintf("203.0.113.%d", i%250)}}}
			}
			served := 0
			for i := range 400 {
				served += e.served(1, from(i))
				if i == 18 {
					assert.Empty(t, e.logs.lines("warn", ""), "nineteen clients are not enough")
				}
				if i == 19 {
					assert.Len(t, e.logs.lines("warn", ""), 1, "the twentieth client is")
				}
			}
			assert.Equal(t, 20, served, "all are in one bucket")
			line := e.warning("")
			assert.Contains(t, line.str("msg"), c.warning)
			assert.Contains(t, line.str("msg"), "If the peer is a proxy of yours, ")
			assert.Equal(t, []any{20.0, 20.0}, []any{line["requests"], line["clients"]})
			assert.NotContains(t, fmt.Sprint(line), "203.0.113")
			assert.NotContains(t, fmt.Sprint(line), strings.TrimSuffix(c.peer, ":4711"))
			assert.Equal(t, 400.0, e.metric(`client_fallback_total{reason="untrusted_peer",stack="untrusted"}`))
			v := answerTo[explainAnswer](e, "/tiered_limit/explain", describe(t, "untrusted", from(1))).Handlers[0].Client
			assert.Equal(t, "untrusted_peer", v.Fallback)
			assert.Contains(t, v.Note, "if it is a proxy of yours, ")
			require.Len(t, v.Chain, 1)
			assert.Equal(t, useIgnored, v.Chain[0].Use)
			assert.NotContains(t, v.Counted, "@", "it is the client as far as anybody knows")
			e.reload(clientSite("servers {\n"+c.options+"\ntrusted_proxies_strict\n}", "untrusted", c.block+"\nlog_keys\ntier ip 20/m"))
			for i := range 40 {
				e.send(from(i))
			}
			lines := e.logs.lines("warn", "")
			require.Len(t, lines, 2, "a new config warns anew")
			if c.peer == "@" {
				assert.NotContains(t, lines[1], "peer")
			} else {
				assert.Equal(t, strings.Trim(strings.TrimSuffix(c.peer, ":4711"), "[]"), lines[1].str("peer"), "with log_keys")
			}
		})
	}
}

// Callers without a chain, a single one who keeps to one entry, and requests that are exempt by their client are no sign.
func TestPeersThatAreNoProxiesAreNotWarnedOf(t *testing.T) {
	e := newEdge(t, clientSite("servers {\ntrusted_proxies static 10.0.0.0/8\ntrusted_proxies_strict\n}", "untrusted-not",
		"exempt_clients 198.51.100.9\ntier ip 1000/m"))
	for i := range 100 {
		e.send(request{peer: fmt.Sprintf("203.0.113.%d:1", i)})
		e.send(request{peer: "203.0.113.1:1", header: xff("6.6.6.6")})
		e.send(request{peer: fmt.Sprintf("203.0.113.%d:1", i), header: xff(fmt.Sprintf("6.6.6.%d", i))})
		e.send(request{peer: "10.0.0.1:1", header: xff(fmt.Sprintf("203.0.113.%d", i))})
	}
	assert.Empty(t, e.logs.lines("warn", ""))
	exempt := request{peer: "198.51.100.9:1", header: xff("6.6.6.6")}
	assert.Equal(t, 1200, e.served(1200, exempt), "a peer that is no proxy is the client, and as such exempt")
}

// A warning about a chain says how many hops are stated only where some are.
func TestChainWarningsSayWhatIsStated(t *testing.T) {
	for hops, want := range map[string]any{"": nil, "trusted_hops 1": 1.0} {
		e := newEdge(t, clientSite("servers {\ntrusted_proxies static 10.0.0.0/8\ntrusted_proxies_strict\n}", "chain-warning", hops+"\ntier ip 5/m"))
		e.send(request{peer: "10.0.0.1:1", header: xff("unknown")})
		assert.Equal(t, want, e.warning("the forwarding chain cannot be used")["trusted_hops"], hops)
	}
}
