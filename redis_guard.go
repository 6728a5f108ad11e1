package tieredlimit

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"sync/atomic"
)

// redisGuard is a connection that ends when the other side sends what no server would: more replies than it was asked
// for, lengths that no reply has, or anything that is not RESP, version 2 or 3 (the specification of the protocol is at
// https://redis.io/docs/latest/develop/reference/protocol-spec).
//
// The client trusts what it reads: it would allocate whatever length it is told, and end the process over a reply too
// many. Whatever listens at the address, or sits in between, must not be able to do that. Sentinels are trusted more:
// from the first subscription on they may send messages unasked, and only their lengths are looked at.
type redisGuard struct {
	net.Conn
	in, out    redisScan
	asked      atomic.Int64 // commands that were sent, or are about to be
	subscribes bool         // whether subscriptions are expected on connections of this kind
	subscribed atomic.Bool  // messages may come unasked from now on
}

var (
	errRedisUnasked = errors.New("the server sends a reply that nobody asked for")
	errRedisForm    = errors.New("the server does not speak RESP")

	redisSubscribe = []byte("SUBSCRIBE")
)

// Write counts the commands before it sends them.
func (g *redisGuard) Write(p []byte) (int, error) {
	if g.subscribes && bytes.Contains(p, redisSubscribe) {
		g.subscribed.Store(true)
	}
	before := g.out.messages
	if err := g.out.feed(p); err != nil {
		return 0, fmt.Errorf("sending: %w", err)
	}
	g.asked.Add(g.out.messages - before)
	return g.Conn.Write(p)
}

// Read looks at what has come before it hands it on.
func (g *redisGuard) Read(p []byte) (int, error) {
	n, err := g.Conn.Read(p)
	if failure := g.in.feed(p[:n]); failure != nil {
		return 0, failure
	}
	if !g.subscribed.Load() && (g.in.pushes > 0 || g.in.messages > g.asked.Load()) {
		return 0, errRedisUnasked
	}
	return n, err
}

// redisScan follows a stream of RESP, and remembers no more of it than where in a message it is.
type redisScan struct {
	messages int64 // that have ended, but for pushes
	pushes   int64 // messages out of band that have begun

	state byte             // what comes next, see below
	kind  byte             // the first byte of the line
	line  [redisLine]byte  // the beginning of the line
	size  int              // of the line so far
	skip  int              // bytes of the string that are still to come
	left  [redisDepth]int  // elements that are still to come, of each aggregate around
	push  [redisDepth]bool // whether the aggregate is a push
	depth int
	bytes int // of the message so far
	parts int // elements of the message so far
}

// States of a redisScan.
const (
	redisInKind byte = iota
	redisInLine
	redisInText
	redisInReturn
	redisInFeed
)

// The largest message that is let through. That of a cluster of a thousand nodes about its slots is smaller.
const (
	redisLine      = 24
	redisDepth     = 8
	redisMostBytes = 8 << 20
	redisMostParts = 1 << 19
	redisMostText  = 1 << 20
	redisMostLine  = 32 << 10
)

// feed goes on with what has come.
func (s *redisScan) feed(p []byte) error {
	for len(p) > 0 {
		n, err := 1, error(nil)
		switch s.state {
		case redisInKind:
			s.kind, s.size, s.state = p[0], 0, redisInLine
		case redisInLine:
			n, err = s.readLine(p)
		case redisInText:
			n = min(s.skip, len(p))
			if s.skip -= n; s.skip == 0 {
				s.state = redisInReturn
			}
		case redisInReturn:
			err = s.expect(p[0], '\r', redisInFeed)
		case redisInFeed:
			if err = s.expect(p[0], '\n', redisInKind); err == nil {
				s.end()
			}
		}
		if err != nil {
			return err
		}
		if s.depth > 0 || s.state != redisInKind {
			if s.bytes += n; s.bytes > redisMostBytes {
				return fmt.Errorf("%w: a message of more than %d bytes", errRedisForm, redisMostBytes)
			}
		}
		p = p[n:]
	}
	return nil
}

