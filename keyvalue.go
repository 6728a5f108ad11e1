package tieredlimit

import (
	"bytes"
	"encoding/base64"
	"strings"
	"unicode"
	"unicode/utf8"
)

// presence is what a request says of something that a key is made of.
type presence uint8

const (
	// absent: nothing that any server would read as the value is there, or it is empty.
	absent presence = iota

	// present: there is one value, and all servers that read it agree on it.
	present

	// uncertain: something is there, but servers differ in whether it is the value, or in which it is.
	uncertain
)

// A value is looked for in so much text at most. What is longer is uncertain: what comes behind it could be the value.
const (
	maxKeyText    = 64 << 10 // bytes of all Cookie fields together, or of a query
	maxQueryPairs = 1000     // in a query; common servers look at no more, others do
	maxDecodings  = 4        // percent-encodings of percent-encodings
)

// add says what is known of a value once another source has been read. What is uncertain stays so.
func (p presence) add(other presence) presence { return max(p, other) }

// valueReader collects the one value that several places of a request may give: it stands behind start, in the form in
// which values are compared.
type valueReader struct {
	buf   []byte
	start int
	found bool // there is a first value, empty or not
}

// add takes a further value, appended by write, and reports false if it differs from the first or cannot be read.
func (v *valueReader) add(write valueWriter, text string) bool {
	at := len(v.buf)
	buf, ok := write(v.buf, text)
	v.buf = buf
	if !ok {
		return false
	}
	if !v.found {
		v.found = true
		return true
	}
	same := bytes.Equal(v.buf[v.start:at], v.buf[at:])
	v.buf = v.buf[:at]
	return same
}

// result is what has been read. Where it is not present, nothing is appended.
func (v *valueReader) result(certain bool) ([]byte, presence) {
	switch {
	case !certain:
		return v.buf[:v.start], uncertain
	case len(v.buf) == v.start:
		return v.buf, absent
	}
	return v.buf, present
}

// appendHeader appends the value of a header field. Several lines with different values are uncertain. Fields that only
// differ in an underscore or a dot in place of a hyphen are the same to some servers, but Caddy drops these.
func appendHeader(buf []byte, lines []string, name string, fold bool) ([]byte, presence) {
	if len(lines) == 0 {
		return buf, absent
	}
	if len(lines) == 1 && !areCredentials(name) && plainEnds(lines[0]) {
		return append(buf, lines[0]...), present
	}
	v := valueReader{buf: buf, start: len(buf)}
	write := headerWriter(name, fold)
	for _, line := range lines {
		if !v.add(write, line) {
			return v.result(false)
		}
	}
	return v.result(true)
}

// valueWriter appends a value in the form in which it is compared, and reports false for one that cannot be read with
// certainty.
type valueWriter func(buf []byte, text string) ([]byte, bool)

// headerWriter is what appends a value of a field. One that is folded may have blanks of any kind around it.
func headerWriter(name string, fold bool) valueWriter {
	switch {
	case areCredentials(name):
		return appendCredentials
	case fold:
		return appendAny
	}
	return appendTrimmed
}

// paramWriter is what appends a value of a query.
func paramWriter(fold bool) valueWriter {
	if fold {
		return decodeText
	}
	return appendDecoded
}

// appendAny appends a value as it is.
func appendAny(buf []byte, text string) ([]byte, bool) { return append(buf, text...), true }

// areCredentials reports whether a field has a scheme in front of its value.
func areCredentials(name string) bool {
	return name == "Authorization" || name == "Proxy-Authorization"
}

// plainEnds reports whether a value is not empty and begins and ends with what no server takes for a blank.
func plainEnds(text string) bool {
	return text != "" && isGraphic(text[0]) && isGraphic(text[len(text)-1])
}

// isGraphic reports whether a byte is a visible character of ASCII.
func isGraphic(c byte) bool { return ' ' < c && c < 0x7f }

// appendTrimmed appends a value without the blanks around it, which are no part of it (RFC 9110 section 5.5). It reports
// false if there are others around it, which some servers take off as well.
func appendTrimmed(buf []byte, text string) ([]byte, bool) {
	text = trimBlanks(text)
	return append(buf, text...), !hasBlankEnds(text)
}

// hasBlankEnds reports whether a text begins or ends with a blank that is not ASCII, be it read as UTF-8 or as Latin-1:
// many languages have one function that takes these off, and servers call it.
func hasBlankEnds(text string) bool {
	if text == "" || plainEnds(text) {
		return false
	}
	first, size := utf8.DecodeRuneInString(text)
	if isBlankRune(first) || size == 1 && isBlankRune(rune(text[0])) {
		return true
	}
	last, size := utf8.DecodeLastRuneInString(text)
	return isBlankRune(last) || size == 1 && isBlankRune(rune(text[len(text)-1]))
}

