package replay

import "slices"

// batch is a stretch of a log as read: what its access lines say, as far as it is needed. All text lies in one string,
// so that a batch is few objects however many lines it has.
type batch struct {
	text    string
	entries []entry
	headers []headerLine
	first   int64 // number of the first line in the file, from 1
	stats   lineStats
	err     error // why the log ends here

	open int // entries that were not yet handed out
}

// span is a stretch of a batch's text.
type span struct{ at, n uint32 }

// entry is one request of an access log.
type entry struct {
	start    int64 // nanoseconds since the Unix epoch: when the request came
	duration int64 // nanoseconds
	line     uint32
	status   uint16
	flags    entryFlags

	peer, method, host, uri, proto, user, logger span

	headers, headersEnd uint32 // of the batch's headers
	size                int64  // bytes of the body that were read
}

// entryFlags are what else is known of an entry.
type entryFlags uint8

const (
	overTLS entryFlags = 1 << iota
	chunked            // it had a transfer encoding
)

// headerLine is one field line of a request.
type headerLine struct {
	index uint16 // of the wanted names, or unlisted
	name  span   // if unlisted
	value span
}

// lineStats count what the lines of a log were.
type lineStats struct {
	Lines    int64 // of any kind
	Requests int64 // access lines that could be used
	Other    int64 // JSON, but no access lines
	Bad      [badKinds]int64
	Missing  [fields]int64 // access lines without a field, of those used or not
	Redacted []int64       // field lines whose value was redacted, by index of the wanted name
	coarse   bool          // a time was a whole second
	fine     bool          // a time was not

	samples [badKinds]string // the beginning of the first line of each kind that could not be used
}

// badKind says why a line could not be used.
type badKind uint8

const (
	badConsole  badKind = iota // written by Caddy's console encoder
	badCLF                     // in the common log format
	badCut                     // the beginning of a JSON object
	badJSON                    // anything else that is not a JSON object
	badTime                    // no time that can be read
	badDuration                // a duration that cannot be read
	badPeer                    // no peer address
	badLong                    // longer than a line may be
	badKinds
)

// badNames are the kinds as reports name them.
var badNames = [badKinds]string{
	"console format", "common log format", "cut off", "not JSON", "no readable time", "no readable duration",
	"no remote_ip", "too long",
}

// field is a part of an access line that a replay needs.
type field uint8

const (
	fieldTime field = iota
	fieldDuration
	fieldPeer
	fieldMethod
	fieldHost
	fieldURI
	fieldHeaders
	fields
)

// fieldNames are the fields as Caddy names them.
var fieldNames = [fields]string{
	"ts", "duration", "request.remote_ip", "request.method", "request.host", "request.uri", "request.headers",
}

func (s *lineStats) add(o *lineStats) {
	s.Lines += o.Lines
	s.Requests += o.Requests
	s.Other += o.Other
	for i := range o.Bad {
		s.Bad[i] += o.Bad[i]
		if s.samples[i] == "" {
			s.samples[i] = o.samples[i]
		}
	}
	for i := range o.Missing {
		s.Missing[i] += o.Missing[i]
	}
	for i, n := range o.Redacted {
		for len(s.Redacted) <= i {
			s.Redacted = append(s.Redacted, 0)
		}
		s.Redacted[i] += n
	}
	s.coarse = s.coarse || o.coarse
	s.fine = s.fine || o.fine
}

// maxSample is how many bytes of a line are kept as a sample.
const maxSample = 120

// bad counts a line that could not be used.
func (s *lineStats) bad(kind badKind, line []byte) {
	s.Bad[kind]++
	if s.samples[kind] == "" {
		s.samples[kind] = string(line[:min(len(line), maxSample)])
	}
}

// allBad is how many lines could not be used.
func (s *lineStats) allBad() int64 {
	var n int64
	for _, k := range s.Bad {
		n += k
	}
	return n
}

// get is the text of a span.
func (b *batch) get(s span) string { return b.text[s.at : s.at+s.n] }

// wanted are the header fields that a replay looks at. Others are skipped as they are read.
type wanted struct {
	names  []string // canonical
	sizes  [64][]uint16
	others bool // every other field is wanted too

	// telling reports whether a field that is not wanted for its value makes an OPTIONS request more than a preflight.
	// nil: none does.
	telling func(name string) bool
}

// unlisted is the index of a field that is wanted only because all are.
const unlisted = 1<<16 - 1

// newWanted lists the names, each once. All are shorter than 64 bytes, or all fields are wanted.
func newWanted(names []string, others bool) *wanted {
	w := &wanted{others: others}
	for _, name := range names {
		if slices.Contains(w.names, name) {
			continue
		}
		if len(name) >= len(w.sizes) || len(w.names) == unlisted {
			w.others = true
			continue
		}
		w.sizes[len(name)] = append(w.sizes[len(name)], uint16(len(w.names)))
		w.names = append(w.names, name)
	}
	return w
}

// find is the index of a field name, and whether it is wanted.
func (w *wanted) find(name []byte) (uint16, bool) {
	if len(name) < len(w.sizes) {
		for _, i := range w.sizes[len(name)] {
			if w.names[i] == string(name) {
				return i, true
			}
		}
	}
	return unlisted, w.others
}

// builder collects a batch.
type builder struct {
	batch
	buf []byte
}

// put appends text and returns where it is.
func (b *builder) put(t text) span {
	at := len(b.buf)
	b.buf = t.appendTo(b.buf)
	return span{uint32(at), uint32(len(b.buf) - at)}
}

// seal makes the batch ready to be read.
func (b *builder) seal() *batch {
	b.text = string(b.buf)
	b.open = len(b.entries)
	return &b.batch
}
