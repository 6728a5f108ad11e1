package replay

import (
	"encoding/binary"
	"encoding/json"
	"math/bits"
)

// scanner walks the JSON text of one line, strictly by RFC 8259, without allocating. It accepts what encoding/json
// accepts: a text that it has walked to the end is valid, and one that it refuses is not.
type scanner struct {
	b []byte
	i int
}

// maxDepth is how deep values may be nested, as in encoding/json.
const maxDepth = 10000

// space moves past blanks.
func (s *scanner) space() {
	for s.i < len(s.b) {
		switch s.b[s.i] {
		case ' ', '\t', '\r', '\n':
			s.i++
		default:
			return
		}
	}
}

// take moves past the byte c and the blanks behind it, if c is next.
func (s *scanner) take(c byte) bool {
	if s.i >= len(s.b) || s.b[s.i] != c {
		return false
	}
	s.i++
	s.space()
	return true
}

// is tells whether the byte c is next.
func (s *scanner) is(c byte) bool { return s.i < len(s.b) && s.b[s.i] == c }

// end tells whether nothing is left.
func (s *scanner) end() bool { return s.i == len(s.b) }

// text is a string as it stands between its quotes.
type text struct {
	raw   []byte
	plain bool // neither escapes nor bytes outside ASCII, so that raw is the value
}

// str moves past a string and the blanks behind it.
func (s *scanner) str() (text, bool) {
	if !s.is('"') {
		return text{}, false
	}
	s.i++
	start, plain := s.i, true
	for {
		i, ascii := skipText(s.b, s.i)
		plain = plain && ascii
		s.i = i
		if i >= len(s.b) {
			return text{}, false
		}
		switch s.b[i] {
		case '"':
			t := text{raw: s.b[start:i], plain: plain}
			s.i++
			s.space()
			return t, true
		case '\\':
			plain = false
			if !s.escape() {
				return text{}, false
			}
		default: // a control character
			return text{}, false
		}
	}
}

// skipText returns the index of the first quote, backslash or control character from i on, and whether the bytes before
// it are ASCII. It may say no where the byte outside ASCII is a little behind.
func skipText(b []byte, i int) (int, bool) {
	const (
		ones  = 0x0101010101010101
		highs = 0x8080808080808080
	)
	var seen uint64
	for ; i+8 <= len(b); i += 8 {
		w := binary.LittleEndian.Uint64(b[i:])
		seen |= w
		quote, slash := w^('"'*ones), w^('\\'*ones)
		found := ((w - ' '*ones) &^ w) | ((quote - ones) &^ quote) | ((slash - ones) &^ slash)
		if found &= highs; found != 0 {
			return i + bits.TrailingZeros64(found)/8, seen&highs == 0
		}
	}
	for ; i < len(b); i++ {
		c := b[i]
		if c == '"' || c == '\\' || c < ' ' {
			break
		}
		seen |= uint64(c)
	}
	return i, seen&highs == 0
}

// escape moves past a backslash and what it introduces.
func (s *scanner) escape() bool {
	if s.i+1 >= len(s.b) {
		return false
	}
	switch s.b[s.i+1] {
	case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
		s.i += 2
		return true
	case 'u':
		if s.i+6 > len(s.b) {
			return false
		}
		for _, c := range s.b[s.i+2 : s.i+6] {
			if (c < '0' || c > '9') && (c|0x20 < 'a' || c|0x20 > 'f') {
				return false
			}
		}
		s.i += 6
		return true
	}
	return false
}

// number moves past a number and the blanks behind it, and returns it as it stands.
func (s *scanner) number() ([]byte, bool) {
	start := s.i
	if s.is('-') {
		s.i++
	}
	switch {
	case s.is('0'):
		s.i++
	case !s.digits():
		return nil, false
	}
	if s.is('.') {
		s.i++
		if !s.digits() {
			return nil, false
		}
	}
	if s.is('e') || s.is('E') {
		s.i++
		if s.is('+') || s.is('-') {
			s.i++
		}
		if !s.digits() {
			return nil, false
		}
	}
	raw := s.b[start:s.i]
	s.space()
	return raw, true
}

// digits moves past decimal digits and tells whether there was one.
func (s *scanner) digits() bool {
	start := s.i
	for s.i < len(s.b) && s.b[s.i]-'0' <= 9 {
		s.i++
	}
	return s.i > start
}

// word moves past one of the literals true, false and null.
func (s *scanner) word(w string) bool {
	if len(s.b)-s.i < len(w) || string(s.b[s.i:s.i+len(w)]) != w {
		return false
	}
	s.i += len(w)
	s.space()
	return true
}

// member moves to the value of an object's next member and returns its key. more is false behind the last one. The
// scanner stands behind the opening brace when first is true.
func (s *scanner) member(first bool) (key text, more, ok bool) {
	if s.take('}') {
		return text{}, false, true
	}
	if !first && !s.take(',') {
		return text{}, false, false
	}
	key, ok = s.str()
	return key, true, ok && s.take(':')
}

// element moves to an array's next element, in the same way.
func (s *scanner) element(first bool) (more, ok bool) {
	if first {
		return !s.take(']'), true
	}
	if s.take(',') {
		return true, true
	}
	return false, s.take(']')
}

// skip moves past a value that depth others are around.
func (s *scanner) skip(depth int) bool {
	if s.end() {
		return false
	}
	switch c := s.b[s.i]; c {
	case '"':
		_, ok := s.str()
		return ok
	case '{':
		return s.skipObject(depth + 1)
	case '[':
		return s.skipArray(depth + 1)
	case 't':
		return s.word("true")
	case 'f':
		return s.word("false")
	case 'n':
		return s.word("null")
	}
	_, ok := s.number()
	return ok
}

func (s *scanner) skipObject(depth int) bool {
	if depth > maxDepth || !s.take('{') {
		return false
	}
	for first := true; ; first = false {
		_, more, ok := s.member(first)
		if !ok || !more {
			return ok
		}
		if !s.skip(depth) {
			return false
		}
	}
}

func (s *scanner) skipArray(depth int) bool {
	if depth > maxDepth || !s.take('[') {
		return false
	}
	for first := true; ; first = false {
		more, ok := s.element(first)
		if !ok || !more {
			return ok
		}
		if !s.skip(depth) {
			return false
		}
	}
}

// is tells whether the text is the given one.
func (t text) is(value string) bool {
	if t.plain {
		return string(t.raw) == value
	}
	return string(t.appendTo(nil)) == value
}

// appendTo appends the value of the text.
func (t text) appendTo(buf []byte) []byte {
	if t.plain {
		return append(buf, t.raw...)
	}
	quoted := make([]byte, 0, len(t.raw)+2)
	quoted = append(append(append(quoted, '"'), t.raw...), '"')
	var value string
	if err := json.Unmarshal(quoted, &value); err != nil {
		return append(buf, t.raw...) // not possible for a text that was scanned
	}
	return append(buf, value...)
}
