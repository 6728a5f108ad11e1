package e2e

import (
	"fmt"
	"github.com/tieredlimit/caddy-tieredlimit/internal/ports"
	"io"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const (
	loadClients = 8   // addresses
	loadConns   = 8   // connections of each
	loadBudget  = 400 // requests that each address has
	loadReloads = 20
	loadMost    = 20000 // requests that each connection sends at most
)

// load sends requests from several addresses over many connections until it is told to stop.
type load struct {
	served, refused, failed, broken atomic.Int64 // 200, 429, other statuses, no response
	stop                            atomic.Bool
	wg                              sync.WaitGroup
}

// loadSource is an address that the load comes from.
func loadSource(i int) string { return fmt.Sprintf("127.0.0.%d", 50+i) }

// startLoad begins to send requests to a URL.
func startLoad(t *testing.T, url string) *load {
	t.Helper()
	l := new(load)
	for i := range loadClients {
		client := clientFrom(t, loadSource(i))
		for range loadConns {
			l.wg.Go(func() { l.run(client, url) })
		}
	}
	t.Cleanup(l.end)
	return l
}

// end stops the load and waits for the last answers.
func (l *load) end() {
	l.stop.Store(true)
	l.wg.Wait()
}

func (l *load) run(client *http.Client, url string) {
	for sent := 0; sent < loadMost && !l.stop.Load(); sent++ {
		response, err := client.Get(url)
		if err != nil {
			l.broken.Add(1)
			continue
		}
		_, _ = io.Copy(io.Discard, response.Body)
		_ = response.Body.Close()
		switch response.StatusCode {
		case http.StatusOK:
			l.served.Add(1)
		case http.StatusTooManyRequests:
			l.refused.Add(1)
		default:
			l.failed.Add(1)
		}
	}
}

// reloadedSite is a config whose stack stays, while its surroundings change with a number.
func reloadedSite(port, other int, name string, budget, number int) string {
	config := fmt.Sprintf(`
		(common) {
			bind 127.0.0.1
		}
		http://localhost:%[1]d, http://127.0.0.1:%[1]d {
			import common
			header X-Generation %[2]d
			tiered_limit %[3]s {
				trusted_hops 0
				tier ip %[4]d/%[5]s
				tier global 1000000/%[5]s
			}
			respond ok
		}`, port, number, name, budget, always)
	if number%2 == 1 {
		config += fmt.Sprintf(`
		http://other-%[3]d.test:%[1]d, http://localhost:%[2]d {
			import common
			tiered_limit {
				trusted_hops 0
				tier ip 5/m
			}
			respond other
		}`, port, other, number)
	}
	return config
}

// refusedSite is a config with a tighter limit that Caddy cannot load for something else in it.
func refusedSite(port, other int, name string) string {
	return reloadedSite(port, other, name, 1, 0) + fmt.Sprintf(`
		http://broken.test:%d {
			tiered_limit {
				trusted_hops 0
				tier ip 1/m {
					key {http.request.no_such_thing}
				}
			}
		}`, port)
}

// However often the configuration is loaded under load, with other sites coming and going and bad ones in between,
// each client is served its budget and no more, and no request fails. A raised limit then counts what was used. (Caddy
// closes some connections that it has only just accepted when it reloads, with this module and without; so the clients
// do not get a response to every request.)
func TestReloadUnderLoad(t *testing.T) {
	for _, name := range []string{"api", ""} {
		t.Run("stack "+name, func(t *testing.T) {
			port, other := ports.Free(t), ports.Free(t)
			c := startCaddy(t, reloadedSite(port, other, name, loadBudget, 0))
			url := fmt.Sprintf("http://127.0.0.1:%d/", port)
			l := startLoad(t, url)
			total := int64(loadClients * loadBudget)
			for i := range loadReloads {
				c.waitFor(t, "the load to go on", func() bool { return l.served.Load() >= int64(i)*total/(loadReloads+5) })
				if i%5 == 4 {
					require.ErrorContains(t, c.reload(refusedSite(port, other, name)), "no_such_thing")
				}
				require.NoError(t, c.reload(reloadedSite(port, other, name, loadBudget, i+1)))
			}
			before := l.refused.Load()
			c.waitFor(t, "all budgets to be used", func() bool { return c.servedCount(t) >= total && l.refused.Load() > before+100 })
			l.end()

			assert.Zero(t, l.failed.Load(), "answers that are neither 200 nor 429")
			assert.Equal(t, total, c.servedCount(t), "served, as Caddy counts")
			assert.LessOrEqual(t, l.served.Load(), total, "served, as the clients count")
			assert.Positive(t, l.served.Load(), "served, as the clients count; a reload may cost connections and so answers")
			t.Logf("served %d, refused %d, without a response %d", l.served.Load(), l.refused.Load(), l.broken.Load())
			checkRaisedLimit(t, c, port, other, name, url)
		})
	}
}

// servedCount is what the metrics say of served requests of the site under load.
func (c *caddyServer) servedCount(t *testing.T) int64 {
	t.Helper()
	return metricSum(t, c.metrics(t), "caddy_tiered_limit_requests_total", `outcome="served"`)
}

// checkRaisedLimit sees that a reload with a higher limit admits the difference, for a stack with a name, and anything
// anew for one without; and that one with a lower limit admits nothing.
func checkRaisedLimit(t *testing.T, c *caddyServer, port, other int, name, url string) {
	t.Helper()
	require.NoError(t, c.reload(reloadedSite(port, other, name, loadBudget+30, 0)))
	client := clientFrom(t, loadSource(0))
	if name == "" {
		assert.Equal(t, 100, served(t, 100, client, url), "a changed stack without a name begins anew")
		return
	}
	assert.Equal(t, 30, served(t, 100, client, url), "after the limit was raised by 30")
	require.NoError(t, c.reload(reloadedSite(port, other, name, 10, 0)))
	a := get(t, client, url)
	assert.Equal(t, "429 ip", a.told(), "after the limit was lowered to 10")
	assert.Equal(t, "0", a.field(t, "X-Ratelimit-Remaining"))
	assert.Equal(t, "10", a.field(t, "X-Ratelimit-Limit"))
}

// On SIGTERM the requests that run are answered, in full, and Caddy ends without an error.
func TestStopWhileRequestsRun(t *testing.T) {
	arrived, release := make(chan struct{}, 16), make(chan struct{})
	upstream := newUpstream(t, func(w http.ResponseWriter, _ *http.Request) {
		arrived <- struct{}{}
		<-release
		_, _ = io.WriteString(w, "slow but whole")
	})
	var once sync.Once
	t.Cleanup(func() { once.Do(func() { close(release) }) })
	port := ports.Free(t)
	c := startCaddy(t, fmt.Sprintf(`
		:%d {
			bind 127.0.0.1
			tiered_limit {
				trusted_hops 0
				tier ip 5/%s
			}
			reverse_proxy %s
		}`, port, always, upstream))
	url := fmt.Sprintf("http://127.0.0.1:%d/", port)
	client := clientFrom(t, "127.0.0.10")
	results := make(chan string, 5)
	for range 5 {
		go func() {
			response, err := client.Get(url)
			if err != nil {
				results <- err.Error()
				return
			}
			body, err := io.ReadAll(response.Body)
			_ = response.Body.Close()
			results <- fmt.Sprint(response.StatusCode, " ", string(body), " ", err)
		}()
	}
	for range 5 {
		receive(t, arrived, "a request at the upstream")
	}
	assert.Equal(t, "429 ip", get(t, clientFrom(t, "127.0.0.10"), url).told(), "the budget is used by running requests")

	c.signal(t, sigterm)
	c.waitFor(t, "the port to close", func() bool { return !listens(port) })
	once.Do(func() { close(release) })
	for range 5 {
		assert.Equal(t, "200 slow but whole <nil>", receive(t, results, "an answer"))
	}
	assert.NoError(t, c.waitExit(t), "how Caddy ended")
}

// receive takes a value from a channel, or gives up after a while.
func receive[T any](t *testing.T, from <-chan T, what string) T {
	t.Helper()
	select {
	case v := <-from:
		return v
	case <-time.After(patience):
		t.Fatalf("waiting for %s: nothing after %s", what, patience)
		panic("not reached")
	}
}
