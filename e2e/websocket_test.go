package e2e

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/net/http2"

	"github.com/tieredlimit/caddy-tieredlimit/internal/ports"
)

// upgrading is an upstream that switches protocols and then echoes bytes. It has limit fields of its own.
func upgrading(w http.ResponseWriter, _ *http.Request) {
	conn, both, err := w.(http.Hijacker).Hijack()
	if err != nil {
		return
	}
	defer conn.Close()
	_, _ = io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"+
		"Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\nX-RateLimit-Limit: 999\r\nX-RateLimit-Resource: upstream\r\n\r\n")
	_, _ = io.Copy(conn, both)
}

// An upgrade counts as a request, its 101 carries the fields once, ours and not the upstream's, and what follows passes
// both ways.
func TestWebSocketUpgrade(t *testing.T) {
	upstream := newUpstream(t, upgrading)
	port := ports.Free(t)
	startCaddy(t, fmt.Sprintf(`
		:%d {
			bind 127.0.0.1
			tiered_limit {
				trusted_hops 0
				tier ip 2/%s
			}
			reverse_proxy %s
		}`, port, always, upstream))
	request := fmt.Sprintf("GET /socket HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"+
		"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n", port)

	for _, left := range []string{"1", "0"} {
		response, conn, reader := sendRaw(t, "127.0.0.10", port, request)
		require.Equal(t, 101, response.StatusCode)
		assert.Equal(t, []string{"2"}, response.Header.Values("X-RateLimit-Limit"))
		assert.Equal(t, []string{left}, response.Header.Values("X-RateLimit-Remaining"))
		assert.Equal(t, []string{"ip"}, response.Header.Values("X-RateLimit-Resource"))
		assert.Len(t, response.Header.Values("X-RateLimit-Reset"), 1)
		_, err := io.WriteString(conn, "hello")
		require.NoError(t, err)
		echo := make([]byte, 5)
		_, err = io.ReadFull(reader, echo)
		require.NoError(t, err)
		assert.Equal(t, "hello", string(echo))
		require.NoError(t, conn.(*net.TCPConn).CloseWrite())
	}
	response, _, _ := sendRaw(t, "127.0.0.10", port, request)
	assert.Equal(t, 429, response.StatusCode)
	assert.Empty(t, response.Header.Get("Upgrade"))
	response, _, _ = sendRaw(t, "127.0.0.10", port, strings.Replace(request, "Upgrade: websocket\r\n", "", 1))
	assert.Equal(t, 429, response.StatusCode, "a plain request is counted in the same budget")
}

// A WebSocket over HTTP/2 or 3 is a CONNECT on the way in and a GET for the upstream: tiers for either method are asked, and
// a socket of one version takes from the budget of the others.
func TestWebSocketByExtendedConnect(t *testing.T) {
	upstream := newUpstream(t, upgrading)
	certFile, keyFile, trust := certificate(t)
	for _, method := range []string{"GET", "CONNECT"} {
		t.Run(method, func(t *testing.T) {
			port := ports.Free(t)
			startCaddy(t, fmt.Sprintf(`
				{
					auto_https off
				}
				https://localhost:%d {
					bind 127.0.0.1
					tls %s %s
					tiered_limit {
						trusted_hops 0
						tier ip 2/%s {
							match method %s
						}
					}
					reverse_proxy %s
				}`, port, certFile, keyFile, always, method, upstream), "GODEBUG=http2xconnect=1")
			over := map[string]http.RoundTripper{ // clients that let a field pass whose name begins with a colon
				//lint:ignore SA1019 net/http's own transport lets no such field pass
				"h2": &http2.Transport{TLSClientConfig: trust.Clone()},
				"h3": clientOverQUIC(t, "127.0.0.1", trust).Transport,
			}
			open := func(protocol string) (int, string) {
				body, typed := io.Pipe()
				r, err := http.NewRequest(http.MethodConnect, fmt.Sprintf("https://127.0.0.1:%d/socket", port), body)
				require.NoError(t, err)
				r.Host = "localhost"
				if protocol == "h2" {
					r.Header[":protocol"] = []string{"websocket"}
				} else {
					r.Proto = "websocket"
				}
				r.Header.Set("Sec-WebSocket-Version", "13")
				response, err := over[protocol].RoundTrip(r)
				require.NoError(t, err)
				defer response.Body.Close()
				defer typed.Close()
				if response.StatusCode != http.StatusOK {
					return response.StatusCode, ""
				}
				_, err = io.WriteString(typed, "hello")
				require.NoError(t, err)
				echo := make([]byte, 5)
				_, err = io.ReadFull(response.Body, echo)
				require.NoError(t, err)
				assert.Equal(t, "hello", string(echo))
				return response.StatusCode, response.Header.Get("X-Ratelimit-Remaining")
			}
			for left, protocol := range []string{"h3", "h2"} {
				status, remaining := open(protocol)
				assert.Equal(t, 200, status, protocol)
				assert.Equal(t, fmt.Sprint(1-left), remaining, protocol)
			}
			for _, protocol := range []string{"h2", "h3"} {
				status, _ := open(protocol)
				assert.Equal(t, 429, status, protocol)
			}
		})
	}
}
