package tieredlimit

import (
	"bufio"
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tieredlimit/caddy-tieredlimit/internal/clientip"
	"github.com/tieredlimit/caddy-tieredlimit/internal/readmetest"
	"github.com/tieredlimit/caddy-tieredlimit/store/memory"
)

// readme is the document that says what the module does.
const readme = "README.md"

// readmeClaims check that blocks do what the text around them says.
var readmeClaims = map[string]func(t *testing.T, block readmetest.Block){
	"Quick start/2":                 claimQuickstartConfig,
	"Quick start/4":                 claimFirstAnswer,
	"Quick start/5":                 claimSixthAnswer,
	"Who the client is/1":           claimTrustedProxies,
	"Find the hop count/1":          claimChain,
	"Caddyfile/1":                   claimSyntax,
	"Caddyfile/2":                   claimEnvironment,
	"Windows/1":                     claimTwoWindows,
	"Served or checked/1":           claimAliceAndBob("ip"),
	"Served or checked/2":           claimAliceAndBob(""),
	"Served or checked/3":           claimAliceAndBob(""),
	"Keys/1":                        claimKeys,
	"Limits for single routes/1":    claimTighter,
	"Limits for single routes/2":    claimLooser,
	"What is not counted/1":         claimExempt,
	"What is not counted/2":         claimPreflights,
	"Headers/2":                     claimDraftFields,
	"Body/1":                        claimHandleErrors,
	"CORS/1":                        claimCORS,
	"Logs, placeholders, metrics/1": claimAccessLog,
	"Memory/1":                      claimMaxKeys,
	"Sharing counters: Redis/1":     claimShared,
	"Settings/1":                    claimElsewhere("store/redis"),
	"What is stored/1":              claimElsewhere("store/redis"),
	"The server/1":                  claimElsewhere("store/redis"),
	"The server/2":                  claimElsewhere("store/redis"),
	"Cluster and sentinel/1":        claimRedisMode("cluster"),
	"Cluster and sentinel/2":        claimRedisMode("sentinel"),
	"Stores by others/1":            claimFile("examples/mapstore/store.go"),
	"Stores by others/2":            claimFile("examples/mapstore/store_test.go"),
	"Migrating from rate_limit/1":   claimOtherPlugin,
	"Migrating from rate_limit/2":   claimMigrated,
	"The access log names another client/1": func(t *testing.T, b readmetest.Block) {
		e := loadBlock(t, b)
		e.send(request{peer: "10.0.0.1:1", header: forwarded("X-Forwarded-For", "192.0.2.1, 203.0.113.7")})
		assert.Contains(t, e.logs.text(), `"limited_client":"203.0.113.7"`)
	},
}

// Every fenced block of the README is executed: configurations load and, where the text says what they do, do it;
// answers are those of the server; commands are ones that exist.
func TestReadmeBlocks(t *testing.T) {
	blocks := readmetest.Blocks(t, readme)
	require.Greater(t, len(blocks), 20)
	executed := make(map[string]bool)
	for _, b := range blocks {
		t.Run(fmt.Sprintf("line %d", b.Line), func(t *testing.T) {
			claim := readmeClaims[b.Name]
			executed[b.Name] = true
			switch {
			case claim != nil:
				claim(t, b)
			case b.Language == "caddyfile":
				e := loadBlock(t, b)
				assert.Empty(t, e.logs.lines("warn", ""), "warnings at load")
			case b.Language == "json":
				checkReadmeJSON(t, b)
			case b.Language == "sh":
				checkCommands(t, b)
			default:
				t.Fatalf("no test executes this %s block; add a claim for %q", b.Language, b.Name)
			}
		})
	}
	for name := range readmeClaims {
		assert.True(t, executed[name], "the README has no block %q any more", name)
	}
}

// siteConfig makes a whole Caddyfile of a block: one that is not a whole file itself goes into a site.
func siteConfig(text string) string {
	first, _, _ := strings.Cut(text, "\n")
	if strings.HasPrefix(first, "tiered_limit") {
		return ":8080 {\n" + text + "\nrespond ok\n}\n"
	}
	return text
}

