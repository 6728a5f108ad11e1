package e2e

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tieredlimit/caddy-tieredlimit/internal/ports"
)

// meddlingPage sends what a page on another origin can send to the admin endpoint without being asked whether it may.
// %[1]s is the admin endpoint, %[2]s the body of a reset.
const meddlingPage = `<!doctype html>
<meta charset="utf-8">
<title>application</title>
<iframe name="frame"></iframe>
<form action="%[1]s/tiered_limit/reset" method="post" enctype="text/plain" target="frame"><input name='%[2]s' value=''></form>
<script>
async function main() {
	const findings = [];
	for (const options of [
		{method: "POST", body: '%[2]s', mode: "no-cors"},
		{method: "POST", body: '%[2]s', headers: {"Content-Type": "application/json"}},
		{method: "POST", body: '%[2]s', credentials: "include"},
	]) {
		try {
			const response = await fetch("%[1]s/tiered_limit/reset", options);
			findings.push({status: response.status});
		} catch (error) {
			findings.push({error: error.name});
		}
	}
	try {
		const response = await fetch("%[1]s/tiered_limit/");
		findings.push({status: response.status, body: await response.json()});
	} catch (error) {
		findings.push({error: error.name});
	}
	navigator.sendBeacon("%[1]s/tiered_limit/reset", '%[2]s');
	document.forms[0].submit();
	await new Promise(done => document.querySelector("iframe").onload = done);
	await fetch("/findings", {method: "POST", body: JSON.stringify(findings)});
}
main();
</script>
`

// administered is a site with a limit of 3 for each address, of which 127.0.0.14 has used 2, and an admin endpoint on a
// port. It returns the body of a reset of that counter.
func administered(t *testing.T) (c *caddyServer, admin int, reset string) {
	t.Helper()
	admin = ports.Free(t)
	port := ports.Free(t)
	c = startCaddy(t, fmt.Sprintf(`
		{
			admin 127.0.0.1:%d
		}
		:%d {
			bind 127.0.0.1
			tiered_limit api {
				trusted_hops 0
				tier ip 3/%s
			}
			respond ok
		}`, admin, port, always))
	served(t, 2, clientFrom(t, "127.0.0.14"), fmt.Sprintf("http://127.0.0.1:%d/", port))
	return c, admin, `{"stack":"api","tier":"ip","key":["127.0.0.14"]}`
}

// askAdmin sends a request to the admin endpoint, with header fields, and returns the status and the body.
func askAdmin(t *testing.T, method string, admin int, path, body string, fields ...string) (int, string) {
	t.Helper()
	r, err := http.NewRequest(method, fmt.Sprintf("http://127.0.0.1:%d%s", admin, path), strings.NewReader(body))
	require.NoError(t, err)
	for i := 0; i < len(fields); i += 2 {
		if fields[i] == "Host" {
			r.Host = fields[i+1]
		}
		r.Header.Set(fields[i], fields[i+1])
	}
	response, err := http.DefaultClient.Do(r)
	require.NoError(t, err)
	defer response.Body.Close()
	answer, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	return response.StatusCode, string(answer)
}

// wantUsed checks how much of its limit the client has used.
func wantUsed(t *testing.T, admin int, counter string, used int) {
	t.Helper()
	status, answer := askAdmin(t, "POST", admin, "/tiered_limit/inspect", counter)
	require.Equal(t, 200, status, answer)
	assert.Contains(t, answer, fmt.Sprintf(`"used":%d,`, used))
}

