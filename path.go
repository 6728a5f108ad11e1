package tieredlimit

import (
	"net/http"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// sentPath is the path of a request in the very spelling that an upstream receives: as the caller sent it, or as uri,
// rewrite and the like have left it. The path that Go puts together again from what it has decoded can differ.
func sentPath(r *http.Request) string {
	target := r.RequestURI
	if !strings.HasPrefix(target, "/") {
		// A target in absolute form (RFC 9112 section 3.2.2), or none that has a path.
		_, rest, absolute := strings.Cut(target, "://")
		slash := strings.IndexAny(rest, "/?")
		if !absolute || slash < 0 || rest[slash] == '?' {
			return r.URL.EscapedPath()
		}
		target = rest[slash:]
	}
	path, _, _ := strings.Cut(target, "?")
	return path
}

// ambiguousBefore reports whether a path was ambiguous before uri, rewrite and the like have changed it. Some upstreams
// are told of that one too.
func ambiguousBefore(r *http.Request) bool {
	before, known := r.Context().Value(caddyhttp.OriginalRequestCtxKey).(http.Request)
	return known && before.RequestURI != r.RequestURI && before.URL != nil && ambiguousPath(sentPath(&before))
}

// pathFields are header fields out of which some frameworks take the path of a request, by their canonical names.
var pathFields = [...]string{"X-Original-Url", "X-Rewrite-Url"}

// behindAuthority is what is left of a path that begins with two slashes, where an upstream reads it as a reference with a
// host in front (RFC 3986 section 4.2).
func behindAuthority(path string) (string, bool) {
	rest := strings.TrimLeft(path, "/")
	if !strings.HasPrefix(path, "//") {
		return "", false
	}
	slash := strings.IndexByte(rest, '/')
	if slash < 0 {
		return "/", true
	}
	return rest[slash:], true
}

// plainPath is a path, decoded, in lower case and without slashes at its end, with letters in place of those that
// upstreams which are lenient about characters or case take for them.
func plainPath(path string) string {
	plain := true
	for i := range len(path) {
		if c := path[i]; c >= utf8.RuneSelf || 'A' <= c && c <= 'Z' || c == '+' {
			plain = false
			break
		}
	}
	if !plain {
		path = strings.ToLower(strings.Map(plainLetter, path))
		path = plusAtEnds.Replace(path) // blanks to those who take a path for a query
		path = strings.TrimRight(path, "+")
	}
	if trimmed := strings.TrimRight(path, "/"); trimmed != "" {
		return trimmed
	}
	return path
}

var plusAtEnds = strings.NewReplacer("/+", "/", "+/", "/")

// plainLetter is the letter of ASCII that a character may be taken for, or -1 for one that is often dropped.
func plainLetter(c rune) rune {
	switch {
	case c < utf8.RuneSelf:
		return c
	case '\uff01' <= c && c <= '\uff5e':
		return c - '\uff01' + '!' // full-width
	case c == '\u0130' || c == '\u0131':
		return 'i' // with a dot and without one
	case c == '\u017f':
		return 's' // the long one
	case unicode.IsSpace(c) || unicode.IsControl(c) || unicode.Is(unicode.Cf, c):
		return -1
	}
	return c
}

// ambiguousPath reports whether a path as sent could mean another one to some upstream: it holds a dot segment, a
// separator or a dot in another spelling, a parameter, or something that upstreams cut off or drop before they look.
func ambiguousPath(sent string) bool {
	var last [3]byte // decoded
	segment := 0     // bytes of it so far
	dots := 0        // the segment's last bytes that are dots
	for i := 0; i < len(sent); {
		c := sent[i]
		encoded := c == '%'
		if encoded {
			if i+2 >= len(sent) || !isHex(sent[i+1]) || !isHex(sent[i+2]) {
				return true
			}
			c = unhex(sent[i+1])<<4 | unhex(sent[i+2])
			i += 3
		} else {
			i++
		}
		last = [3]byte{last[1], last[2], c}
		switch {
		case c == '\\' || c == ';' || c == '#' || c < ' ' || c == 0x7f,
			encoded && (c == '/' || c == '.' || c == '%' || c == '?'),
			c >= 0x80 && standsForASCII(last):
			return true
		case c == ' ' && (segment == 0 || i == len(sent) || sent[i] == '/'):
			return true // some upstreams drop blanks around a segment
		case c == '/':
			if dots > 0 {
				return true // also behind a name: file systems of Windows drop them
			}
			segment, dots = 0, 0
			continue
		case c == '.':
			dots++
		default:
			dots = 0
		}
		segment++
	}
	return dots > 0 || !asciiOnly(sent) && !validText(sent)
}

// standsForASCII reports whether the bytes end with a character that upstreams which normalize text take for a
// dot, a slash, a backslash, a semicolon or a percent sign (Unicode, compatibility decomposition).
func standsForASCII(last [3]byte) bool {
	switch string(last[:]) {
	case "\u2024", "\u2025", "\u2026", // dot leaders, an ellipsis
		"\uff0e", "\uff0f", "\uff3c", "\uff1b", "\uff05", // full-width
		"\ufe52", "\ufe68", "\ufe54", "\ufe6a", "\ufe30", // small, vertical
		"\u2044", "\u2215", "\u29f5", "\u29f8", "\u3002", "\uff61": // other slashes and full stops
		return true
	}
	return false
}

// asciiOnly reports whether a path has no byte outside of ASCII, encoded or not.
func asciiOnly(path string) bool {
	for i := 0; i < len(path); i++ {
		if path[i] >= 0x80 || path[i] == '%' && i+1 < len(path) && path[i+1] > '7' {
			return false
		}
	}
	return true
}

// validText reports whether a path, decoded, is UTF-8. Decoders that are too lenient make dots and slashes of bytes that
// are not.
func validText(path string) bool {
	var char [utf8.UTFMax]byte
	n := 0
	for i := 0; i < len(path); {
		char[n], i = decodedByte(path, i, false)
		n++
		if !utf8.FullRune(char[:n]) {
			continue
		}
		if r, size := utf8.DecodeRune(char[:n]); r == utf8.RuneError && size <= 1 {
			return false
		}
		n = 0
	}
	return n == 0
}
