// Package e2e runs a Caddy that was built as users build it, behind real proxies and in front of real clients, on
// loopback sockets.
package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	// These make go test run the package anew when the module changes, and compile all that the build below needs
	// before the time of the test runs.
	_ "github.com/caddyserver/caddy/v2/modules/standard"
	_ "github.com/tieredlimit/caddy-tieredlimit"
)

// caddyServer is a running Caddy with this module. Its admin endpoint is a unix socket.
type caddyServer struct {
	*process
	socket string
	admin  *http.Client
}

// startCaddy runs Caddy with a Caddyfile until the test ends, with environment variables of the form NAME=value. It
// returns when the servers are started.
func startCaddy(t *testing.T, caddyfile string, env ...string) *caddyServer {
	t.Helper()
	dir := tempDir(t)
	config := filepath.Join(dir, "Caddyfile")
	require.NoError(t, os.WriteFile(config, []byte(caddyfile), 0o600))
	c := &caddyServer{socket: filepath.Join(dir, "admin.sock")}
	c.admin = &http.Client{Timeout: time.Minute, Transport: &adminTransport{http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", c.socket)
		},
	}}}
	cmd := exec.Command(caddyBinary(t), "run", "--config", config, "--adapter", "caddyfile")
	cmd.Dir = dir
	cmd.Env = append([]string{"PATH=" + os.Getenv("PATH"), "HOME=" + dir, "CADDY_ADMIN=unix/" + c.socket}, env...)
	t.Cleanup(func() { c.checkOutput(t) }) // when the process has ended
	c.process = startProcess(t, cmd)
	c.waitFor(t, "caddy to start", func() bool { return strings.Contains(c.output(), `"msg":"serving initial configuration"`) })
	return c
}

// adminTransport sends a request again when the connection ends without an answer: each load replaces the admin endpoint,
// which may close a connection just as a request is written to it. Nothing that tests ask of it does harm if done twice.
type adminTransport struct{ http.Transport }

// RoundTrip implements [http.RoundTripper].
func (a *adminTransport) RoundTrip(request *http.Request) (*http.Response, error) {
	for attempt := 0; ; attempt++ {
		response, err := a.Transport.RoundTrip(request)
		ended := errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
		if !ended || attempt == 5 {
			return response, err
		}
		if request.GetBody != nil {
			if request.Body, err = request.GetBody(); err != nil {
				return nil, err
			}
		}
	}
}

// checkOutput fails the test for what no Caddy may ever print.
func (c *caddyServer) checkOutput(t *testing.T) {
	if c.process == nil {
		return
	}
	for line := range strings.Lines(c.output()) {
		for _, bad := range []string{"panic", "DATA RACE", "fatal error"} {
			if strings.Contains(line, bad) {
				t.Errorf("caddy printed: %.500s", line)
			}
		}
	}
}

// reload loads a Caddyfile through the admin endpoint and returns Caddy's complaint, if any.
func (c *caddyServer) reload(caddyfile string) error {
	request, err := http.NewRequest(http.MethodPost, "http://localhost/load", strings.NewReader(caddyfile))
	if err != nil {
		return err
	}
	request.Header.Set("Content-Type", "text/caddyfile")
	request.Header.Set("Cache-Control", "must-revalidate") // load it even if it is the same
	response, err := c.admin.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		return err
	}
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("status %d: %s", response.StatusCode, body)
	}
	return nil
}

// metrics is what a scrape returns.
func (c *caddyServer) metrics(t *testing.T) string {
	t.Helper()
	response, err := c.admin.Get("http://localhost/metrics")
	require.NoError(t, err)
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, response.StatusCode, "scraping: %s", body)
	return string(body)
}

// logLine is a line of Caddy's log.
type logLine map[string]any

func (l logLine) str(field string) string {
	s, _ := l[field].(string)
	return s
}

// logLines are the lines of a logger and those below it.
func (c *caddyServer) logLines(logger string) []logLine {
	var found []logLine
	for text := range strings.Lines(c.output()) {
		var l logLine
		if json.Unmarshal([]byte(text), &l) != nil {
			continue
		}
		if name := l.str("logger"); name == logger || strings.HasPrefix(name, logger+".") {
			found = append(found, l)
		}
	}
	return found
}

// moduleLogger is the name of the module's loggers.
const moduleLogger = "http.handlers.tiered_limit"

var buildOnce = sync.OnceValues(buildCaddy)

// buildDir is where the binary is, until TestMain removes it.
var buildDir string

// caddyBinary is the path of a Caddy with this module, built at first use.
func caddyBinary(t *testing.T) string {
	t.Helper()
	path, err := buildOnce()
	require.NoError(t, err)
	return path
}

// buildCaddy builds Caddy by xcaddy, in the version that the module requires. The flags are those of go test, so that
// its build cache serves, with the race detector if the tests have it.
func buildCaddy() (string, error) {
	root, err := filepath.Abs("..")
	if err != nil {
		return "", err
	}
	version, err := goOutput(root, "list", "-m", "-f", "{{.Version}}", "github.com/caddyserver/caddy/v2")
	if err != nil {
		return "", err
	}
	cgo, err := goOutput(root, "env", "CGO_ENABLED")
	if err != nil {
		return "", err
	}
	if buildDir, err = os.MkdirTemp("", "tiered-limit-build"); err != nil {
		return "", err
	}
	path := filepath.Join(buildDir, "caddy")
	cmd := exec.Command("go", "tool", "xcaddy", "build", version,
		"--with", "github.com/tieredlimit/caddy-tieredlimit@v0.0.0="+root, "--output", path)
	cmd.Dir = root
	cmd.Env = append(os.Environ(), "CGO_ENABLED="+cgo, "XCADDY_GO_BUILD_FLAGS=-buildvcs=false")
	if raceEnabled {
		cmd.Env = append(cmd.Env, "XCADDY_RACE_DETECTOR=1")
	}
	if output, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("building caddy: %w\n%s", err, output)
	}
	return path, nil
}

// goOutput runs the go command and returns the line that it prints.
func goOutput(dir string, args ...string) (string, error) {
	cmd := exec.Command("go", args...)
	cmd.Dir = dir
	output, err := cmd.Output()
	if err != nil {
		var failed *exec.ExitError
		if errors.As(err, &failed) {
			err = fmt.Errorf("%w: %s", err, failed.Stderr)
		}
		return "", fmt.Errorf("go %s: %w", strings.Join(args, " "), err)
	}
	return strings.TrimSpace(string(output)), nil
}

func TestMain(m *testing.M) {
	code := m.Run()
	if buildDir != "" {
		_ = os.RemoveAll(buildDir)
	}
	os.Exit(code)
}
