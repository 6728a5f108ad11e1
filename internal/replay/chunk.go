package replay

import (
	"bytes"
	"errors"
	"io"
)

// chunker cuts a log into chunks of whole lines.
type chunker struct {
	r        io.Reader
	rest     []byte // the beginning of a line that the last chunk did not hold
	line     int64  // number of the next line, from 1
	skipping bool   // inside a line that is too long
	err      error
}

// Sizes in bytes: of a chunk, and of the longest line that is read.
const (
	chunkSize = 256 << 10
	maxLine   = 16 << 20
)

// chunk is a stretch of a log: whole lines, the last perhaps without its newline.
type chunk struct {
	data    []byte
	first   int64 // number of the first line
	tooLong int64 // lines that were left out in front of it
	err     error // why it is the last one; io.EOF at the regular end
}

// next returns the next chunk. Its data is appended to buf, which must be empty.
func (c *chunker) next(buf []byte) chunk {
	out := chunk{data: append(buf, c.rest...), first: max(c.line, 1)}
	c.rest = c.rest[:0]
	for c.err == nil {
		if len(out.data) == cap(out.data) {
			if i := c.cut(&out); i >= 0 {
				break
			}
			if len(out.data) >= maxLine {
				c.skipping = true
				out.data = out.data[:0]
			} else {
				grown := make([]byte, len(out.data), max(chunkSize, 2*cap(out.data)))
				copy(grown, out.data)
				out.data = grown
			}
		}
		n, err := c.r.Read(out.data[len(out.data):cap(out.data)])
		out.data = out.data[:len(out.data)+n]
		c.err = err
		if c.skipping {
			c.skip(&out)
		}
	}
	if c.err != nil {
		out.err = c.err
		if c.skipping {
			c.skipped(&out)
		}
	}
	c.line = out.first + int64(bytes.Count(out.data, []byte{'\n'}))
	return out
}

// cut keeps what follows the last newline for the next chunk. It returns the newline's index, or -1.
func (c *chunker) cut(out *chunk) int {
	i := bytes.LastIndexByte(out.data, '\n')
	if i >= 0 {
		c.rest = append(c.rest, out.data[i+1:]...)
		out.data = out.data[:i+1]
	}
	return i
}

// skip drops what belongs to a line that is too long.
func (c *chunker) skip(out *chunk) {
	i := bytes.IndexByte(out.data, '\n')
	if i < 0 {
		out.data = out.data[:0]
		return
	}
	c.skipped(out)
	out.data = out.data[:copy(out.data, out.data[i+1:])]
}

// skipped counts a line that was left out in front of the chunk's data.
func (c *chunker) skipped(out *chunk) {
	c.skipping = false
	out.tooLong++
	out.first++
}

// read makes a batch of the chunk.
func (c *chunk) read(l *lineReader) *batch {
	b := &builder{buf: make([]byte, 0, len(c.data)/4)}
	b.entries = make([]entry, 0, len(c.data)/700+1)
	b.headers = make([]headerLine, 0, len(c.data)/300+1)
	b.batch.first = c.first
	if !errors.Is(c.err, io.EOF) {
		b.err = c.err
	}
	b.stats.Lines, b.stats.Bad[badLong] = c.tooLong, c.tooLong
	var number uint32
	for data := c.data; len(data) > 0; number++ {
		line := data
		if i := bytes.IndexByte(data, '\n'); i >= 0 {
			line, data = data[:i], data[i+1:]
		} else {
			data = nil
		}
		l.read(line, number, b)
	}
	return b.seal()
}
