package tieredlimit

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// tryHandlerJSON provisions a server with one handler given as JSON fields, in front of a handler that answers ok.
func tryHandlerJSON(t *testing.T, fields string) (*edge, error) {
	t.Helper()
	config := `{"apps":{"http":{"servers":{"srv0":{"listen":[":8080"],"routes":[{"handle":[{"handler":"tiered_limit",` + fields +
		`},{"handler":"static_response","body":"ok"}]}]}}}}}`
	e := &edge{t: t, clock: newTestClock(), logs: newLogSink(t)}
	if err := e.load([]byte(config)); err != nil {
		return nil, err
	}
	t.Cleanup(e.close)
	return e, nil
}

// JSON is refused for the same mistakes as a Caddyfile, and for those that only JSON can make.
func TestJSONMistakes(t *testing.T) {
	t.Parallel()
	const tier = `"tiers":[{"name":"ip","limits":[{"count":5,"window":"1m"}]}]`
	limits := func(list string) string { return `"tiers":[{"name":"ip","limits":` + list + `}]` }
	tiers := func(inner string) string {
		return `"tiers":[{"name":"ip","limits":[{"count":5,"window":"1m"}],` + inner + `}]`
	}
	for _, c := range []struct{ fields, want string }{
		// Stacks.
		{`"name":"a"`, `the stack has no tier`},
		{`"tiers":null`, `the stack has no tier`},
		{`"tiers":[]`, `the stack has no tier`},
		{`"tiers":{}`, `cannot unmarshal object into`},
		{`"tiers":[null]`, `tier 1 is null`},
		{`"tiers":[{"name":"ip","limits":[]},null]`, `tier 2 is null`},
		{`"tiers":[{"name":"ip","limits":[]},{"name":"ip","limits":[]}]`, `tier "ip" is defined twice`},
		{`"name":"A",` + tier, `stack name "A" has characters other than a-z, 0-9, _ and -`},
		{`"name":"` + strings.Repeat("a", 65) + `",` + tier, `is not 1 to 64 characters long`},
		{`"name":"a\u0000",` + tier, `stack name "a\x00" has characters other than a-z, 0-9, _ and -`},
		{`"name":5,` + tier, `cannot unmarshal number into Go struct field Handler.name`},
		{`"nmae":"a",` + tier, `unknown field "nmae"`},
		// Who the client is.
		{`"trusted_hops":-1,` + tier, `trusted_hops -1 is not between 0 and 64`},
		{`"trusted_hops":65,` + tier, `trusted_hops 65 is not between 0 and 64`},
		{`"trusted_hops":1.5,` + tier, `cannot unmarshal number 1.5 into Go struct field Handler.trusted_hops`},
		{`"trusted_hops":"1",` + tier, `cannot unmarshal string into Go struct field Handler.trusted_hops`},
		{`"client_ip_header":"X-Real-IP",` + tier, `client_ip_header "X-Real-IP" needs trusted_hops`},
		{`"trusted_hops":1,"client_ip_header":"X Real",` + tier, `client_ip_header "X Real" is not a header field name`},
		{`"ipv4_prefix":0,` + tier, `ipv4_prefix 0 is not between 1 and 32`},
		{`"ipv4_prefix":33,` + tier, `ipv4_prefix 33 is not between 1 and 32`},
		{`"ipv6_prefix":0,` + tier, `ipv6_prefix 0 is not between 1 and 128`},
		{`"ipv6_prefix":-64,` + tier, `ipv6_prefix -64 is not between 1 and 128`},
		{`"exempt":["health"],` + tier, `exempt "health" is not a path: it must begin with / or *`},
		{`"exempt":[""],` + tier, `exempt "" is not a path: it must begin with / or *`},
		{`"exempt":["/a","/a"],` + tier, `exempt names "/a" twice`},
		{`"nat64_prefix":["2001:db8::/33"],` + tier, `nat64_prefix: "2001:db8::/33": the prefix of a translator has 32, 40, 48, 56, 64 or 96 bits, not 33`},
		{`"nat64_prefix":["2001:db8::/32","2001:db8::/32"],` + tier, `nat64_prefix names "2001:db8::/32" twice`},
		{`"exempt_clients":["10.0.0.0/33"],` + tier, `exempt_clients: "10.0.0.0/33" is neither an IP address nor a CIDR range`},
		{`"exempt_clients":["::1","::1"],` + tier, `exempt_clients names "::1" twice`},
		// How it charges and answers.
		{`"charge":"always",` + tier, `charge "always" is not one of served, checked`},
		{`"preflight":"no",` + tier, `preflight "no" is not one of exempt, count`},
		{`"body":"html",` + tier, `body "html" is not one of problem, graphql, grpc, text, none`},
		{`"headers":["draft-7"],` + tier, `headers "draft-7" is not one of x-ratelimit, draft-11, none`},
		{`"headers":["none","draft-11"],` + tier, `headers none cannot stand beside other sets`},
		{`"headers":["draft-11","draft-11"],` + tier, `headers names "draft-11" twice`},
		{`"headers":"none",` + tier, `cannot unmarshal string into Go struct field Handler.headers`},
		{`"jitter":-1,` + tier, `jitter -1 is not between 0 and 100 percent`},
		{`"jitter":101,` + tier, `jitter 101 is not between 0 and 100 percent`},
		{`"cors":{},` + tier, `cors has no origin`},
		{`"cors":{"origins":[]},` + tier, `cors has no origin`},
		{`"cors":{"origins":["*"],"credentials":true},` + tier, `cors * cannot have credentials`},
		{`"cors":{"origins":["*","https://a.test"]},` + tier, `cors * cannot stand beside other origins`},
		{`"cors":{"origins":["https://a.test/"]},` + tier, `cors origin "https://a.test/" is not of the form`},
		{`"cors":{"origins":["https://a.test"],"x":1},` + tier, `unknown field "x"`},
		{`"dry_run":1,` + tier, `cannot unmarshal number into Go struct field Handler.dry_run`},
		{`"store":{"backend":"nope"},` + tier, `http.tiered_limit.stores.nope`},
		{`"store":{},` + tier, `backend`},
		{`"store":{"backend":"memory","max_keys":0},` + tier, `max_keys 0 is not a whole number from 1 to 2147483647`},
		{`"store":{"backend":"memory","size":1},` + tier, `unknown field "size"`},
		// Tiers.
		{`"tiers":[{"limits":[{"count":5,"window":"1m"}]}]`, `tier name "" is not 1 to 64 characters long`},
		{`"tiers":[{"name":"a b","limits":[]}]`, `tier name "a b" has characters other than a-z, 0-9, _ and -`},
		{`"tiers":[{"name":"api","limits":[{"count":5,"window":"1m"}]}]`, `tier "api" has no key: write key {http.tiered_limit.client_ip} to limit each client, or another key; only tiers named ip, user and global`},
		{`"tiers":[{"name":"ip"}]`, `tier "ip" has no limits; an empty list switches a tier off`},
		{limits(`null`), `tier "ip" has no limits; an empty list switches a tier off`},
		{tiers(`"charge":"never"`), `tier "ip": charge "never" is not one of served, checked`},
		{tiers(`"keys":[null]`), `tier "ip": key 1 has no parts`},
		{tiers(`"keys":[["a"],[]]`), `tier "ip": key 2 has no parts`},
		{tiers(`"keys":[["a",""]]`), `tier "ip": key 1 has an empty part`},
		{tiers(`"keys":["a"]`), `cannot unmarshal string into`},
		{tiers(`"keys":[["{a"]]`), `tier "ip": key part "{a": a placeholder is not closed`},
		{tiers(`"match":[{"nope":{}}]`), `unknown module: http.matchers.nope`},
		{tiers(`"match":{"path":["/a"]}`), `cannot unmarshal object into`},
		{tiers(`"match":[{"expression":"((("}]`), `tier "ip": match:`},
		{tiers(`"limit":5`), `unknown field "limit"`},
		// Limits.
		{limits(`[null]`), `limit null has no count`},
		{limits(`[{}]`), `limit {} has no count`},
		{limits(`[{"window":"1m"}]`), `limit {"window":"1m"} has no count`},
		{limits(`[{"count":null,"window":"1m"}]`), `limit {"count":null,"window":"1m"} has no count`},
		{limits(`[{"count":5}]`), `limit {"count":5} has no window`},
		{limits(`[{"count":0}]`), `limit {"count":0} has no window`},
		{limits(`[{"count":5,"window":null}]`), `limit {"count":5,"window":null} has no window`},
		{limits(`[{"count":5,"window":"1m","x":1}]`), `unknown field "x"`},
		{limits(`[{"count":5.5,"window":"1m"}]`), `cannot unmarshal number 5.5 into Go struct field .count`},
		{limits(`[{"count":"5","window":"1m"}]`), `cannot unmarshal string into Go struct field .count`},
		{limits(`[{"count":-1,"window":"1m"}]`), `tier "ip": limit count -1 is not between 0 and 2147483647`},
		{limits(`[{"count":2147483648,"window":"1m"}]`), `tier "ip": limit count 2147483648 is not between 0 and 2147483647`},
		{limits(`[{"count":99999999999999999999,"window":"1m"}]`), `cannot unmarshal number 100000000000000000000 into`},
		{limits(`[{"count":5,"window":0}]`), `tier "ip": limit window 0s is shorter than 1ms`},
		{limits(`[{"count":0,"window":0}]`), `tier "ip": limit window 0s is shorter than 1ms`},
		{limits(`[{"count":5,"window":-60000000000}]`), `tier "ip": limit window -1m0s is shorter than 1ms`},
		{limits(`[{"count":5,"window":1500000}]`), `tier "ip": limit window 1.5ms is not a whole number of milliseconds`},
		{limits(`[{"count":5,"window":"m"}]`), `invalid duration "m"`},
		{limits(`[{"count":5,"window":1.5}]`), `limit {"count":5,"window":1.5}: `},
		{limits(`[{"count":5,"window":"1m"},{"count":6,"window":60000000000}]`), `tier "ip" has two limits with a window of 1m0s`},
	} {
		_, err := tryHandlerJSON(t, c.fields)
		assert.ErrorContains(t, err, c.want, "fields: %s", c.fields)
		assert.ErrorContains(t, err, "server srv0: setting up route handlers: route 0: loading handler modules: position 0",
			"fields: %s", c.fields)
	}
}

