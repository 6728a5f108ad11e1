package replay

import (
	"bytes"
	"encoding/json"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"
	"github.com/stretchr/testify/require"
)

// envelopes are what collectors put around a line, by who does.
var envelopes = map[string]func(line string) string{
	"nothing":                 func(line string) string { return line },
	"byte order mark":         func(line string) string { return "\ufeff" + line },
	"docker compose":          func(line string) string { return "caddy-1  | " + line },
	"docker compose, colours": func(line string) string { return "\x1b[36mcaddy-1  | \x1b[0m" + line + "\x1b[0m" },
	"docker logs -t":          func(line string) string { return "2026-03-01T00:00:00.250123456Z " + line },
	"container runtime":       func(line string) string { return "2026-03-01T00:00:00.250123456Z stdout F " + line },
	"journald, short":         func(line string) string { return "Mar 01 00:00:00 edge-1 caddy[812]: " + line },
	"journald, short-iso":     func(line string) string { return "2026-03-01T00:00:00+0000 edge-1 caddy[812]: " + line },
	"syslog, RFC 3164":        func(line string) string { return "<134>Mar  1 00:00:00 edge-1 caddy[812]: " + line },
	"syslog, RFC 5424":        func(line string) string { return "<134>1 2026-03-01T00:00:00.25Z edge-1 caddy 812 - - " + line },
	"priority":                func(line string) string { return "<6>" + line },
	"docker json-file": func(line string) string {
		return `{"log":` + quoted(line+"\n") + `,"stream":"stderr","time":"2026-03-01T00:00:00.250123456Z"}`
	},
	"journald JSON": func(line string) string {
		return `{"__REALTIME_TIMESTAMP":"1772323200250000","_HOSTNAME":"edge-1","MESSAGE":` + quoted(line) + `,"PRIORITY":"6"}`
	},
	"a shipper in a shipper": func(line string) string { return `{"message":` + quoted(`{"log":`+quoted("<6>"+line)+`}`) + `}` },
	"carriage return":        func(line string) string { return line + "\r" },
}

func quoted(text string) string {
	b, err := json.Marshal(text)
	if err != nil {
		panic(err)
	}
	return string(b)
}

// A line is read in whatever envelope it comes.
func TestLinesAreTakenOutOfTheirEnvelopes(t *testing.T) {
	read := func(line string) (entry, *builder) {
		b := oneLine(&lineReader{want: newWanted([]string{"X-Forwarded-For"}, false)}, line)
		require.Len(t, b.entries, 1, line)
		require.Zero(t, b.stats.allBad()+b.stats.Other)
		return b.entries[0], b
	}
	wantEntry, want := read(sampleLine)
	for name, wrap := range envelopes {
		got, b := read(wrap(sampleLine))
		require.Equal(t, wantEntry.start, got.start, name)
		require.Equal(t, wantEntry.status, got.status, name)
		for _, part := range [][2]span{{wantEntry.peer, got.peer}, {wantEntry.uri, got.uri}, {wantEntry.host, got.host}, {wantEntry.user, got.user}} {
			require.Equal(t, want.get(part[0]), b.get(part[1]), name)
		}
		require.Equal(t, wantEntry.headersEnd-wantEntry.headers, got.headersEnd-got.headers, name)
	}
}