// isBlankRune reports whether a character outside of ASCII is one that is taken off the ends of texts, in one language or another:
// what Unicode calls white space, and what it calls format characters, such as the byte order mark.
func isBlankRune(r rune) bool {
	return r >= 0x80 && (unicode.IsSpace(r) || unicode.In(r, unicode.Cf))
}

// appendCredentials appends credentials as they are compared: without the scheme, which many servers do not look at, and
// without the blanks around them. A single word is credentials without a scheme. What more than one text could be taken out of is
// uncertain: parameters, further words, quotes, bytes outside of ASCII, at some of which servers cut. Credentials of
// scheme Basic must be what an encoder writes: decoders pass over other characters, so that there would be any number of
// spellings.
func appendCredentials(buf []byte, text string) ([]byte, bool) {
	text = trimBlanks(text)
	blank := -1
	for i := range len(text) {
		switch c := text[i]; {
		case bytesOfKind[c]&notInCredentials != 0:
			return buf, false
		case blank < 0 && (c == ' ' || c == '\t'):
			blank = i
		}
	}
	if blank < 0 {
		// Servers cut so many bytes off.
		return append(buf, text...), !hasFoldPrefix(text, "bearer") && !hasFoldPrefix(text, "basic")
	}
	scheme, credentials := text[:blank], trimBlanks(text[blank:])
	switch {
	case strings.IndexByte(credentials, ' ') >= 0, strings.IndexByte(credentials, '\t') >= 0:
		return buf, false
	case strings.EqualFold(scheme, "basic") && !strictBase64(credentials):
		return buf, false
	}
	return append(buf, credentials...), true
}

// trimBlanks is a text without the blanks around it (OWS of RFC 9110 section 5.6.3).
func trimBlanks(text string) string {
	for text != "" && (text[0] == ' ' || text[0] == '\t') {
		text = text[1:]
	}
	for text != "" && (text[len(text)-1] == ' ' || text[len(text)-1] == '\t') {
		text = text[:len(text)-1]
	}
	return text
}

// hasFoldPrefix reports whether a text begins with a prefix, in any case.
func hasFoldPrefix(text, prefix string) bool {
	return len(text) >= len(prefix) && strings.EqualFold(text[:len(prefix)], prefix)
}

// strictBase64 reports whether a text is the base64 that an encoder writes (RFC 4648 section 4).
func strictBase64(text string) bool {
	if len(text)%4 != 0 {
		return false
	}
	var chunk [3]byte
	for len(text) > 0 {
		if len(text) > 4 && text[3] == '=' || strings.ContainsAny(text[:4], "\r\n") {
			return false
		}
		if _, err := base64.StdEncoding.Strict().Decode(chunk[:], []byte(text[:4])); err != nil {
			return false
		}
		text = text[4:]
	}
	return true
}

func lower(c byte) byte {
	if 'A' <= c && c <= 'Z' {
		c += 'a' - 'A'
	}
	return c
}

// appendCookie appends the value of a cookie, looked for as servers do and not only as RFC 6265 says. Names are compared
// with regard to case; what has the name in another spelling, or between bytes at which some servers cut and others do
// not, is uncertain, and so are several values.
func appendCookie(buf []byte, lines []string, name string) ([]byte, presence) {
	v := valueReader{buf: buf, start: len(buf)}
	length := 0
	for _, line := range lines {
		if length += len(line); length > maxKeyText {
			return v.result(false)
		}
		for line != "" {
			var pair string
			pair, line, _ = strings.Cut(line, ";")
			if !v.addCookie(pair, name) {
				return v.result(false)
			}
		}
	}
	return v.result(true)
}

// addCookie looks at one pair, and reports false if that leaves the value uncertain.
func (v *valueReader) addCookie(pair, name string) bool {
	key, value, isPair := strings.Cut(pair, "=")
	if !isPair {
		return true
	}
	switch trimmed := trimBlanks(key); {
	case trimmed == name:
		if !v.add(appendCookieValue, value) {
			return false
		}
	case len(trimmed) != len(name) && isPlainName(trimmed):
	case couldBeName(key, name, false) || couldBeName(key[lastSeparator(key)+1:], name, false):
		return false
	}
	return !embedsName(value, name)
}

// isPlainName reports whether a name has only bytes that every server takes as they are, so that it is no other name's
// spelling but in another case.
func isPlainName(name string) bool {
	for i := range len(name) {
		if bytesOfKind[name[i]]&notInPlainName != 0 {
			return false
		}
	}
	return true
}

