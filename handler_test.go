package tieredlimit

import (
	"crypto/tls"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const (
	clientA = "198.51.100.1"
	clientB = "198.51.100.2"
	clientC = "198.51.100.3"
)

// resource is the tier that a response names.
func resource(w *httptest.ResponseRecorder) string { return w.Header().Get("X-RateLimit-Resource") }

// wantRefused checks that a request is refused by a tier.
func wantRefused(t *testing.T, w *httptest.ResponseRecorder, tier string) {
	t.Helper()
	assert.Equal(t, http.StatusTooManyRequests, w.Code)
	assert.Equal(t, tier, resource(w))
}

// What one client is refused is not charged to the service.
func TestRefusedRequestsLeaveOtherTiersAlone(t *testing.T) {
	t.Parallel()
	e := newEdge(t, `
:8080 {
	tiered_limit t1 {
		trusted_hops 0
		tier ip 2/m
		tier global 10/m
	}
	respond ok
}`)
	a, b := request{}.from(clientA), request{}.from(clientB)
	assert.Equal(t, 2, e.served(2, a))
	for range 18 {
		wantRefused(t, e.send(a), "ip")
	}
	assert.Equal(t, 1, e.served(1, b))
	assert.Equal(t, []int64{3}, e.used("t1", "global", a))
	assert.Equal(t, []int64{2}, e.used("t1", "ip", a))
	assert.Equal(t, []int64{1}, e.used("t1", "ip", b))
}

// Several limits of one tier all hold.
func TestEveryLimitOfATierHolds(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, limits string
		step         time.Duration // 5 requests, then the clock moves so far
		steps, want  int
	}{
		{"one a second and ten a minute", "1/s 10/m", time.Second, 12, 10},
		{"the other way round", "10/m 1/s", time.Second, 12, 10},
		{"the short one binds", "1/s 100/m", time.Second, 12, 12},
		{"three", "3/s 8/10s 20/m", time.Second, 60, 20},
		{"the longest first fills in the second minute", "2/s 20/m", time.Second, 70, 40},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			e := newEdge(t, fmt.Sprintf(`
:8080 {
	tiered_limit t2-%s {
		trusted_hops 0
		tier ip %s
	}
	respond ok
}`, strings.ReplaceAll(c.name, " ", "-"), c.limits))
			got := 0
			for range c.steps {
				got += e.served(5, request{})
				e.clock.advance(c.step)
			}
			assert.Equal(t, c.want, got)
		})
	}
}

// Of several exhausted limits of the refusing tier the one that ends last is reported, so that a client that waits
// as long as it is told to is served.
func TestTheLimitThatEndsLastIsReported(t *testing.T) {
	t.Parallel()
	e := newEdge(t, `
:8080 {
	tiered_limit ends-last {
		trusted_hops 0
		headers x-ratelimit draft-11
		tier ip 2/s 2/m 2/10s
	}
	respond ok
}`)
	assert.Equal(t, 2, e.served(2, request{}))
	w := e.send(request{})
	wantRefused(t, w, "ip")
	assert.Equal(t, "60", w.Header().Get("Retry-After"))
	assert.Equal(t, "2", w.Header().Get("X-RateLimit-Limit"))
	assert.Equal(t, "0", w.Header().Get("X-RateLimit-Remaining"))
	assert.Equal(t, strconv.FormatInt(testStart.Unix()+60, 10), w.Header().Get("X-RateLimit-Reset"))
	assert.Equal(t, `"ip.2";r=0;t=60`, w.Header().Get("RateLimit"))
	assert.Contains(t, w.Body.String(), `"violated-policies":["ip.2"]`)
	assert.Contains(t, w.Body.String(), `"retry-after":60`)
	e.clock.advance(60 * time.Second)
	assert.Equal(t, 1, e.served(1, request{}))
}

const t3Site = `
:8080 {
	tiered_limit %s {
		trusted_hops 0
		tier ip %s
		tier user %s {
			key {header.X-User}
		}
		tier global 12/m
	}
	respond ok
}`

// By default a user's refused requests cost a neighbour behind the same address nothing.
func TestServedKeepsTheNeighbourIn(t *testing.T) {
	t.Parallel()
	e := newEdge(t, fmt.Sprintf(t3Site, "t3-served", "5/m", "3/m"))
	u, v := user("u").from(clientA), user("v").from(clientA)
	assert.Equal(t, 3, e.served(3, u))
	wantRefused(t, e.send(u), "user")
	assert.Equal(t, 1, e.served(1, v))
	assert.Equal(t, []int64{4}, e.used("t3-served", "ip", u))
	assert.Equal(t, []int64{4}, e.used("t3-served", "global", u))
}

// Charging when checked, the refused requests of one user spend the budget of the address they share.
func TestCheckedSpendsTheSharedAddress(t *testing.T) {
	t.Parallel()
	e := newEdge(t, fmt.Sprintf(t3Site, "t3-checked", "4/m {\n charge checked\n }", "2/m"))
	u, v := user("u").from(clientA), user("v").from(clientA)
	assert.Equal(t, 2, e.served(2, u))
	wantRefused(t, e.send(u), "user")
	wantRefused(t, e.send(u), "user")
	wantRefused(t, e.send(v), "ip")
	assert.Equal(t, []int64{4}, e.used("t3-checked", "ip", u))
	assert.Equal(t, []int64{2}, e.used("t3-checked", "user", u))
	assert.Equal(t, []int64{0}, e.used("t3-checked", "user", v))
	assert.Equal(t, []int64{2}, e.used("t3-checked", "global", u))
}

