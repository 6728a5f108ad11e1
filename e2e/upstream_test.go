package e2e

import (
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// sigterm asks a process to end.
const sigterm = syscall.SIGTERM

// newUpstream serves a handler until the test ends and returns its address.
func newUpstream(t *testing.T, handler http.HandlerFunc) string {
	t.Helper()
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	return server.Listener.Addr().String()
}

// listens tells whether something accepts connections on a port.
func listens(port int) bool {
	conn, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", port))
	if err != nil {
		return false
	}
	_ = conn.Close()
	return true
}

// metricSum adds up the samples of a metric whose labels contain a text. There must be one.
func metricSum(t *testing.T, scrape, name, labels string) int64 {
	t.Helper()
	sum, found := 0.0, false
	for line := range strings.Lines(scrape) {
		series, value, ok := strings.Cut(strings.TrimSpace(line), "} ")
		if !ok || !strings.HasPrefix(series, name+"{") || !strings.Contains(series, labels) {
			continue
		}
		v, err := strconv.ParseFloat(value, 64)
		require.NoError(t, err, line)
		sum, found = sum+v, true
	}
	require.True(t, found, "no sample of %s with %s", name, labels)
	return int64(sum)
}
