package e2e

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tieredlimit/caddy-tieredlimit/internal/redistest"
)

// command runs caddy tiered-limit against the admin endpoint of a server, and returns what it prints.
func (c *caddyServer) command(t *testing.T, args ...string) (string, error) {
	t.Helper()
	cmd := exec.Command(caddyBinary(t), append([]string{"tiered-limit"}, append(args, "--address", "unix/"+c.socket)...)...)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + tempDir(t)}
	output, err := cmd.CombinedOutput()
	return string(output), err
}

// ask sends a request to the admin endpoint and returns the status and the body.
func (c *caddyServer) ask(t *testing.T, method, path, body string) (int, string) {
	t.Helper()
	request, err := http.NewRequest(method, "http://localhost"+path, strings.NewReader(body))
	require.NoError(t, err)
	a := do(t, c.admin, request)
	return a.status, a.body
}

func operatorSite(port int, limit, more string) string {
	return fmt.Sprintf(`
		%s
		:%d {
			bind 127.0.0.1
			log
			tiered_limit api {
				trusted_hops 1
				log_keys
				events
				tier ip %s
				tier dry 1/%s {
					key {http.request.header.X-Key}
					dry_run header
				}
			}
			respond ok
		}
	`, more, port, limit, always)
}

func TestOperatorAsksAndSteers(t *testing.T) {
	port := freePort(t)
	c := startCaddy(t, operatorSite(port, "3/"+always, "{\ndebug\n}"))
	client, url := clientFrom(t, "127.0.0.1"), fmt.Sprintf("http://127.0.0.1:%d/", port)
	from := func(address string) []string { return []string{"X-Forwarded-For", "9.9.9.9, " + address, "X-Key", "k"} }
	assert.Equal(t, 3, served(t, 8, client, url, from("203.0.113.7")...))
	assert.Equal(t, 2, served(t, 2, client, url, from("203.0.113.8")...))
	assert.Equal(t, "refused", get(t, client, url, from("203.0.113.9")...).field(t, "X-RateLimit-Dry-Run"))

	var events []logLine
	for _, l := range c.logLines("events") {
		if l.str("name") == "tiered_limit_refused" {
			events = append(events, l)
		}
	}
	require.Len(t, events, 1, "five refusals of one client in one window are one event")
	assert.Equal(t, "http.handlers.tiered_limit", events[0].str("origin"))
	data := events[0]["data"].(map[string]any)
	assert.Equal(t, "ip", data["tier"])
	assert.Equal(t, []any{"203.0.113.7"}, data["key"])

	out, err := c.command(t, "status")
	require.NoError(t, err, out)
	assert.Regexp(t, `(?m)^  ip +203\.0\.113\.7 +5 +5$`, out)
	assert.Regexp(t, `limits by ip, dry; client: entry 1 from the right of X-Forwarded-For`, out)

	explain := []string{"explain", "--peer", "127.0.0.1", "-H", "X-Forwarded-For: 9.9.9.9, 203.0.113.7", "-H", "X-Key: k"}
	for range 3 {
		out, err = c.command(t, explain...)
		require.NoError(t, err, out)
		assert.Regexp(t, `9\.9\.9\.9 +not read`, out)
		assert.Regexp(t, `203\.0\.113\.7 +the client`, out)
		assert.Contains(t, out, "outcome: refused, by ip, retry in")
	}
	out, err = c.command(t, "inspect", "--stack", "api", "--tier", "ip", "203.0.113.7")
	require.NoError(t, err, out)
	assert.Regexp(t, `3/1000000h +3 +0`, out)
	out, err = c.command(t, "reset", "--stack", "api", "--tier", "ip", "203.0.113.7")
	require.NoError(t, err, out)
	assert.Regexp(t, `3/1000000h +0 +3`, out)
	assert.Equal(t, 3, served(t, 5, client, url, from("203.0.113.7")...), "let back in")
	assert.Equal(t, 1, served(t, 3, client, url, from("203.0.113.8")...), "and nobody else")

	out, err = c.command(t, "reset", "--stack", "nobody", "--tier", "ip", "203.0.113.7")
	assert.Error(t, err)
	assert.Contains(t, out, "HTTP 404")
	assert.Contains(t, out, `there is no stack`)
	for _, q := range []struct {
		method, path, body string
		status             int
	}{
		{"POST", "/tiered_limit/", "", 405}, {"GET", "/tiered_limit/reset", "", 405}, {"GET", "/tiered_limit/x", "", 404},
		{"POST", "/tiered_limit/reset", "{", 400}, {"POST", "/tiered_limit/reset", strings.Repeat(" ", 65<<10), 413},
	} {
		status, body := c.ask(t, q.method, q.path, q.body)
		assert.Equal(t, q.status, status, "%s %s", q.method, q.path)
		var e struct{ Error string }
		assert.NoError(t, json.Unmarshal([]byte(body), &e))
		assert.NotEmpty(t, e.Error)
	}
	assert.NotContains(t, adminLog(c), "203.0.113.", "what is asked for stands in no log")
}

// adminLog is what the admin endpoint has logged.
func adminLog(c *caddyServer) string {
	var text strings.Builder
	for _, l := range c.logLines("admin.api") {
		line, _ := json.Marshal(l)
		text.Write(line)
	}
	return text.String()
}

