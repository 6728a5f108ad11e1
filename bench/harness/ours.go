package harness

import (
	"context"
	"fmt"
	"hash/maphash"
	"math/rand/v2"
	"time"

	tieredlimit "github.com/tieredlimit/caddy-tieredlimit"
	"github.com/tieredlimit/caddy-tieredlimit/store/memory"
)

// ours are the subjects of this project: a stack of three tiers as a user would write it, one with a single tier, and
// the store alone.
func ours() []Subject {
	return []Subject{
		{Name: "tiered_limit, 3 tiers", Group: GroupServe, Tiers: 3, Open: CaddyHandler{Config: threeTiers}.Open},
		{Name: "tiered_limit, 1 tier", Group: GroupServe, Tiers: 1, Open: CaddyHandler{Config: oneTier}.Open},
		{Name: "memory store", Group: GroupDecide, Tiers: 3, Open: openMemory},
	}
}

const (
	nameThree  = "tiered_limit, 3 tiers"
	nameOne    = "tiered_limit, 1 tier"
	nameMemory = "memory store"
)

func threeTiers(c Case) string {
	count, window := c.limit()
	return fmt.Sprintf(`{"handler": "tiered_limit", "trusted_hops": 1,
		"tiers": [
			{"name": "ip", "limits": [{"count": %[1]d, "window": %[2]q}]},
			{"name": "user", "limits": [{"count": %[4]d, "window": %[2]q}], "keys": [["{http.request.header.X-User}"]]},
			{"name": "global", "limits": [{"count": %[4]d, "window": %[2]q}]}
		],
		"store": {"backend": "memory", "max_keys": %[3]d}
	}`, count, window, c.room(2), endless)
}

func oneTier(c Case) string {
	count, window := c.limit()
	return fmt.Sprintf(`{"handler": "tiered_limit", "trusted_hops": 1,
		"tiers": [{"name": "ip", "limits": [{"count": %d, "window": %q}]}],
		"store": {"backend": "memory", "max_keys": %d}
	}`, count, window, c.room(1))
}

// memoryStore decides three tiers without HTTP.
type memoryStore struct{ counters tieredlimit.Counters }

func openMemory(c Case) (Running, error) {
	count, window := c.limit()
	most := int64(c.room(2))
	spec := tieredlimit.StackSpec{Name: fmt.Sprint("bench-", rand.Uint64())}
	for _, tier := range []tieredlimit.TierSpec{
		{Name: "ip", Limits: []tieredlimit.Limit{{Count: int64(count), Window: window}}},
		{Name: "user", Limits: []tieredlimit.Limit{{Count: endless, Window: window}}},
		{Name: "global", Limits: []tieredlimit.Limit{{Count: endless, Window: window}}, Single: true},
	} {
		spec.Tiers = append(spec.Tiers, tier)
	}
	counters, err := (&memory.Memory{MaxKeys: &most}).Open(spec)
	if err != nil {
		return nil, err
	}
	return &memoryStore{counters}, nil
}

// Close implements [Running].
func (m *memoryStore) Close() error { return m.counters.Close() }

// Caller implements [Running].
func (m *memoryStore) Caller(v *visits) func(i int) bool {
	claims := []tieredlimit.Claim{{Tier: 0}, {Tier: 1}, {Tier: 2, Identity: []byte("global")}}
	for i := range claims {
		claims[i].Hits, claims[i].States = 1, make([]tieredlimit.State, 1)
	}
	ctx, now := context.Background(), time.Now()
	identities := identitiesOf(v)
	return func(i int) bool {
		pair := &identities[i]
		claims[0].Identity, claims[1].Identity = pair.ip[:], pair.user[:]
		decision, err := m.counters.Take(ctx, now, claims)
		return err == nil && decision.RefusedBy < 0
	}
}

// identity is a client as a store sees it: opaque bytes.
type identity struct{ ip, user [16]byte }

func identitiesOf(v *visits) []identity {
	list := make([]identity, v.n)
	for i := range list {
		ip, user := v.of(i)
		copy(list[i].ip[:], ip)
		copy(list[i].user[:], user)
	}
	return list
}

// hashSeed is what the floors hash under.
var hashSeed = maphash.MakeSeed()
