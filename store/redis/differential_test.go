package redis

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/tieredlimit/caddy-tieredlimit/internal/redistest"

	"github.com/tieredlimit/caddy-tieredlimit/store"
	"github.com/tieredlimit/caddy-tieredlimit/store/memory"
)

// TestDecidesLikeMemory sends random requests to both stores and compares everything that they say. Memory is told
// the time that Redis has decided at, so that windows of all lengths turn at once in both.
func TestDecidesLikeMemory(t *testing.T) {
	compareWithMemory(t, 200_000/raceFactor, false)
}

// TestRemembersLikeMemory does the same with refusals remembered. Whoever is refused must be the same, and every
// counter when somebody is not; a remembered refusal need not name the first tier that is full by now.
func TestRemembersLikeMemory(t *testing.T) {
	compareWithMemory(t, 50_000/raceFactor, true)
}

func compareWithMemory(t *testing.T, decisions int, remembers bool) {
	const stacks = 32
	server := redistest.Start(t)
	var decided, refused, differences atomic.Int64
	var wait sync.WaitGroup
	for n := range stacks {
		random := rand.New(rand.NewPCG(1, uint64(n)))
		pair := &testPair{t: t, random: random, settings: on(server), name: fmt.Sprintf("s%d", n)}
		pair.remembers = remembers
		pair.reopen()
		wait.Go(func() {
			defer pair.close()
			for range decisions / stacks {
				if differences.Load() > 0 {
					return
				}
				difference, by := pair.step()
				if difference != "" {
					differences.Add(1)
					t.Error(difference)
				}
				decided.Add(1)
				if by >= 0 {
					refused.Add(1)
				}
			}
		})
	}
	wait.Wait()
	t.Logf("%d decisions, %d refused, %d differences", decided.Load(), refused.Load(), differences.Load())
	assert.Zero(t, differences.Load())
	assert.Greater(t, decided.Load(), int64(decisions-stacks))
	assert.Greater(t, refused.Load(), int64(decisions/10), "the sequences refuse too little to tell anything")
}

// testPair is a stack in Redis and its twin in memory.
type testPair struct {
	t         *testing.T
	random    *rand.Rand
	settings  map[string]any
	name      string
	spec      store.StackSpec
	redis     *counters
	memory    store.Counters
	store     *Redis
	remembers bool
	known     int64              // requests refused from memory
	last      time.Time          // of a decision, on the server's clock
	decided   [][2][]store.Claim // the latest decisions of these handles, as each store has left their claims
}

// reopen opens both with a new definition, as a reload does. Tiers and windows stay where they can.
func (p *testPair) reopen() {
	windows := []time.Duration{20 * time.Millisecond, 500 * time.Millisecond, time.Minute, day, 7 * day}
	p.spec = store.StackSpec{Name: p.name, Named: true}
	for i := range 1 + p.random.IntN(4) {
		tier := store.TierSpec{Name: fmt.Sprintf("t%d", i), Charge: store.ChargeMode(p.random.IntN(2)), DryRun: p.random.IntN(5) == 0}
		if p.random.IntN(6) == 0 {
			tier.Name, tier.Single = fmt.Sprintf("single%d", i), true
		}
		for _, w := range p.random.Perm(len(windows))[:1+p.random.IntN(3)] {
			tier.Limits = append(tier.Limits, store.Limit{Count: 1 + p.random.Int64N(12), Window: windows[w]})
		}
		p.spec.Tiers = append(p.spec.Tiers, tier)
	}
	if p.store == nil {
		p.store = newStore(p.t, p.settings)
		p.store.forgetful = !p.remembers
	}
	redis, err := p.store.Open(p.spec)
	assert.NoError(p.t, err)
	inMemory, err := new(memory.Memory).Open(p.spec)
	assert.NoError(p.t, err)
	p.close()
	p.redis, p.memory, p.decided = redis.(*counters), inMemory, nil
}

// close closes what is open.
func (p *testPair) close() {
	if p.redis != nil {
		assert.NoError(p.t, p.redis.Close())
		assert.NoError(p.t, p.memory.Close())
	}
}

