package replay

import (
	"bytes"
)

// What collects logs puts a line into an envelope: a prefix, as docker compose, container runtimes, journald and syslog write
// it, or a member of a JSON object, as docker's json-file driver and journald's JSON do.

// maxEnvelopes is how many envelopes a line may be in, one inside the other.
const maxEnvelopes = 3

var (
	byteOrderMark = []byte("\xef\xbb\xbf")
	accessMark    = []byte("\thttp.log.access")
)

// unwrap takes off what stands in front of a line's JSON object, and the colours behind it. Where that is what Caddy's
// console encoder has written, it says what the line would have said as JSON: the time, the logger and the message.
func (l *lineReader) unwrap(line []byte) []byte {
	line = bytes.TrimSpace(bytes.TrimPrefix(line, byteOrderMark))
	if len(line) == 0 || line[0] == '{' {
		return line
	}
	if bytes.IndexByte(line, '\x1b') >= 0 {
		line = bytes.TrimSpace(withoutColours(line))
	}
	at := bytes.IndexByte(line, '{')
	if at < 0 {
		return line
	}
	if prefix := line[:at]; bytes.Contains(prefix, accessMark) {
		l.console(prefix)
	}
	return line[at:]
}

// console reads what the console encoder writes in front of the fields: the time, the level, the logger and the message, with
// tabs between, perhaps behind a prefix that ends in a blank. Under journald there is no time but that of the prefix.
func (l *lineReader) console(prefix []byte) {
	parts := bytes.Split(bytes.TrimRight(prefix, "\t "), []byte("\t"))
	n := len(parts)
	if n < 3 {
		return
	}
	f := &l.now
	f.logger, f.msg = text{raw: parts[n-2], plain: true}, text{raw: parts[n-1], plain: true}
	words := bytes.Fields(parts[max(0, n-4)])
	for i := range words {
		// The time is the last word or the last two, or, of a prefix, the first.
		for _, stamp := range [][]byte{bytes.Join(words[len(words)-1-i:], []byte(" ")), words[i]} {
			if l.consoleTime(stamp) {
				return
			}
		}
	}
}

// consoleTime takes a text for the time of the line if it is one.
func (l *lineReader) consoleTime(stamp []byte) bool {
	number := len(bytes.TrimLeft(stamp, "0123456789.")) == 0
	read := func() bool { _, ok := l.stamps.text(string(stamp)); return ok }
	if number {
		read = func() bool { _, ok := l.stamps.number(stamp); return ok && bytes.IndexByte(stamp, '.') > 0 }
	}
	if !read() {
		return false
	}
	l.now.stamp, l.now.stampRank = value{there: true, string: !number, text: text{raw: stamp, plain: true}}, 0
	return true
}

// withoutColours takes the escape sequences of colours off a line (ECMA-48, SGR).
func withoutColours(line []byte) []byte {
	out := make([]byte, 0, len(line))
	for len(line) > 0 {
		at := bytes.Index(line, []byte("\x1b["))
		if at < 0 {
			break
		}
		out = append(out, line[:at]...)
		line = line[at+2:]
		line = bytes.TrimLeft(line, "0123456789;")
		if len(line) > 0 && line[0] == 'm' {
			line = line[1:]
		}
	}
	return append(out, line...)
}

// isEnvelope reports whether a member of a JSON object holds a whole line.
func isEnvelope(key []byte) bool {
	return string(key) == "log" || string(key) == "MESSAGE" || string(key) == "message" || string(key) == "line"
}
