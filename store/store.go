package store

import (
	"bytes"
	"context"
	"fmt"
	"math"
	"time"
)

// Store keeps counters and nothing else. It never learns about proxies, routes or policies: which limit applies,
// and to whom a hit belongs, is decided before it is asked.
//
// A store is a Caddy module in the namespace http.tiered_limit.stores. It must be safe for concurrent use, and Open
// must not dial: a store connects when the configuration has been accepted ([Connector]), so that a config can be validated,
// and a server started, while a remote store is away.
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

	// Group, where it is not nil, says to which coarser identity, as the network of an address, an identity of the tier
	// belongs. A store that has no room for a further identity may count it by its group. It is asked only when a counter
	// is to be added, so it costs known clients nothing. It must always say the same of an identity, may be called
	// concurrently, and must not keep the identity. Groups below 65536 are never taken for one another; the greater ones
	// may share counters if they are many. Without it, identities are not related.
	Group func(identity []byte) uint64
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

// Claim asks for hits on every limit of one tier for one identity.
//
// A decision may have several claims of one tier, of distinct identities. They stand one behind the other, and the tier
// allows the request if each of them is admitted.
type Claim struct {
	// Tier is the index of the tier in [StackSpec.Tiers].
	Tier int

	// Identity is who the hits belong to, in canonical form: equal bytes are one counter. It is at most a few hundred
	// bytes long, may hold any byte, belongs to the caller again when the call returns, and must not be kept or shown in
	// the clear. A store makes its own fingerprint of it.
	Identity []byte

	// Hits is how many hits are asked for, 0 to [MostHits]. With 0 the claim asks whether one would pass, and charges
	// nothing. For [Counters.Settle] it is a correction, and may be negative.
	Hits int64

	// Counts, where it is not nil, has one count for each of the tier's limits. For this decision a limit's count is the
	// lower of that and its own. It is not kept.
	Counts []int64

	// Refused tells that the tier refuses the request whatever its counters say, since that was decided elsewhere. A dry
	// tier would refuse it.
	Refused bool

	// States has one State for each of the tier's limits, which the caller provides and the store fills in.
	States []State
}

// MostHits is the greatest number of hits of a claim, and of a correction in either direction.
const MostHits = math.MaxInt32

// MostUsed is where counters stop. Only corrections lead there.
const MostUsed = math.MaxUint32

// Count is how many hits the claim may find used up by itself and others on the tier's nth limit, which admits count.
func (c *Claim) Count(n int, count int64) int64 {
	if c.Counts == nil {
		return count
	}
	return min(count, c.Counts[n])
}

// Needs is how many hits have to be left for the claim: those that it asks for, and at least one.
func (c *Claim) Needs() int64 { return max(c.Hits, 1) }

// Wait is the RetryAfter of a claim that finds so many hits used on the tier's nth limit, which admits count and is reset
// after a time: none if it is admitted.
func (c *Claim) Wait(n int, count, used int64, resetAfter time.Duration) time.Duration {
	count = c.Count(n, count)
	switch needs := c.Needs(); {
	case used+needs <= count:
		return 0
	case needs > count:
		return Never
	}
	return resetAfter
}

// Check refuses claims that no decision of the stack can have. It is for stores.
func (s *StackSpec) Check(claims []Claim) error {
	for i := range claims {
		if err := s.checkTier(claims, i); err != nil {
			return err
		}
		if err := claims[i].Check(len(s.Tiers[claims[i].Tier].Limits)); err != nil {
			return err
		}
	}
	return nil
}

// CheckCorrections is Check for [Counters.Settle].
func (s *StackSpec) CheckCorrections(claims []Claim) error {
	for i := range claims {
		if err := s.checkTier(claims, i); err != nil {
			return err
		}
		if err := claims[i].CheckCorrection(len(s.Tiers[claims[i].Tier].Limits)); err != nil {
			return err
		}
	}
	return nil
}

// CheckTiers is Check for [Counters.Reset].
func (s *StackSpec) CheckTiers(claims []Claim) error {
	for i := range claims {
		if err := s.checkTier(claims, i); err != nil {
			return err
		}
	}
	return nil
}

// checkTier refuses the ith claim if its tier is not there, or was claimed before but for other identities in the
// claims in front.
func (s *StackSpec) checkTier(claims []Claim, i int) error {
	tier := claims[i].Tier
	if uint(tier) >= uint(len(s.Tiers)) {
		return fmt.Errorf("claim of tier %d in a stack of %d", tier, len(s.Tiers))
	}
	for j := i - 1; j >= 0; j-- {
		switch {
		case claims[j].Tier != tier:
		case claims[i-1].Tier != tier:
			return fmt.Errorf("tier %d is claimed twice, with another one between", tier)
		case s.Tiers[tier].Single || bytes.Equal(claims[j].Identity, claims[i].Identity):
			return fmt.Errorf("tier %d is claimed twice for one identity", tier)
		}
	}
	return nil
}

