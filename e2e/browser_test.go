package e2e

import (
	"encoding/json"
	"fmt"
	"github.com/tieredlimit/caddy-tieredlimit/internal/ports"
	"net/http"
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// page is an application that sends GraphQL operations to another origin until it is refused, and reports what its
// script could read. %d is the port of the API, %d the number of operations.
const page = `<!doctype html>
<meta charset="utf-8">
<title>application</title>
<script>
async function operation() {
	const found = {};
	try {
		const response = await fetch("http://127.0.0.1:%d/graphql", {
			method: "POST",
			headers: {"Content-Type": "application/json"},
			body: JSON.stringify({query: "{ hello }"}),
		});
		found.status = response.status;
		for (const name of ["Retry-After", "X-RateLimit-Limit", "X-RateLimit-Remaining", "X-RateLimit-Reset", "X-RateLimit-Resource"]) {
			found[name] = response.headers.get(name);
		}
		found.body = await response.json();
	} catch (error) {
		found.error = error.name;
	}
	return found;
}
async function main() {
	const findings = [];
	for (let i = 0; i < %d; i++) {
		findings.push(await operation());
	}
	await fetch("/findings", {method: "POST", body: JSON.stringify(findings)});
}
main();
</script>
`

// finding is what the script of the page could read of one response.
type finding struct {
	Status    int             `json:"status"`
	Retry     *string         `json:"Retry-After"`
	Limit     *string         `json:"X-RateLimit-Limit"`
	Remaining *string         `json:"X-RateLimit-Remaining"`
	Reset     *string         `json:"X-RateLimit-Reset"`
	Resource  *string         `json:"X-RateLimit-Resource"`
	Body      json.RawMessage `json:"body"`
	Error     string          `json:"error"`
}

// browse opens the page in Chromium and returns what its script has found.
func browse(t *testing.T, address string, findings <-chan []finding, flags ...string) []finding {
	t.Helper()
	dir := tempDir(t)
	cmd := exec.Command(requireProgram(t, "chromium", "chromium"), append([]string{
		"--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
		"--no-proxy-server", "--disable-background-networking", "--disable-component-update", "--disable-sync",
		"--remote-debugging-port=0", // which keeps it running
		"--user-data-dir=" + dir, address}, flags...)...)
	cmd.Dir = dir
	cmd.Env = append(cmd.Environ(), "HOME="+dir)
	browser := startProcess(t, cmd)
	var found []finding
	browser.waitFor(t, "the findings of the page", func() bool {
		select {
		case found = <-findings:
			return true
		default:
			return false
		}
	})
	return found
}

// serveApplication serves the page and takes its findings. It returns its origin.
func serveApplication(t *testing.T, api, operations int) (string, <-chan []finding) {
	t.Helper()
	findings := make(chan []finding, 1)
	address := newUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		switch r.Method + r.URL.Path {
		case "GET/":
			w.Header().Set("Content-Type", "text/html")
			_, _ = fmt.Fprintf(w, page, api, operations)
		case "POST/findings":
			var list []finding
			if err := json.NewDecoder(r.Body).Decode(&list); err != nil {
				t.Errorf("findings: %v", err)
			}
			findings <- list
		default:
			http.NotFound(w, r)
		}
	})
	return "http://" + address, findings
}

// The script of a page on another origin can read that it was refused, by which tier, and when to come back; its
// preflights cost it nothing. Without cors the browser keeps all that from it.
func TestBrowserReadsRefusal(t *testing.T) {
	requireProgram(t, "chromium", "chromium")
	for _, cors := range []bool{true, false} {
		t.Run(fmt.Sprintf("cors %t", cors), func(t *testing.T) {
			port := ports.Free(t)
			origin, findings := serveApplication(t, port, 5)
			config := example(t, "graphql/Caddyfile", map[string]int{":8080": port, ":9080": ports.Free(t)})
			config = strings.Replace(config, "tiered_limit {", "log\n\ttiered_limit {", 1)
			if !cors {
				line := "\t\tcors {$APP_ORIGIN:http://localhost:3000}\n"
				require.Contains(t, config, line)
				config = strings.Replace(config, line, "", 1)
			}
			c := startCaddy(t, config, "APP_ORIGIN="+origin, "TRUST_PROXY=0", "RATE_LIMIT_MAX=3", "RATE_LIMIT_WINDOW_MS=3600000000000")
			found := browse(t, origin+"/", findings, "--disable-quic")
			require.Len(t, found, 5)
			for i, f := range found[:3] {
				checkBrowserServed(t, f, 2-i)
			}
			for _, f := range found[3:] {
				if cors {
					checkBrowserRefused(t, f)
				} else {
					assert.Equal(t, finding{Error: "TypeError"}, f)
				}
			}
			checkBrowserOutcomes(t, c)
		})
	}
}

func checkBrowserServed(t *testing.T, f finding, left int) {
	t.Helper()
	require.Equal(t, 200, f.Status, "error %q", f.Error)
	assert.JSONEq(t, `{"data":{"hello":"world"}}`, string(f.Body))
	assert.Equal(t, "3", text(f.Limit))
	assert.Equal(t, fmt.Sprint(left), text(f.Remaining))
	assert.Equal(t, "ip", text(f.Resource))
	assert.Nil(t, f.Retry)
}

func checkBrowserRefused(t *testing.T, f finding) {
	t.Helper()
	require.Equal(t, 429, f.Status, "error %q", f.Error)
	assert.Equal(t, "3", text(f.Limit))
	assert.Equal(t, "0", text(f.Remaining))
	assert.Equal(t, "3600000000", text(f.Reset), "the end of the window")
	assert.Equal(t, "ip", text(f.Resource))
	assert.Regexp(t, `^[1-9][0-9]+$`, text(f.Retry))
	want := `{"errors":[{"message":"Too many requests. Please retry later.",` +
		`"extensions":{"code":"RATE_LIMITED","tier":"ip","limit":3,"retryAfter":` + text(f.Retry) + `}}]}`
	assert.JSONEq(t, want, string(f.Body))
}

// checkBrowserOutcomes sees in the access log that the browser asked before it sent, and what became of it.
func checkBrowserOutcomes(t *testing.T, c *caddyServer) {
	t.Helper()
	c.waitFor(t, "the access log of the last request", func() bool { return c.count("refused") == 2 })
	assert.Equal(t, 3, c.count("served"))
	assert.GreaterOrEqual(t, c.count("preflight"), 1)
}

// count is how many requests had an outcome, as the access log says.
func (c *caddyServer) count(outcome string) int {
	n := 0
	for _, l := range c.logLines("http.log.access") {
		if l.str("tiered_limit_outcome") == outcome {
			n++
		}
	}
	return n
}

func text(s *string) string {
	if s == nil {
		return "(not readable)"
	}
	return *s
}
