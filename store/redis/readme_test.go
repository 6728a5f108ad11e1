package redis

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tieredlimit/caddy-tieredlimit/internal/readmetest"
	"github.com/tieredlimit/caddy-tieredlimit/internal/redistest"
	"github.com/tieredlimit/caddy-tieredlimit/store"
)

// readme is the document that says what this store does.
const readme = "../../README.md"

// documentedWords are the settings that the parser says it knows, of the store and of its tls block.
func documentedWords(t *testing.T) (store, tls []string) {
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

// The syntax names every setting that the parser knows.
func TestReadmeSyntax(t *testing.T) {
	b := readmetest.BlockOf(t, readme, "Settings/1")
	words, tlsWords := documentedWords(t)
	indented := func(pattern string) []string {
		var list []string
		for _, match := range regexp.MustCompile(pattern).FindAllStringSubmatch(b.Text, -1) {
			list = append(list, match[1])
		}
		return list
	}
	assert.ElementsMatch(t, words, indented(`(?m)^\t(\w+)`))
	assert.ElementsMatch(t, tlsWords, indented(`(?m)^\t\t(\w+)`))
}

// The tables of settings name all settings and their fields, and the right defaults.
func TestReadmeSettings(t *testing.T) {
	words, tlsWords := documentedWords(t)
	defaults, err := provisionRedis(t, new(Redis))
	require.NoError(t, err)
	for _, table := range []struct {
		header string
		words  []string
		of     reflect.Type
	}{
		{"| setting ", words, reflect.TypeFor[Redis]()},
		{"| in `tls` ", tlsWords, reflect.TypeFor[TLS]()},
	} {
		var got, fields, want []string
		for _, row := range readmetest.Rows(t, readme, table.header) {
			require.Len(t, row, 4, "%v", row)
			got = append(got, readmetest.Spans(row[0])[0])
			fields = append(fields, readmetest.Spans(row[1])...)
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
	for _, row := range readmetest.Rows(t, readme, "| setting ") {
		if spans := readmetest.Spans(row[2]); strings.HasPrefix(row[2], "`") {
			stated[readmetest.Spans(row[0])[0]] = spans[0]
		}
	}
	assert.Equal(t, map[string]string{
		"address": defaults.Address[0], "mode": defaults.Mode, "db": strconv.Itoa(defaults.DB),
		"key_prefix": defaults.KeyPrefix, "timeout": time.Duration(*defaults.Timeout).String(), "on_error": defaults.OnError,
	}, stated)
}

// The keys on a server are of the form stated, and nothing else is there.
func TestReadmeKeys(t *testing.T) {
	b := readmetest.BlockOf(t, readme, "What is stored/1")
	server := redistest.Start(t)
	spec := stackOf(store.TierSpec{Name: "ip", Limits: []store.Limit{{Count: 5, Window: 7 * day}, {Count: 9, Window: 70 * day}}}, plainTier("user", 5, 70*day))
	c := replica(t, spec, and(on(server), "key_prefix", "edge"))
	take(t, c, "203.0.113.7", "alice")
	form := strings.NewReplacer("<prefix>", "edge", "<stack>", "api", "<tier>", "(ip|user)", "<window in ms>", `\d+`,
		"<fingerprint>", "[0-9a-f]{32}", "{", `\{`, "}", `\}`).Replace(strings.TrimSpace(b.Text))
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
	require.Contains(t, readmetest.Text(t, readme), "`"+text+"`")
	return text
}

// A server takes the settings that are recommended, they are those of the example, and a counter is as large as the text
// says.
func TestReadmeServer(t *testing.T) {
	b := readmetest.BlockOf(t, readme, "The server/1")
	example := redistest.Args(readmetest.Text(t, "../../examples/replicas/redis.conf"))
	assert.Equal(t, example, redistest.Args(b.Text))
	server := redistest.Start(t, redistest.Args(b.Text)...)
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
	assert.Contains(t, readmetest.Text(t, readme), "A counter takes less than 200 bytes")
	assert.Less(t, each, int64(200), "bytes for a counter")
	assert.Greater(t, each, int64(100), "bytes for a counter")
}

// The rights are enough, and no more than for the keys of this module.
func TestReadmeUser(t *testing.T) {
	b := readmetest.BlockOf(t, readme, "The server/2")
	server := redistest.Start(t)
	fields := strings.Fields(b.Text)
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
	_, err := other.Take(context.Background(), time.Now(), claimsOf("a"))
	assert.ErrorContains(t, err, "NOPERM")
}

// The numbers in the text are those of the code.
func TestReadmeNumbers(t *testing.T) {
	text := strings.Join(strings.Fields(readmetest.Text(t, readme)), " ")
	for _, says := range []string{
		fmt.Sprintf("Redis is asked again after %d seconds at the latest", askAgain/time.Second),
		fmt.Sprintf("remembers up to %d refusals of a stack", mostRefusals),
		fmt.Sprintf("After %d failures in a row", mostFailures),
		fmt.Sprintf("first after %d ms, then in pauses that grow to %d seconds", firstPause.Milliseconds(), longestPause/time.Second),
		fmt.Sprintf("more than %d decisions wait", mostTurns),
	} {
		assert.Contains(t, text, says)
	}
	assert.Equal(t, time.Minute, resetLife, "the README says a minute")
}

// The table of failures names for each the kinds that are counted, and all kinds that there are.
func TestReadmeFailures(t *testing.T) {
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
	for _, row := range readmetest.Rows(t, readme, "| what happens to Redis ") {
		require.Len(t, row, 4, "%v", row)
		kinds[row[0]] = readmetest.Spans(row[1])
		named = append(named, kinds[row[0]]...)
	}
	slices.Sort(named)
	assert.Equal(t, (*counters)(nil).FailureKinds(), slices.Compact(named))
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
			for range mostFailures {
				_, err := c.Take(context.Background(), time.Now(), claimsOf("a", "all"))
				var away *store.UnavailableError
				require.True(t, errors.As(err, &away), "%v", err)
				assert.Contains(t, append(stated, "away"), away.Kind)
			}
			assert.False(t, c.stack.breaker.allows())
		})
	}
}
