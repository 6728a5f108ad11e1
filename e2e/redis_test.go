package e2e

import (
	"fmt"
	"github.com/tieredlimit/caddy-tieredlimit/internal/ports"
	"io"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tieredlimit/caddy-tieredlimit/internal/redistest"
)

// sharing are Caddys with one config that share a Redis.
type sharing struct {
	redis   *redistest.Server
	caddies []*caddyServer
	urls    []string
	client  *http.Client
}

// startSharing starts two Caddys with a stack of these tiers. A decision may take as long as the timeout says.
func startSharing(t *testing.T, timeout, tiers string) *sharing {
	t.Helper()
	s := &sharing{redis: redistest.Start(t), client: clientFrom(t, "127.0.0.1")}
	for range 2 {
		port := ports.Free(t)
		s.caddies = append(s.caddies, startCaddy(t, fmt.Sprintf(`
			:%d {
				bind 127.0.0.1
				tiered_limit shared {
					trusted_hops 0
					%s
					store redis {
						address %s
						timeout %s
					}
				}
				respond "ok"
			}`, port, tiers, s.redis.Addr(), timeout)))
		s.urls = append(s.urls, fmt.Sprintf("http://127.0.0.1:%d/", port))
	}
	return s
}

// ask sends a GET as a user to an instance. It may run in any goroutine.
func (s *sharing) ask(c *http.Client, instance int, user string) (answer, error) {
	request, err := http.NewRequest(http.MethodGet, s.urls[instance], nil)
	if err != nil {
		return answer{}, err
	}
	request.Header.Set("X-User", user)
	response, err := c.Do(request)
	if err != nil {
		return answer{}, err
	}
	defer response.Body.Close()
	if _, err := io.Copy(io.Discard, response.Body); err != nil {
		return answer{}, err
	}
	return answer{status: response.StatusCode, header: response.Header}, nil
}

// status is the status of an instance's answer to a user.
func (s *sharing) status(t *testing.T, instance int, user string) int {
	t.Helper()
	a, err := s.ask(s.client, instance, user)
	require.NoError(t, err)
	return a.status
}

// checkExpiry checks that there are keys in Redis and that each has a time to live.
func (s *sharing) checkExpiry(t *testing.T) {
	t.Helper()
	keys := s.redis.Keys("*")
	require.NotEmpty(t, keys)
	for _, key := range keys {
		assert.Positive(t, s.redis.Do("PTTL", key), "milliseconds that the key %s has to live", key)
	}
}

const (
	sharedClients = 64
	userTier      = "tier user %d/%s {\nkey {http.request.header.X-User}\n}\n"
)

// The limits hold over two processes to the last request, with many clients at once and with one that
// alternates.
func TestRedisTwoProcesses(t *testing.T) {
	const limit, each, rounds = 100, 10, 16
	s := startSharing(t, "20s", fmt.Sprintf("tier ip 1000000/%s\n"+userTier+"tier global %d/%[1]s", always, each, always, limit))
	alternating := 0
	for n := range 40 {
		switch status := s.status(t, n%2, "alternating"); status {
		case http.StatusOK:
			alternating++
		default:
			require.Equal(t, http.StatusTooManyRequests, status)
		}
	}
	assert.Equal(t, each, alternating, "served to one client by both instances")

	var served [2]atomic.Int64
	var users [sharedClients]atomic.Int64
	var wait sync.WaitGroup
	for client := range sharedClients {
		c := clientFrom(t, fmt.Sprintf("127.0.1.%d", client+1))
		wait.Go(func() {
			for n := range rounds {
				instance := (client + n) % 2
				a, err := s.ask(c, instance, strconv.Itoa(client))
				switch {
				case err != nil:
					t.Errorf("client %d: %v", client, err)
				case a.status == http.StatusOK:
					served[instance].Add(1)
					users[client].Add(1)
				case a.status != http.StatusTooManyRequests:
					t.Errorf("client %d: status %d, want 200 or 429", client, a.status)
				}
			}
		})
	}
	wait.Wait()
	assert.Equal(t, int64(limit-each), served[0].Load()+served[1].Load(), "served of %d by both, after the first %d",
		sharedClients*rounds, each)
	for client := range users {
		assert.LessOrEqual(t, users[client].Load(), int64(each), "served to client %d", client)
	}
	for instance := range served {
		assert.Positive(t, served[instance].Load(), "served by instance %d", instance)
	}
	s.checkExpiry(t)
}

