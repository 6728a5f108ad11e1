package tieredlimit

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tieredlimit/caddy-tieredlimit/internal/redistest"
)

// claimFile checks that a block is a file of this repository, byte for byte. That has tests of its own.
func claimFile(file string) func(t *testing.T, b readmeBlock) {
	return func(t *testing.T, b readmeBlock) {
		assert.Equal(t, readText(t, file), b.text)
	}
}

// claimShared checks that two instances with the block admit the limit together.
func claimShared(t *testing.T, b readmeBlock) {
	server := redistest.New(t, "--requirepass", "pass").With(redistest.Conn{Password: "pass"})
	server.Run()
	t.Setenv("REDIS_PASSWORD", "pass")
	t.Setenv("LIMIT_KEY_SECRET", "secret")
	loadBlock(t, b)
	var instances []*edge
	for _, address := range []string{server.Addr(), redistest.StartProxy(t, server.Addr()).Addr()} {
		text := strings.Replace(b.text, "10.0.0.5:6379", address, 1)
		instances = append(instances, newEdge(t, unhurried(siteConfig(text))))
	}
	q := request{header: forwarded("X-Forwarded-For", "203.0.113.7")}
	assert.Equal(t, 600, servedByAll(t, 700, q, instances...))
	for _, e := range instances {
		assert.Equal(t, "ip", refusedBy(t, e, q))
	}
	_, err := tryLoad(t, siteConfig(strings.Replace(b.text, "tiered_limit api", "tiered_limit", 1)))
	assert.ErrorContains(t, err, "the stack needs a name")
}

// redisWords are the settings that the parser says it knows, of the store and of its tls block.
func redisWords(t *testing.T) (store, tls []string) {
	t.Helper()
	list := func(block string) []string {
		_, err := unmarshalRedis(block)
		require.Error(t, err)
		wanted := regexp.MustCompile(`want ([a-z_, ]+)`).FindStringSubmatch(err.Error())
		require.NotNil(t, wanted, err.Error())
		return regexp.MustCompile(`, | or `).Split(strings.Split(wanted[1], ", at ")[0], -1)
	}
	return list("{\nnonsense\n}"), list("{\ntls {\nnonsense\n}\n}")
}

func claimRedisSyntax(t *testing.T, b readmeBlock) {
	words, tlsWords := redisWords(t)
	indented := func(pattern string) []string {
		var list []string
		for _, match := range regexp.MustCompile(pattern).FindAllStringSubmatch(b.text, -1) {
			list = append(list, match[1])
		}
		return list
	}
	assert.ElementsMatch(t, words, indented(`(?m)^\t(\w+)`))
	assert.ElementsMatch(t, tlsWords, indented(`(?m)^\t\t(\w+)`))
}

// The tables of settings name all settings and their fields, and the right defaults.
func TestReadmeRedisSettings(t *testing.T) {
	words, tlsWords := redisWords(t)
	defaults, err := provisionRedis(t, new(Redis))
	require.NoError(t, err)
	for _, table := range []struct {
		header string
		words  []string
		of     reflect.Type
	}{
		{"| setting ", words, reflect.TypeFor[Redis]()},
		{"| in `tls` ", tlsWords, reflect.TypeFor[RedisTLS]()},
	} {
		var got, fields, want []string
		for _, row := range readmeRows(t, table.header) {
			require.Len(t, row, 4, "%v", row)
			got = append(got, codeSpans(row[0])[0])
			fields = append(fields, codeSpans(row[1])...)
		}
		for i := range table.of.NumField() {
			if tag, ok := table.of.Field(i).Tag.Lookup("json"); ok {
				want = append(want, strings.Split(tag, ",")[0])
			}
		}
		assert.ElementsMatch(t, table.words, got)
		assert.ElementsMatch(t, want, fields)
	}
	stated := make(map[string]string)
	for _, row := range readmeRows(t, "| setting ") {
		if spans := codeSpans(row[2]); strings.HasPrefix(row[2], "`") {
			stated[codeSpans(row[0])[0]] = spans[0]
		}
	}
	assert.Equal(t, map[string]string{
		"address": defaults.Address[0], "mode": defaults.Mode, "db": strconv.Itoa(defaults.DB),
		"key_prefix": defaults.KeyPrefix, "timeout": time.Duration(*defaults.Timeout).String(), "on_error": defaults.OnError,
	}, stated)
}

