package tieredlimit

import (
	"net/http"
	"strings"
	"time"

	"github.com/tieredlimit/caddy-tieredlimit/store"
)

// statusReport is the answer to GET /tiered_limit/.
type statusReport struct {
	Stacks []*stackStatus `json:"stacks"`
}

// stackStatus is one stack: what its handlers share, and each handler.
type stackStatus struct {
	Stack    string           `json:"stack"`
	Named    bool             `json:"named"`
	Store    string           `json:"store,omitempty"`
	Away     *storeAbsence    `json:"away,omitempty"`     // absent while the store decides
	Counters *int64           `json:"counters,omitempty"` // absent if the store cannot tell
	Overflow *int64           `json:"overflow,omitempty"`
	Requests map[string]int64 `json:"requests"` // since the stack exists, by outcome
	Handlers []handlerStatus  `json:"handlers"`
	Tiers    []*tierStatus    `json:"tiers"`

	logKeys bool // every handler allows to show keys
}

// storeAbsence says since when a store cannot decide, why, and what becomes of requests.
type storeAbsence struct {
	Since   time.Time     `json:"since"`
	Kind    string        `json:"kind"`
	Instead store.Instead `json:"instead"`
}

// handlerStatus is what may differ between the handlers of a stack.
type handlerStatus struct {
	Server   string         `json:"server,omitempty"`
	Mode     string         `json:"mode"` // limit, off or inert
	DryRun   bool           `json:"dry_run,omitempty"`
	Tiers    []string       `json:"tiers"` // in the order in which a request meets them
	Topology topologyStatus `json:"topology"`
}

// topologyStatus says where the client's address comes from.
type topologyStatus struct {
	Source         string   `json:"source"` // see clientip.Topology.Source
	TrustedHops    *int     `json:"trusted_hops,omitempty"`
	Headers        []string `json:"headers,omitempty"`
	TrustedProxies bool     `json:"trusted_proxies,omitempty"`
	TrustedUnix    bool     `json:"trusted_proxies_unix,omitempty"`
	IPv4Prefix     int      `json:"ipv4_prefix"`
	IPv6Prefix     int      `json:"ipv6_prefix"`
	NAT64Prefix    []string `json:"nat64_prefix,omitempty"`
}

// tierStatus is one tier of a stack.
type tierStatus struct {
	Tier        string        `json:"tier"`
	Limits      []limitStatus `json:"limits"`
	Keys        [][]string    `json:"keys"`
	Charge      string        `json:"charge"`
	DryRun      bool          `json:"dry_run,omitempty"`
	Window      string        `json:"window"`       // that the refusals below are of: the longest
	Refusals    int64         `json:"refusals"`     // in this window, by this instance, dry ones included
	MostRefused []refusedMost `json:"most_refused"` // of this window, worst first
}

// limitStatus is one limit.
type limitStatus struct {
	Count  int64  `json:"count"`
	Window string `json:"window"`
}

// shownRefused is how many of the most refused identities are shown.
const shownRefused = 10

// serveStatus serves GET /tiered_limit/ and refuses all other paths below it.
func (a *Admin) serveStatus(w http.ResponseWriter, r *http.Request) error {
	if r.URL.Path != adminPath {
		return adminError(http.StatusNotFound, "there is no endpoint %s; there are inspect, reset and explain", r.URL.Path)
	}
	if err := allowMethods(w, r, http.MethodGet, http.MethodHead); err != nil {
		return err
	}
	return writeAnswer(w, statusOf(a.handlers()))
}

// statusOf describes the stacks that handlers belong to, in their order.
func statusOf(handlers []*Handler) statusReport {
	report := statusReport{Stacks: []*stackStatus{}}
	stacks := make(map[string]*stackStatus)
	for _, h := range handlers {
		s := stacks[h.stackLabel]
		if s == nil {
			s = newStackStatus(h)
			stacks[h.stackLabel] = s
			report.Stacks = append(report.Stacks, s)
		}
		s.logKeys = s.logKeys && h.LogKeys
		s.Handlers = append(s.Handlers, h.status())
		if h.storeMeter != nil {
			s.Store = h.storeMeter.store
		}
		if c, connects := h.counters.(Connector); connects {
			if a := c.Away(); a != nil {
				s.Away = &storeAbsence{Since: a.Since.UTC(), Kind: a.Kind, Instead: a.Instead}
			}
		}
	}
	for _, h := range handlers {
		s := stacks[h.stackLabel]
		for _, t := range h.tiers {
			if h.mode == modeLimit && !s.has(t.name) {
				s.Tiers = append(s.Tiers, t.status(h.now(), s.logKeys))
			}
		}
	}
	return report
}

func newStackStatus(h *Handler) *stackStatus {
	s := &stackStatus{
		Stack: h.stackLabel, Named: h.Name != "", Requests: make(map[string]int64), Tiers: []*tierStatus{}, logKeys: true,
	}
	for o := range outcomes {
		s.Requests[o.String()] = h.meter.requests[o].Load()
	}
	if sum := h.meter.held(); sum.tracks {
		s.Counters, s.Overflow = &sum.tracked, &sum.overflowed
	}
	return s
}

// has tells whether a tier is there already.
func (s *stackStatus) has(tier string) bool {
	for _, t := range s.Tiers {
		if t.Tier == tier {
			return true
		}
	}
	return false
}

// status describes the handler.
func (h *Handler) status() handlerStatus {
	s := handlerStatus{
		Server: h.serverName(), Mode: h.mode.String(), DryRun: h.DryRun, Tiers: []string{}, Topology: h.topologyStatus(),
	}
	for _, t := range h.tiers {
		s.Tiers = append(s.Tiers, t.name)
	}
	return s
}

// String is the mode as people see it.
func (m handlerMode) String() string {
	switch m {
	case modeOff:
		return "off"
	case modeInert:
		return "inert"
	}
	return "limit"
}

// topologyStatus describes where the handler takes the client's address from.
func (h *Handler) topologyStatus() topologyStatus {
	t := &h.topology
	s := topologyStatus{
		Source: t.Source(), TrustedProxies: t.Trusted != nil, TrustedUnix: t.Unix,
		IPv4Prefix: h.prefixes.V4, IPv6Prefix: h.prefixes.V6, NAT64Prefix: h.NAT64Prefix,
	}
	switch {
	case t.Hops >= 0:
		s.TrustedHops = &t.Hops
		if t.Hops > 0 {
			s.Headers = []string{t.Header}
		}
	case t.Limited():
		s.Headers = t.Headers
	}
	return s
}

// status describes the tier and whom it refuses at a time.
func (t *tier) status(now time.Time, logKeys bool) *tierStatus {
	s := &tierStatus{
		Tier: t.name, Keys: t.lines, Charge: t.spec.Charge.String(), DryRun: t.spec.DryRun, Window: shortDuration(t.longest),
		MostRefused: []refusedMost{},
	}
	for _, l := range t.spec.Limits {
		s.Limits = append(s.Limits, limitStatus{Count: l.Count, Window: shortDuration(l.Window)})
	}
	total, most := t.meter.worst.read(now)
	s.Refusals = total
	for _, m := range most[:min(len(most), shownRefused)] {
		if !logKeys {
			m.Key = nil
		}
		s.MostRefused = append(s.MostRefused, m)
	}
	return s
}

// shortDuration writes a duration without trailing zero units: 1m and not 1m0s. Caddy reads it.
func shortDuration(d time.Duration) string {
	s := d.String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}