// Explicit zeros, nulls and empty lists mean what leaving the field out means, where that is no danger.
func TestJSONZeros(t *testing.T) {
	t.Parallel()
	for i, fields := range []string{
		`"trusted_hops":0`,
		`"trusted_hops":0,"client_ip_header":"","ipv4_prefix":null,"ipv6_prefix":null,"charge":"","exempt":[],"exempt_clients":null,` +
			`"preflight":"","headers":[],"body":"","cors":null,"jitter":0,"log_keys":false,"dry_run":false,"store":null`,
		`"trusted_hops":0,"headers":null,"ipv4_prefix":32,"ipv6_prefix":64,"store":{"backend":"memory"}`,
	} {
		e, err := tryHandlerJSON(t, fmt.Sprintf(`"name":"json-zeros-%d",`, i)+fields+
			`,"tiers":[{"name":"ip","keys":[],"match":[],"charge":"","limits":[{"count":2,"window":60000000000}]}]`)
		require.NoError(t, err, "fields: %s", fields)
		assert.Equal(t, []int{200, 200, 429}, e.statuses(3, request{}), "fields: %s", fields)
	}
}

// A count of 0 in any of its limits, or no limit, switches a tier off; all tiers off is no limiting and no warning,
// whether or not it is stated who the client is.
func TestOff(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		block string
		want  int // of 5 requests
	}{
		{"tier ip off", 5},
		{"tier ip 0/m", 5},
		{"tier ip 0/m 1/h", 5},
		{"tier ip 1/m 0/h", 5},
		{"trusted_hops 0\ntier ip off", 5},
		{"tier ip off\ntier user 0/m\ntier global off", 5},
		{"exempt_clients 192.0.2.1\ntier ip off", 5},
		{"tier ip off\ntier global 3/m", 3},
		{"tier global 3/m 4/h\ntier ip 5/s 0/m", 3},
	} {
		e := newEdge(t, fmt.Sprintf("http://f3.test:8080 {\n\ttiered_limit {\n%s\n\t}\n\trespond ok\n}\n", c.block))
		assert.Equal(t, c.want, e.served(5, request{url: "http://f3.test/"}), "block: %s", c.block)
		assert.Empty(t, e.logs.lines("warn", ""), "block: %s", c.block)
	}
}