// claimRedisKeys checks that the keys on a server are of the form stated, and nothing else is there.
func claimRedisKeys(t *testing.T, b readmeBlock) {
	server := redistest.Start(t)
	spec := stackOf(TierSpec{Name: "ip", Limits: []Limit{{5, 7 * day}, {9, 70 * day}}}, plainTier("user", 5, 70*day))
	c := replica(t, spec, and(on(server), "key_prefix", "edge"))
	take(t, c, "203.0.113.7", "alice")
	form := strings.NewReplacer("<prefix>", "edge", "<stack>", "api", "<tier>", "(ip|user)", "<window in ms>", `\d+`,
		"<fingerprint>", "[0-9a-f]{32}", "{", `\{`, "}", `\}`).Replace(strings.TrimSpace(b.text))
	keys := server.Keys("*")
	require.Len(t, keys, 3)
	example := readmeSpan(t, "2334180000000012")
	assert.True(t, strings.HasSuffix(example, fmt.Sprintf("%010d", 12)), "the hits in the example")
	for _, key := range keys {
		assert.Regexp(t, "^"+form+"$", key)
		assert.Regexp(t, `^\d{1,6}0000000001$`, server.Do("GET", key))
	}
	require.NoError(t, c.Reset(context.Background(), time.Now(), claimsOf("203.0.113.7", "alice")))
	require.NoError(t, c.link.probe(context.Background(), c.stack.prefix))
	var others []string
	for _, span := range []string{"<prefix>:{<stack>}:reset", "<prefix>:{<stack>}:probe"} {
		others = append(others, strings.NewReplacer("<prefix>", "edge", "<stack>", "api").Replace(readmeSpan(t, span)))
	}
	assert.ElementsMatch(t, others, server.Keys("*"))
}

// readmeSpan is a text, if the README has it as code.
func readmeSpan(t *testing.T, text string) string {
	t.Helper()
	require.Contains(t, readText(t, "README.md"), "`"+text+"`")
	return text
}

// claimRedisConfig checks that the server takes the settings, that they are those of the example, and that a counter is
// as large as the text says.
func claimRedisConfig(t *testing.T, b readmeBlock) {
	example := redisArgs(readText(t, "examples/replicas/redis.conf"))
	assert.Equal(t, example, redisArgs(b.text))
	server := redistest.Start(t, redisArgs(b.text)...)
	assert.Equal(t, []any{"maxmemory-policy", "noeviction"}, server.Do("CONFIG", "GET", "maxmemory-policy"))
	assert.Equal(t, []any{"maxmemory", strconv.Itoa(256 << 20)}, server.Do("CONFIG", "GET", "maxmemory"))

	c := replica(t, stackOf(plainTier("ip", 1000, 7*day)), on(server))
	take(t, c, "203.0.113.7")
	key := server.Keys("*")[0]
	value := server.Do("GET", key).(string)
	memory := func() (n int64) {
		_, err := fmt.Sscanf(server.Do("INFO", "memory").(string), "# Memory\r\nused_memory:%d", &n)
		require.NoError(t, err)
		return n
	}
	before := memory()
	const counters = 100_000
	server.Do("EVAL", `for i = 1, tonumber(ARGV[1]) do
		redis.call('SET', string.sub(KEYS[1], 1, -33) .. string.format('%032x', i), ARGV[2], 'PX', 600000)
	end`, "1", key, strconv.Itoa(counters), value)
	each := (memory() - before) / counters
	assert.Contains(t, readText(t, "README.md"), "A counter takes less than 200 bytes")
	assert.Less(t, each, int64(200), "bytes for a counter")
	assert.Greater(t, each, int64(100), "bytes for a counter")
}

// claimRedisUser checks that the rights are enough, and no more than for the keys of this module.
func claimRedisUser(t *testing.T, b readmeBlock) {
	server := redistest.Start(t)
	fields := strings.Fields(b.text)
	require.Equal(t, "user", fields[0])
	server.Do(append([]string{"ACL", "SETUSER"}, fields[1:]...)...)
	settings := and(and(on(server), "username", "limiter"), "password", "change-me")
	c := replica(t, stackOf(plainTier("ip", 1, day)), settings)
	by, _ := take(t, c, "a")
	assert.Equal(t, -1, by)
	by, _ = take(t, c, "a")
	assert.Equal(t, 0, by)
	require.NoError(t, c.Reset(context.Background(), time.Time{}, claimsOf("a")))
	require.NoError(t, c.link.probe(context.Background(), c.stack.prefix))
	other := replica(t, stackOf(plainTier("ip", 1, day)), and(settings, "key_prefix", "other"))
	_, err := other.Take(context.Background(), time.Now(), claimsOf("a"), make([]State, 1))
	assert.ErrorContains(t, err, "NOPERM")
}

// claimRedisMode checks that a block loads, without a server, and is of a mode.
func claimRedisMode(mode string) func(t *testing.T, b readmeBlock) {
	return func(t *testing.T, b readmeBlock) {
		e := loadBlock(t, b)
		setup := e.handlers()[0].counters.(*redisCounters).link.setup
		assert.Equal(t, mode, setup.mode)
		assert.Len(t, setup.option.InitAddress, 3)
	}
}

