package mapstore

import (
	"testing"

	"github.com/tieredlimit/caddy-tieredlimit/store"
	"github.com/tieredlimit/caddy-tieredlimit/store/storetest"
)

func TestStore(t *testing.T) {
	open := func(*testing.T) store.Store { return new(Store) }
	storetest.Run(t, open, storetest.ForwardOnly())
}
