package store

import (
	"context"
	"time"
)

// Store keeps counters and nothing else. It never learns about proxies, routes or policies: which limit applies,
// and to whom a hit belongs, is decided before it is asked.
//
// A store is a Caddy module in the namespace http.tiered_limit.stores. It must be safe for concurrent use, and Open
// must not dial: connections are made at the first decision, so that a config can be validated, and a server started,
// while a remote store is away.
type Store interface {
	// Open returns the counters of a stack. Counters that were opened under one stack name, in stores of one
	// configuration, are the same counters until the last of them is closed, and they outlive a configuration
	// reload that keeps the name: the new config opens them before the old one closes them.
	//
	// Everything else in the spec (limits, charging, dry run) belongs to the returned handle alone. Handles with
	// different limits may be in use at the same time on the same counters, as they are during a reload.
	Open(spec StackSpec) (Counters, error)
}

// StackSpec says which tiers a stack has. It is fixed for the life of a [Counters] handle.
type StackSpec struct {
	// Name identifies the stack: 1 to 64 of a-z 0-9 _ - for a named one, a fixed-length fingerprint with a leading
	// dot for an unnamed one.
	Name string

	// Named tells that a user gave the name. Only then is the stack the same on every instance.
	Named bool

	// Tiers are in the order written. Claims refer to them by index.
	Tiers []TierSpec
}

// TierSpec is one tier of a stack as a store needs to know it.
type TierSpec struct {
	// Name is unique within the stack: 1 to 64 of a-z 0-9 _ -.
	Name string

	// Limits has at least one element, and no two with the same window.
	Limits []Limit

	// Charge says when the tier is charged.
	Charge ChargeMode

	// DryRun makes the tier one that never refuses: see [Counters.Take].
	DryRun bool

	// Single tells that the tier has one bucket for everybody, so that its identity never varies.
	Single bool
}

// Limit is a number of hits in a fixed window that is aligned to the Unix epoch.
type Limit struct {
	// Count is how many hits a window admits, 1 to 2^31-1.
	Count int64

	// Window is the length of the window: a whole number of milliseconds, at least one.
	Window time.Duration
}

// ChargeMode says when a tier is charged for a request.
type ChargeMode uint8

const (
	// ChargeServed charges the tier only for requests that every tier allows. It is the default.
	ChargeServed ChargeMode = iota

	// ChargeChecked charges the tier as soon as it has allowed the request itself, even if a later one refuses.
	ChargeChecked
)

// String is the mode as it is written in a configuration.
func (m ChargeMode) String() string {
	if m == ChargeChecked {
		return "checked"
	}
	return "served"
}

// Claim asks for one hit on every limit of one tier for one identity.
type Claim struct {
	// Tier is the index of the tier in [StackSpec.Tiers]. A tier occurs at most once in a decision.
	Tier int

	// Identity is who the hit belongs to, in canonical form: equal bytes are one counter. It is at most a few
	// hundred bytes long, may hold any byte, belongs to the caller again when the call returns, and must not be
	// kept or shown in the clear. A store makes its own fingerprint of it.
	Identity []byte

	// Group is a coarser identity, below [Groups], that many identities share: an address's network, or a hash. A
	// store that has no room for a further identity may count it by its group.
	Group uint32
}

// Groups is the number of different values of [Claim.Group]. The lower half is the first 16 bits of an IPv4 address,
// the upper half a hash of anything else.
const Groups = 1 << 17

// State is what one limit's counter says after a decision.
type State struct {
	// Used is how many hits are counted in the current window, those of this decision included. It can be above the
	// limit's count after the limit was lowered.
	Used int64

	// Left is the time until the current window ends: more than 0, at most the length of the window.
	Left time.Duration

	// Exceeded tells that the limit did not admit this hit: the tier refused the request, or would have if it were
	// not a dry one. It is false for claims behind a refusal, which are not asked.
	Exceeded bool
}

// Decision is the outcome of [Counters.Take].
type Decision struct {
	// RefusedBy is the index, in the claims, of the first tier that refused, or -1 if every tier allowed.
	RefusedBy int

	// Now is the time of the decision on the store's clock, to which State.Left may be added.
	Now time.Time

	// Without tells, where it is not empty, that the store itself could not decide and why, in a word as in
	// [UnavailableError.Kind], and that it has decided by other means.
	Without string
}

// Counters are the counters of one stack. Implementations are safe for concurrent use.
type Counters interface {
	// Take decides one request, atomically. It looks at the claims in order:
	//
	//   - A tier allows the request if each of its limits has used less than its count in the current window.
	//   - The first tier that does not allow it refuses it, unless it is a dry one, and no tier behind it is
	//     consulted or charged.
	//   - If none refuses, every tier that allows the request is charged one hit on each of its limits.
	//   - If one refuses, the tiers in front of it that allow the request and are charged when checked are charged,
	//     and no other.
	//
	// So a dry tier never refuses and is charged, by its own mode, only when it would allow; a tier never charges
	// for a request that it refuses itself; and no decision sees or suffers a charge that was not made.
	//
	// Windows are aligned to the Unix epoch on the store's clock. A store without a clock of its own takes now; one
	// that is shared between instances has its own and ignores now.
	//
	// Take fills into with one State per limit, claim by claim in order; it must have room for them all. What it says
	// of claims behind a refusal is as they stand, uncharged. A store that remembers refusals may answer again from
	// memory: then only the states of the tier that refuses are known, and all others say that nothing is used.
	//
	// A refusal is data. An error means that the store could not decide.
	Take(ctx context.Context, now time.Time, claims []Claim, into []State) (Decision, error)

	// Peek is Take without charging anything.
	Peek(ctx context.Context, now time.Time, claims []Claim, into []State) (Decision, error)

	// Reset forgets what the claims' counters have counted in the current window. The Group is not touched.
	Reset(ctx context.Context, now time.Time, claims []Claim) error

	// Close returns the handle. It is called once. Calls that are still under way, or come later from requests that
	// outlasted a reload, must not panic; they may fail.
	Close() error
}

// Tracker is implemented by counters that can tell how many they hold.
type Tracker interface {
	// Tracked is how many counters are held in the current windows.
	Tracked() int64

	// Overflowed is how many hits were counted by their group, for want of room, since the counters exist.
	Overflowed() int64
}
