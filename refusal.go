package tieredlimit

import (
	"cmp"
	"errors"
	"fmt"
	"math/rand/v2"
	"mime"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"
)

// bodyFormat is how a refusal's body is written. The empty one is to be chosen per request.
type bodyFormat string

const (
	bodyChosen  bodyFormat = ""
	bodyProblem bodyFormat = "problem"
	bodyGraphQL bodyFormat = "graphql"
	bodyText    bodyFormat = "text"
	bodyGRPC    bodyFormat = "grpc"
	bodyNone    bodyFormat = "none"
)

// refuse answers a request that a tier refused.
func (h *Handler) refuse(w http.ResponseWriter, rec *record) error {
	header := w.Header()
	rec.withdrawEarlier(header)
	rec.fill()
	rec.out.set(header)
	v := &rec.verdict
	h.answer.setRefused(header, rec.r, v.retryAfter())
	if h.answer.body == bodyChosen && h.wouldHandle(rec.r, http.StatusTooManyRequests) {
		return caddyhttp.Error(http.StatusTooManyRequests, fmt.Errorf("rate limit %q reached", v.tier.name))
	}
	sc := scratchPool.Get().(*scratch)
	defer sc.release()
	if h.answer.speaksGRPC(rec.r) {
		sc.text = v.appendText(sc.text[:0])
		return writeGRPC(w, grpcResourceExhausted, sc.text)
	}
	c := h.answer.refusalBody(sc.text[:0], rec.r, v)
	sc.text = c.body
	return writeBody(w, rec.r, http.StatusTooManyRequests, c)
}

// setRefused puts on the fields that any response has that sends a client away for a number of seconds.
func (a *answer) setRefused(header http.Header, r *http.Request, seconds int64) {
	if a.jitter > 0 {
		seconds += rand.Int64N(seconds*a.jitter/100 + 1)
	}
	values := &[2]string{strconv.FormatInt(seconds, 10), "no-store"}
	header[fieldRetry] = values[0:1:1]
	header[fieldCache] = values[1:2:2]
	a.cors.allow(header, r)
}

// content is a response body and its media type. An empty one has none.
type content struct {
	mediaType string
	body      []byte
}

// refusalBody appends the body that reports a refusal. Names of tiers need no escaping.
func (a *answer) refusalBody(buf []byte, r *http.Request, v *verdict) content {
	seconds := v.retryAfter()
	switch a.body {
	case bodyGraphQL:
		buf = append(buf, `{"errors":[{"message":"Too many requests. Please retry later.","extensions":{"code":"RATE_LIMITED","tier":"`...)
		buf = append(buf, v.tier.name...)
		buf = append(buf, `","limit":`...)
		buf = strconv.AppendInt(buf, v.count(), 10)
		buf = append(buf, `,"retryAfter":`...)
		buf = strconv.AppendInt(buf, seconds, 10)
		return content{graphQLType(r), append(buf, "}}]}"...)}
	case bodyText:
		return content{"text/plain; charset=utf-8", append(v.appendText(buf), '\n')}
	case bodyNone:
		return content{body: buf}
	}
	buf = append(buf, `{"type":"https://iana.org/assignments/http-problem-types#quota-exceeded","title":"Quota exceeded",`...)
	buf = append(buf, `"status":429,"detail":"The limit of `...)
	buf = strconv.AppendInt(buf, v.count(), 10)
	buf = append(buf, ` requests in `...)
	buf = append(buf, v.tier.windows[v.limit]...)
	buf = append(buf, ` s (`...)
	buf = append(buf, v.tier.name...)
	buf = append(buf, `) is used up. Retry in `...)
	buf = strconv.AppendInt(buf, seconds, 10)
	buf = append(buf, ` s.","violated-policies":["`...)
	buf = append(buf, v.tier.policies[v.limit]...)
	buf = append(buf, `"],"retry-after":`...)
	buf = strconv.AppendInt(buf, seconds, 10)
	return content{"application/problem+json", append(buf, '}')}
}

// appendText appends a refusal as one line says it to people.
func (v *verdict) appendText(buf []byte) []byte {
	buf = append(buf, `rate limit "`...)
	buf = append(buf, v.tier.name...)
	buf = append(buf, `" reached, retry in `...)
	buf = strconv.AppendInt(buf, v.retryAfter(), 10)
	return append(buf, " s"...)
}

// graphQLType is the media type of a GraphQL response that fails as a whole. Clients that ask for its own type take errors
// with a status of 4xx or 5xx only in that (GraphQL over HTTP, section 6.4.2); others expect JSON.
func graphQLType(r *http.Request) string {
	for _, line := range r.Header["Accept"] {
		for accepted := range strings.SplitSeq(line, ",") {
			mediaType, params, err := mime.ParseMediaType(accepted)
			if err != nil || mediaType != "application/graphql-response+json" {
				continue
			}
			if q, err := strconv.ParseFloat(cmp.Or(params["q"], "1"), 64); err == nil && q > 0 {
				return mediaType
			}
		}
	}
	return "application/json"
}

