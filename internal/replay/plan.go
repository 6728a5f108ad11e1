package replay

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// plan is a config as a replay runs it: for each server the routes that lead to stacks.
type plan struct {
	sites  []*site
	stacks []*stage
	notes  []string
	needs  needs

	studies *fieldStudies
}

// stage is a stack in the plan, with what is counted of it.
type stage struct {
	Stack
	info  StackInfo
	site  *site
	tally *stackTally
	deps  [][]string // header fields that the keys of each tier need
}

// planRoute is a route.
type planRoute struct {
	group    int // 0: none
	matchers caddyhttp.MatcherSets
	steps    []planStep
	terminal bool
}

// planStep is a handler.
type planStep struct {
	kind    stepKind
	stage   *stage
	routes  []*planRoute
	named   string
	handler caddyhttp.MiddlewareHandler
}

// Wrap returns the stack that a handler is, and whether it is one.
type Wrap func(caddyhttp.MiddlewareHandler) (Stack, bool)

// compile provisions what is left of a config. quiet keeps the warnings of the stacks from standard error.
func compile(config []byte, wrap Wrap, quiet bool) (*plan, error) {
	raw, notes, err := reduce(config)
	if err != nil {
		return nil, err
	}
	cfg, err := provisionable(raw, quiet)
	if err != nil {
		return nil, err
	}
	ctx, err := caddy.ProvisionContext(cfg)
	if err != nil {
		return nil, fmt.Errorf("provisioning the tiered_limit handlers of the config: %w", err)
	}
	app, err := ctx.App("http")
	if err != nil {
		return nil, err
	}
	p := &plan{notes: notes}
	c := &compiler{plan: p, wrap: wrap, groups: make(map[string]int)}
	httpsPort := "443"
	if n := raw.Apps.HTTP.HTTPSPort; n != 0 {
		httpsPort = strconv.Itoa(n)
	}
	for _, name := range slices.Sorted(maps.Keys(raw.Apps.HTTP.Servers)) {
		s := raw.Apps.HTTP.Servers[name]
		site := newSite(name, s, httpsPort)
		if site.server = app.(*caddyhttp.App).Servers[name]; site.server != nil {
			if err := c.site(site, s); err != nil {
				return nil, fmt.Errorf("server %q: %w", name, err)
			}
		}
		p.sites = append(p.sites, site)
	}
	p.needs.settle()
	return p, nil
}

// provisionable is a Caddy config with the servers that have stacks, and nothing else.
func provisionable(raw *rawConfig, quiet bool) (*caddy.Config, error) {
	servers := make(map[string]any)
	for name, s := range raw.Apps.HTTP.Servers {
		if len(s.Routes) == 0 {
			continue
		}
		servers[name] = struct {
			*rawServer
			TLS       any             `json:"tls_connection_policies,omitempty"`
			Logs      any             `json:"logs,omitempty"`
			AutoHTTPS map[string]bool `json:"automatic_https"`
		}{rawServer: s, AutoHTTPS: map[string]bool{"disable": true}}
	}
	app, err := json.Marshal(map[string]any{"servers": servers})
	if err != nil {
		return nil, fmt.Errorf("encoding the reduced config: %w", err)
	}
	cfg := loggingTo("WARN")
	if quiet {
		cfg = loggingTo("FATAL")
	}
	cfg.AppsRaw = caddy.ModuleMap{"http": app}
	return cfg, nil
}

// loggingTo is a config without apps that logs what the stacks have to say from a level on. It goes to where Caddy logs from
// the beginning, or Caddy would say that it has been redirected.
func loggingTo(level string) *caddy.Config {
	off := false
	return &caddy.Config{
		Admin: &caddy.AdminConfig{Disabled: true, Config: &caddy.ConfigSettings{Persist: &off}},
		Logging: &caddy.Logging{Logs: map[string]*caddy.CustomLog{"default": {
			BaseLog: caddy.BaseLog{WriterRaw: json.RawMessage(`{"output":"stderr"}`), Level: level},
			Include: []string{"http.handlers.tiered_limit"},
		}}},
	}
}

// compiler makes the routes of a plan from those that were provisioned, which have the same shape.
type compiler struct {
	*plan
	wrap   Wrap
	groups map[string]int
}

func (c *compiler) site(s *site, raw *rawServer) (err error) {
	if s.routes, err = c.routes(s, raw.Routes, s.server.Routes); err != nil {
		return err
	}
	s.named = make(map[string]*planRoute)
	for name, route := range raw.NamedRoutes {
		routes, err := c.routes(s, []*rawRoute{route}, caddyhttp.RouteList{*s.server.NamedRoutes[name]})
		if err != nil {
			return err
		}
		s.named[name] = routes[0]
	}
	return nil
}

var errShape = errors.New("the provisioned routes are not those of the config")

