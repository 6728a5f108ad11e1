package tieredlimit

import (
	"strings"

	"go.uber.org/zap"
)

// warnAtLoad reports, once per configuration and kind, what will not do what its writer may expect.
func (h *Handler) warnAtLoad() {
	switch h.mode {
	case modeOff:
		return
	case modeInert:
		if h.app.firstWarning("inert") {
			h.logger.Warn("tiered_limit is DISABLED: it is not stated which proxies stand in front of this server, so no client "+
				"address can be trusted, and any default would either let clients forge theirs or throw everybody into one "+
				"bucket. Write trusted_hops 0 for a directly exposed server, else the number of entries that your own proxies "+
				"append to X-Forwarded-For (a Google external Application Load Balancer appends two: client, then forwarding "+
				"rule; so 2, plus 1 for each further proxy), or set trusted_proxies on the server",
				zap.String("stack", h.stackLabel))
		}
		return
	}
	if h.needsClient() && h.topology.Hops < 0 && h.server != nil && h.server.TrustedProxiesStrict <= 0 &&
		h.app.firstWarning("strict "+h.server.Name()) {
		h.logger.Warn("trusted_proxies is set without trusted_proxies_strict: Caddy's own client IP, as in access logs, is the "+
			"leftmost entry of the forwarding header, which callers can forge; tiered_limit reads it from the right, so the two "+
			"may name different clients. Set trusted_proxies_strict", zap.String("server", h.server.Name()))
	}
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

// looksBare tells whether a literal is named as one of Caddy's request placeholders or their shorthands are.
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
	case name == "http.vars.client_ip" && (h.server == nil || h.server.TrustedProxiesStrict <= 0):
		why = "is the leftmost entry of the forwarding header, which callers can forge, as long as the server has no " +
			"trusted_proxies_strict"
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

// behindProxy tells whether the configuration states a proxy in front.
func (h *Handler) behindProxy() bool {
	return h.topology.Hops > 0 || h.topology.Trusted != nil
}
