// Package harness measures rate limiters as Caddy runs them: each is loaded and provisioned by Caddy itself, then called
// with a request at a time and nothing behind it.
//
// Each subject runs in a process of its own, so that one's heap is not another's garbage to walk, and so that plugins
// which register the same module can be compared. The rounds of all subjects are interleaved, and what is reported is the
// ratio within a round, so that a machine that is busy with other things slows down both sides.
package harness

import (
	"fmt"
	"time"
)

// Subject is what is measured.
type Subject struct {
	// Name is what tables call it.
	Name string

	// Group says which tables it belongs in.
	Group Group

	// Tiers is how many identities it counts each request for.
	Tiers int

	// Open makes it ready for the requests of a case.
	Open func(Case) (Running, error)
}

// Group is the kind of a subject.
type Group string

const (
	// GroupServe are handlers, measured by their ServeHTTP.
	GroupServe Group = "serve"

	// GroupDecide are stores and floors without HTTP.
	GroupDecide Group = "decide"
)

// Running is a subject that is ready.
type Running interface {
	// Caller returns a function that sends the i-th request and reports whether it was served. Each goroutine has a
	// caller of its own.
	Caller(*visits) func(i int) bool

	// Close lets go of everything.
	Close() error
}

// Case says how a subject is used.
type Case struct {
	// Name is what tables call it.
	Name string

	// Keys is how many clients there are.
	Keys int

	// Spread says how often each client comes.
	Spread Spread

	// Refused makes the limit one that each client has used up.
	Refused bool

	// Count and Window are the limit of a client, where it matters. Default: one that is never reached, or with
	// Refused one that always is.
	Count  int
	Window time.Duration

	// MaxKeys is the most counters that a subject with such a bound may keep. Default: room for all.
	MaxKeys int

	// Prepared is how many requests are prepared and then used over and over, with another client's fields each time. A
	// server holds as many as it serves at once; one for each client would be a heap that no server has, whose cost to
	// the garbage collector falls on whoever allocates.
	Prepared int
}

// Spread says how often each client comes.
type Spread string

const (
	// Uniform: each client is as likely as any other.
	Uniform Spread = "uniform"

	// Zipf: few come often and most come seldom, with an exponent of 1.1.
	Zipf Spread = "zipf"
)

const (
	endless = 2_000_000_000 // a count that no case reaches
	ages    = 100_000 * time.Hour
)

// limit is the count and the window of a client's limit.
func (c Case) limit() (count int, window time.Duration) {
	count, window = c.Count, c.Window
	if count == 0 {
		count = endless
		if c.Refused {
			count = 1
		}
	}
	if window == 0 {
		window = ages
	}
	return count, window
}

// room is how many counters a subject may keep for each of some tiers.
func (c Case) room(tiers int) int {
	if c.MaxKeys > 0 {
		return c.MaxKeys
	}
	return max(tiers*c.Keys, 4_000_000)
}

// find returns the subject of a name.
func find(subjects []Subject, name string) (Subject, error) {
	for _, s := range subjects {
		if s.Name == name {
			return s, nil
		}
	}
	return Subject{}, fmt.Errorf("no subject is called %q", name)
}