// embedsName reports whether a value holds what a server that separates cookies at blanks, commas or other bytes would
// take for a cookie of that name.
func embedsName(value, name string) bool {
	for {
		at := strings.Index(value, name)
		if at < 0 {
			return false
		}
		rest := strings.TrimLeftFunc(value[at+len(name):], func(r rune) bool { return r <= ' ' || r >= 0x7f })
		if at > 0 && isSeparator(value[at-1]) && strings.HasPrefix(rest, "=") {
			return true
		}
		value = value[at+1:]
	}
}

// lastSeparator is the index of the last byte in a name at which a server might cut, or -1.
func lastSeparator(key string) int {
	key = strings.TrimRightFunc(key, func(r rune) bool { return r <= ' ' || r >= 0x7f })
	for i := len(key) - 1; i >= 0; i-- {
		if isSeparator(key[i]) {
			return i
		}
	}
	return -1
}

// isSeparator reports whether a byte ends a name or value for some servers: blanks, control characters, bytes outside of
// ASCII, and what RFC 2616 section 2.2 calls separators, as far as they can stand in front of a name.
func isSeparator(c byte) bool { return bytesOfKind[c]&endsValue != 0 }

// byteKind says what a byte is to those who read keys.
type byteKind uint8

const (
	endsValue        byteKind = 1 << iota // see isSeparator
	notInCredentials                      // see appendCredentials
	notInPlainName                        // see isPlainName
	notInPlainValue                       // has to be looked at closely in a cookie's value
)

