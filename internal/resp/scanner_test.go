package resp

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// narrow are bounds that short streams reach.
var narrow = Bounds{Text: 16, Elements: 6, Depth: 3, Total: 12, Size: 96}

// scan reads a stream in pieces whose lengths are those given, over and over, and returns where replies ended.
func scan(bounds Bounds, stream []byte, pieces ...int) (ends []int, err error) {
	s := Scanner{Bounds: bounds}
	at := 0
	for i := 0; at < len(stream); i++ {
		piece := stream[at:min(len(stream), at+pieces[i%len(pieces)])]
		for len(piece) > 0 {
			n, ended, err := s.Next(piece)
			if err != nil {
				return ends, err
			}
			at += n
			piece = piece[n:]
			if ended {
				ends = append(ends, at)
			} else if len(piece) > 0 {
				return ends, fmt.Errorf("stopped at %d", at)
			}
		}
	}
	return ends, nil
}

// judge asks the oracle the same. Whether the last reply is short is told apart.
func judge(bounds Bounds, stream []byte) (ends []int, err error) {
	for at := 0; at < len(stream); {
		n, err := replyEnd(bounds, stream[at:])
		if err != nil {
			return ends, err
		}
		at += n
		ends = append(ends, at)
	}
	return ends, nil
}

func TestRepliesWithinBounds(t *testing.T) {
	for _, reply := range []string{
		"+OK\r\n", "+\r\n", "-ERR no\r\n", ":0\r\n", ":-12\r\n", ":+12\r\n", ":-9223372036854775808\r\n", "$0\r\n\r\n",
		"$3\r\na\r\n\r\n", "$-1\r\n", "*-1\r\n", "*0\r\n", "*2\r\n*1\r\n_\r\n%1\r\n#t\r\n,1.5\r\n", "~2\r\n(123\r\n=5\r\ntxt:a\r\n",
		"!3\r\nERR\r\n", "%0\r\n", ",inf\r\n", ",-1.5e10\r\n", "(3492890328409238509324850943850943825024385\r\n",
		"$?\r\n;4\r\nHell\r\n;1\r\no\r\n;0\r\n", "$?\r\n;0\r\n", "*?\r\n:1\r\n$1\r\na\r\n.\r\n", "*?\r\n.\r\n", "%?\r\n+a\r\n:1\r\n.\r\n",
		"~?\r\n*?\r\n.\r\n.\r\n", ">2\r\n+message\r\n+a\r\n", "|1\r\n+a\r\n:1\r\n+OK\r\n", "|0\r\n|0\r\n*1\r\n|1\r\n+a\r\n*0\r\n_\r\n",
		"|1\r\n+a\r\n:1\r\n>1\r\n_\r\n", "*?\r\n|0\r\n:1\r\n.\r\n", "*3\r\n$-1\r\n*-1\r\n_\r\n",
		"*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n_\r\n",
	} {
		stream := []byte(reply + reply)
		for piece := 1; piece <= len(stream); piece++ {
			ends, err := scan(Bounds{Text: 64, Elements: 8, Depth: 8, Total: 64, Size: 256}, stream, piece)
			require.NoError(t, err, "%q in pieces of %d", reply, piece)
			assert.Equal(t, []int{len(reply), len(stream)}, ends, "%q in pieces of %d", reply, piece)
		}
	}
}

