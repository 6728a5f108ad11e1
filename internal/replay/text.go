package replay

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/tieredlimit/caddy-tieredlimit/internal/clientip"
	"github.com/tieredlimit/caddy-tieredlimit/internal/visible"
)

// textReport writes a report as text.
type textReport struct {
	strings.Builder
}

// WriteText writes the report as text tables.
func (r *Report) WriteText(w io.Writer) error {
	t := new(textReport)
	t.log(&r.Log, r.Config)
	for i := range r.Topology {
		t.topology(&r.Topology[i])
	}
	for i := range r.Stacks {
		t.stack(&r.Stacks[i])
	}
	if len(r.Notes) > 0 {
		t.heading("Notes")
		for _, n := range r.Notes {
			t.item("- ", n)
		}
	}
	_, err := io.WriteString(w, t.String())
	return err
}

func (t *textReport) heading(text string) {
	text = visible.Text(text)
	if t.Len() > 0 {
		t.WriteByte('\n')
	}
	fmt.Fprintf(t, "%s\n%s\n", text, strings.Repeat("=", utf8.RuneCountInString(text)))
}

// textWidth is how wide running text is.
const textWidth = 96

// item writes running text behind a mark, wrapped.
func (t *textReport) item(mark, text string) {
	indent := strings.Repeat(" ", utf8.RuneCountInString(mark))
	line, width := mark, 0
	for word := range strings.FieldsSeq(text) {
		word = visible.Text(word)
		n := utf8.RuneCountInString(word)
		if width > 0 && len(indent)+width+1+n > textWidth {
			fmt.Fprintln(t, line)
			line, width = indent, 0
		}
		if width > 0 {
			line += " "
			width++
		}
		line += word
		width += n
	}
	fmt.Fprintln(t, line)
}

// field writes a name and what belongs to it.
func (t *textReport) field(name, text string) { t.item(fmt.Sprintf("  %-11s", name), text) }

// table writes rows under a head. The first column is set to the left, all others to the right.
func (t *textReport) table(indent string, rows [][]string) {
	var widths []int
	for _, row := range rows {
		for i, cell := range row {
			cell = visible.Text(cell)
			row[i] = cell
			if i == len(widths) {
				widths = append(widths, 0)
			}
			widths[i] = max(widths[i], utf8.RuneCountInString(cell))
		}
	}
	for _, row := range rows {
		line := indent
		for i, cell := range row {
			pad := strings.Repeat(" ", widths[i]-utf8.RuneCountInString(cell))
			switch {
			case i == 0:
				line += cell + pad
			case strings.HasPrefix(cell, "<-"):
				line += "  " + cell
			default:
				line += "  " + pad + cell
			}
		}
		fmt.Fprintln(t, strings.TrimRight(line, " "))
	}
}

func (t *textReport) log(l *LogReport, config string) {
	t.heading("Log")
	for _, f := range l.Files {
		text := fmt.Sprintf("%s: %s lines, %s requests", f.Name, thousands(f.Lines), thousands(f.Requests))
		if f.Error != "" {
			text += "; " + f.Error
		}
		t.field("file", text)
	}
	if config != "" {
		t.field("config", config)
	}
	if l.Requests > 0 {
		t.field("time", span1(l.First, l.Last))
	}
	t.field("lines", fmt.Sprintf("%s, of them %s requests, %s other%s", thousands(l.Lines), thousands(l.Requests),
		thousands(l.Other), listed(", unusable: ", l.Bad)))
	if l.Recorded > 0 {
		t.field("recorded", thousands(l.Recorded)+" of the requests were answered 429 at the time")
	}
	if len(l.Redacted) > 0 {
		t.field("redacted", listed("", l.Redacted))
	}
}

// listed lists counts by name, behind an introduction. It is empty if there are none.
func listed(intro string, counts map[string]int64) string {
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(counts)) {
		parts = append(parts, fmt.Sprintf("%s %s", thousands(counts[name]), name))
	}
	if len(parts) == 0 {
		return ""
	}
	return intro + strings.Join(parts, ", ")
}

func (t *textReport) topology(r *TopologyReport) {
	t.heading("Topology of server " + r.Server)
	t.field("header", fmt.Sprintf("%s in %s of %s requests", r.Header, share(r.With, r.Requests), thousands(r.Requests)))
	if r.Hops != nil {
		text := fmt.Sprintf("trusted_hops %d", *r.Hops)
		if *r.Hops > 0 && r.Header != "X-Forwarded-For" {
			text += " " + r.Header
		}
		t.field("suggested", text)
	} else {
		t.field("suggested", "none can be told")
	}
	t.field("because", r.Reason)
	if r.Cure != "" {
		t.field("but", r.Cure)
	}
	for _, s := range r.Stated {
		t.field("config", fmt.Sprintf("stack %q: %s%s", s.Stack, s.Says, s.fits()))
	}
	last := r.longest()
	head := []string{"peer", "requests"}
	for n := range last + 1 {
		head = append(head, lengthName(n))
	}
	rows := [][]string{head}
	for _, p := range r.Peers {
		row := []string{p.Peer, thousands(p.Requests)}
		for n := range last + 1 {
			row = append(row, countOrDot(p.Lengths[n]))
		}
		rows = append(rows, row)
	}
	fmt.Fprintf(t, "\n  Requests by the number of entries in the header, for the busiest of %s:\n",
		plural(int64(r.AllPeers), "peer"))
	t.table("    ", rows)
}

