package e2e

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"github.com/tieredlimit/caddy-tieredlimit/internal/ports"
	"io"
	"maps"
	"math/rand/v2"
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

	"github.com/tieredlimit/caddy-tieredlimit/internal/replay"
)

// replayedSite limits in windows that turn during a test and in one that does not, in every way of charging, behind two
// proxies. Its access log is a file.
func replayedSite(port int, stack, log string) string {
	return fmt.Sprintf(`
		:%[1]d {
			bind 127.0.0.1
			log {
				output file %[3]s
			}
			tiered_limit %[2]s {
				trusted_hops 2
				tier dry 2/500ms 8/%[4]s {
					key {http.tiered_limit.client_ip}
					dry_run
				}
				tier ip 3/500ms 12/%[4]s
				tier caller 4/500ms 25/%[4]s {
					key {http.request.header.X-Api-Key}
					charge checked
				}
				tier write 2/500ms 10/%[4]s {
					key {http.tiered_limit.client_ip}
					match method POST
				}
				tier global 60/500ms 500/%[4]s
				exempt /health
			}
			respond ok
		}
	`, port, stack, log, always)
}

// replayedWindow is the window that turns.
const replayedWindow = 500 * time.Millisecond

// mixedRequest is a request of one of some clients: many send little and a few send much, some write a chain of their own
// in front of what the two proxies append, in one field line or in two.
func mixedRequest(t *testing.T, rnd *rand.Rand, port int) *http.Request {
	t.Helper()
	client := fmt.Sprintf("203.0.113.%d", 1+rnd.IntN(60))
	switch rnd.IntN(8) {
	case 0, 1:
		client = fmt.Sprintf("198.51.100.%d", 1+rnd.IntN(2))
	case 2:
		client = fmt.Sprintf("2001:db8:%x::%x", rnd.IntN(3), rnd.IntN(1000))
	}
	method := []string{http.MethodGet, http.MethodGet, http.MethodPost}[rnd.IntN(3)]
	path := []string{"/", "/health", "/posts?page=2", "/a%2fb"}[rnd.IntN(4)]
	request, err := http.NewRequest(method, fmt.Sprintf("http://127.0.0.1:%d%s", port, path), nil)
	require.NoError(t, err)
	chain := []string{client + ", 192.0.2.250"}
	if strings.HasSuffix(client, "7") {
		made := fmt.Sprintf("10.9.%d.%d", rnd.IntN(256), rnd.IntN(256))
		if chain = []string{made + ", " + chain[0]}; rnd.IntN(2) == 0 {
			chain = []string{made, client + ", 192.0.2.250"}
		}
	}
	request.Header["X-Forwarded-For"] = chain
	if rnd.IntN(4) > 0 {
		request.Header.Set("X-Api-Key", fmt.Sprintf("key%d", rnd.IntN(40)))
	}
	return request
}

// liveRefusals are the refusals of a live server by tier.
type liveRefusals map[string]int64

// serveMixed sends a mix of requests and returns the refusals by tier, the dry ones too.
func serveMixed(t *testing.T, c *caddyServer, port, n int, stack, log string) liveRefusals {
	t.Helper()
	rnd := rand.New(rand.NewPCG(21, 22))
	// Proxies at two addresses.
	clients := []*http.Client{clientFrom(t, "127.0.0.2"), clientFrom(t, "127.0.0.3")}
	refusals := make(liveRefusals)
	for range n {
		request := mixedRequest(t, rnd, port)
		awayFromTheEdge(replayedWindow)
		switch a := do(t, clients[rnd.IntN(2)], request); a.status {
		case http.StatusOK:
		case http.StatusTooManyRequests:
			refusals[a.field(t, "X-RateLimit-Resource")]++
		default:
			t.Fatalf("status %d", a.status)
		}
	}
	c.waitFor(t, "the last line of the log", func() bool {
		text, _ := os.ReadFile(log)
		return bytes.Count(text, []byte("\n")) == n
	})
	refusals["dry"] = c.number(t, fmt.Sprintf(`caddy_tiered_limit_refusals_total{dry_run="true",stack=%q,tier="dry"}`, stack))
	return refusals
}

// awayFromTheEdge returns at a time that is not near the edge of a window.
func awayFromTheEdge(window time.Duration) {
	const margin = 40 * time.Millisecond
	for {
		now := time.Now()
		since := now.Sub(now.Truncate(window))
		switch {
		case since < margin:
			<-time.After(margin - since)
		case window-since < margin:
			<-time.After(window - since)
		default:
			return
		}
	}
}