// How a refusal charges the tiers in front of it: by their own mode, else the stack's, else served.
func TestChargeOfATierOverridesTheStacks(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, stack, first, second string
		wantFirst, wantSecond      int64 // after 1 served and 3 refused by the third tier
	}{
		{"nothing said", "", "", "", 1, 1},
		{"stack served", "charge served", "", "", 1, 1},
		{"stack checked", "charge checked", "", "", 4, 4},
		{"first checked", "", "charge checked", "", 4, 1},
		{"second checked", "", "", "charge checked", 1, 4},
		{"stack checked first served", "charge checked", "charge served", "", 1, 4},
		{"stack checked second served", "charge checked", "", "charge served", 4, 1},
		{"stack served both checked", "charge served", "charge checked", "charge checked", 4, 4},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			name := "charge-" + strings.ReplaceAll(c.name, " ", "-")
			e := newEdge(t, fmt.Sprintf(`
:8080 {
	tiered_limit %s {
		trusted_hops 0
		%s
		tier ip 100/m {
			%s
		}
		tier user 100/m {
			key {header.X-User}
			%s
		}
		tier wall 1/m {
			key wall
			charge checked
		}
		tier behind 100/m {
			key behind
			charge checked
		}
	}
	respond ok
}`, name, c.stack, c.first, c.second))
			assert.Equal(t, 1, e.served(4, user("u")))
			assert.Equal(t, []int64{c.wantFirst}, e.used(name, "ip", user("u")), "first tier")
			assert.Equal(t, []int64{c.wantSecond}, e.used(name, "user", user("u")), "second tier")
			assert.Equal(t, []int64{1}, e.used(name, "wall", user("u")), "a tier never charges for what it refuses")
			assert.Equal(t, []int64{1}, e.used(name, "behind", user("u")), "a tier behind a refusal is never charged")
		})
	}
}

// Of two tiers that would refuse, the first written is named, every time and after reloads.
func TestFirstRefusingTierIsNamed(t *testing.T) {
	t.Parallel()
	for _, first := range []string{"ip", "user"} {
		t.Run(first+" first", func(t *testing.T) {
			t.Parallel()
			tiers := []string{"tier ip 1/m", "tier user 1/m {\n key {header.X-User}\n }"}
			if first == "user" {
				tiers[0], tiers[1] = tiers[1], tiers[0]
			}
			site := fmt.Sprintf(":8080 {\n tiered_limit t4-%s {\n trusted_hops 0\n %s\n %s\n }\n respond ok\n}", first, tiers[0], tiers[1])
			e := newEdge(t, site)
			assert.Equal(t, 1, e.served(1, user("u")))
			for range 100 {
				wantRefused(t, e.send(user("u")), first)
			}
			for range 20 {
				e.reload(site)
				wantRefused(t, e.send(user("u")), first)
			}
		})
	}
}

// A client that the service has no room for keeps its own budgets.
func TestAFullServiceCostsNobodyTheirOwnBudget(t *testing.T) {
	t.Parallel()
	e := newEdge(t, `
:8080 {
	tiered_limit t5 {
		trusted_hops 0
		tier ip 5/m
		tier user 5/m {
			key {header.X-User}
		}
		tier global 3/m
	}
	respond ok
}`)
	for i := range 3 {
		assert.Equal(t, 1, e.served(1, user(fmt.Sprint("u", i)).from(fmt.Sprint("198.51.100.", i+1))))
	}
	fourth := user("u4").from("198.51.100.4")
	wantRefused(t, e.send(fourth), "global")
	assert.Equal(t, []int64{0}, e.used("t5", "ip", fourth))
	assert.Equal(t, []int64{0}, e.used("t5", "user", fourth))
	assert.Equal(t, []int64{3}, e.used("t5", "global", fourth))
}

// Each served request costs each tier one, each refused one nothing.
func TestOnlyServedRequestsAreCharged(t *testing.T) {
	t.Parallel()
	e := newEdge(t, `
:8080 {
	tiered_limit t6 {
		trusted_hops 0
		tier ip 100/m
		tier user 3/m {
			key {header.X-User}
		}
		tier global 1000/m
	}
	respond ok
}`)
	assert.Equal(t, 3, e.served(10, user("u")))
	for _, tier := range []string{"ip", "user", "global"} {
		assert.Equal(t, []int64{3}, e.used("t6", tier, user("u")), tier)
	}
}

// Concurrent requests never admit more than the limit, nor fewer.
func TestConcurrentRequestsAdmitExactlyTheLimit(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ name, tiers string }{
		{"one tier", "tier global 100/m"},
		{"behind other tiers", "tier ip 5/m\n tier global 100/m"},
		{"checked in front", "tier ip 5/m {\n charge checked\n }\n tier global 100/m"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			name := "t7-" + strings.ReplaceAll(c.name, " ", "-")
			e := newEdge(t, fmt.Sprintf(":8080 {\n tiered_limit %s {\n trusted_hops 0\n %s\n }\n respond ok\n}", name, c.tiers))
			var served, refused atomic.Int64
			var wg sync.WaitGroup
			for i := range 1000 {
				wg.Go(func() {
					switch w := e.send(request{}.from(fmt.Sprintf("198.51.%d.%d", i/250, i%250))); w.Code {
					case http.StatusOK:
						served.Add(1)
					case http.StatusTooManyRequests:
						refused.Add(1)
					}
				})
			}
			wg.Wait()
			assert.Equal(t, int64(100), served.Load())
			assert.Equal(t, int64(900), refused.Load())
			assert.Equal(t, []int64{100}, e.used(name, "global", request{}))
		})
	}
}

