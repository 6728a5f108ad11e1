package tieredlimit

import (
	"fmt"
	"hash/maphash"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyevents"
	"go.uber.org/zap"
)

// refusalEvent is the name of the event that a refusal causes, where events are on.
const refusalEvent = "tiered_limit_refused"

// herald emits an event for the first refusal of an identity in a window.
type herald struct {
	ctx    caddy.Context
	events *caddyevents.App
}

// announcements are the refusals of one tier that events were emitted for: at most one for each identity and window.
type announcements struct {
	mu    sync.Mutex
	ends  map[uint64]int64 // when the window ends, in milliseconds since the Unix epoch, by identity and window length
	sweep int64            // none ends before
}

// maxAnnouncements bounds the memory of a tier's announcements. Further identities get no event until a window ends.
const maxAnnouncements = 4096

// announcementSeed makes it impossible to pick identities that count as one.
var announcementSeed = maphash.MakeSeed()

// openEvents finds the app that events go through.
func (h *Handler) openEvents(ctx caddy.Context) error {
	if !h.Events {
		return nil
	}
	app, err := ctx.App("events")
	if err != nil {
		return fmt.Errorf("events: %w", err)
	}
	h.herald = &herald{ctx: ctx, events: app.(*caddyevents.App)}
	return nil
}

// announcement is whether a refusal is to be announced.
type announcement uint8

const (
	announceNow  announcement = iota // it is the first of the identity in the window
	announceNot                      // it is not
	announceFull                     // it may be, but there is no room to remember it
)

// add tells whether to announce a refusal in a window that ends at end.
func (a *announcements) add(identity []byte, window time.Duration, now, end int64) announcement {
	key := maphash.Bytes(announcementSeed, identity) + uint64(window)*0x9e3779b97f4a7c15
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.ends[key] > now {
		return announceNot
	}
	if a.ends == nil {
		a.ends = make(map[uint64]int64)
	}
	if len(a.ends) >= maxAnnouncements && now >= a.sweep {
		a.sweep = end
		for key, end := range a.ends {
			if end <= now {
				delete(a.ends, key)
			} else {
				a.sweep = min(a.sweep, end)
			}
		}
	}
	if _, there := a.ends[key]; !there && len(a.ends) >= maxAnnouncements {
		return announceFull
	}
	a.ends[key] = end
	return announceNow
}

// announce emits an event for a refusal, if it is the first of the identity in the window. Subscribers are called before
// the client is answered.
func (h *Handler) announce(rec *record, r *refusal) {
	v := &rec.verdict
	window := r.tier.spec.Limits[v.limit].Window
	now := r.at.UnixMilli()
	switch r.tier.meter.announced.add(r.identity, window, now, now+v.left.Milliseconds()) {
	case announceNot:
		return
	case announceFull:
		if h.run.first("events " + r.tier.name) {
			h.logger.Warn("more clients are refused within one window than events are emitted for, so the others get none",
				zap.String("stack", h.stackLabel), zap.String("tier", r.tier.name), zap.Int("most", maxAnnouncements))
		}
		return
	}
	if !h.herald.events.ShouldEmit(refusalEvent) {
		return
	}
	data := map[string]any{"stack": h.stackLabel, "tier": r.tier.name, "retry_after": v.retryAfter()}
	if h.LogKeys {
		data["key"] = rec.keyText(r.tier)
		if r.tier.usesClient {
			data["client_ip"] = rec.clientText()
		}
	}
	h.herald.events.Emit(h.herald.ctx, refusalEvent, data)
}
