package tieredlimit

import (
	"bytes"
	"fmt"
	"net/http"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// scripted is a handler that does what a test says, in the place of an upstream. In a Caddyfile it is written
// `scripted <name>`, with the name that script returned.
type scripted struct {
	Script string `json:"script"`
}

type scriptFunc func(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error

var (
	scripts    sync.Map
	scriptNext atomic.Int64
)

func init() {
	caddy.RegisterModule(scripted{})
	httpcaddyfile.RegisterHandlerDirective("scripted", func(h httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
		var s scripted
		h.Next()
		if !h.AllArgs(&s.Script) {
			return nil, h.ArgErr()
		}
		return s, nil
	})
	httpcaddyfile.RegisterDirectiveOrder("scripted", httpcaddyfile.Before, "respond")
}

// script registers what a scripted handler does and returns its name.
func script(t *testing.T, do scriptFunc) string {
	name := fmt.Sprintf("script-%d", scriptNext.Add(1))
	scripts.Store(name, do)
	t.Cleanup(func() { scripts.Delete(name) })
	return name
}

// upstream registers a plain HTTP handler as a script.
func upstream(t *testing.T, serve http.HandlerFunc) string {
	return script(t, func(w http.ResponseWriter, r *http.Request, _ caddyhttp.Handler) error {
		serve(w, r)
		return nil
	})
}

func (scripted) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.handlers.scripted", New: func() caddy.Module { return new(scripted) }}
}

func (s scripted) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	do, ok := scripts.Load(s.Script)
	if !ok {
		return fmt.Errorf("no script %q", s.Script)
	}
	return do.(scriptFunc)(w, r, next)
}

// wire records a response as it would leave the server: each interim and the final head, as they stood when they were
// written.
type wire struct {
	header  http.Header
	heads   []wireHead
	body    bytes.Buffer
	flushes int
}

type wireHead struct {
	status int
	header http.Header
}

func (w *wire) Header() http.Header { return w.header }

func (w *wire) WriteHeader(status int) {
	if w.final().status == 0 {
		w.heads = append(w.heads, wireHead{status, w.header.Clone()})
	}
}

func (w *wire) Write(p []byte) (int, error) {
	w.WriteHeader(http.StatusOK)
	return w.body.Write(p)
}

func (w *wire) FlushError() error {
	w.WriteHeader(http.StatusOK)
	w.flushes++
	return nil
}

// final is the final head, if it is written.
func (w *wire) final() wireHead {
	if n := len(w.heads); n > 0 && (w.heads[n-1].status >= 200 || w.heads[n-1].status == http.StatusSwitchingProtocols) {
		return w.heads[n-1]
	}
	return wireHead{}
}

// exchange serves a request by the whole server and returns all that was written.
func (e *edge) exchange(q request) *wire {
	e.t.Helper()
	method, url, peer := "GET", "http://localhost/", "203.0.113.1:50000"
	if q.method != "" {
		method = q.method
	}
	if q.url != "" {
		url = q.url
	}
	if q.peer != "" {
		peer = q.peer
	}
	r := httptest.NewRequest(method, url, nil)
	r.RemoteAddr = peer
	for name, values := range q.header {
		r.Header[http.CanonicalHeaderKey(name)] = values
	}
	if q.edit != nil {
		q.edit(r)
	}
	w := &wire{header: make(http.Header)}
	e.serverFor(q.listen).ServeHTTP(w, r)
	w.WriteHeader(http.StatusOK) // as net/http does for a handler that wrote nothing
	return w
}

// user is a request of a user, for tiers that are keyed by the header X-User.
func user(name string) request {
	return request{header: http.Header{"X-User": {name}}}
}

// from is the same request from another peer.
func (q request) from(addr string) request {
	q.peer = addr + ":40000"
	return q
}

// with is the same request with one more header field.
func (q request) with(name string, values ...string) request {
	header := q.header.Clone()
	if header == nil {
		header = make(http.Header)
	}
	header[http.CanonicalHeaderKey(name)] = values
	q.header = header
	return q
}
