package tieredlimit_test

import (
	"context"
	"fmt"
	"maps"
	"math/big"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	tieredlimit "github.com/tieredlimit/caddy-tieredlimit"
	"github.com/tieredlimit/caddy-tieredlimit/store/storetest"
)

// modelTier is a tier as the model knows it.
type modelTier struct {
	name   string
	limits []tieredlimit.Limit
	keys   [][]string // parts: client, user, method, or a literal; none: the default of the tiers ip and global
	match  string
	charge string // empty: the stack's
	dry    bool
}

// modelHandler is one tiered_limit block.
type modelHandler struct {
	name   string // empty: unnamed
	v4     int
	charge string
	dry    bool
	tiers  []*modelTier

	stack    string // as the store knows it
	spec     tieredlimit.StackSpec
	live     []*modelTier // those that are on, in the order of the spec
	counters tieredlimit.Counters
}

// modelSite is a site with handlers that a request meets one by one.
type modelSite struct {
	host     string
	handlers []*modelHandler
}

// modelConfig is a whole configuration.
type modelConfig struct {
	listen string
	sites  []*modelSite
	defs   map[string]*modelHandler // what the handlers of a named stack have in common, by name: all its tiers
}

// modelRequest is a request as the model knows it.
type modelRequest struct{ host, method, path, peer, user string }

// modelResult is what the client is told.
type modelResult struct {
	status                                            int
	limit, remaining, reset, resource, after, control string
}

// String shows a result in a failure.
func (r modelResult) String() string {
	return fmt.Sprintf("%d limit=%s remaining=%s reset=%s resource=%s retry-after=%s cache-control=%s", r.status, r.limit, r.remaining,
		r.reset, r.resource, r.after, r.control)
}

// caddyfile writes the configuration down.
func (c *modelConfig) caddyfile() string {
	var b strings.Builder
	for _, s := range c.sites {
		fmt.Fprintf(&b, "http://%s%s {\n\troute {\n", s.host, c.listen)
		for _, h := range s.handlers {
			b.WriteString(h.block())
		}
		b.WriteString("\t\trespond ok\n\t}\n}\n")
	}
	return b.String()
}

func (h *modelHandler) block() string {
	var b strings.Builder
	fmt.Fprintf(&b, "\t\ttiered_limit %s {\n\t\t\ttrusted_hops 0\n\t\t\texempt /health\n", h.name)
	if h.v4 != 32 {
		fmt.Fprintf(&b, "\t\t\tipv4_prefix %d\n", h.v4)
	}
	if h.charge != "" {
		fmt.Fprintf(&b, "\t\t\tcharge %s\n", h.charge)
	}
	if h.dry {
		b.WriteString("\t\t\tdry_run\n")
	}
	for _, t := range h.tiers {
		b.WriteString(t.block())
	}
	b.WriteString("\t\t}\n")
	return b.String()
}

func (t *modelTier) block() string {
	var b strings.Builder
	fmt.Fprintf(&b, "\t\t\ttier %s", t.name)
	for _, l := range t.limits {
		fmt.Fprintf(&b, " %d/%dms", l.Count, l.Window.Milliseconds())
	}
	b.WriteString(" {\n")
	words := map[string]string{"client": "{http.tiered_limit.client_ip}", "user": "{http.request.header.X-User}", "method": "{http.request.method}"}
	for _, parts := range t.keys {
		b.WriteString("\t\t\t\tkey")
		for _, p := range parts {
			if w := words[p]; w != "" {
				p = w
			}
			b.WriteString(" " + p)
		}
		b.WriteString("\n")
	}
	if t.match != "" {
		fmt.Fprintf(&b, "\t\t\t\tmatch %s\n", t.match)
	}
	if t.charge != "" {
		fmt.Fprintf(&b, "\t\t\t\tcharge %s\n", t.charge)
	}
	if t.dry {
		b.WriteString("\t\t\t\tdry_run\n")
	}
	b.WriteString("\t\t\t}\n")
	return b.String()
}

// off tells whether the tier is switched off.
func (t *modelTier) off() bool {
	return slices.ContainsFunc(t.limits, func(l tieredlimit.Limit) bool { return l.Count == 0 })
}

