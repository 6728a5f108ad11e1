package replay

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"os"
	"sync/atomic"

	"github.com/klauspost/compress/zstd"
)

// source is one log: a file, or standard input. It may be compressed by gzip or zstd.
type source struct {
	name  string
	size  int64         // bytes on disk; 0 where that is not known
	read  *atomic.Int64 // bytes on disk that were read, of all sources
	stdin io.Reader     // in the place of a file

	unit  durationUnit
	first int64 // when the first request ended; 0 where there is none
	err   error // why it could not be read to its end
	stats lineStats

	stepsBack int64 // of the log's clock
	late      int64 // requests that came before what had been handed out
}

// Magic bytes at the beginning of compressed files.
var (
	gzipMagic = []byte{0x1f, 0x8b}
	zstdMagic = []byte{0x28, 0xb5, 0x2f, 0xfd}
)

// newSource is a log by its name; - is standard input.
func newSource(name string, stdin io.Reader, read *atomic.Int64) (*source, error) {
	s := &source{name: name, read: read}
	if name == "-" {
		s.name, s.stdin = "standard input", stdin
		return s, nil
	}
	info, err := os.Stat(name)
	switch {
	case err != nil:
		return nil, err
	case info.IsDir():
		return nil, fmt.Errorf("%s is a directory: name the log files in it", name)
	case info.Mode().IsRegular():
		s.size = info.Size()
	}
	return s, nil
}

// open opens the log for reading. The bytes on disk that are read are counted.
func (s *source) open(count *atomic.Int64) (io.ReadCloser, error) {
	if s.stdin != nil {
		return s.unpack(countingReader{s.stdin, count}, io.NopCloser(nil))
	}
	f, err := os.Open(s.name)
	if err != nil {
		return nil, err
	}
	r, err := s.unpack(countingReader{f, count}, f)
	if err != nil {
		f.Close()
		return nil, err
	}
	return r, nil
}

// openLog is a log that is being read.
type openLog struct {
	io.Reader
	close func() error
}

func (l openLog) Close() error { return l.close() }

// maxZstdWindow is how far back a compressed log may refer, in bytes: what zstd itself takes without being asked for more.
const maxZstdWindow = 128 << 20

// unpack tells by the first bytes whether the log is compressed. What it returns closes the file, too.
func (s *source) unpack(r io.Reader, file io.Closer) (io.ReadCloser, error) {
	buffered := bufio.NewReaderSize(r, 64<<10)
	head, err := buffered.Peek(4)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("%s: %w", s.name, err)
	}
	switch {
	case bytes.HasPrefix(head, zstdMagic):
		unpacked, err := zstd.NewReader(buffered, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(maxZstdWindow))
		if err != nil {
			return nil, fmt.Errorf("%s: zstd: %w", s.name, err)
		}
		return openLog{unpacked, func() error { unpacked.Close(); return file.Close() }}, nil
	case bytes.HasPrefix(head, gzipMagic):
		unpacked, err := gzip.NewReader(buffered)
		if err != nil {
			return nil, fmt.Errorf("%s: gzip: %w", s.name, err)
		}
		return openLog{unpacked, file.Close}, nil
	}
	return openLog{buffered, file.Close}, nil
}

// note keeps why the log could not be read to its end. What was read before still counts.
func (s *source) note(err error) {
	switch {
	case s.err != nil:
	case errors.Is(err, io.ErrUnexpectedEOF):
		s.err = errors.New("the compressed data ends early; what comes before was used")
	default:
		s.err = err
	}
}

// countingReader counts the bytes that are read.
type countingReader struct {
	io.Reader
	n *atomic.Int64
}

func (c countingReader) Read(p []byte) (int, error) {
	n, err := c.Reader.Read(p)
	c.n.Add(int64(n))
	return n, err
}
