package tieredlimit

import (
	"fmt"
	"math/bits"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// threeTiers is the stack that the figures are about: per client address, per user, and for the whole service.
const threeTiers = `
:8080 {
	tiered_limit %s {
		trusted_hops 1
		tier ip %d/h
		tier user 2000000000/h {
			key {http.request.header.X-User}
		}
		tier global 2000000000/h
	}
	respond ok
}`

// preparedHandler is the only handler of an edge, with requests as its server would hand them over. A request may be
// used again after rewind.
type preparedHandler struct {
	h     *Handler
	r     []*http.Request
	saved []caddy.Replacer
}

func prepareHandler(tb testing.TB, e *edge, clients int) *preparedHandler {
	handlers := e.handlers()
	require.Len(tb, handlers, 1)
	p := &preparedHandler{h: handlers[0]}
	for i := range clients {
		r := httptest.NewRequest(http.MethodGet, "http://localhost/", nil)
		r.RemoteAddr = "192.0.2.1:443"
		r.Header.Set("X-Forwarded-For", fmt.Sprintf("10.%d.%d.%d", i>>16, i>>8&255, i&255))
		r.Header.Set("X-User", fmt.Sprintf("user-%d", i))
		repl := caddy.NewReplacer()
		p.r = append(p.r, caddyhttp.PrepareRequest(r, repl, nil, p.h.server))
		p.saved = append(p.saved, *repl)
	}
	return p
}

// rewind makes the replacer of a request forget what a handler has added to it.
func (p *preparedHandler) rewind(i int) *http.Request {
	*p.r[i].Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer) = p.saved[i]
	return p.r[i]
}

// decideOnce decides as serving does.
func decideOnce(rec *record, now time.Time) (outcome, error) {
	sc := scratchPool.Get().(*scratch)
	defer sc.release()
	return rec.evaluate(now, sc, (*Handler).take)
}

func TestDecidingAllocatesNothing(t *testing.T) {
	p := prepareHandler(t, newEdge(t, fmt.Sprintf(threeTiers, "alloc", 5)), 1)
	r := p.rewind(0)
	for _, want := range []outcome{outcomeServed, outcomeRefused} {
		rec := newRecord(p.h, r)
		allocs := testing.AllocsPerRun(20, func() {
			rec.verdict, rec.judged, rec.resolved = verdict{}, 0, false
			_, err := decideOnce(rec, testStart)
			require.NoError(t, err)
		})
		if want == outcomeRefused { // by now the limit of 5 is used up
			got, err := decideOnce(rec, testStart)
			require.NoError(t, err)
			assert.Equal(t, want, got)
		}
		if raceFactor == 1 { // the race detector makes sync.Pool forget at random
			assert.Zero(t, allocs, "allocations to decide")
		}
	}
}

func BenchmarkDecide(b *testing.B) {
	p := prepareHandler(b, newEdge(b, fmt.Sprintf(threeTiers, "decide", 2_000_000_000)), 1)
	rec := newRecord(p.h, p.rewind(0))
	b.ReportAllocs()
	for b.Loop() {
		rec.verdict, rec.judged, rec.resolved = verdict{}, 0, false
		if _, err := decideOnce(rec, time.Now()); err != nil {
			b.Fatal(err)
		}
	}
}

// matchedTiers are three tiers, of which one has a matcher.
const matchedTiers = `
:8080 {
	tiered_limit %s {
		trusted_hops 1
		exempt /health
		tier ip 2000000000/h
		tier some 2000000000/h {
			key {http.request.header.X-User}
			match %s
		}
		tier global 2000000000/h
	}
	respond ok
}`