// The last and the first instant of a window belong to two windows.
func TestWindowsMeetWithoutGapOrOverlap(t *testing.T) {
	t.Parallel()
	for _, window := range []time.Duration{time.Millisecond, time.Second, 1500 * time.Millisecond, time.Minute, time.Hour, 24 * time.Hour} {
		t.Run(window.String(), func(t *testing.T) {
			t.Parallel()
			e := newEdge(t, fmt.Sprintf(`
:8080 {
	tiered_limit t8-%d {
		trusted_hops 0
		tier ip 1/%s
	}
	respond ok
}`, window.Milliseconds(), window))
			first := testStart.Add(24 * time.Hour)
			instants := []time.Time{first.Add(-time.Millisecond), first, first.Add(window - time.Millisecond), first.Add(window)}
			for i, want := range []int{1, 1, 0, 1} {
				e.clock.set(instants[i])
				assert.Equal(t, want, e.served(3, request{}), instants[i])
			}
		})
	}
}

// A client may use two windows' worth across a boundary, and no more.
func TestTwoWindowsMeetAtABoundary(t *testing.T) {
	t.Parallel()
	e := newEdge(t, `
:8080 {
	tiered_limit t9 {
		trusted_hops 0
		tier ip 5/m
	}
	respond ok
}`)
	e.clock.set(testStart.Add(59 * time.Second))
	assert.Equal(t, 5, e.served(5, request{}))
	e.clock.set(testStart.Add(60 * time.Second))
	assert.Equal(t, 5, e.served(5, request{}))
	wantRefused(t, e.send(request{}), "ip")
}

// Retry-After is rounded up, never 0, never longer than the window.
func TestRetryAfterIsRoundedUp(t *testing.T) {
	t.Parallel()
	e := newEdge(t, `
:8080 {
	tiered_limit t10 {
		trusted_hops 0
		headers x-ratelimit draft-11
		tier ip 1/m
	}
	respond ok
}`)
	rows := map[time.Duration]string{
		43200 * time.Millisecond: "17",
		59950 * time.Millisecond: "1",
		31000 * time.Millisecond: "29",
		0:                        "60",
		time.Millisecond:         "60",
		59000 * time.Millisecond: "1",
		59999 * time.Millisecond: "1",
		58999 * time.Millisecond: "2",
	}
	minute := testStart
	for at, want := range rows {
		e.clock.set(minute.Add(at))
		require.Equal(t, 1, e.served(1, request{}))
		w := e.send(request{})
		wantRefused(t, w, "ip")
		assert.Equal(t, want, w.Header().Get("Retry-After"), at)
		assert.Equal(t, `"ip";r=0;t=`+want, w.Header().Get("RateLimit"), at)
		assert.Equal(t, strconv.FormatInt(minute.Unix()+60, 10), w.Header().Get("X-RateLimit-Reset"), at)
		minute = minute.Add(time.Minute)
	}
}

// A client that waits for as long as Retry-After says, and is alone, is served.
func TestWaitingForRetryAfterIsEnough(t *testing.T) {
	t.Parallel()
	for _, limits := range []string{"1/m", "1/1500ms", "1/700ms", "2/s 3/7s", "1/s 2/m"} {
		t.Run(limits, func(t *testing.T) {
			t.Parallel()
			name := strings.NewReplacer("/", "-", " ", "_").Replace(limits)
			e := newEdge(t, fmt.Sprintf(":8080 {\n tiered_limit wait-%s {\n trusted_hops 0\n tier ip %s\n }\n respond ok\n}", name, limits))
			for i := range 40 {
				e.clock.advance(time.Duration(i*37) * time.Millisecond)
				w := e.send(request{})
				for w.Code == http.StatusOK {
					w = e.send(request{})
				}
				seconds, err := strconv.Atoi(w.Header().Get("Retry-After"))
				require.NoError(t, err)
				require.GreaterOrEqual(t, seconds, 1)
				require.LessOrEqual(t, seconds, 60)
				e.clock.advance(time.Duration(seconds) * time.Second)
				require.Equal(t, http.StatusOK, e.send(request{}).Code, "after waiting %d s", seconds)
			}
		})
	}
}

// Tiers with the same identity have counters of their own, within a stack and between stacks.
func TestEachTierHasItsOwnCounters(t *testing.T) {
	t.Parallel()
	e := newEdge(t, `
:8080 {
	route {
		tiered_limit t11-a {
			tier one 2/m {
				key {header.X-User}
			}
			tier two 5/m {
				key {header.X-User}
			}
		}
		tiered_limit t11-b {
			tier one 9/m {
				key {header.X-User}
			}
		}
		respond ok
	}
}`)
	u := user("u")
	assert.Equal(t, 2, e.served(4, u))
	assert.Equal(t, []int64{2}, e.used("t11-a", "one", u))
	assert.Equal(t, []int64{2}, e.used("t11-a", "two", u))
	assert.Equal(t, []int64{2}, e.used("t11-b", "one", u))
}

