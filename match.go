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
	facetMethod
	facets = facetPath | facetQuery | facetMethod
)

// String says what of a request is meant, at the beginning of a sentence.
func (f facet) String() string {
	var names []string
	for i, name := range [...]string{"path", "query", "method"} {
		if f&(1<<i) != 0 {
			names = append(names, name)
		}
	}
	return "its " + strings.Join(names, " and ")
}

// tierMatch says which requests a tier concerns. A tier is there to limit, so where a matcher cannot tell what a request
// means to the upstream, the tier concerns it: what is not certain matches, also inside not.
type tierMatch struct {
	sets    caddyhttp.MatcherSets
	literal bool     // they decide as they are
	looks   facet    // at what some matcher looks
	params  []string // the parameters that query matchers name
	bare    []string // paths that patterns name with a slash behind them

	// certain are the sets without the matchers that look at what is not certain, by facets.
	certain [facets + 1]caddyhttp.MatcherSets
}

// compileMatch loads the matchers of a tier or a share, which has them in its field MatcherSetsRaw.
func compileMatch(ctx caddy.Context, owner any, raw caddyhttp.RawMatcherSets, mode string) (tierMatch, error) {
	m := tierMatch{literal: mode == "literal"}
	if len(raw) == 0 {
		return m, nil
	}
	looks := make(map[string]facet) // by the name of the matcher, in any set
	for _, set := range raw {
		for name, raw := range set {
			looks[name] |= m.study(name, raw)
			m.looks |= looks[name]
		}
	}
	loaded, err := ctx.LoadModule(owner, "MatcherSetsRaw")
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

// checkPaths refuses path matchers that no path is like, also inside not: Caddy compares with paths that begin with a slash.
func checkPaths(raw []map[string]json.RawMessage) error {
	for _, set := range raw {
		for name, raw := range set {
			switch name {
			case "path":
				var patterns []string
				_ = json.Unmarshal(raw, &patterns) // Caddy says what is wrong with it
				for _, pattern := range patterns {
					if !strings.HasPrefix(pattern, "/") && !strings.HasPrefix(pattern, "*") && !strings.HasPrefix(pattern, "{") {
						return fmt.Errorf("match path %q is like no path, since all begin with a slash; write /%s", pattern, pattern)
					}
				}
			case "not":
				var sets []map[string]json.RawMessage
				_ = json.Unmarshal(raw, &sets)
				if err := checkPaths(sets); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// rawSets are matcher sets as Caddy has them, by plain types.
func rawSets(raw caddyhttp.RawMatcherSets) []map[string]json.RawMessage {
	sets := make([]map[string]json.RawMessage, len(raw))
	for i, set := range raw {
		sets[i] = set
	}
	return sets
}

// study finds out what a matcher looks at, by its name and configuration.
func (m *tierMatch) study(name string, raw json.RawMessage) facet {
	switch name {
	case "path":
		var patterns []string
		if json.Unmarshal(raw, &patterns) == nil {
			for _, pattern := range patterns {
				if bare, slashed := strings.CutSuffix(strings.TrimSuffix(pattern, "*"), "/"); slashed && bare != "" {
					m.bare = append(m.bare, bare)
				}
			}
		}
		return facetPath
	case "path_regexp", "file":
		return facetPath
	case "method":
		return facetMethod
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

// studyText finds out what an expression, or a matcher that may use placeholders, looks at. Of one that nobody knows, and
// of variables, which routes in front may have set, anything must be supposed.
func studyText(name, text string) facet {
	var looks facet
	switch name {
	case "header", "header_regexp", "host", "protocol", "remote_ip", "client_ip", "tls":
	case "expression":
		for word, f := range map[string]facet{
			"path": facetPath, "file": facetPath, "url": facetPath | facetQuery, "query": facetQuery, "method": facetMethod, "vars": facets,
		} {
			if strings.Contains(text, word) {
				looks |= f
			}
		}
	case "vars", "vars_regexp":
		if !strings.Contains(text, "{") {
			return facets
		}
	default:
		return facets
	}
	for word, f := range map[string]facet{
		"uri.query": facetQuery, "uri.path": facetPath, "uri}": facetPath | facetQuery, "orig_uri": facetPath | facetQuery,
		"method}": facetMethod, "http.vars.": facets,
	} {
		if strings.Contains(text, word) {
			looks |= f
		}
	}
	return looks
}

// doubts are the parts of a request that the matchers look at and that upstreams may read otherwise.
func (m *tierMatch) doubts(r *http.Request) facet {
	if m.literal {
		return 0
	}
	var doubts facet
	if m.looks&facetPath != 0 && (ambiguousPath(sentPath(r)) || ambiguousBefore(r)) {
		doubts |= facetPath
	}
	if m.looks&facetQuery != 0 && r.URL.RawQuery != "" && m.ambiguousQuery(r.URL.RawQuery) {
		doubts |= facetQuery
	}
	if m.looks&facetMethod != 0 && overridesMethod(r) {
		doubts |= facetMethod
	}
	return doubts
}

// ambiguousQuery reports whether servers read a query differently: as a whole, or one of the parameters that are named.
func (m *tierMatch) ambiguousQuery(query string) bool {
	if len(query) > maxKeyText || strings.ContainsAny(query, ";#") || !validEscapes(query) ||
		strings.Count(query, "&") >= maxQueryPairs {
		return true
	}
	var scratch [128]byte
	for _, param := range m.params {
		if _, found := appendQuery(scratch[:0], query, param, false); found == uncertain {
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
	if concerned || err != nil || m.literal {
		return concerned, err
	}
	return m.otherwise(sets, r)
}

// otherwise reports whether a request is one that the tier is for in another reading: by the method that the upstream
// receives, or by a path that it commonly takes for the same.
func (m *tierMatch) otherwise(sets caddyhttp.MatcherSets, r *http.Request) (bool, error) {
	method := upstreamMethod(r)
	var paths []string
	if m.looks&facetPath != 0 {
		paths = m.paths(r)
	}
	if method == r.Method && len(paths) == 0 {
		return false, nil
	}
	// Placeholders look at the request as well, so it has to be another one for a moment.
	sentMethod, sentURL := r.Method, *r.URL
	defer func() { r.Method, *r.URL = sentMethod, sentURL }()
	r.Method = method
	if method != sentMethod {
		if concerned, err := sets.AnyMatchWithError(r); concerned || err != nil {
			return concerned, err
		}
	}
	for _, path := range paths {
		r.URL.Path, r.URL.RawPath = path, ""
		if concerned, err := sets.AnyMatchWithError(r); concerned || err != nil {
			return concerned, err
		}
	}
	return false, nil
}

// paths are what upstreams commonly take a path for, if that is not how Caddy's matchers see it: without the slash at
// its end or with one, with single slashes, in lower case, without what looks like an authority in front, in plain letters,
// or as another field of the request has it.
func (m *tierMatch) paths(r *http.Request) []string {
	var list []string
	add := func(path string) {
		plain := plainPath(path)
		slashed := false
		for _, bare := range m.bare {
			slashed = slashed || strings.EqualFold(plain, bare)
		}
		if slashed {
			plain += "/"
		}
		if plain != r.URL.Path {
			list = append(list, plain)
		}
	}
	add(r.URL.Path)
	if strings.Contains(r.URL.Path, "//") {
		add(caddyhttp.CleanPath(r.URL.Path, true))
	}
	if behind, found := behindAuthority(r.URL.Path); found {
		add(behind)
	}
	for _, field := range pathFields {
		for _, line := range r.Header[field] {
			if u, err := url.Parse(line); err == nil {
				add(u.Path)
			}
		}
	}
	return list
}

// upstreamMethod is the method that an upstream takes a request to have: a method in lower case is that method, a
// WebSocket by extended CONNECT (RFC 8441, RFC 9220) becomes a GET.
func upstreamMethod(r *http.Request) string {
	method := strings.ToUpper(r.Method)
	if method == http.MethodConnect && tunnelled(r) {
		return http.MethodGet
	}
	return method
}

// tunnelled reports whether a CONNECT asks for a protocol of its own.
func tunnelled(r *http.Request) bool {
	return r.ProtoMajor == 2 && len(r.Header[":protocol"]) > 0 || r.ProtoMajor >= 3 && !strings.HasPrefix(r.Proto, "HTTP/")
}
