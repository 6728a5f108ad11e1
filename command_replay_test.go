package tieredlimit

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"crypto/tls"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/logging"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/tieredlimit/caddy-tieredlimit/internal/replay"
)

var updateGolden = flag.Bool("update", false, "write what tests print to the files that they are compared with")

// recorded is a request of a made-up log.
type recorded struct {
	request
	at       time.Time
	duration time.Duration
	user     string
	status   int
	tls      bool
}

// recording writes logs as Caddy does, by Caddy's own encoder.
type recording struct {
	encoder     zapcore.Encoder
	credentials bool
}

func newRecording(config logging.LogEncoderConfig, credentials bool) *recording {
	return &recording{zapcore.NewJSONEncoder(config.ZapcoreEncoderConfig()), credentials}
}

// line is the access line of a request.
func (rec *recording) line(t *testing.T, q recorded) string {
	t.Helper()
	r := httptest.NewRequest(cmp.Or(q.method, http.MethodGet), cmp.Or(q.url, "http://localhost/"), strings.NewReader(q.body))
	r.RemoteAddr = cmp.Or(q.peer, "203.0.113.1:50000")
	for name, values := range q.header {
		r.Header[http.CanonicalHeaderKey(name)] = values
	}
	if q.body != "" {
		r.Header.Set("Content-Length", fmt.Sprint(len(q.body)))
	}
	r.RequestURI = r.URL.RequestURI()
	if q.tls {
		r.TLS = &tls.ConnectionState{HandshakeComplete: true}
	}
	r = caddyhttp.PrepareRequest(r, caddy.NewReplacer(), httptest.NewRecorder(), new(caddyhttp.Server))
	entry := zapcore.Entry{
		Level: zapcore.InfoLevel, Time: q.at.Add(q.duration), LoggerName: "http.log.access.log0", Message: "handled request",
	}
	buf, err := rec.encoder.EncodeEntry(entry, []zapcore.Field{
		zap.Object("request", caddyhttp.LoggableHTTPRequest{Request: r, ShouldLogCredentials: rec.credentials}),
		zap.Int("bytes_read", len(q.body)), zap.String("user_id", q.user), zap.Duration("duration", q.duration),
		zap.Int("size", 2), zap.Int("status", cmp.Or(q.status, 200)),
		zap.Object("resp_headers", caddyhttp.LoggableHTTPHeader{Header: http.Header{"Server": {"Caddy"}}}),
	})
	require.NoError(t, err)
	return buf.String()
}

// log is the log of requests, in the order in which they ended. The indexes of the requests are returned by line.
func (rec *recording) log(t *testing.T, requests []recorded) (string, []int) {
	t.Helper()
	order := make([]int, len(requests))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int {
		return requests[a].at.Add(requests[a].duration).Compare(requests[b].at.Add(requests[b].duration))
	})
	var b strings.Builder
	for _, i := range order {
		b.WriteString(rec.line(t, requests[i]))
	}
	return b.String(), order
}

func replayLog(t *testing.T, config, log string, o replay.Options) *replay.Report {
	t.Helper()
	name := filepath.Join(t.TempDir(), "access.log")
	require.NoError(t, os.WriteFile(name, []byte(log), 0o600))
	if o.Logs == nil {
		o.Logs = []string{name}
	}
	if config != "" {
		o.Config = adapt(t, config)
	}
	if o.Wrap == nil {
		o.Wrap = newRehearsal
	}
	o.Quiet = true
	rep, err := replay.Run(context.Background(), o)
	require.NoError(t, err)
	return rep
}

// live is what the handlers of a config answer to requests at their times: refused or not.
func live(t *testing.T, config string, requests []recorded) []bool {
	t.Helper()
	e := &edge{t: t, clock: newTestClock(), logs: newLogSink(t)}
	require.NoError(t, e.load(adapt(t, config)))
	defer e.close() // before a replay counts in a stack of the same name
	refused := make([]bool, len(requests))
	for i, q := range requests {
		e.clock.set(q.at)
		switch status := e.send(q.request).Code; status {
		case http.StatusTooManyRequests:
			refused[i] = true
		case http.StatusOK, http.StatusFound, http.StatusUnauthorized:
		default:
			t.Fatalf("request %d: status %d", i, status)
		}
	}
	return refused
}

// replayTopologies are the ways on which requests come in the tests: the config's words, and what peer and header are.
var replayTopologies = []struct {
	name, config string
	hops         int
	way          func(rnd *rand.Rand, client, forged string) (peer string, header []string)
}{
	{"direct", "trusted_hops 0", 0, func(rnd *rand.Rand, client, forged string) (string, []string) {
		if forged == "" {
			return fmt.Sprintf("%s:%d", client, 1024+rnd.IntN(60000)), nil
		}
		return fmt.Sprintf("%s:%d", client, 1024+rnd.IntN(60000)), []string{forged}
	}},
	{"one load balancer", "trusted_hops 1", 1, func(_ *rand.Rand, client, forged string) (string, []string) {
		return "10.0.0.1:1", []string{joined(forged, client)}
	}},
	{"Google", "trusted_hops 2", 2, func(rnd *rand.Rand, client, forged string) (string, []string) {
		return fmt.Sprintf("35.191.0.%d:1", 1+rnd.IntN(20)), []string{joined(forged, client+",34.117.5.6")}
	}},
	{"HAProxy and nginx", "trusted_hops 2", 2, func(_ *rand.Rand, client, forged string) (string, []string) {
		if forged == "" {
			return "127.0.0.1:1", []string{client, "10.0.0.9"}
		}
		return "127.0.0.1:1", []string{forged, client, "10.0.0.9"}
	}},
}

