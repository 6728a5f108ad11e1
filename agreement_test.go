package tieredlimit

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/stretchr/testify/require"

	"github.com/tieredlimit/caddy-tieredlimit/internal/replay"
)

// opinion is what one handler makes of a request: the outcome as metrics name it, and the tier that refused or would have.
type opinion struct {
	handler int // in which order it was provisioned
	outcome string
	tier    string
}

// overheard is a stack of a replay, of which it notes what each handler has decided.
type overheard struct {
	replay.Stack
	info    replay.StackInfo
	handler int
	met     *[]opinion
}

// Judge implements [replay.Stack].
func (s *overheard) Judge(q *replay.Query, v *replay.Verdict) error {
	err := s.Stack.Judge(q, v)
	o := opinion{handler: s.handler, outcome: v.Outcome.String()}
	for i, c := range v.Claims {
		if i == v.RefusedBy || v.RefusedBy < 0 && o.tier == "" && c.Exceeded != 0 && s.info.Tiers[c.Tier].DryRun {
			o.tier = s.info.Tiers[c.Tier].Name
		}
	}
	*s.met = append(*s.met, o)
	return err
}

// logged is what an access log says of all that a request has met: the gravest, the latest of equals.
func logged(met []opinion) (outcome, tier string) {
	gravity := func(name string) int {
		for o := range outcomes {
			if o.String() == name {
				return int(o.gravity())
			}
		}
		return -1
	}
	gravest := -1
	for _, o := range met {
		if o.outcome == "off" || gravity(o.outcome) < gravest {
			continue
		}
		gravest, outcome = gravity(o.outcome), o.outcome
		if o.tier != "" {
			tier = o.tier
		}
	}
	return outcome, tier
}

// disagreement serves requests by a config, asking before each what handlers would do, and replays the log that this
// wrote. It tells the first difference between the three, and counts the outcomes.
func disagreement(t *testing.T, config string, requests []recorded, seen map[string]int) string {
	t.Helper()
	e := &edge{t: t, clock: newTestClock(), logs: newLogSink(t)}
	require.NoError(t, e.load(adapt(t, config)))
	named := e.inNamedRoutes()
	foreseen := make([]map[int]opinion, len(requests))
	for i, q := range requests {
		e.clock.set(q.at)
		foreseen[i] = e.foresee(q.request)
		q.edit = func(r *http.Request) { r.RequestURI = r.URL.RequestURI() } // as a server has it
		e.send(q.request)
	}
	log := accessLog(e.logs.text(), requests)
	e.close() // before a replay counts in a stack of the same name
	lines := strings.Split(strings.TrimSuffix(log, "\n"), "\n")
	require.Len(t, lines, len(requests))

	replayed := replayOpinions(t, config, log, len(requests))
	for i, line := range lines {
		var said struct {
			Outcome string `json:"tiered_limit_outcome"`
			Tier    string `json:"tiered_limit_tier"`
		}
		require.NoError(t, json.Unmarshal([]byte(line), &said))
		outcome, tier := logged(replayed[i])
		if outcome != said.Outcome || tier != said.Tier {
			return fmt.Sprintf("request %d: live %q by %q, replay %+v\n%s", i, said.Outcome, said.Tier, replayed[i], line)
		}
		invoked := false
		for n, o := range replayed[i] {
			seen[o.outcome]++
			if n > 0 {
				seen["behind another"]++
			}
			// Where a named route is invoked, and so what a request has met in front of it, is not for explain to know.
			if invoked = invoked || named[o.handler]; foreseen[i][o.handler] != o && !(n > 0 && invoked) {
				return fmt.Sprintf("request %d: explain %+v, replay %+v\n%s", i, foreseen[i][o.handler], o, line)
			}
		}
	}
	return ""
}

// inNamedRoutes are the handlers, by their numbers, that stand in named routes.
func (e *edge) inNamedRoutes() map[int]bool {
	named := make(map[int]bool)
	for h, number := range e.app.handlers {
		named[number] = len(h.place) == 0 || &h.place[0].routes[0] != &h.server.Routes[0]
	}
	return named
}

