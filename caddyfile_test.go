package tieredlimit

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// handlersIn lists the tiered_limit handlers of a config, as JSON with its keys in order, in the order written.
func handlersIn(t *testing.T, config []byte) []string {
	t.Helper()
	var tree any
	require.NoError(t, json.Unmarshal(config, &tree))
	var found []string
	var walk func(any)
	walk = func(node any) {
		switch node := node.(type) {
		case []any:
			for _, child := range node {
				walk(child)
			}
		case map[string]any:
			if node["handler"] == "tiered_limit" {
				delete(node, "handler")
				text, err := json.Marshal(node)
				require.NoError(t, err)
				found = append(found, string(text))
				return
			}
			for _, child := range node {
				walk(child)
			}
		}
	}
	walk(tree)
	return found
}

// site puts the lines of a tiered_limit block into a Caddyfile. They begin at line 4.
func site(block string) string {
	return ":8080 {\n\t@post method POST\n\ttiered_limit {\n" + block + "\n\t}\n\trespond ok\n}\n"
}

// siteJSON is the JSON of the handler that a block adapts to.
func siteJSON(t *testing.T, block string) string {
	t.Helper()
	list := handlersIn(t, adapt(t, site(block)))
	require.Len(t, list, 1)
	return list[0]
}

const oneTier = `"tiers":[{"limits":[{"count":5,"window":1000000000}],"name":"ip"}]`

// Every subdirective of the block.
func TestCaddyfileSubdirectives(t *testing.T) {
	t.Parallel()
	for block, want := range map[string]string{
		"":                                `{` + oneTier + `}`,
		"trusted_hops":                    `{` + oneTier + `}`,
		`trusted_hops ""`:                 `{` + oneTier + `}`,
		"trusted_hops 0":                  `{` + oneTier + `,"trusted_hops":0}`,
		"trusted_hops 64":                 `{` + oneTier + `,"trusted_hops":64}`,
		"trusted_hops 007":                `{` + oneTier + `,"trusted_hops":7}`,
		"trusted_hops 1 CF-Connecting-IP": `{"client_ip_header":"CF-Connecting-IP",` + oneTier + `,"trusted_hops":1}`,
		"trusted_hops 2 Forwarded":        `{"client_ip_header":"Forwarded",` + oneTier + `,"trusted_hops":2}`,
		"ipv4_prefix 24":                  `{"ipv4_prefix":24,` + oneTier + `}`,
		"ipv6_prefix 128":                 `{"ipv6_prefix":128,` + oneTier + `}`,
		"charge checked":                  `{"charge":"checked",` + oneTier + `}`,
		"charge served":                   `{"charge":"served",` + oneTier + `}`,
		"exempt /health /metrics/* *.png": `{"exempt":["/health","/metrics/*","*.png"],` + oneTier + `}`,
		"nat64_prefix 2001:db8:64::/96 64:ff9b:1::/48": `{"nat64_prefix":["2001:db8:64::/96","64:ff9b:1::/48"],` + oneTier + `}`,
		"exempt_clients 192.0.2.1 2001:db8::/32": `{"exempt_clients":["192.0.2.1","2001:db8::/32"],` +
			oneTier + `}`,
		"preflight count":                      `{"preflight":"count",` + oneTier + `}`,
		"preflight exempt":                     `{"preflight":"exempt",` + oneTier + `}`,
		"headers draft-11 x-ratelimit":         `{"headers":["draft-11","x-ratelimit"],` + oneTier + `}`,
		"headers none":                         `{"headers":["none"],` + oneTier + `}`,
		"body problem":                         `{"body":"problem",` + oneTier + `}`,
		"body graphql":                         `{"body":"graphql",` + oneTier + `}`,
		"body text":                            `{"body":"text",` + oneTier + `}`,
		"body none":                            `{"body":"none",` + oneTier + `}`,
		"cors *":                               `{"cors":{"origins":["*"]},` + oneTier + `}`,
		"cors https://a.test http://b.test:81": `{"cors":{"origins":["https://a.test","http://b.test:81"]},` + oneTier + `}`,
		"cors https://a.test {\n}":             `{"cors":{"origins":["https://a.test"]},` + oneTier + `}`,
		"cors https://a.test {\ncredentials\n}": `{"cors":{"credentials":true,"origins":["https://a.test"]},` +
			oneTier + `}`,
		"jitter 0":                          `{` + oneTier + `}`,
		"jitter 100":                        `{"jitter":100,` + oneTier + `}`,
		"log_keys":                          `{"log_keys":true,` + oneTier + `}`,
		"dry_run":                           `{"dry_run":true,` + oneTier + `}`,
		"store memory":                      `{"store":{"backend":"memory"},` + oneTier + `}`,
		"store memory {\n}":                 `{"store":{"backend":"memory"},` + oneTier + `}`,
		"store memory {\nmax_keys 5000\n}":  `{"store":{"backend":"memory","max_keys":5000},` + oneTier + `}`,
		"log_keys\ndry_run\ncharge checked": `{"charge":"checked","dry_run":true,"log_keys":true,` + oneTier + `}`,
	} {
		assert.Equal(t, want, siteJSON(t, block+"\ntier ip 5/s"), "before the tier: %s", block)
		assert.Equal(t, want, siteJSON(t, "tier ip 5/s\n"+block), "behind the tier: %s", block)
	}
}

