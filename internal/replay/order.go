package replay

// order hands out the requests of one source in the order in which they came. Caddy writes a line when a request ends,
// so lines are out of order by as much as requests take; they are held back for a while, and sorted.
type order struct {
	source *source
	next   func() *batch
	window int64 // nanoseconds for which lines are held back

	heap    []held
	batches []*batch // in reading order; those handed out completely are nil at the front
	base    uint32   // number of batches[0]
	bytes   int      // of text that is held
	cursor  uint32   // the next entry of the newest batch
	ended   bool

	latest   int64 // the latest end of a request that was read since the log's clock was last set back
	draining bool  // the log's clock was set back: all before that is handed out first
	passed   int64 // start of the request handed out last
}

// held is an entry that is held back.
type held struct {
	start       int64
	batch, item uint32
}

// Bounds on what is held back, whatever the window.
const (
	maxHeld      = 1 << 18  // entries
	maxHeldBytes = 64 << 20 // bytes of text
)

// trip is one request, ready to be judged.
type trip struct {
	batch *batch
	entry *entry
	at    int64 // nanoseconds: when it came, or for a late one the time that has been reached
}

// pop returns the next request. It reports false at the end.
func (o *order) pop() (trip, bool) {
	for {
		if o.due() {
			return o.take(), true
		}
		if o.draining {
			o.draining = false
			o.latest, o.passed = 0, 0
		}
		e := o.peek()
		if e == nil {
			if len(o.heap) == 0 {
				return trip{}, false
			}
			o.draining = true
			continue
		}
		end := e.start + e.duration
		if o.latest != 0 && end < o.latest-o.window {
			o.source.stepsBack++
			o.draining = true
			continue
		}
		o.latest = max(o.latest, end)
		o.push(held{e.start, o.base + uint32(len(o.batches)) - 1, o.cursor})
		o.cursor++
	}
}

// due tells whether the earliest request held is to be handed out now.
func (o *order) due() bool {
	if len(o.heap) == 0 {
		return false
	}
	return o.draining || o.heap[0].start < o.latest-o.window || len(o.heap) >= maxHeld || o.bytes > maxHeldBytes
}

// peek is the next entry that was read, or nil at the end.
func (o *order) peek() *entry {
	for !o.ended {
		if n := len(o.batches); n > 0 {
			if b := o.batches[n-1]; b != nil && int(o.cursor) < len(b.entries) {
				return &b.entries[o.cursor]
			}
		}
		b := o.next()
		if b == nil {
			o.ended = true
			break
		}
		if len(b.entries) == 0 {
			continue
		}
		o.batches = append(o.batches, b)
		o.bytes += len(b.text)
		o.cursor = 0
	}
	return nil
}

// take removes the earliest request.
func (o *order) take() trip {
	h := o.heap[0]
	last := len(o.heap) - 1
	o.heap[0] = o.heap[last]
	o.heap = o.heap[:last]
	o.sink()
	b := o.batches[h.batch-o.base]
	t := trip{batch: b, entry: &b.entries[h.item], at: h.start}
	if t.at < o.passed {
		o.source.late++
		t.at = o.passed
	}
	o.passed = t.at
	if b.open--; b.open == 0 {
		o.bytes -= len(b.text)
		o.batches[h.batch-o.base] = nil
		o.trim()
	}
	return t
}

// trim forgets the batches at the front that were handed out. The newest stays, since the cursor is in it.
func (o *order) trim() {
	n := 0
	for n < len(o.batches)-1 && o.batches[n] == nil {
		n++
	}
	if n > 64 || n == len(o.batches)-1 {
		o.batches = append(o.batches[:0], o.batches[n:]...)
		o.base += uint32(n)
	}
}

// push adds to the heap, which has four branches at each node.
func (o *order) push(h held) {
	o.heap = append(o.heap, h)
	i := len(o.heap) - 1
	for i > 0 {
		up := (i - 1) / 4
		if !h.before(o.heap[up]) {
			break
		}
		o.heap[i] = o.heap[up]
		i = up
	}
	o.heap[i] = h
}

// sink moves the entry at the top to its place.
func (o *order) sink() {
	n := len(o.heap)
	if n == 0 {
		return
	}
	h, i := o.heap[0], 0
	for {
		first := 4*i + 1
		if first >= n {
			break
		}
		least := first
		for k := first + 1; k < min(first+4, n); k++ {
			if o.heap[k].before(o.heap[least]) {
				least = k
			}
		}
		if !o.heap[least].before(h) {
			break
		}
		o.heap[i] = o.heap[least]
		i = least
	}
	o.heap[i] = h
}

// before orders by start, and by place in the log where that is equal.
func (h held) before(o held) bool {
	if h.start != o.start {
		return h.start < o.start
	}
	return h.batch < o.batch || h.batch == o.batch && h.item < o.item
}