// loadBlock provisions a block, which must be formatted as caddy fmt does.
func loadBlock(t *testing.T, b readmetest.Block) *edge {
	t.Helper()
	assert.Equal(t, string(caddyfile.Format([]byte(b.Text))), b.Text, "caddy fmt")
	return newWiredEdge(t, adapt(t, siteConfig(b.Text)))
}

func checkReadmeJSON(t *testing.T, b readmetest.Block) {
	e := newEdgeJSON(t, handlerConfig(b.Text))
	post := request{method: "POST", url: "http://localhost/posts", header: forwarded("X-Forwarded-For", "203.0.113.7")}
	assert.Equal(t, 10, e.served(12, post))
	assert.Equal(t, 30, e.served(30, request{url: "http://localhost/health"}))
}

// handlerConfig is a config in JSON with one handler, in front of one that answers.
func handlerConfig(handler string) []byte {
	return []byte(`{"apps":{"http":{"servers":{"s":{"listen":[":8080"],"routes":[{"handle":[` + handler +
		`,{"handler":"static_response","body":"ok"}]}]}}}}}`)
}

// commands are how the lines of sh blocks may begin.
var commands = []string{
	"go run ./cmd/caddy ", "go test ", "go vet ", "go tool xcaddy build ", "go tool staticcheck ", "xcaddy build ", "curl ",
	"for i in 1 2 3 4 5 6; do curl ", "CI=true bash ",
	"caddy tiered-limit status", "caddy tiered-limit explain ", "caddy tiered-limit inspect ", "caddy tiered-limit reset ",
	"cp -r examples/fail2ban/. /etc/fail2ban/", "fail2ban-client reload",
}

var pathInCommand = regexp.MustCompile(`(?:\./|--config |bash )(\.?\w[\w/]*)`)

func checkCommands(t *testing.T, b readmetest.Block) {
	for line := range strings.Lines(b.Text) {
		known := slices.ContainsFunc(commands, func(c string) bool { return strings.HasPrefix(line, c) })
		assert.True(t, known, "unknown command %q", line)
		for _, path := range pathInCommand.FindAllStringSubmatch(line, -1) {
			assert.FileExists(t, existing(path[1]), "in %q", line)
		}
		if strings.HasPrefix(line, "go tool ") {
			assert.Contains(t, readText(t, "go.mod"), "/"+strings.Fields(line)[2]+"\n")
		}
		if version := regexp.MustCompile(`xcaddy build (v\S+)`).FindStringSubmatch(line); version != nil {
			assert.Contains(t, readText(t, "go.mod"), "github.com/caddyserver/caddy/v2 "+version[1]+"\n")
		}
	}
}

// existing is a path to a file, or the directory's first Go file.
func existing(path string) string {
	if info, err := os.Stat(path); err == nil && info.IsDir() {
		return path + "/main.go"
	}
	return path
}

func claimQuickstartConfig(t *testing.T, b readmetest.Block) {
	assert.Contains(t, readText(t, "examples/quickstart/Caddyfile"), b.Text)
}

func claimFirstAnswer(t *testing.T, b readmetest.Block) { claimAnswer(t, b, 1) }

func claimSixthAnswer(t *testing.T, b readmetest.Block) { claimAnswer(t, b, 6) }

// claimAnswer compares an answer of the quick start with that of the server, over a connection.
func claimAnswer(t *testing.T, b readmetest.Block, nth int) {
	e := newExample(t, readText(t, "examples/quickstart/Caddyfile"))
	e.clock.set(testStart.Add(37 * time.Second)) // 23 seconds before the window's end
	server := httptest.NewServer(e.server(":8080"))
	defer server.Close()
	conn, err := net.Dial("tcp", server.Listener.Addr().String())
	require.NoError(t, err)
	defer conn.Close()
	reader := bufio.NewReader(conn)
	var answer string
	for range nth {
		_, err := fmt.Fprint(conn, "GET / HTTP/1.1\r\nHost: localhost:8080\r\nUser-Agent: curl\r\nAccept: */*\r\n\r\n")
		require.NoError(t, err)
		answer = readAnswer(t, reader)
	}
	changing := regexp.MustCompile(`(?m)^(Date|X-Ratelimit-Reset): .*$`)
	assert.Equal(t, changing.ReplaceAllString(b.Text, "$1: ?"), changing.ReplaceAllString(answer, "$1: ?"))
}