// longest is the length of the longest chain of the peers that are listed.
func (r *TopologyReport) longest() (longest int) {
	for _, p := range r.Peers {
		for n, count := range p.Lengths {
			if count > 0 {
				longest = max(longest, n)
			}
		}
	}
	return longest
}

// fits says whether a statement agrees with the log.
func (s *Statement) fits() string {
	switch {
	case s.Fits == nil:
		return ""
	case *s.Fits:
		return ", as the log implies"
	}
	return ", WHICH THE LOG CONTRADICTS"
}

func lengthName(n int) string {
	switch n {
	case 0:
		return "none"
	case maxPlaces + 1:
		return ">" + fmt.Sprint(maxPlaces)
	}
	return fmt.Sprint(n)
}

func countOrDot(n int64) string {
	if n == 0 {
		return "."
	}
	return thousands(n)
}

func (t *textReport) stack(s *StackReport) {
	t.heading(fmt.Sprintf("Stack %s", s.Stack))
	t.field("server", s.Server)
	if s.Mode != "limiting" {
		t.field("mode", s.Mode)
	}
	if s.DryRun {
		t.field("mode", "dry run: would-be refusals are counted, and served")
	}
	t.field("requests", thousands(s.Requests)+listed(": ", s.Outcomes))
	if len(s.Fallbacks) > 0 {
		t.field("peer used", listed("", fallbackWords(s.Fallbacks))+": the client could not be told, so the peer was counted")
	}
	if s.Requests == 0 {
		t.field("", noTraffic)
	}
	if len(s.Tiers) == 0 || s.Requests == 0 || s.Mode != "limiting" {
		return
	}
	rows := [][]string{{"tier", "limits", "requests", "refused", "share", "clients", "hit", "share"}}
	for i := range s.Tiers {
		rows = append(rows, s.Tiers[i].row())
	}
	t.WriteByte('\n')
	t.table("  ", rows)
	if refusals := s.Outcomes["refused"] + s.Outcomes["dry_refused"]; refusals > 0 {
		t.chart(&s.Times)
	}
	t.WriteByte('\n')
	t.item("  ", eachAlone)
	for i := range s.Tiers {
		t.tier(&s.Tiers[i])
	}
}

const (
	noTraffic = "No request of this log met it"

	// eachAlone tells why the figures of limits add up to something else than those of their stack.
	eachAlone = "What follows takes each limit by itself, as if there were no other: requests hit are all above it. The table of tiers " +
		"counts a refused request once, for the tier that refused it."
)

// fallbackWords puts the reasons for which a peer was counted into words.
func fallbackWords(reasons map[string]int64) map[string]int64 {
	words := make(map[string]int64, len(reasons))
	for reason, n := range reasons {
		words[fallbackMeans[reason]] = n
	}
	return words
}

// fallbackMeans says what reasons mean, by their names in metrics.
var fallbackMeans = map[string]string{
	clientip.ShortChain.String():    "without a forwarding header, or with one that is too short",
	clientip.BadEntry.String():      "with no address at the stated place of it",
	clientip.AllTrusted.String():    "with nobody but trusted proxies in it",
	clientip.NoPeer.String():        "of peers without an address",
	clientip.UntrustedPeer.String(): "with a header of a peer that is no trusted proxy",
}

// row is a tier's line in the table of tiers.
func (r *TierReport) row() []string {
	var limits []string
	for i := range r.Limits {
		limits = append(limits, r.Limits[i].name())
	}
	refused := r.Refused + r.DryRefused
	name := r.Tier
	if r.DryRun {
		name += " (dry run)"
	}
	row := []string{name, strings.Join(limits, " "), thousands(r.Requests), thousands(refused), share(refused, r.Requests)}
	if r.Single {
		return append(row, "all", "", "")
	}
	about := ""
	if r.Sampled {
		about = "~"
	}
	return append(row, about+thousands(r.Clients), about+thousands(r.Affected), share(r.Affected, r.Clients))
}

// name is the limit as it is written in a Caddyfile.
func (r *LimitReport) name() string { return fmt.Sprintf("%d/%s", r.Count, windowName(r.window)) }

// windowName is a window as it is written in a Caddyfile.
func windowName(d time.Duration) string {
	switch d {
	case time.Second:
		return "s"
	case time.Minute:
		return "m"
	case time.Hour:
		return "h"
	case 24 * time.Hour:
		return "d"
	}
	s := d.String()
	if strings.HasSuffix(s, "m0s") {
		s = s[:len(s)-2]
	}
	if strings.HasSuffix(s, "h0m") {
		s = s[:len(s)-2]
	}
	return s
}

// chartColumns is how many characters a chart is wide.
const chartColumns = 72

