package tieredlimit

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Matchers that go by an address, in each way to write them, and what they go by.
var addressMatches = map[string]addressMatcher{
	"remote_ip 10.0.0.0/8":                                       matchesPeer,
	"client_ip 10.0.0.0/8":                                       matchesClient,
	"not remote_ip private_ranges":                               matchesPeer,
	"not client_ip private_ranges":                               matchesClient,
	"not {\nnot client_ip 10.0.0.1\n}":                           matchesClient,
	"not {\nmethod GET\nremote_ip 10.0.0.1\n}":                   matchesPeer,
	"expression `remote_ip('10.0.0.0/8')`":                       matchesPeer,
	"expression `method('GET') && !client_ip ('10.0.0.0/8')`":    matchesClient,
	"expression `{remote_host} == '10.0.0.1'`":                   matchesPeer,
	"expression `{http.request.remote.host} == '1'`":             matchesPeer,
	"expression `{client_ip}.startsWith('10.')`":                 matchesClient,
	"not expression `client_ip('10.0.0.0/8')`":                   matchesClient,
	"vars {client_ip} 10.0.0.1":                                  matchesClient,
	"vars client_ip 10.0.0.1":                                    matchesClient,
	"vars {remote_host} 10.0.0.1":                                matchesPeer,
	"vars_regexp {client_ip} ^10":                                matchesClient,
	"{\npath /a\nclient_ip 10.0.0.1\n}":                          matchesClient,
	"method GET":                                                 "",
	"not path /a":                                                "",
	"header client_ip 10.0.0.1":                                  "",
	"path /client_ip(":                                           "",
	"expression `path('/remote_ip') || {query.client_ip} == ''`": "",
	"vars x_client_ip a":                                         "",
}

// addressServers are options of a server and hops, and what is wrong there with matchers that go by the peer and by Caddy's
// client. Empty: nothing, it is the client.
var addressServers = []struct{ options, hops, peer, client string }{
	{"", "trusted_hops 0", "", ""},
	{"", "trusted_hops 1", theProxy, "is that of the proxy in front as long as the server has no trusted_proxies"},
	{"trusted_proxies_strict", "trusted_hops 2", theProxy, "is that of the proxy in front as long as the server has no trusted_proxies"},
	{"trusted_proxies static 10.0.0.0/8", "", theProxy, theLeftmost},
	{"trusted_proxies static 10.0.0.0/8\ntrusted_proxies_strict", "", theProxy, ""},
	{"trusted_proxies static 10.0.0.0/8", "trusted_hops 1", theProxy, theLeftmost},
	{"trusted_proxies static 10.0.0.0/8\ntrusted_proxies_strict", "trusted_hops 1", theProxy, ""},
	{"trusted_proxies static 10.0.0.0/8", "trusted_hops 0", "", theLeftmost},
	{"trusted_proxies_unix", "", theProxy, theLeftmost},
	{"trusted_proxies_unix\ntrusted_proxies_strict", "", theProxy, ""},
}

const (
	theProxy    = "is that of the proxy in front, and so the same for all clients"
	theLeftmost = "is the leftmost entry of the forwarding header as long as the server has no trusted_proxies_strict, and callers can forge that"
)

// A matcher by an address that is not the client's is warned of, in a tier and in front of the handler, in whatever way it
// is written: with the tier, the matcher and the cure. One that finds the client is not.
func TestMatchersByAddressAreWarnedOf(t *testing.T) {
	t.Parallel()
	for _, server := range addressServers {
		for match, by := range addressMatches {
			wrong := map[addressMatcher]string{"": "", matchesPeer: server.peer, matchesClient: server.client}[by]
			named := "@m " + match
			for where, site := range map[string]string{
				"tier":    "tiered_limit {\n" + server.hops + "\ntier a 5/m {\nkey x\nmatch " + match + "\n}\n}",
				"named":   named + "\ntiered_limit {\n" + server.hops + "\ntier a 5/m {\nkey x\nmatch @m\n}\n}",
				"handler": named + "\ntiered_limit @m {\n" + server.hops + "\ntier a 5/m {\nkey x\n}\n}",
				"route":   named + "\nroute @m {\ntiered_limit {\n" + server.hops + "\ntier a 5/m {\nkey x\n}\n}\n}",
				"nested":  named + "\nhandle @m {\nhandle /b/* {\ntiered_limit {\n" + server.hops + "\ntier a 5/m {\nkey x\n}\n}\n}\n}",
				"beside":  named + "\nrespond @m no\nhandle {\ntiered_limit {\n" + server.hops + "\ntier a 5/m {\nkey x\n}\n}\n}\nhandle @m {\nrespond m\n}",
			} {
				if where != "tier" && strings.Contains(match, "expression") {
					continue // compiled anew each time, and read as in a tier
				}
				at := fmt.Sprintf("%s, %q, %q %q", where, match, server.options, server.hops)
				e := newEdge(t, "{\nservers {\n"+server.options+"\n}\n}\n"+freshListen()+" {\n"+site+"\nrespond ok\n}\n")
				lines := e.logs.lines("warn", " goes by ")
				if wrong == "" || where == "beside" {
					assert.Empty(t, lines, at)
					continue
				}
				require.Len(t, lines, 1, at)
				msg := lines[0].str("msg")
				assert.Contains(t, msg, "goes by "+string(by)+", which "+wrong, at)
				assert.Contains(t, msg, ", which go by the client as tiered_limit finds it", at)
				assert.Equal(t, string(by), lines[0].str("matcher"), at)
				if where == "tier" || where == "named" {
					assert.Equal(t, "a", lines[0].str("tier"), at)
					assert.Contains(t, msg, "Write clients or clients not in the tier instead", at)
					assert.Contains(t, msg, "the match of the tier goes by", at)
				} else {
					assert.Contains(t, msg, "the matcher in front of tiered_limit goes by", at)
				}
			}
		}
	}
}

// What is warned of happens: behind a proxy a tier for the addresses of clients is off, and where Caddy's client is not
// strict callers turn a tier off. exempt_clients, which the warning names, does neither.
func TestWhatMatchersByAddressDoBehindAProxy(t *testing.T) {
	t.Parallel()
	site := func(options, tier string) *edge {
		return newEdge(t, "{\nservers {\n"+options+"\n}\n}\n"+freshListen()+" {\ntiered_limit {\ntrusted_hops 1\n"+tier+"\n}\nrespond ok\n}\n")
	}
	through := func(chain string) request { return request{peer: "10.0.0.1:1", header: xff(chain)} }
	off := site("", "tier ip 2/m {\nmatch not remote_ip private_ranges\n}")
	assert.Equal(t, 5, off.served(5, through("203.0.113.7")), "everybody is the proxy")
	assert.Len(t, off.logs.lines("warn", "goes by remote_ip"), 1)
	forged := site("trusted_proxies static 10.0.0.0/8", "tier ip 2/m {\nmatch not client_ip 192.168.0.0/16\n}")
	assert.Equal(t, 2, forged.served(5, through("203.0.113.7")))
	assert.Equal(t, 5, forged.served(5, through("192.168.0.1, 203.0.113.7")), "a forged entry turns the tier off")
	assert.Len(t, forged.logs.lines("warn", "callers can forge"), 1)
	cured := site("trusted_proxies static 10.0.0.0/8\ntrusted_proxies_strict", "exempt_clients 192.168.0.0/16\ntier ip 2/m")
	assert.Equal(t, 2, cured.served(5, through("192.168.0.1, 203.0.113.7")))
	assert.Equal(t, 5, cured.served(5, through("192.168.0.1")))
	assert.Empty(t, cured.logs.lines("warn", ""))
}