// TestBounds goes up to each bound, and one beyond.
func TestBounds(t *testing.T) {
	wide := Bounds{Text: 100, Elements: 100, Depth: 8, Total: 1000, Size: 10_000}
	total, size := wide, wide
	total.Total, size.Size = 50, 60
	x := func(n int) string { return strings.Repeat("x", n) }
	for name, test := range map[string]struct {
		bounds Bounds
		most   int
		reply  func(n int) string
	}{
		"line":             {wide, 100, func(n int) string { return "+" + x(n) + "\r\n" }},
		"string":           {wide, 100, func(n int) string { return fmt.Sprintf("$%d\r\n%s\r\n", n, x(n)) }},
		"error":            {wide, 100, func(n int) string { return fmt.Sprintf("!%d\r\n%s\r\n", n, x(n)) }},
		"verbatim string":  {wide, 100, func(n int) string { return fmt.Sprintf("=%d\r\n%s\r\n", n, x(n)) }},
		"streamed string":  {wide, 100, func(n int) string { return "$?\r\n" + strings.Repeat(";1\r\nx\r\n", n) + ";0\r\n" }},
		"chunk":            {wide, 100, func(n int) string { return fmt.Sprintf("$?\r\n;%d\r\n%s\r\n;0\r\n", n, x(n)) }},
		"array":            {wide, 100, func(n int) string { return fmt.Sprintf("*%d\r\n", n) + strings.Repeat("_\r\n", n) }},
		"set":              {wide, 100, func(n int) string { return fmt.Sprintf("~%d\r\n", n) + strings.Repeat("_\r\n", n) }},
		"push":             {wide, 100, func(n int) string { return fmt.Sprintf(">%d\r\n", n) + strings.Repeat("_\r\n", n) }},
		"map":              {wide, 50, func(n int) string { return fmt.Sprintf("%%%d\r\n", n) + strings.Repeat("_\r\n", 2*n) }},
		"attribute":        {wide, 50, func(n int) string { return fmt.Sprintf("|%d\r\n", n) + strings.Repeat("_\r\n", 2*n+1) }},
		"streamed array":   {wide, 100, func(n int) string { return "*?\r\n" + strings.Repeat("_\r\n", n) + ".\r\n" }},
		"streamed map":     {wide, 50, func(n int) string { return "%?\r\n" + strings.Repeat("_\r\n", 2*n) + ".\r\n" }},
		"arrays in arrays": {wide, 8, func(n int) string { return strings.Repeat("*1\r\n", n) + "_\r\n" }},
		"maps in maps":     {wide, 8, func(n int) string { return strings.Repeat("%1\r\n_\r\n", n) + "_\r\n" }},
		"attributes about attributes": {wide, 8, func(n int) string {
			return strings.Repeat("|1\r\n", n) + strings.Repeat("_\r\n", 2*n+1)
		}},
		"elements in all": {total, 49, func(n int) string { return fmt.Sprintf("*1\r\n*%d\r\n", n) + strings.Repeat("_\r\n", n) }},
		"streamed elements in all": {total, 24, func(n int) string {
			return "*?\r\n" + strings.Repeat("*1\r\n_\r\n", n) + "_\r\n_\r\n.\r\n"
		}},
		"bytes":                {size, 57, func(n int) string { return "+" + x(n) + "\r\n" }},
		"attributes in a row":  {size, 14, func(n int) string { return strings.Repeat("|0\r\n", n) + ":1\r\n" }},
		"digits":               {wide, 19, func(n int) string { return ":" + strings.Repeat("0", n) + "\r\n" }},
		"negative numbers":     {wide, 8, func(n int) string { return fmt.Sprintf(":-922337203685477580%d\r\n", n) }},
		"numbers":              {wide, 7, func(n int) string { return fmt.Sprintf(":922337203685477580%d\r\n", n) }},
		"digits of the length": {wide, 19, func(n int) string { return "$" + strings.Repeat("0", n) + "\r\n\r\n" }},
	} {
		for _, piece := range []int{1, 3, 1000} {
			reply := test.reply(test.most)
			ends, err := scan(test.bounds, []byte(reply), piece)
			require.NoError(t, err, "%s: %d, in pieces of %d", name, test.most, piece)
			assert.Equal(t, []int{len(reply)}, ends, "%s: %d, in pieces of %d", name, test.most, piece)
			_, err = scan(test.bounds, []byte(test.reply(test.most+1)), piece)
			assert.Error(t, err, "%s: %d, in pieces of %d", name, test.most+1, piece)
		}
	}
}

