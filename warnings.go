package tieredlimit

import (
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"

	"github.com/tieredlimit/caddy-tieredlimit/internal/clientip"
)

// warnAtLoad reports, once per configuration and kind, what will not do what its writer may expect.
func (h *Handler) warnAtLoad(p place) {
	switch h.mode {
	case modeOff:
		return
	case modeInert:
		if h.app.firstWarning("inert") {
			h.logger.Error("tiered_limit is DISABLED: it is not stated which proxies stand in front of this server, so no client "+
				"address can be trusted, and any default would either let clients forge theirs or throw everybody into one "+
				"bucket. Write trusted_hops 0 for a directly exposed server, else the number of entries that your own proxies "+
				"append to X-Forwarded-For (a Google external Application Load Balancer appends two: client, then forwarding "+
				"rule; so 2, plus 1 for each further proxy), or set trusted_proxies on the server",
				zap.String("stack", h.stackLabel))
		}
		return
	}
	h.warnStrictness()
	h.warnSingleAddress()
	h.warnAddressMatchers(p)
	h.warnOrder(p)
	h.warnApart(p)
	if h.exempt.everything() {
		h.logger.Warn("exempt or exempt_clients exempts every request, so nothing is limited", zap.String("stack", h.stackLabel))
	}
	for _, t := range h.tiers {
		for i := range t.keys {
			for _, part := range t.keys[i].parts {
				if len(part) == 1 && part[0].looksBare() && h.app.firstWarning("bare "+part[0].text) {
					h.logger.Warn("a key part looks like a placeholder without its braces: it is the same text for every request; "+
						"write {"+part[0].text+"} for its value",
						zap.String("stack", h.stackLabel), zap.String("tier", t.name), zap.String("part", part[0].text))
				}
				for _, s := range part {
					h.warnPlaceholder(t.name, s)
				}
			}
		}
	}
}

// warnStrictness reports a server whose own idea of the client is another one than that of the stack.
func (h *Handler) warnStrictness() {
	if !h.needsClient() || h.topology.Hops >= 0 || h.server == nil || h.server.TrustedProxiesStrict > 0 ||
		!h.app.firstWarning("strict "+h.server.Name()) {
		return
	}
	option := "trusted_proxies"
	if h.topology.Trusted == nil {
		option = "trusted_proxies_unix"
	}
	h.logger.Warn(option+" is set without trusted_proxies_strict: Caddy's own client IP, as in access logs, is the "+
		"leftmost entry of the forwarding header, which callers can forge; tiered_limit reads it from the right, so the two "+
		"may name different clients. Set trusted_proxies_strict", zap.String("server", h.server.Name()))
}

// warnSingleAddress reports a header with a single address that is believed from everybody: unlike one that proxies append
// to, it is the caller's own word where no proxy has replaced it.
func (h *Handler) warnSingleAddress() {
	t := &h.topology
	if !h.needsClient() || t.Hops != 1 || t.Limited() || t.Header == clientip.DefaultHeader || t.Header == clientip.ForwardedHeader ||
		h.onlyUnix() || !h.app.firstWarning("single "+t.Header) {
		return
	}
	h.logger.Warn("the client is read from "+t.Header+", which has a single address: whoever reaches this server past the proxy can "+
		"write it, and so have a limit of its own for every request. Set trusted_proxies on the server to the proxy's addresses; the "+
		"header is then believed only from there", zap.String("stack", h.stackLabel), zap.String("header", t.Header))
}

// onlyUnix reports whether the server listens on unix sockets alone, which nobody reaches from the network.
func (h *Handler) onlyUnix() bool {
	if h.server == nil || len(h.server.Listen) == 0 {
		return false
	}
	return !slices.ContainsFunc(h.server.Listen, func(listen string) bool {
		addr, err := caddy.ParseNetworkAddress(listen)
		return err != nil || !addr.IsUnixNetwork()
	})
}

// looksBare reports whether a literal is named as one of Caddy's request placeholders or their shorthands are.
func (s segment) looksBare() bool {
	if s.kind != segmentLiteral {
		return false
	}
	switch s.text {
	case "client_ip", "remote_host", "remote_ip", "host", "hostport", "uri", "path", "query", "user":
		return true
	}
	for _, prefix := range [...]string{"http.", "header.", "query.", "cookie.", "vars.", "path.", "re.", "file.", "env."} {
		if strings.HasPrefix(s.text, prefix) {
			return true
		}
	}
	return false
}

// warnPlaceholder reports a placeholder of a key that does not name the client as tiered_limit does, and one that Caddy
// alone cannot fill.
func (h *Handler) warnPlaceholder(tier string, s segment) {
	if s.kind == segmentLiteral || s.kind == segmentClient {
		return
	}
	name, why := s.name(), ""
	switch {
	case name == "http.vars.client_ip":
		if why = h.caddysClient(); why == "" {
			return
		}
	case isPeerHost(name) && h.behindProxy():
		why = "is the address of the proxy in front, so that all clients share one bucket"
	case name == headerPrefix+"X-Forwarded-For":
		why = "is written by callers, who get a new bucket for each value"
	case !strings.Contains(name, "."):
		if h.app.firstWarning("placeholder " + name) {
			h.logger.Warn("a key uses a placeholder that only a map directive or a plugin can fill; for the client's address write {"+
				clientPlaceholder+"}",
				zap.String("stack", h.stackLabel), zap.String("tier", tier), zap.String("placeholder", "{"+name+"}"))
		}
		return
	default:
		return
	}
	if h.app.firstWarning("placeholder " + name) {
		h.logger.Warn("a key uses {"+name+"}, which "+why+"; for the client's address write {"+clientPlaceholder+"}",
			zap.String("stack", h.stackLabel), zap.String("tier", tier), zap.String("placeholder", "{"+name+"}"))
	}
}

// caddysClient says what Caddy's own client address is where it is not that of the client. It is empty otherwise.
func (h *Handler) caddysClient() string {
	strict := h.server != nil && h.server.TrustedProxiesStrict > 0
	switch t := &h.topology; {
	case t.Limited() && strict:
		return ""
	case t.Limited():
		return "is the leftmost entry of the forwarding header, which callers can forge, as long as the server has no " +
			"trusted_proxies_strict"
	case t.Hops > 0:
		return "is the address of the proxy in front as long as the server has no trusted_proxies, so that all clients share one bucket"
	case t.Hops == 0:
		return "knows nothing of ipv6_prefix, so that an IPv6 client has a bucket for each of its addresses"
	}
	return "is the address of the connection as long as the server has no trusted_proxies: behind a proxy all clients share one " +
		"bucket, and without one an IPv6 client has a bucket for each of its addresses"
}

// behindProxy reports whether the configuration states a proxy in front.
func (h *Handler) behindProxy() bool { return h.topology.Hops > 0 || h.topology.Limited() }
