package tieredlimit

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// limit2 is an unnamed stack of 2 per minute and client.
const limit2 = "tiered_limit {\n\ttrusted_hops 0\n\ttier ip 2/m\n}\n"

// hostSite is a site of its own on a listen address.
func hostSite(host, listen, body string) string {
	return "http://" + host + listen + " {\n" + body + "\nrespond ok\n}\n"
}

func to(host string) request { return request{url: "http://" + host + "/"} }

func toPort(host, listen string) request {
	return request{url: "http://" + host + listen + "/", listen: listen}
}

// What a reload may change around an unnamed stack without its starting anew.
func TestUnnamedStackKeepsItsCounters(t *testing.T) {
	t.Parallel()
	for name, after := range map[string]func(l string) string{
		"nothing":            func(l string) string { return hostSite("a.test", l, limit2) },
		"lines moved":        func(l string) string { return "# a comment\n\n\n" + hostSite("a.test", l, "\n\n"+limit2) },
		"a site before it":   func(l string) string { return hostSite("0.test", l, limit2) + hostSite("a.test", l, limit2) },
		"a site behind it":   func(l string) string { return hostSite("a.test", l, limit2) + hostSite("z.test", l, limit2) },
		"a server before it": func(l string) string { return hostSite("0.test", ":1"+l[2:], limit2) + hostSite("a.test", l, limit2) },
		"from a snippet":     func(l string) string { return "(s) {\n" + limit2 + "}\n" + hostSite("a.test", l, "import s") },
		"inside route":       func(l string) string { return hostSite("a.test", l, "route {\n"+limit2+"}") },
		"inside handle":      func(l string) string { return hostSite("a.test", l, "handle {\n"+limit2+"}") },
		"deep inside": func(l string) string {
			return hostSite("a.test", l, "handle {\nroute {\nhandle /* {\n"+limit2+"}\n}\n}")
		},
		"behind a matcher": func(l string) string {
			return hostSite("a.test", l, strings.Replace(limit2, "tiered_limit", "tiered_limit /*", 1))
		},
		"other handlers":       func(l string) string { return hostSite("a.test", l, "header X y\nencode gzip\n"+limit2) },
		"the host in capitals": func(l string) string { return hostSite("A.test", l, limit2) },
		"another stack": func(l string) string {
			return hostSite("a.test", l, limit2+"tiered_limit /x other {\ntier global 9/m\n}\n")
		},
		"spelled differently": func(l string) string {
			return hostSite("a.test", l, "tiered_limit {\ntier ip 2/60s\ntrusted_hops 0\n}\n")
		},
		"server options": func(l string) string {
			return "{\nservers " + l + " {\nname other\ntrusted_proxies static 10.0.0.0/8\n}\n}\n" + hostSite("a.test", l, limit2)
		},
		"an error route": func(l string) string { return hostSite("a.test", l, limit2+"handle_errors 404 {\nrespond gone\n}") },
	} {
		listen := freshListen()
		e := newEdge(t, hostSite("a.test", listen, limit2))
		require.Equal(t, 2, e.served(5, toPort("a.test", listen)), name)
		for range 3 {
			e.reload(after(listen))
			assert.Equal(t, 0, e.served(1, toPort("a.test", listen)), "%s: the counters are gone", name)
			e.reload(hostSite("a.test", listen, limit2))
			assert.Equal(t, 0, e.served(1, toPort("a.test", listen)), "%s: the counters are gone on the way back", name)
		}
	}
}

// What makes an unnamed stack another one.
func TestUnnamedStackStartsAnew(t *testing.T) {
	t.Parallel()
	for name, after := range map[string]func(l string) (string, request){
		"another count": func(l string) (string, request) {
			return hostSite("a.test", l, strings.Replace(limit2, "2/m", "3/m", 1)), toPort("a.test", l)
		},
		"another field": func(l string) (string, request) {
			return hostSite("a.test", l, strings.Replace(limit2, "tier ip", "log_keys\ntier ip", 1)), toPort("a.test", l)
		},
		"another host": func(l string) (string, request) { return hostSite("b.test", l, limit2), toPort("b.test", l) },
		"one host more": func(l string) (string, request) {
			return "http://a.test" + l + ", http://b.test" + l + " {\n" + limit2 + "respond ok\n}", toPort("a.test", l)
		},
		"another port": func(string) (string, request) {
			l := freshListen()
			return hostSite("a.test", l, limit2), toPort("a.test", l)
		},
		"a name": func(l string) (string, request) {
			return hostSite("a.test", l, strings.Replace(limit2, "tiered_limit", "tiered_limit named-anew", 1)), toPort("a.test", l)
		},
	} {
		listen := freshListen()
		e := newEdge(t, hostSite("a.test", listen, limit2))
		require.Equal(t, 2, e.served(5, toPort("a.test", listen)), name)
		caddyfile, q := after(listen)
		e.reload(caddyfile)
		assert.GreaterOrEqual(t, e.served(3, q), 2, "%s: the counters stayed", name)
	}
}

