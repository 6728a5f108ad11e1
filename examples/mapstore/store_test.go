package mapstore

import (
	"testing"

	"github.com/tieredlimit/caddy-tieredlimit"
	"github.com/tieredlimit/caddy-tieredlimit/storetest"
)

func TestStore(t *testing.T) {
	open := func(*testing.T) tieredlimit.Store { return new(Store) }
	storetest.Run(t, open, storetest.ForwardOnly())
}
