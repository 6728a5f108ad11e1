package tieredlimit

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A tier that goes by what a directive behind the handler sets is warned of at load: with the tier, the directive and the
// cure. Where the directive is in front, or sets something else, nothing is said.
func TestWhatIsSetBehindTheHandlerIsWarnedOf(t *testing.T) {
	t.Parallel()
	const forward = "forward_auth 127.0.0.1:9 {\nuri /check\ncopy_headers Remote-User X-Groups>Remote-Groups\n}"
	const basic = "basic_auth {\nalice $2a$04$abcdefghijklmnopqrstuuKTfVJ3yR2LCqVT3dGVjfo0AoAXnmUWW\n}"
	for directive, c := range map[string]struct{ is, sets, not string }{
		forward:                                  {"forward_auth", "key {header.Remote-User}", "key {header.X-Groups}"},
		forward + "\n#":                          {"forward_auth", "key x{header.remote-groups}", "key {header.Remote}"},
		forward + "\n##":                         {"forward_auth", "key x\nmatch header Remote-User *", "key x\nmatch header Remote *"},
		forward + "\n###":                        {"forward_auth", "key x\nmatch not header_regexp Remote-User ^a", "key x\nmatch method GET"},
		"request_header X-Plan gold":             {"request_header", "key {header.X-Plan}", "key {header.X-Plans}"},
		"request_header +X-Plan gold":            {"request_header", "key x\nmatch expression `{header.X-Plan} == 'gold'`", "key x"},
		"request_header X-Plan a b":              {"request_header", "key x\nmatch expression `header({'X-Plan': 'gold'})`", "key {query.X-Plan}"},
		basic:                                    {"authentication (such as basic_auth)", "key {http.auth.user.id}", "key {header.Authorization}"},
		basic + "\n#":                            {"authentication (such as basic_auth)", "key x\nmatch vars {http.auth.user.id} alice", "key x"},
		"vars plan gold":                         {"vars", "key {vars.plan}", "key {vars.plans}"},
		"vars plan gold\n#":                      {"vars", "key x\nmatch vars plan gold", "key x\nmatch vars plans gold"},
		"map {host} {plan} {\ndefault a\n}":      {"map", "key {plan}", "key {plans}"},
		"route {\nrequest_header X-Plan gold\n}": {"request_header", "key {header.X-Plan}", "key {header.Plan}"},
		"handle {\nroute /a {\nrequest_header X-Plan gold\n}\n}":      {"request_header", "key {header.X-Plan}", "key {header.Plan}"},
		"handle /a {\nrespond a\n}\nhandle {\n" + forward + "\n}":     {"forward_auth", "key {header.Remote-User}", "key {header.Remote}"},
		"handle_path /a* {\nrequest_header X-Plan gold\nrespond a\n}": {"request_header", "key {header.X-Plan}", "key {header.Plan}"},
	} {
		stack := func(tier string) string { return "tiered_limit {\ntier a 5/m {\n" + tier + "\n}\n}\n" }
		for site, want := range map[string]int{
			stack(c.sets) + directive:                                              1,
			"route {\n" + stack(c.sets) + directive + "\n}":                        1,
			"handle {\n" + stack(c.sets) + "}\nroute {\n" + directive + "\n}":      1,
			"route {\n" + stack(c.sets) + "\nroute {\n" + directive + "\n}\n}":     1,
			"route {\nroute {\n" + stack(c.sets) + "}\n" + directive + "\n}":       1,
			stack(c.not) + directive:                                               0,
			"route {\n" + directive + "\n" + stack(c.sets) + "}":                   0,
			"route {\nroute {\n" + directive + "\n}\n" + stack(c.sets) + "}":       0,
			"handle /x* {\n" + stack(c.sets) + "}\nhandle {\n" + directive + "\n}": 0,
		} {
			e := newEdge(t, "{\norder tiered_limit first\n}\n"+freshListen()+" {\nroute {\n"+site+"\nrespond ok\n}\n}\n")
			lines := e.logs.lines("warn", "behind tiered_limit")
			require.Len(t, lines, want, site)
			if want == 0 {
				continue
			}
			assert.Contains(t, lines[0].str("msg"), ", which "+c.is+" sets behind tiered_limit", site)
			assert.Contains(t, lines[0].str("msg"), "Put both into a route block, "+c.is+" first", site)
			assert.Equal(t, "a", lines[0].str("tier"), site)
			assert.Equal(t, c.is, lines[0].str("directive"), site)
		}
	}
}

