package e2e

import (
	"bufio"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tieredlimit/caddy-tieredlimit/internal/ports"
)

// askingPage sends requests with a field of its own to another origin, each to another path, so that the browser asks
// before every one of them. %[1]s is the API, %[2]d the number of requests.
const askingPage = `<!doctype html>
<meta charset="utf-8">
<title>application</title>
<script>
async function main() {
	const findings = [];
	for (let i = 0; i < %[2]d; i++) {
		const found = {};
		try {
			const response = await fetch("%[1]s/" + i, {headers: {"X-Custom": "1"}});
			found.status = response.status;
			found["X-RateLimit-Remaining"] = response.headers.get("X-RateLimit-Remaining");
		} catch (error) {
			found.error = error.name;
		}
		findings.push(found);
	}
	await fetch("/findings", {method: "POST", body: JSON.stringify(findings)});
}
main();
</script>
`

// Browsers ask before they send to another origin. That costs nothing over any version of HTTP: all requests of the limit
// are served, and the refusal of the next one can be read.
func TestBrowserAsksForFreeOverEveryProtocol(t *testing.T) {
	requireProgram(t, "chromium", "chromium")
	certFile, keyFile, _ := certificate(t)
	for _, p := range []struct{ protocols, proto string }{{"h1", "HTTP/1.1"}, {"h1 h2", "HTTP/2.0"}, {"h1 h2 h3", "HTTP/3.0"}} {
		t.Run(p.proto, func(t *testing.T) {
			port := ports.Free(t)
			findings := make(chan []finding, 1)
			address := serveFindings(t, fmt.Sprintf(askingPage, fmt.Sprintf("https://localhost:%d", port), 8), findings)
			c := startCaddy(t, askedSite(port, p.protocols, certFile, keyFile, "http://"+address))
			flag := "--disable-quic"
			if p.proto == "HTTP/3.0" {
				flag = fmt.Sprintf("--origin-to-force-quic-on=localhost:%d", port)
			}
			found := browse(t, "http://"+address+"/", findings, flag, "--host-resolver-rules=MAP localhost 127.0.0.1",
				"--ignore-certificate-errors-spki-list="+publicKeyPin(t, certFile))
			require.Len(t, found, 8)
			for i, f := range found[:6] {
				require.Equal(t, 200, f.Status, "error %q", f.Error)
				assert.Equal(t, fmt.Sprint(5-i), text(f.Remaining))
			}
			for _, f := range found[6:] {
				assert.Equal(t, 429, f.Status, "error %q", f.Error)
			}
			c.waitFor(t, "the access log of the last request", func() bool { return c.count("refused") == 2 })
			assert.Equal(t, 6, c.count("served"))
			assert.Equal(t, 8, c.count("preflight"))
			for _, l := range c.logLines("http.log.access") {
				assert.Equal(t, p.proto, l["request"].(map[string]any)["proto"])
			}
		})
	}
}

// serveFindings serves a page and takes its findings. It returns its address.
func serveFindings(t *testing.T, page string, findings chan<- []finding) string {
	t.Helper()
	return newUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost {
			var list []finding
			assert.NoError(t, json.NewDecoder(r.Body).Decode(&list))
			findings <- list
			return
		}
		w.Header().Set("Content-Type", "text/html")
		_, _ = io.WriteString(w, page)
	})
}

// askedSite is an API that allows an origin to read it, and tells an OPTIONS request how long its body was.
func askedSite(port int, protocols, certFile, keyFile, origin string) string {
	return fmt.Sprintf(`
		{
			auto_https off
			servers {
				protocols %[2]s
			}
		}
		https://localhost:%[1]d {
			bind 127.0.0.1
			tls %[3]s %[4]s
			log
			tiered_limit api {
				trusted_hops 0
				tier ip 6/%[6]s
				cors %[5]s
			}
			header Access-Control-Allow-Origin %[5]s
			header Access-Control-Allow-Headers X-Custom
			respond "{http.request.body}"
		}`, port, protocols, certFile, keyFile, origin, always)
}

// publicKeyPin is the digest of a certificate's public key, by which Chromium accepts it.
func publicKeyPin(t *testing.T, certFile string) string {
	t.Helper()
	data, err := os.ReadFile(certFile)
	require.NoError(t, err)
	block, _ := pem.Decode(data)
	require.NotNil(t, block)
	cert, err := x509.ParseCertificate(block.Bytes)
	require.NoError(t, err)
	sum := sha256.Sum256(cert.RawSubjectPublicKeyInfo)
	return base64.StdEncoding.EncodeToString(sum[:])
}

// No client smuggles a body in behind a preflight, whether it says that there is one or not: it is counted, and reaches
// the upstream. Without a body nothing is counted.
func TestNoBodyIsSmuggledBehindAPreflight(t *testing.T) {
	certFile, keyFile, trust := certificate(t)
	for _, protocol := range []string{"h1", "h2", "h3"} {
		t.Run(protocol, func(t *testing.T) {
			port := ports.Free(t)
			c := startCaddy(t, askedSite(port, "h1 h2 h3", certFile, keyFile, "https://app.example"))
			client := clientsByProtocol(t, "127.0.0.13", trust)[protocol]
			ask := func(body io.Reader, length int64) string {
				r, err := http.NewRequest(http.MethodOptions, fmt.Sprintf("https://127.0.0.1:%d/", port), body)
				require.NoError(t, err)
				r.Host, r.ContentLength = "localhost", length
				r.Header.Set("Origin", "https://app.example")
				r.Header.Set("Access-Control-Request-Method", "POST")
				response, err := client.Do(r)
				require.NoError(t, err)
				defer response.Body.Close()
				got, err := io.ReadAll(response.Body)
				require.NoError(t, err)
				return fmt.Sprint(response.StatusCode, " ", response.Header.Get("X-Ratelimit-Remaining"), " ", string(got))
			}
			for range 9 {
				require.Equal(t, "200  ", ask(nil, 0))
			}
			assert.Equal(t, "200 5 smuggled", ask(unsized("smuggled"), -1))
			assert.Equal(t, "200 4 smuggled", ask(strings.NewReader("smuggled"), 8))
			assert.Equal(t, "200 3 s", ask(unsized("s"), -1))
			c.waitFor(t, "the access log", func() bool { return c.count("served") == 3 })
			assert.Equal(t, 9, c.count("preflight"))
		})
	}
}

// unsized is a body whose length nobody knows before its end.
func unsized(s string) io.Reader { return bufio.NewReader(io.LimitReader(strings.NewReader(s), 1<<10)) }
