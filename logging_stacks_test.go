package tieredlimit

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// When a config is in force, the log says once of each stack what that is: its tiers, where the client comes from, and the
// store. Of a disabled one there is an error instead.
func TestTheLogSaysWhatIsInForce(t *testing.T) {
	t.Parallel()
	e := newEdge(t, freshListen()+` {
	tiered_limit one {
		trusted_hops 1
		tier ip 20/s 600/m
		tier global 1000/s {
			dry_run
		}
	}
	route {
		tiered_limit one {
			trusted_hops 1
			tier user 5/m
		}
		tiered_limit {
			trusted_hops 0
			tier ip off
		}
		tiered_limit trial {
			dry_run
			tier global 5/d
		}
		tiered_limit inert {
			tier ip 5/d
		}
	}
	respond ok
}`)
	require.Empty(t, e.logs.lines("info", "rate limits"), "a config that is only validated says nothing")
	require.NoError(t, e.app.Start())
	var got []string
	for _, l := range e.logs.lines("info", "rate limits") {
		got = append(got, fmt.Sprint(l.str("msg"), "; ", l["tiers"], "; ", l.str("client"), "; ", l.str("store")))
	}
	assert.Equal(t, []string{
		"rate limits: limits by ip, global; [ip 20/1s 600/1m global 1000/1s (dry run) user 5/1m]; entry 1 from the right of X-Forwarded-For, by /32 and /64; memory",
		"rate limits: off; []; the peer, by /32 and /64; ",
		"rate limits: dry run of global; [global 5/24h]; not stated; memory",
	}, got)
	assert.Len(t, e.logs.lines("error", "DISABLED"), 1)
}

// When the memory store has no room for further counters, the log says so: once for a tier and day, with the limit, how many
// counters there are, what happens now and what to write.
func TestTheLogSaysThatThereIsNoRoom(t *testing.T) {
	t.Parallel()
	e := newEdge(t, freshListen()+` {
	tiered_limit full {
		trusted_hops 1
		tier ip 100000/h 5000/m
		tier path 5000/m {
			key {path}
		}
		store memory {
			max_keys 6
		}
	}
	respond ok
}`)
	full := func() []logLine { return e.logs.lines("warn", "no room for the counters") }
	send := func(n int) {
		for i := range 50 {
			e.send(request{url: fmt.Sprintf("http://localhost/%d", n)}.with("X-Forwarded-For", fmt.Sprintf("2001:db8:%x:%x::1", n, i)))
		}
	}
	e.send(request{}.with("X-Forwarded-For", "2001:db8::1"))
	assert.Empty(t, full(), "there is room for one")
	send(1)
	lines := full()
	require.Len(t, lines, 1)
	assert.Equal(t, "full", lines[0].str("stack"))
	assert.Equal(t, "ip", lines[0].str("tier"))
	assert.Contains(t, []string{"100000/1h", "5000/1m"}, lines[0].str("limit"))
	assert.Contains(t, lines[0].str("msg"), "raise max_keys of the store")
	assert.NotZero(t, lines[0]["counters"])
	send(2)
	e.clock.advance(time.Hour)
	for n := range 5 {
		send(n)
	}
	var tiers []string
	for _, l := range full() {
		tiers = append(tiers, l.str("tier"))
	}
	assert.Equal(t, []string{"ip", "path"}, tiers, "each tier once a day")
	e.clock.advance(24 * time.Hour)
	send(9)
	assert.Len(t, full(), 3, "and again on the next day")
	assert.Equal(t, "ip", full()[2].str("tier"))
}