// The number of hops from a variable. An unset one leaves the stack inert, with a warning.
func TestHopsFromVariable(t *testing.T) {
	for _, c := range []struct {
		value  string
		set    bool
		listen string
		served int // of 6 requests with two chains, limit 1
		warns  int
	}{
		{"", false, ":8081", 6, 1},
		{"", true, ":8082", 6, 1},
		{"0", true, ":8083", 1, 0}, // the peer
		{"2", true, ":8084", 2, 0}, // the second entry from the right
	} {
		if c.set {
			t.Setenv("TL_TRUST_PROXY", c.value)
		}
		e := newEdge(t, c.listen+" {\n\ttiered_limit {\n\t\ttrusted_hops {$TL_TRUST_PROXY}\n\t\ttier ip 1/m\n\t}\n\trespond ok\n}\n")
		assert.Len(t, e.logs.lines("error", "DISABLED"), c.warns, "value %q", c.value)
		served := 0
		for i := range 6 {
			client := fmt.Sprintf("spoof, 198.51.100.%d, 192.0.2.9", i%2)
			served += e.served(1, request{header: http.Header{"X-Forwarded-For": {client}}})
		}
		assert.Equal(t, c.served, served, "value %q", c.value)
	}
	t.Setenv("TL_TRUST_PROXY", "yes")
	_, err := tryAdapt(site("trusted_hops {$TL_TRUST_PROXY}\ntier ip 1/m"))
	assert.ErrorContains(t, err, `trusted_hops "yes" is not a whole number from 0 to 64, at Caddyfile:4`)
}
