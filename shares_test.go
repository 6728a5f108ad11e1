package tieredlimit

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tieredlimit/caddy-tieredlimit/internal/redistest"
)

// shareSite has a tier with two limits of which exports may use a part, and other slow things another.
func shareSite(name, store string) string {
	return ":8080 {\ntiered_limit " + name + " {\nheaders x-ratelimit draft-11\n" + store + "\ntier global 10/d 25/7d {\nshare 60% path /export/*\nshare 35% {\npath /slow /export/all\nmethod GET\n}\n}\n}\nrespond ok\n}"
}

func at(path string) request { return request{url: "http://localhost" + path} }

// A request of a share is refused once that much of the count is used up, by whomever; the rest is for the others.
func TestASharesRequestsLeaveTheRest(t *testing.T) {
	t.Parallel()
	stores := map[string]string{"memory": ""}
	stores["redis"] = "store redis {\naddress " + redistest.Start(t).Addr() + "\n}"
	for kind, store := range stores {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			e := newEdge(t, shareSite("shares-"+kind, store))
			assert.Equal(t, 3, e.served(5, at("/slow")), "35 % of 10, rounded down")
			assert.Equal(t, 3, e.served(5, at("/export/all")), "the first share that matches holds: 60 %")
			assert.Equal(t, 0, e.served(2, at("/export/x")))
			assert.Equal(t, 4, e.served(9, at("/checkout")), "what is left is for the others")
			assert.Equal(t, []int64{10, 10}, e.used("shares-"+kind, "global", request{}))
			assert.Equal(t, 0, e.served(1, at("/slow")))
		})
	}
}

// Whoever others have left no room in the share is refused, though the tier has room; nothing is charged for it.
func TestAShareCountsWhatOthersUse(t *testing.T) {
	t.Parallel()
	e := newEdge(t, shareSite("shares-others", ""))
	assert.Equal(t, 7, e.served(7, at("/checkout")))
	assert.Equal(t, 0, e.served(3, at("/export/x")))
	assert.Equal(t, []int64{7, 7}, e.used("shares-others", "global", request{}))
	assert.Equal(t, 3, e.served(5, at("/checkout")))
}

// The client is told the count that holds for it.
func TestAnswersTellTheShare(t *testing.T) {
	t.Parallel()
	e := newEdge(t, strings.Replace(shareSite("shares-answers", ""), "respond ok", "respond ok\nheader X-Seen {http.tiered_limit.limit}", 1))
	w := e.send(at("/export/x"))
	assert.Equal(t, "6", w.Header().Get("X-RateLimit-Limit"))
	assert.Equal(t, "5", w.Header().Get("X-RateLimit-Remaining"))
	assert.Equal(t, `"global";q=6;w=86400, "global.2";q=15;w=604800`, w.Header().Get("RateLimit-Policy"))
	assert.Regexp(t, `^"global";r=5;t=\d+$`, w.Header().Get("RateLimit"))
	w = e.send(at("/checkout"))
	assert.Equal(t, "10", w.Header().Get("X-RateLimit-Limit"))
	assert.Equal(t, `"global";q=10;w=86400, "global.2";q=25;w=604800`, w.Header().Get("RateLimit-Policy"))
	require.Equal(t, 5, e.served(5, at("/checkout")))
	w = e.send(at("/slow"))
	require.Equal(t, http.StatusTooManyRequests, w.Code)
	assert.Equal(t, "3", w.Header().Get("X-RateLimit-Limit"))
	assert.Equal(t, "0", w.Header().Get("X-RateLimit-Remaining"), "never negative")
	assert.Contains(t, w.Body.String(), "The limit of 3 requests in 86400 s (global) is used up.")
}

// The binding limit is the one with the least left of what the request may use.
func TestTheBindingLimitGoesByTheShare(t *testing.T) {
	t.Parallel()
	e := newEdge(t, ":8080 {\ntiered_limit shares-binding {\ntier a 10/m {\nkey a\n}\ntier b 12/m {\nkey b\nshare 50% path /slow\n}\n}\nrespond ok\n}")
	assert.Equal(t, "a", e.send(request{}).Header().Get("X-RateLimit-Resource"))
	w := e.send(at("/slow"))
	assert.Equal(t, "b", w.Header().Get("X-RateLimit-Resource"))
	assert.Equal(t, "4", w.Header().Get("X-RateLimit-Remaining"))
}

// Matching is careful: what could be a request of the share is one, unless the tier says literal.
func TestSharesMatchWithCare(t *testing.T) {
	t.Parallel()
	for mode, left := range map[string]string{"careful": "0", "literal": "1"} {
		for i, target := range []string{"/x/..;/export", "/export;x", "/export%20"} {
			e := newEdge(t, fmt.Sprintf(":8080 {\ntiered_limit shares-%s-%d {\ntier global 2/m {\nmatch_mode %s\nshare 50%% path /export\n}\n}\nrespond ok\n}", mode, i, mode))
			assert.Equal(t, left, e.send(at(target)).Header().Get("X-RateLimit-Remaining"), "%s %s", mode, target)
		}
	}
}

