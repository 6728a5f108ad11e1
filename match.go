package tieredlimit

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// facet is a part of a request that upstreams may read otherwise than Caddy's matchers do.
type facet uint8

const (
	facetPath facet = 1 << iota
	facetQuery
	facets = facetPath | facetQuery
)

// String says what of a request is meant, at the beginning of a sentence.
func (f facet) String() string {
	switch f {
	case facetPath:
		return "its path"
	case facetQuery:
		return "its query"
	}
	return "its path and query"
}

// tierMatch says which requests a tier concerns. A tier is there to limit, so where a matcher cannot tell what a request
// means to the upstream, the tier concerns it: what is not certain matches, also inside not.
type tierMatch struct {
	sets   caddyhttp.MatcherSets
	looks  facet    // at what some matcher looks
	params []string // the parameters that query matchers name

	// certain are the sets without the matchers that look at what is not certain, by facets.
	certain [facets + 1]caddyhttp.MatcherSets
}

// compileMatch loads the matchers of a tier.
func compileMatch(ctx caddy.Context, t *Tier) (tierMatch, error) {
	var m tierMatch
	if len(t.MatcherSetsRaw) == 0 {
		return m, nil
	}
	looks := make(map[string]facet) // by the name of the matcher, in any set
	for _, set := range t.MatcherSetsRaw {
		for name, raw := range set {
			looks[name] |= m.study(name, raw)
			m.looks |= looks[name]
		}
	}
	loaded, err := ctx.LoadModule(t, "MatcherSetsRaw")
	if err != nil {
		return m, fmt.Errorf("match: %w", err)
	}
	if err := m.sets.FromInterface(loaded); err != nil {
		return m, fmt.Errorf("match: %w", err)
	}
	for doubts := range m.certain {
		for _, set := range m.sets {
			var certain caddyhttp.MatcherSet
			for _, matcher := range set {
				if module, ok := matcher.(caddy.Module); !ok || looks[module.CaddyModule().ID.Name()]&facet(doubts) == 0 {
					certain = append(certain, matcher)
				}
			}
			m.certain[doubts] = append(m.certain[doubts], certain)
		}
	}
	return m, nil
}

// study finds out what a matcher looks at, by its name and configuration.
func (m *tierMatch) study(name string, raw json.RawMessage) facet {
	switch name {
	case "path", "path_regexp", "file":
		return facetPath
	case "query":
		var params map[string]json.RawMessage
		if json.Unmarshal(raw, &params) == nil {
			for param := range params {
				m.params = append(m.params, param)
			}
		}
		return facetQuery
	case "urlpattern":
		return facetPath | facetQuery
	case "not":
		var sets []map[string]json.RawMessage
		if json.Unmarshal(raw, &sets) != nil {
			return facets
		}
		var looks facet
		for _, set := range sets {
			for name, raw := range set {
				looks |= m.study(name, raw)
			}
		}
		return looks
	}
	return studyText(name, string(raw))
}

// studyText finds out what an expression, or a matcher that may use placeholders, looks at.
func studyText(name, text string) facet {
	var looks facet
	if strings.Contains(text, "request.uri") || strings.Contains(text, "orig_uri") {
		if strings.Contains(text, "uri.query") {
			looks |= facetQuery
		}
		if strings.Contains(text, "uri.path") || looks == 0 {
			looks |= facetPath
		}
		if strings.Contains(text, "uri}") {
			looks = facets
		}
	}
	if name == "expression" {
		if strings.Contains(text, "path") || strings.Contains(text, "file") || strings.Contains(text, "url") {
			looks |= facetPath
		}
		if strings.Contains(text, "query") || strings.Contains(text, "url") {
			looks |= facetQuery
		}
	}
	return looks
}

// doubts are the parts of a request that the matchers look at and that upstreams may read otherwise.
func (m *tierMatch) doubts(r *http.Request) facet {
	var doubts facet
	if m.looks&facetPath != 0 && ambiguousPath(sentPath(r)) {
		doubts |= facetPath
	}
	if m.looks&facetQuery != 0 && r.URL.RawQuery != "" && m.ambiguousQuery(r.URL.RawQuery) {
		doubts |= facetQuery
	}
	return doubts
}

// ambiguousQuery reports whether servers read a query differently: as a whole, or one of the parameters that are named.
func (m *tierMatch) ambiguousQuery(query string) bool {
	if len(query) > maxKeyText || strings.IndexByte(query, ';') >= 0 || !validEscapes(query) ||
		strings.Count(query, "&") >= maxQueryPairs {
		return true
	}
	var scratch [128]byte
	for _, param := range m.params {
		if _, found := appendQuery(scratch[:0], query, param); found == uncertain {
			return true
		}
	}
	return false
}

// concerns reports whether a request is one that the tier is for. An error comes from a matcher that cannot tell.
func (m *tierMatch) concerns(r *http.Request) (bool, error) {
	if len(m.sets) == 0 {
		return true, nil
	}
	sets := m.certain[m.doubts(r)]
	concerned, err := sets.AnyMatchWithError(r)
	if concerned || err != nil {
		return concerned, err
	}
	for _, reading := range m.readings(r) {
		if concerned, err := sets.AnyMatchWithError(reading); concerned || err != nil {
			return concerned, err
		}
	}
	return false, nil
}

// readings are what upstreams commonly take a request for, if that is not how Caddy's matchers see it: a method in lower
// case for that method, a WebSocket by extended CONNECT (RFC 8441, RFC 9220) for the GET that the upstream receives,
// a path with a slash behind it for the one without.
func (m *tierMatch) readings(r *http.Request) []*http.Request {
	var list []*http.Request
	method := strings.ToUpper(r.Method)
	if method == http.MethodConnect && tunnelled(r) {
		method = http.MethodGet
	}
	if method != r.Method {
		c := *r
		c.Method = method
		list = append(list, &c)
		r = &c
	}
	if path := strings.TrimRight(r.URL.Path, "/"); m.looks&facetPath != 0 && path != "" && path != r.URL.Path {
		c := *r
		c.URL = &url.URL{Path: path, RawQuery: r.URL.RawQuery}
		list = append(list, &c)
	}
	return list
}

// tunnelled reports whether a CONNECT asks for a protocol of its own.
func tunnelled(r *http.Request) bool {
	return r.ProtoMajor == 2 && len(r.Header[":protocol"]) > 0 || r.ProtoMajor >= 3 && !strings.HasPrefix(r.Proto, "HTTP/")
}
