package replay

import (
	"bytes"
	"net/http"
	"slices"
	"time"
)

// lineReader turns the lines of a Caddy access log into entries. It serves one goroutine.
type lineReader struct {
	want    *wanted
	timeKey string // empty: ts, else one of the usual other names
	stamps  stampReader
	unit    durationUnit
	sample  *durationSample // takes the durations as they are read, if there is one
	now     fieldTexts
	joined  []byte // the peer, as it is put together
	inner   []byte // a line that the one being read is the envelope of
}

// fieldTexts is what one line says, still as it stands there.
type fieldTexts struct {
	logger, msg          text
	stamp                value
	stampRank            int
	duration             value
	hasRequest, hasReply bool
	bytesRead            int64
	status               int64
	userID               text
	request              requestTexts
}

// requestTexts is what a line says of the request.
type requestTexts struct {
	remoteIP, remotePort, remoteAddr text
	proto, method, host, uri         text
	seen                             [fields]bool
	tls, chunked                     bool
	headers                          []headerText
	crowded                          bool // so many that earlier ones of a name are still among them
	told                             bool // a field is among them that is there for its name alone
}

// headerText is one field line of the request.
type headerText struct {
	index       uint16
	name, value text
	member      int  // the ordinal of the name among those of the line
	void        bool // the name has no values
}

// value is a member that may be a string or a number.
type value struct {
	there  bool
	string bool
	text   text // without quotes
}

// stampKeys are the names of the time, the preferred first.
var stampKeys = []string{"ts", "time", "timestamp", "@timestamp"}

// read adds the entry of a line to a batch, or counts why there is none.
func (l *lineReader) read(line []byte, number uint32, b *builder) {
	b.stats.Lines++
	for depth := range maxEnvelopes {
		l.now = fieldTexts{stampRank: len(stampKeys), request: requestTexts{headers: l.now.request.headers[:0]}}
		l.inner = nil
		object := l.unwrap(line)
		if len(object) == 0 {
			return
		}
		s := scanner{b: object}
		if object[0] != '{' || !l.top(&s) || !s.end() {
			if kind := badKindOf(bytes.TrimSpace(line)); depth == 0 || kind != badJSON {
				b.stats.bad(kind, line)
			} else {
				b.stats.Other++
			}
			return
		}
		if l.now.hasRequest || l.inner == nil {
			break
		}
		line = l.inner
	}
	if !l.now.isAccess() {
		b.stats.Other++
		return
	}
	l.commit(number, line, b)
}

// top reads the members of the line's object.
func (l *lineReader) top(s *scanner) bool {
	s.take('{')
	for first := true; ; first = false {
		key, more, ok := s.member(first)
		if !ok || !more {
			return ok
		}
		if !l.topMember(s, key) {
			return false
		}
	}
}

func (l *lineReader) topMember(s *scanner, key text) bool {
	f := &l.now
	if !key.plain {
		key = text{raw: key.appendTo(nil), plain: true}
	}
	switch string(key.raw) {
	case "request":
		f.hasRequest = s.is('{')
		f.request = requestTexts{headers: f.request.headers[:0]}
		if f.hasRequest {
			return l.requestObject(s)
		}
		return s.skip(1)
	case "logger":
		return s.stringOr(&f.logger, 1)
	case "msg":
		return s.stringOr(&f.msg, 1)
	case "user_id":
		return s.stringOr(&f.userID, 1)
	case "duration":
		return s.value(&f.duration)
	case "bytes_read":
		return s.integer(&f.bytesRead)
	case "status":
		return s.integer(&f.status)
	case "resp_headers":
		f.hasReply = s.is('{')
		return s.skip(1)
	}
	if isEnvelope(key.raw) && s.is('"') && !f.hasRequest {
		t, ok := s.str()
		if inner := t.appendTo(nil); bytes.IndexByte(inner, '{') >= 0 {
			l.inner = inner
		}
		return ok
	}
	if rank := l.stampRank(key.raw); rank <= f.stampRank {
		f.stampRank = rank
		return s.value(&f.stamp)
	}
	return s.skip(1)
}

// stampRank tells how well a key suits as the name of the time: the lower the better.
func (l *lineReader) stampRank(key []byte) int {
	if l.timeKey != "" {
		if string(key) == l.timeKey {
			return 0
		}
		return len(stampKeys) + 1
	}
	for i, name := range stampKeys {
		if string(key) == name {
			return i
		}
	}
	return len(stampKeys) + 1
}

// requestObject reads the members of the request.
func (l *lineReader) requestObject(s *scanner) bool {
	s.take('{')
	for first := true; ; first = false {
		key, more, ok := s.member(first)
		if !ok || !more {
			return ok
		}
		if !key.plain {
			key = text{raw: key.appendTo(nil), plain: true}
		}
		if !l.requestMember(s, key) {
			return false
		}
	}
}

