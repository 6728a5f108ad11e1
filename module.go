// Package tieredlimit is a Caddy HTTP handler that decides, before anything expensive runs, whether a request may
// pass. A request meets a stack of tiers in the order written, say one per client address, one per user and one for
// the whole service, and is served only if every tier allows it. The first tier that refuses is named in the 429.
package tieredlimit

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"

	"github.com/tieredlimit/caddy-tieredlimit/internal/clientip"
)

func init() {
	caddy.RegisterModule(Handler{})
}

// timeSource is what handlers read the time from, taken at Provision.
var timeSource = time.Now

// Handler limits the rate of requests by a stack of tiers, per client address, per user, for the whole service, or by
// any other key. A request passes only if every tier allows it; the first tier that refuses answers 429 and is named.
//
// Where the clients' addresses come from has to be stated, by trusted_hops here or trusted_proxies on the server; a
// stack that needs an address and has neither is inert, and says so in the log.
type Handler struct {
	// The name of the stack. Handlers with the same name share the counters of tiers with the same name, which then
	// must be defined identically. 1 to 64 of `a-z 0-9 _ -`. Without a name the stack is known by the server's listen
	// addresses, the hosts of its route and its own configuration.
	Name string `json:"name,omitempty"`

	// How many entries the operator's own proxies append to the forwarding header: the client is the entry at that
	// place counted from the right. 0 means that clients connect directly and forwarding headers are ignored. From
	// 0 to 64. Absent means not stated; then the server's trusted_proxies decide.
	TrustedHops *int `json:"trusted_hops,omitempty"`

	// The header that trusted_hops counts in. Default: `X-Forwarded-For`. `Forwarded` is read by RFC 7239; any other
	// is read as a list of addresses, so that a header with a single address is 1 hop.
	ClientIPHeader string `json:"client_ip_header,omitempty"`

	// The number of leading bits of an IPv4 address that make one client. From 1 to 32. Default: 32.
	IPv4Prefix *int `json:"ipv4_prefix,omitempty"`

	// The number of leading bits of an IPv6 address that make one client. From 1 to 128. Default: 64, since a host
	// usually has a whole /64 to pick addresses from.
	IPv6Prefix *int `json:"ipv6_prefix,omitempty"`

	// Prefixes of translators in front of the server (NAT64, SIIT): an IPv6 address behind one of them is the IPv4 address
	// that it holds, as RFC 6052 places it. Each has 32, 40, 48, 56, 64 or 96 bits. The well-known `64:ff9b::/96`,
	// `::ffff:0:0:0/96` and v4-mapped addresses need not be listed. Default: none.
	NAT64Prefix []string `json:"nat64_prefix,omitempty"`

	// The tiers, in the order in which a request meets them. At least one.
	Tiers []*Tier `json:"tiers"`

	// When tiers are charged for a request: `served` charges only requests that every tier allows; `checked` charges
	// a tier as soon as it has allowed the request itself. Default: `served`.
	Charge string `json:"charge,omitempty"`

	// Paths that are neither limited nor counted, as in Caddy's path matcher: any case, `*` as a wildcard; a trailing
	// slash does not matter. A path that was sent with encoded slashes, backslashes or dots, or with dot segments,
	// is always counted.
	Exempt []string `json:"exempt,omitempty"`

	// Addresses and CIDR ranges of clients that are neither limited nor counted.
	ExemptClients []string `json:"exempt_clients,omitempty"`

	// What happens to CORS preflight requests: `exempt` passes them uncounted, `count` treats them as any other
	// request. Default: `exempt`.
	Preflight string `json:"preflight,omitempty"`

	// The sets of response header fields that tell clients where they stand: `x-ratelimit`, `draft-11` (the IETF
	// draft-ietf-httpapi-ratelimit-headers), both, or `none`. Default: `x-ratelimit`.
	Headers []string `json:"headers,omitempty"`

	// The body of a refusal: `problem` (RFC 9457), `graphql`, `grpc`, `text` or `none`. Default: the server's error
	// routes if one of them would handle a 429 for the request, else `grpc` for gRPC calls, else `problem`.
	Body string `json:"body,omitempty"`

	// Which origins may read a refusal from a browser. An upstream that does CORS itself never sees a refused request.
	CORS *CORS `json:"cors,omitempty"`

	// Up to how many percent of the time that is left are added to Retry-After at random, so that refused clients do
	// not return all at once. From 0 to 100. Default: 0.
	Jitter int `json:"jitter,omitempty"`

	// Whether client addresses and keys may appear in this module's log lines. Default: false.
	LogKeys bool `json:"log_keys,omitempty"`

	// Whether the stack decides, counts and logs as if live, but serves every request. Default: false.
	DryRun bool `json:"dry_run,omitempty"`

	// Whether responses to requests that the dry stack would have refused get `X-RateLimit-Dry-Run: refused`. It needs
	// dry_run. Default: false.
	DryRunHeader bool `json:"dry_run_header,omitempty"`

	// Whether the first refusal of an identity in a window causes the event tiered_limit_refused, with the stack, the
	// tier and the seconds to wait, and with the key only if log_keys is set. Dry refusals cause none. Default: false.
	Events bool `json:"events,omitempty"`

	// Where the counters are kept. Default: `{"backend": "memory"}`.
	StoreRaw json.RawMessage `json:"store,omitempty" caddy:"namespace=http.tiered_limit.stores inline_key=backend"`

	logger   *zap.Logger
	server   *caddyhttp.Server
	app      *App
	now      func() time.Time
	mode     handlerMode
	run      *stackRun
	live     *liveServer
	tiers    []*tier
	topology clientip.Topology
	prefixes clientip.Prefixes
	answer   answer
	exempt   exemptions
	errors   errorRoutes
	counters Counters
	meter    *stackMeter
	herald   *herald // nil: no events

	storeMeter *storeMeter
	sampling   uint32 // which decisions are measured: those whose random number has none of these bits

	place      place
	site       string            // where the handler is, for people: a host and a listen address
	stackLabel string            // the stack as logs and metrics name it
	matchText  map[string]string // the matchers of each tier, as configured
	shareText  map[string]string // and its shares
	storeText  string            // the store, as configured
}

