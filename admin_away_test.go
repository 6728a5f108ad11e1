package tieredlimit

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tieredlimit/caddy-tieredlimit/internal/redistest"
)

// While a store is away, explain says what would become of a request, inspect and reset look at the counters that decide, and
// status says since when it is so.
func TestTheCommandsKnowWhoDecidesWithoutTheStore(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		onError, instead, outcome string
		status                    int
	}{
		{"deny", "answered 503", "store_error", 503},
		{"allow", "served without limit", "store_error", 200},
		{"local", "limited by the counters of this instance", "served", 200},
	} {
		server := redistest.Start(t)
		e := newEdge(t, fmt.Sprintf("%s {\ntiered_limit away-%s {\ntrusted_hops 0\ntier ip 3/100d\nstore redis {\naddress %s\non_error %s\n}\n}\nrespond ok\n}\n",
			freshListen(), c.onError, server.Addr(), c.onError))
		require.NoError(t, e.app.Start())
		h := e.handlers()[0]
		require.True(t, redistest.Await(h.connected))
		require.Equal(t, 2, e.served(2, request{}))
		out, err := e.command("status")
		require.NoError(t, err)
		assert.NotContains(t, out, "away since")
		away := fmt.Sprintf("store_away{stack=%q}", "away-"+c.onError)
		assert.Equal(t, 0.0, e.metric(away))
		server.Kill()
		require.True(t, redistest.Await(func() bool {
			e.send(request{peer: "192.0.2.9:1"})
			return !h.connected()
		}))
		assert.Equal(t, 1.0, e.metric(away))

		out, err = e.command("status")
		require.NoError(t, err)
		assert.Regexp(t, `store redis: away since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC \([a-z]+\), requests are `+c.instead, out)
		out, err = e.command("explain", "--peer", "203.0.113.1")
		require.NoError(t, err)
		assert.Contains(t, out, "store away (away): "+c.instead)
		assert.Contains(t, out, "outcome: "+c.outcome)
		assert.Equal(t, c.status, e.send(request{}).Code, "and so it is")
		inspect := []string{"--stack", "away-" + c.onError, "--tier", "ip", "203.0.113.1"}
		if c.onError != "local" {
			for _, name := range []string{"inspect", "reset"} {
				_, err = e.command(append([]string{name}, inspect...)...)
				assert.ErrorContains(t, err, "the store cannot decide (", name)
			}
			continue
		}
		out, err = e.command(append([]string{"inspect"}, inspect...)...)
		require.NoError(t, err)
		assert.Contains(t, out, "store away (away): "+c.instead)
		assert.Contains(t, words(out), "3/2400h 3 0")
		assert.Equal(t, 429, e.send(request{}).Code)
		out, err = e.command("explain", "--peer", "203.0.113.1")
		require.NoError(t, err)
		assert.Contains(t, out, "outcome: refused, by ip")
		out, err = e.command(append([]string{"reset"}, inspect...)...)
		require.NoError(t, err)
		assert.Contains(t, words(out), "3/2400h 0 3")
		assert.Equal(t, 3, e.served(4, request{}))
	}
}