// readAnswer reads one response as curl -i shows it.
func readAnswer(t *testing.T, reader *bufio.Reader) string {
	t.Helper()
	var answer strings.Builder
	length := 0
	for {
		line, err := reader.ReadString('\n')
		require.NoError(t, err)
		line = strings.TrimSuffix(line, "\r\n")
		answer.WriteString(line + "\n")
		if value, ok := strings.CutPrefix(line, "Content-Length: "); ok {
			_, err := fmt.Sscan(value, &length)
			require.NoError(t, err)
		}
		if line == "" {
			break
		}
	}
	body := make([]byte, length)
	for n := 0; n < length; {
		more, err := reader.Read(body[n:])
		require.NoError(t, err)
		n += more
	}
	return answer.String() + string(body) + "\n"
}

func claimTrustedProxies(t *testing.T, b readmetest.Block) {
	e := loadBlock(t, b)
	assert.Empty(t, e.logs.lines("warn", ""))
	via := request{peer: "10.0.0.1:1", header: forwarded("X-Forwarded-For", "192.0.2.1, 203.0.113.7")}
	around := request{peer: "198.51.100.1:1", header: forwarded("X-Forwarded-For", "203.0.113.7")}
	assert.Equal(t, 600, e.served(601, via))
	assert.Equal(t, 600, e.served(601, around), "its own budget, not that of the client it names")
}

func claimChain(t *testing.T, b readmetest.Block) {
	e := loadBlock(t, b)
	w := e.send(request{url: "http://localhost/chain", header: http.Header{
		"X-Forwarded-For": {"192.0.2.99", "203.0.113.7, 198.51.100.1"},
	}})
	assert.Contains(t, readText(t, "README.md"), "`"+w.Body.String()+"`")
}

// claimSyntax checks that the syntax names the subdirectives that the parser knows, and no others.
func claimSyntax(t *testing.T, b readmetest.Block) {
	words, tierWords := parserWords(t)
	var top, inTier []string
	for line := range strings.Lines(b.Text) {
		word := strings.Trim(strings.Fields(line + " .")[0], "}].")
		switch indent := len(line) - len(strings.TrimLeft(line, "\t")); {
		case word == "" || word == "credentials" || word == "tiered_limit":
		case indent == 1:
			top = append(top, word)
		case indent == 2:
			inTier = append(inTier, word)
		}
	}
	assert.ElementsMatch(t, words, top)
	assert.ElementsMatch(t, tierWords, inTier)
}

// parserWords are the words that the parser says it expects, of a stack and of a tier.
func parserWords(t *testing.T) (stack, tier []string) {
	t.Helper()
	list := func(config string) []string {
		_, err := tryAdapt(config)
		require.Error(t, err)
		expected := regexp.MustCompile(`expected ([a-z0-9_, ]+)`).FindStringSubmatch(err.Error())
		require.NotNil(t, expected, err.Error())
		return regexp.MustCompile(`, | or `).Split(strings.Split(expected[1], ", at ")[0], -1)
	}
	return list(":80 {\ntiered_limit {\nnonsense\n}\n}"), list(":80 {\ntiered_limit {\ntier ip 1/m {\nnonsense\n}\n}\n}")
}

