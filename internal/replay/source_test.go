package replay

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/iotest"
	"time"

	"github.com/stretchr/testify/require"
)

const testEpoch = int64(1772323200) // 2026-03-01 00:00:00 UTC

// logged is a request of a made-up log; times are in milliseconds since testEpoch.
type logged struct {
	start, duration int64
	id              int // in the URI
}

func (l logged) line() string {
	end := testEpoch*1000 + l.start + l.duration
	return fmt.Sprintf(`{"ts":%d.%03d,"logger":"http.log.access","msg":"handled request","request":{"remote_ip":"192.0.2.1",`+
		`"remote_port":"1","method":"GET","host":"a","uri":"/%d","headers":{}},"duration":%d.%03d,"status":200}`+"\n",
		end/1000, end%1000, l.id, l.duration/1000, l.duration%1000)
}

// inOrderOfEnd is the log that a server would have written of requests.
func inOrderOfEnd(requests []logged) string {
	list := slices.Clone(requests)
	slices.SortStableFunc(list, func(a, b logged) int { return cmp.Compare(a.start+a.duration, b.start+b.duration) })
	var b strings.Builder
	for _, r := range list {
		b.WriteString(r.line())
	}
	return b.String()
}

// handedOut is what came out of a merge.
type handedOut struct {
	uri string
	at  int64 // milliseconds since testEpoch
}

func readAll(t *testing.T, window time.Duration, stdin io.Reader, names ...string) ([]handedOut, []*source) {
	t.Helper()
	var read atomic.Int64
	r := newReaders(func() *lineReader { return &lineReader{want: newWanted(nil, false)} })
	defer r.close()
	var sources []*source
	for _, name := range names {
		s, err := newSource(name, stdin, &read)
		require.NoError(t, err)
		sources = append(sources, s)
	}
	m, err := newMerge(r, sources, unitUnknown, int64(window))
	require.NoError(t, err)
	defer m.close()
	var out []handedOut
	for {
		trip, _, more, err := m.next()
		require.NoError(t, err)
		if !more {
			return out, sources
		}
		out = append(out, handedOut{trip.batch.get(trip.entry.uri), trip.at/1e6 - testEpoch*1000})
	}
}

func writeLog(t *testing.T, name, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	require.NoError(t, os.WriteFile(path, []byte(content), 0o600))
	return path
}

func gzipped(t *testing.T, content string) []byte {
	t.Helper()
	var buf bytes.Buffer
	w := gzip.NewWriter(&buf)
	_, err := io.WriteString(w, content)
	require.NoError(t, err)
	require.NoError(t, w.Close())
	return buf.Bytes()
}

// traffic is n requests, one every 100 ms, that take up to most ms.
func traffic(n int, most int64) []logged {
	rnd := rand.New(rand.NewPCG(3, 4))
	list := make([]logged, n)
	for i := range list {
		list[i] = logged{start: int64(i) * 100, duration: rnd.Int64N(most), id: i}
	}
	return list
}

func wantInOrder(requests []logged) []handedOut {
	var want []handedOut
	for _, r := range requests {
		want = append(want, handedOut{fmt.Sprintf("/%d", r.id), r.start})
	}
	return want
}

// requireOrder compares without printing all of it.
func requireOrder(t *testing.T, want, got []handedOut) {
	t.Helper()
	for i := range min(len(want), len(got)) {
		require.Equal(t, want[i], got[i], "request %d", i)
	}
	require.Len(t, got, len(want))
}

func TestLinesComeOutInTheOrderInWhichRequestsCame(t *testing.T) {
	requests := traffic(20000, 50_000)
	content := inOrderOfEnd(requests)
	for _, c := range []struct {
		name  string
		stdin io.Reader
		file  string
	}{
		{"file", nil, writeLog(t, "access.log", content)},
		{"gzip", nil, writeLog(t, "access.log", string(gzipped(t, content)))},
		{"gzip in two members", nil, writeLog(t, "a.gz", string(gzipped(t, content[:1<<20]))+string(gzipped(t, content[1<<20:])))},
		{"standard input", strings.NewReader(content), "-"},
		{"gzip on standard input, bit by bit", iotest.HalfReader(bytes.NewReader(gzipped(t, content))), "-"},
		{"no newline at the end", nil, writeLog(t, "access.log", strings.TrimSuffix(content, "\n"))},
		{"carriage returns", nil, writeLog(t, "access.log", strings.ReplaceAll(content, "\n", "\r\n"))},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, sources := readAll(t, time.Minute, c.stdin, c.file)
			requireOrder(t, wantInOrder(requests), got)
			require.NoError(t, sources[0].err)
			require.Zero(t, sources[0].late+sources[0].stepsBack)
		})
	}
}

