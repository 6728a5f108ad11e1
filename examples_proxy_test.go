package tieredlimit

import (
	"fmt"
	"github.com/tieredlimit/caddy-tieredlimit/internal/ports"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// The real proxies with their example configs, in front of their examples: whatever a client forges, it has one budget,
// and a client with another address has another.
func TestExampleProxies(t *testing.T) {
	for _, c := range []struct {
		name, file string
		args       func(file, dir string) []string
	}{
		{"nginx", "nginx.conf", func(file, dir string) []string { return []string{"-p", dir, "-c", file} }},
		{"haproxy", "haproxy.cfg", func(file, _ string) []string { return []string{"-db", "-f", file} }},
	} {
		t.Run(c.name, func(t *testing.T) {
			program, err := exec.LookPath(c.name)
			if err != nil {
				t.Skip(c.name + " is not installed")
			}
			e := newExample(t, readText(t, filepath.Join("examples", c.name, "Caddyfile")))
			caddy := httptest.NewServer(e.server(":8080"))
			t.Cleanup(caddy.Close)
			dir := t.TempDir()
			config := strings.NewReplacer(
				"127.0.0.1:8080", caddy.Listener.Addr().String(),
				"127.0.0.1:8000", freeAddress(t),
				"/tmp/", dir+"/",
			).Replace(readText(t, filepath.Join("examples", c.name, c.file)))
			file := filepath.Join(dir, c.file)
			require.NoError(t, os.WriteFile(file, []byte(config), 0o600))
			start(t, program, c.args(file, dir)...)

			front := regexp.MustCompile(`(?:listen|bind) (127\.0\.0\.1:\d+)`).FindStringSubmatch(config)[1]
			waitFor(t, front)
			assert.Equal(t, 60, servedOverWire(t, front, "127.0.0.1", 70))
			assert.Equal(t, 60, servedOverWire(t, front, "127.0.0.2", 70))
		})
	}
}

// servedOverWire sends requests from an address, each with another forged X-Forwarded-For, and returns how many were
// served.
func servedOverWire(t *testing.T, to, from string, n int) int {
	t.Helper()
	dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
	transport := &http.Transport{DialContext: dialer.DialContext}
	defer transport.CloseIdleConnections()
	served := 0
	for i := range n {
		r, err := http.NewRequest(http.MethodGet, "http://"+to+"/", nil)
		require.NoError(t, err)
		r.Header.Set("X-Forwarded-For", fmt.Sprintf("192.0.2.%d", i))
		response, err := transport.RoundTrip(r)
		require.NoError(t, err)
		require.NoError(t, response.Body.Close())
		switch response.StatusCode {
		case http.StatusOK:
			served++
		case http.StatusTooManyRequests:
		default:
			t.Fatalf("status %d from %s, want 200 or 429", response.StatusCode, to)
		}
	}
	return served
}

// freeAddress is an address on which nothing listens.
func freeAddress(t *testing.T) string {
	t.Helper()
	return fmt.Sprintf("127.0.0.1:%d", ports.Free(t))
}

// start runs a program until the test ends.
func start(t *testing.T, program string, args ...string) {
	t.Helper()
	command := exec.Command(program, args...)
	var output strings.Builder
	command.Stdout, command.Stderr = &output, &output
	command.WaitDelay = 10 * time.Second // for children that outlive it
	require.NoError(t, command.Start())
	t.Cleanup(func() {
		if err := command.Process.Signal(syscall.SIGTERM); err != nil {
			t.Errorf("ending %s: %v", program, err)
		}
		_ = command.Wait() // it was told to end
		if t.Failed() {
			t.Logf("%s said:\n%s", program, output.String())
		}
	})
}

// waitFor waits until a server that was just started accepts connections.
func waitFor(t *testing.T, address string) {
	t.Helper()
	require.Eventually(t, func() bool {
		conn, err := net.Dial("tcp", address)
		return err == nil && conn.Close() == nil
	}, 20*time.Second, 10*time.Millisecond, "nothing listens on %s", address)
}