// In the default order the directives stand behind. What is said of the first skipped request says so, too.
func TestWhatIsSetBehindInTheDefaultOrder(t *testing.T) {
	t.Parallel()
	for directive, key := range map[string]string{
		"forward_auth 127.0.0.1:9 {\nuri /check\ncopy_headers Remote-User\n}":                 "{http.request.header.Remote-User}",
		"basic_auth {\nalice $2a$04$abcdefghijklmnopqrstuuKTfVJ3yR2LCqVT3dGVjfo0AoAXnmUWW\n}": "{http.auth.user.id}",
		"request_header X-Plan gold": "{http.request.header.X-Plan}",
	} {
		e := newEdge(t, freshListen()+" {\ntiered_limit {\ntier a 5/m {\nkey "+key+"\n}\n}\n"+directive+"\nrespond ok\n}\n")
		at := e.warning("a tier goes by " + key)
		assert.Equal(t, key, at.str("placeholder"))
		e.send(request{})
		assert.Contains(t, e.warning("every key of a tier is empty").str("msg"),
			key+" is set by "+at.str("directive")+" behind tiered_limit: put both into a route block")
		e.close()
	}
	for _, inFront := range []string{"vars plan gold", "map {host} {plan} {\ndefault gold\n}"} {
		e := newEdge(t, freshListen()+" {\ntiered_limit {\ntier a 5/m {\nkey {vars.plan}{plan}\n}\n}\n"+inFront+"\nrespond ok\n}\n")
		assert.Empty(t, e.logs.lines("warn", "behind tiered_limit"), inFront)
	}
}

// Two unnamed stacks that a request may meet are warned of once. Those of which it meets one at most, and named ones, are not.
func TestUnnamedStacksBehindOneAnother(t *testing.T) {
	t.Parallel()
	stack := func(head string) string { return "tiered_limit " + head + " {\ntrusted_hops 0\ntier ip 5/m\n}\n" }
	off := "tiered_limit {\ntrusted_hops 0\ntier ip off\n}\n"
	for site, want := range map[string]int{
		stack("") + stack(""):                                        1,
		stack("/a/*") + stack(""):                                    1,
		stack("@post") + stack("@api"):                               1,
		stack("@api") + stack("/api/v1/*"):                           1,
		stack("@post") + stack("@api") + stack(""):                   1,
		stack("") + "handle /a* {\n" + stack("") + "}\n":             1,
		"route {\n" + stack("") + "}\nroute {\n" + stack("") + "}\n": 1,
		"route {\n" + stack("") + "route {\n" + stack("") + "}\n}\n": 1,
		stack(""):                          0,
		stack("one") + stack("two"):        0,
		stack("one") + stack(""):           0,
		stack("") + off:                    0,
		stack("/a/*") + stack("/b/*"):      0,
		stack("@post") + stack("@get"):     0,
		stack("@post") + stack("@notpost"): 0,
		stack("@here") + stack("@there"):   0,
		"handle /a* {\n" + stack("") + "}\nhandle {\n" + stack("") + "}\n":       0,
		"handle /a* {\n" + stack("") + "}\nhandle_path /b {\n" + stack("") + "}": 0,
	} {
		e := newEdge(t, freshListen()+" {\n@post method POST\n@get method GET HEAD\n@notpost not method POST\n@api path /api/* /v2\n"+
			"@here host a.example\n@there host b.example\n"+site+"\nrespond ok\n}\n")
		assert.Len(t, e.logs.lines("warn", "requests may meet two unnamed stacks"), want, site)
		e.close()
	}
	two := newEdge(t, fmt.Sprintf("%s {\n%srespond ok\n}\n%s {\n%srespond ok\n}\n", freshListen(), stack(""), freshListen(), stack("")))
	assert.Empty(t, two.logs.lines("warn", "requests may meet"), "no request is received by two servers")
	sites := newEdge(t, fmt.Sprintf("http://a.example:8080 {\n%srespond ok\n}\nhttp://b.example:8080 {\n%srespond ok\n}\n", stack(""), stack("")))
	assert.Empty(t, sites.logs.lines("warn", "requests may meet"), "nor by two sites")
}
