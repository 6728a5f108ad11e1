package tieredlimit

import (
	"slices"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"
)

// refusalLog lets one line a second through for a tier, and one a day about a lack of room.
type refusalLog struct {
	second atomic.Int64 // the Unix second of the latest line
	since  atomic.Int64 // refusals since then

	crowded atomic.Int64 // the latest day, from 1, on which a lack of room was told
}

// crowdedOn notes that a tier has no room for further counters on the day of a time, and reports whether it is the first to
// be told of that day.
func (l *refusalLog) crowdedOn(now time.Time) bool {
	day := now.Unix()/86400 + 1
	last := l.crowded.Load()
	return day > last && l.crowded.CompareAndSwap(last, day)
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

// refusedClient is the address of the client of a refused request, whole, for whoever bans by it. It is empty unless log_keys
// allows it, and where the peer stands in for a client that is not known: that may be one's own proxy.
func (rec *record) refusedClient() string {
	if !rec.h.LogKeys || !rec.h.topology.Stated() {
		return ""
	}
	if rec.resolve(); !rec.client.Known() || rec.client.Fallback.OfChain() {
		return ""
	}
	return rec.client.Addr.String()
}

// announceStacks says once of each stack what is in force. Of one that is disabled its warning has said so.
func announceStacks(handlers []*Handler) {
	for _, s := range statusOf(handlers).Stacks {
		i := slices.IndexFunc(handlers, func(h *Handler) bool { return h.stackLabel == s.Stack && h.mode != modeInert })
		if i < 0 {
			continue
		}
		h := handlers[i]
		status := h.status()
		var tiers []string
		for _, t := range s.Tiers {
			text := t.Tier + " " + limitsText(t.Limits)
			if t.DryRun {
				text += " (dry run)"
			}
			tiers = append(tiers, text)
		}
		h.logger.Info("rate limits: "+status.mode(), zap.String("stack", s.Stack), zap.Strings("tiers", tiers),
			zap.String("client", status.Topology.text()), zap.String("store", s.Store))
	}
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
		if client := rec.refusedClient(); client != "" {
			extra.Set(zap.String("tiered_limit_client", client))
		}
	}
}
