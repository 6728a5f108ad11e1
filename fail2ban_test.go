package tieredlimit

import (
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// program finds a program that a test needs. Without it the test is skipped, but fails where everything is to be there.
func program(t *testing.T, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatalf("%s is not installed", name)
		}
		t.Skipf("%s is not installed", name)
	}
	return path
}

// fail2ban returns the addresses that a filter finds in a log, one for each line that matches.
func fail2ban(t *testing.T, log, filter string) []string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "access.log")
	require.NoError(t, os.WriteFile(file, []byte(log), 0o600))
	cmd := exec.Command(program(t, "fail2ban-regex"), "--out", "ip", file, filter)
	output, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", output)
	return strings.Fields(string(output))
}

// accessLog is the access log of an edge, with dates that fail2ban takes for recent.
func (e *edge) accessLog() string {
	var log strings.Builder
	for line := range strings.Lines(e.logs.text()) {
		if strings.Contains(line, `"logger":"http.log.access`) {
			log.WriteString(line)
		}
	}
	return log.String()
}

const fail2banFilter = "examples/fail2ban/filter.d/caddy-tiered-limit.conf"

func TestFail2banFilter(t *testing.T) {
	program(t, "fail2ban-regex")
	e := newEdge(t, `
{
	servers :8081 {
		trusted_proxies static 10.0.0.0/8
		trusted_proxies_strict
	}
}
:8080 {
	log
	tiered_limit f2b-direct {
		trusted_hops 0
		log_keys
		exempt /free
		tier login 1/m {
			key {http.tiered_limit.client_ip}
			match path /login
		}
		tier ip 3/m
		tier dry 1/m {
			key a
			dry_run
		}
	}
	respond {header.X-Reflect} 200
}
:8081 {
	log
	log_append note {http.request.header.X-Note}
	tiered_limit f2b-proxied {
		log_keys
		tier ip 2/m
	}
	respond ok
}
:8082 {
	log
	tiered_limit f2b-hops {
		trusted_hops 1
		log_keys
		tier ip 2/m
	}
	respond ok
}
:8083 {
	log
	tiered_limit f2b-private {
		trusted_hops 0
		tier ip 1/m
	}
	respond ok
}`)
	lie := `","client_ip":"198.51.100.66","status":429,"tiered_limit_outcome":"refused","tiered_limit_tier":"ip"}`
	hostile := func(peer, url string) request {
		return request{listen: ":8080", peer: peer, url: "http://localhost" + url, header: http.Header{
			"User-Agent": {lie}, "X-Reflect": {lie}, "Referer": {`{"level":"info","msg":"handled request","request":{"remote_ip":"198.51.100.66`},
		}}
	}
	e.served(5, hostile("203.0.113.1:1", "/?"+strings.ReplaceAll(lie, `"`, "%22"))) // 2 refused by ip
	e.served(2, hostile("203.0.113.2:1", "/login"))                                 // 1 refused by login
	e.served(3, hostile("203.0.113.3:1", "/"))                                      // served, dry refused
	e.served(9, hostile("203.0.113.4:1", "/free"))                                  // exempt
	e.served(4, request{listen: ":8080", peer: "[2001:db8::7]:1"})                  // 1 refused
	proxied := request{listen: ":8081", peer: "10.0.0.1:1", header: http.Header{"X-Forwarded-For": {"198.51.100.66, 203.0.113.5"}, "X-Note": {lie}}}
	e.served(3, proxied) // 1 refused
	proxied.header = http.Header{"X-Forwarded-For": {"203.0.113.6"}, "X-Note": {lie}}
	proxied.peer = "203.0.113.9:1" // no trusted proxy
	e.served(3, proxied)           // 1 refused

	e.served(2, request{listen: ":8083"}) // 1 refused, and nothing is to be told of the client
	behind := request{listen: ":8082", peer: "10.0.0.1:1", header: http.Header{"X-Forwarded-For": {"198.51.100.66, 203.0.113.8"}}}
	e.served(3, behind) // 1 refused, without any trusted_proxies
	for _, chain := range []string{"unknown", "", "198.51.100.66, _x", lie} {
		behind.header = http.Header{"X-Forwarded-For": {chain}}
		e.served(4, behind) // refused for the proxy, which is not to be banned
	}
	behind.header = nil
	e.served(4, behind)

	log := e.accessLog()
	require.Equal(t, 5+2+3+9+4+3+3+2+3+4*4+4, strings.Count(log, "\n"), log)
	got := fail2ban(t, log, fail2banFilter)
	slices.Sort(got)
	assert.Equal(t, []string{"2001:db8::7", "203.0.113.1", "203.0.113.1", "203.0.113.2", "203.0.113.5", "203.0.113.8", "203.0.113.9"}, got)
	assert.Equal(t, []string{"203.0.113.2"}, fail2ban(t, log, fail2banFilter+"[tier=login]"))

	// A 429 of somebody else's, lines of other loggers, and lines that are cut off.
	line := strings.Split(log, "\n")[3]
	log = strings.Join([]string{
		regexp.MustCompile(`"tiered_limit_outcome".*`).ReplaceAllString(line, `"x":""}`),
		line[:strings.Index(line, `","tiered_limit_tier"`)],
		line[:strings.Index(line, `,"tiered_limit_client"`)] + "}",
		strings.Replace(line, "handled request", "something else", 1),
		strings.Replace(line, `"tiered_limit_outcome":"refused"`, `"tiered_limit_outcome":"served"`, 1),
		strings.Replace(line, "203.0.113.1", "203.0.113.77", -1),
	}, "\n") + "\n"
	assert.Equal(t, []string{"203.0.113.77"}, fail2ban(t, log, fail2banFilter), log)
}

// The jail names the filter that is beside it, and what Debian's fail2ban takes.
func TestFail2banJail(t *testing.T) {
	jail := readText(t, "examples/fail2ban/jail.d/caddy-tiered-limit.conf")
	name := regexp.MustCompile(`(?m)^filter\s*=\s*(\S+)$`).FindStringSubmatch(jail)
	require.NotNil(t, name)
	assert.FileExists(t, "examples/fail2ban/filter.d/"+name[1]+".conf")
	client, err := exec.LookPath("fail2ban-client")
	if err != nil {
		client = program(t, "fail2ban-client")
	}
	dir := t.TempDir()
	require.NoError(t, os.CopyFS(dir, os.DirFS("/etc/fail2ban")))
	require.NoError(t, os.RemoveAll(filepath.Join(dir, "jail.d")))
	log := filepath.Join(dir, "access.log")
	require.NoError(t, os.WriteFile(log, nil, 0o600))
	require.NoError(t, os.MkdirAll(filepath.Join(dir, "jail.d"), 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "jail.d", "x.conf"),
		[]byte(strings.Replace(jail, "/var/log/caddy/access.log", log, 1)), 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "filter.d", name[1]+".conf"), []byte(readText(t, fail2banFilter)), 0o600))
	output, err := exec.Command(client, "-c", dir, "-d").CombinedOutput() // prints what it would do, and ends
	require.NoError(t, err, "%s", output)
	for _, want := range []string{`['set', 'caddy-tiered-limit', 'maxretry', 100]`, `['set', 'caddy-tiered-limit', 'addlogpath', '` + log} {
		assert.Contains(t, string(output), want)
	}
}
