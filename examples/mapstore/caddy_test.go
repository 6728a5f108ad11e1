package mapstore

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	_ "github.com/caddyserver/caddy/v2/modules/standard"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	_ "github.com/tieredlimit/caddy-tieredlimit"
	"github.com/tieredlimit/caddy-tieredlimit/store"
)

// config is a site with a limit in this store. The window has begun in 1970 and ends in 2084.
const config = ":8080 {\ntiered_limit {\ntrusted_hops 0\ntier ip 3/1000000h\nstore map%s\n}\nrespond ok\n}\n"

// load provisions a Caddyfile.
func load(t *testing.T, text string) (*caddyhttp.Server, error) {
	t.Helper()
	adapted, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(text), nil)
	if err != nil {
		return nil, err
	}
	c := caddy.Config{Admin: &caddy.AdminConfig{Disabled: true}}
	require.NoError(t, json.Unmarshal(adapted, &c))
	ctx, err := caddy.ProvisionContext(&c)
	if err != nil {
		return nil, err
	}
	app, err := ctx.App("http")
	require.NoError(t, err)
	return app.(*caddyhttp.App).Servers["srv0"], nil
}

func statuses(s *caddyhttp.Server, peer string, n int) []int {
	var list []int
	for range n {
		r := httptest.NewRequest(http.MethodGet, "http://localhost/", nil)
		r.RemoteAddr = peer + ":50000"
		w := httptest.NewRecorder()
		s.ServeHTTP(w, r)
		list = append(list, w.Code)
	}
	return list
}

// Caddy finds the store by its name, and a reload keeps the counters.
func TestInCaddy(t *testing.T) {
	first, err := load(t, fmt.Sprintf(config, ""))
	require.NoError(t, err)
	assert.Equal(t, []int{200, 200}, statuses(first, "203.0.113.1", 2))
	second, err := load(t, fmt.Sprintf(config, ""))
	require.NoError(t, err)
	assert.Equal(t, []int{200, 429, 429}, statuses(second, "203.0.113.1", 3))
	assert.Equal(t, []int{200, 200, 200, 429}, statuses(first, "203.0.113.2", 4))
	assert.Equal(t, []int{429}, statuses(second, "203.0.113.2", 1))
}

func TestRefusesSettings(t *testing.T) {
	for _, settings := range []string{" big", " {\nsize 3\n}"} {
		_, err := load(t, fmt.Sprintf(config, settings))
		assert.ErrorContains(t, err, "store map takes no settings", settings)
	}
}

// A flood of clients uses no more memory than there is room for, frees nobody who is refused, and cannot refuse a new
// client of another group.
func TestFlood(t *testing.T) {
	limits := []store.Limit{{Count: 2, Window: time.Hour}}
	counters, err := new(Store).Open(store.StackSpec{
		Name: "flood", Named: true, Tiers: []store.TierSpec{{Name: "ip", Limits: limits, Group: lastByte}},
	})
	require.NoError(t, err)
	take := func(identity string, group byte) bool {
		claims := []store.Claim{{Identity: append([]byte(identity), group), Hits: 1, States: make([]store.State, 1)}}
		decision, err := counters.Take(t.Context(), time.Unix(0, 0), claims)
		require.NoError(t, err)
		return decision.RefusedBy < 0
	}
	require.True(t, take("early", 1))
	require.True(t, take("early", 1))
	served := 0
	for i := range room + 1000 {
		if take(fmt.Sprint("flood-", i), 1) {
			served++
		}
	}
	assert.Equal(t, room-1+2, served, "one hit of each that has a counter, and two of all others together")
	assert.False(t, take("early", 1))
	assert.True(t, take("new", 2))
	assert.Len(t, counters.(*handle).stack.windows[limit{"ip", time.Hour.Milliseconds()}].used, room+2)
	require.NoError(t, counters.Close())
}

// lastByte is the group of an identity.
func lastByte(identity []byte) uint64 { return uint64(identity[len(identity)-1]) }