func joined(forged, rest string) string {
	if forged == "" {
		return rest
	}
	return forged + ", " + rest
}

// replayTraffic is n requests of clients that are alike and of some that send far more, over eight minutes. Times are never on
// the edge of a millisecond, which a log cannot say exactly.
func replayTraffic(n int, way func(*rand.Rand, string, string) (string, []string)) []recorded {
	rnd := rand.New(rand.NewPCG(11, 12))
	list := make([]recorded, n)
	at := testStart
	for i := range list {
		at = at.Add(time.Duration(1+rnd.IntN(2*int(8*time.Minute/time.Millisecond)/n)) * time.Millisecond)
		client := fmt.Sprintf("203.0.%d.%d", 113+rnd.IntN(3), 1+rnd.IntN(40))
		if rnd.IntN(4) == 0 {
			client = fmt.Sprintf("198.51.100.%d", 1+rnd.IntN(3))
		}
		if rnd.IntN(10) == 0 {
			client = fmt.Sprintf("2001:db8:%x::%x", rnd.IntN(20), rnd.IntN(1000))
		}
		forged := ""
		if client[len(client)-1] == '7' {
			forged = fmt.Sprintf("9.%d.%d.%d", rnd.IntN(256), rnd.IntN(256), rnd.IntN(256))
		}
		q := &list[i]
		q.at = at.Add(time.Duration(200+rnd.IntN(600)) * time.Microsecond)
		q.duration = time.Duration(rnd.ExpFloat64() * float64(300*time.Millisecond))
		if rnd.IntN(100) == 0 {
			q.duration = time.Duration(rnd.IntN(50)) * time.Second
		}
		q.header = make(http.Header)
		var chain []string
		q.peer, chain = way(rnd, client, forged)
		if strings.Count(client, ":") > 1 && strings.HasPrefix(q.peer, client) {
			q.peer = "[" + client + "]:4711"
		}
		if chain != nil {
			q.header["X-Forwarded-For"] = chain
		}
		q.method = []string{"GET", "GET", "POST", "OPTIONS"}[rnd.IntN(4)]
		if q.method == "OPTIONS" && rnd.IntN(2) == 0 {
			q.header.Set("Origin", "https://app.example.com")
			q.header.Set("Access-Control-Request-Method", "POST")
			if rnd.IntN(3) == 0 {
				q.header.Set("Cookie", "a=b")
			}
		}
		q.url = "http://localhost" + []string{"/", "/health", "/api/x?a=1", "/api/%68ealth", "/static/a%2fb", "/old", "//health"}[rnd.IntN(7)]
		q.header.Set("X-Api-Key", fmt.Sprintf("key%d", rnd.IntN(30)))
		if rnd.IntN(5) == 0 {
			q.header.Del("X-Api-Key")
		}
	}
	return list
}

// replayConfigs are the stacks that are replayed and served; %s is the topology.
var replayConfigs = map[string]string{
	"tiers": `localhost:8080 {
		tiered_limit replayed {
			%s
			tier ip 20/m 3/s
			tier keyed 10/m {
				key {header.X-Api-Key}
				key {http.tiered_limit.client_ip} {method}
			}
			tier global 400/m
			exempt /health
		}
		respond ok
	}`,
	"charge and dry run": `:8080 {
		tiered_limit {
			%s
			tier dry 10/m {
				key {http.tiered_limit.client_ip}
				dry_run
			}
			tier ip 25/m {
				charge checked
			}
			tier write 8/m {
				key {http.tiered_limit.client_ip}
				match method POST
			}
			tier global 300/m
			ipv6_prefix 48
			preflight count
		}
		respond ok
	}`,
	"routes": `localhost:8080 {
		redir /old /new
		handle_path /api/* {
			tiered_limit one {
				%[1]s
				tier ip 20/m
				tier shared 200/m {
					key everybody
				}
				exempt /health
			}
			respond api
		}
		handle /static/* {
			respond static
		}
		handle {
			tiered_limit one {
				%[1]s
				tier shared 200/m {
					key everybody
				}
			}
			tiered_limit two {
				%[1]s
				tier path 15/m {
					key {http.tiered_limit.client_ip} {path}
				}
			}
			respond rest
		}
	}`,
	"one stack met twice": `:8080 {
		route {
			tiered_limit twice {
				%[1]s
				tier ip 10/m
				tier global 300/m
			}
			tiered_limit twice {
				%[1]s
				tier ip 10/m
				tier path 4/m {
					key {http.tiered_limit.client_ip} {path}
				}
			}
			respond ok
		}
	}`,
	"one stack met in a dry run first": `:8080 {
		route {
			tiered_limit rehearsed {
				%[1]s
				tier ip 10/m {
					charge checked
				}
				tier global 100/m
				dry_run
			}
			tiered_limit rehearsed {
				%[1]s
				tier ip 10/m {
					charge checked
				}
				tier global 100/m
			}
			respond ok
		}
	}`,
	"named routes around stacks": `&(answers) {
		@static path /static/*
		respond @static static
	}
	&(changes) {
		uri strip_prefix /api
		vars kind {method}
		map {path} {place} {
			/health sick
			default elsewhere
		}
	}
	&(nested) {
		invoke changes
		invoke answers
	}
	&(ends) {
		@old path /old
		redir @old /new
	}
	&(limits) {
		tiered_limit inner {
			%[1]s
			tier ip 12/m
			exempt /health
		}
		invoke ends
		rewrite /x /rewritten
	}
	:8080 {
		route {
			invoke nested
			invoke limits
			tiered_limit outer {
				%[1]s
				tier place 3/m {
					key {http.tiered_limit.client_ip} {place} {vars.kind} {path}
				}
				exempt /health
			}
			respond ok
		}
	}`,
	"a named route met again and again": `&(limits) {
		tiered_limit again {
			%[1]s
			tier ip 10/m
		}
	}
	:8080 {
		route {
			invoke limits
			invoke limits
			@post method POST
			invoke @post limits
			respond ok
		}
	}`,
	"a dry stack in front of another": `:8080 {
		route {
			tiered_limit first {
				%[1]s
				tier ip 3/m
				dry_run
			}
			@post method POST
			tiered_limit @post second {
				%[1]s
				tier ip 2/m
				charge checked
			}
			respond ok
		}
	}`,
}

