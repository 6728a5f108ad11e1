package harness

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	_ "github.com/caddyserver/caddy/v2/modules/standard"
)

// CaddyHandler is a subject that is an HTTP handler module of Caddy's.
type CaddyHandler struct {
	// Config returns the handler's JSON. Empty: no handler at all.
	Config func(Case) string

	// LogLevel is the level of Caddy's log, which goes nowhere. Default: INFO.
	LogLevel string
}

// Open provisions a Caddy with the handler, as a config of a user's would.
func (ch CaddyHandler) Open(c Case) (Running, error) {
	route := ""
	if config := ch.Config(c); config != "" {
		route = fmt.Sprintf(`{"handle": [%s]}`, config)
	}
	level := ch.LogLevel
	if level == "" {
		level = "INFO"
	}
	var config caddy.Config
	if err := json.Unmarshal(fmt.Appendf(nil, `{
		"admin": {"disabled": true},
		"logging": {"logs": {"default": {"writer": {"output": "file", "filename": "/dev/null", "roll": false}, "level": %q}}},
		"apps": {"http": {"servers": {"bench": {"listen": [":8080"], "routes": [%s]}}}}
	}`, level, route), &config); err != nil {
		return nil, fmt.Errorf("the handler's config: %w", err)
	}
	ctx, err := caddy.ProvisionContext(&config)
	if err != nil {
		return nil, fmt.Errorf("provisioning: %w", err)
	}
	app, err := ctx.App("http")
	if err != nil {
		return nil, fmt.Errorf("loading the http app: %w", err)
	}
	server := app.(*caddyhttp.App).Servers["bench"]
	handler := caddyhttp.MiddlewareHandler(nothing{})
	if route != "" {
		if len(server.Routes) != 1 || len(server.Routes[0].Handlers) != 1 {
			return nil, errors.New("the server does not have the handler")
		}
		handler = server.Routes[0].Handlers[0]
	}
	return &runningHandler{handler: handler, server: server, prepared: c.Prepared}, nil
}

// nothing is the handler of a Caddy that has none.
type nothing struct{}

func (nothing) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	return next.ServeHTTP(w, r)
}

// runningHandler calls a provisioned handler.
type runningHandler struct {
	handler  caddyhttp.MiddlewareHandler
	server   *caddyhttp.Server
	prepared int
}

// Close cleans up the handler as Caddy does when a config goes.
func (rh *runningHandler) Close() error {
	if c, ok := rh.handler.(caddy.CleanerUpper); ok {
		return c.Cleanup()
	}
	return nil
}

// request is a prepared request that can be used again.
type request struct {
	r     *http.Request
	repl  *caddy.Replacer
	saved caddy.Replacer
	ip    []string // the values of its fields
	user  []string
}

// prepare makes a request ready as the server does, before it goes down the handlers.
func (rh *runningHandler) prepare(ip, user string, w http.ResponseWriter) *request {
	p := &request{ip: []string{ip}, user: []string{user}, repl: caddy.NewReplacer()}
	r := &http.Request{
		Method: http.MethodGet, URL: &url.URL{Path: "/"}, RequestURI: "/", Host: "localhost",
		Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, RemoteAddr: "192.0.2.1:41234", Body: http.NoBody,
		Header: http.Header{
			"Accept": {"*/*"}, "User-Agent": {"bench"}, "X-Forwarded-For": p.ip, "X-User": p.user,
		},
	}
	p.r = caddyhttp.PrepareRequest(r, p.repl, w, rh.server)
	p.saved = *p.repl
	return p
}

// Caller implements [Running]. Every handler gets the same: a request whose replacer is as fresh as on arrival, and an
// empty response header.
func (rh *runningHandler) Caller(v *visits) func(i int) bool {
	w := &response{header: make(http.Header)}
	n := min(v.n, max(1, rh.prepared))
	requests := make([]*request, n)
	for i := range requests {
		ip, user := v.of(i)
		requests[i] = rh.prepare(ip, user, w)
	}
	passed := false
	next := caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error {
		passed = true
		return nil
	})
	handler := rh.handler
	return func(i int) bool {
		p := requests[i%n]
		p.ip[0], p.user[0] = v.of(i)
		*p.repl = p.saved
		clear(w.header)
		passed = false
		w.err = handler.ServeHTTP(w, p.r, next)
		return passed
	}
}

// response takes what a handler answers and forgets it.
type response struct {
	header http.Header
	err    error
}

func (w *response) Header() http.Header       { return w.header }
func (*response) Write(p []byte) (int, error) { return len(p), nil }
func (*response) WriteHeader(int)             {}