// unavailableBody writes the body that reports that nothing could be decided.
func (a *answer) unavailableBody(r *http.Request, seconds int64) content {
	switch a.body {
	case bodyGraphQL:
		return content{graphQLType(r), fmt.Appendf(nil,
			`{"errors":[{"message":"Service unavailable. Please retry later.","extensions":{"code":"SERVICE_UNAVAILABLE","retryAfter":%d}}]}`,
			seconds)}
	case bodyText:
		return content{"text/plain; charset=utf-8", append(unavailableText(seconds), '\n')}
	case bodyNone:
		return content{}
	}
	return content{"application/problem+json", fmt.Appendf(nil,
		`{"type":"about:blank","title":"Service Unavailable","status":503,"detail":"Rate limits cannot be checked at present. Retry in %d s."}`,
		seconds)}
}

// unavailableText says in one line for people that nothing could be decided.
func unavailableText(seconds int64) []byte {
	return fmt.Appendf(nil, "service unavailable, retry in %d s", seconds)
}

// writeBody writes a whole response. HEAD gets no body.
func writeBody(w http.ResponseWriter, r *http.Request, status int, c content) error {
	leaveBody(w, r)
	header := w.Header()
	delete(header, "Content-Length")
	delete(header, "Content-Encoding")
	if c.mediaType != "" {
		header["Content-Type"] = []string{c.mediaType}
	}
	w.WriteHeader(status)
	if r.Method == http.MethodHead || len(c.body) == 0 {
		return nil
	}
	// The response is complete as far as this module is concerned: a client that went away is no error.
	_, _ = w.Write(c.body)
	return nil
}

// wouldHandle tells whether an error route would match this request if it failed with a status. The request is seen as
// those routes see it, with the error in its context: by the server's as it was received, by a subroute's as it is.
func (h *Handler) wouldHandle(r *http.Request, status int) bool {
	if h.errors.config == nil {
		return false
	}
	if _, failing := r.Context().Value(caddyhttp.ErrorCtxKey).(error); failing {
		return false // an error route's own error meets no further one
	}
	failed := r
	if h.errors.server {
		failed = asReceived(r)
	}
	failed = h.errors.config.WithError(failed, caddyhttp.HandlerError{StatusCode: status, Err: errors.New(http.StatusText(status))})
	if routesMatch(h.errors.config.Routes, failed) {
		return true
	}
	if repl, ok := r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer); ok {
		repl.DeleteByPrefix("http.error")
	}
	return false
}

// asReceived copies a request with the method and URL that it came with, before rewrites.
func asReceived(r *http.Request) *http.Request {
	c := r.WithContext(r.Context())
	c.URL = new(url.URL)
	*c.URL = *r.URL
	if orig, ok := r.Context().Value(caddyhttp.OriginalRequestCtxKey).(http.Request); ok {
		c.Method, c.RemoteAddr, c.RequestURI = orig.Method, orig.RemoteAddr, orig.RequestURI
		if orig.URL != nil {
			*c.URL = *orig.URL
		}
	}
	return c
}

// routesMatch tells whether one of the routes matches the request and has a handler that does something. Subroutes are
// looked into; of a group only the first match counts, and a terminal one is the last.
func routesMatch(routes caddyhttp.RouteList, r *http.Request) bool {
	groups := make(map[string]bool)
	for i := range routes {
		group := routes[i].Group
		if group != "" && groups[group] {
			continue
		}
		matched, err := routes[i].MatcherSets.AnyMatchWithError(r)
		if err != nil || !matched {
			continue
		}
		groups[group] = true
		for _, handler := range routes[i].Handlers {
			sub, ok := handler.(*caddyhttp.Subroute)
			if !ok || routesMatch(sub.Routes, r) {
				return true
			}
		}
		if routes[i].Terminal {
			return false
		}
	}
	return false
}

// errUndecided is what error routes are told of a store that could not decide. The log has the reason.
var errUndecided = errors.New("rate limits cannot be checked at present")

// undecided answers a request that the store could not decide: with 503, since the client has done nothing wrong, unless
// the store's user asked to serve it.
func (h *Handler) undecided(w http.ResponseWriter, rec *record, next caddyhttp.Handler, err error) error {
	h.meter.count(outcomeStoreError)
	h.storeMeter.failed(failureKind(err))
	rec.logOutcome(outcomeStoreError, "")
	if c := h.logger.Check(zap.DebugLevel, "the store could not decide a request"); c != nil {
		c.Write(zap.String("stack", h.stackLabel), zap.Error(err))
	}
	seconds, serve := int64(1), false
	var away *UnavailableError
	if errors.As(err, &away) {
		seconds, serve = max(seconds, ceilSeconds(away.RetryAfter)), away.Serve
	}
	if serve || h.DryRun {
		return next.ServeHTTP(w, rec.r)
	}
	header := w.Header()
	rec.withdrawEarlier(header)
	h.answer.setRefused(header, rec.r, seconds)
	if _, cross := rec.r.Header["Origin"]; cross {
		exposeFields(header, []string{"Retry-After"})
	}
	if h.answer.body == bodyChosen && h.wouldHandle(rec.r, http.StatusServiceUnavailable) {
		return caddyhttp.Error(http.StatusServiceUnavailable, errUndecided)
	}
	if h.answer.speaksGRPC(rec.r) {
		return writeGRPC(w, grpcUnavailable, unavailableText(seconds))
	}
	return writeBody(w, rec.r, http.StatusServiceUnavailable, h.answer.unavailableBody(rec.r, seconds))
}