func TestAReplayRefusesWhatTheHandlersRefuse(t *testing.T) {
	for _, top := range replayTopologies {
		for name, config := range replayConfigs {
			t.Run(top.name+", "+name, func(t *testing.T) {
				config := "{\nauto_https off\n}\n" + fmt.Sprintf(config, top.config)
				requests := replayTraffic(4000, top.way)
				want := live(t, config, requests)
				log, order := newRecording(logging.LogEncoderConfig{}, false).log(t, requests)
				got := make([]bool, len(requests))
				rep := replayLog(t, config, log, replay.Options{Trace: func(j replay.Judged) {
					got[order[j.Line-1]] = j.Outcome == replay.Refused
				}})
				refusals := 0
				for i := range requests {
					if want[i] {
						refusals++
					}
					if got[i] != want[i] {
						t.Fatalf("request %d at %s, %s %s: refused is %v, want %v", i, requests[i].at, requests[i].method,
							requests[i].url, got[i], want[i])
					}
				}
				require.Greater(t, refusals, 100, "too few to tell")
				var counted int64
				for _, s := range rep.Stacks {
					counted += s.Outcomes["refused"]
				}
				require.Equal(t, int64(refusals), counted)
				require.Zero(t, rep.Log.Late)
				require.NotNil(t, rep.Topology[0].Hops, rep.Topology[0].Reason)
				require.Equal(t, top.hops, *rep.Topology[0].Hops, rep.Topology[0].Reason)
				require.True(t, *rep.Topology[0].Stated[0].Fits)
			})
		}
	}
}

// replayed checks that a replay of a log decides each request as the handlers did, and returns how many they refused.
func replayed(t *testing.T, config string, requests []recorded) (refusals int) {
	t.Helper()
	config = "{\nauto_https off\n}\n" + config
	want := live(t, config, requests)
	log, order := newRecording(logging.LogEncoderConfig{}, false).log(t, requests)
	got := make([]bool, len(requests))
	replayLog(t, config, log, replay.Options{Trace: func(j replay.Judged) { got[order[j.Line-1]] = j.Outcome == replay.Refused }})
	for i := range requests {
		if want[i] {
			refusals++
		}
		assert.Equal(t, want[i], got[i], "request %d, %s %s", i, requests[i].method, requests[i].url)
	}
	return refusals
}

// A request that meets a named stack twice is charged once, in a replay as when it was served.
func TestAReplayChargesANamedStackOnce(t *testing.T) {
	requests := make([]recorded, 20)
	for i := range requests {
		requests[i].at = testStart.Add(time.Duration(i) * time.Second)
	}
	for name, config := range map[string]string{
		"both live":       "tiered_limit twice {\ntrusted_hops 0\ntier ip 10/h\n}\ntiered_limit twice {\ntrusted_hops 0\ntier ip 10/h\n}",
		"one more tier":   "tiered_limit twice {\ntrusted_hops 0\ntier ip 10/h\n}\ntiered_limit twice {\ntrusted_hops 0\ntier ip 10/h\ntier global 100/h\n}",
		"the first dry":   "tiered_limit twice {\ntrusted_hops 0\ndry_run\ntier ip 10/h\n}\ntiered_limit twice {\ntrusted_hops 0\ntier ip 10/h\n}",
		"checked in both": "tiered_limit twice {\ntrusted_hops 0\ncharge checked\ntier ip 10/h\n}\ntiered_limit twice {\ntrusted_hops 0\ncharge checked\ntier ip 10/h\n}",
	} {
		t.Run(name, func(t *testing.T) {
			assert.Equal(t, 10, replayed(t, ":8080 {\nroute {\n"+config+"\nrespond ok\n}\n}", requests))
		})
	}
}

// What makes a request more than a preflight is in the log, whatever its name.
func TestAReplayKnowsWhatIsNoPreflight(t *testing.T) {
	const config = ":8080 {\ntiered_limit no-preflight {\ntrusted_hops 0\ntier ip 1/h\n}\nrespond ok\n}"
	for name, q := range map[string]request{
		"Upgrade": preflight().with("Upgrade", "h2c"), "a key": preflight().with("X-Api-Key", "k"), "a rewrite": preflight().with("X-Original-Url", "/x"),
		"a method": preflightOf("/?_method=POST"), "credentials": preflight().with("Authorization", "Bearer x"), "a body": {method: "OPTIONS", body: "x", header: preflight().header},
		"a name that nobody knows": preflight().with("Aaa-Bbb", ""),
	} {
		t.Run(name, func(t *testing.T) {
			requests := make([]recorded, 30)
			for i := range requests {
				requests[i] = recorded{request: q, at: testStart.Add(time.Duration(i) * time.Second)}
			}
			assert.Equal(t, 29, replayed(t, config, requests))
		})
	}
	real := make([]recorded, 30)
	for i := range real {
		real[i] = recorded{request: preflight().with("Sec-Fetch-Mode", "cors").with("X-Forwarded-For", "203.0.113.9"), at: testStart.Add(time.Duration(i) * time.Second)}
	}
	assert.Equal(t, 0, replayed(t, config, real))
}

