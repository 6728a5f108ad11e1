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

// full reports whether there is no room for an identity.
func (w *window) full(identity []byte) bool {
	_, known := w.used[sha256.Sum256(identity)]
	return !known && len(w.used) >= room
}

// add counts hits, or takes them back.
func (w *window) add(f fingerprint, hits int64) {
	if hits > 0 || w.used[f] > 0 {
		w.used[f] = min(max(w.used[f]+hits, 0), store.MostUsed)
	}
}

// counter is the counter of an identity, or of its group. Without groups there is one for all.
func counter(tier *store.TierSpec, identity []byte, grouped bool) fingerprint {
	if !grouped {
		return sha256.Sum256(identity)
	}
	var f fingerprint
	if tier.Group != nil {
		binary.BigEndian.PutUint64(f[:], tier.Group(identity))
	}
	return f
}

// handle is one configuration's use of a stack.
type handle struct {
	spec  store.StackSpec
	stack *stack
}

// Take decides a request and charges for it.
func (h *handle) Take(_ context.Context, now time.Time, claims []store.Claim) (store.Decision, error) {
	return h.decide(now, claims, true)
}

// Peek decides without charging.
func (h *handle) Peek(_ context.Context, now time.Time, claims []store.Claim) (store.Decision, error) {
	return h.decide(now, claims, false)
}

func (h *handle) decide(now time.Time, claims []store.Claim, charge bool) (store.Decision, error) {
	if err := h.spec.Check(claims); err != nil {
		return store.Decision{RefusedBy: -1}, err
	}
	s := h.lock(now)
	defer s.mu.Unlock()
	refusedBy := -1
	allows := make([]bool, len(h.spec.Tiers))
	asked := make(map[counted]int64)
	for i := range claims {
		c, tier := &claims[i], claims[i].Tier
		behind := refusedBy >= 0 && tier != claims[refusedBy].Tier // a tier behind a refusal is not asked
		admitted := h.look(c, asked) && !c.Refused
		for j := range c.States {
			c.States[j].Exceeded = c.States[j].RetryAfter != 0 && !behind
		}
		first := i == 0 || claims[i-1].Tier != tier
		allows[tier] = admitted && (first || allows[tier])
		if !admitted && !h.spec.Tiers[tier].DryRun && refusedBy < 0 {
			refusedBy = i
		}
	}
	for i := range claims {
		c := &claims[i]
		checked := i < refusedBy && h.spec.Tiers[c.Tier].Charge == store.ChargeChecked
		if charge && allows[c.Tier] && (refusedBy < 0 || checked) {
			h.add(c)
		}
	}
	return store.Decision{RefusedBy: refusedBy, Now: time.UnixMilli(s.now)}, nil
}

// counted is a counter.
type counted struct {
	window *window
	fingerprint
}

// look fills in what the counters say to a claim, and reports whether all admit it. Those in front have asked for hits.
func (h *handle) look(c *store.Claim, asked map[counted]int64) bool {
	tier, admitted := &h.spec.Tiers[c.Tier], true
	for j, limit := range tier.Limits {
		w := h.stack.window(tier.Name, limit.Window)
		state := store.State{Window: w.end, ResetAfter: time.Duration(w.end-h.stack.now) * time.Millisecond}
		if w.full(c.Identity) {
			state.Window = -w.end // it is counted by its group
		}
		f := counter(tier, c.Identity, state.Window < 0)
		state.Used = w.used[f]
		state.RetryAfter = c.Wait(j, limit.Count, state.Used+asked[counted{w, f}], state.ResetAfter)
		asked[counted{w, f}] += c.Hits
		admitted = admitted && state.RetryAfter == 0
		c.States[j] = state
	}
	return admitted
}

// add adds the hits of a claim to what its states are about, if their windows are still the current ones.
func (h *handle) add(c *store.Claim) {
	tier := &h.spec.Tiers[c.Tier]
	for j, limit := range tier.Limits {
		w, state := h.stack.window(tier.Name, limit.Window), &c.States[j]
		if f := counter(tier, c.Identity, state.Window < 0); state.Window == w.end || state.Window == -w.end {
			w.add(f, c.Hits)
			state.Used = w.used[f]
		}
	}
}

// Settle corrects what a decision has charged.
func (h *handle) Settle(_ context.Context, now time.Time, claims []store.Claim) error {
	if err := h.spec.CheckCorrections(claims); err != nil {
		return err
	}
	s := h.lock(now)
	defer s.mu.Unlock()
	for i := range claims {
		h.add(&claims[i])
	}
	return nil
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
