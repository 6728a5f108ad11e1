package tieredlimit

import (
	"net/http"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A variable that Caddy only expands while it runs is refused with the form that a Caddyfile takes, wherever a value is read.
func TestVariablesOfTheWrongForm(t *testing.T) {
	t.Parallel()
	for _, line := range []string{
		"tier ip {env.MAX}/m", "tier ip 5/{env.MAX}", "tier ip {env.MAX}", "trusted_hops {env.MAX}\ntier global 1/m", "ipv6_prefix {env.MAX}\ntier global 1/m",
		"jitter {env.MAX}\ntier global 1/m", "body {env.MAX}\ntier global 1/m", "headers {env.MAX}\ntier global 1/m", "nat64_prefix {env.MAX}\ntier global 1/m",
		"charge {env.MAX}\ntier global 1/m", "store {env.MAX}\ntier global 1/m", "tier global 1/m {\nshare {env.MAX} path /a\n}",
		"store memory {\nmax_keys {env.MAX}\n}\ntier global 1/m",
	} {
		_, err := tryAdapt(":8080 {\ntiered_limit {\n" + line + "\n}\n}")
		if assert.Error(t, err, line) {
			assert.Contains(t, err.Error(), "{env.MAX} has no value yet where a value is read: write {$MAX}", line)
			assert.Contains(t, err.Error(), ", at Caddyfile:", line)
		}
	}
	_, err := tryAdapt(":8080 {\ntiered_limit {\ntier ip x\n}\n}")
	assert.NotContains(t, err.Error(), "has no value yet")
}

// Lists of clients and origins take variables that have a value at load, in JSON as in a Caddyfile: one entry or several.
func TestListsOutOfVariables(t *testing.T) {
	for name, value := range map[string]string{
		"TIERED_LIMIT_OFFICE": "198.51.100.0/24, 203.0.113.7", "TIERED_LIMIT_PARTNER": "192.0.2.1", "TIERED_LIMIT_ORIGINS": "https://a.example https://b.example",
		"TIERED_LIMIT_BAD": "office", "TIERED_LIMIT_NONE": "",
	} {
		t.Setenv(name, value)
	}
	e := newEdge(t, freshListen()+` {
	tiered_limit variables {
		trusted_hops 0
		exempt_clients {env.TIERED_LIMIT_OFFICE} 192.0.2.9
		cors {env.TIERED_LIMIT_ORIGINS}
		tier ip 1/m
		tier partner 3/m {
			key x
			clients {env.TIERED_LIMIT_PARTNER}
		}
	}
	respond ok
}`)
	for peer, served := range map[string]int{"198.51.100.9": 5, "203.0.113.7": 5, "192.0.2.9": 5, "192.0.2.1": 1, "203.0.113.8": 1} {
		assert.Equal(t, served, e.served(5, request{peer: peer + ":1"}), peer)
	}
	for _, origin := range []string{"https://a.example", "https://b.example"} {
		w := e.send(request{peer: "203.0.113.8:1"}.with("Origin", origin))
		require.Equal(t, http.StatusTooManyRequests, w.Code)
		assert.Equal(t, origin, w.Header().Get("Access-Control-Allow-Origin"))
	}
	for line, want := range map[string]string{
		"exempt_clients {env.TIERED_LIMIT_BAD}":                                           `exempt_clients: "office" is neither an IP address nor a CIDR range`,
		"exempt_clients {env.TIERED_LIMIT_UNSET}":                                         `exempt_clients: "{env.TIERED_LIMIT_UNSET}": only placeholders that have a value at load can be used`,
		"exempt_clients {http.request.remote.host}":                                       `exempt_clients: "{http.request.remote.host}": only placeholders`,
		"cors {env.TIERED_LIMIT_NONE}":                                                    `cors: "{env.TIERED_LIMIT_NONE}": only placeholders that have a value`,
		"cors {env.TIERED_LIMIT_BAD}":                                                     `cors origin "office" is not of the form`,
		"cors https://a.example {env.TIERED_LIMIT_ORIGINS}":                               `cors names "https://a.example" twice`,
		"tier t 1/m {\nkey x\nclients not {env.TIERED_LIMIT_BAD}\n}":                      `not_clients: "office" is neither`,
		"tier t 1/m {\nkey x\nclients {env.TIERED_LIMIT_UNSET} {env.TIERED_LIMIT_BAD}\n}": `tier "t": clients: "{env.TIERED_LIMIT_UNSET}": only`,
	} {
		_, err := tryLoad(t, freshListen()+" {\ntiered_limit {\ntrusted_hops 0\ntier ip 1/m\n"+line+"\n}\n}\n")
		assert.ErrorContains(t, err, want, line)
	}
}

// A path matcher that is like no path is refused where it is written, in whatever it stands.
func TestPathsWithoutASlash(t *testing.T) {
	t.Parallel()
	for block, want := range map[string]string{
		"tier a 1/m {\nkey x\nmatch path api/*\n}":                             `tier "a": match path "api/*" is like no path, since all begin with a slash; write /api/*`,
		"tier a 1/m {\nkey x\nmatch path /a api\n}":                            `match path "api" is like no path`,
		"tier a 1/m {\nkey x\nmatch not path api\n}":                           `match path "api" is like no path`,
		"tier a 1/m {\nkey x\nmatch {\nmethod GET\nnot {\nnot path a\n}\n}\n}": `match path "a" is like no path`,
		"tier a 1/m {\nkey x\nmatch @api\n}":                                   `match path "api/*" is like no path`,
		"tier a 1/m {\nkey x\nshare 50% path api\n}":                           `tier "a": share 50%: match path "api" is like no path`,
	} {
		_, err := tryAdapt(":8080 {\n@api path api/*\ntiered_limit {\n" + block + "\n}\n}")
		assert.ErrorContains(t, err, want, block)
		assert.ErrorContains(t, err, "Caddyfile:", block)
	}
	for _, pattern := range []string{"/api/*", "*.php", "*", "{http.vars.prefix}/*", "/"} {
		_, err := tryLoad(t, freshListen()+" {\ntiered_limit {\ntier a 1/m {\nkey x\nmatch path "+pattern+"\n}\n}\n}\n")
		assert.NoError(t, err, pattern)
	}
	_, err := tryAdapt(`:8080 {
	tiered_limit {
		exempt api
		tier global 1/m
	}
}`)
	assert.ErrorContains(t, err, `exempt "api" is not a path: it must begin with / or *`)
}
