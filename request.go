package tieredlimit

import (
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/tieredlimit/caddy-tieredlimit/internal/clientip"
)

// maxTiers is how many tiers a stack may have, so that a set of them is a word.
const maxTiers = 64

// record is what one stack knows of one request. It lives as long as the request, since access logs and error routes
// ask for placeholders after the handler has returned.
type record struct {
	h    *Handler
	r    *http.Request
	repl *caddy.Replacer
	prev *record // of the stack that the request met before

	judged  uint64       // the tiers, by index, that have had their say
	settled uint64       // those of them that a later handler of the stack has not to ask again
	hidden  *hiddenTiers // nil: none
	verdict verdict
	dryTier *tier // the first dry one that would have refused

	client    clientip.Client // once that is resolved
	resolved  bool
	unproven  bool // the address that a tier's key needs may be forged
	dryHeader bool // a dry tier that would have refused wants the response to tell
	outcome   outcome

	shares *[maxTiers]*quota // by tiers: of what the request may use less than the whole; nil: of none
	out    fieldWriter
}

// hiddenTiers are tiers that cannot be asked, since a log does not tell their keys.
type hiddenTiers struct {
	keys      uint64 // the tiers by index
	concerned uint64 // those of them that concern the request
}

// verdict is what was decided, in terms of the limit that binds: the refusing one, or the one with the least left.
type verdict struct {
	tier    *tier // nil if no tier applied that clients may know of
	quota   *quota
	limit   int32 // index of the binding limit in the tier
	refused bool
	used    int64
	left    time.Duration
	now     int64 // in milliseconds since the Unix epoch
}

// recordVar is the request variable that holds the newest record of a request that may meet several handlers.
const recordVar = "tiered_limit.record"

// newRecord begins the record of a request and makes its placeholders known.
func newRecord(h *Handler, r *http.Request) *record {
	rec := &record{h: h, r: r}
	if h.live.handlers.Load() > 1 {
		rec.prev, _ = caddyhttp.GetVar(r.Context(), recordVar).(*record)
		caddyhttp.SetVar(r.Context(), recordVar, rec)
	}
	if repl, ok := r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer); ok {
		rec.repl = repl
		if rec.prev == nil {
			repl.Map(rec.placeholder)
		}
	}
	return rec
}

// newest is the latest record of the request. Of several it is the first that answers for the placeholders.
func (rec *record) newest() *record {
	if last, ok := caddyhttp.GetVar(rec.r.Context(), recordVar).(*record); ok {
		return last
	}
	return rec
}

// String keeps the record out of what the variable's placeholder would print.
func (rec *record) String() string { return "" }

// wasSettled tells whether a tier of a shared stack has had its say earlier in this request.
func (rec *record) wasSettled(name string) bool {
	for p := rec.prev; p != nil; p = p.prev {
		if p.h.run != rec.h.run {
			continue
		}
		for _, t := range p.h.tiers {
			if p.settled&(1<<t.index) != 0 && t.name == name {
				return true
			}
		}
	}
	return false
}

// resolve finds out who the client is, once.
func (rec *record) resolve() {
	if !rec.resolved {
		rec.resolved = true
		c := rec.h.topology.Client(rec.r)
		rec.client = c
		if c.Fallback != clientip.None || c.Longer || rec.h.topology.Hops == 0 {
			rec.h.noteClient(rec.r, c)
		}
	}
}

// appendClient appends what the client is counted as.
func (rec *record) appendClient(buf []byte) []byte {
	rec.resolve()
	return rec.client.AppendIdentity(buf, rec.h.prefixes)
}

// clientText is the client's masked address, or unknown, for logs and other handlers.
func (rec *record) clientText() string {
	rec.resolve()
	return string(rec.client.AppendAddress(nil, rec.h.prefixes))
}

func (rec *record) request() *http.Request { return rec.r }

func (rec *record) replacer() *caddy.Replacer { return rec.repl }

func (rec *record) unknownPlaceholder(name string) { rec.h.warnUnknownPlaceholder(name) }

// placeholder answers for {http.tiered_limit.*}: the client address where the topology is stated, and the limit that
// binds where the request was judged. What has no value is empty.
func (rec *record) placeholder(name string) (any, bool) {
	name, ours := strings.CutPrefix(name, "http.tiered_limit.")
	if !ours {
		return nil, false
	}
	switch name {
	case "client_ip":
		for p := rec.newest(); p != nil; p = p.prev {
			if p.h.topology.Stated() {
				return p.clientText(), true
			}
		}
		return "", true
	case "tier", "limit", "window", "remaining", "reset", "retry_after":
		if v := rec.binding(); v != nil {
			return v.text(name), true
		}
		return "", true
	}
	return nil, false
}

