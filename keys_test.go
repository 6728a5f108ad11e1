package tieredlimit

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// keyedSite is a site with one tier of 1/m and the given keys.
func keyedSite(stack, keys string) string {
	return fmt.Sprintf(":8080 {\n tiered_limit %s {\n trusted_hops 0\n tier x 1/m {\n %s\n }\n }\n respond ok\n}", stack, keys)
}

// Parts that differ are identities that differ, whatever is in them and however long they are.
func TestIdentitiesAreDistinctAndBounded(t *testing.T) {
	t.Parallel()
	e := newEdge(t, keyedSite("s11", "key {header.X-A} {header.X-B}"))
	megabyte := strings.Repeat("m", 1<<20)
	for _, pair := range [][2]string{
		{"a:b", "c"}, {"a", "b:c"}, {"a:b:c", ""}, {"", "a:b:c"}, {"abc", ""}, {"ab", "c"}, {"a", "bc"},
		{"}{", "x"}, {"}", "{x"}, {"x", "}{"}, {"\n", "x"}, {"x", "\n"}, {"x\n", ""}, {"\x00", "x"}, {"x", "\x00"}, {"x\x00", ""}, {"", "x"}, {"x", ""},
		{"\xff", "x"}, {"\xfe", "x"}, {"é", "x"}, {"e\u0301", "x"}, {"x", "x"}, {"X", "x"}, {"{http.request.host}", "x"},
		{megabyte, "x"}, {"x", megabyte}, {megabyte, megabyte}, {megabyte + "m", "x"}, {megabyte[1:] + "n", "x"},
		{strings.Repeat("n", 256), ""}, {strings.Repeat("n", 257), ""}, {strings.Repeat("n", 255), "n"}, {strings.Repeat("n", 258), ""},
	} {
		q := request{}.with("X-A", pair[0]).with("X-B", pair[1])
		assert.Equal(t, 1, e.served(2, q), "%.20q and %.20q have one budget of their own", pair[0], pair[1])
	}
}

// A value of a megabyte is counted like any other, and no identity handed to a store is long.
func TestIdentitiesAreShort(t *testing.T) {
	t.Parallel()
	e := newEdge(t, keyedSite("s11-short", "key {header.X-A} {header.X-B} {header.X-C}"))
	h := e.handlers()[0]
	long := strings.Repeat("l", 1<<20)
	r := probeRequest("192.0.2.1:1")
	r.Header["X-A"], r.Header["X-B"], r.Header["X-C"] = []string{long}, []string{long}, []string{"short"}
	identity, found := h.tiers[0].keys[0].appendIdentity(nil, newRecord(h, r))
	require.Equal(t, present, found)
	assert.LessOrEqual(t, len(identity), 3*(256+4)+9)
	assert.NotContains(t, string(identity), "llll")
}

// A long bearer token works as a key, and appears in no log, metric or identity.
func TestATokenAsKeyIsNotShown(t *testing.T) {
	t.Parallel()
	e := newEdge(t, `
:8080 {
	log
	tiered_limit a10 {
		tier token 1/m {
			key {header.Authorization}
		}
		tier again 1/m {
			key {header.Authorization} x
			dry_run
		}
	}
	respond ok
}`)
	token := strings.Repeat("s3cr3t", 8<<10/6)
	bearer := request{}.with("Authorization", "Bearer "+token)
	assert.Equal(t, 1, e.served(3, bearer))
	assert.Equal(t, 1, e.served(1, request{}.with("Authorization", "Bearer "+token+"!")), "another token")
	w := e.send(bearer)
	for field, values := range w.Header() {
		assert.NotContains(t, strings.Join(values, ""), "s3cr3t", field)
	}
	assert.NotContains(t, w.Body.String(), "s3cr3t")
	assert.NotContains(t, e.logs.text(), "s3cr3t")
	families, err := e.ctx.GetMetricsRegistry().Gather()
	require.NoError(t, err)
	for _, family := range families {
		assert.NotContains(t, family.String(), "s3cr3t")
	}
}

// Keys are alternatives in the order written, and the place is part of the identity.
func TestKeysAreAlternatives(t *testing.T) {
	t.Parallel()
	e := newEdge(t, keyedSite("alternatives", "key {header.X-Key}\n key {header.X-User} {header.X-Tenant}\n key {http.tiered_limit.client_ip}"))
	ip := "203.0.113.1"
	for _, q := range []request{
		{}, // by address
		request{}.with("X-Key", ip),
		request{}.with("X-User", ip),
		request{}.with("X-Tenant", ip),
		request{}.with("X-User", ip).with("X-Tenant", ip),
		request{}.with("X-Key", "k"),
		request{}.from(clientB),
	} {
		assert.Equal(t, 1, e.served(2, q), q.header)
	}
	assert.Equal(t, 0, e.served(2, request{}.with("X-Key", "k").with("X-User", "new")), "the first that is not empty counts")
	assert.Equal(t, 0, e.served(2, request{}.with("X-Key", "").with("X-User", ip)), "an empty one is passed over")
	assert.Empty(t, e.logs.lines("warn", "every key"))
}

