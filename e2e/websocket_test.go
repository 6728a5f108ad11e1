package e2e

import (
	"fmt"
	"github.com/tieredlimit/caddy-tieredlimit/internal/ports"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
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