// lines are the keys, with the defaults.
func (t *modelTier) lines() [][]string {
	switch {
	case len(t.keys) > 0:
		return t.keys
	case t.name == "ip":
		return [][]string{{"client"}}
	}
	return [][]string{{}} // global
}

func isValue(part string) bool { return part == "client" || part == "user" || part == "method" }

// identity is who a request is counted for, by the first key that is not empty, and whether there is one.
func (t *modelTier) identity(q modelRequest, v4 int) (string, bool) {
	for i, parts := range t.lines() {
		id := fmt.Sprintf("%q %d", t.lines(), i)
		if slices.ContainsFunc(slices.Concat(t.lines()...), func(p string) bool { return p == "client" }) {
			id += fmt.Sprint(" /", v4)
		}
		found := !slices.ContainsFunc(parts, isValue)
		for _, p := range parts {
			value := p
			switch p {
			case "client":
				value = modelClient(q.peer, v4)
			case "user":
				value = q.user
			case "method":
				value = q.method
			}
			found = found || isValue(p) && value != ""
			id += fmt.Sprintf(" %q", value)
		}
		if found {
			return id, true
		}
	}
	return "", false
}

// modelClient is the client of a peer: an IPv4 address or its /24, the /64 of an IPv6 address, or unknown.
func modelClient(peer string, v4 int) string {
	switch {
	case strings.HasPrefix(peer, "[2001:db8:"):
		return strings.Join(strings.Split(peer, ":")[:4], ":")
	case peer == "@":
		return "unknown"
	case v4 == 24:
		return peer[:strings.LastIndex(peer, ".")]
	}
	return peer[:strings.Index(peer, ":")]
}

func (t *modelTier) matches(q modelRequest) bool {
	switch t.match {
	case "method POST":
		return q.method == http.MethodPost
	case "not method POST":
		return q.method != http.MethodPost
	case "path /a*":
		return strings.HasPrefix(q.path, "/a")
	}
	return true
}

// open opens the counters of all handlers that limit, in the order written.
func (c *modelConfig) open(t *testing.T, store *storetest.Model) {
	t.Helper()
	ordinals := make(map[string]int)
	for _, s := range c.sites {
		for _, h := range s.handlers {
			h.stack = h.name
			if h.name == "" {
				site := s.host + "\n" + h.block()
				ordinals[site]++
				h.stack = fmt.Sprintf("%s %d", site, ordinals[site])
			}
			h.spec = tieredlimit.StackSpec{Name: h.stack, Named: h.name != ""}
			h.live, h.counters = nil, nil
			for _, tier := range h.tiers {
				if tier.off() {
					continue
				}
				h.live = append(h.live, tier)
				spec := tieredlimit.TierSpec{Name: tier.name, Limits: tier.limits, DryRun: tier.dry}
				if tier.charge == "checked" || tier.charge == "" && h.charge == "checked" {
					spec.Charge = tieredlimit.ChargeChecked
				}
				spec.Single = !slices.ContainsFunc(tier.lines()[0], isValue)
				h.spec.Tiers = append(h.spec.Tiers, spec)
			}
			if len(h.live) > 0 {
				counters, err := store.Open(h.spec)
				require.NoError(t, err)
				h.counters = counters
			}
		}
	}
}

func (c *modelConfig) close(t *testing.T) {
	t.Helper()
	for _, s := range c.sites {
		for _, h := range s.handlers {
			if h.counters != nil {
				require.NoError(t, h.counters.Close())
			}
		}
	}
}

// modelVerdict is what a handler would tell: the limit that binds.
type modelVerdict struct {
	tier  *modelTier
	limit tieredlimit.Limit
	state tieredlimit.State
	now   time.Time
}

func (v *modelVerdict) left() int64 { return max(0, v.limit.Count-v.state.Used) }

// share is what is left, as a share of the limit.
func (v *modelVerdict) share() *big.Rat { return big.NewRat(v.left(), v.limit.Count) }

func seconds(d time.Duration) int64 {
	n := int64(d / time.Second)
	if d%time.Second > 0 {
		n++
	}
	return n
}

