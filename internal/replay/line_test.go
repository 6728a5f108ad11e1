package replay

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// oneLine reads a single line and returns the builder that it went to.
func oneLine(l *lineReader, line string) *builder {
	b := new(builder)
	l.read([]byte(line), 0, b)
	b.seal()
	return b
}

const sampleLine = `{"level":"info","ts":1772323200.25,"logger":"http.log.access.log0","msg":"handled request",` +
	`"request":{"remote_ip":"2001:db8::1","remote_port":"4711","client_ip":"9.9.9.9","proto":"HTTP/2.0","method":"POST",` +
	`"host":"api.example.com","uri":"/v1/x?q=%20","headers":{"X-Forwarded-For":["1.1.1.1, 2.2.2.2","3.3.3.3"],` +
	`"Cookie":["REDACTED"],"User-Agent":["a \"quoted\" agent"]},"tls":{"resumed":false}},"bytes_read":12,"user_id":"ann",` +
	`"duration":0.125,"size":3,"status":429,"resp_headers":{"Server":["Caddy"]}}`

func TestALineIsReadWhole(t *testing.T) {
	l := &lineReader{want: newWanted([]string{"Cookie", "X-Forwarded-For"}, false)}
	b := oneLine(l, sampleLine)
	require.Len(t, b.entries, 1)
	e := b.entries[0]
	require.Equal(t, int64(1772323200_125_000_000), e.start, "a line's time is the end of the request")
	require.Equal(t, int64(125_000_000), e.duration)
	require.Equal(t, []any{"[2001:db8::1]:4711", "POST", "api.example.com", "/v1/x?q=%20", "HTTP/2.0", "ann", "http.log.access.log0"},
		[]any{b.get(e.peer), b.get(e.method), b.get(e.host), b.get(e.uri), b.get(e.proto), b.get(e.user), b.get(e.logger)})
	require.Equal(t, uint16(429), e.status)
	require.Equal(t, int64(12), e.size)
	require.Equal(t, overTLS, e.flags)
	var got []string
	for _, h := range b.headers[e.headers:e.headersEnd] {
		got = append(got, l.want.names[h.index]+": "+b.get(h.value))
	}
	require.Equal(t, []string{"X-Forwarded-For: 1.1.1.1, 2.2.2.2", "X-Forwarded-For: 3.3.3.3", "Cookie: REDACTED"}, got)
	require.Equal(t, []int64{1}, b.stats.Redacted, "by the index of Cookie")
}

func TestLinesThatAreNoRequestsAreCountedByWhatTheyAre(t *testing.T) {
	for _, c := range []struct {
		name, line string
		want       func(*lineStats) *int64
	}{
		{"console", "2026/03/01 00:00:00.000\tINFO\thttp.log.access.log0\thandled request\t{\"request\": {}",
			func(s *lineStats) *int64 { return &s.Bad[badConsole] }},
		{"common log", `1.2.3.4 - ann [01/Mar/2026:00:00:00 +0000] "GET / HTTP/1.1" 200 5`,
			func(s *lineStats) *int64 { return &s.Bad[badCLF] }},
		{"cut off", sampleLine[:200], func(s *lineStats) *int64 { return &s.Bad[badCut] }},
		{"an array", `[1]`, func(s *lineStats) *int64 { return &s.Bad[badJSON] }},
		{"two values", sampleLine + " {}", func(s *lineStats) *int64 { return &s.Bad[badJSON] }},
		{"text", `hello`, func(s *lineStats) *int64 { return &s.Bad[badJSON] }},
		{"no time", strings.Replace(sampleLine, `"ts":1772323200.25`, `"ts":null`, 1),
			func(s *lineStats) *int64 { return &s.Bad[badTime] }},
		{"a time that is none", strings.Replace(sampleLine, `"ts":1772323200.25`, `"ts":"soon"`, 1),
			func(s *lineStats) *int64 { return &s.Bad[badTime] }},
		{"a duration that is none", strings.Replace(sampleLine, `"duration":0.125`, `"duration":"long"`, 1),
			func(s *lineStats) *int64 { return &s.Bad[badDuration] }},
		{"a negative duration", strings.Replace(sampleLine, `"duration":0.125`, `"duration":-1`, 1),
			func(s *lineStats) *int64 { return &s.Bad[badDuration] }},
		{"no peer", strings.Replace(sampleLine, `"remote_ip":"2001:db8::1",`, ``, 1),
			func(s *lineStats) *int64 { return &s.Bad[badPeer] }},
		{"the error log", strings.Replace(sampleLine, "http.log.access.log0", "http.log.error.log0", 1),
			func(s *lineStats) *int64 { return &s.Other }},
		{"the proxy's log", strings.Replace(sampleLine, "http.log.access.log0", "http.handlers.reverse_proxy", 1),
			func(s *lineStats) *int64 { return &s.Other }},
		{"no request", `{"ts":1,"msg":"handled request"}`, func(s *lineStats) *int64 { return &s.Other }},
		{"a request that is none", `{"ts":1,"msg":"handled request","request":"x"}`, func(s *lineStats) *int64 { return &s.Other }},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := oneLine(&lineReader{want: newWanted(nil, false)}, c.line)
			require.Empty(t, b.entries)
			require.Equal(t, int64(1), *c.want(&b.stats))
			require.Equal(t, int64(1), b.stats.allBad()+b.stats.Other, "counted once")
		})
	}
}