// Every line of a tier, and every form of match.
func TestCaddyfileTiers(t *testing.T) {
	t.Parallel()
	tier := func(inner string) string {
		return `{"tiers":[{` + strings.TrimPrefix(inner+`,"limits":[{"count":5,"window":1000000000}],"name":"ip"}]}`, ",")
	}
	for block, want := range map[string]string{
		"tier ip 5/s {\n}":                              tier(``),
		"tier ip 5/s {\ncharge checked\n}":              `{"tiers":[{"charge":"checked","limits":[{"count":5,"window":1000000000}],"name":"ip"}]}`,
		"tier ip 5/s {\ndry_run\n}":                     `{"tiers":[{"dry_run":true,"limits":[{"count":5,"window":1000000000}],"name":"ip"}]}`,
		"tier ip 5/s {\nkey a b\n}":                     tier(`"keys":[["a","b"]]`),
		"tier ip 5/s {\nkey {remote_host}\n}":           tier(`"keys":[["{http.request.remote.host}"]]`),
		"tier ip 5/s {\nkey {header.X-A}:{cookie.b}\n}": tier(`"keys":[["{http.request.header.X-A}:{http.request.cookie.b}"]]`),
		"tier ip 5/s {\nkey {http.auth.user.id}\nkey a {http.tiered_limit.client_ip}\n}": tier(
			`"keys":[["{http.auth.user.id}"],["a","{http.tiered_limit.client_ip}"]]`),
		"tier ip 5/s {\nmatch *\n}":                          tier(``),
		"tier ip 5/s {\nmatch /a/*\n}":                       `{"tiers":[{"limits":[{"count":5,"window":1000000000}],"match":[{"path":["/a/*"]}],"name":"ip"}]}`,
		"tier ip 5/s {\nmatch \"/a b\"\n}":                   `{"tiers":[{"limits":[{"count":5,"window":1000000000}],"match":[{"path":["/a b"]}],"name":"ip"}]}`,
		"tier ip 5/s {\nmatch @post\n}":                      `{"tiers":[{"limits":[{"count":5,"window":1000000000}],"match":[{"method":["POST"]}],"name":"ip"}]}`,
		"tier ip 5/s {\nmatch method POST PUT\n}":            `{"tiers":[{"limits":[{"count":5,"window":1000000000}],"match":[{"method":["POST","PUT"]}],"name":"ip"}]}`,
		"tier ip 5/s {\nmatch not path /a\n}":                `{"tiers":[{"limits":[{"count":5,"window":1000000000}],"match":[{"not":[{"path":["/a"]}]}],"name":"ip"}]}`,
		"tier ip 5/s {\nmatch `path('/a')`\n}":               `{"tiers":[{"limits":[{"count":5,"window":1000000000}],"match":[{"expression":"path('/a')"}],"name":"ip"}]}`,
		"tier ip 5/s {\nmatch {\nmethod POST\npath /a\n}\n}": `{"tiers":[{"limits":[{"count":5,"window":1000000000}],"match":[{"method":["POST"],"path":["/a"]}],"name":"ip"}]}`,
		"tier ip 5/s {\nmatch not {\nmethod POST\npath /a\n}\n}": `{"tiers":[{"limits":[{"count":5,"window":1000000000}],` +
			`"match":[{"not":[{"method":["POST"],"path":["/a"]}]}],"name":"ip"}]}`,
		"tier ip 5/s {\nmatch {\nnot {\nmethod POST\npath /a\n}\n}\n}": `{"tiers":[{"limits":[{"count":5,"window":1000000000}],` +
			`"match":[{"not":[{"method":["POST"],"path":["/a"]}]}],"name":"ip"}]}`,
		"tier ip 5/s {\nmatch {\nheader A x\nheader B y\n}\ndry_run\n}": `{"tiers":[{"dry_run":true,` +
			`"limits":[{"count":5,"window":1000000000}],"match":[{"header":{"A":["x"],"B":["y"]}}],"name":"ip"}]}`,
		"tier ip off":          `{"tiers":[{"limits":[],"name":"ip"}]}`,
		"tier ip 0/s":          `{"tiers":[{"limits":[{"count":0,"window":1000000000}],"name":"ip"}]}`,
		"tier global 1/s 00/m": `{"tiers":[{"limits":[{"count":1,"window":1000000000},{"count":0,"window":60000000000}],"name":"global"}]}`,
		"tier user 1/s\ntier ip 2/s\ntier global 3/s": `{"tiers":[{"limits":[{"count":1,"window":1000000000}],"name":"user"},` +
			`{"limits":[{"count":2,"window":1000000000}],"name":"ip"},{"limits":[{"count":3,"window":1000000000}],"name":"global"}]}`,
		"tier ip 1/s \\\n2/m": `{"tiers":[{"limits":[{"count":1,"window":1000000000},{"count":2,"window":60000000000}],"name":"ip"}]}`,
		"tier abc_-19 1/s {\nkey x\n}": `{"tiers":[{"keys":[["x"]],"limits":[{"count":1,"window":1000000000}],` +
			`"name":"abc_-19"}]}`,
	} {
		assert.Equal(t, want, siteJSON(t, block), "block: %s", block)
	}
}

