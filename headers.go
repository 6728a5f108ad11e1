package tieredlimit

import (
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
)

// Canonical names of the response header fields.
const (
	fieldLimit     = "X-Ratelimit-Limit"
	fieldRemaining = "X-Ratelimit-Remaining"
	fieldReset     = "X-Ratelimit-Reset"
	fieldResource  = "X-Ratelimit-Resource"
	fieldPolicy    = "Ratelimit-Policy"
	fieldRateLimit = "Ratelimit"
	fieldRetry     = "Retry-After"
	fieldCache     = "Cache-Control"
	fieldExpose    = "Access-Control-Expose-Headers"
	fieldAllow     = "Access-Control-Allow-Origin"
	fieldAllowCred = "Access-Control-Allow-Credentials"
	fieldVary      = "Vary"
)

// answer is how the stack tells clients where they stand.
type answer struct {
	x, draft      bool
	names         []string // of the fields, in order
	exposeServed  []string // as browsers are to be told, in common spelling
	exposeRefused []string
	allPolicies   string // of all tiers that are not dry
	body          bodyFormat
	cors          *corsRules
	jitter        int64
}

func compileAnswer(h *Handler) answer {
	a := answer{body: bodyFormat(h.Body), jitter: int64(h.Jitter), cors: compileCORS(h.CORS)}
	sets := h.Headers
	if len(sets) == 0 {
		sets = []string{"x-ratelimit"}
	}
	if slices.Contains(sets, "x-ratelimit") {
		a.x = true
		a.names = append(a.names, fieldLimit, fieldRemaining, fieldReset, fieldResource)
		a.exposeServed = append(a.exposeServed, "X-RateLimit-Limit", "X-RateLimit-Remaining", "X-RateLimit-Reset", "X-RateLimit-Resource")
	}
	if slices.Contains(sets, "draft-11") {
		a.draft = true
		a.names = append(a.names, fieldPolicy, fieldRateLimit)
		a.exposeServed = append(a.exposeServed, "RateLimit-Policy", "RateLimit")
	}
	a.exposeRefused = append(slices.Clone(a.exposeServed), "Retry-After")
	all := uint64(0)
	for _, t := range h.tiers {
		all |= 1 << t.index
	}
	a.allPolicies = joinPolicies(&record{h: h}, all)
	return a
}

// tellsWhenServed tells whether served responses get fields.
func (a *answer) tellsWhenServed() bool { return a.x || a.draft }

// policyItems writes a tier's limits, of which a request may use so much, as items of RateLimit-Policy (draft-ietf-httpapi-ratelimit-headers-11, section 2):
// "ip";q=600;w=60. The window is left out unless it is whole seconds.
func policyItems(t *tier, counts []int64) string {
	items := make([]string, len(t.spec.Limits))
	for j, l := range t.spec.Limits {
		items[j] = `"` + t.policies[j] + `";q=` + strconv.FormatInt(counts[j], 10)
		if l.Window%time.Second == 0 {
			items[j] += ";w=" + strconv.FormatInt(int64(l.Window/time.Second), 10)
		}
	}
	return strings.Join(items, ", ")
}

// joinPolicies lists the policies of the tiers in a set, without the dry ones, as they are for a request.
func joinPolicies(rec *record, set uint64) string {
	items := make([]string, 0, len(rec.h.tiers))
	for i, t := range rec.h.tiers {
		if set&(1<<i) != 0 && !t.spec.DryRun {
			items = append(items, rec.quotaOf(t).policies)
		}
	}
	return strings.Join(items, ", ")
}

// policy is the value of RateLimit-Policy for a request that was judged.
func (rec *record) policy() string {
	if rec.shares == nil && rec.judged == 1<<len(rec.h.tiers)-1 {
		return rec.h.answer.allPolicies
	}
	return joinPolicies(rec, rec.judged)
}

// fill writes the field values of a verdict.
func (rec *record) fill() {
	a, v, f := &rec.h.answer, &rec.verdict, &rec.out
	f.answer = a
	_, cross := rec.r.Header["Origin"]
	if cross || a.x && a.draft {
		f.more = new(moreFields)
	}
	n := 0
	if a.x {
		f.values[0], f.values[1] = v.quota.texts[v.limit], strconv.FormatInt(v.remaining(), 10)
		f.values[2], f.values[3] = v.tier.resets.text(v.reset()), v.tier.name
		n = len(f.values)
	}
	if a.draft {
		f.value(n)[0] = rec.policy()
		f.value(n + 1)[0] = v.rateLimit()
	}
	if cross {
		f.more.expose = a.exposeServed
		if v.refused {
			f.more.expose = a.exposeRefused
		}
	}
}

// resetText remembers how the end of a window is written, since all requests of the window are told the same.
type resetText struct{ latest atomic.Pointer[writtenTime] }

type writtenTime struct {
	unix int64
	text string
}

func (t *resetText) text(unix int64) string {
	if w := t.latest.Load(); w != nil && w.unix == unix {
		return w.text
	}
	w := &writtenTime{unix, strconv.FormatInt(unix, 10)}
	t.latest.Store(w)
	return w.text
}

// rateLimit writes the binding limit as the item of RateLimit: "ip";r=0;t=17.
func (v *verdict) rateLimit() string {
	var text [112]byte
	buf := append(text[:0], '"')
	buf = append(buf, v.tier.policies[v.limit]...)
	buf = append(buf, `";r=`...)
	buf = strconv.AppendInt(buf, v.remaining(), 10)
	buf = append(buf, ";t="...)
	buf = strconv.AppendInt(buf, ceilSeconds(v.left), 10)
	return string(buf)
}

// exposeFields merges names into one Access-Control-Expose-Headers field (Fetch standard, CORS protocol).
func exposeFields(header http.Header, names []string) {
	there := header[fieldExpose]
	if len(there) == 0 {
		header[fieldExpose] = []string{strings.Join(names, ", ")}
		return
	}
	var list []string
	add := func(name string) {
		name = strings.TrimSpace(name)
		if name != "" && !slices.ContainsFunc(list, func(s string) bool { return strings.EqualFold(s, name) }) {
			list = append(list, name)
		}
	}
	for _, line := range there {
		for name := range strings.SplitSeq(line, ",") {
			add(name)
		}
	}
	for _, name := range names {
		add(name)
	}
	header[fieldExpose] = []string{strings.Join(list, ", ")}
}
