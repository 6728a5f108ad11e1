package tieredlimit

import (
	"encoding/base64"
	"fmt"
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
		value, found = appendQuery(nil, text, name, false)
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

// plainValue is a value that an honest client could have: what keys, tokens and session cookies are made of.
var plainValue = regexp.MustCompile(`^[A-Za-z0-9_.+/=|:~@!$*()-]+$`)

// escaped is a value with an escape for every byte, which all servers that undo escapes read alike.
func escaped(value string) string {
	var b strings.Builder
	for i := range len(value) {
		fmt.Fprintf(&b, "%%%02X", value[i])
	}
	return b.String()
}

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
				honest, _ := readKey(kind, strings.Fields(kind)[1]+"="+escaped(read))
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

// What browsers and common clients send is certain, and the value is what they mean.
func TestHonestKeysAreCertain(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ kind, text, want string }{
		{"cookie sid", "sid=38afes7a8", "38afes7a8"},
		{"cookie sid", "_ga=GA1.2.1234.5678; _gid=GA1.2.1; sid=s%3AHk3-abc.def%2F12; theme=dark", "s:Hk3-abc.def/12"},
		{"cookie sid", `prefs="a b"; sid=abc`, "abc"},
		{"cookie sid", `cart={"a":[1,2]}; sid=abc; csrftoken=Xyz`, "abc"},
		{"cookie sid", "PHPSESSID=1; sid=eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.sig_-; connect.sid=s%3A1", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.sig_-"},
		{"cookie sid", "OptanonConsent=isIABGlobal=false&datestamp=Tue+Dec+01; sid=q1w2==", "q1w2=="},
		{"cookie sid", "a=1;sid=abc;b=2", "abc"},
		{"query api_key", "api_key=abc123", "abc123"},
		{"query api_key", "q=caf%C3%A9+au+lait&page=2&api_key=k-1_2.3~4&sort=-date", "k-1_2.3~4"},
		{"query api_key", "filter[status]=open&ids[]=1&ids[]=2&api_key=abc", "abc"},
		{"query api_key", "redirect=https%3A%2F%2Fexample.com%2F%3Fa%3Db&api_key=abc", "abc"},
	} {
		value, found := readKey(c.kind, c.text)
		assert.Equal(t, present, found, c.text)
		assert.Equal(t, c.want, value, c.text)
	}
}
