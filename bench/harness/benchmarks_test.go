package harness

import (
	"io"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestBenchmarksPage checks the commands of the page that has the figures, and that its tables are those that the
// benchmark prints.
func TestBenchmarksPage(t *testing.T) {
	text, err := os.ReadFile("../../BENCHMARKS.md")
	require.NoError(t, err)
	blocks := regexp.MustCompile("(?s)```sh\n(.*?)```").FindAllStringSubmatch(string(text), -1)
	require.Len(t, blocks, 2)
	own := 0
	for _, block := range blocks {
		for line := range strings.Lines(block[1]) {
			words := strings.Fields(line)
			switch {
			case line == "cd bench\n", line == "go run ./wire\n":
			case len(words) >= 3 && words[0] == "go" && words[1] == "run" && words[2] == ".":
				_, err := parse(words[3:], io.Discard)
				assert.NoError(t, err, line)
				own++
			default:
				t.Errorf("a command that is not checked: %q", line)
			}
		}
	}
	assert.Equal(t, 2, own, "commands of this program")
	for _, s := range subjects(nil) {
		assert.Contains(t, string(text), "\n| "+s.Name, "a row of each subject")
	}
}