// Fields that name another method or path decide in a replay as they did when the request was served, whether the config
// speaks of them or not.
func TestAReplayKnowsFieldsThatNameAnotherRequest(t *testing.T) {
	const config = ":8080 {\ntiered_limit other-request {\ntrusted_hops 0\nexempt /health\ntier ip 1/h {\nmatch %s\n}\n}\nrespond ok\n}"
	for name, c := range map[string]struct {
		match string
		q     request
	}{
		"a method":         {"method POST", request{}.with("X-HTTP-Method-Override", "POST")},
		"another field":    {"method POST", request{}.with("X-HTTP-Verb", "POST")},
		"a path":           {"path /login", request{}.with("X-Original-Url", "/login")},
		"an exempt path":   {"method GET", request{url: "http://localhost/health"}.with("X-Rewrite-Url", "/x")},
		"a path rewritten": {"path /login", request{}.with("X-Rewrite-Url", "/Login?x=1")},
	} {
		t.Run(name, func(t *testing.T) {
			requests := make([]recorded, 20)
			for i := range requests {
				requests[i] = recorded{request: c.q, at: testStart.Add(time.Duration(i) * time.Second)}
			}
			assert.Equal(t, 19, replayed(t, fmt.Sprintf(config, c.match), requests))
			for i := range requests {
				requests[i].header = nil
			}
			assert.Equal(t, 0, replayed(t, fmt.Sprintf(config, strings.Replace(c.match, "GET", "PUT", 1)), requests), "without it")
		})
	}
}

// A preflight with a body is none over HTTP/3 either, where the log has no length of it but what was read.
func TestAReplayKnowsTheBodyOfAPreflight(t *testing.T) {
	const config = "{\nauto_https off\n}\n:8080 {\ntiered_limit body-read {\ntrusted_hops 0\ntier ip 1/h\n}\nrespond ok\n}"
	requests := make([]recorded, 10)
	for i := range requests {
		requests[i] = recorded{request: request{method: "OPTIONS", body: "x", header: preflight().header}, at: testStart.Add(time.Duration(i) * time.Second)}
	}
	log, _ := newRecording(logging.LogEncoderConfig{}, false).log(t, requests)
	log = strings.NewReplacer(`"Content-Length":["1"],`, "", `,"Content-Length":["1"]`, "", "HTTP/1.1", "HTTP/3.0").Replace(log)
	require.NotContains(t, log, "Content-Length")
	require.Contains(t, log, `"bytes_read":1`)
	rep := replayLog(t, config, log, replay.Options{})
	assert.Equal(t, int64(9), rep.Stacks[0].Outcomes["refused"])
	log = strings.ReplaceAll(log, `"bytes_read":1`, `"bytes_read":0`)
	rep = replayLog(t, config, log, replay.Options{})
	assert.Equal(t, int64(10), rep.Stacks[0].Outcomes["preflight"])
}

// Ports that vary, quotes and escapes do not keep a replay from finding the hop count in Forwarded.
func TestAReplayFindsTheHopCountInForwarded(t *testing.T) {
	for name, lb := range map[string]string{"a port": `"10.0.0.2:%d"`, "brackets": `"[2001:db8::2]:%d"`, "an escape": `"10.0.0.\2:%d"`} {
		t.Run(name, func(t *testing.T) {
			var requests []recorded
			for i := range 600 {
				q := request{peer: "10.0.0.3:4711"}.with("Forwarded", fmt.Sprintf(`for=203.0.113.%d;proto=https, for=`+lb, i%50, 20000+i))
				requests = append(requests, recorded{request: q, at: testStart.Add(time.Duration(i) * time.Second)})
			}
			log, _ := newRecording(logging.LogEncoderConfig{}, false).log(t, requests)
			rep := replayLog(t, "", log, replay.Options{})
			require.NotNil(t, rep.Topology[0].Hops, rep.Topology[0].Reason)
			assert.Equal(t, 2, *rep.Topology[0].Hops, rep.Topology[0].Reason)
			assert.Equal(t, "Forwarded", rep.Topology[0].Header)
		})
	}
}

// exampleTopologies are the ways on which requests come to the examples, and the hop count that is right.
var exampleTopologies = map[string]struct {
	hops int
	way  func(rnd *rand.Rand, client, forged string) (peer string, header http.Header)
}{
	"direct":            {0, directWay},
	"quickstart":        {0, directWay},
	"dry-run":           {0, directWay},
	"json":              {0, directWay},
	"per-route":         {0, directWay},
	"per-user":          {0, directWay},
	"forward-auth":      {0, directWay},
	"plans":             {0, directWay},
	"checkout":          {0, directWay},
	"shared":            {0, directWay},
	"graphql":           {1, appendingWay("10.0.0.%d:1", "")},
	"one-load-balancer": {1, appendingWay("10.0.0.%d:1", "")},
	"haproxy":           {1, appendingWay("127.0.0.1:%d", "")},
	"nginx":             {1, appendingWay("127.0.0.1:%d", "")},
	"replicas":          {1, appendingWay("127.0.0.1:%d", "")},
	"google-alb":        {2, appendingWay("35.191.0.%d:1", ", 34.117.5.6")},
	"cloudflare": {1, func(rnd *rand.Rand, client, forged string) (string, http.Header) {
		peer, h := appendingWay("173.245.48.%d:1", "")(rnd, client, forged)
		h.Set("Cf-Connecting-Ip", client)
		return peer, h
	}},
}

