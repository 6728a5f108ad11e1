package tieredlimit

import (
	"errors"
	"io"
	"net/http"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

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

// shrink makes the field of the exposed names what it was, as far as expand has changed it.
func (m *moreFields) shrink(header http.Header) {
	if m == nil || m.merged == nil {
		return
	}
	others, ours := withoutOurs(header[fieldExpose], m.merged)
	if !ours {
		return
	}
	if others = append(slices.Clip(m.before), others...); len(others) > 0 {
		header[fieldExpose] = others
	} else {
		delete(header, fieldExpose)
	}
}

// withoutOurs is what is left of a field without the value that was put there first, and whether that is there: others may
// have been appended to it.
func withoutOurs(values []string, value *string) (others []string, ours bool) {
	if len(values) == 0 || !isAlone(values, value) && (len(values) == 1 || values[0] != *value) {
		return values, false
	}
	return values[1:], true
}

// remove takes the fields off again, as far as they are ours, for good.
func (f *fieldWriter) remove(header http.Header) {
	f.withdraw(header)
	f.answer = nil
}

// withdraw takes the fields off again, as far as they are ours.
func (f *fieldWriter) withdraw(header http.Header) {
	f.more.shrink(header)
	for i, name := range f.answer.names {
		switch others, ours := withoutOurs(header[name], &f.value(i)[0]); {
		case !ours:
		case len(others) > 0:
			header[name] = others
		default:
			delete(header, name)
		}
	}
}

// yield leaves a refusal that is not the stack's to whoever made it, if that tells of a limit: the fields of this one would
// speak of another.
func (f *fieldWriter) yield(status int) {
	if f.answer == nil || f.answer == dryRunAnswer || status != http.StatusTooManyRequests && status != http.StatusServiceUnavailable {
		return
	}
	header := f.Header()
	f.withdraw(header)
	if tellsLimit(header) {
		f.answer = nil
	}
}

// tellsLimit reports whether a response has fields that tell of a rate limit.
func tellsLimit(header http.Header) bool {
	for name := range header {
		if name == fieldDryRun {
			continue
		}
		if name == "Retry-After" || strings.HasPrefix(name, "X-Ratelimit") || strings.HasPrefix(name, "X-Rate-Limit") ||
			strings.HasPrefix(name, "Ratelimit") {
			return true
		}
	}
	return false
}

// earlierWins reports whether an earlier stack's fields win over this one's: it refused, or leaves no larger share.
func (rec *record) earlierWins() bool {
	if rec.verdict.refused {
		return false
	}
	for p := rec.prev; p != nil; p = p.prev {
		if p.out.answer != nil && (p.verdict.refused || !rec.verdict.tighter(&p.verdict)) {
			return true
		}
	}
	return false
}

// withdrawEarlier takes the fields of earlier stacks off again.
func (rec *record) withdrawEarlier(header http.Header) {
	for p := rec.prev; p != nil; p = p.prev {
		if p.out.answer != nil {
			p.out.remove(header)
		}
	}
}

// serveWithFields serves the request with the stack's fields on the response.
func (rec *record) serveWithFields(w http.ResponseWriter, next caddyhttp.Handler) error {
	if rec.earlierWins() {
		return next.ServeHTTP(w, rec.r)
	}
	rec.withdrawEarlier(w.Header())
	rec.fill()
	rec.out.ResponseWriter = w
	rec.out.set(w.Header())
	err := next.ServeHTTP(&rec.out, rec.r)
	var failed caddyhttp.HandlerError
	if err != nil && errors.As(err, &failed) {
		rec.out.yield(failed.StatusCode)
	}
	rec.out.settle() // a handler may leave the status to the server, or to error routes
	return err
}

// WriteHeader puts the fields in place at the first final status. 101 is final; other 1xx are not, and have none of ours.
func (f *fieldWriter) WriteHeader(status int) {
	switch {
	case status >= 200 || status == http.StatusSwitchingProtocols:
		f.yield(status)
		f.settle()
	case f.answer != nil:
		f.withdraw(f.Header())
		defer func() { f.set(f.Header()) }()
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
