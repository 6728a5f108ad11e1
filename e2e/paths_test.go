package e2e

import (
	"fmt"
	"io"
	"net/http"
	"net/url"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tieredlimit/caddy-tieredlimit/internal/ports"
)

// Targets that an upstream may read otherwise than Caddy does are judged as they were sent, over every version of HTTP: they
// are not exempt by how they end, and not out of a tier's reach by how they begin.
func TestTargetsAreJudgedAsSentOverEveryProtocol(t *testing.T) {
	certFile, keyFile, trust := certificate(t)
	port := ports.Free(t)
	startCaddy(t, fmt.Sprintf(`
		{
			auto_https off
		}
		https://localhost:%d {
			bind 127.0.0.1
			tls %s %s
			route {
				tiered_limit exempting {
					trusted_hops 0
					exempt *.css
					headers none
					tier ip 1/%[4]s {
						key {header.X-Test}
					}
				}
				tiered_limit avoiding {
					trusted_hops 0
					headers none
					tier dear 1/%[4]s {
						match not path /static/* *.css
						key {header.X-Test}
					}
				}
				respond ok
			}
		}`, port, certFile, keyFile, always))
	targets := []string{
		"/api;x.css", "/api%3bx.css", "/api%0a.css", "/api%23.css", "/api%3f.css", "/api%00.css", "/api%5c.css", "/api%7f.css", "/x/../api.css",
		"/api%2fx.css", "/%2e%2e/api.css", "/api%e0%80%af.css", "/api%f0%80%80%af.css", "/api%ef%bc%8f.css", "/..%09/a.css", "/%20../a.css",
		"/static/..;/login", "/static/..%5clogin", "/static/%252e%252e/login", "/static/../login", "/static/a%2f..%2f..%2flogin",
		"/static/%c0%ae%c0%ae/login", "/login%23", "/login%3f", "/login;/../static/a",
	}
	for protocol, client := range clientsByProtocol(t, "127.0.0.14", trust) {
		if protocol == "h2c" {
			continue
		}
		t.Run(protocol, func(t *testing.T) {
			ask := func(target, identity string) int {
				u := &url.URL{Scheme: "https", Host: fmt.Sprintf("127.0.0.1:%d", port), Opaque: target}
				response, err := client.Do(&http.Request{Method: http.MethodGet, URL: u, Host: "localhost", Header: http.Header{"X-Test": {identity}}})
				require.NoError(t, err, target)
				_, err = io.Copy(io.Discard, response.Body)
				require.NoError(t, err)
				require.NoError(t, response.Body.Close())
				return response.StatusCode
			}
			for i := range 3 {
				require.Equal(t, 200, ask("/site.css", protocol), "exempt, time %d", i)
			}
			for i, target := range targets {
				identity := fmt.Sprint(protocol, i)
				assert.Equal(t, 200, ask(target, identity), target)
				assert.Equal(t, 429, ask(target, identity), "%s is counted", target)
			}
		})
	}
}