func directWay(rnd *rand.Rand, client, forged string) (string, http.Header) {
	h := make(http.Header)
	if forged != "" {
		h.Set([]string{"X-Forwarded-For", "X-Real-Ip", "Forwarded", "Cf-Connecting-Ip"}[rnd.IntN(4)], forged)
	}
	return fmt.Sprintf("%s:%d", client, 1024+rnd.IntN(60000)), h
}

// appendingWay leads through proxies that append the client and, in the header's end, what is behind it.
func appendingWay(peer, behind string) func(*rand.Rand, string, string) (string, http.Header) {
	return func(rnd *rand.Rand, client, forged string) (string, http.Header) {
		return fmt.Sprintf(peer, 1+rnd.IntN(9)), http.Header{"X-Forwarded-For": {joined(forged, client) + behind}}
	}
}

func TestAReplayFindsTheHopCountOfEveryExample(t *testing.T) {
	files, err := filepath.Glob("examples/*/Caddyfile")
	require.NoError(t, err)
	require.Len(t, files, len(exampleTopologies))
	t.Setenv("TRUST_PROXY", "1")
	for _, file := range files {
		name := filepath.Base(filepath.Dir(file))
		t.Run(name, func(t *testing.T) {
			top, known := exampleTopologies[name]
			require.True(t, known, "no topology")
			rnd := rand.New(rand.NewPCG(31, 32))
			var requests []recorded
			for i := range 2000 {
				client, forged := fmt.Sprintf("203.0.113.%d", 1+rnd.IntN(120)), ""
				if strings.HasSuffix(client, "7") && rnd.IntN(5) > 0 {
					forged = fmt.Sprintf("9.9.%d.%d, 10.0.0.1", rnd.IntN(256), rnd.IntN(256))
				}
				q := recorded{at: testStart.Add(time.Duration(i) * 10 * time.Millisecond)}
				q.url = "http://localhost:8080/"
				q.peer, q.header = top.way(rnd, client, forged)
				requests = append(requests, q)
			}
			log, _ := newRecording(logging.LogEncoderConfig{}, false).log(t, requests)
			rep := replayLog(t, readText(t, file), log, replay.Options{})
			require.NotNil(t, rep.Topology[0].Hops, rep.Topology[0].Reason)
			require.Equal(t, top.hops, *rep.Topology[0].Hops, rep.Topology[0].Reason)
			require.NotEmpty(t, rep.Topology[0].Stated)
			for _, s := range rep.Topology[0].Stated {
				require.NotNil(t, s.Fits, "%+v", s)
				require.True(t, *s.Fits, "%+v", s)
			}
		})
	}
}

func TestAReplayKnowsTheUserOnlyBehindAuthentication(t *testing.T) {
	const account = "ann $2a$10$0000000000000000000000uTb4pBSTbsN3g7T0m1Qm4qUQwNwzZ0a"
	config := func(order string) string {
		return fmt.Sprintf("{\nauto_https off\n}\n:8080 {\nroute {\n%s\nrespond ok\n}\n}", fmt.Sprintf(order,
			"tiered_limit users {\ntier user 2/m\n}", "basic_auth {\n"+account+"\n}"))
	}
	var requests []recorded
	for i := range 10 {
		q := recorded{at: testStart.Add(time.Duration(i) * time.Second), user: "ann"}
		if i%2 == 1 {
			q.user, q.status = "", 401
		}
		requests = append(requests, q)
	}
	log, _ := newRecording(logging.LogEncoderConfig{}, false).log(t, requests)
	behind := replayLog(t, config("%[2]s\n%[1]s"), log, replay.Options{}).Stacks[0]
	require.Equal(t, map[string]int64{"served": 2, "refused": 3}, behind.Outcomes, "those without a user end before")
	require.Equal(t, "ann", behind.Tiers[0].Worst[0].Who)
	before := replayLog(t, config("%[1]s\n%[2]s"), log, replay.Options{}).Stacks[0]
	require.Equal(t, map[string]int64{"served": 10}, before.Outcomes)
	require.Equal(t, int64(10), before.Tiers[0].Skipped)
}

func TestAReplayReportsKeysThatTheLogHasRedacted(t *testing.T) {
	const config = `:8080 {
		tiered_limit {
			trusted_hops 0
			tier token 1/m {
				key {header.Authorization}
			}
			tier session 1/m {
				key {http.request.cookie.sid}
			}
			tier ip 100/m
		}
	}`
	var requests []recorded
	for i := range 10 {
		q := recorded{at: testStart.Add(time.Duration(i) * time.Second)}
		q.header = http.Header{"Authorization": {"Bearer x"}, "Cookie": {"sid=1"}}
		requests = append(requests, q)
	}
	log, _ := newRecording(logging.LogEncoderConfig{}, false).log(t, requests)
	rep := replayLog(t, config, log, replay.Options{})
	s := rep.Stacks[0]
	require.Equal(t, map[string]int64{"served": 10}, s.Outcomes)
	require.Equal(t, []int64{10, 10, 0}, []int64{s.Tiers[0].Hidden, s.Tiers[1].Hidden, s.Tiers[2].Hidden})
	require.Equal(t, []int64{0, 0, 10}, []int64{s.Tiers[0].Requests, s.Tiers[1].Requests, s.Tiers[2].Requests})
	require.Equal(t, map[string]int64{"Authorization": 10, "Cookie": 10}, rep.Log.Redacted)
	notes := strings.Join(rep.Notes, "\n")
	require.Contains(t, notes, `the log has Authorization redacted, so 10 requests could not be judged`)
	require.Contains(t, notes, `the log has Cookie redacted, so 10 requests could not be judged`)

	log, _ = newRecording(logging.LogEncoderConfig{}, true).log(t, requests)
	rep = replayLog(t, config, log, replay.Options{})
	s = rep.Stacks[0]
	require.Equal(t, map[string]int64{"served": 1, "refused": 9}, s.Outcomes)
	require.Regexp(t, `^key [0-9a-f]{12}$`, s.Tiers[0].Worst[0].Who, "a secret is not shown")
	rep = replayLog(t, config, log, replay.Options{ShowKeys: true})
	require.Equal(t, "x", rep.Stacks[0].Tiers[0].Worst[0].Who)
}

