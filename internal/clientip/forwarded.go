package clientip

import "strings"

// ForwardedHeader is the canonical name of the header of RFC 7239.
const ForwardedHeader = "Forwarded"

// Forwarded holds the rightmost elements of a Forwarded header. Its room is fixed, so that a header of any length
// is read without allocating: one element for each hop that can be stated, and the left neighbour of the last. The zero
// value is ready, and one may be used again and again, by one goroutine.
//
// The header must be read from its left end, since only then is it known which commas are inside quotes.
type Forwarded struct {
	// count is how many elements there are, those that no longer fit included.
	count int

	// nodes are the values of the "for" parameters, without the quotes but with the escapes. An element without a
	// "for" parameter has the empty value, which is no address. Element i is at i modulo the length.
	nodes [MaxHops + 1]string
}

// Open makes the field lines of a header, by its canonical name, ready to be walked. Those of Forwarded are read into f,
// which the chain then refers to. It reports false if they do not follow RFC 7239: then none of them is of any use.
func (f *Forwarded) Open(name string, lines []string) (Chain, bool) {
	if name != ForwardedHeader {
		return Chain{commas: commas{lines: lines}}, true
	}
	return Chain{forwarded: f}, f.parse(lines)
}

// parse reads all field lines in order and reports whether every one of them is a Forwarded field by RFC 7239
// section 4. One that is not makes all of them useless: an open quote may have swallowed elements.
//
// Every element counts, the empty one too. Blanks around a semicolon are accepted, which the grammar does not do but
// some proxies write; they cannot move the border of an element.
func (f *Forwarded) parse(lines []string) bool {
	f.count = 0
	for _, line := range lines {
		for more := true; more; {
			node, rest, comma, ok := forwardedElement(line)
			if !ok {
				return false
			}
			f.nodes[f.count%len(f.nodes)] = node
			f.count++
			line, more = rest, comma
		}
	}
	return true
}

// fromRight is the value of the n-th element from the right, and whether there is one. The first is 1.
func (f *Forwarded) fromRight(n int) (string, bool) {
	if n < 1 || n > f.count || n > len(f.nodes) {
		return "", false
	}
	return unescape(f.nodes[(f.count-n)%len(f.nodes)]), true
}

// forwardedElement reads the first element of a line: the value of its "for" parameter, what follows the element's
// comma, and whether there is such a comma. It fails where the element does not follow the grammar, or names two
// clients.
func forwardedElement(s string) (node, rest string, comma, ok bool) {
	named := false
	for {
		s = skipBlanks(s)
		switch {
		case s == "":
			return node, "", false, true
		case s[0] == ',':
			return node, s[1:], true, true
		case s[0] == ';':
			s = s[1:]
			continue
		}
		name, value, after, ok := forwardedPair(s)
		if !ok {
			return "", "", false, false
		}
		if strings.EqualFold(name, "for") {
			if named {
				return "", "", false, false
			}
			node, named = value, true
		}
		s = skipBlanks(after)
		if s != "" && s[0] != ',' && s[0] != ';' {
			return "", "", false, false
		}
	}
}

// forwardedPair reads a name, an equals sign and a value, and returns what follows.
func forwardedPair(s string) (name, value, rest string, ok bool) {
	name, s = token(s)
	if name == "" || s == "" || s[0] != '=' {
		return "", "", "", false
	}
	if s = s[1:]; s != "" && s[0] == '"' {
		value, rest, ok = quoted(s[1:])
		return name, value, rest, ok
	}
	value, rest = token(s)
	return name, value, rest, value != ""
}

// quoted reads a quoted string whose opening quote has been read, and returns what follows the closing one. Escapes
// stay in the value. Source: RFC 9110 section 5.6.4.
func quoted(s string) (value, rest string, ok bool) {
	for i := 0; i < len(s); i++ {
		switch c := s[i]; {
		case c == '"':
			return s[:i], s[i+1:], true
		case c == '\\':
			if i++; i == len(s) || !isText(s[i]) {
				return "", "", false
			}
		case !isText(c):
			return "", "", false
		}
	}
	return "", "", false
}

// tokenBytes are the bytes that a token may have.
var tokenBytes = func() (is [256]bool) {
	for c := range is {
		is[c] = isAlnum(byte(c)) || strings.IndexByte("!#$%&'*+-.^_`|~", byte(c)) >= 0
	}
	return is
}()

// token reads the longest token that s starts with, which may be empty, and returns what follows. Source: RFC 9110
// section 5.6.2.
func token(s string) (value, rest string) {
	i := 0
	for i < len(s) && tokenBytes[s[i]] {
		i++
	}
	return s[:i], s[i:]
}

// unescape drops the backslash of each escaped character. Text that is far too long for an address, escapes and all,
// becomes empty, which is no address either.
func unescape(s string) string {
	if strings.IndexByte(s, '\\') < 0 {
		return s
	}
	if len(s) > 256 {
		return ""
	}
	plain := make([]byte, 0, len(s))
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' {
			i++ // there is something behind it, or quoted had failed
		}
		plain = append(plain, s[i])
	}
	return string(plain)
}

// skipBlanks cuts spaces and tabs off the front.
func skipBlanks(s string) string {
	for s != "" && isBlank(s[0]) {
		s = s[1:]
	}
	return s
}

// isText reports whether c may stand in a quoted string: anything but the control characters, the tab excepted.
func isText(c byte) bool { return c >= ' ' && c != 0x7f || c == '\t' }
