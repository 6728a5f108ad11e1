package resp

import (
	"bytes"
	"errors"
	"regexp"
	"strconv"
)

// oracle reads whole replies, the plain way: what has no end yet is short, and all else is good or bad.
type oracle struct {
	bounds Bounds
	text   []byte
	total  int
}

var (
	errShort = errors.New("short")
	errBad   = errors.New("bad")

	integer = regexp.MustCompile(`^[+-]?[0-9]{1,19}$`)
	length  = regexp.MustCompile(`^[0-9]{1,19}$`)
)

// replyEnd is where the first reply of a stream ends.
func replyEnd(bounds Bounds, stream []byte) (int, error) {
	o := &oracle{bounds: bounds, text: stream[:min(len(stream), bounds.Size)]}
	err := o.reply(0)
	if err == errShort && len(stream) > bounds.Size {
		err = errBad
	}
	return min(len(stream), bounds.Size) - len(o.text), err
}

// line reads a line.
func (o *oracle) line() (string, error) {
	end := bytes.IndexByte(o.text, '\n')
	if end < 0 {
		return "", errShort
	}
	line := string(o.text[:end])
	o.text = o.text[end+1:]
	if line == "" || line[len(line)-1] != '\r' || bytes.IndexByte([]byte(line[:len(line)-1]), '\r') >= 0 {
		return "", errBad
	}
	return line[:len(line)-1], nil
}

// reply reads one element, at a depth of so many aggregates around it.
func (o *oracle) reply(depth int) error {
	for len(o.text) > 0 && o.text[0] == '|' {
		o.text = o.text[1:]
		line, err := o.line()
		if err != nil {
			return err
		}
		if err := o.elements(depth, '|', line); err != nil {
			return err
		}
	}
	if len(o.text) == 0 {
		return errShort
	}
	kind := o.text[0]
	if !bytes.ContainsRune([]byte("+-,(:_#$!=*~%>"), rune(kind)) || kind == '>' && depth > 0 {
		return errBad
	}
	o.text = o.text[1:]
	line, err := o.line()
	if err != nil {
		return err
	}
	ok := true
	switch kind {
	case '+', '-', ',', '(':
		ok = len(line) <= o.bounds.Text
	case ':':
		_, err := strconv.ParseInt(line, 10, 64)
		ok = integer.MatchString(line) && err == nil
	case '_':
		ok = line == ""
	case '#':
		ok = line == "t" || line == "f"
	case '$', '!', '=':
		return o.string(kind, line)
	default:
		return o.elements(depth, kind, line)
	}
	if !ok {
		return errBad
	}
	return nil
}

// null tells whether a line is the length of a null.
func null(line string) bool {
	return len(line) > 1 && line[0] == '-' && length.MatchString(line[1:]) && number(line[1:]) == 1
}

func number(line string) uint64 {
	n, _ := strconv.ParseUint(line, 10, 64)
	return n
}

// string reads a string behind its first line.
func (o *oracle) string(kind byte, line string) error {
	if kind == '$' && null(line) {
		return nil
	}
	if kind == '$' && line == "?" {
		return o.chunks()
	}
	return o.bytes(line, o.bounds.Text)
}

func (o *oracle) bytes(line string, most int) error {
	n := number(line)
	if !length.MatchString(line) || n > uint64(most) {
		return errBad
	}
	text := o.text[:min(len(o.text), int(n)+2)]
	o.text = o.text[len(text):]
	if !bytes.HasPrefix([]byte("\r\n"), text[min(len(text), int(n)):]) {
		return errBad
	}
	if len(text) < int(n)+2 {
		return errShort
	}
	return nil
}

// chunks reads the chunks of a streamed string.
func (o *oracle) chunks() error {
	for left := o.bounds.Text; ; {
		if len(o.text) == 0 {
			return errShort
		}
		if o.text[0] != ';' {
			return errBad
		}
		o.text = o.text[1:]
		line, err := o.line()
		if err != nil {
			return err
		}
		if length.MatchString(line) && number(line) == 0 {
			return nil
		}
		if err := o.bytes(line, left); err != nil {
			return err
		}
		left -= int(number(line))
	}
}

// elements reads an aggregate behind its first line.
func (o *oracle) elements(depth int, kind byte, line string) error {
	if kind == '*' && null(line) {
		return nil
	}
	streamed := line == "?" && kind != '>' && kind != '|'
	n := int(min(number(line), uint64(o.bounds.Elements)+1))
	if kind == '%' || kind == '|' {
		n *= 2
	}
	if !streamed && !length.MatchString(line) || n > o.bounds.Elements || depth >= o.bounds.Depth {
		return errBad
	}
	if o.total += n; o.total > o.bounds.Total {
		return errBad
	}
	for i := 0; streamed || i < n; i++ {
		if streamed {
			if len(o.text) == 0 {
				return errShort
			}
			if o.text[0] == '.' {
				o.text = o.text[1:]
				if kind == '%' && i%2 != 0 {
					return errBad
				}
				return o.end()
			}
			if o.total++; i >= o.bounds.Elements || o.total > o.bounds.Total {
				return errBad
			}
		}
		if err := o.reply(depth + 1); err != nil {
			return err
		}
	}
	return nil
}

func (o *oracle) end() error {
	line, err := o.line()
	if err == nil && line != "" {
		err = errBad
	}
	return err
}
