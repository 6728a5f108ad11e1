package tieredlimit

import (
	"fmt"
	"net/http"
	"net/netip"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// exemptions say which requests are neither limited nor counted.
type exemptions struct {
	paths      caddyhttp.MatchPath
	clients    []netip.Prefix
	preflights bool
}

func compileExemptions(ctx caddy.Context, h *Handler) (exemptions, error) {
	e := exemptions{preflights: h.Preflight != "count"}
	for _, p := range h.Exempt {
		p, err := exemptPattern(p)
		if err != nil {
			return e, err
		}
		e.paths = append(e.paths, p)
		switch bare := strings.TrimRight(p, "/"); {
		case strings.HasSuffix(bare, "*") || bare == "":
			// Without its slash such a pattern would be a prefix, and exempt far more.
		case bare == p:
			e.paths = append(e.paths, p+"/")
		default:
			e.paths = append(e.paths, bare)
		}
	}
	if err := e.paths.Provision(ctx); err != nil {
		return e, err
	}
	for _, s := range h.ExemptClients {
		p, err := parsePrefix(s, h.topology.NAT64)
		if err != nil {
			return e, err
		}
		e.clients = append(e.clients, p)
	}
	return e, nil
}

// exemptPattern puts in the placeholders of a pattern. They must have a value at load: an empty one would exempt other
// paths than were meant, and one that comes with the request whatever the caller likes.
func exemptPattern(p string) (string, error) {
	value, err := caddy.NewReplacer().ReplaceOrErr(p, true, true)
	if err != nil {
		return "", fmt.Errorf("exempt %q: only placeholders that have a value at load can be used: %w", p, err)
	}
	if err := checkExemptPath(value); err != nil {
		return "", err
	}
	return value, nil
}

// everything tells whether the patterns or the ranges exempt all requests of an address family.
func (e *exemptions) everything() bool {
	for _, p := range e.paths {
		if p == "*" || p == "/*" || p == "**" {
			return true
		}
	}
	for _, p := range e.clients {
		if p.Bits() == 0 {
			return true
		}
	}
	return false
}

// path tells whether the request's path is exempt. Caddy judges a cleaned and decoded path but forwards it as sent, so
// both must be harmless: the cleaned one matches, and the one as sent has nothing that cleaning would change the
// meaning of.
func (e *exemptions) path(r *http.Request) bool {
	if len(e.paths) == 0 || ambiguousPath(r.URL.EscapedPath()) {
		return false
	}
	matched, err := e.paths.MatchWithError(r)
	return err == nil && matched
}

// ambiguousPath tells whether a path as sent holds an encoded slash, backslash or dot, a bare backslash, a dot segment,
// or what an upstream may make one of these of.
func ambiguousPath(escaped string) bool {
	for i := 0; i < len(escaped); i++ {
		switch escaped[i] {
		case '\\':
			return true
		case '%':
			if i+2 >= len(escaped) {
				return true
			}
			switch strings.ToLower(escaped[i+1 : i+3]) {
			case "2f", "5c", "2e", // slash, backslash, dot
				"25",       // percent: an upstream that decodes twice sees something else
				"00",       // NUL: some upstreams end the path there
				"c0", "c1": // never in UTF-8, but some decoders make dots and slashes of them
				return true
			}
		case '/':
			segment, _, _ := strings.Cut(escaped[i+1:], "/")
			// Some upstreams drop parameters, blanks and control characters before they resolve dots.
			if end := strings.IndexAny(segment, ";%"); end >= 0 {
				segment = segment[:end]
			}
			if segment == "." || segment == ".." {
				return true
			}
		}
	}
	return false
}

// isPreflight tells whether a request is a CORS preflight as browsers send it (Fetch standard, CORS-preflight fetch):
// OPTIONS with Origin and Access-Control-Request-Method, without a body, credentials, a field by which some frameworks
// take another method from the request, or one that would turn the connection into a tunnel.
func isPreflight(r *http.Request) bool {
	if r.Method != http.MethodOptions || r.ContentLength != 0 || len(r.TransferEncoding) > 0 {
		return false
	}
	if !hasField(r, "Origin") || !hasField(r, "Access-Control-Request-Method") {
		return false
	}
	for _, field := range [...]string{"Authorization", "Cookie", "X-Http-Method-Override", "X-Http-Method",
		"X-Method-Override", "Upgrade"} {
		if _, there := r.Header[field]; there {
			return false
		}
	}
	return true
}

func hasField(r *http.Request, canonical string) bool {
	values := r.Header[canonical]
	return len(values) > 0 && values[0] != ""
}
