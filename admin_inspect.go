package tieredlimit

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/tieredlimit/caddy-tieredlimit/internal/clientip"
)

// counterQuestion names one counter: the body of POST /tiered_limit/inspect and /tiered_limit/reset.
type counterQuestion struct {
	Stack string `json:"stack"`
	Tier  string `json:"tier"`
	Key   texts  `json:"key"`  // the values of the key's parts
	Line  int    `json:"line"` // which of several keys is meant, from 1; 0: the only one that has so many parts

	// Uncertain asks for the counter of all requests whose key cannot be read with certainty.
	Uncertain bool `json:"uncertain"`
}

// texts is an array of strings. That one of them is null is a mistake, and not an empty string.
type texts []string

// UnmarshalJSON reads an array of strings, or null for none.
func (t *texts) UnmarshalJSON(data []byte) error {
	var list []*string
	if err := json.Unmarshal(data, &list); err != nil {
		return err
	}
	*t = make(texts, len(list))
	for i, text := range list {
		if text == nil {
			return fmt.Errorf("element %d of an array is null, where a string is expected", i+1)
		}
		(*t)[i] = *text
	}
	return nil
}

// counterAnswer is what a counter says.
type counterAnswer struct {
	Stack       string         `json:"stack"`
	Tier        string         `json:"tier"`
	Key         []string       `json:"key"` // in the form in which it is counted
	Fingerprint string         `json:"fingerprint"`
	Limits      []limitReading `json:"limits"`
	Store       string         `json:"store,omitempty"` // whose counter it is, if the store is away
}

// limitReading is one limit of a counter.
type limitReading struct {
	limitStatus
	Used      int64     `json:"used"`
	Remaining int64     `json:"remaining"`
	ResetsIn  int64     `json:"resets_in"` // seconds, rounded up
	ResetsAt  time.Time `json:"resets_at"`
	Exceeded  bool      `json:"exceeded,omitempty"` // explain only: the limit does not admit the request
}

// inspect serves POST /tiered_limit/inspect.
func (a *Admin) inspect(r *http.Request, q *counterQuestion) (*counterAnswer, error) {
	c, err := a.counter(q)
	if err != nil {
		return nil, err
	}
	return c.read(r)
}

// reset serves POST /tiered_limit/reset. It answers with what the counter says afterwards.
func (a *Admin) reset(r *http.Request, q *counterQuestion) (*counterAnswer, error) {
	c, err := a.counter(q)
	if err != nil {
		return nil, err
	}
	if err := c.h.counters.Reset(r.Context(), c.h.now(), c.claims()); err != nil {
		return nil, storeError(err)
	}
	return c.read(r)
}

// counter is one identity's counter in a tier.
type counter struct {
	h     *Handler
	tier  *tier
	key   []string
	claim Claim
}

// claims ask whether the counter would admit one hit.
func (c *counter) claims() []Claim {
	claim := c.claim
	claim.States = make([]State, len(c.tier.spec.Limits))
	return []Claim{claim}
}

// read asks the store, and charges nothing.
func (c *counter) read(r *http.Request) (*counterAnswer, error) {
	claims := c.claims()
	decision, err := c.h.counters.Peek(r.Context(), c.h.now(), claims)
	if err != nil {
		return nil, storeError(err)
	}
	readings := c.tier.readings(claims[0].States, decision.Now, &c.tier.whole)
	for i := range readings {
		readings[i].Exceeded = false // no request is asked about
	}
	return &counterAnswer{
		Stack: c.h.stackLabel, Tier: c.tier.name, Key: c.key,
		Fingerprint: fingerprintText(fingerprint(c.claim.Identity)), Limits: readings, Store: withoutStore(decision, nil),
	}, nil
}

// readings are the states of the tier's limits as people see them, of which so much may be used.
func (t *tier) readings(states []State, now time.Time, q *quota) []limitReading {
	list := make([]limitReading, len(t.spec.Limits))
	for i, l := range t.spec.Limits {
		list[i] = limitReading{
			limitStatus: limitStatus{Count: q.counts[i], Window: shortDuration(l.Window)},
			Used:        states[i].Used, Remaining: max(0, q.counts[i]-states[i].Used), Exceeded: states[i].Exceeded,
			ResetsIn: ceilSeconds(states[i].ResetAfter), ResetsAt: now.Add(states[i].ResetAfter).UTC(),
		}
	}
	return list
}

// storeError tells that a store could not answer.
func storeError(err error) error {
	var away *UnavailableError
	if errors.As(err, &away) {
		return adminError(http.StatusServiceUnavailable, "%w", err)
	}
	return fmt.Errorf("store: %w", err)
}

// counter finds the counter that a question names.
func (a *Admin) counter(q *counterQuestion) (*counter, error) {
	handlers, err := a.stack(q.Stack)
	if err != nil {
		return nil, err
	}
	if q.Tier == "" {
		return nil, adminError(http.StatusBadRequest, "tier is missing")
	}
	c, err := findTier(handlers, q)
	if err != nil {
		return nil, err
	}
	if err := c.identify(q); err != nil {
		return nil, adminError(http.StatusBadRequest, "tier %q: %w", q.Tier, err)
	}
	return c, nil
}

