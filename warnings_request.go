package tieredlimit

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/tieredlimit/caddy-tieredlimit/internal/clientip"
)

// noteClient counts and reports what was unusual about finding out who the client is. No address is logged unless log_keys
// allows it.
func (h *Handler) noteClient(r *http.Request, c clientip.Client) {
	if c.Fallback != clientip.None {
		h.meter.fallback(c.Fallback)
	}
	if c.Fallback.OfChain() && h.run.first(c.Fallback.String()) {
		h.warnUselessChain(r, c)
	}
	if h.topology.Hops == 0 && !h.run.forwardedSeen.Load() {
		if n := h.topology.ChainLength(r); n > 0 && h.run.forwardedSeen.CompareAndSwap(false, true) {
			h.logger.Warn("trusted_hops is 0, but a request carries a forwarding header; it is ignored, which is right for "+
				"a directly exposed server; behind a proxy all clients would share the proxy's limit",
				zap.String("stack", h.stackLabel), zap.Int("chain_length", n))
		}
	}
	if verdict, low := h.run.hops.Observe(&h.topology, r, c); low {
		h.logger.Warn("trusted_hops seems too low: every request so far was counted for one address while the entry to its "+
			"left differed; all clients may be sharing one limit. Compare chain_lengths with the proxies in front of this server "+
			"before raising it: a single caller who writes entries of his own looks the same, and a count too high lets callers "+
			"choose their address",
			zap.String("stack", h.stackLabel), zap.Int("trusted_hops", verdict.Hops), zap.Ints("chain_lengths", verdict.Lengths))
	}
	if verdict, missing := h.run.peers.Observe(&h.topology, r, c); missing {
		h.warnUntrustedPeer(verdict)
	}
}

// warnUselessChain reports a chain that could not be used.
func (h *Handler) warnUselessChain(r *http.Request, c clientip.Client) {
	fields := []zap.Field{
		zap.String("stack", h.stackLabel), zap.String("reason", c.Fallback.String()), zap.Int("chain_length", h.topology.ChainLength(r)),
	}
	if h.topology.Hops >= 0 {
		fields = append(fields, zap.Int("trusted_hops", h.topology.Hops))
	}
	h.logger.Warn("the forwarding chain cannot be used, so the peer is limited instead, apart from its own requests if there is a "+
		"chain; check trusted_hops or trusted_proxies against the proxies in front of this server", fields...)
}

// warnUntrustedPeer reports a peer that looks like a proxy and is not trusted.
func (h *Handler) warnUntrustedPeer(v clientip.PeerVerdict) {
	text := "a peer that is not in trusted_proxies sends a forwarding header that names one client after another; it is not believed, " +
		"so all of them share one limit. If the peer is a proxy of yours, add its addresses to trusted_proxies; a caller who makes " +
		"the header up looks the same, and is limited as one client rightly"
	if !v.Peer.IsValid() {
		text = "a peer without an address, as on a unix socket, sends a forwarding header that names one client after another; it is not " +
			"believed, so all of them share one limit. If the peer is a proxy of yours, set trusted_proxies_unix"
	}
	fields := []zap.Field{
		zap.String("stack", h.stackLabel), zap.Int("requests", v.Requests), zap.Int("clients", v.Clients),
	}
	if h.LogKeys && v.Peer.IsValid() {
		fields = append(fields, zap.String("peer", v.Peer.String()))
	}
	h.logger.Warn(text, fields...)
}

// noteSkipped counts a tier that could not tell whom to count, and explains the first one.
func (h *Handler) noteSkipped(t *tier) {
	t.meter.skip()
	if !h.run.first(t.skipped) {
		return
	}
	text := "every key of a tier is empty for a request, so the tier does not limit it; callers can leave a key out on " +
		"purpose, and a further key line, such as {" + clientPlaceholder + "}, catches them"
	if t.later != "" {
		text += t.later
	} else if slices.ContainsFunc(t.keys, key.usesAuth) {
		text += "; {http.auth.*} is known only behind an authentication handler, and tiered_limit runs before basic_auth " +
			"by default: put both into a route block, the authentication first, or change the order"
	}
	h.logger.Warn(text, zap.String("stack", h.stackLabel), zap.String("tier", t.name))
}

// noteUncertain counts a request whose key cannot be read with certainty, and explains the first one.
func (h *Handler) noteUncertain(t *tier) {
	t.meter.uncertain.Add(1)
	if h.run.first(t.uncertain) {
		h.logger.Warn("a key of a tier cannot be read with certainty, since servers would read different values or none; all "+
			"such requests are counted together", zap.String("stack", h.stackLabel), zap.String("tier", t.name))
	}
}

// noteCrowded reports, once a day, a tier whose store has no room for the counters of further identities.
func (h *Handler) noteCrowded(t *tier, states []State, now time.Time) {
	if !t.log.crowdedOn(now) {
		return
	}
	limit := slices.IndexFunc(states, func(s State) bool { return s.ByGroup })
	h.logger.Warn("there is no room for the counters of further identities of a tier: until its window ends they share counters, "+
		"those of clients by their network, so that some may be refused for what others did. If so many identities are real, raise "+
		"max_keys of the store; if an attacker makes them up, the known ones keep their own counters and nothing is to be done",
		zap.String("stack", h.stackLabel), zap.String("tier", t.name),
		zap.String("limit", fmt.Sprintf("%d/%s", t.spec.Limits[limit].Count, shortDuration(t.spec.Limits[limit].Window))),
		zap.Int64("counters", h.meter.held().tracked))
}

// usesAuth reports whether a key needs an authentication handler in front.
func (k key) usesAuth() bool {
	for _, part := range k.parts {
		for _, s := range part {
			if s.kind == segmentPlaceholder && strings.HasPrefix(s.text, authPrefix) {
				return true
			}
		}
	}
	return false
}

// warnUnknownPlaceholder reports a placeholder that nothing has set, once.
func (h *Handler) warnUnknownPlaceholder(name string) {
	if !strings.HasPrefix(name, authPrefix) && h.run.first("placeholder "+name) {
		h.logger.Warn("a placeholder in a key is not known, so it counts as empty",
			zap.String("stack", h.stackLabel), zap.String("placeholder", "{"+name+"}"))
	}
}