// A share is at least one request, and a hundred percent is the whole.
func TestTheSmallestAndTheLargestShare(t *testing.T) {
	t.Parallel()
	for i, c := range []struct{ count, percent, want int }{
		{1, 1, 1}, {99, 1, 1}, {100, 1, 1}, {199, 1, 1}, {200, 1, 2}, {3, 34, 1}, {3, 67, 2}, {10, 100, 10}, {7, 50, 3}, {2147483647, 50, 1073741823},
	} {
		e := newEdge(t, fmt.Sprintf(":8080 {\ntiered_limit smallest-%d {\ntier global %d/m {\nshare %d%% *\n}\n}\nrespond ok\n}", i, c.count, c.percent))
		assert.Equal(t, fmt.Sprint(c.want), e.send(request{}).Header().Get("X-RateLimit-Limit"), "%+v", c)
	}
}

// No more than the share gets through at once.
func TestASharesRequestsAtOnce(t *testing.T) {
	t.Parallel()
	e := newEdge(t, ":8080 {\ntiered_limit shares-at-once {\ntier global 200/d {\nshare 25% path /slow\n}\n}\nrespond ok\n}")
	var slow, fast atomic.Int64
	var wait sync.WaitGroup
	for i := range 8 {
		wait.Go(func() {
			for range 100 {
				if i%2 == 0 {
					slow.Add(int64(e.served(1, at("/slow"))))
				} else {
					fast.Add(int64(e.served(1, at("/fast"))))
				}
			}
		})
	}
	wait.Wait()
	assert.LessOrEqual(t, slow.Load(), int64(50))
	assert.Equal(t, int64(200), slow.Load()+fast.Load())
}

// A dry tier with a share refuses nobody; a reload that changes a share keeps what was used.
func TestSharesInADryRunAndOverAReload(t *testing.T) {
	t.Parallel()
	site := func(lines string) string {
		return ":8080 {\ntiered_limit shares-reload {\ntier global 10/d {\n" + lines + "\n}\n}\nrespond ok\n}"
	}
	e := newEdge(t, site("dry_run\nshare 20% path /slow"))
	assert.Equal(t, 5, e.served(5, at("/slow")))
	assert.Equal(t, []int64{2}, e.used("shares-reload", "global", request{}))
	assert.Equal(t, 3.0, e.metric(`refusals_total{dry_run="true",stack="shares-reload",tier="global"}`))
	e.reload(site("share 30% path /slow"))
	assert.Equal(t, 1, e.served(5, at("/slow")))
	e.reload(site("share 50% path /slow"))
	assert.Equal(t, 2, e.served(5, at("/slow")))
	e.reload(site(""))
	assert.Equal(t, 5, e.served(9, at("/slow")))
}

// Explain says which share a request may use.
func TestSharesAreExplained(t *testing.T) {
	t.Parallel()
	e := newEdge(t, shareSite("explain-shares", ""))
	status, body := e.ask(http.MethodPost, "/tiered_limit/explain", `{"peer": "203.0.113.1", "path": "/slow"}`)
	require.Equal(t, http.StatusOK, status)
	assert.Contains(t, body, `"share":35`)
	assert.Contains(t, body, `"count":3,`)
	_, body = e.ask(http.MethodPost, "/tiered_limit/explain", `{"peer": "203.0.113.1", "path": "/"}`)
	assert.NotContains(t, body, `"share"`)
	assert.Contains(t, body, `"count":10,`)
}

// Bad shares are refused at load, whichever way they come in.
func TestBadSharesAreRefused(t *testing.T) {
	t.Parallel()
	for line, want := range map[string]string{
		"share":                     `tier "x": share needs a percentage and a matcher, such as: share 80% not path /checkout, at Caddyfile:4`,
		"share 80%":                 `tier "x": share 80% needs a matcher, at Caddyfile:4`,
		"share @missing":            `tier "x": share "@missing" is not a whole number of percent from 1% to 100%, at Caddyfile:4`,
		"share 0% path /a":          `tier "x": share "0%" is not a whole number`,
		"share 101 path /a":         `tier "x": share "101" is not a whole number`,
		"share 12.5% path /a":       `tier "x": share "12.5%" is not a whole number`,
		"share -5% path /a":         `tier "x": share "-5%" is not a whole number`,
		"share % path /a":           `tier "x": share "%" is not a whole number`,
		"share 80% @missing":        `tier "x": share 80%: unrecognized matcher name: @missing`,
		"share 80% nope":            `tier "x": share 80%: `,
		"share 80% /a /b":           `tier "x": share 80%: unexpected "/b"`,
		"share 80% path /a {\nx\n}": `tier "x": share 80%: `,
	} {
		_, err := tryLoad(t, ":8080 {\ntiered_limit bad-shares {\ntier x 9/m {\n"+line+"\nkey a\n}\n}\n}")
		assert.ErrorContains(t, err, want, line)
	}
	for shares, want := range map[string]string{
		`[{"percent": 0}]`:   `tier "x": share 0% is not between 1% and 100%`,
		`[{"percent": 101}]`: `tier "x": share 101% is not between 1% and 100%`,
		`[null]`:             `tier "x": share 1 is null`,
	} {
		h := new(Handler)
		require.NoError(t, json.Unmarshal([]byte(`{"tiers": [{"name": "x", "limits": [], "keys": [["a"]], "shares": `+shares+`}]}`), h))
		assert.ErrorContains(t, h.check(), want, shares)
	}
}