func claimEnvironment(t *testing.T, b readmetest.Block) {
	for _, name := range []string{"TRUST_PROXY", "RATE_LIMIT_MAX", "RATE_LIMIT_WINDOW"} {
		t.Setenv(name, "")
		require.NoError(t, os.Unsetenv(name))
	}
	e := loadBlock(t, b)
	assert.Len(t, e.logs.lines("error", "tiered_limit is DISABLED"), 1)
	t.Setenv("TRUST_PROXY", "0")
	e = loadBlock(t, b)
	assert.Equal(t, 600, e.served(601, request{}))
	t.Setenv("RATE_LIMIT_MAX", "0")
	e = loadBlock(t, b)
	assert.Equal(t, 700, e.served(700, request{peer: "198.51.100.8:1"}))
	assert.Empty(t, e.logs.lines("", ""))
}

func claimTwoWindows(t *testing.T, b readmetest.Block) {
	e := loadBlock(t, b)
	e.clock.set(testStart.Add(59 * time.Second))
	assert.Equal(t, 20, e.served(30, request{}))
	e.clock.advance(time.Second)
	assert.Equal(t, 20, e.served(30, request{}), "across the minute's boundary no more than the shorter window admits")
}

// claimAliceAndBob tells the story of two users behind one address: alice sends four requests, of which two are served,
// then bob sends one, which is refused by a tier or, with the empty name, served.
func claimAliceAndBob(refusedFor string) func(t *testing.T, b readmetest.Block) {
	return func(t *testing.T, b readmetest.Block) {
		e := newEdge(t, ":8080 {\nroute {\nbasic_auth {\n"+strings.Join(exampleAccounts(t), "\n")+"\n}\n"+b.Text+"respond ok\n}\n}")
		as := func(user string) request {
			return request{edit: func(r *http.Request) { r.SetBasicAuth(user, user+"-password") }}
		}
		assert.Equal(t, []int{200, 200}, e.statuses(2, as("alice")))
		assert.Equal(t, "user", refusedBy(t, e, as("alice")))
		assert.Equal(t, "user", refusedBy(t, e, as("alice")))
		if refusedFor == "" {
			assert.Equal(t, 1, e.served(1, as("bob")))
		} else {
			assert.Equal(t, refusedFor, refusedBy(t, e, as("bob")))
		}
	}
}

// exampleAccounts are the lines of alice and bob in the example for basic_auth.
func exampleAccounts(t *testing.T) []string {
	t.Helper()
	lines := regexp.MustCompile(`(?m)^\s*(?:alice|bob) \$2a.*$`).FindAllString(readText(t, "examples/per-user/Caddyfile"), -1)
	require.Len(t, lines, 2)
	return lines
}

func claimKeys(t *testing.T, b readmetest.Block) {
	e := loadBlock(t, b)
	call := func(path, key string) request {
		q := request{url: "http://localhost" + path}
		if key != "" {
			q.header = forwarded("X-Api-Key", key)
		}
		return q
	}
	served := 0
	for i := range 110 {
		served += e.served(1, call(fmt.Sprintf("/%d", i), "k1"))
	}
	assert.Equal(t, 100, served)
	assert.Equal(t, "caller", refusedBy(t, e, call("/", "k1")))
	assert.Equal(t, 1, e.served(1, call("/", "k2")), "another key")
	assert.Equal(t, 9, e.served(12, call("/", "")), "no key: the client")
	assert.Equal(t, "caller-and-path", refusedBy(t, e, call("/", "")))
	assert.Equal(t, 1, e.served(1, call("/other", "")))
}

func claimTighter(t *testing.T, b readmetest.Block) {
	e := loadBlock(t, b)
	post := request{method: "POST", url: "http://localhost/posts"}
	assert.Equal(t, 10, e.served(12, post))
	assert.Equal(t, "create", refusedBy(t, e, post))
	assert.Equal(t, 50, e.served(60, request{}))
}

func claimLooser(t *testing.T, b readmetest.Block) {
	e := loadBlock(t, b)
	assert.Equal(t, 300, e.served(310, request{url: "http://localhost/feed"}))
	assert.Equal(t, 60, e.served(70, request{}))
}

