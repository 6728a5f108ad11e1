// Package visible shows texts of unknown origin.
package visible

import (
	"fmt"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Text makes a text safe for a terminal and a page: what clients wrote may hold anything. Whatever does not print, line
// breaks and the marks that turn the direction of writing included, is shown by its number.
func Text(s string) string {
	if strings.IndexFunc(s, unprintable) < 0 {
		return s
	}
	var b strings.Builder
	for len(s) > 0 {
		r, size := utf8.DecodeRuneInString(s)
		switch {
		case r == utf8.RuneError && size == 1:
			fmt.Fprintf(&b, `\x%02x`, s[0])
		case unprintable(r):
			quoted := strconv.QuoteRune(r)
			b.WriteString(quoted[1 : len(quoted)-1])
		default:
			b.WriteRune(r)
		}
		s = s[size:]
	}
	return b.String()
}

func unprintable(r rune) bool { return r == utf8.RuneError || !unicode.IsPrint(r) }
