// Package readmetest reads documents for the tests that execute what they say: their fenced blocks, the rows of their
// tables, and the code in them.
package readmetest

import (
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Block is a fenced block of a document.
type Block struct {
	Name     string // the heading that it stands under, and its number there: Quick start/1
	Language string
	Line     int
	Text     string
}

// Text is the text of a file.
func Text(t testing.TB, file string) string {
	t.Helper()
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	return string(text)
}

// Blocks are the fenced blocks of a document, in order.
func Blocks(t testing.TB, file string) []Block {
	t.Helper()
	var blocks []Block
	var open *Block
	heading, number := "", 0
	for i, line := range strings.Split(Text(t, file), "\n") {
		switch {
		case open != nil && line == "```":
			blocks = append(blocks, *open)
			open = nil
		case open != nil:
			open.Text += line + "\n"
		case strings.HasPrefix(line, "```"):
			number++
			open = &Block{Name: fmt.Sprintf("%s/%d", heading, number), Language: line[3:], Line: i + 1}
		case strings.HasPrefix(line, "#"):
			heading, number = strings.TrimLeft(line, "# "), 0
		}
	}
	require.Nil(t, open, "a block of %s is not closed", file)
	return blocks
}

// BlockOf is the block of a document that has a name.
func BlockOf(t testing.TB, file, name string) Block {
	t.Helper()
	for _, b := range Blocks(t, file) {
		if b.Name == name {
			return b
		}
	}
	require.Fail(t, "no such block", "%s in %s", name, file)
	return Block{}
}

// Rows are the rows, cell by cell, of the tables of a document whose header row begins with a text.
func Rows(t testing.TB, file, header string) [][]string {
	t.Helper()
	var rows [][]string
	inside := false
	for line := range strings.Lines(Text(t, file)) {
		if !strings.HasPrefix(line, "|") {
			inside = false
			continue
		}
		cells := strings.Split(strings.Trim(strings.ReplaceAll(line, `\|`, "\x00"), "|\n"), " | ")
		for i := range cells {
			cells[i] = strings.ReplaceAll(strings.Trim(cells[i], " |"), "\x00", "|")
		}
		switch {
		case strings.HasPrefix(line, header):
			inside = true
		case inside && !strings.HasPrefix(line, "| ---"):
			rows = append(rows, cells)
		}
	}
	require.NotEmpty(t, rows, "a table that begins with %s in %s", header, file)
	return rows
}

var codeSpan = regexp.MustCompile("`([^`]+)`")

// Spans are the code spans of a text.
func Spans(text string) []string {
	var spans []string
	for _, match := range codeSpan.FindAllStringSubmatch(text, -1) {
		spans = append(spans, match[1])
	}
	return spans
}