// Where every key is empty the tier is skipped: there is no bucket for nobody. It is counted, and told once.
func TestATierWithoutAnIdentityIsSkipped(t *testing.T) {
	t.Parallel()
	e := newEdge(t, `
:8080 {
	tiered_limit skipped {
		trusted_hops 0
		tier user 1/m
		tier tenant 1/m {
			key {header.X-Tenant}
		}
		tier ip 100/m
	}
	respond ok
}`)
	assert.Equal(t, 10, e.served(10, request{}))
	w := e.send(request{})
	assert.Equal(t, "ip", resource(w))
	assert.Equal(t, 11.0, e.metric(`skipped_total{stack="skipped",tier="user"}`))
	assert.Equal(t, 11.0, e.metric(`skipped_total{stack="skipped",tier="tenant"}`))
	assert.Equal(t, 0.0, e.metric(`skipped_total{stack="skipped",tier="ip"}`))
	warnings := e.logs.lines("warn", "every key of a tier is empty")
	require.Len(t, warnings, 2)
	assert.Equal(t, "user", warnings[0].str("tier"))
	assert.Contains(t, warnings[0].str("msg"), "basic_auth")
	for _, w := range warnings {
		assert.Contains(t, w.str("msg"), "callers can leave a key out on purpose")
		assert.Contains(t, w.str("msg"), "a further key line, such as {http.tiered_limit.client_ip}, catches them")
	}
	assert.Equal(t, "tenant", warnings[1].str("tier"))
	assert.NotContains(t, warnings[1].str("msg"), "basic_auth")
}

// A refusal in front of a tier leaves its key alone.
func TestKeysOfATierThatDoesNotConcernTheRequestAreNotRead(t *testing.T) {
	t.Parallel()
	e := newEdge(t, `
:8080 {
	tiered_limit unconcerned {
		tier tenant 1/m {
			key {header.X-Tenant}
			match path /tenants/*
		}
		tier global 9/m
	}
	respond ok
}`)
	assert.Equal(t, 5, e.served(5, request{}))
	assert.Equal(t, 0.0, e.metric(`skipped_total{stack="unconcerned",tier="tenant"}`))
	assert.Empty(t, e.logs.lines("warn", ""))
}

// A key without placeholders is one bucket for everybody, also as the last alternative.
func TestAStaticKeyIsOneBucket(t *testing.T) {
	t.Parallel()
	e := newEdge(t, keyedSite("static", "key all of us"))
	assert.Equal(t, 1, e.served(1, request{}))
	assert.Equal(t, 0, e.served(1, request{}.from(clientB)))
	assert.True(t, e.handlers()[0].tiers[0].spec.Single)

	e = newEdge(t, keyedSite("static-last", "key {header.X-Key}\n key anonymous"))
	assert.Equal(t, 1, e.served(2, request{}.with("X-Key", "anonymous")))
	assert.Equal(t, 1, e.served(1, request{}))
	assert.Equal(t, 0, e.served(1, request{}.from(clientB)))
	assert.False(t, e.handlers()[0].tiers[0].spec.Single)
}

// The names with default keys: ip is the client, user is who authenticated in front, global is everybody.
func TestDefaultKeys(t *testing.T) {
	t.Parallel()
	authenticates := script(t, func(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
		repl := r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
		repl.Set("http.auth.user.id", r.Header.Get("X-User"))
		return next.ServeHTTP(w, r)
	})
	site := `
:8080 {
	route {
		scripted %s
		tiered_limit default-%s {
			trusted_hops 0
			tier %[2]s 1/m
		}
		respond ok
	}
}`
	for _, c := range []struct {
		tier string
		same request // as user u from the first client
		want int
	}{
		{"ip", user("v"), 0}, {"ip", user("u").from(clientB), 1},
		{"user", user("u").from(clientB), 0}, {"user", user("v"), 1}, {"user", request{}, 1},
		{"global", user("v").from(clientB), 0}, {"global", request{}, 0},
	} {
		t.Run(c.tier, func(t *testing.T) {
			e := newEdge(t, fmt.Sprintf(site, authenticates, c.tier))
			require.Equal(t, 1, e.served(1, user("u")))
			assert.Equal(t, c.want, e.served(1, c.same))
		})
	}
}