// The name and the matcher of the directive, and where it stands without an order.
func TestCaddyfileDirectiveLine(t *testing.T) {
	t.Parallel()
	for line, want := range map[string]string{
		"tiered_limit":            `{` + oneTier + `}`,
		"tiered_limit api":        `{"name":"api",` + oneTier + `}`,
		"tiered_limit * api":      `{"name":"api",` + oneTier + `}`,
		"tiered_limit /v1/* api":  `{"name":"api",` + oneTier + `}`,
		"tiered_limit @post a-_9": `{"name":"a-_9",` + oneTier + `}`,
		"tiered_limit @post":      `{` + oneTier + `}`,
	} {
		config := adapt(t, ":8080 {\n\t@post method POST\n\t"+line+" {\n\t\ttier ip 5/s\n\t}\n\trespond ok\n}\n")
		assert.Equal(t, []string{want}, handlersIn(t, config), "line: %s", line)
	}
	config := string(adapt(t, ":8080 {\n\trespond ok\n\tbasic_auth {\n\t\tu $2a$14$Zkx19XLiW6VYouLHR5NmfOFU0z2GTNmpkT/5qqR7hx4IjWJPDhjvG\n"+
		"\t}\n\ttiered_limit {\n\t\ttier ip 5/s\n\t}\n\theader X y\n}\n"))
	at := func(handler string) int { return strings.Index(config, `"handler":"`+handler+`"`) }
	assert.True(t, 0 < at("headers") && at("headers") < at("tiered_limit") && at("tiered_limit") < at("authentication") &&
		at("authentication") < at("static_response"), "order of the handlers in %s", config)
}

