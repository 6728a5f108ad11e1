package tieredlimit

import (
	"errors"
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
	literal    caddyhttp.MatchPath // those of them without a wildcard
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
	for _, p := range e.paths {
		if !strings.Contains(p, "*") {
			e.literal = append(e.literal, p)
		}
	}
	if err := errors.Join(e.paths.Provision(ctx), e.literal.Provision(ctx)); err != nil {
		return e, err
	}
	var err error
	e.clients, err = parseClients("exempt_clients", h.ExemptClients, h.topology.NAT64)
	return e, err
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

// path reports whether the request's path is exempt. Caddy judges a cleaned and decoded path but forwards it as sent, so
// both must be harmless: the cleaned one matches, and the one as sent means the same to every upstream.
func (e *exemptions) path(r *http.Request) bool {
	if len(e.paths) == 0 {
		return false
	}
	sent := sentPath(r)
	if ambiguousPath(sent) || ambiguousBefore(r) {
		return false
	}
	patterns := e.paths
	if behind, found := behindAuthority(sent); found {
		if strings.Trim(behind, "/") != "" {
			return false
		}
		patterns = e.literal // with a host of the caller's choice in front, any path ends with .css
	}
	for _, field := range pathFields {
		if _, there := r.Header[field]; there {
			return false
		}
	}
	matched, err := patterns.MatchWithError(r)
	return err == nil && matched
}