func (l *lineReader) requestMember(s *scanner, key text) bool {
	r := &l.now.request
	switch string(key.raw) {
	case "remote_ip":
		return s.stringOr(&r.remoteIP, 2)
	case "remote_port":
		return s.stringOr(&r.remotePort, 2)
	case "remote_addr": // Caddy before 2.5
		return s.stringOr(&r.remoteAddr, 2)
	case "proto":
		return s.stringOr(&r.proto, 2)
	case "method":
		r.seen[fieldMethod] = s.is('"')
		return s.stringOr(&r.method, 2)
	case "host":
		r.seen[fieldHost] = s.is('"')
		return s.stringOr(&r.host, 2)
	case "uri":
		r.seen[fieldURI] = s.is('"')
		return s.stringOr(&r.uri, 2)
	case "headers":
		r.headers, r.told, r.crowded = r.headers[:0], false, false
		if r.seen[fieldHeaders] = s.is('{'); r.seen[fieldHeaders] {
			return l.headersObject(s)
		}
	case "tls":
		r.tls = s.is('{')
	case "transfer_encoding":
		r.chunked = s.is('[')
	}
	return s.skip(2)
}

// headersObject reads the header fields that are wanted.
func (l *lineReader) headersObject(s *scanner) bool {
	s.take('{')
	member := 0
	for first := true; ; first = false {
		key, more, ok := s.member(first)
		if ok && !more && l.now.request.crowded {
			l.forgetEarlier()
		}
		if !ok || !more {
			return ok
		}
		if !key.plain {
			key = text{raw: key.appendTo(nil), plain: true}
		}
		index, wanted := l.want.find(key.raw)
		if !wanted {
			l.noteTelling(key)
			if !s.skip(3) {
				return false
			}
			continue
		}
		if member++; member <= fewMembers {
			l.forget(index, key)
		} else {
			l.now.request.crowded = true
		}
		before := len(l.now.request.headers)
		if !l.headerValues(s, index, key, member) {
			return false
		}
		if r := &l.now.request; r.crowded && len(r.headers) == before {
			r.headers = append(r.headers, headerText{index: index, name: key, member: member, void: true})
		}
	}
}

// fewMembers is up to how many fields of a line each new one is compared with those before it.
const fewMembers = 64

// noteTelling keeps the name of a field, without its value, if it may decide whether the request is a preflight. One is
// enough.
func (l *lineReader) noteTelling(key text) {
	r := &l.now.request
	if l.want.telling == nil || r.told || r.seen[fieldMethod] && !r.method.is(http.MethodOptions) {
		return
	}
	if r.told = l.want.telling(string(key.raw)); r.told {
		r.headers = append(r.headers, headerText{index: unlisted, name: key, value: text{plain: true}})
	}
}

// forget drops what an earlier member with the same name said.
func (l *lineReader) forget(index uint16, key text) {
	kept := l.now.request.headers[:0]
	for _, h := range l.now.request.headers {
		if h.index != index || index == unlisted && string(h.name.raw) != string(key.raw) {
			kept = append(kept, h)
		}
	}
	l.now.request.headers = kept
}

// forgetEarlier is forget for all fields of a line at once.
func (l *lineReader) forgetEarlier() {
	headers := l.now.request.headers
	listed, others := make(map[uint16]int), make(map[string]int)
	for i := range headers {
		if h := &headers[i]; h.index != unlisted {
			listed[h.index] = h.member
		} else {
			others[string(h.name.raw)] = h.member
		}
	}
	l.now.request.headers = slices.DeleteFunc(headers, func(h headerText) bool {
		if h.index != unlisted {
			return h.void || listed[h.index] != h.member
		}
		return h.void || others[string(h.name.raw)] != h.member
	})
}

// headerValues reads the field lines of one name: an array of strings as Caddy writes it, or a string as some log
// filters leave it.
func (l *lineReader) headerValues(s *scanner, index uint16, key text, member int) bool {
	r := &l.now.request
	if !s.is('[') {
		if !s.is('"') {
			return s.skip(3)
		}
		t, ok := s.str()
		r.headers = append(r.headers, headerText{index: index, name: key, value: t, member: member})
		return ok
	}
	s.take('[')
	for first := true; ; first = false {
		more, ok := s.element(first)
		if !ok || !more {
			return ok
		}
		if !s.is('"') {
			if !s.skip(4) {
				return false
			}
			continue
		}
		t, ok := s.str()
		if !ok {
			return false
		}
		r.headers = append(r.headers, headerText{index: index, name: key, value: t, member: member})
	}
}

// stringOr reads a value that depth others are around into t if it is a string, and else empties t.
func (s *scanner) stringOr(t *text, depth int) bool {
	*t = text{plain: true}
	if !s.is('"') {
		return s.skip(depth)
	}
	var ok bool
	*t, ok = s.str()
	return ok
}

// value reads a string or a number; of anything else it says that nothing is there.
func (s *scanner) value(v *value) (ok bool) {
	*v = value{}
	switch {
	case s.is('"'):
		v.there, v.string = true, true
		v.text, ok = s.str()
		return ok
	case s.is('-') || s.i < len(s.b) && s.b[s.i]-'0' <= 9:
		v.there = true
		v.text.plain = true
		v.text.raw, ok = s.number()
		return ok
	}
	return s.skip(1)
}

