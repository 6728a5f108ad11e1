package tieredlimit

import (
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"runtime"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Names in the place of * in Caddy's list of placeholders.
var placeholderParts = map[string][]string{
	"http.request.cookie.*":                   {"session", "a-b_c"},
	"http.request.header.*":                   {"Authorization", "x-api-key", "X-Forwarded-For"},
	"http.request.host.labels.*":              {"0", "1", "99"},
	"http.request.orig_uri.path.*":            {"0", "1", "99"},
	"http.request.uri.path.*":                 {"0", "1", "99"},
	"http.request.uri.query.*":                {"token", "a[b]"},
	"http.request.tls.client.san.dns_names.*": {"0", "99"},
	"http.request.tls.client.san.emails.*":    {"0", "99"},
	"http.request.tls.client.san.ips.*":       {"0", "99"},
	"http.request.tls.client.san.uris.*":      {"0", "99"},
	"http.response.header.*":                  {"X-A"},
	"http.vars.*":                             {"client_ip", "root", "anything"},
}

// documentedPlaceholders reads Caddy's own list of its HTTP placeholders, and adds what its code knows besides.
func documentedPlaceholders(t *testing.T) []string {
	t.Helper()
	source, err := os.ReadFile(caddySource(t, "app.go"))
	require.NoError(t, err)
	var names []string
	for _, line := range strings.Split(string(source), "\n") {
		if m := regexp.MustCompile("^// `\\{(http\\.[^}]+)\\}` \\|").FindStringSubmatch(line); m != nil {
			names = append(names, m[1])
		}
	}
	require.Greater(t, len(names), 55, "Caddy's list has moved: read it from where it is now")
	return append(names,
		"http.request.remote.host/24", "http.request.remote.host/24,64", "http.request.uri.path.file.base", "http.request.uri.path.file.ext",
		"http.request.tls.client.san.dns_names", "http.request.tls.client.san.emails", "http.request.tls.client.san.ips",
		"http.request.tls.client.san.uris", "http.request.tls.client.SUBJECT")
}

// caddySource is the path of a source file of Caddy's HTTP app, as this test binary was built with it.
func caddySource(t *testing.T, name string) string {
	t.Helper()
	at := reflect.ValueOf(caddyhttp.PrepareRequest).Pointer()
	file, _ := runtime.FuncForPC(at).FileLine(at)
	source := filepath.Join(filepath.Dir(file), name)
	if _, err := os.Stat(source); err != nil {
		t.Skipf("the source of Caddy is not here: %v", err)
	}
	return source
}

// No placeholder that Caddy documents is refused as unknown, and those that can never limit are refused as such.
func TestDocumentedPlaceholders(t *testing.T) {
	t.Parallel()
	probe := newPlaceholderProbe(nil)
	never := 0
	for _, name := range documentedPlaceholders(t) {
		names := []string{name}
		if stem, ok := strings.CutSuffix(name, "*"); ok {
			require.NotEmpty(t, placeholderParts[name], "Caddy has a new placeholder {%s}: add examples", name)
			names = nil
			for _, part := range placeholderParts[name] {
				names = append(names, stem+part)
			}
		}
		for _, name := range names {
			if neverLimits(name) {
				never++
				assert.EqualError(t, probe.check(name), "placeholder {"+name+"} differs on every request, so it can never limit")
				continue
			}
			assert.NoError(t, probe.check(name))
		}
	}
	assert.Equal(t, 7, never, "uuid, remote, remote.port, duration, duration_ms, body, body_base64")
}

// Placeholders of Caddy's that do not exist are refused by name, each with what to write for the client's address.
func TestUnknownPlaceholders(t *testing.T) {
	t.Parallel()
	for _, name := range []string{
		"http.request.remote_ip", "http.request.client_ip", "http.request.ip", "http.request.", "http.request.hosts", "http.request.Host",
		"http.request.remote.ip", "http.request.remote.addr", "http.request.host.labels.x", "http.request.host.labels.-1",
		"http.request.uri.path.x", "http.request.uri.path.-1", "http.request.orig_uri.path.x", "http.request.tls", "http.request.tls.sni",
		"http.request.tls.client", "http.request.tls.client.cn", "http.request.tls.client.san", "http.request.tls.client.san.dns",
		"http.request.tls.client.san.ips.x", "http.request.tls.client.san.ips.-1", "http.request.method ",
	} {
		block := "tier t 5/s {\nkey \"{" + name + "}\"\n}"
		_, err := tryLoad(t, site(block))
		assert.ErrorContains(t, err, `tier "t": key part "{`+name+`}": placeholder {`+name+
			`} does not exist in Caddy; for the client's address write {http.tiered_limit.client_ip}`)
	}
	for name, want := range map[string]string{
		"headers.X-A": "http.request.header.X-A", "cookies.a": "http.request.cookie.a", "query.a": "http.request.uri.query.a",
		"params.a": "http.request.uri.query.a", "path": "http.request.uri.path", "query": "http.request.uri.query",
		"user.id": "http.auth.user.id", "user": "http.auth.user.id", "header_X-A": "http.request.header.X-A",
	} {
		_, err := tryLoad(t, site("tier t 5/s {\nkey {http.request."+name+"}\n}"))
		assert.ErrorContains(t, err, "placeholder {http.request."+name+"} does not exist in Caddy; write {"+want+"}")
	}
}

// What a key may be made of, through the whole of Caddy. Shorthands of the Caddyfile are known by their long name.
func TestKeyPlaceholders(t *testing.T) {
	t.Parallel()
	for key, want := range map[string]string{
		"{http.request.remote_ip}":   `placeholder {http.request.remote_ip} does not exist in Caddy`,
		"{http.request.uuid}":        `placeholder {http.request.uuid} differs on every request`,
		"{uuid}":                     `placeholder {http.request.uuid} differs on every request`,
		"{http.request.remote.port}": `placeholder {http.request.remote.port} differs on every request`,
		"{remote}":                   `placeholder {http.request.remote} differs on every request`,
		"{http.request.duration}":    `placeholder {http.request.duration} differs on every request`,
		"{http.request.duration_ms}": `placeholder {http.request.duration_ms} differs on every request`,
		"{http.request.body}":        `placeholder {http.request.body} differs on every request`,
		"{http.request.body_base64}": `placeholder {http.request.body_base64} differs on every request`,
		"{http.vars.uuid}":           `placeholder {http.vars.uuid} differs on every request`,
		"{vars.start_time}":          `placeholder {http.vars.start_time} differs on every request`,
		"{time.now.unix_ms}":         `placeholder {time.now.unix_ms} differs on every request`,
		"a{http.request.remote_ip}b": `placeholder {http.request.remote_ip} does not exist in Caddy`,
		"{host}-{http.request.nope}": `placeholder {http.request.nope} does not exist in Caddy`,
		"x y {http.request.nope}":    `placeholder {http.request.nope} does not exist in Caddy`,
		"x\nkey {http.request.nope}": `placeholder {http.request.nope} does not exist in Caddy`,
		"{remote_host}":              "",
		"{client_ip}":                "",
		"{remote_ip}":                "",
		"{header.X-Key}{cookie.a}":   "",
		"{query.a}":                  "",
		"{path.0}":                   "",
		"{labels.1}":                 "",
		"{tls_client_subject}":       "",
		"{vars.anything}":            "",
		"{http.auth.user.id}":        "",
		"{http.auth.user.anything}":  "",
		"{http.regexp.name.1}":       "",
		"{env.HOME}":                 "",
		"{system.hostname}":          "",
		"{http.matchers.file.type}":  "",
		"{my_map}":                   "",
		`\{not.a.placeholder\}`:      "",
		"static":                     "",
	} {
		_, err := tryLoad(t, site("tier t 5/s {\nkey "+key+"\n}"))
		if want == "" {
			assert.NoError(t, err, "key %s", key)
			continue
		}
		assert.ErrorContains(t, err, want, "key %s", key)
	}
}

// A placeholder in a switched-off tier is judged all the same, so that switching it on is no surprise.
func TestSwitchedOff(t *testing.T) {
	t.Parallel()
	_, err := tryLoad(t, site("tier t off {\nkey {http.request.nope}\n}"))
	assert.ErrorContains(t, err, "placeholder {http.request.nope} does not exist in Caddy")
}