// Equal stacks of one site are told apart by their order, and each counts for itself.
func TestEqualStacksOfOneSite(t *testing.T) {
	t.Parallel()
	listen := freshListen()
	both := hostSite("a.test", listen, "route /one {\n"+limit2+"}\nroute /two {\n"+limit2+"}")
	e := newEdge(t, both)
	one, two := request{url: "http://a.test/one"}, request{url: "http://a.test/two"}
	assert.Equal(t, 2, e.served(3, one))
	assert.Equal(t, []int{200}, e.statuses(1, two))
	e.reload(both)
	assert.Equal(t, 0, e.served(1, one))
	assert.Equal(t, 1, e.served(3, two))
	var labels []string
	for _, h := range e.handlers() {
		labels = append(labels, h.stackLabel)
	}
	assert.ElementsMatch(t, []string{"a.test " + listen, "a.test " + listen + " #2"}, labels)
	e.reload(hostSite("a.test", listen, "route /one {\n"+limit2+"}"))
	assert.Equal(t, 0, e.served(1, one), "the first stays the first")
}

// Stacks whose first host and listen address are the same are told apart in metrics and by operators.
func TestLabelsOfUnnamedStacksAreDistinct(t *testing.T) {
	t.Parallel()
	const stack = `{"handler": "tiered_limit", "tiers": [{"name": "global", "limits": [{"count": 1, "window": "1h"}]}]},
		{"handler": "static_response", "body": "ok"}`
	e := newEdgeJSON(t, []byte(`{"apps": {"http": {"servers": {"s": {"listen": [":8123"], "automatic_https": {"disable": true}, "routes": [
		{"match": [{"host": ["a.test", "b.test"]}], "handle": [`+stack+`], "terminal": true},
		{"match": [{"host": ["a.test", "c.test"]}], "handle": [`+stack+`], "terminal": true}]}}}}}`))
	b, c := request{url: "http://b.test:8123/"}, request{url: "http://c.test:8123/"}
	assert.Equal(t, 1, e.served(3, b))
	assert.Equal(t, 1, e.served(2, c))
	assert.Equal(t, 2.0, e.metric(`requests_total{outcome="refused",stack="a.test :8123"}`))
	assert.Equal(t, 1.0, e.metric(`requests_total{outcome="refused",stack="a.test :8123 #2"}`))
	admin := &Admin{running: func() *App { return e.app }}
	_, err := admin.reset(probeRequest("192.0.2.1:1"), &counterQuestion{Stack: "a.test :8123 #2", Tier: "global"})
	require.NoError(t, err)
	assert.Equal(t, 0, e.served(1, b))
	assert.Equal(t, 1, e.served(1, c), "the one that was reset")
}

// One site block on two ports is two stacks.
func TestTwoPortsAreTwoStacks(t *testing.T) {
	t.Parallel()
	l, m := freshListen(), freshListen()
	e := newEdge(t, "http://a.test"+l+", http://a.test"+m+" {\n"+limit2+"respond ok\n}")
	assert.Equal(t, 2, e.served(3, toPort("a.test", l)))
	assert.Equal(t, 2, e.served(3, toPort("a.test", m)))
}

// The labels of unnamed stacks, for logs and metrics.
func TestUnnamedLabels(t *testing.T) {
	t.Parallel()
	l := freshListen()
	for caddyfile, want := range map[string]string{
		hostSite("b.test", l, limit2):                                                         "b.test " + l,
		l + " {\n" + limit2 + "respond ok\n}":                                                 "* " + l,
		"http://z.test" + l + ", http://b.test" + l + " {\n" + limit2 + "\n}":                 "b.test " + l,
		hostSite("b.test", l, strings.Replace(limit2, "tiered_limit", "tiered_limit l-1", 1)): "l-1",
	} {
		e := newEdge(t, caddyfile)
		require.Len(t, e.handlers(), 1)
		assert.Equal(t, want, e.handlers()[0].stackLabel)
		e.close()
		e.app.handlers = nil
	}
}