// No page of another origin resets a counter or reads the status, and neither does one whose name was made to lead to the
// admin endpoint's address.
func TestPagesCannotMeddleWithTheAdminEndpoint(t *testing.T) {
	_, admin, reset := administered(t)
	own := fmt.Sprintf("127.0.0.1:%d", admin)
	for _, fields := range [][]string{
		{"Origin", "https://evil.example"},
		{"Origin", "null"},
		{"Origin", "http://localhost:1"},
		{"Origin", "https://evil.example", "Sec-Fetch-Mode", "no-cors", "Sec-Fetch-Site", "cross-site", "Content-Type", "text/plain"},
		{"Referer", "https://evil.example/page", "Sec-Fetch-Mode", "navigate", "Origin", "https://evil.example"},
		{"Host", fmt.Sprintf("rebound.example:%d", admin)},
		{"Host", fmt.Sprintf("rebound.example:%d", admin), "Origin", fmt.Sprintf("http://rebound.example:%d", admin)},
		{"Host", "127.0.0.1.rebound.example"},
		{"Host", own + ".rebound.example"},
		{"Host", fmt.Sprintf("0.0.0.0:%d", admin)},
	} {
		for _, path := range []string{"/tiered_limit/reset", "/tiered_limit/inspect", "/tiered_limit/explain", "//tiered_limit/reset", "/tiered_limit//reset"} {
			status, answer := askAdmin(t, "POST", admin, path, reset, fields...)
			assert.Contains(t, []int{400, 403}, status, "%s %q: %s", path, fields, answer)
			assert.NotContains(t, answer, `"used"`)
		}
		status, answer := askAdmin(t, "GET", admin, "/tiered_limit/", "", fields...)
		assert.Contains(t, []int{400, 403}, status, "%q: %s", fields, answer)
		assert.NotContains(t, answer, `"stacks"`)
	}
	wantUsed(t, admin, reset, 2)
	status, _ := askAdmin(t, "POST", admin, "/tiered_limit/reset", reset, "Origin", "http://"+own)
	assert.Equal(t, 200, status, "its own origin may")
	wantUsed(t, admin, reset, 0)
}

// The same with a browser and what its scripts and forms can send.
func TestBrowserCannotMeddleWithTheAdminEndpoint(t *testing.T) {
	requireProgram(t, "chromium", "chromium")
	_, admin, reset := administered(t)
	findings := make(chan []finding, 1)
	origin := "http://" + serveFindings(t, fmt.Sprintf(meddlingPage, fmt.Sprintf("http://127.0.0.1:%d", admin), reset), findings)
	found := browse(t, origin+"/", findings, "--disable-quic")
	require.Len(t, found, 4)
	assert.Equal(t, finding{}, found[0], "an opaque answer")
	for _, f := range found[1:] {
		assert.Equal(t, finding{Error: "TypeError"}, f)
	}
	wantUsed(t, admin, reset, 2)
}

// Bodies that are long, deep or odd are answered with an error, and the endpoint goes on.
func TestAdminEndpointStandsOddBodies(t *testing.T) {
	_, admin, reset := administered(t)
	for name, body := range map[string]string{
		"64 MB":              strings.Repeat(" ", 64<<20),
		"64 MB in a string":  `{"stack":"` + strings.Repeat("x", 64<<20),
		"deep arrays":        strings.Repeat("[", 60_000),
		"deep objects":       strings.Repeat(`{"headers":`, 5_000),
		"deep and closed":    strings.Repeat("[", 30_000) + strings.Repeat("]", 30_000),
		"a huge number":      `{"line":1` + strings.Repeat("0", 60_000) + `}`,
		"a huge exponent":    `{"line":1e999999999}`,
		"many members":       `{` + strings.Repeat(`"a":1,`, 10_000) + `"a":1}`,
		"NUL":                "\x00",
		"a byte order mark":  "\ufeff" + reset,
		"UTF-16":             "\xff\xfe{\x00}\x00",
		"a member of itself": `{"__proto__":{"stack":"api"}}`,
		"XML":                "<?xml version=\"1.0\"?><!DOCTYPE a [<!ENTITY b SYSTEM \"file:///etc/passwd\">]><a>&b;</a>",
		"a form":             "stack=api&tier=ip&key=127.0.0.14",
		"a form of text":     reset[:len(reset)-1] + `,"x":"="}`,
	} {
		for _, path := range []string{"reset", "inspect", "explain"} {
			status, answer := askAdmin(t, "POST", admin, "/tiered_limit/"+path, body)
			assert.Contains(t, []int{400, 413}, status, "%s: %s: %.200s", name, path, answer)
			assert.Contains(t, answer, `{"error":`, "%s: %s", name, path)
			assert.Less(t, len(answer), 1000, "%s: %s", name, path)
		}
	}
	wantUsed(t, admin, reset, 2)
}
