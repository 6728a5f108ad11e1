// Package mapstore is a store for tiered_limit that keeps its counters in maps behind a mutex.
package mapstore

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/tieredlimit/caddy-tieredlimit/store"
)

func init() {
	caddy.RegisterModule(Store{})
}

// Store is what "store map" says in a Caddyfile. It has no settings.
type Store struct{}

// CaddyModule returns the module's information. The last part of the ID is the name behind the word store.
func (Store) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "http.tiered_limit.stores.map",
		New: func() caddy.Module { return new(Store) },
	}
}

// UnmarshalCaddyfile reads the line, which is the word map alone.
func (*Store) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next()
	if d.NextArg() || d.NextBlock(0) {
		return d.Errf("store map takes no settings, but has %q", d.Val())
	}
	return nil
}

// stacks are those in use, by name. A reload takes them before it returns them, so they outlive it.
var stacks = caddy.NewUsagePool()

// Open returns a handle on the counters of a stack.
func (*Store) Open(spec store.StackSpec) (store.Counters, error) {
	shared, _, err := stacks.LoadOrNew(spec.Name, func() (caddy.Destructor, error) {
		return &stack{windows: make(map[limit]*window)}, nil
	})
	if err != nil {
		return nil, err
	}
	return &handle{spec: spec, stack: shared.(*stack)}, nil
}

// stack is what all handles on a stack share.
type stack struct {
	mu      sync.Mutex
	now     int64 // the latest time of all calls, in milliseconds: it never goes back
	windows map[limit]*window
}

// Destruct has nothing to do when the last handle is closed.
func (*stack) Destruct() error { return nil }

// limit says which counters belong together. The count is not in it, so a changed one keeps them.
type limit struct {
	tier   string
	length int64
}

// window is the current window of a limit.
type window struct {
	end  int64
	used map[fingerprint]int64
}

// fingerprint stands for an identity, which must not be kept.
type fingerprint [sha256.Size]byte

// room is how many counters a window has. Further clients share those of their groups, so a flood of new addresses
// cannot use up the memory.
const room = 100_000

// window returns the current window of a limit, a new one if that of before has ended.
func (s *stack) window(tier string, length time.Duration) *window {
	ms := length.Milliseconds()
	w := s.windows[limit{tier, ms}]
	if w == nil || w.end <= s.now {
		w = &window{end: s.now - s.now%ms + ms, used: make(map[fingerprint]int64)}
		s.windows[limit{tier, ms}] = w
	}
	return w
}

// counter tells which counter of the window a claim is about.
func (w *window) counter(claim store.Claim) fingerprint {
	f := fingerprint(sha256.Sum256(claim.Identity))
	if _, known := w.used[f]; !known && len(w.used) >= room {
		f = fingerprint{}
		binary.BigEndian.PutUint32(f[:], claim.Group)
	}
	return f
}

// handle is one configuration's use of a stack.
type handle struct {
	spec  store.StackSpec
	stack *stack
}

// Take decides a request and charges for it.
func (h *handle) Take(_ context.Context, now time.Time, claims []store.Claim, into []store.State) (
	store.Decision, error,
) {
	return h.decide(now, claims, into, true), nil
}

// Peek decides without charging.
func (h *handle) Peek(_ context.Context, now time.Time, claims []store.Claim, into []store.State) (
	store.Decision, error,
) {
	return h.decide(now, claims, into, false), nil
}

func (h *handle) decide(
	now time.Time, claims []store.Claim, into []store.State, charge bool,
) store.Decision {
	s := h.lock(now)
	defer s.mu.Unlock()
	decision := store.Decision{RefusedBy: -1, Now: time.UnixMilli(s.now)}
	full := make([]bool, len(claims))
	n := 0
	for i, claim := range claims {
		tier := h.spec.Tiers[claim.Tier]
		for _, limit := range tier.Limits {
			w := s.window(tier.Name, limit.Window)
			used := w.used[w.counter(claim)]
			exceeded := used >= limit.Count && decision.RefusedBy < 0 // tiers behind a refusal are not asked
			left := time.Duration(w.end-s.now) * time.Millisecond
			into[n] = store.State{Used: used, Left: left, Exceeded: exceeded}
			full[i] = full[i] || exceeded
			n++
		}
		if full[i] && !tier.DryRun && decision.RefusedBy < 0 {
			decision.RefusedBy = i
		}
	}
	if charge {
		h.charge(decision.RefusedBy, claims, full, into)
	}
	return decision
}

// charge counts a hit in every tier that allows the request if none has refused it, else in those in front of the
// refusing one that are charged when checked.
func (h *handle) charge(refusedBy int, claims []store.Claim, full []bool, into []store.State) {
	n := 0
	for i, claim := range claims {
		tier := h.spec.Tiers[claim.Tier]
		checked := i < refusedBy && tier.Charge == store.ChargeChecked
		for _, limit := range tier.Limits {
			if !full[i] && (refusedBy < 0 || checked) {
				w := h.stack.window(tier.Name, limit.Window)
				w.used[w.counter(claim)]++
				into[n].Used++
			}
			n++
		}
	}
}

// Reset forgets what the counters of the claims have counted.
func (h *handle) Reset(_ context.Context, now time.Time, claims []store.Claim) error {
	s := h.lock(now)
	defer s.mu.Unlock()
	for _, claim := range claims {
		tier := h.spec.Tiers[claim.Tier]
		for _, limit := range tier.Limits {
			delete(s.window(tier.Name, limit.Window).used, sha256.Sum256(claim.Identity))
		}
	}
	return nil
}

// lock locks the stack at a time.
func (h *handle) lock(now time.Time) *stack {
	h.stack.mu.Lock()
	h.stack.now = max(h.stack.now, now.UnixMilli())
	return h.stack
}

// Close returns the handle. The last one to be closed drops the counters.
func (h *handle) Close() error {
	_, err := stacks.Delete(h.spec.Name)
	return err
}

// Interface guards
var (
	_ caddyfile.Unmarshaler = (*Store)(nil)
	_ store.Store           = (*Store)(nil)
	_ store.Counters        = (*handle)(nil)
)