// Every mistake in a block is refused with its place, what is wrong, and what was expected.
func TestCaddyfileMistakes(t *testing.T) {
	t.Parallel()
	const tier = "tier ip 5/s\n"
	long := strings.Repeat("a", 65)
	expected := "; expected trusted_hops, ipv4_prefix, ipv6_prefix, nat64_prefix, tier, charge, exempt, exempt_clients, preflight, headers, " +
		"body, cors, jitter, log_keys, dry_run, events or store"
	const empty = "; if it comes from an environment variable, that variable is empty or not set"
	for _, c := range []struct {
		block string
		line  int
		want  string
	}{
		// The block.
		{"", 5, `the stack has no tier; write at least one, such as: tier ip 600/m`},
		{"bogus", 4, `unknown subdirective "bogus" of tiered_limit` + expected},
		{tier + "TIER ip 5/s", 5, `unknown subdirective "TIER" of tiered_limit` + expected},
		{tier + "match method POST", 5, `unknown subdirective "match" of tiered_limit: match belongs into a tier`},
		{tier + "key a", 5, `unknown subdirective "key" of tiered_limit: a key belongs into a tier`},
		{tier + "trusted-hops 1", 5, `unknown subdirective "trusted-hops" of tiered_limit` + expected},
		{tier + "\"\"", 5, `unknown subdirective "" of tiered_limit` + expected},
		// trusted_hops.
		{"trusted_hops yes", 4, `trusted_hops "yes" is not a whole number from 0 to 64`},
		{"trusted_hops -1", 4, `trusted_hops "-1" is not a whole number from 0 to 64`},
		{"trusted_hops +1", 4, `trusted_hops "+1" is not a whole number from 0 to 64`},
		{"trusted_hops 1.5", 4, `trusted_hops "1.5" is not a whole number from 0 to 64`},
		{"trusted_hops 1e0", 4, `trusted_hops "1e0" is not a whole number from 0 to 64`},
		{"trusted_hops 0x1", 4, `trusted_hops "0x1" is not a whole number from 0 to 64`},
		{"trusted_hops \" 1\"", 4, `trusted_hops " 1" is not a whole number from 0 to 64`},
		{"trusted_hops ١", 4, `trusted_hops "١" is not a whole number from 0 to 64`},
		{"trusted_hops 65", 4, `trusted_hops "65" is not a whole number from 0 to 64`},
		{"trusted_hops 99999999999999999999", 4, `trusted_hops "99999999999999999999" is not a whole number from 0 to 64`},
		{"trusted_hops X-Real-IP", 4, `trusted_hops "X-Real-IP" is not a whole number from 0 to 64`},
		{`trusted_hops "" X-Real-IP`, 4, `trusted_hops has a header "X-Real-IP" but no count`},
		{"trusted_hops 1 a b", 4, `unexpected "b": trusted_hops takes a count and a header`},
		{`trusted_hops 1 "a b"`, 4, `client_ip_header "a b" is not a header field name`},
		{"trusted_hops 1 {\n}", 4, `trusted_hops takes no block`},
		{"trusted_hops {\nx\n}", 4, `trusted_hops takes no block`},
		{"trusted_hops 1\ntrusted_hops 1", 5, `trusted_hops is given twice`},
		// The prefixes.
		{"ipv4_prefix", 4, `ipv4_prefix takes one number of bits`},
		{"ipv4_prefix 0", 4, `ipv4_prefix "0" is not a whole number from 1 to 32`},
		{"ipv4_prefix 33", 4, `ipv4_prefix "33" is not a whole number from 1 to 32`},
		{"ipv4_prefix /24", 4, `ipv4_prefix "/24" is not a whole number from 1 to 32`},
		{"ipv4_prefix +24", 4, `ipv4_prefix "+24" is not a whole number from 1 to 32`},
		{"ipv4_prefix 24 64", 4, `unexpected "64": ipv4_prefix takes one number of bits`},
		{"ipv4_prefix 24 {\n}", 4, `ipv4_prefix takes no block`},
		{"ipv6_prefix 129", 4, `ipv6_prefix "129" is not a whole number from 1 to 128`},
		{`ipv6_prefix ""`, 4, `ipv6_prefix "" is not a whole number from 1 to 128`},
		{"ipv6_prefix 64\n\nipv6_prefix 64", 6, `ipv6_prefix is given twice`},
		// Words and flags.
		{"charge", 4, `charge takes one of served, checked`},
		{"charge always", 4, `charge "always" is not one of served, checked`},
		{"charge Served", 4, `charge "Served" is not one of served, checked`},
		{`charge ""`, 4, `charge "" is not one of served, checked`},
		{"charge served checked", 4, `unexpected "checked": charge takes one of served, checked`},
		{"charge served {\n}", 4, `charge takes no block`},
		{"charge served\ncharge served", 5, `charge is given twice`},
		{"preflight no", 4, `preflight "no" is not one of exempt, count`},
		{"preflight", 4, `preflight takes one of exempt, count`},
		{"preflight count\npreflight count", 5, `preflight is given twice`},
		{"body html", 4, `body "html" is not one of problem, graphql, grpc, text, none`},
		{"body none text", 4, `unexpected "text": body takes one of problem, graphql, grpc, text, none`},
		{"body none {\nx\n}", 4, `body takes no block`},
		{"log_keys yes", 4, `unexpected "yes": log_keys takes no argument`},
		{"log_keys {\n}", 4, `log_keys takes no block`},
		{"log_keys\nlog_keys", 5, `log_keys is given twice`},
		{"dry_run off", 4, `unexpected "off": dry_run takes no argument but header`},
		{"dry_run {\nx\n}", 4, `dry_run takes no block`},
		{"jitter", 4, `jitter takes one percentage`},
		{"jitter 101", 4, `jitter "101" is not a whole number of percent from 0 to 100`},
		{"jitter 5%", 4, `jitter "5%" is not a whole number of percent from 0 to 100`},
		{"jitter -5", 4, `jitter "-5" is not a whole number of percent from 0 to 100`},
		{"jitter 5 6", 4, `unexpected "6": jitter takes one percentage`},
		{"jitter 5 {\n}", 4, `jitter takes no block`},
		{"jitter 5\njitter 5", 5, `jitter is given twice`},
		// Lists.
		{"exempt", 4, `exempt needs at least one argument`},
		{"exempt health", 4, `exempt "health" is not a path: it must begin with / or *`},
		{`exempt ""`, 4, `exempt "" is not a path: it must begin with / or *`},
		{"exempt /a /a", 4, `exempt names "/a" twice`},
		{"exempt /a {\n}", 4, `exempt takes no block`},
		{"exempt /a\nexempt /b", 5, `exempt is given twice`},
		{"nat64_prefix", 4, `nat64_prefix needs at least one argument`},
		{`nat64_prefix ""`, 4, `nat64_prefix: "" is not an IPv6 prefix, such as 2001:db8:64::/96`},
		{"nat64_prefix 2001:db8::", 4, `nat64_prefix: "2001:db8::" is not an IPv6 prefix, such as 2001:db8:64::/96`},
		{"nat64_prefix 10.0.0.0/8", 4, `nat64_prefix: "10.0.0.0/8": the prefix of a translator is one of IPv6`},
		{"nat64_prefix ::ffff:0:0/96", 4, `nat64_prefix: "::ffff:0:0/96": the prefix of a translator is one of IPv6`},
		{"nat64_prefix 2001:db8:64::/97", 4, `nat64_prefix: "2001:db8:64::/97": the prefix of a translator has 32, 40, 48, 56, 64 or 96 bits, not 97`},
		{"nat64_prefix 2001:db8:64::1/96", 4, `nat64_prefix: "2001:db8:64::1/96": there are bits set behind the first 96`},
		{"nat64_prefix 2001:db8:64:0:ff00::/96", 4, `nat64_prefix: "2001:db8:64:0:ff00::/96": the bits 64 to 71 are not zero, as they are in every prefix of a translator`},
		{"nat64_prefix ::/96", 4, `nat64_prefix: "::/96": the prefix holds the addresses :: and ::1, which stand for no other`},
		{"nat64_prefix 2001:db8::/32 2001:db8::/32", 4, `nat64_prefix names "2001:db8::/32" twice`},
		{"nat64_prefix 2001:db8::/32 {\n}", 4, `nat64_prefix takes no block`},
		{"nat64_prefix 2001:db8::/32\nnat64_prefix 2001:db8::/32", 5, `nat64_prefix is given twice`},
		{"exempt_clients", 4, `exempt_clients needs at least one argument`},
		{"exempt_clients 10.0.0.0/33", 4, `exempt_clients: "10.0.0.0/33" is neither an IP address nor a CIDR range nor private_ranges`},
		{"exempt_clients 10.0.0.1 10.0.0.1", 4, `exempt_clients names "10.0.0.1" twice`},
		{"exempt_clients 10.0.0.1 {\n}", 4, `exempt_clients takes no block`},
		{"headers", 4, `headers needs at least one argument`},
		{"headers draft-7", 4, `headers "draft-7" is not one of x-ratelimit, draft-11, none`},
		{"headers none draft-11", 4, `headers none cannot stand beside other sets`},
		{"headers draft-11 draft-11", 4, `headers names "draft-11" twice`},
		{"headers none {\n}", 4, `headers takes no block`},
		{"cors", 4, `cors needs at least one argument`},
		{"cors {\ncredentials\n}", 4, `cors needs at least one argument`},
		{"cors a.test", 4, `cors origin "a.test" is not of the form scheme://host[:port], in lower case and without a path`},
		{"cors https://a.test/", 4, `cors origin "https://a.test/" is not of the form scheme://host[:port], in lower case and without a path`},
		{"cors https://A.test", 4, `cors origin "https://A.test" is not of the form scheme://host[:port], in lower case and without a path`},
		{"cors * https://a.test", 4, `cors * cannot stand beside other origins`},
		{"cors https://a.test https://a.test", 4, `cors names "https://a.test" twice`},
		{"cors * {\ncredentials\n}", 6, `cors * cannot have credentials: browsers refuse it; list the origins`},
		{"cors https://a.test {\nx\n}", 5, `unknown word "x" in cors; expected credentials`},
		{"cors https://a.test {\ncredentials yes\n}", 5, `unexpected "yes": credentials takes no argument`},
		{"cors https://a.test {\ncredentials\ncredentials\n}", 6, `credentials is given twice`},
		{"cors https://a.test {\ncredentials {\n}\n}", 5, `credentials takes no block`},
		// The store.
		{"store", 4, `store needs a backend, such as memory`},
		{"store {\n}", 4, `store needs a backend, such as memory`},
		{"store nope", 4, `there is no store "nope" in this Caddy; there are away, failing_test, memory, redis`},
		{"store redis {\naddress localhost:1\n}", 6, `store "redis" is shared by instances, so the stack needs a name, which says that its counters are the same everywhere: tiered_limit api { ... }`},
		{"store memory 5", 4, `store "memory": unexpected argument "5": store memory takes a block only`},
		{"store memory\nstore memory", 5, `store is given twice`},
		{"store memory {\nmax_keys 0\n}", 5, `store "memory": max_keys 0 is not a whole number from 1 to 2147483647`},
		{"store memory {\nsize 5\n}", 5, `store "memory": unknown option "size" of store memory: expected max_keys`},
		// A tier's line.
		{"tier", 4, `tier needs a name and a limit, such as: tier ip 600/m`},
		{"tier {\n}", 4, `tier needs a name and a limit, such as: tier ip 600/m`},
		{"tier ip", 4, `tier "ip" needs at least one limit, such as 600/m, or off`},
		{"tier ip {\n}", 4, `tier "ip" needs at least one limit, such as 600/m, or off`},
		{"tier 5/s", 4, `tier name "5/s" has characters other than a-z, 0-9, _ and -`},
		{`tier "" 5/s`, 4, `tier name "" is not 1 to 64 characters long`},
		{"tier IP 5/s", 4, `tier name "IP" has characters other than a-z, 0-9, _ and -`},
		{"tier ìp 5/s", 4, `tier name "ìp" has characters other than a-z, 0-9, _ and -`},
		{"tier \"i\x01p\" 5/s", 4, `tier name "i\x01p" has characters other than a-z, 0-9, _ and -`},
		{"tier \"a b\" 5/s", 4, `tier name "a b" has characters other than a-z, 0-9, _ and -`},
		{"tier " + long + " 5/s", 4, `tier name "` + long + `" is not 1 to 64 characters long`},
		{"tier ip off 5/s", 4, `tier "ip": off cannot stand beside limits`},
		{"tier ip 5/s off", 4, `tier "ip": off cannot stand beside limits`},
		{"tier ip off off", 4, `tier "ip": off cannot stand beside limits`},
		{"tier ip 5/s 6/1000ms", 4, `tier "ip" has two limits with a window of 1s`},
		{"tier ip 5/s 6/m 7/1s {\ndry_run\n}", 4, `tier "ip" has two limits with a window of 1s`},
		{"tier ip 5/s\n\ntier ip 6/m", 6, `tier "ip" is given twice; several limits of a tier stand on one line, such as: tier ip 20/s 600/m`},
		{"tier ip 5/s\n\ntier api 5/s {\ncharge served\n}", 6, `tier "api" has no key: write key {http.tiered_limit.client_ip} to limit each client, or another key; only tiers named ip, user and global have a default one`},
		{"tier ip 5/s {\nwindow 1m\n}", 5, `unknown word "window" in tier "ip": count and window stand on the tier's line, such as: tier ip 100/m; see "Migrating from rate_limit" in the README`},
		{"zone api", 4, `unknown subdirective "zone" of tiered_limit: a zone is a tier, such as: tier api 100/m; see "Migrating from rate_limit" in the README`},
		{"tier ip 5/s\nwindow 1m", 5, `unknown subdirective "window" of tiered_limit: count and window stand together, such as: tier ip 100/m; see "Migrating from rate_limit" in the README`},
		{"events 100", 4, `unexpected "100": events takes no argument; a count stands with its window, such as: tier ip 100/m; see "Migrating from rate_limit" in the README`},
		{"rate_limit", 4, `unknown subdirective "rate_limit" of tiered_limit: write tiers into tiered_limit; see "Migrating from rate_limit" in the README`},
		{"tier api 5/s", 4, `tier "api" has no key: write key {http.tiered_limit.client_ip} to limit each client, or another key; only tiers named ip, user and global have a default one`},
		// Limits.
		{"tier ip 5", 4, `tier "ip": limit "5" is not of the form <count>/<window>, such as 600/m`},
		{"tier ip 5 m", 4, `tier "ip": limit "5" is not of the form <count>/<window>, such as 600/m`},
		{"tier ip \"\"", 4, `tier "ip": limit "" is not of the form <count>/<window>, such as 600/m`},
		{"tier ip OFF", 4, `tier "ip": limit "OFF" is not of the form <count>/<window>, such as 600/m`},
		{"tier ip /m", 4, `tier "ip": limit "/m": the count is empty` + empty},
		{"tier ip 5/", 4, `tier "ip": limit "5/": the window is empty` + empty},
		{"tier ip /", 4, `tier "ip": limit "/": the count is empty` + empty},
		{"tier ip -5/m", 4, `tier "ip": limit "-5/m": the count "-5" is not a whole number of 0 or more`},
		{"tier ip +5/m", 4, `tier "ip": limit "+5/m": the count "+5" is not a whole number of 0 or more`},
		{"tier ip \" 5/m\"", 4, `tier "ip": limit " 5/m": the count " 5" is not a whole number of 0 or more`},
		{"tier ip 1e3/m", 4, `tier "ip": limit "1e3/m": the count "1e3" is not a whole number of 0 or more`},
		{"tier ip 1_000/m", 4, `tier "ip": limit "1_000/m": the count "1_000" is not a whole number of 0 or more`},
		{"tier ip 0x10/m", 4, `tier "ip": limit "0x10/m": the count "0x10" is not a whole number of 0 or more`},
		{"tier ip 1.5/m", 4, `tier "ip": limit "1.5/m": the count "1.5" is not a whole number of 0 or more`},
		{"tier ip 5\u0663/m", 4, "tier \"ip\": limit \"5\u0663/m\": the count \"5\u0663\" is not a whole number of 0 or more"},
		{"tier ip 2147483648/m", 4, `tier "ip": limit "2147483648/m": the count "2147483648" is above 2147483647`},
		{"tier ip 99999999999999999999/m", 4, `tier "ip": limit "99999999999999999999/m": the count "99999999999999999999" ` +
			`is above 2147483647`},
		{"tier ip 5/0", 4, `tier "ip": limit "5/0": limit window 0s is shorter than 1ms`},
		{"tier ip 5/0s", 4, `tier "ip": limit "5/0s": limit window 0s is shorter than 1ms`},
		{"tier ip 5/-1s", 4, `tier "ip": limit "5/-1s": limit window -1s is shorter than 1ms`},
		{"tier ip 5/999us", 4, `tier "ip": limit "5/999us": limit window 999µs is shorter than 1ms`},
		{"tier ip 5/1ns", 4, `tier "ip": limit "5/1ns": limit window 1ns is shorter than 1ms`},
		{"tier ip 5/1500us", 4, `tier "ip": limit "5/1500us": limit window 1.5ms is not a whole number of milliseconds`},
		{"tier ip 5/5", 4, `tier "ip": limit "5/5": the window "5"` + notDuration},
		{"tier ip 5/x", 4, `tier "ip": limit "5/x": the window "x"` + notDuration},
		{"tier ip 5/M", 4, `tier "ip": limit "5/M": the window "M"` + notDuration},
		{"tier ip 5/min", 4, `tier "ip": limit "5/min": the window "min"` + notDuration},
		{"tier ip 5/1w", 4, `tier "ip": limit "5/1w": the window "1w"` + notDuration},
		{"tier ip 5//m", 4, `tier "ip": limit "5//m": the window "/m"` + notDuration},
		{"tier ip 5/m/s", 4, `tier "ip": limit "5/m/s": the window "m/s"` + notDuration},
		{"tier ip 5/dd", 4, `tier "ip": limit "5/dd": the window "dd"` + notDuration},
		{"tier ip 5/NaNd", 4, `tier "ip": limit "5/NaNd": the window "NaNd"` + notDuration},
		{"tier ip 5/106752d", 4, `tier "ip": limit "5/106752d": the window "106752d"` + notDuration},
		{"tier ip 5/9999999999h", 4, `tier "ip": limit "5/9999999999h": the window "9999999999h"` + notDuration},
		// A tier's block.
		{"tier ip 5/s {\nbogus\n}", 5, `unknown word "bogus" in tier "ip"; expected key, match, match_mode, clients, share, charge or dry_run`},
		{"tier ip 5/s {\ntier user 5/s\n}", 5, `unknown word "tier" in tier "ip"; expected key, match, match_mode, clients, share, charge or dry_run`},
		{"tier ip 5/s {\ntrusted_hops 1\n}", 5, `unknown word "trusted_hops" in tier "ip"; expected key, match, match_mode, clients, share, charge or dry_run`},
		{"tier ip 5/s {\nkey\n}", 5, `tier "ip": key needs at least one part`},
		{"tier ip 5/s {\nkey a \"\"\n}", 5, `tier "ip": key has an empty part` + empty},
		{"tier ip 5/s {\nkey a {\n}\n}", 5, `key takes no block`},
		{"tier ip 5/s {\nkey \"{a\"\n}", 5, `tier "ip": key part "{a": a placeholder is not closed; write \{ for a literal brace`},
		{"tier ip 5/s {\nkey a{}\n}", 5, `tier "ip": key part "a{}": a placeholder has no name; write \{ for a literal brace`},
		{"tier ip 5/s {\ncharge\n}", 5, `charge takes one of served, checked`},
		{"tier ip 5/s {\ncharge twice\n}", 5, `charge "twice" is not one of served, checked`},
		{"tier ip 5/s {\ncharge served {\n}\n}", 5, `charge takes no block`},
		{"tier ip 5/s {\ncharge served\ncharge served\n}", 6, `tier "ip": charge is given twice`},
		{"tier ip 5/s {\ndry_run yes\n}", 5, `unexpected "yes": dry_run takes no argument but header`},
		{"tier ip 5/s {\ndry_run\ndry_run\n}", 6, `tier "ip": dry_run is given twice`},
		{"tier ip 5/s {\ndry_run {\n}\n}", 5, `dry_run takes no block`},
		{"tier ip 5/s {\nmatch\n}", 5, `tier "ip": match needs a matcher`},
		{"tier ip 5/s {\nmatch {\n}\n}", 6, `tier "ip": match needs a matcher`},
		{"tier ip 5/s {\nmatch @nope\n}", 5, `tier "ip": match: unrecognized matcher name: @nope`},
		{"tier ip 5/s {\nmatch @post @post\n}", 5, `tier "ip": match: unexpected "@post"`},
		{"tier ip 5/s {\nmatch /a /b\n}", 5, `tier "ip": match: unexpected "/b"`},
		{"tier ip 5/s {\nmatch @post {\nmethod GET\n}\n}", 5, `match takes no block`},
		{"tier ip 5/s {\nmatch /a {\n}\n}", 5, `match takes no block`},
		{"tier ip 5/s {\nmatch * {\n}\n}", 5, `match takes no block`},
		{"tier ip 5/s {\nmatch nope x\n}", 5, `tier "ip": match: getting matcher module 'nope': module not registered: http.matchers.nope`},
		{"tier ip 5/s {\nmatch /a\nmatch /b\n}", 6, `tier "ip": match is given twice`},
		{"tier ip 5/s {\nmatch method GET {\nx\n}\n}", 6, `tier "ip": match: malformed method matcher: blocks are not supported`},
	} {
		_, err := tryAdapt(site(c.block))
		want := fmt.Sprintf("parsing caddyfile tokens for 'tiered_limit': %s, at Caddyfile:%d", c.want, c.line)
		assert.EqualError(t, err, want, "block: %s", c.block)
	}
}

