package replay

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"
)

// reduced is what is left of the routes of a server, as JSON.
func reduced(t *testing.T, routes string) (string, []string) {
	t.Helper()
	raw, notes, err := reduce([]byte(`{"apps":{"http":{"servers":{"s":{"listen":[":80"],"routes":` + routes + `}}}}}`))
	require.NoError(t, err)
	left, err := json.Marshal(raw.Apps.HTTP.Servers["s"].Routes)
	require.NoError(t, err)
	return string(left), notes
}

const limit = `{"handler":"tiered_limit"}`

func TestNothingIsLeftOfAConfigButTheWayToTheStacks(t *testing.T) {
	for _, c := range []struct{ name, routes, want, note string }{
		{"what stands behind", `[{"handle":[` + limit + `,{"handler":"reverse_proxy"}]},{"handle":[{"handler":"file_server"}]}]`,
			`[{"handle":[` + limit + `]}]`, ""},
		{"harmless handlers in front", `[{"handle":[{"handler":"headers","response":{}},{"handler":"encode"},` + limit + `]}]`,
			`[{"handle":[` + limit + `]}]`, ""},
		{"an answer in front keeps its matchers only",
			`[{"match":[{"path":["/old"]}],"handle":[{"handler":"static_response","body":"x"}]},{"handle":[` + limit + `]}]`,
			`[{"match":[{"path":["/old"]}]},{"handle":[` + limit + `]}]`, ""},
		{"a group and a terminal route in front", `[{"group":"g","match":[{"path":["/a"]}],"handle":[{"handler":"encode"}]},` +
			`{"terminal":true,"match":[{"host":["x"]}]},{"group":"g","handle":[` + limit + `]}]`,
			`[{"group":"g","match":[{"path":["/a"]}]},{"match":[{"host":["x"]}],"terminal":true},{"group":"g","handle":[` + limit + `]}]`, ""},
		{"rewrites in front", `[{"handle":[{"handler":"rewrite","strip_path_prefix":"/v1"}]},{"handle":[` + limit + `]}]`,
			`[{"handle":[{"handler":"rewrite","strip_path_prefix":"/v1"}]},{"handle":[` + limit + `]}]`, ""},
		{"a handler of a plugin in front", `[{"handle":[{"handler":"waf"},` + limit + `]}]`, `[{"handle":[` + limit + `]}]`,
			"a waf handler in front"},
		{"a proxy that asks first", `[{"handle":[{"handler":"reverse_proxy","handle_response":[{}]},` + limit + `]}]`,
			`[{"handle":[` + limit + `]}]`, "a reverse_proxy handler in front"},
		{"a stack in a place that is not followed", `[{"handle":[{"handler":"intercept","handle_response":[{"routes":[{"handle":[` +
			limit + `]}]}]},` + limit + `]}]`, `[{"handle":[` + limit + `]}]`, "inside a intercept handler"},
		{"a change of the request in front", `[{"handle":[{"handler":"headers","request":{"set":{}}},` + limit + `]}]`,
			`[{"handle":[` + limit + `]}]`, "changes the request"},
		{"subroutes", `[{"handle":[{"handler":"subroute","routes":[{"handle":[{"handler":"subroute","errors":{},"routes":[{"handle":[` +
			limit + `]}]}]},{"handle":[{"handler":"static_response"}]}]}]}]`,
			`[{"handle":[{"handler":"subroute","routes":[{"handle":[{"handler":"subroute","routes":[{"handle":[` + limit + `]}]}]}]}]}]`, ""},
		{"the memory store stays, any other and events go", `[{"handle":[{"handler":"tiered_limit","events":true,"store":{"backend":"memory","max_keys":9}},` +
			`{"handler":"tiered_limit","store":{"backend":"redis","address":["x"]}}]}]`,
			`[{"handle":[{"handler":"tiered_limit","store":{"backend":"memory","max_keys":9}},{"handler":"tiered_limit"}]}]`, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, notes := reduced(t, c.routes)
			require.JSONEq(t, c.want, got)
			if c.note == "" {
				require.Empty(t, notes)
			} else {
				require.Len(t, notes, 1)
				require.Contains(t, notes[0], c.note)
			}
		})
	}
}

