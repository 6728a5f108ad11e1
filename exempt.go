package tieredlimit

import (
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
		e.paths = append(e.paths, p)
		switch bare := strings.TrimRight(p, "/"); {
		case strings.HasSuffix(p, "*") || bare == "":
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
		p, err := parsePrefix(s)
		if err != nil {
			return e, err
		}
		e.clients = append(e.clients, p)
	}
	return e, nil
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

// ambiguousPath tells whether a path as sent holds an encoded slash, backslash or dot, a bare backslash, or a dot
// segment.
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
			case "2f", "5c", "2e":
				return true
			}
		case '/':
			segment, _, _ := strings.Cut(escaped[i+1:], "/")
			segment, _, _ = strings.Cut(segment, ";") // some upstreams drop parameters before they resolve dots
			if segment == "." || segment == ".." {
				return true
			}
		}
	}
	return false
}

// isPreflight tells whether a request is a CORS preflight as browsers send it (Fetch standard, CORS-preflight fetch):
// OPTIONS with Origin and Access-Control-Request-Method, without a body, credentials, or a field by which some
// frameworks take another method from the request.
func isPreflight(r *http.Request) bool {
	if r.Method != http.MethodOptions || r.ContentLength != 0 || len(r.TransferEncoding) > 0 {
		return false
	}
	if !hasField(r, "Origin") || !hasField(r, "Access-Control-Request-Method") {
		return false
	}
	for _, field := range [...]string{"Authorization", "Cookie", "X-Http-Method-Override", "X-Http-Method", "X-Method-Override"} {
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