func TestRotatedLogsAreMergedInAnyOrder(t *testing.T) {
	requests := traffic(6000, 30_000)
	lines := strings.SplitAfter(inOrderOfEnd(requests), "\n")
	a := writeLog(t, "a", strings.Join(lines[:2000], ""))
	b := writeLog(t, "b.gz", string(gzipped(t, strings.Join(lines[2000:4000], ""))))
	c := writeLog(t, "c", strings.Join(lines[4000:], ""))
	empty := writeLog(t, "empty", "")
	for _, names := range [][]string{{a, b, c}, {c, b, a}, {b, empty, c, a}} {
		got, sources := readAll(t, time.Minute, nil, names...)
		requireOrder(t, wantInOrder(requests), got)
		for _, s := range sources {
			require.Zero(t, s.late+s.stepsBack, s.name)
		}
	}
}

func TestLogsOfTwoServersAreMerged(t *testing.T) {
	requests := traffic(6000, 30_000)
	var odd, even []logged
	for i, r := range requests {
		if i%2 == 0 {
			even = append(even, r)
		} else {
			odd = append(odd, r)
		}
	}
	got, _ := readAll(t, time.Minute, strings.NewReader(inOrderOfEnd(odd)), writeLog(t, "even", inOrderOfEnd(even)), "-")
	requireOrder(t, wantInOrder(requests), got)
}

func TestARequestLongerThanLinesAreHeldBackIsLate(t *testing.T) {
	requests := traffic(3000, 1000)
	long := logged{start: 1000, duration: 200_000, id: 9999}
	got, sources := readAll(t, time.Minute, nil, writeLog(t, "a", inOrderOfEnd(append(slices.Clone(requests), long))))
	require.Equal(t, int64(1), sources[0].late)
	i := slices.IndexFunc(got, func(h handedOut) bool { return h.uri == "/9999" })
	require.GreaterOrEqual(t, got[i].at, int64(100_000), "judged at the time that had been reached")
	require.True(t, slices.IsSortedFunc(got, func(a, b handedOut) int { return cmp.Compare(a.at, b.at) }))
	require.Len(t, got, len(requests)+1)
}

func TestAClockThatIsSetBackIsFollowed(t *testing.T) {
	before := traffic(2000, 5000)
	after := traffic(2000, 5000)
	for i := range after {
		after[i].start -= 3600_000
		after[i].id += 10000
	}
	got, sources := readAll(t, time.Minute, nil, writeLog(t, "a", inOrderOfEnd(before)+inOrderOfEnd(after)))
	requireOrder(t, append(wantInOrder(before), wantInOrder(after)...), got)
	require.Equal(t, int64(1), sources[0].stepsBack)
	require.Zero(t, sources[0].late)
}

func TestAClockThatJumpsAheadAndBack(t *testing.T) {
	a, far, b := traffic(100, 50), []logged{{start: 1e12, id: 5000}}, traffic(100, 50)
	for i := range b {
		b[i].start += 20_000
	}
	got, sources := readAll(t, time.Minute, nil, writeLog(t, "a", inOrderOfEnd(a)+far[0].line()+inOrderOfEnd(b)))
	requireOrder(t, append(append(wantInOrder(a), wantInOrder(far)...), wantInOrder(b)...), got)
	require.Equal(t, int64(1), sources[0].stepsBack)
}

func TestHeldLinesAreBounded(t *testing.T) {
	o := &order{source: new(source), window: int64(time.Hour), next: func() *batch { return nil }}
	b := &batch{entries: make([]entry, maxHeld+1000), open: maxHeld + 1000}
	for i := range b.entries {
		b.entries[i].start = int64(i + 1)
	}
	given := false
	o.next = func() *batch {
		if given {
			return nil
		}
		given = true
		return b
	}
	for i := range b.entries {
		trip, more := o.pop()
		if !more || trip.at != int64(i+1) || len(o.heap) > maxHeld {
			t.Fatalf("request %d: more is %v, at %d, %d held", i, more, trip.at, len(o.heap))
		}
	}
	_, more := o.pop()
	require.False(t, more)
}

