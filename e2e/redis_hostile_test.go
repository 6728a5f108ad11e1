package e2e

import (
	"fmt"
	"io"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tieredlimit/caddy-tieredlimit/internal/ports"
	"github.com/tieredlimit/caddy-tieredlimit/internal/redistest"
)

// A process whose Redis answers what none does goes on, loads its next configuration, and ends when it is told to, without
// an error.
func TestProcessEndsAfterWhatNoRedisSends(t *testing.T) {
	for _, reply := range []string{
		"*-7\r\n", "*1000000000000\r\n", "$1099511627776\r\n", "$-5\r\n", "$?\r\n;-4\r\n", strings.Repeat("*1\r\n", 1<<18), strings.Repeat("x", 1<<20), "",
	} {
		t.Run(fmt.Sprintf("%.20q", reply), func(t *testing.T) {
			t.Parallel()
			fake := redistest.StartFake(t, nil, func(w io.WriteCloser, _ []string) { _, _ = io.WriteString(w, reply) })
			port := ports.Free(t)
			site := fmt.Sprintf(`
				:%d {
					bind 127.0.0.1
					tiered_limit api {
						trusted_hops 0
						tier ip 3/%s
						store redis {
							address %s
							timeout 200ms
						}
					}
					respond ok
				}`, port, always, fake.Addr())
			c := startCaddy(t, site)
			client := clientFrom(t, "127.0.0.16")
			ask := func() int { return get(t, client, fmt.Sprintf("http://127.0.0.1:%d/", port)).status }
			for range 8 {
				assert.Equal(t, 503, ask())
			}
			require.NoError(t, c.reload(strings.Replace(site, "respond ok", "respond again", 1)))
			assert.Equal(t, 503, ask())
			c.signal(t, syscall.SIGTERM)
			assert.NoError(t, c.waitExit(t))
		})
	}
}