// After a reload the admin API shows the new configuration, after a refused one still the old one, whether it was refused
// before or when it was started.
func TestOperatorSeesTheRunningConfig(t *testing.T) {
	port := freePort(t)
	c := startCaddy(t, operatorSite(port, "3/m", ""))
	limit := func() string {
		status, body := c.ask(t, http.MethodGet, "/tiered_limit/", "")
		require.Equal(t, http.StatusOK, status)
		var report struct {
			Stacks []struct {
				Handlers []any
				Tiers    []struct {
					Limits []struct{ Count int }
				}
			}
		}
		require.NoError(t, json.Unmarshal([]byte(body), &report))
		require.Len(t, report.Stacks, 1, body)
		require.Len(t, report.Stacks[0].Handlers, 1, body)
		return fmt.Sprint(report.Stacks[0].Tiers[0].Limits)
	}
	assert.Equal(t, "[{3}]", limit())
	require.NoError(t, c.reload(operatorSite(port, "4/m", "")))
	assert.Equal(t, "[{4}]", limit())
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { taken.Close() })
	for range 3 {
		assert.Error(t, c.reload(operatorSite(port, "5/m", "")+"\n:0 {\nnonsense\n}"))
		assert.Equal(t, "[{4}]", limit())
		assert.Error(t, c.reload(operatorSite(port, "6/m", "")+":8999 {\nbind 127.0.0.1\ntls /nowhere.pem /nowhere.key\n}"), "refused in Provision")
		assert.Equal(t, "[{4}]", limit())
		started := fmt.Sprintf("%shttp://%s {\nbind 127.0.0.1\n}", operatorSite(port, "7/m", ""), taken.Addr())
		assert.ErrorContains(t, c.reload(started), "address already in use", "refused in Start")
		assert.Equal(t, "[{4}]", limit())
	}
	require.NoError(t, c.reload(fmt.Sprintf(":%d {\nbind 127.0.0.1\n}", port)))
	_, body := c.ask(t, http.MethodGet, "/tiered_limit/", "")
	assert.JSONEq(t, `{"stacks":[]}`, body)
	require.NoError(t, c.reload(operatorSite(port, "8/m", "")))
	assert.Equal(t, "[{8}]", limit())
}

// Every metric that the dashboard and the alert rules use is in a scrape.
func TestOperatorScrapesEveryMetricOnTheDashboard(t *testing.T) {
	port := freePort(t)
	c := startCaddy(t, operatorSite(port, "3/m", ""))
	served(t, 5, clientFrom(t, "127.0.0.1"), fmt.Sprintf("http://127.0.0.1:%d/", port), "X-Forwarded-For", "203.0.113.7")
	scrape := c.metrics(t)
	names := make(map[string]bool)
	for _, file := range []string{"dashboard.json", "alerts.yml"} {
		text, err := os.ReadFile(filepath.Join("..", "examples", "grafana", file))
		require.NoError(t, err)
		for _, name := range regexp.MustCompile(`caddy_tiered_limit_[a-z_]+`).FindAllString(string(text), -1) {
			names[name] = true
		}
	}
	require.GreaterOrEqual(t, len(names), 9)
	for name := range names {
		assert.Regexp(t, `(?m)^`+name+`\{`, scrape)
	}
}

// A client that two replicas refuse from memory is let back in by a reset on one of them, on the other within 5 s.
func TestOperatorResetsOnEveryReplica(t *testing.T) {
	redis := redistest.Start(t)
	site := func(port int) string {
		return fmt.Sprintf(`
			:%d {
				bind 127.0.0.1
				tiered_limit shared {
					trusted_hops 1
					tier ip 2/%s
					store redis {
						address %s
						timeout 10s
					}
				}
				respond ok
			}
		`, port, always, redis.Addr())
	}
	ports := []int{freePort(t), freePort(t)}
	var replicas []*caddyServer
	var urls []string
	for _, port := range ports {
		replicas = append(replicas, startCaddy(t, site(port)))
		urls = append(urls, fmt.Sprintf("http://127.0.0.1:%d/", port))
	}
	client, from := clientFrom(t, "127.0.0.1"), []string{"X-Forwarded-For", "203.0.113.7"}
	assert.Equal(t, 2, served(t, 4, client, urls[0], from...))
	assert.Equal(t, 0, served(t, 4, client, urls[1], from...))
	assert.Regexp(t, `caddy_tiered_limit_local_refusals_total\{stack="shared"\} [1-9]`, replicas[1].metrics(t))
	assert.Regexp(t, `caddy_tiered_limit_decision_seconds_count\{store="redis"\} [1-9]`, replicas[1].metrics(t))

	start := time.Now()
	out, err := replicas[0].command(t, "reset", "--stack", "shared", "--tier", "ip", "203.0.113.7")
	require.NoError(t, err, out)
	assert.Regexp(t, `2/1000000h +0 +2`, out)
	assert.Equal(t, 1, served(t, 1, client, urls[0], from...), "at once")
	replicas[1].waitFor(t, "the other replica to hear of the reset", func() bool {
		return served(t, 1, client, urls[1], from...) == 1
	})
	t.Logf("the other replica served after %s", time.Since(start))
	assert.Equal(t, 0, served(t, 3, client, urls[1], from...), "and the limit is the same")
}