func TestOtherNamesAndPlacesOfWhatCaddyWrites(t *testing.T) {
	want := newWanted([]string{"Authorization"}, false)
	for _, c := range []struct {
		name, line string
		ok         bool
	}{
		{"another logger name and no message", `{"ts":1,"logger":"api","request":{"remote_ip":"1.2.3.4"},"resp_headers":{}}`, true},
		{"time", `{"time":1,"msg":"handled request","request":{"remote_ip":"1.2.3.4"}}`, true},
		{"@timestamp", `{"@timestamp":"2026-03-01T00:00:00Z","msg":"NOP","request":{"remote_ip":"1.2.3.4"}}`, true},
		{"an old address", `{"ts":1,"msg":"handled request","request":{"remote_addr":"1.2.3.4:5"}}`, true},
		{"a unix socket", `{"ts":1,"msg":"handled request","request":{"remote_ip":"@","remote_port":""}}`, true},
		{"an escaped key", `{"\u0074s":1,"msg":"handled request","request":{"remote_ip":"1.2.3.4"}}`, true},
		{"blanks", " { \"ts\" :\t1 , \"msg\" : \"handled request\" , \"request\" : { \"remote_ip\" : \"1.2.3.4\" } } \r", true},
		{"a header as a string", `{"ts":1,"msg":"handled request","request":{"remote_ip":"1.2.3.4","headers":{"Authorization":"x"}}}`, true},
		{"an unknown time", `{"when":1,"msg":"handled request","request":{"remote_ip":"1.2.3.4"}}`, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := oneLine(&lineReader{want: want}, c.line)
			require.Equal(t, c.ok, len(b.entries) == 1, "%+v", b.stats)
		})
	}
	b := oneLine(&lineReader{want: want, timeKey: "when"}, `{"ts":5,"when":1,"msg":"NOP","request":{"remote_ip":"1.2.3.4"}}`)
	require.Equal(t, int64(1e9), b.entries[0].start)
}

// oracle reads a line by encoding/json, in as few words as possible.
func oracle(line []byte) (valid bool, fields map[string]string) {
	d := json.NewDecoder(bytes.NewReader(line))
	d.UseNumber()
	var top map[string]any
	if !json.Valid(line) || d.Decode(&top) != nil || top == nil {
		return false, nil
	}
	req, ok := top["request"].(map[string]any)
	if !ok {
		return true, nil
	}
	fields = make(map[string]string)
	text := func(name string, v any) {
		s, _ := v.(string)
		fields[name] = s
	}
	text("user", top["user_id"])
	for _, name := range [...]string{"method", "host", "uri", "proto", "remote_ip"} {
		text(name, req[name])
	}
	headers, _ := req["headers"].(map[string]any)
	for name, v := range headers {
		if s, ok := v.(string); ok {
			v = []any{s}
		}
		list, _ := v.([]any)
		for _, s := range list {
			if s, ok := s.(string); ok {
				fields["header "+name] += s + "\n"
			}
		}
	}
	return true, fields
}