// A dry tier counts what it would refuse, and nothing else tells that it is there.
func TestADryTierOnlyCounts(t *testing.T) {
	t.Parallel()
	for _, charge := range []string{"served", "checked"} {
		t.Run(charge, func(t *testing.T) {
			t.Parallel()
			name := "t12-" + charge
			e := newEdge(t, fmt.Sprintf(`
:8080 {
	tiered_limit %s {
		trusted_hops 0
		headers x-ratelimit draft-11
		charge %s
		tier ip 1/m {
			dry_run
		}
		tier user 3/m {
			key {header.X-User}
		}
	}
	respond ok
}`, name, charge))
			for i := range 5 {
				w := e.send(user("u"))
				if i < 3 {
					assert.Equal(t, http.StatusOK, w.Code)
				} else {
					wantRefused(t, w, "user")
				}
				assert.Equal(t, "user", resource(w))
				assert.Equal(t, `"user";q=3;w=60`, w.Header().Get("RateLimit-Policy"))
				assert.Equal(t, fmt.Sprintf(`"user";r=%d;t=60`, max(0, 2-i)), w.Header().Get("RateLimit"))
				for field, values := range w.Header() {
					assert.NotContains(t, strings.Join(values, " "), `"ip"`, field)
				}
				assert.NotContains(t, w.Body.String(), "ip")
			}
			assert.Equal(t, []int64{1}, e.used(name, "ip", user("u")), "a dry tier is charged only when it would allow")
			assert.Equal(t, []int64{3}, e.used(name, "user", user("u")))
			assert.Equal(t, 4.0, e.metric(fmt.Sprintf(`refusals_total{dry_run="true",stack=%q,tier="ip"}`, name)))
			assert.Equal(t, 0.0, e.metric(fmt.Sprintf(`refusals_total{dry_run="false",stack=%q,tier="ip"}`, name)))
			assert.Equal(t, 2.0, e.metric(fmt.Sprintf(`refusals_total{dry_run="false",stack=%q,tier="user"}`, name)))
			assert.Equal(t, 1.0, e.metric(fmt.Sprintf(`requests_total{outcome="served",stack=%q}`, name)))
			assert.Equal(t, 2.0, e.metric(fmt.Sprintf(`requests_total{outcome="dry_refused",stack=%q}`, name)))
			assert.Equal(t, 2.0, e.metric(fmt.Sprintf(`requests_total{outcome="refused",stack=%q}`, name)))
		})
	}
}

// A dry tier never changes what other tiers charge, by whichever mode, wherever it stands.
func TestADryTierChangesNoOtherTier(t *testing.T) {
	t.Parallel()
	for i, c := range []struct {
		tiers             string
		wantIP, wantOther int64 // after 6 requests
	}{
		{"tier ip 4/m\n tier dry 2/m {\n key d\n dry_run\n }", 4, 2},
		{"tier dry 2/m {\n key d\n dry_run\n charge checked\n }\n tier ip 4/m", 4, 2},
		{"tier dry 9/m {\n key d\n dry_run\n charge checked\n }\n tier ip 4/m", 4, 6},
		{"tier dry 9/m {\n key d\n dry_run\n }\n tier ip 4/m", 4, 4},
		{"tier ip 4/m\n tier dry 9/m {\n key d\n dry_run\n charge checked\n }", 4, 4},
	} {
		name := fmt.Sprint("dry-other-", i)
		e := newEdge(t, fmt.Sprintf(":8080 {\n tiered_limit %s {\n trusted_hops 0\n %s\n }\n respond ok\n}", name, c.tiers))
		assert.Equal(t, 4, e.served(6, request{}), c.tiers)
		assert.Equal(t, []int64{c.wantIP}, e.used(name, "ip", request{}), c.tiers)
		assert.Equal(t, []int64{c.wantOther}, e.used(name, "dry", request{}), c.tiers)
	}
}

// A dry stack decides and charges as if live, serves everything, and shows itself in no response.
func TestADryStackServesAndShowsNothing(t *testing.T) {
	t.Parallel()
	for _, charge := range []string{"served", "checked"} {
		t.Run(charge, func(t *testing.T) {
			t.Parallel()
			name := "dry-stack-" + charge
			site := func(mode string) string {
				return fmt.Sprintf(`
:8080 {
	tiered_limit %s-%s {
		trusted_hops 0
		charge %s
		headers x-ratelimit draft-11
		%s
		tier ip 5/m
		tier user 2/m {
			key {header.X-User}
		}
	}
	respond "ok {http.tiered_limit.tier}"
}`, name, mode, charge, map[string]string{"dry": "dry_run", "live": ""}[mode])
			}
			dry, live := newEdge(t, site("dry")), newEdge(t, site("live"))
			for i := range 8 {
				q := user(fmt.Sprint("u", i%2))
				w := dry.send(q)
				live.send(q)
				assert.Equal(t, http.StatusOK, w.Code)
				assert.Equal(t, "ok ", w.Body.String())
				for field := range w.Header() {
					assert.NotContains(t, strings.ToLower(field), "ratelimit")
					assert.NotEqual(t, "Retry-After", field)
				}
				for _, tier := range []string{"ip", "user"} {
					assert.Equal(t, live.used(name+"-live", tier, q), dry.used(name+"-dry", tier, q), "tier %s after %d", tier, i+1)
				}
			}
			refused := live.metric(fmt.Sprintf(`requests_total{outcome="refused",stack="%s-live"}`, name))
			assert.Equal(t, 4.0, refused)
			assert.Equal(t, refused, dry.metric(fmt.Sprintf(`requests_total{outcome="dry_refused",stack="%s-dry"}`, name)))
			assert.Equal(t, 0.0, dry.metric(fmt.Sprintf(`requests_total{outcome="refused",stack="%s-dry"}`, name)))
		})
	}
}