// fields is what the client is told of a verdict.
func (v *modelVerdict) fields(status int) modelResult {
	r := modelResult{status: status, limit: strconv.FormatInt(v.limit.Count, 10), remaining: strconv.FormatInt(v.left(), 10), resource: v.tier.name}
	r.reset = strconv.FormatInt(seconds(time.Duration(v.now.UnixNano())+v.state.ResetAfter), 10)
	if status == http.StatusTooManyRequests {
		r.after = strconv.FormatInt(max(1, seconds(v.state.ResetAfter)), 10)
		r.control = "no-store"
	}
	return r
}

// serve is what the model makes of a request.
func (c *modelConfig) serve(t *testing.T, now time.Time, q modelRequest) modelResult {
	t.Helper()
	var best *modelVerdict
	settled := make(map[string]bool) // tiers of named stacks that have had their say
	for _, s := range c.sites {
		if s.host != q.host {
			continue
		}
		for _, h := range s.handlers {
			verdict, refused := h.serve(t, now, q, settled)
			switch {
			case refused && !h.dry:
				return verdict.fields(http.StatusTooManyRequests)
			case h.dry || verdict == nil:
			case best == nil || verdict.share().Cmp(best.share()) < 0:
				best = verdict
			}
		}
	}
	if best == nil {
		return modelResult{status: http.StatusOK}
	}
	return best.fields(http.StatusOK)
}

// serve is what one handler makes of a request.
func (h *modelHandler) serve(t *testing.T, now time.Time, q modelRequest, settled map[string]bool) (*modelVerdict, bool) {
	t.Helper()
	if q.path == "/health" {
		return nil, false
	}
	var claims []tieredlimit.Claim
	for i, tier := range h.live {
		if !tier.matches(q) || settled[h.name+" "+tier.name] {
			continue
		}
		if id, ok := tier.identity(q, h.v4); ok {
			claims = append(claims, tieredlimit.Claim{
				Tier: i, Identity: []byte(id), Hits: 1, States: make([]tieredlimit.State, len(tier.limits)),
			})
		}
	}
	if len(claims) == 0 {
		return nil, false
	}
	decision, err := h.counters.Take(context.Background(), now, claims)
	require.NoError(t, err)
	var verdict *modelVerdict
	for i, claim := range claims {
		tier, mine := h.live[claim.Tier], claim.States
		exceeded := slices.ContainsFunc(mine, func(s tieredlimit.State) bool { return s.Exceeded })
		refuses := i == decision.RefusedBy
		if h.name != "" && (decision.RefusedBy < 0 || !refuses && !exceeded && h.spec.Tiers[claim.Tier].Charge == tieredlimit.ChargeChecked) {
			settled[h.name+" "+tier.name] = true
		}
		if refuses {
			return refusal(tier, mine, decision.Now), true
		}
		for j, s := range mine {
			v := &modelVerdict{tier, tier.limits[j], s, decision.Now}
			if !tier.dry && (verdict == nil || v.share().Cmp(verdict.share()) < 0) {
				verdict = v
			}
		}
	}
	return verdict, false
}

// refusal is the exhausted limit that ends last.
func refusal(tier *modelTier, states []tieredlimit.State, now time.Time) *modelVerdict {
	var last *modelVerdict
	for j, s := range states {
		if s.Used >= tier.limits[j].Count && (last == nil || s.ResetAfter > last.state.ResetAfter) {
			last = &modelVerdict{tier, tier.limits[j], s, now}
		}
	}
	return last
}

// modelRand makes random configurations and requests.
type modelRand struct{ *rand.Rand }

func pick[T any](r modelRand, list ...T) T { return list[r.IntN(len(list))] }

func (r modelRand) limits() []tieredlimit.Limit {
	windows := []time.Duration{500 * time.Millisecond, time.Second, 1500 * time.Millisecond, 7 * time.Second, 10 * time.Second,
		time.Minute, time.Hour, 24 * time.Hour}
	r.Shuffle(len(windows), func(i, j int) { windows[i], windows[j] = windows[j], windows[i] })
	list := make([]tieredlimit.Limit, 1+r.IntN(8)/6)
	for i := range list {
		list[i] = tieredlimit.Limit{Count: int64(1 + r.IntN(8)), Window: windows[i]}
		if r.IntN(40) == 0 {
			list[i].Count = 0
		}
	}
	return list
}