// checkLine compares what is read of a line with what encoding/json makes of it.
func checkLine(t *testing.T, line []byte) {
	t.Helper()
	if bytes.IndexByte(line, '\n') >= 0 {
		return
	}
	trimmed := bytes.TrimSpace(line)
	if len(trimmed) == 0 {
		return
	}
	valid, want := oracle(trimmed)
	l := &lineReader{want: newWanted(nil, true)}
	l.now.request.headers = nil
	s := scanner{b: trimmed}
	l.now = fieldTexts{stampRank: len(stampKeys)}
	ok := trimmed[0] == '{' && l.top(&s) && s.end()
	if ok != valid {
		t.Fatalf("accepted is %v, want %v: %q", ok, valid, line)
	}
	if !ok || l.now.hasRequest != (want != nil) {
		if ok {
			t.Fatalf("has a request is %v, want %v: %q", l.now.hasRequest, want != nil, line)
		}
		return
	}
	if want == nil {
		return
	}
	r := &l.now.request
	got := map[string]string{
		"user": string(l.now.userID.appendTo(nil)), "method": string(r.method.appendTo(nil)), "host": string(r.host.appendTo(nil)),
		"uri": string(r.uri.appendTo(nil)), "proto": string(r.proto.appendTo(nil)), "remote_ip": string(r.remoteIP.appendTo(nil)),
	}
	for _, h := range r.headers {
		got["header "+string(h.name.appendTo(nil))] += string(h.value.appendTo(nil)) + "\n"
	}
	require.Equal(t, want, got, "%q", line)
}

func FuzzLineIsReadAsEncodingJSONReadsIt(f *testing.F) {
	f.Add([]byte(sampleLine))
	f.Add([]byte(`{"request":{"headers":{"A":["\ud83d\ude00","\ud800"],"A":"b"}},"request":{"uri":"\xff"}}`))
	f.Add([]byte(`{"a":[1.5e-3,-0,{"b":null}],"request":null}`))
	f.Add([]byte(`{"request":{"method":1,"method":"G\/T"}} `))
	f.Fuzz(func(t *testing.T, line []byte) { checkLine(t, line) })
}

// TestMutatedLinesAreReadAsEncodingJSONReadsThem is the fuzz test with a generator that knows what lines look like.
func TestMutatedLinesAreReadAsEncodingJSONReadsThem(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	pieces := []string{
		`"`, `\`, `\"`, `\u00e9`, `\ud83d\ude00`, `\udc00`, "\x80", "\xc3\xa9", "\x01", "\t", " ", `{`, `}`, `[`, `]`, `,`, `:`, `null`,
		`true`, `0`, `-1.5e+7`, `01`, `1.`, `"request":{"uri":"/y"},`, `"headers":{"X":["z"]},`, `"X-Forwarded-For":["q",1,null],`,
		`"ts":"x",`, `"user_id":7,`, strings.Repeat(`[`, 50), `"method":{},`, "\x7f", `\u12`, `REDACTED`,
	}
	for range 20000 {
		line := []byte(sampleLine)
		for range 1 + rnd.IntN(3) {
			at := rnd.IntN(len(line) + 1)
			piece := pieces[rnd.IntN(len(pieces))]
			cut := min(len(line), at+rnd.IntN(4)*rnd.IntN(2))
			line = append(append(append([]byte(nil), line[:at]...), piece...), line[cut:]...)
		}
		checkLine(t, line)
	}
}

