package e2e

import (
	"encoding/json"
	"fmt"
	"github.com/tieredlimit/caddy-tieredlimit/internal/ports"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// secrets are what clients send or are, and what may not come out again.
var secrets = []string{
	"127.0.0.61", "127.0.0.62", // peers
	"203.0.113.77", "203.0.113.78", "2001:db8:77", // clients in the chain
	"not-an-address", "192.0.2.99", // what callers forge
	"alice", "token-of-mallory", "cookie-of-mallory",
}

// privateSite limits clients by all that may identify them. With the option log_keys it may say so in its log.
func privateSite(port int, option string) string {
	return fmt.Sprintf(`
		{
			debug
		}
		:%[1]d {
			bind 127.0.0.1
			log
			route {
				basic_auth {
					%[2]s
				}
				tiered_limit {
					trusted_hops 1
					tier ip 2/%[3]s
					tier user 5/%[3]s
					tier token 3/%[3]s {
						key {http.request.header.X-Token} {http.request.cookie.session}
					}
					tier dry 1/%[3]s {
						key {http.request.header.X-Token} {http.request.uri.path}
						dry_run
					}
					headers x-ratelimit draft-11
					%[4]s
				}
				respond ok
			}
		}`, port, passwords, always, option)
}

// sendSecrets sends requests that are served and refused in every way and returns the answers.
func sendSecrets(t *testing.T, url string) []answer {
	t.Helper()
	var answers []answer
	for _, peer := range []string{"127.0.0.61", "127.0.0.62"} {
		client := clientFrom(t, peer)
		for _, chain := range []string{
			"192.0.2.99, 203.0.113.77", "203.0.113.78", "2001:db8:77::1", "192.0.2.99, not-an-address", "", "203.0.113.77",
		} {
			for range 3 {
				request, err := http.NewRequest(http.MethodGet, url, nil)
				require.NoError(t, err)
				request.Header.Set("X-Forwarded-For", chain)
				request.Header.Set("X-Token", "token-of-mallory")
				request.Header.Set("Cookie", "session=cookie-of-mallory")
				request.SetBasicAuth("alice", "alice-password")
				answers = append(answers, do(t, client, request))
			}
		}
	}
	return answers
}

// No response, log line of the module's or metric names a client, in any way, unless the log is told to.
func TestNothingNamesAClient(t *testing.T) {
	port := ports.Free(t)
	c := startCaddy(t, privateSite(port, ""))
	answers := sendSecrets(t, fmt.Sprintf("http://127.0.0.1:%d/path", port))
	stacks := c.metrics(t)
	lines := c.logLines(moduleLogger)

	tiers := make(map[string]bool)
	for _, a := range answers {
		tiers[a.told()] = true
		text := fmt.Sprint(a.header, a.body)
		for _, s := range secrets {
			assert.NotContains(t, text, s, "an answer")
		}
	}
	assert.Equal(t, []string{"200 ip", "200 token", "429 ip", "429 token"}, slices.Sorted(maps.Keys(tiers)))
	messages := make(map[string]bool)
	for _, l := range lines {
		messages[l.str("msg")] = true
		text, err := json.Marshal(l)
		require.NoError(t, err)
		for _, s := range secrets {
			assert.NotContains(t, string(text), s, "a log line")
		}
	}
	assert.True(t, messages["rate limit reached"], "refusals are logged: %v", messages)
	assert.GreaterOrEqual(t, len(c.warnings()), 1, "the chain that cannot be used is warned of")
	assert.Contains(t, stacks, "caddy_tiered_limit_refusals_total")
	for l := range strings.Lines(stacks) {
		for _, s := range secrets {
			if strings.Contains(l, "tiered_limit") {
				assert.NotContains(t, l, s, "a metric")
			}
		}
	}
}

// With log_keys the refusals in the log name the client and the key. That also shows that the test above would see them.
func TestLogKeysNamesClients(t *testing.T) {
	port := ports.Free(t)
	c := startCaddy(t, privateSite(port, "log_keys"))
	answers := sendSecrets(t, fmt.Sprintf("http://127.0.0.1:%d/path", port))
	require.Equal(t, 429, answers[2].status)
	text, err := json.Marshal(c.logLines(moduleLogger))
	require.NoError(t, err)
	assert.Contains(t, string(text), "203.0.113.77")
	assert.Contains(t, string(text), "token-of-mallory")
}
