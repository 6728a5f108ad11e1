package tieredlimit

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"
	"golang.org/x/net/http/httpguts"

	"github.com/tieredlimit/caddy-tieredlimit/internal/clientip"
	"github.com/tieredlimit/caddy-tieredlimit/store"
)

// requestQuestion describes a request: the body of POST /tiered_limit/explain.
type requestQuestion struct {
	Stack  string `json:"stack"` // default: all
	Peer   string `json:"peer"`  // address, with or without a port; unix for a peer without one
	Method string `json:"method"`
	Scheme string `json:"scheme"` // default: what the server speaks
	Host   string `json:"host"`
	Path   string `json:"path"` // with the query, as sent

	// Headers are the fields, each with one line or an array of them.
	Headers map[string]fieldLines `json:"headers"`

	// Placeholders are values that handlers in front would have set, such as http.auth.user.id.
	Placeholders map[string]string `json:"placeholders"`
}

// fieldLines are the lines of a header field. A single one may be given without an array.
type fieldLines []string

// UnmarshalJSON reads a string or an array of strings.
func (f *fieldLines) UnmarshalJSON(data []byte) error {
	var line *string
	if json.Unmarshal(data, &line) != nil {
		return (*texts)(f).UnmarshalJSON(data)
	}
	if line == nil {
		return errors.New("a header field is null, where a string or an array of strings is expected")
	}
	*f = fieldLines{*line}
	return nil
}

// explainAnswer is what each handler would decide. Whether the request would meet them is for the routes to say.
type explainAnswer struct {
	Handlers []explanation `json:"handlers"`
}

// explanation is what one handler would decide, and why.
type explanation struct {
	Stack      string      `json:"stack"`
	Server     string      `json:"server,omitempty"`
	Mode       string      `json:"mode"`
	DryRun     bool        `json:"dry_run,omitempty"`
	Outcome    string      `json:"outcome"` // as in metrics, or off, or error
	RefusedBy  string      `json:"refused_by,omitempty"`
	RetryAfter int64       `json:"retry_after,omitempty"`
	Error      string      `json:"error,omitempty"`
	Store      string      `json:"store,omitempty"`  // what becomes of the request although the store cannot decide
	Client     *clientView `json:"client,omitempty"` // absent if nothing is limited
	Tiers      []tierView  `json:"tiers"`
}

// tierView is what one tier would say.
type tierView struct {
	Tier        string         `json:"tier"`
	Charge      string         `json:"charge"`
	DryRun      bool           `json:"dry_run,omitempty"`
	Applies     bool           `json:"applies"`
	Why         string         `json:"why,omitempty"` // it does not apply, or is not asked
	Key         []string       `json:"key,omitempty"`
	Line        int            `json:"line,omitempty"` // of the key among the tier's, from 1
	Fingerprint string         `json:"fingerprint,omitempty"`
	Share       int            `json:"share,omitempty"` // of the counts, in percent, that the request may use
	Refuses     bool           `json:"refuses,omitempty"`
	Limits      []limitReading `json:"limits,omitempty"`
}

// explain serves POST /tiered_limit/explain.
func (a *Admin) explain(r *http.Request, q *requestQuestion) (*explainAnswer, error) {
	handlers := a.handlers()
	if q.Stack != "" {
		var err error
		if handlers, err = a.stack(q.Stack); err != nil {
			return nil, err
		}
	}
	if err := q.check(); err != nil {
		return nil, adminError(http.StatusBadRequest, "%w", err)
	}
	answer := &explainAnswer{Handlers: []explanation{}}
	f := newForesight()
	for _, h := range handlers {
		e, err := f.explain(r.Context(), h, q)
		if err != nil {
			return nil, err
		}
		answer.Handlers = append(answer.Handlers, *e)
	}
	return answer, nil
}

// foresight is what is known of a described request while one handler after the other is asked about it, in the order in
// which it would meet them.
type foresight struct {
	runs map[*stackRun]*stackRun // what the shadows of a stack share
	met  []*record               // of handlers that the request would have passed
}

func newForesight() *foresight { return &foresight{runs: make(map[*stackRun]*stackRun)} }

// explain judges the request as a handler would, charging nothing. A tier of a named stack that an earlier handler has
// asked is not asked again, as far as the routes tell that the request meets both. Inside of named routes they do not.
func (f *foresight) explain(ctx context.Context, h *Handler, q *requestQuestion) (*explanation, error) {
	s := h.shadow()
	if run := f.runs[h.run]; run != nil {
		s.run = run
	}
	f.runs[h.run] = s.run
	e, rec, err := s.explain(ctx, q, f.before(h))
	if rec != nil && e.Outcome != outcomeRefused.String() && h.place.matches(rec.r) {
		f.met = append(f.met, rec)
	}
	return e, err
}