func TestDepthIsLimitedAsInEncodingJSON(t *testing.T) {
	for _, depth := range []int{10, maxDepth - 1, maxDepth, maxDepth + 1} {
		for _, c := range []struct{ open, inside, end string }{{"[", "1", "]"}, {`{"a":`, "1", "}"}} {
			n := depth - 1 // within the outermost object
			checkLine(t, []byte(`{"x":`+strings.Repeat(c.open, n)+c.inside+strings.Repeat(c.end, n)+`}`))
			n = depth - 2
			checkLine(t, []byte(`{"request":{"x":`+strings.Repeat(c.open, n)+c.inside+strings.Repeat(c.end, n)+`}}`))
			checkLine(t, []byte(`{"request":{"method":`+strings.Repeat(c.open, n)+c.inside+strings.Repeat(c.end, n)+`}}`))
			n = depth - 3
			checkLine(t, []byte(`{"request":{"headers":{"x":`+strings.Repeat(c.open, n)+c.inside+strings.Repeat(c.end, n)+`}}}`))
			n = depth - 4
			checkLine(t, []byte(`{"request":{"headers":{"x":[`+strings.Repeat(c.open, n)+c.inside+strings.Repeat(c.end, n)+`]}}}`))
		}
	}
}

func TestTextIsScannedToItsEndAtEveryOffset(t *testing.T) {
	for length := range 40 {
		for _, stop := range []string{`"`, `\`, "\x1f", "\x00"} {
			for _, before := range []string{"a", "\x7f", "\xc3", " ", "!", "]", "#", "["} {
				b := []byte(strings.Repeat(before, length) + stop + strings.Repeat("x", 20))
				i, ascii := skipText(b, 0)
				require.Equal(t, length, i, "%q", b)
				if length > 0 && before == "\xc3" {
					require.False(t, ascii, fmt.Sprintf("%q", b))
				}
			}
		}
	}
}

func BenchmarkLine(b *testing.B) {
	l := &lineReader{want: newWanted([]string{"Origin", "Access-Control-Request-Method", "Content-Length"}, false)}
	out := new(builder)
	line := []byte(sampleLine)
	b.SetBytes(int64(len(line)))
	for b.Loop() {
		out.entries, out.headers, out.buf = out.entries[:0], out.headers[:0], out.buf[:0]
		l.read(line, 0, out)
	}
}

// A line with any number of field names is read in a time that grows with its length, and says what encoding/json says.
func TestLinesWithManyNamesAreReadInOneGo(t *testing.T) {
	var names strings.Builder
	for i := range 300 {
		fmt.Fprintf(&names, `"N%d":["%d"],`, i, i)
	}
	for _, again := range []string{`"N1":["again"]`, `"N1":[]`, `"N1":null`, `"N299":"x","N299":["y","z"]`, `"N2":["a"],"N70":[],"N70":["b"]`} {
		checkLine(t, []byte(`{"request":{"headers":{`+names.String()+again+`}}}`))
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		var line strings.Builder
		line.WriteString(`{"request":{"headers":{"Cookie":["first"]`)
		for i := range 200_000 {
			fmt.Fprintf(&line, `,"Name%d":["v"],"Name7":["%d"]`, i, i)
		}
		line.WriteString(`,"Cookie":["last"]}}}`)
		l := &lineReader{want: newWanted([]string{"Cookie"}, true)}
		l.now = fieldTexts{stampRank: len(stampKeys)}
		s := scanner{b: []byte(line.String())}
		assert.True(t, l.top(&s) && s.end())
		assert.Len(t, l.now.request.headers, 200_001)
		for _, h := range l.now.request.headers {
			switch {
			case h.index == 0:
				assert.Equal(t, "last", string(h.value.appendTo(nil)))
			case string(h.name.raw) == "Name7":
				assert.Equal(t, "199999", string(h.value.appendTo(nil)))
			}
		}
	}()
	select {
	case <-done:
	case <-time.After(10 * time.Second): // a reader that compares each name with all others takes minutes
		t.Fatal("the line takes too long")
	}
}