// The numbers in the text are those of the code.
func TestReadmeRedisNumbers(t *testing.T) {
	text := strings.Join(strings.Fields(readText(t, "README.md")), " ")
	for _, says := range []string{
		fmt.Sprintf("Redis is asked again after %d seconds at the latest", redisAskAgain/time.Second),
		fmt.Sprintf("remembers up to %d refusals of a stack", redisMostRefusals),
		fmt.Sprintf("After %d failures in a row", redisMostFailures),
		fmt.Sprintf("first after %d ms, then in pauses that grow to %d seconds", redisFirstPause.Milliseconds(), redisLongestPause/time.Second),
		fmt.Sprintf("more than %d decisions wait", redisMostTurns),
	} {
		assert.Contains(t, text, says)
	}
	assert.Equal(t, time.Minute, redisResetLife, "the README says a minute")
}

// Each answer of the table of on_error is what a client gets, with Redis away from the start and after it has counted.
func TestReadmeRedisOnError(t *testing.T) {
	want := map[string]func(t *testing.T, e *edge, used int, q request){
		"deny": func(t *testing.T, e *edge, _ int, q request) {
			for range 10 {
				w := e.send(q)
				assert.Equal(t, http.StatusServiceUnavailable, w.Code)
				assert.Regexp(t, "^[12]$", w.Header().Get("Retry-After"))
			}
		},
		"allow": func(t *testing.T, e *edge, _ int, q request) {
			for range 10 {
				w := e.send(q)
				assert.Equal(t, http.StatusOK, w.Code)
				assert.Empty(t, w.Header().Get("X-RateLimit-Limit"))
			}
		},
		"local": func(t *testing.T, e *edge, used int, q request) {
			assert.Equal(t, 5-used, e.served(10, q))
			assert.Equal(t, "ip", refusedBy(t, e, q))
		},
	}
	rows := readmeRows(t, "| `on_error` ")
	require.Len(t, rows, len(want))
	for _, row := range rows {
		word := codeSpans(row[0])[0]
		require.NotNil(t, want[word], word)
		t.Run(word, func(t *testing.T) {
			server := redistest.New(t)
			e := newEdge(t, unhurried(":8080 {\ntiered_limit onerror {\ntrusted_hops 0\ntier ip 5/m\nstore redis {\n"+
				"address "+server.Addr()+"\non_error "+word+"\n}\n}\nrespond ok\n}"))
			want[word](t, e, 0, request{})
			server.Run()
			breaker := e.handlers()[0].counters.(*redisCounters).stack.breaker
			require.True(t, redistest.Await(breaker.allows))
			other := request{peer: "198.51.100.1:1"}
			assert.Equal(t, 2, e.served(2, other))
			spent := request{peer: "198.51.100.2:1"}
			assert.Equal(t, 5, e.served(6, spent))
			server.Kill()
			assert.Equal(t, http.StatusTooManyRequests, e.send(spent).Code, "whom the instance remembers as refused")
			want[word](t, e, 2, other)
		})
	}
}

// The table of failures names for each the kinds that are counted, and all kinds that there are.
func TestReadmeRedisFailures(t *testing.T) {
	rowOf := map[string]string{
		"killed without persistence":     "stopped or killed, no persistence",
		"killed with appendfsync always": "the same with `appendfsync always`",
		"paused":                         "paused, overloaded, or the network drops packets",
		"read only":                      "READONLY: it was made a replica",
		"replies lost after the commit":  "the reply lost after the script ran",
		"connections reset":              "connections reset",
		"password changed":               "wrong password, missing rights, or TLS that does not fit",
		"out of memory":                  "OOM: `maxmemory` is reached with `noeviction`",
		"too few replicas":               "NOREPLICAS: `min-replicas-to-write` is not met",
	}
	kinds := make(map[string][]string)
	named := []string{"away"}
	for _, row := range readmeRows(t, "| what happens to Redis ") {
		require.Len(t, row, 4, "%v", row)
		kinds[row[0]] = codeSpans(row[1])
		named = append(named, kinds[row[0]]...)
	}
	slices.Sort(named)
	assert.Equal(t, (*redisCounters)(nil).FailureKinds(), slices.Compact(named))
	for _, f := range faults() {
		t.Run(f.name, func(t *testing.T) {
			stated := kinds[rowOf[f.name]]
			require.NotEmpty(t, stated, "no row for this")
			server := redistest.Start(t, f.args...)
			proxy := redistest.StartProxy(t, server.Addr())
			settings := faulty(proxy.Addr())
			if !slices.Contains(stated, "timeout") {
				settings = and(settings, "timeout", "10s")
			}
			c, _ := observed(t, stormSpec(), settings)
			connect(t, c)
			take(t, c, "a", "all")
			f.fail(server, proxy)
			for range redisMostFailures {
				_, err := c.Take(context.Background(), time.Now(), claimsOf("a", "all"), make([]State, 2))
				var away *UnavailableError
				require.True(t, errors.As(err, &away), "%v", err)
				assert.Contains(t, append(stated, "away"), away.Kind)
			}
			assert.False(t, c.stack.breaker.allows())
		})
	}
}
