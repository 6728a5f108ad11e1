package tieredlimit

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// location is where a handler stands in the configuration, and so which counters are its own.
type location struct {
	stack      string // the name, or a fingerprint with a leading dot
	label      string // for people: the name, or host and listen address
	namedRoute bool
}

// findLocation says which stack the handler is. An unnamed one is known by its server's listen addresses, the hosts of
// its outermost route, its own configuration, and its ordinal among equal ones there; by nothing else.
func (h *Handler) findLocation(ctx caddy.Context, config []byte) (location, error) {
	route, where := currentRoute(h.server)
	p := location{stack: h.Name, label: h.Name, namedRoute: where == inNamedRoute}
	var listen, hosts []string
	if h.server != nil {
		listen = slices.Sorted(slices.Values(h.server.Listen))
	}
	if route != nil {
		hosts = routeHosts(route)
	}
	h.site = unnamedLabel(listen, hosts)
	if p.namedRoute {
		h.site = "a named route"
	}
	if h.Name != "" {
		return p, nil
	}
	if p.namedRoute {
		return p, errors.New("a tiered_limit inside a named route needs a name, since the route may be invoked from many places")
	}
	site := fmt.Sprintf("%q %q", listen, hosts)
	equal := site + " " + string(config)
	sum := sha256.Sum256(fmt.Appendf(nil, "%s %d", equal, h.app.ordinal(equal)))
	p.stack = "." + hex.EncodeToString(sum[:16])
	p.label = h.site
	if ordinal := h.app.ordinal("label " + p.label); ordinal > 1 {
		p.label += " #" + strconv.Itoa(ordinal)
	}
	return p, nil
}

// unnamedLabel tells people and metrics which unnamed stack is meant. Several may have one; they are numbered.
func unnamedLabel(listen, hosts []string) string {
	label := "*"
	if len(hosts) > 0 {
		label = hosts[0]
	}
	if len(listen) > 0 {
		label += " " + listen[0]
	}
	return label
}

// routeKind says in which of a server's lists a route stands.
type routeKind uint8

const (
	inRoutes routeKind = iota
	inErrors
	inNamedRoute
)

// currentRoute finds the route that is being provisioned: Caddy takes the raw handlers out of each route as it loads
// them, server's routes first, then error routes, then named ones, so it is the first that still has them.
func currentRoute(server *caddyhttp.Server) (*caddyhttp.Route, routeKind) {
	if server == nil {
		return nil, inRoutes
	}
	for i := range server.Routes {
		if server.Routes[i].HandlersRaw != nil {
			return &server.Routes[i], inRoutes
		}
	}
	if server.Errors != nil {
		for i := range server.Errors.Routes {
			if server.Errors.Routes[i].HandlersRaw != nil {
				return &server.Errors.Routes[i], inErrors
			}
		}
	}
	if len(server.NamedRoutes) > 0 {
		return nil, inNamedRoute
	}
	return nil, inRoutes
}

// routeHosts lists the hosts that a route matches, sorted, in lower case.
func routeHosts(route *caddyhttp.Route) []string {
	var hosts []string
	for _, set := range route.MatcherSets {
		for _, m := range set {
			switch m := m.(type) {
			case *caddyhttp.MatchHost:
				hosts = append(hosts, *m...)
			case caddyhttp.MatchHost:
				hosts = append(hosts, m...)
			}
		}
	}
	for i := range hosts {
		hosts[i] = strings.ToLower(hosts[i])
	}
	slices.Sort(hosts)
	return slices.Compact(hosts)
}

// errorRoutes are the error routes that an error returned by a handler meets.
type errorRoutes struct {
	config *caddyhttp.HTTPErrorConfig // nil: none
	server bool                       // they are the server's, not a subroute's
}

// findErrorRoutes finds the error routes of the innermost subroute that has some, else the server's. An error meets no
// others: a subroute whose error routes do not match it goes on as if there had been none.
func findErrorRoutes(ctx caddy.Context, server *caddyhttp.Server) errorRoutes {
	for _, module := range slices.Backward(ctx.Modules()) {
		if sub, ok := module.(*caddyhttp.Subroute); ok && sub.Errors != nil {
			return errorRoutes{config: sub.Errors}
		}
	}
	if server == nil {
		return errorRoutes{}
	}
	return errorRoutes{config: server.Errors, server: true}
}