// handlerMode says whether the stack limits at all.
type handlerMode uint8

const (
	modeLimit handlerMode = iota // requests are judged
	modeOff                      // every tier is switched off
	modeInert                    // a client address is needed and the topology is not stated
)

// CaddyModule returns the Caddy module information.
func (Handler) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "http.handlers.tiered_limit",
		New: func() caddy.Module { return new(Handler) },
	}
}

// Provision compiles the stack. It changes no limit and no counter that is in use: everything that it makes belongs to
// this handler until the whole configuration has been accepted.
func (h *Handler) Provision(ctx caddy.Context) error {
	config, err := json.Marshal(h)
	if err != nil {
		return fmt.Errorf("encoding the configuration: %w", err)
	}
	if err := h.check(); err != nil {
		return err
	}
	if err := h.expandLists(); err != nil {
		return err
	}
	h.noteSharedText()
	h.logger = ctx.Logger()
	h.now = timeSource
	h.server, _ = ctx.Value(caddyhttp.ServerCtxKey).(*caddyhttp.Server)
	app, err := ctx.App("tiered_limit")
	if err != nil {
		return fmt.Errorf("loading the app module tiered_limit: %w", err)
	}
	h.app = app.(*App)
	at, err := h.findLocation(ctx, config)
	if err != nil {
		return err
	}
	h.errors = findErrorRoutes(ctx, h.server)
	if err := h.set(ctx, at); err != nil {
		return fmt.Errorf("stack %q: %w", at.label, err)
	}
	return nil
}

// set makes what the stack needs at its place in the configuration.
func (h *Handler) set(ctx caddy.Context, at location) error {
	if err := h.compile(ctx, at); err != nil {
		return err
	}
	if err := h.openMeters(ctx); err != nil {
		return fmt.Errorf("registering metrics: %w", err)
	}
	if err := h.openEvents(ctx); err != nil {
		return err
	}
	store, err := h.loadStore(ctx)
	if err != nil || h.mode != modeLimit {
		return err
	}
	return h.openStore(store, at)
}

