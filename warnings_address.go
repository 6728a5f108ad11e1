package tieredlimit

import (
	"regexp"
	"slices"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"
)

// addressMatcher is a matcher of Caddy's that goes by an address, by its name: client_ip or remote_ip.
type addressMatcher string

const (
	matchesPeer   addressMatcher = "remote_ip" // the other end of the connection
	matchesClient addressMatcher = "client_ip" // the client as Caddy finds it
)

// addressMatchers lists what sets of matchers look at, also within not and in expressions, each once.
func addressMatchers(sets caddyhttp.MatcherSets) []addressMatcher {
	var found []addressMatcher
	add := func(names ...addressMatcher) {
		for _, name := range names {
			if !slices.Contains(found, name) {
				found = append(found, name)
			}
		}
	}
	for _, set := range sets {
		for _, m := range set {
			switch m := m.(type) {
			case *caddyhttp.MatchNot:
				add(addressMatchers(m.MatcherSets)...)
			case *caddyhttp.MatchExpression:
				add(addressesIn(m.Expr)...)
			case *caddyhttp.VarsMatcher:
				for name := range *m {
					add(addressesIn(name)...)
				}
			case *caddyhttp.MatchVarsRE:
				for name := range *m {
					add(addressesIn(name)...)
				}
			case caddy.Module:
				switch m.CaddyModule().ID {
				case "http.matchers.remote_ip":
					add(matchesPeer)
				case "http.matchers.client_ip":
					add(matchesClient)
				}
			}
		}
	}
	slices.Sort(found)
	return found
}

// Names by which expressions and variables speak of an address: the functions, the placeholders and Caddy's variable.
var (
	peerName   = regexp.MustCompile(`\bremote_ip\s*\(|\{(http\.request\.remote\.host[^}]*|remote_host)\}`)
	clientName = regexp.MustCompile(`\bclient_ip\s*\(|\{(http\.vars\.client_ip|vars\.client_ip|client_ip)\}|^client_ip$`)
)

// addressesIn lists the addresses that a text speaks of.
func addressesIn(text string) []addressMatcher {
	var found []addressMatcher
	if clientName.MatchString(text) {
		found = append(found, matchesClient)
	}
	if peerName.MatchString(text) {
		found = append(found, matchesPeer)
	}
	return found
}

// misled says why a matcher that goes by an address does not do what it seems to. It is empty where the address is that of
// the client.
func (h *Handler) misled(m addressMatcher) string {
	t := &h.topology
	strict := h.server != nil && h.server.TrustedProxiesStrict > 0
	switch {
	case m == matchesPeer && (t.Hops > 0 || t.Hops < 0 && t.Limited()):
		return "is that of the proxy in front, and so the same for all clients"
	case m == matchesClient && t.Limited() && !strict:
		return "is the leftmost entry of the forwarding header as long as the server has no trusted_proxies_strict, and callers " +
			"can forge that"
	case m == matchesClient && !t.Limited() && t.Hops > 0:
		return "is that of the proxy in front as long as the server has no trusted_proxies, and so the same for all clients"
	}
	return ""
}

// warnAddressMatchers reports matchers by address that are misled, of the tiers and of the routes around the handler.
func (h *Handler) warnAddressMatchers(p place) {
	for _, t := range h.tiers {
		h.warnAddressMatcher("match of the tier", t.name, t.match.sets)
	}
	for i := range p {
		h.warnAddressMatcher("matcher in front of tiered_limit", "", p[i].route().MatcherSets)
	}
}

func (h *Handler) warnAddressMatcher(where, tier string, sets caddyhttp.MatcherSets) {
	for _, m := range addressMatchers(sets) {
		why := h.misled(m)
		if why == "" || !h.app.firstWarning("matcher "+h.stackLabel+" "+tier+" "+string(m)) {
			continue
		}
		fields := []zap.Field{zap.String("stack", h.stackLabel), zap.String("matcher", string(m))}
		cure := "Clients that are not to be limited belong into exempt_clients, those that only some tiers concern into clients"
		if tier != "" {
			cure = "Write clients or clients not in the tier instead, or exempt_clients"
			fields = append(fields, zap.String("tier", tier))
		}
		h.logger.Warn("the "+where+" goes by "+string(m)+", which "+why+": requests may be limited that should not be, or not limited "+
			"that should be. "+cure+", which go by the client as tiered_limit finds it", fields...)
	}
}