// generate writes a random reply within narrow bounds, as far as it looks at them.
func generate(r *rand.Rand, to *bytes.Buffer, depth int) {
	text := strings.Repeat("x", r.IntN(5))
	if r.IntN(8) == 0 && depth < narrow.Depth {
		to.WriteString("|1\r\n+k\r\n:1\r\n")
	}
	switch kind := r.IntN(12); {
	case kind == 0:
		fmt.Fprintf(to, "%c%s\r\n", "+-,("[r.IntN(4)], text)
	case kind == 1:
		fmt.Fprintf(to, ":%d\r\n", r.IntN(2000)-1000)
	case kind == 2:
		to.WriteString([]string{"_\r\n", "#t\r\n", "#f\r\n", "$-1\r\n", "*-1\r\n"}[r.IntN(5)])
	case kind == 3:
		fmt.Fprintf(to, "$?\r\n;%d\r\n%s\r\n;0\r\n", len(text)+1, text+"x")
	case kind < 7 || depth == narrow.Depth:
		fmt.Fprintf(to, "%c%d\r\n%s\r\n", "$!="[r.IntN(3)], len(text), text)
	default:
		n, head := r.IntN(3), "*~%"[r.IntN(3)]
		if depth == 0 && r.IntN(4) == 0 {
			head = '>'
		}
		streamed := head != '>' && r.IntN(3) == 0
		if fmt.Fprintf(to, "%c%d\r\n", head, n); streamed {
			to.Truncate(to.Len() - 3)
			to.WriteString("?\r\n")
		}
		if head == '%' {
			n *= 2
		}
		for range n {
			generate(r, to, depth+1)
		}
		if streamed {
			to.WriteString(".\r\n")
		}
	}
}

// TestAgreesWithTheOracle lets random replies through that are well-formed and within bounds, also while they have not
// ended, and judges them as the oracle does when a byte is changed.
func TestAgreesWithTheOracle(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	var good, bad, short int
	for range 200_000 {
		var stream bytes.Buffer
		for range 1 + r.IntN(3) {
			generate(r, &stream, 0)
		}
		text := stream.Bytes()
		want, verdict := judge(narrow, text)
		if verdict == nil {
			good++
			cut := r.IntN(len(text))
			_, err := scan(narrow, text[:cut], 1+r.IntN(7), 1+r.IntN(7))
			require.NoError(t, err, "%q", text[:cut])
		}
		require.NotEqual(t, errShort, verdict, "%q", text)
		compare(t, text, want, verdict, 1+r.IntN(9), 1+r.IntN(3))
		text[r.IntN(len(text))] = "\r\n0123456789-?$*%>|;.x"[r.IntN(21)]
		want, verdict = judge(narrow, text)
		switch verdict {
		case errBad:
			bad++
		case errShort:
			short++
		}
		compare(t, text, want, verdict, 1+r.IntN(9), 1+r.IntN(3))
	}
	assert.Greater(t, good, 50_000)
	assert.Greater(t, bad, 50_000)
	assert.Greater(t, short, 5_000)
}

// compare wants the verdict of the oracle, however the stream is cut. What the oracle has not seen the end of may be
// objected to already.
func compare(t *testing.T, stream []byte, want []int, verdict error, pieces ...int) {
	t.Helper()
	whole, first := scan(narrow, stream, len(stream)+1)
	cut, second := scan(narrow, stream, pieces...)
	if (first == nil) != (second == nil) || fmt.Sprint(whole) != fmt.Sprint(cut) {
		t.Fatalf("%q: whole %v %v, in pieces of %v %v %v", stream, whole, first, pieces, cut, second)
	}
	if verdict == errBad && first == nil || verdict == nil && first != nil {
		t.Fatalf("%q: %v, the oracle says %v", stream, first, verdict)
	}
	if fmt.Sprint(whole) != fmt.Sprint(want) {
		t.Fatalf("%q: replies end at %v, the oracle says %v", stream, whole, want)
	}
}

func FuzzScanner(f *testing.F) {
	r := rand.New(rand.NewPCG(3, 4))
	for range 100 {
		var stream bytes.Buffer
		generate(r, &stream, 0)
		f.Add(stream.Bytes(), uint8(r.IntN(8)), uint8(r.IntN(8)))
	}
	f.Add([]byte("*9223372036854775807\r\n"), uint8(1), uint8(2))
	f.Add([]byte("$-5\r\n"), uint8(1), uint8(2))
	f.Add([]byte("$?\r\n;-4\r\n"), uint8(1), uint8(2))
	f.Fuzz(func(t *testing.T, stream []byte, one, two uint8) {
		if len(stream) == 0 {
			return
		}
		want, verdict := judge(narrow, stream)
		compare(t, stream, want, verdict, 1+int(one), 1+int(two))
	})
}