// step does one thing in both, and describes the difference if there is one.
func (p *testPair) step() (difference string, refusedBy int) {
	if p.random.IntN(500) == 0 {
		p.reopen()
	}
	claims := p.claims()
	ctx := context.Background()
	if p.random.IntN(50) == 0 {
		if err := p.redis.Reset(ctx, time.Time{}, claims); err != nil {
			return err.Error(), -1
		}
		if err := p.memory.Reset(ctx, p.last, claims); err != nil {
			return err.Error(), -1
		}
	}
	if p.random.IntN(5) == 0 {
		if err := p.settle(ctx); err != nil {
			return err.Error(), -1
		}
	}
	redis, memory := store.Counters.Take, store.Counters.Take
	if p.random.IntN(10) == 0 {
		redis, memory = store.Counters.Peek, store.Counters.Peek
	}
	got, want := p.withStates(claims), p.withStates(claims)
	d, err := redis(p.redis, ctx, time.Time{}, got)
	if err != nil {
		return err.Error(), -1
	}
	// What is refused from memory was decided at an earlier time.
	known := p.redis.Remembered()
	remembered := known != p.known
	if remembered {
		p.known, d.Now = known, p.last
	} else {
		p.last = d.Now
	}
	m, err := memory(p.memory, ctx, d.Now, want)
	if err != nil {
		return err.Error(), -1
	}
	if !remembered {
		p.decided = append(p.decided, [2][]store.Claim{got, want})
		p.decided = p.decided[max(0, len(p.decided)-8):]
	}
	if p.remembers && d.RefusedBy >= 0 && m.RefusedBy >= 0 {
		return "", d.RefusedBy
	}
	if d.RefusedBy != m.RefusedBy || !assert.ObjectsAreEqual(seen(want), seen(got)) {
		return fmt.Sprintf("%+v\nclaims %+v at %v\nredis  %d %v\nmemory %d %v", p.spec, claims, d.Now.UnixMilli(),
			d.RefusedBy, seen(got), m.RefusedBy, seen(want)), -1
	}
	return "", d.RefusedBy
}

// seen are the states of claims, but for the windows, which only their store can tell.
func seen(claims []store.Claim) []store.State {
	states := statesOf(claims)
	for i := range states {
		states[i].Window = 0
	}
	return states
}

// withStates is a copy of claims with room for states.
func (p *testPair) withStates(claims []store.Claim) []store.Claim {
	claims = slices.Clone(claims)
	for i := range claims {
		claims[i].States = make([]store.State, len(p.spec.Tiers[claims[i].Tier].Limits))
	}
	return claims
}

// settle corrects one of the latest decisions, or a part of it, in both. What Redis says afterwards decides at which time
// memory does it: windows may end in between.
func (p *testPair) settle(ctx context.Context) error {
	if len(p.decided) == 0 {
		return nil
	}
	done := p.decided[p.random.IntN(len(p.decided))]
	var due [2][]store.Claim
	for i := range done[0] {
		if p.random.IntN(4) == 0 {
			continue
		}
		hits := p.random.Int64N(11) - 7
		if p.random.IntN(30) == 0 {
			hits = store.MostHits * (2*p.random.Int64N(2) - 1)
		}
		for n := range done {
			done[n][i].Hits = hits
			due[n] = append(due[n], done[n][i])
		}
	}
	if err := p.redis.Settle(ctx, time.Time{}, due[0]); err != nil {
		return err
	}
	return p.memory.Settle(ctx, p.last, due[1])
}

// claims are of most of the tiers, in the order written, and ask for one hit or for something else.
func (p *testPair) claims() []store.Claim {
	var claims []store.Claim
	for i := range p.spec.Tiers {
		switch {
		case p.random.IntN(6) == 0 && len(p.spec.Tiers) > 1:
		case p.spec.Tiers[i].Single:
			claims = append(claims, p.claim(i, "all"))
		case p.random.IntN(4) == 0:
			for _, who := range p.random.Perm(6)[:2+p.random.IntN(2)] {
				claims = append(claims, p.claim(i, fmt.Sprint("id ", who)))
			}
		default:
			claims = append(claims, p.claim(i, fmt.Sprint("id ", p.random.IntN(6))))
		}
	}
	return claims
}

func (p *testPair) claim(tier int, identity string) store.Claim {
	claim := store.Claim{Tier: tier, Identity: []byte(identity), Hits: 1, Refused: p.random.IntN(25) == 0}
	switch p.random.IntN(12) {
	case 0, 1:
		claim.Hits = 0
	case 2, 3:
		claim.Hits = p.random.Int64N(12)
	case 4:
		if p.random.IntN(8) == 0 {
			claim.Hits = store.MostHits
		}
	}
	if p.random.IntN(10) == 0 {
		for range p.spec.Tiers[tier].Limits {
			claim.Counts = append(claim.Counts, p.random.Int64N(12)-1)
		}
	}
	return claim
}
