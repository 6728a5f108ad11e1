package tieredlimit

import (
	"testing"

	"github.com/stretchr/testify/assert"
)

// sayBinding answers with what the placeholders say.
const sayBinding = `
respond "{http.tiered_limit.tier} {http.tiered_limit.limit} {http.tiered_limit.window} {http.tiered_limit.remaining} {http.tiered_limit.reset} <{http.tiered_limit.retry_after}>"
`

// On a served request the placeholders say the limit that binds, as the fields do, so that a site can send fields of its
// own.
func TestPlaceholdersSayTheLimitThatBinds(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ stacks, want string }{
		"the smallest share left":   {"tiered_limit {\ntrusted_hops 0\ntier ip 4/m 10/h\ntier global 3/1500ms\n}", "global 3 1.5 2 2 <>"},
		"the first of equals":       {"tiered_limit {\ntrusted_hops 0\ntier ip 4/m\ntier global 4/h\n}", "ip 4 60 3 60 <>"},
		"of several stacks, either": {"tiered_limit {\ntier global 2/m\n}\ntiered_limit {\ntier global 9/h\n}", "global 2 60 1 60 <>"},
		"of several stacks, later":  {"tiered_limit {\ntier global 9/h\n}\ntiered_limit {\ntier global 2/m\n}", "global 2 60 1 60 <>"},
		"equals of several stacks":  {"tiered_limit {\ntier a 4/m {\nkey a\n}\n}\ntiered_limit {\ntier b 4/h {\nkey b\n}\n}", "a 4 60 3 60 <>"},
		"no dry stack":              {"tiered_limit {\ntier global 9/h\n}\ntiered_limit {\ndry_run\ntier global 2/m\n}", "global 9 3600 8 3600 <>"},
		"a dry stack alone":         {"tiered_limit {\ndry_run\ntier global 2/m\n}", "     <>"},
		"no dry tier":               {"tiered_limit {\ntier global 9/h\ntier test 2/m {\nkey a\ndry_run\n}\n}", "global 9 3600 8 3600 <>"},
		"no tier applied":           {"tiered_limit {\ntier post 2/m {\nkey a\nmatch method POST\n}\n}", "     <>"},
		"nothing judged":            {"tiered_limit {\nexempt /\ntier global 2/m\n}", "     <>"},
	} {
		e := newEdge(t, ":8080 {\nroute {\n"+c.stacks+sayBinding+"}\n}")
		assert.Equal(t, c.want, e.send(request{}).Body.String(), name)
		e.close()
	}
}

// A site builds the fields of another set out of the placeholders, on what is served and on what is refused.
func TestPlaceholdersMakeFieldsOfOnesOwn(t *testing.T) {
	t.Parallel()
	e := newEdge(t, `
:8080 {
	tiered_limit own-fields {
		trusted_hops 0
		headers none
		tier ip 2/m
	}
	header {
		RateLimit-Limit {http.tiered_limit.limit}
		RateLimit-Remaining {http.tiered_limit.remaining}
		RateLimit-Reset {http.tiered_limit.reset}
		defer
	}
	respond ok
}`)
	for i, want := range []string{"1", "0", "0"} {
		w := e.send(request{})
		assert.Equal(t, []int{200, 200, 429}[i], w.Code)
		assert.Equal(t, []string{"2", want, "60"}, []string{
			w.Header().Get("RateLimit-Limit"), w.Header().Get("RateLimit-Remaining"), w.Header().Get("RateLimit-Reset"),
		})
	}
}
