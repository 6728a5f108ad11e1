// Package figures sums up rounds of measurements and prints them.
package figures

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"unicode/utf8"
)

// Spread is a median of several rounds with the least and the most.
type Spread struct{ Median, Least, Most float64 }

// Of sums up the values.
func Of(values []float64) Spread {
	if len(values) == 0 {
		return Spread{}
	}
	sorted := slices.Sorted(slices.Values(values))
	median := sorted[len(sorted)/2]
	if len(sorted)%2 == 0 {
		median = (median + sorted[len(sorted)/2-1]) / 2
	}
	return Spread{Median: median, Least: sorted[0], Most: sorted[len(sorted)-1]}
}

// String is the median with the least and the most: 0.42 (0.40..0.45).
func (s Spread) String() string {
	return fmt.Sprintf("%s (%s..%s)", Digits(s.Median), Digits(s.Least), Digits(s.Most))
}

// Digits writes a ratio with three significant digits or so.
func Digits(f float64) string {
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

// Ratios are the quotients, round by round.
func Ratios(over, under []float64) Spread {
	var list []float64
	for i := range min(len(over), len(under)) {
		list = append(list, over[i]/under[i])
	}
	return Of(list)
}

// Table is what is printed, as Markdown.
type Table struct {
	Title string
	Note  string // below the title; may be empty
	Head  []string
	Rows  [][]string
}

// Add adds a row.
func (t *Table) Add(cells ...string) { t.Rows = append(t.Rows, cells) }

// Write prints the table with its columns in line.
func (t *Table) Write(w io.Writer) error {
	width := make([]int, len(t.Head))
	for _, row := range append([][]string{t.Head}, t.Rows...) {
		for i, cell := range row {
			width[i] = max(width[i], utf8.RuneCountInString(cell))
		}
	}
	var b strings.Builder
	fmt.Fprintf(&b, "\n### %s\n\n", t.Title)
	if t.Note != "" {
		fmt.Fprintf(&b, "%s\n\n", t.Note)
	}
	line := func(row []string) {
		for i, cell := range row {
			fmt.Fprintf(&b, "| %s%s ", cell, strings.Repeat(" ", width[i]-utf8.RuneCountInString(cell)))
		}
		b.WriteString("|\n")
	}
	line(t.Head)
	for _, n := range width {
		fmt.Fprintf(&b, "| %s ", strings.Repeat("-", n))
	}
	b.WriteString("|\n")
	for _, row := range t.Rows {
		line(row)
	}
	_, err := io.WriteString(w, b.String())
	return err
}