// Over many window boundaries and with many callers, no window is over its limit and no count is lost: each
// served request leaves a remainder of its own.
func TestManyCallersAcrossManyWindows(t *testing.T) {
	t.Parallel()
	e := newEdge(t, `
:8080 {
	tiered_limit t13 {
		tier global 50/s
	}
	respond ok
}`)
	const callers, each, perStep, step = 1000, 20, 25, 250 * time.Millisecond
	pace := &pace{clock: e.clock, step: step, every: perStep}
	var mu sync.Mutex
	seen := make(map[string]map[string]int) // reset, remaining: how often
	var wg sync.WaitGroup
	for range callers {
		wg.Go(func() {
			for range each {
				done := pace.begin()
				w := e.send(request{})
				done()
				if w.Code != http.StatusOK {
					continue
				}
				reset, remaining := w.Header().Get("X-RateLimit-Reset"), w.Header().Get("X-RateLimit-Remaining")
				mu.Lock()
				if seen[reset] == nil {
					seen[reset] = make(map[string]int)
				}
				seen[reset][remaining]++
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	assert.GreaterOrEqual(t, len(seen), callers*each/perStep/4, "windows that served")
	for reset, remainders := range seen {
		assert.LessOrEqual(t, len(remainders), 50, reset)
		for remaining, n := range remainders {
			assert.Equal(t, 1, n, "window %s, remaining %s", reset, remaining)
		}
	}
}

// pace moves the clock on with the requests, by a step for every so many of them. Requests straddle steps, but by less
// than a second in all, since a reading of the clock that is staler than that is a clock set back.
type pace struct {
	clock *testClock
	step  time.Duration
	every int

	mu      sync.Mutex
	begun   int
	running [4]sync.WaitGroup // the requests of the last steps
}

// begin begins a request and returns what ends it.
func (p *pace) begin() (done func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.begun++
	if p.begun%p.every == 0 {
		p.running[(p.begun/p.every)%len(p.running)].Wait()
		p.clock.advance(p.step)
	}
	running := &p.running[(p.begun/p.every)%len(p.running)]
	running.Add(1)
	return running.Done
}

// A tier of a named stack is charged once per request, however often the request meets it.
func TestANamedStackMetTwiceIsChargedOnce(t *testing.T) {
	t.Parallel()
	const block = "trusted_hops 0\n tier ip 3/m\n tier global 100/m"
	for _, c := range []struct{ name, site string }{
		{"route", ":8080 {\n route {\n tiered_limit %[1]s {\n %[2]s\n }\n tiered_limit %[1]s {\n %[2]s\n }\n respond ok\n }\n}"},
		{"nested", ":8080 {\n tiered_limit %[1]s {\n %[2]s\n }\n handle /* {\n tiered_limit %[1]s {\n %[2]s\n }\n handle {\n" +
			" tiered_limit %[1]s {\n %[2]s\n }\n respond ok\n }\n }\n}"},
		{"invoked twice", "&(lim) {\n tiered_limit %[1]s {\n %[2]s\n }\n}\n:8080 {\n route {\n invoke lim\n invoke lim\n respond ok\n }\n}"},
		{"errors", ":8080 {\n tiered_limit %[1]s {\n %[2]s\n }\n error 404\n handle_errors {\n tiered_limit %[1]s {\n %[2]s\n }\n respond ok 200\n }\n}"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			name := "t14-" + strings.ReplaceAll(c.name, " ", "-")
			e := newEdge(t, fmt.Sprintf(c.site, name, block))
			assert.Equal(t, 2, e.served(2, request{}))
			assert.Equal(t, []int64{2}, e.used(name, "ip", request{}))
			assert.Equal(t, []int64{2}, e.used(name, "global", request{}))
			w := e.send(request{})
			assert.Equal(t, http.StatusOK, w.Code)
			assert.Equal(t, "0", w.Header().Get("X-RateLimit-Remaining"))
		})
	}
}

// Handlers of one named stack may have tiers of their own beside the common ones.
func TestCommonTiersBesideOwnOnes(t *testing.T) {
	t.Parallel()
	e := newEdge(t, `
:8080 {
	route {
		tiered_limit t14-common {
			trusted_hops 0
			tier global 5/m
		}
		route /posts {
			tiered_limit t14-common {
				trusted_hops 0
				tier global 5/m
				tier posts 2/m {
					key {http.tiered_limit.client_ip}
				}
			}
		}
		respond ok
	}
}`)
	posts := request{url: "http://localhost/posts"}
	assert.Equal(t, 2, e.served(2, posts))
	wantRefused(t, e.send(posts), "posts")
	assert.Equal(t, []int64{3}, e.used("t14-common", "global", request{}), "charged by the first handler, before the second refused")
	assert.Equal(t, 2, e.served(3, request{}))
	wantRefused(t, e.send(request{}), "global")
}

// Where a request meets several stacks, the refusing one's fields win, else those with the least share left.
func TestOfSeveralStacksOneSpeaks(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, first, second string
		requests            int
		want                string // the tier named, of the last response
		status              int
	}{
		{"first has less left", "tier a 3/m {\n key k\n }", "tier b 10/m {\n key k\n }", 1, "a", 200},
		{"second has less left", "tier a 10/m {\n key k\n }", "tier b 3/m {\n key k\n }", 1, "b", 200},
		{"a tie goes to the first", "tier a 10/m {\n key k\n }", "tier b 20/m {\n key {header.X-Twice}\n key k\n }\n tier c 10/m {\n key k\n }", 1, "a", 200},
		{"first refuses", "tier a 2/m {\n key k\n }", "tier b 10/m {\n key k\n }", 3, "a", 429},
		{"second refuses", "tier a 10/m {\n key k\n }", "tier b 2/m {\n key k\n }", 3, "b", 429},
		{"second refuses with the larger share", "tier a 3/m {\n key k\n }", "tier b 2/d {\n key k\n }", 3, "b", 429},
		{"first is dry", "dry_run\n tier a 1/m {\n key k\n }", "tier b 10/m {\n key k\n }", 3, "b", 200},
		{"second is dry", "tier a 10/m {\n key k\n }", "dry_run\n tier b 1/m {\n key k\n }", 3, "a", 200},
		{"second shows nothing", "tier a 10/m {\n key k\n }", "headers none\n tier b 3/m {\n key k\n }", 1, "a", 200},
		{"first shows nothing", "headers none\n tier a 3/m {\n key k\n }", "tier b 10/m {\n key k\n }", 1, "b", 200},
		{"second refuses and shows nothing", "tier a 10/m {\n key k\n }", "headers none\n tier b 1/m {\n key k\n }", 2, "", 429},
		{"second concerns nothing", "tier a 10/m {\n key k\n }", "tier b 1/m {\n key k\n match path /other\n }", 3, "a", 200},
		{"first concerns nothing", "tier a 1/m {\n key k\n match path /other\n }", "tier b 10/m {\n key k\n }", 3, "b", 200},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			name := "speaks-" + strings.ReplaceAll(c.name, " ", "-")
			e := newEdge(t, fmt.Sprintf(`
:8080 {
	route {
		tiered_limit %[1]s-1 {
			%[2]s
		}
		tiered_limit %[1]s-2 {
			%[3]s
		}
		respond ok
	}
}`, name, c.first, c.second))
			var w *httptest.ResponseRecorder
			for range c.requests {
				w = e.send(request{})
			}
			assert.Equal(t, c.status, w.Code)
			want := []string{c.want}
			if c.want == "" {
				want = nil
			}
			assert.Equal(t, want, w.Header().Values("X-RateLimit-Resource"))
			assert.Len(t, w.Header().Values("X-RateLimit-Limit"), len(want))
			assert.Len(t, w.Header().Values("X-RateLimit-Remaining"), len(want))
		})
	}
}

