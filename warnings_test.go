package tieredlimit

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// loadSite is a server with options, and a site with a stack on it.
func loadSite(options, block string) string {
	return "{\n\tservers {\n" + options + "\n\t}\n}\n" + freshListen() + " {\n\ttiered_limit {\n" + block + "\n\t}\n\trespond ok\n}\n"
}

// Every warning at load: what brings it, what it says, and what does not bring it.
func TestLoadWarnings(t *testing.T) {
	t.Parallel()
	const (
		inert    = "tiered_limit is DISABLED"
		strict   = "trusted_proxies is set without trusted_proxies_strict"
		unix     = "trusted_proxies_unix is set without trusted_proxies_strict"
		clientIP = "a key uses {http.vars.client_ip}, which is the leftmost entry of the forwarding header, which callers can forge"
		conn     = "a key uses {http.vars.client_ip}, which is the address of the connection as long as the server has no trusted_proxies"
		proxy    = "a key uses {http.vars.client_ip}, which is the address of the proxy in front as long as the server has no trusted_proxies"
		whole    = "a key uses {http.vars.client_ip}, which knows nothing of ipv6_prefix"
		peer     = "which is the address of the proxy in front, so that all clients share one bucket"
		forged   = "a key uses {http.request.header.X-Forwarded-For}, which is written by callers"
		unknown  = "a key uses a placeholder that only a map directive or a plugin can fill"
		single   = "the client is read from "
		proxies  = "trusted_proxies static 10.0.0.0/8"
	)
	key := func(key string) string { return "tier t 5/s {\nkey " + key + "\n}" }
	for _, c := range []struct {
		options, block string
		want           []string
	}{
		// Nobody has said who the client is.
		{"", "tier ip 5/s", []string{inert}},
		{"trusted_proxies_strict", "tier ip 5/s", []string{inert}},
		{"", key("{http.tiered_limit.client_ip}"), []string{inert}},
		{"", key("a") + "\ntier b 1/s {\nkey {header.A}\nkey x{http.tiered_limit.client_ip}\n}", []string{inert}},
		{"", "dry_run\ntier ip 5/s", []string{inert}},
		{"", "tier ip 5/s {\ndry_run\n}", []string{inert}},
		{"", "exempt_clients 192.0.2.1\ntier global 5/s", []string{inert}},
		{"", "tier global 5/s", nil},
		{"", "tier user 5/s", nil},
		{"", key("{header.X-Api-Key}"), nil},
		{"", "tier ip off\ntier global 5/s", nil},
		{"", "tier ip off", nil},
		{"", "trusted_hops 0\ntier ip 5/s", nil},
		{"", "trusted_hops 2\ntier ip 5/s", nil},
		// Caddy's own client address is another one.
		{proxies, "tier ip 5/s", []string{strict}},
		{"trusted_proxies_unix", "tier ip 5/s", []string{unix}},
		{"trusted_proxies_unix\ntrusted_proxies_strict", "tier ip 5/s", nil},
		{"trusted_proxies_unix\n" + proxies, "tier ip 5/s", []string{strict}},
		{"trusted_proxies tiered_limit_changing", "tier ip 5/s", []string{strict}},
		{proxies, "exempt_clients 192.0.2.1\ntier global 5/s", []string{strict}},
		{proxies + "\ntrusted_proxies_strict", "tier ip 5/s", nil},
		{proxies, "trusted_hops 1\ntier ip 5/s", nil},
		{proxies, "tier global 5/s", nil},
		{proxies, "tier ip off", nil},
		// Keys that do not name the client as this module does.
		{"", key("{client_ip}"), []string{conn}},
		{"trusted_proxies_strict", key("{client_ip}"), []string{conn}},
		{"", "trusted_hops 0\n" + key("{client_ip}"), []string{whole}},
		{"", "trusted_hops 1\n" + key("{client_ip}"), []string{proxy}},
		{"trusted_proxies_strict", "trusted_hops 2\n" + key("{client_ip}"), []string{proxy}},
		{"trusted_proxies_unix", key("{client_ip}"), []string{clientIP}},
		{"trusted_proxies_unix\ntrusted_proxies_strict", key("{client_ip}"), nil},
		{proxies, "trusted_hops 1\n" + key("{client_ip}"), []string{clientIP}},
		{proxies + "\ntrusted_proxies_strict", "trusted_hops 1\n" + key("{client_ip}"), nil},
		{proxies, key("{client_ip}"), []string{clientIP}},
		{proxies + "\ntrusted_proxies_strict", key("{client_ip}"), nil},
		{proxies, key("a{remote_host}"), []string{peer}},
		{proxies, key("{http.request.remote.host/24,64}"), []string{peer}},
		{"trusted_proxies tiered_limit_changing", key("{remote_host}"), []string{peer}},
		{"", "trusted_hops 1\n" + key("{remote_host}"), []string{peer}},
		{"trusted_proxies_unix", key("{remote_host}"), []string{peer}},
		{"", "trusted_hops 0\n" + key("{remote_host}"), nil},
		{"", key("{remote_host}"), nil},
		{"", key("{header.X-Forwarded-For}"), []string{forged}},
		{"", "trusted_hops 1\n" + key("a {header.x-forwarded-for}"), []string{forged}},
		{proxies + "\ntrusted_proxies_strict", key("{http.request.header.X-FORWARDED-FOR}"), []string{forged}},
		{"", key("{header.X-Real-IP}"), nil},
		{"", "tier t off {\nkey {client_ip}\n}", nil},
		// Keys that Caddy alone cannot fill.
		{"", key("{remote_ip}"), []string{unknown}},
		{"", key("{my_map}"), []string{unknown}},
		{"", key("{a} {b}-{a}"), []string{unknown, unknown}},
		{"", key("{http.auth.user.id}"), nil},
		{"", key("{http.regexp.a.1}{env.HOME}{system.hostname}{http.vars.a}"), nil},
		{"", key(`\{a\}`), nil},
		// A header with one address, believed from everybody.
		{"", "trusted_hops 1 CF-Connecting-IP\ntier ip 5/s", []string{single + "Cf-Connecting-Ip"}},
		{"", "trusted_hops 1 x-real-ip\ntier ip 5/s", []string{single + "X-Real-Ip"}},
		{"", "trusted_hops 1 True-Client-IP\ntier global 5/s\nexempt_clients 10.0.0.1", []string{single + "True-Client-Ip"}},
		{"trusted_proxies_strict", "trusted_hops 1 Fly-Client-IP\ntier ip 5/s", []string{single + "Fly-Client-Ip"}},
		{"", "dry_run\ntrusted_hops 1 X-Azure-ClientIP\ntier ip 5/s", []string{single + "X-Azure-Clientip"}},
		{"", "trusted_hops 1 CF-Connecting-IP\ntier global 5/s", nil},
		{"", "trusted_hops 1 CF-Connecting-IP\ntier ip off", nil},
		{"", "trusted_hops 0 CF-Connecting-IP\ntier ip 5/s", nil},
		{"", "trusted_hops 1 X-Forwarded-For\ntier ip 5/s", nil},
		{"", "trusted_hops 1 forwarded\ntier ip 5/s", nil},
		{proxies, "trusted_hops 1 CF-Connecting-IP\ntier ip 5/s", nil},
		{"trusted_proxies tiered_limit_changing", "trusted_hops 1 CF-Connecting-IP\ntier ip 5/s", nil},
		{"trusted_proxies_unix", "trusted_hops 1 CF-Connecting-IP\ntier ip 5/s", nil},
		// Several at once.
		{proxies, "tier ip 5/s\n" + key("{client_ip} {remote_host} {header.X-Forwarded-For} {a}"),
			[]string{strict, clientIP, peer, forged, unknown}},
	} {
		e := newEdge(t, loadSite(c.options, c.block))
		lines := e.logs.lines("warn", "")
		require.Len(t, lines, len(c.want), "options %q, block %q: %v", c.options, c.block, lines)
		for i, want := range c.want {
			assert.Contains(t, lines[i].str("msg"), want, "options %q, block %q", c.options, c.block)
		}
	}
}