// What it costs to find out which tiers a request concerns: /api/v1/users/12345, which is a plain path.
func BenchmarkDecideWhichTiers(b *testing.B) {
	for i, match := range []string{"path /login", "path /api/*", "not path /static/*", "path /static/*", "method POST", "path_regexp ^/login"} {
		b.Run(match, func(b *testing.B) {
			p := prepareHandler(b, newEdge(b, fmt.Sprintf(matchedTiers, fmt.Sprint("which-", i), match)), 1)
			r := p.rewind(0)
			r.URL.Path, r.RequestURI = "/api/v1/users/12345", "/api/v1/users/12345"
			rec := newRecord(p.h, r)
			b.ReportAllocs()
			for b.Loop() {
				rec.verdict, rec.judged, rec.resolved = verdict{}, 0, false
				if out, err := decideOnce(rec, time.Now()); err != nil || out != outcomeServed {
					b.Fatal(out, err)
				}
			}
		})
	}
}

func BenchmarkServeHTTP(b *testing.B) {
	next := caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error { return nil })
	for _, clients := range []int{1, 100_000} {
		for name, count := range map[string]int{"served": 2_000_000_000, "refused": 1} {
			b.Run(fmt.Sprintf("%s/clients=%d", name, clients), func(b *testing.B) {
				p := prepareHandler(b, newEdge(b, fmt.Sprintf(threeTiers, fmt.Sprintf("%s-%d", name, clients), count)), clients)
				w := &nullWriter{header: make(http.Header)}
				b.ReportAllocs()
				i := 0
				for b.Loop() {
					clear(w.header)
					if err := p.h.ServeHTTP(w, p.rewind(i), next); err != nil {
						b.Fatal(err)
					}
					if i += 7919; i >= clients {
						i %= clients
					}
				}
			})
		}
	}
}

// nullWriter takes a response and forgets it.
type nullWriter struct{ header http.Header }

func (w *nullWriter) Header() http.Header       { return w.header }
func (*nullWriter) Write(p []byte) (int, error) { return len(p), nil }
func (*nullWriter) WriteHeader(int)             {}

// Reading a key out of a cookie, a query or credentials allocates nothing.
func TestReadingKeysAllocatesNothing(t *testing.T) {
	p := prepareHandler(t, newEdge(t, fmt.Sprintf(keyTiers, "keys-alloc", "tier query 2000000000/h {\nkey {http.request.uri.query.api_key}\n}")), 1)
	r := p.rewind(0)
	r.Header["Cookie"] = []string{"theme=dark; lang=en-GB; sid=%76alid-0123456789; consent=yes"}
	r.Header["Authorization"] = []string{"Bearer 0123456789abcdef"}
	r.URL.RawQuery = "page=2&api_key=0123456789&sort=asc"
	rec := newRecord(p.h, r)
	allocations := testing.AllocsPerRun(100, func() {
		rec.verdict, rec.judged, rec.resolved = verdict{}, 0, false
		if out, err := decideOnce(rec, time.Now()); err != nil || out != outcomeServed {
			t.Fatal(out, err)
		}
	})
	if raceFactor == 1 {
		assert.Zero(t, allocations)
	}
	assert.Equal(t, 4, bits.OnesCount64(rec.judged))
}

// keyTiers are tiers by address, credentials and cookie, and more.
const keyTiers = `
:8080 {
	tiered_limit %s {
		trusted_hops 1
		tier ip 2000000000/h
		tier token 2000000000/h {
			key {http.request.header.Authorization}
		}
		tier session 2000000000/h {
			key {http.request.cookie.sid}
		}
		%s
	}
	respond ok
}`

// What it costs to decide by address, credentials and a cookie.
func BenchmarkDecideByKeys(b *testing.B) {
	p := prepareHandler(b, newEdge(b, fmt.Sprintf(keyTiers, "keys-bench", "")), 1)
	r := p.rewind(0)
	r.Header["Cookie"] = []string{"theme=dark; lang=en-GB; sid=valid-0123456789; consent=yes"}
	r.Header["Authorization"] = []string{"Bearer 0123456789abcdef"}
	rec := newRecord(p.h, r)
	b.ReportAllocs()
	for b.Loop() {
		rec.verdict, rec.judged, rec.resolved = verdict{}, 0, false
		if out, err := decideOnce(rec, time.Now()); err != nil || out != outcomeServed {
			b.Fatal(out, err)
		}
	}
}
