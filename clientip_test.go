package tieredlimit

import (
	"fmt"
	"net/http"
	"net/netip"
	"reflect"
	"sync/atomic"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// changingRanges is a source of trusted ranges that a test changes while the server runs.
type changingRanges struct {
	// Which of the sources in changingSources it is.
	Source int `json:"list"`
}

var changingSources [4]atomic.Pointer[[]netip.Prefix]

func init() { caddy.RegisterModule(changingRanges{}) }

func (changingRanges) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.ip_sources.tiered_limit_changing", New: func() caddy.Module { return new(changingRanges) }}
}

func (c *changingRanges) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next()
	for d.NextArg() {
		c.Source++
	}
	return nil
}

func (c *changingRanges) GetIPRanges(*http.Request) []netip.Prefix {
	if ranges := changingSources[c.Source].Load(); ranges != nil {
		return *ranges
	}
	return nil
}

func setSource(source int, ranges ...string) {
	list := make([]netip.Prefix, len(ranges))
	for i, r := range ranges {
		list[i] = netip.MustParsePrefix(r)
	}
	changingSources[source].Store(&list)
}

// Whether trusted_proxies is stated can only be read from a field that Caddy does not export. If this fails, Caddy has
// renamed or retyped it: without it, every server with trusted_proxies alone would be taken for one that states nothing.
func TestTrustedProxiesField(t *testing.T) {
	t.Parallel()
	field, ok := reflect.TypeFor[caddyhttp.Server]().FieldByName(rangesField)
	require.True(t, ok, "caddyhttp.Server has no field %s any more", rangesField)
	require.Equal(t, reflect.TypeFor[caddyhttp.IPRangeSource](), field.Type, "the type of caddyhttp.Server.%s", rangesField)
	ranges, ok := reflect.TypeFor[caddyhttp.StaticIPRange]().FieldByName("Ranges")
	require.True(t, ok, "caddyhttp.StaticIPRange has no field Ranges any more")
	require.Equal(t, reflect.TypeFor[[]string](), ranges.Type, "the type of caddyhttp.StaticIPRange.Ranges")
}

// What a server states is found by the time its handlers are provisioned, whatever the source.
func TestServerRanges(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, options string
		stated        bool
		ranges        []string
		static        bool
	}{
		{"nothing", "", false, nil, false},
		{"static", "trusted_proxies static 10.0.0.0/8 192.0.2.1", true, []string{"10.0.0.0/8", "192.0.2.1"}, true},
		{"private_ranges", "trusted_proxies static private_ranges", true, caddyPrivateRanges(), true},
		{"dynamic", "trusted_proxies tiered_limit_changing", true, nil, false},
		{"unix", "trusted_proxies_unix", false, nil, false},
	} {
		e := newEdge(t, "{\n\tservers {\n\t\t"+c.options+"\n\t}\n}\n:8080 {\n\ttiered_limit {\n\t\ttier ip 5/s\n\t}\n\trespond ok\n}\n")
		stated, ranges, static := serverRanges(e.server(":8080"))
		assert.Equal(t, c.stated, stated, c.name)
		assert.Equal(t, c.ranges, ranges, c.name)
		assert.Equal(t, c.static, static, c.name)
		for _, h := range e.handlers() {
			assert.Equal(t, c.stated, h.topology.Trusted != nil, c.name)
			assert.Equal(t, c.stated || c.name == "unix", h.topology.Stated(), c.name)
		}
	}
}

func caddyPrivateRanges() []string {
	return []string{"192.168.0.0/16", "172.16.0.0/12", "10.0.0.0/8", "127.0.0.1/8", "fd00::/8", "::1"}
}

var nextListen atomic.Int32

// freshListen is a listen address of a test's own, so that its unnamed stacks are too.
func freshListen() string { return fmt.Sprintf(":%d", 20_000+nextListen.Add(1)) }

// topologySite is a site whose server has some options, with a limit of 1 per minute and client.
func topologySite(options, hops string) string {
	return "{\n\tservers {\n" + options + "\n\t}\n}\n" + freshListen() + " {\n\ttiered_limit {\n\t\t" + hops +
		"\n\t\ttier ip 1/m\n\t}\n\trespond {http.tiered_limit.client_ip}\n}\n"
}