// What the warnings tell their reader to do, and where.
func TestLoadWarningsNameTheCure(t *testing.T) {
	t.Parallel()
	e := newEdge(t, loadSite("", "tier ip 5/s"))
	msg := e.logs.lines("error", "DISABLED")[0].str("msg")
	for _, want := range []string{
		"any default would either let clients forge theirs or throw everybody into one bucket", "trusted_hops 0 for a directly exposed server",
		"the number of entries that your own proxies append", "appends two: client, then forwarding rule; so 2, plus 1 for each further proxy",
		"trusted_proxies on the server",
	} {
		assert.Contains(t, msg, want)
	}
	e = newEdge(t, loadSite("trusted_proxies static 10.0.0.0/8", "tier ip 5/s\ntier t 5/s {\nkey {client_ip} {remote_ip}\n}"))
	assert.Contains(t, e.logs.lines("warn", "strict")[0].str("msg"), "Set trusted_proxies_strict")
	assert.Equal(t, "srv0", e.logs.lines("warn", "strict")[0].str("server"))
	line := e.logs.lines("warn", "http.vars.client_ip")[0]
	assert.Contains(t, line.str("msg"), "for the client's address write {http.tiered_limit.client_ip}")
	assert.Equal(t, []string{"t", "{http.vars.client_ip}"}, []string{line.str("tier"), line.str("placeholder")})
	line = e.logs.lines("warn", "only a map directive")[0]
	assert.Equal(t, []string{"t", "{remote_ip}"}, []string{line.str("tier"), line.str("placeholder")})
	assert.Contains(t, line.str("msg"), "http.tiered_limit.client_ip", "remote_ip is nearly always meant to be the client's address")
}