// Check refuses a claim of a tier with so many limits if it asks for too much, or has as many counts or states as do not
// fit. It is for stores.
func (c *Claim) Check(limits int) error {
	if c.Hits < 0 {
		return fmt.Errorf("%d hits are claimed of tier %d; want 0 to %d", c.Hits, c.Tier, MostHits)
	}
	return c.CheckCorrection(limits)
}

// CheckCorrection is Check for [Counters.Settle].
func (c *Claim) CheckCorrection(limits int) error {
	switch {
	case c.Hits < -MostHits || c.Hits > MostHits:
		return fmt.Errorf("%d hits are claimed of tier %d; want no more than %d", c.Hits, c.Tier, MostHits)
	case c.Counts != nil && len(c.Counts) != limits:
		return fmt.Errorf("%d counts for the %d limits of tier %d", len(c.Counts), limits, c.Tier)
	case len(c.States) != limits:
		return fmt.Errorf("room for %d states of the %d limits of tier %d", len(c.States), limits, c.Tier)
	}
	return nil
}

// State is what one limit's counter says to a claim after a decision.
type State struct {
	// Used is how many hits are counted now, those of this decision included. It can be above the limit's count after the
	// limit was lowered or a correction has added to it.
	Used int64

	// RetryAfter is the time until the hits that were asked for could pass, if nobody else comes: 0 if they did or could,
	// [Never] if they are more than the count.
	RetryAfter time.Duration

	// ResetAfter is the time until nothing is used: for a fixed window the time until it ends, more than 0 and at most
	// its length.
	ResetAfter time.Duration

	// Exceeded tells that the limit did not admit this claim. It is false for claims behind a refusal, which are not
	// asked.
	Exceeded bool

	// ByGroup tells that the identity has no counter of its own, for want of room: what is used is that of its group. See
	// [TierSpec.Group].
	ByGroup bool

	// Window says to [Counters.Settle] which window of which counter was looked at. Its meaning is the store's own.
	Window int64
}

// Never is the [State.RetryAfter] of hits that do not pass however long they wait.
const Never time.Duration = -1

// Decision is the outcome of [Counters.Take].
type Decision struct {
	// RefusedBy is the index, in the claims, of the first one that the refusing tier did not admit, or -1 if every tier
	// allowed.
	RefusedBy int

	// Now is the time of the decision on the store's clock, to which the times of a State may be added.
	Now time.Time

	// Degraded tells, where it is not empty, that the store itself could not decide and why, in a word as in
	// [UnavailableError.Kind], and that it has decided by other means.
	Degraded string
}

// Counters are the counters of one stack. Implementations are safe for concurrent use.
type Counters interface {
	// Take decides one request, atomically. It looks at the claims in order:
	//
	//   - A limit admits a claim if what is used in the current window and the hits that the claim asks for, but at least
	//     one, are together no more than its count.
	//   - A tier allows the request if its limits admit each of its claims and none of them says that it refuses.
	//   - The first tier that does not allow it refuses it, unless it is a dry one, and no tier behind it is
	//     consulted or charged.
	//   - If none refuses, every tier that allows the request is charged the hits of its claims on each of its limits.
	//   - If one refuses, the tiers in front of it that allow the request and are charged when checked are charged,
	//     and no other.
	//
	// So a dry tier never refuses and is charged, by its own mode, only when it would allow; a tier never charges
	// for a request that it refuses itself; and no decision sees or suffers a charge that was not made. Where a store
	// counts two claims by one counter, for want of room, the later one finds the hits of the earlier one used.
	//
	// Windows are aligned to the Unix epoch on the store's clock. A store without a clock of its own takes now; one
	// that is shared between instances has its own and ignores now.
	//
	// Take fills in the claims' states. What it says of claims behind a refusal is as they stand, uncharged. A store that
	// remembers refusals may answer again from memory: then only the states of the claim that is refused are known, and
	// all others say that nothing is used.
	//
	// A refusal is data. An error means that the store could not decide. A call that
	// has to wait returns soon after ctx is canceled, with an error, and then nobody knows whether anything was charged.
	Take(ctx context.Context, now time.Time, claims []Claim) (Decision, error)

	// Peek is Take without charging anything.
	Peek(ctx context.Context, now time.Time, claims []Claim) (Decision, error)

	// Settle corrects, atomically, what a decision of this handle has charged. The claims are as Take has left them, or
	// some of them, except for their hits: so many are added to what is counted on each limit, whatever its count, or
	// given back if they are negative, down to nothing. Only the window that the decision was about is corrected, and only
	// while it is the current one. What cannot be given back any more stays counted.
	//
	// A store that remembers refusals may refuse from memory for a few seconds after hits were given back elsewhere.
	Settle(ctx context.Context, now time.Time, claims []Claim) error

	// Reset forgets what the claims' counters have counted in the current window. What is counted by groups is not
	// touched. Of the claims only the tier and the identity matter.
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