// noteSharedText keeps what loading the modules takes away but handlers of one stack are compared by.
func (h *Handler) noteSharedText() {
	h.matchText, h.shareText = make(map[string]string), make(map[string]string)
	for _, t := range h.Tiers {
		h.matchText[t.Name], h.shareText[t.Name] = jsonText(t.MatcherSetsRaw), jsonText(t.Shares)
	}
	h.storeText = `{"backend":"memory"}`
	if h.statesStore() {
		h.storeText = jsonText(h.StoreRaw)
	}
}

// compile turns the configuration into what ServeHTTP works with.
func (h *Handler) compile(ctx caddy.Context, at location) error {
	h.prefixes = clientip.Prefixes{V4: intOr(h.IPv4Prefix, 32), V6: intOr(h.IPv6Prefix, 64)}
	topology, err := topologyOf(h, h.server)
	if err != nil {
		return err
	}
	h.topology = topology
	if err := h.compileTiers(ctx); err != nil {
		return err
	}
	h.exempt, err = compileExemptions(ctx, h)
	if err != nil {
		return err
	}
	h.answer = compileAnswer(h)
	h.stackLabel = at.label
	h.run = h.app.join(at.stack)
	for _, t := range h.tiers {
		t.log = h.run.logOf(t.name)
	}
	h.live = h.app.arrive(h.server, at.namedRoute)
	switch {
	case len(h.tiers) == 0:
		h.mode = modeOff
	case !h.topology.Stated() && h.needsClient():
		h.mode = modeInert
	}
	if err := h.app.define(h); err != nil {
		return err
	}
	h.place = h.findPlace(ctx)
	h.warnAtLoad(h.place)
	return nil
}

// needsClient tells whether the stack cannot judge without a client address.
func (h *Handler) needsClient() bool {
	if len(h.exempt.clients) > 0 {
		return true
	}
	for _, t := range h.tiers {
		if t.usesClient || t.clients.any() {
			return true
		}
	}
	return false
}

// statesStore tells whether the configuration says where the counters are kept.
func (h *Handler) statesStore() bool { return len(h.StoreRaw) > 0 && string(h.StoreRaw) != "null" }

// loadStore loads the store module, so that a mistake in it is refused even while the stack does not limit.
func (h *Handler) loadStore(ctx caddy.Context) (Store, error) {
	var loaded any
	var err error
	if h.statesStore() {
		loaded, err = ctx.LoadModule(h, "StoreRaw")
	} else {
		loaded, err = ctx.LoadModuleByID("http.tiered_limit.stores.memory", nil)
	}
	if err != nil {
		return nil, fmt.Errorf("store: %w", err)
	}
	store, ok := loaded.(Store)
	if !ok {
		return nil, fmt.Errorf("store: module %T is not a store", loaded)
	}
	return store, nil
}

// openStore opens the counters of the stack.
func (h *Handler) openStore(store Store, at location) error {
	spec := StackSpec{Name: at.stack, Named: h.Name != ""}
	for _, t := range h.tiers {
		spec.Tiers = append(spec.Tiers, t.spec)
	}
	var err error
	if h.counters, err = store.Open(spec); err != nil {
		return fmt.Errorf("store: %w", err)
	}
	h.openStoreMeter(store)
	return nil
}

// Cleanup returns what Provision took. It also runs on a handler that was provisioned in part, and requests that
// outlast the grace period may still be under way.
func (h *Handler) Cleanup() error {
	h.app.leave(h)
	err := errors.Join(h.closeStoreMeter(), h.closeMeters())
	if h.counters != nil {
		err = errors.Join(err, h.counters.Close())
	}
	return err
}

// ServeHTTP decides whether the request may pass.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	rec := newRecord(h, r)
	switch h.mode {
	case modeOff:
		return next.ServeHTTP(w, r)
	case modeInert:
		return rec.pass(w, next, outcomeInert)
	}
	return rec.judge(w, next, h.now())
}

// intOr returns what p points to, or a default.
func intOr(p *int, otherwise int) int {
	if p == nil {
		return otherwise
	}
	return *p
}

// Interface guards
var (
	_ caddy.Module                = (*Handler)(nil)
	_ caddy.Provisioner           = (*Handler)(nil)
	_ caddy.CleanerUpper          = (*Handler)(nil)
	_ caddyhttp.MiddlewareHandler = (*Handler)(nil)
)