// A snippet imported by two sites makes two stacks; with a name they share; with a name and different limits the
// config is refused.
func TestSnippetAndName(t *testing.T) {
	t.Parallel()
	listen := freshListen()
	sites := func(a, b string) string { return hostSite("a.test", listen, a) + hostSite("b.test", listen, b) }
	named := strings.Replace(limit2, "tiered_limit", "tiered_limit f4-shared", 1)

	e := newEdge(t, "(s) {\n"+limit2+"}\n"+sites("import s", "import s"))
	assert.Equal(t, 2, e.served(3, to("a.test")))
	assert.Equal(t, 2, e.served(3, to("b.test")), "independent")

	e = newEdge(t, "(s) {\n"+named+"}\n"+sites("import s", "import s"))
	assert.Equal(t, 2, e.served(3, to("a.test")))
	assert.Equal(t, 0, e.served(3, to("b.test")), "shared")
	err := e.tryReload(sites(named, strings.Replace(named, "2/m", "3/m", 1)))
	assert.ErrorContains(t, err, `stack "f4-shared": tier "ip" is defined twice, with a different limits: `)
	assert.Equal(t, 0, e.served(1, to("b.test")), "the refused config changed nothing")
}

// A tier of a named stack must be the same in every field of its block, the prefixes and the store; nothing else must.
func TestSharedTierDefinition(t *testing.T) {
	t.Parallel()
	block := func(stackLines, tierLines string) string {
		return "tiered_limit f4-fields {\n" + stackLines + "\ntier t 5/s {\n" + tierLines + "\n}\n}\n"
	}
	for _, c := range []struct{ aStack, aTier, bStack, bTier, different string }{
		{"", "key a", "", "key b", "key"},
		{"", "key a", "", "key a\nkey a", "key"},
		{"", "key a b", "", "key a\nkey b", "key"},
		{"", "key a", "", "key a\nmatch /x", "match"},
		{"", "key a\nmatch /x", "", "key a\nmatch /y", "match"},
		{"", "key a", "", "key a\nclients ::1", "clients"},
		{"", "key a\nshare 5% /x", "", "key a\nshare 6% /x", "share"},
		{"", "key a\nshare 5% /x", "", "key a\nshare 5% /y", "share"},
		{"", "key a\nclients ::1", "", "key a\nclients not ::1", "clients"},
		{"", "key a", "", "key a\ncharge checked", "charge"},
		{"", "key a", "charge checked", "key a", "charge"},
		{"", "key a", "", "key a\ndry_run", "dry_run"},
		{"", "key a", "ipv4_prefix 24", "key a", "ipv4_prefix or ipv6_prefix"},
		{"", "key a", "ipv6_prefix 48", "key a", "ipv4_prefix or ipv6_prefix"},
		{"", "key a", "store memory {\nmax_keys 5000\n}", "key a", "store"},
		{"", "key a", "", "key a", ""},
		{"", "key a", "charge served", "key a\ncharge served", ""},
		{"charge checked", "key a", "", "key a\ncharge checked", ""},
		{"", "key a", "ipv4_prefix 32\nipv6_prefix 64\nstore memory", "key a", ""},
		{"", "key a", "trusted_hops 1\nnat64_prefix 2001:db8::/32\nheaders none\nbody text\ndry_run\nlog_keys\njitter 5\nexempt /x\ncors *", "key a", ""},
		{"", "key a", "tier other 1/s {\nkey b\n}", "key a", ""},
	} {
		listen := freshListen()
		e, err := tryLoad(t, hostSite("a.test", listen, block(c.aStack, c.aTier))+hostSite("b.test", listen, block(c.bStack, c.bTier)))
		if c.different == "" {
			assert.NoError(t, err, "%+v", c)
		} else {
			assert.ErrorContains(t, err, `stack "f4-fields": tier "t" is defined twice, with a different `+c.different+": ", "%+v", c)
			assert.ErrorContains(t, err, " in a.test "+listen+", ", "%+v", c)
			assert.ErrorContains(t, err, " in b.test "+listen+"; handlers that share a name", "%+v", c)
		}
		if e != nil {
			e.close()
			e.app.handlers = nil
		}
	}
}