func claimExempt(t *testing.T, b readmetest.Block) {
	e := loadBlock(t, b)
	assert.Equal(t, 70, e.served(70, request{peer: "198.51.100.9:1"}), "an exempt client")
	exempt := []string{"/health", "/health/", "//health", "/HEALTH", "/%68ealth"}
	for _, path := range exempt {
		assert.Equal(t, 70, e.served(70, request{edit: sendPath(path)}), path)
	}
	counted := []string{"/health/../api", "/api%2f..%2fhealth", "/health%5c", "/%2e/health"}
	for _, path := range counted {
		e.clock.advance(time.Minute)
		assert.Equal(t, 60, e.served(70, request{edit: sendPath(path)}), path)
	}
}

// sendPath puts a path into a request as a client sent it.
func sendPath(path string) func(*http.Request) {
	return func(r *http.Request) {
		u, err := url.ParseRequestURI(path)
		if err != nil {
			panic(err)
		}
		r.URL, r.RequestURI = u, path
	}
}

func claimPreflights(t *testing.T, b readmetest.Block) {
	e := loadBlock(t, b)
	preflight := request{method: "OPTIONS", header: http.Header{
		"Origin": {"https://app.example.com"}, "Access-Control-Request-Method": {"POST"},
	}}
	assert.Equal(t, 120, e.served(130, preflight))
	assert.Equal(t, "preflight", refusedBy(t, e, preflight))
	assert.Equal(t, 60, e.served(70, request{method: "POST"}))
	assert.Equal(t, "ip", refusedBy(t, e, request{method: "OPTIONS"}))
}

// claimDraftFields compares the fields with those of a first request to the stack in the block before.
func claimDraftFields(t *testing.T, b readmetest.Block) {
	for _, config := range readmetest.Blocks(t, readme) {
		if config.Name != "Headers/1" {
			continue
		}
		header := loadBlock(t, config).send(request{}).Header()
		got := fmt.Sprintf("RateLimit-Policy: %s\nRateLimit: %s\n", header.Get("RateLimit-Policy"), header.Get("RateLimit"))
		assert.Equal(t, b.Text, got)
		assert.Empty(t, header.Get("X-RateLimit-Limit"))
	}
}

func claimHandleErrors(t *testing.T, b readmetest.Block) {
	e := loadBlock(t, b)
	assert.Equal(t, 5, e.served(5, request{}))
	e.clock.advance(18 * time.Second)
	w := e.send(request{})
	assert.Equal(t, http.StatusTooManyRequests, w.Code)
	assert.Equal(t, "The limit is 5 in 60 s. Come back in 42 s.", w.Body.String())
	assert.Equal(t, "42", w.Header().Get("Retry-After"))

	e = newEdge(t, strings.Replace(b.Text, "tier ip 5/m", "tier ip 5/m\nbody text", 1))
	e.served(5, request{})
	assert.Equal(t, "rate limit \"ip\" reached, retry in 60 s\n", e.send(request{}).Body.String())
}

func claimCORS(t *testing.T, b readmetest.Block) {
	e := loadBlock(t, b)
	from := func(origin string) http.Header {
		e.served(5, request{})
		w := e.send(request{header: forwarded("Origin", origin)})
		assert.Equal(t, http.StatusTooManyRequests, w.Code)
		return w.Header()
	}
	for _, origin := range []string{"https://app.example.com", "https://admin.example.com"} {
		header := from(origin)
		assert.Equal(t, []string{origin}, header["Access-Control-Allow-Origin"])
		assert.Equal(t, []string{"true"}, header["Access-Control-Allow-Credentials"])
		assert.Equal(t, []string{"Origin"}, header["Vary"])
	}
	for _, origin := range []string{"http://app.example.com", "https://app.example.com:8443", "https://app.example.com.evil.test"} {
		header := from(origin)
		assert.NotContains(t, header, "Access-Control-Allow-Origin", origin)
		assert.Contains(t, header.Get("Access-Control-Expose-Headers"), "X-RateLimit-Limit")
	}
}

