package replay

import (
	_ "embed"
	"html/template"
	"io"
	"strings"

	"github.com/tieredlimit/caddy-tieredlimit/internal/visible"
)

//go:embed page.html.tmpl
var pageText string

// page is the template of the report as a page: one file that needs nothing else, and no scripts.
var page = template.Must(template.New("page").Funcs(template.FuncMap{
	"v": visible.Text, "n": thousands, "share": share, "percent": percent, "span": span1, "join": func(l []string) string { return strings.Join(l, ", ") },
	"counts":    func(m map[string]int64) string { return listed("", m) },
	"fallbacks": func(m map[string]int64) string { return listed("", fallbackWords(m)) },
	"alone":     func() string { return eachAlone },
	"traffic":   func() string { return noTraffic },
	"outcomes":  outcomeFacts,
	"bad":       sum,
	"plural":    func(n int, noun string) string { return plural(int64(n), noun) },
	"deref":     deref,
	"refused":   func(t TierReport) int64 { return t.Refused + t.DryRefused },
	"about":     func(t TierReport) string { return map[bool]string{true: "~"}[t.Sampled] },
	"limitname": func(l LimitReport) string { return l.name() },
	"window":    func(l LimitReport) string { return windowName(l.window) },
	"width":     func(n, of int64) float64 { return 100 * ratio(n, of) },
	"timechart": newTimeChart, "limitchart": newLimitChart, "peers": newPeerTable,
}).Parse(pageText))

// WriteHTML writes the report as a page.
func (r *Report) WriteHTML(w io.Writer) error { return page.Execute(w, r) }

// fact is an outcome as the page shows it.
type fact struct {
	Name, Share string
	Count       int64
	Bad         bool
}

// outcomeNouns are the outcomes in words.
var outcomeNouns = [outcomes]string{
	"served", "refused", "would be refused", "exempt", "preflights", "passed: inert", "passed: off", "could not be judged",
}

func outcomeFacts(counts map[string]int64) (facts []fact) {
	all := sum(counts)
	for o := range outcomes {
		if n := counts[o.String()]; n > 0 || o == Served || o == Refused {
			facts = append(facts, fact{outcomeNouns[o], share(n, all), n, n > 0 && (o == Refused || o == DryRefused || o == Failed)})
		}
	}
	return facts
}

func sum(counts map[string]int64) (all int64) {
	for _, n := range counts {
		all += n
	}
	return all
}

// deref tells whether a pointer's number is not 0, or its truth.
func deref(p any) bool {
	switch p := p.(type) {
	case *int:
		return p != nil && *p != 0
	case *bool:
		return p != nil && *p
	}
	return false
}

// peerTable is a topology's peers as a table of heat.
type peerTable struct {
	Head []string
	Rows []peerRow
}

type peerRow struct {
	Peer     string
	Requests int64
	Cells    []peerCell
}

type peerCell struct {
	Text    string
	Opacity float64
}

func newPeerTable(t TopologyReport) peerTable {
	var table peerTable
	last := t.longest()
	for n := range last + 1 {
		table.Head = append(table.Head, lengthName(n))
	}
	for _, p := range t.Peers {
		row := peerRow{Peer: p.Peer, Requests: p.Requests}
		for n := range last + 1 {
			cell := peerCell{Text: countOrDot(p.Lengths[n]), Opacity: ratio(p.Lengths[n], p.Requests) * 0.8}
			row.Cells = append(row.Cells, cell)
		}
		table.Rows = append(table.Rows, row)
	}
	return table
}
