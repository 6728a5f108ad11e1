package tieredlimit

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tieredlimit/caddy-tieredlimit/internal/redistest"
)

// A server that answers what no Redis does costs requests their limit for a while, by on_error, and nothing else: the
// process lives, reloads do not hang, and all heals when a real one is back.
func TestAServerOutlivesWhatNoRedisSends(t *testing.T) {
	real := redistest.Start(t)
	for i, reply := range []string{
		"*-7\r\n", "*9223372036854775807\r\n", "$1099511627776\r\n", "$-5\r\n", "%-1\r\n", "~-3\r\n", "$?\r\n;-4\r\n", "+OK\r\n+OK\r\n+OK\r\n",
	} {
		for _, command := range []string{"EVAL", "HELLO"} {
			t.Run(fmt.Sprintf("%s %q", command, reply), func(t *testing.T) {
				says := make(map[string]string)
				if command == "HELLO" {
					says[command] = reply
				}
				fake := redistest.StartFake(t, says, func(w io.WriteCloser, _ []string) { _, _ = io.WriteString(w, reply) })
				proxy := redistest.StartProxy(t, fake.Addr())
				site := fmt.Sprintf(":8080 {\ntiered_limit impossible-%d {\ntrusted_hops 0\ntier ip 3/7d\nstore redis {\naddress %s\ntimeout 300ms\nkey_prefix %s\n}\n}\nrespond ok\n}",
					i, proxy.Addr(), command)
				e := newEdge(t, site)
				for range 5 {
					assert.Equal(t, http.StatusServiceUnavailable, e.send(request{}).Code)
				}
				reloaded := make(chan struct{})
				go func() {
					defer close(reloaded)
					e.reload(strings.Replace(site, "respond ok", "header X-Reloaded yes\nrespond ok", 1))
				}()
				select {
				case <-reloaded:
				case <-time.After(10 * time.Second):
					t.Fatal("the reload hangs")
				}
				proxy.Target(real.Addr())
				proxy.Reset()
				require.True(t, redistest.Await(func() bool { return e.send(request{peer: "198.51.100.1:1"}).Code == http.StatusOK }))
				assert.Equal(t, 3, e.served(4, request{}), "exactly the limit, once a real one is there")
			})
		}
	}
}
