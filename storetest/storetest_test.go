package storetest_test

import (
	"strconv"
	"testing"

	"github.com/tieredlimit/caddy-tieredlimit"
	"github.com/tieredlimit/caddy-tieredlimit/storetest"
)

func TestModel(t *testing.T) {
	storetest.Run(t, func(*testing.T) tieredlimit.Store { return &storetest.Model{} })
}

func TestMemory(t *testing.T) {
	for name, options := range map[string][]storetest.Option{
		"callers' time": nil,
		"forward only":  {storetest.ForwardOnly()},
	} {
		t.Run(name, func(t *testing.T) {
			options = append(options, storetest.Steps(steps(1_000_000)))
			storetest.Run(t, func(*testing.T) tieredlimit.Store { return new(tieredlimit.Memory) }, options...)
		})
	}
}

func TestMemoryBound(t *testing.T) {
	for _, maxKeys := range []int64{15, 16, 31, 40} {
		store := &tieredlimit.Memory{MaxKeys: &maxKeys}
		t.Run(strconv.FormatInt(maxKeys, 10), func(t *testing.T) {
			storetest.Run(t, func(*testing.T) tieredlimit.Store { return store },
				storetest.Bound(maxKeys), storetest.Steps(steps(100_000)))
		})
	}
}

func steps(count int) int {
	if testing.Short() {
		return count / 50
	}
	return count
}