// Fifty sites that import one stack give each warning once; the one about strictness once for each server.
func TestOneWarningForManySites(t *testing.T) {
	t.Parallel()
	sites := func(options, block string) string {
		var b strings.Builder
		b.WriteString("{\n\tservers {\n" + options + "\n\t}\n}\n(limit) {\n\ttiered_limit {\n" + block + "\n\t}\n}\n")
		for i := range 50 {
			fmt.Fprintf(&b, "http://f11-%d.test:%d {\n\timport limit\n\trespond ok\n}\n", i, 30_000+i%2)
		}
		return b.String()
	}
	e := newEdge(t, sites("", "tier ip 5/s"))
	assert.Len(t, e.logs.lines("error", "DISABLED"), 1)
	assert.Len(t, e.logs.lines("warn", ""), 1)
	e = newEdge(t, sites("trusted_proxies static 10.0.0.0/8", "tier ip 5/s\ntier t 5/s {\nkey {client_ip} {a} {header.X-Forwarded-For} {remote_host}\n}"))
	assert.Len(t, e.logs.lines("warn", "trusted_proxies is set without"), 2)
	assert.Len(t, e.logs.lines("warn", "a key uses"), 4)
	assert.Len(t, e.logs.lines("warn", ""), 6)
	before := len(e.logs.lines("warn", ""))
	e.reload(sites("trusted_proxies static 10.0.0.0/8", "tier ip 5/s"))
	assert.Len(t, e.logs.lines("warn", ""), before+2, "a new configuration warns anew")
}

// An inert stack serves everything, whatever the header says, and the log says so once.
func TestInertServesEverything(t *testing.T) {
	t.Parallel()
	e := newEdge(t, loadSite("", "tier ip 2/m\ntier global 3/m"))
	for i := range 1000 {
		got := e.send(request{header: http.Header{"X-Forwarded-For": {fmt.Sprintf("203.0.113.%d", i%7)}}})
		require.Equal(t, 200, got.Code)
		require.Empty(t, got.Header().Values("X-RateLimit-Limit"))
	}
	assert.Len(t, e.logs.lines("warn", ""), 1)
}