// Fields of a stack that has lost to another are gone, those of the other header set too, and so are their names.
func TestTheLosersFieldsAreWithdrawn(t *testing.T) {
	t.Parallel()
	e := newEdge(t, `
:8080 {
	route {
		tiered_limit withdrawn-1 {
			headers draft-11
			tier a 10/m {
				key k
			}
		}
		tiered_limit withdrawn-2 {
			tier b 2/m {
				key k
			}
		}
		respond ok
	}
}`)
	for i, status := range []int{200, 200, 429} {
		w := e.send(request{}.with("Origin", "https://app.example.com"))
		assert.Equal(t, status, w.Code)
		assert.Equal(t, "b", resource(w), i)
		assert.Empty(t, w.Header().Values("RateLimit"))
		assert.Empty(t, w.Header().Values("RateLimit-Policy"))
		exposed := strings.Join(w.Header().Values("Access-Control-Expose-Headers"), ", ")
		assert.Contains(t, exposed, "X-RateLimit-Limit")
		assert.NotContains(t, exposed, "RateLimit-Policy")
	}
}

// A clock that is set back frees nobody early and locks nobody out for longer than a window.
func TestClockSetBack(t *testing.T) {
	t.Parallel()
	for _, back := range []time.Duration{time.Hour, time.Minute, 90 * time.Second, 2 * time.Second, 24*time.Hour + 7*time.Second} {
		t.Run(back.String(), func(t *testing.T) {
			t.Parallel()
			e := newEdge(t, fmt.Sprintf(`
:8080 {
	tiered_limit t15-%d {
		trusted_hops 0
		tier ip 2/m
	}
	respond ok
}`, int(back.Seconds())))
			a, b := request{}.from(clientA), request{}.from(clientB)
			e.clock.set(testStart.Add(48*time.Hour + 20*time.Second))
			assert.Equal(t, 2, e.served(3, a))
			e.clock.advance(-back)
			for elapsed := time.Duration(0); elapsed < 40*time.Second; elapsed += 500 * time.Millisecond {
				w := e.send(a)
				require.Equal(t, http.StatusTooManyRequests, w.Code, "freed %s early", 40*time.Second-elapsed)
				retry, err := strconv.Atoi(w.Header().Get("Retry-After"))
				require.NoError(t, err)
				require.Equal(t, int((40*time.Second-elapsed+999*time.Millisecond)/time.Second), retry)
				e.clock.advance(500 * time.Millisecond)
			}
			assert.Equal(t, 2, e.served(3, a), "the window has run its length")
			assert.Equal(t, 2, e.served(3, b))
		})
	}
}

