package harness

import (
	"context"
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/go-chi/httprate"
	"github.com/sethvargo/go-limiter/memorystore"
	"golang.org/x/time/rate"
)

func init() {
	caddy.RegisterModule(new(anchorHandler))
	caddy.RegisterModule(new(httprateHandler))
}

// decider tells whether a request passes.
type decider func(ip, user string) bool

// anchorHandler is the thinnest handler around a limiter that is no Caddy module: it reads two header fields and
// answers with a status.
type anchorHandler struct{ decide decider }

// pending is the limiter of the handler that is being provisioned, since a Go value cannot stand in a config.
var pending decider

// anchor opens a limiter within an anchorHandler.
func anchor(open func(Case) decider) func(Case) (Running, error) {
	return func(c Case) (Running, error) {
		pending = open(c)
		return CaddyHandler{Config: func(Case) string { return `{"handler": "bench_anchor"}` }}.Open(c)
	}
}

// CaddyModule returns the Caddy module information.
func (*anchorHandler) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "http.handlers.bench_anchor",
		New: func() caddy.Module { return new(anchorHandler) },
	}
}

// Provision takes the limiter.
func (a *anchorHandler) Provision(caddy.Context) error {
	a.decide = pending
	return nil
}

// ServeHTTP passes what the limiter lets pass.
func (a *anchorHandler) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	if !a.decide(first(r.Header["X-Forwarded-For"]), first(r.Header["X-User"])) {
		w.WriteHeader(http.StatusTooManyRequests)
		return nil
	}
	return next.ServeHTTP(w, r)
}

func first(values []string) string {
	if len(values) == 0 {
		return ""
	}
	return values[0]
}

// httprateHandler is go-chi/httprate, which is a middleware of its own.
type httprateHandler struct {
	Count  int            `json:"count"`
	Window caddy.Duration `json:"window"`

	limiter *httprate.RateLimiter
}

// CaddyModule returns the Caddy module information.
func (*httprateHandler) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "http.handlers.bench_httprate",
		New: func() caddy.Module { return new(httprateHandler) },
	}
}

// Provision makes the limiter.
func (h *httprateHandler) Provision(caddy.Context) error {
	h.limiter = httprate.NewRateLimiter(h.Count, time.Duration(h.Window))
	return nil
}

// ServeHTTP passes what the limiter lets pass.
func (h *httprateHandler) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	if h.limiter.RespondOnLimit(w, r, first(r.Header["X-Forwarded-For"])) {
		return nil
	}
	return next.ServeHTTP(w, r)
}

// anchors are what has no limiter, and limiters that are no Caddy modules.
func anchors() []Subject {
	return []Subject{
		{Name: nameBare, Group: GroupServe, Open: CaddyHandler{Config: func(Case) string { return "" }}.Open},
		{Name: nameHTTPRate, Group: GroupServe, Tiers: 1, Open: CaddyHandler{Config: func(c Case) string {
			count, window := c.limit()
			return fmt.Sprintf(`{"handler": "bench_httprate", "count": %d, "window": %q}`, count, window)
		}}.Open},
		{Name: nameGoLimiter, Group: GroupServe, Tiers: 1, Open: anchor(openGoLimiter)},
		{Name: nameXRate, Group: GroupServe, Tiers: 1, Open: anchor(openXRate)},
	}
}

const (
	nameBare      = "no handler"
	nameHTTPRate  = "go-chi/httprate, 1 key"
	nameGoLimiter = "sethvargo/go-limiter memory store, 1 key"
	nameXRate     = "x/time/rate in a sync.Map, 1 key"
)

func openGoLimiter(c Case) decider {
	count, window := c.limit()
	store, err := memorystore.New(&memorystore.Config{Tokens: uint64(count), Interval: window})
	if err != nil {
		panic(err) // it has no error to return
	}
	ctx := context.Background()
	return func(ip, _ string) bool {
		_, _, _, ok, err := store.Take(ctx, ip)
		return ok && err == nil
	}
}

func openXRate(c Case) decider {
	count, window := c.limit()
	every := rate.Every(window / time.Duration(count))
	var limiters sync.Map
	return func(ip, _ string) bool {
		l, ok := limiters.Load(ip)
		if !ok {
			l, _ = limiters.LoadOrStore(ip, rate.NewLimiter(every, count))
		}
		return l.(*rate.Limiter).Allow()
	}
}

// Interface guards
var (
	_ caddyhttp.MiddlewareHandler = (*anchorHandler)(nil)
	_ caddyhttp.MiddlewareHandler = (*httprateHandler)(nil)
	_ caddy.Provisioner           = (*anchorHandler)(nil)
	_ caddy.Provisioner           = (*httprateHandler)(nil)
)
