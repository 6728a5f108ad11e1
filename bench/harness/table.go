package harness

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"unicode/utf8"
)

// spread is a median of several rounds with the least and the most.
type spread struct{ median, least, most float64 }

func spreadOf(values []float64) spread {
	if len(values) == 0 {
		return spread{}
	}
	sorted := slices.Sorted(slices.Values(values))
	median := sorted[len(sorted)/2]
	if len(sorted)%2 == 0 {
		median = (median + sorted[len(sorted)/2-1]) / 2
	}
	return spread{median: median, least: sorted[0], most: sorted[len(sorted)-1]}
}

// String is the median with the least and the most: 0.42 (0.40..0.45).
func (s spread) String() string {
	return fmt.Sprintf("%s (%s..%s)", digits(s.median), digits(s.least), digits(s.most))
}

// digits writes a ratio with three significant digits or so.
func digits(f float64) string {
	switch {
	case f >= 100:
		return fmt.Sprintf("%.0f", f)
	case f >= 10:
		return fmt.Sprintf("%.1f", f)
	case f >= 1:
		return fmt.Sprintf("%.2f", f)
	}
	return fmt.Sprintf("%.3f", f)
}

// ratios are the quotients, round by round.
func ratios(over, under []float64) spread {
	var list []float64
	for i := range min(len(over), len(under)) {
		list = append(list, over[i]/under[i])
	}
	return spreadOf(list)
}

// table is what is printed, as Markdown.
type table struct {
	title string
	note  string
	head  []string
	rows  [][]string
}

func (t *table) add(cells ...string) { t.rows = append(t.rows, cells) }

// write prints the table with its columns in line.
func (t *table) write(w io.Writer) error {
	width := make([]int, len(t.head))
	for _, row := range append([][]string{t.head}, t.rows...) {
		for i, cell := range row {
			width[i] = max(width[i], utf8.RuneCountInString(cell))
		}
	}
	var b strings.Builder
	fmt.Fprintf(&b, "\n### %s\n\n", t.title)
	if t.note != "" {
		fmt.Fprintf(&b, "%s\n\n", t.note)
	}
	line := func(row []string) {
		for i, cell := range row {
			fmt.Fprintf(&b, "| %s%s ", cell, strings.Repeat(" ", width[i]-utf8.RuneCountInString(cell)))
		}
		b.WriteString("|\n")
	}
	line(t.head)
	for _, n := range width {
		fmt.Fprintf(&b, "| %s ", strings.Repeat("-", n))
	}
	b.WriteString("|\n")
	for _, row := range t.rows {
		line(row)
	}
	_, err := io.WriteString(w, b.String())
	return err
}
