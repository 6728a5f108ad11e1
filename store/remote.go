package store

import (
	"fmt"
	"time"
)

// UnavailableError tells that a store cannot decide at present, and what is to become of the request. A store that
// can be away returns it from [Counters.Take], so that its user's choice between refusing and serving takes effect.
// Any other error counts as one that says neither to serve nor when to come back.
type UnavailableError struct {
	// Serve asks to serve the request although nothing was counted. Otherwise it is to be answered with 503, since
	// the client has done nothing wrong.
	Serve bool

	// RetryAfter is when asking again makes sense. Zero is unknown.
	RetryAfter time.Duration

	// Kind is the sort of failure, in one word from a small fixed set of the store's own, for metrics.
	Kind string

	// Err is the cause.
	Err error
}

// Error describes the failure.
func (e *UnavailableError) Error() string {
	return fmt.Sprintf("the store cannot decide (%s): %v", e.Kind, e.Err)
}

// Unwrap returns the cause.
func (e *UnavailableError) Unwrap() error { return e.Err }

// Connector is implemented by counters of a store that connects. Without it, the first request would have to wait for
// the connection.
type Connector interface {
	// Connect begins to connect, if that has not been done, and does not wait. It is called once the configuration
	// has been accepted, and never for one that is only validated.
	Connect()

	// Away says since when the store is not asked, since it cannot be reached, and what becomes of requests until it can.
	// It is nil while the store decides.
	Away() *Absence
}

// Absence is a time without a remote store.
type Absence struct {
	// Since is when it began.
	Since time.Time

	// Kind says why, in a word as in [UnavailableError.Kind].
	Kind string

	// Instead says who decides meanwhile.
	Instead Instead
}

// Instead is what becomes of requests without a remote store.
type Instead string

const (
	// InsteadRefuse answers them 503.
	InsteadRefuse Instead = "deny"

	// InsteadServe serves them.
	InsteadServe Instead = "allow"

	// InsteadLocal decides by counters in this process.
	InsteadLocal Instead = "local"
)

// Shared is implemented by stores whose counters several instances share, so that a stack without a name, which no other
// instance could know it by, has none there.
type Shared interface {
	// Shared does nothing.
	Shared()
}

// Fallible is implemented by counters of a store that can fail.
type Fallible interface {
	// FailureKinds are all values that [UnavailableError.Kind] and [Decision.Degraded] can have, at most 16, so that
	// metrics have a series for each from the beginning.
	FailureKinds() []string
}

// Rememberer is implemented by counters that refuse from memory what a remote store has refused before.
type Rememberer interface {
	// Remembered is how many requests were refused from memory since the counters exist.
	Remembered() int64
}

// Interface guard
var _ error = (*UnavailableError)(nil)
