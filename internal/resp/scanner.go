// Package resp follows a stream of RESP, the protocol of Redis, in versions 2 and 3
// (https://redis.io/docs/latest/develop/reference/protocol-spec). It keeps nothing of the stream but where in a message
// it is, so that a stream can be judged before whoever allocates what it announces.
package resp

import (
	"bytes"
	"errors"
	"fmt"
	"math"
)

// Bounds are what a reply may be at most.
type Bounds struct {
	// Text is the bytes of a line, and of a string, all chunks of a streamed one together.
	Text int

	// Elements is the elements of one aggregate. The keys and values of a map both count.
	Elements int

	// Depth is how many aggregates may stand within one another, at most 8.
	Depth int

	// Total is the elements of a reply at any depth.
	Total int

	// Size is the bytes of a reply.
	Size int
}

// Errors say what is wrong with a stream.
var (
	// ErrForm tells that a stream is not RESP.
	ErrForm = errors.New("not RESP")

	// ErrBounds tells that a reply is larger than it may be.
	ErrBounds = errors.New("a reply beyond bounds")
)

// Scanner follows the replies of a server. The zero Scanner needs bounds, and stands between replies.
type Scanner struct {
	// Bounds must be set before the first byte, and not be changed.
	Bounds Bounds

	// Message is the reply that is read, or was last.
	Message Message

	state  state
	kind   byte   // of the element whose line is read
	header bool   // whether the line announces something
	chunk  bool   // whether the line announces a chunk
	attr   bool   // an attribute has ended, so what it is about must follow
	sign   byte   // of the number
	stream bool   // the number is a question mark
	digits int    // of the number
	number uint64 // so far
	left   int    // bytes of the string that are still to come
	length int    // of the line, or the streamed string, so far
	size   int    // of the reply so far
	total  int    // elements of the reply so far
	depth  int
	stack  [mostDepth]frame
	done   bool
}

// frame is an aggregate that is being read.
type frame struct {
	kind   byte
	stream bool // its end is not known
	seen   int  // elements that have ended
	left   int  // elements that are still to come
}

// state is what comes next.
type state uint8

const (
	atKind state = iota
	inNumber
	inLine
	inText
	atFlag
	atChunk
	atReturn
	atFeed
)

const (
	mostDepth = 8

	// mostDigits is the digits of the largest number.
	mostDigits = 19
)

// Message is what is kept of a reply.
type Message struct {
	// Kind is the first byte, behind any attributes.
	Kind byte

	// Aggregate tells that it has elements; it may have none. A null has no elements.
	Aggregate bool

	// Elements is how many it has, at the first level.
	Elements int

	// Words is the blanks in its third element, and one.
	Words int

	first  [256]byte
	second [32]byte
	sizes  [2]int
}

// First is the beginning of the text, or of that of the first element. It is empty if that is no text.
func (m *Message) First() []byte { return m.first[:m.sizes[0]] }

// Second is the beginning of the text of the second element.
func (m *Message) Second() []byte { return m.second[:m.sizes[1]] }

// Whole reports whether nothing was cut off from the end of First.
func (m *Message) Whole() bool { return m.sizes[0] < len(m.first) }

// Next reads up to the end of one reply, and tells whether that was reached. Having returned an error it must not be
// called again.
func (s *Scanner) Next(p []byte) (n int, ended bool, err error) {
	if s.done || s.size == 0 {
		s.done, s.size, s.total, s.Message.sizes = false, 0, 0, [2]int{}
		s.Message.Words, s.Message.Elements, s.Message.Aggregate = 1, 0, false
	}
	for n < len(p) {
		used, err := s.step(p[n:])
		if err != nil {
			return n, false, err
		}
		n += used
		if s.size += used; s.size > s.Bounds.Size {
			return n, false, fmt.Errorf("%w: more than %d bytes", ErrBounds, s.Bounds.Size)
		}
		if s.done {
			return n, true, nil
		}
	}
	return n, false, nil
}