// number is the value of one series, 0 if there is none.
func (c *caddyServer) number(t *testing.T, series string) int64 {
	t.Helper()
	match := regexp.MustCompile(`(?m)^` + regexp.QuoteMeta(series) + ` (\d+)$`).FindStringSubmatch(c.metrics(t))
	if match == nil {
		return 0
	}
	var n int64
	require.NoError(t, json.Unmarshal([]byte(match[1]), &n))
	return n
}

// byEachOf reports whether each of some tiers has refused requests, which depends on when windows turn.
func (l liveRefusals) byEachOf(tiers ...string) bool {
	return !slices.ContainsFunc(tiers, func(tier string) bool { return l[tier] == 0 })
}

// nearAnEdge tells whether a request of a log was served within 10 ms of the edge of a window.
func nearAnEdge(t *testing.T, log []byte, window time.Duration) bool {
	t.Helper()
	for line := range bytes.Lines(log) {
		var l struct{ TS, Duration float64 }
		require.NoError(t, json.Unmarshal(line, &l))
		const margin = 0.01
		first, last := l.TS-l.Duration-margin, l.TS+margin
		if int64(first/window.Seconds()) != int64(last/window.Seconds()) {
			return true
		}
	}
	return false
}

// runReplay runs caddy tiered-limit replay and returns what it prints on standard output.
func runReplay(t *testing.T, stdin io.Reader, args ...string) string {
	t.Helper()
	cmd := exec.Command(caddyBinary(t), append([]string{"tiered-limit", "replay"}, args...)...)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + tempDir(t)}
	cmd.Dir = tempDir(t)
	cmd.Stdin = stdin
	var complaints bytes.Buffer
	cmd.Stderr = &complaints
	out, err := cmd.Output()
	require.NoError(t, err, "%s", &complaints)
	return string(out)
}

// A log that Caddy has written while it limited, replayed with the config that it ran with, shows the refusals that
// there were: by each tier, exactly.
func TestReplayOfALiveLog(t *testing.T) {
	const n = 1500
	port, dir := ports.Free(t), tempDir(t)
	var c *caddyServer
	var config, log string
	var live liveRefusals
	for attempt := 0; ; attempt++ {
		require.Less(t, attempt, 5, "five times in a row a request met the edge of a window, or a tier refused none: %v", live)
		stack := fmt.Sprint("replayed-", attempt)
		log = filepath.Join(dir, stack+".log")
		site := replayedSite(port, stack, log)
		config = filepath.Join(dir, stack+".Caddyfile")
		require.NoError(t, os.WriteFile(config, []byte(site), 0o600))
		if c == nil {
			c = startCaddy(t, site)
		} else {
			require.NoError(t, c.reload(site))
		}
		live = serveMixed(t, c, port, n, stack, log)
		text, err := os.ReadFile(log)
		require.NoError(t, err)
		if !nearAnEdge(t, text, replayedWindow) && live.byEachOf("dry", "ip", "caller", "write", "global") {
			break
		}
	}
	text, err := os.ReadFile(log)
	require.NoError(t, err)

	asJSON := runReplay(t, nil, "--config", config, "--json", log)
	checkReplayed(t, asJSON, live, n)
	asText := runReplay(t, nil, "--config", config, "--html", filepath.Join(dir, "report.html"), log)
	checkReplayedText(t, asText, live)
	checkReplayedPage(t, filepath.Join(dir, "report.html"), live)

	packed := gzipped(t, text)
	other := filepath.Join(dir, "access.log.gz")
	require.NoError(t, os.WriteFile(other, packed, 0o600))
	for name, got := range map[string]string{
		other:            runReplay(t, nil, "--config", config, other),
		"standard input": runReplay(t, bytes.NewReader(text), "--config", config),
	} {
		assert.Equal(t, strings.ReplaceAll(asText, log, name), got)
	}
	got := runReplay(t, bytes.NewReader(packed), "--config", config, "--json", "-")
	assert.Equal(t, strings.ReplaceAll(asJSON, log, "standard input"), got)

	// A log that is cut off in the middle is used as far as it goes.
	require.NoError(t, os.WriteFile(other, packed[:len(packed)/2], 0o600))
	got = runReplay(t, nil, "--config", config, other)
	assert.Regexp(t, `[1-9]\d*\s+requests;\s+the\s+compressed\s+data\s+ends\s+early`, got)
}