// A default key and the same key in full are one definition, and so is JSON whose fields are in another order.
func TestSameDefinitionInOtherWords(t *testing.T) {
	t.Parallel()
	listen := freshListen()
	_, err := tryLoad(t, hostSite("a.test", listen, "tiered_limit f4-words {\ntier ip 5/s\n}\n")+
		hostSite("b.test", listen, "tiered_limit f4-words {\ntier ip 5/1000ms {\nkey {http.tiered_limit.client_ip}\n}\n}\n"))
	assert.NoError(t, err)
	handler := func(match, store string) string {
		return `{"handler":"tiered_limit","name":"f4-order","store":` + store + `,"tiers":[{"name":"global","match":[` + match +
			`],"limits":[{"count":1,"window":"1m"}]}]}`
	}
	config := `{"apps":{"http":{"servers":{"a":{"listen":[":8080"],"routes":[{"handle":[` +
		handler(`{"path":["/a"],"method":["GET"]}`, `{"backend":"memory","max_keys":7}`) + `,` +
		handler(`{ "method":["GET"], "path":["/a"]}`, `{"max_keys":7,"backend":"memory"}`) + `]}]}}}}}`
	newEdgeJSON(t, []byte(config))
}

// Without an order, inside route and handle_path, a stack limits what is there and nothing else.
func TestInsideBlocks(t *testing.T) {
	t.Parallel()
	for name, block := range map[string]string{
		"route":       "route /api/* {\n" + limit2 + "respond ok\n}\nrespond ok",
		"handle":      "handle /api/* {\n" + limit2 + "respond ok\n}\nhandle {\nrespond ok\n}",
		"handle_path": "handle_path /api/* {\n" + limit2 + "respond ok\n}\nrespond ok",
		"nested":      "route {\nhandle /api/* {\n" + limit2 + "respond ok\n}\n}\nrespond ok",
		"matcher":     strings.Replace(limit2, "tiered_limit", "tiered_limit /api/*", 1) + "respond ok",
	} {
		e := newEdge(t, freshListen()+" {\n"+block+"\n}")
		assert.Equal(t, 5, e.served(5, request{url: "http://localhost/other"}), name)
		assert.Equal(t, 2, e.served(5, request{url: "http://localhost/api/x"}), name)
		assert.Equal(t, 5, e.served(5, request{url: "http://localhost/apix"}), name)
	}
}

// Inside a named route a name is required, since the route may be invoked from many places.
func TestNamedRoutes(t *testing.T) {
	t.Parallel()
	listen := freshListen()
	sites := hostSite("a.test", listen, "invoke r") + hostSite("b.test", listen, "route {\ninvoke r\n}")
	_, err := tryLoad(t, "&(r) {\n"+limit2+"}\n"+sites)
	assert.ErrorContains(t, err, "a tiered_limit inside a named route needs a name")
	named := "&(r) {\nroute {\n" + strings.Replace(limit2, "tiered_limit", "tiered_limit named-route", 1) + "}\n}\n"
	e := newEdge(t, named+sites)
	assert.Equal(t, 1, e.served(1, to("a.test")))
	assert.Equal(t, 1, e.served(3, to("b.test")))
	e.reload(named + sites)
	assert.Equal(t, 0, e.served(1, to("a.test")))
	// Beside a named route, a stack of a site needs none.
	newEdge(t, named+sites+hostSite("c.test", listen, limit2))
	// One that stands in an error route is not in a named one.
	newEdge(t, named+sites+hostSite("d.test", listen, "handle_errors {\n"+limit2+"respond ok\n}"))
}

// rivalHandler stands for another plugin's rate limiter.
type rivalHandler struct{}

func init() {
	caddy.RegisterModule(rivalHandler{})
	httpcaddyfile.RegisterHandlerDirective("rate_limit", func(h httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
		h.Next()
		return rivalHandler{}, nil
	})
	httpcaddyfile.RegisterDirectiveOrder("rate_limit", httpcaddyfile.Before, "basic_auth")
}

func (rivalHandler) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.handlers.rate_limit", New: func() caddy.Module { return new(rivalHandler) }}
}

func (rivalHandler) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	w.Header().Add("X-Rival", "was here")
	return next.ServeHTTP(w, r)
}

// Another rate-limit plugin in the same binary, beside this one in the same site.
func TestBesideAnotherPlugin(t *testing.T) {
	t.Parallel()
	for _, order := range []string{"", "{\norder rate_limit after tiered_limit\n}\n"} {
		e := newEdge(t, order+freshListen()+" {\nrate_limit\n"+limit2+"respond ok\n}")
		for i, want := range []int{200, 200, 429} {
			got := e.send(request{})
			assert.Equal(t, want, got.Code, "request %d", i+1)
			if want == 200 {
				assert.Equal(t, "was here", got.Header().Get("X-Rival"))
			}
		}
	}
}

