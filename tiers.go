package tieredlimit

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/tieredlimit/caddy-tieredlimit/internal/clientip"
)

// Tier is one layer of a stack: who is counted together, which requests it concerns, and how many it admits.
type Tier struct {
	// The name by which a refusal reports the tier, and under which its counters are kept. 1 to 64 of `a-z 0-9 _ -`,
	// unique within the stack.
	Name string `json:"name"`

	// How many requests are admitted in which windows. Several are ANDed; no two may have the same window. An empty
	// list, or a count of 0 in any of them, switches the tier off.
	Limits []TierLimit `json:"limits"`

	// Who is counted together. The parts of one key are one identity; several keys are alternatives, of which the
	// first that is not empty is used. A request for which all are empty is not limited by this tier. Parts may hold
	// placeholders. A first part `fold` in front of others makes texts one that differ in case or blanks alone.
	// Default: the client address for a tier named `ip`, `{http.auth.user.id}` for `user`, and one bucket for
	// everybody for `global`; any other name must state its key.
	Keys [][]string `json:"keys,omitempty"`

	// The requests that the tier concerns. Default: all.
	MatcherSetsRaw caddyhttp.RawMatcherSets `json:"match,omitempty" caddy:"namespace=http.matchers"`

	// How `match` is taken: `careful`, so that what upstreams may read otherwise than Caddy does matches, or `literal`.
	// Default: `careful`.
	MatchMode string `json:"match_mode,omitempty"`

	// The clients that the tier concerns: addresses, CIDR ranges, or `private_ranges`, by the client address as the
	// topology gives it. A request whose client could not be found is in no range. Default: all.
	Clients []string `json:"clients,omitempty"`

	// The clients that the tier does not concern, written likewise, also where they are in `clients`. Default: none.
	NotClients []string `json:"not_clients,omitempty"`

	// How much of the counts some requests may use, so that the rest stays for others. Of several shares the first that
	// matches applies. Default: none, and every request may use all.
	Shares []*Share `json:"shares,omitempty"`

	// When the tier is charged: `served` or `checked`. Default: the stack's.
	Charge string `json:"charge,omitempty"`

	// Whether the tier counts and logs what it would refuse, but never refuses. Default: false.
	DryRun bool `json:"dry_run,omitempty"`

	// Whether responses to requests that the dry tier would have refused get `X-RateLimit-Dry-Run: refused`. It needs
	// dry_run. Default: false.
	DryRunHeader bool `json:"dry_run_header,omitempty"`
}

// TierLimit is how many requests a tier admits in a window.
type TierLimit struct {
	// The number of requests, at most 2147483647. 0 switches the tier off.
	Count int64 `json:"count"`

	// The length of the window, which is fixed and aligned to the Unix epoch. A whole number of milliseconds.
	Window caddy.Duration `json:"window"`
}

// UnmarshalJSON reads a limit. Both fields must be there, since a forgotten count is not to switch the tier off.
func (l *TierLimit) UnmarshalJSON(data []byte) error {
	var raw struct {
		Count  *int64          `json:"count"`
		Window *caddy.Duration `json:"window"`
	}
	decoder := json.NewDecoder(bytes.NewReader(data))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&raw); err != nil {
		return fmt.Errorf("limit %s: %w", data, err)
	}
	switch {
	case raw.Count == nil:
		return fmt.Errorf("limit %s has no count", data)
	case raw.Window == nil:
		return fmt.Errorf("limit %s has no window", data)
	}
	*l = TierLimit{Count: *raw.Count, Window: *raw.Window}
	return nil
}

// tier is a compiled [Tier] that is on.
type tier struct {
	name       string
	spec       TierSpec
	policies   []string   // names of the limits in structured fields: ip, ip.2
	windows    []string   // the limits' windows in seconds as text
	resets     *resetText // the end of the window as text
	keys       []key
	lines      [][]string // the keys as configured
	fixed      []byte     // the identity, where it never varies
	usesClient bool
	match      tierMatch
	clients    tierClients
	whole      quota
	shares     []share // that may use less
	index      int     // in the claims' stack
	skipped    string  // kinds of warnings, as [stackRun.first] knows them
	uncertain  string
	later      string        // what is said of a key that is set behind the handler
	longest    time.Duration // of the limits' windows
	dryHeader  bool
	log        *refusalLog
	meter      *tierMeter
}

