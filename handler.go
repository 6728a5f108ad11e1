package tieredlimit

import (
	"cmp"
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// errEarlyData answers a request whose source address is not yet proven.
var errEarlyData = errors.New("TLS handshake not complete, so the client address cannot be verified")

// asking is how a decision puts its claims to the store: to charge them, or only to look.
type asking func(h *Handler, ctx context.Context, now time.Time, sc *scratch) (Decision, error)

// evaluate decides a request at a time. Whoever serves, explains or replays a request, in a dry run or not, decides it
// by this. What was asked of the store, and what it said, is left in the scratch. With an error the outcome tells whose
// it is: the store's, or that of what has to be known before the store is asked.
func (rec *record) evaluate(now time.Time, sc *scratch, ask asking) (outcome, error) {
	h := rec.h
	rec.verdict.now = now.UnixMilli()
	sc.decision = Decision{RefusedBy: -1, Now: now}
	if out, err := h.uncounted(rec); err != nil || out != outcomeServed {
		return out, err
	}
	if err := rec.claim(sc); err != nil {
		return outcomeTooEarly, err
	}
	if len(sc.claims) == 0 {
		return outcomeServed, nil
	}
	decision, err := ask(h, rec.r.Context(), now, sc)
	if err != nil {
		return outcomeStoreError, err
	}
	sc.decision = decision
	rec.verdict.now = decision.Now.UnixMilli()
	rec.settled = rec.judged
	if h.DryRun && decision.RefusedBy >= 0 {
		rec.settled = rec.charged(sc, decision.RefusedBy)
	}
	return rec.read(sc, decision, now), nil
}

// judge decides a request at a time and serves or refuses it.
func (rec *record) judge(w http.ResponseWriter, next caddyhttp.Handler, now time.Time) error {
	h := rec.h
	sc := scratchPool.Get().(*scratch)
	out, err := rec.evaluate(now, sc, (*Handler).take)
	sc.release()
	switch {
	case out == outcomeStoreError:
		return h.undecided(w, rec, next, err)
	case err != nil:
		return rec.unjudged(w, next, err)
	}
	h.meter.count(out)
	rec.logOutcome(out, rec.refusedBy())
	if out == outcomeRefused {
		return h.refuse(w, rec)
	}
	if out == outcomeDryRefused && rec.tellsDryRun() {
		f := newDryRunWriter(w, rec.r)
		defer f.settle()
		w = f
	}
	if h.DryRun || rec.verdict.tier == nil || !h.answer.tellsWhenServed() {
		return next.ServeHTTP(w, rec.r)
	}
	return rec.serveWithFields(w, next)
}

// unjudged answers a request that met an error before it could be judged: a matcher's, or that its source is not proven.
// A dry stack serves it all the same.
func (rec *record) unjudged(w http.ResponseWriter, next caddyhttp.Handler, err error) error {
	var known caddyhttp.HandlerError
	if errors.As(err, &known) && known.StatusCode == http.StatusTooEarly {
		rec.h.meter.count(outcomeTooEarly)
		rec.logOutcome(outcomeTooEarly, "")
	}
	if rec.h.DryRun {
		return next.ServeHTTP(w, rec.r)
	}
	return err
}

// uncounted tells whether the request is one that the stack neither limits nor counts, and why.
func (h *Handler) uncounted(rec *record) (outcome, error) {
	if h.exempt.path(rec.r) {
		return outcomeExempt, nil
	}
	if h.exempt.preflights && isPreflight(rec.r) {
		return outcomePreflight, nil
	}
	if len(h.exempt.clients) == 0 {
		return outcomeServed, nil
	}
	if earlyData(rec.r) {
		return outcomeTooEarly, caddyhttp.Error(http.StatusTooEarly, errEarlyData)
	}
	rec.resolve()
	if rec.client.Known() && anyContains(h.exempt.clients, rec.client.Addr) {
		return outcomeExempt, nil
	}
	return outcomeServed, nil
}

// pass serves a request that is not judged.
func (rec *record) pass(w http.ResponseWriter, next caddyhttp.Handler, out outcome) error {
	rec.h.meter.count(out)
	rec.logOutcome(out, "")
	return next.ServeHTTP(w, rec.r)
}

// charged are the tiers that were charged although one behind them refused. After a dry stack has let such a request
// pass, the others may still refuse it in a live handler of the same name.
func (rec *record) charged(sc *scratch, refusedBy int) uint64 {
	set := uint64(0)
	for i := range sc.claims[:refusedBy] {
		t := rec.h.tiers[sc.claims[i].Tier]
		if t.spec.Charge == ChargeChecked && !anyExceeded(sc.claims[i].States) {
			set |= 1 << t.index
		}
	}
	return set
}

// claim collects one claim for each tier that concerns the request and can tell whom to count. A dry tier that cannot
// be asked, since its matcher fails or the source is not proven, is left out, and so is one whose key is not told.
func (rec *record) claim(sc *scratch) error {
	for _, t := range rec.h.tiers {
		concerned, err := rec.concerns(t)
		if err != nil && !t.spec.DryRun {
			return err
		}
		if err != nil || !concerned || rec.prev != nil && rec.wasSettled(t.name) {
			continue
		}
		if rec.hidden != nil && rec.hidden.keys&(1<<t.index) != 0 {
			rec.hidden.concerned |= 1 << t.index
			continue
		}
		claim := sc.addClaim(t)
		if t.fixed == nil {
			if !rec.identify(sc, t, claim) {
				sc.dropClaim()
				switch {
				case !rec.unproven:
					rec.h.noteSkipped(t)
				case !t.spec.DryRun:
					return caddyhttp.Error(http.StatusTooEarly, errEarlyData)
				}
				continue
			}
		}
		if len(t.shares) > 0 {
			if err := rec.lower(t, claim); err != nil {
				sc.dropClaim()
				if !t.spec.DryRun {
					return err
				}
				continue
			}
		}
		rec.judged |= 1 << t.index
	}
	sc.makeRoom(rec.h)
	return nil
}

// identify fills in whom a tier counts the request for, by the first of its keys that is not absent. It reports false if
// there is none, or if the key would go by an address that is not proven yet, which it notes in the record.
func (rec *record) identify(sc *scratch, t *tier, claim *Claim) bool {
	rec.unproven = false
	for i := range t.keys {
		k := &t.keys[i]
		if k.usesAddress && earlyData(rec.r) {
			rec.unproven = true
			return false
		}
		start := len(sc.keys)
		buf, found := k.appendIdentity(sc.keys, rec)
		if k.captured && t.match.doubts(rec.r) != 0 {
			buf, found = k.appendUncertain(buf[:start]), uncertain
		}
		if found == absent {
			continue
		}
		sc.keys = buf
		claim.Identity = buf[start:]
		if found == uncertain {
			rec.h.noteUncertain(t)
		}
		return true
	}
	return false
}

// read takes from a decision what is told, counted and logged.
func (rec *record) read(sc *scratch, decision Decision, now time.Time) outcome {
	h := rec.h
	out := outcomeServed
	for i := range sc.claims {
		t, states := h.tiers[sc.claims[i].Tier], sc.claims[i].States
		if states[0].ByGroup {
			h.noteCrowded(t, states, now)
		}
		switch {
		case i == decision.RefusedBy:
			rec.readRefusal(t, states)
			h.noteRefusal(rec, refusal{tier: t, identity: sc.claims[i].Identity, dry: h.DryRun, at: decision.Now}, now)
			if h.DryRun {
				return outcomeDryRefused
			}
			return outcomeRefused
		case t.spec.DryRun:
			if anyExceeded(states) {
				h.noteRefusal(rec, refusal{tier: t, identity: sc.claims[i].Identity, dry: true, at: decision.Now}, now)
				rec.dryHeader = rec.dryHeader || t.dryHeader
				out = outcomeDryRefused
				rec.dryTier = cmp.Or(rec.dryTier, t)
			}
		case decision.RefusedBy < 0:
			rec.readServed(t, states)
		}
	}
	return out
}

// readRefusal takes the refusing tier's exhausted limit that ends last as the binding one.
func (rec *record) readRefusal(t *tier, states []State) {
	v := &rec.verdict
	*v = verdict{refused: true, tier: t, quota: rec.quotaOf(t), now: v.now}
	for j := range states {
		if states[j].Exceeded && states[j].ResetAfter > v.left {
			v.limit, v.used, v.left = int32(j), states[j].Used, states[j].ResetAfter
		}
	}
}

// readServed takes a limit as the binding one if it leaves a smaller share than those before it.
func (rec *record) readServed(t *tier, states []State) {
	v, q := &rec.verdict, rec.quotaOf(t)
	for j := range states {
		if count := q.counts[j]; v.tier == nil || v.looser(max(0, count-states[j].Used), count) {
			v.tier, v.quota, v.limit, v.used, v.left = t, q, int32(j), states[j].Used, states[j].ResetAfter
		}
	}
}

func anyExceeded(states []State) bool {
	for i := range states {
		if states[i].Exceeded {
			return true
		}
	}
	return false
}

// earlyData tells whether the request came before the handshake was complete, so that its source may be forged.
func earlyData(r *http.Request) bool {
	return r.TLS != nil && !r.TLS.HandshakeComplete
}