// TestNothingIsAllocated reads a reply to a script, and one with everything.
func TestNothingIsAllocated(t *testing.T) {
	var s Scanner
	s.Bounds = Bounds{Text: 1 << 16, Elements: 1024, Depth: 8, Total: 4096, Size: 1 << 18}
	var c Commands
	reply := []byte("$32\r\n" + strings.Repeat("x", 32) + "\r\n")
	all := []byte("|1\r\n+a\r\n:1\r\n*?\r\n$?\r\n;4\r\nHell\r\n;0\r\n%1\r\n#t\r\n,1.5\r\n.\r\n>2\r\n+message\r\n_\r\n")
	command := []byte("*2\r\n$4\r\nROLE\r\n$1\r\n3\r\n")
	assert.Zero(t, testing.AllocsPerRun(100, func() {
		for _, stream := range [][]byte{reply, all, reply} {
			for len(stream) > 0 {
				n, _, err := s.Next(stream)
				if err != nil {
					t.Fatal(err)
				}
				stream = stream[n:]
			}
		}
		if _, ended, err := c.Next(command); err != nil || !ended {
			t.Fatal(err)
		}
	}))
}

// TestMessages tells what is kept of replies.
func TestMessages(t *testing.T) {
	type message struct {
		kind          byte
		first, second string
		elements      int
		aggregate     bool
		words         int
	}
	for stream, want := range map[string]message{
		"+PONG\r\n":                              {kind: '+', first: "PONG", words: 1},
		"$?\r\n;2\r\nQU\r\n;4\r\nEUED\r\n;0\r\n": {kind: '$', first: "QUEUED", words: 1},
		":5\r\n":                                 {kind: ':', words: 1},
		"*-1\r\n":                                {kind: '*', words: 1},
		"*0\r\n":                                 {kind: '*', aggregate: true, words: 1},
		"%1\r\n+a\r\n+b\r\n":                     {kind: '%', first: "a", second: "b", elements: 2, aggregate: true, words: 1},
		">3\r\n+message\r\n$2\r\n+x\r\n$5\r\na b c\r\n": {kind: '>', first: "message", second: "+x", elements: 3, aggregate: true, words: 3},
		"|1\r\n+no\r\n+no\r\n*2\r\n*1\r\n+no\r\n+b\r\n": {kind: '*', second: "b", elements: 2, aggregate: true, words: 1},
		"*?\r\n|1\r\n+no\r\n+no\r\n+a\r\n.\r\n":         {kind: '*', first: "a", elements: 1, aggregate: true, words: 1},
	} {
		for piece := 1; piece < 60; piece++ {
			s := Scanner{Bounds: Bounds{Text: 100, Elements: 100, Depth: 8, Total: 100, Size: 1000}}
			for range 2 { // what was kept of one reply does not show in the next
				rest := []byte(stream)
				for ended := false; !ended; {
					n, done, err := s.Next(rest[:min(piece, len(rest))])
					require.NoError(t, err)
					rest, ended = rest[n:], done
				}
				m := &s.Message
				assert.Equal(t, want, message{m.Kind, string(m.First()), string(m.Second()), m.Elements, m.Aggregate, m.Words},
					"%q in pieces of %d", stream, piece)
			}
		}
	}
}

// TestCommands counts commands however they are cut, and tells their first words.
func TestCommands(t *testing.T) {
	stream := []byte("*1\r\n$4\r\nPING\r\n*3\r\n$8\r\nSENTINEL\r\n$23\r\nGET-MASTER-ADDR-BY-NAME\r\n$2\r\n\r\n\r\n*2\r\n$0\r\n\r\n$40\r\n" +
		strings.Repeat("y", 40) + "\r\n")
	for piece := 1; piece <= len(stream); piece++ {
		var c Commands
		var got []string
		for rest := stream; len(rest) > 0; {
			n, ended, err := c.Next(rest[:min(piece, len(rest))])
			require.NoError(t, err)
			if rest = rest[n:]; ended {
				got = append(got, fmt.Sprintf("%d %s %s", c.Command.Args, c.Command.Name(), c.Command.Word()))
			}
		}
		assert.Equal(t, []string{"1 PING ", "3 SENTINEL GET-MASTER-ADDR-BY-NAME", "2  " + strings.Repeat("y", 32)}, got, "in pieces of %d", piece)
	}
	for _, bad := range []string{"PING\r\n", "*0\r\n", "*1\r\n+PING\r\n", "*x\r\n", "*1\r\n$-1\r\n", "*99999999999999\r\n"} {
		_, _, err := new(Commands).Next([]byte(bad))
		assert.ErrorIs(t, err, ErrForm, bad)
	}
}