// foresee asks explain of each handler.
func (e *edge) foresee(q request) map[int]opinion {
	e.t.Helper()
	_, target, _ := strings.Cut(q.url, "localhost")
	question := &requestQuestion{Peer: q.peer, Method: q.method, Path: target, Headers: make(map[string]fieldLines)}
	for name, lines := range q.header {
		question.Headers[name] = lines
	}
	require.NoError(e.t, question.check())
	foreseen := make(map[int]opinion)
	f := newForesight()
	for _, h := range e.app.inOrder() {
		x, err := f.explain(context.Background(), h, question)
		require.NoError(e.t, err)
		at := h.app.handlers[h]
		foreseen[at] = opinion{at, x.Outcome, x.RefusedBy}
	}
	return foreseen
}

var (
	lineTime     = regexp.MustCompile(`"ts":[0-9.e+-]+`)
	lineDuration = regexp.MustCompile(`"duration":[0-9.e+-]+`)
)

// accessLog is the access lines of a log, with the times at which the test's clock stood. These are not on the edge of a
// millisecond, which a log cannot say exactly.
func accessLog(text string, requests []recorded) string {
	var b strings.Builder
	i := 0
	for line := range strings.Lines(text) {
		if !strings.Contains(line, `"logger":"http.log.access`) {
			continue
		}
		ms := requests[i].at.UnixMilli()
		line = lineTime.ReplaceAllLiteralString(line, fmt.Sprintf(`"ts":%d.%03d5`, ms/1000, ms%1000))
		b.WriteString(lineDuration.ReplaceAllLiteralString(line, `"duration":0`))
		i++
	}
	return b.String()
}

// replayOpinions is what each handler that a request met has decided in a replay, by line.
func replayOpinions(t *testing.T, config, log string, n int) [][]opinion {
	t.Helper()
	var met []opinion
	all := make([][]opinion, n)
	replayLog(t, config, log, replay.Options{
		Wrap: func(m caddyhttp.MiddlewareHandler) (replay.Stack, bool) {
			s, ok := newRehearsal(m)
			if !ok {
				return nil, false
			}
			h := m.(*Handler)
			return &overheard{Stack: s, info: s.Info(), handler: h.app.handlers[h], met: &met}, true
		},
		Trace: func(j replay.Judged) { all[j.Line-1], met = met, nil },
	})
	return all
}

// configMaker writes configs at random.
type configMaker struct {
	*rand.Rand
	id int
}

// one is one of several texts.
func (m *configMaker) one(texts ...string) string { return texts[m.IntN(len(texts))] }

// maybe is a text, once in so many times.
func (m *configMaker) maybe(in int, text string) string {
	if m.IntN(in) == 0 {
		return text
	}
	return ""
}

// tier is a tier of some kind. Those of one name are alike in all of a config.
func (m *configMaker) tier(name string) string {
	window := m.one("1s", "1m", "7s")
	limits := fmt.Sprintf("%d/%s", 1+m.IntN(12), window)
	if m.IntN(3) == 0 {
		limits += fmt.Sprintf(" %d/1h", 20+m.IntN(60))
	}
	key := m.one("key {http.tiered_limit.client_ip}", "key {header.X-Api-Key}", "key everybody",
		"key {header.X-Api-Key}\nkey {http.tiered_limit.client_ip} {method}", "key {http.tiered_limit.client_ip} {path}",
		"key {query.a}\nkey {header.X-Api-Key}")
	match := m.one("", "", "", "match method POST", "match path /api/*", "match {\nnot path /static/*\n}", "match header X-Api-Key key1*")
	return fmt.Sprintf("tier %s %s {\n%s\n%s\n%s\n%s}\n", name, limits, key, match,
		m.one("", "charge checked", "charge served"), m.maybe(5, "dry_run\n"))
}

// stack is a stack of these tiers. Only an unnamed one says how all are charged, since those of one name must agree.
func (m *configMaker) stack(name, topology string, tiers []string) string {
	charge := ""
	if name == "" {
		charge = m.maybe(4, "charge checked\n")
	}
	return fmt.Sprintf("tiered_limit %s%s {\n%s\n%s%s%s%s%s%s}\n", m.one("", "", "", "@posts ", "@api "), name, topology,
		strings.Join(tiers, ""), m.maybe(2, "exempt /health /api/open/*\n"), m.maybe(4, "preflight count\n"),
		m.maybe(6, "dry_run\n"), charge, m.maybe(5, "exempt_clients 203.0.113.0/30\n"))
}

