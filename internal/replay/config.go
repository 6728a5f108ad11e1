package replay

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// rawConfig is what a replay takes from a Caddy config. Everything else in it is not even looked at.
type rawConfig struct {
	Apps struct {
		HTTP struct {
			HTTPSPort int                   `json:"https_port,omitempty"`
			Servers   map[string]*rawServer `json:"servers,omitempty"`
		} `json:"http"`
	} `json:"apps"`
}

// rawServer is the part of a server that decides which requests meet which stacks, and who their clients are.
type rawServer struct {
	Listen               []string             `json:"listen,omitempty"`
	Routes               []*rawRoute          `json:"routes,omitempty"`
	NamedRoutes          map[string]*rawRoute `json:"named_routes,omitempty"`
	TrustedProxies       json.RawMessage      `json:"trusted_proxies,omitempty"`
	TrustedProxiesStrict int                  `json:"trusted_proxies_strict,omitempty"`
	TrustedProxiesUnix   bool                 `json:"trusted_proxies_unix,omitempty"`
	ClientIPHeaders      []string             `json:"client_ip_headers,omitempty"`

	TLS  json.RawMessage `json:"tls_connection_policies,omitempty"`
	Logs *rawLogs        `json:"logs,omitempty"`
}

// rawLogs tells which loggers a server's access lines carry.
type rawLogs struct {
	DefaultLoggerName string                     `json:"default_logger_name,omitempty"`
	LoggerNames       map[string]json.RawMessage `json:"logger_names,omitempty"`
}

// rawRoute is a route, and also what Caddy reads as one.
type rawRoute struct {
	Group    string            `json:"group,omitempty"`
	Match    []json.RawMessage `json:"match,omitempty"`
	Handle   []json.RawMessage `json:"handle,omitempty"`
	Terminal bool              `json:"terminal,omitempty"`

	shape []shapeStep
}

// shapeStep is what is known of a handler before it is compiled.
type shapeStep struct {
	kind   stepKind
	routes []*rawRoute // of a subroute
	name   string      // of the named route
}

// stepKind says what a handler means for a replay.
type stepKind uint8

const (
	stepStack    stepKind = iota // a tiered_limit
	stepSubroute                 // routes within
	stepInvoke                   // a named route
	stepRun                      // run as it is: it only changes the request, or variables
	stepAuth                     // ends requests without a user, and makes the user known
	stepUser                     // may make the user known
	stepEnd                      // answers, so that nothing behind it is met
)

// handlerKinds are the handlers of Caddy that matter in front of a stack. Those not named are passed over.
var handlerKinds = map[string]stepKind{
	"tiered_limit":    stepStack,
	"subroute":        stepSubroute,
	"invoke":          stepInvoke,
	"rewrite":         stepRun,
	"map":             stepRun,
	"vars":            stepRun,
	"authentication":  stepAuth,
	"static_response": stepEnd,
	"error":           stepEnd,
	"file_server":     stepEnd,
	"reverse_proxy":   stepEnd,
	"metrics":         stepEnd,
}

// harmless are handlers of Caddy that neither answer nor change what a stack sees.
var harmless = []string{
	"headers", "encode", "templates", "log_append", "request_body", "copy_response", "copy_response_headers", "push",
	"tracing", "intercept", "acme_server",
}

// reduction takes a config apart.
type reduction struct {
	named map[string]*rawRoute
	using map[string]bool // named routes that hold a stack
	ahead map[string]bool // named routes that are invoked where a stack may follow
	notes []string
}