func TestNothingButTheHandlersIsProvisioned(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("HOME", dir)
	t.Setenv("XDG_DATA_HOME", dir)
	t.Setenv("XDG_CONFIG_HOME", dir)
	config := fmt.Sprintf(`{
		"admin": {"listen": "256.256.256.256:1"},
		"storage": {"module": "no_such_storage"},
		"logging": {"logs": {"default": {"writer": {"output": "file", "filename": %q}}, "x": {"writer": {"output": "nowhere"}}}},
		"apps": {
			"no_such_app": {},
			"tls": {"certificates": {"load_files": [{"certificate": "/no/such", "key": "/no/such"}]}},
			"http": {"servers": {
				"limited": {
					"listen": [":443"], "listener_wrappers": [{"wrapper": "no_such_wrapper"}],
					"tls_connection_policies": [{"certificate_selection": {"any_tag": ["x"]}, "no_such": 1}],
					"logs": {"default_logger_name": "x"}, "metrics": {},
					"errors": {"routes": [{"handle": [{"handler": "no_such_handler"}]}]},
					"routes": [
						{"match": [{"host": ["localhost"]}], "handle": [{"handler": "no_such_handler"},
							{"handler": "tiered_limit", "trusted_hops": 0, "tiers": [{"name": "ip", "limits": [{"count": 2, "window": "1m"}]}],
							"store": {"backend": "no_such_store"}}, {"handler": "reverse_proxy", "transport": {"protocol": "no_such"}}]},
						{"match": [{"no_such_matcher": {}}], "handle": [{"handler": "no_such_handler"}]}
					]
				},
				"other": {"listen": [":1"], "routes": [{"match": [{"no_such_matcher": {}}], "handle": [{"handler": "no_such_handler"}]}]}
			}}
		}
	}`, filepath.Join(dir, "log"))
	var requests []recorded
	for i := range 5 {
		requests = append(requests, recorded{at: testStart.Add(time.Duration(i) * time.Second), tls: true})
	}
	log, _ := newRecording(logging.LogEncoderConfig{}, false).log(t, requests)
	rep := replayLog(t, "", log, replay.Options{Config: []byte(config)})
	require.Equal(t, map[string]int64{"served": 2, "refused": 3}, rep.Stacks[0].Outcomes)
	require.Equal(t, []string{"server limited: a no_such_handler handler in front of a stack is not run; replayed as if it let all requests pass"},
		rep.Notes)
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Empty(t, left, "files were written")
}

func TestAReplayOfAStackThatIsInert(t *testing.T) {
	log, _ := newRecording(logging.LogEncoderConfig{}, false).log(t, []recorded{{at: testStart}, {at: testStart.Add(time.Second)}})
	rep := replayLog(t, ":8080 {\ntiered_limit {\ntier ip 1/m\n}\n}", log, replay.Options{})
	require.Equal(t, "inert", rep.Stacks[0].Mode)
	require.Equal(t, map[string]int64{"inert": 2}, rep.Stacks[0].Outcomes)
	require.Contains(t, strings.Join(rep.Notes, "\n"), "trusted_hops is not stated")
	rep = replayLog(t, ":8080 {\ntiered_limit {\ntier ip 0/m\n}\n}", log, replay.Options{})
	require.Equal(t, "off", rep.Stacks[0].Mode)
	require.Equal(t, map[string]int64{"off": 2}, rep.Stacks[0].Outcomes)
}

func TestAReplayWithoutAConfigTellsTheTopology(t *testing.T) {
	log, _ := newRecording(logging.LogEncoderConfig{}, false).log(t, replayTraffic(500, replayTopologies[2].way))
	rep := replayLog(t, "", log, replay.Options{})
	require.Empty(t, rep.Stacks)
	require.Equal(t, 2, *rep.Topology[0].Hops)
}

func TestAReplayOfALogWithoutTheNeededFields(t *testing.T) {
	requests := replayTraffic(300, replayTopologies[1].way)
	log, _ := newRecording(logging.LogEncoderConfig{}, false).log(t, requests)
	config := fmt.Sprintf("{\nauto_https off\n}\n"+replayConfigs["tiers"], "trusted_hops 1")
	for _, c := range []struct {
		name, from, to string
		requests       int64
		want           string
	}{
		{"headers", `"headers":`, `"hidden":`, 300, "have no request.headers"},
		{"duration", `"duration":`, `"took":`, 300, "have no duration: they are taken as instantaneous"},
		{"time", `"ts":`, `"when":`, 0, "have no ts: they cannot be used"},
		{"peer", `"remote_ip":`, `"remote":`, 0, "have no request.remote_ip"},
		{"host", `"host":`, `"site":`, 300, "have no request.host"},
	} {
		t.Run(c.name, func(t *testing.T) {
			rep := replayLog(t, config, strings.ReplaceAll(log, c.from, c.to), replay.Options{})
			require.Equal(t, c.requests, rep.Log.Requests)
			require.Contains(t, strings.Join(rep.Notes, "\n"), "100 % of the access lines "+c.want)
		})
	}
	for content, want := range map[string]string{
		"": "the log is empty",
		"2026/03/01 00:00:00\tINFO\thttp.log.access\thandled request\t{\"request\"\n": `1 line could not be used: they are cut off, and in the console format`,
		`1.2.3.4 - - [01/Mar/2026:00:00:00 +0000] "GET / HTTP/1.1" 200 5`:             `let Caddy write JSON: log { format json }; the first begins with "1.2.3.4 - - `,
		"hello \x1b[31m\n": `they are no JSON objects, also behind what a collector may have put in front; the first begins with "hello \x1b[31m"`,
		`{"level":"info","ts":1,"msg":"server running"}`: "no access lines",
	} {
		rep := replayLog(t, config, content, replay.Options{})
		require.Contains(t, strings.Join(rep.Notes, "\n"), want)
	}
}