func claimAccessLog(t *testing.T, b readmetest.Block) {
	e := loadBlock(t, b)
	e.served(6, request{})
	got := make(map[string]int)
	for _, line := range e.logs.all() {
		if strings.HasPrefix(line.str("logger"), "http.log.access") {
			got[fmt.Sprint(line["tiered_limit_outcome"], " ", line["tiered_limit_tier"])]++
		}
	}
	assert.Equal(t, map[string]int{"served <nil>": 5, "refused ip": 1}, got)
}

func claimMaxKeys(t *testing.T, b readmetest.Block) {
	handler := loadBlock(t, b).handlers()[0]
	var store struct {
		Backend string
		MaxKeys int64 `json:"max_keys"`
	}
	require.NoError(t, json.Unmarshal([]byte(handler.storeText), &store))
	assert.Equal(t, "memory 200000", fmt.Sprint(store.Backend, " ", store.MaxKeys))
	assert.Equal(t, 1_000_000, memory.DefaultMaxKeys, "the README says a million")
}

func claimOtherPlugin(t *testing.T, b readmetest.Block) {
	for _, want := range []string{"rate_limit {", "path /api/*", "events 100", "window 1m"} {
		assert.Contains(t, b.Text, want, "the migrated block must say the same")
	}
	assert.NotContains(t, b.Text, "tiered_limit")
}

func claimMigrated(t *testing.T, b readmetest.Block) {
	e := loadBlock(t, b)
	assert.Equal(t, 100, e.served(110, request{url: "http://localhost/api/x"}))
	assert.Equal(t, "api", refusedBy(t, e, request{url: "http://localhost/api/y"}))
	assert.Equal(t, 110, e.served(110, request{}), "outside of the zone")
}

// The tables of subdirectives name all that the parser knows, with an example of each that loads.
func TestReadmeReference(t *testing.T) {
	words, tierWords := parserWords(t)
	var got []string
	for _, row := range readmetest.Rows(t, readme, "| subdirective ") {
		require.Len(t, row, 4, "%v", row)
		word, example := readmetest.Spans(row[0])[0], readmetest.Spans(row[3])[0]
		assert.True(t, strings.HasPrefix(example+" ", word+" "), "%q is an example of %q", example, word)
		inTier := len(got) >= len(words)
		got = append(got, word)
		lines := "trusted_hops 0\ntier ip 1/m\n" + example
		switch {
		case inTier:
			lines = "trusted_hops 0\ntier ip 1/m {\n" + example + "\n}"
		case word == "trusted_hops":
			lines = "tier ip 1/m\n" + example
		case word == "tier":
			lines = "trusted_hops 0\n" + example
		}
		_, err := tryLoad(t, ":8080 {\ntiered_limit {\n"+lines+"\n}\n}")
		assert.NoError(t, err, "%q", example)
	}
	assert.ElementsMatch(t, append(words, tierWords...), got)
}

// The tables of JSON fields name all fields, and no others.
func TestReadmeJSONFields(t *testing.T) {
	var want, got []string
	for _, of := range []reflect.Type{
		reflect.TypeFor[Handler](), reflect.TypeFor[Tier](), reflect.TypeFor[TierLimit](), reflect.TypeFor[CORS](),
		reflect.TypeFor[memory.Memory](),
	} {
		for i := range of.NumField() {
			if tag, ok := of.Field(i).Tag.Lookup("json"); ok {
				want = append(want, strings.Split(tag, ",")[0])
			}
		}
	}
	nested := []string{"count", "window", "origins", "credentials", "max_keys"}
	for _, row := range readmetest.Rows(t, readme, "| field | as in ") {
		got = append(got, readmetest.Spans(row[0])...)
		for _, span := range readmetest.Spans(row[2]) {
			if slices.Contains(nested, span) {
				got = append(got, span)
			}
		}
	}
	assert.ElementsMatch(t, want, got)
}

