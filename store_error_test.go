package tieredlimit

import (
	"context"
	"errors"
	"net/http"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/stretchr/testify/assert"
)

// awayStore is a store that is away, and says what is to become of requests.
type awayStore struct {
	Serve bool `json:"serve,omitempty"`
	Plain bool `json:"plain,omitempty"`
}

func init() { caddy.RegisterModule(awayStore{}) }

func (awayStore) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.tiered_limit.stores.away", New: func() caddy.Module { return new(awayStore) }}
}

func (s *awayStore) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next()
	for d.NextArg() {
		s.Serve = s.Serve || d.Val() == "serve"
		s.Plain = s.Plain || d.Val() == "plain"
	}
	return nil
}

func (s *awayStore) Open(StackSpec) (Counters, error) { return s, nil }

func (s *awayStore) Take(context.Context, time.Time, []Claim) (Decision, error) {
	if s.Plain {
		return Decision{}, errors.New("broken")
	}
	return Decision{}, &UnavailableError{Serve: s.Serve, RetryAfter: 2500 * time.Millisecond, Kind: "away", Err: errors.New("down")}
}

func (s *awayStore) Peek(ctx context.Context, now time.Time, claims []Claim) (Decision, error) {
	return s.Take(ctx, now, claims)
}

func (*awayStore) Settle(context.Context, time.Time, []Claim) error { return nil }
func (*awayStore) Reset(context.Context, time.Time, []Claim) error  { return nil }
func (*awayStore) Close() error                                     { return nil }

// A store that cannot decide is no fault of the client's, so it is never answered 429 and never 500.
func TestStoreThatCannotDecide(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, store, options string
		status               int
		retry, mediaType     string
	}{
		{"refuse", "store away", "", 503, "3", "application/problem+json"},
		{"refuse in graphql", "store away", "body graphql", 503, "3", "application/json"},
		{"refuse in text", "store away", "body text", 503, "3", "text/plain; charset=utf-8"},
		{"refuse without a body", "store away", "body none", 503, "3", ""},
		{"an error that says nothing", "store away plain", "", 503, "1", "application/problem+json"},
		{"serve", "store away serve", "", 200, "", "text/plain; charset=utf-8"},
		{"dry stack", "store away", "dry_run", 200, "", "text/plain; charset=utf-8"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			e := newEdge(t, ":8080 {\ntiered_limit away {\ntrusted_hops 0\ntier ip 1/m\n"+c.store+"\n"+c.options+"\n}\nrespond ok\n}")
			w := e.send(request{header: http.Header{"Origin": {"https://app.example"}}})
			assert.Equal(t, c.status, w.Code)
			assert.Equal(t, c.retry, w.Header().Get("Retry-After"))
			assert.Equal(t, c.mediaType, w.Header().Get("Content-Type"))
			assert.Empty(t, w.Header().Get("X-RateLimit-Limit"), "nothing is known to tell")
			if c.status == 503 {
				assert.Equal(t, "no-store", w.Header().Get("Cache-Control"))
				assert.Equal(t, "Retry-After", w.Header().Get("Access-Control-Expose-Headers"))
			}
		})
	}
}