func (c *compiler) routes(s *site, raw []*rawRoute, list caddyhttp.RouteList) ([]*planRoute, error) {
	if len(raw) != len(list) {
		return nil, errShape
	}
	routes := make([]*planRoute, len(raw))
	for i, shape := range raw {
		route := &planRoute{matchers: list[i].MatcherSets, terminal: shape.Terminal}
		if shape.Group != "" {
			if c.groups[shape.Group] == 0 {
				c.groups[shape.Group] = len(c.groups) + 1
			}
			route.group = c.groups[shape.Group]
		}
		c.needs.matchers(route.matchers)
		handlers := list[i].Handlers
		for _, step := range shape.shape {
			var handler caddyhttp.MiddlewareHandler
			if step.kind <= stepRun {
				if len(handlers) == 0 {
					return nil, errShape
				}
				handler, handlers = handlers[0], handlers[1:]
			}
			compiled, err := c.step(s, step, handler)
			if err != nil {
				return nil, err
			}
			route.steps = append(route.steps, compiled)
		}
		routes[i] = route
	}
	return routes, nil
}

func (c *compiler) step(s *site, shape shapeStep, handler caddyhttp.MiddlewareHandler) (planStep, error) {
	step := planStep{kind: shape.kind, named: shape.name}
	switch shape.kind {
	case stepStack:
		stack, ok := c.wrap(handler)
		if !ok {
			return step, errShape
		}
		step.stage = c.stage(s, stack)
	case stepSubroute:
		sub, ok := handler.(*caddyhttp.Subroute)
		if !ok {
			return step, errShape
		}
		var err error
		step.routes, err = c.routes(s, shape.routes, sub.Routes)
		return step, err
	case stepRun:
		step.handler = handler
		c.needs.everything = true
	}
	return step, nil
}

// stage adds a stack to the plan.
func (c *compiler) stage(s *site, stack Stack) *stage {
	info := stack.Info()
	st := &stage{Stack: stack, info: info, site: s, tally: newStackTally(info)}
	for _, t := range info.Tiers {
		var deps []string
		for _, p := range t.Placeholders {
			if name := HeaderOf(p); name != "" {
				deps = append(deps, name)
			}
			c.needs.placeholder(p)
		}
		st.deps = append(st.deps, deps)
		c.needs.matchers(t.Matchers)
	}
	c.needs.headers = slices.Concat(c.needs.headers, info.Headers, info.Fields)
	c.needs.telling = info.Telling
	s.stages = append(s.stages, st)
	for _, header := range info.clientHeaders() {
		s.chains.state(header)
	}
	c.stacks = append(c.stacks, st)
	return st
}

// close gives back what the stacks hold.
func (p *plan) close() error {
	var errs []error
	for _, s := range p.stacks {
		errs = append(errs, s.Close())
	}
	return errors.Join(errs...)
}

// run takes a request through the routes of a site. It reports whether the request ended there.
func (w *walk) run(routes []*planRoute) (ended bool, err error) {
	for _, route := range routes {
		if route.group != 0 && slices.Contains(w.groups, route.group) {
			continue
		}
		matches, err := route.matchers.AnyMatchWithError(w.query.Request)
		if err != nil {
			return true, err
		}
		if !matches {
			continue
		}
		if route.group != 0 {
			w.groups = append(w.groups, route.group)
		}
		for i := range route.steps {
			if ended, err := w.step(&route.steps[i]); ended || err != nil {
				return true, err
			}
		}
		if route.terminal {
			return true, nil
		}
	}
	return false, nil
}

// step takes the request through a handler.
func (w *walk) step(s *planStep) (ended bool, err error) {
	switch s.kind {
	case stepStack:
		return w.judge(s.stage)
	case stepSubroute:
		return w.run(s.routes)
	case stepInvoke:
		if w.depth++; w.depth > maxInvoked {
			return true, fmt.Errorf("named routes invoke each other %d deep", maxInvoked)
		}
		ended, err = w.run([]*planRoute{w.site.named[s.named]})
		w.depth--
		return ended, err
	case stepRun:
		return w.pass(s.handler)
	case stepAuth, stepUser:
		if w.user != "" {
			w.query.Replacer.Set(userPlaceholder, w.user)
		}
		return s.kind == stepAuth && w.user == "", nil
	}
	return true, nil
}

// pass lets a handler of Caddy change the request. It ended if the handler did not pass it on.
func (w *walk) pass(handler caddyhttp.MiddlewareHandler) (ended bool, err error) {
	ended = true
	err = handler.ServeHTTP(discard{}, w.query.Request, caddyhttp.HandlerFunc(
		func(_ http.ResponseWriter, r *http.Request) error {
			ended = false
			w.query.Request = r
			return nil
		}))
	return ended, err
}

const (
	userPlaceholder = "http.auth.user.id"

	maxInvoked = 100
)

// discard is the response of requests that are not served.
type discard struct{}

func (discard) Header() http.Header         { return make(http.Header) }
func (discard) Write(p []byte) (int, error) { return len(p), nil }
func (discard) WriteHeader(int)             {}

// HeaderOf is the header field that a placeholder reads, or empty.
func HeaderOf(placeholder string) string {
	if name, ok := strings.CutPrefix(placeholder, "http.request.header."); ok {
		return http.CanonicalHeaderKey(name)
	}
	if strings.HasPrefix(placeholder, "http.request.cookie.") {
		return "Cookie"
	}
	return ""
}