func (r modelRand) tier(name string) *modelTier {
	t := &modelTier{name: name, limits: r.limits(), match: pick(r, "", "", "", "method POST", "not method POST", "path /a*")}
	t.charge = pick(r, "", "", "served", "checked")
	t.dry = r.IntN(6) == 0
	switch {
	case (name == "ip" || name == "global") && r.IntN(4) > 0:
	case r.IntN(5) == 0:
		t.keys = [][]string{{"everybody"}}
	case r.IntN(3) == 0:
		t.keys = [][]string{{"user"}, {"client"}}
	default:
		for range 1 + r.IntN(3) {
			t.keys = append(t.keys, pick(r, []string{"user"}, []string{"client"}, []string{"user", "method"}, []string{"client", "user"},
				[]string{"x", "user"}, []string{"method", "x"}, []string{"anybody"}))
		}
	}
	return t
}

// tiers picks some of the tiers, in any order.
func (r modelRand) tiers(from []*modelTier) []*modelTier {
	list := slices.Clone(from)
	r.Shuffle(len(list), func(i, j int) { list[i], list[j] = list[j], list[i] })
	return list[:1+r.IntN(len(list))]
}

// handler makes a handler: one of a named stack, with some of its tiers, or an unnamed one. Behind others it often has
// the name of one of them.
func (r modelRand) handler(c *modelConfig, before ...*modelHandler) *modelHandler {
	names := slices.Sorted(maps.Keys(c.defs))
	h := &modelHandler{name: pick(r, append(names, "", "")...), dry: r.IntN(5) == 0}
	if len(before) > 0 && r.IntN(2) == 0 {
		h.name = pick(r, before...).name
	}
	if h.name != "" {
		def := c.defs[h.name]
		h.v4, h.charge, h.tiers = def.v4, def.charge, r.tiers(def.tiers)
		return h
	}
	h.v4, h.charge = pick(r, 32, 32, 24), pick(r, "", "served", "checked")
	h.tiers = r.tiers(r.allTiers())
	return h
}

func (r modelRand) allTiers() []*modelTier {
	var list []*modelTier
	for _, name := range []string{"ip", "user", "global", "extra"} {
		t := r.tier(name)
		if name != "ip" && name != "global" && len(t.keys) == 0 {
			t.keys = [][]string{{"user"}}
		}
		list = append(list, t)
	}
	return list
}

// config makes a configuration from nothing.
func (r modelRand) config(listen string, named []string) *modelConfig {
	c := &modelConfig{listen: listen, defs: make(map[string]*modelHandler)}
	for _, name := range named {
		c.defs[name] = &modelHandler{v4: pick(r, 32, 32, 24), charge: pick(r, "", "served", "checked"), tiers: r.allTiers()}
	}
	for _, host := range []string{"a.test", "b.test", "c.test"}[:1+r.IntN(3)] {
		s := &modelSite{host: host}
		for range 1 + r.IntN(5)/2 {
			s.handlers = append(s.handlers, r.handler(c, s.handlers...))
		}
		c.sites = append(c.sites, s)
	}
	return c
}

// change makes the next configuration out of one: mostly the same, with a few things changed.
func (r modelRand) change(old *modelConfig) *modelConfig {
	c := &modelConfig{listen: old.listen, defs: make(map[string]*modelHandler)}
	copies := make(map[*modelTier]*modelTier)
	copyOf := func(tiers []*modelTier) (list []*modelTier) {
		for _, t := range tiers {
			if copies[t] == nil {
				fresh := *t
				fresh.limits, fresh.keys = slices.Clone(t.limits), slices.Clone(t.keys)
				copies[t] = &fresh
			}
			list = append(list, copies[t])
		}
		return list
	}
	for _, name := range slices.Sorted(maps.Keys(old.defs)) {
		def := old.defs[name]
		c.defs[name] = &modelHandler{v4: def.v4, charge: def.charge, tiers: copyOf(def.tiers)}
		for _, t := range c.defs[name].tiers {
			r.changeTier(t)
		}
	}
	for _, s := range old.sites {
		fresh := &modelSite{host: s.host}
		for _, h := range s.handlers {
			fresh.handlers = append(fresh.handlers, &modelHandler{name: h.name, v4: h.v4, charge: h.charge, dry: h.dry, tiers: copyOf(h.tiers)})
		}
		c.sites = append(c.sites, fresh)
	}
	r.changeSites(c)
	return c
}