// chart draws refusals over time as one line of characters.
func (t *textReport) chart(times *Times) {
	bars := times.Bars
	per := (len(bars) + chartColumns - 1) / chartColumns
	var line strings.Builder
	var most int64
	var sums []int64
	for i := 0; i < len(bars); i += per {
		var sum int64
		for _, b := range bars[i:min(i+per, len(bars))] {
			sum += b.Refused
		}
		sums = append(sums, sum)
		most = max(most, sum)
	}
	levels := []rune(" ▁▂▃▄▅▆▇█")
	for _, n := range sums {
		level := 0
		if n > 0 {
			level = 1 + int((n*int64(len(levels)-1)-1)/most)
		}
		line.WriteRune(levels[min(level, len(levels)-1)])
	}
	width := time.Duration(times.Seconds*float64(per)) * time.Second
	fmt.Fprintf(t, "\n  Refusals over time, from %s, one column for %s, at most %s:\n    |%s|\n",
		bars[0].Time.Format(timeLayout), windowText(width), thousands(most), line.String())
	if times.Outside > 0 {
		fmt.Fprintf(t, "    (%s requests at times far from all others are left out)\n", thousands(times.Outside))
	}
}

func (t *textReport) tier(r *TierReport) {
	fmt.Fprintf(t, "\n  Tier %s\n", r.Tier)
	if r.Skipped > 0 {
		t.item("    ", fmt.Sprintf("%s requests were not limited by it, since every key was empty", thousands(r.Skipped)))
	}
	if r.Hidden > 0 {
		t.item("    ", fmt.Sprintf("%s requests could not be judged: the log has %s redacted", thousands(r.Hidden),
			strings.Join(r.Needs, ", ")))
	}
	if r.Sampled {
		t.item("    ", "there are too many clients to count one by one; what is said of clients is estimated from a sample")
	}
	for i := range r.Limits {
		t.limit(r, &r.Limits[i])
	}
	if len(r.Worst) == 0 || r.Single {
		return
	}
	rows := [][]string{{"refused most", "refused", "of"}}
	for _, w := range r.Worst {
		refused, of := thousands(w.Refused), ""
		if w.AtMost > w.Refused {
			refused += ".." + thousands(w.AtMost)
		}
		if w.Requests > 0 {
			of = thousands(w.Requests)
		}
		rows = append(rows, []string{w.Who, refused, of})
	}
	t.WriteByte('\n')
	t.table("    ", rows)
}

func (t *textReport) limit(tier *TierReport, r *LimitReport) {
	if r.Uses == 0 {
		return
	}
	who := "a client"
	if tier.Single {
		who = "all clients together"
	}
	t.item("    ", fmt.Sprintf("limit %s: in a window, %s sent %s (median), %s (99 %%), %s (99.9 %%), at most %s", r.name(), who,
		thousands(r.P50), thousands(r.P99), thousands(r.P999), thousands(r.Max)))
	if r.Suggested > 0 {
		t.item("    ", fmt.Sprintf("suggested: %d/%s (%s)", r.Suggested, windowName(r.window), r.Why))
	} else {
		t.item("    ", "no limit is suggested: "+r.Why)
	}
	if len(r.Candidates) == 0 {
		return
	}
	rows := [][]string{{"if it were", "requests hit", "share"}}
	if !tier.Single {
		rows[0] = append(rows[0], "clients hit", "share")
	}
	for _, c := range r.Candidates {
		row := []string{fmt.Sprintf("%d/%s", c.Count, windowName(r.window)), thousands(c.Requests), percent(c.RequestShare)}
		if !tier.Single {
			row = append(row, thousands(c.Clients), percent(c.ClientShare))
		}
		rows = append(rows, append(row, c.mark(r)))
	}
	t.table("      ", rows)
}

// mark says what is special about a candidate.
func (c *CandidateReport) mark(r *LimitReport) string {
	switch {
	case c.Count == r.Count && c.Count == r.Suggested:
		return "<- config, suggested"
	case c.Count == r.Count:
		return "<- config"
	case c.Count == r.Suggested:
		return "<- suggested"
	}
	return ""
}

const timeLayout = "2006-01-02 15:04:05"

// span1 is a stretch of time.
func span1(first, last time.Time) string {
	return fmt.Sprintf("%s to %s UTC (%s)", first.Format(timeLayout), last.Format(timeLayout),
		windowText(last.Sub(first).Round(time.Second)))
}

// windowText is a duration without parts that are zero.
func windowText(d time.Duration) string {
	if d >= 48*time.Hour {
		days := d / (24 * time.Hour)
		if rest := d % (24 * time.Hour); rest >= time.Hour {
			return fmt.Sprintf("%dd%dh", days, rest/time.Hour)
		}
		return fmt.Sprintf("%dd", days)
	}
	name := windowName(d)
	if len(name) == 1 {
		return "1" + name
	}
	return name
}

// thousands writes a number with a comma between groups of three digits.
func thousands(n int64) string {
	s := fmt.Sprint(n)
	for i := len(s) - 3; i > 0 && s[i-1] != '-'; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

func plural(n int64, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return thousands(n) + " " + noun + "s"
}
