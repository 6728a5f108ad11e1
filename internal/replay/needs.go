package replay

import (
	"net/http"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// needs are what the matchers and keys of a plan look at in a request. If it is all well known, one prepared request
// can be used over and over, and only some header fields need to be read.
type needs struct {
	headers    []string // canonical
	everything bool     // all header fields, and a request that is prepared as Caddy prepares it

	telling func(name string) bool // as in StackInfo
}

// settle completes the fields: by the length, which makes a request of a line what it was, and by the forwarding chains,
// which are always studied.
func (n *needs) settle() {
	n.headers = slices.Concat(n.headers, studiedHeaders[:], []string{"Content-Length"})
}

// knownPlaceholders are those that a request that is used over and over answers rightly.
var knownPlaceholders = map[string]bool{
	"http.request.method": true, "http.request.proto": true, "http.request.scheme": true, "http.request.host": true,
	"http.request.port": true, "http.request.hostport": true, "http.request.remote.host": true, "http.request.uri": true,
	"http.request.uri.path": true, "http.request.uri.query": true, "http.tiered_limit.client_ip": true,
	userPlaceholder: true,
}

// placeholder adds what a placeholder needs.
func (n *needs) placeholder(name string) {
	if field := HeaderOf(name); field != "" {
		n.headers = append(n.headers, field)
		return
	}
	if !knownPlaceholders[name] && !strings.HasPrefix(name, "http.request.uri.query.") {
		n.everything = true
	}
}

// matchers adds what matchers need. Those that look at no more than a request's plain fields are known.
func (n *needs) matchers(sets caddyhttp.MatcherSets) {
	for _, set := range sets {
		for _, m := range set {
			switch m := m.(type) {
			case *caddyhttp.MatchHost, caddyhttp.MatchHost, *caddyhttp.MatchPath, caddyhttp.MatchPath,
				*caddyhttp.MatchMethod, caddyhttp.MatchMethod, *caddyhttp.MatchProtocol, caddyhttp.MatchProtocol,
				*caddyhttp.MatchQuery, caddyhttp.MatchQuery, *caddyhttp.MatchRemoteIP:
			case *caddyhttp.MatchHeader:
				n.matchHeader(*m)
			case caddyhttp.MatchHeader:
				n.matchHeader(m)
			case *caddyhttp.MatchNot:
				n.matchers(m.MatcherSets)
			default:
				n.everything = true
			}
		}
	}
}

func (n *needs) matchHeader(m caddyhttp.MatchHeader) {
	for name := range m {
		n.headers = append(n.headers, http.CanonicalHeaderKey(name))
	}
}
