package tieredlimit

import (
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
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
	policies      []string // for each tier, its item of RateLimit-Policy
	allPolicies   string   // of all tiers that are not dry
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
		a.policies = append(a.policies, policyItems(t))
		all |= 1 << t.index
	}
	a.allPolicies = a.joinPolicies(h.tiers, all)
	return a
}

// tellsWhenServed tells whether served responses get fields.
func (a *answer) tellsWhenServed() bool { return a.x || a.draft }

// policyItems writes a tier's limits as items of RateLimit-Policy (draft-ietf-httpapi-ratelimit-headers-11, section 2):
// "ip";q=600;w=60. The window is left out unless it is whole seconds.
func policyItems(t *tier) string {
	items := make([]string, len(t.spec.Limits))
	for j, l := range t.spec.Limits {
		items[j] = `"` + t.policies[j] + `";q=` + strconv.FormatInt(l.Count, 10)
		if l.Window%time.Second == 0 {
			items[j] += ";w=" + strconv.FormatInt(int64(l.Window/time.Second), 10)
		}
	}
	return strings.Join(items, ", ")
}

// joinPolicies lists the policies of the tiers in a set, without the dry ones.
func (a *answer) joinPolicies(tiers []*tier, set uint64) string {
	items := make([]string, 0, len(tiers))
	for i, t := range tiers {
		if set&(1<<i) != 0 && !t.spec.DryRun {
			items = append(items, a.policies[i])
		}
	}
	return strings.Join(items, ", ")
}

// policy is the value of RateLimit-Policy for a request that these tiers judged.
func (a *answer) policy(tiers []*tier, judged uint64) string {
	if judged == 1<<len(tiers)-1 {
		return a.allPolicies
	}
	return a.joinPolicies(tiers, judged)
}

// fieldWriter puts the fields of a stack on a response, in the place of an upstream's fields of the same names, at the
// first final status.
type fieldWriter struct {
	caddyhttp.ResponseWriterWrapper
	answer *answer // whose fields these are; nil: there are none, the status is written, or another stack's win
	values [4]string
	more   *moreFields // nil: there is no more
}

// moreFields are those that most responses have no use for.
type moreFields struct {
	values [2]string

	// What is done to Access-Control-Expose-Headers, if there are names to be exposed.
	expose []string
	before []string // what the field was
	merged *string  // and what it was made
}

// value is the i-th field's. Each gets a slice of its own, which a later handler may edit in place and append to without
// touching its neighbours.
func (f *fieldWriter) value(i int) []string {
	if i < len(f.values) {
		return f.values[i : i+1 : i+1]
	}
	i -= len(f.values)
	return f.more.values[i : i+1 : i+1]
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
		f.values[0], f.values[1] = v.tier.counts[v.limit], strconv.FormatInt(v.remaining(), 10)
		f.values[2], f.values[3] = v.tier.resets.text(v.reset()), v.tier.name
		n = len(f.values)
	}
	if a.draft {
		f.value(n)[0] = a.policy(rec.h.tiers, rec.judged)
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

// set puts the fields on a header, replacing what is there.
func (f *fieldWriter) set(header http.Header) {
	for i, name := range f.answer.names {
		header[name] = f.value(i)
	}
	f.more.expand(header)
}

// settle puts the fields in place once, before a final status is written. Most are there still, and looking costs less
// than writing.
func (f *fieldWriter) settle() {
	if f.answer == nil {
		return
	}
	header, names := f.Header(), f.answer.names
	f.answer = nil
	for i, name := range names {
		if value := f.value(i); !isAlone(header[name], &value[0]) {
			header[name] = value
		}
	}
	f.more.expand(header)
}

// isAlone tells whether a field's only value is this very one.
func isAlone(values []string, value *string) bool { return len(values) == 1 && &values[0] == value }

// expand merges the names that are to be exposed into their field, unless that has been done.
func (m *moreFields) expand(header http.Header) {
	if m == nil || m.expose == nil {
		return
	}
	if there := header[fieldExpose]; !isAlone(there, m.merged) {
		m.before = there
		exposeFields(header, m.expose)
		m.merged = &header[fieldExpose][0]
	}
}

// shrink makes the field of the exposed names what it was, if it is still what expand has made it.
func (m *moreFields) shrink(header http.Header) {
	if m == nil || !isAlone(header[fieldExpose], m.merged) {
		return
	}
	delete(header, fieldExpose)
	if m.before != nil {
		header[fieldExpose] = m.before
	}
}

// remove takes the fields off again, if they are still ours.
func (f *fieldWriter) remove(header http.Header) {
	names := f.answer.names
	f.answer = nil
	f.more.shrink(header)
	for i, name := range names {
		if isAlone(header[name], &f.value(i)[0]) {
			delete(header, name)
		}
	}
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

// yields tells whether an earlier stack's fields win over this one's: it refused, or leaves no larger share. If they do
// not, they are withdrawn.
func (rec *record) yields(header http.Header) bool {
	for p := rec.prev; p != nil; p = p.prev {
		if p.out.answer == nil {
			continue
		}
		if !rec.verdict.refused && (p.verdict.refused || !rec.verdict.tighter(&p.verdict)) {
			return true
		}
		p.out.remove(header)
	}
	return false
}

// serveWithFields serves the request with the stack's fields on the response.
func (rec *record) serveWithFields(w http.ResponseWriter, next caddyhttp.Handler) error {
	if rec.prev != nil && rec.yields(w.Header()) {
		return next.ServeHTTP(w, rec.r)
	}
	rec.fill()
	rec.out.ResponseWriter = w
	rec.out.set(w.Header())
	err := next.ServeHTTP(&rec.out, rec.r)
	rec.out.settle() // a handler may leave the status to the server, or to error routes
	return err
}

// WriteHeader puts the fields in place at the first final status. 101 is final; other 1xx are not.
func (f *fieldWriter) WriteHeader(status int) {
	if status >= 200 || status == http.StatusSwitchingProtocols {
		f.settle()
	}
	f.ResponseWriter.WriteHeader(status)
}

// Write writes the body, and the fields before it if no status was written.
func (f *fieldWriter) Write(p []byte) (int, error) {
	f.settle()
	return f.ResponseWriter.Write(p)
}

// ReadFrom copies the body from a reader, and puts the fields in place before it if no status was written.
func (f *fieldWriter) ReadFrom(r io.Reader) (int64, error) {
	f.settle()
	return f.ResponseWriterWrapper.ReadFrom(r)
}

// FlushError flushes, and puts the fields in place before it if no status was written.
func (f *fieldWriter) FlushError() error {
	f.settle()
	return http.NewResponseController(f.ResponseWriter).Flush()
}

// Interface guards
var (
	_ http.ResponseWriter             = (*fieldWriter)(nil)
	_ io.ReaderFrom                   = (*fieldWriter)(nil)
	_ interface{ FlushError() error } = (*fieldWriter)(nil)
)
