package tieredlimit

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

// The sketch keeps what it promises, for any mix of identities: true numbers are within the bounds that it gives, and
// whoever has more than one in sketchSlots of all is there.
func TestSketchBounds(t *testing.T) {
	for _, identities := range []int{1, sketchSlots, sketchSlots + 1, 1000, 100_000} {
		for _, skew := range []float64{1.01, 1.3, 3} {
			r := rand.New(rand.NewPCG(uint64(identities), uint64(skew*100)))
			zipf := rand.NewZipf(r, skew, 1, uint64(identities-1))
			var s sketch
			truth := make(map[string]int64)
			const n = 20_000
			for range n {
				print := fingerprint([]byte(fmt.Sprint(zipf.Uint64())))
				truth[fingerprintText(print)]++
				s.add(print, testStart, time.Minute)
			}
			total, most := s.read(testStart)
			assert.Equal(t, int64(n), total)
			assert.Len(t, most, min(sketchSlots, len(truth)))
			shown := make(map[string]bool)
			for i, m := range most {
				shown[m.Fingerprint] = true
				assert.LessOrEqual(t, m.AtLeast, truth[m.Fingerprint])
				assert.GreaterOrEqual(t, m.AtMost, truth[m.Fingerprint])
				assert.True(t, i == 0 || most[i-1].AtLeast >= m.AtLeast, "worst first")
			}
			for print, count := range truth {
				if count > n/sketchSlots {
					assert.True(t, shown[print], "%d of %d refusals, and not shown", count, n)
				}
			}
		}
	}
}

func TestSketchWindows(t *testing.T) {
	var s sketch
	at := func(second int) time.Time { return testStart.Add(time.Duration(second) * time.Second) }
	total := func(second int) int64 { n, _ := s.read(at(second)); return n }
	assert.Equal(t, int64(0), total(0), "before anything")
	s.add(1, at(10), time.Minute)
	s.add(1, at(59), time.Minute)
	assert.Equal(t, int64(2), total(59))
	assert.Equal(t, int64(0), total(60), "the window has ended")
	s.add(2, at(61), time.Minute)
	s.add(1, at(59), time.Minute) // late
	n, most := s.read(at(61))
	assert.Equal(t, int64(2), n)
	assert.Len(t, most, 2)
	assert.Equal(t, int64(1), most[0].AtMost, "nothing is left of the window before")
	s.add(1, at(62), time.Hour)
	assert.Equal(t, int64(1), total(62), "another window length begins anew")
}

func TestSketchAsksForTextsSparingly(t *testing.T) {
	var s sketch
	texts := 0
	add := func(print uint64) {
		if i := s.add(print, testStart, time.Hour); i >= 0 {
			texts++
			s.name(i, print, []string{fmt.Sprint(print)})
		}
	}
	for print := range uint64(100_000) {
		add(print + 1)
	}
	assert.Equal(t, sketchSlots, texts, "identities that rotate cost nothing more")
	for range 5000 {
		add(7_000_000)
	}
	assert.Equal(t, sketchSlots+1, texts, "one that comes again gets its text, once")
	_, most := s.read(testStart)
	named := 0
	for _, m := range most {
		if strings.Join(m.Key, "") == "7000000" {
			named++
			assert.GreaterOrEqual(t, m.AtMost, int64(5000))
		}
	}
	assert.Equal(t, 1, named)
	s.name(0, 12345, []string{"stale"})
	_, most = s.read(testStart)
	for _, m := range most {
		assert.NotEqual(t, []string{"stale"}, m.Key, "a slot that changed hands keeps its text")
	}
}

// No refusal is lost for want of patience, in a first window, in the next one, or after windows without any.
func TestSketchLosesNoRefusalUnderContention(t *testing.T) {
	const callers, each = 16, 500
	for range 20 {
		var s sketch
		at := testStart
		for _, windows := range []int{0, 1, 1, 3} {
			at = at.Add(time.Duration(windows) * time.Minute)
			var group sync.WaitGroup
			for i := range callers {
				group.Go(func() {
					for range each {
						s.add(uint64(i+1), at, time.Minute)
					}
				})
			}
			group.Wait()
			total, most := s.read(at)
			assert.Equal(t, int64(callers*each), total)
			for _, m := range most {
				assert.Equal(t, int64(each), m.AtMost, "sixteen fingerprints in a row share no bucket, so that the bound is exact")
				assert.LessOrEqual(t, m.AtLeast, int64(each))
			}
		}
	}
}

// A refusal that finds the sketch taken counts in its own window, even if the sketch has yet to turn to it.
func TestSketchCountsWhoPassesInTheirOwnWindow(t *testing.T) {
	var s sketch
	busy := func(minute, refusals int) {
		s.mu.Lock()
		defer s.mu.Unlock()
		for range refusals {
			assert.Equal(t, -1, s.add(1, testStart.Add(time.Duration(minute)*time.Minute), time.Minute))
		}
	}
	add := func(minute int, want int64) {
		t.Helper()
		at := testStart.Add(time.Duration(minute) * time.Minute)
		s.add(2, at, time.Minute)
		total, _ := s.read(at)
		assert.Equal(t, want, total, "minute %d", minute)
	}
	busy(0, 5)
	add(0, 6)
	busy(0, 1)
	busy(1, 3)
	add(0, 8)
	add(1, 4)
	busy(1, 2)
	add(3, 1) // nothing is left of two windows ago
	busy(4, 1)
	add(4, 2)
}

func TestFingerprintText(t *testing.T) {
	assert.Equal(t, "0000000000000000", fingerprintText(0))
	assert.Equal(t, "00000000000000ff", fingerprintText(255))
	assert.Equal(t, "ffffffffffffffff", fingerprintText(1<<64-1))
}

func BenchmarkSketch(b *testing.B) {
	for _, identities := range []uint64{1, 16, 1 << 40} {
		b.Run(fmt.Sprint("identities=", identities), func(b *testing.B) {
			var s sketch
			i := uint64(0)
			b.ReportAllocs()
			for b.Loop() {
				i++
				s.add(i%identities, testStart, time.Minute)
			}
		})
	}
}