const notDuration = ` is not a duration of at most 106751d, such as s, m, h, d, 10s or 60000ms`

// Mistakes outside of the block: the directive's line, braces, and words in the wrong place.
func TestCaddyfileMistakesAroundTheBlock(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ caddyfile, want string }{
		{":8080 {\n\ttiered_limit a b {\n\t\ttier ip 5/s\n\t}\n}", `unexpected "b": tiered_limit takes one name, at Caddyfile:2`},
		{":8080 {\n\ttiered_limit Api {\n\t\ttier ip 5/s\n\t}\n}",
			`stack name "Api" has characters other than a-z, 0-9, _ and -, at Caddyfile:2`},
		{":8080 {\n\ttiered_limit \"\" {\n\t\ttier ip 5/s\n\t}\n}", `stack name "" is not 1 to 64 characters long, at Caddyfile:2`},
		{":8080 {\n\ttiered_limit a.b {\n\t\ttier ip 5/s\n\t}\n}",
			`stack name "a.b" has characters other than a-z, 0-9, _ and -, at Caddyfile:2`},
		{":8080 {\n\ttiered_limit @nope {\n\t\ttier ip 5/s\n\t}\n}", `unrecognized matcher name: @nope`},
		{":8080 {\n\ttiered_limit api @post {\n\t\ttier ip 5/s\n\t}\n}", `unexpected "@post": tiered_limit takes one name, at Caddyfile:2`},
		{":8080 {\n\ttiered_limit\n}", `the stack has no tier; write at least one, such as: tier ip 600/m, at Caddyfile:2`},
		{":8080 {\n\ttier ip 5/s\n}", `Caddyfile:2: unrecognized directive: tier`},
		{":8080 {\n\ttiered_limit\n\t{\n\t\ttier ip 5/s\n\t}\n}", `Unexpected '{' on a new line`},
		{":8080 {\n\ttiered_limit {\n\t\ttier ip 5/s\n", `unexpected EOF, at Caddyfile:3`},
		{":8080 {\n\ttiered_limit {\n\t\ttier ip 5/s {\n\t\t\tkey a\n\t\t}\n", `unexpected EOF, at Caddyfile:5`},
		{":8080 {\n\ttiered_limit {\n\t\ttier ip 5/s { dry_run }\n\t}\n}", `Unexpected next token after '{' on same line, at Caddyfile:3`},
		{"{\n\ttiered_limit {\n\t\ttier ip 5/s\n\t}\n}\n:8080", `unrecognized global option: tiered_limit`},
	} {
		_, err := tryAdapt(c.caddyfile)
		assert.ErrorContains(t, err, c.want, "file: %s", c.caddyfile)
	}
}

