package redis

import (
	"context"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tieredlimit/caddy-tieredlimit/internal/redistest"
)

// goneContext is that of a client that goes away while the server is asked.
type goneContext struct {
	context.Context
	asked atomic.Int64
}

// Err is nil when it is asked first, as it is before the client goes away.
func (c *goneContext) Err() error {
	if c.asked.Add(1) == 1 {
		return nil
	}
	return context.Canceled
}

// Clients that go away say nothing about the server, so nobody can switch limiting off, or the service, by hanging up.
func TestClientsThatGoAwayDoNotOpenTheBreaker(t *testing.T) {
	server := redistest.Start(t)
	c, logs := observed(t, stackOf(plainTier("user", 3, day)), faulty(server.Addr()))
	connect(t, c)
	for i := range 2 * mostFailures {
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		_, _ = c.Take(&goneContext{Context: ctx}, time.Now(), claimsOf(strconv.Itoa(i)))
	}
	d, err := c.Take(context.Background(), time.Now(), claimsOf("honest"))
	require.NoError(t, err, "others are decided as before")
	assert.Equal(t, -1, d.RefusedBy)
	assert.Zero(t, logs.Len(), "nothing is told")
}

// An address that is written wrongly does not show its password in the error.
func TestAddressErrorsShowNoPassword(t *testing.T) {
	for _, address := range []string{
		"user:s3cret@host:6379", ":s3cret@host:6379", "s3cret@host", "redis:/:s3cret@host:6379", "redis//u:s3cret@host",
		"redis://u:s3cret@ho st:1", "rediss://:s3cret@host:99999", "redis://host:6379?password=s3cret", "redis://host:6379/#s3cret",
		"http://u:s3cret@host", "redis://u:s3cret@host/x", "redis://u:s3@s3cret@host?a=b",
	} {
		_, err := parseAddress(address, modeSingle)
		if assert.Error(t, err, address) {
			assert.NotContains(t, err.Error(), "s3cret")
			assert.Contains(t, err.Error(), "address: ")
		}
	}
}
