package tieredlimit

import (
	"slices"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/tieredlimit/caddy-tieredlimit/internal/replay"
)

// rehearsal judges recorded requests by one handler, at the times recorded, and serves none of them. It serves one
// goroutine.
type rehearsal struct {
	h      *Handler
	rec    *record // of the last request
	sc     scratch
	hidden hiddenTiers // of the last request
	deps   [][]string  // header fields that each tier's keys read
	skip   []int64     // what the tiers' meters had skipped before
}

// newRehearsal returns what judges requests as the handler does, and whether the handler is one of this module's.
func newRehearsal(m caddyhttp.MiddlewareHandler) (replay.Stack, bool) {
	h, ok := m.(*Handler)
	if !ok {
		return nil, false
	}
	s := &rehearsal{h: h}
	for _, t := range h.tiers {
		var deps []string
		for _, name := range t.placeholders() {
			if field := replay.HeaderOf(name); field != "" {
				deps = append(deps, field)
			}
		}
		s.deps = append(s.deps, deps)
		s.skip = append(s.skip, t.meter.skipped.Load())
	}
	return s, true
}

// Info implements [replay.Stack].
func (s *rehearsal) Info() replay.StackInfo {
	h := s.h
	info := replay.StackInfo{
		Label: h.stackLabel, DryRun: h.DryRun, LogKeys: h.LogKeys, Hops: h.topology.Hops, Header: h.topology.Header,
		Trusted: h.topology.Limited(), Telling: isMoreThanPreflight, Fields: decidingFields(),
		Headers: append([]string{h.topology.Header}, h.topology.Headers...),
	}
	switch h.mode {
	case modeOff:
		info.Mode = replay.Off
	case modeInert:
		info.Mode = replay.Inert
	}
	for _, t := range h.tiers {
		tier := replay.TierInfo{
			Name: t.name, DryRun: t.spec.DryRun, Single: t.spec.Single, Charge: "served", Matchers: t.match.sets,
			Placeholders: t.placeholders(),
		}
		tier.Client = slices.Equal(tier.Placeholders, []string{clientPlaceholder})
		tier.User = slices.Equal(tier.Placeholders, []string{userPlaceholder})
		if t.spec.Charge == ChargeChecked {
			tier.Charge = "checked"
		}
		for _, l := range t.spec.Limits {
			tier.Limits = append(tier.Limits, replay.LimitInfo{Count: l.Count, Window: l.Window})
		}
		info.Tiers = append(info.Tiers, tier)
	}
	return info
}

// Judge implements [replay.Stack].
func (s *rehearsal) Judge(q *replay.Query, v *replay.Verdict) error {
	h := s.h
	*v = replay.Verdict{RefusedBy: -1, Claims: v.Claims[:0], Hidden: v.Hidden[:0]}
	switch h.mode {
	case modeOff:
		v.Outcome = replay.OffServed
		return nil
	case modeInert:
		v.Outcome = replay.InertServed
		return nil
	}
	rec := s.begin(q)
	if s.hidden = (hiddenTiers{keys: s.untold(q)}); s.hidden.keys != 0 {
		rec.hidden = &s.hidden
	}
	sc := &s.sc
	sc.clear()
	out, err := rec.evaluate(q.Now, sc, (*Handler).take)
	v.Outcome = rehearsed[out]
	v.Fallback, v.Client = rec.client.Fallback.String(), rec.client.Addr
	if err == nil && out.counted() {
		s.tell(v)
	}
	return err
}

// rehearsed are the outcomes as a replay knows them.
var rehearsed = [outcomes]replay.Outcome{
	outcomeServed: replay.Served, outcomeRefused: replay.Refused, outcomeDryRefused: replay.DryRefused,
	outcomeExempt: replay.Exempt, outcomePreflight: replay.Preflight, outcomeInert: replay.InertServed,
	outcomeStoreError: replay.Failed, outcomeTooEarly: replay.Failed,
}

// begin makes the record of a request, as [newRecord] does. The last record is used again, unless the request has met
// this handler before.
func (s *rehearsal) begin(q *replay.Query) *record {
	prev, _ := q.Met.(*record)
	rec := s.rec
	for p := prev; p != nil; p = p.prev {
		if p == rec {
			rec = nil
		}
	}
	if rec == nil {
		rec = new(record)
	}
	*rec = record{h: s.h, r: q.Request, repl: q.Replacer, prev: prev}
	s.rec = rec
	q.Met = rec
	if q.Fresh {
		q.Replacer.Map(rec.placeholder)
	}
	return rec
}

// untold are the tiers whose keys are not known, since the log has hidden what they read.
func (s *rehearsal) untold(q *replay.Query) uint64 {
	set := uint64(0)
	for i, deps := range s.deps {
		if len(deps) > 0 && slices.ContainsFunc(deps, q.Hidden) {
			set |= 1 << s.h.tiers[i].index
		}
	}
	return set
}

// tell says which tiers were asked, which of their limits were exceeded, and which tiers could not be asked.
func (s *rehearsal) tell(v *replay.Verdict) {
	v.RefusedBy = s.sc.decision.RefusedBy
	for i, t := range s.h.tiers {
		if s.hidden.concerned&(1<<t.index) != 0 {
			v.Hidden = append(v.Hidden, i)
		}
	}
	for _, c := range s.sc.claims {
		claim := replay.Claim{Tier: c.Tier, Identity: c.Identity}
		for j := range c.States {
			if c.States[j].Exceeded {
				claim.Exceeded |= 1 << j
			}
		}
		v.Claims = append(v.Claims, claim)
	}
}

// KeyText implements [replay.Stack].
func (s *rehearsal) KeyText(tier int) []string { return s.rec.keyText(s.h.tiers[tier]) }

// Skipped implements [replay.Stack].
func (s *rehearsal) Skipped(tier int) int64 {
	return s.h.tiers[tier].meter.skipped.Load() - s.skip[tier]
}

// Close implements [replay.Stack].
func (s *rehearsal) Close() error { return s.h.Cleanup() }

// placeholders are the names of the placeholders in the tier's keys, each once.
func (t *tier) placeholders() []string {
	var names []string
	for _, k := range t.keys {
		for _, part := range k.parts {
			for _, s := range part {
				if s.kind != segmentLiteral && !slices.Contains(names, s.name()) {
					names = append(names, s.name())
				}
			}
		}
	}
	return names
}

// Interface guard
var _ replay.Stack = (*rehearsal)(nil)