// reduce leaves of a config what a replay needs: the tiered_limit handlers, the routes around them, and how servers
// find the client's address. Nothing else can be provisioned, since it is no longer there.
func reduce(config []byte) (*rawConfig, []string, error) {
	raw := new(rawConfig)
	if err := json.Unmarshal(config, raw); err != nil {
		return nil, nil, fmt.Errorf("reading the config: %w", err)
	}
	var notes []string
	found := false
	for _, name := range slices.Sorted(maps.Keys(raw.Apps.HTTP.Servers)) {
		server := raw.Apps.HTTP.Servers[name]
		if server == nil {
			return nil, nil, fmt.Errorf("server %q is null", name)
		}
		r := &reduction{named: server.NamedRoutes, using: make(map[string]bool), ahead: make(map[string]bool)}
		r.findNamed()
		var err error
		if server.Routes, _, err = r.list(server.Routes, false); err != nil {
			return nil, nil, fmt.Errorf("server %q: %w", name, err)
		}
		if err := r.reduceNamed(server); err != nil {
			return nil, nil, fmt.Errorf("server %q: %w", name, err)
		}
		found = found || len(server.Routes) > 0
		for _, n := range r.notes {
			notes = append(notes, "server "+name+": "+n)
		}
	}
	if !found {
		return nil, nil, errors.New("the config has no tiered_limit handler in the routes of its servers")
	}
	return raw, notes, nil
}

// findNamed finds the named routes that hold a stack, directly or through others.
func (r *reduction) findNamed() {
	for range r.named {
		for name, route := range r.named {
			if route == nil || r.using[name] {
				continue
			}
			for _, raw := range route.Handle {
				if r.holds(raw) {
					r.using[name] = true
				}
			}
		}
	}
}

// holds tells whether a handler is a stack or leads to one.
func (r *reduction) holds(raw json.RawMessage) bool {
	var h rawHandler
	if json.Unmarshal(raw, &h) != nil {
		return false
	}
	switch h.Handler {
	case "tiered_limit":
		return true
	case "invoke":
		return r.using[h.Name]
	case "subroute":
		return slices.ContainsFunc(h.Routes, func(route *rawRoute) bool {
			return route != nil && slices.ContainsFunc(route.Handle, r.holds)
		})
	}
	return false
}

// reduceNamed reduces the named routes that hold a stack or are invoked in front of one, and drops the others. Which
// these are becomes known as they are reduced, since they may invoke each other.
func (r *reduction) reduceNamed(server *rawServer) error {
	for known := -1; known < len(r.ahead); {
		known = len(r.ahead)
		server.NamedRoutes = make(map[string]*rawRoute)
		for _, name := range slices.Sorted(maps.Keys(r.named)) {
			if r.named[name] == nil || !r.using[name] && !r.ahead[name] {
				continue
			}
			route, _, err := r.route(r.named[name], r.ahead[name])
			if err != nil {
				return fmt.Errorf("named route %q: %w", name, err)
			}
			if route == nil {
				route = new(rawRoute) // of no consequence
			}
			server.NamedRoutes[name] = route
		}
	}
	return nil
}

// list reduces a list of routes, from the last to the first. needed tells whether a stack may follow; it returns
// whether one may follow what is in front of the list.
func (r *reduction) list(routes []*rawRoute, needed bool) ([]*rawRoute, bool, error) {
	var kept []*rawRoute
	for _, route := range slices.Backward(routes) {
		if route == nil {
			continue
		}
		reduced, holds, err := r.route(route, needed)
		if err != nil {
			return nil, false, err
		}
		needed = needed || holds
		if reduced != nil {
			kept = append(kept, reduced)
		}
	}
	slices.Reverse(kept)
	return kept, needed, nil
}

// route reduces one route, to nil if it is of no consequence.
func (r *reduction) route(route *rawRoute, needed bool) (*rawRoute, bool, error) {
	out := &rawRoute{Group: route.Group, Match: route.Match, Terminal: route.Terminal}
	holds := false
	for _, raw := range slices.Backward(route.Handle) {
		step, kept, err := r.handler(raw, needed || holds)
		if err != nil {
			return nil, false, err
		}
		if step == nil {
			continue
		}
		holds = holds || r.holds(raw)
		out.shape = append(out.shape, *step)
		if kept != nil {
			out.Handle = append(out.Handle, kept)
		}
	}
	slices.Reverse(out.shape)
	slices.Reverse(out.Handle)
	if !holds && (!needed || len(out.shape) == 0 && !out.Terminal && out.Group == "") {
		return nil, false, nil
	}
	return out, holds, nil
}

// rawHandler is what is looked at in a handler.
type rawHandler struct {
	Handler        string            `json:"handler"`
	Routes         []*rawRoute       `json:"routes"`
	Name           string            `json:"name"`
	HandleResponse []json.RawMessage `json:"handle_response"`
	PassThru       bool              `json:"pass_thru"`
	Request        json.RawMessage   `json:"request"`
}