// step reads some bytes, and at least one.
func (s *Scanner) step(p []byte) (int, error) {
	switch s.state {
	case atKind:
		return 1, s.begin(p[0])
	case inNumber:
		return 1, s.readNumber(p[0])
	case inLine:
		return s.readLine(p)
	case inText:
		return s.readText(p), nil
	case atFlag:
		return 1, s.expect(p[0] == 't' || p[0] == 'f', atReturn)
	case atChunk:
		s.kind, s.chunk = ';', true
		s.beginNumber(true)
		return 1, s.expect(p[0] == ';', inNumber)
	case atReturn:
		return 1, s.expect(p[0] == '\r', atFeed)
	default:
		if err := s.expect(p[0] == '\n', atKind); err != nil {
			return 1, err
		}
		return 1, s.endLine()
	}
}

func (s *Scanner) expect(ok bool, next state) error {
	if !ok {
		return fmt.Errorf("%w: an element of kind %q does not end where it should", ErrForm, s.kind)
	}
	s.state = next
	return nil
}

// begin begins an element of a kind.
func (s *Scanner) begin(kind byte) error {
	s.kind, s.header, s.chunk = kind, false, false
	behind := s.attr
	s.attr = false
	if s.depth == 0 {
		s.Message.Kind = kind
	} else if f := &s.stack[s.depth-1]; f.stream {
		if kind == '.' {
			return s.beginEnd(f, behind)
		}
		if !behind {
			if err := s.count(f); err != nil {
				return err
			}
		}
	}
	switch kind {
	case '+', '-', ',', '(':
		s.length, s.state = 0, inLine
	case ':':
		s.beginNumber(false)
	case '_':
		s.state = atReturn
	case '#':
		s.state = atFlag
	case '$', '!', '=', '*', '~', '%', '|':
		s.beginNumber(true)
	case '>':
		if s.depth > 0 {
			return fmt.Errorf("%w: a push within a reply", ErrForm)
		}
		s.beginNumber(true)
	default:
		return fmt.Errorf("%w: a line that begins with %q", ErrForm, kind)
	}
	return nil
}

// count counts an element of a streamed aggregate, as it begins. What an attribute stands in front of was counted with
// the attribute.
func (s *Scanner) count(f *frame) error {
	s.total++
	if f.seen >= s.Bounds.Elements || s.total > s.Bounds.Total {
		return fmt.Errorf("%w: more than %d elements, or %d in all", ErrBounds, s.Bounds.Elements, s.Bounds.Total)
	}
	return nil
}

// beginEnd begins the end of a streamed aggregate.
func (s *Scanner) beginEnd(f *frame, behind bool) error {
	if behind || f.kind == '%' && f.seen%2 != 0 {
		return fmt.Errorf("%w: an aggregate that ends before its last element", ErrForm)
	}
	s.state = atReturn
	return nil
}

func (s *Scanner) beginNumber(header bool) {
	s.header, s.state = header, inNumber
	s.sign, s.stream, s.digits, s.number = 0, false, 0, 0
}

// readNumber reads a byte of a number's line.
func (s *Scanner) readNumber(c byte) error {
	first := s.digits == 0 && s.sign == 0 && !s.stream
	switch {
	case c >= '0' && c <= '9' && !s.stream && s.digits < mostDigits:
		s.digits++
		s.number = 10*s.number + uint64(c-'0')
	case c == '\r' && (s.digits > 0 || s.stream):
		if most := uint64(math.MaxInt64); s.number > most && (s.sign != '-' || s.number > most+1) {
			return fmt.Errorf("%w: a number that is none of 64 bits", ErrForm)
		}
		s.state = atFeed
	case c == '-' && first && !s.chunk && (!s.header || s.kind == '$' || s.kind == '*'):
		s.sign = c
	case c == '+' && first && !s.header:
		s.sign = c
	case c == '?' && first && s.header && !s.chunk && (s.kind == '$' || s.kind == '*' || s.kind == '~' || s.kind == '%'):
		s.stream = true
	default:
		return fmt.Errorf("%w: %q in the number of an element of kind %q", ErrForm, c, s.kind)
	}
	return nil
}

