package redis

import (
	"context"
	"fmt"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/stretchr/testify/require"

	"github.com/tieredlimit/caddy-tieredlimit/internal/redistest"
	"github.com/tieredlimit/caddy-tieredlimit/store"
	"github.com/tieredlimit/caddy-tieredlimit/store/storetest"
)

func TestPassesTheSuite(t *testing.T) {
	server := redistest.Start(t)
	ctx, cancel := caddy.NewContext(caddy.Context{Context: context.Background()})
	defer cancel()
	raw := fmt.Appendf(nil, `{"address": [%q], "timeout": "5s"}`, server.Addr())
	module, err := ctx.LoadModuleByID("http.tiered_limit.stores.redis", raw)
	require.NoError(t, err)
	forgetful := module.(*Redis)
	forgetful.forgetful = true // it asks the server each time, so that it knows every counter at every decision
	storetest.Run(t, func(*testing.T) store.Store { return forgetful }, storetest.OwnClock())
}
