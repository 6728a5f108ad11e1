package tieredlimit

import (
	"encoding/base64"
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// readKey is what a key reads in a Cookie field or a query.
func readKey(kind, text string) (string, presence) {
	source, name, _ := strings.Cut(kind, " ")
	var value []byte
	var found presence
	if source == "cookie" {
		value, found = appendCookie(nil, []string{text}, name)
	} else {
		value, found = appendQuery(nil, text, name)
	}
	return string(value), found
}

// goReads is what Go's own parsers read there.
func goReads(kind, text string) []string {
	source, name, _ := strings.Cut(kind, " ")
	if source == "query" {
		values, _ := url.ParseQuery(text)
		return values[name]
	}
	var values []string
	r := &http.Request{Header: http.Header{"Cookie": {text}}}
	for _, c := range r.CookiesNamed(name) {
		values = append(values, c.Value)
	}
	return values
}

// plainValue is a value that has one spelling which every server reads alike.
var plainValue = regexp.MustCompile(`^[A-Za-z0-9_.-]+$`)

// Whatever a server reads as a value is counted for that value or as uncertain: it is neither skipped nor a new budget.
// The table holds what real servers have read.
func TestWhatServersReadIsCounted(t *testing.T) {
	t.Parallel()
	seen := make(map[string][3]int)
	for line := range strings.Lines(readText(t, "testdata/keys.tsv")) {
		if strings.HasPrefix(line, "#") {
			continue
		}
		columns := strings.Split(strings.TrimSuffix(line, "\n"), "\t")
		require.Len(t, columns, 3)
		kind, text := columns[0], fromBase64(t, columns[1])
		value, found := readKey(kind, text)
		counts := seen[kind]
		counts[found]++
		seen[kind] = counts
		var values []string
		for _, encoded := range strings.Fields(columns[2]) {
			values = append(values, fromBase64(t, encoded))
		}
		for _, read := range append(values, goReads(kind, text)...) {
			if found == uncertain || read == "" {
				continue
			}
			// Nobody has a key of blanks and quotes, or one that begins with what ends a parameter.
			nobodys := strings.Trim(read, " \t\"") == "" || read[0] == '&'
			if !assert.True(t, nobodys || found == present, "%s in %.200q: a server reads %q, the tier is skipped", kind, text, read) {
				continue
			}
			if plainValue.MatchString(read) {
				honest, _ := readKey(kind, strings.Fields(kind)[1]+"="+read)
				assert.Equal(t, honest, value, "%s in %.200q: a server reads %q", kind, text, read)
			}
		}
	}
	for kind, counts := range seen {
		assert.Greater(t, counts[present], 50, "%s: fields that are certain", kind)
		assert.Greater(t, counts[uncertain], 200, "%s: fields that are not", kind)
	}
	require.Len(t, seen, 3)
}

func fromBase64(t *testing.T, text string) string {
	t.Helper()
	decoded, err := base64.StdEncoding.DecodeString(text)
	require.NoError(t, err)
	return string(decoded)
}
