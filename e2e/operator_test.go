package e2e

import (
	"encoding/json"
	"fmt"
	"github.com/tieredlimit/caddy-tieredlimit/internal/ports"
	"maps"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
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
	port := ports.Free(t)
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
	assert.Contains(t, out, `Error: there is no stack "nobody"; there are "api"`)
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
	port := ports.Free(t)
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

// families are the metrics, and the labels that each of their series has.
var families = map[string][]string{
	"requests_total": {"outcome", "stack"}, "refusals_total": {"dry_run", "stack", "tier"}, "skipped_total": {"stack", "tier"},
	"uncertain_total":       {"stack", "tier"},
	"store_away":            {"stack"},
	"client_fallback_total": {"reason", "stack"}, "counters": {"stack"}, "overflow_total": {"stack"},
	"local_refusals_total": {"stack"}, "store_errors_total": {"kind", "store"}, "decision_seconds_bucket": {"store", "le"},
	"decision_seconds_sum": {"store"}, "decision_seconds_count": {"store"},
}

// seriesOf are the series of the module in a scrape, with their values.
func seriesOf(scrape string) map[string]string {
	list := make(map[string]string)
	for line := range strings.Lines(scrape) {
		if name, value, found := strings.Cut(line, " "); found && strings.HasPrefix(name, "caddy_tiered_limit_") {
			list[name] = strings.TrimSpace(value)
		}
	}
	return list
}

// A scrape has every metric, with its labels and the values that the requests make it have; it has them still after a
// reload, and no more series however many clients there are.
func TestOperatorScrapesEveryMetric(t *testing.T) {
	port := ports.Free(t)
	c := startCaddy(t, operatorSite(port, "3/"+always, ""))
	client, url := clientFrom(t, "127.0.0.1"), fmt.Sprintf("http://127.0.0.1:%d/", port)
	served(t, 5, client, url, "X-Forwarded-For", "203.0.113.7")
	served(t, 2, client, url, "X-Forwarded-For", "unknown", "X-Key", "k")
	get(t, client, url, "X-Key", "another")
	preflight, err := http.NewRequest(http.MethodOptions, url, nil)
	require.NoError(t, err)
	preflight.Header.Set("Origin", "https://app.example.com")
	preflight.Header.Set("Access-Control-Request-Method", "POST")
	do(t, client, preflight)

	series := seriesOf(c.metrics(t))
	seen := make(map[string]bool)
	for name := range series {
		family, labels, _ := strings.Cut(strings.TrimPrefix(name, "caddy_tiered_limit_"), "{")
		var got []string
		for _, label := range regexp.MustCompile(`([a-z_]+)="`).FindAllStringSubmatch(labels, -1) {
			got = append(got, label[1])
		}
		assert.Equal(t, families[family], got, name)
		seen[family] = true
	}
	assert.Len(t, seen, len(families), "%v", seen)
	for name, want := range map[string]string{
		`requests_total{outcome="served",stack="api"}`: "5", `requests_total{outcome="refused",stack="api"}`: "2",
		`requests_total{outcome="dry_refused",stack="api"}`: "1", `requests_total{outcome="preflight",stack="api"}`: "1",
		`refusals_total{dry_run="false",stack="api",tier="ip"}`: "2", `refusals_total{dry_run="true",stack="api",tier="dry"}`: "1",
		`skipped_total{stack="api",tier="dry"}`: "5", `client_fallback_total{reason="bad_entry",stack="api"}`: "2",
		`client_fallback_total{reason="short_chain",stack="api"}`: "1", `counters{stack="api"}`: "5", `overflow_total{stack="api"}`: "0",
		`local_refusals_total{stack="api"}`: "0",
	} {
		assert.Equal(t, want, series["caddy_tiered_limit_"+name], name)
	}

	require.NoError(t, c.reload(operatorSite(port, "3/"+always, "{\ndebug\n}")))
	for i := range 200 {
		get(t, client, url, "X-Forwarded-For", fmt.Sprintf("198.51.100.%d", i), "X-Key", fmt.Sprint("client", i))
	}
	after := seriesOf(c.metrics(t))
	assert.Equal(t, "205", after[`caddy_tiered_limit_requests_total{outcome="served",stack="api"}`], "counting goes on")
	assert.ElementsMatch(t, slices.Collect(maps.Keys(series)), slices.Collect(maps.Keys(after)))
	for _, file := range []string{"dashboard.json", "alerts.yml"} {
		text, err := os.ReadFile(filepath.Join("..", "examples", "grafana", file))
		require.NoError(t, err)
		names := regexp.MustCompile(`caddy_tiered_limit_([a-z_]+)`).FindAllStringSubmatch(string(text), -1)
		require.NotEmpty(t, names)
		for _, name := range names {
			assert.Contains(t, families, name[1], file)
		}
	}
}

// Without log_keys nobody is named, but who is suspected can be looked up by the fingerprint.
func TestOperatorLooksUpAFingerprint(t *testing.T) {
	port := ports.Free(t)
	c := startCaddy(t, fmt.Sprintf(`
		:%d {
			bind 127.0.0.1
			tiered_limit quiet {
				trusted_hops 0
				tier ip 1/%[2]s
				tier writes 5/%[2]s {
					key user-{http.auth.user.id}
					match {
						method POST
						path /posts
						host api.example.com
					}
				}
				tier global 100/%[2]s
			}
			respond ok
		}
	`, port, always))
	assert.Equal(t, 1, served(t, 4, clientFrom(t, "127.0.0.5"), fmt.Sprintf("http://127.0.0.1:%d/", port)))
	out, err := c.command(t, "status")
	require.NoError(t, err, out)
	assert.NotContains(t, out, "127.0.0.5")
	worst := regexp.MustCompile(`(?m)^  ip +([0-9a-f]{12,}) +3 +3$`).FindStringSubmatch(out)
	require.NotNil(t, worst, out)
	out, err = c.command(t, "inspect", "--stack", "quiet", "--tier", "ip", "127.0.0.5")
	require.NoError(t, err, out)
	assert.Contains(t, out, "(fingerprint "+worst[1]+")")
	out, err = c.command(t, "inspect", "--stack", "quiet", "--tier", "global", "--json")
	require.NoError(t, err, out)
	var counter struct {
		Limits []struct{ Used, Remaining int }
	}
	require.NoError(t, json.Unmarshal([]byte(out), &counter))
	assert.Equal(t, 1, counter.Limits[0].Used)
	assert.Equal(t, 99, counter.Limits[0].Remaining)

	explain := []string{"explain", "--stack", "quiet", "--peer", "192.0.2.1", "--set", "http.auth.user.id=alice"}
	out, err = c.command(t, explain...)
	require.NoError(t, err, out)
	assert.Regexp(t, `(?m)^  writes +- .*it does not match the request$`, out)
	out, err = c.command(t, append(explain, "-X", "POST", "--path", "/posts", "--host", "api.example.com")...)
	require.NoError(t, err, out)
	assert.Regexp(t, `(?m)^  writes +user-alice +5/1000000h +0 +5 .*allows$`, out)
	assert.Contains(t, out, "outcome: served")
}

// The command and its subcommands say what they do, and what is wrong with a call.
func TestOperatorReadsHelp(t *testing.T) {
	run := func(args ...string) (string, error) {
		out, err := exec.Command(caddyBinary(t), args...).CombinedOutput()
		return string(out), err
	}
	out, err := run("help", "tiered-limit")
	require.NoError(t, err, out)
	for _, name := range []string{"status", "explain", "inspect", "reset", "replay"} {
		assert.Regexp(t, `(?m)^  `+name+` +[A-Z]`, out)
		long, err := run("help", "tiered-limit", name)
		require.NoError(t, err, long)
		assert.Contains(t, long, "caddy tiered-limit "+name)
		assert.Contains(t, long, "\nFlags:\n")
	}
	for _, args := range [][]string{{"nonsense"}, {"status", "--nonsense"}, {"replay", "/no/such.log"}, {"reset"}} {
		out, err := run(append([]string{"tiered-limit"}, args...)...)
		assert.Error(t, err, "%v", args)
		assert.Contains(t, out, "Error: ", "%v", args)
	}
}

// fail2ban finds those whom a live Caddy has refused, by the access log that it writes, whatever they send.
func TestOperatorBansByTheAccessLog(t *testing.T) {
	program := requireProgram(t, "fail2ban-regex", "fail2ban")
	port, log := ports.Free(t), filepath.Join(tempDir(t), "access.log")
	c := startCaddy(t, fmt.Sprintf(`
		{
			servers {
				trusted_proxies static 127.0.0.1/32
				trusted_proxies_strict
			}
		}
		:%d {
			bind 127.0.0.1
			log {
				output file %s
			}
			tiered_limit {
				trusted_hops 1
				log_keys
				tier login 2/%[3]s {
					key {http.tiered_limit.client_ip}
					match path /login
				}
				tier ip 4/%[3]s
			}
			respond ok
		}
	`, port, log, always))
	url := fmt.Sprintf("http://127.0.0.1:%d/", port)
	proxy, direct := clientFrom(t, "127.0.0.1"), clientFrom(t, "127.0.0.9")
	lie := `","client_ip":"192.0.2.66","status":429,"tiered_limit_outcome":"refused","tiered_limit_tier":"ip"}`
	assert.Equal(t, 4, served(t, 6, proxy, url, "X-Forwarded-For", "192.0.2.66, 203.0.113.7", "User-Agent", lie))
	assert.Equal(t, 2, served(t, 3, proxy, url+"login", "X-Forwarded-For", "2001:db8::7", "Referer", lie))
	assert.Equal(t, 4, served(t, 5, direct, url, "X-Forwarded-For", "192.0.2.66"))
	assert.Equal(t, 4, served(t, 4, proxy, url, "X-Forwarded-For", "203.0.113.8", "User-Agent", lie))
	c.waitFor(t, "the last line of the log", func() bool {
		text, _ := os.ReadFile(log)
		return strings.Count(string(text), "\n") == 6+3+5+4
	})
	filter, err := filepath.Abs("../examples/fail2ban/filter.d/caddy-tiered-limit.conf")
	require.NoError(t, err)
	for suffix, want := range map[string][]string{
		"": {"127.0.0.9", "2001:db8::7", "203.0.113.7", "203.0.113.7"}, "[tier=login]": {"2001:db8::7"},
	} {
		out, err := exec.Command(program, "--out", "ip", log, filter+suffix).CombinedOutput()
		require.NoError(t, err, "%s", out)
		got := strings.Fields(string(out))
		slices.Sort(got)
		assert.Equal(t, want, got)
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
	ports := []int{ports.Free(t), ports.Free(t)}
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