func checkReplayed(t *testing.T, asJSON string, live liveRefusals, n int64) {
	t.Helper()
	var rep replay.Report
	require.NoError(t, json.Unmarshal([]byte(asJSON), &rep))
	require.Len(t, rep.Stacks, 1)
	got := make(liveRefusals)
	for _, tier := range rep.Stacks[0].Tiers {
		got[tier.Tier] = tier.Refused + tier.DryRefused
	}
	assert.Equal(t, live, got)
	all := live["ip"] + live["caller"] + live["write"] + live["global"]
	assert.Equal(t, all, rep.Stacks[0].Outcomes["refused"])
	assert.Equal(t, all, rep.Log.Recorded)
	assert.Equal(t, n, rep.Log.Requests)
	assert.Empty(t, rep.Log.Bad)
	assert.Empty(t, rep.Stacks[0].Fallbacks)
	require.Len(t, rep.Topology, 1)
	require.NotNil(t, rep.Topology[0].Hops, rep.Topology[0].Reason)
	assert.Equal(t, 2, *rep.Topology[0].Hops, rep.Topology[0].Reason)
	require.NotNil(t, rep.Topology[0].Stated[0].Fits)
	assert.True(t, *rep.Topology[0].Stated[0].Fits)
	assert.Empty(t, rep.Notes)
}

func checkReplayedText(t *testing.T, asText string, live liveRefusals) {
	t.Helper()
	for tier, refusals := range live {
		if tier == "dry" {
			tier += ` \(dry run\)`
		}
		assert.Regexp(t, fmt.Sprintf(`(?m)^  %s +[0-9/a-z ]+ [\d,]+ +%d +\d`, tier, refusals), asText)
	}
	assert.Contains(t, asText, "suggested  trusted_hops 2")
	assert.Contains(t, asText, "trusted_hops 2, as the log implies")
}

func checkReplayedPage(t *testing.T, file string, live liveRefusals) {
	t.Helper()
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	page := string(text)
	for tier := range maps.Keys(live) {
		assert.Contains(t, page, "<h3>Tier "+tier+"</h3>")
	}
	assert.Contains(t, page, "trusted_hops 2</b>")
	assert.NotContains(t, page, "<script")
	assert.NotRegexp(t, `(src|href)=|url\(|@import`, page, "the page needs something else")
}

func gzipped(t *testing.T, text []byte) []byte {
	t.Helper()
	var packed bytes.Buffer
	w := gzip.NewWriter(&packed)
	_, err := w.Write(text)
	require.NoError(t, err)
	require.NoError(t, w.Close())
	return packed.Bytes()
}

// With --quiet nothing is printed on standard error, whatever Caddy has to say of the config.
func TestReplayIsQuiet(t *testing.T) {
	dir := tempDir(t)
	config, log := filepath.Join(dir, "Caddyfile"), filepath.Join(dir, "access.log")
	require.NoError(t, os.WriteFile(config, []byte(":80 {\ntiered_limit {\ntier ip 1/m\n}\nrespond ok\n}\n"), 0o600)) // not formatted, and inert
	require.NoError(t, os.WriteFile(log, []byte(`{"level":"info","ts":1772323200.25,"logger":"http.log.access","msg":"handled request",`+
		`"request":{"remote_ip":"203.0.113.1","remote_port":"1","method":"GET","host":"localhost","uri":"/","headers":{}},"duration":0.1,"status":200}`+"\n"), 0o600))
	for quiet, args := range map[bool][]string{true: {"--quiet"}, false: nil} {
		for _, from := range []string{"named", "adjacent"} {
			cmd := exec.Command(caddyBinary(t), append([]string{"tiered-limit", "replay", log}, args...)...)
			cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + tempDir(t)}
			cmd.Dir = dir
			if from == "named" {
				cmd.Dir = tempDir(t)
				cmd.Args = append(cmd.Args, "--config", config)
			}
			var complaints bytes.Buffer
			cmd.Stderr = &complaints
			out, err := cmd.Output()
			require.NoError(t, err, "%s", &complaints)
			assert.Contains(t, string(out), "1 requests", from)
			assert.Equal(t, quiet, complaints.Len() == 0, "%s: %s", from, &complaints)
		}
	}
}