// integer reads a whole number of 0 or more; anything else counts as 0.
func (s *scanner) integer(n *int64) bool {
	var v value
	if !s.value(&v) {
		return false
	}
	*n = 0
	if whole, fraction, ok := decimal(v.text.raw); v.there && !v.string && ok && fraction == 0 {
		*n = whole
	}
	return true
}

// isAccess tells whether the line is one of an access log. Caddy's error log and its proxy's debug log have lines about
// requests too.
func (f *fieldTexts) isAccess() bool {
	if !f.hasRequest {
		return false
	}
	name := f.logger.raw
	switch {
	case bytes.HasPrefix(name, []byte("http.log.access")):
		return true
	case bytes.HasPrefix(name, []byte("http.")):
		return false
	}
	return f.hasReply || f.msg.is("handled request") || f.msg.is("NOP")
}

// commit adds the entry that the line has told of, if it can be used.
func (l *lineReader) commit(number uint32, line []byte, b *builder) {
	f, r := &l.now, &l.now.request
	r.seen[fieldTime], r.seen[fieldDuration] = f.stamp.there, f.duration.there
	peer, known := l.peer()
	r.seen[fieldPeer] = known
	for i, seen := range r.seen {
		if !seen {
			b.stats.Missing[i]++
		}
	}
	end, ok := l.time()
	if !ok {
		b.stats.bad(badTime, line)
		return
	}
	b.stats.coarse = b.stats.coarse || l.stamps.coarse
	b.stats.fine = b.stats.fine || l.stamps.fine
	duration, ok := l.duration()
	switch {
	case !ok:
		b.stats.bad(badDuration, line)
		return
	case !known:
		b.stats.bad(badPeer, line)
		return
	}
	e := entry{
		start: end - duration, duration: duration, line: number, status: uint16(f.status), size: f.bytesRead,
		peer: b.put(peer), method: b.put(r.method), host: b.put(r.host), uri: b.put(r.uri), proto: b.put(r.proto),
		user: b.put(f.userID), logger: b.put(f.logger),
	}
	if r.tls {
		e.flags |= overTLS
	}
	if r.chunked {
		e.flags |= chunked
	}
	l.commitHeaders(&e, b)
	b.entries = append(b.entries, e)
	b.stats.Requests++
}

func (l *lineReader) commitHeaders(e *entry, b *builder) {
	e.headers = uint32(len(b.headers))
	for _, h := range l.now.request.headers {
		line := headerLine{index: h.index, value: b.put(h.value)}
		if h.index == unlisted {
			line.name = b.put(h.name)
		} else if h.value.is(redacted) {
			for len(b.stats.Redacted) <= int(h.index) {
				b.stats.Redacted = append(b.stats.Redacted, 0)
			}
			b.stats.Redacted[h.index]++
		}
		b.headers = append(b.headers, line)
	}
	e.headersEnd = uint32(len(b.headers))
}

// redacted is what Caddy writes in the place of credentials.
const redacted = "REDACTED"

// time is when the line was written, which is when the request ended.
func (l *lineReader) time() (int64, bool) {
	v := &l.now.stamp
	switch {
	case !v.there:
		return 0, false
	case v.string:
		return l.stamps.text(string(v.text.appendTo(nil)))
	}
	return l.stamps.number(v.text.raw)
}

// duration is how long the request took, 0 where the line does not say.
func (l *lineReader) duration() (int64, bool) {
	v := &l.now.duration
	switch {
	case !v.there:
		return 0, true
	case v.string:
		d, err := time.ParseDuration(string(v.text.appendTo(nil)))
		return int64(d), err == nil && d >= 0
	}
	if l.sample != nil {
		l.sample.add(v.text.raw)
	}
	return l.unit.nanos(v.text.raw)
}

// peer is the peer as Go's server would name it: address and port, or what a unix socket has in their place.
func (l *lineReader) peer() (text, bool) {
	r := &l.now.request
	switch {
	case len(r.remoteIP.raw) == 0 && len(r.remoteAddr.raw) == 0:
		return text{}, false
	case len(r.remoteIP.raw) == 0:
		return r.remoteAddr, true
	case len(r.remotePort.raw) == 0:
		return r.remoteIP, true
	}
	buf := l.joined[:0]
	if bytes.IndexByte(r.remoteIP.raw, ':') >= 0 {
		buf = append(r.remoteIP.appendTo(append(buf, '[')), ']')
	} else {
		buf = r.remoteIP.appendTo(buf)
	}
	l.joined = r.remotePort.appendTo(append(buf, ':'))
	return text{raw: l.joined, plain: true}, true
}

// badKindOf says what a line that is no JSON object may be.
func badKindOf(line []byte) badKind {
	switch {
	case line[0] == '{':
		if line[len(line)-1] != '}' {
			return badCut
		}
	case bytes.Contains(line, []byte("\thttp.log.")):
		return badConsole
	case bytes.Contains(line, []byte(`] "`)) && bytes.Contains(line, []byte(` HTTP/`)):
		return badCLF
	}
	return badJSON
}
