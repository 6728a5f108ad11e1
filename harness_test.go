package tieredlimit

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/stretchr/testify/require"

	_ "github.com/caddyserver/caddy/v2/modules/standard"

	"github.com/tieredlimit/caddy-tieredlimit/internal/clientip"
)

// edge is a whole Caddy in this process, without ports: a Caddyfile adapted and provisioned, with a clock that only the
// test moves and logs that it can read. Tests that use it may run in parallel, each with stack names, hosts or listen
// addresses of its own, since counters of equal stacks are shared by the process.
type edge struct {
	t     testing.TB
	clock *testClock
	logs  *logSink
	ctx   caddy.Context
	http  *caddyhttp.App
	app   *App
}

// testStart is the first instant of a day, and so of every common window.
var testStart = time.Date(2026, 3, 1, 0, 0, 0, 0, time.UTC)

// testClock is a clock that only moves when it is told to.
type testClock struct{ ms atomic.Int64 }

func newTestClock() *testClock {
	c := new(testClock)
	c.ms.Store(testStart.UnixMilli())
	return c
}

func (c *testClock) now() time.Time          { return time.UnixMilli(c.ms.Load()) }
func (c *testClock) advance(d time.Duration) { c.ms.Add(d.Milliseconds()) }
func (c *testClock) set(t time.Time)         { c.ms.Store(t.UnixMilli()) }

// provisioning keeps the time source of one test from reaching another's handlers.
var provisioning sync.Mutex

// newEdge provisions a Caddyfile, which must be accepted.
func newEdge(t testing.TB, caddyfile string) *edge {
	t.Helper()
	return newEdgeJSON(t, adapt(t, caddyfile))
}

// newEdgeJSON provisions a JSON config, which must be accepted.
func newEdgeJSON(t testing.TB, config []byte) *edge {
	t.Helper()
	e := &edge{t: t, clock: newTestClock(), logs: newLogSink(t)}
	require.NoError(t, e.load(config))
	t.Cleanup(e.close)
	return e
}

// adapt turns a Caddyfile into JSON.
func adapt(t testing.TB, caddyfile string) []byte {
	t.Helper()
	config, err := tryAdapt(caddyfile)
	require.NoError(t, err)
	return config
}

func tryAdapt(caddyfile string) ([]byte, error) {
	config, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(caddyfile), map[string]any{"filename": "Caddyfile"})
	return config, err
}

// tryLoad adapts and provisions a Caddyfile and returns why it was refused, if it was.
func tryLoad(t testing.TB, caddyfile string) (*edge, error) {
	t.Helper()
	config, err := tryAdapt(caddyfile)
	if err != nil {
		return nil, err
	}
	e := &edge{t: t, clock: newTestClock(), logs: newLogSink(t)}
	if err := e.load(config); err != nil {
		return nil, err
	}
	t.Cleanup(e.close)
	return e, nil
}

// load provisions a config with the edge's clock and logs, in the place of the one before only if it is accepted.
func (e *edge) load(config []byte) error {
	var cfg caddy.Config
	if err := json.Unmarshal(config, &cfg); err != nil {
		return err
	}
	cfg.Admin = &caddy.AdminConfig{Disabled: true}
	if cfg.Logging == nil {
		cfg.Logging = new(caddy.Logging)
	}
	if cfg.Logging.Logs == nil {
		cfg.Logging.Logs = make(map[string]*caddy.CustomLog)
	}
	def := cfg.Logging.Logs["default"]
	if def == nil {
		def = new(caddy.CustomLog)
		cfg.Logging.Logs["default"] = def
	}
	def.WriterRaw = json.RawMessage(fmt.Sprintf(`{"output":"tiered_limit_test","sink":%q}`, e.logs.name))
	def.EncoderRaw = json.RawMessage(`{"format":"json"}`)
	def.Level = "DEBUG"

	provisioning.Lock()
	defer provisioning.Unlock()
	timeSource = e.clock.now
	defer func() { timeSource = time.Now }()
	ctx, err := caddy.ProvisionContext(&cfg)
	if err != nil {
		return err
	}
	old := *e
	e.ctx = ctx
	app, err := ctx.App("http")
	require.NoError(e.t, err)
	e.http = app.(*caddyhttp.App)
	app, err = ctx.App("tiered_limit")
	require.NoError(e.t, err)
	e.app = app.(*App)
	if old.app != nil {
		old.close()
	}
	return nil
}