// replayForShow is a log and a config in which everything that a report shows occurs.
func replayForShow(t *testing.T) (config, log string) {
	t.Helper()
	config = "{\nauto_https off\n}\n" + fmt.Sprintf(replayConfigs["tiers"], "trusted_hops 2")
	log, _ = newRecording(logging.LogEncoderConfig{}, false).log(t, replayTraffic(3000, replayTopologies[2].way))
	return config, log
}

// golden compares with a file in testdata.
func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *updateGolden {
		require.NoError(t, os.MkdirAll("testdata", 0o755))
		require.NoError(t, os.WriteFile(path, got, 0o644))
	}
	want, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, string(want), string(got), "run with -update if this is right")
}

// replayCommand runs the command with arguments and returns what it prints.
func replayCommand(t *testing.T, stdin io.Reader, args ...string) (string, error) {
	t.Helper()
	cmd := replay.NewCommand(newRehearsal)
	var out bytes.Buffer
	cmd.SetArgs(append([]string{"--quiet"}, args...))
	cmd.SetIn(stdin)
	cmd.SetOut(&out)
	cmd.SetErr(io.Discard)
	err := cmd.ExecuteContext(context.Background())
	return out.String(), err
}

func TestTheReplayCommand(t *testing.T) {
	config, log := replayForShow(t)
	dir := t.TempDir()
	t.Chdir(dir)
	require.NoError(t, os.WriteFile("Caddyfile", []byte(config), 0o600))
	require.NoError(t, os.WriteFile("access.log", []byte(log), 0o600))
	var packed bytes.Buffer
	w := gzip.NewWriter(&packed)
	_, err := io.WriteString(w, log)
	require.NoError(t, err)
	require.NoError(t, w.Close())

	text, err := replayCommand(t, nil, "access.log")
	require.NoError(t, err)
	again, err := replayCommand(t, &packed, "-c", "Caddyfile", "-")
	require.NoError(t, err)
	require.Equal(t, text, strings.ReplaceAll(again, "standard input", "access.log"))

	asJSON, err := replayCommand(t, nil, "--json", "--html", "report.html", "--limits", "10,30", "--top", "3", "access.log")
	require.NoError(t, err)
	var rep replay.Report
	require.NoError(t, json.Unmarshal([]byte(asJSON), &rep))
	var weighed []int64
	for _, c := range rep.Stacks[0].Tiers[0].Limits[0].Candidates {
		weighed = append(weighed, c.Count)
	}
	require.Subset(t, weighed, []int64{10, 20, 30}, "those asked for and the configured one")
	require.Len(t, rep.Stacks[0].Tiers[0].Worst, 3)
	page, err := os.ReadFile("report.html")
	require.NoError(t, err)
	require.NotContains(t, string(page), "<script")
	require.NotRegexp(t, `(src|href)=|url\(|@import`, string(page), "the page needs something else")
	require.Contains(t, string(page), "trusted_hops 2")

	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"nothing.log"}, "nothing.log"},
		{[]string{"--limits", "many", "access.log"}, `--limits: "many" is not a whole number`},
		{[]string{"--top", "0", "access.log"}, "--top 0 is not between"},
		{[]string{"--reorder", "0s", "access.log"}, "--reorder 0s is not between"},
		{[]string{"--duration-format", "h", "access.log"}, `duration format "h" is not one of`},
		{[]string{"--config", "nothing", "access.log"}, "nothing"},
		{[]string{"--html", "no/such/dir.html", "access.log"}, "writing the page"},
	} {
		_, err := replayCommand(t, nil, c.args...)
		require.ErrorContains(t, err, c.want)
	}
}

func TestReportsAreAsTheyWere(t *testing.T) {
	config, log := replayForShow(t)
	rep := replayLog(t, config, log, replay.Options{ConfigName: "Caddyfile", Shape: replay.Shape{Top: 5, Bars: 24}})
	rep.Log.Files[0].Name = "access.log"
	var text bytes.Buffer
	require.NoError(t, rep.WriteText(&text))
	golden(t, "replay.txt", text.Bytes())
	asJSON, err := json.MarshalIndent(rep, "", "  ")
	require.NoError(t, err)
	golden(t, "replay.json", append(asJSON, '\n'))
}

func TestAPageShowsWhatIsInALogAsText(t *testing.T) {
	q := recorded{at: testStart}
	q.header = http.Header{"X-Api-Key": {`<script>alert(1)</script>`}}
	var requests []recorded
	for i := range 60 {
		q.at = testStart.Add(time.Duration(i) * time.Millisecond)
		requests = append(requests, q)
	}
	log, _ := newRecording(logging.LogEncoderConfig{}, false).log(t, requests)
	config := "{\nauto_https off\n}\n" + fmt.Sprintf(replayConfigs["tiers"], "trusted_hops 0\nlog_keys")
	rep := replayLog(t, strings.ReplaceAll(config, "20/m 3/s", "1000/m"), log, replay.Options{})
	require.Equal(t, `<script>alert(1)</script>`, rep.Stacks[0].Tiers[1].Worst[0].Who)
	var page bytes.Buffer
	require.NoError(t, rep.WriteHTML(&page))
	require.NotContains(t, page.String(), "<script")
	require.Contains(t, page.String(), "&lt;script")
}