// before is the record of the handler that the request has met last before one.
func (f *foresight) before(h *Handler) *record {
	for _, rec := range slices.Backward(f.met) {
		if rec.h.server == h.server && h.place.meets(rec.h.place) {
			return rec
		}
	}
	return nil
}

// check refuses what no request could be, and fills in defaults.
func (q *requestQuestion) check() error {
	if q.Peer == "" {
		return errors.New("peer is missing; it is the address of the connection, or unix")
	}
	if q.Peer != "unix" {
		if _, ok := clientip.NAT64(nil).ParseAddr(q.Peer); !ok {
			return fmt.Errorf("peer %q is neither an IP address nor unix", shortened(q.Peer))
		}
	}
	if q.Method == "" {
		q.Method = http.MethodGet
	}
	if !httpguts.ValidHeaderFieldName(q.Method) { // both are tokens
		return fmt.Errorf("method %q is not a method", shortened(q.Method))
	}
	if q.Scheme != "" {
		if err := oneOf("scheme", shortened(q.Scheme), "http", "https"); err != nil {
			return err
		}
	}
	if q.Path == "" {
		q.Path = "/"
	}
	if !strings.HasPrefix(q.Path, "/") {
		return fmt.Errorf("path %q does not begin with /", shortened(q.Path))
	}
	if _, err := url.ParseRequestURI(q.Path); err != nil {
		return fmt.Errorf("path %q: %w", shortened(q.Path), errors.Unwrap(err))
	}
	if q.Host == "" {
		q.Host = "localhost"
	}
	if !httpguts.ValidHostHeader(q.Host) {
		return fmt.Errorf("host %q is not a host", shortened(q.Host))
	}
	for name, values := range q.Headers {
		if !httpguts.ValidHeaderFieldName(name) {
			return fmt.Errorf("headers: %q is not a field name", shortened(name))
		}
		if i := slices.IndexFunc(values, func(v string) bool { return !httpguts.ValidHeaderFieldValue(v) }); i >= 0 {
			return fmt.Errorf("headers: %s: %q is not a field value", shortened(name), shortened(values[i]))
		}
	}
	return nil
}

// request makes the described request, as the server would hand it to handlers.
func (q *requestQuestion) request(ctx context.Context, server *caddyhttp.Server) (*http.Request, error) {
	target, err := url.ParseRequestURI(q.Path)
	if err != nil {
		return nil, adminError(http.StatusBadRequest, "path: %w", err)
	}
	r := probeRequest(q.Peer)
	r.Method, r.URL, r.RequestURI, r.Host = q.Method, target, q.Path, q.Host
	switch _, _, err := net.SplitHostPort(q.Peer); {
	case q.Peer == "unix":
		r.RemoteAddr = "@"
	case err != nil:
		r.RemoteAddr = net.JoinHostPort(strings.Trim(q.Peer, "[]"), "1")
	}
	for name, values := range q.Headers {
		name = http.CanonicalHeaderKey(name)
		r.Header[name] = append(r.Header[name], values...)
	}
	if server == nil {
		server = new(caddyhttp.Server)
	}
	if q.Scheme == "https" || q.Scheme == "" && len(server.TLSConnPolicies) > 0 {
		r.TLS = &tls.ConnectionState{HandshakeComplete: true, ServerName: q.Host}
	}
	local := &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 80}
	r = r.WithContext(context.WithValue(ctx, http.LocalAddrContextKey, local))
	repl := caddy.NewReplacer()
	for name, value := range q.Placeholders {
		repl.Set(strings.Trim(name, "{}"), value)
	}
	return caddyhttp.PrepareRequest(r, repl, nil, server), nil
}

// shadow is a copy of the handler that decides as it does, but has meters and logs of its own, which nobody reads.
func (h *Handler) shadow() *Handler {
	s := *h
	s.logger = zap.NewNop()
	s.meter = &stackMeter{label: h.stackLabel}
	s.run = new(stackRun)
	s.herald = nil
	s.tiers = make([]*tier, len(h.tiers))
	for i, t := range h.tiers {
		c := *t
		c.log, c.meter = new(refusalLog), new(tierMeter)
		s.tiers[i] = &c
	}
	return &s
}