// binding is the verdict that clients are told of: that of the stack that refused, else the one that leaves the smallest
// share of its limit, the first of equals. It is nil if there is none.
func (rec *record) binding() *verdict {
	var binding *verdict
	for p := rec.newest(); p != nil; p = p.prev {
		v := &p.verdict
		switch {
		case p.h.DryRun || v.tier == nil:
		case v.refused:
			return v
		case binding == nil || !binding.tighter(v):
			binding = v
		}
	}
	return binding
}

// text is what a placeholder says of a verdict.
func (v *verdict) text(name string) string {
	switch name {
	case "tier":
		return v.tier.name
	case "limit":
		return v.quota.texts[v.limit]
	case "window":
		return v.tier.windows[v.limit]
	case "remaining":
		return strconv.FormatInt(v.remaining(), 10)
	case "reset":
		return strconv.FormatInt(ceilSeconds(v.left), 10)
	}
	if !v.refused {
		return ""
	}
	return strconv.FormatInt(v.retryAfter(), 10)
}

// refusedBy names the tier that refused, or would have if it or the stack were not a dry one. It is empty otherwise.
func (rec *record) refusedBy() string {
	if !rec.verdict.refused {
		if rec.dryTier == nil {
			return ""
		}
		return rec.dryTier.name
	}
	return rec.verdict.tier.name
}

// count is the binding limit's count, of which the request may use so much.
func (v *verdict) count() int64 { return v.quota.counts[v.limit] }

// remaining is how many more requests the binding limit admits in this window, never negative.
func (v *verdict) remaining() int64 { return max(0, v.count()-v.used) }

// retryAfter is the number of whole seconds after which the window has ended, at least 1.
func (v *verdict) retryAfter() int64 { return max(1, ceilSeconds(v.left)) }

// reset is the Unix time in whole seconds at which the window has ended.
func (v *verdict) reset() int64 {
	return (v.now + v.left.Milliseconds() + 999) / 1000
}

// tighter tells whether v leaves a smaller share of its limit than other does.
func (v *verdict) tighter(other *verdict) bool {
	return other.tier == nil || other.looser(v.remaining(), v.count())
}

// looser tells whether v leaves a larger share of its limit than one that leaves so many of a count does.
func (v *verdict) looser(remaining, count int64) bool {
	return remaining*v.count() < v.remaining()*count
}

// ceilSeconds is a duration in whole seconds, rounded up.
func ceilSeconds(d time.Duration) int64 {
	seconds := int64(d / time.Second)
	if d%time.Second > 0 {
		seconds++
	}
	return seconds
}

// decimalSeconds writes a duration as seconds: 60, 0.5.
func decimalSeconds(d time.Duration) string {
	return strconv.FormatFloat(d.Seconds(), 'f', -1, 64)
}

// scratch is what a decision, or a refusal, needs for its duration.
type scratch struct {
	claims   []Claim
	states   []State // of all claims, one behind the other
	decision Decision
	keys     []byte
	text     []byte
}

// maxKeptKeys is the largest key buffer, in bytes, that is kept for the next decision.
const maxKeptKeys = 16 << 10

var scratchPool = sync.Pool{New: func() any { return new(scratch) }}

func (sc *scratch) release() {
	if cap(sc.keys) > maxKeptKeys {
		sc.keys = nil
	}
	sc.clear()
	scratchPool.Put(sc)
}

// clear makes the scratch ready for another decision.
func (sc *scratch) clear() {
	sc.claims, sc.keys = sc.claims[:0], sc.keys[:0]
}

// addClaim adds a claim of one hit on a tier, in the place of what an earlier decision has left there.
func (sc *scratch) addClaim(t *tier) *Claim {
	n := len(sc.claims)
	if n == cap(sc.claims) {
		sc.claims = append(sc.claims, Claim{})
	}
	sc.claims = sc.claims[:n+1]
	claim := &sc.claims[n]
	claim.Tier, claim.Identity, claim.Hits, claim.Counts, claim.Refused = t.index, t.fixed, 1, nil, false
	return claim
}

// dropClaim takes the latest claim off again.
func (sc *scratch) dropClaim() { sc.claims = sc.claims[:len(sc.claims)-1] }

// makeRoom gives each claim its states.
func (sc *scratch) makeRoom(h *Handler) {
	limits := 0
	for i := range sc.claims {
		limits += len(h.tiers[sc.claims[i].Tier].spec.Limits)
	}
	if limits > len(sc.states) {
		sc.states = make([]State, limits)
	}
	free := sc.states
	for i := range sc.claims {
		n := len(h.tiers[sc.claims[i].Tier].spec.Limits)
		sc.claims[i].States, free = free[:n:n], free[n:]
	}
}