// hostileTexts are what clients may send to do something to whoever reads the report.
var hostileTexts = []string{
	`<script>alert(1)</script>`, `"><img src=x onerror=alert(1)>`, `</style></code></table><h1>`, "{{.Log}}", "javascript:alert(1)",
	"\x1b[2J\x1b]0;title\x07", "a\r\n  ip 9/m 1 1 100 %", "\x00\x08\x7f\u009b31m", "\u202eright to left\u2066", "\xff\xfe", "\ufeff\u200b",
}

// A report on a log in which every value that a client chooses is hostile shows them as text, in the terminal and on the
// page, and no line of its own.
func TestAReportOfHostileValuesIsText(t *testing.T) {
	const config = "{\nauto_https off\n}\n:8080 {\nroute {\nbasic_auth {\nann $2a$10$0000000000000000000000uTb4pBSTbsN3g7T0m1Qm4qUQwNwzZ0a\n}\n" +
		"tiered_limit hostile {\ntrusted_hops 1\ntier user 1/m {\ndry_run\n}\n" +
		"tier key 1/m {\nkey {header.X-Api-Key} {path}\ndry_run\n}\ntier ip 2/m {\ndry_run\n}\n}\nrespond ok\n}\n}"
	var log strings.Builder
	at := testStart
	for _, text := range hostileTexts {
		for i := range 6 {
			at = at.Add(100 * time.Millisecond)
			line, err := json.Marshal(map[string]any{
				"ts": float64(at.UnixMilli()) / 1000, "logger": "http.log.access", "msg": "handled request", "user_id": text,
				"duration": 0.01, "status": 200, "request": map[string]any{
					"remote_ip": text, "remote_port": "1", "method": text, "host": "localhost:8080", "uri": "/" + text,
					"headers": map[string][]string{"X-Forwarded-For": {"203.0.113.7, " + text + fmt.Sprint(i)}, "X-Api-Key": {text}},
				},
			})
			require.NoError(t, err)
			log.Write(line)
			log.WriteString("\n")
		}
	}
	log.WriteString("\x1b[2J<script>\n{\"ts\":\"\x1b[2J\"}\n")
	for _, show := range []bool{false, true} {
		rep := replayLog(t, config, log.String(), replay.Options{ShowKeys: show, Shape: replay.Shape{Top: 100}})
		require.Equal(t, int64(6*len(hostileTexts)), rep.Log.Requests)
		require.Len(t, rep.Stacks[0].Tiers[0].Worst, len(hostileTexts))
		require.NotEmpty(t, rep.Stacks[0].Tiers[1].Worst)
		var text, page bytes.Buffer
		require.NoError(t, rep.WriteText(&text))
		require.NoError(t, rep.WriteHTML(&page))
		for name, out := range map[string]string{"text": text.String(), "page": page.String()} {
			require.True(t, utf8.ValidString(out), name)
			for _, r := range out {
				if r != '\n' && (r != '\t' || name == "text") && !unicode.IsPrint(r) {
					t.Errorf("the %s holds %q", name, r)
				}
			}
		}
		require.Contains(t, text.String(), `\x1b[2J\x1b]0;title\a`)
		require.NotRegexp(t, `(?m)^ *ip 9/m 1 1`, text.String(), "a line that a client has made up")
		require.NotRegexp(t, `(?i)<script|<img|</h1><h1>|<[^>]*(onerror|javascript:)`, page.String())
		require.Equal(t, 1, strings.Count(page.String(), "<h1>"))
		require.Contains(t, page.String(), "&lt;script&gt;alert(1)&lt;/script&gt;")
	}
}

// A replay that has read no request fails, and its notes say why: what could not be read, with a sample and the cure. Without a
// config only the topology is reported, and that is said.
func TestAReplayOfNothingFails(t *testing.T) {
	config, log := replayForShow(t)
	dir := t.TempDir()
	write := func(name, content string) string {
		file := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(file, []byte(content), 0o600))
		return file
	}
	caddyfile := write("Caddyfile", config)
	for name, c := range map[string]struct {
		args []string
		note string
	}{
		"empty":      {[]string{"--config", caddyfile, write("empty.log", "")}, "the log is empty"},
		"garbage":    {[]string{"--config", caddyfile, write("garbage.log", "a\nb\n")}, `2 lines could not be used: they are no JSON objects`},
		"no access":  {[]string{"--config", caddyfile, write("other.log", `{"level":"info","msg":"x"}`)}, "the log has no access lines"},
		"common log": {[]string{"--topology", write("clf.log", `1.2.3.4 - - [01/Mar/2026:00:00:00 +0000] "GET / HTTP/1.1" 200 5`)}, "common log format"},
	} {
		out, err := replayCommand(t, nil, c.args...)
		require.EqualError(t, err, "no request could be read from the log; the notes of the report say why", name)
		require.Contains(t, words(out), c.note, name)
		require.NotContains(t, out, "is the log that of this config?", name)
	}
	access := write("access.log", log)
	out, err := replayCommand(t, nil, "--topology", access)
	require.NoError(t, err)
	require.Contains(t, out, "only the topology is reported, as --topology asks")
	require.NotContains(t, out, "is the log that of this config?")
	t.Chdir(t.TempDir())
	out, err = replayCommand(t, nil, access)
	require.NoError(t, err)
	require.Contains(t, out, "no config found: only the topology is reported")
	require.NotContains(t, out, "is the log that of this config?")
}