// explain judges a described request as the handler would after another, charging nothing. The receiver must be a shadow. The
// record is nil if nothing was judged.
func (h *Handler) explain(ctx context.Context, q *requestQuestion, prev *record) (*explanation, *record, error) {
	e := &explanation{
		Stack: h.stackLabel, Server: h.serverName(), Mode: h.mode.String(), DryRun: h.DryRun, Tiers: []tierView{},
	}
	r, err := q.request(ctx, h.server)
	if err != nil {
		return nil, nil, err
	}
	if h.mode != modeOff {
		e.Client = h.viewClient(r)
	}
	switch h.mode {
	case modeOff:
		e.Outcome = "off"
		return e, nil, nil
	case modeInert:
		e.Outcome = outcomeInert.String()
		return e, nil, nil
	}
	rec := newRecord(h, r)
	rec.prev = prev
	sc := new(scratch)
	out, err := rec.evaluate(h.now(), sc, (*Handler).peek)
	e.Store = withoutStore(sc.decision, err)
	switch {
	case err != nil:
		e.Error = err.Error()
	case out.counted():
		rec.view(sc, e)
	}
	e.Outcome = out.String()
	var known caddyhttp.HandlerError
	if err != nil && out != outcomeStoreError && (!errors.As(err, &known) || known.StatusCode != http.StatusTooEarly) {
		e.Outcome = "error" // of a matcher
	}
	e.RefusedBy = rec.refusedBy()
	if rec.verdict.refused {
		e.RetryAfter = rec.verdict.retryAfter()
	}
	return e, rec, nil
}

// withoutStore says who has decided, or what becomes of a request, if the store could not decide. It is empty otherwise.
func withoutStore(d Decision, err error) string {
	var away *UnavailableError
	switch {
	case d.Degraded != "":
		return fmt.Sprintf("away (%s): %s", d.Degraded, insteadText(store.InsteadLocal))
	case !errors.As(err, &away):
		return ""
	case away.Serve:
		return fmt.Sprintf("away (%s): %s", away.Kind, insteadText(store.InsteadServe))
	}
	return fmt.Sprintf("away (%s): %s", away.Kind, insteadText(store.InsteadRefuse))
}

// insteadText says what becomes of requests while a store is away.
func insteadText(i store.Instead) string {
	switch i {
	case store.InsteadLocal:
		return "limited by the counters of this instance"
	case store.InsteadServe:
		return "served without limit"
	}
	return "answered 503"
}

// view describes what each tier would say.
func (rec *record) view(sc *scratch, e *explanation) {
	decision, claim := sc.decision, 0
	for _, t := range rec.h.tiers {
		v := tierView{Tier: t.name, Charge: t.spec.Charge.String(), DryRun: t.spec.DryRun}
		if claim >= len(sc.claims) || sc.claims[claim].Tier != t.index {
			v.Why = rec.whyNot(t)
			e.Tiers = append(e.Tiers, v)
			continue
		}
		identity, states := sc.claims[claim].Identity, sc.claims[claim].States
		v.Applies, v.Refuses = true, anyExceeded(states)
		v.Fingerprint = fingerprintText(fingerprint(identity))
		if q := rec.quotaOf(t); q != &t.whole {
			v.Share = q.percent
		}
		v.Limits = t.readings(states, decision.Now, rec.quotaOf(t))
		if t.fixed == nil {
			v.Key = rec.keyText(t)
			if t.isUncertain(identity) {
				v.Why = "its key cannot be read with certainty, so it is counted with all such requests"
			} else {
				v.Line = int(identity[len(t.keys[0].digest)]) + 1
			}
		}
		if doubts := t.match.doubts(rec.r); doubts != 0 {
			v.Why = doubts.String() + " may mean something else to the upstream, so the tier concerns the request"
		}
		if decision.RefusedBy >= 0 && claim > decision.RefusedBy {
			v.Why = "not asked, since a tier in front refuses"
		}
		claim++
		e.Tiers = append(e.Tiers, v)
	}
}

// whyNot says why a tier does not apply to the request.
func (rec *record) whyNot(t *tier) string {
	concerned, err := t.match.concerns(rec.r)
	switch {
	case err != nil:
		return "its matcher fails: " + err.Error()
	case !concerned:
		return "it does not match the request"
	case rec.prev != nil && rec.wasSettled(t.name):
		return "an earlier handler of the stack has asked it"
	}
	switch concerned, err = rec.concerns(t); {
	case err != nil:
		return "it goes by the client, which is not known: " + err.Error()
	case !concerned:
		return "it does not concern this client"
	}
	return "every key is empty"
}