// readLine reads a line's text.
func (s *Scanner) readLine(p []byte) (int, error) {
	n := bytes.IndexByte(p, '\r')
	if n < 0 {
		n = len(p)
	}
	if s.length+n > s.Bounds.Text {
		return 0, fmt.Errorf("%w: a line of more than %d bytes", ErrBounds, s.Bounds.Text)
	}
	if bytes.IndexByte(p[:n], '\n') >= 0 {
		return 0, fmt.Errorf("%w: a line that does not end with CR LF", ErrForm)
	}
	s.length += n
	s.keep(p[:n])
	if n < len(p) {
		s.state = atFeed
		n++
	}
	return n, nil
}

// readText reads what there is of a string.
func (s *Scanner) readText(p []byte) int {
	n := min(s.left, len(p))
	s.keep(p[:n])
	if s.left -= n; s.left == 0 {
		s.state = atReturn
	}
	return n
}

// keep keeps the beginning of a text that somebody may ask for.
func (s *Scanner) keep(text []byte) {
	m, element := &s.Message, 0
	if s.depth > 1 {
		return
	}
	if s.depth == 1 {
		if s.stack[0].kind == '|' {
			return
		}
		element = s.stack[0].seen
	}
	switch element {
	case 0:
		m.sizes[0] += copy(m.first[m.sizes[0]:], text)
	case 1:
		m.sizes[1] += copy(m.second[m.sizes[1]:], text)
	case 2:
		m.Words += bytes.Count(text, []byte{' '})
	}
}

// endLine does what a line has announced.
func (s *Scanner) endLine() error {
	if s.kind == '.' {
		s.close()
		return nil
	}
	if !s.header {
		if s.chunk {
			s.state = atChunk
			return nil
		}
		s.end()
		return nil
	}
	s.header = false
	switch s.kind {
	case '$', '!', '=', ';':
		return s.announceText()
	default:
		return s.announceElements()
	}
}

// announceText begins a string, or a chunk of one.
func (s *Scanner) announceText() error {
	switch {
	case s.sign == '-':
		return s.null()
	case s.stream:
		s.length, s.state = 0, atChunk
		return nil
	case s.chunk && s.number == 0:
		s.chunk = false
		s.end()
		return nil
	}
	if !s.chunk {
		s.length = 0
	}
	if s.number > uint64(s.Bounds.Text-s.length) {
		return fmt.Errorf("%w: a string of more than %d bytes", ErrBounds, s.Bounds.Text)
	}
	s.left = int(s.number)
	s.length += s.left
	if s.state = inText; s.left == 0 {
		s.state = atReturn
	}
	return nil
}

// announceElements begins an aggregate.
func (s *Scanner) announceElements() error {
	if s.sign == '-' {
		return s.null()
	}
	most := uint64(s.Bounds.Elements)
	if s.kind == '%' || s.kind == '|' {
		most /= 2
	}
	if s.number > most {
		return fmt.Errorf("%w: more than %d elements", ErrBounds, s.Bounds.Elements)
	}
	n := int(s.number)
	if s.kind == '%' || s.kind == '|' {
		n *= 2
	}
	if s.total += n; s.total > s.Bounds.Total {
		return fmt.Errorf("%w: more than %d elements in all", ErrBounds, s.Bounds.Total)
	}
	if s.depth >= min(s.Bounds.Depth, mostDepth) {
		return fmt.Errorf("%w: more than %d aggregates within one another", ErrBounds, s.Bounds.Depth)
	}
	s.stack[s.depth] = frame{kind: s.kind, stream: s.stream, left: n}
	s.depth++
	if n == 0 && !s.stream {
		s.close()
	}
	return nil
}

// null ends a null of RESP 2.
func (s *Scanner) null() error {
	if s.number != 1 {
		return fmt.Errorf("%w: a length of -%d", ErrForm, s.number)
	}
	s.end()
	return nil
}

// close ends the innermost aggregate.
func (s *Scanner) close() {
	s.depth--
	f := &s.stack[s.depth]
	if f.kind == '|' {
		s.attr = true
		return
	}
	if s.depth == 0 {
		s.Message.Aggregate, s.Message.Elements = true, f.seen
	}
	s.end()
}

// end ends an element, and the aggregates that it is the last of.
func (s *Scanner) end() {
	s.state = atKind
	if s.depth == 0 {
		s.done = true
		return
	}
	f := &s.stack[s.depth-1]
	f.seen++
	if f.stream {
		return
	}
	if f.left--; f.left == 0 {
		s.close()
	}
}