// reload puts a Caddyfile in the place of the running one, as a config reload does: the new one is provisioned before
// the old one is cleaned up.
func (e *edge) reload(caddyfile string) {
	e.t.Helper()
	require.NoError(e.t, e.tryReload(caddyfile))
}

// tryReload is reload for configs that may be refused. Then the old one stays.
func (e *edge) tryReload(caddyfile string) error {
	config, err := tryAdapt(caddyfile)
	if err != nil {
		return err
	}
	return e.load(config)
}

// close cleans up what the handlers of the running config have taken.
func (e *edge) close() {
	for _, h := range e.handlers() {
		if err := h.Cleanup(); err != nil {
			e.t.Errorf("cleaning up: %v", err)
		}
	}
}

func (e *edge) handlers() []*Handler {
	e.app.mu.Lock()
	defer e.app.mu.Unlock()
	var list []*Handler
	for h := range e.app.handlers {
		list = append(list, h)
	}
	return list
}

// server is the server that listens on an address such as :8080.
func (e *edge) server(listen string) *caddyhttp.Server {
	e.t.Helper()
	for _, s := range e.http.Servers {
		for _, l := range s.Listen {
			if l == listen {
				return s
			}
		}
	}
	e.t.Fatalf("no server listens on %s", listen)
	return nil
}

// xff is a header with these field lines of X-Forwarded-For.
func xff(lines ...string) http.Header { return http.Header{clientip.DefaultHeader: lines} }

// request is what a test sends. Zero fields take the defaults of send.
type request struct {
	listen string // default: the only server's
	method string // default GET
	url    string // default http://localhost/
	peer   string // default 203.0.113.1:50000
	header http.Header
	body   string
	edit   func(*http.Request) // last, for what the other fields cannot say
}

// send serves a request by the whole server and returns the response.
func (e *edge) send(q request) *httptest.ResponseRecorder {
	e.t.Helper()
	if q.method == "" {
		q.method = http.MethodGet
	}
	if q.url == "" {
		q.url = "http://localhost/"
	}
	if q.peer == "" {
		q.peer = "203.0.113.1:50000"
	}
	var body io.Reader
	if q.body != "" {
		body = strings.NewReader(q.body)
	}
	r := httptest.NewRequest(q.method, q.url, body)
	r.RemoteAddr = q.peer
	for name, values := range q.header {
		r.Header[http.CanonicalHeaderKey(name)] = values
	}
	if q.edit != nil {
		q.edit(r)
	}
	w := httptest.NewRecorder()
	e.serverFor(q.listen).ServeHTTP(w, r)
	return w
}

func (e *edge) serverFor(listen string) *caddyhttp.Server {
	e.t.Helper()
	if listen != "" {
		return e.server(listen)
	}
	require.Len(e.t, e.http.Servers, 1, "name the listen address")
	for _, s := range e.http.Servers {
		return s
	}
	return nil
}

// statuses sends a request n times and returns the statuses.
func (e *edge) statuses(n int, q request) []int {
	e.t.Helper()
	list := make([]int, n)
	for i := range list {
		list[i] = e.send(q).Code
	}
	return list
}

// served sends a request n times and returns how many were answered 200. Any other answer than 200 and 429 fails.
func (e *edge) served(n int, q request) int {
	e.t.Helper()
	count := 0
	for _, status := range e.statuses(n, q) {
		switch status {
		case http.StatusOK:
			count++
		case http.StatusTooManyRequests:
		default:
			e.t.Fatalf("status %d, want 200 or 429", status)
		}
	}
	return count
}

// used is how many hits a tier of a stack has counted for the identity that a request has there. The stack is found by
// its label: the name, or host and listen address.
func (e *edge) used(stack, tierName string, q request) []int64 {
	e.t.Helper()
	for _, h := range e.handlers() {
		if h.stackLabel != stack || h.mode != modeLimit {
			continue
		}
		for _, t := range h.tiers {
			if t.name == tierName {
				return e.peek(h, t, q)
			}
		}
	}
	e.t.Fatalf("no tier %q in a stack %q", tierName, stack)
	return nil
}