// An instance that is killed under load leaves no counter that lives forever, and the limits hold for the others.
func TestRedisInstanceKilled(t *testing.T) {
	const limit, each = 600, 3
	s := startSharing(t, "20s", fmt.Sprintf(userTier+"tier global %d/%[2]s", each, always, limit))
	var served, lost, next atomic.Int64
	var users [4 * limit]atomic.Int64
	var wait sync.WaitGroup
	half := make(chan struct{})
	for worker := range sharedClients {
		wait.Go(func() {
			for {
				user := int(next.Add(1)/(each+1)) % len(users)
				a, err := s.ask(s.client, worker%2, strconv.Itoa(user))
				switch {
				case err != nil && worker%2 == 1:
					lost.Add(1) // by the killed instance: perhaps counted, never served
					return
				case err != nil:
					t.Errorf("the instance that lives: %v", err)
					return
				case a.status == http.StatusOK:
					users[user].Add(1)
					if served.Add(1) == limit/2 {
						close(half)
					}
				case a.header.Get("X-RateLimit-Resource") == "global":
					return
				case a.status != http.StatusTooManyRequests:
					t.Errorf("status %d, want 200 or 429", a.status)
					return
				}
			}
		})
	}
	select {
	case <-half:
	case <-time.After(patience):
		t.Errorf("served %d after %s, want %d", served.Load(), patience, limit/2)
	}
	s.caddies[1].signal(t, syscall.SIGKILL)
	_ = s.caddies[1].waitExit(t)
	s.checkExpiry(t)
	wait.Wait()

	assert.Positive(t, lost.Load(), "requests that the killed instance did not answer")
	assert.LessOrEqual(t, served.Load(), int64(limit), "served by both")
	assert.GreaterOrEqual(t, served.Load()+lost.Load(), int64(limit), "served by both, or lost")
	for user := range users {
		assert.LessOrEqual(t, users[user].Load(), int64(each), "served to user %d", user)
	}
	for n := range 10 {
		assert.Equal(t, http.StatusTooManyRequests, s.status(t, 0, fmt.Sprintf("late-%d", n)), "the limit is used up")
	}
	s.checkExpiry(t)
}

// While Redis is stopped each answer is a 503 that says when to come back, in bounded time, and afterwards the
// counters are what they were.
func TestRedisPaused(t *testing.T) {
	const each, bound = 2, 10 * time.Second
	s := startSharing(t, "1s", fmt.Sprintf(userTier, each, always))
	for instance := range s.urls {
		s.caddies[instance].waitFor(t, "the first decision", func() bool {
			return s.status(t, instance, fmt.Sprintf("first-%d", instance)) == http.StatusOK
		})
	}
	require.Equal(t, http.StatusOK, s.status(t, 0, "full"))
	require.Equal(t, http.StatusOK, s.status(t, 1, "full"))

	s.redis.Pause()
	var wait sync.WaitGroup
	for client := range sharedClients {
		wait.Go(func() {
			for n := range 8 {
				begin := time.Now()
				a, err := s.ask(s.client, client%2, fmt.Sprintf("paused-%d-%d", client, n))
				took := time.Since(begin)
				if err != nil {
					t.Errorf("client %d: %v", client, err)
					return
				}
				assert.Equal(t, http.StatusServiceUnavailable, a.status, "while Redis is stopped")
				seconds, err := strconv.Atoi(a.header.Get("Retry-After"))
				assert.NoError(t, err, "Retry-After")
				assert.Positive(t, seconds, "Retry-After")
				assert.Less(t, took, bound, "time that the answer took")
			}
		})
	}
	wait.Wait()

	s.redis.Continue()
	for instance := range s.urls {
		probes := 0
		s.caddies[instance].waitFor(t, "Redis to be used again", func() bool {
			probes++
			status := s.status(t, instance, fmt.Sprintf("again-%d-%d", instance, probes))
			require.Contains(t, []int{http.StatusOK, http.StatusServiceUnavailable}, status)
			return status == http.StatusOK
		})
		s.caddies[instance].waitFor(t, "the refusal", func() bool {
			status := s.status(t, instance, "full")
			require.Contains(t, []int{http.StatusTooManyRequests, http.StatusServiceUnavailable}, status)
			return status == http.StatusTooManyRequests
		})
	}
	s.checkExpiry(t)
}