// The client by each source of trusted ranges, for peers and entries in each notation.
func TestTrustedProxiesSources(t *testing.T) {
	t.Parallel()
	setSource(1, "10.0.0.0/8", "2001:db8:a::/48")
	setSource(2, "::ffff:10.0.0.0/104", "2001:db8:a::/48")
	for name, options := range map[string]string{
		"static":             "trusted_proxies static 10.0.0.0/8 2001:db8:a::/48",
		"static, mapped":     "trusted_proxies static ::ffff:10.0.0.0/104 2001:db8:a::/48",
		"static, bits":       "trusted_proxies static 10.9.9.9/8 2001:db8:a:ffff::/48",
		"static, strict":     "trusted_proxies static 10.0.0.0/8 2001:db8:a::/48\ntrusted_proxies_strict",
		"dynamic":            "trusted_proxies tiered_limit_changing a",
		"dynamic, mapped":    "trusted_proxies tiered_limit_changing a b",
		"dynamic and strict": "trusted_proxies tiered_limit_changing a\ntrusted_proxies_strict",
	} {
		e := newEdge(t, topologySite(options, ""))
		for _, c := range []struct{ peer, chain, want string }{
			{"10.1.2.3:5", "6.6.6.6, 203.0.113.7", "203.0.113.7"},
			{"[::ffff:10.1.2.3]:5", "6.6.6.6, 203.0.113.7", "203.0.113.7"},
			{"[2001:db8:a::1]:5", "6.6.6.6, 203.0.113.7", "203.0.113.7"},
			{"10.1.2.3:5", "6.6.6.6, 203.0.113.7, 10.0.0.5", "203.0.113.7"},
			{"10.1.2.3:5", "203.0.113.7, ::ffff:10.0.0.5", "203.0.113.7"},
			{"10.1.2.3:5", "203.0.113.7, ::ffff:a00:5, 2001:db8:a::9", "203.0.113.7"},
			{"10.1.2.3:5", "10.0.0.1, 10.0.0.2", "10.1.2.3"},
			{"10.1.2.3:5", "203.0.113.7, unknown", "10.1.2.3"},
			{"11.1.2.3:5", "203.0.113.7", "11.1.2.3"},
			{"[::ffff:11.1.2.3]:5", "203.0.113.7", "11.1.2.3"},
			{"[2001:db8:b::1]:5", "203.0.113.7", "2001:db8:b::"},
			{"10.1.2.3:5", "", "10.1.2.3"},
			{"@", "203.0.113.7", "unknown"},
		} {
			e.clock.advance(60_000_000_000)
			q := request{peer: c.peer}
			if c.chain != "" {
				q.header = http.Header{"X-Forwarded-For": {c.chain}}
			}
			got := e.send(q)
			assert.Equal(t, 200, got.Code, "%s: peer %s, chain %q", name, c.peer, c.chain)
			assert.Equal(t, c.want, got.Body.String(), "%s: peer %s, chain %q", name, c.peer, c.chain)
		}
	}
}

// Ranges that change while the server runs count at once, with hops and without.
func TestTrustedProxiesChangeWhileRunning(t *testing.T) {
	t.Parallel()
	for _, hops := range []string{"", "trusted_hops 1"} {
		setSource(3)
		e := newEdge(t, topologySite("trusted_proxies tiered_limit_changing a b c", hops))
		q := request{peer: "10.1.2.3:5", header: http.Header{"X-Forwarded-For": {"203.0.113.7"}}}
		assert.Equal(t, "10.1.2.3", e.send(q).Body.String(), "%q, no ranges yet", hops)
		setSource(3, "10.0.0.0/8")
		assert.Equal(t, "203.0.113.7", e.send(q).Body.String(), "%q, the peer's range has come", hops)
		setSource(3, "172.16.0.0/12")
		assert.Equal(t, 429, e.send(q).Code, "%q, the peer's range has gone, and its one request was counted", hops)
	}
}

// The headers of the server are read in order, and by their canonical names.
func TestClientIPHeadersOfTheServer(t *testing.T) {
	t.Parallel()
	e := newEdge(t, topologySite("trusted_proxies static 10.0.0.0/8\nclient_ip_headers cf-connecting-ip X-FORWARDED-FOR", ""))
	header := http.Header{"Cf-Connecting-Ip": {"203.0.113.1"}, "X-Forwarded-For": {"203.0.113.2"}}
	assert.Equal(t, "203.0.113.1", e.send(request{peer: "10.0.0.1:1", header: header}).Body.String())
	delete(header, "Cf-Connecting-Ip")
	assert.Equal(t, "203.0.113.2", e.send(request{peer: "10.0.0.1:1", header: header}).Body.String())
	header["Cf-Connecting-Ip"] = []string{"garbage"}
	assert.Equal(t, "10.0.0.1", e.send(request{peer: "10.0.0.1:1", header: header}).Body.String())
}