// A reading of the clock that is less than a second behind the latest changes nothing.
func TestAClockThatStutters(t *testing.T) {
	t.Parallel()
	e := newEdge(t, `
:8080 {
	tiered_limit t15-stutter {
		trusted_hops 0
		tier ip 1/m
	}
	respond ok
}`)
	e.clock.set(testStart.Add(time.Minute))
	assert.Equal(t, 1, e.served(1, request{}))
	e.clock.advance(-999 * time.Millisecond) // into the window before
	assert.Equal(t, 0, e.served(3, request{}))
	e.clock.advance(999 * time.Millisecond)
	assert.Equal(t, 0, e.served(3, request{}))
}

// A tier that is switched off is as if it were not there.
func TestATierThatIsOffIsNotThere(t *testing.T) {
	t.Parallel()
	for i, limits := range []string{"0/m", "off", "5/s 0/m", "0/s 5/m", "{$TIERED_LIMIT_TEST_UNSET:0}/{$TIERED_LIMIT_TEST_UNSET:1m}"} {
		name := fmt.Sprint("off-", i)
		e := newEdge(t, fmt.Sprintf(`
:8080 {
	tiered_limit %s {
		trusted_hops 0
		headers draft-11
		tier ip %s
		tier user 2/m {
			key {header.X-User}
		}
	}
	respond ok
}`, name, limits))
		w := e.send(user("u"))
		assert.Equal(t, `"user";q=2;w=60`, w.Header().Get("RateLimit-Policy"), limits)
		assert.Equal(t, 1, e.served(3, user("u")), limits)
		assert.Equal(t, 2, e.served(2, request{}), "%s: nobody to count", limits)
		assert.Empty(t, e.logs.lines("error", "DISABLED"), limits)
	}
}

// With every tier off there is no limiting, no field and no warning, with or without a topology; the client's address
// is still there for others.
func TestAStackThatIsOffOnlyTellsTheClient(t *testing.T) {
	t.Parallel()
	for hops, want := range map[string]string{"": "ok ", "trusted_hops 0": "ok 203.0.113.1"} {
		e := newEdge(t, fmt.Sprintf(`
:8080 {
	tiered_limit {
		%s
		tier ip 0/m
		tier global off
	}
	respond "ok {http.tiered_limit.client_ip}"
}`, hops))
		for range 20 {
			w := e.send(request{})
			assert.Equal(t, http.StatusOK, w.Code)
			assert.Equal(t, want, w.Body.String())
			assert.Empty(t, w.Header().Values("X-RateLimit-Limit"))
		}
		assert.Empty(t, e.logs.lines("warn", ""))
	}
}

// Which tiers concern a request is for the tier's own matcher to say.
func TestATierConcernsOnlyWhatItMatches(t *testing.T) {
	t.Parallel()
	e := newEdge(t, `
:8080 {
	@api path /api/*
	tiered_limit match {
		trusted_hops 0
		headers draft-11
		tier posts 1/m {
			key {http.tiered_limit.client_ip}
			match {
				method POST
				path /posts
			}
		}
		tier api 2/m {
			key {http.tiered_limit.client_ip}
			match @api
		}
		tier ip 3/m {
			match not path /posts
		}
	}
	respond ok
}`)
	post := request{method: "POST", url: "http://localhost/posts"}
	w := e.send(post)
	assert.Equal(t, `"posts";q=1;w=60`, w.Header().Get("RateLimit-Policy"))
	assert.Equal(t, 0, e.served(2, post))
	w = e.send(request{url: "http://localhost/posts"})
	assert.Equal(t, http.StatusOK, w.Code)
	assert.Empty(t, w.Header().Values("RateLimit-Policy"), "no tier applied")
	w = e.send(request{url: "http://localhost/api/x"})
	assert.Equal(t, `"api";q=2;w=60, "ip";q=3;w=60`, w.Header().Get("RateLimit-Policy"))
	assert.Equal(t, 1, e.served(3, request{url: "http://localhost/api/y"}))
	assert.Equal(t, 1, e.served(3, request{url: "http://localhost/"}))
}

// Matchers see the path as rewrites in front have left it.
func TestMatchersSeeTheRewrittenPath(t *testing.T) {
	t.Parallel()
	e := newEdge(t, `
:8080 {
	uri strip_prefix /v1
	tiered_limit rewritten {
		trusted_hops 0
		exempt /health
		tier posts 1/m {
			key k
			match path /posts
		}
	}
	respond ok
}`)
	assert.Equal(t, 1, e.served(3, request{url: "http://localhost/v1/posts"}))
	assert.Equal(t, 3, e.served(3, request{url: "http://localhost/v1/health"}))
	assert.Equal(t, []int64{1}, e.used("rewritten", "posts", request{}))
}

// early makes a request one whose source address is not yet proven.
func early(r *http.Request) { r.TLS = &tls.ConnectionState{HandshakeComplete: false} }

