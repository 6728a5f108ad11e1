package tieredlimit

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2/modules/logging"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tieredlimit/caddy-tieredlimit/internal/replay"
)

// A replay compares the peers of the log with the server's trusted_proxies: a load balancer that these do not hold is named, and
// the hop count is not called what the log implies. Where the peers are trusted, or are clients themselves, nothing is said.
func TestAReplayComparesPeersWithTrustedProxies(t *testing.T) {
	t.Parallel()
	const note = "come from peers that are not in trusted_proxies"
	balanced := func(peer string) func(i int) (string, string) {
		return func(i int) (string, string) { return peer, fmt.Sprintf("203.0.113.%d", i%200) }
	}
	direct := func(i int) (string, string) {
		client := fmt.Sprintf("203.0.113.%d:1", i%200)
		if i%9 == 0 && i > 300 {
			return client, "9.9.9.9"
		}
		return client, ""
	}
	for name, c := range map[string]struct {
		trusted, hops string
		way           func(i int) (peer, chain string)
		fits          any // true, false, or nil where it cannot be told
		noted         string
	}{
		"a new subnet, hops":    {"10.1.0.0/16", "trusted_hops 1", balanced("10.2.0.9:1"), false, "400 requests (100 %) have a forwarding header and " + note + " (10.2.0.9: 400)"},
		"a new subnet, no hops": {"10.1.0.0/16", "", balanced("10.2.0.9:1"), false, "400 requests (100 %) have a forwarding header and " + note + " (10.2.0.9: 400)"},
		"IPv6":                  {"10.1.0.0/16", "trusted_hops 1", balanced("[2001:db8::9]:1"), false, note + " (2001:db8::9: 400)"},
		"trusted":               {"10.2.0.0/16", "trusted_hops 1", balanced("10.2.0.9:1"), true, ""},
		"trusted, no hops":      {"10.2.0.0/16", "", balanced("10.2.0.9:1"), nil, ""},
		"clients":               {"10.2.0.0/16", "", direct, nil, ""},
	} {
		config := "{\nauto_https off\nservers {\ntrusted_proxies static " + c.trusted + "\ntrusted_proxies_strict\n}\n}\n:8080 {\ntiered_limit peers {\n" +
			c.hops + "\ntier ip 20/m\n}\nrespond ok\n}\n"
		var requests []recorded
		for i := range 400 {
			peer, chain := c.way(i)
			q := recorded{at: testStart.Add(time.Duration(i) * 10 * time.Millisecond)}
			q.peer = peer
			if chain != "" {
				q.header = xff(chain)
			}
			requests = append(requests, q)
		}
		log, _ := newRecording(logging.LogEncoderConfig{}, false).log(t, requests)
		rep := replayLog(t, config, log, replay.Options{})
		require.NotEmpty(t, rep.Topology, name)
		got := rep.Topology[0].Stated[0].Fits
		if c.fits == nil {
			assert.Nil(t, got, name)
		} else if assert.NotNil(t, got, name) {
			assert.Equal(t, c.fits, *got, name)
		}
		notes := strings.Join(rep.Notes, "\n")
		if c.noted == "" {
			assert.NotContains(t, notes, note, name)
		} else {
			assert.Contains(t, notes, c.noted, name)
			assert.Contains(t, notes, "if these are your proxies, add them to trusted_proxies", name)
		}
	}
}