// A stack may be long, but not without bound.
func TestTooManyTiers(t *testing.T) {
	t.Parallel()
	lines := func(n int) string {
		var b strings.Builder
		for i := range n {
			fmt.Fprintf(&b, "tier t%d 5/s {\nkey a\n}\n", i)
		}
		return b.String()
	}
	_, err := tryLoad(t, ":8080 {\n\ttiered_limit many-64 {\n"+lines(64)+"\t}\n}")
	assert.NoError(t, err, "64 tiers")
	for _, n := range []int{65, 10_000} {
		_, err := tryAdapt(site(lines(n)))
		assert.ErrorContains(t, err, fmt.Sprintf("the stack has %d tiers; at most 64 are possible, at Caddyfile:", n))
	}
}

// The largest counts and windows load and admit requests.
func TestLargestLimitsLoad(t *testing.T) {
	t.Parallel()
	e := newEdge(t, ":8080 {\n\ttiered_limit largest {\n\t\ttrusted_hops 0\n\t\theaders x-ratelimit draft-11\n"+
		"\t\ttier ip 2147483647/1ms 2147483647/106751d 2147483647/9223372036854ms\n\t}\n\trespond ok\n}")
	got := e.send(request{})
	assert.Equal(t, 200, got.Code)
	assert.Equal(t, "2147483647", got.Header().Get("X-RateLimit-Limit"))
	assert.Equal(t, "2147483646", got.Header().Get("X-RateLimit-Remaining"))
}

