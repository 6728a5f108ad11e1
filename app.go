package tieredlimit

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/tieredlimit/caddy-tieredlimit/internal/clientip"
)

func init() {
	caddy.RegisterModule(new(App))
}

// App holds what the handlers of one configuration share: which warnings have been given, how tiers of named stacks
// are defined, and which stacks there are. Handlers create it; it needs no configuration.
type App struct {
	mu       sync.Mutex
	warned   map[string]bool
	ordinals map[string]int
	stacks   map[string]*stackRun
	servers  map[*caddyhttp.Server]*liveServer
	defined  map[stackTier]*tierDefinition
	handlers map[*Handler]int           // in which order they came
	inside   map[*caddyhttp.Route][]any // what leads to handlers in a route, in order; for [App.numberIn]
	unnamed  []*Handler                 // stacks that limit, in the order in which they came
	arrived  int
}

// stackTier names a tier of a stack.
type stackTier struct{ stack, tier string }

// stackRun is what the handlers of one stack share for the life of a configuration.
type stackRun struct {
	warned sync.Map // request-time warnings that were given, by kind
	hops   clientip.HopCheck
	peers  clientip.PeerCheck

	forwardedSeen atomic.Bool // a forwarding header was reported although there are to be no hops

	mu   sync.Mutex
	logs map[string]*refusalLog
}

// liveServer counts the handlers that a request to a server may meet.
type liveServer struct {
	handlers atomic.Int32
}

// CaddyModule returns the Caddy module information.
func (*App) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "tiered_limit",
		New: func() caddy.Module { return new(App) },
	}
}

// Provision makes the app ready for handlers.
func (a *App) Provision(caddy.Context) error {
	a.warned = make(map[string]bool)
	a.ordinals = make(map[string]int)
	a.stacks = make(map[string]*stackRun)
	a.servers = make(map[*caddyhttp.Server]*liveServer)
	a.defined = make(map[stackTier]*tierDefinition)
	a.handlers = make(map[*Handler]int)
	a.inside = make(map[*caddyhttp.Route][]any)
	return nil
}

// Start says what is in force, and lets stores that connect begin to do so, now that the configuration has been accepted. It
// does not wait: apps start in no particular order, and a store that is away must not keep the server from starting.
func (a *App) Start() error {
	handlers := a.inOrder()
	for _, h := range handlers {
		if c, ok := h.counters.(Connector); ok {
			c.Connect()
		}
	}
	announceStacks(handlers)
	return nil
}

// Stop does nothing: handlers return what they took when they are cleaned up.
func (*App) Stop() error { return nil }

// firstWarning tells whether a warning of this kind is the first in this configuration.
func (a *App) firstWarning(kind string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.warned[kind] {
		return false
	}
	a.warned[kind] = true
	return true
}

// ordinal numbers the equal ones among the unnamed, from 1.
func (a *App) ordinal(of string) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.ordinals[of]++
	return a.ordinals[of]
}

// join returns what the handlers of a stack share.
func (a *App) join(stack string) *stackRun {
	a.mu.Lock()
	defer a.mu.Unlock()
	run := a.stacks[stack]
	if run == nil {
		run = &stackRun{logs: make(map[string]*refusalLog)}
		a.stacks[stack] = run
	}
	return run
}

// arrive counts a handler of a server. One in a named route counts twice, since a request may meet it repeatedly.
func (a *App) arrive(server *caddyhttp.Server, namedRoute bool) *liveServer {
	a.mu.Lock()
	defer a.mu.Unlock()
	live := a.servers[server]
	if live == nil {
		live = new(liveServer)
		a.servers[server] = live
	}
	live.handlers.Add(1)
	if namedRoute {
		live.handlers.Add(1)
	}
	return live
}

// define records the tiers of a named stack and refuses one that differs from another handler's of the same name.
func (a *App) define(h *Handler) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.arrived++
	a.handlers[h] = a.arrived
	if h.Name == "" {
		return nil
	}
	for _, t := range h.Tiers {
		at := stackTier{h.Name, t.Name}
		mine, first := t.definition(h), a.defined[at]
		if first == nil {
			a.defined[at] = mine
			continue
		}
		if d := differenceOf(first, mine); d != nil {
			return fmt.Errorf("tier %q is defined twice, with a different %s: %s in %s, %s in %s; handlers that share a name share the "+
				"counters, so the tier must be the same everywhere", t.Name, d.field, orNone(d.first), first.where, orNone(d.second), mine.where)
		}
	}
	return nil
}

// inOrder lists the handlers by their servers' names, and those of a server in the order in which they were provisioned.
// Servers are provisioned in no particular order.
func (a *App) inOrder() []*Handler {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.SortedFunc(maps.Keys(a.handlers), func(x, y *Handler) int {
		return cmp.Or(strings.Compare(x.serverName(), y.serverName()), a.handlers[x]-a.handlers[y])
	})
}

// serverName is the name of the handler's server, if it has one.
func (h *Handler) serverName() string {
	if h.server == nil {
		return ""
	}
	return h.server.Name()
}

// leave forgets a handler.
func (a *App) leave(h *Handler) {
	if a == nil {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.handlers, h)
}

// logOf returns the refusal log of a tier.
func (s *stackRun) logOf(tier string) *refusalLog {
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.logs[tier]
	if l == nil {
		l = new(refusalLog)
		s.logs[tier] = l
	}
	return l
}

// first tells whether a warning of this kind is the first of the stack at request time. Kinds come from the
// configuration, never from a request.
func (s *stackRun) first(kind string) bool {
	if _, given := s.warned.Load(kind); given {
		return false
	}
	_, given := s.warned.LoadOrStore(kind, true)
	return !given
}

// Interface guards
var (
	_ caddy.App         = (*App)(nil)
	_ caddy.Provisioner = (*App)(nil)
)