func (e *edge) peek(h *Handler, t *tier, q request) []int64 {
	e.t.Helper()
	var used []int64
	q.edit = chainEdits(q.edit, func(r *http.Request) {
		rec := newRecord(h, r)
		sc := new(scratch)
		claim := Claim{Tier: t.index, Identity: t.fixed}
		if t.fixed == nil {
			require.True(e.t, rec.identify(sc, t, &claim), "the request has no identity in tier %q", t.name)
		}
		claim.States = make([]State, len(t.spec.Limits))
		_, err := h.counters.Peek(r.Context(), e.clock.now(), []Claim{claim})
		require.NoError(e.t, err)
		for _, s := range claim.States {
			used = append(used, s.Used)
		}
	})
	r := httptest.NewRequest(http.MethodGet, "http://localhost/", nil)
	r.RemoteAddr = "203.0.113.1:50000"
	if q.peer != "" {
		r.RemoteAddr = q.peer
	}
	for name, values := range q.header {
		r.Header[http.CanonicalHeaderKey(name)] = values
	}
	repl := caddy.NewReplacer()
	r = caddyhttp.PrepareRequest(r, repl, httptest.NewRecorder(), h.server)
	q.edit(r)
	return used
}

func chainEdits(first, second func(*http.Request)) func(*http.Request) {
	return func(r *http.Request) {
		if first != nil {
			first(r)
		}
		second(r)
	}
}

// metric is the value of a metric, such as requests_total{outcome="served",stack="api"} without the module's prefix,
// labels in alphabetical order. It is -1 if there is no such metric.
func (e *edge) metric(name string) float64 {
	e.t.Helper()
	families, err := e.ctx.GetMetricsRegistry().Gather()
	require.NoError(e.t, err)
	for _, family := range families {
		for _, m := range family.GetMetric() {
			var labels []string
			for _, l := range m.GetLabel() {
				labels = append(labels, fmt.Sprintf("%s=%q", l.GetName(), l.GetValue()))
			}
			if family.GetName()+"{"+strings.Join(labels, ",")+"}" == "caddy_tiered_limit_"+name {
				return m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	return -1
}

// logSink collects log lines.
type logSink struct {
	name string
	mu   sync.Mutex
	buf  bytes.Buffer
}

var (
	logSinks    sync.Map
	logSinkNext atomic.Int64
)

func newLogSink(t testing.TB) *logSink {
	s := &logSink{name: fmt.Sprintf("%s-%d", t.Name(), logSinkNext.Add(1))}
	logSinks.Store(s.name, s)
	t.Cleanup(func() { logSinks.Delete(s.name) })
	return s
}

func (s *logSink) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.buf.Write(p)
}

func (*logSink) Close() error { return nil }

// logLine is a line of the log.
type logLine map[string]any

func (l logLine) str(field string) string { return fmt.Sprint(l[field]) }

// lines are the log lines of this module at a level (warn, info, ...; empty: any) whose message contains a text.
func (s *logSink) lines(level, containing string) []logLine {
	var found []logLine
	for _, l := range s.all() {
		ours := strings.HasPrefix(l.str("logger"), "http.handlers.tiered_limit") || strings.HasPrefix(l.str("logger"), "http.tiered_limit")
		is := l.str("level")
		if ours && (level == "" || is == level || level == "warn" && is == "error") && strings.Contains(l.str("msg"), containing) {
			found = append(found, l)
		}
	}
	return found
}

// all are all lines, of every logger.
func (s *logSink) all() []logLine {
	var lines []logLine
	for text := range strings.Lines(s.text()) {
		var l logLine
		if json.Unmarshal([]byte(text), &l) == nil {
			lines = append(lines, l)
		}
	}
	return lines
}

// text is everything that was logged.
func (s *logSink) text() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.buf.String()
}

// logSinkWriter is the log writer module that leads to a sink.
type logSinkWriter struct {
	Sink string `json:"sink"`
}

func init() { caddy.RegisterModule(logSinkWriter{}) }

func (logSinkWriter) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "caddy.logging.writers.tiered_limit_test",
		New: func() caddy.Module { return new(logSinkWriter) },
	}
}

func (w logSinkWriter) String() string    { return "sink " + w.Sink }
func (w logSinkWriter) WriterKey() string { return "tiered_limit_test:" + w.Sink }

func (w logSinkWriter) OpenWriter() (io.WriteCloser, error) {
	s, ok := logSinks.Load(w.Sink)
	if !ok {
		return nil, fmt.Errorf("no sink %q", w.Sink)
	}
	return s.(*logSink), nil
}

// connected reports whether the handler's store decides.
func (h *Handler) connected() bool { return h.counters.(Connector).Away() == nil }