func (s *redisScan) expect(got, want, next byte) error {
	if got != want {
		return fmt.Errorf("%w: a string does not end where it should", errRedisForm)
	}
	s.state = next
	return nil
}

// readLine reads up to the end of a line, and what the line says.
func (s *redisScan) readLine(p []byte) (int, error) {
	n := bytes.IndexByte(p, '\n') + 1
	if n == 0 {
		n = len(p)
	}
	for _, c := range p[:n] {
		// The last two bytes are always kept.
		if s.size >= redisLine {
			s.line[redisLine-2] = s.line[redisLine-1]
			s.line[redisLine-1] = c
		} else {
			s.line[s.size] = c
		}
		s.size++
	}
	if s.size > redisMostLine {
		return 0, fmt.Errorf("%w: a line of more than %d bytes", errRedisForm, redisMostLine)
	}
	if p[n-1] != '\n' {
		return n, nil
	}
	if kept := min(s.size, redisLine); s.size < 2 || s.line[kept-2] != '\r' {
		return 0, fmt.Errorf("%w: a line does not end with CR LF", errRedisForm)
	}
	s.state = redisInKind
	return n, s.begin()
}

// begin begins what a line announces.
func (s *redisScan) begin() error {
	text := s.line[:min(s.size, redisLine)-2]
	switch s.kind {
	case '+', '-', ':', ',', '(':
		s.end()
	case '_':
		if s.size != 2 {
			return s.bad()
		}
		s.end()
	case '#':
		if s.size != 3 {
			return s.bad()
		}
		s.end()
	case '$', '!', '=':
		return s.beginText(text)
	case '*', '~', '%', '>':
		return s.beginParts(text)
	default:
		return s.bad()
	}
	return nil
}

func (s *redisScan) bad() error {
	return fmt.Errorf("%w: a line that begins with %q", errRedisForm, s.kind)
}

// beginText begins a string of a length.
func (s *redisScan) beginText(length []byte) error {
	if s.kind == '$' && string(length) == "-1" {
		s.end()
		return nil
	}
	n, ok := redisLength(length, redisMostText)
	if !ok || s.size > redisLine {
		return fmt.Errorf("%w: a string of length %.24q", errRedisForm, length)
	}
	if s.skip, s.state = n, redisInText; n == 0 {
		s.state = redisInReturn
	}
	return nil
}

// beginParts begins an aggregate of so many elements.
func (s *redisScan) beginParts(count []byte) error {
	if s.kind == '*' && string(count) == "-1" {
		s.end()
		return nil
	}
	n, ok := redisLength(count, redisMostParts)
	if s.kind == '%' {
		n *= 2
	}
	if s.parts += n; !ok || s.size > redisLine || s.parts > redisMostParts {
		return fmt.Errorf("%w: %.24q elements", errRedisForm, count)
	}
	push := s.kind == '>'
	if push && s.depth > 0 || s.depth == redisDepth {
		return fmt.Errorf("%w: elements in elements", errRedisForm)
	}
	if push {
		s.pushes++
	}
	s.left[s.depth], s.push[s.depth] = n, push
	if s.depth++; n == 0 {
		s.depth--
		s.ended(push)
	}
	return nil
}

// end ends an element that is not an aggregate, and all aggregates that it is the last of.
func (s *redisScan) end() { s.ended(false) }

func (s *redisScan) ended(push bool) {
	for s.depth > 0 {
		s.depth--
		if s.left[s.depth]--; s.left[s.depth] > 0 {
			s.depth++
			return
		}
		push = s.push[s.depth]
	}
	if !push {
		s.messages++
	}
	s.bytes, s.parts = 0, 0
}

// redisLength reads a length.
func redisLength(text []byte, most int) (n int, ok bool) {
	for _, c := range text {
		if c < '0' || c > '9' {
			return 0, false
		}
		if n = 10*n + int(c-'0'); n > most {
			return 0, false
		}
	}
	return n, len(text) > 0
}

// Interface guard
var _ net.Conn = (*redisGuard)(nil)