// Environment variables fill limits and hops. They are put in before the file is read, so an unset one is nothing at all.
func TestCaddyfileVariables(t *testing.T) {
	t.Setenv("TL_EMPTY", "")
	t.Setenv("TL_MAX", "7")
	t.Setenv("TL_ZERO", "0")
	t.Setenv("TL_OFF", "off")
	t.Setenv("TL_WINDOW", "60000ms")
	t.Setenv("TL_YES", "yes")
	tier := func(limits string) string { return `{"tiers":[{"limits":[` + limits + `],"name":"ip"}]}` }
	for block, want := range map[string]string{
		"tier ip {$TL_UNSET:600}/{$TL_UNSET:1m}": tier(`{"count":600,"window":60000000000}`),
		"tier ip {$TL_MAX:600}/{$TL_WINDOW:1m}":  tier(`{"count":7,"window":60000000000}`),
		"tier ip {$TL_ZERO:600}/{$TL_UNSET:1m}":  tier(`{"count":0,"window":60000000000}`),
		"tier ip {$TL_OFF:600/m}":                tier(``),
		"tier ip {$TL_UNSET:600/m}":              tier(`{"count":600,"window":60000000000}`),
		"tier ip 5/s\ntrusted_hops {$TL_UNSET}":  `{` + oneTier + `}`,
		"tier ip 5/s\ntrusted_hops {$TL_EMPTY}":  `{` + oneTier + `}`,
		"tier ip 5/s\ntrusted_hops {$TL_MAX}":    `{` + oneTier + `,"trusted_hops":7}`,
	} {
		assert.Equal(t, want, siteJSON(t, block), "block: %s", block)
	}
	for block, want := range map[string]string{
		"tier ip {$TL_EMPTY:600}/m":     `the count is empty; if it comes from an environment variable, that variable is empty or not set, at Caddyfile:4`,
		"tier ip {$TL_UNSET}/m":         `the count is empty; if it comes from an environment variable, that variable is empty or not set, at Caddyfile:4`,
		"tier ip 5/{$TL_EMPTY:1m}":      `the window is empty; if it comes from an environment variable, that variable is empty or not set, at Caddyfile:4`,
		"tier ip {$TL_YES}/m":           `the count "yes" is not a whole number of 0 or more, at Caddyfile:4`,
		"tier ip {$TL_UNSET}":           `tier "ip" needs at least one limit, such as 600/m, or off, at Caddyfile:4`,
		"trusted_hops {$TL_YES}":        `trusted_hops "yes" is not a whole number from 0 to 64, at Caddyfile:4`,
		"tier u 1/m {\nkey {$UNSET}\n}": `tier "u": key needs at least one part, at Caddyfile:5`,
	} {
		_, err := tryAdapt(site(block))
		assert.ErrorContains(t, err, want, "block: %s", block)
	}
}

