package e2e

import (
	"fmt"
	"github.com/tieredlimit/caddy-tieredlimit/internal/ports"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// startHAProxy runs HAProxy with a configuration until the test ends.
func startHAProxy(t *testing.T, config string, port int) {
	t.Helper()
	program := requireProgram(t, "haproxy", "haproxy")
	file := filepath.Join(tempDir(t), "haproxy.cfg")
	require.NoError(t, os.WriteFile(file, []byte(config), 0o600))
	startProcess(t, exec.Command(program, "-db", "-f", file)).waitForPort(t, port)
}

// startNginx runs nginx with a configuration, which must keep it in the foreground, until the test ends.
func startNginx(t *testing.T, config string, port int) {
	t.Helper()
	program := requireProgram(t, "nginx", "nginx-light")
	dir := tempDir(t)
	file := filepath.Join(dir, "nginx.conf")
	if os.Geteuid() == 0 {
		config = "user root;\n" + config // its workers may then use the sockets and directories of this test
	}
	require.NoError(t, os.WriteFile(file, []byte(config), 0o600))
	startProcess(t, exec.Command(program, "-p", dir, "-e", "stderr", "-c", file)).waitForPort(t, port)
}

// haproxyConfig appends the client to X-Forwarded-For, as a field line of its own.
func haproxyConfig(port, upstream int) string {
	return fmt.Sprintf(`
defaults
	mode http
	timeout connect 10s
	timeout client 60s
	timeout server 60s
frontend web
	bind 127.0.0.1:%d
	option forwardfor
	default_backend next
backend next
	server next 127.0.0.1:%d
`, port, upstream)
}

// nginxConfig appends its peer to X-Forwarded-For, in the same field line. The upstream is a URL.
func nginxConfig(dir string, port int, upstream, extra string) string {
	return fmt.Sprintf(`
worker_processes 1;
daemon off;
pid %[1]s/nginx.pid;
error_log stderr;
events {}
http {
	access_log off;
	client_body_temp_path %[1]s/body;
	proxy_temp_path %[1]s/proxy;
	fastcgi_temp_path %[1]s/fastcgi;
	uwsgi_temp_path %[1]s/uwsgi;
	scgi_temp_path %[1]s/scgi;
	server {
		listen 127.0.0.1:%[2]d;
		location / {
			proxy_pass %[3]s;
			proxy_set_header Host $http_host;
			%[4]s
		}
	}
}
`, dir, port, upstream, extra)
}

const nginxAppends = "proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;"

// forgeries are what a client may send to pass for somebody else, with an address that is its own each time in the
// place of %s. All of them are well-formed enough for proxies to pass on.
var forgeries = [][]string{
	{},
	{"X-Forwarded-For", "%s"},
	{"X-Forwarded-For", "%s, 127.0.0.1"},
	{"X-Forwarded-For", "%s, %s, %s, 10.0.0.1"},
	{"X-Forwarded-For", "%s", "X-Forwarded-For", "%s"},
	{"x-forwarded-for", "%s"},
	{"X-Forwarded-For", "%s,"},
	{"X-Forwarded-For", ",,,%s,,"},
	{"X-Forwarded-For", `"%s", for=%s;x="`},
	{"X-Forwarded-For", "unknown"},
	{"X-Forwarded-For", ""},
	{"Forwarded", "for=%s"},
	{"Forwarded", `for=%s;x="`},
	{"X-Real-IP", "%s"},
	{"CF-Connecting-IP", "%s"},
	{"True-Client-IP", "%s"},
	{"X-Client-IP", "%s"},
	{"Via", "1.1 %s", "X-Forwarded-Host", "%s"},
}

// forged fills in an address.
func forged(fields []string, addr string) []string {
	list := make([]string, len(fields))
	for i, f := range fields {
		list[i] = strings.ReplaceAll(f, "%s", addr)
	}
	return list
}

// checkForging lets clients behind proxies forge in every way. However they do it, each of them has the limit of three
// requests, and takes none of the others'.
func checkForging(t *testing.T, url string, limit int) {
	t.Helper()
	victim := clientFrom(t, "127.0.0.200")
	for i, fields := range forgeries {
		source := fmt.Sprintf("127.0.0.%d", 20+i)
		client := clientFrom(t, source)
		count := 0
		for j := range 2 * limit {
			addr := fmt.Sprintf("203.0.113.%d", j) // a new one each time
			if j%2 == 1 {
				addr = "127.0.0.200" // the victim's
			}
			count += served(t, 1, client, url, forged(fields, addr)...)
		}
		assert.Equal(t, limit, count, "served to %s with %q", source, fields)
	}
	assert.Equal(t, limit, served(t, 2*limit, victim, url), "served to the one whom the others named")
}

// Clients reach Caddy through HAProxy and nginx, which both append to X-Forwarded-For.
func TestTwoProxiesAndForgingClients(t *testing.T) {
	front, middle, port := ports.Free(t), ports.Free(t), ports.Free(t)
	c := startCaddy(t, fmt.Sprintf(`
		:%d {
			bind 127.0.0.1
			tiered_limit {
				trusted_hops 2
				tier ip 3/%s
			}
			respond "{http.tiered_limit.client_ip}"
		}`, port, always))
	startNginx(t, nginxConfig(tempDir(t), middle, fmt.Sprintf("http://127.0.0.1:%d", port), nginxAppends), middle)
	startHAProxy(t, haproxyConfig(front, middle), front)

	url := fmt.Sprintf("http://127.0.0.1:%d/", front)
	first := get(t, clientFrom(t, "127.0.0.7"), url, "X-Forwarded-For", "203.0.113.1")
	assert.Equal(t, 200, first.status)
	assert.Equal(t, "127.0.0.7", first.body, "the client as Caddy sees it")
	checkForging(t, url, 3)
	assert.Contains(t, c.metrics(t), `caddy_tiered_limit_client_fallback_total{reason="short_chain",stack="* 127.0.0.1`,
		"the stack has metrics")
	assert.Empty(t, c.warnings(), "what proxies forward is no reason to warn")
}

// A client that sends chains which cannot be read does not use up the budget of the proxy in front: the proxy's health
// check stays well, and so does the site for everybody else.
func TestUselessChainsDoNotTakeTheBackendDown(t *testing.T) {
	front, port := ports.Free(t), ports.Free(t)
	c := startCaddy(t, fmt.Sprintf(`
		:%d {
			bind 127.0.0.1
			tiered_limit poisoned {
				trusted_hops 1 Forwarded
				tier ip 100/%s
			}
			respond "{http.tiered_limit.client_ip}"
		}`, port, always))
	startHAProxy(t, fmt.Sprintf(`
defaults
	mode http
	timeout connect 10s
	timeout client 60s
	timeout server 60s
frontend web
	bind 127.0.0.1:%d
	http-request add-header Forwarded for=%%[src]
	default_backend next
backend next
	option httpchk GET /health
	default-server inter 500ms fall 2 rise 2
	server next 127.0.0.1:%d check
`, front, port), front)

	url := fmt.Sprintf("http://127.0.0.1:%d/", front)
	attacker, honest := clientFrom(t, "127.0.0.66"), clientFrom(t, "127.0.0.7")
	assert.Equal(t, "127.0.0.7", get(t, honest, url).body, "the client as Caddy sees it")
	statuses := make(map[int]int)
	for range 120 {
		statuses[get(t, attacker, url, "Forwarded", `for=9.9.9.9;x="`).status]++
	}
	assert.Equal(t, map[int]int{200: 100, 429: 20}, statuses)
	health := func() int64 {
		return c.number(t, `caddy_tiered_limit_client_fallback_total{reason="short_chain",stack="poisoned"}`)
	}
	seen := health()
	c.waitFor(t, "more health checks than make a server fail", func() bool { return health() >= seen+3 })
	assert.Equal(t, 200, get(t, clientFrom(t, "127.0.0.8"), url).status, "an honest client")
	assert.Equal(t, 200, get(t, honest, url).status)
	assert.Equal(t, 429, get(t, attacker, url, "Forwarded", `for=9.9.9.9;x="`).status)
}

// warnings are the messages that the module has logged as warnings or errors.
func (c *caddyServer) warnings() []string {
	var list []string
	for _, l := range c.logLines(moduleLogger) {
		if level := l.str("level"); level == "warn" || level == "error" {
			list = append(list, l.str("msg"))
		}
	}
	return list
}

// The examples for HAProxy and nginx work with the configuration of the proxy that stands beside them.
func TestExampleProxies(t *testing.T) {
	t.Run("haproxy", func(t *testing.T) {
		front, port := ports.Free(t), ports.Free(t)
		startCaddy(t, example(t, "haproxy/Caddyfile", map[string]int{":8080": port}))
		startHAProxy(t, example(t, "haproxy/haproxy.cfg", map[string]int{":8000": front, ":8080": port}), front)
		checkExampleProxy(t, front)
	})
	t.Run("nginx", func(t *testing.T) {
		front, port := ports.Free(t), ports.Free(t)
		startCaddy(t, example(t, "nginx/Caddyfile", map[string]int{":8080": port}))
		config := example(t, "nginx/nginx.conf", map[string]int{":8000": front, ":8080": port})
		config = strings.Replace(config, "/tmp/tiered-limit-nginx.pid", "nginx.pid", 1)
		startNginx(t, config, front)
		checkExampleProxy(t, front)
	})
}

// checkExampleProxy sees that a client has its 60 requests a minute behind a proxy, whatever it forges, and that
// another client does not pay for them.
func checkExampleProxy(t *testing.T, front int) {
	t.Helper()
	url := fmt.Sprintf("http://127.0.0.1:%d/", front)
	seen := inOneMinute(t, func(attempt int) [2]int {
		var counts [2]int
		client := clientFrom(t, fmt.Sprintf("127.0.0.%d", 30+attempt))
		for i := range 70 {
			counts[0] += served(t, 1, client, url, "X-Forwarded-For", fmt.Sprintf("203.0.113.%d", i))
		}
		counts[1] = served(t, 1, clientFrom(t, fmt.Sprintf("127.0.0.%d", 40+attempt)), url)
		return counts
	})
	assert.Equal(t, [2]int{60, 1}, seen, "served to the forging client, and to another one")
}

// A peer without an address is counted by its header where hops are stated, and in one bucket for all where they say
// that there is no proxy, or where it has no header.
func TestUnixSocket(t *testing.T) {
	dir := tempDir(t)
	c := startCaddy(t, fmt.Sprintf(`
		{
			auto_https off
		}
		(site) {
			tiered_limit {
				trusted_hops {args[0]}
				tier ip 2/%[2]s
			}
			respond "{http.tiered_limit.client_ip}"
		}
		http://one {
			bind unix/%[1]s/one.sock|0666
			import site 1
		}
		http://none {
			bind unix/%[1]s/none.sock|0666
			import site 0
		}`, dir, always))
	start := func(socket, extra string) string {
		port := ports.Free(t)
		startNginx(t, nginxConfig(tempDir(t), port, "http://unix:"+dir+"/"+socket, extra), port)
		return fmt.Sprintf("http://127.0.0.1:%d/", port)
	}
	appending := start("one.sock", nginxAppends)
	silent := start("one.sock", "proxy_set_header X-Forwarded-For '';")
	direct := start("none.sock", nginxAppends)

	a, b, d := clientFrom(t, "127.0.0.11"), clientFrom(t, "127.0.0.12"), clientFrom(t, "127.0.0.13")
	assert.Equal(t, "127.0.0.11", get(t, a, appending, "Host", "one").body, "hops 1")
	assert.Equal(t, 1, served(t, 4, a, appending, "Host", "one", "X-Forwarded-For", "127.0.0.12"), "the rest of A's two")
	assert.Equal(t, 2, served(t, 4, b, appending, "Host", "one"), "B has two of its own")

	assert.Equal(t, "unknown", get(t, d, silent, "Host", "one").body, "hops 1, no header")
	assert.Equal(t, 1, served(t, 4, a, silent, "Host", "one"), "one bucket for all without a header")

	assert.Equal(t, "unknown", get(t, a, direct, "Host", "none").body, "hops 0")
	assert.Equal(t, 1, served(t, 4, b, direct, "Host", "none"), "one bucket for all")
	assert.Len(t, c.warnings(), 2, "one for the missing header, one for the ignored one: %q", c.warnings())
}