func TestNamedRoutesAreKeptIfTheyHoldAStack(t *testing.T) {
	raw, _, err := reduce([]byte(`{"apps":{"http":{"servers":{"s":{"listen":[":80"],"named_routes":{
		"a":{"handle":[{"handler":"invoke","name":"b"}]},"b":{"handle":[` + limit + `]},"c":{"handle":[{"handler":"templates"}]}},
		"routes":[{"handle":[{"handler":"invoke","name":"a"},{"handler":"invoke","name":"c"}]}]}}}}}`))
	require.NoError(t, err)
	left, err := json.Marshal(raw.Apps.HTTP.Servers["s"])
	require.NoError(t, err)
	require.JSONEq(t, `{"listen":[":80"],"named_routes":{"a":{"handle":[{"handler":"invoke","name":"b"}]},
		"b":{"handle":[`+limit+`]}},"routes":[{"handle":[{"handler":"invoke","name":"a"}]}]}`, string(left))
}

func TestNamedRoutesInFrontOfAStackAreKept(t *testing.T) {
	const rewrite, answer = `{"handler":"rewrite","uri":"/x"}`, `{"handler":"static_response"}`
	raw, _, err := reduce([]byte(`{"apps":{"http":{"servers":{"s":{"listen":[":80"],"named_routes":{
		"changes":{"handle":[` + rewrite + `]},"through":{"handle":[{"handler":"invoke","name":"changes"},{"handler":"invoke","name":"answers"}]},
		"answers":{"match":[{"path":["/a"]}],"handle":[` + answer + `]},"nothing":{"handle":[{"handler":"templates"}]},
		"limits":{"handle":[` + limit + `,` + rewrite + `]},"last":{"handle":[` + limit + `,` + rewrite + `]},"behind":{"handle":[` + answer + `]}},
		"routes":[{"handle":[{"handler":"invoke","name":"through"},{"handler":"invoke","name":"nothing"},{"handler":"invoke","name":"limits"},
		{"handler":"invoke","name":"last"},{"handler":"invoke","name":"behind"}]}]}}}}}`))
	require.NoError(t, err)
	left, err := json.Marshal(raw.Apps.HTTP.Servers["s"].NamedRoutes)
	require.NoError(t, err)
	require.JSONEq(t, `{"changes":{"handle":[`+rewrite+`]},
		"through":{"handle":[{"handler":"invoke","name":"changes"},{"handler":"invoke","name":"answers"}]},
		"answers":{"match":[{"path":["/a"]}]},"nothing":{},"limits":{"handle":[`+limit+`,`+rewrite+`]},"last":{"handle":[`+limit+`]}}`, string(left))
	got, _ := reduced(t, `[{"handle":[{"handler":"invoke","name":"missing"},`+limit+`]}]`)
	require.JSONEq(t, `[{"handle":[`+limit+`]}]`, got, "a route that is missing is an error, and ends the request")
}

func TestConfigsThatCannotBeReplayed(t *testing.T) {
	for config, want := range map[string]string{
		`{`: "reading the config", `{}`: "no tiered_limit handler", `{"apps":{"http":{"servers":{"s":null}}}}`: `server "s" is null`,
		`{"apps":{"http":{"servers":{"s":{"routes":[{"handle":[5]}]}}}}}`: "reading a handler",
	} {
		_, _, err := reduce([]byte(config))
		require.ErrorContains(t, err, want, config)
	}
}

func TestTheServerOfALine(t *testing.T) {
	make := func(name string, tls, stack bool, logger string, ports ...string) *site {
		s := &site{name: name, tls: tls, ports: ports}
		if logger != "" {
			s.logger = []string{logger}
		}
		if stack {
			s.server = noServer
		}
		return s
	}
	plain, secure := make("a", false, false, "", "80"), make("b", true, true, "log0", "443")
	other, twin := make("c", false, true, "", "8080"), make("d", true, true, "log1", "8443")
	all := []*site{plain, secure, other, twin}
	for _, c := range []struct {
		name, logger, host string
		tls                bool
		want               string
	}{
		{"by its logger", "http.log.access.log1", "x", true, "d"},
		{"by its port", "http.log.access", "x:8080", false, "c"},
		{"by the port of https", "http.log.access", "x", true, "b"},
		{"by the port of http", "http.log.access", "x", false, "a"},
		{"by TLS", "http.log.access", "x:9", false, "c"},
		{"a logger that none states", "http.log.access.other", "x:8443", true, "d"},
		{"a port that none has", "http.log.access", "x:1", true, "b"},
		{"an IPv6 host", "http.log.access", "[::1]:8080", false, "c"},
	} {
		t.Run(c.name, func(t *testing.T) { require.Equal(t, c.want, choose(all, c.logger, c.host, c.tls).name) })
	}
}