// What a Caddyfile adapts to loads, and is the same after it was read and written again.
func TestCaddyfileRoundTrip(t *testing.T) {
	t.Parallel()
	for i, block := range []string{
		"tier ip 5/s",
		"tier ip off",
		"trusted_hops 0\ntier ip 0/s 5/m",
		"trusted_hops 2 X-Real-IP\nipv4_prefix 24\nipv6_prefix 56\ntier ip 5/s 100/1h30m {\ncharge checked\ndry_run\n}\n" +
			"tier user 5/d {\nkey {http.auth.user.id}\nkey {header.Authorization} x\nmatch {\nmethod POST\nnot path /a\n}\n}\n" +
			"tier global 9/m\ncharge checked\nexempt /a /b*\nexempt_clients 192.0.2.0/24 ::1\npreflight count\n" +
			"headers x-ratelimit draft-11\nbody graphql\ncors https://a.test {\ncredentials\n}\njitter 20\nlog_keys\ndry_run\n" +
			"store memory {\nmax_keys 1000\n}",
	} {
		first := siteJSON(t, block)
		var h Handler
		require.NoError(t, json.Unmarshal([]byte(first), &h))
		again, err := json.Marshal(&h)
		require.NoError(t, err)
		assert.JSONEq(t, first, string(again), "block: %s", block)
		var second Handler
		require.NoError(t, json.Unmarshal(again, &second))
		assert.Equal(t, h, second, "block: %s", block)
		newEdge(t, strings.Replace(site(block), "tiered_limit", fmt.Sprintf("tiered_limit round-%d", i), 1))
	}
}