// changeTier changes a tier of a named stack, one time in three.
func (r modelRand) changeTier(t *modelTier) {
	switch r.IntN(18) {
	case 0, 1:
		i := r.IntN(len(t.limits))
		t.limits[i].Count = max(0, t.limits[i].Count+int64(r.IntN(7)-3))
	case 2:
		t.charge = pick(r, "", "served", "checked")
	case 3:
		t.dry = !t.dry
	case 4:
		t.match = pick(r, "", "method POST", "path /a*")
	case 5:
		*t = *r.tier(t.name)
		if t.name != "ip" && t.name != "global" && len(t.keys) == 0 {
			t.keys = [][]string{{"client"}}
		}
	}
}

// changeSites adds, removes and replaces sites and handlers.
func (r modelRand) changeSites(c *modelConfig) {
	s := pick(r, c.sites...)
	h := pick(r, s.handlers...)
	switch r.IntN(8) {
	case 0: // other tiers, or another order
		if h.name != "" {
			h.tiers = r.tiers(c.defs[h.name].tiers)
		} else {
			h.tiers = r.tiers(h.tiers)
		}
	case 1: // another stack, or another name
		*h = *r.handler(c)
	case 2:
		if len(s.handlers) < 3 {
			s.handlers = append(s.handlers, r.handler(c, s.handlers...))
		}
	case 3:
		if len(s.handlers) > 1 {
			s.handlers = s.handlers[1:]
		}
	case 4:
		if len(c.sites) > 1 {
			c.sites = c.sites[:len(c.sites)-1]
		}
	case 5:
		host := "z" + strconv.Itoa(len(c.sites)) + ".test"
		if len(c.sites) < 4 && !slices.ContainsFunc(c.sites, func(s *modelSite) bool { return s.host == host }) {
			c.sites = append(c.sites, &modelSite{host: host, handlers: []*modelHandler{r.handler(c)}})
		}
	case 6:
		h.dry = !h.dry
	}
}

func (r modelRand) request(c *modelConfig) modelRequest {
	q := modelRequest{host: pick(r, c.sites...).host, method: pick(r, "GET", "GET", "POST", "HEAD"), path: pick(r, "/", "/a", "/abc", "/b")}
	if r.IntN(50) == 0 {
		q.path = "/health"
	}
	q.peer = pick(r, "192.0.2.1:1", "192.0.2.1:2", "192.0.2.2:1", "198.51.100.1:1", "[2001:db8:1:1::1]:1", "[2001:db8:1:1:ffff::2]:9",
		"[2001:db8:1:2::1]:1", "@")
	q.user = pick(r, "", "", "alice", "bob", "192.0.2.1")
	return q
}

// step is how far the clock moves before a request, in milliseconds.
func (r modelRand) step() int64 {
	switch n := r.IntN(1000); {
	case n < 500:
		return 0
	case n < 800:
		return r.Int64N(300)
	case n < 930:
		return r.Int64N(3000)
	case n < 965:
		return r.Int64N(90_000)
	case n < 970:
		return r.Int64N(2 * 86_400_000)
	case n < 990:
		return -r.Int64N(1000)
	case n < 996:
		return -1000 - r.Int64N(20_000)
	}
	return -r.Int64N(3_600_000)
}

// modelRun is one server and the model of it.
type modelRun struct {
	t      *testing.T
	r      modelRand
	seed   uint64
	edge   *tieredlimit.Edge
	store  storetest.Model
	config *modelConfig
	now    time.Time
	trail  []string
}

