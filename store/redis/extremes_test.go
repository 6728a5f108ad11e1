package redis

import (
	"bytes"
	"context"

	"fmt"
	"math"

	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tieredlimit/caddy-tieredlimit/internal/redistest"

	"github.com/tieredlimit/caddy-tieredlimit/store"
)

// TestTakesTheLargest tries the largest windows and counts, and identities of a megabyte.
func TestTakesTheLargest(t *testing.T) {
	server := redistest.Start(t)
	longest := time.Duration(math.MaxInt64 / int64(time.Millisecond) * int64(time.Millisecond))
	spec := stackOf(store.TierSpec{Name: "ip", Limits: []store.Limit{
		{Count: 1<<31 - 1, Window: longest}, {Count: 2, Window: longest - time.Millisecond},
	}})
	c := replica(t, spec, on(server))
	big := string(bytes.Repeat([]byte("x"), 1<<20))
	for i := range 4 {
		by, states := take(t, c, big)
		assert.Equal(t, i >= 2, by == 0, "request %d", i)
		assert.Equal(t, int64(min(i+1, 2)), states[1].Used)
		assert.Positive(t, states[0].ResetAfter)
		assert.LessOrEqual(t, states[0].ResetAfter, longest)
	}
	by, _ := take(t, c, big+"y")
	assert.Equal(t, -1, by, "identities that differ in the last byte")
	for _, key := range server.Keys("*") {
		assert.Less(t, len(key), 200)
		ttl := server.Do("PTTL", key).(int64)
		assert.Positive(t, ttl, key)
	}
	fresh := replica(t, spec, on(server))
	by, _ = take(t, fresh, big)
	assert.Equal(t, 0, by, "another instance")
	// The counter is full.
	keys := c.name(claimsOf("full"))
	take(t, c, "full")
	server.Do("SET", keys[1], fmt.Sprint(1<<31-2), "KEEPTTL") // of window 0
	require.Equal(t, int64(1), server.Do("DEL", keys[2]))
	by, states := take(t, c, "full")
	assert.Equal(t, -1, by)
	assert.Equal(t, int64(1<<31-1), states[0].Used)
	by, states = take(t, c, "full")
	assert.Equal(t, 0, by)
	assert.Equal(t, int64(1<<31-1), states[0].Used)
}

// TestLinkEndsUnderDecisions closes the last handle while decisions wait for a server that does not answer. They
// must end in the way that on_error says, and so must those that come later.
func TestLinkEndsUnderDecisions(t *testing.T) {
	server := redistest.Start(t)
	for _, onError := range []string{"deny", "allow", "local"} {
		t.Run(onError, func(t *testing.T) {
			proxy := redistest.StartProxy(t, server.Addr())
			settings := map[string]any{"address": []string{proxy.Addr()}, "timeout": "1h", "on_error": onError}
			opened, err := newStore(t, settings).Open(stackOf(plainTier("ip", 1000, 7*day)))
			require.NoError(t, err)
			c := opened.(*counters)
			take(t, c, "a")
			proxy.Mute(true)
			const waiting = 8
			failures := make(chan error, waiting)
			for range waiting {
				go func() {
					_, err := c.Take(context.Background(), time.Now(), claimsOf("a"))
					failures <- err
				}()
			}
			require.True(t, redistest.Await(func() bool { return len(c.link.turns) == waiting }))
			require.NoError(t, c.Close())
			for i := range waiting + 1 {
				var err error
				if i < waiting {
					err = <-failures
				} else {
					_, err = c.Take(context.Background(), time.Now(), claimsOf("a"))
				}
				if onError == "local" {
					assert.NoError(t, err)
					continue
				}
				var away *store.UnavailableError
				require.ErrorAs(t, err, &away)
				assert.Equal(t, onError == "allow", away.Serve)
			}
			_, known := links.References(c.link.setup.digest)
			assert.False(t, known)
		})
	}
}
