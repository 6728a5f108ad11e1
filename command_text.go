package tieredlimit

import (
	"bytes"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/tieredlimit/caddy-tieredlimit/internal/visible"
)

// textTable prints rows of cells in columns, below a heading.
type textTable struct{ rows [][]string }

func (t *textTable) add(cells ...string) { t.rows = append(t.rows, cells) }

// writeTo prints the table, indented.
func (t *textTable) writeTo(w io.Writer) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, row := range t.rows {
		fmt.Fprintln(tw, "  "+strings.Join(row, "\t"))
	}
	return tw.Flush()
}

// plain makes a text safe for a terminal: what clients wrote may hold anything.
func plain(s string) string {
	quoted := strconv.Quote(s)
	if s == "" || quoted[1:len(quoted)-1] != s || strings.Contains(s, " ") {
		return quoted
	}
	return s
}

// plainKey is the parts of a key.
func plainKey(parts []string) string {
	texts := make([]string, len(parts))
	for i, p := range parts {
		texts[i] = plain(p)
	}
	return strings.Join(texts, " ")
}

func yesNo(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

// printStatus prints the answer to status.
func printStatus(w io.Writer, s *statusReport) error {
	var out bytes.Buffer
	if len(s.Stacks) == 0 {
		fmt.Fprintln(&out, "The running config has no tiered_limit.")
	}
	for i, stack := range s.Stacks {
		if i > 0 {
			fmt.Fprintln(&out)
		}
		if err := stack.print(&out); err != nil {
			return err
		}
	}
	_, err := out.WriteTo(w)
	return err
}

func (s *stackStatus) print(w io.Writer) error {
	fmt.Fprintf(w, "stack %s\n", plain(s.Stack))
	if s.Store != "" {
		fmt.Fprintf(w, "  store %s", s.Store)
		if s.Counters != nil {
			fmt.Fprintf(w, ", %d counters, %d hits in overflow", *s.Counters, *s.Overflow)
		}
		if s.Away != nil {
			fmt.Fprintf(w, ": away since %s UTC (%s), requests are %s", s.Away.Since.Format(time.DateTime), s.Away.Kind,
				insteadText(s.Away.Instead))
		}
		fmt.Fprintln(w)
	}
	var counts []string
	for o := range outcomes {
		if n := s.Requests[o.String()]; n > 0 {
			counts = append(counts, fmt.Sprintf("%s %d", o, n))
		}
	}
	if len(counts) > 0 {
		fmt.Fprintf(w, "  requests: %s\n", strings.Join(counts, ", "))
	}
	for _, h := range s.Handlers {
		fmt.Fprintf(w, "  handler%s: %s; client: %s\n", ofServer(h.Server), h.mode(), h.Topology.text())
	}
	if len(s.Tiers) == 0 {
		return nil
	}
	table := new(textTable)
	table.add("TIER", "LIMITS", "KEY", "CHARGE", "DRY RUN", "REFUSED")
	for _, t := range s.Tiers {
		table.add(t.Tier, limitsText(t.Limits), keysText(t.Keys), t.Charge, yesNo(t.DryRun), fmt.Sprintf("%d in this %s", t.Refusals, t.Window))
	}
	if err := table.writeTo(w); err != nil {
		return err
	}
	return s.printMost(w)
}

// printMost prints who was refused most.
func (s *stackStatus) printMost(w io.Writer) error {
	table := new(textTable)
	table.add("MOST REFUSED BY", "KEY OR FINGERPRINT", "AT LEAST", "AT MOST")
	hidden := false
	for _, t := range s.Tiers {
		for _, m := range t.MostRefused {
			who := m.Fingerprint
			if len(m.Key) > 0 {
				who = plainKey(m.Key)
			} else if m.client != "" {
				who += " (" + plain(m.client) + ")"
			} else {
				hidden = true
			}
			table.add(t.Tier, who, strconv.FormatInt(m.AtLeast, 10), strconv.FormatInt(m.AtMost, 10))
		}
	}
	if len(table.rows) == 1 {
		return nil
	}
	if err := table.writeTo(w); err != nil || !hidden {
		return err
	}
	_, err := fmt.Fprintf(w, whoIsIt, s.Handlers[0].Topology.loggedClient())
	return err
}

// loggedClient is where the access log has what the client's address is made of, for jq.
func (t *topologyStatus) loggedClient() string {
	if t.Source == "trusted_hops" && len(t.Headers) > 0 { // Caddy's own idea of the client is the proxy in front
		return fmt.Sprintf(".request.headers[%q][-1]", t.Headers[0])
	}
	return ".request.client_ip"
}

// whoIsIt says how to find out whose a fingerprint is.
const whoIsIt = `  A fingerprint stands for a key that is not to be shown (log_keys shows it). To see whose it is, name a client that
  it may be, with status --client 203.0.113.7, or look for refused requests in the access log:
  jq -r 'select(.tiered_limit_outcome == "refused") | %s' access.log | sort | uniq -c | sort -rn
`

func ofServer(name string) string {
	if name == "" {
		return ""
	}
	return " of " + plain(name)
}

func (h *handlerStatus) mode() string {
	switch {
	case h.Mode == modeInert.String():
		return "DISABLED, since the proxies in front are not stated"
	case h.Mode == modeOff.String():
		return "off"
	case h.DryRun:
		return "dry run of " + strings.Join(h.Tiers, ", ")
	}
	return "limits by " + strings.Join(h.Tiers, ", ")
}

// text says where the client's address comes from.
func (t *topologyStatus) text() string {
	var text string
	headers := strings.Join(t.Headers, ", ")
	switch t.Source {
	case "peer":
		text = "the peer"
	case "trusted_hops":
		text = fmt.Sprintf("entry %d from the right of %s", *t.TrustedHops, headers)
	case "both":
		text = fmt.Sprintf("entry %d from the right of %s, from trusted proxies only", *t.TrustedHops, headers)
	case "trusted_proxies":
		text = "the rightmost entry of " + headers + " that is not a trusted proxy"
	default:
		return "not stated"
	}
	return fmt.Sprintf("%s, by /%d and /%d", text, t.IPv4Prefix, t.IPv6Prefix)
}

func limitsText(limits []limitStatus) string {
	texts := make([]string, len(limits))
	for i, l := range limits {
		texts[i] = fmt.Sprintf("%d/%s", l.Count, l.Window)
	}
	return strings.Join(texts, " ")
}

func keysText(keys [][]string) string {
	texts := make([]string, len(keys))
	for i, parts := range keys {
		texts[i] = visible.Text(strings.Join(parts, " "))
	}
	if text := strings.Join(texts, " or "); text != "" {
		return text
	}
	return "one for all"
}

// printCounter prints the answer to inspect and reset.
func printCounter(w io.Writer, a *counterAnswer) error {
	var out bytes.Buffer
	fmt.Fprintf(&out, "stack %s, tier %s", plain(a.Stack), a.Tier)
	if len(a.Key) > 0 {
		fmt.Fprintf(&out, ", key %s (fingerprint %s)", plainKey(a.Key), a.Fingerprint)
	}
	fmt.Fprintln(&out)
	if a.Store != "" {
		fmt.Fprintf(&out, "store %s\n", visible.Text(a.Store))
	}
	table := new(textTable)
	table.add("LIMIT", "USED", "LEFT", "RESETS IN", "AT (UTC)")
	for _, l := range a.Limits {
		table.add(append([]string{l.name()}, l.cells()...)...)
	}
	if err := table.writeTo(&out); err != nil {
		return err
	}
	_, err := out.WriteTo(w)
	return err
}

func (l *limitReading) name() string { return fmt.Sprintf("%d/%s", l.Count, l.Window) }

// cells are what is used and left of a limit, and when it resets.
func (l *limitReading) cells() []string {
	return []string{
		strconv.FormatInt(l.Used, 10), strconv.FormatInt(l.Remaining, 10), fmt.Sprintf("%d s", l.ResetsIn),
		l.ResetsAt.Format(time.DateTime),
	}
}

// printExplanations prints the answer to explain.
func printExplanations(w io.Writer, a *explainAnswer) error {
	var out bytes.Buffer
	if len(a.Handlers) == 0 {
		fmt.Fprintln(&out, "The running config has no tiered_limit.")
	}
	for i := range a.Handlers {
		if i > 0 {
			fmt.Fprintln(&out)
		}
		if err := a.Handlers[i].print(&out); err != nil {
			return err
		}
	}
	_, err := out.WriteTo(w)
	return err
}

func (e *explanation) print(w io.Writer) error {
	fmt.Fprintf(w, "stack %s%s\n", plain(e.Stack), ofServer(e.Server))
	if e.Client != nil {
		if err := e.Client.print(w); err != nil {
			return err
		}
	}
	if len(e.Tiers) > 0 {
		table := new(textTable)
		table.add("TIER", "KEY", "LIMIT", "USED", "LEFT", "RESETS IN", "AT (UTC)", "")
		for i := range e.Tiers {
			e.Tiers[i].rows(table)
		}
		if err := table.writeTo(w); err != nil {
			return err
		}
	}
	if e.Store != "" {
		fmt.Fprintf(w, "  store %s\n", visible.Text(e.Store))
	}
	fmt.Fprintf(w, "  outcome: %s", e.Outcome)
	if e.RefusedBy != "" {
		fmt.Fprintf(w, ", by %s", e.RefusedBy)
	}
	if e.RetryAfter > 0 {
		fmt.Fprintf(w, ", retry in %d s", e.RetryAfter)
	}
	if e.Error != "" {
		fmt.Fprintf(w, ": %s", visible.Text(e.Error))
	}
	fmt.Fprintln(w)
	return nil
}

// rows adds what the tier says to a table.
func (t *tierView) rows(table *textTable) {
	name := t.Tier
	if t.DryRun {
		name += " (dry)"
	}
	if !t.Applies {
		table.add(name, "-", "-", "-", "-", "-", "-", visible.Text(t.Why))
		return
	}
	key := "one for all"
	if len(t.Key) > 0 {
		key = plainKey(t.Key)
	}
	for i := range t.Limits {
		verdict := "allows"
		switch {
		case t.Why != "":
			verdict = visible.Text(t.Why)
		case t.Limits[i].Exceeded:
			verdict = "refuses"
		}
		limit := t.Limits[i].name()
		if t.Share > 0 {
			limit += fmt.Sprintf(" (%d%% share)", t.Share)
		}
		table.add(slices.Concat([]string{name, key, limit}, t.Limits[i].cells(), []string{verdict})...)
		name, key = "", ""
	}
}

func (c *clientView) print(w io.Writer) error {
	peer := "without an address"
	if c.Peer != "" {
		peer = c.Peer
	}
	fmt.Fprintf(w, "  peer: %s\n", peer)
	if len(c.Chain) > 0 {
		fmt.Fprintf(w, "  %s:\n", c.Header)
		if c.Omitted > 0 {
			fmt.Fprintf(w, "  (%d entries further left are not shown)\n", c.Omitted)
		}
		table := new(textTable)
		for _, e := range c.Chain {
			table.add("  "+plain(e.Entry), e.Use)
		}
		if err := table.writeTo(w); err != nil {
			return err
		}
	}
	if c.Note != "" {
		fmt.Fprintf(w, "  %s\n", c.Note)
	}
	if c.Counted != "" {
		fmt.Fprintf(w, "  client: %s, counted as %s\n", orNone(c.Address), c.Counted)
	}
	return nil
}

func orNone(s string) string {
	if s == "" || s == "null" {
		return "none"
	}
	return s
}