func TestTruncatedAndDamagedGzipIsReadAsFarAsItGoes(t *testing.T) {
	requests := traffic(20000, 1000)
	packed := gzipped(t, inOrderOfEnd(requests))
	for _, c := range []struct {
		name string
		data []byte
	}{
		{"cut in the middle", packed[:len(packed)/2]},
		{"cut in the checksum", packed[:len(packed)-4]},
		{"wrong checksum", append(slices.Clone(packed[:len(packed)-8]), 1, 2, 3, 4, 5, 6, 7, 8)},
		{"rubbish behind it", append(slices.Clone(packed), "rubbish"...)},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, sources := readAll(t, time.Minute, nil, writeLog(t, "a.gz", string(c.data)))
			require.Error(t, sources[0].err)
			require.Greater(t, len(got), 5000)
			got = got[:len(got)-30] // of requests that ended later than the cut, some are missing
			requireOrder(t, wantInOrder(requests[:len(got)]), got)
			require.LessOrEqual(t, sources[0].stats.allBad(), int64(1), "the line that was cut")
		})
	}
}

func TestLogsThatCannotBeReadAreRefused(t *testing.T) {
	var read atomic.Int64
	_, err := newSource("/does/not/exist", nil, &read)
	require.ErrorContains(t, err, "/does/not/exist")
	_, err = newSource(t.TempDir(), nil, &read)
	require.ErrorContains(t, err, "directory")
	s, err := newSource(writeLog(t, "a.gz", "\x1f\x8bxx"), nil, &read)
	require.NoError(t, err)
	_, err = s.open(&read)
	require.ErrorContains(t, err, "gzip")
}

func TestLongLines(t *testing.T) {
	header := func(n int) string {
		return strings.Replace(logged{start: 1, id: 1}.line(), `"headers":{}`, `"headers":{"X":["`+strings.Repeat("x", n)+`"]}`, 1)
	}
	a, b := logged{start: 0, id: 0}, logged{start: 2, id: 2}
	for _, n := range []int{chunkSize - 300, chunkSize, 1 << 20, 5 << 20} {
		got, sources := readAll(t, time.Minute, nil, writeLog(t, "a", a.line()+header(n)+b.line()))
		require.Equal(t, []handedOut{{"/0", 0}, {"/1", 1}, {"/2", 2}}, got, "a line of %d bytes", n)
		require.Zero(t, sources[0].stats.allBad())
	}
	huge := strings.Repeat("x", maxLine+maxLine/2)
	for _, content := range []string{
		a.line() + header(maxLine+5) + b.line(), a.line() + huge + "\n" + b.line(), a.line() + b.line() + huge, huge + "\n" + a.line() + b.line(),
	} {
		got, sources := readAll(t, time.Minute, nil, writeLog(t, "a", content))
		require.Equal(t, []handedOut{{"/0", 0}, {"/2", 2}}, got)
		require.Equal(t, int64(1), sources[0].stats.Bad[badLong])
		require.Equal(t, int64(3), sources[0].stats.Lines)
	}
}

func TestLinesAreNumberedAcrossChunks(t *testing.T) {
	var content strings.Builder
	var want []int64
	number := int64(1)
	for i := range 5000 {
		if i%3 == 0 {
			content.WriteString("not a request\n\n")
			number += 2
		}
		want = append(want, number)
		content.WriteString(logged{start: int64(i), id: i}.line())
		number++
		if i == 2500 {
			content.WriteString(strings.Repeat("y", maxLine+1) + "\n")
			number++
		}
	}
	var got []int64
	c := &chunker{r: strings.NewReader(content.String())}
	for {
		part := c.next(make([]byte, 0, 4096))
		b := part.read(&lineReader{want: newWanted(nil, false)})
		for _, e := range b.entries {
			got = append(got, b.first+int64(e.line))
		}
		if part.err != nil {
			break
		}
	}
	require.Equal(t, want, got)
}

func TestMixedLinesAreCountedAndTheRestIsUsed(t *testing.T) {
	requests := traffic(100, 100)
	content := "2026/03/01 00:00:00\tINFO\thttp.log.access\thandled request\t{\"request\"\n" +
		`1.2.3.4 - - [01/Mar/2026:00:00:00 +0000] "GET / HTTP/1.1" 200 5` + "\n" +
		inOrderOfEnd(requests) + `{"level":"info","msg":"server running"}` + "\n\x00\x01\xff\n\n" + `{"ts":17723`
	got, sources := readAll(t, time.Minute, nil, writeLog(t, "a", content))
	requireOrder(t, wantInOrder(requests), got)
	s := sources[0].stats
	require.Equal(t, [badKinds]int64{badConsole: 1, badCLF: 1, badJSON: 1, badCut: 1}, s.Bad)
	require.Equal(t, []int64{106, 100, 1}, []int64{s.Lines, s.Requests, s.Other})
}
