package tieredlimit

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tieredlimit/caddy-tieredlimit/internal/redistest"
)

// unhurried makes the windows of a config ones that began in 1970 and end in 2084, and lets a decision on Redis take
// its time on a busy machine.
func unhurried(text string) string {
	text = regexp.MustCompile(`(tier ip \d+)/m`).ReplaceAllString(text, "$1/1000000h")
	return strings.Replace(text, "store redis {\n", "store redis {\ntimeout 10s\n", 1)
}

// newReplicas are two instances with the same config, each with connections of its own to the Redis at what the variable
// REDIS_ADDRESS says.
func newReplicas(t *testing.T, text string, server *redistest.Server) (replicas [2]*edge) {
	t.Helper()
	text = unhurried(text)
	for i, address := range []string{server.Addr(), redistest.StartProxy(t, server.Addr()).Addr()} {
		t.Setenv("REDIS_ADDRESS", address)
		replicas[i] = newExample(t, text)
	}
	return replicas
}

// servedByAll is how many of n requests, sent by many at a time to all instances, are answered 200. All others must be 429.
func servedByAll(t *testing.T, n int, q request, instances ...*edge) int {
	t.Helper()
	var served, others atomic.Int64
	var wait sync.WaitGroup
	for i := range n {
		wait.Go(func() {
			switch instances[i%len(instances)].send(q).Code {
			case http.StatusOK:
				served.Add(1)
			case http.StatusTooManyRequests:
			default:
				others.Add(1)
			}
		})
	}
	wait.Wait()
	assert.Zero(t, others.Load(), "answers that are neither 200 nor 429")
	return int(served.Load())
}

// checkReplicas checks that the instances admit the limit together, and by themselves while Redis is away.
func checkReplicas(t *testing.T, text string) {
	server := redistest.Start(t)
	replicas := newReplicas(t, text, server)
	from := func(client string) request {
		return request{peer: "10.0.0.1:5000", header: forwarded("X-Forwarded-For", "192.0.2.1, "+client)}
	}
	assert.Equal(t, 60, servedByAll(t, 128, from("203.0.113.7"), replicas[0], replicas[1]))
	assert.Equal(t, 60, servedByAll(t, 128, from("203.0.113.8"), replicas[0], replicas[1]), "another client")
	for _, e := range replicas {
		assert.Equal(t, "ip", refusedBy(t, e, from("203.0.113.7")))
		assert.Equal(t, 100, e.served(100, request{peer: "10.0.0.1:5000", url: "http://localhost/health"}))
	}

	assert.Equal(t, 40, servedByAll(t, 40, from("203.0.113.9"), replicas[0]), "all of these by the first instance")
	server.Kill()
	assert.Equal(t, 20, replicas[0].served(70, from("203.0.113.9")), "the first has counted along")
	assert.Equal(t, 60, replicas[1].served(70, from("203.0.113.9")), "the second has seen nothing of this client")
	server.Run()
	for _, e := range replicas {
		require.True(t, redistest.Await(e.handlers()[0].connected))
	}
	assert.Equal(t, 60, servedByAll(t, 128, from("203.0.113.9"), replicas[0], replicas[1]), "Redis has forgotten all")
}

// TestExampleReplicas runs the whole example but for the processes of Caddy: HAProxy in front of two instances, which
// share a Redis.
func TestExampleReplicas(t *testing.T) {
	haproxy := redistest.Need(t, "haproxy")
	server := redistest.Start(t, redistest.Args(readText(t, "examples/replicas/redis.conf"))...)
	var backends []string
	var asked [2]atomic.Int64
	for i, port := range []string{"8081", "8082"} {
		t.Setenv("PORT", port)
		address := server.Addr()
		if i > 0 {
			address = redistest.StartProxy(t, address).Addr()
		}
		t.Setenv("REDIS_ADDRESS", address)
		e := newExample(t, unhurried(readText(t, "examples/replicas/Caddyfile")))
		caddy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/" { // and not HAProxy's own
				asked[i].Add(1)
			}
			e.server(":"+port).ServeHTTP(w, r)
		}))
		t.Cleanup(caddy.Close)
		backends = append(backends, caddy.Listener.Addr().String())
	}
	front := freeAddress(t)
	config := readText(t, "examples/replicas/haproxy.cfg")
	for old, replacement := range map[string]string{
		"bind :8000": "bind " + front, "127.0.0.1:8081": backends[0], "127.0.0.1:8082": backends[1],
	} {
		require.Equal(t, 1, strings.Count(config, old), old)
		config = strings.Replace(config, old, replacement, 1)
	}
	file := filepath.Join(t.TempDir(), "haproxy.cfg")
	require.NoError(t, os.WriteFile(file, []byte(config), 0o600))
	start(t, haproxy, "-db", "-f", file)
	waitFor(t, front)

	assert.Equal(t, 60, servedOverWire(t, front, "127.0.0.1", 70))
	assert.Equal(t, 60, servedOverWire(t, front, "127.0.0.2", 70))
	for i := range asked {
		assert.Equal(t, int64(70), asked[i].Load(), "requests to instance %d", i)
	}
}

// The parts of the example that no test can start fit the others: names of files, variables, ports and versions.
func TestExampleReplicasCompose(t *testing.T) {
	compose := readText(t, "examples/replicas/compose.yaml")
	caddyfile := readText(t, "examples/replicas/Caddyfile")
	proxy := readText(t, "examples/replicas/haproxy.cfg")
	submatches := func(pattern, text string) []string {
		var list []string
		for _, match := range regexp.MustCompile(pattern).FindAllStringSubmatch(text, -1) {
			list = append(list, match[1])
		}
		return list
	}
	for _, file := range submatches(`- \./(\S+?):`, compose) {
		assert.FileExists(t, "examples/replicas/"+file)
	}
	for _, name := range submatches(`(?m)^      ([A-Z]+):`, compose) {
		assert.Contains(t, caddyfile, "{$"+name+":")
	}
	ports := submatches(`PORT: "(\d+)"`, compose)
	assert.Equal(t, ports, submatches(`server caddy\d 127\.0\.0\.1:(\d+) check`, proxy))
	assert.Equal(t, ports, submatches(`#\tPORT=(\d+)`, caddyfile))
	admins := submatches(`ADMIN: (\S+)`, compose)
	assert.Len(t, slices.Compact(admins), len(ports), "an admin endpoint for each")
	assert.Equal(t, strings.Count(compose, "image:")+strings.Count(compose, "build:"),
		strings.Count(compose, "network_mode: host"))

	dockerfile := readText(t, "examples/replicas/Dockerfile")
	caddyVersion := submatches(`github.com/caddyserver/caddy/v2 v(\S+)`, readText(t, "go.mod"))[0]
	assert.Equal(t, fmt.Sprint([]string{caddyVersion + "-builder", caddyVersion}), fmt.Sprint(submatches(`FROM caddy:(\S+)`, dockerfile)))
	assert.Contains(t, dockerfile, "xcaddy build v"+caddyVersion+" --with github.com/tieredlimit/caddy-tieredlimit\n")
}