// config is a server of several stacks, some in named routes, and a way to tell clients.
func (m *configMaker) config(topology string) string {
	var named [][]string // the tiers of each named stack
	for s := range 2 {
		var tiers []string
		for i := range 1 + m.IntN(3) {
			tiers = append(tiers, m.tier(fmt.Sprintf("t%d-%d", s, i)))
		}
		named = append(named, tiers)
	}
	stack := func(mayBeUnnamed bool) string {
		if mayBeUnnamed && m.IntN(3) == 0 {
			return m.stack("", topology, []string{m.tier("a"), m.tier("b"), m.maybe(4, "tier global off\n")})
		}
		s := m.IntN(len(named))
		tiers := slices.Clone(named[s])
		m.Shuffle(len(tiers), func(i, j int) { tiers[i], tiers[j] = tiers[j], tiers[i] })
		return m.stack(fmt.Sprintf("agreed-%d-%d", m.id, s), topology, tiers[:1+m.IntN(len(tiers))])
	}
	matchers := "@posts method POST\n@api path /api/*\n@options method OPTIONS\n"
	step := func() string {
		return m.one(stack(true), stack(true), "invoke limits\n", "invoke @posts limits\n", "invoke ends\n",
			"handle /api/* {\n"+stack(true)+m.maybe(2, "respond api\n")+"}\nhandle {\n"+stack(true)+"}\n",
			"respond @options options\n")
	}
	steps := []string{stack(true)}
	for range 1 + m.IntN(4) {
		steps = append(steps, step())
	}
	return fmt.Sprintf("{\nauto_https off\n%s}\n&(limits) {\n%s%s}\n&(ends) {\n@gone path /gone\nrespond @gone gone\n}\n:8080 {\nlog\n%sroute {\n%srespond ok\n}\n}\n",
		m.one("", "", "servers {\ntrusted_proxies static 10.0.0.0/8 35.191.0.0/16 127.0.0.1\ntrusted_proxies_strict\n}\n"),
		matchers, stack(false), matchers, strings.Join(steps, ""))
}

// Serving, replaying what serving has logged, and explain: what decides exists once, so that the three agree on what
// becomes of every request at every handler that it meets, and on the tier that refuses.
func TestServingReplayingAndExplainAgree(t *testing.T) {
	configs, requests := 100, 1000
	if testing.Short() {
		configs, requests = 16, 250
	}
	seen := make(map[string]int)
	for c := range configs {
		m := &configMaker{rand.New(rand.NewPCG(21, uint64(c))), c}
		top := replayTopologies[m.IntN(len(replayTopologies))]
		config := m.config(m.one(top.config, top.config, top.config, ""))
		list := replayTraffic(requests, top.way)
		m.vary(list)
		if d := disagreement(t, config, list, seen); d != "" {
			t.Fatalf("config %d, %s: %s\n%s", c, top.name, d, config)
		}
	}
	t.Logf("%d requests in %d configs: %v", configs*requests, configs, seen)
	for _, outcome := range []string{"served", "refused", "dry_refused", "exempt", "preflight", "inert"} {
		require.Positive(t, seen[outcome], outcome)
	}
}

// vary adds to traffic what only some configs look at.
func (m *configMaker) vary(list []recorded) {
	at := testStart
	for i := range list {
		q := &list[i]
		at = at.Add(time.Duration(1+m.IntN(400)) * time.Millisecond)
		q.at, q.duration = at, 0
		switch m.IntN(12) {
		case 0:
			q.url = "http://localhost" + m.one("/gone", "/api/open/x", "/api/y?a=1&a=2", "/api/y?a=%20", "/?a=b", "/x?a=1;b")
		case 1:
			q.header.Set("Upgrade", "h2c")
		case 2:
			q.header["X-Api-Key"] = []string{"key1", m.one("key1", "key2")}
		case 3:
			q.header["X-Forwarded-For"] = []string{m.one("unknown", "", "1.2.3.4", "203.0.113.9, x", "10.0.0.1")}
		case 4:
			q.method = http.MethodHead
		}
	}
}