// Many reloads neither lose a counter nor leave one behind.
func TestReloadsLeaveNothingBehind(t *testing.T) {
	t.Parallel()
	listen := freshListen()
	e := newEdge(t, hostSite("a.test", listen, limit2))
	require.Equal(t, 2, e.served(3, to("a.test")))
	for i := range 100 {
		e.reload(hostSite("a.test", listen, limit2) + hostSite(fmt.Sprintf("n%d.test", i), listen, limit2))
		require.Error(t, e.tryReload(hostSite("a.test", listen, limit2)+hostSite("x.test", listen, "tiered_limit {\ntier x 1/m {\nkey {http.request.nope}\n}\n}")))
	}
	assert.Equal(t, 0, e.served(1, to("a.test")))
	e.close()
	e.app.handlers = nil
	again := newEdge(t, hostSite("a.test", listen, limit2))
	assert.Equal(t, 2, again.served(3, to("a.test")), "somebody still held the counters")
}

// An unnamed stack that two places import is two stacks; whatever tells the places apart tells the stacks apart.
func TestUnnamedStacksAreApart(t *testing.T) {
	t.Parallel()
	const snippet = "(lim) {\n tiered_limit {\n trusted_hops 0\n tier ip 1/m\n }\n}\n"
	for _, c := range []struct {
		name, site    string
		first, second request
	}{
		{
			"two sites", "http://one.f4a.test:8080 {\n import lim\n respond ok\n}\nhttp://two.f4a.test:8080 {\n import lim\n respond ok\n}",
			request{url: "http://one.f4a.test/"}, request{url: "http://two.f4a.test/"},
		},
		{
			"two ports of one site", "http://f4b.test:8080, http://f4b.test:8081 {\n import lim\n respond ok\n}",
			request{url: "http://f4b.test/", listen: ":8080"}, request{url: "http://f4b.test/", listen: ":8081"},
		},
		{
			"two handles", "http://f4c.test:8080 {\n handle /a {\n import lim\n respond ok\n }\n handle {\n import lim\n respond ok\n }\n}",
			request{url: "http://f4c.test/a"}, request{url: "http://f4c.test/b"},
		},
		{
			"a site and its errors", "http://f4d.test:8080 {\n import lim\n respond /ok ok\n error /bad 404\n handle_errors 404 {\n import lim\n respond ok 200\n }\n}",
			request{url: "http://f4d.test/ok"}, request{url: "http://f4d.test/bad"}.from(clientB),
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			e := newEdge(t, snippet+c.site)
			assert.Equal(t, 1, e.served(3, c.first))
			assert.Equal(t, 1, e.served(3, c.second))
		})
	}
}

// The topology may differ between handlers of a named stack: it says how to find the client, not what to count.
func TestANamedStackMayHaveSeveralTopologies(t *testing.T) {
	t.Parallel()
	e := newEdge(t, `
http://direct.topo.test:8080 {
	tiered_limit topo {
		trusted_hops 0
		tier ip 2/m
	}
	respond {http.tiered_limit.client_ip}
}
http://proxied.topo.test:8080 {
	tiered_limit topo {
		trusted_hops 1
		tier ip 2/m
	}
	respond {http.tiered_limit.client_ip}
}`)
	direct := request{url: "http://direct.topo.test/"}.from(clientA)
	proxied := request{url: "http://proxied.topo.test/"}.with("X-Forwarded-For", clientA)
	assert.Equal(t, clientA, e.send(direct).Body.String())
	assert.Equal(t, clientA, e.send(proxied).Body.String())
	wantRefused(t, e.send(direct), "ip")
	wantRefused(t, e.send(proxied), "ip")
}

// A dry handler of a named stack takes nothing away from a live one behind it.
func TestDryHandlerBeforeALiveOne(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		charge string
		want   []int
		ip     int64 // used after the requests
	}{
		{"served", []int{200, 200, 429, 429}, 2},
		{"checked", []int{200, 200, 429, 429}, 4},
	} {
		name := "dry-before-live-" + c.charge
		tiers := "trusted_hops 0\ncharge " + c.charge + "\ntier ip 100/m\ntier global 2/m\n}\n"
		e := newEdge(t, freshListen()+" {\nroute {\ntiered_limit "+name+" {\ndry_run\n"+tiers+"tiered_limit "+name+" {\n"+tiers+"respond ok\n}\n}")
		assert.Equal(t, c.want, e.statuses(4, request{}), c.charge)
		assert.Equal(t, []int64{c.ip}, e.used(name, "ip", request{}), "%s: charged once for each request", c.charge)
		assert.Equal(t, []int64{2}, e.used(name, "global", request{}), c.charge)
	}
}