// findTier finds the first handler of a stack that limits by a tier.
func findTier(handlers []*Handler, q *counterQuestion) (*counter, error) {
	var names []string
	mode := modeLimit
	off := false
	for _, h := range handlers {
		for _, t := range h.Tiers {
			off = off || t.Name == q.Tier
			if name := fmt.Sprintf("%q", t.Name); !slices.Contains(names, name) {
				names = append(names, name)
			}
		}
		if h.mode != modeLimit {
			mode = h.mode
			continue
		}
		for _, t := range h.tiers {
			if t.name == q.Tier {
				return &counter{h: h, tier: t, claim: Claim{Tier: t.index}}, nil
			}
		}
	}
	switch {
	case !off:
		return nil, adminError(http.StatusNotFound, "stack %q has no tier %q; it has %s", q.Stack, shortened(q.Tier), strings.Join(names, ", "))
	case mode == modeInert:
		return nil, adminError(http.StatusConflict, "stack %q is inert, so it counts nothing: it is not stated which proxies "+
			"stand in front of the server", q.Stack)
	}
	return nil, adminError(http.StatusConflict, "tier %q of stack %q is switched off, so it counts nothing", q.Tier, q.Stack)
}

// identify fills in whose counter it is.
func (c *counter) identify(q *counterQuestion) error {
	if c.tier.fixed != nil {
		if len(q.Key) > 0 || q.Uncertain {
			return errors.New("the tier has one counter for everybody; leave the key out")
		}
		c.claim.Identity = c.tier.fixed
		return nil
	}
	if q.Uncertain {
		if len(q.Key) > 0 || q.Line != 0 {
			return errors.New("requests whose key is uncertain have one counter; leave the key out")
		}
		c.key = []string{uncertainKey}
		c.claim.Identity = c.tier.keys[0].appendUncertain(nil)
		return nil
	}
	k, err := c.tier.keyFor(q)
	if err != nil {
		return err
	}
	values := keyValues{prefixes: c.h.prefixes, nat64: c.h.topology.NAT64}
	found := false
	for i, part := range k.parts {
		text, some, err := values.part(part, q.Key[i])
		if err != nil {
			return fmt.Errorf("part %d of the key: %w", i+1, err)
		}
		c.key = append(c.key, text)
		found = found || some
	}
	if !found {
		return errors.New("the key is empty; a request with an empty key is not limited by the tier")
	}
	c.claim.Identity = k.appendTexts(nil, c.key)
	return nil
}

// keyFor finds the key among the tier's alternatives that a question means.
func (t *tier) keyFor(q *counterQuestion) (*key, error) {
	if len(q.Key) == 0 {
		return nil, errors.New("key is missing; it lists the values of the key's parts")
	}
	if q.Line != 0 {
		if q.Line < 1 || q.Line > len(t.keys) {
			return nil, fmt.Errorf("line %d is not between 1 and %d", q.Line, len(t.keys))
		}
		if n := len(t.keys[q.Line-1].parts); n != len(q.Key) {
			return nil, fmt.Errorf("key %d has %d parts, not %d", q.Line, n, len(q.Key))
		}
		return &t.keys[q.Line-1], nil
	}
	var found *key
	for i := range t.keys {
		if len(t.keys[i].parts) != len(q.Key) {
			continue
		}
		if found != nil {
			return nil, fmt.Errorf("the tier has several keys of %d parts; say by line which is meant, from 1 to %d",
				len(q.Key), len(t.keys))
		}
		found = &t.keys[i]
	}
	if found == nil {
		return nil, fmt.Errorf("the tier has no key of %d parts; its first has %d", len(q.Key), len(t.keys[0].parts))
	}
	return found, nil
}

// keyValues reads the values of a key's parts as an operator writes them.
type keyValues struct {
	prefixes clientip.Prefixes
	nat64    clientip.NAT64
}

// part brings the value of one part into the form in which it is counted, and tells whether a placeholder has a value. A
// client's address may be written in any way and in full, and other values as a request may.
func (v *keyValues) part(segments []segment, text string) (string, bool, error) {
	before, after := "", ""
	var only *segment
	placeholders := 0
	for i := range segments {
		switch {
		case segments[i].kind != segmentLiteral:
			placeholders++
			only = &segments[i]
		case only == nil:
			before += segments[i].text
		default:
			after += segments[i].text
		}
	}
	if placeholders > 1 {
		return text, text != "", nil
	}
	value, starts := strings.CutPrefix(text, before)
	value, ends := strings.CutSuffix(value, after)
	switch {
	case !starts || !ends || only == nil && value != "":
		return "", false, fmt.Errorf("%q is not of the form %q", shortened(text), before+strings.Repeat("...", placeholders)+after)
	case only == nil:
		return text, false, nil
	case only.kind == segmentClient:
		c, ok := v.nat64.ParseIdentity(value)
		if !ok {
			return "", false, fmt.Errorf("%q is not an IP address, also not behind one of short_chain@, bad_entry@ and "+
				"all_trusted@, nor %s", shortened(value), clientip.Unknown)
		}
		return before + string(c.AppendIdentity(nil, v.prefixes)) + after, true, nil
	}
	canonical, ok := only.appendText(nil, value)
	if !ok {
		return "", false, fmt.Errorf("%q cannot be read with certainty; such requests share the counter that \"uncertain\" names",
			shortened(value))
	}
	return before + string(canonical) + after, len(canonical) > 0, nil
}

// shortened is a text for an error message.
func shortened(s string) string {
	if len(s) > maxLoggedPart {
		return s[:maxLoggedPart] + "..."
	}
	return s
}