// What a key sees: header fields in any case, cookies, queries, hosts, variables, and text around.
func TestKeysSeeWhatCaddySees(t *testing.T) {
	t.Parallel()
	for i, c := range []struct {
		key        string
		same, also request // two of one bucket
		other      request
	}{
		{"{header.x-user}", user("u"), user("u").from(clientB), user("v")},
		{"{http.request.header.X-USER}", user("u"), user("u"), user("v")},
		{"{header.X-User}", request{}.with("X-User", "a", "a"), request{}.with("X-User", "a"), request{}.with("X-User", "a,a")},
		{"u-{header.X-User}-{header.X-Role}", user("u"), user("u"), user("u").with("X-Role", "r")},
		{"{cookie.sid}", request{}.with("Cookie", "x=1; sid=s"), request{}.with("Cookie", "sid=s"), request{}.with("Cookie", "sid=t")},
		{"{query.key}", request{url: "http://h/?key=k"}, request{url: "http://h/x?a=b&key=k"}, request{url: "http://h/?key=l"}},
		{"{host}", request{url: "http://a.test/"}, request{url: "http://a.test:81/x"}, request{url: "http://b.test/"}},
		{"{path.0}", request{url: "http://h/t1/a"}, request{url: "http://h/t1/b"}, request{url: "http://h/t2/a"}},
		{"{method}", request{method: "GET"}, request{method: "GET"}, request{method: "PUT"}},
		{"{http.request.remote.host/24}", request{}.from("192.0.2.1"), request{}.from("192.0.2.99"), request{}.from("192.0.3.1")},
		{"{vars.plan}", user("u"), user("u"), user("v")},
		{"\\{{header.X-User}\\}", user("u"), user("u"), user("v")},
	} {
		e := newEdge(t, fmt.Sprintf(":8080 {\n vars plan {header.X-User}\n tiered_limit sees-%d {\n trusted_hops 0\n tier x 1/m {\n key %s\n }\n }\n respond ok\n}", i, c.key))
		assert.Equal(t, 1, e.served(1, c.same), c.key)
		assert.Equal(t, 0, e.served(1, c.also), c.key)
		assert.Equal(t, 1, e.served(1, c.other), c.key)
	}
}

// A placeholder that nothing has set counts as empty and is told once, by name.
func TestAnUnknownPlaceholderIsToldOnce(t *testing.T) {
	t.Parallel()
	e := newEdge(t, `
:8080 {
	tiered_limit unknown-part {
		trusted_hops 0
		tier x 1/m {
			key {my_plugin.id}
			key {http.tiered_limit.client_ip}
		}
	}
	respond ok
}`)
	assert.Equal(t, 1, e.served(5, request{}))
	warnings := e.logs.lines("warn", "is not known")
	require.Len(t, warnings, 1)
	assert.Equal(t, "{my_plugin.id}", warnings[0].str("placeholder"))
}

// A changed key definition or prefix starts its tier anew; a changed count does not.
func TestAChangedKeyStartsAnew(t *testing.T) {
	t.Parallel()
	site := func(count int, options, key string) string {
		return fmt.Sprintf(":8080 {\n tiered_limit changed-key {\n trusted_hops 0\n %s\n tier x %d/m {\n key %s\n }\n }\n respond ok\n}", options, count, key)
	}
	e := newEdge(t, site(1, "", "{http.tiered_limit.client_ip}"))
	assert.Equal(t, 1, e.served(2, request{}))
	e.reload(site(2, "", "{http.tiered_limit.client_ip}"))
	assert.Equal(t, 1, e.served(2, request{}), "the same key")
	e.reload(site(1, "ipv4_prefix 24", "{http.tiered_limit.client_ip}"))
	assert.Equal(t, 1, e.served(2, request{}), "another prefix")
	e.reload(site(1, "ipv4_prefix 24", "{http.tiered_limit.client_ip} x"))
	assert.Equal(t, 1, e.served(2, request{}), "another part")
	e.reload(site(1, "ipv4_prefix 24", "{http.tiered_limit.client_ip}x"))
	assert.Equal(t, 1, e.served(2, request{}), "another text")
	e.reload(site(1, "ipv4_prefix 24", "x {http.tiered_limit.client_ip}"))
	assert.Equal(t, 1, e.served(2, request{}), "another order")
	e.reload(site(1, "ipv4_prefix 24", "{http.tiered_limit.client_ip}"))
	assert.Equal(t, 0, e.served(2, request{}), "back to what is used up")
}
