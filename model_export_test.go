package tieredlimit

import (
	"net/http/httptest"
	"testing"
	"time"
)

// Edge is a whole server for tests outside of the package, which alone can compare with the stores of others.
type Edge struct{ e *edge }

// NewEdge provisions a Caddyfile.
func NewEdge(t *testing.T, caddyfile string) *Edge { return &Edge{newEdge(t, caddyfile)} }

// Reload puts another Caddyfile in the place of the running one, unless it is refused.
func (e *Edge) Reload(caddyfile string) error { return e.e.tryReload(caddyfile) }

// SetTime sets the clock.
func (e *Edge) SetTime(t time.Time) { e.e.clock.set(t) }

// Close cleans up the running config.
func (e *Edge) Close() {
	e.e.close()
	e.e.app.handlers = nil
}

// Send serves a GET request, or one with another method, from a peer, with the field X-User if it is not empty.
func (e *Edge) Send(method, url, peer, user string) *httptest.ResponseRecorder {
	q := request{method: method, url: url, peer: peer}
	if user != "" {
		q.header = map[string][]string{"X-User": {user}}
	}
	return e.e.send(q)
}

// TestStart is where the clock begins.
var TestStart = testStart
