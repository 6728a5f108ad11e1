package tieredlimit_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/stretchr/testify/require"

	"github.com/tieredlimit/caddy-tieredlimit"
	"github.com/tieredlimit/caddy-tieredlimit/internal/redistest"
	"github.com/tieredlimit/caddy-tieredlimit/storetest"
)

func TestRedisPassesTheSuite(t *testing.T) {
	server := redistest.Start(t)
	ctx, cancel := caddy.NewContext(caddy.Context{Context: context.Background()})
	defer cancel()
	raw := fmt.Appendf(nil, `{"address": [%q], "timeout": "5s"}`, server.Addr())
	store, err := ctx.LoadModuleByID("http.tiered_limit.stores.redis", raw)
	require.NoError(t, err)
	forgetful := tieredlimit.ForgetfulRedis(store.(tieredlimit.Store))
	storetest.Run(t, func(*testing.T) tieredlimit.Store { return forgetful }, storetest.OwnClock())
}