// What Caddy's console encoder writes has the time, the logger and the message in front of the fields.
func TestConsoleLinesAreRead(t *testing.T) {
	fields := sampleLine[strings.Index(sampleLine, `"request"`):]
	for name, line := range map[string]string{
		"plain":          "2026/03/01 00:00:00.250\tinfo\thttp.log.access.log0\thandled request\t{" + fields,
		"coloured":       "2026/03/01 00:00:00.250\t\x1b[34mINFO\x1b[0m\thttp.log.access.log0\thandled request\t{" + fields,
		"unix seconds":   "1772323200.25\tinfo\thttp.log.access\thandled request\t{" + fields,
		"compose":        "caddy-1  | 2026/03/01 00:00:00.250\tinfo\thttp.log.access.log0\thandled request\t{" + fields,
		"journald iso":   "2026-03-01T00:00:00.25+0000 edge-1 caddy[8]: info\thttp.log.access.log0\thandled request\t{" + fields,
		"journald, both": "Mar 01 00:00:00 edge-1 caddy[8]: 2026/03/01 00:00:00.250\tinfo\thttp.log.access.log0\thandled request\t{" + fields,
	} {
		b := oneLine(&lineReader{want: newWanted(nil, false)}, line)
		require.Len(t, b.entries, 1, name)
		require.Equal(t, int64(1772323200_125_000_000), b.entries[0].start, name)
		require.Equal(t, uint16(429), b.entries[0].status, name)
	}
	for name, line := range map[string]string{
		"no time":        "info\thttp.log.access.log0\thandled request\t{" + fields,
		"another logger": "2026/03/01 00:00:00.250\tinfo\thttp.log.error\thandled request\t{" + fields,
		"cut off":        "2026/03/01 00:00:00.250\tinfo\thttp.log.access.log0\thandled request\t{" + fields[:90],
	} {
		b := oneLine(&lineReader{want: newWanted(nil, false)}, line)
		require.Empty(t, b.entries, name)
		require.Equal(t, int64(1), b.stats.allBad()+b.stats.Other, name)
	}
}

// What is in an envelope but is no line of a log is none of the requests, and no error.
func TestEnvelopesOfSomethingElse(t *testing.T) {
	for _, line := range []string{
		`{"log":"hello {world}\n","stream":"stdout"}`, `{"message":"{}"}`, `{"MESSAGE":"plain","request":3}`, `{"log":7}`,
		`{"log":` + quoted(`{"level":"info","msg":"server running"}`) + `}`,
	} {
		b := oneLine(&lineReader{want: newWanted(nil, false)}, line)
		require.Empty(t, b.entries, line)
		require.Equal(t, int64(1), b.stats.Other, line)
	}
	own := strings.Replace(sampleLine, `"bytes_read":12`, `"message":`+quoted(`{"request":{"remote_ip":"6.6.6.6"}}`)+`,"bytes_read":12`, 1)
	b := oneLine(&lineReader{want: newWanted(nil, false)}, own)
	require.Len(t, b.entries, 1, "a line that has a request is no envelope")
	require.Contains(t, b.get(b.entries[0].peer), "2001:db8::1")
}

// The first line of each kind that cannot be used is kept as a sample, cut short.
func TestASampleOfWhatCannotBeUsed(t *testing.T) {
	var read atomic.Int64
	s, err := newSource(writeLog(t, "a", "hello\nworld\n"+strings.Repeat("x", 500)+"\n"), nil, &read)
	require.NoError(t, err)
	in, err := s.open(&read)
	require.NoError(t, err)
	defer in.Close()
	c := &chunker{r: in}
	part := c.next(make([]byte, 0, 4096))
	b := part.read(&lineReader{want: newWanted(nil, false)})
	require.Equal(t, int64(3), b.stats.Bad[badJSON])
	require.Equal(t, "hello", b.stats.samples[badJSON])
	var sum lineStats
	sum.bad(badJSON, []byte(strings.Repeat("y", 500)))
	sum.add(&b.stats)
	require.Equal(t, strings.Repeat("y", maxSample), sum.samples[badJSON])
}

// A log that zstd has compressed is read, in one frame or several; what is broken is said, and what comes before is used.
func TestLogsCompressedByZstd(t *testing.T) {
	requests := traffic(300, 300)
	text := inOrderOfEnd(requests)
	pack := func(text string) string {
		var out bytes.Buffer
		w, err := zstd.NewWriter(&out)
		require.NoError(t, err)
		_, err = w.Write([]byte(text))
		require.NoError(t, err)
		require.NoError(t, w.Close())
		return out.String()
	}
	half := strings.Index(text[len(text)/2:], "\n") + len(text)/2 + 1
	for name, content := range map[string]string{"one frame": pack(text), "two frames": pack(text[:half]) + pack(text[half:])} {
		got, sources := readAll(t, time.Minute, nil, writeLog(t, "a.zst", content))
		requireOrder(t, wantInOrder(requests), got)
		require.NoError(t, sources[0].err, name)
	}
	_, sources := readAll(t, time.Minute, nil, writeLog(t, "b.zst", pack(text)+"\x28\xb5\x2f\xfdxxxx"))
	require.Equal(t, int64(300), sources[0].stats.Requests)
	require.Error(t, sources[0].err)
}
