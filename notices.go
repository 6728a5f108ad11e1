package tieredlimit

import (
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"

	"github.com/tieredlimit/caddy-tieredlimit/internal/clientip"
)

// refusalLog lets one line a second through for a tier.
type refusalLog struct {
	second atomic.Int64 // the Unix second of the latest line
	since  atomic.Int64 // refusals since then
}

// lateSeconds is how many seconds a refusal's time may be behind the latest line's without being a line of its own.
// Requests are not refused in the order in which they came, least of all by a store that is far away; a time that is
// further behind means that the clock was set back.
const lateSeconds = 60

// next counts a refusal and reports whether to write a line now, and for how many refusals it stands.
func (l *refusalLog) next(now time.Time) (count int64, write bool) {
	l.since.Add(1)
	second := now.Unix()
	last := l.second.Load()
	if second <= last && last-second < lateSeconds || !l.second.CompareAndSwap(last, second) {
		return 0, false
	}
	return l.since.Swap(0), true
}

// refusal is a refusal, real or dry, as far as it is counted and told.
type refusal struct {
	tier     *tier
	identity []byte
	dry      bool
	at       time.Time // on the store's clock
}

// noteRefusal counts a refusal, announces it where that is asked for, and logs it if its tier has had no line in this
// second.
func (h *Handler) noteRefusal(rec *record, r refusal, now time.Time) {
	t, dry := r.tier, r.dry
	t.meter.refused(dry)
	print := fingerprint(r.identity)
	if i := t.meter.worst.add(print, r.at, t.longest); i >= 0 && h.LogKeys {
		t.meter.worst.name(i, print, rec.keyText(t))
	}
	if h.herald != nil && !dry {
		h.announce(rec, &r)
	}
	count, write := t.log.next(now)
	if !write {
		return
	}
	c := h.logger.Check(zap.InfoLevel, "rate limit reached")
	if c == nil {
		return
	}
	fields := []zap.Field{
		zap.String("stack", h.stackLabel), zap.String("tier", t.name),
		zap.Bool("dry_run", dry), zap.Int64("refusals", count),
	}
	if h.LogKeys {
		fields = append(fields, zap.Strings("key", rec.keyText(t)))
		if t.usesClient {
			fields = append(fields, zap.String("client_ip", rec.clientText()))
		}
	}
	c.Write(fields...)
}

// maxLoggedPart is how many bytes of a key's part are logged at most.
const maxLoggedPart = 256

// keyText is the parts of the key that a tier counted the request under, for a log that may hold them.
func (rec *record) keyText(t *tier) []string {
	for i := range t.keys {
		k := &t.keys[i]
		switch _, found := k.appendIdentity(nil, rec); found {
		case absent:
			continue
		case uncertain:
			return []string{uncertainKey}
		}
		texts := make([]string, 0, len(k.parts))
		for _, part := range k.parts {
			var buf []byte
			for j := range part {
				buf, _ = part[j].appendValue(buf, rec)
			}
			texts = append(texts, string(buf[:min(len(buf), maxLoggedPart)]))
		}
		return texts
	}
	return nil
}

// logOutcome adds to the access log, where the server has one, what became of the request. Of several stacks the one
// with the gravest outcome is logged, the latest of equals.
func (rec *record) logOutcome(out outcome, tier string) {
	rec.outcome = out
	if rec.h.server == nil || rec.h.server.Logs == nil {
		return
	}
	for p := rec.prev; p != nil; p = p.prev {
		if p.outcome.gravity() > out.gravity() {
			return
		}
	}
	extra, ok := rec.r.Context().Value(caddyhttp.ExtraLogFieldsCtxKey).(*caddyhttp.ExtraLogFields)
	if !ok {
		return
	}
	extra.Set(zap.String("tiered_limit_outcome", out.String()))
	if tier != "" {
		extra.Set(zap.String("tiered_limit_tier", tier))
	}
}

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
	if slices.ContainsFunc(t.keys, key.usesAuth) {
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
