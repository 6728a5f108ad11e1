package tieredlimit

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// pipeListener hands out one end of each pipe that is dialled.
type pipeListener struct{ conns chan net.Conn }

func (l *pipeListener) Accept() (net.Conn, error) {
	conn, ok := <-l.conns
	if !ok {
		return nil, net.ErrClosed
	}
	return conn, nil
}
func (l *pipeListener) Close() error   { return nil }
func (l *pipeListener) Addr() net.Addr { return &net.TCPAddr{IP: net.IPv4(203, 0, 113, 1), Port: 1} }

// peerConn is a connection of a client with an address.
type peerConn struct{ net.Conn }

func (peerConn) RemoteAddr() net.Addr { return &net.TCPAddr{IP: net.IPv4(203, 0, 113, 1), Port: 50000} }

// overConnections serves the first site of a configuration over connections until the test ends, and returns how to dial one.
func overConnections(t *testing.T, e *edge) func() net.Conn {
	t.Helper()
	listener := &pipeListener{conns: make(chan net.Conn)}
	server := &http.Server{Handler: e.serverFor("")}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = server.Serve(listener)
	}()
	t.Cleanup(func() {
		close(listener.conns)
		<-done
		_ = server.Close()
	})
	return func() net.Conn {
		ours, theirs := net.Pipe()
		listener.conns <- peerConn{theirs}
		return ours
	}
}

// A refused request is answered at once, whatever its body: it is not waited for, and the connection goes on only where the
// body has come.
func TestRefusalsDoNotWaitForBodies(t *testing.T) {
	long := strings.Repeat("x", 300<<10)
	for _, c := range []struct {
		name, head, body string
		goesOn           bool
	}{
		{"no body", "Content-Length: 0\r\n", "", true},
		{"a body that has come", "Content-Length: 5\r\n", "hello", true},
		{"chunks that have come", "Transfer-Encoding: chunked\r\n", "5\r\nhello\r\n0\r\n\r\n", true},
		{"the largest that is dropped", "Content-Length: 65536\r\n", long[:64<<10], true},
		{"a body that does not come", "Content-Length: 5\r\n", "", false},
		{"a body of which a part comes", "Content-Length: 500\r\n", "hello", false},
		{"chunks without an end", "Transfer-Encoding: chunked\r\n", "5\r\nhello\r\n", false},
		{"a client that asks first", "Content-Length: 5\r\nExpect: 100-continue\r\n", "", false},
		{"a large body", "Content-Length: 300000\r\n", "hello", false},
		{"chunks without measure", "Transfer-Encoding: chunked\r\n", "4b000\r\n" + long, false},
	} {
		for _, log := range []string{"", "log\n"} { // an access log makes Caddy wrap the body
			for status, block := range map[int]string{429: "tier ip 1/d", 503: "tier ip 1/d\nstore away"} {
				t.Run(fmt.Sprint(c.name, " ", status, " ", log != ""), func(t *testing.T) {
					e := newEdge(t, fmt.Sprintf(":8080 {\n%stiered_limit unread {\ntrusted_hops 0\n%s\n}\nrespond ok\n}", log, block))
					defer e.close()
					if status == 429 {
						require.Equal(t, 1, e.served(1, request{}))
					}
					synctest.Test(t, func(t *testing.T) {
						conn := overConnections(t, e)()
						defer conn.Close()
						begin := time.Now()
						go func() {
							_, _ = io.WriteString(conn, "POST / HTTP/1.1\r\nHost: localhost\r\n"+c.head+"\r\n"+c.body)
						}()
						reader := bufio.NewReader(conn)
						response, err := http.ReadResponse(reader, nil)
						require.NoError(t, err)
						_, err = io.Copy(io.Discard, response.Body)
						require.NoError(t, err)
						assert.Equal(t, status, response.StatusCode)
						assert.LessOrEqual(t, time.Since(begin), unreadPatience)
						assert.Equal(t, !c.goesOn, response.Close, "Connection: close")
						if c.goesOn {
							go func() { _, _ = io.WriteString(conn, "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n") }()
							response, err = http.ReadResponse(reader, nil)
							require.NoError(t, err, "the connection serves another request")
							assert.Equal(t, status, response.StatusCode)
							return
						}
						_, err = reader.ReadByte()
						assert.Error(t, err, "the connection is closed")
						assert.LessOrEqual(t, time.Since(begin), 2*time.Second)
					})
				})
			}
		}
	}
}
