package e2e

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// always is a window that began in 1970 and ends in 2084, so that no test can meet its end. (1000000 hours.)
const always = "1000000h"

// answer is a response, read to its end.
type answer struct {
	status int
	proto  string
	header http.Header
	body   string
}

// field is a header field that the answer must have no more than once.
func (a answer) field(t *testing.T, name string) string {
	t.Helper()
	values := a.header.Values(name)
	require.LessOrEqual(t, len(values), 1, "field lines of %s: %q", name, values)
	return a.header.Get(name)
}

// told is what the answer says about the limit: status and tier.
func (a answer) told() string {
	return strconv.Itoa(a.status) + " " + a.header.Get("X-RateLimit-Resource")
}

// clientFrom is an HTTP client that connects from a loopback address such as 127.0.0.5. It follows no redirects.
func clientFrom(t *testing.T, source string) *http.Client {
	t.Helper()
	dialer := &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(source)}, Timeout: patience}
	transport := &http.Transport{DialContext: dialer.DialContext, MaxIdleConnsPerHost: 64}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{
		Transport:     transport,
		Timeout:       patience,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// get sends a GET with header fields, given as pairs of name and value; a name may come twice.
func get(t *testing.T, c *http.Client, url string, fields ...string) answer {
	t.Helper()
	request, err := http.NewRequest(http.MethodGet, url, nil)
	require.NoError(t, err)
	for i := 0; i < len(fields); i += 2 {
		if fields[i] == "Host" {
			request.Host = fields[i+1]
			continue
		}
		request.Header[fields[i]] = append(request.Header[fields[i]], fields[i+1])
	}
	return do(t, c, request)
}

// do sends a request and reads the response.
func do(t *testing.T, c *http.Client, request *http.Request) answer {
	t.Helper()
	response, err := c.Do(request)
	require.NoError(t, err)
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	return answer{response.StatusCode, response.Proto, response.Header, string(body)}
}

// told sends a GET n times and returns what each answer says.
func told(t *testing.T, n int, c *http.Client, url string, fields ...string) []string {
	t.Helper()
	list := make([]string, n)
	for i := range list {
		list[i] = get(t, c, url, fields...).told()
	}
	return list
}

// served sends a GET n times and returns how many were answered 200. The others must be 429.
func served(t *testing.T, n int, c *http.Client, url string, fields ...string) int {
	t.Helper()
	count := 0
	for range n {
		switch a := get(t, c, url, fields...); a.status {
		case http.StatusOK:
			count++
		case http.StatusTooManyRequests:
		default:
			t.Fatalf("status %d, want 200 or 429; body %q", a.status, a.body)
		}
	}
	return count
}

// sendRaw sends bytes over a new connection from an address to a port and reads one response.
func sendRaw(t *testing.T, source string, port int, text string) (*http.Response, net.Conn, *bufio.Reader) {
	t.Helper()
	dialer := &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(source)}, Timeout: patience}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	conn, err := dialer.DialContext(ctx, "tcp", fmt.Sprintf("127.0.0.1:%d", port))
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	require.NoError(t, conn.SetDeadline(time.Now().Add(patience)))
	// A server that has seen enough may answer and hang up before it has read everything.
	_, _ = io.Copy(conn, strings.NewReader(text))
	reader := bufio.NewReader(conn)
	response, err := http.ReadResponse(reader, nil)
	require.NoError(t, err, "request of %d bytes: %.200q", len(text), text)
	return response, conn, reader
}

// inOneMinute observes something that must happen within one minute of the clock, and again if the minute turned
// meanwhile; so what it observes must begin afresh each time.
func inOneMinute[T any](t *testing.T, observe func(attempt int) T) T {
	t.Helper()
	for attempt := range 5 {
		before := time.Now().Truncate(time.Minute)
		seen := observe(attempt)
		if time.Now().Truncate(time.Minute).Equal(before) {
			return seen
		}
	}
	t.Fatal("five times in a row the minute turned during the test")
	panic("not reached")
}