// handler says what a handler means, and what is left of it to be compiled.
func (r *reduction) handler(raw json.RawMessage, needed bool) (*shapeStep, json.RawMessage, error) {
	var h rawHandler
	if err := json.Unmarshal(raw, &h); err != nil {
		return nil, nil, fmt.Errorf("reading a handler: %w", err)
	}
	kind, known := handlerKinds[h.Handler]
	switch {
	case kind == stepStack && known:
		kept, err := alone(raw)
		return &shapeStep{kind: stepStack}, kept, err
	case kind == stepInvoke:
		switch {
		case !needed && !r.using[h.Name]:
			return nil, nil, nil
		case r.named[h.Name] == nil:
			return &shapeStep{kind: stepEnd}, nil, nil // an error
		case needed:
			r.ahead[h.Name] = true
		}
		return &shapeStep{kind: stepInvoke, name: h.Name}, raw, nil
	case kind == stepSubroute:
		return r.subroute(h.Routes, needed)
	case bytes.Contains(raw, []byte(`"tiered_limit"`)):
		r.note("a tiered_limit inside a %s handler is not replayed", h.Handler)
	}
	switch {
	case !needed:
		return nil, nil, nil
	case !known:
		return r.unknown(h)
	case kind == stepRun:
		return &shapeStep{kind: stepRun}, raw, nil
	case kind == stepEnd && (h.PassThru || len(h.HandleResponse) > 0):
		r.note("a %s handler in front of a stack may let requests pass or answer them itself; replayed as if all passed",
			h.Handler)
		return &shapeStep{kind: stepUser}, nil, nil
	}
	return &shapeStep{kind: kind}, nil, nil
}

// subroute reduces the routes within a subroute.
func (r *reduction) subroute(routes []*rawRoute, needed bool) (*shapeStep, json.RawMessage, error) {
	inner, _, err := r.list(routes, needed)
	if err != nil || len(inner) == 0 {
		return nil, nil, err
	}
	kept, err := json.Marshal(map[string]any{"handler": "subroute", "routes": inner})
	return &shapeStep{kind: stepSubroute, routes: inner}, kept, err
}

// unknown deals with handlers in front of a stack that a replay has no own idea of.
func (r *reduction) unknown(h rawHandler) (*shapeStep, json.RawMessage, error) {
	switch {
	case h.Handler == "headers" && len(h.Request) > 0:
		r.note("a headers handler in front of a stack changes the request; the replay sees it as the log has it")
		return nil, nil, nil
	case slices.Contains(harmless, h.Handler):
		return nil, nil, nil
	}
	r.note("a %s handler in front of a stack is not run; replayed as if it let all requests pass", h.Handler)
	return &shapeStep{kind: stepUser}, nil, nil
}

func (r *reduction) note(format string, args ...any) {
	if n := fmt.Sprintf(format, args...); !slices.Contains(r.notes, n) {
		r.notes = append(r.notes, n)
	}
}

// alone takes out of a tiered_limit handler what reaches beyond it: its events, and its store unless that is the memory
// store. So a replay counts in this process and never touches a server's counters.
func alone(raw json.RawMessage) (json.RawMessage, error) {
	var h map[string]json.RawMessage
	if err := json.Unmarshal(raw, &h); err != nil {
		return nil, fmt.Errorf("reading a tiered_limit handler: %w", err)
	}
	delete(h, "events")
	if store, there := h["store"]; there {
		var backend struct {
			Backend string `json:"backend"`
		}
		if err := json.Unmarshal(store, &backend); err != nil || backend.Backend != "memory" {
			delete(h, "store")
		}
	}
	return json.Marshal(h)
}

// overTLS tells whether the server speaks TLS, as far as the config says.
func (s *rawServer) overTLS(httpsPort string) bool {
	return len(s.TLS) > 0 && string(s.TLS) != "null" || slices.ContainsFunc(s.Listen, func(addr string) bool {
		return strings.HasSuffix(addr, ":"+httpsPort)
	})
}