func (m *modelRun) note(format string, args ...any) {
	m.trail = append(m.trail, fmt.Sprintf(format, args...))
	if len(m.trail) > 60 {
		m.trail = slices.Delete(m.trail, 0, 30)
	}
}

// reload puts a changed configuration in place, on both sides; sometimes one that is refused comes first.
func (m *modelRun) reload() {
	m.t.Helper()
	next := m.r.change(m.config)
	text := next.caddyfile()
	if m.r.IntN(3) == 0 {
		broken := "http://broken.test" + next.listen + " {\n\ttiered_limit {\n\t\ttier x 1/s {\n\t\t\tkey {http.request.nope}\n\t\t}\n\t}\n}\n"
		require.Error(m.t, m.edge.Reload(m.config.caddyfile()+broken))
		m.note("refused reload")
	}
	require.NoError(m.t, m.edge.Reload(text), "%s", text)
	next.open(m.t, &m.store)
	m.config.close(m.t)
	m.config = next
	m.note("reload:\n%s", text)
}

// step moves the clock, sends a request, and compares.
func (m *modelRun) step() {
	m.t.Helper()
	m.now = m.now.Add(time.Duration(m.r.step()) * time.Millisecond)
	m.edge.SetTime(m.now)
	q := m.r.request(m.config)
	want := m.config.serve(m.t, m.now, q)
	got := resultOf(m.edge.Send(q.method, "http://"+q.host+q.path, q.peer, q.user))
	m.note("%d %s %s%s from %s user %q: %s", m.now.UnixMilli(), q.method, q.host, q.path, q.peer, q.user, want)
	if got != want {
		m.t.Fatalf("seed %d\n got %s\nwant %s\n%s\n\nconfig:\n%s", m.seed, got, want, strings.Join(m.trail, "\n"), m.config.caddyfile())
	}
}

func resultOf(w *httptest.ResponseRecorder) modelResult {
	h := w.Header()
	return modelResult{status: w.Code, limit: h.Get("X-RateLimit-Limit"), remaining: h.Get("X-RateLimit-Remaining"), reset: h.Get("X-RateLimit-Reset"),
		resource: h.Get("X-RateLimit-Resource"), after: h.Get("Retry-After"), control: h.Get("Cache-Control")}
}

// Random stacks, clocks, requests and reloads are answered as a plain model answers them: the counters of the model
// store, and above it the written rules of tiers, keys, matchers, charging and headers. Default: 100 000 requests, 10 000
// with -short; MODEL_STEPS sets another number and MODEL_SEED the seed.
func TestModel(t *testing.T) {
	steps, seed := 100_000, rand.Uint64()
	if testing.Short() {
		steps = 10_000
	}
	for name, into := range map[string]func(string) error{
		"MODEL_STEPS": func(s string) (err error) { steps, err = strconv.Atoi(s); return err },
		"MODEL_SEED":  func(s string) (err error) { seed, err = strconv.ParseUint(s, 10, 64); return err },
	} {
		if s := os.Getenv(name); s != "" {
			require.NoError(t, into(s), name)
		}
	}
	const episode, between = 2000, 200
	for ; steps > 0; steps -= episode {
		runModel(t, seed, min(steps, episode), between)
		seed++
	}
}

// runModel is one server's life.
func runModel(t *testing.T, seed uint64, steps, between int) {
	t.Helper()
	m := &modelRun{t: t, r: modelRand{rand.New(rand.NewPCG(seed, 0))}, seed: seed, now: tieredlimit.TestStart}
	m.now = m.now.Add(time.Duration(m.r.IntN(86_400_000)) * time.Millisecond)
	m.config = m.r.config(fmt.Sprintf(":%d", 10_000+seed%10_000), []string{fmt.Sprintf("model-%d-x", seed), fmt.Sprintf("model-%d-y", seed)})
	m.note("config:\n%s", m.config.caddyfile())
	m.edge = tieredlimit.NewEdge(t, m.config.caddyfile())
	m.config.open(t, &m.store)
	for i := range steps {
		if i > 0 && i%between == 0 {
			m.reload()
		}
		m.step()
	}
	m.config.close(t)
	m.edge.Close()
}
