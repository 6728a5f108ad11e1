package tieredlimit

import (
	"encoding/json"
	"net/http"
	"slices"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// place is where a handler that is being provisioned stands among the routes, from the outermost list to the innermost. Of
// a named route it is not known which it is, so its place begins inside.
type place []placeStep

// placeStep is one list of routes, the route of it that leads to the handler, and which of the route's handlers does.
type placeStep struct {
	routes  caddyhttp.RouteList
	at      int
	handler int // in the route's raw handlers; -1: not known
}

// route is the step's route.
func (s *placeStep) route() *caddyhttp.Route { return &s.routes[s.at] }

// findPlace finds the handler's place. In each list it is in the first route that still has its raw handlers (see
// [currentRoute]).
func (h *Handler) findPlace(ctx caddy.Context) place {
	var p place
	var routes caddyhttp.RouteList
	if route, where := currentRoute(h.server); route != nil {
		routes = h.server.Routes
		if where == inErrors {
			routes = h.server.Errors.Routes
		}
	}
	for _, module := range ctx.Modules() {
		sub, ok := module.(*caddyhttp.Subroute)
		if !ok {
			continue
		}
		p = h.app.enter(p, routes, sub)
		routes = sub.Routes
	}
	return h.app.enter(p, routes, h)
}

// enter adds a list of routes to a place, of which the current one leads to what is inside.
func (a *App) enter(p place, routes caddyhttp.RouteList, inside any) place {
	at := slices.IndexFunc(routes, func(r caddyhttp.Route) bool { return r.HandlersRaw != nil })
	if at < 0 {
		return p
	}
	step := placeStep{routes: routes, at: at, handler: -1}
	number := a.numberIn(step.route(), inside)
	for i, raw := range step.route().HandlersRaw {
		if !leadsToLimiter(raw) {
			continue
		}
		if number == 0 {
			step.handler = i
			break
		}
		number--
	}
	return append(p, step)
}

// numberIn numbers what leads to handlers of this module in a route, in the order in which it is provisioned, from 0.
func (a *App) numberIn(route *caddyhttp.Route, inside any) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	number := slices.Index(a.inside[route], inside)
	if number < 0 {
		number = len(a.inside[route])
		a.inside[route] = append(a.inside[route], inside)
	}
	return number
}

// leadsToLimiter reports whether a raw handler is one of this module, or a subroute with one inside.
func leadsToLimiter(raw json.RawMessage) bool {
	handler := readRaw(raw)
	return handler.Handler == "tiered_limit" || handler.Handler == "subroute" &&
		slices.ContainsFunc(handler.inside(), leadsToLimiter)
}

// rawHandler is what is read of a handler that Caddy has not loaded yet.
type rawHandler struct {
	Handler string     `json:"handler"`
	Routes  []rawRoute `json:"routes"`
	Request struct {
		Add     map[string]json.RawMessage `json:"add"`
		Set     map[string]json.RawMessage `json:"set"`
		Replace map[string]json.RawMessage `json:"replace"`
	} `json:"request"`
	HandleResponse []struct {
		Routes []rawRoute `json:"routes"`
	} `json:"handle_response"`
	Destinations []string `json:"destinations"`
}

type rawRoute struct {
	Handle []json.RawMessage `json:"handle"`
}

// readRaw reads a raw handler. What it has otherwise than it should be is left out; Caddy refuses it soon.
func readRaw(raw json.RawMessage) rawHandler {
	var handler rawHandler
	_ = json.Unmarshal(raw, &handler)
	return handler
}

// inside lists the handlers of a handler's own routes.
func (r *rawHandler) inside() []json.RawMessage {
	var list []json.RawMessage
	for _, route := range r.Routes {
		list = append(list, route.Handle...)
	}
	for _, response := range r.HandleResponse {
		for _, route := range response.Routes {
			list = append(list, route.Handle...)
		}
	}
	return list
}

// behind lists the raw handlers that a request may meet behind the handler.
func (p place) behind() []json.RawMessage {
	var list []json.RawMessage
	for _, step := range slices.Backward(p) {
		route := step.route()
		if step.handler >= 0 {
			list = append(list, route.HandlersRaw[step.handler+1:]...)
		}
		if route.Terminal {
			break
		}
		for i := step.at + 1; i < len(step.routes); i++ {
			if !excludes(route, &step.routes[i]) {
				list = append(list, step.routes[i].HandlersRaw...)
			}
		}
	}
	return list
}

// inFront lists the loaded handlers of the routes that a request may have met in front of the handler, and the raw ones of
// its own routes.
func (p place) inFront() (loaded []caddyhttp.MiddlewareHandler, raw []json.RawMessage) {
	for _, step := range p {
		route := step.route()
		for i := range step.routes[:step.at] {
			if !excludes(&step.routes[i], route) {
				loaded = append(loaded, step.routes[i].Handlers...)
			}
		}
		if step.handler > 0 {
			raw = append(raw, route.HandlersRaw[:step.handler]...)
		}
	}
	return loaded, raw
}

// excludes reports whether no request meets both of two routes of a list, of which the second comes later.
func excludes(first, second *caddyhttp.Route) bool {
	return first.Terminal || first.Group != "" && first.Group == second.Group || apart(first.MatcherSets, second.MatcherSets)
}

// matches reports whether a request gets to the place, as far as its routes tell by themselves.
func (p place) matches(r *http.Request) bool {
	for i := range p {
		step := &p[i]
		route := step.route()
		if !matchesRoute(route, r) {
			return false
		}
		for j := range step.routes[:step.at] {
			earlier := &step.routes[j]
			if (earlier.Terminal || earlier.Group != "" && earlier.Group == route.Group) && matchesRoute(earlier, r) {
				return false
			}
		}
	}
	return true
}

func matchesRoute(route *caddyhttp.Route, r *http.Request) bool {
	matched, err := route.MatcherSets.AnyMatchWithError(r)
	return err == nil && matched
}

// meets reports whether a request may meet the handlers at both places, of which the other was provisioned earlier.
func (p place) meets(other place) bool {
	for i := range min(len(p), len(other)) {
		mine, theirs := p[i].route(), other[i].route()
		if mine == theirs {
			if p[i].handler != other[i].handler {
				return true
			}
			continue
		}
		if &p[i].routes[0] != &other[i].routes[0] {
			return false
		}
		return !excludes(theirs, mine)
	}
	return false
}