// The README names every metric with its labels, every outcome, and every reason to fall back.
func TestReadmeMetrics(t *testing.T) {
	descriptions := make(chan *prometheus.Desc, 100)
	collector{}.Describe(descriptions)
	close(descriptions)
	parse := regexp.MustCompile(`fqName: "([^"]+)".*variableLabels: \{([^}]*)\}`)
	want := make(map[string]string)
	for d := range descriptions {
		match := parse.FindStringSubmatch(d.String())
		require.NotNil(t, match, d.String())
		want[match[1]] = match[2]
	}
	got := make(map[string]string)
	for _, row := range readmetest.Rows(t, readme, "| metric ") {
		got[readmetest.Spans(row[0])[0]] = strings.Join(readmetest.Spans(row[1]), ",")
	}
	assert.Equal(t, want, got)

	text := readText(t, "README.md")
	for o := range outcomes {
		assert.Contains(t, text, "`"+o.String()+"`")
	}
	for reason := clientip.None + 1; reason < clientip.Reasons; reason++ {
		assert.Contains(t, text, "`"+reason.String()+"`")
	}
}

// The placeholders in the README's table are there when it says so.
func TestReadmePlaceholders(t *testing.T) {
	rows := readmetest.Rows(t, readme, "| placeholder ")
	require.Len(t, rows, 7)
	served := map[string]string{
		"{http.tiered_limit.client_ip}": "203.0.113.1", "{http.tiered_limit.tier}": "ip", "{http.tiered_limit.limit}": "5",
		"{http.tiered_limit.window}": "60", "{http.tiered_limit.remaining}": "4", "{http.tiered_limit.reset}": "60",
		"{http.tiered_limit.retry_after}": "",
	}
	refused := maps.Clone(served)
	refused["{http.tiered_limit.remaining}"], refused["{http.tiered_limit.retry_after}"] = "0", "60"
	for _, row := range rows {
		name := readmetest.Spans(row[0])[0]
		e := newEdge(t, ":8080 {\ntiered_limit {\ntrusted_hops 0\ntier ip 5/m\n}\n"+
			"respond "+name+"\nhandle_errors {\nrespond "+name+"\n}\n}")
		assert.Equal(t, served[name], e.send(request{}).Body.String(), name)
		e.served(4, request{})
		assert.Equal(t, refused[name], e.send(request{}).Body.String(), name)
		assert.Equal(t, row[1] == "after a refusal", served[name] == "", name)
		e.close() // and forget the counters
	}
}

// What the README quotes from the log is what the log says.
func TestReadmeLogMessages(t *testing.T) {
	source := ""
	for _, file := range []string{"logging.go", "warnings.go", "warnings_request.go", "warnings_address.go", "store/redis/away.go"} {
		source += readText(t, file)
	}
	source = regexp.MustCompile(`" \+\s+"`).ReplaceAllString(source, "") // messages that are written in pieces
	for _, row := range readmetest.Rows(t, readme, "| the log says ") {
		for _, quoted := range readmetest.Spans(row[0]) {
			assert.Contains(t, source, quoted)
		}
	}
	assert.Contains(t, source, "rate limit reached")
}

var markdownLink = regexp.MustCompile(`\]\(#([^)]+)\)`)

// Links within the README lead to a heading, and the examples that it names are there, each of them.
func TestReadmeLinks(t *testing.T) {
	text := readText(t, "README.md")
	anchors := make(map[string]bool)
	for line := range strings.Lines(text) {
		if strings.HasPrefix(line, "#") {
			title := strings.ToLower(strings.TrimSpace(strings.TrimLeft(line, "#")))
			anchors[strings.ReplaceAll(regexp.MustCompile(`[^a-z0-9_ -]`).ReplaceAllString(title, ""), " ", "-")] = true
		}
	}
	for _, link := range markdownLink.FindAllStringSubmatch(text, -1) {
		assert.True(t, anchors[link[1]], "no heading for #%s", link[1])
	}
	for _, example := range regexp.MustCompile(`examples/[a-z0-9-]+`).FindAllString(text, -1) {
		assert.DirExists(t, example)
	}
	for name := range exampleChecks {
		if name != "dry-run" && name != "graphql" && name != "per-route" {
			assert.Contains(t, text, "examples/"+name)
		}
	}
}
