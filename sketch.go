package tieredlimit

import (
	"cmp"
	"hash/maphash"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

// sketch knows who was refused most by one tier in the current window of its longest limit. It is fed on refusals only,
// and of a fixed size whatever clients do.
//
// It holds sketchSlots identities. One that comes when all slots are taken gets the slot with the fewest refusals, and
// inherits their number as its error. So whoever caused more than one refusal in sketchSlots is surely in it, and no
// number is too low by any or too high by more than its error (space-saving: Metwally, Agrawal, El Abbadi 2005).
//
// A refusal that comes while another is being counted is put to a bucket that few identities share, so that nobody waits: it
// is in the total, and in the upper bound of each of these.
type sketch struct {
	// passed counts the refusals of a window that were not put to anybody's account, for even and for odd windows: those
	// of the next one may come before the sketch has turned to it.
	passed [2]passedBuckets

	mu     sync.Mutex
	length int64 // of the window, in milliseconds
	window int64 // its number since the Unix epoch
	total  int64
	used   int
	last   int // the slot that was hit last
	slots  *sketchTable
}

// passedBuckets counts refusals by what is left of a fingerprint.
type passedBuckets [64]atomic.Int64

func (b *passedBuckets) of(print uint64) *atomic.Int64 { return &b[print%uint64(len(b))] }

func (b *passedBuckets) sum() (sum int64) {
	for i := range b {
		sum += b[i].Load()
	}
	return sum
}

func (b *passedBuckets) clear() {
	for i := range b {
		b[i].Store(0)
	}
}

// sketchSlots is how many identities a sketch can tell apart.
const sketchSlots = 32

// sketchTable is made at the first refusal. What is searched lies together.
type sketchTable struct {
	prints [sketchSlots]uint64
	counts [sketchSlots]int64
	errors [sketchSlots]int64
	keys   [sketchSlots][]string
}

// fingerprintSeed makes fingerprints that nobody outside this process can search for an identity.
var fingerprintSeed = maphash.MakeSeed()

// fingerprint is what an identity is called where it must not be shown. It differs in each process.
func fingerprint(identity []byte) uint64 { return maphash.Bytes(fingerprintSeed, identity) }

// fingerprintText is a fingerprint as people see it.
func fingerprintText(print uint64) string {
	const width = 16
	text := strconv.FormatUint(print, 16)
	return "0000000000000000"[:width-len(text)] + text
}

// add counts a refusal at a time in windows of a length. It returns a slot that lacks the text of its key and is worth
// having it, or -1: with rotating identities nobody is to pay for texts that are dropped at once.
func (s *sketch) add(print uint64, at time.Time, length time.Duration) int {
	ms := length.Milliseconds()
	window := at.UnixMilli() / ms
	if !s.mu.TryLock() {
		s.passed[window&1].of(print).Add(1)
		return -1
	}
	defer s.mu.Unlock()
	s.turn(window, ms)
	s.total++
	t := s.slots
	i := s.last
	fresh := false
	if i >= s.used || t.prints[i] != print {
		i, fresh = s.slot(print)
		s.last = i
	}
	t.counts[i]++
	if t.keys[i] != nil || fresh && t.errors[i] > 0 {
		return -1
	}
	return i
}

// turn empties the sketch if a window of a length in milliseconds has begun since the last refusal.
func (s *sketch) turn(window, length int64) {
	switch {
	case s.slots == nil:
		s.slots = new(sketchTable)
		s.length, s.window = length, window
		return
	case s.length == length && s.window >= window:
		return
	}
	if s.length != length || (window-s.window)&1 == 0 {
		s.passed[window&1].clear() // of an older window
	}
	s.passed[(window+1)&1].clear()
	s.length, s.window = length, window
	s.total, s.used, s.last = 0, 0, 0
	clear(s.slots.keys[:])
}

// slot finds the slot of an identity, and takes a free one or that with the fewest refusals if it has none.
func (s *sketch) slot(print uint64) (i int, fresh bool) {
	t := s.slots
	least := 0
	for i := range s.used {
		if t.prints[i] == print {
			return i, false
		}
		if t.counts[i] < t.counts[least] {
			least = i
		}
	}
	if s.used < sketchSlots {
		least = s.used
		s.used++
		t.counts[least] = 0
	}
	t.prints[least], t.errors[least], t.keys[least] = print, t.counts[least], nil
	return least, true
}

// name gives the identity in a slot the text of its key, unless another has the slot by now.
func (s *sketch) name(i int, print uint64, key []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if i < s.used && s.slots.prints[i] == print {
		s.slots.keys[i] = key
	}
}

// refusedMost is one of those who were refused most.
type refusedMost struct {
	Fingerprint string   `json:"fingerprint"`
	Key         []string `json:"key,omitempty"`
	AtLeast     int64    `json:"at_least"`
	AtMost      int64    `json:"at_most"`

	client string // that was asked for and has this fingerprint
}

// read returns how many refusals there were in the window that holds a time, and who had most of them.
func (s *sketch) read(at time.Time) (total int64, most []refusedMost) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.slots == nil || at.UnixMilli()/s.length > s.window {
		return 0, nil
	}
	t, passed := s.slots, &s.passed[s.window&1]
	for i := range s.used {
		most = append(most, refusedMost{
			Fingerprint: fingerprintText(t.prints[i]), Key: t.keys[i],
			AtLeast: t.counts[i] - t.errors[i], AtMost: t.counts[i] + passed.of(t.prints[i]).Load(),
		})
	}
	slices.SortFunc(most, func(a, b refusedMost) int {
		return cmp.Or(cmp.Compare(b.AtLeast, a.AtLeast), cmp.Compare(b.AtMost, a.AtMost), cmp.Compare(a.Fingerprint, b.Fingerprint))
	})
	return s.total + passed.sum(), most
}
