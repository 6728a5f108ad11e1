package replay

import (
	"io"
	"runtime"
	"sync"
	"sync/atomic"
)

// feed reads a source ahead, on other goroutines, and hands out its batches in order.
type feed struct {
	source  *source
	batches chan chan *batch
	stop    chan struct{}
}

// readers are the goroutines that read the chunks of all feeds.
type readers struct {
	jobs    chan job
	buffers sync.Pool
	make    func() *lineReader
	feeds   sync.WaitGroup
}

// job is a chunk to be read.
type job struct {
	chunk chunk
	unit  durationUnit
	out   chan<- *batch
}

// readAhead is how many chunks of a feed are read before they are needed.
const readAhead = 8

func newReaders(newLineReader func() *lineReader) *readers {
	r := &readers{jobs: make(chan job), make: newLineReader}
	r.buffers.New = func() any { b := make([]byte, 0, chunkSize); return &b }
	for range max(1, runtime.GOMAXPROCS(0)-1) {
		go r.work()
	}
	return r
}

func (r *readers) work() {
	l := r.make()
	for j := range r.jobs {
		l.unit = j.unit
		j.out <- j.chunk.read(l)
		r.recycle(j.chunk.data)
	}
}

func (r *readers) recycle(buf []byte) {
	if cap(buf) <= chunkSize {
		buf = buf[:0]
		r.buffers.Put(&buf)
	}
}

// close ends the goroutines, once all feeds have come to their end or were stopped.
func (r *readers) close() {
	r.feeds.Wait()
	close(r.jobs)
}

// begin opens the source, looks at its first chunk to learn the format of its durations, and starts to read ahead.
func (r *readers) begin(s *source, unit durationUnit) (*feed, error) {
	in, err := s.open(s.read)
	if err != nil {
		return nil, err
	}
	c := &chunker{r: in}
	head := c.next(make([]byte, 0, chunkSize))
	if s.unit = unit; unit == unitUnknown {
		l := r.make()
		l.sample = new(durationSample)
		head.read(l)
		s.unit = l.sample.unit()
	}
	f := &feed{source: s, batches: make(chan chan *batch, readAhead), stop: make(chan struct{})}
	r.feeds.Go(func() { f.run(r, in, c, head) })
	return f, nil
}

// probe finds out when a file begins: the time of its first requests.
func (r *readers) probe(s *source) error {
	in, err := s.open(new(atomic.Int64))
	if err != nil {
		return err
	}
	defer in.Close()
	c := &chunker{r: in}
	head := c.next(make([]byte, 0, chunkSize))
	b := head.read(r.make())
	for i := range b.entries {
		if e := &b.entries[i]; s.first == 0 || e.start+e.duration < s.first {
			s.first = e.start + e.duration
		}
	}
	return nil
}

// run cuts the source into chunks and has them read.
func (f *feed) run(r *readers, in io.ReadCloser, c *chunker, next chunk) {
	defer close(f.batches)
	defer in.Close()
	for {
		out := make(chan *batch, 1)
		select {
		case f.batches <- out:
		case <-f.stop:
			return
		}
		select {
		case r.jobs <- job{chunk: next, unit: f.source.unit, out: out}:
		case <-f.stop:
			return
		}
		if next.err != nil {
			return
		}
		next = c.next((*r.buffers.Get().(*[]byte))[:0])
	}
}

// next returns the next batch, or nil at the end.
func (f *feed) next() *batch {
	out, more := <-f.batches
	if !more {
		return nil
	}
	b := <-out
	f.source.stats.add(&b.stats)
	if b.err != nil {
		f.source.note(b.err)
	}
	return b
}