var bytesOfKind = func() (kinds [256]byteKind) {
	for i := range kinds {
		c := byte(i)
		letter := 'a' <= lower(c) && lower(c) <= 'z' || '0' <= c && c <= '9'
		for kind, is := range map[byteKind]bool{
			endsValue:        isJunk(c) || strings.IndexByte(`,"\()<>@{}[]`, c) >= 0,
			notInCredentials: c >= 0x7f || c < ' ' && c != '\t' || strings.IndexByte(`,;"'\`, c) >= 0,
			notInPlainName:   !letter && c != '_' && c != '-',
			notInPlainValue:  isJunk(c) || strings.IndexByte(`"\%+`, c) >= 0,
		} {
			if is {
				kinds[i] |= kind
			}
		}
	}
	return kinds
}()

// isJunk reports whether a byte is a blank, a control character, or not ASCII. Servers trim some of these.
func isJunk(c byte) bool { return c <= ' ' || c >= 0x7f }

// appendCookieValue appends a cookie's value as it is compared: without blanks and quotes around it, and decoded, since
// servers differ in whether they do that. It reports false where they would read different values.
func appendCookieValue(buf []byte, text string) ([]byte, bool) {
	text = trimBlanks(text)
	if len(text) >= 2 && text[0] == '"' && text[len(text)-1] == '"' {
		text = text[1 : len(text)-1]
	}
	plain := true
	for i := range len(text) {
		c := text[i]
		if bytesOfKind[c]&notInPlainValue == 0 {
			continue
		}
		if isJunk(c) || c == '"' || c == '\\' {
			return buf, false
		}
		plain = false
	}
	if plain {
		return append(buf, text...), true
	}
	return appendDecoded(buf, text)
}

// appendQuery appends the value of a parameter of a query. Where servers differ in how they read the query, because of
// semicolons, escapes that are none, names that only some take for this one, several values, the length, or a number sign,
// at which some end, it is uncertain.
func appendQuery(buf []byte, query, name string, fold bool) ([]byte, presence) {
	v := valueReader{buf: buf, start: len(buf)}
	if len(query) > maxKeyText || strings.IndexByte(query, '#') >= 0 {
		return v.result(false)
	}
	for pairs := 0; query != ""; pairs++ {
		if pairs == maxQueryPairs {
			return v.result(false)
		}
		var pair string
		pair, query, _ = strings.Cut(query, "&")
		if !v.addParam(pair, name, paramWriter(fold)) {
			return v.result(false)
		}
	}
	return v.result(true)
}

// addParam looks at one pair of a query, and reports false if that leaves the value uncertain.
func (v *valueReader) addParam(pair, name string, write valueWriter) bool {
	pair, more, several := strings.Cut(pair, ";")
	key, value, _ := strings.Cut(pair, "=")
	mine := isName(key, name)
	if mine {
		if several || !validEscapes(key) || !validEscapes(value) || !v.add(write, value) {
			return false
		}
	} else if couldBeName(key, name, true) {
		return false
	}
	for several {
		pair, more, several = strings.Cut(more, ";")
		if key, _, _ = strings.Cut(pair, "="); isName(key, name) || couldBeName(key, name, true) {
			return false
		}
	}
	return true
}

// isName reports whether a name of a query, decoded, is the one that is looked for.
func isName(key, name string) bool {
	if key == name {
		return true
	}
	if strings.IndexByte(key, '%') < 0 && strings.IndexByte(key, '+') < 0 {
		return false
	}
	i, j := 0, 0
	for i < len(key) && j < len(name) {
		var c byte
		if c, i = decodedByte(key, i, true); c != name[j] {
			return false
		}
		j++
	}
	return i == len(key) && j == len(name)
}

// couldBeName reports whether some server takes a name for the one that is looked for though it is another: PHP makes
// underscores of dots, blanks and brackets and drops what is in front; others drop what is around it, look away from
// case, cut at a NUL, or read a bracket or a dot beside it as the beginning or end of a list.
func couldBeName(key, name string, query bool) bool {
	i := 0
	for i < len(key) {
		c, next := decodedByte(key, i, query)
		if !isJunk(c) && strings.IndexByte(`"[?`, c) < 0 {
			break
		}
		i = next
	}
	for j := range len(name) {
		if i >= len(key) {
			return false
		}
		var c byte
		if c, i = decodedByte(key, i, query); foldName(c) != foldName(name[j]) {
			return false
		}
	}
	if i >= len(key) {
		return true
	}
	c, _ := decodedByte(key, i, query)
	return isJunk(c) || strings.IndexByte(`"[].`, c) >= 0
}

// foldName makes bytes equal that servers take for one another in names.
func foldName(c byte) byte {
	switch c {
	case '.', ' ', '[', '-', '+':
		return '_'
	}
	return lower(c)
}

// decodedByte is the byte of a text at i, and where the next one begins.
func decodedByte(text string, i int, query bool) (byte, int) {
	c := text[i]
	switch {
	case c == '%' && i+2 < len(text) && isHex(text[i+1]) && isHex(text[i+2]):
		return unhex(text[i+1])<<4 | unhex(text[i+2]), i + 3
	case c == '+' && query:
		return ' ', i + 1
	}
	return c, i + 1
}

func isHex(c byte) bool {
	return '0' <= c && c <= '9' || 'a' <= c && c <= 'f' || 'A' <= c && c <= 'F'
}

func unhex(c byte) byte {
	if c <= '9' {
		return c - '0'
	}
	return lower(c) - 'a' + 10
}

// validEscapes reports whether every percent sign begins an escape.
func validEscapes(text string) bool {
	for i := strings.IndexByte(text, '%'); i >= 0 && i < len(text); i++ {
		if text[i] == '%' {
			if i+2 >= len(text) || !isHex(text[i+1]) || !isHex(text[i+2]) {
				return false
			}
			i += 2
		}
	}
	return true
}

// appendDecoded is decodeText, but without blanks around the text, and false also if there are others around it than those of
// ASCII.
func appendDecoded(buf []byte, text string) ([]byte, bool) {
	start := len(buf)
	buf, ok := decodeText(buf, text)
	if !ok {
		return buf, false
	}
	value := buf[start:]
	trimmed := bytes.Trim(value, " ")
	if n := len(trimmed); n > 0 && !(isGraphic(trimmed[0]) && isGraphic(trimmed[n-1])) && hasBlankEnds(string(trimmed)) {
		return buf, false
	}
	if len(trimmed) < len(value) {
		buf = buf[:start+copy(value, trimmed)]
	}
	return buf, true
}

// decodeText appends a text without its percent-encoding, however often that was applied. Plus signs become blanks, since
// some servers read them so. It reports false for what cannot be told: encodings that do not end, control characters,
// escapes of other kinds, and what is not UTF-8.
func decodeText(buf []byte, text string) ([]byte, bool) {
	start := len(buf)
	buf = append(buf, text...)
	for n := 0; ; n++ {
		if n > maxDecodings {
			return buf, false
		}
		before := len(buf)
		if buf = decodeOnce(buf, start); len(buf) == before {
			break
		}
	}
	value := buf[start:]
	for i, c := range value {
		switch {
		case c < ' ' || c == 0x7f:
			return buf, false
		case c == '+':
			value[i] = ' '
		case c == '%' && i+1 < len(value) && lower(value[i+1]) == 'u':
			return buf, false
		}
	}
	return buf, utf8.Valid(value)
}

// decodeOnce takes one percent-encoding off what stands in buf from start on.
func decodeOnce(buf []byte, start int) []byte {
	at := bytes.IndexByte(buf[start:], '%')
	if at < 0 {
		return buf
	}
	out := start + at
	for i := out; i < len(buf); i++ {
		c := buf[i]
		if c == '%' && i+2 < len(buf) && isHex(buf[i+1]) && isHex(buf[i+2]) {
			c = unhex(buf[i+1])<<4 | unhex(buf[i+2])
			i += 2
		}
		buf[out] = c
		out++
	}
	return buf[:out]
}