// A user tier in front of the authentication knows no user. It is skipped, and the first time explains the order;
// behind the authentication it limits.
func TestUserTierAndAuthentication(t *testing.T) {
	t.Parallel()
	const auth = "basic_auth {\n\t\talice $2a$04$MqvJP3ddEzqcRlVK/oXMEeWeP0yd8lL7lZfph9mGm92RG8544PI.C\n" +
		"\t\tbob $2a$04$OlrhIHKTetYCTC9AqiEZPuGaFNgVdKR1Vc6AYoOVxchDnIdQtN4zm\n\t}\n"
	const stack = "tiered_limit {\n\t\ttier user 2/m\n\t}\n"
	as := func(user string) request {
		return request{edit: func(r *http.Request) { r.SetBasicAuth(user, user) }}
	}
	e := newEdge(t, freshListen()+" {\n\t"+auth+"\t"+stack+"\trespond ok\n}\n")
	assert.Equal(t, 5, e.served(5, as("alice")))
	lines := e.logs.lines("warn", "every key of a tier is empty")
	require.Len(t, lines, 1)
	assert.Contains(t, lines[0].str("msg"), "{http.auth.user.id} is set by authentication (such as basic_auth) behind tiered_limit: "+
		"put both into a route block, authentication (such as basic_auth) first")
	assert.Equal(t, "user", lines[0].str("tier"))
	assert.EqualValues(t, 5, e.metric(fmt.Sprintf("skipped_total{stack=%q,tier=\"user\"}", lines[0].str("stack"))))

	for name, caddyfile := range map[string]string{
		"in a route": freshListen() + " {\n\troute {\n\t\t" + auth + "\t" + stack + "\trespond ok\n\t}\n}\n",
		"by order":   "{\n\torder tiered_limit after basic_auth\n}\n" + freshListen() + " {\n\t" + stack + "\t" + auth + "\trespond ok\n}\n",
	} {
		e := newEdge(t, caddyfile)
		assert.Equal(t, []int{200, 200, 429}, e.statuses(3, as("alice")), name)
		assert.Equal(t, []int{200, 200, 429}, e.statuses(3, as("bob")), name)
		assert.Equal(t, "user", e.send(as("bob")).Header().Get("X-RateLimit-Resource"), name)
		assert.Empty(t, e.logs.lines("warn", ""), name)
	}
}

// A placeholder without its braces is one bucket for everybody, and so reported.
func TestKeysWithoutBraces(t *testing.T) {
	t.Parallel()
	for part, warned := range map[string]bool{
		"http.request.header.X-Api-Key": true, "header.X-Api-Key": true, "client_ip": true, "remote_host": true,
		"cookie.session": true, "everybody": false, "v1": false, "{http.request.header.X-Api-Key}": false,
	} {
		e := newEdge(t, freshListen()+" {\ntiered_limit {\ntier bare 5/m {\nkey "+part+"\n}\n}\nrespond ok\n}")
		lines := e.logs.lines("warn", "without its braces")
		if !warned {
			assert.Empty(t, lines, part)
			continue
		}
		require.Len(t, lines, 1, part)
		assert.Contains(t, lines[0].str("msg"), "{"+part+"}")
		assert.Equal(t, "bare", lines[0].str("tier"))
	}
}

// A header with one address is not everybody's to write where the server listens on unix sockets alone. What is warned of
// says which header, what callers can do, and what to write; once for a header, however many sites read it.
func TestASingleAddressHeaderNeedsTrustedProxies(t *testing.T) {
	t.Parallel()
	site := func(addresses ...string) string {
		return "http://single.test:8099 {\n\tbind " + strings.Join(addresses, " ") +
			"\n\ttiered_limit {\n\t\ttrusted_hops 1 CF-Connecting-IP\n\t\ttier ip 3/m\n\t}\n\trespond ok\n}\n"
	}
	for _, c := range []struct {
		bind  []string
		warns bool
	}{
		{[]string{"unix//run/a.sock"}, false},
		{[]string{"unix//run/a.sock", "unix//run/b.sock"}, false},
		{[]string{"unix+h2c//run/a.sock"}, false},
		{[]string{"unix//run/a.sock", "127.0.0.1"}, true},
		{[]string{"127.0.0.1"}, true},
		{[]string{"0.0.0.0"}, true},
	} {
		e := newEdge(t, site(c.bind...))
		lines := e.logs.lines("warn", "")
		if !c.warns {
			assert.Empty(t, lines, "%v", c.bind)
			continue
		}
		for i := range 12 {
			assert.Equal(t, 200, e.send(request{url: "http://single.test/", header: http.Header{"Cf-Connecting-Ip": {fmt.Sprintf("6.6.6.%d", i)}}}).Code)
		}
		for _, line := range lines {
			assert.Equal(t, "the client is read from Cf-Connecting-Ip, which has a single address: whoever reaches this server past the proxy "+
				"can write it, and so have a limit of its own for every request. Set trusted_proxies on the server to the proxy's addresses; "+
				"the header is then believed only from there", line.str("msg"))
			assert.Equal(t, "Cf-Connecting-Ip", line.str("header"))
		}
		assert.Len(t, lines, 1, "%v", c.bind)
	}
	many := strings.ReplaceAll(site("127.0.0.1"), "single.test", "a.test") + strings.ReplaceAll(site("127.0.0.1"), "single.test", "b.test")
	assert.Len(t, newEdge(t, many).logs.lines("warn", ""), 1)
}