// compileTiers makes the tiers that are switched on.
func (h *Handler) compileTiers(ctx caddy.Context) error {
	probe := newPlaceholderProbe(h.server)
	for _, t := range h.Tiers {
		keys, err := compileKeys(t, h.prefixes, probe)
		if err != nil {
			return fmt.Errorf("tier %q: %w", t.Name, err)
		}
		c := &tier{name: t.Name, keys: keys, lines: t.keyLines(), resets: new(resetText)}
		c.skipped, c.uncertain = "skipped "+t.Name, "uncertain "+t.Name
		for _, k := range keys {
			c.usesClient = c.usesClient || k.usesClient
		}
		if keys[0].fixed {
			c.fixed = keys[0].appendPrefix(nil)
		}
		if c.match, err = compileMatch(ctx, t, t.MatcherSetsRaw, t.MatchMode); err != nil {
			return fmt.Errorf("tier %q: %w", t.Name, err)
		}
		if c.clients, err = compileClients(t, h.topology.NAT64); err != nil {
			return fmt.Errorf("tier %q: %w", t.Name, err)
		}
		if t.off() {
			continue
		}
		c.index = len(h.tiers)
		c.spec = t.spec(h.Charge)
		c.spec.Single = c.fixed != nil
		c.spec.Group = c.group
		c.policies = policyNames(t)
		c.dryHeader = t.DryRunHeader
		for _, l := range t.Limits {
			c.windows = append(c.windows, decimalSeconds(time.Duration(l.Window)))
			c.longest = max(c.longest, time.Duration(l.Window))
		}
		if err := c.compileShares(ctx, t); err != nil {
			return fmt.Errorf("tier %q: %w", t.Name, err)
		}
		h.tiers = append(h.tiers, c)
	}
	return nil
}

// keyLines are the keys as configured, or the default ones.
func (t *Tier) keyLines() [][]string {
	if len(t.Keys) == 0 {
		return defaultKeys(t.Name)
	}
	return t.Keys
}

// spec is what a store needs to know of the tier.
func (t *Tier) spec(stackCharge string) TierSpec {
	s := TierSpec{Name: t.Name, DryRun: t.DryRun, Charge: ChargeServed}
	if t.effectiveCharge(stackCharge) == "checked" {
		s.Charge = ChargeChecked
	}
	for _, l := range t.Limits {
		s.Limits = append(s.Limits, Limit{Count: l.Count, Window: time.Duration(l.Window)})
	}
	return s
}

// effectiveCharge is the tier's own charge mode, else the stack's, else the default.
func (t *Tier) effectiveCharge(stackCharge string) string {
	switch {
	case t.Charge != "":
		return t.Charge
	case stackCharge != "":
		return stackCharge
	}
	return "served"
}

// off tells whether the tier is switched off.
func (t *Tier) off() bool {
	for _, l := range t.Limits {
		if l.Count == 0 {
			return true
		}
	}
	return len(t.Limits) == 0
}

// policyNames names the tier's limits: the first by the tier's name, the others by a number behind it.
func policyNames(t *Tier) []string {
	names := make([]string, len(t.Limits))
	for i := range t.Limits {
		names[i] = t.Name
		if i > 0 {
			names[i] += "." + strconv.Itoa(i+1)
		}
	}
	return names
}

// check refuses what a tier cannot be.
func (t *Tier) check() error {
	if err := checkName("tier", t.Name); err != nil {
		return err
	}
	if err := t.checkLimits(); err != nil {
		return err
	}
	if t.Charge != "" {
		if err := oneOf("charge", t.Charge, "served", "checked"); err != nil {
			return fmt.Errorf("tier %q: %w", t.Name, err)
		}
	}
	if t.MatchMode != "" {
		if err := oneOf("match_mode", t.MatchMode, "careful", "literal"); err != nil {
			return fmt.Errorf("tier %q: %w", t.Name, err)
		}
	}
	if err := cmp.Or(checkClients("clients", t.Clients), checkClients("not_clients", t.NotClients),
		checkPaths(rawSets(t.MatcherSetsRaw)), t.checkShares()); err != nil {
		return fmt.Errorf("tier %q: %w", t.Name, err)
	}
	if t.DryRunHeader && !t.DryRun {
		return fmt.Errorf("tier %q: %w", t.Name, errDryRunHeader)
	}
	return t.checkKeys()
}

// errDryRunHeader refuses a header that could never be sent.
var errDryRunHeader = errors.New("dry_run_header needs dry_run")

// checkLimits refuses missing limits, impossible ones, and two for one window.
func (t *Tier) checkLimits() error {
	if t.Limits == nil {
		return fmt.Errorf("tier %q has no limits; an empty list switches a tier off", t.Name)
	}
	for i, l := range t.Limits {
		if err := l.check(); err != nil {
			return fmt.Errorf("tier %q: %w", t.Name, err)
		}
		for _, other := range t.Limits[:i] {
			if other.Window == l.Window {
				return fmt.Errorf("tier %q has two limits with a window of %s", t.Name, time.Duration(l.Window))
			}
		}
	}
	return nil
}

// checkKeys refuses keys without parts, and a missing key where there is no default.
func (t *Tier) checkKeys() error {
	for i, parts := range t.Keys {
		if len(parts) == 0 {
			return fmt.Errorf("tier %q: key %d has no parts", t.Name, i+1)
		}
		for _, part := range parts {
			if part == "" {
				return fmt.Errorf("tier %q: key %d has an empty part", t.Name, i+1)
			}
		}
	}
	if len(t.Keys) == 0 && defaultKeys(t.Name) == nil {
		return fmt.Errorf("tier %q has no key: write key {%s} to limit each client, or another key; only tiers named ip, user and global "+
			"have a default one", t.Name, clientPlaceholder)
	}
	return nil
}

