package e2e

import (
	"fmt"
	"github.com/tieredlimit/caddy-tieredlimit/internal/ports"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
)

// passwords are those of <name>-password for two users, hashed at the lowest cost.
const passwords = `
	alice $2a$04$F4bpMP5fzRDch/IPZxf5m.XUPNHXGuozCMzLHMg8.4nJQPnU9bKkO
	bob $2a$04$hlj3QWZQxf447k/B8ksSAeqMtOW5iH48JIWjsALUWqYdy9w38X4Jy`

// usersSite limits users behind basic_auth by a block of tiers.
func usersSite(port int, stack string) string {
	return fmt.Sprintf(`
		:%d {
			bind 127.0.0.1
			log
			route {
				basic_auth {
					%s
				}
				tiered_limit {
					trusted_hops 0
					%s
				}
				respond "hello {http.auth.user.id}"
			}
		}`, port, passwords, stack)
}

// as sends a GET as a user n times and returns what each answer says.
func as(t *testing.T, n int, c *http.Client, user, url string) []string {
	t.Helper()
	list := make([]string, n)
	for i := range list {
		request, err := http.NewRequest(http.MethodGet, url, nil)
		if err != nil {
			t.Fatal(err)
		}
		request.SetBasicAuth(user, user+"-password")
		list[i] = do(t, c, request).told()
	}
	return list
}

// Alice and Bob share an address. Whether her refused traffic costs him anything depends on the way of charging and on
// the order of the tiers.
func TestChargingAndOrder(t *testing.T) {
	ipFirst := fmt.Sprintf("tier ip 4/%[1]s\ntier user 2/%[1]s", always)
	userFirst := fmt.Sprintf("tier user 2/%[1]s\ntier ip 4/%[1]s", always)
	for _, test := range []struct {
		name, stack string
		alice, bob  []string
	}{
		{
			"checked locks bob out", "charge checked\n" + ipFirst,
			[]string{"200 user", "200 user", "429 user", "429 user", "429 ip", "429 ip"},
			[]string{"429 ip", "429 ip", "429 ip"},
		},
		{
			"served leaves bob his share", "charge served\n" + ipFirst,
			[]string{"200 user", "200 user", "429 user", "429 user", "429 user", "429 user"},
			[]string{"200 ip", "200 ip", "429 ip"},
		},
		{
			"served is the default", ipFirst,
			[]string{"200 user", "200 user", "429 user", "429 user", "429 user", "429 user"},
			[]string{"200 ip", "200 ip", "429 ip"},
		},
		{
			"user first, checked", "charge checked\n" + userFirst,
			[]string{"200 user", "200 user", "429 user", "429 user", "429 user", "429 user"},
			[]string{"200 ip", "200 user", "429 user"},
		},
		{
			"user first, served", userFirst,
			[]string{"200 user", "200 user", "429 user", "429 user", "429 user", "429 user"},
			[]string{"200 ip", "200 user", "429 user"},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			port := ports.Free(t)
			startCaddy(t, usersSite(port, test.stack))
			url := fmt.Sprintf("http://127.0.0.1:%d/", port)
			nat := clientFrom(t, "127.0.0.10")
			assert.Equal(t, test.alice, as(t, len(test.alice), nat, "alice", url), "alice")
			assert.Equal(t, test.bob, as(t, len(test.bob), nat, "bob", url), "bob")
		})
	}
}

// Each tier is named, on served responses and on refusals, as it comes to bind.
func TestEachTierBinds(t *testing.T) {
	port := ports.Free(t)
	config := `
		:%d {
			bind 127.0.0.1
			tiered_limit minute-%d {
				trusted_hops 0
				tier ip 5/m
				tier user 3/m {
					key {http.request.header.X-User}
				}
				tier global 12/m
			}
			respond ok
		}`
	c := startCaddy(t, fmt.Sprintf(config, port, 99))
	url := fmt.Sprintf("http://127.0.0.1:%d/", port)
	one, two, three := clientFrom(t, "127.0.0.11"), clientFrom(t, "127.0.0.12"), clientFrom(t, "127.0.0.13")

	seen := inOneMinute(t, func(attempt int) [][]string {
		assert.NoError(t, c.reload(fmt.Sprintf(config, port, attempt))) // a new name: new counters
		return [][]string{
			told(t, 4, one, url, "X-User", "u"),
			told(t, 3, one, url, "X-User", "v"),
			told(t, 3, two, url, "X-User", "w"),
			told(t, 3, two, url, "X-User", "x"),
			told(t, 3, three, url, "X-User", "y"),
		}
	})
	assert.Equal(t, [][]string{
		{"200 user", "200 user", "200 user", "429 user"},
		{"200 ip", "200 ip", "429 ip"}, // 1 of 5 left, 0 of 5
		{"200 global", "200 user", "200 user"},
		{"200 ip", "200 ip", "429 ip"},
		{"200 global", "200 global", "429 global"}, // all 12 are used
	}, seen)
}

// The access log says what became of each request, and which tier refused.
func TestAccessLog(t *testing.T) {
	port := ports.Free(t)
	c := startCaddy(t, usersSite(port, fmt.Sprintf("tier user 1/%s\nexempt /health", always)))
	url := fmt.Sprintf("http://127.0.0.1:%d/", port)
	client := clientFrom(t, "127.0.0.10")
	assert.Equal(t, []string{"200 user", "429 user"}, as(t, 2, client, "alice", url))
	assert.Equal(t, []string{"200 "}, as(t, 1, client, "alice", url+"health"))
	c.waitFor(t, "three lines of access log", func() bool { return len(c.logLines("http.log.access")) == 3 })

	var got []string
	for _, l := range c.logLines("http.log.access") {
		got = append(got, strings.TrimSpace(l.str("tiered_limit_outcome")+" "+l.str("tiered_limit_tier")))
	}
	assert.Equal(t, []string{"served", "refused user", "exempt"}, got)
}