// A request in early data is sent back where its address would decide, and only there.
func TestEarlyData(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, block string
		header      http.Header
		want        int
	}{
		{"client address", "tier ip 1/m", nil, 425},
		{"part of a key", "tier x 1/m {\n key {header.X-User} {http.tiered_limit.client_ip}\n }", nil, 425},
		{"peer address", "tier x 1/m {\n key {remote_host}\n }", nil, 425},
		{"peer network", "tier x 1/m {\n key {http.request.remote.host/24,64}\n }", nil, 425},
		{"address of Caddy's", "tier x 1/m {\n key {client_ip}\n }", nil, 425},
		{"exempt clients", "exempt_clients 192.0.2.0/24\n tier global 100/m", nil, 425},
		{"global only", "tier global 100/m", nil, 200},
		{"other keys", "tier x 100/m {\n key {header.X-User}\n }", http.Header{"X-User": {"u"}}, 200},
		{"alternative not needed", "tier x 100/m {\n key {header.X-User}\n key {http.tiered_limit.client_ip}\n }", http.Header{"X-User": {"u"}}, 200},
		{"alternative needed", "tier x 100/m {\n key {header.X-User}\n key {http.tiered_limit.client_ip}\n }", nil, 425},
		{"tier does not match", "tier ip 1/m {\n match path /other\n }\n tier global 9/m", nil, 200},
		{"exempt path", "exempt /\n tier ip 1/m", nil, 200},
		{"dry tier", "tier ip 1/m {\n dry_run\n }\n tier global 9/m", nil, 200},
		{"dry stack", "dry_run\n tier ip 1/m", nil, 200},
		{"dry stack, exempt clients", "dry_run\n exempt_clients 192.0.2.0/24\n tier ip 1/m", nil, 200},
		{"inert", "", nil, 200},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			name := "early-" + strings.NewReplacer(" ", "-", ",", "", "'", "").Replace(strings.ToLower(c.name))
			hops := "trusted_hops 0"
			if c.block == "" {
				hops, c.block = "", "tier ip 1/m"
			}
			e := newEdge(t, fmt.Sprintf("http://localhost:8080 {\n tiered_limit %s {\n %s\n %s\n }\n respond ok\n}", name, hops, c.block))
			for range 3 {
				w := e.send(request{header: c.header, edit: early})
				assert.Equal(t, c.want, w.Code)
			}
			if c.want == 425 {
				assert.Equal(t, 3.0, e.metric(fmt.Sprintf(`requests_total{outcome="too_early",stack=%q}`, name)))
				assert.Equal(t, 0.0, e.metric(fmt.Sprintf(`requests_total{outcome="served",stack=%q}`, name)))
			}
		})
	}
}

// What is sent back as too early has cost nobody anything.
func TestEarlyDataIsNotCharged(t *testing.T) {
	t.Parallel()
	e := newEdge(t, `
http://localhost:8080 {
	tiered_limit early-free {
		trusted_hops 0
		charge checked
		tier global 2/m
		tier ip 2/m
	}
	respond ok
}`)
	for range 5 {
		assert.Equal(t, 425, e.send(request{edit: early}).Code)
	}
	assert.Equal(t, []int64{0}, e.used("early-free", "global", request{}))
	assert.Equal(t, 2, e.served(3, request{}))
}

// A dry tier or stack lets no matcher's error through; a live one answers with it.
func TestAMatcherThatFails(t *testing.T) {
	t.Parallel()
	for mode, want := range map[string]int{"": 425, "dry_run": 200} {
		e := newEdge(t, fmt.Sprintf(`
http://localhost:8080 {
	tiered_limit matcher-fails-%d {
		tier x 1/m {
			key k
			match remote_ip 192.0.2.0/24
			%s
		}
	}
	respond ok
}`, want, mode))
		assert.Equal(t, want, e.send(request{edit: early}).Code, mode)
	}
}

// Requests that one client sends over different protocols, and with absurd headers, count alike and never fail.
func TestAbsurdRequestsAreLimitedLikeAnyOther(t *testing.T) {
	t.Parallel()
	e := newEdge(t, `
:8080 {
	tiered_limit absurd {
		trusted_hops 1
		tier ip 100000/m
		tier user 100000/m {
			key {header.X-User} {cookie.session} {query.q}
		}
	}
	respond ok
}`)
	for _, value := range []string{"", ",", ",,,,", "\x00", "\xff\xfe", strings.Repeat("1.1.1.1,", 10_000), strings.Repeat("x", 64<<10), "[", "::", "1.2.3.4:99999", strings.Repeat("[", 9999)} {
		for _, field := range []string{"X-Forwarded-For", "X-User", "Cookie", "Origin", "Forwarded"} {
			w := e.send(request{}.with(field, value))
			assert.Equal(t, http.StatusOK, w.Code, "%s: %.20q", field, value)
			w = e.send(request{}.with(field, value, value, ""))
			assert.Equal(t, http.StatusOK, w.Code, "%s: %.20q twice", field, value)
		}
	}
	for _, proto := range []struct {
		name         string
		major, minor int
	}{{"HTTP/1.0", 1, 0}, {"HTTP/2.0", 2, 0}, {"HTTP/3.0", 3, 0}} {
		w := e.send(request{edit: func(r *http.Request) { r.Proto, r.ProtoMajor, r.ProtoMinor = proto.name, proto.major, proto.minor }})
		assert.Equal(t, http.StatusOK, w.Code, proto.name)
	}
}

// An error of a handler behind the stack stays that handler's error, and the request stays charged.
func TestAnErrorBehindTheStack(t *testing.T) {
	t.Parallel()
	fails := script(t, func(http.ResponseWriter, *http.Request, caddyhttp.Handler) error {
		return caddyhttp.Error(http.StatusBadGateway, errors.New("no upstream"))
	})
	e := newEdge(t, fmt.Sprintf(":8080 {\n tiered_limit err-behind {\n trusted_hops 0\n tier ip 2/m\n }\n scripted %s\n}", fails))
	assert.Equal(t, []int{502, 502, 429}, e.statuses(3, request{}))
	w := e.send(request{}.from(clientB))
	assert.Equal(t, "1", w.Header().Get("X-RateLimit-Remaining"), "the response was judged")
}