// check refuses what a limit cannot be.
func (l TierLimit) check() error {
	if l.Count < 0 || l.Count > math.MaxInt32 {
		return fmt.Errorf("limit count %d is not between 0 and %d", l.Count, math.MaxInt32)
	}
	window := time.Duration(l.Window)
	if window < time.Millisecond {
		return fmt.Errorf("limit window %s is shorter than 1ms", window)
	}
	if window%time.Millisecond != 0 {
		return fmt.Errorf("limit window %s is not a whole number of milliseconds", window)
	}
	return nil
}

// parseLimit reads a limit written as count/window, such as 600/m, 20/10s or 600/60000ms.
func parseLimit(s string) (TierLimit, error) {
	count, window, found := strings.Cut(s, "/")
	if !found {
		return TierLimit{}, fmt.Errorf("limit %q is not of the form <count>/<window>, such as 600/m", s)
	}
	n, err := parseCount(count)
	if err != nil {
		return TierLimit{}, fmt.Errorf("limit %q: %w", s, err)
	}
	d, err := parseWindow(window)
	if err != nil {
		return TierLimit{}, fmt.Errorf("limit %q: %w", s, err)
	}
	l := TierLimit{Count: n, Window: caddy.Duration(d)}
	if err := l.check(); err != nil {
		return TierLimit{}, fmt.Errorf("limit %q: %w", s, err)
	}
	return l, nil
}

// errEmptyVariable explains an empty count or window, which a variable that is set but empty leaves.
var errEmptyVariable = errors.New("if it comes from an environment variable, that variable is empty or not set")

func parseCount(s string) (int64, error) {
	if s == "" {
		return 0, fmt.Errorf("the count is empty; %w", errEmptyVariable)
	}
	if !digitsOnly(s) {
		return 0, fmt.Errorf("the count %q is not a whole number of 0 or more", s)
	}
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil || n > math.MaxInt32 {
		return 0, fmt.Errorf("the count %q is above %d", s, math.MaxInt32)
	}
	return n, nil
}

func parseWindow(s string) (time.Duration, error) {
	switch s {
	case "":
		return 0, fmt.Errorf("the window is empty; %w", errEmptyVariable)
	case "s", "m", "h", "d":
		s = "1" + s
	}
	d, err := caddy.ParseDuration(s)
	if err != nil {
		return 0, fmt.Errorf("the window %q is not a duration of at most 106751d, such as s, m, h, d, 10s or 60000ms", s)
	}
	return d, nil
}

// difference is in what two definitions of a shared tier differ: how the field is called in a Caddyfile, and what each has.
type difference struct{ field, first, second string }

// differenceOf finds the first difference of two definitions, or returns nil.
func differenceOf(a, b *tierDefinition) *difference {
	for _, d := range []difference{
		{"limits", a.limits, b.limits},
		{"key", a.keys, b.keys},
		{"match", a.match, b.match},
		{"match_mode", a.matchMode, b.matchMode},
		{"clients", a.clients, b.clients},
		{"share", a.shares, b.shares},
		{"charge", a.charge, b.charge},
		{"dry_run", a.dryRun, b.dryRun},
		{"ipv4_prefix or ipv6_prefix", prefixText(a.prefixes), prefixText(b.prefixes)},
		{"store", a.store, b.store},
	} {
		if d.first != d.second {
			return &d
		}
	}
	return nil
}

// clientsText is whom a tier concerns, as a Caddyfile has it.
func clientsText(clients, not []string) string {
	return strings.TrimSpace(strings.Join(clients, " ") + strings.Join(append([]string{""}, not...), " not "))
}

func prefixText(p clientip.Prefixes) string { return fmt.Sprintf("/%d and /%d", p.V4, p.V6) }

// tierDefinition is everything in which a tier must agree wherever its name appears in a named stack.
type tierDefinition struct {
	where                                                                  string // the site, for people
	limits, keys, match, matchMode, clients, shares, charge, dryRun, store string
	prefixes                                                               clientip.Prefixes
}

func (t *Tier) definition(h *Handler) *tierDefinition {
	d := &tierDefinition{
		where:     h.site,
		keys:      jsonText(t.keyLines()),
		match:     h.matchText[t.Name],
		matchMode: cmp.Or(t.MatchMode, "careful"),
		clients:   clientsText(t.Clients, t.NotClients),
		shares:    h.shareText[t.Name],
		charge:    t.effectiveCharge(h.Charge),
		dryRun:    "off",
		prefixes:  h.prefixes,
		store:     h.storeText,
	}
	for _, l := range t.Limits {
		d.limits += fmt.Sprintf(" %d/%s", l.Count, shortDuration(time.Duration(l.Window)))
	}
	d.limits = strings.TrimPrefix(d.limits, " ")
	switch {
	case t.DryRunHeader:
		d.dryRun = "header"
	case t.DryRun:
		d.dryRun = "on"
	}
	return d
}

// jsonText is a value as compact JSON, for comparing.
func jsonText(v any) string {
	text, err := json.Marshal(v)
	if err != nil {
		return err.Error()
	}
	return string(text)
}
